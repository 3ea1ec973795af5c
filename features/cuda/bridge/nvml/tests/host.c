/* An NVML of two devices with links between them and to a switch, as a server may have NVIDIA's: what the bridge's tells is what this does. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { OK, UNINITIALIZED, INVALID, UNSUPPORTED, NOT_FOUND = 6, SHORT = 7, VERSION = 25 };
static int started;
static char handles[2];
#define KNOWN(device, ...)                                                                             \
    int at = (int)((char *)(device) - handles);                                                        \
    if (!started) return UNINITIALIZED;                                                                \
    if (at < 0 || at > 1 || !(__VA_ARGS__)) return INVALID;

int nvmlInit_v2(void) { return started = 1, OK; }
int nvmlInitWithFlags(unsigned flags) { return flags ? UNSUPPORTED : nvmlInit_v2(); }
int nvmlShutdown(void) { return started = 0, OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = 2, OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { return index < 2 ? *device = &handles[index], OK : INVALID; }

static int text(char *to, unsigned room, const char *text) {
    if (room <= strlen(text)) return SHORT;
    return strcpy(to, text), OK;
}

static const char *uuids[] = {"GPU-766d2d63-7564-612d-6661-6b6500000000", "GPU-766d2d63-7564-612d-6661-6b6500000001"};
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    for (int i = 0; i < 2; i++)
        if (!strcmp(uuid, uuids[i])) return *device = &handles[i], OK;
    return NOT_FOUND;
}

/* Numbers that say which device, and what, they are of. */
#define ONE(name)                                                                                      \
    int name(void *device, unsigned *to) {                                                             \
        KNOWN(device, to)                                                                              \
        return *to = 1000 + 10 * __LINE__ + at, OK;                                                    \
    }
#define TWO(name)                                                                                      \
    int name(void *device, unsigned *to, unsigned *more) {                                             \
        KNOWN(device, to && more)                                                                      \
        return *to = 1000 + 10 * __LINE__ + at, *more = 5, OK;                                         \
    }
#define LONG(name)                                                                                     \
    int name(void *device, unsigned long long *to) {                                                   \
        KNOWN(device, to)                                                                              \
        return *to = (1ull << 40) + 10 * __LINE__ + at, OK;                                            \
    }
#define KIND(name, kinds)                                                                              \
    int name(void *device, unsigned kind, unsigned *to) {                                              \
        KNOWN(device, to && kind < (kinds))                                                            \
        return *to = 1000 + 10 * kind + at, OK;                                                        \
    }
#define KINDS(name)                                                                                    \
    int name(void *device, unsigned kind, unsigned other, unsigned long long *to) {                    \
        KNOWN(device, to && kind < 20 && other < 6)                                                    \
        return *to = (3ull << 33) + 100 * kind + 10 * other + at, OK;                                  \
    }
#define TEXT(name, says)                                                                               \
    int name(void *device, char *to, unsigned room) {                                                  \
        KNOWN(device, to)                                                                              \
        return text(to, room, (says)[at]);                                                             \
    }
#define BYTES(name, len)                                                                               \
    int name(void *device, unsigned char *to) {                                                        \
        KNOWN(device, to)                                                                              \
        for (int i = 0; i < (len); i++) to[i] = (unsigned char)(__LINE__ + i + at);                    \
        return OK;                                                                                     \
    }
#define VERSIONS(name, first, second)                                                                  \
    int name(void *device, unsigned *to) {                                                             \
        KNOWN(device, to)                                                                              \
        if (*to != (first) && *to != (second)) return VERSION;                                         \
        for (unsigned i = 1; i < (*to & 0xffffff) / 4; i++) to[i] = 100 * __LINE__ + i + at;           \
        return OK;                                                                                     \
    }
#define NONE(name)                                                                                     \
    int name(void) { return UNSUPPORTED; }

