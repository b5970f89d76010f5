"""Forward mode and the tangent of the backward (docs/algorithm.md, (30) to (34)): `forward` and `backward` with a direction beside.

    Ṡ = f' scale (Q̇ Kᵀ + Q K̇ᵀ) + leaves    P = exp(S - lse)                                         (30)
    lsė = Σ_j P Ṡ    Ȯ = (P ∘ Z) V̇ + (P ∘ Z ∘ Ṡ) V - lsė O       query tiles outside                 (31)  `tangent_kernel`
    dZ = P ∘ (dP - delta)    dŻ = dZ ∘ (Ṡ - lsė) + P ∘ (dṖ - deltȧ)                                  (33)
    dV̇ = (P ∘ Z ∘ (Ṡ - lsė))ᵀ dO    dK̇ = scale (dṠᵀ Q + dSᵀ Q̇)   key tiles outside, queries inside    (34)  `dkdv_tangent_kernel`
    dQ̇ = scale (dṠ K + dS K̇)                                     query tiles outside, keys inside    (34)  `dq_tangent_kernel`

A dot is a tangent. lse is the forward's, so there is no maximum. Tangents are contiguous, and come by pointers. The two passes of the
backward have 8 and 7 products of a tile, the pass of the forward 5.
"""

# ruff: noqa: RUF005 - Triton's tuples are added, not unpacked

from typing import Any, NamedTuple

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.arguments import plain_sizes, scheduled, work_tile
from tilewise.backends.triton.kernels.backward import (
    key_sources,
    load_statistics,
    query_head,
    score_exponent,
    visible_pairs,
)
from tilewise.backends.triton.kernels.mask import (
    block_lists,
    dropout_keep,
    key_interval,
    m_block_ranges,
    n_block_ranges,
    partial_block,
    query_interval,
)
from tilewise.backends.triton.kernels.maths import exp
from tilewise.backends.triton.kernels.tile import (
    LOG2E,
    Source,
    accumulate,
    dot,
    dot_transposed,
    exponential,
    load_rows,
    source_of,
    store_rows,
    zeros,
)


class Moved(NamedTuple):
    """Pointers to tangents, all contiguous: of q, k, v, dO and the sink; of o and lse, which the first kernel writes and the others
    read; of delta, with ``Sizes.seqlen_q_rounded`` rows a head. None where a kernel has no use for one, or it is zero."""

    q: Any = None
    k: Any = None
    v: Any = None
    do: Any = None
    o: Any = None
    lse: Any = None
    delta: Any = None
    sink: Any = None


class MovingRows(NamedTuple):
    """A query tile and its tangents.

    Attributes:
        m0, head: its first row and its query head. lo, hi: the key interval of each row, int32 (tile_m,).
        q, do, moved_q, moved_do: tiles; () where a kernel does not need one. lse2, delta, moved_lse, moved_delta: fp32 (tile_m,).
    """

    m0: Any
    head: Any
    lo: Any
    hi: Any
    q: Any
    do: Any
    moved_q: Any
    moved_do: Any
    lse2: Any
    delta: Any
    moved_lse: Any
    moved_delta: Any


class MovingKeys(NamedTuple):
    """The sources of k and v of a key head, and of their tangents."""

    k: Any
    v: Any
    moved_k: Any
    moved_v: Any


# -- Load ----------------------------------------------------------------------------------------------------------


@triton.jit
def contiguous_source(tensor, heads, seqlen, work, start, head, OF_V: tl.constexpr, FACTS: tl.constexpr):
    """The Source of a head of a contiguous tensor (batch, seqlen, heads, head_dim), packed without batch."""
    DIM: tl.constexpr = FACTS.head_dim_v if OF_V else FACTS.head_dim
    token = tl.cast(start, tl.int64)
    if not FACTS.packed:
        token += tl.cast(work.b, tl.int64) * seqlen
    row = heads * DIM
    return Source(tensor + (token * row + head * DIM), row, (tensor, tensor), work.b, head, start)


