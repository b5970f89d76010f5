"""Key tiles: which tile of 64 or 128 keys a CTA works on next, and which query blocks its keys see.

A key tile visits the query blocks ``[start, stop)`` of each query head of its group. The keys of one warpgroup see some of these as a
whole and others in part, as :class:`VisibleBlocks` says::

    query blocks of a causal tile      start .. | hidden: not seen | partial: the diagonal | whole ............ | stop
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.params import BackwardParams, column_band, number_band
from tilewise.backends.hopper.backward.parts import Division, PartOfTile, TileShare
from tilewise.backends.hopper.backward.scores import ColumnLimits, ScoreBlock, pairs_of_block, thread_rows
from tilewise.backends.hopper.backward.sequences import (
    BackwardSeqlenInfo,
    PackedSequence,
    nth_planned_tile,
    nth_tile_of_sections,
    seqlen_info,
)
from tilewise.backends.hopper.backward.tiles import KEY_GROUPS, LINE_SLOTS, STATISTICS_ALIGNMENT, PlanRow
from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.kit import bits, packed, schedule
from tilewise.backends.hopper.kit.dtypes import F32, I32
from tilewise.backends.hopper.kit.lines import KeyLine, line_of_head
from tilewise.backends.hopper.kit.scheduler import PICK, TileScheduler, nth_packed_tile
from tilewise.backends.hopper.kit.slopes import RowSlopes
from tilewise.backends.hopper.kit.softmax import LOG2_E
from tilewise.backends.hopper.kit.tiles import column_of

PAST_EVERY_QUERY = 1 << 29  # past every query


class KeyTile(NamedTuple):
    """One tile of keys.

    Attributes:
        column, head, batch: the first key, the key head and the batch index, or the packed sequence. Where ends are tensors,
            :func:`of_query_head` makes ``head`` a query head.
        start, stop: the query blocks ``[start, stop)``; with lists of blocks, steps, of which the first ``partial`` need their bits.
            Where ends are tensors, only :func:`of_query_head` knows them.
        bits: the slot of the bits of the first partial block; those of the others follow.
        seqlen: where the tile's packed sequence lies.
        share: what this CTA has of a tile that CTAs may share; ``start`` and ``stop`` are its own.
    """

    column: I32
    head: I32
    batch: I32
    start: I32
    stop: I32
    seqlen: BackwardSeqlenInfo | None = None
    partial: I32 | None = None
    bits: I32 | None = None
    share: TileShare | None = None

    def query_heads(self, params: BackwardParams):
        """How many query heads of the group the tile visits."""
        return params.group if self.share is None else self.share.heads

    @property
    def keys(self):
        """The place of the rows of k, as :func:`tma_tiles` takes it."""
        return self.batch if self.seqlen is None else self.seqlen.k

    @property
    def rows(self):
        """The place of the rows of q, as :func:`tma_tiles` takes it."""
        return self.batch if self.seqlen is None else self.seqlen.q

    def statistic(self, buffer: cute.Tensor, head, words: int = 1) -> cute.Tensor:
        """The rows of a query head in a buffer of lse2 or delta, which has so many words a row."""
        if self.seqlen is None:
            return buffer[self.batch, head, None]
        first_row = cute.assume(self.seqlen.statistics_row, divby=STATISTICS_ALIGNMENT)
        # Python's own `if`: one word a row costs no multiplication.
        first_word = first_row * words if words > 1 else first_row
        return cute.domain_offset((first_word,), buffer[0, head, None])

    def dq_blocks(self, dq_sums: cute.Tensor, head) -> cute.Tensor:
        """The blocks (block, warpgroup, part) of a query head's accumulated dQ."""
        if self.seqlen is None:
            return dq_sums[self.batch, head, None, None, None]
        return cute.domain_offset((self.seqlen.dq_block, 0, 0), dq_sums[0, head, None, None, None])

    def semaphores(self, semaphores: cute.Tensor, head) -> cute.Tensor:
        """The semaphores (block x warpgroup,) of a query head's accumulated dQ."""
        if self.seqlen is None:
            return semaphores[self.batch, head, None]
        return cute.domain_offset((self.seqlen.dq_block * KEY_GROUPS,), semaphores[0, head, None])


# -- The order of tiles --------------------------------------------------------------------------------------------


