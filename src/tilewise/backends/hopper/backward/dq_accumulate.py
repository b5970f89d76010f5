"""dQ = scale · dS K accumulated over key tiles, on Hopper (sm_90a): what the pass over key tiles does for it.

Both warpgroups of :mod:`tilewise.backends.hopper.backward.keys` store their dSᵀ, rounded, in shared memory, where wgmma reads it as dS.
With the 128 keys of the tile each warpgroup makes a part of a block of dQ, and the copy engine adds the part to fp32 sums in global
memory (16 bytes a clock and SM, in whatever order they come)::

    head_dim 128   a part is half of the columns, transposed: 64 columns x tile_m queries
    head_dim 64    a part is half of the 128 queries: 64 queries x 64 columns

A part lies in memory as it lay in registers: fours of each thread's elements, one thread after the other.
:mod:`tilewise.backends.hopper.backward.postprocess` puts the parts in place.

The order of dQ's additions is decided in :func:`add_tile`: :func:`add_all` (whatever order the CTAs come in), :func:`add_or_store` (the
same, but the first one stores) and, where a launch says so, :func:`add_in_order` (from the last key tile to the first, so that bits
repeat). A semaphore of each part says whether something is there, or which tile was added last; only the adding warp waits.

mbarriers (arrivals in brackets): ``ds_full[block % 2]`` and ``ds_empty[block % 2]`` (256) between the warpgroups, two blocks of dS, so
that they may be most of a block apart; ``part_full[w]`` (128) warpgroup -> adding warp, ``part_empty[w]`` (1) back.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.utils import LayoutEnum

from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.fragments import begin_products, stage_of, store_fragment, transposed
from tilewise.backends.hopper.backward.key_tiles import KeyTile, block_at, blocks_of_next
from tilewise.backends.hopper.backward.params import BackwardParams, count_place
from tilewise.backends.hopper.backward.tiles import FP32_BYTES, KEY_GROUPS, KeyTiles
from tilewise.backends.hopper.config import ALIGNMENT, ROWS
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.instructions import both, count_up
from tilewise.backends.hopper.kit.tiles import staged_layout

STORE = "cp.async.bulk.global.shared::cta.bulk_group"
UNTOUCHED, CLAIMED, STORED = range(3)  # semaphores of parts, where the first tile that comes to one stores it
ADD = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"


def fours(tiles: KeyTiles) -> int:
    """How many fours of elements a thread has of a part."""
    return tiles.part_elements // (4 * 128)


def part_columns(tiles: KeyTiles) -> int:
    """The columns of a part as a product makes it, which has 64 rows."""
    return tiles.part_elements // ROWS


# -- Shared memory -------------------------------------------------------------------------------------------------


class SumStorage(NamedTuple):
    """Tiles and barriers in shared memory.

    Attributes:
        ds: (64 keys, tile_m, 2 blocks x 2 warpgroups), in the element type.
        part: (4, thread, n, warpgroup), fp32: the part of dQ that is being added.
    """

    ds: cute.Tensor
    part: cute.Tensor
    ds_full: cute.Pointer
    ds_empty: cute.Pointer
    part_full: cute.Pointer
    part_empty: cute.Pointer


def allocate(allocator, config: Backward, barriers) -> SumStorage:
    """The last part of :attr:`KeyTiles.shared`; ``barriers`` points to 8 of them."""
    layout = ds_layout(config)
    ds = allocator.allocate_tensor(ELEMENT[config.dtype], layout.outer, ALIGNMENT, layout.inner)
    part = allocator.allocate_tensor(F32, cute.make_layout((4, 128, fours(config.keys), KEY_GROUPS)), ALIGNMENT)
    return SumStorage(ds, part, barriers, barriers + 2, barriers + 4, barriers + 6)


def ds_layout(config: Backward, count: int = 2 * KEY_GROUPS):
    """The layout of ``ds``, or of so many tiles of dS."""
    block = sm90.make_smem_layout_epi(ELEMENT[config.dtype], LayoutEnum.ROW_MAJOR, (ROWS, config.keys.tile_m), 1)
    return staged_layout(block, count, ROWS * config.keys.tile_m)


def init_barriers(smem: SumStorage) -> None:
    """One thread sets every barrier's count of arrivals."""
    for n in range(2):
        cute.arch.mbarrier_init(smem.ds_full + n, 128 * KEY_GROUPS)  # both warpgroups -> both
        cute.arch.mbarrier_init(smem.ds_empty + n, 128 * KEY_GROUPS)
        cute.arch.mbarrier_init(smem.part_full + n, 128)  # warpgroup n -> its adding warp
        cute.arch.mbarrier_init(smem.part_empty + n, 1)  # adding warp -> warpgroup n


