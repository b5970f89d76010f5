"""fp32 operands as sums of three bf16 terms, which tensor cores multiply faster than fp32.

    x = high + middle + low    with    high = bf16(x),  middle = bf16(x - high),  low = bf16(x - high - middle)

Three terms hold all 24 bits of an fp32 number, and bf16 has its range. A product of two operands is the sum of the products of
their terms that are large enough to matter (``FACTS.products``; docs/decisions.md#triton-bf16x6). The operands of a call are
split once, by a kernel of their own; P and dS are split in registers.
"""

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.arguments import plain_sizes


@triton.jit
def terms_kernel(tensors, sizes, scales, FACTS: tl.constexpr):
    """Splits the rows of fp32 q, k, v, and of do where it is given, into rows of three terms in dq, dk, dv and o.

    An operand (.., heads, D) becomes a contiguous (.., heads, 3 D). Strides are in elements.
    Grid: (programs of the tensor that needs most, tensors).
    """
    sizes = plain_sizes(sizes)
    which = tl.program_id(1)
    if which == 0:
        rows_to_terms(tensors.q, tensors.dq, sizes.q, sizes.seqlen_q, sizes.heads_q, sizes, OF_V=False, FACTS=FACTS)
    elif which == 1:
        rows_to_terms(tensors.k, tensors.dk, sizes.k, sizes.seqlen_k, sizes.heads_k, sizes, OF_V=False, FACTS=FACTS)
    elif which == 2:
        rows_to_terms(tensors.v, tensors.dv, sizes.v, sizes.seqlen_k, sizes.heads_k, sizes, OF_V=True, FACTS=FACTS)
    elif tensors.do is not None:
        rows_to_terms(tensors.do, tensors.o, sizes.do, sizes.seqlen_q, sizes.heads_q, sizes, OF_V=True, FACTS=FACTS)


@triton.jit
def rows_to_terms(operand, to, strides, length, heads, sizes, OF_V: tl.constexpr, FACTS: tl.constexpr):
    """Splits the tile_m rows of one operand that belong to program_id(0); it does nothing where the operand has no such rows.

    Args:
        operand: fp32, with ``strides`` (batch, row, head). to: bf16, contiguous (batch, length, heads, 3 D).
    """
    DIM: tl.constexpr = FACTS.head_dim_v if OF_V else FACTS.head_dim
    WIDTH: tl.constexpr = FACTS.pieces_v[0][2] if OF_V else FACTS.pieces[0][2]
    pid, blocks = (
        tl.program_id(0),
        tl.maximum(tl.cdiv(length, FACTS.tile_m), 1),
    )  # 1: an empty tensor must not divide by 0
    b, head = pid // (blocks * heads), (pid // blocks) % heads
    by_batch, by_row, by_head = strides
    m, columns = (pid % blocks) * FACTS.tile_m + tl.arange(0, FACTS.tile_m), tl.arange(0, WIDTH)
    ok = (m < length)[:, None] & (columns < DIM)[None, :] & (b < sizes.batch)
    base = operand + (tl.cast(b, tl.int64) * by_batch + tl.cast(head, tl.int64) * by_head)
    # Global memory to registers: fp32 (tile_m, WIDTH).
    x = tl.load(base + m.to(tl.int64)[:, None] * by_row + columns[None, :], mask=ok, other=0.0)
    high, middle, low = split_into_terms(x)
    finite = tl.abs(x) < float("inf")  # an infinity is all in the first term: Inf - Inf would put a NaN into the others
    to += ((tl.cast(b, tl.int64) * length + m)[:, None] * heads + head) * (FACTS.terms * DIM) + columns[None, :]
    # Registers to global memory: three terms of bf16 (tile_m, WIDTH), D columns from one to the next.
    tl.store(to, high, mask=ok)
    tl.store(to + DIM, tl.where(finite, middle, 0.0), mask=ok)
    tl.store(to + 2 * DIM, tl.where(finite, low, 0.0), mask=ok)


@triton.jit
def split_into_terms(x):
    """``(high, middle, low)``: three bf16 numbers whose sum is the fp32 number ``x``."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)  # exact: the bits that the rounding dropped
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)
