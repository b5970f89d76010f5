"""What ranks send each other of K and V arrives as it was, and gradients of shared rows are added up in order."""

from __future__ import annotations

import pytest
import torch

from tilewise.parallel.messages import given_to, line_of, packed, shaped, summed, unpacked, widths
from tilewise.testing import normal


@pytest.mark.parametrize("batch", [1, 2])
def test_messages_hold_the_runs_of_rows_of_each_rank(batch):
    k, v = normal(batch, 9, 2, 3, seed=1), normal(batch, 9, 2, 5, seed=2)
    messages = [[(0, 2), (5, 3)], [], [(5, 4)]]
    line = packed(messages, k, v)
    found = unpacked(line, [5, 0, 4], k, v)
    for runs, pair in zip(messages, found, strict=True):
        for x, arrived in zip((k, v), pair, strict=True):
            assert torch.equal(shaped(arrived, x), torch.cat([x[:, :0], *[x[:, a : a + n] for a, n in runs]], 1))
    (first, *_), (second, _, of_v) = given_to(messages[0], *found[0], widths(k, v))
    assert [first, second] == messages[0]
    assert torch.equal(shaped(of_v, v), v[:, 5:8])
    assert packed([[], []], k, v).numel() == 0


@pytest.mark.parametrize("batch", [1, 2])
def test_rows_of_several_parts_are_summed_in_order_in_wider_numbers(batch):
    k, v = normal(batch, 12, 2, 4, dtype=torch.bfloat16), normal(batch, 12, 2, 8, dtype=torch.bfloat16)
    runs = [(2, 7), (0, 4), (3, 6), (10, 1)]
    parts = [
        (run, *(line_of(normal(batch, run[1], *x.shape[2:], dtype=torch.bfloat16, seed=n)) for x in (k, v)))
        for n, run in enumerate(runs)
    ]
    found = summed(k, v, parts, torch.bfloat16, torch.float32)
    for m, (x, like) in enumerate(zip(found, (k, v), strict=True)):
        total = torch.zeros(like.shape)
        for run, *lines in parts:
            total.narrow(1, *run).add_(shaped(lines[m], like))
        assert torch.equal(x, total.bfloat16())
    assert [x.dtype for x in summed(k, v, [], torch.float32, torch.float32)] == [torch.float32] * 2
    assert not torch.cat(summed(k, v, [], torch.float32, torch.float32), -1).any()
