"""Operands in the layouts in which callers have them: expanded, transposed, columns of a table. Each backend computes what it computes
of contiguous copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tilewise as tw
from bench.testing import normal
from tilewise.spec import Options, assemble, parse_spec

BACKENDS = ("portable", "cpu", "triton")
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # NumPy's in the interpreter, of infinities that are selected away


def last_axis_first(x: Tensor) -> Tensor:
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def heads_before_rows(x: Tensor) -> Tensor:
    return x.transpose(0, -2).contiguous().transpose(0, -2) if x.ndim > 1 else x


def every_other(x: Tensor) -> Tensor:
    """With NaN, or whole numbers that are out of range, between the elements."""
    wide = torch.full((*x.shape, 2), torch.nan if x.is_floating_point() else 1 << 20, dtype=x.dtype)
    wide[..., 0] = x
    return wide[..., 0]


def expanded(x: Tensor) -> Tensor:
    """The first of the outermost axis in place of all."""
    return x[:1].expand_as(x)


def one_number(x: Tensor) -> Tensor:
    """The gradient of a sum."""
    return x.flatten()[0].expand_as(x)


LAYOUTS = (last_axis_first, heads_before_rows, every_other, expanded, one_number)
DENSE = (2, 3, 2, 4), (2, 5, 1, 4), (2, 5, 1, 3)
PACKED = (5, 2, 4), (7, 1, 4), (7, 1, 3)


def run(backend: str, packed: bool, operands: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """o, lse and the gradients of q, k, v, the sink and a bias, by the operators, as an autograd of others or a door calls them."""
    q, k, v, sink, bias = (operands[name].detach().requires_grad_() for name in ("q", "k", "v", "sink", "bias"))
    cu = {"cu_seqlens_q": operands["cu_q"], "cu_seqlens_k": operands["cu_k"]} if packed else {}
    score = tw.score(lambda s, b, h, i, j: s + bias[h, j])
    call = assemble(q, k, v, Options(sink=sink, score=score, backend=backend, **cu))
    with torch.no_grad():
        o, lse = torch.ops.tilewise.attention(q, k, v, *call)
        given = [operands.get(name, x) for name, x in (("o", o), ("lse", lse))]
        dq, dk, dv, dextras = torch.ops.tilewise.attention_backward(
            operands["do"], operands["dlse"], q, k, v, *given, *call
        )
    return o, lse, dq, dk, dv, *dextras


def operands(packed: bool) -> dict[str, Tensor]:
    shapes = PACKED if packed else DENSE
    found = {name: normal(*shape, seed=n) for n, (name, shape) in enumerate(zip("qkv", shapes, strict=True))}
    found |= {"do": normal(*shapes[0][:-1], 3, seed=4), "dlse": normal(*((2, 5) if packed else (2, 2, 3)), seed=5)}
    found |= {"sink": normal(2, seed=6), "bias": normal(2, shapes[1][-3], seed=7)}
    if packed:
        found |= {"cu_q": torch.tensor([0, 2, 5]), "cu_k": torch.tensor([0, 4, 7])}
    found["o"], found["lse"] = run("portable", packed, found)[:2]
    return found


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_operand_lies_otherwise(backend, packed):
    """A sink that heads share, cu_seqlens that are a column of a table, an lse and an o that another library made: Triton read on in
    their memory as if they were contiguous."""
    whole = operands(packed)
    for n, (name, x) in enumerate(whole.items()):
        layouts = (
            [every_other]
            if x.dtype == torch.int64
            else [f for f in LAYOUTS if x.ndim > 1 or f in (every_other, expanded)]
        )
        if backend == "triton":  # whose interpreter takes long
            layouts = [layouts[n % len(layouts)]]
        for layout in layouts:
            strided = layout(x)
            expected = run("portable", packed, whole | {name: strided.contiguous()})
            found = run(backend, packed, whole | {name: strided})
            for at, (a, b) in enumerate(zip(found, expected, strict=True)):
                assert torch.allclose(a, b, atol=2e-5, rtol=2e-5), (name, layout.__name__, at)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tangents_that_lie_otherwise(backend):
    """A tangent that is the same for all heads, or a column of a basis; and what another's forward left of o and lse."""
    whole = operands(packed=False)
    q, k, v, sink, bias = (whole[name].requires_grad_() for name in ("q", "k", "v", "sink", "bias"))
    call = assemble(q, k, v, Options(sink=sink, score=tw.score(lambda s, b, h, i, j: s + bias[h, j]), backend=backend))
    extras, seed, spec = call
    inputs = [whole[name].detach() for name in ("q", "k", "v", "o", "lse")]
    moving = [normal(*x.shape, seed=20 + n) for n, x in enumerate((q, k, v, *extras))]
    grads = [whole["do"], whole["dlse"], normal(*whole["do"].shape, seed=30), normal(*whole["dlse"].shape, seed=31)]
    second = backend != "cpu"  # which has none of its own

    @torch.no_grad()
    def tangents(layout: Callable[[Tensor], Tensor], backend: str) -> tuple[Tensor, ...]:
        text = replace(parse_spec(spec), backend=backend).text()
        of = lambda xs: [layout(x) for x in xs]  # noqa: E731
        moved = torch.ops.tilewise.attention_jvp(of(inputs[:3]) + of(inputs[3:]), extras, seed, of(moving), text)
        if not second:
            return moved
        *found, dextras = torch.ops.tilewise.attention_backward_jvp(
            of(grads), of(moved), of(inputs), extras, seed, of(moving), text
        )
        return *moved, *found, *dextras

    for layout in (last_axis_first, heads_before_rows, every_other):
        expected = tangents(lambda x: x, "portable")
        for a, b in zip(tangents(layout, backend), expected, strict=True):
            torch.testing.assert_close(a, b, atol=5e-5, rtol=5e-5)
