"""Reads of a score's tensors at the distance of a pair: ``table[h, (i - j).clamp(0, 63)]``, T5's buckets, learned ALiBi.

Their index depends on i and j through i - j alone, so all pairs of a diagonal share an element, and mostly it stops changing far
from the diagonal. Both follow from the index and the lengths of the sequences: no tensor is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise import expr
from tilewise.expr import Expr
from tilewise.masks.facts import as_band
from tilewise.problem import Problem

SHORT = 128  # a run of fewer distances than two tiles has leaves no tile whole: it is no run


def by_distance(*roots: Expr) -> bool:
    """Return whether expressions depend on i and on j, and on them through i - j alone; on s they may not depend."""
    grows: dict[int, int | None] = {}
    for e in expr.nodes(*roots):
        grows[id(e)] = _growth(e, [grows[id(x)] for x in expr.children(e)])
    used = expr.depends_on(*roots)
    return {"i", "j"} <= used and "s" not in used and all(grows[id(e)] == 0 for e in roots)


def reads_by_distance(p: Problem) -> bool:
    """Return whether a problem's score reads a tensor at the distance of a pair."""
    return p.spec.score is not None and any(by_distance(*x.args[1:]) for x in expr.lookups(p.spec.score))


def _growth(e: Expr, inner: list[int | None]) -> int | None:
    """Return the growth of a node where i and j both grow by one; None: not always by as much."""
    if e.op == "symbol":
        return int(e.args[0] in ("i", "j"))
    if not any(x is None or x for x in inner):
        return 0
    if expr.kind(e) != "int" or None in inner:
        return None
    if e.op in ("add", "sub"):
        return inner[0] + inner[1] if e.op == "add" else inner[0] - inner[1]
    if e.op == "neg":
        return -inner[0]
    if e.op == "mul" and sum(x.op == "number" for x in e.args) == 1:
        return inner[0] * e.args[1].args[0] if e.args[1].op == "number" else inner[1] * e.args[0].args[0]
    return None


def lengths_vary(p: Problem) -> bool:
    """Return whether sequences may have more keys than queries by different numbers."""
    return p.packed and len(set(p.spec.cu_slots)) > 1


def varying(p: Problem) -> frozenset[str]:
    """Return the symbols that are not the same for all pairs of a distance and a head, or batch element, in one sum of a kernel."""
    return frozenset(("b", "seqlen_q", "seqlen_k", *(("off",) if lengths_vary(p) else ())) if p.packed else ())


def visible(p: Problem) -> tuple[int, int]:
    """Return the least and the largest i - j that a problem's mask may keep. The first is above the second if there are none."""
    low, high = 1 - p.seqlen_k, p.seqlen_q - 1
    if lengths_vary(p):
        return low, high
    off = 0 if p.packed else p.seqlen_k - p.seqlen_q
    band = as_band(p.spec.region, off, p.seqlen_k)
    if band is None:
        return low, high
    low = low if band.hi is None else max(low, 1 - band.hi)
    return low, high if band.lo is None else min(high, -band.lo)


@dataclass(frozen=True)
class Near:
    """The distances i - j in ``[start, stop)``, beyond which an index does not change.

    Attributes:
        below, above: whether some pair that the mask may keep has a distance below ``start``, or one of at least ``stop``.
    """

    start: int
    stop: int
    below: bool
    above: bool

    @property
    def everywhere(self) -> bool:
        return not (self.below or self.above)


def indices(p: Problem, lookup: Expr, start: int, stop: int) -> dict[int, torch.Tensor] | None:
    """Return the indices of a lookup :func:`by_distance` at the distances in ``[start, stop)``, int64, by axis; of the axes that move.

    None where they read a tensor, or move with b or h too: they are not known before a call.
    """
    moving = {axis: x for axis, x in enumerate(lookup.args[1:]) if {"i", "j"} & expr.depends_on(x)}
    index = list(moving.values())
    if expr.lookups(*index) or expr.depends_on(*index) & ({"b", "h"} | varying(p)):
        return None
    line = torch.arange(int(start), int(stop), device="cpu")
    sizes = {"seqlen_q": p.seqlen_q, "seqlen_k": p.seqlen_k, "off": 0 if p.packed else p.seqlen_k - p.seqlen_q}
    env = {name: torch.tensor(int(size), device="cpu") for name, size in sizes.items()}
    env |= {"i": line, "j": torch.zeros_like(line)}
    shape = p.extras[lookup.args[0][1]].shape
    found = zip(moving, expr.evaluate(index, env, [], torch.float32), strict=True)
    return {axis: x.clamp(0, int(max(shape[axis] - 1, 0))).expand_as(line) for axis, x in found}


def near(p: Problem, lookup: Expr) -> Near:
    """Return the distances at which a lookup :func:`by_distance` may read different elements of its tensor.

    All that are visible, where the :func:`indices` are not known.
    """
    low, high = visible(p)
    found = indices(p, lookup, low, high + 1) if low < high else None
    if found is None:
        return Near(low, high + 1, False, False)
    changes = torch.zeros(high - low, dtype=torch.bool, device="cpu")
    for at in found.values():
        changes |= at[1:] != at[:-1]
    places = changes.nonzero().flatten()
    if not len(places):
        return Near(high + 1, high + 1, True, False)
    start, stop = low + 1 + int(places[0]), low + 1 + int(places[-1])
    below, above = start - low >= SHORT, high + 1 - stop >= SHORT
    return Near(start if below else low, stop if above else high + 1, below, above)
