"""Tiles: what is called empty is empty, what is called full is full, and the keys that nobody sees are found."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tilewise as tw
from tilewise.masks import Mask, region
from tilewise.masks.facts import monotone_terms
from tilewise.planning import tiles
from tilewise.planning.tiles import EMPTY, FULL, PARTIAL, Grid, SeenKeys, TileMap, seen_keys

BATCH, HEADS = 2, 4
GENERATOR = torch.Generator().manual_seed(0)


def grid_of(mask: Mask, nq: int, nk: int) -> Grid:
    return Grid.whole(region(mask.text, tuple(range(len(mask.leaves)))), mask.leaves, (BATCH, HEADS, nq, nk), "cpu")


def matrix(grid: Grid) -> Tensor:
    """Pair by pair: bool (batch, heads, nq, keys)."""
    kept = grid.kept(torch.arange(grid.seqlen_q), torch.arange(grid.keys))
    shape = (len(grid.b), len(grid.h), grid.seqlen_q, grid.keys)
    return torch.ones(shape).bool() if kept is None else kept.expand(shape)


def true_status(kept: Tensor, tile_m: int, tile_n: int) -> Tensor:
    """Tile by tile, from the matrix."""
    batch, heads, nq, nk = kept.shape
    status = torch.full((batch, heads, -(-nq // tile_m), -(-nk // tile_n)), PARTIAL, dtype=torch.uint8)
    for m in range(status.shape[2]):
        for n in range(status.shape[3]):
            tile = kept[:, :, m * tile_m : (m + 1) * tile_m, n * tile_n : (n + 1) * tile_n].flatten(2)
            status[:, :, m, n] = torch.where(tile.all(-1), FULL, torch.where(tile.any(-1), PARTIAL, EMPTY))
    return status


def assert_sound(got: Tensor, true: Tensor) -> None:
    """Empty and full are claims; partial is none."""
    got = got.expand(true.shape)
    assert not bool(((got == EMPTY) & (true != EMPTY)).any())
    assert not bool(((got == FULL) & (true != FULL)).any())


def per_batch(*values: int) -> Tensor:
    return torch.tensor(values)


def entries(rows: int, keys: int, count: int) -> Tensor:
    """Entries for :func:`tw.selected`, some of them -1 and some twice."""
    return torch.randint(-1, keys, (BATCH, 1, rows, count), generator=GENERATOR)


INTERVALS = {
    "everything": lambda nq, nk: tw.window(),
    "causal": lambda nq, nk: tw.causal(),
    "window": lambda nq, nk: tw.window(9, 4),
    "narrow-window": lambda nq, nk: tw.window(0, 0),
    "causal-window": lambda nq, nk: tw.causal() & tw.window(left=20),
    "prefix": lambda nq, nk: tw.prefix(per_batch(17, 0)),
    "key-lengths": lambda nq, nk: tw.key_lengths(per_batch(nk - 3, 7)),
    "key-range-causal": lambda nq, nk: tw.key_range(5, nk - 6) & tw.causal(),
    "key-range-empty": lambda nq, nk: tw.key_range(per_batch(9, 3), 5),
    "documents": lambda nq, nk: tw.documents((torch.arange(nk) * 5) // nk) & tw.causal(),
}
PREDICATES = {
    "keep": lambda nq, nk: tw.keep(lambda b, h, i, j: (i * j + h) % 7 > b),
    "keep-blocks": lambda nq, nk: tw.keep(lambda b, h, i, j: (i // 8 + j // 12) % 2 == 0),
    "keep-queries": lambda nq, nk: tw.keep(lambda b, h, i, j: i % 5 != 0),
    "keep-keys": lambda nq, nk: tw.keep(lambda b, h, i, j: j // 10 % 2 == b),
    "keep-heads": lambda nq, nk: tw.keep(lambda b, h, i, j: h % 2 == 0),
    "keep-float-blocks": lambda nq, nk: tw.keep(lambda b, h, i, j: (j // 2.5) == 1),
    "keep-half-blocks": lambda nq, nk: tw.keep(lambda b, h, i, j: (i // 0.5) < 10),
    "keep-negative-blocks": lambda nq, nk: tw.keep(lambda b, h, i, j: (j // -2) == -1),
    "keep-mixed-granularity": lambda nq, nk: tw.keep(lambda b, h, i, j: (i // 8 == j // 8) | (i // 12 == j // 6)),
    "keep-i-and-its-block": lambda nq, nk: tw.keep(lambda b, h, i, j: (i // 16 > 1) & (i != 40)),
    "keep-shifted-blocks": lambda nq, nk: tw.keep(lambda b, h, i, j: ((i + tw.offset) // 16) == (j // 16)),
    "block-sparse": lambda nq, nk: tw.block_sparse(torch.rand(BATCH, HEADS, 12, 12, generator=GENERATOR) < 0.3, 16, 16),
    "block-sparse-causal": lambda nq, nk: tw.block_sparse(tw.butterfly(16), 10, 12) & tw.causal(),
    "dense-sparse": lambda nq, nk: tw.dense(torch.rand(1, HEADS, nq, nk, generator=GENERATOR) < 0.002),
    "union": lambda nq, nk: (tw.window(3, 0) | tw.key_range(0, 2)) & tw.causal(),
    "selected": lambda nq, nk: tw.selected(entries(nq, nk, 3)),
    "selected-causal": lambda nq, nk: tw.selected(entries(nq, nk, 5)) & tw.causal(),
    "selected-blocks": lambda nq, nk: tw.selected(entries(-(-nq // 8), -(-nk // 16), 2), 16, 8),
    "selected-odd-blocks": lambda nq, nk: tw.selected(entries(-(-nq // 3), -(-nk // 10), 2), 10, 3) | tw.window(4, 0),
    "selected-or-keep": lambda nq, nk: (
        tw.selected(entries(nq, nk, 2)) | tw.keep(lambda b, h, i, j: (i * j + h) % 7 > 5)
    ),
    "selected-and-selected": lambda nq, nk: (
        tw.selected(entries(nq, nk, 9)) & tw.selected(entries(nq, -(-nk // 20), 2), 20)
    ),
    "union-of-ranges": lambda nq, nk: tw.key_range(0, 8) | tw.key_range(40, 60),
}
LENGTHS = {"square": (70, 70), "more-keys": (33, 130), "more-queries": (130, 47), "one-query": (1, 100)}
TILES = {"16x16": (16, 16), "48x80": (48, 80), "8x176": (8, 176), "13x7": (13, 7)}


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", [*INTERVALS, *PREDICATES])
def test_empty_tiles_are_empty_and_full_tiles_are_full(name, lengths, tile):
    grid = grid_of((INTERVALS | PREDICATES)[name](*lengths), *lengths)
    true = true_status(matrix(grid), *tile)
    for by_columns in (False, True):
        assert_sound(TileMap.build(grid, *tile, by_columns).status, true)


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", INTERVALS)
def test_intervals_find_every_full_tile_in_both_forms(name, lengths, tile):
    grid = grid_of(INTERVALS[name](*lengths), *lengths)
    full = true_status(matrix(grid), *tile) == FULL
    for by_columns in (False, True):
        assert torch.equal((TileMap.build(grid, *tile, by_columns).status == FULL).expand(full.shape), full)


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("name", ["causal", "window", "causal-window", "key-lengths", "documents"])
def test_empty_is_exact_where_neighbouring_rows_touch(name, tile):
    grid = grid_of(INTERVALS[name](70, 70), 70, 70)
    empty = true_status(matrix(grid), *tile) == EMPTY
    assert torch.equal((TileMap.build(grid, *tile).status == EMPTY).expand(empty.shape), empty)


@pytest.mark.parametrize("name", [n for n in PREDICATES if n.startswith(("keep", "dense")) or n == "block-sparse"])
def test_a_predicate_without_an_interval_is_judged_exactly(name):
    grid = grid_of(PREDICATES[name](70, 70), 70, 70)
    assert all(end is None for end in grid.region.ends)
    true = true_status(matrix(grid), 16, 24)
    assert torch.equal(TileMap.build(grid, 16, 24).status.expand(true.shape), true)


@st.composite
def masks(draw, nq: int, nk: int) -> Mask:
    table = INTERVALS | PREDICATES
    mask = table[draw(st.sampled_from(sorted(table)))](nq, nk)
    for _ in range(draw(st.integers(0, 2))):
        other = table[draw(st.sampled_from(sorted(table)))](nq, nk)
        mask = mask & other if draw(st.booleans()) else mask | other
    return mask


sizes = st.sampled_from([1, 5, 16, 31, 64, 65, 100])
tile_sizes = st.sampled_from([7, 16, 48, 64, 80])  # brute force takes a second on tiles of 1


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.tuples(sizes, sizes).flatmap(lambda n: st.tuples(masks(*n), st.just(n))), tile_sizes, tile_sizes)
def test_any_composition_has_a_sound_tile_map(drawn, tile_m, tile_n):
    mask, (nq, nk) = drawn
    grid = grid_of(mask, nq, nk)
    kept = matrix(grid)
    seen = seen_keys(grid, 2)
    expected = kept.any(2).unflatten(1, (HEADS // 2, 2)).any(2)
    assert torch.equal(torch.ones_like(expected) if seen is None else seen.expand(expected.shape), expected)
    true = true_status(kept, tile_m, tile_n)
    for by_columns in (False, True):
        assert_sound(TileMap.build(grid, tile_m, tile_n, by_columns).status, true)


# -- Prepared ------------------------------------------------------------------------------------------------------


def prepared(mask: Mask, nq: int, nk: int) -> Grid:
    return grid_of(mask.prepare(torch.zeros(BATCH, nq, HEADS, 1), torch.zeros(BATCH, nk, HEADS // 2, 1)), nq, nk)


@pytest.mark.parametrize("tile", [(48, 80), (80, 48), (176, 176), (64, 128), (16, 24)], ids=lambda t: f"{t[0]}x{t[1]}")
@pytest.mark.parametrize("name", PREDICATES)
def test_prepared_lists_are_sound_on_tiles_that_do_not_match_theirs(name, tile):
    mask = (
        PREDICATES[name](150, 333)
        if name != "block-sparse"
        else tw.block_sparse(torch.rand(10, 21, generator=GENERATOR) < 0.3, 16, 16)
    )
    grid = prepared(mask, 150, 333)
    assert grid.region.prepared is not None
    assert_sound(TileMap.build(grid, *tile).status, true_status(matrix(grid), *tile))


@pytest.mark.parametrize("name", PREDICATES)
def test_prepared_lists_are_exact_on_their_own_blocks(name):
    mask = PREDICATES[name](130, 150)
    own, fresh = TileMap.build(prepared(mask, 130, 150), 64, 64), TileMap.build(grid_of(mask, 130, 150), 64, 64)
    assert torch.equal(own.status, fresh.status)


@pytest.mark.parametrize("name", [*INTERVALS, *PREDICATES])
def test_prepared_masks_remember_the_keys_that_are_seen(name):
    mask = (INTERVALS | PREDICATES)[name](70, 100)
    got, fresh = seen_keys(prepared(mask, 70, 100), 2), seen_keys(grid_of(mask, 70, 100), 2)
    everything = torch.ones(1, 1, 100).bool()
    shape = (BATCH, HEADS // 2, 100)
    assert torch.equal(*[(everything if x is None else x).expand(shape) for x in (got, fresh)])


def test_a_part_of_batch_and_heads_reads_its_own_prepared_lists():
    mask = tw.keep(lambda b, h, i, j: (i // 64 + j // 64 + b + h) % 3 == 0)
    whole = prepared(mask, 130, 200)
    part = Grid(whole.region, whole.leaves, 130, 200, torch.tensor([1]), torch.tensor([2, 3]), 200)
    expected = TileMap.build(whole, 64, 64).status[1:, 2:]
    assert torch.equal(TileMap.build(part, 64, 64).status, expected)
    assert torch.equal(seen_keys(part, 2), seen_keys(whole, 2)[1:, 1:])


# -- Seen keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", [*INTERVALS, *PREDICATES])
def test_seen_keys_are_those_that_some_query_of_the_group_sees(name, lengths, group):
    grid = grid_of((INTERVALS | PREDICATES)[name](*lengths), *lengths)
    expected = matrix(grid).any(2).unflatten(1, (HEADS // group, group)).any(2)
    got = seen_keys(grid, group)
    assert torch.equal(torch.ones_like(expected) if got is None else got.expand(expected.shape), expected)


def test_without_a_mask_all_keys_are_seen():
    assert seen_keys(grid_of(Mask(""), 5, 5), 2) is None


@pytest.mark.parametrize("seen_shape", [(1, 1), (2, 1), (2, 3), (1, 3)], ids=str)
@pytest.mark.parametrize("columns", [37, 40, 128])
@pytest.mark.parametrize("first", [0, 3])
def test_rows_of_keys_that_nobody_sees_become_zeros(seen_shape, columns, first):
    x = torch.randn(2, 3, 70, columns + 8).transpose(1, 2)[..., first : first + columns].bfloat16()
    seen = torch.rand(*seen_shape, 70, generator=torch.Generator().manual_seed(1)) < 0.6
    x.masked_fill_(~seen.mT.unsqueeze(-1), torch.nan)
    odd = torch.frombuffer(bytearray(4096), dtype=torch.bfloat16, offset=2)[3 : 3 + 2 * 70 * 3 * 4].view(2, 70, 3, 4)
    for rows in (x, x.contiguous(), x.float(), x.half()[..., :-1], odd):
        found = SeenKeys.of(seen).zeroed(rows)
        assert found.is_contiguous()
        assert torch.equal(found, torch.where(seen.mT.unsqueeze(-1), rows, 0))


# -- Split keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*INTERVALS, *PREDICATES])
def test_chunks_of_keys_have_the_tiles_and_seen_keys_of_their_columns(name):
    nq, nk, chunk = 9, 96, 32
    whole = grid_of((INTERVALS | PREDICATES)[name](nq, nk), nq, nk)
    origin = torch.arange(0, nk, chunk)
    grid = Grid(whole.region, whole.leaves, nq, nk, whole.b.repeat_interleave(3), whole.h, chunk, origin.repeat(BATCH))
    kept = matrix(grid)
    expected = matrix(whole).unflatten(-1, (3, chunk)).movedim(3, 1).flatten(0, 1)
    assert torch.equal(kept, expected)
    for by_columns in (False, True):
        assert_sound(TileMap.build(grid, 4, 16, by_columns).status, true_status(kept, 4, 16))
    seen = seen_keys(grid, 2)
    expected = kept.any(2).unflatten(1, (2, 2)).any(2)
    assert torch.equal(torch.ones_like(expected) if seen is None else seen.expand(expected.shape), expected)


# -- How it is found -----------------------------------------------------------------------------------------------


def count_evaluated(monkeypatch, grid: Grid, tile: int) -> int:
    """Pairs that TileMap.build evaluates the predicate on."""
    counted, evaluate = [], Grid.evaluate

    def counting(self, e, i=None, j=None):
        value = evaluate(self, e, i, j)
        if e is self.region.predicate:
            counted.append(len(i) * len(j))
        return value

    monkeypatch.setattr(Grid, "evaluate", counting)
    TileMap.build(grid, tile, tile)
    return sum(counted)


def test_a_predicate_that_is_constant_on_blocks_is_evaluated_once_a_block(monkeypatch):
    grid = grid_of(tw.block_sparse(torch.eye(32).bool(), 32, 32), 1024, 1024)
    assert count_evaluated(monkeypatch, grid, 64) == 32 * 32


def test_any_other_predicate_is_evaluated_once_a_pair(monkeypatch):
    grid = grid_of(tw.keep(lambda b, h, i, j: (i * j) % 3 == 0), 200, 300)
    assert count_evaluated(monkeypatch, grid, 64) == 200 * 300


IDS = torch.tensor([0] * 20 + [1] * 3 + [2] * 57)
MONOTONE = {
    "block-causal": (lambda nk: tw.keep(lambda b, h, i, j: (i + tw.offset) // 16 >= j // 16), 1),
    "by-batch": (lambda nk: tw.keep(lambda b, h, i, j: j < 30 * b + h) & tw.window(40, 3), 1),
    "floats": (lambda nk: tw.keep(lambda b, h, i, j: 0.3 * i - 5 > j / 2.0), 1),
    "bounded": (lambda nk: tw.keep(lambda b, h, i, j: ~(torch.clamp(i - 40, -3, 20) > 2 * j)), 1),
    "sinks-and-window": (lambda nk: tw.causal() & tw.keep(lambda b, h, i, j: (j < 4) | (i + tw.offset - j < 9)), 2),
    "hole": (lambda nk: tw.keep(lambda b, h, i, j: (j < i - 20) | (j > i + 7)), 2),
    "union": (lambda nk: (tw.window(9, 0) & tw.key_range(5, 60)) | tw.key_range(0, 2), 4),
    "causal-or-documents": (lambda nk: tw.causal() | tw.documents(IDS.repeat(2)[:nk]), 3),
}  # the mask, and how many conditions its predicate has


@pytest.mark.parametrize("lengths", [(80, 80), (33, 130), (130, 47)], ids=["square", "more-keys", "more-queries"])
@pytest.mark.parametrize("name", MONOTONE)
def test_a_predicate_that_rises_or_falls_is_evaluated_at_corners_of_tiles(name, lengths, monkeypatch):
    mask, conditions = MONOTONE[name]
    grid = grid_of(mask(lengths[1]), *lengths)
    assert sum(map(len, monotone_terms(grid.region))) == conditions
    kept = matrix(grid)
    true = true_status(kept, 16, 24)
    assert_sound(TileMap.build(grid, 16, 24).status, true)
    seen = kept.any(2).unflatten(1, (2, 2)).any(2)
    assert torch.equal(seen_keys(grid, 2).expand(seen.shape), seen)
    monkeypatch.setattr(tiles, "_CHUNK_ELEMENTS", None)  # of what is evaluated pair by pair
    TileMap.build(grid, 16, 24)


def test_one_condition_tells_every_tile_exactly():
    grid = grid_of(MONOTONE["block-causal"][0](130), 90, 130)
    true = true_status(matrix(grid), 16, 24)
    assert torch.equal(TileMap.build(grid, 16, 24).status.expand(true.shape), true)


LISTED = tw.block_sparse(torch.rand(BATCH, 1, 6, 6, generator=torch.Generator().manual_seed(3)) < 0.5, 16, 24)
FULL_ONES = tw.block_sparse(torch.eye(6).bool(), 16, 24)
ODD = tw.keep(lambda b, h, i, j: (i * j + h) % 3 > 0)
IN_PART = {  # masks of which parts tell some tiles, and these parts alone
    "listed": (LISTED & ODD, LISTED, None),
    "listed-or-full": ((LISTED | FULL_ONES) & (ODD | FULL_ONES), LISTED | FULL_ONES, FULL_ONES),
    "causal": (tw.keep(lambda b, h, i, j: (i + tw.offset >= j) & ((i * j) % 3 > 0)), tw.causal(), None),
    "none": (ODD, tw.window(), None),
}


@pytest.mark.parametrize("lengths", [(96, 144), (90, 131), (0, 144), (96, 0)])
@pytest.mark.parametrize("name", IN_PART)
def test_parts_of_a_predicate_tell_tiles_without_a_question_to_the_others(name, lengths, monkeypatch):
    mask, most, least = IN_PART[name]
    grid = grid_of(mask, *lengths)
    asked, evaluate = [], Grid.evaluate

    def counting(self, e, i=None, j=None):
        asked.append(len(i) * len(j))
        return evaluate(self, e, i, j)

    monkeypatch.setattr(Grid, "evaluate", counting)
    found = tiles.known_status(grid, 16, 24)
    assert not any(n > 36 for n in asked)  # of blocks and corners, not of pairs
    monkeypatch.undo()
    true = true_status(matrix(grid), 16, 24)
    assert_sound(found, true)
    told = torch.full_like(true, PARTIAL)
    told[true_status(matrix(grid_of(most, *lengths)), 16, 24) == EMPTY] = EMPTY
    if least is not None:
        told[true_status(matrix(grid_of(least, *lengths)), 16, 24) == FULL] = FULL
    assert torch.equal(found.expand(true.shape), told)


TABLE = torch.arange(200).flip(0)


@pytest.mark.parametrize(
    "predicate",
    [
        lambda b, h, i, j: (i - j).abs() < 9,
        lambda b, h, i, j: (i * j) % 3 == 0,
        lambda b, h, i, j: i == j,
        lambda b, h, i, j: i * j < 50,
        lambda b, h, i, j: TABLE[i] > j,
        lambda b, h, i, j: i // -2 > j - 40,
        lambda b, h, i, j: (i + j) * (1 << 62) * 2 < 3,  # wraps around
        lambda b, h, i, j: torch.where(i > 20, j, -j) < 5,
        lambda b, h, i, j: torch.where(i > 20, j - 40, 3) < 5,
        lambda b, h, i, j: (i > 3) ^ (j > 3),
        lambda b, h, i, j: i * math.inf > j,
    ],
    ids=["abs", "mod", "eq", "product", "tensor", "negative", "wraps", "where", "where-below", "xor", "nan"],
)
def test_a_predicate_that_may_turn_back_has_no_monotone_terms(predicate):
    grid = grid_of(tw.keep(predicate), 60, 70)
    assert monotone_terms(grid.region) is None
    true = true_status(matrix(grid), 16, 24)
    assert torch.equal(TileMap.build(grid, 16, 24).status.expand(true.shape), true)


def test_row_chunks_join_to_the_same_map(monkeypatch):
    mask = tw.keep(lambda b, h, i, j: (i * j + h) % 7 > b) & tw.causal()
    grid = grid_of(mask, 200, 150)
    whole = tiles._predicate_status(grid, 16, 16)
    monkeypatch.setattr(tiles, "_CHUNK_ELEMENTS", 1)
    for x, y in zip(tiles._predicate_status(grid, 16, 16), whole, strict=True):
        assert torch.equal(x, y)


# -- Lists ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_visits_hold_the_tiles_of_each_line_in_increasing_order(transposed):
    mask = (tw.window(30, 30) & tw.keep(lambda b, h, i, j: (i // 16 + j // 16 + h) % 4 != b)) | tw.key_range(0, 20)
    tile_map = TileMap.build(grid_of(mask, 100, 130), 16, 16)
    status = tile_map.status.mT if transposed else tile_map.status
    order, counts = tile_map.visits(transposed)
    assert (order.dtype, counts.dtype) == (torch.int32, torch.int32)
    assert order.is_contiguous()  # as kernels read it
    assert counts.is_contiguous()
    for b, h, line in [(b, h, line) for b in range(BATCH) for h in range(HEADS) for line in range(status.shape[2])]:
        partial, full = ((status[b, h, line] == what).nonzero().flatten().tolist() for what in (PARTIAL, FULL))
        assert counts[b, h, line].tolist() == [len(partial), len(partial) + len(full)]
        assert order[b, h, line, : len(partial) + len(full)].tolist() == partial + full
    assert bool(counts[..., 0].any())
    assert bool((counts[..., 1] > counts[..., 0]).any())


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=["no-queries", "no-keys", "nothing"])
@pytest.mark.parametrize("name", ["causal", "keep", "union", "block-sparse"])
def test_no_pairs_have_no_tiles_to_visit(name, lengths):
    grid = grid_of((INTERVALS | PREDICATES)[name](*lengths), *lengths)
    for by_columns in (False, True):
        tile_map = TileMap.build(grid, 16, 16, by_columns)
        assert tile_map.status.shape[2:] == (-(-lengths[0] // 16), -(-lengths[1] // 16))
        assert not bool(tile_map.status.any())
    seen = seen_keys(grid, 2)
    assert seen.shape[-1] == lengths[1]
    assert not bool(seen.any())
