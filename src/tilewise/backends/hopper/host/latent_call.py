"""The launch of latent attention: queries as packed ones, and the pool of keys, in whose memory the values lie."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.backends.base import Inputs, Output
from tilewise.backends.hopper.forward.grids import Grid
from tilewise.backends.hopper.host import library
from tilewise.backends.hopper.host.driver import PerStrides
from tilewise.backends.hopper.host.paged_call import PagedPlan
from tilewise.backends.hopper.host.plan import LOG2_E, ends_of
from tilewise.backends.hopper.latent.config import LEAST_TILES, PAIR, WIDTH_V, splits_of, tiles_of
from tilewise.caching import cached_property


class LatentPlan(PagedPlan):
    """The decisions for one problem whose values are the first columns of its keys, in pages."""

    DECIDED = ("grid", "numbers")

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

    @cached_property
    def launch(self) -> PerStrides:
        return PerStrides(lambda: library.function(self.config), fixed=5)

    def lse_by_rows(self, out: Output) -> Tensor:
        # The kernel takes any strides: (sequence, head, 1) is (1, head, row) with one query each.
        one = not self.problem.packed and self.problem.seqlen_q == 1
        return out.lse.permute(2, 1, 0) if one else super().lse_by_rows(out)

    def run(self, inputs: Inputs, tensors: tuple[Tensor, ...]) -> None:
        q, k, _, o, lse, sink = tensors
        found = {"cu_q": self.starts(inputs), "seqlens_k": inputs.seqlens_k, "block_table": inputs.block_table}
        if self.config.e4m3:
            k = k.view(torch.uint8)
            each = inputs.seqlens_k.shape[0], k.shape[2]
            found |= {"k_scale": inputs.k_scale.expand(each), "v_scale": inputs.v_scale.expand(each)}
        if self.config.split:
            rows = self.grid.splits // PAIR, *lse.shape
            found["part_o"] = torch.empty((*rows, WIDTH_V), dtype=torch.float32, device=q.device)
            found["part_lse"] = torch.empty(rows, dtype=torch.float32, device=q.device)
        given, extra = (q, k, o, lse, sink), tuple(found[name] for name in self.config.extra)
        self.launch((*given, *extra), lambda: (*given, extra, self.numbers))
