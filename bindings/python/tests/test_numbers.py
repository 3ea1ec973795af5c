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
