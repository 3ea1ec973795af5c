/* Programs that do what few programs do. The first argument says which; each tells what it finds, which is the same without the hook. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#define ON_FAILURE (void)0
#include "driver.h"

#ifdef PLUGIN
/* A library that is linked with the driver, which nobody else sees. */
void *look(void) { return dlsym(RTLD_DEFAULT, "cuDriverGetVersion"); }
#endif

int cu_own(void) { return 5; }

/* Names that begin as the driver's do, as those of curl and of curses. */
static void asks_for_its_own(void) {
    dlerror();
    int (*found)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "cu_own");
    const char *error = dlerror();
    printf("own: %d, error: %s\n", found ? found() : 0, error ? error : "none");
    void *none = dlsym(RTLD_DEFAULT, "cu_none");
    printf("none: %d, error: %d\n", none == NULL, dlerror() != NULL);
    printf("a driver: %d\n", dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD) != NULL);
    /* An empty name, behind which there is nothing. */
    char *page = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(page + 4096, 4096);
    printf("no name: %d\n", dlsym(RTLD_DEFAULT, page + 4095) == NULL);
}

static void has_a_plugin(void) {
    void *plugin = dlopen("libplugin.so", RTLD_NOW | RTLD_LOCAL);
    void *(*look)(void) = plugin ? (void *(*)(void))dlsym(plugin, "look") : NULL;
    printf("seen: %d\n", look && look() != NULL);
}

/* As daemons do: another directory, and nothing of the environment. */
static void clears_its_environment(void) {
    ptr memory = 0;
    setenv("VMM_MODE", "MONITOR", 1), unsetenv("VMM_QUOTA"), unsetenv("VMM_LOG_FILE");
    if (chdir("/")) exit(2);
    begin();
    printf("8 MiB: %d\n", TRY("cuMemAlloc_v2", (ptr *, size_t), &memory, 8 * mib));
}

static void fill(ptr to, uint32_t value, size_t words) {
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), to, value, words);
}

/* The driver destroys no primary context: what is in it stays. */
static void destroys_what_it_may_not(void) {
    ptr memory = allocate(8 * mib);
    fill(memory, 77, 2 * mib);
    printf("destroyed: %d\n", TRY("cuCtxDestroy_v2", (void *), context));
    printf("still there: %u\n", word(memory));
}

/* It fails, which is logged. */
static void fail(void) {
    ptr none = 0;
    printf("too large: %d\n", TRY("cuMemAlloc_v2", (ptr *, size_t), &none, (size_t)1 << 45));
}

/* Standard error is a pipe that nobody reads, as behind `2>&1 | head`. */
static void tells_nobody(void) {
    int ends[2];
    if (pipe(ends) || dup2(ends[1], 2) != 2 || close(ends[0])) exit(2);
    fail(), fail();
}

/* No file may grow. */
static void may_write_nothing(void) {
    struct rlimit none = {0, RLIM_INFINITY};
    if (setrlimit(RLIMIT_FSIZE, &none)) exit(2);
    fail(), fail();
}

static volatile int cancelled;

static void *fails(void *argument) {
    int (*allocates)(ptr *, size_t) = (int (*)(ptr *, size_t))find("cuMemAlloc_v2");
    ptr none = 0;
    CALL("cuCtxSetCurrent", (void *), context);
    while (!cancelled) {}
    *(int *)argument = allocates(&none, (size_t)1 << 45);
    for (;;) pthread_testcancel();
    return NULL;
}

/* A thread that was cancelled ends where it may, which is in no call of the driver. */
static void cancels(void) {
    pthread_t thread;
    int code = -1;
    void *end;
    pthread_create(&thread, NULL, fails, &code);
    pthread_cancel(thread);
    cancelled = 1;
    pthread_join(thread, &end);
    printf("cancelled: %d, behind a call: %d\n", end == PTHREAD_CANCELED, code);
}

static size_t left(void) {
    size_t left = 0, all;
    CALL("cuMemGetInfo_v2", (size_t *, size_t *), &left, &all);
    return left / mib;
}

/* A context takes all of its memory with it, the driver's own, too. */
static void ends_contexts(void) {
    size_t before = left();
    allocate(64 * mib), allocate(mib);
    CALL("cuDevicePrimaryCtxReset_v2", (int), 0);
    CALL("cuCtxSetCurrent", (void *), context);
    printf("reset: %zu\n", before - left());
    for (int turn = 0; turn < 4; turn++) {
        void *other;
        CALL("cuCtxCreate_v2", (void **, unsigned, int), &other, 0, 0);
        allocate(40 * mib), allocate(mib), allocate(mib);
        CALL("cuCtxDestroy_v2", (void *), other);
    }
    CALL("cuCtxSetCurrent", (void *), context);
    printf("destroyed: %zu\n", before - left());
}

