"""The launch of a decoding step: a few queries a sequence, over pages, or over dense keys as if each sequence had one page.

Where tensors say which keys a sequence's query sees, dense keys are a pool whose pages are single rows, and a sequence has one number in
its table, that of the first row that it sees: what follows lies behind it (docs/decisions.md#hopper-decoding).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewise import sizes
from tilewise.backends.hopper.decoding.choice import ONE_SEGMENT, ends, reads_ends, segment_of, shares_of
from tilewise.backends.hopper.forward.paged_config import page_rows
from tilewise.backends.hopper.host import masks
from tilewise.backends.hopper.host.draft import Draft, View
from tilewise.backends.hopper.host.paged_call import PagedPlan
from tilewise.backends.hopper.host.plan import LaunchPlan
from tilewise.caching import cached_property
from tilewise.planning.planner import Making

KEYS = "own_keys"  # of :func:`masks.own_keys`


@dataclass(eq=False)
class DecodingPlan(PagedPlan):
    """The decisions for one problem with a few queries a sequence."""

    DECIDED = LaunchPlan.DECIDED

    @cached_property
    def segment(self) -> int:
        return segment_of(self.problem, self.config.tiles.tile_n)

    @cached_property
    def parts(self) -> int:
        """How many shares a key head's keys have, or at most how many segments."""
        return shares_of(self.problem, self.segment, self.config.tiles.tile_n)

    @cached_property
    def numbers(self) -> dict[str, int | float]:
        problem, (lo, hi) = self.problem, ends(self.problem)
        cached = int(problem.paged or reads_ends(problem))
        # No more CTAs than multiprocessors: each takes every n-th segment, and of those of a wide table most do not exist.
        shares = sizes.smaller(self.parts, shares_of(problem, 1, self.config.tiles.tile_n))
        found = {"shares": shares, "segment": self.segment, "cached": cached, "lo": lo, "hi": hi}
        return found | dict(zip(("scale2", "cap2"), self.scales, strict=True)) | self.numbers_beside

    def by_rows(self, x: View) -> View:
        return x.permute(1, 0, 2, 3)  # (query, sequence, head, column): the kernel takes any strides

    def lse_by_rows(self, lse: View, draft: Draft) -> View:
        return lse.permute(2, 1, 0)  # (query, head, sequence)

    @property
    def sizes(self) -> dict[str, int]:
        problem = self.problem
        states = self.parts * problem.heads_k * (2 if self.segment == 1 else 1)
        states = 1 if self.segment == ONE_SEGMENT else states  # which no sequence leaves then
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
            first = View.contiguous(KEYS, torch.int32, problem.batch, 1)
            return first if name == "block_table" else View(KEYS, torch.int32, first.shape[:1], (1,), problem.batch)
        count = self.sizes["counts"]  # neither is read
        return View.contiguous("counts", torch.int32, *((1,) if name == "block_table" else ()), count)

    @cached_property
    def keeps(self) -> tuple[str, ...]:
        return (KEYS,) if reads_ends(self.problem) else ()

    @cached_property
    def makings(self) -> tuple[Making, ...]:
        return (masks.making(self.problem, "own_keys", page_rows(self.problem.k), masks.own_keys),)
