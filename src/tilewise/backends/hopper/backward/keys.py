"""dK = scale · dSᵀ Q and dV = Pᵀ dO over key tiles on Hopper (sm_90a); docs/algorithm.md, (13) to (16).

All blocks are transposed, (64 keys, tile_m queries): Sᵀ = K Qᵀ and dPᵀ = V dOᵀ leave wgmma in the very registers from which
Pᵀ and dSᵀ, rounded, enter the next one, so that neither crosses shared memory. A CTA has three warpgroups, is persistent over key
tiles, and sums over the query heads of a group. Its roles::

    warp 0       load_keys        64 rows of K and of V for each of their tiles in shared memory, once a key tile
    warp 1       load_queries     Q0 dO0 Q1 dO1 .., with the lse2 of Q's rows and the delta of dO's, for each query head
    warps 2, 3   store            dK and dV from shared memory; they also add up dQ, where this pass makes it
    warpgroups   compute          S P dP dV dS dK of 64 keys each (a tile has 128), one query block after the other
    or           compute_and_sum  the same, and dQ (:mod:`tilewise.backends.hopper.backward.dq_accumulate`)
    or, split    make_values      S P dV: hands P to the other warpgroup
                 make_keys        dP dS dK, of the same 64 keys

The first three computing roles are in :mod:`tilewise.backends.hopper.backward.keys_compute`, the split ones in
:mod:`tilewise.backends.hopper.backward.keys_split`. Where tiles come from a queue late, ``queued``, load_queries takes them and tells
the others; of other packed sequences load_keys does.

mbarriers (arrivals in brackets), each waited for by the other side::

    full[stage]      (1 + bytes)  load_queries -> warpgroups     empty[stage]     (8 warps)  warpgroups -> load_queries
    held_full[tile]  (1 + bytes)  load_keys -> warpgroups        held_empty[tile] (1)        store -> load_keys
      with overlaps                                              held_empty[tile] (8 warps)  warpgroups -> load_keys
    left             (2)          store -> warpgroups, with overlaps
    done[tile]       (128)        warpgroup -> store
    p_full           (128)        make_values -> make_keys       p_empty          (128)      make_keys -> make_values

A tile of dK or dV takes the place of the tile of K or V that its warpgroup alone has read; with ``overlaps`` that of a part of dQ or of
dS, so that K and V of the next tile come while it leaves.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import LayoutEnum

from tilewise.backends.hopper.backward import dq_accumulate, pair_bias, parts
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.fragments import rows_first, warp_and_warpgroup
from tilewise.backends.hopper.backward.key_tiles import SCHEDULER, KeyTile, block_at, of_query_head
from tilewise.backends.hopper.backward.keys_compute import compute, compute_and_sum
from tilewise.backends.hopper.backward.keys_split import make_keys, make_values
from tilewise.backends.hopper.backward.keys_storage import (
    KeysMmas,
    KeysStorage,
    KeysTmas,
    RowBuffers,
    allocate,
    init_barriers,
)
from tilewise.backends.hopper.backward.params import BackwardParams, flag_place
from tilewise.backends.hopper.backward.sequences import ahead_receiver, publish_held, receiver
from tilewise.backends.hopper.backward.subtrahends import write_constant
from tilewise.backends.hopper.backward.tiles import FP32_BYTES, KEY_GROUPS, v_register_steps
from tilewise.backends.hopper.config import ELEMENT_BYTES, ROWS
from tilewise.backends.hopper.kit import packed
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.instructions import await_count, get_words, meet
from tilewise.backends.hopper.kit.ring import PipelineState, fetch, new_writer, release
from tilewise.backends.hopper.kit.scheduler import each_queued, each_tile, take_queued, take_tiles
from tilewise.backends.hopper.kit.tiles import staged_layout, tma_tiles

# -- Launch and kernel ---------------------------------------------------------------------------------------------


class KeysTensors(NamedTuple):
    """The tensors that the pass reads and writes, (batch, seqlen, heads, head_dim), and the buffers by query row."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    buffers: RowBuffers


