"""Arrays of the host's data, of numbers, and of other arrays' shapes."""

from __future__ import annotations

import builtins
import math
import operator
from typing import Any, Optional

from . import _dtypes, _interchange, _vmaccel
from ._vmaccel import Array

__all__ = [
    "arange", "asarray", "array", "empty", "empty_like", "empty_pinned", "eye", "from_device", "from_dlpack", "full", "full_like", "linspace",
    "meshgrid", "ones", "ones_like", "to_device", "tril", "triu", "zeros", "zeros_like",
]  # fmt: skip


def asarray(obj: Any, /, *, dtype: Any = None, device: Any = None, copy: Optional[bool] = None) -> Array:
    """An array of a number, of nested sequences of them, or of what numpy can see (buffers, arrays of other libraries).

    Memory that others may write is copied, as an array is a value. With `copy=False` it is not, which is an error where that can't be: then
    nobody may write it any more.
    """
    name = None if dtype is None else _dtypes.dtype(dtype).name
    if isinstance(obj, Array):
        if copy is False and (name not in (None, obj._dtype) or device is not None and _vmaccel.open(device) != obj.device):
            raise ValueError("elements on another device, or of another type, can only be copied")
        if device is not None:
            obj = obj.to_device(device)
        result = obj if name in (None, obj._dtype) else obj._astype(name)
        return result.copy() if copy and result is obj else result
    if hasattr(obj, "__cuda_array_interface__") and _vmaccel.open(device).backend == "cuda":
        return _interchange.of_cuda(obj, name, device, copy)
    if hasattr(obj, "__array_interface__") or hasattr(obj, "__array__"):
        import numpy

        data = obj if isinstance(obj, numpy.ndarray) else numpy.asarray(obj, copy=False) if copy is False else numpy.asarray(obj)
        return _interchange.of_numpy(data, name, device, copy)
    if copy is False:
        raise ValueError("the data lies elsewhere: it can only be copied")
    if isinstance(obj, (bytes, bytearray, memoryview)):
        return _of_buffer(memoryview(obj), name, device)
    return _vmaccel.from_sequence(obj, name, device)


def _of_buffer(view: memoryview, name: Optional[str], device: Any) -> Array:
    kinds = {"?": "bool", "b": "int8", "h": "int16", "i": "int32", "l": "int64", "q": "int64", "B": "uint8", "H": "uint16"}
    kinds.update({"I": "uint32", "L": "uint64", "Q": "uint64", "e": "float16", "f": "float32", "d": "float64"})
    own = kinds.get(view.format.lstrip("<=@"))
    if own is None:
        raise TypeError(f"a buffer of {view.format!r} has no type here")
    result = _vmaccel.from_buffer(view.tobytes(), own, view.shape, device)
    return result if name in (None, own) else result._astype(name)


array = asarray


def to_device(obj: Any, device: Any = None) -> Array:
    """The host's data as an array on a device."""
    return asarray(obj, device=device)


def from_device(array: Array, out: Any = None) -> Any:
    """The elements as a numpy array on the host: in `out`, if one of the same shape and type is given."""
    if out is None:
        return array.__array__()
    _vmaccel.read_to(array, out.__array_interface__)
    return out


def empty_pinned(shape: Any, dtype: Any = "float64", device: Any = None) -> Any:
    """A numpy array in memory that a device copies from and to by itself, as fast as the link is: for `asarray`, and for `from_device`'s `out`."""
    import numpy

    of = numpy.dtype(_dtypes.dtype(dtype).name)
    shape = tuple(_integers(shape))
    n = of.itemsize * math.prod(shape)
    return numpy.asarray(_vmaccel.pinned(n, device))[:n].view(of).reshape(shape)


def from_dlpack(x: Any, /, *, device: Any = None, copy: Optional[bool] = None) -> Array:
    """An array of another library's, by DLPack: of the same memory, where it can be and `copy` is not true.

    Without a device it is one of the memory's. What is not copied must not be written any more, as an array is a value.
    """
    if isinstance(x, Array):
        return asarray(x, device=device, copy=copy)
    return _vmaccel.from_dlpack(x, device, copy)


