"""New keys and values into the pages of a cache, one launch for both.

Row i of the new rows of sequence b goes to position ``seqlens_k[b] + i``: row ``position % page_size`` of page
``block_table[b, position // page_size]``. A row past the last sequence, behind the last page of its sequence, or with a page number
outside the pool is not written. Numbers of a quantised cache are written as bytes, the quotients of the new ones and their scales.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.e4m3 import to_bits
from tilewise.backends.triton.kernels.maths import plain


class AppendTensors(NamedTuple):
    """The pointers of a launch.

    Attributes:
        k_pages, v_pages: (num_pages, page_size, heads, head_dim). k, v: the new rows, (batch, rows, heads, head_dim), or packed; v and
            its pages None where values lie in the keys' memory.
        block_table: int32 (batch, max_pages). seqlens_k: int32 (batch,), before. cu_seqlens_q: (batch + 1,), None if not packed.
        k_scale, v_scale: fp32, of a quantised cache, whose pages are uint8 here; else None.
    """

    k_pages: Any
    v_pages: Any
    k: Any
    v: Any
    block_table: Any
    seqlens_k: Any
    cu_seqlens_q: Any
    k_scale: Any = None
    v_scale: Any = None


class AppendSizes(NamedTuple):
    """The whole numbers of a launch, passed as those of :class:`arguments.Sizes`.

    Attributes:
        new: rows of each sequence; of no use where they are packed.
        table: strides of the block table. length: stride of seqlens_k.
        k_pages, v_pages: ``(page, row, head)`` strides. k, v: ``(batch, row, head)`` strides; packed, the first is 0. All of them
            are in units of ``UNIT`` elements.
        k_scale, v_scale: ``(sequence, page, row, head)`` strides of the scales, 0 for an axis that they do not have.
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
    k_scale: tuple = ()
    v_scale: tuple = ()


class CopiedRow(NamedTuple):
    """A new row: where it lies and where it goes.

    Attributes:
        b, row: batch element (packed, 0) and row in the new tensors. sequence: which it belongs to.
        page, to: its page, and the row there. placed: whether there is such a page.
    """

    b: Any
    row: Any
    sequence: Any
    page: Any
    to: Any
    placed: Any


@triton.jit
def append_kernel(
    tensors,
    sizes,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    UNIT: tl.constexpr,
    K_EACH: tl.constexpr,
    V_EACH: tl.constexpr,
):
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
    copied = CopiedRow(source_b, source_row, b, page, position % plain(sizes.page_size), placed)
    # Rows of both tensors go to the same place; values that lie in their keys' memory are written with these.
    k_scale, v_scale = (tensors.k_scale, sizes.k_scale), (tensors.v_scale, sizes.v_scale)
    copy_row(tensors.k, tensors.k_pages, sizes.k, sizes.k_pages, k_scale, copied, HEADS, DIM, UNIT, K_EACH)
    if tensors.v is not None:
        copy_row(tensors.v, tensors.v_pages, sizes.v, sizes.v_pages, v_scale, copied, HEADS, DIM_V, UNIT, V_EACH)


@triton.jit
def copy_row(
    new,
    pages,
    from_strides,
    to_strides,
    scale,
    copied,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    UNIT: tl.constexpr,
    EACH: tl.constexpr,
):
    """Copies one row of all heads to its place: (heads, columns), from global memory through registers to global memory.

    Args:
        scale: of a quantised cache, the pointer and its strides. EACH: it has one for each token and head, which is written.
    """
    # x is (heads, columns), both padded to powers of 2, as Triton wants ranges; the mask drops the padding.
    heads = tl.arange(0, triton.next_power_of_2(HEADS))[:, None]
    columns = tl.arange(0, triton.next_power_of_2(DIM))[None, :]
    mask = (heads < HEADS) & (columns < DIM) & copied.placed
    # 64 bits up to the row, since a pool may have more than 2³¹ elements; 32 bits within the row.
    start = tl.cast(copied.b, tl.int64) * plain(from_strides[0]) + tl.cast(copied.row, tl.int64) * plain(
        from_strides[1]
    )
    end = tl.cast(copied.page, tl.int64) * plain(to_strides[0]) + tl.cast(copied.to, tl.int64) * plain(to_strides[1])
    x = tl.load(new + start * UNIT + (heads * plain(from_strides[2]) * UNIT + columns), mask=mask)
    if scale[0] is not None:
        x = quantised(x, scale[0], scale[1], copied, heads, HEADS, EACH)
    tl.store(pages + end * UNIT + (heads * plain(to_strides[2]) * UNIT + columns), x, mask=mask)


@triton.jit
def quantised(x, scale, strides, copied, heads, HEADS: tl.constexpr, EACH: tl.constexpr):
    """A row ``x`` (heads, columns) over its scales, as e4m3 numbers in uint8; if EACH, the scales are made of it and written.

    Args:
        heads: int (heads, 1).
    """
    offsets = tl.cast(copied.sequence, tl.int64) * plain(strides[0]) + tl.cast(copied.page, tl.int64) * plain(
        strides[1]
    )
    pointers = scale + (offsets + tl.cast(copied.to, tl.int64) * plain(strides[2])) + heads * plain(strides[3])
    mask = (heads < HEADS) & copied.placed
    # fp32 holds what e4m3 numbers are made of, and 16-bit rows exactly.
    x = x.to(tl.float32)
    if EACH:
        # NaN and infinities have no part in the scale, or they would take the other numbers of their row along.
        size = tl.abs(x)
        largest = tl.max(tl.where(size < float("inf"), size, 0.0), 1, keep_dims=True)  # of the finite ones
        factor = largest * (1.0 / 448.0)
        factor = tl.where(factor == 0, 1.0, factor)  # a row of zeros has no largest number
        tl.store(pointers, factor, mask=mask)
    else:
        factor = tl.load(pointers, mask=mask, other=1.0)
    # The quotient rounded to nearest, as torch has it: an approximate one would round some numbers the other way.
    return to_bits(tl.div_rn(x, tl.broadcast_to(factor, x.shape)))
