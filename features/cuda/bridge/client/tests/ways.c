/* What programs do in several ways: threads, copies of two dimensions, functions that streams call, captures, forks. Its argument says which. */
#define _GNU_SOURCE
#define ON_FAILURE exit(1)
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include "../../../hook/preload/tests/driver.h"

static const char *text = "vm-cuda-fake\n";
static void *module, *add, *store, *empty;

static void *function(const char *name) {
    void *found = NULL;
    CALL("cuModuleGetFunction", (void **, void *, const char *), &found, module, name);
    return found;
}

static void load_kernels(void) {
    CALL("cuModuleLoadData", (void **, const void *), &module, text);
    add = function("add"), store = function("store"), empty = function("empty");
}

static void launch(void *kernel, void *stream, void **parameters) {
    CALL("cuLaunchKernel", (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **), kernel, 1, 1, 1, 1, 1,
         1, 0, stream, parameters, NULL);
}

/* Each thread waits for the one before it, without a call of the driver, and goes on with what that one did. */
enum { THREADS = 8, TURNS = 200 };
static ptr cell;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int turn;

static void *take_turns(void *argument) {
    int own = (int)(intptr_t)argument;
    CALL("cuCtxSetCurrent", (void *), context);
    for (int i = 0; i < TURNS; i++) {
        pthread_mutex_lock(&lock);
        while (turn % THREADS != own) pthread_cond_wait(&changed, &lock);
        uint64_t one = 1;
        ptr from = cell + 4 * turn, ones = cell + 4 * (THREADS * TURNS + 4), to = from + 4;
        void *parameters[] = {&to, &from, &ones, &one};
        launch(add, NULL, parameters);
        turn++;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

/* A call when a thread's data ends. */
static pthread_key_t last;
static uint32_t left;
static void at_end(void *argument) { CALL("cuMemcpyDtoH_v2", (void *, ptr, size_t), &left, (ptr)argument, sizeof left); }
static void *end_late(void *argument) {
    CALL("cuCtxSetCurrent", (void *), context);
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), (ptr)argument, 77, 1);
    pthread_setspecific(last, argument);
    return NULL;
}

/* A thread's launch fails, and the thread ends without another call that could say so. */
static void *fail_and_end(void *argument) {
    CALL("cuCtxSetCurrent", (void *), context);
    *(int *)argument = TRY("cuLaunchKernel", (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **), empty, 1, 1, 1, 5000, 1, 1, 0, NULL, NULL, NULL);
    return NULL;
}

static void threads(void) {
    begin();
    load_kernels();
    int failed = 0;
    pthread_t ended;
    pthread_create(&ended, NULL, fail_and_end, &failed);
    pthread_join(ended, NULL);
    int waited = TRY("cuCtxSynchronize", (void));
    printf("failed in an ended thread: %d, and then: %d\n", failed | waited, TRY("cuCtxSynchronize", (void)));
    pthread_t late;
    pthread_key_create(&last, at_end);
    pthread_create(&late, NULL, end_late, (void *)allocate(4096));
    pthread_join(late, NULL);
    printf("at its end: %u\n", left);
    cell = allocate(64 << 10);
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), cell, 0, THREADS * TURNS + 4);
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), cell + 4 * (THREADS * TURNS + 4), 1, 1);
    pthread_t all[THREADS];
    for (intptr_t i = 0; i < THREADS; i++) pthread_create(&all[i], NULL, take_turns, (void *)i);
    for (int i = 0; i < THREADS; i++) pthread_join(all[i], NULL);
    printf("in turn: %u\n", word(cell + 4 * THREADS * TURNS));
}

typedef struct {
    size_t x, y;
    unsigned kind;
    const void *host;
    ptr device;
    void *array;
    size_t pitch;
} end2;
typedef struct {
    end2 from, to;
    size_t width, height;
} copy2;
typedef struct {
    size_t x, y, z, lod;
    unsigned kind;
    const void *host;
    ptr device;
    void *array, *reserved;
    size_t pitch, height;
} end3;
typedef struct {
    end3 from, to;
    size_t width, height, depth;
} copy3;

