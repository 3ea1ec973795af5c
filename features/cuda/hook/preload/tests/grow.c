/* A program that grows an array as programs do, and tells what it finds in it. It comes to the driver as its argument says: by `dlsym`, or by
 * `cuGetProcAddress`, as the CUDA runtime does. It knows nothing of the hook. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t ptr;
static void *library;
static int (*get)(const char *, void **, int, uint64_t, int *);

static void *find(const char *symbol, const char *name) {
    void *found = NULL;
    int status = 0;
    if (get) {
        if (get(name, &found, 12000, 0, &status)) found = NULL;
    } else {
        found = dlsym(library, symbol);
    }
    if (!found) {
        printf("no %s\n", symbol);
        exit(1);
    }
    return found;
}

#define CALL(symbol, name, types, ...)                                              \
    do {                                                                            \
        int code = ((int(*) types)find(symbol, name)) (__VA_ARGS__);               \
        if (code) {                                                                 \
            printf("%s: %d\n", symbol, code);                                       \
            exit(1);                                                                \
        }                                                                           \
    } while (0)

static ptr allocate(size_t bytes) {
    ptr made = 0;
    CALL("cuMemAlloc_v2", "cuMemAlloc", (ptr *, size_t), &made, bytes);
    return made;
}

static void release(ptr memory) { CALL("cuMemFree_v2", "cuMemFree", (ptr), memory); }

static void copy(ptr to, ptr from, size_t bytes) {
    CALL("cuMemcpyDtoD_v2", "cuMemcpyDtoD", (ptr, ptr, size_t), to, from, bytes);
}

static void fill(ptr to, uint32_t value, size_t words) {
    CALL("cuMemsetD32_v2", "cuMemsetD32", (ptr, unsigned, size_t), to, value, words);
}

static uint32_t word(ptr from) {
    uint32_t value = 0;
    CALL("cuMemcpyDtoH_v2", "cuMemcpyDtoH", (void *, ptr, size_t), &value, from, sizeof value);
    return value;
}

int main(int count, char **arguments) {
    const size_t mib = 1 << 20;
    setvbuf(stdout, NULL, _IOLBF, 0);
    library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | (count > 2 ? RTLD_DEEPBIND : 0));
    if (!library) return printf("no driver\n"), 1;
    if (count > 1 && !strcmp(arguments[1], "proc")) {
        *(void **)&get = dlsym(library, "cuGetProcAddress_v2");
        if (!get) return printf("no cuGetProcAddress_v2\n"), 1;
    }
    int device;
    void *context;
    CALL("cuInit", "cuInit", (unsigned), 0);
    CALL("cuDeviceGet", "cuDeviceGet", (int *, int), &device, 0);
    CALL("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain", (void **, int), &context, device);
    CALL("cuCtxSetCurrent", "cuCtxSetCurrent", (void *), context);
    CALL("cuCtxSynchronize", "cuCtxSynchronize", (void));

    size_t bytes = 256 * mib;
    ptr array = allocate(bytes);
    fill(array, 7, bytes / 4);
    CALL("cuCtxSynchronize", "cuCtxSynchronize", (void));
    for (int turn = 0; turn < 4; turn++) {
        /* Grown, and what is new is filled. */
        size_t more = bytes + 64 * mib + 4096;
        ptr grown = allocate(more);
        copy(grown, array, bytes);
        release(array);
        fill(grown + bytes, turn, (more - bytes) / 4);
        printf("%d: %u %u %u %u\n", turn, word(grown), word(grown + bytes - 4), word(grown + bytes), word(grown + more - 4));
        array = grown, bytes = more;
    }
    /* Copied, and both are used on: nothing may be moved. */
    ptr other = allocate(bytes);
    copy(other, array, bytes);
    fill(array, 99, 1024);
    printf("copy: %u %u, source: %u\n", word(other), word(other + bytes - 4), word(array));
    /* The target is looked at before the source is freed. */
    ptr third = allocate(bytes + 2 * mib);
    copy(third, other, bytes);
    printf("looked: %u %u\n", word(third), word(third + bytes - 4));
    release(other);
    printf("then: %u\n", word(third + bytes - 4));
    /* Its size and its place are what was asked for. */
    ptr base;
    size_t size;
    CALL("cuMemGetAddressRange_v2", "cuMemGetAddressRange", (ptr *, size_t *, ptr), &base, &size, third + 5 * mib);
    printf("range: %d %d\n", base == third, size == bytes + 2 * mib);
    void *own = NULL;
    CALL("cuPointerGetAttribute", "cuPointerGetAttribute", (void *, int, ptr), &own, 1, third + 4096);
    printf("context: %d\n", own == context);
    /* Small ones, and one that is too large. */
    ptr small = allocate(512);
    fill(small, 5, 128);
    ptr none = 0;
    int code = ((int (*)(ptr *, size_t))find("cuMemAlloc_v2", "cuMemAlloc"))(&none, (size_t)1 << 45);
    printf("small: %u, too large: %d\n", word(small + 508), code);
    release(small);
    release(third);
    release(array);
    size_t left, all;
    CALL("cuMemGetInfo_v2", "cuMemGetInfo", (size_t *, size_t *), &left, &all);
    printf("left: %d\n", left == all);
    CALL("cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease", (int), device);
    return 0;
}
