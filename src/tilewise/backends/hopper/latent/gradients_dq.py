"""dQ = dS K of latent attention over selected keys, on Hopper (sm_90a), of the dS that another kernel has left.

A CTA has a query, 128 of its heads, half of V's columns and all tiles of 64 keys of its list. Every other CTA has the rotary columns too.
Each of its two warpgroups has 64 heads. All threads copy the rows of K and of dS two tiles ahead.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from tilewise.backends.hopper.config import ALIGNMENT, ELEMENT_BYTES, ROWS
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.instructions import both, pack, put_words_if
from tilewise.backends.hopper.kit.lists import PIECE, find_rows, key_at, tiles_of_list
from tilewise.backends.hopper.kit.params import OptionalParams, by_name, optional_params
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.tiles import row_of, rows_columns, transpose_quad
from tilewise.backends.hopper.latent.config import CHUNK, KEYS, PAIR
from tilewise.backends.hopper.latent.gradients_config import GROUPS, HEADS, KEY_CHUNKS, STAGES, VALUE_CHUNKS
from tilewise.backends.hopper.latent.gradients_work import APART, LANES, ROTARY, Work, copy_row, work_of
from tilewise.backends.hopper.latent.storage import ELEMENTS, chunked, swizzle_of

AHEAD = STAGES - 2  # tiles: the products of the one before may still read their stage


class QueryParams(NamedTuple):
    """The numbers and tensors of a launch, as :attr:`GradientsConfig.parameters` has them."""

    ds: cute.Tensor
    k: cute.Tensor
    dq: cute.Tensor
    first: I32
    extra: OptionalParams


class DqStorage(NamedTuple):
    """Shared memory.

    Attributes:
        ds: (64, 64, warpgroup of a stage). k: (64, 64, chunk of a stage). wide: of k (column, key, (pair of chunks, stage)), as a right
            operand; narrow: of its last chunk.
    """

    ds: cute.Tensor
    k: cute.Tensor
    wide: cute.Tensor
    narrow: cute.Tensor


@cute.jit
def launch(
    ds: cute.Tensor, k: cute.Tensor, dq: cute.Tensor, lists: tuple, numbers: tuple, stream: cuda.CUstream, config: cutlass.Constexpr
):  # fmt: skip
    """Launches the kernel of the values of :attr:`GradientsConfig.parameters`."""
    element, major, shared = ELEMENT[config.dtype], OperandMajorMode, warpgroup.OperandSource.SMEM

    def product(columns: int):
        return sm90.make_trivial_tiled_mma(element, element, major.K, major.MN, F32, (1, 1, 1), (ROWS, columns), shared)

    *_, of_lists, scalars = config.parameters
    params = QueryParams(ds, k, dq, extra=optional_params(by_name(of_lists, lists)), **by_name(scalars, numbers))
    kernel.set_name_prefix(config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    tiles = (ds.shape[1] + HEADS - 1) // HEADS
    kernel(product(2 * CHUNK), product(CHUNK), params, config).launch(
        grid=[ds.shape[0] * tiles, PAIR, 1], block=[config.threads, 1, 1], min_blocks_per_mp=1, stream=stream
    )


@cute.kernel
def kernel(wide: cute.TiledMma, narrow: cute.TiledMma, params: QueryParams, config: cutlass.Constexpr):
    """A CTA: dQ of 128 heads of a query, of half of the columns."""
    w = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
    work, smem = work_of(params.ds, params.k.shape[2], params.first, params.extra), allocate(config)
    first, last = tiles_of_list(work.line, KEYS, params.extra)
    rows = cute.make_rmem_tensor((KEYS // APART,), I32)
    sums = [cute.make_rmem_tensor(wide.partition_shape_C((ROWS, 2 * CHUNK)), F32) for _ in range(2)]
    rotary = cute.make_rmem_tensor(narrow.partition_shape_C((ROWS, CHUNK)), F32)
    for x in (*sums, rotary):
        x.fill(0.0)
    for n in cutlass.range_constexpr(AHEAD):
        look_up(first + n, rows, work, params)
        bring(smem, n, first + n, last, rows, work, params)
    look_up(first + AHEAD, rows, work, params)
    for n in cutlass.range(first, last, unroll=1):
        step = n - first
        cute.arch.cp_async_wait_group(AHEAD - 1)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()  # tile n has come, and the products of the tile before the last one are done
        begin(wide, narrow, sums, rotary, smem, step % STAGES, w, work.rank)
        bring(smem, (step + AHEAD) % STAGES, n + AHEAD, last, rows, work, params)
        look_up(n + AHEAD + 1, rows, work, params)
        warpgroup.wait_group(1)
    warpgroup.wait_group(0)
    for n in cutlass.range_constexpr(2):
        put_columns(rows_columns(sums[n]), VALUE_CHUNKS * work.rank + 2 * n, w, work, params, config)
    if work.rank == 0:
        put_columns(rows_columns(rotary), ROTARY, w, work, params, config)


def allocate(config) -> DqStorage:
    """The storage, in the order in which :attr:`GradientsConfig.shared` counts it."""
    allocator, element = cutlass.utils.SmemAllocator(), ELEMENT[config.dtype]
    whole = cute.make_layout(ELEMENTS * STAGES * (KEY_CHUNKS + GROUPS))
    k = allocator.allocate_tensor(element, whole, ALIGNMENT, swizzle_of(element)).iterator
    ds, stage = k + ELEMENTS * STAGES * KEY_CHUNKS, KEY_CHUNKS * ELEMENTS
    pairs = cute.make_layout(
        ((CHUNK, 2), (8, 8), (2, STAGES)), stride=((1, ELEMENTS), (CHUNK, 8 * CHUNK), (2 * ELEMENTS, stage))
    )
    last = cute.make_layout((CHUNK, (8, 8), STAGES), stride=(1, (CHUNK, 8 * CHUNK), stage))
    narrow = cute.make_tensor(k + ELEMENTS * VALUE_CHUNKS, last)
    return DqStorage(chunked(ds, STAGES * GROUPS), chunked(k, STAGES * KEY_CHUNKS), cute.make_tensor(k, pairs), narrow)


def look_up(n, rows: cute.Tensor, work: Work, params: QueryParams) -> None:
    """Looks up the rows of k of tile n that a thread brings: -1 where the query sees no key."""
    for m in range(KEYS // APART):
        key, there = key_at(n * KEYS + APART * m + cute.arch.thread_idx()[0] // LANES, work.line, params.extra)
        seen = both(there, both(key >= work.line.lo, key < work.line.hi))
        rows[m] = cutlass.select_(seen, I32(key), I32(-1))
    find_rows(rows, KEYS // APART, work.line, params.extra)


def chunk_of(chunk: int, rank):
    """``(chunk of all columns, whether this CTA has it)`` of its own n-th one; where it has none, any other."""
    if chunk < VALUE_CHUNKS:
        return VALUE_CHUNKS * rank + chunk, None
    return I32(ROTARY), rank == 0


@cute.jit
def bring(smem: DqStorage, stage, n, last, rows: cute.Tensor, work: Work, params: QueryParams):
    """Starts the copies of tile n of K and dS, if there is such a tile; the group of these copies ends."""
    if n < last:
        thread = cute.arch.thread_idx()[0]
        for m in cutlass.range_constexpr(KEYS // APART):
            # Row 0 stands for one that is not there, so that every address is inside the tensor.
            start = params.k[PICK.larger(rows[m], 0), 0, work.head, None].iterator.toint()
            for c in cutlass.range_constexpr(KEY_CHUNKS):
                chunk, own = chunk_of(c, work.rank)
                wanted = rows[m] >= 0 if own is None else both(rows[m] >= 0, own)
                copy_row(
                    smem.k,
                    KEY_CHUNKS * stage + c,
                    APART * m + thread // LANES,
                    start + ELEMENT_BYTES * CHUNK * chunk,
                    wanted,
                )
        for m in cutlass.range_constexpr(HEADS // APART):
            row = APART * m + thread // LANES
            head = work.start + row
            start = params.ds[work.number, PICK.smaller(head, work.group - 1), None].iterator + KEYS * n
            copy_row(smem.ds, GROUPS * stage + APART * m // ROWS, row % ROWS, start.toint(), head < work.group)
    cute.arch.cp_async_commit_group()


@cute.jit
def begin(wide: cute.TiledMma, narrow: cute.TiledMma, sums: list, rotary: cute.Tensor, smem: DqStorage, stage, w, rank):
    """Issues the products of a tile, of a warpgroup's 64 heads, as one group."""
    warpgroup.fence()
    if rank == 0:
        issue(narrow, rotary, smem.ds, GROUPS * stage + w, smem.narrow, stage)
    for n in cutlass.range_constexpr(2):
        issue(wide, sums[n], smem.ds, GROUPS * stage + w, smem.wide, (n, stage))
    warpgroup.commit_group()


