"""The one reader of texts: of an expression (:mod:`tilewise.expr.text`) and of a mask (:mod:`tilewise.masks.regions`).

The syntax is that of Python's expressions, as far as the printers use it. Nothing is kept between texts, so threads may read at once, and
what is open waits in a list instead of in nested calls, so a text may be as deep as it is long.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Protocol

_TOKEN = re.compile(
    r"(?P<number>\d+\.?\d*(?:e[+-]?\d+)?)|(?P<name>[A-Za-z_]\w*)|:=|\*\*|//|[<>=!]=|[-+*/%&|^~<>()[\],]", re.ASCII
)
_LEVELS = (("<", "<=", ">", ">=", "==", "!="), ("|",), ("^",), ("&",), ("+", "-"), ("*", "/", "//", "%"))
_BINDS = {op: level for level, ops in enumerate(_LEVELS, 1) for op in ops}
_PREFIX, _POWER = len(_LEVELS) + 1, len(_LEVELS) + 2
_BINDS["**"] = _POWER
_CLOSES = {"(": ")", "[": "]"}


class Builder(Protocol):
    """The meanings of the parts of a text."""

    def number(self, value: int | float) -> Any: ...

    def name(self, name: str) -> Any: ...

    def bind(self, name: str, value: Any) -> None:
        """``name := value``: from here on the name means the value."""

    def prefix(self, op: str, x: Any) -> Any: ...

    def infix(self, op: str, x: Any, y: Any) -> Any: ...

    def call(self, name: str, args: list[Any]) -> Any: ...

    def element(self, name: str, index: list[Any]) -> Any: ...


class _Open(NamedTuple):
    """An unfinished part: an operator without its right side, an open bracket, a binding without its value.

    Attributes:
        op: the operator, the bracket or ``:=``. binds: how tightly; 0 of brackets and bindings.
        name: what stands before the bracket, or is bound. first: the place of a bracket's first value.
    """

    op: str
    binds: int = 0
    name: str = ""
    first: int = 0


def read(text: str, build: Builder) -> Any:
    """Return the whole that ``build`` makes of a text.

    Raises:
        ValueError: the text is not in this syntax.
    """
    return _Reading(text, build).result()


class _Reading:
    """A text being read from left to right. ``values`` are its complete parts, ``open`` the others."""

    def __init__(self, text: str, build: Builder):
        self.text, self.build = text, build
        self.values: list[Any] = []
        self.open: list[_Open] = [_Open("(")]

    def result(self) -> Any:
        complete = False  # whether an operand has just ended
        at, tokens = 0, [*self._tokens(), (")", "")]
        while at < len(tokens):
            token, kind = tokens[at]
            at += 1
            if complete:
                complete = self._after_operand(token)
            elif kind == "name" and tokens[at][0] in ("(", "[", ":="):
                self.open.append(_Open(tokens[at][0], 0, token, len(self.values)))
                at += 1
            elif kind:
                self.values.append(self.build.name(token) if kind == "name" else self.build.number(_number(token)))
                complete = True
            elif token == "(":
                self.open.append(_Open("(", 0, "", len(self.values)))
            elif token in ("-", "~"):
                self.open.append(_Open(token, _PREFIX))
            elif (
                token in (")", "]")
                and self.open
                and self.open[-1].op in _CLOSES
                and len(self.values) == self.open[-1].first
            ):
                complete = self._after_operand(token)  # brackets around nothing
            else:
                raise self._wrong()
        if self.open or len(self.values) != 1:
            raise self._wrong()
        return self.values[0]

    def _tokens(self) -> list[tuple[str, str]]:
        """Return the tokens of the text, each with its kind: ``"number"``, ``"name"`` or empty."""
        found = [(x.group(), x.lastgroup or "") for x in _TOKEN.finditer(self.text)]
        if "".join([token for token, _ in found]) != self.text.replace(" ", ""):
            raise self._wrong()
        return found

    def _after_operand(self, token: str) -> bool:
        """Take the operator, comma or bracket after an operand. Return whether an operand ends here again."""
        self._end(_BINDS.get(token, 0))
        if token in _BINDS:
            self.open.append(_Open(token, _BINDS[token]))
            return False
        while self.open and self.open[-1].op == ":=":
            self.build.bind(self.open.pop().name, self.values.pop())
        if token == ",":
            return False
        if not self.open or _CLOSES.get(self.open[-1].op) != token:
            raise self._wrong()
        opened = self.open.pop()
        inside = self.values[opened.first :]
        del self.values[opened.first :]
        if not opened.name and len(inside) > 1:
            raise self._wrong()
        if opened.name:
            make = self.build.call if opened.op == "(" else self.build.element
            self.values.append(make(opened.name, inside))
        else:
            self.values += inside  # one, or the index of a tensor without axes: none
        return True

    def _end(self, binds: int) -> None:
        """Complete the operators that bind at least as tightly as what follows."""
        while self.open and self.open[-1].binds >= max(binds, 1):
            waiting, y = self.open.pop(), self.values.pop()
            if waiting.binds == _PREFIX:
                self.values.append(self.build.prefix(waiting.op, y))
            else:
                self.values.append(self.build.infix(waiting.op, self.values.pop(), y))

    def _wrong(self) -> ValueError:
        return ValueError(f"not an expression: {self.text}")


def _number(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)
