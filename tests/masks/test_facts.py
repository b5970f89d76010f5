"""What is known of masks without their tensors, against the matrix of pairs that they keep."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from bench.testing import call, normal
from tilewise.expr import Expr, apply, number, parse, symbol
from tilewise.masks.catalogue import Mask, _atom
from tilewise.masks.facts import as_band, constant_on_blocks, every_key_seen, granularity, kept_pairs
from tilewise.masks.regions import ATOMS, OFF, I, J, Region

IDS = torch.tensor([0] * 9 + [4] + [2] * 20 + [3] * 40)


def chunks_region(size: Expr) -> Region:
    """The mask that docs/adding.md adds."""
    row, column = (I + OFF) // size * size, J // size * size - OFF
    return Region(lo=row, hi=row + size, first=column, last=column + size)


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    monkeypatch.setitem(ATOMS, "chunks", chunks_region)


# The mask, and whether it is known that every key is seen at (70, 70), (75, 70) and (40, 70) queries and keys.
PLACES = torch.arange(150).view(2, 75) % 7
SEEN = {
    "full": (lambda: Mask(""), (True, True, True)),
    "causal": (tw.causal, (True, True, True)),
    "window": (lambda: tw.window(9, 0), (True, True, False)),
    "causal-first": (lambda: tw.causal(align="first"), (True, True, False)),
    "window-first": (lambda: tw.window(9, 30, align="first"), (True, True, True)),
    "prefix": (lambda: tw.prefix(9), (True, True, True)),
    "prefixes": (lambda: tw.prefix(torch.tensor([9, 3])), (True, True, False)),
    "documents": (lambda: tw.documents(IDS) & tw.causal(), (True, True, False)),
    "chunks": (lambda: _atom("chunks", number(8)), (True, True, False)),
    "chunks-causal": (lambda: tw.causal() & _atom("chunks", number(8)), (True, True, False)),
    "all-keys": (lambda: tw.key_range(0, 100), (True, True, True)),
    "key-range": (lambda: tw.key_range(0, 60), (False, False, False)),
    "lengths": (lambda: tw.key_lengths(torch.tensor([70, 70])), (False, False, False)),
    "either": (lambda: tw.window(3, 0) | tw.key_range(5, 9), (True, True, False)),
    "keep-diagonal": (lambda: tw.keep(lambda b, h, i, j: (i - j) % 5 == 0), (True, True, False)),
    "keep-others": (lambda: tw.keep(lambda b, h, i, j: i != j), (False, True, False)),
    "keep-ids": (lambda: tw.keep(lambda b, h, i, j: (PLACES[b, i] == PLACES[b, j]) & (i >= j)), (True, False, False)),
    "keep-ids-causal": (
        lambda: tw.causal() & tw.keep(lambda b, h, i, j: PLACES[b, i] == PLACES[b, j]),
        (True, False, False),
    ),
    "keep-ids-first": (
        lambda: tw.causal(align="first") & tw.keep(lambda b, h, i, j: PLACES[b, i] == PLACES[b, j]),
        (True, False, False),
    ),
    "keep-ids-or": (
        lambda: tw.key_range(0, 5) | tw.keep(lambda b, h, i, j: PLACES[b, i] == PLACES[b, j]),
        (True, False, False),
    ),
    "keep-floats": (
        lambda: tw.keep(lambda b, h, i, j: PLACES.float()[b, i] == PLACES.float()[b, j]),
        (False, False, False),
    ),
    "keep-by-head": (lambda: tw.keep(lambda b, h, i, j: i >= j - h), (False, False, False)),
    "dense": (lambda: tw.dense(normal(70, 70) > 0), (False, False, False)),
}
LENGTHS = ((70, 70), (75, 70), (40, 70))


def region_of(mask: Mask, nq: int, nk: int) -> Region:
    k = torch.zeros(2, nk, 1, 8)
    return call(torch.zeros(2, nq, 2, 8), k, k, mask=mask).p.spec.region


def kept(mask: Mask, nq: int, nk: int) -> torch.Tensor:
    rows = [tw.show_mask(mask, nq, nk, head=h).split("\n") for h in (0, 1)]
    return torch.tensor([[[c == "1" for c in row.split(" ")] for row in head] for head in rows])


@pytest.mark.parametrize("name", SEEN)
def test_every_key_counts_as_seen_only_where_it_is(name):
    build, expected = SEEN[name]
    for (nq, nk), known in zip(LENGTHS, expected, strict=True):
        if name == "dense" and (nq, nk) != (70, 70):
            continue
        assert every_key_seen(region_of(build(), nq, nk), nq, nk) == known
        assert not known or bool(kept(build(), nq, nk).any(1).all())


COUNTED = (
    "full", "causal", "window", "causal-first", "window-first", "prefix", "chunks", "chunks-causal", "all-keys", "key-range",
)  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_pairs_are_counted_where_no_tensor_and_no_function_decides(name):
    for nq, nk in ((70, 70), (75, 70), (40, 70), (3, 70), (70, 3)):
        if name in ("dense", "documents") and (nq, nk) != (70, 70):
            continue
        mask = SEEN[name][0]()
        expected = int(kept(mask, nq, nk)[0].sum()) if name in COUNTED else None
        assert kept_pairs(region_of(mask, nq, nk), nq, nk) == expected


def test_pairs_of_a_band_that_hides_every_pair_and_of_a_long_one():
    hidden = tw.causal() & tw.key_range(9, 20)
    assert kept_pairs(region_of(hidden, 5, 5), 5, 5) == int(kept(hidden, 5, 5)[0].sum()) == 0
    n = 1 << 40
    assert kept_pairs(region_of(tw.causal(), 70, 70), n, n) == n * (n + 1) // 2


def test_a_mask_that_is_added_has_the_facts_of_a_built_in_one():
    added, built_in = (region_of(mask, 70, 70) for mask in (_atom("chunks", number(70)), tw.causal()))
    assert every_key_seen(added, 70, 70)
    assert every_key_seen(built_in, 70, 70)


@pytest.mark.parametrize("mask", [tw.causal(align="first"), tw.window(9, 2, align="first")], ids=str)
def test_a_mask_aligned_at_the_first_is_a_band_of_equal_sequences_alone(mask):
    band = as_band(region_of(mask, 40, 70), 30, 70)
    kept_by_band = [[band.start <= j < band.stop and j < i + band.hi and (band.lo is None or j >= i + band.lo) for j in range(70)]
                    for i in range(40)]  # fmt: skip
    assert torch.equal(torch.tensor(kept_by_band), kept(mask, 40, 70)[0])
    assert as_band(region_of(mask, 40, 70), None, 70) is None


@pytest.mark.parametrize("mask", [tw.prefix(3), tw.documents(IDS), tw.keep(lambda b, h, i, j: i >= j)], ids=str)
def test_a_mask_with_other_ends_than_numbers_is_no_band(mask):
    assert as_band(region_of(mask, 70, 70), 0, 70) is None


GRANULARITY = {
    "(i // 16) == (j // 16)": (16, 16),
    "(i // 16) == (i // 24)": (8, None),
    "((i // 16) + i) > j": (1, 1),
    "(i // 2.5) == 1.0": (1, None),
    "(i // (-4)) < j": (1, 1),
    "(16 // (i + 1)) > (j // 8)": (1, 8),
    "bool0[i // 32, j // 48]": (32, 48),
    "bool0[i, j // 48]": (1, 48),
    "((i // 8) // 2) == h": (8, None),
    "((i + off) // 8) == (j // (b + 1))": (1, 1),
    "(b + h) > 0": (None, None),
}


@pytest.mark.parametrize(("text", "expected"), GRANULARITY.items(), ids=GRANULARITY)
def test_granularity_is_the_block_on_which_a_predicate_is_constant(text, expected):
    e = parse(text)
    assert (granularity(e, "i"), granularity(e, "j")) == expected


def test_a_pattern_of_blocks_is_constant_on_blocks():
    assert constant_on_blocks(parse("bool0[i // 32, j // 48]"))
    assert not constant_on_blocks(parse("bool0[i // 32, j]"))
    assert not constant_on_blocks(symbol("i"))
    assert constant_on_blocks(apply("gt", symbol("h"), number(0)))
