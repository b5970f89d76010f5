"""The Hopper backward's source on the emulated machine (:mod:`tests.backends.hopper.emulated_backward`), against float64."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

import tilewise as tw
from tests.backends.contract import HIDING, Call, call, normal
from tests.backends.contract import qkv as contract_qkv
from tests.backends.hopper import emulated_backward as emulated
from tests.backends.hopper.launches import stand_in, value_of, values_of
from tests.backends.hopper.test_forward import CASES as FORWARD
from tests.backends.hopper.test_forward import PACKED, SELECTED, packed_call, qkv
from tilewise import accuracy
from tilewise.backends.base import Grads, Output
from tilewise.backends.hopper import config as shared
from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.backward import grids
from tilewise.backends.hopper.backward.grids import TileParts
from tilewise.backends.hopper.backward.tiles import KeyTiles, PlanRow, QueryTiles, SheetTiles
from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.host import backward_call, portions
from tilewise.backends.hopper.host.backward_call import SUMS
from tilewise.backends.hopper.host.draft import Draft
from tilewise.backends.hopper.host.masks import grid_of
from tilewise.backends.hopper.host.plan import LOG2_E
from tilewise.backends.hopper.host.portions import Portions
from tilewise.backends.hopper.host.recipe import flat
from tilewise.backends.hopper.kit.params import optional_params
from tilewise.backends.hopper.pair_bias import pair_bias_of
from tilewise.backends.hopper.parameters import names_of
from tilewise.planning.tiles import seen_keys
from tilewise.reference import Reference

# Many blocks, small rings.
QUERIES = QueryTiles(64, 64, 2, 64, 3)
FIRST = replace(QUERIES, makes_statistics=True, prefetches=True)
KEYS = {
    "whole": KeyTiles(64, 64, 32, 3),
    "split": KeyTiles(64, 64, 32, 4, split=True),
    "summed": KeyTiles(64, 64, 128, 3, sums_dq=True),
    "summed-wide": KeyTiles(128, 128, 64, 4, sums_dq=True),
    # Called with deterministic=True.
    "ordered": KeyTiles(64, 64, 128, 3, sums_dq=True, stores_first=True, queued=True, overlaps=True, counts=True),
    "ordered-packed": KeyTiles(64, 64, 128, 3, sums_dq=True, stores_first=True, queued=True, overlaps=True),
    "ordered-packed-wide": KeyTiles(128, 128, 48, 4, sums_dq=True, dq_first=True, queued=True, overlaps=True),
    "ordered-wide": KeyTiles(128, 128, 48, 4, sums_dq=True, dq_first=True, queued=True, overlaps=True, counts=True),
    "queued": KeyTiles(64, 64, 128, 3, sums_dq=True, queued=True, prefetches=True),
    "queued-wide": KeyTiles(128, 128, 48, 4, sums_dq=True, dq_first=True, queued=True, overlaps=True),
    # Products subtract the statistics, in bf16.
    "subtracting": KeyTiles(64, 64, 128, 3, sums_dq=True, overlaps=True, counts=True, subtracts=True),
    "subtracting-wide": KeyTiles(
        128, 128, 48, 4, sums_dq=True, dq_first=True, queued=True, overlaps=True, counts=True, subtracts=True
    ),
    "subtracting-packed": KeyTiles(64, 64, 128, 3, sums_dq=True, queued=True, overlaps=True, subtracts=True),
    "storing-packed": KeyTiles(
        64, 64, 128, 3, sums_dq=True, stores_first=True, queued=True, overlaps=True, subtracts=True
    ),
    "bits": KeyTiles(64, 64, 128, 3, sums_dq=True, stores_first=True, queued=True, overlaps=True, counts=True),
    "biased": KeyTiles(64, 64, 128, 4, sums_dq=True, overlaps=True, counts=True, bias_stages=1),
    "biased-queued": KeyTiles(
        128, 128, 64, 4, sums_dq=True, dq_first=True, queued=True, overlaps=True, counts=True, bias_stages=3
    ),
    "bits-wide": KeyTiles(128, 128, 64, 4, sums_dq=True, dq_first=True, queued=True, overlaps=True, counts=True),
    "kept": KeyTiles(64, 64, 64, 4, split=True, keeps_ds=True),
    "kept-halves": KeyTiles(32, 32, 64, 4, split=True, halved=True, keeps_ds=True),
    "kept-queued": KeyTiles(64, 64, 64, 4, split=True, keeps_ds=True, queued=True),
    "halved": KeyTiles(32, 32, 32, 4, split=True, halved=True),
}


def emulate(c: Call, tiles: KeyTiles | None, ctas: int) -> Grads:
    # Bits and linear biases are for tiles that accumulate dQ: others read the ends of rows, and the same score is traced.
    with ExitStack() as patches:
        if tiles and not tiles.sums_dq:
            patches.enter_context(patch.object(backward_config, "bits_serve", lambda *args, **kwargs: False))
            patches.enter_context(patch.object(backward_config, "with_bias", lambda p: None))
        x = backward_config.choose(c.p)
    queries = None if not tiles or tiles.sums_dq else QUERIES if tiles.split else FIRST
    queries = replace(QUERIES, width=32, width_v=32, halved=True) if tiles and tiles.halved else queries
    if tiles and tiles.keeps_ds:
        queries = SheetTiles(tiles.width, stages=3, parts=tiles.ctas)
    return emulate_kernels(c, replace(x, keys=tiles, queries=queries) if tiles else x, ctas)


def emulate_kernels(c: Call, x: backward_config.Backward, ctas: int, out: Output | None = None) -> Grads:
    """dq, dk, dv, from the reference's output if none is given."""
    plan, out = backward_call.BackwardPlan(c.p, x), out or Reference().forward(c.p, c.t)
    given = {"q": c.t.q, "k": c.t.k, "v": c.t.v, "do": c.do, "o": out.o.to(c.p.dtype), "lse": out.lse, "dlse": c.dlse}
    t = {name: (tensor[None] if c.p.packed else tensor).float().numpy() for name, tensor in given.items()}
    cu_q, cu_k, *queues = starts_of(plan, c) if c.p.packed else (None, None)
    draft = Draft()
    room = {name: value_of(x, {}, draft) for name, x in plan.drafted_memory(draft).items()}
    t["lse2"], t["delta"] = room["lse2"], room["delta"]
    rows, lines = [t[name] for name in ("o", "do", "lse", "dlse")], t["delta"].shape[2]
    if not x.queries_first:
        own = (
            c.p.packed or c.p.spec.everywhere or x.score == "bias"
        )  # the source itself where it says more than an emulated statistic does
        made = emulated.run_preprocess(x, *rows, lines, cu_q) if own else emulated.statistics(*rows, lines)
        t["lse2"], t["delta"] = made
    t["blocks"], whole = x.blocks(c.p), [np.zeros_like(t[name]) for name in ("k", "v")]
    if not c.p.packed:
        given = plan.tensors(c.t, Output.of(given["o"], out.lse), c.do, c.dlse)
        t["k"], t["v"] = (given[name].float().numpy()[:, plan.keys] for name in "kv")
    extras = extras_of(plan, c)
    if x.makes_queue:
        extras[0]["queue"] = np.zeros(1, np.int32)
    if SUMS in room:
        extras[0]["dbias"] = room[SUMS]
    lo, hi, section_k, ctas_k, section_q, ctas_q, *scales = (plan.numbers[name] for name in EVERY)
    ends = plan.numbers["first"], plan.numbers["last"]

    def work(section: int, turn: int) -> tuple:
        p = c.p
        sizes = p.seqlen_q, t["k"].shape[1], p.heads_k, p.heads_q // p.heads_k, p.batch, section
        more = ((extras[turn],) if extras[turn] else ()) + ((cu_q, cu_k, queues[turn], *ends) if p.packed else ())
        return (*sizes, lo, hi, *map(np.float32, scales), *more, *([planned] if x.planned else []))

    planned = room.get("plan")
    if x.planned and not x.packs_sheet:
        emulated.run_plan(x, work(section_k, 0), room=None)

    if x.keys.keeps_ds:
        *found, first = (emulate_packed if x.packed else emulate_kept)(plan, c, t, ctas)
        dq = None
    else:
        first = None if x.keys.sums_dq else emulated.run_queries(x, t, work(section_q, 1), min(ctas, ctas_q))
        *found, dq = emulated.run_keys(x, t, work(section_k, 0), min(ctas, ctas_k))
    for room, part in zip(whole, found, strict=True):
        room[:, plan.keys] = part
    dq = first if dq is None else dq
    grads = (torch.from_numpy(g[0] if c.p.packed else g).to(c.p.dtype) for g in (dq, *whole))
    lse, delta = torch.from_numpy(t["lse2"]) / LOG2_E, torch.from_numpy(t["delta"])
    sink = backward_call.sink_gradient(c.t, lse, delta) if c.p.packed else None
    leaves = plan.slope_gradient(torch.from_numpy(extras[0]["dbias"])) if x.score == "alibi" and x.trained else {}
    if x.score == "table" and c.p.spec.lookups:
        leaves = plan.line_gradient(
            torch.from_numpy(extras[0]["dbias"]), c.t, out.lse, c.dlse, delta[..., : c.p.seqlen_q]
        )
    if x.stores_bias:
        room = torch.from_numpy(extras[0]["dbias"]).to(c.p.dtype)
        leaves = {plan.score_slot: pair_bias_of(c.p).gradient(room, c.t.leaves[plan.score_slot])}
    return Grads(*grads, sink, leaves)


