"""Shared memory, TMA descriptors and barriers of the pass over query tiles (:mod:`tilewise.backends.hopper.backward.queries`)."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from tilewise.backends.hopper.backward import halves
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.fragments import allocate_elements, with_tma_layout
from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.scheduler import Mailboxes, init_mailboxes, mailbox_words, mailboxes


class QueriesTmas(NamedTuple):
    """TMA descriptors with the coordinates (rows, columns, head, batch), or as :func:`packed.ragged` has them, and their shared-memory
    layouts."""

    q: cpasync.TmaInfo
    do: cpasync.TmaInfo
    k: cpasync.TmaInfo
    v: cpasync.TmaInfo
    dq: cpasync.TmaInfo
    o: cpasync.TmaInfo | None = None


class QueriesMmas(NamedTuple):
    """The products of a warpgroup, with accumulators in fp32.

    Attributes:
        score: S or dP, 64 x tile_n; both operands in shared memory.
        dq: 64 x width; dS in registers, and a block of K seen transposed.
    """

    score: cute.TiledMma
    dq: cute.TiledMma


class QueriesStorage(NamedTuple):
    """Tiles and barriers in shared memory. The last mode of a tile counts warpgroups or stages of the ring.

    Attributes:
        q, do: (64 queries, width, warpgroup). dq: the same memory as q.
        k, v: (tile_n, width, stage): the ring, seen as blocks of K and of V; ``o``: the ring, seen as blocks of O.
        full, empty: barriers of a stage. held_full, held_empty, done: barriers of a warpgroup's tiles.
        unread_word: for :func:`hold_above_wait`.
        boxes: the mailboxes of packed tiles.
        halves: where the two CTAs of a cluster exchange S and dP. half: which half of the columns this CTA has.
    """

    q: cute.Tensor
    do: cute.Tensor
    dq: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    held_full: cute.Pointer
    held_empty: cute.Pointer
    done: cute.Pointer
    unread_word: cute.Pointer
    boxes: Mailboxes
    o: cute.Tensor | None = None
    halves: halves.Halves | None = None

    @property
    def half(self) -> I32 | int:
        return self.halves.rank if self.halves else 0


def allocate(tmas: QueriesTmas, config: Backward) -> QueriesStorage:
    """Allocates in the order of :attr:`QueryTiles.shared`."""
    allocator, tiles = cutlass.utils.SmemAllocator(), config.queries
    full = allocator.allocate_array(cutlass.Int64, tiles.barriers + 1 + mailbox_words(config, tiles.warpgroups))
    # Q and dO of every warpgroup, then the ring; a stage holds a block of K or of V, or of O while statistics are made.
    sizes = (*[tiles.warpgroups * tiles.tile_elements] * 2, tiles.stages * tiles.stage_elements)
    q, do, k = (allocate_elements(allocator, elements, config.dtype) for elements in sizes)
    empty, held_full = full + tiles.stages, full + 2 * tiles.stages
    held_empty, done = held_full + tiles.warpgroups, held_full + 2 * tiles.warpgroups
    # dQ is stored from Q's memory: after a tile's last block nobody reads Q.
    views = (q, tmas.q), (do, tmas.do), (q, tmas.dq), (k, tmas.k), (k, tmas.v)
    barriers = full, empty, held_full, held_empty, done
    boxes = mailboxes(full + tiles.barriers + 1)
    o = with_tma_layout(k, tmas.o) if tiles.makes_statistics else None
    shared = None
    if tiles.halved:
        shared = halves.allocate(allocator, ROWS * tiles.tile_n, tiles.warpgroups, held_full + 3 * tiles.warpgroups)
    return QueriesStorage(
        *(with_tma_layout(*view) for view in views), *barriers, full + tiles.barriers, boxes, o, shared
    )


@cute.jit
def init_barriers(smem: QueriesStorage, config: cutlass.Constexpr):
    """One thread sets every barrier's count of arrivals; then all threads see them."""
    tiles = config.queries
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for n in cutlass.range_constexpr(tiles.stages):
                cute.arch.mbarrier_init(smem.full + n, 1)  # load_keys, and bytes -> warpgroups
                cute.arch.mbarrier_init(smem.empty + n, 4 * tiles.warpgroups)  # every computing warp -> load_keys
            for n in cutlass.range_constexpr(tiles.warpgroups):
                cute.arch.mbarrier_init(smem.held_full + n, 1)  # load_rows, and bytes -> warpgroup n
                cute.arch.mbarrier_init(smem.held_empty + n, 1)  # store -> load_rows
                cute.arch.mbarrier_init(smem.done + n, 128)  # warpgroup n -> store
            if cutlass.const_expr(tiles.halved):
                halves.init_barriers(smem.halves)
            init_mailboxes(smem.boxes, config)
    halves.publish_barriers(smem.halves)
