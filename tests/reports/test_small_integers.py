"""Whole numbers of 8 and 16 bits in FlexAttention's mods wrap around, as in its create_mask; in tw.keep they do not."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.nn.attention.flex_attention import flex_attention as torchs

import tilewise as tw
from tilewise.compat import flex_attention as flex

N = 24
G = torch.Generator().manual_seed(2)
TENSORS = {
    torch.uint8: torch.randint(0, 256, (N,), generator=G, dtype=torch.uint8),
    torch.int8: torch.randint(-128, 128, (N,), generator=G).to(torch.int8),
    torch.int16: torch.randint(-32768, 32768, (N,), generator=G).to(torch.int16),
}
OTHER = torch.randint(-128, 128, (N,), generator=G).to(torch.int8)
SCALAR = torch.tensor(100, dtype=torch.int8)
MODS = {
    "difference": lambda u: lambda b, h, i, j: u[i] - u[j] <= 1,
    "complement": lambda u: lambda b, h, i, j: ~u[i] > 240,
    "negative": lambda u: lambda b, h, i, j: -u[i] < u[j],
    "sum and product": lambda u: lambda b, h, i, j: u[i] * 3 + u[j] > 20,
    "square": lambda u: lambda b, h, i, j: u[i] * u[i] >= u[j] ** 2,
    "shifts": lambda u: lambda b, h, i, j: (u[i] << 2) > (u[j] >> 1),
    "quotient": lambda u: lambda b, h, i, j: (u[i] + 90) // 7 > u[j] % 11,
    "abs": lambda u: lambda b, h, i, j: (u[i] - u[j]).abs() < 40,
    "number beyond the range": lambda u: lambda b, h, i, j: (u[i] < 300) | (u[j] == -1),
    "where": lambda u: lambda b, h, i, j: torch.where(i > j, u[i] + 100, u[j]) > 90,
    "made wide first": lambda u: lambda b, h, i, j: u[i].int() - u[j] <= 1,
    "beside an index": lambda u: lambda b, h, i, j: u[i] - j <= 1,
    "two dtypes": lambda u: lambda b, h, i, j: u[i] + OTHER[j] > 110,
    "tensor of no dimensions": lambda u: lambda b, h, i, j: u[i] + SCALAR > SCALAR - u[j],
    "truth value": lambda u: lambda b, h, i, j: u[i] + (i > j) > u[j],
    "bits": lambda u: lambda b, h, i, j: (u[i] ^ u[j]) & 12 > 3,
    "maximum": lambda u: lambda b, h, i, j: torch.maximum(u[i], u[j]) + 120 < 60,
    "quotient in floats": lambda u: lambda b, h, i, j: (u[i] - u[j]) / 2 > 20,
}  # fmt: skip


@pytest.mark.parametrize("dtype", TENSORS, ids=str)
@pytest.mark.parametrize("name", MODS)
def test_a_mask_mod_keeps_the_pairs_of_create_mask(name, dtype):
    mod = MODS[name](TENSORS[dtype])
    expected = create_mask(mod, 1, 1, N, N, device="cpu")[0, 0]
    shown = "\n".join(" ".join("1" if x else "." for x in row) for row in expected.tolist())
    assert tw.show_mask(flex.create_block_mask(mod, None, None, N, N), N, N) == shown
    q = torch.randn(1, 1, N, 8, generator=torch.Generator().manual_seed(3))
    o = flex.flex_attention(q, q, q, block_mask=create_block_mask(mod, None, None, N, N, device="cpu", BLOCK_SIZE=8))
    p = (q @ q.mT / 8**0.5).masked_fill(~expected, -torch.inf).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(o, p @ q)


@pytest.mark.parametrize("dtype", TENSORS, ids=str)
def test_a_score_mod_wraps_as_torchs_does(dtype):
    u = TENSORS[dtype]
    q = torch.randn(1, 1, N, 16, generator=torch.Generator().manual_seed(3))
    mod = lambda s, b, h, i, j: s + (u[i] - u[j] * 3) * 0.01  # noqa: E731
    torch.testing.assert_close(flex.flex_attention(q, q, q, mod), torchs(q, q, q, mod), rtol=1e-4, atol=1e-5)


def test_keep_computes_whole_numbers_as_such():
    u = TENSORS[torch.uint8]
    kept = u.long()[:, None] - u.long()[None, :] <= 1
    shown = "\n".join(" ".join("1" if x else "." for x in row) for row in kept.tolist())
    assert tw.show_mask(tw.keep(lambda b, h, i, j: u[i] - u[j] <= 1), N, N) == shown


def test_what_reads_no_small_integers_is_the_same_mask():
    ids = torch.arange(N) // 5
    mod = lambda b, h, i, j: ids[i] - ids[j] <= 1  # noqa: E731
    assert flex.create_block_mask(mod, None, None, N, N).text == tw.keep(mod).text
