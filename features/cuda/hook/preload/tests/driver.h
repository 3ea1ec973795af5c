/* What programs before a driver have in common: its functions by name, and memory of its first device. ON_FAILURE says what becomes of a program of
 * which a call fails, which is told in any case. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

typedef uint64_t ptr;
static void *library, *context;
static const size_t mib = 1 << 20;

static void *find(const char *symbol) {
    void *found = dlsym(library, symbol);
    if (!found) {
        printf("no %s\n", symbol);
        fflush(stdout);
        _exit(1);
    }
    return found;
}

#define TRY(symbol, types, ...) (((int(*) types)find(symbol))(__VA_ARGS__))
#define CALL(symbol, types, ...)                      \
    do {                                              \
        int code = TRY(symbol, types, __VA_ARGS__);   \
        if (code) {                                   \
            printf("%s: %d\n", symbol, code);         \
            ON_FAILURE;                               \
        }                                             \
    } while (0)

static void load(void) {
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        printf("no driver\n");
        fflush(stdout);
        _exit(1);
    }
}

static void begin(void) {
    int device;
    if (!library) load();
    CALL("cuInit", (unsigned), 0);
    CALL("cuDeviceGet", (int *, int), &device, 0);
    CALL("cuDevicePrimaryCtxRetain", (void **, int), &context, device);
    CALL("cuCtxSetCurrent", (void *), context);
}

static inline ptr allocate(size_t bytes) {
    ptr made = 0;
    CALL("cuMemAlloc_v2", (ptr *, size_t), &made, bytes);
    return made;
}

static inline uint32_t word(ptr from) {
    uint32_t value = 0;
    CALL("cuMemcpyDtoH_v2", (void *, ptr, size_t), &value, from, sizeof value);
    return value;
}
