/* Takes device memory: all that it gets (`fill`), or 40 MiB until its standard input ends (`hold`). Or begins threads until the driver takes no more of
 * them (`threads`). */
#define ON_FAILURE exit(1)
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include "../../../hook/preload/tests/driver.h"

static pthread_barrier_t asked;
static int refused;

static void *ask(void *argument) {
    size_t left, total;
    (void)argument;
    refused = TRY("cuCtxSetCurrent", (void *), context);
    if (!refused) refused = TRY("cuMemGetInfo_v2", (size_t *, size_t *), &left, &total);
    pthread_barrier_wait(&asked);
    if (!refused) pause();
    return NULL;
}

static int threads(void) {
    enum { MOST = 1000 };
    int made = 0;
    pthread_barrier_init(&asked, NULL, 2);
    for (pthread_t thread; !refused && made < MOST; made++) {
        if (pthread_create(&thread, NULL, ask, NULL)) return 1;
        pthread_barrier_wait(&asked);
    }
    size_t left, total;
    int still = TRY("cuMemGetInfo_v2", (size_t *, size_t *), &left, &total);
    printf("a thread: %d, then the first: %d\n", refused, still);
    fflush(stdout);
    _exit(made == MOST);
}

int main(int count, char **arguments) {
    if (count < 2) return 2;
    begin();
    if (!strcmp(arguments[1], "threads")) return threads();
    if (!strcmp(arguments[1], "hold")) {
        allocate(40 * mib);
        printf("holds\n");
        fflush(stdout);
        return getchar() != EOF;
    }
    int made = 0, code = 0;
    for (ptr at; !code && made < 100; made += !code) code = TRY("cuMemAlloc_v2", (ptr *, size_t), &at, 8 * mib);
    size_t left = 0, total = 0;
    CALL("cuMemGetInfo_v2", (size_t *, size_t *), &left, &total);
    printf("made %d, then %d, of %zu MiB\n", made, code, total / mib);
    return left >= 8 * mib;
}
