"""The calls of padded batches, which run as packed sequences (:mod:`tilewise.backends.hopper.padding`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tilewise.backends.base import Grads, Inputs, Output, PerProblem, Saved
from tilewise.backends.hopper import padding
from tilewise.backends.hopper.host import masks
from tilewise.backends.hopper.host.backward_call import BackwardPlan
from tilewise.backends.hopper.host.forward_call import ForwardPlan
from tilewise.backends.hopper.host.plan import Plan
from tilewise.caching import cached_property
from tilewise.planning.planner import Making
from tilewise.problem import Problem


@dataclass(eq=False)
class PaddedPlan(Plan):
    """The decisions for one pass over a padded problem: ``packed`` is the plan of the packed problem that it equals."""

    packed: ForwardPlan | BackwardPlan

    @classmethod
    def of(cls, problem: Problem, plans: PerProblem) -> PaddedPlan:
        """The plan of a padded problem; ``plans``: of packed ones."""
        return cls(problem, plans.of(padding.as_packed(problem)))

    @property
    def direct(self) -> tuple[int, ...]:
        """The places of :attr:`tilewise.backends.hopper.host.plan.LaunchPlan.direct`."""
        return self.packed.direct

    @cached_property
    def making(self) -> Making:
        return masks.making(self.problem, "starts", padding.parts(self.problem), padding.starts)

    def starts(self, extras: Sequence[Tensor]) -> Sequence[Tensor]:
        """The first row and the first key of each sequence: int32."""
        return self.of_leaves("starts", extras, lambda *of: self.making(*of).unbind())

    def inputs(self, inputs: Inputs) -> Inputs:
        """The tensors of the packed problem."""
        return padding.packed_inputs(inputs, self.starts(inputs.leaves))


@dataclass(eq=False)
class PaddedForward(PaddedPlan):
    """The decisions for the forward of a padded problem."""

    packed: ForwardPlan

    def of_memory(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], lse: bool, seed: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """The forward by that of the packed problem (:meth:`tilewise.backends.hopper.host.forward_call.ForwardPlan.of_memory`)."""
        found = self.packed.of_memory(q, k, v, (*extras, *self.starts(extras)), lse, seed)
        if found is None:
            return None
        o, of_rows = found
        return o.view(self.problem.output_shapes[0]), padding.by_batch(self.problem, of_rows) if lse else None

    def forward(self, inputs: Inputs) -> Output:
        out, p = self.packed.forward(self.inputs(inputs)), self.problem
        return Output(out.o.view(p.output_shapes[0]), padding.by_batch(p, out.lse))


@dataclass(eq=False)
class PaddedBackward(PaddedPlan):
    """The decisions for the backward of a padded problem."""

    packed: BackwardPlan

    def gradients_of_memory(
        self, do: Tensor, dlse: Tensor | None, saved: Saved
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """The backward by that of the packed problem, None where it has none
        (:class:`tilewise.backends.hopper.host.backward_call.BackwardPlan`)."""
        q, k, v, *extras, seed, o, lse = saved
        p = self.problem
        rows, dlse = padding.by_heads(p, lse), None if dlse is None else padding.by_heads(p, dlse)
        every = q, k, v, *extras, *self.starts(extras), seed, o, rows
        found = self.packed.gradients_of_memory(do.flatten(0, 1), dlse, every)
        if found is None:
            return None
        dq, dk, dv = found
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)

    def backward(self, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        p = self.problem
        rows = Output(out.o.flatten(0, 1), padding.by_heads(p, out.lse))
        found = self.packed.backward(self.inputs(inputs), rows, do.flatten(0, 1), padding.by_heads(p, dlse))
        grads = (
            x.view(y.shape) for x, y in zip((found.dq, found.dk, found.dv), (inputs.q, inputs.k, inputs.v), strict=True)
        )
        return Grads(*grads, found.sink, {})
