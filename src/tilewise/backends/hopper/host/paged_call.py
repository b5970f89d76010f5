"""The launch of a forward over pages: its queries as packed ones, the pools of keys and values as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.base import Output
from tilewise.backends.hopper.config import strides_addressable
from tilewise.backends.hopper.forward.paged_config import page_rows
from tilewise.backends.hopper.host.draft import Draft, View, flattens
from tilewise.backends.hopper.host.forward_call import ForwardPlan
from tilewise.caching import cached_property
from tilewise.gather import statistic_in_layout_of
from tilewise.planning.planner import Making


@dataclass(eq=False)
class PagedPlan(ForwardPlan):
    """The decisions for one problem whose keys lie in pages."""

    PRODUCTS = ()

    @property
    def sees_nothing(self) -> bool:
        return 0 in self.problem.output_shapes[0]

    @cached_property
    def copied(self) -> tuple[str, ...]:
        q = self.problem.q
        if not self.problem.packed and not flattens(q):
            return ("q",)
        rows = self.by_rows(View.of("q", q))
        return () if strides_addressable(rows.shape, rows.strides) else ("q",)

    def drafted_rows(self, draft: Draft) -> tuple[View, ...]:
        o_shape, lse_shape = self.problem.output_shapes
        o = draft.result("o", self.problem.dtype, *o_shape)
        lse = self.lse_by_rows(draft.result("lse", torch.float32, *lse_shape), draft)
        q, k, v = map(self.view, "qkv")
        return self.by_rows(q), k, v, self.by_rows(o), lse

    def by_rows(self, x: View) -> View:
        """q or o as the kernel takes it, packed: the rows of a batch lie one sequence after the other."""
        return (x if self.problem.packed else x.flatten(0, 1)).unsqueeze(0)

    def lse_by_rows(self, lse: View, draft: Draft) -> View:
        """The output's lse as (1, heads_q, row of q), or memory from which it is to be copied."""
        problem = self.problem
        rows = problem.seqlen_q if problem.packed else problem.batch * problem.seqlen_q
        shape = 1, problem.heads_q, rows
        if problem.packed or problem.batch == 1:
            return View.contiguous(lse.memory, lse.dtype, *shape)
        return draft.result("lse_by_rows", lse.dtype, *shape)

    def beside(self, draft: Draft) -> dict[str, Any]:
        pool = {"num_pages": self.problem.k.shape[0], "page_rows": page_rows(self.problem.k)}
        views = {name: self.extra_view(name, n) for n, name in enumerate(("block_table", "seqlens_k"))}
        return super().beside(draft) | pool | views

    def extra_view(self, name: str, n: int) -> View:
        """The table, or the lengths: the n-th of the tensors of a cache."""
        return View.of(name, self.problem.extras[self.problem.spec.page_slots[n]])

    @cached_property
    def keeps(self) -> tuple[str, ...]:
        return () if self.problem.packed or "cu_q" not in self.reads else ("cu_q",)

    @cached_property
    def makings(self) -> tuple[Making, ...]:
        return (self.starts,)

    def starts(self, extras: Sequence[Tensor], device: torch.device) -> Tensor:
        """The first row of each sequence, and behind the last, where all have as many."""
        step, last = self.problem.seqlen_q, self.problem.batch * self.problem.seqlen_q
        return torch.arange(0, last + 1, step, dtype=torch.int32, device=device)

    @property
    def result_is_made(self) -> bool:
        return any(name == "lse_by_rows" for name, _ in self.launches.made)

    def output(self, made: Mapping[str, Tensor]) -> Output:
        if "lse_by_rows" in made:
            made["lse"].copy_(statistic_in_layout_of(self.problem, made["lse_by_rows"][0]))
        return super().output(made)
