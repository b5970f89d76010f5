"""What ranks send each other of K and V arrives as it was, and gradients of shared rows are added up in order."""

from __future__ import annotations

import random

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import tilewise as tw
from bench.testing import normal
from tilewise.parallel.exchange import Silent
from tilewise.parallel.layout import Layout
from tilewise.parallel.messages import Place, Sum, Taken, line_of, shaped


def test_lines_are_put_together_of_any_pieces_of_others():
    lines = [torch.arange(10), torch.arange(100, 105), torch.arange(0)]
    wanted = [
        [
            Place(1, 3, 2),
            Place(0, 2, 3),
            Place(0, 5, 1),
            Place(0, 4, 4),
            Place(1, 0, 0),
        ],  # neighbours, and numbers twice
        [],
        [Place(0, 0, 4), Place(0, 4, 6)],
    ]
    found = Taken([10, 5, 0], wanted)(*lines)
    assert found[0].tolist() == [103, 104, 2, 3, 4, 5, 4, 5, 6, 7]
    assert found[1].tolist() == []
    assert found[2].tolist() == list(range(10))


def test_a_line_that_is_all_of_another_is_not_copied():
    line = torch.arange(10)
    (found,) = Taken([10], [[Place(0, 0, 4), Place(0, 4, 6)]])(line)
    assert found.data_ptr() == line.data_ptr()


def in_order(k, v, parts, dtype, wide) -> list[torch.Tensor]:
    """The sums by one addition after the other, rounded at the end, where rows have several parts."""
    found = []
    for m, like in enumerate((k, v)):
        total, seen = torch.zeros(like.shape, dtype=wide), torch.zeros(like.shape[1], dtype=torch.bool)
        for (first, count), *lines in parts:
            rows, came = slice(first, first + count), shaped(lines[m], like).to(wide)
            total[:, rows] = torch.where(seen[rows].view(1, -1, 1, 1), total[:, rows] + came, came)
            seen[rows] = True
        found.append(total.to(dtype))
    return found


def summed(k, v, parts, dtype, wide) -> list[torch.Tensor]:
    """The sums of gradients for rows, in the shapes of ``k`` and ``v``; ``parts`` are runs with their lines of K and of V."""
    widths = [x.shape[0] * x.shape[2] * x.shape[3] for x in (k, v)]
    given = [
        (Place(m, first * width, count * width), Place(2 * n + m, 0, count * width))
        for n, ((first, count), *_) in enumerate(parts)
        for m, width in enumerate(widths)
    ]
    lines = [line for _, *both in parts for line in both]
    results = [k.shape[1] * width for width in widths]
    found = Sum([line.numel() for line in lines], results, given)(lines, k, dtype, wide)
    return [shaped(line, x) for line, x in zip(found, (k, v), strict=True)]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_rows_of_several_parts_are_summed_in_order_in_wider_numbers(batch, seed):
    chance = random.Random(seed)
    k, v = normal(batch, 24, 2, 4, dtype=torch.bfloat16), normal(batch, 24, 2, 8, dtype=torch.bfloat16)
    parts = []
    for n in range(seed):
        first = chance.randrange(24)
        run, dtype = (first, chance.randrange(25 - first)), chance.choice([torch.bfloat16, torch.float32])
        like = [normal(batch, run[1], *x.shape[2:], dtype=dtype, seed=n + m) for m, x in enumerate((k, v))]
        parts.append((run, *map(line_of, like)))
    for dtype in (torch.bfloat16, torch.float32):
        found = summed(k, v, parts, dtype, torch.float32)
        for x, expected in zip(found, in_order(k, v, parts, dtype, torch.float32), strict=True):
            assert x.dtype == dtype
            assert torch.equal(x, expected)


def test_what_is_summed_stays_as_it_was_given():
    k, v = normal(1, 4, 1, 2), normal(1, 4, 1, 2, seed=1)
    parts = [((0, 4), line_of(k).clone(), line_of(v).clone()) for _ in range(2)]
    summed(k, v, parts, torch.float32, torch.float32)
    for _, of_k, of_v in parts:
        assert torch.equal(of_k, line_of(k))
        assert torch.equal(of_v, line_of(v))


def test_more_runs_of_rows_take_no_more_operations_than_their_views():
    """In short steps the host is what costs, and every operation costs it microseconds: a split of a line gives all of its views."""
    ranks, seqlen = 2, 512
    mask = tw.causal() & tw.documents(torch.arange(seqlen) // 100)

    def operations(runs: int) -> list[str]:
        length = seqlen // runs
        held = [tuple((n * length, (n + 1) * length) for n in range(rank, runs, ranks)) for rank in range(ranks)]
        parallel = tw.context_parallel(Silent(0, ranks), layout=Layout(tuple(held)), scheme="gather")
        *local, do = (normal(1, seqlen // ranks, 2, 16, seed=n).requires_grad_() for n in range(4))
        for _ in range(2):  # the first one makes the plan
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                torch.autograd.grad(tw.attention(*local, mask=mask, parallel=parallel), local, do)
        return sorted(e.name for e in seen.events() if e.name.startswith("aten::") and e.name != "aten::as_strided")

    few, many = operations(4), operations(32)
    assert "aten::cat" in few
    assert many == few
