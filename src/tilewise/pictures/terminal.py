"""A picture in a terminal: a cell of two characters a tile, or a cell for a square of tiles where there are many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewise.pictures.view import NAMES, ScoreView, View, centres
from tilewise.planning.tiles import EMPTY, FULL, PARTIAL

if TYPE_CHECKING:
    from rich.text import Text

CELLS = {FULL: ("██", "cyan"), PARTIAL: ("▒▒", "yellow"), EMPTY: ("··", "dim")}
SHADES = ("  ", "░░", "▒▒", "▓▓", "██")
MOST_LINES = 48
CURVE = (-100.0, -50.0, -10.0, 0.0, 10.0, 50.0, 100.0)


def coarsened(status: Tensor, most: tuple[int, int]) -> tuple[Tensor, int]:
    """Return ``(status, n)`` of squares of ``n x n`` tiles, as few as there is room for: full or skipped where all of its tiles are."""
    n = max(1, *[-(-size // room) for size, room in zip(status.shape, most, strict=True)])
    lines, columns = (-(-size // n) for size in status.shape)
    squares = torch.full((lines * n, columns * n), -1, dtype=torch.int16, device="cpu")
    squares[: status.shape[0], : status.shape[1]] = status
    squares = squares.unflatten(1, (columns, n)).unflatten(0, (lines, n)).transpose(1, 2).flatten(2)
    inside = squares >= 0
    full, empty = (((squares == what) | ~inside).all(-1) for what in (FULL, EMPTY))
    found = torch.full((lines, columns), PARTIAL, dtype=torch.uint8, device="cpu")
    return found.masked_fill(full, FULL).masked_fill(empty, EMPTY), n


def tiles_text(view: View, width: int) -> Text:
    """Return the tiles of a view in at most ``width`` characters a line, and what the cells mean."""
    from rich.text import Text

    status, n = coarsened(view.status, (MOST_LINES, max(1, width // 2)))
    drawn = Text()
    for line in status.tolist():
        for what in line:
            drawn.append(*CELLS[what])
        drawn.append("\n")
    for what, name in NAMES.items():
        drawn.append(*CELLS[what])
        drawn.append(f" {name}   ")
    drawn.append("a cell is a tile" if n == 1 else f"a cell is {n} x {n} tiles, full or skipped where all of them are")
    return drawn


def score_text(score: ScoreView, view: View, width: int) -> Text:
    """Return the score of s = 0 at each visited place, in shades; or of some s, if the position does not matter."""
    from rich.text import Text

    if not score.by_place:
        values = score.curve(torch.tensor(CURVE, device="cpu")).tolist()
        row = "   ".join(f"{s:g} → {value:.4g}" for s, value in zip(CURVE, values, strict=True))
        return Text(f"score {score.title}\ns → {row}")
    status, _ = coarsened(view.status, (MOST_LINES, max(1, width // 2)))
    i, j = (centres(n, cells) for n, cells in zip(view.lengths, status.shape, strict=True))
    values = score.places(i, j, view.lengths)
    shown = values[(status != EMPTY) & values.isfinite()]
    low, high = (shown.min().item(), shown.max().item()) if shown.numel() else (0.0, 0.0)
    levels = ((values - low) / max(high - low, 1e-30) * (len(SHADES) - 1)).round().nan_to_num(0, 0, 0)
    drawn = Text(f"score {score.title} at s = 0: from {low:.4g} (blank) to {high:.4g} (full)\n")
    for line, kept in zip(levels.clamp(0, len(SHADES) - 1).int().tolist(), status.tolist(), strict=True):
        for level, what in zip(line, kept, strict=True):
            drawn.append(*(CELLS[EMPTY] if what == EMPTY else (SHADES[level], "magenta")))
        drawn.append("\n")
    return drawn
