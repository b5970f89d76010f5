"""Rows of K and V as the ranks send them, and the sum of what several ranks give to one row.

A message is a line of numbers: K of its rows, then V. All that a rank sends is one line, and each rank's K and V lie in one piece there, so
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
Rows = tuple[slice, Tensor, Tensor]
"""Some rows, with what belongs to them of K and of V ``(batch, rows, heads, dim)``."""


def width(k: Tensor, v: Tensor) -> int:
    """Numbers of K and V in a row."""
    return sum(x.shape[0] * x.shape[2] * x.shape[3] for x in (k, v))


def packed(messages: Sequence[Sequence[Run]], k: Tensor, v: Tensor) -> Tensor:
    """A message after the other, each with runs of the rows of K and V ``(batch, rows, heads, dim)``."""
    parts = [_line(x.narrow(1, *run)) for runs in messages for x in (k, v) for run in runs]
    return torch.cat(parts) if parts else k.new_empty(0)


def unpacked(line: Tensor, lengths: Sequence[int], k: Tensor, v: Tensor) -> list[list[Tensor]]:
    """K and V of each message, shaped otherwise as ``k`` and ``v``, from a line of messages of so many rows each."""
    sizes = [n * x.shape[0] * x.shape[2] * x.shape[3] for n in lengths for x in (k, v)]
    found = [_rows(part, x) for part, x in zip(line.split(sizes), (k, v) * len(lengths), strict=True)]
    return [found[n : n + 2] for n in range(0, len(found), 2)]


def given_to(runs: Sequence[Run], dk: Tensor, dv: Tensor) -> list[Rows]:
    """Runs of rows, each with its part of a message that holds the gradients of all of them."""
    found, at = [], 0
    for first, count in runs:
        found.append((slice(first, first + count), dk.narrow(1, at, count), dv.narrow(1, at, count)))
        at += count
    return found


def summed(k: Tensor, v: Tensor, parts: Sequence[Rows], dtype: torch.dtype, wide: torch.dtype) -> list[Tensor]:
    """The sums of gradients of some rows each, in order, in ``dtype``, shaped as ``k`` and ``v``.

    Rows of one part alone are copied; the others are summed in ``wide`` first, those of all runs at once.
    """
    cuts = _cuts(k.shape[1], tuple((rows.start, rows.stop) for rows, *_ in parts))

    def lines(number: int, first: int, count: int) -> list[Tensor]:
        rows, *both = parts[number]
        return [_line(x.narrow(1, first - rows.start, count)) for x in both]

    several, sums = [cut for cut in cuts if len(cut[2]) > 1], {}
    if several:
        firsts = [x for first, count, numbers in several for x in lines(numbers[0], first, count)]
        total = torch.cat(firsts).to(wide)
        targets = iter(total.split([len(x) for x in firsts]))
        for (first, count, numbers), *both in zip(several, targets, targets, strict=True):
            for number in numbers[1:]:
                for target, x in zip(both, lines(number, first, count), strict=True):
                    target += x
        found = unpacked(total.to(dtype), [count for _, count, _ in several], k, v)
        sums = {first: pair for (first, *_), pair in zip(several, found, strict=True)}
    pieces: list[list[Tensor]] = [[], []]
    for first, count, numbers in cuts:
        for m, like in enumerate((k, v)):
            if first in sums:
                piece = sums[first][m]
            elif numbers:
                rows, *both = parts[numbers[0]]
                piece = both[m].narrow(1, first - rows.start, count).to(dtype)
            else:
                piece = like.new_zeros((like.shape[0], count, *like.shape[2:]), dtype=dtype)
            pieces[m].append(piece)
    return [joined(found, x).to(dtype) for found, x in zip(pieces, (k, v), strict=True)]


def joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """Rows of several tensors as one; none: no rows."""
    return torch.cat(parts, 1) if parts else like[:, :0]


@lru_cache(maxsize=256)
def _cuts(length: int, rows: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Runs of rows that lie in the same ones of several intervals: the first row, how many, and the intervals' numbers."""
    ends = sorted({0, length, *[end for run in rows for end in run]})
    return tuple(
        (a, b - a, tuple(n for n, (start, stop) in enumerate(rows) if start <= a and b <= stop))
        for a, b in pairwise(ends)
    )


def _line(x: Tensor) -> Tensor:
    """The numbers of rows ``(batch, rows, heads, dim)``, row after row."""
    return (x if x.shape[0] == 1 else x.transpose(0, 1)).reshape(-1)


def _rows(line: Tensor, like: Tensor) -> Tensor:
    """The inverse of :func:`_line`."""
    batch, _, *row = like.shape
    rows = line.numel() // max(1, batch * row[0] * row[1])
    return line.view(1, rows, *row) if batch == 1 else line.view(rows, batch, *row).transpose(0, 1)
