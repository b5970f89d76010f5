"""Deal chunks of queries to ranks under any mask: equal work, equal rows, and few keys to send.

Everything here is a pure function of lengths and masks; no rank talks to another.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, cycle, pairwise

import torch
from torch import Tensor

from tilewise import expr
from tilewise.masks import Mask, as_mask, region
from tilewise.parallel import joined
from tilewise.parallel.layout import Layout, check, from_chunks
from tilewise.parallel.route import Route, key_ends
from tilewise.planning.tiles import EMPTY, Grid, TileMap

TILE = 128
"""Queries and keys of the tiles that :func:`balanced` counts: about those of the GPU kernels."""
KEY_COST = 2
"""The time to send a key, in units of the time in which a query visits one tile of keys.

It is half of what the links of H200s need for four query heads per key head and head dim 128, as about half of an exchange is hidden."""
PIECE_SHARE = 1 / 400
"""The time of one more contiguous piece (a launch and its last tiles), as a share of a rank's work."""
UNEVEN = 1.05
"""The most that a rank may compute above the mean, in order to send fewer keys."""
CELLS = 512
"""The cells of a sequence, by which the keys to send are counted."""


def balanced(
    masks: Mask | Sequence[Mask | None] | None, seqlen: int, ranks: int, *, chunks: int | None = None
) -> Layout:
    """Deal chunks of queries so that every rank visits about as many tiles under any masks, and sees mostly keys of its own.

    Args:
        masks: one mask, or those of all layers of a model with equal weight; ``None`` keeps every pair. Their tensors may lie on any
            device. If they differ by batch element or head, all of these count.
        chunks: the number of equal chunks, ``8 * ranks`` by default. More chunks balance better and cost more launches.

    Every rank gets equally many chunks, as far as they divide, and so equally many rows. Two deals are improved by swaps of two chunks
    until no swap helps: runs of neighbours, and the heaviest chunk to the least loaded rank.
    """
    check("balanced", seqlen=seqlen, ranks=ranks, chunks=1 if chunks is None else chunks)
    count = max(1, min(8 * ranks if chunks is None else chunks, seqlen))
    bounds = [seqlen * n // count for n in range(count + 1)]
    work = _Work.of(masks, seqlen, bounds, ranks)
    deals = [_improved(work, held) for held in (_by_weight(work.costs, ranks), _neighbours(count, ranks))]
    best = min(deals, key=lambda held: work.time([work.load(chunks) for chunks in held]))
    owners = {chunk: rank for rank, chunks in enumerate(best) for chunk in chunks}
    found = from_chunks([owners[n] for n in range(count)], bounds, ranks)
    routes = [_route(_grid(mask, seqlen), found) for mask in _as_masks(masks)]
    fetched, lent = (max(counts, default=0) for counts in ([x.fetched for x in routes], [x.lent for x in routes]))
    return replace(found, fetched=fetched, lent=lent)


def _route(grid: Grid, layout: Layout) -> Route:
    """Return the keys that are sent under one mask, with a rank's queries joined to one call if possible."""
    ends = key_ends(grid, layout.seqlen)
    return joined.route_of(*ends, layout, layout) or Route.of(*ends, layout, layout)


@dataclass(frozen=True)
class _Load:
    """A rank's part: visits of key tiles, the keys of other ranks that its queries see, and contiguous pieces."""

    visits: float
    fetched: int
    pieces: int


@dataclass(frozen=True)
class _Work:
    """The chunks to deal: the cost of each, and the cells of the sequence that it covers and sees, as bits of an integer."""

    costs: list[int]
    covers: list[int]
    sees: list[int]
    cell: int
    mean: float

    @staticmethod
    def of(masks: Mask | Sequence[Mask | None] | None, seqlen: int, bounds: Sequence[int], ranks: int) -> _Work:
        cell = max(1, -(-seqlen // CELLS))
        costs = chunk_costs(masks, seqlen, bounds)
        covers = [_cells(start, stop, cell) for start, stop in pairwise(bounds)]
        sees = [0] * len(costs)
        for mask in _as_masks(masks):
            low, high = key_ends(_grid(mask, seqlen), seqlen)
            for n, (start, stop) in enumerate(pairwise(bounds)):
                if start < stop:
                    sees[n] |= _cells(int(low[start:stop].amin()), int(high[start:stop].amax()), cell)
        return _Work(costs, covers, sees, cell, max(sum(costs) / ranks, 1.0))

    def load(self, held: frozenset[int]) -> _Load:
        covered = seen = 0
        for n in held:
            covered |= self.covers[n]
            seen |= self.sees[n]
        fetched = (seen & ~covered).bit_count() * self.cell
        return _Load(sum(self.costs[n] for n in held), fetched, sum(n - 1 not in held for n in held))

    def time(self, loads: Sequence[_Load]) -> float:
        """Return the time of the slowest rank, in visits of a tile by a query."""
        most = max(load.visits for load in loads)
        excess = 10 * max(0.0, most - UNEVEN * self.mean)
        fetched = max(load.fetched for load in loads) + sum(load.fetched for load in loads) / (4 * len(loads))
        pieces = sum(load.pieces for load in loads) / len(loads)
        return most + excess + KEY_COST * fetched + PIECE_SHARE * self.mean * pieces

    def alike(self, one: int, other: int) -> bool:
        return self.costs[one] == self.costs[other] and self.sees[one] == self.sees[other]


def _cells(start: int, stop: int, cell: int) -> int:
    """Return the cells that touch positions ``start`` to ``stop``, as bits."""
    if start >= stop:
        return 0
    return (1 << -(-stop // cell)) - (1 << start // cell)


def _by_weight(costs: Sequence[int], ranks: int) -> list[frozenset[int]]:
    """Deal the heaviest chunk to the least loaded rank with room, then the next."""
    room = [-(-len(costs) // ranks)] * ranks
    held: list[set[int]] = [set() for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for n in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        load, rank = heapq.heappop(heap)
        held[rank].add(n)
        if len(held[rank]) < room[rank]:
            heapq.heappush(heap, (load + costs[n], rank))
    return list(map(frozenset, held))


def _neighbours(count: int, ranks: int) -> list[frozenset[int]]:
    """Deal runs of neighbouring chunks."""
    return [frozenset(range(count * rank // ranks, count * (rank + 1) // ranks)) for rank in range(ranks)]


def _improved(work: _Work, held: list[frozenset[int]]) -> list[frozenset[int]]:
    """Improve a deal by swaps of two chunks until no swap makes it faster."""
    held = list(held)
    owners = [rank for _, rank in sorted((n, rank) for rank, chunks in enumerate(held) for n in chunks)]
    loads = [work.load(chunks) for chunks in held]
    time, since = work.time(loads), 0
    pairs = [(one, other) for one, other in combinations(range(len(owners)), 2) if not work.alike(one, other)]
    for one, other in cycle(pairs):
        since += 1
        a, b = owners[one], owners[other]
        if a != b:
            swapped = {a: held[a] - {one} | {other}, b: held[b] - {other} | {one}}
            found = [work.load(swapped[rank]) if rank in swapped else load for rank, load in enumerate(loads)]
            if (better := work.time(found)) < time * (1 - 1e-9):
                time, loads, since = better, found, 0
                held[a], held[b], owners[one], owners[other] = swapped[a], swapped[b], b, a
        if since == len(pairs):
            break
    return held


# -- The work of masks ---------------------------------------------------------------------------------------------


def chunk_costs(masks: Mask | Sequence[Mask | None] | None, seqlen: int, bounds: Sequence[int]) -> list[int]:
    """Return the visited tiles of the queries ``bounds[n]`` to ``bounds[n + 1]``, for each n.

    They are the mean over heads and batch elements, summed over masks. A tile in two chunks counts in each by its rows there.
    """
    rows = torch.zeros(seqlen, dtype=torch.float64)
    for mask in _as_masks(masks):
        rows += _row_costs(mask, seqlen)
    total = torch.cat([torch.zeros(1, dtype=torch.float64), rows.cumsum(0)])
    return [round(float(total[b] - total[a])) for a, b in pairwise(bounds)]


def tile_shares(mask: Mask, layout: Layout) -> tuple[float, ...]:
    """Return the share of all visited tiles on each rank."""
    bounds = sorted({end for held in layout.pieces for piece in held for end in piece})
    costs = dict(zip(bounds, chunk_costs(mask, layout.seqlen, bounds), strict=False))
    loads = [sum(costs[start] for start, _ in held) for held in layout.pieces]
    return tuple(load / max(sum(loads), 1) for load in loads)


def _as_masks(masks: Mask | Sequence[Mask | None] | None) -> list[Mask]:
    return [as_mask(mask) for mask in (masks if isinstance(masks, Sequence) else [masks])]


def _row_costs(mask: Mask, seqlen: int) -> Tensor:
    """Return the key tiles that each query's tile visits: float64 ``(seqlen,)``, the mean over heads and batch elements."""
    status = TileMap.build(_grid(mask, seqlen), TILE, TILE).status
    visits = (status != EMPTY).double().sum(-1).flatten(0, 1).mean(0)
    return visits.repeat_interleave(TILE)[:seqlen]


def _grid(mask: Mask, seqlen: int) -> Grid:
    """Return the grid of a square mask, with as many heads and batch elements as its tensors distinguish."""
    leaves = [leaf.cpu() for leaf in mask.leaves]
    kept = region(mask.text, tuple(range(len(leaves))))
    sizes = {"b": 1, "h": 1}
    for read in expr.lookups(*kept.parts):
        for index, size in zip(expr.indices(read), leaves[read.args[0][1]].shape, strict=False):
            if index.op == "symbol" and index.args[0] in sizes:
                sizes[index.args[0]] = max(sizes[index.args[0]], size)
    return Grid.whole(kept, leaves, (sizes["b"], sizes["h"], seqlen, seqlen), torch.device("cpu"))
