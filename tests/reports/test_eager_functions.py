"""A score or mask function is worth what eager PyTorch makes of it on tensors, gradients included, on every backend.

The oracle calls the user's function on index tensors in float64 and lets autograd differentiate it: it shares nothing with the tracer.
"""

import math
from types import SimpleNamespace

import pytest
import torch

import tilewise as tw
from tilewise.backends.triton import interpreting

B, N_Q, N_K, H, D = 1, 9, 70, 2, 16
G = torch.Generator().manual_seed(4)


def _leaves() -> SimpleNamespace:
    draw = lambda *shape: torch.randn(shape, generator=G)  # noqa: E731
    return SimpleNamespace(
        h=draw(H), j=draw(N_K), zero=torch.zeros(H), nan=torch.tensor([math.nan, 1.0]),
        words=torch.randint(-(2**63), 2**63 - 1, (N_K, 2), generator=G),
        counts=torch.tensor([-1, 0, 1, 5, 62, 63, 64, 99]), flags=torch.rand(N_K, generator=G) < 0.5,
        far=torch.tensor([3.0, math.inf]), powers=torch.tensor([3, 31, 32, 33, 47]),
    )  # fmt: skip


T = _leaves()
W = torch.where
softplus, logsigmoid = torch.nn.functional.softplus, torch.nn.functional.logsigmoid
SCORES = {
    "bits of 64": lambda t, s, b, h, i, j: W(((t.words[i, j // 64] >> (j % 64)) & 1) == 1, s, 0.5 * s),
    "bit 63": lambda t, s, b, h, i, j: s + ((t.words[j, 0] >> 63) & 1),
    "right shifts by any number": lambda t, s, b, h, i, j: s + ((t.words[j, 0] >> t.counts[j % 8]) & 3),
    "left shifts by any number": lambda t, s, b, h, i, j: s + ((t.words[j, 0] << t.counts[j % 8]) > 0),
    "powers of negative exponents": lambda t, s, b, h, i, j: s + (2 ** (i - j) + (-1) ** (i - j)) * 0.3,
    "powers of 64 bits": lambda t, s, b, h, i, j: s + (3 ** t.counts[j % 6] + t.counts[j % 6] ** t.powers[j % 5]) % 7,
    "truth values in a sum of products": lambda t, s, b, h, i, j: s * (i > 3) + s * (i > 6),
    "flags in a sum of products": lambda t, s, b, h, i, j: s * t.flags[i] + s * t.flags[j],
    "one read times truth values": lambda t, s, b, h, i, j: s + (lambda x: x * (i > 3) + x * (i > 6))(t.h[h]),
    "a power by a truth value": lambda t, s, b, h, i, j: s + (t.h[h].abs() + 1) ** ((i > 3) + 0),
    "infinite slopes behind relu": lambda t, s, b, h, i, j: torch.relu(s).sqrt() + torch.maximum(s, s.new_zeros(())).sqrt(),
    "infinite slopes behind clamp": lambda t, s, b, h, i, j: W(j > 3, s * s + 1, 0.0).clamp(0, 2).sqrt(),
    "infinite slopes behind where": lambda t, s, b, h, i, j: s + W(j > i, t.j[j].abs(), 0.0) ** 0.5,
    "softplus at 0": lambda t, s, b, h, i, j: s + softplus(t.zero[h]) * (j % 3),
    "logsigmoid at 0": lambda t, s, b, h, i, j: s + logsigmoid(t.zero[h]) * (j % 3),
    "fmax at a tie": lambda t, s, b, h, i, j: s + torch.fmax(t.zero[h], 2 * t.zero[h]) * (j % 3),
    "fmin at a tie": lambda t, s, b, h, i, j: s + torch.fmin(t.zero[h], 2 * t.zero[h]) * (j % 3),
    "fmax of a NaN": lambda t, s, b, h, i, j: torch.fmax(s, t.nan[h]) + torch.fmin(t.nan[h], s),
    "an index of the score": lambda t, s, b, h, i, j: s + t.j[(s * 2).int().clamp(0, 9)],
    "made narrow": lambda t, s, b, h, i, j: s + 0.01 * (i - j).to(torch.uint8) + 0.01 * ((i - j) * 9).to(torch.int8),
    "a rest of infinity": lambda t, s, b, h, i, j: s + (W(j > i, s, -s) % t.far[h]).clamp(max=4.0),
}  # fmt: skip
MASKS = {
    "bits of 64": lambda t, b, h, i, j: ((t.words[i, j // 64] >> (j % 64)) & 1) == 1,
    "powers of negative exponents": lambda t, b, h, i, j: (2 ** (j % 8 - i) == 0) | (i == j),
}
INTERPRETED = pytest.mark.skipif(not interpreting(), reason="kernels are not interpreted (tests/conftest.py)")
BACKENDS = ("cpu", "portable", "reference", pytest.param("triton", marks=INTERPRETED))


def in_eager(score, mask, q, k, v, do) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """``o`` and the gradients of q, k, v, and of the leaves h, j and zero, in float64."""
    t = SimpleNamespace(**{n: x.double() if x.is_floating_point() else x for n, x in vars(T).items()})
    wanted = [x.double().requires_grad_() for x in (q, k, v, T.h, T.j, T.zero)]
    q, k, v, t.h, t.j, t.zero = wanted
    at = [torch.arange(n).view([n if a == axis else 1 for a in range(4)]) for axis, n in enumerate((B, H, N_Q, N_K))]
    s = torch.einsum("bihd,bjhd->bhij", q, k) / D**0.5
    s = s if score is None else score(t, s, *at)
    s = s if mask is None else s.masked_fill(~mask(t, *at), -math.inf)
    o = torch.einsum("bhij,bjhd->bihd", torch.softmax(s, -1), v)
    return o, torch.autograd.grad(o, wanted, do.double(), allow_unused=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "name"), [*(("score", n) for n in SCORES), *(("mask", n) for n in MASKS)])
def test_a_function_is_worth_what_eager_pytorch_makes_of_it(kind, name, backend):
    g = torch.Generator().manual_seed(5)
    q, k, v, do = (torch.randn(B, n, H, D, generator=g) for n in (N_Q, N_K, N_K, N_Q))
    score, mask = (SCORES[name], None) if kind == "score" else (None, MASKS[name])
    expected, gradients = in_eager(score, mask, q, k, v, do)
    wanted = [x.clone().requires_grad_() for x in (q, k, v, T.h, T.j, T.zero)]
    t = SimpleNamespace(**vars(T))
    q, k, v, t.h, t.j, t.zero = wanted
    of_score = None if score is None else lambda *at: score(t, *at)
    of_mask = None if mask is None else lambda *at: mask(t, *at)
    o = tw.attention(q, k, v, score=of_score, mask=of_mask, backend=backend)
    torch.testing.assert_close(o, expected.float())
    for got, grad in zip(torch.autograd.grad(o, wanted, do, allow_unused=True), gradients, strict=True):
        assert (got is None) == (grad is None)
        if grad is not None:
            torch.testing.assert_close(got, grad.float())
