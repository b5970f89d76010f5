"""Helpers that tests and benchmarks share: a checked call with its tensors, outputs full of NaN, the judgement of a backend's results.

    c = call(q, k, v, causal=True)
    assert not wrong(Portable(), c)

The command ``tilewise tune``, which judges candidates, uses them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

import tilewise as tw
from tilewise import accuracy, problem
from tilewise.backends.base import Backend, Inputs, OutputGrads
from tilewise.spec import Options, assemble, parse_spec

# ---- calls ------------------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """A checked problem ``p``, its tensors ``t``, and the gradients ``do`` and ``dlse`` of its outputs."""

    p: problem.Problem
    t: Inputs
    do: Tensor
    dlse: Tensor

    def forward_only(self) -> Call:
        """Return the same call where nothing wants a gradient."""
        return self._with_spec(needs_grad=False)

    def with_constant_scores(self) -> Call:
        """Return the same call without gradients of the score's tensors."""
        spec = self.p.spec
        return self._with_spec(grad_slots=tuple(n for n in spec.grad_slots if n == spec.sink_slot))

    def _with_spec(self, **changes: Any) -> Call:
        return replace(self, p=replace(self.p, spec=replace(self.p.spec, **changes)))

    def expected(self) -> accuracy.Expected:
        """Return the oracle's and eager's results; its gradients are left out where the call wants none."""
        given = (self.do, self.dlse) if self.p.spec.needs_grad else ()
        return accuracy.Expected.of(self.p, self.t, *given)


def call(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor | None = None, device: str | None = None, **options: object
) -> Call:
    """Return a call that wants every gradient; its tensors, those of masks and scores too, are moved to ``device``, by default q's."""
    device = device or q.device.type
    extras, seed, text = assemble(q.detach().requires_grad_(), k, v, Options(**options))
    q, k, v, *extras = _moved_together(q, k, v, extras, seed, text, device)
    seed, do = (None if x is None else x.to(device) for x in (seed, do))
    p = problem.check(q, k, v, extras, seed, parse_spec(text))
    generator = torch.Generator(q.device).manual_seed(7)

    def draw(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=q.device).to(dtype)

    do = draw((*q.shape[:-1], v.shape[-1]), q.dtype) if do is None else do
    lse_shape = (q.shape[1], q.shape[0]) if p.packed else (q.shape[0], q.shape[2], q.shape[1])
    return Call(p, Inputs.of(p, q, k, v, extras, seed), do, draw(lse_shape, p.compute_dtype))


def paged_call(q: Tensor, cache: tw.PagedCache, device: str | None = None, **options: object) -> Call:
    """Return a call over a cache; ``options`` as of :func:`tilewise.attention_paged`. It wants no gradient: its do and dlse are empty."""
    device = device or q.device.type
    k, v, table, lengths, *scales = cache
    options |= dict(zip(("k_scale", "v_scale"), scales, strict=False))
    with torch.no_grad():
        extras, seed, text = assemble(q, k, v, Options(block_table=table, seqlens_k=lengths, **options))
    q, k, v, *extras = _moved_together(q, k, v, extras, seed, text, device)
    p = problem.check(q, k, v, extras, seed, parse_spec(text))
    return Call(p, Inputs.of(p, q, k, v, extras, seed), q.new_empty(0), q.new_empty(0))


def _moved_together(
    q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None, text: str, device: str
) -> list[Tensor]:
    """Return the tensors of a call on ``device``; a v that lies in k's memory does so there too, where that is told of a call."""
    beside = [_moved(x, q.device.type) for x in extras]  # a mask's tensors may be on the device already
    latent = problem.check(q, k, v, beside, seed, parse_spec(text)).latent
    q, k, v, *extras = (_moved(x, device) for x in (q, k, v, *extras))
    return [q, k, k[..., : v.shape[-1]] if latent else v, *extras]


def _moved(x: Tensor, device: str) -> Tensor:
    """Return a tensor on ``device`` with the strides that it had, expanded dimensions too."""
    x = x.detach()
    if x.device.type == device:
        return x
    base = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]
    order = sorted(range(x.ndim), key=lambda axis: -base.stride(axis))
    moved = base.permute(order).contiguous().to(device)
    return moved.permute([order.index(axis) for axis in range(x.ndim)]).expand(x.shape)


