"""dK, dV and dS of latent attention over selected keys, on Hopper (sm_90a); another kernel makes dQ of dS.

Two CTAs of a cluster have a query, 128 of its heads and all tiles of 64 keys of its list, and share the columns: each has half of those of
V and half of the rotary ones. So each key is read once, and what is added to its gradient in memory is a sum over all heads. Of a tile::

    S, dP       the parts of a CTA's own columns, 64 heads in each warpgroup
    exchange    each CTA gets the peer's parts of 32 keys, and has S and dP of these
    P, dS       of these 32 keys, into both CTAs' shared memory; dS to memory, for the other kernel
    dK, dV      of 64 keys, a CTA's own columns, half of them in each warpgroup; fp32 reductions add them up in memory

dK and dV of a tile are computed while the parts of the next one are exchanged: parts of S go to memory of their own, those of dP to the
place of P once dV is computed. A warp that issues products waits until the tensor cores have taken the ones before, so it does something
else between them: it starts copies of keys, and adds to memory (docs/decisions.md#hopper-listed-gradients).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from tilewise.backends.hopper.config import ALIGNMENT, ELEMENT_BYTES, ROWS
from tilewise.backends.hopper.kit.bits import is_set
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.instructions import both, choose, in_peer, meet, pack, put_words_if
from tilewise.backends.hopper.kit.lists import PIECE, WARP, tiles_of_list
from tilewise.backends.hopper.kit.params import OptionalParams, by_name, optional_params
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.softmax import INF, LOG2_E
from tilewise.backends.hopper.kit.tiles import row_of, rows_columns, transpose_quad
from tilewise.backends.hopper.latent.config import CHUNK, KEYS, PAIR
from tilewise.backends.hopper.latent.gradients_config import BARRIERS, GROUPS, HEADS, VALUE_CHUNKS
from tilewise.backends.hopper.latent.gradients_keys import (
    HALF,
    NARROW,
    ROTARY_ELEMENTS,
    Found,
    copy_rotary_heads,
    find,
    gathering,
    look_up_tile,
    new_found,
    new_places,
    read_entries,
)
from tilewise.backends.hopper.latent.gradients_work import ROTARY, Work, copy_heads, work_of
from tilewise.backends.hopper.latent.storage import ELEMENTS, chunked, swizzle_of

# An lse that units of log2 do not hold: no key was seen, or each score is about the least number of fp32.
LOWEST = -2.3e38
PARTS = 4 * HEADS * HALF  # bytes of the parts of S, or of dP, that a CTA gets of a tile,
TILE = ELEMENT_BYTES * 2 * HEADS * HALF  # and of P and dS together


class GradientParams(NamedTuple):
    """The numbers and tensors of a launch, as :attr:`GradientsConfig.parameters` has them."""

    q: cute.Tensor
    k: cute.Tensor
    o: cute.Tensor
    do: cute.Tensor
    lse: cute.Tensor
    dlse: cute.Tensor
    delta: cute.Tensor
    ds: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    first: I32
    joint: I32
    scale: F32
    scale2: F32
    extra: OptionalParams


class PairStorage(NamedTuple):
    """Shared memory.

    Attributes:
        q, do: (64, 64, chunk of both warpgroups' heads). k: (64, 64, chunk). rotary_q, rotary_k: (64, 32, warpgroup) and (64, 32, 1).
        columns_q, columns_do, columns_rotary: as right operands (column, head, (pair of chunks, warpgroup)).
        p, ds: as left operands (key, head, warpgroup). deltas: a part of delta of each CTA and head. early: the peer's parts of S.
        early_full, parts_full, tile_full: the peer's parts of S, of dP, and its P and dS have come.
        p_free: no product of the peer reads P. tile_free: none reads P or dS, and its threads have read their parts.
    """

    q: cute.Tensor
    do: cute.Tensor
    k: cute.Tensor
    rotary_q: cute.Tensor
    rotary_k: cute.Tensor
    columns_q: cute.Tensor
    columns_do: cute.Tensor
    columns_rotary: cute.Tensor
    p: cute.Tensor
    ds: cute.Tensor
    deltas: cute.Pointer
    early: cute.Pointer
    early_full: cute.Pointer
    parts_full: cute.Pointer
    p_free: cute.Pointer
    tile_full: cute.Pointer
    tile_free: cute.Pointer


# -- Launch --------------------------------------------------------------------------------------------------------


@cute.jit
def launch(
    q: cute.Tensor, k: cute.Tensor, o: cute.Tensor, do: cute.Tensor, statistics: tuple, ds: cute.Tensor, sums: tuple,
    lists: tuple, numbers: tuple, stream: cuda.CUstream, config: cutlass.Constexpr,
):  # fmt: skip
    """Launches the kernel of the values of :attr:`GradientsConfig.parameters`."""
    element, major, shared = ELEMENT[config.dtype], OperandMajorMode, warpgroup.OperandSource.SMEM

    def product(kind, columns: int):
        return sm90.make_trivial_tiled_mma(element, element, kind, kind, F32, (1, 1, 1), (ROWS, columns), shared)

    *_, of_statistics, _, of_sums, of_lists, scalars = config.parameters
    given = by_name((*of_statistics, *of_sums, *scalars), (*statistics, *sums, *numbers))
    params = GradientParams(q, k, o, do, ds=ds, extra=optional_params(by_name(of_lists, lists)), **given)
    kernel.set_name_prefix(config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    tiles = (ds.shape[1] + HEADS - 1) // HEADS
    kernel(product(major.K, KEYS), product(major.MN, 2 * CHUNK), product(major.MN, NARROW), params, config).launch(
        grid=[ds.shape[0] * tiles, PAIR, 1],
        block=[config.threads, 1, 1],
        cluster=[1, PAIR, 1],
        min_blocks_per_mp=1,
        stream=stream,
    )


# -- Kernel --------------------------------------------------------------------------------------------------------


@cute.kernel
def kernel(
    scores: cute.TiledMma, wide: cute.TiledMma, narrow: cute.TiledMma, params: GradientParams, config: cutlass.Constexpr
):
    """The two CTAs of a query and 128 of its heads."""
    w = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
    work, smem = work_of(params.ds, params.k.shape[2], params.first, params.extra), allocate(config)
    init_barriers(smem)
    cute.arch.cluster_arrive()  # partner: statistics_of. This CTA has begun
    first, last = tiles_of_list(work.line, KEYS, params.extra)
    past, current, coming, places = new_found(), new_found(), new_found(), new_places()
    current.rows.fill(-1)  # before the first tile there is none
    entries = cute.make_rmem_tensor((2 * KEYS // WARP,), I32)
    read_entries(first, entries, work, params)
    look_up_tile(first, entries, places, work, params)
    for copy in gathering(smem, places, work, params):
        copy()
    find(coming, places)
    copy_heads(smem.q, params.q, work)
    copy_rotary_heads(smem.rotary_q, params.q, work)
    copy_heads(smem.do, params.do, work)
    lse2, delta = statistics_of(smem, w, work, params)
    read_entries(first + 1, entries, work, params)
    look_up_tile(first + 1, entries, places, work, params)
    s, dp = (cute.make_rmem_tensor(scores.partition_shape_C((ROWS, KEYS)), F32) for _ in range(2))
    sums = cute.make_rmem_tensor(wide.partition_shape_C((KEYS, 2 * CHUNK)), F32)
    rotary = cute.make_rmem_tensor(narrow.partition_shape_C((KEYS, NARROW)), F32)
    await_copies()
    begin_scores(scores, s, dp, smem, w, [])
    warpgroup.wait_group(0)
    cute.arch.sync_threads()
    for n in cutlass.range(first, last, unroll=1):
        phase = (n - first) % 2
        send_parts(smem.early, smem.early_full, rows_columns(s), work.rank)
        next_tile = [*gathering(smem, places, work, params), lambda n=n: read_entries(n + 2, entries, work, params)]
        begin_sums(wide, narrow, sums, rotary, smem, w, current, work, params, next_tile)  # of the tile before
        for x, y in ((past, current), (current, coming)):
            x.rows.store(y.rows.load())
            x.bits.store(y.bits.load())
        find(coming, places)
        warpgroup.wait_group(1)  # dV
        tell_peer(smem.p_free, work.rank)
        cute.arch.mbarrier_wait(smem.p_free, phase)  # no product of the peer reads P
        send_parts(place_of_p(smem), smem.parts_full, rows_columns(dp), work.rank)
        await_bytes(smem.early_full, PARTS, phase)
        found_s = whole_half(smem.early, rows_columns(s))
        await_bytes(smem.parts_full, PARTS, phase)
        found_dp = whole_half(place_of_p(smem), rows_columns(dp))
        words = rounded(found_s, found_dp, current, lse2, delta, params, config)
        warpgroup.wait_group(0)  # dK
        tell_peer(smem.tile_free, work.rank)
        await_copies()  # and no product of this CTA reads P and dS, and every thread has read its parts
        left = leave(smem, n, w, words, work, params)
        cute.arch.mbarrier_wait(smem.tile_free, phase)  # so it is in the peer
        send_tile(smem, left, work.rank)
        add_rotary(rows_columns(rotary), w, past, work, params)
        sums_of_past = adding(params.dk, rows_columns(sums), first_column(w, work), past, n, work)
        begin_scores(scores, s, dp, smem, w, sums_of_past)  # of the next tile, or for nobody
        look_up_tile(n + 2, entries, places, work, params)
        warpgroup.wait_group(0)  # S and dP
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()  # P and dS of this CTA have come, and no product of it reads K
        await_bytes(smem.tile_full, TILE, phase)
        cute.arch.fence_view_async_shared()
    begin_sums(wide, narrow, sums, rotary, smem, w, current, work, params, [])
    warpgroup.wait_group(0)
    add_rotary(rows_columns(rotary), w, current, work, params)
    add_rows(params.dk, rows_columns(sums), first_column(w, work), current, last, work)
    meet()  # the peer writes here no more


def allocate(config) -> PairStorage:
    """The storage, in the order in which :attr:`GradientsConfig.shared` counts it."""
    allocator, element = cutlass.utils.SmemAllocator(), ELEMENT[config.dtype]
    counts = GROUPS * VALUE_CHUNKS, GROUPS * VALUE_CHUNKS, VALUE_CHUNKS, GROUPS, GROUPS
    whole = cute.make_layout(ELEMENTS * sum(counts))
    start = allocator.allocate_tensor(element, whole, ALIGNMENT, swizzle_of(element)).iterator
    q, do, k, p, ds = (start + ELEMENTS * sum(counts[:n]) for n in range(len(counts)))
    # Rows of 64 bytes, swizzled in groups of eight.
    swizzle = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, element).inner
    whole = cute.make_layout(ROTARY_ELEMENTS * (GROUPS + 1))
    rotary = allocator.allocate_tensor(element, whole, ALIGNMENT, swizzle).iterator
    deltas = allocator.allocate_array(F32, PAIR * HEADS)
    early = allocator.allocate_array(F32, PARTS // 4)
    barriers = allocator.allocate_array(cutlass.Int64, BARRIERS)

    def columns(pointer) -> cute.Tensor:
        shape = (CHUNK, 2), (8, 8), (2, GROUPS)
        stride = (1, ELEMENTS), (CHUNK, 8 * CHUNK), (2 * ELEMENTS, VALUE_CHUNKS * ELEMENTS)
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))

    def one_chunk(pointer, width: int) -> cute.Tensor:
        layout = cute.make_layout((width, (8, 8), (1, GROUPS)), stride=(1, (width, 8 * width), (0, ROWS * width)))
        return cute.make_tensor(pointer, layout)

    def narrow(pointer, count: int) -> cute.Tensor:
        layout = cute.make_layout(((8, 8), NARROW, count), stride=((NARROW, 8 * NARROW), 1, ROTARY_ELEMENTS))
        return cute.make_tensor(pointer, layout)

    return PairStorage(
        chunked(q, counts[0]), chunked(do, counts[1]), chunked(k, counts[2]), narrow(rotary, GROUPS),
        narrow(rotary + ROTARY_ELEMENTS * GROUPS, 1), columns(q), columns(do), one_chunk(rotary, NARROW),
        one_chunk(p, CHUNK), one_chunk(ds, CHUNK), deltas, early, *(barriers + n for n in range(BARRIERS)),
    )  # fmt: skip


@cute.jit
def init_barriers(smem: PairStorage):
    """One thread sets how many arrivals turn each barrier; the threads of both CTAs see them once they have met."""
    if cute.arch.thread_idx()[0] == 0:
        for barrier in (smem.early_full, smem.parts_full, smem.tile_full):
            cute.arch.mbarrier_init(barrier, 1)  # and the bytes that the peer sends
        for barrier in (smem.p_free, smem.tile_free):
            cute.arch.mbarrier_init(barrier, 4 * GROUPS)  # the peer's warps
    cute.arch.mbarrier_init_fence()


def await_copies() -> None:
    """Waits until the rows have come that any thread of the CTA copies."""
    cute.arch.cp_async_wait_group(0)
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()


# -- The peer ------------------------------------------------------------------------------------------------------


@cute.jit
def await_bytes(barrier: cute.Pointer, count: cutlass.Constexpr, phase):
    """Waits until the peer's numbers have come, so many bytes."""
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, count)
    cute.arch.mbarrier_wait(barrier, phase)


