/* A renderer and a worker of vmaccel.h that use one memory in turns, each by its name, on the processor: the whole life of a resource, what is refused and with which words,
 * and what a thread may do that must never hang. The renderer is a thread that writes to the memory; with Vulkan it would submit a frame, and the functions of its timeline
 * would be vkWaitSemaphores and vkSignalSemaphore. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

/* That a call is refused with a status and a text that has a part. */
#define REFUSED(call, status, part)                                                              \
    do {                                                                                         \
        vma_status is = (call);                                                                  \
        if (is != (status) || !strstr(vma_last_error(), part)) {                                 \
            fprintf(stderr, "%d: %s: %d, %s\n", __LINE__, #call, (int)is, vma_last_error());     \
            _exit(1);                                                                            \
        }                                                                                        \
    } while (0)

#define HOLDS(condition)                                                       \
    do {                                                                       \
        if (!(condition)) {                                                    \
            fprintf(stderr, "%d: not %s\n", __LINE__, #condition);             \
            _exit(1);                                                          \
        }                                                                      \
    } while (0)

enum { NUMBERS = 1024, BYTES = 4 * NUMBERS, OFFSET = 4096, TURNS = 20 };

static const uint64_t MINUTE = 60000000000u, MOMENT = 10000000u;

static const char source[] =
    "vir 1\n"
    "kernel @bump(@x: view<i32, [n], readwrite>, %by: i32) at 0x1000 block(64) {\n"
    "  %i = global_id.x : i64\n"
    "  %n = extent @x, 0 : i64\n"
    "  %in = lt.s %i, %n : bool\n"
    "  if %in {\n"
    "    %a = load @x[%i] : i32\n"
    "    %sum = add %a, %by : i32\n"
    "    store @x[%i], %sum\n"
    "  }\n"
    "}\n";

/* A timeline of this program's own. */
struct mine {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t value;
    int released, lost;
};

#define MINE {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0}

static int32_t mine_wait(void *data, uint64_t value, uint64_t timeout_ns) {
    struct mine *mine = data;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    uint64_t nanoseconds = (uint64_t)until.tv_nsec + (timeout_ns < MINUTE ? timeout_ns : MINUTE);
    until.tv_sec += (time_t)(nanoseconds / 1000000000);
    until.tv_nsec = (long)(nanoseconds % 1000000000);
    pthread_mutex_lock(&mine->lock);
    int late = 0;
    while (mine->value < value && !mine->lost && late != ETIMEDOUT)
        late = pthread_cond_timedwait(&mine->changed, &mine->lock, &until);
    int32_t result = mine->lost ? -5 : mine->value >= value;
    pthread_mutex_unlock(&mine->lock);
    return result;
}

static int32_t mine_signal(void *data, uint64_t value) {
    struct mine *mine = data;
    pthread_mutex_lock(&mine->lock);
    if (mine->value < value) mine->value = value;
    pthread_cond_broadcast(&mine->changed);
    pthread_mutex_unlock(&mine->lock);
    return 0;
}

static int32_t mine_release(void *data) {
    struct mine *mine = data;
    pthread_mutex_lock(&mine->lock);
    mine->released++;
    pthread_cond_broadcast(&mine->changed);
    pthread_mutex_unlock(&mine->lock);
    return 0;
}

/* Waits until the library uses a timeline no more. */
static void wait_released(struct mine *mine) {
    pthread_mutex_lock(&mine->lock);
    while (!mine->released) pthread_cond_wait(&mine->changed, &mine->lock);
    HOLDS(mine->released == 1);
    pthread_mutex_unlock(&mine->lock);
}

/* A worker linked with a renderer, and the memory that they share. */
struct both {
    vma_device device;
    vma_worker worker;
    vma_module module;
    vma_kernel bump;
    vma_timeline graphics, computed;
    vma_link link;
    int fd;
    int32_t *numbers;
};

static int shared(unsigned seals, off_t bytes) {
    int fd = memfd_create("shared", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    HOLDS(fd >= 0 && ftruncate(fd, bytes) == 0 && fcntl(fd, F_ADD_SEALS, seals) == 0);
    return fd;
}

static void begin(struct both *both, const vma_worker_options *options, struct mine *computed) {
    CHECK(vma_device_open("cpu", &both->device));
    CHECK(vma_worker_start(both->device, options, &both->worker));
    CHECK(vma_module_load(both->worker, source, strlen(source), &both->module));
    CHECK(vma_module_find_kernel(both->module, "bump", &both->bump));
    CHECK(vma_timeline_create(&both->graphics));
    CHECK(vma_timeline_import(-1, mine_wait, mine_signal, mine_release, computed, &both->computed));
    CHECK(vma_link_create(both->worker, both->graphics, both->computed, &both->link));
    both->fd = shared(F_SEAL_SHRINK | F_SEAL_GROW, OFFSET + BYTES);
    char *base = mmap(NULL, OFFSET + BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, both->fd, 0);
    HOLDS(base != MAP_FAILED);
    both->numbers = (int32_t *)(void *)(base + OFFSET);
}

/* Ends all of it; nothing is left. */
static void end(struct both *both, struct mine *computed) {
    uint64_t left;
    CHECK(vma_link_free(both->link));
    CHECK(vma_timeline_free(both->graphics));
    CHECK(vma_timeline_free(both->computed));
    CHECK(vma_module_free(both->module));
    CHECK(vma_worker_free(both->worker));
    CHECK(vma_device_close(both->device));
    CHECK(vma_handle_count(&left));
    HOLDS(left == 0);
    wait_released(computed);
    munmap((char *)both->numbers - OFFSET, OFFSET + BYTES);
    close(both->fd);
}

static vma_external_memory described(int fd) {
    return (vma_external_memory){.kind = VMA_HOST_FD, .fd = fd, .allocation_bytes = OFFSET + BYTES, .offset = OFFSET, .bytes = BYTES};
}

static vma_resource registered(const struct both *both, const char *name) {
    vma_resource resource;
    const vma_external_memory memory = described(both->fd);
    CHECK(vma_resource_register(both->worker, name, &memory, &resource));
    return resource;
}

static vma_status bump(const struct both *both, vma_memory memory, int32_t by) {
    const vma_argument arguments[] = {
        {.kind = VMA_VIEW, .memory = memory},
        {.kind = VMA_SCALAR, .type = VMA_U32, .bits = (uint32_t)by},
    };
    return vma_launch(both->bump, NUMBERS / 64, 1, 1, arguments, 2, NULL);
}

/* Draws each frame once the worker has given back the one before: here it doubles what it finds. */
static void *render(void *data) {
    const struct both *both = data;
    for (uint64_t frame = 1; frame <= TURNS; frame++) {
        CHECK(vma_timeline_wait(both->computed, frame - 1, MINUTE));
        for (int at = 0; at < NUMBERS; at++) both->numbers[at] = frame == 1 ? at : 2 * both->numbers[at];
        CHECK(vma_timeline_signal(both->graphics, frame));
    }
    return NULL;
}

static int life(void) {
    struct mine computed = MINE;
    struct both both;
    pthread_t renderer;
    vma_resource_state state;
    vma_memory memory = 0, first = 0;
    uint64_t value, bytes;
    begin(&both, NULL, &computed);
    vma_resource frame = registered(&both, "frame");
    HOLDS(pthread_create(&renderer, NULL, render, &both) == 0);
    /* All turns are given at once: nobody waits for another on the host. */
    for (uint64_t turn = 1; turn <= TURNS; turn++) {
        CHECK(vma_resource_map(frame, both.link, turn, &memory));
        if (turn == 1) first = memory;
        CHECK(bump(&both, memory, (int32_t)turn));
        CHECK(vma_resource_get_state(frame, &state));
        HOLDS(state == VMA_MAPPED && memory == first);
        CHECK(vma_resource_unmap(frame, &value));
        CHECK(vma_resource_get_state(frame, &state));
        HOLDS(value == turn && state == VMA_REGISTERED);
    }
    CHECK(vma_timeline_wait(both.computed, TURNS, MINUTE));
    pthread_join(renderer, NULL);
    for (int at = 0; at < NUMBERS; at++) {
        int32_t wanted = at + 1;
        for (int32_t turn = 2; turn <= TURNS; turn++) wanted = 2 * wanted + turn;
        HOLDS(both.numbers[at] == wanted);
    }
    /* It is memory as any other. */
    int32_t numbers[NUMBERS];
    CHECK(vma_resource_map(frame, both.link, TURNS, &memory));
    CHECK(vma_memory_get_size(memory, &bytes));
    HOLDS(bytes == BYTES);
    CHECK(vma_fill(memory, 0, BYTES / 2, 1));
    CHECK(vma_copy(memory, BYTES / 2, memory, 0, BYTES / 2));
    CHECK(vma_read(memory, 0, numbers, BYTES));
    HOLDS(numbers[NUMBERS - 1] == 0x01010101);
    CHECK(vma_resource_unmap(frame, &value));
    CHECK(vma_timeline_wait(both.computed, value, MINUTE));
    HOLDS(both.numbers[0] == 0x01010101);
    CHECK(vma_resource_unregister(frame));
    CHECK(vma_reset(both.worker));
    /* It can be registered again. */
    frame = registered(&both, "again");
    CHECK(vma_resource_unregister(frame));
    end(&both, &computed);
    return 0;
}

static int misuse(void) {
    struct mine computed = MINE, other_computed = MINE;
    struct both both, other;
    uint64_t value;
    vma_resource resource = 0;
    vma_memory memory = 0, again = 0;
    begin(&both, NULL, &computed);
    begin(&other, NULL, &other_computed);

    /* Memory that is none, or is not what is said. */
    struct { vma_external_memory memory; vma_status status; const char *part; } none[] = {
        {{.kind = VMA_HOST_FD, .fd = -1, .allocation_bytes = 1, .bytes = 1}, VMA_INVALID_VALUE, "vma_resource_register: memory->fd is -1"},
        {{.kind = VMA_HOST_FD, .fd = 1000000, .allocation_bytes = 1, .bytes = 1}, VMA_INVALID_VALUE, "no open descriptor"},
        {{.kind = VMA_HOST_FD, .fd = STDERR_FILENO, .allocation_bytes = 1, .bytes = 1}, VMA_INVALID_VALUE, "x stays unregistered: this memory can't be shared: it is no memfd"},
        {{.kind = VMA_HOST_FD, .fd = shared(F_SEAL_GROW, 8192), .allocation_bytes = 8192, .bytes = 8192}, VMA_INVALID_VALUE, "F_SEAL_SHRINK"},
        {{.kind = VMA_HOST_FD, .fd = both.fd, .allocation_bytes = 8193, .bytes = 1}, VMA_INVALID_VALUE, "8192 bytes, not 8193"},
        {{.kind = VMA_HOST_FD, .fd = both.fd, .allocation_bytes = UINT64_MAX, .bytes = 1}, VMA_INVALID_VALUE, "8192 bytes, not"},
        {{.kind = VMA_HOST_FD, .fd = both.fd, .allocation_bytes = 8192, .bytes = 0}, VMA_INVALID_VALUE, "x stays unregistered: bytes 0..0+0"},
        {{.kind = VMA_HOST_FD, .fd = both.fd, .allocation_bytes = 8192, .bytes = 8193}, VMA_INVALID_VALUE, "do not lie in"},
        {{.kind = VMA_HOST_FD, .fd = both.fd, .allocation_bytes = 8192, .offset = UINT64_MAX, .bytes = 2}, VMA_INVALID_VALUE, "do not lie in"},
        {{.kind = VMA_OPAQUE_FD, .fd = both.fd, .allocation_bytes = 8192, .bytes = 8192}, VMA_NOT_SUPPORTED, "memory shared as opaque-fd"},
        {{.kind = 3, .fd = both.fd, .allocation_bytes = 8192, .bytes = 8192}, VMA_INVALID_VALUE, "memory->kind is 3: VMA_OPAQUE_FD"},
        {{.kind = -1, .fd = both.fd, .allocation_bytes = 8192, .bytes = 8192}, VMA_INVALID_VALUE, "memory->kind is -1"},
    };
    for (size_t at = 0; at < sizeof none / sizeof *none; at++)
        REFUSED(vma_resource_register(both.worker, "x", &none[at].memory, &resource), none[at].status, none[at].part);
    HOLDS(resource == 0);

    /* Steps out of their order. */
    resource = registered(&both, "frame");
    REFUSED(vma_resource_unmap(resource, &value), VMA_INVALID_STATE, "vma_resource_unmap: resource is of the resource \"frame\", which is registered: only what is mapped");
    REFUSED(vma_reset(both.worker), VMA_INVALID_STATE, "still held: frame (registered)");
    CHECK(vma_resource_map(resource, both.link, 0, &memory));
    REFUSED(vma_resource_map(resource, both.link, 0, &again), VMA_INVALID_STATE, "which is mapped: unmap it first");
    REFUSED(vma_resource_unregister(resource), VMA_INVALID_STATE, "which is mapped: unmap it first");
    REFUSED(vma_reset(both.worker), VMA_INVALID_STATE, "still held: frame (mapped)");
    REFUSED(vma_memory_free(memory), VMA_INVALID_STATE, "memory is of the resource \"frame\", which is mapped: vma_resource_unregister ends it");
    REFUSED(bump(&other, memory, 1), VMA_INVALID_VALUE, "belongs to another worker");
    CHECK(bump(&both, memory, 1));
    CHECK(vma_resource_unmap(resource, &value));
    REFUSED(vma_resource_unmap(resource, &value), VMA_INVALID_STATE, "\"frame\", which is registered");

    /* Memory of what is not mapped. */
    int32_t numbers[4] = {0};
    void *pointer = NULL;
    const char *registered_is = "is of the resource \"frame\", which is registered: kernels have it while it is mapped";
    REFUSED(bump(&both, memory, 1), VMA_INVALID_STATE, "vma_launch: arguments[0].memory is of the resource \"frame\"");
    REFUSED(vma_read(memory, 0, numbers, 16), VMA_INVALID_STATE, registered_is);
    REFUSED(vma_write(memory, 0, numbers, 16), VMA_INVALID_STATE, registered_is);
    REFUSED(vma_fill(memory, 0, 16, 0), VMA_INVALID_STATE, registered_is);
    REFUSED(vma_copy(memory, 0, memory, 16, 16), VMA_INVALID_STATE, registered_is);
    REFUSED(vma_memory_get_host_pointer(memory, &pointer), VMA_INVALID_STATE, registered_is);

    /* Links and timelines of others, and those that were used. */
    vma_link link = 0;
    REFUSED(vma_resource_map(resource, other.link, 0, &again), VMA_INVALID_VALUE, "frame stays registered: this link belongs to another worker");
    REFUSED(vma_link_create(both.worker, both.graphics, both.graphics, &link), VMA_INVALID_STATE, "computed was linked already");
    REFUSED(vma_link_create(both.worker, both.graphics, both.computed, &link), VMA_INVALID_STATE, "computed was linked already");
    REFUSED(vma_link_create(both.worker, both.computed, both.graphics, &link), VMA_INVALID_STATE, "graphics is signalled by a worker");
    REFUSED(vma_timeline_signal(both.computed, 9), VMA_INVALID_STATE, "timeline is signalled by a worker");
    vma_timeline timeline = 0;
    REFUSED(vma_timeline_import(-2, mine_wait, mine_signal, NULL, NULL, &timeline), VMA_INVALID_VALUE, "fd is -2, which is no open descriptor");
    REFUSED(vma_timeline_import(-1, NULL, mine_signal, NULL, NULL, &timeline), VMA_INVALID_VALUE, "wait is NULL");
    REFUSED(vma_timeline_import(-1, mine_wait, NULL, NULL, NULL, &timeline), VMA_INVALID_VALUE, "signal is NULL");
    HOLDS(link == 0 && timeline == 0);

    /* Handles that were freed, are another's or were never given. */
    CHECK(vma_resource_unregister(resource));
    REFUSED(vma_resource_unregister(resource), VMA_INVALID_HANDLE, "a resource that was freed");
    REFUSED(vma_resource_map(resource, both.link, 0, &again), VMA_INVALID_HANDLE, "a resource that was freed");
    REFUSED(vma_fill(memory, 0, 16, 0), VMA_INVALID_HANDLE, "memory that was freed");
    REFUSED(vma_resource_unmap(resource + 1000, &value), VMA_INVALID_HANDLE, "which no function gave");
    REFUSED(vma_resource_unmap(memory, &value), VMA_INVALID_HANDLE, "a resource is needed");
    REFUSED(vma_resource_unmap(0, &value), VMA_INVALID_HANDLE, "as vma_resource_register gives it");

    /* A timeline whose device is lost takes the worker's queue with it, and what was promised is signalled all the same. */
    resource = registered(&other, "last");
    struct mine broken = MINE, told = MINE;
    broken.lost = 1;
    vma_timeline lost, last;
    CHECK(vma_timeline_import(-1, mine_wait, mine_signal, mine_release, &broken, &lost));
    CHECK(vma_timeline_import(-1, mine_wait, mine_signal, mine_release, &told, &last));
    CHECK(vma_link_create(other.worker, lost, last, &link));
    CHECK(vma_timeline_free(lost));
    REFUSED(vma_timeline_wait(lost, 1, 0), VMA_INVALID_HANDLE, "a timeline that was freed");
    CHECK(vma_resource_map(resource, link, 1, &memory));
    vma_status status = vma_resource_unmap(resource, &value);
    HOLDS(status == VMA_SUCCESS || status == VMA_LOST);
    if (status == VMA_SUCCESS) CHECK(vma_timeline_wait(last, value, MINUTE));
    REFUSED(vma_synchronize(other.worker, MINUTE), VMA_LOST, "its function returned -5");
    REFUSED(vma_reset(other.worker), VMA_INVALID_STATE, "still held: last");
    vma_stop(other.worker, MINUTE);
    if (status != VMA_SUCCESS) CHECK(vma_resource_unmap(resource, &value));
    CHECK(vma_timeline_wait(last, 1, MINUTE));
    CHECK(vma_resource_unregister(resource));
    CHECK(vma_timeline_free(last));
    CHECK(vma_link_free(link));
    wait_released(&broken);
    wait_released(&told);
    vma_worker_free(other.worker);
    CHECK(vma_worker_start(other.device, NULL, &other.worker));

    CHECK(vma_link_free(both.link));
    CHECK(vma_timeline_free(both.graphics));
    CHECK(vma_timeline_free(both.computed));
    CHECK(vma_module_free(both.module));
    CHECK(vma_worker_free(both.worker));
    CHECK(vma_device_close(both.device));
    wait_released(&computed);
    end(&other, &other_computed);
    return 0;
}

static sem_t begun, go;

static int32_t hold(void *data) {
    sem_post(&begun);
    while (sem_wait(&go)) continue;
    return *(int32_t *)data;
}

static int32_t nothing(void *data) {
    return data == NULL;
}

static void *stop(void *data) {
    CHECK(vma_stop(*(vma_worker *)data, MINUTE));
    return NULL;
}

static void *release(void *unused) {
    sem_post(&go);
    return unused;
}

/* What a thread may do that must never hang: whatever the worker does, the calls end. */
static int never_hangs(void) {
    struct mine computed = MINE;
    struct both both;
    const vma_worker_options options = {.timeout_ns = 50000000u, .capacity = 2};
    int32_t number = 42, result = 0;
    uint64_t value;
    vma_memory memory;
    vma_job job = 1;
    pthread_t thread;
    sem_init(&begun, 0, 0);
    sem_init(&go, 0, 0);
    begin(&both, &options, &computed);

    /* In time: the result. */
    CHECK(vma_submit_within(both.worker, nothing, NULL, MINUTE, &result, &job));
    HOLDS(job == 0 && result == 1);
    /* It runs: a handle. Behind it: taken back, also when the queue is full. */
    REFUSED(vma_submit_within(both.worker, hold, &number, 1000 * MOMENT, &result, &job), VMA_TIMEOUT, "vma_submit_within: the job did not come in time");
    HOLDS(job != 0);
    sem_wait(&begun);
    for (int at = 0; at < 4; at++) {
        vma_job behind = 1;
        REFUSED(vma_submit_within(both.worker, nothing, NULL, MOMENT, NULL, &behind), VMA_TIMEOUT, "in time");
        HOLDS(behind == 0);
    }
    REFUSED(vma_job_wait(job, 0, &result), VMA_TIMEOUT, "in time");
    release(NULL);
    CHECK(vma_job_wait(job, MINUTE, &result));
    HOLDS(result == 42);
    CHECK(vma_job_free(job));

    /* Graphics never has its turn: what waits for it ends, and so it does once graphics' promise is kept for it. */
    vma_resource frame = registered(&both, "frame");
    CHECK(vma_resource_map(frame, both.link, 1, &memory));
    CHECK(vma_fill(memory, 0, BYTES, 1));
    CHECK(vma_resource_unmap(frame, &value));
    REFUSED(vma_synchronize(both.worker, MOMENT), VMA_TIMEOUT, "in time");
    REFUSED(vma_timeline_wait(both.computed, value, MOMENT), VMA_TIMEOUT, "the timeline's value 1 did not come in time");
    HOLDS(both.numbers[0] == 0);
    CHECK(vma_timeline_signal(both.graphics, 1));
    CHECK(vma_timeline_wait(both.computed, value, MINUTE));
    HOLDS(both.numbers[0] == 0x01010101);

    /* The worker stops while a function runs, and one is waited for behind it. */
    vma_job last;
    CHECK(vma_resource_map(frame, both.link, 1, &memory));
    CHECK(vma_synchronize(both.worker, MINUTE));
    CHECK(vma_submit(both.worker, hold, &number, &job));
    CHECK(vma_submit(both.worker, nothing, NULL, &last));
    sem_wait(&begun);
    HOLDS(pthread_create(&thread, NULL, stop, &both.worker) == 0);
    vma_status status;
    vma_job refused = 1;
    do status = vma_submit_within(both.worker, nothing, NULL, MOMENT, NULL, &refused);
    while (status == VMA_TIMEOUT && refused == 0);
    HOLDS(status == VMA_STOPPED && refused == 0);
    release(NULL);
    CHECK(vma_job_wait(job, MINUTE, &result));
    CHECK(vma_job_wait(last, MINUTE, &result));
    pthread_join(thread, NULL);
    CHECK(vma_job_free(job));
    CHECK(vma_job_free(last));
    /* What is mapped then is given back all the same. */
    CHECK(vma_resource_unmap(frame, &value));
    CHECK(vma_timeline_wait(both.computed, value, 0));
    REFUSED(vma_resource_map(frame, both.link, 1, &memory), VMA_STOPPED, "frame stays registered: the worker has stopped");
    CHECK(vma_resource_unregister(frame));
    end(&both, &computed);
    return 0;
}

int main(int count, char **arguments) {
    alarm(120);
    const char *what = count > 1 ? arguments[1] : "";
    if (!strcmp(what, "life")) return life();
    if (!strcmp(what, "misuse")) return misuse();
    if (!strcmp(what, "never-hangs")) return never_hangs();
    return fprintf(stderr, "%s is none\n", what), 1;
}
