"""Forward of few queries, and over a cache of keys and values that lies in pages (PagedAttention, Kwon et al. 2023).

    K of sequence b at position j  =  k[block_table[b, j // page_size], j % page_size]

Tensors: q (batch, seqlen_q, heads_q, head_dim), or packed without batch; k, v (num_pages, page_size, heads_k, head_dim);
block_table int32 (batch, max_pages); seqlens_k int32 (batch,). Lengths and page numbers are read on the device, and the grid
depends on shapes alone, so a CUDA graph replays with others. A page number is read only where some row of the tile sees a key
of that page, and is clamped into the pool. Dense keys (``FACTS.pages`` "dense") are one page a sequence, without table and lengths.

The heads that share a key head are rows of one tile, as they read the same keys: row r of a sequence's tiles is query ``r // group``
and head ``r % group`` of the group. With one query and a group of 4, a tile of 64 has 4 rows that count.

The keys that a tile's rows see, in whole tiles, are cut into as many even splits as the grid has, each of at least
``FACTS.split_tiles`` tiles (:func:`paged_block_ranges`); so where they are cut depends on the sequence alone. Each program leaves the
state of its rows over its split, and :func:`merge_rows.merge_rows_kernel` merges them. A program without keys leaves lse = -inf and no o.

Numbers of a quantised cache are e4m3, two in each int16 (:mod:`e4m3`), and become numbers of q's dtype, which holds them exactly.
Tiles of q, k, v and acc are then those of the even columns, and behind them those of the odd ones. Scales multiply the fp32 scores,
and the columns of P or, where they are one for all keys, the output: ``FACTS.k_scale`` and ``FACTS.v_scale`` are "one" for those that
do not depend on the key, "each" for the others, None without.

Where v lies in k's memory (``FACTS.latent``; DeepSeek-V2, section 2.1), its tiles are the first pieces of k's: memory is read once.

The mathematics is :mod:`forward`'s, with the same names.
"""

# ruff: noqa: RET505 - a compile-time `if` keeps its `else`: without it both returns would be compiled

from typing import Any, NamedTuple

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.arguments import (
    begin_overlap,
    packed_rows,
    plain_sizes,
    scheduled,
    sequence_of,
    work_tile_of,
)
from tilewise.backends.triton.kernels.e4m3 import unpacked_tiles
from tilewise.backends.triton.kernels.forward import apply_score, bounded_exponentials, online_softmax
from tilewise.backends.triton.kernels.mask import key_interval, partial_block
from tilewise.backends.triton.kernels.maths import plain, plain_all
from tilewise.backends.triton.kernels.paged_epilogue import LIFTED, paged_epilogue, rows_of_tile
from tilewise.backends.triton.kernels.paged_loads import (
    first_pieces,
    load_gathered,
    load_paged,
    load_scales,
    page_numbers,
    pool_of,
    scale_of,
    table_of,
)
from tilewise.backends.triton.kernels.tile import accumulate, dot, dot_transposed, rescaled, zeros


class PagedTile(NamedTuple):
    """The rows of a program and the pages that they read.

    Attributes:
        rows: the query of each row, int32 (tile_m,). head: its head, int32 (tile_m, 1).
        q: a tile of (tile_m, head_dim). lo, hi: the key interval of each row, int32 (tile_m,).
        start, stop: no row sees a key before or after these.
        table: pointer to the sequence's page numbers; of dense keys its only page.
        cache: :class:`arguments.CacheSizes`.
        k, v: :class:`paged_loads.Pool` of the key head.
        k_scale, v_scale: fp32 scalars where the scale is "one", :class:`paged_loads.ScalePool` where it is "each"; of no use without.
    """

    rows: Any
    head: Any
    q: Any
    lo: Any
    hi: Any
    start: Any
    stop: Any
    table: Any
    cache: Any
    k: Any
    v: Any
    k_scale: Any
    v_scale: Any


