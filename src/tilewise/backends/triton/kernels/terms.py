"""fp32 operands as sums of three bf16 terms, which tensor cores multiply faster than fp32.

    x = high + middle + low    with    high = bf16(x),  middle = bf16(x - high),  low = bf16(x - high - middle)

Three terms hold all 24 bits of an fp32 number, and bf16 has its range. A product of two operands is the sum of the products of
their terms that are large enough to matter (``FACTS.products``; docs/decisions.md#triton-bf16x6). The operands of a call are
split once, by a kernel of their own; P and dS are split in registers.
"""

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.arguments import plain_sizes
from tilewise.backends.triton.kernels.maths import multiple


@triton.jit
def terms_kernel(tensors, sizes, scales, FACTS: tl.constexpr):
    """Splits the rows of fp32 q, k, v, and of do in a backward, into rows of three terms in dq, dk, dv and o.

    An operand (.., heads, D) becomes a contiguous (.., heads, 3 D), each term padded with zeros (:func:`columns_of_term`).
    Strides are in elements.
    Grid: (programs of the tensor that needs most, tensors).
    """
    sizes = plain_sizes(sizes)
    which = tl.program_id(1)
    if which == 0:
        rows_to_terms(tensors.q, tensors.dq, sizes.q, sizes.seqlen_q, sizes.heads_q, sizes.dims[0], sizes, FACTS)
    elif which == 1:
        rows_to_terms(tensors.k, tensors.dk, sizes.k, sizes.seqlen_k, sizes.heads_k, sizes.dims[0], sizes, FACTS)
    elif which == 2:
        rows_to_terms(tensors.v, tensors.dv, sizes.v, sizes.seqlen_k, sizes.heads_k, sizes.dims[1], sizes, FACTS)
    else:
        rows_to_terms(tensors.do, tensors.o, sizes.do, sizes.seqlen_q, sizes.heads_q, sizes.dims[1], sizes, FACTS)


@triton.jit
def rows_to_terms(operand, to, strides, length, heads, dim, sizes, FACTS: tl.constexpr):
    """Splits the tile_m rows of one operand that belong to program_id(0); it does nothing where the operand has no such rows.

    Args:
        operand: fp32, with ``strides`` (batch, row, head). to: bf16, contiguous (batch, length, heads, columns of three terms).
    """
    dim = multiple(dim, FACTS.unit)
    padded = columns_of_term(dim, FACTS)
    pid, blocks = (
        tl.program_id(0),
        tl.maximum(tl.cdiv(length, FACTS.tile_m), 1),
    )  # 1: an empty tensor must not divide by 0
    b, head = pid // (blocks * heads), (pid // blocks) % heads
    by_batch, by_row, by_head = strides
    m, columns = (pid % blocks) * FACTS.tile_m + tl.arange(0, FACTS.tile_m), tl.arange(0, FACTS.tile_n)
    base = operand + (tl.cast(b, tl.int64) * by_batch + tl.cast(head, tl.int64) * by_head)
    base += m.to(tl.int64)[:, None] * by_row + columns[None, :]
    to += ((tl.cast(b, tl.int64) * length + m)[:, None] * heads + head) * (FACTS.terms * padded) + columns[None, :]
    rows = (m < length)[:, None] & (b < sizes.batch)
    for first in range(0, padded, FACTS.tile_n):
        # Global memory to registers: fp32 (tile_m, tile_n).
        x = tl.load(base + first, mask=rows & (first + columns < dim)[None, :], other=0.0)
        high, middle, low = split_into_terms(x)
        # An infinity is all in the first term: Inf - Inf would put a NaN into the others.
        finite = tl.abs(x) < float("inf")
        # Registers to global memory: three terms of bf16 (tile_m, tile_n).
        ok = rows & (first + columns < padded)[None, :]
        tl.store(to + first, high, mask=ok)
        tl.store(to + first + padded, tl.where(finite, middle, 0.0), mask=ok)
        tl.store(to + first + 2 * padded, tl.where(finite, low, 0.0), mask=ok)


@triton.jit
def columns_of_term(dim, FACTS: tl.constexpr):
    """The columns from one term of a row to the next."""
    return tl.cdiv(dim, FACTS.term_unit) * FACTS.term_unit


@triton.jit
def split_into_terms(x):
    """``(high, middle, low)``: three bf16 numbers whose sum is the fp32 number ``x``."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)  # exact: the bits that the rounding dropped
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)