def empty(shape: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """Whatever was in memory."""
    return _vmaccel.empty(shape, _dtypes.name_of(dtype, "float64"), device)


def full(shape: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """A number everywhere."""
    if isinstance(fill_value, Array):
        fill_value = fill_value.item()
    return _vmaccel.full(shape, fill_value, _dtypes.name_of(dtype, _type_of(fill_value)), device)


def _type_of(value: Any) -> str:
    """The name of the type that an array of a scalar has: of numpy's scalars their own."""
    own = getattr(getattr(value, "dtype", None), "name", None)
    if own is not None:
        return _dtypes.dtype(own).name
    return next((name for kind, name in ((bool, "bool"), (int, "int64"), (float, "float64"), (complex, "complex128")) if isinstance(value, kind)), "float64")


def _integers(value: Any) -> list[int]:
    """An integer, of Python's or numpy's, or several, as a list."""
    return [operator.index(value)] if hasattr(value, "__index__") else [operator.index(each) for each in value]


def zeros(shape: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """0 everywhere."""
    return _vmaccel.full(shape, 0, _dtypes.name_of(dtype, "float64"), device)


def ones(shape: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """1 everywhere."""
    return _vmaccel.full(shape, 1, _dtypes.name_of(dtype, "float64"), device)


def empty_like(x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
    """`empty` of an array's shape and type."""
    return empty(x.shape, dtype=dtype or x.dtype, device=device or x.device)


def full_like(x: Array, /, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """`full` of an array's shape and type."""
    return full(x.shape, fill_value, dtype=dtype or x.dtype, device=device or x.device)


def zeros_like(x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
    """`zeros` of an array's shape and type."""
    return zeros(x.shape, dtype=dtype or x.dtype, device=device or x.device)


def ones_like(x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
    """`ones` of an array's shape and type."""
    return ones(x.shape, dtype=dtype or x.dtype, device=device or x.device)


def arange(start: Any, /, stop: Any = None, step: Any = 1, *, dtype: Any = None, device: Any = None) -> Array:
    """Numbers from `start` to below `stop`, `step` apart."""
    if stop is None:
        start, stop = 0, start
    # Integers of numpy's are Python's from here on, whose arithmetic does not wrap.
    start, stop, step = (operator.index(each) if hasattr(each, "__index__") and not isinstance(each, Array) else each for each in (start, stop, step))
    if step == 0:
        raise ValueError("Maximum allowed size exceeded: step is 0")
    whole = all(isinstance(each, int) for each in (start, stop, step))
    name = _dtypes.name_of(dtype, "int64" if whole else "float64")
    n = max(0, -((start - stop) // step) if whole else math.ceil((stop - start) / step))
    return _vmaccel.arange(start, step, n, name, device)


def linspace(start: Any, stop: Any, /, num: int, *, dtype: Any = None, device: Any = None, endpoint: bool = True) -> Array:
    """`num` numbers from `start` to `stop`, evenly spaced."""
    name = _dtypes.name_of(dtype, "complex128" if isinstance(start, complex) or isinstance(stop, complex) else "float64")
    wide = name if _dtypes.dtype(name).kind in "c" else "float64"
    steps = num - 1 if endpoint else num
    index = _vmaccel.arange(0, 1, num, "int64", device)._astype(wide)
    if steps <= 0:
        return (index * 0 + start)._astype(name)
    # From both ends, so that both are met.
    step = (stop - start) / steps
    result = index * step + start
    if endpoint:
        from ._functions import where

        result = where(index == float(steps), full((), stop, dtype=wide, device=result.device), result)
    return result._astype(name)


def eye(n_rows: int, n_cols: Optional[int] = None, /, *, k: int = 0, dtype: Any = None, device: Any = None) -> Array:
    """1 on a diagonal, 0 elsewhere."""
    shape = (n_rows, n_rows if n_cols is None else n_cols)
    on = _vmaccel.indices(shape, 1, device) - _vmaccel.indices(shape, 0, device) == max(min(k, 2**62), -(2**62))
    return on._astype(_dtypes.name_of(dtype, "float64"))


def _triangle(x: Array, below: bool, k: int) -> Array:
    if x.ndim < 2:
        raise ValueError("a triangle is of matrices: the array has less than two dimensions")
    shape = x.shape
    distance = _vmaccel.indices(shape, len(shape) - 1, x.device) - _vmaccel.indices(shape, len(shape) - 2, x.device)
    return _vmaccel.select(distance <= k if below else distance >= k, x, zeros((), dtype=x.dtype, device=x.device))


def tril(x: Array, /, *, k: int = 0) -> Array:
    """0 above a diagonal."""
    return _triangle(x, True, k)


def triu(x: Array, /, *, k: int = 0) -> Array:
    """0 below a diagonal."""
    return _triangle(x, False, k)


def meshgrid(*arrays: Array, indexing: str = "xy") -> list[Array]:
    """Coordinates of a grid, of those along its axes."""
    if indexing not in ("xy", "ij"):
        raise ValueError("indexing is 'xy' or 'ij'")
    n = len(arrays)
    order = list(range(n))
    if indexing == "xy" and n > 1:
        order[0], order[1] = 1, 0
    shape = [0] * n
    for array, at in zip(arrays, order):
        shape[at] = array.size
    own = lambda at: [-1 if d == at else 1 for d in range(n)]  # noqa: E731
    return [array.reshape(own(at))._broadcast_to(shape) for array, at in zip(arrays, order)]


_ = builtins
