/* Several threads hand functions to one worker, which runs them one behind the other. Prints "ok".
 *
 *   cc -std=c11 submit.c $(pkg-config --cflags --libs vmkernels) -lpthread
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <vmaccel.h>

#define CHECK(call)                                                \
    do {                                                           \
        if ((call) != VMA_SUCCESS) {                               \
            fprintf(stderr, "%s\n", vma_last_error());             \
            exit(1);                                               \
        }                                                          \
    } while (0)

enum { THREADS = 8, TURNS = 500 };
static const uint64_t MINUTE = 60000000000u;
static vma_worker worker;
/* Only the worker's thread touches it, so it needs no lock. */
static long sum;

static int32_t add(void *data) {
    sum += *(int *)data;
    return 0;
}

/* A function that a worker runs may call the worker: that happens at once. */
static int32_t fill(void *data) {
    vma_memory memory = *(vma_memory *)data;
    unsigned char byte = 0;
    CHECK(vma_fill(memory, 0, 64, 9));
    CHECK(vma_read(memory, 63, &byte, 1));
    return byte;
}

static void *hand(void *unused) {
    int one = 1;
    vma_job jobs[TURNS];
    for (int turn = 0; turn < TURNS; turn++) CHECK(vma_submit(worker, add, &one, &jobs[turn]));
    for (int turn = 0; turn < TURNS; turn++) {
        CHECK(vma_job_wait(jobs[turn], MINUTE, NULL));
        CHECK(vma_job_free(jobs[turn]));
    }
    return unused;
}

int main(void) {
    vma_device device;
    CHECK(vma_device_open("auto", &device));
    CHECK(vma_worker_start(device, NULL, &worker));
    pthread_t threads[THREADS];
    for (int at = 0; at < THREADS; at++) pthread_create(&threads[at], NULL, hand, NULL);
    for (int at = 0; at < THREADS; at++) pthread_join(threads[at], NULL);
    vma_memory memory;
    int32_t byte = 0;
    CHECK(vma_memory_allocate(worker, VMA_DEVICE_MEMORY, 64, &memory));
    CHECK(vma_submit_and_wait(worker, fill, &memory, MINUTE, &byte));
    CHECK(vma_memory_free(memory));
    CHECK(vma_worker_free(worker));
    CHECK(vma_device_close(device));
    if (sum != THREADS * TURNS || byte != 9) return fprintf(stderr, "%ld, %d\n", sum, (int)byte), 1;
    puts("ok");
    return 0;
}
