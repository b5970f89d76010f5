"""dQ = scale · dS K over query tiles on Hopper (sm_90a), and where it is the first pass the rows' statistics, lse2 and delta, which
the pass over keys then finds; docs/algorithm.md, (13) to (15).

Roles of a CTA of ``1 + W`` warpgroups, persistent over tiles of ``64 W`` queries::

    warp 0       load_rows    64 rows of Q and of dO for each warpgroup, once a tile; packed, which tile it is
    warp 1       load_keys    the key blocks from the last to the first: Vn Kn .. V0 K0; before them O, if it is the first pass
    warps 2, 3   store        dQ of one warpgroup each
    warpgroups   compute      delta of O and dO; S = Q Kᵀ and dP = dO Vᵀ, dS in registers, dQ += dS K; 64 rows each

mbarriers (arrivals in brackets), each waited for by the other side: ``full[slot]`` (1 + bytes) load_keys -> compute,
``empty[slot]`` (one of every computing warp) compute -> load_keys; ``held_full[w]`` (1 + the bytes of both) load_rows ->
compute, ``done[w]`` (128) compute -> store, ``held_empty[w]`` (1) store -> load_rows: dQ takes the place of Q.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import LayoutEnum

from tilewise.backends.hopper.backward import rows as backward_rows
from tilewise.backends.hopper.backward import walk as backward_walk
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.tile import (
    Block,
    Limits,
    Work,
    allocated,
    at_slot,
    band,
    band_of_rows,
    by_rows,
    flag_of,
    give_back,
    hold,
    own_place,
    pairs_of,
    probabilities,
    products,
    put,
    scaled,
    score_gradients,
    seen_as,
    to_operand,
    turned,
)
from tilewise.backends.hopper.backward.walk import Sequence
from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.kit import packed, schedule, tile
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.ring import fetch, release
from tilewise.backends.hopper.kit.scheduler import PICK, each_tile, take_tiles
from tilewise.backends.hopper.kit.tiles import QueryTile as Place
from tilewise.backends.hopper.kit.tiles import staged_layout as staged
from tilewise.backends.hopper.kit.tiles import tma_tiles as cut

PIECE = 8  # elements that a thread reads at a time


class Tmas(NamedTuple):
    """Descriptors, coordinates and shared layouts of (rows, columns, head, batch), or as :func:`packed.ragged` has them."""

    q: cpasync.TmaInfo
    do: cpasync.TmaInfo
    k: cpasync.TmaInfo
    v: cpasync.TmaInfo
    dq: cpasync.TmaInfo
    o: cpasync.TmaInfo | None = None


class Products(NamedTuple):
    """``score``: 64 x tile_n from shared memory. ``dq``: 64 x width from registers and a block of K seen transposed."""

    score: cute.TiledMma
    dq: cute.TiledMma


class Room(NamedTuple):
    """Tiles in shared memory, the last mode being the warpgroup or the ring's slot, and the barriers."""

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
    pin: cute.Pointer
    boxes: backward_walk.Boxes
    o: cute.Tensor | None = None


def order(work: Work, x: Backward) -> schedule.Order:
    m_blocks = (work.seqlen_q + x.queries.tile_m - 1) // x.queries.tile_m
    return schedule.Order(m_blocks, work.batch * work.heads * work.group, work.section, x.form != "full")


def tile_of(round_, work: Work, x: Backward) -> tuple:
    """``(m_block, head)`` of the CTA's tile in a round, the head counted over all of a batch."""
    n = schedule.nth(cute.arch.block_idx()[0], cute.arch.grid_dim()[0], round_)
    return schedule.tile_at(n, order(work, x), PICK)


