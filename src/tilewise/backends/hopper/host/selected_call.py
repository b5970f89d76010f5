"""The launches over keys that each query selected: a query is a sequence of its own, its heads are rows, its entries are its table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise import sizes
from tilewise.backends import listed
from tilewise.backends.base import Inputs, Output, has_no_pair, output_of_no_pair
from tilewise.backends.hopper.config import strides_addressable
from tilewise.backends.hopper.forward.grids import Grid
from tilewise.backends.hopper.host.draft import Draft, View, flattens
from tilewise.backends.hopper.host.forward_call import ForwardPlan
from tilewise.backends.hopper.host.latent_call import LatentPlan
from tilewise.backends.hopper.latent import selected
from tilewise.backends.listed import places_of, rows_of
from tilewise.caching import cached_property
from tilewise.gather import statistic_in_layout_of


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
        return super().numbers | {"block": places_of(self.problem)[1]}

    @cached_property
    def copied(self) -> tuple[str, ...]:
        p = self.problem

        def served(x: Any) -> bool:
            return (p.packed or flattens(x)) and strides_addressable(x.shape, x.stride)

        return tuple(name for name, x in (("q", p.q), ("k", p.k), ("v", p.v)) if not served(x))

    def flat(self, x: View) -> View:
        """A tensor with the rows of all batch elements one after the other."""
        return x if self.problem.packed else x.flatten(0, 1)

    def drafted_rows(self, draft: Draft) -> tuple[View, ...]:
        problem = self.problem
        o = draft.result("o", problem.dtype, *problem.output_shapes[0])
        lse = draft.result("lse_by_heads", torch.float32, rows_of(problem), 1, problem.heads_q)
        q, k, v = (self.flat(self.view(name)) for name in "qkv")
        # (query, query head as a row, 1, column), and of keys (1, key, 1, column).
        return q.unsqueeze(2), k.unsqueeze(0), v.unsqueeze(0), self.flat(o).unsqueeze(2), lse

    def tensors(self, inputs: Inputs) -> dict[str, Tensor]:
        found = super().tensors(inputs)
        read = [*self.mask_leaves(inputs), inputs.cu_seqlens_q, inputs.cu_seqlens_k]
        lines = self.made.of(
            "lines", [x for x in read if x is not None], lambda: listed.lines(self.problem, inputs).flatten(0, 1)
        )
        return found | {"entries": listed.entries_of(self.problem, inputs), "tokens": lines}

    @property
    def result_is_made(self) -> bool:
        return True

    def forward(self, inputs: Inputs) -> Output:
        if self.launches is None:
            return output_of_no_pair(self.problem, inputs)
        made = self.launches.run_named(self.tensors(inputs))
        return self.result(made["o"], made["lse_by_heads"])

    def result(self, o: Tensor, lse: Tensor) -> Output:
        """The output, of an lse (query, 1, query head)."""
        return Output(o, statistic_in_layout_of(self.problem, lse.squeeze(1).mT).contiguous())


@dataclass(eq=False)
class SelectedPlan(ListedPlan, LatentPlan):
    """The decisions for one problem whose values lie in the memory of its keys."""

    CHOICE = selected
    grid = LatentPlan.grid

    @cached_property
    def copied(self) -> tuple[str, ...]:
        return tuple(name for name in super().copied if name != "v")

    def drafted_rows(self, draft: Draft) -> tuple[View, ...]:
        q, k, *rest = LatentPlan.drafted_rows(self, draft)
        return q, self.flat(k).unsqueeze(1), *rest  # pages of single rows

    def beside(self, draft: Draft) -> dict[str, Any]:
        return ForwardPlan.beside(self, draft) | {"num_pages": 0}

    def forward(self, inputs: Inputs) -> Output:
        return output_of_no_pair(self.problem, inputs) if self.launches is None else LatentPlan.forward(self, inputs)
