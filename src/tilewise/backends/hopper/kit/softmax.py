"""The online softmax of one block of scores, in registers (FlashAttention-2, algorithm 1, lines 8 to 15).

Scores S are a view (2 rows, columns) of an fp32 accumulator of 64 rows (:mod:`tilewise.backends.hopper.kit.tiles`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.capped import LEVELS, by_level
from tilewise.backends.hopper.kit.dtypes import F32, I32
from tilewise.backends.hopper.kit.instructions import (
    after,
    choose,
    clamp,
    common_bits,
    held,
    keep_above,
    reaches_two,
    rough_tanh,
)
from tilewise.backends.hopper.kit.lines import BlockLine
from tilewise.backends.hopper.kit.pair_bias import BlockBias
from tilewise.backends.hopper.kit.slopes import BlockSlopes
from tilewise.backends.hopper.kit.tiles import constant_column, reduce_quad, rows_columns

LAZY = 8.0  # in base 2: how far a row's maximum may fall behind before O is rescaled
MOST = 2.0**15  # the largest sum that a thread's part of a row may reach over a steady block: fp16 ends at 65504
# Where rows have one order of sums. Sums up to MOST say there that no score is above the maximum by more than LAZY, however it was rounded:
# a block that takes no maxima has the bits of one that does, and which rows are beside a row changes nothing. Maxima may fall further
# behind, since a row that is between both limits has its blocks repeated for as long as it is (docs/decisions.md#hopper-one-order).
LAZY_IN_ONE_ORDER, MOST_IN_ONE_ORDER = 14.0, 2.0**13
LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)
INF = float("inf")


# -- Scores --------------------------------------------------------------------------------------------------------


def mask_scores(s: cute.Tensor, lower, upper) -> None:
    """Sets scores to -inf outside ``lower[r] <= constant_column(c) < upper[r]``; an end that is None is unbounded."""
    for r in range(2):
        for c in range(cute.size(s, mode=[1])):
            column, kept = constant_column(c), s[r, c]
            if upper is not None:
                kept = choose(upper[r] > column, kept, -INF)
            if lower is not None:
                kept = choose(lower[r] <= column, kept, -INF)
            s[r, c] = kept


# tanh(x) = x P(x²) / Q(x²) for |x| <= SATURATED, right to 2e-8 (a least-squares fit with Lawson's weights), lowest power first.
SATURATED = 9.0
NUMERATOR = (0.999999979, 0.133810469, 0.00349561289, 2.06094677e-05, 1.33551511e-08)
DENOMINATOR = (1.0, 0.467143625, 0.0258770777, 0.000328567438, 7.77676821e-07)
# Of z = 2 x / SMALL, tanh(x) = LEADING z (v³ + CUBIC[1] v + CUBIC[2]) with v = z² + CUBIC[0] for |z| < 2: a polynomial of degree 3 in x²
# whose shift leaves no square, so that it takes three multiply-adds, right to 3e-8.
SMALL = 0.33
CUBIC = (-32.9175248, 5837.73825, -773667.025)
LEADING = -1.64753008e-07
# Of z = 2 x / MIDDLE, tanh(x) = z P(z²) for |z| < 2, right to 3e-8.
MIDDLE = 0.75
QUINTIC = (0.374999989, -0.0175779275, 0.000988181653, -5.56298534e-05, 2.87182773e-06, -9.72614647e-08)
QUOTIENT_COLUMNS = 4  # of a thread, whose quotients are computed at once
MARGIN = 1.25
"""By which the largest score of later blocks may exceed that of a tile's first, where a warp begins: of normal scores 1.2 after 4,096
keys, 1.3 after 16,384."""
PATIENCE, CARE = 256, 64
"""The blocks after which a shorter polynomial is tried again, and those with votes before (:func:`capped_powers`)."""


def polynomial(u, coefficients: tuple):
    """The polynomial's value at ``u`` by Horner's rule; the lowest power's coefficient is first."""
    total = coefficients[-1]
    for c in coefficients[-2::-1]:
        total = total * u + c
    return total


