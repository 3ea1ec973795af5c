"""Numba: reductions, what lanes of a warp do together, blocks that fill no warp, and what kernels print."""

import math

import numpy as np
from numba import cuda, float64

generator = np.random.default_rng(2)


@cuda.jit
def shuffles(values, out):
    i = cuda.grid(1)
    lane = i % 32
    if lane < 10:
        value = cuda.shfl_xor_sync(0x3FF, values[i], 1)
        cuda.syncwarp(0x3FF)
        out[i] = value + 1000 * cuda.ballot_sync(0x3FF, values[i] % 2)
    else:
        out[i] = cuda.match_any_sync(0xFFFFFC00, values[i] % 3)


@cuda.jit
def active(out):
    i = cuda.threadIdx.x
    if i % 2:
        out[i] = cuda.activemask()


@cuda.jit
def through_blocks(values, out):
    tile = cuda.shared.array(70, float64)
    i = cuda.threadIdx.x
    tile[i] = values[i]
    cuda.syncthreads()
    out[i] = math.sqrt(tile[69 - i]) + cuda.popc(cuda.ballot_sync(0xFFFFFFFF, True))


@cuda.jit
def speak(values):
    i = cuda.grid(1)
    if i < values.size:
        print("thread", i, "has", values[i])


def reductions():
    add = cuda.reduce(lambda a, b: a + b)
    for n in (1, 33, 500, 40000):
        values = np.arange(n, dtype=np.float64)
        assert add(values) == values.sum(), n
    greatest = cuda.reduce(lambda a, b: max(a, b))
    values = generator.integers(-1000, 1000, 3000)
    assert greatest(values, init=-2000) == values.max()


def warps():
    values = generator.integers(0, 100, 64).astype(np.int32)
    out = np.zeros(64, np.uint32)
    shuffles[1, 64](values, out)
    for i in range(64):
        first = i // 32 * 32
        of_warp = values[first : first + 32]
        if i % 32 < 10:
            ballot = sum(1 << lane for lane in range(10) if of_warp[lane] % 2)
            wanted = int(values[i ^ 1]) + 1000 * ballot
        else:
            wanted = sum(1 << lane for lane in range(10, 32) if of_warp[lane] % 3 == values[i] % 3)
        assert out[i] == wanted & 0xFFFFFFFF, (i, out[i], wanted)


def blocks():
    out = np.zeros(40, np.uint32)
    active[1, 40](out)
    np.testing.assert_array_equal(out[1:32:2], 0xAAAAAAAA)
    np.testing.assert_array_equal(out[33::2], 0xAA)
    values = generator.random(70)
    found = np.zeros(70)
    through_blocks[1, 70](values, found)
    lanes = np.where(np.arange(70) < 64, 32, 6)
    np.testing.assert_allclose(found, np.sqrt(values[::-1]) + lanes, rtol=1e-12)


def printing():
    speak[1, 4](np.array([1.5, -2.0, 0.25]))
    cuda.synchronize()


for test in (reductions, warps, blocks, printing):
    test()
    print(test.__name__, "right", flush=True)
