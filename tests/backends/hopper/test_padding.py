"""Padded batches as packed sequences: the packed problem has the same results, and only calls that it equals become one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import tilewise as tw
from bench.testing import Call, call, normal, wrong
from tests.backends.hopper.test_backward import emulate_kernels
from tests.backends.hopper.test_forward import emulate_kernel
from tilewise.backends.hopper import Hopper, padding
from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.forward import config as forward_config
from tilewise.backends.hopper.host import masks
from tilewise.backends.hopper.host.padded_call import PaddedBackward, PaddedForward
from tilewise.backends.portable import Portable
from tilewise.planning.planner import Kind
from tilewise.problem import Problem

LENGTHS, STARTS = torch.tensor([5, 0, 17, 29]), torch.tensor([1, 0, 3, 9])
PADDED = {
    "lengths": tw.key_lengths(LENGTHS),
    "ranges": tw.key_range(STARTS, LENGTHS),
    "starts": tw.key_range(STARTS, 17),
    "crossed": tw.key_range(LENGTHS, STARTS),
    "both": tw.key_lengths(LENGTHS) & tw.key_range(STARTS, 12),
}


@dataclass
class PortablePlan:
    """The plan of a packed problem, as another backend runs it."""

    problem: Problem

    def forward(self, *given):
        return Portable().forward(self.problem, *given)

    def backward(self, t, out, do, dlse):
        assert out.lse.is_contiguous()  # kernels take them so
        assert dlse.is_contiguous()
        return Portable().backward(self.problem, t, out, do, dlse)


@dataclass
class EmulatedPlan:
    """The plan of a packed problem, as the source of its kernels runs it on the emulated machine."""

    problem: Problem

    def forward(self, t):
        c = Call(self.problem, t, torch.empty(0), torch.empty(0))
        return emulate_kernel(c, forward_config.choose(self.problem), 3)

    def backward(self, t, out, do, dlse):
        return emulate_kernels(Call(self.problem, t, do, dlse), backward_config.choose(self.problem), 3)


class Padded(Portable):
    """Each problem as the packed one that it equals."""

    plan = PortablePlan

    def forward(self, p, t):
        return PaddedForward(p, self.plan(padding.as_packed(p))).forward(t)

    def backward(self, p, t, out, do, dlse):
        return PaddedBackward(p, self.plan(padding.as_packed(p))).backward(t, out, do, dlse)


class Emulated(Padded):
    plan = EmulatedPlan


def padded_call(mask: tw.Mask, nq: int = 7, **options) -> Call:
    q, k, v = (normal(4, n, heads, 8, seed=n + heads) for n, heads in ((nq, 4), (17, 2), (17, 2)))
    return call(q, k, v, mask=mask, **options)


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("of", ["starts", "own_keys"])
def test_a_kernel_makes_what_other_operations_make(of, name):
    tile_map = pytest.importorskip(
        "tilewise.backends.triton.host.tile_map", reason="the package triton is not installed"
    )
    p, extras = padded_call(PADDED[name]).p, PADDED[name].leaves
    size, other = (padding.parts(p), padding.starts) if of == "starts" else (24, masks.own_keys)
    making = getattr(tile_map, of)(Kind.of_problem(p), size)
    expected = other(p, extras, size)
    assert expected.unique().numel() > 4
    assert torch.equal(making(extras, p.device), expected)


def test_a_kept_launch_gets_the_addresses_of_what_its_first_one_got(monkeypatch):
    """Where the kernel is compiled: the result, and the mask's tensors where they begin at multiples of 16 bytes."""
    tile_map = pytest.importorskip(
        "tilewise.backends.triton.host.tile_map", reason="the package triton is not installed"
    )
    from tilewise.backends.triton.host import runtime

    lengths, seen = torch.arange(9), []
    p = padded_call(tw.key_lengths(lengths[:4])).p
    making = tile_map.starts(Kind.of_problem(p), 2)
    monkeypatch.setattr(
        runtime, "start", lambda kernel, grid, tiles, tensors, *rest: seen.append(tensors) or "compiled"
    )
    monkeypatch.setattr(runtime, "run", lambda kernel, grid, tiles, tensors, *rest: seen.append(tensors))
    monkeypatch.setattr(runtime, "run_each", lambda launches: seen.extend(x[0] for *_, x in launches))
    monkeypatch.setattr(runtime, "current", lambda: p.device.index)  # torch built for CUDA would ask the driver
    made = [making((x,), p.device) for x in (lengths[:4], lengths[2:6], lengths[1:5])]
    (first, (leaf,)), again, (unaligned, (other,)) = seen
    assert first.data_ptr() == made[0].data_ptr()
    assert leaf.data_ptr() == lengths.data_ptr()
    assert again == (made[1].data_ptr(), (lengths[2:].data_ptr(),))
    assert unaligned.data_ptr() == made[2].data_ptr()
    assert other.data_ptr() == lengths[1:].data_ptr()


