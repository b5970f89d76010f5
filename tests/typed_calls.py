"""A user's program for the type checker (``make lint``): every public function called rightly, and wrongly where a type can tell.

mypy reports an ignored line that has no error, so a wrong call that it would let pass fails as a right one that it refuses does.
"""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import Tensor

import tilewise as tw
from tilewise.api import Parallel
from tilewise.dispatch import Explanation
from tilewise.parallel import ContextParallel, Layout, balanced, simulate, zigzag
from tilewise.parallel.exchange import Exchange
from tilewise.selfcheck import Report


def flex_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A function as FlexAttention's users write it."""
    return i >= j


def right_masks() -> list[tw.Mask]:
    """A mask of each kind, for 32 queries and keys, two sequences and two heads."""
    n = torch.tensor([32, 20])
    return [
        assert_type(tw.causal() & tw.window(left=7), tw.Mask),
        tw.causal(align="first") & tw.window(7, align="last"),
        assert_type(tw.causal() | tw.window(2, 2), tw.Mask),
        tw.prefix(3) & tw.prefix(n),
        tw.key_range(0, n),
        tw.key_lengths(32),
        tw.documents(torch.arange(32) // 8),
        tw.keep(lambda b, h, i, j: (i + j) % 2 == 0),
        tw.keep(flex_mask),
        tw.dense(torch.ones(32, 32, dtype=torch.bool)),
        tw.block_sparse(tw.butterfly(4), 8, 8),
        tw.block_sparse(tw.strided(4, 4, 2) | tw.local_global(4, 4), 8, 8),
        tw.selected(torch.zeros(1, 1, 4, 2, dtype=torch.int64), block=8, block_q=8),
    ]


def right_scores() -> list[tw.Score]:
    """A score of each kind, for two heads and 32 queries and keys."""
    table = torch.zeros(2, 33, requires_grad=True)
    return [
        assert_type(tw.softcap(30.0) >> tw.bias(torch.zeros(2, 32, 32)), tw.Score),
        tw.alibi(torch.rand(2)),
        tw.score(lambda s, b, h, i, j: torch.tanh(s) + table[h, (i - j).clamp(-16, 16) + 16]),
        tw.score(lambda s, b, h, i, j: s + tw.lookup(table, h, (i + tw.offset - j).clamp(0, 32))),
    ]


def right_calls() -> None:
    """Every function that computes, with each keyword at least once."""
    q, k, v = (torch.randn(2, 32, 2, 8) for _ in range(3))
    packed, cu_seqlens = torch.randn(32, 2, 8), torch.tensor([0, 20, 32])
    for mask in right_masks():
        for score in right_scores():
            assert_type(tw.attention(q, k, v, mask=mask, score=score, deterministic=True), Tensor)
    tw.attention(q, k, v, causal=True, sink=torch.zeros(2), dropout_p=0.1, dropout_seed=1, backend="portable")
    tw.attention(q, k, v, mask=flex_mask, score=torch.zeros(32, 32), softmax_scale=1, dropout_seed=torch.tensor(1))
    o, lse = assert_type(
        tw.attention_with_lse(q, k, v, mask=torch.ones(32, 32, dtype=torch.bool)), tuple[Tensor, Tensor]
    )
    sink = torch.zeros(2)
    assert_type(tw.attention_backward(o, q, k, v, o, lse, dlse=lse, sink=sink, wrt=[sink]), tuple[Tensor, ...])
    stats = assert_type(tw.attention_with_stats(q, k, v, causal=True, per="head"), tw.AttentionStats)
    assert_type(tw.merge([(o, lse), (stats.o, stats.lse)]), tuple[Tensor, Tensor])
    assert_type(tw.attention_with_stats(q, k, v, stats=("max_logit", "key_mass")).key_mass, Tensor | None)
    assert_type(tw.probabilities(q, k, lse, torch.zeros(1, 1, 32, 2, dtype=torch.int32), causal=True), Tensor)
    assert_type(tw.attention_varlen(packed, packed, packed, cu_seqlens, causal=True), Tensor)
    assert_type(tw.attention_varlen(packed, packed, packed, cu_seqlens, return_lse=True), tuple[Tensor, Tensor])
    assert_type(tw.attention_varlen_with_lse(packed, packed, packed, cu_seqlens), tuple[Tensor, Tensor])
    cache = assert_type(tw.dense_cache(k, v, torch.tensor([32, 9], dtype=torch.int32)), tw.PagedCache)
    assert_type(tw.attention_paged(q, tw.paged(*cache), causal=True), Tensor)
    assert_type(tw.attention_paged_with_lse(q, cache, mask=tw.window(3)), tuple[Tensor, Tensor])
    assert_type(tw.append(cache, k[:, :0], v[:, :0]), tw.PagedCache)
    e4m3, one = k.to(torch.float8_e4m3fn), torch.ones(())
    quantised = assert_type(
        tw.dense_cache(e4m3, e4m3.clone(), cache.seqlens_k, k_scale=one, v_scale=one), tw.QuantizedCache
    )
    assert_type(tw.append(quantised, k[:, :0], v[:, :0]), tw.QuantizedCache)
    pool, table = e4m3.view(4, 16, *k.shape[2:]), torch.tensor([[0, 1], [0, 2]], dtype=torch.int32)
    pages = tw.paged(pool, pool.clone(), table, torch.full_like(cache.seqlens_k, 32), k_scale=one, v_scale=one)
    shared = assert_type(pages.share(1), tw.SharedCache)
    assert_type(tw.explain(q[:, :1], shared), Explanation)
    assert_type(tw.attention_paged(q, quantised), Tensor)
    assert_type(tw.explain(q, cache, causal=True), Explanation)
    assert_type(tw.explain(q, k, v, causal=True, mask=tw.window(3)), Explanation)
    tw.explain(packed, packed, packed, cu_seqlens_q=cu_seqlens)
    assert_type(tw.show_mask(tw.causal(), 3, 5), str)
    assert_type(tw.dropout_mask(1, 0.5, batch=1, heads_q=2, seqlen_q=3, seqlen_k=4, device="cpu"), Tensor)
    tw.causal().prepare(q, k)


def right_parallel_calls() -> list[Any]:
    """One attention over two ranks in one process."""
    x = torch.randn(1, 32, 2, 8)

    def rank(exchange: Exchange) -> Tensor:
        group = assert_type(tw.context_parallel(exchange, layout="zigzag"), ContextParallel)
        as_keyword: Parallel = group
        part = group.shard(x)
        return group.unshard(tw.attention(part, part, part, causal=True, parallel=as_keyword))

    assert_type(balanced([tw.causal(), None], 32, 2), Layout)
    assert_type(zigzag(32, 2).positions(0, "cpu"), Tensor)
    return simulate(2, rank)


def right_check() -> None:
    """The check of a machine."""
    assert_type(tw.verify("cpu", (torch.float32,)), Report)


def wrong_calls(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Nobody runs this: the checker must find an error in each line."""
    tw.attention(q, k)  # type: ignore[call-arg]
    tw.attention(q, k, v, True)  # type: ignore[arg-type]
    tw.attention(q, k, v, casual=True)  # type: ignore[arg-type]
    tw.attention(q, k, v, causal="yes")  # type: ignore[arg-type]
    tw.attention(q, k, v, mask=tw.softcap(3.0))  # type: ignore[arg-type]
    tw.attention(q, k, v, score=tw.causal())  # type: ignore[arg-type]
    tw.attention(q, k, v, mask=lambda i, j: i >= j)  # type: ignore[arg-type,misc]
    tw.attention(q, k, v, sink=0.0)  # type: ignore[arg-type]
    tw.attention(q, k, v, parallel=2)  # type: ignore[arg-type]
    tw.attention_with_lse(q, k, v, dropout_p="half")  # type: ignore[arg-type]
    tw.attention_with_stats(q, k, v, per="batch")  # type: ignore[arg-type]
    tw.attention_with_stats(q, k, v, stats=("mass",))  # type: ignore[arg-type]
    tw.attention_varlen(q, k, v)  # type: ignore[call-overload]
    tw.attention_paged(q, k)  # type: ignore[arg-type]
    tw.merge((q, k))  # type: ignore[arg-type]
    tw.explain(q, k, v, casual=True)  # type: ignore[call-arg]
    tw.explain(q, k, v, causal="yes")  # type: ignore[arg-type]
    tw.show_mask(tw.causal())  # type: ignore[call-arg]
    tw.dropout_mask(1, 0.5, 1, 2, "3", 4)  # type: ignore[arg-type]
    tw.verify(dtypes="float32")  # type: ignore[arg-type]
    tw.context_parallel(2)  # type: ignore[arg-type]
    tw.causal() & tw.softcap(3.0)  # type: ignore[operator]
    tw.causal() | q  # type: ignore[operator]
    tw.softcap(3.0) >> tw.causal()  # type: ignore[operator]
    tw.causal(align="middle")  # type: ignore[arg-type]
    tw.window(left=1.5)  # type: ignore[arg-type]
    tw.prefix("3")  # type: ignore[arg-type]
    tw.key_range(0)  # type: ignore[call-arg]
    tw.key_lengths(None)  # type: ignore[arg-type]
    tw.documents([0, 0, 1])  # type: ignore[arg-type]
    tw.keep(lambda s, b, h, i, j: i >= j)  # type: ignore[arg-type,misc]
    tw.dense([[True]])  # type: ignore[arg-type]
    tw.block_sparse(q, 8)  # type: ignore[call-arg]
    tw.selected([[0]])  # type: ignore[arg-type]
    tw.butterfly("4")  # type: ignore[arg-type]
    tw.strided(4, 4)  # type: ignore[call-arg]
    tw.local_global(4)  # type: ignore[call-arg]
    tw.softcap("30")  # type: ignore[arg-type]
    tw.alibi(0.5)  # type: ignore[arg-type]
    tw.bias(1.0)  # type: ignore[arg-type]
    tw.score(lambda b, h, i, j: i)  # type: ignore[arg-type,misc]
    tw.lookup(1, 2)  # type: ignore[arg-type]
