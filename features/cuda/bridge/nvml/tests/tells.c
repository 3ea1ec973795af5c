/* Prints what NVML tells that stays the same, and of what moves whether it is in its range: what it prints through the bridge is what it prints without. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *nvml;
static void *devices[64];
static unsigned count;
/* Of a function's arguments, where the first is that a row tells of: behind the device, if it takes one. */
static int first;

/* A function, and what it takes behind a device, in words: `p` another device, `iN` each number below N, `cN` that number, `4` and `8` a number of so many
   bytes that is written, `t` a text, `bN` so many bytes, `vX` a structure of that version, `nN` a list of at most N numbers. What moves has the least and
   the most that it may be; of what is longer than a number only the result is printed then. */
struct row {
    const char *name, *takes;
    uint64_t least, most;
};

#define ANY 0, UINT64_MAX
static const struct row rows[] = {
    {"nvmlDeviceGetName", "t"}, {"nvmlDeviceGetUUID", "t"}, {"nvmlDeviceGetIndex", "4"}, {"nvmlDeviceGetSerial", "t"},
    {"nvmlDeviceGetBrand", "4"}, {"nvmlDeviceGetArchitecture", "4"}, {"nvmlDeviceGetCudaComputeCapability", "4 4"},
    {"nvmlDeviceGetComputeMode", "4"}, {"nvmlDeviceGetPersistenceMode", "4"}, {"nvmlDeviceGetMinorNumber", "4"}, {"nvmlDeviceGetBoardId", "4"},
    {"nvmlDeviceGetBoardPartNumber", "t"}, {"nvmlDeviceGetVbiosVersion", "t"}, {"nvmlDeviceGetInforomImageVersion", "t"},
    {"nvmlDeviceGetInforomVersion", "i4 t"}, {"nvmlDeviceGetInforomConfigurationChecksum", "4"}, {"nvmlDeviceGetGspFirmwareVersion", "b64"},
    {"nvmlDeviceGetGspFirmwareMode", "4 4"}, {"nvmlDeviceGetMultiGpuBoard", "4"}, {"nvmlDeviceGetModuleId", "4"}, {"nvmlDeviceGetBusType", "4"},
    {"nvmlDeviceGetIrqNum", "4"}, {"nvmlDeviceGetNumGpuCores", "4"}, {"nvmlDeviceGetMemoryBusWidth", "4"}, {"nvmlDeviceGetPowerSource", "4"},
    {"nvmlDeviceGetDisplayMode", "4"}, {"nvmlDeviceGetDisplayActive", "4"}, {"nvmlDeviceGetDriverModel", "4 4"}, {"nvmlDeviceGetGpuOperationMode", "4 4"},
    {"nvmlDeviceGetMigMode", "4 4"}, {"nvmlDeviceGetMaxMigDeviceCount", "4"}, {"nvmlDeviceIsMigDeviceHandle", "4"}, {"nvmlDeviceGetAttributes_v2", "b40"},
    {"nvmlDeviceGetVirtualizationMode", "4"}, {"nvmlDeviceGetAccountingMode", "4"}, {"nvmlDeviceGetCapabilities", "v01000008"},
    {"nvmlDeviceGetAddressingMode", "v01000008"}, {"nvmlDeviceGetPdi", "v01000010"}, {"nvmlDeviceGetPlatformInfo", "v0100002c"},
    {"nvmlDeviceGetPlatformInfo", "v0200002c"}, {"nvmlDeviceGetC2cModeInfoV", "4"},
    {"nvmlDeviceGetPciInfo_v3", "b68"}, {"nvmlDeviceGetMaxPcieLinkGeneration", "4"},
    {"nvmlDeviceGetGpuMaxPcieLinkGeneration", "4"}, {"nvmlDeviceGetMaxPcieLinkWidth", "4"}, {"nvmlDeviceGetPcieLinkMaxSpeed", "4"},
    {"nvmlDeviceGetCurrPcieLinkGeneration", "4", 1, 7}, {"nvmlDeviceGetCurrPcieLinkWidth", "4", 1, 16}, {"nvmlDeviceGetPcieSpeed", "4", 1000, 128000},
    {"nvmlDeviceGetPcieThroughput", "i2 4", 0, 200000000}, {"nvmlDeviceGetPcieReplayCounter", "4"},
    /* How devices are connected. */
    {"nvmlDeviceGetNvLinkState", "i20 4"}, {"nvmlDeviceGetNvLinkVersion", "i20 4"}, {"nvmlDeviceGetNvLinkCapability", "i20 i6 4"},
    {"nvmlDeviceGetNvLinkRemotePciInfo", "i20 b68"}, {"nvmlDeviceGetNvLinkRemotePciInfo_v2", "i20 b68"},
    {"nvmlDeviceGetNvLinkRemoteDeviceType", "i20 4"}, {"nvmlDeviceGetNvLinkErrorCounter", "i20 i4 8"},
    {"nvmlDeviceGetNvLinkInfo", "v01000008"}, {"nvmlDeviceGetNvlinkBwMode", "v0100000c"}, {"nvmlDeviceGetNvlinkSupportedBwModes", "v0100001c"},
    {"nvmlDeviceGetGpuFabricInfo", "b28"}, {"nvmlDeviceGetGpuFabricInfoV", "v02000024"}, {"nvmlDeviceGetGpuFabricInfoV", "v03000028"},
    {"nvmlDeviceGetP2PStatus", "p i5 4"}, {"nvmlDeviceGetTopologyCommonAncestor", "p 4"}, {"nvmlDeviceOnSameBoard", "p 4"},
    /* How a device is. */
    {"nvmlDeviceGetTemperature", "c0 4", 1, 120}, {"nvmlDeviceGetTemperatureV", "v0100000c", ANY}, {"nvmlDeviceGetTemperatureThreshold", "i8 4"},
    {"nvmlDeviceGetMarginTemperature", "v01000008", ANY}, {"nvmlDeviceGetThermalSettings", "c15 b64", ANY}, {"nvmlDeviceGetNumFans", "4"},
    {"nvmlDeviceGetFanSpeed", "4", 0, 200}, {"nvmlDeviceGetFanSpeed_v2", "c0 4", 0, 200}, {"nvmlDeviceGetMinMaxFanSpeed", "4 4"},
    {"nvmlDeviceGetPowerUsage", "4", 1000, 2000000}, {"nvmlDeviceGetPowerManagementMode", "4"}, {"nvmlDeviceGetPowerManagementLimit", "4"},
    {"nvmlDeviceGetPowerManagementDefaultLimit", "4"}, {"nvmlDeviceGetPowerManagementLimitConstraints", "4 4"}, {"nvmlDeviceGetEnforcedPowerLimit", "4"},
    {"nvmlDeviceGetTotalEnergyConsumption", "8", 1, UINT64_MAX}, {"nvmlDeviceGetPerformanceState", "4", 0, 15}, {"nvmlDeviceGetPowerState", "4", 0, 15},
    {"nvmlDeviceGetSupportedPerformanceStates", "b64 c64"}, {"nvmlDeviceGetDynamicPstatesInfo", "b132", ANY},
    {"nvmlDeviceGetUtilizationRates", "b8", ANY}, {"nvmlDeviceGetEncoderUtilization", "4 4", ANY}, {"nvmlDeviceGetDecoderUtilization", "4 4", ANY},
    {"nvmlDeviceGetJpgUtilization", "4 4", ANY}, {"nvmlDeviceGetOfaUtilization", "4 4", ANY}, {"nvmlDeviceGetEncoderCapacity", "i3 4", 0, 100},
    {"nvmlDeviceGetCurrentClocksThrottleReasons", "8", ANY}, {"nvmlDeviceGetCurrentClocksEventReasons", "8", ANY},
    {"nvmlDeviceGetSupportedClocksThrottleReasons", "8"}, {"nvmlDeviceGetSupportedClocksEventReasons", "8"},
    {"nvmlDeviceGetViolationStatus", "i6 b16", ANY}, {"nvmlDeviceGetBAR1MemoryInfo", "b24", ANY}, {"nvmlDeviceGetMemoryInfo", "b24", ANY},
    {"nvmlDeviceGetClockInfo", "i4 4", 0, 20000}, {"nvmlDeviceGetMaxClockInfo", "i4 4"}, {"nvmlDeviceGetClock", "i4 c0 4", 0, 20000},
    {"nvmlDeviceGetApplicationsClock", "i4 4"}, {"nvmlDeviceGetDefaultApplicationsClock", "i4 4"}, {"nvmlDeviceGetMaxCustomerBoostClock", "i4 4"},
    {"nvmlDeviceGetAutoBoostedClocksEnabled", "4 4"}, {"nvmlDeviceGetAdaptiveClockInfoStatus", "4"}, {"nvmlDeviceGetSupportedMemoryClocks", "n16"},
    {"nvmlDeviceGetSupportedMemoryClocks", "n1"}, {"nvmlDeviceGetMinMaxClockOfPState", "i4 c0 4 4"},
    {"nvmlDeviceGetEccMode", "4 4"}, {"nvmlDeviceGetDefaultEccMode", "4"}, {"nvmlDeviceGetTotalEccErrors", "i2 i2 8"},
    {"nvmlDeviceGetDetailedEccErrors", "i2 i2 b32"}, {"nvmlDeviceGetMemoryErrorCounter", "i2 i2 i7 8"}, {"nvmlDeviceGetSramEccErrorStatus", "v01000068"},
    {"nvmlDeviceGetRemappedRows", "4 4 4 4"}, {"nvmlDeviceGetRowRemapperHistogram", "b20"}, {"nvmlDeviceGetRetiredPagesPendingStatus", "4"},
    {"nvmlDeviceGetDriverModel_v2", "4 4"}, {"nvmlDeviceGetAttributes", "b40"}, {"nvmlDeviceGetNvLinkUtilizationCounter", "i20 i2 8 8", ANY},
    {"nvmlDeviceGetPerformanceModes", "v01000804"}, {"nvmlDeviceGetCurrentClockFreqs", "v01000804", ANY}, {"nvmlDeviceGetCoolerInfo", "v01000010", ANY},
    {"nvmlDeviceGetFanControlPolicy_v2", "i2 4"}, {"nvmlDeviceGetFanSpeedRPM", "v0100000c", ANY}, {"nvmlDeviceGetTargetFanSpeed", "c0 4", 0, 200},
    {"nvmlDeviceGetClockOffsets", "v01000018"}, {"nvmlDeviceGetGpcClkMinMaxVfOffset", "4 4"}, {"nvmlDeviceGetMemClkMinMaxVfOffset", "4 4"},
    {"nvmlDeviceGetGpcClkVfOffset", "4"}, {"nvmlDeviceGetMemClkVfOffset", "4"}, {"nvmlDeviceGetDramEncryptionMode", "v01000008 v01000008"},
    {"nvmlDeviceGetRepairStatus", "v0100000c"},
    /* What is wrong. */
    {"nvmlDeviceGetNvLinkState", "c60 4"}, {"nvmlDeviceGetNvLinkState", "c4000000000 4"}, {"nvmlDeviceGetClockInfo", "c9 4"},
    {"nvmlDeviceGetTemperature", "c0 c0"}, {"nvmlDeviceGetNvLinkRemotePciInfo_v2", "c0 c0"}, {"nvmlDeviceGetTemperatureV", "v05000123"},
};

