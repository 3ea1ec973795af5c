/* A driver in the place of libcuda.so.1, for tests without a GPU. Contexts, streams and kernels are numbers, memory is the process's, and launches
 * compute nothing. It notes what it is asked, knows which memory it gave, and fails where it is told to. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int status;
typedef uint64_t word;
enum { OUT_OF_MEMORY = 2, NO_CONTEXT = 201, INVALID_HANDLE = 400, DESTROYED = 709 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char noted[1 << 16];
static int noting;
static int watched;
static char failing[64];
static status with;
static int after;

/* For tests. */
void fake_note(int on) { noting = on, noted[0] = 0, watched = on || *failing; }
const char *fake_noted(void) { return noted; }
void fake_fail(const char *call, status code, int calls) {
    snprintf(failing, sizeof failing, "%s", call), with = code, after = calls, watched = noting || *call;
}

static status note(const char *call, word about) {
    status result = 0;
    /* A bench asks often, and is told quickly. */
    if (!__atomic_load_n(&watched, __ATOMIC_RELAXED)) return 0;
    pthread_mutex_lock(&lock);
    size_t length = strlen(noted);
    if (noting && length < sizeof noted - 100) {
        if (about) snprintf(noted + length, 100, "%s(%llu) ", call, (unsigned long long)about);
        else snprintf(noted + length, 100, "%s ", call);
    }
    if (!strcmp(call, failing) && after-- <= 0) result = with;
    pthread_mutex_unlock(&lock);
    return result;
}

/* Contexts: a handle is where one is, its number is not used again. */
typedef struct { word number; int live; } context;
static context contexts[64];
static int known = 1;
static __thread context *stack[16];
static __thread int depth;

static context *current(void) { return depth ? stack[depth - 1] : NULL; }
static status lost(context *of) { return !of ? NO_CONTEXT : of->live ? 0 : DESTROYED; }

status cuInit(unsigned flags) { return (void)flags, note("cuInit", 0); }
status cuDriverGetVersion(int *version) { return *version = 13000, note("cuDriverGetVersion", 0); }
status cuGetErrorName(status code, const char **name) {
    return *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code == INVALID_HANDLE ? "CUDA_ERROR_INVALID_HANDLE" : "CUDA_ERROR", 0;
}
status cuGetErrorString(status code, const char **text) { return (void)code, *text = "as the test wants it", 0; }
status cuDeviceGetCount(int *count) { return *count = 1, note("cuDeviceGetCount", 0); }
status cuDeviceGet(int *device, int ordinal) { return *device = ordinal, note("cuDeviceGet", 0); }
status cuDeviceGetName(char *name, int length, int device) { return (void)device, snprintf(name, length, "fake"), 0; }
status cuDeviceGetPCIBusId(char *name, int length, int device) { return (void)device, snprintf(name, length, "0000:01:00.0"), 0; }
status cuDeviceTotalMem_v2(size_t *bytes, int device) { return (void)device, *bytes = 1ull << 36, 0; }
status cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    switch (attribute) {
    case 2: case 3: *value = 1024; return 0;
    case 4: *value = 64; return 0;
    case 1: *value = 1024; return 0;
    case 5: *value = INT32_MAX; return 0;
    case 6: case 7: *value = 65535; return 0;
    case 10: *value = 32; return 0;
    case 16: *value = 132; return 0;
    case 75: *value = 9; return 0;
    case 76: *value = 0; return 0;
    case 97: *value = 232448; return 0;
    default: *value = 1; return 0;
    }
}
status cuDevicePrimaryCtxRetain(context **of, int device) {
    (void)device;
    contexts[0].number = 1, contexts[0].live = 1;
    return *of = &contexts[0], note("cuDevicePrimaryCtxRetain", 0);
}
status cuCtxCreate_v2(context **of, unsigned flags, int device) {
    (void)flags, (void)device;
    pthread_mutex_lock(&lock);
    context *made = &contexts[known];
    made->number = ++known, made->live = 1;
    pthread_mutex_unlock(&lock);
    stack[depth++] = made;
    return *of = made, 0;
}
status cuCtxDestroy_v2(context *of) { return of->live = 0, 0; }
status cuCtxGetCurrent(context **of) { return *of = current(), note("cuCtxGetCurrent", 0); }
status cuCtxSetCurrent(context *of) {
    if (depth) depth--;
    if (of) stack[depth++] = of;
    return note("cuCtxSetCurrent", 0);
}
status cuCtxPushCurrent_v2(context *of) { return stack[depth++] = of, note("cuCtxPushCurrent", 0); }
status cuCtxPopCurrent_v2(context **of) { return *of = current(), depth--, note("cuCtxPopCurrent", 0); }
status cuCtxGetDevice(int *device) { return *device = 0, note("cuCtxGetDevice", 0); }
status cuCtxGetId(context *of, unsigned long long *id) {
    status failed = note("cuCtxGetId", 0);
    return *id = of->number, failed ? failed : lost(of);
}

