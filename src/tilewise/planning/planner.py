"""The kernels that plan masks on a device. Planning imports no backend: :mod:`tilewise.dispatch` says which module has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from tilewise.masks import Region

if TYPE_CHECKING:
    from tilewise.planning.bit_tiles import Layout, Sections
    from tilewise.planning.tiles import Grid


class Kind(NamedTuple):
    """All of a grid that decides its launches: shape, strides and dtype of each tensor, and how many there are of b and h."""

    region: Region
    tensors: tuple[tuple, ...]
    batch: int
    heads: int
    lengths: tuple[int, int]
    device: torch.device

    @classmethod
    def of(cls, grid: Grid) -> Kind:
        leaves = tuple([(x.shape, x.stride(), x.dtype) for x in grid.leaves])
        return cls(grid.region, leaves, len(grid.b), len(grid.h), (grid.seqlen_q, grid.keys), grid.b.device)


Making = Callable[[Sequence[Tensor], torch.device], Tensor]
"""Launches that are kept for masks of one :class:`Kind`: of its tensors, by slot, they make one tensor on a device."""


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

    def all_of_bits(
        self, kind: Kind, layout: Layout, crossing: int, by_columns: bool, sections: Sections, sharing: int
    ) -> Making | None:
        """Return what makes the memory of :class:`tilewise.planning.bit_tiles.BitTiles` of a whole mask; None: kernels cannot."""
        ...

    def seen_rows(self, x: tuple, seen: tuple[int, ...], first: int, device: torch.device) -> Making | None:
        """Return what copies rows ``(batch, key, head, column)``, with zeros for keys that no query sees, of a tensor of shape, stride and
        dtype ``x`` and of the memory in which ``seen``, of that shape, begins at byte ``first``; None: no kernel can."""
        ...

    def runs(self, ids: Tensor) -> Making | None:
        """Return what makes the first place of the run of equal ids around each one, and one past its last: int32 ``(2, *shape)``, of
        tensors like ``ids``, ``(keys,)`` or ``(batch, keys)``; None: no kernel can."""
        ...

    def starts(self, kind: Kind, parts: int) -> Making | None:
        """Return what makes the first row and the first key of the ``parts`` sequences that each batch element becomes
        (:mod:`tilewise.backends.hopper.padding`): int32 ``(2, batch · parts + 1)``, with those past the last one; None: no kernel can."""
        ...

    def own_keys(self, kind: Kind, page_rows: int) -> Making | None:
        """Return what makes the keys that the first query of each batch element sees: int32 ``(2, batch)``, the number of the first one's
        row, where those of two elements are ``page_rows`` apart, and how many there are; None: no kernel can."""
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


def of_plain(x: Tensor) -> Planner | None:
    """Return the kernels for a tensor of any numbers, as :func:`of`."""
    load = _LOADED.get(x.device.type)
    if load is None or torch.compiler.is_compiling() or type(x) is not Tensor or torch._C._len_torch_dispatch_stack():
        return None
    return None if torch._C._functorch.is_functorch_wrapped_tensor(x) else load()


def of_kind(kind: Kind) -> Planner | None:
    """Return the kernels for grids of a kind, as :func:`of`, where all tensors lie on its device; else None."""
    load = _LOADED.get(kind.device.type)
    wide = any(kind.tensors[n][2] == torch.float64 for n in kind.region.slots)
    return None if load is None or wide else load()
