"""Facts about a mask that kernels need, decided once for all backends.

The host computes them from the mask's :class:`tilewise.masks.regions.Region` and the lengths of the sequences, and never reads a
tensor. A fact that depends on a tensor's values counts as unknown, which is always safe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import expr, sizes
from tilewise.expr import Expr
from tilewise.masks.regions import ALWAYS, SQUARE, Region

# -- Which keys are seen -------------------------------------------------------------------------------------------


def every_key_seen(region: Region, seqlen_q: int, seqlen_k: int) -> bool:
    """Return whether every key is certain to be seen by some query, in every batch element and head."""
    kept = region.where_diagonal
    if region.covers or (kept == ALWAYS and seqlen_q >= seqlen_k) or (kept == SQUARE and seqlen_q == seqlen_k):
        return True
    band = as_band(region, seqlen_k - seqlen_q, seqlen_k)
    if band is None and not _of_shapes(region):
        return False
    if band is None:
        return _every_key_seen(region, int(seqlen_q), int(seqlen_k))
    # Each row sees one key further than the row before.
    cut = band.cut(seqlen_q)
    return seqlen_k == 0 or (seqlen_q > 0 and not band.empty and (cut.start, cut.stop) == (0, seqlen_k))


@lru_cache(maxsize=4096)
def _every_key_seen(region: Region, seqlen_q: int, seqlen_k: int) -> bool:
    """:func:`every_key_seen` for masks that are no bands."""
    if seqlen_q >= seqlen_k and _diagonal_kept(region, seqlen_q, seqlen_k):
        return True
    interval = queries_of_keys(region, seqlen_q, seqlen_k)
    return interval is not None and bool((interval[0].clamp(min=0) < interval[1].clamp(max=seqlen_q)).all())


def queries_of_keys(region: Region, seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor] | None:
    """Return the queries ``[first, last)`` of every key, unclamped: int64 (seqlen_k,).

    Return None if heads or batch elements differ, or if a predicate or a tensor decides."""
    first, last = region.first, region.last
    if region.predicate is not None or not _follows_from_shapes(*[e for e in (first, last) if e is not None]):
        return None
    keys = torch.arange(seqlen_k, device="cpu")
    starts = torch.zeros_like(keys) if first is None else _evaluated(first, seqlen_q, seqlen_k, j=keys)
    ends = torch.full_like(keys, seqlen_q) if last is None else _evaluated(last, seqlen_q, seqlen_k, j=keys)
    return starts.expand_as(keys), ends.expand_as(keys)


def _follows_from_shapes(*parts: Expr) -> bool:
    """Return whether the parts of a mask are equal in all batch elements and heads, and read no tensor."""
    return not expr.lookups(*parts) and not expr.depends_on(*parts) & {"b", "h"}


@lru_cache(maxsize=4096)
def _of_shapes(region: Region) -> bool:
    """Return whether a mask follows from the shapes alone, and is equal in all batch elements and heads."""
    return _follows_from_shapes(*region.parts)


def _diagonal_kept(region: Region, seqlen_q: int, seqlen_k: int) -> bool:
    """Return whether the query at its own position, ``i = j - off``, sees each key. There must be at least as many queries as keys."""
    if not _of_shapes(region):
        return False
    j = torch.arange(seqlen_k, device="cpu")  # whatever device is the default
    return bool(_evaluated(region.inside, seqlen_q, seqlen_k, i=j - (seqlen_k - seqlen_q), j=j).all())


def _evaluated(e: Expr, seqlen_q: int, seqlen_k: int, **lines: Tensor) -> Tensor:
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "off": seqlen_k - seqlen_q}
    env = {name: torch.tensor(size, device="cpu") for name, size in sizes.items()} | lines
    return expr.evaluate([e], env, [], torch.float32)[0]


# -- Bands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """The keys of row i: ``i + lo <= j < i + hi`` and ``start <= j < stop``. None as a moving end means unbounded."""

    lo: int | None
    hi: int | None
    start: int
    stop: int

    @property
    def form(self) -> str:
        return "full" if self.lo is None and self.hi is None else "upper" if self.lo is None else "band"

    @property
    def empty(self) -> bool:
        """Whether no row can see a key."""
        return self.lo is not None and self.hi is not None and self.lo >= self.hi

    def cut(self, seqlen_q: int) -> Band:
        """Return the same band with the narrowest ``start`` and ``stop``: some row sees the first key, and some row sees the last.

        A kernel that gets K and V from ``start`` to ``stop`` alone never meets a key that no query sees. Moving ends that no longer cut
        a row are dropped; a single query has none.
        """
        start = self.start if self.lo is None else sizes.larger(self.start, self.lo)
        stop = self.stop if self.hi is None else sizes.smaller(self.stop, seqlen_q - 1 + self.hi)
        lo = None if self.lo is None or seqlen_q - 1 + self.lo <= start else self.lo
        hi = None if self.hi is None or self.hi >= stop else self.hi
        return Band(lo, hi, start, sizes.larger(start, stop))


def as_band(region: Region, off: int | None, seqlen_k: int) -> Band | None:
    """Return the mask as a band of numbers, or ``None`` if it is none.

    Args:
        off: ``seqlen_k - seqlen_q``, or None if each packed sequence adds its own.
    """
    lo, hi = _moving_end(region.lo, "maximum", off), _moving_end(region.hi, "minimum", off)
    if region.predicate is not None or lo is None or hi is None:
        return None
    start = max(0, 0 if lo[1] is None else lo[1])
    stop = seqlen_k if hi[1] is None else sizes.smaller(seqlen_k, hi[1])
    return Band(lo[0], hi[0], start, sizes.larger(start, stop))


def kept_pairs(region: Region, seqlen_q: int, seqlen_k: int) -> int | None:
    """Return the number of pairs of a head that a mask keeps.

    Return None if heads or batch elements differ, or if a predicate or a tensor decides."""
    band = as_band(region, seqlen_k - seqlen_q, seqlen_k)
    if band is None:
        queries = queries_of_keys(region, seqlen_q, seqlen_k)
        return (
            None if queries is None else int((queries[1].clamp(max=seqlen_q) - queries[0].clamp(min=0)).clamp(0).sum())
        )
    if band.empty:
        return 0
    starts = seqlen_q * band.start if band.lo is None else _sum_of_ends(band, band.lo, seqlen_q)
    ends = seqlen_q * band.stop if band.hi is None else _sum_of_ends(band, band.hi, seqlen_q)
    return ends - starts


def _sum_of_ends(band: Band, moving: int, seqlen_q: int) -> int:
    """Return the sum over rows of ``i + moving``, clamped to ``start ... stop``."""
    first, last = (min(max(end - moving, 0), seqlen_q) for end in (band.start, band.stop))  # rows between the two ends
    return first * band.start + (last - first) * (first + last - 1 + 2 * moving) // 2 + (seqlen_q - last) * band.stop


_MovingEnd = tuple[int | None, int | None]


def _moving_end(end: Expr | None, op: str, off: int | None) -> _MovingEnd | None:
    """Return ``(m, n)`` of an end ``op(i + m, n)``, in which either may be absent, or None if the end has another form.

    If ``off`` is None, the end is ``op(i + off + m, n)``.
    """
    pick = max if op == "maximum" else min

    def found(e: Expr, parts: list[_MovingEnd | None]) -> _MovingEnd | None:
        if e.op != op:
            return _moving_term(e, off)
        if None in parts:
            return None
        both = [[x for x in pair if x is not None] for pair in zip(*parts, strict=True)]
        return tuple(pick(some) if some else None for some in both)

    return (None, None) if end is None else expr.fold(end, found, lambda e: e.args if e.op == op else ())


def _moving_term(e: Expr, off: int | None) -> _MovingEnd | None:
    """:func:`_moving_end` for an end ``i + m`` or ``n``."""
    if e.op == "number":
        return None, e.args[0]
    base, shift = (e.args[0], e.args[1].args[0]) if e.op == "add" and e.args[1].op == "number" else (e, 0)
    if expr.same(base, _AT_ROW):
        return shift + (off or 0), None
    return (shift, None) if expr.same(base, _I) and off is not None else None


_I = expr.symbol("i")
_AT_ROW = _I + expr.symbol("off")


# -- Blocks --------------------------------------------------------------------------------------------------------


def granularity(e: Expr, name: str) -> int | None:
    """Return the largest g such that ``e`` depends on symbol ``name`` through ``name // g`` alone, or None if it does not depend on it."""
    divisor = None
    for node in expr.nodes(e):
        for position, child in enumerate(expr.children(node)):
            if child.op == "symbol" and child.args[0] == name:
                by = node.args[1].args[0] if node.op == "floordiv" and node.args[1].op == "number" else None
                g = by if position == 0 and isinstance(by, int) and by > 0 else 1
                divisor = g if divisor is None else math.gcd(divisor, g)
    return (1 if e.args[0] == name else None) if e.op == "symbol" else divisor


