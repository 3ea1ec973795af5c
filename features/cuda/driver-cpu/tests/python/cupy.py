"""CuPy beside numpy: elementwise kernels, reductions, and what CUB and Thrust do. Prints a line for each check that holds."""

import time

import cupy as cp
import numpy as np

generator = np.random.default_rng(1)
a = generator.random(1000).astype("f4")
x = cp.asarray(a)
i = generator.integers(0, 100, 5000)
xi = cp.asarray(i)
m = generator.random((64, 100))
xm = cp.asarray(m)
big = generator.integers(0, 1 << 40, 200000)
long = generator.random(1000000)


def equal(found, wanted):
    np.testing.assert_array_equal(cp.asnumpy(found), wanted)


def close(found, wanted, rtol=1e-6, atol=0):
    np.testing.assert_allclose(cp.asnumpy(found), wanted, rtol=rtol, atol=atol)


def ufuncs():
    names = """
        sin cos tan exp log sqrt tanh arctan floor ceil rint square cbrt log1p expm1 sinh cosh arcsin arccos sign
    """
    for name in names.split():
        close(getattr(cp, name)(x), getattr(np, name)(a), rtol=2e-5, atol=1e-6)


def put():
    y = x.copy()
    cp.put(y, cp.asarray([1, 2]), cp.asarray([7.0, 8.0], "f4"))
    equal(y[1:3], [7, 8])


def set_where():
    y = x.copy()
    y[y > 0.5] = 0
    equal(y, np.where(a > 0.5, 0, a))


def scatter():
    y = cp.zeros(100, "i8")
    cp.add.at(y, xi, 1)
    equal(y, np.bincount(i, minlength=100))


def raw():
    """Warps with partial masks, and a reduction of cooperative groups."""
    source = """
    #include <cooperative_groups.h>
    #include <cooperative_groups/reduce.h>
    namespace cg = cooperative_groups;
    extern "C" __global__ void sums(const int *in, int *out, int n) {
      int at = blockIdx.x * blockDim.x + threadIdx.x;
      int value = at < n ? in[at] : 0;
      auto tile = cg::tiled_partition<8>(cg::this_thread_block());
      int eight = cg::reduce(tile, value, cg::plus<int>());
      if (at < n) {
        auto active = cg::coalesced_threads();
        if (active.thread_rank() == 0) atomicAdd(out + 1, active.size());
        if (tile.thread_rank() == 0) atomicAdd(out, eight);
      }
    }
    """
    out = cp.zeros(2, "i4")
    cp.RawKernel(source, "sums")((10,), (128,), (x[:1000].view("i4") & 1023, out, np.int32(1000)))
    equal(out, [(a.view("i4") & 1023).sum(), 1000])


TESTS = {
    "sum": lambda: close(x.sum(), a.sum(), rtol=1e-5),
    "sum of an axis": lambda: close(xm.sum(axis=0), m.sum(axis=0)),
    "cumsum": lambda: equal(cp.cumsum(xi), np.cumsum(i)),
    "sort": lambda: equal(cp.sort(x), np.sort(a)),
    "argsort": lambda: equal(cp.argsort(x), np.argsort(a)),
    "unique": lambda: equal(cp.unique(xi), np.unique(i)),
    "nonzero": lambda: equal(cp.nonzero(xi > 50)[0], np.nonzero(i > 50)[0]),
    "mask": lambda: equal(xi[xi > 50], i[i > 50]),
    "argmax": lambda: equal(x.argmax(), a.argmax()),
    "max": lambda: equal(x.max(), a.max()),
    "lexsort": lambda: equal(cp.lexsort(cp.stack([xi, xi])), np.lexsort(np.stack([i, i]))),
    "sort of rows": lambda: equal(cp.sort(xm, axis=1), np.sort(m, axis=1)),
    "histogram": lambda: equal(cp.histogram(x, 10)[0], np.histogram(a, 10)[0]),
    "bincount": lambda: equal(cp.bincount(xi), np.bincount(i)),
    "searchsorted": lambda: equal(cp.searchsorted(cp.sort(x), x[:50]), np.searchsorted(np.sort(a), a[:50])),
    "where": lambda: equal(cp.where(x > 0.5, x, 0), np.where(a > 0.5, a, 0)),
    "take": lambda: equal(cp.take(x, xi), np.take(a, i)),
    "put": put,
    "assignment by a mask": set_where,
    "ufuncs": ufuncs,
    "var": lambda: close(xm.var(axis=1), m.var(axis=1)),
    "median": lambda: close(cp.median(xm, axis=1), np.median(m, axis=1)),
    "partition": lambda: equal(cp.sort(cp.partition(x, 50)[:50]), np.sort(a)[:50]),
    "cumprod": lambda: close(cp.cumprod(x[:20] + 1), np.cumprod(a[:20] + 1), rtol=1e-5),
    "cumsum of rows": lambda: close(cp.cumsum(xm, axis=1), np.cumsum(m, axis=1)),
    "einsum": lambda: close(cp.einsum("ij->i", xm), m.sum(axis=1)),
    "any": lambda: equal((x > 0.999).any(), (a > 0.999).any()),
    "half": lambda: close(x.astype("f2").sum(dtype="f4"), a.astype("f2").sum(dtype="f4"), rtol=1e-3),
    "complex": lambda: close((x + 1j * x).sum(), (a + 1j * a).sum(), rtol=1e-4),
    "flatnonzero": lambda: equal(cp.flatnonzero(xm > 0.9), np.flatnonzero(m > 0.9)),
    "count": lambda: equal(cp.count_nonzero(xm > 0.9, axis=0), np.count_nonzero(m > 0.9, axis=0)),
    "scatter": scatter,
    "percentile": lambda: close(cp.percentile(x, [10, 50]), np.percentile(a, [10, 50]), rtol=1e-5),
    "a long sort": lambda: equal(cp.sort(cp.asarray(big)), np.sort(big)),
    "a long sum": lambda: close(cp.asarray(long).sum(), long.sum()),
    "warps and groups": raw,
}


def refused():
    """A launch that the driver refuses raises an error; later calls succeed."""
    clock = cp.RawKernel('extern "C" __global__ void clocks(long long *out) { *out = clock64(); }', "clocks")
    try:
        clock((1,), (1,), (cp.zeros(1, "i8"),))
    except cp.cuda.driver.CUDADriverError as error:
        assert "CUDA_ERROR_NOT_SUPPORTED" in str(error), error
    else:
        raise SystemExit("a launch that is refused raised no error")
    equal(x.get(), a)


for name, test in TESTS.items():
    began = time.monotonic()
    test()
    print(f"{name}: right, in {time.monotonic() - began:.1f} s", flush=True)
refused()
print(f"{len(TESTS)} right")
