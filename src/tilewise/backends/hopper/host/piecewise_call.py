"""The calls whose masks have more bits than may lie in memory at a time, piece by piece (:mod:`tilewise.backends.hopper.pieces`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.base import Grads, Inputs, Output, PerProblem, PerTensors
from tilewise.backends.blockwise import Blockwise
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.host.backward_call import BackwardPlan
from tilewise.backends.hopper.host.forward_call import ForwardPlan
from tilewise.backends.hopper.host.plan import Plan
from tilewise.backends.hopper.pieces import Cut, cuts, gathers, problem_of, take
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
    def pieces(self) -> list[tuple[Cut, ForwardPlan | BackwardPlan | Blockwise]]:
        """The pieces in order, each with its plan."""
        gather = gathers(self.problem, self.config)
        plan = self._gathering if gather else self._reading_bits
        return [(cut, plan(problem_of(self.problem, cut))) for cut in cuts(self.problem, self.config)]

    def _reading_bits(self, piece: Problem) -> ForwardPlan | BackwardPlan:
        plan = BackwardPlan if isinstance(self.config, Backward) else ForwardPlan
        return plan(piece, self.config, made=NothingKept())

    def _gathering(self, piece: Problem) -> Blockwise:
        of = self.plans.of
        return Blockwise(piece, lambda p, t: of(p).forward(t), lambda p, *given: of(p).backward(*given))

    def inputs(self, given: Inputs, cut: Cut, plan: Plan | Blockwise) -> Inputs:
        """The tensors of a piece."""
        extras = [take(x, spans) for x, spans in zip(given.leaves, cut.of_extras(self.problem), strict=True)]
        q, k, v = take(given.q, cut.of_q), take(given.k, cut.of_k), take(given.v, cut.of_k)
        return Inputs.of(plan.problem, q, k, v, extras, None)

    def forward(self, inputs: Inputs) -> Output:
        o, lse = (
            inputs.q.new_empty(shape, dtype=dtype)
            for shape, dtype in zip(
                self.problem.output_shapes, (self.problem.dtype, self.problem.compute_dtype), strict=True
            )
        )
        for cut, plan in self.pieces:
            found = plan.forward(self.inputs(inputs, cut, plan))
            take(o, cut.of_q).copy_(found.o)
            take(lse, cut.of_rows).copy_(found.lse)
        return Output(o, lse)

    def backward(self, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        p = self.problem
        dq, dk, dv = (x.new_empty(x.shape) for x in (inputs.q, inputs.k, inputs.v))
        sink = None if inputs.sink is None else torch.zeros_like(inputs.sink, dtype=p.compute_dtype)
        for _, same in groupby(self.pieces, lambda piece: piece[0].heads + piece[0].batch):
            of_heads = list(same)
            whole = of_heads[0][0]._replace(end=p.seqlen_k)
            # Of one piece alone nothing is added up.
            wide = p.compute_dtype if len(of_heads) > 1 else p.dtype
            sums = [torch.zeros_like(take(x, whole.of_k), dtype=wide) for x in (dk, dv)]
            for cut, plan in of_heads:
                found = self.gradients(inputs, out, (do, dlse), cut, plan)
                take(dq, cut.of_q).copy_(found.dq)
                for total, part in zip(sums, (found.dk, found.dv), strict=True):
                    total[:, : cut.end] += part
                if sink is not None:
                    take(sink, cut.of_extras(p)[p.spec.sink_slot]).add_(found.sink)
            for x, total in zip((dk, dv), sums, strict=True):
                take(x, whole.of_k).copy_(total)
        return Grads(dq, dk, dv, None if sink is None else sink.to(inputs.sink.dtype), {})

    def gradients(
        self, inputs: Inputs, out: Output, given: tuple[Tensor, Tensor], cut: Cut, plan: BackwardPlan
    ) -> Grads:
        """The gradients of a piece; ``given``: those of o and lse."""
        do, dlse = given
        own = Output.of(take(out.o, cut.of_q), take(out.lse, cut.of_rows))
        rows = take(dlse, cut.of_rows).contiguous()
        return plan.backward(self.inputs(inputs, cut, plan), own, take(do, cut.of_q), rows)
