"""Expressions as text, so that an operator can carry them as a string, and back."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch

from tilewise.expr.operations import OPERATIONS, SYMBOLS, Expr, Fitted, apply, number, selected, symbol, tensor_kind
from tilewise.expr.reader import read
from tilewise.expr.walk import children, nodes

_INFIX = {operation.infix: name for name, operation in OPERATIONS.items() if operation.infix}


_PARAM = re.compile(r"(float|int|bool)_(\d+)")
_LEAF = re.compile(r"(fitted_)?(float|int|bool)(\d+)")
_NUMBERED = re.compile(rf"\b{_LEAF.pattern}\b")
_MAX_DEPTH = 40  # a name for what is deeper keeps a line readable, and the work for its parentheses small


def to_text(e: Expr, leaves: list[torch.Tensor] | None = None) -> tuple[str, tuple[torch.Tensor, ...]]:
    """Return ``(text, leaves)``: Python syntax with leaves as ``float0[h, i]``, numbered by first appearance.

    A leaf that is to fit its indices is ``fitted_float0[h, i]``. Kernels do not depend on that: once parsed, it is printed without.

    A node that is used twice, or is deep, is named before it is used: ``(_0 := s * s, _0 + _0)``. Several expressions
    number their leaves together when they share the list ``leaves``, which then grows.
    """
    leaves = [] if leaves is None else leaves
    uses: dict[int, int] = {}
    for node in nodes(e):
        for child in children(node):
            uses[id(child)] = uses.get(id(child), 0) + 1
    texts: dict[int, tuple[str, int]] = {}  # text and depth
    named: list[str] = []
    for node in nodes(e):
        inner = [texts[id(child)] for child in children(node)]
        text, depth = _node_text(node, [t for t, _ in inner], leaves), 1 + max([d for _, d in inner], default=0)
        operation = node.op not in ("number", "symbol", "param")
        if operation and node is not e and (uses[id(node)] > 1 or depth >= _MAX_DEPTH):
            named.append(f"_{len(named)} := {_strip(text)}")
            text, depth = f"_{len(named) - 1}", 0
        texts[id(node)] = text, depth
    text = _strip(texts[id(e)][0])
    return f"({', '.join([*named, text])})" if named else text, tuple(leaves)


def _node_text(e: Expr, inner: list[str], leaves: list) -> str:
    if e.op in ("number", "symbol", "param"):
        text = f"{e.args[1]}_{e.args[0]}" if e.op == "param" else str(e.args[0])
        return f"({text})" if text.startswith("-") else text
    if e.op == "lookup":
        return _element_text(e.args[0], inner, leaves)
    if e.op == "selected":
        return f"selected({_element_text(e.args[0], inner[:-1], leaves)}, {_strip(inner[-1])})"
    infix = OPERATIONS[e.op].infix
    if infix:
        return f"({inner[0]} {infix} {inner[1]})"
    return f"(~{inner[0]})" if e.op == "not" else f"{e.op}({', '.join([_strip(x) for x in inner])})"


def _element_text(leaf: Any, indices: list[str], leaves: list) -> str:
    return f"{_leaf_name(leaf, leaves)}[{', '.join([_strip(x) for x in indices]) or '()'}]"


def _strip(text: str) -> str:
    """Return the text without its outer parentheses, where these are one pair."""
    if not text.startswith("(") or not text.endswith(")"):
        return text
    depth = 0
    for position, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and position < len(text) - 1:
            return text
    return text[1:-1]


def _leaf_name(leaf: Any, leaves: list) -> str:
    if isinstance(leaf, tuple):
        return f"{leaf[0]}{leaf[1]}"
    if isinstance(leaf, Fitted):
        return f"fitted_{_leaf_name(leaf.tensor, leaves)}"
    for slot in range(len(leaves)):
        if leaves[slot] is leaf:
            return f"{tensor_kind(leaf)}{slot}"
    leaves.append(leaf)
    return f"{tensor_kind(leaf)}{len(leaves) - 1}"


def numbered_through(text: str, begins: str) -> str:
    """Return a text of several expressions, each of which numbers its leaves from 0, with those numbered through all of them.

    ``begins`` is a pattern of what an expression begins with.
    """
    parts, base = [], 0
    for part in re.split(f"(?={begins})", text):
        used = {int(n) for *_, n in _NUMBERED.findall(part)}
        parts.append(_NUMBERED.sub(lambda found, base=base: f"{found[1] or ''}{found[2]}{base + int(found[3])}", part))
        base += len(used)
    return "".join(parts)


def parse(text: str, leaf_slot: Callable[[int], int] = lambda n: n) -> Expr:
    """Return the expression of :func:`to_text`'s text; leaf ``n`` becomes ``(kind, leaf_slot(n))``, with a third ``"fitted"`` if it is."""
    return read(text, Expressions(leaf_slot))


class Expressions:
    """The meanings of the parts of an expression's text, as :func:`parse` says."""

    def __init__(self, leaf_slot: Callable[[int], int]):
        self.leaf_slot = leaf_slot
        self.names: dict[str, Any] = dict(_WORDS)

    def number(self, value: int | float) -> Expr:
        return number(value)

    def name(self, name: str) -> Any:
        known = self.names.get(name)
        if known is not None:
            return known
        parameter = _PARAM.fullmatch(name)
        if parameter:
            return Expr("param", (int(parameter[2]), parameter[1]))
        if name not in SYMBOLS:
            raise ValueError(f"not an expression's name: {name}")
        return symbol(name)

    def bind(self, name: str, value: Any) -> None:
        self.names[name] = value

    def prefix(self, op: str, x: Expr) -> Expr:
        if op == "-" and x.op == "number":
            return number(-x.args[0])
        return apply("not" if op == "~" else "neg", x)

    def infix(self, op: str, x: Any, y: Any) -> Any:
        return apply(_INFIX[op], x, y)

    def call(self, name: str, args: list[Any]) -> Any:
        if name == "selected":
            return selected(*args)
        if name not in OPERATIONS:
            raise ValueError(f"not an expression's operation: {name}")
        return apply(name, *args)

    def element(self, name: str, index: list[Any]) -> Expr:
        leaf = _LEAF.fullmatch(name)
        if leaf is None:
            raise ValueError(f"not an expression's tensor: {name}")
        fitted, leaf_kind, n = leaf.groups()
        return Expr("lookup", ((leaf_kind, self.leaf_slot(int(n)), *(["fitted"] if fitted else [])), *index))


_WORDS = {"inf": number(math.inf), "nan": number(math.nan), "True": number(True), "False": number(False)}
