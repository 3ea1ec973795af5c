"""Arrays beside numpy's: each function on arrays of random types, shapes and strides."""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import vmaccel as va

# 10,000 in all, or the part that SWEEP_SEED chooses.
EXAMPLES = 60 if os.environ.get("SWEEP_SEED") else 1000
settings.register_profile("tests", max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("tests")

REAL = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"]
FLOAT = ["float32", "float64"]
ALL = ["bool", *REAL, "complex64", "complex128"]


def check(found, expected, rtol=None):
    """That an array has numpy's elements, shape and type."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if expected.dtype.kind in "fc":
        rtol = rtol or {4: 2e-5, 8: 1e-12, 16: 1e-12}[np.zeros((), expected.dtype).real.itemsize]
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol)
    else:
        np.testing.assert_array_equal(found, expected)


@st.composite
def arrays(draw, types, shape=None, low=-9, high=9):
    """An array of numpy's and one of ours, sliced and turned alike."""
    dtype = np.dtype(draw(st.sampled_from(types)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, max_side=9)) if shape is None else shape
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if dtype.kind == "b":
        x = rng.integers(0, 2, shape).astype(dtype)
    elif dtype.kind in "iu":
        x = rng.integers(0 if dtype.kind == "u" else low, high, shape).astype(dtype)
    else:
        x = (rng.uniform(low, high, shape) + (1j * rng.uniform(low, high, shape) if dtype.kind == "c" else 0)).astype(dtype)
    x = np.asarray(x)
    a = va.asarray(x)
    if x.ndim and draw(st.booleans()):
        order = draw(st.permutations(range(x.ndim)))
        x, a = x.transpose(order), a.transpose(order)
    if x.ndim and draw(st.booleans()):
        step = draw(st.sampled_from([-2, -1, 2]))
        axis = draw(st.integers(0, x.ndim - 1))
        key = tuple(slice(None, None, step) if d == axis else slice(None) for d in range(x.ndim))
        x, a = x[key], a[key]
    return x, a


@given(st.data())
def test_operators_go_with_shapes_that_are_repeated(data):
    shape = data.draw(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, max_side=7))
    (x, a), (y, b) = (data.draw(arrays(REAL, each)) for each in shape.input_shapes)
    try:
        expected = [x + y, x - y, x * y, x < y, x == y, np.maximum(x, y)]
    except ValueError:
        return  # what was turned does not go together any more
    for found, each in zip([a + b, a - b, a * b, a < b, a == b, va.maximum(a, b)], expected):
        check(found, each)


