"""The warp that loads: K and V of a share's blocks, sequence after sequence, as far ahead as stages are empty."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.config import ELEMENT_BYTES
from tilewise.backends.hopper.decoding.config import DecodingConfig
from tilewise.backends.hopper.decoding.params import DecodingParams, PoolMaps
from tilewise.backends.hopper.decoding.shares import (
    Place,
    block_at,
    blocks_of,
    first_block_of,
    first_key_of,
    first_share,
    following,
    head_of,
)
from tilewise.backends.hopper.decoding.storage import DecodingStorage
from tilewise.backends.hopper.forward.pages import PagedKeys, box_of, by_boxes, copy_box
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.ring import PipelineState, new_writer
from tilewise.backends.hopper.kit.scheduler import PICK


@cute.jit
def load(maps: PoolMaps, smem: DecodingStorage, params: DecodingParams, config: cutlass.Constexpr):
    """One warp brings the blocks of the CTA's shares."""
    share, place = first_share(params, config)
    state, begin = new_writer(), share.begin
    while begin < share.end:
        stop = PICK.smaller(place.at + blocks_of(place.keys, params, config), share.end)
        first = first_block_of(place.keys, params, config) - place.at  # of the line's blocks to the sequence's
        state = load_blocks(maps, smem, place, (begin + first, stop + first), state, params, config)
        share, place, begin = following(share, place, stop, params, config)


@cute.jit
def load_blocks(
    maps: PoolMaps, smem: DecodingStorage, place: Place, blocks: tuple, state: PipelineState, params: DecodingParams,
    config: cutlass.Constexpr,
):  # fmt: skip
    """Brings the blocks ``[first, last)`` of a sequence. Each lane reads the table for one part of 32."""
    k = PagedKeys(maps.k, head_of(params), by_boxes(smem.k, config, 0), 0)
    v = PagedKeys(maps.v, head_of(params), by_boxes(smem.v, config, 1), 1)
    first, last = blocks
    seen = first_key_of(place.keys, params)
    lane, count = cute.arch.thread_idx()[0] % 32, config.boxes
    for begin in cutlass.range(first, last, 32 // count, unroll=1):
        mine = row_of_box(place.sequence, box_at(begin, lane, blocks, config), params, config)
        for n in cutlass.range(PICK.smaller(last - begin, 32 // count), unroll=1):
            boxes = []
            for m in cutlass.range_constexpr(count):
                start = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(mine, n * count + m))
                position = (block_at(begin + n, first, last) * count + m) * config.paged
                boxes.append(box_of(start, config.paged, place.keys - position, seen - position))
            cute.arch.mbarrier_wait(smem.empty + state.index, state.phase)  # every computing warp
            size = ELEMENT_BYTES * config.tiles.block
            with cute.arch.elect_one():
                # Before the copies, so that no bytes come that a barrier does not expect; these are their only arrivals.
                cute.arch.mbarrier_arrive_and_expect_tx(smem.full_k + state.index, size)
                cute.arch.mbarrier_arrive_and_expect_tx(smem.full_v + state.index, size)
            for m in cutlass.range_constexpr(count):
                copy_box(k, boxes[m], m, state.index, smem.full_k + state.index, config)
            for m in cutlass.range_constexpr(count):
                copy_box(v, boxes[m], m, state.index, smem.full_v + state.index, config)
            state = state.advance(config.tiles.stages)
    return state


def box_at(begin, lane, blocks: tuple, config: DecodingConfig):
    """The box, of a sequence's, that a lane looks up where the n-th block of ``blocks`` from ``begin`` on comes first."""
    count = config.boxes
    block = PICK.larger(block_at(begin + lane // count, *blocks), 0)  # none before the first is read
    return block * count + lane % count


@cute.jit
def row_of_box(sequence, n, params: DecodingParams, config: cutlass.Constexpr):
    """The row of the pool at which a sequence's n-th part of ``config.paged`` keys begins."""
    page, row = I32(sequence), I32(n * config.paged)
    if params.cached != 0:
        table = params.extra.block_table
        # Unsigned, since a signed division takes twice the instructions; seqlen_k is the size of a page.
        number = I32(cutlass.Uint32(row) // cutlass.Uint32(params.seqlen_k))
        entry = PICK.smaller(number, cute.size(table, mode=[1]) - 1)
        # The table is checked by no host: a number outside the pool must not become an address.
        page = I32(PICK.larger(PICK.smaller(table[sequence, entry], params.extra.num_pages - 1), 0))
        row = row - number * params.seqlen_k
    return I32(page * params.extra.page_rows + row)
