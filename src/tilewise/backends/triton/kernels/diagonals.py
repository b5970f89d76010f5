"""The gradient of a tensor that a score reads at the distance of a pair, near the diagonal.

    sums[d] = Σ dZ[b, h, i, j] · slope    over the pairs with i - j = d, of one batch element and head

A *strip* is a diagonal of square tiles, tile_m = tile_n = T: those whose first rows and keys differ by the same multiple of T. All
of them hold the same distances, at the same places, so a program adds up the tiles of a strip as they are, and sums along
the diagonals of the result once. The order is fixed and nothing is atomic (docs/decisions.md#triton-diagonals).
"""

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.arguments import plain_sizes, work_tile
from tilewise.backends.triton.kernels.pair_bias import is_visited, pair_gradient


@triton.jit
def strip_kernel(tensors, sizes, scales, GRAD: tl.constexpr, BAND: tl.constexpr, FACTS: tl.constexpr):
    """The sums by distance of some tiles of a strip. Grid: (strips, parts of a strip, heads_q · batch), packed without batch.

    Stores fp32 ``(2 T,)`` of distances from -T on, relative to the strip's, in ``work.grads[GRAD]``, ``(batch, heads_q, parts, strips,
    2 T)``.

    Args:
        GRAD: which of ``work.grads``; ``FACTS.tile`` is the slope of its read, ``FACTS.start`` its least distance.
        BAND: whether the tiles of a strip that lie within both sequences are those that the mask visits, or nearly.
    """
    sizes = plain_sizes(sizes)
    T: tl.constexpr = FACTS.tile_m
    pid, part, outer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head, b = outer % sizes.heads_q, outer // sizes.heads_q
    work = work_tile(pid * 0, b, tensors, sizes, scales, False, FACTS)
    strip = (FACTS.start(work) & -T) // T + pid  # rounded down
    slot, end = part * sizes.splits, tl.minimum((part + 1) * sizes.splits, sizes.slots)
    if BAND and not FACTS.packed:  # no branch in the loop: its loads overlap
        slot = tl.maximum(slot, strip)
        end = tl.minimum(end, strip + tl.cdiv(sizes.seqlen_k, T))
    total = tl.full([T, T], 0.0, tl.float32)
    for n in range(slot, end):
        each = work_tile(n, b, tensors, sizes, scales, False, FACTS)
        m0 = each.block * T
        n0 = m0 - strip * T
        i, j = m0 + tl.arange(0, T), n0 + tl.arange(0, T)
        if BAND and not FACTS.packed:
            total += pair_gradient(m0, i, j, n0, head, each, tensors, sizes, scales, FACTS)
        else:
            if is_visited(m0, n0, head, each, FACTS):
                total += pair_gradient(m0, i, j, n0, head, each, tensors, sizes, scales, FACTS)

    # Each row turned until the pairs of one distance are one column: column u holds distance u, or u - T where u is above the row.
    r, u = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    turned = tl.gather(total, (r - u) & (T - 1), axis=1)
    to = (tl.cast(outer, tl.int64) * tl.num_programs(1) + part) * tl.num_programs(0) + pid
    to = work.grads[GRAD] + to * (2 * T) + tl.arange(0, T)
    tl.store(to, tl.sum(tl.where(u > r, turned, 0.0), 0))
    tl.store(to + T, tl.sum(tl.where(u > r, 0.0, turned), 0))