def place_of(round_, work: Work, x: Backward) -> Place:
    """The CTA's tile in a round."""
    m_block, head = tile_of(round_, work, x)
    c, heads = x.queries, work.heads * work.group
    if x.by_rows:
        return own_place_of(m_block, head % heads, head // heads, work, x)
    row = m_block * c.tile_m
    start, stop = schedule.key_blocks(row, c.tile_m, c.tile_n, band(work, x), PICK)
    return Place(row, head % heads, head // heads, I32(start), I32(stop))


def own_place_of(m_block, head, batch, work: Work, x: Backward) -> Place:
    """Of a tile of a head that has ends or lists of its own."""
    row = m_block * x.queries.tile_m
    if x.form == "lists":
        partial, count = (work.extra.counts[batch, head, m_block, n] for n in range(2))
        return Place(row, head, batch, I32(0), count, partial=partial)
    kept = band_of_rows(batch, head, work, x)
    start, stop = schedule.key_blocks(row, x.queries.tile_m, x.queries.tile_n, kept, PICK)
    return Place(row, head, batch, I32(start), I32(stop))


def block_at(at: Place, step, work: Work, x: Backward):
    """The key block that a tile visits at a step: from the last to the first, or as a list has them."""
    if x.form == "lists":
        return work.extra.blocks[at.batch, at.head, at.row // x.queries.tile_m, step]
    return at.stop - 1 - step


def rounds_of(work: Work, x: Backward):
    return schedule.rounds(cute.arch.block_idx()[0], cute.arch.grid_dim()[0], order(work, x).tiles)


def packed_tile(n, work: Work, x: Backward) -> packed.Tile:
    """The longest of a sequence first."""
    rows = lambda n: packed.rows_of(n, work.starts.cu_q, work.seqlen_q, rest=True)  # noqa: E731
    tiles_of = lambda n: packed.in_tiles(rows(n), x.queries.tile_m)  # noqa: E731
    found = backward_walk.packed_tile(n, work.heads * work.group, tiles_of, work)
    return found if x.form == "full" else found._replace(row=tiles_of(PICK.larger(found.sequence, 0)) - 1 - found.row)


def packed_place(of: packed.Tile, work: Work, x: Backward) -> tuple[Place, Work]:
    """A tile's place, and its sequence's numbers. The rows of a sequence without keys, and those past the last sequence, have
    no key blocks."""
    c, sequence = x.queries, Sequence.of(of.sequence, work, x, rest_q=True)
    own, row = sequence.numbers, of.row * x.queries.tile_m
    start, stop = schedule.key_blocks(row, c.tile_m, c.tile_n, band(own, x), PICK)
    stop = I32(cutlass.select_(own.seqlen_k > 0, I32(stop), I32(start)))
    at = backward_walk.own_of(of.sequence, sequence.q, sequence.seen, work, x)
    return Place(row, of.head, of.sequence, I32(start), stop, seqlen=at), own


WALK = backward_walk.Walk(rounds_of, place_of, packed_tile, packed_place)


# -- Shared memory -------------------------------------------------------------------------------------------------


def allocate(tmas: Tmas, x: Backward) -> Room:
    """In the order of :attr:`QueryTiles.shared`; V's blocks, and O's, are K's, and dQ's tiles Q's, seen otherwise."""
    smem, c = cutlass.utils.SmemAllocator(), x.queries
    full = smem.allocate_array(cutlass.Int64, c.barriers + 1 + backward_walk.room_for(x, c.warpgroups))
    sizes = (*[c.warpgroups * c.room_elements] * 2, c.slots * c.slot_elements)
    q, do, k = (allocated(smem, elements, x.dtype) for elements in sizes)
    empty, held_full = full + c.slots, full + 2 * c.slots
    held_empty, done = held_full + c.warpgroups, held_full + 2 * c.warpgroups
    rooms = (q, tmas.q), (do, tmas.do), (q, tmas.dq), (k, tmas.k), (k, tmas.v)
    bars = full, empty, held_full, held_empty, done
    boxes = backward_walk.boxes(full + c.barriers + 1)
    o = seen_as(k, tmas.o) if c.makes_rows else None
    return Room(*(seen_as(*room) for room in rooms), *bars, full + c.barriers, boxes, o)


@cute.jit
def start_barriers(room: Room, x: cutlass.Constexpr):
    """One thread sets every barrier's count of arrivals; then all see them."""
    c = x.queries
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for n in cutlass.range_constexpr(c.slots):
                cute.arch.mbarrier_init(room.full + n, 1)
                cute.arch.mbarrier_init(room.empty + n, 4 * c.warpgroups)
            for n in cutlass.range_constexpr(c.warpgroups):
                cute.arch.mbarrier_init(room.held_full + n, 1)
                cute.arch.mbarrier_init(room.held_empty + n, 1)
                cute.arch.mbarrier_init(room.done + n, 128)
            backward_walk.start_barriers(room.boxes, x)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


# -- Load ----------------------------------------------------------------------------------------------------------


@cute.jit
def load_rows(tmas: Tmas, room: Room, work: Work, x: cutlass.Constexpr):
    """One warp: Q and dO of every tile, as soon as the dQ that lay there has left."""

    def of_tile(at: Place, of: packed.Tile | None, phase) -> None:
        c = x.queries
        gQ, sQ = cut(tmas.q, (ROWS, c.width), (None, 0), at.head, at.rows, room.q)
        gO, sO = cut(tmas.do, (ROWS, c.width_v), (None, 0), at.head, at.rows, room.do)
        for w in range(c.warpgroups):
            m, full = at.row // ROWS + w, room.held_full + w
            backward_walk.hand_on(of, room, w, phase)
            cute.arch.mbarrier_wait(room.held_empty + w, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * ROWS * (c.width + c.width_v))
            cute.copy(tmas.q.atom, gQ[None, m], sQ[None, w], tma_bar_ptr=full)
            cute.copy(tmas.do.atom, gO[None, m], sO[None, w], tma_bar_ptr=full)

    def coming(at: Place) -> None:
        """To L2: all CTAs begin their tiles at about the same time, and memory would keep them waiting."""
        for info, width, held in ((tmas.q, x.queries.width, room.q), (tmas.do, x.queries.width_v, room.do)):
            g, _ = cut(info, (ROWS, width), (None, 0), at.head, at.rows, held)
            for w in range(x.queries.warpgroups):
                cute.prefetch(info.atom, g[None, at.row // ROWS + w])

    take_tiles(WALK, room, x.queries.warpgroups, work, x, of_tile, coming if x.queries.ahead else None)


@cute.jit
def load_keys(tmas: Tmas, room: Room, work: Work, x: cutlass.Constexpr):
    """One warp: the key blocks of every tile, V first: K is kept until the next block's scores are made, and so three slots
    suffice for all of the next block to come meanwhile."""
    load = lambda at, own, phase, ring: load_blocks(tmas, room, at, ring, own, x)  # noqa: E731
    each_tile(WALK, backward_walk.ahead(room, x.queries.warpgroups), work, x, load, (I32(0), I32(1)))


@cute.jit
def load_blocks(tmas: Tmas, room: Room, at: Place, ring: tuple, work: Work, x: cutlass.Constexpr):
    """A tile's key blocks, and before them O if its rows' statistics are made here. Returns the ring, where it is then."""
    c, slot, phase = x.queries, *ring
    k_bytes, v_bytes = 2 * c.tile_n * c.width, 2 * c.tile_n * c.width_v
    if cutlass.const_expr(c.makes_rows):
        gO, sO = cut(tmas.o, (ROWS, c.width_v), (None, 0), at.head, at.rows, room.o)
        for w in range(c.warpgroups):
            o, full, empty = gO[None, at.row // ROWS + w], room.full + slot, room.empty + slot
            fetch(tmas.o, o, sO[None, slot], 2 * ROWS * c.width_v, full, empty, phase)
            slot, phase = schedule.after(slot, phase, c.slots)
    head_k = at.head // work.group
    gK, sK = cut(tmas.k, (c.tile_n, c.width), (None, 0), head_k, at.keys, room.k)
    gV, sV = cut(tmas.v, (c.tile_n, c.width_v), (None, 0), head_k, at.keys, room.v)
    for step in cutlass.range(at.stop - at.start, unroll=1):
        n = block_at(at, step, work, x)
        fetch(tmas.v, gV[None, n], sV[None, slot], v_bytes, room.full + slot, room.empty + slot, phase)
        slot, phase = schedule.after(slot, phase, c.slots)
        fetch(tmas.k, gK[None, n], sK[None, slot], k_bytes, room.full + slot, room.empty + slot, phase)
        slot, phase = schedule.after(slot, phase, c.slots)
    return slot, phase


# -- Store ---------------------------------------------------------------------------------------------------------


@cute.jit
def begin_keys(lse2: cute.Tensor, work: Work, x: cutlass.Constexpr):
    """The storing warps: the pass over keys may begin as soon as the flags of the tiles of every CTA are down, by one that raises them."""
    if cutlass.const_expr(x.flagged):
        lane, rounds = cute.arch.thread_idx()[0] % 32, rounds_of(work, x)
        for first in cutlass.range(0, rounds, 32, unroll=1):
            m_block, head = tile_of(cutlass.min(first + lane, rounds - 1), work, x)
            lse2[flag_of(m_block, head // work.heads_q, head % work.heads_q, lse2)] = F32(0.0)
        cute.arch.fence_acq_rel_gpu()
        stores = x.queries.warpgroups
        cute.arch.barrier(barrier_id=1 + stores, number_of_threads=32 * stores)
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def store(tmas: Tmas, lse2: cute.Tensor, room: Room, w, work: Work, x: cutlass.Constexpr):
    """One warp for each computing warpgroup w: its dQ to global memory; rows past the last are dropped there."""

    def put(at: Place, own: Work, phase, state):
        gQ, sQ = cut(tmas.dq, (ROWS, x.queries.width), (None, 0), at.head, at.rows, room.dq)
        cute.arch.mbarrier_wait(room.done + w, phase)
        cute.copy(tmas.dq.atom, sQ[None, w], gQ[None, at.row // ROWS + w])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(room.held_empty + w)
            if x.flagged:
                tile.count_up(lse2, flag_of(at.row // x.queries.tile_m, at.batch, at.head, lse2))
        return state

    if cutlass.const_expr(x.queries_first):
        begin_keys(lse2, work, x)
    each_tile(WALK, backward_walk.at_room(room, w), work, x, put, ())


# -- Compute -------------------------------------------------------------------------------------------------------


class Operands(NamedTuple):
    """Of one warpgroup: descriptors (1, 1, k steps, warpgroup or slot), accumulators in fp32, dS, and of its thread's two rows
    ``lse2`` and ``delta``. ``s``, ``dp`` 64 x tile_n, ``ds`` in the registers' order of these, ``dq`` 64 x width."""

    by: Products
    q: cute.Tensor
    do: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    k_turned: cute.Tensor
    s: cute.Tensor
    dp: cute.Tensor
    ds: cute.Tensor
    dq: cute.Tensor
    lse2: cute.Tensor
    delta: cute.Tensor


def operands(by: Products, room: Room, x: Backward) -> Operands:
    c, score, dq = x.queries, by.score.get_slice(0), by.dq.get_slice(0)
    scores = by.score.partition_shape_C((ROWS, c.tile_n))
    return Operands(
        by,
        by.score.make_fragment_A(score.partition_A(room.q)),
        by.score.make_fragment_A(score.partition_A(room.do)),
        by.score.make_fragment_B(score.partition_B(room.k)),
        by.score.make_fragment_B(score.partition_B(room.v)),
        by.dq.make_fragment_B(dq.partition_B(turned(room.k))),
        cute.make_rmem_tensor(scores, F32), cute.make_rmem_tensor(scores, F32),
        cute.make_rmem_tensor(by.dq.partition_shape_A((ROWS, c.tile_n)), ELEMENT[x.dtype]),
        cute.make_rmem_tensor(by.dq.partition_shape_C((ROWS, c.width)), F32),
        cute.make_rmem_tensor((2,), F32), cute.make_rmem_tensor((2,), F32),
    )  # fmt: skip


def whole_blocks(row, at: Place, kept: schedule.Band, x: Backward):
    """``(start, stop)``: the tile's key blocks that the rows of a warpgroup see entirely, counted as they are visited: from the
    last one down, ``at.stop - stop`` being the steps before."""
    if x.form == "lists":
        return at.start, at.stop - at.partial
    return schedule.whole_blocks(row, ROWS, x.queries.tile_n, kept, (at.start, at.stop), PICK)


def hidden_blocks(row, at: Place, kept: schedule.Band, x: Backward):
    """How many of a tile's blocks, in the order of visits, the rows of a warpgroup see nothing of; never all."""
    if not x.has_upper or x.form == "lists" or x.queries.tile_n >= x.queries.tile_m:
        return 0
    return schedule.hidden_blocks(row, ROWS, x.queries.tile_n, kept, (at.start, at.stop), PICK)


def block_of(limits: Limits | None, row, step, at: Place, work: Work, x: Backward) -> Block:
    """The key block at a step, of a warpgroup's rows, which begin at ``row``; without limits all of it is seen."""
    if limits is None and not x.pairs:
        return Block()
    first = block_at(at, step, work, x) * x.queries.tile_n
    ends = None if limits is None else limits.within(first)
    return Block(ends, pairs_of(at, ("i", "j"), row, first, work) if x.pairs else None)


def limits_of(row, kept: schedule.Band, x: Backward) -> Limits:
    """Of the keys that the rows of a warpgroup see, which begin at ``row``."""
    rows = [row + tile.row_of(cute.arch.thread_idx()[0] % 128, r) for r in range(2)]
    lower = [schedule.row_start(i, kept, PICK) for i in rows]
    return Limits.of(lower if x.has_lower else None, [schedule.row_stop(i, kept, PICK) for i in rows])


class Turn(NamedTuple):
    """Where a warpgroup is: the ring's slot and phase, and the blocks of its tile that it has done."""

    slot: I32
    phase: I32
    count: I32


@cute.jit
def release_before(empty, turn: Turn, slots: cutlass.Constexpr):
    """The slot of the K before, which only the product of dS with it has kept, if there was one in this tile."""
    if turn.count > 0:
        release(empty + (turn.slot + slots - 1) % slots)


@cute.jit
def skip(blocks, turn: Turn, room: Room, slots: cutlass.Constexpr) -> Turn:
    """Gives back the slots of blocks that the warpgroup does not need."""
    slot, phase = turn.slot, turn.phase
    for _ in cutlass.range(2 * blocks, unroll=1):
        cute.arch.mbarrier_wait(room.full + slot, phase)
        release(room.empty + slot)
        slot, phase = schedule.after(slot, phase, slots)
    return Turn(slot, phase, turn.count)


def key_block(t: Operands, w, turn: Turn, block: Block, room: Room, work: Work, x: Backward) -> Turn:
    """Adds one key block to dQ: P under the product of dP. dQ is in flight between blocks."""
    c = x.queries
    v_slot, v_phase = turn.slot, turn.phase
    k_slot, k_phase = schedule.after(v_slot, v_phase, c.slots)
    cute.arch.mbarrier_wait(room.full + k_slot, k_phase)
    products(t.by.score, t.s, [(at_slot(t.q, w), at_slot(t.k, k_slot))], overwrite=True)
    cute.arch.mbarrier_wait(room.full + v_slot, v_phase)
    products(t.by.score, t.dp, [(at_slot(t.do, w), at_slot(t.v, v_slot))], overwrite=True)
    warpgroup.wait_group(1)
    release_before(room.empty, turn, c.slots)
    s, kept = tile.rows_columns(t.s), block.kept(t.s, work, x)
    probabilities(s, None, lambda r, c: t.lse2[r], block, work, x)
    hold(room.pin, s)
    warpgroup.wait_group(0)
    release(room.empty + v_slot)
    score_gradients(tile.rows_columns(t.dp), s, lambda r, c: t.delta[r], kept, work)
    to_operand(t.ds, t.dp, x.dtype)
    products(t.by.dq, t.dq, [(t.ds, at_slot(t.k_turned, k_slot))], overwrite=False)
    return Turn(*schedule.after(k_slot, k_phase, c.slots), turn.count + 1)


def lines_at(at: Place, row, work: Work, x: Backward) -> tuple[list, list]:
    """Of a thread's two rows of the warpgroup's, which begin at ``row``: which they are, those past the last too, and where their lines of
    the statistics are."""
    mine = [row + tile.row_of(cute.arch.thread_idx()[0] % 128, r) for r in range(2)]
    return mine, [(0, at.head, at.own.line + i) if x.packed else (at.batch, at.head, i) for i in mine]


def statistics_of(t: Operands, rows: backward_rows.Tensors, at: Place, row, work: Work, x: Backward) -> None:
    """Of a thread's two rows, as they were made before."""
    for r, place in enumerate(lines_at(at, row, work, x)[1]):
        t.lse2[r], t.delta[r] = rows.lse2[place], rows.delta[place]


def known_of(rows: backward_rows.Tensors, at: Place, row, work: Work, x: Backward) -> list[tuple]:
    """lse and dlse of a thread's two rows, or where there is none the last one's."""
    batch, start = (0, at.own.q.start) if x.packed else (at.batch, 0)
    sources = [start + cutlass.min(i, work.seqlen_q - 1) for i in lines_at(at, row, work, x)[0]]
    return [(rows.lse[batch, at.head, i], rows.dlse[batch, at.head, i]) for i in sources]


def make_statistics(
    t: Operands, w, known: list, rows: backward_rows.Tensors, room: Room, at: Place, row, turn: Turn, work: Work, x: Backward
) -> Turn:  # fmt: skip
    """(13), of a thread's two rows: from O, which comes through the ring for one warpgroup after the other, and dO. The pass over keys
    finds them. Returns the turn, where it is then."""
    c, thread = x.queries, cute.arch.thread_idx()[0] % 128
    for n in range(c.warpgroups):  # its own first
        slot, phase = schedule.after(turn.slot, turn.phase, c.slots, step=(w + n) % c.warpgroups)
        cute.arch.mbarrier_wait(room.full + slot, phase)
        if n == 0:
            # Summed up before the slot is given back: loads that are on their way would find what the copy engine brings next
            # (docs/decisions.md#hopper-stage-release).
            totals = [product_of(room, slot, w, tile.row_of(thread, r), x) for r in range(2)]
            totals = [tile.over_quad(total, lambda a, b: a + b) for total in totals]
            cute.arch.fence_view_async_shared()
        give_back(room.empty + slot)
    for r, (i, place) in enumerate(zip(*lines_at(at, row, work, x), strict=True)):
        t.lse2[r], t.delta[r] = backward_rows.made_of(*known[r], totals[r], i < work.seqlen_q)
        put_line(rows, place, t.lse2[r], t.delta[r], thread % 4 == 0)
        if c.tile_m % x.keys.tile_m:  # the last block of the pass over keys may go on past the last tile's
            beyond, blocks = i + c.tile_m, (work.seqlen_q + x.keys.tile_m - 1) // x.keys.tile_m
            last = tile.both(at.row + c.tile_m >= work.seqlen_q, beyond < blocks * x.keys.tile_m)
            place = *place[:2], place[2] + c.tile_m
            put_line(rows, place, backward_rows.INF, 0.0, tile.both(last, thread % 4 == 0))
    return Turn(*schedule.after(turn.slot, turn.phase, c.slots, step=c.warpgroups), turn.count)


def product_of(room: Room, slot, w, i, x: Backward):
    """A thread's part, every fourth piece, of the product of row i of a block of O and of the warpgroup's dO. Rows one after the
    other begin at pieces 64 bytes apart, so that eight threads read from all banks."""
    total, count, lane = F32(0.0), x.queries.width_v // (4 * PIECE), cute.arch.thread_idx()[0] % 4
    for n in range(count):
        piece = 4 * ((n + i % 2) % count) + lane
        total = total + inner(piece_of(room.o, i, piece, slot, x), piece_of(room.do, i, piece, w, x))
    return total


def piece_of(room: cute.Tensor, i, n, slot, x: Backward) -> cute.Tensor:
    """16 bytes of a row."""
    part = cute.make_rmem_tensor((PIECE,), ELEMENT[x.dtype])
    cute.autovec_copy(cute.local_tile(room[i, None, slot], (PIECE,), (n,)), part)
    return part


def inner(one: cute.Tensor, other: cute.Tensor):
    return (one.load().to(F32) * other.load().to(F32)).reduce(cute.ReductionOp.ADD, F32(0.0), 0)


@cute.jit
def put_line(rows: backward_rows.Tensors, place: tuple, lse2, delta, mine):
    if mine:
        rows.lse2[place] = lse2
        rows.delta[place] = delta


@cute.jit
def compute(room: Room, w, rows: backward_rows.Tensors, by: Products, work: Work, x: cutlass.Constexpr):
    """One warpgroup: dQ of 64 rows of each tile."""
    t = operands(by, room, x)
    body = lambda at, own, held, turn: query_tile(t, w, rows, room, at, held, turn, own, x)  # noqa: E731
    each_tile(WALK, backward_walk.at_room(room, w), work, x, body, Turn(I32(0), I32(0), I32(0)))


@cute.jit
def query_tile(
    t: Operands, w, rows: backward_rows.Tensors, room: Room, at: Place, held, turn: Turn, work: Work, x: cutlass.Constexpr
):  # fmt: skip
    """Returns the turn, where it is then."""
    c, row, kept = x.queries, at.row + w * ROWS, band_of_rows(at.batch, at.head, work, x)
    start, stop = whole_blocks(row, at, kept, x)
    hidden, limits = hidden_blocks(row, at, kept, x), limits_of(row, kept, x)
    if cutlass.const_expr(c.makes_rows):
        known = known_of(rows, at, row, work, x)
    else:
        statistics_of(t, rows, at, row, work, x)
    t.dq.fill(0.0)
    cute.arch.mbarrier_wait(room.held_full + w, held)
    turn = Turn(turn.slot, turn.phase, I32(0))
    if cutlass.const_expr(c.makes_rows):
        turn = make_statistics(t, w, known, rows, room, at, row, turn, work, x)
    turn = skip(hidden, turn, room, c.slots)
    for step in cutlass.range(hidden, at.stop - stop, unroll=1):  # the diagonal, and the end of the keys
        block = block_of(limits, row, step, at, work, x)
        turn = key_block(t, w, turn, block, room, work, x)
    for step in cutlass.range(stop - start, unroll=1):
        block = block_of(None, row, at.stop - stop + step, at, work, x)
        turn = key_block(t, w, turn, block, room, work, x)
    if cutlass.const_expr(x.has_lower and x.form != "lists"):
        for step in cutlass.range(start - at.start, unroll=1):  # the other end
            block = block_of(limits, row, at.stop - start + step, at, work, x)
            turn = key_block(t, w, turn, block, room, work, x)
    warpgroup.wait_group(0)
    release_before(room.empty, turn, c.slots)
    scaled(t.dq, work.scale)
    cute.arch.barrier(barrier_id=1 + w, number_of_threads=128)  # all four warps have read Q for the last time
    put(t.dq, t.by.dq, room.dq[None, None, w], x.dtype)
    cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(room.done + w)
    return turn


# -- Kernel and launch ---------------------------------------------------------------------------------------------


@cute.kernel
def kernel(tmas: Tmas, rows: backward_rows.Tensors, by: Products, work: Work, x: cutlass.Constexpr):
    c, (warp, group) = x.queries, own_place()
    room = allocate(tmas, x)
    start_barriers(room, x)
    if cutlass.const_expr(c.makes_rows):
        cute.arch.griddepcontrol_wait()  # it may begin while what was launched before ends
    if group == 0:
        cute.arch.setmaxregister_decrease(c.registers_load)
        if warp == 0:
            load_rows(tmas, room, work, x)
        elif warp == 1:
            load_keys(tmas, room, work, x)
        elif warp < 2 + c.warpgroups:
            store(tmas, rows.lse2, room, warp - 2, work, x)
    else:
        cute.arch.setmaxregister_increase(c.registers)
        compute(room, group - 1, rows, by, work, x)
    if cutlass.const_expr(not c.makes_rows):
        cute.arch.griddepcontrol_wait()  # what comes next in the stream finds dK and dV, too


class Tensors(NamedTuple):
    """What the pass reads and writes, (batch, seqlen, heads, D)."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    dq: cute.Tensor


def launch(t: Tensors, rows: backward_rows.Tensors, work: Work, ctas, stream, x: Backward) -> None:
    """Within a traced function of the host's."""
    c, element, tall = x.queries, ELEMENT[x.dtype], LayoutEnum.ROW_MAJOR
    seen = lambda t: by_rows(t, x)  # noqa: E731
    a = lambda width: sm90.make_smem_layout_a(tall, (ROWS, c.tile_n, width), element, 1)  # noqa: E731
    b = lambda width: sm90.make_smem_layout_b(tall, (ROWS, c.tile_n, width), element, 1)  # noqa: E731
    rooms = lambda layout: staged(layout, c.warpgroups, c.room_elements)  # noqa: E731
    slots = lambda layout: staged(layout, c.slots, c.slot_elements)  # noqa: E731
    out = sm90.make_smem_layout_epi(element, tall, (ROWS, c.width), 1)
    tma, get, send = cpasync.make_tiled_tma_atom, cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    tmas = Tmas(
        tma(get, seen(t.q), rooms(a(c.width)), (ROWS, c.width)),
        tma(get, seen(t.do), rooms(a(c.width_v)), (ROWS, c.width_v)),
        tma(get, seen(t.k), slots(b(c.width)), (c.tile_n, c.width)),
        tma(get, seen(t.v), slots(b(c.width_v)), (c.tile_n, c.width_v)),
        tma(send, seen(t.dq), rooms(out), (ROWS, c.width)),
        tma(get, seen(rows.o), slots(a(c.width_v)), (ROWS, c.width_v)) if c.makes_rows else None,
    )
    major, registers = OperandMajorMode, warpgroup.OperandSource.RMEM
    mma = sm90.make_trivial_tiled_mma
    by = Products(
        mma(element, element, major.K, major.K, F32, (1, 1, 1), (ROWS, c.tile_n)),
        mma(element, element, major.K, major.MN, F32, (1, 1, 1), (ROWS, c.width), registers),
    )
    kernel.set_name_prefix(f"{x.name}_queries", remove_cutlass_symbol=True, keep_mangled_name=False)
    kernel(tmas, rows, by, work, x).launch(
        grid=[ctas, 1, 1], block=[c.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=True
    )
