"""The gradient of ALiBi's slopes, summed by the pass over key tiles from the dS that it makes anyway (docs/algorithm.md, (17)).

A pair's bias is ``-slope · distance`` (:mod:`tilewise.backends.hopper.kit.slopes`), so that ``dslope = -Σ dS · distance``. A thread of
dSᵀ has two keys, 8 apart, and every fourth pair of neighbouring queries. Its key of row r is at distance ``d - 8 r`` from its first query,
and at ``d - 8 r + 8 k`` and one more from the k-th pair of queries: pairs with the same ``k - r`` are at the same two distances, and are
added first::

    Σ dS · distance = Σ (d + 8 m) t + Σ o        t of all numbers, o of the odd queries, with k - r = m

That is 1.5 additions a number, and exact whatever the sums of dS over a row are: with a sink, or a gradient of lse, these are not zero.
Every warp stores its sum for each query head of a key tile, and the host adds them up in one order: bits repeat.
"""

from __future__ import annotations

import cutlass.cute as cute

from tilewise.backends.hopper.kit.dtypes import F32
from tilewise.backends.hopper.kit.slopes import BlockSlopes

APART = 8  # keys between a thread's two rows, and queries between its pairs of neighbours
WARPS = 4  # of a warpgroup, each with a sum of its own


def add_block(total: cute.Tensor, ds: cute.Tensor, slopes: BlockSlopes) -> None:
    """Adds a block's ``Σ dS · distance`` to ``total``, (1,); ``ds``: (2 rows, columns of the thread), fp32, where hidden pairs are 0."""
    pairs = cute.size(ds, mode=[1]) // 2
    found = F32(0.0)
    for m in range(-1, pairs):
        rows = [r for r in range(2) if 0 <= m + r < pairs]
        even, odd = (sum_of([ds[r, 2 * (m + r) + n] for r in rows]) for n in range(2))
        # The odd queries are one further.
        found = cute.math.fma(even + odd, slopes.distance[0] + float(APART * m), found) + odd
    total[0] = total[0] + found


def sum_of(numbers: list) -> F32:
    """The sum of one number or two."""
    return numbers[0] if len(numbers) == 1 else numbers[0] + numbers[1]


def store(total: cute.Tensor, sums: cute.Tensor, batch, head, warpgroup) -> None:
    """Stores each warp's sum of a query head's pairs as a part of dslope, and sets ``total`` to zero.

    Args:
        sums: (batch, heads_q, warp), fp32: four for every 64 keys.
        warpgroup: which 64 keys these are.
    """
    found = total[0]
    for offset in (16, 8, 4, 2, 1):
        found = found + cute.arch.shuffle_sync_bfly(found, offset=offset)
    # The same for all threads of a warp: the place then takes none of their registers.
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
    put(sums, (batch, head, WARPS * warpgroup + warp), cute.arch.lane_idx(), -found)
    total.fill(0.0)


@cute.jit
def put(sums: cute.Tensor, place: tuple, lane, found):
    """One lane of the warp stores its sum."""
    if lane == 0:
        sums[place] = found
