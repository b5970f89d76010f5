"""The keys that ranks exchange: a rank receives the keys of other ranks that its queries see.

Everything here is a pure function of layouts and of the keys that each piece of queries sees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.caching import cached_property
from tilewise.parallel.layout import Layout, joined
from tilewise.planning.tiles import Grid

Interval = tuple[int, int]


ALIGNED = 16
"""Parts begin at multiples of this if possible, because dropout's counters serve so many rows and keys at once."""
WORTH_A_PART = 128
"""The fewest rows of a part that justify a call of their own: a tile."""


class Part(NamedTuple):
    """The queries ``[start, stop)``, a rank's rows from ``row`` on, and the keys ``[low, high)`` that cover what they see."""

    start: int
    stop: int
    row: int
    low: int
    high: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.stop - self.start)


class Segment(NamedTuple):
    """The keys ``[start, stop)``, the owner's rows from ``row`` on."""

    start: int
    stop: int
    owner: int
    row: int

    @property
    def rows(self) -> slice:
        """The owner's rows."""
        return slice(self.row, self.row + self.stop - self.start)

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def run(self) -> tuple[int, int]:
        """The first of the owner's rows, and their number."""
        return self.row, self.length


@dataclass(frozen=True)
class Route:
    """The keys that ranks fetch from each other for one attention.

    Attributes:
        keys: the layout of the keys.
        parts: the queries, by rank: contiguous pieces, cut so that the keys of a part lie in one run of the rank's own if possible.
        joined: a rank computes all of its queries in one call (:mod:`tilewise.parallel.joined`), and no part is near.
    """

    keys: Layout
    parts: tuple[tuple[Part, ...], ...]
    joined: bool = False

    @staticmethod
    def of(low: Tensor, high: Tensor, queries: Layout, keys: Layout) -> Route:
        """Return the route of a whole attention from its :func:`key_ends`."""
        return Route(keys, _parts(low, high, queries, keys))

    def near(self, rank: int, part: Part) -> Segment | None:
        """Return the rank's own keys of a part if they all lie in one run of it, else None."""
        runs = () if self.joined else held(self.keys)
        found = [x for x in runs if x.owner == rank and x.start <= part.low and part.high <= x.stop]
        return cut(found[0], part.low, part.high) if found else None

    @cached_property
    def wanted(self) -> tuple[tuple[Interval, ...], ...]:
        """The keys that a rank assembles from its own and others', by rank: disjoint intervals, in order."""
        far = ([x for x in parts if self.near(rank, x) is None] for rank, parts in enumerate(self.parts))
        return tuple(tuple(joined((x.low, x.high) for x in parts)) for parts in far)

    def place(self, rank: int, part: Part) -> slice:
        """Return the place of a far part's keys among the assembled ones."""
        first = 0
        for start, stop in self.wanted[rank]:
            if start <= part.low and part.high <= stop:
                return slice(first + part.low - start, first + part.high - start)
            first += stop - start
        raise ValueError(f"{part} sees keys that rank {rank} does not put together")

    def segments(self, rank: int) -> list[Segment]:
        """Return the keys that a rank assembles, in the order of positions."""
        return [
            cut(x, start, stop)
            for start, stop in self.wanted[rank]
            for x in held(self.keys)
            if max(x.start, start) < min(x.stop, stop)
        ]

    def sent(self, owner: int, rank: int) -> list[Segment]:
        """Return the keys that a rank fetches from another, in the order of positions; none from itself."""
        return [x for x in self.segments(rank) if x.owner == owner != rank]

    @cached_property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """The number of sent keys, by owner and by receiving rank."""
        ranks = range(self.keys.ranks)
        return tuple(tuple(sum(x.length for x in self.sent(owner, rank)) for rank in ranks) for owner in ranks)

    @cached_property
    def fetched(self) -> int:
        """The most keys that one rank fetches."""
        return max(map(sum, zip(*self.counts, strict=True)))

    @cached_property
    def lent(self) -> int:
        """The most keys that others fetch from one rank, counted for each of them; their gradients come back."""
        return max(map(sum, self.counts))

    @cached_property
    def digest(self) -> int:
        """Return a number that differs if routes differ. Ranks with other tensors would wait forever for keys."""
        return int.from_bytes(hashlib.sha256(repr((self.joined, self.parts)).encode()).digest()[:7])


@lru_cache(maxsize=64)
def held(keys: Layout) -> tuple[Segment, ...]:
    """Return all keys in the order of positions, as runs of one rank."""
    runs = [Segment(start, stop, rank, row) for rank in range(keys.ranks) for start, stop, row in keys.rows(rank)]
    return tuple(sorted(runs))


def key_ends(grid: Grid, seqlen: int) -> tuple[Tensor, Tensor]:
    """Return the first key, and one past the last, that each query may see in any head and batch element: int64 ``(seqlen,)`` on the host.

    A query that sees none has all keys before the first, and none before the last.
    """
    low, high = grid.key_interval(torch.arange(seqlen, device=grid.b.device))
    sees = low < high
    return torch.where(sees, low, grid.keys).amin((0, 1)).cpu(), torch.where(sees, high, 0).amax((0, 1)).cpu()


def _parts(low: Tensor, high: Tensor, queries: Layout, keys: Layout) -> tuple[tuple[Part, ...], ...]:
    """Return the parts of every rank, cut at the queries that begin or cease to see keys of one own run alone.

    Keys at both ends that no query sees are left out, but each part has at least one key.
    """
    found = []
    for rank in range(queries.ranks):
        own = [x for x in held(keys) if x.owner == rank]
        parts: list[Part] = []
        for start, stop, row in queries.rows(rank):
            cuts = [start, *_near_rows(low[start:stop], high[start:stop], start, own), stop]
            parts += [
                _part(a, b, row + a - start, low[a:b], high[a:b], own, keys.seqlen) for a, b in pairwise(cuts) if a < b
            ]
        found.append(tuple(parts))
    return tuple(found)


def _near_rows(low: Tensor, high: Tensor, start: int, own: Sequence[Segment]) -> list[int]:
    """Return the first query, and one past the last, of the longest run with all keys in one own run, if that justifies a call.

    Ends of keys never decrease with the query, so such queries are neighbours.
    """
    found: list[int] = []
    for x in own:
        near = ((low >= x.start) & (high <= x.stop) | (low >= high)).nonzero().flatten()
        if not len(near) or int(near[-1] - near[0]) + 1 != len(near):
            continue
        first, last = start + int(near[0]), start + int(near[-1]) + 1
        first, last = first if first == start else -(-first // ALIGNED) * ALIGNED, last
        last = last if last == start + len(low) else last // ALIGNED * ALIGNED
        if last - first >= WORTH_A_PART and (not found or last - first > found[1] - found[0]):
            found = [first, last]
    return found


def _part(start: int, stop: int, row: int, low: Tensor, high: Tensor, own: Sequence[Segment], keys: int) -> Part:
    first, last = int(low.amin()), int(high.amax())
    if first >= last:
        return Part(start, stop, row, 0, min(1, keys))
    run = max((x.start for x in own if x.start <= first and last <= x.stop), default=0)
    return Part(start, stop, row, max(first // ALIGNED * ALIGNED, run), last)


def cut(x: Segment, start: int, stop: int) -> Segment:
    """Return the part of a segment within an interval."""
    first, last = max(x.start, start), min(x.stop, stop)
    return Segment(first, last, x.owner, x.row + first - x.start)
