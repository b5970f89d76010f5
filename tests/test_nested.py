"""Nested tensors in the jagged layout: a packed call in, nested results out, through tw.attention and SDPA's drop-in."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewise as tw
from bench.testing import normal
from tilewise.compat.sdpa import patch, scaled_dot_product_attention

LENGTHS_Q, LENGTHS_K = [5, 0, 9, 1], [7, 3, 9, 4]


def nested(lengths: list[int], heads: int, dim: int = 8, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    parts = [normal(n, heads, dim, seed=seed + m).to(dtype) for m, n in enumerate(lengths)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def qkv(lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K) -> tuple[Tensor, ...]:
    q, k = nested(lengths_q, 4), nested(lengths_k, 2, seed=10)
    v = torch.nested.nested_tensor_from_jagged(normal(sum(lengths_k), 2, 6, seed=30), k.offsets())
    return q, k, v.detach().requires_grad_()


OPTIONS = {
    "plain": dict,
    "causal": lambda: {"causal": True},
    "mask-score-sink": lambda: {
        "mask": lambda b, h, i, j: (i + j + b) % 3 != 0,
        "score": tw.softcap(2.0) >> tw.alibi(normal(4, seed=7).abs()),
        "sink": normal(4, seed=8),
    },
    "dropout": lambda: {"dropout_p": 0.3, "dropout_seed": 5},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_a_nested_call_is_the_packed_call_with_the_queries_structure(options):
    made, (q, k, v) = OPTIONS[options](), qkv()
    o, lse = tw.attention_with_lse(q, k, v, **made)
    flat = [x.values().detach().requires_grad_() for x in (q, k, v)]
    expected = tw.attention_varlen(*flat, q.offsets(), k.offsets(), return_lse=True, **made)
    assert torch.equal(o.values(), expected[0])
    assert torch.equal(lse.transpose(1, 2).values(), expected[1].mT)
    assert (o.shape[:3], o.shape[3], lse.shape[:2]) == (q.shape[:3], 6, (4, 4))
    assert (o[..., :1] + q[..., :1]).shape == (*q.shape[:3], 1)  # one ragged structure
    grads = torch.autograd.grad(o.values().square().sum(), (q, k, v))
    for x, y in zip(grads, torch.autograd.grad(expected[0].square().sum(), flat), strict=True):
        assert torch.equal(x.values(), y)
    assert str(tw.explain(q, k, v, **made)) == str(
        tw.explain(*flat, cu_seqlens_q=q.offsets(), cu_seqlens_k=k.offsets(), **made)
    )


def test_keys_and_values_may_have_offsets_of_their_own_if_they_are_equal():
    q, k = nested(LENGTHS_Q, 4), nested(LENGTHS_K, 2, seed=10)
    v = nested(LENGTHS_K, 2, seed=30)
    assert torch.equal(
        tw.attention(q, k, v).values(),
        tw.attention_varlen(q.values(), k.values(), v.values(), q.offsets(), k.offsets()),
    )


def narrowed() -> Tensor:
    return torch.nested.narrow(
        normal(4, 9, 2, 8), 1, torch.tensor([0, 1, 2, 0]), torch.tensor([2, 3, 1, 1]), layout=torch.jagged
    )


WRONG = {
    "one-dense": (lambda q, k, v: tw.attention(q, normal(4, 7, 2, 8), v), ValueError, "k is not nested, another one is"),
    "strided": (
        lambda q, k, v: tw.attention(*[torch.nested.nested_tensor([normal(3, 2, 8)])] * 3),
        ValueError,
        r"layout=torch\.jagged",
    ),
    "heads-first": (lambda q, k, v: tw.attention(q.transpose(1, 2), k, v), ValueError, r"\(batch, j, heads, head_dim\)"),
    "holes": (lambda q, k, v: tw.attention(q, narrowed(), narrowed()), ValueError, r"k\.contiguous\(\) leaves them out"),
    "lengths": (lambda q, k, v: tw.attention(q, k, nested([7, 3, 4, 9], 2)), ValueError, "k and v have sequences of different"),
    "batch": (lambda q, k, v: tw.attention(q, nested([7], 2), nested([7], 2)), ValueError, "batch differs: q 4, k 1, v 1"),
    "packed": (lambda q, k, v: tw.attention_varlen(q, k, v, q.offsets()), ValueError, "its own offsets"),
    "stats": (lambda q, k, v: tw.attention_with_stats(q, k, v), ValueError, r"q is nested.*q\.values\(\) and q\.offsets\(\)"),
    "parallel": (lambda q, k, v: tw.attention(q, k, v, parallel=object()), NotImplementedError, "dense tensors, not nested"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_nested_call_says_why(name):
    call, error, says = WRONG[name]
    with pytest.raises(error, match=says):
        call(*qkv())


def test_a_compiled_nested_call_gives_the_same():
    torch._dynamo.reset()
    q, k, v = qkv()
    compiled = torch.compile(lambda q, k, v: tw.attention(q, k, v, causal=True), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v).values(), tw.attention(q, k, v, causal=True).values())


@pytest.mark.parametrize("call", ["attention", "sdpa"])
def test_a_compiled_call_compares_offsets_of_their_own_when_it_runs(call):
    """Dynamo has no values to compare: ``torch.equal`` ended the trace."""

    def attend(q, k, v):
        if call == "attention":
            return tw.attention(q, k, v, causal=True)
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        return scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    q, k, v = nested(LENGTHS_Q, 4), nested(LENGTHS_K, 2, seed=10), nested(LENGTHS_K, 2, seed=30)
    torch.testing.assert_close(compiled(q, k, v).values(), attend(q, k, v).values())
    with pytest.raises(RuntimeError, match="k and v have sequences of different lengths"):
        compiled(q, k, nested(LENGTHS_K[::-1], 2, seed=30))


# -- SDPA's drop-in --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [LENGTHS_K, [5, 2, 9, 1]], ids=["other-lengths", "same"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_sdpa_of_nested_tensors_is_a_loop_over_sequences(lengths, is_causal):
    q, k, v = qkv([5, 2, 9, 1], lengths)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    o = scaled_dot_product_attention(*heads_first, is_causal=is_causal, enable_gqa=True, scale=0.3)
    assert (o.shape[:2], o.shape[3]) == ((4, 4), 6)
    for got, *one in zip(o.transpose(1, 2).unbind(), *[x.unbind() for x in (q, k, v)], strict=True):
        expected = F.scaled_dot_product_attention(
            *[x.transpose(0, 1)[None] for x in one], is_causal=is_causal, enable_gqa=True, scale=0.3
        )
        torch.testing.assert_close(got.transpose(0, 1)[None], expected)


def test_a_patched_model_of_nested_tensors_comes_here():
    torch.manual_seed(0)
    layer, lengths = nn.Linear(16, 48), [6, 3, 1]
    x = torch.nested.nested_tensor([normal(n, 16, seed=n) for n in lengths], layout=torch.jagged)

    def model(x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in layer(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    with patch():
        got = model(x)
        (grad,) = torch.autograd.grad(got.values().square().sum(), layer.weight)
    expected = torch.cat([model(part[None])[0] for part in x.unbind()])
    torch.testing.assert_close(got.values(), expected)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.square().sum(), layer.weight)[0])


REFUSED = {
    "mask": (lambda q, k, v: scaled_dot_product_attention(q, k, v, torch.ones(9, 9)), "attn_mask beside nested"),
    "heads-last": (lambda q, k, v: scaled_dot_product_attention(*[x.transpose(1, 2) for x in (q, k, v)]), "heads, j, head_dim"),
    "heads": (lambda q, k, v: scaled_dot_product_attention(q, k, v), "enable_gqa=True"),
    "one-dense": (lambda q, k, v: scaled_dot_product_attention(q, normal(4, 2, 9, 8), v, enable_gqa=True), "not nested"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_sdpa_cannot_do_with_nested_tensors_is_refused(name):
    call, says = REFUSED[name]
    with pytest.raises((NotImplementedError, ValueError), match=says):
        call(*[x.transpose(1, 2) for x in qkv()])