class Capped(NamedTuple):
    """A softcap's numbers for :func:`softcap`; with ``levels``, the polynomials of :func:`capped_powers`, ``wait``, (1,) int32, counts the
    blocks until a shorter one of them is taken."""

    cap2: F32
    together: int
    levels: list | None = None
    wait: cute.Tensor | None = None


class ShortTanh(NamedTuple):
    """``scale2 tanh(score / cap) = score P(v)`` with ``v = score² - limit``, for ``v <= 0`` (:mod:`tilewise.backends.hopper.capped`)."""

    limit: F32
    coefficients: tuple

    @classmethod
    def of(cls, numbers: tuple) -> list[ShortTanh]:
        """The polynomials of a launch's numbers."""
        return [cls(limit, coefficients) for limit, coefficients in by_level(numbers)]


def softcap(s: cute.Tensor, cap2, scale2, together: int, below=None, beyond=None) -> None:
    """Turns scores into ``t = scale2 tanh(score / cap)``, with ``cap2 = 2 log2(e) softmax_scale / cap``, or into ``2**(t - below[r])``.

    The relative error of tanh is about 3e-7 at most, since lse shows it: ``1 - 2 / (1 + 2**(s cap2))`` errs by 6e-8 whatever the score's
    size, which times a cap of 30 is too much, and ``tanh.approx`` by 5e-4 (docs/decisions.md#hopper-softcap). A polynomial where all
    scores of a warp's columns are small takes 6 instructions and none of the special function unit, which the softmax needs too.

    Args:
        together: the most columns of a thread that decide together how their tanh is computed.
        beyond: (1,) int32, if given: becomes 1 where not all of the warp's |score / cap| are below MIDDLE.
    """
    columns = cute.size(s, mode=[1])
    count = -(-columns // -(-columns // together))
    for first in range(0, columns, count):
        softcap_columns(s, first, min(first + count, columns), cap2 * (LN_2 / SMALL), scale2, below, beyond)


@cute.jit
def softcap_columns(s: cute.Tensor, first: cutlass.Constexpr, last: cutlass.Constexpr, step, scale2, below, beyond):
    """:func:`softcap` of columns ``first`` to ``last``: no lane leaves its warp, which would then run both ways."""
    multiply(s, first, last, step)
    if cute.arch.vote_any_sync(reaches_two(values_of(s, first, last))):
        if cute.arch.vote_any_sync(reaches_two([z * (SMALL / MIDDLE) for z in values_of(s, first, last)])):
            if cutlass.const_expr(beyond is not None):
                beyond[0] = I32(1)
            cap_any(s, first, last, scale2, below)
        else:
            cap_middle(s, first, last, scale2, below)
    else:
        cap_small(s, first, last, scale2, below)


def values_of(s: cute.Tensor, first: int, last: int) -> list:
    """The numbers of some columns."""
    return [s[r, c] for c in range(first, last) for r in range(2)]


def multiply(s: cute.Tensor, first: int, last: int, factor) -> None:
    """Multiplies some columns by a factor."""
    for c in range(first, last):
        for r in range(2):
            s[r, c] = s[r, c] * factor


def scaled_or_power(tanh, scale2, r: int, below):
    """The score in base 2 of a tanh, which ``scale2`` takes there, or with ``below`` its exponential."""
    # A subtraction alone would be moved behind the branches; an exponential among multiply-adds keeps both units busy.
    return tanh * scale2 if below is None else cute.math.exp2(cute.math.fma(tanh, scale2, -below[r]), fastmath=True)


def cap_small(s: cute.Tensor, first: int, last: int, scale2, below) -> None:
    """:func:`softcap` of columns of ``z = 2 x / SMALL``, all of them below 2."""
    shift, linear, constant = CUBIC
    factor = scale2 * LEADING
    for c in range(first, last):
        for r in range(2):
            z = s[r, c]
            v = z * z + shift
            s[r, c] = scaled_or_power(z * ((v * v + linear) * v + constant), factor, r, below)


def cap_middle(s: cute.Tensor, first: int, last: int, scale2, below) -> None:
    """:func:`softcap` of columns of ``z = 2 x / SMALL``, where x is below MIDDLE."""
    for c in range(first, last):
        for r in range(2):
            z = s[r, c] * (SMALL / MIDDLE)
            s[r, c] = scaled_or_power(z * polynomial(z * z, QUINTIC), scale2, r, below)


def cap_any(s: cute.Tensor, first: int, last: int, scale2, below) -> None:
    """:func:`softcap` of columns of ``z = 2 x / SMALL``, where x is any number."""
    scale = held(SMALL / 2)
    for c in range(first, last):
        # The next columns wait for these: the quotients of all columns at once would take too many registers.
        if (c - first) % QUOTIENT_COLUMNS == 0 and c > first:
            scale = after(scale, s[1, c - 1])
        for r in range(2):
            # Beyond SATURATED tanh is 1 in fp32, and the polynomials are no longer its fit.
            x = clamp(s[r, c] * scale, SATURATED)
            u = x * x
            tanh = x * polynomial(u, NUMERATOR) * cute.arch.rcp_approx(polynomial(u, DENOMINATOR))
            s[r, c] = scaled_or_power(tanh, scale2, r, below)


@cute.jit
def capped_powers(
    s: cute.Tensor, scale2, below: tuple, capped: cutlass.Constexpr, totals: cute.Tensor, level: cutlass.Constexpr
):
    """Turns a steady block's scores into ``2**(scale2 tanh(score / cap) - below[r])``, and writes the sums of rows to ``totals``.

    A warp takes its scores to be as small as those of the blocks before: it votes no more, which all its instructions would wait for.
    Where one is not, a power becomes infinite, the block's sums say that it has to be computed once more, and the next blocks are computed
    by the next polynomial, or with votes. ``level`` is the first polynomial that may do.
    """
    wait = capped.wait
    if cutlass.const_expr(level == len(LEVELS)):
        # Votes are the one way that is right for any score, so it is also where a warp finds out that scores have become small.
        beyond = cute.make_rmem_tensor((1,), I32)
        beyond[0] = I32(0)
        softcap(s, capped.cap2, scale2, capped.together, below, beyond)
        wait[0] = cutlass.select_(beyond[0] == 0, wait[0] - 1, I32(first_of(level)))
        for r in range(2):
            totals[r] = row_sum(s, r)
    # All lanes go one way: a warp whose lanes part runs both. This vote is of what earlier blocks left, so nothing waits for it.
    elif cute.arch.vote_any_sync(wait[0] > level * PATIENCE):
        capped_powers(s, scale2, below, capped, totals, level + 1)
    else:
        small = cap_shortly(s, capped.levels[level], below)
        # A thread may wait for less than its warp does.
        left = cutlass.select_(wait[0] > 0, wait[0] - 1, I32(0))
        wait[0] = cutlass.select_(small, left, I32(first_of(level + 1)))
        for r in range(2):
            totals[r] = row_sum(s, r)


def first_of(level: int) -> int:
    """The ``wait`` of threads for which polynomials before ``level`` do not hold; none does for the last level, and votes are needed."""
    return level * PATIENCE if level < len(LEVELS) else (level - 1) * PATIENCE + CARE


def cap_shortly(s: cute.Tensor, tanh: ShortTanh, below: tuple):
    """:func:`capped_powers` of scores that are taken to be small; returns whether all of the thread's are."""
    # The signs of all v go into one word: half an instruction a score, where a comparison each would take as much as a coefficient.
    word = I32(-1)
    for c in range(cute.size(s, mode=[1])):
        v = [s[r, c] * s[r, c] - tanh.limit for r in range(2)]
        word = common_bits(word, *v)
        for r in range(2):
            t = cute.math.fma(s[r, c], polynomial(v[r], tanh.coefficients), -below[r])
            s[r, c] = cute.math.exp2(t, fastmath=True)
    # An infinite sum is what a steady block asks about anyway; one power of a thread will do, since the warps answer together.
    s[0, 0] = choose(word < 0, s[0, 0], INF)
    return word < 0


def first_wait(rows: SoftmaxState, scale2) -> I32:
    """The ``wait`` of :class:`Capped` where row maxima are new: somewhat larger scores are expected, if that leaves a polynomial."""
    largest = cute.arch.fmax(rows.m2[0], rows.m2[1])
    wait = I32(first_of(len(LEVELS)))
    for n in reversed(range(len(LEVELS))):
        # Beyond the last polynomial every block votes, which costs more than the block now and then that is computed once more.
        margin = MARGIN if n + 1 < len(LEVELS) else 1.0
        wait = cutlass.select_(largest < scale2 * (math.tanh(LEVELS[n].reach) / margin), I32(first_of(n)), wait)
    return wait


def softcap_roughly(s: cute.Tensor, cap2) -> None:
    """Turns scores into ``tanh(score / cap)`` by one instruction, whose relative error of 2e-4 to 5e-4 is less than that which rounding a
    score to 16 bits makes: enough for P and the slope of a backward."""
    for r in range(2):
        for c in range(cute.size(s, mode=[1])):
            s[r, c] = rough_tanh(s[r, c] * (cap2 * (LN_2 / 2)))


# -- State of the rows ---------------------------------------------------------------------------------------------


class SoftmaxState(NamedTuple):
    """The softmax state of a thread's two rows, each (2,) fp32.

    ``m2`` is the maximum of the scores in base 2, ``l`` the thread's own part of the row sum, and ``factor`` scales O to the
    maximum of the last block.
    """

    m2: cute.Tensor
    l: cute.Tensor
    factor: cute.Tensor


def new_state() -> SoftmaxState:
    """A state whose registers hold nothing yet; the first block writes m2 and l."""
    return SoftmaxState(*(cute.make_rmem_tensor((2,), F32) for _ in range(3)))


def row_max(s: cute.Tensor, r: int):
    """The maximum of a thread's part of row r, in four chains for latency."""
    # A chain has a quarter of the columns: one fmax need not wait for the one before.
    columns = cute.size(s, mode=[1])
    chains = [s[r, n] for n in range(4)]
    for c in range(4, columns):
        chains[c % 4] = cute.arch.fmax(chains[c % 4], s[r, c])
    return cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))


