"""Walking over expressions: their nodes, what they depend on, and trees made from trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilewise.expr.operations import OPERATIONS, READS, Expr, kind


def children(e: Expr) -> tuple[Expr, ...]:
    if e.op in ("number", "symbol", "param"):
        return ()
    return e.args[1:] if e.op in READS else e.args


def nodes(*roots: Expr, into: Callable[[Expr], Sequence[Expr]] = children) -> list[Expr]:
    """Return every node once, arguments before what uses them; of ``into``, the arguments of each node that are walked."""
    seen: dict[int, Expr] = {}
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        e, arguments_done = stack.pop()
        if arguments_done:
            seen[id(e)] = e
        elif id(e) not in seen:
            stack.append((e, True))
            stack += [(a, False) for a in reversed(into(e)) if id(a) not in seen]
    return list(seen.values())


def fold(root: Expr, value: Callable[[Expr, list], Any], into: Callable[[Expr], Sequence[Expr]] = children) -> Any:
    """Return ``value(node, values of its arguments)`` of the root, from the last arguments up: what a recursion would return, at any depth.

    Args:
        into: the arguments of a node that are asked.
    """
    found: dict[int, Any] = {}
    for e in nodes(root, into=into):
        found[id(e)] = value(e, [found[id(a)] for a in into(e)])
    return found[id(root)]


def lookups(*roots: Expr) -> list[Expr]:
    """The nodes that read a leaf: an element of it, or a row."""
    return [e for e in nodes(*roots) if e.op in READS]


def operations_of(*roots: Expr) -> set[str]:
    """The names of what a kernel must know to compute the expressions, beside reading elements."""
    return {e.op for e in nodes(*roots) if e.op in OPERATIONS or e.op == "selected"}


def selections(*roots: Expr) -> list[Expr]:
    """The nodes that look for a key in a row of a leaf."""
    return [e for e in nodes(*roots) if e.op == "selected"]


def indices(read: Expr) -> tuple[Expr, ...]:
    """The indices of a read, one for each dimension of its leaf; none for the last one of rows."""
    return read.args[1:-1] if read.op == "selected" else read.args[1:]


def depends_on(*roots: Expr) -> frozenset[str]:
    """Return the names of the symbols in the expressions."""
    return frozenset().union(*[_symbols(root) for root in roots])


def _symbols(root: Expr) -> frozenset[str]:
    """Return the symbols below one node, which keeps them, as every node below it does."""
    stack = [root]
    while stack:
        e = stack[-1]
        unknown = [a for a in children(e) if a._symbols is None] if e._symbols is None else []
        if unknown:
            stack += unknown
            continue
        if e._symbols is None:
            own = e.args if e.op == "symbol" else ()
            e._symbols = frozenset(own).union(*[a._symbols for a in children(e)])
        stack.pop()
    return root._symbols


def same(x: Expr, y: Expr) -> bool:
    """Return whether two expressions are written alike."""
    stack, seen = [(x, y)], set()
    while stack:
        a, b = stack.pop()
        if a is b or (id(a), id(b)) in seen:
            continue
        seen.add((id(a), id(b)))
        below = children(a), children(b)
        own = [e.args[: len(e.args) - len(inner)] for e, inner in zip((a, b), below, strict=True)]
        if a.op != b.op or kind(a) != kind(b) or len(below[0]) != len(below[1]) or own[0] != own[1]:
            return False
        stack += zip(*below, strict=True)
    return True


def rewrite(root: Expr, terminal: Callable[[Expr], Expr]) -> Expr:
    """Return the tree with every number and symbol replaced by ``terminal`` of it; shared nodes stay shared."""
    new: dict[int, Expr] = {}
    for e in nodes(root):
        if e.op in ("number", "symbol", "param"):
            new[id(e)] = terminal(e)
        else:
            head = (e.args[0],) if e.op in READS else ()
            new[id(e)] = Expr(e.op, (*head, *[new[id(a)] for a in children(e)]))
    return new[id(root)]


def substitute(root: Expr, values: Mapping[str, Expr]) -> Expr:
    """Symbols replaced by expressions."""
    return rewrite(root, lambda e: values.get(e.args[0], e) if e.op == "symbol" else e)


def abstract(root: Expr, numbers: list[float]) -> Expr:
    """Return the tree with its numbers moved into ``numbers`` (appended) and parameters in their place.

    Trees that differ in numbers alone become the same text, so they share one kernel. Bools stay where they are.
    """

    def slot(e: Expr) -> Expr:
        if e.op != "number" or isinstance(e.args[0], bool):
            return e
        numbers.append(e.args[0])
        return Expr("param", (len(numbers) - 1, kind(e)))

    return rewrite(root, slot)