/* Memory: what was allocated and not freed. */
enum { HOST = 1, DEVICE = 2 };
static struct { word address; size_t bytes; context *of; int kind; } memory[256];
static int used;
static status allocated(void *made, size_t bytes, int kind) {
    if (!made) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    for (int at = 0; at < 256; at++)
        if (!memory[at].address) {
            memory[at].address = (word)(uintptr_t)made, memory[at].bytes = bytes, memory[at].of = current(), memory[at].kind = kind;
            if (at >= used) used = at + 1;
            break;
        }
    pthread_mutex_unlock(&lock);
    return 0;
}
status cuMemAlloc_v2(word *address, size_t bytes) {
    void *made = aligned_alloc(256, (bytes + 255) / 256 * 256);
    *address = (word)(uintptr_t)made;
    return allocated(made, bytes, DEVICE);
}
status cuMemHostAlloc(void **host, size_t bytes, unsigned flags) {
    (void)flags, *host = aligned_alloc(256, (bytes + 255) / 256 * 256);
    return allocated(*host, bytes, HOST);
}
/* What was freed is known no more, and given to nobody: the process's memory stays. */
status cuMemFree_v2(word address) {
    pthread_mutex_lock(&lock);
    for (int at = 0; at < 256; at++)
        if (memory[at].address == address) memory[at].address = 0;
    pthread_mutex_unlock(&lock);
    return 0;
}
status cuMemcpyAsync(word target, word source, size_t bytes, void *stream) {
    (void)stream, memcpy((void *)(uintptr_t)target, (void *)(uintptr_t)source, bytes);
    return 0;
}
status cuPointerGetAttributes(unsigned count, const int *attributes, void **values, word address) {
    status failed = note("cuPointerGetAttributes", 0);
    int found = -1;
    pthread_mutex_lock(&lock);
    for (int at = 0; at < used; at++)
        if (memory[at].address && address - memory[at].address < memory[at].bytes) found = at;
    for (unsigned at = 0; at < count; at++) {
        word value = 0;
        size_t bytes = 8;
        switch (attributes[at]) {
        case 1: value = found < 0 ? 0 : (word)(uintptr_t)memory[found].of; break;
        case 2: value = found < 0 ? 0 : memory[found].kind, bytes = 4; break;
        case 8: bytes = 4; break;
        case 9: value = found < 0 ? (word)-2 : 0, bytes = 4; break;
        case 11: value = found < 0 ? 0 : memory[found].address; break;
        case 12: value = found < 0 ? 0 : memory[found].bytes; break;
        default: abort();
        }
        memcpy(values[at], &value, bytes);
    }
    pthread_mutex_unlock(&lock);
    return failed;
}

/* Streams: a number, and the context's beside it. */
typedef struct { word number; context *of; int capturing; } stream;
static word streams;
static __thread unsigned mode;
status cuStreamCreate(stream **made, unsigned flags) {
    (void)flags, *made = calloc(1, sizeof **made);
    (*made)->number = __sync_add_and_fetch(&streams, 1), (*made)->of = current();
    return 0;
}
status cuStreamDestroy_v2(stream *of) { return of->of = NULL, 0; }
status cuStreamSynchronize(stream *of) { return (void)of, 0; }
static int capturing;
status cuStreamBeginCapture_v2(stream *of, unsigned how) { return (void)how, of->capturing = 1, __sync_add_and_fetch(&capturing, 1), 0; }
status cuStreamEndCapture(stream *of, void **graph) {
    __sync_sub_and_fetch(&capturing, 1);
    return of->capturing = 0, *graph = of, 0;
}
status cuStreamIsCapturing(stream *of, unsigned *is) { return *is = of && of->capturing, note("cuStreamIsCapturing", 0); }
status cuThreadExchangeStreamCaptureMode(unsigned *with) {
    unsigned before = mode;
    return mode = *with, *with = before, note("cuThreadExchangeStreamCaptureMode", 0);
}

