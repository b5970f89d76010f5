"""The computing warpgroups of the pass over query tiles (:mod:`tilewise.backends.hopper.backward.queries`).

A key block passes through these products; all have 64 rows, the queries, and accumulate in fp32::

    S  = Q Kᵀ     64 x tile_n        P  = 2**(S - lse2)
    dP = dO Vᵀ    64 x tile_n        dS = P (dP - delta)
    dQ += dS K    64 x width
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.fragments import (
    begin_products,
    hold_above_wait,
    release_read,
    round_to_operand,
    scale,
    stage_of,
    store_accumulator,
    transposed,
)
from tilewise.backends.hopper.backward.halves import add_peer
from tilewise.backends.hopper.backward.params import BackwardParams, row_band
from tilewise.backends.hopper.backward.preprocess import INF, StatisticsTensors, statistics_of
from tilewise.backends.hopper.backward.queries_storage import QueriesMmas, QueriesStorage
from tilewise.backends.hopper.backward.query_tiles import (
    SCHEDULER,
    hidden_blocks,
    limits_of,
    score_block,
    whole_blocks,
)
from tilewise.backends.hopper.backward.scores import ScoreBlock, probabilities, score_gradients, thread_rows
from tilewise.backends.hopper.backward.sequences import receiver
from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.kit import schedule
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.instructions import both
from tilewise.backends.hopper.kit.ring import release
from tilewise.backends.hopper.kit.scheduler import each_tile
from tilewise.backends.hopper.kit.tiles import QueryTile, reduce_quad, row_of, rows_columns

VECTOR = 8  # elements that a thread reads at a time

# -- Operands ------------------------------------------------------------------------------------------------------


class QueryOperands(NamedTuple):
    """The operands and accumulators of one warpgroup. An operand in shared memory is (1, 1, k steps, warpgroup or stage).

    Attributes:
        q, do: 64 queries x width, A of the scores' products.
        k, v: tile_n keys x width, B of the scores' products; ``k_transposed``: the same blocks as width x tile_n.
        s, dp: accumulators of S and dP, 64 x tile_n, fp32.
        ds: the operand of dS, 64 x tile_n, in registers in the order of ``dp``.
        dq: the accumulator, 64 x width, fp32.
        lse2, delta: (2,), fp32: the statistics of a thread's two rows.
    """

    mmas: QueriesMmas
    q: cute.Tensor
    do: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    k_transposed: cute.Tensor
    s: cute.Tensor
    dp: cute.Tensor
    ds: cute.Tensor
    dq: cute.Tensor
    lse2: cute.Tensor
    delta: cute.Tensor


def make_operands(mmas: QueriesMmas, smem: QueriesStorage, config: Backward) -> QueryOperands:
    """The operands of a warpgroup."""
    tiles, score, dq = config.queries, mmas.score.get_slice(0), mmas.dq.get_slice(0)
    scores = mmas.score.partition_shape_C((ROWS, tiles.tile_n))
    return QueryOperands(
        mmas,
        mmas.score.make_fragment_A(score.partition_A(smem.q)),
        mmas.score.make_fragment_A(score.partition_A(smem.do)),
        mmas.score.make_fragment_B(score.partition_B(smem.k)),
        mmas.score.make_fragment_B(score.partition_B(smem.v)),
        mmas.dq.make_fragment_B(dq.partition_B(transposed(smem.k))),
        cute.make_rmem_tensor(scores, F32), cute.make_rmem_tensor(scores, F32),
        cute.make_rmem_tensor(mmas.dq.partition_shape_A((ROWS, tiles.tile_n)), ELEMENT[config.dtype]),
        cute.make_rmem_tensor(mmas.dq.partition_shape_C((ROWS, tiles.width)), F32),
        cute.make_rmem_tensor((2,), F32), cute.make_rmem_tensor((2,), F32),
    )  # fmt: skip


class QueriesPipelineState(NamedTuple):
    """The place of a computing warpgroup in the ring.

    Attributes:
        index, phase: the stage that holds the V of the next block; its K is in the stage after it.
        count: how many blocks of its tile the warpgroup has done.
    """

    index: I32
    phase: I32
    count: I32


@cute.jit
def release_k_before(empty, state: QueriesPipelineState, stages: cutlass.Constexpr):
    """Releases the stage of the K of the block before, which only the product dS K still reads, if this tile had one."""
    if state.count > 0:
        release(empty + (state.index + stages - 1) % stages)


@cute.jit
def skip(blocks, state: QueriesPipelineState, smem: QueriesStorage, stages: cutlass.Constexpr) -> QueriesPipelineState:
    """Releases the stages of blocks of which the warpgroup sees nothing, as they arrive."""
    index, phase = state.index, state.phase
    for _ in cutlass.range(2 * blocks, unroll=1):
        cute.arch.mbarrier_wait(smem.full + index, phase)
        release(smem.empty + index)
        index, phase = schedule.advance(index, phase, stages)
    return QueriesPipelineState(index, phase, state.count)


# -- dQ ------------------------------------------------------------------------------------------------------------


@cute.jit
def compute(
    smem: QueriesStorage, w, rows: StatisticsTensors, mmas: QueriesMmas, params: BackwardParams, config: cutlass.Constexpr
):  # fmt: skip
    """One warpgroup makes dQ of 64 rows of each tile."""
    operands = make_operands(mmas, smem, config)

    def compute_one(query_tile, numbers, held_phase, state):
        return compute_tile(operands, w, rows, smem, query_tile, held_phase, state, numbers, config)

    state = QueriesPipelineState(I32(0), I32(0), I32(0))
    each_tile(SCHEDULER, receiver(smem, w), params, config, compute_one, state)


@cute.jit
def compute_tile(
    operands: QueryOperands, w, rows: StatisticsTensors, smem: QueriesStorage, query_tile: QueryTile, held_phase,
    state: QueriesPipelineState, params: BackwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """Makes dQ of one tile, and returns the state after it."""
    tiles, row = config.queries, query_tile.row + w * ROWS
    band = row_band(query_tile.batch, query_tile.head, params, config)
    start, stop = whole_blocks(row, query_tile, band, config)
    hidden, limits = hidden_blocks(row, query_tile, band, config), limits_of(row, band, config)
    if cutlass.const_expr(tiles.makes_statistics):
        known = lse_and_dlse(rows, query_tile, row, params, config)
    else:
        read_statistics(operands, rows, query_tile, row, params, config)
    operands.dq.fill(0.0)
    cute.arch.mbarrier_wait(smem.held_full + w, held_phase)  # Q and dO of this warpgroup, from load_rows
    state = QueriesPipelineState(state.index, state.phase, I32(0))
    if cutlass.const_expr(tiles.makes_statistics):
        state = make_statistics(operands, w, known, rows, smem, query_tile, row, state, params, config)
    state = skip(hidden, state, smem, tiles.stages)
    # Blocks on the diagonal and at the end of the keys, or blocks that need the predicate
    for step in cutlass.range(hidden, query_tile.stop - stop, unroll=1):
        block = score_block(limits, row, step, query_tile, params, config)
        state = key_block(operands, w, state, block, smem, params, config)
    for step in cutlass.range(stop - start, unroll=1):
        block = score_block(None, row, query_tile.stop - stop + step, query_tile, params, config)
        state = key_block(operands, w, state, block, smem, params, config)
    if cutlass.const_expr(config.has_lower):
        # Blocks at the lower end of the band
        for step in cutlass.range(start - query_tile.start, unroll=1):
            block = score_block(limits, row, query_tile.stop - start + step, query_tile, params, config)
            state = key_block(operands, w, state, block, smem, params, config)
    warpgroup.wait_group(0)
    release_k_before(smem.empty, state, tiles.stages)
    scale(operands.dq, params.scale)
    cute.arch.barrier(barrier_id=1 + w, number_of_threads=128)  # all four warps have read Q for the last time
    store_accumulator(operands.dq, operands.mmas.dq, smem.dq[None, None, w], config.dtype)
    cute.arch.fence_view_async_shared()
    # Partner: the storing warp of this warpgroup.
    cute.arch.mbarrier_arrive(smem.done + w)
    return state


def key_block(
    operands: QueryOperands, w, state: QueriesPipelineState, block: ScoreBlock, smem: QueriesStorage,
    params: BackwardParams, config: Backward,
) -> QueriesPipelineState:  # fmt: skip
    """Adds one key block to dQ, which is in flight between blocks: P is made under dP's product."""
    stages = config.queries.stages
    v_stage, v_phase = state.index, state.phase
    k_stage, k_phase = schedule.advance(v_stage, v_phase, stages)
    cute.arch.mbarrier_wait(smem.full + k_stage, k_phase)  # K, from load_keys
    # S = Q Kᵀ, 64 x tile_n
    q, k = stage_of(operands.q, w), stage_of(operands.k, k_stage)
    begin_products(operands.mmas.score, operands.s, [(q, k)], overwrite=True)
    cute.arch.mbarrier_wait(smem.full + v_stage, v_phase)  # V
    # dP = dO Vᵀ, 64 x tile_n
    do, v = stage_of(operands.do, w), stage_of(operands.v, v_stage)
    begin_products(operands.mmas.score, operands.dp, [(do, v)], overwrite=True)
    warpgroup.wait_group(1)  # S, and dQ of the block before
    release_k_before(smem.empty, state, stages)
    if config.queries.halved:
        add_peer(operands.s, smem.halves, w, 0)
    # P, 64 x tile_n, fp32, in S's registers.
    s, kept = rows_columns(operands.s), block.dropout_keeps(operands.s, params, config)
    probabilities(s, None, lambda r, c: operands.lse2[r], block, params, config)
    hold_above_wait(smem.unread_word, s)
    warpgroup.wait_group(0)  # dP is done
    # Partner: load_keys.
    release(smem.empty + v_stage)
    if config.queries.halved:
        add_peer(operands.dp, smem.halves, w, 1)
    score_gradients(rows_columns(operands.dp), s, lambda r, c: operands.delta[r], kept, params)
    # dS, 64 x tile_n, rounded to the A operand of the next product: no shuffle.
    round_to_operand(operands.ds, operands.dp, config.dtype)
    # dQ += dS K, 64 x width
    k_transposed = stage_of(operands.k_transposed, k_stage)
    begin_products(operands.mmas.dq, operands.dq, [(operands.ds, k_transposed)], overwrite=False)
    return QueriesPipelineState(*schedule.advance(k_stage, k_phase, stages), state.count + 1)


