"""Calls of selected blocks on Hopper: when they run as packed sequences, and that the kernels' source is right on these."""

from __future__ import annotations

import pytest

import tilewise as tw
from bench.testing import Call, call
from tests.backends.hopper import test_backward, test_forward
from tests.backends.hopper.test_forward import qkv
from tests.backends.hopper.test_pieces import LONG, blocks, long_problem, of_length
from tests.planning.test_bit_tiles import entries
from tilewise import accuracy
from tilewise.backends import blockwise
from tilewise.backends.blockwise import Blockwise
from tilewise.backends.hopper import Hopper, pieces
from tilewise.backends.hopper.host.backward_call import BackwardPlan
from tilewise.backends.hopper.host.forward_call import ForwardPlan
from tilewise.backends.hopper.host.piecewise_call import PiecewisePlan


@pytest.mark.parametrize("name", LONG)
def test_blocks_that_each_query_selects_are_gathered(name):
    p, hopper = long_problem(name), Hopper()
    gathered = name in ("moba", "moba-512", "a million", "grouped")
    for make, values in (hopper._plans.recorded(p), hopper._backward_plans.recorded(p)):
        plan = make(p, values)
        assert isinstance(plan, PiecewisePlan)
        assert isinstance(plan.whole.pieces[0][1], Blockwise) == gathered
    assert all(x.packed == gathered for x in hopper.configs(p))


def test_how_is_told():
    assert Hopper().pieces(long_problem("moba")) == (
        "32 of 1 batch element, 1 key head and 131072 queries; a block of keys and the queries that selected it are a packed sequence"
    )


def test_the_kernels_source_is_right_on_them(monkeypatch):
    monkeypatch.setattr(blockwise, "room", lambda p: 4 << 10)
    monkeypatch.setattr(pieces, "LEAST_PAIRS", 1)
    monkeypatch.setattr(blockwise, "ROW", -64)  # so that few keys are enough

    def forward(plan, t):
        assert plan.problem.packed
        return test_forward.emulate_kernel(Call(plan.problem, t, None, None), plan.config, ctas=2)

    def backward(plan, t, out, do, dlse):
        return test_backward.emulate_kernels(Call(plan.problem, t, do, dlse), plan.config, 3, out)

    monkeypatch.setattr(ForwardPlan, "forward", forward)
    monkeypatch.setattr(BackwardPlan, "backward", backward)
    c = call(*qkv(200, 200, heads=(2, 1)), mask=tw.causal() & tw.selected(entries(1, 1, 200, 3, blocks=4), 64))
    hopper = Hopper()
    assert all(isinstance(plan, Blockwise) for _, plan in hopper._plan(c.p).whole.pieces)
    out = hopper.forward(c.p, c.t)
    errors = c.expected().judge(accuracy.tensors(out, hopper.backward(c.p, c.t, out, c.do, c.dlse)))
    assert not [str(e) for e in errors if not e.ok]


@pytest.mark.parametrize(
    ("queries", "count", "block", "block_q", "sooner"),
    [(1 << 17, 12, 4096, 1, True), (1 << 15, 17, 128, 1, True), (1 << 15, 33, 64, 1, False), (1 << 13, 4, 512, 1, False),
     (1 << 17, 205, 64, 64, False), (1 << 17, 8, 512, 64, True), (1 << 17, 8, 512, 128, False)],
)  # fmt: skip
def test_queries_are_gathered_where_that_is_sooner(queries, count, block, block_q, sooner):
    mask = tw.causal() & tw.selected(blocks(1, 1, -(-queries // block_q), count), block, block_q)
    assert blockwise.sooner(of_length(mask, queries, (1, 1)), pieces.LEAST_PAIRS, pieces.VISITED) == sooner
