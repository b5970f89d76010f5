"""What the part `plans` of `bench.calls` times."""

from types import SimpleNamespace

import pytest
import torch

import tilewise as tw
from bench import calls, testing
from tests.backends.hopper.test_structures import H200
from tilewise import device as devices
from tilewise.backends.hopper import Hopper

IDS = torch.arange(600) // 200
MASKS = {
    "bits": tw.causal() | tw.documents(IDS),
    "numbers": tw.causal() & tw.window(left=100),
    "ends-of-rows": tw.causal() & tw.documents(IDS),
    "padding": tw.key_lengths(torch.tensor([600, 300])),
}


@pytest.mark.parametrize("name", MASKS)
def test_all_that_kernels_read_of_a_mask_is_made_anew(name, monkeypatch):
    monkeypatch.setattr(devices, "of", lambda device: H200)
    tensors = testing.qkv(batch=2, nq=600, nk=600, hq=4, hk=4, d=64, dv=64, dtype=torch.bfloat16)
    c, backend = testing.call(*tensors, mask=MASKS[name]), Hopper()
    of_both = backend._plan(c.p), backend._backward_plan(c.p)
    drawn = SimpleNamespace(options=dict)
    calls.plan_for_kernels(drawn, c, of_both)
    made = [plan.made for plan in of_both]
    calls.plan_for_kernels(drawn, c, of_both)
    assert all(plan.made is not before for plan, before in zip(of_both, made, strict=True))
    assert all(bool(x._found) == (name != "numbers") for x in made)
