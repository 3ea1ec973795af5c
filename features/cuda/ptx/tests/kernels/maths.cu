// Mathematical functions with their slow paths, halves, and the intrinsics.
#include <assert.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>

extern "C" __global__ void functions(const float *x, float *out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float v = x[i];
  float *o = out + i * 16;
  o[0] = expf(v); o[1] = logf(fabsf(v)); o[2] = sinf(v); o[3] = cosf(v); o[4] = tanhf(v); o[5] = powf(fabsf(v), 1.7f);
  o[6] = sqrtf(fabsf(v)); o[7] = rsqrtf(fabsf(v)); o[8] = erff(v); o[9] = v / 3.7f; o[10] = atanf(v); o[11] = floorf(v);
  o[12] = rintf(v); o[13] = fmodf(v, 2.5f); o[14] = cbrtf(v); o[15] = log1pf(fabsf(v));
}

extern "C" __global__ void doubles(const double *x, double *out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  double v = x[i];
  double *o = out + i * 8;
  o[0] = exp(v); o[1] = log(fabs(v)); o[2] = sin(v); o[3] = cos(v); o[4] = tanh(v); o[5] = pow(fabs(v), 1.7);
  o[6] = rsqrt(fabs(v)); o[7] = v / 3.7;
}

extern "C" __global__ void fast(const float *x, float *out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float v = x[i];
  float *o = out + i * 8;
  o[0] = __expf(v); o[1] = __logf(fabsf(v)); o[2] = __sinf(v); o[3] = __cosf(v); o[4] = __fdividef(v, 3.0f);
  o[5] = __saturatef(v); o[6] = __fmaf_rz(v, 1.1f, 0.3f); o[7] = __fadd_rd(v, 1e-9f);
}

extern "C" __global__ void halves(const __half2 *a, const __half2 *b, __half2 *c, __half *sums, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  __half2 v = __hfma2(a[i], b[i], __float2half2_rn(0.5f));
  v = __hadd2(v, __hmul2(a[i], a[i]));
  c[i] = __hmax2(v, __hneg2(b[i]));
  sums[i] = __hadd(__low2half(v), __high2half(v)) > __float2half(1.0f) ? __float2half(2.0f) : __hdiv(__low2half(v), __float2half(3.0f));
}

extern "C" __global__ void brains(const __nv_bfloat16 *a, float *out, __nv_bfloat162 *pairs, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = __bfloat162float(a[i]) * 1.5f;
  pairs[i] = __floats2bfloat162_rn(out[i], -out[i]);
}

extern "C" __global__ void integers(const int *a, const int *b, int *out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int x = a[i], y = b[i];
  unsigned ux = x, uy = y;
  int *o = out + i * 16;
  o[0] = __mulhi(x, y); o[1] = __umulhi(ux, uy); o[2] = __byte_perm(x, y, 0x3715); o[3] = __byte_perm(x, y, y);
  o[4] = __funnelshift_l(x, y, y); o[5] = __funnelshift_r(x, y, 7); o[6] = max(x, y) - min(ux, uy); o[7] = abs(x);
  o[8] = __sad(x, y, 3); o[9] = (x & y) ^ (~x | (y << 3)); o[10] = __dp4a(x, y, 5); o[11] = ux / (uy | 1);
  o[12] = x >> (y & 31); o[13] = (int)(((long long)x * y) >> 13); o[14] = __mul24(x, y);
  unsigned long long w = (unsigned long long)ux << 32 | uy;
  o[15] = __clzll(w) + __popcll(w) * 100 + __ffsll(w);
}

extern "C" __global__ void half_sums(const __half *in, __half *out, __half2 *pairs, __nv_bfloat162 *brains) {
  __half v = in[threadIdx.x];
  atomicAdd(&out[threadIdx.x & 1], v);
  atomicAdd(pairs, __halves2half2(v, __float2half(1.0f)));
  atomicAdd(brains, __floats2bfloat162_rn(2.0f, -1.0f));
}

// Copies without a register between.
extern "C" __global__ void copies(const int4 *in, int4 *out) {
  __shared__ int4 tile[64];
  unsigned to = (unsigned)__cvta_generic_to_shared(&tile[threadIdx.x]);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(in + threadIdx.x));
  asm volatile("cp.async.commit_group;");
  asm volatile("cp.async.wait_group 0;");
  __syncthreads();
  out[threadIdx.x] = tile[63 - threadIdx.x];
}

// Reductions of parts of warps by an instruction, and assertions.
extern "C" __global__ void parts(const int *in, int *out) {
  unsigned lane = threadIdx.x & 31, mask = 0xffu << (lane & 24);
  int v = in[threadIdx.x];
  assert(v < 1000);
  out[threadIdx.x] = __reduce_max_sync(mask, v) * 1000 + __reduce_add_sync(mask, v);
  if (v == -77) __trap();
}
