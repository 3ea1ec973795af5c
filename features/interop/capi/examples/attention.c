/* Products and attention by libvmkernels on the CPU, from several threads. Prints "ok".
 *
 *   cc -std=c11 attention.c $(pkg-config --cflags --libs vmkernels) -lpthread -lm
 */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vmkernels.h>

#define CHECK(call)                                                           \
    do {                                                                      \
        if ((call) != VMK_SUCCESS) {                                          \
            fprintf(stderr, "%s: %s\n", #call, vmk_last_error());             \
            exit(1);                                                          \
        }                                                                     \
    } while (0)

static void same(const char *what, double found, double expected, double tolerance) {
    if (!(fabs(found - expected) <= tolerance)) {
        fprintf(stderr, "%s: %g, not %g\n", what, found, expected);
        exit(1);
    }
}

enum { M = 67, N = 45, K = 33 };

static void *multiply(void *seed) {
    unsigned state = *(unsigned *)seed;
    float a[M * K], b[K * N], c[M * N];
    for (int turn = 0; turn < 20; turn++) {
        for (int at = 0; at < M * K; at++) a[at] = (float)((state = state * 1103515245 + 12345) >> 20) / 4096 - 0.5f;
        for (int at = 0; at < K * N; at++) b[at] = (float)((state = state * 1103515245 + 12345) >> 20) / 4096 - 0.5f;
        for (int at = 0; at < M * N; at++) c[at] = (float)at;
        CHECK(cuda_gemm(a, b, c, M, N, K, 2.0f, 0.5f, NULL));
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) {
                double sum = 0;
                for (int k = 0; k < K; k++) sum += (double)a[i * K + k] * b[k * N + j];
                same("gemm", c[i * N + j], 2 * sum + 0.5 * (i * N + j), 1e-2);
            }
    }
    return NULL;
}

/* Multi-query attention of two tokens and one head, of one element. */
static void attend(void) {
    const float q[2] = {1, 2}, k[2] = {1, 0}, v[2] = {10, 20};
    const float mask[4] = {0, -INFINITY, 0, 0};
    float output[2];
    CHECK(cuda_mqa_attention(q, k, v, output, mask, 1, 2, 1, 1, 1.0f, NULL));
    same("masked", output[0], 10, 1e-4);
    same("not masked", output[1], (10 * exp(2) + 20) / (exp(2) + 1), 1e-3);
    CHECK(cuda_flash_attention(q, k, v, output, 1, 2, 1, 1, 1.0f, 1, NULL));
    same("causal", output[0], 10, 1e-4);
}

int main(void) {
    if (vmk_version() != VMK_VERSION) {
        fprintf(stderr, "header %d, library %d\n", VMK_VERSION, (int)vmk_version());
        return 1;
    }
    CHECK(vmk_use(VMK_CPU));
    pthread_t threads[4];
    unsigned seeds[4] = {1, 2, 3, 4};
    for (int at = 0; at < 4; at++) pthread_create(&threads[at], NULL, multiply, &seeds[at]);
    for (int at = 0; at < 4; at++) pthread_join(threads[at], NULL);
    attend();
    if (cuda_gemm(NULL, NULL, NULL, 1, 1, 1, 1, 0, NULL) != VMK_INVALID_VALUE || !strstr(vmk_last_error(), "A is NULL")) {
        fprintf(stderr, "NULL: %s\n", vmk_last_error());
        return 1;
    }
    puts("ok");
    return 0;
}
