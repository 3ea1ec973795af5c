"""What the array's type has that is written in Python."""

from __future__ import annotations

import builtins
from typing import Any

from . import _dtypes, _interchange as _interchange, _vmaccel
from ._vmaccel import Array

def _astype(self: Array, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Array:
    """The elements in another type."""
    return self._astype(_dtypes.dtype(dtype).name)


def _repr(self: Array) -> str:
    try:
        import numpy

        text = numpy.array2string(self.__array__(), separator=", ", prefix="Array(", threshold=1000)
    except ImportError:
        text = builtins.str(self.tolist())
    return f"Array({text}, dtype={self._dtype})"


def _str(self: Array) -> str:
    try:
        import numpy

        return numpy.array2string(self.__array__())
    except ImportError:
        return builtins.str(self.tolist())


def _tolist(self: Array) -> Any:
    """The elements as nested lists of Python's numbers."""
    import struct

    shape, name = self.shape, self._dtype
    source = self.astype("float32") if name in ("bfloat16", "float16") else self
    of = _dtypes.dtype(source._dtype)
    code = {"b": "?", "i": " bh i   q", "u": " BH I   Q", "f": "    f   d", "c": ""}[of.kind]
    letter = code.strip() if of.kind == "b" else code[of.itemsize] if code else ""
    data = source.tobytes()
    if of.kind == "c":
        parts = struct.unpack(f"<{len(data) // (of.itemsize // 2)}{'f' if of.itemsize == 8 else 'd'}", data)
        flat: list = [complex(re, im) for re, im in zip(parts[::2], parts[1::2])]
    else:
        flat = list(struct.unpack(f"<{len(data) // of.itemsize}{letter}", data))
    for extent in reversed(shape[1:]):
        if extent == 0:
            return _empty(shape)
        flat = [flat[at : at + extent] for at in range(0, len(flat), extent)]
    return flat if shape else flat[0]


def _empty(shape: tuple) -> list:
    return [_empty(shape[1:]) for _ in range(shape[0])] if shape else []


def _iter(self: Array) -> Any:
    if self.ndim == 0:
        raise TypeError("iteration over a 0-d array")
    return (self[at] for at in range(len(self)))


def _to_device(self: Array, device: Any, /, *, stream: Any = None) -> Array:
    """The elements on another device."""
    target = _vmaccel.open(device)
    if target == self.device:
        return self
    return _vmaccel.from_buffer(self.tobytes(), self._dtype, self.shape, target)


def _namespace(self: Array, /, *, api_version: Any = None) -> Any:
    import vmaccel

    if api_version is not None and api_version not in ("2021.12", "2022.12", "2023.12", "2024.12"):
        raise ValueError(f"there is no version {api_version!r} of the array API here: 2024.12 is the newest")
    return vmaccel


def _reduction(name: str) -> Any:
    def method(self: Array, axis: Any = None, keepdims: bool = False, **more: Any) -> Array:
        import vmaccel

        return getattr(vmaccel, name)(self, axis=axis, keepdims=keepdims, **more)

    method.__name__ = name
    method.__doc__ = f"`vmaccel.{name}` of the array."
    return method


def _transpose(self: Array, *axes: Any) -> Array:
    """The dimensions in another order, in reverse without one."""
    if not axes or axes == (None,):
        return self.T
    order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
    return self._permute(list(order))


Array.__divmod__ = lambda self, other: (self // other, self % other)
Array.__rdivmod__ = lambda self, other: (other // self, other % self)
Array.dtype = property(lambda self: _dtypes._BY_NAME[self._dtype], doc="The type of the elements.")
Array.astype = _astype
Array.__repr__ = _repr
Array.__str__ = _str
Array.tolist = _tolist
Array.__iter__ = _iter
Array.to_device = _to_device
Array.__array_namespace__ = _namespace
Array.transpose = _transpose
Array.flatten = lambda self: self.reshape(-1)
Array.ravel = Array.flatten
Array.copy = lambda self: +self if self._dtype != "bool" else self | self
Array.__copy__ = Array.copy
Array.__deepcopy__ = lambda self, memo: self.copy()
Array.__array_ufunc__ = None
for _name in ("sum", "prod", "max", "min", "mean", "var", "std", "any", "all"):
    setattr(Array, _name, _reduction(_name))
Array.argmax = lambda self, axis=None, keepdims=False: __import__("vmaccel").argmax(self, axis=axis, keepdims=keepdims)
Array.argmin = lambda self, axis=None, keepdims=False: __import__("vmaccel").argmin(self, axis=axis, keepdims=keepdims)


def _reduce_pickle(self: Array) -> tuple:
    return (_unpickled, (self.tobytes(), self._dtype, self.shape))


def _unpickled(data: bytes, dtype: str, shape: tuple) -> Array:
    return _vmaccel.from_buffer(data, dtype, shape)


Array.__reduce__ = _reduce_pickle
