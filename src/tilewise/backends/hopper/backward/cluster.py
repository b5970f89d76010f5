"""dK, dV and dQ's sums over key tiles on Hopper (sm_90a), two CTAs to a tile of 128 keys; docs/algorithm.md, (13) to (16).

For head dims of which a CTA has room for 64 keys alone, whose dQ would take longer to add up than all products take. Each of a
cluster's two keeps 64 keys and makes their P, dS, dK and dV; both dS are in both, and each makes dQ of all 128 keys and half of the
columns, which needs that half of the other's K too. Half as many bytes are added up, for 8 KB of dS a block each way. Tiles
of K, V, Q and dO lie in parts of 64 rows and 128 columns, so that what a product has read is filled again while the next one
runs. Roles of a CTA of four warpgroups, persistent over key tiles, which sum the query heads of a group::

    warp 0       load_keys      V, the other's part of K, and K, once a tile
    warp 1       load_queries   Q0 dO0 Q1 dO1 .., with lse and delta, for each query head: each CTA all of them
    warp 2       store          dV and dK, from where V and K were
    warp 3       exchange       each block's dS to the other CTA
    warpgroup 1  make_values    S P dV: hands P to the next
    warpgroup 2  make_keys      dP dS dK
    warpgroup 3  make_queries   dQ, which each of its warps adds to fp32 sums in memory by itself, a piece at a time

mbarriers (arrivals in brackets), each waited for by the other side: ``full`` (1 + bytes) and ``empty`` (8 warps) of every slot
between load_queries and make_values and make_keys; ``held_full`` (1 + bytes) of K, V and the other's part load_keys -> warpgroups,
``done`` (128) warpgroup -> store and ``held_empty`` (1) store -> load_keys, of the rooms of K and V; ``v_read`` (128) make_keys ->
make_values, ``k_read`` (4) make_queries -> make_keys and load_keys, once a tile. Of block % 2: ``p_full`` (128) make_values ->
make_keys, ``ds_full`` (128) make_keys, which puts dS where P was, -> make_queries and exchange, ``ds_empty`` (4 warps of each CTA's
make_queries) -> make_values and exchange: what was sent from there is read, too. ``theirs_full`` (1 + bytes) the other's exchange
-> make_queries.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import LayoutEnum

from tilewise.backends.hopper.backward.config import HALF, PAIR, PIECE, PIECES, Backward
from tilewise.backends.hopper.backward.keys import (
    WALK,
    Line,
    Lines,
    Place,
    Spans,
    Tensors,
    Tmas,
    Turn,
    as_accumulator,
    bring,
    new_turn,
    spans_of,
)
from tilewise.backends.hopper.backward.tile import (
    Block,
    Work,
    allocated,
    at_slot,
    by_rows,
    give_back,
    own_place,
    probabilities,
    products,
    put,
    put_fragment,
    scaled,
    score_gradients,
    seen_as,
    statistics_layout,
    to_operand,
    turned,
    words,
)
from tilewise.backends.hopper.config import ALIGNMENT, ROWS
from tilewise.backends.hopper.kit import schedule
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.ring import fetch
from tilewise.backends.hopper.kit.scheduler import each_tile
from tilewise.backends.hopper.kit.tiles import staged_layout as staged
from tilewise.backends.hopper.kit.tiles import tma_tiles as cut

STRIP = 16  # queries of a block that are in registers at a time beside accumulators
HALVES = 2  # of a CTA's columns of dQ: one is added up while the other's product runs
K, V, THEIRS = 0, 1, 2  # of held_full and, but for the last, of held_empty and done


class Products(NamedTuple):
    """``score``: 64 x tile_m. ``grad``: 64 x 128 of dK or dV from registers and a block seen transposed. ``dq``: tile_m x 64."""

    score: cute.TiledMma
    grad: cute.TiledMma
    dq: cute.TiledMma


class Room(NamedTuple):
    """In shared memory, the last mode being the part or slot: ``k`` of 64 keys, and of the other's the part that dQ needs, ``v``, the
    ``ring``; ``dk``, ``dv`` in place of K and V. ``statistics`` of the ring's slots; ``ds`` (64 keys, tile_m, two blocks and the
    other's), and P in place of the first two, ``handed`` on as (4 words, thread, strip, block); ``pieces`` (4, lane, n, place, warp)
    of dQ. The barriers; and which of the two CTAs this is."""

    k: cute.Tensor
    v: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    ring: cute.Tensor
    statistics: cute.Tensor
    handed: cute.Tensor
    ds: cute.Tensor
    pieces: cute.Tensor
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
    theirs_full: cute.Pointer
    rank: I32


def own_column(at: Place, room: Room):
    """The first of this CTA's keys."""
    return at.column + room.rank * ROWS


