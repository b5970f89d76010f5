"""Scores and masks with 0-dim tensors and symbolic lengths inside torch.compile: each operator from either side."""

import pytest
import torch

import tilewise as tw

T, N = torch.tensor(2.0), torch.tensor(2)
SCORES = {
    "s / t": lambda s, b, h, i, j: s / T,
    "s - t": lambda s, b, h, i, j: s - T,
    "s + t": lambda s, b, h, i, j: s + T,
    "s * t": lambda s, b, h, i, j: s * T,
    "s ** t": lambda s, b, h, i, j: s**T,
    "s // t": lambda s, b, h, i, j: s // T,
    "s % t": lambda s, b, h, i, j: s % T,
    "t / s": lambda s, b, h, i, j: T / (s + 9),
    "t - s": lambda s, b, h, i, j: T - s,
    "t ** i": lambda s, b, h, i, j: s + T**i,
    "t // i": lambda s, b, h, i, j: s + N // (i + 1),
    "t % i": lambda s, b, h, i, j: s + N % (i + 1),
    "i >> t": lambda s, b, h, i, j: s + (i >> N),
    "i << t": lambda s, b, h, i, j: s + (i << N),
    "t >> i": lambda s, b, h, i, j: s + (N >> i),
    "t << i": lambda s, b, h, i, j: s + (N << i),
    "t & i": lambda s, b, h, i, j: s + (N & i),
    "i | t": lambda s, b, h, i, j: s + (i | N),
    "i ^ t": lambda s, b, h, i, j: s + (i ^ N),
    "t < i": lambda s, b, h, i, j: torch.where(N < i, s, 0.0),
    "i == t": lambda s, b, h, i, j: torch.where(i == N, s, 0.0),
    "s.sub(t)": lambda s, b, h, i, j: s.sub(T) + torch.sub(s, T) + torch.rsub(s, T) + torch.div(T, s + 9),
}


@pytest.mark.parametrize("name", SCORES)
def test_an_operator_with_a_0_dim_tensor_is_compiled(name):
    q = torch.randn(1, 6, 2, 8, generator=torch.Generator().manual_seed(1))
    torch.compiler.reset()
    compiled = torch.compile(lambda q: tw.attention(q, q, q, score=SCORES[name]), fullgraph=True, backend="eager")
    assert torch.equal(compiled(q), tw.attention(q, q, q, score=SCORES[name]))


def test_a_power_of_a_symbolic_length_is_compiled():
    def scaled(q):
        length = q.shape[1]
        return tw.attention(q, q, q, score=lambda s, b, h, i, j: s * length**0.5)

    torch.compiler.reset()
    compiled = torch.compile(scaled, fullgraph=True, backend="eager", dynamic=True)
    for n in (6, 5, 4):
        q = torch.randn(1, n, 2, 8, generator=torch.Generator().manual_seed(n))
        torch.testing.assert_close(compiled(q), scaled(q))
