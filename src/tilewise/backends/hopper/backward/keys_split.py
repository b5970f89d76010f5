"""The split warpgroups of the pass over key tiles (:mod:`tilewise.backends.hopper.backward.keys`), for wide heads.

Both work on the same 64 keys, and each holds one of the two gradients, which together would not fit into registers
(docs/decisions.md#hopper-d256-roles)::

    make_values   Sᵀ = K Qᵀ     P = 2**(S - lse2)      dV += Pᵀ dO   and hands slope · P, rounded, to make_keys
    make_keys     dPᵀ = V dOᵀ   dS = P (dP - delta)    dK += dSᵀ Q

P passes through shared memory, from each thread to the same thread of the other warpgroup: ``p_full`` (128) says that it is there,
``p_empty`` (128) that it has been read.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from tilewise.backends.hopper.backward import parts
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.fragments import (
    column_statistic,
    release_read,
    round_to_operand,
    scale,
)
from tilewise.backends.hopper.backward.halves import add_peer, release_place
from tilewise.backends.hopper.backward.key_tiles import (
    SCHEDULER,
    KeyTile,
    VisibleBlocks,
    blocks_of_group,
    blocks_of_head,
    of_query_head,
)
from tilewise.backends.hopper.backward.keys_compute import (
    DkDvOperands,
    KeysPipelineState,
    as_rows_columns,
    begin_dk,
    begin_dp,
    begin_dv,
    begin_s,
    finish,
    make_operands,
    new_state,
    release_before,
    scale_dropped,
    tile_at,
)
from tilewise.backends.hopper.backward.keys_storage import KeysMmas, KeysStorage, RowBuffers
from tilewise.backends.hopper.backward.params import BackwardParams
from tilewise.backends.hopper.backward.scores import ScoreBlock, probabilities, score_gradients
from tilewise.backends.hopper.backward.sequences import receiver
from tilewise.backends.hopper.backward.sheet import await_copies, copy_ds, put_ds
from tilewise.backends.hopper.kit.operands import words
from tilewise.backends.hopper.kit.scheduler import each_queued, each_tile
from tilewise.backends.hopper.kit.tiles import rows_columns

# -- P and dV ------------------------------------------------------------------------------------------------------


@cute.jit
def make_values(
    smem: KeysStorage, buffers: RowBuffers, mmas: KeysMmas, params: BackwardParams, config: cutlass.Constexpr
):  # fmt: skip
    """One warpgroup makes P and dV of the 64 keys of each tile."""
    operands = make_operands(mmas, smem, 0, config)

    def values_of(key_tile, numbers, held_phase, state):
        return value_tile(operands, smem, buffers, key_tile, held_phase, state, numbers, config)

    if cutlass.const_expr(config.keys.queued):
        each_queued(SCHEDULER, smem.boxes, params, config, values_of, new_state())
    else:
        each_tile(SCHEDULER, receiver(smem, 0), params, config, values_of, new_state())


@cute.jit
def value_tile(
    operands: DkDvOperands, smem: KeysStorage, buffers: RowBuffers, key_tile: KeyTile, held_phase, state: KeysPipelineState,
    params: BackwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """Makes dV of one tile, and returns the state after it."""
    tiles = config.keys
    group_blocks = blocks_of_group(key_tile.column, key_tile, params, config)
    operands.dv.fill(0.0)
    cute.arch.mbarrier_wait(smem.held_full, held_phase)  # K, from load_keys
    for g in cutlass.range(key_tile.query_heads(params), unroll=1):
        state = state.restart()
        blocks = blocks_of_head(group_blocks, key_tile.column, key_tile, g, params, config)
        if cutlass.const_expr(config.has_upper):
            # Blocks on the diagonal, or blocks that need the predicate
            for step in cutlass.range(blocks.start - blocks.tile.start, unroll=1):
                block = blocks.partial_block(blocks.tile.start + step, params, config)
                state = value_block(operands, state, block, smem, params, config)
        for step in cutlass.range(blocks.stop - blocks.start, unroll=1):
            block = blocks.whole_block(blocks.start + step, params, config)
            state = value_block(operands, state, block, smem, params, config)
        if cutlass.const_expr(config.has_lower):
            # Blocks at the lower end of the band
            for step in cutlass.range(blocks.tile.stop - blocks.stop, unroll=1):
                block = blocks.partial_block(blocks.stop + step, params, config)
                state = value_block(operands, state, block, smem, params, config)
        warpgroup.wait_group(0)
        release_before(smem.empty, state, 1, tiles.stages)
    if cutlass.const_expr(config.parted):
        parts.gather((operands.dv,), buffers, smem.told, parts.published(smem, 0), 0, 1, params)
    scale_dropped(operands.dv, params, config)
    cute.arch.barrier(barrier_id=1, number_of_threads=128)  # all four warps have read K for the last time
    finish(operands.dv, operands.mmas.dv, tile_at(smem.dv, 0), smem.done, config)
    return state


def value_block(
    operands: DkDvOperands, state: KeysPipelineState, block: ScoreBlock, smem: KeysStorage, params: BackwardParams, config: Backward
) -> KeysPipelineState:  # fmt: skip
    """Makes S and P of one query block, adds Pᵀ dO to dV, and hands slope · P to make_keys. dV is in flight between blocks."""
    (q_stage, q_phase), (do_stage, do_phase) = state.stages_of_block(config.keys.stages)
    cute.arch.mbarrier_wait(smem.full + q_stage, q_phase)  # Q and lse2, from load_queries
    begin_s(operands, 0, q_stage)  # Sᵀ = K Qᵀ, 64 x tile_m
    warpgroup.wait_group(0)  # S, and dV of the block before
    release_before(smem.empty, state, 1, config.keys.stages)
    if config.keys.halved:
        add_peer(operands.s, smem.halves, 0, state.count % 2, releases=False)  # P takes its place
    s, kept = rows_columns(operands.s), block.dropout_keeps(operands.s, params, config)
    probabilities(s, operands.p, column_statistic(smem.statistics, q_stage), block, params, config, kept)
    release_read(smem.empty + q_stage)
    if config.separate_ds:
        round_to_operand(operands.ds, operands.s, config.dtype)
    cute.arch.mbarrier_wait(smem.p_empty, 1 - state.count % 2)  # make_keys has taken the P of the block before
    hand_over(operands.ds if config.separate_ds else operands.p, smem.handover)
    cute.arch.mbarrier_arrive(smem.p_full)
    cute.arch.mbarrier_wait(smem.full + do_stage, do_phase)  # dO
    begin_dv(operands, do_stage)  # dV += Pᵀ dO, 64 x width_v
    return state.next_block(config.keys.stages)


# -- dS and dK -----------------------------------------------------------------------------------------------------


@cute.jit
def make_keys(
    smem: KeysStorage, buffers: RowBuffers, mmas: KeysMmas, params: BackwardParams, config: cutlass.Constexpr
):  # fmt: skip
    """One warpgroup makes dS and dK of the 64 keys of each tile, and keeps dS in the sheet, if there is one."""
    operands = make_operands(mmas, smem, 0, config)

    def keys_of(key_tile, numbers, held_phase, state):
        return gradient_tile(operands, smem, buffers, key_tile, held_phase, state, numbers, config)

    if cutlass.const_expr(config.keys.queued):
        each_queued(SCHEDULER, smem.boxes, params, config, keys_of, new_state())
    else:
        each_tile(SCHEDULER, receiver(smem, 1), params, config, keys_of, new_state())
    if cutlass.const_expr(config.keys.keeps_ds):
        await_copies()


@cute.jit
def gradient_tile(
    operands: DkDvOperands, smem: KeysStorage, buffers: RowBuffers, key_tile: KeyTile, held_phase, state: KeysPipelineState,
    params: BackwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """Makes dK of one tile, and returns the state after it. The P that it takes is masked already, so that all blocks are alike."""
    tiles, sheet = config.keys, buffers.sheet
    operands.dk.fill(0.0)
    cute.arch.mbarrier_wait(smem.held_full + 1, held_phase)  # V, from load_keys
    state = state.restart()
    if cutlass.const_expr(tiles.keeps_ds):
        for g in cutlass.range(key_tile.query_heads(params), unroll=1):
            head_tile = of_query_head(key_tile, g, params, config)
            for m in cutlass.range(head_tile.start, head_tile.stop, unroll=1):
                state = key_block(operands, state, ScoreBlock(), smem, params, config)
                if cutlass.const_expr(tiles.halved):
                    put_ds(operands.ds, sheet, head_tile, m, smem.half, params)
                else:
                    mma = operands.mmas.score
                    copy_ds(operands.ds, mma, smem.kept, state.count, sheet, head_tile, m, params, config)
    elif cutlass.const_expr(config.by_rows or config.pairs):
        for g in cutlass.range(params.group, unroll=1):
            head_tile = of_query_head(key_tile, g, params, config)
            for step in cutlass.range(head_tile.stop - head_tile.start, unroll=1):
                blocks = VisibleBlocks(key_tile.column, head_tile, None, None, None)
                block = blocks.whole_block(head_tile.start + step, params, config)
                state = key_block(operands, state, block, smem, params, config)
    else:
        for _ in cutlass.range(params.group * (key_tile.stop - key_tile.start), unroll=1):
            state = key_block(operands, state, ScoreBlock(), smem, params, config)
    warpgroup.wait_group(0)
    release_before(smem.empty, state, 2, tiles.stages)
    if cutlass.const_expr(config.parted):
        parts.gather((operands.dk,), buffers, smem.told, parts.published(smem, 1), 1, 1, params)
    scale(operands.dk, params.scale)
    cute.arch.barrier(barrier_id=2, number_of_threads=128)  # all four warps have read V for the last time
    finish(operands.dk, operands.mmas.dk, tile_at(smem.dk, 0), smem.done + 1, config)
    return state


def key_block(
    operands: DkDvOperands, state: KeysPipelineState, block: ScoreBlock, smem: KeysStorage, params: BackwardParams, config: Backward
) -> KeysPipelineState:  # fmt: skip
    """Makes dP of one query block, dS with the other warpgroup's slope · P, and adds dSᵀ Q to dK. dK is in flight between blocks."""
    (q_stage, q_phase), (do_stage, do_phase) = state.stages_of_block(config.keys.stages)
    cute.arch.mbarrier_wait(smem.full + do_stage, do_phase)  # dO and delta, from load_queries
    begin_dp(operands, 0, do_stage)  # dPᵀ = V dOᵀ, 64 x tile_m
    warpgroup.wait_group(0)  # dP, and dK of the block before
    release_before(smem.empty, state, 2, config.keys.stages)
    if config.keys.halved:
        # dP of this CTA's columns, plus that of the peer's
        add_peer(operands.dp, smem.halves, 1, state.count % 2)
    cute.arch.mbarrier_wait(smem.p_full, state.count % 2)  # make_values has handed P over
    take_over(operands.p, smem.handover)
    cute.arch.mbarrier_arrive(smem.p_empty)
    if config.keys.halved:
        # P lay where the peer's S was: the peer may send the next one.
        release_place(smem.halves, 0, words(operands.p))
    kept, p = block.dropout_keeps(operands.dp, params, config), as_rows_columns(operands.p, operands.dp)
    delta = column_statistic(smem.statistics, do_stage)
    score_gradients(rows_columns(operands.dp), p, delta, kept, params)
    release_read(smem.empty + do_stage)
    round_to_operand(operands.ds, operands.dp, config.dtype)
    cute.arch.mbarrier_wait(smem.full + q_stage, q_phase)  # Q
    begin_dk(operands, q_stage)  # dK += dSᵀ Q, 64 x width
    return state.next_block(config.keys.stages)


# -- What passes from one to the other -----------------------------------------------------------------------------


def in_fours(operand: cute.Tensor) -> cute.Tensor:
    """A thread's operand viewed as 32-bit words (4, n), 16 bytes at a time."""
    mine = words(operand)
    return cute.make_tensor(mine.iterator, cute.make_layout((4, cute.size(mine) // 4)))


def hand_over(operand: cute.Tensor, handover: cute.Tensor) -> None:
    """Writes a thread's operand to shared memory for the same thread of the other warpgroup."""
    cute.autovec_copy(in_fours(operand), handover[None, cute.arch.thread_idx()[0] % 128, None])


def take_over(operand: cute.Tensor, handover: cute.Tensor) -> None:
    """Reads a thread's operand from shared memory, as the same thread of the other warpgroup wrote it."""
    cute.autovec_copy(handover[None, cute.arch.thread_idx()[0] % 128, None], in_fours(operand))
