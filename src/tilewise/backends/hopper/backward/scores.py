"""A block of scores and its gradient, in the registers of one warpgroup: P from S, and dS from dP.

Blocks are read as rows and columns (:mod:`tilewise.backends.hopper.kit.tiles`). In the pass over key tiles they are transposed,
Sᵀ = K Qᵀ: rows are keys, columns are queries, and lse2 and delta belong to columns. In the pass over query tiles they belong to rows.

Masks, softcaps, traced scores and dropout all act here: :func:`probabilities` makes P (and drops pairs of it),
:func:`score_gradients` makes dS = slope · P (dP − delta), where dropout acts on dP. The gradient of a tensor that a score reads would
be summed there from P (dP − delta), before the slope is multiplied in (docs/algorithm.md, (17)), as those of ALiBi's slopes and of a table
by distance are (:mod:`tilewise.backends.hopper.backward.dslopes`, :mod:`tilewise.backends.hopper.backward.dlines`).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute

from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.params import BackwardParams
from tilewise.backends.hopper.config import PLAIN
from tilewise.backends.hopper.kit import bits, dropout, expression
from tilewise.backends.hopper.kit.dtypes import F32
from tilewise.backends.hopper.kit.instructions import choose, pack
from tilewise.backends.hopper.kit.lines import FarLine, NearLine
from tilewise.backends.hopper.kit.operands import words
from tilewise.backends.hopper.kit.slopes import BlockSlopes
from tilewise.backends.hopper.kit.softmax import softcap_roughly
from tilewise.backends.hopper.kit.tiles import column_of, constant_column, row_of, rows_columns


def thread_rows(row) -> list:
    """The two rows of a thread of a warpgroup whose rows begin at ``row``."""
    thread = cute.arch.thread_idx()[0] % 128
    return [row + row_of(thread, r) for r in range(2)]


class ColumnLimits(NamedTuple):
    """The first and one past the last kept column of a thread's two rows, counted from the thread's first column.

    ``ends``: (first, last), each a pair of numbers, or None where that end is unbounded.
    """

    ends: tuple

    @classmethod
    def of(cls, lower: list | None, upper: list | None) -> ColumnLimits:
        """The limits from columns of the whole matrix."""
        # Counted from the thread's own columns once a tile: a block then subtracts its start alone.
        start = column_of(cute.arch.thread_idx()[0] % 128, 0)
        return cls(tuple(None if end is None else [n - start for n in end] for end in (lower, upper)))

    def within(self, column) -> list:
        """The ends counted from the block that begins at ``column``."""
        return [None if end is None else [n - column for n in end] for end in self.ends]


class ScoreBlock(NamedTuple):
    """The facts that a thread knows about a block of scores.

    Attributes:
        limits: the ends of its two rows' kept columns, counted as in :class:`ColumnLimits`; None where all columns are kept.
        pairs: the pairs of a query and a key, where there are expressions or dropout.
        words: a bit for each pair of a partial block, where bits say which are kept.
        bias: ALiBi's bias or that of a table by distance, where there is one.
    """

    limits: list | None = None
    pairs: expression.Pairs | None = None
    words: list | None = None
    bias: BlockSlopes | NearLine | FarLine | None = None

    def dropout_keeps(self, acc: cute.Tensor, params: BackwardParams, config: Backward) -> dropout.Kept | None:
        """The pairs of an accumulator that dropout keeps; None without dropout."""
        if not config.dropout:
            return None
        columns = cute.size(rows_columns(acc), mode=[1])
        # Elsewhere too few registers are left for what the draws of all blocks share. Where dP is yet to begin, its registers are free.
        at_once = 3 if config.keys.dp_late else None if config.keys.sums_dq else 1
        return dropout.Kept.of(self.pairs, columns, params, at_once)

    def values(self, config: Backward) -> expression.Values | None:
        """The score and slope of each pair."""
        return None if config.traced == PLAIN else expression.Values(config.traced.trees(), self.pairs)


def pairs_of_block(tile, names: tuple[str, str], row, column, params: BackwardParams) -> expression.Pairs:
    """The pairs of a thread of a warpgroup whose rows begin at ``row``, in the block whose columns begin at ``column``.

    ``names``: what a row and a column are, ``("i", "j")`` or, of a transposed block, ``("j", "i")``.
    """
    thread = cute.arch.thread_idx()[0] % 128
    rows = [row + row_of(thread, r) for r in range(2)]
    return expression.of_block(tile, names, rows, column + column_of(thread, 0), params)


# -- P -------------------------------------------------------------------------------------------------------------


def probabilities(
    s: cute.Tensor, p: cute.Tensor | None, lse2, block: ScoreBlock, params: BackwardParams, config: Backward, kept=None,
    sloped: cute.Tensor | None = None,
) -> None:  # fmt: skip
    """Turns a block of scores into slope · P (fp32); the operand ``p``, unless it is None, gets P, rounded, after dropout.

    ``P = 2**(s scale2 - lse2)``. With a softcap ``s = tanh(..)`` and the slope is ``1 - s²``; a traced score has its own slope;
    otherwise the slope is 1. Pairs outside the block's limits are selected to 0.

    Args:
        s: (2 rows, columns of the thread).
        lse2: function of a thread's row and column; None where S has come with lse subtracted.
        kept: dropout's condition of a thread's row and column; it acts on ``p`` alone, since dS takes it from dP.
        sloped: as ``p``, for slope · P rounded; None where its fp32 numbers are what is wanted.
    """
    if block.bias is not None:
        # The bias joins lse2, of which an exponent takes one number anyway.
        lse2 = block.bias.less(lse2, s)
    # None without expressions; otherwise each node of the trees is computed once for what it depends on.
    values = block.values(config)
    if config.score == "softcap":
        softcap_roughly(s, params.cap2)
    for c in range(0, cute.size(s, mode=[1]), 2):  # an operand's word holds two neighbouring columns
        for r in range(2):
            ends = (None, None) if block.limits is None else [None if end is None else end[r] for end in block.limits]
            points = [score_point(s, r, c + n, values, params, config) for n in range(2)]
            # P is recomputed from lse2: the forward keeps no P.
            pair = [
                probability(point, lse2 and lse2(r, c + n), constant_column(c + n), ends, params)
                for n, point in enumerate(points)
            ]
            if block.words is not None:
                at = r * cute.size(s, mode=[1]) + c
                pair = [choose(bits.is_set(block.words, at + n), pair[n], 0.0) for n in range(2)]
            for n, point in enumerate(points):
                s[r, c + n] = times_slope(pair[n], point, config)
            if sloped is not None:
                words(sloped)[c + r] = pack(s[r, c], s[r, c + 1], config.dtype)
            if p is not None:
                # Dropout acts here on the P that enters dV += Pᵀ dO.
                pair = pair if kept is None else [choose(kept(r, c + n), pair[n], 0.0) for n in range(2)]
                words(p)[c + r] = pack(*pair, config.dtype)


class ScorePoint(NamedTuple):
    """The score of one pair.

    Attributes:
        score: the product q · k, or the tanh of it that a softcap makes, or the traced score.
        slope: the derivative of a traced score; None where it is 1 or the softcap's.
    """

    score: F32
    slope: F32 | None = None


def score_point(
    s: cute.Tensor, r: int, c: int, values: expression.Values | None, params: BackwardParams, config: Backward
) -> ScorePoint:
    """The score of the pair at a thread's row and column."""
    if values is None:
        return ScorePoint(s[r, c])
    # What depends on the column alone is computed for the first row and kept for the second.
    if r == 0:
        values.begin(c, s)
    score, slope = values.at(r, c, s[r, c] * params.scale)
    score = F32(score) if config.traced.score else s[r, c]
    return ScorePoint(score, F32(slope) if config.traced.sloped else None)


