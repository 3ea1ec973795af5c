"""Own kernels: each construct beside the same function run by the interpreter over numpy, each refusal with its line."""

import linecache
import math
import types

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import vmaccel as va

N = 37
F32, F64 = np.float32, np.float64
CASES = []


def case(tolerance=0.0, grid=(N,), **arrays):
    """A kernel with its arrays, which is run both ways."""

    def add(function):
        CASES.append(pytest.param(function, grid, arrays, tolerance, id=function.__name__))
        return function

    return add


def interpreted(function, grid, arguments):
    """The function for each place of the grid, by the interpreter."""
    at = {}

    def replace(array, index, value):
        before = array[index]
        array[index] = value
        return before

    place = types.SimpleNamespace(
        thread_id=lambda axis=None: at["is"][axis or 0] if axis is not None or len(grid) == 1 else at["is"],
        atomic_add=lambda array, index, value: replace(array, index, array[index] + value),
        atomic_max=lambda array, index, value: replace(array, index, max(array[index], value)),
        atomic_min=lambda array, index, value: replace(array, index, min(array[index], value)),
        exp=np.exp, tanh=np.tanh, maximum=np.maximum, minimum=np.minimum, round=np.round, copysign=np.copysign, isnan=np.isnan,
        **{each: getattr(np, each) for each in ("int8", "uint8", "int32", "int64", "uint32", "float16", "float32", "float64")},
    )  # fmt: skip
    run = types.FunctionType(function.__code__, {**function.__globals__, "va": place}, closure=function.__closure__)
    with np.errstate(all="ignore"):
        for index in np.ndindex(*grid):
            at["is"] = index
            run(*arguments)


def floats(n=N, seed=0, dtype=F64):
    return np.random.default_rng(seed).normal(0, 3, n).astype(dtype)


def ints(n=N, seed=0, dtype=np.int32, low=-40, high=40):
    return np.random.default_rng(seed).integers(low, high, n).astype(dtype)


@va.device_function
def clamp(x, low, high=2.0):
    if x < low:
        return low
    if x > high:
        return high
    return x


@va.device_function
def total(x, n):
    s = 0.0
    for i in range(n):
        s += x[i]
    return s


SCALE, LIMIT = 2.5, 7


@case(y=floats(dtype=F32), x=floats(seed=1, dtype=F32), a=F32(2))
def saxpy(y: va.InOut[va.float32, 1], x: va.In[va.float32, 1], a: va.float32):
    i = va.thread_id()
    if i < y.shape[0]:
        y[i] = a * x[i] + y[i]


@case(y=floats(), a=ints(), b=ints(seed=1))
def integers(y: va.Out[va.float64], a: va.In[va.int32], b: va.In[va.int32]):
    i = va.thread_id()
    y[i] = a[i] // b[i] + 1000 * (a[i] % b[i]) + a[i] / 3 + a[i] ** 2 - (a[i] << 3) + (b[i] >> 2) + (a[i] & b[i]) - ((a[i] | 5) ^ 3) if b[i] != 0 else -1.0


@case(y=ints(dtype=np.uint8), a=ints(dtype=np.uint8, low=0, high=256), b=ints(dtype=np.uint8, seed=1, low=0, high=256))
def unsigned(y: va.Out[va.uint8], a: va.In[va.uint8], b: va.In[va.uint8]):
    i = va.thread_id()
    if a[i] > b[i]:
        y[i] = a[i] + b[i] * 200
    else:
        y[i] = a[i] // b[i] + a[i] % b[i] + (a[i] >> 1)


@case(y=floats(), a=floats(seed=2), b=floats(seed=3))
def rounded_down(y: va.Out[va.float64], a: va.In[va.float64], b: va.In[va.float64]):
    i = va.thread_id()
    y[i] = a[i] // b[i] + 100.0 * (a[i] % b[i]) - (-a[i]) % 0.25


