"""Numba's kernels: shared memory, atomics, shuffles, a reduction."""

import hashlib

import numpy as np

# Numba asks for what newer numpy has no more.
np.row_stack = np.vstack
from numba import cuda, float32


@cuda.jit
def product(a, b, c):
    sa, sb = cuda.shared.array((16, 16), float32), cuda.shared.array((16, 16), float32)
    i, j = cuda.grid(2)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0)
    for k in range(0, a.shape[1], 16):
        sa[x, y], sb[x, y] = a[i, k + y], b[k + x, j]
        cuda.syncthreads()
        for l in range(16):
            total += sa[x, l] * sb[l, y]
        cuda.syncthreads()
    c[i, j] = total


@cuda.jit
def counts(x, bins):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(bins, x[i], 1)


@cuda.reduce
def total(a, b):
    return a + b


random = np.random.default_rng(0)
a, b = (random.normal(size=(64, 64)).astype(np.float32) for _ in range(2))
c = np.zeros((64, 64), np.float32)
product[(4, 4), (16, 16)](a, b, c)
np.testing.assert_allclose(c, a @ b, rtol=1e-4, atol=1e-4)
print("product", hashlib.sha256(c.tobytes()).hexdigest())
x = random.integers(0, 10, 100_000)
bins = np.zeros(10, np.int64)
counts[400, 256](x, bins)
np.testing.assert_array_equal(bins, np.bincount(x, minlength=10))
print("counts", bins.tolist())
print("total", int(total(x)))
assert int(total(x)) == x.sum()