def row_sum(s: cute.Tensor, r: int):
    """The sum of a thread's part of row r, in two chains for latency."""
    sums = [F32(0.0), F32(0.0)]
    for c in range(cute.size(s, mode=[1])):
        sums[c % 2] = sums[c % 2] + s[r, c]
    return sums[0] + sums[1]


def lazy_of(tiles) -> float | None:
    """By how much a row's maximum may fall behind before it moves on, of :class:`tilewise.backends.hopper.forward.tiles.Tiles`; None: not
    at all."""
    return (LAZY_IN_ONE_ORDER if tiles.segment else LAZY) if tiles.lazy else None


def most_of(tiles) -> float:
    """The largest sum for which the maxima of earlier blocks serve, of the same tiles."""
    return MOST_IN_ONE_ORDER if tiles.segment else MOST


def online_softmax(s: cute.Tensor, rows: SoftmaxState, scale2, first: bool, masked: bool, lazy: float | None) -> None:
    """Turns a block's scores ``s`` into P, unnormalised, and moves the rows' state on, in base 2.

    ``m' = max(m, max_j s scale2)``, ``P = 2**(s scale2 - m')``, ``factor = 2**(m - m')``, ``l = l factor + sum_j P``
    (FlashAttention-2, algorithm 1, lines 8 to 10). With ``lazy``, m stays, and the factor is 1, where the maximum grew by no more
    than that: P is then at most ``2**lazy``.

    Args:
        first: whether this is a tile's first block: there is no m yet.
        masked: whether a row may still be without a key.
    """
    for r in range(2):
        # The four lanes of a quad hold a row; with a positive scale the maximum may be scaled after it is found.
        m2 = reduce_quad(row_max(s, r), cute.arch.fmax) * scale2
        if not first:
            m2 = cute.arch.fmax(m2, rows.m2[r])
            if lazy is not None:
                m2 = choose(m2 - rows.m2[r] > lazy, m2, rows.m2[r])
        # A row without a key so far: 0 in place of -inf, and every P is 2**-inf = 0.
        base = choose(m2 == -INF, 0.0, m2) if masked else m2
        sums = [F32(0.0), F32(0.0)]
        for c in range(cute.size(s, mode=[1])):
            # One multiply-add and one exponential a score.
            p = cute.math.exp2(s[r, c] * scale2 - base, fastmath=True)
            s[r, c] = p
            sums[c % 2] = sums[c % 2] + p
        total = sums[0] + sums[1]
        if not first:
            factor = cute.math.exp2(rows.m2[r] - base, fastmath=True)
            # l stays the thread's own part: `finalize` sums it over the quad, once a tile.
            total = rows.l[r] * factor + total
            rows.factor[r] = factor
        rows.l[r], rows.m2[r] = total, m2