# -- Statistics ----------------------------------------------------------------------------------------------------


def statistics_places(query_tile: QueryTile, row, params: BackwardParams, config: Backward) -> tuple[list, list]:
    """A thread's two rows in a warpgroup whose rows begin at ``row``, rows past the last one included, and the indices of their
    statistics."""
    rows = thread_rows(row)
    if config.packed:
        return rows, [(0, query_tile.head, query_tile.seqlen.statistics_row + i) for i in rows]
    return rows, [(query_tile.batch, query_tile.head, i) for i in rows]


def read_statistics(
    operands: QueryOperands, rows: StatisticsTensors, query_tile: QueryTile, row, params: BackwardParams, config: Backward
) -> None:  # fmt: skip
    """Reads the statistics of a thread's two rows, which the preprocessing kernel has made."""
    for r, place in enumerate(statistics_places(query_tile, row, params, config)[1]):
        operands.lse2[r], operands.delta[r] = rows.lse2[place], rows.delta[place]


def lse_and_dlse(
    rows: StatisticsTensors, query_tile: QueryTile, row, params: BackwardParams, config: Backward
) -> list[tuple]:
    """lse and dlse of a thread's two rows, or of the last row where there is none."""
    batch, start = (0, query_tile.seqlen.q.start) if config.packed else (query_tile.batch, 0)
    mine = statistics_places(query_tile, row, params, config)[0]
    sources = [start + cutlass.min(i, params.seqlen_q - 1) for i in mine]
    return [(rows.lse[batch, query_tile.head, i], rows.dlse[batch, query_tile.head, i]) for i in sources]


