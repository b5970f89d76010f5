"""The paper's blocks and the largest that fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilewise_papers import flash1
from tilewise_papers.blocks import largest, paper_blocks
from tilewise_papers.devices import device
from tilewise_papers.head import Blocks, Head
from tilewise_papers.machine import DoesNotFit
from tilewise_papers.report import FLASH, FLASH2, STANDARD, Setting, count, fitting_blocks

A100 = Setting(seqlen=1024, head_dim=64, heads=16, batch=64, device=device("a100"))


def test_paper_blocks_follow_line_1_of_algorithm_1():
    assert paper_blocks(98304, 64) == Blocks(rows=64, cols=384)
    assert paper_blocks(1000, 64) == Blocks(rows=4, cols=4)


@pytest.mark.parametrize("capacity", [1, 2, 3, 17, 64, 99, 100])
def test_largest_finds_the_last_size_that_fits(capacity: int):
    def probe(size: int) -> None:
        if size > capacity:
            raise DoesNotFit("no room")

    assert largest(probe, 100) == capacity


def test_largest_raises_when_nothing_fits():
    def probe(size: int) -> None:
        raise DoesNotFit("no room for 1")

    with pytest.raises(DoesNotFit, match="no room for 1"):
        largest(probe, 100)


@pytest.mark.parametrize("algorithm", [STANDARD, FLASH, FLASH2], ids=lambda a: a.name)
@pytest.mark.parametrize("sram", [16 * 1024, 192 * 1024])
def test_fitting_blocks_fit_and_one_more_row_or_column_does_not(algorithm, sram: int):
    setting = replace(A100, seqlen=4096, device=A100.device.with_sram(sram))
    forward, backward = fitting_blocks(algorithm, setting)
    count(algorithm, replace(setting, seqlen=512), (forward, backward))
    longer = algorithm.shapes[0](max(forward.rows, forward.cols) + 1, 64)
    with pytest.raises(DoesNotFit, match="bytes, but SRAM has"):
        algorithm.forward(setting.machine(), Head.blank(4096, 64), longer)
    longer = algorithm.shapes[1](max(backward.rows, backward.cols) + 1, 64)
    with pytest.raises(DoesNotFit, match="bytes, but SRAM has"):
        count(algorithm, setting, (forward, longer))


@pytest.mark.parametrize(("head_dim", "fits"), [(64, True), (128, False)])
def test_the_papers_forward_blocks_leave_room_for_the_scores_only_at_small_head_dims(head_dim: int, fits: bool):
    blocks = paper_blocks(A100.device.sram_elements, head_dim)
    m, head = A100.machine(), Head.blank(1024, head_dim)
    if fits:
        flash1.forward(m, head, blocks)
        assert m.counts.peak_bytes[1] <= 192 * 1024
    else:
        with pytest.raises(DoesNotFit, match="tile S"):
            flash1.forward(m, head, blocks)


def test_the_papers_backward_blocks_fill_sram_before_the_first_score():
    blocks = paper_blocks(A100.device.sram_elements, 64)
    with pytest.raises(DoesNotFit, match=r"held there: K 384×64 \(49,152 B\), V .*, dK .*, dV 384×64 \(49,152 B\)"):
        count(FLASH, A100, (blocks, blocks))
