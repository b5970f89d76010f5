"""How the kernel over pages (:mod:`paged`) ends: from the state of a tile's rows to o and lse."""

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.forward import lse_of, with_sink
from tilewise.backends.triton.kernels.tile import LN2

# P times the scale of a value is rounded to q's dtype. Times this power of two as well it keeps as many bits in fp16 as the value
# times its scale would: e4m3 numbers go up to 448.
LIFTED = tl.constexpr(256.0)


@triton.jit
def rows_of_tile(head_k, work, FACTS: tl.constexpr):
    """``(query, head)`` of each row of a key head's tile, int32 (tile_m,)."""
    row = work.block * FACTS.tile_m + tl.arange(0, FACTS.tile_m)
    return row // FACTS.group, head_k * FACTS.group + row % FACTS.group


@triton.jit
def paged_epilogue(m, l, acc, tile, tensors, sizes, work, FACTS: tl.constexpr):
    """Stores o = acc / l and lse = m + log l, (7), with the sink merged in, (18); with split keys the state of this split.

    The largest score of a row is m, which no sink touches.
    """
    i, head = rows_of_tile(tile.k.head, work, FACTS)
    valid = i < work.seqlen_q
    lse = tl.where(l == 0, float("-inf"), lse_of(m, l, FACTS))
    weight = 1.0 / tl.where(l == 0, 1.0, l)  # a row that saw no key: o = 0
    if FACTS.sink:
        sink = tl.load(tensors.sink + head, mask=valid, other=0.0).to(tl.float32)
        if FACTS.packed:
            sink = tl.where(work.b == sizes.batch, float("-inf"), sink)  # rows past the last sequence have none
        weight, lse = with_sink(weight, lse, l, sink)
    if FACTS.v_scale == "one":  # one scale for all values leaves the sum over the keys
        weight = weight * tile.v_scale
    elif FACTS.v_scale == "each":
        weight = weight * (1.0 / LIFTED)
    # 64-bit offsets of the rows: `token` in o, `line` in lse, whose heads are outside its rows.
    token = tl.cast(work.start_q, tl.int64) + i
    line = tl.cast(head, tl.int64) * sizes.seqlen_q + work.start_q + i
    if not FACTS.packed:
        token += tl.cast(work.b, tl.int64) * sizes.seqlen_q
        line += tl.cast(work.b, tl.int64) * sizes.heads_q * sizes.seqlen_q
    if FACTS.split:  # the splits are the outermost axis
        tokens = tl.cast(sizes.seqlen_q, tl.int64)
        if not FACTS.packed:
            tokens *= sizes.batch
        token += tl.program_id(1) * tokens
        line += tl.program_id(1) * tokens * sizes.heads_q
    # lse: fp32 (tile_m,). O: (tile_m, head_dim_v) in o's dtype, of a split only for rows that saw a key.
    tl.store(tensors.lse + line, lse, mask=valid)
    if FACTS.max_logit:
        # A maximum passes over NaN, the sum of the row does not.
        tl.store(tensors.max_logit + line, tl.where(l != l, l, m if FACTS.natural else m * LN2), mask=valid)
    if FACTS.split:
        valid = valid & (l != 0)
    store_output(tensors.o, (token * sizes.heads_q + head) * FACTS.head_dim_v, valid, acc, weight, FACTS)


@triton.jit
def store_output(o, rows, valid, acc, weight, FACTS: tl.constexpr):
    """Stores ``acc · weight`` at these ``rows`` of ``o``, offsets in elements, (tile_m,), of those that are ``valid``."""
    PIECES: tl.constexpr = FACTS.pieces_v
    EACH: tl.constexpr = 1 if FACTS.v_scale is None else 2  # columns of o for each of a piece
    for n in tl.static_range(len(PIECES)):
        # Registers to global memory: fp32 (tile_m, width), rounded to the dtype of o, or of a partial state not at all.
        if EACH == 1:
            found = acc[n]
        else:
            # Even and odd columns come together again here, (tile_m, 2 · width).
            found = tl.interleave(acc[n], acc[len(PIECES) + n])
        within = tl.arange(0, EACH * PIECES[n][2])
        ok = valid[:, None]
        if PIECES[n][1] < PIECES[n][2]:
            ok = ok & (within < EACH * PIECES[n][1])[None, :]
        pointers = o + rows[:, None] + (EACH * PIECES[n][0] + within)[None, :]
        tl.store(pointers, (found * weight[:, None]).to(o.dtype.element_ty), mask=ok)
