/* A program of the driver API: adds vectors on a stream, by a module in a text, and tells what comes of it. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

#define TRY(symbol, types, ...) (((int(*) types)find(symbol))(__VA_ARGS__))
#define CALL(symbol, types, ...)                      \
    do {                                              \
        int code = TRY(symbol, types, __VA_ARGS__);   \
        if (code) {                                   \
            printf("%s: %d\n", symbol, code);         \
            exit(1);                                  \
        }                                             \
    } while (0)

/* The first line is for the fake driver, which has this kernel. */
static const char *ptx =
    "// vm-cuda-fake\n"
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry add(.param .u64 d, .param .u64 a, .param .u64 b, .param .u64 n) {\n"
    ".reg .pred %p; .reg .b32 %r<8>; .reg .b64 %x<10>;\n"
    "ld.param.u64 %x1, [d]; ld.param.u64 %x2, [a]; ld.param.u64 %x3, [b]; ld.param.u64 %x4, [n];\n"
    "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;\n"
    "mad.wide.u32 %x5, %r1, %r2, 0; cvt.u64.u32 %x6, %r3; add.u64 %x5, %x5, %x6;\n"
    "setp.ge.u64 %p, %x5, %x4; @%p bra end;\n"
    "shl.b64 %x5, %x5, 2; add.u64 %x1, %x1, %x5; add.u64 %x2, %x2, %x5; add.u64 %x3, %x3, %x5;\n"
    "ld.global.u32 %r4, [%x2]; ld.global.u32 %r5, [%x3]; add.u32 %r4, %r4, %r5; st.global.u32 [%x1], %r4;\n"
    "end: ret;\n}\n";

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return printf("no driver\n"), 1;
    int count = 0, device = -1, version = 0, major = 0;
    CALL("cuInit", (unsigned), 0);
    CALL("cuDriverGetVersion", (int *), &version);
    CALL("cuDeviceGetCount", (int *), &count);
    CALL("cuDeviceGet", (int *, int), &device, 0);
    char name[64] = "";
    CALL("cuDeviceGetName", (char *, int, int), name, sizeof name, device);
    CALL("cuDeviceGetAttribute", (int *, int, int), &major, 75, device);
    size_t total = 0;
    CALL("cuDeviceTotalMem_v2", (size_t *, int), &total, device);
    printf("%d devices, CUDA %d, %s, %d, %zu\n", count, version, name, major, total);
    void *context = NULL, *now = NULL, *module = NULL, *add = NULL, *stream = NULL, *event = NULL, *end = NULL;
    CALL("cuCtxCreate_v2", (void **, unsigned, int), &context, 0, device);
    CALL("cuCtxGetCurrent", (void **), &now);
    printf("current: %d\n", now == context);
    CALL("cuModuleLoadData", (void **, const void *), &module, ptx);
    CALL("cuModuleGetFunction", (void **, void *, const char *), &add, module, "add");
    printf("no function: %d\n", TRY("cuModuleGetFunction", (void **, void *, const char *), &now, module, "nothing"));
    printf("no module: %d\n", TRY("cuModuleLoadData", (void **, const void *), &now, "nothing"));
    enum { N = 3 << 20 };
    const size_t bytes = N * sizeof(uint32_t);
    uint32_t *a = malloc(bytes), *b = malloc(bytes), *c = calloc(1, bytes);
    for (uint32_t i = 0; i < N; i++) a[i] = i, b[i] = 7 * i;
    ptr da, db, dc;
    CALL("cuMemAlloc_v2", (ptr *, size_t), &da, bytes);
    CALL("cuMemAlloc_v2", (ptr *, size_t), &db, bytes);
    CALL("cuMemAlloc_v2", (ptr *, size_t), &dc, bytes);
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    CALL("cuEventCreate", (void **, unsigned), &event, 0);
    CALL("cuEventCreate", (void **, unsigned), &end, 0);
    CALL("cuMemcpyHtoD_v2", (ptr, const void *, size_t), da, a, bytes);
    CALL("cuMemcpyHtoDAsync_v2", (ptr, const void *, size_t, void *), db, b, bytes, stream);
    memset(b, 0, bytes);
    CALL("cuEventRecord", (void *, void *), event, stream);
    uint64_t n = N;
    void *parameters[] = {&dc, &da, &db, &n};
    CALL("cuLaunchKernel", (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **), add, N / 256, 1,
         1, 256, 1, 1, 0, stream, parameters, NULL);
    CALL("cuEventRecord", (void *, void *), end, stream);
    CALL("cuMemcpyDtoHAsync_v2", (void *, ptr, size_t, void *), c, dc, bytes, stream);
    CALL("cuStreamSynchronize", (void *), stream);
    CALL("cuEventSynchronize", (void *), end);
    float time = -1;
    CALL("cuEventElapsedTime", (float *, void *, void *), &time, event, end);
    size_t wrong = 0;
    for (uint32_t i = 0; i < N; i++) wrong += c[i] != 8 * i;
    printf("wrong: %zu, time: %d\n", wrong, time >= 0);
    /* Memory of the host that the device reaches. */
    uint32_t *pinned = NULL;
    CALL("cuMemHostAlloc", (void **, size_t, unsigned), (void **)&pinned, bytes, 0);
    memset(pinned, 0, bytes);
    CALL("cuMemcpyDtoHAsync_v2", (void *, ptr, size_t, void *), pinned, dc, bytes, stream);
    CALL("cuStreamSynchronize", (void *), stream);
    printf("pinned: %d\n", memcmp(pinned, c, bytes));
    pinned[5] = 99;
    CALL("cuMemcpyHtoDAsync_v2", (ptr, const void *, size_t, void *), da, pinned, bytes, stream);
    CALL("cuMemcpyDtoH_v2", (void *, ptr, size_t), a, da, 64);
    CALL("cuStreamSynchronize", (void *), stream);
    CALL("cuMemcpyDtoH_v2", (void *, ptr, size_t), a, da, 64);
    printf("changed: %u\n", a[5]);
    unsigned kind = 0, flags = 0;
    CALL("cuPointerGetAttribute", (void *, int, ptr), &kind, 2, (ptr)pinned + 64);
    printf("pinned is %u", kind);
    CALL("cuPointerGetAttribute", (void *, int, ptr), &kind, 2, da + 64);
    printf(", device is %u, other: %d\n", kind, TRY("cuPointerGetAttribute", (void *, int, ptr), &kind, 2, (ptr)a));
    CALL("cuMemHostGetFlags", (unsigned *, void *), &flags, pinned);
    CALL("cuMemFreeHost", (void *), pinned);
    /* Either way round. */
    CALL("cuMemcpy", (ptr, ptr, size_t), db, dc, bytes);
    CALL("cuMemcpy", (ptr, ptr, size_t), (ptr)a, db, bytes);
    printf("copied: %d\n", memcmp(a, c, bytes));
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), da, 0x01020304, N);
    CALL("cuMemcpyDtoH_v2", (void *, ptr, size_t), a, da + bytes - 4, 4);
    printf("set: %x\n", a[0]);
    const char *error = NULL;
    CALL("cuGetErrorName", (int, const char **), 700, &error);
    printf("%s\n", error);
    printf("freed twice: %d", TRY("cuMemFree_v2", (ptr), da));
    printf(" %d\n", TRY("cuMemFree_v2", (ptr), da));
    CALL("cuMemFree_v2", (ptr), db);
    CALL("cuMemFree_v2", (ptr), dc);
    size_t left = 0, all = 1;
    CALL("cuMemGetInfo_v2", (size_t *, size_t *), &left, &all);
    printf("left: %d\n", left == all);
    CALL("cuEventDestroy_v2", (void *), event);
    CALL("cuStreamDestroy_v2", (void *), stream);
    CALL("cuModuleUnload", (void *), module);
    CALL("cuCtxDestroy_v2", (void *), context);
    printf("done\n");
    return 0;
}