static void print_bytes(const unsigned char *bytes, size_t len) {
    for (size_t i = 0; i < len; i++) {
        int letter = bytes[i] > ' ' && bytes[i] < 127 && bytes[i] != '\\';
        letter ? putchar(bytes[i]) : printf("\\%02x", bytes[i]);
    }
}

/* Calls a function with what its arguments are so far, once for each number that the next may be. */
static void call(const struct row *row, const char *takes, uintptr_t *words, int at, const char *said) {
    static _Alignas(8) unsigned char memory[6][4096];
    char more[256];
    char kind = *takes;
    const char *behind = strchr(takes, ' ');
    behind = behind ? behind + 1 : takes + strlen(takes);
    unsigned char *place = memory[at % 6];
    if (kind == 'i' || kind == 'p') {
        unsigned most = kind == 'p' ? count : strtoul(takes + 1, NULL, 10);
        for (unsigned i = 0; i < most; i++) {
            words[at] = kind == 'p' ? (uintptr_t)devices[i] : i;
            snprintf(more, sizeof more, "%s %u", said, i);
            call(row, behind, words, at + 1, more);
        }
        return;
    }
    if (kind) {
        words[at] = kind == 'c' ? strtoull(takes + 1, NULL, 10) : (uintptr_t)place;
        memset(place, 0, sizeof memory[0]);
        if (kind == 'v') *(unsigned *)place = strtoul(takes + 1, NULL, 16);
        if (kind == 't') words[++at] = 96;
        if (kind == 'n') {
            *(unsigned *)place = strtoul(takes + 1, NULL, 10);
            words[++at] = (uintptr_t)(place + 8);
        }
        call(row, behind, words, at + 1, said);
        return;
    }
    int (*function)(uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t) =
        (int (*)(uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t))dlsym(nvml, row->name);
    if (!function) {
        printf("%s: not there\n", row->name);
        return;
    }
    int code = function(words[0], words[1], words[2], words[3], words[4], words[5]);
    printf("%s%s: %d", row->name, said, code);
    at = first;
    for (const char *next = row->takes; !code && *next; at += 1 + (*next == 't' || *next == 'n'), next = strchr(next, ' ') ? strchr(next, ' ') + 1 : "") {
        unsigned char *place = memory[at % 6];
        uint64_t number = *next == '4' ? *(unsigned *)place : *(uint64_t *)place;
        if (*next == 'i' || *next == 'c' || *next == 'p') continue;
        putchar(' ');
        if (row->most && *next != '4' && *next != '8')
            printf("something");
        else if (row->most && number >= row->least && number <= row->most)
            printf("in its range");
        else if (*next == '4' || *next == '8')
            printf("%llu", (unsigned long long)number);
        else if (*next == 't')
            printf("%s", (char *)place);
        else if (*next == 'n')
            for (unsigned i = 0; i <= *(unsigned *)place; i++) printf("%u,", ((unsigned *)place)[i ? i + 1 : 0]);
        else
            print_bytes(place, *next == 'v' ? strtoul(next + 3, NULL, 16) : strtoul(next + 1, NULL, 10));
    }
    putchar('\n');
}

