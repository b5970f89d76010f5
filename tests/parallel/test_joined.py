"""A rank's queries in one call, and the keys that travel for it, for masks whose tensors tell the keys of each query."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

import tilewise as tw
from bench.testing import call, normal
from tilewise.backends import base
from tilewise.masks import derived
from tilewise.parallel import balanced, plan, simulate
from tilewise.parallel.gathered import Gathered
from tilewise.parallel.layout import zigzag
from tilewise.spec import Options

SEQLEN = 300
IDS = torch.cat([torch.full((n,), i) for i, n in enumerate((37, 100, 5, 80, 78))])
MASKS = {
    "documents": tw.causal() & tw.documents(IDS),
    "both ways": tw.documents(IDS),
    "a window in documents": tw.causal() & tw.documents(IDS) & tw.window(left=30),
}


def calls_of(parallel) -> list[Gathered]:
    """The plans that a group of ranks has made."""
    return [made for made, *_ in parallel.plans._found.values()]


def whole(mask, ranks: int, layout, **options):
    """o, the gradients of all ranks put together, and each rank's plans and bytes."""
    q, k, v, do = inputs()
    contexts = {}

    def one(exchange):
        parallel = contexts[exchange.rank] = tw.context_parallel(exchange, layout=layout, scheme="gather")
        local = [parallel.shard(x).requires_grad_() for x in (q, k, v)]
        o = tw.attention(*local, mask=mask, parallel=parallel, **options)
        return o.detach(), *torch.autograd.grad(o, [*local, options["sink"]], parallel.shard(do))

    *parts, dsink = zip(*simulate(ranks, one), strict=True)
    layout = contexts[0].layout_of(SEQLEN)
    found = {name: layout.unshard(part, 1) for name, part in zip(("o", "dq", "dk", "dv"), parts, strict=True)}
    return found | {"dsink": dsink[0]}, [call for rank in range(ranks) for call in calls_of(contexts[rank])]


def inputs():
    return [normal(2, SEQLEN, heads, 16, seed=n) for n, heads in enumerate((4, 2, 2, 4))]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", MASKS)
def test_one_call_a_rank_computes_what_one_device_computes(name, ranks):
    q, k, v, do = inputs()
    options = {"sink": normal(4, seed=9).requires_grad_(), "score": tw.softcap(9.0)}
    expected = call(q, k, v, do, mask=MASKS[name], **options)
    expected.dlse.zero_()
    judged = expected.expected()
    for layout in ("zigzag", balanced(MASKS[name], SEQLEN, ranks)):
        found, calls = whole(MASKS[name], ranks, layout, **options)
        assert [str(e) for e in judged.judge(found) if not e.ok] == []
        assert all(x.route.joined and len(x.far) == 1 and not x.near for x in calls)


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (MASKS["documents"], {"score": tw.alibi(torch.tensor([0.5]))}),
        (MASKS["documents"], {"dropout_p": 0.5, "dropout_seed": 3}),
        (tw.causal() & tw.key_range(torch.tensor([20, 0]), torch.tensor([SEQLEN, SEQLEN])), {}),
    ],
    ids=["positions in the score", "dropout", "rows that see nothing"],
)
def test_what_depends_on_positions_is_cut_into_pieces(mask, options):
    found, calls = whole(mask, 2, "zigzag", sink=normal(4, seed=9).requires_grad_(), **options)
    assert not any(x.route.joined for x in calls)
    q, k, v, _ = inputs()
    torch.testing.assert_close(found["o"], tw.attention(q, k, v, mask=mask, sink=normal(4, seed=9), **options))


def test_ranks_of_which_one_alone_joins_its_queries_hear_that_their_documents_differ():
    """They would send gradients in other dtypes, although they read the same keys: a row of the second rank's documents sees none."""

    def one(exchange):
        ids = torch.zeros(16, dtype=torch.int64)
        ids[12:] = exchange.rank
        parallel = tw.context_parallel(exchange, layout="contiguous", scheme="gather")
        q, k, v = (parallel.shard(normal(1, 16, 2, 16, seed=n).bfloat16()).requires_grad_() for n in range(3))
        with pytest.raises(ValueError, match="the mask's tensors hold other numbers on each rank"):
            tw.attention(q, k, v, mask=tw.documents(ids) & tw.key_range(0, 11), parallel=parallel).sum().backward()
        return True

    assert simulate(2, one) == [True, True]


