"""The computing warpgroups of the pass over key tiles (:mod:`tilewise.backends.hopper.backward.keys`), where each makes dK and dV of its
own 64 keys.

A query block passes through these products; all have 64 rows, the keys, and accumulate in fp32::

    Sᵀ  = K Qᵀ     64 x tile_m        dV += Pᵀ dO    64 x width_v
    dPᵀ = V dOᵀ    64 x tile_m        dK += dSᵀ Q    64 x width

:func:`query_block` leaves dK and dV in flight between blocks. :func:`summing_block` also makes a part of dQ, of the block before.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from tilewise.backends.hopper.backward import dlines, dq_accumulate, dslopes, pair_bias, parts
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.fragments import (
    HeldStatistic,
    RegisterOperand,
    begin_products,
    column_statistic,
    hold_above_wait,
    release_read,
    round_to_operand,
    scale,
    stage_of,
    store_accumulator,
    transposed,
)
from tilewise.backends.hopper.backward.key_tiles import SCHEDULER, KeyTile, blocks_of_group, blocks_of_head
from tilewise.backends.hopper.backward.keys_storage import KeysMmas, KeysStorage, RowBuffers
from tilewise.backends.hopper.backward.params import BackwardParams
from tilewise.backends.hopper.backward.scores import ScoreBlock, probabilities, score_gradients
from tilewise.backends.hopper.backward.sequences import receiver
from tilewise.backends.hopper.backward.subtrahends import Subtrahends, make_subtrahends
from tilewise.backends.hopper.backward.tiles import KEY_GROUPS, v_register_steps
from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.kit import dropout, schedule
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.instructions import keep_words_above
from tilewise.backends.hopper.kit.operands import OperandValues, as_accumulator, load_register_steps
from tilewise.backends.hopper.kit.pair_bias import BiasRing, acquire_tile
from tilewise.backends.hopper.kit.ring import release
from tilewise.backends.hopper.kit.scheduler import each_queued, each_tile
from tilewise.backends.hopper.kit.tiles import rows_columns

K_STEP = 16  # columns of an operand that one wgmma takes

# -- Operands ------------------------------------------------------------------------------------------------------


class DkDvOperands(NamedTuple):
    """The operands and accumulators of one warpgroup. An operand in shared memory is (1, 1, k steps, tile or stage).

    Attributes:
        k, v: 64 keys x width, A of the scores' products.
        q, do: tile_m queries x width, B of the scores' products; ``q_transposed``, ``do_transposed``: the same blocks as width x tile_m.
        s, dp: accumulators of Sᵀ and dPᵀ, 64 x tile_m, fp32.
        p, ds: operands of Pᵀ and dSᵀ, 64 x tile_m, in registers in the order of ``s``.
        dk, dv: accumulators, 64 x width and 64 x width_v, fp32.
        dq: the operands of a part of dQ, where it is accumulated.
        v_registers: the first columns of V in registers, if any are there.
        subtrahends: where products subtract the statistics.
        dbias: (1,), fp32: what the thread's keys add to the gradient of a query head's slope, or of its line's first bias, where that is
            summed.
        bias: the tiles of a bias by pair.
    """

    mmas: KeysMmas
    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    q_transposed: cute.Tensor
    do_transposed: cute.Tensor
    s: cute.Tensor
    dp: cute.Tensor
    p: cute.Tensor
    ds: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    dq: dq_accumulate.SumOperands | None = None
    v_registers: RegisterOperand | None = None
    subtrahends: Subtrahends | None = None
    dbias: cute.Tensor | None = None
    bias: BiasRing | None = None


def make_operands(mmas: KeysMmas, smem: KeysStorage, w, config: Backward) -> DkDvOperands:
    """The operands of warpgroup w."""
    tiles, score, dk, dv = config.keys, *(mma.get_slice(0) for mma in mmas[:3])
    v_columns = K_STEP * v_register_steps(tiles, config.statistics, config.packed, config.sums_bias)

    def accumulator(mma, columns):
        return cute.make_rmem_tensor(mma.partition_shape_C((ROWS, columns)), F32)

    def operand(mma, columns=tiles.tile_m):
        return cute.make_rmem_tensor(mma.partition_shape_A((ROWS, columns)), ELEMENT[config.dtype])

    return DkDvOperands(
        mmas,
        mmas.score.make_fragment_A(score.partition_A(smem.k)),
        mmas.score.make_fragment_A(score.partition_A(smem.v)),
        mmas.score.make_fragment_B(score.partition_B(smem.q)),
        mmas.score.make_fragment_B(score.partition_B(smem.do)),
        mmas.dk.make_fragment_B(dk.partition_B(transposed(smem.q))),
        mmas.dv.make_fragment_B(dv.partition_B(transposed(smem.do))),
        accumulator(mmas.score, tiles.tile_m), accumulator(mmas.score, tiles.tile_m), operand(mmas.dv), operand(mmas.dk),
        accumulator(mmas.dk, tiles.width), accumulator(mmas.dv, tiles.width_v),
        dq_accumulate.make_operands(mmas.dq, smem.dq, smem.k, w, config) if tiles.sums_dq else None,
        RegisterOperand(mmas.dp_registers, operand(mmas.dp_registers, v_columns)) if v_columns else None,
        make_subtrahends(mmas, smem, operand(mmas.dp_registers, K_STEP)) if config.subtracts else None,
        cute.make_rmem_tensor((1,), F32) if config.sums_bias else None,
        pair_bias.new_ring(smem.bias, w, config) if config.score == "bias" else None,
    )  # fmt: skip


def as_rows_columns(operand: cute.Tensor, acc: cute.Tensor) -> cute.Tensor:
    """An operand in the order of an accumulator, viewed as (2 rows, columns of the thread)."""
    return rows_columns(as_accumulator(operand, acc))


# -- Products of a block -------------------------------------------------------------------------------------------


def begin_s(operands: DkDvOperands, w, q_stage, slot=None) -> None:
    """Begins Sᵀ = K Qᵀ, 64 x tile_m, with the K of tile w; where products subtract, minus the lse in a slot."""
    k, q = stage_of(operands.k, w), stage_of(operands.q, q_stage)
    first = operands.subtrahends and operands.subtrahends.of_s(slot)
    begin_products(operands.mmas.score, operands.s, [(k, q)], overwrite=True, first=first)


def begin_dp(operands: DkDvOperands, w, do_stage, slot=None) -> None:
    """Begins dPᵀ = V dOᵀ, 64 x tile_m, with the V of tile w; where products subtract, minus the delta in a slot."""
    v, do = stage_of(operands.v, w), stage_of(operands.do, do_stage)
    first = operands.subtrahends and operands.subtrahends.of_dp(slot)
    begin_products(operands.mmas.score, operands.dp, [(v, do)], True, operands.v_registers, first)


def begin_dv(operands: DkDvOperands, do_stage) -> None:
    """Begins dV += Pᵀ dO, 64 x width_v."""
    do_transposed = stage_of(operands.do_transposed, do_stage)
    begin_products(operands.mmas.dv, operands.dv, [(operands.p, do_transposed)], overwrite=False)


def begin_dk(operands: DkDvOperands, q_stage) -> None:
    """Begins dK += dSᵀ Q, 64 x width."""
    q_transposed = stage_of(operands.q_transposed, q_stage)
    begin_products(operands.mmas.dk, operands.dk, [(operands.ds, q_transposed)], overwrite=False)


# -- The place of a warpgroup in the ring --------------------------------------------------------------------------


class KeysPipelineState(NamedTuple):
    """The place of a computing warpgroup in the ring.

    Attributes:
        index, phase: the stage that holds the Q of the next block; its dO is in the stage after it.
        count: how many blocks the warpgroup has done; ``first``: how many it had done when its tile, or query head, began.
    """

    index: I32
    phase: I32
    count: I32
    first: I32

    def restart(self) -> KeysPipelineState:
        """The state at the beginning of a tile or a query head."""
        return KeysPipelineState(self.index, self.phase, self.count, self.count)

    def stages_of_block(self, stages: int):
        """``(index, phase)`` of the stage of Q, and of that of dO."""
        return (self.index, self.phase), schedule.advance(self.index, self.phase, stages)

    def next_block(self, stages: int, step: int = 2) -> KeysPipelineState:
        """The state a block later, which takes ``step`` stages."""
        return KeysPipelineState(
            *schedule.advance(self.index, self.phase, stages, step=step), self.count + 1, self.first
        )


def new_state() -> KeysPipelineState:
    """The state before the first block."""
    return KeysPipelineState(I32(0), I32(0), I32(0), I32(0))


@cute.jit
def release_before(empty, state: KeysPipelineState, back: cutlass.Constexpr, stages: cutlass.Constexpr):
    """Releases the stage ``back`` before Q's, which only the last products of the block before still read, if there was one."""
    if state.count > state.first:
        release_read(empty + (state.index + stages - back) % stages)