@triton.jit
def paged_kernel(
    tensors, sizes, scales, block_table, seqlens_k, cache, k_view, k_rest, v_view, v_rest, FACTS: tl.constexpr
):
    """The attention of a tile of rows; with split keys, its state over one split.

    Grid: (slots · heads_k · batch, splits). The last tiles come first: under a causal mask they are the longest.

    Args:
        cache: :class:`arguments.CacheSizes`.
        k_view, k_rest, v_view, v_rest: as in :func:`forward.forward_kernel`, of pages.
    """
    begin_overlap(FACTS)
    sizes = plain_sizes(sizes)
    slot, head_k, b = scheduled(1, sizes)
    work = paged_work_tile(sizes.slots - 1 - slot, b, tensors, sizes, scales, seqlens_k, cache, FACTS)
    views = (k_view, k_rest, v_view, v_rest)
    tile = load_paged_tile(tensors, sizes, work, head_k, block_table, cache, views, FACTS)
    first, full, full_end, last = paged_block_ranges(tile, work, FACTS)
    # The state: m, l fp32 (tile_m,); acc fp32 (tile_m, width) for each piece of head_dim_v.
    m = tl.full([FACTS.tile_m], 0.0 if FACTS.bounded else float("-inf"), tl.float32)
    l = tl.full([FACTS.tile_m], 0.0, tl.float32)
    acc = zeros(FACTS.tile_m, OF_V=True, FACTS=FACTS)
    if FACTS.v_scale is not None:
        acc = acc + zeros(FACTS.tile_m, OF_V=True, FACTS=FACTS)
    if FACTS.keep is None:
        page = page_numbers(full * FACTS.tile_n, tile, FACTS)
        for n in range(full, full_end):
            # Page numbers are read a tile ahead: read in the iteration whose loads wait for them, they would take a stage.
            following = page_numbers((n + 1) * FACTS.tile_n, tile, FACTS)
            m, l, acc = paged_key_block(
                n * FACTS.tile_n, page, m, l, acc, tile, scales, work, partial=False, FACTS=FACTS
            )
            page = following
    for t in range((full - first) + (last - full_end)):
        n0 = partial_block(t, first, full, full_end) * FACTS.tile_n
        page = page_numbers(n0, tile, FACTS)
        m, l, acc = paged_key_block(n0, page, m, l, acc, tile, scales, work, partial=True, FACTS=FACTS)
    paged_epilogue(m, l, acc, tile, tensors, sizes, work, FACTS)


# -- The tile scheduler --------------------------------------------------------------------------------------------


