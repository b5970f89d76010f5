"""Shared memory, TMA descriptors and barriers of the pass over key tiles (:mod:`tilewise.backends.hopper.backward.keys`)."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from tilewise.backends.hopper.backward import dq_accumulate, halves, pair_bias
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.fragments import allocate_elements, statistics_layout, with_tma_layout
from tilewise.backends.hopper.backward.tiles import KEY_GROUPS
from tilewise.backends.hopper.config import ALIGNMENT, ROWS
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.scheduler import (
    QUEUE_WORDS,
    Mailboxes,
    QueueSlots,
    init_mailboxes,
    init_queue_slots,
    mailbox_words,
    mailboxes,
    queue_slots,
)

TILE_READERS = 1 + KEY_GROUPS + 4 * KEY_GROUPS  # warps: load_keys, both that store, and those that compute


class KeysTmas(NamedTuple):
    """TMA descriptors with the coordinates (rows, columns, head, batch), or as :func:`packed.ragged` has them, and their shared-memory
    layouts; those of a bias by pair and of its gradient, where there are such."""

    q: cpasync.TmaInfo
    do: cpasync.TmaInfo
    k: cpasync.TmaInfo
    v: cpasync.TmaInfo
    dk: cpasync.TmaInfo
    dv: cpasync.TmaInfo
    bias: cpasync.TmaInfo | None = None
    dbias: cpasync.TmaInfo | None = None


class KeysMmas(NamedTuple):
    """The products of a warpgroup.

    Attributes:
        score: Sᵀ or dPᵀ, 64 x tile_m; both operands in shared memory.
        dk, dv: 64 x width; dSᵀ or Pᵀ in registers, and a block of Q or dO seen transposed.
        dq: a part of dQ, where it is accumulated.
        dp_registers: dPᵀ of the columns of V that are in registers, if any are.
    """

    score: cute.TiledMma
    dk: cute.TiledMma
    dv: cute.TiledMma
    dq: cute.TiledMma | None = None
    dp_registers: cute.TiledMma | None = None


class RowBuffers(NamedTuple):
    """Global memory by query row, beside q and do.

    Attributes:
        lse2, delta: (batch, heads_q, statistics row), fp32: a whole number of blocks for each head.
        dq_sums: (batch, heads_q, block, warpgroup, part), fp32, where dQ is accumulated.
        semaphores: (batch, heads_q, block x warpgroup), int32: :class:`tilewise.backends.hopper.backward.dq_accumulate.HeadSums`.
        sheet: (batch x heads_q, key block, query block, element), where dSᵀ is kept (:mod:`tilewise.backends.hopper.backward.sheet`).
        tile_parts: (part, warpgroup, element), fp32: dK and dV of the parts of shared tiles
            (:mod:`tilewise.backends.hopper.backward.parts`).
    """

    lse2: cute.Tensor
    delta: cute.Tensor
    dq_sums: cute.Tensor | None = None
    semaphores: cute.Tensor | None = None
    sheet: cute.Tensor | None = None
    tile_parts: cute.Tensor | None = None


class KeysStorage(NamedTuple):
    """Tiles and barriers in shared memory. The last mode of a tile counts tiles (64 keys) or stages of the ring.

    Attributes:
        k, v: (64, width, tile). dk, dv: the same memory, seen as the tiles that are stored.
        q, do: (tile_m, width, stage): the ring, seen as blocks of Q and of dO.
        statistics: :func:`statistics_layout`: lse2 beside a block of Q, delta beside a block of dO.
        handover: (4 words, thread, n): the P that one warpgroup hands to the other, where the work is split.
        full, empty: barriers of a stage. held_full, held_empty, done: barriers of a tile of K, then of V.
        p_full, p_empty: barriers of ``handover``.
        unread_word: for :func:`hold_above_wait`.
        boxes: the mailboxes of packed tiles, or the slots of tiles from a queue.
        dq: what accumulating dQ takes.
        left: the barrier that says that dK and dV have left, where they do not lie where K and V were.
        minus_lse: :func:`constant_layout`, where products subtract the statistics; ``statistics`` is then :func:`subtrahends_layout`.
        bias: the rings of a bias by pair.
        halves: where the two CTAs of a cluster exchange S and dP. half: which half of the columns this CTA has.
        kept: (64 keys, 64 queries, 2): blocks of dS on their way to a sheet, where there is room for them.
        told: words of 4 bytes, where CTAs share tiles: for each warpgroup whether its gradients are a tile's, then the number of the part
            that it works on.
    """

    k: cute.Tensor
    v: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    statistics: cute.Tensor
    handover: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    held_full: cute.Pointer
    held_empty: cute.Pointer
    done: cute.Pointer
    p_full: cute.Pointer
    p_empty: cute.Pointer
    unread_word: cute.Pointer
    boxes: Mailboxes | QueueSlots
    dq: dq_accumulate.SumStorage | None = None
    left: cute.Pointer | None = None
    minus_lse: cute.Tensor | None = None
    bias: pair_bias.BiasStorage | None = None
    halves: halves.Halves | None = None
    kept: cute.Tensor | None = None
    told: cute.Pointer | None = None

    @property
    def half(self) -> I32 | int:
        return self.halves.rank if self.halves else 0


def allocate(tmas: KeysTmas, config: Backward) -> KeysStorage:
    """Allocates in the order of :attr:`KeyTiles.shared`."""
    allocator, tiles = cutlass.utils.SmemAllocator(), config.keys
    words = QUEUE_WORDS if tiles.queued else mailbox_words(config, KEY_GROUPS)
    full = allocator.allocate_array(cutlass.Int64, tiles.barriers + 1 + words + 2 * config.parted)
    told = cute.recast_ptr(full + tiles.barriers + 1 + words, dtype=I32) if config.parted else None
    if config.subtracts:
        layouts = subtrahends_layout(tiles.tile_m, config.statistics.count), constant_layout()
        statistics, minus_lse = (allocator.allocate_tensor(ELEMENT[config.dtype], layout, 128) for layout in layouts)
    else:
        statistics, minus_lse = allocator.allocate_tensor(F32, statistics_layout(tiles.tile_m, tiles.stages), 128), None
    sizes = (*[tiles.key_tiles * tiles.tile_elements] * 2, tiles.stages * tiles.stage_elements)
    k, v, q = (allocate_elements(allocator, elements, config.dtype) for elements in sizes)
    # A warpgroup puts its dK and dV where it alone has read: split, make_keys has read V alone, and make_values K alone.
    dk, dv = (v, k) if tiles.split else (k, v)
    empty, held_full = full + tiles.stages, full + 2 * tiles.stages
    held_empty, done = held_full + 2 * tiles.key_tiles, held_full + 4 * tiles.key_tiles
    p_full = held_full + 6 * tiles.key_tiles
    handover, dq, shared = statistics, None, None
    handover_layout = cute.make_layout((4, 128, tiles.tile_m // 16))
    if tiles.halved:
        shared = halves.allocate(allocator, ROWS * tiles.tile_m, KEY_GROUPS, p_full + 2)
        # A thread's P takes the place of the S that it was sent.
        handover = cute.make_tensor(cute.recast_ptr(shared.parts.iterator, dtype=I32), handover_layout)
    elif tiles.split:
        handover = allocator.allocate_tensor(I32, handover_layout, ALIGNMENT)
    kept = None
    if tiles.keeps_ds and not tiles.halved:
        layout = dq_accumulate.ds_layout(config, count=2)
        kept = allocator.allocate_tensor(ELEMENT[config.dtype], layout.outer, ALIGNMENT, layout.inner)
    left = p_full
    if tiles.sums_dq:
        dq, left = dq_accumulate.allocate(allocator, config, p_full), p_full + 8
    if tiles.overlaps:
        # dS and parts of dQ are done with when a tile's dK and dV are put there, and K and V make room for the next tile's.
        dk, dv = (cute.recast_ptr(t.iterator, dtype=ELEMENT[config.dtype]) for t in (dq.part, dq.ds))
    bias = None
    if config.score == "bias":
        layout, bias_full = tmas.bias.smem_layout, left + 1
        stages = allocator.allocate_tensor(ELEMENT[config.dtype], layout.outer, ALIGNMENT, layout.inner)
        bias_empty, bias_done = (bias_full + n * tiles.bias_tiles for n in (1, 2))
        bias = pair_bias.BiasStorage(stages, bias_full, bias_empty, bias_done)
    return KeysStorage(
        with_tma_layout(k, tmas.k), with_tma_layout(v, tmas.v), with_tma_layout(dk, tmas.dk), with_tma_layout(dv, tmas.dv),
        with_tma_layout(q, tmas.q), with_tma_layout(q, tmas.do), statistics, handover,
        full, empty, held_full, held_empty, done, p_full, p_full + 1, full + tiles.barriers,
        (queue_slots if tiles.queued else mailboxes)(full + tiles.barriers + 1), dq, left, minus_lse, bias, shared, kept, told,
    )  # fmt: skip


def subtrahends_layout(rows: int, slots: int) -> cute.Layout:
    """The layout of statistics as an operand B, (row, column, slot), K-major without a swizzle: 16 bytes a row, whose 8 columns come
    twice."""
    return cute.make_layout(((8, rows // 8), (8, 2), slots), stride=((8, 64), (1, 0), 8 * rows))


def constant_layout() -> cute.Layout:
    """The layout of an operand A, (64, 16, 1), whose 8 rows of 8 columns come again and again: CONSTANT_BYTES."""
    return cute.make_layout(((8, 8), (8, 2), 1), stride=((8, 0), (1, 0), 64))


def held_arrivals(config: Backward) -> int:
    """How many arrivals free a tile of K or V: the storing warp's, or those of all computing warps."""
    return 4 * KEY_GROUPS if config.keys.overlaps else 1


