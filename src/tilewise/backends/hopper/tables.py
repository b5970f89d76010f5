"""A table of biases by distance, ``s + table[h, clamp(i - j, ...)]``, T5's buckets: which scores are one, and its biases as a line.

A line has one bias for each distance i - j from ``start`` to ``last``. At its two ends an index has stopped changing, so that all pairs
beyond an end share that end's bias, and a block of such pairs has one bias. Nothing here imports the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tilewise import distances, expr
from tilewise.backends.base import PerProblem
from tilewise.backends.hopper.config import is_traced, keys_of
from tilewise.backends.hopper.parameters import SCORES
from tilewise.device import given_to_graphs, lasting
from tilewise.expr import Expr
from tilewise.problem import Problem

LONGEST = 1024  # distances: blocks that are nearer take a read a pair
FLOATS = ("torch.float32", "torch.bfloat16", "torch.float16")


@dataclass(frozen=True)
class Line:
    """The biases of a score by distance.

    Attributes:
        slot: the table's place among the extras.
        axis: of the table, along which the distance moves.
        by_head: the axis of query heads; None: all heads share the biases.
        at: the number that is the index of each other axis, by axis.
        start, count: the distances are those in ``[start, start + count)``.
        index: the element along ``axis`` of each of these distances.
    """

    slot: int
    axis: int
    by_head: int | None
    at: tuple[tuple[int, int], ...]
    start: int
    count: int
    index: tuple[int, ...]

    @property
    def last(self) -> int:
        """The last distance, whose bias all larger ones share."""
        return self.start + self.count - 1

    def of(self, table: Tensor) -> Tensor:
        """The biases of a table, a copy (1 or heads_q, count) in its dtype: element ``[h, t]`` is that of distance ``start + t``.

        Autograd goes through it: the gradient of a copy is summed into the table's.
        """
        found = table.index_select(self.axis, _index(self.index, table.device))
        for axis, n in sorted(self.at, reverse=True):
            found = found.select(axis, n)
        if self.by_head is None:
            return found.view(1, self.count)
        return found if self.by_head < self.axis else found.t()

    def gradient(self, found: Tensor, table: Tensor) -> Tensor:
        """The gradient of a table, in its shape and dtype, of those of its biases, (heads_q, count), fp32."""
        grad = torch.zeros(table.shape, dtype=found.dtype, device=table.device)
        part = grad
        for axis, n in sorted(self.at, reverse=True):
            part = part.select(axis, n)
        # What is left is the line of all heads, or a line for each, along either axis.
        found = found.sum(0) if self.by_head is None else found if self.by_head < self.axis else found.t()
        part.index_add_(int(found.ndim > 1 and self.by_head < self.axis), _index(self.index, table.device), found)
        return grad.to(table.dtype)


def _index(index: tuple[int, ...], device: torch.device) -> Tensor:
    return given_to_graphs(_kept_index(index, device))


@lru_cache(maxsize=64)
def _kept_index(index: tuple[int, ...], device: torch.device) -> Tensor:
    return lasting(lambda: torch.tensor(index, device=device))


def line_of(p: Problem) -> Line | None:
    """The line of a score that adds one element of a table, where kernels take it; None for any other.

    They take it where ends of rows are the same numbers for all heads, without dropout, for at most LONGEST distances. The index may depend
    on i and j along one axis; along others it is h or a number.
    """
    # Its distances are as many as a call is long: they are looked at once for each problem.
    return _LINES.of(p)


def _line_of(p: Problem) -> Line | None:
    lookup = added(p.spec.score)
    plain = not (p.packed or p.paged or p.spec.dropout_p or p.spec.piece or p.spec.region.predicate is not None)
    forms = SCORES["table"].forms
    if lookup is None or not plain or p.softmax_scale <= 0 or not is_traced(p) or keys_of(p)[0] not in forms:
        return None
    slot, axes = lookup.args[0][1], lookup.args[1:]
    facts, moving = p.extras[slot], [n for n, x in enumerate(axes) if {"i", "j"} & expr.depends_on(x)]
    heads = [n for n, x in enumerate(axes) if _is(x, "h") and facts.shape[n] == p.heads_q]
    at = tuple((n, x.args[0]) for n, x in enumerate(axes) if x.op == "number" and 0 <= x.args[0] < facts.shape[n])
    if len(moving) != 1 or len(heads) > 1 or len(heads) + len(at) + 1 != len(axes) or str(facts.dtype) not in FLOATS:
        return None
    low, high = distances.visible(p)
    if not distances.by_distance(axes[moving[0]]) or low > high:
        return None
    near = distances.near(p, lookup)
    start, last = max(near.start - near.below, low), min(near.stop, high)
    if last - start >= LONGEST:
        return None
    found = distances.indices(p, lookup, start, last + 1)
    if found is None:
        return None
    index = tuple(found[moving[0]].tolist())
    return Line(slot, moving[0], heads[0] if heads else None, at, start, len(index), index)


_LINES = PerProblem(_line_of)


def added(score: Expr | None) -> Expr | None:
    """The lookup that a score adds to s; None where the score is anything else."""
    if score is None or score.op != "add":
        return None
    left, right = score.args
    if left.op == "lookup":
        left, right = right, left
    return right if right.op == "lookup" and _is(left, "s") else None


def _is(e: Expr, name: str) -> bool:
    """Whether an expression is one symbol."""
    return e.op == "symbol" and e.args[0] == name
