"""A bias by distance i - j, read from a line of biases (:mod:`tilewise.backends.hopper.tables`).

Where all pairs of a block lie past an end of the line they share one bias: it is taken off the row's maximum, or off the statistics of a
backward, and costs no instruction a pair. Elsewhere a thread reads one element for each distance of its pairs: of two rows 8 apart and
columns 8 apart that is about half of the pairs.

In the transposed block of a backward rows are keys and columns are queries: distances grow along the columns and fall along the rows.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.kit.dtypes import F32, I32
from tilewise.backends.hopper.kit.instructions import after
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.tiles import constant_column

TOGETHER = 8  # columns of a thread that read at a time


class RowLine(NamedTuple):
    """The biases of a thread's two rows in all blocks of a tile.

    Attributes:
        line: (distance,), fp32: the head's biases, in base 2.
        at: the distance of the thread's first row from key 0, less its first column, and less the line's first distance.
        ends: the biases of whole blocks: of those past the line's last distance and, where keys follow a row's own place, of those before
            its first one.
    """

    line: cute.Tensor
    at: I32
    ends: list

    def within(self, first) -> BlockLine:
        """The biases in the block whose first key is ``first``."""
        at, far = self.at - first, self.ends[0]
        if len(self.ends) > 1:
            # A whole block lies on one side: its pairs are all before the first distance, or all past the last one.
            far = F32(cutlass.select_(at <= 0, self.ends[1], far))
        return BlockLine(self.line, at, far)


def line_of_head(line: cute.Tensor, head) -> cute.Tensor:
    """The biases of one head, (distance,), of those of all heads, or of what all heads share."""
    return line[PICK.smaller(head, cute.size(line, mode=[0]) - 1), None]


class BlockLine(NamedTuple):
    """The biases of a thread's two rows in one block: ``at`` as in :class:`RowLine`, from its first key; ``far``: where it is whole."""

    line: cute.Tensor
    at: I32
    far: F32

    def add(self, s: cute.Tensor, scale2) -> None:
        """Turns products into scores with their bias, in base 2."""
        at, last, read = self.at, cute.size(self.line) - 1, {}
        for c in range(cute.size(s, mode=[1])):
            # The next columns wait for these: what all columns read would take too many registers at once.
            if c % TOGETHER == 0 and c > 0:
                at = after(at, s[1, c - 1])
            for r in range(2):
                # Rows are 8 apart: pairs of one distance share what was read.
                distance = 8 * r - constant_column(c)
                if distance not in read:
                    read[distance] = self.line[PICK.smaller(PICK.larger(at + distance, 0), last)]
                s[r, c] = s[r, c] * scale2 + read[distance]

    def below(self, m2, r: int, columns: int) -> list:
        """The maximum less the bias, for each column of row r in a block that has one bias."""
        return [m2 - self.far] * columns


# -- Transposed blocks ---------------------------------------------------------------------------------------------


class KeyLine(NamedTuple):
    """The biases of a thread's two keys in all blocks of a tile.

    Attributes:
        line: (distance,), fp32: the head's biases, in base 2.
        at: the distance of the thread's first column of query 0 from its first key, less the line's first distance.
        sums: (distance,), fp32: where the gradients of the biases are added up, but for those of the line's ends.
        ends: the biases of whole blocks, as :class:`RowLine` has them.
    """

    line: cute.Tensor
    at: I32
    sums: cute.Tensor
    ends: list

    def within(self, first) -> NearLine:
        """The biases in the block whose first query is ``first``."""
        return NearLine(self.line, self.at + first, self.sums)

    def beyond(self, before: bool) -> FarLine:
        """The bias of blocks before the line's first distance, or past its last one."""
        return FarLine(self.ends[1 if before else 0], before)


class FarLine(NamedTuple):
    """The bias that all pairs of a block share; ``before``: that of the line's first distance."""

    bias: F32
    before: bool

    def less(self, statistic, s: cute.Tensor):
        """A statistic of columns, as a function of a thread's row and column, less the bias: P is 2**(s scale2 - it)."""
        return lambda r, c: statistic(r, c) - self.bias


class NearLine(NamedTuple):
    """The biases of a thread's two keys in one block: ``at`` as in :class:`KeyLine`, from its first query."""

    line: cute.Tensor
    at: I32
    sums: cute.Tensor

    def less(self, statistic, s: cute.Tensor):
        """A statistic less the biases, as in :meth:`FarLine.less`; elements of TOGETHER columns are read when ``s`` before them has been
        replaced."""
        at, last, read = self.at, cute.size(self.line) - 1, {}

        def found(r: int, c: int):
            nonlocal at
            # Rows are keys, 8 apart: pairs of one distance share what was read.
            distance = constant_column(c) - 8 * r
            if distance not in read:
                if (r, c % TOGETHER) == (0, 0) and c > 0:
                    at = after(at, s[1, c - 1])
                read[distance] = self.line[PICK.smaller(PICK.larger(at + distance, 0), last)]
            return statistic(r, c) - read[distance]

        return found
