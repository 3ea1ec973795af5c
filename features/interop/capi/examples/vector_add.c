/* y = a x + y by a kernel in the text of the IR, on the device that is named, or the first. Prints "ok".
 *
 *   cc -std=c11 vector_add.c $(pkg-config --cflags --libs vmkernels) && ./a.out cpu
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vmaccel.h>

#define CHECK(call)                                                \
    do {                                                           \
        if ((call) != VMA_SUCCESS) {                               \
            fprintf(stderr, "%s\n", vma_last_error());             \
            exit(1);                                               \
        }                                                          \
    } while (0)

enum { COUNT = 1000, BLOCK = 256 };
static const uint64_t TEN_SECONDS = 10000000000u;

static const char source[] =
    "vir 1\n"
    "kernel @axpy(@x: view<f32, [n], read>, @y: view<f32, [n], readwrite>, %a: f32) at 0x1000 block(256) {\n"
    "  %i = global_id.x : i64\n"
    "  %n = extent @x, 0 : i64\n"
    "  %in = lt.s %i, %n : bool\n"
    "  if %in {\n"
    "    %x = load @x[%i] : f32\n"
    "    %y = load @y[%i] : f32\n"
    "    %ax = mul %a, %x : f32\n"
    "    %sum = add %ax, %y : f32\n"
    "    store @y[%i], %sum\n"
    "  }\n"
    "}\n";

int main(int count, char **arguments) {
    vma_device device;
    vma_worker worker;
    CHECK(vma_device_open(count > 1 ? arguments[1] : "auto", &device));
    CHECK(vma_worker_start(device, NULL, &worker));

    vma_module module;
    vma_kernel axpy;
    CHECK(vma_module_load(worker, source, strlen(source), &module));
    CHECK(vma_module_find_kernel(module, "axpy", &axpy));

    static float x[COUNT], y[COUNT];
    for (int at = 0; at < COUNT; at++) x[at] = (float)at, y[at] = 1;
    vma_memory on_device[2];
    for (int at = 0; at < 2; at++) CHECK(vma_memory_allocate(worker, VMA_DEVICE_MEMORY, sizeof x, &on_device[at]));
    CHECK(vma_write(on_device[0], 0, x, sizeof x));
    CHECK(vma_write(on_device[1], 0, y, sizeof y));

    const float a = 0.5f;
    vma_argument given[3] = {
        {.kind = VMA_VIEW, .type = VMA_F32, .memory = on_device[0]},
        {.kind = VMA_VIEW, .type = VMA_F32, .memory = on_device[1]},
        {.kind = VMA_SCALAR, .type = VMA_F32},
    };
    memcpy(&given[2].bits, &a, sizeof a);
    vma_event before, after;
    CHECK(vma_event_record(worker, &before));
    CHECK(vma_launch(axpy, (COUNT + BLOCK - 1) / BLOCK, 1, 1, given, 3, NULL));
    CHECK(vma_event_record(worker, &after));
    CHECK(vma_read(on_device[1], 0, y, sizeof y));
    for (int at = 0; at < COUNT; at++)
        if (y[at] != a * (float)at + 1) return fprintf(stderr, "%d: %g\n", at, y[at]), 1;

    uint64_t time;
    CHECK(vma_event_synchronize(after, TEN_SECONDS));
    CHECK(vma_event_elapsed(before, after, &time));

    /* A view that does not lie in its memory is refused. */
    given[0].rank = 1;
    given[0].extents[0] = COUNT + 1;
    if (vma_launch(axpy, 4, 1, 1, given, 3, NULL) != VMA_INVALID_VALUE) return fputs("not refused\n", stderr), 1;

    CHECK(vma_event_free(before));
    CHECK(vma_event_free(after));
    for (int at = 0; at < 2; at++) CHECK(vma_memory_free(on_device[at]));
    CHECK(vma_module_free(module));
    CHECK(vma_worker_free(worker));
    CHECK(vma_device_close(device));
    uint64_t left;
    CHECK(vma_handle_count(&left));
    if (left != 0) return fprintf(stderr, "%llu handles are left\n", (unsigned long long)left), 1;
    puts("ok");
    return 0;
}
