/* A small model of the Llama family, with random weights, reads a prompt and writes tokens: embedding, two blocks (RMSNorm, attention with
 * rotary positions, SwiGLU), logits, top-p sampling. Checks the logits against plain loops. Prints "ok".
 *
 *   cc -std=c11 decode.c $(pkg-config --cflags --libs vmkernels) -lm -ldl && ./a.out
 *
 * Runs on the GPU if there is one: memory is then CUDA's managed, which both reach, and the host waits before it reads.
 * VMK_DEVICE=cpu keeps it on the CPU.
 */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vmkernels.h>

enum { LAYERS = 2, DIM = 64, HEADS = 4, HEAD = DIM / HEADS, HIDDEN = 160, VOCABULARY = 300, PROMPT = 5, TOKENS = 20 };

static void fail(const char *what, const char *why) {
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

#define CHECK(call) ((call) == VMK_SUCCESS ? (void)0 : fail(#call, vmk_last_error()))

/* Memory and the end of what is queued: of the driver's library, loaded here so that the program also runs without one. */
static int (*managed)(unsigned long long *address, size_t bytes, unsigned flags);
static int (*synchronize)(void);

static void *driver(void *library, const char *name) {
    void *function = dlsym(library, name);
    if (!function) fail(name, "the CUDA driver does not have it");
    return function;
}

static void open_driver(void) {
    void *context, *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) fail("libcuda.so.1", dlerror());
    int (*init)(unsigned), (*retain)(void **, int), (*use)(void *);
    *(void **)&init = driver(library, "cuInit");
    *(void **)&retain = driver(library, "cuDevicePrimaryCtxRetain");
    *(void **)&use = driver(library, "cuCtxSetCurrent");
    *(void **)&managed = driver(library, "cuMemAllocManaged");
    *(void **)&synchronize = driver(library, "cuCtxSynchronize");
    if (init(0) || retain(&context, 0) || use(context)) fail("CUDA", "there is no context");
}

static void *memory(size_t bytes) {
    unsigned long long address;
    void *at = managed ? NULL : aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (managed && !managed(&address, bytes, 1)) memcpy(&at, &address, sizeof at);
    if (!at) fail("memory", "there is not enough");
    return memset(at, 0, bytes);
}

static void wait_for_results(void) {
    if (synchronize && synchronize()) fail("CUDA", "a kernel failed");
}

static float *random_numbers(size_t count, float scale, float middle) {
    static unsigned state = 1;
    float *numbers = memory(count * sizeof *numbers);
    for (size_t at = 0; at < count; at++)
        numbers[at] = middle + scale * ((float)((state = state * 1103515245 + 12345) >> 16) / 32768 - 1);
    return numbers;
}

/* Weights are [in, out]: a row of activations is multiplied from the left. */
struct layer { float *norm, *q, *k, *v, *o, *norm2, *gate, *up, *down; };
struct model { float *embedding, *norm, *output, *freqs; struct layer layers[LAYERS]; };
struct room { float *x, *y, *normed, *q, *k, *v, *mixed, *gate, *up, *hidden, *logits; };

static void multiply(const float *rows, const float *weight, float *to, int count, int in, int out) {
    CHECK(cuda_gemm(rows, weight, to, count, out, in, 1.0f, 0.0f, NULL));
}