# -- A part of dQ --------------------------------------------------------------------------------------------------


class SumOperands(NamedTuple):
    """The operands of one warpgroup's part of dQ.

    Attributes:
        a, b: descriptors (.., stage) of 64 queries of dS and the columns of K; transposed, of 64 columns of K and all queries of dS.
        dq: the part, 64 x :func:`part_columns`, fp32.
    """

    mma: cute.TiledMma
    a: cute.Tensor
    b: cute.Tensor
    dq: cute.Tensor


def tiled_mma(config: Backward) -> cute.TiledMma:
    """The product of a part: 64 queries (or columns) by :func:`part_columns`, both operands in shared memory and seen transposed."""
    element, major = ELEMENT[config.dtype], OperandMajorMode.MN
    shape = ROWS, part_columns(config.keys)
    return sm90.make_trivial_tiled_mma(element, element, major, major, F32, (1, 1, 1), shape)


def make_operands(mma: cute.TiledMma, smem: SumStorage, k: cute.Tensor, w, config: Backward) -> SumOperands:
    """The operands of warpgroup w; ``k`` is (64 keys, width, tile)."""
    mine, tiles = mma.get_slice(0), config.keys
    rows = tiles.tile_m if tiles.dq_transposed else ROWS
    ds = cute.local_tile(transposed(smem.ds), (rows, ROWS, 2 * KEY_GROUPS), (0 if tiles.dq_transposed else w, 0, 0))
    k = cute.local_tile(transposed(k), (ROWS, ROWS, KEY_GROUPS), (w if tiles.dq_transposed else 0, 0, 0))
    a, b = (k, ds) if tiles.dq_transposed else (ds, k)
    return SumOperands(
        mma,
        mma.make_fragment_A(mine.partition_A(a)),
        mma.make_fragment_B(mine.partition_B(b)),
        cute.make_rmem_tensor(mma.partition_shape_C((ROWS, part_columns(tiles))), F32),
    )


