/* Memory of the host that the program allocates. Its argument says what it does with that. */
#define ON_FAILURE exit(1)
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "../../../features/cuda/hook/preload/tests/driver.h"

enum { BYTES = 4 << 20, MOST = 1000 };
static void *parts[MOST];

/* Allocates as much as there is. */
static int fill(int *code) {
    int count = 0;
    while (!(*code = TRY("cuMemHostAlloc", (void **, size_t, unsigned), &parts[count], BYTES, 0))) count++;
    return count;
}

static int say_fill(const char *name) {
    int code, count = fill(&code);
    printf("%s: %d, then %d\n", name, count, code);
    fflush(stdout);
    return count;
}

/* Threads that all begin at once. */
enum { THREADS = 200 };
static pthread_barrier_t all;
static int made;

static void *make(void *unused) {
    ptr device;
    pthread_barrier_wait(&all);
    CALL("cuCtxSetCurrent", (void *), context);
    CALL("cuMemAlloc_v2", (ptr *, size_t), &device, 4096);
    CALL("cuMemFree_v2", (ptr), device);
    __atomic_fetch_add(&made, 1, __ATOMIC_SEQ_CST);
    return unused;
}

static void threads(void) {
    pthread_t them[THREADS];
    pthread_barrier_init(&all, NULL, THREADS);
    for (int i = 0; i < THREADS; i++) pthread_create(&them[i], NULL, make, NULL);
    for (int i = 0; i < THREADS; i++) pthread_join(them[i], NULL);
    printf("threads: %d\n", made);
}

int main(int count, char **arguments) {
    const char *what = count > 1 ? arguments[1] : "";
    begin();
    if (!strcmp(what, "holds")) {
        say_fill("had");
        for (;;) pause();
    }
    if (!strcmp(what, "threads")) {
        threads();
        threads();
        return 0;
    }
    if (!strcmp(what, "one")) {
        printf("one: %d\n", TRY("cuMemHostAlloc", (void **, size_t, unsigned), &parts[0], BYTES, 0));
        return 0;
    }
    if (!strcmp(what, "fills")) {
        for (int had = say_fill("had"); had > 0;) CALL("cuMemFreeHost", (void *), parts[--had]);
        say_fill("again");
        return 0;
    }
    int maps = -1;
    CALL("cuDeviceGetAttribute", (int *, int, int), &maps, 19, 0);
    printf("maps: %d\n", maps);
    uint32_t *plain = NULL, *mapped = NULL;
    ptr pointer = 0;
    int code = TRY("cuMemHostAlloc", (void **, size_t, unsigned), (void **)&plain, BYTES, 0);
    printf("plain: %d", code);
    code = TRY("cuMemHostGetDevicePointer_v2", (ptr *, void *, unsigned), &pointer, plain, 0);
    printf(", pointer: %d, same: %d\n", code, pointer == (ptr)plain);
    printf("mapped: %d\n", TRY("cuMemHostAlloc", (void **, size_t, unsigned), (void **)&mapped, BYTES, 2));
    ptr device;
    CALL("cuMemAlloc_v2", (ptr *, size_t), &device, BYTES);
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), device, 7, BYTES / 4);
    CALL("cuMemcpyDtoH_v2", (void *, ptr, size_t), plain, device, BYTES);
    int changed = 1;
    for (int i = 0; i < BYTES / 4; i++) changed &= plain[i] == 7, plain[i] = 3 * i;
    CALL("cuMemcpyHtoD_v2", (ptr, const void *, size_t), device, plain, BYTES);
    uint32_t *other = calloc(1, BYTES);
    CALL("cuMemcpyDtoH_v2", (void *, ptr, size_t), other, device, BYTES);
    printf("changed: %d, copied: %d\n", changed, !memcmp(other, plain, BYTES));
    printf("freed: %d", TRY("cuMemFreeHost", (void *), plain));
    printf(", again: %d\n", TRY("cuMemFreeHost", (void *), plain));
    return 0;
}
