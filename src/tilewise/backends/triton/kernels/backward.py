"""Backward in two or three passes without atomics (docs/algorithm.md, section 6): every sum in a fixed order.

    delta_i = dO_i · O_i - dlse_i                                                   (13)  `delta_kernel`
    P = exp(S - lse)    dP = Z ∘ (dO Vᵀ)    dZ = P ∘ (dP - delta)    dS = f' dZ      (11), (13), (14)
    dV = (P ∘ Z)ᵀ dO    dK = scale · dSᵀ Q    key tiles outside, queries inside       (16)  `dkdv_kernel`
    dQ = scale · dS K                         query tiles outside, keys inside        (15)  `dq_kernel`

These passes read nothing of each other, so each begins where the one before leaves multiprocessors idle (launch.Role), dQ first
(docs/decisions.md#triton-overlap).
For a bias that all batch elements share, dS is kept, and dQ and the bias's gradient are made from it (`sheet_kernel`).

Where the registers do not hold dK and dV at once (head dims above 128), dV has a pass of its own (`F.dv` without `F.dk`)
and the other computes dK alone: 8 products of a tile instead of 7
(docs/decisions.md#triton-two-passes). These passes work on transposed tiles, (keys, queries),
and read the mask by columns; they sum the query heads of a group in order. Leaves that are not read at j get their sums in
the pass over query tiles, those read at j alone in the pass over key tiles (section 7); `tile_kernel` adds up a pair bias
over the batch and heads it was broadcast over. The pass over key tiles gets the bias's tiles by descriptor, as the forward does, where
there can be one: turned, by pointers, they took as long as all else.
"""

# ruff: noqa: RET505, RUF005 - a compile-time `if` keeps its `else`: without it both returns would be compiled; and Triton's
# tuples are added, not unpacked

from typing import Any, NamedTuple

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.maths import here, multiple
from tilewise.backends.triton.kernels.tile import (
    LOG2E,
    accumulate,
    begin,
    dropout_keep,
    end,
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
    queries_to_visit,
    query_interval,
    sheet_tile,
    source,
    store_rows,
    tile_listed,
    with_pairs,
    zeros,
)


class Rows(NamedTuple):
    """What a head's query rows are read through: the sources of q and dO, where the rows begin in lse's shape and in the
    statistics' buffers, and the descriptor of both of these (a pointer, unused, where there is none)."""

    h: Any
    q: Any
    do: Any
    line: Any
    at_line: Any
    lines: Any


class KeyTile(NamedTuple):
    """A key tile: its position, k and v, tiles of (tile_n, D) and (tile_n, Dv), and the descriptor of a tensor that the score
    reads for every pair (a pointer, unused, where there is none)."""

    n0: Any
    k: Any
    v: Any
    pairs: Any
    sheet: Any


@triton.jit
def query_rows(tensors, sizes, at, h, q_views, do_views, lines, F: tl.constexpr):
    q = source(tensors.q, q_views, sizes.q, at, at.start_q, h, F)
    do = source(tensors.do, do_views, sizes.do, at, at.start_q, h, F)
    line = tl.cast(h, tl.int64) * sizes.seqlen_q + at.start_q
    at_line = tl.cast(h, tl.int64) * sizes.line + at.start_q
    if not F.packed:
        line += tl.cast(at.b, tl.int64) * sizes.heads_q * sizes.seqlen_q
        at_line += tl.cast(at.b, tl.int64) * sizes.heads_q * sizes.line
    return Rows(h, q, do, line, at_line, tensors.lse2 if lines is None else lines)


@triton.jit
def key_sources(tensors, sizes, at, head_k, k_views, v_views, F: tl.constexpr):
    k = source(tensors.k, k_views, sizes.k, at, at.start_k, head_k, F)
    v = source(tensors.v, v_views, sizes.v, at, at.start_k, head_k, F)
    return k, v


@triton.jit
def load_keys(k, v, n0, pairs, sheet, at, F: tl.constexpr):
    """The :class:`KeyTile` at n0 of two sources, rows past the last zero."""
    left = at.seqlen_k - n0
    k = load_rows(k, n0, left, None, F.tile_n, False, True, F)
    v = load_rows(v, n0, left, None, F.tile_n, True, True, F)
    return KeyTile(n0, k, v, pairs, sheet)