class Row(Protocol):
    """A row of a table of cases, as those of bench/cases.py."""

    def draw(self, device: str = "cpu", seed: int = 0) -> Any: ...


def of_case(case: Row, device: str = "cpu", seed: int = 0) -> Call:
    """Return a case as a checked call. Its numbers are drawn on the CPU, so that they are the same on every device."""
    x = case.draw(seed=seed)
    return call(x.q, x.k, x.v, x.do, device, **x.options())


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers that the seed and the shape decide."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(batch=2, nq=70, nk=70, hq=4, hk=2, d=16, dv=16, dtype=torch.float32) -> tuple[Tensor, ...]:
    """q (batch, nq, hq, d), k (batch, nk, hk, d) and v (batch, nk, hk, dv)."""
    shapes = (batch, nq, hq, d), (batch, nk, hk, d), (batch, nk, hk, dv)
    return tuple(normal(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes, 1))


HIDING = {
    "key-lengths": lambda: tw.key_lengths(torch.tensor([40, 65])),
    "key-range": lambda: tw.key_range(5, 60),
    "prefix-of-a-range": lambda: tw.prefix(30) & tw.key_range(10, 50),
    "keep-even": lambda: tw.keep(lambda b, h, i, j: j % 2 == 0),
    "dense-per-head": lambda: tw.dense((normal(2, 4, 70, 70) > 0) & (normal(2, 4, 1, 70, seed=4) > 0)),
    "block-sparse": lambda: tw.block_sparse(
        torch.eye(5, dtype=torch.bool)[:, [0, 1, 1, 2, 4]] & torch.tensor([True, True, False, True, True]), 16, 16
    ),
    "one-block-of-keys": lambda: tw.keep(lambda b, h, i, j: (j // 64 == 0) & (i % 3 > 0)),
    "selected": lambda: tw.selected(torch.randint(0, 30, (2, 1, 70, 3), generator=torch.Generator().manual_seed(0)), 2),
    "selected-causal": lambda: (
        tw.causal() & tw.selected(torch.randint(-1, 5, (2, 1, 9, 1), generator=torch.Generator().manual_seed(1)), 16, 8)
    ),
    "selected-or-window": lambda: (
        tw.selected(torch.randint(0, 40, (1, 1, 70, 1), generator=torch.Generator().manual_seed(2)))
        | (tw.window(0, 0) & tw.key_range(50, 60))
    ),
}
"""Masks of the calls of :func:`qkv` that hide some keys from every query: such keys never touch a result."""


# ---- results ----------------------------------------------------------------------------------------------------------


@contextmanager
def poisoned() -> Iterator[None]:
    """A context in which torch.empty gives NaN, so that what is not written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=warned)
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def results(backend: Backend, c: Call) -> dict[str, Tensor]:
    """Return a backend's outputs, and its gradients where the call wants any, by name; what it does not write is NaN."""
    with poisoned():
        out = backend.forward(c.p, c.t)
        grad = OutputGrads.of(c.do, c.dlse)
        grads = backend.backward(c.p, c.t, out, grad.do, grad.dlse) if c.p.spec.needs_grad else None
    return accuracy.tensors(out, grads)


def wrong(backend: Backend, c: Call) -> list[str]:
    """Return the errors of a backend's results that are beyond the error rule; empty: none is."""
    return [str(e) for e in c.expected().judge(results(backend, c)) if not e.ok]


def other_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Return the names of the tensors that differ in a bit between two runs."""
    return [name for name, x in first.items() if not torch.equal(_bits(x), _bits(second[name]))]


def _bits(x: Tensor) -> Tensor:
    """Return a tensor's bits as integers: NaN then equals itself."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def far_off(x: Tensor, oracle: Tensor) -> str:
    """Return how many elements are far off, and where the first stand: whole tiles, a warp's rows and single columns look different."""
    bad = ((x.float() - oracle.float()).abs() > 0.05 * oracle.float().abs().max()) | x.isnan()
    return f"{bad.sum().item()} of {bad.numel()} elements far off, the first at {bad.nonzero()[:4].tolist()}"
