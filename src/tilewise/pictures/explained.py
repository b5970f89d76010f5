"""``explain(...).plot()``: the tiles that the chosen backend's forward visits for a call, with what ``explain`` says below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewise.pictures.figure import draw
from tilewise.pictures.view import ScoreView, View
from tilewise.planning.tiles import Grid
from tilewise.problem import Problem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TILE = (128, 128)  # where no backend says how large its tiles are


def plot(
    problem: Problem, extras: Sequence[Tensor], tile: tuple[int, int] | None, said: str, at: tuple[int, int]
) -> Figure:
    """Return the figure of a problem's batch element (a sequence, where they are packed) and query head ``at``.

    Args:
        extras: the tensors of the call, by slot. tile: queries and keys of a tile. said: what stands below.

    Raises:
        ValueError: there is no such batch element or head.
        NotImplementedError: a part of a larger attention, or a call over ranks, whose tensors lie elsewhere.
    """
    batch, head = at
    for name, n, size in (("batch", batch, problem.batch), ("head", head, problem.heads_q)):
        if not 0 <= n < size:
            raise ValueError(f"{name} {n} is out of range: the call has {size}")
    if problem.spec.piece is not None or len(extras) != len(problem.extras):
        raise NotImplementedError(
            "a part of an attention over ranks has no picture; draw the whole call's, without parallel="
        )
    leaves = [x.detach().cpu() for x in extras]
    lengths = _lengths(problem, leaves, batch)
    b, h = (torch.tensor([n], device="cpu") for n in at)
    grid = Grid(problem.spec.region, leaves, *lengths, b, h, lengths[1])
    view = View.of(problem.spec.mask_text or "every pair", grid, tile or TILE)
    score = problem.spec.score
    shown = None if score is None else ScoreView(problem.spec.score_text, score, leaves, at)
    notes = view.summary(problem.head_dim, problem.dtype.itemsize, 0 if shown is None else shown.pair_bytes)
    return draw(view, shown, (*notes, *said.splitlines()))


def _lengths(problem: Problem, extras: Sequence[Tensor], batch: int) -> tuple[int, int]:
    """Return the queries and keys of a batch element; packed or in pages, the call's own tensors say how many."""
    queries, keys = problem.seqlen_q, problem.seqlen_k
    ends = [extras[slot] for slot in problem.spec.cu_slots]
    if ends:
        queries = int(ends[0][batch + 1] - ends[0][batch])
        keys = int(ends[-1][batch + 1] - ends[-1][batch])
    if problem.paged:
        keys = int(extras[problem.spec.page_slots[1]][batch])
    return queries, keys