@triton.jit
def statistics(tensors, line, i, seqlen_q, MASKED: tl.constexpr):
    """``(lse2, delta)`` of rows i. Unmasked, the rows past seqlen_q must be hidden by the caller: both buffers are longer
    by a tile (launch.PADDING), and a mask here would cost the pass over key tiles its registers."""
    if MASKED:
        ok = i < seqlen_q
        return tl.load(tensors.lse2 + line + i, mask=ok, other=float("inf")), tl.load(
            tensors.delta + line + i, mask=ok, other=0.0
        )
    else:
        return tl.load(tensors.lse2 + line + i), tl.load(tensors.delta + line + i)


@triton.jit
def scored(s, h, i, j, scales, at, F: tl.constexpr):
    """A tile of products as the exponent of (3) in the units of :func:`tile.power`."""
    if F.score is not None:
        z = tl.broadcast_to(F.score(s, at.b, h, i, j, at).to(tl.float32), s.shape)
        return z if F.natural or F.binary else z * LOG2E
    elif F.natural:
        return s * scales.softmax
    else:
        return s * (scales.softmax * LOG2E)


@triton.jit
def delta_kernel(tensors, sizes, scales, F: tl.constexpr):
    """Grid: (blocks · heads_q · batch); packed, blocks of all rows at once.

    Also writes lse in base 2. Rows that saw nothing get lse2 = +inf, so that their P is 0, and delta = 0.
    """
    sizes = plain_sizes(sizes)
    begin(F)
    pid = tl.program_id(0)
    m0 = (pid % sizes.blocks) * F.tile_m
    h = (pid // sizes.blocks) % sizes.heads_q
    b = pid // sizes.blocks // sizes.heads_q
    left = sizes.seqlen_q - m0
    token = tl.cast(b, tl.int64) * sizes.seqlen_q
    row = sizes.heads_q * F.head_dim_v
    o = load_piece(tensors.o + token * row + h * F.head_dim_v, row, m0, left, None, F.tile_m, True, 0, True, F)
    do_row = sizes.do[1] * F.align
    base = (tl.cast(sizes.do[2], tl.int64) * h + tl.cast(sizes.do[0], tl.int64) * b) * F.align
    do = load_piece(tensors.do + base, do_row, m0, left, None, F.tile_m, True, 0, True, F).to(tl.float32)
    PARTS: tl.constexpr = F.parts
    for part in tl.static_range(1, PARTS):
        do += load_piece(tensors.do + base, do_row, m0, left, None, F.tile_m, True, part, True, F).to(tl.float32)
    i = m0 + tl.arange(0, F.tile_m)
    line = (tl.cast(b, tl.int64) * sizes.heads_q + h) * sizes.seqlen_q + i
    ok = i < sizes.seqlen_q
    lse = tl.load(tensors.lse + line, mask=ok, other=0.0)
    dlse = tl.load(tensors.dlse + line, mask=ok, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do, 1) - dlse
    empty = lse == float("-inf")
    line = (tl.cast(b, tl.int64) * sizes.heads_q + h) * sizes.line + i
    tl.store(tensors.delta + line, tl.where(empty, 0.0, delta), mask=ok)
    tl.store(tensors.lse2 + line, tl.where(empty, float("inf"), lse if F.natural else lse * LOG2E), mask=ok)


# -- Key tiles outside ---------------------------------------------------------------------------------------------


@triton.jit
def dkdv_kernel(tensors, sizes, scales, q_view, q_rest, do_view, do_rest, lines, pairs, sheet, F: tl.constexpr):
    """Grid: (blocks · heads_k · batch). Computes dK if ``F.dk``, dV if ``F.dv``."""
    sizes = plain_sizes(sizes)
    begin(F)
    slot, head_k, b = program(1, sizes)
    at = place(slot, b, tensors, sizes, scales, True, F)
    n0 = at.block * F.tile_n
    left = at.seqlen_k - n0
    k, v = key_sources(tensors, sizes, at, head_k, (None, None), (None, None), F)
    keys = load_keys(k, v, n0, tensors.q if pairs is None else pairs, tensors.q if sheet is None else sheet, at, F)
    dk = zeros(F.tile_n, False, F) if F.dk else ()
    dv = zeros(F.tile_n, True, F) if F.dv else ()

    group = sizes.heads_q // sizes.heads_k
    for g in range(group):
        h = head_k * group + g
        rows = query_rows(tensors, sizes, at, h, (q_view, q_rest), (do_view, do_rest), lines, F)
        if F.lists:
            partial, partials, full, fulls, ahead = listed(tensors, sizes, at.b, h, at.block, F)
            for t in range(fulls):
                m0 = ahead * F.tile_m
                ahead = tile_listed(full, fulls, t + 1)
                dk, dv = query_block(m0, dk, dv, keys, rows, tensors, sizes, scales, at, False, F)
            for t in tl.range(partials, num_stages=F.partial_stages):
                m0 = tl.load(partial + t) * F.tile_m
                dk, dv = query_block(m0, dk, dv, keys, rows, tensors, sizes, scales, at, True, F)
        else:
            first, full, full_end, last = queries_to_visit(n0, h, at, F)
            if F.sheet:  # the next pass reads as many rows at a time
                UNIT: tl.constexpr = max(F.sheet // F.tile_m, 1)
                first, last = first // UNIT * UNIT, (last + UNIT - 1) // UNIT * UNIT
            if F.whole:
                for n in range(first, last):
                    partial = (n < full) | (n >= full_end)
                    dk, dv = query_block(n * F.tile_m, dk, dv, keys, rows, tensors, sizes, scales, at, partial, F)
            else:
                if F.keep is None:
                    for n in range(full, full_end):
                        dk, dv = query_block(n * F.tile_m, dk, dv, keys, rows, tensors, sizes, scales, at, False, F)
                for t in range((full - first) + (last - full_end)):
                    m0 = partial_tile(t, first, full, full_end) * F.tile_m
                    dk, dv = query_block(m0, dk, dv, keys, rows, tensors, sizes, scales, at, True, F)

    token = tl.cast(at.start_k, tl.int64)
    if not F.packed:
        token += tl.cast(at.b, tl.int64) * sizes.seqlen_k
    if F.dk:
        row = sizes.heads_k * F.head_dim
        base = tensors.dk + token * row + head_k * F.head_dim
        store_rows(base, row, n0, left, dk, scales.softmax, F.tile_n, False, F)
    if F.dv:
        row = sizes.heads_k * F.head_dim_v
        base = tensors.dv + token * row + head_k * F.head_dim_v
        store_rows(base, row, n0, left, dv, scales.keep if F.dropout else 1.0, F.tile_n, True, F)
    end(F)


@triton.jit
def query_block(m0, dk, dv, keys, rows, tensors, sizes, scales, at, partial, F: tl.constexpr):
    """Adds one query tile of head ``rows.h`` to dK and dV, or to the one of them that is wanted; all tiles are (tile_n, tile_m).
    ``partial``: some row does not see some key of it; known when compiled unless F.whole."""
    i = m0 + tl.arange(0, F.tile_m)
    n0, k, v, _, _ = keys
    j = n0 + tl.arange(0, F.tile_n)
    left = at.seqlen_q - m0
    q = load_streamed(rows.q, m0, left, None, F.tile_m, False, partial, F)
    do = load_streamed(rows.do, m0, left, None, F.tile_m, True, partial, F)
    if (F.whole or (F.tma and not partial)) and not F.packed:
        line = (rows.at_line + m0).to(tl.int32)
        if F.dk:  # one load for both: each has a barrier of the whole program
            lse2, delta = tl.split(tl.trans(rows.lines.load([0, line])))
        else:
            lse2 = rows.lines.load([0, line]).reshape(F.tile_m)
            delta = lse2
    else:
        lse2, delta = statistics(tensors, rows.at_line, i, at.seqlen_q, False)
    s = inner(k, q, F)
    at = with_pairs(at, keys.pairs, rows.h, m0, n0, True, F)
    s2 = scored(s, rows.h, i[None, :], j[:, None], scales, at, F)
    p = power(s2 - lse2[None, :], F)
    inside = (j[:, None] < at.seqlen_k) & (i[None, :] < at.seqlen_q)
    d = p  # dP - delta
    if F.dropout:
        z = tl.trans(dropout_keep(m0, n0, at.b, rows.h, tensors, sizes, F.tile_m, F.tile_n))
    if F.dk:
        dp = inner(v, do, F)
        if F.dropout:
            dp = tl.where(z, dp * scales.keep, 0.0)
        d = dp - delta[None, :]
    if partial:
        first, last = query_interval(here(j, F), rows.h, at, F)
        kept = (i[None, :] >= first[:, None]) & (i[None, :] < last[:, None]) & inside
        if F.keep is not None:
            kept = kept & F.keep(at.b, rows.h, i[None, :], j[:, None], at)
        p = tl.where(kept, p, 0.0)
        d = tl.where(kept, d, 0.0)  # of rows past the last, anything: the statistics' buffers hold what they will

    if F.dv:
        dropped = tl.where(z, p, 0.0) if F.dropout else p
        dv = accumulate(dropped, do, dv, F)
    if F.dk:
        ds = p * d
        if F.score is not None and not F.whole:  # elsewhere all that P's zeros are multiplied by is finite
            ds = tl.where(p == 0.0, 0.0, ds)
        if F.sheet:
            if F.strips:
                head = rows.h - sizes.heads[0] * (sizes.heads_q // sizes.heads_k)
                strip = ds.to(tensors.sheet.dtype.element_ty).reshape(1, 1, 1, F.tile_n, F.tile_m)
                keys.sheet.store([at.b, head, m0 // F.strips, n0, m0 % F.strips], strip)
            else:
                to = sheet_tile(tensors, sizes, at.b, rows.h, m0, n0, F)
                tl.store(to, ds.to(tensors.sheet.dtype.element_ty))
        if F.columns is not None:
            line = tl.cast(rows.h, tl.int64) * sizes.seqlen_k + at.start_k + j
            if not F.packed:
                line += tl.cast(at.b, tl.int64) * sizes.heads_q * sizes.seqlen_k
            F.columns(ds, p > 0.0, line, j < at.seqlen_k, s, at.b, rows.h, i[None, :], j[:, None], at)
        if F.slope is not None:
            ds = ds * F.slope(s, at.b, rows.h, i[None, :], j[:, None], at)
            if F.hides or not F.whole:
                ds = tl.where(p == 0.0, 0.0, ds)
        dk = accumulate(ds, q, dk, F)
    return dk, dv


# -- Query tiles outside -------------------------------------------------------------------------------------------


class Query(NamedTuple):
    """A query tile: q and dO, tiles of (tile_m, D), and lse2, delta and the key interval of its rows."""

    m0: Any
    q: Any
    do: Any
    lse2: Any
    delta: Any
    lo: Any
    hi: Any


@triton.jit
def dq_kernel(tensors, sizes, scales, k_view, k_rest, v_view, v_rest, F: tl.constexpr):
    """Grid: (blocks · heads_q · batch); the last tiles first."""
    sizes = plain_sizes(sizes)
    begin(F)
    slot, h, b = program(sizes.heads_q // sizes.heads_k, sizes)
    at = place(sizes.blocks - 1 - slot, b, tensors, sizes, scales, False, F)
    rows = query_rows(tensors, sizes, at, h, (None, None), (None, None), None, F)
    head_k = h // (sizes.heads_q // sizes.heads_k)
    k, v = key_sources(tensors, sizes, at, head_k, (k_view, k_rest), (v_view, v_rest), F)
    query = load_query(at.block * F.tile_m, rows, tensors, at, F)
    keys = (k, v)
    dq = zeros(F.tile_m, False, F)
    sums = ()  # of the leaves that are summed by rows
    for _ in tl.static_range(len(F.row_grads)):
        sums = sums + (tl.full([F.tile_m], 0.0, tl.float32),)

    if F.lists:
        partial, partials, full, fulls, ahead = listed(tensors, sizes, at.b, h, at.block, F)
        for t in range(fulls):
            n0 = ahead * F.tile_n
            ahead = tile_listed(full, fulls, t + 1)
            dq, sums = key_block(n0, dq, sums, query, rows, keys, tensors, sizes, scales, at, False, F)
        for t in tl.range(partials, num_stages=F.partial_stages):
            n0 = tl.load(partial + t) * F.tile_n
            dq, sums = key_block(n0, dq, sums, query, rows, keys, tensors, sizes, scales, at, True, F)
    else:
        first, full, full_end, last = keys_to_visit(query.m0, h, at, F)
        if F.whole:
            for n in range(first, last):
                partial = (n < full) | (n >= full_end)
                n0 = n * F.tile_n
                dq, sums = key_block(n0, dq, sums, query, rows, keys, tensors, sizes, scales, at, partial, F)
        else:
            if F.keep is None:
                for n in range(full, full_end):
                    n0 = n * F.tile_n
                    dq, sums = key_block(n0, dq, sums, query, rows, keys, tensors, sizes, scales, at, False, F)
            for t in range((full - first) + (last - full_end)):
                n0 = partial_tile(t, first, full, full_end) * F.tile_n
                dq, sums = key_block(n0, dq, sums, query, rows, keys, tensors, sizes, scales, at, True, F)

    token = tl.cast(at.start_q, tl.int64)
    if not F.packed:
        token += tl.cast(at.b, tl.int64) * sizes.seqlen_q
    row = sizes.heads_q * F.head_dim
    base = tensors.dq + token * row + h * F.head_dim
    store_rows(base, row, query.m0, at.seqlen_q - query.m0, dq, scales.softmax, F.tile_m, False, F)
    i = query.m0 + tl.arange(0, F.tile_m)
    for n in tl.static_range(len(F.row_grads)):
        tl.store(at.grads[F.row_grads[n]] + rows.line + i, sums[n], mask=i < at.seqlen_q)


@triton.jit
def seen(query, i, j, h, at, F: tl.constexpr):
    """Which pairs of a tile see each other: bool (tile_m, tile_n)."""
    kept = (j[None, :] >= query.lo[:, None]) & (j[None, :] < query.hi[:, None]) & (i[:, None] < at.seqlen_q)
    if F.keep is not None:
        kept = kept & F.keep(at.b, h, i[:, None], j[None, :], at)
    return kept


@triton.jit
def load_query(m0, rows, tensors, at, F: tl.constexpr):
    left = at.seqlen_q - m0
    q = load_rows(rows.q, m0, left, None, F.tile_m, False, True, F)
    do = load_rows(rows.do, m0, left, None, F.tile_m, True, True, F)
    i = m0 + tl.arange(0, F.tile_m)
    lse2, delta = statistics(tensors, rows.at_line, i, at.seqlen_q, True)
    lo, hi = key_interval(i, rows.h, at, F)
    return Query(m0, q, do, lse2, delta, lo, hi)


@triton.jit
def key_block(n0, dq, sums, query, rows, keys, tensors, sizes, scales, at, partial, F: tl.constexpr):
    """Adds one key tile to dQ, and to the sums by rows; ``keys``: the sources of k and v; ``partial`` as in :func:`query_block`."""
    i = query.m0 + tl.arange(0, F.tile_m)
    j = n0 + tl.arange(0, F.tile_n)
    left = at.seqlen_k - n0
    alive = None
    if not F.whole and partial:
        kept = seen(query, i, j, rows.h, at, F)
        if F.keep is not None:
            alive = tl.max(kept.to(tl.int32), 0) > 0
        elif F.masked:
            first, last = query_interval(j, rows.h, at, F)
            alive = first < last
    # A key that no row here sees has dS = 0, and its row of K is not read: it may hold NaN.
    k = load_streamed(keys[0], n0, left, alive, F.tile_n, False, partial, F)
    v = load_streamed(keys[1], n0, left, alive, F.tile_n, True, partial, F)
    s = inner(query.q, k, F)
    s2 = scored(s, rows.h, i[:, None], j[None, :], scales, at, F)
    p = power(s2 - query.lse2[:, None], F)
    dp = inner(query.do, v, F)
    if F.dropout:
        z = dropout_keep(query.m0, n0, at.b, rows.h, tensors, sizes, F.tile_m, F.tile_n)
        dp = tl.where(z, dp * scales.keep, 0.0)
    if partial:
        if F.whole:
            kept = seen(query, i, here(j, F), rows.h, at, F)
        p = tl.where(kept, p, 0.0)
    ds = p * (dp - query.delta[:, None])
    if F.score is not None and not F.whole:
        ds = tl.where(p == 0.0, 0.0, ds)
    elif F.keep is not None:  # noqa: SIM102 - `partial` is of run time where F.whole, and then there is no predicate
        if partial:
            ds = tl.where(p == 0.0, 0.0, ds)
    if F.leaves is not None:
        inside = (i[:, None] < at.seqlen_q) & (j[None, :] < at.seqlen_k)
        F.leaves(ds, p > 0.0, inside, s, at.b, rows.h, i[:, None], j[None, :], at)
    if F.rows is not None:
        more = F.rows(ds, p > 0.0, s, at.b, rows.h, i[:, None], j[None, :], at)
        total = ()
        for n in tl.static_range(len(F.row_grads)):
            total = total + (sums[n] + more[n],)
        sums = total
    if F.slope is not None:
        ds = ds * F.slope(s, at.b, rows.h, i[:, None], j[None, :], at)
        if F.hides or not F.whole:
            ds = tl.where(p == 0.0, 0.0, ds)
    return accumulate(ds, k, dq, F), sums


# -- From a sheet of dS, which the pass over key tiles left -----------------------------------------------------------


@triton.jit
def sheet_kernel(
    tensors,
    sizes,
    scales,
    k_view,
    k_rest,
    GRAD: tl.constexpr,
    LOOP_B: tl.constexpr,
    LOOP_H: tl.constexpr,
    MORE: tl.constexpr,
    F: tl.constexpr,
):
    """``dQ = scale · dS K``, one product of a tile, and the gradient of a pair bias, which is dS added up over what the bias is broadcast
    over; grid as in :func:`dq_kernel`, GRAD, LOOP_B and LOOP_H as in :func:`tile_kernel`. MORE: on top of earlier heads' sum.

    Programs whose tiles are added up to one take turns at it, key tile by key tile: each reads the others' dS just when they do, so
    that it comes from memory once. Every key is seen by some query, so rows and columns of the mask agree on which tiles there are.
    """
    sizes = plain_sizes(sizes)
    group = sizes.heads_q // sizes.heads_k
    slot, h, b = program(group, sizes)
    at = place(sizes.blocks - 1 - slot, b, tensors, sizes, scales, False, F)
    m0 = at.block * F.tile_m
    k = source(tensors.k, (k_view, k_rest), sizes.k, at, at.start_k, h // group, F)
    dq = zeros(F.tile_m, False, F)

    to_b, batches = (b * 0, sizes.batch) if LOOP_B else (b, b * 0 + 1)
    to_h, heads = (sizes.heads[0] * group, sizes.heads[1] * group) if LOOP_H else (h, h * 0 + 1)
    turn, turns = (b - to_b) * heads + (h - to_h), batches * heads
    first, _full, _full_end, last = keys_to_visit(m0, h, at, F)
    for n in range(first, last):
        n0 = n * F.tile_n
        ds = tl.load(sheet_tile(tensors, sizes, b, h, m0, n0, F))
        tile = load_streamed(k, n0, at.seqlen_k - n0, None, F.tile_n, False, True, F)
        dq = accumulate(tl.trans(ds), tile, dq, F)
        if n % turns == turn:
            add_up(m0, n0, to_b, to_h, turns, heads, tensors, sizes, at, GRAD, MORE, F)
    for t in range(first + tl.cdiv(sizes.seqlen_k, F.tile_n) - last):  # tiles of zeros
        n = tl.where(t < first, t, last + t - first)
        if n % turns == turn:
            add_up(m0, n * F.tile_n, to_b, to_h, 0, heads, tensors, sizes, at, GRAD, MORE, F)

    token = tl.cast(b, tl.int64) * sizes.seqlen_q
    row = sizes.heads_q * F.head_dim
    base = tensors.dq + token * row + h * F.head_dim
    store_rows(base, row, m0, at.seqlen_q - m0, dq, scales.softmax, F.tile_m, False, F)


@triton.jit
def add_up(m0, n0, b, h, count, heads, tensors, sizes, at, GRAD: tl.constexpr, MORE: tl.constexpr, F: tl.constexpr):
    """Writes the sum of ``count`` tiles of dS, in order: of batch element b and the ``heads`` from h on, then of the next element."""
    i = m0 + tl.arange(0, F.tile_m)
    j = n0 + tl.arange(0, F.tile_n)
    total = tl.full([F.tile_n, F.tile_m], 0.0, tl.float32)
    for bh in tl.range(count, loop_unroll_factor=4):  # so that four tiles are on their way at once
        total += tl.load(sheet_tile(tensors, sizes, b + bh // heads, h + bh % heads, m0, n0, F)).to(tl.float32)
    lo, hi = key_interval(i, h, at, F)
    total = tl.where((j[:, None] >= lo[None, :]) & (j[:, None] < hi[None, :]), total, 0.0)
    grad = at.grads[GRAD]
    pointers = grad + F.place(b, h, i[None, :], j[:, None], at)
    inside = (i[None, :] < sizes.seqlen_q) & (j[:, None] < multiple(sizes.seqlen_k, F.unit))
    if MORE:
        total += tl.load(pointers, mask=inside, other=0.0)
    tl.store(pointers, total.to(grad.dtype.element_ty), mask=inside)


# -- One tile of a pair bias, over what it is broadcast over -------------------------------------------------------


@triton.jit
def tile_kernel(
    tensors, sizes, scales, GRAD: tl.constexpr, LOOP_B: tl.constexpr, LOOP_H: tl.constexpr, F: tl.constexpr
):
    """The gradient of a leaf read at i and j: grid (query tiles, key tiles, elements of b and h that it is read at).

    GRAD: which of ``at.grads``; ``F.tile`` is its slope and ``F.place`` where it is read. b and h are walked in order.
    """
    sizes = plain_sizes(sizes)
    m0 = tl.program_id(0) * F.tile_m
    n0 = tl.program_id(1) * F.tile_n
    outer = tl.program_id(2)
    batches = sizes.batch if LOOP_B else sizes.batch * 0 + 1
    heads = sizes.heads_q if LOOP_H else sizes.heads_q * 0 + 1
    kept_heads = sizes.heads_q // heads
    i = m0 + tl.arange(0, F.tile_m)
    j = n0 + tl.arange(0, F.tile_n)
    total = tl.full([F.tile_m, F.tile_n], 0.0, tl.float32)
    at = place(outer * 0, outer // kept_heads, tensors, sizes, scales, False, F)
    count = batches * heads
    if not F.varies:  # without a branch in the loop its loads overlap
        count = tl.where(visited(m0, n0, outer % kept_heads, at, F), count, 0)
    for bh in range(count):
        b = outer // kept_heads + bh // heads
        h = outer % kept_heads + bh % heads
        each = place(outer * 0, b, tensors, sizes, scales, False, F)
        if F.varies:
            if visited(m0, n0, h, each, F):
                total += pair_tile(m0, i, j, n0, h, each, tensors, sizes, scales, F)
        else:
            total += pair_tile(m0, i, j, n0, h, each, tensors, sizes, scales, F)
    offset = F.place(at.b, outer % kept_heads, i[:, None], j[None, :], at)
    inside = (i[:, None] < sizes.seqlen_q) & (j[None, :] < sizes.seqlen_k)
    grad = at.grads[GRAD]
    tl.store(grad + offset, total.to(grad.dtype.element_ty), mask=inside)


@triton.jit
def visited(m0, n0, h, at, F: tl.constexpr):
    """Whether some row of a tile sees some key of it."""
    first, _full, _full_end, last = keys_to_visit(m0, h, at, F)
    return (n0 >= first * F.tile_n) & (n0 < last * F.tile_n)


@triton.jit
def pair_tile(m0, i, j, n0, h, at, tensors, sizes, scales, F: tl.constexpr):
    """dZ times the leaf's slope of one tile."""
    rows = query_rows(tensors, sizes, at, h, (None, None), (None, None), None, F)
    k, v = key_sources(tensors, sizes, at, h // (sizes.heads_q // sizes.heads_k), (None, None), (None, None), F)
    _, k, v, _, _ = load_keys(k, v, n0, tensors.q, tensors.q, at, F)
    query = load_query(m0, rows, tensors, at, F)
    s = inner(query.q, k, F)
    s2 = scored(s, h, i[:, None], j[None, :], scales, at, F)
    kept = seen(query, i, j, h, at, F)
    p = tl.where(kept, power(s2 - query.lse2[:, None], F), 0.0)
    dp = inner(query.do, v, F)
    if F.dropout:
        z = dropout_keep(m0, n0, at.b, h, tensors, sizes, F.tile_m, F.tile_n)
        dp = tl.where(z, dp * scales.keep, 0.0)
    dz = tl.where(p == 0.0, 0.0, p * (dp - query.delta[:, None]))
    if F.tile is not None:
        dz = tl.where(p == 0.0, 0.0, dz * F.tile(s, at.b, h, i[:, None], j[None, :], at))
    return dz
