/* What a process does with the library beside calls: it loads and unloads it, forks, and ends while threads are in calls. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

typedef int32_t gemm(const float *, const float *, float *, int, int, int, float, float, void *);
static gemm *multiply;

static int works(void) {
    float a[4] = {1, 2, 3, 4}, b[4] = {1, 0, 0, 1}, c[4] = {0};
    return multiply(a, b, c, 2, 2, 2, 1, 0, NULL) == 0 && c[0] == 1 && c[3] == 4;
}

static void *forever(void *unused) {
    while (works()) continue;
    return unused;
}

static void *ever(void *unused) {
    for (;;) works();
    return unused;
}

/* A child that may start no thread, and may later. */
static int starts_again(void) {
    struct rlimit limit, none;
    if (setuid(65534) || getrlimit(RLIMIT_NPROC, &limit)) return 3;
    none = limit;
    none.rlim_cur = 0;
    if (setrlimit(RLIMIT_NPROC, &none) || works()) return 4;
    return setrlimit(RLIMIT_NPROC, &limit) || !works() ? 5 : 0;
}

int main(void) {
    void *library = dlopen("libvmkernels.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    *(void **)&multiply = dlsym(library, "cuda_gemm");
    if (!multiply || !works()) return fputs("before\n", stderr), 1;
    dlclose(library);
    if (!works()) return fputs("unloaded\n", stderr), 1;
    pthread_t thread;
    pthread_create(&thread, NULL, forever, NULL);
    for (int turn = 0; turn < 3; turn++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(300);
            _exit(works() ? 0 : 2);
        }
        int status = 0;
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
            return fprintf(stderr, "child: %d\n", status), 1;
    }
    if (!works()) return fputs("parent\n", stderr), 1;
    if (getuid() == 0) {
        int status = 0;
        pid_t child = fork();
        if (child == 0) {
            alarm(300);
            _exit(starts_again());
        }
        if (waitpid(child, &status, 0) != child || status != 0)
            return fprintf(stderr, "child without threads: %d\n", status), 1;
    }
    /* Between calls a thread can be cancelled, in one it can't. */
    pthread_t others[4];
    for (int at = 0; at < 4; at++) pthread_create(&others[at], NULL, ever, NULL);
    usleep(10000);
    for (int at = 0; at < 4; at++) pthread_cancel(others[at]);
    usleep(10000);
    if (!works()) return fputs("after threads were cancelled\n", stderr), 1;
    puts("ok");
    exit(0);
}
