"""The query tiles that a CTA gets, the key blocks that a tile visits, and the rows of the output that a thread writes."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.pages import place_pages
from tilewise.backends.hopper.forward.params import ForwardParams
from tilewise.backends.hopper.kit import bits, packed, schedule
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.lists import list_of, tiles_of_list
from tilewise.backends.hopper.kit.params import OptionalParams
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.tiles import QueryTile, row_of, tma_tiles

# -- Keys of a row -------------------------------------------------------------------------------------------------


def band_of_head(batch, head, params: ForwardParams, config: Config) -> schedule.Band:
    """The keys that each row of one head keeps; rows past the last one have the last row's ends."""
    if config.by_rows:
        extra = params.extra

        def held(ends: cute.Tensor):
            return lambda i: ends[batch, head, PICK.smaller(i, params.seqlen_q - 1)]

        return schedule.Band(held(extra.lo), held(extra.hi), params.seqlen_k)
    lo, hi = (params.lo if config.has_lower else None), (params.hi if config.has_upper else None)
    return schedule.Band(lo, hi, params.seqlen_k)


def band_of_tile(query_tile: QueryTile, params: ForwardParams, config: Config) -> schedule.Band:
    """The keys that each row of a tile keeps; the rows of a packed sequence count from its own first row."""
    if config.packed:
        seqlen = query_tile.seqlen
        return schedule.Band(seqlen.lo, seqlen.hi, seqlen.k.size)
    return band_of_head(query_tile.batch, query_tile.head, params, config)


# -- Tiles of equal sequences --------------------------------------------------------------------------------------


def tile_order(params: ForwardParams, config: Config) -> schedule.Order:
    """The order of all query tiles."""
    m_blocks = (params.seqlen_q + config.tile_queries - 1) // config.tile_queries
    heads = params.batch * tiles_per_row(params, config) * splits_of(params, config)
    # The lines of tiles with bits have an order of their own.
    return schedule.Order(m_blocks, heads, params.section, config.has_upper and config.form != "bits")


def tiles_per_row(params: ForwardParams, config: Config):
    """How many tiles hold all heads, and all their columns, of a batch element."""
    return params.heads_q * config.tiles.pieces if config.tiles.pieces > 1 else params.heads_q


def splits_of(params: ForwardParams, config: Config):
    """How many splits a tile's keys have."""
    return cute.size(params.extra.part_lse, mode=[0]) if config.split else 1


def rounds_of(params: ForwardParams, config: Config):
    """How many tiles this CTA has."""
    return schedule.rounds(cute.arch.block_idx()[0], cute.arch.grid_dim()[0], tile_order(params, config).tiles)