struct field {
    unsigned id, scope;
    long long time, latency;
    unsigned type, result;
    unsigned long long value;
};

/* Fields, of which those of links and of what a device can do stay the same. */
static void fields(void *device) {
    static const struct {
        unsigned first, last, scopes;
    } stay[] = {{1, 2, 1}, {90, 91, 1}, {164, 166, 18}, {170, 170, 1}, {171, 172, 2}};
    static struct field fields[300];
    int (*ask)(void *, int, struct field *) = (int (*)(void *, int, struct field *))dlsym(nvml, "nvmlDeviceGetFieldValues");
    memset(fields, 0, sizeof fields);
    for (unsigned i = 0; i < 200; i++) fields[i].id = i + 1;
    int code = ask(device, 200, fields);
    printf("fields: %d\n", code);
    for (unsigned i = 0; i < 200; i++) printf("field %u: %u %u\n", fields[i].id, fields[i].result, fields[i].result ? 0 : fields[i].type);
    for (unsigned i = 0; i < sizeof stay / sizeof *stay; i++)
        for (unsigned id = stay[i].first; id <= stay[i].last; id++)
            for (unsigned scope = 0; scope < stay[i].scopes; scope++) {
                struct field field = {.id = id, .scope = scope};
                code = ask(device, 1, &field);
                printf("field %u of %u: %d %u %llu\n", id, scope, code, field.result, field.result ? 0 : field.value);
            }
    printf("no fields: %d %d\n", ask(device, 0, fields), ask(device, 1, NULL));
}

