"""Expressions as text, so that an operator can carry them as a string, and back."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from typing import Any

import torch

from tilewise.expr.operations import OPERATIONS, Expr, Fitted, apply, number, symbol, tensor_kind
from tilewise.expr.walk import children, nodes

_INFIX = {operation.infix: name for name, operation in OPERATIONS.items() if operation.infix}


_PARAM = re.compile(r"(float|int|bool)_(\d+)")
_LEAF = re.compile(r"(fitted_)?(float|int|bool)(\d+)")
_MAX_DEPTH = 40  # Python's parser takes 200 nested parentheses


def to_text(e: Expr, leaves: list[torch.Tensor] | None = None) -> tuple[str, tuple[torch.Tensor, ...]]:
    """``(text, leaves)``: Python syntax with leaves as ``float0[h, i]``, numbered by first appearance.

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
        return f"{_leaf_name(e.args[0], leaves)}[{', '.join([_strip(x) for x in inner]) or '()'}]"
    infix = OPERATIONS[e.op].infix
    if infix:
        return f"({inner[0]} {infix} {inner[1]})"
    return f"(~{inner[0]})" if e.op == "not" else f"{e.op}({', '.join([_strip(x) for x in inner])})"


def _strip(text: str) -> str:
    """The text without its outer parentheses, where these are one pair."""
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


def parse(text: str, leaf_slot: Callable[[int], int] = lambda n: n) -> Expr:
    """The expression that :func:`to_text` printed; leaf ``n`` becomes ``(kind, leaf_slot(n))``, with a third ``"fitted"`` if it is."""
    return from_ast(ast.parse(text, mode="eval").body, leaf_slot, {})


def from_ast(node: ast.AST, leaf_slot: Callable[[int], int], names: dict[str, Expr]) -> Expr:
    """The expression of a parsed text, as :func:`parse` says; ``names`` holds the shared nodes that it has named so far."""

    def read(x: ast.AST) -> Expr:
        return from_ast(x, leaf_slot, names)

    match node:
        case ast.Constant(value=value):
            return number(value)
        case ast.Name(id="inf" | "nan" as name):
            return number(float(name))
        case ast.Name(id=name):
            parameter = _PARAM.fullmatch(name)
            if parameter:
                return Expr("param", (int(parameter[2]), parameter[1]))
            return names[name] if name in names else symbol(name)
        case ast.NamedExpr(target=ast.Name(id=name), value=value):
            names[name] = read(value)
            return names[name]
        case ast.Tuple(elts=[*named, last]):
            for x in named:
                read(x)
            return read(last)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)):
            return number(-value)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
            return number(-math.inf)
        case ast.UnaryOp(op=ast.Invert(), operand=x):
            return apply("not", read(x))
        case ast.BinOp(left=x, op=op, right=y):
            return apply(_INFIX[_AST_INFIX[type(op)]], read(x), read(y))
        case ast.Compare(left=x, ops=[op], comparators=[y]):
            return apply(_INFIX[_AST_INFIX[type(op)]], read(x), read(y))
        case ast.Call(func=ast.Name(id=name), args=args):
            return apply(name, *[read(x) for x in args])
        case ast.Subscript(value=ast.Name(id=name), slice=index):
            fitted, leaf_kind, n = _LEAF.fullmatch(name).groups()
            leaf = (leaf_kind, leaf_slot(int(n)), *(["fitted"] if fitted else []))
            indices = index.elts if isinstance(index, ast.Tuple) else [index]
            return Expr("lookup", (leaf, *[read(x) for x in indices]))
    raise ValueError(f"not an expression: {ast.dump(node)}")


_AST_INFIX = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
