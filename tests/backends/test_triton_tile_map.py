"""Tiles of a mask by a kernel: the state of each is what its pairs say, and the keys that are seen are found."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the package triton is not installed")

import tilewise as tw
from tests.test_tiles import HEADS, IDS, MONOTONE, grid_of, masks, matrix, true_status
from tilewise import tiles
from tilewise.backends.triton import interpreting, judged_tiles
from tilewise.backends.triton.host import tile_map
from tilewise.masks import Mask
from tilewise.tiles import EMPTY, FULL, PARTIAL, Grid

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


@pytest.mark.parametrize("name", MONOTONE)
def test_a_predicate_that_rises_or_falls_is_judged_as_its_pairs_say(name):
    check(MONOTONE[name][0](130), 33, 130, (24, 48))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.tuples(*[st.sampled_from([1, 31, 65])] * 2).flatmap(lambda n: st.tuples(masks(*n), st.just(n))))
def test_any_composition_is_judged_as_its_pairs_say(drawn):
    mask, (nq, nk) = drawn
    if grid_of(mask, nq, nk).region.predicate is not None:
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


def test_blocks_on_which_the_predicate_is_the_same_are_asked_once(monkeypatch):
    """One row of pairs stands for all rows of its block: the program holds one row, not 32."""
    held = []
    launch = tile_map._launch
    monkeypatch.setattr(tile_map, "_launch", lambda *given: held.append(given[-1].block_m) or launch(*given))
    check(tw.block_sparse(torch.eye(3).bool(), 32, 8), 70, 24, (32, 24))
    assert held == [1]


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
    assert asked[:3] == [(32, 48, None), (64, 64, 2), (64, 64, 1)]
