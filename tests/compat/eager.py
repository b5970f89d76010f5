"""Attention written down a second time, in plain PyTorch with the whole matrix: what the drop-ins are judged by.

Heads first, ``(..., heads, seqlen, head_dim)``, as most of the originals' documentation has it. It shares no formula with
``tilewise.reference``; the error rule is the project's (:mod:`tilewise.accuracy`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.accuracy import judge

F64 = torch.float64
ORDERS = 48


@dataclass(frozen=True)
class Arithmetic:
    """A dtype, and one of many equally good orders of computation.

    Order 0 is the plain one. Any other number shuffles the terms of sums and scales q instead of s; then the even ones take
    ``exp(s - lse)`` for the softmax, and the odd ones divide by its denominator after the product with v.
    """

    dtype: torch.dtype
    order: int = 0

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        terms = self.shuffled(a.shape[-1])
        return a[..., terms] @ b[..., terms, :]

    def shuffled(self, n: int) -> Tensor:
        """The order of n terms; of v's columns too, whose sums are the backward's."""
        return torch.randperm(n, generator=torch.Generator().manual_seed(self.order)) if self.order else torch.arange(n)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arithmetic: Arithmetic,
    *,
    scale: float | None = None,
    change: Callable[[Tensor], Tensor] = lambda s: s,
    kept: Tensor | None = None,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(o, lse)``; o is zero and lse -inf where a query has no key.

    Args:
        change: what happens to the scaled scores. kept: bool, which pairs take part. factor: of the probabilities, after
            the softmax (dropout).
    """
    k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) if x.ndim > 2 else x for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kept = torch.ones((), dtype=torch.bool) if kept is None else kept
    kept = kept.expand(*q.shape[:-1], k.shape[-2])
    seen = kept.any(-2).unsqueeze(-1)
    k, v = k.where(seen, 0).mT, v.where(seen, 0)
    plain = not arithmetic.order
    s = change(arithmetic.matmul(q, k) * scale if plain else arithmetic.matmul(q * scale, k)).to(q.dtype)
    kept = kept & (s != -torch.inf)
    alive = kept.any(-1, keepdim=True)
    s = s.where(kept, -torch.inf).where(alive, 0)
    factor = torch.ones((), dtype=s.dtype) if factor is None else factor.to(s.dtype)
    if not s.shape[-1]:
        return arithmetic.matmul(s, v), s.sum(-1) - torch.inf
    lse = torch.logsumexp(s.to(torch.promote_types(s.dtype, torch.float32)), -1, keepdim=True)
    columns = arithmetic.shuffled(v.shape[-1])
    v = v[..., columns]
    if arithmetic.order % 2:
        e = torch.exp(s - s.max(-1, keepdim=True).values.detach()).where(kept, 0)
        o = arithmetic.matmul(e * factor, v) / e.sum(-1, keepdim=True).where(alive, 1)
    else:
        p = torch.softmax(s, -1) if plain else torch.exp(s - lse).to(s.dtype)
        o = arithmetic.matmul(p.where(kept, 0) * factor, v)
    return o[..., columns.argsort()], lse.where(alive, -torch.inf).squeeze(-1)


def agree(
    run: Callable[..., Sequence[Tensor]],
    formula: Callable[..., Sequence[Tensor]],
    tensors: Sequence[Tensor],
    names: Sequence[str] = ("o", "lse"),
) -> dict[str, Tensor]:
    """Holds ``run(*tensors)`` and the gradients of all floating ``tensors`` against ``formula(arithmetic, *tensors)``.

    Returns:
        The outputs of ``run`` by name, and ``d0, d1, ...``: the gradients of the tensors that have one.
    """
    dtype = tensors[0].dtype
    results = _derived(run, tensors, names, lambda x: x)
    with_dtype = lambda a: _derived(lambda *x: formula(a, *x), tensors, names, lambda x: x.to(a.dtype))  # noqa: E731
    oracle = with_dtype(Arithmetic(F64))
    coarse = torch.float32 if dtype == F64 else dtype
    eager = [with_dtype(Arithmetic(coarse, order)) for order in range(ORDERS)]
    fine = [with_dtype(Arithmetic(torch.float32, order)) for order in range(ORDERS)] if "lse" in results else []
    errors = [
        judge(name, x, oracle[name], [e[name] for e in (fine if name == "lse" else eager)])
        for name, x in results.items()
    ]
    wrong = [str(e) for e in errors if not e.ok]
    assert not wrong, wrong
    return results


def _derived(
    run: Callable, tensors: Sequence[Tensor], names: Sequence[str], cast: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Outputs, and the gradients of a fixed combination of their elements."""
    inputs = [cast(x.detach()).requires_grad_() if x.is_floating_point() else x for x in tensors]
    outputs = run(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = 0.0
    for n, x in enumerate(outputs):
        weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(100 + n)).to(tensors[0].dtype)
        loss = loss + (x.where(x.isfinite(), 0) * weights.to(x.dtype)).sum()
    wanted = [x for x in inputs if x.requires_grad]
    grads = torch.autograd.grad(loss, wanted)
    found = {name: x.detach() for name, x in zip(names, outputs, strict=False)}
    return found | {
        f"d{n}": g for n, g in zip((n for n, x in enumerate(inputs) if x.requires_grad), grads, strict=True)
    }


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
