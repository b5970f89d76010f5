"""The tensors that a mask gives a kernel: the ends of every row, the key blocks of every query tile, and the keys that some query
sees. All are made on the device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.masks.facts import every_key_seen
from tilewise.planning.bit_tiles import BitTiles, Sections, only_seen_keys
from tilewise.planning.tiles import PARTIAL, Grid, TileMap, seen_keys
from tilewise.problem import Problem


class Sized(Protocol):
    """A kernel's tiles, of which their sizes are read here."""

    tile_m: int
    tile_n: int


def grid_of(problem: Problem, inputs: Inputs) -> Grid:
    """The pairs of a problem and the mask over them."""
    shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    return Grid.whole(problem.spec.region, inputs.leaves, shape, inputs.q.device)


def row_ends(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(lo, hi)`` of every row, within 0 and seqlen_k: int32 (batch, heads_q, seqlen_q), expanded where they are shared."""
    rows = torch.arange(problem.seqlen_q, device=inputs.q.device)
    return tuple(
        x.int().expand(problem.batch, problem.heads_q, -1) for x in grid_of(problem, inputs).key_interval(rows)
    )


def own_keys(problem: Problem, inputs: Inputs, page_rows: int) -> tuple[Tensor, Tensor]:
    """The keys that the one query of each sequence sees, as a cache has them whose pages are single rows: the number of its first row,
    (batch, 1), where those of two sequences are ``page_rows`` apart, and how many, (batch,); both int32."""
    row = torch.zeros(1, dtype=torch.int64, device=inputs.q.device)
    lo, hi = (x[:, 0] for x in grid_of(problem, inputs).key_interval(row))  # (batch or 1, 1)
    first = torch.arange(0, problem.batch * page_rows, page_rows, device=lo.device).unsqueeze(1)
    count = (hi - lo).clamp_(min=0).int().expand(problem.batch, 1)
    return (first + lo).int(), count.contiguous().view(-1)


def column_ends(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """``(first, last)``, the queries that see each key, within 0 and seqlen_q: int32 (batch, heads_q, seqlen_k), expanded."""
    columns = torch.arange(problem.seqlen_k, device=inputs.q.device)
    return tuple(
        x.int().expand(problem.batch, problem.heads_q, -1) for x in grid_of(problem, inputs).query_interval(columns)
    )


def column_ends_of_rows(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """:func:`column_ends`, counted of the ends of rows, so that a backward that keeps dS reads no block that it has not written. A key's
    queries begin with the first that ends past it, and end with the last that begins no later. Ends of rows never decrease."""
    lo, hi = grid_of(problem, inputs).key_interval(torch.arange(problem.seqlen_q, device=inputs.q.device))
    columns = torch.arange(problem.seqlen_k, device=inputs.q.device, dtype=torch.int32)
    shape = problem.batch, problem.heads_q, -1

    def count(ends: Tensor) -> Tensor:
        ends = ends.int().contiguous()
        each = columns.expand(*ends.shape[:-1], -1).contiguous()
        return torch.searchsorted(ends, each, right=True, out_int32=True).expand(shape)

    return count(hi), count(lo)


def visits(problem: Problem, inputs: Inputs, tiles: Sized, by_columns: bool = False) -> tuple[Tensor, Tensor]:
    """``(blocks, counts)`` as :meth:`tilewise.planning.tiles.TileMap.visits` has them, expanded to every batch element and head; the query
    blocks of every key tile ``by_columns``."""
    tile_map = TileMap.build(grid_of(problem, inputs), tiles.tile_m, tiles.tile_n, by_columns)
    if problem.seqlen_k % tiles.tile_n:  # a ragged end is cut off where a block is partial
        tile_map.status[..., -1:].clamp_(max=PARTIAL)
    return tuple(x.expand(problem.batch, problem.heads_q, -1, -1) for x in tile_map.visits(transposed=by_columns))


def tiles_with_bits(
    problem: Problem, inputs: Inputs, tiles: Sized, section: int, ctas: int, by_columns: bool = False
) -> tuple[Tensor, ...]:
    """``(blocks, work, bits, section)`` of :class:`tilewise.planning.bit_tiles.BitTiles`, the first two expanded to every batch element and
    head.

    Args:
        section: heads that a section has at least. ctas: of the launch.
    """
    crossing, group = (tiles.tile_m, problem.group) if by_columns else (tiles.tile_n, 1)
    sections = Sections(problem.batch * problem.heads_q // group, section, ctas, group)
    found = BitTiles.build(grid_of(problem, inputs), crossing, by_columns, sections)
    each = (x.expand(problem.batch, problem.heads_q, -1, -1) for x in (found.blocks, found.work))
    return *each, found.bits, found.section


def may_hide_keys(problem: Problem, tile: tuple[int, int] | None = None) -> bool:
    """Whether there may be keys that no query sees.

    Args:
        tile: the queries and keys of a tile, if only tiles that are not empty are visited: only keys of these count.
    """
    known = every_key_seen(problem.spec.region, problem.seqlen_q, problem.seqlen_k)
    return not (known or (tile is not None and only_seen_keys(problem.spec.region, tile)))


def seen(problem: Problem, inputs: Inputs) -> Tensor:
    """The keys that some query of their batch and head group sees, where a mask :func:`may_hide_keys`: bool (batch|1, seqlen_k, heads_k|1,
    1)."""
    return seen_keys(grid_of(problem, inputs), problem.group).mT.unsqueeze(-1)
