// Two devices: what each copies of the other's memory, before and after the other has a context, and of memory that was moved.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define CALL(name, types, ...) ((int(*) types)dlsym(driver, name))(__VA_ARGS__)
static void *driver;
enum { BYTES = 8 << 20 };
static unsigned char host[BYTES];

static void say(const char *what, uint64_t at, int code, unsigned char expected) {
    memset(host, 0, sizeof host);
    int read = CALL("cuMemcpyDtoH_v2", (void *, uint64_t, size_t), host, at, sizeof host);
    printf("%s: %d, read %d, %s\n", what, code, read, host[0] == expected && host[BYTES - 1] == expected ? "right" : "wrong");
}

static uint64_t make(uint64_t bytes, unsigned char value) {
    uint64_t at = 0;
    int made = CALL("cuMemAlloc_v2", (uint64_t *, size_t), &at, bytes);
    int set = CALL("cuMemsetD8_v2", (uint64_t, unsigned char, size_t), at, value, bytes);
    int waited = CALL("cuCtxSynchronize", (void));
    if (made || set || waited) printf("made: %d, set: %d, waited: %d\n", made, set, waited);
    return at;
}

static void grow(uint64_t *at, uint64_t from, uint64_t to) {
    uint64_t more = 0;
    int made = CALL("cuMemAlloc_v2", (uint64_t *, size_t), &more, to);
    int copied = CALL("cuMemcpyDtoD_v2", (uint64_t, uint64_t, size_t), more, *at, from);
    int freed = CALL("cuMemFree_v2", (uint64_t), *at);
    printf("grown: %d %d %d %d\n", made, copied, freed, CALL("cuCtxSynchronize", (void)));
    *at = more;
}

int main(void) {
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    uint64_t contexts[2];
    int code = CALL("cuInit", (unsigned), 0);
    code |= CALL("cuDevicePrimaryCtxRetain", (uint64_t *, int), &contexts[0], 0);
    code |= CALL("cuCtxSetCurrent", (uint64_t), contexts[0]);
    printf("begun: %d\n", code);
    uint64_t a = make(300 << 20, 1), small = make(1 << 20, 9);
    printf("second: %d", CALL("cuDevicePrimaryCtxRetain", (uint64_t *, int), &contexts[1], 1));
    printf(" %d\n", CALL("cuCtxSetCurrent", (uint64_t), contexts[1]));
    uint64_t b = make(300 << 20, 2);
    say("copied here", b, CALL("cuMemcpyDtoD_v2", (uint64_t, uint64_t, size_t), b, a, BYTES), 1);
    code = CALL("cuMemsetD8_v2", (uint64_t, unsigned char, size_t), a, 3, BYTES);
    say("set there", a, code, 3);
    CALL("cuCtxSetCurrent", (uint64_t), contexts[0]);
    say("copied there", b, CALL("cuMemcpy", (uint64_t, uint64_t, size_t), b, a, BYTES), 3);
    say("by name", b, CALL("cuMemcpyPeer", (uint64_t, uint64_t, uint64_t, uint64_t, size_t), b + BYTES, contexts[1], a, contexts[0], BYTES), 3);
    grow(&a, 300 << 20, 700 << 20);
    CALL("cuCtxSetCurrent", (uint64_t), contexts[1]);
    say("moved", a, 0, 3);
    grow(&b, 300 << 20, 400 << 20);
    CALL("cuCtxSetCurrent", (uint64_t), contexts[0]);
    say("moved there", b, 0, 3);
    printf("small: %d\n", CALL("cuMemcpyDtoD_v2", (uint64_t, uint64_t, size_t), b, small, 1 << 20));
    printf("peers: %d\n", CALL("cuCtxEnablePeerAccess", (uint64_t, unsigned), contexts[1], 0));
    printf("freed: %d", CALL("cuMemFree_v2", (uint64_t), a));
    printf(" %d\n", CALL("cuMemFree_v2", (uint64_t), b));
    return 0;
}
