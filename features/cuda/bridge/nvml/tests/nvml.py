"""What a script reads by nvidia-ml-py."""

import os, threading
from pynvml import *


def fails(act, *arguments):
    try:
        return act(*arguments)
    except NVMLError as error:
        return type(error).__name__


print("before:", fails(nvmlDeviceGetCount))
nvmlInit()
print("driver:", nvmlSystemGetDriverVersion(), nvmlSystemGetNVMLVersion(), nvmlSystemGetCudaDriverVersion())
for index in range(nvmlDeviceGetCount()):
    device = nvmlDeviceGetHandleByIndex(index)
    uuid, pci, memory = nvmlDeviceGetUUID(device), nvmlDeviceGetPciInfo(device), nvmlDeviceGetMemoryInfo(device)
    print("device:", nvmlDeviceGetIndex(device), nvmlDeviceGetName(device), uuid, pci.busId, pci.busIdLegacy, pci.domain, pci.bus, pci.device)
    print("memory:", memory.total, memory.free, memory.used, nvmlDeviceGetMemoryInfo(device, nvmlMemory_v2).used)
    print("facts:", nvmlDeviceGetCudaComputeCapability(device), nvmlDeviceGetArchitecture(device), nvmlDeviceGetBrand(device), nvmlDeviceGetComputeMode(device))
    same = [nvmlDeviceGetHandleByUUID(uuid), nvmlDeviceGetHandleByPciBusId(pci.busId), nvmlDeviceGetHandleByPciBusId(pci.busIdLegacy)]
    others = [nvmlDeviceGetHandleByIndex(other) for other in range(nvmlDeviceGetCount())]
    print("peers:", [[nvmlDeviceGetP2PStatus(device, other, index) for index in range(3)] for other in others], fails(nvmlDeviceGetP2PStatus, device, device, 5))
    print("found:", [nvmlDeviceGetIndex(found) for found in same])
    print("processes:", [process.pid == os.getpid() for process in nvmlDeviceGetComputeRunningProcesses(device)])
    for act in nvmlDeviceGetUtilizationRates, nvmlDeviceGetPowerUsage, nvmlDeviceGetPersistenceMode, nvmlDeviceGetMinorNumber:
        print(act.__name__, fails(act, device))
print("none:", fails(nvmlDeviceGetHandleByUUID, "GPU-0"), fails(nvmlDeviceGetHandleByIndex, 16), fails(nvmlDeviceGetHandleByPciBusId, "x"))
threads = [threading.Thread(target=nvmlInit) for _ in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
[nvmlShutdown() for _ in range(5)]
print("after:", fails(nvmlShutdown), fails(nvmlDeviceGetCount))
