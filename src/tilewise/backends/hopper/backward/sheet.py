"""dQ = scale · dS K over query tiles on Hopper (sm_90a), where the pass over keys has kept dS; docs/algorithm.md, (15).

The sheet holds dSᵀ, rounded as its products take it, in blocks of 64 keys x 64 queries, each as it will lie in shared memory: the copy
engine brings the blocks of a tile's queries at once. Nobody writes blocks that the pass over keys does not visit, and nobody reads them:
:func:`schedule.seen_blocks` tells none that :func:`schedule.query_blocks` does not tell. So a head's gradients take five products, not
seven, each sum in one order, for 2 bytes a pair of memory for as many heads as one launch has
(:mod:`tilewise.backends.hopper.host.portions`).

Roles of a CTA of ``1 + W`` warpgroups, persistent over tiles of ``64 W`` queries by a part of dQ's columns::

    warp 0       load      dSᵀ and K of 64 keys each, block by block; it takes packed tiles from a queue
    warpgroups   compute   dQ += dS K of 64 queries each; dQ goes from registers to global memory

mbarriers (arrivals in brackets), each waited for by the other side::

    full[stage]   (1 + bytes of both)      load -> compute      empty[stage]  (every computing warp)  compute -> load
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import LayoutEnum

from tilewise.backends.hopper.backward import halves, query_tiles
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.dq_accumulate import STORE
from tilewise.backends.hopper.backward.fragments import (
    allocate_elements,
    begin_products,
    rows_first,
    stage_of,
    store_fragment,
    transposed,
    warp_and_warpgroup,
    with_tma_layout,
)
from tilewise.backends.hopper.backward.key_tiles import KeyTile
from tilewise.backends.hopper.backward.params import BackwardParams, number_band, row_band
from tilewise.backends.hopper.backward.sequences import PackedSequence, seqlen_info
from tilewise.backends.hopper.backward.tiles import SHEET_BLOCK, SHEET_MARGIN
from tilewise.backends.hopper.config import ELEMENT_BYTES, ROWS
from tilewise.backends.hopper.forward.epilogue import put_columns
from tilewise.backends.hopper.kit import packed, schedule
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.instructions import pack, put_four
from tilewise.backends.hopper.kit.operands import words
from tilewise.backends.hopper.kit.ring import PipelineState, acquire, new_reader, new_writer, release
from tilewise.backends.hopper.kit.scheduler import (
    PICK,
    QUEUE_WORDS,
    QueueSlots,
    TileScheduler,
    each_queued,
    each_tile,
    init_queue_slots,
    queue_slots,
    take_queued,
)
from tilewise.backends.hopper.kit.tiles import (
    QueryTile,
    constant_column,
    row_of,
    rows_columns,
    staged_layout,
    tma_tiles,
    transpose_quad,
)

COPY_BARRIER = 3  # named barrier of the warpgroup that keeps dS

# -- What the pass over keys keeps ---------------------------------------------------------------------------------


def put_ds(ds: cute.Tensor, sheet: cute.Tensor, key_tile: KeyTile, m, half: I32, params: BackwardParams) -> None:
    """Writes a thread's operand dSᵀ of query block m, 64 keys x 64 queries, to the sheet from registers, where two CTAs have the same: one
    of the thread's two rows each, ``half``. Keys past the last one get zeros: their K is zero, and what became of their scores may be
    infinite.
    """
    thread, found = cute.arch.thread_idx()[0] % 128, words(ds)
    row = row_of(thread, half)
    seen = key_tile.column + row < params.seqlen_k
    block = block_of(sheet, key_tile, m, params)
    for first in range(0, 8, 4):
        # Four words of two queries each, 8 queries apart: 32 queries of the quad.
        pairs = [(found[2 * c], found[2 * c + 1]) for c in range(first, first + 4)]
        mine = [I32(cutlass.select_(half == 0, *pair)) for pair in pairs]
        mine = transpose_quad([I32(cutlass.select_(seen, word, I32(0))) for word in mine])
        # 16 bytes, at the place that the swizzle of 128 bytes gives them in a row.
        put_four(block + (ROWS * row + 8 * ((first + thread % 4) ^ (row % 8))), mine)


def block_of(sheet: cute.Tensor, key_tile: KeyTile, m, params: BackwardParams) -> cute.Pointer:
    """The place of query block m of a tile of keys in the sheet."""
    return place_of(sheet, key_tile, key_tile.column // ROWS, m, params)


def place_of(sheet: cute.Tensor, tile: KeyTile | QueryTile, n, m, params: BackwardParams) -> cute.Pointer:
    """The place of a block, the n-th of the keys and the m-th of the queries of a tile's query head, or of its packed sequence."""
    if tile.seqlen is None:
        return sheet[tile.batch * params.heads_q + tile.head, n, m, None].iterator
    # cu_seqlens is checked by no host: of lengths that cannot be, no block lies outside the sheet. Those of a tile follow the first.
    last = sheet.shape[0] - SHEET_MARGIN
    return sheet[PICK.larger(PICK.smaller(tile.seqlen.sheet.block(tile.head, n, m), last), 0), None].iterator


