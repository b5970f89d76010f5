"""Whole numbers of 8 and 16 bits that wrap around as torch's do, for functions written for such tensors."""

from __future__ import annotations

import torch

from tilewise.expr.operations import Expr, Fitted, apply, kind, number
from tilewise.expr.walk import nodes

_BITS = {torch.uint8: 8, torch.int8: 8, torch.int16: 16}
_STAYS = frozenset(
    {"and", "or", "xor", "mod", "maximum", "minimum", "clamp_min", "clamp_max", "where", "sign", "relu", "rshift"}
)
"""The operations on whole numbers whose result lies where their arguments do."""


def wrapping(root: Expr) -> Expr:
    """Return a traced expression with wrapping arithmetic of narrow whole numbers: each operation has torch's dtype.

    The expression must read its tensors themselves, as a traced one does, since their dtypes decide. A number of Python takes the dtype of
    what it meets, and wraps into it.
    """
    if not any(e.op == "lookup" and _leaf(e).dtype in _BITS for e in nodes(root)):
        return root
    found: dict[int, tuple[Expr, torch.dtype | None]] = {}
    for e in nodes(root):
        head = e.args[:1] if e.op == "lookup" else ()
        inner = (
            [found[id(a)] for a in (e.args[1:] if e.op == "lookup" else e.args)]
            if e.op not in ("number", "symbol", "param")
            else []
        )
        dtype = None if e.op in ("lookup", "int") else _promoted([d for _, d in inner[e.op == "where" :]])
        args = [x if dtype not in _BITS else _fitting(e.op, x, dtype) for x, _ in inner]
        new = Expr(e.op, (*head, *args)) if inner else e
        if kind(new) == "int" and dtype in _BITS and e.op not in _STAYS:
            new = wrapped(new, dtype)
        found[id(e)] = new, _dtype(e, dtype)
    return found[id(root)][0]


def _leaf(lookup: Expr) -> torch.Tensor:
    leaf = lookup.args[0]
    return leaf.tensor if isinstance(leaf, Fitted) else leaf


def _dtype(e: Expr, promoted: torch.dtype | None) -> torch.dtype | None:
    """Return the common dtype of a node's arguments, or None for a number, which takes the dtype of the other operand."""
    if e.op == "number":
        return None
    if e.op == "lookup":
        return _leaf(e).dtype
    if kind(e) == "int":
        return promoted if promoted in _BITS else torch.int64
    return {"float": torch.float32, "bool": torch.bool}[kind(e)]


def _promoted(dtypes: list[torch.dtype | None]) -> torch.dtype | None:
    known = [d for d in dtypes if d is not None]
    if not known:
        return None
    result = known[0]
    for dtype in known[1:]:
        result = torch.promote_types(result, dtype)
    return result


def _fitting(op: str, x: Expr, dtype: torch.dtype) -> Expr:
    """Return an argument beside narrow ones. A whole number wraps into their dtype, except exponents and powers of two that shift."""
    if x.op != "number" or kind(x) != "int" or op == "pow":
        return x
    n = x.args[0]
    if op == "floordiv" and n > 0 and n & (n - 1) == 0:
        return x
    low = 0 if dtype == torch.uint8 else -(1 << (_BITS[dtype] - 1))
    return number((n - low) % (1 << _BITS[dtype]) + low)


def wrapped(x: Expr, dtype: torch.dtype) -> Expr:
    """Return a whole number as one of ``dtype`` holds it, if that has 8 or 16 bits."""
    if dtype not in _BITS:
        return x
    bits = _BITS[dtype]
    if dtype == torch.uint8:
        return apply("and", x, (1 << bits) - 1)
    half = 1 << (bits - 1)
    return apply("and", x + half, (1 << bits) - 1) - half
