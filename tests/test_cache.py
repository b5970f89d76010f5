"""Attention over a cache: what it means, what is checked, and what is refused."""

import pytest
import torch

import tilewise as tw
from bench.testing import normal
from tests.backends.paged import CASES, Case
from tilewise import cache as caches
from tilewise import reference

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


@pytest.mark.parametrize("name", ["fp8-heads", "fp8-sequences", "fp8-tokens"])
def test_a_quantised_cache_holds_its_numbers_times_their_scales(name):
    q, cache, options = CASES[name].draw()
    k, v = (x.double() for x in cache[:2])
    for b in range(len(cache.seqlens_k)):  # a copy of each sequence's pages, in float64
        k_scale, v_scale = (s[b] if s.ndim == 2 else s for s in cache[4:])
        plain = tw.paged(k * k_scale.unsqueeze(-1), v * v_scale.unsqueeze(-1), cache.block_table, cache.seqlens_k)
        o, lse = tw.attention_paged_with_lse(q.double(), plain, **options)
        got, got_lse = tw.attention_paged_with_lse(q.double(), cache, **options)
        rows = slice(*options["cu_seqlens_q"][b : b + 2]) if options["cu_seqlens_q"] is not None else b
        torch.testing.assert_close(got[rows], o[rows])
        at = (slice(None), rows) if o.ndim == 3 else rows
        torch.testing.assert_close(got_lse[at], lse[at])


def wrong(message, **changes):
    """The cache of ``CAUSAL`` with one thing wrong, and what the error must say of it."""
    return pytest.param(changes, message, id=next(iter(changes)) + "-" + message.split(" ")[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        wrong(
            r"seqlens_k\[0\] is 58, a sequence has room for 0 to 48 keys; give block_table more columns, or a dense cache more rows",
            seqlens_k=lambda x: x + 38,
        ),
        wrong(r"seqlens_k\[2\] is -1", seqlens_k=lambda x: x - 1),
        wrong(r"block_table\[0, 0\] is -\d+, the pool has pages 0 to", block_table=lambda x: x - 100),
        wrong("block_table must be int32", block_table=lambda x: x.long()),
        wrong(r"seqlens_k must be int32 \(batch,\)", seqlens_k=lambda x: x[:, None]),
        wrong("batch differs: q 4, block_table 3, seqlens_k 4", block_table=lambda x: x[1:]),
        wrong("different dtypes", v_pages=lambda x: x.double()),
        wrong("v 22 of 8", v_pages=lambda x: x[:22]),
        wrong("k has 3 dimensions", k_pages=lambda x: x[0]),
        wrong("page_size is 0", k_pages=lambda x: x[:, :0], v_pages=lambda x: x[:, :0]),
        wrong(r"v_scale must be float32 of shape .* got torch.float32 \(3,\)", v_scale=lambda x: x.new_ones(3)),
        wrong("k_scale must be float32", k_scale=lambda x: x.double()),
        wrong("k_scale and v_scale belong to pages of float8_e4m3fn", k_pages=lambda x: x.float()),
    ],
)
def test_a_wrong_cache_is_refused(changes, message):
    case = CASES["fp8-heads"] if "scale" in message else CAUSAL
    q, cache, options = case.draw()
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
    assert "page_size 8 is not a multiple of 16" in said.refused["hopper"]
    assert "paged, 4 sequences of at most 48 keys" in str(said)


