"""Key blocks whose rows lie in the pages of a cache: where each part of a block is, and the copies that bring it.

A block of ``tile_n`` keys is brought by ``tile_n / config.paged`` boxes of ``config.paged`` rows, each of one page; all of them
arrive at the barrier of one stage, side by side as one block of a dense tensor would lie there. The pool is shown to the copy
engine as one packed tensor (:func:`packed.ragged`), the rows of all pages one after the other: page p begins at row
``p * page_rows``. A box is placed so that its rows from the sequence's last key on, and those before the first key that any query
sees, lie outside of that tensor: they arrive as zeros, whatever the page holds there. Nothing is read of a page that the sequence
does not use.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.params import ForwardParams
from tilewise.backends.hopper.forward.storage import ForwardStorage
from tilewise.backends.hopper.kit import packed, schedule
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.ring import PipelineState
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.tiles import QueryTile

# -- Tensor maps ---------------------------------------------------------------------------------------------------


def paged_map(view: cute.Tensor, layout, config: Config, rows_mode: int) -> cpasync.TmaInfo:
    """The descriptor that brings a part of a block of K or V into shared memory.

    Args:
        view: the pool's :func:`packed.ragged` view; mode ``rows_mode`` (0 for K, 1 for V) holds the rows.
        layout: shared memory's, of whole blocks and their stages; the result carries it.
    """
    shape, stride = list(layout.outer.shape[:2]), list(layout.outer.stride[:2])
    columns = cute.size(layout.outer, mode=[1 - rows_mode])
    shape[rows_mode] = part_shape(shape[rows_mode], config)
    part = cute.make_composed_layout(layout.inner, 0, cute.make_layout(tuple(shape), stride=tuple(stride)))
    box = (config.paged, columns) if rows_mode == 0 else (columns, config.paged)
    made = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, part, box)
    return cpasync.TmaInfo(made.atom, made.tma_tensor, layout)


def part_shape(rows: tuple[int, int], config: Config) -> tuple[int, int]:
    """The rows of a part, in the groups of 8 after which the 128-byte swizzle repeats."""
    assert rows[0] == 8, "rows lie in groups of 8"
    return 8, config.paged // 8


def in_parts(smem: cute.Tensor, config: Config, rows_mode: int) -> cute.Tensor:
    """Blocks of K or V in shared memory, (row, column, stage) or (column, row, stage), as (row, column, part, stage) or likewise."""
    shape, stride = list(smem.layout.shape), list(smem.layout.stride)
    parts = config.tiles.tile_n // config.paged, stride[rows_mode][1] * (config.paged // 8)
    shape[rows_mode] = part_shape(shape[rows_mode], config)
    layout = cute.make_layout((*shape[:2], parts[0], shape[2]), stride=(*stride[:2], parts[1], stride[2]))
    return cute.make_tensor(smem.iterator, layout)


# -- Where keys lie ------------------------------------------------------------------------------------------------


def keys_of(sequence, params: ForwardParams) -> I32:
    """How many keys a sequence has, within what its row of the table holds; the rows past the last sequence have none."""
    lengths, table = params.extra.seqlens_k, params.extra.block_table
    batch = cute.size(lengths)
    # Lengths are checked by no host: one past the table must not become an address.
    length = PICK.larger(lengths[PICK.smaller(sequence, batch - 1)], 0)
    length = PICK.smaller(length, cute.size(table, mode=[1]) * params.seqlen_k)
    return I32(cutlass.select_(sequence == batch, I32(0), I32(length)))


def place_pages(sequence, q: packed.Span, params: ForwardParams, config: Config) -> packed.SeqlenInfo:
    """A sequence over pages: its rows of q, its keys up to the last one that some row sees, and the ends of the band.

    Unlike those of packed keys (:func:`query_tiles.place_packed`), the keys count from the sequence's own first one, so that the
    parts of blocks are parts of pages.
    """
    keys = keys_of(sequence, params)
    off = keys - q.size  # bottom-right alignment: the sequence's last row sees its last key
    lo = params.lo + off if config.has_lower else None
    hi = params.hi + off if config.has_upper else None
    _, seen = schedule.cut(schedule.Band(None, hi, keys), 0, keys, q.size, PICK)
    return packed.SeqlenInfo(q, packed.Span(seen.seqlen_k, seen.seqlen_k), lo, hi)


class Box(NamedTuple):
    """The coordinates of a part in :func:`packed.ragged`'s view, of its first row, of ``ends`` and of ``wrap``."""

    row: I32
    end: I32
    wrap: I32


