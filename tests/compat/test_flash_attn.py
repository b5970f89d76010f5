"""flash-attn's names: its documented behaviour, judged against plain formulas in float64."""

from __future__ import annotations

import inspect
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.compat.eager import Arithmetic, agree, attend, normal
from tilewise.compat import flash_attn as fa
from tilewise.compat.flash_attn import bert_padding

B, H, HK, D = 2, 4, 2, 16


def qkv(nq: int = 33, nk: int = 45, hk: int = HK, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    shapes = (B, nq, H, D), (B, nk, hk, D), (B, nk, hk, D)
    return tuple(normal(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes, 1))


def slopes(*shape: int) -> Tensor:
    return normal(*shape, seed=7).abs() / 8  # as ALiBi has them: at most a half


def documented(
    arithmetic: Arithmetic,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    signs: Tensor | None = None,
    p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """What the original documents, of ``(batch, seqlen, heads, head_dim)``."""
    nq, nk = q.shape[1], k.shape[1]
    distance = torch.arange(nk) - torch.arange(nq).view(-1, 1) - (nk - nq)  # 0 at the query's own key
    left, right = window_size[0], 0 if causal else window_size[1]
    kept = torch.ones(nq, nk, dtype=torch.bool)
    kept &= distance >= -left if left >= 0 else kept
    kept &= distance <= right if right >= 0 else kept

    def change(s: Tensor) -> Tensor:
        s = softcap * torch.tanh(s / softcap) if softcap else s
        return s if alibi is None else s - alibi.view(-1, H, 1, 1) * distance.abs()

    factor = None if signs is None else (signs > 0) * (65536 / round((1 - p) * 65536))
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    o, lse = attend(*heads, arithmetic, scale=softmax_scale, change=change, kept=kept, factor=factor)
    return o.transpose(1, 2), lse


OPTIONS = {
    "defaults": {},
    "scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (7, 3)},
    "window-left": {"window_size": (7, -1)},
    "window-right": {"window_size": (-1, 0)},
    "window-causal": {"window_size": (7, 5), "causal": True},
    "softcap": {"softcap": 1.5},
    "everything": {"softcap": 1.5, "causal": True, "window_size": (20, 0), "softmax_scale": 0.4},
}
SIZES = {"more-keys": (33, 45), "more-queries": (45, 33), "one-query": (1, 45), "equal": (40, 40), "few-keys": (7, 3)}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("options", OPTIONS)
def test_out_lse_and_gradients_are_the_documented_ones(options, sizes):
    run = lambda q, k, v: fa.flash_attn_func(q, k, v, **OPTIONS[options], return_attn_probs=True)[:2]  # noqa: E731
    agree(run, partial(documented, **OPTIONS[options]), qkv(*SIZES[sizes]))


@pytest.mark.parametrize("shape", [(H,), (B, H)], ids=["per-head", "per-batch-and-head"])
@pytest.mark.parametrize("options", ["defaults", "causal", "everything"])
def test_alibi_slopes_of_either_shape_bias_by_distance_and_have_gradients(options, shape):
    def run(q, k, v, alibi):
        return fa.flash_attn_func(q, k, v, alibi_slopes=alibi, **OPTIONS[options], return_attn_probs=True)[:2]

    agree(run, partial(documented, **OPTIONS[options]), (*qkv(), slopes(*shape)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_follow_the_same_formula(dtype):
    run = lambda q, k, v: fa.flash_attn_func(q, k, v, **OPTIONS["everything"], return_attn_probs=True)[:2]  # noqa: E731
    agree(run, partial(documented, **OPTIONS["everything"]), qkv(dtype=dtype))


@pytest.mark.parametrize("options", ["defaults", "everything"])
def test_kvpacked_is_the_function_of_its_parts_with_packed_gradients(options):
    q, k, v = qkv()
    run = lambda q, kv: fa.flash_attn_kvpacked_func(q, kv, **OPTIONS[options], return_attn_probs=True)[:2]  # noqa: E731
    agree(run, lambda a, q, kv: documented(a, q, *kv.unbind(2), **OPTIONS[options]), (q, torch.stack([k, v], 2)))


@pytest.mark.parametrize("options", ["defaults", "everything"])
def test_qkvpacked_is_the_function_of_its_parts_with_packed_gradients(options):
    packed = torch.stack(qkv(39, 39, H), 2)
    run = lambda x: fa.flash_attn_qkvpacked_func(x, **OPTIONS[options], return_attn_probs=True)[:2]  # noqa: E731
    agree(run, lambda a, x: documented(a, *x.unbind(2), **OPTIONS[options]), (packed,))


def test_rows_without_a_key_are_zero_and_pass_nothing_on():
    q, k, v = (x.requires_grad_() for x in qkv(45, 33))
    out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    (dq,) = torch.autograd.grad(out.sum() + lse.where(lse.isfinite(), 0).sum(), q)
    assert (out[:, :12] == 0).all()
    assert (dq[:, :12] == 0).all()
    assert (lse[..., :12] == -torch.inf).all()
    assert lse[..., 12:].isfinite().all()


@pytest.mark.parametrize("sizes", [(0, 9), (9, 0)], ids=["no-queries", "no-keys"])
def test_no_queries_or_no_keys_give_zeros(sizes):
    q, k, v = (x.requires_grad_() for x in qkv(*sizes))
    out = fa.flash_attn_func(q, k, v, causal=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert out.shape == q.shape
    assert all((x == 0).all() for x in (out, *grads))


@pytest.mark.parametrize("form", ["heads-first", "sliced", "expanded"])
def test_strided_inputs_are_read_where_they_lie(form):
    forms = {
        "heads-first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "sliced": lambda x: torch.cat([x, x], -1)[..., :D],
        "expanded": lambda x: x[:, :, :1].expand(-1, -1, x.shape[2], -1),
    }
    strided = [forms[form](x) for x in qkv()]
    run = lambda q, k, v: fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[:2]  # noqa: E731
    agree(run, partial(documented, causal=True), strided)


def test_deterministic_repeats_bit_for_bit():
    def grads():
        q, k, v, alibi = (x.requires_grad_() for x in (*qkv(), slopes(H)))
        out = fa.flash_attn_func(q, k, v, causal=True, alibi_slopes=alibi, deterministic=True)
        return out, *torch.autograd.grad(out.sum(), (q, k, v, alibi))

    assert all(torch.equal(x, y) for x, y in zip(grads(), grads(), strict=True))


# -- Dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["defaults", "everything"])
def test_s_dmask_is_the_dropout_that_the_output_and_gradients_had(options):
    q, k, v = qkv()
    run = lambda q, k, v: fa.flash_attn_func(q, k, v, 0.3, **OPTIONS[options], return_attn_probs=True)  # noqa: E731
    torch.manual_seed(3)
    signs = run(q, k, v)[2]
    assert signs.shape == (B, H, 33, 45)
    assert 0.6 < (signs > 0).float().mean() < 0.8
    torch.manual_seed(3)
    agree(lambda *x: run(*x)[:2], partial(documented, **OPTIONS[options], signs=signs, p=0.3), (q, k, v))


def test_dropout_repeats_with_torchs_seed_and_differs_without():
    q, k, v = qkv()
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(fa.flash_attn_func(q, k, v, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_packed_dropout_is_that_of_each_sequence():
    lengths = [5, 17, 11]
    q, k, v = packed(lengths, lengths)
    cu = offsets(lengths)
    torch.manual_seed(4)
    out, _, signs = fa.flash_attn_varlen_func(q, k, v, cu, cu, 17, 17, 0.3, return_attn_probs=True)
    assert signs.shape == (3, H, 17, 17)
    for b, n in enumerate(lengths):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        one = [x[None, rows].double() for x in (q, k, v)]
        expected, _ = documented(Arithmetic(torch.float64), *one, signs=signs[b, :, :n, :n], p=0.3)
        torch.testing.assert_close(out[None, rows], expected.float())


WHOLE = {"tensor": torch.tensor, "int32": lambda n: torch.tensor([n], dtype=torch.int32), "numpy": np.int64}


@pytest.mark.parametrize("form", WHOLE)
def test_whole_numbers_may_be_tensors_or_numpys(form):
    as_form = WHOLE[form]
    lengths = [5, 17, 11]
    q, k, v = packed(lengths, lengths)
    cu = offsets(lengths)

    def call(n):
        torch.manual_seed(4)
        window = (n(7), n(-1))
        return fa.flash_attn_varlen_func(q, k, v, cu, cu, n(17), n(17), 0.3, window_size=window, return_attn_probs=True)

    for got, expected in zip(call(as_form), call(int), strict=True):
        assert torch.equal(got, expected)


def test_a_window_that_is_no_whole_number_is_a_wrong_call():
    for bound in (1.5, torch.tensor(2.0), None):
        with pytest.raises(ValueError, match="window_size takes whole numbers"):
            fa.flash_attn_func(*qkv(), window_size=(bound, 0))


def test_without_dropout_reading_s_dmask_names_where_probabilities_are():
    *_, nothing = fa.flash_attn_func(*qkv(), return_attn_probs=True)
    for read in (lambda: nothing.shape, lambda: nothing[0], lambda: bool(nothing), lambda: torch.as_tensor(nothing)):
        with pytest.raises(NotImplementedError, match=r"tilewise\.reference\.attention"):
            read()


# -- Packed sequences ------------------------------------------------------------------------------------------------

LENGTHS_Q, LENGTHS_K = [13, 0, 20, 1, 7], [9, 6, 31, 1, 0]


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed(lengths_q: list[int], lengths_k: list[int]) -> tuple[Tensor, ...]:
    q, k = sum(lengths_q), sum(lengths_k)
    return normal(q, H, D, seed=1), normal(k, HK, D, seed=2), normal(k, HK, D, seed=3)


def each_sequence(arithmetic, q, k, v, *alibi, lengths=(LENGTHS_Q, LENGTHS_K), **options):
    """:func:`documented` of one sequence after another."""
    parts = zip(
        *(x.split(n) for x, n in zip((q, k, v), (lengths[0], lengths[1], lengths[1]), strict=True)), strict=True
    )
    per_batch = alibi[0].unbind() if alibi and alibi[0].ndim == 2 else alibi[0:1] * len(lengths[0])
    results = [
        documented(arithmetic, *(x[None] for x in part), *per_batch[b : b + 1], **options)
        for b, part in enumerate(parts)
    ]
    return torch.cat([o[0] for o, _ in results]), torch.cat([lse[0] for _, lse in results], -1)


@pytest.mark.parametrize("options", OPTIONS)
def test_varlen_is_a_loop_over_sequences(options):
    cu = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    longest = max(LENGTHS_Q), max(LENGTHS_K)

    def run(q, k, v):
        return fa.flash_attn_varlen_func(q, k, v, *cu, *longest, **OPTIONS[options], return_attn_probs=True)[:2]

    agree(run, partial(each_sequence, **OPTIONS[options]), packed(LENGTHS_Q, LENGTHS_K))


@pytest.mark.parametrize("shape", [(H,), (5, H)], ids=["per-head", "per-sequence-and-head"])
def test_varlen_takes_alibi_slopes_of_either_shape(shape):
    cu = offsets(LENGTHS_Q), offsets(LENGTHS_K)

    def run(q, k, v, alibi):
        out = fa.flash_attn_varlen_func(q, k, v, *cu, 20, 31, causal=True, alibi_slopes=alibi, return_attn_probs=True)
        return out[:2]

    agree(run, partial(each_sequence, causal=True), (*packed(LENGTHS_Q, LENGTHS_K), slopes(*shape)))


def test_varlen_kvpacked_has_packed_gradients():
    q, k, v = packed(LENGTHS_Q, LENGTHS_K)
    cu = offsets(LENGTHS_Q), offsets(LENGTHS_K)

    def run(q, kv):
        return fa.flash_attn_varlen_kvpacked_func(q, kv, *cu, 20, 31, causal=True, return_attn_probs=True)[:2]

    agree(run, lambda a, q, kv: each_sequence(a, q, *kv.unbind(1), causal=True), (q, torch.stack([k, v], 1)))


def test_varlen_qkvpacked_has_packed_gradients():
    x, cu = normal(sum(LENGTHS_Q), 3, H, D), offsets(LENGTHS_Q)
    same = (LENGTHS_Q, LENGTHS_Q)

    def run(x):
        return fa.flash_attn_varlen_qkvpacked_func(x, cu, 20, causal=True, return_attn_probs=True)[:2]

    agree(run, lambda a, x: each_sequence(a, *x.unbind(1), causal=True, lengths=same), (x,))


def test_a_sequence_of_nan_leaves_its_neighbours_alone():
    q, k, v = packed(LENGTHS_Q, LENGTHS_K)
    cu = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    clean = fa.flash_attn_varlen_func(q, k, v, *cu, 20, 31)
    q[13:33] = k[15:46] = v[15:46] = torch.nan
    dirty = fa.flash_attn_varlen_func(q, k, v, *cu, 20, 31)
    others = [*range(13), *range(33, 41)]
    assert torch.equal(dirty[others], clean[others])


# -- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: fa.flash_attn_qkvpacked_func(normal(B, 5, 2, H, D)), r"qkv must be .*, 3, heads"),
        (lambda: fa.flash_attn_kvpacked_func(normal(B, 5, H, D), normal(B, 5, H, D)), r"kv must be .*, 2, heads"),
        (lambda: fa.flash_attn_func(*qkv(), window_size=(-2, 0)), r"left=-2"),
        (lambda: fa.flash_attn_func(*qkv(), softcap=-1.0), r"cap must be > 0"),
        (lambda: fa.flash_attn_func(*qkv(), alibi_slopes=normal(1, B, H)), r"alibi"),
        (lambda: fa.flash_attn_func(*qkv(hk=3)), r"multiple of heads of k"),
    ],
    ids=["qkv", "kv", "window", "softcap", "alibi", "heads"],
)
def test_wrong_calls_say_what_is_wrong(call, says):
    with pytest.raises(ValueError, match=says):
        call()


# -- bert_padding ----------------------------------------------------------------------------------------------------

TOKENS = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
def test_unpad_input_gives_the_tokens_where_they_were_and_how_many(dtype):
    x = normal(3, 5, H, D)
    rows, indices, cu, longest, used = bert_padding.unpad_input(x, TOKENS.to(dtype))
    assert torch.equal(rows, x[TOKENS])
    assert indices.tolist() == [0, 1, 2, 6, 7, 9]
    assert (cu.tolist(), cu.dtype) == ([0, 3, 6, 6], torch.int32)
    assert longest == 3
    assert used.tolist() == [3, 3, 0]


def test_numbers_of_sequences_and_masks_that_overlap_select_each_row_once():
    x = normal(3, 5, D)
    expected = bert_padding.unpad_input(x, TOKENS)
    for masks in [(TOKENS * 3,), (TOKENS.long(), TOKENS.long())]:
        found = bert_padding.unpad_input(x, *masks)
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(found, expected, strict=True))


def test_unused_rows_are_packed_and_not_counted_as_used():
    x, unused = normal(3, 5, D), torch.zeros(3, 5, dtype=torch.bool)
    unused[0, 4] = unused[2, 0] = True
    rows, indices, cu, longest, used = bert_padding.unpad_input(x, TOKENS, unused)
    assert torch.equal(rows, x[TOKENS | unused])
    assert indices.tolist() == [0, 1, 2, 4, 6, 7, 9, 10]
    assert (cu.tolist(), longest, used.tolist()) == ([0, 4, 7, 8], 4, [3, 3, 0])


def test_pad_input_undoes_unpad_input_and_zeroes_the_rest():
    x = normal(3, 5, H, D)
    rows, indices, *_ = bert_padding.unpad_input(x, TOKENS)
    assert torch.equal(bert_padding.pad_input(rows, indices, 3, 5), x.where(TOKENS[..., None, None], 0))


def test_padding_functions_have_gradients():
    x = normal(3, 5, 2, dtype=torch.float64).requires_grad_()
    rows, indices, *_ = bert_padding.unpad_input(x, TOKENS)
    assert torch.autograd.gradcheck(lambda x: bert_padding.unpad_input(x, TOKENS)[0], x)
    assert torch.autograd.gradcheck(lambda r: bert_padding.pad_input(r, indices, 3, 5), rows.detach().requires_grad_())
    assert torch.autograd.gradcheck(
        bert_padding.index_first_axis, (rows.detach().requires_grad_(), torch.tensor([2, 0, 2]))
    )


def test_a_padded_batch_through_varlen_is_attention_over_its_tokens():
    q, k, v = (normal(3, 5, h, D, seed=n).requires_grad_() for n, h in enumerate((H, HK, HK)))
    (rq, indices, cu, longest, _), (rk, *_), (rv, *_) = (bert_padding.unpad_input(x, TOKENS) for x in (q, k, v))
    out = fa.flash_attn_varlen_func(rq, rk, rv, cu, cu, longest, longest, causal=True)
    padded = bert_padding.pad_input(out, indices, 3, 5)
    mask = tw.causal() & tw.dense(TOKENS.view(3, 1, 1, 5))
    expected = tw.attention(q, k, v, mask=mask).where(TOKENS[..., None, None], 0)
    torch.testing.assert_close(padded, expected)
    for x, y in zip(*(torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (padded, expected)), strict=True):
        torch.testing.assert_close(x, y)


# -- The original's face ---------------------------------------------------------------------------------------------

TAIL = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
CACHE = dict.fromkeys(
    [
        "k",
        "v",
        "rotary_cos",
        "rotary_sin",
        "cache_seqlens",
        "cache_batch_idx",
        "cache_leftpad",
        "block_table",
        "softmax_scale",
    ]
) | {
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "rotary_interleaved": True,
    "alibi_slopes": None,
    "num_splits": 0,
    "return_softmax_lse": False,
}
CU = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
FACE = {
    "flash_attn_func": (["q", "k", "v"], TAIL),
    "flash_attn_kvpacked_func": (["q", "kv"], TAIL),
    "flash_attn_qkvpacked_func": (["qkv"], TAIL),
    "flash_attn_varlen_func": (["q", "k", "v", *CU], TAIL | {"block_table": None}),
    "flash_attn_varlen_kvpacked_func": (["q", "kv", *CU], TAIL),
    "flash_attn_varlen_qkvpacked_func": (["qkv", "cu_seqlens", "max_seqlen"], TAIL),
    "flash_attn_with_kvcache": (["q", "k_cache", "v_cache"], CACHE),
}


@pytest.mark.parametrize("name", FACE)
def test_arguments_have_the_names_order_and_defaults_of_flash_attn_2_8(name):
    required, defaults = FACE[name]
    parameters = inspect.signature(getattr(fa, name)).parameters
    assert list(parameters) == [*required, *defaults]
    assert {n: p.default for n, p in parameters.items() if p.default is not p.empty} == defaults
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())


def test_compiled_without_graph_breaks_it_gives_the_same():
    torch._dynamo.reset()
    q, k, v = (x.requires_grad_() for x in qkv())

    def call(q, k, v):
        out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, window_size=(9, -1), softcap=2.0, return_attn_probs=True)
        return out.sum() + lse.sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for x, y in zip(*(torch.autograd.grad(f(q, k, v), (q, k, v)) for f in (compiled, call)), strict=True):
        torch.testing.assert_close(x, y)
