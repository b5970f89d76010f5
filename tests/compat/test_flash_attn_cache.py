"""flash-attn's calls over a cache against the textbook on the keys that a sequence then has."""

import pytest
import torch

from bench.testing import normal
from tilewise import reference
from tilewise.compat import flash_attn as fa
from tilewise.compat.flash_attn import interface_3 as fa3

B, ROWS, H, HK, D, CAPACITY, PAGE = 3, 2, 4, 2, 16, 24, 4
LENGTHS = torch.tensor([0, 13, 20], dtype=torch.int32)


def drawn(dtype=torch.float32):
    """q, a dense cache and new keys and values."""
    caches = (normal(B, CAPACITY, HK, D, dtype=dtype, seed=n) for n in (1, 2))
    news = (normal(B, ROWS, HK, D, dtype=dtype, seed=n) for n in (3, 4))
    return normal(B, ROWS, H, D, dtype=dtype), *caches, *news


def in_pages(*caches):
    """Dense caches as pages of ``PAGE`` keys in another order, and their table."""
    table = torch.randperm(B * CAPACITY // PAGE, generator=torch.Generator().manual_seed(0)).view(B, -1)
    pools = [
        torch.empty(table.numel(), PAGE, HK, D).index_copy_(0, table.flatten(), x.reshape(-1, PAGE, HK, D))
        for x in caches
    ]
    return *pools, table.int()


def turned(x, first, cos, sin, interleaved, moving=True):
    """Rotary embedding, pair by pair, as complex numbers; x ``(rows, heads, head_dim)`` from position ``first`` on."""
    half, out = cos.shape[1], x.clone()
    for row in range(x.shape[0]):
        at = first + (row if moving else 0)
        for n in range(half):
            one, two = (2 * n, 2 * n + 1) if interleaved else (n, n + half)
            z = torch.complex(x[row, :, one], x[row, :, two]) * torch.complex(cos[at, n], sin[at, n])
            out[row, :, one], out[row, :, two] = z.real, z.imag
    return out


def textbook(b, q, k, v, **options):
    """o and lse of one sequence, ``(rows, heads, head_dim)`` and ``(heads, rows)``."""
    o, lse, _ = reference.attention(q[None], k[None], v[None], **options)
    return o[0].to(q.dtype), lse[0].to(q.dtype)


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "pages"])
def test_new_keys_are_written_and_seen(paged):
    q, k_cache, v_cache, k, v = drawn()
    where = {}
    whole = [
        torch.cat([cache[b, : LENGTHS[b]], new[b]]) for b in range(B) for cache, new in ((k_cache, k), (v_cache, v))
    ]
    if paged:
        k_cache, v_cache, where["block_table"] = in_pages(k_cache, v_cache)
    out, lse = fa.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=LENGTHS, causal=True, num_splits=3, return_softmax_lse=True, **where
    )
    again = fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=LENGTHS + ROWS, causal=True, **where)
    assert torch.equal(out, again)  # they lie in the cache
    for b in range(B):
        o, expected = textbook(b, q[b], *whole[2 * b : 2 * b + 2], causal=True)
        torch.testing.assert_close(out[b], o)
        torch.testing.assert_close(lse[b], expected)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotary_embedding_turns_new_keys_and_queries(dtype, interleaved, causal):
    q, k_cache, v_cache, k, v = drawn(dtype)
    angle = normal(CAPACITY, 6, dtype=dtype, seed=7)
    cos, sin = angle.cos(), angle.sin()
    how = {"rotary_interleaved": interleaved, "causal": causal, "cache_seqlens": LENGTHS}
    before = k_cache.clone()
    out = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cos, sin, **how)
    for b, length in enumerate(LENGTHS.tolist()):
        keys = torch.cat([before[b, :length], turned(k[b], length, cos, sin, interleaved)])
        rows = turned(q[b], length, cos, sin, interleaved, moving=causal)
        o, _ = textbook(b, rows, keys, torch.cat([v_cache[b, :length], v[b]]), causal=causal)
        few = 64 * torch.finfo(dtype).eps  # in fp64 the turn is fp64's too
        torch.testing.assert_close(out[b], o, rtol=few, atol=few)


def test_windows_slopes_softcap_rows_of_the_cache_and_padding_on_the_left():
    import tilewise as tw

    q, k_cache, v_cache, _, _ = drawn()
    rows, pad, slopes = torch.tensor([2, 0, 2]), torch.tensor([3, 0, 9], dtype=torch.int32), normal(B, H).abs()
    lengths = torch.tensor([20, 24, 11], dtype=torch.int32)
    out = fa.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, cache_batch_idx=rows, cache_leftpad=pad, alibi_slopes=slopes, softcap=2.0,
        window_size=(9, 0),
    )  # fmt: skip
    for b in range(B):
        keys, values = (x[rows[b], pad[b] : lengths[b]] for x in (k_cache, v_cache))
        score = tw.softcap(2.0) >> tw.alibi(slopes[b])
        o, _ = textbook(b, q[b], keys, values, mask=tw.window(9, 0), score=score)
        torch.testing.assert_close(out[b], o)


