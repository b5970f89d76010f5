"""The portions in which a backward that keeps dS is launched: so many heads and keys at a time that their sheet takes a bounded room.

A portion is a launch of the same kernels on views of the call's tensors: some batch elements; or some key heads of one, and of these all
keys or some. All portions use one sheet, and kernels wait for those of the portion before; dQ of the keys of earlier ones stays in fp32.
Which keys a portion has depends on one sequence alone, so that no number depends on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tilewise.backends.hopper.backward.config import SHEET_ROOM, Backward, sheet_bytes
from tilewise.backends.hopper.backward.tiles import SHEET_BLOCK, SHEET_KEYS
from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.host.driver import Bound
from tilewise.backends.hopper.kit import schedule
from tilewise.caching import cached_property
from tilewise.problem import Problem

# In units of what the pass over keys takes for a block of 64 x 64: a block of the pass over queries, and start and end of a portion;
# and in blocks of the pass over queries what a tile takes to read its sums, or to write them.
SHEET_COST, START_COST, SUMS_COST = 0.5, 6.0, 4.0

Span = tuple[int, int]  # [start, stop)


class Portion(NamedTuple):
    """Some batch elements, some key heads of each, and some of the keys that the launch has."""

    batch: Span
    heads: Span
    keys: Span

    def size(self, name: str) -> int:
        """How many batch elements, heads or keys it has."""
        start, stop = getattr(self, name)
        return stop - start

    def of(self, x: Tensor, heads_k: int, keys: bool = False) -> Tensor:
        """The view of a tensor (batch, seqlen, heads, head_dim) or (batch, heads, rows), of key or query heads; ``keys``: its rows are
        those of keys."""
        dim = 2 if x.ndim == 4 else 1
        group = x.shape[dim] // heads_k
        found = x[slice(*self.batch)].narrow(dim, self.heads[0] * group, self.size("heads") * group)
        return found[:, slice(*self.keys)] if keys else found


@dataclass(frozen=True)
class Portions:
    """The portions of a launch with so many keys of a problem, on a device with so many multiprocessors.

    Attributes:
        ends: lo and hi of the band, as kernels take them, counted from the launch's first key.
    """

    problem: Problem
    config: Backward
    seqlen_k: int
    ends: tuple[int, int]
    cores: int

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.problem.heads_q // self.problem.heads_k

    @property
    def blocks(self) -> tuple[int, int]:
        """How many blocks of keys and of queries a head's sheet has."""
        return -(-self.seqlen_k // SHEET_KEYS), self.config.queries.blocks(self.problem.seqlen_q)

    @cached_property
    def all(self) -> list[Portion]:
        """The portions, in the order in which they are launched: of each head its first keys first."""
        batch, heads, keys = self.sizes
        return [
            Portion(elements, part, tuple(min(SHEET_KEYS * n, self.seqlen_k) for n in blocks))
            for elements in evenly(self.problem.batch, batch)
            for part in evenly(self.problem.heads_k, heads)
            for blocks in evenly(self.blocks[0], keys)
        ]

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """How many batch elements, key heads and blocks of keys a portion has at most."""
        heads, keys = self.problem.heads_k, self.blocks[0]
        # Of tiles of keys: as many as the room holds, or one for each CTA.
        room = SHEET_ROOM // sheet_bytes(self.config.queries, self.problem)
        room = max(room, self.cores // self.config.keys.ctas)
        if room >= keys * heads:
            return room // (keys * heads), heads, keys
        counts = (min(1 << n, heads, room) for n in range(heads.bit_length() + 1))
        choices = [(1, n, min(keys, room // n)) for n in dict.fromkeys(counts)]
        return min(choices, key=lambda sizes: self.cost(*sizes[1:]))

    def cost(self, heads: int, keys: int) -> float:
        """The time that one sequence takes in portions of so many heads and blocks of keys at most, in blocks of 64 x 64 of a CTA."""
        spans, tiles = evenly(self.blocks[0], keys), self.config.queries
        rows = [[max(0, min(stop, b) - max(start, a)) for start, stop in self.seen] for a, b in spans]
        sums, total = SUMS_COST * 2 * (len(spans) > 1), 0.0
        for part in evenly(self.problem.heads_k, heads):
            count = part[1] - part[0]
            for (a, b), lengths in zip(spans, rows, strict=True):
                total += span_of_work(self.visits[a:b], count, self.cores // self.config.keys.ctas, self.group)
                total += START_COST
                more = [sums + length for length in lengths]
                total += SHEET_COST * span_of_work(more, count * self.group * tiles.parts, self.cores)
        return total

    @cached_property
    def band(self) -> schedule.Band:
        return schedule.Band(*self.ends, self.seqlen_k)

    @cached_property
    def visits(self) -> list[int]:
        """How many blocks of queries each block of keys visits."""
        first = (SHEET_KEYS * n for n in range(self.blocks[0]))
        found = (schedule.query_blocks(n, SHEET_KEYS, ROWS, self.problem.seqlen_q, self.band) for n in first)
        return [stop - start for start, stop in found]

    @cached_property
    def seen(self) -> list[Span]:
        """The blocks of keys that each tile of queries sees."""
        rows, count = self.config.queries.tile_m, self.blocks[1] // self.config.queries.warpgroups
        return [schedule.seen_blocks(rows * n, rows, SHEET_KEYS, self.band) for n in range(count)]

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the sheet, and of dQ's sums in fp32, of the largest portion; of the latter as little as may be where no portion has
        sums of another."""
        tiles, (keys, queries) = self.config.queries, self.blocks
        batch, heads, most = (max(portion.size(name) for portion in self.all) for name in Portion._fields)
        heads_q = batch * heads * self.group
        continued = most < self.seqlen_k
        rows = queries // tiles.warpgroups if continued else 1
        sums = heads_q if continued else 1, rows, tiles.parts * tiles.warpgroups, ROWS * tiles.width
        return (heads_q, min(keys, -(-most // SHEET_KEYS)), queries, SHEET_BLOCK), sums

    def tensors(self, portion: Portion, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The views that a portion has of a launch's tensors: q, k, v, o, do, lse, dlse, dq, dk, dv, lse2, delta, sheet, sums."""
        *others, sheet, sums = tensors
        of_keys, heads_k = (1, 2, 8, 9), self.problem.heads_k
        found = [portion.of(x, heads_k, n in of_keys) for n, x in enumerate(others)]
        return [*found, sheet, sums]

    def neighbours(self, portion: Portion) -> tuple[bool, bool]:
        """Whether earlier keys have left sums of dQ, and whether later keys follow."""
        return portion.keys[0] > 0, portion.keys[1] < self.seqlen_k


def span_of_work(lengths: Sequence[int], copies: int, workers: int, each: int = 1) -> float:
    """The time in which so many workers do tiles of these lengths, ``copies`` of each, dealt out longest first."""
    longest, count = max(lengths, default=0), copies * len(lengths)
    even = min(lengths, default=0) == longest
    return each * (longest * -(-count // workers) if even else max(longest, copies * sum(lengths) / workers))


def evenly(count: int, most: int) -> list[Span]:
    """The spans of at most ``most`` into which so many are cut, as equal as may be."""
    parts = -(-count // most)
    ends = [count * n // parts for n in range(parts + 1)]
    return [(ends[n], ends[n + 1]) for n in range(parts)]


class InPortions:
    """A launch in portions. Called with all tensors of a launch, in its order."""

    def __init__(self, bound: Sequence[Bound], portions: Portions):
        self.bound, self.portions = bound, portions

    def __call__(self, *tensors: Tensor) -> None:
        for bound, portion in zip(self.bound, self.portions.all, strict=True):
            bound(*self.portions.tensors(portion, tensors))
