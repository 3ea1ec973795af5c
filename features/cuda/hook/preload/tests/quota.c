/* A program that fills a device of 32 MiB, in the way that its argument says, and tells how far it comes. With the hook and a quota of as much on a
 * larger device it finds the same. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define ON_FAILURE exit(1)
#include "driver.h"

enum { MOST = 8 };
static const size_t piece = 8 << 20;
static void *stream, *pool;

typedef struct {
    ptr name, at;
} memory;

struct property {
    int kind, handles, location, device;
    void *windows;
    unsigned char flags[56];
};

static size_t left(void) {
    size_t left = 0, all = 0;
    CALL("cuMemGetInfo_v2", (size_t *, size_t *), &left, &all);
    return left / mib;
}

static void settle(void) { CALL("cuCtxSynchronize", (void)); }

static int in_order(memory *of) { return TRY("cuMemAllocAsync", (ptr *, size_t, void *), &of->name, piece, stream); }
static int in_thread_order(memory *of) { return TRY("cuMemAllocAsync_ptsz", (ptr *, size_t, void *), &of->name, piece, NULL); }
static void frees_in_order(memory of) {
    CALL("cuMemFreeAsync", (ptr, void *), of.name, stream);
    settle();
}
static void frees(memory of) { CALL("cuMemFree_v2", (ptr), of.name); }

static int of_pool(memory *of) {
    struct property made = {1, 0, 1, 0, NULL, {0}};
    if (!pool) CALL("cuMemPoolCreate", (void **, const void *), &pool, &made);
    return TRY("cuMemAllocFromPoolAsync", (ptr *, size_t, void *, void *), &of->name, piece, pool, stream);
}

/* The pool is gone before its memory is. */
static void ends_pool(memory of) {
    if (pool) CALL("cuMemPoolDestroy", (void *), pool);
    pool = NULL;
    frees_in_order(of);
}

static void *keeping(void) {
    struct property made = {1, 0, 1, 0, NULL, {0}};
    uint64_t all = UINT64_MAX;
    void *made_pool;
    CALL("cuMemPoolCreate", (void **, const void *), &made_pool, &made);
    CALL("cuMemPoolSetAttribute", (void *, int, void *), made_pool, 4, &all);
    return made_pool;
}
static uint64_t held(void *of) {
    uint64_t held = 0;
    CALL("cuMemPoolGetAttribute", (void *, int, void *), of, 5, &held);
    return held / mib;
}
static int from(void *of, size_t bytes, ptr *at) {
    return TRY("cuMemAllocFromPoolAsync", (ptr *, size_t, void *, void *), at, bytes, of, stream);
}

/* What one pool keeps is not another's, nor hidden by what outlives its own pool. */
static void several_pools(void) {
    void *first = keeping(), *second = keeping();
    ptr whole, rest;
    int code = from(first, 32 * mib, &whole);
    frees_in_order((memory){whole, 0});
    code |= from(second, 32 * mib, &rest);
    printf("two pools: %d, held %lu, left %zu\n", code, (unsigned long)(held(first) + held(second)), left());
    frees_in_order((memory){rest, 0});
    CALL("cuMemPoolTrimTo", (void *, size_t), second, 0);
    code = from(first, 16 * mib, &whole);
    CALL("cuMemPoolDestroy", (void *), first);
    if (!from(second, 16 * mib, &rest)) frees_in_order((memory){rest, 0});
    code |= TRY("cuMemAlloc_v2", (ptr *, size_t), &rest, piece);
    printf("outlives its pool: %d, held %lu, left %zu\n", code, (unsigned long)held(second), left());
}

/* A pool keeps all that is freed. */
static int kept(memory *of) {
    uint64_t all = UINT64_MAX;
    void *own;
    CALL("cuDeviceGetDefaultMemPool", (void **, int), &own, 0);
    CALL("cuMemPoolSetAttribute", (void *, int, void *), own, 4, &all);
    return in_order(of);
}

static int of_device(memory *of) { return TRY("cuMemAlloc_v2", (ptr *, size_t), &of->name, piece); }

static int physical(memory *of) {
    struct property made = {1, 1, 1, 0, NULL, {0}};
    return TRY("cuMemCreate", (ptr *, size_t, const void *, uint64_t), &of->name, piece, &made, (uint64_t)0);
}
static void releases(memory of) { CALL("cuMemRelease", (ptr), of.name); }

