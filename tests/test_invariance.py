"""``deterministic="everywhere"``: the bits of a row follow from the row, whatever way its call has it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tilewise as tw
from tests import ways
from tests.ways import Scene
from tilewise import dispatch
from tilewise.backends.cpu import Cpu, library
from tilewise.backends.triton import interpreting

DOCS = Path(__file__).parents[1] / "docs"
PAGE, COSTS = DOCS / "algorithm.md", DOCS / "invariance.md"
BACKENDS = [
    "portable",
    pytest.param("cpu", marks=pytest.mark.skipif(isinstance(library.load(), str), reason="no native library")),
]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

# Heads (q, k), head dims (of k, of v), dtype and options. Of 150 rows a tile ends within a chunk. Decoding computes every tenth.
CASES = {
    "causal": ((4, 2), (64, 64), BF16, {}),
    "fp32": ((4, 1), (64, 64), F32, {}),
    "window": ((4, 2), (128, 128), BF16, {"window": 40}),
    "sinks": ((4, 2), (64, 64), F16, {"with_sink": True}),
    "softcap": ((4, 2), (64, 64), BF16, {"cap": 5.0}),
    "wide": ((2, 2), (256, 256), F32, {}),
    "latent": ((4, 1), (96, 64), BF16, {"latent": True}),
    "not-causal": ((4, 2), (64, 64), BF16, {"causal": False}),
}


def scene(name: str, backend: str, seqlen: int = 150) -> Scene:
    heads, dims, dtype, more = CASES[name]
    return Scene.drawn(seqlen, heads, dims, dtype, backend=backend, every=10, **more)


# -- The definition ----------------------------------------------------------------------------------------------------


def defined() -> dict:
    """Return what the page's program defines."""
    section = PAGE.read_text(encoding="utf-8").partition("## 16. One order")[2]
    made: dict = {}
    exec(re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1), made)
    return made


@pytest.mark.parametrize("window", [None, 60])
def test_the_portable_backend_computes_the_page_s_program(window):
    s = Scene.drawn(140, (2, 1), (16, 16), F32, window=window, backend="portable")
    o, lse, _ = ways.dense(s)
    one_row = defined()["one_row"]
    for i in range(0, 140, 23):
        seen = range(0 if window is None else max(0, i - window), i + 1)
        for h in range(2):
            expected = one_row(s.q[i, h] * 0.25, s.k[:, 0], s.v[:, 0], seen)
            assert torch.equal(o[i, h], expected[0])
            assert torch.equal(lse[h, i], expected[1])


# -- All pairs of ways -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_bits_in_every_way(name, backend):
    found = ways.compared(scene(name, backend))
    assert (found.different, found.reasons) == ([], {})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_same_bits_dense_packed_padded_and_as_a_document(name, backend):
    found = ways.compared_gradients(scene(name, backend))
    assert (found.different, found.reasons) == ([], {})


@pytest.mark.skipif(isinstance(library.load(), str), reason="no native library")
@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("isa", getattr(library.load(), "isas", ()))
def test_few_rows_where_keys_lie_have_the_bits_of_many_in_packed_tiles(isa, dtype, window, monkeypatch):
    """Up to 16 rows of a head group, by every instruction set; pages of 8 part the 16 keys that a kernel reads together."""
    cpu, asked = dispatch.backend("cpu"), Cpu(isa=isa)
    monkeypatch.setattr(cpu, "isa", isa)
    monkeypatch.setattr(cpu, "_prepared", asked._prepared)
    for dims in ((64, 64), (96, 32), (576, 512)):
        s = Scene.drawn(210, (3, 1), dims, dtype, window=window, backend="cpu")
        whole, cache = ways.dense(s), ways.Cache(s, 8)
        assert tw.explain(s.q[None], s.k[None], s.v[None], **s.options()).tiles.startswith(isa + ",")
        for count in (1, 4, 5):
            rows = torch.arange(210 - count, 210)
            alone = tw.attention_with_lse(s.q[None, -count:], s.k[None], s.v[None], **s.options())
            for o, lse in ((x[0] for x in alone), cache.attend(s.q[-count:], 210)):
                assert not ways.differing(s, whole, (o, lse, rows))