def release_block_before(empty, state: KeysPipelineState, stages: int) -> None:
    """Releases the stages of Q and dO of the block before."""
    release_before(empty, state, 2, stages)
    release_before(empty, state, 1, stages)


@cute.jit
def skip(blocks, state: KeysPipelineState, smem: KeysStorage, stages: cutlass.Constexpr) -> KeysPipelineState:
    """Releases the stages of blocks of which the warpgroup sees nothing, as they arrive."""
    index, phase = state.index, state.phase
    for _ in cutlass.range(2 * blocks, unroll=1):
        cute.arch.mbarrier_wait(smem.full + index, phase)
        release_read(smem.empty + index)
        index, phase = schedule.advance(index, phase, stages)
    return KeysPipelineState(index, phase, state.count, state.first)


# -- dK and dV -----------------------------------------------------------------------------------------------------


@cute.jit
def compute(smem: KeysStorage, w, mmas: KeysMmas, params: BackwardParams, config: cutlass.Constexpr):
    """One warpgroup makes dK and dV of 64 keys of each tile."""
    operands = make_operands(mmas, smem, w, config)

    def compute_one(key_tile, numbers, held_phase, state):
        return compute_tile(operands, w, smem, key_tile, held_phase, state, numbers, config)

    each_tile(SCHEDULER, receiver(smem, w), params, config, compute_one, new_state())