@lru_cache(maxsize=1024)
def heads_alike(region: Region) -> int:
    """Return how many query heads side by side see the same pairs, where the mask knows a head by its number over so many; 1 if it does
    not depend on heads."""
    found = [granularity(e, "h") for e in region.parts]
    return math.gcd(*[n for n in found if n is not None]) or 1


def blocks_of(e: Expr) -> tuple[int, int]:
    """Return the queries and keys of the blocks on which ``e`` is constant; 0 where it does not depend on that index."""
    return granularity(e, "i") or 0, granularity(e, "j") or 0


def constant_on_blocks(e: Expr) -> bool:
    """Return whether ``e`` is constant on blocks of several queries by several keys, as a pattern of blocks is."""
    return 1 not in blocks_of(e)


# -- Predicates that rise or fall ----------------------------------------------------------------------------------


class Condition(NamedTuple):
    """A part of a predicate that changes at most once along every row and every column.

    Attributes:
        holds: the condition, bool.
        by_i, by_j: 1 if it can only become true as i (or j) grows, -1 if it can only become false, 0 if i (or j) does not matter.
    """

    holds: Expr
    by_i: int
    by_j: int


MOST_TERMS = 16  # beyond it the pairs are evaluated one by one


@lru_cache(maxsize=4096)
def monotone_terms(region: Region) -> tuple[tuple[Condition, ...], ...] | None:
    """Return the region's predicate as "one of these terms holds", a term as "all of its conditions hold", or None.

    ``i // 1024 >= j // 1024`` is one term of one condition. A union of two intervals of keys is two terms of two conditions. In this
    form the corners of a tile decide about it (:func:`tilewise.planning.tiles.TileMap.build`), however many pairs it has.
    """
    return _terms(region.predicate, region.sorted_leaves)


