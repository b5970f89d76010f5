"""Shared memory and barriers of a cluster's CTA (:mod:`tilewise.backends.hopper.backward.cluster`)."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.utils import LayoutEnum

from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.fragments import allocate_elements, statistics_layout, with_tma_layout
from tilewise.backends.hopper.backward.key_tiles import KeyTile
from tilewise.backends.hopper.backward.keys_storage import KeysTmas
from tilewise.backends.hopper.backward.tiles import ADDITION, ADDITIONS, CLUSTER, HALF
from tilewise.backends.hopper.config import ALIGNMENT, ROWS
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.instructions import meet
from tilewise.backends.hopper.kit.tiles import staged_layout

STRIP = 16  # queries of a block that are in registers at a time beside accumulators
K, V, PEER_K = 0, 1, 2  # indices of held_full; K and V also of held_empty and done


class ClusterMmas(NamedTuple):
    """The products of a CTA's warpgroups, all with accumulators in fp32.

    Attributes:
        score: Sᵀ or dPᵀ, 64 x tile_m; both operands in shared memory.
        grad: 64 x 128 of dK or dV; dSᵀ or Pᵀ in registers, and a block of Q or dO seen transposed.
        dq: tile_m x 64 of dQ; dS and K in shared memory, both seen transposed.
    """

    score: cute.TiledMma
    grad: cute.TiledMma
    dq: cute.TiledMma


class ClusterStorage(NamedTuple):
    """Tiles and barriers in the shared memory of one CTA. The last mode of a tile counts parts of 128 columns or stages.

    Attributes:
        k: (64 keys, 128, part): this CTA's keys, and behind them the part of the peer's K that dQ needs.
        v: (64 keys, 128, part). dk, dv: the same memory as k and v.
        ring: (tile_m, 128, stage): parts of Q and dO.
        statistics: :func:`statistics_layout`: lse2 or delta beside the first part of a block.
        handover: (4 words, thread, strip, block): P on its way to make_keys, in the memory of ``ds``.
        ds: (64 keys, tile_m, n): two blocks of this CTA's dS, and the peer's.
        additions: (4, lane, n, place, warp), fp32: the elements of dQ that warps are adding.
        full, empty: barriers of a stage. The others are explained in the module's docstring.
        rank: which of the two CTAs this is.
    """

    k: cute.Tensor
    v: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    ring: cute.Tensor
    statistics: cute.Tensor
    handover: cute.Tensor
    ds: cute.Tensor
    additions: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    held_full: cute.Pointer
    held_empty: cute.Pointer
    done: cute.Pointer
    v_read: cute.Pointer
    k_read: cute.Pointer
    p_full: cute.Pointer
    ds_full: cute.Pointer
    ds_empty: cute.Pointer
    peer_ds_full: cute.Pointer
    rank: I32


def own_column(key_tile: KeyTile, smem: ClusterStorage):
    """The first of this CTA's 64 keys."""
    return key_tile.column + smem.rank * ROWS


def allocate(tmas: KeysTmas, config: Backward) -> ClusterStorage:
    """Allocates in the order of :attr:`ClusterTiles.shared`."""
    allocator, tiles = cutlass.utils.SmemAllocator(), config.keys
    full = allocator.allocate_array(cutlass.Int64, tiles.barriers + 1)
    statistics = allocator.allocate_tensor(F32, statistics_layout(tiles.tile_m, tiles.stages), 128)
    counts = tiles.parts + 1, tiles.parts, tiles.stages
    k, v, q = (allocate_elements(allocator, n * ROWS * HALF, config.dtype) for n in counts)
    scores, layout = allocate_elements(allocator, 3 * ROWS * tiles.tile_m, config.dtype), ds_layout(config)
    ds = cute.make_tensor(cute.recast_ptr(scores, layout.inner), layout.outer)
    handover_layout = cute.make_layout((4, 128, tiles.tile_m // STRIP, 2))
    handover = cute.make_tensor(cute.recast_ptr(scores, dtype=I32), handover_layout)
    additions = allocator.allocate_tensor(F32, cute.make_layout((4, 32, ADDITION // 512, ADDITIONS, 4)), ALIGNMENT)
    empty, held_full, rest = full + tiles.stages, full + 2 * tiles.stages, full + 2 * tiles.stages + 3
    return ClusterStorage(
        with_tma_layout(k, tmas.k), with_tma_layout(v, tmas.v), with_tma_layout(k, tmas.dk), with_tma_layout(v, tmas.dv),
        with_tma_layout(q, tmas.q), statistics, handover, ds, additions,
        full, empty, held_full, rest, rest + 2, rest + 4, rest + 5, rest + 6, rest + 8, rest + 10, rest + 12,
        cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()),
    )  # fmt: skip


def ds_layout(config: Backward):
    """The layout of ``ds``."""
    block = sm90.make_smem_layout_epi(ELEMENT[config.dtype], LayoutEnum.ROW_MAJOR, (ROWS, config.keys.tile_m), 1)
    return staged_layout(block, 3, ROWS * config.keys.tile_m)


def arrivals(smem: ClusterStorage, config: Backward) -> tuple:
    """``(barriers, how many, arrivals of each)``, in the order in which they are initialised."""
    stages, warps = config.keys.stages, 4
    return (
        (smem.full, stages, 1),  # load_queries, and bytes -> make_values, make_keys
        (smem.empty, stages, 2 * warps),  # make_values, make_keys -> load_queries
        (smem.held_full, 3, 1),  # load_keys, and bytes -> the computing warpgroups
        (smem.held_empty, 2, 1),  # store -> load_keys
        (smem.done, 2, 128),  # make_values, make_keys -> store
        (smem.v_read, 1, 128),  # make_keys -> make_values, which puts dV there
        (smem.k_read, 1, warps),  # make_queries -> make_keys, which puts dK there, and load_keys
        (smem.p_full, 2, 128),  # make_values -> make_keys
        (smem.ds_full, 2, 128),  # make_keys -> make_queries, exchange
        (smem.ds_empty, 2, CLUSTER * warps),  # make_queries of both CTAs -> make_values, exchange
        (smem.peer_ds_full, 1, 1),  # the peer's exchange, and bytes -> make_queries
    )


@cute.jit
def init_barriers(smem: ClusterStorage, config: cutlass.Constexpr):
    """One thread sets every barrier's count of arrivals; then all threads of both CTAs see them."""
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for barriers, count, threads in arrivals(smem, config):
                for n in cutlass.range_constexpr(count):
                    cute.arch.mbarrier_init(barriers + n, threads)
    cute.arch.mbarrier_init_fence()
    meet()