@cute.jit
def copy_ds(
    ds: cute.Tensor, mma: cute.TiledMma, kept: cute.Tensor, count, sheet: cute.Tensor, key_tile: KeyTile, m, params: BackwardParams,
    config: cutlass.Constexpr,
):  # fmt: skip
    """Copies a warpgroup's operand dSᵀ of query block m to the sheet, as :func:`put_ds` does, by way of shared memory, ``kept``: (64 keys,
    64 queries, 2), which the copy engine reads. ``count``: how many blocks the warpgroup has done."""
    thread, found = cute.arch.thread_idx()[0] % 128, words(ds)
    zeroed = cute.make_rmem_tensor_like(found)
    # Words of the thread's two rows in turn; dK's product may still read ds itself.
    for n in range(cute.size(found)):
        seen = key_tile.column + row_of(thread, n % 2) < params.seqlen_k
        zeroed[n] = I32(cutlass.select_(seen, found[n], I32(0)))
    tile = kept[None, None, count % 2]
    if thread == 0:
        cute.arch.cp_async_bulk_wait_group(1, read=True)  # the copy before the last has read its memory
    # Partner: the same warpgroup; thread 0 has waited.
    cute.arch.barrier(barrier_id=COPY_BARRIER, number_of_threads=128)
    # 64 keys x 64 queries in the element type, by stmatrix.
    fragment = cute.make_tensor(cute.recast_ptr(zeroed.iterator, dtype=ELEMENT[config.dtype]), ds.layout)
    store_fragment(fragment, mma, tile, config.dtype)
    # The copy engine reads what all four warps have written.
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=COPY_BARRIER, number_of_threads=128)
    if thread == 0:
        # A whole block: 8 KB that lie side by side in both memories.
        target = block_of(sheet, key_tile, m, params).toint()
        operands = [target, I32(tile.iterator.toint()), I32(ELEMENT_BYTES * SHEET_BLOCK)]
        cute.arch.inline_ptx(STORE + " [{$r0}], [{$r1}], {$r2};", read_only_args=operands)
        cute.arch.cp_async_bulk_commit_group()


def await_copies() -> None:
    """Waits until all blocks of dS have arrived in the sheet, before a warpgroup ends."""
    cute.arch.cp_async_bulk_wait_group(0, read=False)


# -- Launch and kernel ---------------------------------------------------------------------------------------------


class SheetStorage(NamedTuple):
    """The ring and its barriers in shared memory.

    Attributes:
        ds: the blocks of a stage, one for each warpgroup, stage by stage. k: (64 keys, width, stage). full, empty: barriers of a stage.
        slots: of packed tiles, which come from a queue.
    """

    ds: cute.Pointer
    k: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    slots: QueueSlots


