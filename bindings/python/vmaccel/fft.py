"""Fourier transforms. They are computed by the host's processor, whatever device their arrays are on."""

from __future__ import annotations

from typing import Any, Optional, Sequence

from . import _vmaccel
from ._creation import arange, zeros
from ._functions import _integers, concat, flip, roll
from ._vmaccel import Array

__all__ = [
    "fft", "ifft", "fftn", "ifftn", "rfft", "irfft", "rfftn", "irfftn", "hfft", "ihfft", "fftfreq", "rfftfreq", "fftshift", "ifftshift",
]  # fmt: skip


def _resized(x: Array, n: Optional[int], axis: int) -> Array:
    """The first n elements along an axis, with zeros behind them where there are fewer."""
    if x.ndim == 0 or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis {axis} is out of bounds for array of dimension {x.ndim}")
    axis %= x.ndim
    if n is None:
        n = x.shape[axis]
    if n < 1:
        raise ValueError(f"invalid number of data points ({n}) specified")
    if n <= x.shape[axis]:
        return x[(slice(None),) * axis + (slice(0, n),)]
    rest = x.shape[:axis] + (n - x.shape[axis],) + x.shape[axis + 1 :]
    return concat([x, zeros(rest, dtype=x.dtype, device=x.device)], axis=axis)


def _scaled(x: Array, n: int, norm: str, inverse: bool) -> Array:
    """Divided as the norm says: `backward` divides the way back, `forward` the way there, `ortho` both by the root."""
    if norm not in ("backward", "ortho", "forward"):
        raise ValueError("norm is 'backward', 'ortho' or 'forward'")
    if norm == "ortho":
        return x / float(n) ** 0.5
    return x / float(n) if (norm == "backward") == inverse else x


def _transform(x: Array, n: Optional[int], axis: int, norm: str, inverse: bool) -> Array:
    x = _resized(x, n, axis)
    return _scaled(_vmaccel.fft(x, axis, inverse), x.shape[axis], norm, inverse)


def fft(x: Array, /, *, n: Optional[int] = None, axis: int = -1, norm: str = "backward") -> Array:
    """The discrete Fourier transform along an axis."""
    return _transform(x, n, axis, norm, False)


def ifft(x: Array, /, *, n: Optional[int] = None, axis: int = -1, norm: str = "backward") -> Array:
    """The inverse of `fft`."""
    return _transform(x, n, axis, norm, True)


def _axes(x: Array, s: Optional[Sequence[int]], axes: Optional[Sequence[int]]) -> list[tuple[int, Optional[int]]]:
    """The axes of a transform of several, and how many elements each has; -1 are all."""
    if axes is None:
        axes = range(x.ndim) if s is None else range(x.ndim - len(s), x.ndim)
    if s is not None and len(s) != len(axes):
        raise ValueError("s and axes differ in length")
    return [(axis, None if s is None or s[at] == -1 else s[at]) for at, axis in enumerate(axes)]


def fftn(x: Array, /, *, s: Any = None, axes: Any = None, norm: str = "backward") -> Array:
    """The discrete Fourier transform along several axes, all where none is named."""
    for axis, n in _axes(x, s, axes):
        x = fft(x, n=n, axis=axis, norm=norm)
    return x


def ifftn(x: Array, /, *, s: Any = None, axes: Any = None, norm: str = "backward") -> Array:
    """The inverse of `fftn`."""
    for axis, n in _axes(x, s, axes):
        x = ifft(x, n=n, axis=axis, norm=norm)
    return x


def rfft(x: Array, /, *, n: Optional[int] = None, axis: int = -1, norm: str = "backward") -> Array:
    """The transform of real numbers: those terms that are not another's conjugate."""
    if x.dtype.kind == "c":
        raise TypeError("rfft is of real numbers")
    x = _resized(x, n, axis)
    return _resized(fft(x, axis=axis, norm=norm), x.shape[axis] // 2 + 1, axis)


def irfft(x: Array, /, *, n: Optional[int] = None, axis: int = -1, norm: str = "backward") -> Array:
    """The inverse of `rfft`; n are the real numbers, by default an even number of them."""
    if n is None:
        n = 2 * (x.shape[axis] - 1)
    if n < 1:
        raise ValueError(f"invalid number of data points ({n}) specified")
    half = _resized(x, n // 2 + 1, axis)
    axis %= x.ndim
    # What `rfft` leaves out are conjugates, backwards. The first term, and the middle one of an even number, are real.
    between = half[(slice(None),) * axis + (slice(1, (n + 1) // 2),)]
    conj = between._unary("conj") if between.dtype.kind == "c" else between
    whole = concat([half, flip(conj, axis=axis)], axis=axis)
    return ifft(whole, axis=axis, norm=norm)._unary("real")


def rfftn(x: Array, /, *, s: Any = None, axes: Any = None, norm: str = "backward") -> Array:
    """The transform of real numbers along several axes; the last has the terms that `rfft` has."""
    *others, (last, n) = _axes(x, s, axes)
    x = rfft(x, n=n, axis=last, norm=norm)
    for axis, n in others:
        x = fft(x, n=n, axis=axis, norm=norm)
    return x


def irfftn(x: Array, /, *, s: Any = None, axes: Any = None, norm: str = "backward") -> Array:
    """The inverse of `rfftn`."""
    *others, (last, n) = _axes(x, s, axes)
    for axis, extent in others:
        x = ifft(x, n=extent, axis=axis, norm=norm)
    return irfft(x, n=n, axis=last, norm=norm)


_OTHER = {"backward": "forward", "forward": "backward", "ortho": "ortho"}


def hfft(x: Array, /, *, n: Optional[int] = None, axis: int = -1, norm: str = "backward") -> Array:
    """The transform, which is real, of numbers of which the others are conjugates."""
    if norm not in _OTHER:
        raise ValueError("norm is 'backward', 'ortho' or 'forward'")
    return irfft(x._unary("conj") if x.dtype.kind == "c" else x, n=n, axis=axis, norm=_OTHER[norm])


def ihfft(x: Array, /, *, n: Optional[int] = None, axis: int = -1, norm: str = "backward") -> Array:
    """The inverse of `hfft`."""
    if norm not in _OTHER:
        raise ValueError("norm is 'backward', 'ortho' or 'forward'")
    return rfft(x, n=n, axis=axis, norm=_OTHER[norm])._unary("conj")


def fftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Array:
    """The frequencies of the terms of `fft`, of samples d apart."""
    index = arange(n, dtype="float64" if dtype is None else dtype, device=device)
    half = (n - 1) // 2 + 1
    return concat([index[:half], index[half:] - n]) / (n * d)


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Array:
    """The frequencies of the terms of `rfft`, of samples d apart."""
    return arange(n // 2 + 1, dtype="float64" if dtype is None else dtype, device=device) / (n * d)


def _shifts(x: Array, axes: Any) -> list[int]:
    if axes is None:
        return list(range(x.ndim))
    return _integers(axes)


def fftshift(x: Array, /, *, axes: Any = None) -> Array:
    """With the term of frequency 0 in the middle."""
    axes = _shifts(x, axes)
    return roll(x, tuple(x.shape[axis] // 2 for axis in axes), axis=tuple(axes))


def ifftshift(x: Array, /, *, axes: Any = None) -> Array:
    """The inverse of `fftshift`."""
    axes = _shifts(x, axes)
    return roll(x, tuple(-(x.shape[axis] // 2) for axis in axes), axis=tuple(axes))
