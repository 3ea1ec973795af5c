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

/* A child that may start no thread: it computes on the one that calls. */
static int works_alone(void) {
    struct rlimit none;
    if (setuid(65534) || getrlimit(RLIMIT_NPROC, &none)) return 3;
    none.rlim_cur = 0;
    return setrlimit(RLIMIT_NPROC, &none) || !works() ? 4 : 0;
}

/* The same of one that has no address space for the stack of a thread, but some to compile a kernel. */
static int works_in_little(void) {
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld", &pages) != 1 || fclose(file)) return 5;
    rlim_t space = (rlim_t)pages * sysconf(_SC_PAGESIZE) + (48 << 20);
    struct rlimit little = {space, space};
    return setrlimit(RLIMIT_AS, &little) || !works() ? 6 : 0;
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
    int (*const poor[])(void) = {works_in_little, works_alone};
    for (int at = 0; at < (getuid() == 0 ? 2 : 1); at++) {
        int status = 0;
        pid_t child = fork();
        if (child == 0) {
            alarm(300);
            _exit(poor[at]());
        }
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
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
