"""The kernels that plan masks on a device. Planning imports no backend: :mod:`tilewise.dispatch` says which module has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tilewise.masks import Region

if TYPE_CHECKING:
    from tilewise.planning.bit_tiles import Layout, Sections
    from tilewise.planning.tiles import Grid


Problem = Any  # of the module problem, which planning does not import


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

    @classmethod
    def of_problem(cls, p: Problem) -> Kind:
        """All of a problem's mask; kernels judge all tiles in one launch, so that none are prepared."""
        leaves = tuple((x.shape, x.stride, x.dtype) for x in p.extras)
        region = replace(p.spec.region, prepared=None) if p.spec.region.prepared else p.spec.region
        return cls(region, leaves, p.batch, p.heads_q, (p.seqlen_q, p.seqlen_k), p.device)


class Sequences(NamedTuple):
    """What else decides the lines of lists (:func:`tilewise.backends.listed.lines`).

    Attributes:
        rows: of q, those of all sequences. group: query heads of a key head.
        cu_q, cu_k, lengths: the slots of the tensors, whole numbers and contiguous, that say where packed sequences begin, and how many
            keys those in pages have; None: there is none.
    """

    rows: int
    group: int
    cu_q: int | None = None
    cu_k: int | None = None
    lengths: int | None = None


Making = Callable[[Sequence[Tensor], torch.device], Tensor]
"""Launches that are kept for masks of one :class:`Kind`: of its tensors, by slot, they make one tensor on a device."""


class Planner(Protocol):
    """What a module of such kernels has: two questions, and what may be called where both are true."""

    def launches_on(self, device: torch.device) -> bool:
        """Return whether kernels run on a device."""
        ...

    def can_be_written(self, region: Region, b: int, h: int, i: int, j: int) -> bool:
        """Return whether kernels have every operation of a mask, and compute it in 32 bits for these sizes."""
        ...

    def judged_tiles(
        self, grid: Grid, tile_m: int, tile_n: int, group: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the state of every tile and, with ``group`` query heads per key head, the keys that are seen."""
        ...

    def listed_tiles(self, status: Tensor, by_columns: bool) -> tuple[Tensor, Tensor]:
        """Return :meth:`tilewise.planning.tiles.TileMap.visits` of contiguous states."""
        ...

    def ends_of_lines(self, grid: Grid, lines: Tensor, by_columns: bool) -> tuple[Tensor, Tensor]:
        """Return the intervals of queries, or of keys ``by_columns``."""
        ...

    def all_of_bits(
        self, kind: Kind, layout: Layout, crossing: int, by_columns: bool, sections: Sections, sharing: int
    ) -> Making | None:
        """Return what makes the memory of :class:`tilewise.planning.bit_tiles.BitTiles` of a whole mask; None: kernels cannot."""
        ...

    def runs(self, ids: tuple, device: torch.device) -> Making:
        """Return what makes the first place of the run of equal ids around each one, and one past its last: int32 ``(2, *shape)``, of
        tensors ``(keys,)`` or ``(batch, keys)`` of shape, stride and dtype ``ids``."""
        ...

    def starts(self, kind: Kind, parts: int) -> Making:
        """Return what makes the first row and the first key of the ``parts`` sequences that each batch element becomes
        (:mod:`tilewise.backends.hopper.padding`): int32 ``(2, batch · parts + 1)``, with those past the last one."""
        ...

    def own_keys(self, kind: Kind, page_rows: int) -> Making:
        """Return what makes the keys that the first query of each batch element sees: int32 ``(2, batch)``, the number of the first one's
        row, where those of two elements are ``page_rows`` apart, and how many there are."""
        ...

    def sorted_entries(self, entries: tuple, device: torch.device) -> Making:
        """Return what puts rows of at most :data:`MOST_ENTRIES` entries of that shape, stride and dtype in order, as
        :func:`tilewise.masks.catalogue.selected` keeps them."""
        ...

    def list_lines(self, kind: Kind, sequences: Sequences) -> Making:
        """Return what makes the lines of lists: int32 ``(rows, heads_k, 4)``."""
        ...


MOST_ENTRIES = 2048  # of a row that a kernel sorts: one for twice as many takes more than twice as long to compile
_LOADED: dict[str, Callable[[], Planner]] = {}  # by device type


def register(device_type: str, load: Callable[[], Planner]) -> None:
    """Let kernels plan the masks on devices of a type; ``load`` is called when the first mask there is planned."""
    _LOADED[device_type] = lru_cache(maxsize=1)(load)


def of(grid: Grid) -> Planner | None:
    """Return the kernels for a grid, whose tensors lie on one device, have memory, are not traced and are compared in fp32; else None."""
    device = grid.b.device
    traced = torch.compiler.is_compiling() or type(grid.b) is not Tensor
    if traced or grid.dtype != torch.float32 or grid.key_origin is not None:
        return None
    sizes = grid.b.shape[0], grid.h.shape[0], grid.seqlen_q, grid.keys
    return _that_write(grid.region, device, sizes) if all(leaf.device == device for leaf in grid.leaves) else None


def of_plain(x: Tensor) -> Planner | None:
    """Return the kernels for a tensor of any real numbers, as :func:`of`."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or torch._C._len_torch_dispatch_stack():
        return None
    usable = x.numel() and not x.is_complex() and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    return _that_run(x.device) if usable else None


def of_kind(kind: Kind) -> Planner | None:
    """Return the kernels for grids of a kind, as :func:`of`, where all tensors lie on its device; else None."""
    wide = any(kind.tensors[n][2] == torch.float64 for n in kind.region.slots)
    return None if wide else _that_write(kind.region, kind.device, (kind.batch, kind.heads, *kind.lengths))


def _that_write(region: Region, device: torch.device, sizes: tuple[int, int, int, int]) -> Planner | None:
    """Return the kernels that run on a device, if they can write a mask of these sizes, with pairs at all."""
    kernels = _that_run(device)
    return kernels if kernels is not None and all(sizes) and kernels.can_be_written(region, *sizes) else None


def _that_run(device: torch.device) -> Planner | None:
    load = _LOADED.get(device.type)
    return kernels if load is not None and (kernels := load()).launches_on(device) else None
