/* What a process does with vmaccel.h beside calls, each by its name, on the CPU or the device that is named behind it: it makes and frees for long, forks, unloads the library, and ends
 * while workers, kernels and calls are under way. */
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

static const uint64_t MINUTE = 60000000000u;

static const char source[] =
    "vir 1\n"
    "kernel @spin(@x: view<i32, [1], readwrite>) at 0x1000 block(1) {\n"
    "  %i = const 0 : i64\n"
    "  %zero = const 0 : i32\n"
    "  while {\n"
    "    %a = load @x[%i] : i32\n"
    "    %on = eq %a, %zero : bool\n"
    "    yield %on\n"
    "  } do {\n"
    "    store @x[%i], %zero\n"
    "  }\n"
    "}\n";

static const char *spec = "cpu";
static vma_device device;
static vma_worker worker;

static void begin(void) {
    CHECK(vma_device_open(spec, &device));
    CHECK(vma_worker_start(device, NULL, &worker));
}

static int32_t nothing(void *data) {
    return data == NULL;
}

static long resident(void) {
    long pages = 0, all = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld %ld", &all, &pages) != 2) return -1;
    fclose(file);
    return pages * sysconf(_SC_PAGESIZE) >> 10;
}

static void make_and_free(void) {
    vma_memory memory[3];
    vma_module module;
    vma_event event;
    vma_job job;
    unsigned char bytes[4096] = {0};
    begin();
    for (int kind = 0; kind < 3; kind++) {
        CHECK(vma_memory_allocate(worker, kind, 1 << 20, &memory[kind]));
        CHECK(vma_write(memory[kind], 0, bytes, sizeof bytes));
    }
    CHECK(vma_module_load(worker, source, strlen(source), &module));
    for (int turn = 0; turn < 20; turn++) {
        CHECK(vma_event_record(worker, &event));
        CHECK(vma_submit(worker, nothing, NULL, &job));
        CHECK(vma_copy(memory[turn % 3], 64, memory[0], 0, 32));
        vma_read(memory[0], 0, NULL, 8);
        vma_module_load(worker, "vir", 3, &module);
        CHECK(vma_event_free(event));
        CHECK(vma_job_free(job));
    }
    for (int kind = 0; kind < 3; kind++) CHECK(vma_memory_free(memory[kind]));
    CHECK(vma_module_free(module));
    CHECK(vma_worker_free(worker));
    CHECK(vma_device_close(device));
}

static int leaks(void) {
    long before = 0;
    for (int turn = 0; turn < 150; turn++) {
        make_and_free();
        if (turn == 50) before = resident();
    }
    uint64_t handles;
    CHECK(vma_handle_count(&handles));
    long grown = resident() - before;
    if (handles != 0 || grown > 4096) return fprintf(stderr, "%d handles, %ld KiB more\n", (int)handles, grown), 1;
    return 0;
}

/* Waits for a child that ends by itself. */
static int ended(pid_t child) {
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
        return fprintf(stderr, "child: %x\n", (unsigned)status), 1;
    return 0;
}

static int forks(void) {
    /* Before the first call a child may use it, and then the parent. */
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        make_and_free();
        exit(0);
    }
    if (ended(child)) return 1;
    begin();
    for (int turn = 0; turn < 8; turn++) {
        child = fork();
        if (child == 0) {
            alarm(60);
            vma_memory memory;
            if (vma_memory_allocate(worker, VMA_DEVICE_MEMORY, 64, &memory) != VMA_NOT_AVAILABLE) _exit(2);
            if (!strstr(vma_last_error(), "vma_memory_allocate: a forked child can't use")) _exit(3);
            if (vma_synchronize(worker, MINUTE) != VMA_NOT_AVAILABLE || vma_worker_free(worker) != VMA_NOT_AVAILABLE)
                _exit(4);
            exit(0);
        }
        if (ended(child)) return 1;
        CHECK(vma_submit_and_wait(worker, nothing, NULL, MINUTE, NULL));
    }
    return 0;
}