def steady_softmax(
    s: cute.Tensor, rows: SoftmaxState, scale2, bias: BlockSlopes | BlockLine | BlockBias | None, capped: Capped | None
) -> list:
    """Turns a block's scores into ``P = 2**(s scale2 - m)`` with the maxima m of the blocks before.

    Softmax is the same for any m with which P does not overflow. Without this block's maxima a quarter of the instructions are
    left out, and nothing waits for them. The sums tell whether m served (MOST).

    Args:
        bias: of the scores, where they have one.
        capped: of a softcap which the scores are yet to pass; None without one.

    Returns:
        The thread's part of each row's sum.
    """
    if capped and capped.levels:
        totals = cute.make_rmem_tensor((2,), F32)
        capped_powers(s, scale2, (rows.m2[0], rows.m2[1]), capped, totals, 0)
        return [totals[0], totals[1]]
    if capped:
        softcap(s, capped.cap2, scale2, capped.together, (rows.m2[0], rows.m2[1]))
    totals = []
    for r in range(2):
        sums, columns = [F32(0.0), F32(0.0)], cute.size(s, mode=[1])
        below = bias and bias.below(rows.m2[r], r, columns)
        for c in range(columns):
            if not capped:
                s[r, c] = cute.math.exp2(s[r, c] * scale2 - (below[c] if below else rows.m2[r]), fastmath=True)
            sums[c % 2] = sums[c % 2] + s[r, c]
        totals.append(sums[0] + sums[1])
    return totals


