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