static void *submit_for_ever(void *unused) {
    while (vma_submit_and_wait(worker, nothing, NULL, MINUTE, NULL) == VMA_SUCCESS) continue;
    return unused;
}

static void *wait_for_ever(void *unused) {
    vma_synchronize(worker, 1000 * MINUTE);
    return unused;
}

static int32_t sleep_long(void *unused) {
    (void)unused;
    return (int32_t)sleep(1000);
}

static void threads(void *(*function)(void *)) {
    pthread_t thread;
    for (int at = 0; at < 4; at++) pthread_create(&thread, NULL, function, NULL);
    usleep(20000);
}

/* A kernel that ends only because it is stopped. */
static void spin(void) {
    vma_module module;
    vma_kernel kernel;
    vma_argument x = {.kind = VMA_VIEW};
    CHECK(vma_memory_allocate(worker, VMA_DEVICE_MEMORY, 4, &x.memory));
    CHECK(vma_fill(x.memory, 0, 4, 0));
    CHECK(vma_module_load(worker, source, strlen(source), &module));
    CHECK(vma_module_find_kernel(module, "spin", &kernel));
    const vma_limits limits = {UINT64_MAX, 2000000000u};
    CHECK(vma_launch(kernel, 1, 1, 1, &x, 1, &limits));
}

/* How many threads of workers there are. */
static int worker_threads(void) {
    int count = 0;
    char path[64], name[32];
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *task; tasks && (task = readdir(tasks));) {
        snprintf(path, sizeof path, "/proc/self/task/%.20s/comm", task->d_name);
        FILE *file = fopen(path, "r");
        if (!file) continue;
        count += fgets(name, sizeof name, file) && !strcmp(name, "vma-worker\n");
        fclose(file);
    }
    return count;
}

/* It runs after the handlers of the library: only the worker of the job that does not end is left. */
static void only_one_is_left(void) {
    int left = worker_threads();
    if (left != 1) fprintf(stderr, "%d workers are left\n", left), _exit(1);
}

/* One worker's job does not end and the others are idle. With a time for each worker, exit would take 5 minutes. */
static int stuck(void) {
    atexit(only_one_is_left);
    begin();
    CHECK(vma_submit(worker, sleep_long, NULL, NULL));
    for (int at = 0; at < 60; at++) {
        vma_worker idle;
        CHECK(vma_worker_start(device, NULL, &idle));
        CHECK(vma_submit_and_wait(idle, nothing, NULL, MINUTE, NULL));
    }
    return 0;
}

static int32_t end_the_process(void *unused) {
    (void)unused;
    exit(0);
}

static int unload(void) {
    void *library = dlopen("libvmkernels.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    begin();
    threads(submit_for_ever);
    dlclose(library);
    CHECK(vma_submit_and_wait(worker, nothing, NULL, MINUTE, NULL));
    return 0;
}

static int dispatch(const char *what) {
    if (!strcmp(what, "leaks")) return leaks();
    if (!strcmp(what, "forks")) return forks();
    if (!strcmp(what, "unload")) return unload();
    if (!strcmp(what, "stuck")) return stuck();
    begin();
    if (!strcmp(what, "idle")) return 0;
    if (!strcmp(what, "calls")) return threads(submit_for_ever), 0;
    if (!strcmp(what, "waits")) return spin(), threads(wait_for_ever), 0;
    if (!strcmp(what, "kernel")) return spin(), 0;
    if (!strcmp(what, "job")) {
        CHECK(vma_submit(worker, sleep_long, NULL, NULL));
        return threads(wait_for_ever), 0;
    }
    if (!strcmp(what, "in-job")) {
        CHECK(vma_submit_and_wait(worker, end_the_process, NULL, MINUTE, NULL));
        return 1;
    }
    return fprintf(stderr, "%s is none\n", what), 1;
}

int main(int count, char **arguments) {
    alarm(120);
    if (count > 2) spec = arguments[2];
    return count > 1 ? dispatch(arguments[1]) : 1;
}