@triton.jit
def moving_keys(tensors, moved, sizes, work, head_k, FACTS: tl.constexpr):
    """The :class:`MovingKeys` of a key head."""
    k, v = key_sources(tensors, sizes, work, head_k, (None, None), (None, None), FACTS)
    moved_k = contiguous_source(moved.k, sizes.heads_k, sizes.seqlen_k, work, work.start_k, head_k, False, FACTS)
    moved_v = contiguous_source(moved.v, sizes.heads_k, sizes.seqlen_k, work, work.start_k, head_k, True, FACTS)
    return MovingKeys(k, v, moved_k, moved_v)


@triton.jit
def load_tangent_rows(m0, head, tensors, moved, sizes, work, FACTS: tl.constexpr):
    """The :class:`MovingRows` of the forward's pass: without dO and delta."""
    left = work.seqlen_q - m0
    i = m0 + tl.arange(0, FACTS.tile_m)
    q = source_of(tensors.q, (None, None), sizes.q, work, work.start_q, head, FACTS)
    moved_q = contiguous_source(moved.q, sizes.heads_q, sizes.seqlen_q, work, work.start_q, head, False, FACTS)
    line = row_line(head, sizes, work, FACTS)
    lse = tl.load(tensors.lse + line + i, mask=i < work.seqlen_q, other=float("-inf"))
    lse2 = tl.where(lse == float("-inf"), float("inf"), lse if FACTS.natural else lse * LOG2E)
    lo, hi = key_interval(i, head, work, FACTS)
    # Q and its tangent: (tile_m, head_dim), in the inputs' dtype.
    q = load_rows(q, m0, left, None, FACTS.tile_m, False, True, FACTS)
    moved_q = load_rows(moved_q, m0, left, None, FACTS.tile_m, False, True, FACTS)
    return MovingRows(m0, head, lo, hi, q, (), moved_q, (), lse2, lse2, lse2, lse2)


@triton.jit
def row_line(head, sizes, work, FACTS: tl.constexpr):
    """The 64-bit offset of the sequence's first row in tensors of lse's shape."""
    line = tl.cast(head, tl.int64) * sizes.seqlen_q + work.start_q
    if not FACTS.packed:
        line += tl.cast(work.b, tl.int64) * sizes.heads_q * sizes.seqlen_q
    return line


@triton.jit
def load_moving_rows(m0, rows, tensors, moved, sizes, work, FACTS: tl.constexpr):
    """The :class:`MovingRows` at ``m0`` of a :class:`QueryHead`; rows past the last are zero, and their P is 0."""
    left = work.seqlen_q - m0
    i = m0 + tl.arange(0, FACTS.tile_m)
    ok = i < work.seqlen_q
    moved_q = contiguous_source(moved.q, sizes.heads_q, sizes.seqlen_q, work, work.start_q, rows.head, False, FACTS)
    lse2, delta = load_statistics(tensors, rows.statistics_start, i, work.seqlen_q, True)
    moved_lse = tl.load(moved.lse + rows.lse_start + i, mask=ok, other=0.0)
    moved_delta = tl.load(moved.delta + rows.statistics_start + i, mask=ok, other=0.0)
    lo, hi = key_interval(i, rows.head, work, FACTS)
    # Q and its tangent: (tile_m, head_dim), dO: (tile_m, head_dim_v), in the inputs' dtype.
    q = load_rows(rows.q, m0, left, None, FACTS.tile_m, False, True, FACTS)
    do = load_rows(rows.do, m0, left, None, FACTS.tile_m, True, True, FACTS)
    moved_q = load_rows(moved_q, m0, left, None, FACTS.tile_m, False, True, FACTS)
    moved_do = ()
    if FACTS.moved_do:
        source = contiguous_source(moved.do, sizes.heads_q, sizes.seqlen_q, work, work.start_q, rows.head, True, FACTS)
        moved_do = load_rows(source, m0, left, None, FACTS.tile_m, True, True, FACTS)
    return MovingRows(m0, rows.head, lo, hi, q, do, moved_q, moved_do, lse2, delta, moved_lse, moved_delta)


