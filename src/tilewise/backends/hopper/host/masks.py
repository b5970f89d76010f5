"""The tensors that a mask gives a kernel: the ends of every row, the key blocks of every query tile, and the keys that some query
sees. All are made on the device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise import expr
from tilewise.backends.base import Inputs
from tilewise.backends.hopper.latent.selected import rows_of
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


def lines(problem: Problem, inputs: Inputs) -> Tensor:
    """A line for each row of q, int32 (rows, 4): the row of k of its sequence's key 0, the row of its entries, and ``(lo, hi)``, the keys
    among which it sees those that it selected. ``hi`` is -1 past the last sequence."""
    spec, shape = problem.spec, problem.q.shape
    selection, row = spec.region.predicate, torch.arange(rows_of(problem), device=inputs.q.device)
    if problem.packed:
        cu_q, cu_k = inputs.cu_seqlens_q.long(), inputs.cu_seqlens_k.long()
        b = torch.searchsorted(cu_q[1:].contiguous(), row, right=True)
        # Those past the last sequence are of one more, without keys.
        queries, keys = (pad(cu.diff(), (0, 1))[b] for cu in (cu_q, cu_k))
        i, origin, real = row - cu_q[b], cu_k[b], b < problem.batch
    else:
        queries, keys = (torch.full_like(row, n) for n in (problem.seqlen_q, problem.seqlen_k))
        b, i = row // shape[1], row % shape[1]
        origin, real = b * problem.seqlen_k, torch.ones_like(row, dtype=torch.bool)
    zero = torch.zeros_like(row)
    env = {"b": b, "h": zero, "i": i, "off": keys - queries, "seqlen_q": queries, "seqlen_k": keys}
    lo, hi = spec.region.lo, spec.region.hi
    wanted = [*expr.indices(selection), *(e for e in (lo, hi) if e is not None)]
    found = [
        x.long().expand_as(row)
        for x in expr.evaluate(wanted, env, inputs.leaves, spec.region.compared_in(inputs.leaves))
    ]
    *at, lo, hi = [*found[:3], zero if lo is None else found[3], keys if hi is None else found[-1]]
    place = zero
    for index, size in zip(at, inputs.leaves[selection.args[0][1]].shape, strict=False):
        place = place * size + index.clamp(0, size - 1)
    hi = torch.where(real, torch.minimum(hi, keys).clamp(min=0), -1)
    return torch.stack([origin, place, lo.clamp(min=0).minimum(keys), hi], dim=1).int()


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
