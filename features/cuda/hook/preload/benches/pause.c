/* How fast a program is paused and resumed, beside the copies of pinned memory, and that its memory is what it was. It works before any driver;
 * benches/pause.sh runs it.
 *
 *     pause calls            nanoseconds of a call
 *     pause free             MiB that are free
 *     pause GIB VMHOOK [N]   pauses itself N times, with GIB of memory: a row of a table, of GiB/s each with its least and its most */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t ptr;
static void *library;
static const size_t mib = 1 << 20;

static void *find(const char *symbol) {
    void *found = dlsym(library, symbol);
    if (!found) printf("no %s\n", symbol), exit(1);
    return found;
}

#define CALL(symbol, types, ...)                                      \
    do {                                                              \
        static int(*function) types;                                  \
        if (!function) *(void **)&function = find(symbol);            \
        int code = function(__VA_ARGS__);                             \
        if (code) printf("%s: %d\n", symbol, code), exit(1);          \
    } while (0)

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static ptr allocate(size_t bytes) {
    ptr made = 0;
    CALL("cuMemAlloc_v2", (ptr *, size_t), &made, bytes);
    return made;
}

static void *pinned(size_t bytes) {
    void *made = NULL;
    CALL("cuMemHostAlloc", (void **, size_t, unsigned), &made, bytes, 0);
    return made;
}

static void read_back(void *to, ptr from, size_t bytes) {
    CALL("cuMemcpyDtoH_v2", (void *, ptr, size_t), to, from, bytes);
}

static void write_to(ptr to, const void *from, size_t bytes) {
    CALL("cuMemcpyHtoD_v2", (ptr, const void *, size_t), to, from, bytes);
}

/* What a number of turns took, in GiB/s. */
#define TURNS 100
struct series {
    int count;
    double rates[TURNS];
};

static void add(struct series *to, double gib, double seconds) { to->rates[to->count++] = gib / (seconds > 0 ? seconds : 1e-9); }

static int compare(const void *one, const void *other) {
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

static double median(struct series *of) {
    qsort(of->rates, (size_t)of->count, sizeof *of->rates, compare);
    return of->rates[of->count / 2];
}

static void print(struct series *of) {
    double middle = median(of);
    printf(" %.1f (%.1f to %.1f) |", middle, of->rates[0], of->rates[of->count - 1]);
}

/* Copies of pinned memory. */
static void limits(int turns, struct series *there, struct series *back) {
    size_t bytes = 512 * mib;
    ptr device = allocate(bytes);
    void *host = pinned(bytes);
    /* One more, to warm up. */
    for (int turn = -1; turn < turns; turn++) {
        double start = now();
        read_back(host, device, bytes);
        double middle = now();
        write_to(device, host, bytes);
        CALL("cuCtxSynchronize", (void));
        if (turn >= 0) add(there, .5, middle - start), add(back, .5, now() - middle);
    }
    CALL("cuMemFree_v2", (ptr), device);
    CALL("cuMemFreeHost", (void *), host);
}

static size_t free_bytes(void) {
    size_t left, all;
    CALL("cuMemGetInfo_v2", (size_t *, size_t *), &left, &all);
    return left;
}

/* Blocks of 16 MiB, each with words that no other has. */
#define BLOCK ((size_t)16 << 20)
static uint32_t *block;

static uint32_t *contents(uint32_t number) {
    for (size_t word = 0; word < BLOCK / 4; word++) block[word] = (uint32_t)word * 2654435761u + number * 40503u;
    return block;
}

/* The number behind a name in a command's answer. */
static double number(const char *answer, const char *name) {
    char *found = strstr(answer, name);
    if (!found) printf("no %s in %s\n", name, answer), exit(1);
    return atof(found + strlen(name));
}

static const char *ask(const char *vmhook, const char *what) {
    static char answer[1 << 16];
    char command[4096];
    snprintf(command, sizeof command, "%s %s %d --json", vmhook, what, getpid());
    FILE *pipe = popen(command, "r");
    if (!pipe || !fgets(answer, sizeof answer, pipe) || pclose(pipe)) printf("%s fails: %s\n", command, answer), exit(1);
    return answer;
}

static void change(const char *vmhook, const char *what, struct series *rates) {
    const char *answer = ask(vmhook, what);
    add(rates, number(answer, "\"bytes\":") / (1 << 30), number(answer, "\"milliseconds\":") / 1e3);
}

static void elsewhere(const char *own, const char *when) {
    char command[4096];
    fprintf(stderr, "MiB free for others, %s: ", when);
    snprintf(command, sizeof command, "env -u LD_PRELOAD %s free >&2", own);
    if (system(command)) exit(1);
}

/* A graph that copies within memory, made before a pause and launched behind it. */
static ptr scratch;
static void *stream, *graph;

static void capture(void) {
    void *captured;
    scratch = allocate(4 * BLOCK);
    write_to(scratch, contents(77), BLOCK);
    CALL("cuCtxSynchronize", (void));
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    CALL("cuStreamBeginCapture_v2", (void *, int), stream, 2);
    CALL("cuMemcpyDtoDAsync_v2", (ptr, ptr, size_t, void *), scratch + BLOCK, scratch, BLOCK, stream);
    CALL("cuMemsetD32Async", (ptr, unsigned, size_t, void *), scratch + BLOCK, 5, 1, stream);
    CALL("cuStreamEndCapture", (void *, void **), stream, &captured);
    CALL("cuGraphInstantiateWithFlags", (void **, void *, unsigned long long), &graph, captured, 0);
}

static void launch(uint32_t *found) {
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), scratch + BLOCK, 0, BLOCK / 4);
    CALL("cuCtxSynchronize", (void));
    CALL("cuGraphLaunch", (void *, void *), graph, stream);
    CALL("cuStreamSynchronize", (void *), stream);
    read_back(found, scratch + BLOCK, BLOCK);
    contents(77)[0] = 5;
    if (memcmp(found, block, BLOCK)) printf("a graph's copy is not what it should be\n"), exit(1);
}

