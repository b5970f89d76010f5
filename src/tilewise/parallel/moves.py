"""The places of gathered keys in the buffers that a rank sends, receives and assembles.

Everything here follows from the route and the numbers per row, so a plan computes it once, and a step needs no view for each run of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tilewise.caching import cached_property
from tilewise.parallel.messages import Each, Given, Place, Run, Sum, Taken
from tilewise.parallel.route import Route, Segment

K, V, CAME = 0, 1, 2
"""Lines of a rank's rows of K and V, or of the gradients of its assembled keys, and the received line."""
Pair = tuple[Place, Place]
"""The places of rows of K and of V."""


@dataclass(frozen=True)
class Runs:
    """The runs of rows that one rank sends, receives and assembles."""

    route: Route
    rank: int

    @cached_property
    def rows(self) -> int:
        """The number of the rank's own keys."""
        return self.route.keys.lengths[self.rank]

    @cached_property
    def segments(self) -> list[Segment]:
        """The keys that the rank assembles, in order."""
        return self.route.segments(self.rank)

    @cached_property
    def count(self) -> int:
        """The number of keys that the rank assembles."""
        return sum(x.length for x in self.segments)

    @cached_property
    def places(self) -> list[Run]:
        """The place of each segment among the assembled keys."""
        firsts = accumulate((x.length for x in self.segments), initial=0)
        return [(first, x.length) for first, x in zip(firsts, self.segments, strict=False)]

    @cached_property
    def lent(self) -> list[list[Run]]:
        """The runs of the rank's rows that each rank fetches, by rank."""
        return [[x.run for x in self.route.sent(self.rank, to)] for to in range(self.route.keys.ranks)]

    @cached_property
    def fetched(self) -> list[list[Run]]:
        """The runs of other ranks' keys among the assembled ones, by owner."""
        both = list(zip(self.segments, self.places, strict=True))
        return [[run for x, run in both if x.owner == owner != self.rank] for owner in range(self.route.keys.ranks)]


@dataclass(frozen=True)
class Moves:
    """How one rank moves the rows of K and V, and their gradients.

    Attributes:
        near, far: the keys of each near piece, among the rank's own, and of each far one, among the assembled ones.
        each: numbers in a row of K, and of V.
    """

    runs: Runs
    near: tuple[Run, ...]
    far: tuple[Run, ...]
    each: Each

    @cached_property
    def sending(self) -> list[int]:
        """The count of the rank's numbers of K and V that go to each rank."""
        return [n * sum(self.each) for n in self.runs.route.counts[self.runs.rank]]

    @cached_property
    def receiving(self) -> list[int]:
        """The count of numbers of K and V that come from each rank."""
        return [counts[self.runs.rank] * sum(self.each) for counts in self.runs.route.counts]

    @cached_property
    def sent(self) -> Taken:
        """The numbers that the rank sends, from the lines of its rows of K and V."""
        pairs = [[self._in_lines(run) for run in runs] for runs in self.runs.lent]
        return Taken(self._lines(self.runs.rows), [_message(pairs)])

    @cached_property
    def together(self) -> Taken:
        """The assembled keys and values, from the lines of the rank's rows of K and V and from the received line."""
        came = {
            x: pair
            for owner, pairs in enumerate(self._received(self.runs.fetched, self.receiving))
            for x, pair in zip(
                [x for x in self.runs.segments if x.owner == owner != self.runs.rank], pairs, strict=True
            )
        }
        pairs = [self._in_lines(x.run) if x.owner == self.runs.rank else came[x] for x in self.runs.segments]
        return Taken([*self._lines(self.runs.rows), sum(self.receiving)], [[pair[m] for pair in pairs] for m in (K, V)])

    @cached_property
    def back(self) -> Taken:
        """The gradients that the rank sends, from the lines of dK and dV of the assembled keys."""
        pairs = [[self._in_lines(run) for run in runs] for runs in self.runs.fetched]
        return Taken(self._lines(self.runs.count), [_message(pairs)])

    @cached_property
    def far_sum(self) -> Sum:
        """The sum of far pieces' gradients of the assembled keys, from two lines each."""
        given = [Given(run, *self._in_lines((0, run[1]), 2 * n)) for n, run in enumerate(self.far)]
        lengths = [length for _, count in self.far for length in self._lines(count)]
        return Sum(self.runs.count, self.each, lengths, given)

    @cached_property
    def own_sum(self) -> Sum:
        """The sum of the gradients of the rank's rows, in order: from near pieces, from its far ones, and from other ranks.

        Lines: dK and dV of the assembled keys, the received line, and those of each near piece.
        """
        given = [Given(run, *self._in_lines((0, run[1]), 3 + 2 * n)) for n, run in enumerate(self.near)]
        given += [
            Given(x.run, *self._in_lines(place))
            for x, place in zip(self.runs.segments, self.runs.places, strict=True)
            if x.owner == self.runs.rank
        ]
        for runs, pairs in zip(self.runs.lent, self._received(self.runs.lent, self.sending), strict=True):
            given += [Given(run, *pair) for run, pair in zip(runs, pairs, strict=True)]
        near = [length for _, count in self.near for length in self._lines(count)]
        lengths = [*self._lines(self.runs.count), sum(self.sending), *near]
        return Sum(self.runs.rows, self.each, lengths, given)

    # -- Where the numbers of runs lie ---------------------------------------------------------------------------------

    def _lines(self, rows: int) -> list[int]:
        """Return the lengths of a line of so many rows of K, and of one of V."""
        return [rows * width for width in self.each]

    def _in_lines(self, run: Run, line: int = K) -> Pair:
        """Return the places of a run of rows in a line of K, and in the next one, of V."""
        k, v = (Place(line + m, run[0] * width, run[1] * width) for m, width in enumerate(self.each))
        return k, v

    def _received(self, runs: Sequence[Sequence[Run]], lengths: Sequence[int]) -> list[list[Pair]]:
        """Return the places of runs of rows in the received line: for each rank K of its runs, then V.

        Args:
            lengths: how many numbers came from each rank.
        """
        found = []
        for each, first in zip(runs, accumulate(lengths, initial=0), strict=False):
            counts = [count for _, count in each]
            numbers = [n * width for width in self.each for n in counts]
            places = [
                Place(CAME, first + at, n) for at, n in zip(accumulate(numbers, initial=0), numbers, strict=False)
            ]
            found.append(list(zip(places[: len(counts)], places[len(counts) :], strict=True)))
        return found


def _message(pairs: Sequence[Sequence[Pair]]) -> list[Place]:
    """Return the places of the numbers that a rank sends: for each rank K of its rows, then V."""
    return [pair[m] for each in pairs for m in (K, V) for pair in each]
