"""Forward mode and second derivatives, against the same attention in plain torch, and against finite differences."""

import pytest
import torch
from torch.autograd import forward_ad

import tilewise as tw
from bench.testing import normal, qkv

F64 = torch.float64
CU = torch.tensor([0, 4, 4, 9])


def leaf(*shape: int, seed: int = 5) -> torch.Tensor:
    return normal(*shape, dtype=F64, seed=seed)


# Options of a call on q (2, 5, 4, 3), k (2, 6, 2, 3), v (2, 6, 2, 2), the sinks and score tensors among them as arguments.
CASES = {
    "plain": ((), dict),
    "causal-sink": ((leaf(4),), lambda sink: {"causal": True, "sink": sink}),
    "window": ((), lambda: {"mask": tw.window(left=2, right=1)}),
    "empty-rows": ((leaf(4),), lambda sink: {"mask": tw.key_lengths(torch.tensor([6, 0])), "sink": sink}),
    "keep-dropout": ((), lambda: {"mask": lambda b, h, i, j: (i + j) % 3 != 0, "dropout_p": 0.3, "dropout_seed": 3}),
    "softcap-bias": ((leaf(1, 4, 5, 6),), lambda bias: {"score": tw.softcap(2.0) >> tw.bias(bias)}),
    "alibi": ((leaf(4),), lambda slopes: {"score": tw.alibi(slopes), "causal": True}),
    "product": (
        (leaf(4, 6), leaf(4)),
        lambda t, c: {"score": lambda s, b, h, i, j: torch.where(i > j, s * s * t[h, j], torch.sin(s) * c[h])},
    ),
    "one-number": ((leaf(),), lambda t: {"score": lambda s, b, h, i, j: s * t}),
    "hidden-by-score": ((), lambda: {"score": lambda s, b, h, i, j: torch.where((i + j) % 2 == 0, s * s, -torch.inf)}),
}
DENSE = qkv(batch=2, nq=5, nk=6, hq=4, hk=2, d=3, dv=2, dtype=F64)


def attend(options):
    """Attention, (o, lse), of q, k, v and the tensors of a case."""
    return lambda q, k, v, *extras: tw.attention_with_lse(q, k, v, **options(*extras))