@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("name", PADDED)
def test_a_padded_batch_equals_its_packed_sequences(name, queries):
    c = padded_call(PADDED[name], queries, sink=normal(4), softmax_scale=0.7)
    assert padding.is_padded(c.p)
    assert not wrong(Padded(), c)


def test_the_source_of_packed_kernels_computes_a_padded_batch():
    q, k, v = (
        normal(3, n, heads, 64, dtype=torch.bfloat16, seed=n + heads) for n, heads in ((70, 2), (150, 1), (150, 1))
    )
    mask = tw.key_range(torch.tensor([3, 0, 70]), torch.tensor([65, 0, 150]))
    c = call(q, k, v, mask=mask, sink=normal(2))
    assert padding.is_padded(c.p)
    assert not wrong(Emulated(), c)


def test_keys_that_nobody_sees_may_be_nan_and_scores_may_have_a_cap():
    c = padded_call(PADDED["ranges"])
    hidden = torch.arange(17).view(1, -1, 1, 1)
    hidden = (hidden < STARTS.view(-1, 1, 1, 1)) | (hidden >= LENGTHS.view(-1, 1, 1, 1))
    for x in (c.t.k, c.t.v):
        x.masked_fill_(hidden, torch.nan)
    assert not wrong(Padded(), c)
    capped = padded_call(PADDED["lengths"], score=tw.softcap(3.0))
    assert padding.is_padded(capped.p)
    assert not wrong(Padded(), capped)


def test_batch_elements_that_would_have_to_be_copied_are_not_packed():
    q, v = normal(4, 7, 4, 8), normal(4, 2, 17, 8, seed=2).transpose(1, 2)
    k = normal(4, 20, 2, 8, seed=1)[:, :17]  # of a cache with room for more
    for k_and_v in ((k, k), (v, v)):
        p = call(q, *k_and_v, mask=PADDED["lengths"]).p
        assert padding.as_packed(p) is p


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (tw.causal() & tw.key_lengths(LENGTHS), {}),
        (tw.key_lengths(12), {}),
        (tw.key_lengths(LENGTHS.view(4, 1).expand(4, 4)), {}),
        (tw.key_lengths(LENGTHS) & tw.keep(lambda b, h, i, j: i != j), {}),
        (tw.key_lengths(LENGTHS), {"dropout_p": 0.5}),
        (tw.key_lengths(LENGTHS), {"score": tw.alibi(torch.ones(4))}),
    ],
    ids=["causal", "number", "heads", "predicate", "dropout", "score"],
)
def test_what_packed_sequences_do_not_say_stays_as_it_is(mask, options):
    p = padded_call(mask, **options).with_constant_scores().p
    assert padding.as_packed(p) is p


def test_kernels_of_packed_sequences_run_padded_batches():
    q = torch.randn(4, 200, 4, 128).bfloat16()
    c = call(q, q, q, mask=PADDED["lengths"])
    assert [(x.packed, x.form) for x in Hopper().configs(c.p)] == [(True, "upper"), (True, "band")]
    assert Hopper().config(call(q, q, q, mask=PADDED["lengths"] & tw.causal()).p).form == "bits"
