"""What a mask gives a kernel beside numbers: the ends of every row, the key blocks of every query tile, and the keys that
somebody sees; made on the device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.masks.facts import every_key_seen
from tilewise.problem import Problem
from tilewise.tiles import PARTIAL, Grid, TileMap, seen_keys


class Sized(Protocol):
    """Of a kernel's tiles."""

    tile_m: int
    tile_n: int


def grid_of(p: Problem, t: Inputs) -> Grid:
    shape = (p.batch, p.heads_q, p.seqlen_q, p.seqlen_k)
    return Grid.whole(p.spec.region, t.leaves, shape, t.q.device)


def row_ends(p: Problem, t: Inputs) -> tuple[Tensor, Tensor]:
    """``(lo, hi)`` of every row, within 0 and seqlen_k: int32 (batch, heads_q, seqlen_q), expanded where they are shared."""
    rows = torch.arange(p.seqlen_q, device=t.q.device)
    return tuple(x.int().expand(p.batch, p.heads_q, -1) for x in grid_of(p, t).key_interval(rows))


def column_ends(p: Problem, t: Inputs) -> tuple[Tensor, Tensor]:
    """``(first, last)``, the queries that see each key, within 0 and seqlen_q: int32 (batch, heads_q, seqlen_k), expanded."""
    columns = torch.arange(p.seqlen_k, device=t.q.device)
    return tuple(x.int().expand(p.batch, p.heads_q, -1) for x in grid_of(p, t).query_interval(columns))


def visits(p: Problem, t: Inputs, tiles: Sized, by_columns: bool = False) -> tuple[Tensor, Tensor]:
    """``(blocks, counts)`` as :meth:`tilewise.tiles.TileMap.visits` has them, expanded to every batch element and head; the query
    blocks of every key tile ``by_columns``."""
    tile_map = TileMap.build(grid_of(p, t), tiles.tile_m, tiles.tile_n, by_columns)
    if p.seqlen_k % tiles.tile_n:  # a ragged end is cut off where a block is partial
        tile_map.status[..., -1:].clamp_(max=PARTIAL)
    return tuple(x.expand(p.batch, p.heads_q, -1, -1) for x in tile_map.visits(transposed=by_columns))


def seen(p: Problem, t: Inputs) -> Tensor | None:
    """The keys that some query of their batch and head group sees: bool (batch|1, seqlen_k, heads_k|1, 1); None: all."""
    known = every_key_seen(p.spec.region, p.seqlen_q, p.seqlen_k)
    found = None if known else seen_keys(grid_of(p, t), p.group)
    return None if found is None else found.mT.unsqueeze(-1)
