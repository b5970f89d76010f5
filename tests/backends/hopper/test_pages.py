"""The Hopper forward over pages: its source on the emulated machine, where its boxes lie, and which calls are its own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tilewise as tw
from bench.testing import Call, normal, paged_call
from tests.backends.hopper import emulated
from tests.backends.hopper.launches import values_of
from tests.backends.paged import Case
from tilewise import accuracy, dispatch
from tilewise.backends.base import Output
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.config import LONG
from tilewise.backends.hopper.forward import config, paged_config
from tilewise.backends.hopper.forward.tiles import Tiles
from tilewise.backends.hopper.host.draft import Draft
from tilewise.backends.hopper.host.paged_call import PagedPlan
from tilewise.gather import in_layout_of
from tilewise.problem import Problem

SMALL = Tiles(64, 64, 2, 128, 3, 1, 240)  # the smallest ring
STEADY = replace(SMALL, q_stages=2, stages=4, pingpong=True, steady=True)
HALF = {"heads": (4, 2), "dims": (64, 64), "dtype": torch.bfloat16}


def emulate(c: Call, tiles: Tiles) -> Output:
    """o and lse of a call over pages, from the source of its kernel with these tiles."""
    return emulate_pages(c, replace(paged_config.choose(c.p), tiles=tiles), 2)


def emulate_pages(c: Call, x: config.Config, ctas: int) -> Output:
    plan, draft = PagedPlan(c.p, x), Draft()
    given = plan.tensors(c.t)
    numbers = values_of(x.parameters[-1], plan.beside(draft), given, draft) | {"ctas": min(ctas, plan.grid.tiles)}
    q = c.t.q if c.p.packed else c.t.q.flatten(0, 1)
    sink = torch.full((c.p.heads_q,), torch.nan) if c.t.sink is None else c.t.sink.float()
    q, k, v = (x.float().numpy() for x in (q[None], c.t.k, c.t.v))
    o, lse = (torch.from_numpy(x[0]) for x in emulated.run(plan.config, q, k, v, sink.numpy(), numbers))
    return in_layout_of(c.p, Output(o.to(c.p.dtype), lse))


CASES = {
    "full": Case(64, (0, 1, 63, 64, 65, 300), rows=3, **HALF),
    "causal": Case(64, (130, 400, 64), rows=150, options=lambda: {"causal": True}, **HALF),
    "pages-of-two-parts": Case(128, (300, 5), rows=(70, 130), options=lambda: {"causal": True}, **HALF),
    "packed": Case(
        64, (200, 0, 65), rows=(130, 0, 3), options=lambda: {"causal": True, "sink": normal(4, seed=3)}, **HALF
    ),
    "window": Case(64, (500, 70), rows=80, options=lambda: {"mask": tw.window(left=100, right=0)}, **HALF),
    "heads-first": Case(64, (140, 200), rows=2, options=lambda: {"causal": True}, heads_first=True, **HALF),
    "small-pages": Case(16, (300, 15, 0, 129), rows=(130, 1, 0, 20), options=lambda: {"causal": True}, **HALF),
    "pages-of-48": Case(48, (300, 50), rows=60, options=lambda: {"mask": tw.window(left=17, right=0)}, **HALF),
    "narrow": Case(64, (140, 200), rows=2, heads=(2, 1), dims=(40, 24), dtype=torch.float16),
}


@pytest.mark.parametrize("name", CASES)
def test_the_source_computes_attention_over_pages(name):
    c = CASES[name].call()
    assert Hopper().refused(c.p) == []
    out = emulate(c, STEADY if name == "causal" else SMALL)
    assert not [str(e) for e in c.expected().judge(accuracy.tensors(out, None)) if not e.ok]


def test_keys_before_every_window_never_touch_a_result():
    case = Case(64, (500,), rows=2, options=lambda: {"mask": tw.window(left=99, right=0)}, **HALF)
    q, cache, options = case.draw()
    before = 500 - 2 - 99  # no row sees a key before this one
    dirty = cache._replace(k_pages=cache.k_pages.clone(), v_pages=cache.v_pages.clone())
    for j in range(before):
        place = cache.block_table[0, j // 64], j % 64
        dirty.k_pages[place], dirty.v_pages[place] = torch.nan, torch.inf
    good, got = (emulate(paged_call(q, x, **options), SMALL) for x in (cache, dirty))
    assert torch.equal(got.o, good.o)
    assert torch.equal(got.lse, good.lse)


# -- Boxes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "first"), [(0, 0), (1, -9), (63, 0), (64, 1), (64, 63), (200, 64), (200, 500), (-5, -900)]
)
def test_a_box_reads_the_rows_that_are_seen_and_no_other(keys, first):
    (pages,) = emulated.imported("forward.pages")
    row, end, wrap = pages.box_of(7000, 64, keys, first)
    read = [row + i + end - wrap for i in range(64) if 0 <= row + i < LONG]
    assert read == [7000 + i for i in range(64) if first <= i < keys]
    places = [i for i in range(64) if 0 <= row + i < LONG]
    assert [7000 + i for i in places] == read


# -- Which calls ---------------------------------------------------------------------------------------------------

REFUSED = {
    "small-pages": (Case(8, (40,), **HALF), "page_size 8"),
    "wide": (Case(64, (140,), rows=65, dims=(264, 264), dtype=torch.bfloat16), "264, above 256"),
    "fp32": (Case(64, (40,), dims=(64, 64)), "float32"),
    "8-bits": (Case(64, (40,), scales="heads", **HALF), "8 bits"),
    "latent": (Case(64, (40,), heads=(4, 1), dims=(64, 32), dtype=torch.bfloat16, latent=True), "memory of k"),
    "score": (Case(64, (40,), options=lambda: {"score": lambda s, b, h, i, j: s + j}, **HALF), "score"),
    "keep": (Case(64, (40,), options=lambda: {"mask": tw.keep(lambda b, h, i, j: j > i)}, **HALF), "causal and window"),
    "key-range": (Case(64, (40,), options=lambda: {"mask": tw.key_range(3, 30)}, **HALF), "causal and window"),
    "narrow-window": (Case(64, (40,), options=lambda: {"mask": tw.window(20, 0)}, **HALF), "window of 21 keys"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_calls_are_refused_with_the_reason(name):
    case, word = REFUSED[name]
    (reason,) = Hopper().refused(case.call().p)
    assert word in reason


def test_a_table_without_pages_is_refused():
    q, cache, options = Case(64, (0,), **HALF).draw()
    c = paged_call(q, cache._replace(block_table=cache.block_table[:, :0]), **options)
    assert Hopper().refused(c.p) == ["a cache without room for a key"]


GPU = torch.device("cuda", 0)


def problem(queries: int | tuple[int, ...], heads: tuple[int, int] = (32, 8), batch: int = 1, **options) -> Problem:
    """A problem over pages of 64 as an H200 would have it: tensors without memory, whose device is called one."""
    rows = (batch, queries) if isinstance(queries, int) else (sum(queries),)
    cu = None if isinstance(queries, int) else torch.empty(len(queries) + 1, dtype=torch.int32, device="meta")
    batch = batch if isinstance(queries, int) else len(queries)
    q = torch.empty(*rows, heads[0], 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(600, 64, heads[1], 128, dtype=torch.bfloat16, device="meta")
    table, lengths = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((batch, 512), (batch,)))
    p = paged_call(q, tw.paged(k, k.clone(), table, lengths), causal=True, cu_seqlens_q=cu, **options).p
    object.__setattr__(p, "device", GPU)
    return p


ORDER = {  # whether Hopper's kernel goes before Triton's, which splits keys
    "a-chunk": (problem(512), True),
    "decoding": (problem(1), True),
    "decoding-of-many": (problem(1, batch=64), True),
    "decoding-of-two": (problem(1, batch=2), True),
    "decoding-of-many-heads": (problem(1, batch=64, heads=(18, 2)), True),
    "decoding-of-more-heads-than-rows": (problem(1, batch=64, heads=(130, 2)), False),
    "decoding-deterministic": (problem(1, batch=64, deterministic=True), True),
    "a-short-chunk": (problem(64), False),
    "short-chunks-of-many": (problem(64, batch=32), False),
    "chunks-of-many": (problem(128, batch=4), True),
    "few-heads": (problem(512, heads=(8, 8)), False),
    "packed": (problem((700, 700, 3)), True),
    "packed-decoding": (problem((1,) * 200), False),
    "deterministic": (problem(512, deterministic=True), True),
    "deterministic-of-many": (problem(128, batch=4, deterministic=True), False),  # as one of them alone
    "deterministic-packed": (problem((700, 700, 3), deterministic=True), False),
}


@pytest.mark.parametrize("name", ORDER)
def test_it_goes_first_where_its_tiles_fill_the_machine(name, monkeypatch):
    monkeypatch.setattr(dispatch.devices, "of", lambda device: SimpleNamespace(cores=132))
    p, first = ORDER[name]
    assert Hopper().refused(p) == []
    assert (dispatch.candidates(p)[0] == "hopper") == first
