"""Calls in pieces: whatever the mask, the bits that lie in memory at a time are bounded, and the pieces together are the call."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tilewise as tw
from bench.testing import Call, call, normal
from tests.backends.hopper import test_backward, test_forward
from tests.backends.hopper.launches import stand_in
from tests.backends.hopper.test_forward import qkv
from tests.planning.test_bit_tiles import entries, pairs_of
from tilewise import accuracy
from tilewise.backends import blockwise
from tilewise.backends.base import Grads, Output
from tilewise.backends.blockwise import gathered_bytes
from tilewise.backends.hopper import Hopper, pieces
from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.config import Formed, bytes_of_bits
from tilewise.backends.hopper.forward import config as forward_config
from tilewise.backends.hopper.host import masks
from tilewise.backends.hopper.host.backward_call import BackwardPlan
from tilewise.backends.hopper.host.forward_call import ForwardPlan
from tilewise.backends.hopper.host.piecewise_call import PiecewisePlan
from tilewise.backends.hopper.host.recipe import flat
from tilewise.backends.hopper.parameters import names_of
from tilewise.backends.piecewise import problem_of, take
from tilewise.planning.bit_tiles import BUDGET, BitTiles
from tilewise.problem import Problem, check
from tilewise.reference import Reference
from tilewise.spec import Options, assemble, parse_spec

BOTH = (forward_config.choose, backward_config.choose)
IDS = torch.arange(300) // 90
# Queries, keys, query and key heads, batch; options. With 8 KiB of bits at a time, each runs in several pieces.
CASES = {
    "moba": (300, 300, (4, 4), 1, lambda: {"mask": tw.causal() & tw.selected(entries(1, 4, 300, 2, blocks=5), 64)}),
    "moba-or-window": (
        260, 300, (2, 2), 2,
        lambda: {"mask": tw.causal() & (tw.selected(entries(2, 2, 260, 2, blocks=10), 32) | tw.window(left=9))},
    ),
    "grouped": (
        300, 300, (4, 2), 1,
        lambda: {"mask": tw.selected(entries(1, 2, 300, 30, blocks=300)), "sink": normal(4, seed=8), "causal": True},
    ),
    "of-all-heads": (300, 200, (4, 2), 1, lambda: {"mask": tw.selected(entries(1, 1, 3, 2, blocks=3), 70, 100)}),
    "blocks-of-queries": (300, 300, (2, 1), 1, lambda: {"mask": tw.selected(entries(1, 1, 5, 3, blocks=10), 32, 64)}),
    "no-keys": (400, 130, (2, 2), 1, lambda: {"mask": tw.selected(entries(1, 2, 400, 2, blocks=9), 16), "causal": True}),
    "keep": (300, 300, (2, 2), 1, lambda: {"mask": tw.keep(lambda b, h, i, j: (i + 2 * j + h) % 5 < 2)}),
    "keep-blocks": (300, 200, (2, 2), 1, lambda: {"mask": tw.keep(lambda b, h, i, j: (j // 70 + i // 64) % 2 == 0)}),
    "dense": (260, 200, (2, 2), 2, lambda: {"mask": normal(2, 2, 260, 200) > 0.5, "sink": normal(2, seed=8)}),
    "dense-broadcast": (260, 200, (2, 2), 2, lambda: {"mask": normal(2, 1, 260, 200) > 0.5}),
    "documents": (
        300, 300, (2, 2), 1,
        lambda: {"mask": tw.documents(IDS) & tw.causal() & tw.keep(lambda b, h, i, j: (i ^ j) % 3 != h)},
    ),
}  # fmt: skip


def case(name: str) -> Call:
    nq, nk, heads, batch, options = CASES[name]
    return call(*qkv(nq, nk, heads=heads, batch=batch), **options())


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(pieces, "BUDGET", 8 << 10)


# -- The memory ----------------------------------------------------------------------------------------------------


def long_problem(name: str) -> Problem:
    """A call of tensors without memory."""
    mask, n, heads = LONG[name]
    return of_length(mask(), n, heads)


def of_length(mask: tw.Mask, n: int, heads: tuple[int, int]) -> Problem:
    q, k, v = (torch.empty(1, n, h, 128, dtype=torch.bfloat16, device="meta") for h in (heads[0], *heads[1:] * 2))
    extras, seed, text = assemble(q.requires_grad_(), k, v, Options(mask=mask))
    return replace(check(q, k, v, extras, seed, parse_spec(text)), device=torch.device("cpu"))


def blocks(batch: int, heads: int, rows: int, count: int) -> Tensor:
    return torch.empty(batch, heads, rows, count, dtype=torch.int32, device="meta")


N = 131072
LONG = {
    "moba": (lambda: tw.causal() & tw.selected(blocks(1, 32, N, 12), 4096), N, (32, 32)),
    "moba or window": (
        lambda: tw.causal() & (tw.selected(blocks(1, 32, N, 12), 4096) | tw.window(left=99)),
        N,
        (32, 32),
    ),
    "moba-512": (lambda: tw.causal() & tw.selected(blocks(1, 32, N, 8), 512), N, (32, 32)),
    "a million": (lambda: tw.causal() & tw.selected(blocks(1, 4, 8 * N, 8), 512), 8 * N, (4, 4)),
    "grouped": (lambda: tw.causal() & tw.selected(blocks(1, 4, N, 16), 64), N, (64, 4)),
    "video": (lambda: tw.selected(blocks(1, 16, N // 64, 205), 64, 64), N, (16, 16)),
    "keep": (lambda: tw.keep(lambda b, h, i, j: (i * j + h) % 3 == 0), N, (8, 8)),
    "keep-for-all": (lambda: tw.keep(lambda b, h, i, j: (i * j) % 3 == 0), N, (8, 8)),
}


@pytest.mark.parametrize("choose", BOTH, ids=["forward", "backward"])
@pytest.mark.parametrize("name", LONG)
def test_the_bits_of_a_piece_take_no_more_than_they_may(name, choose):
    p = long_problem(name)
    config = choose(p)
    assert pieces.in_pieces(p, config)
    read = (config.keys.tile_m, True) if choose is backward_config.choose else (config.tiles.tile_n, False)
    for cut in pieces.cut(p, config):
        own = problem_of(p, cut)
        if pieces.gathers(p, config):
            assert gathered_bytes(
                own, own.batch * own.heads_k * own.seqlen_q, choose is backward_config.choose
            ) <= blockwise.room(p)
            continue
        tiles = masks.BitsOf(own, *read)
        assert bytes_of_bits(own, *read) <= BUDGET
        assert (
            4 * tiles.layout(seen=True).places[""] <= BUDGET * 9 / 8
        )  # with lists of tiles, and of the keys that are seen
        assert own.spec.region.selections == () or "//" in str(own.spec.region.selections[0].args[-1])


def test_pieces_of_one_head_are_few():
    """One head has 2 GiB of bits: nothing is added up but the gradients of two pieces."""
    p = long_problem("moba or window")
    found = pieces.cut(p, backward_config.choose(p))
    assert len(found) == 64
    assert {cut.end for cut in found} == {N // 2, N}


@pytest.mark.parametrize("choose", BOTH, ids=["forward", "backward"])
@pytest.mark.parametrize("name", CASES)
def test_every_head_has_every_query_once(name, choose, small):
    p = case(name).p
    found, times = pieces.cut(p, choose(p)), torch.zeros(p.batch, p.seqlen_q, p.heads_q)
    assert len(found) > 1
    for cut in found:
        take(times, cut.of_q).add_(1)
        assert cut.heads_q == tuple(p.group * h for h in cut.heads)
    assert (times == 1).all()


# -- The values ----------------------------------------------------------------------------------------------------


def attend(config: Formed, arguments: list) -> None:
    """What the kernels of a launch compute, by the bits and lists that it gets."""
    t = dict(zip(names_of(flat(config.parameters)), arguments, strict=True))
    backward = isinstance(config, backward_config.Backward)
    prefix, crossing = ("keys_", config.keys.tile_m) if backward else ("", config.tiles.tile_n)
    tiles = BitTiles(*(t[prefix + name].contiguous() for name in ("blocks", "work", "bits", "section")))
    found = pairs_of(tiles, None, crossing, backward)
    kept = (found.mT if backward else found)[..., : t["q"].shape[1], : t["k"].shape[1]]
    q, k, v = (t[name].double().transpose(1, 2) for name in "qkv")
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    s = (scale * q @ k.mT).masked_fill(~kept, -torch.inf)
    if not backward:
        sink = (t["sink"].double() if t["sinks"] else torch.full((q.shape[1],), -torch.inf)).view(1, -1, 1, 1)
        whole = torch.cat([s, sink.expand(*s.shape[:-1], 1).to(s)], -1)
        lse = whole.logsumexp(-1)
        p = (s - lse.unsqueeze(-1)).exp().nan_to_num(0)
        t["o"].copy_((p @ v).transpose(1, 2))
        t["lse"].copy_(lse)
        return
    do, o = (t[name].double().transpose(1, 2) for name in ("do", "o"))
    p = (s - t["lse"].double().unsqueeze(-1)).exp().nan_to_num(0)
    delta = (do * o).sum(-1) - t["dlse"]
    ds = p * (do @ v.mT - delta.unsqueeze(-1))
    t["delta"][..., : q.shape[2]].copy_(delta)
    t["dq"].copy_(scale * (ds @ k).transpose(1, 2))
    for name, x in (("dk", scale * ds.mT @ q), ("dv", p.mT @ do)):
        t[name].copy_(x.unflatten(1, (-1, group)).sum(2).transpose(1, 2))


def both(c: Call) -> tuple[Output, Grads]:
    """The results of the plans."""
    plans = [PiecewisePlan(c.p, choose(c.p)) for choose in BOTH]
    assert all(pieces.in_pieces(c.p, plan.config) for plan in plans)
    out = plans[0].forward(c.t)
    return out, plans[1].backward(c.t, out, c.do, c.dlse)


@pytest.mark.parametrize("name", CASES)
def test_the_pieces_together_are_the_call(name, small, monkeypatch):
    stand_in(monkeypatch, attend)
    c = case(name)
    errors = c.expected().judge(accuracy.tensors(*both(c)))
    assert not [str(e) for e in errors if not e.ok]


def test_what_no_query_of_a_head_sees_touches_nothing(small, monkeypatch):
    stand_in(monkeypatch, attend)
    c = call(*qkv(300, 300, heads=(2, 2)), mask=tw.causal() & tw.selected(entries(1, 2, 300, 2, blocks=2), 100))
    for x in (c.t.k, c.t.v):
        x[:, 200:] = torch.nan
    out, grads = both(c)
    assert all(x.isfinite().all() for x in (out.o, grads.dq, grads.dk, grads.dv))


def test_the_kernels_source_is_right_on_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "BUDGET", 4 << 10)

    def forward(plan, t):
        return test_forward.emulate_kernel(Call(plan.problem, t, None, None), plan.config, ctas=2)

    def backward(plan, t, out, do, dlse):
        return test_backward.emulate_kernels(Call(plan.problem, t, do, dlse), plan.config, 3, out)

    c = call(*qkv(200, 200, heads=(2, 1)), mask=tw.causal() & tw.selected(entries(1, 1, 200, 2, blocks=4), 64))
    monkeypatch.setattr(ForwardPlan, "forward", forward)
    monkeypatch.setattr(BackwardPlan, "backward", backward)
    errors = c.expected().judge(accuracy.tensors(*both(c)))
    assert not [str(e) for e in errors if not e.ok]


@pytest.mark.parametrize("name", ["moba", "keep"])
def test_bits_are_freed_before_those_of_the_next_piece_are_made(name, small, monkeypatch):
    """A mask without tensors too, of which a plan would keep them for ever."""
    stand_in(monkeypatch, attend)
    alive, most, making = [], [], masks.BitsOf.making

    def counted(self, *args, **kwargs):
        make = making(self, *args, **kwargs)

        def made(extras, device):
            most.append(sum(x() is not None for x in alive))
            found = make(extras, device)
            alive.append(weakref.ref(found))
            return found

        return made

    monkeypatch.setattr(masks.BitsOf, "making", counted)
    c = case(name)
    for _ in range(2):
        both(c)
    assert len(most) > 4
    assert max(most) == 0
    assert not any(x() for x in alive)


# -- What is told --------------------------------------------------------------------------------------------------


def test_the_cut_is_told():
    p = long_problem("video")
    assert Hopper().refused(p) == []
    assert Hopper().pieces(p) == (
        "8 of 1 batch element, 2 key heads and 131072 queries, as a bit for each pair may take 6.44 GiB, above 1 GiB"
    )
    assert Hopper().pieces(call(*qkv(300, 300), causal=True).p) == ""


def test_a_call_of_pieces_is_planned_as_such(small):
    c = case("moba")
    hopper = Hopper()
    assert isinstance(hopper._plan(c.p), PiecewisePlan)
    make, config = hopper.planned(c.p)
    assert make(c.p, config).whole.pieces
    assert hopper.direct(c.p) is None
    assert hopper.direct_of(hopper.planned(c.p)) is None


def test_a_piece_of_an_attention_is_cut_too(small, monkeypatch):
    """As a rank has it: keys and queries in the places of the whole."""
    stand_in(monkeypatch, attend)
    mask = tw.causal() & tw.selected(entries(1, 2, 600, 2, blocks=12), 64)
    c = call(*qkv(300, 400, heads=(2, 2)), mask=mask, piece=tw.piece.Piece(128, 64, 600, 700))
    out = PiecewisePlan(c.p, forward_config.choose(c.p)).forward(c.t)
    expected = Reference().forward(c.p, c.t)
    assert torch.allclose(out.lse, expected.lse, atol=1e-5)
    assert torch.allclose(out.o.float(), expected.o.float(), atol=2e-2)