def make_statistics(
    operands: QueryOperands, w, known: list, rows: StatisticsTensors, smem: QueriesStorage, query_tile: QueryTile, row,
    state: QueriesPipelineState, params: BackwardParams, config: Backward,
) -> QueriesPipelineState:  # fmt: skip
    """Makes lse2 and delta (13) of a thread's two rows from dO and O, which passes through the ring, one block for each warpgroup. Also
    writes them for the pass over keys. Returns the state after the blocks of O."""
    tiles, thread = config.queries, cute.arch.thread_idx()[0] % 128
    for n in range(tiles.warpgroups):  # its own block of O first
        stage, phase = schedule.advance(state.index, state.phase, tiles.stages, step=(w + n) % tiles.warpgroups)
        cute.arch.mbarrier_wait(smem.full + stage, phase)
        if n == 0:
            # Summed up before the stage is released: loads that are on their way would find what the copy engine brings next
            # (docs/decisions.md#hopper-stage-release).
            totals = [row_product(smem, stage, w, row_of(thread, r), config) for r in range(2)]
            totals = [reduce_quad(total, lambda a, b: a + b) for total in totals]
            cute.arch.fence_view_async_shared()
        release_read(smem.empty + stage)
    for r, (i, place) in enumerate(zip(*statistics_places(query_tile, row, params, config), strict=True)):
        operands.lse2[r], operands.delta[r] = statistics_of(*known[r], totals[r], i < params.seqlen_q, config)
        put_statistics(rows, place, operands.lse2[r], operands.delta[r], thread % 4 == 0)
        if tiles.tile_m % config.keys.tile_m:  # the last block of the pass over keys may go on past the last query tile
            beyond, blocks = i + tiles.tile_m, (params.seqlen_q + config.keys.tile_m - 1) // config.keys.tile_m
            last = both(query_tile.row + tiles.tile_m >= params.seqlen_q, beyond < blocks * config.keys.tile_m)
            place = *place[:2], place[2] + tiles.tile_m
            put_statistics(rows, place, INF, 0.0, both(last, thread % 4 == 0))
    return QueriesPipelineState(
        *schedule.advance(state.index, state.phase, tiles.stages, step=tiles.warpgroups), state.count
    )


