"""The gradient of a tensor that a score reads at the distance of a pair, near the diagonal or everywhere.

    sums[d] = Σ dZ[b, h, i, j] · slope    over the pairs with i - j = d, of one batch element and head

A *strip* is a diagonal of square tiles, tile_m = tile_n = T: those whose first rows and keys differ by the same multiple of T. All
of them hold the same distances, at the same places, so a program adds up the tiles of a strip as they are, and sums along
the diagonals of the result once. The order is fixed and nothing is atomic (docs/decisions.md#triton-diagonals).

There are two ways. `strip_kernel` computes dZ of the tiles again. Where most distances have an element of their own, and dS is the
gradient, `sheet_strip_kernel` reads the tiles from the sheet of dS that the pass over key tiles has left behind (:mod:`pair_bias`).
"""

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.arguments import plain_sizes, work_tile
from tilewise.backends.triton.kernels.pair_bias import is_visited, pair_gradient
from tilewise.backends.triton.kernels.tile import sheet_pointers


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
    work = work_tile(pid * 0, b, tensors, sizes, scales, OVER_KEYS=False, FACTS=FACTS)
    strip = (FACTS.start(work) & -T) // T + pid  # rounded down
    of_part = sizes.portion  # query tiles
    slot, end = part * of_part, tl.minimum((part + 1) * of_part, sizes.slots)
    if BAND and not FACTS.packed:  # no branch in the loop: its loads overlap
        slot = tl.maximum(slot, strip)
        end = tl.minimum(end, strip + tl.cdiv(sizes.seqlen_k, T))
    total = tl.full([T, T], 0.0, tl.float32)
    for n in range(slot, end):
        each = work_tile(n, b, tensors, sizes, scales, OVER_KEYS=False, FACTS=FACTS)
        m0 = each.block * T
        n0 = m0 - strip * T
        i, j = m0 + tl.arange(0, T), n0 + tl.arange(0, T)
        if BAND and not FACTS.packed:
            total += pair_gradient(m0, i, j, n0, head, each, tensors, sizes, scales, FACTS)
        else:
            if is_visited(m0, n0, head, each, FACTS):
                total += pair_gradient(m0, i, j, n0, head, each, tensors, sizes, scales, FACTS)

    store_by_distance(total, work.grads[GRAD], outer, T)


@triton.jit
def sheet_strip_kernel(tensors, sizes, scales, GRAD: tl.constexpr, FACTS: tl.constexpr):
    """The sums by distance of some tiles of a strip, from a sheet that holds dS of some heads and all keys.

    Grid: (strips, parts of a strip, query heads of the sheet · batch). It stores what :func:`strip_kernel` does.
    """
    sizes = plain_sizes(sizes)
    T: tl.constexpr = FACTS.tile_m
    pid, part, outer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = sizes.heads_q // sizes.heads_k
    heads = sizes.heads[1] * group
    head, b = sizes.heads[0] * group + outer % heads, sizes.batches[0] + outer // heads
    work = work_tile(pid * 0, b, tensors, sizes, scales, OVER_KEYS=False, FACTS=FACTS)
    strip = (FACTS.start(work) & -T) // T + pid  # rounded down
    # Of the strip's tiles those that lie within both sequences.
    slot = tl.maximum(part * sizes.slots, strip)
    end = tl.minimum(
        tl.minimum((part + 1) * sizes.slots, tl.cdiv(sizes.seqlen_q, T)), strip + tl.cdiv(sizes.seqlen_k, T)
    )
    total = tl.full([T, T], 0.0, tl.float32)
    for n in tl.range(slot, end, loop_unroll_factor=4):  # so that the loads of four tiles are under way at once
        m0, n0 = n * T, (n - strip) * T
        # A tile that the mask does not visit was not written; past the last query and the last key dS is 0.
        written = is_visited(m0, n0, head, work, FACTS) & (m0 >= 0)
        pointers = sheet_pointers(tensors.sheet, sizes, outer // heads, head, m0, n0, FACTS)
        # dSᵀ, (keys, queries), in the sheet's dtype.
        tile = tl.load(pointers, mask=tl.broadcast_to(written, (T, T)), other=0.0)
        total += tile.to(tl.float32)
    store_by_distance(tl.trans(total), work.grads[GRAD], b * sizes.heads_q + head, T)


@triton.jit
def store_by_distance(total, grad, outer, T: tl.constexpr):
    """Stores the sums by distance of a strip's sum of tiles, fp32 (T, T), queries by keys, at its place in ``grad``.

    Args:
        outer: the place of the head, ``batch element · heads_q + head``.
    """
    pid, part = tl.program_id(0), tl.program_id(1)
    # Each row turned until the pairs of one distance are one column: column u holds distance u, or u - T where u is above the row.
    r, u = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    turned = tl.gather(total, (r - u) & (T - 1), axis=1)
    to = (tl.cast(outer, tl.int64) * tl.num_programs(1) + part) * tl.num_programs(0) + pid
    to = grad + to * (2 * T) + tl.arange(0, T)
    tl.store(to, tl.sum(tl.where(u > r, turned, 0.0), 0))
    tl.store(to + T, tl.sum(tl.where(u > r, 0.0, turned), 0))