@case(y=ints(dtype=np.int64), x=ints(low=0, high=9))
def powers(y: va.Out[va.int64], x: va.In[va.int32]):
    i = va.thread_id()
    y[i] = va.int64(3) ** x[i] + x[i] ** 3


@case(1e-6, y=floats(dtype=F32), x=floats(seed=4, dtype=F32))
def functions(y: va.Out[va.float32], x: va.In[va.float32]):
    i = va.thread_id()
    v = abs(x[i])
    y[i] = va.exp(-v) + math.sqrt(v) + math.log(v + 1.0) + va.tanh(x[i]) + math.floor(x[i]) + va.maximum(x[i], 0.5) + max(x[i], 1.0, v) - min(v, 2.0)


@case(1e-14, y=floats(), x=floats(seed=5))
def library(y: va.Out[va.float64], x: va.In[va.float64]):
    i = va.thread_id()
    v = x[i]
    y[i] = math.atan(v) + math.atan2(v, 2.0) + math.hypot(v, 3.0) + math.sinh(v) + math.log1p(abs(v)) + math.asin(v / 20) + math.acos(v / 20) + math.tan(v) + math.expm1(v) + math.log10(abs(v)) + math.cosh(v)


@case(y=ints(), x=ints())
def branches(y: va.Out[va.int32], x: va.In[va.int32]):
    i = va.thread_id()
    v = x[i]
    if v < -10:
        r = 1
    elif v < 0 and v % 2 == 0:
        r = 2
        v += 1
    elif v > 20 or v == 5:
        r = v
    else:
        r = -v
        if not v:
            v = 77
    y[i] = r + 1000 * v if 0 <= v < 30 else r


@case(y=floats(), x=floats(seed=6))
def loops(y: va.InOut[va.float64], x: va.In[va.float64]):
    i = va.thread_id()
    s, n = 0.0, 0
    for k in range(x.shape[0]):
        if x[k] < -2:
            continue
        if k > i:
            break
        s += x[k]
        n += 1
    for k in range(i, -1, -3):
        s -= k
    for k in range(2, i, 2):
        s += k * 0.5
        k = 0
    while n > 0:
        n //= 2
        while True:
            s += 1
            if s > 10 or n == 1:
                break
            if n > 3:
                n -= 1
    y[i] = s


@case(y=ints(), x=ints())
def returns(y: va.InOut[va.int32], x: va.In[va.int32]):
    i = va.thread_id()
    if i % 5 == 0:
        return
    for k in range(10):
        if x[i] == k:
            y[i] = -1
            return
        if x[k] > 30:
            if k > 2:
                break
            y[i] += k
    y[i] += 1000


@va.device_function
def first_above(x, least):
    for k in range(x.shape[0] - 1, -1, -2):
        for j in range(k, k + 2):
            if x[j] > least:
                return j
            if j > 30:
                break
    return -1


@va.device_function
def any_above(x, least):
    for k in range(x.shape[0]):
        if x[k] > least:
            return True
    return False


@case(y=ints(), x=floats(seed=14))
def nested(y: va.Out[va.int32], x: va.In[va.float64]):
    i = va.thread_id()
    n, s = i, 0
    for a in range(n):
        n -= 1
        for b in range(a, 20):
            if (a + b) % 7 == 3:
                continue
            for c in range(3):
                if c * b > n:
                    break
                s += c
            if b > i:
                break
            s += b
        if s > 500:
            break
    y[i] = s * 100 + first_above(x, i / 10) + n + (7 if any_above(x, i / 3) else 0)


@case(y=floats((5, 6)), x=floats((5, 6), seed=7), n=3, grid=(5, 6))
def places(y: va.Out[va.float64, 2], x: va.In[va.float64, 2], n: int):
    i, j = va.thread_id()
    rows, columns = x.shape
    a, b = i, j
    a, b = (a + n) % rows, (b + 1) % columns
    y[i, j] = x[a, b] + x.size + x.ndim + len(x) + va.thread_id(0) - va.thread_id(1)


