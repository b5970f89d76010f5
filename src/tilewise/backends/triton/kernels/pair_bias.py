"""The gradient of a pair bias, a leaf that is read at i and j, where the bias is broadcast over the batch or heads.

    dbias[.., i, j] = Σ dZ[b, h, i, j] · slope    over the batch elements b and the heads h that share a number of the bias

There are two ways. Where the bias is all that a score reads, and dS is its gradient, the pass over key tiles leaves dS of some
heads and keys behind in a *sheet*, and `sheet_kernel` makes dQ and the bias's gradient from it, with one product of a tile
(docs/decisions.md#triton-kept-ds). Elsewhere `tile_kernel` computes dZ of a tile again, for each batch element and head in
turn. Either adds in a fixed order, without atomics.
"""

# ruff: noqa: RUF005 - Triton's tuples are added, not unpacked

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.arguments import plain_sizes, scheduled, with_heads, with_tile, work_tile
from tilewise.backends.triton.kernels.backward import (
    exponent,
    key_sources,
    load_grad_query_tile,
    load_key_tile,
    query_head,
    visible_pairs,
)
from tilewise.backends.triton.kernels.mask import dropout_keep, n_block_ranges
from tilewise.backends.triton.kernels.maths import multiple
from tilewise.backends.triton.kernels.tile import (
    STRIP,
    accumulate,
    dot_transposed,
    exponential,
    load_piece,
    load_streamed,
    sheet_pointers,
    source_of,
    store_rows,
    zeros,
)

# -- From a sheet of dS --------------------------------------------------------------------------------------------


