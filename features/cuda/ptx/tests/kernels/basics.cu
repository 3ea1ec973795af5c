// Elementwise kernels: bounds, both kinds of loops, mixes of types.
extern "C" __global__ void vector_add(const float *a, const float *b, float *c, int n) {
  int i = blockDim.x * blockIdx.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}

extern "C" __global__ void saxpy(float a, const float *x, float *y, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = a * x[i] + y[i];
}

extern "C" __global__ void mandelbrot(int *out, int width, int height, int most) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= width || y >= height) return;
  float cr = -2.0f + 3.0f * x / width, ci = -1.5f + 3.0f * y / height, zr = 0, zi = 0;
  int n = 0;
  while (zr * zr + zi * zi < 4.0f && n < most) {
    float next = zr * zr - zi * zi + cr;
    zi = 2 * zr * zi + ci;
    zr = next;
    n++;
  }
  out[y * width + x] = n;
}

extern "C" __global__ void mixed(const double *a, const int *b, long long *sums, double *out, unsigned char *bytes, short *halves, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  double v = a[i];
  int k = b[i];
  out[i] = v * k + (double)(k / 3) - fmin(v, 2.0) + sqrt(fabs(v)) / (1.0 + k * k);
  sums[i] = (long long)k * k * 1000003LL + (long long)v - (k % 7);
  bytes[i] = (unsigned char)(k * 3);
  halves[i] = (short)(k >> 2) + (signed char)k;
}

extern "C" __global__ void choose(const int *a, int *out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int v = a[i], r;
  switch (v & 15) {
    case 0: r = v + 1; break;
    case 1: r = v * 3; break;
    case 2: r = v ^ 0x55;
    case 3: r = v - 7; break;
    case 4: r = v << 3; break;
    case 5: r = -v; break;
    case 6: r = __popc(v); break;
    case 7: r = __clz(v); break;
    case 8: r = __brev(v); break;
    case 9: r = __ffs(v); break;
    default: r = v % 1000;
  }
  out[i] = r;
}

extern "C" __global__ void nested(const int *a, int *out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int sum = 0, v = a[i];
  for (int x = 0; x < 20; x++) {
    if ((x * v) % 5 == 3) continue;
    for (int y = x; y < 30; y++) {
      if ((y ^ v) % 11 == 0) break;
      if (y == v % 25) goto done;
      sum += x * y + v;
      if (sum > 100000) { sum -= 99999; continue; }
      sum ^= y;
    }
    int z = v & 7;
    do { sum += z; z -= 2; } while (z > 0 && (sum & 1));
  }
done:
  out[i] = sum;
}
