"""Blocks of xformers that share keys: a block causal mask, of which the original's BlockDiagonalGappyKeysMask has no backward."""

import pytest
import torch

from tilewise.compat.xformers import attn_bias, memory_efficient_attention


def test_blocks_that_begin_at_one_key_have_outputs_and_gradients():
    q, k, v = (torch.randn(1, 6, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = attn_bias.BlockDiagonalGappyKeysMask.from_seqlens([2, 2, 2], [0, 0, 0, 6], [2, 4, 6])
    kept = torch.arange(6).view(-1, 1) // 2 >= torch.arange(6) // 2
    assert torch.equal(bias.materialize((6, 6)).isfinite(), kept)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
    expected = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~kept, -torch.inf).softmax(-1), v)
    o = memory_efficient_attention(q, k, v, bias)
    torch.testing.assert_close(o, expected)
    do = torch.randn_like(o)
    for got, right in zip(*(torch.autograd.grad(x, (q, k, v), do) for x in (o, expected)), strict=True):
        torch.testing.assert_close(got, right)


def test_keys_beyond_the_last_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        attn_bias.BlockDiagonalGappyKeysMask.from_seqlens([2, 2], [0, 4, 6], [2, 3])
