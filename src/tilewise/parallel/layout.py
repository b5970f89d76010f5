"""Who holds which positions of a sequence: contiguous pieces, dealt to ranks so that their work is equal.

Everything here is a pure function of lengths and masks; no rank talks to another.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tilewise import expr
from tilewise.caching import cached_property
from tilewise.masks import Mask, as_mask, region
from tilewise.tiles import EMPTY, Grid, TileMap

TILE = 128
"""Queries and keys of the tiles that :func:`balanced` counts: about those of the GPU kernels."""


@dataclass(frozen=True)
class Layout:
    """The pieces ``[start, stop)`` of a sequence that each rank holds, in the order in which its tensors hold them.

    Every position belongs to one piece of one rank. A rank may hold nothing.
    """

    pieces: tuple[tuple[tuple[int, int], ...], ...]

    def __post_init__(self):
        ends = [0, *[stop for _, stop in self._in_order]]
        starts = [start for start, _ in self._in_order]
        if starts != ends[:-1] or any(a >= b for a, b in self._in_order):
            raise ValueError(f"the pieces of a layout must cover 0 to the sequence's length once, got {self.pieces}")

    @property
    def _in_order(self) -> list[tuple[int, int]]:
        return sorted(piece for held in self.pieces for piece in held)

    @property
    def ranks(self) -> int:
        return len(self.pieces)

    @cached_property
    def seqlen(self) -> int:
        """The length of the whole sequence."""
        return sum(self.lengths)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many positions each rank holds."""
        return tuple(sum(stop - start for start, stop in held) for held in self.pieces)

    @cached_property
    def in_order(self) -> bool:
        """Whether the ranks' rows, one rank after the other, are in the order of positions."""
        return [piece for held in self.pieces for piece in held] == self._in_order

    def rows(self, rank: int) -> list[tuple[int, int, int]]:
        """``(start, stop, first)`` of each piece of a rank: its positions, and the rank's row that holds the first of them."""
        lengths = [stop - start for start, stop in self.pieces[rank]]
        firsts = accumulate(lengths, initial=0)
        return [(start, stop, first) for (start, stop), first in zip(self.pieces[rank], firsts, strict=False)]

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """int64 ``(lengths[rank],)``: the global position of each row that a rank holds."""
        held = [torch.arange(start, stop, device=device) for start, stop in self.pieces[rank]]
        return torch.cat(held) if held else torch.arange(0, device=device)

    def shard(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """The rows of a whole tensor that a rank holds: a copy."""
        return torch.cat(
            [x.narrow(dim, start, stop - start) for start, stop in self.pieces[rank]] or [x.narrow(dim, 0, 0)], dim
        )

    def unshard(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole tensor from the parts of all ranks, in their order; rows of a part beyond the rank's own are left out."""
        found = {
            start: parts[rank].narrow(dim, first, stop - start)
            for rank in range(self.ranks)
            for start, stop, first in self.rows(rank)
        }
        return torch.cat([found[start] for start in sorted(found)], dim) if found else parts[0].narrow(dim, 0, 0)

    def show(self, width: int = 64) -> str:
        """A line a rank: which part of the sequence it holds."""
        scale = width / max(self.seqlen, 1)
        lines = []
        for rank, held in enumerate(self.pieces):
            marks = [any(start <= (n + 0.5) / scale < stop for start, stop in held) for n in range(width)]
            lines.append(f"rank {rank:<3} {''.join('█' if mark else '·' for mark in marks)}  {self.lengths[rank]}")
        return "\n".join(lines)


def from_chunks(owners: Sequence[int], bounds: Sequence[int], ranks: int) -> Layout:
    """The layout in which chunk n, positions ``bounds[n]`` to ``bounds[n + 1]``, belongs to rank ``owners[n]``; neighbours are joined."""
    held: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for n, owner in enumerate(owners):
        start, stop = bounds[n], bounds[n + 1]
        if start == stop:
            continue
        if held[owner] and held[owner][-1][1] == start:
            start = held[owner].pop()[0]
        held[owner].append((start, stop))
    return Layout(tuple(map(tuple, held)))


@lru_cache(maxsize=256)
def contiguous(seqlen: int, ranks: int) -> Layout:
    """Rank r holds the r-th of ``ranks`` equal runs: balanced for masks that treat all queries alike."""
    return from_chunks(range(ranks), [seqlen * n // ranks for n in range(ranks + 1)], ranks)


@lru_cache(maxsize=256)
def chunks(seqlen: int, ranks: int) -> Layout:
    """Rank r holds the r-th chunk of ``torch.chunk``, as DTensors have it: runs of one length, the last ones shorter or empty."""
    size = -(-seqlen // ranks)
    return from_chunks(range(ranks), [min(n * size, seqlen) for n in range(ranks + 1)], ranks)


@lru_cache(maxsize=256)
def zigzag(seqlen: int, ranks: int) -> Layout:
    """Rank r holds the r-th of ``2 * ranks`` equal runs and the r-th from the end: balanced for causal masks."""
    owners = [min(n, 2 * ranks - 1 - n) for n in range(2 * ranks)]
    return from_chunks(owners, [seqlen * n // (2 * ranks) for n in range(2 * ranks + 1)], ranks)


def balanced(
    masks: Mask | Sequence[Mask | None] | None, seqlen: int, ranks: int, *, chunks: int | None = None
) -> Layout:
    """Chunks of queries dealt so that every rank visits about as many tiles, whatever the masks.

    Args:
        masks: one mask, or those of all layers of a model, each counting alike; ``None`` keeps every pair. Their tensors may lie on
            any device; where they differ by batch element or head, all of them count.
        chunks: how many equal chunks are dealt; default ``8 * ranks``. More balance better, and cost more launches.

    Every rank gets equally many chunks, as far as they divide, so that it also holds as many rows as the others: the heaviest
    chunk goes to the least loaded rank that has room.
    """
    count = max(1, min(8 * ranks if chunks is None else chunks, seqlen))
    bounds = [seqlen * n // count for n in range(count + 1)]
    costs = chunk_costs(masks, seqlen, bounds)
    room = [-(-count // ranks)] * ranks
    heap = [(0, rank) for rank in range(ranks)]
    owners = [0] * count
    for n in sorted(range(count), key=lambda n: (-costs[n], n)):
        load, rank = heapq.heappop(heap)
        owners[n] = rank
        room[rank] -= 1
        if room[rank]:
            heapq.heappush(heap, (load + costs[n], rank))
    return from_chunks(owners, bounds, ranks)


def chunk_costs(masks: Mask | Sequence[Mask | None] | None, seqlen: int, bounds: Sequence[int]) -> list[int]:
    """Visited tiles of the queries ``bounds[n]`` to ``bounds[n + 1]``, for each n.

    The sum over masks of the mean over heads and batch elements.

    A tile that lies in two chunks counts in each for the rows that it has there.
    """
    rows = torch.zeros(seqlen, dtype=torch.float64)
    for mask in masks if isinstance(masks, Sequence) else [masks]:
        rows += _row_costs(as_mask(mask), seqlen)
    total = torch.cat([torch.zeros(1, dtype=torch.float64), rows.cumsum(0)])
    return [round(float(total[b] - total[a])) for a, b in pairwise(bounds)]


def tile_shares(mask: Mask, layout: Layout) -> tuple[float, ...]:
    """The part of all visited tiles that the queries of each rank visit."""
    bounds = sorted({end for held in layout.pieces for piece in held for end in piece})
    costs = dict(zip(bounds, chunk_costs(mask, layout.seqlen, bounds), strict=False))
    loads = [sum(costs[start] for start, _ in held) for held in layout.pieces]
    return tuple(load / max(sum(loads), 1) for load in loads)


def _row_costs(mask: Mask, seqlen: int) -> Tensor:
    """The key tiles that each query's tile visits: float64 ``(seqlen,)``, the mean over heads and batch elements."""
    leaves = [leaf.cpu() for leaf in mask.leaves]
    kept = region(mask.text, tuple(range(len(leaves))))
    sizes = {"b": 1, "h": 1}
    for read in expr.lookups(*kept.parts):
        for index, size in zip(read.args[1:], leaves[read.args[0][1]].shape, strict=True):
            if index.op == "symbol" and index.args[0] in sizes:
                sizes[index.args[0]] = max(sizes[index.args[0]], size)
    grid = Grid.whole(kept, leaves, (sizes["b"], sizes["h"], seqlen, seqlen), torch.device("cpu"))
    status = TileMap.build(grid, TILE, TILE).status
    visits = (status != EMPTY).double().sum(-1).flatten(0, 1).mean(0)
    return visits.repeat_interleave(TILE)[:seqlen]
