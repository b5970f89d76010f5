"""The launch of a decoding step: a few queries a sequence, over pages, or over dense keys as if each sequence had one page.

Where tensors say which keys a sequence's query sees, dense keys are a pool whose pages are single rows, and a sequence has one number in
its table, that of the first row that it sees: what follows lies behind it (docs/decisions.md#hopper-decoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.backends.hopper.decoding.choice import ends, reads_ends, shares_of
from tilewise.backends.hopper.forward.paged_config import page_rows
from tilewise.backends.hopper.host import masks
from tilewise.backends.hopper.host.direct import DirectPlan
from tilewise.backends.hopper.host.draft import Draft, View
from tilewise.backends.hopper.host.paged_call import PagedPlan
from tilewise.backends.hopper.host.plan import LOG2_E
from tilewise.caching import cached_property

FIRST, KEYS = "first_rows", "own_keys"  # of :func:`masks.own_keys`


@dataclass(eq=False)
class DecodingPlan(PagedPlan):
    """The decisions for one problem with a few queries a sequence."""

    DECIDED = (*DirectPlan.DECIDED, "of_ends")

    @cached_property
    def shares(self) -> int:
        return shares_of(self.problem)

    @cached_property
    def numbers(self) -> tuple[int | float, ...]:
        """The first numbers of :func:`tilewise.backends.hopper.decoding.kernel.launch`."""
        problem = self.problem
        sinks = int(problem.spec.sink_slot is not None)
        cached = int(problem.paged or reads_ends(problem))
        return self.shares, cached, sinks, LOG2_E * problem.softmax_scale, *ends(problem)

    def by_rows(self, x: View) -> View:
        return x.permute(1, 0, 2, 3)  # (query, sequence, head, column): the kernel takes any strides

    def lse_by_rows(self, lse: View, draft: Draft) -> View:
        return lse.permute(2, 1, 0)  # (query, head, sequence)

    def extra(self, draft: Draft) -> list[View | int]:
        problem, tiles, fp32 = self.problem, self.config.tiles, torch.float32
        lanes, states = 32 * tiles.row_warps, 2 * self.shares * problem.heads_k
        counts = draft.counts("counts", problem.batch * problem.heads_k)
        lengths, table, pages = counts, counts.unsqueeze(0), (problem.k.shape[0], page_rows(problem.k))
        if problem.paged:
            lengths, table = self.extra_view("seqlens_k", 1), self.extra_view("block_table", 0)
        elif reads_ends(problem):
            sequences, rows = pages
            lengths, table = (
                View.contiguous(n, torch.int32, sequences, *more) for n, more in ((KEYS, ()), (FIRST, (1,)))
            )
            pages = sequences * rows, 1
        found = {
            "seqlens_k": lengths,  # without pages and ends neither is read
            "block_table": table,
            "part_o": draft.scratch("part_o", fp32, states, tiles.fours, lanes, 4),
            "part_lse": draft.scratch("part_lse", fp32, states, lanes, 2 * tiles.own_rows),
            "counts": counts,
            "num_pages": pages[0],
            "page_rows": pages[1],
        }
        return [found[name] for name in self.config.extra]

    @property
    def places(self) -> dict[str, int]:
        found = super().places
        first = 4 + len(self.problem.extras)
        return found | {FIRST: first, KEYS: first + 1} if reads_ends(self.problem) else found

    @cached_property
    def of_ends(self) -> tuple[int, ...]:
        """The slots of the tensors that say which keys are seen."""
        return self.problem.spec.mask_slots if reads_ends(self.problem) else ()

    def kept(self, extras: Sequence[Tensor]) -> Sequence[Tensor] | None:
        slots = self.of_ends
        return self.made.ready((masks.own_keys, False), [extras[n] for n in slots]) if slots else ()

    def tensors(self, inputs: Inputs) -> dict[str, Tensor]:
        found = super().tensors(inputs)
        if reads_ends(self.problem):
            found |= zip((FIRST, KEYS), self.of_mask(inputs, masks.own_keys, page_rows(self.problem.k)), strict=True)
        return found
