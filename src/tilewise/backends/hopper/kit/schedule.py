"""The tiles of a CTA, the key blocks of a tile, and the order of the ring, as pure functions.

The kernel traces these very functions, so that tests on a CPU test what runs. They use ``+ - * // %`` alone, and take the
smaller and the larger of two numbers from :class:`Pick`, which the kernel exchanges for its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Pick(NamedTuple):
    """The smaller and the larger of two numbers."""

    smaller: Callable[[Any, Any], Any] = min
    larger: Callable[[Any, Any], Any] = max


PLAIN = Pick()


class Order(NamedTuple):
    """The order of all query tiles, in sections of ``section`` heads.

    Sections follow one another, so that few keys are in use at a time and L2 holds them. A section has all heads of a row of
    tiles, then the next row; the longest rows come first if ``backwards``.

    ``heads`` is the number of query heads of all batch elements; the last section may be smaller.
    """

    m_blocks: Any
    heads: Any
    section: Any
    backwards: bool

    @property
    def tiles(self):
        return self.m_blocks * self.heads


def tile_at(n, order: Order, pick: Pick = PLAIN):
    """``(m_block, head)`` of the ``n``-th tile, ``head`` over batch and query heads."""
    per_section = order.m_blocks * order.section
    first = n // per_section * order.section
    # The last section has the heads that are left, so its rows of tiles are shorter.
    within, heads = n % per_section, pick.smaller(order.section, order.heads - first)
    m_block = within // heads
    # Heads change fastest: CTAs that are at work together have tiles of about the same length.
    return (order.m_blocks - 1 - m_block if order.backwards else m_block), first + within % heads


def rounds(cta, ctas, tiles):
    """How many tiles a CTA gets: one a round, the last round in the direction that :func:`nth` gives it."""
    whole, rest = tiles // ctas, tiles % ctas
    place = nth(cta, ctas, whole) - whole * ctas
    # The quotient is 1 for the places of the last round that have no tile: arithmetic, because a branch would be
    # traced.
    return whole + 1 - (place + ctas - rest) // ctas


def nth(cta, ctas, round_):
    """The tile of a CTA in a round.

    Rounds go to and fro, so that the CTA with the longest tile of one round gets the shortest of the next.
    """
    # 1 in the rounds that go back: cta then becomes ctas - 1 - cta.
    back = round_ % 2
    return round_ * ctas + cta + back * (ctas - 1 - 2 * cta)


class Band(NamedTuple):
    """The kept keys of row i are ``i + lo <= j < i + hi`` within ``0 <= j < seqlen_k``; an end that is None is unbounded.

    An end may be a function of i as well, which never decreases; it is then the end itself. Read by columns such a band has
    instead ``first`` and ``last``, functions of j: queries ``first(j) <= i < last(j)`` see key j.
    """

    lo: Any
    hi: Any
    seqlen_k: Any
    first: Callable[[Any], Any] | None = None
    last: Callable[[Any], Any] | None = None


def row_stop(i, band: Band, pick: Pick = PLAIN):
    """One past the last key of row i, not below 0."""
    # Limited to the length first: the end of a row before the first key is negative, and 0 has to win.
    return band.seqlen_k if band.hi is None else pick.larger(pick.smaller(_end(i, band.hi), band.seqlen_k), 0)


def row_start(i, band: Band, pick: Pick = PLAIN):
    """The first key of row i, not below 0."""
    return 0 if band.lo is None else pick.larger(_end(i, band.lo), 0)


def _end(i, end):
    return end(i) if callable(end) else i + end


def cut(band: Band, first, last, seqlen_q, pick: Pick = PLAIN):
    """``(start, band)`` of the keys within ``[first, last)`` that some of ``seqlen_q`` rows may see: the band counts from
    ``start`` on, to the last of them."""
    stop = pick.smaller(last, band.seqlen_k)
    if band.hi is not None:
        # Ends never decrease, so the last row's is the latest.
        stop = pick.smaller(stop, seqlen_q - 1 + band.hi)
    stop = pick.larger(stop, 0)
    # Not past `stop`, so that the size of what is left is never negative.
    start = pick.smaller(first if band.lo is None else pick.larger(first, band.lo), stop)
    lo, hi = (None if end is None else end - start for end in (band.lo, band.hi))
    return start, Band(lo, hi, stop - start)


def key_blocks(row, rows, tile_n, band: Band, pick: Pick = PLAIN):
    """``(start, stop)``: the key blocks of a tile of rows ``[row, row + rows)``, at least one even if its rows see no key.

    They are visited from ``stop - 1`` down to ``start``.
    """
    # The last row has the latest end, the first row the earliest start. One block at least: it is the one that sets m
    # and l.
    stop = pick.larger((row_stop(row + rows - 1, band, pick) + tile_n - 1) // tile_n, 1)
    return pick.smaller(row_start(row, band, pick) // tile_n, stop - 1), stop


def seen_blocks(row, rows, tile_n, band: Band, pick: Pick = PLAIN):
    """``(start, stop)``: the key blocks of which rows ``[row, row + rows)`` see a key; possibly none. Those are blocks that
    :func:`query_blocks` has the rows for, if tiles of rows are multiples of ``rows``."""
    stop = (row_stop(row + rows - 1, band, pick) + tile_n - 1) // tile_n
    start = row_start(row, band, pick)
    # A row that begins past the last key, within the last block, sees nothing of that block.
    past = pick.smaller(pick.larger(start - band.seqlen_k + 1, 0), 1)
    return pick.smaller(start // tile_n + past, stop), stop


def split_blocks(blocks, splits):
    """How many blocks a split has, the last one fewer."""
    return (blocks + splits - 1) // splits


def within_split(blocks, split, size, pick: Pick = PLAIN):
    """``(start, stop)`` of those of the blocks that lie in a split of ``size`` blocks; one of the split's if none does."""
    start, stop = blocks
    first = split * size
    # A split in which the tile sees nothing still visits a block, hidden, so that it writes a state: o = 0, lse = -inf.
    stop = pick.larger(pick.smaller(stop, first + size), first + 1)
    return pick.smaller(pick.larger(start, first), stop - 1), stop


