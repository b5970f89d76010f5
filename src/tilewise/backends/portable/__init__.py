"""Attention in plain PyTorch, tile by tile: linear memory on every device torch knows.

Scores, statistics and sums are fp32 (fp64 for fp64). On an accelerator the tile map and ``cu_seqlens`` are read back to
the host, once a call and once a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise import gather, state
from tilewise.backends.base import Backend, Grads, Inputs, Output, empty_output, piece_reasons
from tilewise.backends.portable.backward import backward_step
from tilewise.backends.portable.config import Config, choose
from tilewise.backends.portable.forward import forward_step
from tilewise.backends.portable.step import Step, steps
from tilewise.problem import Problem


class Portable(Backend):
    """The backend.

    Args:
        override: a Config to use for every problem, in place of the one chosen by shape.
    """

    name = "portable"

    def __init__(self, override: Config | None = None):
        self.override = override

    def unsupported(self, p: Problem) -> list[str]:
        return piece_reasons(p, dropout=True)

    def config(self, p: Problem) -> Config:
        return self.override or choose(p)

    def forward(self, p: Problem, t: Inputs) -> Output:
        if p.paged:
            return gather.in_layout_of(p, self._forward(*gather.gathered(p, t), self.config(p)))
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
            _rows_of(step, out.o)[:] = o.transpose(1, 2)
            _statistic_of(step, out.lse)[:] = lse
            if out.max_logit is not None:
                _statistic_of(step, out.max_logit)[:] = largest
        return out

    def backward(self, p: Problem, t: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        # Rows outside every sequence, and keys without queries, get zero.
        new = torch.empty_like if p.seqlen_q and not p.packed else torch.zeros_like
        dq, dk, dv = (new(x, memory_format=torch.contiguous_format) for x in (t.q, t.k, t.v))
        leaves = {n: _zeros(t.leaves[n], p.compute_dtype) for n in {e.args[0][1] for e in p.spec.lookups}}
        dsink = None if t.sink is None else _zeros(t.sink, p.compute_dtype)
        for step in steps(p, t, self.config(p)):
            step_do, lse = _rows_of(step, do), _statistic_of(step, out.lse)
            delta = _delta(step_do, _rows_of(step, out.o), _statistic_of(step, dlse), p.compute_dtype)
            grads = _rows_of(step, dq), _keys_of(step, dk), _keys_of(step, dv)
            backward_step(step, step_do, lse, delta, grads, leaves)
            if dsink is not None:
                heads = step.at[3]
                sink = t.sink.to(lse.dtype)[heads].view(-1, 1)
                dsink[heads] += state.sink_gradient(sink, lse, delta).sum((0, 2))
        leaves = {n: grad.to(t.leaves[n].dtype) for n, grad in leaves.items()}
        return Grads(dq, dk, dv, None if dsink is None else dsink.to(t.sink.dtype), leaves)


def _zeros(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous, whatever the strides of ``x``: what the fake kernel promises."""
    return torch.zeros(x.shape, dtype=dtype, device=x.device)


def _delta(do: Tensor, o: Tensor, dlse: Tensor, dtype: torch.dtype) -> Tensor:
    """``rowsum(dO ∘ O) - dlse``: (batch, heads_q, seqlen_q)."""
    return (do.to(dtype) * o).sum(-1).transpose(1, 2) - dlse


def _rows_of(step: Step, x: Tensor) -> Tensor:
    """A step's part of a tensor laid out as q, ``(batch, seqlen_q, heads_q, ...)``."""
    batch, rows, _, heads_q, _ = step.at
    return x[None, rows, heads_q] if step.p.packed else x[batch, :, heads_q]


def _keys_of(step: Step, x: Tensor) -> Tensor:
    """A step's part of a tensor laid out as k."""
    batch, _, keys, _, heads_k = step.at
    return x[None, keys, heads_k] if step.p.packed else x[batch, :, heads_k]


def _statistic_of(step: Step, x: Tensor) -> Tensor:
    """A step's part of a tensor laid out as lse, ``(batch, heads_q, seqlen_q)``."""
    batch, rows, _, heads_q, _ = step.at
    return x[None, heads_q, rows] if step.p.packed else x[batch, heads_q]
