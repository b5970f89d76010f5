"""Forward (docs/algorithm.md, section 4; FlashAttention-2, Algorithm 1): query tiles outside, keys inside.

    S = scale · Q Kᵀ    m' = max(m, rowmax S)    P = exp2(S - m')    l = l·α + rowsum P    acc = acc·α + P V    (6)
and once at the end O = acc / l, lse = m + log l (7). m is in units of log2, for fp32 inputs natural (tile.power); where scores are
bounded, as a softcap bounds them, it stays 0, so that there is neither a maximum nor a rescaling
(docs/decisions.md#triton-bounded-scores).

One program computes a tile of ``tile_m`` queries of one head. Which key tiles are partial and which full follows from the
interval of its first and its last row. Where descriptors may read every tile (``F.whole``) they are one loop, with the mask under
a branch that the whole program takes or not. Elsewhere the full ones are one loop, then the partial ones, at both ends, are
another: with the partial loop first, ptxas makes every matrix product of the full one wait for itself
(docs/decisions.md#triton-one-loop), and a loop for each end would cost registers. A predicate's tiles come as two lists, full ones
first too::

    first   full          full_end  last
      | partial | full full full | partial |          keys

With split keys, program_id(1) is a chunk of keys; o and lse are then fp32 partial states, which `merge_kernel` merges.
"""

# ruff: noqa: RUF005 - Triton's tuples are added, not unpacked

from typing import Any, NamedTuple

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.maths import exp, here, log
from tilewise.backends.triton.kernels.tile import (
    LN2,
    LOG2E,
    accumulate,
    dropout_keep,
    inner,
    key_interval,
    keys_to_visit,
    listed,
    load_piece,
    load_rows,
    load_streamed,
    partial_tile,
    place,
    plain_sizes,
    power,
    program,
    query_interval,
    rescaled,
    source,
    store_rows,
    tile_listed,
    with_pairs,
    zeros,
)


class Query(NamedTuple):
    """A query tile: its position and head, q, tiles of (tile_m, D), its rows' key intervals, the sources of k and v, and the descriptor
    of a tensor that the score reads for every pair (a pointer, unused, where there is none)."""

    m0: Any
    h: Any
    q: Any
    lo: Any
    hi: Any
    k: Any
    v: Any
    pairs: Any


