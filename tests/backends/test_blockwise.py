"""Selected blocks as packed sequences: the two packed calls together are the call, whole and in pieces."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import tilewise as tw
from bench.testing import Call, call, normal
from tests.planning.test_bit_tiles import entries
from tilewise import accuracy, dispatch
from tilewise.backends.blockwise import Blockwise, Order, blocks_of
from tilewise.backends.cpu import library
from tilewise.backends.hopper import pieces
from tilewise.backends.hopper.forward import config as forward_config
from tilewise.backends.hopper.host.piecewise_call import PiecewisePlan
from tilewise.planning.tiles import Grid, seen_keys
from tilewise.problem import Problem

BACKENDS = [
    "portable",
    pytest.param("cpu", marks=pytest.mark.skipif(isinstance(library.load(), str), reason="no native library")),
]
# Queries, keys, query and key heads, batch, dtype; options.
CASES = {
    "moba": (300, 300, (4, 4), 1, torch.bfloat16, lambda: {"mask": tw.causal() & tw.selected(own(1, 4, 300, 2, 64), 64)}),
    "some-without-their-own": (
        300, 300, (2, 2), 1, torch.float32, lambda: {"mask": tw.causal() & tw.selected(entries(1, 2, 300, 2, blocks=5), 64)},
    ),
    "not-causal": (130, 200, (2, 2), 2, torch.float32, lambda: {"mask": tw.selected(entries(2, 2, 130, 3, blocks=10), 32)}),
    "grouped": (
        200, 200, (4, 2), 2, torch.float16,
        lambda: {"mask": tw.causal() & tw.selected(own(2, 2, 200, 3, 40), 40), "sink": normal(4, seed=8)},
    ),
    "of-all-heads-and-elements": (
        200, 200, (4, 2), 2, torch.float32, lambda: {"mask": tw.selected(entries(1, 1, 3, 2, blocks=3), 70, 70), "sink": normal(4)},
    ),
    "fewer-queries": (90, 230, (2, 1), 1, torch.float32, lambda: {"mask": tw.causal() & tw.selected(entries(1, 1, 90, 3, blocks=6), 45)}),
    "one-query": (1, 230, (2, 1), 2, torch.float32, lambda: {"mask": tw.causal() & tw.selected(entries(2, 1, 1, 3, blocks=6), 45)}),
    "more-queries": (230, 90, (2, 1), 1, torch.float32, lambda: {"mask": tw.selected(entries(1, 1, 230, 3, blocks=4), 30)}),
    "none": (90, 90, (2, 2), 1, torch.float32, lambda: {"mask": tw.selected(torch.full((1, 2, 90, 2), -1), 30)}),
    "more-entries-than-blocks": (
        90, 90, (2, 2), 1, torch.bfloat16, lambda: {"mask": tw.causal() & tw.selected(entries(1, 2, 90, 7, blocks=3), 30)},
    ),
    "double": (90, 90, (2, 1), 1, torch.float64, lambda: {"mask": tw.causal() & tw.selected(entries(1, 1, 90, 2, blocks=4), 25)}),
    "scaled": (
        90, 90, (2, 1), 1, torch.float32,
        lambda: {"mask": tw.causal() & tw.selected(entries(1, 1, 90, 2, blocks=4), 25), "softmax_scale": 1.5},
    ),
}  # fmt: skip
OTHERS = {
    "a window beside it": lambda i: {"mask": tw.window(left=20, right=0) & tw.selected(i, 16)},
    "a union": lambda i: {"mask": tw.causal() & (tw.selected(i, 16) | tw.window(left=9))},
    "two selections": lambda i: {"mask": tw.selected(i, 16) & tw.selected(i, 32)},
    "a score": lambda i: {"mask": tw.selected(i, 16), "score": lambda s, b, h, i, j: s + h},
    "dropout": lambda i: {"mask": tw.selected(i, 16), "dropout_p": 0.5, "dropout_seed": 1},
    "keys from within a block on": lambda i: {"mask": tw.selected(i, 16), "piece": tw.piece.Piece(0, 5, 64, 128)},
    "queries past the keys": lambda i: {
        "mask": tw.causal() & tw.selected(i, 16),
        "piece": tw.piece.Piece(0, 0, 64, 128),
    },
    "one order": lambda i: {"mask": tw.selected(i, 16), "deterministic": "everywhere"},
    "heads in a row": lambda i: {"mask": tw.keep(lambda b, h, q, j: q // 16 == j // 16)},
}


def own(batch: int, heads: int, queries: int, count: int, block: int) -> Tensor:
    """Entries as in MoBA: each query has its own block and blocks of the past, some of them twice."""
    past = entries(batch, heads, queries, count, blocks=-(-queries // block))
    row = (torch.arange(queries) // block).view(-1, 1)
    return torch.cat([past.clamp(max=row), row.expand(batch, heads, -1, 1)], -1)


def case(name: str) -> Call:
    nq, nk, (heads_q, heads_k), batch, dtype, options = CASES[name]
    q, do = (normal(batch, nq, heads_q, 16, dtype=dtype, seed=n) for n in (1, 2))
    k, v = (normal(batch, nk, heads_k, 16, dtype=dtype, seed=n) for n in (3, 4))
    return call(q, k, v, do, **options())


def blockwise_of(c: Call, backend: str) -> Blockwise:
    by = dispatch.backend(backend)
    assert blocks_of(c.p) is not None
    return Blockwise(c.p, by.forward, by.backward)


class Plans:
    """The plans of packed problems by a backend."""

    def __init__(self, backend: str):
        self.by = dispatch.backend(backend)

    def of(self, p: Problem) -> SimpleNamespace:
        return SimpleNamespace(forward=partial(self.by.forward, p), backward=partial(self.by.backward, p))


def errors_of(c: Call, way: Blockwise | PiecewisePlan) -> list[str]:
    out = way.forward(c.t)
    errors = c.expected().judge(accuracy.tensors(out, way.backward(c.t, out, c.do, c.dlse)))
    return [str(e) for e in errors if not e.ok]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_the_packed_calls_together_are_the_call(name, backend):
    c = case(name)
    assert not errors_of(c, blockwise_of(c, backend))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(pieces, "BUDGET", 1)
    monkeypatch.setattr(pieces, "LEAST_BLOCK", 1)


def in_pieces(c: Call, backend: str) -> PiecewisePlan:
    half = (x._replace(dtype=torch.bfloat16) for x in (c.p.q, c.p.k, c.p.v))  # of which alone there are configs
    config = forward_config.choose(replace(c.p, **dict(zip("qkv", half, strict=True))))
    assert pieces.gathers(c.p, config)
    return PiecewisePlan(c.p, config, Plans(backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_the_pieces_together_are_the_call(name, backend, small):
    c = case(name)
    assert not errors_of(c, in_pieces(c, backend))


@pytest.mark.parametrize("name", CASES)
def test_every_query_of_every_head_is_in_one_piece(name, small, monkeypatch):
    c = case(name)
    way = in_pieces(c, "portable")
    for budget in (1, 4 << 10):
        monkeypatch.setattr(pieces, "BUDGET", budget)
        times = torch.zeros(c.p.batch, c.p.seqlen_q, c.p.heads_q)
        found = pieces.cuts(c.p, way.config) if pieces.gathers(c.p, way.config) else []
        for cut in found:
            pieces.take(times, cut.of_q).add_(1)
        assert (times == (1 if found else 0)).all()
        assert found or budget > 1


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_are_not_gathered(name):
    q = normal(1, 64, 2, 16)
    assert blocks_of(call(q, q, q, **OTHERS[name](entries(1, 2, 64, 2, blocks=4))).p) is None


@pytest.mark.parametrize("name", ["moba", "some-without-their-own", "fewer-queries", "not-causal"])
def test_keys_are_seen_as_the_mask_says(name):
    c = case(name)
    p, found = c.p, blocks_of(c.p)
    grid = Grid.whole(p.spec.region, c.t.leaves, (p.batch, p.heads_q, p.seqlen_q, p.seqlen_k), p.device)
    rows = c.t.leaves[found.slot].long()
    each = [Order.of(x, found.first, p.seqlen_k, found.block).seen for x in rows]
    assert torch.equal(torch.stack(each), seen_keys(grid, p.group).expand(p.batch, p.heads_k, -1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_no_query_sees_touches_nothing(backend):
    q, k, v = (normal(1, 300, 2, 16, seed=n) for n in range(3))
    k[:, 200:], v[:, 200:] = torch.nan, torch.nan
    c = call(q, k, v, mask=tw.causal() & tw.selected(entries(1, 2, 300, 2, blocks=2), 100))
    way = blockwise_of(c, backend)
    out = way.forward(c.t)
    grads = way.backward(c.t, out, c.do, c.dlse)
    assert all(x.isfinite().all() for x in (out.o, grads.dq, grads.dk, grads.dv))
    assert not grads.dk[:, 200:].any()
    assert not grads.dv[:, 200:].any()
