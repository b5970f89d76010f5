"""The launches of a plan's later calls: they get what a new plan would give them."""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.backends.contract import Call, call, normal, poisoned
from tests.backends.hopper.launches import stand_in
from tests.backends.hopper.test_backward import CASES as BACKWARD
from tests.backends.hopper.test_forward import CASES as FORWARD
from tests.backends.hopper.test_forward import PACKED, packed_call, qkv, without_gradient
from tilewise import device as devices
from tilewise import dispatch, repeated, settings
from tilewise.backends import base
from tilewise.backends.hopper import Hopper, tables
from tilewise.backends.hopper.host import masks as of_masks
from tilewise.backends.hopper.host.padded_call import PaddedPlan
from tilewise.backends.hopper.host.plan import Plan
from tilewise.caching import keep_track
from tilewise.planning import planner
from tilewise.problem import TensorFacts
from tilewise.reference import Reference

Arguments = tuple[Tensor, ...]


def packed_in_32_bits(name: str) -> Call:
    """With starts of sequences as kernels read them."""
    c, slots = packed_call(name), packed_call(name).p.spec.cu_slots
    leaves = tuple(x.int() if n in slots else x for n, x in enumerate(c.t.leaves))
    t = replace(c.t, leaves=leaves, cu_seqlens_q=leaves[slots[0]], cu_seqlens_k=leaves[slots[-1]])
    return replace(c, t=t, p=replace(c.p, extras=tuple(map(TensorFacts.of, leaves))))


LEARNED = torch.tensor([0.5, 0.1, 0.2, 0.3], requires_grad=True)
TABLE = normal(4, 33, seed=9).requires_grad_()
SEEN = torch.arange(600) >= torch.tensor([5, 70]).view(2, 1, 1, 1)
"""Keys that a query sees: not the first ones, which kernels of the forward read as zeros."""

CALLS: dict[str, Callable[[], Call]] = {
    **{name: lambda x=x: call(*x[0], **x[1]) for name, x in (FORWARD | BACKWARD).items()},
    **{f"packed-{name}": lambda name=name: packed_call(name) for name in PACKED},
    **{f"packed-{name}-32-bits": lambda name=name: packed_in_32_bits(name) for name in PACKED},
    "learned-slopes": lambda: call(*qkv(300, 300), score=tw.alibi(LEARNED), causal=True),
    "learned-table": lambda: call(
        *qkv(300, 300), score=lambda s, b, h, i, j: s + TABLE[h, (i - j).clamp(0, 32)], causal=True
    ),
    "sink-16-bits": lambda: call(*qkv(300, 300), sink=normal(4).bfloat16()),
    "two-passes": lambda: call(*qkv(300, 300), causal=True, deterministic=True),
}


def launches_of(monkeypatch) -> list[Arguments]:
    """The tensors of each launch, as they lie there by then."""
    found: list[Arguments] = []
    stand_in(monkeypatch, lambda config, given: found.append(tuple(x.clone() for x in given if isinstance(x, Tensor))))
    return found


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


def forward(plan: Plan, c: Call) -> Arguments:
    return plan.forward(c.t).tensors


def backward(plan: Plan, c: Call) -> Arguments:
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
def test_a_later_launch_gets_and_gives_what_a_new_plans_does(run, name, monkeypatch):
    launches, c = launches_of(monkeypatch), CALLS[name]()
    backend = Hopper()
    c = c if run is backward else without_gradient(c)
    if backend.refused(c.p):
        pytest.skip("; ".join(backend.refused(c.p)))
    of = backend._plan if run is forward else backend._backward_plan
    old, new, other = of(c.p), of(c.p), moved(c)
    with poisoned():
        run(old, c)
        count = len(launches)
        found, expected = run(old, other), run(new, other)
    assert len(launches) == 3 * count
    for n in range(count):
        same(*(read(x, c) for x in (launches[count + n], launches[2 * count + n])))
    same(found, expected)


