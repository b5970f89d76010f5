"""Calls of selected blocks on Hopper: when they run as packed sequences, and that the kernels' source is right on these."""

from __future__ import annotations

import pytest

import tilewise as tw
from bench.testing import Call, call
from tests.backends.hopper import test_backward, test_forward
from tests.backends.hopper.test_forward import qkv
from tests.backends.hopper.test_pieces import LONG, long_problem
from tests.planning.test_bit_tiles import entries
from tilewise import accuracy
from tilewise.backends.blockwise import Blockwise
from tilewise.backends.hopper import Hopper, pieces
from tilewise.backends.hopper.host.backward_call import BackwardPlan
from tilewise.backends.hopper.host.forward_call import ForwardPlan
from tilewise.backends.hopper.host.piecewise_call import PiecewisePlan


@pytest.mark.parametrize("name", LONG)
def test_large_blocks_of_each_query_are_gathered(name):
    p, hopper = long_problem(name), Hopper()
    gathered = name in ("moba", "moba-512", "a million")
    for make, values in (hopper._plans.recorded(p), hopper._backward_plans.recorded(p)):
        plan = make(p, values)
        assert isinstance(plan, PiecewisePlan)
        assert isinstance(plan.pieces[0][1], Blockwise) == gathered
    assert all(x.packed == gathered for x in hopper.configs(p))


def test_how_is_told():
    assert Hopper().pieces(long_problem("moba")) == (
        "64 of 1 batch element, 1 key head and 65536 queries, as a bit for each pair may take 64 GiB, above 1 GiB; "
        "a block of keys and the queries that selected it are a packed sequence"
    )


def test_the_kernels_source_is_right_on_them(monkeypatch):
    monkeypatch.setattr(pieces, "BUDGET", 4 << 10)
    monkeypatch.setattr(pieces, "LEAST_BLOCK", 64)

    def forward(plan, t):
        assert plan.problem.packed
        return test_forward.emulate_kernel(Call(plan.problem, t, None, None), plan.config, ctas=2)

    def backward(plan, t, out, do, dlse):
        return test_backward.emulate_kernels(Call(plan.problem, t, do, dlse), plan.config, 3, out)

    monkeypatch.setattr(ForwardPlan, "forward", forward)
    monkeypatch.setattr(BackwardPlan, "backward", backward)
    c = call(*qkv(200, 200, heads=(2, 1)), mask=tw.causal() & tw.selected(entries(1, 1, 200, 3, blocks=4), 64))
    hopper = Hopper()
    assert all(isinstance(plan, Blockwise) for _, plan in hopper._plan(c.p).pieces)
    out = hopper.forward(c.p, c.t)
    errors = c.expected().judge(accuracy.tensors(out, hopper.backward(c.p, c.t, out, c.do, c.dlse)))
    assert not [str(e) for e in errors if not e.ok]