TEXT(nvmlDeviceGetName, ((const char *[]){"vm-cuda-fake", "vm-cuda-fake"}))
TEXT(nvmlDeviceGetUUID, uuids)
TEXT(nvmlDeviceGetSerial, ((const char *[]){"1650023000001", "1650023000002"}))
TEXT(nvmlDeviceGetBoardPartNumber, ((const char *[]){"900-21010-0000-000", ""}))
TEXT(nvmlDeviceGetVbiosVersion, ((const char *[]){"96.00.68.00.01", "96.00.68.00.02"}))
TEXT(nvmlDeviceGetInforomImageVersion, ((const char *[]){"G520.0200.00.05", "G520.0200.00.06"}))
int nvmlDeviceGetIndex(void *device, unsigned *to) {
    KNOWN(device, to)
    return *to = (unsigned)at, OK;
}
int nvmlDeviceGetInforomVersion(void *device, unsigned kind, char *to, unsigned room) {
    KNOWN(device, to && kind < 3)
    return text(to, room, kind ? "2.1" : "6.16");
}
int nvmlDeviceGetGspFirmwareVersion(void *device, char *to) {
    KNOWN(device, to)
    return strcpy(to, "580.95.05"), OK;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    KNOWN(device, major && minor)
    return *major = 9, *minor = 0, OK;
}
int nvmlDeviceGetComputeMode(void *device, unsigned *to) {
    KNOWN(device, to)
    return *to = 0, OK;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    KNOWN(device, memory)
    return memory[0] = 1 << 30, memory[1] = (3 + (unsigned)at) << 20, memory[2] = memory[0] - memory[1], OK;
}

struct pci {
    char legacy[16];
    unsigned domain, bus, device, ids, subsystem;
    char id[32];
};
static void pci_of(struct pci *pci, unsigned bus, unsigned ids) {
    memset(pci, 0, sizeof *pci);
    pci->bus = bus, pci->ids = ids;
    snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", bus);
    snprintf(pci->id, sizeof pci->id, "00000000:%02X:00.0", bus);
}
/* As the fake driver has them: without numbers of vendor and device. */
int nvmlDeviceGetPciInfo_v3(void *device, struct pci *pci) {
    KNOWN(device, pci)
    return pci_of(pci, 1 + (unsigned)at, 0), OK;
}

/* Links 0 to 3 go to the other device, 4 and 5 to a switch, and the sixth is down. */
enum { LINKS = 18, TO_OTHER = 4, UP = 6 };
int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *to) {
    KNOWN(device, to && link < LINKS)
    return *to = link < UP, OK;
}
static int remote(void *device, unsigned link, struct pci *pci) {
    KNOWN(device, pci && link < LINKS)
    if (link >= UP) return UNSUPPORTED;
    return link < TO_OTHER ? pci_of(pci, 2 - (unsigned)at, 0x233010de) : pci_of(pci, 0x0a, 0x22a310de), OK;
}
int nvmlDeviceGetNvLinkRemotePciInfo(void *device, unsigned link, struct pci *pci) { return remote(device, link, pci); }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, struct pci *pci) { return remote(device, link, pci); }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, unsigned *to) {
    KNOWN(device, to && link < LINKS)
    return link < UP ? *to = link < TO_OTHER ? 0 : 2, OK : UNSUPPORTED;
}
int nvmlDeviceGetNvLinkCapability(void *device, unsigned link, unsigned capability, unsigned *to) {
    KNOWN(device, to && link < LINKS && capability < 6)
    return *to = link < UP && capability < 3, OK;
}
int nvmlDeviceGetP2PStatus(void *device, void *other, unsigned kind, unsigned *to) {
    KNOWN(device, to && kind < 5 && ((char *)other == handles || (char *)other == handles + 1))
    return *to = kind < 3 ? 0 : 5, OK;
}
int nvmlDeviceGetTopologyCommonAncestor(void *device, void *other, unsigned *to) {
    KNOWN(device, to)
    return *to = (char *)other == handles + at ? 0 : 30, OK;
}
int nvmlDeviceOnSameBoard(void *device, void *other, int *to) {
    KNOWN(device, to)
    return *to = (char *)other == handles + at, OK;
}

struct field {
    unsigned id, scope;
    long long time, latency;
    unsigned type, result;
    unsigned long long value;
};
int nvmlDeviceGetFieldValues(void *device, int count, struct field *fields) {
    enum { LINK_STATE = 165 };
    KNOWN(device, fields && count > 0)
    for (int i = 0; i < count; i++) {
        struct field *field = &fields[i];
        if (field->id == LINK_STATE && field->scope < LINKS) {
            field->result = OK, field->type = 1, field->value = field->scope < UP;
            continue;
        }
        field->result = field->id % 3 && field->scope < LINKS ? OK : UNSUPPORTED, field->time = 5;
        if (field->result == OK) field->type = field->id % 2, field->value = (1ull << 34) + 100 * field->id + field->scope;
    }
    return OK;
}