@cute.jit
def compute_tile(
    operands: DkDvOperands, w, smem: KeysStorage, key_tile: KeyTile, held_phase, state: KeysPipelineState,
    params: BackwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """Makes dK and dV of one tile, and returns the state after it."""
    tiles = config.keys
    column = key_tile.column + w * ROWS
    group_blocks = blocks_of_group(column, key_tile, params, config)
    operands.dk.fill(0.0)
    operands.dv.fill(0.0)
    cute.arch.mbarrier_wait(smem.held_full + w, held_phase)  # K of this warpgroup, from load_keys
    cute.arch.mbarrier_wait(smem.held_full + tiles.key_tiles + w, held_phase)  # V
    for g in cutlass.range(params.group, unroll=1):
        state = state.restart()
        blocks = blocks_of_head(group_blocks, column, key_tile, g, params, config)
        state = skip(blocks.hidden, state, smem, tiles.stages)
        if cutlass.const_expr(config.has_upper):
            # Blocks on the diagonal, or blocks that need the predicate
            for step in cutlass.range(blocks.hidden, blocks.start - blocks.tile.start, unroll=1):
                block = blocks.partial_block(blocks.tile.start + step, params, config)
                state = query_block(operands, w, state, block, smem, params, config)
        for step in cutlass.range(blocks.stop - blocks.start, unroll=1):
            block = blocks.whole_block(blocks.start + step, params, config)
            state = query_block(operands, w, state, block, smem, params, config)
        if cutlass.const_expr(config.has_lower):
            # Blocks at the lower end of the band
            for step in cutlass.range(blocks.tile.stop - blocks.stop, unroll=1):
                block = blocks.partial_block(blocks.stop + step, params, config)
                state = query_block(operands, w, state, block, smem, params, config)
        warpgroup.wait_group(0)
        release_block_before(smem.empty, state, tiles.stages)
    scale(operands.dk, params.scale)
    scale_dropped(operands.dv, params, config)
    cute.arch.barrier(barrier_id=1 + w, number_of_threads=128)  # all four warps have read K and V for the last time
    finish(operands.dv, operands.mmas.dv, tile_at(smem.dv, w), smem.done + tiles.key_tiles + w, config)
    finish(operands.dk, operands.mmas.dk, tile_at(smem.dk, w), smem.done + w, config)
    return state


def query_block(
    operands: DkDvOperands, w, state: KeysPipelineState, block: ScoreBlock, smem: KeysStorage, params: BackwardParams, config: Backward
) -> KeysPipelineState:  # fmt: skip
    """Adds one query block to dK and dV, which are in flight between blocks: S runs under them, and P is made under dP's product.

    No more runs at once, and P is rounded as late as possible: dK and dV, S and dP take 192 registers at head_dim 128. With much more
    beside them the assembler runs out of registers and makes every product wait for the one before.
    """
    (q_stage, q_phase), (do_stage, do_phase) = state.stages_of_block(config.keys.stages)
    cute.arch.mbarrier_wait(smem.full + q_stage, q_phase)  # Q and lse2, from load_queries
    begin_s(operands, w, q_stage)  # Sᵀ = K Qᵀ, 64 x tile_m
    warpgroup.wait_group(1)  # dV and dK of the block before are done
    release_block_before(smem.empty, state, config.keys.stages)
    cute.arch.mbarrier_wait(smem.full + do_stage, do_phase)  # dO and delta
    begin_dp(operands, w, do_stage)  # dPᵀ = V dOᵀ, 64 x tile_m
    warpgroup.wait_group(1)  # S is done
    make_p_and_ds(operands, q_stage, do_stage, block, smem, params, config)
    begin_dv(operands, do_stage)  # dV += Pᵀ dO, 64 x width_v
    begin_dk(operands, q_stage)  # dK += dSᵀ Q, 64 x width
    return state.next_block(config.keys.stages)


def make_p_and_ds(
    operands: DkDvOperands, q_stage, do_stage, block: ScoreBlock, smem: KeysStorage, params: BackwardParams, config: Backward
) -> None:  # fmt: skip
    """Makes the operands P and dS of S, which is there, and of dP, which is in flight until P is made."""
    s, kept = rows_columns(operands.s), block.dropout_keeps(operands.s, params, config)
    p = operands.p if config.separate_ds else None
    probabilities(s, p, column_statistic(smem.statistics, q_stage), block, params, config, kept)
    hold_above_wait(smem.unread_word, operands.s)
    warpgroup.wait_group(0)  # dP is done
    score_gradients(rows_columns(operands.dp), s, column_statistic(smem.statistics, do_stage), kept, params)
    if not config.separate_ds:
        round_to_operand(operands.p, operands.s, config.dtype)
    round_to_operand(operands.ds, operands.dp, config.dtype)


# -- The end of a tile ---------------------------------------------------------------------------------------------


def scale_dropped(dv: cute.Tensor, params: BackwardParams, config: Backward) -> None:
    """Multiplies dV by dropout's factor 65536 / T, which P was made without."""
    if config.dropout:
        scale(dv, params.extra.keep)


def tile_at(t: cute.Tensor, n) -> cute.Tensor:
    """Tile n of (rows, columns, tile)."""
    return t[None, None, n]


def finish(acc: cute.Tensor, mma: cute.TiledMma, smem_tile: cute.Tensor, done, config: Backward) -> None:
    """Rounds a gradient, 64 x width, into its tile in shared memory, from where a storing warp takes it."""
    store_accumulator(acc, mma, smem_tile, config.dtype, held=config.keys.reads_late)
    cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(done)


# -- dK, dV and dQ -------------------------------------------------------------------------------------------------


@cute.jit
def compute_and_sum(
    smem: KeysStorage, buffers: RowBuffers, w, mmas: KeysMmas, params: BackwardParams, config: cutlass.Constexpr
):  # fmt: skip
    """One warpgroup makes dK and dV of 64 keys of each tile, and its parts of dQ."""
    operands = make_operands(mmas, smem, w, config)

    def sum_one(key_tile, numbers, held_phase, state):
        return summing_tile(operands, w, smem, buffers, key_tile, held_phase, state, numbers, config)

    if cutlass.const_expr(config.keys.queued):
        each_queued(SCHEDULER, smem.boxes, params, config, sum_one, new_state())
    else:
        each_tile(SCHEDULER, receiver(smem, w), params, config, sum_one, new_state())


@cute.jit
def summing_tile(
    operands: DkDvOperands, w, smem: KeysStorage, buffers: RowBuffers, key_tile: KeyTile, held_phase, state: KeysPipelineState,
    params: BackwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """Makes dK, dV and the parts of dQ of one tile, and returns the state after it."""
    tiles = config.keys
    operands.dk.fill(0.0)
    operands.dv.fill(0.0)
    column = key_tile.column + w * ROWS
    group_blocks = blocks_of_group(column, key_tile, params, config)
    for n in cutlass.range_constexpr(2 * tiles.key_tiles):  # K and V of both warpgroups: dQ takes all 128 keys
        cute.arch.mbarrier_wait(smem.held_full + n, held_phase)
    if cutlass.const_expr(operands.v_registers is not None):
        load_register_steps(operands.v_registers.a, operands.mmas.dp_registers, tile_at(smem.v, w))
    if cutlass.const_expr(tiles.overlaps):
        cute.arch.mbarrier_wait(smem.left, 1 - held_phase)  # dK and dV of the tile before have left, from store
    state = state.restart()
    if cutlass.const_expr(config.sums_bias):
        operands.dbias.fill(0.0)
    for g in cutlass.range(key_tile.query_heads(params), unroll=1):
        blocks = blocks_of_head(group_blocks, column, key_tile, g, params, config)
        if cutlass.const_expr(config.score == "table" and config.form == "full"):
            for _ in cutlass.range(blocks.near - blocks.tile.start, unroll=1):
                block = ScoreBlock(bias=blocks.bias.beyond(before=True))
                state = summing_block(operands, w, state, block, smem, params, config)
        if cutlass.const_expr(config.has_upper or config.score == "table"):
            first = blocks.near if config.score == "table" else blocks.tile.start
            for step in cutlass.range(blocks.start - first, unroll=1):
                block = blocks.partial_block(first + step, params, config)
                state = summing_block(operands, w, state, block, smem, params, config)
        for step in cutlass.range(blocks.stop - blocks.start, unroll=1):
            block = ScoreBlock()
            if cutlass.const_expr(config.pairs or config.biased):
                block = blocks.whole_block(blocks.start + step, params, config)
            state = summing_block(operands, w, state, block, smem, params, config)
        if cutlass.const_expr(config.form != "bits" and config.score != "table"):
            # Blocks at the lower end of the band, or all blocks where keys past the last one are in the tile
            for step in cutlass.range(blocks.tile.stop - blocks.stop, unroll=1):
                block = blocks.partial_block(blocks.stop + step, params, config)
                state = summing_block(operands, w, state, block, smem, params, config)
        if cutlass.const_expr(config.score == "alibi" and config.trained):
            head = key_tile.head * params.group + g
            dslopes.store(operands.dbias, params.extra.dbias, key_tile.batch, head, column // ROWS)
        if cutlass.const_expr(config.score == "table"):
            dlines.store(operands.dbias, blocks.bias.sums)
    dq_accumulate.begin_part(operands.dq, smem.dq, state.count - 1, config)  # of the last block
    warpgroup.wait_group(0)
    part = parts.published(smem, w) if config.parted else None  # before load_keys may tell the next one
    if cutlass.const_expr(tiles.overlaps):
        release_held(smem)
    put_part_before(operands, w, state, smem)
    if cutlass.const_expr(config.parted):
        parts.gather((operands.dk, operands.dv), buffers, smem.told, part, w, 2, params)
    scale(operands.dk, params.scale)
    scale_dropped(operands.dv, params, config)
    # Both warpgroups have read K and V, and dS, for the last time
    cute.arch.barrier(barrier_id=1, number_of_threads=128 * KEY_GROUPS)
    finish(operands.dv, operands.mmas.dv, tile_at(smem.dv, w), smem.done + tiles.key_tiles + w, config)
    if cutlass.const_expr(tiles.overlaps):
        dq_accumulate.await_part(smem.dq, w, state.count - 1)
    finish(operands.dk, operands.mmas.dk, tile_at(smem.dk, w), smem.done + w, config)
    return state


def release_held(smem: KeysStorage) -> None:
    """Each warp says that it has read K and V for the last time. Partner: load_keys. A warpgroup arrives for the other one's V too: the
    next V must not come before it has seen this one, even where a tile has no query blocks."""
    cute.arch.sync_warp()
    for n in range(2 * KEY_GROUPS):
        release(smem.held_empty + n)


def summing_block(
    operands: DkDvOperands, w, state: KeysPipelineState, block: ScoreBlock, smem: KeysStorage, params: BackwardParams, config: Backward,
) -> KeysPipelineState:  # fmt: skip
    """Adds one query block to dK and dV, and makes the part of dQ of the block before: both warpgroups' dS of that block is there
    without waiting, so that they may be most of a block apart. Nothing is in flight between blocks.

    With the part of dQ in flight until S of the next block has begun, or dK, the assembler would make every product wait for the one
    before: it follows neither accumulators that are read in the next turn of a loop nor products that some turns leave out, and
    runs out of registers. So a tile's first block makes a part too, from garbage, and discards it.
    """
    (q_stage, q_phase), (do_stage, do_phase) = state.stages_of_block(config.keys.stages)
    cute.arch.mbarrier_wait(smem.full + q_stage, q_phase)  # Q and lse2, from load_queries
    # Where products subtract, both statistics came with Q.
    slot = config.statistics.slot(q_stage)
    begin_s(operands, w, q_stage, slot)  # Sᵀ = K Qᵀ, 64 x tile_m
    kept, late = None, config.keys.dp_late
    if not late:
        cute.arch.mbarrier_wait(smem.full + do_stage, do_phase)  # dO and delta
        begin_dp(operands, w, do_stage, slot)  # dPᵀ = V dOᵀ, 64 x tile_m
        kept = kept_pairs(operands, block, smem, params, config)  # under both products
    stage = acquire_tile(operands.bias) if config.score == "bias" else None  # from load_queries
    warpgroup.wait_group(int(not late))  # S is done
    lse2 = None if config.subtracts else statistic(smem, q_stage, operands.s, config)
    # A softcap's slope · P is rounded as P is: dS takes it in P's place.
    sloped = cute.make_rmem_tensor_like(operands.p) if config.score == "softcap" else None
    if config.score == "bias":
        block = block._replace(
            bias=pair_bias.block_bias(operands.bias, stage, operands.mmas.dk, rows_columns(operands.s), config)
        )
    probabilities(rows_columns(operands.s), operands.p, lse2, block, params, config, sloped=sloped)
    if config.score == "bias" and not config.stores_bias:
        pair_bias.release_block(operands.bias, rows_columns(operands.s), config.keys.bias_stages)
    if late:
        cute.arch.mbarrier_wait(smem.full + do_stage, do_phase)  # dO and delta
        begin_dp(operands, w, do_stage, slot)  # dPᵀ = V dOᵀ, 64 x tile_m
        kept = kept_pairs(operands, block, smem, params, config)  # under that product
    if config.dropout:
        # dS takes the P of dropped pairs too, and there are no registers for two operands: dV comes after dS.
        if not late:
            hold_above_wait(smem.unread_word, operands.p)
        warpgroup.wait_group(0)  # dP is done
    else:
        begin_dv(operands, do_stage)  # dV += Pᵀ dO, 64 x width_v, runs while dS is made
        warpgroup.wait_group(1)  # dP is done
    delta = None if config.subtracts else statistic(smem, do_stage, operands.dp, config)
    p = rounded_p(operands, sloped if config.score == "softcap" else operands.p, config)
    score_gradients(rows_columns(operands.dp), p, delta, kept, params, by_columns=config.keys.reads_late)
    if config.sums_bias:
        add_block = {"alibi": dslopes.add_block, "table": dlines.add_block}[config.score]
        add_block(operands.dbias, rows_columns(operands.dp), block.bias)
    round_to_operand(operands.ds, operands.dp, config.dtype)
    if config.dropout:
        dropout.drop(operands.p, kept.masks(config.keys.tile_m // 4))
        begin_dv(operands, do_stage)  # dV += Pᵀ dO, 64 x width_v
    ds = as_accumulator(operands.ds, operands.dp)
    if config.stores_bias:
        pair_bias.put_gradient(ds, operands.mmas.score, operands.bias, config)
    dq_accumulate.put_scores(ds, operands.mmas.score, smem.dq, state.count, w, config)
    if config.stores_bias:
        pair_bias.hand_gradient(operands.bias, smem.bias.done, config.keys.bias_stages)
    end = dq_then_dk if config.keys.dq_first else dk_then_dq
    end(operands, w, state, smem, q_stage, do_stage, config)
    return state.next_block(config.keys.stages)


def statistic(smem: KeysStorage, stage, acc: cute.Tensor, config: Backward):
    """The statistics of a block's columns, as :func:`column_statistic` or :class:`HeldStatistic` has them."""
    if config.keys.reads_late:
        return HeldStatistic(smem.statistics, stage, rows_columns(acc))
    return column_statistic(smem.statistics, stage)


def kept_pairs(
    operands: DkDvOperands, block: ScoreBlock, smem: KeysStorage, params: BackwardParams, config: Backward
) -> dropout.Kept | None:
    """The pairs that dropout keeps, drawn before the wait that follows; None without dropout."""
    kept = block.dropout_keeps(operands.s, params, config)
    if kept is not None:
        keep_words_above(smem.unread_word, kept.words)
    return kept


def rounded_p(operands: DkDvOperands, p: cute.Tensor, config: Backward) -> cute.Tensor | OperandValues:
    """An operand as P as fp32 numbers at a thread's (row, column). Tiles with columns of V in registers, and those whose products subtract
    statistics, take fewer instructions for it; other kernels without dropout keep the program that they had."""
    few = (
        v_register_steps(config.keys, config.statistics, config.packed, config.sums_bias)
        or config.subtracts
        or config.separate_ds
    )
    if few:
        return OperandValues(p, operands.dp, config.dtype, held=8 if config.dropout and config.dtype == "fp16" else 0)
    return as_rows_columns(p, operands.dp)


def dk_then_dq(
    operands: DkDvOperands, w, state: KeysPipelineState, smem: KeysStorage, q_stage, do_stage, config: Backward
) -> None:
    """dK += dSᵀ Q, then the part of dQ of the block before, if this tile had one."""
    begin_dk(operands, q_stage)  # 64 x width
    dq_accumulate.begin_part(operands.dq, smem.dq, state.count - 1, config)
    warpgroup.wait_group(0)
    release_read(smem.empty + q_stage)
    release_read(smem.empty + do_stage)
    put_part_before(operands, w, state, smem)


def dq_then_dk(
    operands: DkDvOperands, w, state: KeysPipelineState, smem: KeysStorage, q_stage, do_stage, config: Backward
) -> None:
    """The part of dQ of the block before, if this tile had one, then dK += dSᵀ Q: the part is stored while dK's product runs."""
    dq_accumulate.begin_part(operands.dq, smem.dq, state.count - 1, config)
    begin_dk(operands, q_stage)  # 64 x width
    warpgroup.wait_group(1)  # dV and the part of dQ are done
    release_read(smem.empty + do_stage)
    put_part_before(operands, w, state, smem)
    warpgroup.wait_group(0)
    release_read(smem.empty + q_stage)


def put_part_before(operands: DkDvOperands, w, state: KeysPipelineState, smem: KeysStorage) -> None:
    """Hands on the part of dQ of the block before, if this tile had one."""
    dq_accumulate.put_part(operands.dq, smem.dq, w, state.count - 1, state.count > state.first)
