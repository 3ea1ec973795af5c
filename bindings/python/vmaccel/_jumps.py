"""`break`, `continue` and `return` are rewritten, since the IR has none: into `else` where they end a branch, and else into flags.

A flag is a variable whose name begins with a dot, which no variable of Python's does.
"""

from __future__ import annotations

import ast
from typing import Any, Optional

from ._source import Source


class Jumps:
    """Rewrites `break`, `continue` and `return` of one function."""

    def __init__(self, source: Source) -> None:
        self.source, self.count, self.read = source, 0, source.flags

    def function(self, body: list) -> list:
        lowered, _ = self.block(body, None)
        return [self.assign(body[0], ".return", False), *lowered]

    @staticmethod
    def assign(node: ast.AST, flag: str, value: Any) -> ast.stmt:
        value = value if isinstance(value, ast.AST) else ast.copy_location(ast.Constant(value), node)
        return ast.copy_location(ast.Assign([ast.copy_location(ast.Name(flag, ast.Store()), node)], value), node)

    def unless(self, node: ast.AST, flags: set[str], body: list) -> ast.stmt:
        """The statements where none of the flags is set."""
        self.read |= flags
        names: list[ast.expr] = [ast.copy_location(ast.Name(flag, ast.Load()), node) for flag in sorted(flags)]
        test: ast.expr = names[0] if len(names) == 1 else ast.copy_location(ast.BoolOp(ast.Or(), names), node)
        test = ast.copy_location(ast.UnaryOp(ast.Not(), test), node)
        return ast.copy_location(ast.If(test, body, []), node)

    def jumps(self, body: list) -> bool:
        """Does it never reach its end?"""
        last = body[-1] if body else None
        if isinstance(last, ast.If):
            return self.jumps(last.body) and self.jumps(last.orelse)
        return isinstance(last, (ast.Break, ast.Continue, ast.Return))

    def block(self, body: list, loop: Optional[str]) -> tuple[list, set[str]]:
        """The statements without jumps, and the flags that these may set."""
        done: list = []
        for at, node in enumerate(body):
            rest = body[at + 1 :]
            if isinstance(node, (ast.Break, ast.Continue)):
                flag = f"{'.break' if isinstance(node, ast.Break) else '.continue'}{loop}"
                return [*done, self.assign(node, flag, True)], {flag}
            if isinstance(node, ast.Return):
                value = [self.assign(node, ".value", node.value)] if node.value is not None else []
                return [*done, *value, self.assign(node, ".return", True)], {".return"}
            flags: set[str] = set()
            if isinstance(node, ast.If):
                then, other = node.body, node.orelse
                moved = bool(rest) and (self.jumps(then) or self.jumps(other))
                if moved:
                    then, other = (then, [*other, *rest]) if self.jumps(then) else ([*then, *rest], other)
                (then, of_then), (other, of_other) = self.block(then, loop), self.block(other, loop)
                flags = of_then | of_other
                done.append(ast.copy_location(ast.If(node.test, then, other), node))
                if moved:
                    return done, flags
            elif isinstance(node, (ast.For, ast.While)):
                if node.orelse:
                    raise self.source.error(node.orelse[0], "a loop has no else in a kernel")
                self.count += 1
                name = str(self.count)
                inner, of_loop = self.block(node.body, name)
                own = {flag for flag in of_loop if flag.endswith(name) and flag != ".return"}
                flags = of_loop - own
                if f".continue{name}" in own:
                    inner = [self.assign(node, f".continue{name}", False), *inner]
                if f".break{name}" in own:
                    done.append(self.assign(node, f".break{name}", False))
                ends = {flag for flag in of_loop if not flag.startswith(".continue")}
                self.read |= ends
                new: Any = (
                    ast.While(node.test, inner, [])
                    if isinstance(node, ast.While)
                    else ast.For(node.target, node.iter, inner, [])
                )
                new.ends = ends
                done.append(ast.copy_location(new, node))
            else:
                done.append(node)
                continue
            if flags and rest:
                after, of_rest = self.block(rest, loop)
                return [*done, self.unless(rest[0], flags, after)], flags | of_rest
            if flags:
                return done, flags
        return done, set()
