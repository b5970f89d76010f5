"""The places of gathered keys in the buffers that a rank sends, receives and assembles.

Everything here follows from the route and the numbers per row, so a plan computes it once, and a step needs no view for each run of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tilewise.caching import cached_property
from tilewise.parallel.messages import Addend, Place, Sum, Taken
from tilewise.parallel.route import Route, Segment

Run = tuple[int, int]
"""The first of some rows, and their number."""
K, V, CAME = 0, 1, 2
"""Lines of a rank's rows of K and V, or of the gradients of its assembled keys, and the received line."""


@dataclass(frozen=True)
class Moves:
    """How one rank moves the rows of K and V, and their gradients.

    Attributes:
        near, far: the keys of each near piece, among the rank's own, and of each far one, among the assembled ones.
        widths: numbers in a row of K, and of V.
    """

    route: Route
    rank: int
    near: tuple[Run, ...]
    far: tuple[Run, ...]
    widths: tuple[int, int]

    @cached_property
    def sending(self) -> list[int]:
        """The count of the rank's numbers of K and V that go to each rank."""
        return [n * sum(self.widths) for n in self.route.counts[self.rank]]

    @cached_property
    def receiving(self) -> list[int]:
        """The count of numbers of K and V that come from each rank."""
        return [counts[self.rank] * sum(self.widths) for counts in self.route.counts]

    @cached_property
    def sent(self) -> Taken:
        """The line that the rank sends, from the lines of its rows of K and V."""
        return Taken(self._lines(self.rows), [self._message(self.lent)])

    @cached_property
    def together(self) -> Taken:
        """The lines of the assembled keys and values, from the lines of the rank's rows of K and V and from the received line."""
        came = {(m, run): place for m, run, place in self._came(self.fetched)}
        wanted = [
            [self._place(m, x.run) if x.owner == self.rank else came[m, run] for x, run in self.assembled]
            for m in (K, V)
        ]
        return Taken([*self._lines(self.rows), sum(self.receiving)], wanted)

    @cached_property
    def back(self) -> Taken:
        """The line of gradients that the rank sends, from the lines of dK and dV of the assembled keys."""
        return Taken(self._lines(self.count), [self._message(self.fetched)])

    @cached_property
    def far_sum(self) -> Sum:
        """The sum of far pieces' gradients of the assembled keys, from two lines each."""
        lengths = [length for _, count in self.far for length in self._lines(count)]
        return Sum(lengths, self._lines(self.count), self._of_pieces(self.far, 0))

    @cached_property
    def own_sum(self) -> Sum:
        """The sum of the gradients of the rank's rows, in order: from near pieces, from its far ones, and from other ranks.

        Lines: dK and dV of the assembled keys, the received line, and those of each near piece.
        """
        near = [length for _, count in self.near for length in self._lines(count)]
        own = [(x.run, run) for x, run in self.assembled if x.owner == self.rank]
        given = self._of_pieces(self.near, CAME + 1)
        given += [(self._place(m, rows), self._place(m, run)) for rows, run in own for m in (K, V)]
        given += [(self._place(m, run), place) for m, run, place in self._came(self.lent)]
        return Sum([*self._lines(self.count), sum(self.sending), *near], self._lines(self.rows), given)

    # -- Runs of rows, and where their numbers lie ---------------------------------------------------------------------

    @cached_property
    def rows(self) -> int:
        """The number of the rank's own keys."""
        return self.route.keys.lengths[self.rank]

    @cached_property
    def assembled(self) -> list[tuple[Segment, Run]]:
        """The keys that the rank assembles, in order, with their place among these."""
        segments = self.route.segments(self.rank)
        firsts = accumulate((x.length for x in segments), initial=0)
        return [(x, (first, x.length)) for x, first in zip(segments, firsts, strict=False)]

    @cached_property
    def count(self) -> int:
        """The number of keys that the rank assembles."""
        return sum(x.length for x, _ in self.assembled)

    @cached_property
    def lent(self) -> list[list[Run]]:
        """The runs of the rank's rows that each rank fetches, by rank."""
        return [[x.run for x in self.route.sent(self.rank, to)] for to in range(self.route.keys.ranks)]

    @cached_property
    def fetched(self) -> list[list[Run]]:
        """The runs of other ranks' keys among the assembled ones, by owner."""
        ranks = range(self.route.keys.ranks)
        return [[run for x, run in self.assembled if x.owner == owner != self.rank] for owner in ranks]

    def _lines(self, rows: int) -> list[int]:
        """Return the lengths of a line of so many rows of K, and of one of V."""
        return [rows * width for width in self.widths]

    def _place(self, m: int, run: Run) -> Place:
        """Return the place of a run of rows in the line of K or V."""
        return Place(m, run[0] * self.widths[m], run[1] * self.widths[m])

    def _message(self, runs: Sequence[Sequence[Run]]) -> list[Place]:
        """Return the places of the numbers that a rank sends: for each rank K of its runs, then V."""
        return [self._place(m, run) for each in runs for m in (K, V) for run in each]

    def _came(self, runs: Sequence[Sequence[Run]]) -> list[tuple[int, Run, Place]]:
        """Return each run of K or V that other ranks' messages hold, with its place in the received line."""
        found = [(m, run) for each in runs for m in (K, V) for run in each]
        sizes = [run[1] * self.widths[m] for m, run in found]
        firsts = accumulate(sizes, initial=0)
        return [(*x, Place(CAME, first, size)) for x, size, first in zip(found, sizes, firsts, strict=False)]

    def _of_pieces(self, pieces: Sequence[Run], line: int) -> list[Addend]:
        """Return the gradients that pieces give for their runs of keys, in two lines each from this line on."""
        return [
            (self._place(m, run), Place(line + 2 * n + m, 0, run[1] * self.widths[m]))
            for n, run in enumerate(pieces)
            for m in (K, V)
        ]
