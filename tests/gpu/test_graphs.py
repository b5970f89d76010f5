"""CUDA graphs that are replayed after eager calls of many other lengths: what a capture read must still be there."""

import gc

import pytest
import torch

import tilewise as tw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def _prompts_over_pages(backend):
    k, v = torch.randn(2, 64, 64, 8, 64, device="cuda").bfloat16()
    table = torch.arange(64, device="cuda", dtype=torch.int32).view(4, 16)
    cache = tw.paged(k, v, table, torch.full((4,), 700, device="cuda", dtype=torch.int32))
    return lambda q: tw.attention_paged(q, cache, causal=True, backend=backend)


def _bias_by_distance(backend):
    table = torch.randn(32, 64, device="cuda")
    score = lambda s, b, h, i, j: s + table[h, torch.clamp(i - j, 0, 63)]  # noqa: E731
    return lambda q: tw.attention(q, q[:, :, :8], q[:, :, :8], causal=True, score=score, backend=backend)


def _documents(backend):
    ids = torch.arange(2048, device="cuda") // 100
    mask = lambda q: tw.documents(ids[: q.shape[1]].expand(4, -1))  # noqa: E731
    return lambda q: tw.attention(q, q[:, :, :8], q[:, :, :8], mask=mask(q), backend=backend)


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("make", [_prompts_over_pages, _bias_by_distance, _documents])
def test_a_graph_replays_after_calls_of_more_lengths_than_dispatch_remembers(make, backend):
    call, lengths = make(backend), iter(range(100, 1000))
    new = lambda n: torch.randn(4, n, 32, 64, device="cuda").bfloat16()  # noqa: E731
    with torch.no_grad():
        q = new(next(lengths))
        expected, graph = call(q), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(q)
        for _ in range(530):
            call(new(next(lengths)))
        gc.collect()
        torch.cuda.empty_cache()
        garbage = [
            torch.full((2**n,), 0x7FFFFFFF, device="cuda", dtype=torch.int32) for n in range(7, 22) for _ in range(8)
        ]
        graph.replay()
    assert torch.equal(captured, expected)
    del garbage