# Head dims of the page's grid (of k, of v), and its options. Each cell has groups of one and of four query heads.
GRID = {"64": (64, 64), "128": (128, 128), "256": (256, 256), "576 / 512, latent": (576, 512)}
OPTIONS = {"causal": {}, "window": {"window": 40}, "sinks": {"with_sink": True}, "softcap": {"cap": 5.0}}


@pytest.mark.skipif(isinstance(library.load(), str), reason="no native library")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dims", GRID)
def test_the_page_s_grid_is_what_the_cpu_does(dims, option):
    latent, total = "latent" in dims, [0, 0, 0]
    for group in (1, 4):
        heads_k = 1 if latent else 2
        more = OPTIONS[option] | {"backend": "cpu", "every": 10, "latent": latent}
        s = Scene.drawn(150, (group * heads_k, heads_k), GRID[dims], BF16, **more)
        forward, backward = ways.compared(s), ways.compared_gradients(s)
        found = forward.equal, backward.equal, forward.refused + backward.refused
        total = [x + y for x, y in zip(total, found, strict=True)]
    rows = re.findall(r"^\| ([^|]*) \|(.*)\|$", COSTS.read_text(encoding="utf-8"), re.MULTILINE)
    cells = dict(zip(OPTIONS, dict(rows)[dims].split(" | "), strict=True))
    assert cells[option].strip() == "{} + {} / {}".format(*total)


def dot(self, a, b, d, *_):
    """A product as one instruction makes it, whichever operand lies transposed: NumPy's BLAS may take another order of sums for each."""
    found = a.data.astype(np.float64) @ b.data.astype(np.float64)
    return type(d)(found.astype(d.data.dtype) + d.data, d.dtype.scalar)


# The interpreter takes 5 ms for a pair of tiles: one scene, and the ways that have kernels of their own.
@pytest.mark.skipif(not interpreting(), reason="kernels are not interpreted (tests/conftest.py)")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities that the mathematics selects away
@pytest.mark.parametrize("window", [None, 20])
def test_triton_gives_a_row_the_same_bits(window, monkeypatch):
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    s = Scene.drawn(100, (2, 1), (32, 32), F16, window=window, backend="triton", every=50)
    found = ways.compared(s, ("dense", "packed", "document", "padded", "pages of 16", "decoded"))
    assert (found.different, found.reasons) == ([], {})


@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_plays_no_part(threads):
    s, before = scene("causal", "portable"), torch.get_num_threads()
    expected = ways.dense(s)
    torch.set_num_threads(threads)
    try:
        assert not ways.differing(s, expected, ways.dense(s))
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("error")
def test_documents_in_a_compiled_function_run_between_graphs_or_are_refused_in_words():
    def call(x):
        mask, score = tw.documents(DOCUMENTS), tw.softcap(3.0)
        return tw.attention(x, x, x, mask=mask, score=score, deterministic="everywhere")

    x = torch.randn(1, DOCUMENTS.shape[-1], 2, 8, generator=torch.Generator().manual_seed(1))
    torch.compiler.reset()
    assert torch.equal(torch.compile(call, backend="eager")(x), call(x))
    torch.compiler.reset()
    with pytest.raises(Exception, match="documents as packed sequences to"):
        torch.compile(call, backend="eager", fullgraph=True)(x)


def test_a_batch_of_documents_has_the_queries_of_each():
    """Chunks of queries, at the end of documents that lie differently in each batch element."""
    q, k, v = (torch.randn(2, n, 2, 16) for n in (50, 120, 120))
    ids = torch.tensor([[0] * 40 + [1] * 80, [0] * 100 + [1] * 20])
    kept = tw.documents(ids) & tw.causal()
    o = tw.attention(q, k, v, mask=kept, deterministic="everywhere")
    torch.testing.assert_close(o, tw.attention(q, k, v, mask=kept), rtol=1e-5, atol=1e-5)  # the same attention


# -- What is refused ---------------------------------------------------------------------------------------------------