static void strided(void) {
    begin();
    enum { W = 300, H = 5000, P = 512 };
    unsigned char *host = malloc(P * H), *back = calloc(P, H);
    for (size_t i = 0; i < P * H; i++) host[i] = i * 7 + i / 251;
    ptr made = 0;
    size_t pitch = 0;
    CALL("cuMemAllocPitch_v2", (ptr *, size_t *, size_t, size_t, unsigned), &made, &pitch, W, H, 4);
    copy2 copy = {.from = {.x = 3, .y = 1, .kind = 1, .host = host, .pitch = P}, .to = {.kind = 2, .device = made, .pitch = pitch}, .width = W - 8, .height = H - 2};
    CALL("cuMemcpy2D_v2", (copy2 *), &copy);
    copy2 other = {.from = copy.to, .to = {.x = 3, .y = 1, .kind = 4, .device = (ptr)back, .pitch = P}, .width = W - 8, .height = H - 2};
    CALL("cuMemcpy2DUnaligned_v2", (copy2 *), &other);
    size_t wrong = 0, outside = 0;
    for (size_t y = 0; y < H; y++)
        for (size_t x = 0; x < P; x++) {
            int in = y >= 1 && y < H - 1 && x >= 3 && x < W - 5;
            if (in) wrong += back[y * P + x] != host[y * P + x];
            else outside += back[y * P + x] != 0;
        }
    printf("two: %zu wrong, %zu outside\n", wrong, outside);
    /* Between places of the device, and on a stream. */
    void *stream;
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    ptr second = allocate(P * H);
    copy2 within = {.from = copy.to, .to = {.kind = 2, .device = second, .pitch = P}, .width = W - 8, .height = H - 2};
    memset(back, 0, P * H);
    copy2 home = {.from = within.to, .to = {.kind = 1, .host = back, .pitch = P}, .width = W - 8, .height = H - 2};
    CALL("cuMemcpy2DAsync_v2", (copy2 *, void *), &within, stream);
    CALL("cuMemcpy2DAsync_v2", (copy2 *, void *), &home, stream);
    CALL("cuStreamSynchronize", (void *), stream);
    wrong = 0;
    for (size_t y = 0; y < H - 2; y++) wrong += memcmp(back + y * P, host + (y + 1) * P + 3, W - 8) != 0;
    printf("on a stream: %zu wrong\n", wrong);
    /* Three dimensions: layers of 16 rows of 64 bytes. */
    ptr layers = allocate(64 * 16 * 8);
    copy3 cube = {.from = {.x = 1, .y = 2, .z = 3, .kind = 1, .host = host, .pitch = 100, .height = 20}, .to = {.kind = 2, .device = layers, .pitch = 64, .height = 16}, .width = 60, .height = 10, .depth = 4};
    CALL("cuMemcpy3D_v2", (copy3 *), &cube);
    memset(back, 0, P * H);
    copy3 uncube = {.from = cube.to, .to = {.kind = 1, .host = back, .pitch = 64, .height = 16}, .width = 60, .height = 10, .depth = 4};
    CALL("cuMemcpy3D_v2", (copy3 *), &uncube);
    wrong = 0;
    for (size_t z = 0; z < 4; z++)
        for (size_t y = 0; y < 10; y++) wrong += memcmp(back + (z * 16 + y) * 64, host + ((z + 3) * 20 + y + 2) * 100 + 1, 60) != 0;
    printf("three: %zu wrong\n", wrong);
    copy.from.kind = 9;
    printf("no kind: %d\n", TRY("cuMemcpy2D_v2", (copy2 *), &copy) != 0);
}

static int called;
static void call(void *argument) { called = called * 10 + (int)(intptr_t)argument; }
static void call_back(void *stream, int status, void *argument) { called = called * 10 + (stream && !status ? (int)(intptr_t)argument : 0); }

static void callbacks(void) {
    begin();
    void *stream;
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    CALL("cuLaunchHostFunc", (void *, void (*)(void *), void *), stream, call, (void *)1);
    CALL("cuStreamAddCallback", (void *, void (*)(void *, int, void *), void *, unsigned), stream, call_back, (void *)2, 0);
    CALL("cuLaunchHostFunc", (void *, void (*)(void *), void *), stream, call, (void *)3);
    CALL("cuStreamSynchronize", (void *), stream);
    printf("called: %d\n", called);
    /* Recorded, and called as often as it is launched. */
    void *graph, *exec;
    int status = 9;
    CALL("cuStreamIsCapturing", (void *, int *), stream, &status);
    printf("captures: %d", status);
    CALL("cuStreamBeginCapture_v2", (void *, int), stream, 0);
    CALL("cuStreamIsCapturing", (void *, int *), stream, &status);
    printf(", %d\n", status);
    CALL("cuLaunchHostFunc", (void *, void (*)(void *), void *), stream, call, (void *)4);
    CALL("cuStreamEndCapture", (void *, void **), stream, &graph);
    CALL("cuGraphInstantiateWithFlags", (void **, void *, uint64_t), &exec, graph, 0);
    CALL("cuGraphLaunch", (void *, void *), exec, stream);
    CALL("cuGraphLaunch", (void *, void *), exec, stream);
    CALL("cuStreamSynchronize", (void *), stream);
    printf("called: %d\n", called);
    size_t count = 0;
    CALL("cuGraphGetNodes", (void *, void **, size_t *), graph, NULL, &count);
    printf("nodes: %zu\n", count);
    CALL("cuGraphExecDestroy", (void *), exec);
    CALL("cuGraphDestroy", (void *), graph);
    int mode = 2;
    CALL("cuThreadExchangeStreamCaptureMode", (int *), &mode);
    printf("mode: %d", mode);
    CALL("cuThreadExchangeStreamCaptureMode", (int *), &mode);
    printf(", %d\n", mode);
}

