"""dQ = scale · dS K added up over key tiles, on Hopper (sm_90a): what the pass over key tiles needs for it, and what follows.

Both warpgroups of :mod:`tilewise.backends.hopper.backward.keys` put their dSᵀ, rounded, into shared memory, where the copy engine's
neighbours read it as dS: with the 128 keys of the tile each makes a part of dQ's block, which the copy engine adds to
an fp32 accumulator in global memory (16 bytes a clock and SM, whatever their order). At head dim 128 a part is half of the
columns, transposed, 64 x tile_m; at 64, half of the 128 queries, 64 x 64. It lies in memory as it lay in registers:
fours of each thread's numbers, one after the other. :func:`kernel` puts them in place, scaled and rounded, and so it does what
:mod:`tilewise.backends.hopper.backward.cluster` has added up: parts of 64 queries x half of the columns. Where bits must repeat,
key tiles add to a block one after the other: a counter of each part says whose turn it is, and only the adding warp waits.

mbarriers (arrivals in brackets): ``ds_full[block % 2]`` and ``ds_empty[block % 2]`` (256) between the warpgroups: two blocks of dS, so
that they may be most of a block apart; ``part_full[w]`` (128) warpgroup -> adding warp, ``part_empty[w]`` (1) back.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.utils import LayoutEnum

from tilewise.backends.hopper.backward import walk as backward_walk
from tilewise.backends.hopper.backward.config import KEY_GROUPS, Backward, KeyTiles
from tilewise.backends.hopper.backward.tile import (
    Work,
    at_slot,
    band,
    by_rows,
    products,
    put,
    put_fragment,
    scaled,
    turned,
)
from tilewise.backends.hopper.config import ALIGNMENT, ROWS
from tilewise.backends.hopper.kit import packed, schedule
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.tiles import staged_layout as staged
from tilewise.backends.hopper.kit.tiles import tma_tiles as cut


def fours(c: KeyTiles) -> int:
    """Of a thread's numbers of a part."""
    return c.part // (4 * 128)


MAJOR = OperandMajorMode


class Room(NamedTuple):
    """``ds`` (64 keys, tile_m, 2 blocks x 2 warpgroups), ``part`` (4, thread, n, warpgroup) of dQ in fp32; the barriers."""

    ds: cute.Tensor
    part: cute.Tensor
    ds_full: cute.Pointer
    ds_empty: cute.Pointer
    part_full: cute.Pointer
    part_empty: cute.Pointer


def allocate(smem, x: Backward, bars) -> Room:
    """The last part of :attr:`KeyTiles.shared`."""
    layout = ds_layout(x)
    ds = smem.allocate_tensor(ELEMENT[x.dtype], layout.outer, ALIGNMENT, layout.inner)
    part = smem.allocate_tensor(F32, cute.make_layout((4, 128, fours(x.keys), KEY_GROUPS)), ALIGNMENT)
    return Room(ds, part, bars, bars + 2, bars + 4, bars + 6)


def ds_layout(x: Backward):
    block = sm90.make_smem_layout_epi(ELEMENT[x.dtype], LayoutEnum.ROW_MAJOR, (ROWS, x.keys.tile_m), 1)
    return staged(block, 2 * KEY_GROUPS, ROWS * x.keys.tile_m)


def start_barriers(room: Room) -> None:
    """By one thread."""
    for n in range(2):
        cute.arch.mbarrier_init(room.ds_full + n, 128 * KEY_GROUPS)
        cute.arch.mbarrier_init(room.ds_empty + n, 128 * KEY_GROUPS)
        cute.arch.mbarrier_init(room.part_full + n, 128)
        cute.arch.mbarrier_init(room.part_empty + n, 1)


def product(x: Backward) -> cute.TiledMma:
    """A part of dQ: 64 queries of dSᵀ seen turned by 64 columns of K seen turned, or transposed."""
    element = ELEMENT[x.dtype]
    return sm90.make_trivial_tiled_mma(element, element, MAJOR.MN, MAJOR.MN, F32, (1, 1, 1), (ROWS, columns_of(x.keys)))


