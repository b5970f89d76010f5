"""The gradients of latent attention over selected keys: the kernels' source on the emulated machine."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from bench.testing import Call, call, normal
from tests.backends.hopper.emulated_gradients import EmulatedGradients
from tilewise import accuracy
from tilewise.backends.base import Output
from tilewise.backends.hopper.host import masks
from tilewise.backends.triton.host.listed import ListedCall


def latent_call(queries, keys, heads, entries, block=1, batch=1, dtype=torch.bfloat16, mask=None, **options) -> Call:
    """A call with drawn entries, some of which stand twice or name no key, and NaN in keys that no query sees."""
    generator = torch.Generator().manual_seed(7)
    indices = torch.randint(-1, -(-keys // block), (batch, 1, queries, entries), generator=generator)
    q, k = (normal(batch, n, h, 576, dtype=dtype, seed=n) for n, h in ((queries, heads), (keys, 1)))
    selected = tw.selected(indices, block)
    c = call(q, k, k[..., :512], mask=selected if mask is None else mask & selected, **options)
    c.t.k.masked_fill_(~masks.seen(c.p, c.t.leaves, c.p.group).mT.unsqueeze(-1), torch.nan)
    return c


def packed_call() -> Call:
    """Three sequences, one of them empty, and a row behind the last."""
    generator = torch.Generator().manual_seed(7)
    q, k = normal(6, 20, 576, dtype=torch.bfloat16), normal(130, 1, 576, dtype=torch.bfloat16, seed=2)
    mask = tw.causal() & tw.selected(torch.randint(-1, 100, (1, 1, 4, 80), generator=generator))
    return call(
        q, k, k[..., :512], mask=mask, cu_seqlens_q=torch.tensor([0, 1, 1, 5]), cu_seqlens_k=torch.tensor([0, 30, 30, 130])
    )  # fmt: skip


CASES = {
    "causal": lambda: latent_call(2, 280, 20, 270, mask=tw.causal()),
    "blocks": lambda: latent_call(2, 200, 17, 9, block=16, batch=2, mask=tw.causal(), sink=normal(17, seed=3)),
    "window": lambda: latent_call(3, 150, 20, 90, dtype=torch.float16, mask=tw.window(40, 20)),
    "heads": lambda: latent_call(1, 70, 130, 70),
    "packed": packed_call,
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_compute_the_gradients(name):
    c = CASES[name]()
    expected = c.expected()
    out = Output(expected.oracle["o"].to(c.p.dtype), expected.oracle["lse"].float())
    by = ListedCall(c.p, own=EmulatedGradients(c.p))
    grads = by.backward(c.t, out, c.do, c.dlse)
    assert not [str(e) for e in expected.judge(accuracy.tensors(out, grads)) if not e.ok]
    c.t.joint = True
    joint = by.backward(c.t, out, c.do, c.dlse)
    whole = grads.dk.double()
    whole[..., :512] += grads.dv
    # Of one sum that is rounded once, and of two that are rounded before they are added.
    assert (joint.dk - whole).abs().max() <= 3 * torch.finfo(c.p.dtype).eps * max(
        grads.dk.abs().max(), grads.dv.abs().max()
    )
    assert torch.equal(joint.dq, grads.dq)
    assert joint.dv is None
