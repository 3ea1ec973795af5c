"""Types of elements."""

from __future__ import annotations

from typing import Any, Union

from . import _vmaccel


class DType:
    """The type of an array's elements."""

    __slots__ = ("name", "kind", "itemsize")

    def __init__(self, name: str, kind: str, itemsize: int) -> None:
        self.name, self.kind, self.itemsize = name, kind, itemsize

    def __repr__(self) -> str:
        return f"vmaccel.{self.name}"

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple:
        return (dtype, (self.name,))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DType):
            return self is other
        try:
            return dtype(other) is self  # type: ignore[arg-type]
        except TypeError:
            return False

    def __hash__(self) -> int:
        return hash(self.name)


# The kinds are numpy's letters; bfloat16 is a float here.
_ALL = [
    DType("bool", "b", 1),
    *(DType(f"int{8 * n}", "i", n) for n in (1, 2, 4, 8)),
    *(DType(f"uint{8 * n}", "u", n) for n in (1, 2, 4, 8)),
    DType("float16", "f", 2),
    DType("bfloat16", "f", 2),
    DType("float32", "f", 4),
    DType("float64", "f", 8),
    DType("complex64", "c", 8),
    DType("complex128", "c", 16),
]
_BY_NAME = {each.name: each for each in _ALL}
_globals = {("bool" if each.name == "bool" else each.name): each for each in _ALL}
globals().update(_globals)

_PYTHON: dict[Any, str] = {bool.__class__: "", float: "float64", int: "int64", complex: "complex128"}
_PYTHON[type(True)] = "bool"

DTypeLike = Union[DType, str, type]


def dtype(value: DTypeLike) -> DType:
    """The type that a name, a type of numpy's or one of Python's means."""
    if isinstance(value, DType):
        return value
    if isinstance(value, str):
        found = _BY_NAME.get(value)
        if found is not None:
            return found
    elif isinstance(value, type) and value in _PYTHON:
        return _BY_NAME[_PYTHON[value]]
    else:
        name = getattr(value, "name", None) or getattr(value, "__name__", None)
        if isinstance(name, str) and name.rstrip("_") in _BY_NAME:
            return _BY_NAME[name.rstrip("_")]
    raise TypeError(f"data type {value!r} not understood")


def name_of(value: DTypeLike | None, default: str) -> str:
    """The name of a type, or of the one that is meant by none."""
    return default if value is None else dtype(value).name


class finfo:
    """What a float, or the parts of a complex number, can be."""

    def __init__(self, type: Any, /) -> None:
        of = type.dtype if hasattr(type, "dtype") else dtype(type)
        name = {"complex64": "float32", "complex128": "float64"}.get(of.name, of.name)
        if of.kind not in "fc":
            raise TypeError(f"finfo takes floats, not {of.name}")
        digits, least, most = {
            "float16": (10, -14, 16),
            "bfloat16": (7, -126, 128),
            "float32": (23, -126, 128),
            "float64": (52, -1022, 1024),
        }[name]
        self.dtype = _BY_NAME[name]
        self.bits = 8 * self.dtype.itemsize
        self.eps = 2.0**-digits
        self.smallest_normal = 2.0**least
        self.max = (2.0 - self.eps) * 2.0 ** (most - 1)
        self.min = -self.max


class iinfo:
    """What an integer can be."""

    def __init__(self, type: Any, /) -> None:
        self.dtype = type.dtype if hasattr(type, "dtype") else dtype(type)
        if self.dtype.kind not in "iu":
            raise TypeError(f"iinfo takes integers, not {self.dtype.name}")
        self.bits = 8 * self.dtype.itemsize
        signed = self.dtype.kind == "i"
        self.max = 2 ** (self.bits - signed) - 1
        self.min = -(2 ** (self.bits - 1)) if signed else 0


_KINDS = {
    "bool": "b",
    "signed integer": "i",
    "unsigned integer": "u",
    "integral": "iu",
    "real floating": "f",
    "complex floating": "c",
    "numeric": "iufc",
}


_of = dtype


def isdtype(dtype: DTypeLike, kind: Any) -> bool:
    """Is a type of a kind, or of one of several?"""
    if isinstance(kind, tuple):
        return any(isdtype(dtype, each) for each in kind)
    if isinstance(kind, str) and kind not in _BY_NAME:
        if kind not in _KINDS:
            raise ValueError(f"there is no kind of types {kind!r}: there are {', '.join(_KINDS)}")
        return _of(dtype).kind in _KINDS[kind]
    if kind == "bool":
        return _of(dtype).kind == "b"
    return _of(dtype) is _of(kind)


def can_cast(from_: Any, to: DTypeLike, /) -> bool:
    """Does a type become another by promotion alone?"""
    source = from_.dtype if hasattr(from_, "dtype") else dtype(from_)
    target = dtype(to)
    return _vmaccel.promote(source.name, target.name) == target.name


def result_type(*arrays_and_dtypes: Any) -> DType:
    """The type of a function's result of these arrays, types and numbers of Python."""
    types, numbers = [], []
    for each in arrays_and_dtypes:
        if isinstance(each, (bool_, int, float, complex)) and not isinstance(each, type):
            numbers.append(each)
        else:
            types.append(each.dtype if hasattr(each, "dtype") else dtype(each))
    if not types:
        if not numbers:
            raise ValueError("at least one array or dtype is required")
        types = [_BY_NAME[_PYTHON[type(each)]] for each in numbers]
        numbers = []
    name = types[0].name
    for each in types[1:]:
        name = _vmaccel.promote(name, each.name)
    for number in numbers:
        kind = _BY_NAME[name].kind
        if isinstance(number, complex):
            if kind != "c":
                name = "complex64" if name in ("float32", "float16", "bfloat16") else "complex128"
        elif isinstance(number, float):
            name = name if kind in "fc" else "float64"
        elif not isinstance(number, bool_) and kind == "b":
            name = "int64"
    return _BY_NAME[name]


bool_ = type(True)

__all__ = [*_globals, "DType", "dtype", "finfo", "iinfo", "isdtype", "can_cast", "result_type"]