@triton.jit
def load_moving_keys(n0, i, j, query, keys, work, partial: tl.constexpr, FACTS: tl.constexpr):
    """The pairs of the tile at ``n0`` that count, bool (tile_m, tile_n), or () where all do; then k, v and their tangents."""
    left = work.seqlen_k - n0
    kept, alive = (), None
    if partial:  # a key that no row here sees has P = 0, and its rows are not read: they may hold NaN
        kept = visible_pairs(query, i, j, query.head, work, FACTS)
        if FACTS.keep is not None:
            alive = tl.max(kept.to(tl.int32), 0) > 0
        elif FACTS.masked:
            first, last = query_interval(j, query.head, work, FACTS)
            alive = first < last
    # K, V and their tangents: (tile_n, head_dim) and (tile_n, head_dim_v), in the inputs' dtype.
    k = load_rows(keys.k, n0, left, alive, FACTS.tile_n, False, partial, FACTS)
    v = load_rows(keys.v, n0, left, alive, FACTS.tile_n, True, partial, FACTS)
    moved_k = load_rows(keys.moved_k, n0, left, alive, FACTS.tile_n, False, partial, FACTS)
    moved_v = load_rows(keys.moved_v, n0, left, alive, FACTS.tile_n, True, partial, FACTS)
    return kept, k, v, moved_k, moved_v


@triton.jit
def over_key_tiles(
    block: tl.constexpr, first_sum, second_sum, query, keys, tensors, sizes, scales, work, FACTS: tl.constexpr
):
    """The two sums of a pass after every key tile that the query tile sees: ``block`` adds one. Full tiles come first."""
    if FACTS.lists:
        partial, partials, full, fulls, _ = block_lists(tensors, sizes, work.b, query.head, work.block, FACTS)
        for t in range(fulls):
            n0 = tl.load(full + t) * FACTS.tile_n
            first_sum, second_sum = block(
                n0, first_sum, second_sum, query, keys, tensors, sizes, scales, work, False, FACTS
            )
        for t in range(partials):
            n0 = tl.load(partial + t) * FACTS.tile_n
            first_sum, second_sum = block(
                n0, first_sum, second_sum, query, keys, tensors, sizes, scales, work, True, FACTS
            )
    else:
        first, full, full_end, last = n_block_ranges(query.m0, query.head, work, FACTS)
        if FACTS.keep is None:  # a predicate may hide any pair: no tile is full
            for n in range(full, full_end):
                n0 = n * FACTS.tile_n
                first_sum, second_sum = block(
                    n0, first_sum, second_sum, query, keys, tensors, sizes, scales, work, False, FACTS
                )
        for t in range((full - first) + (last - full_end)):  # the tiles before the full ones, and those behind
            n0 = partial_block(t, first, full, full_end) * FACTS.tile_n
            first_sum, second_sum = block(
                n0, first_sum, second_sum, query, keys, tensors, sizes, scales, work, True, FACTS
            )
    return first_sum, second_sum


# -- Pairs ---------------------------------------------------------------------------------------------------------


@triton.jit
def dot_transposed_onto(left, right, total, FACTS: tl.constexpr):
    """``left rightᵀ + total`` in fp32, (rows of left, rows of right), summed over the head dim."""
    for piece in tl.static_range(len(left)):
        total = dot(left[piece], tl.trans(right[piece]), total, FACTS)
    return total


@triton.jit
def scores_moving(s, ds, lse2, head, i, j, scales, work, FACTS: tl.constexpr):
    """P and the tangent of the scores, (30), for tiles of products of q and k and of their tangents; i, j and lse2 broadcast."""
    p = exponential(score_exponent(s, head, i, j, scales, work, FACTS) - lse2, FACTS)
    ds = ds * scales.softmax
    if FACTS.moved is not None:
        ds = tl.broadcast_to(FACTS.moved(s, ds, work.b, head, i, j, work).to(tl.float32), s.shape)
    return p, ds


@triton.jit
def through_score(dz, moved_dz, p, s, ds, head, i, j, scales, work, FACTS: tl.constexpr):
    """dS and its tangent, from those of dZ."""
    if FACTS.slope is not None:
        moved_dz = moved_dz * FACTS.slope(s, work.b, head, i, j, work)
        ds = ds * scales.softmax
        moved_dz += dz * FACTS.moved_slope(s, ds, work.b, head, i, j, work)
        dz = dz * FACTS.slope(s, work.b, head, i, j, work)
        # 0 times a slope that is not finite
        dz, moved_dz = tl.where(p == 0.0, 0.0, dz), tl.where(p == 0.0, 0.0, moved_dz)
    return dz, moved_dz


