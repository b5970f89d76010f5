"""The launch of a decoding step: a few queries a sequence, over pages, or over dense keys as if each sequence had one page.

Where tensors say which keys a sequence's query sees, dense keys are a pool whose pages are single rows, and a sequence has one number in
its table, that of the first row that it sees: what follows lies behind it (docs/decisions.md#hopper-decoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.backends.hopper.decoding.choice import ends, reads_ends, segment_of, shares_of
from tilewise.backends.hopper.forward.paged_config import page_rows
from tilewise.backends.hopper.host import masks
from tilewise.backends.hopper.host.direct import DirectPlan
from tilewise.backends.hopper.host.draft import Draft, View
from tilewise.backends.hopper.host.paged_call import PagedPlan
from tilewise.caching import cached_property

FIRST, KEYS = "first_rows", "own_keys"  # of :func:`masks.own_keys`


@dataclass(eq=False)
class DecodingPlan(PagedPlan):
    """The decisions for one problem with a few queries a sequence."""

    DECIDED = (*DirectPlan.DECIDED, "of_ends")

    @cached_property
    def segment(self) -> int:
        return segment_of(self.problem, self.config.tiles.tile_n)

    @cached_property
    def shares(self) -> int:
        return shares_of(self.problem, self.segment, self.config.tiles.tile_n)

    @cached_property
    def numbers(self) -> dict[str, int | float]:
        problem, (lo, hi) = self.problem, ends(self.problem)
        cached = int(problem.paged or reads_ends(problem))
        found = {"shares": self.shares, "segment": self.segment, "cached": cached, "lo": lo, "hi": hi}
        return found | dict(zip(("scale2", "cap2"), self.scales, strict=True)) | self.numbers_beside

    def by_rows(self, x: View) -> View:
        return x.permute(1, 0, 2, 3)  # (query, sequence, head, column): the kernel takes any strides

    def lse_by_rows(self, lse: View, draft: Draft) -> View:
        return lse.permute(2, 1, 0)  # (query, head, sequence)

    @property
    def sizes(self) -> dict[str, int]:
        problem = self.problem
        states = self.shares * problem.heads_k * (2 if self.segment == 1 else 1)
        return {"states": states, "counts": problem.batch * problem.heads_k}

    def beside(self, draft: Draft) -> dict[str, Any]:
        found = super().beside(draft) | {"counts": draft.counts("counts", self.sizes["counts"])}
        if not self.problem.paged and reads_ends(self.problem):  # single rows are pages
            found |= {"num_pages": found["num_pages"] * found["page_rows"], "page_rows": 1}
        return found

    def extra_view(self, name: str, n: int) -> View:
        problem = self.problem
        if problem.paged:
            return super().extra_view(name, n)
        if reads_ends(problem):
            found = {"seqlens_k": (KEYS, problem.batch), "block_table": (FIRST, problem.batch, 1)}[name]
        else:  # neither is read
            count = self.sizes["counts"]
            found = {"seqlens_k": ("counts", count), "block_table": ("counts", 1, count)}[name]
        return View.contiguous(found[0], torch.int32, *found[1:])

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
        if self.of_ends:
            found |= zip((FIRST, KEYS), self.of_mask(inputs, masks.own_keys, page_rows(self.problem.k)), strict=True)
        return found
