/* Work that makes no progress, which is ended, and work that does, which is not. Its first argument says which; times are in milliseconds. */
#define ON_FAILURE exit(1)
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "../../../hook/preload/tests/driver.h"

/* The first line is for the fake driver, which has these kernels; `ptx` leaves it out. A count of looks, each of about a microsecond, is what is left. */
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

static const char *image;
static void *kernel, *empty;
static ptr word_at;
static uint64_t piece = 400;

#define LAUNCH_TYPES \
    (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **)

/* A kernel that ends after a time. */
static int last(const char *launch, void *stream, uint64_t ms) {
    uint32_t expected = 1;
    uint64_t looks = ms * 1000;
    void *parameters[] = {&word_at, &expected, &looks};
    return TRY(launch, LAUNCH_TYPES, kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL);
}
/* One that does not. */
static int spin(const char *launch, void *stream) { return last(launch, stream, 1000000000); }
static int run(void *stream, uint64_t ms) { return last("cuLaunchKernel", stream, ms); }
static int nothing(void *stream) { return TRY("cuLaunchKernel", LAUNCH_TYPES, empty, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL); }

static int sync_all(void) { return TRY("cuCtxSynchronize", (void)); }
static int sync_stream(void *stream) { return TRY("cuStreamSynchronize", (void *), stream); }

