"""The context study: every run reads the same bytes, and the held-out loss counts each byte once."""

import json
import time
from dataclasses import replace

import pytest
import torch

from examples import report
from examples.gpt import context
from examples.gpt.train import batches


def test_a_reader_sees_rows_of_its_context_and_nothing_before():
    reader = context.Reader(8, "tilewise")
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    whole, halves = reader(tokens), [reader(half) for half in tokens.split(8, dim=1)]
    assert torch.equal(whole, torch.cat(halves, dim=1))


def test_the_long_part_reads_the_same_bytes_at_every_context():
    config = replace(context.LONG, steps=1, context=32)
    tokens, targets = next(batches(bytes(range(200)), config))
    assert tokens.shape == (1, 32)
    assert torch.equal(targets, tokens + 1)
    assert all(context.TOKENS % c == 0 for c in context.CONTEXTS)
    assert context.LONG.batch_size * context.LONG.context == context.SHORT.batch_size * context.SHORT.context


class Counts(torch.nn.Module):
    """Is sure that the next byte is one more."""

    def forward(self, tokens):
        return 50.0 * torch.nn.functional.one_hot((tokens + 1) % 256, 256)


def test_the_held_out_loss_counts_every_byte_once_at_its_position():
    assert context.evaluate(Counts(), bytes(range(101)), 10).max() < 1e-6
    wrong = bytearray(range(101))
    wrong[57] = 0  # the target of position 6 in the sixth row, and the token before the next
    losses = context.evaluate(Counts(), bytes(wrong), 10)
    assert losses.nonzero().flatten().tolist() != []
    assert torch.equal((losses > 1).nonzero().flatten(), torch.tensor([6, 7]))
    torch.testing.assert_close(losses[6:8], torch.full((2,), 50.0 / 10, dtype=torch.float64))


def test_means_by_position_average_to_the_whole():
    by_position = torch.rand(1024, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = context.means(by_position)
    assert list(found) == ["0-64", "64-256", "256-512", "512-1024"]
    widths = [64, 192, 256, 512]
    whole = sum(width * mean for width, mean in zip(widths, found.values(), strict=True)) / 1024
    assert whole == pytest.approx(by_position.mean().item())


def test_a_stopped_run_goes_on_with_the_same_losses(tmp_path):
    config = replace(context.LONG, steps=3, context=64, warmup_steps=1)
    whole = context.Run(tmp_path / "whole.pt", 16, config).go_on(float("inf"))
    for _ in range(3):
        part = context.Run(tmp_path / "parts.pt", 16, config).go_on(time.perf_counter())
    assert part.finished
    assert [loss for loss, _ in part.history] == [loss for loss, _ in whole.history]
    begun = context.Run(tmp_path / "begun.pt", 32, config, begin=whole.model.state_dict())
    assert torch.equal(begun.model.gpt.embedding.weight, whole.model.gpt.embedding.weight)


def step(name, at, mib):
    row = {"attention": name, "context": at, "threads": 2}
    return row | ({"seconds": at / 1000, "peak_bytes": mib << 20} if mib else {"failed": "no memory"})


def test_what_a_failed_step_would_need_is_on_the_line_through_the_two_before():
    steps = [step("standard", at, mib) for at, mib in ((512, 300), (1024, 500), (4096, 1700), (16384, None))]
    record = {"steps": steps}
    assert report.memory(record, steps[1]) == "500"
    assert report.memory(record, steps[3]) == "stops: 6,500 needed"
