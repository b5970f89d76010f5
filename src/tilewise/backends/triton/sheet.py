"""The parts of dS that a backward keeps in turn, for dQ and the gradient of a broadcast bias, and the tiles that read them.

A *sheet* is the dS buffer of one part, in strips of SHEET_STRIP queries (docs/decisions.md#triton-kept-ds). Wide heads of fp32 keep P in
a second one, for all gradients (docs/decisions.md#triton-kept-pairs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from tilewise import device as devices
from tilewise.backends.triton.config import Config, divisor, with_stages
from tilewise.backends.triton.tiles import Tiles
from tilewise.problem import Problem

SHEET_STRIP = 64  # adjacent queries in a sheet of dS: docs/decisions.md#triton-kept-ds
SHEET_UNIT = 128  # its rows and columns are multiples of this
SHEET_KEYS = 512  # the fewest keys of a part: dQ is read and written once a part, in fp32
BATCH_MEMORY = 512 << 20  # bytes of a part of the batch: the gradient is read and written once a part, in fp32
LEAST_SUMMED = 4  # tiles of dS that one program adds up
SUMS = 2  # programs that add up, for each multiprocessor: docs/decisions.md#triton-kept-ds
SUMMED_BESIDE = 32  # an eighth of the programs that an H200 runs at a time
SHEET_HEAD_DIM = 256  # the largest with which a GPU has run the kernels that sum a bias's gradient


def sheet_memory(problem: Problem) -> int:
    """Return the bytes of dS that a backward keeps at a time, a fraction of its device's memory."""
    return devices.of(problem.device).memory // 64 or 2 << 30


def is_too_wide(problem: Problem) -> bool:
    """Return whether head dims are above SHEET_HEAD_DIM."""
    return max(problem.head_dim, problem.head_dim_v) > SHEET_HEAD_DIM


@dataclass(frozen=True)
class SheetPart:
    """The batch elements, the key heads and the keys whose dS a backward keeps at a time: the first and the number of each."""

    first_batch: int
    batches: int
    first_head: int
    heads: int
    first_key: int
    keys: int


