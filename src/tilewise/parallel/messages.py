"""Rows of K and V as the ranks send them, and the sum of what several ranks give to one row.

Rows lie in *lines* here, their numbers one row after the other. All that a rank sends is one line: for each rank K of its rows, then V. So
a few copies put it together and take it apart, however many runs of rows it has: in short steps their launches are what costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

Run = tuple[int, int]
"""The first of some rows, and how many."""
Rows = tuple[Run, Tensor, Tensor]
"""Some rows, with the lines of what belongs to them of K and of V."""


def line_of(x: Tensor) -> Tensor:
    """The rows of a tensor ``(batch, rows, heads, dim)`` as a line."""
    return (x if x.shape[0] == 1 else x.transpose(0, 1)).reshape(-1)


def shaped(line: Tensor, like: Tensor) -> Tensor:
    """The rows of a line, shaped otherwise as ``like``: the inverse of :func:`line_of`."""
    batch, _, heads, dim = like.shape
    rows = len(line) // max(1, batch * heads * dim)
    return line.view(1, rows, heads, dim) if batch == 1 else line.view(rows, batch, heads, dim).transpose(0, 1)


def widths(k: Tensor, v: Tensor) -> tuple[int, int]:
    """Numbers in a row of K, and in one of V."""
    return k.shape[0] * k.shape[2] * k.shape[3], v.shape[0] * v.shape[2] * v.shape[3]


def run_of(line: Tensor, run: Run, width: int) -> Tensor:
    """A run of a line's rows."""
    return line.narrow(0, run[0] * width, run[1] * width)


def packed(messages: Sequence[Sequence[Run]], k: Tensor, v: Tensor) -> Tensor:
    """A message after the other, each with runs of the rows of K and V ``(batch, rows, heads, dim)``."""
    lines = list(zip((line_of(k), line_of(v)), widths(k, v), strict=True))
    parts = [run_of(line, run, width) for runs in messages for line, width in lines for run in runs]
    return torch.cat(parts) if parts else k.new_empty(0)


def unpacked(line: Tensor, lengths: Sequence[int], k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The lines of K and V of each message, from one line of messages of so many rows each."""
    found = line.split([n * width for n in lengths for width in widths(k, v)])
    return list(zip(found[::2], found[1::2], strict=True))


def given_to(runs: Sequence[Run], dk: Tensor, dv: Tensor, each: tuple[int, int]) -> list[Rows]:
    """Runs of rows, each with its part of a message that holds the gradients of all of them, in rows of so many numbers each."""
    found, at = [], 0
    for first, count in runs:
        both = run_of(dk, (at, count), each[0]), run_of(dv, (at, count), each[1])
        found.append(((first, count), *both))
        at += count
    return found


def summed(k: Tensor, v: Tensor, parts: Sequence[Rows], dtype: torch.dtype, wide: torch.dtype) -> list[Tensor]:
    """The sums of gradients of some rows each, in order, in ``dtype``, shaped as ``k`` and ``v``.

    Rows of one part alone are copied; the others are summed in ``wide`` first.
    """
    cuts, (row_k, row_v) = _cuts(k.shape[1], tuple(run for run, *_ in parts)), widths(k, v)
    several = [cut for cut in cuts if len(cut[1]) > 1]
    sums: dict[Run, tuple[Tensor, Tensor]] = {}

    def lines(number: int, run: Run) -> tuple[Tensor, Tensor]:
        (first, _), dk, dv = parts[number]
        first, count = run[0] - first, run[1]
        return dk.narrow(0, first * row_k, count * row_k), dv.narrow(0, first * row_v, count * row_v)

    if several:
        firsts = [line for run, numbers in several for line in lines(numbers[0], run)]
        total = torch.cat(firsts).to(wide)
        targets = iter(total.split([len(line) for line in firsts]))
        for run, numbers in several:
            sum_k, sum_v = next(targets), next(targets)
            for number in numbers[1:]:
                dk, dv = lines(number, run)
                sum_k += dk
                sum_v += dv
        found = unpacked(total.to(dtype), [count for (_, count), _ in several], k, v)
        sums = {run: pair for (run, _), pair in zip(several, found, strict=True)}
    pieces: list[tuple[Tensor, Tensor]] = []
    for run, numbers in cuts:
        if run in sums:
            pieces.append(sums[run])
        elif numbers:
            dk, dv = lines(numbers[0], run)
            pieces.append((dk.to(dtype), dv.to(dtype)))
        else:
            pieces.append((k.new_zeros(run[1] * row_k, dtype=dtype), k.new_zeros(run[1] * row_v, dtype=dtype)))
    if not pieces:
        return [x.new_empty(x.shape, dtype=dtype) for x in (k, v)]
    return [shaped(torch.cat(found), x) for found, x in zip(zip(*pieces, strict=True), (k, v), strict=True)]


@lru_cache(maxsize=256)
def _cuts(length: int, runs: tuple[Run, ...]) -> tuple[tuple[Run, tuple[int, ...]], ...]:
    """Runs of rows that lie in the same ones of several runs, each with their numbers."""
    ends = sorted({0, length, *[end for first, count in runs for end in (first, first + count)]})
    return tuple(
        ((a, b - a), tuple(n for n, (first, count) in enumerate(runs) if first <= a and b <= first + count))
        for a, b in pairwise(ends)
    )