# -- Shared memory -------------------------------------------------------------------------------------------------


def allocate(tmas: Tmas, x: Backward) -> Room:
    """In the order of :attr:`PairTiles.shared`."""
    smem, c = cutlass.utils.SmemAllocator(), x.keys
    full = smem.allocate_array(cutlass.Int64, c.barriers + 1)
    statistics = smem.allocate_tensor(F32, statistics_layout(c.tile_m, c.slots), 128)
    k, v, q = (allocated(smem, n * ROWS * HALF, x.dtype) for n in (c.parts + 1, c.parts, c.slots))
    scores, layout = allocated(smem, 3 * ROWS * c.tile_m, x.dtype), scores_layout(x)
    ds = cute.make_tensor(cute.recast_ptr(scores, layout.inner), layout.outer)
    handed = cute.make_tensor(cute.recast_ptr(scores, dtype=I32), cute.make_layout((4, 128, c.tile_m // 16, 2)))
    pieces = smem.allocate_tensor(F32, cute.make_layout((4, 32, PIECE // 512, PIECES, 4)), ALIGNMENT)
    empty, held_full, rest = full + c.slots, full + 2 * c.slots, full + 2 * c.slots + 3
    return Room(
        seen_as(k, tmas.k), seen_as(v, tmas.v), seen_as(k, tmas.dk), seen_as(v, tmas.dv),
        seen_as(q, tmas.q), statistics, handed, ds, pieces,
        full, empty, held_full, rest, rest + 2, rest + 4, rest + 5, rest + 6, rest + 8, rest + 10, rest + 12,
        cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()),
    )  # fmt: skip


def scores_layout(x: Backward):
    """Two blocks of this CTA's dS, and one of the other's."""
    block = sm90.make_smem_layout_epi(ELEMENT[x.dtype], LayoutEnum.ROW_MAJOR, (ROWS, x.keys.tile_m), 1)
    return staged(block, 3, ROWS * x.keys.tile_m)


def arrivals(room: Room, x: Backward) -> tuple:
    """Of the barriers: where, how many, and by how many threads each turns."""
    slots, warps = x.keys.slots, 4
    ring = (room.full, slots, 1), (room.empty, slots, 2 * warps)
    held = (
        (room.held_full, 3, 1),
        (room.held_empty, 2, 1),
        (room.done, 2, 128),
        (room.v_read, 1, 128),
        (room.k_read, 1, warps),
    )
    return (
        *ring,
        *held,
        (room.p_full, 2, 128),
        (room.ds_full, 2, 128),
        (room.ds_empty, 2, PAIR * warps),
        (room.theirs_full, 1, 1),
    )


@cute.jit
def start_barriers(room: Room, x: cutlass.Constexpr):
    """By one thread; then all of both CTAs see them."""
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for barriers, count, threads in arrivals(room, x):
                for n in cutlass.range_constexpr(count):
                    cute.arch.mbarrier_init(barriers + n, threads)
    cute.arch.mbarrier_init_fence()
    meet()


def meet() -> None:
    """All threads of both CTAs."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


# -- Load ----------------------------------------------------------------------------------------------------------


def parts_of(info: cpasync.TmaInfo, head, where, room: cute.Tensor):
    """A head's matrix in parts (box, 64 rows, 128 columns), and the room for them (box, n)."""
    return cut(info, (ROWS, HALF), (None, None), head, where, room)


@cute.jit
def load_keys(tmas: Tmas, room: Room, work: Work, x: cutlass.Constexpr):
    """One warp: what a tile holds, as soon as what lay there is read or stored."""
    body = lambda at, own, held, state: load_held(tmas, room, at, held, x)  # noqa: E731
    each_tile(WALK, None, work, x, body, I32(0))


def load_held(tmas: Tmas, room: Room, at: Place, held, x: Backward):
    """Of one tile."""
    gK, sK = parts_of(tmas.k, at.head, at.batch, room.k)
    gV, sV = parts_of(tmas.v, at.head, at.batch, room.v)
    row, parts, phase = own_column(at, room) // ROWS, x.keys.parts, 1 - held
    theirs, full = gK[None, at.column // ROWS + 1 - room.rank, room.rank], room.held_full
    fetch_parts(tmas.v, gV, sV, row, parts, full + V, room.held_empty + V, phase)
    fetch(tmas.k, theirs, sK[None, parts], 2 * ROWS * HALF, full + THEIRS, room.k_read, phase)
    fetch_parts(tmas.k, gK, sK, row, parts, full + K, room.held_empty + K, phase)
    return I32(0)


def fetch_parts(info: cpasync.TmaInfo, g, s, row, parts: int, full, empty, phase) -> None:
    """As :func:`fetch`, all columns of 64 rows."""
    cute.arch.mbarrier_wait(empty, phase)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * ROWS * HALF * parts)
    for n in range(parts):
        cute.copy(info.atom, g[None, row, n], s[None, n], tma_bar_ptr=full)


@cute.jit
def load_queries(tmas: Tmas, lines: Lines, room: Room, work: Work, x: cutlass.Constexpr):
    """One warp: the query blocks of every tile, for each query head."""
    body = lambda at, own, held, ring: load_blocks(tmas, lines, room, at, ring, own, x)  # noqa: E731
    each_tile(WALK, None, work, x, body, (I32(0), I32(1)))


@cute.jit
def load_blocks(tmas: Tmas, lines: Lines, room: Room, at: Place, ring: tuple, work: Work, x: cutlass.Constexpr):
    """Of one tile. Returns the ring, where it is then."""
    slot, phase = ring
    for g in cutlass.range(work.group, unroll=1):
        head = at.head * work.group + g
        gQ, sQ = parts_of(tmas.q, head, at.batch, room.ring)
        gO, sO = parts_of(tmas.do, head, at.batch, room.ring)
        lse2, delta = (Line(t[at.batch, head, None], x.keys.tile_m) for t in (lines.lse2, lines.delta))
        for m in cutlass.range(at.start, at.stop, unroll=1):
            slot, phase = fetch_block(tmas.q, gQ, sQ, lse2, m, (slot, phase), room, x)
            slot, phase = fetch_block(tmas.do, gO, sO, delta, m, (slot, phase), room, x)
    return slot, phase


def fetch_block(info: cpasync.TmaInfo, g, s, line: Line, m, ring: tuple, room: Room, x: Backward):
    """A block of Q or dO by parts, its statistic with the first of them. Returns the ring, where it is then."""
    slot, phase = ring
    for n in range(x.keys.parts):
        full, size = room.full + slot, 2 * ROWS * HALF
        cute.arch.mbarrier_wait(room.empty + slot, phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, size + (0 if n else 4 * line.columns))
            if n == 0:
                bring(line, m, room.statistics, slot, full)
        cute.copy(info.atom, g[None, m, n], s[None, slot], tma_bar_ptr=full)
        slot, phase = schedule.after(slot, phase, x.keys.slots)
    return slot, phase


# -- Store and exchange --------------------------------------------------------------------------------------------


@cute.jit
def store(tmas: Tmas, room: Room, work: Work, x: cutlass.Constexpr):
    """One warp: dV and dK to global memory; keys past the last are dropped there."""
    body = lambda at, own, held, state: store_tile(tmas, room, at, held, x)  # noqa: E731
    each_tile(WALK, None, work, x, body, I32(0))


def store_tile(tmas: Tmas, room: Room, at: Place, held, x: Backward):
    """Of one tile."""
    for info, found, which in ((tmas.dv, room.dv, V), (tmas.dk, room.dk, K)):
        g, s = parts_of(info, at.head, at.batch, found)
        cute.arch.mbarrier_wait(room.done + which, held)
        for n in range(x.keys.parts):
            cute.copy(info.atom, s[None, n], g[None, own_column(at, room) // ROWS, n])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(room.held_empty + which)
    return I32(0)


@cute.jit
def exchange(room: Room, work: Work, x: cutlass.Constexpr):
    """One warp: each block of dS to the other CTA."""
    body = lambda at, own, held, count: send_blocks(room, at, count, own, x)  # noqa: E731
    each_tile(WALK, None, work, x, body, I32(0))


@cute.jit
def send_blocks(room: Room, at: Place, count, work: Work, x: cutlass.Constexpr):
    """Of one tile. Returns how many blocks there were so far."""
    for _ in cutlass.range(work.group * (at.stop - at.start), unroll=1):
        n, other = count % 2, (count + 1) // 2
        cute.arch.mbarrier_wait(room.ds_empty + (1 - n), (other + 1) % 2)  # the other CTA has read the block before
        cute.arch.mbarrier_wait(room.ds_full + n, count // 2 % 2)
        send_scores(room, n, 1 - room.rank, x)
        count = count + 1
    return count


def send_scores(room: Room, n, other, x: Backward) -> None:
    """The dS in room n to where the other CTA has the other's, by the copy engine: in PTX, of which the DSL knows the parts alone."""
    size = 2 * ROWS * x.keys.tile_m
    code = (
        "{ .reg .b32 d, m; mapa.shared::cluster.u32 d, {$r0}, {$r3}; mapa.shared::cluster.u32 m, {$r2}, {$r3};"
        " mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [m], {$r4};"
        " cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [d], [{$r1}], {$r4}, [m]; }"
    )
    with cute.arch.elect_one():
        rooms = room.ds.iterator.toint()
        full = room.theirs_full.toint()
        cute.arch.inline_ptx(code, read_only_args=[rooms + 2 * size, rooms + n * size, full, other, I32(size)])


# -- Compute -------------------------------------------------------------------------------------------------------


class Operands(NamedTuple):
    """Of make_values and make_keys: descriptors (1, 1, k steps, part), ``held`` of K or V, ``ring`` and ``ring_turned`` of Q and dO;
    ``acc`` 64 x tile_m of S or dP; ``p``, ``ds`` in its registers' order; ``grads`` 64 x 128 each, the parts of dV or dK."""

    by: Products
    held: cute.Tensor
    ring: cute.Tensor
    ring_turned: cute.Tensor
    acc: cute.Tensor
    p: cute.Tensor
    ds: cute.Tensor
    grads: tuple


def operands(by: Products, room: Room, held: cute.Tensor, x: Backward) -> Operands:
    score, grad, m = by.score.get_slice(0), by.grad.get_slice(0), x.keys.tile_m
    operand = lambda: cute.make_rmem_tensor(by.grad.partition_shape_A((ROWS, m)), ELEMENT[x.dtype])  # noqa: E731
    return Operands(
        by,
        by.score.make_fragment_A(score.partition_A(held)),
        by.score.make_fragment_B(score.partition_B(room.ring)),
        by.grad.make_fragment_B(grad.partition_B(turned(room.ring))),
        cute.make_rmem_tensor(by.score.partition_shape_C((ROWS, m)), F32),
        operand(),
        operand(),
        tuple(cute.make_rmem_tensor(by.grad.partition_shape_C((ROWS, HALF)), F32) for _ in range(x.keys.parts)),
    )


def pair_of(turn: Turn, x: Backward) -> tuple[list, list]:
    """``(slot, phase)`` of the parts of a block's Q and dO."""
    places = [(turn.slot, turn.phase)]
    places += [schedule.after(turn.slot, turn.phase, x.keys.slots, step=n) for n in range(1, 2 * x.keys.parts)]
    return places[: x.keys.parts], places[x.keys.parts :]


def next_turn(turn: Turn, x: Backward) -> Turn:
    """A block on."""
    place = schedule.after(turn.slot, turn.phase, x.keys.slots, step=2 * x.keys.parts)
    return Turn(*place, turn.count + 1, turn.since)


def begin_scores(t: Operands, places: list, room: Room) -> None:
    """S = K Qᵀ or dP = V dOᵀ, each part of the columns as soon as it is there."""
    for n, (slot, phase) in enumerate(places):
        cute.arch.mbarrier_wait(room.full + slot, phase)
        products(t.by.score, t.acc, [(at_slot(t.held, n), at_slot(t.ring, slot))], overwrite=n == 0)


def begin_gradients(t: Operands, operand: cute.Tensor, places: list, room: Room) -> None:
    """dV += Pᵀ dO or dK += dSᵀ Q, one part of the columns after the other."""
    for grad, (slot, phase) in zip(t.grads, places, strict=True):
        cute.arch.mbarrier_wait(room.full + slot, phase)
        products(t.by.grad, grad, [(operand, at_slot(t.ring_turned, slot))], overwrite=False)


def end_gradients(places: list, room: Room) -> None:
    """Gives each part's slot back as soon as its product is done, to be filled while the next one runs."""
    for n, (slot, _) in enumerate(places):
        warpgroup.wait_group(len(places) - 1 - n)
        give_back(room.empty + slot)


def give_back_parts(places: list, room: Room) -> None:
    for slot, _ in places:
        give_back(room.empty + slot)


def value_block(t: Operands, turn: Turn, block: Block, room: Room, work: Work, x: Backward) -> Turn:
    """S, P and dV += Pᵀ dO of one query block; P goes to make_keys. Nothing is in flight between blocks, which other warpgroups
    fill: with dV in flight there, the assembler runs out of 192 registers and makes every product wait for the one before."""
    (q, do), n = pair_of(turn, x), turn.count % 2
    begin_scores(t, q, room)
    warpgroup.wait_group(0)
    cute.arch.mbarrier_wait(room.ds_empty + n, 1 - turn.count // 2 % 2)
    for m in range(x.keys.tile_m // STRIP):
        lse2 = of_strip(room.statistics, q[0][0], m)
        probabilities(strip(t.acc, m), strip_of_operand(t.p, m), lse2, shifted(block, m), work, x)
        hand_strip(t.p, m, room.handed, n)
    cute.arch.mbarrier_arrive(room.p_full + n)
    give_back_parts(q, room)
    begin_gradients(t, t.p, do, room)
    end_gradients(do, room)
    return next_turn(turn, x)


def key_block(t: Operands, turn: Turn, room: Room, work: Work, x: Backward) -> Turn:
    """dP, dS and dK += dSᵀ Q of one query block; dS goes to both CTAs' make_queries while the last product runs."""
    (q, do), n = pair_of(turn, x), turn.count % 2
    begin_scores(t, do, room)
    warpgroup.wait_group(0)
    cute.arch.mbarrier_wait(room.p_full + n, turn.count // 2 % 2)
    for m in range(x.keys.tile_m // STRIP):
        take_strip(t.p, m, room.handed, n)
        score_gradients(strip(t.acc, m), strip(t.p, m), of_strip(room.statistics, do[0][0], m))
        to_operand(strip_of_operand(t.ds, m), strip(t.acc, m), x.dtype)
    give_back_parts(do, room)
    begin_gradients(t, t.ds, q, room)
    put_scores(t, n, room, x)
    end_gradients(q, room)
    return next_turn(turn, x)


def strip(block: cute.Tensor, n: int) -> cute.Tensor:
    """The n-th STRIP columns of an accumulator, or of an operand in its registers' order, as (2 rows, columns of the thread)."""
    layout = cute.make_layout((2, (2, STRIP // 8)), stride=(2, (1, 4)))
    return cute.make_tensor(block.iterator + n * STRIP // 2, layout)


def strip_of_operand(operand: cute.Tensor, n: int) -> cute.Tensor:
    return cute.make_tensor(operand.iterator + n * STRIP // 2, cute.make_layout(STRIP // 2))


def hand_strip(operand: cute.Tensor, m: int, handed: cute.Tensor, n) -> None:
    """To the same thread of the other warpgroup, in room n."""
    cute.autovec_copy(words(strip_of_operand(operand, m)), handed[None, cute.arch.thread_idx()[0] % 128, m, n])


def take_strip(operand: cute.Tensor, m: int, handed: cute.Tensor, n) -> None:
    cute.autovec_copy(handed[None, cute.arch.thread_idx()[0] % 128, m, n], words(strip_of_operand(operand, m)))


def of_strip(statistics: cute.Tensor, slot, n: int):
    """A statistic of the thread's columns of a strip, by row and column; read one by one, since all take too many registers."""
    mine = statistics[None, cute.arch.thread_idx()[0] % 4, None, slot]
    return lambda r, c: mine[c % 2, n * STRIP // 8 + c // 2]


def shifted(block: Block, n: int) -> Block:
    """With the limits of a strip."""
    if block.limits is None:
        return block
    return Block([None if ends is None else [end - n * STRIP for end in ends] for ends in block.limits])


def put_scores(t: Operands, n, room: Room, x: Backward) -> None:
    """A block of dSᵀ, rounded, to room n, from where this CTA's make_queries reads it and the other's gets it, in place of P."""
    cute.arch.barrier(barrier_id=1, number_of_threads=128)  # all threads have taken their P
    put_fragment(as_accumulator(t.ds, t.acc), t.by.score, room.ds[None, None, n], x.dtype)
    cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(room.ds_full + n)


def finish(t: Operands, room: cute.Tensor, done, x: Backward) -> None:
    """A gradient to where the storing warp takes it."""
    for n, grad in enumerate(t.grads):
        put(grad, t.by.grad, room[None, None, n], x.dtype)
    cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(done)


@cute.jit
def make_values(room: Room, by: Products, work: Work, x: cutlass.Constexpr):
    """One warpgroup: P and dV of the CTA's 64 keys of each tile."""
    t = operands(by, room, room.k, x)
    body = lambda at, own, held, turn: value_tile(t, room, at, held, turn, own, x)  # noqa: E731
    each_tile(WALK, None, work, x, body, new_turn())


@cute.jit
def value_tile(t: Operands, room: Room, at: Place, held, turn: Turn, work: Work, x: cutlass.Constexpr):
    """Returns the turn, where it is then."""
    spans = spans_of(own_column(at, room), at, work, x)
    for grad in t.grads:
        grad.fill(0.0)
    cute.arch.mbarrier_wait(room.held_full + K, held)
    for _ in cutlass.range(work.group, unroll=1):
        turn = value_head(t, room, spans, turn, work, x)
    cute.arch.mbarrier_wait(room.v_read, held)
    finish(t, room.dv, room.done + V, x)
    return turn


@cute.jit
def value_head(t: Operands, room: Room, spans: Spans, turn: Turn, work: Work, x: cutlass.Constexpr):
    """The blocks of one query head: masked ones on either side of whole ones."""
    turn = Turn(turn.slot, turn.phase, turn.count, turn.count)
    if cutlass.const_expr(x.has_upper):
        for step in cutlass.range(spans.start - spans.at.start, unroll=1):
            turn = value_block(t, turn, spans.block(spans.at.start + step, False, work, x), room, work, x)
    for _ in cutlass.range(spans.stop - spans.start, unroll=1):
        turn = value_block(t, turn, Block(), room, work, x)
    for step in cutlass.range(spans.at.stop - spans.stop, unroll=1):  # the other end, or that of the keys
        turn = value_block(t, turn, spans.block(spans.stop + step, False, work, x), room, work, x)
    return turn


@cute.jit
def make_keys(room: Room, by: Products, work: Work, x: cutlass.Constexpr):
    """One warpgroup: dS and dK of the CTA's 64 keys of each tile."""
    t = operands(by, room, room.v, x)
    body = lambda at, own, held, turn: gradient_tile(t, room, at, held, turn, own, x)  # noqa: E731
    each_tile(WALK, None, work, x, body, new_turn())


@cute.jit
def gradient_tile(t: Operands, room: Room, at: Place, held, turn: Turn, work: Work, x: cutlass.Constexpr):
    """Returns the turn, where it is then."""
    for grad in t.grads:
        grad.fill(0.0)
    cute.arch.mbarrier_wait(room.held_full + V, held)
    for _ in cutlass.range(work.group * (at.stop - at.start), unroll=1):
        turn = key_block(t, turn, room, work, x)
    cute.arch.mbarrier_arrive(room.v_read)
    for grad in t.grads:
        scaled(grad, work.scale)
    cute.arch.mbarrier_wait(room.k_read, held)  # and the other warpgroup's last S was done when it handed P on
    finish(t, room.dk, room.done + K, x)
    return turn


# -- dQ ------------------------------------------------------------------------------------------------------------


class Sum(NamedTuple):
    """Of make_queries: ``ds`` seen as queries x keys (descriptors, .., block x CTA); of each half of its 128 columns of dQ ``k`` seen
    as columns x keys (.., part) and the accumulator."""

    by: cute.TiledMma
    ds: cute.Tensor
    k: tuple
    dq: tuple


def sum_operands(by: Products, room: Room, x: Backward) -> Sum:
    mine, parts = by.dq.get_slice(0), x.keys.parts + 1
    columns = [cute.local_tile(turned(room.k), (ROWS, ROWS, parts), (n, 0, 0)) for n in range(HALVES)]
    return Sum(
        by.dq,
        by.dq.make_fragment_A(mine.partition_A(turned(room.ds))),
        tuple(by.dq.make_fragment_B(mine.partition_B(k)) for k in columns),
        tuple(cute.make_rmem_tensor(by.dq.partition_shape_C((ROWS, ROWS)), F32) for _ in range(HALVES)),
    )


@cute.jit
def make_queries(lines: Lines, room: Room, by: Products, work: Work, x: cutlass.Constexpr):
    """One warpgroup: dQ of all keys of each tile and half of the columns."""
    t = sum_operands(by, room, x)
    body = lambda at, own, held, count: add_tile(t, lines, room, at, held, count, own, x)  # noqa: E731
    each_tile(WALK, None, work, x, body, I32(0))
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def add_tile(t: Sum, lines: Lines, room: Room, at: Place, held, count, work: Work, x: cutlass.Constexpr):
    """Returns how many blocks there were so far."""
    cute.arch.mbarrier_wait(room.held_full + K, held)
    cute.arch.mbarrier_wait(room.held_full + THEIRS, held)
    for g in cutlass.range(work.group, unroll=1):
        sums = lines.sums[at.batch, at.head * work.group + g, None, room.rank, None]
        for m in cutlass.range(at.start, at.stop, unroll=1):
            last = cutlass.select_(g == work.group - 1, at.stop - 1, I32(-1)) == m
            add_block(t, sums[m, None], count, last, room, x)
            count = count + 1
    give_back_if(at.start == at.stop, room.k_read)
    return count


@cute.jit
def give_back_if(condition, barrier):
    """Where a tile has no block, or after its last one."""
    if condition:
        give_back(barrier)


def add_block(t: Sum, target: cute.Tensor, count, last, room: Room, x: Backward) -> None:
    """A block's dS K of both CTAs' keys to its sum, (part,). K is given back with the ``last`` one's products."""
    n = count % 2
    cute.arch.mbarrier_wait(room.ds_full + n, count // 2 % 2)
    cute.arch.mbarrier_wait(room.theirs_full, n)
    for k, dq in zip(t.k, t.dq, strict=True):
        pairs = (at_slot(t.ds, n), at_slot(k, room.rank)), (at_slot(t.ds, 2), at_slot(k, x.keys.parts))
        products(t.by, dq, pairs, overwrite=True)
    for h, dq in enumerate(t.dq):
        warpgroup.wait_group(HALVES - 1 - h)
        if h == HALVES - 1:
            release_scores(room, n)
            give_back_if(last, room.k_read)
        add_half(dq, target, h, room, x)


def release_scores(room: Room, n) -> None:
    """Block n of dS, here and what the other CTA has sent."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(room.ds_empty + n)
        cute.arch.mbarrier_arrive(room.ds_empty + n, 1 - room.rank)


def add_half(dq: cute.Tensor, target: cute.Tensor, h: int, room: Room, x: Backward) -> None:
    """Each warp its own rows, a piece at a time through its own room, so that none waits for another."""
    fours = cute.size(dq) // 4
    values = cute.make_tensor(dq.iterator, cute.make_layout((4, fours)))
    each = PIECE // 512
    for n in range(fours // each):
        cute.arch.cp_async_bulk_wait_group(PIECES - 1, read=True)
        cute.arch.sync_warp()
        put_piece(values, n, target, h * fours // each + n, room, x)
        cute.arch.cp_async_bulk_commit_group()


def put_piece(values: cute.Tensor, n: int, target: cute.Tensor, place: int, room: Room, x: Backward) -> None:
    """The n-th piece of a half, which is the ``place``-th of the warp's, to where the copy engine adds it from."""
    each = PIECE // 512
    thread, lane = cute.arch.thread_idx()[0] % 128, cute.arch.thread_idx()[0] % 32
    warp = cute.arch.make_warp_uniform(thread // 32)
    own = room.pieces[None, None, None, place % PIECES, warp]
    for m in range(each):
        cute.autovec_copy(values[None, n * each + m], own[None, lane, m])
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        goal = target.iterator + (warp * (x.keys.part // 4) + place * (PIECE // 4))
        cute.arch.inline_ptx(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
            read_only_args=[goal.toint(), own.iterator.toint(), I32(PIECE)],
        )


# -- Kernel and launch ---------------------------------------------------------------------------------------------


@cute.kernel
def kernel(tmas: Tmas, lines: Lines, by: Products, work: Work, x: cutlass.Constexpr):
    c, (warp, group) = x.keys, own_place()
    room = allocate(tmas, x)
    start_barriers(room, x)
    cute.arch.griddepcontrol_wait()  # the rows' statistics and the zeros are there when the kernel before has ended
    if group == 0:
        cute.arch.setmaxregister_decrease(c.registers_load)
        if warp == 3:
            exchange(room, work, x)
        elif warp == 2:
            store(tmas, room, work, x)
        elif warp == 1:
            load_queries(tmas, lines, room, work, x)
        else:
            load_keys(tmas, room, work, x)
    elif group == 1:
        cute.arch.setmaxregister_increase(c.registers_values)
        make_values(room, by, work, x)
    elif group == 2:
        cute.arch.setmaxregister_increase(c.registers)
        make_keys(room, by, work, x)
    else:
        cute.arch.setmaxregister_decrease(c.registers_sum)
        make_queries(lines, room, by, work, x)
    meet()  # neither CTA's memory goes while the other may still reach for it


def launch(t: Tensors, work: Work, ctas, stream, x: Backward) -> None:
    """Within a traced function of the host's."""
    c, element, tall, major = x.keys, ELEMENT[x.dtype], LayoutEnum.ROW_MAJOR, OperandMajorMode
    part = sm90.make_smem_layout_b(tall, (ROWS, ROWS, HALF), element, 1)
    out = sm90.make_smem_layout_epi(element, tall, (ROWS, HALF), 1)
    get, send = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

    def tma(op, t: cute.Tensor, count: int, layout) -> cpasync.TmaInfo:
        rooms = staged(layout, count, ROWS * HALF)
        return cpasync.make_tiled_tma_atom(op, by_rows(t, x), rooms, (ROWS, HALF))

    tmas = Tmas(
        tma(get, t.q, c.slots, part), tma(get, t.do, c.slots, part),
        tma(get, t.k, c.parts + 1, part), tma(get, t.v, c.parts, part),
        tma(send, t.dk, c.parts, out), tma(send, t.dv, c.parts, out),
    )  # fmt: skip
    mma = lambda a, b, width, *source: sm90.make_trivial_tiled_mma(  # noqa: E731
        element, element, a, b, F32, (1, 1, 1), (ROWS, width), *source
    )
    by = Products(
        mma(major.K, major.K, c.tile_m),
        mma(major.K, major.MN, HALF, warpgroup.OperandSource.RMEM),
        mma(major.MN, major.MN, ROWS),
    )
    kernel.set_name_prefix(f"{x.name}_keys", remove_cutlass_symbol=True, keep_mangled_name=False)
    kernel(tmas, t.lines, by, work, x).launch(
        grid=[ctas, 1, 1],
        block=[c.threads, 1, 1],
        cluster=[PAIR, 1, 1],
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )
