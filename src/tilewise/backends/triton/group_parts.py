"""Divide the query heads of a key head among programs of the backward, if there are too few key tiles for the machine.

A program of the pass over key tiles visits all queries of all heads of its group. One key head of 4096 keys has 64 programs, for 132
multiprocessors. With a program for each part of the heads, each writes a dK and dV in fp32, and :mod:`kernels.group_parts` adds them
in order (docs/decisions.md#triton-split).
"""

from __future__ import annotations

from tilewise.backends.triton.tiles import Tiles
from tilewise.masks.facts import queries_of_keys
from tilewise.problem import Problem

# The cost of writing a part and of reading it for the sum, counted in queries (docs/decisions.md#triton-split).
PART_ROWS = 256


def group_parts(problem: Problem, tiles: Tiles, cores: int) -> int:
    """Return the parts of a group: 1 if whole groups keep the machine as busy.

    Time is counted in queries that a program visits. Parts must save a third of it.

    Args:
        tiles: of the pass over key tiles.
        cores: multiprocessors of the device.
    """
    # A deterministic result does not depend on the rest of the batch, so its choice looks at one sequence; packed calls hide its length.
    if problem.group == 1 or problem.spec.everywhere or (problem.spec.deterministic and problem.packed):
        return 1
    batch = 1 if problem.spec.deterministic else problem.batch_dim
    workers = cores * (
        2 if tiles.num_warps <= 4 and problem.dtype.itemsize == 2 else 1
    )  # program_limit allows two at a time
    copies, count = batch * problem.heads_k, -(-problem.seqlen_k // tiles.tile_n)
    if not 0 < copies * count < 2 * workers:
        return 1
    lengths = queries_of_tiles(problem, tiles.tile_n)
    longest, total = problem.group * max(lengths), problem.group * copies * sum(lengths)

    def span(parts: int) -> float:
        more, programs = PART_ROWS if parts > 1 else 0, parts * copies * count
        if min(lengths) == max(lengths):  # programs of one length take whole rounds
            return (longest / parts + more) * -(-programs // workers)
        return max(longest / parts + more, (total + more * programs) / workers)  # the long ones begin

    best = min((n for n in range(1, problem.group + 1) if problem.group % n == 0), key=span)
    return best if 3 * span(best) <= 2 * span(1) else 1


def queries_of_tiles(problem: Problem, tile_n: int) -> list[int]:
    """Return the queries that a head's key tiles visit: all if shapes do not tell, those of an average sequence if packed."""
    count = -(-problem.seqlen_k // tile_n)
    if problem.packed:
        return [problem.seqlen_q // max(problem.batch, 1)] * count
    interval = queries_of_keys(problem.spec.region, problem.seqlen_q, problem.seqlen_k)
    if interval is None:
        return [problem.seqlen_q] * count
    first, last = (x.clamp(0, problem.seqlen_q).tolist() for x in interval)
    keys = [range(n, min(n + tile_n, problem.seqlen_k)) for n in range(0, problem.seqlen_k, tile_n)]
    return [max(max(last[tile[0]], last[tile[-1]]) - min(first[tile[0]], first[tile[-1]]), 0) for tile in keys]
