"""Gradients of selected keys at the shapes of sparse training, beside gathers in float64.

Reported of another library's backward: dq of 6.8e11 in place of 15, with no direction in common, and NaN from rows without keys, from -1
and from sinks that take whole rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

import tilewise as tw
from bench.testing import normal
from tilewise import accuracy

BACKENDS = ["portable", "cpu"]
NQ, NK = 24, 320
UNSEEN = slice(192, 256)  # keys that nobody is given
COSINE = 0.9999  # the report's, of a backward that is right


@dataclass(frozen=True)
class Case:
    """``dims``: of k and of v; v is a part of k where they differ. ``count`` entries of a row; ``sink``: whether each head has one."""

    heads: tuple[int, int]
    dims: tuple[int, int]
    count: int
    block: int = 1
    sink: bool = False
    dtype: torch.dtype = torch.bfloat16

    def indices(self) -> Tensor:
        """int64 ``(1, heads_k, NQ, count)``: -1 anywhere and in whole rows, duplicates, and keys that a causal mask hides."""
        shape, generator = (1, self.heads[1], NQ, self.count), torch.Generator().manual_seed(0)
        found = torch.randint(-1, NK // self.block, shape, generator=generator)
        found[(found * self.block >= UNSEEN.start) & (found * self.block < UNSEEN.stop)] = -1
        found[..., 1] = found[..., 0]
        found[:, :, 3] = -1
        found[:, :, 4] = NK // self.block - 1  # a causal mask shows some keys of a block, and none of a token
        return found

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        (heads_q, heads_k), (d, dv) = self.heads, self.dims
        found = {"q": normal(1, NQ, heads_q, d), "k": normal(1, NK, heads_k, d, seed=1)}
        if d == dv:
            found["v"] = normal(1, NK, heads_k, dv, seed=2)
        for x in ("k", "v"):
            if x in found:
                found[x][:, UNSEEN] = torch.nan
        if self.sink:
            found["sink"] = normal(heads_q, seed=3)
            found["sink"][:2] = torch.tensor([60.0, -60.0])
        return {name: x.to(self.dtype).to(dtype).requires_grad_() for name, x in found.items()}


CASES = {
    "latent-64": Case((64, 1), (576, 512), 64),
    "latent-128": Case((128, 1), (576, 512), 96),
    "latent-128-sink": Case((128, 1), (576, 512), 33, sink=True),
    "latent-float32": Case((32, 1), (576, 512), 64, sink=True, dtype=torch.float32),
    "mqa-128": Case((128, 1), (128, 128), 64, sink=True),
    "nsa-blocks": Case((64, 4), (128, 128), 3, block=64),
    "float16": Case((16, 2), (128, 128), 40, sink=True, dtype=torch.float16),
}


def product(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """The sums of 16 bits in fp32, rounded once: as libraries have them, and faster than PyTorch's on many a CPU."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return torch.einsum(equation, a.to(wide), b.to(wide)).to(a.dtype)


def gathers(c: Case, x: dict[str, Tensor], order: int = 0) -> Tensor:
    """o, from the keys of each query alone; ``order``: of the sums over them."""
    heads_k, group = c.heads[1], c.heads[0] // c.heads[1]
    parts = []
    for h in range(heads_k):
        entries = c.indices()[0, h].roll(order, -1)
        again = (entries.unsqueeze(-1) == entries.unsqueeze(-2)).tril(-1).any(-1)
        entries = entries.masked_fill(again, -1).unsqueeze(-1)
        key = torch.where(entries < 0, NK, entries * c.block + torch.arange(c.block)).flatten(1)
        hidden = key > torch.arange(NQ).view(-1, 1) + NK - NQ
        k, v = (
            torch.where(hidden.unsqueeze(-1), 0, t[0, :, h][key.clamp(max=NK - 1)])
            for t in (x["k"], x.get("v", x["k"][..., : c.dims[1]]))
        )
        heads = slice(h * group, (h + 1) * group)
        s = product("nhd,ncd->nhc", x["q"][0, :, heads], k) * c.dims[0] ** -0.5
        s = s.masked_fill(hidden.unsqueeze(1), -torch.inf)
        if c.sink:
            p = torch.cat([s, x["sink"][heads].view(1, -1, 1).expand(NQ, -1, -1)], -1).softmax(-1)[..., :-1]
        else:
            empty = hidden.all(-1).view(-1, 1, 1)
            p = s.masked_fill(empty, 0).softmax(-1) * ~empty
        parts.append(product("nhc,ncd->nhd", p, v))
    return torch.cat(parts, 1).unsqueeze(0)


def with_gradients(c: Case, x: dict[str, Tensor], o: Tensor) -> dict[str, Tensor]:
    do = normal(1, NQ, c.heads[0], c.dims[1], seed=4).to(c.dtype).to(o.dtype)
    grads = torch.autograd.grad(o, list(x.values()), do)
    return {"o": o.detach(), **{f"d{name}": g for name, g in zip(x, grads, strict=True)}}


@cache
def expected(name: str) -> tuple[dict[str, Tensor], dict[str, accuracy.Scale]]:
    """The results of gathers in float64, and the measure of each by those in the case's own dtype in some orders."""
    c = CASES[name]

    def run(dtype: torch.dtype, order: int = 0) -> dict[str, Tensor]:
        x = c.tensors(dtype)
        return with_gradients(c, x, gathers(c, x, order))

    oracle, eager = run(torch.float64), [run(c.dtype, order) for order in range(accuracy.ORDERS)]
    return oracle, {tensor: accuracy.Scale.of(x, [e[tensor] for e in eager]) for tensor, x in oracle.items()}


def found(c: Case, backend: str, **options: object) -> dict[str, Tensor]:
    x = c.tensors(c.dtype)
    if c.sink:
        x["sink"] = x["sink"].detach().float().requires_grad_()
    mask = tw.causal() & tw.selected(c.indices(), c.block)
    v = x.get("v", x["k"][..., : c.dims[1]])
    o = tw.attention(x["q"], x["k"], v, mask=mask, sink=x.get("sink"), backend=backend, **options)
    return with_gradients(c, x, o)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_direction_and_the_elements_of_gathers(name, backend):
    got, (oracle, scales) = found(CASES[name], backend), expected(name)
    for tensor, x in got.items():
        assert torch.cosine_similarity(x.double().flatten(), oracle[tensor].flatten(), dim=0) > COSINE
        error = accuracy.judge_by(tensor, x, oracle[tensor], scales[tensor])
        assert error.ok, error


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_rows_without_keys_and_keys_that_nobody_was_given_have_gradients_of_zero(name, backend):
    c = CASES[name]
    got = found(c, backend, deterministic=True)
    rows = [3, 4] if c.block == 1 else [3]
    assert (got["o"][:, rows] == 0).all()
    assert (got["dq"][:, rows] == 0).all()
    for tensor in ("dk", "dv"):
        assert (got.get(tensor, got["dk"])[:, UNSEEN] == 0).all()
