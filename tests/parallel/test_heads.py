"""Attention over ranks by heads: groups of heads, packed sequences that cross shards, unequal shards, bytes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import tilewise as tw
from bench.testing import normal
from tilewise.parallel import Layout, context_parallel, cost, exchange, heads, plan, simulate
from tilewise.parallel.exchange import Simulated
from tilewise.parallel.heads import head_axes
from tilewise.parallel.plan import chosen, refusals
from tilewise.parallel.symmetric import SymmetricGroup
from tilewise.problem import check
from tilewise.spec import Options, assemble, parse_spec

ROWS, HEADS_Q, HEADS_K = 24, 8, 4
LAYOUTS = {
    "zigzag": "zigzag",
    "contiguous": "contiguous",
    "unequal": Layout((((0, 3), (20, 24)), ((3, 20),))),
    "one rank holds nothing": Layout((((0, ROWS),), ())),
}


def tensors(*batch: int) -> tuple[torch.Tensor, ...]:
    """q, k, v and do, whose heads of v are wider than those of q and k."""
    shapes = ((HEADS_Q, 16), (HEADS_K, 16), (HEADS_K, 24), (HEADS_Q, 24))
    return tuple(normal(*batch, ROWS, *shape, seed=n) for n, shape in enumerate(shapes))


def over_ranks(inputs, run, layout="zigzag", dim=1, **options):
    """What two ranks compute of ``run(q, k, v, parallel)`` and its gradients, put together, and how many bytes each received."""
    contexts = {}

    def one(rank):
        parallel = contexts[rank.rank] = context_parallel(rank, layout=layout, scheme="heads", **options)
        *local, do = (parallel.shard(x, dim).detach().requires_grad_() for x in inputs)
        before = rank.received
        o = run(*local, parallel)
        grads = torch.autograd.grad(o, local, do)
        return o.detach(), *grads, rank.received - before

    *parts, received = zip(*simulate(2, one), strict=True)
    return [contexts[0].layout_of(ROWS).unshard(part, dim) for part in parts], received


def alone(inputs, run):
    *whole, do = (x.detach().requires_grad_() for x in inputs)
    o = run(*whole, None)
    return [o.detach(), *torch.autograd.grad(o, whole, do)]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_rank_computes_two_groups_of_heads_whatever_rows_it_holds(layout, monkeypatch):
    monkeypatch.setattr(cost, "WORTH_A_GROUP", 1)
    assert cost.groups_of(whole_of(causal=True), 2) == 2

    def run(q, k, v, parallel):
        return tw.attention(q, k, v, causal=True, score=tw.softcap(5.0), parallel=parallel)

    found, _ = over_ranks(tensors(2), run, layout)
    for part, expected in zip(found, alone(tensors(2), run), strict=True):
        torch.testing.assert_close(part, expected)


def test_packed_sequences_may_cross_shards():
    cu_seqlens = torch.tensor([0, 5, 5, 19, 22])

    def run(q, k, v, parallel):
        return tw.attention_varlen(q, k, v, cu_seqlens, causal=True, parallel=parallel)

    found, _ = over_ranks(tensors(), run, dim=0)
    for part, expected in zip(found, alone(tensors(), run), strict=True):
        torch.testing.assert_close(part, expected)


def test_the_lse_of_packed_sequences_comes_back_to_its_rows():
    cu_seqlens = torch.tensor([0, 9, 24])
    q, k, v, _ = tensors()
    _, expected = tw.attention_varlen(q, k, v, cu_seqlens, return_lse=True)

    def one(rank):
        parallel = context_parallel(rank)
        local = [parallel.shard(x, 0) for x in (q, k, v)]
        _, lse = tw.attention_varlen(*local, cu_seqlens, return_lse=True, parallel=parallel)
        return parallel.unshard(lse, 1)

    for lse in simulate(2, one):
        torch.testing.assert_close(lse, expected)


def test_packed_sequences_whose_heads_do_not_divide_are_refused_on_every_rank():
    def one(rank):
        q, k, v, _ = tensors()
        parallel = context_parallel(rank, layout="contiguous")
        local = [parallel.shard(x, 0) for x in (q, k, v)]
        with pytest.raises(NotImplementedError) as refused:
            tw.attention_varlen(*local, torch.tensor([0, ROWS]), parallel=parallel)
        return str(refused.value)

    said = set(simulate(3, one))
    assert len(said) == 1
    assert "  heads: 4 key heads are no multiple of 3 ranks" in (text := said.pop())
    assert "  gather: packed sequences are not cut into pieces" in text


def whole_of(**options):
    """The Problem of a whole attention."""
    q, k, v = (x.requires_grad_() for x in tensors(2)[:3])
    extras, seed, text = assemble(q, k, v, Options(**options))
    return check(q, k, v, extras, seed, parse_spec(text))


def test_bytes_that_ranks_receive_are_those_of_the_cost_model():
    agreement = 3 * 8

    def run(q, k, v, parallel):
        return tw.attention(q, k, v, causal=True, parallel=parallel)

    _, received = over_ranks(tensors(2), run)
    model = cost.exchanging_heads(whole_of(causal=True), 2).received
    assert all(n - model in (0, agreement) for n in received)


def cheapest(whole, ranks: int, keys=None, memory: int = 0) -> str:
    """The scheme, of those that are not combined, that is chosen where so many keys travel; by default all."""
    machines = cost.Machines(ranks, memory=memory)
    costs = {name: find(whole, ranks, keys, machines.per_second) for name, find in cost.COSTS.items()}
    return chosen(
        "auto", costs, {n: said for n, said in refusals(whole, machines).items() if n in costs}, machines.memory
    )


def test_the_cheaper_scheme_is_chosen_and_the_other_where_it_cannot():
    few_keys = cost.Cost(received=1 << 20, copied=0, collectives=4)
    assert few_keys.milliseconds < cost.Cost(received=1 << 30, copied=0, collectives=4).milliseconds
    whole = whole_of(causal=True)
    assert cost.exchanging_heads(whole, 2).milliseconds > cost.gathering(whole, 2).milliseconds
    assert cheapest(whole, 2) == "gather"
    long = replace(whole, **{x: getattr(whole, x)._replace(shape=(64, 1 << 16, HEADS_K, 64)) for x in "qkv"})
    assert cost.exchanging_heads(long, 4).milliseconds < cost.gathering(long, 4).milliseconds
    assert cheapest(long, 4) == "heads"
    assert cheapest(long, 4, cost.Keys(fetched=1 << 10, lent=1 << 10, kept=True)) == "gather"
    assert cheapest(whole_of(causal=True), 3) == "gather"
    assert cheapest(whole_of(dropout_p=0.5, dropout_seed=1), 2) == "gather"


def test_a_scheme_that_needs_too_much_memory_is_not_chosen():
    long = replace(
        whole_of(causal=True),
        **{x: getattr(whole_of(causal=True), x)._replace(shape=(1, 1 << 20, 8, 128)) for x in "qkv"},
    )
    keys = cost.Keys(fetched=1 << 10, lent=1 << 10, kept=True)
    assert cheapest(long, 8, keys) == "gather"
    by_gathering, by_heads = cost.gathering(long, 8, keys), cost.exchanging_heads(long, 8)
    least = min(by_gathering, by_heads, key=lambda found: found.memory)
    name = "gather" if least is by_gathering else "heads"
    assert cheapest(long, 8, keys, memory=1) == name  # no other needs less


@pytest.mark.parametrize("ranks", [4, 6])
@pytest.mark.parametrize("options", ["causal", "documents", "lengths by head", "alibi and sink", "bias in a window"])
def test_neighbours_exchange_heads_and_neighbourhoods_keys(ranks, options):
    q, k, v, do = (x[..., :16] for x in tensors(2))
    ids = torch.tensor([0] * 5 + [1] * 8 + [2] * 11)
    given = {
        "causal": {"causal": True},
        "documents": {"mask": tw.causal() & tw.documents(ids)},
        "lengths by head": {"mask": tw.key_lengths(torch.arange(9, 9 + 2 * HEADS_Q).view(2, HEADS_Q))},
        "alibi and sink": {
            "causal": True,
            "score": tw.alibi(normal(HEADS_Q).requires_grad_()) >> tw.softcap(4.0),
            "sink": normal(HEADS_Q, seed=1).requires_grad_(),
        },
        "bias in a window": {
            "mask": tw.window(7, 3),
            "score": tw.bias(normal(HEADS_Q, ROWS, ROWS).requires_grad_()),
            "softmax_scale": 0.3,
        },
    }

    def grads_of(parallel, o, local, do):
        leaves = [given[options][n] for n in ("sink",) if n in given[options]]
        leaves += list(given[options]["score"].leaves) if "score" in given[options] else []
        return torch.autograd.grad((o * do).sum(), [*local, *leaves])

    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    alone_o, lse = tw.attention_with_lse(*whole, **given[options])
    expected = [alone_o, lse, *grads_of(None, alone_o, whole, do)]

    def one(rank):
        parallel = context_parallel(rank, scheme="heads+gather")
        local = [parallel.shard(x).detach().requires_grad_() for x in (q, k, v)]
        o, lse = tw.attention_with_lse(*local, parallel=parallel, **given[options])
        dq, dk, dv, *leaves = grads_of(parallel, o, local, parallel.shard(do))
        joined = [parallel.unshard(x.detach(), dim) for x, dim in ((o, 1), (lse, 2), (dq, 1), (dk, 1), (dv, 1))]
        return [*joined, *leaves]

    for found in simulate(ranks, one):
        for part, like in zip(found, expected, strict=True):
            torch.testing.assert_close(part, like.detach())


def test_a_rank_takes_its_heads_part_of_tensors_that_are_indexed_by_the_head():
    def axes(**options):
        q, k, v, _ = tensors(2)
        return head_axes(parse_spec(assemble(q, k, v, Options(**options))[2]))

    table = normal(9, HEADS_Q)
    assert axes(sink=normal(HEADS_Q), score=tw.alibi(normal(HEADS_Q, seed=1))) == {0: 0, 1: 0}
    assert axes(score=lambda s, b, h, i, j: s + table[torch.clamp(i - j, 0, 8), h]) == {0: 1}
    assert axes(mask=tw.documents(torch.zeros(ROWS, dtype=torch.int64)), score=tw.bias(normal(ROWS, ROWS))) == {}
    with pytest.raises(ValueError, match="computes with the head's number"):
        axes(score=lambda s, b, h, i, j: s * h)
    with pytest.raises(ValueError, match="indexed by the head in several ways"):
        axes(score=lambda s, b, h, i, j: s + table[0, h] + table[h, 0])


def test_heads_are_cut_into_groups_that_are_worth_a_call_each(monkeypatch):
    def groups(most=9, **options):
        return cost.groups_of(whole_of(**options), 2, most)

    assert groups() == 1
    kept = ROWS * (ROWS + 1) // 2 * 2 * HEADS_Q // 2  # pairs of both batch elements and of a rank's heads
    monkeypatch.setattr(cost, "WORTH_A_GROUP", 2 * kept * (16 + 24) / 2)
    assert groups(causal=True) == 2
    assert groups(mask=tw.causal() & tw.window(left=3)) == 1
    assert groups(causal=True, most=1) == 1
    assert groups(mask=tw.documents(torch.zeros(ROWS, dtype=torch.int64))) == 1


@pytest.mark.parametrize("dim", [3, 4, 8])
def test_copies_of_sixteen_bytes_copy_what_any_copy_does(dim):
    x = normal(6, 4, dim).half()
    x[0, 0, 0] = torch.nan
    for source in (x, x[1:], x.transpose(0, 1), x.view(-1)[1:-dim].view(-1)[: 4 * dim].view(4, dim)):
        target = torch.empty_like(source)
        heads._copy(target, source)
        assert torch.equal(target.view(torch.int16), source.view(torch.int16))


def explained(ranks: int, inputs, dim: int = 1, **options) -> list[str]:
    """What ``explain`` says on each rank."""

    def one(rank):
        parallel = context_parallel(rank, scheme="heads" if ranks == 2 else "auto")
        local = [parallel.shard(x, dim).requires_grad_() for x in inputs[:3]]
        return str(tw.explain(*local, parallel=parallel, **options))

    return simulate(ranks, one)


def test_explain_says_which_scheme_costs_what_and_what_each_rank_computes():
    by_heads, gathered = explained(2, tensors(2), causal=True)[1], explained(3, tensors(2), causal=True)[0]
    model = cost.COSTS["heads"](whole_of(causal=True), 2)
    assert f"scheme    heads: {model}" in by_heads.replace("\n          ", " ")
    assert "not       gather: " in by_heads
    assert "shares    50.0 %, 50.0 % of the visited tiles" in by_heads
    assert "carrier   nothing: ranks of one process" in by_heads
    assert f"q (2, {ROWS}, {HEADS_Q // 2}, 16)" in by_heads
    assert "scheme    gather: " in gathered
    assert "not       heads: 4 key heads are no multiple of 3 ranks" in gathered
    assert "backend   " in gathered
    assert "packed, 1 sequences" in explained(2, tensors(), 0, cu_seqlens_q=torch.tensor([0, ROWS]))[0]


class _Reaching(Simulated):
    """A rank that copies from its peers' rooms as copy engines do: its memory is theirs, and nothing runs beside anything."""

    def room(self, name, shape, like, most):
        assert math.prod(shape) <= most
        return like.new_empty(shape)

    def _peers(self, name, shapes, like):
        rooms = self.objects(like)
        assert [tuple(room.shape) for room in rooms] == [tuple(shape) for shape in shapes]
        return [(rank % self.size, rooms[rank % self.size]) for rank in range(self.rank, self.rank + self.size)]

    def _copied(self, copies, whole):
        for target, source in copies:
            assert target.is_contiguous()
            assert source.is_contiguous()
            target.copy_(source)
        self.objects(None)  # all have read
        return lambda: whole

    to_heads, to_rows = SymmetricGroup.copied_to_heads, SymmetricGroup.copied_to_rows


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_copy_engines_put_rows_where_the_collective_puts_them(layout, monkeypatch):
    def run(q, k, v, parallel):
        return tw.attention(q, k, v, mask=tw.window(7), parallel=parallel)

    by_collective, received = over_ranks(tensors(2), run, layout)
    monkeypatch.setattr(exchange, "Simulated", _Reaching)
    by_engines, again = over_ranks(tensors(2), run, layout)
    assert received == again
    for part, expected in zip(by_engines, by_collective, strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("mask", [tw.documents(torch.arange(ROWS) // 5), tw.dense(torch.ones(ROWS, ROWS).tril() > 0)])
def test_no_graph_holds_what_is_read_of_a_mask_s_tensors(mask, monkeypatch):
    # A capture is not to be had without a GPU: what asks for one is told that it is under way.
    monkeypatch.setattr(plan, "is_captured", lambda: True)

    def one(rank):
        by_gather, free = (context_parallel(rank, scheme=scheme) for scheme in ("gather", "auto"))
        q, k, v = (free.shard(x) for x in tensors(1)[:3])
        with pytest.raises(NotImplementedError, match="a CUDA graph is captured, and the mask has tensors"):
            tw.attention(q, k, v, mask=mask, parallel=by_gather)
        tw.attention(q, k, v, causal=True, parallel=by_gather)  # lengths alone tell which keys travel
        assert tw.explain(q, k, v, mask=mask, parallel=free).scheme == "heads"
        return free.unshard(tw.attention(q, k, v, mask=mask, parallel=free))

    expected = tw.attention(*tensors(1)[:3], mask=mask)
    for o in simulate(2, one):
        torch.testing.assert_close(o, expected)
