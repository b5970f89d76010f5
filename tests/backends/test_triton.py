"""The Triton backend through Triton's interpreter, on CPU tensors; on a GPU the same contract runs in tests/gpu."""

import math
import subprocess
import sys
from dataclasses import astuple, replace

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

import tilewise as tw
from bench import cases
from tests import test_architectures
from tests.backends.contract import (
    HIDING,
    IN_NO_KERNEL,
    Contract,
    _columns_unseen,
    agree,
    call,
    normal,
    of_case,
    qkv,
    run,
)
from tilewise import device as devices
from tilewise import expr
from tilewise.backends.base import Output
from tilewise.backends.triton import Triton, config, interpreting, sheet
from tilewise.backends.triton.config import INTERPRETED, MAX_HEAD_DIM, MAX_LATENT_DIM, TABLE, Config
from tilewise.backends.triton.group_parts import group_parts
from tilewise.backends.triton.host.compile_all import TARGETS
from tilewise.backends.triton.host.leaf_sums import LeafSums
from tilewise.backends.triton.host.plan import Plan
from tilewise.backends.triton.host.terms import split_into_terms
from tilewise.backends.triton.kernels import emit as emitting
from tilewise.backends.triton.kernels.emit import emit
from tilewise.backends.triton.kernels.leaf_reads import leaf_layouts
from tilewise.backends.triton.kernels.writer import OPERATIONS
from tilewise.backends.triton.paging import PagedConfig, few_config
from tilewise.backends.triton.reads import PairReads, predicate_blocks
from tilewise.backends.triton.tiles import (
    Streams,
    Tiles,
    columns,
    fit,
    pieces,
    program_limit,
    shared_memory,
    width,
)
from tilewise.leaf_gradients import COLUMNS, DIAGONALS, ROWS, SCATTER, STORE, TILES, classify
from tilewise.problem import check
from tilewise.spec import Options, assemble, parse_spec

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="kernels are not interpreted (tests/conftest.py)"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of infinities that the mathematics selects away
]


# The interpreter takes 5 ms a step: with all of the contract this file would run for five minutes. Left out here, and run on a
# GPU: n1000 (n129 has ragged ends too); sizes without a mask, and fp16, where a like case runs; masks and scores of which one of
# two shapes, or a composition, runs.
TRIMMED = {
    *[
        f"{size}-full"
        for size in (
            "n63",
            "n129",
            "n1000",
            "more-keys",
            "more-queries",
            "dv-above-d",
            "d128",
            "mqa",
            "packed",
            "float16",
        )
    ],
    *["window-both", "window-right", "prefix", "key-range", "keep-odd", "softcap-30", "alibi", "n1000-causal"],
    *[f"{score}-causal-cross" for score in ("softcap-30", "softcap-2", "alibi", "relative")],
    "float16-window-alibi-sink",
}


class TestTriton(Contract):
    backend = Triton()

    @pytest.mark.parametrize(
        "case",
        [case for case in cases.tagged("contract") if case.name.removeprefix("contract-") not in TRIMMED],
        ids=lambda case: case.name.removeprefix("contract-"),
    )
    def test_agrees_with_the_oracle(self, case):
        agree(self.backend, of_case(case))

    # A moving end beside a fixed one, a predicate with lists of tiles, gradients scattered, by rows and by columns, and counters.
    @pytest.mark.parametrize("name", ["prefix", "blocks", "causal-bias", "causal-rows-and-columns", "dropout"])
    def test_pieces_of_an_attention_are_the_whole(self, name):
        super().test_pieces_of_an_attention_are_the_whole(name)

    @pytest.mark.parametrize(
        "form", ["expanded", "reversed-do"]
    )  # kernels read any strides alike; these two are copied or 0
    def test_strides_do_not_matter(self, form):
        super().test_strides_do_not_matter(form)

    # Of twelve, those that differ for a kernel: an interval, one by batch element, and a predicate with lists of tiles.
    @pytest.mark.parametrize("hiding", ["key-range", "key-lengths", "dense-per-head"])
    def test_keys_that_no_query_sees_never_touch_a_result(self, hiding):
        q, k, v = qkv()
        heads = [[_columns_unseen(tw.show_mask, HIDING[hiding](), b, h) for h in (0, 2)] for b in (0, 1)]
        hidden = torch.stack([torch.stack(line, 1) for line in heads]).unsqueeze(-1)
        clean = run(self.backend, call(q, k, v, mask=HIDING[hiding]()))
        dirty = call(q, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan), mask=HIDING[hiding]())
        for name, x in run(self.backend, dirty).items():
            assert torch.equal(x, clean[name]), name


# A tile of queries has rows 6, 7 and more: keys that they alone would see, by the predicate or farther right than the last query does.
@pytest.mark.parametrize(
    ("seen", "mask"),
    [
        (torch.arange(40) % 3 != 0, tw.keep(lambda b, h, i, j: (j % 3 != 0) | (i >= 6))),
        (torch.arange(40) < 26, tw.keep(lambda b, h, i, j: (j <= i + 20) & ((i + j) % 5 != 4))),
    ],
    ids=["opened", "farther-right"],
)
def test_rows_past_the_last_query_open_no_key(seen, mask):
    q, k, v = qkv(batch=1, nq=6, nk=40)
    seen = seen.view(1, 40, 1, 1)
    clean = run(Triton(), call(q, k, v, mask=mask).forward_only())
    dirty = run(Triton(), call(q, k.where(seen, torch.nan), v.where(seen, torch.nan), mask=mask).forward_only())
    assert {name for name, x in dirty.items() if not torch.equal(x, clean[name])} == set()


def test_partial_tiles_beside_a_tensor_of_pairs_stream_in_no_more_stages_than_others():
    q, k, v = qkv()
    plan = Plan(call(q, k, v, mask=tw.dense(normal(70, 70) > 0)).p, INTERPRETED)
    found = [plan.facts(replace(INTERPRETED.forward, num_stages=n), 1).partial_stages for n in (1, 2, 3)]
    assert found == [1, 2, 2]


def test_every_operation_of_the_language_can_be_written_or_is_refused():
    assert set(expr.OPERATIONS) - IN_NO_KERNEL | {"selected"} == OPERATIONS  # a search in a row is a read of its own


# What the contract's cases do not read: windows' bias, a clamped distance, v inside k.
@pytest.mark.parametrize("architecture", ["swin", "t5-encoder", "mla-absorbed"])
def test_calls_of_published_models_are_the_textbooks(architecture):
    test_architectures.agrees(architecture, "triton")


