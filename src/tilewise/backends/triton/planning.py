"""The kernels that plan masks for every backend of a GPU (:mod:`tilewise.planning.planner`). They need nothing of Triton's attention."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from tilewise.backends.triton import device_reasons, installed
from tilewise.backends.triton.host import tile_map
from tilewise.backends.triton.host.runtime import on_device
from tilewise.planning.bit_tiles import Layout, Sections
from tilewise.planning.planner import Kind, Making
from tilewise.planning.tiles import Grid


def judged_tiles(grid: Grid, tile_m: int, tile_n: int, group: int | None = None) -> tuple[Tensor, Tensor | None] | None:
    """Return the state of every tile under a predicate, and the seen keys (:func:`tile_map.judged`), or None if no kernel can run."""
    if not _plans(grid):
        return None
    with on_device(grid.b):
        return tile_map.judged(grid, tile_m, tile_n, group)


def ends_of_lines(grid: Grid, lines: Tensor, by_columns: bool) -> tuple[Tensor, Tensor] | None:
    """Return the intervals of queries, or of keys ``by_columns`` (:func:`tile_map.ends`), or None if no kernel can run."""
    if not _plans(grid) or not len(lines):
        return None
    with on_device(grid.b):
        return tile_map.ends(grid, lines, by_columns)


def starts(kind: Kind, parts: int) -> Making | None:
    """Return the launch that makes the starts of sequences (:class:`tilewise.planning.planner.Planner`), or None if no kernel can run."""
    return tile_map.of_elements(kind, "starts", parts, kind.lengths[1]) if _plans_kind(kind) else None


def own_keys(kind: Kind, page_rows: int) -> Making | None:
    """Return the launch that makes the keys of single queries, or None if no kernel can run."""
    return tile_map.of_elements(kind, "own_keys", 0, page_rows) if _plans_kind(kind) else None


def all_of_bits(
    kind: Kind, layout: Layout, crossing: int, by_columns: bool, sections: Sections, sharing: int
) -> Making | None:
    """Return the launches that make the tiles of a whole mask in their memory, or None if kernels cannot make all of it."""
    if not _plans_kind(kind) or not (kind.batch and kind.heads and all(kind.lengths)):
        return None
    return tile_map.all_of_bits(kind, layout, (crossing, by_columns), sections, sharing)


def seen_rows(x: tuple, seen: tuple[int, ...], first: int, device: torch.device) -> Making | None:
    """Return the launch that copies rows of keys that are seen, or None if no kernel can run."""
    return tile_map.seen_rows(x, seen, first, device) if _launches_on(device) and all(x.shape) else None


def runs(ids: Tensor) -> Making | None:
    """Return the launch that makes the runs of equal ids, or None if no kernel can run."""
    there = _launches_on(ids.device) and ids.numel() and not ids.is_complex()
    return tile_map.runs((ids.shape, ids.stride(), ids.dtype), ids.device) if there else None


def _plans_kind(kind: Kind) -> bool:
    """Return whether kernels can plan the masks of a kind here."""
    return _launches_on(kind.device) and tile_map.can_be_written(kind.region, kind.batch, kind.heads, *kind.lengths)


def _plans(grid: Grid) -> bool:
    """Return whether kernels can plan a mask here."""
    return _launches_on(grid.b.device) and tile_map.can_judge(grid)


@lru_cache(maxsize=64)  # planning a new mask of a known text takes a few launches
def _launches_on(device: torch.device) -> bool:
    return installed() and not device_reasons(device)