static void forks(void) {
    load();
    /* Before the driver is started a child is its own. */
    fflush(stdout);
    if (!fork()) {
        begin();
        printf("child: %d\n", allocate(4096) != 0);
        fflush(stdout);
        _exit(0);
    }
    wait(NULL);
    begin();
    ptr made = allocate(4096);
    fflush(stdout);
    if (!fork()) {
        ptr other;
        printf("child: %d, %d\n", TRY("cuMemAlloc_v2", (ptr *, size_t), &other, 4096), TRY("cuInit", (unsigned), 0));
        fflush(stdout);
        exit(0);
    }
    wait(NULL);
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), made, 5, 1024);
    printf("parent: %u\n", word(made + 4092));
}

/* What fails later is told by a later call, and stays of this context. */
static void faults(void) {
    begin();
    load_kernels();
    ptr none = 0x1000;
    uint32_t value = 1;
    void *parameters[] = {&none, &value};
    launch(store, NULL, parameters);
    int first = TRY("cuCtxSynchronize", (void)), second = TRY("cuCtxSynchronize", (void));
    printf("fault: %d %d\n", first, second);
}

/* Memory of the program that it registers: it is copied, and known as the host's. */
static void registered(void) {
    begin();
    enum { BYTES = 1 << 16 };
    uint32_t *host = aligned_alloc(4096, BYTES);
    for (int i = 0; i < BYTES / 4; i++) host[i] = 3 * i;
    unsigned kind = 9, flags = 9;
    printf("before: %d\n", TRY("cuPointerGetAttribute", (void *, int, ptr), &kind, 2, (ptr)host));
    printf("register: %d", TRY("cuMemHostRegister_v2", (void *, size_t, unsigned), host, BYTES, 1));
    printf(", again: %d\n", TRY("cuMemHostRegister_v2", (void *, size_t, unsigned), host + 1024, 4096, 0));
    CALL("cuPointerGetAttribute", (void *, int, ptr), &kind, 2, (ptr)host + 100);
    CALL("cuMemHostGetFlags", (unsigned *, void *), &flags, host);
    void *stream;
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    ptr made = allocate(BYTES);
    CALL("cuMemcpyHtoDAsync_v2", (ptr, const void *, size_t, void *), made, host, BYTES, stream);
    CALL("cuStreamSynchronize", (void *), stream);
    memset(host, 0, BYTES);
    CALL("cuMemcpyDtoHAsync_v2", (void *, ptr, size_t, void *), host, made, BYTES, stream);
    CALL("cuStreamSynchronize", (void *), stream);
    printf("kind %u, flags %u, copied %u\n", kind, flags & 1, host[1000]);
    printf("unregister: %d", TRY("cuMemHostUnregister", (void *), host));
    printf(", again: %d", TRY("cuMemHostUnregister", (void *), host));
    printf(", after: %d\n", TRY("cuPointerGetAttribute", (void *, int, ptr), &kind, 2, (ptr)host));
}

/* Memory that several processes have, of a file with a name, of one that has none any more, and of none: what is registered of it the device reaches,
 * whoever wrote it. The last page is not whole, and what is registered begins within a page. */
