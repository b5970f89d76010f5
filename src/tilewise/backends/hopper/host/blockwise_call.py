"""The calls of selected blocks of keys, which run as packed sequences (:mod:`tilewise.backends.blockwise`)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tilewise.backends.base import Grads, Inputs, Output, PerProblem
from tilewise.backends.blockwise import Blockwise, blocks_of
from tilewise.backends.hopper.host.plan import Plan
from tilewise.problem import Problem


@dataclass(eq=False)
class BlockwisePlan(Plan):
    """The decisions for one problem's forward or backward."""

    way: Blockwise

    @classmethod
    def of(cls, problem: Problem, plans: PerProblem) -> BlockwisePlan:
        """The plan of a problem; ``plans``: of packed ones."""
        return cls(
            problem,
            Blockwise(
                problem,
                blocks_of(problem),
                lambda p, t: plans.of(p).forward(t),
                lambda p, *given: plans.of(p).backward(*given),
            ),
        )

    def forward(self, inputs: Inputs) -> Output:
        return self.way.forward(inputs)

    def backward(self, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        return self.way.backward(inputs, out, do, dlse)