@pytest.mark.parametrize("lse", [True, False])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("seen", [{}, {"causal": True}, {"mask": tw.dense(SEEN)}], ids=["all", "causal", "dense"])
@pytest.mark.parametrize("queries", [1, 300])
def test_a_call_by_its_memory_launches_what_the_others_do(queries, seen, heads_first, lse, monkeypatch):
    launches, backend = launches_of(monkeypatch), Hopper()
    q, k, v = (normal(2, h, n, 64, dtype=torch.bfloat16, seed=h + n) for n, h in ((queries, 8), (600, 2), (600, 2)))
    heads_last = tuple(x.transpose(1, 2) for x in (q, k, v))
    c = call(*heads_last, **seen).forward_only()
    direct = backend.direct(c.p)
    with poisoned():
        expected = backend.forward(c.p, c.t)
        found = direct(*((q, k, v) if heads_first else heads_last), c.t.leaves, lse)
    same(*(read(x, c) for x in launches))
    same((found[0],), (expected.o,))
    assert found[1] is None if not lse else torch.equal(found[1].isnan(), expected.lse.isnan())


@pytest.mark.parametrize("lse", [True, False])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("queries", [1, 300])
def test_a_call_of_a_new_length_launches_what_the_others_do(queries, heads_first, lse, monkeypatch):
    """From the third length on it is made from its sizes alone; one that the copy engine cannot read is left to a plan."""
    launches, backend = launches_of(monkeypatch), Hopper()
    monkeypatch.setattr(dispatch, "select", lambda p, what="attention": backend)
    dispatch.forget()
    words = True, None, None, None, False, None, False
    for n, shift in ((600, 0), (640, 0), (704, 0), (704, 1), (760, 1)):
        q, *kv = (normal(2, h, m, 64, dtype=torch.bfloat16, seed=h + n) for h, m in ((8, queries), (2, n), (2, n)))
        k, v = (torch.cat([x.new_zeros(8 - shift), x.flatten()])[8 - shift :].view_as(x) for x in kv)
        heads_last = tuple(x.transpose(1, 2) for x in (q, k, v))
        c = call(*heads_last, causal=True).forward_only()
        launches.clear()
        with poisoned(), torch.no_grad():
            found = repeated.attend(*((q, k, v) if heads_first else heads_last), words, lse, heads_first)
            expected = backend.forward(c.p, c.t)
        same(*(read(x, c) for x in launches))
        same((found[0],), (expected.o,))
        assert found[1] is None if not lse and not shift else torch.equal(found[1].isnan(), expected.lse.isnan())
    plans = list(dispatch.of_calls.values())
    assert [type(x) for x in plans] == [dispatch.Plan, dispatch.Plan, repeated._Sized, repeated._Sized]
    dispatch.forget()


@pytest.mark.parametrize("name", CALLS)
def test_a_forward_by_its_memory_launches_the_same_or_leaves_it(name, monkeypatch):
    launches, c = launches_of(monkeypatch), without_gradient(CALLS[name]())
    backend = Hopper()
    if backend.refused(c.p):
        pytest.skip("; ".join(backend.refused(c.p)))
    direct = backend.direct(c.p)
    qkv = c.t.q, c.t.k, c.t.v
    with poisoned():
        expected = backend.forward(c.p, c.t)
        found = [direct and direct(*x, c.t.leaves, True) for x in (qkv, [x.transpose(-3, -2) for x in qkv])]
    if found[0] is not None:
        for n, result in enumerate(found, 1):
            same(read(launches[0], c), read(launches[n], c))
            same(result, expected.tensors)