static void files(void) {
    begin();
    enum { BYTES = 3 * 4096 + 100, FROM = 4096 + 64 };
    for (int way = 0; way < 3; way++) {
        char name[] = "/dev/shm/vm-bridge-XXXXXX";
        int file = way == 2 ? memfd_create("a name", 0) : mkstemp(name);
        if (file < 0 || ftruncate(file, BYTES)) exit(1);
        char *one = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        char *two = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (way == 1) unlink(name);
        int code = TRY("cuMemHostRegister_v2", (void *, size_t, unsigned), one + FROM, BYTES - FROM, 3);
        ptr device = 0, known = 1, made = allocate(4096);
        printf("%d: %d", way, code);
        printf(" %d", TRY("cuMemHostGetDevicePointer_v2", (ptr *, void *, unsigned), &device, one + FROM + 8, 0));
        CALL("cuPointerGetAttribute", (void *, int, ptr), &known, 3, (ptr)one + FROM + 8);
        /* Whether it is mapped; and the synchronisation of copies, which may be asked of any. */
        int mapped = 7, synchronous = 7;
        CALL("cuPointerGetAttribute", (void *, int, ptr), &mapped, 13, (ptr)one + FROM + 8);
        CALL("cuPointerGetAttribute", (void *, int, ptr), &synchronous, 6, (ptr)one + FROM + 8);
        strcpy(two + FROM + 8, "of another");
        CALL("cuMemcpyDtoD_v2", (ptr, ptr, size_t), made, device, 16);
        CALL("cuMemsetD8_v2", (ptr, unsigned char, size_t), device + 100, 'x', 3);
        CALL("cuCtxSynchronize", (void));
        char back[16] = "";
        CALL("cuMemcpyDtoH_v2", (void *, ptr, size_t), back, made, 16);
        printf(" %d %d %d %s, %.3s", mapped, synchronous, known == device, back, two + FROM + 108);
        strcpy(one + BYTES - 4, "end");
        CALL("cuMemcpyHtoD_v2", (ptr, const void *, size_t), made, one + BYTES - 4, 4);
        CALL("cuMemcpyDtoH_v2", (void *, ptr, size_t), back, made, 4);
        printf(", %s, %d", back, TRY("cuMemHostRegister_v2", (void *, size_t, unsigned), one + FROM + 64, 64, 0));
        printf(" %d", TRY("cuMemHostUnregister", (void *), one + FROM));
        printf(" %d\n", TRY("cuMemHostUnregister", (void *), one + FROM));
        munmap(one, BYTES), munmap(two, BYTES), close(file);
        if (!way) unlink(name);
    }
}

/* Maps memory of `cuMemCreate`. */
static ptr map_memory(uint64_t memory) {
    ptr at = 0;
    int access[] = {1, 0, 3};
    CALL("cuMemAddressReserve", (ptr *, size_t, size_t, ptr, uint64_t), &at, 2 * mib, 0, 0, 0);
    CALL("cuMemMap", (ptr, size_t, size_t, uint64_t, uint64_t), at, 2 * mib, 0, memory, 0);
    CALL("cuMemSetAccess", (ptr, size_t, const int *, size_t), at, 2 * mib, access, 1);
    return at;
}

/* Memory of another process, by a file that goes over a socket: as processes of NCCL have it. */
static void handles(void) {
    int pair[2], file = -1, code;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) exit(1);
    int child = fork() == 0;
    begin();
    struct { int kind, handles, location, device; void *none; uint64_t flags; } wanted = {1, 1, 1, 0, NULL, 0};
    uint64_t memory = 0;
    char letter = 'x', space[CMSG_SPACE(sizeof file)] = {0};
    struct iovec bytes = {&letter, 1};
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    if (child) {
        if (recvmsg(pair[1], &message, 0) != 1) exit(1);
        memcpy(&file, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof file);
        CALL("cuMemImportFromShareableHandle", (uint64_t *, void *, int), &memory, (void *)(intptr_t)file, 1);
        close(file);
        ptr at = map_memory(memory);
        CALL("cuMemRelease", (uint64_t), memory);
        printf("child: %u", word(at + 4));
        code = TRY("cuMemImportFromShareableHandle", (uint64_t *, void *, int), &memory, (void *)(intptr_t)pair[1], 1);
        printf(", a socket: %d, none: %d\n", code != 0, TRY("cuMemImportFromShareableHandle", (uint64_t *, void *, int), &memory, (void *)-1, 1) != 0);
        CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), at, 8, 2);
        CALL("cuCtxSynchronize", (void));
        fflush(stdout);
        if (write(pair[1], &letter, 1) != 1 || read(pair[1], &letter, 1) != 1) exit(1);
        printf("then: %u\n", word(at + 4));
        exit(0);
    }
    CALL("cuMemCreate", (uint64_t *, size_t, void *, uint64_t), &memory, 2 * mib, &wanted, 0);
    ptr at = map_memory(memory);
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), at, 7, 2);
    CALL("cuCtxSynchronize", (void));
    CALL("cuMemExportToShareableHandle", (int *, uint64_t, int, uint64_t), &file, memory, 1, 0);
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    *head = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof file)};
    memcpy(CMSG_DATA(head), &file, sizeof file);
    if (sendmsg(pair[0], &message, 0) != 1) exit(1);
    close(file);
    if (read(pair[0], &letter, 1) != 1) exit(1);
    printf("parent: %u\n", word(at));
    fflush(stdout);
    CALL("cuMemUnmap", (ptr, size_t), at, 2 * mib);
    CALL("cuMemRelease", (uint64_t), memory);
    if (write(pair[0], &letter, 1) != 1) exit(1);
    wait(&code);
    /* Many, each of which is closed before the next. */
    CALL("cuMemCreate", (uint64_t *, size_t, void *, uint64_t), &memory, 2 * mib, &wanted, 0);
    for (int i = 0; i < 300; i++) {
        CALL("cuMemExportToShareableHandle", (int *, uint64_t, int, uint64_t), &file, memory, 1, 0);
        close(file);
    }
    wanted.location = 3;
    printf("ended: %d, of the host: %d\n", code, TRY("cuMemCreate", (uint64_t *, size_t, void *, uint64_t), &memory, 2 * mib, &wanted, 0) != 0);
}

