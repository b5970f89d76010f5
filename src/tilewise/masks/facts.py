"""Facts about a mask that kernels ask for, decided once for all backends.

Each is worked out on the host, from the mask's :class:`tilewise.masks.regions.Region` and the lengths of the sequences: none reads a
tensor. A fact that would take a tensor's values to know counts as unknown, which is always safe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tilewise import expr
from tilewise.expr import Expr
from tilewise.masks.regions import Region

# -- Which keys are seen -------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def every_key_seen(region: Region, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether it is certain that each key has some query that sees it, in every batch element and head."""
    if seqlen_q >= seqlen_k and (region.keeps_diagonal or _diagonal_kept(region, seqlen_q, seqlen_k)):
        return True
    interval = _interval(region, "j", seqlen_q, seqlen_k)
    return interval is not None and bool((interval[0].clamp(min=0) < interval[1].clamp(max=seqlen_q)).all())


@lru_cache(maxsize=4096)
def every_pair_kept(region: Region, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether it is certain that each query sees each key, in every batch element and head."""
    interval = _interval(region, "i", seqlen_q, seqlen_k)
    return interval is not None and bool(((interval[0] <= 0) & (interval[1] >= seqlen_k)).all())


def _follows_from_shapes(*parts: Expr) -> bool:
    """Whether the parts of a mask are the same in every batch element and head, and read no tensor."""
    return not expr.lookups(*parts) and not expr.depends_on(*parts) & {"b", "h"}


def _diagonal_kept(region: Region, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether each key is seen by the query at its own position, ``i = j - off``; there must be at least as many queries as keys."""
    if not _follows_from_shapes(*region.parts):
        return False
    j = torch.arange(seqlen_k, device="cpu")  # whatever device is the default
    return bool(_evaluated(region.inside(), seqlen_q, seqlen_k, i=j - (seqlen_k - seqlen_q), j=j).all())


def _interval(region: Region, index: str, seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor] | None:
    """The keys ``[lo, hi)`` of every query i, or the queries ``[first, last)`` of every key j, unclamped: int64.

    ``None`` where heads or batch elements differ, or where a predicate or the mask's tensors have a say.
    """
    (start, end), length, others = (
        (region.ends[:2], seqlen_q, seqlen_k) if index == "i" else (region.ends[2:], seqlen_k, seqlen_q)
    )
    if region.predicate is not None or not _follows_from_shapes(*[e for e in (start, end) if e is not None]):
        return None
    line = torch.arange(length, device="cpu")
    starts = torch.zeros_like(line) if start is None else _evaluated(start, seqlen_q, seqlen_k, **{index: line})
    ends = torch.full_like(line, others) if end is None else _evaluated(end, seqlen_q, seqlen_k, **{index: line})
    return starts.expand_as(line), ends.expand_as(line)


def _evaluated(e: Expr, seqlen_q: int, seqlen_k: int, **lines: Tensor) -> Tensor:
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "off": seqlen_k - seqlen_q}
    env = {name: torch.tensor(size, device="cpu") for name, size in sizes.items()} | lines
    return expr.evaluate([e], env, [], torch.float32)[0]


# -- Bands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """The kept keys of row i: ``i + lo <= j < i + hi`` and ``start <= j < stop``; a moving end that is None is unbounded."""

    lo: int | None
    hi: int | None
    start: int
    stop: int

    @property
    def form(self) -> str:
        return "full" if self.lo is None and self.hi is None else "upper" if self.lo is None else "band"

    def cut(self, seqlen_q: int) -> Band:
        """The same band with ``start`` and ``stop`` such that some row sees the first and some row sees the last key between them.

        A kernel that gets K and V from ``start`` to ``stop`` alone never meets a key that no query sees. A moving end that
        cuts no row any more is dropped: a single query has none.
        """
        start = self.start if self.lo is None else max(self.start, self.lo)
        stop = self.stop if self.hi is None else min(self.stop, seqlen_q - 1 + self.hi)
        lo = None if self.lo is None or seqlen_q - 1 + self.lo <= start else self.lo
        hi = None if self.hi is None or self.hi >= stop else self.hi
        return Band(lo, hi, start, max(start, stop))


def as_band(region: Region, off: int | None, seqlen_k: int) -> Band | None:
    """The mask as a band of numbers; ``None`` where it is none.

    Args:
        off: ``seqlen_k - seqlen_q``; None where each packed sequence adds its own.
    """
    lo, hi = _moving_end(region.lo, "maximum", off), _moving_end(region.hi, "minimum", off)
    if region.predicate is not None or lo is None or hi is None:
        return None
    start = max(0, 0 if lo[1] is None else lo[1])
    stop = min(seqlen_k, seqlen_k if hi[1] is None else hi[1])
    return Band(lo[0], hi[0], start, max(start, stop))


def _moving_end(e: Expr | None, op: str, off: int | None) -> tuple[int | None, int | None] | None:
    """``(m, n)`` of an end that is the ``op`` of ``i + m`` and ``n``, either of them absent; None: it has another form.

    Where ``off`` is None, the end is the ``op`` of ``i + off + m`` and ``n``.
    """
    if e is None:
        return None, None
    if e.op == op:
        parts = [_moving_end(x, op, off) for x in e.args]
        if None in parts:
            return None
        pick = max if op == "maximum" else min
        both = [[x for x in pair if x is not None] for pair in zip(*parts, strict=True)]
        return tuple(pick(found) if found else None for found in both)
    if e.op == "number":
        return None, e.args[0]
    base, shift = (e.args[0], e.args[1].args[0]) if e.op == "add" and e.args[1].op == "number" else (e, 0)
    if str(base) == "i + off":
        return shift + (off or 0), None
    return (shift, None) if str(base) == "i" and off is not None else None


# -- Blocks --------------------------------------------------------------------------------------------------------


def granularity(e: Expr, name: str) -> int | None:
    """The largest g such that ``e`` depends on symbol ``name`` through ``name // g`` alone; None: not at all."""
    divisor = None
    for node in expr.nodes(e):
        for position, child in enumerate(expr.children(node)):
            if child.op == "symbol" and child.args[0] == name:
                by = node.args[1].args[0] if node.op == "floordiv" and node.args[1].op == "number" else None
                g = by if position == 0 and isinstance(by, int) and by > 0 else 1
                divisor = g if divisor is None else math.gcd(divisor, g)
    return (1 if e.args[0] == name else None) if e.op == "symbol" else divisor


def constant_on_blocks(e: Expr) -> bool:
    """Whether ``e`` has one value on blocks of more than one query and of more than one key, as a pattern of blocks has."""
    return granularity(e, "i") != 1 and granularity(e, "j") != 1
