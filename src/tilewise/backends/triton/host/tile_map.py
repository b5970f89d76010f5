"""The launches that plan a mask: the state of every tile, the keys that some query sees, lists of tiles and the bits of partial ones, and
the ends of intervals.

Their kernels are those of ``kernels.tile_map``, ``kernels.tile_lists`` and ``kernels.tile_bits``.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tilewise import expr
from tilewise.backends.base import MOST_BYTES, argument_bytes
from tilewise.backends.triton.host import runtime
from tilewise.backends.triton.host.facts import Facts
from tilewise.backends.triton.host.plan import extents_of
from tilewise.backends.triton.kernels.emit import Emitted, emit_mask
from tilewise.backends.triton.kernels.writer import OPERATIONS
from tilewise.backends.triton.tiles import Tiles
from tilewise.expr import Expr
from tilewise.masks.facts import granularity
from tilewise.masks.regions import Region
from tilewise.planning.bit_tiles import RESERVED, BitTiles, Sections
from tilewise.planning.tiles import Grid
from tilewise.problem import TensorFacts

# Rows of a block of pairs that a program evaluates at once: with 128 keys, 16 pairs a thread. With 32 rows registers
# keep programs off a multiprocessor: on an H200, 16k x 16k pairs of an integer division took 0.73 ms instead of 0.52,
# a union of intervals 0.073 instead of 0.042.
MOST_ROWS = 16
# Programs of a launch, where tiles are that many: a program takes several. On an H200 65,536 programs of a tile each took 105 us to judge
# the tiles of documents, and 140 us to write the bits of the 0.6 % that are partial.
PROGRAMS = 8192
SHARED_MEMORY = 1024  # bytes; a block's columns are summed up across warps
PROGRAM = Tiles(MOST_ROWS, 128, 4, 1)
_LINES = 128  # of a program that writes ends


def can_judge(grid: Grid) -> bool:
    """Whether kernels take a grid: keys from 0 on, pairs at all, operations that can all be written, and numbers of 32 bits."""
    sizes = grid.b.shape[0], grid.h.shape[0], grid.seqlen_q, grid.keys
    return grid.key_origin is None and all(sizes) and _can_be_written(grid.region, *sizes)


@lru_cache(maxsize=1024)
def _can_be_written(region: Region, b: int, h: int, i: int, j: int) -> bool:
    """Whether kernels have every operation of a mask, and compute it in 32 bits for these sizes."""
    known = expr.operations_of(*region.parts) <= OPERATIONS
    short = argument_bytes(region.parts) <= MOST_BYTES
    return known and short and not expr.beyond_32_bits(region.parts, {"b": b, "h": h, "i": i, "j": j})


@lru_cache(maxsize=1024)
def _heads_of(region: Region, ends: bool, by_columns: bool, batch: int, heads: int) -> tuple[int, int]:
    """How many batch elements and heads have tiles of their own, or ``ends``: 1 where these parts of the mask are the same for all."""
    parts = _ends_of(region, by_columns) if ends else (*_ends_of(region, True), region.predicate)
    needs = expr.depends_on(*[e for e in parts if e is not None])
    return batch if "b" in needs else 1, heads if "h" in needs else 1


def judged(grid: Grid, tile_m: int, tile_n: int, group: int | None = None) -> tuple[Tensor, Tensor | None]:
    """The state of every tile by interval and predicate, exactly, and the keys that some query sees.

    Args:
        group: the query heads that share a key head; None where the keys are not asked for.

    Returns:
        uint8 ``(b|1, h|1, query tiles, key tiles)``, and bool ``(b|1, heads_k|1, keys)`` or None.
    """
    arguments = arguments_of(grid, tile_m, tile_n, group)
    status, seen = arguments[0].status, arguments[0].seen
    spans = -(-status.shape[2] // arguments[1].span)
    _launch(runtime.kernels().tile_map, (status.shape[0] * status.shape[1] * spans * status.shape[3],), *arguments)
    return status, None if seen is None else seen.view(torch.bool)


def arguments_of(grid: Grid, tile_m: int, tile_n: int, group: int | None) -> tuple[Any, Any, tuple[float, ...], Facts]:
    """The kernel's arguments: tensors, the new ones among them, plain sizes, plain numbers, and facts."""
    region, device = grid.region, grid.b.device
    leaves = tuple(TensorFacts.of(leaf) for leaf in grid.leaves)
    emitted, facts, step = _functions(region, leaves, (grid.seqlen_q, grid.keys), tile_m)
    batch, heads = _heads_of(region, False, True, grid.b.shape[0], grid.h.shape[0])
    blocks = (-(-grid.seqlen_q // tile_m), -(-grid.keys // tile_n))
    group = group if group is None or heads > 1 else 1
    status = torch.empty((batch, heads, *blocks), dtype=torch.uint8, device=device)
    seen = None
    if group is not None:
        seen = torch.zeros((batch, heads // group, grid.keys), dtype=torch.uint8, device=device)
    kernels = runtime.kernels()
    sizes = kernels.MapSizes(
        heads=heads,
        seen_heads=heads // (group or 1),
        group=group or 1,
        seqlen_q=grid.seqlen_q,
        seqlen_k=grid.keys,
        tile_m=tile_m,
        tile_n=tile_n,
        step=step,
        span=-(-batch * heads * blocks[0] * blocks[1] // PROGRAMS),
        extents=tuple(extents_of(leaves[n].shape, leaves[n].stride) for n in emitted.slots),
    )
    read = tuple(grid.leaves[n] for n in emitted.slots)
    return kernels.MapTensors(status, seen, grid.b, grid.h, read), sizes, emitted.numbers, facts


def bits(tiles: BitTiles, status: Tensor, grid: Grid, crossing: int, by_columns: bool, sections: Sections) -> None:
    """Writes all of ``tiles``, of 128 lines by ``crossing``, from the state of every tile, that of :func:`judged`."""
    kernels, lines = runtime.kernels(), tiles.work.shape[0] * tiles.work.shape[1] * tiles.work.shape[2]
    tensors, sizes, facts = list_arguments_of(tiles, status, grid, by_columns, sections)
    for kernel in (kernels.lists.tile_lists_kernel, kernels.lists.tile_order_kernel):
        _launch(kernel, (lines,), tensors, sizes, (), facts)
    arguments = bit_arguments_of(tiles, grid, crossing, by_columns)
    _launch(kernels.tile_bits, (lines * arguments[1].programs,), *arguments)


def list_arguments_of(
    tiles: BitTiles, status: Tensor, grid: Grid, by_columns: bool, sections: Sections
) -> tuple[Any, Any, Facts]:
    """The arguments of the kernels that write lists, but for numbers, of which they have none."""
    (batch, heads, lines, steps), kernels = tiles.blocks.shape, runtime.kernels().lists
    slots, threads, words = tiles.bits.shape
    sizes = kernels.ListSizes(
        heads=heads,
        group=sections.group if heads > 1 else 1,
        lines=lines,
        steps=steps,
        ragged=int(tiles.ragged(grid, by_columns)),
        most=(slots - RESERVED) // (batch * heads),
        words=threads * words,
        all_heads=sections.heads,
        least=sections.least,
        ctas=sections.ctas,
    )
    counts = torch.empty((batch, heads, lines, 2), dtype=torch.int32, device=status.device)
    tensors = kernels.ListTensors(status, counts, tiles.blocks, tiles.work, tiles.bits, tiles.section, status, ())
    return tensors, sizes, _list_facts(by_columns)


@lru_cache(maxsize=2)
def _list_facts(by_columns: bool) -> Facts:
    return Facts(by_columns=by_columns, overlap=None)


def bit_arguments_of(
    tiles: BitTiles, grid: Grid, crossing: int, by_columns: bool
) -> tuple[Any, Any, tuple[float, ...], Facts]:
    """The arguments of the kernel that writes bits, as :func:`arguments_of` has them."""
    leaves = tuple(TensorFacts.of(leaf) for leaf in grid.leaves)
    emitted, facts = _bit_functions(grid.region, leaves, (grid.seqlen_q, grid.keys), crossing, by_columns)
    kernels, (batch, heads, lines, steps) = runtime.kernels(), tiles.blocks.shape
    sizes = kernels.BitSizes(
        heads=heads,
        lines=lines,
        steps=steps,
        slots=tiles.bits.shape[0],
        programs=min(steps, -(-PROGRAMS // (batch * heads * lines))),
        seqlen_q=grid.seqlen_q,
        seqlen_k=grid.keys,
        extents=tuple(extents_of(leaves[n].shape, leaves[n].stride) for n in emitted.slots),
    )
    read = tuple(grid.leaves[n] for n in emitted.slots)
    tensors = kernels.BitTensors(tiles.bits, tiles.blocks, tiles.work, grid.b, grid.h, read)
    return tensors, sizes, emitted.numbers, facts


@lru_cache(maxsize=1024)
def _bit_functions(
    region: Region, leaves: tuple[TensorFacts, ...], lengths: tuple[int, int], crossing: int, by_columns: bool
) -> tuple[Emitted, Facts]:
    """The functions of a mask's pairs, and the facts of the launch."""
    emitted = emit_mask(Region(lo=region.lo, hi=region.hi, predicate=region.predicate), leaves, lengths)
    functions = {name: emitted.functions.get(name) for name in ("lo", "hi", "keep")}
    same = _same_bits(region.predicate, crossing, by_columns)
    facts = Facts(**functions, crossing=crossing, by_columns=by_columns, same=same, overlap=None)
    return emitted, facts


def _same_bits(predicate: Expr | None, crossing: int, by_columns: bool) -> int:
    """How many bits of a word, side by side, are the same in every tile: two are of eight crossing lines (:mod:`bit_tiles`)."""
    lines = None if predicate is None else granularity(predicate, "i" if by_columns else "j")
    lines = math.gcd(crossing, lines or crossing)
    return lines // 4 if lines % 8 == 0 else 1


def ends(grid: Grid, lines: Tensor, by_columns: bool) -> tuple[Tensor, Tensor]:
    """Both ends of the intervals of these queries, or keys ``by_columns``: int64 ``(b|1, h|1, len(lines))``."""
    leaves = tuple(TensorFacts.of(leaf) for leaf in grid.leaves)
    emitted, facts = _end_functions(grid.region, leaves, (grid.seqlen_q, grid.keys), by_columns)
    batch, heads = _heads_of(grid.region, True, by_columns, grid.b.shape[0], grid.h.shape[0])
    start, end = torch.empty((2, batch, heads, len(lines)), dtype=torch.int64, device=grid.b.device)
    kernels, read = runtime.kernels(), emitted.slots
    sizes = kernels.EndsSizes(
        heads=heads,
        count=len(lines),
        seqlen_q=grid.seqlen_q,
        seqlen_k=grid.keys,
        extents=tuple(extents_of(leaves[n].shape, leaves[n].stride) for n in read),
    )
    tensors = kernels.EndsTensors(start, end, lines, grid.b, grid.h, tuple(grid.leaves[n] for n in read))
    _launch(kernels.ends, (batch * heads, -(-len(lines) // _LINES)), tensors, sizes, emitted.numbers, facts)
    return start, end


def _ends_of(region: Region, by_columns: bool) -> tuple[Expr | None, ...]:
    """The ends of rows, or of columns."""
    return region.ends[2:] if by_columns else region.ends[:2]


@lru_cache(maxsize=1024)
def _end_functions(
    region: Region, leaves: tuple[TensorFacts, ...], lengths: tuple[int, int], by_columns: bool
) -> tuple[Emitted, Facts]:
    """The functions of the ends, and the facts of the launch."""
    names = ("first", "last") if by_columns else ("lo", "hi")
    emitted = emit_mask(Region(**dict(zip(names, _ends_of(region, by_columns), strict=True))), leaves, lengths)
    functions = {name: emitted.functions.get(name) for name in ("lo", "hi", "first", "last")}
    return emitted, Facts(**functions, by_columns=by_columns, overlap=None)


@lru_cache(maxsize=1024)
def _functions(
    region: Region, leaves: tuple[TensorFacts, ...], lengths: tuple[int, int], tile_m: int
) -> tuple[Emitted, Facts, int]:
    """The mask's functions, the facts of the launch, and the rows on which the predicate is the same."""
    emitted = emit_mask(region, leaves, lengths)
    same = None if region.predicate is None else granularity(region.predicate, "i")
    step = math.gcd(tile_m, same or tile_m)
    rows = min(MOST_ROWS, 1 << (tile_m // step - 1).bit_length())
    functions = {name: emitted.functions.get(name) for name in ("first", "last", "keep", "some", "every")}
    return emitted, Facts(**functions, block_m=rows, overlap=None), step


def _launch(kernel, programs: tuple[int, ...], tensors, sizes, numbers: tuple[float, ...], facts: Facts) -> None:
    """Launches a kernel with these plain numbers."""
    arguments = tensors, runtime.opaque(sizes), runtime.opaque(numbers), facts
    (runtime.start if runtime.aligned(tensors) else runtime.run)(kernel, programs, PROGRAM, *arguments)
