"""Functions of kernels that the IR has no op for, in the language of kernels. They are those that arrays have (`features/library/array/src/emit/math.rs`)."""

from __future__ import annotations

import math

from ._elementwise import floor, signbit, trunc
from ._kernel import device_function, fma

_INF = math.inf


@device_function
def float_rest(a, b):
    """The exact remainder of finite a >= 0 by finite b > 0, of float32 or float64."""
    by = b
    while a >= by * 2097152.0:
        by = by * 2097152.0
    left = a
    while True:
        left = fma(-trunc(left / by), by, left)
        # The quotient may have been rounded up to the next integer.
        left = left + by if left < 0.0 else left
        if by == b:
            break
        by = by / 2097152.0
    return left


@device_function
def float_parts(a, b):
    """The quotient rounded down, and what is left of it."""
    quotient, left = a / b if b == 0.0 else math.nan, math.nan
    if b == b and b != 0.0 and abs(a) < _INF:
        rest = a if abs(b) == _INF else math.copysign(float_rest(abs(a), abs(b)), a)
        whole = (a - rest) / b
        unlike = rest != 0.0 and signbit(rest) != signbit(b)
        whole = whole - 1.0 if unlike else whole
        left = rest + b if unlike else rest
        left = math.copysign(left, b) if left == 0.0 else left
        quotient = floor(whole)
        quotient = quotient + 1.0 if whole - quotient > 0.5 else quotient
        quotient = math.copysign(0.0, a / b) if whole == 0.0 else quotient
    return quotient, left


@device_function
def float_floordiv(a, b):
    return float_parts(a, b)[0]


@device_function
def float_mod(a, b):
    return float_parts(a, b)[1]


@device_function
def integer_power(base, exponent):
    result = base * 0 + 1
    for _ in range(64):
        if exponent & 1 != 0:
            result *= base
        base *= base
        exponent >>= 1
    return result


@device_function
def tan(a):
    return math.sin(a) / math.cos(a)


@device_function
def log10(a):
    return math.log2(a) * 0.30102999566398120


@device_function
def log1p(a):
    u = a + 1.0
    return a if u == 1.0 or u == _INF else math.log(u) * (a / (u - 1.0))


@device_function
def expm1(a):
    u = math.exp(a)
    less = u - 1.0
    corrected = less * (a / math.log(u))
    value = -1.0 if less == -1.0 else corrected
    value = u if u == _INF else value
    return a if u == 1.0 else value


@device_function
def atan(a):
    m = abs(a)
    t = 1.0 / m if m > 1.0 else m
    # Halved twice, then its series.
    t = t / (math.sqrt(fma(t, t, 1.0)) + 1.0)
    t = t / (math.sqrt(fma(t, t, 1.0)) + 1.0)
    z = -(t * t)
    s = fma(z, 1.0 / 25.0, 1.0 / 23.0)
    s = fma(s, z, 1.0 / 21.0)
    s = fma(s, z, 1.0 / 19.0)
    s = fma(s, z, 1.0 / 17.0)
    s = fma(s, z, 1.0 / 15.0)
    s = fma(s, z, 1.0 / 13.0)
    s = fma(s, z, 1.0 / 11.0)
    s = fma(s, z, 1.0 / 9.0)
    s = fma(s, z, 1.0 / 7.0)
    s = fma(s, z, 1.0 / 5.0)
    s = fma(s, z, 1.0 / 3.0)
    angle = fma(t * z, s, t) * 4.0
    return math.copysign(1.5707963267948966 - angle if m > 1.0 else angle, a)


@device_function
def asin(a):
    return atan(a / math.sqrt((1.0 - a) * (1.0 + a)))


@device_function
def acos(a):
    return atan(math.sqrt((1.0 - a) / (1.0 + a))) * 2.0


@device_function
def atan2(y, x):
    ax, ay = abs(x), abs(y)
    most, least = (ax, ay) if ax > ay else (ay, ax)
    ratio = 0.0 if most == 0.0 else (1.0 if least == most else least / most)
    angle = atan(ratio)
    angle = 1.5707963267948966 - angle if ay > ax else angle
    angle = 3.141592653589793 - angle if signbit(x) else angle
    return x + y if x != x or y != y else math.copysign(angle, y)


@device_function
def hypot(x, y):
    ax, ay = abs(x), abs(y)
    most, least = (ax, ay) if ax > ay else (ay, ax)
    ratio = least / most
    value = most if most == 0.0 else most * math.sqrt(fma(ratio, ratio, 1.0))
    value = x + y if x != x or y != y else value
    return _INF if ax == _INF or ay == _INF else value


@device_function
def sinh(a):
    m = abs(a)
    t = expm1(m)
    half = math.exp(m * 0.5)
    return math.copysign(half * 0.5 * half if m > 20.0 else (t + t / (t + 1.0)) * 0.5, a)


@device_function
def cosh(a):
    m = abs(a)
    half, e = math.exp(m * 0.5), math.exp(m)
    return half * 0.5 * half if m > 20.0 else (e + 1.0 / e) * 0.5


@device_function
def asinh(a):
    m = abs(a)
    near = log1p(m + m * m / (1.0 + math.sqrt(fma(m, m, 1.0))))
    return math.copysign(math.log(m) + 0.6931471805599453 if m > 1e8 else near, a)


@device_function
def acosh(a):
    t = a - 1.0
    near = log1p(t + math.sqrt(t * 2.0 + t * t))
    return math.log(a) + 0.6931471805599453 if a > 1e8 else near


@device_function
def atanh(a):
    return log1p(a * 2.0 / (1.0 - a)) * 0.5
