"""On a GPU: gradients mapped over examples, whose backward PyTorch's own thread runs; and more heads than a grid has blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

import tilewise as tw
from bench.testing import normal
from tests.gpu.test_gpu import BACKENDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def tensors(backend: str, n: int, head_dim: int) -> list[Tensor]:
    """q, k and v of two heads, in the dtype of a backend's kernels."""
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    return [normal(2, n, 2, head_dim, seed=s).to("cuda", dtype) for s in (1, 2, 3)]


def exact(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Causal attention in float64, of tensors of any dtype."""
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / q.shape[-1] ** 0.5
    s = s if bias is None else s + bias.double()
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
    return torch.einsum("bhij,bjhd->bihd", s.masked_fill(hidden, -torch.inf).softmax(-1), v.double())


def assert_near(found: Tensor, expected: Tensor) -> None:
    allowed = 2e-2 if found.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=allowed, atol=allowed * float(expected.detach().abs().max())
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_batched_gradients_are_those_of_each(backend):
    q, k, v = (x.requires_grad_() for x in tensors(backend, 70, 64))
    gradients = normal(3, 2, 70, 2, 64, seed=4).to(q)
    o = tw.attention(q, k, v, causal=True, backend=backend)
    found = torch.autograd.grad(o, (q, k, v), gradients, is_grads_batched=True)
    o = exact(q, k, v)
    each = [torch.autograd.grad(o, (q, k, v), do.double(), retain_graph=True) for do in gradients]
    for x, expected in zip(found, map(torch.stack, zip(*each, strict=True)), strict=True):
        assert_near(x, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_jacobians_by_reverse_mode(backend):
    q, k, v = tensors(backend, 3, 16)
    found = jacrev(lambda q: tw.attention(q, k, v, causal=True, backend=backend))(q)
    assert_near(found, jacrev(lambda q: exact(q, k, v))(q))


@pytest.mark.parametrize("backend", [x for x in BACKENDS if x != "hopper"])  # which has no kernel of mapped slopes
def test_slopes_of_each_example_beside_a_mask_that_reads_the_batch_element(backend):
    q, k, v = tensors(backend, 70, 64)
    slopes, lengths = normal(3, 2, seed=5).cuda(), torch.tensor([9, 60], device="cuda")
    mask = tw.causal() & tw.keep(lambda b, h, i, j: (j < lengths[b]) | (i == j))
    f = lambda q, a: tw.attention(q, k, v, mask=mask, score=tw.alibi(a), backend=backend)  # noqa: E731
    found = vmap(grad(lambda q, a: f(q, a).float().square().sum()), (None, 0))(q, slopes)
    i, j = torch.arange(70, device="cuda").view(-1, 1), torch.arange(70, device="cuda")
    hidden = ~((j < lengths.view(2, 1, 1, 1)) | (i == j))
    bias = [torch.where(hidden, -torch.inf, a.double().view(1, 2, 1, 1) * (j - i)) for a in slopes]
    expected = [grad(lambda q, x=x: exact(q, k, v, x).square().sum())(q) for x in bias]
    assert_near(found, torch.stack(expected))


def test_more_heads_than_a_grid_has_blocks():
    q, k, v = (
        normal(2, 5, heads, 64, seed=heads).to("cuda", torch.bfloat16).requires_grad_() for heads in (66_000, 1, 1)
    )
    o = tw.attention(q, k, v, causal=True)
    wide = exact(q, *(x.expand(-1, -1, 66_000, -1) for x in (k, v)))
    assert_near(o, wide)
    do = normal(2, 5, 66_000, 64, seed=7).to(o)
    for x, expected in zip(
        torch.autograd.grad(o, (q, k, v), do), torch.autograd.grad(wide, (q, k, v), do.double()), strict=True
    ):
        assert_near(x, expected)
