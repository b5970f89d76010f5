"""Registers and shared memory of the backward's kernels: products, operands, and what is stored or handed over.

A fragment is a thread's part of a tile: an accumulator in fp32, or an operand of a wgmma in the element type
(:mod:`tilewise.backends.hopper.kit.operands`).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass.cute.nvgpu import warp as warp_ops
from cutlass.cute.nvgpu import warpgroup

from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.config import ALIGNMENT
from tilewise.backends.hopper.kit import packed
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.instructions import after, keep_words_above, pack, unseen_zero, zero_after
from tilewise.backends.hopper.kit.operands import words
from tilewise.backends.hopper.kit.ring import release

STATISTICS = 4  # columns of a thread whose statistics HeldStatistic reads at once


def warp_and_warpgroup():
    """``(warp, warpgroup)`` of a thread in its CTA, the same for all threads of a warp."""
    uniform = cute.arch.make_warp_uniform
    return uniform(cute.arch.warp_idx()), uniform(cute.arch.thread_idx()[0] // 128)


# -- Products ------------------------------------------------------------------------------------------------------


class RegisterOperand(NamedTuple):
    """The first k steps of an operand A in registers, (.., 1, k steps), and the product that takes them from there."""

    mma: cute.TiledMma
    a: cute.Tensor


class Term(NamedTuple):
    """One k step of a product: operands (.., 1, 1)."""

    mma: cute.TiledMma
    a: cute.Tensor
    b: cute.Tensor


def begin_products(
    mma: cute.TiledMma, acc: cute.Tensor, factors, overwrite: bool, registers: RegisterOperand | None = None, first: Term | None = None
) -> None:  # fmt: skip
    """Issues the wgmmas of ``acc (+)= sum of a b`` over the ``factors`` ``(a, b)`` as one group. Mode 2 of an operand counts its
    k steps; the first ones of each a come from ``registers``, if these are given. ``first``: a k step that overwrites ``acc`` before.

    The atoms are made here: a field set on the caller's atom would belong to the caller's loop.
    """
    atom, steps = cute.make_mma_atom(mma.op), 0
    if registers is not None:
        register_atom, steps = cute.make_mma_atom(registers.mma.op), cute.size(registers.a, mode=[2])
    # Registers that were written since the last product are visible to this one.
    warpgroup.fence()
    if first is not None:
        # Outside the loop over factors: its operands have other layouts.
        first_atom, overwrite = cute.make_mma_atom(first.mma.op), False
        first_atom.set(warpgroup.Field.ACCUMULATE, False)
        cute.gemm(first_atom, acc, first.a[None, None, 0], first.b[None, None, 0], acc)
    for n, (a, b) in enumerate(factors):
        for step in range(cute.size(a, mode=[2])):
            one, left = (register_atom, registers.a) if step < steps else (atom, a)
            one.set(warpgroup.Field.ACCUMULATE, not (overwrite and n == step == 0))
            cute.gemm(one, acc, left[None, None, step], b[None, None, step], acc)
    # One group, whatever the number of products: a wait counts it as one.
    warpgroup.commit_group()


def stage_of(operand: cute.Tensor, n) -> cute.Tensor:
    """The descriptors (1, 1, k steps) of stage n of an operand in shared memory."""
    return operand[None, None, None, n]


def transposed(tiles: cute.Tensor) -> cute.Tensor:
    """Tiles (rows, columns, stage) viewed as (columns, rows, stage)."""
    return cute.make_tensor(tiles.iterator, cute.select(tiles.layout, [1, 0, 2]))


def round_to_operand(operand: cute.Tensor, acc: cute.Tensor, dtype: str) -> None:
    """Rounds an accumulator (fp32) into an operand of the same shape, register by register."""
    values, target = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc))), words(operand)
    for n in range(cute.size(target)):
        target[n] = pack(values[2 * n], values[2 * n + 1], dtype)


def scale(acc: cute.Tensor, factor) -> None:
    """Multiplies every element of an accumulator by a factor."""
    for n in range(cute.size(acc)):
        acc[n] = acc[n] * factor


def hold_above_wait(word: cute.Pointer, values: cute.Tensor) -> None:
    """Keeps the instructions that made ``values`` above the wait that follows, for half an instruction an element
    (docs/decisions.md#hopper-held-exponentials)."""
    found = cute.recast_tensor(cute.make_tensor(values.iterator, cute.make_layout(cute.size(values))), I32)
    keep_words_above(word, [found[n] for n in range(cute.size(found))])


# -- Global and shared memory --------------------------------------------------------------------------------------


def rows_first(t: cute.Tensor, config: Backward) -> cute.Tensor:
    """A tensor (batch, row, head, column) viewed as (row, column, head, batch); of packed sequences as :func:`packed.ragged` has it."""
    return packed.ragged(t) if config.packed else cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))


