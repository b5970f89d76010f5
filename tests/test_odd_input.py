"""Odd input through the public functions: it is either right, judged against float64, or refused with the fix named."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

import tilewise as tw
from bench.testing import call, normal, qkv
from tilewise.accuracy import Expected

F64 = torch.float64


def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor, **options) -> dict[str, Tensor]:
    """o, lse, dq, dk and dv of a public call; packed where ``cu_seqlens_q`` is among the options."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    if "cu_seqlens_q" in options:
        cu = options.pop("cu_seqlens_q"), options.pop("cu_seqlens_k", None)
        o, lse = tw.attention_varlen(q, k, v, *cu, return_lse=True, **options)
    else:
        o, lse = tw.attention_with_lse(q, k, v, **options)
    dq, dk, dv = torch.autograd.grad((o, lse), (q, k, v), (do, dlse))
    return {"o": o.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor | None = None, **options) -> dict[str, Tensor]:
    """The results of :func:`run`, once they agree with the oracle as well as eager attention does."""
    c = call(q, k, v, do, **options)
    results = run(q, k, v, c.do, c.dlse, **options)
    errors = Expected.of(c.p, c.t, c.do, c.dlse).judge(results)
    assert not [str(e) for e in errors if not e.ok]
    return results


OPTIONS = {
    "plain": lambda nq, nk: {},
    "causal": lambda nq, nk: {"causal": True},
    "keep": lambda nq, nk: {"mask": lambda b, h, i, j: (i + j) % 2 == 0},
    "dense": lambda nq, nk: {"mask": (normal(nq, nk, seed=5) > 0)},
    "documents-prefix": lambda nq, nk: {"mask": tw.documents(torch.arange(nk) // 20) | tw.prefix(3)},
    "softcap-bias-sink": lambda nq, nk: {"score": tw.softcap(2.0) >> tw.bias(normal(4, 1, 1)), "sink": normal(4)},
    "dropout": lambda nq, nk: {"dropout_p": 0.3, "dropout_seed": 1},
}


# -- Nothing to do -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
def test_an_empty_batch_gives_empty_results_and_zero_gradients_of_leaves(options):
    made, slopes = OPTIONS[options](70, 70), normal(4).requires_grad_()
    made["sink"] = slopes
    q, k, v = (x.requires_grad_() for x in qkv(batch=0))
    o, lse = tw.attention_with_lse(q, k, v, **made)
    assert (o.shape, lse.shape) == ((0, 70, 4, 16), (0, 4, 70))
    dq, dk, dsink = torch.autograd.grad(o.sum() + lse.sum(), (q, k, slopes))
    assert (dq.shape, dk.shape) == (q.shape, k.shape)
    assert torch.equal(dsink, torch.zeros(4))


@pytest.mark.parametrize("options", OPTIONS)
def test_without_keys_outputs_and_gradients_are_zero(options):
    made = OPTIONS[options](9, 0)
    q, k, v = qkv(nq=9, nk=0)
    got = run(q, k, v, normal(2, 9, 4, 16), normal(2, 4, 9), **made)
    assert torch.equal(got["o"], torch.zeros(2, 9, 4, 16))
    assert torch.equal(got["dq"], torch.zeros_like(q))
    sink = made.get("sink", torch.full((4,), -math.inf))
    assert torch.equal(got["lse"], sink.view(1, 4, 1).expand(2, 4, 9))


@pytest.mark.parametrize("options", OPTIONS)
def test_without_queries_keys_get_zero_gradients(options):
    q, k, v = qkv(nq=0, nk=9)
    got = run(q, k, v, normal(2, 0, 4, 16), normal(2, 4, 0), **OPTIONS[options](0, 9))
    assert got["o"].shape == (2, 0, 4, 16)
    assert torch.equal(got["dk"], torch.zeros_like(k))
    assert torch.equal(got["dv"], torch.zeros_like(v))


@pytest.mark.parametrize("options", ["plain", "causal", "keep"])
def test_a_cache_may_have_no_queries_or_no_sequences(options):
    pages, table = normal(4, 5, 2, 16), torch.arange(4, dtype=torch.int32).view(2, 2)
    lengths, made = torch.tensor([3, 7], dtype=torch.int32), OPTIONS[options](1, 7)
    both, none = tw.paged(pages, pages, table, lengths), tw.paged(pages, pages, table[:0], lengths[:0])
    nowhere = torch.zeros(1, dtype=torch.int32)
    assert tw.attention_paged(normal(2, 0, 4, 16), both, **made).shape == (2, 0, 4, 16)
    assert tw.attention_paged(normal(0, 4, 16), both, nowhere.expand(3), **made).shape == (0, 4, 16)
    assert tw.attention_paged(normal(0, 1, 4, 16), none, **made).shape == (0, 1, 4, 16)
    o, lse = tw.attention_paged_with_lse(normal(6, 4, 16), none, nowhere, **made)
    assert torch.equal(o, torch.zeros(6, 4, 16))
    assert torch.equal(lse, torch.full((4, 6), -math.inf))
    roomless = tw.paged(pages, pages, table[:, :0], lengths * 0)
    assert torch.equal(tw.attention_paged(normal(2, 4, 16), roomless, nowhere.new_tensor([0, 1, 2]), **made), o[:2])


def packed(nq: int, nk: int, **sizes) -> tuple[Tensor, ...]:
    return tuple(x.flatten(0, 1) for x in qkv(batch=1, nq=nq, nk=nk, **sizes))


LENGTHS = {
    "no-queries-in-one": ([0, 10, 10, 30], [0, 5, 25, 40]),
    "no-keys-in-one": ([0, 10, 20, 30], [0, 20, 20, 40]),
    "neither-in-two": ([0, 0, 0, 30], [0, 0, 0, 40]),
    "rows-after-the-last": ([0, 12, 20, 20], [0, 20, 20, 33]),
    "none-at-all": ([0], [0]),
    "all-empty": ([0, 0], [0, 0]),
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", LENGTHS)
def test_sequences_of_length_zero_leave_the_others_alone(name, causal):
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in LENGTHS[name])
    q, k, v = packed(30, 40)
    got = exact(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=causal)
    outside = slice(int(cu_q[-1]), None)
    assert (got["o"][outside] == 0).all()
    assert (got["dq"][outside] == 0).all()
    assert (got["lse"][:, outside] == -math.inf).all()
    assert (got["dk"][int(cu_k[-1]) :] == 0).all()
    for b in range(len(cu_q) - 1):
        rows, keys = slice(*cu_q[b : b + 2].tolist()), slice(*cu_k[b : b + 2].tolist())
        alone = tw.attention(q[None, rows], k[None, keys], v[None, keys], causal=causal)
        torch.testing.assert_close(got["o"][rows], alone[0], rtol=1e-5, atol=1e-6)


# -- Rows that see nothing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["causal", "documents-prefix"])
def test_more_queries_than_keys_leave_the_first_queries_without_keys(options):
    made = OPTIONS[options](40, 9)
    made["mask"] = made.get("mask", tw.causal()) & tw.causal()
    got = exact(*qkv(nq=40, nk=9), mask=made["mask"])
    unseeing = [row.count("1") == 0 for row in tw.show_mask(made["mask"], 40, 9).split("\n")]
    assert any(unseeing)
    assert not all(unseeing)
    assert (got["o"][:, unseeing] == 0).all()
    assert (got["dq"][:, unseeing] == 0).all()
    assert (got["lse"][..., unseeing] == -math.inf).all()
    assert torch.isfinite(got["lse"][..., [not x for x in unseeing]]).all()


EVERYTHING_HIDDEN = {
    "keep": lambda: tw.keep(lambda b, h, i, j: i < 0),
    "dense": lambda: tw.dense(torch.zeros(1, 1, dtype=torch.bool)),
    "key-range": lambda: tw.key_range(7, 7),
    "negative-length": lambda: tw.key_lengths(torch.tensor([-3, 0])),
    "disjoint": lambda: tw.key_range(0, 5) & tw.key_range(5, 70),
}


@pytest.mark.parametrize("name", EVERYTHING_HIDDEN)
@pytest.mark.parametrize("bad", [1.0, math.nan, math.inf], ids=["finite", "nan", "inf"])
def test_a_mask_that_hides_everything_gives_zeros_whatever_keys_hold(name, bad):
    q, k, v = qkv()
    got = run(q, k * bad, v * bad, normal(2, 70, 4, 16), normal(2, 4, 70), mask=EVERYTHING_HIDDEN[name]())
    for tensor in ("o", "dq", "dk", "dv"):
        assert (got[tensor] == 0).all(), tensor
    assert (got["lse"] == -math.inf).all()


def test_a_sink_alone_is_the_lse_of_a_row_without_keys_and_takes_its_gradient():
    q, k, v = qkv()
    sink = normal(4).requires_grad_()
    o, lse = tw.attention_with_lse(q, k, v, mask=tw.key_range(3, 3), sink=sink)
    assert (o == 0).all()
    assert torch.equal(lse, sink.view(1, 4, 1).expand(2, 4, 70))
    (dsink,) = torch.autograd.grad(lse.sum(), sink)
    torch.testing.assert_close(dsink, torch.full((4,), 140.0))


def test_a_window_beyond_the_keys_and_a_score_of_minus_infinity_hide_rows_alike():
    q, k, v = qkv(nq=20, nk=20)
    hidden = tw.score(lambda s, b, h, i, j: torch.where(i < 5, -math.inf, s))
    got = exact(q, k, v, score=hidden)
    assert (got["o"][:, :5] == 0).all()
    assert (got["dq"][:, :5] == 0).all()
    assert (got["lse"][..., :5] == -math.inf).all()


# -- What hidden keys hold -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_that_holds_nan_or_infinity_changes_no_bit(bad, dtype):
    lengths = torch.tensor([40, 65])
    q, k, v = qkv(dtype=dtype)
    do, dlse = normal(2, 70, 4, 16, dtype=dtype, seed=8), normal(2, 4, 70)
    options = {"mask": tw.key_lengths(lengths), "score": tw.softcap(3.0) >> tw.bias(normal(70, 70))}
    clean = run(q, k, v, do, dlse, **options)
    padding = (torch.arange(70) >= lengths.view(2, 1)).view(2, 70, 1, 1)
    dirty = run(q, k.masked_fill(padding, bad), v.masked_fill(padding, bad), do, dlse, **options)
    for name, x in dirty.items():
        assert torch.equal(x, clean[name]), name
    assert (dirty["dk"].masked_select(padding) == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
def test_a_sequence_that_holds_nan_or_infinity_leaves_its_neighbours_alone(bad):
    cu = torch.tensor([0, 17, 50, 64])
    q, k, v = packed(70, 70)
    do, dlse = normal(70, 4, 16, seed=8), normal(4, 70)
    clean = run(q, k, v, do, dlse, cu_seqlens_q=cu, causal=True)
    for x in (q, k, v, do):
        x[17:50] = bad
        x[64:] = bad  # rows of no sequence
    dirty = run(q, k, v, do, dlse, cu_seqlens_q=cu, causal=True)
    others = [*range(17), *range(50, 64)]
    for name in ("o", "dq", "dk", "dv"):
        assert torch.equal(dirty[name][others], clean[name][others]), name
        assert (dirty[name][64:] == 0).all(), name
    assert torch.equal(dirty["lse"][:, others], clean["lse"][:, others])


def test_nan_in_a_visible_key_is_not_swallowed():
    q, k, v = qkv()
    k[:, 3] = math.nan
    o, lse = tw.attention_with_lse(q, k, v, causal=True)
    assert torch.isnan(o[:, 3:]).all()
    assert torch.isnan(lse[..., 3:]).all()


# -- Shapes, strides and dtypes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "sizes", [{"d": 1}, {"dv": 1}, {"d": 1, "dv": 1}, {"d": 8, "dv": 24}, {"d": 24, "dv": 5}], ids=str
)
def test_any_head_dim_and_another_one_for_v(sizes, options):
    exact(*qkv(nq=33, nk=41, **sizes), **OPTIONS[options](33, 41))


@pytest.mark.parametrize("sizes", [{"d": 513, "dv": 513}, {"d": 513, "dv": 2}], ids=str)
def test_head_dim_513_is_exact(sizes):
    exact(*qkv(nq=17, nk=29, **sizes), causal=True)


def test_one_query_one_key_one_head_of_one_number():
    got = exact(*qkv(batch=1, nq=1, nk=1, hq=1, hk=1, d=1, dv=1))
    assert (got["dq"] == 0).all() or torch.isfinite(got["dq"]).all()
    torch.testing.assert_close(got["o"], qkv(batch=1, nq=1, nk=1, hq=1, hk=1, d=1, dv=1)[2])


@pytest.mark.parametrize("which", ["q", "k", "v", "all"])
@pytest.mark.parametrize("axis", range(4), ids=["batch", "seqlen", "heads", "head-dim"])
def test_expanded_inputs_are_read_with_stride_zero(which, axis):
    x = dict(zip("qkv", qkv(nq=20, nk=20), strict=True))
    for name in "qkv" if which == "all" else which:
        x[name] = x[name].select(axis, 0).unsqueeze(axis).expand_as(x[name])
        assert x[name].stride(axis) == 0
    exact(*x.values(), causal=True)


def test_the_gradient_of_an_expanded_key_head_is_the_sum_over_heads():
    q, k, v = qkv(hq=4, hk=1)
    wide = k.requires_grad_().expand(2, 70, 4, 16)
    (got,) = torch.autograd.grad(tw.attention(q, wide, v.expand(2, 70, 4, 16), causal=True).square().sum(), k)
    (grouped,) = torch.autograd.grad(tw.attention(q, k, v, causal=True).square().sum(), k)
    torch.testing.assert_close(got, grouped)


DO = {
    "transposed": lambda do: do.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "every-second": lambda do: torch.stack([do, do], -1)[..., 0],
    "heads-first": lambda do: do.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": lambda do: do[:1, :1, :1, :1].expand_as(do),
    "expanded-rows": lambda do: do[:, :1].expand_as(do),
}


@pytest.mark.parametrize("form", DO)
def test_a_non_contiguous_do_gives_the_gradients_of_its_copy(form):
    do, dlse = DO[form](normal(2, 70, 4, 16, seed=8)), normal(2, 4, 70).transpose(1, 2).contiguous().transpose(1, 2)
    assert not do.is_contiguous()
    strided = run(*qkv(), do, dlse, causal=True)
    copied = run(*qkv(), do.contiguous(), dlse.contiguous(), causal=True)
    for name, x in strided.items():
        assert torch.equal(x, copied[name]), name


def test_inputs_without_a_unit_stride_are_read_as_their_copies():
    q, k, v = (torch.stack([x, x], -1)[..., 0] for x in qkv())
    do, dlse = normal(2, 70, 4, 16, seed=8), normal(2, 4, 70)
    strided = run(q, k, v, do, dlse, causal=True)
    copied = run(q.contiguous(), k.contiguous(), v.contiguous(), do, dlse, causal=True)
    assert q.stride(-1) == 2
    assert all(torch.equal(strided[name], copied[name]) for name in copied)


@pytest.mark.parametrize("options", OPTIONS)
def test_float64_is_computed_in_float64(options):
    got = exact(*qkv(nq=33, nk=41, dtype=F64), **OPTIONS[options](33, 41))
    assert {x.dtype for x in got.values()} == {F64}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scores_in_the_thousands_do_not_overflow(dtype):
    q, k, v = (x * 20 for x in qkv(dtype=dtype))
    got = exact(q, k, v, softmax_scale=1.0)
    assert torch.isfinite(got["o"]).all()
    assert got["lse"].max() > 2000  # exp(12) is past fp16, exp(89) past fp32


def test_a_softmax_scale_of_zero_and_a_negative_one_are_numbers_like_others():
    q, k, v = qkv(nq=20, nk=20)
    torch.testing.assert_close(exact(q, k, v, softmax_scale=0.0)["o"][:, 0, 0], v.mean(1)[:, 0])
    negative = exact(q, k, v, softmax_scale=-0.5)["o"]
    torch.testing.assert_close(negative, exact(-q, k, v, softmax_scale=0.5)["o"])


def test_views_that_span_more_than_two_to_the_31_elements_are_addressed():
    span = (1 << 31) + (1 << 20)
    try:
        memory = torch.empty(span, dtype=torch.bfloat16)  # 4 GiB of addresses, of which a few pages are touched
    except RuntimeError as error:
        pytest.skip(f"needs 4 GiB of virtual memory: {error}")
    seqlen, heads = 9, 2
    far = (1 << 31) // (seqlen - 1)
    strides = {"q": (1, far, 16, 1), "k": (1, far, 1 << 9, 1), "v": (1, 1 << 9, 1 << 31, 1), "do": (1, far, 1 << 12, 1)}
    views, start = {}, 0
    for n, (name, stride) in enumerate(strides.items()):
        views[name] = memory.as_strided((1, seqlen, heads, 16), stride, start)
        views[name].copy_(normal(1, seqlen, heads, 16, seed=n))
        start += 1 << 15
    assert all(sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) >= 1 << 31 for x in views.values())
    dlse = normal(1, heads, seqlen)
    apart = run(*views.values(), dlse, causal=True)
    together = run(*[x.clone(memory_format=torch.contiguous_format) for x in views.values()], dlse, causal=True)
    for name, x in apart.items():
        assert torch.equal(x, together[name]), name


# -- Leaves --------------------------------------------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor, change) -> Tensor:
    """Attention of few heads in plain torch, in float64; ``change`` of the scores (b, h, i, j)."""
    s = change(torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1]))
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(s, -1), v)


