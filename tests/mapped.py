"""Random calls that are mapped over examples, for :mod:`tests.fuzz`: any subset of the tensors along any axis, by torch.func and by the
vmap before it. Each example is judged as the call that it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from bench.testing import Call
from tests.backends.tangents import found as tangents_of
from tests.backends.tangents import in_float64
from tilewise import accuracy, autograd, derivatives
from tilewise.backends.base import Backend, Inputs
from tilewise.backends.portable import Portable
from tilewise.problem import check
from tilewise.spec import parse_spec

ORDERS = 4  # of the sums of plain tiles: one may be lucky on few numbers
Found = list[dict[str, Tensor]]  # results by name, of each example


@dataclass
class Operand:
    """A tensor of a mapped call.

    Attributes:
        given: as vmap gets it. dim: where the examples are in it; None: all share it.
        examples: its value in each example.
    """

    given: Tensor
    dim: int | None
    examples: Sequence[Tensor]

    @classmethod
    def draw(cls, r, x: Tensor, size: int, likely: float) -> Operand:
        """``x``, or with this likelihood a tensor of so many examples, of which x is the first."""
        if not r.likely(likely):
            return cls(x, None, [x] * size)
        if x.is_floating_point():
            drawn = [r.tensor(*x.shape, dtype=x.dtype) for _ in range(size - 1)]
            # A score's factor stays positive: -inf times another is +inf.
            more = [x.detach() * (0.5 * n).exp() if x.ndim < 3 else n for n in drawn]
        else:
            more = [x.roll(n + 1) if x.dtype == torch.bool else x for n in range(size - 1)]
        whole = x.expand(size, *x.shape) if r.likely(0.15) else r.strided(torch.stack([x, *more]))
        dim = r.randint(0, x.ndim)
        return cls(whole.movedim(0, dim), dim, list(whole))

    @classmethod
    def alike(cls, r, other: Operand, size: int) -> Operand:
        """Another tensor in the shape of ``other``'s examples, for its tangent."""
        return cls.draw(r, r.tensor(*other.examples[0].shape, dtype=other.given.dtype), size, 0.5)


