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
    E4M3,
    INTERPRETED,
    LATENT,
    OVERLAPPING,
    UNLIMITED,
    Config,
    architecture,
    memory_limit,
    row_for,
    table,
    tf32_allowed,
)
from tilewise.backends.triton.tiles import Streams, Tiles, columns, fit, program_limit, shared_memory, width
from tilewise.problem import Problem

Addressing = Literal["whole", "one", "several"]
"""Where the keys of a tile lie: in the one page that a sequence has, in one page of several, or each in a page of its own."""

LARGE_TILE = 128  # queries (docs/decisions.md#triton-pages)
FEWEST_ROWS = 16  # of a tile: a step of decoding has a row for each head of a group (docs/decisions.md#triton-pages)

E4M3_BYTES, E4M3_PAIR = 1, 2  # kernels read two numbers at a time

# How keys are split: measured on a GPU (docs/decisions.md#triton-pages).
PROGRAMS = 2  # for each multiprocessor, as many as run there at a time
LEAST_SPLITS = 16  # of a batch of decoding steps: one sequence may be much longer than the others
MOST_SPLITS = 128
MOST_SPLITS_ALONE = 32  # where the choice may not look at the batch: the partial states of a large one should still fit
MOST_SHARES = 5  # of a tile whose keys warps share: 16 tiles of head_dim 256 take 26.4 µs in even shares for 24.4 in splits (H200)
PARTS_REGISTERS = 168  # of a thread where warps take parts of a tile's keys: three programs for each multiprocessor
SHORTEST_SPLIT = 128  # keys, where programs are few
SPLIT_OF_MANY = (
    1024  # keys, where there are programs for all multiprocessors without splits: then a split saves no time
)


def addressing(problem: Problem, tile_n: int) -> Addressing:
    """How tiles of so many keys lie in a problem's pages."""
    if problem.capacity == problem.page_size:
        return "whole"
    return "several" if problem.page_size % tile_n else "one"


