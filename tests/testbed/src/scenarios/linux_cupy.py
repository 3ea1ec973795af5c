"""What a guest's user does: CuPy, which compiles its kernels by NVRTC in the guest, beside numpy on the guest's processor."""

import time

began = time.monotonic()


def tell(what):
    global began
    now = time.monotonic()
    print(f"{what}, in {now - began:.1f} s")
    began = time.monotonic()


import numpy as np

tell(f"numpy {np.__version__} is imported")
import cupy as cp

tell(f"CuPy {cp.__version__} is imported")
properties = cp.cuda.runtime.getDeviceProperties(0)
tell(f"CuPy's device is {properties['name'].decode()}")

x = np.random.default_rng(0).normal(size=(60, 70)).astype(np.float32)
a = cp.asarray(x)
np.testing.assert_array_equal(cp.asnumpy(a * 2 + x[0, 0]), x * 2 + x[0, 0])
tell("elementwise: a * 2 + b is numpy's bit for bit")

squares = cp.RawKernel(
    """
    extern "C" __global__ void squares(const float *x, float *y, int n) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) y[i] = x[i] * x[i];
    }
    """,
    "squares",
)
y = cp.empty_like(a)
squares(((x.size + 127) // 128,), (128,), (a, y, np.int32(x.size)))
np.testing.assert_array_equal(cp.asnumpy(y), x * x)
tell("a RawKernel's squares are numpy's bit for bit")

np.testing.assert_allclose(cp.asnumpy(a.sum(axis=0)), x.sum(axis=0), rtol=1e-5, atol=1e-5)
assert int(cp.arange(5000).sum()) == 5000 * 4999 // 2
tell("sums along an axis, and of 5000 integers, are numpy's")

norm = cp.ReductionKernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0", "l2norm")
np.testing.assert_allclose(float(norm(a)), np.linalg.norm(x), rtol=1e-5)
tell("a ReductionKernel's norm is numpy's")

try:
    cp.RawKernel('extern "C" __global__ void wrong() { nothing; }', "wrong")((1,), (1,), ())
    raise SystemExit("a kernel that is none was compiled")
except cp.cuda.compiler.CompileException as error:
    assert 'identifier "nothing" is undefined' in str(error), error
try:
    cp.empty(2**40, dtype=np.uint8)
    raise SystemExit("a terabyte of 64 MB was given")
except cp.cuda.memory.OutOfMemoryError as error:
    tell(f"refusals are CuPy's own: {error}")
np.testing.assert_array_equal(cp.asnumpy(a * 2 + x[0, 0]), x * 2 + x[0, 0])
tell("what comes behind them is right")