def box_of(start, rows: int, keys, first):
    """The box of the ``rows`` rows of the pool from ``start`` on, of which only those from ``first`` on and below ``keys`` are read.

    Either ``first`` is above 0 or ``keys`` below ``rows``, not both (:func:`config.paged_reasons`); see :mod:`packed` for the sum of
    the coordinates. The row at coordinates (row, end, wrap) is ``row + end`` or, with wrap, ``row + end - LONG``, and rows outside
    ``[0, LONG)`` arrive as zeros.
    """
    size = PICK.larger(PICK.smaller(keys, rows), 0)
    cut = PICK.larger(PICK.smaller(first, rows), 0)
    at_end = packed.LONG - size, start + size, I32(packed.LONG)
    at_start = 0 - cut, start + cut, I32(0)
    return Box(*(I32(cutlass.select_(cut > 0, I32(a), I32(b))) for a, b in zip(at_start, at_end, strict=True)))


def part_at(position, query_tile: QueryTile, page_rows, params: ForwardParams, config: Config) -> Box:
    """The box of the part of a sequence's keys that begins at a position; ``page_rows``: from one page of the pool to the next."""
    extra, size, seqlen = params.extra, params.seqlen_k, query_tile.seqlen
    table = extra.block_table
    # A block may end behind the table; such a part has no keys, and any entry serves.
    entry = PICK.smaller(position // size, cute.size(table, mode=[1]) - 1)
    sequence = PICK.smaller(query_tile.batch, cute.size(table, mode=[0]) - 1)
    page = PICK.larger(PICK.smaller(table[sequence, entry], extra.num_pages - 1), 0)
    first = I32(0) if seqlen.lo is None else seqlen.lo - position  # the first row's first key
    return box_of(page * page_rows + position % size, config.paged, seqlen.k.size - position, first)


# -- Copies --------------------------------------------------------------------------------------------------------


class PagedBlocks(NamedTuple):
    """The key blocks of one head of a sequence; ``rows_mode`` as :func:`paged_map` takes it, ``page_rows`` as :func:`part_at`."""

    query_tile: QueryTile
    head: I32
    page_rows: I32
    rows_mode: int


def fetch_pages(
    info: cpasync.TmaInfo, blocks: PagedBlocks, n, smem_blocks: cute.Tensor, size: int, state: PipelineState, smem: ForwardStorage,
    params: ForwardParams, config: Config,
) -> None:  # fmt: skip
    """Fetches block n of K or V, of ``size`` bytes, into the state's stage of the ring, part by part."""
    tile_n, full = config.tiles.tile_n, smem.full + state.index
    starts = [n * tile_n + start for start in range(0, tile_n, config.paged)]
    # The table is read before the wait, which hides how long that takes.
    boxes = [part_at(start, blocks.query_tile, blocks.page_rows, params, config) for start in starts]
    cute.arch.mbarrier_wait(smem.empty + state.index, state.phase)  # every computing warp
    with cute.arch.elect_one():
        # The bytes of all parts, before the first of them comes; this is the barrier's only arrival.
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)
    for m, box in enumerate(boxes):
        copy_part(info, blocks, box, smem_blocks, m, state.index, full, config)


def copy_part(
    info: cpasync.TmaInfo, blocks: PagedBlocks, box: Box, smem_blocks: cute.Tensor, m: int, stage, full: cute.Pointer, config: Config
) -> None:  # fmt: skip
    """Starts the copy of a part, ``config.paged`` rows of all columns, to its place in a stage."""
    mode = blocks.rows_mode
    matrix = info.tma_tensor[None, None, blocks.head, box.end, box.wrap]
    matrix = cute.domain_offset((box.row, 0) if mode == 0 else (0, box.row), matrix)
    columns = config.tiles.width if mode == 0 else config.tiles.width_v
    shape = (config.paged, columns) if mode == 0 else (columns, config.paged)
    g = cute.local_tile(matrix, shape, (0, 0))
    whole = cute.make_layout(1)  # one CTA, no multicast
    s, g = cpasync.tma_partition(info.atom, 0, whole, cute.group_modes(smem_blocks, 0, 2), cute.group_modes(g, 0, 2))
    cute.copy(info.atom, g, s[None, m, stage], tma_bar_ptr=full)
