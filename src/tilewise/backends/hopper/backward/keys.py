"""dK = scale · dSᵀ Q and dV = Pᵀ dO over key tiles on Hopper (sm_90a); docs/algorithm.md, (13) to (16).

All blocks are transposed, (64 keys, tile_m queries): Sᵀ = K Qᵀ and dPᵀ = V dOᵀ leave wgmma in the very registers from which
Pᵀ and dSᵀ, rounded, enter the next one, so that neither crosses shared memory. Roles of a CTA of three warpgroups,
persistent over key tiles, which sum the query heads of a group::

    warp 0       load_keys      64 rows of K and of V for each of their rooms, once a tile; packed, which tile it is
    warp 1       load_queries   Q0 dO0 Q1 dO1 .., with the lse of Q's rows and the delta of dO's, for each query head
    warps 2, 3   store          dK and dV from the rooms
    warpgroups   compute        S P dP dV dS dK, 64 keys each (128 keys a tile), one block after the other
    or, summed   compute_and_sum  dQ too (:mod:`tilewise.backends.hopper.backward.dq_sum`), which the storing warps add up
    or, split    make_values    S P dV: hands P to the other         make_keys   dP dS dK, of the same 64 keys

mbarriers (arrivals in brackets), each waited for by the other side: ``full[slot]`` (1 + bytes) load_queries -> warpgroups,
``empty[slot]`` (8 warps) warpgroups -> load_queries; ``held_full[room]`` (1 + bytes) load_keys -> warpgroups, ``done[room]``
(128) warpgroup -> store, ``held_empty[room]`` (1) store -> load_keys: a tile of dK or dV takes the place of the tile of K or V
that its warpgroup alone has read; ``p_full`` (128) and ``p_empty`` (128) between make_values and make_keys.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import LayoutEnum

from tilewise.backends.hopper.backward import dq_sum as backward_sum
from tilewise.backends.hopper.backward import walk as backward_walk
from tilewise.backends.hopper.backward.config import KEY_GROUPS, LINES, PAIR, Backward
from tilewise.backends.hopper.backward.tile import (
    Block,
    Limits,
    Work,
    allocated,
    at_slot,
    band,
    band_of_columns,
    by_rows,
    flag_of,
    give_back,
    hold,
    of_columns,
    own_place,
    pairs_of,
    probabilities,
    products,
    put,
    scaled,
    score_gradients,
    seen_as,
    statistics_layout,
    to_operand,
    turned,
    words,
)
from tilewise.backends.hopper.backward.walk import Sequence
from tilewise.backends.hopper.config import ALIGNMENT, ROWS
from tilewise.backends.hopper.kit import packed, schedule, tile
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.ring import fetch
from tilewise.backends.hopper.kit.scheduler import PICK, each_tile, take_tiles
from tilewise.backends.hopper.kit.tiles import staged_layout as staged
from tilewise.backends.hopper.kit.tiles import tma_tiles as cut


class Tmas(NamedTuple):
    """Descriptors, coordinates and shared layouts of (rows, columns, head, batch), or as :func:`packed.ragged` has them."""

    q: cpasync.TmaInfo
    do: cpasync.TmaInfo
    k: cpasync.TmaInfo
    v: cpasync.TmaInfo
    dk: cpasync.TmaInfo
    dv: cpasync.TmaInfo


class Products(NamedTuple):
    """``score``: 64 x tile_m from shared memory. ``dk``, ``dv``: 64 x width from registers and a block seen transposed."""

    score: cute.TiledMma
    dk: cute.TiledMma
    dv: cute.TiledMma
    dq: cute.TiledMma | None = None


class Room(NamedTuple):
    """Tiles in shared memory, the last mode being the room or the ring's slot; the ring's ``statistics``
    (:func:`statistics_layout`); P ``handed`` on, (4 words, thread, n); the barriers."""

    k: cute.Tensor
    v: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    statistics: cute.Tensor
    handed: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    held_full: cute.Pointer
    held_empty: cute.Pointer
    done: cute.Pointer
    p_full: cute.Pointer
    p_empty: cute.Pointer
    pin: cute.Pointer
    boxes: backward_walk.Boxes
    sum: backward_sum.Room | None = None


class Place(NamedTuple):
    """A key tile: its first key, key head and batch index, its query blocks ``[start, stop)``, and what is its packed sequence's
    own. With lists of blocks these are steps, of which the first ``partial`` ones need the predicate. Where ends are tensors
    only :func:`of_head` knows the query blocks, and the head is a query head."""

    column: I32
    head: I32
    batch: I32
    start: I32
    stop: I32
    own: backward_walk.Own | None = None
    partial: I32 | None = None

    @property
    def keys(self):
        """Where k's rows are: as :func:`cut` takes it."""
        return self.batch if self.own is None else self.own.k

    @property
    def rows(self):
        """Those of q."""
        return self.batch if self.own is None else self.own.q

    def line(self, statistic: cute.Tensor, head) -> cute.Tensor:
        """Of a head's rows."""
        if self.own is None:
            return statistic[self.batch, head, None]
        return cute.domain_offset((cute.assume(self.own.line, divby=LINES),), statistic[0, head, None])

    def blocks(self, sums: cute.Tensor, head) -> cute.Tensor:
        """Of a head's dQ."""
        if self.own is None:
            return sums[self.batch, head, None, None, None]
        return cute.domain_offset((self.own.block, 0, 0), sums[0, head, None, None, None])


def order(work: Work, x: Backward) -> schedule.Order:
    """The first key tiles first: under a causal mask they are the longest."""
    n_blocks = (work.seqlen_k + x.keys.tile_n - 1) // x.keys.tile_n
    return schedule.Order(n_blocks, work.batch * work.heads, work.section, False)


def cta_of(x: Backward):
    """``(cta, ctas)``: which one it is in the order of tiles, of how many; two that share a tile count as one. As second pass the
    first CTAs come to multiprocessors that had fewer tiles of the other: they are the last in the order, which had them too."""
    each = PAIR if x.keys.paired else 1
    n, ctas = cute.arch.block_idx()[0] // each, cute.arch.grid_dim()[0] // each
    return (ctas - 1 - n if x.queries_first else n), ctas


