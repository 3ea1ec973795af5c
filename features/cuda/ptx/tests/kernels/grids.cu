// Stencils in two and three dimensions, constant memory, structs by value, device functions, pointers.
__constant__ float weights[5] = {0.5f, 0.125f, 0.125f, 0.125f, 0.125f};
__device__ int calls = 0;
__device__ float table[4] = {1, 2, 4, 8};
__device__ float *where = &table[1];

extern "C" __global__ void stencil2(const float *in, float *out, int width, int height) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= width || y >= height) return;
  float sum = weights[0] * in[y * width + x];
  if (x > 0) sum += weights[1] * in[y * width + x - 1];
  if (x < width - 1) sum += weights[2] * in[y * width + x + 1];
  if (y > 0) sum += weights[3] * in[(y - 1) * width + x];
  if (y < height - 1) sum += weights[4] * in[(y + 1) * width + x];
  out[y * width + x] = sum;
}

extern "C" __global__ void stencil3(const double *in, double *out, int3 size) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x < 1 || y < 1 || x >= size.x - 1 || y >= size.y - 1) return;
  long plane = (long)size.x * size.y;
  for (int z = 1; z < size.z - 1; z++) {
    long i = z * plane + y * size.x + x;
    out[i] = in[i] * -6.0 + in[i - 1] + in[i + 1] + in[i - size.x] + in[i + size.x] + in[i - plane] + in[i + plane];
  }
}

struct Particle { float3 at; float mass; };
struct Field { double strength; char sign; short turns; int on; float scale[3]; };

__device__ __noinline__ float energy(Particle p, const Field *f) {
  float e = p.mass * (p.at.x * p.at.x + p.at.y * p.at.y + p.at.z * p.at.z);
  return f->on ? e * (float)f->strength * f->sign : e;
}

__device__ __noinline__ int gcd(int a, int b) {
  while (b) { int t = a % b; a = b; b = t; }
  return a;
}

__device__ __noinline__ bool prime(int n, int &smallest) {
  smallest = 1;
  if (n < 2) return false;
  for (int i = 2; i * i <= n; i++) if (n % i == 0) { smallest = i; return false; }
  return true;
}

extern "C" __global__ void particles(const Particle *in, float *out, Field field, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    Particle p = in[i];
    p.at.x *= field.scale[0]; p.at.y *= field.scale[1]; p.at.z *= field.scale[2];
    p.mass += field.turns;
    out[i] = energy(p, &field) + where[i & 1];
    atomicAdd(&calls, 1);
  }
}

extern "C" __global__ void numbers(const int *a, const int *b, int *out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int smallest;
  bool is = prime(a[i], smallest);
  out[i] = gcd(a[i], b[i]) * 1000 + smallest * 2 + is;
}

// Sorts in local memory.
extern "C" __global__ void sort8(const int *in, int *out, int count) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  int v[16];
  for (int k = 0; k < count; k++) v[k] = in[i * count + k];
  for (int k = 1; k < count; k++) {
    int x = v[k], j = k - 1;
    while (j >= 0 && v[j] > x) { v[j + 1] = v[j]; j--; }
    v[j + 1] = x;
  }
  for (int k = 0; k < count; k++) out[i * count + k] = v[k];
}

// Parameters of more words than a kernel takes as numbers, with an index that is computed.
struct Many { int length; long long values[90]; };

extern "C" __global__ void many(const __grid_constant__ Many many, long long *out, int factor) {
  int i = threadIdx.x;
  if (i < many.length) out[i] = many.values[i] * factor + many.values[88];
}
