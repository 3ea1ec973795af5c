"""Values of a kernel, and what is computed of numbers: ops of the IR, or constants where all is known.

A number has an element's type, or is weak, as Python's own numbers are: then it takes the type of what is beside it, as in the array API.
"""

from __future__ import annotations

import ast
import math
import operator
from typing import Any, Callable, Optional

from . import _dtypes, _vmaccel
from ._source import KernelError, Source

_IR = {"bool": "bool", "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}
_IR.update({f"{sign}int{bits}": f"i{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)})
_BITS = {name: 8 * _dtypes._BY_NAME[name].itemsize for name in _IR}
_KIND = {name: _dtypes._BY_NAME[name].kind for name in _IR}


class Number:
    """A number: an operand of the IR, or a constant."""

    def __init__(self, dtype: str, ref: str = "", const: Any = None, weak: bool = False) -> None:
        self.dtype, self.ref, self.const, self.weak = dtype, ref, const, weak

    @property
    def kind(self) -> str:
        return _KIND[self.dtype]

    @property
    def type(self) -> tuple[str, bool]:
        return self.dtype, self.weak

    @property
    def python(self) -> str:
        return {"i": "int", "f": "float"}[self.kind] if self.weak else self.dtype


class Memory:
    """An array: of the launch, or shared by a block."""

    def __init__(self, name: str, ref: str, dtype: str, rank: int, access: str, shape: Optional[tuple] = None) -> None:
        self.name, self.ref, self.dtype, self.rank, self.access, self.shape = name, ref, dtype, rank, access, shape


_ARITHMETIC = {
    ast.Add: ("add", operator.add),
    ast.Sub: ("sub", operator.sub),
    ast.Mult: ("mul", operator.mul),
    ast.Div: ("div", operator.truediv),
    ast.FloorDiv: ("floordiv", operator.floordiv),
    ast.Mod: ("mod", operator.mod),
    ast.Pow: ("pow", operator.pow),
    ast.BitAnd: ("and", operator.and_),
    ast.BitOr: ("or", operator.or_),
    ast.BitXor: ("xor", operator.xor),
    ast.LShift: ("shl", operator.lshift),
    ast.RShift: ("shr", operator.rshift),
}
_COMPARE = {
    ast.Eq: ("eq", operator.eq),
    ast.NotEq: ("ne", operator.ne),
    ast.Lt: ("lt", operator.lt),
    ast.LtE: ("le", operator.le),
    ast.Gt: ("gt", operator.gt),
    ast.GtE: ("ge", operator.ge),
}


class Writer:
    """Writes ops, each with the place in Python that it is of."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, Optional[tuple[Source, ast.AST]]]] = []
        self.count = 0
        self.depth = 1
        self.stack: list[Source] = []

    def inlined(self, function: Callable, given: list, named: dict, node: ast.AST) -> Any:
        """A function's statements in the place of its call."""
        raise NotImplementedError

    @property
    def source(self) -> Source:
        return self.stack[-1]

    def error(self, node: ast.AST, message: str) -> KernelError:
        return self.source.error(node, message)

    def write(self, text: str, node: Optional[ast.AST]) -> None:
        at = None if node is None else (self.source, node)
        self.lines.append(("  " * self.depth + text, at))

    def name(self, hint: str = "") -> str:
        self.count += 1
        hint = "".join(c for c in hint if c.isascii() and (c.isalnum() or c == "_"))[:32]
        return f"{hint.lstrip('0123456789')}_{self.count}" if hint else str(self.count)

    def emit(self, op: str, operands: str, dtype: str, node: ast.AST, weak: bool = False) -> Number:
        ref = f"%{self.name()}"
        self.write(f"{ref} = {op}{' ' if operands else ''}{operands} : {_IR[dtype]}", node)
        return Number(dtype, ref, weak=weak)

    def op(self, op: str, dtype: str, node: ast.AST, *operands: Number, to: str = "", weak: bool = False) -> Number:
        """An op on numbers, each converted to a type first."""
        refs = ", ".join(self.ref(each, dtype, node) for each in operands)
        return self.emit(op, refs, to or dtype, node, weak)

    def captured(self, act: Callable[[], Any]) -> tuple[list, Any]:
        """What an act writes, one level deeper."""
        before, self.lines = self.lines, []
        self.depth += 1
        try:
            result = act()
            return self.lines, result
        finally:
            self.lines = before
            self.depth -= 1

    def keep(self, lines: list) -> None:
        """What was captured, here."""
        self.lines.extend((text[2:], node) for text, node in lines)

    # Numbers.

    def constant(self, value: Any, node: ast.AST) -> Number:
        if isinstance(value, bool):
            return Number("bool", const=value)
        if isinstance(value, int):
            if not -(2**63) <= value < 2**64:
                raise self.error(node, f"{value} does not fit 64 bits")
            return Number("int64", const=value, weak=True)
        if isinstance(value, float):
            return Number("float64", const=value, weak=True)
        raise self.error(node, f"{type(value).__name__} is no type of a kernel: it has bool, int and float")

    def ref(self, value: Number, dtype: str, node: ast.AST) -> str:
        """The number as an operand of a type."""
        if value.const is None:
            return self.cast(value, dtype, node).ref
        const, kind = value.const, _KIND[dtype]
        if kind == "b":
            return "true" if const else "false"
        if kind == "f":
            try:
                return repr(float(const))
            except OverflowError:
                raise self.error(node, f"{const} does not fit {dtype}") from None
        if isinstance(const, float):
            if not math.isfinite(const):
                raise self.error(node, f"{const} does not fit {dtype}")
            const = math.trunc(const)
        const = int(const)
        bits = _BITS[dtype]
        low, high = (0, 2**bits) if kind == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1))
        if not low <= const < high:
            raise self.error(node, f"{const} does not fit {dtype}: it is from {low} to {high - 1}")
        return str(const - 2**bits if const >= 2 ** (bits - 1) else const)

    def cast(self, value: Number, dtype: str, node: ast.AST) -> Number:
        """The number in a type that is not weak."""
        if value.const is not None:
            ref = self.ref(value, dtype, node)
            return self.emit("const", ref, dtype, node)
        source, of, to = value.dtype, value.kind, _KIND[dtype]
        if source == dtype:
            return Number(dtype, value.ref)
        if to == "b":
            return self.emit("ne", f"{value.ref}, {'0.0' if of == 'f' else '0'}", "bool", node)
        if of == "b":
            wide = Number(dtype if to != "f" else "int32", self.emit("zext", value.ref, dtype if to != "f" else "int32", node).ref)
            return self.emit("sitofp", wide.ref, dtype, node) if to == "f" else wide
        if of == "f":
            if to == "f":
                # Narrow floats of one width have no conversion of their own.
                if _BITS[source] == _BITS[dtype]:
                    value = self.emit("fpconv", value.ref, "float32", node)
                return self.emit("fpconv", value.ref, dtype, node)
            return self.emit("fptoui" if to == "u" else "fptosi", value.ref, dtype, node)
        if to == "f":
            return self.emit("uitofp" if of == "u" else "sitofp", value.ref, dtype, node)
        if _BITS[source] == _BITS[dtype]:
            return Number(dtype, value.ref)
        if _BITS[source] > _BITS[dtype]:
            return self.emit("trunc", value.ref, dtype, node)
        return self.emit("zext" if of == "u" else "sext", value.ref, dtype, node)

    def to(self, value: Number, type_: tuple[str, bool], node: ast.AST) -> Number:
        """The number as one of a type that may be weak."""
        made = self.cast(value, type_[0], node)
        return Number(made.dtype, made.ref, weak=type_[1])

    def promote(self, a: Number, b: Number, node: ast.AST) -> tuple[str, bool]:
        """The type that two become together: of their types; a weak one's is that of the other where its kind allows."""
        if a.weak and b.weak:
            return max(a.type, b.type, key=lambda type_: _KIND[type_[0]] == "f")
        if not a.weak and not b.weak:
            return _vmaccel.promote(a.dtype, b.dtype), False
        weak, other = (a, b) if a.weak else (b, a)
        if other.kind == "b":
            return weak.type
        if weak.kind == "f" and other.kind != "f":
            return "float64", False
        return other.type

    def truth(self, value: Any, node: ast.AST) -> Number:
        if not isinstance(value, Number):
            raise self.error(node, f"{self.called(value)} is no condition: it takes a number")
        if value.const is not None:
            return Number("bool", const=bool(value.const))
        return self.cast(value, "bool", node)

    @staticmethod
    def called(value: Any) -> str:
        if isinstance(value, Number):
            return value.python
        if isinstance(value, Memory):
            return f"the array {value.name}"
        if isinstance(value, tuple):
            return "a tuple"
        return repr(getattr(value, "value", value))

    def arithmetic(self, kind: Any, a: Number, b: Number, node: ast.AST) -> Number:
        name, fold = _ARITHMETIC[kind]
        if a.const is not None and b.const is not None:
            try:
                return self.constant(fold(a.const, b.const), node)
            except (ArithmeticError, ValueError, TypeError) as error:
                raise self.error(node, str(error)) from None
        dtype, weak = self.promote(a, b, node)
        if name in ("and", "or", "xor"):
            if _KIND[dtype] == "f":
                raise self.error(node, f"bitwise {name} has no {a.python} and {b.python}: it takes integers or truth values")
            return self.op(name, dtype, node, a, b, weak=weak)
        if dtype == "bool":
            dtype, weak = "int64", True
        kind_ = _KIND[dtype]
        if name in ("shl", "shr"):
            return self.shift(name, a, b, dtype, weak, node)
        if name == "div" and kind_ != "f":
            dtype, kind_ = "float64", "f"
        if name in ("floordiv", "mod"):
            if kind_ == "f":
                return self.library(f"float_{name}", [a, b], (dtype, weak), node)
            return self.divide(name, a, b, dtype, weak, node)
        if name == "pow":
            return self.power(a, b, dtype, weak, node)
        return self.op(name, dtype, node, a, b, weak=weak)

    def shift(self, name: str, a: Number, b: Number, dtype: str, weak: bool, node: ast.AST) -> Number:
        if _KIND[dtype] == "f":
            raise self.error(node, f"a shift has no {a.python} and {b.python}: it takes integers")
        bits, unsigned = _BITS[dtype], _KIND[dtype] == "u"
        if name == "shr":
            name = "shr.u" if unsigned else "shr.s"
        if b.const is not None:
            if b.const < 0:
                raise self.error(node, "negative shift count")
            if b.const < bits:
                return self.op(name, dtype, node, a, b, weak=weak)
            if name != "shr.s":
                return self.to(Number("int64", const=0, weak=True), (dtype, weak), node)
            return self.op(name, dtype, node, a, Number("int64", const=bits - 1, weak=True), weak=weak)
        a, b = self.cast(a, dtype, node), self.cast(b, dtype, node)
        beyond = self.emit("ge.u", f"{b.ref}, {bits}", "bool", node).ref
        if name == "shr.s":
            by = self.emit("select", f"{beyond}, {bits - 1}, {b.ref}", dtype, node)
            return self.emit(name, f"{a.ref}, {by.ref}", dtype, node, weak)
        shifted = self.emit(name, f"{a.ref}, {b.ref}", dtype, node)
        return self.emit("select", f"{beyond}, 0, {shifted.ref}", dtype, node, weak)

    def divide(self, name: str, a: Number, b: Number, dtype: str, weak: bool, node: ast.AST) -> Number:
        """The quotient rounded down, or what is left of it; by zero either is 0, as numpy's."""
        a, b = self.cast(a, dtype, node), self.cast(b, dtype, node)
        if _KIND[dtype] == "u":
            result = self.op("div.u" if name == "floordiv" else "rem.u", dtype, node, a, b, weak=weak)
            if name == "floordiv":
                return result
            none = self.emit("eq", f"{b.ref}, 0", "bool", node)
            return self.emit("select", f"{none.ref}, 0, {result.ref}", dtype, node, weak)
        rest = self.op("rem.s", dtype, node, a, b)
        signs = self.op("xor", dtype, node, rest, b)
        unlike = self.emit("lt.s", f"{signs.ref}, 0", "bool", node)
        some = self.emit("ne", f"{rest.ref}, 0", "bool", node)
        unlike = self.op("and", "bool", node, unlike, some)
        if name == "floordiv":
            whole = self.op("div.s", dtype, node, a, b)
            less = self.emit("sub", f"{whole.ref}, 1", dtype, node)
            result = self.emit("select", f"{unlike.ref}, {less.ref}, {whole.ref}", dtype, node)
        else:
            more = self.op("add", dtype, node, rest, b)
            result = self.emit("select", f"{unlike.ref}, {more.ref}, {rest.ref}", dtype, node)
        none = self.emit("eq", f"{b.ref}, 0", "bool", node)
        return self.emit("select", f"{none.ref}, 0, {result.ref}", dtype, node, weak)

    def power(self, a: Number, b: Number, dtype: str, weak: bool, node: ast.AST) -> Number:
        if b.const is not None and b.const == 2:
            a = self.cast(a, dtype, node)
            return self.op("mul", dtype, node, a, a, weak=weak)
        if _KIND[dtype] == "f":
            return self.op("pow", dtype, node, a, b, weak=weak)
        if b.const is not None and b.const < 0:
            raise self.error(node, "an integer to a negative power is no integer: make it a float first")
        return self.library("integer_power", [a, b], (dtype, weak), node)

    def compare(self, kind: Any, a: Any, b: Any, node: ast.AST) -> Number:
        if kind not in _COMPARE:
            raise self.error(node, f"{kind.__name__} can't be compared by in a kernel")
        if not isinstance(a, Number) or not isinstance(b, Number):
            raise self.error(node, f"{self.called(a)} and {self.called(b)} can't be compared: only numbers can")
        name, fold = _COMPARE[kind]
        if a.const is not None and b.const is not None:
            return Number("bool", const=fold(a.const, b.const))
        dtype, _ = self.promote(a, b, node)
        if dtype == "bool":
            if name in ("eq", "ne"):
                differ = self.op("xor", "bool", node, a, b)
                return differ if name == "ne" else self.op("not", "bool", node, differ)
            dtype = "int32"
        if name in ("lt", "le", "gt", "ge") and _KIND[dtype] != "f":
            name += ".u" if _KIND[dtype] == "u" else ".s"
        return self.op(name, dtype, node, a, b, to="bool")

    def either(self, test: Number, a: Number, b: Number, node: ast.AST) -> Number:
        dtype, weak = self.promote(a, b, node)
        refs = f"{test.ref}, {self.ref(a, dtype, node)}, {self.ref(b, dtype, node)}"
        return self.emit("select", refs, dtype, node, weak)

    def library(self, name: str, given: list, type_: Optional[tuple[str, bool]], node: ast.AST) -> Any:
        """A function of `_kernel_math` in its place."""
        from . import _kernel_math

        function = getattr(_kernel_math, name).function
        if type_ is None:
            return self.inlined(function, given, {}, node)
        # In float32 at least: what is rounded on the way would be seen.
        inner = ("float32", False) if type_[0] in ("float16", "bfloat16") else type_
        result = self.inlined(function, [self.to(each, inner, node) for each in given], {}, node)
        return self.to(result, type_, node)