@given(st.data())
def test_division_is_pythons(data):
    x, a = data.draw(arrays(["int8", "int32", "int64", "uint16", "float32", "float64"]))
    y = np.where(x % 3 == 0, 3, x).astype(x.dtype)
    b = va.where(a % 3 == 0, va.full_like(a, 3), a)
    with np.errstate(all="ignore"):
        check(a // b, x // y)
        check(a % b, x % y)
        check(b % 5, y % 5)
        check((-a) % 5 if x.dtype.kind != "u" else a % 5, (-x) % 5 if x.dtype.kind != "u" else x % 5)


@given(arrays(FLOAT, low=0.1, high=0.95))
@pytest.mark.parametrize(
    "name",
    "abs acos asin asinh atan atanh cbrt ceil cos cosh exp expm1 floor log log10 log1p log2 negative sign sin sinh sqrt square tan tanh trunc".split(),
)
def test_functions(name, both):
    if not hasattr(va, name):
        return
    x, a = both
    check(getattr(va, name)(a), getattr(np, {"acos": "arccos", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan", "atanh": "arctanh"}.get(name, name))(x))


@given(arrays(FLOAT, low=-30, high=30), arrays(FLOAT, shape=(), low=-30, high=30))
def test_functions_of_two(one, other):
    (x, a), (y, b) = one, other
    y, b = y.astype(x.dtype), b.astype(str(x.dtype))
    for ours, theirs in (("atan2", "arctan2"), ("hypot", "hypot"), ("copysign", "copysign"), ("logaddexp", "logaddexp")):
        check(getattr(va, ours)(a, b), getattr(np, theirs)(x, y))


@given(arrays(["complex64", "complex128"], low=-3, high=3))
def test_complex_numbers(both):
    x, a = both
    check(a * a + 1, x * x + 1, 1e-4 if x.dtype == "complex64" else 1e-11)
    for name in ("exp", "sqrt", "sin", "cos", "tanh", "sinh"):
        check(getattr(va, name)(a), getattr(np, name)(x), 1e-3 if x.dtype == "complex64" else 1e-10)
    check(va.abs(a), np.abs(x))
    check(va.conj(a).mT if x.ndim > 1 else va.conj(a), np.conj(x).swapaxes(-1, -2) if x.ndim > 1 else np.conj(x))


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_functions_near_their_poles(dtype):
    near = np.array([1 + 1e-2, 1 - 1e-3, 1 + 1e-4]) * np.pi / 2
    x = (np.array([1e-2, -1e-3, 3e-3, 0.0]) + 1j * near[:, None]).astype(dtype)
    for name, z in (("tanh", x), ("tan", -1j * x)):
        z = z.astype(dtype)
        check(getattr(va, name)(va.to_device(z)), getattr(np, name)(z), 2e-5 if dtype == "complex64" else 1e-11)


@given(st.data())
def test_reductions(data):
    x, a = data.draw(arrays(REAL))
    axis = data.draw(st.none() | st.integers(-x.ndim, x.ndim - 1)) if x.ndim else None
    keep = data.draw(st.booleans())
    for name in ("sum", "max", "min", "any", "all"):
        check(getattr(a, name)(axis=axis, keepdims=keep), getattr(x, name)(axis=axis, keepdims=keep), 1e-4)
    if x.dtype.kind == "f":
        check(a.mean(axis=axis, keepdims=keep), x.mean(axis=axis, keepdims=keep), 1e-4)
        check(a.var(axis=axis, keepdims=keep), x.var(axis=axis, keepdims=keep), 1e-3)
    check(va.argmax(a, axis=axis), np.argmax(x, axis=axis).astype("int64"))


@given(st.data())
def test_fused_chains(data):
    x, a = data.draw(arrays(FLOAT))
    check(((a * 2 + 1) / 3 - a).sum(), ((x * 2 + 1) / 3 - x).sum(), 1e-3)
    if x.ndim:
        mean = x.mean(axis=-1, keepdims=True)
        check((a - a.mean(axis=-1, keepdims=True)) * 2 + a, (x - mean) * 2 + x, 1e-3)
        check((a * a).sum(axis=0) + 1, (x * x).sum(axis=0) + 1, 1e-4)


@given(st.data())
def test_slices_are_set_and_read(data):
    shape = data.draw(hnp.array_shapes(max_dims=3, max_side=8))
    x, a = data.draw(arrays(ALL, shape))
    index = data.draw(hnp.basic_indices(x.shape, allow_newaxis=True, allow_ellipsis=True))
    check(a[index], x[index])
    x = x.copy()
    before = np.asarray(a).copy()
    b = a[...]
    x[index] = 1
    a[index] = 1
    check(a, x)
    check(b, before)


@given(st.data())
def test_arrays_as_indices(data):
    x, a = data.draw(arrays(REAL, data.draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=8))))
    index = data.draw(hnp.integer_array_indices(x.shape, result_shape=hnp.array_shapes(max_dims=2, max_side=5), dtype=np.int64))
    check(a[tuple(va.asarray(each) for each in index)], x[index])
    check(a[va.asarray(x > 2)], x[x > 2])
    y = x.copy()
    y[y > 2] = 0
    a[a > 2] = 0
    check(a, y)


@given(st.data())
def test_order(data):
    x, a = data.draw(arrays(REAL, data.draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=40))))
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    check(va.sort(a, axis=axis), np.sort(x, axis=axis))
    check(va.argsort(a, axis=axis), np.argsort(x, axis=axis, kind="stable"))
    check(va.cumulative_sum(a, axis=axis), np.cumulative_sum(x, axis=axis), 1e-4)
    check(va.unique_values(a), np.unique(x))
    for ours, theirs in zip(va.nonzero(a > 1), np.nonzero(x > 1)):
        check(ours, theirs)


@given(st.data())
def test_products(data):
    m, k, n = (data.draw(st.integers(1, 20)) for _ in range(3))
    types = ["float32", "float64", "int32", "complex128"]
    dtype = data.draw(st.sampled_from(types))
    lead = data.draw(st.sampled_from([(), (2,), (3, 1)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    x, y = rng.integers(-4, 4, (*lead, m, k)).astype(dtype), rng.integers(-4, 4, (k, n)).astype(dtype)
    a, b = va.asarray(x), va.asarray(y)
    check(a @ b, x @ y)
    check(a @ va.asarray(np.ascontiguousarray(y.T)).T, x @ y)
    check(a[..., 0] @ b[0] if k == n and False else b.T @ va.asarray(y[:, 0]), y.T @ y[:, 0])


@pytest.mark.parametrize("n", [1, 511, 512, 513, 4096, 100_003, 1_000_000])
def test_long_arrays(n):
    x = np.arange(n, dtype="float64") % 1000
    a = va.asarray(x)
    check(a.sum(), x.sum())
    check(va.cumulative_sum(a), np.cumsum(x), 1e-9)
    check((a * 2 + 1).max(), (x * 2 + 1).max())
    check(va.sort(a[::-1]), np.sort(x))


def test_the_kernel_library():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((5, 33)).astype("float32")
    e = np.exp(x - x.max(-1, keepdims=True))
    check(va.nn.softmax(va.asarray(x)), e / e.sum(-1, keepdims=True), 1e-5)
    weight = rng.standard_normal(33).astype("float32")
    rms = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight
    check(va.nn.rms_norm(va.asarray(x), va.asarray(weight)), rms.astype("float32"), 1e-4)
    values, places = va.nn.top_k(va.asarray(x), 3)
    check(values, -np.sort(-x, -1)[:, :3])
    check(va.take_along_axis(va.asarray(x), places), np.asarray(values))


def test_random_numbers_are_those_of_their_seed():
    one, other = (va.random.Generator(7).random((3, 4)) for _ in range(2))
    check(one, other)
    draws = np.asarray(va.random.Generator(8).standard_normal(200_000))
    assert abs(draws.mean()) < 0.01 and abs(draws.std() - 1) < 0.01
    whole = np.asarray(va.random.Generator(9).integers(-3, 4, 100_000))
    assert set(whole) == set(range(-3, 4))
    assert sorted(np.asarray(va.random.Generator(1).permutation(1000))) == list(range(1000))
