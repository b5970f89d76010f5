"""Counted = formula, exactly; and the orders of growth that the papers prove."""

from __future__ import annotations

import numpy as np
import pytest

from tests.papers import bounds
from tests.papers.bounds import Exact, Sizes
from tests.papers.cases import CASES, WORD, Case, machine
from tilewise_papers import flash1, flash2, nested, split, standard, warps
from tilewise_papers.head import Blocks, Head
from tilewise_papers.machine import Counts, Level, Machine


def sizes(case: Case) -> Sizes:
    return Sizes(case.seqlen_q, case.seqlen_k, case.head_dim, case.head_dim_v, case.causal, case.dropout)


def same_traffic(counts: Counts, exact: Exact, boundary: int = 0) -> None:
    counted = counts.boundaries[boundary]
    assert (counted.reads, counted.writes) == (exact.reads.elements, exact.writes.elements)
    assert (counted.read_bytes, counted.write_bytes) == (exact.reads.bytes(WORD), exact.writes.bytes(WORD))


def same(counts: Counts, exact: Exact) -> None:
    same_traffic(counts, exact)
    assert counts.matmul_flops == exact.matmul_flops
    assert counts.other_flops == exact.other_flops


def both_ways(run, levels: int = 2) -> list[Counts]:
    """The counts of a program that computes and of one that only counts."""
    found = []
    for dry in (False, True):
        m = machine(levels, dry=dry)
        run(m)
        found.append(m.counts)
    assert found[0] == found[1]
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_standard_attention_moves_what_its_loops_say(case: Case, fused: bool):
    head, blocks = case.head(), case.blocks
    out = standard.forward(machine(), head, blocks, fused=fused)
    for training in (True, False):
        counts = both_ways(lambda m: standard.forward(m, head, blocks, fused=fused, training=training))  # noqa: B023
        same(counts[0], bounds.standard_forward(sizes(case), blocks.rows, fused=fused, training=training))
    counts = both_ways(lambda m: standard.backward(m, head, out, case.do(), blocks, fused=fused))
    same(counts[0], bounds.standard_backward(sizes(case), blocks.rows, fused=fused))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flash_attention_moves_what_its_loops_say(case: Case):
    head, blocks = case.head(), case.blocks
    out = flash1.forward(machine(), head, blocks)
    same(
        both_ways(lambda m: flash1.forward(m, head, blocks))[0],
        bounds.flash1_forward(sizes(case), blocks.rows, blocks.cols),
    )
    counts = both_ways(lambda m: flash1.backward(m, head, out, case.do(), blocks))
    same(counts[0], bounds.flash1_backward(sizes(case), blocks.rows, blocks.cols))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_block_sparse_attention_moves_what_its_pattern_says(case: Case):
    head, blocks = case.head(), case.blocks
    grid = -(-case.seqlen_q // blocks.rows), -(-case.seqlen_k // blocks.cols)
    pattern = np.random.default_rng(2).random(grid) < 0.5
    out = flash1.forward(machine(), head, blocks, pattern)
    counts = both_ways(lambda m: flash1.forward(m, head, blocks, pattern))
    same(counts[0], bounds.flash1_forward(sizes(case), blocks.rows, blocks.cols, pattern))
    counts = both_ways(lambda m: flash1.backward(m, head, out, case.do(), blocks, pattern))
    same(counts[0], bounds.flash1_backward(sizes(case), blocks.rows, blocks.cols, pattern))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flash_attention_2_moves_what_its_loops_say(case: Case):
    head, blocks = case.head(), case.blocks
    out = flash2.forward(machine(), head, blocks)
    same(
        both_ways(lambda m: flash2.forward(m, head, blocks))[0],
        bounds.flash2_forward(sizes(case), blocks.rows, blocks.cols),
    )
    counts = both_ways(lambda m: flash2.backward(m, head, out, case.do(), blocks))
    same(counts[0], bounds.flash2_backward(sizes(case), blocks.rows, blocks.cols))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("split_keys", [5, 24, 1000])
def test_split_keys_move_what_their_loops_say(case: Case, split_keys: int):
    counts = both_ways(lambda m: split.forward(m, case.head(), case.blocks, split_keys))
    same(counts[0], bounds.split_forward(sizes(case), case.blocks.rows, case.blocks.cols, split_keys))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("count", [1, 4])
def test_warps_move_what_the_figure_says_through_shared_memory(case: Case, count: int):
    rows, cols = case.blocks.rows, case.blocks.cols
    for program, formula in (
        (warps.split_queries, bounds.split_queries_shared),
        (warps.split_keys, bounds.split_keys_shared),
    ):
        counts, _ = both_ways(lambda m: program(m, case.head(), case.blocks, count), levels=3)  # noqa: B023
        same_traffic(counts, bounds.flash2_forward(sizes(case), rows, cols))
        same_traffic(counts, formula(sizes(case), rows, cols, count), boundary=1)


def test_split_queries_need_no_barrier_and_split_keys_two_for_each_key_tile():
    case, counts = CASES[0], {}
    for program in (warps.split_queries, warps.split_keys):
        m = machine(3)
        program(m, case.head(), case.blocks)
        counts[program.__name__] = m.counts.barriers
    assert counts == {"split_queries": 0, "split_keys": 2 * 4 * 4}


def test_split_queries_move_less_through_shared_memory_once_the_query_tile_is_larger_than_the_key_tile():
    """The exchange of split keys grows with the rows of the query tile, the extra reads of split queries with the keys."""
    sizes_ = Sizes(256, 256, 64, 64)
    moved = {}
    for rows, cols in ((128, 64), (64, 128)):
        for formula in (bounds.split_queries_shared, bounds.split_keys_shared):
            exact = formula(sizes_, rows, cols, 4)
            moved[formula.__name__, rows] = exact.reads.elements + exact.writes.elements
    assert moved["split_queries_shared", 128] < moved["split_keys_shared", 128] / 1.9
    assert moved["split_queries_shared", 64] > moved["split_keys_shared", 64]


@pytest.mark.parametrize("case", [c for c in CASES if not c.causal], ids=str)
@pytest.mark.parametrize("inner", [Blocks(4, 4), Blocks(5, 6), Blocks(64, 64)], ids=str)
def test_nested_tiles_move_what_their_loops_say_at_both_boundaries(case: Case, inner: Blocks):
    counts, _ = both_ways(lambda m: nested.forward(m, case.head(), [case.blocks, inner]), levels=3)
    outer = case.blocks
    same_traffic(counts, bounds.flash2_forward(sizes(case), outer.rows, outer.cols))
    formula = bounds.nested_inner(sizes(case), (outer.rows, outer.cols), (inner.rows, inner.cols))
    same_traffic(counts, formula, boundary=1)


def flash_accesses(n: int, d: int, sram: int) -> int:
    """Elements that FlashAttention moves, forward, with the paper's Br = Bc = M / 4d, counted on a roomy machine."""
    block = sram // (4 * d)
    m = Machine([Level("slow", 1e15), Level("sram", 1e15)], dry=True)
    flash1.forward(m, Head.blank(n, d), Blocks(block, block))
    return m.counts.slow.elements


# M from d² to N d / 4, where the order of Theorem 2 is about the passes over Q and O and not about reading K and V once.
@pytest.mark.parametrize(
    ("change", "ratio"),
    [({"sram": 2}, 1 / 2), ({"n": 2}, 4), ({"d": 2}, 4), ({"n": 2, "sram": 2}, 2)],
    ids=["M doubles", "N doubles", "d doubles", "N and M double"],
)
def test_flash_attention_grows_as_theorem_2_says(change: dict[str, int], ratio: float):
    base = {"n": 1024, "d": 32, "sram": 4096}
    new = {name: value * change.get(name, 1) for name, value in base.items()}
    order = bounds.flash_order(new["n"], new["d"], new["sram"]) / bounds.flash_order(*base.values())
    assert order == ratio
    assert flash_accesses(**new) / flash_accesses(**base) == pytest.approx(ratio, rel=0.1)


def test_standard_attention_grows_with_n_squared_and_not_with_m():
    def accesses(n: int, sram: int) -> int:
        m = Machine([Level("slow", 1e15), Level("sram", 1e15)], dry=True)
        standard.forward(m, Head.blank(n, 32), Blocks(sram // 64, 16))
        return m.counts.slow.elements

    base = accesses(512, 2**16)
    assert accesses(1024, 2**16) / base == pytest.approx(4, rel=0.1)
    assert accesses(512, 2**17) / base == pytest.approx(1, rel=0.1)
    assert base / bounds.standard_order(512, 32) == pytest.approx(4, rel=0.1)  # S and P, each written and read


def test_block_sparse_accesses_fall_with_the_share_of_blocks():
    def accesses(density: float) -> int:
        m = Machine([Level("slow", 1e15), Level("sram", 1e15)], dry=True)
        pattern = flash1.band_pattern(32, 32, density)
        assert pattern.mean() == pytest.approx(density, abs=0.05)
        flash1.forward(m, Head.blank(1024, 32), Blocks(32, 32), pattern)
        return m.counts.slow.elements

    full, half, quarter = (accesses(s) for s in (1.0, 0.5, 0.25))
    # Proposition 4: N d is left over when s goes to 0; it is small beside N² d² / M here.
    assert half / full == pytest.approx(0.5, abs=0.06)
    assert quarter / full == pytest.approx(0.25, abs=0.06)


def test_no_program_beats_reading_the_inputs_and_writing_the_output():
    """Proposition 3 at M = N d: everything fits, and then FlashAttention-2 moves exactly the least, plus lse."""
    n, d = 64, 16
    head = Head.blank(n, d)
    for program, blocks in (
        (flash2.forward, Blocks(n, n)),
        (flash1.forward, Blocks(n, n)),
        (standard.forward, Blocks(n, n)),
    ):
        m = machine(dry=True)
        program(m, head, blocks)
        assert m.counts.slow.elements >= bounds.least_traffic(n, d)
        if program is flash2.forward:
            assert m.counts.slow.elements == bounds.least_traffic(n, d) + n


def test_causal_flash_attention_2_leaves_out_half_of_the_work():
    counts = {}
    for causal in (False, True):
        m = machine(dry=True)
        flash2.forward(m, Head.blank(1024, 32, causal=causal), Blocks(32, 32))
        counts[causal] = m.counts
    assert counts[True].matmul_flops / counts[False].matmul_flops == (32 + 1) / (2 * 32)
    assert counts[True].slow.elements / counts[False].slow.elements == pytest.approx(0.5, abs=0.05)


def test_flash_attention_2_saves_three_operations_a_visit_and_output_number():
    """Algorithm 2 rescales O with four operations a number (l·, new·, add, divide), FlashAttention-2 with one."""
    n, d, block, counts = 512, 64, 64, []
    for program in (flash1.forward, flash2.forward):
        m = machine(dry=True)
        program(m, Head.blank(n, d), Blocks(block, block))
        counts.append(m.counts)
    row_visits = n * n // block
    assert counts[0].matmul_flops == counts[1].matmul_flops
    assert counts[0].other_flops - counts[1].other_flops == row_visits * (4 + 3 * d) - n * (d + 2)
