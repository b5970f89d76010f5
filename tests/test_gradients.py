"""The backward as a function: the bits of autograd's gradients, wherever it is called, and what it refuses."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from bench.testing import normal, qkv

F64 = torch.float64
HALF = torch.bfloat16


def case(options=None, cu=None, **sizes):
    """A case: makes q, k and v, the keywords of the call, and the tensors beside q, k and v that want a gradient."""

    def make(dtype=torch.float32):
        tensors = qkv(dtype=dtype, **sizes)
        if cu is not None:
            tensors = tuple(x[0] for x in tensors)
        given = {} if options is None else options(dtype)
        score = given.get("score")
        leaves = [] if score is None else [x for x in score.leaves if x.is_floating_point()]
        sink = [given["sink"]] if "sink" in given else []
        packed = {} if cu is None else dict(zip(("cu_seqlens_q", "cu_seqlens_k"), map(torch.tensor, cu), strict=False))
        return tensors, given | packed, [*sink, *leaves]

    return make


CASES = {
    "plain": case(),
    "gqa-causal": case(lambda _: {"causal": True}, nq=63, nk=129, hq=6, hk=2, d=24, dv=40),
    "window": case(lambda _: {"mask": tw.window(left=5, right=2), "softmax_scale": 0.3}, nq=129, nk=63),
    "empty-rows": case(lambda _: {"causal": True}, nq=70, nk=9),
    "sink": case(lambda _: {"sink": normal(4), "causal": True}, nq=70, nk=9),
    "softcap-bias": case(lambda dtype: {"score": tw.softcap(3.0) >> tw.bias(normal(4, 70, 70, dtype=dtype))}),
    "slopes-and-sink": case(lambda _: {"score": tw.alibi(normal(4)), "sink": normal(4, seed=3), "causal": True}),
    "dropout": case(lambda _: {"dropout_p": 0.3, "dropout_seed": 7, "mask": lambda b, h, i, j: (i + j) % 3 > 0}),
    "keys-of-all": case(lambda _: {"mask": tw.key_lengths(50)}),
    "one-query": case(lambda _: {"causal": True}, nq=1, nk=33),
    "no-keys": case(nk=0),
    "packed": case(lambda _: {"causal": True}, cu=([0, 20, 20, 61],), nq=70, nk=70),
    "packed-lengths": case(
        lambda _: {"mask": tw.window(left=9), "sink": normal(4)}, cu=([0, 20, 30, 31], [0, 3, 3, 33]), nq=31, nk=33
    ),
}


def forward(tensors, options):
    """o and lse."""
    options = dict(options)
    cu = [options.pop(name, None) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    if cu[0] is None:
        return tw.attention_with_lse(*tensors, **options)
    return tw.attention_varlen_with_lse(*tensors, *cu, **options)


def cotangents(o, lse):
    return normal(*o.shape, dtype=o.dtype, seed=8), normal(*lse.shape, dtype=lse.dtype, seed=9)


def by_autograd(tensors, options, leaves):
    """o, lse, do, dlse and autograd's gradients of q, k, v and the leaves."""
    wanted = [x.requires_grad_() for x in (*tensors, *leaves)]
    o, lse = forward(tensors, options)
    do, dlse = cotangents(o, lse)
    grads = torch.autograd.grad((o, lse), wanted, (do, dlse))
    for x in wanted:
        x.requires_grad_(False)
    return o.detach(), lse.detach(), do, dlse, grads


