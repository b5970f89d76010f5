"""Gradients where a function has a corner: those of the installed PyTorch, whose clamp gives its bound other shares from 2.14 on."""

from contextlib import ExitStack

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewise as tw
from tilewise import expr
from tilewise.expr import operations

BOUNDS = {
    "clamp by numbers": lambda s, c: torch.clamp(s, -0.5, 0.5),
    "clamp_min by a number": lambda s, c: s.clamp_min(0.5),
    "clamp by a tensor": lambda s, c: torch.clamp(s, c),
    "clamp by a tensor above": lambda s, c: torch.clamp(s, max=c),
    "maximum": lambda s, c: torch.maximum(s, c),
    "minimum": lambda s, c: torch.minimum(s, c),
    "relu": lambda s, c: torch.relu(s - 0.5),
    "abs": lambda s, c: (s - 0.5).abs(),
}


def gradients(attend):
    """Of q and of the bound c, with every score on the corner."""
    q = torch.full((1, 3, 1, 1), 0.5, dtype=torch.float64, requires_grad=True)
    c = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    k = torch.ones(1, 3, 1, 1, dtype=torch.float64)
    v = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).view(1, 3, 1, 1)
    o = attend(q, k, v, c)
    return torch.autograd.grad(o.square().sum(), (q, c), allow_unused=True)


def eager(change):
    def attend(q, k, v, c):
        weights = torch.tensor(
            [1.0, 3.0, 7.0], dtype=torch.float64
        )  # so that equal shares of equal scores do not cancel
        s = change(torch.einsum("bihd,bjhd->bhij", q, k), c) * weights
        return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v)

    return attend


def ours(change):
    def attend(q, k, v, c):
        weights = torch.tensor([1.0, 3.0, 7.0], dtype=torch.float64)
        return tw.attention(q, k, v, score=lambda s, b, h, i, j: change(s, c) * weights[j], softmax_scale=1.0)

    return attend


@pytest.mark.parametrize("name", BOUNDS)
def test_a_score_at_its_corner_has_the_gradients_of_the_installed_torch(name):
    for got, expected in zip(*(gradients(attend(BOUNDS[name])) for attend in (ours, eager)), strict=True):
        none = got is None or expected is None  # of a bound that is a number
        assert (not none and torch.allclose(got, expected, rtol=1e-12, atol=0)) or got is expected


@pytest.mark.parametrize("shares", [(1.0, 0.0), (0.0, 0.0), (0.5, 0.5)])
def test_whatever_torch_answers_is_taken(monkeypatch, shares):
    monkeypatch.setattr(operations, "_shares_at_bound", lambda by_tensor: shares)
    for op, beyond in (("clamp_min", 1.0), ("clamp_max", -1.0)):
        x, c = (expr.Expr("lookup", (("float", n), expr.symbol("i"))) for n in range(2))
        slopes = [expr.derivative(expr.apply(op, x, c), wrt) for wrt in (x, c)]
        leaves = torch.tensor([0.0, beyond, -beyond]), torch.zeros(3)
        values = expr.evaluate(slopes, {"i": torch.arange(3)}, leaves, torch.float32)
        assert [value.tolist() for value in values] == [[shares[0], 1.0, 0.0], [shares[1], 0.0, 1.0]]


MODES = {
    "none": lambda stack: None,
    "no_grad": lambda stack: stack.enter_context(torch.no_grad()),
    "inference": lambda stack: stack.enter_context(torch.inference_mode()),
    "fake": lambda stack: stack.enter_context(FakeTensorMode()),
    "meta": lambda stack: stack.enter_context(torch.device("meta")),
}


@pytest.mark.parametrize("by_tensor", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_torch_answers_alike_in_every_mode(mode, by_tensor):
    operations._shares_at_bound.cache_clear()
    with ExitStack() as stack:
        MODES[mode](stack)
        found = operations._shares_at_bound(by_tensor)
    x, c = (torch.zeros((), requires_grad=True) for _ in range(2))
    torch.clamp(x, c if by_tensor else 0.0).backward()
    assert found == (x.grad.item(), c.grad.item() if by_tensor else 0.0)