# -- The forward: query tiles outside ------------------------------------------------------------------------------


@triton.jit
def tangent_kernel(tensors, sizes, scales, moved, FACTS: tl.constexpr):
    """The tangents of o and lse of one query tile. Grid: (slots · heads_q · batch); the last tiles first."""
    sizes = plain_sizes(sizes)
    slot, head, b = scheduled(sizes.heads_q // sizes.heads_k, sizes)
    work = work_tile(sizes.slots - 1 - slot, b, tensors, sizes, scales, False, FACTS)
    query = load_tangent_rows(work.block * FACTS.tile_m, head, tensors, moved, sizes, work, FACTS)
    keys = moving_keys(tensors, moved, sizes, work, head // (sizes.heads_q // sizes.heads_k), FACTS)
    mean = tl.full([FACTS.tile_m], 0.0, tl.float32)
    acc = zeros(FACTS.tile_m, True, FACTS)
    mean, acc = over_key_tiles(tangent_block, mean, acc, query, keys, tensors, sizes, scales, work, FACTS)
    tangent_epilogue(mean, acc, query, tensors, moved, sizes, scales, work, FACTS)


@triton.jit
def tangent_block(n0, mean, acc, query, keys, tensors, sizes, scales, work, partial: tl.constexpr, FACTS: tl.constexpr):
    """``(mean, acc)``, the sums of (31), after the key tile at ``n0``."""
    i, j = query.m0 + tl.arange(0, FACTS.tile_m), n0 + tl.arange(0, FACTS.tile_n)
    kept, k, v, moved_k, moved_v = load_moving_keys(n0, i, j, query, keys, work, partial, FACTS)
    s = dot_transposed(query.q, k, FACTS)  # S = Q Kᵀ, (tile_m, tile_n) fp32
    ds = dot_transposed(query.moved_q, k, FACTS)  # Ṡ = Q̇ Kᵀ + Q K̇ᵀ, (tile_m, tile_n) fp32
    ds = dot_transposed_onto(query.q, moved_k, ds, FACTS)
    p, ds = scores_moving(s, ds, query.lse2[:, None], query.head, i[:, None], j[None, :], scales, work, FACTS)
    if partial:
        p = tl.where(kept, p, 0.0)
    if partial or FACTS.score is not None:
        ds = tl.where(p == 0.0, 0.0, ds)  # 0 times what is not finite
    moved_p = p * ds
    mean += tl.sum(moved_p, 1)
    if FACTS.dropout:
        z = dropout_keep(query.m0, n0, work.b, query.head, tensors, sizes, FACTS.tile_m, FACTS.tile_n)
        p, moved_p = tl.where(z, p, 0.0), tl.where(z, moved_p, 0.0)
    acc = accumulate(p, moved_v, acc, FACTS)  # Ȯ += P V̇ + (P ∘ Ṡ) V, (tile_m, head_dim_v) fp32
    return mean, accumulate(moved_p, v, acc, FACTS)


@triton.jit
def tangent_epilogue(mean, acc, query, tensors, moved, sizes, scales, work, FACTS: tl.constexpr):
    """Stores the tangents of o and lse, (31), with the sink's part."""
    m0, head = query.m0, query.head
    left = work.seqlen_q - m0
    i = m0 + tl.arange(0, FACTS.tile_m)
    line = row_line(head, sizes, work, FACTS)
    if FACTS.sink and FACTS.moved_sink:
        lse = tl.load(tensors.lse + line + i, mask=i < work.seqlen_q, other=0.0)
        sink = tl.load(tensors.sink + head).to(tl.float32)
        share = tl.where(lse == float("-inf"), 0.0, exp(sink - lse))  # rows past the last sequence have no sink
        mean += share * tl.load(moved.sink + head).to(tl.float32)
    to = contiguous_source(moved.o, sizes.heads_q, sizes.seqlen_q, work, work.start_q, head, True, FACTS)
    o = contiguous_source(tensors.o, sizes.heads_q, sizes.seqlen_q, work, work.start_q, head, True, FACTS)
    o = load_rows(o, m0, left, None, FACTS.tile_m, True, True, FACTS)
    total = ()
    for n in tl.static_range(len(acc)):
        total = total + ((acc[n] * scales.keep if FACTS.dropout else acc[n]) - mean[:, None] * o[n].to(tl.float32),)
    # O's tangent: (tile_m, head_dim_v), rounded to o's dtype; lse's: fp32 (tile_m,).
    store_rows(to.pointer, to.row, m0, left, total, 1.0, FACTS.tile_m, True, FACTS)
    tl.store(moved.lse + line + i, mean, mask=i < work.seqlen_q)


# -- The backward's dQ: query tiles outside ------------------------------------------------------------------------


@triton.jit
def dq_tangent_kernel(tensors, sizes, scales, moved, FACTS: tl.constexpr):
    """The tangent of dQ of one query tile. Grid: (slots · heads_q · batch); the last tiles first."""
    sizes = plain_sizes(sizes)
    slot, head, b = scheduled(sizes.heads_q // sizes.heads_k, sizes)
    work = work_tile(sizes.slots - 1 - slot, b, tensors, sizes, scales, False, FACTS)
    rows = query_head(tensors, sizes, work, head, (None, None), (None, None), None, FACTS)
    query = load_moving_rows(work.block * FACTS.tile_m, rows, tensors, moved, sizes, work, FACTS)
    keys = moving_keys(tensors, moved, sizes, work, head // (sizes.heads_q // sizes.heads_k), FACTS)
    dq = zeros(FACTS.tile_m, False, FACTS)
    sums = ()  # of the leaves that are summed by rows: fp32 (tile_m,) each
    for _ in tl.static_range(len(FACTS.row_grads)):
        sums = sums + (tl.full([FACTS.tile_m], 0.0, tl.float32),)
    dq, sums = over_key_tiles(dq_tangent_block, dq, sums, query, keys, tensors, sizes, scales, work, FACTS)
    i = query.m0 + tl.arange(0, FACTS.tile_m)
    for n in tl.static_range(len(FACTS.row_grads)):
        tl.store(work.grads[FACTS.row_grads[n]] + rows.lse_start + i, sums[n], mask=i < work.seqlen_q)
    to = contiguous_source(tensors.dq, sizes.heads_q, sizes.seqlen_q, work, work.start_q, head, False, FACTS)
    left = work.seqlen_q - query.m0
    store_rows(to.pointer, to.row, query.m0, left, dq, scales.softmax, FACTS.tile_m, False, FACTS)


@triton.jit
def dq_tangent_block(
    n0, dq, sums, query, keys, tensors, sizes, scales, work, partial: tl.constexpr, FACTS: tl.constexpr
):
    """``(dq, sums)``, the sums of the tangents of dQ and of leaves by rows, after the key tile at ``n0``."""
    i, j = query.m0 + tl.arange(0, FACTS.tile_m), n0 + tl.arange(0, FACTS.tile_n)
    kept, k, v, moved_k, moved_v = load_moving_keys(n0, i, j, query, keys, work, partial, FACTS)
    s = dot_transposed(query.q, k, FACTS)  # S = Q Kᵀ, (tile_m, tile_n) fp32
    raw = dot_transposed(query.moved_q, k, FACTS)  # Q̇ Kᵀ + Q K̇ᵀ, (tile_m, tile_n) fp32
    raw = dot_transposed_onto(query.q, moved_k, raw, FACTS)
    dp = dot_transposed(query.do, v, FACTS)  # dP = dO Vᵀ, (tile_m, tile_n) fp32
    moved_dp = dot_transposed(query.do, moved_v, FACTS)
    if FACTS.moved_do:
        moved_dp = dot_transposed_onto(query.moved_do, v, moved_dp, FACTS)
    p, ds = scores_moving(s, raw, query.lse2[:, None], query.head, i[:, None], j[None, :], scales, work, FACTS)
    if FACTS.dropout:
        z = dropout_keep(query.m0, n0, work.b, query.head, tensors, sizes, FACTS.tile_m, FACTS.tile_n)
        dp, moved_dp = tl.where(z, dp * scales.keep, 0.0), tl.where(z, moved_dp * scales.keep, 0.0)
    if partial:
        p = tl.where(kept, p, 0.0)
    dz = p * (dp - query.delta[:, None])
    moved_dz = dz * (ds - query.moved_lse[:, None]) + p * (moved_dp - query.moved_delta[:, None])
    if partial or FACTS.score is not None:
        dz, moved_dz = tl.where(p == 0.0, 0.0, dz), tl.where(p == 0.0, 0.0, moved_dz)
    moved_s = raw * scales.softmax
    if FACTS.leaves is not None:
        # Gradients that are stored where the leaf was read, or scattered with atomic additions.
        inside = (i[:, None] < work.seqlen_q) & (j[None, :] < work.seqlen_k)
        FACTS.leaves(dz, moved_dz, p > 0.0, inside, s, moved_s, work.b, query.head, i[:, None], j[None, :], work)
    if FACTS.rows is not None:
        more = FACTS.rows(dz, moved_dz, p > 0.0, s, moved_s, work.b, query.head, i[:, None], j[None, :], work)
        total = ()
        for n in tl.static_range(len(FACTS.row_grads)):
            total = total + (sums[n] + more[n],)
        sums = total
    dz, moved_dz = through_score(dz, moved_dz, p, s, raw, query.head, i[:, None], j[None, :], scales, work, FACTS)
    dq = accumulate(moved_dz, k, dq, FACTS)  # dQ̇ += dṠ K + dS K̇, (tile_m, head_dim) fp32; scaled when it is stored
    return accumulate(dz, moved_k, dq, FACTS), sums


# -- The backward's dK and dV: key tiles outside -------------------------------------------------------------------


@triton.jit
def dkdv_tangent_kernel(tensors, sizes, scales, moved, FACTS: tl.constexpr):
    """The tangents of dK and dV of one key tile. Grid: (slots · heads_k · batch)."""
    sizes = plain_sizes(sizes)
    slot, head_k, b = scheduled(1, sizes)
    work = work_tile(slot, b, tensors, sizes, scales, True, FACTS)
    n0 = work.block * FACTS.tile_n
    left = work.seqlen_k - n0
    keys = moving_keys(tensors, moved, sizes, work, head_k, FACTS)
    tiles = MovingKeys(
        load_rows(keys.k, n0, left, None, FACTS.tile_n, False, True, FACTS),
        load_rows(keys.v, n0, left, None, FACTS.tile_n, True, True, FACTS),
        load_rows(keys.moved_k, n0, left, None, FACTS.tile_n, False, True, FACTS),
        load_rows(keys.moved_v, n0, left, None, FACTS.tile_n, True, True, FACTS),
    )
    dk, dv = zeros(FACTS.tile_n, False, FACTS), zeros(FACTS.tile_n, True, FACTS)
    group = sizes.heads_q // sizes.heads_k
    for g in range(group):  # the query heads of the key head, in order
        head = head_k * group + g
        rows = query_head(tensors, sizes, work, head, (None, None), (None, None), None, FACTS)
        if FACTS.lists:
            partial, partials, full, fulls, _ = block_lists(tensors, sizes, work.b, head, work.block, FACTS)
            for t in range(fulls):
                m0 = tl.load(full + t) * FACTS.tile_m
                dk, dv = dkdv_tangent_block(m0, dk, dv, n0, tiles, rows, tensors, moved, sizes, scales, work, FACTS)
            for t in range(partials):
                m0 = tl.load(partial + t) * FACTS.tile_m
                dk, dv = dkdv_tangent_block(m0, dk, dv, n0, tiles, rows, tensors, moved, sizes, scales, work, FACTS)
        else:
            first, _, _, last = m_block_ranges(n0, head, work, FACTS)
            for m in range(first, last):
                m0 = m * FACTS.tile_m
                dk, dv = dkdv_tangent_block(m0, dk, dv, n0, tiles, rows, tensors, moved, sizes, scales, work, FACTS)
    to_k = contiguous_source(tensors.dk, sizes.heads_k, sizes.seqlen_k, work, work.start_k, head_k, False, FACTS)
    to_v = contiguous_source(tensors.dv, sizes.heads_k, sizes.seqlen_k, work, work.start_k, head_k, True, FACTS)
    store_rows(to_k.pointer, to_k.row, n0, left, dk, scales.softmax, FACTS.tile_n, False, FACTS)
    keep = scales.keep if FACTS.dropout else 1.0
    store_rows(to_v.pointer, to_v.row, n0, left, dv, keep, FACTS.tile_n, True, FACTS)


@triton.jit
def dkdv_tangent_block(m0, dk, dv, n0, keys, rows, tensors, moved, sizes, scales, work, FACTS: tl.constexpr):
    """``(dk, dv)``, the sums of their tangents, after the query tile at ``m0``; all tiles of pairs are (tile_n, tile_m)."""
    i = m0 + tl.arange(0, FACTS.tile_m)
    j = n0 + tl.arange(0, FACTS.tile_n)
    query = load_moving_rows(m0, rows, tensors, moved, sizes, work, FACTS)
    s = dot_transposed(keys.k, query.q, FACTS)  # Sᵀ = K Qᵀ, (tile_n, tile_m) fp32
    raw = dot_transposed(keys.moved_k, query.q, FACTS)
    raw = dot_transposed_onto(keys.k, query.moved_q, raw, FACTS)
    p, ds = scores_moving(s, raw, query.lse2[None, :], rows.head, i[None, :], j[:, None], scales, work, FACTS)
    dp = dot_transposed(keys.v, query.do, FACTS)  # dPᵀ = V dOᵀ, (tile_n, tile_m) fp32
    moved_dp = dot_transposed(keys.moved_v, query.do, FACTS)
    if FACTS.moved_do:
        moved_dp = dot_transposed_onto(keys.v, query.moved_do, moved_dp, FACTS)
    if FACTS.dropout:
        z = tl.trans(dropout_keep(m0, n0, work.b, rows.head, tensors, sizes, FACTS.tile_m, FACTS.tile_n))
        dp, moved_dp = tl.where(z, dp * scales.keep, 0.0), tl.where(z, moved_dp * scales.keep, 0.0)
    first, last = query_interval(j, rows.head, work, FACTS)
    kept = (i[None, :] >= first[:, None]) & (i[None, :] < last[:, None])
    kept = kept & (j[:, None] < work.seqlen_k) & (i[None, :] < work.seqlen_q)
    if FACTS.keep is not None:
        kept = kept & FACTS.keep(work.b, rows.head, i[None, :], j[:, None], work)
    p = tl.where(kept, p, 0.0)  # masking selects: a hidden pair's score may be anything
    dz = tl.where(p == 0.0, 0.0, p * (dp - query.delta[None, :]))
    moved_p = tl.where(p == 0.0, 0.0, p * (ds - query.moved_lse[None, :]))
    moved_dz = moved_p * (dp - query.delta[None, :]) + p * (moved_dp - query.moved_delta[None, :])
    moved_dz = tl.where(p == 0.0, 0.0, moved_dz)
    shown = tl.where(z, moved_p, 0.0) if FACTS.dropout else moved_p
    dv = accumulate(shown, query.do, dv, FACTS)  # dV̇ += (Ṗ ∘ Z)ᵀ dO, (tile_n, head_dim_v) fp32
    if FACTS.moved_do:
        dv = accumulate(tl.where(z, p, 0.0) if FACTS.dropout else p, query.moved_do, dv, FACTS)
    if FACTS.columns is not None:
        line = tl.cast(rows.head, tl.int64) * sizes.seqlen_k + work.start_k + j
        if not FACTS.packed:
            line += tl.cast(work.b, tl.int64) * sizes.heads_q * sizes.seqlen_k
        valid, moved_s = j < work.seqlen_k, raw * scales.softmax
        # Sums over the tile's queries of leaves read at j alone, fp32 (tile_n,), added atomically.
        FACTS.columns(dz, moved_dz, p > 0.0, line, valid, s, moved_s, work.b, rows.head, i[None, :], j[:, None], work)
    dz, moved_dz = through_score(dz, moved_dz, p, s, raw, rows.head, i[None, :], j[:, None], scales, work, FACTS)
    dk = accumulate(moved_dz, query.q, dk, FACTS)  # dK̇ += dṠᵀ Q + dSᵀ Q̇, (tile_n, head_dim) fp32
    return accumulate(dz, query.moved_q, dk, FACTS), dv
