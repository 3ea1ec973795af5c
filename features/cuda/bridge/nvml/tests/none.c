/* An NVML without a driver. */
int nvmlInit_v2(void) { return 9; }
int nvmlDeviceGetHandleByUUID(void) { return 1; }
