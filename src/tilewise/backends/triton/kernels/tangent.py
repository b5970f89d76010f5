"""Forward mode and the tangent of the backward (docs/algorithm.md, (30) to (34)): `forward` and `backward` with a direction beside.

    Ṡ = f' scale (Q̇ Kᵀ + Q K̇ᵀ) + leaves    P = exp(S - lse)                                         (30)
    lsė = Σ_j P Ṡ    Ȯ = (P ∘ Z) V̇ + (P ∘ Z ∘ Ṡ) V - lsė O       query tiles outside                 (31)  `tangent_kernel`
    dZ = P ∘ (dP - delta)    dŻ = dZ ∘ (Ṡ - lsė) + P ∘ (dṖ - deltȧ)                                  (33)
    dV̇ = (P ∘ Z ∘ (Ṡ - lsė))ᵀ dO    dK̇ = scale (dṠᵀ Q + dSᵀ Q̇)   key tiles outside, queries inside    (34)  `dkdv_tangent_kernel`
    dQ̇ = scale (dṠ K + dS K̇)                                     query tiles outside, keys inside    (34)  `dq_tangent_kernel`

A dot is a tangent. lse is the forward's, so there is no maximum. Tangents are contiguous. The two passes of the backward have 8 and 7
products of a tile, the pass of the forward 5; a product with a tangent that is zero is left out.

Whole tiles come by descriptor where one may read them, as in `forward` and `backward`: the addresses of four tensors would take the
registers that hold the tiles of pairs. A product is written where its result is next used, so that few such tiles live at once.
"""

# ruff: noqa: RUF005 - Triton's tuples are added, not unpacked

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.arguments import plain_sizes, scheduled, work_tile
from tilewise.backends.triton.kernels.backward import score_exponent, store_dkdv, store_dq, visible_pairs
from tilewise.backends.triton.kernels.mask import (
    dropout_keep,
    over_tiles,
    query_interval,
)
from tilewise.backends.triton.kernels.maths import PARTIAL, exp, here
from tilewise.backends.triton.kernels.tangent_tiles import (
    contiguous_source,
    load_moving_keys,
    load_moving_rows,
    load_moving_tiles,
    load_tangent_rows,
    moving_head,
    moving_keys,
    stream_moving_keys,
    stream_statistic,
)
from tilewise.backends.triton.kernels.tile import (
    accumulate,
    dot,
    dot_transposed,
    exponential,
    line_of,
    load_rows,
    store_rows,
    token_of,
    zeros,
)

# -- Pairs ---------------------------------------------------------------------------------------------------------


@triton.jit
def hide(p, kept, i, j, query, work, partial, FACTS: tl.constexpr):
    """P with zeros where a row does not see a key; ``kept`` is that of :func:`stream_moving_keys`."""
    if partial:
        if FACTS.whole:
            p = tl.where(visible_pairs(query, i, here(j, FACTS), query.head, work, FACTS), p, 0.0)
        else:
            p = tl.where(kept, p, 0.0)
    return p


