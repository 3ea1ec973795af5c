"""Random numbers of a counter and a key: a seed gives the same ones on every device (Salmon et al. 2011)."""

from __future__ import annotations

from typing import Any, Optional

from ._vmaccel import Array
from ._vmaccel import Generator as Generator

__all__ = ["Generator", "default_rng", "seed", "random", "normal", "integers", "permutation"]

_generator: Optional[Generator] = None


def default_rng(seed: Optional[int] = None) -> Generator:
    """A stream of random numbers."""
    return Generator(seed)


def seed(value: int) -> None:
    """Begins the stream anew that the functions of this module draw from."""
    global _generator
    _generator = Generator(value)


def _own() -> Generator:
    global _generator
    if _generator is None:
        _generator = Generator()
    return _generator


def random(size: Any = None, dtype: str = "float64") -> Array:
    """Numbers in [0, 1)."""
    return _own().random(size, str(dtype))


def normal(size: Any = None, dtype: str = "float64") -> Array:
    """Of the normal distribution with mean 0 and variance 1."""
    return _own().standard_normal(size, str(dtype))


def integers(low: int, high: Optional[int] = None, size: Any = None, dtype: str = "int64") -> Array:
    """Integers from `low` to below `high`."""
    return _own().integers(low, high, size, str(dtype))


def permutation(n: int) -> Array:
    """The integers below `n` in random order."""
    return _own().permutation(n)
