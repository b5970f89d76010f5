"""The launch of a decoding step: a few queries a sequence, over pages, or over dense keys as if each sequence had one page."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.base import Inputs
from tilewise.backends.hopper.decoding.choice import ends, shares_of
from tilewise.backends.hopper.forward.paged_config import page_rows
from tilewise.backends.hopper.host.draft import Draft, View
from tilewise.backends.hopper.host.paged_call import PagedPlan
from tilewise.backends.hopper.host.plan import LOG2_E
from tilewise.caching import cached_property


@dataclass(eq=False)
class DecodingPlan(PagedPlan):
    """The decisions for one problem with a few queries a sequence."""

    DECIDED = ("copied", "zeroed", "launches")

    @cached_property
    def shares(self) -> int:
        return shares_of(self.problem)

    @cached_property
    def numbers(self) -> tuple[int | float, ...]:
        """The first numbers of :func:`tilewise.backends.hopper.decoding.kernel.launch`."""
        problem = self.problem
        sinks = int(problem.spec.sink_slot is not None)
        return self.shares, int(problem.paged), sinks, LOG2_E * problem.softmax_scale, *ends(problem)

    def by_rows(self, x: View) -> View:
        return x.permute(1, 0, 2, 3)  # (query, sequence, head, column): the kernel takes any strides

    def lse_by_rows(self, lse: View, draft: Draft) -> View:
        return lse.permute(2, 1, 0)  # (query, head, sequence)

    @property
    def count(self) -> int:
        """How many counters a launch needs."""
        return self.problem.batch * self.problem.heads_k

    def extra(self, draft: Draft) -> list[View | int]:
        problem, tiles, fp32 = self.problem, self.config.tiles, torch.float32
        lanes, states = 32 * tiles.row_warps, 2 * self.shares * problem.heads_k
        counts = View.contiguous("counts", torch.int32, self.count)
        found = {
            # Without pages any memory will do: it is not read.
            "seqlens_k": self.extra_view("seqlens_k", 1) if problem.paged else counts,
            "block_table": self.extra_view("block_table", 0) if problem.paged else counts.unsqueeze(0),
            "part_o": draft.scratch("part_o", fp32, states, tiles.fours, lanes, 4),
            "part_lse": draft.scratch("part_lse", fp32, states, lanes, 2 * tiles.own_rows),
            "counts": counts,
            "num_pages": problem.k.shape[0],
            "page_rows": page_rows(problem.k),
        }
        return [found[name] for name in self.config.extra]

    def tensors(self, inputs: Inputs) -> dict[str, Tensor]:
        found = super().tensors(inputs)
        found["counts"] = devices.counts(inputs.q.device, self.count)
        return found
