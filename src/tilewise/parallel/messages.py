"""Rows of K and V as ranks send them, and the sum of several ranks' gradients of one row.

Rows lie in *lines*: flat tensors of their numbers. Everything that a rank sends is one line: for each rank K of its rows, then V. One
split of each line and one copy assemble a new line, whatever its number of runs (:class:`Taken`), and one addition serves several runs
(:class:`Sum`), because views and launches dominate short steps. The places follow from the route alone, so they are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Run = tuple[int, int]
"""The first of some rows, and their number."""
Each = tuple[int, int]
"""Numbers in a row of K, and in one of V."""


def line_of(x: Tensor) -> Tensor:
    """Return the rows of a tensor ``(batch, rows, heads, dim)`` as a line."""
    return (x if x.shape[0] == 1 else x.transpose(0, 1)).reshape(-1)


def shaped(line: Tensor, like: Tensor) -> Tensor:
    """Return the rows of a line, otherwise in the shape of ``like``: the inverse of :func:`line_of`."""
    batch, _, heads, dim = like.shape
    rows = line.shape[0] // max(1, batch * heads * dim)
    return line.view(1, rows, heads, dim) if batch == 1 else line.view(rows, batch, heads, dim).transpose(0, 1)


def widths(k: Tensor, v: Tensor) -> Each:
    """Return numbers in a row of K, and in one of V."""
    return k.shape[0] * k.shape[2] * k.shape[3], v.shape[0] * v.shape[2] * v.shape[3]


class Place(NamedTuple):
    """Some numbers of one of several lines: the index of the line, the first number, and the count."""

    line: int
    first: int
    size: int

    def part(self, first: int, size: int) -> Place:
        return Place(self.line, self.first + first, size)


class Given(NamedTuple):
    """The places in lines of the gradients for a run of rows: those of K, and those of V."""

    run: Run
    k: Place
    v: Place


class Taken:
    """Lines that are assembled from pieces of other lines.

    Args:
        lengths: of the given lines.
        wanted: the places of the numbers of each new line, in order.

    Attributes:
        sizes: of the pieces of each given line.
        picks: the pieces of each new line.
        whole: each new line is a whole given line, so nothing is copied.
    """

    def __init__(self, lengths: Sequence[int], wanted: Sequence[Sequence[Place]]):
        joined = [_joined(places) for places in wanted]
        ends = [{0, length} for length in lengths]
        for line, first, size in chain(*joined):
            ends[line] |= {first, first + size}
        cuts = [sorted(x) for x in ends]
        self.sizes = [[b - a for a, b in pairwise(x)] for x in cuts]
        firsts = accumulate(map(len, self.sizes), initial=0)
        number = {
            (line, end): first + n
            for (line, x), first in zip(enumerate(cuts), firsts, strict=False)
            for n, end in enumerate(x)
        }
        self.picks = [
            [n for line, first, size in places for n in range(number[line, first], number[line, first + size])]
            for places in joined
        ]
        self.whole = [
            len(picks) == 1 and places[0].size == lengths[places[0].line]
            for picks, places in zip(self.picks, joined, strict=True)
        ]

    def pieces(self, lines: Sequence[Tensor], first: int = 0) -> list[Tensor]:
        """Return the pieces of some of the lines, from the line of this index on."""
        sizes = self.sizes[first : first + len(lines)]
        return [piece for line, each in zip(lines, sizes, strict=True) for piece in line.split_with_sizes(each)]

    def line(self, number: int, pieces: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Return a new line from the pieces of all lines; a whole given line is not copied. Pieces are rounded to ``dtype`` before."""
        picks = [pieces[n] for n in self.picks[number]]
        picks = [x if dtype in (None, x.dtype) else x.to(dtype) for x in picks]
        return picks[0] if self.whole[number] else torch.cat(picks)

    def __call__(self, *lines: Tensor) -> list[Tensor]:
        pieces = self.pieces(lines)
        return [self.line(n, pieces) if self.picks[n] else lines[0].new_empty(0) for n in range(len(self.picks))]


