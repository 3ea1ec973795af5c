/* A program that is paused. Its threads write to memory of theirs and read it back, and its main thread does what lines of its input say. It
 * knows nothing of the hook but how to name memory. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../include/vmhook.h"

#define ON_FAILURE _exit(1)
#include "driver.h"

static int threads;
static size_t bytes;
static ptr *memory;
static atomic_ulong count;
static atomic_int stop;

static void fill(ptr to, uint32_t value, size_t words) {
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), to, value, words);
}

/* What a word of the first half is: other in each MiB and in each thread's memory. */
static uint32_t expected(uintptr_t own, size_t offset) { return (uint32_t)(own + 7 + offset / mib * 16); }

/* Allocates, grows and frees, over a stream of the thread's. */
static void churn(uint32_t turn, void *own) {
    ptr small = allocate(2 * mib), large = allocate(4 * mib);
    CALL("cuMemsetD32Async", (ptr, unsigned, size_t, void *), small, turn, mib / 2, own);
    CALL("cuMemcpyDtoDAsync_v2", (ptr, ptr, size_t, void *), large, small, 2 * mib, own);
    CALL("cuStreamSynchronize", (void *), own);
    CALL("cuMemFree_v2", (ptr), small);
    if (word(large) != turn || word(large + 2 * mib - 4) != turn) printf("turn %u is lost\n", turn), _exit(1);
    CALL("cuMemFree_v2", (ptr), large);
}

/* Writes to one of the last pages, and looks at it and at the first half, which stays what it was. */
static void *work(void *argument) {
    uintptr_t own = (uintptr_t)argument;
    CALL("cuCtxSetCurrent", (void *), context);
    ptr at = memory[own];
    void *stream;
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    int churns = getenv("CHURN") != NULL;
    for (uint32_t turn = 1; !stop; turn++) {
        ptr page = at + bytes / 2 + turn % 64 * 4096;
        fill(page, turn, 1024);
        size_t offset = (size_t)turn * 4999 % (bytes / 8) * 4;
        uint32_t now = word(page + 4092), first = word(at + offset);
        if (now != turn || first != expected(own, offset)) {
            printf("thread %d, turn %u: %u, %u\n", (int)own, turn, now, first);
            _exit(1);
        }
        if (churns) churn(turn, stream);
        count++;
    }
    CALL("cuStreamDestroy_v2", (void *), stream);
    return NULL;
}

/* Of a stream's: it may not call the driver, which tells it so; with the hook it must not wait either. */
static atomic_int called;
static void function(void *argument) {
    size_t left, all;
    (void)argument;
    usleep(1000);
    TRY("cuMemGetInfo_v2", (size_t *, size_t *), &left, &all);
    called++;
}

static ptr kept;
static void at_end(void) {
    int code = TRY("cuMemFree_v2", (ptr), kept);
    printf("freed at the end: %d\n", code);
    fflush(stdout);
}

static void read_at_end(void) { printf("read at the end: %u\n", word(kept)), fflush(stdout); }