def rows_of(c: KeyTiles) -> int:
    """Queries of a part."""
    return c.tile_m if c.by_columns else ROWS


def columns_of(c: KeyTiles) -> int:
    """Of a part, which has 64 rows."""
    return c.part // ROWS


def box_of(c: KeyTiles) -> int:
    """Columns of dQ that a part has."""
    return columns_of(c) if c.paired else ROWS


def part_layout(c: KeyTiles) -> cute.Layout:
    """Of a part in memory: (4, thread, n); of a pair's, of which each warp adds its own, one warp's after the other's."""
    if not c.paired:
        return cute.make_layout((4, 128, fours(c)))
    return cute.make_layout((4, (32, 4), fours(c)), stride=(1, (4, c.part // 4), 128))


class Operands(NamedTuple):
    """Of warpgroup w: 64 queries of dS (descriptors, .., block x warpgroup) and 64 columns of K (.., room), or these as ``a`` and all
    queries as ``b``; its part of dQ."""

    by: cute.TiledMma
    a: cute.Tensor
    b: cute.Tensor
    dq: cute.Tensor


def operands(by: cute.TiledMma, room: Room, k: cute.Tensor, w, x: Backward) -> Operands:
    mine, c = by.get_slice(0), x.keys
    rows = c.tile_m if c.by_columns else ROWS
    ds = cute.local_tile(turned(room.ds), (rows, ROWS, 2 * KEY_GROUPS), (0 if c.by_columns else w, 0, 0))
    k = cute.local_tile(turned(k), (ROWS, ROWS, KEY_GROUPS), (w if c.by_columns else 0, 0, 0))
    a, b = (k, ds) if c.by_columns else (ds, k)
    return Operands(
        by,
        by.make_fragment_A(mine.partition_A(a)),
        by.make_fragment_B(mine.partition_B(b)),
        cute.make_rmem_tensor(by.partition_shape_C((ROWS, columns_of(c))), F32),
    )


@cute.jit
def begin_part(t: Operands, room: Room, n, x: cutlass.Constexpr):
    """Begins a part of dQ of block n, as soon as both warpgroups' dS are there; -1: of nothing."""
    if n >= 0:
        cute.arch.mbarrier_wait(room.ds_full + n % 2, n // 2 % 2)
    products(t.by, t.dq, pairs(t, n + 2, x), overwrite=True)


@cute.jit
def put_part(t: Operands, room: Room, w, n, real):
    """The part of dQ of block n, which is made, to where the copy engine takes it, if it is a ``real`` one."""
    if real:
        cute.arch.mbarrier_arrive(room.ds_empty + n % 2)
        cute.arch.mbarrier_wait(room.part_empty + w, 1 - n % 2)
        write_part(t.dq, room.part, w)
        cute.arch.fence_view_async_shared()
        cute.arch.mbarrier_arrive(room.part_full + w)


def put_scores(ds: cute.Tensor, by: cute.TiledMma, room: Room, count, w, x: Backward) -> None:
    """A block of dSᵀ, rounded, to where both warpgroups read it."""
    cute.arch.mbarrier_wait(room.ds_empty + count % 2, 1 - count // 2 % 2)
    put_fragment(ds, by, room.ds[None, None, count % 2 * KEY_GROUPS + w], x.dtype)
    cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(room.ds_full + count % 2)


def pairs(t: Operands, count, x: Backward) -> list:
    """dS and K of each warpgroup's keys, or K and dS, of which dQ's part is the sum of products."""
    places = [(count % 2 * KEY_GROUPS + n, n) for n in range(KEY_GROUPS)]
    return [
        (at_slot(t.a, a), at_slot(t.b, b)) for a, b in (place[:: -1 if x.keys.by_columns else 1] for place in places)
    ]


def write_part(dq: cute.Tensor, part: cute.Tensor, w) -> None:
    fours = cute.make_tensor(dq.iterator, cute.make_layout((4, cute.size(dq) // 4)))
    cute.autovec_copy(fours, part[None, cute.arch.thread_idx()[0] % 128, None, w])


STORE = "cp.async.bulk.global.shared::cta.bulk_group"
ADD = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"


def begin(operation: str, target: cute.Tensor, part: cute.Tensor, w) -> None:
    """One warp: a part on its way to its place in global memory, (part,)."""
    source = part[None, None, None, w]
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            operation + " [{$r0}], [{$r1}], {$r2};",
            read_only_args=[target.iterator.toint(), source.iterator.toint(), I32(4 * cute.size(source))],
        )
    cute.arch.cp_async_bulk_commit_group()


def give_back(room: Room, w) -> None:
    """One warp: the room of what is on its way, as soon as that has been read."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(room.part_empty + w)


@cute.jit
def add_all(dq: cute.Tensor, room: Room, w: cutlass.Constexpr, start, stop, phase):
    """One warp: the parts of query blocks ``[start, stop)`` of one head's ``dq``, (block, warpgroup, part). Returns the phase."""
    for step in cutlass.range(stop - start, unroll=1):
        cute.arch.mbarrier_wait(room.part_full + w, phase)
        begin(ADD, dq[start + step, w, None], room.part, w)
        give_back(room, w)
        phase = 1 - phase
    return phase


# -- In order ------------------------------------------------------------------------------------------------------


class Blocks(NamedTuple):
    """Of a head: ``dq`` (block, warpgroup, part), and ``turns`` (block x warpgroup): how many tiles each is made of so far."""

    dq: cute.Tensor
    turns: cute.Tensor


@cute.jit
def add_in_order(of: Blocks, room: Room, w: cutlass.Constexpr, at, phase, work: Work, x: cutlass.Constexpr):
    """As :func:`add_all`, of the place ``at``, each block when the tiles before this one have been there; the first one stores its
    part, so that no zeros are needed. While one is on its way, the next one's turn is asked for.

    All CTAs must run at the same time, since each may wait for any other's earlier rounds: so the launch is a cooperative one.
    """
    found = asked(of.turns, KEY_GROUPS * at.start + w)
    for step in cutlass.range(at.stop - at.start, unroll=1):
        n = at.start + step
        visitors = schedule.key_blocks(n * x.keys.tile_m, x.keys.tile_m, x.keys.tile_n, band(work, x), PICK)
        rank, turn = at.column // x.keys.tile_n - visitors[0], KEY_GROUPS * n + w
        wait_for_turn(of.turns, turn, rank, found)
        cute.arch.mbarrier_wait(room.part_full + w, phase)
        if rank == 0:
            begin(STORE, of.dq[n, w, None], room.part, w)
        else:
            begin(ADD, of.dq[n, w, None], room.part, w)
        found = asked(of.turns, turn + KEY_GROUPS)
        give_back(room, w)
        pass_turn(of.turns, turn, rank + 1)
        phase = 1 - phase
    return phase


def asked(turns: cute.Tensor, n) -> I32:
    """How many tiles have added to a block; past the last one, of any."""
    place = turns.iterator + PICK.smaller(n, cute.size(turns) - 1)
    return cute.arch.load(place, I32, sem="acquire", scope="gpu")


@cute.jit
def wait_for_turn(turns: cute.Tensor, n, rank, found):
    """Until ``rank`` tiles have added to a block, for which ``found`` may be enough; the copy engine sees what they added."""
    while found != rank:
        found = asked(turns, n)
    cute.arch.fence_proxy("async.global")


@cute.jit
def pass_turn(turns: cute.Tensor, n, rank):
    """When what is on its way has arrived; why with release: docs/decisions.md#hopper-turn-fence."""
    cute.arch.cp_async_bulk_wait_group(0, read=False)
    with cute.arch.elect_one():
        cute.arch.store(turns.iterator + n, rank, sem="release", scope="gpu")


# -- What follows --------------------------------------------------------------------------------------------------


class Sums(NamedTuple):
    """``parts`` (batch, heads_q, block, warpgroup, part); where packed sequences begin, if they are, and their rows; ``turns`` as
    :class:`Blocks` has them, of each head, if there are any."""

    parts: cute.Tensor
    cu: cute.Tensor | None
    rows: I32
    turns: cute.Tensor | None = None


def place_of(block, batch, sums: Sums, x: Backward) -> tuple:
    """Where a block's rows are, as :func:`cut` takes it, and which block of those it is."""
    if not x.packed:
        return batch, block
    start_of = lambda n: backward_walk.first_block(n, sums.cu, sums.rows, x)  # noqa: E731
    sequence = packed.holder(block, start_of, cute.size(sums.cu))
    return packed.rows_of(sequence, sums.cu, sums.rows, rest=True), block - start_of(sequence)


@cute.kernel
def kernel(sums: Sums, dq: cpasync.TmaInfo, by: cute.TiledMma, scale: F32, x: cutlass.Constexpr):
    """Grid: query blocks, of all heads and batch elements one after the other; a warpgroup for each part."""
    cute.arch.griddepcontrol_wait()  # all is added up when the kernel before has ended
    blocks, heads, n = sums.parts.shape[2], sums.parts.shape[1], cute.arch.block_idx()[0]
    block, head, batch = n % blocks, n // blocks % heads, n // blocks // heads
    thread = cute.arch.thread_idx()[0] % 128
    w = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
    layout, c = dq.smem_layout, x.keys
    room = cutlass.utils.SmemAllocator().allocate_tensor(ELEMENT[x.dtype], layout.outer, ALIGNMENT, layout.inner)
    acc = cute.make_rmem_tensor(by.partition_shape_C((ROWS, columns_of(c))), F32)
    source = cute.make_tensor(sums.parts[batch, head, block, w, None].iterator, part_layout(c))
    cute.autovec_copy(source[None, thread, None], cute.make_tensor(acc.iterator, cute.make_layout((4, fours(c)))))
    if cutlass.const_expr(c.ordered):
        unless_unvisited(acc, sums.turns[batch, head, KEY_GROUPS * block + w])
    scaled(acc, scale)
    put(acc, by, (turned(room) if c.by_columns else room)[None, None, w], x.dtype, c.by_columns)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=1 + w, number_of_threads=128)
    rows, block = place_of(block, batch, sums, x)
    gQ, sQ = cut(dq, (rows_of(c), box_of(c)), (None, None), head, rows, room)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
        row, column = (block, w) if cutlass.const_expr(c.by_columns or c.paired) else (block * 2 + w, 0)
        cute.copy(dq.atom, sQ[None, w], gQ[None, row, column])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def unless_unvisited(acc: cute.Tensor, turns):
    """Zeros for a block that no tile has added to."""
    if turns == 0:
        acc.fill(0.0)


def launch(sums: Sums, dq: cute.Tensor, scale, stream, x: Backward) -> None:
    """Within a traced function of the host's; ``dq`` (batch, seqlen_q, heads_q, D)."""
    element = ELEMENT[x.dtype]
    rows, c = rows_of(x.keys), x.keys
    layout = sm90.make_smem_layout_epi(element, LayoutEnum.ROW_MAJOR, (rows, box_of(c)), 1)
    info = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(), by_rows(dq, x), staged(layout, KEY_GROUPS, c.part), (rows, box_of(c))
    )
    kernel.set_name_prefix(f"{x.name}_sum", remove_cutlass_symbol=True, keep_mangled_name=False)
    batch, heads, blocks = sums.parts.shape[:3]
    kernel(sums, info, product(x), scale, x).launch(
        grid=[blocks * heads * batch, 1, 1], block=[128 * KEY_GROUPS, 1, 1], stream=stream, use_pdl=True
    )