def wanting_grad(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("case", CASES)
def test_tangents_and_second_derivatives_agree_with_finite_differences(case):
    extras, options = CASES[case]
    inputs = wanting_grad(*DENSE, *extras)

    def finite(*tensors):  # an lse of -inf is a constant
        o, lse = attend(options)(*tensors)
        return o, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(finite, inputs, check_forward_ad=True, check_backward_ad=False, fast_mode=True)
    assert torch.autograd.gradgradcheck(finite, inputs, fast_mode=True, check_fwd_over_rev=True)


def plain(q, k, v, sink):
    """Causal attention with a sink in plain torch, ``(o, lse)``, for GQA."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    i, j = torch.arange(q.shape[1]).view(-1, 1), torch.arange(k.shape[1])
    s = s.masked_fill(j > i + k.shape[1] - q.shape[1], -torch.inf)
    lse = torch.cat([s, sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1).logsumexp(-1)
    return torch.einsum("bhij,bjhd->bihd", torch.exp(s - lse.unsqueeze(-1)), v), lse


def tilewise_causal(q, k, v, sink):
    return tw.attention_with_lse(q, k, v, causal=True, sink=sink)


TRANSFORMS = {
    "jvp": lambda f, x, t: torch.func.jvp(f, x, t),
    "grad": lambda f, x, t: every_gradient(f)(*x),
    "grad-of-jvp": lambda f, x, t: every_gradient(lambda *x: torch.func.jvp(f, x, t)[1])(*x),
    "grad-of-a-jvp's-tangents": lambda f, x, t: every_gradient(lambda *t: torch.func.jvp(f, x, t)[1])(*t),
    "jvp-of-grad": lambda f, x, t: torch.func.jvp(every_gradient(f), x, t),
    "grad-of-grad": lambda f, x, t: every_gradient(every_gradient(f))(*x),
}


def every_gradient(f):
    return torch.func.grad(lambda *x: sum((y**3).sum() for y in f(*x)), argnums=(0, 1, 2, 3))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_transforms_of_torch_func_agree_with_plain_torch(name):
    inputs = (*DENSE, leaf(4))
    tangents = tuple(normal(*x.shape, dtype=F64, seed=9 + n) for n, x in enumerate(inputs))
    got, expected = (TRANSFORMS[name](f, inputs, tangents) for f in (tilewise_causal, plain))
    torch.testing.assert_close(got, expected)


def test_packed_tangents_and_second_derivatives_agree_with_finite_differences():
    q, k, v = (x.flatten(0, 1)[:9] for x in DENSE)
    inputs = wanting_grad(q, k, v, leaf(4))

    def packed(q, k, v, slopes):
        return tw.attention_varlen(q, k, v, CU, causal=True, score=tw.alibi(slopes))

    assert torch.autograd.gradcheck(packed, inputs, check_forward_ad=True, check_backward_ad=False, fast_mode=True)
    assert torch.autograd.gradgradcheck(packed, inputs, fast_mode=True)


def test_dual_tensors_carry_gradients_of_primal_and_tangent():
    q, moved = wanting_grad(DENSE[0], normal(*DENSE[0].shape, dtype=F64, seed=7))
    _, k, v = DENSE
    with forward_ad.dual_level():
        o = tw.attention(forward_ad.make_dual(q, moved), k, v)
        assert torch.equal(forward_ad.unpack_dual(o).primal, tw.attention(q, k, v))
        loss = forward_ad.unpack_dual(o).tangent.square().sum()
    got = torch.autograd.grad(loss, (q, moved))

    def by_func(q, moved):
        return torch.func.jvp(lambda q: tw.attention(q, k, v), (q,), (moved,))[1].square().sum()

    torch.testing.assert_close(got, torch.func.grad(by_func, argnums=(0, 1))(q, moved))


@pytest.mark.parametrize("backend", [None, "portable"])
def test_a_tangent_of_another_dtype_is_that_of_its_tensor(backend):
    x, dx = normal(2, 9, 4, 8), normal(2, 9, 4, 8, seed=3).bfloat16()
    f = lambda x: tw.attention(x, x, x, causal=True, backend=backend)  # noqa: E731
    grad = torch.func.grad(lambda x: (f(x) ** 2).sum())
    for function in (f, grad):
        expected = torch.func.jvp(function, (x,), (dx.float(),))[1]
        for dtype in (torch.bfloat16, torch.float64):
            assert torch.equal(torch.func.jvp(function, (x,), (dx.to(dtype),))[1], expected)


def test_a_dual_gradient_of_the_output_moves_the_gradients_of_the_inputs():
    q, k, v = wanting_grad(*DENSE)
    o, lse = tw.attention_with_lse(q, k, v)
    do, moved = (normal(*o.shape, dtype=F64, seed=n) for n in (7, 8))
    expected = torch.autograd.grad(o, (q, k, v), moved, retain_graph=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(do, moved)
        by_autograd = torch.autograd.grad(o, (q, k, v), dual)
        by_call = tw.attention_backward(dual, *(x.detach() for x in (q, k, v, o, lse)))
        for found in (by_autograd, by_call):
            torch.testing.assert_close([forward_ad.unpack_dual(x).tangent for x in found], [*expected])


def test_a_third_derivative_is_refused():
    q, k, v = wanting_grad(*DENSE)
    (dq,) = torch.autograd.grad(tw.attention(q, k, v).square().sum(), q, create_graph=True)
    (ddq,) = torch.autograd.grad(dq.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="a third derivative of attention is not built"):
        ddq.sum().backward()

    def moved(q):
        return torch.func.jvp(lambda q: tw.attention(q, *DENSE[1:]), (q,), (q,))[1]

    with pytest.raises(NotImplementedError, match="forward mode inside forward mode"):
        torch.func.jvp(moved, (DENSE[0],), (DENSE[0],))


def test_a_backend_without_tangents_refuses_them_by_name_and_explain_says_who_runs_them():
    q, k, v = qkv()
    with pytest.raises(
        NotImplementedError, match=r'backend="reference" cannot run forward mode of this(.|\n)*(cpu|portable) runs it'
    ):
        torch.func.jvp(lambda q: tw.attention(q, k, v, backend="reference"), (q,), (q,))
    said = tw.explain(q, k, v)
    assert said.tangents in (said.chosen, "portable")
    assert said.second == "portable"
    assert "second    portable, not cpu: second derivatives are not built" in str(said) or said.chosen == "portable"


def test_hidden_keys_that_hold_nan_never_touch_a_tangent():
    q, k, v = wanting_grad(*DENSE)
    mask = tw.key_lengths(torch.tensor([4, 5]))
    hidden = torch.arange(6).view(1, 6, 1, 1) >= torch.tensor([4, 5]).view(2, 1, 1, 1)
    moved = tuple(normal(*x.shape, dtype=F64, seed=9 + n) for n, x in enumerate(DENSE))
    dirty = [x.detach().masked_fill(hidden, torch.nan) for x in (k, v, *moved[1:])]

    def found(k, v, dk, dv):
        return torch.func.jvp(every_gradient_of_three(mask), (q.detach(), k, v), (moved[0], dk, dv))

    for got, expected in zip(found(*dirty), found(k.detach(), v.detach(), *moved[1:]), strict=True):
        torch.testing.assert_close(got, expected)


def every_gradient_of_three(mask):
    return torch.func.grad(lambda q, k, v: tw.attention(q, k, v, mask=mask).square().sum(), argnums=(0, 1, 2))


def test_a_jvp_inside_a_compiled_function_is_the_one_outside():
    q, k, v = qkv(nq=8, nk=8)

    def moved(q, k, v):
        return torch.func.jvp(lambda q: tw.attention(q, k, v, causal=True), (q,), (q,))[1]

    torch.testing.assert_close(torch.compile(moved, backend="aot_eager")(q, k, v), moved(q, k, v))
