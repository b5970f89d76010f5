"""The portions of a backward that keeps dS: all heads and keys once, in bounded memory, in an order that a launch can resume."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from tilewise.backends.hopper.backward.config import PACKED_ROOM, SHEET_LIMIT, SHEET_ROOM, TABLE, Backward
from tilewise.backends.hopper.backward.tiles import SHEET_BLOCK, SHEET_MARGIN
from tilewise.backends.hopper.host.draft import Late, View
from tilewise.backends.hopper.host.plan import FAR
from tilewise.backends.hopper.host.portions import LEAST_BLOCKS, OF_KEYS, PackedPortions, Portion, Portions, evenly
from tilewise.backends.hopper.kit import schedule

SIZES = {  # head dim, batch, query heads, key heads, queries and keys
    "one": (256, 1, 1, 1, 1, 1),
    "short": (256, 32, 8, 8, 512, 512),
    "usual": (256, 4, 8, 8, 4096, 4096),
    "long": (256, 1, 8, 8, 16384, 16384),
    "longer": (256, 1, 8, 8, 65536, 65536),
    "grouped": (512, 1, 32, 4, 8192, 8192),
    "odd": (512, 3, 6, 3, 5000, 7001),
    "wide": (192, 2, 5, 5, 300, 100_000),
}
HI = {"full": FAR, "causal": 1}


def made(name: str, mask: str, cores: int = 132) -> Portions:
    d, batch, heads_q, heads_k, seqlen_q, seqlen_k = SIZES[name]
    row = next(row for dims, row in TABLE.items() if dims[1] == d)
    sizes = {"batch": batch, "heads_q": heads_q, "heads_k": heads_k, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    problem = SimpleNamespace(**sizes, batch_dim=batch, packed=False)
    config = Backward(*row.kept, dtype="bf16", form="full" if mask == "full" else "upper")
    offset = 0 if mask == "full" else seqlen_k - seqlen_q
    return Portions(problem, config, seqlen_k, (-FAR, HI[mask] + offset), cores)


BOTH = pytest.mark.parametrize("mask", HI)


@BOTH
@pytest.mark.parametrize("name", SIZES)
def test_every_head_has_every_key_once_and_in_order(name, mask):
    found = made(name, mask)
    keys: dict[tuple[int, int], list] = {}
    for portion in found.all:
        for b in range(*portion.batch):
            for h in range(*portion.heads):
                keys.setdefault((b, h), []).append(portion.keys)
    assert len(keys) == found.problem.batch * found.problem.heads_k
    for spans in keys.values():
        assert spans[0][0] == 0
        assert spans[-1][1] == found.seqlen_k
        assert all(one[1] == other[0] and one[1] % 64 == 0 for one, other in pairwise(spans))


@BOTH
@pytest.mark.parametrize("name", SIZES)
def test_a_sheet_takes_no_more_memory_than_it_may(name, mask):
    found = made(name, mask)
    sheet, sums = found.sheet_shape, found.sums_shape
    assert 2 * torch.Size(sheet).numel() <= SHEET_LIMIT
    # More than the room only where a tile for every CTA takes more.
    row = 2 * sheet[0] * sheet[2] * sheet[3]
    assert 2 * torch.Size(sheet).numel() <= SHEET_ROOM or sheet[1] * SIZES[name][3] <= 132 or row > SHEET_ROOM // 132
    assert 4 * torch.Size(sums).numel() <= SHEET_ROOM


@BOTH
@pytest.mark.parametrize("name", SIZES)
def test_the_views_of_a_share_fit_the_sheet_and_the_sums(name, mask):
    found = made(name, mask)
    sheet, sums = found.sheet_shape, found.sums_shape
    for portion in found.all:
        group = found.group
        assert portion.size("batch") * portion.size("heads") * group <= sheet[0]
        assert -(-portion.size("keys") // 64) <= sheet[1]
        if portion.keys != (0, found.seqlen_k):
            assert portion.size("batch") * portion.size("heads") * group <= sums[0]
            assert sums[1] * found.config.queries.tile_m >= found.problem.seqlen_q


def test_views_are_of_the_heads_and_keys_of_a_share():
    shape = {"q": (2, 9, 6, 4), "k": (2, 100, 3, 4), "lse": (2, 6, 9)}
    t = {name: torch.arange(torch.Size(size).numel()).view(size) for name, size in shape.items()}
    portion = Portion((1, 2), (1, 3), (64, 100))
    assert torch.equal(portion.of(t["q"], 3), t["q"][1:, :, 2:6])
    assert torch.equal(portion.of(t["k"], 3, keys=True), t["k"][1:, 64:, 1:3])
    assert torch.equal(portion.of(t["lse"], 3), t["lse"][1:, 2:6])


@pytest.mark.parametrize(("count", "most"), [(1, 1), (7, 3), (8, 4), (1000, 132), (5, 9)])
def test_spans_are_as_equal_as_may_be(count, most):
    spans = evenly(count, most)
    sizes = [stop - start for start, stop in spans]
    assert (spans[0][0], spans[-1][1], sum(sizes)) == (0, count, count)
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1


def test_which_keys_a_share_has_depends_on_no_other_sequence(monkeypatch):
    one = made("longer", "causal")
    many = Portions(
        SimpleNamespace(**vars(one.problem) | {"batch": 5, "batch_dim": 5}),
        one.config,
        one.seqlen_k,
        one.ends,
        one.cores,
    )
    assert [portion for portion in many.all if portion.batch == (0, 1)] == one.all
    assert len(many.all) == 5 * len(one.all)


def test_shares_keep_all_ctas_at_work():
    """Of a causal head of 16,384 keys a portion has tiles for two rounds: the longest one of a single round would keep others waiting."""
    found = made("long", "causal")
    heads, keys = found.sizes[1:]
    assert heads * keys >= 2 * 132 * 0.9
    assert found.cost(heads, keys) <= found.cost(1, keys)


@BOTH
@pytest.mark.parametrize("name", SIZES)
def test_a_portion_of_several_heads_has_more_than_a_few_keys(name, mask):
    found = made(name, mask)
    _, heads, keys = found.sizes
    assert heads == 1 or keys >= min(LEAST_BLOCKS, found.blocks[0])


def test_a_launch_in_shares_gets_each_share_s_views():
    found = made("long", "full")
    p, half, fp32 = found.problem, torch.bfloat16, torch.float32
    rows, keys = (1, p.seqlen_q, 8, 256), (1, p.seqlen_k, 8, 256)
    whole = {name: View.contiguous(name, half, *rows) for name in ("q", "o", "dq")}
    whole |= {name: View.contiguous(name, half, *keys) for name in OF_KEYS}
    whole |= {name: View.contiguous(name, fp32, 1, 8, p.seqlen_q) for name in ("lse", "dlse", "lse2", "delta")}
    whole |= {"do": Late("do", half, 4), "sheet": View.contiguous("scratch", half, 1)}
    for n, portion in enumerate(found.all):
        of = found.of(n, whole)
        assert (of["q"].shape[2], of["k"].shape[1]) == (portion.size("heads"), portion.size("keys"))
        assert of["k"].offset == 256 * (8 * portion.keys[0] + portion.heads[0])
        assert of["dk"].shape == of["k"].shape
        assert of["lse"].shape[1] == of["q"].shape[2]
        assert (of["do"].memory, of["sheet"]) == (f"do{n}", whole["sheet"])
    late = found.late({"do": torch.zeros(1).expand(rows), "q": torch.empty(0)})
    assert [x.shape[2] for x in late.values()] == [portion.size("heads") for portion in found.all]


def packed(tokens: int, sequences: int, heads_k: int, group: int = 1, d: int = 256) -> PackedPortions:
    sizes = {"batch": sequences, "heads_q": heads_k * group, "heads_k": heads_k, "seqlen_q": tokens, "seqlen_k": tokens}
    config = Backward(*TABLE[d, d].kept, dtype="bf16", form="upper", packed=True)
    return PackedPortions(SimpleNamespace(**sizes, batch_dim=1, packed=True), config)


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (100, 7, 3), (8192, 9, 16), (16384, 40, 16, 2), (32768, 1, 8), (20000, 3, 4, 4, 512)], ids=str
)
def test_a_sheet_of_packed_sequences_has_all_keys_of_some_heads(sizes):
    found = packed(*sizes)
    size, heads = 2 * torch.Size(found.sheet_shape).numel(), found.room // found.most_blocks
    assert heads * found.count >= sizes[2] > heads * (found.count - 1)
    assert size <= PACKED_ROOM + 2 * SHEET_MARGIN * SHEET_BLOCK or (heads == 1 and size <= SHEET_LIMIT)


@pytest.mark.parametrize("seed", range(20))
def test_no_lengths_of_packed_sequences_take_more_blocks_than_the_host_makes_room_for(seed):
    n, tiles = torch.Generator().manual_seed(seed), TABLE[256, 256].kept.queries
    count = int(torch.randint(1, 9, (), generator=n))
    q, k = (torch.randint(0, (1, 100, 3000)[seed % 3] + 1, (count,), generator=n).tolist() for _ in range(2))
    most = tiles.most_blocks(sum(q), sum(k), count)
    blocks = [tiles.blocks(*lengths) for lengths in zip(q, k, strict=True)]
    assert sum(keys * queries for keys, queries in blocks) <= most
    alone = [tiles.blocks(sum(q), sum(k))]
    assert sum(keys * queries for keys, queries in alone) <= most
    # Every launch has heads as long as some are left, and no more than fit.
    for heads in (1, 2, 16, 33):
        each = schedule.heads_at_once(sum(keys * queries for keys, queries in blocks), heads, 2 * most)
        launches = -(-heads // each)
        assert 1 <= each <= heads
        assert (launches - 1) * each < heads
        assert each * sum(keys * queries for keys, queries in blocks) <= 2 * most


def test_each_portion_of_packed_sequences_counts_its_own_tiles():
    found = packed(16384, 4, 16)
    whole = {name: View.contiguous(name, torch.int32, found.count, 1) for name in ("cu_q", "counts_k", "counts_q")}
    of = [found.of(n, whole) for n in range(found.count)]
    assert found.count > 1
    assert [x["counts_k"].offset for x in of] == [x["counts_q"].offset for x in of] == [*range(found.count)]
    assert all(x["cu_q"] is whole["cu_q"] and x["counts_k"].shape == (1,) for x in of)