/* The logits of each of so many tokens. */
static void forward(const struct model *model, struct room *room, const int *tokens, int count) {
    const float scale = 1.0f / sqrtf(HEAD);
    const int64_t all = (int64_t)count * DIM, wide = (int64_t)count * HIDDEN;
    struct room r = *room;
    for (int at = 0; at < count; at++)
        memcpy(r.x + at * DIM, model->embedding + tokens[at] * DIM, DIM * sizeof(float));
    for (int l = 0; l < LAYERS; l++) {
        const struct layer *w = &model->layers[l];
        CHECK(cuda_rmsnorm(r.x, w->norm, r.normed, count, DIM, 1e-5f, NULL));
        multiply(r.normed, w->q, r.q, count, DIM, DIM);
        multiply(r.normed, w->k, r.k, count, DIM, DIM);
        multiply(r.normed, w->v, r.v, count, DIM, DIM);
        CHECK(cuda_rope(r.q, r.k, model->freqs, 1, count, HEADS, HEAD, NULL));
        CHECK(cuda_flash_attention(r.q, r.k, r.v, r.mixed, 1, count, HEADS, HEAD, scale, 1, NULL));
        /* With beta 1 a product is added to what is there: the residual. */
        CHECK(cuda_gemm(r.mixed, w->o, r.x, count, DIM, DIM, 1.0f, 1.0f, NULL));
        CHECK(cuda_rmsnorm(r.x, w->norm2, r.normed, count, DIM, 1e-5f, NULL));
        multiply(r.normed, w->gate, r.gate, count, DIM, HIDDEN);
        multiply(r.normed, w->up, r.up, count, DIM, HIDDEN);
        CHECK(cuda_silu(r.gate, r.hidden, wide, NULL));
        CHECK(cuda_mul(r.hidden, r.up, r.gate, wide, NULL));
        multiply(r.gate, w->down, r.mixed, count, HIDDEN, DIM);
        /* What is written overlaps nothing that is read. */
        CHECK(cuda_add(r.x, r.mixed, r.y, all, NULL));
        float *other = r.x;
        r.x = r.y, r.y = other;
    }
    CHECK(cuda_rmsnorm(r.x, model->norm, r.normed, count, DIM, 1e-5f, NULL));
    multiply(r.normed, model->output, r.logits, count, DIM, VOCABULARY);
    wait_for_results();
}

static void plain_norm(const double *x, const float *weight, double *to) {
    double squares = 0;
    for (int i = 0; i < DIM; i++) squares += x[i] * x[i];
    for (int i = 0; i < DIM; i++) to[i] = x[i] / sqrt(squares / DIM + 1e-5) * weight[i];
}

static void plain_multiply(const double *x, const float *weight, double *to, int in, int out) {
    for (int j = 0; j < out; j++) {
        to[j] = 0;
        for (int i = 0; i < in; i++) to[j] += x[i] * weight[i * out + j];
    }
}

/* The same for a token at a time, with the keys and values of those before it. */
static void plain_forward(const struct model *model, const int *tokens, int count, double *logits) {
    static double keys[LAYERS][TOKENS][DIM], values[LAYERS][TOKENS][DIM];
    for (int t = 0; t < count; t++) {
        double x[DIM], n[DIM], q[DIM], mixed[DIM], more[DIM], gate[HIDDEN], up[HIDDEN];
        for (int i = 0; i < DIM; i++) x[i] = model->embedding[tokens[t] * DIM + i];
        for (int l = 0; l < LAYERS; l++) {
            const struct layer *w = &model->layers[l];
            plain_norm(x, w->norm, n);
            plain_multiply(n, w->q, q, DIM, DIM);
            plain_multiply(n, w->k, keys[l][t], DIM, DIM);
            plain_multiply(n, w->v, values[l][t], DIM, DIM);
            for (int i = 0; i < DIM; i++) {
                if (i % HEAD >= HEAD / 2) continue;
                double angle = t * (double)model->freqs[i % HEAD], turn[2] = {cos(angle), sin(angle)}, *both[2] = {q, keys[l][t]};
                for (int b = 0; b < 2; b++) {
                    double first = both[b][i], second = both[b][i + HEAD / 2];
                    both[b][i] = first * turn[0] - second * turn[1];
                    both[b][i + HEAD / 2] = second * turn[0] + first * turn[1];
                }
            }
            memset(mixed, 0, sizeof mixed);
            for (int h = 0; h < DIM; h += HEAD) {
                double sum = 0;
                for (int s = 0; s <= t; s++) {
                    double score = 0;
                    for (int i = h; i < h + HEAD; i++) score += q[i] * keys[l][s][i];
                    score = exp(score / sqrt(HEAD)), sum += score;
                    for (int i = h; i < h + HEAD; i++) mixed[i] += score * values[l][s][i];
                }
                for (int i = h; i < h + HEAD; i++) mixed[i] /= sum;
            }
            plain_multiply(mixed, w->o, more, DIM, DIM);
            for (int i = 0; i < DIM; i++) x[i] += more[i];
            plain_norm(x, w->norm2, n);
            plain_multiply(n, w->gate, gate, DIM, HIDDEN);
            plain_multiply(n, w->up, up, DIM, HIDDEN);
            for (int i = 0; i < HIDDEN; i++) gate[i] *= up[i] / (1 + exp(-gate[i]));
            plain_multiply(gate, w->down, more, HIDDEN, DIM);
            for (int i = 0; i < DIM; i++) x[i] += more[i];
        }
        plain_norm(x, model->norm, n);
        plain_multiply(n, model->output, logits + t * VOCABULARY, DIM, VOCABULARY);
    }
}