/* Kernels. What loads in a capture must be let. */
static word loaded;
/* Compiles for a third of a second where that is asked for, by a library that is loaded for the first kernel. */
static int compiling;
int fake_compiling(void) { return __atomic_load_n(&compiling, __ATOMIC_ACQUIRE); }
static void compile(void) {
    void (*step)(void) = NULL;
    void *compiler = getenv("FAKE_COMPILER") ? dlopen("libnvidia-ptxjitcompiler.so.1", RTLD_NOW) : NULL;
    if (compiler) *(void **)&step = dlsym(compiler, "compile");
    __atomic_store_n(&compiling, step != NULL, __ATOMIC_RELEASE);
    for (int at = 0; step && at < 300; at++) step(), usleep(1000);
}

status cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values) {
    (void)image, (void)count, (void)options, (void)values;
    compile();
    status failed = note("cuModuleLoadDataEx", 0);
    if (!failed && capturing && mode != 2) failed = 900;
    if (!failed) *module = malloc(1), __sync_add_and_fetch(&loaded, 1);
    return failed;
}
word fake_loaded(void) { return loaded; }
status cuModuleGetFunction(void **function, void *module, const char *name) { return (void)name, *function = module, note("cuModuleGetFunction", 0); }
status cuModuleGetGlobal_v2(word *address, size_t *bytes, void *module, const char *name) {
    static char nothing[128] __attribute__((aligned(64)));
    return (void)module, (void)name, *address = (word)nothing, *bytes = sizeof nothing, note("cuModuleGetGlobal_v2", 0);
}
status cuFuncGetAttribute(int *value, int attribute, void *function) { return (void)function, *value = attribute == 0 ? 1024 : 0, 0; }
status cuFuncSetAttribute(void *function, int attribute, int value) { return (void)function, (void)attribute, (void)value, note("cuFuncSetAttribute", 0); }
status cuTensorMapEncodeTiled(word *map) { return memset(map, 1, 128), note("cuTensorMapEncodeTiled", 0); }
status cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared, stream *on,
                      void **parameters, void **extra) {
    (void)shared;
    status failed = note("cuLaunchKernel", on ? on->number : 0);
    if (failed) return failed;
    if (!function || !(x && y && z && bx && by && bz) || !(parameters || extra)) return 1;
    return on && on->of != current() ? INVALID_HANDLE : lost(current());
}

/* What is not asked for by the library for C. */
#define NOTHING(name) status name(void) { return note(#name, 0); }
NOTHING(cuDeviceGetDefaultMemPool) NOTHING(cuDevicePrimaryCtxRelease_v2) NOTHING(cuStreamWaitEvent) NOTHING(cuEventCreate)
NOTHING(cuEventDestroy_v2) NOTHING(cuEventRecord) NOTHING(cuEventQuery) NOTHING(cuEventElapsedTime) NOTHING(cuMemPoolCreate)
NOTHING(cuMemPoolDestroy) NOTHING(cuMemPoolSetAttribute) NOTHING(cuMemPoolGetAttribute) NOTHING(cuMemPoolTrimTo)
NOTHING(cuMemAllocFromPoolAsync) NOTHING(cuMemAllocAsync) NOTHING(cuMemFreeAsync) NOTHING(cuMemAllocManaged) NOTHING(cuMemAdvise)
NOTHING(cuMemFreeHost) NOTHING(cuMemHostRegister_v2) NOTHING(cuMemHostUnregister) NOTHING(cuMemHostGetDevicePointer_v2)
NOTHING(cuMemsetD8Async) NOTHING(cuMemGetInfo_v2) NOTHING(cuModuleUnload) NOTHING(cuLinkCreate_v2) NOTHING(cuLinkAddData_v2)
NOTHING(cuLinkComplete) NOTHING(cuLinkDestroy) NOTHING(cuGraphCreate) NOTHING(cuGraphAddKernelNode_v2)
NOTHING(cuGraphAddEventRecordNode) NOTHING(cuGraphExecKernelNodeSetParams_v2) NOTHING(cuGraphInstantiateWithFlags)
NOTHING(cuGraphLaunch) NOTHING(cuGraphExecDestroy) NOTHING(cuGraphDestroy) NOTHING(cuDeviceGetUuid_v2) NOTHING(cuImportExternalMemory)
NOTHING(cuExternalMemoryGetMappedBuffer) NOTHING(cuDestroyExternalMemory) NOTHING(cuImportExternalSemaphore)
NOTHING(cuExternalMemoryGetMappedMipmappedArray) NOTHING(cuMipmappedArrayGetLevel) NOTHING(cuMipmappedArrayDestroy)
NOTHING(cuSurfObjectCreate) NOTHING(cuSurfObjectDestroy)
NOTHING(cuWaitExternalSemaphoresAsync) NOTHING(cuSignalExternalSemaphoresAsync) NOTHING(cuDestroyExternalSemaphore)