@case(y=floats((2, 3, 4)), x=floats((2, 3, 4), seed=8), grid=(2, 3, 4))
def cubes(y: va.Out[va.float64, 3], x: va.In[va.float64, 3]):
    i, j, k = va.thread_id()
    y[i, j, k] = x[i, j, k] * i + j * 10 + k * 100


@case(y=floats(), x=floats(seed=9))
def calls(y: va.Out[va.float64], x: va.In[va.float64]):
    i = va.thread_id()
    y[i] = clamp(x[i], -1.0) + clamp(x[i], low=0.0, high=SCALE) + total(x, LIMIT)


@case(y=ints(low=0, high=1), x=ints(seed=10, low=0, high=5), big=ints(n=2, low=0, high=1))
def atomics(y: va.InOut[va.int32], x: va.In[va.int32], big: va.InOut[va.int32]):
    i = va.thread_id()
    va.atomic_add(y, x[i], 1)
    va.atomic_max(big, 0, x[i] * i)
    va.atomic_min(big, 1, -i)


@case(y=ints(), x=floats(seed=11))
def conversions(y: va.Out[va.int32], x: va.In[va.float64]):
    i = va.thread_id()
    small = va.int8(va.int32(x[i] * 9))
    y[i] = va.int32(x[i]) + int(x[i] * 2) * 100 + small + va.int32(va.float32(0.1) == 0.1) + bool(small) + va.int32(va.uint8(small))


@case(y=np.zeros(N, bool), x=floats(seed=12), flag=True)
def truths(y: va.Out[va.bool], x: va.In[va.float64], flag: va.bool):
    i = va.thread_id()
    y[i] = flag and not x[i] > 1 or (x[i] < -1) == (i % 2 == 0)


@case(y=np.zeros(N, F32), x=np.arange(N) % 3 == 0)
def of_truths(y: va.Out[va.float32], x: va.In[va.bool]):
    i = va.thread_id()
    y[i] = 2.5 if x[i] else i


@case(1e-3, y=np.zeros(N, np.float16), x=floats(seed=13, dtype=np.float16))
def halves(y: va.Out[va.float16], x: va.In[va.float16]):
    i = va.thread_id()
    acc = va.float32(0)
    for k in range(4):
        acc += va.float32(x[(i + k) % x.shape[0]])
    y[i] = va.float16(acc) * 0.5


@pytest.mark.parametrize(("function", "grid", "arrays", "tolerance"), CASES)
def test_a_kernel_does_what_its_function_does(function, grid, arrays, tolerance):
    expect = [value.copy() if isinstance(value, np.ndarray) else value for value in arrays.values()]
    interpreted(function, grid, expect)
    given_ = [va.asarray(value) if isinstance(value, np.ndarray) else value for value in arrays.values()]
    va.kernel(function)[grid](*given_)
    for name, found, wanted in zip(arrays, given_, expect):
        if isinstance(wanted, np.ndarray):
            np.testing.assert_allclose(np.asarray(found), wanted, rtol=tolerance, atol=tolerance, err_msg=name)


def module(text, name):
    """A module of a text, whose lines can be shown."""
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    made = types.ModuleType("of_a_test")
    exec(compile(text, name, "exec"), made.__dict__)
    return made


HEAD = "import math\nimport vmaccel as va\n@va.kernel\ndef k(y: va.Out[va.float32, 1], x: va.In[va.float32, 1], n: int):\n    i = va.thread_id()\n"


