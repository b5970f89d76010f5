"""The launch of latent attention over keys that each query selected: a query is a sequence of its own, its sorted entries are its table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tilewise.backends.base import Inputs, Output, has_no_pair, output_of_no_pair
from tilewise.backends.hopper.config import strides_addressable
from tilewise.backends.hopper.host import masks
from tilewise.backends.hopper.host.draft import Draft, View, flattens
from tilewise.backends.hopper.host.forward_call import ForwardPlan
from tilewise.backends.hopper.host.latent_call import LatentPlan
from tilewise.backends.hopper.latent import selected
from tilewise.caching import cached_property
from tilewise.selections import keys_of_entry


@dataclass(eq=False)
class SelectedPlan(LatentPlan):
    """The decisions for one problem."""

    CHOICE = selected

    @property
    def sees_nothing(self) -> bool:
        return has_no_pair(self.problem) or 0 in self.problem.output_shapes[0]

    @cached_property
    def numbers(self) -> dict[str, int | float]:
        return super().numbers | {"block": keys_of_entry(self.problem.spec.region.predicate)[0]}

    @cached_property
    def copied(self) -> tuple[str, ...]:
        p = self.problem

        def served(x: Any) -> bool:
            return (p.packed or flattens(x)) and strides_addressable(x.shape, x.stride)

        return tuple(name for name, x in (("q", p.q), ("k", p.k)) if not served(x))

    def drafted_rows(self, draft: Draft) -> tuple[View, ...]:
        q, k, *rest = super().drafted_rows(draft)
        return q, (k if self.problem.packed else k.flatten(0, 1)).unsqueeze(1), *rest  # pages of single rows

    def beside(self, draft: Draft) -> dict[str, Any]:
        return ForwardPlan.beside(self, draft) | {"num_pages": 0}

    def tensors(self, inputs: Inputs) -> dict[str, Tensor]:
        found, leaf = super().tensors(inputs), inputs.leaves[self.problem.spec.region.predicate.args[0][1]]
        read = [*self.mask_leaves(inputs), inputs.cu_seqlens_q, inputs.cu_seqlens_k]
        lines = self.made.of("lines", [x for x in read if x is not None], lambda: masks.lines(self.problem, inputs))
        return found | {"entries": leaf.flatten(0, 2), "tokens": lines}

    def forward(self, inputs: Inputs) -> Output:
        return output_of_no_pair(self.problem, inputs) if self.launches is None else super().forward(inputs)
