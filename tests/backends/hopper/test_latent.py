"""Latent attention on Hopper: the kernel's source on the emulated machine, its splits, and which calls are its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tilewise as tw
from bench import records
from bench.testing import Call, call, normal, paged_call
from tests.backends.hopper import emulated, emulated_latent
from tests.backends.paged import Case
from tilewise import accuracy, dispatch
from tilewise.backends.base import Output
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.host import masks
from tilewise.backends.hopper.host.latent_call import LatentPlan
from tilewise.backends.hopper.host.selected_call import SelectedPlan
from tilewise.backends.hopper.latent import config, selected
from tilewise.backends.hopper.parameters import names_of
from tilewise.gather import in_layout_of
from tilewise.problem import Problem, Signature
from tilewise.spec import Options, assemble, parse_spec

KIND = {"dims": (576, 512), "dtype": torch.bfloat16, "latent": True}


def emulate(c: Call, splits: int, least: int = 1) -> Output:
    """o and lse of a call, from the source of its kernel with so many splits."""
    shares = {"pair": splits > 1, "split": splits > config.PAIR}
    if selected.asked(c.p):
        return emulate_selected(c, splits, SelectedPlan(c.p, replace(selected.choose(c.p), **shares)))
    plan = LatentPlan(c.p, replace(config.choose(c.p), **shares))
    scales = tuple(
        x.expand(len(c.t.seqlens_k), c.p.heads_k).numpy() for x in (c.t.k_scale, c.t.v_scale) if x is not None
    )
    given = plan.numbers | {
        "num_pages": c.p.k.shape[0],
        "tiles": config.tiles_of(c.p),
        "splits": splits,
        "least": least,
    }
    numbers = [given[name] for name in (*names_of(plan.config.parameters[-1]), "num_pages")]
    q = c.t.q if c.p.packed else c.t.q.flatten(0, 1)
    sink = torch.full((c.p.heads_q,), torch.nan) if c.t.sink is None else c.t.sink.float()
    extra = tuple(plan.tensors(c.t)[name].numpy() for name in ("cu_q", "seqlens_k", "block_table"))
    arrays = (x.float().numpy() for x in (q[None], c.t.k, sink))
    o, lse = (
        torch.from_numpy(np.array(x[0])) for x in emulated_latent.run(plan.config, *arrays, extra, numbers, scales)
    )
    return in_layout_of(c.p, Output(o.to(c.p.dtype), lse))


def emulate_selected(c: Call, splits: int, plan: SelectedPlan) -> Output:
    given = plan.numbers | {"splits": splits, "least": 1}
    q, k = (x if x.ndim == 3 else x.flatten(0, 1) for x in (c.t.q, c.t.k))
    tensors = plan.tensors(c.t)
    extra = [tensors["entries"].flatten(0, 2), tensors["tokens"].flatten(0, 1), tensors.get("block_table")]
    extra[-1] = extra[1] if extra[-1] is None else extra[-1]
    sink = torch.full((c.p.heads_q,), torch.nan) if c.t.sink is None else c.t.sink.float()
    numbers = [given[x] for x in (*names_of(plan.config.parameters[-1]), "num_pages", "block", "page_rows")]
    arrays = (x.float().numpy() for x in (q[None], k.unsqueeze(1), sink))
    o, lse = emulated_latent.run(plan.config, *arrays, tuple(x.numpy() for x in extra), numbers, ())
    o, lse = (torch.from_numpy(np.array(x[0])) for x in (o, lse))
    return in_layout_of(c.p, Output(o.to(c.p.dtype), lse))


CASES = {
    "lengths": (Case(64, (0, 1, 63, 65, 300), heads=(6, 1), rows=3, options=lambda: {"causal": True}, **KIND), 1),
    "splits-sink": (Case(64, (130, 1), heads=(66, 1), options=lambda: {"sink": normal(66, seed=3)}, **KIND), 4),
    "packed": (
        Case(128, (200, 0, 65), rows=(13, 0, 3), heads=(8, 2), options=lambda: {"causal": True, "sink": normal(8, seed=3)}, **KIND),
        2,
    ),
    "window-fp16": (
        Case(128, (330, 70), heads=(16, 1), rows=9, options=lambda: {"mask": tw.window(70, 0)}, **KIND | {"dtype": torch.float16}), 1
    ),
    "8-bits": (Case(64, (0, 1, 63, 65, 300), heads=(6, 1), rows=3, options=lambda: {"causal": True}, scales="one", **KIND), 2),
    "8-bits-sequences": (
        Case(128, (330, 70), heads=(6, 2), rows=9, options=lambda: {"mask": tw.window(70, 0)}, scales="sequences", **KIND), 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_source_computes_attention(name):
    case, splits = CASES[name]
    c = case.call()
    assert Hopper().refused(c.p) == []
    errors = c.expected().judge(accuracy.tensors(emulate(c, splits), None))
    assert not [str(e) for e in errors if not e.ok]


def test_a_dense_cache_has_any_capacity():
    k = normal(3, 330, 1, 576, dtype=torch.bfloat16)
    lengths = torch.tensor([330, 70, 0], dtype=torch.int32)
    for b, length in enumerate(lengths.tolist()):
        k[b, length:] = torch.nan
    cache = tw.dense_cache(k, k[..., :512], lengths)
    c = paged_call(normal(3, 2, 4, 576, dtype=torch.bfloat16), cache, causal=True)
    assert Hopper().refused(c.p) == []
    errors = c.expected().judge(accuracy.tensors(emulate(c, 2), None))
    assert not [str(e) for e in errors if not e.ok]


# -- Selected keys -------------------------------------------------------------------------------------------------


def latent_call(
    seqlen_q,
    seqlen_k: int,
    indices,
    block: int = 1,
    heads: int = 6,
    batch: int = 1,
    cu=(),
    mask=None,
    block_q: int = 1,
    **options,
) -> Call:
    """A call with keys selected by ``indices`` (drawn if a number: so many a row), NaN in those that no query sees."""
    generator = torch.Generator().manual_seed(5)
    packed, drawn = bool(cu), isinstance(indices, int)
    if drawn:
        shape = (len(cu[0]) - 1 if packed else batch, 1, -(-seqlen_q // block_q), indices)
        indices = torch.randint(-1, -(-seqlen_k // block), shape, generator=generator)
    shapes = [
        (n, 1, 576) if packed else (batch, n, 1, 576)
        for n in ((cu[0][-1], cu[1][-1]) if packed else (seqlen_q, seqlen_k))
    ]
    q = torch.randn(*shapes[0][:-2], heads, 576, generator=generator).bfloat16()
    k = torch.randn(shapes[1], generator=generator).bfloat16()
    mask = tw.selected(indices, block, block_q) & (tw.window() if mask is None else mask)
    if packed:
        options |= {"cu_seqlens_q": torch.tensor(cu[0]), "cu_seqlens_k": torch.tensor(cu[1])}
    c = call(q, k, k[..., :512], mask=mask, **options).forward_only()
    if not packed:
        c.t.k.masked_fill_(~masks.seen(c.p, c.t.leaves, c.p.group).mT.unsqueeze(-1), torch.nan)
    return c


def over_pages(
    queries: int, lengths: tuple[int, ...], entries: int, size: int, block: int = 1, heads: int = 6, cu=(), **options
) -> Call:
    """A call over pages in any order, with NaN in those of nobody."""
    generator, pages = torch.Generator().manual_seed(5), -(-max(lengths) // size)
    table = torch.randperm(len(lengths) * pages + 2, generator=generator)
    used, spare = table[:-2].view(len(lengths), pages).int(), table[-2:]
    k = torch.randn(len(table), size, 1, 576, generator=generator).bfloat16()
    k[spare] = torch.nan
    indices = torch.randint(-1, -(-max(lengths) // block), (len(lengths), 1, queries, entries), generator=generator)
    rows = (cu[-1],) if cu else (len(lengths), queries)
    options |= {"cu_seqlens_q": torch.tensor(cu)} if cu else {}
    q = torch.randn(*rows, heads, 576, generator=generator).bfloat16()
    cache = tw.paged(k, k[..., :512], used, torch.tensor(lengths, dtype=torch.int32))
    return paged_call(q, cache, mask=tw.selected(indices, block), **options)


SELECTED = {
    "pages": (lambda: over_pages(1, (300, 0, 70), 130, 16, sink=normal(6, seed=3)), 1),
    "pages-splits": (lambda: over_pages(2, (300, 129), 200, 48, heads=66, causal=True), 4),
    "packed-pages": (lambda: over_pages(4, (130, 1, 290), 20, 7, 8, cu=(0, 3, 3, 7), causal=True), 2),
    "causal": (lambda: latent_call(5, 300, 130, causal=True), 1),
    "blocks-sink": (lambda: latent_call(3, 330, 3, 64, 66, sink=normal(66, seed=3), causal=True), 1),
    "window": (lambda: latent_call(6, 300, 200, batch=2, mask=tw.window(70, 0)), 1),
    "rows-of-queries": (lambda: latent_call(5, 129, 40, block_q=2, causal=True), 1),
    "pairs": (lambda: latent_call(2, 300, 200, batch=2, causal=True), 2),
    "splits": (lambda: latent_call(2, 300, 300, 1, 66, sink=normal(66, seed=3)), 4),
    "packed": (lambda: latent_call(4, 70, 65, cu=([0, 2, 2, 6], [0, 70, 75, 145]), causal=True, sink=normal(6, seed=3)), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", SELECTED)
def test_the_source_gathers_selected_keys(name):
    make, splits = SELECTED[name]
    c = make()
    assert Hopper().refused(c.p) == []
    errors = c.expected().judge(accuracy.tensors(emulate(c, splits), None))
    assert not [str(e) for e in errors if not e.ok]


def test_a_call_with_selected_keys_has_a_plan_of_its_own():
    q, k = normal(1, 5, 6, 576, dtype=torch.bfloat16), normal(1, 70, 1, 576, dtype=torch.bfloat16)
    mask = tw.causal() & tw.selected(torch.zeros(1, 1, 5, 3, dtype=torch.int32))
    extras, _, text = assemble(q, k, k[..., :512], Options(mask=mask))
    p = Signature.of(q, k, k[..., :512], extras, parse_spec(text)).problem()
    assert Hopper().refused(p) == []
    plan = Hopper()._plan(p)
    assert type(plan) is SelectedPlan
    assert set(plan.launches.given) == {"q", "k", "entries", "tokens"}
    apart = Signature.of(q, k, k[..., :512].clone(), extras, parse_spec(text)).problem()
    assert "v outside of k's memory" in " ".join(Hopper().refused(apart))


# -- Keys of a tile ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 64), (0, 65), (70, 300), (63, 127), (64, 192), (130, 700)])
def test_each_key_is_kept_in_one_tile_and_no_unseen_key_of_a_page_is_loaded(start, stop):
    (tiles,) = emulated.imported("latent.tiles")
    tile = SimpleNamespace(start=start, stop=stop)
    kept = []
    for n in range(start // 64, -(-stop // 64)):
        shift = tiles.shift_of(n, tile)
        for size in (64, 192):  # rows of a page
            rows = [n * 64 % size + shift + r for r in range(64)]
            keys = [n * 64 + shift + r for r, row in enumerate(rows) if 0 <= row < size]
            seen = [key for key in keys if n * 64 <= key < n * 64 + 64 and start <= key < stop]
            assert all(start <= key < stop for key in keys)
        kept += seen
    assert kept == list(range(start, stop))


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("least", [1, 8])
def test_splits_share_out_the_tiles(splits, least, monkeypatch):
    (tiles,) = emulated.imported("latent.tiles")
    monkeypatch.setattr(emulated.role, "splits", splits, raising=False)
    monkeypatch.setattr(emulated.role, "ctas", 1, raising=False)
    for start, stop in ((0, 0), (70, 70), (0, 1), (100, 3000), (64, 128)):
        parts = [tiles.split_range(start, stop, n, SimpleNamespace(least=least)) for n in range(splits)]
        found = [n for first, last in parts for n in range(first, last)]
        assert found == (list(range(start // 64, -(-stop // 64))) if stop > start else [])
        assert all(last - first >= least for first, last in parts[:-1] if len(found) >= splits * least)


# -- Which calls ---------------------------------------------------------------------------------------------------

REFUSED = {
    "small-pages": (Case(16, (40,), heads=(4, 1), **KIND), "page_size 16"),
    "8-bits-by-token": (Case(64, (40,), heads=(4, 1), scales="tokens", **KIND), "scale for each token"),
    "softcap": (Case(64, (40,), heads=(4, 1), options=lambda: {"score": tw.softcap(2.0)}, **KIND), "score"),
    "narrow-window": (Case(64, (40,), heads=(4, 1), options=lambda: {"mask": tw.window(20, 0)}, **KIND), "21 keys"),
    "fp32": (Case(64, (40,), heads=(4, 1), **KIND | {"dtype": torch.float32}), "float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_calls_are_refused_with_the_reason(name):
    case, word = REFUSED[name]
    (reason,) = Hopper().refused(case.call().p)
    assert word in reason


def problem(queries: int, heads: int = 128, batch: int = 32, keys: int = 8192, **options) -> Problem:
    """A decoding step as an H200 would have it: tensors without memory, whose device is called one."""
    q = torch.empty(batch, queries, heads, 576, dtype=torch.bfloat16, device="meta")
    k = torch.empty(600, 64, 1, 576, dtype=torch.bfloat16, device="meta")
    shapes = (batch, keys // 64), (batch,)
    table, lengths = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in shapes)
    p = paged_call(q, tw.paged(k, k[..., :512], table, lengths), causal=True, **options).p
    for name, value in (("device", torch.device("cuda", 0)), ("latent", True)):
        object.__setattr__(p, name, value)
    return p


@pytest.mark.parametrize(
    ("p", "first", "splits"),
    [
        (problem(1), True, 2),
        (problem(1, heads=16), True, 4),
        (problem(1, heads=8), False, 4),
        (problem(4, heads=16), True, 4),
        (problem(1, batch=1), False, 16),
        (problem(64, batch=4), True, 1),
        (problem(1, deterministic=True), True, 16),
    ],
    ids=["decoding", "sixteen-heads", "few-heads", "few-heads-verified", "alone", "chunks", "deterministic"],
)
def test_it_goes_first_with_as_many_splits_as_run_at_once(p, first, splits, monkeypatch):
    monkeypatch.setattr(dispatch.devices, "of", lambda device: SimpleNamespace(cores=132))
    assert Hopper().refused(p) == []
    assert (dispatch.candidates(p)[0] == "hopper") == first
    assert config.splits_of(p) == splits


def test_no_other_number_of_splits_was_measured_to_be_faster(monkeypatch):
    monkeypatch.setattr(dispatch.devices, "of", lambda device: SimpleNamespace(cores=132))
    times = {}  # ms by splits, of each shape
    for r in records.read(Path(records.__file__).with_name("results") / "hopper-calls.jsonl"):
        # The contestant hopper-N has N splits.
        splits = r.get("contestant", "").removeprefix("hopper-")
        if r["run"] == "h200-latent-sooner" and r.get("metric") == "time" and splits.isdigit():
            shape = tuple(r["shape"][name] for name in ("queries", "heads_q", "batch", "keys"))
            times.setdefault(shape, {})[int(splits)] = r["value"]
    assert len(times) == 12
    for shape, by_splits in times.items():
        assert by_splits[config.splits_of(problem(*shape))] < 1.03 * min(by_splits.values()), shape
