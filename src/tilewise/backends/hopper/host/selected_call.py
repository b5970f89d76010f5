"""The launches over keys that each query selected: a query is a sequence of its own, its heads are rows, its entries are its table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise import sizes
from tilewise.backends import listed
from tilewise.backends.base import Output, has_no_pair
from tilewise.backends.hopper.config import strides_addressable
from tilewise.backends.hopper.forward.grids import Grid
from tilewise.backends.hopper.host.draft import Draft, View, flattens
from tilewise.backends.hopper.host.forward_call import ForwardPlan
from tilewise.backends.hopper.host.latent_call import LatentPlan
from tilewise.backends.hopper.latent import selected
from tilewise.backends.listed import places_of, rows_of
from tilewise.caching import cached_property
from tilewise.gather import statistic_in_layout_of
from tilewise.planning.planner import Making

LINES = "tokens"  # of :func:`listed.lines`


@dataclass(eq=False)
class ListedPlan(ForwardPlan):
    """The decisions for one problem whose values have memory of their own."""

    PRODUCTS = ()

    @property
    def sees_nothing(self) -> bool:
        return has_no_pair(self.problem) or 0 in self.problem.output_shapes[0]

    @cached_property
    def grid(self) -> Grid:
        tiles = rows_of(self.problem) * -(-self.problem.group // self.config.tile_queries)
        return Grid(tiles, sizes.smaller(tiles, devices.of(self.problem.device).cores), 1)

    @cached_property
    def numbers(self) -> dict[str, int | float]:
        p = self.problem
        pages = {"num_pages": p.k.shape[0], "page_rows": p.page_size if p.paged else 0}
        return super().numbers | pages | {"block": places_of(p)[1]}

    @cached_property
    def keeps(self) -> tuple[str, ...]:
        return (LINES,)

    @cached_property
    def makings(self) -> tuple[Making, ...]:
        return (listed.lines(self.problem),)

    @property
    def slots_of_mask(self) -> tuple[int, ...]:
        return listed.read_slots(self.problem)

    @property
    def slots(self) -> dict[str, int]:
        return super().slots | {"entries": listed.slot_of(self.problem)}

    def beside(self, draft: Draft) -> dict[str, Any]:
        p = self.problem
        batch, heads, rows, count = p.extras[listed.slot_of(p)].shape
        entries = View.contiguous("entries", torch.int32, batch * heads * rows, count)
        tokens = View.contiguous(LINES, torch.int32, rows_of(p) * p.heads_k, 4)
        # Without pages the table is not read.
        table = View.of("block_table", p.extras[p.spec.page_slots[0]]) if p.paged else tokens
        return ForwardPlan.beside(self, draft) | {"entries": entries, LINES: tokens, "block_table": table}

    @cached_property
    def copied(self) -> tuple[str, ...]:
        p = self.problem

        def served(x: Any) -> bool:
            return (len(x.shape) == 3 or flattens(x)) and strides_addressable(x.shape, x.stride)

        return tuple(name for name, x in (("q", p.q), ("k", p.k), ("v", p.v)) if not served(x))

    def flat(self, x: View) -> View:
        """A tensor with the rows of all batch elements one after the other, and of pages."""
        return x if len(x.shape) == 3 else x.flatten(0, 1)

    def drafted_rows(self, draft: Draft) -> tuple[View, ...]:
        problem = self.problem
        o = draft.result("o", problem.dtype, *problem.output_shapes[0])
        lse = draft.result("lse_by_heads", torch.float32, rows_of(problem), 1, problem.heads_q)
        q, k, v = (self.flat(self.view(name)) for name in "qkv")
        # (query, query head as a row, 1, column), and of keys (1, key, 1, column).
        return q.unsqueeze(2), k.unsqueeze(0), v.unsqueeze(0), self.flat(o).unsqueeze(2), lse

    @property
    def result_is_made(self) -> bool:
        return True

    def output(self, made: Mapping[str, Tensor]) -> Output:
        lse = made["lse_by_heads"].squeeze(1).mT  # of (query, 1, query head)
        return Output(made["o"], statistic_in_layout_of(self.problem, lse).contiguous())


@dataclass(eq=False)
class SelectedPlan(ListedPlan, LatentPlan):
    """The decisions for one problem whose values lie in the memory of its keys."""

    CHOICE = selected
    grid, output, result_is_made = LatentPlan.grid, LatentPlan.output, LatentPlan.result_is_made

    @cached_property
    def copied(self) -> tuple[str, ...]:
        return tuple(name for name in super().copied if name != "v")

    def drafted_rows(self, draft: Draft) -> tuple[View, ...]:
        q, k, *rest = LatentPlan.drafted_rows(self, draft)
        return q, self.flat(k).unsqueeze(1), *rest  # pages of single rows