@triton.jit
def sheet_kernel(
    tensors,
    sizes,
    scales,
    k_view,
    k_rest,
    dq_sums,
    GRAD: tl.constexpr,
    LOOP_B: tl.constexpr,
    LOOP_H: tl.constexpr,
    MORE: tl.constexpr,
    LAST: tl.constexpr,
    FACTS: tl.constexpr,
):
    """``dQ = scale · dS K`` of one query tile over the keys of a sheet, and the sums of dS that make the gradient of a pair bias.

    Programs whose tiles of dS are added up to one take turns at it, key tile by key tile: each reads the others' dS just when they
    do, so that it comes from memory once. They make several partial sums, one for each split, where the gradient has too few tiles to keep
    the device busy. Every tile that rows read here was written by the pass over keys
    (:func:`mask.block_ranges`).
    Grid: as in :func:`backward.dq_kernel`.

    Args:
        k_view, k_rest: descriptors for the first and the second piece of the head dim, None where there is none.
        dq_sums: fp32, laid out as dQ: the sums over the keys of earlier sheets, and of this one. None where one sheet has all keys.
        GRAD, LOOP_B, LOOP_H: as in :func:`tile_kernel`; GRAD is None where dQ alone is wanted.
        MORE: earlier sheets had other keys. LAST: no later sheet has, so that dQ is complete.
    """
    sizes = plain_sizes(sizes)
    group = sizes.heads_q // sizes.heads_k
    slot, head, b = scheduled(group, sizes)
    work = work_tile(sizes.slots - 1 - slot, b, tensors, sizes, scales, OVER_KEYS=False, FACTS=FACTS)
    m0 = work.block * FACTS.tile_m
    k = source_of(tensors.k, (k_view, k_rest), sizes.k, work, work.start_k, head // group, FACTS)
    dq = zeros(FACTS.tile_m, OF_V=False, FACTS=FACTS)

    at = b - sizes.batches[0] if FACTS.adds else b  # the first sheet has the first batch elements
    to_b, batches = (at * 0, sizes.batches[1]) if LOOP_B else (at, at * 0 + 1)
    to_h, heads = (sizes.heads[0] * group, sizes.heads[1] * group) if LOOP_H else (head, head * 0 + 1)
    of_sum = to_b, to_h, heads
    # Of the `turns` programs of a split, this one stores the tiles n with n % turns == turn.
    turn = (at - to_b) * heads + (head - to_h)
    split = turn // sizes.splits[0]
    turns = tl.minimum(sizes.splits[0], batches * heads - split * sizes.splits[0])
    turn -= split * sizes.splits[0]
    # From one of their tiles of dS to the next, in elements: over all heads of the sheet, or over batch elements alone.
    step = tl.cast(sizes.sheet[0], tl.int64) * sizes.sheet[1] * STRIP
    step = step if LOOP_H else step * (sizes.heads[1] * group)
    # The key tiles of this sheet, and among them those that some row sees.
    first_key = sizes.portion
    start = first_key // FACTS.tile_n
    stop = tl.minimum(start + sizes.sheet[1] // FACTS.tile_n, tl.cdiv(sizes.seqlen_k, FACTS.tile_n))
    first, _full, _full_end, last = n_block_ranges(m0, head, work, FACTS)
    first = tl.minimum(tl.maximum(first, start), stop)
    last = tl.maximum(tl.minimum(last, stop), first)
    for n in range(first, last):
        n0 = n * FACTS.tile_n
        ds = tl.load(
            sheet_pointers(tensors.sheet, sizes, at, head, m0, n0, FACTS)
        )  # dSᵀ, (tile_n, tile_m), in the sheet's dtype
        tile = load_streamed(
            k, n0, work.seqlen_k - n0, None, FACTS.tile_n, OF_V=False, partial=True, FACTS=FACTS
        )  # K, (tile_n, head_dim)
        dq = accumulate(tl.trans(ds), tile, dq, FACTS)  # dQ += dS K, (tile_m, head_dim) fp32
        if GRAD is not None:  # noqa: SIM102 - of compile time
            if n % turns == turn:
                store_sheet_sum(m0, n0, of_sum, (split, turns, step), tensors, sizes, scales, work, GRAD, FACTS)
    if GRAD is not None:
        others = turns if FACTS.varies else 0
        # Tiles that this program's rows do not see: zeros, or what other heads and sequences see there.
        for t in range(first - start + stop - last):
            n = tl.where(t < first - start, start + t, last + t - (first - start))
            if n % turns == turn:
                n0 = n * FACTS.tile_n
                store_sheet_sum(m0, n0, of_sum, (split, others, step), tensors, sizes, scales, work, GRAD, FACTS)

    token = tl.cast(b, tl.int64) * sizes.seqlen_q
    row = sizes.heads_q * FACTS.head_dim
    base = token * row + head * FACTS.head_dim
    left = work.seqlen_q - m0
    if MORE:
        dq = added_rows(dq, dq_sums + base, row, m0, left, FACTS)
    if LAST:
        store_rows(tensors.dq + base, row, m0, left, dq, scales.softmax, FACTS.tile_m, OF_V=False, FACTS=FACTS)
    else:
        if MORE:  # where no row sees a key of this sheet, the sums of earlier ones stay as they are
            left = tl.where(last > first, left, 0)
        store_rows(dq_sums + base, row, m0, left, dq, 1.0, FACTS.tile_m, OF_V=False, FACTS=FACTS)


@triton.jit
def added_rows(tiles, pointer, row, first, left, FACTS: tl.constexpr):
    """``tiles`` and the rows of q's head dim at ``first``, as :func:`tile.load_piece` reads them."""
    PIECES: tl.constexpr = len(FACTS.pieces)
    sums = ()
    for n in tl.static_range(PIECES):
        sums = sums + (
            tiles[n]
            + load_piece(pointer, row, first, left, None, FACTS.tile_m, OF_V=False, PIECE=n, MASKED=True, FACTS=FACTS),
        )
    return sums


@triton.jit
def store_sheet_sum(m0, n0, of_sum, part, tensors, sizes, scales, work, GRAD: tl.constexpr, FACTS: tl.constexpr):
    """Stores the sum of some tiles of dS at (m0, n0).

    Args:
        of_sum: its first batch element, of those of the launch, its first head, and how many heads it has.
        part: the split, how many tiles it has, and the elements from one tile to the next.
    """
    b, head, heads = of_sum
    split, count, step = part
    i = m0 + tl.arange(0, FACTS.tile_m)
    j = n0 + tl.arange(0, FACTS.tile_n)
    total = tl.full([FACTS.tile_n, FACTS.tile_m], 0.0, tl.float32)
    before = split * sizes.splits[0]
    tiles = sheet_pointers(tensors.sheet, sizes, b, head, m0, n0, FACTS) + before * step
    for bh in tl.range(count, loop_unroll_factor=4):  # so that the loads of four tiles are under way at once
        if FACTS.varies:  # what the mask of a head or sequence does not visit was not written
            to_b = (sizes.batches[0] if FACTS.adds else 0) + b + (before + bh) // heads
            each = work_tile(to_b * 0, to_b, tensors, sizes, scales, OVER_KEYS=False, FACTS=FACTS)
            written = is_visited(m0, n0, head + (before + bh) % heads, each, FACTS)
            written = tl.broadcast_to(written, (FACTS.tile_n, FACTS.tile_m))
            total += tl.load(tiles + bh * step, mask=written, other=0.0).to(tl.float32)
        else:
            total += tl.load(tiles + bh * step).to(tl.float32)
    grad = work.grads[GRAD] + tl.cast(split, tl.int64) * multiple(sizes.splits[1], 16)
    pointers = grad + FACTS.place(sizes.batches[0] + b if FACTS.adds else b, head, i[None, :], j[:, None], work)
    inside = (i[None, :] < sizes.seqlen_q) & (j[:, None] < multiple(sizes.seqlen_k, FACTS.unit))
    if FACTS.adds:
        total += tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    # (tile_n, tile_m), rounded to the gradient's dtype; along j its elements lie side by side.
    tl.store(pointers, total.to(grad.dtype.element_ty), mask=inside)


# -- From q, k, v and dO again -------------------------------------------------------------------------------------


@triton.jit
def tile_kernel(
    tensors, sizes, scales, GRAD: tl.constexpr, LOOP_B: tl.constexpr, LOOP_H: tl.constexpr, FACTS: tl.constexpr
):
    """One tile of the gradient of a leaf read at i and j. Grid: (query tiles, key tiles, elements of b and h that it is read at).

    Args:
        GRAD: which of ``work.grads``; ``FACTS.tile`` is the slope of its read and ``FACTS.place`` says where it is read.
        LOOP_B, LOOP_H: whether the leaf is broadcast over the batch, over the heads; they are walked in order.
    """
    sizes = plain_sizes(sizes)
    m0 = tl.program_id(0) * FACTS.tile_m
    n0 = tl.program_id(1) * FACTS.tile_n
    outer = tl.program_id(2)
    batches = sizes.batch if LOOP_B else sizes.batch * 0 + 1
    heads = sizes.heads_q if LOOP_H else sizes.heads_q * 0 + 1
    kept_heads = sizes.heads_q // heads
    i = m0 + tl.arange(0, FACTS.tile_m)
    j = n0 + tl.arange(0, FACTS.tile_n)
    total = tl.full([FACTS.tile_m, FACTS.tile_n], 0.0, tl.float32)
    work = work_tile(outer * 0, outer // kept_heads, tensors, sizes, scales, OVER_KEYS=False, FACTS=FACTS)
    count = batches * heads
    if not FACTS.varies:  # one answer for all heads: without a branch in the loop its loads overlap
        count = tl.where(is_visited(m0, n0, outer % kept_heads, work, FACTS), count, 0)
    for bh in range(count):
        b = outer // kept_heads + bh // heads
        head = outer % kept_heads + bh % heads
        each = work_tile(outer * 0, b, tensors, sizes, scales, OVER_KEYS=False, FACTS=FACTS)
        if FACTS.varies:
            if is_visited(m0, n0, head, each, FACTS):
                total += pair_gradient(m0, i, j, n0, head, each, tensors, sizes, scales, FACTS)
        else:
            total += pair_gradient(m0, i, j, n0, head, each, tensors, sizes, scales, FACTS)
    offset = FACTS.place(work.b, outer % kept_heads, i[:, None], j[None, :], work)
    inside = (i[:, None] < sizes.seqlen_q) & (j[None, :] < sizes.seqlen_k)
    grad = work.grads[GRAD]
    # (tile_m, tile_n), rounded to the gradient's dtype.
    tl.store(grad + offset, total.to(grad.dtype.element_ty), mask=inside)


@triton.jit
def is_visited(m0, n0, head, work, FACTS: tl.constexpr):
    """Whether some row of the tile at (m0, n0) sees some key of it."""
    first, _full, _full_end, last = n_block_ranges(m0, head, work, FACTS)
    return (n0 >= first * FACTS.tile_n) & (n0 < last * FACTS.tile_n)


@triton.jit
def pair_gradient(m0, i, j, n0, head, work, tensors, sizes, scales, FACTS: tl.constexpr):
    """dZ of a tile times the slope of the leaf's read, fp32 (tile_m, tile_n)."""
    rows = query_head(tensors, sizes, work, head, (None, None), (None, None), None, FACTS)
    head_k = head // (sizes.heads_q // sizes.heads_k)
    k, v = key_sources(tensors, sizes, work, head_k, (None, None), (None, None), FACTS)
    _, k, v, _, _ = load_key_tile(k, v, n0, tensors.q, tensors.q, work, FACTS)
    query = load_grad_query_tile(m0, rows, tensors, work, FACTS)
    s = dot_transposed(query.q, k, FACTS)  # S = Q Kᵀ, (tile_m, tile_n) fp32
    work = with_tile(with_heads(work, head, FACTS), m0, n0, FACTS)
    x = exponent(s, query.lse2[:, None], head, i[:, None], j[None, :], scales, work, FACTS)
    kept = visible_pairs(query, i, j, head, work, FACTS)
    p = tl.where(kept, exponential(x, FACTS), 0.0)
    dp = dot_transposed(query.do, v, FACTS)  # dP = dO Vᵀ, (tile_m, tile_n) fp32
    if FACTS.dropout:
        z = dropout_keep(m0, n0, work.b, head, tensors, sizes, FACTS.tile_m, FACTS.tile_n)
        dp = tl.where(z, dp * scales.keep, 0.0)
    dz = tl.where(p == 0.0, 0.0, p * (dp - query.delta[:, None]))
    if FACTS.tile is not None:
        dz = tl.where(p == 0.0, 0.0, dz * FACTS.tile(s, work.b, head, i[:, None], j[None, :], work))
    return dz