@lru_cache(maxsize=4096)
def conditions(predicate: Expr, sorted_leaves: frozenset[int]) -> dict[int, Condition]:
    """Return a predicate's parts that are one condition, by the identity of their nodes. Parts that are not monotonic are left out."""
    slopes: dict[int, _Slope | None] = {}
    for e in expr.nodes(predicate):
        slopes[id(e)] = _slope_of(e, [slopes[id(x)] for x in expr.children(e)], sorted_leaves)
    moving = [(e, slopes[id(e)]) for e in expr.nodes(predicate)]
    return {id(e): Condition(e, slope.by_i, slope.by_j) for e, slope in moving if slope is not None}


def joined(known: dict[int, Condition], e: Expr) -> Sequence[Expr]:
    """Return the parts that ``&`` or ``|`` joins in a part, or nothing for any other part."""
    return e.args if id(e) not in known and e.op in ("or", "and") and expr.kind(e) == "bool" else ()


def _terms(predicate: Expr, sorted_leaves: frozenset[int]) -> tuple[tuple[Condition, ...], ...] | None:
    known = conditions(predicate, sorted_leaves)

    def terms(e: Expr, parts: list) -> tuple[tuple[Condition, ...], ...] | None:
        if id(e) in known:
            return ((known[id(e)],),)
        if not parts or None in parts:
            return None
        left, right = parts
        some = left + right if e.op == "or" else tuple(a + b for a, b in product(left, right))
        return some if len(some) <= MOST_TERMS else None

    return expr.fold(predicate, terms, partial(joined, known))


