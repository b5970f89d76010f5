"""The kernels that plan masks on a device. Planning imports no backend: :mod:`tilewise.dispatch` says which module has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tilewise.planning.bit_tiles import BitTiles, Sections
    from tilewise.planning.tiles import Grid


class Planner(Protocol):
    """What a module of such kernels has. Each function launches only what it can do, and says if it cannot."""

    def judged_tiles(
        self, grid: Grid, tile_m: int, tile_n: int, group: int | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return the state of every tile and, with ``group`` query heads per key head, the keys that are seen; None: no kernel can."""
        ...

    def ends_of_lines(self, grid: Grid, lines: Tensor, by_columns: bool) -> tuple[Tensor, Tensor] | None:
        """Return the intervals of queries, or of keys ``by_columns``; None: no kernel can."""
        ...

    def bits_of_tiles(
        self, tiles: BitTiles, status: Tensor, grid: Grid, crossing: int, by_columns: bool, sections: Sections
    ) -> bool:
        """Write ``tiles`` from the state of every tile, and return whether kernels could do that."""
        ...


_LOADED: dict[str, Callable[[], Planner]] = {}  # by device type


def register(device_type: str, load: Callable[[], Planner]) -> None:
    """Let kernels plan the masks on devices of a type; ``load`` is called when the first mask there is planned."""
    _LOADED[device_type] = lru_cache(maxsize=1)(load)


def of(grid: Grid) -> Planner | None:
    """Return the kernels for a grid, whose tensors lie on one device, have memory, are not traced and are compared in fp32; else None."""
    device = grid.b.device
    load = _LOADED.get(device.type)
    if load is None or torch.compiler.is_compiling() or type(grid.b) is not Tensor or grid.dtype != torch.float32:
        return None
    return load() if all(leaf.device == device for leaf in grid.leaves) else None
