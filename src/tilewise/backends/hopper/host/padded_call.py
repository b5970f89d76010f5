"""The calls of padded batches, which run as packed sequences (:mod:`tilewise.backends.hopper.padding`)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tilewise.backends.base import Grads, Inputs, Output, PerProblem
from tilewise.backends.hopper import padding
from tilewise.backends.hopper.host.backward_call import BackwardPlan
from tilewise.backends.hopper.host.forward_call import ForwardPlan
from tilewise.backends.hopper.host.plan import Plan
from tilewise.problem import Problem


@dataclass(eq=False)
class PaddedPlan(Plan):
    """The decisions for one padded problem: ``packed`` is the plan of the packed problem that it equals."""

    packed: ForwardPlan | BackwardPlan

    @classmethod
    def of(cls, problem: Problem, plans: PerProblem) -> PaddedPlan:
        """The plan of a padded problem; ``plans``: of packed ones."""
        return cls(problem, plans.of(padding.as_packed(problem)))

    def inputs(self, inputs: Inputs) -> Inputs:
        """The tensors of the packed problem."""
        return padding.packed_inputs(inputs, self.of_mask(inputs, padding.starts))

    def forward(self, inputs: Inputs) -> Output:
        out, p = self.packed.forward(self.inputs(inputs)), self.problem
        return Output(out.o.view(p.output_shapes[0]), padding.by_batch(p, out.lse))

    def backward(self, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        p = self.problem
        rows = Output(out.o.flatten(0, 1), padding.by_heads(p, out.lse))
        found = self.packed.backward(self.inputs(inputs), rows, do.flatten(0, 1), padding.by_heads(p, dlse))
        grads = (
            x.view(y.shape) for x, y in zip((found.dq, found.dk, found.dv), (inputs.q, inputs.k, inputs.v), strict=True)
        )
        return Grads(*grads, found.sink, {})
