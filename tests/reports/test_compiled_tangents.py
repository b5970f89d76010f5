"""Dual tensors in compiled functions: PyTorch enters and leaves a dual level there without its own count of levels."""

import pytest
import torch
from torch.autograd import forward_ad

import tilewise as tw

G = torch.Generator().manual_seed(3)
Q, K, V, BIAS, *MOVED = (
    torch.randn(shape, generator=G, dtype=torch.float64) for shape in [*[(2, 6, 2, 4)] * 3, (2, 6, 6)] * 2
)


def attend(q, k, v, bias):
    return tw.attention_with_lse(q, k, v, causal=True, score=tw.bias(bias))


def expected(q, k, v, bias):
    s = torch.einsum("bihd,bjhd->bhij", q, k) / 2 + bias
    p = torch.exp(s) * torch.ones(6, 6).tril()
    return torch.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdim=True), v), p.sum(-1).log()


def along(call):
    """The tangents of a call, along those of its arguments, with a dual level of its own."""

    def run(tensors, tangents):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, d) for x, d in zip(tensors, tangents, strict=True)]
            return [forward_ad.unpack_dual(x).tangent for x in call(*duals)]

    return run


WANTED = along(expected)((Q, K, V, BIAS), MOVED)
every_backend = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def anew():
    torch.compiler.reset()


@every_backend
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_dual_level_inside_has_tangents(backend, fullgraph):
    run = torch.compile(along(attend), backend=backend, fullgraph=fullgraph)
    torch.testing.assert_close(run((Q, K, V, BIAS), MOVED), WANTED)


@every_backend
def test_duals_of_a_level_outside_have_tangents(backend):
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(Q, K, V, BIAS), expected(Q, K, V, BIAS))
    torch.testing.assert_close(along(compiled)((Q, K, V, BIAS), MOVED), WANTED)
    torch.testing.assert_close(compiled(Q, K, V, BIAS), expected(Q, K, V, BIAS))


@every_backend
def test_the_tangents_of_a_level_inside_have_gradients(backend):
    def gradients(run):
        wanting = [x.clone().requires_grad_() for x in (Q, K, V, BIAS)]
        o, lse = run(wanting, MOVED)
        return torch.autograd.grad(o.square().sum() + lse.sum(), wanting)

    compiled = torch.compile(along(attend), backend=backend)
    torch.testing.assert_close(gradients(compiled), gradients(along(expected)))