def sheet_parts(
    problem: Problem, loops: Sequence[str], beside: tuple[int, int], gradient: int
) -> tuple[SheetPart, ...]:
    """Return the parts of dS that are kept in turn, or none if dS is not kept.

    A part has some keys of all heads if the sum runs over heads, so that it has all numbers of a sum; some batch elements if it runs over
    these alone, added to those of earlier parts; else, or where few batch elements take too much, all keys of some heads. It takes no more
    memory than the gradient of the bias or :func:`sheet_memory`, of some batch elements BATCH_MEMORY; the smallest may take twice as much.

    Args:
        loops: "b" and "h", if the sum runs over them.
        beside: the batch elements and the heads that run side by side; a part has a multiple of them.
        gradient: bytes of the bias.
    """
    if not (problem.batch and problem.seqlen_q and problem.seqlen_k):
        return ()
    queries, keys = _rounded(problem)
    most, heads = max(gradient, sheet_memory(problem)), problem.heads_k
    key_of_head = problem.batch * problem.group * queries * problem.dtype.itemsize
    if "h" in loops:
        least = min(SHEET_KEYS, keys)
        if heads * key_of_head * least > 2 * most:
            return ()
        count = -(-keys // max(most // (heads * key_of_head), least))
        length = -(-keys // count // SHEET_UNIT) * SHEET_UNIT
        return tuple(SheetPart(0, problem.batch, 0, heads, n, min(length, keys - n)) for n in range(0, keys, length))
    some_b, together = beside
    batch, of_batch = problem.batch, heads * key_of_head * keys // problem.batch
    if "b" in loops and some_b * of_batch <= most:
        count = -(-batch // max(max(gradient, min(sheet_memory(problem), BATCH_MEMORY)) // of_batch, some_b))
        batches = -(-batch // count // some_b) * some_b
        return tuple(SheetPart(n, min(batches, batch - n), 0, heads, 0, keys) for n in range(0, batch, batches))
    if together * key_of_head * keys > 2 * most:
        return ()
    counts = (n for n in range(together, heads + 1, together) if heads % n == 0 and n * key_of_head * keys <= most)
    number = max(counts, default=together)
    return tuple(SheetPart(0, batch, n, number, 0, keys) for n in range(0, heads, number))


def pair_parts(problem: Problem) -> tuple[SheetPart, ...]:
    """Return the parts of dS and P that are kept in turn: of as many heads, or of as many batch elements of one, as fit into
    :func:`sheet_memory`; none where one of one does not."""
    room, batch = pair_room(problem), problem.batch
    if not room:
        return ()
    heads, batches = divisor(problem.heads_k, max(room // batch, 1)), min(room, batch)
    starts, keys = product(range(0, problem.heads_k, heads), range(0, batch, batches)), _rounded(problem)[1]
    return tuple(SheetPart(b, min(batches, batch - b), h, heads, 0, keys) for h, b in starts)


def pair_room(problem: Problem) -> int:
    """Return of how many key heads dS and P fit into :func:`sheet_memory`, counting those of each batch element."""
    queries, keys = _rounded(problem)
    of_one = 2 * problem.group * queries * keys * problem.dtype.itemsize
    return sheet_memory(problem) // of_one if problem.batch and of_one else 0


def _rounded(problem: Problem) -> tuple[int, int]:
    """Return the queries and the keys of a sheet."""
    return tuple(-(-n // SHEET_UNIT) * SHEET_UNIT for n in (problem.seqlen_q, problem.seqlen_k))


def summed_beside(batch: int, heads: int, loops: Sequence[str]) -> tuple[int, int]:
    """Return the batch elements and the query heads whose programs take turns at a sum of dS and run side by side.

    Args:
        loops: as in :func:`sheet_parts`.
    """
    some_b = divisor(batch, SUMMED_BESIDE) if "b" in loops else 1
    return some_b, divisor(heads, SUMMED_BESIDE // some_b) if "h" in loops else 1


def splits_of_sum(problem: Problem, part: SheetPart, loops: Sequence[str], tiles: Tiles) -> tuple[int, int]:
    """Return how many adjacent programs add into one partial sum of a bias's gradient, and how many partial sums there are.

    A bias with few tiles, such as that of an image's windows, is summed over many rows: one sum would keep few programs busy.

    Args:
        part: the first. loops: as in :func:`sheet_parts`. tiles: :func:`sheet_tiles`.
    """
    counts = {"b": part.batches, "h": part.heads * problem.group}
    summed = math.prod(counts[x] for x in loops)
    # Deterministic results of a sequence do not depend on its batch-mates, as the keys of a part do.
    alone = problem.spec.deterministic
    apart = math.prod(n for x, n in counts.items() if x not in loops and not (x == "b" and alone))
    keys = problem.seqlen_k if alone else part.keys
    sums = apart * -(-problem.seqlen_q // tiles.tile_m) * -(-keys // tiles.tile_n)
    number = min(SUMS * devices.of(problem.device).cores // sums, summed // LEAST_SUMMED)
    together = -(-summed // max(number, 1))
    return together, -(-summed // together)


def sheet_tiles(problem: Problem, config: Config) -> Tiles:
    """Return the tiles for dQ from a sheet of dS, and for the sum of dS over the axes along which a bias is broadcast."""
    widest = max(problem.head_dim, problem.head_dim_v)
    # With at most 168 registers a third program runs on a multiprocessor: 1.85 ms instead of 2.13 (H200, N 16384).
    registers = 168 if widest <= 64 and problem.dtype.itemsize == 2 else 0
    tiles = Tiles(64, 64, 4, 3 if widest <= 128 else 2, tma=True, registers=registers) if config.dkdv.tma else config.dq
    sides = {"tile_m": min(tiles.tile_m, SHEET_STRIP), "tile_n": min(tiles.tile_n, config.dkdv.tile_n)}
    tiles = replace(tiles, **sides, chunk=config.dkdv.chunk)
    return with_stages(problem, "sheet", tiles)


def product_tiles(problem: Problem, config: Config) -> Tiles:
    """Return the tiles of products of sheets of which programs each make some columns, where no bias has a gradient."""
    tiles = replace(sheet_tiles(problem, config), column_parts=config.dq.column_parts)
    return with_stages(problem, "kept_pairs", replace(tiles, num_stages=3)) if tiles.tma else tiles


def pairs_tiles(problem: Problem, config: Config) -> Tiles:
    """Return the tiles of the pass that leaves dS and P in sheets: with no sums of columns, it has registers for larger ones."""
    tiles = replace(config.dkdv, column_parts=1)
    if config.dkdv.tma:
        tiles = replace(tiles, tile_m=SHEET_UNIT, num_stages=2)
    return with_stages(problem, "pairs", tiles)


def sheet_strip_tiles(problem: Problem, config: Config) -> Tiles:
    """Return the tiles of a sheet of dS that are summed by distance: squares within the tiles that the pass over keys writes."""
    side = min(SHEET_STRIP, config.dkdv.tile_n)
    return Tiles(side, side, 4, 1)