class DqTensors(NamedTuple):
    """The tensors that the pass writes.

    Attributes:
        dq: (batch, seqlen_q, heads_q, head_dim).
        sums: (batch x heads_q, tile of queries, part x warpgroup, element), fp32: dQ of the keys before those of the launch, and of these
            too, in the order of the accumulators' registers. Only where a launch may have some of the keys.
    """

    dq: cute.Tensor
    sums: cute.Tensor | None


def launch(
    sheet: cute.Tensor, k: cute.Tensor, made: DqTensors, params: BackwardParams, ctas, stream, config: Backward
) -> None:
    """Launches the kernel, within a traced function of the host's. ``sheet``: (batch x heads_q, key block, query block, element of the
    block), of packed sequences (block, element); ``k``: (batch, seqlen_k, heads_k, head_dim)."""
    tiles, element = config.queries, ELEMENT[config.dtype]
    block = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (ROWS, tiles.tile_n, tiles.width), element, 1)
    layout = staged_layout(block, tiles.stages, tiles.k_elements)
    box, atom = (tiles.tile_n, tiles.width), cpasync.CopyBulkTensorTileG2SOp()
    k_tma = cpasync.make_tiled_tma_atom(atom, rows_first(k, config), layout, box)
    # dQ += dS K, 64 x width: both operands lie in shared memory, and are seen transposed.
    major = OperandMajorMode.MN
    mma = sm90.make_trivial_tiled_mma(element, element, major, major, F32, (1, 1, 1), (ROWS, tiles.width))
    kernel.set_name_prefix(f"{config.name}_queries", remove_cutlass_symbol=True, keep_mangled_name=False)
    kernel(k_tma, sheet, made, mma, params, config).launch(
        grid=[ctas, 1, 1], block=[tiles.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=True
    )


@cute.kernel
def kernel(
    k: cpasync.TmaInfo, sheet: cute.Tensor, made: DqTensors, mma: cute.TiledMma, params: BackwardParams, config: cutlass.Constexpr
):  # fmt: skip
    """Gives every warp its role."""
    tiles, (warp, group) = config.queries, warp_and_warpgroup()
    smem = allocate(k, config)
    init_barriers(smem, config)
    cute.arch.griddepcontrol_wait()  # dS is there when the pass over keys has ended
    if group == 0:
        cute.arch.setmaxregister_decrease(tiles.registers_load)
        if warp == 0:
            load(k, sheet, smem, params, config)
    else:
        cute.arch.setmaxregister_increase(tiles.registers)
        compute(smem, group - 1, made, mma, params, config)


def allocate(k: cpasync.TmaInfo, config: Backward) -> SheetStorage:
    """Allocates in the order of :attr:`SheetTiles.shared`."""
    allocator, tiles = cutlass.utils.SmemAllocator(), config.queries
    full = allocator.allocate_array(cutlass.Int64, 2 * tiles.stages + (QUEUE_WORDS if config.packed else 0))
    # Blocks of dS are swizzled as wgmma reads them, 1024 bytes at a time: their places are multiples of 8 KB.
    ds, ring = (
        allocate_elements(allocator, tiles.stages * n, config.dtype) for n in (tiles.ds_elements, tiles.k_elements)
    )
    return SheetStorage(ds, with_tma_layout(ring, k), full, full + tiles.stages, queue_slots(full + 2 * tiles.stages))


@cute.jit
def init_barriers(smem: SheetStorage, config: cutlass.Constexpr):
    """One thread sets every barrier's count of arrivals; then all threads see them."""
    tiles = config.queries
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for n in cutlass.range_constexpr(tiles.stages):
                cute.arch.mbarrier_init(smem.full + n, 1)  # load, and bytes -> warpgroups
                cute.arch.mbarrier_init(smem.empty + n, 4 * tiles.warpgroups)  # every computing warp -> load
            if cutlass.const_expr(config.packed):
                init_queue_slots(smem.slots, 4 * tiles.warpgroups)
    halves.publish_barriers(None)


# -- The order of tiles --------------------------------------------------------------------------------------------


def tile_order(params: BackwardParams, config: Backward) -> schedule.Order:
    """The order of all tiles, the parts of one after the other; the last rows first, since under a causal mask they see most."""
    m_blocks = (params.seqlen_q + config.queries.tile_m - 1) // config.queries.tile_m
    return schedule.Order(m_blocks, params.batch * params.heads_q, params.section, config.form != "full")


def rounds_of(params: BackwardParams, config: Backward):
    """How many tiles this CTA has."""
    tiles = tile_order(params, config).tiles * config.queries.parts
    return schedule.rounds(cute.arch.block_idx()[0], cute.arch.grid_dim()[0], tiles)


def tile_of(round_, params: BackwardParams, config: Backward) -> QueryTile:
    """This CTA's tile in a round; ``piece`` is its part of dQ's columns."""
    tiles, n = config.queries, schedule.nth(cute.arch.block_idx()[0], cute.arch.grid_dim()[0], round_)
    m_block, head = schedule.tile_at(n // tiles.parts, tile_order(params, config), PICK)
    row, heads = m_block * tiles.tile_m, params.heads_q
    band = row_band(head // heads, head % heads, params, config)
    start, stop = schedule.seen_blocks(row, tiles.tile_m, tiles.tile_n, band, PICK)
    return QueryTile(row, head % heads, head // heads, I32(start), I32(stop), piece=n % tiles.parts)


def place_packed(tile: packed.PackedTile, params: BackwardParams, config: Backward) -> tuple[QueryTile, BackwardParams]:
    """A packed tile, and the numbers of its sequence."""
    tiles, sequence = config.queries, PackedSequence.of(tile.sequence, params, config, rest_q=True)
    numbers, row = sequence.numbers, tile.row * tiles.tile_m
    start, stop = schedule.seen_blocks(row, tiles.tile_m, tiles.tile_n, number_band(numbers, config), PICK)
    seqlen = seqlen_info(tile.sequence, sequence, sequence.seen, params, config)
    head, piece = tile.head // tiles.parts, tile.head % tiles.parts
    return QueryTile(row, head, tile.sequence, I32(start), I32(stop), seqlen=seqlen, piece=piece), numbers


SCHEDULER = TileScheduler(rounds_of, tile_of, query_tiles.packed_tile, place_packed)


# -- Load ----------------------------------------------------------------------------------------------------------


@cute.jit
def load(k: cpasync.TmaInfo, sheet: cute.Tensor, smem: SheetStorage, params: BackwardParams, config: cutlass.Constexpr):
    """One warp loads dSᵀ and K of every tile's key blocks."""

    def load_tile(tile: QueryTile, numbers, phase, state: PipelineState) -> PipelineState:
        return load_blocks(k, sheet, smem, tile, state, numbers, config)

    if cutlass.const_expr(config.packed):
        take_queued(SCHEDULER, smem.slots, params, config, load_tile, new_writer())
    else:
        each_tile(SCHEDULER, None, params, config, load_tile, new_writer())


@cute.jit
def load_blocks(
    k: cpasync.TmaInfo, sheet: cute.Tensor, smem: SheetStorage, tile: QueryTile, state: PipelineState,
    params: BackwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """Loads a tile's key blocks. Returns the ring's state."""
    tiles = config.queries
    box = tiles.tile_n, tiles.width
    gK, sK = tma_tiles(k, box, (None, tile.piece), tile.head // params.group, tile.keys, smem.k)
    size = ELEMENT_BYTES * (tiles.ds_elements + tiles.k_elements)
    # From the first block on: dQ of one order of sums, whatever the launch has besides.
    for n in cutlass.range(tile.start, tile.stop, unroll=1):
        full = smem.full + state.index
        acquire(smem.empty, state)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
            # dSᵀ, a block of 64 x 64 for each warpgroup, which lie side by side.
            blocks = place_of(sheet, tile, n, tile.row // ROWS, params)
            fetch_blocks(blocks, smem.ds + tiles.ds_elements * state.index, full, config)
        # K, 64 x width: one barrier for both.
        cute.copy(k.atom, gK[None, n], sK[None, state.index], tma_bar_ptr=full)
        state = state.advance(tiles.stages)
    return state


def fetch_blocks(blocks: cute.Pointer, place: cute.Pointer, full, config: Backward) -> None:
    """One thread starts a bulk copy of a stage's blocks of dSᵀ."""
    atom, layout = (
        cute.make_copy_atom(cpasync.CopyBulkG2SOp(), ELEMENT[config.dtype]),
        cute.make_layout(config.queries.ds_elements),
    )
    cute.copy(atom, cute.make_tensor(blocks, layout), cute.make_tensor(place, layout), mbar_ptr=full)


# -- dQ ------------------------------------------------------------------------------------------------------------


class SheetOperands(NamedTuple):
    """The operands of one warpgroup: dS, 64 queries x 64 keys, and K as 64 keys x width, (1, 1, k steps, stage); dQ, 64 x width, fp32."""

    mma: cute.TiledMma
    ds: cute.Tensor
    k: cute.Tensor
    dq: cute.Tensor


def make_operands(mma: cute.TiledMma, smem: SheetStorage, w, config: Backward) -> SheetOperands:
    """The operands of warpgroup w."""
    tiles, thread = config.queries, mma.get_slice(0)
    # The blocks of a stage lie side by side: the w-th is this warpgroup's.
    block = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (ROWS, tiles.tile_n, ROWS), ELEMENT[config.dtype], 1)
    mine = staged_layout(block, tiles.stages, tiles.ds_elements)  # (64 keys, 64 queries, stage) of this warpgroup
    mine = cute.make_tensor(cute.recast_ptr(smem.ds + SHEET_BLOCK * w, mine.inner), mine.outer)
    return SheetOperands(
        mma,
        mma.make_fragment_A(thread.partition_A(transposed(mine))),
        mma.make_fragment_B(thread.partition_B(transposed(smem.k))),
        cute.make_rmem_tensor(mma.partition_shape_C((ROWS, tiles.width)), F32),
    )


@cute.jit
def compute(
    smem: SheetStorage, w, made: DqTensors, mma: cute.TiledMma, params: BackwardParams, config: cutlass.Constexpr
):
    """One warpgroup makes dQ of 64 queries of each tile."""
    operands = make_operands(mma, smem, w, config)

    def compute_one(tile: QueryTile, numbers, phase, state: PipelineState) -> PipelineState:
        return compute_tile(operands, smem, w, made, tile, state, numbers, config)

    if cutlass.const_expr(config.packed):
        each_queued(SCHEDULER, smem.slots, params, config, compute_one, new_reader())
    else:
        each_tile(SCHEDULER, None, params, config, compute_one, new_reader())


@cute.jit
def compute_tile(
    operands: SheetOperands, smem: SheetStorage, w, made: DqTensors, tile: QueryTile, state: PipelineState,
    params: BackwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """Makes dQ of one tile, and returns the state after it."""
    tiles, row = config.queries, tile.row + w * ROWS
    start, stop = schedule.seen_blocks(row, ROWS, tiles.tile_n, row_band(tile.batch, tile.head, params, config), PICK)
    sums = sums_of(tile, w, made.sums, params, config) if config.continues else None
    operands.dq.fill(0.0)
    # Its rows may see less than the tile's others: of those blocks nothing was written for it.
    state = skip(start - tile.start, smem, state, config)
    for step in cutlass.range(stop - start, unroll=1):
        # Partner: load_blocks, and the bytes of both copies.
        acquire(smem.full, state)
        # dQ += dS K, 64 x width
        ds, k = stage_of(operands.ds, state.index), stage_of(operands.k, state.index)
        begin_products(operands.mma, operands.dq, [(ds, k)], overwrite=False)
        warpgroup.wait_group(1)  # the product of the block before
        release_before(smem.empty, state, step, config)
        state = state.advance(tiles.stages)
    warpgroup.wait_group(0)
    release_before(smem.empty, state, stop - start, config)
    state = skip(tile.stop - stop, smem, state, config)
    if cutlass.const_expr(config.continues):
        add_sums(operands.dq, sums, params.extra.resumes)
        store(operands.dq, made.dq, sums, tile, row, params, config)
    else:
        put_rows(operands.dq, made.dq, tile, row, params, config)
    return state


@cute.jit
def release_before(empty, state: PipelineState, count, config: cutlass.Constexpr):
    """Releases the stage before the state's, if the tile had one: ``count`` of its blocks came before."""
    if count > 0:
        release(empty + (state.index + config.queries.stages - 1) % config.queries.stages)


@cute.jit
def skip(blocks, smem: SheetStorage, state: PipelineState, config: cutlass.Constexpr) -> PipelineState:
    """Releases the stages of blocks of which the warpgroup sees nothing, as they arrive."""
    for _ in cutlass.range(blocks, unroll=1):
        acquire(smem.full, state)
        release(smem.empty + state.index)
        state = state.advance(config.queries.stages)
    return state


# -- dQ of earlier keys, and where it goes -------------------------------------------------------------------------


def sums_of(tile: QueryTile, w, sums: cute.Tensor, params: BackwardParams, config: Backward) -> cute.Tensor:
    """A thread's sums of a tile, (4, n): those of all threads lie side by side, 16 bytes each."""
    tiles, head = config.queries, tile.batch * params.heads_q + tile.head
    place = head, tile.row // tiles.tile_m, tile.piece * tiles.warpgroups + w, None
    layout = cute.make_layout((4, 128, tiles.width // 8))  # 64 x width elements
    return cute.make_tensor(sums[place].iterator, layout)[None, cute.arch.thread_idx()[0] % 128, None]


def in_fours(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator's numbers in the registers' order, (4, n)."""
    return cute.make_tensor(acc.iterator, cute.make_layout((4, cute.size(acc) // 4)))


@cute.jit
def add_sums(acc: cute.Tensor, sums: cute.Tensor, resumes):
    """Adds the sums of the keys before, if there are such."""
    # After the products: a branch before them makes ptxas serialise every wgmma.
    if resumes != 0:
        for n in cutlass.range_constexpr(cute.size(acc) // 4):
            before = cute.make_rmem_tensor((4,), F32)
            cute.autovec_copy(sums[None, n], before)
            for m in cutlass.range_constexpr(4):
                acc[4 * n + m] = acc[4 * n + m] + before[m]


@cute.jit
def store(
    acc: cute.Tensor, dq: cute.Tensor, sums: cute.Tensor, tile: QueryTile, row, params: BackwardParams, config: cutlass.Constexpr
):  # fmt: skip
    """Keeps dQ of the keys so far as it is, where others follow, or of all keys as the result."""
    if params.extra.suspends != 0:
        cute.autovec_copy(in_fours(acc), sums)
    else:
        put_rows(acc, dq, tile, row, params, config)


def put_rows(acc: cute.Tensor, dq: cute.Tensor, tile: QueryTile, row, params: BackwardParams, config: Backward) -> None:
    """Scales and rounds dQ, and writes it to global memory: 16 bytes of a row by each thread and store, a quad's side by side."""
    thread, values = cute.arch.thread_idx()[0] % 128, rows_columns(acc)
    column = config.queries.width * tile.piece + 8 * (thread % 4)
    for r in range(2):
        i = row + row_of(thread, r)
        place, inside = (tile.batch, tile.head, i), i < params.seqlen_q
        if config.packed:
            place = 0, tile.head, tile.rows.start + i
        for first in range(0, cute.size(values, mode=[1]), 8):  # four pairs of columns: 32 of the quad
            scaled = [values[r, first + n] * params.scale for n in range(8)]
            found = transpose_quad([pack(*scaled[n : n + 2], config.dtype) for n in range(0, 8, 2)])
            put_columns(dq, place, inside, column + constant_column(first), found)