def issue(mma: cute.TiledMma, acc: cute.Tensor, left: cute.Tensor, block, right: cute.Tensor, place) -> None:
    """Issues ``acc += dS K``."""
    mine, atom = mma.get_slice(0), cute.make_mma_atom(mma.op)
    heads, columns = mma.make_fragment_A(mine.partition_A(left)), mma.make_fragment_B(mine.partition_B(right))
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for step in range(KEYS // 16):
        cute.gemm(atom, acc, heads[None, None, step, block], columns[None, None, step, place], acc)


def put_columns(acc: cute.Tensor, chunk: int, w, work: Work, params: QueryParams, config) -> None:
    """Writes a warpgroup's heads, from a chunk's first column on: 16 bytes a thread, for which quads are transposed."""
    thread = cute.arch.thread_idx()[0] % 128
    for r in range(2):
        head = work.start + ROWS * w + row_of(thread, r)
        row = params.dq[0, work.row, work.head * work.group + PICK.smaller(head, work.group - 1), None].iterator
        for c in range(0, cute.size(acc, mode=[1]), 8):
            words = transpose_quad([pack(acc[r, c + m], acc[r, c + m + 1], config.dtype) for m in range(0, 8, 2)])
            place = row + CHUNK * chunk + 4 * c + PIECE // ELEMENT_BYTES * (thread % 4)
            put_words_if(head < work.group, place, words)
