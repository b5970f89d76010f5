"""The meaning of expressions: their values on tensors of indices, and their derivatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import and_

import torch

from tilewise.expr.operations import ONE, OPERATIONS, READS, ZERO, Expr, apply, is_number, kind, number, symbol
from tilewise.expr.walk import children, nodes


def evaluate(
    roots: Sequence[Expr],
    env: Mapping[str, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    dtype: torch.dtype,
    numbers: Sequence[float] = (),
) -> list[torch.Tensor]:
    """Return the values of ``roots``, broadcast from the shapes of the symbols that each depends on.

    Args:
        env: a tensor for every symbol used, integer but for ``s``; shapes that broadcast against each other.
        leaves: the tensors that lookups read, by slot.
        dtype: in which floating values are computed; floating leaves are converted element by element, and whole numbers to
            int64. Indices of leaves are computed in fp32 always.
        numbers: the values of parameters, by slot.
    """
    device = next((t.device for t in env.values()), torch.device("cpu"))
    steps, results = _order(roots)
    values: list[torch.Tensor | None] = []
    for e, at, last in steps:
        if e.op in ("number", "param"):
            value = constant(e.args[0] if e.op == "number" else numbers[e.args[0]], device, dtype)
        elif e.op == "symbol":
            value = env[e.args[0]]
        elif e.op == "lookup":
            index = [values[n] for n in at]
            if dtype != torch.float32 and any(x.op not in ("symbol", "number") for x in e.args[1:]):
                index = evaluate(e.args[1:], env, leaves, torch.float32, numbers)  # the same element in every dtype
            value = read(leaves[e.args[0][1]], index)
            value = value.to(dtype) if value.is_floating_point() else _whole(value)
        elif e.op == "selected":
            *index, key = [values[n] for n in at]
            value = among(rows(leaves[e.args[0][1]], index), key)
        else:
            operation = OPERATIONS[e.op]
            args = [values[n] for n in at]
            if operation.float_args:
                args = [a if a.is_floating_point() else a.to(dtype) for a in args]
            value = operation.torch(*args)
        values.append(value)
        for n in last:  # of a long expression, the values of all pairs would otherwise be held at once
            values[n] = None
    return [values[n] for n in results]


def _order(roots: Sequence[Expr]) -> tuple[list[tuple[Expr, tuple[int, ...], tuple[int, ...]]], list[int]]:
    """Return each node in the order of evaluation, with the places of its arguments and of those that nobody reads after it; and the
    places of the roots. A single root keeps its order: masks are evaluated in every call."""
    if len(roots) == 1 and roots[0]._order is not None:
        return roots[0]._order
    every = nodes(*roots)
    place = {id(e): n for n, e in enumerate(every)}
    at = [tuple([place[id(a)] for a in children(e)]) for e in every]
    results = [place[id(root)] for root in roots]
    reader = {n: step for step, read in enumerate(at) for n in read}  # the last one
    last: list[list[int]] = [[] for _ in every]
    for n in reader.keys() - set(results):
        last[reader[n]].append(n)
    found = list(zip(every, at, map(tuple, last), strict=True)), results
    if len(roots) == 1:
        roots[0]._order = found
    return found


def _whole(value: torch.Tensor) -> torch.Tensor:
    """Truth values as they are, whole numbers as int64: sums of narrow ones would wrap, and no kernel computes so."""
    return value if value.dtype == torch.bool else value.to(torch.int64)


def constant(value: float, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a number as a tensor of no dimensions: of ``dtype``, a whole one int64, a truth value bool.

    It is filled in on the device: ``torch.tensor`` would copy it there from the host, which waits for all work before it.
    """
    kinds = {float: dtype, int: torch.int64, bool: torch.bool}
    return torch.full((), value, dtype=kinds[type(value)], device=device)


def clamp_index(leaf: torch.Tensor, index: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Indices into ``leaf``, each kept within its dimension, and of one dimension at least: PyTorch reads one of none on the host, which
    waits for the device."""
    kept = [x.long().clamp(0, size - 1) for x, size in zip(index, leaf.shape, strict=True)]
    return [x if x.ndim else x.view(1) for x in kept]


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape to which tensors of these shapes are expanded together.

    ``torch.broadcast_shapes`` imports sympy when it is first called: half a second, for which the first attention would wait.
    """
    rank = max(map(len, shapes), default=0)
    aligned = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*aligned, strict=True))


def read(leaf: torch.Tensor, index: Sequence[torch.Tensor]) -> torch.Tensor:
    if not leaf.numel():  # of a sequence without keys; the checks admit no other
        return leaf.new_zeros(broadcast_shape(*[x.shape for x in index]))
    found = leaf[tuple(clamp_index(leaf, index))] if index else leaf
    return found if any(x.ndim for x in index) else found.view(())


