"""Selected keys, which the cpu backend reads once for all heads that share them."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tilewise as tw
from bench import testing
from bench.testing import Call, call, normal, qkv
from tilewise.backends.cpu import Cpu, gathered, library

if isinstance(library.load(), str):
    pytest.skip("no native library", allow_module_level=True)

CPU = Cpu()
NQ, NK = 30, 128


def entries(*shape: int, blocks: int, seed: int = 0) -> Tensor:
    """Some of them -1, some twice."""
    return torch.randint(-1, blocks, shape, generator=torch.Generator().manual_seed(seed))


def selected(block: int = 1, heads: int = 1, batch: int = 1, count: int = 6) -> tw.Mask:
    return tw.selected(entries(batch, heads, NQ, min(count, NK // block // 4), blocks=NK // block), block)


def of(mask: tw.Mask, group: int = 16, dtype: torch.dtype = torch.float32, dv: int = 32, **options: object) -> Call:
    return call(*qkv(2, NQ, NK, 2 * group, 2, 32, dv, dtype), mask=mask, **options)


CASES = {
    "tokens": lambda: of(selected()),
    "of-each-key-head": lambda: of(selected(heads=2, batch=2)),
    "causal-blocks": lambda: of(selected(16, heads=2) & tw.causal(), group=3),
    "causal-first": lambda: of(selected(4) & tw.causal(align="first"), group=1),
    "key-lengths": lambda: of(selected(8, heads=2) & tw.key_lengths(torch.tensor([60, 101])), group=20),
    "no-key": lambda: of(selected() & tw.key_lengths(torch.tensor([0, 128]))),
    "softcap-sink": lambda: of(selected() & tw.causal(), score=tw.softcap(2.0), sink=normal(32), softmax_scale=0.4),
    "softcap-bfloat16": lambda: of(selected(8, heads=2), group=3, score=tw.softcap(1.0), dtype=torch.bfloat16),
    "score-that-hides": lambda: of(
        selected(count=32), score=tw.score(lambda s, b, h, i, j: torch.where(s > 0, s * s, -torch.inf))
    ),
    "largest-score": lambda: of(selected(heads=2), group=5, sink=normal(10), max_logit=True).forward_only(),
    "sink-wide-heads": lambda: of(selected(heads=2), group=70, dv=200, sink=normal(140)),
    "many-keys": lambda: of(selected(4, count=8) & tw.causal(), group=2, dv=7),
    "deterministic": lambda: of(selected(), deterministic=True),
    "float64": lambda: of(selected(2), dtype=torch.float64),
    "bfloat16": lambda: of(selected(heads=2) & tw.causal(), dtype=torch.bfloat16, dv=48),
    "float16": lambda: of(selected(16), group=40, dtype=torch.float16),
}


@pytest.mark.parametrize("name", CASES)
def test_few_keys_are_gathered_and_right(name):
    c = CASES[name]()
    assert CPU.config(c.p).gathered
    assert not testing.wrong(CPU, c)


OTHERS = {
    "many-keys": lambda: of(selected(count=32) | tw.window(1, 0)),
    "a-window": lambda: of(selected() & tw.window(left=20)),
    "a-score-of-the-place": lambda: of(selected(), score=tw.alibi(normal(32))),
    "dropout": lambda: of(selected(), dropout_p=0.5, dropout_seed=1),
    "rows-of-queries": lambda: of(tw.selected(entries(1, 1, 2, 2, blocks=16), 8, 16)),
    "blocks-that-overhang": lambda: of(tw.selected(entries(1, 1, NQ, 2, blocks=13), 10)),
    "its-own-tiles": lambda: of(selected()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_go_tile_by_tile(name):
    c = OTHERS[name]()
    backend = Cpu(replace(CPU.config(c.p), gathered=False)) if name == "its-own-tiles" else CPU
    assert not backend.config(c.p).gathered
    assert not testing.wrong(backend, c)


def test_a_length_that_no_block_divides_is_told_apart_from_one_of_the_same_structure():
    for nk in (128, 120, 128, 125):
        q, k, v = qkv(1, 8, nk, 2, 1)
        mask = tw.selected(entries(1, 1, 8, 2, blocks=nk // 8), 8)
        torch.testing.assert_close(
            tw.attention(q, k, v, mask=mask), tw.attention(q, k, v, mask=mask, backend="portable")
        )


def test_pages_are_made_again_after_the_indices_were_written():
    indices, (q, k, v) = entries(1, 1, NQ, 6, blocks=NK), qkv(1, NQ, NK, 4, 1)
    mask = tw.causal() & tw.selected(indices)
    for seed in range(3):
        indices.copy_(entries(1, 1, NQ, 6, blocks=NK, seed=seed))
        torch.testing.assert_close(
            tw.attention(q, k, v, mask=mask), tw.attention(q, k, v, mask=mask, backend="portable")
        )


def test_pages_are_forgotten_with_the_mask():
    q, k, v = qkv(1, NQ, NK, 4, 1)
    before = len(gathered._tables._found)
    mask = selected()
    tw.attention(q, k, v, mask=mask)
    assert len(gathered._tables._found) == before + 1
    del mask
    gc.collect()
    assert len(gathered._tables._found) == before


def test_keys_of_any_strides_are_gathered():
    q, k, v = qkv(2, NQ, NK, 4, 2)
    forms = [
        lambda x: x,
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat([x, x], -1)[..., :16],
    ]
    found = [testing.results(CPU, call(*map(form, (q, k, v)), mask=selected(4))) for form in forms]
    assert not testing.other_bits(found[0], found[1])
    assert not testing.other_bits(found[0], found[2])


def test_the_bits_do_not_depend_on_threads():
    c = of(selected())
    before, found = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(testing.results(CPU, c))
    torch.set_num_threads(before)
    assert not testing.other_bits(*found)


def test_a_sequence_does_not_depend_on_its_batch_when_deterministic():
    q, k, v = qkv(2, NQ, NK, 4, 1)
    mask = selected()
    pair, alone = (
        testing.results(CPU, replace(c, do=normal(2, NQ, 4, 16)[:n], dlse=torch.zeros_like(c.dlse)))
        for n in (2, 1)
        for c in [call(q[:n], k[:n], v[:n], mask=mask, deterministic=True)]
    )
    assert not testing.other_bits(alone, {name: x[:1] for name, x in pair.items()})


def test_keys_that_no_query_was_given_may_hold_nan():
    q, k, v = qkv(1, NQ, NK, 4, 1)
    mask = tw.selected(entries(1, 1, NQ, 6, blocks=NK - 8))
    clean = testing.results(CPU, call(q, k, v, mask=mask))
    k[:, -8:] = v[:, -8:] = torch.nan
    assert not testing.other_bits(testing.results(CPU, call(q, k, v, mask=mask)), clean)


def test_it_is_explained():
    c = of(selected())
    assert "the selected keys of each query" in CPU.config(c.p).describe()
