"""`vmaccel.kernels`: each function against its definition in numpy, in every type, and what it says of arguments that can't be."""

import inspect
import math
import re

import numpy as np
import pytest

import vmaccel as va
from vmaccel import kernels

TYPES = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def scores(q, k, scale, is_causal):
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * (scale or q.shape[-1] ** -0.5)
    return np.where(np.tri(s.shape[-1], dtype=bool) | (not is_causal), s, -np.inf)


def attention(q, k, v, scale=None, is_causal=False):
    return np.einsum("bhqk,bkhd->bqhd", softmax(scores(q, k, scale, is_causal)), v)


def log_sums(q, k, scale=None, is_causal=False):
    return np.log(np.exp(scores(q, k, scale, is_causal)).sum(-1))


def attention_backward(q, k, v, output, sums, doutput, scale=None, is_causal=False):
    p = np.exp(scores(q, k, scale, is_causal) - sums[..., None])
    dp = np.einsum("bqhd,bkhd->bhqk", doutput, v)
    ds = p * (dp - np.einsum("bqhd,bqhd->bhq", doutput, output)[..., None]) * (scale or q.shape[-1] ** -0.5)
    return np.einsum("bhqk,bkhd->bqhd", ds, k), np.einsum("bhqk,bqhd->bkhd", ds, q), np.einsum("bhqk,bqhd->bkhd", p, doutput)


def mqa(q, k, v, mask=0, scale=None):
    s = np.einsum("bqhd,bkd->bhqk", q, k) * (scale or q.shape[-1] ** -0.5) + mask
    return np.einsum("bhqk,bkd->bqhd", softmax(s), v)


def turned(x, freqs):
    a, b = np.split(x, 2, axis=-1)
    angles = (np.arange(x.shape[1])[:, None] * freqs)[:, None]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1)


def adamw(param, grad, m, v, lr, step, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01):
    m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad**2
    change = m / (1 - beta1**step) / (np.sqrt(v / (1 - beta2**step)) + eps)
    return param * (1 - lr * weight_decay) - lr * change, m, v


def grad_clip(grad, clip_norm):
    norm = np.sqrt((grad**2).sum())
    return grad * min(1, clip_norm / (norm + 1e-6)), norm


def scatter_add(x, indices, output):
    for at in np.ndindex(indices.shape):
        if 0 <= indices[at] < len(output):
            output[indices[at]] += x[at]
    return output


def aux_loss(probs, indices, alpha):
    n = probs.shape[-1]
    counts = np.bincount(indices.ravel(), minlength=n).astype(float)
    means = probs.reshape(-1, n).mean(0)
    return alpha * n * (counts / indices.size * means).sum(), counts, means