def test_generation_3_counts_chunks_behind_the_padding_on_the_left():
    q, k_cache, v_cache, _, _ = drawn()
    pad, lengths = torch.tensor([3, 0, 10], dtype=torch.int32), torch.tensor([20, 24, 11], dtype=torch.int32)
    out = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, cache_leftpad=pad, causal=True, attention_chunk=4
    )
    for b in range(B):
        keys, values = (x[b : b + 1, pad[b] : lengths[b]] for x in (k_cache, v_cache))
        torch.testing.assert_close(
            out[b : b + 1], fa3.flash_attn_func(q[b : b + 1], keys, values, causal=True, attention_chunk=4)
        )


def test_one_length_for_all_and_a_full_cache():
    q, k_cache, v_cache, _, _ = drawn()
    full = fa.flash_attn_with_kvcache(q, k_cache, v_cache)
    assert torch.equal(full, fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=CAPACITY))
    torch.testing.assert_close(full, fa.flash_attn_func(q, k_cache, v_cache))


def test_packed_queries_over_pages():
    _, k_cache, v_cache, _, _ = drawn()
    lengths, news = torch.tensor([5, 13, 20]), [5, 1, 7]
    cu_q, cu_k = torch.tensor([0, *news]).cumsum(0).int(), torch.tensor([0, *lengths]).cumsum(0).int()
    q = normal(sum(news), H, D)
    k_pages, v_pages, table = in_pages(k_cache, v_cache)
    out, lse, _ = fa.flash_attn_varlen_func(
        q, k_pages, v_pages, cu_q, cu_k, 7, 20, causal=True, block_table=table, return_attn_probs=True
    )
    for b in range(B):
        at = slice(cu_q[b], cu_q[b + 1])
        o, expected = textbook(b, q[at], k_cache[b, : lengths[b]], v_cache[b, : lengths[b]], causal=True)
        torch.testing.assert_close(out[at], o)
        torch.testing.assert_close(lse[:, at], expected)
    with pytest.raises(NotImplementedError, match="dropout_p with a block_table"):
        fa.flash_attn_varlen_func(q, k_pages, v_pages, cu_q, cu_k, 7, 20, 0.1, block_table=table)


@pytest.mark.parametrize("wants", ["q", "k", "slopes"])
def test_packed_queries_over_pages_compute_where_a_gradient_is_wanted_and_the_backward_raises(wants):
    _, k_cache, v_cache, _, _ = drawn()
    cu = torch.tensor([0, 5, 13, 20]).int()
    k, v, table = in_pages(k_cache, v_cache)
    given = {"q": normal(20, H, D), "k": k, "slopes": normal(H, seed=9).abs()}

    def run():
        q, k, slopes = given.values()
        return fa.flash_attn_varlen_func(q, k, v, cu, cu, 8, 8, causal=True, alibi_slopes=slopes, block_table=table)

    expected = run()
    given[wants].requires_grad_()
    found = run()
    assert torch.equal(found, expected)
    with pytest.raises(NotImplementedError, match="the backward of flash_attn_varlen_func with a block_table"):
        found.sum().backward()
    with torch.no_grad():
        assert not run().requires_grad


def tables(rows, width=4):
    return {"rotary_cos": torch.ones(rows, width), "rotary_sin": torch.zeros(rows, width)}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"v": None}, "k and v come together"),
        ({"rotary_cos": torch.ones(CAPACITY, 4)}, "rotary_cos and rotary_sin come together"),
        ({"cache_seqlens": None}, "need cache_seqlens"),
        ({"cache_batch_idx": torch.arange(B), "block_table": torch.zeros(B, 1)}, "give one of them"),
        ({"cache_seqlens": CAPACITY - 1}, r"seqlens_k\[0\] with the new keys is 25"),
        ({"cache_seqlens": LENGTHS.float()}, r"cache_seqlens must be int32 \(batch,\) or an int, got torch.float32"),
        ({"cache_seqlens": 13.5}, "or an int, got 13.5"),
        ({"cache_seqlens": LENGTHS.tolist()}, r"or an int, got \[0, 13, 20\]"),
        ({"cache_batch_idx": [0, 1, 2]}, "cache_batch_idx must be a tensor or None, got list"),
        ({"cache_batch_idx": torch.arange(3.0)}, r"cache_batch_idx must be int32 \(batch,\), got torch.float32"),
        (tables(CAPACITY) | {"k": None, "v": None}, "pass k and v with them, or turn q before"),
        (tables(LENGTHS.max() + 1), "rotary_sin have 21 rows, but positions reach 21"),
        (tables(CAPACITY, width=9), r"rotary_dim up to 16; got \(24, 9\) and \(24, 9\)"),
        (tables(CAPACITY) | {"rotary_sin": torch.ones(CAPACITY, 5)}, r"got \(24, 4\) and \(24, 5\)"),
        (tables(CAPACITY) | {"rotary_sin": [1.0]}, "rotary_sin must be a tensor, got list"),
    ],
    ids=[
        *("k-alone", "cos-alone", "no-lengths", "rows-and-pages", "no-room", "lengths-of-floats", "half-a-key", "list"),
        *(
            "rows-in-a-list",
            "rows-of-floats",
            "no-new-keys",
            "short-tables",
            "wide-tables",
            "other-tables",
            "table-in-a-list",
        ),
    ],
)
def test_a_wrong_cache_call_says_what_is_wrong(changes, says):
    q, k_cache, v_cache, k, v = drawn()
    with pytest.raises(ValueError, match=says):
        fa.flash_attn_with_kvcache(q, k_cache, v_cache, **({"k": k, "v": v, "cache_seqlens": LENGTHS} | changes))


