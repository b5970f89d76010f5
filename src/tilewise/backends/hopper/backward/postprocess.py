"""dQ out of its accumulated parts, on Hopper (sm_90a): scaled, rounded and put in place.

The pass over key tiles leaves dQ as fp32 parts, each in the order of the registers that made it
(:mod:`tilewise.backends.hopper.backward.dq_accumulate`). A CTA takes one block of one head. Each of its two warpgroups reads a part into
registers, as if its own product had made it, multiplies it by softmax_scale, and lets TMA store it; rows past the last one are dropped
there.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import LayoutEnum

from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.dq_accumulate import fours, part_columns, tiled_mma
from tilewise.backends.hopper.backward.fragments import rows_first, scale, store_accumulator, transposed
from tilewise.backends.hopper.backward.params import count_place
from tilewise.backends.hopper.backward.sequences import dq_block_start
from tilewise.backends.hopper.backward.tiles import KEY_GROUPS, KeyTiles
from tilewise.backends.hopper.config import ALIGNMENT, ROWS
from tilewise.backends.hopper.kit import packed
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.tiles import staged_layout, tma_tiles


class DqSums(NamedTuple):
    """The accumulated dQ of all heads.

    Attributes:
        parts: (batch, heads_q, block, warpgroup, part), fp32.
        cu: (sequence + 1,), int32: where packed sequences begin; None where none are packed.
        rows: the rows of packed sequences.
        semaphores: (batch, heads_q, block x warpgroup), int32: 0 where no key tile was added to a part; read where sums are not cleared.
        counts, key_tiles: delta, which holds the counts of :func:`count_place`, and what these are when all key tiles of a head, or all
            parts of them, have been added; only with counts.
    """

    parts: cute.Tensor
    cu: cute.Tensor | None
    rows: I32
    semaphores: cute.Tensor | None = None
    counts: cute.Tensor | None = None
    key_tiles: I32 | None = None


def part_queries(tiles: KeyTiles) -> int:
    """How many queries a part holds."""
    return tiles.tile_m if tiles.dq_transposed else ROWS


def part_layout(tiles: KeyTiles) -> cute.Layout:
    """The layout of a part in memory, (4, thread, n)."""
    return cute.make_layout((4, 128, fours(tiles)))


def place_of(block, batch, sums: DqSums, config: Backward) -> tuple:
    """The place of a block's rows, as :func:`tma_tiles` takes it, and the block's number among them."""
    if not config.packed:
        return batch, block

    def start_of(n):
        return dq_block_start(n, sums.cu, sums.rows, config)

    sequence = packed.holder(block, start_of, cute.size(sums.cu))
    return packed.rows_of(sequence, sums.cu, sums.rows, rest=True), block - start_of(sequence)


def launch(sums: DqSums, dq: cute.Tensor, softmax_scale, stream, config: Backward) -> None:
    """Launches the kernel, within a traced function of the host's. ``dq``: (batch, seqlen_q, heads_q, head_dim), written."""
    element = ELEMENT[config.dtype]
    rows, tiles = part_queries(config.keys), config.keys
    layout = sm90.make_smem_layout_epi(element, LayoutEnum.ROW_MAJOR, (rows, ROWS), 1)
    info = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(),
        rows_first(dq, config),
        staged_layout(layout, KEY_GROUPS, tiles.part_elements),
        (rows, ROWS),
    )
    kernel.set_name_prefix(f"{config.name}_sum", remove_cutlass_symbol=True, keep_mangled_name=False)
    batch, heads, blocks = sums.parts.shape[:3]
    # Two warpgroups, one for each part of a block.
    kernel(sums, info, tiled_mma(config), softmax_scale, config).launch(
        grid=[blocks * heads * batch, 1, 1], block=[128 * KEY_GROUPS, 1, 1], stream=stream, use_pdl=True
    )


@cute.kernel
def kernel(sums: DqSums, dq: cpasync.TmaInfo, mma: cute.TiledMma, softmax_scale: F32, config: cutlass.Constexpr):
    """Puts one block of dQ in place. Grid: query blocks of all heads and batch elements, one after the other."""
    if cutlass.const_expr(not config.keys.counts):
        cute.arch.griddepcontrol_wait()  # all parts are there when the pass over keys has ended
    blocks, heads, n = sums.parts.shape[2], sums.parts.shape[1], cute.arch.block_idx()[0]
    block, head, batch = n % blocks, n // blocks % heads, n // blocks // heads
    if cutlass.const_expr(config.keys.counts):
        # This kernel has begun where a CTA of the pass over keys found no tile left: others may still add to the last heads.
        await_head(sums, batch, head)
    thread = cute.arch.thread_idx()[0] % 128
    w = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
    layout, tiles = dq.smem_layout, config.keys
    smem = cutlass.utils.SmemAllocator().allocate_tensor(ELEMENT[config.dtype], layout.outer, ALIGNMENT, layout.inner)
    # The part of warpgroup w, 64 x part_columns in fp32, 16 bytes a thread at a time
    acc = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, part_columns(tiles))), F32)
    source = cute.make_tensor(sums.parts[batch, head, block, w, None].iterator, part_layout(tiles))
    cute.autovec_copy(source[None, thread, None], cute.make_tensor(acc.iterator, cute.make_layout((4, fours(tiles)))))
    if cutlass.const_expr(config.stores_first):
        clear_if_unvisited(acc, sums.semaphores[batch, head, KEY_GROUPS * block + w])
    # dQ = scale · the sum of dS K; the scale was left out of the parts.
    scale(acc, softmax_scale)
    # Where parts are dQᵀ they turn on their way through shared memory.
    target = transposed(smem) if tiles.dq_transposed else smem
    store_accumulator(acc, mma, target[None, None, w], config.dtype, tiles.dq_transposed)
    # All four warps have written before the first one starts the copy.
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=1 + w, number_of_threads=128)
    rows, block = place_of(block, batch, sums, config)
    gQ, sQ = tma_tiles(dq, (part_queries(tiles), ROWS), (None, None), head, rows, smem)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
        # Parts are side by side in a block, or one below the other
        row, column = (block, w) if cutlass.const_expr(tiles.dq_transposed) else (block * 2 + w, 0)
        cute.copy(dq.atom, sQ[None, w], gQ[None, row, column])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    if cutlass.const_expr(config.keys.counts):
        await_pass(n)


@cute.jit
def await_head(sums: DqSums, batch, head):
    """Waits until all key tiles of a head have been added to its dQ. Partner: count_tile of both storing warps."""
    if cute.arch.thread_idx()[0] == 0:
        place = count_place(batch, head, sums.counts)
        pointer, wanted = cute.domain_offset(place, sums.counts).iterator, F32(KEY_GROUPS * sums.key_tiles)
        # Acquires what the storing warps released with their counts: the additions before them.
        found = cute.arch.load(pointer, F32, sem="acquire", scope="gpu")
        while found < wanted:
            found = cute.arch.load(pointer, F32, sem="acquire", scope="gpu")
    cute.arch.sync_threads()


@cute.jit
def clear_if_unvisited(acc: cute.Tensor, visits):
    """Sets a part to zero that no key tile has been added to: nobody has written it."""
    if visits == 0:
        acc.fill(0.0)


@cute.jit
def await_pass(n):
    """Makes the last CTA wait for the end of the pass over keys: what comes next in the stream finds dK and dV, too."""
    if n == cute.arch.grid_dim()[0] - 1:
        cute.arch.griddepcontrol_wait()
