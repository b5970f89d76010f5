"""The tensors that a mask gives a kernel: the ends of every row, the key blocks of every query tile, and the keys that some query
sees. All are made on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tilewise import expr
from tilewise.backends.hopper.host.draft import View
from tilewise.planning import planner
from tilewise.planning.bit_tiles import BitTiles, Layout, Sections, seen_shape
from tilewise.planning.planner import Kind, Making
from tilewise.planning.tiles import Grid, seen_keys
from tilewise.problem import Problem


class Sized(Protocol):
    """A kernel's tiles, of which their sizes are read here."""

    tile_m: int
    tile_n: int


def grid_of(problem: Problem, extras: Sequence[Tensor]) -> Grid:
    """The pairs of a problem and the mask over them."""
    shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    return Grid.whole(problem.spec.region, extras, shape, problem.device)


Ends = Callable[[Problem, Sequence[Tensor]], tuple[Tensor, Tensor]]
"""The ends of every line of a problem, of its extras: (batch|1, heads_q|1, line) each."""


def row_ends(problem: Problem, extras: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """``(lo, hi)`` of every row, within 0 and seqlen_k."""
    return grid_of(problem, extras).key_interval(torch.arange(problem.seqlen_q, device=problem.device))


def column_ends(problem: Problem, extras: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """``(first, last)``, the queries that see each key, within 0 and seqlen_q."""
    return grid_of(problem, extras).query_interval(torch.arange(problem.seqlen_k, device=problem.device))


def column_ends_of_rows(problem: Problem, extras: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """:func:`column_ends`, counted of the ends of rows, so that a backward that keeps dS reads no block that it has not written. A key's
    queries begin with the first that ends past it, and end with the last that begins no later. Ends of rows never decrease."""
    columns = torch.arange(problem.seqlen_k, device=problem.device, dtype=torch.int32)

    def count(ends: Tensor) -> Tensor:
        ends = ends.int().contiguous()
        each = columns.expand(*ends.shape[:-1], -1).contiguous()
        return torch.searchsorted(ends, each, right=True, out_int32=True)

    lo, hi = row_ends(problem, extras)
    return count(hi), count(lo)


@dataclass(frozen=True)
class EndsOf:
    """The ends of a problem's rows as one pass reads them, or of its columns: int32 (2, batch|1, heads_q|1, line) in one memory."""

    problem: Problem
    ends: Ends = row_ends

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of either end."""
        p = self.problem
        needs = expr.depends_on(*p.spec.region.parts)
        lines = p.seqlen_q if self.ends is row_ends else p.seqlen_k
        return p.batch if "b" in needs else 1, p.heads_q if "h" in needs else 1, lines

    def views(self, memory: str, prefix: str = "") -> dict[str, View]:
        """The tensors by the names of a launch's parameters, expanded to every batch element and head."""
        count = math.prod(self.shape)
        views = (View.contiguous(memory, torch.int32, *self.shape)._replace(offset=n * count) for n in range(2))
        return {prefix + name: each_head(x, self.problem) for name, x in zip(("lo", "hi"), views, strict=True)}

    def making(self, extras: Sequence[Tensor], device: torch.device) -> Tensor:
        """What makes them of a call's extras."""
        return torch.stack([x.expand(self.shape) for x in self.ends(self.problem, extras)]).int()


def each_head(x: View, problem: Problem) -> View:
    """The view of a tensor (batch|1, heads_q|1, ..) that has every batch element and head."""
    strides = [0 if size == 1 else step for size, step in zip(x.shape[:2], x.strides, strict=False)]
    return x._replace(shape=(problem.batch, problem.heads_q, *x.shape[2:]), strides=(*strides, *x.strides[2:]))


def _kernels_for(problem: Problem) -> planner.Planner | None:
    return planner.of_kind(Kind.of_problem(problem))


def making(problem: Problem, name: str, size: int, otherwise: Callable[..., Tensor]) -> Making:
    """What makes ``starts`` or ``own_keys`` (:class:`tilewise.planning.planner.Planner`) of a call's extras, without kernels by another
    function of the problem, its extras and a size, of which the kernels are asked too."""
    kernels = _kernels_for(problem)
    found = None if kernels is None else getattr(kernels, name)(Kind.of_problem(problem), size)
    return found or (lambda extras, device: otherwise(problem, extras, size))


def own_keys(problem: Problem, extras: Sequence[Tensor], page_rows: int) -> Tensor:
    """The keys that the one query of each sequence sees, as a cache has them whose pages are single rows: int32 (2, batch), the number of
    its first row, where those of two sequences are ``page_rows`` apart, and how many."""
    row = torch.zeros(1, dtype=torch.int64, device=problem.device)
    lo, hi = (x[:, 0, 0] for x in grid_of(problem, extras).key_interval(row))  # (batch or 1,)
    first = torch.arange(0, problem.batch * page_rows, page_rows, device=lo.device) + lo
    return torch.stack([first, (hi - lo).clamp_(min=0).expand_as(first)]).int()


@dataclass(frozen=True)
class BitsOf:
    """The tiles of a problem's mask with a bit for each pair, as one pass reads them (:class:`tilewise.planning.bit_tiles.BitTiles`).

    Attributes:
        crossing: lines of a tile. by_columns: for the pass over keys of a backward.
    """

    problem: Problem
    crossing: int
    by_columns: bool = False

    @classmethod
    def of(cls, problem: Problem, tiles: Sized, by_columns: bool = False) -> BitsOf:
        return cls(problem, tiles.tile_m if by_columns else tiles.tile_n, by_columns)

    @property
    def group(self) -> int:
        """Query heads that take their lines in one order."""
        return self.problem.group if self.by_columns else 1

    def layout(self, seen: bool = False) -> Layout:
        """Where they lie. ``seen``: and behind them, which keys are seen."""
        p, sharing = self.problem, self.problem.group if seen else 0
        shape = p.batch, p.heads_q, p.seqlen_q, p.seqlen_k
        return Layout.of(p.spec.region, shape, self.crossing, self.by_columns, p.extras, self.group, sharing)

    def views(self, memory: str, prefix: str = "") -> dict[str, View]:
        """The tensors by the names of a launch's parameters; lists are expanded to every batch element and head."""
        layout = self.layout()
        places = layout.places
        found = {
            name: View.contiguous(memory, torch.int32, *shape)._replace(offset=places[name])
            for name, shape in layout.shapes.items()
        }
        return {prefix + name: each_head(x, self.problem) if len(x.shape) == 4 else x for name, x in found.items()}

    def making(self, section: int, ctas: int, seen: bool) -> Making:
        """What makes them of a call's extras. ``section``: heads that a section has at least. ``ctas``: of the launch."""
        p, how, sharing = self.problem, (self.crossing, self.by_columns), self.problem.group if seen else 0
        sections = Sections(p.batch * p.heads_q // self.group, section, ctas, self.group)
        kernels, kind = _kernels_for(p), Kind.of_problem(p)
        found = None if kernels is None else kernels.all_of_bits(kind, self.layout(seen), *how, sections, sharing)
        return found or (lambda extras, device: BitTiles.build(grid_of(p, extras), *how, sections, sharing).memory)


def seen(problem: Problem, extras: Sequence[Tensor], sharing: int) -> Tensor:
    """The keys that some query of their batch element and of the ``sharing`` heads of their key head sees: bool, of the shape that
    :func:`tilewise.planning.bit_tiles.seen_shape` says."""
    shape = problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k
    found = seen_keys(grid_of(problem, extras), sharing)
    return found.expand(seen_shape(problem.spec.region, shape, sharing)).contiguous()


def seen_of(memory: Tensor, layout: Layout | None) -> Tensor:
    """:func:`seen` as it lies in the memory of tiles; None: in a memory of its own."""
    return layout.seen_in(memory) if layout else memory