static void samples(void *device) {
    static unsigned long long samples[512][2];
    unsigned type = 0, room = 512;
    int (*ask)(void *, int, unsigned long long, unsigned *, unsigned *, void *) =
        (int (*)(void *, int, unsigned long long, unsigned *, unsigned *, void *))dlsym(nvml, "nvmlDeviceGetSamples");
    for (int kind = 0; kind < 3; kind++) {
        unsigned needs = 0;
        int without = ask(device, kind, 0, &type, &needs, NULL);
        room = 512;
        int with = ask(device, kind, 0, &type, &room, samples);
        printf("samples %d: %d %d %u %s\n", kind, without, with, with ? 0 : type, with || (room <= needs && samples[0][0]) ? "right" : "wrong");
    }
}

static void graphics_clocks(void *device) {
    unsigned memory[16] = {0}, clocks[512] = {0}, memories = 16, number = 512;
    int (*first)(void *, unsigned *, unsigned *) = (int (*)(void *, unsigned *, unsigned *))dlsym(nvml, "nvmlDeviceGetSupportedMemoryClocks");
    int (*ask)(void *, unsigned, unsigned *, unsigned *) =
        (int (*)(void *, unsigned, unsigned *, unsigned *))dlsym(nvml, "nvmlDeviceGetSupportedGraphicsClocks");
    if (first(device, &memories, memory)) return;
    unsigned needs = 0;
    int without = ask(device, memory[0], &needs, NULL);
    printf("graphics clocks: %d %u, %d", without, needs, ask(device, memory[0], &number, clocks));
    for (unsigned i = 0; i < number && i < 512; i++) printf(" %u", clocks[i]);
    printf("\nof no memory clock: %d\n", ask(device, 1, &number, clocks));
}