def rows(leaf: torch.Tensor, index: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of ``leaf`` at indices of all its dimensions but the last: ``(*indices, row)``."""
    return leaf[tuple(clamp_index(leaf[..., 0], index))]


def among(row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Whether each ``key`` is an element of its row: bool, in the shape to which keys and rows broadcast.

    Args:
        row: int, ``(..., 1|keys, elements)``; the elements of a row never decrease.
        key: int, ``(..., keys)``.
    """
    shape = broadcast_shape(row.shape[:-1], key.shape)
    one_row = row.shape[-2:-1] in ((), (1,))  # for all keys of the last dimension
    row = row.squeeze(-2) if one_row and row.ndim > 1 else row
    key = key.to(row.dtype).expand(shape)
    key = key if one_row else key.unsqueeze(-1)
    row = row.expand(*key.shape[:-1], row.shape[-1]).contiguous()
    place = torch.searchsorted(row, key.contiguous()).clamp(max=row.shape[-1] - 1)
    return (row.gather(-1, place) == key).view(shape)


def derivative(root: Expr, wrt: Expr) -> Expr | None:
    """Return ``d root / d wrt`` for a symbol or one lookup node; ``None`` where it is zero everywhere. Ties as in torch."""
    same = (lambda e: e.op == "symbol" and e.args == wrt.args) if wrt.op == "symbol" else (lambda e: e is wrt)
    return _directional(root, lambda e: ONE if same(e) else None)


def tangent(root: Expr, slots: Mapping[int, int]) -> Expr:
    """Return the directional derivative of ``root``: ``d root / d s`` times the symbol ``ds``, the tangent of s, plus, for each read of a
    leaf, ``d root / d leaf`` times the same read of the leaf's tangent.

    Args:
        slots: where the tangent of a leaf is found, by the leaf's slot; a leaf that has none is constant.
    """

    def of_terminal(e: Expr) -> Expr | None:
        if e.op == "symbol":
            return symbol("ds") if e.args == ("s",) else None
        if e.op != "lookup" or e.args[0][1] not in slots:
            return None
        return Expr("lookup", ((e.args[0][0], slots[e.args[0][1]]), *e.args[1:]))

    total = _directional(root, of_terminal)
    return number(0.0) if total is None else total


def _directional(root: Expr, of_terminal: Callable[[Expr], Expr | None]) -> Expr | None:
    """Return the derivative of ``root`` along a direction: the change of each symbol and each lookup, or ``None``."""
    slopes: dict[int, Expr | None] = {}
    for e in nodes(root):
        if e.op in ("number", "symbol", "param", *READS):
            slopes[id(e)] = of_terminal(e)
        else:
            slopes[id(e)] = _chain(e, [slopes[id(a)] for a in e.args])
    return slopes[id(root)]


def _chain(e: Expr, inner: list[Expr | None]) -> Expr | None:
    """Sum over the arguments of partial times inner slope, leaving out zeros and ones.

    Slopes are real numbers: truth values would add by or, and whole numbers wrap in a kernel's 32 bits.
    """
    if e.op == "where":  # a select, not a product: the branch not taken may be NaN
        if inner[1] is None and inner[2] is None:
            return None
        return apply("where", e.args[0], *[ZERO if slope is None else slope for slope in inner[1:]])
    total = None
    for partial, slope in zip(OPERATIONS[e.op].partials, inner, strict=False):
        if partial is None or slope is None:
            continue
        term = _product(partial(*e.args, e), slope)
        total = term if total is None else _real(total, term) + term
    return total


def _product(outer: Expr, slope: Expr) -> Expr:
    """The product of two slopes, a selection if one of them is: behind one that selects nothing, the outer slope may be infinite, as that
    of a root is at 0."""
    (conditions, outer), (more, slope) = _selected(outer), _selected(slope)
    if is_number(slope, 1) or is_number(outer, 1):
        found = slope if is_number(outer, 1) else outer
    else:
        found = _real(outer, slope) * slope
    return apply("where", reduce(and_, conditions + more), found, ZERO) if conditions + more else found


def _selected(e: Expr) -> tuple[list[Expr], Expr]:
    """``(conditions, value)`` of an expression that is the value where all of the conditions hold, else 0."""
    conditions = []
    while e.op == "where" and any(is_number(x, 0) for x in e.args[1:]):
        condition, value, other = e.args
        conditions.append(condition if is_number(other, 0) else ~condition)
        e = value if is_number(other, 0) else other
    return conditions, e


def _real(x: Expr, other: Expr) -> Expr:
    """Return one of two operands so that both are combined as floats; a number beside it stays."""
    return x if "float" in (kind(x), kind(other)) or "number" in (x.op, other.op) else apply("float", x)
