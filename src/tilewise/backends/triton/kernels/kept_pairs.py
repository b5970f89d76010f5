"""dK and dV from kept dS and P, one product of a tile each, where passes that compute these again would need one for each.

    dV = (P ∘ Z)ᵀ dO    dK = scale · dSᵀ Q    key tiles outside, queries inside       (16)

The pass over key tiles has left both in sheets (:func:`backward.dkdv_block`), from which :func:`pair_bias.sheet_kernel` makes dQ
(docs/decisions.md#triton-kept-pairs).
"""

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.arguments import plain_sizes, scheduled, work_tile
from tilewise.backends.triton.kernels.backward import store_dkdv
from tilewise.backends.triton.kernels.mask import m_block_ranges
from tilewise.backends.triton.kernels.tile import (
    accumulate,
    load_streamed,
    sheet_pointers,
    source_of,
    token_of,
    zeros,
)


@triton.jit
def kept_pairs_kernel(tensors, sizes, scales, view, rest, OF_V: tl.constexpr, FACTS: tl.constexpr):
    """dV of one key tile if OF_V, else its dK; sums over the group's query heads in order. Grid: (slots · heads_k · batch).

    Args:
        view, rest: descriptors of dO if OF_V, else of q, as those of :func:`backward.dkdv_kernel`.
    """
    sizes = plain_sizes(sizes)
    slot, head_k, b = scheduled(1, sizes)
    work = work_tile(slot, b, tensors, sizes, scales, OVER_KEYS=True, FACTS=FACTS)
    n0 = work.block * FACTS.tile_n
    group = sizes.heads_q // sizes.heads_k
    sheet = tensors.p_sheet if OF_V else tensors.sheet
    sums = zeros(FACTS.tile_n, OF_V=OF_V, FACTS=FACTS)
    for g in range(group):
        head = head_k * group + g
        rows = source_of(
            tensors.do if OF_V else tensors.q,
            (view, rest),
            sizes.do if OF_V else sizes.q,
            work,
            work.start_q,
            head,
            FACTS,
        )
        first, _full, _full_end, last = m_block_ranges(n0, head, work, FACTS)
        for m in range(first, last):
            m0 = m * FACTS.tile_m
            # Pᵀ or dSᵀ, fp32 (tile_n, tile_m); dO or Q, (tile_m, head_dim_v or head_dim).
            pairs = tl.load(sheet_pointers(sheet, sizes, b - sizes.batches[0], head, m0, n0, FACTS))
            tile = load_streamed(rows, m0, work.seqlen_q - m0, None, FACTS.tile_m, OF_V=OF_V, partial=True, FACTS=FACTS)
            sums = accumulate(pairs, tile, sums, FACTS)
    token = token_of(sizes.seqlen_k, work, work.start_k, FACTS)
    dk, dv = ((), sums) if OF_V else (sums, ())
    store_dkdv(dk, dv, n0, work.seqlen_k - n0, token, head_k, tensors, sizes, scales, FACTS)
