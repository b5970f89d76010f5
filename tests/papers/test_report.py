"""Predictions from counts, and the table at the FlashAttention paper's setting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilewise_papers.devices import Device, device
from tilewise_papers.head import Blocks
from tilewise_papers.machine import Counts, Level, Traffic, Work
from tilewise_papers.report import (
    FLASH,
    FLASH2,
    FUSED,
    SEPARATE,
    STANDARD,
    Setting,
    best,
    count,
    forecast,
    inner_table,
    predict,
    sparse,
    table,
)

GPT2_MEDIUM = Setting(seqlen=1024, head_dim=64, heads=16, batch=64, device=device("a100"))
SMALL = replace(GPT2_MEDIUM, seqlen=256, batch=2)
TOY = Device(
    "toy",
    (Level("slow", 1e9, 10.0), Level("fast", 1e3, 100.0), Level("registers", 1e2)),
    cores=4,
    matmul_flops=1000.0,
    other_flops=50.0,
    word=2,
    source="made up",
)


def work(items: int = 4, **changes) -> Work:
    return replace(
        Work([Traffic(read_bytes=10, write_bytes=10)], items=items, matmul_flops=1000, other_flops=50), **changes
    )


@pytest.mark.parametrize(
    ("one", "binding", "seconds"),
    [
        (work(), "slow", 2.0),
        (work(matmul_flops=4000), "matmul", 4.0),
        (work(other_flops=500), "other", 10.0),
        (work(items=1), "matmul", 4.0),
        (work(items=5), "slow", 2.0),
        (work(items=5, matmul_flops=4000), "matmul", 4.0 * 8 / 5),
        (work(items=0, matmul_flops=4000), "matmul", 4.0),
        (work(boundaries=[Traffic(), Traffic(read_bytes=800)], items=2), "fast", 16.0),
    ],
    ids=[
        "memory",
        "products",
        "other",
        "one core of four",
        "2 waves",
        "2 waves, products",
        "outside launches",
        "fast level",
    ],
)
def test_the_slowest_limit_binds(one: Work, binding: str, seconds: float):
    found = predict(one, TOY)
    assert (found.binding, found.seconds) == (binding, pytest.approx(seconds))


def test_launches_run_one_after_the_other():
    counts = Counts({"a": work(), "b": work(matmul_flops=5000), "c": work()}, [0, 0])
    found = forecast(counts, TOY)
    assert found.seconds == pytest.approx(2.0 + 5.0 + 2.0)
    assert found.binding == "matmul"
    assert found.longest.seconds == pytest.approx(5.0)


def test_standard_attention_with_mask_and_dropout_makes_18_passes_over_n_by_n_and_12_over_n_by_d():
    row, n, d = best(SEPARATE, GPT2_MEDIUM), 1024, 64
    assert row.both.slow.bytes == 2 * (18 * n * n + 12 * n * d)
    assert row.both.slow.bytes * 1024 / 1e9 == pytest.approx(40.3, abs=0.05)  # as the paper's Figure 2 has it


def test_fusion_takes_six_of_the_18_passes_and_leaves_twelve():
    n, d = 1024, 64
    assert best(FUSED, GPT2_MEDIUM).both.slow.bytes == 2 * (12 * n * n + 12 * n * d)
    assert best(STANDARD, GPT2_MEDIUM).both.slow.bytes == 2 * (11 * n * n + 12 * n * d)


def test_flash_attention_computes_seven_products_for_six_and_moves_a_tenth():
    flash, standard = (best(a, GPT2_MEDIUM).both for a in (FLASH, SEPARATE))
    assert flash.matmul_flops / standard.matmul_flops == 7 / 6
    assert flash.slow.bytes < 0.15 * standard.slow.bytes


def test_memory_of_flash_attention_grows_with_n_and_of_standard_attention_with_n_squared():
    def growth(algorithm) -> float:
        small, large = (best(algorithm, replace(SMALL, seqlen=n)).both.peak_bytes[0] for n in (1024, 2048))
        return large / small

    assert growth(FLASH) == pytest.approx(2, rel=0.01)
    assert growth(FLASH2) == pytest.approx(2, rel=0.01)
    assert growth(SEPARATE) == pytest.approx(4, rel=0.1)


def test_every_row_of_the_table_keeps_to_the_sram_or_says_that_it_does_not():
    rows = table(SMALL)
    assert len({row.name for row in rows}) == len(rows) == 9
    for row in rows:
        peak = max(c.peak_bytes[1] for c in (row.forward, row.backward) if c)
        assert (peak <= SMALL.device.levels[1].bytes) == row.fits
    assert [row.name for row in rows if not row.fits] == ["FlashAttention, paper's Bc"]
    roomy = table(replace(SMALL, device=SMALL.device.with_sram(1024 * 1024)))
    assert all(row.fits for row in roomy)


def test_a_row_of_scores_longer_than_sram_is_counted_on_a_larger_one_and_marked():
    long = replace(SMALL, seqlen=4096, device=SMALL.device.with_sram(12 * 1024))
    assert [best(algorithm, long).fits for algorithm in (STANDARD, FLASH, FLASH2)] == [False, True, True]


def test_heads_that_run_together_count_as_often_as_heads_that_run_alone():
    """The multiplication by heads against two heads that really run one after the other on one machine."""
    row = count(FLASH2, SMALL, (Blocks(64, 64), Blocks(64, 64)))
    twice = row.forward + row.forward
    many = row.forward.of_heads(2)
    assert (twice.slow, twice.matmul_flops, twice.other_flops) == (many.slow, many.matmul_flops, many.other_flops)
    assert twice.launches["flash2 forward"].items == many.launches["flash2 forward"].items == 8


def test_block_sparsity_pays_in_proportion():
    blocks = (Blocks(16, 16), Blocks(16, 16))
    half, full = (count(sparse(s), SMALL, blocks).both for s in (0.5, 1.0))
    assert half.matmul_flops / full.matmul_flops == pytest.approx(0.5, abs=0.07)


def test_programs_inside_a_core_get_smaller_tiles_where_registers_are_few():
    assert inner_table(SMALL)[0] == Blocks(128, 64)
    blocks, rows = inner_table(replace(SMALL, device=device("cpu")))
    assert blocks.rows < 128
    assert all(row.forward.peak_bytes[2] <= device("cpu").levels[2].bytes for row in rows)


@pytest.mark.parametrize("name", ["seqlen", "head_dim", "heads", "batch"])
def test_sizes_below_one_are_refused_by_name(name: str):
    with pytest.raises(ValueError, match=f"{name} 0 is below 1"):
        replace(GPT2_MEDIUM, **{name: 0})