def rows_of_sequence(problem: Problem) -> int:
    """The rows of one sequence's tiles, its queries times the heads of a group; packed, what they are on average, rounded up."""
    queries = -(-problem.seqlen_q // max(problem.batch, 1)) if problem.packed else problem.seqlen_q
    return queries * problem.group


def few_queries(problem: Problem, cores: int) -> bool:
    """Whether a kernel that gives each tile of LARGE_TILE queries of a head to one multiprocessor would leave a quarter of it idle:
    of the rows of all tiles, or of the multiprocessors.

    A deterministic call counts one sequence, whoever shares its batch; packed, no host knows how many queries that has. Where v lies in
    k's memory, the other kernel has tiles of 64 rows and splits keys too.
    """
    if problem.latent:
        rows = rows_of_sequence(problem)
        tiles = problem.heads_k * problem.batch * -(-rows // LATENT_TILE) * -(-problem.capacity // LATENT_TILE)
        return rows < LATENT_ROWS or tiles < LATENT_TILES[problem.quantised]
    deterministic = problem.spec.deterministic
    if problem.packed and deterministic:
        return True
    heads = problem.heads_q * (1 if deterministic else problem.batch)
    queries = rows_of_sequence(problem) // problem.group
    tiles = heads * -(-queries // LARGE_TILE)
    return 4 * heads * queries < 3 * LARGE_TILE * max(tiles, cores)


LATENT_TILE = 64  # rows, and keys, of a tile of the kernel for v in k's memory
# The fewest query heads of a sequence, and the fewest tiles of a call, for which that kernel is faster (H200, 11-22): 84.0 µs instead of
# 139 at 32 × 8,192 with 16 heads, 27.6 instead of 31.5 with 512 tiles. 128 tiles gain nothing: 23.3 and 23.6, or 23.8 instead of 20.3
# in an earlier version. Nothing below 4,096 tiles was measured in 8 bits.
LATENT_ROWS, LATENT_TILES = 16, {False: 512, True: 4096}  # by whether the cache is in 8 bits


@dataclass(frozen=True)
class Machine:
    """The part of a device that decides: its key in ``config.TABLE``, bytes of shared memory of a multiprocessor, multiprocessors."""

    arch: str
    shared: int
    cores: int

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        return cls(architecture(device), memory_limit(device, UNLIMITED), devices.of(device).cores)


@dataclass(frozen=True)
class PagedConfig(Config):
    """The tiles of a forward over pages; there is no backward. ``split`` is the least keys of a split."""

    def describe(self) -> str:
        split = f"; keys in up to {self.splits} splits of {self.split} or more" if self.splits > 1 else ""
        split += f"; {self.shares} even shares of all keys" if self.shares else ""
        return self.forward.describe() + split

    def traffic(self, problem: Problem) -> int:
        """Bytes of Q and O once, and of K and V once for each tile of rows, where every sequence is as long as it may be."""
        queries = problem.seqlen_q * problem.batch_dim
        tiles = -(-rows_of_sequence(problem) // self.forward.tile_m) * problem.batch
        rows = problem.dtype.itemsize * queries * problem.heads_q
        rows += problem.k.dtype.itemsize * tiles * problem.heads_k * problem.capacity
        return rows * (problem.head_dim + problem.head_dim_v)


def choose_paged(problem: Problem, measured: dict[str, Tiles]) -> PagedConfig:
    """The configuration of a problem whose keys lie in pages.

    Args:
        measured: tiles that ``tilewise tune`` measured on this device, by pass.
    """
    if problem.device.type == "cpu":
        return PagedConfig(*[INTERPRETED.forward] * 3)
    # Terms of bf16 would have to be made of the whole pool, of which a call reads a part.
    products = "tf32" if problem.dtype.itemsize == 4 and tf32_allowed() else "ieee"
    return paged_config(problem, Machine.of(problem.device), products, measured.get("forward"))


def paged_config(problem: Problem, machine: Machine, products: str, measured: Tiles | None = None) -> PagedConfig:
    """The configuration on a machine."""
    arch, size = machine.arch, problem.dtype.itemsize
    by_width = table(arch, size, products)
    tiles = measured or (row_for(by_width, problem) or by_width[-1]).forward
    if problem.latent and size == 2 and measured is None and (row := row_for(LATENT.get(arch, ()), problem)):
        tiles = row.forward[0]
    # Packed, other sequences of the batch decide whether rows are few on average: a deterministic choice does not look.
    rows = tiles.tile_m if problem.packed and problem.spec.deterministic else rows_of_sequence(problem)
    if measured is None:
        tiles = chunk_tiles(arch, problem, rows) or tiles
    few = row_for(DECODING.get(arch, ()), problem) if size == 2 else None
    if few is not None and rows <= few.forward[0].tile_m:
        tiles = few.forward[0] if rows > FEWEST_ROWS else replace(few.forward[0], tile_m=FEWEST_ROWS)
    elif few is None and rows < tiles.tile_m:
        tiles = replace(tiles, tile_m=width(rows))
    if problem.quantised and scales_of_keys(problem) and tiles.tile_m <= FEWEST_ROWS:
        tiles = replace(
            tiles, tma=False
        )  # beside descriptors, loads of scales wait longer (docs/decisions.md#triton-pages)
    tiles = paged_tiles(problem, tiles, machine)
    if few is not None and takes_parts(problem, tiles):
        tiles = replace(tiles, parts=tiles.num_warps, registers=PARTS_REGISTERS)
    splits, keys = paged_splits(problem, tiles.tile_m, machine.cores)
    shared, programs = shared_tiles(problem, tiles, machine)
    shares = even_shares(problem, tiles, machine.cores * programs) if splits > 1 else 0  # else nothing would be merged
    if shares:
        tiles, splits, keys = shared, 1, SHORTEST_SPLIT
    chosen = {"shares": shares, "splits": splits, "split": keys}
    return PagedConfig(tiles, tiles, tiles, overlapping=arch in OVERLAPPING, products=products, **chosen)


def chunk_tiles(arch: str, problem: Problem, rows: int) -> Tiles | None:
    """The tiles of a chunk of so many rows over a quantised cache, where it has some of its own."""
    row = row_for(E4M3.get(arch, ()), problem)
    if row is None or not row.forward or not problem.quantised or problem.latent or problem.dtype.itemsize != 2:
        return None
    return row.forward[0] if rows >= row.forward[0].tile_m and not scales_of_keys(problem) else None


def scales_of_keys(problem: Problem) -> bool:
    """Whether a quantised cache has a scale for each key and head."""
    return any(len(problem.extras[n].shape) == 3 for n in problem.spec.scale_slots)


def paged_tiles(problem: Problem, tiles: Tiles, machine: Machine) -> Tiles:
    """``tiles`` with no more keys than a page of at least 64 has, and as they fit into shared memory.

    A tile in one page is brought by descriptor; in several, row by row.
    """
    while addressing(problem, tiles.tile_n) == "several" and tiles.tile_n > 64 and problem.page_size % 64 == 0:
        tiles = replace(tiles, tile_n=tiles.tile_n // 2, num_stages=tiles.num_stages + 1)
    limit = program_limit(tiles, machine.shared, machine.arch, problem.dtype.itemsize)
    return fit("paged", tiles, partial(paged_memory, problem, machine.arch), limit)


def takes_parts(problem: Problem, tiles: Tiles) -> bool:
    """Whether each warp takes a part of a tile's keys (``kernels.warp_keys``), of at least 16, as products ask.

    Keys that are loaded row by row would not be pipelined then, and Triton does not compile numbers of 8 bits so.
    """
    if problem.latent or problem.quantised or addressing(problem, tiles.tile_n) == "several":
        return False
    return tiles.tma and tiles.tile_m <= FEWEST_ROWS and tiles.tile_n >= 16 * tiles.num_warps


def paged_memory(problem: Problem, arch: str, tiles: Tiles) -> int:
    """:func:`tiles.shared_memory` of a problem's kernel."""
    if (
        problem.quantised
    ):  # a stage of e4m3 takes half; wgmma reads tiles in q's dtype from shared memory, mma.sync from registers
        turned = 1 if tiles.tile_m >= 64 else 0
        tiles = replace(tiles, num_stages=-(-tiles.num_stages * E4M3_BYTES // problem.dtype.itemsize) + turned)
    each = E4M3_PAIR if problem.quantised else 1
    widths = each * columns(problem.head_dim // each, tiles), each * columns(problem.head_dim_v // each, tiles)
    # Beside stages of e4m3 a predicate's pairs need no room of their own.
    streams = Streams(plain=problem.spec.region.predicate is None or problem.quantised)
    return shared_memory("latent" if problem.latent else "paged", tiles, widths, problem.dtype.itemsize, streams, arch)


def shared_tiles(problem: Problem, tiles: Tiles, machine: Machine) -> tuple[Tiles, int]:
    """The tiles of programs that have even shares of all keys, and how many such programs a multiprocessor has.

    One, with all registers and a stage more, where the batch's tiles are no more than multiprocessors; else, and where warps share a
    tile's keys, two: at a time, or one after the other.
    """
    tiles = replace(tiles, registers=0)
    if tiles.parts == 1 or problem.batch * problem.heads_k > machine.cores:
        return tiles, PROGRAMS
    deeper = replace(tiles, num_stages=tiles.num_stages + 1)
    fits = paged_memory(problem, machine.arch, deeper) <= machine.shared
    return deeper if fits else tiles, 1


def even_shares(problem: Problem, tiles: Tiles, programs: int) -> int:
    """How many even shares all key tiles have (``kernels.shares``), where so many programs share the work; 0: each sequence has splits.

    Shares depend on all sequences of a batch, so that a deterministic call has none; each sequence has one tile of rows, and there is
    more than one sequence. Where warps share a tile's keys, pages hold whole tiles of 16 bits, and of tiles there are not a few.
    """
    if problem.packed or problem.spec.deterministic or rows_of_sequence(problem) > tiles.tile_m or problem.batch == 1:
        return 0
    if tiles.parts == 1:
        plain = not (problem.quantised or problem.latent) and addressing(problem, tiles.tile_n) != "several"
        if not plain or MOST_SHARES * problem.batch * problem.heads_k < programs:
            return 0
    most = programs // problem.heads_k
    # Shares of equally long sequences begin where these do, unless more than an eighth of the machine would be idle for it.
    each = [n for n in range(1, most + 1) if problem.batch % n == 0 or n % problem.batch == 0]
    return each[-1] if each and 8 * each[-1] >= 7 * most else most


def paged_splits(problem: Problem, tile_m: int, cores: int) -> tuple[int, int]:
    """``(splits, keys)``: into how many splits the keys that a tile of rows sees are cut, a power of two, and the least keys of one.

    With ``deterministic`` they depend on one sequence's shapes: a result does not depend on its batch-mates. Packed, queries belong
    to sequences of any length, of which no host knows; a deterministic call then does not split.
    """
    deterministic = problem.spec.deterministic
    if deterministic and problem.packed:
        return 1, SHORTEST_SPLIT
    tiles = -(-rows_of_sequence(problem) // tile_m)
    programs = max(problem.heads_k * tiles * (1 if deterministic else problem.batch), 1)
    keys = SHORTEST_SPLIT if programs < cores else SPLIT_OF_MANY
    wanted = (
        (1 if problem.latent and tile_m >= 64 else PROGRAMS) * cores // programs
    )  # which leaves no room for a second
    if tiles == 1:
        wanted = max(wanted, LEAST_SPLITS)
    most = min(-(-problem.capacity // keys), MOST_SPLITS_ALONE if deterministic else MOST_SPLITS)
    return 1 << (max(1, min(wanted, most)).bit_length() - 1), keys