@triton.jit
def forward_kernel(tensors, sizes, scales, k_view, k_rest, v_view, v_rest, pairs, F: tl.constexpr):
    """Grid: (blocks · heads_q · batch, chunks); the last tiles first, which are the longest under a causal mask."""
    sizes = plain_sizes(sizes)
    slot, h, b = program(sizes.heads_q // sizes.heads_k, sizes)
    at = place(sizes.blocks - 1 - slot, b, tensors, sizes, scales, False, F)
    pairs = tensors.q if pairs is None else pairs
    query = load_query(tensors, sizes, at, h, (k_view, k_rest), (v_view, v_rest), pairs, F)
    m = tl.full([F.tile_m], 0.0 if F.bounded else float("-inf"), tl.float32)
    l = tl.full([F.tile_m], 0.0, tl.float32)
    acc = zeros(F.tile_m, True, F)

    if F.lists:
        partial, partials, full, fulls, ahead = listed(tensors, sizes, at.b, h, at.block, F)
        for t in range(fulls):
            n0 = ahead * F.tile_n
            ahead = tile_listed(full, fulls, t + 1)
            m, l, acc = key_block(n0, m, l, acc, query, tensors, sizes, scales, at, False, F)
        for t in tl.range(partials, num_stages=F.partial_stages):
            n0 = tl.load(partial + t) * F.tile_n
            m, l, acc = key_block(n0, m, l, acc, query, tensors, sizes, scales, at, True, F)
    else:
        first, full, full_end, last = keys_to_visit(query.m0, h, at, F)
        if F.split:
            chunk_first = tl.program_id(1) * sizes.chunk
            chunk_last = chunk_first + sizes.chunk
            last = tl.minimum(last, chunk_last)
            first = tl.minimum(tl.maximum(first, chunk_first), last)
            full = tl.minimum(tl.maximum(full, first), last)
            full_end = tl.minimum(tl.maximum(full_end, full), last)
        if F.whole:
            for n in range(first, last):
                partial = (n < full) | (n >= full_end)
                m, l, acc = key_block(n * F.tile_n, m, l, acc, query, tensors, sizes, scales, at, partial, F)
        else:
            if F.keep is None:
                for n in range(full, full_end):
                    m, l, acc = key_block(n * F.tile_n, m, l, acc, query, tensors, sizes, scales, at, False, F)
            for t in range((full - first) + (last - full_end)):
                n0 = partial_tile(t, first, full, full_end) * F.tile_n
                m, l, acc = key_block(n0, m, l, acc, query, tensors, sizes, scales, at, True, F)
    finish(m, l, acc, query.m0, h, tensors, sizes, scales, at, F)


@triton.jit
def load_query(tensors, sizes, at, h, k_views, v_views, pairs, F: tl.constexpr):
    m0 = at.block * F.tile_m
    q = source(tensors.q, (None, None), sizes.q, at, at.start_q, h, F)
    q = load_rows(q, m0, at.seqlen_q - m0, None, F.tile_m, False, True, F)
    i = m0 + tl.arange(0, F.tile_m)
    lo, hi = key_interval(i, h, at, F)
    head_k = h // (sizes.heads_q // sizes.heads_k)
    k = source(tensors.k, k_views, sizes.k, at, at.start_k, head_k, F)
    v = source(tensors.v, v_views, sizes.v, at, at.start_k, head_k, F)
    return Query(m0, h, q, lo, hi, k, v, pairs)


@triton.jit
def key_block(n0, m, l, acc, query, tensors, sizes, scales, at, partial, F: tl.constexpr):
    """Takes one key tile in (6). ``partial``: some row does not see some key of it; known when compiled unless F.whole."""
    j = n0 + tl.arange(0, F.tile_n)
    left = at.seqlen_k - n0
    at = with_pairs(at, query.pairs, query.h, query.m0, n0, False, F)
    k, v = load_keys(query, n0, left, partial, F)
    s = inner(query.q, k, F)  # fp32 (tile_m, tile_n)
    if F.bounded:  # any m is as exact as the maximum that nothing overflows with
        m_new = m
        shown = masked(weights(s, query, j, scales, at, F), 0.0, j, query, at, partial, F)
        p = shown[0]
        l += tl.sum(p, 1)
    else:
        if F.general:
            s = scored(s, query, j, scales, at, F)
        shown = masked(s, float("-inf"), j, query, at, partial, F)
        m_new, p, rescale = exponentials(shown[0], m, scales, partial, F)
        l = l * rescale + tl.sum(p, 1)
        acc = rescaled(acc, rescale)
    alive = None
    if len(shown) > 1:
        alive = shown[1]
    if F.dropout:
        p = tl.where(dropout_keep(query.m0, n0, at.b, query.h, tensors, sizes, F.tile_m, F.tile_n), p, 0.0)
    if len(v) == 0:  # a key that no row here sees has P = 0, and its row of V is not read: it may hold NaN
        v = load_streamed(query.v, n0, left, alive, F.tile_n, True, partial, F)
    acc = accumulate(p, v, acc, F)
    return m_new, l, acc


@triton.jit
def load_keys(query, n0, left, partial, F: tl.constexpr):
    """Tiles of k and v; of v none yet where it comes by pointers, which may have to leave out rows of it. By descriptors both come at
    once, so that one barrier is waited for, unless the products of q and k would then wait for v (not ``F.together``)."""
    k = load_streamed(query.k, n0, left, None, F.tile_n, False, partial, F)
    v = ()
    if F.together and (F.whole or (F.tma and not partial)):
        v = load_streamed(query.v, n0, left, None, F.tile_n, True, partial, F)
    return k, v


@triton.jit
def masked(x, HIDDEN: tl.constexpr, j, query, at, partial, F: tl.constexpr):
    """``(x, which keys are read)``, or x alone where all are; x is HIDDEN where a row does not see a key."""
    alive = ()
    if partial:
        at_j = here(j, F)
        kept = (at_j[None, :] >= query.lo[:, None]) & (at_j[None, :] < query.hi[:, None])
        if F.keep is not None:
            i = query.m0 + tl.arange(0, F.tile_m)
            kept = kept & F.keep(at.b, query.h, i[:, None], j[None, :], at)
            alive = (tl.max(kept.to(tl.int8), 0) > 0,)
        elif F.masked and not F.whole:
            first, last = query_interval(j, query.h, at, F)
            alive = (first < last,)
        x = tl.where(kept, x, HIDDEN)
    return (x,) + alive


@triton.jit
def exponentials(s, m, scales, partial, F: tl.constexpr):
    """``(m', P, α)`` of (6)."""
    if F.natural:
        m_new = tl.maximum(m, tl.max(s, 1))
    else:  # the unit is multiplied in the exponent, where it costs nothing
        unit = 1.0 if F.binary else LOG2E if F.general else scales.softmax * LOG2E
        m_new = tl.maximum(m, tl.max(s, 1) * unit)
    shift = m_new
    if F.score is not None or F.whole or partial:
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    if F.natural:
        p = power(s - shift[:, None], F)
    else:
        p = tl.exp2(s * unit - shift[:, None])
    return m_new, p, power(m - shift, F)


@triton.jit
def scored(s, query, j, scales, at, F: tl.constexpr):
    """The score of a tile of products, in units of log2 if ``F.binary``."""
    if F.score is not None:
        i = query.m0 + tl.arange(0, F.tile_m)
        z = F.score(s, at.b, query.h, i[:, None], j[None, :], at).to(tl.float32)
        s = tl.broadcast_to(z, s.shape)
    else:
        s = s * scales.softmax
    return s


@triton.jit
def weights(s, query, j, scales, at, F: tl.constexpr):
    """2 to the power of the score of a tile of products."""
    if F.weights is not None:
        i = query.m0 + tl.arange(0, F.tile_m)
        p = F.weights(s, at.b, query.h, i[:, None], j[None, :], at)
    else:
        p = tl.exp2(scored(s, query, j, scales, at, F))
    return p


@triton.jit
def finish(m, l, acc, m0, h, tensors, sizes, scales, at, F: tl.constexpr):
    """Division, sink (18), and both stores."""
    i = m0 + tl.arange(0, F.tile_m)
    left = at.seqlen_q - m0
    lse = tl.where(l == 0, float("-inf"), (m if F.natural else m * LN2) + log(l))
    weight = 1.0 / tl.where(l == 0, 1.0, l)
    if F.sink:
        sink = tl.load(tensors.sink + h).to(tl.float32)
        if F.packed:
            sink = tl.where(at.b == sizes.batch, float("-inf"), sink)
        top = tl.maximum(lse, sink)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = top + log(exp(lse - top) + exp(sink - top))
        total = tl.where(l == 0, sink, tl.where(sink == float("-inf"), lse, total))
        weight = tl.where(l == 0, 0.0, weight * exp(lse - total))
        lse = total
    if F.dropout:
        weight = weight * scales.keep

    token = tl.cast(at.start_q, tl.int64)
    line = tl.cast(h, tl.int64) * sizes.seqlen_q + at.start_q
    if not F.packed:
        token += tl.cast(at.b, tl.int64) * sizes.seqlen_q
        line += tl.cast(at.b, tl.int64) * sizes.heads_q * sizes.seqlen_q
    if F.split:
        tokens = tl.cast(sizes.batch, tl.int64) * sizes.seqlen_q
        token += tl.program_id(1) * tokens
        line += tl.program_id(1) * tokens * sizes.heads_q
    row = sizes.heads_q * F.head_dim_v
    store_rows(tensors.o + (token * row + h * F.head_dim_v), row, m0, left, acc, weight[:, None], F.tile_m, True, F)
    tl.store(tensors.lse + line + i, lse, mask=i < at.seqlen_q)


@triton.jit
def merge_kernel(tensors, sizes, scales, parts, parts_lse, F: tl.constexpr):
    """The merge (8) of ``sizes.chunk`` partial states, and the sink: grid (blocks · heads_q · batch). Numbers are natural.

    A state is one key with score lse and value o, so this is (6) again.

    Args:
        parts: fp32 (chunks, batch, seqlen_q, heads_q, head_dim_v); parts_lse: (chunks, batch, heads_q, seqlen_q).
    """
    sizes = plain_sizes(sizes)
    pid = tl.program_id(0)
    h = (pid // sizes.blocks) % sizes.heads_q
    at = place(pid % sizes.blocks, pid // sizes.blocks // sizes.heads_q, tensors, sizes, scales, False, F)
    m0 = at.block * F.tile_m
    i = m0 + tl.arange(0, F.tile_m)
    m = tl.full([F.tile_m], float("-inf"), tl.float32)
    l = tl.full([F.tile_m], 0.0, tl.float32)
    acc = tl.full([F.tile_m, F.pieces_v[0][2]], 0.0, tl.float32)
    tokens = tl.cast(sizes.batch, tl.int64) * sizes.seqlen_q
    row = sizes.heads_q * F.head_dim_v
    for c in tl.range(sizes.chunk, loop_unroll_factor=4):  # so that four chunks are on their way at once
        line = (c * sizes.batch + at.b) * tl.cast(sizes.heads_q, tl.int64) * sizes.seqlen_q + h * sizes.seqlen_q
        lse = tl.load(parts_lse + line + i, mask=i < sizes.seqlen_q, other=float("-inf"))
        base = parts + ((c * tokens + at.b * sizes.seqlen_q) * row + h * F.head_dim_v)
        o = load_piece(base, row, m0, at.seqlen_q - m0, None, F.tile_m, True, 0, True, F)
        m_new = tl.maximum(m, lse)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        rescale, weight = exp(m - shift), exp(lse - shift)
        l = l * rescale + weight
        acc = acc * rescale[:, None] + o * weight[:, None]
        m = m_new
    finish(m, l, (acc,), m0, h, tensors, sizes, scales, at, F)
