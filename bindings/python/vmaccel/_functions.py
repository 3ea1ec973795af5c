"""Reductions, functions of shapes, searches and sorts."""

from __future__ import annotations

import builtins
import operator
from typing import Any, NamedTuple, Optional

from . import _dtypes, _vmaccel
from ._creation import _integers, arange, asarray, full, zeros
from ._vmaccel import Array

__all__ = [
    "all", "any", "argmax", "argmin", "argsort", "astype", "broadcast_arrays", "broadcast_to", "concat", "concatenate", "count_nonzero",
    "cumulative_prod", "cumulative_sum", "diff", "expand_dims", "flip", "matmul", "matrix_transpose", "max", "mean", "min", "moveaxis", "nonzero",
    "permute_dims", "prod", "repeat", "reshape", "roll", "searchsorted", "sort", "squeeze", "stack", "std", "sum", "take", "take_along_axis",
    "tensordot", "tile", "unique_all", "unique_counts", "unique_inverse", "unique_values", "unstack", "var", "vecdot", "where",
]  # fmt: skip


def where(condition: Array, x1: Any, x2: Any, /) -> Array:
    """Elements of `x1` where the condition is true, else of `x2`."""
    return _vmaccel.select(condition, x1, x2)


def astype(x: Array, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Array:
    """The elements in another type."""
    result = x._astype(_dtypes.dtype(dtype).name)
    if device is not None:
        result = result.to_device(device)
    return result.copy() if copy and result is x else result


def sum(x: Array, /, *, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Array:
    """The sum along axes; small integers are added up in 64 bits."""
    return x._reduce("sum", axis, keepdims, None if dtype is None else _dtypes.dtype(dtype).name)


def prod(x: Array, /, *, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Array:
    """The product along axes; small integers are multiplied in 64 bits."""
    return x._reduce("prod", axis, keepdims, None if dtype is None else _dtypes.dtype(dtype).name)


def max(x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
    """The greatest along axes, NaN if one is."""
    return x._reduce("max", axis, keepdims)


def min(x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
    """The least along axes, NaN if one is."""
    return x._reduce("min", axis, keepdims)


def any(x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
    """Is one not 0?"""
    return x._reduce("any", axis, keepdims)


def all(x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
    """Is none 0?"""
    return x._reduce("all", axis, keepdims)


def count_nonzero(x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
    """How many are not 0."""
    return sum(x._astype("bool"), axis=axis, keepdims=keepdims)


def _count(x: Array, axis: Any) -> int:
    if axis is None:
        return x.size
    axes = _integers(axis)
    count = 1
    for each in axes:
        count *= x.shape[each]
    return count


def _inexact(x: Array) -> Array:
    return x if x.dtype.kind in "fc" else x._astype("float64")


_NARROW = ("float16", "bfloat16")


def _wide(x: Array) -> Array:
    """The elements in the type of intermediate results: float32 for float16 and bfloat16, whose range squares and sums exceed."""
    return x._astype("float32") if x._dtype in _NARROW else x


def _narrow(result: Array, x: Array) -> Array:
    """The result in the type of `x`, from which `_wide` made what it is computed from."""
    return result._astype(x._dtype) if x._dtype in _NARROW else result


def mean(x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
    """The mean along axes."""
    x = _inexact(x)
    return _narrow(_mean(_wide(x), axis, keepdims), x)


def _mean(x: Array, axis: Any, keepdims: bool) -> Array:
    n = _count(x, axis)
    result = x._reduce("sum", axis, keepdims)
    return result / float(n) if n else result * float("nan")


def var(x: Array, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Array:
    """The variance along axes: squares of distances from the mean, over their number less the correction."""
    return _narrow(_var(x, axis, correction, keepdims), x)


def _var(x: Array, axis: Any, correction: float, keepdims: bool) -> Array:
    x = _wide(_inexact(x))
    n = _count(x, axis) - correction
    distance = x - _mean(x, axis, True)
    squares = distance * distance
    if x.dtype.kind == "c":
        squares = distance._unary("abs")._unary("square")
    result = squares._reduce("sum", axis, keepdims)
    return result / float(n) if n > 0 else result * float("nan")


def std(x: Array, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Array:
    """The square root of the variance."""
    return _narrow(_var(x, axis, correction, keepdims)._unary("sqrt"), x)


def _arg(x: Array, axis: Optional[int], keepdims: bool, reduction: str) -> Array:
    if x.dtype.kind == "c":
        raise TypeError("complex numbers have no order")
    source = x if axis is not None else x.reshape(-1)
    own = axis if axis is not None else 0
    if source.shape[own] == 0:
        raise ValueError("attempt to get the place of the greatest or least of an empty sequence")
    best = source._reduce(reduction, own, True)
    at = source == best
    if x.dtype.kind == "f":
        at = at | (source != source)
    n = source.shape[own]
    places = _vmaccel.indices(source.shape, own % source.ndim, x.device)
    result = _vmaccel.select(at, places, n)._reduce("min", own, keepdims)
    if axis is None and keepdims:
        return result.reshape((1,) * x.ndim)
    return result


def argmax(x: Array, /, *, axis: Optional[int] = None, keepdims: bool = False) -> Array:
    """The first place of the greatest along an axis."""
    return _arg(x, axis, keepdims, "max")


def argmin(x: Array, /, *, axis: Optional[int] = None, keepdims: bool = False) -> Array:
    """The first place of the least along an axis."""
    return _arg(x, axis, keepdims, "min")


def _scan(x: Array, op: str, axis: Optional[int], dtype: Any, include_initial: bool) -> Array:
    if axis is None:
        if x.ndim != 1:
            raise ValueError("an axis must be named for arrays of other than one dimension")
        axis = 0
    name = None if dtype is None else _dtypes.dtype(dtype).name
    result = _vmaccel.scan(x, op, axis, name)
    if include_initial:
        shape = list(result.shape)
        shape[axis] = 1
        first = full(shape, 1 if op == "prod" else 0, dtype=result.dtype, device=x.device)
        result = concat([first, result], axis=axis)
    return result


def cumulative_sum(x: Array, /, *, axis: Optional[int] = None, dtype: Any = None, include_initial: bool = False) -> Array:
    """Sums of the elements up to each."""
    return _scan(x, "sum", axis, dtype, include_initial)


def cumulative_prod(x: Array, /, *, axis: Optional[int] = None, dtype: Any = None, include_initial: bool = False) -> Array:
    """Products of the elements up to each."""
    return _scan(x, "prod", axis, dtype, include_initial)


def diff(x: Array, /, *, axis: int = -1, n: int = 1, prepend: Optional[Array] = None, append: Optional[Array] = None) -> Array:
    """Differences of neighbours along an axis, n times."""
    parts = [each for each in (prepend, x, append) if each is not None]
    result = concat(parts, axis=axis) if len(parts) > 1 else x
    for _ in range(n):
        key: list = [slice(None)] * result.ndim
        before = list(key)
        key[axis], before[axis] = slice(1, None), slice(None, -1)
        a, b = result[tuple(key)], result[tuple(before)]
        result = a ^ b if result._dtype == "bool" else a - b
    return result


def reshape(x: Array, /, shape: Any, *, copy: Optional[bool] = None) -> Array:
    """The same elements in another shape."""
    result = x.reshape(tuple(_integers(shape)))
    return result.copy() if copy else result


def permute_dims(x: Array, /, axes: Any) -> Array:
    """The dimensions in another order."""
    return x._permute(list(axes))


def matrix_transpose(x: Array, /) -> Array:
    """The last two dimensions exchanged."""
    return x.mT


def moveaxis(x: Array, source: Any, destination: Any, /) -> Array:
    """Dimensions moved to other places, the others in order."""
    sources, targets = _integers(source), _integers(destination)
    for each in (*sources, *targets):
        _axis(each, x.ndim)
    sources, targets = [each % x.ndim for each in sources], [each % x.ndim for each in targets]
    if len(sources) != len(targets) or len(set(sources)) != len(sources) or len(set(targets)) != len(targets):
        raise ValueError("as many axes are moved as places are named, each once")
    order = [d for d in range(x.ndim) if d not in sources]
    for target, own in sorted(zip(targets, sources)):
        order.insert(target, own)
    return x._permute(order)


def _axis(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise IndexError(f"axis {axis} is out of bounds for array of dimension {ndim}")
    return axis % ndim


def expand_dims(x: Array, /, axis: Any = 0) -> Array:
    """A new dimension of extent 1."""
    axes = _integers(axis)
    rank = x.ndim + len(axes)
    places = {_axis(each, rank) for each in axes}
    if len(places) != len(axes):
        raise ValueError("an axis is named twice")
    shape = iter(x.shape)
    return x.reshape(tuple(1 if d in places else next(shape) for d in range(rank)))


def squeeze(x: Array, /, axis: Any) -> Array:
    """Dimensions of extent 1 left out."""
    axes = _integers(axis)
    places = {_axis(each, x.ndim) for each in axes}
    if builtins.any(x.shape[each] != 1 for each in places):
        raise ValueError("cannot select an axis to squeeze out which has size not equal to one")
    return x.reshape(tuple(n for d, n in enumerate(x.shape) if d not in places))


def broadcast_to(x: Array, /, shape: Any) -> Array:
    """Repeated along dimensions of extent 1."""
    return x._broadcast_to(shape)


def broadcast_arrays(*arrays: Array) -> list[Array]:
    """All repeated to the shape of all."""
    shape = _broadcast(*(each.shape for each in arrays))
    return [each._broadcast_to(shape) for each in arrays]


def _broadcast(*shapes: tuple) -> tuple:
    rank = builtins.max((len(each) for each in shapes), default=0)
    result = [1] * rank
    for shape in shapes:
        for d, n in enumerate(shape, rank - len(shape)):
            if n != 1:
                if result[d] not in (1, n):
                    raise ValueError(f"shapes {shapes} can't be repeated to one")
                result[d] = n
    return tuple(result)


def concat(arrays: Any, /, *, axis: Optional[int] = 0) -> Array:
    """Arrays one behind the other along an axis."""
    arrays = list(arrays)
    if axis is None:
        arrays, axis = [each.reshape(-1) for each in arrays], 0
    return _vmaccel.concatenate(arrays, axis)


concatenate = concat


def stack(arrays: Any, /, *, axis: int = 0) -> Array:
    """Arrays one behind the other along a new axis."""
    return concat([expand_dims(each, axis=axis) for each in arrays], axis=axis)


def unstack(x: Array, /, *, axis: int = 0) -> tuple[Array, ...]:
    """The arrays along an axis."""
    moved = moveaxis(x, axis, 0)
    return tuple(moved[at] for at in range(moved.shape[0]))


def flip(x: Array, /, *, axis: Any = None) -> Array:
    """Backwards along axes, all where none is named."""
    axes = None if axis is None else [_axis(each, x.ndim) for each in _integers(axis)]
    return _vmaccel.flip(x, axes)


def roll(x: Array, /, shift: Any, *, axis: Any = None) -> Array:
    """Shifted along axes; what falls off at one end comes back at the other."""
    if axis is None:
        return roll(x.reshape(-1), shift, axis=0).reshape(x.shape)
    axes, shifts = _integers(axis), _integers(shift)
    if len(shifts) == 1:
        shifts *= len(axes)
    if len(shifts) != len(axes):
        raise ValueError(f"cannot roll: {len(shifts)} shifts for {len(axes)} axes")
    for each, by in zip(axes, shifts):
        each = _axis(each, x.ndim)
        n = x.shape[each]
        by = by % n if n else 0
        if by:
            head: list = [slice(None)] * x.ndim
            tail = list(head)
            head[each], tail[each] = slice(n - by, None), slice(None, n - by)
            x = concat([x[tuple(head)], x[tuple(tail)]], axis=each)
    return x


def tile(x: Array, repetitions: Any, /) -> Array:
    """Copies of the array beside each other."""
    times = _integers(repetitions)
    if builtins.any(n < 0 for n in times):
        raise ValueError("an array can't be tiled a negative number of times")
    rank = builtins.max(x.ndim, len(times))
    times = [1] * (rank - len(times)) + times
    shape = (1,) * (rank - x.ndim) + x.shape
    between = x.reshape(tuple(n for pair in zip((1,) * rank, shape) for n in pair))
    whole = between._broadcast_to(tuple(n for pair in zip(times, shape) for n in pair))
    return whole.reshape(tuple(t * n for t, n in zip(times, shape)))


def repeat(x: Array, repeats: Any, /, *, axis: Optional[int] = None) -> Array:
    """Each element several times."""
    if axis is None:
        x, axis = x.reshape(-1), 0
    axis = _axis(axis, x.ndim)
    n = x.shape[axis]
    if not isinstance(repeats, Array):
        repeats = asarray(repeats, device=x.device) if hasattr(repeats, "__len__") else operator.index(repeats)
    if isinstance(repeats, int):
        if repeats < 0:
            raise ValueError("repeats may not contain negative values")
        places = arange(n * repeats, device=x.device) // repeats if repeats else arange(0, device=x.device)
        return take(x, places, axis=axis)
    if repeats.size == 1:
        return repeat(x, int(repeats.reshape(()).item()), axis=axis)
    if repeats.size != n:
        raise ValueError(f"there are {n} elements, and {repeats.size} numbers of repetitions")
    if bool(any(repeats < 0)):
        raise ValueError("repeats may not contain negative values")
    ends = cumulative_sum(repeats._astype("int64"), axis=0)
    total = int(ends[-1].item()) if n else 0
    return take(x, searchsorted(ends, arange(total, device=x.device), side="right"), axis=axis)


def take(x: Array, indices: Array, /, *, axis: Optional[int] = None) -> Array:
    """The elements at indices of an axis. Indices below 0 count from behind; what is beyond reads as 0."""
    from ._indexing import along

    if axis is None:
        if x.ndim != 1:
            raise ValueError("an axis must be named for arrays of other than one dimension")
        axis = 0
    return along(x, indices, _axis(axis, x.ndim))


def take_along_axis(x: Array, indices: Array, /, *, axis: int = -1) -> Array:
    """For each place of the indices the element there along an axis."""
    from ._indexing import gathered

    axis = _axis(axis, x.ndim)
    shape = _broadcast(tuple(1 if d == axis else n for d, n in enumerate(x.shape)), tuple(1 if d == axis else n for d, n in enumerate(indices.shape)))
    shape = tuple(indices.shape[axis] if d == axis else n for d, n in enumerate(shape))
    x = x._broadcast_to(tuple(x.shape[axis] if d == axis else n for d, n in enumerate(shape)))
    places = [indices._broadcast_to(shape) if d == axis else _vmaccel.indices(shape, d, x.device) for d in range(x.ndim)]
    return gathered(x, places)


def searchsorted(x1: Array, x2: Any, /, *, side: str = "left", sorter: Optional[Array] = None) -> Array:
    """Where elements would go into an array that is in order."""
    if side not in ("left", "right"):
        raise ValueError("side is 'left' or 'right'")
    if sorter is not None:
        x1 = take(x1, sorter)
    if not isinstance(x2, Array):
        x2 = asarray(x2, device=x1.device)
    return _vmaccel.search_sorted(x1, x2, side == "right")


def sort(x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    """In order along an axis; NaN comes last, or first where it descends."""
    if x.ndim == 0:
        return x
    return _vmaccel.sorted(x, axis, descending)


def argsort(x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    """The places of the elements in order along an axis."""
    if x.ndim == 0:
        return zeros((), dtype="int64", device=x.device)
    return _vmaccel.sort(x, axis, descending)[1]


def nonzero(x: Array, /) -> tuple[Array, ...]:
    """The indices of elements that are not 0, an array for each dimension."""
    if x.ndim == 0:
        raise ValueError("nonzero is of arrays with one dimension or more")
    flat = _vmaccel.nonzero(x)
    result = []
    for n in reversed(x.shape):
        result.append(flat % n if n else flat)
        flat = flat // n if n else flat
    return tuple(reversed(result))


class UniqueAll(NamedTuple):
    """What `unique_all` gives."""

    values: Array
    indices: Array
    inverse_indices: Array
    counts: Array


class UniqueCounts(NamedTuple):
    """What `unique_counts` gives."""

    values: Array
    counts: Array


class UniqueInverse(NamedTuple):
    """What `unique_inverse` gives."""

    values: Array
    inverse_indices: Array


def unique_all(x: Array, /) -> UniqueAll:
    """Each element once in order, where it was first, which of them each element is, and how often it is there. Each NaN is by itself."""
    flat = x.reshape(-1)
    n = flat.size
    if n == 0:
        none = zeros((0,), dtype="int64", device=x.device)
        return UniqueAll(flat, none, none.reshape(x.shape), none)
    keys = flat if x.dtype.kind != "c" else flat._unary("real")
    if x.dtype.kind == "c":
        # By the imaginary parts first, then, as order is kept, by the real ones.
        order = _vmaccel.sort(flat._unary("imag"), 0, False)[1]
        order = take(order, _vmaccel.sort(take(keys, order), 0, False)[1])
        values = take(flat, order)
    else:
        values, order = _vmaccel.sort(keys, 0, False)
    new = concat([full((1,), True, device=x.device), values[1:] != values[:-1]])
    number = cumulative_sum(new._astype("int64"), axis=0) - 1
    starts = _vmaccel.nonzero(new)
    ends = concat([starts[1:], full((1,), n, device=x.device)])
    inverse = _vmaccel.scatter(zeros((n,), dtype="int64", device=x.device), order, number)
    return UniqueAll(take(values, starts), take(order, starts), inverse.reshape(x.shape), ends - starts)


def unique_counts(x: Array, /) -> UniqueCounts:
    """Each element once in order, and how often it is there."""
    of = unique_all(x)
    return UniqueCounts(of.values, of.counts)


def unique_inverse(x: Array, /) -> UniqueInverse:
    """Each element once in order, and which of them each element is."""
    of = unique_all(x)
    return UniqueInverse(of.values, of.inverse_indices)


def unique_values(x: Array, /) -> Array:
    """Each element once, in order."""
    return unique_all(x).values


def matmul(x1: Array, x2: Array, /) -> Array:
    """The product of matrices of the last two dimensions."""
    return x1.matmul(x2)


def vecdot(x1: Array, x2: Array, /, *, axis: int = -1) -> Array:
    """The product of vectors along an axis, of complex ones with the first conjugated."""
    x1 = x1._unary("conj") if x1.dtype.kind == "c" else x1
    _axis(axis, x1.ndim), _axis(axis, x2.ndim)
    if x1.shape[axis] != x2.shape[axis]:
        raise ValueError("vectors have different lengths")
    a, b = moveaxis(x1, axis, -1), moveaxis(x2, axis, -1)
    name = _vmaccel.promote(a._dtype, b._dtype)
    product = _wide(a) * _wide(b)
    return product._reduce("sum", -1, False, product._dtype)._astype(name)


def tensordot(x1: Array, x2: Array, /, *, axes: Any = 2) -> Array:
    """The product over several axes."""
    if hasattr(axes, "__index__"):
        axes = operator.index(axes)
        own, others = list(range(x1.ndim - axes, x1.ndim)), list(range(axes))
    else:
        own, others = (_integers(each) for each in axes)
    own, others = [_axis(each, x1.ndim) for each in own], [_axis(each, x2.ndim) for each in others]
    if [x1.shape[each] for each in own] != [x2.shape[each] for each in others]:
        raise ValueError("the axes that are summed over have different extents")
    kept = [d for d in range(x1.ndim) if d not in own]
    rest = [d for d in range(x2.ndim) if d not in others]
    inner = 1
    for each in own:
        inner *= x1.shape[each]
    shape = tuple(x1.shape[d] for d in kept) + tuple(x2.shape[d] for d in rest)
    rows, columns = 1, 1
    for d in kept:
        rows *= x1.shape[d]
    for d in rest:
        columns *= x2.shape[d]
    a = x1._permute(kept + own).reshape((rows, inner))
    b = x2._permute(others + rest).reshape((inner, columns))
    return a.matmul(b).reshape(shape)
