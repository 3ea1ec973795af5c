/* As much of NVIDIA's own NVML as the bridge's server asks for. */
#include <string.h>

int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = device;
    return strcmp(uuid, "GPU-766d2d63-7564-612d-6661-6b6500000000") ? 6 : 0;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long memory[3]) {
    (void)device;
    memory[0] = 1 << 30, memory[1] = 3 << 20, memory[2] = memory[0] - memory[1];
    return 0;
}
