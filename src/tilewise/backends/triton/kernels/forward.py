"""Forward (docs/algorithm.md#4-forward; FlashAttention-2, Algorithm 1): query tiles outside, keys inside.

    S = scale · Q Kᵀ    m' = max(m, rowmax S)    P = exp2(S - m')    l = l·α + rowsum P    acc = acc·α + P V    (6)

and once at the end ``O = acc / l``, ``lse = m + log l`` (7). m is in units of log2, for fp32 inputs natural
(:func:`tile.exponential`). Where scores are bounded, as a softcap bounds them, m stays 0: there is neither a maximum nor a
rescaling (docs/decisions.md#triton-softcap).

Tensors: q, k, v as in the public call; o contiguous (batch, seqlen_q, heads_q, head_dim_v); lse fp32 (batch, heads_q, seqlen_q).
Packed, the batch axis is missing.

One program computes a tile of ``tile_m`` queries of one head. Which key tiles are partial and which are full follows from the
interval of its first and its last row::

    first   full          full_end  last
      | partial | full full full | partial |          keys

Where descriptors may read every tile (``FACTS.whole``) and none are listed, all tiles are one loop, with the mask under a
branch that a whole program takes or does not take. Elsewhere the full tiles are one loop and the partial ones, at both ends,
another. The full loop comes first: with the partial loop first, ptxas makes every matrix product of the full one wait for
itself (docs/decisions.md#triton-one-loop). One loop for each end would cost registers. A predicate's tiles come as two lists,
the full ones first too; where none are listed, all are partial, and in one loop (docs/decisions.md#triton-windows).

Keys are split, and heads share a tile, in :mod:`paged` alone.
"""

# ruff: noqa: RET505, RUF005 - a compile-time `if` keeps its `else`: without it both returns would be compiled; and Triton's
# tuples are added, not unpacked

from typing import Any, NamedTuple

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.arguments import (
    plain_sizes,
    scheduled,
    with_heads,
    with_pair_tile,
    with_tile,
    work_tile,
)
from tilewise.backends.triton.kernels.mask import (
    dropout_keep,
    key_interval,
    over_tiles,
    query_interval,
)
from tilewise.backends.triton.kernels.maths import exp, here, log
from tilewise.backends.triton.kernels.tile import (
    LN2,
    LOG2E,
    accumulate,
    dot_transposed,
    exponential,
    line_of,
    load_rows,
    load_streamed,
    rescaled,
    source_of,
    store_rows,
    token_of,
    zeros,
)


class QueryTile(NamedTuple):
    """The query tile of a program, and what its key tiles are read through.

    Attributes:
        m0, head: its first row and its query head.
        q: a tile of (tile_m, head_dim). lo, hi: the key interval of each row, int32 (tile_m,).
        k, v: the sources of the key head.
        pairs: the descriptor of a leaf that the score reads at i and j; a pointer, unused, where there is none.
    """

    m0: Any
    head: Any
    q: Any
    lo: Any
    hi: Any
    k: Any
    v: Any
    pairs: Any


