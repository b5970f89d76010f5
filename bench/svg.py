"""A small picture as SVG text, the same to the last character wherever it is written: every pair, on the tiles that a kernel visits."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.pictures.view import ScoreView, View
from tilewise.planning.tiles import EMPTY, FULL, PARTIAL

TILES = {EMPTY: "#eef0f2", PARTIAL: "#fbe3bd", FULL: "#bcdfe8"}
PAIRS = {PARTIAL: "#e8902a", FULL: "#0b6e8f"}
SIDE = 4  # of a pair, in pixels
# From the smallest value of a score to its largest.
SHADES = ("#f4f1fa", "#ded3ef", "#c5b0e2", "#aa8bd4", "#8f67c4", "#7445b2", "#58279b", "#3c0f7d")
CURVE_SIZE, CURVE_SPAN = 256, 100.0


def mask_svg(view: View) -> str:
    """Return the kept pairs of a view, coloured by the status of their tile."""
    queries, keys = view.lengths
    pairs, of_pair = view.kept, view.status_of_pairs
    drawn = [_path(of_pair == what, colour) for what, colour in TILES.items()]
    drawn += [_path(pairs & (of_pair == what), colour) for what, colour in PAIRS.items()]
    edges = [f"M0 {n * SIDE}h{keys * SIDE}" for n in range(view.tile_m, queries, view.tile_m)]
    edges += [f"M{n * SIDE} 0v{queries * SIDE}" for n in range(view.tile_n, keys, view.tile_n)]
    return _svg(keys * SIDE, queries * SIDE, [*drawn, f'<path d="{"".join(edges)}" stroke="#ffffff"/>'], view.title)


def score_svg(score: ScoreView, lengths: tuple[int, int]) -> str:
    """Draw the score of s = 0 at every pair, darker if larger; or its curve, if the position does not matter."""
    if not score.by_place:
        return _curve(score)
    values = score.places(torch.arange(lengths[0]), torch.arange(lengths[1]), lengths).double()
    low, high = values.min(), values.max()
    # A nudge, so that a value between two shades falls on the same side whatever the machine's last bit.
    levels = ((values - low) / (high - low).clamp(min=1e-30) * len(SHADES) - 1e-4).clamp(0, len(SHADES) - 1).long()
    drawn = [_path(levels == n, colour) for n, colour in enumerate(SHADES)]
    return _svg(lengths[1] * SIDE, lengths[0] * SIDE, drawn, score.title)


def _curve(score: ScoreView) -> str:
    s = torch.linspace(-CURVE_SPAN, CURVE_SPAN, 101)
    scale = CURVE_SIZE / (2 * CURVE_SPAN)
    points = zip(((s + CURVE_SPAN) * scale).tolist(), ((CURVE_SPAN - score.curve(s)) * scale).tolist(), strict=True)
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    half = CURVE_SIZE // 2
    return _svg(
        CURVE_SIZE, CURVE_SIZE,
        [
            f'<rect width="{CURVE_SIZE}" height="{CURVE_SIZE}" fill="{TILES[EMPTY]}"/>',
            f'<path d="M0 {half}h{CURVE_SIZE}M{half} 0v{CURVE_SIZE}" stroke="#ffffff"/>',
            f'<path d="M0 {CURVE_SIZE}L{CURVE_SIZE} 0" stroke="#a0a4aa" stroke-dasharray="4"/>',
            f'<polyline points="{line}" fill="none" stroke="{PAIRS[FULL]}" stroke-width="3"/>',
        ],
        score.title,
    )  # fmt: skip


def _path(chosen: Tensor, colour: str) -> str:
    """Return the chosen pairs as one path: a rectangle for each run of a row that equals none above it, as tall as the rows repeat it."""
    rows = [_runs(row) for row in chosen.tolist()]
    drawn = []
    for n, runs in enumerate(rows):
        for run in runs:
            if n and run in rows[n - 1]:
                continue
            tall = next((m for m in range(n, len(rows)) if run not in rows[m]), len(rows)) - n
            drawn.append(f"M{run[0] * SIDE} {n * SIDE}h{run[1] * SIDE}v{tall * SIDE}h-{run[1] * SIDE}z")
    return f'<path fill="{colour}" d="{"".join(drawn)}"/>' if drawn else ""


def _runs(row: list[bool]) -> list[tuple[int, int]]:
    """Return ``(start, length)`` of the runs of true values."""
    edges = [n for n in range(len(row) + 1) if (n < len(row) and row[n]) != (n > 0 and row[n - 1])]
    return [(start, stop - start) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _svg(width: int, height: int, drawn: list[str], title: str) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    escaped = title.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    inside = "\n".join(x for x in drawn if x)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<title>{escaped}</title>\n{inside}\n</svg>\n'
