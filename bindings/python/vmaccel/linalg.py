"""Linear algebra. Decompositions are computed by the host's processor, whatever device their arrays are on."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _vmaccel
from ._creation import asarray, eye
from ._functions import _narrow, _wide, broadcast_arrays, expand_dims, max as _max, moveaxis, matmul, matrix_transpose, squeeze, stack, sum, take, tensordot, vecdot, where
from ._dtypes import finfo
from ._vmaccel import Array, LinAlgError

__all__ = [
    "LinAlgError", "cholesky", "cross", "det", "diagonal", "eigh", "eigvalsh", "inv", "matmul", "matrix_norm", "matrix_power", "matrix_rank",
    "matrix_transpose", "outer", "pinv", "qr", "slogdet", "solve", "svd", "svdvals", "tensordot", "trace", "vecdot", "vector_norm",
]  # fmt: skip


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
    return take(flat, at, axis=-1) if n else flat[..., :0]


def trace(x: Array, /, *, offset: int = 0, dtype: Any = None) -> Array:
    """The sum of the diagonal of matrices."""
    return sum(diagonal(x, offset=offset), axis=-1, dtype=dtype)


def cross(x1: Array, x2: Array, /, *, axis: int = -1) -> Array:
    """The cross product of vectors of three elements."""
    if x1.shape[axis] != 3 or x2.shape[axis] != 3:
        raise ValueError("a cross product is of vectors with three elements")
    x1, x2 = broadcast_arrays(x1, x2)
    a, b = moveaxis(x1, axis, 0), moveaxis(x2, axis, 0)
    parts = [a[(i + 1) % 3] * b[(i + 2) % 3] - a[(i + 2) % 3] * b[(i + 1) % 3] for i in range(3)]
    return stack(parts, axis=axis)


def vector_norm(x: Array, /, *, axis: Any = None, keepdims: bool = False, ord: float = 2) -> Array:
    """The norm of vectors along axes."""
    return _narrow(_vector_norm(_wide(x)._unary("abs"), axis, keepdims, ord), x)


def _vector_norm(m: Array, axis: Any, keepdims: bool, ord: float) -> Array:
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
    """The norm of matrices: `fro`, `nuc`, 1, -1, 2, -2, inf or -inf."""
    if ord == "fro":
        return vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    if ord in ("nuc", 2, -2):
        values = svdvals(x)
        result = values._reduce({"nuc": "sum", 2: "max", -2: "min"}[ord], -1, False)
        return expand_dims(result, axis=(-2, -1)) if keepdims else result
    if ord in (1, -1, float("inf"), float("-inf")):
        sums = x._unary("abs")._reduce("sum", -2 if abs(ord) == 1 else -1, True)
        return sums._reduce("max" if ord > 0 else "min", (-2, -1), keepdims)
    raise ValueError(f"there is no norm {ord!r} of matrices")


class EighResult(NamedTuple):
    """What `eigh` gives."""

    eigenvalues: Array
    eigenvectors: Array


class QRResult(NamedTuple):
    """What `qr` gives."""

    Q: Array
    R: Array


class SlogdetResult(NamedTuple):
    """What `slogdet` gives."""

    sign: Array
    logabsdet: Array


class SVDResult(NamedTuple):
    """What `svd` gives."""

    U: Array
    S: Array
    Vh: Array


def cholesky(x: Array, /, *, upper: bool = False) -> Array:
    """The lower triangular L of x = L Lᴴ, or the upper triangular Lᴴ."""
    return _vmaccel.cholesky(x, upper)


def qr(x: Array, /, *, mode: str = "reduced") -> QRResult:
    """Q with orthonormal columns and upper triangular R of x = Q R; `complete` has a square Q."""
    if mode not in ("reduced", "complete"):
        raise ValueError("mode is 'reduced' or 'complete'")
    return QRResult(*_vmaccel.qr(x, mode == "complete"))


def svd(x: Array, /, *, full_matrices: bool = True) -> SVDResult:
    """U, the singular values, the greatest first, and Vᴴ, of x = U S Vᴴ."""
    return SVDResult(*_vmaccel.svd(x, full_matrices))


def svdvals(x: Array, /) -> Array:
    """The singular values, the greatest first."""
    return svd(x, full_matrices=False).S


def eigh(x: Array, /) -> EighResult:
    """The eigenvalues of Hermitian matrices, the least first, and their eigenvectors, as columns."""
    return EighResult(*_vmaccel.eigh(x))


def eigvalsh(x: Array, /) -> Array:
    """The eigenvalues of Hermitian matrices, the least first."""
    return eigh(x).eigenvalues


def slogdet(x: Array, /) -> SlogdetResult:
    """The sign of the determinant, and the logarithm of its magnitude."""
    return SlogdetResult(*_vmaccel.slogdet(x))


def det(x: Array, /) -> Array:
    """The determinant."""
    sign, log = slogdet(x)
    return sign * log._unary("exp")


def inv(x: Array, /) -> Array:
    """The inverse."""
    return _vmaccel.inv(x)


def solve(x1: Array, x2: Array, /) -> Array:
    """The x of x1 x = x2; x2 is a vector, or matrices."""
    if x2.ndim == 1:
        return squeeze(_vmaccel.solve(x1, expand_dims(x2, axis=-1)), axis=-1)
    return _vmaccel.solve(x1, x2)


def matrix_power(x: Array, n: int, /) -> Array:
    """The product of n times the matrix, of its inverse where n is below 0."""
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise ValueError("matrix_power is of square matrices")
    if n < 0:
        x, n = inv(x), -n
    result = eye(x.shape[-1], dtype=x.dtype, device=x.device)._broadcast_to(x.shape)
    while n:
        if n & 1:
            result = matmul(result, x)
        x, n = (matmul(x, x) if n > 1 else x), n >> 1
    return result


def _least(values: Array, x: Array, rtol: Any) -> Array:
    """The singular value below which others are 0."""
    if rtol is None:
        rtol = max(x.shape[-2:]) * finfo(x.dtype).eps
    rtol = asarray(rtol, dtype=values.dtype, device=x.device)
    return _max(values, axis=-1, keepdims=True) * expand_dims(rtol, axis=-1)


def matrix_rank(x: Array, /, *, rtol: Any = None) -> Array:
    """How many singular values are above `rtol` times the greatest."""
    values = svdvals(x)
    if values.shape[-1] == 0:
        return sum(values, axis=-1)._astype("int64")
    return sum((values > _least(values, x, rtol))._astype("int64"), axis=-1)


def pinv(x: Array, /, *, rtol: Any = None) -> Array:
    """The Moore-Penrose inverse, of the singular values above `rtol` times the greatest."""
    u, s, vh = svd(x, full_matrices=False)
    conj = lambda a: a._unary("conj") if a.dtype.kind == "c" else a  # noqa: E731
    if s.shape[-1] != 0:
        s = where(s > _least(s, x, rtol), 1.0 / s, 0.0)
    return matmul(conj(vh.mT) * expand_dims(s, axis=-2), conj(u.mT))

