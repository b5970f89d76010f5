"""dQ = scale · dS K over query tiles on Hopper (sm_90a); docs/algorithm.md, (13) to (15). Where this is the first pass, it also makes
the rows' statistics, lse2 and delta, which the pass over keys then reads.

Roles of a CTA of ``1 + W`` warpgroups, persistent over tiles of ``64 W`` queries::

    warp 0       load_rows    64 rows of Q and of dO for each warpgroup, once a tile
    warp 1       load_keys    the key blocks from the last to the first: Vn Kn .. V0 K0; before them O, if this is the first pass
    warps 2, 3   store        dQ of one warpgroup each
    warpgroups   compute      delta of O and dO; S = Q Kᵀ and dP = dO Vᵀ, dS in registers, dQ += dS K; 64 rows each

The computing role is in :mod:`tilewise.backends.hopper.backward.queries_compute`. Of packed sequences load_rows alone knows which
tile is next and tells the others.

mbarriers (arrivals in brackets), each waited for by the other side::

    full[stage]   (1 + bytes)          load_keys -> compute      empty[stage]  (every computing warp)  compute -> load_keys
    held_full[w]  (1 + bytes of both)  load_rows -> compute      held_empty[w] (1)                     store -> load_rows
    done[w]       (128)                compute -> store

dQ takes the place of Q.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import LayoutEnum

from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.fragments import rows_first, warp_and_warpgroup
from tilewise.backends.hopper.backward.params import BackwardParams, flag_place
from tilewise.backends.hopper.backward.preprocess import StatisticsTensors
from tilewise.backends.hopper.backward.queries_compute import compute
from tilewise.backends.hopper.backward.queries_storage import (
    QueriesMmas,
    QueriesStorage,
    QueriesTmas,
    allocate,
    init_barriers,
)
from tilewise.backends.hopper.backward.query_tiles import SCHEDULER, block_at, number_of, rounds_of
from tilewise.backends.hopper.backward.sequences import ahead_receiver, publish_held, receiver
from tilewise.backends.hopper.config import ELEMENT_BYTES, ROWS
from tilewise.backends.hopper.kit import packed
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32
from tilewise.backends.hopper.kit.instructions import count_up, meet
from tilewise.backends.hopper.kit.ring import PipelineState, fetch, new_writer
from tilewise.backends.hopper.kit.scheduler import each_tile, take_tiles
from tilewise.backends.hopper.kit.tiles import QueryTile, staged_layout, tma_tiles

# -- Launch and kernel ---------------------------------------------------------------------------------------------


class QueriesTensors(NamedTuple):
    """The tensors that the pass reads and writes, (batch, seqlen, heads, head_dim)."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    dq: cute.Tensor


def launch(t: QueriesTensors, rows: StatisticsTensors, params: BackwardParams, ctas, stream, config: Backward) -> None:
    """Launches the kernel, within a traced function of the host's."""
    tiles, element, tall = config.queries, ELEMENT[config.dtype], LayoutEnum.ROW_MAJOR

    def a_layout(width):  # 64 rows of Q, dO or O, A operand of the scores
        return sm90.make_smem_layout_a(tall, (ROWS, tiles.tile_n, width), element, 1)

    def ring(layout):
        return staged_layout(layout, tiles.stages, tiles.stage_elements)

    def held(layout):
        return staged_layout(layout, tiles.warpgroups, tiles.tile_elements)

    def key_ring(width):  # blocks of tile_n keys, B operand of the scores
        return ring(sm90.make_smem_layout_b(tall, (ROWS, tiles.tile_n, width), element, 1))

    def load(tensor, layout, rows, width):
        atom = cpasync.CopyBulkTensorTileG2SOp()
        return cpasync.make_tiled_tma_atom(atom, rows_first(tensor, config), layout, (rows, width))

    out = sm90.make_smem_layout_epi(element, tall, (ROWS, tiles.width), 1)
    save = cpasync.CopyBulkTensorTileS2GOp()
    tmas = QueriesTmas(
        load(t.q, held(a_layout(tiles.width)), ROWS, tiles.width),
        load(t.do, held(a_layout(tiles.width_v)), ROWS, tiles.width_v),
        load(t.k, key_ring(tiles.width), tiles.tile_n, tiles.width),
        load(t.v, key_ring(tiles.width_v), tiles.tile_n, tiles.width_v),
        cpasync.make_tiled_tma_atom(save, rows_first(t.dq, config), held(out), (ROWS, tiles.width)),
        load(rows.o, ring(a_layout(tiles.width_v)), ROWS, tiles.width_v) if tiles.makes_statistics else None,
    )
    major, registers = OperandMajorMode, warpgroup.OperandSource.RMEM
    mma = sm90.make_trivial_tiled_mma
    mmas = QueriesMmas(
        mma(element, element, major.K, major.K, F32, (1, 1, 1), (ROWS, tiles.tile_n)),  # S = Q Kᵀ and dP = dO Vᵀ
        mma(element, element, major.K, major.MN, F32, (1, 1, 1), (ROWS, tiles.width), registers),  # dQ += dS K
    )
    kernel.set_name_prefix(f"{config.name}_queries", remove_cutlass_symbol=True, keep_mangled_name=False)
    kernel(tmas, rows, mmas, params, config).launch(
        grid=[ctas, 1, 1],
        block=[tiles.threads, 1, 1],
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
        **({"cluster": [tiles.ctas, 1, 1]} if tiles.halved else {}),
    )