int main(int count, char **arguments) {
    int device;
    void *context;
    const char *what = count > 1 ? arguments[1] : "";
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return printf("no driver\n"), 1;
    CALL("cuInit", (unsigned), 0);
    CALL("cuDeviceGet", (int *, int), &device, 0);
    CALL("cuDevicePrimaryCtxRetain", (void **, int), &context, device);
    CALL("cuCtxSetCurrent", (void *), context);
    if (!strcmp(what, "free")) return printf("%zu\n", free_bytes() / mib), 0;
    if (!strcmp(what, "calls")) {
        void *stream;
        CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
        double best = 1e9;
        for (int turn = 0; turn < 7; turn++) {
            double start = now();
            for (int call = 0; call < 1000000; call++) CALL("cuStreamQuery", (void *), stream);
            if (now() - start < best) best = now() - start;
        }
        return printf("a call of cuStreamQuery: %.1f ns\n", best * 1e3), 0;
    }
    size_t bytes = (size_t)(atof(what) * 1024) * mib / BLOCK * BLOCK, left = bytes, made = 0;
    if (count < 3 || !bytes) return 2;
    int turns = count > 3 ? atoi(arguments[3]) : 5;
    if (turns < 1 || turns > TURNS) return 2;
    struct series there = {0}, back = {0}, pauses = {0}, resumes = {0};
    limits(turns, &there, &back);
    /* Half in one allocation, then always smaller ones. */
    ptr memory[4096];
    size_t size[4096];
    block = pinned(BLOCK);
    for (; left; made++) {
        size[made] = left / 2 > 4 * BLOCK && made < 4000 ? left / 2 / BLOCK * BLOCK : left < BLOCK || made == 4000 ? left : BLOCK;
        memory[made] = allocate(size[made]);
        left -= size[made];
    }
    uint32_t next = 0, *found = pinned(BLOCK);
    capture();
    for (size_t at = 0; at < made; at++)
        for (size_t done = 0; done < size[at]; done += BLOCK) write_to(memory[at] + done, contents(next++), BLOCK);
    CALL("cuCtxSynchronize", (void));
    /* What is reserved is made meanwhile; what can't be had is not waited for. */
    const char *reserve = getenv("VMM_RESERVE");
    double reserved = 0, before = -1;
    for (int second = 0; reserve && reserved > before && second < 120; second++) {
        sleep(2);
        before = reserved, reserved = number(ask(arguments[2], "status"), "\"reserved\":") / (1 << 30);
    }
    for (int turn = 0; turn < turns; turn++) {
        if (!turn) elsewhere(arguments[0], "running");
        change(arguments[2], "pause", &pauses);
        if (!turn) elsewhere(arguments[0], "paused");
        change(arguments[2], "resume", &resumes);
        launch(found);
    }
    next = 0;
    for (size_t at = 0; at < made; at++)
        for (size_t done = 0; done < size[at]; done += BLOCK) {
            read_back(found, memory[at] + done, BLOCK);
            if (memcmp(found, contents(next++), BLOCK)) return printf("block %u is not what it was\n", next - 1), 1;
        }
    fprintf(stderr, "all %u blocks of %zu allocations are what they were\n", next, made);
    printf("| %s | %.1f |", what, reserved);
    print(&there), print(&pauses), printf(" %.2f |", median(&pauses) / median(&there));
    print(&back), print(&resumes), printf(" %.2f |\n", median(&resumes) / median(&back));
    return 0;
}
