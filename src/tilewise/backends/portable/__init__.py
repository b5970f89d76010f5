"""Attention in plain PyTorch, tile by tile: linear memory on every device torch knows.

``config`` chooses tiles, ``step`` walks over the call, and ``forward``, ``backward`` and ``tangent`` (forward mode and second derivatives)
compute a tile. Scores, statistics and sums are fp32 (fp64 for fp64). On an accelerator the tile map and ``cu_seqlens`` are read back to
the host, once a call and once a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise import gather, state
from tilewise.backends.base import Backend, Directions, Grads, Inputs, Output, OutputGrads, empty_output, piece_reasons
from tilewise.backends.portable.backward import backward_step
from tilewise.backends.portable.config import Config, choose
from tilewise.backends.portable.forward import forward_step
from tilewise.backends.portable.step import refuse_capture, row_sums, steps
from tilewise.backends.portable.tangent import RowTangents, backward_tangent_step, tangent_step
from tilewise.problem import Problem


class Portable(Backend):
    """The backend.

    Args:
        override: a Config for every problem, instead of the one chosen by shape.
    """

    name = "portable"

    def __init__(self, override: Config | None = None):
        self.override = override

    def unsupported(self, p: Problem) -> list[str]:
        return piece_reasons(p, dropout=1)

    def slow(self, p: Problem) -> str:
        return "runs plain PyTorch"

    def no_order(self, p: Problem) -> list[str]:
        return []

    def config(self, p: Problem) -> Config:
        return self.override or choose(p)

    def tile(self, p: Problem) -> tuple[int, int]:
        return self.config(p).tile_m, self.config(p).tile_n

    def without_tangents(self, p: Problem, second: bool) -> list[str]:
        return ["a cache in pages has no tangents"] if p.paged else []

    def forward(self, p: Problem, t: Inputs) -> Output:
        if p.paged:
            refuse_capture(t.q)  # gathering reads on the host too
            return gather.in_layout_of(p, self._forward(*gather.gathered(p, t, p.compute_dtype), self.config(p)))
        return self._forward(p, t, self.config(p))

    def _forward(self, p: Problem, t: Inputs, config: Config) -> Output:
        out = empty_output(p, t.q, t.v)
        if p.packed:  # rows past the last sequence, and of a batch without sequences
            out.o.zero_()
            for x in out.tensors[1:]:
                x.fill_(-torch.inf)
        for step in steps(p, t, config):
            o, lse, largest = forward_step(step)
            if t.sink is not None:
                o, lse = state.add_sink(o, lse, t.sink.to(lse.dtype)[step.at[3]].view(-1, 1))
            step.rows_of(out.o)[:] = o.transpose(1, 2)
            step.statistic_of(out.lse)[:] = lse
            if out.max_logit is not None:
                step.statistic_of(out.max_logit)[:] = largest
        return out

    def backward(self, p: Problem, t: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        # Rows outside every sequence, and keys without queries, get zero.
        new = torch.empty_like if p.seqlen_q and not p.packed else torch.zeros_like
        dq, dk, dv = (new(x, memory_format=torch.contiguous_format) for x in (t.q, t.k, t.v))
        leaves = {n: _zeros(t.leaves[n], p.compute_dtype) for n in {e.args[0][1] for e in p.spec.lookups}}
        dsink = None if t.sink is None else _zeros(t.sink, p.compute_dtype)
        for step in steps(p, t, self.config(p)):
            step_do, lse = step.rows_of(do), step.statistic_of(out.lse)
            delta = _delta(p, step_do, step.rows_of(out.o), step.statistic_of(dlse))
            grads = step.rows_of(dq), step.keys_of(dk), step.keys_of(dv)
            backward_step(step, step_do, lse, delta, grads, leaves)
            if dsink is not None:
                heads = step.at[3]
                sink = t.sink.to(lse.dtype)[heads].view(-1, 1)
                dsink[heads] += state.sink_gradient(sink, lse, delta).sum((0, 2))
        leaves = {n: grad.to(t.leaves[n].dtype) for n, grad in leaves.items()}
        return Grads(dq, dk, dv, None if dsink is None else dsink.to(t.sink.dtype), leaves)

    def _tangent_config(self, p: Problem) -> Config:
        """Return the config for tangents, which hold about four times as many tiles of pairs as a forward."""
        return self.override or choose(p, share=4)

    def jvp(self, p: Problem, t: Inputs, out: Output, along: Directions) -> Output:
        moved = Output(torch.zeros_like(out.o), torch.zeros_like(out.lse))
        for step in steps(p, t, self._tangent_config(p)):
            part = Output(step.rows_of(out.o), step.statistic_of(out.lse))
            step.rows_of(moved.o)[:], step.statistic_of(moved.lse)[:] = tangent_step(step, part, along)
        return moved

    def backward_jvp(
        self, p: Problem, t: Inputs, out: Output, grad: OutputGrads, along: Directions, moved: Output
    ) -> Grads:
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (t.q, t.k, t.v))
        leaves = {n: _zeros(t.leaves[n], p.compute_dtype) for n in {e.args[0][1] for e in p.spec.lookups}}
        dsink = None if t.sink is None else _zeros(t.sink, p.compute_dtype)
        for step in steps(p, t, self._tangent_config(p)):
            rows = RowTangents.of(step, out, grad, moved)
            grads = step.rows_of(dq), step.keys_of(dk), step.keys_of(dv)
            backward_tangent_step(step, rows, along, grads, leaves)
            if dsink is not None:
                dsink[step.at[3]] += rows.sink_gradient(step, along.sink)
        leaves = {n: x.to(t.leaves[n].dtype) for n, x in leaves.items()}
        return Grads(dq, dk, dv, None if dsink is None else dsink.to(t.sink.dtype), leaves)


def _zeros(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros in the shape of ``x``, always contiguous, as the fake kernel promises."""
    return torch.zeros(x.shape, dtype=dtype, device=x.device)


def _delta(p: Problem, do: Tensor, o: Tensor, dlse: Tensor) -> Tensor:
    """Return ``rowsum(dO ∘ O) - dlse``: (batch, heads_q, seqlen_q)."""
    return row_sums(do.to(p.compute_dtype) * o, p.spec.everywhere).squeeze(-1).transpose(1, 2) - dlse
