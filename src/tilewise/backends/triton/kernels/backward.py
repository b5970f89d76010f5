"""Backward in two or three passes (docs/algorithm.md#6-backward): dQ, dK and dV without atomics, each sum in a fixed order.

    delta_i = dO_i · O_i - dlse_i                                                   (13)  `delta_kernel`
    P = exp(S - lse)    dP = Z ∘ (dO Vᵀ)    dZ = P ∘ (dP - delta)    dS = f' dZ      (11), (13), (14)
    dV = (P ∘ Z)ᵀ dO    dK = scale · dSᵀ Q    key tiles outside, queries inside       (16)  `dkdv_kernel`
    dQ = scale · dS K                         query tiles outside, keys inside        (15)  `dq_kernel`

The passes of dQ, dK and dV read nothing of each other, so each begins where the one before leaves multiprocessors idle
(:func:`arguments.begin_overlap`), dQ first (docs/decisions.md#triton-overlap).

Where the registers do not hold dK and dV at once (head dims above 128), dV has a pass of its own (``FACTS.dv`` without
``FACTS.dk``) and another pass computes dK alone: 8 products of a tile instead of 7; in fp32 on Hopper one pass leaves dS and P
behind instead, of which :mod:`kept_pairs` makes both. A pass for dQ and one for dK and dV cost two
products more than one pass would, which would need atomics (docs/decisions.md#triton-two-passes). The passes over key tiles work on
transposed tiles, (tile_n, tile_m), read the mask by columns, and sum the query heads of a group in order, or where there are few key
tiles those of its parts, whose sums :mod:`group_parts` adds up.

Gradients of the tensors that a score reads (section 7): a leaf that is not read at j gets its sums in the pass over query tiles, a
leaf that is read at j alone gets them in the pass over key tiles; :mod:`pair_bias` sums a bias that is broadcast, :mod:`diagonals`
what is read at the distance i - j, near the diagonal (far from it, where one element is read, sums go by rows). Where many
programs add to one number, the emitted functions do use atomics: sums by columns over tiles of queries, and scattered sums.

The pass over key tiles gets a bias's tiles by descriptor, as the forward does, where there can be one: turned, by pointers, they
took as long as all else.
"""

# ruff: noqa: RET505, RUF005 - a compile-time `if` keeps its `else`: without it both returns would be compiled; and Triton's
# tuples are added, not unpacked

from typing import Any, NamedTuple

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.arguments import (
    begin_overlap,
    end_overlap,
    plain_sizes,
    scheduled,
    with_heads,
    with_pair_tile,
    with_tile,
    work_tile,
)
from tilewise.backends.triton.kernels.group_parts import keys_of_all
from tilewise.backends.triton.kernels.mask import (
    dropout_keep,
    key_interval,
    over_tiles,
    query_interval,
)
from tilewise.backends.triton.kernels.maths import PARTIAL, here, multiple
from tilewise.backends.triton.kernels.terms import columns_of_term
from tilewise.backends.triton.kernels.tile import (
    LOG2E,
    accumulate,
    dot_transposed,
    exponential,
    line_of,
    load_rows,
    load_streamed,
    of_first_columns,
    sheet_pointers,
    shift_of_rows,
    source_of,
    store_rows,
    token_of,
    zeros,
)


class QueryHead(NamedTuple):
    """The query rows of one head, to be loaded tile by tile.

    Attributes:
        head: the query head.
        q, do: the sources of q and dO.
        lse_start: where the sequence's rows begin in tensors of lse's shape.
        statistics_start: where they begin in lse2 and delta.
        statistics: the descriptor of lse2 and delta; a pointer, unused, where there is none.
    """

    head: Any
    q: Any
    do: Any
    lse_start: Any
    statistics_start: Any
    statistics: Any


class KeyTile(NamedTuple):
    """The key tile of a program of the pass over key tiles.

    Attributes:
        n0: its first row.
        k, v: tiles of (tile_n, head_dim) and (tile_n, head_dim_v).
        pairs, sheet: the descriptors of a leaf that the score reads at i and j, and of the sheet of dS; pointers, unused, where
            there are none.
    """

    n0: Any
    k: Any
    v: Any
    pairs: Any
    sheet: Any


