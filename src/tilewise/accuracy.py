"""The error rule: a result may be as wrong as rounding makes eager attention in the same dtype, and hardly more.

With ``e_r = ‖x_r - oracle_r‖ / max(‖oracle_r‖, a tenth of the RMS row norm)`` over the rows r of a tensor, and u the dtype's
unit roundoff: ``rms(e_r) <= 2 · eager's + u / 2`` and ``max |x - oracle| <= 2 · eager's + u · max |oracle|``. The oracle is
Algorithm 0 in float64 on the same rounded inputs; eager is Algorithm 0 in the dtype at hand, its error the largest over
``ORDERS`` equally good orders of computation (:class:`tilewise.reference.Arithmetic`): on few numbers one order may be lucky.
lse and max_logit are always judged as fp32, on a GPU also beside its matrix units' scores of 16-bit inputs. For float64
eager's errors are those of fp32 times the ratio of the two roundoffs, and three of them are allowed, since the oracle itself
errs by one. Orders in which eager overflows (fp16) do not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilewise import gather, reference
from tilewise.backends.base import Grads, Inputs, Output
from tilewise.problem import Problem
from tilewise.reference import Arithmetic

ORDERS = 16


@dataclass(frozen=True)
class Error:
    """The errors of one tensor and of eager's, relative and largest, beside what the rule allows."""

    tensor: str
    rms: float
    rms_eager: float
    rms_allowed: float
    max: float
    max_allowed: float

    @property
    def ok(self) -> bool:
        return self.rms <= self.rms_allowed and self.max <= self.max_allowed  # NaN is not

    def __str__(self) -> str:
        return (
            f"{self.tensor}: rms {self.rms:.3g} (allowed {self.rms_allowed:.3g}), "
            f"max {self.max:.3g} (allowed {self.max_allowed:.3g})"
        )


def error_norms(x: Tensor, oracle: Tensor) -> tuple[float, float]:
    """``(rms over rows of the relative row error, largest absolute error)``; rows run along the last dimension.

    Infinities must stand where the oracle has them and count for nothing there.
    """
    return tuple(_norms(x, oracle).tolist())


def _norms(x: Tensor, oracle: Tensor) -> Tensor:
    """Return the two numbers of :func:`error_norms` in a tensor, left on their device: a process that reads a number waits for its GPU."""
    if oracle.numel() == 0:
        return torch.zeros(2, dtype=torch.float64, device=oracle.device)
    x, oracle = x.double(), oracle.double()
    same = torch.isinf(oracle) & (x == oracle)
    x, oracle = x.where(~same, 0.0), oracle.where(~same, 0.0)
    width = oracle.shape[-1] if oracle.ndim else 1
    rows, norms = (t.reshape(-1, width).norm(dim=-1) for t in (x - oracle, oracle))
    floor = 0.1 * norms.square().mean().sqrt()
    relative = torch.where(rows == 0, 0.0, rows / torch.maximum(norms, floor))
    return torch.stack([relative.square().mean().sqrt(), (x - oracle).abs().max()])


@dataclass(frozen=True)
class Scale:
    """The measure of one tensor: eager's errors, the largest over the orders, and ``max |oracle|``."""

    rms: float
    max: float
    size: float

    @classmethod
    def of(cls, oracle: Tensor, eager: Sequence[Tensor]) -> Scale:
        found = torch.stack([_norms(e, oracle) for e in eager]).tolist() if eager else []
        norms = [n for n in found if math.isfinite(sum(n))]
        rms, largest = (max([n[which] for n in norms], default=0.0) for which in (0, 1))
        finite = oracle.where(torch.isfinite(oracle), 0.0)
        return cls(rms, largest, finite.abs().max().item() if oracle.numel() else 0.0)


def judge(name: str, x: Tensor, oracle: Tensor, eager: Sequence[Tensor]) -> Error:
    """Judge one tensor by the rule; ``eager`` are eager's results in ``x``'s dtype (fp32 for float64)."""
    return judge_by(name, x, oracle, Scale.of(oracle, eager))


def judge_by(name: str, x: Tensor, oracle: Tensor, scale: Scale) -> Error:
    u = torch.finfo(x.dtype).eps / 2
    finer = u / (torch.finfo(torch.float32).eps / 2) if x.dtype == torch.float64 else 1.0
    rms, largest = error_norms(x, oracle)
    times = finer * (3 if x.dtype == torch.float64 else 2)
    allowed = times * scale.rms + u / 2, times * scale.max + u * scale.size
    return Error(name, rms, finer * scale.rms, allowed[0], largest, allowed[1])


def tensors(out: Output, grads: Grads | None) -> dict[str, Tensor]:
    """Results by name: o, lse, max_logit where it was asked for, dq, dk, dv, dsink and a dleaf for each slot."""
    named = out.named
    if grads is not None:
        named |= {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
        named |= {} if grads.sink is None else {"dsink": grads.sink}
        named |= {f"dleaf{slot}": grad for slot, grad in sorted(grads.leaves.items())}
    return named


@dataclass(frozen=True)
class Expected:
    """The oracle's results for one call, and eager's in each order; ``scales``: made once of what is judged."""

    oracle: dict[str, Tensor]
    eager: list[dict[str, Tensor]]
    scales: dict[str, Scale] = field(default_factory=dict)

    @classmethod
    def of(cls, p: Problem, t: Inputs, do: Tensor | None = None, dlse: Tensor | None = None) -> Expected:
        if p.paged:
            found = cls.of(*gather.gathered(p, t))
            return cls(_in_layout_of(p, found.oracle), [_in_layout_of(p, results) for results in found.eager])
        parts = list(reference.parts(p, t))  # the same for every order

        def run(arithmetic: Arithmetic) -> dict[str, Tensor]:
            attended = list(reference.attend(p, t, arithmetic, parts))
            grads = None if do is None else reference.backward(p, t, do, dlse, arithmetic, attended)
            return tensors(reference.forward(p, t, arithmetic, attended), grads)

        def statistics(arithmetic: Arithmetic) -> dict[str, Tensor]:
            attended = list(reference.attend(p, t, arithmetic, parts))
            return reference.statistics_of(p, t, arithmetic.dtype, attended)

        def run_eager(order: int) -> dict[str, Tensor]:
            fp32 = Arithmetic(torch.float32, order)
            if p.dtype in (torch.float32, torch.float64):
                return run(fp32)
            return run(Arithmetic(p.dtype, order)) | statistics(fp32)

        eager = [run_eager(order) for order in range(ORDERS)]
        if t.q.is_cuda and p.dtype in (torch.float16, torch.bfloat16):
            eager.append(statistics(Arithmetic(torch.float32, units=p.dtype)))
        return cls(run(Arithmetic(torch.float64)), eager)

    def judge(self, results: dict[str, Tensor]) -> list[Error]:
        for name in results.keys() - self.scales.keys():
            self.scales[name] = Scale.of(self.oracle[name], [e[name] for e in self.eager if name in e])
        return [judge_by(name, x, self.oracle[name], self.scales[name]) for name, x in results.items()]


def _in_layout_of(p: Problem, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of packed queries in the layout of the paged problem p."""
    statistics = {name: gather.statistic_in_layout_of(p, x) for name, x in results.items() if name != "o"}
    return {"o": results["o"].view(p.output_shapes[0]), **statistics} if "o" in results else statistics
