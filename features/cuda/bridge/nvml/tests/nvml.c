/* What programs ask NVML for, and what they should not: its first argument says which. */
#define ON_FAILURE exit(1)
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include "../../../hook/preload/tests/driver.h"

static void *nvml;

static int wrong;
#define CHECK(expected, symbol, ...)                                                                       \
    do {                                                                                                   \
        int (*function)() = (int (*)())dlsym(nvml, symbol);                                                \
        int code = function ? function(__VA_ARGS__) : -1;                                                  \
        if (code != (expected)) printf("%d: %s: %d\n", __LINE__, symbol, code), wrong = 1;                 \
    } while (0)

enum { UNINITIALIZED = 1, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, SHORT = 7, TIMEOUT = 10, LOST = 15, VERSION = 25 };

/* Each function of a file, with null pointers. */
static void all(const char *path, int initialised) {
    char name[256];
    FILE *names = fopen(path, "r");
    while (names && fscanf(names, "%255s%*[^\n]", name) == 1) {
        if (strncmp(name, "nvml", 4) || !strncmp(name, "nvmlInit", 8) || !strcmp(name, "nvmlShutdown") || !strcmp(name, "nvmlErrorString")) continue;
        int (*function)() = (int (*)())dlsym(nvml, name);
        int code = function ? function(NULL, NULL, NULL, NULL, NULL, NULL) : -1;
        if (initialised ? code != INVALID && code != UNSUPPORTED : code != UNINITIALIZED) printf("%s: %d\n", name, code), wrong = 1;
    }
    if (!names) wrong = 1;
}

static void arguments(const char *names) {
    char text[96];
    void *device = NULL;
    unsigned number = 0;
    uint64_t memory[5] = {0};
    all(names, 0);
    CHECK(0, "nvmlInit");
    CHECK(0, "nvmlInit_v2");
    CHECK(0, "nvmlInitWithFlags", 0);
    all(names, 1);
    CHECK(0, "nvmlDeviceGetHandleByIndex_v2", 0, &device);
    CHECK(INVALID, "nvmlDeviceGetHandleByIndex_v2", 0, NULL);
    CHECK(INVALID, "nvmlDeviceGetHandleByIndex_v2", -1, &device);
    CHECK(NOT_FOUND, "nvmlDeviceGetHandleByUUID", "", &device);
    CHECK(INVALID, "nvmlDeviceGetHandleByPciBusId_v2", "0:0:0:0", &device);
    CHECK(NOT_FOUND, "nvmlDeviceGetHandleByPciBusId_v2", "ffffffff:ff:1f.0", &device);
    void *handles[] = {NULL, (void *)1, (char *)device + 1, (char *)device + 32, (char *)device - 16, (void *)~0ull, &device};
    for (size_t i = 0; i < sizeof handles / sizeof *handles; i++) {
        CHECK(INVALID, "nvmlDeviceGetName", handles[i], text, sizeof text);
        CHECK(INVALID, "nvmlDeviceGetMemoryInfo", handles[i], memory);
        CHECK(INVALID, "nvmlDeviceGetIndex", handles[i], &number);
    }
    const char *texts[] = {"nvmlDeviceGetName", "nvmlDeviceGetUUID"};
    for (int i = 0; i < 2; i++) {
        memset(text, 'x', sizeof text);
        CHECK(0, texts[i], device, text, sizeof text);
        size_t len = strlen(text);
        for (size_t room = 0; room <= len; room++) {
            memset(text, 'x', sizeof text);
            CHECK(SHORT, texts[i], device, text, (unsigned)room);
            wrong |= text[room] != 'x' || text[0] != 'x';
        }
        CHECK(0, texts[i], device, text, (unsigned)len + 1);
        wrong |= strlen(text) != len || text[len + 1] != 'x';
    }
    CHECK(SHORT, "nvmlSystemGetDriverVersion", text, 0);
    CHECK(SHORT, "nvmlSystemGetNVMLVersion", text, 1);
    CHECK(VERSION, "nvmlDeviceGetMemoryInfo_v2", device, memory);
    memory[0] = 0x01000028;
    CHECK(VERSION, "nvmlDeviceGetMemoryInfo_v2", device, memory);
    memory[0] = 0x02000028;
    CHECK(0, "nvmlDeviceGetMemoryInfo_v2", device, memory);
    wrong |= memory[1] == 0 || memory[1] != memory[3] + memory[4];
    for (int i = 0; i < 3; i++) CHECK(0, "nvmlShutdown");
    CHECK(UNINITIALIZED, "nvmlShutdown");
    CHECK(UNINITIALIZED, "nvmlDeviceGetName", device, text, sizeof text);
    const char *(*error)(int) = (const char *(*)(int))dlsym(nvml, "nvmlErrorString");
    for (int code = -1; code < 40; code++) wrong |= !error(code) || !*error(code);
    wrong |= strcmp(error(3), "Not Supported") != 0;
}

