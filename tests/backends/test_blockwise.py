"""Selected blocks as packed sequences: the two packed calls together are the call, whole and in pieces."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import tilewise as tw
from bench.testing import Call, call, normal
from tests.planning.test_bit_tiles import entries
from tilewise import accuracy, dispatch
from tilewise.backends import blockwise, piecewise
from tilewise.backends.blockwise import Blockwise, Order, blocks_of, by_blocks, summed
from tilewise.backends.cpu import library
from tilewise.backends.piecewise import Piecewise
from tilewise.planning.tiles import Grid, seen_keys

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


def errors_of(c: Call, way: Blockwise | Piecewise) -> list[str]:
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
    monkeypatch.setattr(blockwise, "room", lambda p: 1)


def in_pieces(c: Call, backend: str) -> Piecewise:
    by = dispatch.backend(backend)
    return by_blocks(c.p, by.forward, by.backward)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_the_pieces_together_are_the_call(name, backend, small):
    c = case(name)
    assert not errors_of(c, in_pieces(c, backend))


@pytest.mark.parametrize("name", CASES)
def test_every_query_of_every_head_is_in_one_piece(name, small, monkeypatch):
    c = case(name)
    for budget in (1, 4 << 10, 1 << 20):
        monkeypatch.setattr(blockwise, "room", lambda p, budget=budget: budget)
        times = torch.zeros(c.p.batch, c.p.seqlen_q, c.p.heads_q)
        for cut in blockwise.cut(c.p, backward=True):
            piecewise.take(times, cut.of_q).add_(1)
        assert (times == 1).all()


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


@pytest.mark.parametrize(
    ("group", "width", "count", "shared", "cut"),
    [(1, 128, 3, True, True), (3, 40, 2, False, True), (2, 16, 5, True, False)],
)
def test_triton_sums_the_rows_of_a_query(group, width, count, shared, cut):
    pytest.importorskip("triton", reason="the package triton is not installed")
    from tilewise.backends.triton import interpreting
    from tilewise.backends.triton.host.sum_rows import sum_rows

    if not interpreting():
        pytest.skip("kernels are not interpreted (tests/conftest.py)")
    rows, mine = normal(50, group, width, dtype=torch.bfloat16), normal(31, group, width, dtype=torch.bfloat16, seed=1)
    place = torch.randint(51, (31, count), generator=torch.Generator().manual_seed(2))
    whose, share = torch.arange(31) % 3 > 0, normal(31, count + cut, group, seed=3) if shared else None
    rows[49], mine[0] = torch.nan, torch.nan  # of no query
    place[place == 49] = 50
    order = SimpleNamespace(place=place, own=whose)
    expected = summed(order, rows, mine if cut else None, share)
    found = sum_rows(rows, place, (mine, whose) if cut else None, share)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)
    assert found.isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
def test_triton_gathers_by_block(causal, monkeypatch):
    pytest.importorskip("triton", reason="the package triton is not installed")
    from tilewise.backends import triton

    if not triton.interpreting():
        pytest.skip("kernels are not interpreted (tests/conftest.py)")
    monkeypatch.setattr(triton, "LEAST_PAIRS", 1)
    monkeypatch.setattr(triton, "VISITED", 1 << 20)
    monkeypatch.setattr(blockwise, "ROW", 0)
    q, do, k, v = (normal(1, 40, heads, 16, dtype=torch.bfloat16, seed=n) for n, heads in enumerate((2, 2, 1, 1)))
    indices, more = (own(1, 1, 40, 2, 16), {"sink": normal(2)}) if causal else (entries(1, 1, 40, 2, blocks=3), {})
    c, by = call(q, k, v, do, mask=tw.selected(indices, 16), causal=causal, **more), triton.Triton()
    assert "packed sequence" in by.pieces(c.p)
    make, values = by._plans.recorded(c.p)
    assert isinstance(make(c.p, values), Piecewise)
    out = by.forward(c.p, c.t)
    errors = c.expected().judge(accuracy.tensors(out, by.backward(c.p, c.t, out, c.do, c.dlse)))
    assert not [str(e) for e in errors if not e.ok]