@cute.jit
def tell_peer(barrier: cute.Pointer, rank):
    """A warp arrives at the peer's barrier."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        code = "mbarrier.arrive.shared::cluster.b64 _, [{$r0}];"
        cute.arch.inline_ptx(code, read_only_args=[in_peer(barrier.toint(), 1 - rank)])


def send_four(place, words: list, barrier) -> None:
    """Writes four words of 32 bits into the peer's shared memory, and counts them at its barrier."""
    code = (
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}}, [{$r5}];"
    )
    cute.arch.inline_ptx(code, read_only_args=[place, *words, barrier])


# -- Statistics of rows --------------------------------------------------------------------------------------------


def statistics_of(smem: PairStorage, w, work: Work, params: GradientParams) -> tuple[list, list]:
    """``(lse in base 2, delta)`` of a thread's two heads: delta = dO · O - dlse, of which each CTA computes its columns' part."""
    thread, vector, element = cute.arch.thread_idx()[0], PIECE // ELEMENT_BYTES, params.do.element_type
    row = thread // 2  # two threads have a head
    head = work.head * work.group + PICK.smaller(work.start + row, work.group - 1)
    total, columns = F32(0.0), VALUE_CHUNKS * CHUNK
    for n in range(columns // vector // 2):
        at = columns // vector * work.rank + 2 * n + thread % 2
        parts = []
        for x in (params.o, params.do):
            part = cute.make_rmem_tensor((vector,), element)
            cute.autovec_copy(cute.local_tile(x[0, work.row, head, None], (vector,), (at,)), part)
            parts.append(part.load().to(F32))
        total = total + (parts[0] * parts[1]).reduce(cute.ReductionOp.ADD, F32(0.0), 0)
    total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
    place = I32((smem.deltas + HEADS * work.rank + row).toint())
    cute.arch.cluster_wait()  # the peer has begun
    for at in (place, in_peer(place, 1 - work.rank)):
        cute.arch.inline_ptx("st.shared::cluster.f32 [{$r0}], {$r1};", read_only_args=[at, total])
    meet()
    queries, lse2, delta = params.lse.shape[2], [], []
    for r in range(2):
        row = ROWS * w + row_of(thread % 128, r)
        head = work.head * work.group + PICK.smaller(work.start + row, work.group - 1)
        place = work.row // queries, head, work.row % queries
        found = -params.dlse[place]
        for part in range(PAIR):
            at = I32((smem.deltas + HEADS * part + row).toint())
            found = found + cute.arch.inline_ptx(
                "ld.volatile.shared.f32 {$w0}, [{$r0}];", write_only_types=[F32], read_only_args=[at]
            )
        inside, lse = work.start + row < work.group, params.lse[place]
        put_delta(params.delta, place, found, both(inside, work.rank == 0))
        empty = cutlass.select_(inside, lse <= LOWEST, True)
        lse2.append(choose(empty, INF, lse * LOG2_E))
        delta.append(choose(empty, 0.0, found))
    return lse2, delta


@cute.jit
def put_delta(delta: cute.Tensor, place: tuple, value, wanted):
    """One thread of the four that hold a head writes its delta."""
    if cute.arch.thread_idx()[0] % 4 == 0 and wanted:
        delta[place] = value


# -- Scores --------------------------------------------------------------------------------------------------------


def begin_scores(mma: cute.TiledMma, s: cute.Tensor, dp: cute.Tensor, smem: PairStorage, w, between: list) -> None:
    """Issues the products of a warpgroup's parts of S and of dP, 64 heads by 64 keys, as two groups."""
    keys = mma.get_slice(0).partition_B(smem.k), mma.get_slice(0).partition_B(smem.rotary_k)
    warpgroup.fence()
    issue(mma, s, smem.q, VALUE_CHUNKS * w, keys[0], range(VALUE_CHUNKS), True, between)
    issue(mma, s, smem.rotary_q, w, keys[1], range(1), False, between)
    warpgroup.commit_group()
    warpgroup.fence()
    issue(mma, dp, smem.do, VALUE_CHUNKS * w, keys[0], range(VALUE_CHUNKS), True, between)
    warpgroup.commit_group()
    for do in between:
        do()


def issue(
    mma: cute.TiledMma, acc: cute.Tensor, left: cute.Tensor, first, keys: cute.Tensor, chunks: range, overwrite: bool, between: list
) -> None:  # fmt: skip
    """Issues the products of some chunks; those of the left operand are from ``first`` on. One after the other is done ``between``."""
    atom = cute.make_mma_atom(mma.op)
    rows, keys = mma.make_fragment_A(mma.get_slice(0).partition_A(left)), mma.make_fragment_B(keys)
    for n in chunks:
        for step in range(cute.size(rows, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, not overwrite or n + step > 0)
            cute.gemm(atom, acc, rows[None, None, step, first + n], keys[None, None, step, n], acc)
            if between:
                between.pop(0)()


def place_of_p(smem: PairStorage) -> cute.Pointer:
    """The place of P, for parts of dP that come before it."""
    return cute.recast_ptr(smem.p.iterator, dtype=F32)


def send_parts(place: cute.Pointer, barrier: cute.Pointer, x: cute.Tensor, rank) -> None:
    """Sends a thread's part of S or dP of the peer's keys to the thread of the same place there: 16 bytes of each lie side by side."""
    numbers = [x[r, HALF // 4 + c] for r in range(2) for c in range(HALF // 4)]
    at = in_peer(place.toint() + PIECE * cute.arch.thread_idx()[0], 1 - rank)
    counted = in_peer(barrier.toint(), 1 - rank)
    for n in range(0, len(numbers), 4):
        send_four(at + PIECE * 128 * GROUPS * (n // 4), [as_word(x) for x in numbers[n : n + 4]], counted)


def whole_half(place: cute.Pointer, x: cute.Tensor) -> list:
    """S or dP of this CTA's keys, by row: the thread's own part and the peer's."""
    code, each, taken = "ld.volatile.shared.v4.f32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];", HALF // 4, []
    for n in range(2 * each // 4):
        at = I32(place.toint() + PIECE * (cute.arch.thread_idx()[0] + 128 * GROUPS * n))
        taken += cute.arch.inline_ptx(code, write_only_types=[F32] * 4, read_only_args=[at])
    return [[x[r, c] + taken[r * each + c] for c in range(each)] for r in range(2)]


def as_word(number) -> I32:
    """The bits of an fp32 number."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[I32], read_only_args=[F32(number)])


def rounded(s: list, dp: list, found: Found, lse2: list, delta: list, params: GradientParams, config) -> list:
    """P and dS of this CTA's keys of a tile, rounded, by row: four words each, of which a thread of a quad has every fourth eight keys."""
    bits, words = found.bits[0] >> (cute.arch.thread_idx()[0] % 4 * 2), []
    for r in range(2):
        pairs = []
        for m in range(HALF // 4):
            p = cute.math.exp2(s[r][m] * params.scale2 - lse2[r], fastmath=True)
            p = choose(is_set([bits], 8 * (m // 2) + m % 2), p, 0.0)
            pairs.append((p, p * (dp[r][m] - delta[r]) * params.scale))
        each = [[pack(pairs[m][x], pairs[m + 1][x], config.dtype) for m in range(0, HALF // 4, 2)] for x in range(2)]
        words.append([transpose_quad(x) for x in each])
    return words


def leave(smem: PairStorage, n, w, words: list, work: Work, params: GradientParams) -> list:
    """Leaves P and dS of tile n in this CTA's shared memory, and dS in memory; returns the words with their places in the peer."""
    thread, left = cute.arch.thread_idx()[0] % 128, []
    lane = thread % 4
    for r in range(2):
        row = row_of(thread, r)
        for x, part in zip((smem.p, smem.ds), words[r], strict=True):
            start = x.iterator.toint() + ELEMENT_BYTES * (ELEMENTS * w + CHUNK * row)
            # These keys are the first ones here, and the last ones there.
            own, other = (I32(start + PIECE * ((unit + lane) ^ (row % 8))) for unit in (0, HALF // 8))
            code = "st.shared.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};"
            cute.arch.inline_ptx(code, read_only_args=[own, *part])
            left.append((other, part))
        head = work.start + ROWS * w + row
        row_of_ds = params.ds[work.number, PICK.smaller(head, work.group - 1), None].iterator
        put_words_if(head < work.group, row_of_ds + (KEYS * n + HALF * work.rank + 8 * lane), words[r][1])
    return left


def send_tile(smem: PairStorage, left: list, rank) -> None:
    """Sends what :func:`leave` left to the same places of the peer."""
    barrier = in_peer(smem.tile_full.toint(), 1 - rank)
    for place, words in left:
        send_four(in_peer(place, 1 - rank), words, barrier)


# -- Gradients of keys ---------------------------------------------------------------------------------------------


@cute.jit
def begin_sums(
    wide: cute.TiledMma, narrow: cute.TiledMma, sums: cute.Tensor, rotary: cute.Tensor, smem: PairStorage, w, found: Found, work: Work,
    params: GradientParams, between: cutlass.Constexpr,
):  # fmt: skip
    """Issues the products of dV and of dK, as two groups. ``sums`` get both; where dV has memory of its own, it is added there first."""
    issue_sums(wide, sums, smem.p, smem.columns_do, w, True, between)
    if params.joint == 0:
        warpgroup.wait_group(0)
        add_rows(params.dv, rows_columns(sums), first_column(w, work), found, I32(0), work)
        sums.fill(0.0)
    if w == 0:
        issue_sums(narrow, rotary, smem.ds, smem.columns_rotary, 0, True, [])
    issue_sums(wide, sums, smem.ds, smem.columns_q, w, False, between)


def issue_sums(
    mma: cute.TiledMma, acc: cute.Tensor, left: cute.Tensor, right: cute.Tensor, part, overwrite: bool, between: list
) -> None:
    """Issues the products of 64 keys with the heads of both warpgroups, as one group. One after the other is done ``between``."""
    mine, atom = mma.get_slice(0), cute.make_mma_atom(mma.op)
    turned, columns = mma.make_fragment_A(mine.partition_A(left)), mma.make_fragment_B(mine.partition_B(right))
    warpgroup.fence()
    for w in range(GROUPS):
        for step in range(ROWS // 16):
            atom.set(warpgroup.Field.ACCUMULATE, not overwrite or w + step > 0)
            cute.gemm(atom, acc, turned[None, None, step, (0, w)], columns[None, None, step, (part, w)], acc)
            if between:
                between.pop(0)()
    warpgroup.commit_group()


@cute.jit
def add_rotary(rotary: cute.Tensor, w, found: Found, work: Work, params: GradientParams):
    """The first warpgroup adds the rotary columns to dK."""
    if w == 0:
        add_rows(params.dk, rotary, ROTARY * CHUNK + NARROW * work.rank, found, I32(0), work)


def first_column(w, work: Work):
    """The first column of a warpgroup's sums."""
    return CHUNK * (VALUE_CHUNKS * work.rank + 2 * w)


def add_rows(total: cute.Tensor, acc: cute.Tensor, first, found: Found, n, work: Work) -> None:
    """Adds the rows of two of a thread's keys, from column ``first`` on, to memory."""
    for add in adding(total, acc, first, found, n, work):
        add()


def adding(total: cute.Tensor, acc: cute.Tensor, first, found: Found, n, work: Work) -> list[Callable[[], None]]:
    """What :func:`add_rows` does, in parts: four columns of a row at a time, for which neighbours change halves.

    No branch: zeros are added where there is no key, each to another row.
    """
    lane = cute.arch.thread_idx()[0] % 4
    odd, parts = lane % 2 == 1, []

    def add(place, numbers: list) -> None:
        code = "red.global.add.v4.f32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};"
        cute.arch.inline_ptx(code, read_only_args=[place, *numbers])

    for r in range(2):
        row, seen = found.rows[r], found.rows[r] >= 0
        none = (n * KEYS + row_of(cute.arch.thread_idx()[0] % 128, r)) % total.shape[0]
        start = total[cutlass.select_(seen, row, I32(none)), work.head, None].iterator + first
        place = start.toint() + 4 * (8 * (lane % 2) + 4 * (lane // 2))
        for c in range(0, cute.size(acc, mode=[1]), 4):
            low, high = [[choose(seen, acc[r, c + m + x], 0.0) for x in range(2)] for m in (0, 2)]
            given = [cute.arch.shuffle_sync_bfly(choose(odd, x, y), offset=1) for x, y in zip(low, high, strict=True)]
            numbers = [choose(odd, x, y) for x, y in zip(given, low, strict=True)]
            numbers += [choose(odd, y, x) for x, y in zip(given, high, strict=True)]
            parts.append(partial(add, place + 16 * c, numbers))
    return parts
