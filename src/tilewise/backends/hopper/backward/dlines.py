"""The gradient of a line of biases by distance, summed by the pass over key tiles of the dS that it makes anyway (docs/algorithm.md, (17)).

A bias' gradient is the sum of dS over all pairs of its distance. That of the line's last bias, which all larger distances share, no kernel
sums: a row's dS add up to what the gradient of its lse and of the sink leave, so that it is the rest
(:meth:`tilewise.backends.hopper.host.backward_call.BackwardPlan.line_gradient`). That of its first bias, which all smaller distances
share, is one number of a thread.

Between the two ends a thread adds the pairs of one distance first, as :mod:`tilewise.backends.hopper.backward.dslopes` says: its sums are
of the distances ``at + 8 m`` and one more. Lane ``4 x + y`` of a warp has ``at = a + 2 y - x``, so that for each m the lanes have sums
of 15 distances. A shuffle brings those of distance ``a + x`` modulo 8 to the lanes ``4 x`` to ``4 x + 3``, which then add up theirs: each
lane ends with every fourth m, and of eight sums of as many lanes one is added to memory. The order of these additions is whatever warps
happen to take.
"""

from __future__ import annotations

from itertools import pairwise

import cutlass.cute as cute

from tilewise.backends.hopper.backward.dslopes import APART, sum_of
from tilewise.backends.hopper.kit.dtypes import F32
from tilewise.backends.hopper.kit.instructions import add_where, both, choose
from tilewise.backends.hopper.kit.lines import FarLine, NearLine

QUAD = 4  # lanes that hold a row together


def add_block(total: cute.Tensor, ds: cute.Tensor, bias: NearLine | FarLine) -> None:
    """Adds a block's dS to the sums of their distances, and what belongs to the line's first bias to ``total``, (1,).

    ``ds``: (2 rows, columns of the thread), fp32, where hidden pairs are 0.
    """
    if isinstance(bias, FarLine):
        # Blocks past the last distance are not summed: most blocks of a long call are such, and their bias gets the rest.
        if bias.before:
            columns = [ds[0, c] + ds[1, c] for c in range(cute.size(ds, mode=[1]))]
            total[0] = total[0] + tree(columns)
        return
    lane = cute.arch.thread_idx()[0] % 32
    row, place = lane // QUAD, lane % QUAD
    # The lane's sums are of the distances at + 2 (row - place) + 8 (m - 2), m = 4 n + place.
    at, last = bias.at + 2 * (row - place) + APART * (place - 2), cute.size(bias.line) - 1
    for n, found in enumerate(sums_of_warp(sums_of_thread(ds), row, place)):
        distance = at + APART * QUAD * n
        add_where(both(distance > 0, distance < last), bias.sums, distance, found)
        total[0] = total[0] + choose(distance <= 0, found, 0.0)


def sums_of_thread(ds: cute.Tensor) -> list:
    """A thread's sums of the distances ``at + 8 m`` and one more, ``m = -1 ..``: (even, odd) pairs."""
    pairs, found = cute.size(ds, mode=[1]) // 2, []
    for m in range(-1, pairs):
        rows = [r for r in range(2) if 0 <= m + r < pairs]
        found.append([sum_of([ds[r, 2 * (m + r) + n] for r in rows]) for n in range(2)])
    return found


def sums_of_warp(mine: list, row, place) -> list:
    """The sums of a warp, of every fourth m in each lane of a quad: of those of all its threads, as :func:`sums_of_thread` has them."""
    zero, parts = F32(0.0), []
    for n in range(2):
        # The sums of a lane in row x go to the row of their distance modulo 8.
        ahead = 2 * place + n - row
        source = QUAD * ((ahead + APART) % APART) + place
        brought = [zero, *(cute.arch.shuffle_sync(pair[n], source) for pair in mine), zero]
        # Where the row is past that distance, it is one of the next m.
        parts.append([choose(ahead < 0, b, a) for a, b in pairwise(brought)])
    found = [even + odd for even, odd in zip(*parts, strict=True)]
    found += [zero] * (-len(found) % QUAD)
    return [of_quad(found[m : m + QUAD], place) for m in range(0, len(found), QUAD)]


def of_quad(numbers: list, place):
    """The sum over a quad's lanes of number n of four, in its lane n."""
    for offset in (2, 1):
        # A lane gives its partner the half that the partner keeps, so that each number is added up in one lane only.
        upper, half = place // offset % 2 == 1, len(numbers) // 2
        kept = [choose(upper, b, a) for a, b in zip(numbers[:half], numbers[half:], strict=True)]
        given = [choose(upper, a, b) for a, b in zip(numbers[:half], numbers[half:], strict=True)]
        numbers = [a + cute.arch.shuffle_sync_bfly(b, offset=offset) for a, b in zip(kept, given, strict=True)]
    return numbers[0]


def tree(numbers: list):
    """The sum of numbers, by pairs."""
    while len(numbers) > 1:
        numbers = [sum_of(numbers[n : n + 2]) for n in range(0, len(numbers), 2)]
    return numbers[0]


def store(total: cute.Tensor, sums: cute.Tensor) -> None:
    """Adds a warp's numbers to the sum of the line's first bias, and sets ``total`` to zero."""
    found = total[0]
    for offset in (16, 8, 4, 2, 1):
        found = found + cute.arch.shuffle_sync_bfly(found, offset=offset)
    add_where(cute.arch.thread_idx()[0] % 32 == 0, sums, 0, found)
    total.fill(0.0)