/* What is used of the first device by this process, as NVML says. */
static uint64_t used(void) {
    void *device = NULL;
    uint64_t memory[3] = {0};
    CHECK(0, "nvmlDeviceGetHandleByIndex_v2", 0, &device);
    CHECK(0, "nvmlDeviceGetMemoryInfo", device, memory);
    return memory[2];
}

static unsigned processes(void) {
    void *device = NULL;
    unsigned count = 0, info[6] = {0};
    CHECK(0, "nvmlDeviceGetHandleByIndex_v2", 0, &device);
    int (*running)(void *, unsigned *, void *) = (int (*)(void *, unsigned *, void *))dlsym(nvml, "nvmlDeviceGetComputeRunningProcesses_v3");
    int code = running(device, &count, NULL);
    if (code != (count ? SHORT : 0)) wrong = 1;
    if (count) CHECK(0, "nvmlDeviceGetComputeRunningProcesses_v3", device, &count, info);
    if (count && info[0] != (unsigned)getpid()) wrong = 1;
    return count;
}

/* A child begins a CUDA session of its own, whatever its parent asked NVML for. */
static void forks(void) {
    CHECK(0, "nvmlInit_v2");
    if (used() || processes()) wrong = 1;
    pid_t child = fork();
    if (!child) {
        setenv("CUDA_VISIBLE_DEVICES", "0", 1);
        begin();
        allocate(8 * mib);
        if (used() < 8 * mib || processes() != 1) wrong = 1;
        fflush(stdout);
        _exit(wrong);
    }
    int status = 1;
    waitpid(child, &status, 0);
    if (status || used() || processes()) wrong = 1;
    begin();
    allocate(4 * mib);
    if (used() < 4 * mib || processes() != 1) wrong = 1;
}

static void *ask(void *argument) {
    (void)argument;
    for (int i = 0; i < 20; i++) {
        unsigned count = 0;
        CHECK(0, "nvmlInit_v2");
        CHECK(0, "nvmlDeviceGetCount_v2", &count);
        if (count != 2) wrong = 1;
        if (i % 8 == 0) used();
        CHECK(0, "nvmlShutdown");
    }
    return NULL;
}

/* Threads ask while others fork: no child finds the library locked. */
static void threads(void) {
    pthread_t others[4];
    /* Else each of them asks the server anew. */
    CHECK(0, "nvmlInit_v2");
    for (int i = 0; i < 4; i++) pthread_create(&others[i], NULL, ask, NULL);
    for (int i = 0; i < 50; i++) {
        pid_t child = fork();
        if (!child) {
            unsigned count = 0;
            alarm(60);
            CHECK(0, "nvmlDeviceGetCount_v2", &count);
            _exit(wrong || count != 2);
        }
        int status = 1;
        waitpid(child, &status, 0);
        if (status) wrong = 1;
    }
    for (int i = 0; i < 4; i++) pthread_join(others[i], NULL);
    CHECK(0, "nvmlShutdown");
    CHECK(UNINITIALIZED, "nvmlShutdown");
}

