/* A program of the CUDA runtime, of any version from 11 to 13, as nvcc makes one: its kernel is in a fat binary that it registers. It needs no header of
 * CUDA's, and its fat binary has nothing in it but what the fake driver looks for. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TO_DEVICE = 1, TO_HOST = 2, DEFAULT = 4 };
struct size3 {
    unsigned x, y, z;
};

int cudaGetDeviceCount(int *);
int cudaRuntimeGetVersion(int *);
int cudaDriverGetVersion(int *);
int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaHostAlloc(void **, size_t, unsigned);
int cudaFreeHost(void *);
int cudaMemcpy(void *, const void *, size_t, int);
int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int cudaMemcpy2D(void *, size_t, const void *, size_t, size_t, size_t, int);
int cudaMallocAsync(void **, size_t, void *);
int cudaFreeAsync(void *, void *);
int cudaStreamCreate(void **);
int cudaStreamDestroy(void *);
int cudaStreamSynchronize(void *);
int cudaLaunchHostFunc(void *, void (*)(void *), void *);
int cudaEventCreate(void **);
int cudaEventRecord(void *, void *);
int cudaEventSynchronize(void *);
int cudaEventElapsedTime(float *, void *, void *);
int cudaEventDestroy(void *);
int cudaDeviceSynchronize(void);
int cudaDeviceReset(void);
int cudaGetLastError(void);
const char *cudaGetErrorString(int);
int cudaLaunchKernel(const void *, struct size3, struct size3, void **, size_t, void *);
int cudaStreamBeginCapture(void *, int);
int cudaStreamEndCapture(void *, void **);
int cudaGraphLaunch(void *, void *);
void **__cudaRegisterFatBinary(const void *);
void __cudaRegisterFatBinaryEnd(void **);
void __cudaUnregisterFatBinary(void **);
void __cudaRegisterFunction(void **, const void *, char *, const char *, int, void *, void *, void *, void *, int *);

static const struct {
    unsigned magic;
    unsigned short version, head;
    uint64_t size;
    char text[16];
} binary = {0xba55ed50, 1, 16, 16, "vm-cuda-fake"};
static const struct {
    unsigned magic, version;
    const void *data;
    void *name;
} wrapper = {0x466243b1, 1, &binary, NULL};

#define CALL(call)                                                                 \
    do {                                                                           \
        int code = (call);                                                         \
        if (code) {                                                                \
            printf("%s: %d %s\n", #call, code, cudaGetErrorString(code));          \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

static void add(void) {}
static int called;
static void call(void *argument) { called += (int)(intptr_t)argument; }

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    void **handle = __cudaRegisterFatBinary(&wrapper);
    __cudaRegisterFunction(handle, (const void *)add, "add", "add", -1, NULL, NULL, NULL, NULL, NULL);
    __cudaRegisterFatBinaryEnd(handle);
    int count = 0, runtime = 0, driver = 0;
    CALL(cudaRuntimeGetVersion(&runtime));
    CALL(cudaDriverGetVersion(&driver));
    CALL(cudaGetDeviceCount(&count));
    printf("runtime %d, driver %d, %d devices\n", runtime, driver, count);
    enum { N = 1 << 20 };
    size_t bytes = N * sizeof(uint32_t);
    uint32_t *a = malloc(bytes), *b = NULL, *c = calloc(1, bytes);
    CALL(cudaHostAlloc((void **)&b, bytes, 0));
    for (uint32_t i = 0; i < N; i++) a[i] = i, b[i] = 5 * i;
    void *x, *y, *z, *stream, *begin, *end;
    CALL(cudaStreamCreate(&stream));
    CALL(cudaEventCreate(&begin));
    CALL(cudaEventCreate(&end));
    CALL(cudaMalloc(&x, bytes));
    CALL(cudaMalloc(&y, bytes));
    CALL(cudaMallocAsync(&z, bytes, stream));
    CALL(cudaMemcpy(x, a, bytes, TO_DEVICE));
    CALL(cudaMemcpyAsync(y, b, bytes, TO_DEVICE, stream));
    CALL(cudaEventRecord(begin, stream));
    uint64_t n = N;
    void *arguments[] = {&z, &x, &y, &n};
    CALL(cudaLaunchKernel((const void *)add, (struct size3){N / 256, 1, 1}, (struct size3){256, 1, 1}, arguments, 0, stream));
    CALL(cudaGetLastError());
    CALL(cudaEventRecord(end, stream));
    CALL(cudaLaunchHostFunc(stream, call, (void *)3));
    CALL(cudaEventSynchronize(end));
    float time = -1;
    CALL(cudaEventElapsedTime(&time, begin, end));
    CALL(cudaStreamSynchronize(stream));
    CALL(cudaMemcpy(c, z, bytes, DEFAULT));
    size_t wrong = 0;
    for (uint32_t i = 0; i < N; i++) wrong += c[i] != 6 * i;
    printf("wrong: %zu, time: %d, called: %d\n", wrong, time >= 0, called);
    memset(c, 0, bytes);
    CALL(cudaMemcpy2D(c, 100, x, 400, 100, 1000, TO_HOST));
    wrong = 0;
    for (uint32_t i = 0; i < 25 * 1000; i++) wrong += c[i] != i / 25 * 100 + i % 25;
    printf("rows: %zu wrong\n", wrong);
    CALL(cudaFreeAsync(z, stream));
    CALL(cudaFreeHost(b));
    CALL(cudaFree(x));
    printf("freed twice: %d\n", cudaFree(x));
    printf("last: %d\n", cudaGetLastError());
    CALL(cudaEventDestroy(begin));
    CALL(cudaStreamDestroy(stream));
    CALL(cudaDeviceSynchronize());
    CALL(cudaDeviceReset());
    CALL(cudaMalloc(&x, bytes));
    CALL(cudaMemcpy(x, a, bytes, TO_DEVICE));
    CALL(cudaLaunchKernel((const void *)add, (struct size3){N / 256, 1, 1}, (struct size3){256, 1, 1}, (void *[]){&x, &x, &x, &n}, 0, NULL));
    CALL(cudaMemcpy(c, x, bytes, TO_HOST));
    printf("after a reset: %d\n", c[7] == 14);
    __cudaUnregisterFatBinary(handle);
    return 0;
}