def test_a_table_is_read_at_quotients_and_remainders():
    table, w = normal(2, 13, 13).requires_grad_(), 7

    def score(s, b, h, i, j):
        return s + tw.lookup(table, h, i // w - j // w + w - 1, i % w - j % w + w - 1)

    agree(
        Triton(),
        call(*qkv(batch=2, nq=49, nk=49, hq=2, hk=2), mask=tw.keep(lambda b, h, i, j: i % 3 == j % 3), score=score),
    )


SMALL = Tiles(32, 32, 4, 1)
OTHER_TILES = {
    "small": Config(Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
    "wide": Config(Tiles(32, 128, 4, 1), Tiles(32, 128, 4, 1), Tiles(128, 32, 4, 1)),
    "tma": Config(*[Tiles(32, 32, 4, 3, tma=True)] * 3),
    "three-passes": Config(*[Tiles(32, 32, 4, 1, tma=True)] * 4),
    "terms": replace(INTERPRETED, products="bf16x6"),
    "terms-tma": Config(*[Tiles(32, 32, 4, 3, tma=True)] * 3, products="bf16x6"),
    "chunks": Config(*[Tiles(32, 32, 4, 2, tma=True, chunk=16)] * 3, products="bf16x6"),
    "columns": Config(*[Tiles(32, 32, 4, 2, tma=True, chunk=16, column_parts=2)] * 4, products="bf16x6"),
}


# Each with the cases that its shape could break.
@pytest.mark.parametrize(
    ("tiles", "name"),
    [
        ("small", "window-both-cross"),
        ("small", "window-or-first-cross"),
        ("wide", "gqa-causal"),
        ("wide", "packed-causal-cross"),
        ("tma", "gqa-causal"),
        ("tma", "packed-causal-cross"),
        ("tma", "regions-bias"),
        ("tma", "prefix-of-each-bias"),
        ("tma", "key-lengths-bias"),
        ("tma", "dense-bias"),
        ("small", "keep-odd-bias"),
        ("three-passes", "dropout-causal-alibi-sink"),
        ("terms", "dropout-causal-alibi-sink"),
        ("terms", "packed-causal-cross"),
        ("terms-tma", "gqa-causal"),
        ("terms-tma", "window-both-cross"),
        ("chunks", "gqa-causal"),
        ("chunks", "packed-causal-cross"),
        ("columns", "window-both-cross"),
        ("columns", "dropout-causal-alibi-sink"),
    ],
)
def test_tiles_do_not_change_the_result(tiles, name):
    agree(Triton(OTHER_TILES[tiles]), of_case(cases.named(f"contract-{name}")))


SPLIT = PagedConfig(*[Tiles(32, 32, 4, 1)] * 3, splits=4)


@pytest.mark.parametrize("sink", [False, True], ids=["no-sink", "sink"])
def test_split_keys_are_merged(sink):
    """And so are their largest scores."""
    q, k, v = qkv(batch=1, nq=5, nk=150, hq=4, hk=2)
    agree(
        Triton(replace(INTERPRETED, few=SPLIT)),
        call(q, k, v, causal=True, sink=normal(4) if sink else None, max_logit=sink),
    )


# Each with a case that programs which share a key tile's heads could break.
@pytest.mark.parametrize(
    ("tiles", "parts", "name"),
    [
        ("small", 4, "mqa-causal"),
        ("tma", 3, "gqa-causal"),
        ("tma", 2, "packed-causal-cross"),
        ("three-passes", 2, "dropout-causal-alibi-sink"),
        ("small", 2, "keep-odd-cross"),
        ("tma", 2, "bias-causal-cross"),
        ("terms", 2, "softcap-alibi-causal-cross"),
        ("small", 2, "packed-no-keys-causal-sink"),
    ],
)
def test_parts_of_a_group_add_up(tiles, parts, name):
    c = of_case(cases.named(f"contract-{name}"))
    assert c.p.group % parts == 0
    agree(Triton(replace(OTHER_TILES[tiles], group_parts=parts)), c)


def test_parts_of_a_group_keep_ds_for_a_broadcast_bias():
    c = call(*qkv(batch=2, nq=70, nk=72, hk=1), causal=True, score=tw.bias(normal(70, 72).requires_grad_()))
    tiles = replace(OTHER_TILES["tma"], group_parts=4)
    assert Plan(c.p, tiles).sheet
    agree(Triton(tiles), c)


def test_prepared_masks_give_the_same_result():
    q, k, v = qkv(batch=1, nq=100, nk=100, hq=2, hk=2)
    mask = tw.keep(lambda b, h, i, j: (i // 32 + j // 32) % 2 == 0) & tw.causal()
    plain, prepared = (run(Triton(), call(q, k, v, mask=m)) for m in (mask, mask.prepare(q, k)))
    assert all(torch.equal(plain[name], prepared[name]) for name in plain)


def test_latent_attention_has_gradients():
    q, k, v = qkv(batch=1, nq=40, nk=70, hq=2, hk=1, d=576, dv=512, dtype=torch.bfloat16)
    agree(Triton(), call(q, k, v, causal=True))


def test_wider_than_latent_attention_is_refused():
    q, k, v = qkv(batch=1, nq=4, nk=4, d=584, dv=512, dtype=torch.bfloat16)
    assert Triton().unsupported(call(q, k, v).p) == ["head_dim 584 is above 576"]
    q, k, v = qkv(batch=1, nq=4, nk=4, d=520, dv=520, dtype=torch.bfloat16)
    assert Triton().unsupported(call(q, k, v).p) == ["head_dim 520 of v is above 512"]
    q, k, v = qkv(batch=1, nq=4, nk=4, d=576, dv=512)
    assert Triton().unsupported(call(q, k, v).p) == ["head_dim 576 is above 512 in float32"]


@pytest.mark.parametrize("scale", [0.0, -0.3], ids=["zero", "negative"])
def test_any_softmax_scale_will_do(scale):
    q, k, v = qkv(batch=1, nq=40, nk=40, hq=2, hk=2)
    agree(Triton(), call(q, k, v, causal=True, softmax_scale=scale))


def test_packed_sequences_take_a_predicate():
    q, k, v = (x.flatten(0, 1) for x in qkv(batch=1, nq=90, nk=90))
    cu = torch.tensor([0, 33, 33, 80])
    agree(Triton(), call(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=lambda b, h, i, j: (i + j) % 3 != 0))


FUNCTIONS = {
    "arithmetic": lambda s, b, h, i, j: s * 0.5 + (i - j) / 7 - (j - i) // 3 + (i - 2 * j) % 5 - 2**-3,
    "rounding": lambda s, b, h, i, j: s + torch.round(s * 2) / 8 + torch.floor(s) / 16 - torch.trunc(s * 3) / 16,
    "exponentials": lambda s, b, h, i, j: torch.log1p(torch.exp(-s.abs())) + torch.expm1(s / 9) + torch.sigmoid(s),
    "powers": lambda s, b, h, i, j: s**2 / 9 - s**3 / 99 + (s.abs() + 1) ** 1.5 + torch.rsqrt(s * s + 1),
    "waves": lambda s, b, h, i, j: torch.sin(s) + torch.cos(s * i / 9) + torch.erf(s) + torch.tanh(s / 4),
    "choices": lambda s, b, h, i, j: torch.where((i > j) & ~(h == 1), s.clamp(-1, 2), torch.maximum(s, s * 0.1)).relu(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_emitted_functions_compute_what_torch_does(name):
    agree(Triton(), call(*qkv(batch=1, nq=33, nk=40, hq=2, hk=1), score=tw.score(FUNCTIONS[name])))


LEAVES = {
    ROWS: ((4, 70), lambda t: lambda s, b, h, i, j: s * t[h, i]),
    COLUMNS: ((70,), lambda t: lambda s, b, h, i, j: s + t[j] * s),
    STORE: ((2, 4, 70, 70), lambda t: lambda s, b, h, i, j: s + t[b, h, i, j]),
    TILES: ((70, 70), lambda t: lambda s, b, h, i, j: s + t[j, i]),
    DIAGONALS: ((4, 9), lambda t: lambda s, b, h, i, j: s + t[h, (i - j) % 9]),
    SCATTER: ((2, 9), lambda t: lambda s, b, h, i, j: s + t[b, (i + j) % 9]),
}


@pytest.mark.parametrize("how", LEAVES)
def test_gradients_of_leaves_are_summed_as_classified(how):
    shape, build = LEAVES[how]
    c = call(*qkv(), causal=True, score=tw.score(build(normal(*shape).requires_grad_())))
    assert [read.how for read in classify(c.p)] == [how]
    agree(Triton(), c)


@pytest.mark.parametrize(
    ("dtype", "by_head", "kept"), [(torch.bfloat16, True, True), (torch.float16, False, False)], ids=["kept", "again"]
)
def test_a_table_read_through_a_tensor_of_pairs_is_summed_over_the_batch_in_order(dtype, by_head, kept):
    at, table = torch.arange(49 * 50).view(49, 50) * 7 % 31, normal(31, 2).requires_grad_()
    score = tw.score(lambda s, b, h, i, j: s + table[at[i, j], h if by_head else 1])
    c = call(*qkv(batch=3, nq=49, nk=50, hq=2, hk=1, dtype=dtype), score=score, deterministic=True)
    plan = Plan(c.p, INTERPRETED)
    assert [(read.loops, read.pairs) for read in plan.emitted.reads] == [(("b",) if by_head else ("b", "h"), True)]
    assert bool(plan.sheet) == kept
    agree(Triton(), c)


LONGER = {
    STORE: ((2, 5, 72, 80), lambda t: lambda s, b, h, i, j: s + t[b, h, i, j]),
    TILES: ((70, 72), lambda t: lambda s, b, h, i, j: s + t[j, i].sin()),
    "sheet": ((72, 80), lambda t: lambda s, b, h, i, j: s + t[i, j]),
}


@pytest.mark.parametrize("how", LONGER)
def test_elements_of_a_leaf_that_no_pair_reads_get_no_gradient(how, monkeypatch):
    shape, build = LONGER[how]
    empty = torch.empty

    def poisoned(*size, **options):
        new = empty(*size, **options)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    monkeypatch.setattr(torch, "empty", poisoned)
    c = call(*qkv(), causal=True, score=tw.score(build(normal(*shape).requires_grad_())))
    assert [read.how for read in classify(c.p)] == [TILES if how == "sheet" else how]
    assert bool(Plan(c.p, INTERPRETED).sheet) == (how == "sheet")
    agree(Triton(), c)


def test_a_bias_whose_rows_are_whole_16_bytes_is_read_several_elements_at_once():
    t = normal(2, 66, 72).requires_grad_()
    c = call(*qkv(batch=1, nq=66, nk=72, hq=2, hk=1), causal=True, score=tw.bias(t))
    leaves = {n: c.p.extras[n] for n in c.p.spec.score_slots}
    assert [leaf.unit for leaf in leaf_layouts(leaves, (66, 72), c.p.spec.lookups).values()] == [4]
    agree(Triton(), c)


def test_rows_of_nothing_but_the_least_number_pass_no_nan_back():
    q, k, v = (x.bfloat16() for x in qkv(nq=66, nk=72))
    bias = normal(4, 66, 72, dtype=torch.bfloat16)
    bias[:, 5:9] = torch.finfo(torch.bfloat16).min
    c = call(q, k, v, score=tw.bias(bias))
    o, lse = tw.attention_with_lse(q, k, v, score=tw.bias(bias), backend="portable")  # which keeps lse as it is
    assert (lse[..., 5:9] < -3e38).all()
    assert torch.isfinite(lse).all()
    grads = Triton().backward(c.p, c.t, Output(o, lse), c.do, c.dlse)
    assert all(torch.isfinite(x).all() for x in (grads.dq, grads.dk, grads.dv))
    assert (grads.dq[:, 5:9] == 0).all()
    assert (grads.dq[:, 9:] != 0).any()


@pytest.mark.parametrize(
    ("shape", "index", "leads"),
    [
        ((4, 66, 72), lambda b, h, i, j: (h, i, j), ("b", "h")),
        ((2, 4, 66, 72), lambda b, h, i, j: (b, h, i, j), ("b", "h")),
        ((3, 66, 72), lambda b, h, i, j: (2, i, j), (0, 2)),
    ],
    ids=["heads", "all", "one"],
)
def test_a_descriptor_brings_a_bias_to_the_forward_and_the_pass_over_keys(shape, index, leads):
    t = normal(*shape).requires_grad_()
    score = tw.score(lambda s, b, h, i, j: s + t[index(b, h, i, j)])
    c = call(*qkv(nq=66, nk=72), causal=True, score=score)
    plan = Plan(c.p, OTHER_TILES["tma"])
    assert plan.pair_leaf == (0, (0, *leads))
    assert not Triton().slow(c.p)
    agree(Triton(OTHER_TILES["tma"]), c)


REGIONS = tw.keep(lambda b, h, i, j: i // 9 % 3 == j // 9 % 3)


@pytest.mark.parametrize(
    ("mask", "pairs", "lists", "whole"),
    [(REGIONS, 72 * 72, False, True), (REGIONS, 72 * 72 - 1, True, True), (tw.key_range(3, 60), 0, False, False)],
    ids=["window", "lists", "hidden-keys"],
)
def test_a_bias_by_descriptor_beside_loops_of_every_kind(monkeypatch, mask, pairs, lists, whole):
    monkeypatch.setattr(config, "WINDOW_PAIRS", pairs)
    bias = normal(4, 72, 72).requires_grad_(lists or whole)  # beside a trained one the last case is whole too
    c = call(*qkv(nq=72, nk=72), mask=mask, score=tw.bias(bias))
    plan = Plan(c.p, OTHER_TILES["tma"])
    assert (plan.lists, plan.whole) == (lists, whole)
    assert plan.pair_leaf[0] is not None
    agree(Triton(OTHER_TILES["tma"]), c)


def test_a_bias_with_split_keys():
    t = normal(4, 9, 152).requires_grad_()
    c = call(*qkv(batch=1, nq=9, nk=152), causal=True, score=tw.bias(t), sink=normal(4))
    agree(Triton(replace(OTHER_TILES["tma"], few=PagedConfig(*[OTHER_TILES["tma"].forward] * 3, splits=4))), c)


def test_a_bias_by_descriptor_of_packed_sequences():
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 30, 30, 55, 62], [0, 40, 45, 69, 69]))
    t = normal(4, 4, 32, 40).requires_grad_()
    score = tw.score(lambda s, b, h, i, j: s + t[b, h, i, j])
    q, k, v = normal(62, 4, 16), normal(69, 2, 16), normal(69, 2, 16)
    agree(Triton(OTHER_TILES["tma"]), call(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, score=score))


# A tile of which no pair is seen is on no list: nobody writes its dS.
@pytest.mark.parametrize("read", ["pair", "distance"])
def test_gradients_of_what_all_heads_read_come_from_listed_tiles_alone(monkeypatch, read):
    monkeypatch.setattr(config, "WINDOW_PAIRS", 0)
    t = normal(*((72, 72) if read == "pair" else (4, 33))).requires_grad_()
    by_distance = tw.score(lambda s, b, h, i, j: s + t[h, (i - j).clamp(-16, 16) + 16])
    mask = tw.keep(lambda b, h, i, j: (i // 32 + j // 32) % 2 == 0) & tw.causal()
    c = call(*qkv(nq=72, nk=72), mask=mask, score=tw.bias(t) if read == "pair" else by_distance)
    plan = Plan(c.p, OTHER_TILES["tma"])
    assert plan.whole
    assert plan.lists
    assert not plan.sheet
    agree(Triton(OTHER_TILES["tma"]), c)


@pytest.mark.parametrize("shape", [(4, 70, 72), (70, 72), (3, 1, 70, 72)], ids=["batch", "both", "heads"])
@pytest.mark.parametrize("tiles", ["tma", "wide"])
def test_programs_take_turns_at_a_sum_that_three_or_four_or_all_share(shape, tiles):
    c = call(*qkv(batch=3, nq=70, nk=72), mask=tw.window(20, 5), score=tw.bias(normal(*shape).requires_grad_()))
    assert Plan(c.p, OTHER_TILES[tiles]).sheet
    agree(Triton(OTHER_TILES[tiles]), c)


NARROW, SQUARE = Config(*[Tiles(32, 64, 4, 1)] * 3), Config(*[Tiles(32, 32, 4, 1, tma=True)] * 3)
ELEMENT = 3 * 128 * 256 * 4  # bytes of dS of a batch element below
CHUNKS = Config(*[Tiles(32, 32, 4, 1, tma=True, chunk=16)] * 4, products="bf16x6")
SOME_KEYS = [(0, 3, 0, 3, 0, 128), (0, 3, 0, 3, 128, 128)]


def fill_new_memory(monkeypatch):
    """Lets what a kernel reads and none has written be NaN."""
    empty = torch.Tensor.new_empty

    def filled(x, *size, **more):
        new = empty(x, *size, **more)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)


@pytest.mark.parametrize(
    ("shape", "override", "memory", "kept"),
    [
        ((3, 48, 136), NARROW, 2 * ELEMENT, [(0, 2, 0, 3, 0, 256), (2, 1, 0, 3, 0, 256)]),
        ((3, 48, 136), SQUARE, 2 * ELEMENT, [(0, 2, 0, 3, 0, 256), (2, 1, 0, 3, 0, 256)]),
        ((3, 48, 136), NARROW, ELEMENT - 1, [(0, 3, n, 1, 0, 256) for n in range(3)]),
        ((3, 1, 48, 136), NARROW, 1.5 * ELEMENT, SOME_KEYS),
        ((48, 136), SQUARE, 1.5 * ELEMENT, SOME_KEYS),
        ((48, 136), CHUNKS, 1.5 * ELEMENT, SOME_KEYS),
    ],
    ids=["batch", "batch-by-descriptor", "few", "heads", "both", "both-in-chunks"],
)
def test_ds_is_kept_of_some_batch_elements_or_heads_or_keys_at_a_time(shape, override, memory, kept, monkeypatch):
    monkeypatch.setattr(sheet, "sheet_memory", lambda p: int(memory))
    monkeypatch.setattr(sheet, "SHEET_KEYS", 128)
    fill_new_memory(monkeypatch)
    score = tw.bias(normal(*shape).requires_grad_())
    c = call(*qkv(batch=3, nq=48, nk=136, hq=3, hk=3, d=8, dv=8), mask=tw.causal() & tw.window(100), score=score)
    assert [astuple(part) for part in Plan(c.p, override).sheet] == kept
    agree(Triton(override), c)


COLUMNS = OTHER_TILES["columns"]
AT = torch.arange(48 * 136).view(48, 136) * 7 % 31
FEW_TILES = {
    "batch": ((5, 48, 136), tw.bias),
    "heads": ((9, 1, 48, 136), tw.bias),
    "both": ((48, 136), tw.bias),
    "pairs": ((31,), lambda t: tw.score(lambda s, b, h, i, j: s + t[AT[i, j]])),
}


@pytest.mark.parametrize("memory", [None, 10 * ELEMENT], ids=["whole", "in-parts"])
@pytest.mark.parametrize("name", FEW_TILES)
def test_a_bias_of_few_tiles_is_summed_in_splits(name, memory, monkeypatch):
    """Splits of a few programs each, of which the last has fewer; in parts of the batch or of the keys, too."""
    if memory is not None:
        monkeypatch.setattr(sheet, "sheet_memory", lambda p: memory)
        monkeypatch.setattr(sheet, "SHEET_KEYS", 128)
    monkeypatch.setattr(sheet, "SUMS", 1000)
    monkeypatch.setattr(sheet, "LEAST_SUMMED", 2)
    fill_new_memory(monkeypatch)
    shape, build = FEW_TILES[name]
    score = build(normal(*shape).requires_grad_())
    c = call(*qkv(batch=9, nq=48, nk=136, hq=5, hk=5, d=8, dv=8), mask=tw.causal() & tw.window(100), score=score)
    plan = Plan(c.p, SQUARE)
    together, splits = plan.splits
    assert splits > 1
    assert together > 1
    assert (len(plan.sheet) > 1) == (memory is not None)
    agree(Triton(SQUARE), c)


def test_a_leaf_that_is_longer_than_the_sequences_is_summed_at_once(monkeypatch):
    """Each partial sum would be as large as the leaf."""
    monkeypatch.setattr(sheet, "SUMS", 1000)
    t = normal(80, 90).requires_grad_()
    c = call(*qkv(batch=9, hq=4, hk=4), score=tw.score(lambda s, b, h, i, j: s + t[i, j]))
    assert Plan(c.p, INTERPRETED).splits == (36, 1)
    agree(Triton(), c)


@pytest.mark.parametrize("keys", [256, 128])
def test_splits_of_a_sequence_do_not_depend_on_batch_mates_where_results_are_deterministic(keys, monkeypatch):
    """Nor on how many keys of a batch fit at a time."""
    monkeypatch.setattr(sheet, "SUMS", 16 // devices.of(torch.device("cpu")).cores)
    monkeypatch.setattr(sheet, "SHEET_KEYS", 128)
    of_key = 16 * 128 * 4  # bytes of a sequence's dS
    monkeypatch.setattr(sheet, "sheet_memory", lambda p: of_key * keys * (3 if keys == 256 else 2))

    def splits(batch: int, **options) -> tuple[int, int]:
        score = tw.bias(normal(batch, 1, 40, 200).requires_grad_())
        plan = Plan(call(*qkv(batch=batch, nq=40, nk=200, hq=16, hk=16), score=score, **options).p, INTERPRETED)
        assert [part.keys for part in plan.sheet] == ([256] if batch == 1 or keys == 256 else [128, 128])
        return plan.splits

    assert splits(1, deterministic=True) == splits(3, deterministic=True)
    assert splits(1) != splits(3)


@pytest.mark.parametrize("shared", [(1, 1), (3, 1), (1, 2)], ids=["by-all", "by-heads", "by-sequences"])
@pytest.mark.parametrize("sums", [1, 3])
def test_a_shared_bias_gets_the_gradient_of_every_sequence_and_head_by_its_own_mask(shared, sums, monkeypatch):
    """A tile that one sees may be one that another does not visit, whose dS was never written."""
    monkeypatch.setattr(sheet, "splits_of_sum", lambda p, *_: (-(-6 // sums), sums))
    fill_new_memory(monkeypatch)
    mask, bias = tw.prefix(torch.tensor([[20, 0], [150, 10], [90, 199]])), normal(*shared, 200, 200).requires_grad_()
    c = call(*qkv(batch=3, nq=200, nk=200, hq=2, hk=1, d=16, dv=16), mask=mask, score=tw.bias(bias))
    assert Plan(c.p, OTHER_TILES["tma"]).sheet
    agree(Triton(OTHER_TILES["tma"]), c)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"nk": 0}, {"nq": 0}], ids=str)
def test_a_bias_without_a_pair_has_a_gradient_of_zeros(sizes):
    q, k, v = qkv(**{"batch": 2, "nq": 33, "nk": 40, "hq": 2, "hk": 2} | sizes)
    bias = normal(2, q.shape[1], k.shape[1]).requires_grad_()
    o = tw.attention(q, k, v, score=tw.bias(bias), backend="triton")
    (grad,) = torch.autograd.grad(o, bias, torch.ones_like(o))
    assert grad.shape == bias.shape
    assert not bool(grad.any())


@pytest.mark.parametrize(
    "options",
    [
        {"mask": tw.causal() & tw.window(100), "score": tw.softcap(2.0)},
        {"dropout_p": 0.3, "dropout_seed": 5},
    ],
    ids=["window-softcap", "dropout"],
)
@pytest.mark.parametrize(
    ("room", "kept"),
    [
        (6, [(0, 3, 0, 2)]),
        (3, [(0, 3, 0, 1), (0, 3, 1, 1)]),
        (2, [(0, 2, 0, 1), (2, 1, 0, 1), (0, 2, 1, 1), (2, 1, 1, 1)]),
    ],
    ids=["at-once", "by-heads", "by-batch-elements"],
)
def test_pairs_are_kept_and_every_gradient_is_made_of_them(options, room, kept, monkeypatch):
    monkeypatch.setattr(sheet, "sheet_memory", lambda p: room * 2 * 2 * 128 * 256 * 4)
    fill_new_memory(monkeypatch)
    c = call(*qkv(batch=3, nq=72, nk=136, hq=4, hk=2, d=40, dv=24), **options)
    plan = Plan(c.p, COLUMNS)
    assert (plan.keeps_pairs, [astuple(part)[:4] for part in plan.sheet]) == (True, kept)
    agree(Triton(COLUMNS), c)


def test_pairs_are_kept_where_their_sums_alone_are_wanted():
    keeps = lambda config=COLUMNS, **options: bool(  # noqa: E731
        (plan := Plan(call(*qkv(), **options).p, config)).sheet and plan.keeps_pairs
    )
    assert keeps(causal=True)
    assert not keeps(OTHER_TILES["chunks"], causal=True)
    assert not keeps(replace(COLUMNS, group_parts=2), causal=True)
    assert not keeps(score=tw.bias(normal(4, 70, 70).requires_grad_()))
    assert keeps(mask=tw.key_range(0, 60))


def some_keys(batch: int, keys: int) -> torch.Tensor:
    """Which keys each batch element has, of no order; the second has none."""
    kept = torch.arange(keys) % 3 > torch.arange(batch)[:, None] % 3 - 1
    kept[1] = False
    return kept[:, None, None]


MASKS = {
    "dense": lambda: tw.dense(some_keys(3, 72)),
    "lengths": lambda: tw.key_lengths(torch.tensor([41, 0, 72])),
    "range": lambda: tw.key_range(3, 60),
    "windows": lambda: tw.keep(lambda b, h, i, j: (i // 24 == j // 36) | (b % 2 == 1)),
    "causal-of-a-head": lambda: tw.keep(lambda b, h, i, j: (j <= i) | (h == 1)),
}
SUMMED = {
    "bias": lambda: tw.bias(normal(48, 72).requires_grad_()),
    "bias-of-heads": lambda: tw.softcap(9.0) >> tw.bias(normal(2, 48, 72).requires_grad_()),
    "table": lambda: of_distances(normal(2, 119).requires_grad_()),
}


def of_distances(t: torch.Tensor) -> tw.Score:
    return tw.score(lambda s, b, h, i, j: s + t[h, i - j + 71])


@pytest.mark.parametrize("score", SUMMED.values(), ids=SUMMED)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_ds_is_kept_beside_masks_that_hide_keys_from_all_queries(mask, score):
    q, k, v = qkv(batch=3, nq=48, nk=72, hq=2, hk=1, d=16, dv=16)
    hidden = (torch.arange(72) < 3) | (torch.arange(72) > 60)  # by each mask, beside others
    c, backend = call(q, k, v, mask=mask() & tw.key_range(3, 61), score=score()), Triton(OTHER_TILES["tma"])
    c.t.k[:, hidden], c.t.v[:, hidden] = torch.nan, torch.nan
    assert bool(Plan(c.p, backend.config(c.p)).sheet) == ("tanh" not in c.p.spec.score_text)
    agree(backend, c)


def test_shifted_windows_read_their_mask_in_every_tile_and_keep_ds():
    """Shifted windows: a query sees the keys of its own region, of which it is one."""
    region, table = torch.arange(49) % 5 % 2 + torch.arange(4)[:, None] % 2, normal(3, 49, 49).requires_grad_()
    same = tw.keep(lambda b, h, i, j: tw.lookup(region, b % 4, i) == tw.lookup(region, b % 4, j))
    c = call(*qkv(batch=8, nq=49, nk=49, hq=3, hk=3, d=16, dv=16), mask=same, score=tw.bias(table))
    plan = Plan(c.p, OTHER_TILES["tma"])
    assert plan.sheet
    assert not plan.lists
    agree(Triton(OTHER_TILES["tma"]), c)


def test_ds_is_written_where_it_is_read_between_keys_that_a_row_sees(monkeypatch):
    """The last 32 keys of each document are seen by nobody, and lie between the keys of a tile's first and last row."""
    fill_new_memory(monkeypatch)
    ids = torch.arange(232) // 58
    hidden = torch.arange(232) % 58 > 25
    mask, bias = tw.documents(ids) & tw.causal(align="first"), normal(200, 232).requires_grad_()
    c = call(*qkv(batch=2, nq=200, nk=232, hq=2, hk=1, d=16, dv=16), mask=mask, score=tw.bias(bias))
    c.t.k[:, hidden], c.t.v[:, hidden] = torch.nan, torch.nan
    tall = Config(*[Tiles(64, 16, 4, 1)] * 3)  # a tile of keys that nobody sees
    assert Plan(c.p, tall).sheet
    agree(Triton(tall), c)


def test_long_masks_of_more_than_keys_are_listed_and_keep_no_ds():
    def plan(n: int, mask, trained: bool = True) -> Plan:
        bias = tw.bias(normal(n, n).requires_grad_(trained))
        return Plan(call(*qkv(nq=n, nk=n), mask=mask, score=bias).p, OTHER_TILES["tma"])

    of_keys, of_pairs = tw.dense(some_keys(2, 300)), tw.keep(lambda b, h, i, j: (i + j) % 3 > 0)
    for mask, trained, kept in [(of_keys, True, True), (of_keys, False, False), (of_pairs, True, False)]:
        found = plan(300, mask, trained)
        assert (bool(found.sheet), found.lists, found.zeroed) == (kept, not kept, True)
    assert not plan(70, of_pairs).lists
    assert plan(300, tw.key_range(3, 299) & tw.causal()).sheet


@pytest.mark.parametrize("read", ["bias", "table"])
def test_ds_past_the_last_key_is_zero_where_it_would_be_infinite(read):
    # Past the last key K is zeros, and the score what it reads there: far above a row's scores its P overflows, and dQ would be NaN.
    if read == "bias":  # by descriptor, zeros beside scores of -1000
        score = tw.bias((normal(64, 72) - 1000).requires_grad_())
    else:  # elements of distances that no pair has
        table = torch.cat([torch.full((2, 8), 1000.0), normal(2, 135)], 1).requires_grad_()
        score = tw.score(lambda s, b, h, i, j: s + table[h, i - j + 79])
    c = call(*qkv(batch=2, nq=64, nk=72, hq=2, hk=1, d=8, dv=8), score=score)
    for backend in (Triton(), Triton(OTHER_TILES["tma"])):
        assert Plan(c.p, backend.config(c.p)).sheet
        agree(backend, c)


def test_ds_is_kept_only_where_it_is_the_one_gradient_that_a_score_wants(monkeypatch):
    t, slopes = normal(70, 70).requires_grad_(), normal(4).requires_grad_()
    parts = lambda **options: len(Plan(call(*qkv(), **options).p, INTERPRETED).sheet)  # noqa: E731
    assert parts(causal=True, score=tw.bias(t)) > 0
    assert parts(score=tw.bias(t) >> tw.softcap(5.0)) == 0  # dS has a slope yet to come
    assert parts(score=tw.bias(t) >> tw.alibi(slopes)) == 0
    assert parts(mask=tw.key_range(0, 60), score=tw.bias(t)) > 0
    assert parts(score=tw.bias(t.detach().double().requires_grad_())) == 0
    monkeypatch.setattr(sheet, "sheet_memory", lambda p: 1)
    assert parts(causal=True, score=tw.bias(t)) == 0


@pytest.mark.parametrize(("dtype", "kept"), [(torch.bfloat16, True), (torch.float16, False)])
def test_ds_of_16_bits_is_kept_for_a_bias_in_fp32_where_its_range_is_fp32s(dtype, kept):
    c = call(*qkv(nq=48, nk=72, dtype=dtype), causal=True, score=tw.bias(normal(48, 72).requires_grad_()))
    assert bool(Plan(c.p, INTERPRETED).sheet) == kept
    agree(Triton(), c)


def test_scattered_sums_of_fp32_are_taken_in_float64():
    table = normal(2, 32).requires_grad_()
    score = tw.score(lambda s, b, h, i, j: s + table[b, (i + j).clamp(0, 31)])
    c = call(*qkv(), score=score)
    sums = LeafSums(Plan(c.p, INTERPRETED), c.t)
    assert [x.dtype for x in sums.buffers] == [torch.float64]
    assert [x.dtype for x in sums.totals().values()] == [torch.float32]


TERMS = OTHER_TILES["terms"]


def terms_of(problem, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """The bf16 terms of q, k, v and do."""
    named = dict(zip(("q", "k", "v", "do"), operands, strict=True))
    return list(split_into_terms(Plan(problem, TERMS), named).values())


def test_three_terms_hold_all_of_fp32():
    c = call(*qkv(nq=70, nk=33, hq=4, hk=2, d=24, dv=40))
    # The last term of 2^-110 is below what bf16 holds.
    wide = [
        normal(*x.shape) * torch.exp2(normal(*x.shape, seed=1).mul(30).clamp(-80, 110).round())
        for x in (c.t.q, c.t.k, c.t.v, c.do)
    ]
    for x in wide:
        x[0, 0, 0, :4] = torch.tensor([torch.inf, -torch.inf, 0.0, 3.0e38])
    for x, terms in zip(wide, terms_of(c.p, wide), strict=True):
        high, middle, low = terms.float().unflatten(-1, (3, x.shape[-1])).unbind(-2)
        assert torch.equal(high + middle + low, x)
        assert (middle.abs() <= x.abs() * 2.0**-7).all()  # the interpreter rounds towards zero
        assert (low.abs() <= x.abs() * 2.0**-14).all()
    hidden = [x * torch.nan for x in wide]
    assert all(terms.isnan().any() for terms in terms_of(c.p, hidden))


def test_a_bias_beside_terms_gets_its_gradient_of_fp32s_ds():
    c = call(*qkv(nq=48, nk=72, d=80, dv=96), causal=True, score=tw.bias(normal(48, 72).requires_grad_()))
    assert Plan(c.p, TERMS).sheet
    agree(Triton(TERMS), c)


def test_nan_in_keys_that_no_query_sees_stays_out_of_terms():
    q, k, v = qkv(nk=70)
    hidden = torch.arange(70).view(1, 70, 1, 1) >= 40
    clean, dirty = (
        run(Triton(TERMS), call(q, k.masked_fill(hidden, x), v.masked_fill(hidden, x), mask=tw.key_range(0, 40)))
        for x in (0.0, torch.nan)
    )
    assert all(torch.equal(x, clean[name]) for name, x in dirty.items())


@pytest.fixture(params=["allow_tf32", "fp32_precision"])
def tf32(request):
    """Allows tf32 or not, by PyTorch's older name for it or by its newer one, which 2.9 brought."""
    matmul = torch.backends.cuda.matmul
    if request.param == "allow_tf32":
        yield lambda on: setattr(matmul, "allow_tf32", on)
        matmul.allow_tf32 = False
    else:
        if not hasattr(matmul, "fp32_precision"):
            pytest.skip("this PyTorch has one name for it")
        yield lambda on: setattr(matmul, "fp32_precision", "tf32" if on else "ieee")
        matmul.fp32_precision = "none"


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm80"),
        ((8, 6), "sm120"),
        ((8, 7), "sm80"),
        ((8, 9), "sm120"),
        ((9, 0), "sm90"),
        ((10, 0), "sm100"),
        ((12, 1), "sm120"),
    ],
)
def test_graphics_cards_have_a_table_of_their_own(capability, arch, monkeypatch):
    monkeypatch.setitem(devices.STAND_INS, "meta", replace(TARGETS["sm90"].device, capability=capability))
    assert config.architecture(torch.device("meta")) == arch
    wide = torch.empty(1, 70, 1, 320, device="meta")
    p = check(wide, wide, wide, (), None, parse_spec(assemble(wide, wide, wide, Options())[2]))
    assert any("above 256 in float32" in reason for reason in Triton().unsupported(p)) is (arch == "sm120")


def test_products_of_fp32_follow_pytorchs_setting(tf32, monkeypatch):
    monkeypatch.setitem(devices.STAND_INS, "meta", TARGETS["sm90"].device)
    tf32(False)
    assert [config.float_products(n, "sm90") for n in (64, 256, 257, 512)] == ["bf16x6"] * 4
    assert [config.float_products(n, "sm80") for n in (256, 257)] == ["bf16x6", "ieee"]
    assert [config.float_products(n, "sm120") for n in (128, 129)] == ["bf16x6", "ieee"]
    backend, q = Triton(), torch.empty(1, 70, 1, 64, device="meta")
    p = check(q, q, q, (), None, parse_spec(assemble(q, q, q, Options())[2]))
    assert backend._plan_of(p).config.products == "bf16x6"
    tf32(True)
    assert [config.float_products(n, "sm90") for n in (64, 128, 129)] == ["tf32", "tf32", "bf16x6"]
    assert config.float_products(512, "sm80") == "tf32"
    assert backend._plan_of(p).config.products == "tf32"
    half = call(*qkv(dtype=torch.float16)).p
    assert backend._plan_of(half) is backend._plans.of(half)


def test_nan_in_a_visible_key_is_not_swallowed_by_a_softcap():
    q, k, v = qkv(nq=4, nk=4)
    k[:, 3] = torch.nan
    c = call(q, k, v, causal=True, score=tw.softcap(5.0))
    o = Triton().forward(c.p, c.t).o
    assert o[:, 3].isnan().all()
    assert not o[:, :3].isnan().any()


def test_no_descriptor_sees_a_bias_that_is_read_elsewhere_or_in_another_order():
    wide, odd = torch.randn(4, 72, 72), torch.randn(4, 70, 70)
    c = lambda f, n: call(*qkv(nq=n, nk=n), score=tw.score(f)).p  # noqa: E731
    scores = [
        lambda s, b, h, i, j: s + wide[h, j, i],
        lambda s, b, h, i, j: s + wide[h, i, j] + wide[h, j, i],
        lambda s, b, h, i, j: s + wide[h, i, j + 1],
    ]
    assert [Plan(c(f, 72), INTERPRETED).pair_leaf for f in scores] == [None] * 3
    assert [bool(Triton().slow(c(f, 72))) for f in scores] == [False, True, False]  # the last axes are i and j
    assert Plan(c(lambda s, b, h, i, j: s + odd[h, i, j], 70), INTERPRETED).pair_leaf is None


def test_programs_that_share_a_bias_run_side_by_side():
    shapes = ((6, 8, 70, 70), (8, 70, 70), (6, 1, 70, 70), (70, 70))
    calls = [call(*qkv(batch=6, nq=70, nk=70, hq=8, hk=4), score=tw.bias(normal(*shape))) for shape in shapes]
    found = [config.beside(c.p) for c in calls]
    assert found == [(1, 1), (3, 1), (1, 4), (3, 1)]


@pytest.mark.parametrize(
    ("dtype", "cap", "bounded"), [("bfloat16", 30.0, True), ("bfloat16", 60.0, False), ("float16", 30.0, False)]
)
def test_a_bounded_score_needs_no_maximum(dtype, cap, bounded):
    q, k, v = qkv(batch=1, nq=50, nk=30, hq=2, hk=2, dtype=getattr(torch, dtype))
    c = call(q * 9, k * 9, v, causal=True, score=tw.softcap(cap))  # the first 20 rows see no key
    plan = Plan(c.p, INTERPRETED)
    assert plan.facts(INTERPRETED.forward, 8).bounded == bounded
    agree(Triton(), c)
    # One way to a power of a tanh, and thus its bits, would depend on the pairs beside it.
    c = call(q, k, v, causal=True, score=tw.softcap(cap), deterministic="everywhere")
    assert not Plan(c.p, INTERPRETED).facts(INTERPRETED.forward, 8).bounded


def test_a_softcaps_slope_is_not_multiplied_by_its_cap_and_its_inverse():
    p = call(*qkv(), score=tw.softcap(30.0)).p
    assert emit(p, frozenset()).numbers[-1] == pytest.approx(p.softmax_scale / 30)
    half = call(*qkv(dtype=torch.bfloat16), score=tw.softcap(30.0)).p
    assert emit(half, frozenset()).numbers[-1] == pytest.approx(30 / math.log(2))


@pytest.mark.parametrize(
    ("score", "hides"),
    [
        (tw.softcap(30.0) >> tw.alibi(torch.rand(4)), False),
        (tw.bias(torch.randn(4, 70, 70)), True),
        (tw.score(lambda s, b, h, i, j: torch.where(i < j, s, -float("inf"))), True),
        (tw.score(lambda s, b, h, i, j: torch.exp(s)), True),
    ],
    ids=["softcap-alibi", "bias", "where", "exp"],
)
def test_a_score_may_hide_pairs_unless_it_is_bounded(score, hides):
    p = call(*qkv(), score=score).p
    assert emit(p, frozenset()).hides == hides


def test_positions_are_subtracted_as_fp32_where_that_is_exact(monkeypatch):
    p = call(*qkv(nq=70, nk=70), score=tw.alibi(torch.rand(4))).p
    near = emit(p, frozenset()).functions["score"]
    monkeypatch.setattr(emitting, "SMALL", 70)
    assert emit(p, frozenset()).functions["score"] is not near
    monkeypatch.undo()
    position = torch.tensor(float(emitting.SMALL - 1))
    assert position * 8 + 1 != position * 8  # the sum of as many as are added is still exact


def test_a_scattered_gradient_is_refused_when_deterministic():
    c = call(*qkv(), score=tw.score(LEAVES[SCATTER][1](normal(2, 9).requires_grad_())), deterministic=True)
    assert any("deterministic" in reason for reason in Triton().unsupported(c.p))


def test_one_kernel_serves_every_length_and_number():
    def facts(n: int, cap: float, left: int) -> str:
        c = call(*qkv(nq=n, nk=n), mask=tw.window(left=left), score=tw.softcap(cap))
        plan = Plan(c.p, INTERPRETED)
        return repr(plan.facts(INTERPRETED.forward, 4))

    assert len({facts(n, cap, left) for n, cap, left in [(64, 30.0, 7), (70, 50.0, 16), (1, 30.0, 0)]}) == 1


def test_shared_memory_fits_the_smallest_device_of_each_table():
    for arch, limit in config.SHARED_MEMORY.items():
        if arch == "amd":  # which keeps Q in registers: compile_all checks it
            continue
        for head_dim, row in TABLE[arch]["half"].items():
            for kernel, choice in row.passes.items():
                # The forward's row of 192 is that of Dv 128, the common one.
                narrow = {(192, "forward"): 128, (MAX_LATENT_DIM, kernel): MAX_HEAD_DIM}
                widths = head_dim, narrow.get((head_dim, kernel), head_dim)
                need = shared_memory(kernel, choice, tuple(columns(n, choice) for n in widths), 2, Streams(plain=True))
                assert need <= limit, (arch, head_dim, kernel, need)


@pytest.mark.parametrize(
    ("block", "dq", "forward"),
    [
        (16, (128, 64, 8, 3), (64, 128, 4, 2)),
        (64, (64, 64, 4, 3), (64, 64, 4, 3)),
        (128, (128, 64, 8, 3), (64, 128, 4, 2)),
    ],
)
def test_tiles_are_no_larger_than_a_patterns_blocks_where_those_are_large_enough(block, dq, forward):
    pattern = torch.ones(256 // block, 256 // block, dtype=torch.bool)
    p = call(*qkv(batch=1, nq=256, nk=256, hq=2, hk=2), mask=tw.block_sparse(pattern, block, block)).p
    assert config.within_blocks("dq", Tiles(128, 64, 8, 3, True), predicate_blocks(p)) == Tiles(*dq, True)
    assert config.within_blocks("forward", Tiles(64, 128, 4, 2, True), predicate_blocks(p)) == Tiles(*forward, True)


def test_a_pattern_of_blocks_takes_no_room_and_a_dense_mask_does():
    q, k, v = qkv(batch=1, nq=64, nk=64, hq=2, hk=2)
    blocks = tw.block_sparse(torch.ones(4, 4, dtype=torch.bool), 16, 16)
    dense = tw.dense(torch.ones(64, 64, dtype=torch.bool))
    assert [PairReads.of(call(q, k, v, mask=m).p).bytes for m in (blocks, dense, blocks & dense)] == [0, 1, 1]


def test_tiles_shrink_until_a_bias_fits_beside_them():
    need = lambda tiles: shared_memory("forward", tiles, (128, 128), 2, Streams(pair_bytes=4))  # noqa: E731
    tiles = fit("forward", Tiles(128, 128, 8, 3, True), need, 227 << 10)
    assert need(tiles) <= 227 << 10
    assert (tiles.tile_m, tiles.tile_n, tiles.num_stages) == (128, 64, 3)  # fewer keys rather than loads nothing hides


def test_sixteen_queries_at_a_time_come_by_pointers():
    need = lambda tiles: tiles.tile_m  # noqa: E731
    assert fit("dkdv", Tiles(32, 64, 4, 3, True), need, 16) == Tiles(16, 64, 4, 1, False)
    assert fit("dkdv", Tiles(32, 64, 4, 3, True), need, 32) == Tiles(32, 64, 4, 3, True)


def test_tiles_of_four_warps_leave_room_for_two_programs():
    tiles = TABLE["sm90"]["half"][128].forward
    half = program_limit(tiles, 227 << 10, "sm90", 2)
    assert tiles.num_warps == 4
    assert 2 * half <= 228 << 10
    for pair_bytes, stages in ((0, 3), (2, 2)):
        streams = Streams(pair_bytes, plain=not pair_bytes)
        need = lambda tiles, streams=streams: shared_memory("forward", tiles, (128, 128), 2, streams)  # noqa: E731
        assert fit("forward", tiles, need, half).num_stages == stages


def test_head_dims_are_padded_to_powers_of_two():
    assert [width(n) for n in (1, 16, 17, 64, 80, 512)] == [16, 16, 32, 64, 128, 512]


def test_a_head_dim_is_two_pieces_only_where_they_have_fewer_columns():
    widths = {n: [w for _, _, w in pieces(n, SMALL)] for n in (8, 24, 64, 72, 80, 96, 112, 160, 192, 576)}
    two = {72: [64, 16], 80: [64, 16], 96: [64, 32], 160: [128, 32], 192: [128, 64], 576: [512, 64]}
    assert widths == {8: [16], 24: [32], 64: [64], 112: [128]} | two
    for n in range(1, 577):
        for tiles in (SMALL, replace(SMALL, padded=True)):
            held = [column for first, count, w in pieces(n, tiles) for column in range(first, first + min(count, w))]
            assert held == list(range(n))


# 48 is 32 + 16 and 40 is 32 + 8 of 16; the second row has descriptors.
@pytest.mark.parametrize(("dv", "tma"), [(40, False), (48, True)], ids=["padded", "tma"])
@pytest.mark.parametrize("passes", [3, 4])
def test_pieces_of_a_head_dim_add_up(passes, dv, tma):
    tiles = Config(*[Tiles(32, 32, 4, 1, tma=tma)] * passes)
    agree(Triton(tiles), call(*qkv(batch=1, nq=70, nk=80, hq=2, hk=1, d=48, dv=dv, dtype=torch.bfloat16), causal=True))


def test_pieces_are_split_merged_and_biased():
    tiles = Config(*[SMALL] * 3, few=PagedConfig(*[SMALL] * 3, splits=4))
    bias = normal(1, 40, 150).requires_grad_()  # of all heads: its gradient is a pass of its own
    agree(Triton(tiles), call(*qkv(batch=1, nq=40, nk=150, hq=2, hk=1, d=40, dv=24), score=tw.bias(bias)))


def test_importing_tilewise_imports_no_triton():
    code = "import sys, tilewise, tilewise.backends.triton; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_cpu_tensors_are_refused_when_not_interpreting(monkeypatch):
    monkeypatch.setattr("tilewise.backends.triton.interpreting", lambda: False)
    c = call(*qkv())
    assert Triton().unsupported(c.p) == ["runs on cuda, q is on cpu"]


def shaped(batch: int, nq: int, nk: int, hq: int, hk: int, **options: object) -> object:
    """A problem of that size, without memory."""
    q, k = (torch.empty(batch, n, h, 128, dtype=torch.bfloat16, device="meta") for n, h in ((nq, hq), (nk, hk)))
    extras, seed, text = assemble(q, k, k, Options(**options))
    return check(q, k, k, extras, seed, parse_spec(text))


@pytest.mark.parametrize(
    ("shape", "options", "splits"),
    [
        ((1, 4096, 4096, 1, 1), {}, 4),  # 64 query tiles for 132 multiprocessors
        ((1, 4096, 4096, 4, 4), {}, None),  # 256: they are busy
        ((1, 1000, 1000, 1, 1), {}, None),  # one split
        ((8, 8, 32768, 4, 4), {}, 32),  # decoding: 32 programs
        ((64, 1, 4096, 4, 4), {}, None),  # 256 programs
        ((64, 1, 4096, 16, 4), {}, 1),  # whose heads share tiles
        ((1, 1, 9000, 16, 4), {"causal": True, "deterministic": True}, 16),
        ((64, 1, 9000, 16, 4), {"causal": True, "deterministic": True}, 16),
        ((1, 1, 9000, 16, 4), {"dropout_p": 0.5, "dropout_seed": 1}, None),
        ((1, 1, 9000, 16, 4), {"mask": tw.keep(lambda b, h, i, j: j % 3 > 0)}, None),
    ],
    ids=str,
)
def test_keys_are_split_where_whole_rows_leave_the_machine_idle(shape, options, splits, monkeypatch):
    """The size of a split depends on the keys alone, and with ``deterministic`` so does the choice."""
    monkeypatch.setitem(devices.STAND_INS, "meta", TARGETS["sm90"].device)
    found = few_config(shaped(*shape, **options), "ieee")
    assert (found and found.splits) == splits


def test_splits_need_products_that_the_kernel_over_pages_has(monkeypatch):
    monkeypatch.setitem(devices.STAND_INS, "meta", TARGETS["sm90"].device)
    q, k = (torch.empty(1, n, 1, 128, device="meta") for n in (1024, 4096))
    p = check(q, k, k, (), None, parse_spec(assemble(q, k, k, Options())[2]))
    assert few_config(p, "bf16x6") is None
    assert few_config(p, "ieee").splits == few_config(p, "tf32").splits == 4


@pytest.mark.parametrize(
    ("nq", "options"),
    [
        (1, dict),
        (3, lambda: {"causal": True, "sink": normal(4)}),
        (2, lambda: {"mask": tw.window(20, 0), "score": tw.softcap(3.0) >> tw.alibi(normal(4))}),
        (1, lambda: {"mask": tw.key_lengths(torch.tensor([33, 0]))}),
    ],
    ids=["plain", "causal-sink", "window-scores", "key-lengths"],
)
@pytest.mark.parametrize("splits", [1, 4])
def test_heads_that_share_a_tile_agree_with_the_oracle(nq, options, splits):
    few = PagedConfig(*[Tiles(16, 16, 4, 1)] * 3, splits=splits, split=16)
    agree(Triton(replace(INTERPRETED, few=few)), call(*qkv(nq=nq, nk=70, d=40, dv=24), **options()))


ROW = Tiles(1, 16, 4, 1)


@pytest.mark.parametrize(
    "options",
    [
        dict,
        lambda: {"causal": True, "sink": normal(3)},
        lambda: {"mask": tw.window(20, 0), "score": tw.softcap(3.0) >> tw.alibi(normal(3))},
        lambda: {"mask": tw.key_lengths(torch.tensor([33, 0]))},
    ],
    ids=["plain", "causal-sink", "window-scores", "key-lengths"],
)
@pytest.mark.parametrize("splits", [1, 4])
def test_a_row_alone_agrees_with_the_oracle(options, splits):
    few = PagedConfig(*[ROW] * 3, splits=splits, split=16)
    agree(Triton(replace(INTERPRETED, few=few)), call(*qkv(nq=1, nk=70, hq=3, hk=3, d=40, dv=24), **options()))


def test_one_query_in_fp32_has_a_row_alone_and_no_terms(monkeypatch):
    monkeypatch.setitem(devices.STAND_INS, "meta", TARGETS["sm90"].device)
    for heads, queries, rows in ((32, 1, 1), (32, 2, None), (8, 1, 16)):
        q, k = (torch.empty(8, n, h, 128, device="meta") for n, h in ((queries, 32), (8192, heads)))
        p = check(q, k, k, (), None, parse_spec(assemble(q, k, k, Options())[2]))
        found = few_config(p, "bf16x6")
        assert (found and found.forward.tile_m) == rows


def test_hidden_keys_that_hold_nan_leave_no_trace_with_split_keys():
    q, k, v = qkv(nq=2, nk=70)
    c = call(q, k.clone(), v.clone(), mask=tw.key_range(0, 60))
    c.t.k[:, 60:], c.t.v[:, 60:] = torch.nan, torch.nan
    out = Triton(replace(INTERPRETED, few=SPLIT)).forward(c.p, c.t)
    whole = call(q, k[:, :60].contiguous(), v[:, :60].contiguous())
    torch.testing.assert_close(out.o, Triton().forward(whole.p, whole.t).o)


# Two programs of four warps on each of 132 multiprocessors, and 64 keys a tile.
@pytest.mark.parametrize(
    ("shape", "options", "parts"),
    [
        ((1, 4096, 4096, 8, 1), {}, 4),  # 64 tiles: 256 programs at once
        ((1, 4096, 4096, 8, 1), {"causal": True}, 8),  # the longest of 256 would end last
        ((1, 32768, 32768, 8, 1), {}, 1),
        ((1, 4096, 4096, 32, 8), {}, 1),
        ((1, 2048, 2048, 32, 8), {"causal": True}, 2),  # 256 tiles, of which the longest takes as long as two
        ((1, 32, 4096, 8, 1), {}, 1),  # a part costs more than it walks
        ((8, 1024, 1024, 8, 1), {}, 2),
        ((8, 1024, 1024, 8, 1), {"deterministic": True}, 8),  # as if a sequence were alone
        ((1, 4096, 4096, 1, 1), {}, 1),
        ((1, 4096, 0, 8, 1), {}, 1),
    ],
)
def test_query_heads_are_parted_where_key_tiles_leave_the_machine_idle(shape, options, parts):
    tiles = Tiles(64, 64, 4, 2, tma=True)
    assert group_parts(shaped(*shape, **options), tiles, 132) == parts


def test_packed_heads_are_parted_by_an_average_sequence_and_never_where_batch_mates_may_not_decide():
    q, k = (torch.empty(4096, h, 128, dtype=torch.bfloat16, device="meta") for h in (8, 1))
    cu = torch.empty(5, dtype=torch.int32, device="meta")
    parts = []
    for deterministic in (False, True):
        given = Options(cu_seqlens_q=cu, cu_seqlens_k=cu, deterministic=deterministic)
        extras, seed, text = assemble(q, k, k, given)
        parts.append(group_parts(check(q, k, k, extras, seed, parse_spec(text)), Tiles(64, 64, 4, 2, tma=True), 132))
    assert parts == [4, 1]