def tile_order(params: BackwardParams, config: Backward) -> schedule.Order:
    """The order of all key tiles: the first keys first, since under a causal mask their tiles are the longest; in order, :func:`last_first`
    turns it round."""
    n_blocks = (params.seqlen_k + config.keys.tile_n - 1) // config.keys.tile_n
    return schedule.Order(n_blocks, params.batch * params.heads, params.section, False)


def cta_of(config: Backward):
    """``(cta, ctas)``: this CTA's number in the order of tiles, and how many there are; the two CTAs of a cluster count as one.

    As a second pass, CTAs are numbered backwards: the first CTAs come to multiprocessors that had fewer tiles of the first pass, and
    those are the last in its order.
    """
    size = config.keys.ctas
    n, ctas = cute.arch.block_idx()[0] // size, cute.arch.grid_dim()[0] // size
    return (ctas - 1 - n if config.queries_first else n), ctas


def rounds_of(params: BackwardParams, config: Backward):
    """How many tiles this CTA has."""
    # In two branches, since operations follow one another as they are written: whole tiles keep the program that GPUs have run.
    if not config.parted:
        return schedule.rounds(*cta_of(config), tile_order(params, config).tiles)
    # Parts are dealt out as tiles are, behind those that are whole.
    units = Division.of(params).units(tile_order(params, config).tiles)
    return schedule.rounds(*cta_of(config), units)


def tile_of(round_, params: BackwardParams, config: Backward) -> KeyTile:
    """This CTA's tile in a round."""
    n, order = schedule.nth(*cta_of(config), round_), tile_order(params, config)
    if config.parted:
        n, part = Division.of(params).unit(n)
        return shared(key_tile(*schedule.tile_at(n, order, PICK), params, config), part, params)
    return key_tile(*schedule.tile_at(n, order, PICK), params, config)


def shared(tile: KeyTile, part, params: BackwardParams) -> KeyTile:
    """A part of a tile; its number is negative where the tile is whole."""
    # All roles see a tile with fewer blocks and heads: nothing else tells a part from a tile.
    share = TileShare.of(part, params)
    start, stop = share.cut(tile.start, tile.stop)
    return tile._replace(start=I32(start), stop=I32(stop), share=share)


