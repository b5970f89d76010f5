"""O = softmax(scale · Q Kᵀ) V and its log-sum-exp on Hopper (sm_90a).

Roles of a CTA of ``1 + W`` warpgroups, persistent over tiles of ``64 W`` queries::

    warp 0       loads    Q tiles, and the key blocks from the last to the first: K0 K1 V0 K2 V1 .. Kn V(n-1) Vn
    warps 1..W   store    the tile of O of one warpgroup each
    warpgroups   compute  S = Q Kᵀ in registers, softmax, O += P V; 64 rows each

mbarriers (arrivals in brackets), each waited for by the other side:
``full[slot]`` (1 + bytes) load -> compute, ``empty[slot]`` (one of every computing warp) compute -> load, for the ring;
``q_full`` (1 + bytes) load -> compute, ``o_full`` (128) compute -> store, ``q_empty`` (1) store -> load: a tile of O takes
the place of the tile of Q that it came from.

With one tile of Q, and with split keys, nobody stores: compute writes O to global memory itself, and ``q_empty`` (one of every warp
of the warpgroup) is compute -> load, as soon as the last scores are there, so that the next Q comes under the end of a tile. A tile
of split keys has a chunk of its keys alone, and leaves a state in fp32, which :mod:`tilewise.backends.hopper.forward.combine` merges. Of
packed sequences only load knows which tile is next: ``q_full`` and ``o_full`` come with it, and at last with none.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu import warp as warp_ops
from cutlass.utils import LayoutEnum

from tilewise.backends.hopper.config import ALIGNMENT, PLAIN, ROWS
from tilewise.backends.hopper.forward import combine
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.kit import dropout, expression, packed, schedule, softmax
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.instructions import (
    all_agree,
    both,
    choose,
    get_words,
    pack,
    put_pair,
    put_words,
    put_words_if,
)
from tilewise.backends.hopper.kit.params import OptionalParams
from tilewise.backends.hopper.kit.ring import fetch, release
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.tiles import (
    QueryTile,
    begin_product,
    column_of,
    constant_column,
    row_of,
    rows_columns,
    staged_layout,
    tma_tiles,
    transpose_quad,
)


class Work(NamedTuple):
    """Numbers of a launch. ``lo``, ``hi``: the band's ends. ``scale2``: softmax_scale · log2(e); with a softcap,
    cap · log2(e), and ``cap2`` as in :func:`softmax.softcap`; with a traced score log2(e), and ``cap2`` is softmax_scale.
    ``sinks``: whether there are any. ``extra``: more than numbers."""

    seqlen_q: I32
    seqlen_k: I32
    heads_q: I32
    group: I32
    batch: I32
    section: I32
    lo: I32
    hi: I32
    sinks: I32
    scale2: F32
    cap2: F32
    extra: OptionalParams = OptionalParams()


class Tmas(NamedTuple):
    """Descriptors, coordinates and shared layouts: q, k, o as (rows, columns, head, batch), v as (columns, rows, ..). Where a
    tile holds several heads of a group, q's and o's rows are (head of the group, row), and the third is the group; of packed
    sequences they are as :func:`packed.ragged` has them."""

    q: cpasync.TmaInfo
    k: cpasync.TmaInfo
    v: cpasync.TmaInfo
    o: cpasync.TmaInfo


class Room(NamedTuple):
    """Tiles in shared memory, the last mode being the tile or the ring's slot, the barriers, and, of packed sequences,
    which tile each tile of Q is of, at every second word of 8 bytes."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    q_full: cute.Pointer
    q_empty: cute.Pointer
    o_full: cute.Pointer
    pin: cute.Pointer
    tiles: cute.Pointer


def band(batch, head, work: Work, x: Config) -> schedule.Band:
    """Of one head. Rows past the last have the last's ends."""
    if x.by_rows:
        held = lambda ends: lambda i: ends[batch, head, PICK.smaller(i, work.seqlen_q - 1)]  # noqa: E731
        return schedule.Band(held(work.extra.lo), held(work.extra.hi), work.seqlen_k)
    return schedule.Band(work.lo if x.has_lower else None, work.hi if x.has_upper else None, work.seqlen_k)


def band_at(at: QueryTile, work: Work, x: Config) -> schedule.Band:
    return schedule.Band(at.seqlen.lo, at.seqlen.hi, at.seqlen.k.size) if x.packed else band(at.batch, at.head, work, x)


def order(work: Work, x: Config) -> schedule.Order:
    m_blocks = (work.seqlen_q + x.tile_queries - 1) // x.tile_queries
    return schedule.Order(m_blocks, work.batch * heads_of(work, x) * chunks_of(work, x), work.section, x.has_upper)


def heads_of(work: Work, x: Config):
    """How many tiles hold all heads of a batch element."""
    return work.heads_q if x.heads == 1 else work.heads_q // work.group * head_blocks(work, x)


def head_blocks(work: Work, x: Config):
    """How many tiles hold the heads of a group."""
    return (work.group + x.heads - 1) // x.heads


def chunks_of(work: Work, x: Config):
    return cute.size(work.extra.part_lse, mode=[0]) if x.split else 1


