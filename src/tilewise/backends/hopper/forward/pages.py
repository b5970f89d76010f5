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
from tilewise.backends.hopper.forward.params import ForwardParams, TensorMaps
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


def by_boxes(smem: cute.Tensor, config: Config, rows_mode: int) -> cute.Tensor:
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
    hi = params.hi + off
    _, seen = schedule.cut(schedule.Band(None, hi, keys), 0, keys, q.size, PICK)
    return packed.SeqlenInfo(q, packed.Span(seen.seqlen_k, seen.seqlen_k), lo, hi)


class Box(NamedTuple):
    """The coordinates of a part in :func:`packed.ragged`'s view: of its first row, of ``ends`` and of ``wrap``."""

    row: I32
    end: I32
    wrap: I32


def box_of(start, rows: int, keys, first):
    """The box of the ``rows`` rows of the pool from ``start`` on, of which only those from ``first`` on and below ``keys`` are read.

    Either ``first`` is above 0 or ``keys`` below ``rows``, not both (``paged_config.reasons``); ``first`` None is 0. See
    :mod:`packed` for the sum of the coordinates: they mean row ``row + end - wrap`` of the pool, and rows of the view outside ``[0,
    LONG)`` arrive as zeros.
    """
    size = PICK.larger(PICK.smaller(keys, rows), 0)
    at_end = I32(packed.LONG - size), I32(start + size), I32(packed.LONG)
    if first is None:
        return Box(*at_end)
    cut = PICK.larger(PICK.smaller(first, rows), 0)
    at_start = I32(0 - cut), I32(start + cut), I32(0)
    return Box(*(I32(cutlass.select_(cut > 0, a, b)) for a, b in zip(at_start, at_end, strict=True)))


def boxes_of(n, query_tile: QueryTile, params: ForwardParams, config: Config) -> tuple[Box, ...]:
    """The boxes of key block n, one for each part, or a single one whose numbers are those of part m in lane m.

    Each lane then reads the table for one part, so that many small parts take no more instructions than a few large ones.
    """
    start, rows = n * config.tiles.tile_n, config.paged
    if in_lanes(config):
        part = PICK.smaller(cute.arch.thread_idx()[0] % 32, config.tiles.tile_n // rows - 1)
        return (box_at(start + part * rows, query_tile, params, config),)
    return tuple(box_at(start + first, query_tile, params, config) for first in range(0, config.tiles.tile_n, rows))


def in_lanes(config: Config) -> bool:
    """Whether the lanes of the loading warp share out the parts of a block."""
    return config.tiles.tile_n // config.paged > 2


def box_of_part(boxes: tuple[Box, ...], m: int, config: Config) -> Box:
    """The box of part m of :func:`boxes_of`, the same in all lanes."""
    if not in_lanes(config):
        return boxes[m]
    return Box(*(cute.arch.make_warp_uniform(cute.arch.shuffle_sync(x, m)) for x in boxes[0]))


def box_at(position, query_tile: QueryTile, params: ForwardParams, config: Config) -> Box:
    """The box of the part of a sequence's keys that begins at a position."""
    extra, seqlen, table = params.extra, query_tile.seqlen, params.extra.block_table
    # Unsigned, since a signed division takes twice the instructions; seqlen_k is the size of a page.
    number = I32(cutlass.Uint32(position) // cutlass.Uint32(params.seqlen_k))
    # A block may end behind the table; such a part has no keys, and any entry serves.
    entry = PICK.smaller(number, cute.size(table, mode=[1]) - 1)
    sequence = PICK.smaller(query_tile.batch, cute.size(table, mode=[0]) - 1)
    # The table is checked by no host: a number outside the pool must not become an address.
    page = PICK.larger(PICK.smaller(table[sequence, entry], extra.num_pages - 1), 0)
    start = page * extra.page_rows + (position - number * params.seqlen_k)
    first = None if seqlen.lo is None else seqlen.lo - position  # the first row's first key
    return box_of(start, config.paged, seqlen.k.size - position, first)


# -- Copies --------------------------------------------------------------------------------------------------------


class PagedKeys(NamedTuple):
    """K or V of a head in the pool, and its blocks in shared memory by parts (:func:`by_boxes`); ``rows_mode`` as there."""

    info: cpasync.TmaInfo
    head: I32
    smem: cute.Tensor
    rows_mode: int


class KeyBlocks(NamedTuple):
    """K and V of a tile."""

    k: PagedKeys
    v: PagedKeys


def key_blocks(
    maps: TensorMaps, smem: ForwardStorage, query_tile: QueryTile, params: ForwardParams, config: Config
) -> KeyBlocks:
    """The keys and values that a tile of queries reads."""
    head = query_tile.head // params.group
    return KeyBlocks(
        PagedKeys(maps.k, head, by_boxes(smem.k, config, 0), 0), PagedKeys(maps.v, head, by_boxes(smem.v, config, 1), 1)
    )


def fetch_parts(
    of: PagedKeys, boxes: tuple[Box, ...], state: PipelineState, smem: ForwardStorage, config: Config
) -> PipelineState:
    """Fetches a block of K or V into the state's stage of the ring, part by part. Returns the next state."""
    full = smem.full + state.index
    cute.arch.mbarrier_wait(smem.empty + state.index, state.phase)  # every computing warp
    with cute.arch.elect_one():
        # The bytes of all parts, before the first of them comes; this is the barrier's only arrival.
        size = config.tiles.element_bytes * config.tiles.tile_n * columns_of(of, config)
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)
    for m in range(config.tiles.tile_n // config.paged):
        copy_box(of, box_of_part(boxes, m, config), m, state.index, full, config)
    return state.advance(config.tiles.stages)


def columns_of(of: PagedKeys, config: Config) -> int:
    """The columns of a block of K or of V in shared memory."""
    return config.tiles.width if of.rows_mode == 0 else config.tiles.width_v


def copy_box(of: PagedKeys, box: Box, m: int, stage, full: cute.Pointer, config: Config) -> None:
    """Starts the copy of a part, ``config.paged`` rows of all columns, to its place in a stage."""
    matrix = of.info.tma_tensor[None, None, of.head, box.end, box.wrap]
    first, shape = (box.row, 0), (config.paged, columns_of(of, config))
    if of.rows_mode == 1:
        first, shape = first[::-1], shape[::-1]
    g = cute.local_tile(cute.domain_offset(first, matrix), shape, (0, 0))
    whole = cute.make_layout(1)  # one CTA, no multicast
    s, g = cpasync.tma_partition(of.info.atom, 0, whole, cute.group_modes(of.smem, 0, 2), cute.group_modes(g, 0, 2))
    cute.copy(of.info.atom, g, s[None, m, stage], tma_bar_ptr=full)
