"""Numbers at the ends of their types' ranges: exact remainders and comparisons, wide sums, special values."""

import numpy as np
import pytest
import vmaccel as va

FLOATS = ["float16", "float32", "float64"]


def numbers(dtype, n, seed):
    """Finite numbers of all magnitudes that a type has, and those at its ends."""
    rng = np.random.default_rng(seed)
    info = np.finfo(dtype)
    exponents = rng.uniform(np.log2(float(info.smallest_subnormal)), np.log2(float(info.max)) - 1e-3, n)
    drawn = (rng.choice([-1.0, 1.0], n) * 2.0**exponents).astype(dtype)
    ends = [info.max, info.tiny, info.smallest_subnormal, 1.0, 3.0, 0.0, np.inf, np.nan]
    drawn[: 2 * len(ends)] = [*ends, *(-each for each in np.array(ends, dtype))]
    return rng.permutation(drawn)


def same(found, expected):
    """That floats are the same, zeros with their signs."""
    found = np.asarray(found)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found[~np.isnan(found)]), np.signbit(expected[~np.isnan(expected)]))


@va.kernel
def divided(q: va.Out[va.float64], r: va.Out[va.float64], a: va.In[va.float64], b: va.In[va.float64]):
    i = va.thread_id()
    q[i], r[i] = a[i] // b[i], a[i] % b[i]


@va.kernel
def divided_single(q: va.Out[va.float32], r: va.Out[va.float32], a: va.In[va.float32], b: va.In[va.float32]):
    i = va.thread_id()
    q[i], r[i] = a[i] // b[i], a[i] % b[i]


