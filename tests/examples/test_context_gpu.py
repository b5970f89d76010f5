"""The study of contexts for a GPU, at a size for a CPU: every run begins from the same weights and reads the same bytes."""

import time
from dataclasses import replace

import pytest

from bench import records
from examples.gpt import context_gpu
from examples.gpt.model import GPTConfig


@pytest.fixture
def small(monkeypatch):
    sizes = GPTConfig(layers=1, d_model=16, heads_q=1, heads_k=1, d_hidden=16, context=32)
    short = replace(context_gpu.SHORT, steps=2, context=32, batch_size=4, warmup_steps=1)
    long = replace(context_gpu.LONG, steps=2, context=64, batch_size=2, warmup_steps=1)
    for name, value in {"CONTEXTS": (32, 64), "SIZES": sizes, "SHORT": short, "LONG": long, "HELD_OUT": 512}.items():
        monkeypatch.setattr(context_gpu, name, value)
    monkeypatch.setattr(context_gpu, "POSITIONS", (0, 16, 32, 64))
    monkeypatch.setattr(context_gpu, "texts", lambda: (bytes(range(200)) * 40, bytes(range(200)) * 3))


def test_a_study_has_a_loss_for_each_context_and_each_part_of_the_row_and_can_be_drawn(small, tmp_path):
    path = tmp_path / "study.jsonl"
    records.append(context_gpu.study("cpu", time.perf_counter() + 60), path)
    head, found = context_gpu.found(path)
    assert head["training"]["held_out_bytes"] == 512
    assert [r["shape"]["context"] for r in found] == [32, 64]
    assert [list(r["by_position"]) for r in found] == [["0-16", "16-32"], ["0-16", "16-32", "32-64"]]
    parts = found[1]["by_position"]
    whole = (parts["0-16"] + parts["16-32"] + 2 * parts["32-64"]) / 4
    assert found[1]["value"] == pytest.approx(whole)
    context_gpu.draw(path, tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size > 10_000


def test_the_contexts_share_one_piece_of_text():
    assert all(context_gpu.LONG.context % context == 0 for context in context_gpu.CONTEXTS)
    assert context_gpu.SIZES.context == context_gpu.SHORT.context == context_gpu.CONTEXTS[0]
    assert context_gpu.POSITIONS[-1] == context_gpu.LONGEST == context_gpu.LONG.context
