"""How the gradient of each tensor that a score reads is summed: decided once, for all backends.

A score reads its leaves at indices of ``b, h, i, j``. What the gradient of one read costs follows from these indices
(docs/algorithm.md#7-scores-and-their-gradients): :func:`classify` says how it is summed, :func:`read_adjoint` sums it on tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewise import expr
from tilewise.distances import by_distance, varying
from tilewise.expr import Expr
from tilewise.problem import Problem

ROWS, COLUMNS, STORE, TILES = "rows", "columns", "store", "tiles"
DIAGONALS, SCATTER = "diagonals", "scatter"


@dataclass(frozen=True)
class Read:
    """One read of a leaf that wants a gradient.

    Attributes:
        expr: the lookup.
        how: ``ROWS``, sums over the keys of a row, where the index does not depend on j; ``COLUMNS``, sums over the queries
            of a key, where it does not depend on i; ``STORE``, where each pair has an element of its own; ``TILES``, the same
            but for the broadcast indices ``loops``, which are to be added in order; ``DIAGONALS``, sums over the pairs of a distance
            i - j, where the index depends on that alone; ``SCATTER``, additions anywhere.
        loops: for ``TILES``, the broadcast indices among b and h.
        distances: the pairs that count: those with i - j in ``[start, stop)``; None is unbounded.
        pairs: of ``TILES``, whether the sums are of each (h, i, j), or each (i, j), and the leaf's gradient is made of them afterwards.
    """

    expr: Expr
    how: str
    loops: tuple[str, ...] = ()
    distances: tuple[int | None, int | None] = (None, None)
    pairs: bool = False

    @property
    def slot(self) -> int:
        return self.expr.args[0][1]

    @property
    def apart(self) -> frozenset[str]:
        """Return the symbols that are an index by themselves. Pairs with different values of one never meet in an element."""
        return frozenset(x.args[0] for x in self.expr.args[1:] if x.op == "symbol")


def reads_every_element(problem: Problem, read: Read) -> bool:
    """Return whether a read at symbols and numbers is of every element: no axis is longer than its symbol runs."""
    lengths = {"b": problem.batch, "h": problem.heads_q, "i": problem.seqlen_q, "j": problem.seqlen_k}
    axes = zip(problem.extras[read.slot].shape, read.expr.args[1:], strict=True)
    return all(size == (1 if x.op == "number" else lengths[x.args[0]]) for size, x in axes)


def classify(p: Problem) -> tuple[Read, ...]:
    """Return how each of ``spec.lookups`` is summed."""
    slots = [e.args[0][1] for e in p.spec.lookups]
    return tuple(_classify(p, e, slots.count(e.args[0][1]) == 1) for e in p.spec.lookups)


def _classify(p: Problem, e: Expr, alone: bool) -> Read:
    used = expr.depends_on(*e.args[1:])
    if "s" in used:
        return Read(e, SCATTER)
    if "j" not in used:
        return Read(e, ROWS)
    if "i" not in used:
        return Read(e, COLUMNS)
    plain = all(x.op in ("symbol", "number") for x in e.args[1:])
    names = [x.args[0] for x in e.args[1:] if x.op == "symbol"]
    if not (plain and alone and len(set(names)) == len(names) and used <= set("bhij")) or p.packed:
        return Read(e, DIAGONALS if by_distance(*e.args[1:]) and not used & varying(p) else SCATTER)
    loops = tuple(name for name, size in (("b", p.batch), ("h", p.heads_q)) if name not in used and size > 1)
    return Read(e, TILES if loops else STORE, loops)


def read_adjoint(
    grad: torch.Tensor, e: Expr, env: Mapping[str, torch.Tensor], leaves: Sequence, g: torch.Tensor
) -> None:
    """Add to ``grad``, the gradient of the leaf that lookup ``e`` reads, what ``g`` (one value per pair) gives it.

    Sums first over what the index does not depend on; where it is plain symbols, the rest is one slice.
    """
    if not e.args[1:]:
        grad += g.sum()
        return
    add_at(grad, e, expr.clamp_index(grad, expr.evaluate(e.args[1:], env, leaves, torch.float32)), g)


def add_at(grad: torch.Tensor, e: Expr, index: Sequence[torch.Tensor], g: torch.Tensor) -> None:
    """:func:`read_adjoint` where the values of the lookup's indices are known, each within its axis of ``grad``."""
    index = [x.view((1,) * (g.ndim - x.ndim) + tuple(x.shape)) for x in index]
    free = [axis for axis in range(g.ndim) if all(x.shape[axis] == 1 for x in index)]
    g = g.sum(free, keepdim=True) if free else g
    names = [a.args[0] for a in e.args[1:] if a.op == "symbol"]
    plain = all(a.op in ("symbol", "number") for a in e.args[1:]) and len(set(names)) == len(names)
    if plain and grad.device.type == "cpu" and g.numel():
        bounds = [(int(x.flatten()[0]), int(x.flatten()[-1])) for x in index]
        if all(high - low + 1 == x.numel() for (low, high), x in zip(bounds, index, strict=True)):
            axes = [next((axis for axis in range(g.ndim) if x.shape[axis] > 1), None) for x in index]
            order = [axis for axis in axes if axis is not None]
            rest = [axis for axis in range(g.ndim) if axis not in order]
            sizes = [high - low + 1 for low, high in bounds]
            grad[tuple(slice(low, high + 1) for low, high in bounds)] += g.permute(*order, *rest).reshape(sizes)
            return
    g = g.expand(expr.broadcast_shape(*[x.shape for x in index]))
    if grad.device.type == "cpu":  # one thread, in order; index_put_ adds from several in any order
        flat = sum(x * stride for x, stride in zip(index, grad.stride(), strict=True))
        grad.view(-1).index_add_(0, flat.expand(g.shape).reshape(-1), g.reshape(-1))
    else:
        grad.index_put_(tuple(index), g, accumulate=True)