@pytest.mark.parametrize("dtype", FLOATS)
def test_quotients_and_remainders_of_floats_are_exact(dtype):
    a, b = numbers(dtype, 20_000, 1), numbers(dtype, 20_000, 2)
    pairs = [(1e8, 3), (-1e8, 3), (1e30, 7), (1e38, 1e-3), (1e4, 3), (6e4, 7), (1e17, 3), (1e300, 7)]
    with np.errstate(all="ignore"):
        a[: len(pairs)], b[: len(pairs)] = np.array(pairs).T
        quotient, remainder = np.divmod(a, b)
    x, y = va.asarray(a), va.asarray(b)
    # The standard keeps the quotient of an infinite number, numpy does not.
    bounded = np.isfinite(a)
    same(x % y, remainder)
    same(np.asarray(x // y)[bounded], quotient[bounded])
    of_kernel = {"float32": divided_single, "float64": divided}.get(dtype)
    if of_kernel is not None:
        q, r = va.empty_like(x), va.empty_like(x)
        of_kernel[len(a)](q, r, x, y)
        same(r, remainder)
        same(q, quotient)


def test_remainders_of_bfloat16_are_exact():
    a, b = (va.asarray(numbers("float32", 5_000, seed)).astype("bfloat16") for seed in (3, 4))
    with np.errstate(all="ignore"):
        expected = np.remainder(*(np.asarray(each.astype("float32")) for each in (a, b)))
    same((a % b).astype("float32"), np.asarray(va.asarray(expected).astype("bfloat16").astype("float32")))


def narrow(values, dtype):
    return va.asarray(np.asarray(values, "float32")).astype(dtype)


WIDE = {
    "var": (lambda a: va.var(a / 2), lambda x: (x / 2).var()),
    "std": (lambda a: va.std(a), lambda x: x.std()),
    "vector_norm": (lambda a: va.linalg.vector_norm(a), lambda x: np.linalg.norm(x)),
    "vector_norm of order 3": (lambda a: va.linalg.vector_norm(a, ord=3), lambda x: np.linalg.norm(x, 3)),
    "matrix_norm": (lambda a: va.linalg.matrix_norm(a.reshape((2, -1))), lambda x: np.linalg.norm(x.reshape(2, -1))),
    "vecdot": (lambda a: va.vecdot(a[:2], va.abs(a[:2])), lambda x: x[:2] @ np.abs(x[:2])),
    "mean": (lambda a: va.mean(va.abs(a)), lambda x: np.abs(x).mean()),
    "cumulative_sum": (lambda a: va.cumulative_sum(va.ones_like(a))[-1], lambda x: np.float64(len(x))),
    "cumulative_sum along columns": (lambda a: va.cumulative_sum(va.ones_like(a).reshape((-1, 2)), axis=0)[-1, 0], lambda x: np.float64(len(x) // 2)),
    "cumulative_prod": (lambda a: va.cumulative_prod(a[:4] * va.asarray([1.0, 1, 1e-3, 1e-3]))[-1].astype(a.dtype), lambda x: np.prod(x[:4]) * 1e-6),
    "log_softmax": (lambda a: va.nn.log_softmax(va.zeros((1, 100_000), dtype=a.dtype))[0, 7], lambda x: -np.log(1e5)),
    "log_softmax along columns": (lambda a: va.nn.log_softmax(va.zeros((100_000, 2), dtype=a.dtype), axis=0)[7, 1], lambda x: -np.log(1e5)),
    "softmax": (lambda a: va.nn.softmax(va.zeros((4096, 2), dtype=a.dtype), axis=0)[7, 1], lambda x: 1 / 4096),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", WIDE)
def test_narrow_floats_are_accumulated_in_float32(name, dtype):
    x = np.tile(np.array([300.0, -280.0], "float32"), 3000)
    function, expected = WIDE[name]
    a = narrow(x, dtype)
    found = function(a)
    assert found.dtype == dtype
    exact = expected(np.asarray(a.astype("float64")))
    np.testing.assert_allclose(found.item(), exact, rtol=8e-3)


SUMS = {
    "of all": (lambda a, n: va.sum(a[:n]), 1 << 23),
    "of each second": (lambda a, n: va.sum(a[: 2 * n : 2]), 1 << 22),
    "of rows": (lambda a, n: va.sum(a[: 3 * n].reshape((3, n)), axis=1), 1 << 21),
    "of columns": (lambda a, n: va.sum(a[: 8 * n].reshape((n, 8)), axis=0), 1 << 20),
    "of a function": (lambda a, n: va.sum((a * 2.0)[:n]) / 2, 1 << 23),
    "of complex numbers": (lambda a, n: va.real(va.sum(a[:n].astype("complex64"))), 1 << 22),
    "mean": (lambda a, n: va.mean(a[:n]) * float(n), 1 << 23),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_floats_are_as_exact_as_pairwise_ones(name):
    function, n = SUMS[name]
    a = va.asarray(np.full(1 << 23, 0.1, "float32"))
    np.testing.assert_allclose(np.asarray(function(a, n)), n * float(np.float32(0.1)), rtol=4e-7)


def test_norms_and_softmax_of_long_rows_are_exact():
    # Mostly of one sign, so that what a sum loses adds up.
    x = np.random.default_rng(3).uniform(0.5, 1, (1, 1 << 22)).astype("float32")
    exact, ones = x.astype("float64"), va.asarray(np.ones(x.shape[-1], "float32"))
    mean = exact.mean()
    cases = [
        (va.nn.rms_norm(va.asarray(x), ones), exact / np.sqrt((exact**2).mean() + 1e-6)),
        (va.nn.layer_norm(va.asarray(x), ones), (exact - mean) / np.sqrt(((exact - mean) ** 2).mean() + 1e-5)),
        (va.nn.softmax(va.asarray(x)), np.exp(exact) / np.exp(exact).sum()),
    ]
    for found, expected in cases:
        np.testing.assert_allclose(np.asarray(found), expected, rtol=2e-6, atol=2e-6 * np.abs(expected).max())


def test_sums_of_infinite_numbers_are_infinite():
    for value in (np.inf, -np.inf, 3e38, -3e38):
        assert va.sum(va.asarray(np.full(5000, value, "float32"))).item() == np.copysign(np.inf, value)
    assert np.isnan(va.sum(va.asarray(np.array([np.inf, -np.inf] * 1000))).item())


def attended(q, k, v, bias=0.0, scale=None):
    """Attention of [batch, tokens, heads, dim] with a score's rounding to float32; keys and values are of as many heads."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with np.errstate(over="ignore", invalid="ignore"):
        scores = (np.einsum("bthd,bshd->bhts", *(each.astype("f8") for each in (q, k))) * scale + bias).astype("f4").astype("f8")
        most = scores.max(-1, keepdims=True)
        powers = np.exp(scores - np.where(np.isinf(most), 0, most))
    total = powers.sum(-1, keepdims=True)
    return np.einsum("bhts,bshd->bthd", powers / np.where(total > 0, total, 1), v.astype("f8"))


def close(found, expected, rtol=1e-5):
    np.testing.assert_allclose(np.asarray(found.astype("float32")), expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("tokens", [6, 150])
@pytest.mark.parametrize("low", [-np.inf, np.finfo("f4").min, -3e38, -1e30, -1e9, -1e4])
def test_rows_that_finite_numbers_mask_are_means(low, tokens):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, tokens, heads, 8)).astype("f4") for heads in (2, 1, 1))
    bias = np.where(np.tri(tokens, dtype=bool), 0, low).astype("f4")
    bias[2] = low
    found = va.kernels.mqa_attention(*map(va.asarray, (q, k[:, :, 0], v[:, :, 0], bias)))
    close(found, attended(q, np.repeat(k, 2, 2), np.repeat(v, 2, 2), bias))


@pytest.mark.parametrize("size", [1e2, 1e6, 1e10, 1e20, 1e30, 3e38])
@pytest.mark.parametrize("tokens", [3, 300])
def test_attention_to_the_largest_scores(size, tokens):
    rng = np.random.default_rng(2)
    v = rng.standard_normal((1, tokens, 1, 64)).astype("f4")
    q, k = np.zeros_like(v), np.zeros_like(v)
    q[..., 0], k[..., 0] = size, 1.0
    # Some scores are a little less, and the greatest is not the first.
    k[0, ::3, 0, 0] = 1 - 2**-20
    k[0, 1, 0, 0] = 0.5
    for scale in (1.0, 0.125):
        expected = attended(q, k, v, scale=scale)
        close(va.nn.attention(*map(va.asarray, (q, k, v)), scale=scale), expected)
        close(va.kernels.flash_attention(*map(va.asarray, (q, k, v)), scale=scale), expected)


INF, NAN = np.inf, np.nan
POINTS = [0j, 1 + 0j, -1 + 0j, 1j, -1j, complex(-0.0, 0), complex(0, -0.0), complex(-4, 0.0), complex(-4, -0.0), complex(4, 0.0), complex(4, -0.0)]
POINTS += [complex(0.0, 4), complex(-0.0, 4), complex(0.0, -4), complex(-0.0, -4), 3e200 + 4e200j, 1e-200 + 1e-200j, 1e308 + 1e308j, 1e-310 + 1e-310j]
POINTS += [complex(INF, 1), complex(1, INF), complex(-INF, 2), complex(2, -INF), complex(NAN, INF), complex(INF, NAN), complex(-INF, NAN), complex(NAN, 1)]
POINTS += [complex(0, NAN), complex(NAN, 0), complex(1e-9, NAN), complex(NAN, 1e-9), 1e-9 + 2e-9j]
INVERSE = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh"}


@pytest.mark.parametrize("name", ["sqrt", "sign", "square", "log1p", *INVERSE])
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_complex_functions_at_the_ends(name, point):
    z = np.array([point])
    with np.errstate(all="ignore"):
        expected = getattr(np, INVERSE.get(name, name))(z)
    # Where numpy's rounds to 0 or overflows.
    if name == "log1p" and 0 < abs(point) < 1e-6:
        expected = z - z * z / 2
    if name == "log1p" and 1e300 < abs(point) < INF:
        expected = np.log(z)
    if name == "square" and point == 1e308 + 1e308j:
        expected = np.array([complex(0, INF)])
    found = np.asarray(getattr(va, name)(va.asarray(z)))
    np.testing.assert_allclose(found.view("f8"), expected.view("f8"), rtol=1e-12, atol=1e-320)
    finite = np.isfinite(expected.view("f8"))
    np.testing.assert_array_equal(np.signbit(found.view("f8")[finite]), np.signbit(expected.view("f8")[finite]))


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
COMPARISONS = {"equal": "__eq__", "not_equal": "__ne__", "less": "__lt__", "less_equal": "__le__", "greater": "__gt__", "greater_equal": "__ge__"}


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", COMPARISONS)
def test_integers_are_compared_with_any_integer(dtype, name):
    info = np.iinfo(dtype)
    x = np.array([info.min, 0, 7, info.max], dtype)
    a = va.asarray(x)
    for k in (info.max + 1, info.min - 1, info.max, info.min, 2**70, -(2**70), 2**200, -(2**200)):
        expected = np.array([getattr(int(each), COMPARISONS[name])(k) for each in x])
        np.testing.assert_array_equal(np.asarray(getattr(a, COMPARISONS[name])(k)), expected)
        np.testing.assert_array_equal(np.asarray(getattr(va, name)(a, k)), expected)
        turned = np.array([getattr(k, COMPARISONS[name])(int(each)) for each in x])
        np.testing.assert_array_equal(np.asarray(getattr(va, name)(k, a)), turned)
        if not info.min <= k <= info.max:
            with pytest.raises(OverflowError):
                a + k


@pytest.mark.parametrize("name", COMPARISONS)
def test_integers_of_different_signs_are_compared_exactly(name):
    x = np.array([2**53 + 1, 2**63, 5, 2**64 - 1, 0, 2**63 - 1], "uint64")
    y = np.array([2**53, -(2**63), 5, -1, -1, 2**63 - 1], "int64")
    for a, b in ((x, y), (y, x), (x, y.astype("int8")), (y.astype("int16"), x)):
        expected = [getattr(int(one), COMPARISONS[name])(int(other)) for one, other in zip(a, b)]
        assert getattr(va, name)(va.asarray(a), va.asarray(b)).tolist() == expected


def test_clip_by_bounds_of_wider_types():
    x = np.array([100, -100, 5], "int8")
    wide = lambda value, dtype: va.asarray(np.array(value, dtype))  # noqa: E731
    a = va.asarray(x)
    for low, high, dtype in ((-300, 300, "int32"), (-300, 50, "int64"), (200, 300, "int16")):
        found = va.clip(a, wide(low, dtype), wide(high, dtype))
        assert found.dtype == "int8"
        assert found.tolist() == [min(max(int(each), low, -128), high, 127) for each in x]
    assert va.clip(a, None, wide(2**64 - 1, "uint64")).tolist() == x.tolist()
    assert va.clip(wide([0, 3, 200], "uint8"), wide(-1, "int16"), wide(4, "int16")).tolist() == [0, 3, 4]
    assert va.clip(va.arange(5), wide(0.5, "float64"), wide(2.5, "float64")).tolist() == [0.5, 1, 2, 2.5, 2.5]


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint64", "float16", "float32", "float64", "complex64", "bool"])
def test_scalars_of_numpy_keep_their_type(dtype):
    scalar = np.ones((), dtype)[()]
    assert va.full(2, scalar).dtype == dtype
    assert va.asarray(scalar).dtype == dtype
    assert va.asarray([scalar, scalar]).dtype == dtype
    for other in ("int16", "float32"):
        expected = np.ones(2, other) * scalar
        for found in (va.ones(2, dtype=other) * scalar, va.multiply(scalar, va.ones(2, dtype=other))):
            assert str(found.dtype) == str(expected.dtype)
        chosen = va.where(va.asarray([True, False]), va.ones(2, dtype=other), scalar)
        assert str(chosen.dtype) == str(expected.dtype)


def test_integers_of_numpy_are_taken_as_pythons_are():
    one, a, x = np.int64(1), va.asarray(np.arange(6.0).reshape(2, 3)), np.arange(6.0).reshape(2, 3)
    for found, expected in (
        (va.arange(np.int64(5)), np.arange(5)),
        (va.arange(np.uint8(5), np.int8(0), np.int8(-1)), np.arange(5, 0, -1)),
        (va.sum(a, axis=one), x.sum(axis=1)),
        (va.mean(a, axis=one), x.mean(axis=1)),
        (va.var(a, axis=(one,)), x.var(axis=1)),
        (va.flip(a, axis=one), np.flip(x, 1)),
        (va.roll(a, one, axis=one), np.roll(x, 1, 1)),
        (va.expand_dims(a, axis=one), x[:, None]),
        (va.squeeze(a[:, None], axis=one), x),
        (va.moveaxis(a, one, np.int32(0)), np.moveaxis(x, 1, 0)),
        (va.tile(a, np.int64(2)), np.tile(x, 2)),
        (va.repeat(a, np.int64(2)), np.repeat(x, 2)),
        (va.reshape(a, np.int64(6)), x.reshape(6)),
        (va.tensordot(a, a.mT, axes=one), np.tensordot(x, x.T, 1)),
        (a[one], x[1]),
        (va.zeros((one, np.int8(2))), np.zeros((1, 2))),
        (va.fft.fftshift(a, axes=one), np.fft.fftshift(x, axes=1)),
    ):
        np.testing.assert_allclose(np.asarray(found), expected)
        assert np.asarray(found).dtype == expected.dtype


def test_truth_values_are_divided_as_numbers():
    x = np.array([True, False])
    for found, expected in ((va.asarray(x) // True, x // True), (va.asarray(x) ** va.asarray(x), x**x), (va.asarray(x) % True, x % True)):
        assert str(found.dtype) == str(expected.dtype) == "int8"
        np.testing.assert_array_equal(np.asarray(found), expected)
    quotient, remainder = divmod(va.asarray([-7, 7]), va.asarray([2, -2]))
    assert (quotient.tolist(), remainder.tolist()) == ([-4, -4], [1, -1])
    quotient, remainder = divmod(7, va.asarray([2, -2]))
    assert (quotient.tolist(), remainder.tolist()) == ([3, -4], [1, -1])


@pytest.mark.parametrize("dtype", ["int64", "bool", "int8", "uint32"])
def test_transforms_of_integers_are_of_float64(dtype):
    x = np.array([1, 0, 1, 1, 0], dtype)
    for name in ("fft", "rfft", "ihfft"):
        found = np.asarray(getattr(va.fft, name)(va.asarray(x)))
        assert found.dtype == "complex128"
        np.testing.assert_allclose(found, getattr(np.fft, name)(x), rtol=1e-14, atol=1e-14)


COMPLEX = lambda: va.asarray([1 + 2j])  # noqa: E731
HUGE = lambda: va.broadcast_to(va.ones(1), (2**38,))  # noqa: E731
REFUSED = {
    "a host's memory for a sort": (MemoryError, lambda: va.sort(HUGE())),
    "a host's memory for a transform": (MemoryError, lambda: va.fft.fft(HUGE())),
    "a device's memory": (MemoryError, lambda: va.empty(2**38).evaluate()),
    "complex to float": (TypeError, lambda: va.astype(COMPLEX(), "float64")),
    "complex to integer": (TypeError, lambda: COMPLEX().astype("int64")),
    "a sum of complex numbers in float": (TypeError, lambda: va.sum(COMPLEX(), dtype="float32")),
    "a scan of complex numbers in float": (TypeError, lambda: va.cumulative_sum(COMPLEX(), dtype="float32")),
    "complex elements of floats": (TypeError, lambda: va.zeros(1).__setitem__(slice(None), COMPLEX())),
    "a complex fill value": (TypeError, lambda: va.full(2, 1j, dtype="float64")),
    "complex numbers in a list": (TypeError, lambda: va.asarray([1j], dtype="float32")),
    "NaN as an integer": (ValueError, lambda: va.full(2, NAN, dtype="int32")),
    "an infinite number as an integer": (ValueError, lambda: va.asarray([INF], dtype="uint8")),
    "a float beyond an integer": (OverflowError, lambda: va.full(2, 300.0, dtype="int8")),
    "a scalar of numpy's beyond an integer": (OverflowError, lambda: va.zeros(2, dtype="int8").__setitem__(0, np.int64(300))),
    "a negative repetition": (ValueError, lambda: va.repeat(va.arange(3), -1)),
    "negative repetitions": (ValueError, lambda: va.repeat(va.arange(3), va.asarray([1, -1, 1]))),
    "a negative tile": (ValueError, lambda: va.tile(va.arange(3), -1)),
    "more shifts than axes": (ValueError, lambda: va.roll(va.ones((2, 3)), (1, 2), axis=(0,))),
    "more axes than shifts": (ValueError, lambda: va.roll(va.ones((2, 3, 4)), (1, 2), axis=(0, 1, 2))),
    "irfft of one element": (ValueError, lambda: va.fft.irfft(va.ones(1))),
    "a target beyond int32": (ValueError, lambda: va.nn.cross_entropy(va.ones((1, 4)).astype("float32"), va.asarray([2**32 + 1]))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_type_has_is_refused(name):
    error, call = REFUSED[name]
    with pytest.raises(error):
        call()
