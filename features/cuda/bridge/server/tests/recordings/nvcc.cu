// The program of the recording `nvcc`: kernels, streams, events, a graph, atomics and memory of pools, by CUDA's static runtime.
//   nvcc -cudart static -gencode arch=compute_90,code=compute_90 -o program nvcc.cu
//   features/cuda/bridge/server/tests/record features/cuda/bridge/server/tests/recordings/nvcc libvm_cuda_cpu.so ./program
#include <cstdio>
#include <cuda_runtime.h>

#define TRY(call)                                                          \
  if (cudaError_t error = (call); error != cudaSuccess) {                  \
    printf("%s: %s\n", #call, cudaGetErrorString(error));                  \
    return 1;                                                              \
  }

__constant__ float scale;
__device__ unsigned total;

__global__ void multiply(const float *from, float *to, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) to[i] = from[i] * scale;
}

__global__ void count(const float *from, int n) {
  __shared__ unsigned found;
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && from[i] > 100) atomicAdd(&found, 1u);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&total, found);
}

int main() {
  const int n = 3000;
  static float host[n], back[n];
  for (int i = 0; i < n; i++) host[i] = i % 97;
  float two = 2, *from, *to, *pooled, time;
  unsigned found = 0;
  cudaStream_t stream;
  cudaEvent_t begin, end;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  TRY(cudaMalloc(&from, sizeof host));
  TRY(cudaMalloc(&to, sizeof host));
  TRY(cudaStreamCreate(&stream));
  TRY(cudaEventCreate(&begin));
  TRY(cudaEventCreate(&end));
  TRY(cudaMemcpy(from, host, sizeof host, cudaMemcpyHostToDevice));
  TRY(cudaMemcpyToSymbol(scale, &two, sizeof two));
  TRY(cudaMallocAsync(&pooled, sizeof host, stream));
  TRY(cudaEventRecord(begin, stream));
  multiply<<<(n + 255) / 256, 256, 0, stream>>>(from, pooled, n);
  count<<<(n + 255) / 256, 256, 0, stream>>>(pooled, n);
  TRY(cudaEventRecord(end, stream));
  TRY(cudaMemcpyAsync(to, pooled, sizeof host, cudaMemcpyDeviceToDevice, stream));
  TRY(cudaFreeAsync(pooled, stream));
  TRY(cudaStreamSynchronize(stream));
  TRY(cudaEventElapsedTime(&time, begin, end));
  TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  multiply<<<(n + 255) / 256, 256, 0, stream>>>(to, to, n);
  TRY(cudaStreamEndCapture(stream, &graph));
  TRY(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 3; i++) TRY(cudaGraphLaunch(exec, stream));
  TRY(cudaStreamSynchronize(stream));
  TRY(cudaMemcpy(back, to, sizeof back, cudaMemcpyDeviceToHost));
  TRY(cudaMemcpyFromSymbol(&found, total, sizeof found));
  int wrong = 0;
  unsigned expected = 0;
  for (int i = 0; i < n; i++) {
    wrong += back[i] != 16 * host[i];
    expected += 2 * host[i] > 100;
  }
  wrong += found != expected;
  TRY(cudaGraphExecDestroy(exec));
  TRY(cudaGraphDestroy(graph));
  TRY(cudaFree(from));
  TRY(cudaFree(to));
  TRY(cudaStreamDestroy(stream));
  printf("%d wrong\n", wrong);
  return wrong != 0;
}
