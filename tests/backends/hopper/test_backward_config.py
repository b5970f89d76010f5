"""The Hopper backward's sizes, which problems are its own, and what its launch is given."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tilewise as tw
from tests.backends.contract import Call, call, normal, qkv
from tests.backends.hopper.launches import seen, stand_in
from tilewise import device as devices
from tilewise.backends.base import Output, OutputGrads
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper import config as sizes
from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.backward import grids
from tilewise.backends.hopper.backward.config import TABLE, shipped
from tilewise.backends.hopper.backward.tiles import KEY_GROUPS, SHEET_KEYS, STATISTICS_ALIGNMENT, left_elements
from tilewise.backends.hopper.config import ALIGNMENT, SHARED_LIMIT, registers_together
from tilewise.backends.hopper.forward import config as forward_config
from tilewise.backends.hopper.forward import reasons as forward_reasons
from tilewise.backends.hopper.host import backward_call
from tilewise.backends.hopper.kit import schedule
from tilewise.planning.bit_tiles import Sections, even_section
from tilewise.reference import Reference

COLUMNS = ("two_passes", "softcap", "softcap_band", "pairs")
PASSES = [passes for row in TABLE.values() for column in COLUMNS if (passes := getattr(row, column))]
ONE_PASS = {dims: row.one_pass for dims, row in TABLE.items() if row.one_pass}


def fits(tiles, groups: int) -> bool:
    whole = all(n % 8 == 0 and n <= 248 for n in (tiles.registers, tiles.registers_load))
    swizzled = all(2 * n % ALIGNMENT == 0 for n in (tiles.tile_elements, tiles.stage_elements))
    by_role = [tiles.registers_load, *[tiles.registers] * groups]
    threads = sum(by_role) <= registers_together(len(by_role))
    return whole and swizzled and threads and tiles.shared <= SHARED_LIMIT


@pytest.mark.parametrize("passes", PASSES, ids=lambda x: f"{x.keys.width}-{x.keys.width_v}-{x.keys.tile_m}")
def test_a_row_fits_into_the_machine(passes):
    keys, queries = passes
    assert fits(keys, KEY_GROUPS)
    assert fits(queries, queries.warpgroups)
    # A block and the next one's first half, beside what the last product of the block before still reads.
    assert keys.stages >= 4
    assert queries.stages >= 3
    # Products take 16 queries or keys at a step, boxes 256 rows, bulk copies 16 bytes.
    assert keys.tile_m % 16 == queries.tile_n % 16 == 0
    assert max(keys.tile_m, queries.tile_n) <= 256
    # Accumulators of 64 rows, with 24 registers for all else.
    own = keys.width_v if keys.split else keys.width + keys.width_v
    assert (own + 2 * keys.tile_m) // 2 + 24 <= keys.registers
    assert (queries.width + queries.tile_n * 5 // 2) // 2 + 24 <= queries.registers


@pytest.mark.parametrize("dims", ONE_PASS, ids=str)
def test_what_is_summed_fits_too_and_is_of_whole_parts(dims):
    keys = ONE_PASS[dims]
    assert fits(keys, KEY_GROUPS)
    assert keys.stages >= 3
    assert keys.tile_m == KEY_GROUPS * sizes.ROWS or keys.dq_transposed
    assert keys.part_elements % (4 * 128) == 0
    assert (sum(dims) + 2 * keys.tile_m) // 2 + 24 <= keys.registers


KEPT = {dims: row.kept for dims, row in TABLE.items() if row.kept}


@pytest.mark.parametrize("dims", KEPT, ids=str)
def test_what_keeps_ds_fits_and_has_whole_blocks_of_it(dims):
    keys, sheet = KEPT[dims]
    assert fits(keys, KEY_GROUPS)
    # Blocks of 64 queries by 64 keys, as the sheet has them.
    assert (keys.split, keys.tile_m, keys.tile_n) == (True, sizes.ROWS, SHEET_KEYS)
    assert keys.stages >= 4
    # dQ, and 24 registers for all else; a block that is computed with, one that waits for its product, and the next.
    assert sheet.width // 2 + 24 <= sheet.registers
    assert sheet.stages >= 3
    assert sheet.shared <= SHARED_LIMIT
    assert sheet.registers_load + sheet.warpgroups * sheet.registers <= registers_together(1 + sheet.warpgroups)
    # All columns of dQ, in boxes that the copy engine brings at once.
    assert sheet.parts * sheet.width == dims[0]
    assert sheet.width <= 256


@pytest.mark.parametrize("x", backward_config.candidates(), ids=lambda x: x.name)
def test_candidates_fit_and_are_not_shipped(x):
    assert x.name not in {y.name for y in shipped()}
    assert fits(x.keys, KEY_GROUPS)
    assert x.queries is None or fits(x.queries, x.queries.warpgroups)


def long(d: int, seqlen: int, sizes: tuple[int, int] = (1, 1), **options) -> Call:
    """``sizes``: batch and heads, of tensors that repeat one head."""
    one = torch.zeros(1, seqlen, 1, d, dtype=torch.bfloat16)
    return call(*[one.expand(sizes[0], seqlen, sizes[1], d)] * 3, **options)


MANY = (2, 128)  # batch elements, and heads that fill any chip by themselves
HALVES = tw.documents(torch.arange(4096) // 2048)


@pytest.mark.parametrize(
    ("d", "seqlen", "mask", "summed"),
    [  # docs/decisions.md#hopper-ordered-dq
        (64, 2048, None, True),
        (64, 512, None, False),
        (128, 1024, None, True),
        (128, 512, None, False),
        (256, 4096, None, False),
        (64, 4096, tw.causal(), True),
        (128, 2048, tw.causal(), True),
        (128, 4096, HALVES, True),
    ],
)
def test_what_must_repeat_is_summed_in_order_or_not_at_all(d, seqlen, mask, summed):
    x = backward_config.choose(long(d, seqlen, MANY, mask=mask, deterministic=True).p)
    assert (x.keys.sums_dq, x.orders) == (summed, summed)


@pytest.mark.parametrize("more", [{}, {"score": tw.alibi(torch.ones(4))}, {"dropout_p": 0.5, "dropout_seed": 1}])
@pytest.mark.parametrize("rest", [(0, 0), (9000, 9000)])
def test_lengths_of_others_do_not_decide_how_dq_is_summed(rest, more):
    x = backward_config.choose(packed(rest, causal=True, deterministic=True, **more).p)
    assert x.orders
    assert x in shipped()


@pytest.mark.parametrize("mask", [None, tw.causal()], ids=["full", "causal"])
@pytest.mark.parametrize("heads", [1, 4, 8, 16, 32])
def test_whether_dq_is_added_in_order_is_decided_by_one_sequence(heads, mask):
    one, many = (long(128, 4096, (batch, heads), mask=mask, deterministic=True).p for batch in (1, 8))
    assert backward_config.choose(one) == backward_config.choose(many)


@pytest.mark.parametrize(
    ("d", "seqlen", "options", "summed"),
    [  # docs/decisions.md#hopper-two-or-one-pass
        (64, 512, {}, False),
        (64, 1024, {}, True),
        (64, 1024, {"causal": True}, False),
        (64, 2048, {"causal": True}, True),
        (64, 2048, {}, True),
        (128, 512, {}, False),
        (128, 1024, {}, True),
        (128, 512, {"causal": True}, False),
        (128, 1024, {"causal": True}, False),
        (128, 2048, {"causal": True}, True),
        (128, 2048, {"mask": tw.window(200, 0)}, False),
    ],
)
def test_gradients_of_queries_are_summed_where_they_see_many_keys(d, seqlen, options, summed):
    p = long(d, seqlen, **options).p
    assert backward_config.choose(p).keys.sums_dq == summed
    pairs = tw.show_mask(options.get("mask", tw.causal()), seqlen).count("1") if options else seqlen**2
    assert sizes.mean_keys_per_query(p) == pytest.approx(pairs / seqlen, rel=0.02)


@pytest.mark.parametrize("d", [160, 256, 320, 512])
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, True),
        ({"causal": True}, True),
        ({"mask": tw.window(70, 3) & tw.key_range(100, 500)}, True),
        ({"causal": True, "deterministic": True, "sink": torch.zeros(2)}, True),
        ({"mask": tw.documents(torch.arange(600) // 100)}, True),
        ({"mask": tw.prefix(7)}, True),
        ({"mask": torch.ones(600, 600, dtype=torch.bool).tril()}, False),
        ({"score": tw.softcap(30.0), "mask": tw.window(64, 0)}, True),
        ({"dropout_p": 0.1, "dropout_seed": 3}, False),
    ],
    ids=["full", "causal", "window", "deterministic", "documents", "prefix", "dense", "softcap", "dropout"],
)
def test_bands_of_wide_heads_keep_ds(d, options, kept):
    p = long(d, 600, (1, 2), **options).p
    if backward_config.chosen_row(p):  # some have no kernels at all
        assert backward_config.choose(p).keys.keeps_ds == kept


def test_a_sheet_that_would_take_too_much_memory_is_not_made(monkeypatch):
    monkeypatch.setattr(backward_config.devices, "of", lambda device: SimpleNamespace(cores=132))

    def kept(seqlen: int, group: int = 1, packed: bool = False, **options) -> bool:
        d, one = 512 if packed else 256, torch.zeros(1, dtype=torch.bfloat16)
        tensors = [one.expand(*(() if packed else (1,)), seqlen, heads, d) for heads in (2 * group, 2, 2)]
        options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, seqlen])) if packed else {}
        return backward_config.kept_ds(TABLE[d, d], call(*tensors, **options).p) is not None

    # 132 tiles of 64 keys, 2 bytes a pair: 4 GiB hold them for 254,200 queries; packed, all pairs of 46,000.
    assert kept(1 << 17)
    assert not kept(1 << 18)
    assert kept(1 << 14, group=8)
    assert not kept(1 << 15, group=8)
    # Of ends of rows a head takes a quarter of 1 GiB at most.
    assert kept(11_500, mask=tw.prefix(7))
    assert not kept(11_700, mask=tw.prefix(7))
    assert kept(46_000, packed=True)
    assert not kept(47_000, packed=True)


def test_a_band_that_is_too_long_for_a_sheet_makes_two_passes_as_ends_of_rows_do(monkeypatch):
    monkeypatch.setattr(backward_config.devices, "of", lambda device: SimpleNamespace(cores=132))
    p = long(256, 1 << 18, causal=True).p
    x = backward_config.choose(p)
    assert (x.form, x.keys.keeps_ds, x.name in {y.name for y in shipped()}) == ("rows", False, True)


@pytest.mark.parametrize(
    ("d", "seqlen", "summed"), [(64, 1200, False), (64, 1400, True), (128, 1000, False), (128, 1200, True)]
)
def test_packed_gradients_of_queries_are_summed_as_if_all_sequences_were_equally_long(d, seqlen, summed):
    cu = torch.tensor([0, 10, 2 * seqlen])
    p = call(
        *(normal(2 * seqlen, 1, d, dtype=torch.bfloat16, seed=n) for n in range(3)),
        causal=True,
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
    ).p
    keys = backward_config.choose(p).keys
    assert (keys.sums_dq, keys.queued) == (summed, summed)


def causal_blocks(order: schedule.Order, keys, seqlen: int) -> list[int]:
    """Query blocks of each key tile in its order, and 4 more for the tile's begin and end."""
    band, columns = (
        schedule.Band(None, 1, seqlen),
        [schedule.tile_at(n, order)[0] * keys.tile_n for n in range(order.tiles)],
    )
    blocks = [schedule.query_blocks(column, keys.tile_n, keys.tile_m, seqlen, band) for column in columns]
    return [stop - start + 4 for start, stop in blocks]