def test_documents_dealt_by_balanced_have_few_keys_to_fetch():
    lengths = torch.randint(128, 4096, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    mask, seqlen = tw.causal() & tw.documents(ids), len(ids)
    layout = balanced(mask, seqlen, 2)
    assert layout.fetched < 0.2 * seqlen / 2  # a zigzag or a gather of all keys: half of them

    def one(exchange):
        parallel = tw.context_parallel(exchange, layout=layout)
        q, k = (
            torch.empty(1, 1, 1, 1).expand(1, n, heads, 64) for n, heads in ((layout.lengths[exchange.rank], 8),) * 2
        )
        return parallel.explain(q, k, k, Options(mask=mask))

    for found in simulate(2, one):
        assert found.scheme == "gather"
        assert found.costs["gather"].milliseconds < found.costs["heads"].milliseconds


def attended(parallel, mask, scale: float = 1.0):
    """o and the gradients of q, k and v of one rank."""
    q, k, v, do = (parallel.shard(x * scale) for x in inputs())
    local = [x.requires_grad_() for x in (q, k, v)]
    o = tw.attention(*local, mask=mask, parallel=parallel)
    return [o.detach(), *torch.autograd.grad(o, local, do)]


def under_capture(monkeypatch, run):
    """``run`` of two ranks, which are told, once they call what they are given, that a CUDA graph is captured: none is without a GPU."""
    capturing = threading.local()
    for module in (plan, base, derived):
        monkeypatch.setattr(module, "is_captured", lambda: getattr(capturing, "now", False))
    return simulate(2, lambda exchange: run(exchange, lambda now=True: setattr(capturing, "now", now)))


def test_a_prepared_mask_s_plan_serves_a_capture(monkeypatch):
    mask = tw.causal() & tw.documents(IDS.clone())

    def one(exchange, capture):
        parallel = tw.context_parallel(exchange, scheme="gather")
        assert parallel.prepare(mask) is mask
        attended(parallel, mask)
        (made,) = calls_of(parallel)
        exchange.numbers([0])  # both ranks have planned
        capture()
        monkeypatch.setattr(plan, "planned", None)  # nothing is planned in the capture
        found = attended(parallel, mask, 0.5)
        assert list(parallel.plans.captured.values()) == [made]
        return found

    layout = zigzag(SEQLEN, 2)
    found = [layout.unshard(parts, 1) for parts in zip(*under_capture(monkeypatch, one), strict=True)]
    q, k, v, do = (x * 0.5 for x in inputs())
    local = [x.requires_grad_() for x in (q, k, v)]
    o = tw.attention(*local, mask=mask)
    for part, expected in zip(found, [o, *torch.autograd.grad(o, local, do)], strict=True):
        torch.testing.assert_close(part, expected)


def test_the_tables_that_a_graph_reads_live_as_long_as_the_group(monkeypatch):
    def one(exchange, capture):
        mask = tw.causal() & tw.documents(IDS.clone())  # each rank's own, gone with this function's local name
        parallel = tw.context_parallel(exchange, scheme="gather")
        parallel.prepare(mask)
        attended(parallel, mask)
        capture()
        attended(parallel, mask)
        capture(False)
        (made,) = calls_of(parallel)
        read = [weakref.ref(x) for x in (*made.tables, *mask.leaves)]
        mask.sources[0].add_(0)  # an eager call plans anew
        attended(parallel, mask)
        assert [call is made for call in calls_of(parallel)].count(False) == 1
        return parallel, read

    groups, read = zip(*under_capture(monkeypatch, one), strict=True)
    gc.collect()
    assert all(x() is not None for found in read for x in found)
    del groups
    gc.collect()
    assert [x() for found in read for x in found] == [None] * sum(map(len, read))
    assert all(map(len, read))


def prepared_nowhere(parallel, mask):
    attended(parallel, mask)


def prepared_on_one_rank(parallel, mask):
    if parallel.rank == 0:
        parallel.prepare(mask)
    attended(parallel, mask)


def not_called_before(parallel, mask):
    parallel.prepare(mask)


def written_since(parallel, mask):
    parallel.prepare(mask)
    attended(parallel, mask)
    parallel.exchange.numbers([0])  # the ranks of a process share the mask: all have read it
    mask.sources[0].add_(0)
    parallel.exchange.numbers([0])


@pytest.mark.parametrize("before", [prepared_nowhere, prepared_on_one_rank, not_called_before, written_since])
def test_a_capture_without_a_plan_on_every_rank_is_refused_on_all(before, monkeypatch):
    mask = tw.causal() & tw.documents(IDS.clone())

    def one(exchange, capture):
        parallel = tw.context_parallel(exchange, scheme="gather")
        before(parallel, mask)
        capture()
        with pytest.raises(NotImplementedError, match=r"call prepare\(mask\) of the group"):
            attended(parallel, mask)
        return parallel.plans.captured

    assert under_capture(monkeypatch, one) == [{}, {}]


def test_ranks_of_which_one_captures_are_told_so(monkeypatch):
    def one(exchange, capture):
        parallel = tw.context_parallel(exchange, scheme="gather")
        capture(exchange.rank == 1)
        with pytest.raises(ValueError, match="captured in a CUDA graph"):
            attended(parallel, MASKS["documents"])
        return True

    assert under_capture(monkeypatch, one) == [True, True]


def test_a_mask_that_cannot_tell_its_changes_is_not_prepared():
    with torch.inference_mode():
        mask = tw.documents(IDS.clone())

    def one(exchange):
        parallel = tw.context_parallel(exchange)
        with pytest.raises(ValueError, match="inference mode"):
            parallel.prepare(mask)
        q, k, *_ = inputs()
        with pytest.raises(ValueError, match="prepared for one device"):
            parallel.prepare(MASKS["documents"].prepare(q, k))
        return True

    assert simulate(1, one) == [True]