# -- Shared prefixes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", ["", "tokens"])
def test_a_prefix_attended_once_gives_the_same(scales):
    from tilewise import shared_prefix
    from tilewise.spec import Options

    options = {"causal": True, "sink": normal(4, seed=3), "score": tw.softcap(3.0)}
    q, cache, _ = Case(8, (40, 33, 50), rows=2, shared=2, scales=scales).draw()
    shared = cache.share(2)
    expected = tw.attention_paged_with_lse(q, cache, **options)
    for got, wanted in zip(shared_prefix.attend_once(q, shared, Options(**options)), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    for got, wanted in zip(tw.attention_paged_with_lse(q, shared, **options), expected, strict=True):
        assert torch.equal(got, wanted)  # on a CPU each sequence reads it
    assert "prefix    read by each sequence: no cost is known on cpu" in str(tw.explain(q, shared, **options))


def test_a_prefix_is_attended_once_where_that_saves_time_and_positions_do_not_matter():
    from tilewise import shared_prefix
    from tilewise.spec import Options

    def said(batch=64, pages=128, **options):
        q, pool = torch.empty(batch, 1, 32, 128, device="meta"), torch.empty(9, 64, 8, 128, device="meta")
        table, lengths = (torch.empty(s, dtype=torch.int32, device="meta") for s in ((batch, 200), (batch,)))
        reasons = shared_prefix.why_apart(
            q, tw.paged(pool, pool.clone(), table, lengths).share(pages), Options(**options)
        )
        return [reason for reason in reasons if "no cost" not in reason]

    assert said(causal=True) == []
    assert said(mask=tw.causal(), score=tw.softcap(30.0)) == []
    for word, options in {
        "packed": {"cu_seqlens_q": torch.zeros(1)},
        "mask": {"mask": tw.window(5, 0)},
        "score": {"score": tw.alibi(torch.ones(32))},
        "deterministic": {"deterministic": True},
        "largest": {"max_logit": True},
    }.items():
        (reason,) = said(**options)
        assert word in reason


def test_the_cost_of_a_second_attention_keeps_short_prefixes_apart():
    """The six cases of docs/serving.md, in bf16 with 8 key heads of 128: whichever was faster on an H200."""
    from tilewise.shared_prefix import Saving

    pool = torch.empty(1, 64, 8, 128, device="meta", dtype=torch.bfloat16)
    table = torch.empty(1, 2, dtype=torch.int32, device="meta")
    once = []
    for batch, keys in ((8, 2048), (8, 16384), (32, 1024), (64, 2048), (64, 8192), (8, 65536)):
        shared = tw.paged(pool, pool.clone(), table, table[:, 0]).share(keys // 64)
        saving = Saving.of(torch.empty(batch, 1, 32, 128, device="meta"), shared)
        once.append(saving.saved > saving.more)
    assert once == [False, False, False, False, True, True]


@pytest.mark.parametrize(
    ("pages", "lengths", "message"),
    [
        (5, (40, 33, 50), "a sequence has queries before the end of the prefix of 40 keys"),
        (3, (40, 33, 50), "the first 3 pages of the sequences differ"),
        (0, (40, 33, 50), "prefix_pages must be above 0"),
    ],
)
def test_a_prefix_that_is_none_is_refused(pages, lengths, message):
    q, cache, _ = Case(8, lengths, rows=2, shared=2).draw()
    if pages == 5:
        cache = cache._replace(block_table=cache.block_table[:1].expand(3, -1))
    with pytest.raises(ValueError, match=message):
        tw.attention_paged(q, cache.share(pages))


# -- Appending -----------------------------------------------------------------------------------------------------


def empty_cache(lengths=(20, 3, 0, 33), page_size=8, max_pages=6):
    """A cache of NaN, whose table names pages for all that fits."""
    count = len(lengths) * max_pages
    table = torch.randperm(count, generator=torch.Generator().manual_seed(2)).int().view(len(lengths), max_pages)
    k, v = torch.full((count, page_size, 2, 16), torch.nan), torch.full((count, page_size, 2, 8), torch.nan)
    return tw.paged(k, v, table, torch.tensor(lengths, dtype=torch.int32))


@pytest.mark.parametrize("packed", [False, True], ids=["rectangular", "packed"])
def test_appended_keys_lie_behind_those_of_their_sequence(packed):
    cache = empty_cache()
    news = (1, 9, 0, 4) if packed else (5, 5, 5, 5)
    k, v = normal(sum(news) + 2 * packed, 2, 16), normal(sum(news) + 2 * packed, 2, 8, seed=1)
    cu = torch.tensor([0, *news]).cumsum(0)
    before = cache.seqlens_k.clone()
    grown = tw.append(cache, k, v, cu) if packed else tw.append(cache, *(x.unflatten(0, (4, 5)) for x in (k, v)))
    assert torch.equal(cache.seqlens_k, before)
    assert torch.equal(grown.seqlens_k, before + torch.tensor(news, dtype=torch.int32))
    for b in range(4):
        for whole, part in zip(keys_of(grown, b), (k, v), strict=True):
            assert whole[0, : before[b]].isnan().all()
            assert torch.equal(whole[0, before[b] :], part[cu[b] : cu[b + 1]])
    assert sum(int((~pool.isnan()).all(-1).all(-1).sum()) for pool in cache[:2]) == 2 * sum(news)  # and nothing else


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_append_like_an_earlier_one_is_told_from_it_by_where_values_lie(order):
    """Pools of one shape and stride whose values have memory of their own, or lie in that of the keys."""
    both = torch.full((24, 8, 2, 24), torch.nan)
    latent = both[..., :16], both[..., :8]
    apart = latent[0], torch.full_like(both, torch.nan)[..., :8]
    rest = empty_cache()[2:]
    k, v = normal(4, 5, 2, 16), normal(4, 5, 2, 8)
    for n in order * 2:
        cache = tw.paged(*(apart, latent)[n], *rest)
        with pytest.raises(ValueError, match="leave v out" if n else "give v"):
            tw.append(cache, k, v if n else None)
        tw.append(cache, k, None if n else v)
    assert int((~apart[1].isnan()).all(-1).all(-1).sum()) == 20


def test_known_appends_write_the_rows_and_lengths_of_their_own_call():
    k, v = normal(4, 5, 2, 16), normal(4, 5, 2, 8)
    for lengths in ((20, 3, 0, 33), (0, 1, 2, 3), (7, 7, 7, 40)):
        cache, other = empty_cache(lengths), empty_cache(lengths)
        grown = tw.append(cache, k, v)
        assert grown.seqlens_k.tolist() == [n + 5 for n in lengths]
        caches._write(other, k, v, None)
        for pool, expected in zip(cache[:2], other[:2], strict=True):
            torch.testing.assert_close(pool, expected, rtol=0, atol=0, equal_nan=True)
        k, v = k + 1, v + 1


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
def test_an_append_refuses_what_requires_a_gradient_where_one_is_recorded(mode):
    cache, k = empty_cache(), normal(4, 5, 2, 16).requires_grad_()
    v = normal(4, 5, 2, 8)
    tw.append(cache, k.detach(), v)
    if mode == "grad":
        with pytest.raises(ValueError, match="a cache has no gradient"):
            tw.append(cache, k, v)
        return
    with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
        tw.append(cache, k, v)
    assert not cache.k_pages.requires_grad


def test_rows_without_a_place_are_not_written_where_nobody_checks(monkeypatch):
    from tilewise import cache as module

    cache = empty_cache((20, 46, 0, 33))
    cache.block_table[2] = 1000
    k, v = normal(4, 5, 2, 16), normal(4, 5, 2, 8)
    module._write(cache, k, v, None)
    assert int((~cache.k_pages.isnan()).all(-1).all(-1).sum()) == 5 + 2 + 5
    nowhere = cache._replace(block_table=torch.full_like(cache.block_table, -1))
    kept = cache.k_pages.clone()
    module._write(nowhere, k, v, None)
    assert torch.equal(kept.nan_to_num(), cache.k_pages.nan_to_num())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_append_then_attend_compiles_without_graph_breaks(backend):
    torch._dynamo.reset()
    q, k, v = normal(4, 2, 4, 16), normal(4, 2, 2, 16), normal(4, 2, 2, 8)

    def step(q, k, v, cache):
        grown = tw.append(cache, k, v)
        return tw.attention_paged(q, grown, causal=True), grown.seqlens_k

    cache = empty_cache((0, 0, 0, 0))
    expected = step(q, k, v, cache)
    again = empty_cache((0, 0, 0, 0))
    got = torch.compile(step, fullgraph=True, backend=backend)(q, k, v, again)
    for x, y in zip((*got, again.k_pages), (*expected, cache.k_pages), strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)


@pytest.mark.parametrize("shape", [(), (2,), (4, 2), (24, 8, 2)], ids=str)
def test_what_is_appended_is_rounded_to_e4m3_and_saturates(shape):
    cache = empty_cache()
    scale = torch.full(shape, 0.25)
    pools = (torch.zeros(x.shape, dtype=torch.float8_e4m3fn) for x in cache[:2])
    cache = tw.paged(*pools, *cache[2:], k_scale=scale.clone(), v_scale=scale.clone())
    k, v = normal(4, 5, 2, 16, seed=1), normal(4, 5, 2, 8, seed=2)
    k[0, 0, 0, :3], v[1, 2, 1, 0] = torch.tensor([1e9, -torch.inf, 3.0]), torch.nan
    grown = tw.append(cache, k.bfloat16(), v.bfloat16())
    factors = cache[4:] if len(shape) == 3 else [s.expand(24, 8, 2) for s in (scale.new_full((), 0.25),) * 2]
    stored = grown._replace(
        **{
            name: x.float() * s.unsqueeze(-1)
            for name, x, s in zip(("k_pages", "v_pages"), grown[:2], factors, strict=True)
        }
    )
    for b in range(4):
        for got, new in zip(keys_of(stored, b), (k, v), strict=True):
            got, new = got[0, -5:], new[b].bfloat16().float()
            assert torch.equal(got.isnan(), new.isnan())
            finite = new.where(new.isfinite(), 0.0).abs().amax(-1, keepdim=True)
            largest = finite if len(shape) == 3 else torch.tensor(448 * 0.25)
            shown = new.clamp(-largest, largest)
            room = shown.abs() / 16 + largest / 448 * 2**-10  # half a step of the number, or of the smallest
            assert ((got - shown).abs() <= 1.0001 * room).where(~new.isnan(), True).all()


@pytest.mark.parametrize("quantised", [False, True], ids=["plain", "tokens"])
def test_values_in_the_memory_of_their_keys_are_appended_with_them(quantised):
    k_pages, _, table, lengths = empty_cache()
    k = normal(4, 5, 2, 16)
    cache = tw.paged(k_pages, k_pages[..., :8], table, lengths)
    if quantised:
        pool, scale = torch.zeros(k_pages.shape, dtype=torch.float8_e4m3fn), torch.zeros(k_pages.shape[:3])
        cache = tw.paged(pool, pool[..., :8], table, lengths, k_scale=scale, v_scale=scale)
    grown = tw.append(cache, k)
    scales = [s.unsqueeze(-1) for s in grown[4:]] or [1.0, 1.0]
    stored = grown._replace(k_pages=grown.k_pages.float() * scales[0], v_pages=grown.v_pages.float() * scales[1])
    for b in range(4):
        for got, new in zip(keys_of(stored, b), (k[b], k[b, ..., :8]), strict=True):
            torch.testing.assert_close(got[0, -5:], new, rtol=0.07 * quantised, atol=0.02 * quantised)
    with pytest.raises(
        ValueError, match="v is given, but the values of this cache lie in the memory of its keys; leave v out"
    ):
        tw.append(cache, k, k[..., :8])
    with pytest.raises(ValueError, match="v is None, but this cache has memory for values; give v"):
        tw.append(empty_cache(), k)
    if quantised:
        with pytest.raises(ValueError, match="v_scale is another tensor than k_scale"):
            tw.append(cache._replace(v_scale=scale.clone()), k)


def test_appending_to_a_quantised_cache_compiles():
    torch._dynamo.reset()
    empty = empty_cache((0, 0, 0, 0))

    def cache():
        pools = (torch.zeros(x.shape, dtype=torch.float8_e4m3fn) for x in empty[:2])
        return tw.paged(*pools, *empty[2:], k_scale=torch.ones(24, 8, 2), v_scale=torch.ones(2))

    def step(q, k, v, cache):
        return tw.attention_paged(q, tw.append(cache, k, v), causal=True)

    tensors = normal(4, 2, 4, 16), normal(4, 2, 2, 16), normal(4, 2, 2, 8)
    one, other = cache(), cache()
    expected = step(*tensors, one)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*tensors, other)
    torch.testing.assert_close(got, expected)
    for x, y in zip(one[:2] + one[4:], other[:2] + other[4:], strict=True):
        assert torch.equal(x.float(), y.float())


def test_the_append_operator_passes_opcheck():
    k_pages, v_pages, table, lengths = (x.nan_to_num() if x.is_floating_point() else x for x in empty_cache())
    arguments = k_pages, v_pages, normal(4, 5, 2, 16), normal(4, 5, 2, 8), table, lengths, None
    torch.library.opcheck(torch.ops.tilewise.append.default, arguments)


@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        ((4, 16, 2, 16), (4, 16, 2, 8), r"seqlens_k\[3\] with the new keys is 49, a sequence has room for 0 to 48"),
        ((4, 5, 2, 16), (4, 4, 2, 8), r"k has \(4, 5\) rows, v \(4, 4\)"),
        ((4, 5, 3, 16), (4, 5, 2, 8), r"k is \(4, 5, 3, 16\), the rows of its pages \(2, 16\)"),
        ((3, 5, 2, 16), (3, 5, 2, 8), "batch differs: k 3, block_table 4"),
        ((20, 2, 16), (20, 2, 8), "k has 3 dimensions"),
    ],
)
def test_a_wrong_append_is_refused(k, v, message):
    with pytest.raises(ValueError, match=message):
        tw.append(empty_cache(), torch.zeros(k), torch.zeros(v))