@pytest.mark.parametrize(
    ("body", "line", "text"),
    [
        ("    y[i] = z", 6, "z is not defined"),
        ("    if n > 3:\n        s = 1.0\n    y[i] = s", 8, "s may have no value here: it gets one only in one branch of the `if` of line 6"),
        ("    for j in range(n):\n        s = j\n    y[i] = s", 8, "only in the loop of line 6"),
        ("    s = va.int32(0)\n    while s < n:\n        s = s + 0.5", 7, "s is int32 before the loop and float64 in it: convert it before"),
        ("    s = x[i] if n else va.int32(1)\n    if n:\n        t = va.int32(1)\n    else:\n        t = va.int64(1)", 7, "t is int32 in one branch and int64 in the other"),
        ("    y[i] = y[i] + 1", 6, "y is Out, which is only written"),
        ("    x[i] = 1", 6, "x is In, which is only read"),
        ("    y[i, 0] = 1", 6, "y has 1 dimensions, and 2 are indexed"),
        ("    y[-1] = 1", 6, "counts from 0"),
        ("    y[x[i]] = 1", 6, "float32 is no index"),
        ("    y[:] = 1", 6, "a slice can't be part of a kernel"),
        ("    y[i] = [j for j in x]", 6, "a list comprehension can't be part of a kernel"),
        ("    y[i] = print(n)", 6, "print can't be called in a kernel"),
        ("    try:\n        pass\n    finally:\n        pass", 6, "try can't be part of a kernel"),
        ("    for v in x:\n        pass", 6, "a for loop goes over range"),
        ("    for j in range(0, 9, n):\n        pass", 6, "the step of a range is a literal"),
        ("    for j in range(x[0]):\n        pass", 6, "range takes integers, not float32"),
        ("    while n:\n        n -= 1\n    else:\n        pass", 9, "a loop has no else"),
        ("    return n", 6, "a kernel returns nothing"),
        ("    y[i] = n and x[i]", 6, "`and` and `or` take truth values, not int"),
        ("    y[i] = x[i] & 1", 6, "bitwise and has no float32 and int"),
        ("    y[i] = x @ x", 6, "a matrix product"),
        ("    y[i] = va.int8(300)", 6, "300 does not fit int8"),
        ("    y[i] = 1 // 0", 6, "division"),
        ("    y[i] = va.complex64(1)", 6, "a kernel has no complex64"),
        ("    y[i] = va.exp(1, 2)", 6, "exp takes 1 arguments, not 2"),
        ("    va.atomic_add(y, i, 1.0)", 6, "it takes an InOut or a shared array"),
        ("    x = n", 6, "x is an array"),
        ("    a, b = n, i, 1", 6, "2 names are given 3 values"),
        ("    y[i] = x.T", 6, "an array has no T in a kernel"),
        ("    y[i] = k", 6, "k is not defined"),
        ("    y[i] = 'text'", 6, "str is no type of a kernel"),
        ("    if x[i] > 0:\n        va.barrier()", 7, "barrier"),
        ("    n ** -2\n", 6, "the value of this is not used"),
        ("    y[i] = n ** -2\n", 6, "to a negative power"),
    ],
)
def test_a_refusal_shows_its_line(body, line, text):
    with pytest.raises(va.KernelError) as raised:
        module(HEAD + body + "\n", "/of/a/test.py")
    error = raised.value
    assert text in error.msg
    assert (error.filename, error.lineno) == ("/of/a/test.py", line)
    assert error.text == (HEAD + body).splitlines()[line - 1]
    assert 1 <= error.offset <= len(error.text)


@pytest.mark.parametrize(
    ("head", "text"),
    [
        ("def k(x):", "x needs a type"),
        ("def k(x: va.In):", "x needs a type of its elements"),
        ("def k(x: str):", "x can't be of"),
        ("def k(x: va.complex64):", "x can't be of complex64"),
        ("def k(x: 'nothing'):", "the type of x can't be read"),
        ("def k(*x):", "by name, each with its type"),
    ],
)
def test_a_parameter_needs_a_type(head, text):
    with pytest.raises(va.KernelError, match=text) as raised:
        module(f"import vmaccel as va\n@va.kernel\n{head}\n    pass\n", "/of/a/test.py")
    assert raised.value.lineno == 3