@pytest.mark.parametrize("keys", [TABLE[192, 128].kept.keys, TABLE[256, 256].kept.keys], ids=lambda x: str(x.width))
@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 4096, 8192, 16384])
def test_causal_key_tiles_are_even_over_132_sms(keys, seqlen):
    """Query blocks of the busiest CTA over the mean. With fewer heads at a time they would not be: 8 or 4 heads of these lengths cost up
    to 1.6."""
    heads, tiles = 2048 // keys.width * (16384 // seqlen), -(-seqlen // keys.tile_n)
    section, ctas = grids.spread(heads, tiles, sizes.SHARING, 132)
    order = schedule.Order(tiles, heads, section, False)
    blocks = causal_blocks(order, keys, seqlen)
    mine = [range(schedule.rounds(cta, ctas, order.tiles)) for cta in range(ctas)]
    work = [sum(blocks[schedule.nth(cta, ctas, n)] for n in rounds) for cta, rounds in enumerate(mine)]
    assert max(work) <= 1.04 * sum(work) / 132


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("seqlen", [1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_causal_key_tiles_from_the_queue_are_even_and_of_heads_that_l2_holds(dims, seqlen, group):
    """Query blocks of the busiest of 132 CTAs over the mean, where the CTA that is free first takes the next tile."""
    x = backward_config.Backward(TABLE[dims].summed("upper", packed=False), None, "bf16", "upper")
    heads = max(2, 2048 // x.keys.width // group)
    spec = SimpleNamespace(deterministic=False, everywhere=False)
    p = SimpleNamespace(
        batch=16384 // seqlen, heads_q=heads * group, heads_k=heads, seqlen_q=seqlen, seqlen_k=seqlen, spec=spec
    )
    tiles = -(-seqlen // x.keys.tile_n)
    section, ctas, *_ = grids.grids(x, p, p.batch * heads, seqlen, 132)
    assert ctas == 132
    # Q, K, V and dO in 16 bits, and the sums of dQ; the few tiles of grouped heads are long, and evenness counts more.
    assert group > 1 or section * seqlen * dims[0] * (4 * 2 + 4) <= grids.OPEN_BYTES
    work = [0] * ctas
    for blocks in causal_blocks(schedule.Order(tiles, p.batch * heads, section, False), x.keys, seqlen):
        heapq.heapreplace(work, work[0] + group * blocks)
    assert max(work) <= (1.03 if group == 1 else 1.08) * sum(work) / ctas


def shared_tiles(dims, form, shape, deterministic=False, packed=False) -> tuple:
    """Tiles of ``(batch, seqlen, heads_q, heads_k)`` and how 132 multiprocessors share them."""
    row, (batch, seqlen, heads_q, heads_k) = TABLE[dims], shape
    form = "band" if row.kept and form == "upper" else form
    passes = row.keeping(form, packed, softcap=False) or backward_config.Passes(row.summed(form, packed))
    x = backward_config.Backward(*passes, "bf16", form, packed=packed)
    spec, total = SimpleNamespace(deterministic=deterministic, everywhere=False), seqlen * (batch if packed else 1)
    p = SimpleNamespace(
        batch=batch, heads_q=heads_q, heads_k=heads_k, seqlen_q=total, seqlen_k=total, spec=spec, batch_dim=batch
    )
    heads = heads_k if packed else batch * heads_k
    return x, p, heads, grids.tile_parts(x, p, heads, total, (-grids.PAST_EVERY_TILE, 1), 132)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_no_tile_is_shared_where_dq_is_added_up_in_order(dims):
    """Its parts would take memory for every sequence of the batch."""
    assert shared_tiles(dims, "upper", (1, 2048, 8, 1))[3] != grids.WHOLE
    assert shared_tiles(dims, "upper", (1, 2048, 8, 1), deterministic=True)[3] == grids.WHOLE


@pytest.mark.parametrize(("mask", "section"), [(tw.causal(), 8), (None, 16)], ids=["causal", "full"])
def test_additions_in_order_have_as_many_heads_at_once_as_l2_holds_or_as_equal_tiles_need(mask, section):
    p = long(128, 4096, (2, 128), mask=mask, deterministic=True).p
    assert grids.grids(backward_config.choose(p), p, 256, 4096, 132)[0] == section


FEW = [(1, 2048, 8, 1), (1, 4096, 8, 1), (1, 8192, 8, 1), (1, 4096, 8, 2), (2, 4096, 16, 2), (1, 16384, 1, 1)]


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("form", ["full", "upper"])
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_few_tiles_keep_132_sms_at_work(dims, form, shape):
    """The time of the busiest CTA over the mean, in query blocks, where the CTA that is free first takes the next part. A part's own cost
    counts: more of them would be more even and slower."""
    x, p, heads, shares = shared_tiles(dims, form, shape)
    tiles, group = -(-p.seqlen_k // x.keys.tile_n), p.heads_q // p.heads_k
    order, per_head = schedule.Order(tiles, heads, heads, False), [-(-p.seqlen_q // x.keys.tile_m)] * tiles
    if form == "upper":
        one = schedule.Order(tiles, 1, 1, False)
        per_head = causal_blocks(one, x.keys, p.seqlen_q)
    found = []
    for n in range(shares.units(order.tiles)):
        tile, part = (n, -1) if n < shares.whole else divmod(n - shares.whole, shares.each)
        blocks, of = per_head[schedule.tile_at(tile, order)[0]], part % (1 << shares.block_bits)
        ends = [blocks * (of + k) >> shares.block_bits for k in range(2)] if part >= 0 else [0, blocks]
        found.append((ends[1] - ends[0]) * (group // shares.by_heads if part >= 0 else group))
    assert sum(found) == heads * group * sum(per_head)  # every block has one part
    work = [0] * 132
    for blocks in found:
        heapq.heapreplace(work, work[0] + blocks + grids.BEGIN_COST + grids.PART_COST)
    assert max(work) <= 1.5 * sum(work) / 132


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("form", ["full", "upper"])
@pytest.mark.parametrize("packed", [False, True], ids=["equal", "packed"])
def test_what_parts_leave_takes_a_bounded_room(dims, form, packed):
    for shape in (*FEW, (1, 512, 64, 1), (64, 512, 8, 1), (1, 131072, 16, 1), (1, 128, 6, 3), (3, 1, 4, 4)):
        x, p, heads, shares = shared_tiles(dims, x_form(form, packed), shape, packed=packed)
        _, parts = shares.room(x, p, heads, slice(0, p.seqlen_k))
        assert parts * KEY_GROUPS * left_elements(x.keys) * 4 <= grids.PARTS_ROOM
        assert (p.heads_q // p.heads_k) % shares.by_heads == 0


def x_form(form: str, packed: bool) -> str:
    """The form whose kernels a form of packed sequences has."""
    return "band" if packed and form == "full" else form


@pytest.mark.parametrize("form", ["full", "upper"])
@pytest.mark.parametrize("seqlen", [300, 2048, 4096, 16384])
def test_what_must_repeat_is_shared_as_one_sequence_alone_says(form, seqlen):
    alone = [shared_tiles((256, 256), form, (b, seqlen, 8, 2), deterministic=True)[-1] for b in (1, 2, 5)]
    assert len(set(alone)) == 1
    # No tile's place in the launch says whether it is shared.
    assert alone[0].whole in (0, grids.PAST_EVERY_TILE)
    assert shared_tiles((256, 256), "band", (3, seqlen, 8, 2), True, packed=True)[-1] == grids.TileParts()


def test_the_names_of_what_is_shipped_tell_them_apart():
    names = [x.name for x in shipped()]
    assert len(set(names)) == len(names)


def test_no_warpgroup_of_what_ships_waits_for_registers_that_nobody_has():
    for keys in {x.keys for x in shipped()}:
        by_role = [keys.registers_load, *[keys.registers] * KEY_GROUPS]
        assert sum(by_role) <= registers_together(len(by_role)), keys.name


def small(nq=70, nk=70, d=64, heads=(4, 2), **options) -> Call:
    lengths = ((nq, heads[0]), (nk, heads[1]), (nk, heads[1]))
    return call(*(normal(1, n, h, d, dtype=torch.bfloat16, seed=s) for s, (n, h) in enumerate(lengths)), **options)


@pytest.mark.parametrize("d", [8, 64, 72, 96, 104, 128, 192, 256])
@pytest.mark.parametrize(
    "mask", [None, tw.causal(), tw.window(9, 3), tw.prefix(20)], ids=["full", "causal", "window", "prefix"]
)
@pytest.mark.parametrize("score", [None, tw.softcap(20.0)], ids=["plain", "softcap"])
def test_what_is_chosen_is_shipped(d, mask, score):
    p = small(d=d, mask=mask, score=score).p
    assert forward_reasons.reasons(p) + backward_config.reasons(p) == []
    assert backward_config.choose(p) in shipped()


@pytest.mark.parametrize("d", [64, 128])
def test_one_pass_is_taken_where_it_pays_and_always_with_a_softcap(d):
    assert backward_config.choose(small(d=d, nk=1000).p).queries is None
    assert backward_config.choose(small(d=d, nk=555).p).queries is not None
    for options in ({}, {"causal": True}, {"mask": tw.window(9, 3)}, {"deterministic": True}):
        assert backward_config.choose(small(d=d, score=tw.softcap(20.0), **options).p).queries is None


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_rows_that_end_somewhere_are_a_band_where_that_takes_as_long(d):
    p = small(d=d, causal=True).p
    assert backward_config.choose(p).form == ("band" if d > 128 else "upper")
    assert forward_config.choose(p).form == ("band" if d == 192 else "upper")
    q = normal(70, 4, d, dtype=torch.bfloat16)
    p = call(q, q, q, cu_seqlens_q=torch.tensor([0, 30, 70]), causal=True).p
    assert backward_config.choose(p).form == ("upper" if d == 64 else "band")
    assert forward_config.choose(p).form == ("upper" if d in (64, 128) else "band")


@pytest.mark.parametrize("d", [64, 128])
def test_few_tiles_are_shared_in_one_pass_however_few_the_keys_are(d, monkeypatch):
    monkeypatch.setattr(devices, "of", lambda device: SimpleNamespace(cores=132))
    sizes = {"nq": 300, "nk": 300, "d": d, "causal": True}
    assert backward_config.choose(small(**sizes).p).queries is None  # 6 tiles
    assert backward_config.choose(small(**sizes, heads=(24, 24)).p).queries is not None  # 72 tiles
    assert backward_config.choose(small(**sizes, deterministic=True).p).queries is not None


def test_a_call_whose_backward_is_missing_is_refused_from_its_forward_on():
    slopes = torch.ones(4)
    assert not Hopper().refused(small(score=tw.alibi(slopes)).p)
    wanted, each = slopes.clone().requires_grad_(), torch.ones(1, 4, requires_grad=True)
    others = {
        "a mask other than causal": {},  # keys on either side
        "deterministic=True": {"causal": True, "deterministic": True},
        "head_dim 256, above 128": {"causal": True, "d": 256},
        "dropout": {"causal": True, "dropout_p": 0.1, "dropout_seed": 1},
    }
    for reason, options in others.items():
        p = small(score=tw.alibi(wanted), **options).p
        assert p.spec.needs_grad
        assert Hopper().refused(p) == [f"the gradient of ALiBi's slopes with {reason}"]
    in_fp32 = replace(
        small(score=tw.alibi(wanted), causal=True).p, **{x: getattr(p, x)._replace(dtype=torch.float32) for x in "qkv"}
    )
    assert Hopper().refused(in_fp32) == ["torch.float32: its kernels take float16 and bfloat16"]
    ends = torch.tensor([0, 70, 150])
    rows = [x.flatten(0, 1) for x in qkv(batch=2, nq=75, nk=75, d=264, dtype=torch.float32)]
    wide_in_fp32 = call(*rows, cu_seqlens_q=ends, cu_seqlens_k=ends).p
    assert wide_in_fp32.spec.needs_grad
    assert "torch.float32: its kernels take float16 and bfloat16" in Hopper().refused(wide_in_fp32)
    assert Hopper().refused(small(score=tw.alibi(each), causal=True).p)  # slopes of batch elements
    assert Hopper().refused(small(score=tw.alibi(wanted) >> tw.softcap(5.0), causal=True).p)


def by_distance(table: torch.Tensor) -> Callable:
    return lambda s, b, h, i, j: s + table[h, (i - j).clamp(0, 8)]


@pytest.mark.parametrize("d", [8, 64, 96, 128])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_a_table_by_distance_has_one_pass_that_is_shipped_and_sums_its_gradient(causal, d):
    for table in (torch.ones(4, 9), torch.ones(4, 9, requires_grad=True)):
        p = small(d=d, causal=causal, score=by_distance(table)).p
        x = backward_config.choose(p)
        assert not Hopper().refused(p)
        assert x in shipped()
        assert (x.score, x.sums_bias, x.queries) == ("table", True, None)
        assert (x.form, x.keys.sums_dq) == ("upper" if causal else "full", True)


def test_a_table_whose_gradient_no_kernel_has_is_refused_from_its_forward_on():
    wanted = by_distance(torch.ones(4, 9, requires_grad=True))
    lined = {
        "deterministic=True": {"deterministic": True},
        "head_dim 256, above 128": {"d": 256},
    }
    for reason, options in lined.items():
        p = small(score=wanted, causal=True, **options).p
        assert Hopper().refused(p) == [f"the gradient of a table by distance with {reason}"]
    # What no line holds: ends of rows on both sides, dropped pairs, another score behind it, a table of each batch element.
    pairs = torch.ones(1, 4, 9, requires_grad=True)
    others = (
        {"score": wanted, "mask": tw.window(9, 0)},
        {"score": wanted, "causal": True, "dropout_p": 0.1, "dropout_seed": 1},
        {"score": tw.score(wanted) >> tw.softcap(5.0), "causal": True},
        {"score": lambda s, b, h, i, j: s + pairs[b, h, (i - j).clamp(0, 8)], "causal": True},
    )
    for options in others:
        (reason,) = Hopper().refused(small(**options).p)
        assert "a table that is read by distance, and a bias by pair" in reason
    frozen = by_distance(torch.ones(4, 9))
    assert not Hopper().refused(small(score=frozen, causal=True, deterministic=True).p)
    assert backward_config.choose(small(score=frozen, causal=True, deterministic=True).p).score != "table"


def test_what_asks_about_every_pair_gets_tiles_of_its_own_and_is_never_summed(monkeypatch):
    monkeypatch.setattr(
        backward_config,
        "TABLE",
        {dims: replace(row, one_pass_from=0, overlapping_from=None, packed_from=None) for dims, row in TABLE.items()},
    )
    for d in (64, 96, 128, 256):
        x = backward_config.choose(small(d=d, score=tw.alibi(torch.ones(4))).p)
        assert x.pairs
        assert (x.keys, x.queries) in [row.pairs for row in TABLE.values()]
        assert x not in shipped()


@pytest.mark.parametrize("d", [8, 64, 72, 96, 128])
@pytest.mark.parametrize(
    "mask", [None, tw.causal(), tw.window(9, 3), tw.prefix(20)], ids=["full", "causal", "window", "prefix"]
)
def test_dropout_is_shipped_and_draws_its_pairs_once(d, mask):
    p = small(d=d, mask=mask, dropout_p=0.1, dropout_seed=1).p
    x = backward_config.choose(p)
    assert x in shipped()
    assert x.queries is None
    assert x.form in ("full", "upper", "rows")
    assert forward_config.choose(p) in forward_config.shipped()
    assert forward_config.choose(p).form == x.form


@pytest.mark.parametrize("d", [8, 64, 96, 128])
def test_alibi_whose_bias_is_linear_has_one_pass_that_is_shipped(d):
    options = {"d": d, "causal": True, "score": tw.alibi(torch.ones(4))}
    x = backward_config.choose(small(**options).p)
    assert x in shipped()
    assert (x.score, x.trained) == ("alibi", False)
    wanted = small(**options | {"score": tw.alibi(torch.ones(4, requires_grad=True))}).p
    assert not Hopper().refused(wanted)
    assert backward_config.choose(wanted) in shipped()
    assert backward_config.choose(wanted).trained
    assert backward_config.choose(small(deterministic=True, **options).p) == x
    q = normal(70, 4, d, dtype=torch.bfloat16)
    c = call(q, q, q, causal=True, score=options["score"], cu_seqlens_q=torch.tensor([0, 30, 70]))
    packed = backward_config.choose(c.p)
    assert packed in shipped()
    assert (packed.score, packed.packed, packed.queries) == ("alibi", True, None)


@pytest.mark.parametrize("d", [8, 64, 96, 128])
def test_one_kernel_that_is_shipped_serves_every_mask_that_is_no_band(d):
    masks = tw.keep(lambda b, h, i, j: j % 2 == 0), tw.dense(normal(70, 70) > 0), tw.causal() | tw.prefix(9)
    (found,) = {backward_config.choose(small(d=d, mask=mask).p) for mask in masks}
    assert found.form == "bits"
    assert found in shipped()
    # Its dQ is added up in any order.
    (reason,) = Hopper().refused(small(d=d, mask=masks[0], deterministic=True).p)
    assert "deterministic=True" in reason


@pytest.mark.parametrize(
    ("visits", "heads", "found"),
    [
        ([[36] * 128], 16, 2),  # even tiles: no more heads than L2 holds
        ([[256, *[18] * 127]], 16, 16),  # attention sinks: every long tile comes first
        ([[256, *[18] * 127]], 64, 13),
        ([[8] * 128, [256, *[4] * 127]], 2, 2),
        ([[0] * 8], 4, 4),
    ],
    ids=["even", "sinks", "sinks-of-many-heads", "heads-apart", "nothing"],
)
def test_a_section_has_heads_enough_that_the_longest_tile_of_the_last_one_does_not_outlast_the_rest(
    visits, heads, found
):
    visits = torch.tensor(visits, dtype=torch.int32)[None]
    assert even_section(visits, Sections(heads, 2, 132)).tolist() == [found]


# -- What a launch is given ----------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """The arguments of each launch; dQ is summed however few keys there are."""
    found = []
    monkeypatch.setattr(
        backward_config,
        "TABLE",
        {dims: replace(row, one_pass_from=0, overlapping_from=None, packed_from=None) for dims, row in TABLE.items()},
    )

    def put(x, arguments: list) -> None:
        tensors, numbers = seen(arguments)
        found.append((x.name, tensors[:7], tensors[7:], numbers))

    stand_in(monkeypatch, put)
    return found


def packed(rest=(0, 0), heads=(4, 2), **options) -> Call:
    lengths = [(70, 30), (0, 9), (33, 33)]
    (nq, nk), starts = map(sum, zip(*lengths, strict=True)), torch.tensor([(0, 0), *lengths]).cumsum(0)
    sizes = (nq + rest[0], heads[0]), (nk + rest[1], heads[1]), (nk + rest[1], heads[1])
    q, k, v = (normal(n, h, 64, dtype=torch.bfloat16, seed=s) for s, (n, h) in enumerate(sizes))
    return call(q, k, v, cu_seqlens_q=starts[:, 0], cu_seqlens_k=starts[:, 1], **options)


@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_sequences_have_gradients_of_their_own(deterministic):
    p = packed(causal=True, deterministic=deterministic).p
    assert forward_reasons.reasons(p) + backward_config.reasons(p) == []
    x = backward_config.choose(p)
    assert x.packed
    assert x in shipped()


@pytest.mark.parametrize("x", [x for x in shipped() if x.packed and x.form == "full"], ids=lambda x: x.name)
def test_packed_statistics_have_room_for_whole_blocks_and_no_two_overlap(x):
    lengths = [0, 1, 0, 127, 128, 129, 500, 0, 95, 97, 3]
    starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    p = SimpleNamespace(batch=len(lengths) - 1, seqlen_q=starts[-1])  # the last are the rows past the last sequence
    for between, step, end, blocks in (
        (x.statistics_gap, STATISTICS_ALIGNMENT, x.statistics_rows(p), (x.keys.tile_m, x.tile_m)),
        (x.keys.tile_m, x.keys.tile_m, x.blocks(p) * x.keys.tile_m, (x.keys.tile_m,)),
    ):
        first = [(start + n * between) // step * step for n, start in enumerate(starts[:-1])]
        for n, length in enumerate(lengths):
            need = max(-(-length // m) * m for m in blocks)
            assert first[n] + need <= [*first[1:], end][n]


@pytest.mark.parametrize("seqlen", [1, 96, 97, 385, 2048, 2049])
def test_behind_a_head_s_lines_a_first_pass_over_queries_has_a_flag_for_each_tile(seqlen):
    p = SimpleNamespace(seqlen_q=seqlen)
    for x in (x for x in shipped() if not x.packed):
        blocks = max(-(-seqlen // m) * m for m in (x.keys.tile_m, x.tile_m))
        assert x.statistics_rows(p) - blocks >= (-(-seqlen // x.tile_m) if x.flagged else 0)
        assert x.statistics_rows(p) % 16 == 0
    assert any(x.flagged for x in shipped())


def test_a_packed_launch_is_of_one_batch_element_and_counts_from_zero(launched):
    c = packed(rest=(5, 2), mask=tw.window(9, 3) & tw.key_range(4, 20), sink=normal(4))
    grads = run(c)
    ((name, given, made, numbers),) = launched
    assert name == backward_config.choose(c.p).name
    assert given[0].shape == (1, 108, 4, 64)
    assert numbers[:2] == [-9, 4]
    assert numbers[-2:] == [4, 20]
    cu_q, cu_k, *queues = made[:4]
    assert (cu_q.tolist(), cu_k.tolist()) == ([0, 70, 70, 103], [0, 30, 39, 72])
    assert [x.tolist() for x in queues] == [[0], [0]]
    assert made[4].data_ptr() == grads.dq.data_ptr()
    assert made[5].shape == (1, 74, 2, 64)
    x = backward_config.choose(c.p)
    assert (made[7].shape[2], made[8].shape[2]) == (x.statistics.words * x.statistics_rows(c.p), x.statistics_rows(c.p))


def test_a_packed_sink_s_gradient_finds_lse_in_the_terms_that_products_subtract():
    p = packed(causal=True, softmax_scale=0.3, sink=normal(4)).p
    x = backward_config.Backward(TABLE[64, 64].summed("upper", packed=True), None, "bf16", "upper", packed=True)
    plan, lse = backward_call.BackwardPlan(p, x), torch.tensor([1e-3, 2.7182817, -88.1, 0.0, torch.inf])

    def truncated(numbers):
        return (numbers.view(torch.int32) & -65536).view(torch.float32)

    left, terms = lse.clamp(max=1e20) / p.softmax_scale, []
    for part in (truncated, truncated, lambda numbers: numbers.bfloat16().float()):
        terms.append(part(left))
        left = left - terms[-1]
    rows = torch.stack([*terms, *[torch.full_like(left, 9.0)] * 5], -1).bfloat16().view(torch.float32)
    found = backward_call.lse_of(plan, rows.view(1, 1, -1))[0, 0]
    assert x.subtracts
    assert torch.allclose(found[:4], lse[:4], rtol=1e-6, atol=0)
    assert torch.exp(-found[4]) == 0


def run(c: Call, **changed: torch.Tensor):
    out = Reference().forward(c.p, c.t)
    given = {"do": c.do, "dlse": c.dlse} | changed
    grad = OutputGrads.of(given["do"], given["dlse"])
    return Hopper().backward(c.p, c.t, Output(out.o.to(c.p.dtype), out.lse), grad.do, grad.dlse)


def test_a_launch_gets_the_tensors_themselves_and_the_numbers_of_the_call(launched):
    c = small(causal=True, softmax_scale=0.25)
    grads = run(c)
    ((name, given, made, numbers),) = launched
    assert name == backward_config.choose(c.p).name
    assert [x.data_ptr() for x in given[:3]] == [x.data_ptr() for x in (c.t.q, c.t.k, c.t.v)]
    assert [x.data_ptr() for x in made[:3]] == [x.data_ptr() for x in (grads.dq, grads.dk, grads.dv)]
    assert numbers[1] == 1
    assert numbers[6:] == [0.25, 0.25 * math.log2(math.e), 0.0, grids.PAST_EVERY_TILE, 1, 2, 0, 0]
    lse2, delta, sums, semaphores, parts, queue = made[3:]
    assert semaphores.shape == (1, 4, 2)
    assert lse2.shape == (1, 4, 4 * (128 + 16))  # the terms of both statistics, which products subtract
    assert delta.shape == (1, 4, 128 + 16)  # whole blocks, and the head's count
    assert sums.shape == (1, 4, 1, 2, 64 * 64)
    assert parts.shape == (0, 2, 64 * 128)  # no tile is shared
    assert (queue.shape, queue.dtype) == ((1,), torch.int32)


def test_a_launch_that_adds_in_order_has_a_semaphore_of_every_part_of_a_block(launched):
    c = small(nq=200, deterministic="everywhere")
    run(c)
    ((name, _, made, numbers),) = launched
    assert name.endswith("_queue_counted")
    assert numbers[-1] == 1
    sums, turns = made[5:7]
    assert sums.shape == (1, 4, 2, 2, 64 * 64)
    assert turns.shape == (1, 4, 2 * 2)
    assert turns.dtype == torch.int32


def test_a_problem_that_comes_again_is_launched_with_its_new_tensors(launched):
    c, backend = small(causal=True), Hopper()
    out = Reference().forward(c.p, c.t)
    gradients = [c.do.clone() for _ in range(2)]
    results = [backend.backward(c.p, c.t, Output(out.o.to(c.p.dtype), out.lse), do, c.dlse) for do in gradients]
    assert [made[0].data_ptr() for _, _, made, _ in launched] == [grads.dq.data_ptr() for grads in results]
    assert launched[0][1][4].data_ptr() != launched[1][1][4].data_ptr()


def test_keys_that_no_query_sees_get_zeros_and_stay_outside(launched):
    c = small(30, 70, mask=tw.window(8, 2))
    grads = run(c)
    _, given, made, numbers = launched[0]
    assert given[1].shape[1] == made[1].shape[1] == 38  # the first row sees keys from 32 on, the last as far as 70
    assert numbers[:2] == [0, 11]
    assert made[2].data_ptr() == grads.dv[:, 32:].data_ptr()
    assert (grads.dk[:, :32] == 0).all()


@pytest.mark.parametrize("which", ["do", "dlse"])
def test_gradients_that_cannot_be_addressed_are_copied(which, launched):
    c = small()
    odd = {"do": torch.zeros(1).bfloat16().expand(1, 70, 4, 64), "dlse": torch.zeros(1).expand(1, 4, 70)}[which]
    run(c, **{which: odd})
    got = launched[0][1][{"do": 4, "dlse": 6}[which]]
    assert torch.equal(got.value, odd)
    assert got.stride() == got.value.contiguous().stride()


@pytest.mark.parametrize("sink", [None, normal(4)], ids=["no-sink", "sink"])
def test_where_no_query_sees_a_key_nothing_is_launched(sink, launched):
    c = small(mask=tw.key_range(30, 30), sink=sink)
    grads = run(c)
    assert not launched
    assert all((x == 0).all() for x in (grads.dq, grads.dk, grads.dv))
    if sink is not None:
        torch.testing.assert_close(grads.sink, c.dlse.sum((0, 2)))  # lse is the sink itself


def test_one_may_be_named_for_every_problem():
    c, other = small(), replace(backward_config.choose(small().p), form="band")
    assert Hopper(backward=other).backward_config(c.p) is other