class GradQueryTile(NamedTuple):
    """The query tile of a program of the pass over query tiles.

    Attributes:
        m0: its first row.
        q, do: tiles of (tile_m, head_dim) and (tile_m, head_dim_v).
        lse2, delta: fp32 (tile_m,). lo, hi: the key interval of each row, int32 (tile_m,).
    """

    m0: Any
    q: Any
    do: Any
    lse2: Any
    delta: Any
    lo: Any
    hi: Any


# -- delta ---------------------------------------------------------------------------------------------------------


@triton.jit
def delta_kernel(tensors, sizes, scales, FACTS: tl.constexpr):
    """The statistics of the rows: delta (13), and lse in units of log2 (natural for fp32 inputs).

    A row that saw no key gets lse2 = +inf, so that its P is 0, and delta = 0.
    Grid: (slots · heads_q · batch); packed, the slots are of all rows at once.
    """
    sizes = plain_sizes(sizes)
    begin_overlap(FACTS)
    pid = tl.program_id(0)
    m0 = (pid % sizes.slots) * FACTS.tile_m
    head = (pid // sizes.slots) % sizes.heads_q
    b = pid // sizes.slots // sizes.heads_q
    token = tl.cast(b, tl.int64) * sizes.seqlen_q
    dim, columns = multiple(sizes.dims[1], FACTS.unit), tl.arange(0, FACTS.tile_n)
    i = m0 + tl.arange(0, FACTS.tile_m)
    o = tensors.o + (token + i)[:, None] * (sizes.heads_q * dim) + (head * dim + columns)[None, :]
    base = (tl.cast(sizes.do[2], tl.int64) * head + tl.cast(sizes.do[0], tl.int64) * b) * FACTS.align
    do = tensors.do + base + i.to(tl.int64)[:, None] * (sizes.do[1] * FACTS.align) + columns[None, :]
    delta = tl.full([FACTS.tile_m], 0.0, tl.float32)
    TERMS: tl.constexpr = FACTS.terms
    for first in range(0, dim, FACTS.tile_n):
        # O and dO: (tile_m, tile_n). Where dO comes as bf16 terms, they are added up again.
        ok = (i < sizes.seqlen_q)[:, None] & (first + columns < dim)[None, :]
        total = tl.load(do + first, mask=ok, other=0.0).to(tl.float32)
        for term in tl.static_range(1, TERMS):
            total += tl.load(do + first + term * columns_of_term(dim, FACTS), mask=ok, other=0.0).to(tl.float32)
        delta += tl.sum(tl.load(o + first, mask=ok, other=0.0).to(tl.float32) * total, 1)
    line = (tl.cast(b, tl.int64) * sizes.heads_q + head) * sizes.seqlen_q + i
    ok = i < sizes.seqlen_q
    lse = tl.load(tensors.lse + line, mask=ok, other=0.0)
    dlse = tl.load(tensors.dlse + line, mask=ok, other=0.0)
    delta -= dlse  # fp32 (tile_m,)
    shift = shift_of_rows(lse, FACTS)
    line = (tl.cast(b, tl.int64) * sizes.heads_q + head) * sizes.seqlen_q_rounded + i
    tl.store(tensors.delta + line, tl.where(shift == float("inf"), 0.0, delta), mask=ok)
    tl.store(tensors.lse2 + line, shift, mask=ok)


# -- Load ----------------------------------------------------------------------------------------------------------


@triton.jit
def query_head(tensors, sizes, work, head, q_views, do_views, statistics, FACTS: tl.constexpr):
    """The :class:`QueryHead` of a head; ``statistics`` is a descriptor or None."""
    q = source_of(tensors.q, q_views, sizes.q, work, work.start_q, head, FACTS)
    do = source_of(tensors.do, do_views, sizes.do, work, work.start_q, head, FACTS)
    lse_start = line_of(head, sizes.heads_q, sizes.seqlen_q, work, work.start_q, FACTS)
    statistics_start = line_of(head, sizes.heads_q, sizes.seqlen_q_rounded, work, work.start_q, FACTS)
    return QueryHead(head, q, do, lse_start, statistics_start, tensors.lse2 if statistics is None else statistics)


@triton.jit
def key_sources(tensors, sizes, work, head_k, k_views, v_views, FACTS: tl.constexpr):
    """The sources of k and v of a key head."""
    k = source_of(tensors.k, k_views, sizes.k, work, work.start_k, head_k, FACTS)
    v = source_of(tensors.v, v_views, sizes.v, work, work.start_k, head_k, FACTS)
    return k, v


@triton.jit
def load_key_tile(k, v, n0, pairs, sheet, work, FACTS: tl.constexpr):
    """The :class:`KeyTile` at ``n0`` of two sources; rows past the last are zero."""
    left = work.seqlen_k - n0
    k = load_rows(k, n0, left, None, FACTS.tile_n, OF_V=False, MASKED=True, FACTS=FACTS)
    v = load_rows(v, n0, left, None, FACTS.tile_n, OF_V=True, MASKED=True, FACTS=FACTS)
    return KeyTile(n0, k, v, pairs, sheet)


@triton.jit
def load_grad_query_tile(m0, rows, tensors, work, FACTS: tl.constexpr):
    """The :class:`GradQueryTile` at ``m0`` of a :class:`QueryHead`; rows past the last are zero."""
    left = work.seqlen_q - m0
    q = load_rows(rows.q, m0, left, None, FACTS.tile_m, OF_V=False, MASKED=True, FACTS=FACTS)
    do = load_rows(rows.do, m0, left, None, FACTS.tile_m, OF_V=True, MASKED=True, FACTS=FACTS)
    i = m0 + tl.arange(0, FACTS.tile_m)
    lse2, delta = load_statistics(tensors, rows.statistics_start, i, work.seqlen_q, MASKED=True)
    lo, hi = key_interval(i, rows.head, work, FACTS)
    return GradQueryTile(m0, q, do, lse2, delta, lo, hi)


@triton.jit
def load_statistics(tensors, start, i, seqlen_q, MASKED: tl.constexpr):
    """``(lse2, delta)`` of the rows ``i``, fp32.

    Not MASKED, the caller hides the rows past seqlen_q: both buffers are longer by a tile (``PADDING`` on the host's side), and a
    mask here would cost the pass over key tiles its registers.
    """
    if MASKED:
        ok = i < seqlen_q
        return tl.load(tensors.lse2 + start + i, mask=ok, other=float("inf")), tl.load(
            tensors.delta + start + i, mask=ok, other=0.0
        )
    else:
        return tl.load(tensors.lse2 + start + i), tl.load(tensors.delta + start + i)


@triton.jit
def score_exponent(s, head, i, j, scales, work, FACTS: tl.constexpr):
    """The scores (3) of a tile of products, as exponents for :func:`tile.exponential`; i and j are a row and a column, or turned."""
    if FACTS.score is not None:
        z = tl.broadcast_to(FACTS.score(s, work.b, head, i, j, work).to(tl.float32), s.shape)
        return z if FACTS.natural or FACTS.binary else z * LOG2E
    elif FACTS.natural:
        return s * scales.softmax
    else:
        return s * (scales.softmax * LOG2E)


@triton.jit
def exponent(s, lse2, head, i, j, scales, work, FACTS: tl.constexpr):
    """The exponents of P (11) for :func:`tile.exponential`, of a tile of products; lse2 is a row or a column of it, as i is."""
    if FACTS.exponent is not None:
        return FACTS.exponent(s, lse2, work.b, head, i, j, work)
    else:
        return score_exponent(s, head, i, j, scales, work, FACTS) - lse2


# -- dK and dV: key tiles outside ----------------------------------------------------------------------------------


@triton.jit
def dkdv_kernel(
    tensors, sizes, scales, q_view, q_rest, do_view, do_rest, statistics, pairs, sheet, FACTS: tl.constexpr
):
    """dK of one key tile if ``FACTS.dk``, its dV if ``FACTS.dv``. Grid: (slots · heads_k · group_parts · batch).

    With ``FACTS.sheet`` it leaves dS behind, and where it computes neither sum, P too.

    Where ``FACTS.in_parts``, a program has a part of the key head's query heads, and dk and dv hold the sums of each part
    (:mod:`group_parts`).

    Args:
        q_view, q_rest, do_view, do_rest: descriptors for the first and the second piece of the head dim, None where there is none. With
            ``FACTS.chunk`` one serves all pieces, and the second is that of k, and of v.
        statistics, pairs, sheet: descriptors, or None (:class:`QueryHead`, :class:`KeyTile`).
    """
    sizes = plain_sizes(sizes)
    begin_overlap(FACTS)
    slot, head_k, b = scheduled(sizes.group_parts if FACTS.in_parts else 1, sizes)
    group = sizes.heads_q // sizes.heads_k
    heads, part = group, 0
    if FACTS.in_parts:
        part, head_k = head_k % sizes.group_parts, head_k // sizes.group_parts
        heads = group // sizes.group_parts
    if FACTS.sheet:  # the slots are of the keys from a first one on
        first_key = sizes.portion
        slot += first_key // FACTS.tile_n
    work = work_tile(slot, b, tensors, sizes, scales, OVER_KEYS=True, FACTS=FACTS)
    n0 = work.block * FACTS.tile_n
    left = work.seqlen_k - n0
    k, v = key_sources(tensors, sizes, work, head_k, (q_rest, None), (do_rest, None), FACTS)
    pairs, sheet = tensors.q if pairs is None else pairs, tensors.q if sheet is None else sheet
    keys = load_key_tile(k, v, n0, pairs, sheet, work, FACTS)
    # The sums: fp32 (tile_n, width) for each piece.
    dk = zeros(FACTS.tile_n, OF_V=False, FACTS=FACTS) if FACTS.dk else ()
    dv = zeros(FACTS.tile_n, OF_V=True, FACTS=FACTS) if FACTS.dv else ()

    for g in range(heads):  # the program's query heads, in order: dK and dV are sums over them
        head = head_k * group + part * heads + g
        of_head = with_heads(work, head, FACTS)
        rows = query_head(tensors, sizes, work, head, (q_view, q_rest), (do_view, do_rest), statistics, FACTS)
        beside = keys, rows, tensors, sizes, scales, of_head
        dk, dv = over_tiles(
            dkdv_block, (dk, dv), n0, head, beside, tensors, sizes, of_head, OF_QUERIES=True, FACTS=FACTS
        )

    token = token_of(sizes.seqlen_k, work, work.start_k, FACTS)
    if FACTS.in_parts:  # a part's sums lie behind those of the parts before it
        token += part * keys_of_all(sizes, FACTS)
    store_dkdv(dk, dv, n0, left, token, head_k, tensors, sizes, scales, FACTS)
    end_overlap(FACTS)


@triton.jit
def store_dkdv(dk, dv, n0, left, token, head_k, tensors, sizes, scales, FACTS: tl.constexpr):
    """Stores the ``left`` first rows of dK and dV of the key tile at ``n0`` of the sequence that begins at ``token``; () is not stored."""
    # dK: (tile_n, head_dim), dV: (tile_n, head_dim_v), rounded to the gradients' dtype.
    if len(dk) > 0:
        row = sizes.heads_k * FACTS.head_dim
        base = tensors.dk + token * row + head_k * FACTS.head_dim
        store_rows(base, row, n0, left, dk, scales.softmax, FACTS.tile_n, OF_V=False, FACTS=FACTS)
    if len(dv) > 0:
        row = sizes.heads_k * FACTS.head_dim_v
        base = tensors.dv + token * row + head_k * FACTS.head_dim_v
        store_rows(base, row, n0, left, dv, scales.keep if FACTS.dropout else 1.0, FACTS.tile_n, OF_V=True, FACTS=FACTS)


@triton.jit
def dkdv_block(m0, state, beside, partial, FACTS: tl.constexpr):
    """``(dk, dv)`` after the query tile at ``m0`` of head ``rows.head``; () for the one that is not wanted.

    All tiles of pairs are (tile_n, tile_m). The arguments are those of :func:`mask.over_tiles`.
    """
    dk, dv = state
    keys, rows, tensors, sizes, scales, work = beside
    i = m0 + tl.arange(0, FACTS.tile_m)
    n0, k, v, _, _ = keys
    j = n0 + tl.arange(0, FACTS.tile_n)
    left = work.seqlen_q - m0
    # Q: (tile_m, head_dim), dO: (tile_m, head_dim_v), in the inputs' dtype.
    q = load_streamed(rows.q, m0, left, None, FACTS.tile_m, OF_V=False, partial=partial, FACTS=FACTS)
    do = load_streamed(rows.do, m0, left, None, FACTS.tile_m, OF_V=True, partial=partial, FACTS=FACTS)
    if FACTS.chunk:
        s = dot_transposed(k, q, FACTS)
        lse2, _ = load_statistics(tensors, rows.statistics_start, i, work.seqlen_q, MASKED=False)
    elif (FACTS.whole or (FACTS.tma and not partial)) and not FACTS.packed:
        line = (rows.statistics_start + m0).to(tl.int32)
        if (
            FACTS.dk
        ):  # (2, tile_m) fp32 in one load: each load by descriptor has a barrier on which the whole program waits
            lse2, delta = tl.split(tl.trans(rows.statistics.load([0, line])))
        else:  # dV needs no delta
            lse2 = rows.statistics.load([0, line]).reshape(FACTS.tile_m)
            delta = lse2
    else:
        lse2, delta = load_statistics(tensors, rows.statistics_start, i, work.seqlen_q, MASKED=False)
    if not FACTS.chunk:
        s = dot_transposed(k, q, FACTS)  # Sᵀ = K Qᵀ, (tile_n, tile_m) fp32
    work = with_tile(with_pair_tile(work, keys.pairs, rows.head, m0, n0, OVER_KEYS=True, FACTS=FACTS), m0, n0, FACTS)
    x = exponent(s, lse2[None, :], rows.head, i[None, :], j[:, None], scales, work, FACTS)
    p = exponential(x, FACTS)  # (11); normalised, as lse holds the row's sum
    d = p  # will be dP - delta
    if FACTS.dropout:
        z = tl.trans(dropout_keep(m0, n0, work.b, rows.head, tensors, sizes, FACTS.tile_m, FACTS.tile_n))
    if FACTS.dk or FACTS.sheet:
        dp = dot_transposed(v, do, FACTS)  # dPᵀ = V dOᵀ, (tile_n, tile_m) fp32
        if FACTS.chunk:
            _, delta = load_statistics(tensors, rows.statistics_start, i, work.seqlen_q, MASKED=False)
        if FACTS.dropout:
            dp = tl.where(z, dp * scales.keep, 0.0)
        d = dp - delta[None, :]
    if partial:
        # What a key alone decides comes first, so that it is asked once a key (docs/decisions.md#triton-zeroed-keys).
        kept = j[:, None] < work.seqlen_k
        if FACTS.keep is not None:
            kept = kept & FACTS.keep(work.b, rows.head, i[None, :], j[:, None], work)
        first, last = query_interval(here(j, FACTS), rows.head, work, FACTS)
        if FACTS.first is not None:
            kept = kept & (i[None, :] >= first[:, None])
        kept = kept & (i[None, :] < last[:, None])
        p = tl.where(kept, p, 0.0)  # masking selects: a hidden pair's score may be anything
        d = tl.where(kept, d, 0.0)  # d is selected too: past the last row the statistics' buffers may hold NaN

    dropped = tl.where(z, p, 0.0) if FACTS.dropout else p
    if FACTS.dv:
        dv = accumulate(dropped, do, dv, FACTS)  # dV += (P ∘ Z)ᵀ dO, (tile_n, head_dim_v) fp32
    if FACTS.dk or FACTS.sheet:
        ds = p * d
        if (
            FACTS.score is not None and not FACTS.whole
        ):  # where FACTS.whole, all that P's zeros are multiplied by is finite
            ds = tl.where(p == 0.0, 0.0, ds)
        if FACTS.columns is not None:
            line = line_of(rows.head, sizes.heads_q, sizes.seqlen_k, work, work.start_k, FACTS) + j
            # Sums over the tile's queries of leaves read at j alone, fp32 (tile_n,), added atomically.
            added = (j < work.seqlen_k) & of_first_columns(FACTS)
            FACTS.columns(ds, p > 0.0, line, added, s, work.b, rows.head, i[None, :], j[:, None], work)
        if FACTS.slope is not None:
            ds = ds * FACTS.slope(s, work.b, rows.head, i[None, :], j[:, None], work)
            if FACTS.hides or not FACTS.whole:  # 0 times a slope that is not finite
                ds = tl.where(p == 0.0, 0.0, ds)
        if FACTS.sheet:
            store_sheet(ds, m0, n0, keys, rows, tensors, sizes, work, FACTS)
            if not (FACTS.dk or FACTS.dv):
                to = sheet_pointers(tensors.p_sheet, sizes, work.b - sizes.batches[0], rows.head, m0, n0, FACTS)
                tl.store(to, dropped)
        if FACTS.dk:
            dk = accumulate(ds, q, dk, FACTS)  # dK += dSᵀ Q, (tile_n, head_dim) fp32; scaled when it is stored
    return dk, dv


@triton.jit
def store_sheet(ds, m0, n0, keys, rows, tensors, sizes, work, FACTS: tl.constexpr):
    """Stores a tile of dSᵀ, fp32 (tile_n, tile_m), in the sheet, rounded to its dtype, for :mod:`pair_bias`."""
    b = work.b - sizes.batches[0]
    if FACTS.strips:
        head = rows.head - sizes.heads[0] * (sizes.heads_q // sizes.heads_k)
        strip = ds.to(tensors.sheet.dtype.element_ty).reshape(1, 1, 1, FACTS.tile_n, FACTS.tile_m)
        # By TMA from shared to global memory; Triton waits before it writes the shared tile again.
        first_key = sizes.portion
        keys.sheet.store([b, head, m0 // FACTS.strips, n0 - first_key, m0 % FACTS.strips], strip)
    else:
        to = sheet_pointers(tensors.sheet, sizes, b, rows.head, m0, n0, FACTS)
        tl.store(to, ds.to(tensors.sheet.dtype.element_ty))


# -- dQ: query tiles outside ---------------------------------------------------------------------------------------


@triton.jit
def dq_kernel(tensors, sizes, scales, k_view, k_rest, v_view, v_rest, FACTS: tl.constexpr):
    """dQ of one query tile, and its sums for leaves that are read by rows. Grid: (slots · heads_q · batch); the last tiles first.

    Args:
        k_view, k_rest, v_view, v_rest: descriptors for the first and the second piece of the head dim, None where there is none. With
            ``FACTS.chunk`` one serves all pieces, and the second is that of q, and of dO.
    """
    sizes = plain_sizes(sizes)
    begin_overlap(FACTS)
    slot, head, b = scheduled(sizes.heads_q // sizes.heads_k, sizes)
    work = work_tile(sizes.slots - 1 - slot, b, tensors, sizes, scales, OVER_KEYS=False, FACTS=FACTS)
    work = with_heads(work, head, FACTS)
    rows = query_head(tensors, sizes, work, head, (k_rest, None), (v_rest, None), None, FACTS)
    head_k = head // (sizes.heads_q // sizes.heads_k)
    k, v = key_sources(tensors, sizes, work, head_k, (k_view, k_rest), (v_view, v_rest), FACTS)
    query = load_grad_query_tile(work.block * FACTS.tile_m, rows, tensors, work, FACTS)
    keys = (k, v)
    dq = zeros(FACTS.tile_m, OF_V=False, FACTS=FACTS)
    sums = ()  # of the leaves that are summed by rows: fp32 (tile_m, PARTIAL) each
    for _ in tl.static_range(len(FACTS.row_grads)):
        sums = sums + (tl.full([FACTS.tile_m, PARTIAL], 0.0, tl.float32),)

    beside = query, rows, keys, tensors, sizes, scales, work
    dq, sums = over_tiles(
        dq_block, (dq, sums), query.m0, head, beside, tensors, sizes, work, OF_QUERIES=False, FACTS=FACTS
    )

    store_dq(dq, query.m0, head, tensors, sizes, scales, work, FACTS)
    i = query.m0 + tl.arange(0, FACTS.tile_m)
    for n in tl.static_range(len(FACTS.row_grads)):
        tl.store(work.grads[FACTS.row_grads[n]] + rows.lse_start + i, tl.sum(sums[n], 1), mask=i < work.seqlen_q)


@triton.jit
def store_dq(dq, m0, head, tensors, sizes, scales, work, FACTS: tl.constexpr):
    """Stores dQ of the query tile at ``m0``: (tile_m, head_dim), rounded to the inputs' dtype."""
    row = sizes.heads_q * FACTS.head_dim
    base = tensors.dq + token_of(sizes.seqlen_q, work, work.start_q, FACTS) * row + head * FACTS.head_dim
    store_rows(base, row, m0, work.seqlen_q - m0, dq, scales.softmax, FACTS.tile_m, OF_V=False, FACTS=FACTS)


@triton.jit
def visible_pairs(query, i, j, head, work, FACTS: tl.constexpr):
    """The pairs of a tile that the mask keeps: bool (tile_m, tile_n)."""
    kept = i[:, None] < work.seqlen_q
    if FACTS.keep is not None:
        kept = kept & FACTS.keep(work.b, head, i[:, None], j[None, :], work)
    if FACTS.lo is not None:
        kept = kept & (j[None, :] >= query.lo[:, None])
    return kept & (j[None, :] < query.hi[:, None])


@triton.jit
def dq_block(n0, state, beside, partial, FACTS: tl.constexpr):
    """``(dq, sums)`` after the key tile at ``n0``; the arguments are those of :func:`mask.over_tiles`, with the sources of k and v."""
    dq, sums = state
    query, rows, keys, tensors, sizes, scales, work = beside
    i = query.m0 + tl.arange(0, FACTS.tile_m)
    j = n0 + tl.arange(0, FACTS.tile_n)
    left = work.seqlen_k - n0
    alive = None
    if not FACTS.whole and partial:
        kept = visible_pairs(query, i, j, rows.head, work, FACTS)
        if FACTS.keep is not None:
            alive = tl.max(kept.to(tl.int32), 0) > 0
        elif FACTS.masked:
            first, last = query_interval(j, rows.head, work, FACTS)
            alive = first < last
    # K: (tile_n, head_dim), V: (tile_n, head_dim_v), in the inputs' dtype.
    # A key that no row here sees has dS = 0, and its row of K is not read: it may hold NaN.
    k = load_streamed(keys[0], n0, left, alive, FACTS.tile_n, OF_V=False, partial=partial, FACTS=FACTS)
    v = load_streamed(keys[1], n0, left, alive, FACTS.tile_n, OF_V=True, partial=partial, FACTS=FACTS)
    s = dot_transposed(query.q, k, FACTS)  # S = Q Kᵀ, (tile_m, tile_n) fp32
    work = with_tile(work, query.m0, n0, FACTS)
    x = exponent(s, query.lse2[:, None], rows.head, i[:, None], j[None, :], scales, work, FACTS)
    p = exponential(x, FACTS)
    dp = dot_transposed(query.do, v, FACTS)  # dP = dO Vᵀ, (tile_m, tile_n) fp32
    if FACTS.dropout:
        z = dropout_keep(query.m0, n0, work.b, rows.head, tensors, sizes, FACTS.tile_m, FACTS.tile_n)
        dp = tl.where(z, dp * scales.keep, 0.0)
    if partial:
        if FACTS.whole:
            kept = visible_pairs(query, i, here(j, FACTS), rows.head, work, FACTS)
        p = tl.where(kept, p, 0.0)
    ds = p * (dp - query.delta[:, None])
    if FACTS.score is not None and not FACTS.whole:  # 0 times what is not finite
        ds = tl.where(p == 0.0, 0.0, ds)
    elif FACTS.keep is not None:  # noqa: SIM102 - of compile time, as `partial` is beside a predicate
        if partial:
            ds = tl.where(p == 0.0, 0.0, ds)
    if FACTS.leaves is not None:
        # Gradients that are stored where the leaf was read, or scattered with atomic additions.
        inside = (i[:, None] < work.seqlen_q) & (j[None, :] < work.seqlen_k) & of_first_columns(FACTS)
        FACTS.leaves(ds, p > 0.0, inside, s, work.b, rows.head, i[:, None], j[None, :], work)
    if FACTS.rows is not None:
        # Sums over the tile's keys of leaves that are not read at j, fp32 (tile_m, PARTIAL), kept in registers: a sum of
        # whole rows would pass between threads at every tile.
        more = FACTS.rows(ds, p > 0.0, s, work.b, rows.head, i[:, None], j[None, :], work)
        total = ()
        for n in tl.static_range(len(FACTS.row_grads)):
            total = total + (sums[n] + more[n],)
        sums = total
    if FACTS.slope is not None:
        ds = ds * FACTS.slope(s, work.b, rows.head, i[:, None], j[None, :], work)
        if FACTS.hides or not FACTS.whole:
            ds = tl.where(p == 0.0, 0.0, ds)
    return accumulate(ds, k, dq, FACTS), sums  # dQ += dS K, (tile_m, head_dim) fp32; scaled when it is stored
