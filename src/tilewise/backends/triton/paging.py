"""The tiles for a cache in pages, and into how many splits the keys of a row are cut.

Both follow from shapes alone: the lengths may be others at each replay of a graph, and no host reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from tilewise import device as devices
from tilewise.backends.triton.config import (
    DECODING,
    INTERPRETED,
    OVERLAPPING,
    UNLIMITED,
    Config,
    architecture,
    memory_limit,
    row_for,
    table,
    tf32_allowed,
)
from tilewise.backends.triton.tiles import Streams, Tiles, columns, fit, program_limit, shared_memory
from tilewise.problem import Problem

Addressing = Literal["whole", "one", "several"]
"""Where the keys of a tile lie: in the one page that a sequence has, in one page of several, or each in a page of its own."""

SPLIT_TILES = 2  # the least tiles of a split: shorter ones take as long to begin as to run
PROGRAMS = 4  # for each multiprocessor, where there are so many splits: they even out sequences of different lengths
LEAST_SPLITS = 16  # of a batch of decoding steps: one sequence may be much longer than the others
MOST_SPLITS = 128
MOST_SPLITS_ALONE = 32  # where the choice may not look at the batch: the partial states of a large one should still fit


def addressing(problem: Problem, tile_n: int) -> Addressing:
    """How tiles of so many keys lie in a problem's pages."""
    if problem.capacity == problem.page_size:
        return "whole"
    return "several" if problem.page_size % tile_n else "one"


def rows_of_sequence(problem: Problem) -> int:
    """The rows of one sequence's tiles, its queries times the heads of a group; packed, what they are on average, rounded up."""
    queries = -(-problem.seqlen_q // max(problem.batch, 1)) if problem.packed else problem.seqlen_q
    return queries * problem.group


@dataclass(frozen=True)
class Machine:
    """The part of a device that decides: its key in ``config.TABLE``, bytes of shared memory of a multiprocessor, multiprocessors."""

    arch: str
    shared: int
    cores: int

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        return cls(architecture(device), memory_limit(device, UNLIMITED), devices.of(device).cores)


def choose_paged(problem: Problem, measured: dict[str, Tiles]) -> Config:
    """The configuration of a problem whose keys lie in pages.

    Args:
        measured: tiles that ``tilewise tune`` measured on this device, by pass.
    """
    if problem.device.type == "cpu":
        return INTERPRETED
    # Terms of bf16 would have to be made of the whole pool, of which a call reads a part.
    products = "tf32" if problem.dtype.itemsize == 4 and tf32_allowed() else "ieee"
    return paged_config(problem, Machine.of(problem.device), products, measured.get("forward"))


def paged_config(problem: Problem, machine: Machine, products: str, measured: Tiles | None = None) -> Config:
    """The configuration on a machine; its passes are the forward alone."""
    arch, size = machine.arch, problem.dtype.itemsize
    rows = table(arch, size, products)
    tiles = measured or (row_for(rows, problem) or rows[-1]).forward
    few = row_for(DECODING.get(arch, ()), problem) if size == 2 else None
    # Packed, another sequence of the batch may be what makes rows few: a deterministic choice does not look.
    if few is not None and not (problem.packed and problem.spec.deterministic) and rows_of_sequence(problem) <= 64:
        tiles = few.forward[0]
    tiles = paged_tiles(problem, tiles, machine)
    splits = paged_splits(problem, tiles.tile_m, machine.cores)
    return Config(tiles, tiles, tiles, splits=splits, overlapping=arch in OVERLAPPING, products=products)


def paged_tiles(problem: Problem, tiles: Tiles, machine: Machine) -> Tiles:
    """``tiles`` with no more keys than a page of at least 64 has, and as they fit into shared memory.

    A tile in one page is brought by descriptor; in several, row by row.
    """
    while addressing(problem, tiles.tile_n) == "several" and tiles.tile_n > 64 and problem.page_size % 64 == 0:
        tiles = replace(tiles, tile_n=tiles.tile_n // 2, num_stages=tiles.num_stages + 1)
    limit = program_limit(tiles, machine.shared, machine.arch, problem.dtype.itemsize)
    return fit("paged", tiles, partial(paged_memory, problem, machine.arch), limit)


def paged_memory(problem: Problem, arch: str, tiles: Tiles) -> int:
    """:func:`tiles.shared_memory` of a problem's kernel."""
    widths = columns(problem.head_dim, tiles), columns(problem.head_dim_v, tiles)
    streams = Streams(plain=problem.spec.region.predicate is None)
    return shared_memory("paged", tiles, widths, problem.dtype.itemsize, streams, arch)


def paged_splits(problem: Problem, tile_m: int, cores: int) -> int:
    """The splits of the keys that a tile of rows sees, a power of two; 1: its program visits them all.

    With ``deterministic`` it depends on one sequence's shapes: a result does not depend on its batch-mates. Packed, queries belong
    to sequences of any length, of which no host knows; a deterministic call then does not split.
    """
    deterministic = problem.spec.deterministic
    if deterministic and problem.packed:
        return 1
    tiles = -(-rows_of_sequence(problem) // tile_m)
    programs = problem.heads_k * tiles * (1 if deterministic else problem.batch)
    wanted = PROGRAMS * cores // max(programs, 1)
    if tiles == 1:
        wanted = max(wanted, LEAST_SPLITS)
    most = -(-problem.capacity // (64 * SPLIT_TILES))
    wanted = max(1, min(wanted, most, MOST_SPLITS_ALONE if deterministic else MOST_SPLITS))
    return 1 << (wanted.bit_length() - 1)
