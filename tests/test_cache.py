"""Attention over a cache: what it means, what is checked, and what is refused."""

import pytest
import torch

import tilewise as tw
from tests.backends.paged import CASES, Case
from tilewise import reference
from tilewise.testing import normal

CAUSAL = Case(8, (20, 3, 0, 33), rows=3, options=lambda: {"causal": True})


def keys_of(cache: tw.PagedCache, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k and v of one sequence, ``(1, seqlen, heads, head_dim)``, row by row as the definition says."""
    size = cache.k_pages.shape[1]
    places = [(int(cache.block_table[b, j // size]), j % size) for j in range(int(cache.seqlens_k[b]))]
    return tuple(
        torch.stack([pool[place] for place in places] or [pool[0, :0].flatten(0, 1)[:0].view(0, *pool.shape[2:])]).view(
            1, -1, *pool.shape[2:]
        )
        for pool in (cache.k_pages, cache.v_pages)
    )


@pytest.mark.parametrize("name", ["page-16", "page-7-odd-dims", "window-sink", "tree", "packed", "more-rows-than-keys"])
@pytest.mark.parametrize("backend", ["reference", None])
def test_each_sequence_is_attention_over_its_own_keys(name, backend):
    q, cache, options = CASES[name].draw()
    cu = options.pop("cu_seqlens_q")
    o, lse = tw.attention_paged_with_lse(q, cache, cu, backend=backend, **options)
    for b in range(len(cache.seqlens_k)):
        rows = (slice(int(cu[b]), int(cu[b + 1])),) if cu is not None else (b,)
        expected, expected_lse, _ = reference.attention(q[rows][None], *keys_of(cache, b), **options)
        torch.testing.assert_close(o[rows], expected[0].float())
        torch.testing.assert_close((lse[:, rows[0]] if cu is not None else lse[b]), expected_lse[0].float())


def test_the_last_row_of_a_causal_call_is_a_call_of_one_row():
    q, cache, options = CAUSAL.draw()
    whole = tw.attention_paged(q, cache, **options)
    torch.testing.assert_close(tw.attention_paged(q[:, -1:], cache), whole[:, -1:])


def test_compile_without_graph_breaks_gives_the_same():
    torch._dynamo.reset()
    q, cache, options = CAUSAL.draw()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(q, cache):
        return tw.attention_paged_with_lse(2 * q, cache, **options)

    for x, y in zip(run(q, cache), tw.attention_paged_with_lse(2 * q, cache, **options), strict=True):
        torch.testing.assert_close(x, y)


def test_the_operator_passes_opcheck():
    from tilewise.spec import Options, assemble

    q, (k, v, table, lengths), _ = CAUSAL.draw()
    arguments = assemble(q, k, v, Options(causal=True, block_table=table, seqlens_k=lengths))
    torch.library.opcheck(torch.ops.tilewise.attention.default, (q, k, v, *arguments))


def test_autocast_casts_queries_to_the_cache_and_not_the_cache():
    q, cache, options = CASES["bfloat16"].draw()
    with torch.autocast("cpu", dtype=torch.float16):
        o = tw.attention_paged(q.float(), cache, **options)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o, tw.attention_paged(q, cache, **options))


def wrong(message, **changes):
    """The cache of ``CAUSAL`` with one thing wrong, and what the error must say of it."""
    return pytest.param(changes, message, id=next(iter(changes)) + "-" + message.split(" ")[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        wrong(r"seqlens_k\[0\] is 58, a row of the table holds 0 to 48", seqlens_k=lambda x: x + 38),
        wrong(r"seqlens_k\[2\] is -1", seqlens_k=lambda x: x - 1),
        wrong(r"block_table\[0, 0\] is -\d+, the pool has pages 0 to", block_table=lambda x: x - 100),
        wrong("block_table must be int32", block_table=lambda x: x.long()),
        wrong(r"seqlens_k must be int32 \(batch,\)", seqlens_k=lambda x: x[:, None]),
        wrong("batch differs: q 4, block_table 3, seqlens_k 4", block_table=lambda x: x[1:]),
        wrong("different dtypes", v_pages=lambda x: x.double()),
        wrong("v 22 of 8", v_pages=lambda x: x[:22]),
        wrong("k has 3 dimensions", k_pages=lambda x: x[0]),
        wrong("page_size is 0", k_pages=lambda x: x[:, :0], v_pages=lambda x: x[:, :0]),
    ],
)
def test_a_wrong_cache_is_refused(changes, message):
    q, cache, options = CAUSAL.draw()
    cache = cache._replace(**{name: change(getattr(cache, name)) for name, change in changes.items()})
    with pytest.raises(ValueError, match=message):
        tw.attention_paged(q, cache, **options)


def test_a_tensor_is_no_cache():
    with pytest.raises(ValueError, match=r"what tw\.paged\(\.\.\.\) or tw\.dense_cache\(\.\.\.\) returns, got Tensor"):
        tw.attention_paged(normal(1, 1, 4, 16), normal(1, 9, 2, 16))


def test_a_gradient_is_refused_unless_nobody_records_one():
    q, cache, options = CAUSAL.draw()
    q.requires_grad_()
    with pytest.raises(ValueError, match="a cache has no gradient"):
        tw.attention_paged(q, cache, **options)
    with torch.no_grad():
        tw.attention_paged(q, cache, **options)


def test_dropout_and_prepared_masks_are_refused():
    q, cache, _ = CAUSAL.draw()
    with pytest.raises(ValueError, match="dropout over a cache"):
        tw.explain(q, cache, dropout_p=0.5)
    mask = tw.keep(lambda b, h, i, j: i != j).prepare(q, cache.k_pages[:4])
    with pytest.raises(ValueError, match="not keys in pages"):
        tw.attention_paged(q, cache, mask=mask)


def test_explain_names_who_runs_it_and_why_others_do_not():
    q, cache, options = CAUSAL.draw()
    said = tw.explain(q, cache, **options)
    assert said.chosen in ("cpu", "portable")
    assert any("block table" in reason for reason in said.refused["hopper"])
    assert "paged, 4 sequences of at most 48 keys" in str(said)