def place_of(round_, work: Work, x: Backward) -> Place:
    """The CTA's tile in a round."""
    n = schedule.nth(*cta_of(x), round_, fro_of(x))
    n_block, head = schedule.tile_at(n, order(work, x), PICK)
    column, c = n_block * x.keys.tile_n, x.keys
    if x.by_rows:
        return Place(column, head % work.heads, head // work.heads, I32(0), I32(0))
    start, stop = schedule.query_blocks(column, c.tile_n, c.tile_m, work.seqlen_q, band(work, x), PICK)
    return Place(column, head % work.heads, head // work.heads, I32(start), I32(stop))


def of_head(at: Place, g, work: Work, x: Backward) -> Place:
    """A tile's place for the g-th query head of its group."""
    c, at = x.keys, at._replace(head=at.head * work.group + g)
    if not x.by_rows:
        return at
    if x.form == "lists":
        partial, count = (work.extra.counts[at.batch, at.head, at.column // c.tile_n, n] for n in range(2))
        return at._replace(start=I32(0), stop=count, partial=partial)
    kept = band_of_columns(at.batch, at.head, work, x)
    start, stop = schedule.query_blocks(at.column, c.tile_n, c.tile_m, work.seqlen_q, kept, PICK)
    return at._replace(start=I32(start), stop=I32(stop))


def block_at(at: Place, n, work: Work, x: Backward):
    """The n-th query block, or the one that a head's list has at step n."""
    return work.extra.blocks[at.batch, at.head, at.column // x.keys.tile_n, n] if x.form == "lists" else n


def rounds_of(work: Work, x: Backward):
    return schedule.rounds(*cta_of(x), order(work, x).tiles, fro_of(x))


def fro_of(x: Backward) -> int:
    return 0 if x.keys.ordered else 1


def packed_tile(n, work: Work, x: Backward) -> packed.Tile:
    """Of each sequence first the keys that are seen."""

    def tiles_of(sequence):
        parts = Sequence.of(sequence, work, x, rest_k=True).parts
        return sum(packed.in_tiles(part, x.keys.tile_n) for part in parts)

    return backward_walk.packed_tile(n, work.heads, tiles_of, work)


def packed_place(of: packed.Tile, work: Work, x: Backward) -> tuple[Place, Work]:
    """A tile's place, and its sequence's numbers. Keys that nobody sees have no query blocks."""
    c, sequence = x.keys, Sequence.of(of.sequence, work, x, rest_k=True)
    own, parts = sequence.numbers, sequence.parts
    before = of.row - packed.in_tiles(parts[0], c.tile_n)
    after = before - packed.in_tiles(parts[1], c.tile_n)
    pick = lambda a, b, c: I32(cutlass.select_(before < 0, a, I32(cutlass.select_(after < 0, b, c))))  # noqa: E731
    column, k = pick(of.row, before, after) * c.tile_n, packed.Span(*map(pick, *parts))
    start, stop = schedule.query_blocks(column, c.tile_n, c.tile_m, own.seqlen_q, band(own, x), PICK)
    stop = I32(cutlass.select_(before < 0, I32(stop), I32(start)))
    at = backward_walk.own_of(of.sequence, sequence.q, k, work, x)
    return Place(column, of.head, of.sequence, I32(start), stop, at), own


WALK = backward_walk.Walk(rounds_of, place_of, packed_tile, packed_place)


# -- Shared memory -------------------------------------------------------------------------------------------------


def allocate(tmas: Tmas, x: Backward) -> Room:
    """In the order of :attr:`KeyTiles.shared`; dO's blocks are Q's, and dK's and dV's rooms K's and V's, seen otherwise."""
    smem, c = cutlass.utils.SmemAllocator(), x.keys
    full = smem.allocate_array(cutlass.Int64, c.barriers + 1 + backward_walk.room_for(x, KEY_GROUPS))
    statistics = smem.allocate_tensor(F32, statistics_layout(c.tile_m, c.slots), 128)
    sizes = (*[c.key_tiles * c.room_elements] * 2, c.slots * c.slot_elements)
    k, v, q = (allocated(smem, elements, x.dtype) for elements in sizes)
    own_k, own_v = (v, k) if c.split else (k, v)  # dK comes to where its warpgroup alone has read
    handed, summed = statistics, None
    if c.split:
        handed = smem.allocate_tensor(I32, cute.make_layout((4, 128, c.tile_m // 16)), ALIGNMENT)
    empty, held_full = full + c.slots, full + 2 * c.slots
    held_empty, done = held_full + 2 * c.key_tiles, held_full + 4 * c.key_tiles
    p_full = held_full + 6 * c.key_tiles
    if c.summed:
        summed = backward_sum.allocate(smem, x, p_full)
    return Room(
        seen_as(k, tmas.k), seen_as(v, tmas.v), seen_as(own_k, tmas.dk), seen_as(own_v, tmas.dv), seen_as(q, tmas.q),
        seen_as(q, tmas.do), statistics, handed,
        full, empty, held_full, held_empty, done, p_full, p_full + 1, full + c.barriers,
        backward_walk.boxes(full + c.barriers + 1), summed,
    )  # fmt: skip


@cute.jit
def start_barriers(room: Room, x: cutlass.Constexpr):
    """One thread sets every barrier's count of arrivals; then all see them."""
    c = x.keys
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for n in cutlass.range_constexpr(c.slots):
                cute.arch.mbarrier_init(room.full + n, 1)
                cute.arch.mbarrier_init(room.empty + n, 4 * KEY_GROUPS)
            for n in cutlass.range_constexpr(2 * c.key_tiles):
                cute.arch.mbarrier_init(room.held_full + n, 1)
                cute.arch.mbarrier_init(room.held_empty + n, 1)
                cute.arch.mbarrier_init(room.done + n, 128)
            if cutlass.const_expr(c.split):
                cute.arch.mbarrier_init(room.p_full, 128)
                cute.arch.mbarrier_init(room.p_empty, 128)
            if cutlass.const_expr(c.summed):
                backward_sum.start_barriers(room.sum)
            backward_walk.start_barriers(room.boxes, x)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


# -- Load ----------------------------------------------------------------------------------------------------------


@cute.jit
def load_keys(tmas: Tmas, room: Room, work: Work, x: cutlass.Constexpr):
    """One warp: K and V of every tile, as soon as the dK and dV that lay there have left."""

    def of_tile(at: Place, of: packed.Tile | None, phase) -> None:
        c = x.keys
        gK, sK = cut(tmas.k, (ROWS, c.width), (None, 0), at.head, at.keys, room.k)
        gV, sV = cut(tmas.v, (ROWS, c.width_v), (None, 0), at.head, at.keys, room.v)
        for n in range(c.key_tiles):
            m, full, empty = at.column // ROWS + n, room.held_full + n, room.held_empty + n
            backward_walk.hand_on(of, room, n, phase)
            fetch(tmas.k, gK[None, m], sK[None, n], 2 * ROWS * c.width, full, empty, phase)
            full, empty = full + c.key_tiles, empty + c.key_tiles
            if c.split:
                backward_walk.hand_on(of, room, 1, phase)
            fetch(tmas.v, gV[None, m], sV[None, n], 2 * ROWS * c.width_v, full, empty, phase)

    def coming(at: Place) -> None:
        """To L2: all CTAs begin their tiles at about the same time, and memory would keep them waiting."""
        for info, width, room_of in ((tmas.k, x.keys.width, room.k), (tmas.v, x.keys.width_v, room.v)):
            g, _ = cut(info, (ROWS, width), (None, 0), at.head, at.keys, room_of)
            for n in range(x.keys.key_tiles):
                cute.prefetch(info.atom, g[None, at.column // ROWS + n])

    take_tiles(WALK, room, KEY_GROUPS, work, x, of_tile, coming if x.keys.ahead else None)


class Lines(NamedTuple):
    """``lse2``, ``delta`` (batch, heads_q, a whole number of blocks), and, where dQ is summed, its sums (batch, heads_q, block,
    warpgroup, part), all in fp32; if in order, ``turns`` (batch, heads_q, block x warpgroup): of how many key tiles these are, so far."""

    lse2: cute.Tensor
    delta: cute.Tensor
    sums: cute.Tensor | None = None
    turns: cute.Tensor | None = None


class Line(NamedTuple):
    """A statistic of a head's rows in global memory, (row,), in blocks of ``columns``."""

    rows: cute.Tensor
    columns: int


def bring(line: Line, m, statistics: cute.Tensor, slot, full) -> None:
    """One thread: block m of a statistic to a slot."""
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), F32)
    target = cute.make_tensor(statistics[None, None, None, slot].iterator, cute.make_layout(line.columns))
    cute.copy(atom, cute.local_tile(line.rows, (line.columns,), (m,)), target, mbar_ptr=full)


def fetch_block(info: cpasync.TmaInfo, g, s, line: Line, m, slot, size: int, room: Room, phase) -> None:
    """As :func:`fetch`, a block of Q or dO and its statistic."""
    full = room.full + slot
    cute.arch.mbarrier_wait(room.empty + slot, phase)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, size + 4 * line.columns)
        bring(line, m, room.statistics, slot, full)
    cute.copy(info.atom, g[None, m], s[None, slot], tma_bar_ptr=full)


@cute.jit
def load_queries(tmas: Tmas, lines: Lines, room: Room, work: Work, x: cutlass.Constexpr):
    """One warp: the query blocks of every tile, for each query head."""
    each, ahead, ring = load_blocks, backward_walk.ahead(room, KEY_GROUPS), (I32(0), I32(1))
    if cutlass.const_expr(x.queries_first and not x.flagged):
        cute.arch.griddepcontrol_wait()  # for the statistics
    if cutlass.const_expr(x.flagged):
        each, ring = load_under, (*ring, I32(0))
    each_tile(WALK, ahead, work, x, lambda at, own, phase, ring: each(tmas, lines, room, at, ring, own, x), ring)
    if cutlass.const_expr(x.flagged):
        cute.arch.griddepcontrol_wait()  # what comes next in the stream finds dQ, too


@cute.jit
def load_under(tmas: Tmas, lines: Lines, room: Room, at: Place, state: tuple, work: Work, x: cutlass.Constexpr):
    """A tile's query blocks where this pass begins under the end of the one over queries: a first tile waits for its heads' statistics,
    the next for all. Returns the ring, where it is then, and how many tiles it has seen."""
    *ring, tiles = state
    if tiles == 0:
        await_lines(lines.lse2, at, work, x)
    else:
        cute.arch.griddepcontrol_wait()
    return *load_blocks(tmas, lines, room, at, tuple(ring), work, x), tiles + 1


@cute.jit
def await_lines(lse2: cute.Tensor, at: Place, work: Work, x: cutlass.Constexpr):
    """One warp: until the pass over queries has written those of a key head's query heads."""
    for g in cutlass.range(work.group, unroll=1):
        await_head(lse2, at.batch, of_head(at, g, work, x).head, work, x)


@cute.jit
def await_head(lse2: cute.Tensor, batch, head, work: Work, x: cutlass.Constexpr):
    """Of a query head, each of its tiles' flags by one lane after the other."""
    lane, blocks = cute.arch.thread_idx()[0] % 32, (work.seqlen_q + x.tile_m - 1) // x.tile_m
    for first in cutlass.range(0, blocks, 32, unroll=1):
        place = flag_of(cutlass.min(first + lane, blocks - 1), batch, head, lse2)
        tile.await_count(lse2, place, x.queries.warpgroups)
    cute.arch.sync_warp()


@cute.jit
def load_blocks(
    tmas: Tmas, lines: Lines, room: Room, at: Place, ring: tuple, work: Work, x: cutlass.Constexpr
):  # fmt: skip
    """A tile's query blocks. Returns the ring, where it is then."""
    c, slot, phase = x.keys, *ring
    q_bytes, do_bytes = 2 * c.tile_m * c.width, 2 * c.tile_m * c.width_v
    for g in cutlass.range(work.group, unroll=1):
        own = of_head(at, g, work, x)
        gQ, sQ = cut(tmas.q, (c.tile_m, c.width), (None, 0), own.head, at.rows, room.q)
        gO, sO = cut(tmas.do, (c.tile_m, c.width_v), (None, 0), own.head, at.rows, room.do)
        lse2_line = Line(at.line(lines.lse2, own.head), c.tile_m)
        delta_line = Line(at.line(lines.delta, own.head), c.tile_m)
        for step in cutlass.range(own.stop - own.start, unroll=1):
            m = block_at(own, own.start + step, work, x)
            fetch_block(tmas.q, gQ, sQ, lse2_line, m, slot, q_bytes, room, phase)
            slot, phase = schedule.after(slot, phase, c.slots)
            fetch_block(tmas.do, gO, sO, delta_line, m, slot, do_bytes, room, phase)
            slot, phase = schedule.after(slot, phase, c.slots)
    return slot, phase


# -- Store ---------------------------------------------------------------------------------------------------------


def send(info: cpasync.TmaInfo, s, g, room: Room, n: int, phase) -> None:
    """Waits until the tile in room n is done, has it stored, and gives the room back."""
    cute.arch.mbarrier_wait(room.done + n, phase)
    cute.copy(info.atom, s, g)
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(room.held_empty + n)


@cute.jit
def store(tmas: Tmas, lines: Lines, room: Room, w: cutlass.Constexpr, work: Work, x: cutlass.Constexpr):
    """One warp for each computing warpgroup w: its parts of dQ to their sums, its dK and dV to global memory; keys past
    the last are dropped there."""
    put = lambda at, own, phase, part: store_tile(tmas, lines, room, w, at, (phase, part), own, x)  # noqa: E731
    each_tile(WALK, backward_walk.at_room(room, w), work, x, put, I32(0))


@cute.jit
def store_tile(
    tmas: Tmas, lines: Lines, room: Room, w: cutlass.Constexpr, at: Place, phases: tuple, work: Work, x: cutlass.Constexpr
):  # fmt: skip
    """A tile's. ``phases``: of its rooms, and of the part of dQ, which it returns."""
    c, phase, part = x.keys, *phases
    if cutlass.const_expr(c.summed):
        for g in cutlass.range(work.group, unroll=1):
            own = of_head(at, g, work, x)
            sums = at.blocks(lines.sums, own.head)
            if cutlass.const_expr(c.ordered):
                sums = backward_sum.Blocks(sums, lines.turns[at.batch, own.head, None])
                part = backward_sum.add_in_order(sums, room.sum, w, own, part, work, x)
            else:
                part = backward_sum.add_all(sums, room.sum, w, own.start, own.stop, part)
    gK, sK = cut(tmas.dk, (ROWS, c.width), (None, 0), at.head, at.keys, room.dk)
    gV, sV = cut(tmas.dv, (ROWS, c.width_v), (None, 0), at.head, at.keys, room.dv)
    n = at.column // ROWS
    if cutlass.const_expr(not c.split):
        send(tmas.dv, sV[None, w], gV[None, n + w], room, c.key_tiles + w, phase)
        send(tmas.dk, sK[None, w], gK[None, n + w], room, w, phase)
    elif cutlass.const_expr(w == 0):
        send(tmas.dv, sV[None, 0], gV[None, n], room, 0, phase)
    else:
        send(tmas.dk, sK[None, 0], gK[None, n], room, 1, phase)
    return part


# -- Compute -------------------------------------------------------------------------------------------------------


class Operands(NamedTuple):
    """Of one warpgroup: descriptors (1, 1, k steps, room or slot), accumulators in fp32, and operands in registers.

    ``k``, ``v`` 64 keys; ``q``, ``do`` tile_m x width, ``q_turned``, ``do_turned`` the same blocks as width x tile_m; ``s``,
    ``dp`` 64 x tile_m, and P and dS in the same registers' order; ``dk``, ``dv`` 64 x width.
    """

    by: Products
    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    q_turned: cute.Tensor
    do_turned: cute.Tensor
    s: cute.Tensor
    dp: cute.Tensor
    p: cute.Tensor
    ds: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    sum: backward_sum.Operands | None = None


def operands(by: Products, room: Room, w, x: Backward) -> Operands:
    c, score, dk, dv = x.keys, *(mma.get_slice(0) for mma in by[:3])
    made = lambda mma, columns: cute.make_rmem_tensor(mma.partition_shape_C((ROWS, columns)), F32)  # noqa: E731
    operand = lambda mma: cute.make_rmem_tensor(mma.partition_shape_A((ROWS, c.tile_m)), ELEMENT[x.dtype])  # noqa: E731
    return Operands(
        by,
        by.score.make_fragment_A(score.partition_A(room.k)),
        by.score.make_fragment_A(score.partition_A(room.v)),
        by.score.make_fragment_B(score.partition_B(room.q)),
        by.score.make_fragment_B(score.partition_B(room.do)),
        by.dk.make_fragment_B(dk.partition_B(turned(room.q))),
        by.dv.make_fragment_B(dv.partition_B(turned(room.do))),
        made(by.score, c.tile_m), made(by.score, c.tile_m), operand(by.dv), operand(by.dk),
        made(by.dk, c.width), made(by.dv, c.width_v),
        backward_sum.operands(by.dq, room.sum, room.k, w, x) if c.summed else None,
    )  # fmt: skip


FAR = 1 << 29  # past every query


def within(n, low, high):
    return PICK.larger(PICK.smaller(n, high), low)


def whole_blocks(column, at: Place, work: Work, x: Backward):
    """``(start, stop)``: the tile's query blocks that see all 64 keys from ``column`` on. Where dQ is summed, keys past the last
    count as unseen."""
    if x.form == "lists":
        return at.partial, at.stop
    blocks, kept = (at.start, at.stop), band_of_columns(at.batch, at.head, work, x)
    start, stop = schedule.whole_query_blocks(column, ROWS, x.keys.tile_m, kept, blocks, PICK)
    if x.keys.summed:
        stop = start + (stop - start) * within(work.seqlen_k - column - ROWS + 1, 0, 1)
    return start, stop


def limits_of(column, at: Place, work: Work, x: Backward) -> Limits:
    """Of the queries that see the keys of a warpgroup, which begin at ``column``. Nobody sees those past the last: their P, of
    scores of 0, may be infinite, which dQ must not meet."""
    keys = [column + tile.row_of(cute.arch.thread_idx()[0] % 128, r) for r in range(2)]
    kept = band_of_columns(at.batch, at.head, work, x)
    lower = [schedule.query_start(j, kept, PICK) + FAR * within(j - work.seqlen_k + 1, 0, 1) for j in keys]
    upper = [schedule.query_stop(j, work.seqlen_q, kept, PICK) for j in keys]
    return Limits.of(lower, upper if x.has_lower else None)


class Spans(NamedTuple):
    """A tile's query blocks as the keys of a warpgroup see them, which begin at ``column``: those of ``[start, stop)`` as a whole, of
    the first ``hidden`` ones nothing, and of the others what is within the limits."""

    column: I32
    at: Place
    start: I32
    stop: I32
    limits: Limits
    hidden: I32 | int = 0

    def block(self, n, whole: bool, work: Work, x: Backward) -> Block:
        """Of the n-th of the tile's blocks, or of its list."""
        if whole and not x.pairs:
            return Block()
        first = block_at(self.at, n, work, x) * x.keys.tile_m
        limits = None if whole else self.limits.within(first)
        return Block(limits, pairs_of(self.at, ("j", "i"), self.column, first, work) if x.pairs else None)


def spans_of(column, at: Place, work: Work, x: Backward) -> Spans:
    """Of a warpgroup."""
    start, stop = whole_blocks(column, at, work, x)
    return Spans(column, at, start, stop, limits_of(column, at, work, x), hidden_blocks(column, at, start, work, x))


def hidden_blocks(column, at: Place, start, work: Work, x: Backward):
    """How many of a tile's blocks before ``start`` the keys of a warpgroup see nothing of."""
    if not x.has_upper or x.keys.split or x.keys.summed or x.form == "lists" or x.keys.tile_m >= x.keys.tile_n:
        return 0
    first = schedule.query_start(column, band_of_columns(at.batch, at.head, work, x), PICK)
    return within(first // x.keys.tile_m - at.start, 0, start - at.start)


def of_group(column, at: Place, work: Work, x: Backward) -> Spans | None:
    """As :func:`spans_of`, for all query heads of a group; None: each has its own."""
    return None if x.by_rows else spans_of(column, at, work, x)


def of_each(spans: Spans | None, column, at: Place, g, work: Work, x: Backward) -> Spans:
    """Of the g-th query head."""
    own = of_head(at, g, work, x)
    return spans_of(column, own, work, x) if x.by_rows else spans._replace(at=own) if x.pairs else spans


class Turn(NamedTuple):
    """Where a warpgroup is: the ring's slot and phase, the blocks that it has done, and how many when its tile began."""

    slot: I32
    phase: I32
    count: I32
    since: I32


def new_turn() -> Turn:
    return Turn(I32(0), I32(0), I32(0), I32(0))


def pair_of(turn: Turn, x: Backward):
    """``(slot, phase)`` of Q and of dO."""
    return (turn.slot, turn.phase), schedule.after(turn.slot, turn.phase, x.keys.slots)


def next_turn(turn: Turn, x: Backward) -> Turn:
    return Turn(*schedule.after(turn.slot, turn.phase, x.keys.slots, step=2), turn.count + 1, turn.since)


@cute.jit
def release_before(empty, turn: Turn, back: cutlass.Constexpr, slots: cutlass.Constexpr):
    """The slot ``back`` before Q's, which only the last products of the block before have kept, if this tile had one."""
    if turn.count > turn.since:
        give_back(empty + (turn.slot + slots - back) % slots)


def release_both(empty, turn: Turn, slots: int) -> None:
    """The slots of Q and dO of the block before."""
    release_before(empty, turn, 2, slots)
    release_before(empty, turn, 1, slots)


@cute.jit
def skip(blocks, turn: Turn, room: Room, slots: cutlass.Constexpr) -> Turn:
    """Gives back the slots of blocks that the warpgroup does not need."""
    slot, phase = turn.slot, turn.phase
    for _ in cutlass.range(2 * blocks, unroll=1):
        cute.arch.mbarrier_wait(room.full + slot, phase)
        give_back(room.empty + slot)
        slot, phase = schedule.after(slot, phase, slots)
    return Turn(slot, phase, turn.count, turn.since)


def query_block(t: Operands, w, turn: Turn, block: Block, room: Room, work: Work, x: Backward) -> Turn:
    """Adds one query block to dK and dV, which are in flight between blocks: S under them, P under the product of dP.

    No more at once, and P is rounded as late as can be: dK and dV, S and dP take 192 registers at D = 128, and with much more
    beside them the assembler runs out of registers and makes every product wait for the one before.
    """
    (q_slot, q_phase), (o_slot, o_phase) = pair_of(turn, x)
    cute.arch.mbarrier_wait(room.full + q_slot, q_phase)
    products(t.by.score, t.s, [(at_slot(t.k, w), at_slot(t.q, q_slot))], overwrite=True)
    warpgroup.wait_group(1)
    release_both(room.empty, turn, x.keys.slots)
    cute.arch.mbarrier_wait(room.full + o_slot, o_phase)
    products(t.by.score, t.dp, [(at_slot(t.v, w), at_slot(t.do, o_slot))], overwrite=True)
    warpgroup.wait_group(1)
    to_operands(t, q_slot, o_slot, block, room, work, x)
    products(t.by.dv, t.dv, [(t.p, at_slot(t.do_turned, o_slot))], overwrite=False)
    products(t.by.dk, t.dk, [(t.ds, at_slot(t.q_turned, q_slot))], overwrite=False)
    return next_turn(turn, x)


def to_operands(t: Operands, q_slot, o_slot, block: Block, room: Room, work: Work, x: Backward) -> None:
    """P and dS from S, which is there, and dP, which is in flight: P under it."""
    s, kept = tile.rows_columns(t.s), block.kept(t.s, work, x)
    probabilities(s, t.p if x.apart else None, of_columns(room.statistics, q_slot), block, work, x, kept)
    hold(room.pin, t.s)
    warpgroup.wait_group(0)
    score_gradients(tile.rows_columns(t.dp), s, of_columns(room.statistics, o_slot), kept, work)
    if not x.apart:
        to_operand(t.p, t.s, x.dtype)
    to_operand(t.ds, t.dp, x.dtype)


def summing_block(t: Operands, w, turn: Turn, block: Block, room: Room, work: Work, x: Backward) -> Turn:
    """As :func:`query_block`, and a part of dQ, of the block before: both warpgroups' dS is then there without waiting, and they may
    be most of a block apart. dV runs under dS. Nothing is in flight between blocks.

    With the part in flight until S of the next block has begun, or dK, the assembler would make every product wait for the one
    before: it does not follow accumulators that are read in the next turn of a loop, nor products that some turns leave out, and
    runs out of registers. So a tile's first block makes a part too, of whatever lies there, and drops it.
    """
    (q_slot, q_phase), (o_slot, o_phase) = pair_of(turn, x)
    cute.arch.mbarrier_wait(room.full + q_slot, q_phase)
    products(t.by.score, t.s, [(at_slot(t.k, w), at_slot(t.q, q_slot))], overwrite=True)
    cute.arch.mbarrier_wait(room.full + o_slot, o_phase)
    products(t.by.score, t.dp, [(at_slot(t.v, w), at_slot(t.do, o_slot))], overwrite=True)
    warpgroup.wait_group(1)
    probabilities(tile.rows_columns(t.s), t.p, of_columns(room.statistics, q_slot), block, work, x)
    products(t.by.dv, t.dv, [(t.p, at_slot(t.do_turned, o_slot))], overwrite=False)
    warpgroup.wait_group(1)
    score_gradients(tile.rows_columns(t.dp), as_rows_columns(t.p, t.dp), of_columns(room.statistics, o_slot))
    to_operand(t.ds, t.dp, x.dtype)
    backward_sum.put_scores(as_accumulator(t.ds, t.dp), t.by.score, room.sum, turn.count, w, x)
    end = part_then_keys if x.keys.part_first else keys_then_part
    end(t, w, turn, room, q_slot, o_slot, x)
    return next_turn(turn, x)


def keys_then_part(t: Operands, w, turn: Turn, room: Room, q_slot, o_slot, x: Backward) -> None:
    """dK += dSᵀ Q, and the part of dQ of the block before, if there was one in this tile."""
    add_keys(t, q_slot)
    backward_sum.begin_part(t.sum, room.sum, turn.count - 1, x)
    warpgroup.wait_group(0)
    give_back(room.empty + q_slot)
    give_back(room.empty + o_slot)
    put_part(t, w, turn, room)


def part_then_keys(t: Operands, w, turn: Turn, room: Room, q_slot, o_slot, x: Backward) -> None:
    """The same the other way round: the part is put while dK's product runs."""
    backward_sum.begin_part(t.sum, room.sum, turn.count - 1, x)
    add_keys(t, q_slot)
    warpgroup.wait_group(1)
    give_back(room.empty + o_slot)
    put_part(t, w, turn, room)
    warpgroup.wait_group(0)
    give_back(room.empty + q_slot)


def add_keys(t: Operands, q_slot) -> None:
    products(t.by.dk, t.dk, [(t.ds, at_slot(t.q_turned, q_slot))], overwrite=False)


def put_part(t: Operands, w, turn: Turn, room: Room) -> None:
    """Of the block before."""
    backward_sum.put_part(t.sum, room.sum, w, turn.count - 1, turn.count > turn.since)


def value_block(t: Operands, turn: Turn, block: Block, room: Room, work: Work, x: Backward) -> Turn:
    """S, P and dV += Pᵀ dO of one query block; slope · P goes to the other warpgroup. dV is in flight between blocks."""
    (q_slot, q_phase), (o_slot, o_phase) = pair_of(turn, x)
    cute.arch.mbarrier_wait(room.full + q_slot, q_phase)
    products(t.by.score, t.s, [(at_slot(t.k, 0), at_slot(t.q, q_slot))], overwrite=True)
    warpgroup.wait_group(0)
    release_before(room.empty, turn, 1, x.keys.slots)
    s, kept = tile.rows_columns(t.s), block.kept(t.s, work, x)
    probabilities(s, t.p, of_columns(room.statistics, q_slot), block, work, x, kept)
    give_back(room.empty + q_slot)
    if x.apart:
        to_operand(t.ds, t.s, x.dtype)
    cute.arch.mbarrier_wait(room.p_empty, 1 - turn.count % 2)
    hand_over(t.ds if x.apart else t.p, room.handed)
    cute.arch.mbarrier_arrive(room.p_full)
    cute.arch.mbarrier_wait(room.full + o_slot, o_phase)
    products(t.by.dv, t.dv, [(t.p, at_slot(t.do_turned, o_slot))], overwrite=False)
    return next_turn(turn, x)


def key_block(t: Operands, turn: Turn, block: Block, room: Room, work: Work, x: Backward) -> Turn:
    """dP, dS and dK += dSᵀ Q of one query block, with the other warpgroup's slope · P. dK is in flight between blocks."""
    (q_slot, q_phase), (o_slot, o_phase) = pair_of(turn, x)
    cute.arch.mbarrier_wait(room.full + o_slot, o_phase)
    products(t.by.score, t.dp, [(at_slot(t.v, 0), at_slot(t.do, o_slot))], overwrite=True)
    warpgroup.wait_group(0)
    release_before(room.empty, turn, 2, x.keys.slots)
    cute.arch.mbarrier_wait(room.p_full, turn.count % 2)
    take_over(t.p, room.handed)
    cute.arch.mbarrier_arrive(room.p_empty)
    kept, p = block.kept(t.dp, work, x), as_rows_columns(t.p, t.dp)
    score_gradients(tile.rows_columns(t.dp), p, of_columns(room.statistics, o_slot), kept, work)
    give_back(room.empty + o_slot)
    to_operand(t.ds, t.dp, x.dtype)
    cute.arch.mbarrier_wait(room.full + q_slot, q_phase)
    products(t.by.dk, t.dk, [(t.ds, at_slot(t.q_turned, q_slot))], overwrite=False)
    return next_turn(turn, x)


def as_accumulator(operand: cute.Tensor, acc: cute.Tensor) -> cute.Tensor:
    """An operand in the registers' order of an accumulator, with that one's layout."""
    return cute.make_tensor(operand.iterator, acc.layout)


def as_rows_columns(operand: cute.Tensor, acc: cute.Tensor) -> cute.Tensor:
    return tile.rows_columns(as_accumulator(operand, acc))


def in_fours(operand: cute.Tensor) -> cute.Tensor:
    """An operand's words as (4, n): a thread's part of what is handed on."""
    mine = words(operand)
    return cute.make_tensor(mine.iterator, cute.make_layout((4, cute.size(mine) // 4)))


def hand_over(operand: cute.Tensor, handed: cute.Tensor) -> None:
    """To the same thread of the other warpgroup."""
    cute.autovec_copy(in_fours(operand), handed[None, cute.arch.thread_idx()[0] % 128, None])


def take_over(operand: cute.Tensor, handed: cute.Tensor) -> None:
    cute.autovec_copy(handed[None, cute.arch.thread_idx()[0] % 128, None], in_fours(operand))


def at_room(t: cute.Tensor, n) -> cute.Tensor:
    return t[None, None, n]


def scale_values(t: Operands, work: Work, x: Backward) -> None:
    """dV by dropout's part, which P is without."""
    if x.dropout:
        scaled(t.dv, work.extra.keep)


def finish(acc: cute.Tensor, mma: cute.TiledMma, room: cute.Tensor, done, x: Backward) -> None:
    """A gradient to its room, from where a storing warp takes it."""
    put(acc, mma, room, x.dtype)
    cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(done)


@cute.jit
def compute(room: Room, w, by: Products, work: Work, x: cutlass.Constexpr):
    """One warpgroup: dK and dV of 64 keys of each tile."""
    t = operands(by, room, w, x)
    body = lambda at, own, held, turn: key_tile(t, w, room, at, held, turn, own, x)  # noqa: E731
    each_tile(WALK, backward_walk.at_room(room, w), work, x, body, new_turn())


@cute.jit
def key_tile(t: Operands, w, room: Room, at: Place, held, turn: Turn, work: Work, x: cutlass.Constexpr):
    """Returns the turn, where it is then."""
    c = x.keys
    column = at.column + w * ROWS
    spans = of_group(column, at, work, x)
    t.dk.fill(0.0)
    t.dv.fill(0.0)
    cute.arch.mbarrier_wait(room.held_full + w, held)
    cute.arch.mbarrier_wait(room.held_full + c.key_tiles + w, held)
    for g in cutlass.range(work.group, unroll=1):
        turn = Turn(turn.slot, turn.phase, turn.count, turn.count)
        own = of_each(spans, column, at, g, work, x)
        turn = skip(own.hidden, turn, room, c.slots)
        if cutlass.const_expr(x.has_upper):
            # the diagonal, or what needs the predicate
            for step in cutlass.range(own.hidden, own.start - own.at.start, unroll=1):
                block = own.block(own.at.start + step, False, work, x)
                turn = query_block(t, w, turn, block, room, work, x)
        for step in cutlass.range(own.stop - own.start, unroll=1):
            turn = query_block(t, w, turn, own.block(own.start + step, True, work, x), room, work, x)
        if cutlass.const_expr(x.has_lower and x.form != "lists"):
            for step in cutlass.range(own.at.stop - own.stop, unroll=1):  # the other end
                turn = query_block(t, w, turn, own.block(own.stop + step, False, work, x), room, work, x)
        warpgroup.wait_group(0)
        release_both(room.empty, turn, c.slots)
    scaled(t.dk, work.scale)
    scale_values(t, work, x)
    cute.arch.barrier(barrier_id=1 + w, number_of_threads=128)  # all four warps have read K and V for the last time
    finish(t.dv, t.by.dv, at_room(room.dv, w), room.done + c.key_tiles + w, x)
    finish(t.dk, t.by.dk, at_room(room.dk, w), room.done + w, x)
    return turn


@cute.jit
def compute_and_sum(room: Room, w, by: Products, work: Work, x: cutlass.Constexpr):
    """As :func:`compute`, and dQ is summed."""
    t = operands(by, room, w, x)
    body = lambda at, own, held, turn: summing_tile(t, w, room, at, held, turn, own, x)  # noqa: E731
    each_tile(WALK, backward_walk.at_room(room, w), work, x, body, new_turn())


@cute.jit
def summing_tile(t: Operands, w, room: Room, at: Place, held, turn: Turn, work: Work, x: cutlass.Constexpr):
    """Returns the turn, where it is then."""
    c = x.keys
    t.dk.fill(0.0)
    t.dv.fill(0.0)
    column = at.column + w * ROWS
    spans = of_group(column, at, work, x)
    for n in cutlass.range_constexpr(2 * c.key_tiles):  # dQ takes the keys of both warpgroups
        cute.arch.mbarrier_wait(room.held_full + n, held)
    turn = Turn(turn.slot, turn.phase, turn.count, turn.count)
    for g in cutlass.range(work.group, unroll=1):
        own = of_each(spans, column, at, g, work, x)
        if cutlass.const_expr(x.has_upper):
            for step in cutlass.range(own.start - own.at.start, unroll=1):
                block = own.block(own.at.start + step, False, work, x)
                turn = summing_block(t, w, turn, block, room, work, x)
        for _ in cutlass.range(own.stop - own.start, unroll=1):
            turn = summing_block(t, w, turn, Block(), room, work, x)
        for step in cutlass.range(own.at.stop - own.stop, unroll=1):  # the other end, or that of the keys
            turn = summing_block(t, w, turn, own.block(own.stop + step, False, work, x), room, work, x)
    backward_sum.begin_part(t.sum, room.sum, turn.count - 1, x)
    warpgroup.wait_group(0)
    put_part(t, w, turn, room)
    scaled(t.dk, work.scale)
    cute.arch.barrier(barrier_id=1, number_of_threads=128 * KEY_GROUPS)  # all have read K and V for the last time
    finish(t.dv, t.by.dv, at_room(room.dv, w), room.done + c.key_tiles + w, x)
    finish(t.dk, t.by.dk, at_room(room.dk, w), room.done + w, x)
    return turn


@cute.jit
def make_values(room: Room, by: Products, work: Work, x: cutlass.Constexpr):
    """One warpgroup: P and dV of the 64 keys of each tile."""
    t = operands(by, room, 0, x)
    body = lambda at, own, held, turn: value_tile(t, room, at, held, turn, own, x)  # noqa: E731
    each_tile(WALK, backward_walk.at_room(room, 0), work, x, body, new_turn())


@cute.jit
def value_tile(t: Operands, room: Room, at: Place, held, turn: Turn, work: Work, x: cutlass.Constexpr):
    """Returns the turn, where it is then."""
    c = x.keys
    spans = of_group(at.column, at, work, x)
    t.dv.fill(0.0)
    cute.arch.mbarrier_wait(room.held_full, held)
    for g in cutlass.range(work.group, unroll=1):
        turn = Turn(turn.slot, turn.phase, turn.count, turn.count)
        own = of_each(spans, at.column, at, g, work, x)
        if cutlass.const_expr(x.has_upper):
            for step in cutlass.range(own.start - own.at.start, unroll=1):
                turn = value_block(t, turn, own.block(own.at.start + step, False, work, x), room, work, x)
        for step in cutlass.range(own.stop - own.start, unroll=1):
            turn = value_block(t, turn, own.block(own.start + step, True, work, x), room, work, x)
        if cutlass.const_expr(x.has_lower and x.form != "lists"):
            for step in cutlass.range(own.at.stop - own.stop, unroll=1):
                turn = value_block(t, turn, own.block(own.stop + step, False, work, x), room, work, x)
        warpgroup.wait_group(0)
        release_before(room.empty, turn, 1, c.slots)
    scale_values(t, work, x)
    cute.arch.barrier(barrier_id=1, number_of_threads=128)  # all four warps have read K for the last time
    finish(t.dv, t.by.dv, at_room(room.dv, 0), room.done, x)
    return turn


@cute.jit
def make_keys(room: Room, by: Products, work: Work, x: cutlass.Constexpr):
    """One warpgroup: dS and dK of the 64 keys of each tile."""
    t = operands(by, room, 0, x)
    body = lambda at, own, held, turn: gradient_tile(t, room, at, held, turn, own, x)  # noqa: E731
    each_tile(WALK, backward_walk.at_room(room, 1), work, x, body, new_turn())


@cute.jit
def gradient_tile(t: Operands, room: Room, at: Place, held, turn: Turn, work: Work, x: cutlass.Constexpr):
    """Returns the turn, where it is then."""
    c = x.keys
    t.dk.fill(0.0)
    cute.arch.mbarrier_wait(room.held_full + 1, held)
    turn = Turn(turn.slot, turn.phase, turn.count, turn.count)
    if cutlass.const_expr(x.by_rows or x.pairs):
        for g in cutlass.range(work.group, unroll=1):
            own = of_head(at, g, work, x)
            for step in cutlass.range(own.stop - own.start, unroll=1):
                block = Spans(at.column, own, None, None, None).block(own.start + step, True, work, x)
                turn = key_block(t, turn, block, room, work, x)
    else:
        for _ in cutlass.range(work.group * (at.stop - at.start), unroll=1):
            turn = key_block(t, turn, Block(), room, work, x)
    warpgroup.wait_group(0)
    release_before(room.empty, turn, 2, c.slots)
    scaled(t.dk, work.scale)
    cute.arch.barrier(barrier_id=2, number_of_threads=128)  # all four warps have read V for the last time
    finish(t.dk, t.by.dk, at_room(room.dk, 0), room.done + 1, x)
    return turn


# -- Kernel and launch ---------------------------------------------------------------------------------------------


@cute.kernel
def kernel(tmas: Tmas, lines: Lines, by: Products, work: Work, x: cutlass.Constexpr):
    c, (warp, group) = x.keys, own_place()
    room = allocate(tmas, x)
    start_barriers(room, x)
    if cutlass.const_expr(not x.queries_first):
        cute.arch.griddepcontrol_wait()  # the rows' statistics are there when the kernel before has ended
        if cutlass.const_expr(x.queries is not None):
            cute.arch.griddepcontrol_launch_dependents()  # the pass over queries, which reads nothing of this one's
    if group == 0:
        cute.arch.setmaxregister_decrease(c.registers_load)
        if warp == 0:
            load_keys(tmas, room, work, x)
        elif warp == 1:
            load_queries(tmas, lines, room, work, x)
        elif warp == 2:
            store(tmas, lines, room, 0, work, x)
        else:
            store(tmas, lines, room, 1, work, x)
    else:
        cute.arch.setmaxregister_increase(c.registers)
        if cutlass.const_expr(c.summed):
            compute_and_sum(room, group - 1, by, work, x)
        elif cutlass.const_expr(not c.split):
            compute(room, group - 1, by, work, x)
        elif group == 1:
            make_values(room, by, work, x)
        else:
            make_keys(room, by, work, x)


class Tensors(NamedTuple):
    """What the pass reads and writes, (batch, seqlen, heads, D), and the rows' numbers."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    lines: Lines


def launch(t: Tensors, work: Work, ctas, stream, x: Backward) -> None:
    """Within a traced function of the host's."""
    c, element, tall = x.keys, ELEMENT[x.dtype], LayoutEnum.ROW_MAJOR
    seen = lambda t: by_rows(t, x)  # noqa: E731
    block = lambda width: sm90.make_smem_layout_b(tall, (ROWS, c.tile_m, width), element, 1)  # noqa: E731
    slots = lambda width: staged(block(width), c.slots, c.slot_elements)  # noqa: E731
    rooms = lambda layout: staged(layout, c.key_tiles, c.room_elements)  # noqa: E731
    keys = lambda width: rooms(sm90.make_smem_layout_a(tall, (ROWS, c.tile_m, width), element, 1))  # noqa: E731
    out = lambda width: rooms(sm90.make_smem_layout_epi(element, tall, (ROWS, width), 1))  # noqa: E731
    tma, get, send = cpasync.make_tiled_tma_atom, cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    tmas = Tmas(
        tma(get, seen(t.q), slots(c.width), (c.tile_m, c.width)),
        tma(get, seen(t.do), slots(c.width_v), (c.tile_m, c.width_v)),
        tma(get, seen(t.k), keys(c.width), (ROWS, c.width)),
        tma(get, seen(t.v), keys(c.width_v), (ROWS, c.width_v)),
        tma(send, seen(t.dk), out(c.width), (ROWS, c.width)),
        tma(send, seen(t.dv), out(c.width_v), (ROWS, c.width_v)),
    )
    major, registers = OperandMajorMode, warpgroup.OperandSource.RMEM
    mma = lambda b, width, *source: sm90.make_trivial_tiled_mma(  # noqa: E731
        element, element, major.K, b, F32, (1, 1, 1), (ROWS, width), *source
    )
    by = Products(
        mma(major.K, c.tile_m),
        mma(major.MN, c.width, registers),
        mma(major.MN, c.width_v, registers),
        backward_sum.product(x) if c.summed else None,
    )
    kernel.set_name_prefix(f"{x.name}_keys", remove_cutlass_symbol=True, keep_mangled_name=False)
    kernel(tmas, t.lines, by, work, x).launch(
        grid=[ctas, 1, 1], block=[c.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=True,
        cooperative=c.ordered,
    )  # fmt: skip