@cute.kernel
def kernel(
    tmas: QueriesTmas, rows: StatisticsTensors, mmas: QueriesMmas, params: BackwardParams, config: cutlass.Constexpr
):
    """Gives every warp its role."""
    tiles, (warp, group) = config.queries, warp_and_warpgroup()
    smem = allocate(tmas, config)
    init_barriers(smem, config)
    if cutlass.const_expr(tiles.makes_statistics):
        cute.arch.griddepcontrol_wait()  # this kernel may begin while the one before it in the stream ends
    if group == 0:
        cute.arch.setmaxregister_decrease(tiles.registers_load)
        if warp == 0:
            load_rows(tmas, smem, params, config)
        elif warp == 1:
            load_keys(tmas, smem, params, config)
        elif warp < 2 + tiles.warpgroups:
            store(tmas, rows.lse2, smem, warp - 2, params, config)
    else:
        cute.arch.setmaxregister_increase(tiles.registers)
        compute(smem, group - 1, rows, mmas, params, config)
    if cutlass.const_expr(not tiles.makes_statistics):
        cute.arch.griddepcontrol_wait()  # what comes next in the stream finds dK and dV, too
    if cutlass.const_expr(tiles.halved):
        meet()  # neither CTA's shared memory goes while the peer may still reach for it


# -- Load ----------------------------------------------------------------------------------------------------------


