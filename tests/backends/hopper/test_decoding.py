"""Decoding on Hopper: the kernel's source on the emulated machine, in any order of its CTAs, and which calls are its own."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tilewise as tw
from tests.backends.hopper import emulated_decoding
from tests.backends.paged import Case
from tilewise import accuracy, dispatch
from tilewise.backends.base import Output
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.decoding import choice, config
from tilewise.backends.hopper.forward.paged_config import page_rows
from tilewise.testing import Call, call, normal, paged_call

KIND = {"heads": (4, 2), "dims": (128, 128), "dtype": torch.bfloat16}


def emulate(
    c: Call, shares: int, order: list[int] | None = None, kernel: config.DecodingConfig | None = None
) -> Output:
    """o and lse of a call, from the source of its kernel, or of ``kernel``, with so many shares."""
    p, found = c.p, kernel or choice.choose(c.p)
    sinks = int(p.spec.sink_slot is not None)
    lengths = c.t.seqlens_k if p.paged else torch.zeros(1, dtype=torch.int32)
    table = c.t.block_table if p.paged else lengths[None]
    scale2 = math.log2(math.e) * p.softmax_scale
    numbers = shares, int(p.paged), sinks, scale2, lengths.numpy(), table.numpy(), p.k.shape[0], page_rows(p.k)
    sink = torch.full((p.heads_q,), torch.nan) if c.t.sink is None else c.t.sink.float()
    arrays = (x.detach().float().numpy() for x in (c.t.q.flatten(0, 1)[None], c.t.k, c.t.v, sink))
    o, lse = (torch.from_numpy(np.array(x[0])) for x in emulated_decoding.run(found, *arrays, numbers, order))
    return Output(o.to(p.dtype).unsqueeze(1), lse.mT.unsqueeze(-1))


def wrong(c: Call, out: Output) -> list[str]:
    return [str(e) for e in c.expected().judge(accuracy.tensors(out, None)) if not e.ok]


SINK = {"options": lambda: {"sink": normal(4, seed=3), "causal": True}}
CASES = {
    "lengths": (Case(64, (0, 1, 63, 64, 65, 300), **KIND), 3),
    "one-share": (Case(64, (130, 0, 65), **KIND), 1),
    "whole-sequences": (Case(64, (128, 128, 128), **KIND), 3),
    "a-sequence-in-many": (Case(128, (10, 1500, 10), **KIND | SINK), 8),
    "more-shares-than-blocks": (Case(64, (65, 5), **KIND | SINK), 40),
    "no-keys": (Case(64, (0, 0), **KIND | SINK), 2),
    "heads-first": (Case(128, (200, 70), **KIND, heads_first=True), 2),
    "one-head": (Case(256, (300, 70), **KIND | {"heads": (3, 3)}), 2),
    "eight-heads-fp16": (Case(64, (300, 70), **KIND | {"heads": (8, 1), "dtype": torch.float16}), 3),
    "seven-heads": (Case(64, (300, 70, 1), **KIND | {"heads": (7, 1)}), 2),
    "many-sequences": (Case(64, tuple(13 * n % 200 for n in range(70)), **KIND | {"heads": (2, 1)}), 9),
    "d64": (Case(64, (0, 1, 127, 128, 129, 700), **KIND | {"dims": (64, 64)}), 3),
    "d64-one-page": (Case(320, (320, 70, 0), **KIND | {"dims": (64, 64)} | SINK), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_the_source_computes_attention(name):
    case, shares = CASES[name]
    c = case.call()
    assert Hopper().refused(c.p) == []
    assert not wrong(c, emulate(c, shares))


@pytest.mark.parametrize("name", ["lengths", "a-sequence-in-many", "d64"])
def test_whoever_comes_last_merges_the_same_bits(name):
    case, shares = CASES[name]
    c, ctas = case.call(), list(range(shares * case.heads[1]))
    expected = emulate(c, shares)
    for order in (ctas[::-1], random.Random(0).sample(ctas, len(ctas))):
        got = emulate(c, shares, order)
        assert torch.equal(got.o, expected.o)
        assert torch.equal(got.lse, expected.lse)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(("d", "keys", "shares"), [(128, 300, 3), (64, 1000, 5), (128, 1, 2)])
def test_dense_keys_are_one_page_a_sequence(d, keys, shares, heads_first):
    q, k, v = (normal(3, n, h, d, dtype=torch.bfloat16, seed=n + h) for n, h in ((1, 4), (keys, 2), (keys, 2)))
    if heads_first:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    c = call(q, k, v, causal=True).forward_only()
    assert choice.choose(c.p) is not None
    assert not wrong(c, emulate(c, shares))


def problem(options: dict | None = None, **case: object):
    case = Case(64, (100, 70), **KIND | case)
    q, cache, others = case.draw()
    return paged_call(q, cache, **others | (options or {})).p


NONE = {
    "one-sequence": lambda: paged_call(normal(1, 1, 4, 128, dtype=torch.bfloat16), Case(64, (100,), **KIND).cache()).p,
    "two-queries": lambda: problem(rows=2),
    "packed": lambda: problem(rows=(1, 1)),
    "nine-heads": lambda: problem(heads=(9, 1)),
    "d96": lambda: problem(dims=(96, 96)),
    "values-of-another-width": lambda: problem(dims=(128, 64)),
    "fp32": lambda: problem(dtype=torch.float32),
    "window": lambda: problem({"mask": tw.window(40, 0)}),
    "score": lambda: problem({"score": tw.softcap(5.0)}),
    "deterministic": lambda: problem({"deterministic": True}),
    "pages-of-16": lambda: paged_call(*Case(16, (100, 70), **KIND).draw()[:2]).p,
    "8-bits": lambda: problem(scales="heads"),
    "with-gradients": lambda: call(*(normal(2, n, 2, 128, dtype=torch.bfloat16) for n in (1, 70, 70))).p,
    "dropout": lambda: call(*(normal(2, n, 2, 128, dtype=torch.bfloat16) for n in (1, 70, 70)), dropout_p=0.5).forward_only().p,
    "keys-cut-off": lambda: call(
        *(normal(2, n, 2, 128, dtype=torch.bfloat16) for n in (1, 70, 70)), mask=tw.key_range(0, 60)
    ).forward_only().p,
}  # fmt: skip


@pytest.mark.parametrize("name", NONE)
def test_calls_that_have_no_such_kernel(name):
    assert choice.choose(NONE[name]()) is None


def test_a_step_of_decoding_has_one():
    found = choice.choose(problem())
    assert found == config.DecodingConfig("bf16", config.TILES[128])
    assert found in config.shipped()


@pytest.mark.parametrize(("heads", "shares"), [((4, 2), 66), ((5, 5), 26), ((200, 200), 1)])
def test_each_multiprocessor_has_a_share(heads, shares, monkeypatch):
    monkeypatch.setattr(dispatch.devices, "of", lambda device: SimpleNamespace(cores=132))
    assert choice.shares_of(problem(heads=heads)) == shares
