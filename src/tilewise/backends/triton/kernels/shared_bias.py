"""dQ and the gradient of a bias that all batch elements share, in one pass over query tiles (docs/decisions.md#triton-shared-bias).

    dQ[b] = scale · dS[b] K[b]        dbias[h, i, j] = Σ_b dS[b, h, i, j]

A program owns a query tile of one head and walks over the batch elements of one *copy* of the sums, ``FACTS.batches`` at a time.
Of these it takes the key tiles at n0 one after the other beside one tile of the bias, and adds their dS in registers; then once to
its tile of the copy, fp32, which no other program writes::

    batch elements   0 .. 3 | 4 .. 7 | ...        one program: for each group, for each key tile n0
    key tile n0      bias tile → dS[0] + dS[1] + dS[2] + dS[3] → copy[h, i, n0] += sum

The host adds up the copies. Every sum has a fixed order.
"""

# ruff: noqa: RUF005 - Triton's tuples are added, not unpacked

from typing import Any, NamedTuple

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.arguments import (
    begin_overlap,
    end_overlap,
    plain_sizes,
    with_heads,
    with_pair,
    with_pair_tile,
    with_tile,
    work_tile_of,
)
from tilewise.backends.triton.kernels.backward import (
    key_sources,
    load_grad_query_tile,
    query_head,
    score_gradients,
)
from tilewise.backends.triton.kernels.mask import n_block_ranges, partial_block
from tilewise.backends.triton.kernels.tile import accumulate, store_rows, zeros


class Element(NamedTuple):
    """One batch element beside a tile of the bias.

    Attributes:
        work: its WorkTile. left: its queries from the tile's first on; 0 of an element past the last, whose P are 0.
        rows, query: as in :mod:`backward`. keys: the sources of k and v.
    """

    work: Any
    left: Any
    rows: Any
    query: Any
    keys: Any


