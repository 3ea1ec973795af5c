/* How fast a program is paused and resumed, beside the copies of pinned memory, and that its memory is what it was. It works before any driver;
 * benches/pause.sh runs it.
 *
 *     pause limit            GiB/s of pinned copies
 *     pause calls            nanoseconds of a call
 *     pause free             MiB that are free
 *     pause GIB VMHOOK [N]   pauses itself N times, with GIB of memory */
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

static void limits(double *there, double *back) {
    size_t bytes = 512 * mib;
    ptr device = allocate(bytes);
    void *host = pinned(bytes);
    *there = *back = 0;
    for (int turn = 0; turn < 5; turn++) {
        double start = now();
        read_back(host, device, bytes);
        double middle = now();
        write_to(device, host, bytes);
        CALL("cuCtxSynchronize", (void));
        double end = now(), gib = (double)bytes / (1 << 30);
        if (gib / (middle - start) > *there) *there = gib / (middle - start);
        if (gib / (end - middle) > *back) *back = gib / (end - middle);
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

/* The milliseconds and the bytes of a command's answer. */
static void ask(const char *vmhook, const char *what, double *seconds, double *gib, double *wall) {
    char command[4096], answer[4096] = {0};
    snprintf(command, sizeof command, "%s %s %d --json", vmhook, what, getpid());
    double start = now();
    FILE *pipe = popen(command, "r");
    if (!pipe || !fgets(answer, sizeof answer, pipe) || pclose(pipe)) printf("%s fails: %s\n", command, answer), exit(1);
    *wall = now() - start;
    char *bytes = strstr(answer, "\"bytes\":"), *time = strstr(answer, "\"milliseconds\":");
    if (!bytes || !time) printf("%s: %s\n", command, answer), exit(1);
    *gib = atof(bytes + 8) / (1 << 30), *seconds = atof(time + 15) / 1e3;
}

static void elsewhere(const char *own, const char *when) {
    char command[4096];
    fflush(stdout);
    snprintf(command, sizeof command, "printf 'MiB free for others, %s: '; env -u LD_PRELOAD %s free", when, own);
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
    if (!strcmp(what, "limit")) {
        double there, back;
        limits(&there, &back);
        return printf("pinned copies: %.1f GiB/s to the host, %.1f to the device\n", there, back), 0;
    }
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
    int turns = count > 3 ? atoi(arguments[3]) : 3;
    double there, back;
    limits(&there, &back);
    /* Half in one allocation, then always smaller ones. */
    ptr memory[4096];
    size_t size[4096];
    block = pinned(BLOCK);
    for (; left; made++) {
        size[made] = left / 2 > 4 * BLOCK && made < 4000 ? left / 2 / BLOCK * BLOCK : left < BLOCK || made == 4000 ? left : BLOCK;
        memory[made] = allocate(size[made]);
        left -= size[made];
    }
    uint32_t number = 0, *found = pinned(BLOCK);
    capture();
    for (size_t at = 0; at < made; at++)
        for (size_t done = 0; done < size[at]; done += BLOCK) write_to(memory[at] + done, contents(number++), BLOCK);
    CALL("cuCtxSynchronize", (void));
    printf("%.2f GiB in %zu allocations; pinned copies %.1f GiB/s to the host, %.1f to the device\n", (double)bytes / (1 << 30), made, there, back);
    for (int turn = 0; turn < turns; turn++) {
        double seconds, gib, wall;
        if (!turn) elsewhere(arguments[0], "running");
        ask(arguments[2], "pause", &seconds, &gib, &wall);
        printf("pause: %.2f GiB in %.3f s (%.3f s with vmhook), %.1f GiB/s, %.2f of the limit\n", gib, seconds, wall, gib / seconds, gib / seconds / there);
        if (!turn) elsewhere(arguments[0], "paused");
        ask(arguments[2], "resume", &seconds, &gib, &wall);
        printf("resume: %.2f GiB in %.3f s (%.3f s with vmhook), %.1f GiB/s, %.2f of the limit\n", gib, seconds, wall, gib / seconds, gib / seconds / back);
        launch(found);
    }
    number = 0;
    for (size_t at = 0; at < made; at++)
        for (size_t done = 0; done < size[at]; done += BLOCK) {
            read_back(found, memory[at] + done, BLOCK);
            if (memcmp(found, contents(number++), BLOCK)) return printf("block %u is not what it was\n", number - 1), 1;
        }
    printf("all %u blocks are what they were\n", number);
    return 0;
}