static void pass(long ms) {
    struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

/* What a program is told that only asks now and then. */
static int ask(void) {
    int code;
    size_t left, all;
    while (!(code = TRY("cuMemGetInfo_v2", (size_t *, size_t *), &left, &all))) pass(20);
    return code;
}

static void *stream(unsigned flags) {
    void *made = NULL;
    TRY("cuStreamCreate", (void **, unsigned), &made, flags);
    return made;
}

static void *event_after(void *of) {
    void *event = NULL;
    TRY("cuEventCreate", (void **, unsigned), &event, 2);
    TRY("cuEventRecord", (void *, void *), event, of);
    return event;
}

static int wait_for(void *waits, void *event) { return TRY("cuStreamWaitEvent", (void *, void *, unsigned), waits, event, 0); }

/* A queue that takes some deadlines together, of pieces that do not. */
static int queue(void *on) {
    int code = 0;
    for (int i = 0; i < 12 && !code; i++) code = run(on, piece);
    return code;
}

static int capture(void *on, int (*put)(void *), void **exec) {
    void *graph;
    CALL("cuStreamBeginCapture_v2", (void *, int), on, 0);
    put(on);
    CALL("cuStreamEndCapture", (void *, void **), on, &graph);
    CALL("cuGraphInstantiateWithFlags", (void **, void *, uint64_t), exec, graph, 0);
    return 0;
}

static int put_spin(void *on) { return spin("cuLaunchKernel", on); }
static int put_many(void *on) {
    for (int i = 0; i < 12; i++) run(on, piece);
    return 0;
}

static void *spin_and_end(void *launch) {
    TRY("cuCtxSetCurrent", (void *), context);
    spin(launch, NULL);
    return NULL;
}

static void sleep_long(void *ms) { pass((long)(intptr_t)ms); }

/* Cases: what is not ended returns 0. */
static int c_legacy(void) { return spin("cuLaunchKernel", NULL), sync_all(); }
static int c_own(void) { return spin("cuLaunchKernel_ptsz", NULL), ask(); }
static int c_own_waited(void) { return spin("cuLaunchKernel_ptsz", NULL), sync_all(); }
static int c_free(void) { return spin("cuLaunchKernel", stream(1)), ask(); }
/* A kernel behind others that the program has waited for, and one behind others that are not done. */
static int c_alone(void) {
    void *on = stream(1);
    for (int i = 0; i < 31; i++) {
        int code = nothing(on);
        if (code || (code = i % 2 ? sync_all() : sync_stream(on))) return code;
    }
    return spin("cuLaunchKernel", on), ask();
}
static int c_queued(void) {
    void *on = stream(1);
    for (int i = 0; i < 24; i++) spin("cuLaunchKernel", on);
    return ask();
}
static int c_blocks(void) {
    void *on = stream(0);
    return spin("cuLaunchKernel", on), sync_stream(on);
}
static int c_asked(void) {
    void *on = stream(1);
    int code;
    spin("cuLaunchKernel", on);
    while ((code = TRY("cuStreamQuery", (void *), on)) == 600) pass(5);
    return code;
}
static int c_thread_ended(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, spin_and_end, "cuLaunchKernel_ptsz");
    pthread_join(thread, NULL);
    return ask();
}
static int c_destroyed(void) {
    void *on = stream(1);
    spin("cuLaunchKernel", on);
    TRY("cuStreamDestroy_v2", (void *), on);
    return ask();
}
static int c_released(void) {
    void *again;
    int device = 0;
    TRY("cuDevicePrimaryCtxRetain", (void **, int), &again, device);
    spin("cuLaunchKernel", stream(1));
    TRY("cuDevicePrimaryCtxRelease_v2", (int), device);
    return ask();
}
/* It ends with work under way, which its server is left with. */
static int c_exits(void) { return spin("cuLaunchKernel", stream(1)), spin("cuLaunchKernel", NULL); }
static int c_exits_behind_threads(void) {
    pthread_t threads[8];
    for (int i = 0; i < 8; i++) pthread_create(&threads[i], NULL, spin_and_end, i % 2 ? "cuLaunchKernel_ptsz" : "cuLaunchKernel");
    for (int i = 0; i < 8; i++) pthread_join(threads[i], NULL);
    return 0;
}
static int c_exits_after_reset(void) { return queue(stream(1)), queue(NULL), TRY("cuDevicePrimaryCtxReset_v2", (int), 0); }
/* The end of its context waits for it. */
static int c_reset(void) { return spin("cuLaunchKernel", stream(1)), TRY("cuDevicePrimaryCtxReset_v2", (int), 0); }
static int c_context_destroyed(void) {
    void *made = NULL;
    CALL("cuCtxCreate_v2", (void **, unsigned, int), &made, 0, 0);
    void *module, *own;
    CALL("cuModuleLoadData", (void **, const void *), &module, image);
    CALL("cuModuleGetFunction", (void **, void *, const char *), &own, module, "poll");
    kernel = own, word_at = allocate(4096);
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), word_at, 0, 1);
    spin("cuLaunchKernel", stream(1));
    return TRY("cuCtxDestroy_v2", (void *), made);
}
/* Another stream goes on all the while. */
static int c_hidden(void) {
    void *spins = stream(1), *works = stream(1);
    spin("cuLaunchKernel", spins);
    for (;;) {
        int code = run(works, 1);
        if (!code) code = sync_stream(works);
        if (code) return code;
    }
}
/* Behind what it waits for it does not end. */
static int c_behind_wait(void) {
    void *waits = stream(1), *works = stream(1);
    run(works, piece);
    wait_for(waits, event_after(works));
    spin("cuLaunchKernel", waits);
    return ask();
}
static int c_before_wait(void) {
    void *waits = stream(1), *works = stream(1);
    spin("cuLaunchKernel", waits);
    wait_for(waits, event_after(works));
    return ask();
}
static int c_before_capture(void) {
    void *on = stream(1);
    spin("cuLaunchKernel", on);
    CALL("cuStreamBeginCapture_v2", (void *, int), on, 0);
    return ask();
}
static int c_graph(void) {
    void *on = stream(1), *exec;
    int code = capture(on, put_spin, &exec);
    if (code) return code;
    CALL("cuGraphLaunch", (void *, void *), exec, on);
    return sync_stream(on);
}
static int c_full(void) {
    void *on = stream(1);
    spin("cuLaunchKernel", on);
    for (;;) {
        int code = nothing(on);
        if (code) return code;
    }
}

