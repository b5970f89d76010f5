"""The calls that run piece by piece (:mod:`tilewise.backends.hopper.pieces`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tilewise.backends import blockwise
from tilewise.backends.base import Grads, Inputs, Output, PerProblem, PerTensors
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.host.backward_call import BackwardPlan
from tilewise.backends.hopper.host.forward_call import ForwardPlan
from tilewise.backends.hopper.host.plan import Plan
from tilewise.backends.hopper.pieces import cut, gathers
from tilewise.backends.piecewise import Piecewise
from tilewise.caching import cached_property
from tilewise.problem import Problem


class NothingKept(PerTensors):
    """Memory of nothing: bits are freed once a piece has read them."""

    def of(self, key: Any, tensors: Sequence[Tensor], make: Callable[[], Any]) -> Any:
        return make()


@dataclass(eq=False)
class PiecewisePlan(Plan):
    """The decisions for one problem's forward or backward, which runs piece by piece. ``plans``: of packed problems."""

    config: Config | Backward
    plans: PerProblem | None = None

    @classmethod
    def of(cls, problem: Problem, decided: tuple[Config | Backward, PerProblem]) -> PiecewisePlan:
        """The plan of a problem, by its config and the plans of packed ones."""
        return cls(problem, *decided)

    @cached_property
    def whole(self) -> Piecewise:
        if gathers(self.problem, self.config):
            of = self.plans.of
            return blockwise.by_blocks(
                self.problem, lambda p, t: of(p).forward(t), lambda p, *given: of(p).backward(*given)
            )
        return Piecewise(self.problem, lambda p, _: cut(p, self.config), self._reading_bits)

    def _reading_bits(self, piece: Problem) -> ForwardPlan | BackwardPlan:
        plan = BackwardPlan if isinstance(self.config, Backward) else ForwardPlan
        return plan(piece, self.config, made=NothingKept())

    def forward(self, inputs: Inputs) -> Output:
        return self.whole.forward(inputs)

    def backward(self, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        return self.whole.backward(inputs, out, do, dlse)