def phi(x):
    return (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def gelu_tanh(x):
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def slope(f, x):
    return (f(x + 1e-5) - f(x - 1e-5)) / 2e-5


def silu(x):
    return x / (1 + np.exp(-x))


def layernorm(x, weight, bias, eps=1e-5, statistics=False):
    mean, rstd = x.mean(-1), 1 / np.sqrt(x.var(-1) + eps)
    y = (x - mean[..., None]) * rstd[..., None] * weight + bias
    return (y, mean, rstd) if statistics else y


def layernorm_backward(x, weight, dy, mean, rstd):
    h = (x - mean[..., None]) * rstd[..., None]
    g = dy * weight
    dx = (g - g.mean(-1, keepdims=True) - h * (g * h).mean(-1, keepdims=True)) * rstd[..., None]
    rows = tuple(range(x.ndim - 1))
    return dx, (dy * h).sum(rows), dy.sum(rows)


def topk(x, k):
    at = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(x, at, -1), at


def cross_entropy(logits, targets, log_probs=False):
    logs = np.log(softmax(logits))
    loss = -np.take_along_axis(logs, np.maximum(targets, 0)[..., None], -1)[..., 0] * (targets != -100)
    return (loss, logs) if log_probs else loss


def cross_entropy_backward(logits, targets, dloss):
    one = np.arange(logits.shape[-1]) == targets[..., None]
    return (softmax(logits) - one) * (dloss * (targets != -100))[..., None]


def best(logits, *_, **__):
    return logits.argmax(-1)


RANDOM = np.random.default_rng(7)


class T(tuple):
    """The shape of an array of the call's type."""


def floats(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def ints(low, high, *shape):
    return RANDOM.integers(low, high, shape, dtype=np.int32)


Q, K1 = T((2, 5, 3, 8)), T((2, 5, 8))
SEEDS = np.arange(3, dtype=np.int64)
TARGETS = np.array([[3, -100], [0, 10]], dtype=np.int32)

# A function's name, its arrays, its other arguments, and what it is.
CASES = [
    ("gemm", [T((5, 7)), T((7, 3))], {}, lambda a, b: a @ b),
    ("gemm", [T((5, 8)), T((8, 16)), T((5, 16))], {"alpha": 0.5, "beta": -2}, lambda a, b, c, alpha, beta: alpha * a @ b + beta * c),
    ("gemm", [T((5, 7)), T((7, 3)), T((5, 3))], {"alpha": 2}, lambda a, b, c, alpha: alpha * a @ b),
    ("gemm_batched", [T((4, 5, 7)), T((4, 7, 3))], {}, lambda a, b: a @ b),
    ("gemm_batched", [T((2, 5, 7)), T((2, 7, 3)), T((2, 5, 3))], {"beta": 1.5}, lambda a, b, c, beta: a @ b + beta * c),
    ("linear", [T((2, 3, 7)), T((5, 7))], {}, lambda x, w: x @ w.T),
    ("linear", [T((7,)), T((5, 7)), T((5,))], {}, lambda x, w, b: x @ w.T + b),
    ("transpose", [T((5, 7))], {}, lambda x: x.T),
    ("embedding", [T((6, 5)), ints(0, 6, 3, 4)], {}, lambda x, i: x[i]),
    ("embedding", [T((2, 5)), np.array([1, 2, -1], dtype=np.int32)], {}, lambda x, i: x[[1, 0, 0]] * [[1], [0], [0]]),
    ("mqa_attention", [Q, K1, K1], {}, mqa),
    ("mqa_attention", [Q, K1, K1, np.where(np.tri(5), 0, -np.inf).astype(np.float32)], {"scale": 0.7}, mqa),
    ("flash_attention", [Q, Q, Q], {}, attention),
    ("flash_attention", [Q, Q, Q], {"scale": 0.7, "is_causal": True}, attention),
    ("flash_attention_lse", [Q, Q, Q], {"is_causal": True}, lambda q, k, v, is_causal: (attention(q, k, v, None, True), log_sums(q, k, None, True))),
    ("rope", [Q, Q, floats(4)], {}, lambda q, k, freqs: (turned(q, freqs), turned(k, freqs))),
    ("adamw_step", [T((4, 5)), T((4, 5)), floats(4, 5), floats(4, 5) ** 2], {"lr": 0.1, "step": 3}, adamw),
    ("adamw_step", [T((9,)), T((9,)), floats(9), floats(9) ** 2], {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1, "step": 1}, adamw),
    ("grad_clip", [T((4, 5))], {"clip_norm": 0.5}, grad_clip),
    ("grad_clip", [T((4, 5))], {"clip_norm": 50}, grad_clip),
    ("scatter_add", [T((2, 4, 5)), ints(-1, 7, 2, 4), floats(6, 5)], {}, scatter_add),
    ("zero_grad", [T((4, 5))], {}, np.zeros_like),
    ("aux_loss_forward", [T((2, 7, 6)), ints(0, 6, 2, 7, 2)], {"alpha": 0.5}, aux_loss),
    ("silu", [T((4, 5))], {}, silu),
    ("add", [T((4, 5)), T((4, 5))], {}, np.add),
    ("mul", [T((4, 5)), T((4, 5))], {}, np.multiply),
    ("scale", [T(())], {"scale": 2.5}, lambda x, scale: x * scale),
    ("gelu", [T((4, 5))], {}, lambda x: x * phi(x)),
    ("gelu_tanh", [T((4, 5))], {}, gelu_tanh),
    ("silu_backward", [T((4, 5)), T((4, 5))], {}, lambda dy, x: dy * slope(silu, x)),
    ("gelu_backward", [T((4, 5)), T((4, 5))], {}, lambda dy, x: dy * slope(lambda x: x * phi(x), x)),
    ("gelu_tanh_backward", [T((4, 5)), T((4, 5))], {}, lambda dy, x: dy * slope(gelu_tanh, x)),
    ("softmax", [T((2, 3, 11))], {}, softmax),
    ("softmax", [T((8,))], {}, softmax),
    ("rmsnorm", [T((2, 3, 11)), T((11,))], {"eps": 0.1}, lambda x, w, eps: x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w),
    ("layernorm", [T((2, 3, 11)), T((11,)), T((11,))], {}, layernorm),
    ("layernorm", [T((2, 3, 11)), T((11,)), T((11,))], {"statistics": True, "eps": 0.1}, layernorm),
    ("topk", [T((2, 3, 11))], {"k": 4}, topk),
    ("softmax_topk", [T((3, 11))], {"k": 4}, lambda x, k: topk(softmax(x), k)),
    ("cross_entropy_forward", [T((2, 2, 11)), TARGETS], {}, cross_entropy),
    ("cross_entropy_forward", [T((2, 2, 11)), TARGETS], {"log_probs": True}, cross_entropy),
    ("cross_entropy_backward", [T((2, 2, 11)), TARGETS, floats(2, 2)], {}, cross_entropy_backward),
    ("argmax", [T((2, 3, 11))], {}, best),
    ("argmax", [T((11,))], {}, best),
    ("sample", [T((3, 11)), SEEDS], {"temperature": 0}, best),
    ("topk_sample", [T((3, 11)), SEEDS], {"k": 1}, best),
    ("topp_sample", [T((3, 11)), SEEDS], {"top_p": 1e-6}, best),
]  # fmt: skip


def given(arrays, dtype):
    """Arrays on the device, and what they hold in float64."""
    made = [va.asarray(floats(*x)).astype(dtype) if isinstance(x, T) else va.asarray(x) for x in arrays]
    return made, [known(x) for x in made]


def known(x):
    x = np.asarray(x.astype("float32") if "float" in str(x.dtype) else x)
    return x.astype(np.float64) if x.dtype.kind == "f" else x.copy()


def check(name, made, kwargs, wanted, dtype):
    before = [known(x) for x in made]
    found = getattr(kernels, name)(*made, **kwargs)
    several = isinstance(found, tuple)
    assert several == isinstance(wanted, tuple)
    pairs = list(zip(found, wanted)) if several else [(found, wanted)]
    assert not several or len(found) == len(wanted)
    for one, want in pairs:
        assert one.shape == np.shape(want)
        np.testing.assert_allclose(known(one), want, rtol=TYPES[dtype], atol=TYPES[dtype])
    for x, was in zip(made, before):
        assert np.array_equal(known(x), was), "what is given does not change"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_definitions(case, dtype):
    name, arrays, kwargs, reference = case
    made, numbers = given(arrays, dtype)
    check(name, made, kwargs, reference(*numbers, **kwargs), dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_gradients_of_what_was_computed_before(dtype):
    (q, k, v, dy), numbers = given([Q] * 4, dtype)
    y, sums = kernels.flash_attention_lse(q, k, v, is_causal=True)
    wanted = attention_backward(*numbers[:3], known(y), known(sums), numbers[3], None, True)
    check("flash_attention_backward", [q, k, v, y, sums, dy], {"is_causal": True}, wanted, dtype)
    (x, weight, bias, dy), _ = given([T((2, 3, 11)), T((11,)), T((11,)), T((2, 3, 11))], dtype)
    _, mean, rstd = kernels.layernorm(x, weight, bias, statistics=True)
    made = [x, weight, dy, mean, rstd]
    check("layernorm_backward", made, {}, layernorm_backward(*map(known, made)), dtype)


def test_draws_repeat_and_follow_probabilities():
    logits = va.asarray(np.tile(np.log([0.1, 0.6, 0.3]).astype(np.float32), (4000, 1)))
    seeds = va.asarray(np.arange(4000))
    for draw, wanted in [
        (kernels.sample, [0.1, 0.6, 0.3]),
        (lambda *x: kernels.topk_sample(*x, k=2), [0, 2 / 3, 1 / 3]),
        (lambda *x: kernels.topp_sample(*x, top_p=0.8), [0, 2 / 3, 1 / 3]),
    ]:
        found = np.asarray(draw(logits, seeds))
        assert np.array_equal(found, np.asarray(draw(logits, seeds)))
        assert np.allclose(np.bincount(found, minlength=3) / 4000, wanted, atol=0.04)


def test_every_function_is_checked():
    checked = {case[0] for case in CASES} | {"flash_attention_backward", "layernorm_backward"}
    assert checked == set(kernels.__all__)


def stated(name):
    """The shapes and types of a function's arrays and of its results, as it says them."""
    takes, gives = getattr(kernels, name).__doc__.split("    Takes\n")[1].split("    Gives\n")
    found = []
    for lines in (takes, gives):
        found.append([])
        for names, shape, dtype, more in re.findall(r"^ +([\w, ]+): \[(.*?)\](?: of (\w+))?(.*)$", lines, re.M):
            found[-1] += [(one, shape.split(", ") if shape else [], dtype or "float32", more) for one in names.split(", ")]
    return found


EXTENTS = {"head_dim": 8, "dim": 6, "n_heads": 2, "k": 3, "top_k": 2}
NUMBERS = {"k": 3, "lr": 0.1, "step": 1, "clip_norm": 1.0, "alpha": 1.0, "scale": 1.0, "top_p": 0.9}


def arguments(name, extents):
    """Arguments of a function, with extents that are named and 4 for others, and the shapes of its results."""

    def extent(text):
        is_half = text.endswith(" / 2")
        of = text.removesuffix(" / 2").removesuffix("...") if hasattr(str, "removesuffix") else text.split(" ")[0].rstrip(".")
        return {**EXTENTS, **extents}.get(of, 4) // (2 if is_half else 1)

    takes, gives = stated(name)
    arrays = {one: va.zeros([extent(text) for text in shape], dtype=dtype) for one, shape, dtype, _ in takes}
    parameters = inspect.signature(getattr(kernels, name)).parameters.values()
    numbers = [one for one in parameters if one.kind == one.KEYWORD_ONLY and one.default is one.empty]
    numbers = {one.name: NUMBERS[one.name] for one in numbers}
    return {**arrays, **numbers}, [tuple(extent(text) for text in shape) for _, shape, _, more in gives if not more]


@pytest.mark.parametrize("name", kernels.__all__)
def test_empty_arrays(name):
    names = {text.split(" ")[0].rstrip(".") for _, shape, _, _ in stated(name)[0] for text in shape}
    worked = 0
    for empty in [{}, *({one: 0} for one in names), dict.fromkeys(names, 0)]:
        values, wanted = arguments(name, empty)
        if "k" in values and name in ("topk", "softmax_topk") and empty:
            values["k"] = 0
            wanted = [shape[:-1] + (0,) for shape in wanted]
        try:
            found = getattr(kernels, name)(**values)
        except ValueError as error:
            assert empty and str(error).startswith(f"{name}: "), error
            continue
        found = found if isinstance(found, tuple) else (found,)
        assert [one.shape for one in found] == wanted
        [np.asarray(one) for one in found]
        worked += 1
    assert worked > 1


HOSTILE = [
    None, True, 0, -1, 2**31, 2**70, 2**400, 1.5, float("nan"), float("inf"), 1j, "text", b"", [], [1.0], object(), np.zeros(3), np.float32(2), len,
    lambda: va.zeros(()), lambda: va.zeros(0, dtype="float32"), lambda: va.zeros((3, 0, 2), dtype="float16"), lambda: va.zeros((4, 4), dtype="int8"),
    lambda: va.zeros((4, 4), dtype="bool"), lambda: va.zeros((4, 4), dtype="complex64"), lambda: va.zeros((4,) * 9, dtype="float32")[:1],
    lambda: va.asarray(np.array([2**31 - 1, -(2**31)] * 2, dtype=np.int32)),
]  # fmt: skip


@pytest.mark.parametrize("name", kernels.__all__)
def test_nothing_but_type_and_value_errors(name):
    function = getattr(kernels, name)
    values, _ = arguments(name, {})
    function(**values)
    refused = 0
    for parameter in inspect.signature(function).parameters:
        for bad in HOSTILE:
            bad = bad() if callable(bad) and bad is not len else bad
            try:
                found = function(**{**values, parameter: bad})
            except (TypeError, ValueError) as error:
                assert str(error).startswith(f"{name}: "), error
                refused += 1
                continue
            [np.asarray(one) for one in (found if isinstance(found, tuple) else (found,))]
    assert refused > 10


ONES = va.ones((2, 3), dtype="float32")


@pytest.mark.parametrize(
    ("act", "error", "text"),
    [
        (lambda: kernels.silu(None), TypeError, "silu: input is None: it must be an array"),
        (lambda: kernels.silu([1.0]), TypeError, "silu: input is a list: it must be an array"),
        (lambda: kernels.silu(va.zeros(3)), TypeError, "silu: input is float64: it must be float32, bfloat16 or float16"),
        (lambda: kernels.add(ONES, ONES.astype("float16")), TypeError, "add: b is float16: it must be float32, as a is"),
        (lambda: kernels.embedding(ONES, va.zeros(3, dtype="int64")), TypeError, "embedding: indices is int64: it must be int32"),
        (lambda: kernels.add(ONES, ONES.T), ValueError, "add: b is [3, 2]: it must be [n...], which is [2, 3] here"),
        (lambda: kernels.transpose(ONES[0]), ValueError, "transpose: input is [3]: it must be [rows, cols]"),
        (lambda: kernels.gemm(ONES, ONES), ValueError, "gemm: b is [2, 3]: it must be [K, N], which is [3, 3] here"),
        (lambda: kernels.gemm(ONES, ONES.T, beta=1), TypeError, "gemm: c is None: it must be an array, as it is read"),
        (lambda: kernels.topk(ONES, k=4), ValueError, "topk: k is 4: it must be at most dim, which is 3"),
        (lambda: kernels.topk(ONES, k=-1), ValueError, "topk: k is -1: it must not be negative"),
        (lambda: kernels.topk(ONES, k=2**40), ValueError, "topk: k is 1099511627776: it must be at most 2147483647"),
        (lambda: kernels.topk(ONES, k=1.0), TypeError, "topk: k is a float: it must be an integer"),
        (lambda: kernels.scale(ONES, scale="x"), TypeError, "scale: scale is a str: it must be a number"),
        (lambda: kernels.layernorm(ONES, ONES[0], ONES[0], statistics=3), TypeError, "layernorm: statistics is an int: it must be True or False"),
    ],
)
def test_errors_name_the_argument(act, error, text):
    with pytest.raises(error) as raised:
        act()
    assert str(raised.value) == text


def test_values_are_computed_where_arrays_are():
    x = va.ones((2, 8), dtype="float32")
    with va.stream():
        doubled = kernels.add(x, x)
    assert (doubled + x).sum().item() == 48
    # Views, and what is not computed yet.
    assert np.array_equal(known(kernels.add((x * 3)[:, ::2], x[:, 1::2])), np.full((2, 4), 4.0))


def test_functions_of_networks():
    (x, weight, bias), (a, w, b) = given([T((2, 2, 11)), T((11,)), T((11,))], "float32")
    np.testing.assert_allclose(known(va.nn.layer_norm(x, weight)), layernorm(a, w, 0), rtol=1e-4, atol=1e-4)
    half = bias.astype("float16")
    np.testing.assert_allclose(known(va.nn.layer_norm(x, weight, half)), layernorm(a, w, known(half)), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(known(va.nn.cross_entropy(x, va.asarray(TARGETS.astype(np.int64)))), cross_entropy(a, TARGETS), rtol=1e-4, atol=1e-4)
    values, places = va.nn.top_k(x, 3)
    assert places.dtype == va.int64 and np.array_equal(known(places), topk(a, 3)[1]) and values.shape == (2, 2, 3)
