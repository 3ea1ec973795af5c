"""Arrays on an accelerator: the GPU of this machine, the one that a host shares with this guest, or the processor.

    >>> import vmaccel as va
    >>> a = va.asarray([[1.0, 2.0], [3.0, 4.0]])
    >>> (a @ a + 1.0).sum()
    Array(58., dtype=float64)

The namespace is that of the array API standard 2024.12 (https://data-apis.org/array-api). Functions of elements and reductions are fused into
kernels, which run when a value is needed. An array is a value: what is a view of another does not see what becomes of that later.
"""

from ._vmaccel import Array, Device, DeviceError, DeviceLostError, __version__
from . import _array as _array
from ._device import available, default_device, device, init, shutdown, stream, synchronize
from ._dtypes import *  # noqa: F403
from ._dtypes import __all__ as _dtypes_all
from ._creation import *  # noqa: F403
from ._creation import __all__ as _creation_all
from ._elementwise import *  # noqa: F403
from ._elementwise import __all__ as _elementwise_all
from ._functions import *  # noqa: F403
from ._functions import __all__ as _functions_all
from ._kernel import *  # noqa: F403
from ._kernel import __all__ as _kernel_all
from ._info import __array_namespace_info__
from . import fft, kernels, linalg, nn, random

__array_api_version__ = "2024.12"

pi = 3.141592653589793
e = 2.718281828459045
inf = float("inf")
nan = float("nan")
newaxis = None

__all__ = [
    "Array", "Device", "DeviceError", "DeviceLostError", "available", "default_device", "device", "init", "shutdown",
    "stream", "synchronize", "fft", "kernels", "linalg", "nn", "random", "pi", "e", "inf", "nan", "newaxis", "__array_namespace_info__",
    *_dtypes_all, *_creation_all, *_elementwise_all, *_functions_all, *_kernel_all,
]  # fmt: skip
