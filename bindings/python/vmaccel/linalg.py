"""What of the standard's linear algebra is products and norms."""

from __future__ import annotations

from typing import Any, Optional

from . import _vmaccel
from ._functions import matmul, matrix_transpose, sum, tensordot, vecdot
from ._vmaccel import Array

__all__ = ["cross", "diagonal", "matmul", "matrix_norm", "matrix_transpose", "outer", "tensordot", "trace", "vecdot", "vector_norm"]


def outer(x1: Array, x2: Array, /) -> Array:
    """The products of each two elements of vectors."""
    if x1.ndim != 1 or x2.ndim != 1:
        raise ValueError("outer is of vectors")
    return x1.reshape((-1, 1)) * x2


def diagonal(x: Array, /, *, offset: int = 0) -> Array:
    """The diagonal of matrices."""
    rows, columns = x.shape[-2:]
    first = (-offset, 0) if offset < 0 else (0, offset)
    n = max(0, min(rows - first[0], columns - first[1]))
    lead = x.shape[:-2]
    flat = x.reshape((*lead, rows * columns))
    at = _vmaccel.indices((n,), 0, x.device) * (columns + 1) + (first[0] * columns + first[1])
    from ._functions import take

    return take(flat, at, axis=-1) if n else flat[..., :0]


def trace(x: Array, /, *, offset: int = 0, dtype: Any = None) -> Array:
    """The sum of the diagonal of matrices."""
    return sum(diagonal(x, offset=offset), axis=-1, dtype=dtype)


def cross(x1: Array, x2: Array, /, *, axis: int = -1) -> Array:
    """The cross product of vectors of three elements."""
    from ._functions import broadcast_arrays, moveaxis, stack

    if x1.shape[axis] != 3 or x2.shape[axis] != 3:
        raise ValueError("a cross product is of vectors with three elements")
    x1, x2 = broadcast_arrays(x1, x2)
    a, b = moveaxis(x1, axis, 0), moveaxis(x2, axis, 0)
    parts = [a[(i + 1) % 3] * b[(i + 2) % 3] - a[(i + 2) % 3] * b[(i + 1) % 3] for i in range(3)]
    return stack(parts, axis=axis)


def vector_norm(x: Array, /, *, axis: Any = None, keepdims: bool = False, ord: float = 2) -> Array:
    """The norm of vectors along axes."""
    m = x._unary("abs")
    if ord == float("inf"):
        return m._reduce("max", axis, keepdims)
    if ord == float("-inf"):
        return m._reduce("min", axis, keepdims)
    if ord == 0:
        return (m != 0)._astype(m._dtype)._reduce("sum", axis, keepdims)
    if ord == 1:
        return m._reduce("sum", axis, keepdims)
    if ord == 2:
        return m._unary("square")._reduce("sum", axis, keepdims)._unary("sqrt")
    return (m ** float(ord))._reduce("sum", axis, keepdims) ** (1.0 / ord)


def matrix_norm(x: Array, /, *, keepdims: bool = False, ord: Any = "fro") -> Array:
    """The norm of matrices: `fro`, 1, -1, inf or -inf."""
    m = x._unary("abs")
    if ord == "fro":
        return m._unary("square")._reduce("sum", (-2, -1), keepdims)._unary("sqrt")
    if ord in (1, -1, float("inf"), float("-inf")):
        along = -2 if abs(ord) == 1 else -1
        sums = m._reduce("sum", along, True)
        result = sums._reduce("max" if ord > 0 else "min", (-2, -1), True)
        return result if keepdims else result.reshape(result.shape[:-2])
    raise ValueError(f"there is no norm {ord!r} here")


_ = Optional
