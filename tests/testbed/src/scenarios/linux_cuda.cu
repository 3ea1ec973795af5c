// A CUDA program, as anybody writes one: adds vectors, strays, or runs without an end.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <vector>

__global__ void add(const float *a, const float *b, float *sum, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) sum[i] = a[i] + b[i];
}

__global__ void stray(int *nowhere) { *nowhere = 1; }

__global__ void spin(volatile int *until) {
  while (*until == 0) {
  }
}

#define TRY(call)                                                          \
  do {                                                                     \
    cudaError_t error = (call);                                            \
    if (error != cudaSuccess) {                                            \
      printf("%s: %d, %s\n", #call, error, cudaGetErrorString(error));     \
      exit(1);                                                             \
    }                                                                      \
  } while (0)

static void add_vectors(int times) {
  const int n = 100000;
  float *a, *b, *sum;
  // Memory of both sides, and memory of the program alone.
  TRY(cudaMallocHost(&a, n * sizeof(float)));
  std::vector<float> of(n), found(n);
  for (int i = 0; i < n; i++) {
    a[i] = i % 1000;
    of[i] = i / 1000;
  }
  float *x;
  TRY(cudaMalloc(&x, n * sizeof(float)));
  TRY(cudaMalloc(&b, n * sizeof(float)));
  TRY(cudaMalloc(&sum, n * sizeof(float)));
  for (int time = 0; time < times; time++) {
    TRY(cudaMemcpyAsync(x, a, n * sizeof(float), cudaMemcpyHostToDevice));
    TRY(cudaMemcpy(b, of.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    TRY(cudaMemset(sum, 0, n * sizeof(float)));
    add<<<(n + 255) / 256, 256>>>(x, b, sum, n);
    TRY(cudaGetLastError());
    TRY(cudaMemcpy(found.data(), sum, n * sizeof(float), cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++)
      if (found[i] != a[i] + of[i]) {
        printf("%d: %f is wrong\n", i, found[i]);
        exit(1);
      }
  }
  printf("%d sums of %d elements are right\n", times, n);
}

int main(int count, char **arguments) {
  int devices = 0;
  TRY(cudaGetDeviceCount(&devices));
  cudaDeviceProp properties;
  TRY(cudaGetDeviceProperties(&properties, 0));
  const char *what = count > 1 ? arguments[1] : "add";
  if (!strcmp(what, "add")) {
    printf("%d device, %s\n", devices, properties.name);
    add_vectors(count > 2 ? atoi(arguments[2]) : 1);
  } else if (!strcmp(what, "stray")) {
    stray<<<1, 1>>>((int *)0x1234567890);
    cudaError_t error = cudaDeviceSynchronize();
    printf("%d, %s\n", error, cudaGetErrorString(error));
    return error == cudaSuccess;
  } else if (!strcmp(what, "spin")) {
    int *until;
    TRY(cudaMalloc(&until, sizeof(int)));
    TRY(cudaMemset(until, 0, sizeof(int)));
    spin<<<1, 1>>>(until);
    TRY(cudaGetLastError());
    printf("spins\n");
    fflush(stdout);
    cudaError_t error = cudaDeviceSynchronize();
    printf("%d, %s\n", error, cudaGetErrorString(error));
  }
}