static void count_function(int *counted, void *function, void *owner) {
    (void)owner;
    *counted += function != NULL;
}

/* The driver's tables for NVIDIA's libraries, as far as those call them. */
static void tables(void) {
    static const unsigned char ids[3][16] = {
        {0x21, 0x31, 0x8c, 0x60, 0x97, 0x14, 0x32, 0x48, 0x8c, 0xa6, 0x41, 0xff, 0x73, 0x24, 0xc8, 0xf2},
        {0x17, 0x34, 0xdc, 0x26, 0x80, 0x0d, 0x47, 0x45, 0x87, 0x26, 0xc0, 0xf1, 0xe7, 0xdd, 0x8b, 0xca},
        {0x6e, 0x16, 0x3f, 0xbe, 0xb9, 0x58, 0x44, 0x4d, 0x83, 0x5c, 0xe1, 0x82, 0xaf, 0xf1, 0x99, 0x1e},
    };
    begin();
    load_kernels();
    void **numbers, **topology, **functions, *context, *stream, *found;
    CALL("cuGetExportTable", (void ***, const void *), &numbers, ids[0]);
    CALL("cuGetExportTable", (void ***, const void *), &topology, ids[1]);
    CALL("cuGetExportTable", (void ***, const void *), &functions, ids[2]);
    CALL("cuCtxGetCurrent", (void **), &context);
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    for (int i = 0; i < 2; i++) {
        uint64_t id = 0, known = 1;
        int first = ((int (*)(void *, void *, void **))numbers[51])(context, i ? stream : NULL, &found);
        int second = ((int (*)(void *, void *, uint64_t *))numbers[39])(context, found, &id);
        CALL("cuStreamGetId", (void *, uint64_t *), i ? stream : NULL, &known);
        printf("stream %d: %d %d %d\n", i, first, second, id == known);
    }
    unsigned char *places = NULL, *clusters = NULL;
    int code = ((int (*)(void *, void *))topology[4])(&places, &clusters);
    printf("topology: %d, the first two: %d %d, %d %d\n", code, places[0], clusters[0], places[1], clusters[1]);
    printf("given back: %d\n", ((int (*)(void *, void *))topology[13])(places, clusters));
    int counted = 0;
    unsigned count = 0;
    int64_t said = ((int64_t(*)(void *, void *, void *, void *))functions[7])(context, module, (void *)count_function, &counted);
    CALL("cuModuleGetFunctionCount", (unsigned *, void *), &count, module);
    printf("functions: %d %d\n", said == count, counted == (int)count);
}

