"""Own kernels: a function in a subset of Python, compiled for the device that its arrays are on.

    >>> @va.kernel
    ... def saxpy(y: va.InOut[va.float32], x: va.In[va.float32], a: va.float32):
    ...     i = va.thread_id()
    ...     y[i] = a * x[i] + y[i]
    >>> saxpy[n](y, x, 2.0)
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import operator
from typing import Any, Callable, Optional, Union

from . import _dtypes, _vmaccel
from ._jumps import Jumps
from ._numbers import _IR, Memory, Number
from ._source import KernelError, Source
from ._translate import Translator
from ._vmaccel import Array

__all__ = [
    "In", "InOut", "Kernel", "KernelError", "Out", "atomic_add", "atomic_cas", "atomic_exchange", "atomic_max", "atomic_min", "barrier", "block_id",
    "device_function", "fma", "kernel", "local_id", "shared", "thread_id",
]  # fmt: skip


class _Parameter:
    """An array that a kernel takes: what it does with it, of which type, with how many dimensions."""

    access = ""

    def __init__(self, dtype: _dtypes.DType, rank: int) -> None:
        self.dtype, self.rank = dtype, rank

    def __class_getitem__(cls, of: Any) -> _Parameter:
        dtype, rank = of if isinstance(of, tuple) else (of, 1)
        dtype = _dtypes.dtype(dtype)
        if dtype.name not in _IR:
            raise TypeError(f"a kernel has no arrays of {dtype.name}")
        if not isinstance(rank, int) or not 1 <= rank <= 4:
            raise TypeError(f"an array of a kernel has 1 to 4 dimensions, not {rank!r}")
        return cls(dtype, rank)

    def __repr__(self) -> str:
        return f"{type(self).__name__}[{self.dtype.name}, {self.rank}]"


class In(_Parameter):
    """An array that a kernel reads: `In[float32, 2]` has two dimensions, `In[float32]` one."""

    access = "read"


class Out(_Parameter):
    """An array that a kernel writes. What it doesn't write may hold anything afterwards."""

    access = "write"


class InOut(_Parameter):
    """An array that a kernel reads and writes."""

    access = "readwrite"


def _inside(*_: Any) -> Any:
    raise RuntimeError("this is only in kernels: call it in a function with `@vmaccel.kernel`")


def thread_id(axis: int = 0) -> Any:
    """The thread's place in the grid: its index, or a tuple of as many as the grid has dimensions."""
    return _inside(axis)


def block_id(axis: int = 0) -> Any:
    """The number of the thread's block along an axis of the grid."""
    return _inside(axis)


def local_id(axis: int = 0) -> Any:
    """The thread's place in its block along an axis of the grid."""
    return _inside(axis)


def barrier() -> None:
    """Waits for all threads of the block; what each did before is seen by all after."""
    _inside()


def shared(dtype: Any, shape: Any) -> Any:
    """An array that the threads of a block share. Its extents are literals."""
    return _inside(dtype, shape)


def atomic_add(array: Any, index: Any, value: Any) -> Any:
    """Adds to an element, and gives what it was."""
    return _inside(array, index, value)


def atomic_min(array: Any, index: Any, value: Any) -> Any:
    """Keeps the lesser of an element and a value, and gives what it was."""
    return _inside(array, index, value)


def atomic_max(array: Any, index: Any, value: Any) -> Any:
    """Keeps the greater of an element and a value, and gives what it was."""
    return _inside(array, index, value)


def atomic_exchange(array: Any, index: Any, value: Any) -> Any:
    """Replaces an element, and gives what it was."""
    return _inside(array, index, value)


def atomic_cas(array: Any, index: Any, expected: Any, value: Any) -> Any:
    """Replaces an element if it is as expected, and gives what it was."""
    return _inside(array, index, expected, value)