def key_tile(n_block, head, params: BackwardParams, config: Backward) -> KeyTile:
    """The n-th tile of a head, which counts key heads over all batch elements."""
    column, tiles = n_block * config.keys.tile_n, config.keys
    # Ends in tensors, and lists, differ by query head: of_query_head finds the blocks later.
    if not config.of_numbers:
        return KeyTile(column, head % params.heads, head // params.heads, I32(0), I32(0))
    band = number_band(params, config)
    start, stop = schedule.query_blocks(column, tiles.tile_n, tiles.tile_m, params.seqlen_q, band, PICK)
    return KeyTile(column, head % params.heads, head // params.heads, I32(start), I32(stop))


def queued_tile(
    n, since: packed.Since, params: BackwardParams, config: Backward
) -> tuple[packed.PackedTile | PartOfTile, packed.Since]:
    """The n-th tile of the queue, or part of one, and where the lookup of a later one begins."""
    if not config.parted:
        return packed_tile(n, since, params, config)
    # Past the last part there is no tile either.
    n, part = Division.of(params).unit(n)
    found, since = packed_tile(n, since, params, config)
    return PartOfTile(*found, part), since


def packed_tile(
    n, since: packed.Since, params: BackwardParams, config: Backward
) -> tuple[packed.PackedTile, packed.Since]:
    """The n-th whole tile of the queue, and where the lookup of a later one begins.

    Equal sequences are one, whose rows are the tiles of a head; of packed ones, in each sequence the tiles of the keys that are seen come
    first. Where dQ is added up in order, the tiles of a head or of a sequence come the other way round.
    """
    if not config.packed:
        order = tile_order(params, config)
        if config.form == "bits":
            order = order._replace(section=params.extra.section[0])
        # Every CTA takes one number past the last tile before it ends; there is no head to divide by there.
        n_block, head = schedule.tile_at(PICK.smaller(n, order.tiles - 1), order, PICK)
        if config.form == "bits":
            # Lines of tiles have an order of their own, the same for the query heads of a group.
            n_block = params.extra.work[head // params.heads, head % params.heads * params.group, n_block, 0]
        sequence = I32(cutlass.select_(n < order.tiles, I32(0), I32(-1)))
        found = packed.PackedTile(sequence, I32(n_block), I32(head))
        return last_first(found, lambda: order.m_blocks, params, config), since

    # Two passes up to D 128 have no kernel before them that could plan.
    if config.planned:
        if config.packs_sheet:
            return nth_planned_tile(n, 1, PlanRow.KEY_TILES, params), since
        found = nth_tile_of_sections(n, params)
        count = lambda: tiles_of(PICK.larger(found.sequence, 0), params, config)  # past the last tile there is none  # noqa: E731
        return last_first(found, count, params, config), since
    return nth_packed_tile(n, since, params.heads, lambda n: tiles_of(n, params, config), params.packed.cu_q)


def last_first(
    tile: packed.PackedTile, count: Callable[[], Any], params: BackwardParams, config: Backward
) -> packed.PackedTile:
    """A tile of as many, or, where dQ is added up in order, the one that is as far from the last (docs/decisions.md#hopper-ordered-dq)."""
    if not config.orders:
        return tile
    return tile._replace(row=I32(cutlass.select_(params.extra.ordered != 0, count() - 1 - tile.row, tile.row)))


def tiles_of(n, params: BackwardParams, config: Backward):
    """The number of tiles of the n-th packed sequence."""
    # Keys that nobody sees have tiles of their own: their dK and dV are stored as zeros.
    sequence = PackedSequence.of(n, params, config, rest_k=True)
    return sum(packed.in_tiles(part, config.keys.tile_n) for part in sequence.parts)


def place_queued(tile: PartOfTile, params: BackwardParams, config: Backward) -> tuple[KeyTile, BackwardParams]:
    """A part of a tile of the queue, and the numbers of its sequence."""
    if not config.parted:
        return place_packed(tile, params, config)
    whole, numbers = place_packed(tile, params, config)
    return shared(whole, tile.part, params), numbers


def place_packed(tile: packed.PackedTile, params: BackwardParams, config: Backward) -> tuple[KeyTile, BackwardParams]:
    """A whole tile of the queue, and the numbers of its sequence. Keys that nobody sees have no query blocks."""
    if not config.packed:
        return key_tile(tile.row, tile.head, params, config), params
    tiles, sequence = config.keys, PackedSequence.of(tile.sequence, params, config, rest_k=True)
    numbers, parts = sequence.numbers, sequence.parts
    # The tile's number within the seen keys, within those before, and within those after; a later part where it is not negative.
    before = tile.row - packed.in_tiles(parts[0], tiles.tile_n)
    after = before - packed.in_tiles(parts[1], tiles.tile_n)

    def pick(a, b, c):
        return I32(cutlass.select_(before < 0, a, I32(cutlass.select_(after < 0, b, c))))

    column, k = pick(tile.row, before, after) * tiles.tile_n, packed.Span(*map(pick, *parts))
    band = number_band(numbers, config)
    start, stop = schedule.query_blocks(column, tiles.tile_n, tiles.tile_m, numbers.seqlen_q, band, PICK)
    # Keys before and after those seen: no block, so that their dK and dV are stored as zeros.
    stop = I32(cutlass.select_(before < 0, I32(stop), I32(start)))
    seqlen = seqlen_info(tile.sequence, sequence, k, params, config)
    return KeyTile(column, tile.head, tile.sequence, I32(start), stop, seqlen), numbers


SCHEDULER = TileScheduler(
    rounds_of, tile_of, queued_tile, place_queued, lambda config: config.keys.ctas,
    lambda config: PartOfTile if config.parted else packed.PackedTile,
)  # fmt: skip


# -- Query blocks of a tile ----------------------------------------------------------------------------------------


def of_query_head(tile: KeyTile, g, params: BackwardParams, config: Backward) -> KeyTile:
    """The tile for the g-th query head of its group, or of its share of it, with that head's query blocks."""
    tiles, head = config.keys, tile.head * params.group + (g if tile.share is None else tile.share.first_head + g)
    tile = tile._replace(head=head)
    if config.of_numbers:
        return tile
    if config.form == "bits":
        line = tile.column // tiles.tile_n
        partial, count, first = (params.extra.work[tile.batch, tile.head, line, n] for n in range(1, 4))
        return tile._replace(start=I32(0), stop=count, partial=partial, bits=first)
    band = column_band(tile.batch, tile.head, params, config)
    start, stop = schedule.query_blocks(tile.column, tiles.tile_n, tiles.tile_m, params.seqlen_q, band, PICK)
    return tile._replace(start=I32(start), stop=I32(stop))


def blocks_of_next(tile: KeyTile, params: BackwardParams, config: Backward) -> tuple:
    """The query blocks ``[start, stop)`` of the same query head that the next tile of keys visits; none past the last tile."""
    tiles, column = config.keys, tile.column + config.keys.tile_n
    band = column_band(tile.batch, tile.head, params, config)
    start, stop = schedule.query_blocks(column, tiles.tile_n, tiles.tile_m, params.seqlen_q, band, PICK)
    return start, I32(cutlass.select_(column < params.seqlen_k, I32(stop), 0))


def block_at(tile: KeyTile, n, params: BackwardParams, config: Backward):
    """The n-th query block, or the one that a head's list has at step n."""
    if config.form == "bits":
        return params.extra.blocks[tile.batch, tile.head, tile.column // config.keys.tile_n, n]
    return n


def clamped(n, low, high):
    """The number within ``[low, high]``."""
    return PICK.larger(PICK.smaller(n, high), low)


class VisibleBlocks(NamedTuple):
    """A tile's query blocks as the keys of one warpgroup see them, which begin at ``column``.

    Attributes:
        start, stop: the blocks ``[start, stop)`` are seen as a whole; of the others, what is within ``limits``.
        hidden: of the first ``hidden`` blocks nothing is seen.
        bias: of the tile's query head, where there is one.
        near: with a table by distance: blocks before ``near`` have the bias of its line's first distance, those from ``start`` on that of
            its last one.
    """

    column: I32
    tile: KeyTile
    start: I32
    stop: I32
    limits: ColumnLimits | None
    hidden: I32 | int = 0
    bias: RowSlopes | KeyLine | None = None
    near: I32 | None = None

    def whole_block(self, n, params: BackwardParams, config: Backward) -> ScoreBlock:
        """The n-th of the tile's blocks, or of its list, of which every key is seen by every query."""
        if config.score == "table":
            return ScoreBlock(bias=self.bias.beyond(before=False))
        if not (config.pairs or config.score == "alibi"):
            return ScoreBlock()
        return self._block(n, None, params, config)

    def partial_block(self, n, params: BackwardParams, config: Backward) -> ScoreBlock:
        """The n-th of the tile's blocks, or of its list, of which only what is within the limits, or has a bit, is seen."""
        if config.form == "bits":
            # Two threads of 256 for each key of the tile: the second warpgroup's keys are 64 further.
            thread = 2 * (self.column - self.tile.column) + cute.arch.thread_idx()[0] % 128
            return ScoreBlock(words=bits.words_of(params.extra.bits, self.tile.bits + n, thread))
        return self._block(n, self.limits, params, config)

    def _block(self, n, limits: ColumnLimits | None, params: BackwardParams, config: Backward) -> ScoreBlock:
        """The n-th block, of which what is within the limits is seen; without limits, all of it."""
        # The block's first query.
        first = block_at(self.tile, n, params, config) * config.keys.tile_m
        limits = None if limits is None else limits.within(first)
        pairs = pairs_of_block(self.tile, ("j", "i"), self.column, first, params) if config.pairs else None
        return ScoreBlock(limits, pairs, bias=self.bias and self.bias.within(first))


def visible_blocks(column, tile: KeyTile, params: BackwardParams, config: Backward) -> VisibleBlocks:
    """The blocks that the 64 keys of a warpgroup see, which begin at ``column``."""
    if config.form == "bits":
        return VisibleBlocks(column, tile, tile.partial, tile.stop, None)
    start, stop = whole_blocks(column, tile, params, config)
    limits = limits_of(column, tile, params, config)
    if config.score == "table":
        near, start = far_blocks(column, tile, params, config)
        return VisibleBlocks(column, tile, start, tile.stop, limits, near=near)
    return VisibleBlocks(column, tile, start, stop, limits, hidden_blocks(column, tile, start, params, config))


def whole_blocks(column, tile: KeyTile, params: BackwardParams, config: Backward):
    """``(start, stop)``: the tile's query blocks that see all 64 keys from ``column`` on. Where dQ is accumulated, keys past the last
    one count as unseen."""
    blocks, band = (tile.start, tile.stop), column_band(tile.batch, tile.head, params, config)
    start, stop = schedule.whole_query_blocks(column, ROWS, config.keys.tile_m, band, blocks, PICK)
    if config.keys.sums_dq:
        # No block is whole for a warpgroup that holds keys past the last one.
        stop = start + (stop - start) * clamped(params.seqlen_k - column - ROWS + 1, 0, 1)
    return start, stop


def far_blocks(column, tile: KeyTile, params: BackwardParams, config: Backward):
    """``(near, start)``: the tile's blocks before ``near`` lie before the line's first distance, and those from ``start`` on past its last
    one, for all 64 keys from ``column`` on; both see all of these keys. Keys past the last one leave no such block."""
    first, tile_m = params.extra.start, config.keys.tile_m
    last = first + cute.size(params.extra.line, mode=[1]) - 1
    start = clamped((PICK.larger(column + ROWS - 1 + last, 0) + tile_m - 1) // tile_m, tile.start, tile.stop)
    near = (
        clamped(PICK.larger(column + first + 1, 0) // tile_m, tile.start, start)
        if config.form == "full"
        else tile.start
    )
    whole = clamped(params.seqlen_k - column - ROWS + 1, 0, 1)
    return tile.start + (near - tile.start) * whole, tile.stop - (tile.stop - start) * whole


def hidden_blocks(column, tile: KeyTile, start, params: BackwardParams, config: Backward):
    """How many of a tile's blocks before ``start`` the keys of a warpgroup see nothing of."""
    tiles = config.keys
    if not config.has_upper or tiles.split or tiles.sums_dq or tiles.tile_m >= tiles.tile_n:
        return 0
    # Under the diagonal: the first query that sees the warpgroup's first key.
    first = schedule.query_start(column, column_band(tile.batch, tile.head, params, config), PICK)
    return clamped(first // tiles.tile_m - tile.start, 0, start - tile.start)


def limits_of(column, tile: KeyTile, params: BackwardParams, config: Backward) -> ColumnLimits:
    """The queries that see each of a thread's two keys, in a warpgroup whose keys begin at ``column``. No query sees keys past the last
    one: their P, from scores of 0, may be infinite, and dQ must not meet it."""
    keys = thread_rows(column)
    band = column_band(tile.batch, tile.head, params, config)
    # (2,) each: a thread of Sᵀ holds two keys, its rows.
    lower = [
        schedule.query_start(j, band, PICK) + PAST_EVERY_QUERY * clamped(j - params.seqlen_k + 1, 0, 1) for j in keys
    ]
    upper = [schedule.query_stop(j, params.seqlen_q, band, PICK) for j in keys]
    return ColumnLimits.of(lower, upper if config.has_lower else None)


def blocks_of_group(column, tile: KeyTile, params: BackwardParams, config: Backward) -> VisibleBlocks | None:
    """The visible blocks for all query heads of a group at once; None where each head has its own."""
    return visible_blocks(column, tile, params, config) if config.of_numbers else None


def blocks_of_head(
    blocks: VisibleBlocks | None, column, tile: KeyTile, g, params: BackwardParams, config: Backward
) -> VisibleBlocks:
    """The visible blocks for the g-th query head, where ``blocks`` are those of :func:`blocks_of_group`."""
    tile = of_query_head(tile, g, params, config)
    if not config.of_numbers:
        return visible_blocks(column, tile, params, config)
    if config.score in BIASES:
        blocks = blocks._replace(bias=BIASES[config.score](column, tile.head, params, config))
    return blocks._replace(tile=tile) if config.pairs else blocks


def slopes_of_head(column, head, params: BackwardParams, config: Backward) -> RowSlopes:
    """ALiBi of a query head for a thread's keys. A block's columns are queries, and the bias falls along them: -slope (i + off - j)."""
    start = column_of(cute.arch.thread_idx()[0] % 128, 0)
    # Key j has distance 0 from query j - (hi - 1): the band ends with each query's own place.
    return RowSlopes(
        -params.extra.slopes[head] * LOG2_E, [F32(j - start - (params.hi - 1)) for j in thread_rows(column)]
    )


def key_line(column, head, params: BackwardParams, config: Backward) -> KeyLine:
    """The biases by distance of a query head for a thread's keys, and where their gradients are added up: CTAs have several places, so that
    few of them add to one number at a time."""
    extra, (key, _) = params.extra, thread_rows(column)
    sums = extra.dbias[cute.arch.block_idx()[0] % LINE_SLOTS, head, None]
    at = column_of(cute.arch.thread_idx()[0] % 128, 0) - key - extra.start
    line = line_of_head(extra.line, head)
    return KeyLine(line, at, sums, [line[cute.size(line) - 1], *([line[0]] if config.form == "full" else [])])


BIASES = {
    "alibi": slopes_of_head,
    "table": key_line,
}  # a score's bias for a thread's keys; that of pairs comes block by block
