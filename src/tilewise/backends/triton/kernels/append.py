"""New keys and values into the pages of a cache, one launch for both.

Row i of the new rows of sequence b goes to position ``seqlens_k[b] + i``: row ``position % page_size`` of page
``block_table[b, position // page_size]``. A row past the last sequence, behind the last page of its sequence, or with a page number
outside the pool is not written.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.maths import plain


class AppendTensors(NamedTuple):
    """The pointers of a launch.

    Attributes:
        k_pages, v_pages: (num_pages, page_size, heads, head_dim). k, v: the new rows, (batch, rows, heads, head_dim), or packed.
        block_table: int32 (batch, max_pages). seqlens_k: int32 (batch,), before. cu_seqlens_q: (batch + 1,), None if not packed.
    """

    k_pages: Any
    v_pages: Any
    k: Any
    v: Any
    block_table: Any
    seqlens_k: Any
    cu_seqlens_q: Any


class AppendSizes(NamedTuple):
    """The whole numbers of a launch, passed as those of :class:`arguments.Sizes`.

    Attributes:
        new: rows of each sequence; of no use where they are packed.
        table: strides of the block table. length: stride of seqlens_k.
        k_pages, v_pages: ``(page, row, head)`` strides. k, v: ``(batch, row, head)`` strides; packed, the first is 0. All of them
            are in units of ``UNIT`` elements.
    """

    batch: int
    new: int
    num_pages: int
    page_size: int
    max_pages: int
    table: tuple
    length: int
    k_pages: tuple
    v_pages: tuple
    k: tuple
    v: tuple


class Place(NamedTuple):
    """The place of one new row.

    Attributes:
        b, row: batch element (packed, 0) and row in the new tensors.
        page, to: its page, and the row there. placed: whether there is such a place.
    """

    b: Any
    row: Any
    page: Any
    to: Any
    placed: Any


@triton.jit
def append_kernel(tensors, sizes, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, UNIT: tl.constexpr):
    """Writes one new row of all heads, of k and of v.

    Grid: (new rows of all sequences).

    Args:
        HEADS, DIM, DIM_V: heads, and the head dims of k and of v. UNIT: elements of 16 bytes where every stride is a multiple, else 1.
    """
    row = tl.program_id(0)
    if tensors.cu_seqlens_q is None:
        b, i = row // plain(sizes.new), row % plain(sizes.new)
        source_b, source_row = b, i
        placed = row >= 0
    else:
        # The lengths are on the device alone, so each row finds its sequence by bisection: log2(batch + 1) loads that
        # wait for one another. `row * 0` is a 0 of the type that the loop's variables keep.
        b, last = row * 0, row * 0 + plain(sizes.batch) + 1
        while last - b > 1:  # sequence b begins at or before the row, sequence `last` after it
            middle = (b + last) // 2
            before = tl.load(tensors.cu_seqlens_q + middle).to(tl.int32) <= row
            b, last = tl.where(before, middle, b), tl.where(before, last, middle)
        i = row - tl.load(tensors.cu_seqlens_q + b).to(tl.int32)
        source_b, source_row = b * 0, row
        placed = b < plain(sizes.batch)
    # Lengths and pages are read here and not on the host, so that a captured graph sees the values of each replay.
    position = tl.load(tensors.seqlens_k + b * plain(sizes.length), mask=placed, other=-1) + i
    index = position // plain(sizes.page_size)
    placed = placed & (position >= 0) & (index < plain(sizes.max_pages))
    table = tensors.block_table + tl.cast(b, tl.int64) * plain(sizes.table[0])
    page = tl.load(table + index * plain(sizes.table[1]), mask=placed, other=-1)
    # Unused entries of a block table are often -1: they must not become an address.
    placed = placed & (page >= 0) & (page < plain(sizes.num_pages))
    place = Place(source_b, source_row, page, position % plain(sizes.page_size), placed)
    copy_row(tensors.k, tensors.k_pages, sizes.k, sizes.k_pages, place, HEADS, DIM, UNIT)
    copy_row(tensors.v, tensors.v_pages, sizes.v, sizes.v_pages, place, HEADS, DIM_V, UNIT)


@triton.jit
def copy_row(new, pages, from_strides, to_strides, place, HEADS: tl.constexpr, DIM: tl.constexpr, UNIT: tl.constexpr):
    """Copies one row of all heads to its place: (heads, columns), from global memory through registers to global memory."""
    # x is (heads, columns), both padded to powers of 2, as Triton wants ranges; the mask drops the padding.
    heads = tl.arange(0, triton.next_power_of_2(HEADS))[:, None]
    columns = tl.arange(0, triton.next_power_of_2(DIM))[None, :]
    mask = (heads < HEADS) & (columns < DIM) & place.placed
    # 64 bits up to the row, since a pool may have more than 2³¹ elements; 32 bits within the row.
    start = tl.cast(place.b, tl.int64) * plain(from_strides[0]) + tl.cast(place.row, tl.int64) * plain(from_strides[1])
    end = tl.cast(place.page, tl.int64) * plain(to_strides[0]) + tl.cast(place.to, tl.int64) * plain(to_strides[1])
    x = tl.load(new + start * UNIT + (heads * plain(from_strides[2]) * UNIT + columns), mask=mask)
    tl.store(pages + end * UNIT + (heads * plain(to_strides[2]) * UNIT + columns), x, mask=mask)
