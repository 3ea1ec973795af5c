"""Functions of elements."""

from __future__ import annotations

from typing import Any

from . import _vmaccel
from ._vmaccel import Array

# Names as they are here, and as the extension module has them.
_UNARY = """
abs acos acosh asin asinh atan atanh bitwise_invert ceil conj cos cosh exp expm1 exp2 erf floor imag isfinite isinf isnan log log1p log2 log10
logical_not negative positive real reciprocal round rsqrt sign signbit sin sinh sqrt square tan tanh trunc
""".split()
_BINARY = """
add atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign divide equal floor_divide greater greater_equal hypot less
less_equal logaddexp logical_and logical_or logical_xor maximum minimum multiply nextafter not_equal pow remainder subtract
""".split()


def _unary(name: str) -> Any:
    def function(x: Array, /) -> Array:
        return x._unary(name)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"`{name}` of each element."
    return function


def _binary(name: str) -> Any:
    def function(x1: Any, x2: Any, /) -> Array:
        return _vmaccel.binary(name, x1, x2)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"`{name}` of each two elements; one operand may be a number."
    return function


globals().update({name: _unary(name) for name in _UNARY})
globals().update({name: _binary(name) for name in _BINARY})


def clip(x: Array, /, min: Any = None, max: Any = None) -> Array:
    """Elements below `min` become it, and those above `max` become that."""
    result = x
    for bound, function in ((min, "maximum"), (max, "minimum")):
        if bound is not None:
            result = _vmaccel.binary(function, result, _bound(x, bound))
    return result if result is not x else +x


def _bound(x: Array, bound: Any) -> Any:
    """Returns a bound in the type of `x`. Integer bounds outside its range become its least or greatest value."""
    integers = x.dtype.kind in "iu"
    if hasattr(bound, "dtype") and not isinstance(bound, Array):
        from ._creation import asarray

        bound = asarray(bound, device=x.device)
    if integers and (isinstance(bound, int) or isinstance(bound, Array) and bound.dtype.kind in "iu"):
        from ._dtypes import iinfo

        info = iinfo(x.dtype)
        if isinstance(bound, int):
            return _clipped(bound, info.min, info.max)
        return clip(bound, info.min, info.max)._astype(x._dtype) if bound._dtype != x._dtype else bound
    if isinstance(bound, Array) and not (integers and bound.dtype.kind == "f"):
        return bound._astype(x._dtype)
    return bound


def _clipped(value: int, low: int, high: int) -> int:
    return low if value < low else high if value > high else value


__all__ = [*_UNARY, *_BINARY, "clip"]
