"""The sizes of Hopper's forward kernels, which of them a call gets, and which problems are theirs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tilewise as tw
from tests.backends.contract import call, normal
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper import config as shared
from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.config import ALIGNMENT, MAX_COLUMNS, PLAIN, SHARED_LIMIT, registers_together
from tilewise.backends.hopper.forward import config, grids
from tilewise.backends.hopper.forward.config import shipped
from tilewise.backends.hopper.forward.reasons import reasons, reasons_of_order
from tilewise.backends.hopper.forward.tiles import PAGED_TILES, TABLE

ROWS = [tiles for row in TABLE.values() for tiles in row.columns] + list(PAGED_TILES.values())


def problem(nq=70, nk=70, d=64, dv=None, dtype=torch.bfloat16, heads=4, **options):
    q, k, v = normal(2, nq, heads, d), normal(2, nk, 2, d), normal(2, nk, 2, dv or d)
    p = call(*(x.to(dtype) for x in (q, k, v)), **options).p
    return replace(p, spec=replace(p.spec, needs_grad=False))


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(config.devices, "of", lambda device: SimpleNamespace(cores=132))


@pytest.mark.parametrize(
    ("n", "heads", "causal", "expected"),
    [(512, 64, True, 1), (513, 64, True, 33), (2048, 64, True, 33), (2048, 4, True, 8), (2048, 64, False, 1)],
)
def test_heads_of_few_tiles_come_one_after_the_other(h200, n, heads, causal, expected):
    p = problem(n, n, d=128, heads=heads, causal=causal)
    assert grids.spread(p, config.choose(p), n, 132).section == expected


@pytest.mark.parametrize("tiles", ROWS, ids=str)
def test_a_row_fits_into_the_machine(tiles):
    assert tiles.shared.total <= SHARED_LIMIT
    asked = tiles.warpgroups * tiles.registers + tiles.registers_load
    assert asked <= registers_together(tiles.warpgroups + 1)
    assert max(tiles.registers, tiles.registers_load) <= 256
    assert all(n % 8 == 0 for n in (tiles.registers, tiles.registers_load))
    # Three blocks are in use or on their way at least; boxes hold at most 256 rows, and P has whole k steps of 16 keys.
    assert tiles.stages >= 3
    assert tiles.tile_n % 16 == 0
    assert max(tiles.tile_n, tiles.width_o) <= MAX_COLUMNS
    # Whole steps of 16 keys of V in each part, and whole rows of the swizzle of K.
    assert tiles.v_box[1] % 16 == 0
    assert tiles.k_stages == 1 or tiles.k_box[1] % 64 == 0
    # A block of K and one of V at once: a warpgroup in its turn waits for all of both, while the other one still has to read them.
    assert tiles.stages >= tiles.k_stages + tiles.v_stages
    # Every tile begins where the swizzle begins.
    assert tiles.element_bytes * tiles.stage_elements % ALIGNMENT == 0
    assert tiles.element_bytes * tiles.q_elements % ALIGNMENT == 0
    # Scores, P in half the room, and O, with 30 registers for all else.
    assert (tiles.tile_n * 3 // 2 + tiles.width_o) // 2 + 30 <= tiles.registers


@pytest.mark.parametrize("mask", [None, tw.causal(), tw.window(99, 0), tw.key_lengths(torch.tensor([9, 70]))], ids=str)
@pytest.mark.parametrize("dims", [(512, 512), (320, 272)])
def test_wide_heads_are_computed_in_pieces_that_are_shipped(dims, mask, h200):
    p = problem(3000, 3000, *dims, mask=mask)
    assert reasons(p) == []
    chosen = config.choose(p)
    assert chosen.tiles.pieces == 2
    assert chosen in shipped()
    # Of a call with gradients another backend has the backward, and goes on from this forward.
    assert not Hopper().slow(p)
    assert Hopper().refused(problem(70, 70, *dims, mask=mask))


def test_the_names_of_what_is_shipped_tell_them_apart():
    names = [c.name for c in shipped()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("d", [8, 64, 72, 96, 104, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("score", [None, tw.softcap(20.0)], ids=["plain", "softcap"])
@pytest.mark.parametrize("nq", [1, 3, 70, 3000])
def test_what_is_chosen_is_shipped(d, causal, score, nq, h200):
    p = problem(nq=nq, nk=3000, d=d, causal=causal, score=score)
    assert reasons(p) == []
    assert config.choose(p) in shipped()


@pytest.mark.parametrize("mask", [None, tw.causal(), tw.window(9, 0)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("score", [None, tw.softcap(20.0)], ids=["plain", "softcap"])
def test_packed_sequences_have_kernels_of_their_own(mask, score, h200):
    q, k = normal(70, 4, 64, dtype=torch.bfloat16), normal(70, 2, 64, dtype=torch.bfloat16)
    p = call(q, k, k, cu_seqlens_q=torch.tensor([0, 30, 70]), mask=mask, score=score).p
    p = replace(p, spec=replace(p.spec, needs_grad=False))
    assert reasons(p) == []
    assert config.choose(p).packed
    assert config.choose(p) in shipped()


@pytest.mark.parametrize("d", [8, 64, 96, 128])
@pytest.mark.parametrize("mask", [None, tw.causal()], ids=["full", "causal"])
def test_packed_sequences_with_dropout_share_a_kernel_that_is_shipped(mask, d, h200):
    q = normal(70, 4, d, dtype=torch.bfloat16)
    options = {"cu_seqlens_q": torch.tensor([0, 30, 70]), "dropout_p": 0.1, "dropout_seed": 1}
    p = call(q, q, q, mask=mask, **options).p
    assert Hopper().refused(p) == []
    assert config.choose(p) in shipped()
    assert (config.choose(p).form, config.choose(p).dropout) == ("upper", True)
    in_order = call(q, q, q, mask=mask, deterministic=True, **options).p
    assert backward_config.choose(in_order) == backward_config.choose(p) in backward_config.shipped()


@pytest.mark.parametrize(
    ("d", "options", "reason"),
    [
        (64, {"mask": tw.window(9, 0)}, "a mask whose rows begin after the first key"),
        (64, {"mask": tw.key_range(1, 20)}, "a mask whose rows begin after the first key"),
        (64, {"score": tw.softcap(3.0)}, "a softcap"),
        (136, {}, "head_dim 136, above 128"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_packed_sequences_with_dropout_are_refused_by_name(d, options, reason, h200):
    q = normal(70, 4, d, dtype=torch.bfloat16)
    options |= {"cu_seqlens_q": torch.tensor([0, 30, 70]), "dropout_p": 0.1, "dropout_seed": 1}
    assert Hopper().refused(call(q, q, q, **options).p) == [f"packed sequences with dropout and {reason}"]


def packed_alibi(d: int = 64, slopes: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16, **options):
    """A packed problem with ALiBi, causal unless ``options`` have a mask."""
    q = normal(70, 4, d, dtype=dtype)
    options = ({} if "mask" in options else {"causal": True}) | options
    score = tw.alibi(torch.ones(4) if slopes is None else slopes)
    return call(q, q, q, cu_seqlens_q=torch.tensor([0, 30, 70]), score=score, **options).p


@pytest.mark.parametrize("d", [8, 64, 96, 128])
@pytest.mark.parametrize("mask", [tw.causal(), tw.causal() & tw.key_range(7, 50)], ids=["causal", "keys"])
def test_packed_sequences_with_alibi_are_shipped_however_few_they_are(d, mask, h200):
    p = packed_alibi(d, mask=mask)
    assert not Hopper().refused(p)
    found = config.choose(p)
    assert found in shipped()
    assert (found.packed, found.score) == (True, "alibi")


ALIBI = "packed sequences with ALiBi and "


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask": tw.window(9, 0)}, ALIBI + "a mask other than causal"),
        (
            {"mask": tw.window(None, 1)},
            ALIBI + "a mask other than causal",
        ),  # a key on the other side of a row's own place
        ({"mask": None}, ALIBI + "a mask other than causal"),
        ({"slopes": torch.ones(2, 4)}, ALIBI + "slopes (2, 4) float32 in place of one fp32 number a head"),
        ({"slopes": torch.ones(4).double()}, ALIBI + "slopes (4,) float64 in place of one fp32 number a head"),
        ({"dropout_p": 0.1, "dropout_seed": 1}, ALIBI + "dropout"),
        ({"d": 136}, "packed sequences with ALiBi and head_dim 136, above 128"),
        ({"dtype": torch.float32}, "torch.float32: its kernels take float16 and bfloat16"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_other_packed_sequences_with_a_score_are_refused_by_name(options, reason, h200):
    assert Hopper().refused(packed_alibi(**options)) == [reason]


@pytest.mark.parametrize("d", [8, 64, 96, 128])
def test_alibi_whose_bias_is_linear_is_shipped(d, h200):
    slopes = torch.ones(4)
    assert config.choose(problem(nq=3000, nk=3000, d=d, causal=True, score=tw.alibi(slopes))) in shipped()
    others = {"mask": tw.window(None, 1)}, {}, {"causal": True, "nq": 1}, {"causal": True, "slopes": torch.ones(1, 4)}
    for (
        other
    ) in others:  # a key on the other side, many of them, no work for all multiprocessors, slopes of batch elements
        given = {"nq": 3000, "nk": 3000, "d": d, "slopes": slopes} | other
        assert config.choose(problem(score=tw.alibi(given.pop("slopes")), **given)).traced != PLAIN


# -- Which tiles, and whether keys are split -----------------------------------------------------------------------

D128 = config.Config(TABLE[128, 128].full, "bf16", "full")


def chosen(batch, heads, lengths, d=128, **options):
    """Of shapes alone: tensors of no memory."""
    sizes = zip((lengths[0], lengths[1], lengths[1]), (heads[0], heads[1], heads[1]), strict=True)
    tensors = (torch.zeros(1, dtype=torch.bfloat16).expand(batch, n, h, d) for n, h in sizes)
    p = call(*tensors, **options).p
    return config.choose(replace(p, spec=replace(p.spec, needs_grad=False)))


SPLITS = {  # batch, heads of q and k, queries and keys: whether 132 cores would be idle enough
    "one-head": ((1, (1, 1), (4096, 4096)), True),
    "decode": ((1, (8, 8), (1, 8192)), True),
    "many-heads": ((16, (64, 8), (1, 8192)), False),
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
def test_splits_are_nearly_equal_and_no_shorter_than_they_may_be(tiles, h200):
    c = replace(D128, tiles=tiles)
    for seqlen_q, deterministic, heads in itertools.product((1, 5000), (False, True), (1, 8)):
        spec = SimpleNamespace(deterministic=deterministic)
        p = SimpleNamespace(spec=spec, seqlen_q=seqlen_q, heads_q=heads, batch=2, packed=False, device=None)
        most = config.REPEATED_SPLITS if deterministic and seqlen_q > 1 else config.MAX_SPLITS
        for seqlen_k in range(1, 70_000, 977):
            blocks, parts = -(-seqlen_k // tiles.tile_n), config.num_splits(c, p, seqlen_k)
            size = -(-blocks // parts)
            assert parts <= most
            assert parts == 1 or size * tiles.tile_n >= config.MIN_SPLIT_KEYS
            assert (parts - 1) * size < blocks <= parts * size
            assert parts == 1 or deterministic or parts * config.tile_count(c, p) <= 132


def test_a_deterministic_call_splits_whoever_shares_its_batch(h200):
    found = {
        (batch, deterministic): chosen(batch, (1, 1), (1, 8192), deterministic=deterministic)
        for batch, deterministic in itertools.product((1, 100), (False, True))
    }
    assert [c.split for c in found.values()] == [True, True, False, True]
    assert found[1, True] == found[100, True]


ORDERED = {
    "all": tw.Mask(""),
    "causal": tw.causal(),
    "128": tw.window(127, 0),
    "1024": tw.causal() & tw.window(left=1023),
}


@pytest.mark.parametrize("scale", [None, 1e-14])
@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize(
    "dims", [(40, 40), (64, 64), (96, 96), (128, 128), (136, 136), (192, 128), (256, 256)], ids=str
)
def test_the_kernels_of_all_ways_of_one_order_are_asked_for(dims, name, scale, h200):
    mask, told = ORDERED[name], {"deterministic": "everywhere", "softmax_scale": scale}
    q, k, v = (normal(2, 300, 4, d, dtype=torch.bfloat16).requires_grad_() for d in (dims[0], *dims))
    cu = torch.tensor([0, 100, 100, 300])
    calls = [
        call(q, k, v, mask=mask, **told).p,
        call(q[:, -7:], k, v, mask=mask, **told).p,
        call(q, k, v, mask=mask & tw.key_lengths(torch.tensor([7, 300])), **told).p,
        call(q[0], k[0], v[0], mask=mask, cu_seqlens_q=cu, **told).p,
    ]
    for p in calls:
        assert bool(reasons_of_order(p)) == (name in ("128", "1024") and max(dims) > 128)
        if not reasons_of_order(p):
            assert config.choose(p) in config.one_order_of_rows(p)
            assert backward_config.choose(p) in backward_config.one_order_of_rows(p)
            assert {*config.one_order_of_rows(p)} <= {*shipped()}
            assert {*backward_config.one_order_of_rows(p)} <= {*backward_config.shipped()}


MANY = {"nq": 3000, "nk": 3000}
REFUSED = {
    "fp32": ({"dtype": torch.float32}, "float32"),
    "wide": ({"d": 520}, "above 512"),
    "one-wide": ({"d": 320, "dv": 64, **MANY}, "head dims 320 and 64"),
    "wide-and-score": ({"d": 512, "score": tw.softcap(9.0), **MANY}, "with a score"),
    "wide-and-dropout": ({"d": 512, "dropout_p": 0.1, "dropout_seed": 3, **MANY}, "with dropout"),
    "wide-and-pairs": ({"d": 512, "mask": tw.keep(lambda b, h, i, j: j % 3 < i), **MANY}, "a mask of pairs"),
    "odd": ({"d": 60}, "multiples of 8"),
    "scale": ({"softmax_scale": -1.0}, "softmax_scale"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_problems_are_refused_with_the_reason(name, h200):
    options, word = REFUSED[name]
    (reason,) = reasons(problem(**options))
    assert word in reason


FEW = {"decode": ((1, 9000), "with 1 queries"), "few": ((500, 9000), "less than half of the machine")}


@pytest.mark.parametrize("name", FEW)
def test_few_queries_of_wide_heads_are_left_to_another_backend_unless_a_kernel_is_named(name, h200):
    (nq, nk), word = FEW[name]
    p = problem(nq, nk, d=512)
    (reason,) = Hopper().refused(p)
    assert word in reason
    assert Hopper(config.choose(p)).refused(p) == []


EXPRESSIONS = {
    "where": lambda n: {"score": lambda s, b, h, i, j: torch.where(j % n == 0, s, 2 * s)},
    "alibi": lambda n: {"score": tw.alibi(normal(4, seed=n))},
    "caps": lambda n: {"score": tw.softcap(float(n)) >> tw.softcap(3.0)},
    "sink-and-bias": lambda n: {"score": tw.bias(normal(70, 70, seed=n)), "sink": normal(4)},
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_other_scores_are_traced_and_their_numbers_and_tensors_share_a_kernel(name):
    two, three = (problem(**EXPRESSIONS[name](n)) for n in (2, 3))
    assert reasons(two) == []
    assert config.choose(two) == config.choose(three)
    assert config.choose(two).traced != PLAIN
    assert config.choose(two) not in shipped()


@pytest.mark.parametrize("d", [8, 64, 96, 128])
def test_one_kernel_that_is_shipped_serves_every_mask_that_is_no_band(d):
    masks = tw.keep(lambda b, h, i, j: j % 2 == 0), tw.dense(normal(70, 70) > 0), tw.causal() | tw.prefix(9)
    (found,) = {config.choose(problem(d=d, mask=mask)) for mask in masks}
    assert found.form == "bits"
    assert found in shipped()


@pytest.mark.parametrize(("keys", "queries"), [(64, 64), (64, 128), (192, 64), (64, 1), (128, 64), (32, 64)])
def test_patterns_of_blocks_of_64_keys_get_tiles_that_hold_one(keys, queries):
    blocks, narrow = normal(9, 9) > 0, keys % 128 == 64 and queries > 1
    pattern = tw.keep(lambda b, h, i, j: blocks[i // queries % 9, j // keys % 9])
    for mask in (pattern, tw.causal() & pattern):
        found = config.choose(problem(d=128, mask=mask))
        assert found.tiles.tile_n == (64 if narrow else 128)
        assert found in shipped()
        assert bool(Hopper().slow(problem(d=128, mask=mask))) == (keys % 128 == queries % 128 == 64)


def test_patterns_whose_lists_would_take_much_memory_are_left_to_nobody(monkeypatch):
    blocks = normal(9, 9) > 0
    p = problem(d=128, mask=tw.keep(lambda b, h, i, j: blocks[i // 64 % 9, j // 64 % 9]))
    assert Hopper().slow(p)
    monkeypatch.setattr(shared, "BUDGET", 4 * 2 * 4 * 2 * 2 - 1)  # bytes of 2 x 2 tiles of 4 heads and 2 batch elements
    assert not Hopper().slow(p)


ELSE = {
    "a-score": ({"score": tw.softcap(3.0)}, "this score"),
    "dropout": ({"dropout_p": 0.5, "dropout_seed": 1}, "dropout"),
    "wide": ({"d": 136}, "head_dim 136"),
}


@pytest.mark.parametrize("name", ELSE)
def test_masks_of_pairs_are_refused_with_the_reason_where_bits_do_not_serve(name, h200):
    options, word = ELSE[name]
    p = problem(mask=tw.keep(lambda b, h, i, j: (i + j + h) % 2 == 0), **options)
    (reason,) = Hopper().refused(p)
    assert reason.startswith("a mask with a condition on pairs")
    assert word in reason


def test_a_mask_of_many_pairs_has_bits_too_and_one_beside_a_bias_has_not():
    mask, n = tw.keep(lambda b, h, i, j: (i + j + h) % 2 == 0), 1 << 16
    assert config.choose(problem(mask=mask, nq=n, nk=n)).form == "bits"
    assert not shared.bits_serve(problem(mask=mask, nq=n, nk=n), 128, scored=True)


def test_a_tensor_s_place_among_the_extras_does_not_make_another_kernel():
    bias = tw.bias(normal(70, 70))
    assert config.choose(problem(score=bias, sink=normal(4))) == config.choose(problem(score=bias))


def test_kernels_of_other_expressions_have_other_names():
    names = {config.choose(problem(**make(2))).name for make in EXPRESSIONS.values()}
    assert len(names) == len(EXPRESSIONS)