def leaf_gradients(score, leaf: Tensor, change, **options) -> tuple[Tensor, Tensor]:
    """``d (o²).sum() / d leaf``, by tilewise and by plain torch."""
    q, k, v = qkv(nq=9, nk=9, hq=2, hk=2, dtype=F64)
    got = torch.autograd.grad(tw.attention(q, k, v, score=score, **options).square().sum(), leaf)[0]
    return got, torch.autograd.grad(plain(q, k, v, change).square().sum(), leaf)[0]


def test_one_tensor_as_two_leaves_gets_both_gradients():
    t = normal(2, 9, 9, dtype=F64).requires_grad_()
    score = tw.bias(t) >> tw.score(lambda s, b, h, i, j: s * t[h, i, j])
    torch.testing.assert_close(*leaf_gradients(score, t, lambda s: (s + t) * t))


def test_one_tensor_as_slopes_and_sink_gets_both_gradients():
    t = normal(2, dtype=F64).requires_grad_()
    distance = (torch.arange(9).view(9, 1) - torch.arange(9)).abs()

    def change(s):
        s = s - t.view(1, 2, 1, 1) * distance
        return s - torch.log1p(torch.exp(t.view(1, 2, 1, 1) - torch.logsumexp(s, -1, keepdim=True)))

    q, k, v = qkv(nq=9, nk=9, hq=2, hk=2, dtype=F64)
    (got,) = torch.autograd.grad(tw.attention(q, k, v, score=tw.alibi(t), sink=t).square().sum(), t)
    s = change(torch.einsum("bihd,bjhd->bhij", q, k) / 4)
    p = torch.exp(s - torch.logsumexp(s, -1, keepdim=True)) * _share(q, k, t, distance)
    (expected,) = torch.autograd.grad(torch.einsum("bhij,bjhd->bihd", p, v).square().sum(), t)
    torch.testing.assert_close(got, expected)


