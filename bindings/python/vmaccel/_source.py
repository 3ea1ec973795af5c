"""Where a kernel's function stands, and errors that show it."""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from typing import Callable


class KernelError(SyntaxError):
    """A function that can't be a kernel: where, and why."""


class Source:
    """A function's syntax tree, and where it stands."""

    def __init__(self, function: Callable) -> None:
        try:
            lines, first = inspect.getsourcelines(function)
        except (OSError, TypeError) as error:
            name = getattr(function, "__name__", function)
            raise KernelError(f"the source of {name} can't be read: a kernel is written in a file ({error})") from None
        self.function = function
        self.file = inspect.getsourcefile(function) or "<unknown>"
        text = textwrap.dedent("".join(lines))
        self.indent = len(lines[0]) - len(text.splitlines(True)[0])
        self.lines, self.first = [line.rstrip("\n") for line in lines], first
        tree = ast.parse(text).body[0]
        if not isinstance(tree, ast.FunctionDef):
            raise KernelError(f"{self.file}:{first}: a kernel is a function with `def`")
        self.tree = tree
        closure = inspect.getclosurevars(function)
        self.names = {**builtins.__dict__, **function.__globals__, **closure.nonlocals}
        self.flags: set[str] = set()

    def error(self, node: ast.AST, message: str) -> KernelError:
        """An error at a node: as a SyntaxError has it, with its line."""
        at = getattr(node, "lineno", 1)
        line = self.lines[at - 1] if at <= len(self.lines) else ""
        begin = getattr(node, "col_offset", 0) + self.indent + 1
        end_line = getattr(node, "end_lineno", None) or at
        end = (getattr(node, "end_col_offset", None) or 0) + self.indent + 1
        first = self.first - 1
        return KernelError(message, (self.file, at + first, begin, line, end_line + first, end))
