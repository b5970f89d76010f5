"""The band of a mask, and what is read from a score, as both passes on Hopper know them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import tilewise as tw
from tests.backends.contract import call, normal
from tilewise.backends.hopper import config
from tilewise.backends.hopper.backward import config as backward
from tilewise.backends.hopper.config import DTYPES, Band
from tilewise.backends.hopper.forward import config as forward
from tilewise.backends.hopper.latent import config as latent
from tilewise.planning.tiles import Grid


def problem(nq=70, nk=70, d=64, dv=None, dtype=torch.bfloat16, heads=4, **options):
    q, k, v = normal(2, nq, heads, d), normal(2, nk, 2, d), normal(2, nk, 2, dv or d)
    p = call(*(x.to(dtype) for x in (q, k, v)), **options).p
    return replace(p, spec=replace(p.spec, needs_grad=False))


MASKS = {
    "none": None,
    "causal": tw.causal(),
    "window": tw.window(9, 3),
    "left": tw.window(5),
    "right": tw.window(None, 4),
    "several": tw.causal() & tw.window(20, 8) & tw.window(12),
    "keys": tw.key_range(7, 50),
    "first-keys": tw.key_lengths(30) & tw.causal(),
    "no-keys": tw.key_range(60, 20) & tw.causal(),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("lengths", [(70, 70), (40, 70), (70, 40), (1, 70)], ids=str)
def test_the_band_of_a_mask_is_its_interval(name, lengths):
    nq, nk = lengths
    p = problem(nq, nk, mask=MASKS[name])
    band = config.band_of(p)
    for found in (band, band.cut(nq)):
        grid = Grid.whole(p.spec.region, (), (1, 1, nq, nk), torch.device("cpu"))
        lo, hi = (x.flatten().tolist() for x in grid.key_interval(torch.arange(nq)))
        for i in range(nq):
            low = max(found.start, -math.inf if found.lo is None else i + found.lo)
            high = min(found.stop, math.inf if found.hi is None else i + found.hi)
            assert set(range(low, high)) == set(range(lo[i], hi[i])), i


@pytest.mark.parametrize("name", MASKS)
def test_a_cut_band_begins_and_ends_with_keys_that_are_seen(name):
    p = problem(40, 70, mask=MASKS[name])
    band = config.band_of(p).cut(40)
    seen = [
        j
        for j in range(70)
        for i in range(40)
        if (band.lo is None or j >= i + band.lo) and (band.hi is None or j < i + band.hi)
    ]
    inside = [j for j in seen if band.start <= j < band.stop]
    assert (band.start, band.stop) == (min(inside), max(inside) + 1) if inside else band.start == band.stop


def test_a_single_query_has_no_moving_end():
    for mask in (tw.causal(), tw.window(9, 0), tw.window(200)):
        assert config.band_of(problem(1, 70, mask=mask)).cut(1).form == "full"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cap_is_read_from_the_score(dtype):
    p = problem(dtype=getattr(torch, dtype.removeprefix("torch.")), score=tw.softcap(17.0))
    assert config.cap_of(p) == 17.0
    assert config.cap_of(problem()) is None


def test_an_expression_gets_all_keys_where_a_band_would_cut_some():
    assert config.keys_of(problem(mask=tw.key_range(7, 50)))[0] == "full"
    form, band = config.keys_of(problem(mask=tw.key_range(7, 50), score=tw.alibi(torch.ones(4))))
    assert (form, band) == ("rows", Band(None, None, 0, 70))


def test_an_end_that_is_no_shift_makes_no_band():
    assert config.band_of(problem(mask=tw.prefix(3))) is None
    assert config.band_of(problem(mask=tw.causal())) == Band(None, 1, 0, 70)


def test_every_kernel_is_held_to_the_copies_that_its_source_makes():
    for c in forward.shipped():
        assert [(e.loads, e.stores) for e in c.expected] == [(True, c.stores)], c.name
    for c in [*backward.shipped(), *latent.shipped()]:
        loads = not getattr(c, "by_threads", False)
        # dQ of dS that was kept leaves from registers.
        stores = [isinstance(c, backward.Backward)] * len(c.expected)
        stores[-1] &= not (isinstance(c, backward.Backward) and c.keys.keeps_ds)
        assert [(e.loads, e.stores) for e in c.expected] == [(loads, n) for n in stores], c.name
