"""Which calls over selected keys have kernels that read these alone, and their tiles. Nothing here imports Triton."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tilewise.backends import listed
from tilewise.backends.listed import MULTIPLE
from tilewise.backends.piecewise import PieceCall
from tilewise.backends.triton.config import MAX_LATENT_DIM, architecture, memory_limit
from tilewise.backends.triton.tiles import MIN_WIDTH, Tiles, width
from tilewise.planning.bit_tiles import LINES
from tilewise.problem import Problem
from tilewise.selections import queries_of_row

WIDEST = 128  # columns of a piece
# By the kernel, for head dims up to WIDEST and for wider ones; fewer query heads take fewer rows (docs/decisions.md#listed-tiles).
TILES = {
    "listed_forward": (Tiles(64, 128, 4, 2), Tiles(64, 64, 8, 2)),
    "listed_backward": (Tiles(64, 32, 4, 2), Tiles(64, 32, 8, 1)),
    "listed_dq": (None, Tiles(64, 64, 8, 2)),  # of dS, which the backward of wide heads leaves
}
SHARED_MEMORY = (146 << 10, 216 << 10)  # bytes that these may need
# Keys of a tile that take as long as one of a list, whose block is shorter or longer than so many keys.
SHORT, VISITED, VISITED_BLOCKS = 16, 1, 1 / 5


def serves(p: Problem) -> bool:
    """Return whether kernels read the selected keys of a call alone on some GPU, in whatever time."""
    if not listed.asked(p) or p.dtype not in (torch.bfloat16, torch.float16):
        return False
    if any(n % MULTIPLE for n in (p.head_dim, p.head_dim_v)):
        return False
    if not listed.pool_is_rows(p):
        return False
    # dK and dV are added up in any order.
    fits = max(p.head_dim, p.head_dim_v) <= 2 * WIDEST or (p.latent and p.head_dim <= MAX_LATENT_DIM)
    return fits and not (p.spec.deterministic and p.spec.needs_grad)


def runs(p: Problem) -> bool:
    """Return whether they do so on the call's own device."""
    beyond = p.latent and is_wide(p) and architecture(p.device) == "sm100"  # where a forward needs 441 KiB
    return serves(p) and not beyond and SHARED_MEMORY[is_wide(p)] <= memory_limit(p.device)


def sooner(p: Problem) -> bool:
    """Return whether that takes less time than to visit the tiles that a tile's queries select together."""
    if not runs(p):
        return False
    (places, block), block_q = listed.places_of(p), queries_of_row(p.spec.region.predicate)[0]
    together = min(p.k.shape[0] if p.packed and not p.paged else p.seqlen_k, -(-LINES // block_q) * places)
    visited = VISITED if block < SHORT else VISITED_BLOCKS
    return block_q < LINES and cost(p) <= visited * together


def cost(p: Problem) -> float:
    """Return the keys of a query's list, and for heads that do not fill a tile as many more."""
    return listed.places_of(p)[0] * max(1, tiles_of(p, "listed_forward").tile_m / p.group)


def has_gradients(p: Problem) -> bool:
    """Return whether the kernels compute the gradients of a call, for any backend of a GPU."""
    from tilewise.backends.triton import installed

    return installed() and serves(p)


def gradients_of(p: Problem, own: Any = None) -> PieceCall:
    """Return the call whose backward does; ``own``: by a backend's own :class:`tilewise.backends.triton.host.listed.GradientKernels`."""
    from tilewise.backends.triton.host.listed import ListedCall

    return ListedCall(p, own=own)


def told(p: Problem) -> str:
    """Return how these calls run, for ``explain``."""
    rows = tiles_of(p, "listed_forward").tile_m
    return f"{rows} query heads at a time read a query's selected keys alone"


def tiles_of(p: Problem, kernel: str) -> Tiles:
    """Return the tiles of a kernel."""
    tiles = TILES[kernel][is_wide(p)]
    return replace(tiles, tile_m=min(tiles.tile_m, width(p.group)))


def is_wide(p: Problem) -> bool:
    """Return whether a call's head dims take more than a piece."""
    return max(p.head_dim, p.head_dim_v) > WIDEST


def pieces_of(p: Problem) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Return the pieces of both head dims, as :func:`tilewise.backends.triton.tiles.pieces`; a latent call's begin alike."""
    of_v = _pieces(0, p.head_dim_v)
    of_k = (*of_v, *_pieces(p.head_dim_v, p.head_dim)) if p.latent else _pieces(0, p.head_dim)
    return of_k, of_v


def _pieces(first: int, last: int) -> tuple[tuple[int, int, int], ...]:
    sizes = [(n, min(WIDEST, last - n)) for n in range(first, last, WIDEST)]
    return tuple((n, size, max(width(size), MIN_WIDTH)) for n, size in sizes)