@dataclass
class MappedCall:
    """A call of some examples.

    Attributes:
        calls: each example as a call of its own.
        inputs: q, k, v and the extras. grads: dO and dlse. directions: a tangent of each floating input, None of others.
        changes: the tangents of dO and dlse.
    """

    spec: str
    calls: list[Call]
    inputs: list[Operand]
    grads: list[Operand]
    directions: list[Operand | None]
    changes: list[Operand]

    @classmethod
    def draw(cls, r, c: Call) -> MappedCall:
        """A call like ``c``, which is neither packed nor paged and has no dropout."""
        size, text = r.randint(1, 3), derivatives.watched(c.p.spec.text(), c.t.leaves)
        spec = parse_spec(text)
        gradients_alone = r.likely(0.3)
        shared = 0.0 if gradients_alone else 0.5
        draw = lambda x, p: Operand.draw(r, x, size, p)  # noqa: E731
        inputs = [draw(x, shared) for x in (c.t.q, c.t.k, c.t.v)]
        inputs += [draw(x, shared) for x in c.t.leaves]
        grads = [draw(x, 1.0 if gradients_alone else 0.5) for x in (c.do, c.dlse)]
        wanted = {0, 1, 2, *(3 + n for n in spec.grad_slots)}
        directions = [Operand.alike(r, x, size) if n in wanted else None for n, x in enumerate(inputs)]
        if all(x.dim is None for x in (*inputs, *grads)):
            grads[0] = draw(c.do, 1.0)
        changes = [Operand.alike(r, x, size) for x in grads]
        calls = []
        for n in range(size):
            q, k, v, *extras = (x.examples[n] for x in inputs)
            p = check(q, k, v, extras, None, spec)
            calls.append(Call(p, Inputs.of(p, q, k, v, extras, None), *[x.examples[n] for x in grads]))
        return cls(text, calls, inputs, grads, directions, changes)

    @property
    def ways(self) -> list[Callable[[], Found]]:
        """The functions that compute the outputs and gradients of each example."""
        alone = all(x.dim is None for x in self.inputs)
        return [self.by_torch_func, *([self.by_batched_gradients] if alone else [])]

    @property
    def moving(self) -> list[int]:
        """The places of the inputs that are differentiated."""
        return [n for n, x in enumerate(self.directions) if x is not None]

    @property
    def names(self) -> list[str]:
        """The names of the gradients of :attr:`moving`."""
        sink = parse_spec(self.spec).sink_slot
        of = {0: "dq", 1: "dk", 2: "dv"} | {3 + n: f"dleaf{n}" for n in range(len(self.inputs))}
        return [("dsink" if n >= 3 and n - 3 == sink else of[n]) for n in self.moving]

    def describe(self) -> str:
        """The axis of each operand's examples, and strides."""
        told = [(x.dim, tuple(x.given.shape), x.given.stride()) for x in (*self.inputs, *self.grads)]
        return f"{len(self.calls)} examples of {self.calls[0].p.describe()}    {told}"

    def attention(self, inputs: Sequence[Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
        """o and lse as a function of the inputs that are differentiated."""

        def run(*moving: Tensor) -> tuple[Tensor, Tensor]:
            every = list(inputs)
            for n, x in zip(self.moving, moving, strict=True):
                every[n] = x
            q, k, v, *extras = every
            return autograd.attention(q, k, v, extras, None, self.spec)

        return run

    def by_torch_func(self) -> Found:
        """o, lse and the gradients, by vmap of vjp."""

        def one(*operands: Tensor) -> tuple[Tensor, ...]:
            inputs, grads = operands[:-2], operands[-2:]
            outputs, pull = vjp(self.attention(inputs), *[inputs[n] for n in self.moving])
            return *outputs, *pull(grads)

        operands = (*self.inputs, *self.grads)
        found = vmap(one, in_dims=tuple(x.dim for x in operands))(*[x.given for x in operands])
        return self.by_example(["o", "lse", *self.names], found)

    def by_batched_gradients(self) -> Found:
        """The gradients alone, by ``is_grads_batched``, for which dO and dlse are mapped along their first axis."""
        inputs = [x.given.detach().requires_grad_(n in self.moving) for n, x in enumerate(self.inputs)]
        with torch.enable_grad():
            outputs = self.attention(inputs)(*[inputs[n] for n in self.moving])
        size = len(self.calls)
        grads = [
            x.given.expand(size, *x.given.shape) if x.dim is None else x.given.movedim(x.dim, 0) for x in self.grads
        ]
        moving = [inputs[n] for n in self.moving]
        return self.by_example(self.names, torch.autograd.grad(outputs, moving, grads, is_grads_batched=True))

    def tangents(self, second: bool) -> Found:
        """The tangents of o and lse and, for the ``second`` derivatives, of the gradients."""
        along = [x for x in self.directions if x is not None]
        operands = [*self.inputs, *self.grads, *along, *self.changes]
        ends = len(self.inputs), len(self.inputs) + 2, len(self.inputs) + 2 + len(along)

        def one(*operands: Tensor) -> tuple[Tensor, ...]:
            inputs, grads, along, changes = (operands[a:b] for a, b in zip((0, *ends), (*ends, None), strict=True))
            run, moving = self.attention(inputs), tuple(inputs[n] for n in self.moving)
            moved = jvp(run, moving, along)[1]
            if not second:
                return moved
            both = lambda do, dlse, *moving: vjp(run, *moving)[1]((do, dlse))  # noqa: E731
            return *moved, *jvp(both, (*grads, *moving), (*changes, *along))[1]

        # PyTorch makes no dual number of an expanded tensor.
        given = [
            x.given.clone(memory_format=torch.contiguous_format) if 0 in x.given.stride() else x.given for x in operands
        ]
        found = vmap(one, in_dims=tuple(x.dim for x in operands))(*given)
        return self.by_example(["o", "lse", *(self.names if second else [])], found)

    def by_example(self, names: list[str], found: Sequence[Tensor]) -> Found:
        """Results with the examples in front as those of each."""
        return [{name: x[n] for name, x in zip(names, found, strict=True)} for n in range(len(self.calls))]

    def worse_tangents(self, backend: Backend, factor: float) -> list[str]:
        """The tangents, in fp32, that err more than ``factor`` times what the rule allows beside those of plain tiles."""
        second, wrong = not backend.without_tangents(self.calls[0].p, second=True), []
        for n, (c, got) in enumerate(zip(self.calls, self.tangents(second), strict=True)):
            tangents = [None if x is None else x.examples[n] for x in self.directions]
            changes = tuple(x.examples[n] for x in self.changes)
            exact = tangents_of(Portable(), in_float64(c), [x if x is None else x.double() for x in tangents], changes)
            plain = [in_another_order(c, tangents, changes, order) for order in range(ORDERS)]
            errors = [accuracy.judge(name, x, exact[name], [other[name] for other in plain]) for name, x in got.items()]
            bad = [e for e in errors if not (e.rms <= factor * e.rms_allowed and e.max <= factor * e.max_allowed)]
            wrong += [f"tangent of {e}" for e in bad]
        return wrong


def in_another_order(c: Call, tangents: Sequence[Tensor | None], changes: tuple, order: int) -> dict[str, Tensor]:
    """The tangents of plain tiles, with the columns of q and k in another order, in which their products are summed."""
    columns = torch.randperm(c.p.head_dim, generator=torch.Generator().manual_seed(order), device="cpu").to(
        c.t.q.device
    )
    q, k = c.t.q[..., columns], c.t.k[..., columns]
    moved_q, moved_k = (x[..., columns] for x in tangents[:2])
    p = check(q, k, c.t.v, c.t.leaves, None, c.p.spec)
    other = replace(c, p=p, t=Inputs.of(p, q, k, c.t.v, c.t.leaves, None))
    found = tangents_of(Portable(), other, [moved_q, moved_k, *tangents[2:]], changes)
    return {name: x[..., columns.argsort()] if name in ("dq", "dk") else x for name, x in found.items()}


def named(c: Call, backend: str) -> Call:
    """The same call by this backend alone."""
    return replace(c, p=replace(c.p, spec=parse_spec(replace(c.p.spec, backend=backend).text())))