int main(void) {
    if (vmk_device_in_use() == VMK_GPU) open_driver();
    const float deep = 1 / sqrtf(DIM), wide = 1 / sqrtf(HIDDEN), p = 0.9f, temperature = 0.8f;
    struct model model = {random_numbers(VOCABULARY * DIM, 1, 0), random_numbers(DIM, 0.1f, 1),
                          random_numbers(DIM * VOCABULARY, 3 * deep, 0), memory(HEAD / 2 * sizeof(float)), {{0}}};
    for (int i = 0; i < HEAD / 2; i++) model.freqs[i] = powf(10000, -2.0f * i / HEAD);
    for (int l = 0; l < LAYERS; l++) {
        struct layer *w = &model.layers[l];
        w->norm = random_numbers(DIM, 0.1f, 1), w->norm2 = random_numbers(DIM, 0.1f, 1);
        float **square[] = {&w->q, &w->k, &w->v, &w->o};
        for (int i = 0; i < 4; i++) *square[i] = random_numbers(DIM * DIM, deep, 0);
        w->gate = random_numbers(DIM * HIDDEN, deep, 0), w->up = random_numbers(DIM * HIDDEN, deep, 0);
        w->down = random_numbers(HIDDEN * DIM, wide, 0);
    }
    struct room room;
    float **narrow[] = {&room.x, &room.y, &room.normed, &room.q, &room.k, &room.v, &room.mixed};
    for (int i = 0; i < 7; i++) *narrow[i] = memory(TOKENS * DIM * sizeof(float));
    float **hidden[] = {&room.gate, &room.up, &room.hidden};
    for (int i = 0; i < 3; i++) *hidden[i] = memory(TOKENS * HIDDEN * sizeof(float));
    room.logits = memory(TOKENS * VOCABULARY * sizeof(float));

    size_t bytes;
    CHECK(cuda_topp_sample_workspace_size(1, VOCABULARY, p, temperature, &bytes));
    void *workspace = memory(bytes + 16);
    int32_t *drawn = memory(sizeof *drawn);
    int64_t *seed = memory(sizeof *seed);
    int tokens[TOKENS] = {1, 20, 30, 4, 5};
    for (int count = PROMPT; count < TOKENS; count++) {
        forward(&model, &room, tokens, count);
        *seed = count;
        const float *last = room.logits + (count - 1) * VOCABULARY;
        CHECK(cuda_topp_sample_ws(last, drawn, seed, 1, VOCABULARY, p, temperature, workspace, bytes, NULL));
        wait_for_results();
        if (*drawn < 0 || *drawn >= VOCABULARY) fail("drawn", "no token");
        tokens[count] = *drawn;
    }

    static double wanted[TOKENS * VOCABULARY];
    forward(&model, &room, tokens, TOKENS);
    plain_forward(&model, tokens, TOKENS, wanted);
    double worst = 0;
    for (int at = 0; at < TOKENS * VOCABULARY; at++) worst = fmax(worst, fabs(room.logits[at] - wanted[at]));
    if (!(worst < 1e-3)) fail("logits", "they are not those of the plain loops");
    puts("ok");
    return 0;
}