static int list(unsigned *count, unsigned *to, unsigned there, unsigned step) {
    unsigned room = *count;
    *count = there;
    if (!to || room < there) return to || room ? SHORT : OK;
    for (unsigned i = 0; i < there; i++) to[i] = 2619 - step * i;
    return OK;
}
int nvmlDeviceGetSupportedMemoryClocks(void *device, unsigned *count, unsigned *to) {
    KNOWN(device, count)
    return list(count, to, 3, 1000);
}
int nvmlDeviceGetSupportedGraphicsClocks(void *device, unsigned memory, unsigned *count, unsigned *to) {
    KNOWN(device, count)
    return memory == 2619 ? list(count, to, 120, 15) : NOT_FOUND;
}
int nvmlDeviceGetSamples(void *device, int kind, unsigned long long since, unsigned *type, unsigned *count, unsigned long long (*to)[2]) {
    KNOWN(device, type && count && kind < 3 && since < 1ull << 60)
    unsigned room = *count;
    *type = 1, *count = 100;
    if (to && room < 100) return SHORT;
    for (int i = 0; to && i < 100; i++) to[i][0] = 7 + (unsigned)i, to[i][1] = (unsigned)kind;
    return OK;
}
int nvmlDeviceGetSupportedPerformanceStates(void *device, unsigned *to, unsigned len) {
    KNOWN(device, to && len >= 8)
    memset(to, 0xff, len);
    return to[0] = 0, to[1] = 2, OK;
}
int nvmlDeviceGetThermalSettings(void *device, unsigned sensor, unsigned *to) {
    KNOWN(device, to && sensor < 16)
    return memset(to, 1, 64), OK;
}
int nvmlDeviceGetViolationStatus(void *device, unsigned policy, unsigned long long *to) {
    KNOWN(device, to && policy < 6)
    return to[0] = 1, to[1] = policy, OK;
}
int nvmlDeviceGetMinMaxClockOfPState(void *device, unsigned kind, unsigned state, unsigned *least, unsigned *most) {
    KNOWN(device, least && most && kind < 4)
    return *least = 210 + state, *most = 1980 + kind, OK;
}
int nvmlDeviceGetDetailedEccErrors(void *device, unsigned kind, unsigned counter, unsigned long long *to) {
    KNOWN(device, to && kind < 2 && counter < 2)
    for (unsigned i = 0; i < 4; i++) to[i] = kind + counter + i;
    return OK;
}
int nvmlDeviceGetMemoryErrorCounter(void *device, unsigned kind, unsigned counter, unsigned place, unsigned long long *to) {
    KNOWN(device, to && place < 7)
    return *to = 100 * kind + 10 * counter + place, OK;
}
int nvmlDeviceGetRemappedRows(void *device, unsigned *a, unsigned *b, unsigned *c, unsigned *d) {
    KNOWN(device, a && b && c && d)
    return *a = 1, *b = 2, *c = 3, *d = 4, OK;
}
int nvmlDeviceGetTemperature(void *device, unsigned sensor, unsigned *to) {
    KNOWN(device, to && sensor == 0)
    return *to = 41 + (unsigned)at, OK;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *to) {
    KNOWN(device, to)
    return *to = 71234 + (unsigned)at, OK;
}
/* A device that does not answer. */
int nvmlDeviceGetNvLinkUtilizationControl(void *device, unsigned link, unsigned counter, unsigned *to) {
    KNOWN(device, to && link < LINKS && counter < 2)
    for (;;) pause();
}

