"""Layouts of a sequence over ranks: each rank holds contiguous pieces of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from tilewise.caching import cached_property


@dataclass(frozen=True)
class Layout:
    """The pieces ``[start, stop)`` of a sequence on each rank, in the order of the rank's rows.

    Every position belongs to one piece of one rank. A rank may hold nothing.

    Attributes:
        fetched, lent: for the cost model, under the layout's masks (None without masks). ``fetched`` is the most keys of other ranks that
            one rank's queries see; ``lent`` is the most of one rank's keys that others see, counted for each of them.
    """

    pieces: tuple[tuple[tuple[int, int], ...], ...]
    fetched: int | None = None
    lent: int | None = None

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
    def text(self) -> str:
        """The layout in words, by which ranks compare theirs."""
        return str(self)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of positions on each rank."""
        return tuple(sum(stop - start for start, stop in held) for held in self.pieces)

    @cached_property
    def in_order(self) -> bool:
        """Whether the concatenated rows of all ranks are in the order of positions."""
        return [piece for held in self.pieces for piece in held] == self._in_order

    def rows(self, rank: int) -> list[tuple[int, int, int]]:
        """Return ``(start, stop, first)`` of each piece of a rank: its positions, and the rank's row of the first one."""
        lengths = [stop - start for start, stop in self.pieces[rank]]
        firsts = accumulate(lengths, initial=0)
        return [(start, stop, first) for (start, stop), first in zip(self.pieces[rank], firsts, strict=False)]

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Return the global position of each row of a rank: int64 ``(lengths[rank],)``."""
        held = [torch.arange(start, stop, device=device) for start, stop in self.pieces[rank]]
        return torch.cat(held) if held else torch.arange(0, device=device)

    def shard(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """Return a copy of a rank's rows of a whole tensor."""
        return torch.cat(
            [x.narrow(dim, start, stop - start) for start, stop in self.pieces[rank]] or [x.narrow(dim, 0, 0)], dim
        )

    def unshard(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Return the whole tensor from the parts of all ranks, in their order. Surplus rows of a part are left out."""
        found = {
            start: parts[rank].narrow(dim, first, stop - start)
            for rank in range(self.ranks)
            for start, stop, first in self.rows(rank)
        }
        return torch.cat([found[start] for start in sorted(found)], dim) if found else parts[0].narrow(dim, 0, 0)

    def across(self, within: int) -> Layout:
        """Return the layout in which so many neighbouring ranks count as one."""
        groups = (self._in_order_of(range(first, first + within)) for first in range(0, self.ranks, within))
        return Layout(tuple(tuple(joined(pieces)) for pieces in groups), self.fetched, self.lent)

    def within(self, within: int, group: int) -> Layout:
        """Return the layout of such a group's positions among its ranks, counted without the other groups."""
        ranks = range(group * within, (group + 1) * within)
        ordered = self._in_order_of(ranks)
        firsts = accumulate([stop - start for start, stop in ordered], initial=0)
        place = {piece: (first, first + piece[1] - piece[0]) for piece, first in zip(ordered, firsts, strict=False)}
        return Layout(tuple(tuple(place[piece] for piece in self.pieces[rank]) for rank in ranks))

    def _in_order_of(self, ranks: Iterable[int]) -> list[tuple[int, int]]:
        """Return the pieces of some ranks in the order of positions."""
        return sorted(piece for rank in ranks for piece in self.pieces[rank])

    def show(self, width: int = 64) -> str:
        """Return one line per rank, with its part of the sequence."""
        scale = width / max(self.seqlen, 1)
        lines = []
        for rank, held in enumerate(self.pieces):
            marks = [any(start <= (n + 0.5) / scale < stop for start, stop in held) for n in range(width)]
            lines.append(f"rank {rank:<3} {''.join('█' if mark else '·' for mark in marks)}  {self.lengths[rank]}")
        return "\n".join(lines)


def check(who: str, **sizes: int) -> None:
    """Raise ValueError unless the sizes of ``who`` are whole numbers above 0; a ``seqlen`` may be 0."""
    for name, n in sizes.items():
        least = 0 if name == "seqlen" else 1
        if not hasattr(n, "__index__") or n < least:
            raise ValueError(f"{who}: {name} must be a whole number >= {least}, got {n!r}")


def from_chunks(owners: Sequence[int], bounds: Sequence[int], ranks: int) -> Layout:
    """Return the layout that gives chunk n, positions ``bounds[n]`` to ``bounds[n + 1]``, to rank ``owners[n]``. Neighbours are joined."""
    held: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for owner, start, stop in zip(owners, bounds, bounds[1:], strict=False):
        if start < stop:
            held[owner].append((start, stop))
    return Layout(tuple(tuple(joined(pieces)) for pieces in held))


def joined(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same positions as disjoint intervals, in order, with neighbours joined."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


@lru_cache(maxsize=256)
def contiguous(seqlen: int, ranks: int) -> Layout:
    """Rank r holds the r-th of ``ranks`` equal runs: balanced for masks that treat all queries alike."""
    check("contiguous", seqlen=seqlen, ranks=ranks)
    return from_chunks(range(ranks), [seqlen * n // ranks for n in range(ranks + 1)], ranks)


@lru_cache(maxsize=256)
def chunks(seqlen: int, ranks: int) -> Layout:
    """Rank r holds the r-th chunk of ``torch.chunk``, as DTensors have it: runs of one length, the last ones shorter or empty."""
    check("chunks", seqlen=seqlen, ranks=ranks)
    size = -(-seqlen // ranks)
    return from_chunks(range(ranks), [min(n * size, seqlen) for n in range(ranks + 1)], ranks)


@lru_cache(maxsize=256)
def zigzag(seqlen: int, ranks: int) -> Layout:
    """Rank r holds the r-th of ``2 * ranks`` equal runs and the r-th from the end: balanced for causal masks."""
    check("zigzag", seqlen=seqlen, ranks=ranks)
    owners = [min(n, 2 * ranks - 1 - n) for n in range(2 * ranks)]
    return from_chunks(owners, [seqlen * n // (2 * ranks) for n in range(2 * ranks + 1)], ranks)