def fma(a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once."""
    return _inside(a, b, c)


INTRINSICS: dict[Any, str] = {
    each: each.__name__
    for each in (thread_id, block_id, local_id, barrier, shared, atomic_add, atomic_min, atomic_max, atomic_exchange, atomic_cas, len, range)
}  # fmt: skip
LIBRARY = frozenset("acos acosh asin asinh atan atan2 atanh cosh expm1 hypot log10 log1p sinh tan".split())
#: The functions of numbers that kernels have, and how many each takes.
FUNCTIONS = {
    **dict.fromkeys("abs ceil cos erf exp exp2 floor isfinite isinf isnan log log2 round signbit sin sqrt tanh trunc".split(), 1),
    **dict.fromkeys("copysign max maximum min minimum pow".split(), 2),
    **{name: 2 if name in ("atan2", "hypot") else 1 for name in LIBRARY},
    "fma": 3,
}
_ALIASES = {
    "fabs": "abs", "absolute": "abs", "power": "pow", "rint": "round", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh",
    "arctan": "atan", "arctan2": "atan2", "arctanh": "atanh",
}  # fmt: skip


def function_name(function: Any) -> Optional[str]:
    """The function of kernels that one of Python, `math`, numpy or this package is."""
    name = getattr(function, "__name__", "")
    module = type(function).__module__ if type(function).__name__ == "ufunc" else getattr(function, "__module__", "")
    if module.split(".")[0] not in ("builtins", "math", "numpy", "vmaccel") or function is round:
        return None
    name = _ALIASES.get(name, name)
    return name if name in FUNCTIONS else None


class DeviceFunction:
    """A function that kernels call: it becomes part of each. Outside of kernels it is Python's."""

    def __init__(self, function: Callable) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.function(*given, **named)


def device_function(function: Callable) -> DeviceFunction:
    """Makes a function one that kernels may call. It takes numbers and arrays, of whatever types a call gives it."""
    return DeviceFunction(function)


class Kernel:
    """A kernel, as `kernel` makes it of a function: `k[grid](…)` runs it, `k.ir()` prints it."""

    def __init__(self, function: Callable, block: Union[None, int, tuple[int, ...]] = None) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self._signature = inspect.signature(function)
        self._parameters: dict[str, Any] = {}
        self._translate(None if block is None else (block,) if isinstance(block, int) else tuple(block))

    def _translate(self, block: Optional[tuple[int, ...]]) -> None:
        source = Source(self.function)
        to = Translator(block)
        to.stack.append(source)
        to.rank = _rank(source) if block is None else len(block)
        if not 1 <= to.rank <= 3:
            raise source.error(source.tree, f"a grid has 1 to 3 dimensions, not {to.rank}")
        block = block or {1: (256,), 2: (8, 32), 3: (4, 4, 16)}[to.rank]
        if not all(isinstance(each, int) and each > 0 for each in block) or math.prod(block) > 1024:
            raise source.error(source.tree, f"a block has 1 to 1024 threads, not {block}")
        self._block, self._rank = block, to.rank
        env: dict[str, Any] = {}
        params = []
        of = source.tree.args
        if of.vararg or of.kwarg or of.kwonlyargs:
            raise source.error(of.vararg or of.kwarg or of.kwonlyargs[0], "a kernel takes parameters by name, each with its type")
        begin: list[tuple[str, ast.arg]] = []
        for arg in [*of.posonlyargs, *of.args]:
            ref = to.name(arg.arg)
            kind = self._parameter(source, arg)
            self._parameters[arg.arg] = kind
            if isinstance(kind, _Parameter):
                stored = "i8" if kind.dtype.name == "bool" else _IR[kind.dtype.name]
                params.append((f"@{ref}: view<{stored}, [{', '.join('?' * kind.rank)}], {kind.access}>", arg))
                env[arg.arg] = Memory(arg.arg, f"@{ref}", kind.dtype.name, kind.rank, kind.access)
                continue
            name, weak = kind
            stored = "i8" if name == "bool" else _IR[name]
            params.append((f"%{ref}: {stored}", arg))
            env[arg.arg] = Number(name, f"%{ref}", weak=weak)
            if name == "bool":
                env[arg.arg].ref = f"%{ref}_true"
                begin.append((f"%{ref}_true = ne %{ref}, 0 : bool", arg))
        to.has_barrier = any(isinstance(each, ast.Call) and _names(source, each.func) in (barrier, shared) for each in ast.walk(source.tree))
        tree = source.tree
        letters = ["xyz"[to.rank - 1 - d] for d in range(to.rank)]
        extents = [] if to.has_barrier else [f"%grid_{d}" for d in range(to.rank)]
        for text, arg in begin:
            to.write(text, arg)
        for letter in letters:
            to.ids.append(to.emit(f"global_id.{letter}", "", "int64", tree, weak=True))
        if extents:
            inside = None
            for each, extent in zip(to.ids, extents):
                one = to.emit("lt.s", f"{each.ref}, {extent}", "bool", tree)
                inside = one if inside is None else to.op("and", "bool", tree, inside, one)
            assert inside is not None
            to.write(f"if {inside.ref} {{", tree)
            to.depth += 1
        to.statements(Jumps(source).function(tree.body), env)
        if ".value" in env:
            value = next(each for each in ast.walk(tree) if isinstance(each, ast.Return) and each.value is not None)
            raise source.error(value, "a kernel returns nothing: it writes to an array that is Out or InOut")
        if extents:
            to.depth -= 1
            to.write("}", tree)
        self._guarded = bool(extents)
        sizes = ", ".join(str(each) for each in reversed(block))
        heads: list[tuple[str, Any]] = [("vir 1", None), ("", None), (f"kernel @{''.join(c for c in self.function.__name__ if c.isascii())[:64] or 'kernel'}(", (source, tree))]
        listed = [*params, *((f"{each}: i64", tree) for each in extents)]
        for at, (text, node) in enumerate(listed):
            heads.append((f"    {text}{',' if at + 1 < len(listed) else ''}", (source, node)))
        heads.append((f") at 0x0 block({sizes}) {{", (source, tree)))
        heads.extend((f"  {text}", (of_source, node)) for text, of_source, node in to.shared)
        lines = [*heads, *to.lines, ("}", None)]
        self._ir = "\n".join(text for text, _ in lines) + "\n"
        try:
            self._kernel = _vmaccel.Kernel(self._ir)
        except ValueError as error:
            line, what = error.args[0][0]
            found = lines[line - 1][1] if 0 < line <= len(lines) else None
            of_source, node = found or (source, tree)
            raise of_source.error(node, f"{what} (line {line} of its IR)") from None

    def _parameter(self, source: Source, arg: ast.arg) -> Any:
        """What an annotation says: an array, or the type of a number and if it is weak."""
        kind = self._signature.parameters[arg.arg].annotation
        if isinstance(kind, str):
            try:
                kind = eval(kind, source.names)  # noqa: S307: it is the module's own text.
            except Exception as error:
                raise source.error(arg.annotation or arg, f"the type of {arg.arg} can't be read: {error}") from None
        if kind is inspect.Parameter.empty:
            raise source.error(arg, f"{arg.arg} needs a type, such as va.In[va.float32, 1], va.float32 or float")
        if isinstance(kind, _Parameter):
            return kind
        if kind is int or kind is float:
            return ("int64" if kind is int else "float64"), True
        if isinstance(kind, type) and issubclass(kind, _Parameter):
            raise source.error(arg, f"{arg.arg} needs a type of its elements, such as va.{kind.__name__}[va.float32, 1]")
        try:
            name = _dtypes.dtype(kind).name
        except TypeError:
            raise source.error(arg, f"{arg.arg} can't be of {kind!r}: it is an array, such as va.In[va.float32, 1], or a number") from None
        if name not in _IR:
            raise source.error(arg, f"{arg.arg} can't be of {name}: a kernel has integers, floats and bool")
        return name, False

    def ir(self) -> str:
        """The text of the kernel in the IR, with the lines of Python that it is of as comments."""
        return self._ir

    def compile(self, device: Any = None) -> Kernel:
        """Compiles it for a device now, and not at its first launch."""
        self._kernel.compile(device)
        return self

    def __getitem__(self, grid: Union[int, tuple[int, ...]]) -> Callable[..., None]:
        """The kernel on a grid: one thread for each of so many places."""
        return functools.partial(self, grid=grid)

    def __call__(self, *given: Any, grid: Any = None, **named: Any) -> None:
        """Runs it on a grid, in order with all else on the device. Arrays that it writes have new elements afterwards; views of them keep theirs."""
        if grid is None:
            raise TypeError(f"{self.__name__} needs a grid: call {self.__name__}[n](…), with a thread for each of n places")
        bound = self._signature.bind(*given, **named)
        bound.apply_defaults()
        sizes = tuple(operator.index(each) for each in (grid if isinstance(grid, tuple) else (grid,)))
        if len(sizes) != self._rank:
            raise ValueError(f"{self.__name__} takes a grid of {self._rank} dimensions, not {sizes}")
        if any(each < 0 for each in sizes):
            raise ValueError(f"a grid of {sizes} has a negative extent")
        blocks = [-(-size // of) for size, of in zip(sizes, self._block)]
        if not self._guarded and any(size % of for size, of in zip(sizes, self._block)):
            raise ValueError(f"{self.__name__} has threads that work together: its grid is a multiple of its block of {self._block}, not {sizes}")
        arguments, device = [], None
        for name, value in bound.arguments.items():
            kind = self._parameters[name]
            if not isinstance(kind, _Parameter):
                if isinstance(value, Array) or not hasattr(value, "__float__"):
                    raise TypeError(f"{name} of {self.__name__} is a number, not {type(value).__name__}")
                arguments.append((kind[0], value.item() if hasattr(value, "item") else value))
                continue
            if not isinstance(value, Array):
                raise TypeError(f"{name} of {self.__name__} is an array on a device, not {type(value).__name__}: bring it there by `asarray`")
            if value._dtype != kind.dtype.name or value.ndim != kind.rank:
                raise TypeError(f"{name} of {self.__name__} is {kind!r}, not an array of {value._dtype} with {value.ndim} dimensions")
            device = device or value.device
            arguments.append((kind.access, value))
        if self._guarded:
            arguments += [("int64", size) for size in sizes]
        if any(each >= 2**31 for each in blocks) or any(each >= 2**16 for each in blocks[:-1]):
            raise ValueError(f"a grid of {sizes} is too large")
        grid_of_blocks = [*reversed(blocks), *[1] * (3 - len(blocks))]
        self._kernel.launch(device or _vmaccel.open(None), grid_of_blocks, arguments)

    def __repr__(self) -> str:
        return f"<vmaccel.Kernel {self.__name__}>"


def _names(source: Source, node: ast.expr) -> Any:
    """What an expression names outside the function, if it is a name or an attribute."""
    if isinstance(node, ast.Name):
        return source.names.get(node.id)
    return getattr(_names(source, node.value), node.attr, None) if isinstance(node, ast.Attribute) else None


def _rank(source: Source) -> int:
    """The dimensions of the grid: as many as its places are taken apart into, or as the greatest axis says."""
    rank = 1
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _names(source, node.value.func) is thread_id:
            if isinstance(node.targets[0], ast.Tuple) and not node.value.args:
                rank = max(rank, len(node.targets[0].elts))
        if isinstance(node, ast.Call) and node.args and _names(source, node.func) in (thread_id, block_id, local_id):
            axis = node.args[0]
            if isinstance(axis, ast.Constant) and isinstance(axis.value, int):
                rank = max(rank, axis.value + 1)
    return rank


def kernel(function: Optional[Callable] = None, *, block: Union[None, int, tuple[int, ...]] = None) -> Any:
    """Makes a function a kernel. `block` is the number of threads of a block, for threads that work together; its dimensions are the grid's."""
    if function is None:
        return lambda function: Kernel(function, block)
    return Kernel(function, block)
