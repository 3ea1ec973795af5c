"""Arrays to and from other libraries: what of it is written in Python.

What others are given is read only where they can be told so, as an array is a value. On the processor numpy sees the array's own memory.
"""

from __future__ import annotations

import sys
from typing import Any, Optional

from . import _dtypes, _vmaccel
from ._vmaccel import Array


def _numpy(self: Array, dtype: Any = None, copy: Optional[bool] = None) -> Any:
    """A numpy array of the elements: on the processor a view of the array's memory, else a copy; read only, unless `copy` is true.

    numpy has no bfloat16: with `ml_dtypes` imported it is that package's, else it becomes float32.
    """
    import numpy

    source = self
    own = getattr(sys.modules.get("ml_dtypes"), "bfloat16", None) if self._dtype == "bfloat16" else None
    if self._dtype == "bfloat16" and own is None:
        if copy is False:
            raise ValueError("numpy has no bfloat16: without ml_dtypes its elements can only be copied, as float32")
        source = self._astype("float32")
    view = source._host_view()
    if view is not None:
        result = numpy.asarray(view)
    elif copy is False:
        raise ValueError("the elements are on a device: they can only be copied")
    else:
        of = _dtypes.dtype(source._dtype)
        text = "<u2" if source._dtype == "bfloat16" else f"{'|' if of.itemsize == 1 else '<'}{of.kind}{of.itemsize}"
        result = numpy.frombuffer(source.tobytes(), dtype=text).reshape(self.shape)
    if own is not None:
        result = result.view(own)
    if dtype is not None and result.dtype != dtype:
        if copy is False:
            raise ValueError(f"elements of {self._dtype} become {dtype} only in a copy")
        return result.astype(dtype)
    return result.copy() if copy else result


def _buffer(self: Array, flags: int) -> memoryview:
    """The elements by the buffer protocol, from Python 3.12 on, where the host can read them."""
    if self._host_view() is None:
        raise BufferError("the elements are on a device: copy them by numpy.asarray or tobytes")
    return memoryview(_numpy(self))


def of_numpy(data: Any, name: Optional[str], device: Any, copy: Optional[bool]) -> Array:
    """An array of a numpy array's elements. Without a copy it sees what numpy writes later: nothing may."""
    import numpy

    if str(data.dtype) == "bfloat16":
        own, data = "bfloat16", data.view(numpy.uint16)
    else:
        own = _dtypes.dtype(data.dtype.name).name
    if copy is False and name not in (None, own):
        raise ValueError(f"elements of {own} become {name} only in a copy")
    native = data.astype(data.dtype.newbyteorder("="), copy=False)
    if any(step % data.itemsize for step in native.strides):
        native = native.copy()
    if copy is False and native is not data:
        raise ValueError("numpy's array can only be copied: kernels need its elements in another order, or whole elements apart")
    try:
        result = _vmaccel.from_interface(native.__array_interface__, native, device, copy is not False, own)
    except BufferError as error:
        raise ValueError(f"numpy's array can't be taken as it is: {error}") from None
    return result if name in (None, own) else result._astype(name)


def of_cuda(obj: Any, name: Optional[str], device: Any, copy: Optional[bool]) -> Array:
    """An array of another library's on a CUDA device."""
    try:
        if hasattr(obj, "__dlpack__"):
            result = _vmaccel.from_dlpack(obj, device, copy is not False)
        else:
            result = _vmaccel.from_interface(obj.__cuda_array_interface__, obj, device, copy is not False, None, True)
    except BufferError as error:
        raise ValueError(f"the other library's array can't be taken as it is: {error}") from None
    if copy is False and name not in (None, result._dtype):
        raise ValueError(f"elements of {result._dtype} become {name} only in a copy")
    return result if name in (None, result._dtype) else result._astype(name)


Array.__array__ = _numpy
if sys.version_info >= (3, 12):
    Array.__buffer__ = _buffer