/* Mapped without a handle, and told twice of. */
static int mapped(memory *of) {
    int code = physical(of);
    if (code) return code;
    ptr again, shared = 0;
    CALL("cuMemAddressReserve", (ptr *, size_t, size_t, ptr, uint64_t), &of->at, piece, 0, 0, 0);
    CALL("cuMemMap", (ptr, size_t, size_t, ptr, uint64_t), of->at, piece, 0, of->name, 0);
    CALL("cuMemRelease", (ptr), of->name);
    CALL("cuMemRetainAllocationHandle", (ptr *, void *), &again, (void *)of->at);
    /* What is imported is there already. */
    CALL("cuMemExportToShareableHandle", (ptr *, ptr, int, uint64_t), &shared, again, 1, 0);
    CALL("cuMemImportFromShareableHandle", (ptr *, void *, int), &of->name, (void *)(uintptr_t)(int)shared, 1);
    close((int)shared);
    CALL("cuMemRelease", (ptr), of->name);
    CALL("cuMemRelease", (ptr), again);
    return 0;
}
static void unmaps(memory of) {
    CALL("cuMemUnmap", (ptr, size_t), of.at, piece);
    CALL("cuMemAddressFree", (ptr, size_t), of.at, piece);
}

struct shape {
    size_t sides[3];
    unsigned format, channels, flags, end;
};

static int flat(memory *of) {
    struct shape as = {{2048, 1024, 0}, 0x20, 1, 0, 0};
    struct {
        size_t sides[2];
        unsigned format, channels;
    } two = {{as.sides[0], as.sides[1]}, as.format, as.channels};
    return TRY("cuArrayCreate_v2", (ptr *, const void *), &of->name, &two);
}
static int layers(memory *of) {
    struct shape as = {{1024, 1024, 2}, 1, 4, 1, 0}, sparse = {{1024, 1024, 2}, 1, 4, 0x41, 0};
    ptr none;
    CALL("cuArray3DCreate_v2", (ptr *, const void *), &none, &sparse);
    CALL("cuArrayDestroy", (ptr), none);
    return TRY("cuArray3DCreate_v2", (ptr *, const void *), &of->name, &as);
}
static void ends_array(memory of) { CALL("cuArrayDestroy", (ptr), of.name); }
static int mipmaps(memory *of) {
    struct shape as = {{1024, 1024, 6}, 1, 1, 5, 0};
    return TRY("cuMipmappedArrayCreate", (ptr *, const void *, unsigned), &of->name, &as, 30);
}
static void ends_mipmaps(memory of) { CALL("cuMipmappedArrayDestroy", (ptr), of.name); }

static const struct {
    const char *name;
    int (*allocate)(memory *);
    void (*end)(memory);
} ways[] = {
    {"device", of_device, frees},
    {"freed in order", of_device, frees_in_order},
    {"in order", in_order, frees_in_order},
    {"in the thread's order", in_thread_order, frees},
    {"of a pool", of_pool, ends_pool},
    /* The pool keeps the device's memory from here on, until another needs it. */
    {"kept", kept, frees_in_order},
    {"physical", physical, releases},
    {"mapped", mapped, unmaps},
    {"array", flat, ends_array},
    {"layers", layers, ends_array},
    {"mipmaps", mipmaps, ends_mipmaps},
};
enum { WAYS = sizeof ways / sizeof *ways };

/* Threads get what others freed. */
static void *works(void *argument) {
    CALL("cuCtxSetCurrent", (void *), context);
    for (size_t turn = 0; turn < 200; turn++) {
        size_t way = (turn + (size_t)argument) % WAYS;
        memory of;
        /* There is one pool for all. */
        if (ways[way].end != ends_pool && !ways[way].allocate(&of)) ways[way].end(of);
    }
    return NULL;
}

int main(int count, char **arguments) {
    memory of[MOST];
    begin();
    CALL("cuStreamCreate", (void **, unsigned), &stream, 0);
    if (count > 1 && !strcmp(arguments[1], "pools")) return several_pools(), 0;
    for (size_t way = 0; way < WAYS; way++) {
        if (count > 1 && strcmp(arguments[1], ways[way].name)) continue;
        for (int turn = 0; turn < 2; turn++) {
            int made = 0, code = 0;
            while (made < MOST && !(code = ways[way].allocate(&of[made]))) made++;
            printf("%s: %d, then %d, left %zu", ways[way].name, made, code, left());
            for (int at = 0; at < made; at++) ways[way].end(of[at]);
            printf(", freed %zu\n", left());
        }
    }
    pthread_t threads[4];
    for (size_t at = 0; at < 4; at++) pthread_create(&threads[at], NULL, works, (void *)at);
    for (size_t at = 0; at < 4; at++) pthread_join(threads[at], NULL);
    CALL("cuDeviceGetDefaultMemPool", (void **, int), &pool, 0);
    CALL("cuMemPoolTrimTo", (void *, size_t), pool, 0);
    printf("threads, left %zu\n", left());
    return 0;
}
