"""Devices: which there are, and which one is used."""

from __future__ import annotations

import atexit
from typing import Any, Optional

from . import _vmaccel
from ._vmaccel import Device


def init(name: Optional[str] = None) -> Device:
    """Opens a device and uses it from here on where none is named.

    `name` is `auto` (which is the default; `VMACCEL_DEVICE` names another), `guest`, `cuda:N`, `rocm:N`, a PCI address, or `cpu`. `auto` is the
    accelerator that a host shares with this guest, else the first GPU, else the processor.
    """
    opened = _vmaccel.open(name)
    _vmaccel.set_default(opened)
    return opened


def shutdown() -> None:
    """Ends all devices, once what was given to them has run. Their arrays can't be used any more."""
    _vmaccel.shutdown()


def default_device() -> Device:
    """The device that is used where none is named."""
    return _vmaccel.open(None)


def available() -> list[str]:
    """The devices that there are, by names that `init` takes."""
    return _vmaccel.available()


def synchronize(device: Any = None) -> None:
    """Waits until all that was given to a device has run."""
    _vmaccel.open(device).synchronize()


class device:
    """The device that this thread uses in a `with` block where none is named."""

    def __init__(self, name: Any = None) -> None:
        self._device = _vmaccel.open(name)
        self._before: list[Optional[Device]] = []

    def __enter__(self) -> Device:
        self._before.append(_vmaccel.set_current(self._device))
        return self._device

    def __exit__(self, *_: object) -> None:
        _vmaccel.set_current(self._before.pop())


class stream:
    """A stream of a device: what this thread computes in a `with` block runs beside what other streams were given.

    An array may be used on every stream of its device: what is given it begins behind what computes it. Each `stream()` is another one, up to
    32 of a device, which are then given out again.
    """

    def __init__(self, device: Any = None) -> None:
        self._device = _vmaccel.open(device)._by_stream()
        self._before: list[Optional[Device]] = []

    def __enter__(self) -> stream:
        self._before.append(_vmaccel.set_current(self._device))
        return self

    def __exit__(self, *_: object) -> None:
        _vmaccel.set_current(self._before.pop())

    def __repr__(self) -> str:
        return f"<vmaccel.stream {self._device._stream} of {self._device!r}>"

    @property
    def device(self) -> Device:
        """The device."""
        return self._device

    @property
    def handle(self) -> Optional[int]:
        """The `CUstream` or `hipStream_t`, for other libraries; None where there are no such streams."""
        return self._device.stream_handle

    def synchronize(self) -> None:
        """Waits until all that it was given has run."""
        self._device._synchronize_stream()


atexit.register(shutdown)