/* One that is held twice ends when nobody holds it. */
static void detaches_contexts(void) {
    size_t before = left();
    for (int turn = 0; turn < 2; turn++) {
        void *other, *same;
        CALL("cuCtxCreate_v2", (void **, unsigned, int), &other, 0, 0);
        CALL("cuCtxAttach", (void **, unsigned), &same, 0);
        allocate(40 * mib), allocate(mib);
        CALL("cuCtxDetach", (void *), other);
        printf("held: %zu, ", before - left());
        CALL("cuCtxDetach", (void *), other);
        CALL("cuCtxSetCurrent", (void *), context);
        printf("left: %zu\n", before - left());
    }
    printf("primary: %d\n", TRY("cuCtxDetach", (void *), context));
}

/* With a quota of 4 MiB. */
static void has_a_quota(void) {
    ptr managed = 0, pitched = 0;
    size_t pitch, before = left();
    CALL("cuMemAllocManaged", (ptr *, size_t, unsigned), &managed, 512 * mib, 1);
    printf("managed: %zu\n", before - left());
    /* A byte in each row, and many rows. */
    CALL("cuMemAllocPitch_v2", (ptr *, size_t *, size_t, size_t, unsigned), &pitched, &pitch, 1, mib, 4);
    printf("pitched: %zu\n", before - left());
    allocate(mib), allocate(2 * mib), allocate(mib), allocate(mib);
    printf("all: %zu\n", before - left());
}

/* A stream ends with its context; then an array grows. */
static void leaves_a_stream(void) {
    void *other, *stream;
    CALL("cuCtxCreate_v2", (void **, unsigned, int), &other, 0, 0);
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    CALL("cuCtxDestroy_v2", (void *), other);
    CALL("cuCtxSetCurrent", (void *), context);
    ptr array = allocate(256 * mib);
    fill(array, 8, 64);
    CALL("cuCtxSynchronize", (void));
    ptr grown = allocate(320 * mib);
    CALL("cuMemcpyDtoD_v2", (ptr, ptr, size_t), grown, array, 256 * mib);
    CALL("cuMemFree_v2", (ptr), array);
    printf("grown: %u\n", word(grown));
}

/* What ends no capture, and a capture that ends with its stream. */
static void captures(void) {
    void *stream, *other, *graph;
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    CALL("cuStreamCreate", (void **, unsigned), &other, 1);
    CALL("cuStreamBeginCapture_v2", (void *, int), stream, 2);
    printf("no capture: %d\n", TRY("cuStreamEndCapture", (void *, void **), other, &graph));
    CALL("cuMemFree_v2", (ptr), allocate(100 * mib));
    printf("ended: %d\n", TRY("cuStreamEndCapture", (void *, void **), stream, &graph));
    CALL("cuMemFree_v2", (ptr), allocate(200 * mib));
    CALL("cuStreamBeginCapture_v2", (void *, int), stream, 2);
    CALL("cuStreamDestroy_v2", (void *), stream);
    CALL("cuMemFree_v2", (ptr), allocate(300 * mib));
}

/* Its own file gets the number that the log's had. */
static void uses_numbers(void) {
    char line[256] = "", name[64], path[256];
    fail();
    FILE *own = tmpfile();
    for (int at = 3; at < 64; at++) {
        snprintf(name, sizeof name, "/proc/self/fd/%d", at);
        ssize_t length = readlink(name, path, sizeof path - 1);
        if (length < 4 || memcmp(path + length - 4, "/log", 4)) continue;
        if (dup2(fileno(own), at) != at) exit(2);
    }
    fail();
    rewind(own);
    printf("own: %s\n", fgets(line, sizeof line, own) ? line : "nothing");
}

/* The work of a stream goes on when it is destroyed, and may look at what is allocated meanwhile. */
static void destroys_a_busy_stream(void) {
    ptr flag = allocate(4096);
    void *stream, *other;
    fill(flag, 0, 1024);
    allocate(256 * mib);
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    CALL("cuStreamCreate", (void **, unsigned), &other, 1);
    CALL("cuCtxSynchronize", (void));
    CALL("cuStreamWaitValue32_v2", (void *, ptr, uint32_t, unsigned), stream, flag, 1, 1);
    CALL("cuStreamDestroy_v2", (void *), stream);
    allocate(300 * mib);
    CALL("cuStreamWriteValue32_v2", (void *, ptr, uint32_t, unsigned), other, flag, 1, 0);
    CALL("cuCtxSynchronize", (void));
    allocate(310 * mib);
}

static uint64_t attribute(int which, ptr of) {
    uint64_t value = 0;
    CALL("cuPointerGetAttribute", (void *, int, ptr), &value, which, of);
    return value;
}