def attend(**options) -> torch.Tensor:
    q = torch.randn(1, 20, 2, 16, dtype=options.pop("dtype", F32))
    return tw.attention(q, q, q, deterministic="everywhere", **options)


def quantised() -> torch.Tensor:
    pages, one = torch.zeros(1, 16, 1, 16, dtype=torch.float8_e4m3fn), torch.ones(())
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    cache = tw.paged(pages, pages, table, lengths, k_scale=one, v_scale=one)
    return tw.attention_paged(torch.zeros(1, 1, 2, 16), cache, deterministic="everywhere")


DOCUMENTS = torch.tensor([0] * 9 + [1] * 11)
REFUSED = {
    "dropout": (lambda: attend(dropout_p=0.5), "with dropout, which counts the batch"),
    "8-bits": (quantised, "a cache in 8 bits"),
    "left-padding": (lambda: attend(mask=tw.key_range(3, 20)), "padding before the keys"),
    "documents-beside-a-prefix": (
        lambda: attend(mask=tw.documents(DOCUMENTS) & tw.prefix(3)),
        "prefix(3) reads positions",
    ),
    "documents-beside-a-score": (
        lambda: attend(mask=tw.documents(DOCUMENTS), score=tw.alibi(torch.ones(2))),
        "the score reads positions",
    ),
    "documents-of-another-batch": (
        lambda: attend(mask=tw.documents(DOCUMENTS.expand(3, -1))),
        "documents of 3 batch elements, q has 1",
    ),
    "documents-that-are-mapped": (
        lambda: torch.vmap(lambda ids: attend(mask=tw.documents(ids)), randomness="same")(DOCUMENTS.expand(3, -1)),
        "documents inside torch.vmap",
    ),
    "documents-in-a-union": (lambda: attend(mask=tw.documents(DOCUMENTS) | tw.window(3, 3)), "in a union"),
    "reference": (lambda: attend(backend="reference"), "no one order of summation"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_cannot_keep_it_is_refused_by_name(name):
    call, reason = REFUSED[name]
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        call()


def test_lengths_do_not_choose_the_backend(monkeypatch):
    """A backend that has the order of such rows runs all ways of them, or refuses: another one would have other bits."""
    first = dispatch.BACKENDS[0].name
    monkeypatch.setattr(
        type(dispatch.backend(first)), "unsupported", lambda self, p: ["more than 10 rows"] * (p.seqlen_q > 10)
    )
    dispatch.forget()
    try:
        with pytest.raises(NotImplementedError, match="more than 10 rows"):
            attend()
    finally:
        dispatch.forget()


def test_explain_says_it():
    q = torch.randn(1, 20, 2, 16)
    told = tw.explain(q, q, q, mask=tw.documents(DOCUMENTS) & tw.causal(), deterministic="everywhere")
    assert "packed, 2 sequences    deterministic everywhere" in str(told).replace("\n          ", "    ")
    said = " ".join(str(told).split())
    assert f"order one for a row's sums: {dispatch.ORDER_COSTS[told.chosen]} (docs/invariance.md)" in said
    assert "order " not in str(tw.explain(q, q, q, deterministic=True))


@pytest.mark.parametrize("name", [row.name for row in dispatch.BACKENDS])
def test_the_costs_that_explain_says_stand_on_the_page(name):
    section = COSTS.read_text(encoding="utf-8").partition("## What it costs")[2].partition("\n## ")[0]
    numbers = re.findall(r"\d[\d,.]*\d", dispatch.ORDER_COSTS[name])
    assert [x for x in numbers if x not in re.findall(r"\d[\d,.]*\d", section)] == []


# -- Drawn pairs ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(isinstance(library.load(), str), reason="no native library")
def test_drawn_pairs_are_equal_and_those_of_another_kernel_are_not():
    found = ways.pairs(30, ways.CPU, backend="cpu")
    assert (found["pairs"], found["failures"]) == (30, [])
    assert min(found["backward"], found["latent"]) > 2
    s = scene("causal", "cpu", seqlen=300)
    assert ways.differing(s, ways.dense(s), ways.dense(replace(s, backend="portable")))