def probability(point: ScorePoint, lse2, column: int, ends, params: BackwardParams):
    """``P = 2**(score · scale2 - lse2)``, selected to 0 unless ``ends[0] <= column < ends[1]``; an end that is None is unbounded."""
    # Of a hidden pair it may be infinite: so P is selected to 0, not multiplied by it.
    exponent = point.score * params.scale2
    p = cute.math.exp2(exponent if lse2 is None else exponent - lse2, fastmath=True)
    if ends[0] is not None:
        p = choose(ends[0] <= column, p, 0.0)
    return p if ends[1] is None else choose(ends[1] > column, p, 0.0)


def times_slope(p, point: ScorePoint, config: Backward):
    """slope · P. Where P is 0 the product is selected to 0, since a traced slope may be anything there."""
    if config.score == "softcap" and config.keys.reads_late:
        # As many instructions, but the slope does not lie beside the exponent: one register less for each pair at work.
        return cute.math.fma(-(p * point.score), point.score, p)
    if config.score == "softcap":
        return p * (1.0 - point.score * point.score)
    return p if point.slope is None else choose(p == 0.0, 0.0, p * point.slope)


# -- dS ------------------------------------------------------------------------------------------------------------


def score_gradients(
    dp: cute.Tensor, p: cute.Tensor, delta, kept=None, params: BackwardParams | None = None, by_columns: bool = False
) -> None:
    """Turns a block of dP into dS = (slope · P) (dP - delta), docs/algorithm.md, (13) and (14); fp32.

    Args:
        dp, p: (2 rows, columns of the thread); ``p`` holds slope · P.
        delta: function of a thread's row and column; None where dP has come with delta subtracted.
        kept: dropout's condition, which acts on the dP that enters dS: dP is scaled by 65536 / T where it holds, and 0 elsewhere.
    """
    rows, columns = range(2), range(cute.size(dp, mode=[1]))
    places = [(r, c) for c in columns for r in rows] if by_columns else [(r, c) for r in rows for c in columns]
    for r, c in places:
        # (14), in fp32: dS is rounded once, where it becomes an operand.
        if kept is None:
            dp[r, c] = F32(p[r, c]) * (dp[r, c] if delta is None else dp[r, c] - delta(r, c))
        else:
            difference = cute.math.fma(choose(kept(r, c), dp[r, c], 0.0), params.extra.keep, -delta(r, c))
            dp[r, c] = F32(p[r, c]) * difference
