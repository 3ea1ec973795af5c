/* Two processes share memory by a handle, as they do without the hook: the second is this program again, which is sent handles over a pipe and
 * answers by another. It knows nothing of the hook, and works before any driver. The argument says how many MiB there are; with "native" they are
 * the driver's own, in allocations too small for virtual memory. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define ON_FAILURE exit(1)
#include "driver.h"

typedef struct {
    char bytes[64];
} handle;

static void fill(ptr to, uint32_t value, size_t words) {
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), to, value, words);
    CALL("cuCtxSynchronize", (void));
}

static int open_handle(ptr *at, handle from) { return TRY("cuIpcOpenMemHandle_v2", (ptr *, handle, unsigned), at, from, 1); }

static void send(int to, const void *what, size_t size) {
    if (write(to, what, size) != (ssize_t)size) exit(2);
}

static void receive(int from, void *what, size_t size) {
    if (read(from, what, size) != (ssize_t)size) exit(2);
}

/* Is it one buffer, and one block of memory? */
static int is_one(ptr first, ptr last) {
    uint64_t of[4];
    for (int at = 0; at < 4; at++) CALL("cuPointerGetAttribute", (void *, int, ptr), &of[at], at / 2 ? 20 : 7, at % 2 ? last : first);
    return of[0] == of[1] && of[2] == of[3];
}

/* Opens what it is sent, tells both ends' words, and writes others. */
static void import(int from, int to) {
    size_t bytes;
    begin();
    for (;;) {
        handle sent;
        ptr at = 0, again = 0, base = 0;
        size_t size = 0;
        uint32_t words[6] = {0};
        receive(from, &bytes, sizeof bytes);
        if (!bytes) break;
        receive(from, &sent, sizeof sent);
        words[0] = (uint32_t)open_handle(&at, sent);
        if (!words[0]) {
            words[1] = word(at), words[2] = word(at + bytes - 4);
            CALL("cuIpcOpenMemHandle_v2", (ptr *, handle, unsigned), &again, sent, 1);
            CALL("cuMemGetAddressRange_v2", (ptr *, size_t *, ptr), &base, &size, at + bytes / 2);
            words[3] = again == at, words[4] = base == at && size == bytes && is_one(at, at + bytes - 4);
            fill(at, words[1] + 1, 1), fill(at + bytes - 4, words[2] + 1, 1);
            CALL("cuIpcCloseMemHandle", (ptr), at);
            words[5] = word(at);
            CALL("cuIpcCloseMemHandle", (ptr), at);
        }
        send(to, words, sizeof words);
    }
    exit(0);
}

static void share(int to, int from, const char *what, ptr memory, size_t bytes, handle *sent) {
    uint32_t words[6];
    send(to, &bytes, sizeof bytes), send(to, sent, sizeof *sent);
    receive(from, words, sizeof words);
    printf("%s: %u: %u %u, again %u, range %u, still %u", what, words[0], words[1], words[2], words[3], words[4], words[5]);
    if (memory) printf("; now %u %u", word(memory), word(memory + bytes - 4));
    printf("\n");
}

int main(int count, char **arguments) {
    int there[2], back[2], status;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (count > 3) import(atoi(arguments[2]), atoi(arguments[3]));
    if (count < 2 || pipe(there) || pipe(back)) return 2;
    pid_t child = fork();
    if (!child) {
        char from[16], to[16];
        close(there[1]), close(back[0]);
        if (getenv("WITHOUT_HOOK")) unsetenv("LD_PRELOAD");
        snprintf(from, sizeof from, "%d", there[0]), snprintf(to, sizeof to, "%d", back[1]);
        execl("/proc/self/exe", arguments[0], arguments[1], from, to, (char *)NULL);
        _exit(2);
    }
    close(there[0]), close(back[1]);
    begin();
    size_t bytes = (size_t)atoi(arguments[1]) * mib, none = 0;
    handle sent, own;
    ptr memory = allocate(bytes), at;
    fill(memory, 7, bytes / 4);
    CALL("cuIpcGetMemHandle", (handle *, ptr), &sent, memory);
    printf("own: %d\n", open_handle(&at, sent));
    share(there[1], back[0], "shared", memory, bytes, &sent);
    CALL("cuIpcGetMemHandle", (handle *, ptr), &own, memory);
    share(there[1], back[0], "twice", memory, bytes, &own);
    /* One that has grown, of several pieces; the one that is shared is copied, as it stays where it is. */
    size_t more = bytes + 4 * mib;
    ptr grown = allocate(more);
    CALL("cuMemcpyDtoD_v2", (ptr, ptr, size_t), grown, memory, bytes);
    CALL("cuMemFree_v2", (ptr), memory);
    fill(grown + bytes, 20, (more - bytes) / 4);
    ptr last = allocate(more + 4 * mib);
    CALL("cuMemcpyDtoD_v2", (ptr, ptr, size_t), last, grown, more);
    CALL("cuMemFree_v2", (ptr), grown);
    more += 4 * mib;
    fill(last + more - 4 * mib, 30, mib);
    CALL("cuIpcGetMemHandle", (handle *, ptr), &own, last);
    share(there[1], back[0], "grown", last, more, &own);
    CALL("cuMemFree_v2", (ptr), last);
    /* Small ones are the driver's own. */
    ptr small = allocate(4096);
    fill(small, 40, 1024);
    CALL("cuIpcGetMemHandle", (handle *, ptr), &own, small);
    share(there[1], back[0], "small", small, 4096, &own);
    if (count > 2) {
        /* Freed: the handle names nothing any more. A driver may not notice. */
        share(there[1], back[0], "freed", 0, bytes, &sent);
        memset(&sent.bytes[20], 1, 4);
        share(there[1], back[0], "of another", 0, bytes, &sent);
    }
    send(there[1], &none, sizeof none);
    waitpid(child, &status, 0);
    printf("child: %d\n", status);
    return 0;
}
