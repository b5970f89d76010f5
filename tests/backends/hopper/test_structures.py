"""Plans of calls that differ in their lengths alone: recorded once, they are what would be planned for each anew."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import tilewise as tw
from tilewise import device as devices
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.host.padded_call import PaddedPlan
from tilewise.problem import Problem, check
from tilewise.spec import Options, assemble, parse_spec

H200 = devices.Device("NVIDIA H200", "cuda", 132, 232_448, 141 << 30, (9, 0))
HALF = torch.bfloat16


def problem(
    n: int, m: int, batch: int, *, dim: int, heads: tuple[int, int], grad: bool, packed: bool, **words
) -> Problem:
    """The problem of n queries and m keys. Its tensors take no memory that is touched."""
    rows = [(batch * x,) if packed else (batch, x) for x in (n, m, m)]
    q, k, v = (
        torch.empty(*row, h, dim, dtype=HALF).requires_grad_(grad)
        for row, h in zip(rows, (heads[0], heads[1], heads[1]), strict=True)
    )
    words = {name: x(n, m, batch) if callable(x) else x for name, x in words.items()}
    if packed:
        words |= {
            "cu_seqlens_q": torch.zeros(batch + 1, dtype=torch.int32),
            "cu_seqlens_k": torch.zeros(batch + 1, dtype=torch.int32),
        }
    extras, seed, spec = assemble(q, k, v, Options(**words))
    return check(q, k, v, extras, seed, parse_spec(spec))


PLAIN = {"dim": 128, "heads": (8, 2), "grad": False, "packed": False}
CASES = {
    "full": PLAIN,
    "causal": PLAIN | {"causal": True},
    "causal-64": PLAIN | {"dim": 64, "heads": (4, 4), "causal": True},
    "causal-256": PLAIN | {"dim": 256, "causal": True},
    "window": PLAIN | {"mask": tw.causal() & tw.window(left=511)},
    "range": PLAIN | {"mask": tw.causal() & tw.key_range(3, 700)},
    "softcap": PLAIN | {"causal": True, "score": tw.softcap(30.0)},
    "packed": PLAIN | {"causal": True, "packed": True},
    "lengths": PLAIN | {"mask": lambda n, m, batch: tw.key_lengths(torch.ones(batch, dtype=torch.int32))},
    "documents": PLAIN | {"mask": lambda n, m, batch: tw.documents(torch.zeros(batch, m, dtype=torch.int32))},
    "deterministic": PLAIN | {"causal": True, "deterministic": True},
    "sink": PLAIN | {"causal": True, "sink": torch.zeros(8)},
}  # fmt: skip


def lengths(seed: int):
    """Queries, keys and batch of several calls: decoding steps, prompts and chunks."""
    draw = random.Random(seed)
    for _ in range(24):
        n, m = draw.choice([1, 1, 3, 64, draw.randrange(1, 3000)]), draw.randrange(1, 5000)
        yield draw.choice([(n, m, 1), (n, n, 1), (n, n, draw.randrange(1, 9))])


def facts(plan) -> dict:
    if isinstance(plan, PaddedPlan):
        return facts(plan.packed)
    return {"class": type(plan), "config": plan.config} | {name: getattr(plan, name) for name in plan.DECIDED}


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", CASES)
def test_a_recorded_plan_is_the_plan(case, grad, monkeypatch):
    monkeypatch.setattr(devices, "of", lambda device: H200)
    backend, seen = Hopper(), 0
    for n, m, batch in lengths(len(case)):
        p = problem(n, m, batch, **CASES[case] | {"grad": grad})
        if backend.refused(p):
            continue
        plans, plan = (backend._backward_plans, backend._backward_plan) if grad else (backend._plans, backend._plan)
        fresh = plan(replace(p))
        if not isinstance(fresh, PaddedPlan) and fresh.sees_nothing:
            continue
        assert facts(plans.of(p)) == facts(fresh)
        seen += 1
    assert seen > 8
    assert not plans._ways.unrecorded
    recorded = [way for ways in plans._ways._ways.values() for way in ways]
    assert len(recorded) < seen  # some share a way