def _joined(places: Sequence[Place]) -> list[Place]:
    """Return the same numbers, with neighbours in one line joined."""
    found: list[Place] = []
    for x in places:
        if found and found[-1].line == x.line and found[-1].first + found[-1].size == x.first:
            found[-1] = found[-1].part(0, found[-1].size + x.size)
        elif x.size:
            found.append(x)
    return found


class Sum:
    """The sums of gradients for rows, in the given order: a line for K, and one for V.

    A single gradient is copied. Others are added in wider numbers: all first addends are concatenated, those with more addends first; then
    all second ones are added to the beginning of this line, and so on.

    Args:
        rows: their number.
        each: numbers in a row of K, and of V.
        lengths: of the lines of gradients.
        given: the rows of each gradient.
    """

    def __init__(self, rows: int, each: Each, lengths: Sequence[int], given: Sequence[Given]):
        cuts = _cuts(rows, tuple(x.run for x in given))
        addends = [_addends(run, [given[n] for n in numbers], m) for m in (0, 1) for run, numbers in cuts]
        counts = [run[1] * width for width in each for run, _ in cuts]
        several = sorted((n for n, x in enumerate(addends) if len(x) > 1), key=lambda n: -len(addends[n]))
        most = len(addends[several[0]]) if several else 0
        rounds = [[addends[n][m] for n in several if len(addends[n]) > m] for m in range(most)]
        self.rounds = [sum(x.size for x in found) for found in rounds]
        self.rows, self.total = rows, len(lengths)
        sums = {n: x[0] for n, x in enumerate(addends) if len(x) == 1}
        sums |= _one_after_the_other(self.total, counts, several)
        sums |= _one_after_the_other(self.total + 1, counts, [n for n, x in enumerate(addends) if not x])
        results = [[sums[m * len(cuts) + n] for n in range(len(cuts))] for m in (0, 1)]
        more = [sum(x.size for x in sums.values() if x.line == line) for line in (self.total, self.total + 1)]
        self.zeros = more[1]
        self.taken = Taken([*lengths, *more], [*rounds, *results])

    def __call__(self, lines: Sequence[Tensor], like: Tensor, dtype: torch.dtype, wide: torch.dtype) -> list[Tensor]:
        """Return the sums of K's rows, and of V's.

        Args:
            like: a tensor on the device.
            dtype: of the results.
            wide: of the sums.
        """
        if not self.rows:
            return [like.new_empty(0, dtype=dtype) for _ in range(2)]
        pieces = self.taken.pieces(lines)
        if self.rounds:
            total = self.taken.line(0, pieces).to(wide, copy=self.taken.whole[0])
            for n, count in enumerate(self.rounds[1:], 1):
                total.narrow(0, 0, count).add_(self.taken.line(n, pieces))
            pieces += self.taken.pieces([total.to(dtype)], self.total)
        if self.zeros:
            pieces += self.taken.pieces([like.new_zeros(self.zeros, dtype=dtype)], self.total + 1)
        return [self.taken.line(len(self.rounds) + m, pieces, dtype) for m in (0, 1)]


def _addends(run: Run, given: Sequence[Given], m: int) -> list[Place]:
    """Return the places of the gradients for a run of rows: K's, or V's if m is 1."""
    found = []
    for x in given:
        place = (x.k, x.v)[m]
        width = place.size // x.run[1]
        found.append(place.part((run[0] - x.run[0]) * width, run[1] * width))
    return found


def _one_after_the_other(line: int, counts: Sequence[int], numbers: Sequence[int]) -> dict[int, Place]:
    """Return the places of things with so many numbers each, concatenated in a line."""
    firsts = accumulate((counts[n] for n in numbers), initial=0)
    return {n: Place(line, first, counts[n]) for n, first in zip(numbers, firsts, strict=False)}


@lru_cache(maxsize=256)
def _cuts(length: int, runs: tuple[Run, ...]) -> tuple[tuple[Run, tuple[int, ...]], ...]:
    """Cut several runs into runs of rows that lie in the same ones, each with the indices of these."""
    ends = sorted({0, length, *[end for first, count in runs for end in (first, first + count)]})
    return tuple(
        ((a, b - a), tuple(n for n, (first, count) in enumerate(runs) if first <= a and b <= first + count))
        for a, b in pairwise(ends)
    )