/* What is known of an array that has grown, at both of its ends. */
static void asks_for_attributes(void) {
    ptr array = allocate(256 * mib), other = allocate(4 * mib);
    CALL("cuCtxSynchronize", (void));
    ptr grown = allocate(320 * mib), end = grown + 320 * mib - 4;
    CALL("cuMemcpyDtoD_v2", (ptr, ptr, size_t), grown, array, 256 * mib);
    CALL("cuMemFree_v2", (ptr), array);
    printf("buffer: %d, other: %d\n", attribute(7, grown) == attribute(7, end), attribute(7, grown) == attribute(7, other));
    printf("block: %d, other: %d\n", attribute(20, grown) == attribute(20, end), attribute(20, grown) == attribute(20, other));
    printf("shared: %d, handles: %d\n", (int)attribute(10, grown), (int)attribute(14, end));
}

static volatile int is_freed;

static void *frees(void *argument) {
    CALL("cuCtxSetCurrent", (void *), context);
    CALL("cuMemFree_v2", (ptr), *(ptr *)argument);
    is_freed = 1;
    return NULL;
}

/* A thread frees, which waits for work; the work waits for what another thread does, which allocates for it. */
static void frees_behind_work(void) {
    ptr flag = allocate(4096), memory = allocate(8 * mib);
    void *stream, *other;
    pthread_t thread;
    fill(flag, 0, 1024);
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    CALL("cuStreamCreate", (void **, unsigned), &other, 1);
    CALL("cuStreamWaitValue32_v2", (void *, ptr, uint32_t, unsigned), stream, flag, 1, 1);
    pthread_create(&thread, NULL, frees, &memory);
    for (int turn = 0; turn < 100; turn++) {
        ptr more = allocate(turn % 2 ? 4096 : 8 * mib);
        if (turn == 50) usleep(20000);
        if (!more) exit(2);
    }
    printf("freed: %d\n", is_freed);
    CALL("cuStreamWriteValue32_v2", (void *, ptr, uint32_t, unsigned), other, flag, 1, 0);
    pthread_join(thread, NULL);
    printf("then: %d\n", is_freed);
}

/* An array grows on a stream that is none, or another context's. */
static void copies_on_no_stream(void) {
    void *stream, *other, *theirs;
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    CALL("cuStreamDestroy_v2", (void *), stream);
    CALL("cuCtxCreate_v2", (void **, unsigned, int), &other, 0, 0);
    CALL("cuStreamCreate", (void **, unsigned), &theirs, 1);
    CALL("cuCtxSetCurrent", (void *), context);
    ptr array = allocate(256 * mib);
    fill(array, 6, 64);
    CALL("cuCtxSynchronize", (void));
    ptr grown = allocate(320 * mib);
    printf("none: %d\n", TRY("cuMemcpyDtoDAsync_v2", (ptr, ptr, size_t, void *), grown, array, 256 * mib, stream));
    grown = allocate(330 * mib);
    printf("another's: %d, ", TRY("cuMemcpyDtoDAsync_v2", (ptr, ptr, size_t, void *), grown, array, 256 * mib, theirs));
    CALL("cuStreamSynchronize", (void *), theirs);
    CALL("cuMemFree_v2", (ptr), array);
    printf("grown: %u\n", word(grown));
}

/* More than there are addresses, beside an array that could grow. */
static void wants_all(void) {
    const size_t sizes[] = {SIZE_MAX, SIZE_MAX - 4096, SIZE_MAX - 2 * mib + 1, SIZE_MAX / 2};
    ptr none = 0, array = allocate(256 * mib);
    for (int at = 0; at < 4; at++) printf("%d\n", TRY("cuMemAlloc_v2", (ptr *, size_t), &none, sizes[at]));
    fill(array, 3, 64);
    printf("array: %u\n", word(array));
}

int main(int count, char **arguments) {
    static const struct {
        const char *name;
        void (*run)(void);
        int is_without;
    } programs[] = {
        {"asks for its own", asks_for_its_own, 1},
        {"has a plugin", has_a_plugin, 1},
        {"destroys what it may not", destroys_what_it_may_not, 0},
        {"tells nobody", tells_nobody, 0},
        {"may write nothing", may_write_nothing, 0},
        {"fails", fail, 0},
        {"wants all", wants_all, 0},
        {"ends contexts", ends_contexts, 0},
        {"has a quota", has_a_quota, 0},
        {"detaches contexts", detaches_contexts, 0},
        {"copies on no stream", copies_on_no_stream, 0},
        {"leaves a stream", leaves_a_stream, 0},
        {"captures", captures, 0},
        {"uses numbers", uses_numbers, 0},
        {"clears its environment", clears_its_environment, 1},
        {"frees behind work", frees_behind_work, 0},
        {"asks for attributes", asks_for_attributes, 0},
        {"destroys a busy stream", destroys_a_busy_stream, 0},
        {"cancels", cancels, 0},
    };
    setvbuf(stdout, NULL, _IOLBF, 0);
    /* What hangs has failed. */
    alarm(60);
    for (size_t at = 0; count > 1 && at < sizeof programs / sizeof *programs; at++) {
        if (strcmp(programs[at].name, arguments[1])) continue;
        if (!programs[at].is_without) begin();
        return programs[at].run(), 0;
    }
    return 2;
}
