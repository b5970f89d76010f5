"""The warpgroup of a cluster's CTA that makes dQ (:mod:`tilewise.backends.hopper.backward.cluster`).

It multiplies dS of all 128 keys, its own CTA's and the peer's, by half of K's columns, 64 at a time::

    dQ = dS K    tile_m queries x 64 columns, fp32, twice

Each of its four warps adds its own rows to the fp32 sums in global memory, ADDITION bytes at a time through its own shared
memory, in whatever order the CTAs come.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from tilewise.backends.hopper.backward.cluster_storage import PEER_K, ClusterMmas, ClusterStorage, K
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.dq_accumulate import ADD
from tilewise.backends.hopper.backward.fragments import begin_products, release_read, stage_of, transposed
from tilewise.backends.hopper.backward.key_tiles import SCHEDULER, KeyTile
from tilewise.backends.hopper.backward.keys_storage import RowBuffers
from tilewise.backends.hopper.backward.params import BackwardParams
from tilewise.backends.hopper.backward.tiles import ADDITION, ADDITIONS, FP32_BYTES
from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.kit.dtypes import F32, I32
from tilewise.backends.hopper.kit.scheduler import each_tile

HALVES = 2  # of a CTA's columns of dQ: one is added up while the other's product runs
FOURS = ADDITION // (4 * FP32_BYTES * 32)  # fours of elements that a thread has of them


class DqOperands(NamedTuple):
    """The operands and accumulators of make_queries.

    Attributes:
        ds: descriptors (.., block x CTA) of dS seen as tile_m queries x 64 keys.
        k: for each half of the 128 columns, descriptors (.., part) of K seen as 64 columns x 64 keys.
        dq: for each half, the accumulator, tile_m x 64, fp32.
    """

    mma: cute.TiledMma
    ds: cute.Tensor
    k: tuple
    dq: tuple


def make_dq_operands(mmas: ClusterMmas, smem: ClusterStorage, config: Backward) -> DqOperands:
    """The operands of the warpgroup."""
    mine, parts = mmas.dq.get_slice(0), config.keys.parts + 1
    # Parts of K transposed, (64 columns, 64 keys): in dQ = dS K the keys are what is summed over.
    columns = [cute.local_tile(transposed(smem.k), (ROWS, ROWS, parts), (n, 0, 0)) for n in range(HALVES)]
    return DqOperands(
        mmas.dq,
        mmas.dq.make_fragment_A(mine.partition_A(transposed(smem.ds))),
        tuple(mmas.dq.make_fragment_B(mine.partition_B(k)) for k in columns),
        tuple(cute.make_rmem_tensor(mmas.dq.partition_shape_C((ROWS, ROWS)), F32) for _ in range(HALVES)),
    )


@cute.jit
def make_queries(
    buffers: RowBuffers, smem: ClusterStorage, mmas: ClusterMmas, params: BackwardParams, config: cutlass.Constexpr
):
    """One warpgroup makes dQ of all keys of each tile and half of the columns."""
    operands = make_dq_operands(mmas, smem, config)

    def queries_of(key_tile, numbers, held_phase, count):
        return add_tile(operands, buffers, smem, key_tile, held_phase, count, numbers, config)

    each_tile(SCHEDULER, None, params, config, queries_of, I32(0))
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def add_tile(
    operands: DqOperands, buffers: RowBuffers, smem: ClusterStorage, key_tile: KeyTile, held_phase, count,
    params: BackwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """Adds one tile's dQ to the sums. Returns how many blocks there were so far."""
    cute.arch.mbarrier_wait(smem.held_full + K, held_phase)  # from load_keys
    # From load_keys too: the peer's keys, in the columns of this CTA.
    cute.arch.mbarrier_wait(smem.held_full + PEER_K, held_phase)
    for g in cutlass.range(params.group, unroll=1):
        sums = buffers.dq_sums[key_tile.batch, key_tile.head * params.group + g, None, smem.rank, None]
        for m in cutlass.range(key_tile.start, key_tile.stop, unroll=1):
            last = cutlass.select_(g == params.group - 1, key_tile.stop - 1, I32(-1)) == m
            add_block(operands, sums[m, None], count, last, smem, config)
            count = count + 1
    release_if(key_tile.start == key_tile.stop, smem.k_read)  # a tile without blocks has read K, too
    return count


@cute.jit
def release_if(condition, barrier):
    """Arrives at a barrier for each warp, where the condition holds."""
    if condition:
        release_read(barrier)


def add_block(operands: DqOperands, target: cute.Tensor, count, last, smem: ClusterStorage, config: Backward) -> None:
    """Adds dS K of both CTAs' keys to a block's sum, (part,). K is released with the products of the tile's ``last`` block."""
    n = count % 2
    cute.arch.mbarrier_wait(smem.ds_full + n, count // 2 % 2)  # make_keys has stored dS
    cute.arch.mbarrier_wait(smem.peer_ds_full, n)  # the peer's exchange has sent its dS
    for k, dq in zip(operands.k, operands.dq, strict=True):
        # dQ = dS K of this CTA's keys, plus dS K of the peer's, tile_m x 64
        own = stage_of(operands.ds, n), stage_of(k, smem.rank)
        peer = stage_of(operands.ds, 2), stage_of(k, config.keys.parts)
        begin_products(operands.mma, dq, (own, peer), overwrite=True)
    for h, dq in enumerate(operands.dq):
        warpgroup.wait_group(HALVES - 1 - h)
        if h == HALVES - 1:
            release_ds(smem, n)
            release_if(last, smem.k_read)
        add_half(dq, target, h, smem, config)


def release_ds(smem: ClusterStorage, n) -> None:
    """Releases block n of dS in this CTA and in the peer, which has sent its own from there."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(smem.ds_empty + n)
        cute.arch.mbarrier_arrive(smem.ds_empty + n, 1 - smem.rank)


def add_half(dq: cute.Tensor, target: cute.Tensor, h: int, smem: ClusterStorage, config: Backward) -> None:
    """Each warp adds its own rows of half h, ADDITION bytes at a time through its own shared memory, so that no warp waits for another."""
    fours = cute.size(dq) // 4
    values = cute.make_tensor(dq.iterator, cute.make_layout((4, fours)))
    for n in range(fours // FOURS):
        cute.arch.cp_async_bulk_wait_group(ADDITIONS - 1, read=True)  # the addition before the last has read its memory
        cute.arch.sync_warp()
        begin_addition(values, n, target, h * fours // FOURS + n, smem, config)
        cute.arch.cp_async_bulk_commit_group()


def begin_addition(
    values: cute.Tensor, n: int, target: cute.Tensor, place: int, smem: ClusterStorage, config: Backward
) -> None:
    """Starts the addition of the n-th part of a half, which is the ``place``-th of the warp."""
    thread, lane = cute.arch.thread_idx()[0] % 128, cute.arch.thread_idx()[0] % 32
    warp = cute.arch.make_warp_uniform(thread // 32)
    own = smem.additions[None, None, None, place % ADDITIONS, warp]
    for m in range(FOURS):
        cute.autovec_copy(values[None, n * FOURS + m], own[None, lane, m])
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        start = target.iterator + (warp * (config.keys.part_elements // 4) + place * (ADDITION // FP32_BYTES))
        cute.arch.inline_ptx(
            ADD + " [{$r0}], [{$r1}], {$r2};", read_only_args=[start.toint(), own.iterator.toint(), I32(ADDITION)]
        )