def put_scores(ds: cute.Tensor, mma: cute.TiledMma, smem: SumStorage, count, w, config: Backward) -> None:
    """Stores warpgroup w's block of dSᵀ, rounded, where both warpgroups read it."""
    cute.arch.mbarrier_wait(smem.ds_empty + count % 2, 1 - count // 2 % 2)  # both have read the block before the last
    # 64 keys x tile_m, in the element type.
    store_fragment(ds, mma, smem.ds[None, None, count % 2 * KEY_GROUPS + w], config.dtype)
    cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(smem.ds_full + count % 2)


@cute.jit
def begin_part(operands: SumOperands, smem: SumStorage, n, config: cutlass.Constexpr):
    """Begins the part of dQ of block n as soon as both warpgroups' dS are there. Block -1 does not exist: its product reads whatever
    lies there, and is dropped."""
    # Partner: put_scores of both warpgroups.
    if n >= 0:
        cute.arch.mbarrier_wait(smem.ds_full + n % 2, n // 2 % 2)
    # dQ = dS K, or dQᵀ = Kᵀ dSᵀ, of the 128 keys of both warpgroups
    begin_products(operands.mma, operands.dq, factors_of(operands, n + 2, config), overwrite=True)


def factors_of(operands: SumOperands, count, config: Backward) -> list:
    """The operands of each warpgroup's 64 keys; dQ's part is the sum of their products."""
    stages = [(count % 2 * KEY_GROUPS + n, n) for n in range(KEY_GROUPS)]  # (of dS, of K)
    order = -1 if config.keys.dq_transposed else 1
    return [(stage_of(operands.a, a), stage_of(operands.b, b)) for a, b in (stage[::order] for stage in stages)]


@cute.jit
def put_part(operands: SumOperands, smem: SumStorage, w, n, real):
    """Hands the finished part of dQ of block n to the adding warp, if the block is a ``real`` one."""
    if real:
        cute.arch.mbarrier_arrive(smem.ds_empty + n % 2)  # both warpgroups wait for it before they store dS again
        cute.arch.mbarrier_wait(smem.part_empty + w, 1 - n % 2)
        # The part, fp32; part_empty: the adding warp's last copy has read what lay there.
        write_part(operands.dq, smem.part, w)
        cute.arch.fence_view_async_shared()
        cute.arch.mbarrier_arrive(smem.part_full + w)


def await_part(smem: SumStorage, w, n) -> None:
    """Waits until the adding warp has read the part of block n, the last one that was put there; of block -1, not at all."""
    cute.arch.mbarrier_wait(smem.part_empty + w, n % 2)


def write_part(dq: cute.Tensor, part: cute.Tensor, w) -> None:
    """Writes a warpgroup's accumulator to shared memory, 16 bytes a thread at a time."""
    values = cute.make_tensor(dq.iterator, cute.make_layout((4, cute.size(dq) // 4)))
    cute.autovec_copy(values, part[None, cute.arch.thread_idx()[0] % 128, None, w])


# -- Additions -----------------------------------------------------------------------------------------------------


def begin_copy(operation: str, target: cute.Tensor, part: cute.Tensor, w) -> None:
    """One warp starts the copy of a part to its place (part,) in global memory; ``operation`` is STORE or ADD."""
    source = part[None, None, None, w]
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            operation + " [{$r0}], [{$r1}], {$r2};",
            read_only_args=[target.iterator.toint(), source.iterator.toint(), I32(FP32_BYTES * cute.size(source))],
        )
    # One group a part: release_part waits for it alone.
    cute.arch.cp_async_bulk_commit_group()


def release_part(smem: SumStorage, w) -> None:
    """One warp gives the part's shared memory back as soon as the copy has read it."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(smem.part_empty + w)


class HeadSums(NamedTuple):
    """The accumulated dQ of one query head.

    Attributes:
        dq: (block, warpgroup, part), fp32.
        semaphores: (block x warpgroup,), int32, where kernels have them: UNTOUCHED, CLAIMED by the tile that stores a part, or STORED; in
            order 1 + the number of the key tile that was added last, or UNTOUCHED.
    """

    dq: cute.Tensor
    semaphores: cute.Tensor | None


def sums_of(tile: KeyTile, head, dq_sums: cute.Tensor, semaphores: cute.Tensor | None) -> HeadSums:
    """The sums of a query head to which a tile adds."""
    return HeadSums(tile.dq_blocks(dq_sums, head), None if semaphores is None else tile.semaphores(semaphores, head))


@cute.jit
def add_tile(
    sums: HeadSums, smem: SumStorage, w: cutlass.Constexpr, tile: KeyTile, phase, params: BackwardParams, config: cutlass.Constexpr
):  # fmt: skip
    """One warp adds the parts of a tile's query blocks to a head's dQ, in the order that the launch has. Returns the phase."""
    add = add_or_store if config.stores_first else add_all
    if cutlass.const_expr(config.orders):
        if params.extra.ordered != 0:
            phase = add_in_order(sums, smem, w, tile, phase, params, config)
        else:
            phase = add(sums, smem, w, tile, phase, params, config)
    else:
        phase = add(sums, smem, w, tile, phase, params, config)
    return phase


@cute.jit
def add_all(
    sums: HeadSums, smem: SumStorage, w: cutlass.Constexpr, tile: KeyTile, phase, params: BackwardParams, config: cutlass.Constexpr
):  # fmt: skip
    """One warp adds the parts of a tile as they come to sums that were cleared. Returns the phase."""
    for step in cutlass.range(tile.stop - tile.start, unroll=1):
        m = block_at(tile, tile.start + step, params, config)
        add_part(sums.dq, smem, w, m, phase)
        phase = 1 - phase
    return phase


def add_part(dq: cute.Tensor, smem: SumStorage, w, m, phase) -> None:
    """One warp adds the part of block m to a head's ``dq``, as soon as it is there."""
    # Partner: put_part of warpgroup w. Additions of different CTAs meet in L2, in any order.
    cute.arch.mbarrier_wait(smem.part_full + w, phase)
    begin_copy(ADD, dq[m, w, None], smem.part, w)
    release_part(smem, w)


def count_tile(delta: cute.Tensor, batch, head, weight) -> None:
    """One warp counts a tile of a head, or a part of one by its weight, as soon as all its additions have arrived in global memory.
    Partner: postprocess."""
    cute.arch.cp_async_bulk_wait_group(0, read=False)
    with cute.arch.elect_one():
        count_up(delta, count_place(batch, head, delta), weight)


@cute.jit
def add_in_order(
    sums: HeadSums, smem: SumStorage, w: cutlass.Constexpr, tile: KeyTile, phase, params: BackwardParams, config: cutlass.Constexpr
):  # fmt: skip
    """One warp adds the parts of a key tile, each after those of all later key tiles. Returns the phase.

    The tiles that visit a block follow one another, so that each waits for the next one alone; the last one stores its part. Later
    tiles are taken first: nobody waits for a tile that no CTA has. Under a causal mask a tile also comes to each of its blocks after the
    next tile, which begins further on.
    """
    number = tile.column // config.keys.tile_n
    start, stop = blocks_of_next(tile, params, config)
    for step in cutlass.range(tile.stop - tile.start, unroll=1):
        n = tile.start + step
        place, follows = KEY_GROUPS * n + w, both(start <= n, n < stop)
        if follows:
            await_semaphore(sums.semaphores, place, number + 2)
        cute.arch.mbarrier_wait(smem.part_full + w, phase)
        if follows:
            begin_copy(ADD, sums.dq[n, w, None], smem.part, w)
        else:
            begin_copy(STORE, sums.dq[n, w, None], smem.part, w)
        release_part(smem, w)
        # Partner: await_semaphore of the CTA that has the key tile before this one.
        signal_semaphore(sums.semaphores, place, number + 1)
        phase = 1 - phase
    return phase


@cute.jit
def add_or_store(
    sums: HeadSums, smem: SumStorage, w: cutlass.Constexpr, tile: KeyTile, phase, params: BackwardParams, config: cutlass.Constexpr
):  # fmt: skip
    """One warp adds the parts of a key tile, or stores those of blocks that no other tile has come to. Returns the phase.

    Nobody claims a part before it is there, so that others wait for a store at most, and never for each other.
    """
    for step in cutlass.range(tile.stop - tile.start, unroll=1):
        m = block_at(tile, tile.start + step, params, config)
        place = KEY_GROUPS * m + w
        found = semaphore(sums.semaphores, place)
        # What is stored is there for the copy engine, too. The part is awaited behind the fence, which takes long.
        cute.arch.fence_proxy("async.global")
        cute.arch.mbarrier_wait(smem.part_full + w, phase)
        if found != STORED:
            found = claim(sums.semaphores, place)
            if found != UNTOUCHED:
                await_semaphore(sums.semaphores, place, STORED)
        if found == UNTOUCHED:
            begin_copy(STORE, sums.dq[m, w, None], smem.part, w)
            release_part(smem, w)
            # Partner: await_semaphore of the CTAs that come to this part while it is stored, or later.
            signal_semaphore(sums.semaphores, place, STORED)
        else:
            begin_copy(ADD, sums.dq[m, w, None], smem.part, w)
            release_part(smem, w)
        phase = 1 - phase
    return phase


@cute.jit
def claim(semaphores: cute.Tensor, n) -> I32:
    """One warp claims part n if it is UNTOUCHED. Returns what its semaphore was, the same for all lanes."""
    found = I32(UNTOUCHED)
    if cute.arch.lane_idx() == 0:
        place = semaphores.iterator + n
        found = cute.arch.atomic_cas(place, cmp=I32(UNTOUCHED), val=I32(CLAIMED), sem="acquire", scope="gpu")
    return cute.arch.shuffle_sync(found, 0)


def semaphore(semaphores: cute.Tensor, n) -> I32:
    """The semaphore of part n."""
    return cute.arch.load(semaphores.iterator + n, I32, sem="acquire", scope="gpu")


@cute.jit
def await_semaphore(semaphores: cute.Tensor, n, wanted):
    """Waits until the semaphore of part n is as ``wanted``. The copy engine then sees what was added before."""
    found = semaphore(semaphores, n)
    while found != wanted:
        found = semaphore(semaphores, n)
    cute.arch.fence_proxy("async.global")


@cute.jit
def signal_semaphore(semaphores: cute.Tensor, n, value):
    """Sets the semaphore of part n, as soon as the copy has arrived; why with release: docs/decisions.md#hopper-ordered-dq."""
    cute.arch.cp_async_bulk_wait_group(0, read=False)
    with cute.arch.elect_one():
        cute.arch.store(semaphores.iterator + n, value, sem="release", scope="gpu")
