"""Rows of K and V as ranks send them, and the sum of several ranks' gradients of one row.

Rows lie in *lines*: flat tensors of their numbers. Everything that a rank sends is one line: for each rank K of its rows, then V. One
split of each line and one copy assemble a new line, whatever its number of runs (:class:`Taken`), and one addition serves several runs
(:class:`Sum`), because views and launches dominate short steps. The places follow from the route alone, so they are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor


def line_of(x: Tensor) -> Tensor:
    """Return the rows of a tensor ``(batch, rows, heads, dim)`` as a line."""
    return (x if x.shape[0] == 1 else x.transpose(0, 1)).reshape(-1)


def shaped(line: Tensor, like: Tensor) -> Tensor:
    """Return the rows of a line, otherwise in the shape of ``like``: the inverse of :func:`line_of`."""
    batch, _, heads, dim = like.shape
    rows = line.shape[0] // max(1, batch * heads * dim)
    return line.view(1, rows, heads, dim) if batch == 1 else line.view(rows, batch, heads, dim).transpose(0, 1)


class Place(NamedTuple):
    """Some numbers of one of several lines: the index of the line, the first number, and the count."""

    line: int
    first: int
    size: int

    @property
    def end(self) -> int:
        return self.first + self.size


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
        for place in chain(*joined):
            ends[place.line] |= {place.first, place.end}
        cuts = [sorted(x) for x in ends]
        self.sizes = [[b - a for a, b in pairwise(x)] for x in cuts]
        firsts = accumulate(map(len, self.sizes), initial=0)
        number = {
            (line, end): first + n
            for (line, x), first in zip(enumerate(cuts), firsts, strict=False)
            for n, end in enumerate(x)
        }
        self.picks = [
            [n for x in places for n in range(number[x.line, x.first], number[x.line, x.end])] for places in joined
        ]
        self.whole = [
            len(picks) == 1 and places[0].size == lengths[places[0].line]
            for picks, places in zip(self.picks, joined, strict=True)
        ]

    def pieces(self, lines: Sequence[Tensor], first: int = 0) -> list[Tensor]:
        """Return the pieces of some of the lines, from the line of this index on."""
        sizes = self.sizes[first : first + len(lines)]
        return [piece for line, each in zip(lines, sizes, strict=True) for piece in line.split_with_sizes(each)]

    def line(self, number: int, pieces: Sequence[Tensor], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a new line from the pieces of all lines; a whole given line is not copied. Pieces are rounded to ``dtype`` before."""
        picks = [pieces[n] for n in self.picks[number]]
        if not picks:
            return like.new_empty(0, dtype=dtype)
        picks = [x if dtype in (None, x.dtype) else x.to(dtype) for x in picks]
        return picks[0] if self.whole[number] else torch.cat(picks)

    def __call__(self, *lines: Tensor) -> list[Tensor]:
        pieces = self.pieces(lines)
        return [self.line(n, pieces, lines[0]) for n in range(len(self.picks))]


def _joined(places: Sequence[Place]) -> list[Place]:
    """Return the same numbers, with neighbours in one line joined."""
    found: list[Place] = []
    for x in places:
        if found and (found[-1].line, found[-1].end) == (x.line, x.first):
            found[-1] = Place(x.line, found[-1].first, found[-1].size + x.size)
        elif x.size:
            found.append(x)
    return found


Addend = tuple[Place, Place]
"""The place of some numbers among the sums, and among the given lines."""


class Sum:
    """Lines of sums, each added in the given order.

    A single addend is copied. Others are added in wider numbers: all first addends are concatenated, those with more addends first; then
    all second ones are added to the beginning of this line, and so on.

    Args:
        lengths: of the given lines.
        results: lengths of the lines of sums.
    """

    def __init__(self, lengths: Sequence[int], results: Sequence[int], given: Sequence[Addend]):
        lines = [_cells(line, length, given) for line, length in enumerate(results)]
        cells = list(chain(*lines))
        several = sorted((x for x in cells if len(x.addends) > 1), key=lambda x: -len(x.addends))
        most = len(several[0].addends) if several else 0
        rounds = [[x.addends[n] for x in several if len(x.addends) > n] for n in range(most)]
        none = [x for x in cells if not x.addends]
        self.rounds = [sum(x.size for x in found) for found in rounds]
        self.zeros = sum(x.size for x in none)
        self.total = len(lengths)  # the line of sums of several addends, which the line of zeros follows
        places = {x: x.addends[0] for x in cells if len(x.addends) == 1}
        places |= _one_after_the_other(self.total, several) | _one_after_the_other(self.total + 1, none)
        more = [sum(self.rounds[:1]), self.zeros]
        self.taken = Taken([*lengths, *more], [*rounds, *[[places[x] for x in line] for line in lines]])

    def __call__(self, lines: Sequence[Tensor], like: Tensor, dtype: torch.dtype, wide: torch.dtype) -> list[Tensor]:
        """Return the lines of sums.

        Args:
            like: a tensor on the device.
            dtype: of the results.
            wide: of the sums.
        """
        pieces = self.taken.pieces(lines)
        if self.rounds:
            total = self.taken.line(0, pieces, like).to(wide, copy=self.taken.whole[0])
            for n, count in enumerate(self.rounds[1:], 1):
                total.narrow(0, 0, count).add_(self.taken.line(n, pieces, like))
            pieces += self.taken.pieces([total.to(dtype)], self.total)
        if self.zeros:
            pieces += self.taken.pieces([like.new_zeros(self.zeros, dtype=dtype)], self.total + 1)
        return [self.taken.line(n, pieces, like, dtype) for n in range(len(self.rounds), len(self.taken.picks))]


class _Cell(NamedTuple):
    """Numbers of a line of sums that have the same addends."""

    line: int
    first: int
    size: int
    addends: tuple[Place, ...]


def _cells(line: int, length: int, given: Sequence[Addend]) -> list[_Cell]:
    """Cut a line of sums where an addend begins or ends."""
    here = [(x, source) for x, source in given if x.line == line]
    ends = sorted({0, length, *[end for x, _ in here for end in (x.first, x.end)]})
    return [
        _Cell(line, a, b - a, tuple(Place(y.line, y.first + a - x.first, b - a) for x, y in here if x.first <= a and b <= x.end))
        for a, b in pairwise(ends)
    ]  # fmt: skip


def _one_after_the_other(line: int, cells: Sequence[_Cell]) -> dict[_Cell, Place]:
    """Return the places of cells that are concatenated in a line."""
    firsts = accumulate((x.size for x in cells), initial=0)
    return {x: Place(line, first, x.size) for x, first in zip(cells, firsts, strict=False)}