@triton.jit
def dq_dbias_kernel(
    tensors, sizes, scales, k_view, k_rest, v_view, v_rest, pairs, GRAD: tl.constexpr, FACTS: tl.constexpr
):
    """dQ of a query tile of the batch elements of a copy, and the tile's sums of dS. Grid: (slots · heads_q · copies).

    Args:
        k_view, k_rest, v_view, v_rest: descriptors for the first and the second piece of the head dim, None where there is none.
        pairs: the bias' descriptor, or None. GRAD: which of ``tensors.grads`` has the copies, each laid out as the bias.
    """
    sizes = plain_sizes(sizes)
    begin_overlap(FACTS)
    pid = tl.program_id(0)
    block, pid = sizes.slots - 1 - pid % sizes.slots, pid // sizes.slots
    head, copy = pid % sizes.heads_q, pid // sizes.heads_q
    start = copy * sizes.portion
    pairs = tensors.q if pairs is None else pairs
    k_views, v_views = (k_view, k_rest), (v_view, v_rest)
    # Pointers to the program's first tile of sums, fp32, as by_threads has it; those of the other keys follow.
    tile = tl.cast((copy * sizes.heads_q + head) * sizes.slots + block, tl.int64) * tl.cdiv(
        sizes.seqlen_k, FACTS.tile_n
    )
    within = tl.arange(0, FACTS.tile_m * FACTS.tile_n // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    sums = tensors.grads[GRAD] + tile * (FACTS.tile_m * FACTS.tile_n) + within
    for b in range(start, tl.minimum(start + sizes.portion, sizes.batch), FACTS.batches):
        some_elements(b, block, head, k_views, v_views, pairs, sums, tensors, sizes, scales, FACTS)
        # Where wgmma does not make S, other threads may load what this one has stored.
        tl.debug_barrier()
    end_overlap(FACTS)


@triton.jit
def some_elements(first_b, block, head, k_views, v_views, pairs, sums, tensors, sizes, scales, FACTS: tl.constexpr):
    """dQ of the elements from ``first_b`` on, and their sums of dS in ``sums``."""
    BATCHES: tl.constexpr = FACTS.batches
    elements, dqs = (), ()
    for n in tl.static_range(BATCHES):
        elements = elements + (load_element(first_b + n, block, head, k_views, v_views, tensors, sizes, scales, FACTS),)
        dqs = dqs + (zeros(FACTS.tile_m, OF_V=False, FACTS=FACTS),)
    first, full, full_end, last = common_ranges(elements, head, FACTS)
    if FACTS.whole:
        for n in range(first, last):
            partial = (n < full) | (n >= full_end)
            dqs = dq_dbias_block(n * FACTS.tile_n, dqs, elements, pairs, sums, tensors, sizes, scales, partial, FACTS)
    else:
        if FACTS.keep is None:
            for n in range(full, full_end):
                dqs = dq_dbias_block(
                    n * FACTS.tile_n, dqs, elements, pairs, sums, tensors, sizes, scales, partial=False, FACTS=FACTS
                )
        for t in range((full - first) + (last - full_end)):
            n0 = partial_block(t, first, full, full_end) * FACTS.tile_n
            dqs = dq_dbias_block(n0, dqs, elements, pairs, sums, tensors, sizes, scales, partial=True, FACTS=FACTS)
    row = sizes.heads_q * FACTS.head_dim
    for n in tl.static_range(BATCHES):
        each = elements[n]
        base = tensors.dq + tl.cast(each.work.b, tl.int64) * sizes.seqlen_q * row + head * FACTS.head_dim
        # dQ: (tile_m, head_dim), rounded to the inputs' dtype.
        store_rows(base, row, each.query.m0, each.left, dqs[n], scales.softmax, FACTS.tile_m, OF_V=False, FACTS=FACTS)


@triton.jit
def load_element(b, block, head, k_views, v_views, tensors, sizes, scales, FACTS: tl.constexpr):
    """The :class:`Element` b; past the last its rows of Q and dO are zero and its lse is +inf."""
    seqlen_q = tl.where(b < sizes.batch, sizes.seqlen_q, 0)
    b = tl.minimum(b, sizes.batch - 1)
    start = b * 0
    work = work_tile_of(b, block, start, start, seqlen_q, sizes.seqlen_k, tensors, sizes, scales)
    work = with_heads(work, head, FACTS)
    rows = query_head(tensors, sizes, work, head, (None, None), (None, None), None, FACTS)
    m0 = block * FACTS.tile_m
    query = load_grad_query_tile(m0, rows, tensors, work, FACTS)
    keys = key_sources(tensors, sizes, work, head // (sizes.heads_q // sizes.heads_k), k_views, v_views, FACTS)
    return Element(work, seqlen_q - m0, rows, query, keys)


@triton.jit
def common_ranges(elements, head, FACTS: tl.constexpr):
    """The :func:`mask.block_ranges` of all elements: the blocks that one of them visits, and those that are full for each."""
    first, full, full_end, last = n_block_ranges(elements[0].query.m0, head, elements[0].work, FACTS)
    BATCHES: tl.constexpr = FACTS.batches
    if FACTS.varies:
        for n in tl.static_range(1, BATCHES):
            each = n_block_ranges(elements[n].query.m0, head, elements[n].work, FACTS)
            first, full = tl.minimum(first, each[0]), tl.maximum(full, each[1])
            full_end, last = tl.minimum(full_end, each[2]), tl.maximum(last, each[3])
        full = tl.minimum(full, last)
        full_end = tl.maximum(full_end, full)
    return first, full, full_end, last


@triton.jit
def dq_dbias_block(n0, dqs, elements, pairs, sums, tensors, sizes, scales, partial, FACTS: tl.constexpr):
    """The elements' dQ after the key tile at ``n0``, whose dS it adds to the tile of ``sums``.

    Args:
        partial: as in :func:`backward.dkdv_block`, for any of the elements.
    """
    first = elements[0]
    m0, head = first.query.m0, first.rows.head
    place = sums + n0 // FACTS.tile_n * (FACTS.tile_m * FACTS.tile_n)
    bias = with_pair_tile(first.work, pairs, head, m0, n0, OVER_KEYS=False, FACTS=FACTS)
    total = by_pairs(tl.load(place), FACTS)
    BATCHES: tl.constexpr = FACTS.batches
    more = ()
    for n in tl.static_range(BATCHES):
        each = elements[n]
        work = with_tile(with_pair(each.work, bias.pair), m0, n0, FACTS)
        ds, _, _, k = score_gradients(
            n0, each.query, each.rows, each.keys, tensors, sizes, scales, work, partial, FACTS
        )
        total += ds
        more = more + (accumulate(ds, k, dqs[n], FACTS),)  # dQ += dS K, (tile_m, head_dim) fp32
    tl.store(place, by_threads(total, FACTS))
    return more


@triton.jit
def by_threads(x, FACTS: tl.constexpr):
    """The numbers of a tile (tile_m, tile_n) as the threads of wgmma's accumulator hold them, four and four: (tile_m tile_n / 4, 4).

    Row 16 w + 8 k + l and column 8 c + 2 q + e are number 2 k + e of thread 4 l + q of warp w, in its c-th group of four. So a thread
    loads and stores its own numbers, 16 bytes at once, without a way through shared memory.
    """
    M: tl.constexpr = FACTS.tile_m // 16
    N: tl.constexpr = FACTS.tile_n // 8
    return x.reshape(M, 2, 8, N, 4, 2).permute(3, 0, 2, 4, 1, 5).reshape(M * N * 32, 4)


@triton.jit
def by_pairs(x, FACTS: tl.constexpr):
    """The tile (tile_m, tile_n) of which :func:`by_threads` gives ``x``."""
    M: tl.constexpr = FACTS.tile_m // 16
    N: tl.constexpr = FACTS.tile_n // 8
    return x.reshape(N, M, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(FACTS.tile_m, FACTS.tile_n)