def test_a_function_that_is_called_has_lines_of_its_own():
    with pytest.raises(va.KernelError) as raised:
        module(
            "import vmaccel as va\n@va.device_function\ndef f(x):\n    return x.real\n"
            "@va.kernel\ndef k(y: va.Out[va.float32]):\n    y[0] = f(1.0)\n",
            "/of/a/test.py",
        )
    assert raised.value.lineno == 4
    with pytest.raises(va.KernelError, match="may end without a value"):
        module(
            "import vmaccel as va\n@va.device_function\ndef f(x):\n    if x > 0:\n        return x\n"
            "@va.kernel\ndef k(y: va.Out[va.float32]):\n    y[0] = f(y.size)\n",
            "/of/a/test.py",
        )
    with pytest.raises(va.KernelError, match="no recursion"):
        module(
            "import vmaccel as va\n@va.device_function\ndef f(x):\n    return f(x)\n@va.kernel\ndef k(y: va.Out[va.float32]):\n    y[0] = f(1.0)\n",
            "/of/a/test.py",
        )


@va.kernel
def double(y: va.InOut[va.float64], factor: float = 2.0):
    i = va.thread_id()
    y[i] = y[i] * factor


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: double(va.ones(3)), TypeError, "needs a grid"),
        (lambda: double[3, 3](va.ones(3)), ValueError, "a grid of 1 dimensions"),
        (lambda: double[-1](va.ones(3)), ValueError, "negative"),
        (lambda: double[3](np.ones(3)), TypeError, "asarray"),
        (lambda: double[3](va.ones(3, dtype="float32")), TypeError, "float32 with 1 dimensions"),
        (lambda: double[3](va.ones((3, 3))), TypeError, "with 2 dimensions"),
        (lambda: double[3](va.ones(3), "x"), TypeError, "is a number"),
        (lambda: double[3](), TypeError, "missing"),
        (lambda: copy_both[3](*[va.ones(3)] * 2), ValueError, "written by two"),
        (lambda: va.thread_id(), RuntimeError, "only in kernels"),
        (lambda: reverse[100](va.ones(256), va.ones(256)), ValueError, "multiple of its block"),
    ],
)
def test_a_launch_says_what_is_wrong(call, error, text):
    with pytest.raises(error, match=text):
        call()


@va.kernel
def copy_both(y: va.Out[va.float64], x: va.InOut[va.float64]):
    i = va.thread_id()
    y[i] = x[i]


@va.kernel(block=64)
def reverse(y: va.Out[va.float64], x: va.In[va.float64]):
    tile = va.shared(va.float64, 64)
    at = va.local_id()
    tile[at] = x[va.thread_id()]
    va.barrier()
    y[va.block_id() * 64 + at] = tile[63 - at]


def test_threads_of_a_block_share_memory():
    x = np.arange(256.0)
    y = va.zeros(256)
    reverse[256](y, va.asarray(x))
    assert np.array_equal(np.asarray(y), x.reshape(4, 64)[:, ::-1].ravel())


def test_arrays_are_values():
    x = va.arange(5.0)
    view, later = x[::2], x + 1
    double[5](x)
    assert x.tolist() == [0, 2, 4, 6, 8]
    assert view.tolist() == [0, 2, 4] and later.tolist() == [1, 2, 3, 4, 5]
    # An array that is read and written by one launch is read as it was.
    y = va.arange(4.0)

    shift(y, y, grid=4)
    assert y.tolist() == [1, 2, 3, 0]
    # A view is written for itself.
    part = x[1:3]
    double[2](part)
    assert part.tolist() == [4, 8] and x.tolist() == [0, 2, 4, 6, 8]


@va.kernel
def shift(y: va.Out[va.float64], x: va.In[va.float64]):
    i = va.thread_id()
    y[i] = x[i + 1]