@triton.jit
def forward_kernel(tensors, sizes, scales, k_view, k_rest, v_view, v_rest, pairs, FACTS: tl.constexpr):
    """The attention of one query tile.

    Grid: (slots · heads_q · batch,). The last tiles come first: under a causal mask they are the longest.

    Args:
        k_view, k_rest, v_view, v_rest: descriptors for the first and the second piece of the head dim, None where there is none.
        pairs: a descriptor, or None (:class:`QueryTile`).
    """
    sizes = plain_sizes(sizes)
    slot, head, b = scheduled(sizes.heads_q // sizes.heads_k, sizes)
    work = work_tile(sizes.slots - 1 - slot, b, tensors, sizes, scales, OVER_KEYS=False, FACTS=FACTS)
    work = with_heads(work, head, FACTS)
    pairs = tensors.q if pairs is None else pairs
    query = load_query_tile(tensors, sizes, work, head, (k_view, k_rest), (v_view, v_rest), pairs, FACTS)
    # The state: m, l fp32 (tile_m,); acc fp32 (tile_m, width) for each piece of head_dim_v.
    m = tl.full([FACTS.tile_m], 0.0 if FACTS.bounded else float("-inf"), tl.float32)
    l = tl.full([FACTS.tile_m], 0.0, tl.float32)
    acc = zeros(FACTS.tile_m, OF_V=True, FACTS=FACTS)

    beside = query, tensors, sizes, scales, work
    m, l, acc = over_tiles(
        key_block, (m, l, acc), query.m0, head, beside, tensors, sizes, work, OF_QUERIES=False, FACTS=FACTS
    )
    epilogue(m, l, acc, m, query.m0, head, tensors, sizes, scales, work, FACTS)


# -- Load ----------------------------------------------------------------------------------------------------------


@triton.jit
def load_query_tile(tensors, sizes, work, head, k_views, v_views, pairs, FACTS: tl.constexpr):
    """The :class:`QueryTile` of a head; rows past the sequence's last are zero."""
    m0 = work.block * FACTS.tile_m
    q = source_of(tensors.q, (k_views[1] if FACTS.chunk else None, None), sizes.q, work, work.start_q, head, FACTS)
    # Q: (tile_m, width) for each piece, by pointers: it is read once, before the loop.
    q = load_rows(q, m0, work.seqlen_q - m0, None, FACTS.tile_m, OF_V=False, MASKED=True, FACTS=FACTS)
    i = seen_rows(m0, work, FACTS)
    lo, hi = key_interval(i, head, work, FACTS)
    head_k = head // (sizes.heads_q // sizes.heads_k)
    k = source_of(tensors.k, k_views, sizes.k, work, work.start_k, head_k, FACTS)
    v = source_of(tensors.v, v_views, sizes.v, work, work.start_k, head_k, FACTS)
    return QueryTile(m0, head, q, lo, hi, k, v, pairs)


@triton.jit
def seen_rows(m0, work, FACTS: tl.constexpr):
    """The query whose keys each row of a tile sees, int32 (tile_m,): its own; under a predicate, past the last row the last one's.

    So such a row opens no key that the others do not see, whose row of V may hold NaN. An empty interval in its place costs registers:
    0.85 to 0.91 of the pace without causal, for 0.95 to 1.00 (H200, docs/tried.md).
    """
    i = m0 + tl.arange(0, FACTS.tile_m)
    if FACTS.keep is not None:
        i = tl.minimum(i, tl.maximum(work.seqlen_q - 1, 0))
    return i


@triton.jit
def load_key_value(query, n0, left, seen, partial, FACTS: tl.constexpr):
    """The tiles of k and v at ``n0``; v is () where :func:`key_block` loads it later.

    By pointers v comes later, as rows of it may have to be left out, unless ``seen``, :func:`pairs_of_predicate`, tells which. By
    descriptors both come at once, so that there is one barrier to wait for, unless the product of q and k would then wait for v (not
    ``FACTS.together``; docs/decisions.md#triton-v-beside-k).
    """
    k = load_streamed(query.k, n0, left, None, FACTS.tile_n, OF_V=False, partial=partial, FACTS=FACTS)
    v = ()
    if FACTS.together and (FACTS.whole or (FACTS.tma and not partial)):
        v = load_streamed(query.v, n0, left, None, FACTS.tile_n, OF_V=True, partial=partial, FACTS=FACTS)
    elif FACTS.together and len(seen) > 0:
        v = load_streamed(query.v, n0, left, seen[1], FACTS.tile_n, OF_V=True, partial=partial, FACTS=FACTS)
    return k, v


# -- One key block -------------------------------------------------------------------------------------------------


@triton.jit
def key_block(n0, state, beside, partial, FACTS: tl.constexpr):
    """The state (m, l, acc) after the key tile at ``n0``, by (6); the arguments are those of :func:`mask.over_tiles`."""
    m, l, acc = state
    query, tensors, sizes, scales, work = beside
    j = n0 + tl.arange(0, FACTS.tile_n)
    left = work.seqlen_k - n0
    work = with_tile(
        with_pair_tile(work, query.pairs, query.head, query.m0, n0, OVER_KEYS=False, FACTS=FACTS), query.m0, n0, FACTS
    )
    seen = ()
    # Before the loads, so that V's need not wait for a product. Where all rows of V are read, kept pairs wait in registers, so they come
    # later, but not of listed tiles: beside documents 255 registers spilled (D 64, sm_90a).
    if FACTS.lists or not FACTS.whole:
        seen = pairs_of_predicate(j, query, work, partial, FACTS)
    # K: (tile_n, head_dim), V: (tile_n, head_dim_v), in the inputs' dtype.
    k, v = load_key_value(query, n0, left, seen, partial, FACTS)
    s = dot_transposed(query.q, k, FACTS)  # S = Q Kᵀ, (tile_m, tile_n) fp32
    if FACTS.bounded:  # no exponential overflows, and any m is as exact as the maximum
        m_new = m
        p = bounded_exponentials(s, query, j, scales, work, FACTS)
        shown = apply_mask(p, 0.0, seen, j, query, work, partial, FACTS)
        p = shown[0]
        l += tl.sum(p, 1)
    else:
        if FACTS.general:
            s = apply_score(s, query, j, scales, work, FACTS)
        shown = apply_mask(s, float("-inf"), seen, j, query, work, partial, FACTS)
        m_new, p, rescale = online_softmax(shown[0], m, scales, partial, FACTS)
        l = l * rescale + tl.sum(p, 1)
        acc = rescaled(acc, rescale)
    alive = None
    if len(shown) > 1:
        alive = shown[1]
    if FACTS.dropout:  # l is of all pairs: dropout acts on P after normalisation
        keep = dropout_keep(query.m0, n0, work.b, query.head, tensors, sizes, FACTS.tile_m, FACTS.tile_n)
        p = tl.where(keep, p, 0.0)
    if len(v) == 0:  # a key that no row here sees has P = 0, and its row of V is not read: it may hold NaN
        v = load_streamed(query.v, n0, left, alive, FACTS.tile_n, OF_V=True, partial=partial, FACTS=FACTS)
    acc = accumulate(p, v, acc, FACTS)  # acc += P V, (tile_m, head_dim_v) fp32; P is rounded to V's dtype
    return m_new, l, acc


@triton.jit
def within_ends(j, query, FACTS: tl.constexpr):
    """Whether a key lies in the interval of each row, bool (tile_m, tile_n)."""
    at_j = here(j, FACTS)
    within = at_j[None, :] < query.hi[:, None]
    if FACTS.lo is not None:
        within = within & (at_j[None, :] >= query.lo[:, None])
    return within


@triton.jit
def pairs_of_predicate(j, query, work, partial, FACTS: tl.constexpr):
    """``(kept, alive)`` of a tile under a predicate, else (): whether a row sees a key, bool (tile_m, tile_n), and whether some row of
    the tile does, bool (tile_n,)."""
    seen = ()
    if FACTS.keep is not None:  # noqa: SIM102 - of compile time
        if partial:
            i = seen_rows(query.m0, work, FACTS)
            kept = within_ends(j, query, FACTS)
            kept = kept & FACTS.keep(work.b, query.head, i[:, None], j[None, :], work)
            seen = kept, tl.max(kept.to(tl.int8), 0) > 0
    return seen


@triton.jit
def apply_mask(x, HIDDEN: tl.constexpr, seen, j, query, work, partial, FACTS: tl.constexpr):
    """``(x, alive)``, or ``(x,)`` where every key is read.

    Args:
        x: fp32 (tile_m, tile_n), scores or exponentials; the result is HIDDEN where a row does not see a key.
        seen: :func:`pairs_of_predicate`, or () where they are only needed now.

    Returns:
        alive: bool (tile_n,), whether a key's row of V may be read.
    """
    alive = ()
    if partial:
        if FACTS.keep is not None:
            if len(seen) == 0:
                seen = pairs_of_predicate(j, query, work, partial, FACTS)
            kept = seen[0]
            alive = (seen[1],)
        else:
            kept = within_ends(j, query, FACTS)
            if FACTS.masked and not FACTS.whole:
                first, last = query_interval(j, query.head, work, FACTS)
                alive = (first < last,)
        x = tl.where(kept, x, HIDDEN)
    return (x,) + alive


@triton.jit
def online_softmax(s, m, scales, partial, FACTS: tl.constexpr):
    """``(m', P, α)`` of (6): fp32 (tile_m,), (tile_m, tile_n) and (tile_m,).

    Args:
        s: scores; without a score function (not ``FACTS.general``) still the products of q and k.
    """
    if FACTS.natural:
        m_new = tl.maximum(m, tl.max(s, 1))
    else:  # the unit is multiplied inside the exponent, as part of a fused multiply-add
        unit = 1.0 if FACTS.binary else LOG2E if FACTS.general else scales.softmax * LOG2E
        m_new = tl.maximum(m, tl.max(s, 1) * unit)
    shift = m_new
    if FACTS.score is not None or FACTS.whole or partial:  # a row that has seen no key: -inf - -inf would be NaN
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    if FACTS.natural:
        p = exponential(s - shift[:, None], FACTS)
    else:
        p = tl.exp2(s * unit - shift[:, None])
    return m_new, p, exponential(m - shift, FACTS)


@triton.jit
def query_rows(query, FACTS: tl.constexpr):
    """The query of each row of a tile, int32 (tile_m,)."""
    if FACTS.pages is None:
        return query.m0 + tl.arange(0, FACTS.tile_m)
    else:  # several rows may be heads of one query
        return query.rows


@triton.jit
def apply_score(s, query, j, scales, work, FACTS: tl.constexpr):
    """The scores of a tile of products, fp32 (tile_m, tile_n); in units of log2 if ``FACTS.binary``."""
    if FACTS.score is not None:
        i = query_rows(query, FACTS)
        z = FACTS.score(s, work.b, query.head, i[:, None], j[None, :], work).to(tl.float32)
        s = tl.broadcast_to(z, s.shape)
    else:
        s = s * scales.softmax
    return s


@triton.jit
def bounded_exponentials(s, query, j, scales, work, FACTS: tl.constexpr):
    """2 to the power of the scores of a tile of products, for scores that are bounded."""
    if FACTS.weights is not None:
        i = query_rows(query, FACTS)
        p = FACTS.weights(s, work.b, query.head, i[:, None], j[None, :], work)
    else:
        p = tl.exp2(apply_score(s, query, j, scales, work, FACTS))
    return p


# -- Epilogue ------------------------------------------------------------------------------------------------------


@triton.jit
def lse_of(m, l, FACTS: tl.constexpr):
    """m + log l, in natural units; with ``FACTS.ordered`` by a fused multiply-add, which the assembler would choose in some kernels."""
    if FACTS.natural:
        return m + log(l)
    elif FACTS.ordered:
        return tl.fma(m, tl.full(m.shape, LN2, tl.float32), log(l))
    else:
        return m * LN2 + log(l)


@triton.jit
def epilogue(m, l, acc, largest, m0, head, tensors, sizes, scales, work, FACTS: tl.constexpr):
    """Stores o = acc / l and lse = m + log l, (7), with the sink merged in, (18); and ``largest``, the rows' largest scores, in m's
    unit, where they are asked for."""
    i = m0 + tl.arange(0, FACTS.tile_m)
    left = work.seqlen_q - m0
    lse = tl.where(l == 0, float("-inf"), lse_of(m, l, FACTS))
    weight = 1.0 / tl.where(l == 0, 1.0, l)  # a row that saw no key: o = 0
    if FACTS.sink:
        sink = tl.load(tensors.sink + head).to(tl.float32)
        if FACTS.packed:
            sink = tl.where(work.b == sizes.batch, float("-inf"), sink)  # rows past the last sequence have none
        weight, lse = with_sink(weight, lse, l, sink)
    if FACTS.dropout:
        weight = weight * scales.keep

    token = token_of(sizes.seqlen_q, work, work.start_q, FACTS)
    line = line_of(head, sizes.heads_q, sizes.seqlen_q, work, work.start_q, FACTS)
    row = sizes.heads_q * FACTS.head_dim_v
    o = tensors.o + (token * row + head * FACTS.head_dim_v)
    # O: (tile_m, head_dim_v) in o's dtype; lse: fp32 (tile_m,).
    store_rows(o, row, m0, left, acc, weight[:, None], FACTS.tile_m, OF_V=True, FACTS=FACTS)
    tl.store(tensors.lse + line + i, lse, mask=i < work.seqlen_q)
    if FACTS.max_logit:  # a maximum passes over NaN, the sum of the row does not
        largest = tl.where(l != l, l, largest if FACTS.natural else largest * LN2)
        tl.store(tensors.max_logit + line + i, largest, mask=i < work.seqlen_q)


@triton.jit
def with_sink(weight, lse, l, sink):
    """The factor of a row's sums of values, and its lse, after the merge with the state (o = 0, lse = sink).

    Args:
        weight, lse: of the row without it. l: its sum of exponentials, 0 where it saw no key. sink: -inf where there is none.
    """
    top = tl.maximum(lse, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = top + log(exp(lse - top) + exp(sink - top))
    total = tl.where(l == 0, sink, tl.where(sink == float("-inf"), lse, total))
    return tl.where(l == 0, 0.0, weight * exp(lse - total)), total
