"""Tiles with bits: which pairs a kernel that reads lists, work and bits computes, held against the matrix of all pairs."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.planning.test_tiles import BATCH, HEADS, grid_of, matrix
from tilewise import device
from tilewise.masks import Mask
from tilewise.planning import bit_tiles, tiles
from tilewise.planning.bit_tiles import (
    ALONE,
    EVERYTHING,
    LINES,
    NOTHING,
    RESERVED,
    BitTiles,
    Layout,
    Sections,
    bits_bytes,
    most_partial,
)
from tilewise.planning.planner import Kind
from tilewise.planning.tiles import PARTIAL, Grid, TileMap

IDS = torch.tensor([0] * 130 + [7] + [2] * 70 + [1] * 199)


def chance(*shape: int) -> Tensor:
    """Numbers between 0 and 1, the same ones every time."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(3))


def entries(*shape: int, blocks: int) -> Tensor:
    """Entries of selections, some of them none, some twice."""
    return torch.randint(-1, blocks, shape, generator=torch.Generator().manual_seed(4))


MASKS = {
    "everything": lambda: tw.window(),
    "causal": lambda: tw.causal(),
    "keep": lambda: tw.keep(lambda b, h, i, j: (i * j + h) % 7 > b),
    "keep-causal": lambda: tw.keep(lambda b, h, i, j: (j // 90) % 2 == 0) & tw.causal(),
    "block-causal": lambda: tw.keep(lambda b, h, i, j: i // 64 >= j // 64),
    "sinks-and-window": lambda: tw.causal() & (tw.window(left=70) | tw.key_range(0, 4)),
    "causal-or-documents": lambda: tw.causal() | tw.documents(IDS),
    "aligned": lambda: tw.block_sparse(chance(BATCH, 1, 4, 4) < 0.5, 128, 128),
    "odd-blocks": lambda: tw.block_sparse(chance(1, HEADS, 11, 17) < 0.3, 38, 23),
    "dense": lambda: tw.dense(chance(1, 1, 390, 390) < 0.001),
    "descending": lambda: tw.keep(lambda b, h, i, j: (j < 300 - i) | ((j > 380 - i // 2) & (i % 3 > 0))),
    "nothing": lambda: tw.keep(lambda b, h, i, j: (i < 0) & (j >= 0)),
    "selected": lambda: tw.causal() & tw.selected(entries(1, HEADS, 390, 9, blocks=390)),
    "selected-blocks": lambda: tw.selected(entries(BATCH, 1, 4, 2, blocks=7), 64, 128) | tw.window(left=70),
    "selected-tiles": lambda: tw.selected(entries(BATCH, 1, 4, 2, blocks=4), 128, 128),
    "selected-wide": lambda: tw.causal() & tw.selected(entries(1, HEADS, 390, 2, blocks=4), 128),
    "selected-halves": lambda: tw.causal() & tw.selected(entries(BATCH, 1, 7, 2, blocks=7), 64, 64),
    "selected-odd": lambda: tw.selected(entries(1, HEADS, 390, 2, blocks=12), 33),
    "head-pairs": lambda: tw.causal() & tw.keep(lambda b, h, i, j: (i // 64 + h // 2 + j // 64) % 3 > b),
}
LENGTHS = [(390, 390), (256, 384), (130, 70)]


def pairs_of(tiles: BitTiles, grid: Grid, crossing: int, by_columns: bool) -> Tensor:
    """The pairs that a kernel computes: bool (b|1, h|1, lines, crossing lines), whole tiles."""
    blocks, work = tiles.blocks, tiles.work
    kept = torch.zeros(*work.shape[:2], work.shape[2] * LINES, blocks.shape[3] * crossing, dtype=torch.bool)
    thread, n = torch.arange(256).view(-1, 1), torch.arange(crossing // 2)
    quarter = crossing // 4
    rows, columns = bit_tiles.line_of(thread, n // quarter), bit_tiles.crossing_of(thread, n % quarter)
    for b in range(work.shape[0]):
        for h in range(work.shape[1]):
            assert sorted(work[b, h, :, 0].tolist()) == list(range(work.shape[2]))
            for line, (_, partial, count, first) in enumerate(work[b, h].tolist()):
                assert by_columns or 1 <= partial <= count
                for step in range(count):
                    at = int(blocks[b, h, line, step])
                    if at == blocks.shape[3]:  # past the last tile: of a line that visits none
                        assert first == NOTHING
                        continue
                    tile = torch.ones(LINES, crossing, dtype=torch.bool)
                    if step < partial:
                        words = tiles.bits[first + step].long() & 0xFFFFFFFF
                        bits = words.unsqueeze(-1) >> torch.arange(32) & 1
                        tile[rows, columns] = bits.flatten(1).bool()
                    there = kept[b, h, line * LINES : (line + 1) * LINES, at * crossing : (at + 1) * crossing]
                    assert not there.any()
                    there |= tile
    return kept


def check(
    name: str, lengths: tuple[int, int], crossing: int, by_columns: bool, tiles: BitTiles | None = None
) -> BitTiles:
    grid = grid_of(MASKS[name](), *lengths)
    tiles = tiles or BitTiles.build(grid, crossing, by_columns)
    found, kept = pairs_of(tiles, grid, crossing, by_columns), matrix(grid)
    found = (found.mT if by_columns else found)[..., : lengths[0], :]
    assert not found[..., lengths[1] :].any()  # keys past the last one
    assert torch.equal(found[..., : lengths[1]].expand(kept.shape), kept)
    return tiles


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lists_work_and_bits_give_the_pairs_of_the_mask(name, lengths):
    check(name, lengths, 128, False)


@pytest.mark.parametrize(
    "name", ["keep-causal", "causal-or-documents", "odd-blocks", "nothing", "selected", "selected-blocks"]
)
@pytest.mark.parametrize("crossing", [64, 128])
def test_by_columns_too(name, crossing):
    check(name, (390, 330), crossing, True)


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="the package triton is not installed")
@pytest.mark.parametrize(
    ("name", "crossing", "by_columns"),
    [
        ("keep", 128, False),
        ("odd-blocks", 64, True),
        ("causal-or-documents", 128, True),
        ("dense", 64, False),
        ("selected", 128, False),
        ("selected-blocks", 64, True),
        ("selected-wide", 128, False),
        ("selected-wide", 64, True),
        ("selected-wide", 128, True),
        ("selected-halves", 128, False),
        ("selected-halves", 64, True),
        ("head-pairs", 64, False),
        ("head-pairs", 128, True),
    ],
)
@pytest.mark.parametrize("programs", [1, 8192])  # one for all tiles of a line, or one for each
def test_kernels_write_the_same_lists_bits_and_sections(name, crossing, by_columns, programs, monkeypatch):
    from tilewise.backends.triton import interpreting
    from tilewise.backends.triton.host import tile_map

    if not interpreting():
        pytest.skip("kernels are not interpreted (tests/conftest.py)")
    monkeypatch.setattr(tile_map, "PROGRAMS", programs)
    lengths = (200, 150)
    grid = grid_of(MASKS[name](), *lengths)
    sections = Sections(BATCH * HEADS * 4, 2, 6, HEADS // 2)
    shape = BATCH, HEADS, *lengths
    layout = Layout.of(grid.region, shape, crossing, by_columns, grid.leaves, sections.group, HEADS // 2)
    making = tile_map.all_of_bits(Kind.of(grid), layout, crossing, by_columns, sections, HEADS // 2)
    memory = making(grid.leaves, grid.b.device)
    kept, seen = layout.tiles(memory), layout.seen_in(memory)
    expected = matrix(grid).any(2).unflatten(1, (-1, HEADS // 2)).any(2)
    assert torch.equal(seen.expand_as(expected), expected)
    built = BitTiles.build(grid, crossing, by_columns, sections, HEADS // 2)
    assert torch.equal(layout.seen_in(built.memory), seen)
    monkeypatch.setattr(tiles, "_by_kernel", tile_map.judged_tiles)  # whose states are exact
    expected = BitTiles.build(grid, crossing, by_columns, sections)
    assert torch.equal(kept.work, expected.work)
    assert torch.equal(kept.section, expected.section)
    assert torch.equal(kept.bits[: EVERYTHING + 1], expected.bits[: EVERYTHING + 1])
    check(name, lengths, crossing, by_columns, kept)


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="the package triton is not installed")
def test_kept_launches_get_the_addresses_of_the_tensors_that_the_first_ones_got(monkeypatch):
    from tilewise.backends.triton import interpreting
    from tilewise.backends.triton.host import runtime, tile_map

    if not interpreting():
        pytest.skip("kernels are not interpreted (tests/conftest.py)")
    grids = [grid_of(tw.causal() & tw.documents(torch.arange(300) // n), 300, 300) for n in (70, 40)]
    layout, seen = Layout.of(grids[0].region, (BATCH, HEADS, 300, 300), 128), []
    making = tile_map.all_of_bits(Kind.of(grids[0]), layout, 128, False, ALONE, 0)
    shared = torch.empty(4096, dtype=torch.uint8), torch.arange(8)
    monkeypatch.setattr(device, "workspace", lambda *_: shared[0])
    monkeypatch.setattr(device, "indices", lambda *_: shared[1])
    monkeypatch.setattr(
        runtime, "start", lambda kernel, grid, tiles, tensors, *rest: seen.append(tensors) or "compiled"
    )
    monkeypatch.setattr(runtime, "run_each", lambda launches: seen.extend(arguments[0] for *_, arguments in launches))
    memories = [making(grid.leaves, grid.b.device) for grid in grids]

    def places(tensors: tuple, memory: torch.Tensor, leaves: tuple) -> tuple:
        """Where each tensor lies: of which memory, and at which byte there."""
        found = []
        for x in tensors:
            if x is None or isinstance(x, tuple):
                found.append(x and places(x, memory, leaves))
                continue
            address = x if isinstance(x, int) else x.data_ptr()
            inside = [0 <= address - m.data_ptr() < m.nbytes for m in (memory, *shared, *leaves)]
            found.append((inside.index(True), address - (memory, *shared, *leaves)[inside.index(True)].data_ptr()))
        return tuple(found)

    of_each = [[places(x, memories[n], grids[n].leaves) for x in seen[4 * n : 4 * n + 4]] for n in range(2)]
    assert len(seen) == 8
    assert of_each[0] == of_each[1]
    assert [len(set(x[:-1]) - {None}) for x in of_each[0]] == [2, 6, 6, 4]


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_heads_that_see_the_same_pairs_have_one_set_of_bits(group, by_columns):
    check("head-pairs", (390, 330), 128, by_columns)
    grid, sections = grid_of(MASKS["head-pairs"](), 390, 330), Sections(BATCH * HEADS // group, 1, 6, group)
    one, each = (BitTiles.build(x, 128, by_columns, sections) for x in (grid, replace(grid, all_heads=False)))
    assert one.work.shape == each.work.shape
    assert torch.equal(one.work[..., 1:3], each.work[..., 1:3])
    assert len(one.bits) - RESERVED == (len(each.bits) - RESERVED) // 2
    assert torch.equal(one.section, each.section)
    kept = matrix(grid).any(2)
    for heads in (1, 2, 4):
        assert torch.equal(tiles.seen_keys(grid, heads), kept.unflatten(1, (-1, heads)).any(2))


def test_longest_lines_come_first_and_empty_ones_visit_a_tile_of_no_pair():
    lower = check("block-causal", (390, 390), 128, False).work[0, 0]
    assert lower[:, 0].tolist() == [3, 2, 1, 0]
    assert lower[:, 2].tolist() == [1, 2, 3, 4]
    empty = check("nothing", (130, 70), 128, False).work[0, 0]
    assert empty[:, 1:].tolist() == [[1, 1, NOTHING]] * 2


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    ("tile", "by_columns"), [((128, 128), False), ((64, 128), True), ((16, 24), False), ((24, 16), True)]
)
def test_partial_tiles_are_no_more_than_the_bound(name, tile, by_columns):
    """For tiles of any size, as a bound that is off by a few shows with small ones."""
    grid = grid_of(MASKS[name](), 390, 390)
    lines = tile[::-1] if by_columns else tile
    counts = [-(-390 // n) for n in lines]
    tile_map = TileMap.build(grid, *tile, by_columns)
    tile_map.status[..., -1:].clamp_(max=PARTIAL)
    found = (tile_map.status == PARTIAL).sum((-1, -2)).max()
    assert found <= most_partial(grid.region, *counts, lines, by_columns, grid.leaves)


def test_the_bytes_of_bits_are_known_from_the_mask_and_the_shapes_of_its_tensors():
    def most(mask: Mask, n: int) -> float:
        grid = grid_of(mask, 8, 8)
        return bits_bytes(grid.region, (2, 16, n, n), 128, leaves=grid.leaves) / 2**20

    pattern = torch.ones(1024, 1024).bool()
    assert most(tw.block_sparse(pattern, 128, 128), 131072) < 3
    assert most(tw.keep(lambda b, h, i, j: i // 1024 >= j // 1024), 131072) < 8
    assert most(tw.causal() | tw.documents(IDS), 131072) < 26
    blocks = tw.selected(entries(1, 1, 131072 // 128, 16, blocks=2048), 64, 128)
    assert most(blocks, 131072) < 68
    assert most(tw.causal() & blocks, 131072) < 68
    assert most(tw.causal() & (blocks | tw.window(left=127)), 131072) < 75
    assert most(tw.keep(lambda b, h, i, j: (i + j) % 2 == 0), 32768) == pytest.approx(128, abs=1)
    assert most(tw.keep(lambda b, h, i, j: (i + j + h) % 2 == 0), 32768) > bit_tiles.BUDGET / 2**20
