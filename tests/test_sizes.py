"""Decisions that are recorded with symbols for sizes: what they compute for other sizes is what they would have decided anew."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tilewise import dispatch, sizes
from tilewise.sizes import MISSED, ByStructure, Record


def recorded(decide, *given):
    record = Record(given)
    return record.function(decide(*record.symbols))


class Pair(NamedTuple):
    a: int
    b: int


@dataclass(frozen=True)
class Grid:
    tiles: int
    name: str
    more: dict


def decide(n: int, m: int):
    """A decision with all that one may do."""
    tiles = -(-n // 64)
    best = min((1, 2, 4), key=lambda parts: abs(tiles * parts - 132) + parts / 3)
    if n > 2 * m:
        return Grid(tiles * best, "wide", {"pair": Pair(n % 7, max(n, m)), "flags": (n >= m, tiles == 3)})
    clocks = [math.ceil(tiles / 3 * m), math.floor(n / m) if m else 0, round(n / 8), (n << 2) ^ 0 if n < 0 else n >> 1]
    return [sizes.larger(n, 100), sizes.smaller(n, m), slice(tiles, None), clocks, n.bit_length(), -n]


SIZES = st.integers(0, 5000)


@given(SIZES, SIZES, SIZES, SIZES)
def test_a_recorded_decision_is_the_decision_or_says_that_it_is_another(n, m, other_n, other_m):
    function = recorded(decide, n, m)
    assert function(n, m) == decide(n, m)
    found = function(other_n, other_m)
    assert found is MISSED or found == decide(other_n, other_m)


@given(SIZES, SIZES)
def test_neutral_operands_change_nothing_and_are_not_recorded(n, m):
    def decide(n):
        return n * 1, 1 * n, n + 0, 0 + n, n - 0, n // 1, 0 - n, 1 // (n + 1), n / 1, (n / 2) // 1, (n / 2) * 1

    record = Record((n,))
    symbol = record.symbols[0]
    assert all(x is symbol for x in decide(symbol)[:6])
    found = record.function(decide(symbol))(m)
    assert found == decide(m)
    assert list(map(type, found)) == list(map(type, decide(m)))


def test_sizes_that_take_the_same_way_need_no_other_record():
    function = recorded(decide, 100, 4000)
    assert all(function(n, 4000) == decide(n, 4000) for n in range(65, 129))


@pytest.mark.parametrize("use", [int, str, float, range, lambda n: [0] * n, "{}".format, lambda n: 2**n])
def test_a_size_that_is_taken_as_a_number_holds_for_that_number_alone(use):
    function = recorded(lambda n: (use(n), n)[1], 5)
    assert function(5) == 5
    assert function(6) is MISSED


def test_no_cache_keeps_a_size():
    with pytest.raises(TypeError, match="unhashable"):
        recorded(hash, 5)


def test_a_guard_protects_what_comes_after_it():
    function = recorded(lambda n, m: n // m if m > 0 else -1, 8, 2)
    assert function(9, 3) == 3
    assert function(9, 0) is MISSED


def test_a_size_that_outlives_its_decision_is_an_error():
    kept = []
    function = recorded(lambda n: kept.append(n) or n, 5)
    assert function(7) == 7
    for use in (lambda n: n + 1, lambda n: n < 3, int):
        with pytest.raises(RuntimeError, match="a size of a decision that is over"):
            use(kept[0])


def test_a_structure_is_recorded_at_its_second_call_and_the_way_taken_last_comes_first(monkeypatch):
    ways, asked = ByStructure(), []
    monkeypatch.setattr(ByStructure, "WAYS", 2)

    def choose(given):
        asked.append(given[0])
        return given[0] // 10 if given[0] < 100 else "long"

    assert [ways.of("s", (n,), choose) for n in (42, 43, 51, 100, 44, 200)] == [4, 4, 5, "long", 4, "long"]
    assert [type(n) for n in asked] == [int, sizes.Size, sizes.Size]
    assert ways.of("t", (42,), choose) == 4  # another structure
    assert len(asked) == 4


def test_what_takes_no_symbol_is_decided_anew_and_a_wrong_call_raises_its_own_error():
    ways = ByStructure()
    assert [len(ways.of("s", (n,), lambda sizes: torch.arange(sizes[0]))) for n in (3, 4, 5)] == [3, 4, 5]
    assert ways.unrecorded == {"s"}

    def refuse(given):
        raise ValueError(f"{given[0]} is wrong")

    for n in (3, 4):
        with pytest.raises(ValueError, match=f"{n} is wrong"):
            ways.of("t", (n,), refuse)
    assert ways.unrecorded == {"s"}


# -- The whole package ---------------------------------------------------------------------------------------------

CALLS = {
    "plain": lambda q, k: tw.attention(q, k, k),
    "causal": lambda q, k: tw.attention(q, k, k, causal=True),
    "window": lambda q, k: tw.attention(q, k, k, mask=tw.window(left=7, right=2), score=tw.softcap(20.0)),
    "table": lambda q, k: tw.attention(q, k, k, score=tw.bias(torch.ones(q.shape[2], q.shape[1], k.shape[1]))),
}


@pytest.mark.parametrize("case", CALLS)
def test_lengths_of_one_structure_share_a_plan(case, monkeypatch):
    asked, select = [], dispatch.select
    monkeypatch.setattr(dispatch, "select", lambda p, *more: asked.append(p) or select(p, *more))
    for n in range(40, 60):
        q, k = torch.randn(1, n, 2, 8), torch.randn(1, n + 3, 2, 8)
        CALLS[case](q, k)
    assert len(asked) == 2  # the first call's, and the one that was recorded


def test_a_wrong_call_says_so_whatever_was_recorded():
    q = torch.randn(2, 9, 2, 8)
    for n in (9, 10, 11):
        tw.attention(torch.randn(2, n, 2, 8), q, q)
    with pytest.raises(ValueError, match="batch differs: q 1, k 2, v 2"):
        tw.attention(q[:1], q, q)
    with pytest.raises(ValueError, match=r"seqlen of k \(9\) and v \(8\) differ"):
        tw.attention(q, q, q[:, :8])
