"""The rows and keys of a CTA of latent attention.

The heads that share a key head are rows of one tile: row p of a sequence's rows is query ``p // group``, head ``p % group``. A tile
has 64 of them, and visits the key tiles ``[first, last)`` of 64 keys, each in one page.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.forward.pages import keys_of
from tilewise.backends.hopper.kit import packed
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.lists import list_of, tiles_of_list
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.tiles import row_of
from tilewise.backends.hopper.latent.config import KEYS, PAIR, LatentConfig
from tilewise.backends.hopper.latent.params import LatentParams


class LatentTile(NamedTuple):
    """The work of a CTA.

    Attributes:
        sequence, key_head, row: the sequence, the key head, and the first of the sequence's rows.
        q: the sequence's rows of q.
        lo, hi, keys: query i sees the keys ``i + lo <= j < i + hi`` below ``keys``.
        start, stop: no row sees a key before or after these. whole_start, whole_stop: every row sees the keys between these.
        first, last: the key tiles of this CTA.
        split, rank: which split it belongs to; of the two CTAs of a pair, which it is.
    """

    sequence: I32
    key_head: I32
    row: I32
    q: packed.Span
    lo: I32
    hi: I32
    keys: I32
    start: I32
    stop: I32
    whole_start: I32
    whole_stop: I32
    first: I32
    last: I32
    split: I32
    rank: I32


def tile_of(params: LatentParams, config: LatentConfig) -> LatentTile:
    """This CTA's tile; one past the last tile has no rows."""
    n, split, _ = cute.arch.block_idx()
    sequence, block, end, size = (find_query if config.selected else find_rows)(n // params.heads_k, params)
    q = packed.Span(end, size)
    row, seen = (listed if config.selected else in_band)(sequence, block, q, params)
    first, last = split_range(*seen[3:5], split, params)
    split, rank = (split // PAIR, split % PAIR) if config.pair else (split, I32(0))
    return LatentTile(sequence, n % params.heads_k, row, q, *seen, first, last, split, rank)


def in_band(sequence, block, q: packed.Span, params: LatentParams) -> tuple[I32, tuple]:
    """``(row, (lo, hi, keys, start, stop, whole_start, whole_stop))`` of a tile over pages."""
    group, keys = params.group, keys_of(sequence, params)
    row, off = block * ROWS, keys - q.size  # bottom-right alignment: the sequence's last row sees its last key
    lo, hi = params.lo + off, params.hi + off
    first_query, last_query = row // group, PICK.smaller((row + ROWS - 1) // group, q.size - 1)
    stop = PICK.larger(PICK.smaller(last_query + hi, keys), 0)
    start = PICK.smaller(PICK.larger(first_query + lo, 0), stop)
    whole = PICK.larger(last_query + lo, 0), PICK.smaller(first_query + hi, keys)
    return row, (lo, hi, keys, start, stop, *whole)


@cute.jit
def find_rows(m, params: LatentParams):
    """``(sequence, tile, end, size)`` of the m-th tile of a key head: which of its sequence's tiles it is, and the sequence's rows of q.

    Packed, the device alone knows where sequences begin; a tile past the last one has no rows. Else all have as many rows, and nothing
    is looked up.
    """
    sequence, block, end, size = I32(0), I32(0), I32(0), params.even
    if params.even > 0:
        tiles = (params.even * params.group + ROWS - 1) // ROWS
        sequence, block = I32(m // tiles), I32(m % tiles)
        end = I32((sequence + 1) * params.even)
    else:
        found, block, _ = packed.find(
            m, partial(tiles_in, params=params), cute.size(params.extra.cu_q), packed.at_first()
        )
        sequence = PICK.larger(found, 0)
        q = rows_of(sequence, params)
        end, size = I32(q.end), I32(cutlass.select_(found >= 0, I32(q.size), I32(0)))
    return sequence, block, end, size


def rows_of(sequence, params: LatentParams) -> packed.Span:
    """A packed sequence's rows of q; those past the last sequence count as one more."""
    return packed.rows_of(sequence, params.extra.cu_q, params.seqlen_q, rest=True)


def tiles_in(sequence, params: LatentParams):
    """How many tiles the rows of a packed sequence take."""
    return (rows_of(sequence, params).size * params.group + ROWS - 1) // ROWS


def split_range(start, stop, split, params: LatentParams) -> tuple[I32, I32]:
    """The key tiles of a CTA: even parts of all that hold a key of ``[start, stop)``, each of at least ``params.least``."""
    first = start // KEYS
    last = I32(cutlass.select_(stop > start, I32((stop + KEYS - 1) // KEYS), I32(first)))
    splits = cute.arch.grid_dim()[1]
    each = PICK.larger((last - first + splits - 1) // splits, params.least)
    first = PICK.smaller(first + split * each, last)
    return I32(first), I32(PICK.smaller(first + each, last))


# -- Lists of keys -------------------------------------------------------------------------------------------------


def find_query(m, params: LatentParams) -> tuple[I32, I32, I32, I32]:
    """:func:`find_rows` where each query is a sequence of its own."""
    tiles = (params.group + ROWS - 1) // ROWS
    return I32(m // tiles), I32(m % tiles), I32(m // tiles + 1), I32(1)


def listed(sequence, block, q: packed.Span, params: LatentParams) -> tuple[I32, tuple]:
    """As :func:`in_band`, of the rows of one query with a list: ``start`` and ``stop`` are places of this, in order, of whole tiles."""
    line = list_of(sequence, params.extra)
    first, last = tiles_of_list(line, KEYS, params.extra)
    start, stop = first * KEYS, last * KEYS
    return block * ROWS, (line.lo, line.hi, stop, start, stop, start, stop)


# -- Keys of a tile ------------------------------------------------------------------------------------------------


def shift_of(n, tile: LatentTile):
    """How many rows further on the box of key tile n begins than its page's rows: what lies outside a page arrives as zeros.

    In the first and the last tile no row may see some keys, which may be NaN: the box is moved so that they lie outside of it. It then
    begins with the first key that is seen, or ends with the last one, whatever it holds besides are keys of other tiles or zeros.
    """
    low, high = tile.start - n * KEYS, PICK.smaller(tile.stop - n * KEYS, KEYS)
    return I32(cutlass.select_(low > 0, I32(low), I32(high - KEYS)))


class TileEnds(NamedTuple):
    """The first key that each of a thread's two rows sees, and the first one past them, counted from its first column on."""

    lower: list
    upper: list


def row_ends(n, tile: LatentTile, params: LatentParams) -> TileEnds:
    """The ends of a thread's rows in key tile n, whose first row in shared memory is key ``64 n + shift_of(n)``."""
    thread = cute.arch.thread_idx()[0] % 128
    begin = n * KEYS
    column = begin + shift_of(n, tile) + thread % 4 * 2
    lower, upper = [], []
    for r in range(2):
        i = (tile.row + row_of(thread, r)) // params.group
        # A tile next to this one may share rows of shared memory with it: its keys are its own.
        lower.append(cutlass.max(i + tile.lo, begin) - column)
        upper.append(cutlass.min(cutlass.min(i + tile.hi, tile.keys), begin + KEYS) - column)
    return TileEnds(lower, upper)


def is_partial(n, tile: LatentTile):
    """Whether some row may not see some key of key tile n."""
    # As numbers: neither is above 0 where every row sees every key.
    return PICK.larger(tile.whole_start - n * KEYS, n * KEYS + KEYS - tile.whole_stop) > 0


# -- Rows of a tile ------------------------------------------------------------------------------------------------


def place_of(row, tile: LatentTile, params: LatentParams) -> tuple[tuple, bool]:
    """``((0, head, row of q), whether there is such a row)`` of a row of the tile."""
    p = tile.row + row
    i = p // params.group
    return (0, tile.key_head * params.group + p % params.group, tile.q.start + i), i < tile.q.size
