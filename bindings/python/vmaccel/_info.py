"""What the namespace has, as the array API standard asks."""

from __future__ import annotations

from typing import Any, Optional

from . import _dtypes, _vmaccel
from ._device import available, default_device


class __array_namespace_info__:  # noqa: N801
    """Capabilities, devices and types."""

    def capabilities(self) -> dict[str, Any]:
        """What of the standard is there that may be left out."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 32}

    def default_device(self) -> _vmaccel.Device:
        """The device that is used where none is named."""
        return default_device()

    def devices(self) -> list[Any]:
        """The devices that there are."""
        return [_vmaccel.open(name) for name in available()]

    def default_dtypes(self, *, device: Any = None) -> dict[str, _dtypes.DType]:
        """The types that are used where none is named."""
        of = _dtypes.dtype
        return {
            "real floating": of("float64"),
            "complex floating": of("complex128"),
            "integral": of("int64"),
            "indexing": of("int64"),
        }

    def dtypes(self, *, device: Any = None, kind: Optional[Any] = None) -> dict[str, _dtypes.DType]:
        """The types of a kind that the standard has."""
        all_of = {each.name: each for each in _dtypes._ALL if each.name not in ("float16", "bfloat16")}
        return all_of if kind is None else {name: each for name, each in all_of.items() if _dtypes.isdtype(each, kind)}
