"""Decoding on Hopper: the kernel's source on the emulated machine, in any order of its CTAs, and which calls are its own."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tilewise as tw
from bench.testing import Call, call, normal, paged_call
from tests.backends.hopper import emulated_decoding
from tests.backends.hopper.launches import stand_in
from tests.backends.hopper.test_pages import emulate_pages
from tests.backends.paged import Case
from tilewise import accuracy, dispatch
from tilewise.backends.base import Output
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.config import cap_of
from tilewise.backends.hopper.decoding import choice, config
from tilewise.backends.hopper.forward import paged_config
from tilewise.backends.hopper.forward.paged_config import page_rows

KIND = {"heads": (4, 2), "dims": (128, 128), "dtype": torch.bfloat16}


def emulate(
    c: Call, shares: int, order: list[int] | None = None, kernel: config.DecodingConfig | None = None, segment: int = 1
) -> Output:
    """o and lse of a call, from the source of its kernel, or of ``kernel``, with so many shares; of segments, 0: a CTA for each."""
    p, found = c.p, kernel or choice.fitting(c.p)
    shares = shares or choice.shares_of(p, segment, found.tiles.tile_n)
    sinks = int(p.spec.sink_slot is not None)
    lengths = c.t.seqlens_k if p.paged else torch.zeros(1, dtype=torch.int32)
    table = c.t.block_table if p.paged else lengths[None]
    log2_e, cap = math.log2(math.e), cap_of(p)
    scales = (log2_e * p.softmax_scale, 0.0) if cap is None else (log2_e * cap, 2 * log2_e * p.softmax_scale / cap)
    numbers = (
        shares,
        segment,
        int(p.paged),
        sinks,
        *scales,
        *choice.ends(p),
        lengths.numpy(),
        table.numpy(),
        p.k.shape[0],
        page_rows(p.k),
    )
    sink = torch.full((p.heads_q,), torch.nan) if c.t.sink is None else c.t.sink.float()
    arrays = (x.detach().float().numpy() for x in (c.t.q.transpose(0, 1), c.t.k, c.t.v, sink))
    o, lse = (torch.from_numpy(np.array(x)) for x in emulated_decoding.run(found, *arrays, numbers, order))
    return Output(o.to(p.dtype).transpose(0, 1), lse.permute(2, 1, 0))


def wrong(c: Call, out: Output) -> list[str]:
    return [str(e) for e in c.expected().judge(accuracy.tensors(out, None)) if not e.ok]


SINK = {"options": lambda: {"sink": normal(4, seed=3), "causal": True}}


def window(left: int, right: int = 0) -> dict:
    return {"options": lambda: {"mask": tw.window(left, right)}}


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
    "pages-of-16": (Case(16, (0, 1, 15, 16, 17, 300), **KIND), 3),
    "pages-of-48-d64": (Case(48, (500, 0, 47, 49), **KIND | {"dims": (64, 64)} | SINK), 3),
    "sixteen-heads": (Case(64, (300, 70), **KIND | {"heads": (16, 1)}), 3),
    "nine-heads-d64": (Case(64, (300, 70, 0), **KIND | {"heads": (9, 1), "dims": (64, 64)}), 3),
    "queries-see-all": (Case(64, (300, 70, 2), rows=3, **KIND), 3),
    "more-queries-than-keys": (Case(64, (2, 65, 0, 300), rows=4, **KIND | SINK), 3),
    "queries-of-eight-heads": (
        Case(16, (64, 65, 129), rows=2, **KIND | {"heads": (8, 1)}, options=lambda: {"causal": True}),
        2,
    ),
    "four-queries-of-eight-heads": (Case(64, (300, 70, 2), rows=4, **KIND | {"heads": (8, 1)} | window(300)), 4),
    "sixty-four-rows": (Case(16, (64, 65, 250), rows=16, **KIND | {"heads": (4, 1)} | window(300)), 2),
    "thirty-heads-d64": (Case(16, (700, 130, 0), **KIND | {"heads": (30, 1), "dims": (64, 64)}), 9),
    "d256": (Case(16, (0, 64, 65, 300), **KIND | {"dims": (256, 256)}), 5),
    "d256-queries": (Case(64, (200, 65, 300), rows=5, **KIND | {"heads": (4, 1), "dims": (256, 256)} | window(63)), 5),
    "window": (Case(64, (300, 64, 40, 0, 1000), **KIND | window(63)), 3),
    "window-of-queries": (Case(64, (300, 64, 3, 66, 1000), rows=4, **KIND | window(100)), 7),
    "window-to-the-right": (Case(16, (300, 15, 66), rows=4, **KIND | window(15, 1)), 3),
    "d80": (Case(64, (300, 70, 0), **KIND | {"dims": (80, 80)} | SINK), 3),
    "d192-queries": (Case(16, (200, 65), rows=5, **KIND | {"heads": (4, 1), "dims": (192, 192)} | window(63)), 5),
    "d8": (Case(64, (300, 70), **KIND | {"dims": (8, 8), "heads": (16, 1)}), 3),
    "softcap": (Case(64, (300, 0, 64), **KIND, options=lambda: {"score": tw.softcap(2.0)}), 3),
    "softcap-d256": (
        Case(16, (300, 70), **KIND | {"dims": (256, 256)}, options=lambda: {"score": tw.softcap(0.5), "causal": True}),
        3,
    ),
    "window-d64": (Case(16, (900, 130), rows=3, **KIND | {"heads": (10, 2), "dims": (64, 64)} | window(127)), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_the_source_computes_attention(name):
    case, shares = CASES[name]
    c = case.call()
    assert Hopper().refused(c.p) == []
    assert not wrong(c, emulate(c, shares))


def test_a_number_outside_the_pool_leaves_other_sequences_as_they_are():
    c = Case(64, (130, 70), **KIND).call()
    expected = emulate(c, 3)
    c.t.block_table[0, :2] = torch.tensor([2**30, -7])
    got = emulate(c, 3)  # an address outside raises here
    assert torch.equal(got.o[1], expected.o[1])
    assert torch.equal(got.lse[1], expected.lse[1])


def emulated_launch(kernel: config.DecodingConfig, arguments: list) -> None:
    """In place of a compiled kernel: its source on the emulated machine, over the tensors of a launch."""
    q, k, v, o, lse, sink, *numbers, seqlens_k, block_table, part_o, part_lse, counts, num_pages, page_rows = arguments
    tiles, heads_k = kernel.tiles, k.shape[2]
    given = *numbers, seqlens_k.numpy(), block_table.numpy(), num_pages, page_rows
    states = emulated_decoding.states_of(kernel, q.shape[1], k, given)
    assert part_o.shape == (states, tiles.fours, 32 * tiles.row_warps, 4)
    assert part_lse.shape == (states, 32 * tiles.row_warps, 2 * tiles.own_rows)
    assert counts.numel() >= q.shape[1] * heads_k
    assert not counts.any()
    apart = k.stride(0) // k.stride(1) if k.shape[0] > 1 else k.shape[1]
    results = emulated_decoding.run(kernel, *(x.float().numpy() for x in (q, k, v, sink)), given, apart=apart)
    for x, found in zip((o, lse), results, strict=True):
        x.copy_(torch.from_numpy(found))


@pytest.mark.parametrize(
    "name", ["lengths", "sixteen-heads", "queries-of-eight-heads", "window-of-queries", "thirty-heads-d64"]
)
def test_a_launch_has_what_the_kernel_reads_and_writes(name, monkeypatch):
    stand_in(monkeypatch, emulated_launch)
    case, shares = CASES[name]
    monkeypatch.setattr(choice.devices, "of", lambda device: SimpleNamespace(cores=shares * case.heads[1]))
    c = case.call()
    assert not wrong(c, Hopper().forward(c.p, c.t))


def test_a_launch_over_dense_keys_has_what_the_kernel_reads(monkeypatch):
    stand_in(monkeypatch, emulated_launch)
    monkeypatch.setattr(choice.devices, "of", lambda device: SimpleNamespace(cores=7))
    q, k, v = (normal(3, h, n, 64, dtype=torch.bfloat16, seed=h) for n, h in ((1, 4), (601, 2), (601, 2)))
    options = {"mask": tw.window(300, 0), "sink": normal(4)}
    c = call(*(x.transpose(1, 2) for x in (q, k[:, :, 1:], v[:, :, 1:])), **options).forward_only()
    assert choice.choose(c.p) is not None
    assert not wrong(c, Hopper().forward(c.p, c.t))


ENDS = {
    "lengths": lambda n: {"mask": tw.key_lengths(torch.tensor([0, n, 1, 130, 64]))},
    "one-length": lambda n: {"mask": tw.key_lengths(torch.tensor(77))},
    "left-and-right": lambda n: {"mask": tw.key_range(torch.tensor([0, 3, 200, 64, 9]), torch.tensor([n, n, 201, 63, 300]))},
    "a-window-of-lengths": lambda n: {"mask": tw.window(100, 0) & tw.key_range(torch.tensor([0, n - 5, n, 2, n - 300]), n)},
    "documents": lambda n: {"mask": tw.documents(torch.arange(n) // 100)},
    "an-end-alone": lambda n: {"mask": tw.prefix(300)},
    "two-ends": lambda n: {"mask": tw.prefix(torch.tensor([0, 3, 300, n, n + 5])) & tw.key_lengths(torch.tensor([9, n, 1, 30, 64]))},
    "past-the-end": lambda n: {"mask": tw.key_range(torch.tensor([-7, 0, n + 3, 5, 1]), torch.tensor([n + 9, -1, n + 5, 6, n]))},
}  # fmt: skip


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(("heads", "d"), [((4, 2), 64), ((16, 1), 128)])
@pytest.mark.parametrize("name", ENDS)
def test_a_launch_over_dense_keys_reads_their_ends(name, heads, d, heads_first, monkeypatch):
    stand_in(monkeypatch, emulated_launch)
    monkeypatch.setattr(choice.devices, "of", lambda device: SimpleNamespace(cores=7))
    q, k, v = (
        normal(5, n, h, d, dtype=torch.bfloat16, seed=n + h)
        for n, h in ((1, heads[0]), (601, heads[1]), (601, heads[1]))
    )
    options = ENDS[name](601)
    if heads_first:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    kept = tw.show_mask(options["mask"], 1, 601, batch=0)
    for x in (k, v):  # what nobody sees may be anything
        x[0, [mark == "." for mark in kept.split()]] = torch.nan
    c = call(q, k, v, **options, sink=normal(heads[0])).forward_only()
    assert choice.reads_ends(c.p)
    assert choice.choose(c.p) is not None
    assert not wrong(c, Hopper().forward(c.p, c.t))


def test_ends_of_each_head_are_read_elsewhere():
    q, k, v = (normal(2, n, 2, 64, dtype=torch.bfloat16) for n in (1, 601, 601))
    c = call(q, k, v, mask=tw.key_range(0, torch.tensor([[5, 600], [3, 4]]))).forward_only()
    assert not choice.reads_ends(c.p)
    assert choice.choose(c.p) is None


@pytest.mark.parametrize("name", ["lengths", "a-sequence-in-many", "d64", "queries-of-eight-heads", "thirty-heads-d64"])
def test_whoever_comes_last_merges_the_same_bits(name):
    case, shares = CASES[name]
    c, ctas = case.call(), list(range(shares * case.heads[1]))
    expected = emulate(c, shares)
    for order in (ctas[::-1], random.Random(0).sample(ctas, len(ctas))):
        got = emulate(c, shares, order)
        assert torch.equal(got.o, expected.o)
        assert torch.equal(got.lse, expected.lse)


DENSE = {
    "causal": ((1, 4), {"causal": True}),
    "queries": ((4, 4), {"causal": True}),
    "window": ((1, 4), {"mask": tw.window(70, 0)}),
    "window-of-queries": ((3, 10), {"mask": tw.window(64, 0)}),
}


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(("d", "keys", "shares"), [(128, 300, 3), (64, 1000, 5), (128, 1, 2)])
@pytest.mark.parametrize("name", DENSE)
def test_dense_keys_are_one_page_a_sequence(d, keys, shares, name, heads_first):
    (rows, heads), options = DENSE[name]
    q, k, v = (normal(3, n, h, d, dtype=torch.bfloat16, seed=n + h) for n, h in ((rows, heads), (keys, 2), (keys, 2)))
    if heads_first:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    c = call(q, k, v, **options).forward_only()
    assert choice.fitting(c.p) is not None
    assert not wrong(c, emulate(c, shares))


def problem(options: dict | None = None, **case: object):
    case = Case(64, (100, 70), **KIND | case)
    q, cache, others = case.draw()
    return paged_call(q, cache, **others | (options or {})).p


NONE = {
    "thirty-three-queries-of-two-heads": lambda: problem(rows=33),
    "no-queries": lambda: problem(rows=0),
    "packed": lambda: problem(rows=(1, 1)),
    "sixty-five-heads": lambda: problem(heads=(65, 1)),
    "d264": lambda: problem(dims=(264, 264)),
    "values-of-another-width": lambda: problem(dims=(128, 64)),
    "fp32": lambda: problem(dtype=torch.float32),
    "window-shorter-than-a-box": lambda: problem({"mask": tw.window(62, 0)}),
    "band-that-ends-before-the-row": lambda: problem({"mask": lambda b, h, i, j: j < i + tw.offset}),
    "some-keys": lambda: problem({"mask": tw.key_range(0, 60)}),
    "score": lambda: problem({"score": lambda s, b, h, i, j: s + j}),
    "softcap-of-nine-rows": lambda: problem({"score": tw.softcap(5.0)}, heads=(9, 1)),
    "pages-of-8": lambda: paged_call(*Case(8, (100, 70), **KIND).draw()[:2]).p,
    "8-bits": lambda: problem(scales="heads"),
    "with-gradients": lambda: call(*(normal(2, n, 2, 128, dtype=torch.bfloat16) for n in (1, 70, 70))).p,
    "dropout": lambda: call(*(normal(2, n, 2, 128, dtype=torch.bfloat16) for n in (1, 70, 70)), dropout_p=0.5).forward_only().p,
    "keys-cut-off": lambda: call(
        *(normal(2, n, 2, 128, dtype=torch.bfloat16) for n in (1, 70, 70)), mask=tw.key_range(0, 60)
    ).forward_only().p,
}  # fmt: skip


@pytest.mark.parametrize("name", NONE)
def test_calls_that_have_no_such_kernel(name):
    assert choice.fitting(NONE[name]()) is None


def dense(queries: int, keys: int, d: int = 128):
    return call(*(normal(2, n, 2, d, dtype=torch.bfloat16) for n in (queries, keys, keys))).forward_only().p


@pytest.mark.parametrize(
    ("problem", "chosen"),
    [
        (lambda: Case(64, (100,), **KIND).call().p, True),
        (lambda: dense(1, 5), True),
        (lambda: dense(2, 15), False),
        (lambda: dense(64, 1007), False),
        (lambda: dense(64, 1008, 64), True),
    ],
    ids=[
        "one-sequence", "dense-keys",
        "few-keys-of-two", "few-keys-of-queries", "keys-of-queries",
    ],
)  # fmt: skip
def test_calls_that_another_forward_takes(problem, chosen):
    assert choice.fitting(problem()) is not None
    assert (choice.choose(problem()) is not None) == chosen


def test_a_step_of_decoding_has_one():
    found = choice.choose(problem())
    assert found == config.DecodingConfig("bf16", config.TILES[128, 8])
    assert found in config.shipped()


@pytest.mark.parametrize(
    ("case", "rows", "part"),
    [
        (Case(16, (100, 70), **KIND), 8, 16), (Case(48, (100,) * 2, 5, **KIND), 16, 16), (Case(128, (1, 1), 4, **KIND), 8, 64),
        (Case(64, (1, 1), 9, **KIND), 64, 64),
    ],
)  # fmt: skip
def test_rows_and_pages_choose_a_kernel(case, rows, part):
    found = choice.choose(case.call().p)
    assert found == config.DecodingConfig("bf16", config.TILES[128, rows], part)
    assert found in config.shipped()


@pytest.mark.parametrize(
    ("p", "rows"),
    [
        (Case(64, (100, 70), **KIND).call().p, 192),  # the table has a page more than the longest sequence
        (Case(64, (300, 70), rows=3, **KIND | window(99)).call().p, 102),
        (dense(1, 600), 600),
        (call(*(normal(2, n, 2, 128, dtype=torch.bfloat16) for n in (2, 600, 600)), mask=tw.window(99, 0)).forward_only().p, 101),
    ],
    ids=["pages", "window", "dense", "dense-window"],
)  # fmt: skip
def test_traffic_counts_the_keys_that_some_query_sees(p, rows):
    q_and_o, k_and_v = (2 * p.batch * n * 256 for n in (p.heads_q * p.seqlen_q, p.heads_k * rows))
    assert choice.fitting(p).traffic(p) == q_and_o + k_and_v


@pytest.mark.parametrize(("heads", "shares"), [((4, 2), 66), ((5, 5), 26), ((200, 200), 1)])
def test_each_multiprocessor_has_a_share(heads, shares, monkeypatch):
    monkeypatch.setattr(dispatch.devices, "of", lambda device: SimpleNamespace(cores=132))
    assert choice.shares_of(problem(heads=heads), 1, 64) == shares


SEGMENTS = ["lengths", "d64", "sixteen-heads", "window", "pages-of-16", "no-keys", "many-sequences", "softcap"]


@pytest.mark.parametrize("segment", [2, 3])
@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_compute_attention(name, segment):
    c = CASES[name][0].call()
    assert not wrong(c, emulate(c, 0, segment=segment))


def test_a_sequence_in_segments_has_the_same_bits_whatever_its_batch_mates():
    q, k, v = (normal(4, n, h, 64, dtype=torch.bfloat16, seed=h) for n, h in ((1, 4), (1100, 2), (1100, 2)))
    whole, alone = (call(*(x[:n] for x in (q, k, v)), deterministic=True).forward_only() for n in (4, 1))
    segment = choice.segment_of(whole.p, 128)
    together, one = emulate(whole, 0, segment=segment), emulate(alone, 0, segment=segment)
    assert torch.equal(together.o[:1], one.o)
    assert torch.equal(together.lse[:1], one.lse)
    even = emulate(whole, 7)
    assert not torch.equal(even.o, together.o)  # other shares, other sums


@pytest.mark.parametrize("name", ["lengths", "d64"])
def test_a_deterministic_launch_has_what_its_segments_need(name, monkeypatch):
    stand_in(monkeypatch, emulated_launch)
    case = CASES[name][0]
    q, cache, others = case.draw()
    c = paged_call(q, cache, **others, deterministic=True)
    assert choice.segment_of(c.p, choice.fitting(c.p).tiles.tile_n) > 1
    assert not wrong(c, Hopper().forward(c.p, c.t))


# -- Deterministic everywhere --------------------------------------------------------------------------------------

EVERYWHERE = {
    "pages-of-16": Case(16, (0, 1, 128, 129, 300), **KIND | SINK),
    "d64": Case(64, (820, 70), rows=3, **KIND | {"dims": (64, 64)}, options=lambda: {"causal": True}),
    "window": Case(16, (0, 1, 128, 129, 300, 600), options=lambda: {"mask": tw.causal() & tw.window(200)}, **KIND),
    "window-of-3-rows": Case(64, (820, 70), rows=3, options=lambda: {"mask": tw.causal() & tw.window(300)}, **KIND),
    "d256": Case(64, (500, 70), **KIND | {"dims": (256, 256)}, options=lambda: {"causal": True}),
}


@pytest.mark.parametrize("blocks", [2, 4, None], ids=lambda n: f"{n or 'all'}-blocks")
@pytest.mark.parametrize("name", EVERYWHERE)
def test_blocks_from_the_last_to_the_first_give_the_bits_of_a_prompt_s_kernel(name, blocks):
    case = EVERYWHERE[name]
    q, cache, options = case.draw()
    c = paged_call(q, cache, **options, deterministic="everywhere")
    kernel, prompt_kernel = choice.fitting(c.p), paged_config.choose(c.p)
    segment = choice.segment_of(c.p, kernel.tiles.tile_n)
    assert segment == (prompt_kernel.tiles.segment or choice.ONE_SEGMENT)
    if blocks and prompt_kernel.tiles.segment:
        segment, tiles = blocks, replace(prompt_kernel.tiles, segment=blocks)
        prompt_kernel = replace(prompt_kernel, tiles=tiles)
    found = emulate(c, 0, segment=segment)
    assert wrong(case.call(), found) == []
    few = emulate(c, 2, segment=segment)
    assert torch.equal(few.o, found.o)
    assert torch.equal(few.lse, found.lse)
    prompt = emulate_pages(c, prompt_kernel, 2)
    assert torch.equal(found.o, prompt.o)
    assert torch.equal(found.lse, prompt.lse)


@pytest.mark.parametrize("blocks", [2, None], ids=lambda n: f"{n or 'all'}-blocks")
def test_maxima_that_rise_from_block_to_block_leave_the_bits_of_quiet_rows_alone(blocks):
    q, cache, options = EVERYWHERE["d64"].draw()
    for n, factor in enumerate((9, 7, 5.5, 4, 2.5, 1)):  # blocks are visited from the last, the seventh, to the first
        cache.k_pages[cache.block_table[0, 2 * n : 2 * n + 2].long()] *= factor
    q[:, :, 1::2] *= 0.1
    c = paged_call(q, cache, **options, deterministic="everywhere")
    prompt_kernel = paged_config.choose(c.p)
    assert prompt_kernel.steady
    tiles = replace(prompt_kernel.tiles, segment=blocks or prompt_kernel.tiles.segment)
    found, prompt = emulate(c, 0, segment=tiles.segment), emulate_pages(c, replace(prompt_kernel, tiles=tiles), 2)
    assert torch.equal(found.o, prompt.o)
    assert torch.equal(found.lse, prompt.lse)


def test_a_segment_whose_scores_are_all_infinite_adds_nothing():
    q, cache, options = EVERYWHERE["d64"].draw()
    cache.k_pages[cache.block_table[0, 4:8].long()] = -3e38  # keys 256 to 511, of which two blocks are a segment
    c = paged_call(q.abs(), cache, **options, deterministic="everywhere")
    prompt_kernel = paged_config.choose(c.p)
    found = emulate(c, 0, segment=2)
    prompt = emulate_pages(c, replace(prompt_kernel, tiles=replace(prompt_kernel.tiles, segment=2)), 2)
    assert not found.o.isnan().any()
    assert torch.equal(found.o, prompt.o)
    assert torch.equal(found.lse, prompt.lse)