def same_bits(found, expected):
    assert len(found) == len(expected)
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["cpu", "portable"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_bits_of_autograd(name, backend, dtype):
    tensors, options, leaves = CASES[name](dtype)
    options |= {"backend": backend}
    o, lse, do, dlse, expected = by_autograd(tensors, options, leaves)
    found = tw.attention_backward(do, *tensors, o, lse, dlse=dlse, wrt=leaves, **options)
    same_bits(found, expected)


def test_nothing_depends_on_what_requires_a_gradient():
    tensors, options, (sink, slopes) = CASES["slopes-and-sink"]()
    o, lse, do, dlse, expected = by_autograd(tensors, options, [sink, slopes])
    with torch.no_grad():
        slopes.requires_grad_()
        same_bits(tw.attention_backward(do, *tensors, o, lse, dlse=dlse, **options), expected[:3])
        found = tw.attention_backward(do, *tensors, o, lse, dlse=dlse, wrt=(slopes, sink), **options)
    same_bits(found, (*expected[:3], expected[4], expected[3]))


def test_lse_without_a_gradient_is_a_gradient_of_zero():
    tensors, options, _ = CASES["gqa-causal"]()
    o, lse, do, dlse, _ = by_autograd(tensors, options, [])
    found = tw.attention_backward(do, *tensors, o, lse, **options)
    same_bits(found, tw.attention_backward(do, *tensors, o, lse, dlse=torch.zeros_like(dlse), **options))


def test_keys_and_values_of_one_batch_element_get_the_sum_over_the_batch():
    q, k, v = qkv(batch=3)
    tensors = q, k[:1], v[:1]
    o, lse, do, dlse, expected = by_autograd(tensors, {"causal": True}, [])
    same_bits(tw.attention_backward(do, *tensors, o, lse, dlse=dlse, causal=True), expected)


@pytest.mark.parametrize("backend", ["cpu", "portable", "reference"])
def test_gradients_of_parts_of_the_keys_are_those_of_the_whole(backend):
    (q, k, v), sink, options = qkv(dtype=F64), normal(4, dtype=F64), {"backend": backend}
    parts = [(k[:, a:b], v[:, a:b]) for a, b in ((0, 31), (31, 70))]
    with_sink = {"sink": sink, **options}
    of_parts = [with_sink, options]
    o, lse = tw.merge([tw.attention_with_lse(q, *part, **more) for part, more in zip(parts, of_parts, strict=True)])
    do, dlse = cotangents(o, lse)
    (_, _, _, _, whole) = by_autograd((q, k, v), with_sink, [sink])
    dq, *dkv, dsink = tw.attention_backward(do, q, *parts[0], o, lse, dlse=dlse, wrt=(sink,), **with_sink)
    dq_more, *dkv_more = tw.attention_backward(do, q, *parts[1], o, lse, dlse=dlse, **options)
    dk, dv = (torch.cat(x, 1) for x in zip(dkv, dkv_more, strict=True))
    for x, y in zip((dq + dq_more, dk, dv, dsink), whole, strict=True):
        torch.testing.assert_close(x, y)


def small(dtype=F64):
    """q, k, v, a sink, do and dlse of a call that is small enough for finite differences; each requires a gradient."""
    tensors = *qkv(batch=1, nq=5, nk=6, hq=2, hk=1, d=3, dv=2, dtype=dtype), normal(2, dtype=dtype)
    cotangent = normal(1, 5, 2, 2, dtype=dtype, seed=8), normal(1, 2, 5, dtype=dtype, seed=9)
    return [x.requires_grad_() for x in (*tensors, *cotangent)]


def of_all(q, k, v, sink, do, dlse):
    """The gradients of q, k, v and the sink."""
    options = {"sink": sink, "causal": True, "score": tw.softcap(2.0)}
    o, lse = tw.attention_with_lse(q, k, v, **options)
    return tw.attention_backward(do, q, k, v, o, lse, dlse=dlse, wrt=(sink,), **options)


def test_gradients_have_derivatives():
    assert torch.autograd.gradcheck(of_all, small())


def softcapped(q, k, v, sink, bias):
    """The call of the next test by autograd and by attention_backward, which names neither the sink nor the bias."""
    options = {"sink": sink, "score": tw.softcap(2.0) >> tw.bias(bias)}
    o, lse = tw.attention_with_lse(q, k, v, **options)
    do, dlse = cotangents(o, lse)
    found = tw.attention_backward(do, q, k, v, o.detach(), lse.detach(), dlse=dlse, **options)
    return torch.autograd.grad((o, lse), (q, k, v), (do, dlse), create_graph=True), found


def test_gradients_have_derivatives_by_tensors_that_wrt_does_not_name():
    inputs = [
        x.requires_grad_()
        for x in (*qkv(nq=5, nk=6, d=3, dtype=F64), *(normal(*shape, dtype=F64) for shape in ((4,), (4, 5, 6))))
    ]
    expected, found = (
        torch.autograd.grad(sum(x.pow(2).sum() for x in grads), inputs, retain_graph=True)
        for grads in softcapped(*inputs)
    )
    torch.testing.assert_close(found, expected)


def test_tangents_of_gradients_have_derivatives_by_tangents_that_wrt_does_not_name():
    q, k, v, bias = *qkv(nq=5, nk=6, d=3, dtype=F64), normal(4, 5, 6, dtype=F64)
    o, lse = tw.attention_with_lse(q, k, v, score=tw.bias(bias))
    do = normal(*o.shape, dtype=F64, seed=8)

    def moved(along, wrt):
        def dq(bias):
            return tw.attention_backward(do, q, k, v, o, lse, score=tw.bias(bias), wrt=(bias,) if wrt else ())[0]

        return torch.func.jvp(dq, (bias,), (along,))[1].pow(2).sum()

    found, expected = (torch.func.grad(moved)(normal(4, 5, 6, dtype=F64, seed=9), wrt) for wrt in (False, True))
    assert expected.abs().max() > 0
    torch.testing.assert_close(found, expected)


def test_transforms_of_torch_func_take_it_apart():
    tensors = [x.detach() for x in small()]

    def loss(*x):
        return sum(grad.square().sum() for grad in of_all(*x))

    wanted = [x.clone().requires_grad_() for x in tensors]
    expected = torch.autograd.grad(loss(*wanted), wanted)
    for x, y in zip(torch.func.grad(loss, tuple(range(6)))(*tensors), expected, strict=True):
        torch.testing.assert_close(x, y)
    *inputs, do, dlse = tensors
    mapped = torch.func.vmap(lambda scale: of_all(*inputs, do * scale, dlse * scale))(torch.tensor([1.0, 2.0]))
    for x, y in zip(mapped, of_all(*inputs, do * 2, dlse * 2), strict=True):
        torch.testing.assert_close(x[1], y)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_has_it_without_a_graph_break(backend):
    torch._dynamo.reset()
    tensors = [x.detach() for x in small(torch.float32)]
    compiled = torch.compile(of_all, fullgraph=True, backend=backend)
    for x, y in zip(compiled(*tensors), of_all(*tensors), strict=True):
        torch.testing.assert_close(x, y)


def test_a_wrong_call_is_told_every_reason():
    q, k, v = qkv()
    o, lse = tw.attention_with_lse(q, k, v)
    bias = normal(70, 70)
    with pytest.raises(ValueError, match="attention_backward was called wrongly") as said:
        tw.attention_backward(o[:, :3], q, k, v, o.half(), lse.mT, dlse=lse.double(), dropout_p=0.1, wrt=(bias, bias))
    for reason in (
        "do must be torch.float32 (2, 70, 4, 16) on cpu, got torch.float32 (2, 3, 4, 16)",
        "o must be torch.float32 (2, 70, 4, 16) on cpu, got torch.float16",
        "lse must be torch.float32 (2, 4, 70) on cpu, got torch.float32 (2, 70, 4)",
        "dlse must be torch.float32 (2, 4, 70) on cpu, got torch.float64",
        "wrt[1] is neither the sink nor a floating tensor that the score reads",
        "dropout_p needs the dropout_seed of the forward",
    ):
        assert reason in str(said.value)


WRONG = {
    "none": (lambda x: x | {"o": None}, "o must be a tensor, got NoneType"),
    "lone-tensor": (lambda x: x | {"wrt": normal(4)}, "write wrt=(x,)"),
    "whole-numbers": (
        lambda x: x | {"wrt": (COUNTS,), "score": lambda s, b, h, i, j: s + COUNTS[i]},
        "wrt[0] is neither the sink nor a floating",
    ),
    "rank": (lambda x: x | {"q": x["q"][0]}, "q has 3 dimensions"),
    "heads": (lambda x: x | {"k": x["k"][:, :, :1], "v": x["v"]}, "heads"),
}
COUNTS = torch.arange(70)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name):
    change, says = WRONG[name]
    q, k, v = qkv()
    o, lse = tw.attention_with_lse(q, k, v)
    with pytest.raises(ValueError, match="called wrongly") as said:
        tw.attention_backward(**change({"do": o, "q": q, "k": k, "v": v, "o": o, "lse": lse}))
    assert says in str(said.value)


def test_a_backward_by_hand_inside_autocast_says_in_what_dtype_q_k_and_v_went_in():
    q = torch.randn(1, 40, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        o, lse = tw.attention_with_lse(q, q, q)
        with pytest.raises(ValueError, match=r"as they went in, for this o in torch\.bfloat16"):
            tw.attention_backward(o, q, q, q, o, lse)
        low = q.bfloat16()
        assert tw.attention_backward(o, low, low, low, o, lse)[0].dtype == torch.bfloat16