def _share(q, k, t, distance):
    """What the sink leaves to the keys: sum exp(s) / (sum exp(s) + exp(sink))."""
    s = torch.einsum("bihd,bjhd->bhij", q, k) / 4 - t.view(1, 2, 1, 1) * distance
    return torch.sigmoid(torch.logsumexp(s, -1, keepdim=True) - t.view(1, 2, 1, 1))


def test_one_tensor_read_by_mask_and_score_gets_the_gradient_of_the_score():
    t = normal(9, dtype=F64).requires_grad_()
    got, expected = leaf_gradients(
        tw.bias(t), t, lambda s: (s + t).masked_fill(t < 0, -math.inf), mask=tw.keep(lambda b, h, i, j: t[j] >= 0)
    )
    torch.testing.assert_close(got, expected)
    assert (got[t < 0] == 0).all()


def test_a_leaf_of_no_dimensions_is_a_number_with_a_gradient():
    t = torch.tensor(1.3, dtype=F64, requires_grad=True)
    score = tw.score(lambda s, b, h, i, j: s * t + t * j)
    got, expected = leaf_gradients(score, t, lambda s: s * t + t * torch.arange(9))
    torch.testing.assert_close(got, expected)
    assert got.shape == ()


def test_an_expanded_leaf_passes_its_gradient_through_the_expansion():
    t = normal(1, 9, dtype=F64).requires_grad_()
    got, expected = leaf_gradients(tw.bias(t.expand(2, 2, 9, 9)), t, lambda s: s + t)
    torch.testing.assert_close(got, expected)


