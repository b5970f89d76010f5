"""The memory that a call writes beside its outputs: partial states, gradients, statistics of rows, and sheets of dS."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.backends.base import Inputs, Output
from tilewise.backends.triton.host.plan import Plan
from tilewise.backends.triton.sheet import SHEET_STRIP, SHEET_UNIT
from tilewise.problem import Problem

PADDING = 256  # rows that the pass over key tiles may read past the last one: a tile


def partial_states(out: Output, num_splits: int) -> Output:
    """Memory for the states of each split of the keys, in fp32."""
    return Output(*[torch.empty((num_splits, *x.shape), dtype=torch.float32, device=x.device) for x in out.tensors])


def seqlen_q_rounded(problem: Problem) -> int:
    """Rows from one head to the next in the statistics: each head begins at a multiple of 16 bytes, as descriptors ask."""
    return problem.seqlen_q if problem.packed else -(-problem.seqlen_q // 4) * 4


def statistics_rows(problem: Problem) -> int:
    """Numbers of each of the statistics of all rows: delta starts at a multiple of 16 bytes, behind lse."""
    rows = seqlen_q_rounded(problem) * problem.heads_q * problem.batch_dim
    return -(-(rows + PADDING) // 4) * 4


@dataclass
class BackwardBuffers:
    """The tensors that a backward writes.

    Attributes:
        dq, dk, dv: the gradients.
        statistics: (2, rows of all heads) fp32: lse in base 2, and below it delta.
        parts: dK and dV of each part of a group's heads, fp32 (group_parts, *); None where a program has the group.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    statistics: Tensor
    parts: tuple[Tensor, Tensor] | None = None

    @classmethod
    def empty(cls, problem: Problem, inputs: Inputs, group_parts: int = 1) -> BackwardBuffers:
        gradients = (x.new_empty(x.shape) for x in (inputs.q, inputs.k, inputs.v))
        buffers = cls(*gradients, inputs.q.new_empty((2, statistics_rows(problem)), dtype=torch.float32))
        if group_parts > 1:
            of_parts = (x.new_empty((group_parts, *x.shape), dtype=torch.float32) for x in (inputs.k, inputs.v))
            buffers.parts = tuple(of_parts)
        return buffers

    @property
    def over_keys(self) -> tuple[Tensor, Tensor]:
        """The tensors that passes over key tiles write: dK and dV, or those of each part of a group's heads."""
        return self.parts or (self.dk, self.dv)

    def delta(self, problem: Problem) -> Tensor:
        """The deltas, in lse's shape."""
        stride = seqlen_q_rounded(problem)
        shape = (problem.heads_q, stride) if problem.packed else (problem.batch, problem.heads_q, stride)
        return self.statistics[1, : math.prod(shape)].view(shape)[..., : problem.seqlen_q]


def sheet_shape(plan: Plan) -> tuple[int, ...]:
    """The shape of a part of dS: (batch, heads, strips, keys, queries of a strip)."""
    problem, part = plan.problem, plan.sheet[0]  # no later part is larger
    strips = -(-problem.seqlen_q // SHEET_UNIT) * SHEET_UNIT // SHEET_STRIP
    return part.batches, part.heads * problem.group, strips, part.keys, SHEET_STRIP


def new_sheet(plan: Plan, q: Tensor) -> dict[str, Tensor | None]:
    """Memory for a part of dS, and of P, and in fp32 for the sum of dQ that earlier parts of the keys make, laid out as dQ."""
    if not plan.sheet:
        return {}
    sums = q.new_empty(q.shape, dtype=torch.float32) if plan.sheet[-1].first_key > 0 else None
    names = ("sheet", "p_sheet") if plan.keeps_pairs else ("sheet",)
    sheets = {name: q.new_empty(sheet_shape(plan), dtype=plan.problem.dtype) for name in names}
    return sheets | {"dq_sums": sums}