def place_of(round_, work: Work, x: Config) -> QueryTile:
    """The CTA's tile in a round."""
    n = schedule.nth(cute.arch.block_idx()[0], cute.arch.grid_dim()[0], round_)
    m_block, pair = schedule.tile_at(n, order(work, x), PICK)
    row, chunk, chunks, heads = m_block * x.tile_queries, None, chunks_of(work, x), heads_of(work, x)
    if x.split:
        pair, chunk = pair // chunks, pair % chunks
    head, batch = pair % heads, pair // heads
    if x.heads > 1:
        blocks = head_blocks(work, x)
        head = head // blocks * work.group + head % blocks * x.heads
    if x.form == "lists":
        partial, count = (work.extra.counts[batch, head, m_block, n] for n in range(2))
        return QueryTile(row, head, batch, I32(0), PICK.larger(count, 1), partial=PICK.larger(partial, 1))
    start, stop = schedule.key_blocks(row, x.tile_queries, x.tiles.tile_n, band(batch, head, work, x), PICK)
    if x.split:
        size = schedule.chunk_blocks((work.seqlen_k + x.tiles.tile_n - 1) // x.tiles.tile_n, chunks)
        start, stop = schedule.within_chunk((start, stop), chunk, size, PICK)
    return QueryTile(row, head, batch, I32(start), I32(stop), chunk)


def packed_tile(n, work: Work, x: Config) -> packed.PackedTile:
    """The n-th tile of packed sequences: all heads of a row of tiles, then the next row, the longest of a sequence first. Of no
    sequence: there is none."""
    rows, cu = x.tile_queries, work.extra.cu_q
    tiles_of = lambda sequence: packed.in_tiles(packed.rows_of(sequence, cu, work.seqlen_q, rest=True), rows)  # noqa: E731
    sequence, block, count = packed.find(n // work.heads_q, tiles_of, cute.size(cu))
    if x.has_upper:
        block = tiles_of(sequence) - 1 - block
    sequence = I32(cutlass.select_(n < count * work.heads_q, sequence, I32(-1)))
    return packed.PackedTile(sequence, block * rows, n % work.heads_q)


def packed_place(of: packed.PackedTile, work: Work, x: Config) -> QueryTile:
    e, (sequence, row, head) = work.extra, of
    q = packed.rows_of(sequence, e.cu_q, work.seqlen_q, rest=True)
    k = packed.rows_of(sequence, e.cu_k, work.seqlen_k, rest=False)
    off = k.size - q.size
    moving = schedule.Band(work.lo + off if x.has_lower else None, work.hi + off if x.has_upper else None, k.size)
    first, kept = schedule.cut(moving, e.first, e.last, q.size, PICK)
    start, stop = schedule.key_blocks(row, x.tile_queries, x.tiles.tile_n, kept, PICK)
    seqlen = packed.SeqlenInfo(q, packed.Span(k.start + first + kept.seqlen_k, kept.seqlen_k), kept.lo, kept.hi)
    return QueryTile(row, head, sequence, I32(start), I32(stop), seqlen=seqlen)


def block_at(at: QueryTile, step, work: Work, x: Config):
    """The key block that a tile visits at a step: from the last to the first, or as a list has them."""
    if x.form == "lists":
        return work.extra.blocks[at.batch, at.head, at.row // x.tile_queries, step]
    return at.stop - 1 - step


def rounds_of(work: Work, x: Config):
    return schedule.rounds(cute.arch.block_idx()[0], cute.arch.grid_dim()[0], order(work, x).tiles)


def row_at(at: QueryTile, w, r, work: Work, x: Config):
    """Batch, head and row of lse for a thread's r-th row in warpgroup ``w``, and whether there is such: a tile holds queries one
    after the other, or, of each in turn, several heads of a group."""
    row = row_of(cute.arch.thread_idx()[0] % 128, r)
    i = at.row + w * x.queries + row // x.heads
    if x.packed:
        return (0, at.head, at.seqlen.q.start + i), i < at.seqlen.q.size
    if x.heads == 1:
        return (at.batch, at.head, i), i < work.seqlen_q
    head, last = at.head + row % x.heads, at.head // work.group * work.group + work.group - 1
    return (at.batch, PICK.smaller(head, last), i), PICK.smaller(work.seqlen_q - i, last + 1 - head) > 0


# -- Shared memory -------------------------------------------------------------------------------------------------


def allocate(tmas: Tmas, x: Config) -> Room:
    """In the order of :class:`SharedMemory`; V's blocks are K's, and O's tiles Q's, seen otherwise."""
    smem, c = cutlass.utils.SmemAllocator(), x.tiles
    full = smem.allocate_array(cutlass.Int64, c.barriers + 1 + (2 * c.q_tiles if x.packed else 0))
    q, k = (
        smem.allocate_tensor(ELEMENT[x.dtype], layout.outer, ALIGNMENT, layout.inner)
        for layout in (tmas.q.smem_layout, tmas.k.smem_layout)
    )
    seen_as = lambda t, layout: cute.make_tensor(cute.recast_ptr(t.iterator, layout.inner), layout.outer)  # noqa: E731
    empty, q_full = full + c.stages, full + 2 * c.stages
    q_empty, o_full = q_full + c.q_tiles, q_full + 2 * c.q_tiles
    v, o = seen_as(k, tmas.v.smem_layout), seen_as(q, tmas.o.smem_layout)
    return Room(q, k, v, o, full, empty, q_full, q_empty, o_full, full + c.barriers, full + c.barriers + 1)


@cute.jit
def start_barriers(room: Room, x: cutlass.Constexpr):
    """One thread sets every barrier's count of arrivals; then all see them."""
    c = x.tiles
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for n in cutlass.range_constexpr(c.stages):
                cute.arch.mbarrier_init(room.full + n, 1)
                cute.arch.mbarrier_init(room.empty + n, 4 * c.warpgroups)
            for n in cutlass.range_constexpr(c.q_tiles):
                cute.arch.mbarrier_init(room.q_full + n, 1)
                cute.arch.mbarrier_init(room.q_empty + n, 1 if x.stores else 4)
                cute.arch.mbarrier_init(room.o_full + n, 128)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


def cut_queries(info: cpasync.TmaInfo, width: int, at: QueryTile, work: Work, x: Config, room: cute.Tensor):
    """Q's or O's rows for a warpgroup, as :func:`tma_tiles`; the tile is at.row // x.queries + w."""
    if x.heads == 1:
        return tma_tiles(info, (ROWS, width), (None, 0), at.head, at.rows, room)
    shape, block = ((x.heads, x.queries), width), at.head % work.group // x.heads
    return tma_tiles(info, shape, ((block, None), 0), at.head // work.group, at.batch, room)


# -- Load ----------------------------------------------------------------------------------------------------------


@cute.jit
def load(tmas: Tmas, room: Room, work: Work, x: cutlass.Constexpr):
    """One warp: every tile's Q, and its key blocks.

    Packed, tiles differ too much to be dealt out: after its first a CTA takes what comes next of all. Which one it is goes
    along with its Q, so that the other roles need not look; one of no sequence ends them.
    """
    slot, phase, q_stage, q_phase = I32(0), I32(1), I32(0), I32(1)  # a new barrier lets phase 1 pass
    if cutlass.const_expr(x.packed):
        of = packed_tile(I32(cute.arch.block_idx()[0]), work, x)
        while of.sequence >= 0:
            following, at = packed.take(work.extra.queue), packed_place(of, work, x)
            slot, phase = load_tile(tmas, room, at, (slot, phase), (q_stage, q_phase), work, x)
            q_stage, q_phase = schedule.advance(q_stage, q_phase, x.tiles.q_stages)
            of = packed_tile(following, work, x)
        hand_on(of, room, q_stage, q_phase, x)
        for w in cutlass.range_constexpr(x.tiles.warpgroups):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(room.q_full + w * x.tiles.q_stages + q_stage)
    else:
        for round_ in cutlass.range(rounds_of(work, x), unroll=1):
            at = place_of(round_, work, x)
            slot, phase = load_tile(tmas, room, at, (slot, phase), (q_stage, q_phase), work, x)
            q_stage, q_phase = schedule.advance(q_stage, q_phase, x.tiles.q_stages)


def hand_on(of: packed.PackedTile, room: Room, q_stage, q_phase, x: Config) -> None:
    """A tile to the roles that wait for its Q."""
    for w in range(x.tiles.warpgroups):
        n_q = w * x.tiles.q_stages + q_stage
        cute.arch.mbarrier_wait(room.q_empty + n_q, q_phase)
        with cute.arch.elect_one():
            put_words(room.tiles + 2 * n_q, of)
    cute.arch.sync_warp()  # before whoever is elected to arrive


def handed_on(n_q, ready, phase, room: Room) -> packed.PackedTile:
    """The tile that a tile of Q or O is of, once that is there."""
    cute.arch.mbarrier_wait(ready + n_q, phase)
    return packed.PackedTile(*(cute.arch.make_warp_uniform(n) for n in get_words(room.tiles + 2 * n_q, 3)))


@cute.jit
def load_tile(tmas: Tmas, room: Room, at: QueryTile, ring: tuple, q_ring: tuple, work: Work, x: cutlass.Constexpr):
    """A tile's Q, and its key blocks in the order of :func:`schedule.loads`. Returns the ring, where it is then."""
    c = x.tiles
    k_bytes, v_bytes, q_bytes = 2 * c.tile_n * c.width, 2 * c.tile_n * c.width_v, 2 * ROWS * c.width
    (slot, phase), (q_stage, q_phase), head_k = ring, q_ring, at.head // work.group
    gQ, sQ = cut_queries(tmas.q, c.width, at, work, x, room.q)
    gK, sK = tma_tiles(tmas.k, (c.tile_n, c.width), (None, 0), head_k, at.keys, room.k)
    gV, sV = tma_tiles(tmas.v, (c.width_v, c.tile_n), (0, None), head_k, at.keys, room.v)

    n = block_at(at, 0, work, x)
    fetch(tmas.k, gK[None, n], sK[None, slot], k_bytes, room.full + slot, room.empty + slot, phase)
    slot, phase = schedule.advance(slot, phase, c.stages)
    if cutlass.const_expr(x.packed):
        hand_on(packed.PackedTile(at.batch, at.row, at.head), room, q_stage, q_phase, x)
    for w in cutlass.range_constexpr(c.warpgroups):
        n_q = w * c.q_stages + q_stage
        g, s = gQ[None, at.row // x.queries + w], sQ[None, n_q]
        fetch(tmas.q, g, s, q_bytes, room.q_full + n_q, room.q_empty + n_q, q_phase)
    for step in cutlass.range(at.stop - at.start - 1, unroll=1):
        n, before = block_at(at, step + 1, work, x), block_at(at, step, work, x)
        fetch(tmas.k, gK[None, n], sK[None, slot], k_bytes, room.full + slot, room.empty + slot, phase)
        slot, phase = schedule.advance(slot, phase, c.stages)
        fetch(tmas.v, gV[None, before], sV[None, slot], v_bytes, room.full + slot, room.empty + slot, phase)
        slot, phase = schedule.advance(slot, phase, c.stages)
    n = block_at(at, at.stop - at.start - 1, work, x)
    fetch(tmas.v, gV[None, n], sV[None, slot], v_bytes, room.full + slot, room.empty + slot, phase)
    return schedule.advance(slot, phase, c.stages)


# -- Store ---------------------------------------------------------------------------------------------------------


@cute.jit
def store(tmas: Tmas, room: Room, w, work: Work, x: cutlass.Constexpr):
    """One warp for each computing warpgroup w: its tiles of O to global memory; rows past the last are dropped there."""
    q_stages = x.tiles.q_stages
    stage, phase = I32(0), I32(0)
    if cutlass.const_expr(x.packed):
        of = handed_on(w * q_stages, room.o_full, phase, room)
        while of.sequence >= 0:
            store_tile(tmas, room, packed_place(of, work, x), w, stage, phase, work, x)
            stage, phase = schedule.advance(stage, phase, q_stages)
            of = handed_on(w * q_stages + stage, room.o_full, phase, room)
    else:
        for round_ in cutlass.range(rounds_of(work, x), unroll=1):
            store_tile(tmas, room, place_of(round_, work, x), w, stage, phase, work, x)
            stage, phase = schedule.advance(stage, phase, q_stages)


def store_tile(tmas: Tmas, room: Room, at: QueryTile, w, stage, phase, work: Work, x: Config) -> None:
    gO, sO = cut_queries(tmas.o, x.tiles.width_v, at, work, x, room.o)
    n = w * x.tiles.q_stages + stage
    cute.arch.mbarrier_wait(room.o_full + n, phase)
    cute.copy(tmas.o.atom, sO[None, n], gO[None, at.row // x.queries + w])
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(room.q_empty + n)


# -- Compute -------------------------------------------------------------------------------------------------------


class Operands(NamedTuple):
    """Of one warpgroup: the two products, descriptors (1, 1, k steps, tile or slot), accumulators and P.

    ``s`` 64 x tile_n and ``o`` 64 x width_v fp32, ``p`` 64 x tile_n in the element type, in the registers' order of ``s``.
    """

    qk: cute.TiledMma
    pv: cute.TiledMma
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    s: cute.Tensor
    o: cute.Tensor
    p: cute.Tensor
    rows: softmax.SoftmaxState


def operands(qk: cute.TiledMma, pv: cute.TiledMma, room: Room, x: Config) -> Operands:
    c, first, second = x.tiles, qk.get_slice(0), pv.get_slice(0)
    return Operands(
        qk, pv,
        qk.make_fragment_A(first.partition_A(room.q)),
        qk.make_fragment_B(first.partition_B(room.k)),
        pv.make_fragment_B(second.partition_B(room.v)),
        cute.make_rmem_tensor(qk.partition_shape_C((ROWS, c.tile_n)), F32),
        cute.make_rmem_tensor(pv.partition_shape_C((ROWS, c.width_v)), F32),
        cute.make_rmem_tensor(pv.partition_shape_A((ROWS, c.tile_n)), ELEMENT[x.dtype]),
        softmax.new_state(),
    )  # fmt: skip


def to_p(t: Operands, x: Config) -> None:
    """The scores' registers, exponentials by now, rounded into P's: the same registers in the same order, no shuffle."""
    pairs = cute.recast_tensor(cute.make_tensor(t.p.iterator, cute.make_layout(cute.size(t.p))), I32)
    values = cute.make_tensor(t.s.iterator, cute.make_layout(cute.size(t.s)))
    for n in range(cute.size(pairs)):
        pairs[n] = pack(values[2 * n], values[2 * n + 1], x.dtype)


class Line(NamedTuple):
    """A thread's two rows in a tile: ``i`` of each, its first column, and the first and one past the last key that it keeps,
    less that column; None: no end."""

    batch: I32
    head: I32
    i: list
    column: I32
    lower: list | None
    upper: list


class Block(NamedTuple):
    """Key block n of a thread's rows; ``partial``: whether some row may not see all of it."""

    line: Line
    n: I32
    partial: bool


def line_of(at: QueryTile, row, thread, kept: schedule.Band, x: Config) -> Line:
    """Of a thread of the warpgroup whose first query is ``row``."""
    rows, start = [row + row_of(thread, r) // x.heads for r in range(2)], column_of(thread, 0)
    upper = [schedule.row_stop(i, kept, PICK) - start for i in rows]
    lower = [schedule.row_start(i, kept, PICK) - start for i in rows] if x.has_lower else None
    return Line(at.batch, at.head, rows, start, lower, upper)


def scores(t: Operands, block: Block, work: Work, x: Config) -> cute.Tensor:
    """The accumulator as rows and columns, capped or scored, and masked."""
    s, line, first = rows_columns(t.s), block.line, block.n * x.tiles.tile_n
    pairs = expression.pairs_of(line, first, work) if x.traced != PLAIN else None
    if x.softcap:
        softmax.softcap(s, work.cap2)
    if x.traced.score:
        expression.scored(s, x.traced.score, work.cap2, pairs)
    if block.partial:
        minus = lambda ends: None if ends is None else [end - first for end in ends]  # noqa: E731
        softmax.mask_scores(s, minus(line.lower), minus(line.upper))
        if x.traced.keep:
            expression.hide(s, x.traced.keep, pairs)
    return s


def drop(p: cute.Tensor, block: Block, work: Work, x: Config) -> None:
    """After the row sums, which dropout leaves alone."""
    if x.dropout:
        dropout.drop(p, block.line, block.n * x.tiles.tile_n, work)


def kept(factor: list, work: Work, x: Config) -> list:
    """What makes O of the accumulator, with dropout's part."""
    return [f * work.extra.keep for f in factor] if x.dropout else factor


@cute.jit
def first_scores(
    t: Operands, at: QueryTile, q_tile, q_phase, ring: tuple, w, there, room: Room, work: Work, x: cutlass.Constexpr
):  # fmt: skip
    """Begins S of a tile's first block; where there is no such tile, of whatever is there. Returns the ring, at its slot."""
    slot, phase = ring
    if there:
        cute.arch.mbarrier_wait(room.q_full + q_tile, q_phase)
        if cutlass.const_expr(x.skips):
            hidden, _, _ = whole_steps(at, at.row + w * x.queries, band_at(at, work, x), x)
            slot, phase = skip(hidden, (slot, phase), w, room, x, True)
        cute.arch.mbarrier_wait(room.full + slot, phase)
    begin_product(t.qk, t.s, t.q[None, None, None, q_tile], t.k[None, None, None, slot], overwrite=True)
    return slot, phase


def first_block(t: Operands, ring, block: Block, room: Room, work: Work, x: Config):
    """P of a tile's first block; its product with V is the next block's affair. Returns the ring, one slot on."""
    slot, phase = ring
    warpgroup.wait_group(0)
    release(room.empty + slot)
    s = scores(t, block, work, x)
    softmax.online_softmax(s, t.rows, work.scale2, first=True, masked=True, lazy=x.tiles.lazy)
    drop(s, block, work, x)
    to_p(t, x)
    return schedule.advance(slot, phase, x.tiles.stages)


def take_turn(w, x: Config) -> None:
    """Waits for the warpgroup before; the last gives warpgroup 0 its first turn."""
    if x.tiles.pingpong:
        cute.arch.barrier(barrier_id=1 + x.tiles.warpgroups + w, number_of_threads=256)


def pass_turn(w, x: Config) -> None:
    """Lets the next warpgroup begin its products."""
    if x.tiles.pingpong:
        cute.arch.barrier_arrive(
            barrier_id=1 + x.tiles.warpgroups + (w + 1) % x.tiles.warpgroups, number_of_threads=256
        )


@cute.jit
def first_turn(w, x: cutlass.Constexpr):
    if w == x.tiles.warpgroups - 1:
        pass_turn(w, x)


def both_products(t: Operands, q_tile, ring, room: Room, x: Config):
    """S of a block, done when this returns, and O += P V of the block before, begun. Returns V's slot and phase."""
    (slot, phase), w = ring, q_tile // x.tiles.q_stages
    v_slot, v_phase = schedule.advance(slot, phase, x.tiles.stages)
    cute.arch.mbarrier_wait(room.full + slot, phase)
    take_turn(w, x)
    begin_product(t.qk, t.s, t.q[None, None, None, q_tile], t.k[None, None, None, slot], overwrite=True)
    cute.arch.mbarrier_wait(room.full + v_slot, v_phase)
    begin_product(t.pv, t.o, t.p, t.v[None, None, None, v_slot], overwrite=False)
    pass_turn(w, x)
    warpgroup.wait_group(1)
    return v_slot, v_phase


def key_block(t: Operands, q_tile, ring, block: Block, room: Room, work: Work, x: Config):
    """S of this block and O += P V of the block before at once; softmax under the latter. Returns the ring, two slots on."""
    c, masked = x.tiles, block.partial or bool(x.traced.score)
    v_slot, v_phase = both_products(t, q_tile, ring, room, x)
    release(room.empty + ring[0])
    s = scores(t, block, work, x)
    softmax.online_softmax(s, t.rows, work.scale2, first=False, masked=masked, lazy=c.lazy)
    drop(s, block, work, x)
    softmax.hold_exponentials(room.pin, t.rows)
    warpgroup.wait_group(0)
    release(room.empty + v_slot)
    softmax.rescale(t.o, t.rows.factor, c.lazy)
    to_p(t, x)
    return schedule.advance(v_slot, v_phase, c.stages)


def steady_block(t: Operands, q_tile, ring, block: Block, room: Room, work: Work, x: Config):
    """:func:`key_block` of a whole block with the maxima of the blocks before; where these do not serve, once more with its own.

    P V of the block before is done by then, so that this costs S and a softmax that nothing runs under; K stays until it is known.
    """
    v_slot, v_phase = both_products(t, q_tile, ring, room, x)
    totals = softmax.steady_softmax(scores(t, block, work, x), t.rows, work.scale2)
    served = both(totals[0] <= softmax.MOST, totals[1] <= softmax.MOST)
    # By all four warps, who read S and P together; the exponentials stay above the wait, as with softmax.hold_exponentials.
    served = all_agree(served, 1 + q_tile // x.tiles.q_stages)
    warpgroup.wait_group(0)
    release(room.empty + v_slot)
    for r in range(2):
        t.rows.l[r] = t.rows.l[r] + choose(served != 0, totals[r], 0.0)
    to_p(t, x)
    once_more(served, t, q_tile, ring[0], block, room, work, x)
    release(room.empty + ring[0])
    return schedule.advance(v_slot, v_phase, x.tiles.stages)


@cute.jit
def once_more(
    served, t: Operands, q_tile, k_slot, block: Block, room: Room, work: Work, x: cutlass.Constexpr
):  # fmt: skip
    """P of a block for which the maxima of before were too small."""
    if served == 0:
        begin_product(t.qk, t.s, t.q[None, None, None, q_tile], t.k[None, None, None, k_slot], overwrite=True)
        warpgroup.wait_group(0)
        s = scores(t, block, work, x)
        softmax.online_softmax(s, t.rows, work.scale2, first=False, masked=False, lazy=x.tiles.lazy)
        softmax.rescale(t.o, t.rows.factor, x.tiles.lazy)
        to_p(t, x)


@cute.jit
def skip(hidden, ring: tuple, w, room: Room, x: cutlass.Constexpr, turn: cutlass.Constexpr):
    """Of a tile's first block, where the warpgroup sees nothing of it, it gives back K's slot, and its turn; V's comes after the
    next K. Returns the ring, where it is then."""
    slot, phase = ring
    if hidden > 0:
        if cutlass.const_expr(turn):
            take_turn(w, x)
            pass_turn(w, x)
        slot, phase = give_back((slot, phase), room, x)
    return slot, phase


def give_back(ring: tuple, room: Room, x: Config):
    """A slot that is not needed. Returns the ring, one slot on."""
    slot, phase = ring
    cute.arch.mbarrier_wait(room.full + slot, phase)
    release(room.empty + slot)
    return schedule.advance(slot, phase, x.tiles.stages)


def last_product(t: Operands, ring, room: Room, x: Config) -> None:
    """Begins O += P V of a tile's last block."""
    slot, phase = ring
    cute.arch.mbarrier_wait(room.full + slot, phase)
    begin_product(t.pv, t.o, t.p, t.v[None, None, None, slot], overwrite=False)


def whole_steps(at: QueryTile, row, kept: schedule.Band, x: Config):
    """``(hidden, first, stop)``: whether the warpgroup whose first query is ``row`` leaves out the first step, since it sees nothing
    there, and the steps at which it sees whole blocks; its first is none of these.

    Two steps it would not leave out: while the next tile's first K is waited for, this tile's last V is still held.
    """
    if x.form == "lists":
        return I32(0), at.partial, at.stop
    rows = row, x.queries, x.tiles.tile_n, kept
    hidden = PICK.smaller(schedule.hidden_blocks(*rows, (at.start, at.stop), PICK), 1) if x.skips else I32(0)
    start, stop = schedule.whole_blocks(*rows, (at.start, at.stop - 1 - hidden), PICK)
    return hidden, at.stop - stop, at.stop - start


@cute.jit
def compute(
    tmas: Tmas, room: Room, w, lse: cute.Tensor, sink: cute.Tensor, qk: cute.TiledMma, pv: cute.TiledMma, work: Work,
    x: cutlass.Constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of each tile. The first product of the next tile runs under the end of one."""
    c = x.tiles
    t = operands(qk, pv, room, x)
    slot, phase, q_stage, q_phase = I32(0), I32(0), I32(0), I32(0)
    if cutlass.const_expr(c.pingpong):
        first_turn(w, x)
    if cutlass.const_expr(x.packed):
        of = handed_on(w * c.q_stages, room.q_full, q_phase, room)
        while of.sequence >= 0:
            at, q_tile = packed_place(of, work, x), w * c.q_stages + q_stage
            slot, phase = first_scores(t, at, q_tile, q_phase, (slot, phase), w, True, room, work, x)
            slot, phase = compute_tile(t, at, q_tile, (slot, phase), w, room, work, x)
            warpgroup.wait_group(0)
            release(room.empty + slot)
            slot, phase = schedule.advance(slot, phase, c.stages)
            epilogue(t, room, q_tile, w, lse, sink, at, work, x)
            q_stage, q_phase = schedule.advance(q_stage, q_phase, c.q_stages)
            of = handed_on(w * c.q_stages + q_stage, room.q_full, q_phase, room)
        if cutlass.const_expr(x.stores):
            cute.arch.mbarrier_arrive(room.o_full + w * c.q_stages + q_stage)  # for who stores to end, too
    else:
        last, at = rounds_of(work, x) - 1, place_of(0, work, x)
        slot, phase = first_scores(t, at, w * c.q_stages, q_phase, (slot, phase), w, True, room, work, x)
        for round_ in cutlass.range(last + 1, unroll=1):
            this, q_tile = at, w * c.q_stages + q_stage
            slot, phase = compute_tile(t, at, q_tile, (slot, phase), w, room, work, x)
            v_slot = slot
            slot, phase = schedule.advance(slot, phase, c.stages)
            q_stage, q_phase = schedule.advance(q_stage, q_phase, c.q_stages)
            n_q = w * c.q_stages + q_stage
            at = place_of(PICK.smaller(round_ + 1, last), work, x)
            slot, phase = first_scores(t, at, n_q, q_phase, (slot, phase), w, round_ < last, room, work, x)
            warpgroup.wait_group(1)
            release(room.empty + v_slot)
            epilogue(t, room, q_tile, w, lse, sink, this, work, x)
        warpgroup.wait_group(0)


@cute.jit
def compute_tile(
    t: Operands, at: QueryTile, q_tile, ring: tuple, w, room: Room, work: Work, x: cutlass.Constexpr
):  # fmt: skip
    """All key blocks of a tile, S of the first having begun: the rows' state, and O, unnormalised, once the last product is done.
    Returns the ring, at that product's slot."""
    row, kept, (slot, phase) = at.row + w * x.queries, band_at(at, work, x), ring
    hidden, whole, rest = whole_steps(at, row, kept, x)
    line = line_of(at, row, cute.arch.thread_idx()[0] % 128, kept, x)
    whole_block = steady_block if x.steady else key_block
    t.o.fill(0.0)

    block = Block(line, block_at(at, hidden, work, x), True)
    slot, phase = first_block(t, (slot, phase), block, room, work, x)
    if cutlass.const_expr(x.skips):
        slot, phase = skip(hidden, (slot, phase), w, room, x, False)
    if cutlass.const_expr(x.has_upper):
        for step in cutlass.range(whole - 1 - hidden, unroll=1):  # the right edge, or what needs the predicate
            block = Block(line, block_at(at, hidden + 1 + step, work, x), True)
            slot, phase = key_block(t, q_tile, (slot, phase), block, room, work, x)
    for step in cutlass.range(rest - whole, unroll=1):
        block = Block(line, block_at(at, whole + step, work, x), False)
        slot, phase = whole_block(t, q_tile, (slot, phase), block, room, work, x)
    if cutlass.const_expr(x.has_lower and x.form != "lists"):
        for step in cutlass.range(at.stop - at.start - rest, unroll=1):  # the left edge
            block = Block(line, block_at(at, rest + step, work, x), True)
            slot, phase = key_block(t, q_tile, (slot, phase), block, room, work, x)
    if cutlass.const_expr(not x.stores):
        release(room.q_empty + q_tile)
    last_product(t, (slot, phase), room, x)
    return slot, phase


def epilogue(
    t: Operands, room: Room, q_tile, w, lse: cute.Tensor, sink: cute.Tensor, at: QueryTile, work: Work, x: Config
):
    """lse to global memory, O / l there too, or to where Q was, from where a storing warp takes it."""
    if x.split:
        put_part(t, at, w, work, x)
        return
    heads = [row_at(at, w, r, work, x)[0][1] for r in range(2)]
    sinks = work.sinks
    if x.packed:  # the rows past the last sequence have none
        sinks = PICK.smaller(sinks, cute.size(work.extra.cu_q) - 1 - at.batch)
    factor, statistic = softmax.finalize(t.rows, [choose(sinks != 0, sink[head], -softmax.INF) for head in heads])
    for r in range(2):
        place, inside = row_at(at, w, r, work, x)  # again: known early, the condition costs the loops instructions
        put_lse(lse, place, statistic[r], inside)
    softmax.scale_rows(rows_columns(t.o), kept(factor, work, x))
    if not x.stores:
        put_rows(t, at, w, work, x)
        return
    cute.arch.barrier(barrier_id=1 + w, number_of_threads=128)  # all four warps have read Q for the last time
    put_tile(t, room, q_tile, x)
    cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(room.o_full + q_tile)


@cute.jit
def put_lse(lse: cute.Tensor, place: tuple, value, inside):
    """By one thread of the four that hold the row."""
    if cute.arch.thread_idx()[0] % 4 == 0 and inside:
        lse[place] = value


def put_part(t: Operands, at: QueryTile, w, work: Work, x: Config) -> None:
    """The state of a chunk to global memory; a sink is for the merge."""
    factor, statistic = softmax.finalize(t.rows, [-softmax.INF] * 2)
    o = rows_columns(t.o)
    softmax.scale_rows(o, kept(factor, work, x))
    for r in range(2):
        place, inside = row_at(at, w, r, work, x)
        put_row(o[r, None], work.extra.part_o, (at.chunk, *place), inside)
        put_lse(work.extra.part_lse, (at.chunk, *place), statistic[r], inside)


@cute.jit
def put_row(values: cute.Tensor, part_o: cute.Tensor, place: tuple, inside):
    """A thread's part of a row, in pairs of neighbours."""
    if inside:
        row = part_o[(*place, None)]
        start = row.iterator + column_of(cute.arch.thread_idx()[0] % 128, 0)
        for c in cutlass.range_constexpr(0, cute.size(values), 2):
            put_pair(start + constant_column(c), values[c], values[c + 1])


def put_rows(t: Operands, at: QueryTile, w, work: Work, x: Config) -> None:
    """O, rounded, from registers to global memory: 16 bytes of a row a thread and store, of which a quad's lie side by side."""
    o, column = rows_columns(t.o), 8 * (cute.arch.thread_idx()[0] % 4)
    for r in range(2):
        place, inside = row_at(at, w, r, work, x)
        for first in range(0, cute.size(o, mode=[1]), 8):  # four pairs of columns: 32 of the quad
            pairs = [pack(o[r, first + n], o[r, first + n + 1], x.dtype) for n in range(0, 8, 2)]
            put_columns(work.extra.o, place, inside, column + constant_column(first), transpose_quad(pairs))


def put_columns(o: cute.Tensor, place: tuple, inside, column, words: list) -> None:
    """Eight columns of a row, two in each word, as far as there are such."""
    batch, head, i = place
    row = o[batch, i, head, None]
    there = cutlass.select_(inside, I32(cute.size(row)), I32(0)) > column
    put_words_if(there, row.iterator + column, words)


def put_tile(t: Operands, room: Room, q_tile, x: Config) -> None:
    """O, rounded, to shared memory."""
    element = ELEMENT[x.dtype]
    out = cute.make_rmem_tensor_like(t.o, element)
    out.store(t.o.load().to(element))
    copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp_ops.StMatrix8x8x16bOp(False, 4), element), t.pv)
    part = copy.get_slice(cute.arch.thread_idx()[0] % 128)
    cute.copy(copy, part.retile(out), part.partition_D(room.o[None, None, q_tile]))


# -- Kernel and launch ---------------------------------------------------------------------------------------------


@cute.kernel
def kernel(
    q: cpasync.TmaInfo, k: cpasync.TmaInfo, v: cpasync.TmaInfo, o: cpasync.TmaInfo, lse: cute.Tensor, sink: cute.Tensor,
    qk: cute.TiledMma, pv: cute.TiledMma, work: Work, x: cutlass.Constexpr,
):  # fmt: skip
    tmas, c = Tmas(q, k, v, o), x.tiles
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
    room = allocate(tmas, x)
    start_barriers(room, x)
    if cutlass.const_expr(x.split):
        cute.arch.griddepcontrol_launch_dependents()  # the merge may be set up; it waits for this kernel's end
    if group == 0:
        cute.arch.setmaxregister_decrease(c.registers_load)
        if warp == 0:
            load(tmas, room, work, x)
        elif cutlass.const_expr(not x.stores):
            pass  # those that compute do
        elif warp <= c.warpgroups:
            store(tmas, room, warp - 1, work, x)
    else:
        cute.arch.setmaxregister_increase(c.registers)
        compute(tmas, room, group - 1, lse, sink, qk, pv, work, x)


def by_group(t: cute.Tensor, group, groups) -> cute.Tensor:
    """(batch, row, head, column) as ((head of a group, row), column, group, batch)."""
    (batch, rows, _, columns), (by_batch, by_row, by_head, by_column) = t.shape, t.stride
    shape = (group, rows), columns, groups, batch
    return cute.make_tensor(
        t.iterator, cute.make_layout(shape, stride=((by_head, by_row), by_column, by_head * group, by_batch))
    )


def extra_of(values: list, x: Config) -> OptionalParams:
    """Of the values that follow a launch's numbers: what ``x.extra`` names, leaves, and expressions' numbers."""
    named, leaves = len(x.extra), len(x.extra) + len(x.traced.tensors)
    if x.traced == PLAIN:
        return OptionalParams(**dict(zip(x.extra, values, strict=True)))
    fields = dict(zip(x.extra, values[:named], strict=True))
    return OptionalParams(**fields, leaves=tuple(values[named:leaves]), numbers=tuple(values[leaves:]))


@cute.jit
def launch(
    q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, sink: cute.Tensor,
    numbers: tuple, stream: cuda.CUstream, x: cutlass.Constexpr,
):  # fmt: skip
    """q, o (batch, seqlen_q, heads_q, D), k, v (batch, seqlen_k, heads_k, D), lse (batch, heads_q, seqlen_q), sink (heads_q,);
    packed sequences are one batch element.

    ``numbers``: lo and hi of the band, heads of a section, CTAs, whether sinks count (else they are not read), scale2, cap2,
    and what :func:`extra_of` takes.
    """
    c, element = x.tiles, ELEMENT[x.dtype]
    view = lambda t, modes: cute.make_tensor(t.iterator, cute.select(t.layout, mode=modes))  # noqa: E731
    by_rows, by_columns = [1, 3, 2, 0], [3, 1, 2, 0]
    group = q.shape[2] // k.shape[2]
    rows = ROWS if x.heads == 1 else (x.heads, x.queries)
    views = (
        (by_group(q, group, k.shape[2]), by_group(o, group, k.shape[2]))
        if x.heads > 1
        else (view(q, by_rows), view(o, by_rows))
    )
    views = (*views, view(k, by_rows), view(v, by_columns))
    if cutlass.const_expr(x.packed):
        views = (packed.ragged(q), packed.ragged(o), packed.ragged(k), packed.ragged(v, columns_first=True))
    row, column = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
    q_size, slot = c.q_elements, c.stage_elements
    layout_q = staged_layout(sm90.make_smem_layout_a(row, (ROWS, c.tile_n, c.width), element, 1), c.q_tiles, q_size)
    layout_k = staged_layout(sm90.make_smem_layout_b(row, (ROWS, c.tile_n, c.width), element, 1), c.stages, slot)
    layout_v = staged_layout(sm90.make_smem_layout_b(column, (ROWS, c.width_v, c.tile_n), element, 1), c.stages, slot)
    layout_o = staged_layout(sm90.make_smem_layout_epi(element, row, (ROWS, c.width_v), 1), c.q_tiles, q_size)
    major = OperandMajorMode
    qk = sm90.make_trivial_tiled_mma(element, element, major.K, major.K, F32, (1, 1, 1), (ROWS, c.tile_n))
    pv = sm90.make_trivial_tiled_mma(
        element, element, major.K, major.MN, F32, (1, 1, 1), (ROWS, c.width_v), warpgroup.OperandSource.RMEM
    )
    bring, send, tma = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp(), cpasync.make_tiled_tma_atom
    lo, hi, section, ctas, sinks, scale2, cap2, *extra = numbers
    work = Work(
        q.shape[1], k.shape[1], q.shape[2], group, q.shape[0], section, lo, hi, sinks, scale2, cap2,
        extra_of(extra, x)._replace(o=None if x.stores or x.split else o),
    )  # fmt: skip
    kernel.set_name_prefix(x.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    kernel(
        tma(bring, views[0], layout_q, (rows, c.width)),
        tma(bring, views[2], layout_k, (c.tile_n, c.width)),
        tma(bring, views[3], layout_v, (c.width_v, c.tile_n)),
        tma(send, views[1], layout_o, (rows, c.width_v)),
        lse, sink, qk, pv, work, x,
    ).launch(grid=[ctas, 1, 1], block=[c.threads, 1, 1], min_blocks_per_mp=1, stream=stream)  # fmt: skip
    if cutlass.const_expr(x.split):
        combine.launch(work.extra.part_o, work.extra.part_lse, o, lse, sink, sinks, stream, x)