def test_a_query_that_is_also_a_leaf_and_k_and_v_that_are_one_tensor_get_all_their_gradients():
    x = normal(1, 9, 2, 9, dtype=F64).requires_grad_()
    score = tw.score(lambda s, b, h, i, j: s + x[b, i, h, j])
    (got,) = torch.autograd.grad(tw.attention(x, x, x, score=score).square().sum(), x)
    (expected,) = torch.autograd.grad(plain(x, x, x, lambda s: s + x.transpose(1, 2)).square().sum(), x)
    torch.testing.assert_close(got, expected)


def test_an_index_out_of_range_reads_the_nearest_element():
    t = normal(5, dtype=F64).requires_grad_()
    score = tw.score(lambda s, b, h, i, j: s + t[j - i])
    index = (torch.arange(9) - torch.arange(9).view(9, 1)).clamp(0, 4)
    torch.testing.assert_close(*leaf_gradients(score, t, lambda s: s + t[index]))


# -- Refused -------------------------------------------------------------------------------------------------------

UNTRACEABLE = {
    "if": (lambda s, b, h, i, j: s if i > j else s * 2, "`if`"),
    "int": (lambda s, b, h, i, j: s * int(i), r"`int\(\)`"),
    "float": (lambda s, b, h, i, j: s * float(h), r"`float\(\)`"),
    "math": (lambda s, b, h, i, j: s * math.exp(i), r"`float\(\)`"),
    "for": (lambda s, b, h, i, j: sum(x for x in s), "iteration"),
    "range": (lambda s, b, h, i, j: s + sum(range(j)), "index"),
    "softmax": (lambda s, b, h, i, j: torch.softmax(s, -1), "`softmax`"),
    "sum": (lambda s, b, h, i, j: s - s.sum(), "`sum`"),
    "sort": (lambda s, b, h, i, j: torch.sort(s)[0], "`sort`"),
    "in-place": (lambda s, b, h, i, j: s.add_(1), "`add_`"),
    "item": (lambda s, b, h, i, j: s.item(), "`item`"),
    "tensor-as-a-value": (lambda s, b, h, i, j: s + normal(3), r"shape \(3,\)"),
    "slice": (lambda s, b, h, i, j: s + normal(4, 8)[h, :], "slice"),
    "too-few-indices": (lambda s, b, h, i, j: s + normal(4, 8)[h], "1 of 2 indices"),
    "a-string": (lambda s, b, h, i, j: "s", "str"),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_a_score_that_cannot_be_traced_is_refused_naming_the_operation(name):
    fn, says = UNTRACEABLE[name]
    with pytest.raises(NotImplementedError, match=says):
        tw.attention(*qkv(nq=8, nk=8), score=fn)


@pytest.mark.parametrize("name", ["if", "int", "sum", "slice"])
def test_a_mask_that_cannot_be_traced_is_refused_naming_the_operation(name):
    fn, says = UNTRACEABLE[name]
    with pytest.raises(NotImplementedError, match=says):
        tw.attention(*qkv(nq=8, nk=8), mask=lambda b, h, i, j: fn(i, b, h, i, j))


def attend(**changes):
    x = dict(zip("qkv", qkv(nq=8, nk=8), strict=True)) | changes
    return tw.attention(**x)


def attend_packed(**changes):
    x = dict(zip("qkv", packed(16, 16), strict=True)) | {"cu_seqlens_q": torch.tensor([0, 8, 16])} | changes
    return tw.attention_varlen(**x)


def cached():
    k = normal(2, 8, 2, 16)
    return tw.dense_cache(k, k.clone(), torch.tensor([8, 8], dtype=torch.int32))


# name: (the call, what the message names)
WRONG = {
    "mixed-dtypes": (lambda: attend(k=normal(2, 8, 2, 16).half()), r"convert them to one: k\.to\(q\.dtype\)"),
    "mixed-devices": (lambda: attend(v=torch.empty(2, 8, 2, 16, device="meta")), r"move them to one: k\.to\(q\.device\)"),
    "q-is-a-list": (lambda: attend(q=[[1.0]]), "q must be a tensor, got list"),
    "k-is-an-array": (lambda: attend(k=np.zeros((2, 8, 2, 16), "float32")), "k must be a tensor, got ndarray"),
    "v-is-none": (lambda: attend(v=None), "v must be a tensor, got NoneType"),
    "q-is-sparse": (lambda: attend(q=normal(2, 8, 4, 16).to_sparse()), "sparse"),
    "sink-is-a-number": (lambda: attend(sink=1.0), "sink must be a tensor"),
    "sink-is-a-list": (lambda: attend(sink=[0.0] * 4), "sink must be a tensor"),
    "scale-is-text": (lambda: attend(softmax_scale="0.5"), "softmax_scale"),
    "scale-wants-a-gradient": (lambda: attend(softmax_scale=torch.tensor(0.5, requires_grad=True)), "softmax_scale.*score"),
    "dropout-is-none": (lambda: attend(dropout_p=None), "dropout_p"),
    "dropout-is-text": (lambda: attend(dropout_p="x"), "dropout_p"),
    "seed-is-a-float": (lambda: attend(dropout_p=0.5, dropout_seed=1.5), "dropout_seed"),
    "seed-is-text": (lambda: attend(dropout_p=0.5, dropout_seed="x"), "dropout_seed"),
    "seed-past-64-bits": (lambda: attend(dropout_p=0.5, dropout_seed=2**64), "dropout_seed"),
    "seed-below-63-bits": (lambda: attend(dropout_p=0.5, dropout_seed=-(2**63) - 1), "dropout_seed"),
    "mask-is-a-number": (lambda: attend(mask=3), r"mask= takes a Mask, a bool tensor or a function .*got int"),
    "scale-is-a-fraction": (lambda: attend(softmax_scale=Fraction(1, 2)), r"got Fraction; convert it: float\(softmax_scale\)"),
    "mask-is-an-array": (lambda: attend(mask=np.ones((8, 8), bool)), r"got ndarray; make it a tensor: torch\.from_numpy\(mask\)"),
    "mask-is-a-pair": (lambda: attend(mask=(3, 0)), r"got tuple; a window is mask=tw\.window\(left, right\)"),
    "lengths-are-floats": (lambda: tw.key_lengths(torch.tensor([3.0])), r"got torch\.float32 \(1,\); convert: x\.long\(\)"),
    "mask-of-floats": (lambda: attend(mask=torch.ones(8, 8)), r"takes a bool tensor.*score=tw\.bias"),
    "score-is-a-number": (lambda: attend(score=3), r"score= takes a Score, a float tensor or a function .*got int"),
    "score-of-bools": (lambda: attend(score=torch.ones(8, 8).bool()), "a bool tensor is a mask: mask=t"),
    "score-is-a-mask": (lambda: attend(score=tw.causal()), "score= takes .* got Mask"),
    "mask-is-a-score": (lambda: attend(mask=tw.softcap(2.0)), "mask= takes .* got Score"),
    "mask-of-numbers": (lambda: attend(mask=lambda b, h, i, j: i - j), r"a truth value.*; compare it with a number, or use tw\.score"),
    "score-of-a-truth-value": (lambda: attend(score=lambda s, b, h, i, j: i > j), r"for masks use tw\.keep"),
    "window-below-0": (lambda: attend(mask=tw.window(-1)), r"window\(left=-1\).*None for unbounded"),
    "softcap-of-0": (lambda: attend(score=tw.softcap(0.0)), "cap must be > 0"),
    "cu-seqlens-is-a-list": (lambda: attend_packed(cu_seqlens_q=[0, 8, 16]), "cu_seqlens_q must be a tensor"),
    "cu-seqlens-past-the-end": (lambda: attend_packed(cu_seqlens_q=torch.tensor([0, 2**62])), "past the 16 rows"),
    "cu-seqlens-below-0": (lambda: attend_packed(cu_seqlens_q=torch.tensor([0, -(2**62), 16])), "decreases"),
    "cu-seqlens-is-none": (lambda: attend_packed(cu_seqlens_q=None), "cu_seqlens_q must be a tensor, got None; .*tw.attention"),
    "cu-seqlens-of-keys-alone": (lambda: tw.explain(*qkv(nq=8, nk=8), cu_seqlens_k=torch.tensor([0, 8])), "needs cu_seqlens_q"),
    "backend-is-a-number": (lambda: attend(backend=3), "backend"),
    "backend-is-a-dash": (lambda: attend(backend="-"), "backend='-' does not exist"),
    "backend-is-empty": (lambda: attend(backend=""), "backend='' does not exist"),
    "causal-is-text": (lambda: attend(causal="no"), "causal must be True or False, got str"),
    "deterministic-is-text": (lambda: attend(deterministic="no"), "deterministic must be True, False or \"everywhere\", got 'no'"),
    "scale-is-a-bool": (lambda: attend(softmax_scale=True), "softmax_scale must be a number, got bool"),
    "dropout-mask-above-1": (lambda: tw.dropout_mask(0, 1.5, 1, 1, 4, 4), "dropout"),
    "dropout-mask-below-0": (lambda: tw.dropout_mask(0, -0.5, 1, 1, 4, 4), "dropout"),
    "dropout-mask-of-negative-length": (lambda: tw.dropout_mask(0, 0.5, 1, 1, -4, 4), "sizes must be whole numbers >= 0, got -4"),
    "dropout-mask-past-64-bits": (lambda: tw.dropout_mask(2**64, 0.5, 1, 1, 4, 4), "64 bits"),
    "verify-no-such-device": (lambda: tw.verify("tpu"), "torch knows no such device"),
    "verify-no-such-dtype": (lambda: tw.verify("cpu", torch.int32), r"torch\.int32 is not of torch\.float16"),
    "lookup-of-a-list": (lambda: tw.lookup([1, 2], 0), "lookup reads a tensor, got list"),
    "dropout-mask-of-a-float-seed": (lambda: tw.dropout_mask(0.5, 0.5, 1, 1, 4, 4), "seed"),
    "dropout-mask-of-two-seeds": (lambda: tw.dropout_mask(torch.tensor([1, 2]), 0.5, 1, 1, 4, 4), r"one int64 number, got .* \(2,\)"),
    "cache-of-a-number": (lambda: tw.dense_cache(torch.tensor(1.0), *qkv()[:1], torch.tensor([1])), "k has no dimensions"),
    "explain-without-q": (lambda: tw.explain(None, *qkv()[1:]), "q must be a tensor, got NoneType"),
    "values-beside-a-cache": (lambda: tw.attention_with_stats(normal(2, 1, 4, 16), cached(), normal(2, 8, 2, 16)), "leave v out"),
    "stats-of-no-prefix": (lambda: tw.attention_with_stats(normal(2, 1, 4, 16), cached().share(1)), "prefix_pages must be"),
    "prefix-without-q": (lambda: tw.attention_paged(None, cached().share(1)), "q must be a tensor, got NoneType"),
    "prefix-of-a-list": (lambda: tw.attention_paged(normal(2, 1, 4, 16), cached()._replace(seqlens_k=[8]).share(1)), "seqlens_k .* list"),
    "documents-without-v": (lambda: attend(v=None, mask=tw.documents(torch.zeros(2, 8).int()), deterministic="everywhere"), "v must be"),
    "shown-mask-of-negative-length": (lambda: tw.show_mask(tw.causal(), -1, 4), "seqlen|length"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_returns_no_number_and_names_the_fix(name):
    wrong, says = WRONG[name]
    with pytest.raises(ValueError, match=says):
        wrong()


def test_a_wrong_call_inside_autocast_and_no_grad_is_refused_too():
    q, k, v = qkv(nq=8, nk=8)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), pytest.raises(ValueError, match=r"seqlen of k \(8\)"):
        tw.attention(q, k, v[:, :5])


def test_a_misspelt_keyword_is_refused_by_name():
    with pytest.raises(TypeError, match="is_causal"):
        attend(is_causal=True)
    with pytest.raises(TypeError, match="is_causal"):
        tw.explain(*qkv(nq=8, nk=8), is_causal=True)


# -- Without values ------------------------------------------------------------------------------------------------


def test_meta_tensors_give_the_shapes_of_the_results():
    q, k, v = (x.to("meta").requires_grad_() for x in qkv(nq=9, nk=30, dv=24))
    o, lse = tw.attention_with_lse(q, k, v, mask=lambda b, h, i, j: i != j)
    assert (o.shape, o.device.type, lse.shape) == ((2, 9, 4, 24), "meta", (2, 4, 9))
    dq, dv = torch.autograd.grad(o.sum(), (q, v))
    assert (dq.shape, dv.shape) == (q.shape, v.shape)


def test_explain_computes_nothing():
    q, k, v = (torch.empty(1, 1, 1, 64).expand(4, 1 << 20, 8, 64) for _ in range(3))
    explained = tw.explain(q, k, v, mask=tw.causal() & tw.keep(lambda b, h, i, j: (i ^ j) % 2 == 0))
    assert explained.chosen in ("cpu", "portable")
    assert explained.flops == 4 * 4 * 8 * 64 * (1 << 40)


# -- One batch of keys for all queries -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [F64, torch.bfloat16], ids=str)
def test_keys_of_one_batch_serve_every_query_and_their_gradients_are_summed(options, dtype):
    made, (q, k, v) = OPTIONS[options](70, 40), qkv(batch=3, nq=70, nk=40, dtype=dtype)
    k, v = k[:1], v[:1]
    do, dlse = normal(3, 70, 4, 16).to(dtype), normal(3, 4, 70)
    got = run(q, k, v, do, dlse.to(F64) if dtype == F64 else dlse, **made)
    each = exact(q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1), do, **made)
    assert torch.equal(got["o"], each["o"])
    assert (got["dk"].shape, got["dv"].shape) == (k.shape, v.shape)
    every = run(q, *(x.expand(3, -1, -1, -1) for x in (k, v)), do, dlse.to(got["lse"].dtype), **made)
    for name in ("dk", "dv"):
        torch.testing.assert_close(got[name], every[name].sum(0, keepdim=True))
    assert str(tw.explain(q, k, v, **made)) == str(
        tw.explain(q, k.expand_as(every["dk"]), v.expand_as(every["dv"]), **made)
    )
