"""Graphs that were traced where nothing wanted a gradient, and are trained through later: frozen models under adapters or prompts."""

import io
import warnings

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tilewise as tw


class Layer(torch.nn.Module):
    """A residual, whose own gradient hides that attention's is missing, and a frozen bias."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(2, 20, 20), requires_grad=False)
        self.sink = torch.nn.Parameter(torch.randn(2), requires_grad=False)

    def forward(self, q):
        return q + tw.attention(q, q, q, causal=True, score=tw.bias(self.bias), sink=self.sink)


def scripted(layer, q):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = io.BytesIO()
        torch.jit.save(torch.jit.trace(layer, q), saved)
    saved.seek(0)
    return torch.jit.load(saved)


def exported(layer, q):
    return torch.export.export(layer, (q,)).module()


def traced(layer, q):
    return make_fx(layer)(q)


@pytest.mark.parametrize("freeze", [scripted, exported, traced])
@pytest.mark.parametrize("grad", [True, False], ids=["frozen", "no_grad"])
def test_what_wants_a_gradient_later_gets_it(freeze, grad):
    layer, q = Layer(), torch.randn(1, 20, 2, 8)
    with torch.set_grad_enabled(grad):
        graph = freeze(layer, q)
    x, y = (q.clone().requires_grad_() for _ in range(2))
    torch.testing.assert_close(*[torch.autograd.grad(f(z).square().sum(), z)[0] for f, z in ((graph, x), (layer, y))])
    if freeze is traced:
        return  # which holds the bias and the sink as constants
    for module in (graph, layer):
        for p in module.parameters():
            p.requires_grad_()
    torch.testing.assert_close(*[torch.autograd.grad(f(q).square().sum(), (f.bias, f.sink)) for f in (graph, layer)])
