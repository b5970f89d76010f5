"""Attention in native C++ on the CPU: tiles nested for registers, L1 and L2, forward and backward.

ctypes loads the library, which depends on neither Python nor torch. Its code is in ``native/``, one file a job. ``config`` describes tiles,
``call`` makes the struct of a call, ``program`` turns masks and scores into instructions, and ``library`` finds and runs the code.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tilewise import state
from tilewise.backends.base import (
    Backend,
    Directions,
    Grads,
    Inputs,
    Output,
    PerProblem,
    empty_output,
    piece_reasons,
    unknown_operations,
)
from tilewise.backends.cpu import gathered, library, program
from tilewise.backends.cpu.call import Bound, Decided, LeafSums, Prepared
from tilewise.backends.cpu.config import Config
from tilewise.problem import Problem


class Cpu(Backend):
    """The backend.

    Args:
        override: a Config for every problem, instead of the one chosen by shape.
        isa: the instruction set, instead of the best one or that of ``TILEWISE_CPU_ISA``.
    """

    name = "cpu"

    def __init__(self, override: Config | None = None, isa: str | None = None):
        self.override, self.isa = override, isa
        self._prepared = PerProblem(lambda p: Prepared(p, self._decided(p)), lambda p: (Prepared, self._decided(p)))

    def _decided(self, p: Problem) -> Decided:
        if self.override is not None:
            return Decided.of(p, self.override.isa, self.override, self.override.gathered)
        selects = gathered.serves(p) and not p.spec.everywhere
        return Decided.of(p, self.isa or library.chosen_isa(), selects=selects)

    def unsupported(self, p: Problem) -> list[str]:
        reasons = []
        if p.device.type != "cpu":
            reasons.append(f"runs on cpu, q is on {p.device.type}")
        loaded = library.load()
        if isinstance(loaded, str):
            reasons.append(loaded)
        else:
            reasons += unknown_operations(p, {*loaded.operations, *program.LOWERED})
        reasons += piece_reasons(p, dropout=1)
        if p.seqlen_q > library.LONGEST or p.seqlen_k > library.LONGEST:
            reasons.append(f"more than {library.LONGEST} queries or keys: the ends of masks are 32-bit numbers")
        if p.paged and any(x.stride[-1] != 1 and x.shape[-1] > 1 for x in (p.k, p.v)):
            reasons.append("pages whose last stride is not 1: it would copy all of them")
        if p.quantised:
            reasons.append("pages of float8_e4m3fn: its kernels read no 8-bit numbers")
        if program.too_many_dimensions(p.spec):
            reasons.append(f"a mask or score tensor has more than {library.DIMS} dimensions")
        slots = (*p.spec.mask_slots, *p.spec.score_slots)
        strange = sorted({str(p.extras[n].dtype) for n in slots if p.extras[n].dtype not in library.TYPES})
        reasons += [f"a mask or score tensor is {dtype}" for dtype in strange]
        return reasons

    def no_order(self, p: Problem) -> list[str]:
        loaded = library.load()
        return [loaded] if isinstance(loaded, str) else []

    def config(self, p: Problem) -> Config:
        return self.override or Prepared(p, self._decided(p)).config()

    def tile(self, p: Problem) -> tuple[int, int]:
        return self._prepared.of(p).tile(backward=False)

    def forward(self, p: Problem, t: Inputs) -> Output:
        out = empty_output(p, t.q, t.v)
        if self._prepared.of(p).decided.gathered:
            gathered.forward(p, t, out, self._forward)
        else:
            self._forward(p, t, out)
        return out

    def _forward(self, p: Problem, t: Inputs, out: Output) -> None:
        if p.packed:  # rows past the last sequence
            out.o.zero_()
            for x in out.tensors[1:]:
                x.fill_(-torch.inf)
        bound = Bound(self._prepared.of(p), t, backward=False)
        bound.call.o, bound.call.lse = bound.tensor(out.o), out.lse.data_ptr()
        if out.max_logit is not None:
            bound.call.max_logit = out.max_logit.data_ptr()
        bound.run("forward")

    def backward(self, p: Problem, t: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        if self._prepared.of(p).decided.gathered:
            *grads, delta = gathered.backward(p, t, out, do, dlse, self._prepared.of)
            return Grads(*grads, _sink_gradient(t, out.lse, delta), {})
        bound = Bound(self._prepared.of(p), t, backward=True)
        call, lse = bound.call, out.lse
        sums = LeafSums.plan(p, t.leaves, bound.code, call.shares)
        sums.bind(bound)
        new = torch.zeros_like if p.packed else torch.empty_like  # rows outside every sequence get zero
        summed = torch.zeros_like if p.dtype == p.compute_dtype else new  # a 16-bit dq is summed elsewhere
        dq, dk, dv = (f(x, memory_format=torch.contiguous_format) for f, x in ((summed, t.q), (new, t.k), (new, t.v)))
        delta = torch.zeros_like(lse)
        call.o, call.lse, call.dout = bound.tensor(out.o), bound.data(lse), bound.tensor(do)
        call.dq, call.dk, call.dv = bound.tensor(dq), bound.tensor(dk), bound.tensor(dv)
        call.dlse, call.delta = bound.data(dlse.to(lse.dtype)), delta.data_ptr()
        bound.run("backward")
        return Grads(dq, dk, dv, _sink_gradient(t, lse, delta), sums.result(t.leaves))

    def without_tangents(self, p: Problem, second: bool) -> list[str]:
        if second:
            return ["second derivatives are not built"]
        return ["a cache in pages has no tangents"] if p.paged else []

    def jvp(self, p: Problem, t: Inputs, out: Output, along: Directions) -> Output:
        new = torch.zeros_like if p.packed else torch.empty_like  # rows outside every sequence get zero
        found = Output(new(out.o), new(out.lse))
        inputs = replace(t, leaves=along.with_leaves(t.leaves))
        bound = Bound(self._prepared.of(p), inputs, backward=False, moving=along.slots)
        bound.call.o, bound.call.lse = bound.tensor(out.o), bound.data(out.lse)
        moved = library.Moved(o=bound.tensor(found.o), lse=found.lse.data_ptr())
        for name in "qkv":
            if (tangent := getattr(along, name)) is not None:
                setattr(moved, name, bound.tensor(tangent))
        if along.sink is not None:
            moved.sink = bound.data(along.sink.to(p.compute_dtype))
        if bound.code.moved is not None:
            moved.raw = bound.code.moved.register
        bound.run("jvp", moved)
        return found


def _sink_gradient(t: Inputs, lse: Tensor, delta: Tensor) -> Tensor | None:
    if t.sink is None:
        return None
    rows = state.sink_gradient(t.sink.to(lse.dtype).view(-1, 1), lse, delta)
    return rows.sum(-1).view(-1, t.sink.shape[0]).sum(0).to(t.sink.dtype)