DIRECT = [
    "alibi", "alibi-empty-rows", "alibi-wide", "bias", "bias-keys", "causal", "causal-empty-rows", "causal-wide", "curve", "decode",
    "dropout", "dropout-bias", "dropout-documents", "dropout-keys", "dropout-softcap", "even", "fp16", "full", "keys-and-alibi",
    "large-scores", "narrow", "one", "scale", "score-hides", "score-ignores-s", "sink",
    "sink-16-bits", "softcap", "two-passes", "window",
]  # fmt: skip
DIRECT += [f"packed-{name}-32-bits" for name in PACKED if name != "no-keys-at-all"]
DIRECT += [  # with tiles of a mask, and with copies of k and v
    "block-sparse", "block-sparse-odd", "dense", "dense-empty", "documents", "documents-empty-rows", "documents-whole", "documents-wide",
    "float64", "keep", "keep-causal", "large-numbers", "lengths", "prefix", "prefix-lengths", "ranges-per-head", "union",
]  # fmt: skip


def test_these_backwards_go_by_their_memory():
    backend, calls = Hopper(), {name: c for name, made in CALLS.items() if not Hopper().refused((c := made()).p)}
    assert {name for name, c in calls.items() if not c.p.spec.grad_slots and backend.direct_backward(c.p)} == {*DIRECT}


@pytest.mark.parametrize("of_lse", [True, False], ids=["with-dlse", "without"])
@pytest.mark.parametrize("name", DIRECT)
def test_a_backward_by_its_memory_launches_the_same(name, of_lse, monkeypatch):
    launches, c, backend = launches_of(monkeypatch), CALLS[name](), Hopper()
    with torch.no_grad():
        out = Reference().forward(c.p, c.t)
    out, do = replace(out, o=out.o.to(c.p.dtype)), c.do.contiguous()
    with poisoned():
        expected = backend.backward(c.p, c.t, out, do, c.dlse if of_lse else torch.zeros_like(out.lse))
        saved = (c.t.q, c.t.k, c.t.v, *c.t.leaves, c.t.seed, out.o, out.lse)
        direct = backend.direct_backward(c.p)
        assert direct(do.transpose(-1, -2), None, saved) is None
        assert direct(torch.cat([do.flatten()[:1], do.flatten()])[1:].view_as(do), None, saved) is None
        found = direct(do, c.dlse if of_lse else None, saved)
    count = len(launches) // 2
    for before, after in zip(launches[:count], launches[count:], strict=True):
        # Of zeros that nobody writes there are more than one call reads.
        same(before, tuple(y.flatten()[: x.numel()] for x, y in zip(before, after, strict=True)))
    same(found, (expected.dq, expected.dk, expected.dv))


def test_a_training_step_of_a_new_length_launches_what_the_others_do(monkeypatch):
    """From the third length on its forward and backward are made from its sizes alone."""
    launches, backend, steps = launches_of(monkeypatch), Hopper(), []
    monkeypatch.setattr(dispatch, "select", lambda p, what="attention": backend)
    dispatch.forget()
    for n in (600, 608, 616, 624):
        q, k, v = leaves = [normal(2, n, h, 64, dtype=torch.bfloat16, seed=h + n).requires_grad_() for h in (8, 2, 2)]
        do = normal(2, n, 8, 64, dtype=torch.bfloat16, seed=n)
        c = call(q, k, v, causal=True)
        launches.clear()
        with poisoned():
            o = tw.attention(q, k, v, causal=True)
            steps.append(type(o.grad_fn.plan))
            found = torch.autograd.grad(o, leaves, do)
            with torch.no_grad():
                out = backend.forward(c.p, c.t)
                expected = backend.backward(c.p, c.t, out, do, torch.zeros_like(out.lse))
        count = len(launches) // 2
        for before, after in zip(launches[:count], launches[count:], strict=True):
            same(after, tuple(x.flatten()[: y.numel()] for x, y in zip(before, after, strict=True)))
        same(found, (expected.dq, expected.dk, expected.dv))
    assert steps == [dispatch.Plan, dispatch.Plan, repeated._Sized, repeated._Sized]
    dispatch.forget()


