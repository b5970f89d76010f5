"""The search through random calls finds what is wrong, and finds it again."""

from __future__ import annotations

import random

import torch

from tests.backends.random_calls import faults, random_call
from tilewise import dispatch


def test_the_same_seed_gives_the_same_calls():
    (named, one), (again, other) = (random_call(random.Random(5), "cpu", 60) for _ in range(2))
    assert (named, one.p) == (again, other.p)
    assert all(torch.equal(getattr(one.t, name), getattr(other.t, name)) for name in "qkv")


def test_a_wrong_gradient_is_found(monkeypatch):
    backend = dispatch.backend("portable")
    _, c = random_call(random.Random(5), "cpu", 60)
    assert faults(backend, c) == []
    backward = type(backend).backward

    def wrong(self, *arguments):
        grads = backward(self, *arguments)
        grads.dv[0] += 1
        return grads

    monkeypatch.setattr(type(backend), "backward", wrong)
    (found,) = faults(backend, c)
    assert found.startswith("dv")