@pytest.mark.parametrize(
    ("changes", "cu", "message"),
    [
        ({}, [1, 1, 2, 3, 4], "cu_seqlens_q starts at 1"),
        ({}, [0, 2, 1, 3, 4], "cu_seqlens_q decreases at position 2"),
        ({}, [0, 1, 2, 3, 5], "cu_seqlens_q ends at 5, past the 4 rows"),
        ({}, [0.0, 1.0, 2.0, 3.0, 4.0], "cu_seqlens_q must be int32 or int64"),
        ({"seqlens_k": lambda x: x * 0 - 1}, [0, 1, 2, 3, 4], r"seqlens_k\[0\] is -1"),
        ({"k_pages": lambda x: x[:1].expand_as(x)}, [0, 1, 2, 3, 4], "k_pages .* shows one row in several places"),
        ({}, 4, r"cu_seqlens_q must be int32 or int64 of shape \(batch \+ 1,\), got torch.int64 \(\)$"),
    ],
    ids=["starts", "decreases", "ends", "floats", "length", "expanded", "number"],
)
def test_packed_rows_that_would_miss_their_places_are_refused(changes, cu, message):
    cache = empty_cache()
    cache = cache._replace(**{name: change(getattr(cache, name)) for name, change in changes.items()})
    with pytest.raises(ValueError, match=message):
        tw.append(cache, torch.zeros(4, 2, 16), torch.zeros(4, 2, 8), torch.tensor(cu))


