/* What calls of the driver cost: a line for each figure. `native.sh` runs it with the driver and through the bridge. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef uint64_t ptr;
static void *library;

static void *find(const char *symbol) {
    void *found = dlsym(library, symbol);
    if (!found) {
        printf("no %s\n", symbol);
        exit(1);
    }
    return found;
}

#define CALL(symbol, types, ...)                                          \
    do {                                                                  \
        int code = ((int(*) types)find(symbol))(__VA_ARGS__);             \
        if (code) {                                                       \
            printf("%s: %d\n", symbol, code);                             \
            exit(1);                                                      \
        }                                                                 \
    } while (0)

/* The first line is for the fake driver, which has this kernel. */
static const char *ptx =
    "// vm-cuda-fake\n.version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry copy(.param .u64 d, .param .u64 s, .param .u64 n) {\nret;\n}\n"
    ".visible .entry empty() {\nret;\n}\n";

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

enum { COUNT = 20000 };
static double times[COUNT];

static void tell(const char *name, size_t count) {
    qsort(times, count, sizeof *times, compare);
    printf("%s-p50-us %.2f\n%s-p99-us %.2f\n", name, 1e6 * times[count / 2], name, 1e6 * times[count * 99 / 100]);
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return printf("no driver\n"), 1;
    void *context, *module, *empty, *copy, *stream, *event;
    CALL("cuInit", (unsigned), 0);
    CALL("cuCtxCreate_v2", (void **, unsigned, int), &context, 0, 0);
    CALL("cuModuleLoadData", (void **, const void *), &module, ptx);
    CALL("cuModuleGetFunction", (void **, void *, const char *), &empty, module, "empty");
    CALL("cuModuleGetFunction", (void **, void *, const char *), &copy, module, "copy");
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    CALL("cuEventCreate", (void **, unsigned), &event, 2);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **) = find("cuLaunchKernel");
    int (*synchronize)(void *) = find("cuStreamSynchronize"), (*query)(void *) = find("cuStreamQuery");
    int (*record)(void *, void *) = find("cuEventRecord");
    ptr a, b;
    const size_t bytes = 256 << 20;
    CALL("cuMemAlloc_v2", (ptr *, size_t), &a, bytes);
    CALL("cuMemAlloc_v2", (ptr *, size_t), &b, 4096);
    uint64_t none = 0;
    void *parameters[] = {&a, &b, &none};
    for (int i = 0; i < 1000; i++) launch(empty, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
    synchronize(stream);
    /* One at a time, while the stream has room. */
    for (int i = 0; i < COUNT; i++) {
        double start = now();
        if (launch(copy, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL)) return printf("launch failed\n"), 1;
        times[i] = now() - start;
        if (i % 256 == 255) synchronize(stream);
    }
    tell("launch", COUNT);
    /* As many as go. */
    double start = now();
    for (int i = 0; i < 5 * COUNT; i++) launch(copy, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL);
    synchronize(stream);
    printf("launches-per-s %.0f\n", 5 * COUNT / (now() - start));
    for (int i = 0; i < COUNT; i++) {
        double start = now();
        record(event, stream);
        times[i] = now() - start;
        if (i % 256 == 255) synchronize(stream);
    }
    tell("event-record", COUNT);
    for (int i = 0; i < COUNT; i++) {
        double start = now();
        query(stream);
        times[i] = now() - start;
    }
    tell("query", COUNT);
    for (int i = 0; i < COUNT / 10; i++) {
        double start = now();
        launch(empty, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
        synchronize(stream);
        times[i] = now() - start;
    }
    tell("launch-and-wait", COUNT / 10);
    char *pageable = malloc(bytes), *pinned;
    memset(pageable, 1, bytes);
    CALL("cuMemHostAlloc", (void **, size_t, unsigned), (void **)&pinned, bytes, 0);
    memset(pinned, 2, bytes);
    const char *kinds[] = {"pageable", "pinned"};
    char *hosts[] = {pageable, pinned};
    const struct {
        const char *name;
        size_t bytes;
        int turns;
    } sizes[] = {{"1MiB", 1 << 20, 200}, {"16MiB", 16 << 20, 30}, {"256MiB", bytes, 7}};
    for (int kind = 0; kind < 2; kind++)
        for (int size = 0; size < 3; size++) {
            double taken[2][200];
            size_t len = sizes[size].bytes;
            int turns = sizes[size].turns;
            for (int turn = 0; turn < turns; turn++) {
                double start = now();
                CALL("cuMemcpyHtoD_v2", (ptr, const void *, size_t), a, hosts[kind], len);
                double middle = now();
                CALL("cuMemcpyDtoH_v2", (void *, ptr, size_t), hosts[kind], a, len);
                taken[0][turn] = middle - start;
                taken[1][turn] = now() - middle;
            }
            for (int back = 0; back < 2; back++) {
                qsort(taken[back], turns, sizeof *times, compare);
                printf("%s-%s-%s-GiB/s %.2f\n", kinds[kind], sizes[size].name, back ? "to-host" : "to-device", len / taken[back][turns / 2] / (1 << 30));
            }
        }
    char name[64];
    for (int kind = 0; kind < 2; kind++)
        for (int back = 0; back < 2; back++) {
            for (int i = 0; i < 1000; i++) {
                double start = now();
                if (back)
                    CALL("cuMemcpyDtoH_v2", (void *, ptr, size_t), hosts[kind], b, 8);
                else
                    CALL("cuMemcpyHtoD_v2", (ptr, const void *, size_t), b, hosts[kind], 4096);
                times[i] = now() - start;
            }
            snprintf(name, sizeof name, "%s-%s", kinds[kind], back ? "8B-to-host" : "4KiB-to-device");
            tell(name, 1000);
        }
    CALL("cuMemFreeHost", (void *), pinned);
    return 0;
}
