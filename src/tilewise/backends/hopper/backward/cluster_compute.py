"""The warpgroups of a cluster's CTA that make dV and dK (:mod:`tilewise.backends.hopper.backward.cluster`).

Both work on the CTA's 64 keys; every product has 64 rows, the keys, and accumulates in fp32::

    make_values   Sᵀ = K Qᵀ     64 x tile_m    P = 2**(S - lse2)      dV += Pᵀ dO   64 x 128 for each part
    make_keys     dPᵀ = V dOᵀ   64 x tile_m    dS = P (dP - delta)    dK += dSᵀ Q   64 x 128 for each part

P passes from the first to the second, and dS from the second to make_queries of both CTAs, through the same shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from tilewise.backends.hopper.backward.cluster_storage import STRIP, ClusterMmas, ClusterStorage, K, V, own_column
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.fragments import (
    begin_products,
    release_read,
    round_to_operand,
    scale,
    stage_of,
    store_accumulator,
    store_fragment,
    transposed,
    words,
)
from tilewise.backends.hopper.backward.key_tiles import SCHEDULER, KeyTile, VisibleBlocks, visible_blocks
from tilewise.backends.hopper.backward.keys_compute import KeysPipelineState, new_state
from tilewise.backends.hopper.backward.params import BackwardParams
from tilewise.backends.hopper.backward.scores import ScoreBlock, probabilities, score_gradients
from tilewise.backends.hopper.backward.tiles import HALF
from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.kit import schedule
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32
from tilewise.backends.hopper.kit.operands import as_accumulator
from tilewise.backends.hopper.kit.scheduler import each_tile

# -- Operands ------------------------------------------------------------------------------------------------------


class ClusterOperands(NamedTuple):
    """The operands and accumulators of make_values or make_keys. An operand in shared memory is (1, 1, k steps, part or stage).

    Attributes:
        held: K or V, 64 keys x 128. ring: Q and dO, tile_m x 128; ``ring_transposed``: the same as 128 x tile_m.
        acc: the accumulator of Sᵀ or dPᵀ, 64 x tile_m, fp32.
        p, ds: operands of Pᵀ and dSᵀ in registers, in the order of ``acc``.
        grads: the accumulators of the parts of dV or dK, 64 x 128 each, fp32.
    """

    mmas: ClusterMmas
    held: cute.Tensor
    ring: cute.Tensor
    ring_transposed: cute.Tensor
    acc: cute.Tensor
    p: cute.Tensor
    ds: cute.Tensor
    grads: tuple


def make_operands(mmas: ClusterMmas, smem: ClusterStorage, held: cute.Tensor, config: Backward) -> ClusterOperands:
    """The operands of a warpgroup that multiplies by ``held``."""
    score, grad, tile_m = mmas.score.get_slice(0), mmas.grad.get_slice(0), config.keys.tile_m

    def operand():
        return cute.make_rmem_tensor(mmas.grad.partition_shape_A((ROWS, tile_m)), ELEMENT[config.dtype])

    return ClusterOperands(
        mmas,
        mmas.score.make_fragment_A(score.partition_A(held)),
        mmas.score.make_fragment_B(score.partition_B(smem.ring)),
        mmas.grad.make_fragment_B(grad.partition_B(transposed(smem.ring))),
        cute.make_rmem_tensor(mmas.score.partition_shape_C((ROWS, tile_m)), F32),
        operand(),
        operand(),
        tuple(cute.make_rmem_tensor(mmas.grad.partition_shape_C((ROWS, HALF)), F32) for _ in range(config.keys.parts)),
    )


def stages_of_block(state: KeysPipelineState, config: Backward) -> tuple[list, list]:
    """``(index, phase)`` of the stages that hold the parts of a block's Q, and of those that hold its dO."""
    parts, stages = config.keys.parts, config.keys.stages
    places = [(state.index, state.phase)]
    places += [schedule.advance(state.index, state.phase, stages, step=n) for n in range(1, 2 * parts)]
    return places[:parts], places[parts:]


