// What programs ask of memory and do with it where virtual memory could show: attributes, synchronous operations, frees with work that runs, captures.
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define CALL(name, types, ...) ((int(*) types)dlsym(driver, name))(__VA_ARGS__)
static void *driver;
static uint64_t context;
static atomic_int ended;

static void late(void *unused) {
    (void)unused;
    usleep(100000);
    ended = 1;
}

static void attributes(const char *what, uint64_t at, uint64_t start, uint64_t bytes) {
    printf("%s:", what);
    for (int attribute = 1; attribute <= 20; attribute++) {
        // The driver has no tokens for RDMA of virtual memory.
        if (attribute == 5) continue;
        uint64_t value[2] = {0, 0};
        int code = CALL("cuPointerGetAttribute", (void *, int, uint64_t), value, attribute, at);
        const char *is = value[0] == context ? "context" : value[0] == at ? "itself" : value[0] == start ? "start"
                       : value[0] == bytes   ? "bytes" : value[0] > 100 ? "large" : NULL;
        // Numbers that are given one after the other.
        if (attribute == 7 || attribute == 20) is = value[0] ? "some" : "none";
        if (is) printf(" %d=%d:%s", attribute, code, is);
        else printf(" %d=%d:%d", attribute, code, (int)value[0]);
    }
    printf("\n");
}

static unsigned word(uint64_t at) {
    unsigned value = 0;
    int code = CALL("cuMemcpyDtoH_v2", (void *, uint64_t, size_t), &value, at, 4);
    return code ? 1000000u + (unsigned)code : value;
}

static uint64_t make(size_t bytes) {
    uint64_t at = 0;
    int code = CALL("cuMemAlloc_v2", (uint64_t *, size_t), &at, bytes);
    if (code) printf("no memory: %d\n", code);
    return at;
}

int main(void) {
    const size_t bytes = 64 << 20;
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    CALL("cuInit", (unsigned), 0);
    CALL("cuDevicePrimaryCtxRetain", (uint64_t *, int), &context, 0);
    CALL("cuCtxSetCurrent", (uint64_t), context);
    uint64_t a = make(bytes), small = make(512), stream = 0, graph = 0;
    attributes("whole", a, a, bytes);
    attributes("inside", a + 4096, a, bytes);
    attributes("small", small, small, 512);
    attributes("behind", a + bytes + (256 << 20), a, bytes);
    unsigned many[3] = {0, 0, 0};
    uint64_t start = 0;
    void *places[3] = {&many[0], &start, &many[1]};
    int which[3] = {2, 11, 9};
    int code = CALL("cuPointerGetAttributes", (unsigned, int *, void **, uint64_t), 3, which, places, a + 8);
    printf("several: %d %u %d %u\n", code, many[0], start == a, many[1]);
    uint64_t base = 0;
    size_t size = 0;
    code = CALL("cuMemGetAddressRange_v2", (uint64_t *, size_t *, uint64_t), &base, &size, a + bytes - 1);
    printf("range: %d %d %d\n", code, base == a, size == bytes);
    code = CALL("cuMemGetAddressRange_v2", (uint64_t *, size_t *, uint64_t), &base, &size, a + bytes + (256 << 20));
    printf("range of nothing: %d\n", code);

    // From here on what is done to it is done when the call returns.
    int on = 1;
    code = CALL("cuPointerSetAttribute", (const void *, int, uint64_t), &on, 6, a);
    int is = 0;
    code |= CALL("cuPointerGetAttribute", (void *, int, uint64_t), &is, 6, a + 64);
    printf("set: %d %d\n", code, is);
    CALL("cuMemsetD32_v2", (uint64_t, unsigned, size_t), a, 11, bytes / 4);
    uint64_t b = make(bytes);
    CALL("cuMemcpyDtoD_v2", (uint64_t, uint64_t, size_t), b, a, bytes);
    printf("synchronous: %d %u %u\n", code, word(b), word(b + bytes - 4));

    // A free waits for the work that is given.
    CALL("cuCtxSynchronize", (void));
    CALL("cuStreamCreate", (uint64_t *, unsigned), &stream, 1);
    CALL("cuMemsetD32Async", (uint64_t, unsigned, size_t, uint64_t), b, 12, bytes / 4, stream);
    CALL("cuLaunchHostFunc", (uint64_t, void (*)(void *), void *), stream, late, NULL);
    CALL("cuMemsetD32Async", (uint64_t, unsigned, size_t, uint64_t), b, 13, bytes / 4, stream);
    code = CALL("cuMemFree_v2", (uint64_t), b);
    printf("freed with work: %d, ended: %d\n", code, ended);
    printf("freed again: %d, inside: %d\n", CALL("cuMemFree_v2", (uint64_t), b) != 0, CALL("cuMemFree_v2", (uint64_t), a + 4096) != 0);

    // A copy that is recorded, of memory that could be moved, and memory that is made meanwhile.
    uint64_t from = make(300 << 20), to = make(300 << 20);
    CALL("cuMemsetD32_v2", (uint64_t, unsigned, size_t), from, 21, 75 << 20);
    CALL("cuCtxSynchronize", (void));
    code = CALL("cuStreamBeginCapture_v2", (uint64_t, int), stream, 2);
    int recorded = CALL("cuMemcpyDtoDAsync_v2", (uint64_t, uint64_t, size_t, uint64_t), to, from, 300 << 20, stream);
    uint64_t within = make(400 << 20);
    printf("capture: %d %d, made: %d", code, recorded, within != 0);
    printf(", ended: %d\n", CALL("cuStreamEndCapture", (uint64_t, uint64_t *), stream, &graph));
    uint64_t exec = 0;
    code = CALL("cuGraphInstantiateWithFlags", (uint64_t *, uint64_t, uint64_t), &exec, graph, 0);
    CALL("cuMemsetD32_v2", (uint64_t, unsigned, size_t), from, 22, 75 << 20);
    CALL("cuCtxSynchronize", (void));
    int launched = CALL("cuGraphLaunch", (uint64_t, uint64_t), exec, stream);
    CALL("cuStreamSynchronize", (uint64_t), stream);
    printf("replayed: %d %d %u %u\n", code, launched, word(to), word(to + (300 << 20) - 4));
    printf("freed: %d %d %d %d", CALL("cuMemFree_v2", (uint64_t), from), CALL("cuMemFree_v2", (uint64_t), to),
           CALL("cuMemFree_v2", (uint64_t), within), CALL("cuMemFree_v2", (uint64_t), a));
    printf(" %d\n", CALL("cuMemFree_v2", (uint64_t), small));
    return 0;
}