def test_nothing_is_out_of_bounds():
    y = va.ones(3)
    double[1000](y)
    assert y.tolist() == [2, 2, 2]
    z = va.ones(3)
    shift[0](z, y)
    shift[7](z, y)
    assert z.tolist() == [2, 2, 0]
    empty = va.zeros(0)
    double[5](empty)
    assert empty.shape == (0,)


def test_the_ir_has_the_lines_of_python():
    text = double.ir()
    assert "kernel @double(" in text and "y[i] = y[i] * factor" in text
    assert double.compile() is double and repr(double) == "<vmaccel.Kernel double>"
    before = va.default_device().kernels
    double[9](va.ones(9))
    assert va.default_device().kernels == before


@st.composite
def expressions(draw):
    """Expressions of int32 and float64, as texts."""
    choose = lambda *options: draw(st.sampled_from(options))  # noqa: E731

    def of(kind, depth):
        if kind == "bool":
            if depth < 3 and choose(0, 0, 1):
                return f"({of('bool', depth + 1)} {choose('and', 'or')} {of('bool', depth + 1)})"
            side = choose("int", "float")
            text = f"({of(side, depth + 1)} {choose('<', '<=', '==', '!=', '>', '>=')} {of(side, depth + 1)})"
            return f"(not {text})" if choose(0, 0, 0, 1) else text
        if depth >= 3:
            return choose("i", "j") if kind == "int" else choose("f", "g")
        right = choose(str(draw(st.integers(1, 90))), of(kind, depth + 1), of("int", depth + 1))
        form = choose("op", "op", "if", "one")
        if form == "if":
            return f"({of(kind, depth + 1)} if {of('bool', depth + 1)} else {of(kind, depth + 1)})"
        left = of(kind, depth + 1)
        if form == "one":
            return f"({'-' if kind == 'float' else choose('-', '~')}{left})"
        if kind == "float":
            # Quotients that are rounded down are exact below 2**53.
            down = f"({choose('f', 'g')} {choose('//', '%')} {choose('f', 'g', 'i', '3')})"
            return choose(f"({left} {choose('+', '-', '*', '/')} {right})", f"({of('int', depth + 1)} / {right})", down)
        shifted = f"({left} {choose('<<', '>>')} {draw(st.integers(0, 31))})"
        return choose(f"({left} {choose('+', '-', '*', '//', '%', '&', '|', '^')} {right})", shifted)

    return [of(choose("int", "float"), 0) for _ in range(6)]


@settings(max_examples=10, deadline=None, phases=[Phase.reuse, Phase.generate])
@given(expressions(), st.integers(0, 2**32 - 1))
def test_expressions_have_numpys_values(texts, seed):
    values = "\n".join(f"    y[t, {at}] = {text}" for at, text in enumerate(texts))
    head = "import vmaccel as va\ndef k(y: va.Out[va.float64, 2], a: va.In[va.int32, 2], b: va.In[va.float64, 2]):\n    t = va.thread_id()\n"
    made = module(f"{head}    i = a[t, 0]\n    j = a[t, 1]\n    f = b[t, 0]\n    g = b[t, 1]\n{values}\n", "/of/an/expression.py")
    random = np.random.default_rng(seed)
    a = random.choice([0, 1, -1, 2, 7, -13, 1000, 2**31 - 1, -(2**31), 65537], (8, 2)).astype(np.int32)
    b = random.choice([0.0, -0.0, 1.0, -2.5, 0.1, 1e6, -7.75, np.inf, np.nan], (8, 2))
    expect = np.zeros((8, len(texts)))
    interpreted(made.k, (8,), [expect, a, b])
    y = va.zeros((8, len(texts)))
    va.kernel(made.k)[8](y, va.asarray(a), va.asarray(b))
    np.testing.assert_array_equal(np.asarray(y), expect, err_msg="\n".join(texts))