/* Works until it is killed, or the server is: then it says what it gets. */
static void endless(void) {
    begin();
    load_kernels();
    ptr made = allocate(1 << 20);
    uint64_t n = 1 << 18;
    uint32_t value = 3;
    void *parameters[] = {&made, &value};
    (void)n;
    printf("works\n");
    fflush(stdout);
    for (;;) {
        int code = TRY("cuLaunchKernel", (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **), store, 1, 1, 1,
                       1, 1, 1, 0, NULL, parameters, NULL);
        if (!code) code = TRY("cuStreamSynchronize", (void *), NULL);
        if (code) {
            const char *name = "none";
            int again = TRY("cuMemAlloc_v2", (ptr *, size_t), &made, 4096);
            TRY("cuGetErrorName", (int, const char **), code, &name);
            printf("ends: %d %d %s\n", code, again, name);
            fflush(stdout);
            return;
        }
    }
}

/* Copies of so many bytes that they are no whole words. */
static void odd(void) {
    begin();
    unsigned char from[64], to[64];
    ptr device = allocate(64);
    void *stream = NULL;
    int wrong = 0;
    CALL("cuStreamCreate", (void **, unsigned), &stream, 0);
    for (size_t len = 1; len <= 33; len++) {
        for (int way = 0; way < 3; way++) {
            for (size_t i = 0; i < sizeof from; i++) from[i] = (unsigned char)(7 * i + 31 * len + way + 1), to[i] = 0;
            copy2 copy = {.from = {.kind = 1, .host = from + 1, .pitch = len}, .to = {.kind = 2, .device = device + 3, .pitch = len}, .width = len, .height = 1};
            if (way == 0) CALL("cuMemcpyHtoD_v2", (ptr, const void *, size_t), device + 3, from + 1, len);
            if (way == 1) CALL("cuMemcpyHtoDAsync_v2", (ptr, const void *, size_t, void *), device + 3, from + 1, len, stream);
            if (way == 2) CALL("cuMemcpy2D_v2", (copy2 *), &copy);
            CALL("cuStreamSynchronize", (void *), stream);
            CALL("cuMemcpyDtoH_v2", (void *, ptr, size_t), to, device + 3, len);
            wrong += memcmp(from + 1, to, len) || to[len];
        }
    }
    printf("odd: %d wrong\n", wrong);
}

/* What no program means: memory at nothing, more options and operations than there are. What failed before is told by no call that only names errors. */
static void nothing(void) {
    begin();
    ptr device = allocate(64);
    int codes[6] = {
        TRY("cuMemcpyHtoD_v2", (ptr, const void *, size_t), device, NULL, 8),
        TRY("cuMemcpyHtoDAsync_v2", (ptr, const void *, size_t, void *), device, NULL, 8, NULL),
        TRY("cuMemcpyDtoH_v2", (void *, ptr, size_t), NULL, device, 8),
        TRY("cuMemcpyDtoHAsync_v2", (void *, ptr, size_t, void *), NULL, device, 8, NULL),
    };
    enum { OPTIONS = 5000 };
    int *kinds = calloc(OPTIONS, sizeof *kinds);
    void **values = calloc(OPTIONS, sizeof *values), *loaded;
    for (int i = 0; i < OPTIONS; i++) values[i] = (void *)16;
    int many = TRY("cuModuleLoadDataEx", (void **, const void *, unsigned, int *, void **), &loaded, text, 65, kinds, values);
    int more = TRY("cuModuleLoadDataEx", (void **, const void *, unsigned, int *, void **), &loaded, text, OPTIONS, kinds, values);
    void *operations = calloc(300, 48);
    /* Not waited for: a later call tells what it came to. */
    TRY("cuStreamBatchMemOp_v2", (void *, unsigned, void *, unsigned), NULL, 300, operations, 0);
    int batch = TRY("cuCtxSynchronize", (void));
    printf("nothing: %d %d %d %d, options: %d %d, operations: %d\n", codes[0], codes[1], codes[2], codes[3], many, more, batch);
    /* A launch that fails is told later. */
    load_kernels();
    const char *name = "";
    int version = 0;
    TRY("cuLaunchKernel", (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **), empty, 1, 1, 1, 4096, 1, 1, 0,
        NULL, NULL, NULL);
    int named = TRY("cuGetErrorName", (int, const char **), 700, &name), asked = TRY("cuDriverGetVersion", (int *), &version);
    printf("named: %d %s, version: %d, then: %d\n", named, name, asked, TRY("cuCtxSynchronize", (void)));
    printf("still there: %u\n", word(device) * 0);
}

/* Threads that load and unload modules and libraries all the time, of which the driver frees the handles at once: each thread soon has the handles of
 * another one's functions, whose parameters are others. */
enum { LOADS = 150 };
static const struct {
    const char *name;
    int count;
    size_t sizes[4];
} kernels[] = {{"store", 2, {8, 4}}, {"add", 4, {8, 8, 8, 8}}, {"empty", 0, {0}}, {"fill", 3, {8, 8, 4}}};
static int modules_wrong;

