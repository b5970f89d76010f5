"""The curves are the counts: each sweep's points against the claim that its figure makes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.papers import bounds
from tilewise_papers import plots
from tilewise_papers.devices import device
from tilewise_papers.report import Setting

SETTING = Setting(seqlen=512, head_dim=32, heads=2, batch=1, device=device("a100"))


def line(axes, n: int = 0) -> np.ndarray:
    return np.asarray(axes.lines[n].get_ydata(), dtype=float)


def test_a_sweep_is_saved_under_its_name(tmp_path: Path):
    path = plots.save("block", SETTING, tmp_path / "new")
    assert path == tmp_path / "new" / "io-block.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_an_unknown_sweep_lists_the_known_ones(tmp_path: Path):
    with pytest.raises(ValueError, match="unknown sweep 'moon'; known are block, sparsity, seqlen, sram"):
        plots.save("moon", SETTING, tmp_path)


def test_block_sweep_draws_the_forward_traffic_of_each_block_size():
    *_, axes = plots.block_sweep(SETTING).axes
    drawn = [bar.get_height() for bar in axes.patches]
    sizes = bounds.Sizes(512, 512, 32, 32)
    exact = [bounds.flash1_forward(sizes, 64, cols) for cols in (64, 128, 256, 512)]
    assert drawn == pytest.approx([2 * (x.reads.bytes(2) + x.writes.bytes(2)) / 1e9 for x in exact])


def test_sparsity_sweep_is_a_straight_line_that_ends_at_all_blocks():
    """Proposition 4: N d + s · N² d² / M."""
    traffic, time = plots.sparsity_sweep(SETTING, seqlen=1024).axes
    shares, values = np.asarray(traffic.lines[0].get_xdata(), dtype=float), line(traffic)
    slope = (values[-1] - values[0]) / (shares[-1] - shares[0])
    np.testing.assert_allclose(values, values[-1] - slope * (shares[-1] - shares), rtol=1e-9)
    assert values[0] < 0.3 * values[-1]
    assert values[-1] == pytest.approx(line(traffic, 1)[0])
    assert line(time)[0] < 0.3 * line(time, 1)[0]


def test_seqlen_sweep_grows_with_n_for_flash_attention_and_n_squared_for_standard():
    memory, traffic = plots.seqlen_sweep(SETTING, longest=1024).axes
    standard, flash = line(memory, 0), line(memory, 1)
    assert flash[-1] / flash[0] == pytest.approx(4, rel=0.01)
    assert standard[-1] / standard[0] > 12
    assert all(line(traffic, 0) > line(traffic, 1))


def test_sram_sweep_falls_to_the_least_traffic():
    (axes,) = plots.sram_sweep(SETTING).axes
    by_label = {one.get_label(): np.asarray(one.get_ydata(), dtype=float) for one in axes.lines}
    flash2 = by_label["FlashAttention-2"]
    assert all(a >= b for a, b in pairwise(flash2))
    least = by_label["Q, K, V read and O written once"][0]
    assert least <= flash2[-1] <= 1.05 * least  # the rest is lse
    assert flash2[0] > 2 * least
