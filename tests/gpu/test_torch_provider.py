"""PyTorch's operators of flash attention on a GPU, while tilewise provides them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.varlen import varlen_attn

import tilewise as tw
import tilewise.compat.torch_provider

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
B, H, N, D = 2, 4, 300, 64
CU = [0, 120, 120, 300]


@pytest.fixture(autouse=True)
def provided():
    activate_flash_attention_impl("tilewise")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield
    restore_flash_attention_impl()


def tensors(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def with_gradients(o: torch.Tensor, wanted: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    weights = torch.linspace(-1, 1, o.numel(), device=o.device).view(o.shape).to(o.dtype)
    return o, *torch.autograd.grad(o, wanted, weights)


def dense(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def packed(q, k, v):
    cu = torch.tensor(CU, device="cuda", dtype=torch.int32)
    return varlen_attn(q, k, v, cu, cu, 180, 180, window_size=(50, 0))


CALLS = {
    "dense": (
        dense,
        (B, H, N, D),
        lambda *x: tw.attention(*[t.transpose(1, 2) for t in x], causal=True).transpose(1, 2),
    ),
    "packed": (
        packed,
        (N, H, D),
        lambda *x: tw.attention_varlen(*x, torch.tensor(CU, device="cuda"), mask=tw.window(50, 0)),
    ),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "inductor"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_arrive_with_their_gradients(name, compiled):
    torch._dynamo.reset()
    run, shape, ours = CALLS[name]
    x = tensors(*shape)
    found = with_gradients((torch.compile(run, fullgraph=True) if compiled else run)(*x), x)
    for got, expected in zip(found, with_gradients(ours(*x), x), strict=True):
        torch.testing.assert_close(got, expected)


def test_dropout_is_that_of_the_seed_in_rng_state():
    x = tensors(B, H, N, D)
    o, *_, rng_state, _, _ = torch.ops.aten._scaled_dot_product_flash_attention(*x, 0.3, True)
    seed = rng_state.view(torch.int64)[:1]
    swapped = [t.transpose(1, 2) for t in x]
    expected = tw.attention(*swapped, causal=True, dropout_p=0.3, dropout_seed=seed).transpose(1, 2)
    for got, y in zip(with_gradients(o, x), with_gradients(expected, x), strict=True):
        torch.testing.assert_close(got, y)