static int is_laid_out(void *function, int kernel) {
    size_t offset, size;
    for (int i = 0; i < kernels[kernel].count; i++)
        if (TRY("cuFuncGetParamInfo", (void *, size_t, size_t *, size_t *), function, i, &offset, &size) || size != kernels[kernel].sizes[i]) return 0;
    return TRY("cuFuncGetParamInfo", (void *, size_t, size_t *, size_t *), function, kernels[kernel].count, &offset, &size) == 1;
}

static void *load_and_unload(void *argument) {
    uint32_t random = 1 + (uint32_t)(uintptr_t)argument;
    void *own = context, *loaded, *found, *of;
    CALL("cuCtxSetCurrent", (void *), context);
    ptr shared = allocate(64);
    for (uint32_t i = 0; i < LOADS; i++) {
        random = random * 1664525 + 1013904223;
        int kernel = random >> 8 & 3, way = (random >> 16) % 5;
        ptr cells = shared;
        if (way == 4) {
            /* All that is in a context ends with it. */
            CALL("cuCtxCreate_v2", (void **, unsigned, int), &own, 0, 0);
            cells = allocate(64);
        }
        CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), cells, i, 16);
        if (way == 1 || way == 2) {
            CALL("cuLibraryLoadData", (void **, const void *, void *, void *, unsigned, void *, void *, unsigned), &loaded, text, NULL, NULL, 0, NULL, NULL, 0);
            CALL("cuLibraryGetKernel", (void **, void *, const char *), &of, loaded, kernels[kernel].name);
            CALL("cuKernelGetFunction", (void **, void *), &found, of);
        } else {
            CALL("cuModuleLoadData", (void **, const void *), &loaded, text);
            CALL("cuModuleGetFunction", (void **, void *, const char *), &found, loaded, kernels[kernel].name);
        }
        uint64_t two = 2, seven = 7;
        uint32_t value = 3 * i;
        ptr second = cells + 8;
        void *parameters[][4] = {{&cells, &value}, {&cells, &second, &second, &two}, {NULL}, {&cells, &two, &seven}};
        launch(way == 2 ? of : found, NULL, parameters[kernel]);
        uint32_t expected[] = {3 * i, 2 * i, i, 7};
        int is_wrong = word(cells) != expected[kernel] || word(cells + 12) != i || !is_laid_out(found, kernel);
        if (is_wrong) __atomic_add_fetch(&modules_wrong, 1, __ATOMIC_RELAXED);
        if (way == 4) {
            CALL("cuCtxDestroy_v2", (void *), own);
            CALL("cuCtxSetCurrent", (void *), context);
        } else if (way == 1 || way == 2) {
            CALL("cuLibraryUnload", (void *), loaded);
        } else {
            CALL("cuModuleUnload", (void *), loaded);
        }
    }
    return NULL;
}

static void modules(void) {
    begin();
    pthread_t all[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++) pthread_create(&all[i], NULL, load_and_unload, (void *)i);
    for (int i = 0; i < THREADS; i++) pthread_join(all[i], NULL);
    printf("modules: %d wrong\n", modules_wrong);
}

