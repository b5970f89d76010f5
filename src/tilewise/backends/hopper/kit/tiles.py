"""Tiles in global memory, in shared memory and in the registers of a warpgroup.

A wgmma accumulator of 64 rows by N columns lies in the warpgroup's 128 threads as follows. Lane l of warp w (0 to 3) holds the
rows ``16 w + l // 4 + 8 r``, r = 0, 1, and in each row the columns ``8 (c // 2) + 2 (l % 4) + c % 2``, c = 0 .. N/4 - 1. The four
lanes of a quad hold a row together. :func:`rows_columns` views an accumulator as ``(r, c)``.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from tilewise.backends.hopper.kit import packed
from tilewise.backends.hopper.kit.dtypes import I32

# -- Tiles of queries ----------------------------------------------------------------------------------------------


class QueryTile(NamedTuple):
    """One tile of query rows: what a CTA works on from loading Q to storing its result.

    Attributes:
        row, head, batch: the first query, the (first) query head and the batch index, or the packed sequence.
        start, stop: the key blocks ``[start, stop)``; with lists of blocks, steps, of which the first ``partial`` need their bits.
        bits: the slot of the bits of the first partial block; those of the others follow.
        split: which split of the keys the blocks belong to, where keys are split.
        piece: which piece of O's columns the tile computes, where they are cut.
        seqlen: where the rows and keys of its packed sequence lie; it has ``q`` and ``k``, each a :class:`packed.Span`.
    """

    row: I32
    head: I32
    batch: I32
    start: I32
    stop: I32
    split: I32 | None = None
    seqlen: NamedTuple | None = None
    partial: I32 | None = None
    bits: I32 | None = None
    piece: I32 | None = None

    @property
    def rows(self):
        """The place of the tile's rows of q and o, as :func:`tma_tiles` takes it."""
        return self.batch if self.seqlen is None else self.seqlen.q

    @property
    def keys(self):
        """The place of the tile's keys, as :func:`tma_tiles` takes it."""
        return self.batch if self.seqlen is None else self.seqlen.k


# -- Registers -----------------------------------------------------------------------------------------------------


def row_of(thread, r):
    """The row of the tile that is row ``r`` (0 or 1) of a thread."""
    return thread // 32 * 16 + thread % 32 // 4 + 8 * r


def column_of(thread, c):
    """The column of the tile that is column ``c`` of a thread: the thread's first column, ``2 (thread % 4)``, and a constant."""
    return thread % 4 * 2 + constant_column(c)


def constant_column(c: int) -> int:
    """The distance of a thread's column ``c`` from its first column, the same for all threads."""
    return 8 * (c // 2) + c % 2


def rows_columns(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator ((2, 2, N/8), 1, 1) viewed as (2 rows, N/4 columns)."""
    shape, stride = acc.layout.shape, acc.layout.stride
    layout = cute.make_layout(
        ((shape[0][1], shape[1]), (shape[0][0], shape[0][2], shape[2])),
        stride=((stride[0][1], stride[1]), (stride[0][0], stride[0][2], stride[2])),
    )
    return cute.make_tensor(acc.iterator, layout)


def begin_product(mma, acc, left, right, overwrite: bool, first: int = 0) -> None:
    """Issues the wgmmas of ``acc (+)= left right`` as one group; mode 2 of the operands counts the k steps, of the left from ``first`` on.

    The atom is made here: a field set on the caller's atom would belong to the caller's loop.
    """
    atom = cute.make_mma_atom(mma.op)
    # acc, and a left operand in registers, must be written before the tensor cores read them (wgmma.fence).
    warpgroup.fence()
    # acc (64 × N, fp32) += left (64 × 16) right (16 × N): 16 columns of 16-bit elements a step.
    for step in range(cute.size(right, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, not (overwrite and step == 0))
        cute.gemm(atom, acc, left[None, None, first + step], right[None, None, step], acc)
    # One group; whoever needs acc waits for it with wait_group.
    warpgroup.commit_group()


def reduce_quad(value, combine):
    """The four lanes' values of a row, combined; each lane gets the result."""
    for offset in (2, 1):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


def transpose_quad(words: list) -> list:
    """The transpose of the matrix (lane, word) that the four lanes of a quad hold, four words each: lane n gets every lane's word n."""
    lane = cute.arch.thread_idx()[0] % 4
    for bit in (1, 2):  # lanes and words that differ in this bit change places
        upper, found = lane // bit % 2 == 1, list(words)
        for n in (n for n in range(4) if not n & bit):
            low, high = words[n], words[n | bit]
            other = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, low, high), offset=bit)
            found[n], found[n | bit] = cutlass.select_(upper, other, low), cutlass.select_(upper, high, other)
        words = found
    return words


# -- Memory --------------------------------------------------------------------------------------------------------


def staged_layout(layout, stages: int, stride: int):
    """A tile's shared-memory layout repeated for each stage, ``stride`` elements apart: (rows, columns, stage)."""
    return cute.append(cute.select(layout, [0, 1]), cute.make_layout(stages, stride=stride))


def tma_tiles(info: cpasync.TmaInfo, shape, origin, head, rows, smem: cute.Tensor):
    """A head's matrix in tiles and their stages in shared memory, as TMA takes both: (box, tile) and (box, stage).

    Args:
        shape, origin: of a tile, and which tiles; None in ``origin`` keeps that mode.
        rows: the batch index, or the rows of a packed sequence (:class:`packed.Span`).
        smem: (tile row, tile column, stage).
    """
    if isinstance(rows, packed.Span):
        g = packed.matrix(info.tma_tensor, head, rows, columns_first=origin[0] is not None)
    else:
        g = info.tma_tensor[None, None, head, rows]
    g = cute.local_tile(g, shape, origin)
    # One CTA, no multicast: CTA 0 of a layout of one.
    s, g = cpasync.tma_partition(
        info.atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(g, 0, 2)
    )
    return g, s