def hold_exponentials(word, rows: SoftmaxState) -> None:
    """Keeps every exponential of a block above the wait that follows, so that P V runs under the softmax."""
    keep_above(word, rows.l[0] + rows.l[1])


def scale_rows(o: cute.Tensor, factor) -> None:
    """Multiplies O, as (2 rows, columns), by a factor for each of the two rows."""
    for r in range(2):
        for c in range(cute.size(o, mode=[1])):
            o[r, c] = o[r, c] * factor[r]


@cute.jit
def rescale(acc: cute.Tensor, factor: cute.Tensor, lazy: cutlass.Constexpr):
    """Multiplies the accumulator of O by the rows' factors; with ``lazy``, a warp whose factors are all 1 does nothing."""
    if cutlass.const_expr(lazy):
        # The lanes of a warp hold 16 rows; the branch must be the same for all of them.
        if cute.arch.vote_any_sync(factor[0] * factor[1] != 1.0):
            scale_rows(rows_columns(acc), factor)
    else:
        scale_rows(rows_columns(acc), factor)


def finalize(rows: SoftmaxState, sinks: list) -> tuple[list, list]:
    """``(factor, lse)`` of the two rows: the factor that normalises O, and the natural log-sum-exp.

    A row's sink, a logit without a value, is one more term of the sum; -inf means that there is none. A row without a key gets
    factor 0 and its sink as lse.
    """
    factors, lses = [], []
    for r in range(2):
        sink2 = F32(sinks[r]) * LOG2_E
        l = reduce_quad(rows.l[r], lambda x, y: x + y)
        m2 = cute.arch.fmax(rows.m2[r], sink2)
        # Neither a key nor a sink: -inf - -inf would be NaN.
        base = choose(m2 == -INF, 0.0, m2)
        scaled = cute.math.exp2(rows.m2[r] - base, fastmath=True)
        total = l * scaled + cute.math.exp2(sink2 - base, fastmath=True)
        factors.append(choose(total == 0.0, 0.0, scaled * cute.arch.rcp_approx(total)))
        lses.append(choose(l == 0.0, F32(sinks[r]), (base + cute.math.log2(total, fastmath=True)) * LN_2))
    return factors, lses
