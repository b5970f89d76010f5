"""dK, dV and the accumulated dQ over key tiles on Hopper (sm_90a), two CTAs to a tile of 128 keys; docs/algorithm.md, (13) to (16).

This pass is for wide heads: a CTA has room for 64 keys alone, and adding up their dQ would take longer than all products take. In a
cluster each of the two CTAs keeps 64 keys and makes their P, dS, dK and dV. Each sends its dS to the other one, its peer, and
each makes dQ of all 128 keys and half of the columns, for which it also keeps that half of the peer's K. So half as many bytes are
added up, for 8 KB of dS a block each way. Tiles of K, V, Q and dO lie in parts of 64 rows and 128 columns, so that what a product has
read is filled again while the next one runs. A CTA has four warpgroups, is persistent over key tiles, and sums over the query heads
of a group. Its roles::

    warp 0       load_keys      V, the peer's part of K, and K, once a tile
    warp 1       load_queries   Q0 dO0 Q1 dO1 .., with lse2 and delta, for each query head; each CTA loads all of them
    warp 2       store          dV and dK, from where V and K were
    warp 3       exchange       each block's dS to the peer
    warpgroup 1  make_values    S P dV: hands P to the next
    warpgroup 2  make_keys      dP dS dK
    warpgroup 3  make_queries   dQ, which each of its warps adds to fp32 sums in memory by itself, some columns at a time

The warpgroups are in :mod:`tilewise.backends.hopper.backward.cluster_compute` and
:mod:`tilewise.backends.hopper.backward.cluster_dq`.

mbarriers (arrivals in brackets), each waited for by the other side: ``full`` (1 + bytes) and ``empty`` (8 warps) of every stage
between load_queries and make_values and make_keys; ``held_full`` (1 + bytes) of K, V and the peer's part load_keys -> warpgroups,
``done`` (128) warpgroup -> store and ``held_empty`` (1) store -> load_keys, of the tiles of K and V; ``v_read`` (128) make_keys ->
make_values, ``k_read`` (4) make_queries -> make_keys and load_keys, once a tile. For block % 2: ``p_full`` (128) make_values ->
make_keys, ``ds_full`` (128) make_keys, which puts dS where P was, -> make_queries and exchange, ``ds_empty`` (4 warps of each CTA's
make_queries) -> make_values and exchange: what was sent from there has been read, too. ``peer_ds_full`` (1 + bytes) the peer's
exchange -> make_queries.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import LayoutEnum

from tilewise.backends.hopper.backward.cluster_compute import make_keys, make_values
from tilewise.backends.hopper.backward.cluster_dq import make_queries
from tilewise.backends.hopper.backward.cluster_storage import (
    PEER_K,
    ClusterMmas,
    ClusterStorage,
    K,
    V,
    allocate,
    init_barriers,
    own_column,
)
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.fragments import rows_first, warp_and_warpgroup
from tilewise.backends.hopper.backward.key_tiles import SCHEDULER, KeyTile
from tilewise.backends.hopper.backward.keys import KeysTensors, RowStatistic, fetch_statistic
from tilewise.backends.hopper.backward.keys_storage import KeysTmas, RowBuffers
from tilewise.backends.hopper.backward.params import BackwardParams
from tilewise.backends.hopper.backward.tiles import CLUSTER, ELEMENT_BYTES, HALF
from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.instructions import meet
from tilewise.backends.hopper.kit.ring import PipelineState, fetch, new_writer
from tilewise.backends.hopper.kit.scheduler import each_tile
from tilewise.backends.hopper.kit.tiles import staged_layout, tma_tiles

PART_BYTES = ELEMENT_BYTES * ROWS * HALF

# -- Launch and kernel ---------------------------------------------------------------------------------------------


def launch(t: KeysTensors, params: BackwardParams, ctas, stream, config: Backward) -> None:
    """Launches the kernel, within a traced function of the host's."""
    tiles, element, tall = config.keys, ELEMENT[config.dtype], LayoutEnum.ROW_MAJOR
    # 64 rows x 128 columns: the unit in which K, V, Q and dO are loaded and dK and dV are stored.
    part = sm90.make_smem_layout_b(tall, (ROWS, ROWS, HALF), element, 1)
    out = sm90.make_smem_layout_epi(element, tall, (ROWS, HALF), 1)
    load, save = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

    def tma(op, t: cute.Tensor, count: int, layout) -> cpasync.TmaInfo:
        parts = staged_layout(layout, count, ROWS * HALF)
        return cpasync.make_tiled_tma_atom(op, rows_first(t, config), parts, (ROWS, HALF))

    tmas = KeysTmas(
        tma(load, t.q, tiles.stages, part), tma(load, t.do, tiles.stages, part),
        tma(load, t.k, tiles.parts + 1, part), tma(load, t.v, tiles.parts, part),
        tma(save, t.dk, tiles.parts, out), tma(save, t.dv, tiles.parts, out),
    )  # fmt: skip
    kernel.set_name_prefix(f"{config.name}_keys", remove_cutlass_symbol=True, keep_mangled_name=False)
    kernel(tmas, t.buffers, tiled_mmas(config), params, config).launch(
        grid=[ctas, 1, 1],
        block=[tiles.threads, 1, 1],
        cluster=[CLUSTER, 1, 1],
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )


def tiled_mmas(config: Backward) -> ClusterMmas:
    """The products of the three computing warpgroups."""
    element, major = ELEMENT[config.dtype], OperandMajorMode

    def mma(a, b, width, *source):
        return sm90.make_trivial_tiled_mma(element, element, a, b, F32, (1, 1, 1), (ROWS, width), *source)

    return ClusterMmas(
        mma(major.K, major.K, config.keys.tile_m),  # Sᵀ = K Qᵀ and dPᵀ = V dOᵀ
        mma(major.K, major.MN, HALF, warpgroup.OperandSource.RMEM),  # dV += Pᵀ dO and dK += dSᵀ Q
        mma(major.MN, major.MN, ROWS),  # dQ = dS K
    )


@cute.kernel
def kernel(tmas: KeysTmas, buffers: RowBuffers, mmas: ClusterMmas, params: BackwardParams, config: cutlass.Constexpr):
    """Gives every warp its role."""
    tiles, (warp, group) = config.keys, warp_and_warpgroup()
    smem = allocate(tmas, config)
    init_barriers(smem, config)
    cute.arch.griddepcontrol_wait()  # the statistics and the zeros are there when the preprocessing kernel has ended
    if group == 0:
        cute.arch.setmaxregister_decrease(tiles.registers_load)
        if warp == 3:
            exchange(smem, params, config)
        elif warp == 2:
            store(tmas, smem, params, config)
        elif warp == 1:
            load_queries(tmas, buffers, smem, params, config)
        else:
            load_keys(tmas, smem, params, config)
    elif group == 1:
        cute.arch.setmaxregister_increase(tiles.registers_values)
        make_values(smem, mmas, params, config)
    elif group == 2:
        cute.arch.setmaxregister_increase(tiles.registers)
        make_keys(smem, mmas, params, config)
    else:
        cute.arch.setmaxregister_decrease(tiles.registers_dq)
        make_queries(buffers, smem, mmas, params, config)
    meet()  # neither CTA's shared memory goes while the peer may still reach for it


# -- Load ----------------------------------------------------------------------------------------------------------


def part_tiles(info: cpasync.TmaInfo, head, rows, smem: cute.Tensor):
    """A head's matrix in parts (box, 64 rows, 128 columns), and their shared memory (box, n)."""
    return tma_tiles(info, (ROWS, HALF), (None, None), head, rows, smem)


@cute.jit
def load_keys(tmas: KeysTmas, smem: ClusterStorage, params: BackwardParams, config: cutlass.Constexpr):
    """One warp loads what a tile holds, as soon as what lay there has been read or stored."""

    def load_one(key_tile, numbers, held_phase, state):
        return load_held(tmas, smem, key_tile, held_phase, config)

    each_tile(SCHEDULER, None, params, config, load_one, I32(0))


def load_held(tmas: KeysTmas, smem: ClusterStorage, key_tile: KeyTile, held_phase, config: Backward):
    """Loads V, the peer's part of K, and K of one tile."""
    gK, sK = part_tiles(tmas.k, key_tile.head, key_tile.batch, smem.k)
    gV, sV = part_tiles(tmas.v, key_tile.head, key_tile.batch, smem.v)
    row, parts, phase = own_column(key_tile, smem) // ROWS, config.keys.parts, 1 - held_phase
    # The peer's 64 keys, and the half of the columns in which this CTA makes dQ
    peer_k, full = gK[None, key_tile.column // ROWS + 1 - smem.rank, smem.rank], smem.held_full
    # V first: store_tile sends dV, which lies in V's memory, before dK.
    fetch_parts(tmas.v, gV, sV, row, parts, full + V, smem.held_empty + V, phase)
    # Behind this CTA's parts of K; k_read: make_queries has read them for the last time.
    fetch(tmas.k, peer_k, sK[None, parts], PART_BYTES, full + PEER_K, smem.k_read, phase)
    fetch_parts(tmas.k, gK, sK, row, parts, full + K, smem.held_empty + K, phase)
    return I32(0)


def fetch_parts(info: cpasync.TmaInfo, g, s, row, parts: int, full, empty, phase) -> None:
    """Waits until a tile is empty, then loads all parts of 64 rows."""
    cute.arch.mbarrier_wait(empty, phase)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, PART_BYTES * parts)
    for n in range(parts):
        cute.copy(info.atom, g[None, row, n], s[None, n], tma_bar_ptr=full)


@cute.jit
def load_queries(
    tmas: KeysTmas, buffers: RowBuffers, smem: ClusterStorage, params: BackwardParams, config: cutlass.Constexpr
):
    """One warp loads the query blocks of every tile, for each query head."""

    def load_one(key_tile, numbers, held_phase, state):
        return load_blocks(tmas, buffers, smem, key_tile, state, numbers, config)

    each_tile(SCHEDULER, None, params, config, load_one, new_writer())


