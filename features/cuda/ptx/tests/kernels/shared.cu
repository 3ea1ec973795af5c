// Kernels with shared memory, barriers, atomics and exchange within warps.
extern "C" __global__ void reduce(const float *in, float *out, int n) {
  __shared__ float part[256];
  int t = threadIdx.x;
  float sum = 0;
  for (int i = blockIdx.x * blockDim.x + t; i < n; i += blockDim.x * gridDim.x) sum += in[i];
  part[t] = sum;
  __syncthreads();
  for (int s = blockDim.x / 2; s > 0; s >>= 1) {
    if (t < s) part[t] += part[t + s];
    __syncthreads();
  }
  if (t == 0) out[blockIdx.x] = part[0];
}

// The last warp by shuffles, as CUDA's samples do it.
extern "C" __global__ void reduce_warps(const float *in, float *out, int n) {
  extern __shared__ float dynamic[];
  int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
  float v = i < n ? in[i] : 0;
  for (int o = 16; o > 0; o >>= 1) v += __shfl_down_sync(0xffffffff, v, o);
  if ((t & 31) == 0) dynamic[t / 32] = v;
  __syncthreads();
  if (t < 32) {
    v = t < blockDim.x / 32 ? dynamic[t] : 0;
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffff, v, o);
    if (t == 0) atomicAdd(out, v);
  }
}

#define TILE 16
extern "C" __global__ void matmul(const float *a, const float *b, float *c, int n) {
  __shared__ float as[TILE][TILE], bs[TILE][TILE];
  int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * TILE + y, column = blockIdx.x * TILE + x;
  float sum = 0;
  for (int k = 0; k < n; k += TILE) {
    as[y][x] = row < n && k + x < n ? a[row * n + k + x] : 0;
    bs[y][x] = column < n && k + y < n ? b[(k + y) * n + column] : 0;
    __syncthreads();
    for (int i = 0; i < TILE; i++) sum += as[y][i] * bs[i][x];
    __syncthreads();
  }
  if (row < n && column < n) c[row * n + column] = sum;
}

extern "C" __global__ void histogram(const unsigned char *in, unsigned *out, int n) {
  __shared__ unsigned bins[256];
  for (int i = threadIdx.x; i < 256; i += blockDim.x) bins[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&bins[in[i]], 1);
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += blockDim.x) atomicAdd(&out[i], bins[i]);
}

extern "C" __global__ void scan(const int *in, int *out) {
  __shared__ int sums[32];
  int t = threadIdx.x, lane = t & 31, warp = t >> 5, i = blockIdx.x * blockDim.x + t;
  int v = in[i];
  for (int o = 1; o < 32; o <<= 1) {
    int other = __shfl_up_sync(0xffffffff, v, o);
    if (lane >= o) v += other;
  }
  if (lane == 31) sums[warp] = v;
  __syncthreads();
  if (warp == 0) {
    int s = lane < blockDim.x / 32 ? sums[lane] : 0;
    for (int o = 1; o < 32; o <<= 1) {
      int other = __shfl_up_sync(0xffffffff, s, o);
      if (lane >= o) s += other;
    }
    sums[lane] = s;
  }
  __syncthreads();
  out[i] = v + (warp > 0 ? sums[warp - 1] : 0);
}

extern "C" __global__ void transpose(const float *in, float *out, int width, int height) {
  __shared__ float tile[16][17];
  int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
  if (x < width && y < height) tile[threadIdx.y][threadIdx.x] = in[y * width + x];
  __syncthreads();
  x = blockIdx.y * 16 + threadIdx.x;
  y = blockIdx.x * 16 + threadIdx.y;
  if (x < height && y < width) out[y * height + x] = tile[threadIdx.x][threadIdx.y];
}

extern "C" __global__ void votes(const int *in, unsigned *out) {
  int t = blockIdx.x * blockDim.x + threadIdx.x, v = in[t];
  unsigned even = __ballot_sync(0xffffffff, v % 2 == 0);
  int all = __all_sync(0xffffffff, v > -100), any = __any_sync(0xffffffff, v == 5);
  unsigned eights = __shfl_sync(0xffffffff, v, 3, 8) + __shfl_down_sync(0xffffffff, v, 2, 8);
  int threads = __syncthreads_count(v > 10), some = __syncthreads_or(v == 77), every = __syncthreads_and(v < 1000);
  out[t] = even ^ (all << 1) ^ (any << 2) ^ (eights << 3) ^ (threads * 1000003) ^ (some << 20) ^ (every << 21);
}

extern "C" __global__ void atomics(int *ints, unsigned *words, unsigned long long *longs, float *floats, const int *in) {
  int v = in[blockIdx.x * blockDim.x + threadIdx.x];
  atomicMin(&ints[0], v);
  atomicMax(&ints[1], v);
  atomicOr(&words[0], 1u << (v & 31));
  atomicAnd(&words[1], ~(1u << (v & 15)));
  atomicXor(&words[2], (unsigned)v);
  atomicInc(&words[3], 6);
  atomicDec(&words[4], 9);
  atomicAdd(&longs[0], (unsigned long long)(v & 1023));
  atomicAdd(&floats[0], (float)(v & 7));
  int old = ints[2], seen;
  do { seen = old; old = atomicCAS(&ints[2], seen, seen + (v & 3)); } while (old != seen);
}