@pytest.mark.parametrize("hides", [False, True], ids=["no-key", "a-key"])
@pytest.mark.parametrize("name", ["dense", "documents"])
@pytest.mark.parametrize("run", ["direct", "forward"])
def test_keys_and_values_are_read_where_they_lie_once_no_key_is_known_to_be_hidden(run, name, hides, monkeypatch):
    addresses, backend = [], Hopper()
    stand_in(
        monkeypatch, lambda config, given: addresses.append({x.data_ptr() for x in given if isinstance(x, Tensor)})
    )
    kept = torch.ones(1, 1, 300, 300, dtype=torch.bool).tril()
    kept[..., 7] &= not hides
    masks = {
        "dense": tw.dense(kept),
        "documents": tw.documents((torch.arange(300) // 90)[None].int()) & tw.key_range(3 * hides, 300),
    }
    c = call(*qkv(300, 300, batch=1), mask=masks[name])
    with torch.no_grad():
        out = Reference().forward(c.p, c.t)
    out = replace(out, o=out.o.to(c.p.dtype))
    do, saved = c.do.contiguous(), (c.t.q, c.t.k, c.t.v, *c.t.leaves, c.t.seed, out.o, out.lse)
    forward_only, found = without_gradient(c), []
    for _ in range(3):
        addresses.clear()
        if run == "direct":
            backend.direct(forward_only.p)(c.t.q, c.t.k, c.t.v, c.t.leaves, False)
            backend.direct_backward(c.p)(do, None, saved)
        else:
            backend.forward(forward_only.p, c.t)
            backend.backward(c.p, c.t, out, do, torch.zeros_like(out.lse))
        found.append([x.data_ptr() in at for at in addresses[:2] for x in (c.t.k, c.t.v)])
    where = {n: [each[n] for each in found] for n in range(4)}  # forward's k and v, backward's
    assert where[0] == [True] * 3
    assert where[1] == where[2] == where[3] == [False, not hides, not hides]


@pytest.mark.parametrize("grads", [False, True], ids=["forward", "training"])
def test_packed_sequences_of_new_lengths_launch_what_the_others_do(grads, monkeypatch):
    """From the third length on too, with as many sequences or more; where values are checked, always by a plan."""
    launches, backend, plans = launches_of(monkeypatch), Hopper(), []
    monkeypatch.setattr(dispatch, "select", lambda p, what="attention": backend)
    dispatch.forget()
    for lengths, checked in (((70, 200), 0), ((3, 260), 0), ((90, 1, 30), 0), ((31, 77), 0), ((31, 77), 1)):
        monkeypatch.setattr(settings, "checks_values", lambda device, checked=checked: bool(checked))
        cu, n = torch.tensor([0, *lengths]).cumsum(0).int(), sum(lengths)
        q, k, v = leaves = [normal(n, h, 64, dtype=torch.bfloat16, seed=h + n).requires_grad_(grads) for h in (8, 2, 2)]
        do = normal(n, 8, 64, dtype=torch.bfloat16, seed=n)
        c = call(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
        c = c if grads else c.forward_only()
        launches.clear()
        with poisoned():  # PyTorch's algorithms are deterministic there
            o = tw.attention_varlen(q, k, v, cu, causal=True, deterministic=False)
            found = [o, *(torch.autograd.grad(o, leaves, do) if grads else ())]
            with torch.no_grad():
                out = backend.forward(c.p, c.t)
                expected = [out.o]
                if grads:
                    of = backend.backward(c.p, c.t, out, do, torch.zeros_like(out.lse))
                    expected += [of.dq, of.dk, of.dv]
        for before, after in zip(launches[: len(launches) // 2], launches[len(launches) // 2 :], strict=True):
            same(after, tuple(x.flatten()[: y.numel()] for x, y in zip(before, after, strict=True)))
        same(tuple(x.detach() for x in found), tuple(expected))
        plans.append(type(list(dispatch.of_calls.values())[-1]))
    assert plans == [dispatch.Plan, dispatch.Plan, repeated._Sized, repeated._Sized, dispatch.Plan]
    dispatch.forget()


@pytest.mark.parametrize("lse", [True, False])
def test_padded_keys_are_left_to_the_packed_call_that_they_are(lse, monkeypatch):
    launches, backend = launches_of(monkeypatch), Hopper()
    q, k, v = (normal(2, n, 2, 64, dtype=torch.bfloat16) for n in (600, 600, 600))
    calls = [call(q, k, v, mask=tw.key_lengths(torch.tensor(n))).forward_only() for n in ([70, 600], [3, 9])]
    plan = backend._plans.of(calls[0].p)
    assert isinstance(plan, PaddedPlan)
    for c in calls:
        launches.clear()
        with poisoned():
            expected = plan.forward(c.t)
            o, found = backend.direct(c.p)(q, k, v, c.t.leaves, lse)
        same(*(read(x, c) for x in launches))
        same((o,), (expected.o,))
        assert o.shape == expected.o.shape
        assert found is None if not lse else found.shape == expected.lse.shape


@pytest.mark.parametrize("with_dlse", [True, False])
@pytest.mark.parametrize("n", [200, 600])  # the backward of fewer keys has two passes
def test_padded_gradients_are_those_of_the_packed_call(n, with_dlse, monkeypatch):
    launches, backend = launches_of(monkeypatch), Hopper()
    q, k, v = (normal(2, n, heads, 64, dtype=torch.bfloat16, seed=heads) for heads in (4, 2, 2))
    for lengths in ([70, n], [3, 9]):
        c = call(q, k, v, mask=tw.key_lengths(torch.tensor(lengths)))
        with torch.no_grad():
            out = Reference().forward(c.p, c.t)
        out, dlse = replace(out, o=out.o.to(c.p.dtype)), c.dlse if with_dlse else torch.zeros_like(c.dlse)
        launches.clear()
        with poisoned():
            expected = backend.backward(c.p, c.t, out, c.do, dlse)
            saved = c.t.q, c.t.k, c.t.v, *c.t.leaves, None, out.o, out.lse
            found = backend.direct_backward(c.p)(c.do, dlse if with_dlse else None, saved)
        assert [x.shape for x in found] == [x.shape for x in saved[:3]]
        same(found, (expected.dq, expected.dk, expected.dv))
        half = len(launches) // 2
        for before, after in zip(launches[:half], launches[half:], strict=True):
            same(after, tuple(x.flatten()[: y.numel()].view(y.shape) for x, y in zip(before, after, strict=True)))


@pytest.mark.parametrize("mask", [tw.causal(), tw.key_lengths(torch.tensor([70, 600]))], ids=["dense", "padded"])
def test_statistics_and_outputs_in_another_layout_do_not_go_by_their_memory(mask, monkeypatch):
    stand_in(monkeypatch, lambda config, given: None)
    q, k, v = (normal(2, 600, 2, 64, dtype=torch.bfloat16, seed=n) for n in range(3))
    c = call(q, k, v, mask=mask)
    gradients, saved = Hopper().direct_backward(c.p), [q, k, v, *c.t.leaves, None, q, torch.zeros(2, 2, 600)]
    assert gradients(c.do, None, saved) is not None
    saved[-2] = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert gradients(c.do, None, saved) is None
    saved[-2:] = q, torch.zeros(2, 600, 2).transpose(1, 2)
    assert (gradients(c.do, None, saved) is None) == (mask.leaves == ())  # padded ones are copied


def test_a_do_with_an_odd_stride_along_a_batch_of_one_does_not_go_by_its_memory(monkeypatch):
    stand_in(monkeypatch, lambda config, given: None)
    q, k, v = (normal(1, 600, 2, 64, dtype=torch.bfloat16, seed=n) for n in range(3))
    c = call(q, k, v)
    gradients, saved = Hopper().direct_backward(c.p), [q, k, v, None, q, torch.zeros(1, 2, 600)]
    assert gradients(c.do, None, saved) is not None
    odd = c.do.as_strided(c.do.shape, (c.do.numel() + 3, *c.do.stride()[1:]))
    assert odd.is_contiguous()
    assert gradients(odd, None, saved) is None  # the copy engine takes multiples of 16 bytes, of a single row too


def test_the_index_of_a_table_that_a_graph_reads_stays_when_others_take_its_place(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(devices, "is_captured", lambda: True)
    read = weakref.ref(tables._index((0, 1, 2), cpu))
    for n in range(64):
        tables._kept_index((n, 7), cpu)
    assert read() is not None


def test_only_calls_of_which_nothing_else_is_read_go_by_their_memory():
    q, k, v = (normal(2, n, 2, 64, dtype=torch.bfloat16) for n in (1, 600, 600))
    backend = Hopper()

    def direct(*qkv, **options):
        return backend.direct(call(*qkv, **options).forward_only().p)

    assert direct(q, k, v) is not None
    two = [torch.cat([q, q], 1), k, v]
    ends = tw.prefix(torch.tensor([5, 600]))
    assert direct(*two, mask=ends) is not None
    assert direct(*two, mask=ends, score=tw.softcap(9.0)) is not None  # the ends of rows are kept
    apart = normal(2, 600, 2, 65, dtype=torch.bfloat16)[..., :64]
    assert direct(q, apart, v) is None  # a copy is made
    aligned = torch.zeros(2 * 600 * 2 * 64 + 8, dtype=torch.bfloat16)
    shifted = aligned[1 : 1 + k.numel()].view(k.shape)
    assert direct(q, k, v)(q, shifted, v, (), True) is None  # the copy engine cannot read it there


def test_a_step_over_keys_with_ends_goes_by_its_memory_and_keeps_what_these_say(monkeypatch):
    launches, backend = launches_of(monkeypatch), Hopper()
    q, k, v = (normal(2, n, 2, 64, dtype=torch.bfloat16) for n in (1, 600, 600))
    c = call(q, k, v, mask=tw.key_lengths(torch.tensor([5, 599]))).forward_only()
    direct, made = backend.direct(c.p), []
    monkeypatch.setattr(of_masks, "own_keys", lambda *given, make=of_masks.own_keys: made.append(1) or make(*given))
    with poisoned():
        for captured in (False, True, False):
            monkeypatch.setattr(base, "is_captured", lambda captured=captured: captured)
            launches.clear()
            direct(q, k, v, c.t.leaves, False)
            backend.forward(c.p, c.t)
            same(*(read(x, c) for x in launches))
            made.append(0)
        c.t.leaves[0].add_(1)
        direct(q, k, v, c.t.leaves, False)
        backend.forward(c.p, c.t)
        new = Hopper()
        new.forward(c.p, c.t)
    assert made == [
        1,
        0,
        1,
        1,
        0,
        0,
        1,
        1,
    ]  # once; a graph makes what it reads; once more of what was written; by the new plan
    same(*(read(x, c) for x in launches[-2:]))
    assert any(
        not torch.equal(x, y) for x, y in zip(launches[0], launches[-1], strict=True) if not x.is_floating_point()
    )


@pytest.mark.parametrize("run", [forward, backward], ids=["forward", "backward"])
def test_what_is_made_of_a_mask_is_made_anew_when_its_tensors_change(run, monkeypatch):
    lengths = torch.tensor([40, 170])
    launches, c = launches_of(monkeypatch), call(*qkv(300, 300, batch=2), mask=tw.prefix(lengths))
    c = c if run is backward else without_gradient(c)
    backend = Hopper()
    plan = backend._plan(c.p) if run is forward else backend._backward_plan(c.p)
    with poisoned():
        for _ in range(2):
            run(plan, c)
        lengths += 50
        run(plan, c)
        run(backend._plan(c.p) if run is forward else backend._backward_plan(c.p), c)
    before, again, after, new = launches
    same(read(before, c), read(again, c))
    same(read(after, c), read(new, c))
    assert any(not torch.equal(x, y) for x, y in zip(before[5:], after[5:], strict=True) if not x.is_floating_point())


def test_launches_of_two_masks_of_one_text_are_kept_apart(monkeypatch):
    launches, backend = launches_of(monkeypatch), Hopper()
    masks = [torch.arange(300) // n for n in (70, 40)]
    calls = [without_gradient(call(*qkv(300, 300), mask=tw.causal() & tw.documents(ids))) for ids in masks]
    plan = backend._plan(calls[0].p)
    with poisoned():
        for c in calls * 2:
            plan.forward(c.t)
    for n in range(2):
        same(*(read(x, calls[n]) for x in launches[n::2]))
    one, other = launches[:2]
    assert any(not torch.equal(x, y) for x, y in zip(one[5:], other[5:], strict=True) if not x.is_floating_point())


def test_a_capture_makes_anew_what_it_reads_of_a_mask(monkeypatch):
    launches, backend, made = launches_of(monkeypatch), Hopper(), []
    c = without_gradient(call(*qkv(300, 300, batch=2), mask=tw.prefix(torch.tensor([40, 170]))))
    plan = backend._plan(c.p)
    monkeypatch.setattr(of_masks, "grid_of", lambda *given, make=of_masks.grid_of: made.append(1) or make(*given))
    with poisoned():
        for captured in (False, True, False):
            monkeypatch.setattr(base, "is_captured", lambda captured=captured: captured)
            plan.forward(c.t)
            made.append(0)
    first, _, rest = "".join(map(str, made)).split("0")[:3]
    assert first
    assert not rest  # what the capture made is the graph's, what was made before stays
    assert "".join(map(str, made)).split("0")[1] == first
    for launch in launches[1:]:
        same(*(read(x, c) for x in (launches[0], launch)))


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="the package triton is not installed")
@pytest.mark.parametrize("run", [forward, backward], ids=["forward", "backward"])
@pytest.mark.parametrize("name", ["dense", "documents", "keep", "ranges-per-head"])
def test_kernels_that_plan_masks_give_launches_what_operations_do(name, run, monkeypatch):
    from tilewise.backends.triton import interpreting
    from tilewise.backends.triton.host import tile_map

    if not interpreting():
        pytest.skip("kernels are not interpreted (tests/conftest.py)")
    launches, c, backend = launches_of(monkeypatch), CALLS[name](), Hopper()
    c = c if run is backward else without_gradient(c)
    leaves = tuple(x.clone() for x in c.t.leaves)  # they are written to, and other tests read those of the table
    for x in leaves:
        keep_track(x)
    c = replace(c, t=replace(c.t, leaves=leaves))
    of = backend._plan if run is forward else backend._backward_plan
    monkeypatch.setattr(tile_map, "launches_on", lambda device: True)
    kept = of(c.p)
    with poisoned():
        for written in (False, True):
            if written and c.t.leaves:
                c.t.leaves[0].copy_(c.t.leaves[0].flip(-1) if c.t.leaves[0].dtype == torch.bool else c.t.leaves[0] // 2)
            run(of(c.p), c)
            with monkeypatch.context() as there:
                there.setitem(planner._LOADED, "cpu", lambda: tile_map)
                run(kept, c)
    assert kept.keeps
    for n in range(0, len(launches), 2):
        for x, y in zip(launches[n], launches[n + 1], strict=True):
            # Lists past their ends and slots of no tile may hold anything.
            if x.dtype == c.t.q.dtype or x.shape[-1] == 4:
                same((x,), (y,))
