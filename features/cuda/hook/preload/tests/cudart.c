/* A program of the CUDA runtime, of any version from 11 to 13: it grows arrays, and tells what it finds. It needs no header of CUDA's. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TO_DEVICE = 1, TO_HOST = 2, ON_DEVICE = 3 };
struct channels {
    int x, y, z, w, kind;
};

int cudaGetDeviceCount(int *);
int cudaRuntimeGetVersion(int *);
int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaMemset(void *, int, size_t);
int cudaMemcpy(void *, const void *, size_t, int);
int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int cudaMallocAsync(void **, size_t, void *);
int cudaFreeAsync(void *, void *);
int cudaMallocArray(void **, const struct channels *, size_t, size_t, unsigned);
int cudaFreeArray(void *);
int cudaMemGetInfo(size_t *, size_t *);
int cudaStreamCreate(void **);
int cudaStreamDestroy(void *);
int cudaStreamSynchronize(void *);
int cudaEventCreate(void **);
int cudaEventRecord(void *, void *);
int cudaEventSynchronize(void *);
int cudaEventElapsedTime(float *, void *, void *);
int cudaEventDestroy(void *);
int cudaDeviceSynchronize(void);
int cudaDeviceReset(void);
/* From version 12 on it tells more, which is not asked. */
int cudaGetDriverEntryPoint(const char *, void **, unsigned long long, int *);

#define CALL(call)                             \
    do {                                       \
        int code = (call);                     \
        if (code) printf("%s: %d\n", #call, code); \
    } while (0)

static const size_t mib = 1 << 20;

static unsigned word(const char *at) {
    unsigned value = 0;
    CALL(cudaMemcpy(&value, at, sizeof value, TO_HOST));
    return value;
}

static size_t left(void) {
    size_t left = 0, all = 0;
    CALL(cudaMemGetInfo(&left, &all));
    return left / mib;
}

static void grow(const char *how, void *stream) {
    size_t bytes = 256 * mib;
    char *array = NULL, *grown = NULL;
    CALL(cudaMalloc((void **)&array, bytes));
    CALL(cudaMemset(array, 7, bytes));
    CALL(cudaDeviceSynchronize());
    for (int turn = 0; turn < 3; turn++) {
        size_t more = bytes + 64 * mib;
        CALL(cudaMalloc((void **)&grown, more));
        if (stream) CALL(cudaMemcpyAsync(grown, array, bytes, ON_DEVICE, stream));
        else CALL(cudaMemcpy(grown, array, bytes, ON_DEVICE));
        CALL(cudaFree(array));
        CALL(cudaMemset(grown + bytes, turn, more - bytes));
        printf("%s %d: %x %x %x\n", how, turn, word(grown), word(grown + bytes - 4), word(grown + more - 4));
        array = grown, bytes = more;
        CALL(cudaDeviceSynchronize());
    }
    CALL(cudaFree(array));
}

int main(void) {
    int count = 0, version = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    int code = cudaGetDeviceCount(&count);
    CALL(cudaRuntimeGetVersion(&version));
    if (code) return printf("no devices: %d\n", code), 0;
    CALL(cudaFree(NULL));
    grow("grown", NULL);
    void *stream = NULL, *start = NULL, *end = NULL, *pooled = NULL, *array = NULL;
    CALL(cudaStreamCreate(&stream));
    grow("on a stream", stream);

    char text[] = "a text that goes there and back", back[sizeof text] = "";
    float milliseconds = -1;
    CALL(cudaEventCreate(&start));
    CALL(cudaEventCreate(&end));
    CALL(cudaEventRecord(start, stream));
    CALL(cudaMallocAsync(&pooled, 8 * mib, stream));
    CALL(cudaMemcpyAsync(pooled, text, sizeof text, TO_DEVICE, stream));
    CALL(cudaMemcpyAsync(back, pooled, sizeof text, TO_HOST, stream));
    CALL(cudaFreeAsync(pooled, stream));
    CALL(cudaEventRecord(end, stream));
    CALL(cudaEventSynchronize(end));
    CALL(cudaEventElapsedTime(&milliseconds, start, end));
    printf("of a pool: %s, in order: %d\n", back, milliseconds >= 0);
    CALL(cudaMallocAsync(&pooled, 1 * mib, stream));
    CALL(cudaStreamSynchronize(stream));
    CALL(cudaFree(pooled));

    struct channels channels = {32, 0, 0, 0, 2};
    CALL(cudaMallocArray(&array, &channels, 1024, 1024, 0));
    CALL(cudaFreeArray(array));

    void *large = NULL, *none = NULL;
    size_t before = left();
    CALL(cudaMalloc(&large, 512 * mib));
    printf("taken: %zu\n", before - left());
    CALL(cudaFree(large));
    printf("too large: %d\n", cudaMalloc(&none, (size_t)1 << 45));

    int (*allocate)(uint64_t *, size_t) = NULL, (*release)(uint64_t) = NULL;
    int (*range)(uint64_t *, size_t *, uint64_t) = NULL;
    uint64_t own = 0, base = 0;
    size_t size = 0;
    CALL(cudaGetDriverEntryPoint("cuMemAlloc", (void **)&allocate, 0, NULL));
    CALL(cudaGetDriverEntryPoint("cuMemFree", (void **)&release, 0, NULL));
    CALL(cudaGetDriverEntryPoint("cuMemGetAddressRange", (void **)&range, 0, NULL));
    if (!allocate || !release || !range) return printf("no functions of the driver\n"), 0;
    CALL(allocate(&own, 16 * mib));
    CALL(range(&base, &size, own + mib));
    printf("the driver's: %d %zu\n", own && base == own, size / mib);
    CALL(release(own));

    CALL(cudaEventDestroy(start));
    CALL(cudaEventDestroy(end));
    CALL(cudaStreamDestroy(stream));
    CALL(cudaMalloc(&large, 512 * mib));
    CALL(cudaDeviceReset());
    /* What the reset left is taken by nobody. */
    CALL(cudaMalloc(&large, 32 * mib));
    printf("after a reset: %d\n", large != NULL);
    CALL(cudaDeviceReset());
    return 0;
}
