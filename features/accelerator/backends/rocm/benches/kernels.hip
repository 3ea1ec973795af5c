// The kernels of `hip.rs` as one writes them in HIP: no header of it is needed, whose words stand here.
#define __global__ __attribute__((global))
#define __device__ __attribute__((device)) static inline
#define __shared__ __attribute__((shared))

typedef float float4 __attribute__((ext_vector_type(4)));
typedef long long i64;

__device__ int thread_x() { return __builtin_amdgcn_workitem_id_x(); }
__device__ int thread_y() { return __builtin_amdgcn_workitem_id_y(); }
__device__ int block_x() { return __builtin_amdgcn_workgroup_id_x(); }
__device__ int block_y() { return __builtin_amdgcn_workgroup_id_y(); }
__device__ void sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// As `__shfl_xor` of HIP's headers does.
__device__ float shuffle_xor(float value, int mask) {
    int lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
    int got = __builtin_amdgcn_ds_bpermute((lane ^ mask) << 2, __builtin_bit_cast(int, value));
    return __builtin_bit_cast(float, got);
}
__device__ float warp_sum(float value) {
    for (int mask = 16; mask > 0; mask >>= 1) value += shuffle_xor(value, mask);
    return value;
}
__device__ float warp_max(float value) {
    for (int mask = 16; mask > 0; mask >>= 1) value = __builtin_fmaxf(value, shuffle_xor(value, mask));
    return value;
}

#if defined(SILU)
extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(128, 128)))
void silu(const float *x, i64 nx, float *y, i64 ny) {
    i64 i = 4 * (block_x() * 128ll + thread_x()), n = nx < ny ? nx : ny;
    if (i + 4 <= n) {
        float4 v = __builtin_nontemporal_load((const float4 *)(x + i));
        __builtin_nontemporal_store(v / (1.0f + __builtin_elementwise_exp(-v)), (float4 *)(y + i));
    } else {
        for (i64 j = i; j < n; j++) y[j] = x[j] / (1.0f + __builtin_elementwise_exp(-x[j]));
    }
}
#elif defined(SOFTMAX)
extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(256, 256)))
void softmax(const float *x, i64 n, i64 x_stride, float *y, i64 y_stride) {
    __shared__ float maxima[8], sums[8];
    const float *row = x + block_x() * x_stride;
    float *out = y + block_x() * y_stride;
    int t = thread_x(), lane = t & 31, warp = t >> 5;
    float most = -3.4028235e38f, sum = 0.0f;
#pragma unroll 4
    for (i64 j = t; j < n; j += 256) {
        float v = row[j], e = __builtin_elementwise_exp(-__builtin_fabsf(most - v));
        sum = v > most ? __builtin_fmaf(sum, e, 1.0f) : sum + e;
        most = __builtin_fmaxf(most, v);
    }
    float of_warp = warp_max(most);
    if (lane == 0) maxima[warp] = of_warp;
    sync();
    float all = warp_max(lane < 8 ? maxima[lane] : -__builtin_inff());
    float part = warp_sum(sum * __builtin_elementwise_exp(most - all));
    if (lane == 0) sums[warp] = part;
    sync();
    float factor = 1.0f / warp_sum(lane < 8 ? sums[lane] : 0.0f);
#pragma unroll 4
    for (i64 j = t; j < n; j += 256) out[j] = __builtin_elementwise_exp(row[j] - all) * factor;
}
#elif defined(RMSNORM)
extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(256, 256)))
void rmsnorm(const float *x, i64 n, i64 x_stride, const float *w, float *y, i64 y_stride, float epsilon) {
    __shared__ float sums[8];
    const float *row = x + block_x() * x_stride;
    float *out = y + block_x() * y_stride;
    int t = thread_x(), lane = t & 31, warp = t >> 5;
    float4 squares = 0.0f;
#pragma unroll 2
    for (i64 j = 4 * t; j < n; j += 1024) {
        float4 v = *(const float4 *)(row + j);
        squares = __builtin_elementwise_fma(v, v, squares);
    }
    float sum = warp_sum((squares.x + squares.y) + (squares.z + squares.w));
    if (lane == 0) sums[warp] = sum;
    sync();
    float factor = __builtin_amdgcn_rsqf(warp_sum(lane < 8 ? sums[lane] : 0.0f) / (float)n + epsilon);
#pragma unroll 2
    for (i64 j = 4 * t; j < n; j += 1024) {
        *(float4 *)(out + j) = *(const float4 *)(row + j) * factor * *(const float4 *)(w + j);
    }
}
#elif defined(MATMUL)
extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(256, 256)))
void matmul(const float *a, i64 m, i64 k, i64 a_stride, const float *b, i64 n, i64 b_stride, float *c, i64 c_stride) {
    __shared__ float tile_a[16][17], tile_b[16][17];
    int x = thread_x(), y = thread_y();
    i64 column = block_x() * 16ll + x, row = block_y() * 16ll + y;
    float sum = 0.0f;
    for (i64 at = 0; at < k; at += 16) {
        tile_a[y][x] = row < m && at + x < k ? a[row * a_stride + at + x] : 0.0f;
        tile_b[y][x] = at + y < k && column < n ? b[(at + y) * b_stride + column] : 0.0f;
        sync();
#pragma unroll
        for (int i = 0; i < 16; i++) sum = __builtin_fmaf(tile_a[y][i], tile_b[i][x], sum);
        sync();
    }
    if (row < m && column < n) c[row * c_stride + column] = sum;
}
#endif
