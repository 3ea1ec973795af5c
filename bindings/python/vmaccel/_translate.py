"""From a Python function to the text of a kernel in the IR.

A value is a number, an array or a tuple of these. What is known when the function is translated (literals, numbers of the module) is computed there.
"""

from __future__ import annotations

import ast
import inspect
import math
import operator
from typing import Any, Callable, Optional

from . import _dtypes, _vmaccel
from ._jumps import Jumps
from ._numbers import _ARITHMETIC, _BITS, _IR, _KIND, Memory, Number, Writer
from ._source import Source

_DEPTH = 16
#: What a function gives before it comes to a `return`: of any type.
_NOTHING = Number("int64", const=0, weak=True)


class Undefined:
    """A variable that has no value on some way to here."""

    def __init__(self, why: str) -> None:
        self.why = why


class Static:
    """What is no value of a kernel: a module, a function, a type."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _assigned(body: list) -> list[str]:
    """The variables that statements give values to, in order."""
    names: dict[str, None] = {}
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names[node.id] = None
    return list(names)


_NODES = {
    ast.Lambda: "a lambda",
    ast.ListComp: "a list comprehension",
    ast.GeneratorExp: "a generator expression",
    ast.List: "a list",
    ast.Dict: "a dict",
    ast.Set: "a set",
    ast.JoinedStr: "an f-string",
    ast.Starred: "a starred expression",
    ast.Slice: "a slice",
    ast.NamedExpr: "an assignment expression",
    ast.Try: "try",
    ast.With: "with",
    ast.Raise: "raise",
    ast.Assert: "assert",
    ast.Import: "an import",
    ast.ImportFrom: "an import",
    ast.FunctionDef: "a function in a function",
    ast.ClassDef: "a class",
    ast.Global: "global",
    ast.Nonlocal: "nonlocal",
    ast.Delete: "del",
    ast.Await: "await",
    ast.Yield: "yield",
}


class Translator(Writer):
    """Writes one kernel."""

    def __init__(self, block: Optional[tuple[int, ...]]) -> None:
        self.block_size = block
        super().__init__()
        self.shared: list[tuple[str, Source, ast.AST]] = []
        self.rank = 1
        self.ids: list[Number] = []
        self.has_barrier = False
        self.commented: Any = None

    # Expressions.

    def number(self, node: ast.expr, env: dict) -> Number:
        value = self.expression(node, env)
        if not isinstance(value, Number):
            raise self.error(node, f"{self.called(value)} stands where a number is needed")
        return value

    def static(self, node: ast.expr, env: dict) -> Optional[Static]:
        """What a name, or an attribute of one, is outside the kernel."""
        if isinstance(node, ast.Name) and node.id not in env and node.id in self.source.names:
            return Static(self.source.names[node.id])
        if isinstance(node, ast.Attribute):
            base = self.static(node.value, env)
            if base is not None and hasattr(base.value, node.attr):
                return Static(getattr(base.value, node.attr))
        return None

    def expression(self, node: ast.expr, env: dict) -> Any:
        handler = getattr(self, f"on_{type(node).__name__}", None)
        if handler is None:
            raise self.error(node, f"{_NODES.get(type(node), type(node).__name__)} can't be part of a kernel")
        return handler(node, env)

    def on_Constant(self, node: ast.Constant, env: dict) -> Any:  # noqa: N802
        return self.constant(node.value, node)

    def on_Name(self, node: ast.Name, env: dict) -> Any:  # noqa: N802
        value = env.get(node.id)
        if isinstance(value, Undefined):
            raise self.error(node, f"{node.id} may have no value here: it gets one only {value.why}")
        if value is not None:
            return value
        return self.outside(node, env)

    def outside(self, node: ast.expr, env: dict) -> Any:
        found = self.static(node, env)
        if found is None:
            what = ast.unparse(node)
            raise self.error(node, f"{what} is not defined" if isinstance(node, ast.Name) else f"there is no {what}")
        value = found.value
        if isinstance(value, (bool, int, float)) and not isinstance(value, type):
            return self.constant(value, node)
        if hasattr(value, "dtype") and getattr(value, "shape", None) == () and not isinstance(value, (type, _vmaccel.Array)):
            dtype = _dtypes.dtype(value.dtype).name
            return self.cast(self.constant(value.item(), node), dtype, node)
        if isinstance(value, _vmaccel.Array):
            raise self.error(node, "an array of the module can't be used: make it a parameter")
        if isinstance(value, tuple):
            return tuple(self.constant(each, node) for each in value)
        return found

    def on_Attribute(self, node: ast.Attribute, env: dict) -> Any:  # noqa: N802
        if self.static(node, env) is not None:
            return self.outside(node, env)
        base = self.expression(node.value, env)
        if isinstance(base, Memory):
            if node.attr == "shape":
                return tuple(self.extent(base, d, node, env) for d in range(base.rank))
            if node.attr == "ndim":
                return self.constant(base.rank, node)
            if node.attr == "dtype":
                return Static(_dtypes._BY_NAME[base.dtype])
            if node.attr == "size":
                result = self.constant(1, node)
                for d in range(base.rank):
                    result = self.arithmetic(ast.Mult, result, self.extent(base, d, node, env), node)
                return result
            raise self.error(node, f"an array has no {node.attr} in a kernel: it has shape, ndim, size and dtype")
        raise self.error(node, f"{self.called(base)} has no {node.attr} in a kernel")

    def extent(self, array: Memory, dimension: int, node: ast.AST, env: dict) -> Number:
        if array.shape is not None:
            return self.constant(array.shape[dimension], node)
        key = f".{array.ref}.{dimension}"
        if key not in env:
            ref = f"%{self.name(f'{array.name}_extent')}"
            self.write(f"{ref} = extent {array.ref}, {dimension} : i64", node)
            env[key] = Number("int64", ref, weak=True)
        return env[key]

    def on_Tuple(self, node: ast.Tuple, env: dict) -> tuple:  # noqa: N802
        return tuple(self.expression(each, env) for each in node.elts)

    def on_BinOp(self, node: ast.BinOp, env: dict) -> Number:  # noqa: N802
        if type(node.op) not in _ARITHMETIC:
            raise self.error(node, "a matrix product can't be part of a kernel: write its loops")
        a, b = self.number(node.left, env), self.number(node.right, env)
        return self.arithmetic(type(node.op), a, b, node)

    def on_UnaryOp(self, node: ast.UnaryOp, env: dict) -> Number:  # noqa: N802
        value = self.number(node.operand, env)
        if isinstance(node.op, ast.Not):
            value = self.truth(value, node)
            return Number("bool", const=not value.const) if value.const is not None else self.op("not", "bool", node, value)
        if value.const is not None:
            fold: Any = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert}[type(node.op)]
            try:
                return self.constant(fold(value.const), node)
            except TypeError as error:
                raise self.error(node, str(error)) from None
        if isinstance(node.op, ast.Invert):
            if value.kind == "f":
                raise self.error(node, f"~ has no {value.python}: it takes integers or truth values")
            return self.op("not", value.dtype, node, value, weak=value.weak)
        if value.kind == "b":
            value = self.to(value, ("int64", True), node)
        return value if isinstance(node.op, ast.UAdd) else self.op("neg", value.dtype, node, value, weak=value.weak)

    def on_Compare(self, node: ast.Compare, env: dict) -> Number:  # noqa: N802
        left, result = self.expression(node.left, env), None
        for op, right in zip(node.ops, node.comparators):
            value = self.expression(right, env)
            one = self.compare(type(op), left, value, node)
            result = one if result is None else self.both(result, one, node)
            left = value
        assert result is not None
        return result

    def both(self, a: Number, b: Number, node: ast.AST) -> Number:
        if a.const is not None or b.const is not None:
            known, other = (a, b) if a.const is not None else (b, a)
            return other if known.const else known
        return self.op("and", "bool", node, a, b)

    def on_BoolOp(self, node: ast.BoolOp, env: dict) -> Number:  # noqa: N802
        is_and = isinstance(node.op, ast.And)
        result = self.condition(node.values[0], env)
        for each in node.values[1:]:
            if result.const is not None:
                if result.const != is_and:
                    return result
                result = self.condition(each, env)
                continue
            lines, value = self.captured(lambda each=each: self.condition(each, dict(env)))
            if value.const is not None:
                result = result if value.const == is_and else value
            elif self.is_plain(lines):
                self.keep(lines)
                result = self.op("and" if is_and else "or", "bool", node, result, value)
            else:
                ref = f"%{self.name()}"
                self.write(f"{ref} = if {result.ref} : bool {{", node)
                kept = ([*lines, (f"{'  ' * (self.depth + 1)}yield {value.ref}", None)], [(f"{'  ' * (self.depth + 1)}yield {'false' if is_and else 'true'}", None)])
                then, other = kept if is_and else kept[::-1]
                self.lines.extend(then)
                self.write("} else {", node)
                self.lines.extend(other)
                self.write("}", node)
                result = Number("bool", ref)
        return result

    def condition(self, node: ast.expr, env: dict) -> Number:
        value = self.expression(node, env)
        if isinstance(value, Number) and value.kind != "b":
            raise self.error(node, f"`and` and `or` take truth values, not {value.python}: compare it, as in x != 0")
        return self.truth(value, node)

    @staticmethod
    def is_plain(lines: list) -> bool:
        """May these run where they need not?"""
        texts = [text.split("= ")[-1].strip() for text, _ in lines]
        return not any(text.startswith(("store", "atomic", "barrier", "while", "for", "if", "}")) for text in texts)

    def on_IfExp(self, node: ast.IfExp, env: dict) -> Any:  # noqa: N802
        test = self.truth(self.expression(node.test, env), node.test)
        if test.const is not None:
            return self.expression(node.body if test.const else node.orelse, env)
        (first, a), (second, b) = (self.captured(lambda part=part: self.expression(part, dict(env))) for part in (node.body, node.orelse))
        both = [side if isinstance(side, tuple) else (side,) for side in (a, b)]
        if len(both[0]) != len(both[1]) or not all(isinstance(each, Number) for side in both for each in side):
            raise self.error(node, f"{self.called(a)} and {self.called(b)} can't be chosen between: numbers can")
        if self.is_plain(first) and self.is_plain(second):
            self.keep(first)
            self.keep(second)
            made = [self.either(test, x, y, node) for x, y in zip(*both)]
        else:
            named = [{str(at): each for at, each in enumerate(side)} for side in both]
            made = list(self.branches(node, test, [(first, named[0]), (second, named[1])], list(named[0])).values())
        return tuple(made) if isinstance(a, tuple) else made[0]

    def on_Subscript(self, node: ast.Subscript, env: dict) -> Any:  # noqa: N802
        base = self.expression(node.value, env)
        if isinstance(base, tuple):
            at = self.expression(node.slice, env)
            if not isinstance(at, Number) or not isinstance(at.const, int):
                raise self.error(node.slice, "a tuple is indexed by a literal")
            try:
                return base[at.const]
            except IndexError:
                raise self.error(node, f"the tuple has {len(base)} elements") from None
        array, places = self.place(node, env)
        return self.load(array, places, node)

    def load(self, array: Memory, places: str, node: ast.AST) -> Number:
        if array.access == "write":
            raise self.error(node, f"{array.name} is Out, which is only written: declare it InOut to read it, too")
        stored = "int8" if array.dtype == "bool" else array.dtype
        value = self.emit("load", f"{array.ref}[{places}]", stored, node)
        return self.cast(value, array.dtype, node) if array.dtype == "bool" else value

    def place(self, node: ast.Subscript, env: dict) -> tuple[Memory, str]:
        """The array and the indices of an element."""
        array = self.expression(node.value, env)
        if not isinstance(array, Memory):
            raise self.error(node, f"{self.called(array)} can't be indexed")
        return array, self.places(array, node.slice, env)

    def places(self, array: Memory, node: ast.expr, env: dict) -> str:
        at = self.expression(node, env)
        at = at if isinstance(at, tuple) else (at,)
        if len(at) != array.rank:
            raise self.error(node, f"{array.name} has {array.rank} dimensions, and {len(at)} are indexed: a kernel takes single elements")
        refs = []
        for each in at:
            if not isinstance(each, Number) or each.kind not in "iu":
                raise self.error(node, f"{self.called(each)} is no index: it takes integers")
            if each.const is not None and each.const < 0:
                raise self.error(node, f"index {each.const}: a kernel counts from 0 on; the last is {array.name}.shape[0] - 1")
            refs.append(self.ref(each, "int64", node))
        return ", ".join(refs)

    # Calls.

    def on_Call(self, node: ast.Call, env: dict) -> Any:  # noqa: N802
        from . import _kernel

        found = self.static(node.func, env)
        if found is None:
            value = self.expression(node.func, env)
            found = value if isinstance(value, Static) else None
        if found is None:
            raise self.error(node, f"{ast.unparse(node.func)} can't be called in a kernel")
        function = found.value
        if isinstance(function, _kernel.DeviceFunction):
            given = [self.expression(each, env) for each in node.args]
            named = {each.arg or "**": self.expression(each.value, env) for each in node.keywords}
            return self.inlined(function.function, given, named, node)
        if isinstance(function, _kernel.Kernel):
            raise self.error(node, "a kernel can't call a kernel: decorate what it calls with device_function")
        if node.keywords and function not in (_kernel.shared,):
            raise self.error(node.keywords[0].value, "arguments have no keywords here")
        name = _kernel.INTRINSICS.get(function) if self.hashable(function) else None
        if name is not None:
            return getattr(self, f"call_{name}")(node, env, *node.args) if self.arity(name, node) else None
        if isinstance(function, _dtypes.DType) or any(function is each for each in (int, float, bool)):
            return self.conversion(function, node, env)
        name = _kernel.function_name(function)
        if name is None:
            raise self.error(node, f"{ast.unparse(node.func)} can't be called in a kernel: it is no device_function and none of the functions of kernels")
        given = [self.number(each, env) for each in node.args]
        return self.function(name, function, given, node)

    @staticmethod
    def hashable(value: Any) -> bool:
        try:
            hash(value)
            return True
        except TypeError:
            return False

    def arity(self, name: str, node: ast.Call) -> bool:
        parameters = list(inspect.signature(getattr(self, f"call_{name}")).parameters.values())[2:]
        least = sum(each.default is inspect.Parameter.empty for each in parameters)
        given = len(node.args) + len(node.keywords)
        if not least <= given <= len(parameters):
            many = str(least) if least == len(parameters) else f"{least} to {len(parameters)}"
            raise self.error(node, f"{ast.unparse(node.func)} takes {many} arguments, not {given}")
        return True

    def conversion(self, function: Any, node: ast.Call, env: dict) -> Number:
        if len(node.args) != 1:
            raise self.error(node, f"a conversion takes 1 argument, not {len(node.args)}")
        value = self.number(node.args[0], env)
        if function is bool:
            return self.truth(value, node)
        if function is int or function is float:
            if value.const is not None:
                try:
                    return self.constant(function(value.const), node)
                except (ValueError, OverflowError) as error:
                    raise self.error(node, str(error)) from None
            return self.to(value, ("int64" if function is int else "float64", True), node)
        if function.name not in _IR:
            raise self.error(node, f"a kernel has no {function.name}")
        return self.cast(value, function.name, node)

    def function(self, name: str, function: Any, given: list[Number], node: ast.AST) -> Any:
        from . import _kernel

        count = _kernel.FUNCTIONS[name]
        if len(given) != count and not (name in ("min", "max") and len(given) > 2):
            raise self.error(node, f"{name} takes {count} arguments, not {len(given)}")
        if all(each.const is not None for each in given) and getattr(math, name, None) is function:
            try:
                return self.constant(function(*(each.const for each in given)), node)
            except (ValueError, OverflowError) as error:
                raise self.error(node, str(error)) from None
        if name in ("min", "max"):
            result = given[0]
            for each in given[1:]:
                test = self.compare(ast.Lt if name == "min" else ast.Gt, each, result, node)
                result = (each if test.const else result) if test.const is not None else self.either(test, each, result, node)
            return result
        dtype, weak = given[0].type
        for each in given[1:]:
            dtype, weak = self.promote(Number(dtype, "%", weak=weak), each, node)
        if dtype == "bool":
            dtype, weak = "int64", True
        kind = _KIND[dtype]
        if name in ("minimum", "maximum"):
            op = name if kind == "f" else f"{name[:3]}.{'u' if kind == 'u' else 's'}"
            return self.op(op, dtype, node, *given, weak=weak)
        if name == "abs":
            if kind == "u":
                return self.to(given[0], (dtype, weak), node)
            return self.op("abs" if kind == "f" else "abs.s", dtype, node, *given, weak=weak)
        is_whole = name in ("floor", "ceil", "trunc", "round")
        if is_whole and kind != "f":
            return self.to(given[0], (dtype, weak), node)
        if kind != "f":
            dtype = "float64"
        numbers = [self.to(each, (dtype, weak), node) for each in given]
        if name in _kernel.LIBRARY:
            return self.library(name, numbers, (dtype, weak), node)
        if name == "isnan":
            return self.op("ne", dtype, node, numbers[0], numbers[0], to="bool")
        if name in ("isinf", "isfinite"):
            size = self.op("abs", dtype, node, *numbers)
            return self.emit("eq" if name == "isinf" else "lt", f"{size.ref}, inf", "bool", node)
        if name in ("copysign", "signbit"):
            return self.sign(name, numbers, dtype, weak, node)
        result = self.op({"trunc": "fix"}.get(name, name), dtype, node, *numbers, weak=weak)
        # Python's own functions give integers.
        return self.to(result, ("int64", True), node) if is_whole and function in (math.floor, math.ceil, math.trunc) else result

    def sign(self, name: str, numbers: list[Number], dtype: str, weak: bool, node: ast.AST) -> Number:
        integer = f"int{_BITS[dtype]}"
        bits = [self.emit("bitcast", each.ref, integer, node) for each in numbers]
        if name == "signbit":
            return self.emit("lt.s", f"{bits[0].ref}, 0", "bool", node)
        top = -(2 ** (_BITS[dtype] - 1))
        size = self.emit("and", f"{bits[0].ref}, {~top}", integer, node)
        sign = self.emit("and", f"{bits[1].ref}, {top}", integer, node)
        both = self.emit("or", f"{size.ref}, {sign.ref}", integer, node)
        return self.emit("bitcast", both.ref, dtype, node, weak)

    def inlined(self, function: Callable, given: list, named: dict, node: ast.AST) -> Any:
        """A function's statements in the place of its call."""
        if len(self.stack) > _DEPTH:
            raise self.error(node, f"calls are nested more than {_DEPTH} deep: a kernel has no recursion")
        try:
            bound = inspect.signature(function).bind(*given, **named)
        except TypeError as error:
            raise self.error(node, f"{function.__name__}: {error}") from None
        source = Source(function)
        env = dict(bound.arguments)
        defaults = inspect.signature(function).parameters
        for name, parameter in defaults.items():
            if name not in env:
                env[name] = self.constant(parameter.default, node)
        jumps = Jumps(source)
        if any(isinstance(each, ast.Return) and each.value is not None for each in ast.walk(source.tree)):
            if not jumps.jumps(source.tree.body):
                raise source.error(source.tree, f"{function.__name__} may end without a value: let its last statement be a return")
            env[".value"] = _NOTHING
        self.stack.append(source)
        try:
            self.statements(jumps.function(source.tree.body), env)
            value = env.get(".value")
            if isinstance(value, Undefined):
                raise source.error(source.tree, f"{function.__name__} gives a value only {value.why}")
            return value
        finally:
            self.stack.pop()

    def axis(self, node: Optional[ast.expr], env: dict, at: ast.AST) -> int:
        if node is None:
            return 0
        value = self.expression(node, env)
        if not isinstance(value, Number) or not isinstance(value.const, int) or not 0 <= value.const < self.rank:
            raise self.error(node, f"an axis of the grid is a literal from 0 to {self.rank - 1}")
        return value.const

    def call_thread_id(self, node: ast.Call, env: dict, axis: Optional[ast.expr] = None) -> Any:
        if axis is None and self.rank > 1:
            return tuple(self.ids)
        return self.ids[self.axis(axis, env, node)]

    def of_axis(self, op: str, node: ast.Call, env: dict, axis: Optional[ast.expr]) -> Number:
        letter = "xyz"[self.rank - 1 - self.axis(axis, env, node)]
        return self.to(self.emit(f"{op}.{letter}", "", "int32", node), ("int64", True), node)

    def call_block_id(self, node: ast.Call, env: dict, axis: Optional[ast.expr] = None) -> Number:
        return self.of_axis("block_id", node, env, axis)

    def call_local_id(self, node: ast.Call, env: dict, axis: Optional[ast.expr] = None) -> Number:
        return self.of_axis("thread_id", node, env, axis)

    def call_barrier(self, node: ast.Call, env: dict) -> None:
        self.write("barrier.block", node)

    def call_len(self, node: ast.Call, env: dict, of: ast.expr) -> Number:
        value = self.expression(of, env)
        if isinstance(value, Memory):
            return self.extent(value, 0, node, env)
        if isinstance(value, tuple):
            return self.constant(len(value), node)
        raise self.error(node, f"{self.called(value)} has no length")

    def call_range(self, node: ast.Call, env: dict, a: ast.expr, b: Any = None, c: Any = None) -> None:
        raise self.error(node, "range stands only in a for loop")

    def call_shared(self, node: ast.Call, env: dict, dtype: ast.expr, shape: Optional[ast.expr] = None) -> Memory:
        of = self.expression(dtype, env)
        if not isinstance(of, Static) or not isinstance(of.value, _dtypes.DType) or of.value.name not in _IR or of.value.name == "bool":
            raise self.error(dtype, "a shared array is of integers or floats, such as va.float32")
        given = shape if shape is not None else node.keywords[0].value
        extents = self.expression(given, env)
        extents = extents if isinstance(extents, tuple) else (extents,)
        if not all(isinstance(each, Number) and isinstance(each.const, int) and each.const > 0 for each in extents):
            raise self.error(given, "the shape of a shared array is of literals")
        name = of.value.name
        ref = f"@{self.name('shared')}"
        sizes = tuple(each.const for each in extents)
        self.shared.append((f"shared {ref}: {_IR[name]}[{', '.join(map(str, sizes))}]", self.source, node))
        return Memory("the shared array", ref, name, len(sizes), "readwrite", sizes)

    def atomic(self, op: str, node: ast.Call, env: dict, array: ast.expr, index: ast.expr, *values: ast.expr) -> Number:
        of = self.expression(array, env)
        if not isinstance(of, Memory) or of.access != "readwrite":
            raise self.error(array, f"{self.called(of)} can't be changed atomically: it takes an InOut or a shared array")
        floats = op in ("add", "exchange")
        if _BITS[of.dtype] < 32 or (of.dtype not in ("int32", "int64", "uint32", "uint64") and not floats):
            raise self.error(node, f"atomic_{op} has no {of.dtype}: it has integers of 32 and 64 bits{', float32 and float64' if floats else ''}")
        places = self.places(of, index, env)
        refs = ", ".join(self.ref(self.number(each, env), of.dtype, each) for each in values)
        if op in ("min", "max"):
            op += ".u" if _KIND[of.dtype] == "u" else ".s"
        scope = "block" if of.shape is not None else "device"
        return self.emit(f"atomic.{op}.{scope}", f"{of.ref}[{places}], {refs}", of.dtype, node)

    def call_atomic_add(self, node: ast.Call, env: dict, array: ast.expr, index: ast.expr, value: ast.expr) -> Number:
        return self.atomic("add", node, env, array, index, value)

    def call_atomic_min(self, node: ast.Call, env: dict, array: ast.expr, index: ast.expr, value: ast.expr) -> Number:
        return self.atomic("min", node, env, array, index, value)

    def call_atomic_max(self, node: ast.Call, env: dict, array: ast.expr, index: ast.expr, value: ast.expr) -> Number:
        return self.atomic("max", node, env, array, index, value)

    def call_atomic_exchange(self, node: ast.Call, env: dict, array: ast.expr, index: ast.expr, value: ast.expr) -> Number:
        return self.atomic("exchange", node, env, array, index, value)

    def call_atomic_cas(self, node: ast.Call, env: dict, array: ast.expr, index: ast.expr, expected: ast.expr, value: ast.expr) -> Number:
        return self.atomic("cas", node, env, array, index, expected, value)

    # Statements.

    def statements(self, body: list, env: dict) -> None:
        for node in body:
            self.comment(node)
            handler = getattr(self, f"do_{type(node).__name__}", None)
            if handler is None:
                raise self.error(node, f"{_NODES.get(type(node), type(node).__name__)} can't be part of a kernel")
            handler(node, env)

    def comment(self, node: ast.stmt) -> None:
        at = (id(self.source.function), node.lineno)
        is_library = self.source.function.__module__ == "vmaccel._kernel_math"
        if at != self.commented and not is_library and not isinstance(node, ast.Pass):
            self.commented = at
            line = self.source.lines[node.lineno - 1].strip()
            self.write(f"; {self.source.first + node.lineno - 1}: {line}", node)

    def do_Pass(self, node: ast.Pass, env: dict) -> None:  # noqa: N802
        pass

    def do_Expr(self, node: ast.Expr, env: dict) -> None:  # noqa: N802
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return
        if not isinstance(node.value, ast.Call):
            raise self.error(node, "the value of this is not used")
        self.expression(node.value, env)

    def do_Assign(self, node: ast.Assign, env: dict) -> None:  # noqa: N802
        first = node.targets[0]
        if isinstance(first, ast.Name) and first.id.startswith(".") and first.id != ".value" and first.id not in self.source.flags:
            return
        value = self.expression(node.value, env)
        for target in node.targets:
            self.assign(target, value, env, node)

    def do_AnnAssign(self, node: ast.AnnAssign, env: dict) -> None:  # noqa: N802
        if node.value is None:
            return
        value = self.expression(node.value, env)
        of = self.static(node.annotation, env)
        if of is not None and isinstance(of.value, _dtypes.DType) and isinstance(value, Number):
            value = self.cast(value, of.value.name, node)
        self.assign(node.target, value, env, node)

    def assign(self, target: ast.expr, value: Any, env: dict, node: ast.AST) -> None:
        if isinstance(target, ast.Name):
            if value is None or isinstance(value, Static):
                raise self.error(node, f"{target.id} gets no value of a kernel")
            if isinstance(env.get(target.id), Memory) and not isinstance(value, Memory):
                raise self.error(node, f"{target.id} is an array: write its elements, as in {target.id}[i] = …")
            env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            if not isinstance(value, tuple) or len(value) != len(target.elts):
                many = len(value) if isinstance(value, tuple) else 1
                raise self.error(node, f"{len(target.elts)} names are given {many} values")
            for each, part in zip(target.elts, value):
                self.assign(each, part, env, node)
        elif isinstance(target, ast.Subscript):
            if not isinstance(value, Number):
                raise self.error(node, f"{self.called(value)} can't be stored in an array")
            array, places = self.place(target, env)
            self.store(array, places, value, node)
        else:
            raise self.error(target, f"{_NODES.get(type(target), 'this')} can't be assigned to in a kernel")

    def store(self, array: Memory, places: str, value: Number, node: ast.AST) -> None:
        if array.access == "read":
            raise self.error(node, f"{array.name} is In, which is only read: declare it Out or InOut to write it")
        if array.dtype == "bool":
            value = self.truth(value, node)
            ref = ("1" if value.const else "0") if value.const is not None else self.emit("zext", value.ref, "int8", node).ref
        else:
            ref = self.ref(value, array.dtype, node)
        self.write(f"store {array.ref}[{places}], {ref}", node)

    def do_AugAssign(self, node: ast.AugAssign, env: dict) -> None:  # noqa: N802
        if type(node.op) not in _ARITHMETIC:
            raise self.error(node, "a matrix product can't be part of a kernel: write its loops")
        if isinstance(node.target, ast.Subscript):
            array, places = self.place(node.target, env)
            before = self.load(array, places, node)
            self.store(array, places, self.arithmetic(type(node.op), before, self.number(node.value, env), node), node)
            return
        if not isinstance(node.target, ast.Name):
            raise self.error(node, "this can't be assigned to in a kernel")
        before = self.number(ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target), env)
        env[node.target.id] = self.arithmetic(type(node.op), before, self.number(node.value, env), node)

    def do_If(self, node: ast.If, env: dict) -> None:  # noqa: N802
        test = self.truth(self.expression(node.test, env), node.test)
        if test.const is not None:
            self.statements(node.body if test.const else node.orelse, env)
            return

        def branch(body: list) -> dict:
            inner = dict(env)
            self.statements(body, inner)
            return inner

        parts = [self.captured(lambda body=body: branch(body)) for body in (node.body, node.orelse)]
        names = _assigned([*node.body, *node.orelse])
        changed = []
        for name in names:
            a, b = (inner.get(name) for _, inner in parts)
            if a is b:
                if a is not None:
                    env[name] = a
            elif isinstance(a, Number) and isinstance(b, Number):
                changed.append(name)
            else:
                line = self.source.first + node.lineno - 1
                env[name] = Undefined(f"in one branch of the `if` of line {line}")
        env.update(self.branches(node, test, parts, changed))

    def branches(self, node: ast.AST, test: Number, parts: list, names: list[str]) -> dict:
        """An `if` whose branches give values to names."""
        types = {}
        for name in names:
            a, b = (inner[name] for _, inner in parts)
            joined = b.type if a is _NOTHING else a.type if b is _NOTHING else self.join(a.type, b.type)
            if joined is None:
                raise self.error(node, f"{name or 'this'} is {a.python} in one branch and {b.python} in the other: convert one")
            types[name] = joined
        results = {name: Number(types[name][0], f"%{self.name(name)}", weak=types[name][1]) for name in names}
        if not names and not any(text.strip() and not text.strip().startswith(";") for lines, _ in parts for text, _ in lines):
            return {}
        left = f"{', '.join(each.ref for each in results.values())} = " if results else ""
        right = f" : {', '.join(_IR[types[name][0]] for name in names)}" if results else ""
        self.write(f"{left}if {test.ref}{right} {{", node)
        for number, (lines, inner) in enumerate(parts):
            if number == 1:
                if not names and not lines:
                    break
                self.write("} else {", node)
            self.lines.extend(lines)
            if names:
                self.depth += 1
                refs = [self.ref(inner[name], types[name][0], node) for name in names]
                self.write(f"yield {', '.join(refs)}", node)
                self.depth -= 1
        self.write("}", node)
        return results

    @staticmethod
    def join(a: tuple[str, bool], b: tuple[str, bool]) -> Optional[tuple[str, bool]]:
        """The type of a variable that has either; none where that depends on the way taken."""
        if a == b:
            return a
        if a[1] and b[1]:
            return "float64", True
        if not a[1] and not b[1]:
            return None
        weak, other = (a, b) if a[1] else (b, a)
        kind = _KIND[other[0]]
        return None if kind == "b" or (_KIND[weak[0]] == "f" and kind != "f") else other

    def loop(self, node: ast.AST, body: list, env: dict, count: Optional[str], write: Callable) -> None:
        """A loop with what it carries: `write` has its head and its parts written, given the types."""
        names = [name for name in _assigned(body) if isinstance(env.get(name), Number)]
        types = {name: env[name].type for name in names}
        # What has no type before the loop takes that which it gets in it.
        untyped = [name for name in names if env[name] is _NOTHING]
        for _ in range(8):
            inner = dict(env)
            carried = {name: Number(types[name][0], f"%{self.name(name)}", weak=types[name][1]) for name in names}
            carried.update({name: _NOTHING for name in untyped})
            inner.update(carried)
            parts = write(inner)
            found = {name: inner[name].type if name in untyped else self.join(types[name], inner[name].type) for name in names}
            for name, type_ in found.items():
                if type_ is None:
                    raise self.error(node, f"{name} is {env[name].python} before the loop and {inner[name].python} in it: convert it before")
            if found == types and not untyped:
                break
            types, untyped = found, []
        for name in _assigned(body):
            if name not in names and not isinstance(env.get(name), Memory):
                env[name] = Undefined(f"in the loop of line {self.source.first + node.lineno - 1}")
        begin = [self.ref(env[name], types[name][0], node) for name in names]
        carry = ", ".join(f"{carried[name].ref}: {_IR[types[name][0]]} = {ref}" for name, ref in zip(names, begin))
        results = {name: Number(types[name][0], f"%{self.name(name)}", weak=types[name][1]) for name in names}
        self.end_loop(node, parts, names, types, inner, carry, results, carried)
        env.update(results)

    def end_loop(self, node: Any, parts: tuple, names: list, types: dict, inner: dict, carry: str, results: dict, carried: dict) -> None:
        head, condition, body = parts
        left = ", ".join(each.ref for each in results.values())
        self.write(f"{left}{' = ' if left else ''}{head}{f' carry({carry})' if carry else ''} {{", node)
        if condition is not None:
            lines, test = condition
            self.lines.extend(lines)
            self.depth += 1
            self.write(f"yield {self.ref(test, 'bool', node)}", node)
            self.depth -= 1
            self.write("} do {", node)
        self.lines.extend(body)
        if names:
            self.depth += 1
            refs = [self.ref(inner[name], types[name][0], node) for name in names]
            self.write(f"yield {', '.join(refs)}", node)
            self.depth -= 1
        self.write("}", node)

    def on(self, flags: set, env: dict, node: ast.AST) -> Number:
        """Is none of the flags set?"""
        result = Number("bool", const=True)
        for flag in sorted(flags):
            result = self.both(result, self.op("not", "bool", node, env[flag]), node)
        return result

    def do_While(self, node: Any, env: dict) -> None:  # noqa: N802
        def write(inner: dict) -> tuple:
            def condition() -> Number:
                going = self.on(node.ends, inner, node)
                of = self.truth(self.expression(node.test, dict(inner)), node.test)
                return self.both(going, of, node)

            test = self.captured(condition)
            body, _ = self.captured(lambda: self.statements(node.body, inner))
            return "while", test, body

        self.loop(node, node.body, env, None, write)

    def do_For(self, node: Any, env: dict) -> None:  # noqa: N802
        call = node.iter
        found = self.static(call.func, env) if isinstance(call, ast.Call) else None
        if found is None or found.value is not range or call.keywords or not 1 <= len(call.args) <= 3:
            raise self.error(node.iter, "a for loop goes over range(…) in a kernel")
        if not isinstance(node.target, ast.Name):
            raise self.error(node.target, "a loop over range has one variable")
        given = [self.number(each, env) for each in call.args]
        for each, at in zip(given, call.args):
            if each.kind not in "iu":
                raise self.error(at, f"range takes integers, not {each.python}")
        start, stop = (Number("int64", const=0, weak=True), given[0]) if len(given) == 1 else given[:2]
        step = given[2].const if len(given) == 3 else 1
        if not isinstance(step, int) or step == 0:
            raise self.error(call.args[2], "the step of a range is a literal other than 0")
        begin, end = self.ref(start, "int64", node), self.ref(stop, "int64", node)
        if step < 0 and start.const is not None:
            begin = self.cast(start, "int64", node).ref
        variable = node.target.id
        # An index that is carried beside the others where the loop may end early, and from which one that falls is counted.
        early, counter = bool(node.ends), ".count"
        if step < 0:
            span = self.emit("sub", f"{begin}, {end}", "int64", node)
            more = self.emit("add", f"{span.ref}, {-step - 1}", "int64", node)
            total = self.emit("div.s", f"{more.ref}, {-step}", "int64", node).ref
            low, high, by = "0", total, 1
        else:
            low, high, by = begin, end, step

        def index(ref: str) -> Number:
            if step > 0:
                return Number("int64", ref, weak=True)
            far = self.emit("mul", f"{ref}, {step}", "int64", node)
            return self.emit("add", f"{far.ref}, {begin}", "int64", node, weak=True)

        if early:
            env[counter] = self.emit("const", low, "int64", node) if not low.startswith("%") else Number("int64", low)

        def write(inner: dict) -> tuple:
            count = inner[counter].ref if early else f"%{self.name(variable)}"

            def run() -> None:
                inner[variable] = index(count)
                self.statements(node.body, inner)
                if early:
                    inner[counter] = self.emit("add", f"{count}, {by}", "int64", node)

            def condition() -> Number:
                going = self.on(node.ends, inner, node)
                return self.both(going, self.emit("lt.s", f"{count}, {high}", "bool", node), node)

            test = self.captured(condition) if early else None
            body, _ = self.captured(run)
            if early:
                return "while", test, body
            return f"for {count}: i64 = {low} to {high} step {by}", None, body

        target = ast.copy_location(ast.Name(counter, ast.Store()), node)
        again = ast.copy_location(ast.Assign([target], ast.copy_location(ast.Constant(0), node)), node)
        before = env.pop(variable, None)
        self.loop(node, [*node.body, *([again] if early else [])], env, None, write)
        env.pop(counter, None)
        env[variable] = before if isinstance(before, Memory) else Undefined(f"in the loop of line {self.source.first + node.lineno - 1}")