int nvmlSystemGetDriverVersion(char *to, unsigned room) { return text(to, room, "580.95.05"); }
int nvmlSystemGetNVMLVersion(char *to, unsigned room) { return text(to, room, "13.580.95.05"); }
int nvmlSystemGetCudaDriverVersion_v2(int *to) { return *to = 13000, OK; }
int nvmlSystemGetConfComputeState(unsigned *to) { return to[0] = 1, to[1] = 0, to[2] = 1, OK; }
int nvmlSystemGetConfComputeSettings(unsigned *to) {
    if (*to != 0x01000014) return VERSION;
    return to[1] = 1, to[2] = 0, to[3] = 1, to[4] = 2, OK;
}
NONE(nvmlSystemGetConfComputeCapabilities)
NONE(nvmlSystemGetConfComputeGpusReadyState)
int nvmlSystemGetDriverBranch(unsigned *to, unsigned room) { return *to == 0x01000054 ? text((char *)(to + 1), room, "r580_00") : VERSION; }
int nvmlSystemGetNvlinkBwMode(unsigned *to) { return *to = 0, OK; }
ONE(nvmlDeviceGetBrand)
ONE(nvmlDeviceGetArchitecture)
ONE(nvmlDeviceGetPersistenceMode)
ONE(nvmlDeviceGetMinorNumber)
ONE(nvmlDeviceGetBoardId)
ONE(nvmlDeviceGetInforomConfigurationChecksum)
ONE(nvmlDeviceGetMultiGpuBoard)
ONE(nvmlDeviceGetModuleId)
ONE(nvmlDeviceGetBusType)
ONE(nvmlDeviceGetIrqNum)
ONE(nvmlDeviceGetNumGpuCores)
ONE(nvmlDeviceGetMemoryBusWidth)
ONE(nvmlDeviceGetPowerSource)
ONE(nvmlDeviceGetDisplayMode)
ONE(nvmlDeviceGetDisplayActive)
ONE(nvmlDeviceGetMaxMigDeviceCount)
ONE(nvmlDeviceIsMigDeviceHandle)
ONE(nvmlDeviceGetAccountingMode)
ONE(nvmlDeviceGetC2cModeInfoV)
ONE(nvmlDeviceGetMaxPcieLinkGeneration)
ONE(nvmlDeviceGetGpuMaxPcieLinkGeneration)
ONE(nvmlDeviceGetMaxPcieLinkWidth)
ONE(nvmlDeviceGetPcieLinkMaxSpeed)
ONE(nvmlDeviceGetCurrPcieLinkGeneration)
ONE(nvmlDeviceGetCurrPcieLinkWidth)
ONE(nvmlDeviceGetPcieSpeed)
ONE(nvmlDeviceGetPcieReplayCounter)
ONE(nvmlDeviceGetNumFans)
ONE(nvmlDeviceGetFanSpeed)
ONE(nvmlDeviceGetPowerManagementMode)
ONE(nvmlDeviceGetPowerManagementLimit)
ONE(nvmlDeviceGetPowerManagementDefaultLimit)
ONE(nvmlDeviceGetEnforcedPowerLimit)
ONE(nvmlDeviceGetPerformanceState)
ONE(nvmlDeviceGetPowerState)
ONE(nvmlDeviceGetAdaptiveClockInfoStatus)
ONE(nvmlDeviceGetDefaultEccMode)
ONE(nvmlDeviceGetRetiredPagesPendingStatus)
ONE(nvmlDeviceGetGpcClkVfOffset)
ONE(nvmlDeviceGetMemClkVfOffset)
TWO(nvmlDeviceGetGpcClkMinMaxVfOffset)
TWO(nvmlDeviceGetMemClkMinMaxVfOffset)
TWO(nvmlDeviceGetGspFirmwareMode)
TWO(nvmlDeviceGetMigMode)
TWO(nvmlDeviceGetMinMaxFanSpeed)
TWO(nvmlDeviceGetPowerManagementLimitConstraints)
TWO(nvmlDeviceGetEncoderUtilization)
TWO(nvmlDeviceGetDecoderUtilization)
TWO(nvmlDeviceGetJpgUtilization)
TWO(nvmlDeviceGetOfaUtilization)
TWO(nvmlDeviceGetAutoBoostedClocksEnabled)
TWO(nvmlDeviceGetEccMode)
LONG(nvmlDeviceGetTotalEnergyConsumption)
LONG(nvmlDeviceGetCurrentClocksThrottleReasons)
LONG(nvmlDeviceGetCurrentClocksEventReasons)
LONG(nvmlDeviceGetSupportedClocksThrottleReasons)
LONG(nvmlDeviceGetSupportedClocksEventReasons)
KIND(nvmlDeviceGetPcieThroughput, 2)
KIND(nvmlDeviceGetNvLinkVersion, LINKS)
KIND(nvmlDeviceGetTemperatureThreshold, 8)
KIND(nvmlDeviceGetFanSpeed_v2, 2)
KIND(nvmlDeviceGetEncoderCapacity, 3)
KIND(nvmlDeviceGetClockInfo, 4)
KIND(nvmlDeviceGetMaxClockInfo, 4)
KIND(nvmlDeviceGetApplicationsClock, 4)
KIND(nvmlDeviceGetDefaultApplicationsClock, 4)
KIND(nvmlDeviceGetMaxCustomerBoostClock, 4)
KIND(nvmlDeviceGetFanControlPolicy_v2, 2)
KIND(nvmlDeviceGetTargetFanSpeed, 2)
KINDS(nvmlDeviceGetNvLinkErrorCounter)
KINDS(nvmlDeviceGetTotalEccErrors)
BYTES(nvmlDeviceGetAttributes_v2, 40)
BYTES(nvmlDeviceGetGpuFabricInfo, 28)
BYTES(nvmlDeviceGetDynamicPstatesInfo, 132)
BYTES(nvmlDeviceGetUtilizationRates, 8)
BYTES(nvmlDeviceGetBAR1MemoryInfo, 24)
BYTES(nvmlDeviceGetRowRemapperHistogram, 20)
VERSIONS(nvmlDeviceGetCapabilities, 0x01000008, 0)
VERSIONS(nvmlDeviceGetAddressingMode, 0x01000008, 0)
VERSIONS(nvmlDeviceGetPdi, 0x01000010, 0)
VERSIONS(nvmlDeviceGetPlatformInfo, 0x0100002c, 0x0200002c)
VERSIONS(nvmlDeviceGetNvLinkInfo, 0x01000008, 0x0200064c)
VERSIONS(nvmlDeviceGetNvlinkBwMode, 0x0100000c, 0)
VERSIONS(nvmlDeviceGetNvlinkSupportedBwModes, 0x0100001c, 0)
VERSIONS(nvmlDeviceGetGpuFabricInfoV, 0x02000024, 0x03000028)
VERSIONS(nvmlDeviceGetTemperatureV, 0x0100000c, 0)
VERSIONS(nvmlDeviceGetMarginTemperature, 0x01000008, 0)
VERSIONS(nvmlDeviceGetSramEccErrorStatus, 0x01000068, 0)
int nvmlDeviceGetClock(void *device, unsigned kind, unsigned id, unsigned *to) {
    KNOWN(device, to && kind < 4 && id < 4)
    return *to = 345 + 10 * kind + id, OK;
}
int nvmlDeviceGetDramEncryptionMode(void *device, unsigned *now, unsigned *then) {
    KNOWN(device, now && then)
    if (*now != 0x01000008 || *then != 0x01000008) return VERSION;
    return now[1] = 1, then[1] = 2, OK;
}
int nvmlDeviceGetNvLinkUtilizationCounter(void *device, unsigned link, unsigned counter, unsigned long long *in, unsigned long long *out) {
    KNOWN(device, in && out && link < LINKS && counter < 2)
    return *in = 1ull << 40, *out = counter, OK;
}
VERSIONS(nvmlDeviceGetPerformanceModes, 0x01000804, 0)
VERSIONS(nvmlDeviceGetCurrentClockFreqs, 0x01000804, 0)
VERSIONS(nvmlDeviceGetCoolerInfo, 0x01000010, 0)
VERSIONS(nvmlDeviceGetFanSpeedRPM, 0x0100000c, 0)
VERSIONS(nvmlDeviceGetClockOffsets, 0x01000018, 0)
VERSIONS(nvmlDeviceGetRepairStatus, 0x0100000c, 0)
BYTES(nvmlDeviceGetAttributes, 40)
NONE(nvmlDeviceGetDriverModel_v2)
NONE(nvmlDeviceGetDriverModel)
NONE(nvmlDeviceGetGpuOperationMode)
NONE(nvmlDeviceGetVirtualizationMode)