/* The server goes away when a line comes. */
static void gone(int has_session) {
    void *device = NULL;
    uint64_t memory[3];
    char name[96];
    if (has_session) begin();
    CHECK(0, "nvmlInit_v2");
    CHECK(0, "nvmlDeviceGetHandleByIndex_v2", 0, &device);
    printf("ready\n");
    fflush(stdout);
    if (getchar() == EOF) wrong = 1;
    /* Of a server that is not there nobody knows whether it will be again. */
    CHECK(has_session ? LOST : 9, "nvmlDeviceGetMemoryInfo", device, memory);
    CHECK(0, "nvmlDeviceGetName", device, name, sizeof name);
    CHECK(0, "nvmlShutdown");
    CHECK(9, "nvmlInit_v2");
    CHECK(UNINITIALIZED, "nvmlShutdown");
}

/* What the server's NVML says: the temperatures of `host.c`, or what is expected in their place. */
static void temperature(int expected) {
    for (unsigned i = 0; i < 2; i++) {
        void *device = NULL;
        unsigned is = 0;
        CHECK(0, "nvmlDeviceGetHandleByIndex_v2", i, &device);
        CHECK(expected, "nvmlDeviceGetTemperature", device, 0, &is);
        if (is != (expected ? 0 : 41 + i)) wrong = 1;
    }
}

static void *temperatures(void *argument) {
    (void)argument;
    for (int i = 0; i < 200; i++) temperature(0);
    return NULL;
}

/* Threads ask while others fork, and children ask. */
static void telemetry(void) {
    pthread_t others[4];
    CHECK(0, "nvmlInit_v2");
    temperature(0);
    for (int i = 0; i < 4; i++) pthread_create(&others[i], NULL, temperatures, NULL);
    for (int i = 0; i < 8; i++) {
        pid_t child = fork();
        if (!child) {
            alarm(60);
            temperature(0);
            used();
            _exit(wrong);
        }
        int status = 1;
        waitpid(child, &status, 0);
        if (status) wrong = 1;
    }
    for (int i = 0; i < 4; i++) pthread_join(others[i], NULL);
    temperature(0);
    CHECK(0, "nvmlShutdown");
}

/* One question is never answered, of a server whose devices else answer. */
static void hangs(void) {
    void *device = NULL;
    unsigned to[2];
    CHECK(0, "nvmlInit_v2");
    temperature(0);
    CHECK(0, "nvmlDeviceGetHandleByIndex_v2", 0, &device);
    CHECK(TIMEOUT, "nvmlDeviceGetNvLinkUtilizationControl", device, 0, 0, to);
    temperature(0);
}

/* It asks, and again when a line comes. */
static void quiet(void) {
    CHECK(0, "nvmlInit_v2");
    temperature(0);
    used();
    printf("ready\n");
    fflush(stdout);
    if (getchar() == EOF) wrong = 1;
    used();
    temperature(0);
}

/* The server has no other NVML, or one that lacks the function. */
static void without(int expected) {
    CHECK(0, "nvmlInit_v2");
    temperature(expected);
    temperature(expected);
}

int main(int count, char **argument) {
    nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!nvml || count < 2) return printf("no NVML\n"), 1;
    if (!strcmp(argument[1], "arguments")) arguments(argument[2]);
    if (!strcmp(argument[1], "forks")) forks();
    if (!strcmp(argument[1], "threads")) threads();
    if (!strcmp(argument[1], "gone")) gone(0);
    if (!strcmp(argument[1], "lost")) gone(1);
    if (!strcmp(argument[1], "telemetry")) telemetry();
    if (!strcmp(argument[1], "hangs")) hangs();
    if (!strcmp(argument[1], "quiet")) quiet();
    if (!strcmp(argument[1], "without")) without(atoi(argument[2]));
    if (!strcmp(argument[1], "init")) printf("init: %d\n", ((int (*)(void))dlsym(nvml, "nvmlInit_v2"))());
    printf(wrong ? "wrong\n" : "right\n");
    return wrong;
}