def whole_blocks(row, rows, tile_n, band: Band, blocks, pick: Pick = PLAIN):
    """``(start, stop)``: the blocks that rows ``[row, row + rows)`` see entirely, within ``blocks``; possibly none.

    The rows may be a part of those that ``blocks`` was made for.
    """
    start, last = blocks
    # All rows see what the first row's end and the last row's start leave; the quotients are rounded inwards.
    stop = pick.larger(pick.smaller(row_stop(row, band, pick) // tile_n, last), start)
    first = (row_start(row + rows - 1, band, pick) + tile_n - 1) // tile_n
    return pick.smaller(pick.larger(first, start), stop), stop


def hidden_blocks(row, rows, tile_n, band: Band, blocks, pick: Pick = PLAIN):
    """How many of the blocks, from the last on, rows ``[row, row + rows)`` see nothing of; one of all is left at least."""
    start, stop = blocks
    seen = (row_stop(row + rows - 1, band, pick) + tile_n - 1) // tile_n
    return stop - pick.smaller(pick.larger(seen, start + 1), stop)


def query_start(j, band: Band, pick: Pick = PLAIN):
    """The first query that sees key j, not below 0."""
    if band.first is not None:
        return band.first(j)
    # j < i + hi turned round: i >= j - hi + 1.
    return 0 if band.hi is None else pick.larger(j - band.hi + 1, 0)


def query_stop(j, seqlen_q, band: Band, pick: Pick = PLAIN):
    """One past the last query that sees key j, not below 0."""
    if band.last is not None:
        return band.last(j)
    # i + lo <= j turned round: i < j - lo + 1.
    return seqlen_q if band.lo is None else pick.larger(pick.smaller(j - band.lo + 1, seqlen_q), 0)


def query_blocks(column, columns, tile_m, seqlen_q, band: Band, pick: Pick = PLAIN):
    """``(start, stop)``: the query blocks that see a key in ``[column, column + columns)``; possibly none.

    They are visited from ``start`` on: under a causal mask, the ones that straddle the diagonal come first.
    """
    # Columns past the last key are zeros that no query sees; the last key has the latest end.
    last = pick.smaller(column + columns, band.seqlen_k) - 1
    stop = (query_stop(last, seqlen_q, band, pick) + tile_m - 1) // tile_m
    return pick.smaller(query_start(column, band, pick) // tile_m, stop), stop


def whole_query_blocks(column, columns, tile_m, band: Band, blocks, pick: Pick = PLAIN):
    """``(start, stop)``: the query blocks that see all keys of ``[column, column + columns)``, within ``blocks``; possibly none.

    Queries and keys past the last count as those that see and are seen: they are zeros, and what becomes of them is dropped.
    """
    start, last = blocks
    stop = last
    if band.last is not None:
        stop = pick.smaller(band.last(column) // tile_m, last)
    elif band.lo is not None:
        stop = pick.smaller(pick.larger(column - band.lo + 1, 0) // tile_m, last)
    first = (query_start(column + columns - 1, band, pick) + tile_m - 1) // tile_m
    first = pick.smaller(pick.larger(first, start), last)
    return first, pick.larger(stop, first)


def heads_at_once(blocks, heads, room, pick: Pick = PLAIN):
    """How many of the heads a launch has where each has so many blocks: as many as fit into the room, and one at least, so that all
    launches have about as many."""
    most = pick.smaller(pick.larger(room // pick.larger(blocks, 1), 1), heads)
    launches = (heads + most - 1) // most
    return (heads + launches - 1) // launches


def advance(index, phase, stages, step=1):
    """The ``(index, phase)`` of a ring of ``stages``, ``step`` stages later, at most a round; the phase turns at each round.

    Between two products everything waits for this: a sign bit takes three instructions, a division fifteen.
    """
    # 1 where index + step is past the last stage: the difference is then negative.
    turned = ((stages - 1 - index - step) >> 31) & 1
    return index + step - turned * stages, phase ^ turned


def loads(blocks: int) -> list[tuple[str, int]]:
    """The order in which keys and values of the blocks of one tile pass through the ring; the kernel's loops follow it.

    The scores of a block are begun before the product with the values of the block before.
    """
    order = [("k", 0)]
    for n in range(1, blocks):
        order += [("k", n), ("v", n - 1)]
    return [*order, ("v", blocks - 1)]
