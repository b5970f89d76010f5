"""Warnings that users met where nothing is wrong."""

import warnings

import torch

import tilewise as tw


def test_compiled_autograd_of_an_eager_call_is_quiet():
    """Dynamo: "detected a call to a `functools.lru_cache`-wrapped function … Silent incorrectness is a potential risk"."""
    torch._dynamo.reset()
    q, t = torch.randn(1, 20, 2, 8, requires_grad=True), torch.randn(2, 20, 20, requires_grad=True)
    o = tw.attention(q, q, q, score=tw.bias(t)).square().sum()
    expected = torch.autograd.grad(o, (q, t), retain_graph=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo detected a call")
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            o.backward()
    for got, right in zip((q.grad, t.grad), expected, strict=True):
        torch.testing.assert_close(got, right)