@triton.jit
def tangent_of_product(left, right, moved_left, moved_right, FACTS: tl.constexpr):
    """The tangent of ``left rightᵀ`` in fp32, (rows of left, rows of right); tangents that are () are zero."""
    total = None
    for piece in tl.static_range(len(moved_left)):
        total = dot(moved_left[piece], tl.trans(right[piece]), total, FACTS)
    for piece in tl.static_range(len(moved_right)):
        total = dot(left[piece], tl.trans(moved_right[piece]), total, FACTS)
    if total is None:
        total = tl.full([left[0].shape[0], right[0].shape[0]], 0.0, tl.float32)
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
def tangent_kernel(tensors, sizes, scales, moved, k_view, v_view, moved_k_view, moved_v_view, FACTS: tl.constexpr):
    """The tangents of o and lse of one query tile. Grid: (slots · heads_q · batch); the last tiles first.

    Args:
        k_view, v_view, moved_k_view, moved_v_view: descriptors, or None.
    """
    sizes = plain_sizes(sizes)
    slot, head, b = scheduled(sizes.heads_q // sizes.heads_k, sizes)
    work = work_tile(sizes.slots - 1 - slot, b, tensors, sizes, scales, OVER_KEYS=False, FACTS=FACTS)
    query = load_tangent_rows(work.block * FACTS.tile_m, head, tensors, moved, sizes, work, FACTS)
    views = (k_view, v_view, moved_k_view, moved_v_view)
    keys = moving_keys(tensors, moved, sizes, work, head // (sizes.heads_q // sizes.heads_k), views, FACTS)
    mean = tl.full([FACTS.tile_m], 0.0, tl.float32)
    acc = zeros(FACTS.tile_m, OF_V=True, FACTS=FACTS)
    beside = query, keys, tensors, moved, sizes, scales, work
    mean, acc = over_tiles(
        tangent_block, (mean, acc), query.m0, head, beside, tensors, sizes, work, OF_QUERIES=False, FACTS=FACTS
    )
    tangent_epilogue(mean, acc, query, tensors, moved, sizes, scales, work, FACTS)


@triton.jit
def tangent_block(n0, state, beside, partial, FACTS: tl.constexpr):
    """``(mean, acc)``, the sums of (31), after the key tile at ``n0``."""
    mean, acc = state
    query, keys, tensors, _, sizes, scales, work = beside
    i, j = query.m0 + tl.arange(0, FACTS.tile_m), n0 + tl.arange(0, FACTS.tile_n)
    kept, k, v, moved_k, moved_v = stream_moving_keys(n0, i, j, query, keys, work, partial, FACTS)
    s = dot_transposed(query.q, k, FACTS)  # S = Q Kᵀ, (tile_m, tile_n) fp32
    ds = tangent_of_product(query.q, k, query.moved_q, moved_k, FACTS)  # Ṡ = Q̇ Kᵀ + Q K̇ᵀ, (tile_m, tile_n) fp32
    p, ds = scores_moving(s, ds, query.lse2[:, None], query.head, i[:, None], j[None, :], scales, work, FACTS)
    p = hide(p, kept, i, j, query, work, partial, FACTS)
    if FACTS.score is not None or FACTS.keep is not None:
        ds = tl.where(p == 0.0, 0.0, ds)  # 0 times what is not finite
    moved_p = p * ds
    mean += tl.sum(moved_p, 1)
    if FACTS.dropout:
        z = dropout_keep(query.m0, n0, work.b, query.head, tensors, sizes, FACTS.tile_m, FACTS.tile_n)
        p, moved_p = tl.where(z, p, 0.0), tl.where(z, moved_p, 0.0)
    if len(moved_v) > 0:
        acc = accumulate(p, moved_v, acc, FACTS)  # Ȯ += P V̇ + (P ∘ Ṡ) V, (tile_m, head_dim_v) fp32
    return mean, accumulate(moved_p, v, acc, FACTS)


@triton.jit
def tangent_epilogue(mean, acc, query, tensors, moved, sizes, scales, work, FACTS: tl.constexpr):
    """Stores the tangents of o and lse, (31), with the sink's part."""
    m0, head = query.m0, query.head
    left = work.seqlen_q - m0
    i = m0 + tl.arange(0, FACTS.tile_m)
    line = line_of(head, sizes.heads_q, sizes.seqlen_q, work, work.start_q, FACTS)
    if FACTS.sink and moved.sink is not None:
        lse = tl.load(tensors.lse + line + i, mask=i < work.seqlen_q, other=0.0)
        sink = tl.load(tensors.sink + head).to(tl.float32)
        share = tl.where(lse == float("-inf"), 0.0, exp(sink - lse))  # rows past the last sequence have no sink
        mean += share * tl.load(moved.sink + head).to(tl.float32)
    to = contiguous_source(
        moved.o, None, sizes.heads_q, sizes.seqlen_q, work, work.start_q, head, OF_V=True, FACTS=FACTS
    )
    o = contiguous_source(
        tensors.o, None, sizes.heads_q, sizes.seqlen_q, work, work.start_q, head, OF_V=True, FACTS=FACTS
    )
    o = load_rows(o, m0, left, None, FACTS.tile_m, OF_V=True, MASKED=True, FACTS=FACTS)
    total = ()
    for n in tl.static_range(len(acc)):
        total = total + ((acc[n] * scales.keep if FACTS.dropout else acc[n]) - mean[:, None] * o[n].to(tl.float32),)
    # O's tangent: (tile_m, head_dim_v), rounded to o's dtype; lse's: fp32 (tile_m,).
    store_rows(to.pointer, to.row, m0, left, total, 1.0, FACTS.tile_m, OF_V=True, FACTS=FACTS)
    tl.store(moved.lse + line + i, mean, mask=i < work.seqlen_q)


# -- The backward's dQ: query tiles outside ------------------------------------------------------------------------


@triton.jit
def dq_tangent_kernel(tensors, sizes, scales, moved, k_view, v_view, moved_k_view, moved_v_view, FACTS: tl.constexpr):
    """The tangent of dQ of one query tile. Grid: (slots · heads_q · batch); the last tiles first.

    Args:
        k_view, v_view, moved_k_view, moved_v_view: descriptors, or None.
    """
    sizes = plain_sizes(sizes)
    slot, head, b = scheduled(sizes.heads_q // sizes.heads_k, sizes)
    work = work_tile(sizes.slots - 1 - slot, b, tensors, sizes, scales, OVER_KEYS=False, FACTS=FACTS)
    rows = moving_head(tensors, moved, sizes, work, head, (None, None, None, None), (None, None), FACTS)
    query = load_moving_rows(work.block * FACTS.tile_m, rows, tensors, moved, sizes, work, FACTS)
    views = (k_view, v_view, moved_k_view, moved_v_view)
    keys = moving_keys(tensors, moved, sizes, work, head // (sizes.heads_q // sizes.heads_k), views, FACTS)
    dq = zeros(FACTS.tile_m, OF_V=False, FACTS=FACTS)
    sums = ()  # of the leaves that are summed by rows: fp32 (tile_m, PARTIAL) each
    for _ in tl.static_range(len(FACTS.row_grads)):
        sums = sums + (tl.full([FACTS.tile_m, PARTIAL], 0.0, tl.float32),)
    beside = query, keys, tensors, moved, sizes, scales, work
    dq, sums = over_tiles(
        dq_tangent_block, (dq, sums), query.m0, head, beside, tensors, sizes, work, OF_QUERIES=False, FACTS=FACTS
    )
    i = query.m0 + tl.arange(0, FACTS.tile_m)
    for n in tl.static_range(len(FACTS.row_grads)):
        tl.store(work.grads[FACTS.row_grads[n]] + rows.rows.lse_start + i, tl.sum(sums[n], 1), mask=i < work.seqlen_q)
    store_dq(dq, query.m0, head, tensors, sizes, scales, work, FACTS)


@triton.jit
def dq_tangent_block(n0, state, beside, partial, FACTS: tl.constexpr):
    """``(dq, sums)``, the sums of the tangents of dQ and of leaves by rows, after the key tile at ``n0``."""
    dq, sums = state
    query, keys, tensors, _, sizes, scales, work = beside
    i, j = query.m0 + tl.arange(0, FACTS.tile_m), n0 + tl.arange(0, FACTS.tile_n)
    kept, k, v, moved_k, moved_v = stream_moving_keys(n0, i, j, query, keys, work, partial, FACTS)
    s = dot_transposed(query.q, k, FACTS)  # S = Q Kᵀ, (tile_m, tile_n) fp32
    raw = tangent_of_product(query.q, k, query.moved_q, moved_k, FACTS)  # Q̇ Kᵀ + Q K̇ᵀ, (tile_m, tile_n) fp32
    p, ds = scores_moving(s, raw, query.lse2[:, None], query.head, i[:, None], j[None, :], scales, work, FACTS)
    p = hide(p, kept, i, j, query, work, partial, FACTS)
    dp = dot_transposed(query.do, v, FACTS)  # dP = dO Vᵀ, (tile_m, tile_n) fp32
    moved_dp = tangent_of_product(query.do, v, query.moved_do, moved_v, FACTS)
    if FACTS.dropout:
        z = dropout_keep(query.m0, n0, work.b, query.head, tensors, sizes, FACTS.tile_m, FACTS.tile_n)
        dp, moved_dp = tl.where(z, dp * scales.keep, 0.0), tl.where(z, moved_dp * scales.keep, 0.0)
    dz = p * (dp - query.delta[:, None])
    moved_dz = dz * (ds - query.moved_lse[:, None]) + p * (moved_dp - query.moved_delta[:, None])
    if FACTS.score is not None or FACTS.keep is not None:
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
    if len(moved_k) > 0:
        dq = accumulate(dz, moved_k, dq, FACTS)  # dQ̇ += dṠ K + dS K̇, (tile_m, head_dim) fp32; scaled when it is stored
    return accumulate(moved_dz, k, dq, FACTS), sums


# -- The backward's dK and dV: key tiles outside -------------------------------------------------------------------


@triton.jit
def dkdv_tangent_kernel(
    tensors,
    sizes,
    scales,
    moved,
    q_view,
    do_view,
    moved_q_view,
    moved_do_view,
    lse_view,
    delta_view,
    FACTS: tl.constexpr,
):
    """The tangents of dK and dV of one key tile. Grid: (slots · heads_k · batch).

    Args:
        q_view, do_view, moved_q_view, moved_do_view, lse_view, delta_view: descriptors, or None (:func:`moving_head`).
    """
    sizes = plain_sizes(sizes)
    slot, head_k, b = scheduled(1, sizes)
    work = work_tile(slot, b, tensors, sizes, scales, OVER_KEYS=True, FACTS=FACTS)
    n0 = work.block * FACTS.tile_n
    keys = load_moving_keys(n0, tensors, moved, sizes, work, head_k, FACTS)
    # The sums: fp32 (tile_n, width) for each piece.
    dk, dv = zeros(FACTS.tile_n, OF_V=False, FACTS=FACTS), zeros(FACTS.tile_n, OF_V=True, FACTS=FACTS)
    views, group = (q_view, do_view, moved_q_view, moved_do_view), sizes.heads_q // sizes.heads_k
    for g in range(group):  # the query heads of the key head, in order
        head = head_k * group + g
        rows = moving_head(tensors, moved, sizes, work, head, views, (lse_view, delta_view), FACTS)
        beside = rows, keys, tensors, moved, sizes, scales, work
        dk, dv = over_tiles(
            dkdv_tangent_block, (dk, dv), n0, head, beside, tensors, sizes, work, OF_QUERIES=True, FACTS=FACTS
        )
    token = token_of(sizes.seqlen_k, work, work.start_k, FACTS)
    store_dkdv(dk, dv, n0, work.seqlen_k - n0, token, head_k, tensors, sizes, scales, FACTS)


@triton.jit
def dkdv_tangent_block(m0, state, beside, partial, FACTS: tl.constexpr):
    """``(dk, dv)``, the sums of their tangents, after the query tile at ``m0``; all tiles of pairs are (tile_n, tile_m)."""
    dk, dv = state
    rows, keys, tensors, moved, sizes, scales, work = beside
    n0, head = work.block * FACTS.tile_n, rows.rows.head
    i, j = m0 + tl.arange(0, FACTS.tile_m), n0 + tl.arange(0, FACTS.tile_n)
    q, do, moved_q, moved_do = load_moving_tiles(m0, rows, work, partial, FACTS)
    s = dot_transposed(keys.k, q, FACTS)  # Sᵀ = K Qᵀ, (tile_n, tile_m) fp32
    raw = tangent_of_product(keys.k, q, keys.moved_k, moved_q, FACTS)
    start = rows.rows.statistics_start
    lse2, moved_lse = stream_statistic(m0, tensors.lse2, moved.lse, rows.lse, start, work, partial, FACTS)
    p, ds = scores_moving(s, raw, lse2[None, :], head, i[None, :], j[:, None], scales, work, FACTS)
    moved_p = p * (ds - moved_lse[None, :])
    if partial:  # masking selects: a hidden pair's score, and a row's statistics past the last, may be anything
        first, last = query_interval(here(j, FACTS), head, work, FACTS)
        kept = (i[None, :] >= first[:, None]) & (i[None, :] < last[:, None])
        kept = kept & (j[:, None] < work.seqlen_k) & (i[None, :] < work.seqlen_q)
        if FACTS.keep is not None:
            kept = kept & FACTS.keep(work.b, head, i[None, :], j[:, None], work)
        p, moved_p = tl.where(kept, p, 0.0), tl.where(kept, moved_p, 0.0)
    if FACTS.score is not None:
        moved_p = tl.where(p == 0.0, 0.0, moved_p)
    shown, shown_p = moved_p, p
    if FACTS.dropout:
        z = tl.trans(dropout_keep(m0, n0, work.b, head, tensors, sizes, FACTS.tile_m, FACTS.tile_n))
        shown, shown_p = tl.where(z, moved_p, 0.0), tl.where(z, p, 0.0)
    dv = accumulate(shown, do, dv, FACTS)  # dV̇ += (Ṗ ∘ Z)ᵀ dO + (P ∘ Z)ᵀ dȮ, (tile_n, head_dim_v) fp32
    if len(moved_do) > 0:
        dv = accumulate(shown_p, moved_do, dv, FACTS)
    dp = dot_transposed(keys.v, do, FACTS)  # dPᵀ = V dOᵀ, (tile_n, tile_m) fp32
    moved_dp = tangent_of_product(keys.v, do, keys.moved_v, moved_do, FACTS)
    if FACTS.dropout:
        dp, moved_dp = tl.where(z, dp * scales.keep, 0.0), tl.where(z, moved_dp * scales.keep, 0.0)
    delta, moved_delta = stream_statistic(m0, tensors.delta, moved.delta, rows.delta, start, work, partial, FACTS)
    dp, moved_dp = dp - delta[None, :], moved_dp - moved_delta[None, :]
    dz, moved_dz = p * dp, moved_p * dp + p * moved_dp
    if partial:
        dz, moved_dz = tl.where(p == 0.0, 0.0, dz), tl.where(p == 0.0, 0.0, moved_dz)
    if FACTS.score is not None:
        dz, moved_dz = tl.where(p == 0.0, 0.0, dz), tl.where(p == 0.0, 0.0, moved_dz)
    if FACTS.columns is not None:
        line = line_of(head, sizes.heads_q, sizes.seqlen_k, work, work.start_k, FACTS) + j
        valid, moved_s = j < work.seqlen_k, raw * scales.softmax
        # Sums over the tile's queries of leaves read at j alone, fp32 (tile_n,), added atomically.
        FACTS.columns(dz, moved_dz, p > 0.0, line, valid, s, moved_s, work.b, head, i[None, :], j[:, None], work)
    dz, moved_dz = through_score(dz, moved_dz, p, s, raw, head, i[None, :], j[:, None], scales, work, FACTS)
    if len(moved_q) > 0:
        dk = accumulate(dz, moved_q, dk, FACTS)  # dK̇ += dṠᵀ Q + dSᵀ Q̇, (tile_n, head_dim) fp32
    return accumulate(moved_dz, q, dk, FACTS), dv
