"""The launches that a plan keeps: a later call gives them what a new plan would give a new launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.backends.contract import Call, call, normal, poisoned
from tests.backends.hopper.test_backward import CASES as BACKWARD
from tests.backends.hopper.test_forward import CASES as FORWARD
from tests.backends.hopper.test_forward import PACKED, packed_call, qkv, without_gradient
from tilewise.backends import base
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.host import library
from tilewise.backends.hopper.host import plan as of_hopper
from tilewise.backends.hopper.host.plan import KeptLaunch, LaunchPlan
from tilewise.reference import Reference

Arguments = tuple[Tensor, ...]
LEARNED = torch.tensor([0.5, 0.1, 0.2, 0.3], requires_grad=True)
TABLE = normal(4, 33, seed=9).requires_grad_()
CALLS: dict[str, Callable[[], Call]] = {
    **{name: lambda x=x: call(*x[0], **x[1]) for name, x in (FORWARD | BACKWARD).items()},
    **{f"packed-{name}": lambda name=name: packed_call(name) for name in PACKED},
    "learned-slopes": lambda: call(*qkv(300, 300), score=tw.alibi(LEARNED), causal=True),
    "learned-table": lambda: call(
        *qkv(300, 300), score=lambda s, b, h, i, j: s + TABLE[h, (i - j).clamp(0, 32)], causal=True
    ),
    "sink-16-bits": lambda: call(*qkv(300, 300), sink=normal(4).bfloat16()),
    "two-passes": lambda: call(*qkv(300, 300), causal=True, deterministic=True),
}
KEPT = ("full", "causal", "window", "softcap", "sink", "sink-16-bits", "prefix", "prefix-lengths", "documents", "documents-whole",
        "pair", "pair-shared", "pair-by-batch", "alibi", "learned-slopes", "table", "learned-table", "dropout", "bias", "buckets",
        "curve", "two-passes", "packed-causal", "packed-alibi", "packed-dropout")  # fmt: skip
"""Calls whose launch is kept: not those of which kernels get a part of the keys, or copies without keys that nobody sees."""


class Recorder:
    """Kernels that write down the tensors of each launch and count how often one was prepared."""

    def __init__(self, monkeypatch):
        self.launches: list[Arguments] = []
        self.prepared = 0
        monkeypatch.setattr(library, "function", lambda config: self)

    def bound(self, *arguments) -> Recorder:
        self.prepared += 1
        return self

    def __call__(self, *tensors: Tensor) -> None:
        self.launches.append(tuple(x.clone() for x in tensors))  # what lies there by then


def moved(c: Call) -> Call:
    """The call with other numbers at other addresses: masks keep the tensors that they have."""
    t, written = c.t, set(c.p.spec.mask_slots)
    leaves = tuple(
        x if n in written or not x.is_floating_point() else x.detach() + 0.25 for n, x in enumerate(t.leaves)
    )
    sink = None if t.sink is None else t.sink.detach() * 2
    seed = None if t.seed is None else t.seed + 1
    other = replace(t, q=t.q * 2, k=t.k * 3, v=t.v.clone(), leaves=leaves, sink=sink, seed=seed)
    return replace(c, t=other, do=c.do * 2, dlse=c.dlse + 1)


def forward(plan: LaunchPlan, c: Call) -> Arguments:
    return plan.forward(c.t).tensors


def backward(plan: LaunchPlan, c: Call) -> Arguments:
    with torch.no_grad():
        out = Reference().forward(c.p, c.t)
    grads = plan.backward(c.t, replace(out, o=out.o.to(c.p.dtype)), c.do, c.dlse)
    return tuple(x for x in (grads.dq, grads.dk, grads.dv, grads.sink, *grads.leaves.values()) if x is not None)


def read(launch: Arguments, c: Call) -> Arguments:
    """Without the memory that stands for sinks where there are none."""
    return (
        launch
        if c.t.sink is not None or len(launch) <= 5 or launch[5].dtype == c.t.q.dtype
        else (*launch[:5], *launch[6:])
    )


def same(a: Arguments = (), b: Arguments = ()) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x.flatten(), y.flatten(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("run", [forward, backward], ids=["forward", "backward"])
def test_a_kept_launch_gets_and_gives_what_a_new_one_does(run, name, monkeypatch):
    recorder, c = Recorder(monkeypatch), CALLS[name]()
    backend = Hopper()
    c = c if run is backward else without_gradient(c)
    if backend.refused(c.p):
        pytest.skip("; ".join(backend.refused(c.p)))
    of = backend._plan if run is forward else backend._backward_plan
    kept, new, other = of(c.p), of(c.p), moved(c)
    launched = getattr(kept, "packed", kept)  # of a padded batch
    if not isinstance(launched, LaunchPlan):
        pytest.skip("a call over pages")
    with poisoned():
        run(kept, c)
        prepared = recorder.prepared
        found, expected = run(kept, other), run(new, other)
    assert recorder.prepared == 2 * prepared  # the second call prepared none, the new plan did
    assert len(recorder.launches) == 3 * prepared
    same(*(read(x, c) for x in recorder.launches[1:]))
    same(found, expected)
    assert launched.repeated(other.t if launched is kept else kept.inputs(other.t)) is not None or name not in KEPT


@pytest.mark.parametrize("run", [forward, backward], ids=["forward", "backward"])
def test_a_launch_is_kept_for_a_masks_tensors_as_they_are(run, monkeypatch):
    lengths = torch.tensor([40, 170])
    recorder, c = Recorder(monkeypatch), call(*qkv(300, 300, batch=2), mask=tw.prefix(lengths))
    c = c if run is backward else without_gradient(c)
    backend = Hopper()
    plan = backend._plan(c.p) if run is forward else backend._backward_plan(c.p)
    with poisoned():
        for _ in range(2):
            run(plan, c)
        assert plan.repeated(c.t) is not None
        lengths += 50
        assert plan.repeated(c.t) is None
        run(plan, c)
        run(backend._plan(c.p) if run is forward else backend._backward_plan(c.p), c)
    before, again, after, new = recorder.launches
    same(read(before, c), read(again, c))
    same(read(after, c), read(new, c))
    assert any(not torch.equal(x, y) for x, y in zip(before[5:], after[5:], strict=True) if not x.is_floating_point())


def test_launches_of_two_masks_of_one_text_are_kept_apart(monkeypatch):
    recorder, backend = Recorder(monkeypatch), Hopper()
    masks = [torch.arange(300) // n for n in (70, 40)]
    calls = [without_gradient(call(*qkv(300, 300), mask=tw.causal() & tw.documents(ids))) for ids in masks]
    plan = backend._plan(calls[0].p)
    kept: list[KeptLaunch | None] = []
    with poisoned():
        for c in calls * 2:
            plan.forward(c.t)
            kept.append(plan.repeated(c.t))
    assert kept[0] is kept[2]
    assert kept[1] is kept[3]
    assert kept[0] is not kept[1]
    for n in range(2):
        same(*(read(x, calls[n]) for x in recorder.launches[n::2]))


def test_a_capture_makes_anew_what_it_reads_of_a_mask(monkeypatch):
    recorder, backend = Recorder(monkeypatch), Hopper()
    c = without_gradient(call(*qkv(300, 300, batch=2), mask=tw.prefix(torch.tensor([40, 170]))))
    plan = backend._plan(c.p)
    with poisoned():
        plan.forward(c.t)
    kept = plan.repeated(c.t)
    monkeypatch.setattr(of_hopper, "is_captured", lambda: True)
    monkeypatch.setattr(base, "is_captured", lambda: True)
    assert plan.repeated(c.t) is None
    with poisoned():
        plan.forward(c.t)
    same(*(read(x, c) for x in recorder.launches))
    monkeypatch.setattr(of_hopper, "is_captured", lambda: False)
    assert plan.repeated(c.t) is kept  # what the capture made is the graph's