class _Slope(NamedTuple):
    """How a value moves with i and with j: 1 never falls, -1 never rises, 0 stays.

    Its absolute value is below 2**bits, and it is at least ``least``."""

    by_i: int
    by_j: int
    bits: int
    least: float = -math.inf


_MOVES: dict[str, tuple[int, ...]] = {
    "add": (1, 1), "sub": (1, -1), "neg": (-1,), "maximum": (1, 1), "minimum": (1, 1), "clamp_min": (1, 1), "clamp_max": (1, 1),
    "lt": (-1, 1), "le": (-1, 1), "gt": (1, -1), "ge": (1, -1), "and": (1, 1), "or": (1, 1), "not": (-1,),
    "floor": (1,), "ceil": (1,), "round": (1,), "trunc": (1,), "float": (1,), "relu": (1,),
}  # fmt: skip
"""Whether an operation's value rises (1) or falls (-1) as each argument grows. Rounding to fp32 keeps the order."""

_INDEX_BITS, _WORD_BITS = (
    31,
    62,
)  # of an index, a length or a sorted leaf's element; an int64 holds it, so nothing wraps around


def _slope_of(e: Expr, inner: list[_Slope | None], sorted_leaves: frozenset[int]) -> _Slope | None:
    if e.op == "number":
        size = abs(int(e.args[0])).bit_length() if math.isfinite(e.args[0]) else _WORD_BITS
        return _Slope(0, 0, size, e.args[0])
    if e.op == "symbol":
        name = e.args[0]
        return _Slope(int(name == "i"), int(name == "j"), _INDEX_BITS, -math.inf if name == "off" else 0)
    if None in inner:
        return None
    if e.op == "lookup" and e.args[0][1] in sorted_leaves and not any(x.by_i or x.by_j for x in inner[:-1]):
        return _Slope(inner[-1].by_i, inner[-1].by_j, _INDEX_BITS, 0)  # an index out of range is clamped
    if all(x.by_i == x.by_j == 0 for x in inner):
        return _Slope(0, 0, _WORD_BITS)  # a value that moves with neither may be anything, also an element of a tensor
    moves = _moves(e, inner)
    if moves is None:
        return None
    bits = sum(x.bits for x in inner) if e.op == "mul" else max(x.bits for x in inner) + 1
    by_i, by_j = (_together(m * x[axis] for m, x in zip(moves, inner, strict=True)) for axis in (0, 1))
    wraps = expr.kind(e) == "int" and bits > _WORD_BITS
    return None if by_i is None or by_j is None or wraps else _Slope(by_i, by_j, bits)


def _moves(e: Expr, inner: list[_Slope]) -> tuple[int, ...] | None:
    """Return :data:`_MOVES` of a node, also if its arguments decide it, or None if it may turn back."""
    kinds = {expr.kind(x) for x in e.args if isinstance(x, Expr)}
    if e.op in ("and", "or", "not"):
        return _MOVES[e.op] if kinds == {"bool"} else None
    if e.op == "where":  # from a smaller to a larger number, as the condition becomes true
        above = e.args[2].op == "number" and inner[1].least >= e.args[2].args[0]
        return (1, 1, 1) if above else None
    if e.op in ("mul", "div", "floordiv"):
        for place in (1, 0) if e.op == "mul" else (1,):
            by = e.args[place].args[0] if e.args[place].op == "number" else 0
            if math.isfinite(by) and by > 0 and (e.op != "floordiv" or kinds == {"int"}):
                return (1, 0) if place else (0, 1)
        return None
    return _MOVES.get(e.op)


def _together(moves: Iterable[int]) -> int | None:
    """Return the direction of a sum of moves, or None if they oppose each other."""
    signs = {m for m in moves if m}
    return None if len(signs) > 1 else signs.pop() if signs else 0
