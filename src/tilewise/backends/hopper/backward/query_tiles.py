"""Query tiles of the backward: which tile a CTA works on next, and which key blocks its rows see.

A query tile visits its key blocks from the last one, ``stop - 1``, down to ``start``. The rows of one warpgroup see some of these as a
whole and others in part::

    key blocks of a causal tile, in the order of visits     hidden: not seen | partial: the diagonal | whole ............
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.params import BackwardParams, number_band, row_band
from tilewise.backends.hopper.backward.scores import ColumnLimits, ScoreBlock, pairs_of_block, thread_rows
from tilewise.backends.hopper.backward.sequences import PackedSequence, nth_planned_tile, seqlen_info
from tilewise.backends.hopper.backward.tiles import PlanRow
from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.kit import packed, schedule
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.scheduler import PICK, TileScheduler, nth_packed_tile
from tilewise.backends.hopper.kit.tiles import QueryTile

# -- The order of tiles --------------------------------------------------------------------------------------------


def tile_order(params: BackwardParams, config: Backward) -> schedule.Order:
    """The order of all query tiles: the last rows first, since under a causal mask their tiles are the longest."""
    m_blocks = (params.seqlen_q + config.queries.tile_m - 1) // config.queries.tile_m
    return schedule.Order(m_blocks, params.batch * params.heads * params.group, params.section, config.form != "full")


def cta_of(config: Backward):
    """``(cta, ctas)``: this CTA's number in the order of tiles, and how many there are; those of a cluster count as one."""
    size = config.queries.ctas
    return cute.arch.block_idx()[0] // size, cute.arch.grid_dim()[0] // size


def rounds_of(params: BackwardParams, config: Backward):
    """How many tiles this CTA has."""
    return schedule.rounds(*cta_of(config), tile_order(params, config).tiles)


def number_of(round_, params: BackwardParams, config: Backward) -> tuple:
    """``(m_block, head)`` of this CTA's tile in a round; the head counts over all batch elements."""
    n = schedule.nth(*cta_of(config), round_)
    return schedule.tile_at(n, tile_order(params, config), PICK)


def tile_of(round_, params: BackwardParams, config: Backward) -> QueryTile:
    """This CTA's tile in a round."""
    m_block, head = number_of(round_, params, config)
    tiles, heads = config.queries, params.heads * params.group
    # Ends in tensors are read per batch element and head.
    if config.by_rows:
        return tile_with_own_ends(m_block, head % heads, head // heads, params, config)
    row = m_block * tiles.tile_m
    start, stop = schedule.key_blocks(row, tiles.tile_m, tiles.tile_n, number_band(params, config), PICK)
    return QueryTile(row, head % heads, head // heads, I32(start), I32(stop))


def tile_with_own_ends(m_block, head, batch, params: BackwardParams, config: Backward) -> QueryTile:
    """A tile of a head whose rows' ends are tensors."""
    row = m_block * config.queries.tile_m
    band = row_band(batch, head, params, config)
    start, stop = schedule.key_blocks(row, config.queries.tile_m, config.queries.tile_n, band, PICK)
    return QueryTile(row, head, batch, I32(start), I32(stop))


def packed_tile(
    n, since: packed.Since, params: BackwardParams, config: Backward
) -> tuple[packed.PackedTile, packed.Since]:
    """The n-th tile of packed sequences, and where the lookup of a later one begins; in each sequence the longest tiles come first.

    ``head`` counts the parts of dQ's columns, where tiles share these.
    """
    if config.packs_sheet:
        found = nth_planned_tile(n, params.group * config.queries.parts, PlanRow.QUERY_TILES, params)
    else:
        heads = params.heads * params.group * config.queries.parts
        found, since = nth_packed_tile(n, since, heads, lambda n: tiles_of(n, params, config), params.packed.cu_q)
    # Under a causal mask the last rows of a sequence see most: they come first.
    if config.form == "full":
        return found, since
    return found._replace(row=tiles_of(PICK.larger(found.sequence, 0), params, config) - 1 - found.row), since


def tiles_of(n, params: BackwardParams, config: Backward):
    """The number of tiles of the n-th packed sequence."""
    rows = packed.rows_of(n, params.packed.cu_q, params.seqlen_q, rest=True)
    return packed.in_tiles(rows, config.queries.tile_m)


def place_packed(tile: packed.PackedTile, params: BackwardParams, config: Backward) -> tuple[QueryTile, BackwardParams]:
    """A packed tile, and the numbers of its sequence. The rows of a sequence without keys, and those past the last sequence, have no key
    blocks."""
    tiles, sequence = config.queries, PackedSequence.of(tile.sequence, params, config, rest_q=True)
    numbers, row = sequence.numbers, tile.row * config.queries.tile_m
    start, stop = schedule.key_blocks(row, tiles.tile_m, tiles.tile_n, number_band(numbers, config), PICK)
    # A tile without blocks still stores its dQ, which is zero.
    stop = I32(cutlass.select_(numbers.seqlen_k > 0, I32(stop), I32(start)))
    seqlen = seqlen_info(tile.sequence, sequence, sequence.seen, params, config)
    return QueryTile(row, tile.head, tile.sequence, I32(start), stop, seqlen=seqlen), numbers


SCHEDULER = TileScheduler(rounds_of, tile_of, packed_tile, place_packed)


# -- Key blocks of a tile ------------------------------------------------------------------------------------------


def block_at(tile: QueryTile, step, params: BackwardParams, config: Backward):
    """The key block that a tile visits at a step: from the last to the first."""
    return tile.stop - 1 - step


def whole_blocks(row, tile: QueryTile, band: schedule.Band, config: Backward):
    """``(start, stop)``: the tile's key blocks that the 64 rows of a warpgroup see as a whole. They are visited from the last one down,
    so ``tile.stop - stop`` steps come before them."""
    return schedule.whole_blocks(row, ROWS, config.queries.tile_n, band, (tile.start, tile.stop), PICK)


def hidden_blocks(row, tile: QueryTile, band: schedule.Band, config: Backward):
    """How many of a tile's blocks, in the order of visits, the rows of a warpgroup see nothing of; never all."""
    # Only where several blocks lie beside the diagonal of one tile can a warpgroup see nothing of one.
    if not config.has_upper or config.queries.tile_n >= config.queries.tile_m:
        return 0
    return schedule.hidden_blocks(row, ROWS, config.queries.tile_n, band, (tile.start, tile.stop), PICK)


def limits_of(row, band: schedule.Band, config: Backward) -> ColumnLimits:
    """The keys that each of a thread's two rows sees, in a warpgroup whose rows begin at ``row``."""
    rows = thread_rows(row)
    lower = [schedule.row_start(i, band, PICK) for i in rows]
    return ColumnLimits.of(lower if config.has_lower else None, [schedule.row_stop(i, band, PICK) for i in rows])


def score_block(
    limits: ColumnLimits | None, row, step, tile: QueryTile, params: BackwardParams, config: Backward
) -> ScoreBlock:
    """The key block at a step, for a warpgroup whose rows begin at ``row``; without limits all of it is seen."""
    if limits is None and not config.pairs:
        return ScoreBlock()
    # The block's first key.
    first = block_at(tile, step, params, config) * config.queries.tile_n
    ends = None if limits is None else limits.within(first)
    return ScoreBlock(ends, pairs_of_block(tile, ("i", "j"), row, first, params) if config.pairs else None)
