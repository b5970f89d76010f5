"""The Hopper kernels' sizes, and which problems are theirs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tilewise as tw
from tests.backends.contract import call, normal
from tilewise.backends.hopper import config
from tilewise.backends.hopper.config import DTYPES, REGISTERS, SHARED_LIMIT, TABLE, Band, shipped
from tilewise.tiles import Grid

ROWS = [*(tiles for row in TABLE.values() for tiles in row), *config.SHORT.values()]


def problem(nq=70, nk=70, d=64, dv=None, dtype=torch.bfloat16, heads=4, **options):
    q, k, v = normal(2, nq, heads, d), normal(2, nk, 2, d), normal(2, nk, 2, dv or d)
    p = call(*(x.to(dtype) for x in (q, k, v)), **options).p
    return replace(p, spec=replace(p.spec, needs_grad=False))


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(config.devices, "of", lambda device: SimpleNamespace(cores=132))


@pytest.mark.parametrize("tiles", ROWS, ids=str)
def test_a_row_fits_into_the_machine(tiles):
    assert tiles.shared.total <= SHARED_LIMIT
    assert tiles.warpgroups * tiles.registers + tiles.registers_load <= REGISTERS
    assert max(tiles.registers, tiles.registers_load) <= 256
    assert all(n % 8 == 0 for n in (tiles.registers, tiles.registers_load))
    # Three blocks are in use or on their way at least; boxes hold at most 256 rows, and P has whole k steps of 16 keys.
    assert tiles.slots >= 3
    assert tiles.tile_n % 16 == 0
    assert tiles.tile_n <= 256
    # Every tile begins where the swizzle begins.
    assert 2 * tiles.slot_elements % config.ALIGNMENT == 0
    assert 2 * tiles.q_elements % config.ALIGNMENT == 0
    # Scores, P in half the room, and O, with 30 registers for all else.
    assert (tiles.tile_n * 3 // 2 + tiles.width_v) // 2 + 30 <= tiles.registers


def test_the_names_of_what_is_shipped_tell_them_apart():
    names = [c.name for c in shipped()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("d", [8, 64, 72, 96, 104, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("score", [None, tw.softcap(20.0)], ids=["plain", "softcap"])
@pytest.mark.parametrize("nq", [1, 3, 70, 3000])
def test_what_is_chosen_is_shipped(d, causal, score, nq, h200):
    p = problem(nq=nq, nk=3000, d=d, causal=causal, score=score)
    assert config.reasons(p) == []
    assert config.choose(p) in shipped()


@pytest.mark.parametrize("mask", [None, tw.causal(), tw.window(9, 0)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("score", [None, tw.softcap(20.0)], ids=["plain", "softcap"])
def test_packed_sequences_have_kernels_of_their_own(mask, score, h200):
    q, k = normal(70, 4, 64, dtype=torch.bfloat16), normal(70, 2, 64, dtype=torch.bfloat16)
    p = call(q, k, k, cu_seqlens_q=torch.tensor([0, 30, 70]), mask=mask, score=score).p
    p = replace(p, spec=replace(p.spec, needs_grad=False))
    assert config.reasons(p) == []
    assert config.choose(p).packed
    assert config.choose(p) in shipped()


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


# -- Which tiles, and whether keys are split -----------------------------------------------------------------------

D128 = config.Config(TABLE[128, 128][0], "bf16", "full")


def chosen(batch, heads, lengths, d=128, **options):
    """Of shapes alone: tensors of no memory."""
    sizes = zip((lengths[0], lengths[1], lengths[1]), (heads[0], heads[1], heads[1]), strict=True)
    tensors = (torch.zeros(1, dtype=torch.bfloat16).expand(batch, n, h, d) for n, h in sizes)
    p = call(*tensors, **options).p
    return config.choose(replace(p, spec=replace(p.spec, needs_grad=False)))


SPLITS = {  # batch, heads of q and k, queries and keys: whether 132 cores would be idle enough
    "one-head": ((1, (1, 1), (4096, 4096)), True),
    "decode": ((1, (8, 8), (1, 8192)), True),
    "decode-of-a-group": ((1, (64, 8), (1, 8192)), True),
    "decode-of-many": ((16, (64, 8), (1, 8192)), False),
    "half-of-the-machine": ((1, (2, 2), (4224, 4224)), False),
    "short": ((1, (1, 1), (256, 256)), False),
    "no-keys": ((1, (1, 1), (256, 0)), False),
}


@pytest.mark.parametrize("name", SPLITS)
def test_keys_are_split_where_the_machine_would_be_idle(name, h200):
    shape, split = SPLITS[name]
    assert chosen(*shape).split == split


TILES = {  # batch, heads, lengths, head dim, options: rows and keys of a tile
    "many-rows": ((1, (32, 32), (16384, 16384), 64), {}, (192, 128)),
    "short-and-causal": ((32, (32, 32), (512, 512), 64), {"causal": True}, (128, 128)),
    "idle-cores": ((1, (8, 8), (512, 512), 128), {}, (64, 128)),
    "long": ((1, (16, 16), (16384, 16384), 128), {}, (128, 128)),
    "many-short": ((32, (16, 16), (512, 512), 128), {}, (128, 128)),
    "one-query": ((200, (16, 16), (1, 4096), 128), {}, (64, 128)),
}


@pytest.mark.parametrize("name", TILES)
def test_tiles_follow_the_lengths(name, h200):
    shape, options, tile = TILES[name]
    found = chosen(*shape, **options)
    assert (found.tiles.tile_m, found.tiles.tile_n) == tile
    assert found in shipped()


@pytest.mark.parametrize("tiles", ROWS, ids=str)
def test_chunks_are_nearly_equal_and_no_shorter_than_they_may_be(tiles):
    c = replace(D128, tiles=tiles)
    for seqlen_q in (1, 5000):
        for seqlen_k in range(1, 70_000, 977):
            blocks, parts = -(-seqlen_k // tiles.tile_n), config.chunks(c, seqlen_q, seqlen_k)
            size = -(-blocks // parts)
            assert parts <= config.PARTS[seqlen_q == 1]
            assert parts == 1 or size * tiles.tile_n >= config.CHUNK
            assert (parts - 1) * size < blocks <= parts * size


def test_a_deterministic_call_splits_whoever_shares_its_batch(h200):
    found = {
        (batch, deterministic): chosen(batch, (1, 1), (1, 8192), deterministic=deterministic)
        for batch, deterministic in itertools.product((1, 100), (False, True))
    }
    assert [c.split for c in found.values()] == [True, True, False, True]
    assert found[1, True] == found[100, True]


HEADS = {  # heads of q and k, queries: heads in a tile
    "no-group": ((64, 64), 1, 1),
    "decode": ((64, 8), 1, 8),
    "group-of-5": ((40, 8), 1, 8),
    "group-of-32": ((256, 8), 1, 64),
    "a-few-queries": ((32, 8), 8, 8),
    "many-queries": ((64, 8), 4096, 1),
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", HEADS)
def test_heads_share_a_tile_where_queries_are_few(name, causal, h200):
    shape, seqlen_q, heads = HEADS[name]
    found = chosen(16, shape, (seqlen_q, 4096), causal=causal)
    assert found.heads == heads
    assert found in shipped()


REFUSED = {
    "fp32": ({"dtype": torch.float32}, "float32"),
    "wide": ({"d": 264}, "above 256"),
    "odd": ({"d": 60}, "multiples of 8"),
    "wide-number": ({"mask": tw.keep(lambda b, h, i, j: j < 2**40)}, "32 bits"),
    "scale": ({"softmax_scale": -1.0}, "softmax_scale"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_problems_are_refused_with_the_reason(name):
    options, word = REFUSED[name]
    (reason,) = config.reasons(problem(**options))
    assert word in reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cap_is_read_from_the_score(dtype):
    p = problem(dtype=getattr(torch, dtype.removeprefix("torch.")), score=tw.softcap(17.0))
    assert config.cap_of(p) == 17.0
    assert config.cap_of(problem()) is None


EXPRESSIONS = {
    "keep": lambda n: {"mask": tw.keep(lambda b, h, i, j: j % n == 0)},
    "dense": lambda n: {"mask": normal(70, 70, seed=n) > 0},
    "alibi": lambda n: {"score": tw.alibi(normal(4, seed=n))},
    "caps": lambda n: {"score": tw.softcap(float(n)) >> tw.softcap(3.0)},
    "sink-and-bias": lambda n: {"score": tw.bias(normal(70, 70, seed=n)), "sink": normal(4)},
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_other_masks_and_scores_are_traced_and_their_numbers_and_tensors_share_a_kernel(name):
    two, three = (problem(**EXPRESSIONS[name](n)) for n in (2, 3))
    assert config.reasons(two) == []
    assert config.choose(two) == config.choose(three)
    assert config.choose(two).traced != config.PLAIN
    assert config.choose(two) not in shipped()


def test_a_tensor_s_place_among_the_extras_does_not_make_another_kernel():
    bias = tw.bias(normal(70, 70))
    assert config.choose(problem(score=bias, sink=normal(4))) == config.choose(problem(score=bias))


def test_kernels_of_other_expressions_have_other_names():
    names = {config.choose(problem(**make(2))).name for make in EXPRESSIONS.values()}
    assert len(names) == len(EXPRESSIONS)


def test_an_expression_gets_all_keys_where_a_band_would_cut_some():
    assert config.keys_of(problem(mask=tw.key_range(7, 50)))[0] == "full"
    form, band = config.keys_of(problem(mask=tw.key_range(7, 50), score=tw.alibi(torch.ones(4))))
    assert (form, band) == ("rows", Band(None, None, 0, 70))


def test_an_end_that_is_no_shift_makes_no_band():
    assert config.band_of(problem(mask=tw.prefix(3))) is None
    assert config.band_of(problem(mask=tw.causal())) == Band(None, 1, 0, 70)
