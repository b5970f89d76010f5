"""The launch of latent attention: queries as packed ones, and the pool of keys, in whose memory the values lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tilewise.backends.hopper.forward.grids import Grid
from tilewise.backends.hopper.host.draft import Draft, View
from tilewise.backends.hopper.host.paged_call import PagedPlan
from tilewise.backends.hopper.host.plan import LOG2_E, LaunchPlan, ends_of
from tilewise.backends.hopper.latent import config as latent_config
from tilewise.backends.hopper.latent.config import LEAST_TILES, PAIR
from tilewise.caching import cached_property


@dataclass(eq=False)
class LatentPlan(PagedPlan):
    """The decisions for one problem whose values are the first columns of its keys, in pages."""

    DECIDED = LaunchPlan.DECIDED
    CHOICE: ClassVar[Any] = latent_config  # the module that says how many tiles and splits there are

    @cached_property
    def grid(self) -> Grid:
        choice = self.CHOICE
        tiles, splits = choice.tiles_of(self.problem), self.config.splits(choice.splits_of(self.problem))
        return Grid(tiles, tiles * splits, 1, splits)

    @cached_property
    def numbers(self) -> dict[str, int | float]:
        problem, (lo, hi) = self.problem, ends_of(self.band)
        found = {"lo": lo, "hi": hi, "tiles": self.grid.tiles, "splits": self.grid.splits, "least": LEAST_TILES}
        found |= {"even": 0 if problem.packed else problem.seqlen_q, "scale2": LOG2_E * problem.softmax_scale}
        return found | self.numbers_beside

    def lse_by_rows(self, lse: View, draft: Draft) -> View:
        # The kernel takes any strides: (sequence, head, 1) is (1, head, row) with one query each.
        one = not self.problem.packed and self.problem.seqlen_q == 1
        return lse.permute(2, 1, 0) if one else super().lse_by_rows(lse, draft)

    def drafted_rows(self, draft: Draft) -> tuple[View, ...]:
        q, k, *rest = super().drafted_rows(draft)
        return q, k._replace(dtype=torch.uint8) if self.config.e4m3 else k, *rest

    @property
    def sizes(self) -> dict[str, int]:
        rows = self.problem.seqlen_q * (1 if self.problem.packed else self.problem.batch)
        return super().sizes | {"rows": rows, "splits": self.grid.splits // PAIR}

    def beside(self, draft: Draft) -> dict[str, Any]:
        scales = (
            {name: self.scale_view(name, n) for n, name in enumerate(("k_scale", "v_scale"))}
            if self.config.e4m3
            else {}
        )
        return super().beside(draft) | scales

    def scale_view(self, name: str, n: int) -> View:
        """A scale, expanded to (batch, heads_k)."""
        x, problem = self.problem.extras[self.problem.spec.scale_slots[n]], self.problem
        shape = problem.extras[problem.spec.page_slots[1]].shape[0], problem.k.shape[2]
        missing = len(shape) - len(x.shape)
        strides = [0] * missing + [0 if size == 1 else step for size, step in zip(x.shape, x.stride, strict=True)]
        return View(name, x.dtype, shape, tuple(strides))