def launch(t: KeysTensors, params: BackwardParams, ctas, stream, config: Backward) -> None:
    """Launches the kernel, within a traced function of the host's."""
    tiles, element, tall = config.keys, ELEMENT[config.dtype], LayoutEnum.ROW_MAJOR

    def ring(width):  # blocks of tile_m rows, B operand of the scores
        block = sm90.make_smem_layout_b(tall, (ROWS, tiles.tile_m, width), element, 1)
        return staged_layout(block, tiles.stages, tiles.stage_elements)

    def held(width):  # 64 rows of K or V, A operand of the scores
        tile = sm90.make_smem_layout_a(tall, (ROWS, tiles.tile_m, width), element, 1)
        return staged_layout(tile, tiles.key_tiles, tiles.tile_elements)

    def stored(width, apart=tiles.tile_elements):  # 64 rows of dK or dV
        tile = sm90.make_smem_layout_epi(element, tall, (ROWS, width), 1)
        return staged_layout(tile, tiles.key_tiles, apart)

    def load(tensor, layout, box):
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), rows_first(tensor, config), layout, box)

    def save(tensor, width, *apart):
        atom, view = cpasync.CopyBulkTensorTileS2GOp(), rows_first(tensor, config)
        return cpasync.make_tiled_tma_atom(atom, view, stored(width, *apart), (ROWS, width))

    tmas = KeysTmas(
        load(t.q, ring(tiles.width), (tiles.tile_m, tiles.width)),
        load(t.do, ring(tiles.width_v), (tiles.tile_m, tiles.width_v)),
        load(t.k, held(tiles.width), (ROWS, tiles.width)),
        load(t.v, held(tiles.width_v), (ROWS, tiles.width_v)),
        save(t.dk, tiles.width, *([FP32_BYTES // ELEMENT_BYTES * tiles.part_elements] if tiles.overlaps else [])),
        save(t.dv, tiles.width_v),
        pair_bias.tma(params.extra.bias, config, cpasync.CopyBulkTensorTileG2SOp()) if config.score == "bias" else None,
        pair_bias.tma(params.extra.dbias, config, cpasync.CopyBulkTensorTileS2GOp()) if config.stores_bias else None,
    )
    if config.score == "bias":  # roles read them by their descriptors alone
        params = params._replace(extra=params.extra._replace(bias=None, dbias=None))
    kernel.set_name_prefix(f"{config.name}_keys", remove_cutlass_symbol=True, keep_mangled_name=False)
    kernel(tmas, t.buffers, tiled_mmas(config), params, config).launch(
        grid=[ctas, 1, 1], block=[tiles.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=True,
        **({"cluster": [tiles.ctas, 1, 1]} if tiles.halved else {}),
    )  # fmt: skip


def tiled_mmas(config: Backward) -> KeysMmas:
    """The products of a warpgroup: each has 64 rows, the keys."""
    tiles, element = config.keys, ELEMENT[config.dtype]
    major, registers = OperandMajorMode, warpgroup.OperandSource.RMEM

    def mma(b, width, *source):
        shape = ROWS, width
        return sm90.make_trivial_tiled_mma(element, element, major.K, b, F32, (1, 1, 1), shape, *source)

    return KeysMmas(
        mma(major.K, tiles.tile_m),  # Sᵀ = K Qᵀ and dPᵀ = V dOᵀ
        mma(major.MN, tiles.width, registers),  # dK += dSᵀ Q
        mma(major.MN, tiles.width_v, registers),  # dV += Pᵀ dO
        dq_accumulate.tiled_mma(config) if tiles.sums_dq else None,
        mma(major.K, tiles.tile_m, registers)
        if v_register_steps(tiles, config.statistics, config.packed, config.sums_bias) or config.subtracts
        else None,
    )


@cute.kernel
def kernel(tmas: KeysTmas, buffers: RowBuffers, mmas: KeysMmas, params: BackwardParams, config: cutlass.Constexpr):
    """Gives every warp its role."""
    tiles, (warp, group) = config.keys, warp_and_warpgroup()
    smem = allocate(tmas, config)
    if cutlass.const_expr(config.subtracts):
        # Read by both warpgroups' products, after the barrier of init_barriers.
        write_constant(smem, warp)
    init_barriers(smem, config)
    if cutlass.const_expr(not config.queries_first):
        cute.arch.griddepcontrol_wait()  # the statistics are there when the preprocessing kernel has ended
        if cutlass.const_expr(config.queries is not None):
            cute.arch.griddepcontrol_launch_dependents()  # the pass over queries, which reads nothing that this one writes
        if cutlass.const_expr(tiles.counts):
            cute.arch.griddepcontrol_launch_dependents()  # the rounding of dQ, which waits for the counts of its heads
    if group == 0:
        cute.arch.setmaxregister_decrease(tiles.registers_load)
        if warp == 0:
            load_keys(tmas, smem, params, config)
        elif warp == 1:
            load_queries(tmas, buffers, smem, params, config)
        elif warp == 2:
            store(tmas, buffers, smem, 0, params, config)
        else:
            store(tmas, buffers, smem, 1, params, config)
    else:
        cute.arch.setmaxregister_increase(tiles.registers)
        if cutlass.const_expr(tiles.sums_dq):
            compute_and_sum(smem, buffers, group - 1, mmas, params, config)
        elif cutlass.const_expr(not tiles.split):
            compute(smem, group - 1, mmas, params, config)
        elif group == 1:
            make_values(smem, buffers, mmas, params, config)
        else:
            make_keys(smem, buffers, mmas, params, config)
    if cutlass.const_expr(tiles.halved):
        meet()  # neither CTA's shared memory goes while the peer may still reach for it


# -- Load ----------------------------------------------------------------------------------------------------------


@cute.jit
def load_keys(tmas: KeysTmas, smem: KeysStorage, params: BackwardParams, config: cutlass.Constexpr):
    """One warp loads K and V of every tile, as soon as the dK and dV that lay there have left."""

    def load_tile(key_tile: KeyTile, packed_tile: packed.PackedTile | None, phase) -> None:
        tiles = config.keys
        gK, sK = tma_tiles(tmas.k, (ROWS, tiles.width), (None, smem.half), key_tile.head, key_tile.keys, smem.k)
        gV, sV = tma_tiles(tmas.v, (ROWS, tiles.width_v), (None, smem.half), key_tile.head, key_tile.keys, smem.v)
        k_bytes, v_bytes = (ELEMENT_BYTES * ROWS * width for width in (tiles.width, tiles.width_v))
        for n in range(tiles.key_tiles):
            m, full, empty = key_tile.column // ROWS + n, smem.held_full + n, smem.held_empty + n
            publish_held(packed_tile, smem, n, phase)
            parts.publish(key_tile, smem, n, phase)
            # K, 64 × width, for warpgroup n alone; held_empty: its storing warp has sent dK from there.
            fetch(tmas.k, gK[None, m], sK[None, n], k_bytes, full, empty, phase)
            full, empty = full + tiles.key_tiles, empty + tiles.key_tiles
            if tiles.split:
                publish_held(packed_tile, smem, 1, phase)
                parts.publish(key_tile, smem, 1, phase)
            # V, 64 × width_v, likewise.
            fetch(tmas.v, gV[None, m], sV[None, n], v_bytes, full, empty, phase)

    def prefetch_tile(key_tile: KeyTile) -> None:
        """Brings K and V to L2: all CTAs begin their tiles at about the same time, and memory would keep them waiting."""
        for info, width, held in ((tmas.k, config.keys.width, smem.k), (tmas.v, config.keys.width_v, smem.v)):
            g, _ = tma_tiles(info, (ROWS, width), (None, 0), key_tile.head, key_tile.keys, held)
            for n in range(config.keys.key_tiles):
                cute.prefetch(info.atom, g[None, key_tile.column // ROWS + n])

    def load_queued(key_tile, numbers, phase, state):
        if cutlass.const_expr(config.keys.prefetches):
            prefetch_tile(key_tile)
        load_tile(key_tile, None, 1 - phase)  # a writer lets phase 1 pass first
        return state

    upcoming = prefetch_tile if config.keys.prefetches else None
    if cutlass.const_expr(config.keys.queued):
        each_queued(SCHEDULER, smem.boxes, params, config, load_queued, I32(0))
    else:
        take_tiles(SCHEDULER, smem, KEY_GROUPS, params, config, load_tile, upcoming)


@cute.jit
def load_queries(
    tmas: KeysTmas, buffers: RowBuffers, smem: KeysStorage, params: BackwardParams, config: cutlass.Constexpr
):
    """One warp loads the query blocks of every tile, for each query head."""
    load, state = load_blocks, new_writer()
    bias_place = pair_bias.new_place(phase=1) if config.score == "bias" else None
    if cutlass.const_expr(config.queries_first and not config.flagged):
        cute.arch.griddepcontrol_wait()  # the statistics are there when the pass over queries has ended
    if cutlass.const_expr(config.flagged):
        load, state = load_blocks_early, (state, I32(0))

    def load_tile(key_tile, numbers, phase, state):
        return load(tmas, buffers, smem, key_tile, state, bias_place, numbers, config)

    if cutlass.const_expr(config.keys.queued):
        take_queued(SCHEDULER, smem.boxes, params, config, load_tile, state)
    else:
        each_tile(SCHEDULER, ahead_receiver(smem, KEY_GROUPS), params, config, load_tile, state)
    if cutlass.const_expr(config.flagged):
        cute.arch.griddepcontrol_wait()  # what comes next in the stream finds dQ, too


@cute.jit
def load_blocks(
    tmas: KeysTmas, buffers: RowBuffers, smem: KeysStorage, key_tile: KeyTile, state: PipelineState, bias_place: cute.Tensor | None,
    params: BackwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """Loads a tile's query blocks, Q and lse2 into one stage, dO and delta into the next, and before them the biases of their pairs, whose
    place is ``bias_place``. Returns the ring's state."""
    tiles, words = config.keys, config.statistics.words
    q_bytes, do_bytes = (ELEMENT_BYTES * tiles.tile_m * width for width in (tiles.width, tiles.width_v))
    for g in cutlass.range(key_tile.query_heads(params), unroll=1):
        head_tile = of_query_head(key_tile, g, params, config)
        head = head_tile.head
        # (box, block) of one query head, and (box, stage).
        gQ, sQ = tma_tiles(tmas.q, (tiles.tile_m, tiles.width), (None, smem.half), head, key_tile.rows, smem.q)
        gO, sO = tma_tiles(tmas.do, (tiles.tile_m, tiles.width_v), (None, smem.half), head, key_tile.rows, smem.do)
        lse2 = RowStatistic(key_tile.statistic(buffers.lse2, head, words), tiles.tile_m * words)
        delta = RowStatistic(key_tile.statistic(buffers.delta, head), tiles.tile_m)
        # Beside Q both come at once, where products subtract them.
        delta = None if config.subtracts else delta
        for step in cutlass.range(head_tile.stop - head_tile.start, unroll=1):
            m = block_at(head_tile, head_tile.start + step, params, config)
            if cutlass.const_expr(config.score == "bias"):
                pair_bias.fetch_tiles(tmas.bias, head_tile, m, bias_place, smem.bias, config)
            fetch_block(tmas.q, gQ, sQ, lse2, m, state, q_bytes, smem, config.statistics.slot(state.index))
            state = state.advance(tiles.stages)
            fetch_block(tmas.do, gO, sO, delta, m, state, do_bytes, smem, state.index)
            state = state.advance(tiles.stages)
    return state


class RowStatistic(NamedTuple):
    """lse2 or delta of a head's rows in global memory, (row,), which is loaded ``block_rows`` rows at a time; where products subtract both,
    words of 4 bytes, which are called rows here."""

    rows: cute.Tensor
    block_rows: int

    @property
    def bytes(self) -> int:
        return FP32_BYTES * self.block_rows


def fetch_statistic(statistic: RowStatistic, m, statistics: cute.Tensor, stage, full) -> None:
    """One thread starts a bulk copy of block m of a statistic into a stage, or slot."""
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), F32)
    place = statistics[*[None] * (cute.rank(statistics) - 1), stage].iterator
    target = cute.make_tensor(cute.recast_ptr(place, dtype=F32), cute.make_layout(statistic.block_rows))
    cute.copy(atom, cute.local_tile(statistic.rows, (statistic.block_rows,), (m,)), target, mbar_ptr=full)


def fetch_block(
    info: cpasync.TmaInfo, g, s, statistic: RowStatistic | None, m, state: PipelineState, size: int, smem: KeysStorage, slot
) -> None:  # fmt: skip
    """Waits until the stage is empty, then loads block m of Q or dO, ``size`` bytes, and its rows' statistic, if it has one, into a
    slot."""
    full = smem.full + state.index
    cute.arch.mbarrier_wait(smem.empty + state.index, state.phase)  # all computing warps have read the stage
    # Two copies fill a stage: `full` turns when the bytes of both have come.
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, size + (statistic.bytes if statistic else 0))
        if statistic:
            fetch_statistic(statistic, m, smem.statistics, slot, full)
    cute.copy(info.atom, g[None, m], s[None, state.index], tma_bar_ptr=full)


# -- Load under the end of the pass over queries -------------------------------------------------------------------


@cute.jit
def load_blocks_early(
    tmas: KeysTmas, buffers: RowBuffers, smem: KeysStorage, key_tile: KeyTile, state: tuple, bias_place: cute.Tensor | None,
    params: BackwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """:func:`load_blocks` where this pass begins under the end of the pass over queries: the first tile waits for the statistics of its
    own heads, later tiles for all. ``state``: the ring's state, and how many tiles there were; both are returned."""
    ring, tiles_done = state
    if tiles_done == 0:
        await_statistics(buffers.lse2, key_tile, params, config)
    else:
        cute.arch.griddepcontrol_wait()
    return load_blocks(tmas, buffers, smem, key_tile, ring, bias_place, params, config), tiles_done + 1


@cute.jit
def await_statistics(lse2: cute.Tensor, key_tile: KeyTile, params: BackwardParams, config: cutlass.Constexpr):
    """One warp waits until the pass over queries has written the statistics of all query heads of a key head."""
    for g in cutlass.range(params.group, unroll=1):
        await_head(lse2, key_tile.batch, of_query_head(key_tile, g, params, config).head, params, config)


@cute.jit
def await_head(lse2: cute.Tensor, batch, head, params: BackwardParams, config: cutlass.Constexpr):
    """One warp waits for the flags of all tiles of a query head, a tile to each lane in turn."""
    # A flag a query tile: it counts the warpgroups that have written their rows.
    lane, blocks = cute.arch.thread_idx()[0] % 32, (params.seqlen_q + config.tile_m - 1) // config.tile_m
    for first in cutlass.range(0, blocks, 32, unroll=1):
        place = flag_place(cutlass.min(first + lane, blocks - 1), batch, head, lse2)
        await_count(lse2, place, config.queries.warpgroups)
    cute.arch.sync_warp()


# -- Store ---------------------------------------------------------------------------------------------------------


@cute.jit
def store(
    tmas: KeysTmas, buffers: RowBuffers, smem: KeysStorage, w: cutlass.Constexpr, params: BackwardParams, config: cutlass.Constexpr
):  # fmt: skip
    """One warp for each computing warpgroup w adds its parts of dQ to their sums and stores its dK and dV. TMA drops keys past the last
    one."""
    bias_place = pair_bias.new_place(phase=0) if config.stores_bias else None

    def store_one(key_tile, numbers, phase, part_phase):
        return store_tile(tmas, buffers, smem, w, key_tile, (phase, part_phase), bias_place, numbers, config)

    if cutlass.const_expr(config.keys.queued):
        each_queued(SCHEDULER, smem.boxes, params, config, store_one, I32(0))
    else:
        each_tile(SCHEDULER, receiver(smem, w), params, config, store_one, I32(0))


@cute.jit
def store_tile(
    tmas: KeysTmas, buffers: RowBuffers, smem: KeysStorage, w: cutlass.Constexpr, key_tile: KeyTile, phases: tuple,
    bias_place: cute.Tensor | None, params: BackwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """Stores a tile's gradients. ``phases``: of the tile's barriers and of the part of dQ; the latter is returned. ``bias_place``: in the
    warpgroup's ring of biases, where their gradient is wanted."""
    tiles, phase, part_phase = config.keys, *phases
    if cutlass.const_expr(tiles.sums_dq):
        for g in cutlass.range(key_tile.query_heads(params), unroll=1):
            head_tile = of_query_head(key_tile, g, params, config)
            sums = dq_accumulate.sums_of(key_tile, head_tile.head, buffers.dq_sums, buffers.semaphores)
            if cutlass.const_expr(config.stores_bias):
                part_phase = pair_bias.add_and_store(
                    tmas.dbias, smem.bias, bias_place, sums.dq, smem.dq, w, head_tile, part_phase, params, config
                )
            else:
                part_phase = dq_accumulate.add_tile(sums, smem.dq, w, head_tile, part_phase, params, config)
            if cutlass.const_expr(tiles.counts):
                weight = key_tile.share.weight(params) if config.parted else F32(1.0)
                dq_accumulate.count_tile(buffers.delta, key_tile.batch, head_tile.head, weight)
    gK, sK = tma_tiles(tmas.dk, (ROWS, tiles.width), (None, smem.half), key_tile.head, key_tile.keys, smem.dk)
    gV, sV = tma_tiles(tmas.dv, (ROWS, tiles.width_v), (None, smem.half), key_tile.head, key_tile.keys, smem.dv)
    n, told = key_tile.column // ROWS, smem.told + w if config.parted else None
    if cutlass.const_expr(not tiles.split):
        store_when_done(
            tmas.dv, sV[None, w], gV[None, n + w], smem, tiles.key_tiles + w, phase, not tiles.overlaps, told
        )
        store_when_done(tmas.dk, sK[None, w], gK[None, n + w], smem, w, phase, not tiles.overlaps, told)
        if cutlass.const_expr(tiles.overlaps):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            release(smem.left)  # partner: the warpgroups, before they put dS or a part of dQ there
    elif cutlass.const_expr(w == 0):
        store_when_done(tmas.dv, sV[None, 0], gV[None, n], smem, 0, phase, told=told)  # dV lies where K was
    else:
        store_when_done(tmas.dk, sK[None, 0], gK[None, n], smem, 1, phase, told=told)  # dK lies where V was
    return part_phase


def store_when_done(
    info: cpasync.TmaInfo, s, g, smem: KeysStorage, n: int, phase, gives_back: bool = True, told: cute.Pointer | None = None
) -> None:  # fmt: skip
    """Waits until a warpgroup is done with tile n, stores it, unless ``told`` says that it is a part of one, and gives its shared memory
    back."""
    # Partner: the 128 threads of the warpgroup that rounded its gradient into shared memory.
    cute.arch.mbarrier_wait(smem.done + n, phase)
    if told is None:
        cute.copy(info.atom, s, g)
    else:
        copy_if(get_words(told, 1)[0] != 0, info.atom, s, g)
    cute.arch.cp_async_bulk_commit_group()
    if not gives_back:
        return
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    # Partner: load_keys, which puts the next tile there.
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(smem.held_empty + n)


@cute.jit
def copy_if(condition, atom: cute.CopyAtom, s: cute.Tensor, g: cute.Tensor):
    """Starts a copy, where the condition holds."""
    if condition:
        cute.copy(atom, s, g)
