"""Tile sizes for a paged cache, and the number of splits of a row's keys.

Both follow from shapes alone. The host does not read the lengths, which may differ at each replay of a graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from tilewise import device as devices
from tilewise.backends.triton.config import (
    DECODING,
    E4M3,
    INTERPRETED,
    LATENT,
    ONE_ROW,
    Config,
    architecture,
    may_round,
    of_one_order,
    room,
    row_for,
    special,
    tabled,
)
from tilewise.backends.triton.tiles import Streams, Tiles, columns, fit, shared_memory, width
from tilewise.problem import Problem

Addressing = Literal["dense", "whole", "one", "several"]
"""The place of a tile's keys: in no pages, in a sequence's only page, in one page of several, or each key in its own page."""

FEWEST_ROWS = 16  # of a tile: a step of decoding has a row for each head of a group (docs/decisions.md#triton-pages)

E4M3_BYTES, E4M3_PAIR = 1, 2  # kernels read two numbers at a time

# How keys are split: measured on a GPU (docs/decisions.md#triton-pages).
PROGRAMS = 2  # for each multiprocessor, as many as run there at a time
LEAST_SPLITS = 16  # of a batch of decoding steps: one sequence may be much longer than the others
MOST_SPLITS = 128
MOST_SPLITS_ALONE = 32  # if the choice may not look at the batch: the partial states of a large one should still fit
SHORTEST_SPLIT = 128  # keys, if programs are few
SPLIT_OF_MANY = 1024  # keys, if all multiprocessors have programs without splits, and a split saves no time


def addressing(problem: Problem, tile_n: int) -> Addressing:
    """Return how tiles of so many keys lie in a problem's pages."""
    if not problem.paged:
        return "dense"
    if problem.capacity == problem.page_size:
        return "whole"
    return "several" if problem.page_size % tile_n else "one"


