/* All attributes of all devices, and of addresses of all kinds; or, by their names, what functions say that are given nothing. */
#define ON_FAILURE exit(1)
#include <stdlib.h>
#include <string.h>
#include "../../../hook/preload/tests/driver.h"

enum { IS_MANAGED = 8, DEVICE_POINTER = 3 };

int main(int count, char **argument) {
    begin();
    for (int i = 1; i < count; i++) {
        int (*function)() = (int (*)())find(argument[i]);
        printf("%s: %d\n", argument[i], function(0l, 0l, 0l, 0l, 0l, 0l, 0l, 0l, 0l));
    }
    if (count > 1) return 0;
    int devices = 0, value;
    CALL("cuDeviceGetCount", (int *), &devices);
    for (int device = 0; device < devices; device++) {
        for (int attribute = 1; attribute <= 160; attribute++) {
            CALL("cuDeviceGetAttribute", (int *, int, int), &value, attribute, device);
            printf("%d %d %d\n", device, attribute, value);
        }
    }
    void *host, *own = malloc(mib);
    ptr reserved = 0, pooled = 0;
    CALL("cuMemHostAlloc", (void **, size_t, unsigned), &host, mib, 0);
    CALL("cuMemHostRegister_v2", (void *, size_t, unsigned), own, mib, 0);
    CALL("cuMemAllocAsync", (ptr *, size_t, void *), &pooled, mib, NULL);
    CALL("cuMemAddressReserve", (ptr *, size_t, size_t, ptr, uint64_t), &reserved, 2 * mib, 0, 0, 0);
    ptr all[] = {allocate(mib), pooled, (ptr)host, (ptr)own, reserved};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        int one = 7, both = 7, attribute = IS_MANAGED;
        void *place = &both;
        int code = TRY("cuPointerGetAttribute", (int *, int, ptr), &one, IS_MANAGED, all[i]);
        CALL("cuPointerGetAttributes", (unsigned, int *, void **, ptr), 1, &attribute, &place, all[i]);
        printf("managed: %zu %d %d %d\n", i, code, code ? 0 : one, both);
    }
    /* Kernels are launched with so many parameters that nobody should wait for each. */
    ptr one = all[0], reached = 0;
    for (int i = 0; i < 1000; i++) CALL("cuPointerGetAttribute", (void *, int, ptr), &reached, DEVICE_POINTER, one + 64 * i);
    printf("reached: %d, behind it: %d", reached == one + 64 * 999, TRY("cuPointerGetAttribute", (void *, int, ptr), &reached, DEVICE_POINTER, one + 16 * mib));
    CALL("cuMemFree_v2", (ptr), one);
    printf(", freed: %d\n", TRY("cuPointerGetAttribute", (void *, int, ptr), &reached, DEVICE_POINTER, one));
    return 0;
}
