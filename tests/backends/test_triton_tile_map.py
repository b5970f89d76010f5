"""Tiles of a mask by a kernel: the state of each is what its pairs say, and the keys that are seen are found."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the package triton is not installed")

import tilewise as tw
from bench.testing import call, qkv
from tests.backends.contract import agree
from tests.planning.test_tiles import HEADS, IDS, INTERVALS, MONOTONE, PREDICATES, grid_of, masks, matrix, true_status
from tilewise import expr
from tilewise.backends.triton import Triton, interpreting
from tilewise.backends.triton.config import Config
from tilewise.backends.triton.host import runtime, tile_map
from tilewise.backends.triton.host.tile_map import ends_of_lines, judged_tiles
from tilewise.backends.triton.kernels import tile_map as tile_map_kernels
from tilewise.backends.triton.tiles import Tiles
from tilewise.masks import Mask, catalogue
from tilewise.planning import tiles
from tilewise.planning.planner import Kind
from tilewise.planning.tiles import EMPTY, FULL, PARTIAL, Grid

pytestmark = pytest.mark.skipif(not interpreting(), reason="kernels are not interpreted (tests/conftest.py)")


def check(mask: Mask, nq: int, nk: int, tile: tuple[int, int], group: int = 2) -> set[int]:
    """The states that occur, after a comparison of all with the matrix."""
    grid = grid_of(mask, nq, nk)
    status, seen = judged_tiles(grid, *tile, group)
    kept = matrix(grid)
    true = true_status(kept, *tile)
    assert torch.equal(status.expand(true.shape), true)
    expected = kept.any(2).unflatten(1, (HEADS // group, group)).any(2)
    assert torch.equal(seen.expand(expected.shape), expected)
    return set(true.unique().tolist())


def test_kinds_of_predicates_have_exact_states_and_seen_keys():
    """Tensors, blocks, heads and batch elements that differ; tiles of odd sizes; ragged ends."""
    allowed = torch.rand(1, HEADS, 33, 130, generator=torch.Generator().manual_seed(1)) < 0.002
    pattern = torch.rand(2, 1, 5, 11, generator=torch.Generator().manual_seed(2)) < 0.5
    found = [
        check(tw.dense(allowed), 33, 130, (48, 80)),
        check(tw.block_sparse(pattern, 16, 12) & tw.window(60, 30), 70, 130, (32, 48), group=1),
        check(tw.keep(lambda b, h, i, j: (i * j + h) % 7 > b) & tw.causal(), 33, 130, (13, 64)),
        check(tw.keep(lambda b, h, i, j: (j // 10 % 2 == b) & (i // 8 != 2)), 33, 50, (8, 10)),
        check(tw.keep(lambda b, h, i, j: j < 3.5) & tw.causal(), 40, 5, (16, 16)),
    ]
    assert set.union(*found) == {EMPTY, PARTIAL, FULL}


def test_programs_take_the_tiles_of_a_key_tile_in_spans(monkeypatch):
    """Spans that divide the query tiles and spans that do not, one of all tiles, and heads of one key head in several programs."""
    mask = tw.keep(lambda b, h, i, j: (i * j + h) % 7 > b) & tw.causal()
    for programs in (1, 20, 50, 100):
        monkeypatch.setattr(tile_map, "PROGRAMS", programs)
        check(mask, 33, 40, (5, 16))


@pytest.mark.parametrize("name", MONOTONE)
def test_a_predicate_that_rises_or_falls_is_judged_as_its_pairs_say(name):
    check(MONOTONE[name][0](130), 33, 130, (24, 48))


@pytest.mark.parametrize("name", [name for name in PREDICATES if name.startswith("selected")])
def test_selected_keys_are_judged_as_their_pairs_say(name):
    """Entries in any order, twice and -1; blocks that tiles cut, and blocks that fill them."""
    check(PREDICATES[name](33, 130), 33, 130, (16, 48))
    check(PREDICATES[name](80, 80), 80, 80, (48, 24))


def test_tiles_that_entries_fill_or_leave_out_are_told_without_their_pairs(monkeypatch):
    asked = []
    for name in ("kept_pairs", "kept_groups"):
        pairs = getattr(tile_map_kernels, name)
        monkeypatch.setattr(tile_map_kernels, name, lambda *given, pairs=pairs: asked.append(1) or pairs.fn(*given))
    rows = torch.tensor([[0, 3, -1], [3, 3, 1], [2, -1, -1]]).view(1, 1, 3, 3)
    all_keys = tw.window(left=200)
    # Blocks of 16, two of a tile; the second row has one of the first tile's, and one twice.
    assert check(all_keys & tw.selected(rows, 32, 16), 48, 128, (16, 32)) == {EMPTY, FULL}
    assert not asked
    assert check(all_keys & tw.selected(rows, 16, 16), 48, 128, (16, 32)) == {EMPTY, PARTIAL}
    assert asked


@pytest.mark.parametrize("blocks", [(16, 64), (1, 64), (48, 32), (7, 128)], ids=str)
def test_groups_of_keys_that_a_pattern_cannot_tell_apart_are_judged_side_by_side(blocks, monkeypatch):
    """More tiles than a program takes, ragged ends, and batch elements and heads with patterns of their own."""
    monkeypatch.setattr(tile_map_kernels, "judged_block", None)
    queries, keys = blocks
    pattern = (
        torch.rand(2, HEADS, -(-70 // queries), -(-4500 // keys), generator=torch.Generator().manual_seed(1)) < 0.4
    )
    pattern[:, :, :48, :2], pattern[:, :2, :, 4] = True, False
    mask = tw.keep(lambda b, h, i, j: pattern[b, h, i // queries, j // keys])
    assert check(mask, 70, 4500, (48, 64)) == {EMPTY, PARTIAL, FULL}


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.tuples(*[st.sampled_from([1, 31, 65])] * 2).flatmap(lambda n: st.tuples(masks(*n), st.just(n))))
def test_any_composition_is_judged_as_its_pairs_say(drawn):
    mask, (nq, nk) = drawn
    check(mask, nq, nk, (48, 80))


def test_a_part_of_batch_and_heads_is_judged_as_its_own():
    mask = tw.keep(lambda b, h, i, j: (i // 16 + j // 16 + b + h) % 3 == 0)
    whole = grid_of(mask, 20, 35)
    part = Grid(whole.region, whole.leaves, 20, 35, torch.tensor([1]), torch.tensor([2, 3]), 35)
    status, seen = judged_tiles(part, 16, 16, 2)
    assert torch.equal(status, judged_tiles(whole, 16, 16)[0][1:, 2:])
    assert torch.equal(seen, matrix(part).any(2).any(1, keepdim=True))


def test_ends_of_intervals_that_tensors_hold_and_keys_that_nobody_sees():
    """Documents in any order of ids, joined with sinks: several intervals a row, some rows with none."""
    mask = (tw.documents(IDS[:66]) & tw.key_range(torch.tensor(3), 40)) | tw.key_range(0, torch.tensor([2, 0]))
    assert check(mask, 66, 66, (16, 8)) == {EMPTY, PARTIAL, FULL}


@pytest.mark.parametrize("name", [n for n in INTERVALS if n not in ("everything", "narrow-window", "causal")])
def test_ends_of_rows_and_columns_are_those_of_the_expressions(name):
    grid = grid_of(INTERVALS[name](33, 130), 33, 130)
    for lines, by_columns in ((torch.arange(33), False), (torch.arange(0, 130, 3), True)):
        expected = grid.query_interval(lines) if by_columns else grid.key_interval(lines)
        for x, y in zip(ends_of_lines(grid, lines, by_columns), expected, strict=True):
            assert x.dtype == torch.int64
            assert torch.equal(*torch.broadcast_tensors(x, y))


@pytest.mark.parametrize("shape", [(1,), (300,), (2, 1500), (1, 2100)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_runs_of_equal_ids_are_those_that_operations_find(shape, dtype):
    """Runs within a block, over several and of all places, the first id equal to the last, ids with steps between them."""
    chance = torch.rand(*shape, 2, generator=torch.Generator().manual_seed(shape[-1]))[..., 0]
    for ids in (
        (chance > 0.5).int(),
        (chance > 0.999).cumsum(-1),
        torch.zeros(shape),
        torch.arange(shape[-1]).expand(shape) // 700,
    ):
        ids = ids.to(dtype).repeat_interleave(3, -1)[..., ::3]
        making = tile_map.runs((ids.shape, ids.stride(), ids.dtype), ids.device)
        found = making((ids,), ids.device)
        for x, y in zip(found, catalogue._ends_of_documents(ids), strict=True):
            assert torch.equal(x, y)


def test_blocks_on_which_the_predicate_is_the_same_are_asked_once(monkeypatch):
    """One row of pairs stands for all rows of its block: the program holds one row, not 32."""
    held = []
    launch = tile_map.MaskLaunch.__call__
    monkeypatch.setattr(
        tile_map.MaskLaunch, "__call__", lambda self, tensors: held.append(self.facts.block_m) or launch(self, tensors)
    )
    check(tw.block_sparse(torch.eye(3).bool(), 32, 8), 70, 24, (32, 24))
    assert held == [1]


def test_tensors_of_all_shapes_that_broadcast_are_judged_by_one_kernel():
    shapes = [(33, 50), (HEADS, 33, 50), (2, 1, 33, 50), (1, HEADS, 33, 50), (2, HEADS, 33, 50)]
    grids = [grid_of(tw.dense(torch.ones(shape, dtype=torch.bool)), 33, 50) for shape in shapes]
    launches = [(tile_map._judging(Kind.of(grid), (16, 16), 2, 8192), grid.leaves) for grid in grids]
    kinds = {(runtime.kind_of((leaves, *launch.numbers)), launch.facts) for launch, leaves in launches}
    assert len(kinds) == 1


def test_plans_of_a_gpu_are_made_by_the_kernel(monkeypatch):
    """The tiles of both passes, the keys that are seen and the lists that are prepared all come from it."""
    asked = []

    def by_kernel(grid, tile_m, tile_n, group=None):
        asked.append((tile_m, tile_n, group))
        return judged_tiles(grid, tile_m, tile_n, group) if grid.region.prepared is None else None

    monkeypatch.setattr(tiles, "_by_kernel", by_kernel)
    mask = tw.keep(lambda b, h, i, j: (i + j) % 5 > 2) & tw.causal()
    grid = grid_of(mask, 70, 70)
    true = true_status(matrix(grid), 32, 48)
    assert torch.equal(tiles.TileMap.build(grid, 32, 48).status.expand(true.shape), true)
    assert torch.equal(tiles.seen_keys(grid, 2).expand(2, 2, 70), matrix(grid).any(2).unflatten(1, (2, 2)).any(2))
    prepared = mask.prepare(torch.empty(2, 70, HEADS, 8), torch.empty(2, 70, 2, 8))
    again = grid_of(prepared, 70, 70)
    assert torch.equal(tiles.seen_keys(again, 2).expand(2, 2, 70), matrix(grid).any(2).unflatten(1, (2, 2)).any(2))
    assert asked[:3] == [(32, 48, None), (128, 128, 2), (64, 64, 1)]


def test_attention_over_judged_tiles_agrees_with_the_oracle(monkeypatch):
    """Two intervals a row whose ends fall, rows without a key between others, a tensor in the predicate, and NaN in
    keys that no query sees."""
    monkeypatch.setattr(tiles, "_by_kernel", judged_tiles)
    reach = torch.tensor([30] * 20 + [0] * 5 + [9] * 16)
    mask = tw.keep(lambda b, h, i, j: ((j < reach[i] - i) & (j > 3)) | ((j > 40) & (j < 47) & (i < 9)))
    q, k, v = qkv(batch=1, nq=41, nk=50, hq=2, hk=1, d=16, dv=16)
    unseen = ~matrix(grid_of(mask, 41, 50)).any(2).flatten(0, 1).any(0)
    assert 8 < int(unseen.sum()) < 50
    for x in (k, v):
        x.data[:, unseen] = torch.nan
    agree(Triton(Config(*[Tiles(16, 16, 4, 1)] * 3)), call(q, k, v, mask=mask))


@pytest.mark.parametrize("by_columns", [False, True], ids=["rows", "columns"])
def test_lists_of_tiles_are_those_of_planning(by_columns):
    """Lines with more tiles than a program looks at at once, and lines that visit nothing."""
    status = torch.randint(0, 3, (2, 3, 5, 300), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    status[0, 0, 1], status[0, 0, :, 7] = EMPTY, EMPTY
    blocks, counts = tile_map.listed_tiles(status, by_columns)
    expected, expected_counts = tiles.TileMap(status, 64, 64).visits(by_columns)
    assert torch.equal(counts, expected_counts)
    listed = torch.arange(blocks.shape[-1]) < counts[..., 1:]
    assert torch.equal(blocks[listed], expected[listed])
    empty = blocks[counts[..., 1] == 0]
    assert len(empty)
    assert not bool(empty[:, 0].any())  # a line's first place always holds a tile


@pytest.mark.parametrize("count", [1, 5, 16, 130])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_entries_come_in_order(count, dtype):
    entries = torch.randint(-4, 90, (2, count, 3, 2), generator=torch.Generator().manual_seed(count)).to(dtype)
    entries[0, 0] = torch.iinfo(dtype).max if dtype == torch.int32 else 1 << 40
    for x in (entries.transpose(1, 3), entries.permute(0, 2, 3, 1), entries[:1].expand(2, -1, -1, -1).transpose(1, 3)):
        making = tile_map.sorted_entries((x.shape, x.stride(), x.dtype), x.device)
        wanted = torch.where(
            x == -1, expr.NO_ENTRY, torch.where(x < -1, expr.WRONG_ENTRY, x.clamp(max=expr.WRONG_ENTRY - 1))
        )
        expected = wanted.int().sort(-1).values
        assert torch.equal(*catalogue._sorted_rows(x), expected)
        found = making((x,), x.device)
        assert found.is_contiguous()
        assert found.dtype == torch.int32
        assert torch.equal(found, expected)
