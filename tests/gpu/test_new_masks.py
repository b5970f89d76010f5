"""Masks whose tensors are new, known, or written to in place, on other streams and in graphs, against the portable backend.

Keys and values that no query sees are NaN.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tilewise as tw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SIZES = [(1, 512, 512), (2, 300, 333), (1, 77, 1000), (2, 2111, 2111)]  # batch, queries, keys


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def pairs(batch: int, nq: int, nk: int, heads: int = 1) -> Tensor:
    kept = torch.rand(batch, heads, nq, nk, device="cuda") < 0.3
    kept[..., nk // 3 : nk // 2] = False  # keys that nobody sees
    kept[..., 5, :] = False  # a row that sees nothing
    return kept


def ids(batch: int, nq: int, nk: int) -> Tensor:
    return (torch.rand(batch, nk, device="cuda") < 0.02).cumsum(-1)


KINDS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], tw.Mask]]] = {
    "dense": (pairs, tw.dense),
    "dense of heads": (lambda *sizes: pairs(*sizes, heads=8), tw.dense),
    "documents": (ids, tw.documents),
}


def hidden(kept: Tensor, x: Tensor) -> Tensor:
    """``x``, keys or values, with NaN where no query of a key head sees it."""
    if kept.dtype != torch.bool:
        return x
    seen = kept.any(2)
    seen = seen.unflatten(1, (x.shape[2], -1)).any(2) if seen.shape[1] > 1 else seen
    return torch.where(seen.mT.unsqueeze(-1), x, torch.nan)


def agrees(source: Tensor, mask: tw.Mask, grads: bool) -> None:
    batch, nk = source.shape[0], source.shape[-1]
    nq = source.shape[2] if source.dtype == torch.bool else nk
    q, k, v = normal(batch, nq, 8, 64), normal(batch, nk, 2, 64), normal(batch, nk, 2, 64)
    found = []
    for backend, x in ((None, (q, hidden(source, k), hidden(source, v))), ("portable", (q, k, v))):
        x = [t.detach().requires_grad_(grads) for t in x]
        o = tw.attention(*x, mask=mask, backend=backend)
        found.append((o.detach(), *(torch.autograd.grad(o, x, torch.ones_like(o)) if grads else ())))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0.03 * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("grads", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_is_that_of_its_tensors_now(kind, sizes, grads):
    make, as_mask = KINDS[kind]
    if kind == "documents" and sizes[1] != sizes[2]:
        pytest.skip("documents have as many queries as keys")
    for _ in range(3):
        source, other = make(*sizes), torch.cuda.Stream()
        mask = as_mask(source)
        agrees(source, mask, grads)
        for _ in range(3):  # known; and whether it hides a key is asked for, and told
            agrees(source, mask, grads)
        source.copy_(make(*sizes))
        agrees(source, mask, grads)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            agrees(source, mask, grads)
        torch.cuda.current_stream().wait_stream(other)
        source.copy_(make(*sizes))
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):  # made there, read here
            agrees(source, mask, grads)
        torch.cuda.current_stream().wait_stream(other)
        agrees(source, mask, grads)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_reads_the_mask_that_is_written_before_its_replay(kind):
    make, as_mask = KINDS[kind]
    sizes = (2, 1333, 1333)
    source, q, k, v = make(*sizes), normal(2, 1333, 8, 64), normal(2, 1333, 2, 64), normal(2, 1333, 2, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        tw.attention(q, k, v, mask=as_mask(source))
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            o = tw.attention(q, k, v, mask=as_mask(source))
        for _ in range(4):
            source.copy_(make(*sizes))
            q.normal_(), v.normal_()
            graph.replay()
            expected = tw.attention(q, k, v, mask=as_mask(source), backend="portable")
            torch.testing.assert_close(o.float(), expected.float(), rtol=0, atol=0.03)


@pytest.mark.parametrize(("page_size", "new", "batch"), [(16, 1, 4), (64, 1, 3), (64, 3, 2)])
@pytest.mark.parametrize("first", [0, 4], ids=["aligned", "unaligned"])
def test_appended_rows_lie_behind_the_others(page_size, new, batch, first):
    for _ in range(3):
        pools = torch.randn(2, 64, page_size, 2, 64, device="cuda", dtype=torch.bfloat16)
        copies, table = pools.clone(), torch.randperm(64, device="cuda", dtype=torch.int32)[: batch * 8].view(batch, 8)
        lengths = torch.randint(0, 8 * page_size - new - 1, (batch,), device="cuda", dtype=torch.int32)
        rows, q = normal(batch, new, 2, 72)[..., first : first + 64], normal(batch, new, 8, 64)
        o = tw.attention_paged(q, tw.append(tw.paged(*pools, table, lengths), rows, rows), causal=True)
        for b in range(batch):
            for n in range(new):
                at = int(lengths[b]) + n
                copies[:, int(table[b, at // page_size]), at % page_size] = rows[b, n]
        assert torch.equal(pools, copies)
        expected = tw.attention_paged(q, tw.paged(*copies, table, lengths + new), causal=True, backend="portable")
        torch.testing.assert_close(o.float(), expected.float(), rtol=0, atol=0.03)
