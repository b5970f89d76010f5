"""The parts into which a backward divides the query heads of a key head, where key tiles are too few for the machine.

A program of the pass over key tiles walks all queries of all heads of its group. With one key head of 4096 keys there are 64 of them, for
132 multiprocessors. A program for each part of the heads leaves dK and dV of its own, in fp32, and :mod:`kernels.group_parts` adds
these up, in the parts' order (docs/decisions.md#triton-split).
"""

from __future__ import annotations

from tilewise.backends.triton.tiles import Tiles
from tilewise.masks.facts import queries_of_keys
from tilewise.problem import Problem

# What a part writes, and its sum reads, is taken to cost as much time as so many more queries would (docs/decisions.md#triton-split).
PART_ROWS = 256


def group_parts(problem: Problem, tiles: Tiles, cores: int) -> int:
    """The parts of a group: 1 where whole groups keep the machine as busy.

    The time of either is counted in queries that a program walks; parts must save a third of it.

    Args:
        tiles: of the pass over key tiles. cores: multiprocessors of the device.
    """
    # Deterministic results do not depend on batch-mates: the choice then looks at one sequence, of which packed ones do not tell.
    if problem.group == 1 or (problem.spec.deterministic and problem.packed):
        return 1
    batch = 1 if problem.spec.deterministic else problem.batch_dim
    workers = cores * (2 if tiles.num_warps <= 4 and problem.dtype.itemsize == 2 else 1)  # program_limit lets two run
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
    """The queries that a head's key tiles walk; all queries where that does not follow from shapes, packed those of an average sequence."""
    count = -(-problem.seqlen_k // tile_n)
    if problem.packed:
        return [problem.seqlen_q // max(problem.batch, 1)] * count
    interval = queries_of_keys(problem.spec.region, problem.seqlen_q, problem.seqlen_k)
    if interval is None:
        return [problem.seqlen_q] * count
    first, last = (x.clamp(0, problem.seqlen_q).tolist() for x in interval)
    keys = [range(n, min(n + tile_n, problem.seqlen_k)) for n in range(0, problem.seqlen_k, tile_n)]
    return [max(max(last[tile[0]], last[tile[-1]]) - min(first[tile[0]], first[tile[-1]]), 0) for tile in keys]