static void of_system(void) {
    static const struct row rows[] = {
        {"nvmlSystemGetDriverVersion", "t"}, {"nvmlSystemGetNVMLVersion", "t"}, {"nvmlSystemGetCudaDriverVersion_v2", "4"},
        {"nvmlSystemGetConfComputeState", "b12"}, {"nvmlSystemGetConfComputeSettings", "v01000014"}, {"nvmlSystemGetConfComputeCapabilities", "b8"},
        {"nvmlSystemGetConfComputeGpusReadyState", "4"}, {"nvmlSystemGetDriverBranch", "v01000054 c80"}, {"nvmlSystemGetNvlinkBwMode", "4"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        uintptr_t words[8] = {0};
        call(&rows[i], rows[i].takes, words, 0, "");
    }
}

int main(void) {
    nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!nvml) return printf("no NVML: %s\n", dlerror()), 1;
    int (*init)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    int (*number)(unsigned *) = (int (*)(unsigned *))dlsym(nvml, "nvmlDeviceGetCount_v2");
    int (*find)(unsigned, void **) = (int (*)(unsigned, void **))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int code = init();
    if (code) return printf("nvmlInit: %d\n", code), 1;
    number(&count);
    printf("devices: %u\n", count);
    for (unsigned i = 0; i < count && i < 64; i++) find(i, &devices[i]);
    of_system();
    first = 1;
    for (unsigned i = 0; i < count && i < 64; i++) {
        printf("device %u\n", i);
        for (size_t at = 0; at < sizeof rows / sizeof *rows; at++) {
            uintptr_t words[8] = {(uintptr_t)devices[i]};
            call(&rows[at], rows[at].takes, words, 1, "");
        }
        fields(devices[i]);
        samples(devices[i]);
        graphics_clocks(devices[i]);
    }
    return 0;
}