@pytest.mark.parametrize("eight", [True, False], ids=["8-bit-rows", "16-bit-rows"])
def test_generation_3_reads_and_writes_a_cache_in_8_bits(eight):
    """Each sequence and head has its factors, a query's too; new rows of 8 bits are taken as they are."""
    q, k_cache, v_cache, k, v = drawn()
    q_scale, k_scale, v_scale = (0.5 + normal(B, HK, seed=n).abs() for n in (3, 4, 5))
    k_cache, v_cache = (x.to(torch.float8_e4m3fn) for x in (k_cache, v_cache))
    q, k, v = (x.to(torch.float8_e4m3fn if eight else torch.bfloat16) for x in (q, k, v))
    q_scale = q_scale if eight else None
    before = [x.float() for x in (k_cache, v_cache)]
    out = fa3.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=LENGTHS,
        causal=True,
        q_descale=q_scale,
        k_descale=k_scale,
        v_descale=v_scale,
    )
    assert out.dtype == torch.bfloat16
    for b, length in enumerate(LENGTHS.tolist()):
        news = [x[b].float() if eight else (x[b].float() / s[b, :, None]) for x, s in ((k, k_scale), (v, v_scale))]
        news = [x.to(torch.float8_e4m3fn).float() for x in news]
        keys, values = (
            torch.cat([old[b, :length], new]) * s[b, :, None]
            for old, new, s in zip(before, news, (k_scale, v_scale), strict=True)
        )
        rows = q[b].float() * (q_scale[b].repeat_interleave(H // HK)[:, None] if eight else 1.0)
        o, _ = textbook(b, rows, keys, values, causal=True)
        torch.testing.assert_close(out[b].float(), o, rtol=2e-2, atol=2e-2)


def test_generation_3_takes_packed_rows_and_new_keys():
    """Queries and new keys packed, as serving engines call it."""
    _, k_cache, v_cache, _, _ = drawn()
    news = [4, 1, 2]
    cu = torch.tensor([0, *news]).cumsum(0).int()
    q, k, v = normal(7, H, D), normal(7, HK, D, seed=1), normal(7, HK, D, seed=2)
    k_pages, v_pages, table = in_pages(k_cache, v_cache)
    out, lse = fa3.flash_attn_with_kvcache(
        q, k_pages, v_pages, k, v, cache_seqlens=LENGTHS, page_table=table, cu_seqlens_q=cu, cu_seqlens_k_new=cu, max_seqlen_q=4,
        causal=True, num_splits=2, return_softmax_lse=True,
    )  # fmt: skip
    for b, length in enumerate(LENGTHS.tolist()):
        at = slice(cu[b], cu[b + 1])
        keys, values = (torch.cat([cache[b, :length], new[at]]) for cache, new in ((k_cache, k), (v_cache, v)))
        o, expected = textbook(b, q[at], keys, values, causal=True)
        torch.testing.assert_close(out[at], o)
        torch.testing.assert_close(lse[:, at], expected)
    with pytest.raises(NotImplementedError, match="rotary_seqlens"):
        fa3.flash_attn_with_kvcache(q, k_pages, v_pages, rotary_seqlens=LENGTHS)
    cos = torch.ones(CAPACITY, 4)
    with pytest.raises(ValueError, match="rotary embeddings of packed rows"):
        fa3.flash_attn_with_kvcache(q, k_pages, v_pages, None, None, None, cos, cos, LENGTHS, cu_seqlens_q=cu)
    with pytest.raises(ValueError, match="cu_seqlens_k_new is of packed new keys"):
        fa3.flash_attn_with_kvcache(
            q, k_pages, v_pages, cache_seqlens=LENGTHS, page_table=table, cu_seqlens_q=cu, cu_seqlens_k_new=cu
        )
