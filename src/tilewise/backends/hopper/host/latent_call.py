"""The launch of latent attention: queries as packed ones, and the pool of keys, in whose memory the values lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.backends.hopper.forward.grids import Grid
from tilewise.backends.hopper.host.direct import DirectPlan
from tilewise.backends.hopper.host.draft import Draft, Launches, View
from tilewise.backends.hopper.host.paged_call import PagedPlan
from tilewise.backends.hopper.host.plan import LOG2_E, ends_of
from tilewise.backends.hopper.latent.config import LEAST_TILES, PAIR, WIDTH_V, splits_of, tiles_of
from tilewise.caching import cached_property


@dataclass(eq=False)
class LatentPlan(PagedPlan):
    """The decisions for one problem whose values are the first columns of its keys, in pages."""

    DECIDED = DirectPlan.DECIDED

    @cached_property
    def grid(self) -> Grid:
        tiles, splits = tiles_of(self.problem), self.config.splits(splits_of(self.problem))
        return Grid(tiles, tiles * splits, 1, splits)

    @cached_property
    def numbers(self) -> tuple[int | float, ...]:
        """The numbers of :func:`tilewise.backends.hopper.latent.kernel.launch`."""
        problem, grid = self.problem, self.grid
        lo, hi = ends_of(self.band)
        sinks = int(problem.spec.sink_slot is not None)
        even, scale2 = 0 if problem.packed else problem.seqlen_q, LOG2_E * problem.softmax_scale
        return lo, hi, grid.tiles, grid.splits, LEAST_TILES, problem.k.shape[0], sinks, even, scale2

    def lse_by_rows(self, lse: View, draft: Draft) -> View:
        # The kernel takes any strides: (sequence, head, 1) is (1, head, row) with one query each.
        one = not self.problem.packed and self.problem.seqlen_q == 1
        return lse.permute(2, 1, 0) if one else super().lse_by_rows(lse, draft)

    def drafted(self) -> Launches:
        draft = Draft()
        q, k, _, o, lse = self.drafted_rows(draft)
        k = k._replace(dtype=torch.uint8) if self.config.e4m3 else k
        draft.launch(
            self.config, q, k, o, lse, self.drafted_sink(lse), tuple(self.extra(draft, lse.shape)), self.numbers
        )
        return draft.done()

    def extra(self, draft: Draft, rows: tuple[int, ...] = ()) -> list[View | int]:
        problem, fp32 = self.problem, torch.float32
        sequences = problem.extras[problem.spec.page_slots[1]].shape[0]
        pairs = self.grid.splits // PAIR
        found = {
            "cu_q": lambda: View.contiguous("cu_q", torch.int32, sequences + 1),
            "seqlens_k": lambda: self.extra_view("seqlens_k", 1),
            "block_table": lambda: self.extra_view("block_table", 0),
            "k_scale": lambda: self.scale_view("k_scale", 0),
            "v_scale": lambda: self.scale_view("v_scale", 1),
            "part_o": lambda: draft.scratch("part_o", fp32, pairs, *rows, WIDTH_V),
            "part_lse": lambda: draft.scratch("part_lse", fp32, pairs, *rows),
        }
        return [found[name]() for name in self.config.extra]

    def scale_view(self, name: str, n: int) -> View:
        """A scale, expanded to (batch, heads_k)."""
        x, problem = self.problem.extras[self.problem.spec.scale_slots[n]], self.problem
        shape = problem.extras[problem.spec.page_slots[1]].shape[0], problem.k.shape[2]
        missing = len(shape) - len(x.shape)
        strides = [0] * missing + [0 if size == 1 else step for size, step in zip(x.shape, x.stride, strict=True)]
        return View(name, x.dtype, shape, tuple(strides))

    def tensors(self, inputs: Inputs) -> dict[str, Tensor]:
        return super().tensors(inputs) | {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