@cute.jit
def load_blocks(
    tmas: KeysTmas, buffers: RowBuffers, smem: ClusterStorage, key_tile: KeyTile, state: PipelineState,
    params: BackwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """Loads the query blocks of one tile. Returns the ring's state."""
    for g in cutlass.range(params.group, unroll=1):
        head = key_tile.head * params.group + g
        gQ, sQ = part_tiles(tmas.q, head, key_tile.batch, smem.ring)
        gO, sO = part_tiles(tmas.do, head, key_tile.batch, smem.ring)
        rows = buffers.lse2[key_tile.batch, head, None], buffers.delta[key_tile.batch, head, None]
        lse2, delta = (RowStatistic(t, config.keys.tile_m) for t in rows)
        for m in cutlass.range(key_tile.start, key_tile.stop, unroll=1):
            # lse2 travels with Q, for P, and delta with dO, for dS.
            state = fetch_block(tmas.q, gQ, sQ, lse2, m, state, smem, config)
            state = fetch_block(tmas.do, gO, sO, delta, m, state, smem, config)
    return state


def fetch_block(
    info: cpasync.TmaInfo, g, s, statistic: RowStatistic, m, state: PipelineState, smem: ClusterStorage, config: Backward
) -> PipelineState:  # fmt: skip
    """Loads block m of Q or dO, a part into each stage; the first stage gets its rows' statistic too. Returns the ring's state."""
    for n in range(config.keys.parts):
        full = smem.full + state.index
        cute.arch.mbarrier_wait(smem.empty + state.index, state.phase)  # make_values and make_keys have read the stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, PART_BYTES + (0 if n else statistic.bytes))
            if n == 0:
                fetch_statistic(statistic, m, smem.statistics, state.index, full)
        cute.copy(info.atom, g[None, m, n], s[None, state.index], tma_bar_ptr=full)
        state = state.advance(config.keys.stages)
    return state


# -- Store and exchange --------------------------------------------------------------------------------------------


@cute.jit
def store(tmas: KeysTmas, smem: ClusterStorage, params: BackwardParams, config: cutlass.Constexpr):
    """One warp stores dV and dK in global memory. TMA drops keys past the last one."""

    def store_one(key_tile, numbers, held_phase, state):
        return store_tile(tmas, smem, key_tile, held_phase, config)

    each_tile(SCHEDULER, None, params, config, store_one, I32(0))


def store_tile(tmas: KeysTmas, smem: ClusterStorage, key_tile: KeyTile, held_phase, config: Backward):
    """Stores dV and dK of one tile, as soon as each is done, and gives their shared memory back."""
    for info, tile, which in ((tmas.dv, smem.dv, V), (tmas.dk, smem.dk, K)):
        g, s = part_tiles(info, key_tile.head, key_tile.batch, tile)
        cute.arch.mbarrier_wait(smem.done + which, held_phase)  # make_values or make_keys has put it there
        for n in range(config.keys.parts):
            cute.copy(info.atom, s[None, n], g[None, own_column(key_tile, smem) // ROWS, n])
        cute.arch.cp_async_bulk_commit_group()
        # Read by the copy engine: load_keys may fill it again.
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(smem.held_empty + which)
    return I32(0)


@cute.jit
def exchange(smem: ClusterStorage, params: BackwardParams, config: cutlass.Constexpr):
    """One warp sends each block of dS to the peer."""

    def send_one(key_tile, numbers, held_phase, count):
        return send_blocks(smem, key_tile, count, numbers, config)

    each_tile(SCHEDULER, None, params, config, send_one, I32(0))


@cute.jit
def send_blocks(smem: ClusterStorage, key_tile: KeyTile, count, params: BackwardParams, config: cutlass.Constexpr):
    """Sends the blocks of one tile. Returns how many blocks there were so far."""
    for _ in cutlass.range(params.group * (key_tile.stop - key_tile.start), unroll=1):
        # Two blocks of dS in turn; the peer's memory holds one, which must have been read before the next is sent.
        n, other = count % 2, (count + 1) // 2
        cute.arch.mbarrier_wait(smem.ds_empty + (1 - n), (other + 1) % 2)  # the peer has read the block before
        cute.arch.mbarrier_wait(smem.ds_full + n, count // 2 % 2)  # make_keys has stored this block
        send_ds(smem, n, 1 - smem.rank, config)
        count = count + 1
    return count


def send_ds(smem: ClusterStorage, n, peer, config: Backward) -> None:
    """Copies block n of dS, (64 keys, tile_m), to the peer's memory for it, by the copy engine. In PTX, since the DSL has only parts of
    this."""
    size = ELEMENT_BYTES * ROWS * config.keys.tile_m
    code = (
        "{ .reg .b32 d, m; mapa.shared::cluster.u32 d, {$r0}, {$r3}; mapa.shared::cluster.u32 m, {$r2}, {$r3};"
        " mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [m], {$r4};"
        " cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [d], [{$r1}], {$r4}, [m]; }"
    )
    with cute.arch.elect_one():
        blocks = smem.ds.iterator.toint()
        full = smem.peer_ds_full.toint()
        cute.arch.inline_ptx(code, read_only_args=[blocks + 2 * size, blocks + n * size, full, peer, I32(size)])