@cute.jit
def init_barriers(smem: KeysStorage, config: cutlass.Constexpr):
    """One thread sets every barrier's count of arrivals; then all threads see them."""
    tiles = config.keys
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for n in cutlass.range_constexpr(tiles.stages):
                cute.arch.mbarrier_init(smem.full + n, 1)  # load_queries, and bytes -> warpgroups
                cute.arch.mbarrier_init(smem.empty + n, 4 * KEY_GROUPS)  # every computing warp -> load_queries
            for n in cutlass.range_constexpr(2 * tiles.key_tiles):
                cute.arch.mbarrier_init(smem.held_full + n, 1)  # load_keys, and bytes -> warpgroups
                cute.arch.mbarrier_init(smem.held_empty + n, held_arrivals(config))  # -> load_keys
                cute.arch.mbarrier_init(smem.done + n, 128)  # warpgroup -> store
            if cutlass.const_expr(tiles.split):
                cute.arch.mbarrier_init(smem.p_full, 128)  # make_values -> make_keys
                cute.arch.mbarrier_init(smem.p_empty, 128)  # make_keys -> make_values
            if cutlass.const_expr(tiles.halved):
                halves.init_barriers(smem.halves)
            if cutlass.const_expr(tiles.sums_dq):
                dq_accumulate.init_barriers(smem.dq)
            if cutlass.const_expr(tiles.overlaps):
                cute.arch.mbarrier_init(smem.left, KEY_GROUPS)  # store -> warpgroups
            if cutlass.const_expr(config.score == "bias"):
                pair_bias.init_barriers(smem.bias, config)
            if cutlass.const_expr(tiles.queued):
                init_queue_slots(smem.boxes, TILE_READERS)
            else:
                init_mailboxes(smem.boxes, config)
    halves.publish_barriers(smem.halves)
