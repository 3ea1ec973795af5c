/* Lists the devices that run kernels, on the standard error, and opens each by its address or kind. Prints "ok".
 *
 *   cc -std=c11 devices.c $(pkg-config --cflags --libs vmkernels)
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <vmaccel.h>

#define CHECK(call)                                                \
    do {                                                           \
        if ((call) != VMA_SUCCESS) {                               \
            fprintf(stderr, "%s\n", vma_last_error());             \
            exit(1);                                               \
        }                                                          \
    } while (0)

int main(void) {
    if (vma_version() != VMA_VERSION) return fputs("the library has another version than the header\n", stderr), 1;
    uint32_t count;
    CHECK(vma_device_count(&count));
    for (uint32_t at = 0; at < count; at++) {
        vma_device device, same;
        vma_device_info info;
        CHECK(vma_device_at(at, &device));
        CHECK(vma_device_get_info(device, &info));
        fprintf(stderr, "%s: %s (%s, %s), %u units, %.1f GiB\n", info.address[0] ? info.address : info.backend, info.name,
                info.target, info.driver, (unsigned)info.compute_units, (double)info.memory_bytes / (1u << 30));
        CHECK(vma_device_open(info.address[0] ? info.address : info.backend, &same));
        CHECK(vma_device_close(same));
        CHECK(vma_device_close(device));
    }
    puts("ok");
    return 0;
}