def test_what_is_no_tensor_is_named_by_append():
    rows, cache = torch.zeros(2, 1, 2, 8), empty_cache()
    with pytest.raises(
        ValueError,
        match=r"seqlens_k must be a tensor.*got list; make it one: torch\.tensor\(seqlens_k",
    ):
        tw.append(cache._replace(seqlens_k=[1, 2]), rows, rows)
    with pytest.raises(ValueError, match="k must be a tensor, got list\n  v must be a tensor or None, got float"):
        tw.append(cache, [0.0], 1.0)


def test_append_inside_vmap_says_what_to_write_instead():
    rows, cache = torch.zeros(3, 4, 1, 2, 16), empty_cache()
    with pytest.raises(NotImplementedError, match="the examples as sequences of the cache"):
        torch.vmap(lambda k: tw.append(cache, k, k[..., :8]))(rows)


def test_appending_what_wants_a_gradient_is_refused():
    k, v = normal(4, 1, 2, 16).requires_grad_(), normal(4, 1, 2, 8)
    with pytest.raises(ValueError, match="a cache has no gradient"):
        tw.append(empty_cache(), k, v)
    with torch.no_grad():
        tw.append(empty_cache(), k, v)
        with pytest.raises(ValueError, match="a cache has no gradient"):
            torch.func.jvp(lambda k: tw.append(empty_cache(), k, v).k_pages, (k,), (k,))


def test_a_cache_is_printed_without_its_pages():
    k, v = torch.zeros(2, 8, 2, 16), torch.zeros(2, 8, 2, 4)
    assert str(tw.dense_cache(k, v, torch.zeros(2, dtype=torch.int32))) == (
        "PagedCache(k_pages=(2, 8, 2, 16) float32, v_pages=(2, 8, 2, 4) float32, block_table=(2, 1) int32, seqlens_k=(2,) int32)"
    )
    small = (x.to(torch.float8_e4m3fn) for x in (k, v))
    scales = {"k_scale": torch.ones(()), "v_scale": torch.ones(2)}
    assert "k_scale=() float32, v_scale=(2,) float32" in str(tw.dense_cache(*small, torch.zeros(2).int(), **scales))
    assert "seqlens_k=[1, 2]" in str(tw.dense_cache(k, v, [1, 2]))