def next_block(state: KeysPipelineState, config: Backward) -> KeysPipelineState:
    """The state a block later."""
    return state.next_block(config.keys.stages, step=2 * config.keys.parts)


# -- P and dV ------------------------------------------------------------------------------------------------------


@cute.jit
def make_values(smem: ClusterStorage, mmas: ClusterMmas, params: BackwardParams, config: cutlass.Constexpr):
    """One warpgroup makes P and dV of the CTA's 64 keys of each tile."""
    operands = make_operands(mmas, smem, smem.k, config)

    def values_of(key_tile, numbers, held_phase, state):
        return value_tile(operands, smem, key_tile, held_phase, state, numbers, config)

    each_tile(SCHEDULER, None, params, config, values_of, new_state())


@cute.jit
def value_tile(
    operands: ClusterOperands, smem: ClusterStorage, key_tile: KeyTile, held_phase, state: KeysPipelineState,
    params: BackwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """Makes dV of one tile, and returns the state after it."""
    blocks = visible_blocks(own_column(key_tile, smem), key_tile, params, config)
    for grad in operands.grads:
        grad.fill(0.0)
    cute.arch.mbarrier_wait(smem.held_full + K, held_phase)  # K, from load_keys
    for _ in cutlass.range(params.group, unroll=1):
        state = value_head(operands, smem, blocks, state, params, config)
    cute.arch.mbarrier_wait(smem.v_read, held_phase)  # make_keys has read V for the last time: dV takes its place
    finish(operands, smem.dv, smem.done + V, config)
    return state


@cute.jit
def value_head(
    operands: ClusterOperands, smem: ClusterStorage, blocks: VisibleBlocks, state: KeysPipelineState,
    params: BackwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """Adds the blocks of one query head to dV: masked ones on either side of whole ones."""
    state = state.restart()
    if cutlass.const_expr(config.has_upper):
        for step in cutlass.range(blocks.start - blocks.tile.start, unroll=1):
            block = blocks.partial_block(blocks.tile.start + step, params, config)
            state = value_block(operands, state, block, smem, params, config)
    for _ in cutlass.range(blocks.stop - blocks.start, unroll=1):
        state = value_block(operands, state, ScoreBlock(), smem, params, config)
    # Blocks at the lower end of the band, or all blocks where keys past the last one are in the tile
    for step in cutlass.range(blocks.tile.stop - blocks.stop, unroll=1):
        block = blocks.partial_block(blocks.stop + step, params, config)
        state = value_block(operands, state, block, smem, params, config)
    return state


def value_block(
    operands: ClusterOperands, state: KeysPipelineState, block: ScoreBlock, smem: ClusterStorage,
    params: BackwardParams, config: Backward,
) -> KeysPipelineState:  # fmt: skip
    """Makes S and P of one query block, hands P to make_keys, and adds Pᵀ dO to dV.

    Nothing is in flight between blocks, which other warpgroups fill: with dV in flight there, the assembler runs out of 192 registers
    and makes every product wait for the one before.
    """
    (q, do), n = stages_of_block(state, config), state.count % 2
    begin_scores(operands, q, smem)  # Sᵀ = K Qᵀ, 64 x tile_m
    warpgroup.wait_group(0)
    cute.arch.mbarrier_wait(smem.ds_empty + n, 1 - state.count // 2 % 2)  # dS, which lay where P comes, has been read
    for m in range(config.keys.tile_m // STRIP):
        lse2 = strip_statistic(smem.statistics, q[0][0], m)
        # 64 keys x 16 queries at a time: more P and lse2 at once would take too many registers.
        s, p = strip(operands.acc, m), strip_of_operand(operands.p, m)
        probabilities(s, p, lse2, shifted(block, m), params, config)
        hand_strip(operands.p, m, smem.handover, n)
    cute.arch.mbarrier_arrive(smem.p_full + n)
    release_parts(q, smem)
    begin_gradients(operands, operands.p, do, smem)  # dV += Pᵀ dO, 64 x 128 for each part
    end_gradients(do, smem)
    return next_block(state, config)


# -- dS and dK -----------------------------------------------------------------------------------------------------


@cute.jit
def make_keys(smem: ClusterStorage, mmas: ClusterMmas, params: BackwardParams, config: cutlass.Constexpr):
    """One warpgroup makes dS and dK of the CTA's 64 keys of each tile."""
    operands = make_operands(mmas, smem, smem.v, config)

    def keys_of(key_tile, numbers, held_phase, state):
        return gradient_tile(operands, smem, key_tile, held_phase, state, numbers, config)

    each_tile(SCHEDULER, None, params, config, keys_of, new_state())


@cute.jit
def gradient_tile(
    operands: ClusterOperands, smem: ClusterStorage, key_tile: KeyTile, held_phase, state: KeysPipelineState,
    params: BackwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """Makes dK of one tile, and returns the state after it."""
    # dK: the sum over all query heads of the group.
    for grad in operands.grads:
        grad.fill(0.0)
    cute.arch.mbarrier_wait(smem.held_full + V, held_phase)  # V, from load_keys
    for _ in cutlass.range(params.group * (key_tile.stop - key_tile.start), unroll=1):
        state = key_block(operands, state, smem, params, config)
    cute.arch.mbarrier_arrive(smem.v_read)  # make_values waits for it before it stores dV there
    for grad in operands.grads:
        scale(grad, params.scale)
    # make_queries has read K for the last time; make_values had, when it handed the last P over
    cute.arch.mbarrier_wait(smem.k_read, held_phase)
    finish(operands, smem.dk, smem.done + K, config)
    return state


def key_block(
    operands: ClusterOperands, state: KeysPipelineState, smem: ClusterStorage, params: BackwardParams, config: Backward
) -> KeysPipelineState:
    """Makes dP and dS of one query block, and adds dSᵀ Q to dK; dS goes to both CTAs' make_queries while that product runs."""
    (q, do), n = stages_of_block(state, config), state.count % 2
    begin_scores(operands, do, smem)  # dPᵀ = V dOᵀ, 64 x tile_m
    warpgroup.wait_group(0)
    cute.arch.mbarrier_wait(smem.p_full + n, state.count // 2 % 2)  # make_values has handed P over
    for m in range(config.keys.tile_m // STRIP):
        take_strip(operands.p, m, smem.handover, n)
        dp, p = strip(operands.acc, m), strip(operands.p, m)
        score_gradients(dp, p, strip_statistic(smem.statistics, do[0][0], m))
        round_to_operand(strip_of_operand(operands.ds, m), strip(operands.acc, m), config.dtype)
    release_parts(do, smem)
    begin_gradients(operands, operands.ds, q, smem)  # dK += dSᵀ Q, 64 x 128 for each part
    put_ds(operands, n, smem, config)
    end_gradients(q, smem)
    return next_block(state, config)


def put_ds(operands: ClusterOperands, n, smem: ClusterStorage, config: Backward) -> None:
    """Stores block n of dSᵀ, 64 x tile_m, rounded, in place of its P: this CTA's make_queries reads it there, and exchange sends it."""
    cute.arch.barrier(barrier_id=1, number_of_threads=128)  # all threads have taken their P
    ds = as_accumulator(operands.ds, operands.acc)
    store_fragment(ds, operands.mmas.score, smem.ds[None, None, n], config.dtype)
    cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(smem.ds_full + n)


# -- Products of a block -------------------------------------------------------------------------------------------


def begin_scores(operands: ClusterOperands, places: list, smem: ClusterStorage) -> None:
    """Begins Sᵀ = K Qᵀ or dPᵀ = V dOᵀ, the sum over the parts of the columns, each as soon as it is there."""
    for n, (stage, phase) in enumerate(places):
        cute.arch.mbarrier_wait(smem.full + stage, phase)  # a part of Q or dO, from load_queries
        held, part = stage_of(operands.held, n), stage_of(operands.ring, stage)
        begin_products(operands.mmas.score, operands.acc, [(held, part)], overwrite=n == 0)


def begin_gradients(operands: ClusterOperands, operand: cute.Tensor, places: list, smem: ClusterStorage) -> None:
    """Begins dV += Pᵀ dO or dK += dSᵀ Q, one part of the columns after the other."""
    for grad, (stage, phase) in zip(operands.grads, places, strict=True):
        # A part of dO or Q, from load_queries; a block's Q is loaded before its dO, so that make_keys need not wait here.
        cute.arch.mbarrier_wait(smem.full + stage, phase)
        part = stage_of(operands.ring_transposed, stage)
        begin_products(operands.mmas.grad, grad, [(operand, part)], overwrite=False)


def end_gradients(places: list, smem: ClusterStorage) -> None:
    """Releases each part's stage as soon as its product is done, so that it is filled while the next product runs."""
    for n, (stage, _) in enumerate(places):
        warpgroup.wait_group(len(places) - 1 - n)
        release_read(smem.empty + stage)


def release_parts(places: list, smem: ClusterStorage) -> None:
    """Releases the stages of all parts of a block."""
    for stage, _ in places:
        release_read(smem.empty + stage)


def finish(operands: ClusterOperands, tile: cute.Tensor, done, config: Backward) -> None:
    """Rounds a gradient, its parts of 64 x 128, into shared memory, from where the storing warp takes it."""
    for n, grad in enumerate(operands.grads):
        store_accumulator(grad, operands.mmas.grad, tile[None, None, n], config.dtype)
    cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(done)


# -- Strips of a block ---------------------------------------------------------------------------------------------


def strip(block: cute.Tensor, n: int) -> cute.Tensor:
    """The n-th STRIP columns of an accumulator, or of an operand in its order, viewed as (2 rows, columns of the thread)."""
    layout = cute.make_layout((2, (2, STRIP // 8)), stride=(2, (1, 4)))
    return cute.make_tensor(block.iterator + n * STRIP // 2, layout)


def strip_of_operand(operand: cute.Tensor, n: int) -> cute.Tensor:
    """The n-th STRIP columns of an operand, viewed as its registers in order."""
    return cute.make_tensor(operand.iterator + n * STRIP // 2, cute.make_layout(STRIP // 2))


def hand_strip(operand: cute.Tensor, m: int, handover: cute.Tensor, n) -> None:
    """Writes strip m of block n of a thread's operand for the same thread of make_keys."""
    cute.autovec_copy(words(strip_of_operand(operand, m)), handover[None, cute.arch.thread_idx()[0] % 128, m, n])


def take_strip(operand: cute.Tensor, m: int, handover: cute.Tensor, n) -> None:
    """Reads strip m of block n of a thread's operand, as the same thread of make_values wrote it."""
    cute.autovec_copy(handover[None, cute.arch.thread_idx()[0] % 128, m, n], words(strip_of_operand(operand, m)))


def strip_statistic(statistics: cute.Tensor, stage, n: int):
    """A function ``(r, c)`` that reads the statistic, fp32, of a thread's column c of strip n: one at a time, since all together take too
    many registers."""
    mine = statistics[None, cute.arch.thread_idx()[0] % 4, None, stage]
    return lambda r, c: mine[c % 2, n * STRIP // 8 + c // 2]


def shifted(block: ScoreBlock, n: int) -> ScoreBlock:
    """The block's limits counted from strip n."""
    if block.limits is None:
        return block
    return ScoreBlock([None if ends is None else [end - n * STRIP for end in ends] for ends in block.limits])