def allocate_elements(allocator, elements: int, dtype: str) -> cute.Pointer:
    """Shared memory for tiles whose layout is given later."""
    return allocator.allocate_array(ELEMENT[dtype], elements, byte_alignment=ALIGNMENT)


def with_tma_layout(pointer: cute.Pointer, info) -> cute.Tensor:
    """Shared memory viewed with the layout that the tiles of a TMA descriptor have."""
    layout = info.smem_layout
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner), layout.outer)


def statistics_layout(rows: int, stages: int) -> cute.Layout:
    """The layout of ``rows`` fp32 numbers a stage, as threads read them beside an accumulator whose columns are these rows: (2
    neighbours, lane of a quad, every 8 columns, stage)."""
    return cute.make_layout((2, 4, rows // 8, stages), stride=(1, 2, 8, rows))


def column_statistic(statistics: cute.Tensor, stage):
    """A function ``(r, c)`` that gives the statistic, fp32, of a thread's column c of a block. All of the thread's columns are read
    from shared memory (:func:`statistics_layout`) here."""
    mine = statistics[None, cute.arch.thread_idx()[0] % 4, None, stage]
    found = cute.make_rmem_tensor(mine.layout.shape, F32)
    cute.autovec_copy(mine, found)
    # In the order of an accumulator's columns, whichever row asks.
    flat = cute.make_tensor(found.iterator, cute.make_layout(cute.size(found)))
    return lambda r, c: flat[c]


class HeldStatistic:
    """The statistics of :func:`column_statistic`, of STATISTICS columns at a time: all columns at once take as many registers as a thread
    has columns.

    They are read no sooner than the number is there which replaces that of the first column of the read before the last. Of the last
    read itself, every read would wait for all that is made of the one before, and so would the warp.

    ``acc``: (2 rows, columns of the thread), whose numbers are replaced column by column.
    """

    def __init__(self, statistics: cute.Tensor, stage, acc: cute.Tensor):
        self.mine = statistics[None, cute.arch.thread_idx()[0] % 4, None, stage]
        self.acc, self.zero, self.found = acc, unseen_zero(), {}

    def __call__(self, r, c):
        first = c - c % STATISTICS
        if first not in self.found:
            awaited = first - 2 * STATISTICS
            zero = zero_after(self.acc[1, awaited], self.zero) if awaited >= 0 else I32(0)
            # Two neighbours every 8 columns of the block, of which a quad's lanes hold two each.
            layout = cute.make_layout((2, STATISTICS // 2), stride=(1, 8))
            read = cute.make_rmem_tensor(layout.shape, F32)
            cute.autovec_copy(cute.make_tensor(self.mine.iterator + 4 * first + zero, layout), read)
            self.found = {first: cute.make_tensor(read.iterator, cute.make_layout(STATISTICS))}
        return self.found[first][c - first]


def release_read(empty: cute.Pointer) -> None:
    """Releases a stage of which every lane of the warp has read."""
    cute.arch.sync_warp()
    release(empty)


def store_accumulator(
    acc: cute.Tensor, mma: cute.TiledMma, smem: cute.Tensor, dtype: str, transpose: bool = False, held: bool = False
) -> None:
    """Rounds an accumulator and stores it in shared memory, (rows, columns). ``held``: addresses are computed when it is there, since
    ptxas keeps them in registers from a kernel's beginning."""
    zero = after(I32(0), acc[0]) if held else None
    # Rounded once, from fp32.
    out = cute.make_rmem_tensor_like(acc, ELEMENT[dtype])
    out.store(acc.load().to(ELEMENT[dtype]))
    store_fragment(out, mma, smem, dtype, transpose, zero)


def store_fragment(
    fragment: cute.Tensor, mma: cute.TiledMma, smem: cute.Tensor, dtype: str, transpose: bool = False, zero=None
) -> None:
    """Stores elements in an accumulator's order in shared memory by stmatrix. ``transpose``: ``smem`` is the transposed view of its
    tile."""
    # Four 8 × 8 matrices an instruction: 16 bytes a lane, without bank conflicts in a swizzled tile.
    atom = cute.make_copy_atom(warp_ops.StMatrix8x8x16bOp(transpose, 4), ELEMENT[dtype])
    copy = cute.make_tiled_copy_C(atom, mma)
    thread = cute.arch.thread_idx()[0]
    part = copy.get_slice((thread if zero is None else thread + zero) % 128)
    cute.copy(copy, part.retile(fragment), part.partition_D(smem))
