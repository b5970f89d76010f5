"""ALiBi where no query sees a key past its own place: a bias that is linear in the key, for one multiply-add a pair.

The bias ``-slope |i + off - j|`` is then ``slope (j - i - off)``. In base 2, a thread's columns being constants apart
(:func:`tilewise.backends.hopper.kit.tiles.constant_column`), that of row r and column c of a block is ::

    slope2 (distance_r + constant_c)        slope2 = slope log2(e), distance_r = first column - i - off <= 0

A row's bias is largest in its last column. Where a block is seen as a whole the biases count from there, so that what is near
zero, and so has weight, is rounded as a small number.

In the transposed block of a backward rows are keys and columns are queries, along which the bias falls: slope2 is then negative, and
``distance_r`` is ``first column + off - j >= 0``.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute

from tilewise.backends.hopper.kit.dtypes import F32
from tilewise.backends.hopper.kit.tiles import constant_column


class RowSlopes(NamedTuple):
    """The bias of a thread's two rows in all blocks of a tile.

    Attributes:
        slope2: the head's slope, times log2(e).
        at: for each row the key at distance 0, less the thread's first column; fp32.
    """

    slope2: F32
    at: list

    def within(self, first) -> BlockSlopes:
        """The bias in the block whose first key is ``first``."""
        # Whole numbers below 2²⁴ are exact in fp32.
        return BlockSlopes(self.slope2, [F32(first) - at for at in self.at])


class BlockSlopes(NamedTuple):
    """The bias of a thread's two rows in one block; ``distance``: of its first column from the key at distance 0, fp32."""

    slope2: F32
    distance: list

    def add(self, s: cute.Tensor, scale2) -> None:
        """Turns products into scores with their bias, in base 2: each bias is rounded once."""
        # s: (2 rows, tile_n / 4 columns of the thread), an fp32 accumulator of 64 × tile_n. A block that is masked, or computed once
        # more, is rare: it may take three instructions a pair.
        for r in range(2):
            for c in range(cute.size(s, mode=[1])):
                s[r, c] = s[r, c] * scale2 + (self.distance[r] + float(constant_column(c))) * self.slope2

    def below(self, m2, r: int, columns: int) -> list:
        """The maximum less the bias, for each column of row r in a block that ends before the row's own key."""
        # Whole blocks end before the row's own key, so that the last column has the smallest distance.
        last = float(constant_column(columns - 1))
        base = m2 - (self.distance[r] + last) * self.slope2
        # One multiply-add a pair: the constants are part of the instructions.
        return [base + self.slope2 * (last - constant_column(c)) for c in range(columns)]

    def less(self, statistic, s: cute.Tensor):
        """A statistic of columns, as a function of a thread's row and column, less the bias: P is 2**(s scale2 - it)."""
        of_rows = [distance * self.slope2 for distance in self.distance]
        # Once for both rows of a column.
        return lambda r, c: (statistic(r, c) - float(constant_column(c)) * self.slope2) - of_rows[r]