def row_product(smem: QueriesStorage, stage, w, i, config: Backward):
    """A thread's part of dO · O of row i: every fourth vector. Neighbouring rows begin at vectors 64 bytes apart, so that eight threads
    read from all banks."""
    total, count = F32(0.0), config.queries.width_v // (4 * VECTOR)
    lane = cute.arch.thread_idx()[0] % 4
    for n in range(count):
        vector = 4 * ((n + i % 2) % count) + lane
        o, do = read_vector(smem.o, i, vector, stage, config), read_vector(smem.do, i, vector, w, config)
        total = total + inner_product(o, do)
    return total


def read_vector(tiles: cute.Tensor, i, n, stage, config: Backward) -> cute.Tensor:
    """The n-th 16 bytes of row i of a tile in shared memory, (VECTOR,)."""
    part = cute.make_rmem_tensor((VECTOR,), ELEMENT[config.dtype])
    cute.autovec_copy(cute.local_tile(tiles[i, None, stage], (VECTOR,), (n,)), part)
    return part


def inner_product(one: cute.Tensor, other: cute.Tensor):
    """The sum of products of two vectors, in fp32."""
    return (one.load().to(F32) * other.load().to(F32)).reduce(cute.ReductionOp.ADD, F32(0.0), 0)


@cute.jit
def put_statistics(rows: StatisticsTensors, place: tuple, lse2, delta, mine):
    """Writes the statistics of a row, where ``mine``: one lane of a quad writes for all four."""
    if mine:
        rows.lse2[place] = lse2
        rows.delta[place] = delta
