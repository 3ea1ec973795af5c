"""CuPy: kernels that it compiles, CUB's and Thrust's, and libraries' (cuBLAS, cuFFT, cuRAND, cuSOLVER), each by a digest."""

import hashlib

import cupy as cp
import numpy as np


def tell(name, array):
    print(name, array.dtype, array.shape, hashlib.sha256(np.ascontiguousarray(cp.asnumpy(array)).tobytes()).hexdigest()[:32])


random = np.random.default_rng(0)
x = random.normal(size=(300, 700)).astype(np.float32)
a = cp.asarray(x)
np.testing.assert_array_equal(cp.asnumpy(a * 2 + a), x * 2 + x)
tell("elementwise", cp.sin(a) * 2 + cp.exp(-a * a))
tell("sum", a.sum(axis=0))
tell("whole-sum", a.sum())
tell("argmax", a.argmax(axis=1))
tell("sort", cp.sort(a, axis=1))
tell("argsort", cp.argsort(a.ravel()))
tell("cumsum", cp.cumsum(a.ravel().astype(cp.float64)))
tell("unique", cp.unique((a * 10).astype(cp.int32)))
tell("mask", a[a > 1])
tell("histogram", cp.histogram(a, bins=50)[0])
tell("product", a @ a.T)
tell("spectrum", cp.fft.rfft(a, axis=1))
tell("random", cp.random.RandomState(7).normal(size=(1000,)))
tell("solved", cp.linalg.solve(a[:, :300] + 300 * cp.eye(300, dtype=cp.float32), a[:, 300]))
raw = cp.RawKernel(
    r"""extern "C" __global__ void squares(const float *x, float *y, int n) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) y[i] = x[i] * x[i];
    }""",
    "squares",
)
y = cp.empty_like(a)
raw(((x.size + 127) // 128,), (128,), (a, y, np.int32(x.size)))
np.testing.assert_array_equal(cp.asnumpy(y), x * x)
tell("raw", y)
streams = [cp.cuda.Stream(non_blocking=True) for _ in range(4)]
for stream in streams:
    with stream:
        y = cp.tanh(a) + y
    stream.synchronize()
tell("streams", y)
pinned = cp.cuda.alloc_pinned_memory(x.nbytes)
host = np.frombuffer(pinned, np.float32, x.size).reshape(x.shape)
a.get(out=host)
np.testing.assert_array_equal(host, x)
print("pinned", hashlib.sha256(host.tobytes()).hexdigest()[:32])
with cp.cuda.Stream(non_blocking=True) as stream:
    stream.begin_capture()
    y *= 1.5
    graph = stream.end_capture()
    for _ in range(3):
        graph.launch(stream)
    stream.synchronize()
tell("graph", y)