// Blocks that take pieces of work in turns; whether there is one all threads read from shared memory.
extern "C" __global__ void persistent(const int *in, int *out, int *next, int n) {
  __shared__ int tile, buffer[128];
  for (;;) {
    if (threadIdx.x == 0) tile = atomicAdd(next, 1);
    __syncthreads();
    int t = tile;
    if (t >= n) break;
    buffer[threadIdx.x] = in[t * 128 + threadIdx.x];
    __syncthreads();
    out[t * 128 + threadIdx.x] = buffer[127 - threadIdx.x];
    __syncthreads();
  }
}

// A product whose threads compute eight by eight elements each, in registers.
extern "C" __global__ void matmul_registers(const float *a, const float *b, float *c, int n) {
  __shared__ float as[8][64], bs[8][64];
  int t = threadIdx.x, row = blockIdx.y * 64, column = blockIdx.x * 64, y = t / 8 * 8, x = t % 8 * 8;
  float sums[8][8] = {}, left[8], right[8];
  for (int k = 0; k < n; k += 8) {
    for (int i = t; i < 512; i += 64) {
      as[i % 8][i / 8] = a[(row + i / 8) * n + k + i % 8];
      bs[i / 64][i % 64] = b[(k + i / 64) * n + column + i % 64];
    }
    __syncthreads();
    for (int i = 0; i < 8; i++) {
      for (int j = 0; j < 8; j++) left[j] = as[i][y + j], right[j] = bs[i][x + j];
      for (int j = 0; j < 8; j++)
        for (int l = 0; l < 8; l++) sums[j][l] += left[j] * right[l];
    }
    __syncthreads();
  }
  for (int j = 0; j < 8; j++)
    for (int l = 0; l < 8; l++) c[(row + y + j) * n + column + x + l] = sums[j][l];
}

// Rows of warps.
extern "C" __global__ void rows(const int *in, int *out) {
  int v = in[threadIdx.y * 32 + threadIdx.x];
  if (threadIdx.y < 2) {
    v = __shfl_xor_sync(0xffffffff, v, 1);
    out[threadIdx.y * 32 + threadIdx.x] = v * 2;
  }
}

// Threads that return before others come to a barrier or a vote.
extern "C" __global__ void early(const int *in, int *out, int n, int rounds) {
  __shared__ int shared[128];
  int t = threadIdx.x, i = blockIdx.x * 128 + t;
  if (i >= n) return;
  int v = in[i];
  shared[t] = v;
  __syncthreads();
  v += shared[t ^ 1];
  for (int k = 0; k < rounds; k++) {
    if (v % 7 == k) { out[i] = 1000 + k; return; }
    __syncthreads();
    shared[t] = v + k;
    __syncthreads();
    v += __popc(__ballot_sync(0xffffffff, v & 1));
    for (int j = 0; j < (t & 3); j++) {
      if (v > 5000) { out[i] = v; return; }
      v += j * 1000;
    }
  }
  out[i] = v + __syncthreads_count(v & 1);
}

// A function with shared memory of its own, which is the same in each call.
__device__ __noinline__ int exchange(int v) {
  __shared__ int own[64];
  own[threadIdx.x] = v;
  __syncthreads();
  return own[63 - threadIdx.x];
}

extern "C" __global__ void calls(const int *in, int *out) {
  int v = exchange(in[threadIdx.x]);
  __syncthreads();
  out[threadIdx.x] = exchange(v * 2) + v;
}

// The last block to come adds up what all have left, as CUDA's samples do it.
extern "C" __global__ void last_block(const float *in, volatile float *parts, float *out, unsigned *count, int n) {
  __shared__ float part[128];
  __shared__ bool last;
  int t = threadIdx.x;
  float sum = 0;
  for (int i = blockIdx.x * 128 + t; i < n; i += 128 * gridDim.x) sum += in[i];
  part[t] = sum;
  __syncthreads();
  for (int s = 64; s > 0; s >>= 1) {
    if (t < s) part[t] += part[t + s];
    __syncthreads();
  }
  if (t == 0) {
    parts[blockIdx.x] = part[0];
    __threadfence();
    last = atomicInc(count, gridDim.x) == gridDim.x - 1;
  }
  __syncthreads();
  if (last) {
    float sum = 0;
    for (int i = t; i < gridDim.x; i += 128) sum += parts[i];
    part[t] = sum;
    __syncthreads();
    for (int s = 64; s > 0; s >>= 1) {
      if (t < s) part[t] += part[t + s];
      __syncthreads();
    }
    if (t == 0) {
      *out = part[0];
      *count = 0;
    }
  }
}
