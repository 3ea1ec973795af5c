// A program of CUDA's runtime, with the kernels of vm-ptx's tests: launches them as programs do, and checks what they compute against
// the host's own loops. Prints a line for each, and ends with how many are wrong.
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <vector>

#include "basics.cu"
#include "grids.cu"
// Both of them have this name.
#define calls called
#include "shared.cu"
#undef calls

namespace cg = cooperative_groups;
static int wrong;

static void check(const char *what, bool right) {
  printf("%s: %s\n", what, right ? "right" : "wrong");
  wrong += !right;
}

#define TRY(call)                                                      \
  do {                                                                 \
    cudaError_t error = (call);                                        \
    if (error != cudaSuccess) {                                        \
      printf("%s: %s\n", #call, cudaGetErrorString(error));            \
      exit(1);                                                         \
    }                                                                  \
  } while (0)

template <class T> T *put(const std::vector<T> &from) {
  T *to;
  TRY(cudaMalloc(&to, from.size() * sizeof(T)));
  TRY(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  return to;
}

template <class T> std::vector<T> get(const T *from, size_t count) {
  std::vector<T> to(count);
  TRY(cudaGetLastError());
  TRY(cudaMemcpy(to.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
  return to;
}

static std::vector<float> floats(int n) {
  std::vector<float> all(n);
  for (int i = 0; i < n; i++) all[i] = (i * 37 % 101 - 50) / 8.0f;
  return all;
}

static void vectors() {
  int n = 50000;
  auto a = floats(n), b = a;
  std::reverse(b.begin(), b.end());
  float *x = put(a), *y = put(b), *z = put(std::vector<float>(n));
  vector_add<<<(n + 255) / 256, 256>>>(x, y, z, n);
  auto found = get(z, n);
  bool right = true;
  for (int i = 0; i < n; i++) right &= found[i] == a[i] + b[i];
  check("vector_add", right);
  saxpy<<<30, 128>>>(2, x, y, n);
  found = get(y, n);
  right = true;
  for (int i = 0; i < n; i++) right &= found[i] == std::fma(2.0f, a[i], b[i]);
  check("saxpy", right);
}

static void streams() {
  int n = 10000;
  float *host, *x, elapsed;
  TRY(cudaMallocHost(&host, n * sizeof(float)));
  TRY(cudaMalloc(&x, n * sizeof(float)));
  for (int i = 0; i < n; i++) host[i] = i;
  cudaStream_t stream;
  cudaEvent_t begin, end;
  TRY(cudaStreamCreate(&stream));
  TRY(cudaEventCreate(&begin));
  TRY(cudaEventCreate(&end));
  TRY(cudaEventRecord(begin, stream));
  TRY(cudaMemcpyAsync(x, host, n * sizeof(float), cudaMemcpyHostToDevice, stream));
  for (int i = 0; i < 10; i++) saxpy<<<4, 256, 0, stream>>>(1, x, x, n);
  TRY(cudaMemcpyAsync(host, x, n * sizeof(float), cudaMemcpyDeviceToHost, stream));
  TRY(cudaEventRecord(end, stream));
  TRY(cudaStreamSynchronize(stream));
  TRY(cudaEventElapsedTime(&elapsed, begin, end));
  bool right = elapsed >= 0;
  for (int i = 0; i < n; i++) right &= host[i] == i * 1024.0f;
  check("streams", right);
  // What kernels do to the host's own pages.
  saxpy<<<4, 256>>>(1, host, host, n);
  TRY(cudaDeviceSynchronize());
  check("pinned memory", host[3] == 6144.0f);
  TRY(cudaMallocManaged(&x, n * sizeof(float)));
  for (int i = 0; i < n; i++) x[i] = 1;
  saxpy<<<4, 256>>>(2, x, x, n);
  TRY(cudaDeviceSynchronize());
  check("managed memory", x[0] == 3 && x[n - 1] == 3);
}

static void blocks() {
  int n = 5000;
  std::vector<float> a(n);
  for (int i = 0; i < n; i++) a[i] = i % 17;
  float sum = 0;
  for (float v : a) sum += v;
  float *x = put(a), *parts = put(std::vector<float>(4)), *one = put(std::vector<float>(1));
  reduce<<<4, 256>>>(x, parts, n);
  auto found = get(parts, 4);
  check("reduce", found[0] + found[1] + found[2] + found[3] == sum);
  reduce_warps<<<20, 256, 32>>>(x, one, n);
  check("reduce_warps", get(one, 1)[0] == sum);

  int side = 40;
  auto m = floats(side * side);
  float *p = put(m), *q = put(m);
  matmul<<<dim3(3, 3), dim3(16, 16)>>>(p, p, q, side);
  found = get(q, side * side);
  bool right = true;
  for (int i = 0; i < side * side; i++) {
    double expect = 0;
    for (int k = 0; k < side; k++) expect += double(m[i / side * side + k]) * m[k * side + i % side];
    right &= std::fabs(found[i] - expect) < 1e-2;
  }
  check("matmul", right);
  transpose<<<dim3(3, 3), dim3(16, 16)>>>(p, q, side, side);
  found = get(q, side * side);
  right = true;
  for (int i = 0; i < side * side; i++) right &= found[i] == m[i % side * side + i / side];
  check("transpose", right);

  std::vector<unsigned char> bytes(3000);
  std::vector<unsigned> bins(256);
  for (size_t i = 0; i < bytes.size(); i++) bins[bytes[i] = i * i % 251]++;
  unsigned *out = put(std::vector<unsigned>(256));
  histogram<<<3, 192>>>(put(bytes), out, bytes.size());
  check("histogram", get(out, 256) == bins);

  std::vector<int> in(1024), sums(1024);
  for (int i = 0; i < 1024; i++) in[i] = i % 13 - 6, sums[i] = in[i] + (i % 512 ? sums[i - 1] : 0);
  int *results = put(in);
  scan<<<2, 512>>>(put(in), results);
  check("scan", get(results, 1024) == sums);
  sort8<<<1, 128>>>(put(in), results, 8);
  for (int i = 0; i < 1024; i += 8) std::sort(in.begin() + i, in.begin() + i + 8);
  check("sort8", get(results, 1024) == in);
}

static void variables() {
  int width = 33, height = 21;
  auto a = floats(width * height);
  float *x = put(a), *out = put(a), all[5] = {1, 0, 0, 0, 2};
  TRY(cudaMemcpyToSymbol(weights, all, sizeof(all)));
  stencil2<<<dim3(3, 3), dim3(16, 8)>>>(x, out, width, height);
  auto found = get(out, width * height);
  bool right = true;
  for (int i = 0; i < width * height; i++)
    right &= found[i] == a[i] + (i + width < width * height ? 2 * a[i + width] : 0);
  check("constant memory", right);
  Field field = {2.5, -1, 3, 0, {1, 1, 1}};
  std::vector<Particle> in(100, Particle{{1, 2, 3}, 4});
  particles<<<1, 128>>>(put(in), out, field, 100);
  int count;
  TRY(cudaMemcpyFromSymbol(&count, calls, sizeof(count)));
  found = get(out, 2);
  check("structures and variables", count == 100 && found[0] == 7 * 14 + 2 && found[1] == 7 * 14 + 4);
}

static void facts() {
  cudaFuncAttributes attributes;
  TRY(cudaFuncGetAttributes(&attributes, matmul));
  int most;
  TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&most, matmul, 256, 0));
  check("attributes", attributes.maxThreadsPerBlock == 1024 && attributes.sharedSizeBytes == 2048 && most > 0);
}

__global__ void grouped(int *tiles, int *active, int *labels) {
  auto block = cg::this_thread_block();
  int i = block.thread_rank();
  auto warp = cg::tiled_partition<32>(block);
  auto four = cg::tiled_partition<4>(warp);
  tiles[i] = cg::reduce(four, i, cg::plus<int>()) + 1000 * four.shfl_down(i, 1);
  if (i % 3 == 0) {
    auto some = cg::coalesced_threads();
    active[i] = some.shfl(i, some.size() - 1) + 1000 * some.thread_rank();
    some.sync();
  }
  auto alike = cg::labeled_partition(warp, i % 5);
  labels[i] = alike.size() + 1000 * cg::reduce(alike, i, cg::greater<int>());
  block.sync();
}

// Groups of threads, in blocks of whole warps and others.
static void groups() {
  for (int n : {64, 52}) {
    std::vector<int> none(n, 0);
    int *tiles = put(none), *active = put(none), *labels = put(none);
    grouped<<<1, n>>>(tiles, active, labels);
    auto a = get(tiles, n), b = get(active, n), c = get(labels, n);
    bool right = true;
    for (int i = 0; i < n; i++) {
      int first = i / 32 * 32, last = std::min(first + 32, n), size = 0, most = 0, rank = 0, end = 0;
      right &= a[i] == 4 * (i & ~3) + 6 + 1000 * (i % 4 == 3 ? i : i + 1);
      for (int k = first; k < last; k++) {
        if (k % 3 == 0) rank += k < i, end = k;
        if (k % 5 == i % 5) size++, most = k;
      }
      right &= b[i] == (i % 3 ? 0 : end + 1000 * rank);
      right &= c[i] == size + 1000 * most;
    }
    check("groups of threads", right);
  }
}

__global__ void clocks(long long *out) { *out = clock64(); }

// A kernel that the driver does not support fails its own launch; later calls succeed.
static void refused() {
  std::vector<float> kept(4, 3);
  float *x = put(kept);
  clocks<<<1, 1>>>((long long *)x);
  bool right = cudaGetLastError() == cudaErrorNotSupported;
  saxpy<<<1, 4>>>(1, x, x, 4);
  right &= cudaGetLastError() == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
  right &= get(x, 4) == std::vector<float>(4, 6);
  check("a kernel that is refused", right);
}

__global__ void asserts(int n) { assert(n < 4); }

// A failed assertion ends the kernel, and its error stays until the device is reset.
static void assertions() {
  asserts<<<2, 64>>>(3);
  TRY(cudaDeviceSynchronize());
  asserts<<<1, 1>>>(5);
  bool right = cudaDeviceSynchronize() == cudaErrorAssert && cudaDeviceSynchronize() == cudaErrorAssert;
  TRY(cudaDeviceReset());
  cudaGetLastError();
  check("a failed assertion", right);
}

__managed__ int counter = 40;
__global__ void count(int by) { atomicAdd(&counter, by); }

// Variables that the host and the device share.
static void managed() {
  bool right = counter == 40;
  counter += 2;
  count<<<2, 32>>>(1);
  TRY(cudaDeviceSynchronize());
  right &= counter == 106;
  cudaPointerAttributes attributes;
  TRY(cudaPointerGetAttributes(&attributes, &counter));
  check("managed variables", right && attributes.type == cudaMemoryTypeManaged);
}

// What a graph says of its kernels, captured and added ones.
static void graphs() {
  cudaStream_t stream;
  cudaGraph_t captured, made;
  cudaGraphNode_t node;
  size_t nodes = 1;
  TRY(cudaStreamCreate(&stream));
  TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  count<<<3, 32, 0, stream>>>(5);
  TRY(cudaStreamEndCapture(stream, &captured));
  TRY(cudaGraphGetNodes(captured, &node, &nodes));
  cudaKernelNodeParams params{}, again{};
  TRY(cudaGraphKernelNodeGetParams(node, &params));
  bool right = params.func == (void *)count && params.gridDim.x == 3 && *(int *)params.kernelParams[0] == 5;
  TRY(cudaGraphCreate(&made, 0));
  TRY(cudaGraphAddKernelNode(&node, made, nullptr, 0, &params));
  TRY(cudaGraphKernelNodeGetParams(node, &again));
  right &= again.func == (void *)count && again.blockDim.x == 32;
  cudaGraphExec_t exec;
  int before = counter, by = 7;
  void *parameters[] = {&by};
  TRY(cudaGraphInstantiate(&exec, made, 0));
  TRY(cudaGraphLaunch(exec, stream));
  again.kernelParams = parameters;
  TRY(cudaGraphExecKernelNodeSetParams(exec, node, &again));
  TRY(cudaGraphLaunch(exec, stream));
  TRY(cudaStreamSynchronize(stream));
  check("kernels of graphs", right && counter == before + 96 * (5 + 7));
}

// Errors that are their call's alone.
static void errors() {
  auto is = [](cudaError_t error, cudaError_t wanted) { return error == wanted && cudaGetLastError() == wanted; };
  auto launched = [&](dim3 grid, dim3 block) {
    count<<<grid, block>>>(0);
    return is(cudaPeekAtLastError(), cudaErrorInvalidConfiguration);
  };
  check("launches beyond limits", launched(1, 2048) && launched(0, 32) && launched(dim3(1, 70000), 1));
  int *x = put(std::vector<int>(16)), host[16];
  bool right = is(cudaMemcpy(x, host, 1 << 26, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  right &= is(cudaMemset(x, 0, 1 << 26), cudaErrorInvalidValue);
  right &= is(cudaMemcpy(x, nullptr, 4, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  right &= is(cudaMemcpy(x, host, 4, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  check("copies beyond allocations", right && cudaDeviceSynchronize() == cudaSuccess);
}

__global__ void turned(int *out) {
  auto grid = cg::this_grid();
  out[grid.thread_rank()] = grid.thread_rank();
  grid.sync();
  int next = out[(grid.thread_rank() + 1) % grid.size()];
  grid.sync();
  out[grid.thread_rank()] = grid.is_valid() ? next : -1;
}

// The barrier of a grid of one block, which only cooperative launches have.
static void grids() {
  int *x = put(std::vector<int>(100));
  void *parameters[] = {&x};
  TRY(cudaLaunchCooperativeKernel(turned, 1, 100, parameters));
  auto found = get(x, 100);
  bool right = true;
  for (int i = 0; i < 100; i++) right &= found[i] == (i + 1) % 100;
  turned<<<1, 32>>>(x);
  check("barriers of grids", right && cudaDeviceSynchronize() == cudaErrorLaunchFailure);
  TRY(cudaDeviceReset());
  cudaGetLastError();
}

// An image that is refused is an error of its load, and of nothing else.
static void libraries() {
  cudaLibrary_t library;
  cudaError_t error = cudaLibraryLoadData(&library, "not PTX", nullptr, nullptr, 0, nullptr, nullptr, 0);
  check("an image that is refused", error == cudaErrorInvalidPtx && cudaGetLastError() == error);
  TRY(cudaDeviceSynchronize());
}

int main() {
  libraries();
  managed();
  graphs();
  errors();
  grids();
  assertions();
  refused();
  vectors();
  streams();
  blocks();
  variables();
  groups();
  facts();
  printf("%d wrong\n", wrong);
  return wrong != 0;
}
