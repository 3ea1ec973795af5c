/* Managed memory: what the program and the device write, and what is known of it. `allocate` prints the device's attributes of managed memory and the result
 * of an allocation, `variable` the result of a query for a managed variable. */
#define ON_FAILURE exit(1)
#include <stdlib.h>
#include <string.h>
#include "../../../hook/preload/tests/driver.h"

typedef struct { int kind, id; } location;

static unsigned attribute(ptr at, int which) {
    uint64_t value[2] = {0};
    int code = TRY("cuPointerGetAttribute", (void *, int, ptr), value, which, at);
    return code ? 1000u + code : (unsigned)value[0];
}

static int range(ptr at, size_t len, int which) {
    int value = 77;
    int code = TRY("cuMemRangeGetAttribute", (void *, size_t, int, ptr, size_t), &value, 4, which, at, len);
    return code ? 1000 + code : value;
}

int main(int count, char **arguments) {
    enum { LEN = 3 << 12 };
    ptr made = 0;
    (void)mib;
    begin();
    if (count > 1 && !strcmp(arguments[1], "allocate")) {
        int has = 7, concurrent = 7;
        CALL("cuDeviceGetAttribute", (int *, int, int), &has, 83, 0);
        CALL("cuDeviceGetAttribute", (int *, int, int), &concurrent, 89, 0);
        printf("%d %d: %d\n", has, concurrent, TRY("cuMemAllocManaged", (ptr *, size_t, unsigned), &made, LEN, 1));
        return 0;
    }
    if (count > 1 && !strcmp(arguments[1], "variable")) {
        const char *text = ".version 8.0\n.target sm_75\n.address_size 64\n.visible .global .align 4 .u32 plain = 3;\n"
                           ".visible .global .attribute(.managed) .align 4 .u32 counter = 40;\n";
        void *module;
        size_t len;
        CALL("cuModuleLoadData", (void **, const void *), &module, text);
        printf("plain: %d", TRY("cuModuleGetGlobal_v2", (ptr *, size_t *, void *, const char *), &made, &len, module, "plain"));
        printf(", managed: %d\n", TRY("cuModuleGetGlobal_v2", (ptr *, size_t *, void *, const char *), &made, &len, module, "counter"));
        return 0;
    }
    CALL("cuMemAllocManaged", (ptr *, size_t, unsigned), &made, LEN, 1);
    uint32_t *here = (uint32_t *)made;
    ptr device = allocate(LEN);
    void *stream;
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);

    int whole = 1;
    for (size_t i = 0; i < LEN / 4; i++) whole &= here[i] == 0;
    for (size_t i = 0; i < LEN / 4; i++) here[i] = i;
    CALL("cuMemcpyDtoD_v2", (ptr, ptr, size_t), device, made, LEN);
    CALL("cuMemsetD32Async", (ptr, unsigned, size_t, void *), made + 4, 5, 2, stream);
    CALL("cuStreamSynchronize", (void *), stream);
    printf("zeros: %d, filled: %u %u %u %u, copied: %u\n", whole, here[0], here[1], here[2], here[3], word(device + 4 * 100));
    memset(here, 0, LEN);
    CALL("cuMemcpy", (ptr, ptr, size_t), made, device, LEN);
    CALL("cuMemcpyAsync", (ptr, ptr, size_t, void *), made + 4096, made, 4096, stream);
    CALL("cuStreamSynchronize", (void *), stream);
    printf("back: %u %u\n", here[1000], here[1030]);
    uint32_t own[2] = {8, 9};
    CALL("cuMemcpyHtoD_v2", (ptr, const void *, size_t), made, own, sizeof own);
    CALL("cuMemcpyDtoH_v2", (void *, ptr, size_t), own, made + 4, 4);
    printf("own: %u %u %u\n", here[0], here[1], own[0]);

    /* The type, both pointers, managed, the device, where it begins, how long it is, whether operations are synchronous. */
    ptr inside = made + 4100, first = 0;
    size_t len = 0;
    printf("type %u, managed %u, device %u, synchronous %u, tokens %u, mapped %u\n", attribute(inside, 2), attribute(inside, 8), attribute(inside, 9),
           attribute(inside, 6), attribute(inside, 5), attribute(inside, 13));
    printf("pointers: %d %d %d\n", attribute(inside, 3) == (unsigned)inside, attribute(inside, 4) == (unsigned)inside, attribute(inside, 11) == (unsigned)made);
    CALL("cuMemGetAddressRange_v2", (ptr *, size_t *, ptr), &first, &len, inside);
    printf("range: %d %zu %u\n", first == made, len, attribute(inside, 12));

    /* Hints: read mostly, the preferred place, who accesses it, where it went. */
    printf("before: %d %d %d\n", range(made, LEN, 1), range(made, LEN, 2), range(made, LEN, 4));
    printf("advised: %d", TRY("cuMemAdvise", (ptr, size_t, int, int), made, 4096, 1, 0));
    printf(" %d", TRY("cuMemAdvise", (ptr, size_t, int, int), made, LEN, 3, 0));
    printf(" %d", TRY("cuMemAdvise", (ptr, size_t, int, int), made, LEN, 5, -1));
    printf(" %d", TRY("cuMemAdvise", (ptr, size_t, int, int), made, LEN, 9, 0));
    printf(" %d", TRY("cuMemAdvise", (ptr, size_t, int, int), made, LEN, 3, 999));
    printf(" %d", TRY("cuMemAdvise", (ptr, size_t, int, int), made, LEN + 1, 3, 0));
    printf(" %d\n", TRY("cuMemAdvise", (ptr, size_t, int, int), device, LEN, 3, 0));
    printf("prefetched: %d", TRY("cuMemPrefetchAsync", (ptr, size_t, int, void *), made, LEN, 0, stream));
    printf(" %d", TRY("cuMemPrefetchAsync_v2", (ptr, size_t, location, unsigned, void *), made, 4096, ((location){2, 0}), 0, stream));
    printf(" %d", TRY("cuMemPrefetchAsync_v2", (ptr, size_t, location, unsigned, void *), made, 4096, ((location){9, 0}), 0, stream));
    printf(" %d\n", TRY("cuMemPrefetchAsync", (ptr, size_t, int, void *), device, LEN, 0, stream));
    CALL("cuStreamSynchronize", (void *), stream);
    printf("hints: %d %d %d %d %d %d\n", range(made, 4096, 1), range(made, LEN, 1), range(made, LEN, 2), range(made, 4096, 4), range(made + 4096, 4096, 4),
           range(made, LEN, 4));
    int by[3] = {0}, mostly = 7;
    void *places[] = {&mostly, by};
    size_t sizes[] = {4, sizeof by};
    int which[] = {1, 3};
    CALL("cuMemRangeGetAttributes", (void **, size_t *, int *, size_t, ptr, size_t), places, sizes, which, 2, made, 4096);
    printf("several: %d, %d %d %d\n", mostly, by[0], by[1], by[2]);
    printf("attached: %d", TRY("cuStreamAttachMemAsync", (void *, ptr, size_t, unsigned), stream, made, 0, 4));
    printf(" %d", TRY("cuStreamAttachMemAsync", (void *, ptr, size_t, unsigned), stream, made, 0, 3));
    printf(" %d\n", TRY("cuStreamAttachMemAsync", (void *, ptr, size_t, unsigned), stream, device, 0, 1));

    printf("refused: %d", TRY("cuMemAllocManaged", (ptr *, size_t, unsigned), &first, LEN, 0));
    printf(" %d", TRY("cuMemAllocManaged", (ptr *, size_t, unsigned), &first, 0, 1));
    printf(" %d", TRY("cuMemFreeHost", (ptr), made));
    int code = TRY("cuMemHostGetFlags", (unsigned *, ptr), (unsigned *)own, made);
    printf(" %d (%u)", code, own[0]);
    printf(" %d\n", TRY("cuMemFree_v2", (ptr), made + 4096));
    CALL("cuMemFree_v2", (ptr), made);
    printf("freed: %d, then %d\n", TRY("cuMemFree_v2", (ptr), made), attribute(made, 8) == 1);
    return 0;
}
