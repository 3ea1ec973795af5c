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
