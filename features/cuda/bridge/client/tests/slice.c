/* Work that keeps the device busy for as long as it may: how much of it is done. Arguments: the case, how many milliseconds it goes on, how many looks of
   `poll` take a millisecond, and `ptx` for a driver that compiles. */
#define ON_FAILURE exit(1)
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "../../../hook/preload/tests/driver.h"

/* The first line is for the fake driver, which has these kernels. */
static const char *text =
    "// vm-cuda-fake\n"
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry empty() { ret; }\n"
    ".visible .entry poll(.param .u64 at, .param .u32 expected, .param .u64 looks) {\n"
    ".reg .pred %p; .reg .b32 %r<4>; .reg .b64 %x<4>;\n"
    "ld.param.u64 %x1, [at]; ld.param.u32 %r1, [expected]; ld.param.u64 %x2, [looks];\n"
    "cvta.to.global.u64 %x1, %x1;\n"
    "look: ld.volatile.global.u32 %r2, [%x1];\n"
    "setp.eq.u32 %p, %r1, %r2; @%p bra done;\n"
    "sub.u64 %x2, %x2, 1; setp.ne.u64 %p, %x2, 0; @%p bra look;\n"
    "done: ret;\n}\n";

static void *kernel, *empty, *on, *exec;
static ptr word_at, to;
static double looks_in_ms = 1000;
enum { BYTES = 16 << 20 };
static char *bytes;

static double ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return 1e3 * time.tv_sec + 1e-6 * time.tv_nsec;
}

#define LAUNCH_TYPES \
    (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **)

static void run(void *stream, double time) {
    uint32_t expected = 1;
    uint64_t looks = (uint64_t)(time * looks_in_ms) + 1;
    void *parameters[] = {&word_at, &expected, &looks};
    CALL("cuLaunchKernel", LAUNCH_TYPES, kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL);
}

static void wait(void) { CALL("cuStreamSynchronize", (void *), on); }

/* Pieces of work: what each does, and its number of units. */
static int w_short(void) {
    for (int i = 0; i < 50; i++) run(on, .02);
    return wait(), 50;
}
static int w_queue(void) {
    for (int i = 0; i < 1000; i++) run(on, .02);
    return wait(), 1000;
}
static int w_empty(void) {
    for (int i = 0; i < 10000; i++) CALL("cuLaunchKernel", LAUNCH_TYPES, empty, 1, 1, 1, 1, 1, 1, 0, on, NULL, NULL);
    return wait(), 10000;
}
static int w_long(void) { return run(on, 30), wait(), 1; }
static int w_longs(void) {
    for (int i = 0; i < 8; i++) run(on, 30);
    return wait(), 8;
}
static int w_graph(void) { CALL("cuGraphLaunch", (void *, void *), exec, on); return wait(), 1; }
static int w_copy(void) { CALL("cuMemcpyHtoD_v2", (ptr, const void *, size_t), to, bytes, BYTES); return 1; }
static int w_back(void) { CALL("cuMemcpyDtoH_v2", (void *, ptr, size_t), bytes, to, BYTES); return 1; }
/* Its own default stream, which only its thread can name. */
static int w_own(void) {
    uint32_t expected = 1;
    uint64_t looks = (uint64_t)(5 * looks_in_ms);
    void *parameters[] = {&word_at, &expected, &looks};
    for (int i = 0; i < 4; i++) CALL("cuLaunchKernel_ptsz", LAUNCH_TYPES, kernel, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL);
    CALL("cuStreamSynchronize_ptsz", (void *), NULL);
    return 4;
}
/* A stream waits for a kernel of another one, and for a function of this program: that is no work. */
static void pass(void *time) { (void)time; struct timespec nap = {0, 20000000}; nanosleep(&nap, NULL); }
static int w_waits(void) {
    CALL("cuLaunchHostFunc", (void *, void (*)(void *), void *), on, pass, NULL);
    return wait(), 1;
}
/* A kernel waits for a copy of another stream, which is held up while the kernel runs. */
static int w_signal(void) {
    static void *other;
    static uint32_t one = 1;
    if (!other) CALL("cuStreamCreate", (void **, unsigned), &other, 1);
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), word_at, 0, 1);
    run(on, 5000);
    pass(NULL);
    CALL("cuMemcpyHtoDAsync_v2", (ptr, const void *, size_t, void *), word_at, &one, 4, other);
    wait();
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), word_at, 0, 1);
    return 1;
}

#define CASE(name) {#name, w_##name}
static const struct {
    const char *name;
    int (*work)(void);
} cases[] = {CASE(short), CASE(queue), CASE(empty), CASE(long), CASE(longs), CASE(graph), CASE(copy), CASE(back), CASE(own), CASE(waits), CASE(signal)};

int main(int count, char **arguments) {
    void *module, *graph;
    if (count < 5) return 2;
    begin();
    const char *image = strcmp(arguments[4], "ptx") ? text : strchr(text, '\n') + 1;
    double time = strtod(arguments[2], NULL);
    looks_in_ms = strtod(arguments[3], NULL);
    CALL("cuModuleLoadData", (void **, const void *), &module, image);
    CALL("cuModuleGetFunction", (void **, void *, const char *), &kernel, module, "poll");
    CALL("cuModuleGetFunction", (void **, void *, const char *), &empty, module, "empty");
    CALL("cuStreamCreate", (void **, unsigned), &on, 1);
    word_at = allocate(4096), to = allocate(BYTES), bytes = calloc(1, BYTES);
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), word_at, 0, 1);
    if (!strcmp(arguments[1], "looks")) {
        double most = 0;
        for (int i = 0; i < 5; i++) {
            double begun = ms();
            run(on, 20000 / looks_in_ms), wait();
            double rate = 20000 / (ms() - begun);
            most = rate > most ? rate : most;
        }
        return printf("%.3f\n", most), 0;
    }
    CALL("cuStreamBeginCapture_v2", (void *, int), on, 0);
    for (int i = 0; i < 20; i++) run(on, .2);
    CALL("cuStreamEndCapture", (void *, void **), on, &graph);
    CALL("cuGraphInstantiateWithFlags", (void **, void *, uint64_t), &exec, graph, 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(arguments[1], cases[i].name)) {
            double begun = ms(), passed;
            long units = 0;
            do units += cases[i].work(), passed = ms() - begun;
            while (passed < time);
            printf("%s %ld %.3f\n", cases[i].name, units, 1e3 * units / passed);
            return 0;
        }
    (void)mib, (void)word;
    return 2;
}