int main(int arguments, char **argument) {
    char line[256];
    void *stream = NULL, *other = NULL;
    if (arguments < 3) return 2;
    /* Whoever waits for it waits no longer. */
    alarm(300);
    threads = atoi(argument[1]);
    bytes = (size_t)atoi(argument[2]) * mib;
    memory = calloc((size_t)threads, sizeof *memory);
    pthread_t *thread = calloc((size_t)threads, sizeof *thread);
    setvbuf(stdout, NULL, _IOLBF, 0);
    load();
    atexit(at_end);
    begin();
    kept = allocate(4 * mib);
    fill(kept, 99, mib);
    for (int own = 0; own < threads; own++) {
        memory[own] = allocate(bytes);
        for (size_t at = 0; at < bytes; at += mib) fill(memory[own] + at, expected((uintptr_t)own, at), mib / 4);
    }
    ptr flag = allocate(4096);
    fill(flag, 0, 1024);
    CALL("cuCtxSynchronize", (void));
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    CALL("cuStreamCreate", (void **, unsigned), &other, 1);
    for (int own = 0; own < threads; own++) pthread_create(&thread[own], NULL, work, (void *)(uintptr_t)own);
    printf("ready\n");
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (!strcmp(line, "count")) {
            printf("%lu\n", count);
        } else if (!strcmp(line, "read")) {
            printf("%u\n", word(kept));
        } else if (!strcmp(line, "tag")) {
            vmhook_tag_function tag = (vmhook_tag_function)dlsym(RTLD_DEFAULT, "vmhook_tag");
            int code = tag ? tag(kept, "a \"cache\"", VMHOOK_DROPPABLE) : -1;
            printf("%d %d\n", code, tag ? tag(kept + 4, "none", 0) : -1);
        } else if (!strcmp(line, "others")) {
            /* What is not moved: managed, pitched, of a pool. */
            ptr managed, pitched, pooled;
            size_t pitch;
            CALL("cuMemAllocManaged", (ptr *, size_t, unsigned), &managed, 8192, 1);
            CALL("cuMemAllocPitch_v2", (ptr *, size_t *, size_t, size_t, unsigned), &pitched, &pitch, 1000, 3, 4);
            CALL("cuMemAllocAsync", (ptr *, size_t, void *), &pooled, 16384, other);
            printf("%zu\n", pitch);
        } else if (!strcmp(line, "capture")) {
            CALL("cuStreamBeginCapture_v2", (void *, int), stream, 2);
            printf("capturing\n");
        } else if (!strcmp(line, "capture ends")) {
            void *graph;
            CALL("cuStreamEndCapture", (void *, void **), stream, &graph);
            printf("captured\n");
        } else if (!strcmp(line, "spin")) {
            CALL("cuStreamWaitValue32_v2", (void *, ptr, uint32_t, unsigned), stream, flag, 1, 1);
            printf("spins\n");
        } else if (!strcmp(line, "spin ends")) {
            CALL("cuStreamWriteValue32_v2", (void *, ptr, uint32_t, unsigned), other, flag, 1, 0);
            CALL("cuStreamSynchronize", (void *), stream);
            printf("spun\n");
        } else if (!strcmp(line, "functions")) {
            for (int turn = 0; turn < 20; turn++)
                CALL("cuLaunchHostFunc", (void *, void (*)(void *), void *), stream, function, NULL);
            printf("functions\n");
            CALL("cuStreamSynchronize", (void *), stream);
            printf("called %d\n", called);
        } else if (!strcmp(line, "fork") || !strcmp(line, "exec")) {
            int status = -1;
            pid_t child = fork();
            if (!child) {
                alarm(60);
                if (line[0] == 'e') execl("/bin/true", "true", (char *)NULL);
                size_t left, all;
                /* The driver is not there in a child, and says so; nothing waits. */
                _exit(TRY("cuMemGetInfo_v2", (size_t *, size_t *), &left, &all) == 0);
            }
            waitpid(child, &status, 0);
            printf("child: %d\n", status);
        } else if (!strcmp(line, "leave")) {
            return 0;
        } else if (!strcmp(line, "read at the end")) {
            printf("%d\n", atexit(read_at_end));
        } else if (!strcmp(line, "quit")) {
            stop = 1;
            for (int own = 0; own < threads; own++) pthread_join(thread[own], NULL);
            for (int own = 0; own < threads; own++) {
                for (size_t at = 0; at < bytes / 2; at += 4096)
                    if (word(memory[own] + at) != expected((uintptr_t)own, at)) return printf("thread %d's memory is lost\n", own), 1;
                CALL("cuMemFree_v2", (ptr), memory[own]);
            }
            printf("whole\n");
            return 0;
        } else {
            printf("what is %s?\n", line);
        }
    }
    return 0;
}