def tile_of(round_, params: ForwardParams, config: Config) -> QueryTile:
    """This CTA's tile in a round."""
    # `pair` counts over batch elements, heads and splits.
    n = schedule.nth(cute.arch.block_idx()[0], cute.arch.grid_dim()[0], round_)
    m_block, pair = schedule.tile_at(n, tile_order(params, config), PICK)
    row, split, splits = m_block * config.tile_queries, None, splits_of(params, config)
    heads, tile_n = tiles_per_row(params, config), config.tiles.tile_n
    if config.split:
        # The splits of one query tile follow one another in the order of tiles.
        pair, split = pair // splits, pair % splits
    head, batch = pair % heads, pair // heads
    head, piece = head_and_piece(head, config)
    if config.selected:
        # A tile visits at least one block, as bands have it; where the query sees no key, no bit is set.
        start, stop = tiles_of_list(list_of(batch, params.extra), tile_n, params.extra)
        return QueryTile(row, head, batch, start, I32(PICK.larger(stop, start + 1)))
    band = band_of_head(batch, head, params, config)
    start, stop = schedule.key_blocks(row, config.tile_queries, tile_n, band, PICK)
    if config.split:
        size = schedule.split_blocks((params.seqlen_k + tile_n - 1) // tile_n, splits)
        start, stop = schedule.within_split((start, stop), split, size, PICK)
    return QueryTile(row, head, batch, I32(start), I32(stop), split, piece=piece)


def head_and_piece(n, config: Config) -> tuple:
    """The head and the piece of its columns that are the n-th of a row of tiles: the pieces of a head follow one another."""
    pieces = config.tiles.pieces
    return (n // pieces, n % pieces) if pieces > 1 else (n, None)  # neighbours read the same Q and K from L2


# -- Tiles from a queue --------------------------------------------------------------------------------------------


def packed_tile(
    n, since: packed.Since, params: ForwardParams, config: Config
) -> tuple[packed.PackedTile, packed.Since]:
    """The n-th tile of packed sequences, and where the lookup of a later one begins: all heads of a row of tiles, then the next row, the
    longest of a sequence first. Of a mask with bits, in which a batch element counts as a sequence: the lines of tiles in their own order.

    The sequence is -1 if there is no such tile.
    """
    if config.form == "bits":
        order = tile_order(params, config)._replace(section=params.extra.section[0])
        rank, head = schedule.tile_at(PICK.smaller(n, order.tiles - 1), order, PICK)
        batch, head = head // params.heads_q, head % params.heads_q
        sequence = I32(cutlass.select_(n < order.tiles, I32(batch), I32(-1)))
        return packed.PackedTile(
            sequence, params.extra.work[batch, head, rank, 0] * config.tile_queries, I32(head)
        ), since
    rows, cu = config.tile_queries, params.extra.cu_q

    def tiles_in(sequence):
        return packed.in_tiles(packed.rows_of(sequence, cu, params.seqlen_q, rest=True), rows)

    heads = tiles_per_row(params, config)
    sequence, block, since = packed.find(n // heads, tiles_in, cute.size(cu), since)
    # The last rows of a sequence see most keys and come first.
    if config.has_upper:
        block = tiles_in(PICK.larger(sequence, 0)) - 1 - block
    return packed.PackedTile(sequence, block * rows, n % heads), since


def place_packed(packed_tile: packed.PackedTile, params: ForwardParams, config: Config) -> QueryTile:
    """A tile from the queue as a query tile: its sequence's rows, and the keys that some row of the sequence sees; where segments lie at
    fixed keys, all before them too."""
    extra, (sequence, row, head) = params.extra, packed_tile
    if config.form == "bits":
        # The tile of no sequence is read too, and dropped: its place must exist.
        batch, line = PICK.larger(sequence, 0), row // config.tile_queries
        partial, count, first = (extra.work[batch, head, line, n] for n in range(1, 4))
        return QueryTile(row, head, batch, I32(0), count, partial=partial, bits=first)
    q = packed.rows_of(sequence, extra.cu_q, params.seqlen_q, rest=True)
    if config.paged:
        seqlen = place_pages(sequence, q, params, config)
        band = schedule.Band(seqlen.lo, seqlen.hi, seqlen.k.size)
        start, stop = schedule.key_blocks(row, config.tile_queries, config.tiles.tile_n, band, PICK)
        return QueryTile(row, head, sequence, I32(start), I32(stop), seqlen=seqlen)
    k = packed.rows_of(sequence, extra.cu_k, params.seqlen_k, rest=False)
    # Bottom-right alignment: the sequence's last row sees its last key.
    off = k.size - q.size
    moving = schedule.Band(
        params.lo + off if config.has_lower else None, params.hi + off if config.has_upper else None, k.size
    )
    # Segments begin at fixed keys, whichever of them the rows see.
    ends = moving._replace(lo=None) if config.tiles.segment else moving
    first, band = schedule.cut(ends, extra.first, extra.last, q.size, PICK)
    if config.tiles.segment and config.has_lower:
        band = band._replace(lo=moving.lo - first)
    # The band counts from the first of these keys: others are never loaded.
    start, stop = schedule.key_blocks(row, config.tile_queries, config.tiles.tile_n, band, PICK)
    keys = packed.Span(k.start + first + band.seqlen_k, band.seqlen_k)
    seqlen = packed.SeqlenInfo(q, keys, band.lo, band.hi)
    head, piece = head_and_piece(head, config)
    return QueryTile(row, head, sequence, I32(start), I32(stop), seqlen=seqlen, piece=piece)


# -- Blocks of a tile ----------------------------------------------------------------------------------------------


def block_at(query_tile: QueryTile, step, params: ForwardParams, config: Config):
    """The key block that a tile visits at a step: from the last to the first, or in the order of its list; with a line of biases around
    the tile's own place those around it come before all others but the last."""
    if config.form == "bits":
        m_block = query_tile.row // config.tile_queries
        return params.extra.blocks[query_tile.batch, query_tile.head, m_block, step]
    block = query_tile.stop - 1 - step
    if not (config.score == "table" and config.form == "full"):
        return block
    first, stop = near_blocks(query_tile, params, config)
    step, near = I32(step), stop - first
    # Of the others, those behind come first.
    others = I32(cutlass.select_(block + near >= stop, block + near, block))
    return I32(cutlass.select_(step == 0, block, I32(cutlass.select_(step <= near, stop - step, others))))


def near_blocks(query_tile: QueryTile, params: ForwardParams, config: Config):
    """``(first, stop)``: the key blocks, the last one left out, of which a tile sees pairs between the ends of a line of biases."""
    extra, tile_n = params.extra, config.tiles.tile_n
    before, last = query_tile.row - last_distance(extra) + 1, query_tile.row + config.tile_queries - 1
    # Keys are past the line's last distance below `before`, and before its first one from the last row's on; not below 0, where a
    # quotient would be rounded towards 0.
    first = PICK.smaller(PICK.larger(before, 0) // tile_n, query_tile.stop - 1)
    stop = (PICK.larger(last - extra.start, 0) + tile_n - 1) // tile_n
    return first, PICK.larger(PICK.smaller(stop, query_tile.stop - 1), first)


def last_distance(extra: OptionalParams):
    """The distance of a line's last bias, which all larger distances share."""
    return extra.start + cute.size(extra.line, mode=[1]) - 1


def kept_words(query_tile: QueryTile, step, w, params: ForwardParams, config: Config) -> list | None:
    """The bits of a thread's pairs in the partial block that warpgroup w visits at a step; None where ends tell."""
    if config.form != "bits":
        return None
    thread = w * 128 + cute.arch.thread_idx()[0] % 128
    return bits.words_of(params.extra.bits, query_tile.bits + step, thread)


def whole_steps(query_tile: QueryTile, row, band: schedule.Band, params: ForwardParams, config: Config):
    """``(hidden, first, stop)`` of the warpgroup whose first query is ``row``.

    ``hidden`` is 1 if the warpgroup leaves out the first step, since it sees nothing there. At steps ``[first, stop)`` it sees
    whole blocks, whose pairs have one bias where there is a line of biases; its first step is none of these. It could not leave out two
    steps: while it waits for the next tile's first K, this tile's last V is still held.
    """
    if config.form == "bits":
        return I32(0), query_tile.partial, query_tile.stop
    if config.selected:  # any block may have a key that stands twice
        return I32(0), query_tile.stop - query_tile.start, query_tile.stop - query_tile.start
    rows = row, ROWS, config.tiles.tile_n, band
    start, stop = query_tile.start, query_tile.stop
    # Blocks are visited from the last to the first: the steps [stop - last, stop - first) are the whole ones.
    hidden = PICK.smaller(schedule.hidden_blocks(*rows, (start, stop), PICK), 1) if config.skips else I32(0)
    if config.score == "table" and config.form == "full":
        near = near_blocks(query_tile, params, config)
        return hidden, 1 + near[1] - near[0], stop - start
    if config.score == "table":
        # Keys below row + hi are past the line's last distance.
        rows = *rows[:-1], band._replace(hi=1 - last_distance(params.extra))
    first, last = schedule.whole_blocks(*rows, (start, stop - 1 - hidden), PICK)
    return hidden, stop - last, stop - first


# -- Rows in global memory -----------------------------------------------------------------------------------------


def row_at(query_tile: QueryTile, w, r, params: ForwardParams, config: Config):
    """Batch, head and row of lse for a thread's row r in warpgroup w, and whether the tensor has such a row."""
    i = query_tile.row + w * ROWS + row_of(cute.arch.thread_idx()[0] % 128, r)
    if config.packed:
        seqlen = query_tile.seqlen
        return (0, query_tile.head, seqlen.q.start + i), i < seqlen.q.size
    # Rows past the last exist in the tile and are not written.
    return (query_tile.batch, query_tile.head, i), i < params.seqlen_q


def query_rows(info: cpasync.TmaInfo, width: int, query_tile: QueryTile, smem: cute.Tensor):
    """The rows of Q or O in tiles of one warpgroup, as :func:`tma_tiles` has them; warpgroup w's tile is row // ROWS + w."""
    return tma_tiles(info, (ROWS, width), (None, 0), query_tile.head, query_tile.rows, smem)