def emulate_kept(plan: backward_call.BackwardPlan, c: Call, t: dict, ctas: int) -> tuple:
    """dk, dv and dq where dS is kept: of some keys at a time, as the plan deals them out; all heads at once."""
    p, x, dealt = plan.problem, plan.config, plan.portions
    dk, dv, t["dq"] = (np.full_like(t[name], np.nan) for name in ("k", "v", "q"))
    tiles, (_, queries) = x.queries, dealt.blocks
    heads, parts = p.batch_dim * p.heads_q, tiles.parts * tiles.warpgroups
    t["sums"] = np.full((heads, queries // tiles.warpgroups, parts, ROWS, tiles.width), np.nan, np.float32)
    of_passes = [{}, {}] if x.continues else extras_of(plan, c)
    for start, stop in dict.fromkeys(portion.keys for portion in dealt.all):
        t["sheet"] = np.full(
            (heads, *backward_config.sheet_blocks(tiles, p, stop - start), ROWS, ROWS), np.nan, np.float32
        )
        of_keys = t | {name: t[name][:, start:stop] for name in ("k", "v")}
        keys = slice(plan.keys.start + start, plan.keys.start + stop)
        numbers = plan.numbers_of(p.batch_dim * p.heads_k, keys)
        lo, hi, section_k, ctas_k, section_q, ctas_q, *scales = (numbers[name] for name in EVERY)
        continued = optional_of(x, numbers) if x.continues else {}
        sizes = p.seqlen_q, stop - start, p.heads_k, p.heads_q // p.heads_k, p.batch

        def work(section: int, turn: int, first=(lo, hi), sizes=sizes, scales=scales, last=continued) -> tuple:
            return (*sizes, section, *first, *map(np.float32, scales), of_passes[turn] | last)

        if x.makes_queue:
            of_passes[0]["queue"] = np.zeros(1, np.int32)
        *found, _ = emulated.run_keys(x, of_keys, work(section_k, 0), min(ctas, ctas_k))
        emulated.run_sheet(x, of_keys, work(section_q, 1), min(ctas, ctas_q))
        dk[:, start:stop], dv[:, start:stop] = found
    return dk, dv, t["dq"]


def emulate_packed(plan: backward_call.BackwardPlan, c: Call, t: dict, ctas: int) -> tuple:
    """dk, dv and dq of packed sequences where dS is kept, launch by launch: those of the last ones may have no heads."""
    p, x, launches = plan.problem, plan.config, plan.portions
    t["dq"], t["dk"], t["dv"] = (np.full_like(t[name], np.nan) for name in ("q", "k", "v"))
    t["sums"] = np.empty(0, np.float32)
    *starts, count_k, count_q = starts_of(plan, c)
    counts, table = (count_k, count_q), np.full((len(PlanRow), p.batch + 2), -1, np.int32)
    sizes = p.seqlen_q, p.seqlen_k, p.heads_k, p.heads_q // p.heads_k, p.batch
    for n in range(launches.count):
        numbers = plan.numbers | {"portion": n}
        lo, hi, section_k, ctas_k, section_q, ctas_q, *scales = (numbers[name] for name in EVERY)
        extras, first, last = optional_of(x, numbers), numbers["first"], numbers["last"]
        of = lo, hi, *map(np.float32, scales), *([extras] if extras else [])
        own = [(*starts, count[n], first, last, table, numbers["portion"]) for count in counts]
        of_keys, of_queries = (*sizes, section_k, *of, *own[0]), (*sizes, section_q, *of, *own[1])
        emulated.run_plan(x, of_keys, launches.room)
        # Each launch has all of the sheet: nobody reads what an earlier one has written.
        t["sheet"] = np.full((launches.sheet_shape[0], ROWS, ROWS), np.nan, np.float32)
        emulated.run_keys(x, t, of_keys, min(ctas, ctas_k))
        emulated.run_sheet(x, t, of_queries, min(ctas, ctas_q))
    return t["dk"], t["dv"], t["dq"]


def wrong(c: Call, grads: Grads) -> list[str]:
    found = accuracy.tensors(Reference().forward(c.p, c.t), grads)
    errors = accuracy.Expected.of(c.p, c.t, c.do, c.dlse).judge({n: x for n, x in found.items() if n.startswith("d")})
    return [str(e) for e in errors if not e.ok]


def starts_of(plan: backward_call.BackwardPlan, c: Call) -> list:
    """Where packed sequences start, and zeros that count the tiles of both passes."""
    given, draft = plan.tensors(c.t, Output(c.t.q, c.dlse), c.do, c.dlse), Draft()
    found = plan.beside(draft)
    return [value_of(found[name], given, draft) for name in ("cu_q", "cu_k", "counts_k", "counts_q")]


def extras_of(plan: backward_call.BackwardPlan, c: Call) -> list[dict]:
    """By name what the pass over keys and that over queries have beside what all do."""
    given, draft = plan.tensors(c.t, Output(c.t.q, c.dlse), c.do, c.dlse), Draft()
    found = values_of(plan.config.parameters[0], plan.beside(draft), given, draft)
    return [optional_of(plan.config, found | plan.numbers, prefix) for prefix in ("keys_", "queries_")]


EVERY = (
    "band_lo",
    "band_hi",
    "section_k",
    "ctas_k",
    "section_q",
    "ctas_q",
    "scale",
    "scale2",
    "cap2",
)  # numbers of a launch


def optional_of(x: backward_config.Backward, given: dict, prefix: str = "keys_") -> dict:
    """What a pass has of a launch's values beside what all do, by name; packed sequences have parameters of their own."""
    places = () if not x.packed else ("cu_q", "cu_k", "first", "last")
    names = [name for name in names_of(flat(x.parameters)) if name in given and name not in places]
    numbers = {name: np.float32(given[name]) if isinstance(given[name], float) else given[name] for name in names}
    return {name: n for name, n in optional_params(numbers, prefix)._asdict().items() if n is not None}


CASES = {
    "full": (qkv(200, 333), {}),
    "one": (qkv(1, 1), {}),
    "causal": (qkv(300, 300), {"causal": True}),
    "causal-wide": (qkv(150, 400, batch=2), {"causal": True}),
    "causal-empty-rows": (qkv(400, 150), {"causal": True}),
    "window": (qkv(300, 300), {"mask": tw.window(70, 3)}),
    "window-left": (qkv(300, 420), {"mask": tw.window(100)}),
    "keys": (qkv(130, 300), {"mask": tw.key_range(37, 170) & tw.causal()}),
    "softcap": (qkv(130, 200), {"score": tw.softcap(2.0), "causal": True}),
    "sink": (qkv(130, 100), {"sink": normal(4, seed=8), "causal": True}),
    "narrow": (qkv(130, 200, d=40, dv=24), {"causal": True}),
    "fp16": (qkv(130, 200, dtype=torch.float16), {"causal": True}),
    "large-scores": (qkv(130, 400), {"softmax_scale": 5.0}),
}


ENDS = ("prefix", "prefix-lengths", "documents", "documents-whole", "documents-wide", "documents-empty-rows", "lengths",
        "ranges-per-head")  # fmt: skip
PAIRED = [
    name for name in FORWARD if name.startswith(("dropout", "alibi", "bias", "buckets", "table", "score", "scale"))
]
OF_PAIRS = ("pair-and-mask", "pair-and-window")  # whose bits one pass alone reads
BITS = [name for name in FORWARD if name.startswith(("keep", "dense", "block", "union"))]
OTHERS = {
    "dropout-softcap": (qkv(130, 200), {"dropout_p": 0.3, "dropout_seed": 5, "score": tw.softcap(2.0), "causal": True}),
    "dropout-documents": (
        qkv(300, 300),
        {"dropout_p": 0.2, "dropout_seed": 9, "mask": FORWARD["documents"][1]["mask"]},
    ),
    "alibi-empty-rows": (qkv(400, 150), {"score": tw.alibi(torch.rand(4)), "causal": True}),
    "curve": (qkv(130, 200), {"score": lambda s, b, h, i, j: torch.tanh(s) * (1 + 0.01 * (i - j)) - 0.1 * s * s}),
}
# Not rows of nothing but the least number, whose P no lse in fp32 tells.
BIASED = [name for name in FORWARD if name.startswith("pair") and name != "pair-least-rows"]
CASES |= {name: FORWARD[name] for name in BIASED}
CASES |= {name: FORWARD[name] for name in (*ENDS, *PAIRED, *BITS)} | OTHERS
# Every case for some form of the pass over keys, and what is a form's own for each.
LINES = [name for name in FORWARD if name.startswith(("buckets", "table"))]
LINEAR = ("alibi", "alibi-wide", "alibi-empty-rows")
PAIRS = [(name, form) for form in ("whole", "split") for name in CASES if name not in (*LINEAR[1:], *BITS, *OF_PAIRS)]
PAIRS += [(name, "summed") for name in ("full", "causal-wide", "window", "keys", "large-scores", "softcap")]
PAIRS += [(name, "summed") for name in ("prefix-lengths", "documents", "documents-empty-rows", "ranges-per-head")]
PAIRS += [(name, "summed-wide") for name in ("one", "causal-empty-rows", "narrow", "lengths")]
PAIRS += [(name, "ordered") for name in ("full", "causal-wide", "window", "window-left", "keys", "large-scores")]
PAIRS += [(name, "ordered") for name in ("prefix-lengths", "documents-empty-rows", "ranges-per-head", "lengths")]
PAIRS += [(name, "ordered-wide") for name in ("one", "causal", "causal-empty-rows", "narrow", "softcap", "dropout")]
PAIRS += [(name, "ordered-wide") for name in ("alibi", "documents", "lengths")]
PAIRS += [(name, "halved") for name in ("one", "full", "causal-empty-rows", "window", "keys", "narrow", "large-scores")]
PAIRS += [
    (name, "halved") for name in ("prefix-lengths", "documents-empty-rows", "ranges-per-head", "lengths", "softcap")
]
PAIRS += [(name, "queued") for name in ("one", "causal-wide", "window", "documents")]
PAIRS += [("dropout", "queued"), ("dropout-documents", "queued")]
PAIRS += list(zip(LINEAR, ("queued", "queued", "queued-wide"), strict=True))
PAIRS += [(name, form) for name in LINES for form in ("queued", "queued-wide")]
PAIRS += [(name, "queued-wide") for name in ("causal-empty-rows", "keys", "softcap")]
PAIRS += [
    (name, "subtracting") for name in ("one", "causal-empty-rows", "documents-empty-rows", "fp16", "large-scores")
]
PAIRS += [(name, "subtracting-wide") for name in ("causal-wide", "keys")]
PAIRS += [(name, "bits") for name in BITS] + [(name, "bits-wide") for name in BITS]
BANDED = ("full", "one", "causal-wide", "causal-empty-rows", "window", "window-left", "keys", "narrow", "large-scores")
PAIRS += [(name, "kept") for name in BANDED]
PAIRS += [(name, "kept-queued") for name in ("one", "causal-wide", "window", "keys", "softcap", "documents-empty-rows")]
PAIRS += [(name, "kept-halves") for name in ("one", "full", "causal-empty-rows", "window", "narrow", "large-scores")]
PAIRS += [(name, form) for name in ("softcap", *ENDS) for form in ("kept", "kept-halves")]
PAIRS += [(name, form) for name in BIASED for form in ("biased", "biased-queued")] + [("pair", "whole")]
PAIRS.sort()  # one after the other come a case's forms, which one oracle judges


@pytest.mark.parametrize(("name", "form"), PAIRS, ids=lambda x: x)
def test_the_source_computes_the_gradients(name, form):
    tensors, options = CASES[name]
    c = call(*tensors, **options, deterministic=form.startswith("ordered"))
    assert not wrong(c, emulate(c, KEYS[form], ctas=3))


@pytest.mark.parametrize("form", ["bits", "bits-wide"])
@pytest.mark.parametrize("name", SELECTED)
def test_gradients_of_selected_keys_are_right_by_bits(name, form):
    c = call(*qkv(200, 333, heads=(4, 2)), mask=SELECTED[name]())
    assert not wrong(c, emulate(c, KEYS[form], ctas=3))


@pytest.mark.parametrize("form", ["kept", "kept-halves"])
@pytest.mark.parametrize("name", ["full", "causal-wide", "causal-empty-rows", "window", "window-left", "keys"])
def test_gradients_are_right_where_a_launch_has_some_of_the_keys(name, form):
    tensors, options = CASES[name]
    c = call(*tensors, **options)
    with patch.object(Portions, "sizes", (1, 1, 2)):  # two blocks of keys at a time
        assert not wrong(c, emulate(c, KEYS[form], ctas=3))


HALVES, EIGHTHS, LATER = TileParts(0, by_heads=2), TileParts(0, 2, 2), TileParts(2, 2, 1)
# Whole blocks of queries: what counts parts lies right behind them.
CASES["even"] = (qkv(128, 256), {"causal": True})
SHARED = [
    ("even", "kept-queued", EIGHTHS), ("even", "subtracting", EIGHTHS), ("even", "kept", HALVES), ("full", "subtracting", LATER),
    ("full", "subtracting-wide", EIGHTHS), ("causal-wide", "subtracting-wide", EIGHTHS), ("one", "subtracting", EIGHTHS),
    ("causal-empty-rows", "subtracting", EIGHTHS), ("window", "queued-wide", LATER), ("keys", "subtracting-wide", TileParts(1, 1, 1)),
    ("documents-empty-rows", "subtracting", HALVES), ("dense-empty", "bits", HALVES), ("block-sparse-odd", "bits-wide", HALVES),
    ("pair", "biased", EIGHTHS), ("dropout", "queued-wide", EIGHTHS), ("softcap", "queued-wide", EIGHTHS), ("full", "kept", LATER),
    ("causal-wide", "kept-queued", EIGHTHS), ("window", "kept-queued", LATER), ("causal-empty-rows", "kept", EIGHTHS),
    ("documents-empty-rows", "kept", HALVES), ("keys", "kept-queued", HALVES),
]  # fmt: skip


@pytest.mark.parametrize(("name", "form", "shares"), SHARED, ids=lambda x: "-".join(map(str, x)) if len(x) == 3 else x)
def test_parts_of_shared_tiles_add_up(name, form, shares):
    tensors, options = CASES[name]
    c = call(*tensors, **options)
    with patch.object(backward_call, "tile_parts", lambda *_: shares):
        assert not wrong(c, emulate(c, KEYS[form], ctas=3))


STEEP = (1.0, 0.1, -0.3, 0.0)


@pytest.mark.parametrize("name", ["full", "causal-wide", "window", "keys", "softcap"])
def test_a_band_that_is_too_long_for_a_sheet_is_read_as_ends_of_rows(name):
    tensors, options = CASES[name]
    c = call(*(x.repeat(1, 1, 1, 4) for x in tensors), **options)  # head_dim 256
    with patch.object(backward_config, "SHEET_LIMIT", 0):
        x = backward_config.choose(c.p)
        assert (x.form, x.keys.keeps_ds) == ("rows", False)
        assert not wrong(c, emulate_kernels(c, x, ctas=3))


SLOPED = {
    "square": (qkv(300, 300, batch=2), STEEP, {}),
    "wide": (qkv(150, 400), (0.7, 0.2, 0.06, 0.004), {}),
    "empty-rows": (qkv(400, 150), STEEP, {}),
    "sink": (qkv(130, 200), STEEP, {"sink": normal(4, seed=8)}),  # a row's dS does not add up to 0
    "fp16": (qkv(200, 200, dtype=torch.float16), STEEP, {}),
    "narrow": (qkv(130, 200, d=40, dv=24), STEEP, {}),
    "steep": (qkv(200, 200), (4.0, 3.0, 2.0, 1.5), {}),  # the keys that count are nearer than a block is wide
}
SLOPED_PAIRS = [(name, "queued") for name in SLOPED] + [(name, "queued-wide") for name in ("wide", "sink", "steep")]


@pytest.mark.parametrize(("name", "form"), SLOPED_PAIRS, ids=lambda x: x)
def test_the_source_sums_the_gradient_of_slopes(name, form):
    tensors, slopes, options = SLOPED[name]
    c = call(*tensors, score=tw.alibi(torch.tensor(slopes).requires_grad_()), causal=True, **options)
    assert backward_config.choose(c.p).trained
    grads = emulate(c, KEYS[form], ctas=3)
    assert {*grads.leaves} == {shared.slopes_of(c.p)}
    assert not wrong(c, grads)


TABLE = normal(4, 40, seed=9)
LINED = {
    "clipped": (qkv(400, 400, batch=2), TABLE, lambda t, h, d: t[h, d.clamp(0, 32)], {"causal": True}),
    "buckets": (qkv(400, 400), TABLE, lambda t, h, d: t[h, torch.where(d < 20, d, 20 + d // 20)], {"causal": True}),
    "later": (qkv(500, 500), TABLE, lambda t, h, d: t[h, d.clamp(200, 230) - 200], {"causal": True}),
    "wide": (qkv(150, 500), TABLE, lambda t, h, d: t[h, (d + 350).clamp(0, 39)], {"causal": True}),
    "empty-rows": (qkv(400, 150), TABLE, lambda t, h, d: t[h, (d - 250).clamp(0, 39)], {"causal": True}),
    "sink": (
        qkv(200, 200),
        TABLE,
        lambda t, h, d: t[h, d.clamp(0, 32)],
        {"causal": True, "sink": normal(4, seed=8) + 5},
    ),
    "fp16": (qkv(300, 300, dtype=torch.float16), TABLE, lambda t, h, d: t[h, d.clamp(0, 9)], {"causal": True}),
    "narrow": (qkv(200, 300, d=40, dv=24), TABLE, lambda t, h, d: t[h, d.clamp(0, 9)], {}),
    "shared": (qkv(300, 300), TABLE.bfloat16(), lambda t, h, d: t[2, d.clamp(-16, 16) + 16], {}),
    "both-ways": (qkv(260, 400, batch=2), TABLE.mT, lambda t, h, d: t[d.clamp(-16, 16) + 16, h], {}),
    "both-ways-sink": (qkv(400, 300), TABLE, lambda t, h, d: t[h, d.clamp(-9, 9) + 9], {"sink": normal(4, seed=8) + 5}),
    "behind": (qkv(700, 200), TABLE, lambda t, h, d: t[h, (d - 500).clamp(0, 32)], {}),
    "outside": (qkv(200, 300), TABLE, lambda t, h, d: t[h, (d - 700).clamp(0, 32)], {}),
}
LINED_PAIRS = [(name, form) for name in LINED for form in ("queued", "queued-wide")] + [("both-ways", "summed")]


@pytest.mark.parametrize(("name", "form"), LINED_PAIRS, ids=lambda x: x)
def test_the_source_sums_the_gradient_of_a_table(name, form):
    tensors, table, read, options = LINED[name]
    table = table.clone().requires_grad_()
    c = call(*tensors, score=lambda s, b, h, i, j: s + read(table, h, i - j), **options)
    assert backward_config.choose(c.p).score == "table"
    grads = emulate(c, KEYS[form], ctas=3)
    assert [x.dtype for x in grads.leaves.values()] == [table.dtype]
    assert not wrong(c, grads)


WANTED = {
    "each": (qkv(130, 200, batch=2), normal(2, 4, 130, 200), {}),
    "odd-keys": (qkv(130, 203), normal(1, 4, 130, 203), {}),
    "causal": (qkv(300, 304), normal(1, 4, 300, 304), {"causal": True}),
    "empty-rows": (qkv(200, 104), normal(1, 4, 200, 104), {"causal": True}),
    "window": (qkv(300, 304), normal(1, 4, 300, 304), {"mask": tw.window(70, 3)}),
    "sink": (qkv(130, 200, dtype=torch.float16), normal(1, 4, 130, 200), {"sink": normal(4, seed=8)}),
    "narrow": (qkv(130, 200, d=40, dv=24), normal(1, 4, 130, 200), {}),
}


@pytest.mark.parametrize("form", ["biased", "biased-queued"])
@pytest.mark.parametrize("name", WANTED)
def test_the_source_makes_the_gradient_of_a_bias_by_pair(name, form):
    tensors, bias, options = WANTED[name]
    # Rows at multiples of 16 bytes, of which the last ones may be nobody's.
    bias = pad(bias, (0, -bias.shape[3] % 8)).to(tensors[0].dtype)[..., : bias.shape[3]].detach().requires_grad_()
    c = call(*tensors, score=tw.bias(bias), **options)
    assert backward_config.choose(c.p).stores_bias
    grads = emulate(c, KEYS[form], ctas=3)
    assert [x.shape for x in grads.leaves.values()] == [bias.shape]
    assert not wrong(c, grads)


@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("form", ["whole", "split", "summed"])
def test_keys_that_no_query_sees_never_touch_a_gradient(hiding, form):
    tensors = [x.bfloat16() for x in contract_qkv()]
    clean = call(*tensors, mask=HIDING[hiding]())
    if form != "summed" and clean.p.spec.region.predicate is not None:
        pytest.skip("these tiles read no bits")
    hidden = ~seen_keys(grid_of(clean.p, clean.t.leaves), clean.p.group).mT.unsqueeze(-1)
    k, v = (x.masked_fill(hidden, torch.nan) for x in tensors[1:])
    dirty = call(tensors[0], k, v, mask=HIDING[hiding]())
    good, got = (emulate(c, KEYS[form], ctas=3) for c in (clean, dirty))
    assert all(torch.equal(getattr(got, name), getattr(good, name)) for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("dims", backward_config.TABLE, ids=str)
def test_the_shipped_tiles_compute_the_gradients(dims):
    c = call(*qkv(130, 200, *dims, heads=(2, 1)), causal=True, deterministic=True)
    assert not wrong(c, emulate(c, None, ctas=2))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_the_tiles_of_scores_and_dropout_compute_the_gradients(dims):
    options = {"score": tw.alibi(torch.rand(2)), "dropout_p": 0.2, "dropout_seed": 3}
    c = call(*qkv(130, 200, *dims, heads=(2, 1)), causal=True, **options)
    assert not wrong(c, emulate(c, None, ctas=2))


PACKED_PAIRS = [(name, "whole") for name in PACKED] + [(name, "split") for name in ("full", "window", "softcap")]
PACKED_PAIRS = [(name, form) for name, form in PACKED_PAIRS if not name.startswith(("dropout", "alibi"))]
PACKED_PAIRS += [("window", "summed"), ("causal", "summed-wide"), ("alibi", "queued-wide")]
PACKED_PAIRS += [(name, "queued") for name in PACKED] + [
    ("causal", "queued-wide"),
    ("window", "queued-wide"),
    ("causal", "subtracting-packed"),
    ("window", "storing-packed"),
    ("many", "storing-packed"),
]
PACKED_PAIRS += [(name, form) for name in PACKED for form in ("ordered-packed", "ordered-packed-wide")]
PLAIN_OR_CAPPED = [name for name in PACKED if not name.startswith(("dropout", "alibi"))]
PACKED_PAIRS += [(name, form) for form in ("kept-queued", "kept-halves") for name in PLAIN_OR_CAPPED]


@pytest.mark.parametrize(("name", "form"), PACKED_PAIRS, ids=lambda x: x)
def test_packed_sequences_have_gradients_each_by_itself(name, form):
    c = packed_call(name, deterministic=form.startswith("ordered"))
    c.do[c.t.cu_seqlens_q[-1] :] = torch.nan
    assert not wrong(c, emulate(c, KEYS[form], ctas=3))


@pytest.mark.parametrize("form", ["queued", "ordered-packed"])
@pytest.mark.parametrize("name", ["full", "causal", "window", "keys", "no-keys-at-all", "many"])
def test_heads_of_packed_sequences_follow_one_another_where_l2_holds_few(name, form):
    c = packed_call(name, deterministic=form.startswith("ordered"))
    with patch.object(grids, "OPEN_BYTES", 1):
        assert not wrong(c, emulate(c, KEYS[form], ctas=3))


@pytest.mark.parametrize("form", ["kept-queued", "kept-halves"])
@pytest.mark.parametrize("name", ["full", "causal", "window", "keys", "no-keys-at-all", "many"])
def test_launches_share_the_heads_of_packed_sequences(name, form):
    c = packed_call(name)
    with patch.object(portions, "PACKED_ROOM", 0):  # room for one head whose rows are all of one sequence
        assert not wrong(c, emulate(c, KEYS[form], ctas=3))


@pytest.mark.parametrize(("form", "shares"), [("subtracting-packed", EIGHTHS), ("kept-queued", EIGHTHS)], ids=str)
@pytest.mark.parametrize("name", ["full", "causal", "window", "keys", "no-keys-at-all", "many"])
def test_parts_of_packed_tiles_add_up(name, form, shares):
    c = packed_call(name)
    with patch.object(backward_call, "tile_parts", lambda *_: shares):
        assert not wrong(c, emulate(c, KEYS[form], ctas=3))


@pytest.mark.parametrize("ordered", [0, 1])
@pytest.mark.parametrize("name", ["full", "causal", "window", "keys", "no-keys-at-all", "many"])
def test_packed_key_tiles_come_once_each_and_those_of_the_longest_sequence_first(name, ordered):
    c = packed_call(name)
    x = backward_config.Backward(KEYS["queued"], None, "bf16", backward_config.form_of(c.p), packed=True)
    plan, kernel = backward_call.BackwardPlan(c.p, x), emulated.load("keys")
    cu_q, cu_k, queue, _ = starts_of(plan, c)
    lo, hi, first, last = (plan.numbers[name] for name in ("band_lo", "band_hi", "first", "last"))
    sizes = c.p.seqlen_q, c.p.seqlen_k, c.p.heads_k, c.p.group, c.p.batch, 1
    planned = np.full((len(PlanRow), c.p.batch + 2), -1, np.int32)
    numbers = *sizes, lo, hi, *np.ones(3, np.float32), {"ordered": ordered}, cu_q, cu_k, queue, first, last, planned
    emulated.run_plan(x, numbers, room=None)
    params = emulated._params(kernel, numbers)
    scheduler, emulated.role.threads, tiles, since = kernel.SCHEDULER, 128, [], kernel.packed.at_first()
    while (found := scheduler.packed_tile(len(tiles), since, params, x))[0].sequence >= 0:
        tile, since = found
        tiles.append((tile, scheduler.place_packed(tile, params, x)[0]))
    assert len({tuple(int(n) for n in tile) for tile, _ in tiles}) == len(tiles)
    held = sum(min(64 * 2, int(t.seqlen.k.size) - int(t.column)) for _, t in tiles)
    assert held == c.p.seqlen_k * c.p.heads_k  # keys that nobody sees too: their gradients are zeros
    lengths = [-(-int(t.seqlen.q.size) // x.keys.tile_m) for _, t in tiles]
    assert lengths == sorted(lengths, reverse=True)
    rows = [(int(t.sequence), -int(t.row) if ordered else int(t.row)) for t, _ in tiles]
    assert [x for n in dict.fromkeys(n for n, _ in rows) for x in sorted(x for x in rows if x[0] == n)] == rows


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_dq_added_in_order_has_the_same_bits_dense_padded_and_packed(d, causal):
    q, k, v = (x[0] for x in qkv(333, 333, d, d, heads=(4, 2)))
    same = {"causal": causal, "deterministic": "everywhere"}
    dense = call(q[None], k[None], v[None], **same)
    cu = torch.tensor([0, 20, 353, 400])
    packed = call(*(torch.cat([x[:20], x, x[:47]]) for x in (q, k, v)), cu_seqlens_q=cu, cu_seqlens_k=cu, **same)
    packed.do[20:353], packed.dlse[:, 20:353] = dense.do[0], dense.dlse[0]
    longer = (pad(x, (0, 0, 0, 0, 0, 40), value=0.5)[None] for x in (q, k, v))
    padded = call(*longer, mask=tw.key_lengths(torch.tensor([333])), **same)
    padded.do[:, :333], padded.do[:, 333:] = dense.do, 0
    padded.dlse[..., :333], padded.dlse[..., 333:] = dense.dlse, 0
    first, found = Reference().forward(dense.p, dense.t), []
    for c, ctas, rows in (
        (dense, 1, slice(None)),
        (dense, 3, slice(None)),
        (packed, 3, slice(20, 353)),
        (padded, 2, slice(333)),
    ):
        out = Reference().forward(c.p, c.t)
        (out.o[0] if out.o.ndim == 4 else out.o)[rows], out.lse.view(4, -1)[:, rows] = first.o[0], first.lse[0]
        grads = emulate_kernels(c, backward_config.choose(c.p), ctas, out)
        found.append([x.view(-1, *x.shape[-2:])[rows] for x in (grads.dq, grads.dk, grads.dv)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("form", ["whole", "split", "queued-wide", "kept-queued", "kept-halves"])
def test_packed_keys_that_no_query_sees_never_touch_a_gradient(form):
    q, k, v = (x[0] for x in qkv(150, 300))
    cu_q, cu_k = torch.tensor([0, 90, 150]), torch.tensor([0, 200, 300])
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "mask": tw.window(20, 3) & tw.key_range(0, 190)}
    clean = emulate(call(q, k, v, **options), KEYS[form], ctas=2)
    hidden = [*range(90), *range(190, 220)]  # the first queries stand at the keys 110 and 240
    k[hidden], v[hidden] = torch.nan, torch.nan
    dirty = emulate(call(q, k, v, **options), KEYS[form], ctas=2)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(clean, name), getattr(dirty, name))
    assert all((x[hidden] == 0).all() for x in (dirty.dk, dirty.dv))


@pytest.mark.parametrize(
    "form", [name for name, keys in KEYS.items() if backward_config.exists(keys, "full", packed=True)]
)
def test_a_sequence_s_gradients_never_touch_its_neighbour_s(form):
    q, k, v = (x[0] for x in qkv(150, 150))
    cu = torch.tensor([0, 33, 33, 140])
    c = call(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
    for x in (q, k, v, c.do):
        x[33:] = torch.nan
    grads = emulate(c, KEYS[form], ctas=2)
    assert all(torch.isfinite(x[:33]).all() for x in (grads.dq, grads.dk, grads.dv))
    assert all((x[140:] == 0).all() for x in (grads.dq, grads.dk, grads.dv))


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 128), (256, 256)], ids=str)
def test_the_rows_statistics_are_those_of_the_formula(dims):
    c = call(*qkv(150, 40, *(n - 8 for n in dims), batch=2), causal=True)  # rows without keys, and a narrower head
    x, out = backward_config.choose(c.p), Reference().forward(c.p, c.t)
    given = [tensor.float().numpy() for tensor in (out.o, c.do, out.lse, c.dlse)]
    lines = x.statistics_rows(c.p)
    for got, expected in zip(
        emulated.run_preprocess(x, *given, lines), emulated.statistics(*given, lines), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def recorded(c: Call, monkeypatch) -> tuple[list, backward_call.BackwardPlan, tuple]:
    """The tensors of each launch, the plan of a call, and the arguments of its backward."""
    launches: list = []
    stand_in(
        monkeypatch,
        lambda config, given: launches.append(
            [(x.clone(), x.data_ptr()) for x in given if isinstance(x, torch.Tensor)]
        ),
    )
    out = Reference().forward(c.p, c.t)
    given = c.t, replace(out, o=out.o.to(c.p.dtype)), c.do, c.dlse
    return launches, backward_call.BackwardPlan(c.p, backward_config.choose(c.p)), given


def test_each_launch_gets_the_tensors_of_its_call(monkeypatch):
    launches, plan, given = recorded(call(*qkv(130, 200, batch=2), causal=True), monkeypatch)
    t, out, do, dlse = given
    for _ in range(2):
        grads = plan.backward(*given)
        tensors = (t.q, t.k, t.v, out.o, do, out.lse, dlse, grads.dq, grads.dk, grads.dv)
        assert [at for _, at in launches[-1][:10]] == [x.data_ptr() for x in tensors]
    facts = [[(x.shape, x.stride(), x.dtype) for x, _ in launch] for launch in launches]
    assert facts[0] == facts[1]


def test_each_launch_of_a_packed_call_reads_its_own_starts(monkeypatch):
    cu = torch.tensor([0, 40, 130], dtype=torch.int32)
    launches, plan, (t, *given) = recorded(
        call(*(x[0] for x in qkv(130, 130)), cu_seqlens_q=cu, causal=True), monkeypatch
    )
    for starts in ([0, 40, 130], [0, 7, 129]):
        cu = torch.tensor(starts, dtype=torch.int32)
        grads = plan.backward(replace(t, leaves=[cu] * len(t.leaves)), *given)
        assert [x.tolist() for x, _ in launches[-1][7:11]] == [starts, starts, [0], [0]]
        assert [x.shape for x in (grads.dq, grads.dk, grads.dv)] == [x.shape for x in (t.q, t.k, t.v)]
        assert [at for _, at in launches[-1][11:14]] == [x.data_ptr() for x in (grads.dq, grads.dk, grads.dv)]


def test_a_gradient_that_kernels_cannot_read_in_place_is_copied(monkeypatch):
    launches, plan, (t, out, do, dlse) = recorded(call(*qkv(130, 200), causal=True), monkeypatch)
    beside = torch.empty(do.numel() + 1, dtype=do.dtype)[1:].view(do.shape).copy_(do)
    turned = do.transpose(1, 2).contiguous().transpose(1, 2)
    expanded = do[:, :, :1].expand_as(do)
    for one in (do, beside, turned, expanded):
        plan.backward(t, out, one, dlse)
        read, at = launches[-1][4]
        assert torch.equal(read, one)
        assert at % 16 == 0
