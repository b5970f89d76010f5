"""The context study: every run reads the same bytes, and the held-out loss counts each byte once."""

import time
from dataclasses import replace

import pytest
import torch

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


@pytest.mark.parametrize("at", [512, 1024, 16384])
def test_beyond_the_short_context_the_slowest_pair_turns_no_further(at):
    slowest = [base ** (-30 / 32) for base in (1e4, context.rotary_base(at, 32))]
    assert slowest[1] * at == pytest.approx(slowest[0] * context.SHORT.context)
    assert context.rotary_base(context.SHORT.context // 2, 32) == 1e4


def test_means_by_position_average_to_the_whole():
    by_position = torch.rand(1024, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = context.means(by_position)
    assert list(found) == ["0-64", "64-128", "128-256", "256-512", "512-1024"]
    widths = [64, 64, 128, 256, 512]
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
