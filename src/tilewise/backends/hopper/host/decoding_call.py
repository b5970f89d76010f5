"""The launch of a decoding step: a few queries a sequence, over pages, or over dense keys as if each sequence had one page."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.base import Inputs, Output
from tilewise.backends.hopper.decoding.choice import ends, shares_of
from tilewise.backends.hopper.forward.paged_config import page_rows
from tilewise.backends.hopper.host.paged_call import PagedPlan
from tilewise.backends.hopper.host.plan import LOG2_E
from tilewise.caching import cached_property


class DecodingPlan(PagedPlan):
    """The decisions for one problem with a few queries a sequence."""

    DECIDED = ("shares", "numbers")

    @cached_property
    def shares(self) -> int:
        return shares_of(self.problem)

    @cached_property
    def numbers(self) -> tuple[int | float, ...]:
        """The first numbers of :func:`tilewise.backends.hopper.decoding.kernel.launch`."""
        problem = self.problem
        sinks = int(problem.spec.sink_slot is not None)
        return self.shares, int(problem.paged), sinks, LOG2_E * problem.softmax_scale, *ends(problem)

    def by_rows(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)  # (query, sequence, head, column): the kernel takes any strides

    def lse_by_rows(self, out: Output) -> Tensor:
        return out.lse.permute(2, 1, 0)  # (query, head, sequence)

    def extra(self, inputs: Inputs) -> tuple[Tensor | int | float, ...]:
        problem, tiles = self.problem, self.config.tiles
        lanes = 32 * tiles.row_warps
        new, states = inputs.q.new_empty, 2 * self.shares * problem.heads_k
        counts = devices.counts(inputs.q.device, problem.batch * problem.heads_k)
        found = {
            "seqlens_k": inputs.seqlens_k
            if problem.paged
            else counts,  # without pages any memory will do: it is not read
            "block_table": inputs.block_table if problem.paged else counts[None],
            "part_o": new((states, tiles.fours, lanes, 4), dtype=torch.float32),
            "part_lse": new((states, lanes, 2 * tiles.own_rows), dtype=torch.float32),
            "counts": counts,
            "num_pages": problem.k.shape[0],
            "page_rows": page_rows(problem.k),
        }
        return tuple(found[name] for name in self.config.extra)