@triton.jit
def paged_work_tile(slot, b, tensors, sizes, scales, seqlens_k, cache, FACTS: tl.constexpr):
    """The :class:`WorkTile` in a slot of batch element ``b``, with the sequence's number of keys as it is now.

    Packed, slots belong to sequences as in :func:`arguments.work_tile`, but a query has ``group`` rows.
    """
    start_q = slot * 0
    seqlen_q = sizes.seqlen_q
    block = slot
    if FACTS.packed:
        b = sequence_of(slot, tensors.cu_seqlens_q, sizes.batch, sizes.seqlen_q, FACTS.group, FACTS.tile_m)
        start_q, seqlen_q = packed_rows(tensors.cu_seqlens_q, b, sizes.batch, sizes.seqlen_q, REST=True)
        block = slot - (start_q * FACTS.group // FACTS.tile_m + b)
    seqlen_k = keys_of(b, seqlens_k, sizes, cache)
    return work_tile_of(tensors, sizes, scales, b, block, queries=(start_q, seqlen_q), keys=(start_q * 0, seqlen_k))


@triton.jit
def keys_of(b, seqlens_k, sizes, cache):
    """The keys of sequences ``b`` as they are now, int32. Rows past the last sequence are sequence ``batch``, which has none."""
    if seqlens_k is None:  # dense keys
        return sizes.seqlen_k
    else:
        found = tl.load(seqlens_k + b * plain(cache.by_length), mask=b < sizes.batch, other=0).to(tl.int32)
        return tl.minimum(tl.maximum(found, 0), plain(cache.capacity))


@triton.jit
def paged_block_ranges(tile, work, FACTS: tl.constexpr):
    """The blocks of keys of this program: ``(first, full, full_end, last)`` as of :func:`mask.block_ranges`, within its split."""
    first = tile.start // FACTS.tile_n
    last = tl.where(tile.stop > tile.start, tl.cdiv(tile.stop, FACTS.tile_n), first)
    full, full_end = first, tile.stop // FACTS.tile_n
    if FACTS.lo is not None or FACTS.hi is not None:  # every row sees all keys of a full block
        valid = tile.rows < work.seqlen_q
        full = tl.cdiv(tl.max(tl.where(valid, tile.lo, 0), 0), FACTS.tile_n)
        full_end = tl.min(tl.where(valid, tile.hi, work.seqlen_k), 0) // FACTS.tile_n
    if FACTS.keep is not None or FACTS.ordered:  # any block may hide a pair; or one loop has all blocks
        full_end = full
    if FACTS.split:  # even parts, each of ``split_tiles`` or more
        each = tl.maximum(tl.cdiv(last - first, tl.num_programs(1)), FACTS.split_tiles)
        first = tl.minimum(first + tl.program_id(1) * each, last)
        last = tl.minimum(first + each, last)
    full = tl.minimum(tl.maximum(full, first), last)
    return first, full, tl.minimum(tl.maximum(full_end, full), last), last


# -- Load ----------------------------------------------------------------------------------------------------------


@triton.jit
def load_paged_tile(tensors, sizes, work, head_k, block_table, cache, views, FACTS: tl.constexpr):
    """The :class:`PagedTile` of a key head; rows of q past the sequence's last are zero."""
    i, head = rows_of_tile(head_k, work, FACTS)
    # Q: (tile_m, width) for each piece, by pointers: it is read once, before the loop. 64-bit offsets of the rows.
    offsets = (tl.cast(work.start_q, tl.int64) + i) * sizes.q[1] + tl.cast(head, tl.int64) * sizes.q[2]
    if not FACTS.packed:
        offsets += tl.cast(work.b, tl.int64) * sizes.q[0]
    STEP: tl.constexpr = 1 if FACTS.k_scale is None else 2
    rows = offsets * FACTS.align
    q = load_gathered(tensors.q, rows, i < work.seqlen_q, OF_V=False, MASKED=True, FACTS=FACTS, STEP=STEP)
    if FACTS.k_scale is not None:  # pairs of e4m3 are unpacked as even and odd columns of k: q's are taken alike
        q = q + load_gathered(tensors.q + 1, rows, i < work.seqlen_q, OF_V=False, MASKED=True, FACTS=FACTS, STEP=STEP)
    lo, hi = key_interval(i, head, work, FACTS)
    start, stop = work.seqlen_k * 0, work.seqlen_k
    if FACTS.lo is not None or FACTS.hi is not None:
        sees = (i < work.seqlen_q) & (lo < hi)
        start = tl.min(tl.where(sees, lo, work.seqlen_k), 0)
        stop = tl.max(tl.where(sees, hi, 0), 0)
    stop = tl.where(work.block * FACTS.tile_m < work.seqlen_q * FACTS.group, stop, start)  # a slot may hold no row
    table = table_of(block_table, work.b, sizes, cache)
    k = pool_of(tensors.k, sizes.k, head_k, views[0], views[1], FACTS)
    v = pool_of(tensors.v, sizes.v, head_k, views[2], views[3], FACTS)
    k_scale, v_scale = table, table
    if FACTS.k_scale is not None:
        k_scale = scale_of(tensors.k_scale, plain_all(cache.scales[0]), work, sizes, head_k, FACTS.k_scale == "each")
        v_scale = scale_of(tensors.v_scale, plain_all(cache.scales[1]), work, sizes, head_k, FACTS.v_scale == "each")
    return PagedTile(i, head[:, None], q, lo, hi, start, stop, table, cache, k, v, k_scale, v_scale)


# -- One key block -------------------------------------------------------------------------------------------------


@triton.jit
def paged_key_block(n0, page, m, l, acc, tile, scales, work, partial: tl.constexpr, FACTS: tl.constexpr):
    """The state (m, l, acc) after the key tile at ``n0``, by (6).

    Args:
        page: :func:`page_numbers` of the tile.
        partial: whether some row may not see some key of the tile.
    """
    j = n0 + tl.arange(0, FACTS.tile_n)
    kept, alive = None, None
    if partial:
        kept = (j[None, :] >= tile.lo[:, None]) & (j[None, :] < tile.hi[:, None])
        kept = kept & (tile.rows < work.seqlen_q)[:, None]
        if FACTS.keep is not None:
            kept = kept & FACTS.keep(work.b, tile.head, tile.rows[:, None], j[None, :], work)
        alive = tl.max(kept.to(tl.int8), 0) > 0  # a key that no row sees takes no part: it may hold NaN
    # K: (tile_n, head_dim), V: (tile_n, head_dim_v), in the inputs' dtype.
    k, v = load_paged(tile.k, page, n0, alive, OF_V=False, partial=partial, FACTS=FACTS), ()
    if (partial or FACTS.together) and not FACTS.latent:
        v = load_paged(tile.v, page, n0, alive, OF_V=True, partial=partial, FACTS=FACTS)
    if FACTS.k_scale is not None:
        k = unpacked_tiles(k, tile.q[0].dtype)
    if FACTS.latent:
        v = first_pieces(k, FACTS)
    if FACTS.latent:
        # Where a product leads to another, Triton lets warps share its rows alone: of 64 rows two warp groups would compute the same.
        # It does not look past a branch. These are always taken, by conditions that differ, or they would become one
        # (docs/decisions.md#triton-pages).
        s = tl.full([FACTS.tile_m, FACTS.tile_n], 0.0, tl.float32)
        for n in tl.static_range(len(k) - 1):
            if n0 - n < tile.stop:
                s = dot(tile.q[n], tl.trans(k[n]), s, FACTS)
        m_new, l_new, rescale = m, l, m
        p = tl.full([FACTS.tile_m, FACTS.tile_n], 0.0, v[0].dtype)
        if n0 - len(k) < tile.stop:
            s = dot(tile.q[len(k) - 1], tl.trans(k[len(k) - 1]), s, FACTS)
            m_new, l_new, found, rescale = probabilities(
                s, page, n0, m, l, kept, alive, tile, scales, work, partial, FACTS
            )
            p = found.to(v[0].dtype)  # here, so that P changes its layout in 16 bits
    else:
        s = dot_transposed(tile.q, k, FACTS)  # S = Q Kᵀ, (tile_m, tile_n) fp32
        m_new, l_new, p, rescale = probabilities(s, page, n0, m, l, kept, alive, tile, scales, work, partial, FACTS)
    if not FACTS.bounded:
        acc = rescaled(acc, rescale)
    if len(v) == 0:
        v = load_paged(tile.v, page, n0, alive, OF_V=True, partial=partial, FACTS=FACTS)
    if FACTS.v_scale is not None and not FACTS.latent:
        # fp16 holds P too, which is at most 1 without a scale of its own, and takes a third of the instructions that bf16 takes.
        HALF: tl.constexpr = FACTS.v_scale == "one" and not FACTS.bounded and tile.q[0].dtype == tl.bfloat16
        v = unpacked_tiles(v, tl.float16 if HALF else tile.q[0].dtype)
    acc = accumulate(p, v, acc, FACTS)  # acc += P V, (tile_m, head_dim_v) fp32; P is rounded to V's dtype
    return m_new, l_new, acc


@triton.jit
def probabilities(s, page, n0, m, l, kept, alive, tile, scales, work, partial: tl.constexpr, FACTS: tl.constexpr):
    """``(m', l', P, α)`` of (6) from the products ``s`` of the key tile at ``n0``; where scores are bounded, α is of no use.

    Args:
        s, kept: fp32 and bool (tile_m, tile_n), alive: bool (tile_n,); None where every row sees every key.
    """
    j = n0 + tl.arange(0, FACTS.tile_n)
    # The scale of K comes after the product, in fp32: e4m3 times a scale would be rounded to 16 bits.
    if FACTS.k_scale == "one":
        s = s * tile.k_scale
    elif FACTS.k_scale == "each":
        s = s * load_scales(tile.k_scale, page, n0, alive, FACTS)[None, :]
    if FACTS.bounded:  # no exponential overflows, and any m is as exact as the maximum
        p = hidden(bounded_exponentials(s, tile, j, scales, work, FACTS), kept, 0.0)
        l, rescale, m_new = l + tl.sum(p, 1), m, m
    else:
        if FACTS.general:
            s = apply_score(s, tile, j, scales, work, FACTS)
        m_new, p, rescale = online_softmax(hidden(s, kept, float("-inf")), m, scales, partial, FACTS)
        l = l * rescale + tl.sum(p, 1)
    # The scales of V: columns of P, which l leaves out.
    if FACTS.v_scale == "each":
        p = p * (load_scales(tile.v_scale, page, n0, alive, FACTS) * LIFTED)[None, :]
    return m_new, l, p, rescale


@triton.jit
def hidden(x, kept, HIDDEN: tl.constexpr):
    """``x`` where the pair is kept, else HIDDEN; ``kept`` is None where all are."""
    if kept is None:
        return x
    else:
        return tl.where(kept, x, HIDDEN)
