"""Walking over expressions: their nodes, what they depend on, and trees made from trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tilewise.expr.operations import Expr, kind


def children(e: Expr) -> tuple[Expr, ...]:
    if e.op in ("number", "symbol", "param"):
        return ()
    return e.args[1:] if e.op == "lookup" else e.args


def nodes(*roots: Expr) -> list[Expr]:
    """Every node once, arguments before what uses them."""
    seen: dict[int, Expr] = {}
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        e, arguments_done = stack.pop()
        if arguments_done:
            seen[id(e)] = e
        elif id(e) not in seen:
            stack.append((e, True))
            stack += [(a, False) for a in reversed(children(e)) if id(a) not in seen]
    return list(seen.values())


def lookups(*roots: Expr) -> list[Expr]:
    return [e for e in nodes(*roots) if e.op == "lookup"]


def depends_on(*roots: Expr) -> frozenset[str]:
    """The names of the symbols in the expressions."""
    return frozenset(e.args[0] for e in nodes(*roots) if e.op == "symbol")


def rewrite(root: Expr, terminal: Callable[[Expr], Expr]) -> Expr:
    """The tree with every number and symbol replaced by ``terminal`` of it; shared nodes stay shared."""
    new: dict[int, Expr] = {}
    for e in nodes(root):
        if e.op in ("number", "symbol", "param"):
            new[id(e)] = terminal(e)
        else:
            head = (e.args[0],) if e.op == "lookup" else ()
            new[id(e)] = Expr(e.op, (*head, *[new[id(a)] for a in children(e)]))
    return new[id(root)]


def substitute(root: Expr, values: Mapping[str, Expr]) -> Expr:
    """Symbols replaced by expressions."""
    return rewrite(root, lambda e: values.get(e.args[0], e) if e.op == "symbol" else e)


def abstract(root: Expr, numbers: list[float]) -> Expr:
    """The tree with its numbers moved into ``numbers`` (appended) and parameters in their place.

    Trees that differ in numbers alone become the same text, so they share one kernel. Bools stay where they are.
    """

    def slot(e: Expr) -> Expr:
        if e.op != "number" or isinstance(e.args[0], bool):
            return e
        numbers.append(e.args[0])
        return Expr("param", (len(numbers) - 1, kind(e)))

    return rewrite(root, slot)