def rows_of_sequence(problem: Problem) -> int:
    """Return the rows of one sequence's tiles: its queries times the heads of a group; of packed ones the average, rounded up."""
    queries = -(-problem.seqlen_q // max(problem.batch, 1)) if problem.packed else problem.seqlen_q
    return queries * problem.group


@dataclass(frozen=True)
class PagedConfig(Config):
    """The tiles of a forward over pages, or of few queries, which has no backward.

    Attributes:
        splits: of a row's keys (:func:`paged_splits`). split: the least keys of one.
    """

    splits: int = 1
    split: int = 0

    def describe(self) -> str:
        split = f"; keys in up to {self.splits} splits of {self.split} or more" if self.splits > 1 else ""
        return self.forward.describe() + split

    def traffic(self, problem: Problem) -> int:
        """Return the bytes of Q and O once, and of K and V once per tile of rows, if every sequence has its full capacity."""
        queries = problem.seqlen_q * problem.batch_dim
        tiles = -(-rows_of_sequence(problem) // self.forward.tile_m) * problem.batch
        rows = problem.dtype.itemsize * queries * problem.heads_q
        rows += problem.k.dtype.itemsize * tiles * problem.heads_k * problem.capacity
        return rows * (problem.head_dim + problem.head_dim_v)


LARGEST_SHARED = 64  # rows of a sequence that are worth a tile of several heads
SPLIT_KEYS = 1024  # dense keys of a split, which may depend on nothing but seqlen_k: docs/decisions.md#triton-split
# The cost of the second launch and the merge for a query tile, counted in keys: predicted, not measured.
MERGE_KEYS = 512


def few_config(problem: Problem, products: str) -> PagedConfig | None:
    """Return the configuration of a forward over dense keys of which heads share tiles, or splits take a part each; None if neither pays.

    Args:
        products: as in :class:`config.Config`, of the other passes.
    """
    if problem.spec.everywhere or not takes_dense(problem):
        return None
    few = rows_of_sequence(problem) <= LARGEST_SHARED
    if products == "bf16x6" and not few:  # the kernel has no products of terms
        return None
    chosen = paged_config(problem, "tf32" if products == "tf32" else "ieee")
    splits = dense_splits(problem, chosen.forward.tile_m)
    shared = few and problem.group > 1
    return replace(chosen, splits=splits) if splits > 1 or shared or chosen.forward.tile_m == 1 else None


def takes_dense(problem: Problem) -> bool:
    """Return whether the kernel over pages computes a problem over dense keys."""
    spec = problem.spec
    return not (problem.packed or problem.paged or spec.dropout_p or spec.region.predicate is not None)


def dense_splits(problem: Problem, tile_m: int) -> int:
    """Return the splits of dense keys, a power of two; 1 unless they save a third of the time.

    Time is counted in keys that the busiest multiprocessor visits.
    """
    # A deterministic result does not depend on the rest of the batch, so its choice looks at one sequence.
    batch, cores = 1 if problem.spec.deterministic else problem.batch, devices.of(problem.device).cores
    programs = batch * problem.heads_k * -(-rows_of_sequence(problem) // tile_m)
    most = -(-problem.seqlen_k // SPLIT_KEYS)
    whole = -(-programs // cores) * problem.seqlen_k
    split = -(-programs * most // cores) * SPLIT_KEYS + MERGE_KEYS
    return min(1 << (most - 1).bit_length(), MOST_SPLITS) if most and 3 * split <= 2 * whole else 1


def choose_paged(problem: Problem, measured: dict[str, Tiles]) -> PagedConfig:
    """Return the configuration of a problem whose keys lie in pages.

    Args:
        measured: tiles that ``tilewise tune`` measured on this device, by pass.
    """
    if problem.device.type == "cpu":
        return PagedConfig(*[INTERPRETED.forward] * 3)
    # bf16 terms would have to be made of the whole pool, but a call reads only a part of it.
    return paged_config(problem, "tf32" if may_round(problem) else "ieee", measured.get("forward"))


def paged_config(problem: Problem, products: str, measured: Tiles | None = None) -> PagedConfig:
    """Return the configuration on the problem's device."""
    if problem.spec.everywhere:
        return PagedConfig(*[of_one_order(problem)] * 3, products=products)
    tiles = measured or tabled(problem, products).forward
    if problem.latent and measured is None:
        tiles = special(LATENT, problem) or tiles
    # Of packed sequences, the rest of the batch decides whether rows are few on average, so a deterministic choice ignores that.
    rows = tiles.tile_m if problem.packed and problem.spec.deterministic else rows_of_sequence(problem)
    if measured is None:
        tiles = chunk_tiles(problem, rows) or tiles
    few = special(DECODING, problem)
    if few is not None and rows <= few.tile_m:
        tiles = few if rows > FEWEST_ROWS else replace(few, tile_m=FEWEST_ROWS)
    elif rows == 1 and problem.dtype.itemsize == 4:  # docs/decisions.md#triton-one-row
        tiles = row_for(ONE_ROW, problem) or ONE_ROW[max(ONE_ROW)]  # the last: of a call that is refused
    elif few is None and rows < tiles.tile_m:
        tiles = replace(tiles, tile_m=width(rows))
    if problem.quantised and scales_of_keys(problem) and tiles.tile_m <= FEWEST_ROWS:
        tiles = replace(
            tiles, tma=False
        )  # beside descriptors, loads of scales wait longer (docs/decisions.md#triton-pages)
    tiles = paged_tiles(problem, tiles)
    splits, keys = paged_splits(problem, tiles.tile_m, devices.of(problem.device).cores)
    return PagedConfig(tiles, tiles, tiles, products=products, splits=splits, split=keys)


def chunk_tiles(problem: Problem, rows: int) -> Tiles | None:
    """Return the tiles of a chunk of so many rows over a quantised cache, if it has its own."""
    tiles = special(E4M3, problem)
    if tiles is None or not problem.quantised or problem.latent or scales_of_keys(problem):
        return None
    return tiles if rows >= tiles.tile_m else None


def scales_of_keys(problem: Problem) -> bool:
    """Return whether a quantised cache has a scale for each key and head."""
    return any(len(problem.extras[n].shape) == 3 for n in problem.spec.scale_slots)


def paged_tiles(problem: Problem, tiles: Tiles) -> Tiles:
    """Return ``tiles`` that fit shared memory, with no more keys than a page if pages have at least 64.

    A tile in one page is loaded by descriptor, a tile in several pages row by row.
    """
    while addressing(problem, tiles.tile_n) == "several" and tiles.tile_n > 64 and problem.page_size % 64 == 0:
        tiles = replace(tiles, tile_n=tiles.tile_n // 2, num_stages=tiles.num_stages + 1)
    return fit("paged", tiles, partial(paged_memory, problem), room(problem, tiles))


def paged_memory(problem: Problem, tiles: Tiles) -> int:
    """Return :func:`tiles.shared_memory` of a problem's kernel."""
    if (
        problem.quantised
    ):  # a stage of e4m3 takes half; wgmma reads tiles in q's dtype from shared memory, mma.sync from registers
        turned = 1 if tiles.tile_m >= 64 else 0
        tiles = replace(tiles, num_stages=-(-tiles.num_stages * E4M3_BYTES // problem.dtype.itemsize) + turned)
    each = E4M3_PAIR if problem.quantised else 1
    widths = each * columns(problem.head_dim // each, tiles), each * columns(problem.head_dim_v // each, tiles)
    # With e4m3 stages, a predicate's pairs need no extra shared memory.
    streams = Streams(plain=problem.spec.region.predicate is None or problem.quantised)
    kernel, arch = "latent" if problem.latent else "paged", architecture(problem.device)
    return shared_memory(kernel, tiles, widths, problem.dtype.itemsize, streams, arch)


def paged_splits(problem: Problem, tile_m: int, cores: int) -> tuple[int, int]:
    """Return ``(splits, keys)``: the splits of the keys that a tile of rows sees, a power of two, and the least keys of one.

    If ``deterministic``, they depend on one sequence's shapes, so that a result does not depend on the rest of the batch. The host does
    not know the lengths of packed sequences, so a deterministic packed call does not split.
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
    most = min(-(-problem.seqlen_k // keys), MOST_SPLITS_ALONE if deterministic else MOST_SPLITS)
    return 1 << (max(1, min(wanted, most)).bit_length() - 1), keys