static int c_honest_queue(void) {
    void *on = stream(1);
    return queue(on), sync_stream(on);
}
static int c_honest_legacy(void) { return queue(NULL), sync_all(); }
static int c_honest_own(void) {
    for (int i = 0; i < 12; i++) last("cuLaunchKernel_ptsz", NULL, piece);
    return TRY("cuStreamSynchronize_ptsz", (void *), NULL);
}
static int c_honest_many(void) {
    void *on = stream(1);
    for (int i = 0; i < 100000; i++) nothing(on);
    return sync_stream(on);
}
/* Two that wait for each other. */
static int c_honest_waits(void) {
    void *one = stream(1), *two = stream(1);
    queue(one);
    wait_for(two, event_after(one));
    nothing(two);
    wait_for(one, event_after(two));
    nothing(one);
    int code = sync_stream(two);
    return code ? code : sync_stream(one);
}
static int c_honest_implicit(void) {
    void *blocks = stream(0), *other = stream(0);
    queue(blocks);
    nothing(NULL);
    nothing(other);
    int code = sync_stream(other);
    return code ? code : sync_all();
}
static int c_honest_callback(void) {
    void *on = stream(1);
    CALL("cuLaunchHostFunc", (void *, void (*)(void *), void *), on, sleep_long, (void *)(intptr_t)(12 * piece));
    nothing(on);
    return sync_stream(on);
}
static int c_honest_value(void) {
    void *waits = stream(1), *works = stream(1);
    ptr flag = allocate(4096);
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), flag, 0, 1);
    CALL("cuStreamWaitValue32_v2", (void *, ptr, uint32_t, unsigned), waits, flag, 5, 0);
    nothing(waits);
    pass(12 * piece);
    CALL("cuStreamWriteValue32_v2", (void *, ptr, uint32_t, unsigned), works, flag, 5, 0);
    return sync_stream(waits);
}
static int c_honest_capture(void) {
    void *on = stream(1), *exec, *graph;
    CALL("cuStreamBeginCapture_v2", (void *, int), on, 0);
    for (int i = 0; i < 100; i++) nothing(on);
    pass(12 * piece);
    CALL("cuStreamEndCapture", (void *, void **), on, &graph);
    int code = capture(on, put_many, &exec);
    if (code) return code;
    CALL("cuGraphLaunch", (void *, void *), exec, on);
    return sync_stream(on);
}
static int c_honest_idle(void) { return nothing(NULL), pass(12 * piece), sync_all(); }

#define CASE(name) {#name, c_##name}
static const struct {
    const char *name;
    int (*run)(void);
} cases[] = {CASE(legacy), CASE(own), CASE(own_waited), CASE(free), CASE(alone), CASE(queued), CASE(blocks), CASE(asked), CASE(thread_ended), CASE(destroyed), CASE(released), CASE(exits), CASE(exits_behind_threads), CASE(exits_after_reset), CASE(reset), CASE(context_destroyed),
             CASE(hidden), CASE(behind_wait), CASE(before_wait), CASE(before_capture), CASE(graph), CASE(full), CASE(honest_queue), CASE(honest_legacy),
             CASE(honest_own), CASE(honest_many), CASE(honest_waits), CASE(honest_implicit), CASE(honest_callback), CASE(honest_value),
             CASE(honest_capture), CASE(honest_idle)};

/* The case, how long a piece of honest work is, and whether kernels are of PTX. */
int main(int count, char **arguments) {
    void *module;
    if (count > 2) piece = strtoull(arguments[2], NULL, 10);
    begin();
    image = count > 3 && !strcmp(arguments[3], "ptx") ? strchr(text, '\n') + 1 : text;
    CALL("cuModuleLoadData", (void **, const void *), &module, image);
    CALL("cuModuleGetFunction", (void **, void *, const char *), &kernel, module, "poll");
    CALL("cuModuleGetFunction", (void **, void *, const char *), &empty, module, "empty");
    word_at = allocate(4096);
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), word_at, 0, 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (count > 1 && !strcmp(arguments[1], cases[i].name)) {
            int code = cases[i].run();
            const char *name = "none";
            if (!strncmp(arguments[1], "exits", 5)) return printf("%s: %d\n", cases[i].name, code), 0;
            TRY("cuGetErrorName", (int, const char **), code, &name);
            ptr none;
            printf("%s: %d %d %s\n", cases[i].name, code, TRY("cuMemAlloc_v2", (ptr *, size_t), &none, 4096), name);
            return 0;
        }
    (void)mib, (void)word;
    return 2;
}