/* Images whose headers are corrupt, or that memory ends in. */
static void images(void) {
    begin();
    char *memory = mmap(NULL, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *end = memory + 2 * 4096;
    if (mprotect(end, 4096, PROT_NONE)) exit(1);
    uint64_t sizes[] = {UINT64_MAX, INT64_MAX, 1ull << 47, 1ull << 33, 1 << 30, 4097, 4081};
    char *at = end - 4096;
    int other = 0;
    for (int i = 0; i < 7; i++) {
        uint64_t head[2] = {0x00100001ull << 32 | 0xba55ed50, sizes[i]}, wrapper[] = {0x1466243b1, (uintptr_t)at, 0};
        memcpy(at, head, 16);
        other += TRY("cuModuleLoadData", (void **, const void *), &module, at) != 200;
        other += TRY("cuModuleLoadData", (void **, const void *), &module, wrapper) != 200;
    }
    /* Tables of sections that are far behind the header. */
    memset(at, 0, 64);
    memcpy(at, "\177ELF", 4);
    memset(at + 40, 0x7f, 24);
    int elf = TRY("cuModuleLoadData", (void **, const void *), &module, at);
    memset(memory, 'x', 2 * 4096);
    other += TRY("cuModuleLoadData", (void **, const void *), &module, memory) != 200;
    other += TRY("cuModuleLoadData", (void **, const void *), &module, end) != 200;
    memcpy(end - 4, "P\355U\272", 4);
    other += TRY("cuModuleLoadData", (void **, const void *), &module, end - 4) != 200;
    printf("images: %d others, machine code: %d\n", other, elf == 200);
    printf("null: %d\n", TRY("cuModuleLoadData", (void **, const void *), &module, NULL));
    load_kernels();
    printf("then: %d\n", TRY("cuCtxSynchronize", (void)));
}

/* Copies of memory at null, and beyond the end of a device's memory with a source that is shorter. */
static void ranges(void) {
    begin();
    ptr made = allocate(4096);
    char *own = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    void *stream;
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    int other = 0;
    for (uintptr_t null = 0; null < 16; null += 8) {
        copy2 copy = {.from = {.kind = 1, .host = (void *)null}, .to = {.kind = 2, .device = made}, .width = 16, .height = 1};
        other += TRY("cuMemcpy2D_v2", (copy2 *), &copy) != 1;
        other += TRY("cuMemcpy2DAsync_v2", (copy2 *, void *), &copy, stream) != 1;
        other += TRY("cuMemcpyHtoD_v2", (ptr, uintptr_t, size_t), made, null, 16) != 1;
        other += TRY("cuMemcpyHtoDAsync_v2", (ptr, uintptr_t, size_t, void *), made, null, 16, stream) != 1;
        other += TRY("cuMemcpyDtoH_v2", (uintptr_t, ptr, size_t), null, made, 16) != 1;
        other += TRY("cuMemcpyDtoHAsync_v2", (uintptr_t, ptr, size_t, void *), null, made, 16, stream) != 1;
        other += TRY("cuMemcpy", (ptr, ptr, size_t), made, null, 16) != 1;
        other += TRY("cuMemcpyAsync", (ptr, ptr, size_t, void *), null, made, 16, stream) != 1;
        other += TRY("cuMemcpyHtoD_v2", (ptr, uintptr_t, size_t), made, null, 0) != 0;
        other += TRY("cuMemHostRegister_v2", (uintptr_t, size_t, unsigned), null, 4096, 0) != 1;
    }
    other += TRY("cuMemHostRegister_v2", (void *, size_t, unsigned), own, (size_t)1 << 50, 0) != 1;
    printf("null: %d others\n", other);
    size_t lengths[] = {1 << 20, 1 << 30, (size_t)1 << 46};
    for (int i = 0; i < 3; i++) {
        copy2 copy = {.from = {.kind = 1, .host = own}, .to = {.kind = 2, .device = made}, .width = lengths[i], .height = 1};
        printf("%d", TRY("cuMemcpyHtoD_v2", (ptr, const void *, size_t), made, own, lengths[i]));
        printf(" %d", TRY("cuMemcpyHtoDAsync_v2", (ptr, const void *, size_t, void *), made, own, lengths[i], stream));
        printf(" %d", TRY("cuMemcpyDtoH_v2", (void *, ptr, size_t), own, made, lengths[i]));
        printf(" %d", TRY("cuMemcpy", (ptr, ptr, size_t), made, (ptr)own, lengths[i]));
        printf(" %d\n", TRY("cuMemcpy2D_v2", (copy2 *), &copy));
    }
    printf("then: %d\n", TRY("cuMemcpyHtoD_v2", (ptr, const void *, size_t), made, own, 4096));
}

int main(int count, char **arguments) {
    const char *what = count > 1 ? arguments[1] : "";
    if (!strcmp(what, "threads")) threads();
    else if (!strcmp(what, "modules")) modules();
    else if (!strcmp(what, "images")) images();
    else if (!strcmp(what, "ranges")) ranges();
    else if (!strcmp(what, "odd")) odd();
    else if (!strcmp(what, "nothing")) nothing();
    else if (!strcmp(what, "strided")) strided();
    else if (!strcmp(what, "callbacks")) callbacks();
    else if (!strcmp(what, "forks")) forks();
    else if (!strcmp(what, "registered")) registered();
    else if (!strcmp(what, "files")) files();
    else if (!strcmp(what, "handles")) handles();
    else if (!strcmp(what, "tables")) tables();
    else if (!strcmp(what, "faults")) faults();
    else if (!strcmp(what, "endless")) endless();
    else return 2;
    (void)mib;
    return 0;
}