@cute.jit
def load_rows(tmas: QueriesTmas, smem: QueriesStorage, params: BackwardParams, config: cutlass.Constexpr):
    """One warp loads Q and dO of every tile, as soon as the dQ that lay there has left."""

    def load_tile(query_tile: QueryTile, packed_tile: packed.PackedTile | None, phase) -> None:
        tiles = config.queries
        gQ, sQ = tma_tiles(tmas.q, (ROWS, tiles.width), (None, smem.half), query_tile.head, query_tile.rows, smem.q)
        gO, sO = tma_tiles(tmas.do, (ROWS, tiles.width_v), (None, smem.half), query_tile.head, query_tile.rows, smem.do)
        for w in range(tiles.warpgroups):
            m, full = query_tile.row // ROWS + w, smem.held_full + w
            publish_held(packed_tile, smem, w, phase)
            cute.arch.mbarrier_wait(smem.held_empty + w, phase)  # store has stored dQ
            with cute.arch.elect_one():
                both = ELEMENT_BYTES * ROWS * (tiles.width + tiles.width_v)
                cute.arch.mbarrier_arrive_and_expect_tx(full, both)
            # Q, 64 × width, and dO, 64 × width_v, of warpgroup w: one barrier for both.
            cute.copy(tmas.q.atom, gQ[None, m], sQ[None, w], tma_bar_ptr=full)
            cute.copy(tmas.do.atom, gO[None, m], sO[None, w], tma_bar_ptr=full)

    def prefetch_tile(query_tile: QueryTile) -> None:
        """Brings Q and dO to L2: all CTAs begin their tiles at about the same time, and memory would keep them waiting."""
        for info, width, held in ((tmas.q, config.queries.width, smem.q), (tmas.do, config.queries.width_v, smem.do)):
            g, _ = tma_tiles(info, (ROWS, width), (None, smem.half), query_tile.head, query_tile.rows, held)
            for w in range(config.queries.warpgroups):
                cute.prefetch(info.atom, g[None, query_tile.row // ROWS + w])

    upcoming = prefetch_tile if config.queries.prefetches else None
    take_tiles(SCHEDULER, smem, config.queries.warpgroups, params, config, load_tile, upcoming)


@cute.jit
def load_keys(tmas: QueriesTmas, smem: QueriesStorage, params: BackwardParams, config: cutlass.Constexpr):
    """One warp loads the key blocks of every tile, V first: K is kept until the next block's scores are made, so that three stages
    suffice for all of the next block to arrive meanwhile."""

    def load_tile(query_tile, numbers, phase, state):
        return load_blocks(tmas, smem, query_tile, state, numbers, config)

    each_tile(SCHEDULER, ahead_receiver(smem, config.queries.warpgroups), params, config, load_tile, new_writer())


@cute.jit
def load_blocks(
    tmas: QueriesTmas, smem: QueriesStorage, query_tile: QueryTile, state: PipelineState,
    params: BackwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """Loads a tile's key blocks, and before them its O if the statistics are made here. Returns the ring's state."""
    tiles = config.queries
    k_bytes, v_bytes = (ELEMENT_BYTES * tiles.tile_n * width for width in (tiles.width, tiles.width_v))
    if cutlass.const_expr(tiles.makes_statistics):
        o_bytes = ELEMENT_BYTES * ROWS * tiles.width_v
        gO, sO = tma_tiles(tmas.o, (ROWS, tiles.width_v), (None, smem.half), query_tile.head, query_tile.rows, smem.o)
        for w in range(tiles.warpgroups):
            o, full, empty = gO[None, query_tile.row // ROWS + w], smem.full + state.index, smem.empty + state.index
            # O, 64 × width_v, of warpgroup w: read once for delta, then its stage goes to K and V.
            fetch(tmas.o, o, sO[None, state.index], o_bytes, full, empty, state.phase)
            state = state.advance(tiles.stages)
    head_k = query_tile.head // params.group
    gK, sK = tma_tiles(tmas.k, (tiles.tile_n, tiles.width), (None, smem.half), head_k, query_tile.keys, smem.k)
    gV, sV = tma_tiles(tmas.v, (tiles.tile_n, tiles.width_v), (None, smem.half), head_k, query_tile.keys, smem.v)
    for step in cutlass.range(query_tile.stop - query_tile.start, unroll=1):
        n = block_at(query_tile, step, params, config)
        stage, phase = state.index, state.phase
        # V, tile_n × width_v, then K, tile_n × width; `empty`: all computing warps have read the stage.
        fetch(tmas.v, gV[None, n], sV[None, stage], v_bytes, smem.full + stage, smem.empty + stage, phase)
        state = state.advance(tiles.stages)
        stage, phase = state.index, state.phase
        fetch(tmas.k, gK[None, n], sK[None, stage], k_bytes, smem.full + stage, smem.empty + stage, phase)
        state = state.advance(tiles.stages)
    return state


# -- Store ---------------------------------------------------------------------------------------------------------


@cute.jit
def release_keys_pass(lse2: cute.Tensor, params: BackwardParams, config: cutlass.Constexpr):
    """The storing warps let the pass over keys begin, as soon as the flags of all tiles of every CTA are down. Each CTA lowers the flags
    that it raises later."""
    if cutlass.const_expr(config.flagged):
        # A lane a tile: flags lie at the ends of lse2's rows (docs/decisions.md#hopper-overlapped-launch).
        lane, rounds = cute.arch.thread_idx()[0] % 32, rounds_of(params, config)
        for first in cutlass.range(0, rounds, 32, unroll=1):
            m_block, head = number_of(cutlass.min(first + lane, rounds - 1), params, config)
            lse2[flag_place(m_block, head // params.heads_q, head % params.heads_q, lse2)] = F32(0.0)
        # Every CTA must see the flags down before the pass over keys reads them.
        cute.arch.fence_acq_rel_gpu()
        warps = config.queries.warpgroups
        cute.arch.barrier(barrier_id=1 + warps, number_of_threads=32 * warps)
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def store(
    tmas: QueriesTmas, lse2: cute.Tensor, smem: QueriesStorage, w, params: BackwardParams, config: cutlass.Constexpr
):
    """One warp for each computing warpgroup w stores its dQ in global memory. TMA drops rows past the last one."""

    def store_tile(query_tile: QueryTile, numbers: BackwardParams, phase, state):
        box = ROWS, config.queries.width
        gQ, sQ = tma_tiles(tmas.dq, box, (None, smem.half), query_tile.head, query_tile.rows, smem.dq)
        cute.arch.mbarrier_wait(smem.done + w, phase)  # the warpgroup has put dQ there
        cute.copy(tmas.dq.atom, sQ[None, w], gQ[None, query_tile.row // ROWS + w])
        cute.arch.cp_async_bulk_commit_group()
        # Shared memory has been read: Q and dO of the next tile may come.
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        with cute.arch.elect_one():
            # Partner: load_rows.
            cute.arch.mbarrier_arrive(smem.held_empty + w)
            if config.flagged:
                m_block = query_tile.row // config.queries.tile_m
                count_up(lse2, flag_place(m_block, query_tile.batch, query_tile.head, lse2))
        return state

    if cutlass.const_expr(config.queries_first):
        release_keys_pass(lse2, params, config)
    each_tile(SCHEDULER, receiver(smem, w), params, config, store_tile, ())
