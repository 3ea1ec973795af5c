"""Indices that are arrays: truth values, or places."""

from __future__ import annotations

from typing import Any, Optional

from . import _vmaccel
from ._vmaccel import Array


def _wrapped(index: Array, n: int) -> Array:
    """Places below 0 counted from behind."""
    index = index._astype("int64")
    return _vmaccel.select(index < 0, index + n, index)


def gathered(x: Array, places: list[Array]) -> Array:
    """The elements at places, of which there is one for each dimension."""
    at: Optional[Array] = None
    inside: Optional[Array] = None
    for place, n in zip(places, x.shape):
        place = _wrapped(place, n)
        own = (place >= 0) & (place < n)
        inside = own if inside is None else inside & own
        at = place if at is None else at * n + place
    if at is None or inside is None:
        return x
    return _vmaccel.gather(x.reshape(-1), _vmaccel.select(inside, at, -1))


def along(x: Array, index: Array, axis: int) -> Array:
    """The elements at indices along one axis, whose place the index's shape takes."""
    shape = x.shape[:axis] + index.shape + x.shape[axis + 1 :]
    places = []
    for d in range(x.ndim):
        if d == axis:
            own = (1,) * axis + index.shape + (1,) * (x.ndim - axis - 1)
            places.append(index.reshape(own)._broadcast_to(shape))
        else:
            places.append(_vmaccel.indices(shape, d if d < axis else d + index.ndim - 1, x.device))
    return gathered(x, places)


def _places(x: Array, key: Any) -> tuple[list[Array], tuple]:
    """The place along each dimension of each element that a key names, and the shape of all."""
    from ._creation import asarray, full
    from ._functions import _broadcast

    keys = list(key) if isinstance(key, tuple) else [key]
    parts: list[Any] = []
    for each in keys:
        if isinstance(each, list):
            each = asarray(each, device=x.device)
        if hasattr(each, "__array_interface__"):
            each = asarray(each, device=x.device)
        if isinstance(each, bool):
            each = asarray(each, device=x.device)
        parts.append(each)
    named = sum(_named(each) for each in parts)
    if Ellipsis not in [each for each in parts if not isinstance(each, Array)]:
        parts.append(Ellipsis)
    if named > x.ndim:
        raise IndexError(f"too many indices for array: array is {x.ndim}-dimensional, but {named} were indexed")
    # Each dimension of the result: a slice, a new one, or one that belongs to the indices that are arrays.
    plain: list[Any] = []
    arrays: list[tuple[int, Array]] = []
    axis, first, apart, last = 0, None, False, None
    for number, each in enumerate(parts):
        if isinstance(each, Array) or isinstance(each, int):
            if isinstance(each, Array) and each._dtype == "bool":
                masked = x.shape[axis : axis + each.ndim]
                if each.shape != masked:
                    if len(masked) < each.ndim or any(n not in (0, extent) for n, extent in zip(each.shape, masked)):
                        raise IndexError(f"boolean index of shape {each.shape} did not match indexed array along {masked}")
                    # Of a mask without elements none is true.
                    each = full(masked, False, dtype="bool", device=x.device)
                if each.ndim == 0:
                    count = int(bool(each))
                    arrays.append((-1, _vmaccel.indices((count,), 0, x.device)))
                else:
                    from ._functions import nonzero

                    for place in nonzero(each):
                        arrays.append((axis, place))
                        axis += 1
            else:
                if isinstance(each, int):
                    n = x.shape[axis]
                    if not -n <= each < n:
                        raise IndexError(f"index {each} is out of bounds for axis {axis} with size {n}")
                    each = asarray(each, device=x.device)
                elif each.dtype.kind not in "iu":
                    raise IndexError("arrays used as indices must be of integer (or boolean) type")
                arrays.append((axis, each))
                axis += 1
            if first is None:
                first = len(plain)
            elif last is not None and last != number - 1:
                apart = True
            last = number
        elif each is None:
            plain.append(None)
        elif each is Ellipsis:
            for _ in range(x.ndim - named):
                plain.append((axis, range(x.shape[axis])))
                axis += 1
        elif isinstance(each, slice):
            plain.append((axis, range(*each.indices(x.shape[axis]))))
            axis += 1
        else:
            raise IndexError(f"only integers, slices, ellipsis, None and arrays are valid indices, not {each!r}")
    joint = _broadcast(*(each.shape for _, each in arrays))
    at = 0 if apart else (first or 0)
    shape: list[int] = []
    for number, each in enumerate(plain):
        if number == at:
            shape.extend(joint)
        shape.append(1 if each is None else len(each[1]))
    if at >= len(plain):
        shape.extend(joint)
    whole = tuple(shape)
    places: list[Any] = [None] * x.ndim
    for d, each in arrays:
        if d >= 0:
            own = each.reshape((1,) * (len(joint) - each.ndim) + each.shape)
            places[d] = own.reshape(own.shape + (1,) * (len(whole) - at - len(joint)))._broadcast_to(whole)
    for number, each in enumerate(plain):
        if each is not None:
            d, values = each
            axis = number if number < at else number + len(joint)
            places[d] = _vmaccel.indices(whole, axis, x.device) * values.step + values.start
    return places, whole


def _named(each: Any) -> int:
    if isinstance(each, Array) and each._dtype == "bool":
        return each.ndim
    return 0 if each is None or each is Ellipsis else 1


def get(x: Array, key: Any) -> Array:
    """The elements that a key with arrays names."""
    places, shape = _places(x, key)
    return gathered(x, places) if places else x._broadcast_to(shape) if 0 not in shape else x.reshape(-1)[:0]


def replaced(x: Array, key: Any, value: Any) -> Array:
    """The array with the elements that a key with arrays names replaced."""
    from ._creation import full

    if isinstance(key, Array) and key._dtype == "bool" and key.shape == x.shape and not isinstance(value, Array):
        return _vmaccel.select(key, full((), value, dtype=x.dtype, device=x.device), x)._astype(x._dtype)
    if not isinstance(value, Array):
        value = full((), value, dtype=x.dtype, device=x.device)
    places, shape = _places(x, key)
    at = None
    for place, n in zip(places, x.shape):
        place = _wrapped(place, n)
        place = _vmaccel.select((place >= 0) & (place < n), place, -(2**40))
        at = place if at is None else at * n + place
    if at is None:
        return value._astype(x._dtype)._broadcast_to(x.shape) if 0 not in shape else x
    while value.ndim > len(shape) and value.shape[0] == 1:
        value = value.reshape(value.shape[1:])
    return _vmaccel.scatter(x, at, value._astype(x._dtype)._broadcast_to(shape))
