"""A picture as a matplotlib figure, which is imported when one is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tilewise.pictures.view import ScoreView, View, centres
from tilewise.planning.tiles import EMPTY, PARTIAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"skipped": "#f1f3f4", "partial": "#f2a541", "full": "#0b6e8f"}  # in the order of EMPTY, PARTIAL, FULL
HIDDEN = "#fbe3bd"  # of a partial tile's pairs, those that the mask hides
MOST_CELLS = 512  # of a score, along an axis
MOST_PAIRS = 1 << 21  # that are drawn one by one: there are about as many points in a figure


def draw(view: View, score: ScoreView | None = None, notes: tuple[str, ...] = ()) -> Figure:
    """Return the tiles of a view, beside it the score where there is one, and ``notes`` below.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a picture is drawn by matplotlib, which is not here: pip install matplotlib") from None
    panels = 1 if score is None else 2
    figure = Figure(figsize=(5.2 * panels + 0.4, 5 + 0.16 * len(notes)), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _tiles(axes[0], view)
    if score is not None:
        (_places if score.by_place else _curve)(axes[1], score, view)
    figure.supxlabel("\n".join(notes), fontsize=7.5, color="#444444", x=0.02, ha="left", family="monospace", wrap=True)
    return figure


def _tiles(axes: Axes, view: View) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    queries, keys = view.lengths
    lines, columns = view.status.shape
    shown, extent = view.status, (0, columns * view.tile_n, lines * view.tile_m, 0)
    by_pair = 0 < queries * keys <= MOST_PAIRS
    if by_pair:  # a bit for each pair of a partial tile
        shown = view.status_of_pairs.masked_fill(~view.kept & (view.status_of_pairs == PARTIAL), len(COLOURS))
        extent = (0, keys, queries, 0)
    axes.imshow(
        shown.numpy(), cmap=ListedColormap([*COLOURS.values(), HIDDEN]), vmin=0, vmax=len(COLOURS), extent=extent,
        interpolation="nearest", aspect="auto",
    )  # fmt: skip
    if max(lines, columns) <= 64:
        for n in range(1, lines):
            axes.axhline(n * view.tile_m, color="white", linewidth=0.6)
        for n in range(1, columns):
            axes.axvline(n * view.tile_n, color="white", linewidth=0.6)
    axes.set(xlim=(0, max(1, keys)), ylim=(max(1, queries), 0), xlabel="key", ylabel="query")
    axes.set_title(_wrapped(view.title), fontsize=9, family="monospace")
    patches = [
        Patch(facecolor=COLOURS[name], edgecolor="#bbbbbb", label=f"{n:,} {name}") for name, n in view.counts.items()
    ]
    if by_pair and view.counts["partial"]:
        patches.append(Patch(facecolor=HIDDEN, edgecolor="#bbbbbb", label="hidden pairs of partial tiles"))
    axes.legend(
        handles=patches, loc="lower center", bbox_to_anchor=(0.5, -0.24), ncols=len(patches), frameon=False, fontsize=8,
        columnspacing=1.2, handlelength=1.6,
    )  # fmt: skip


def _places(axes: Axes, score: ScoreView, view: View) -> None:
    """The score of s = 0, at the middle of each cell; white where the tile is skipped."""
    i, j = (centres(n, min(n, MOST_CELLS)) for n in view.lengths)
    values = score.places(i, j, view.lengths)
    skipped = (view.status == EMPTY)[i // view.tile_m][:, j // view.tile_n]
    shown = values.masked_fill(skipped, torch.nan).numpy()
    extent = (0, view.lengths[1], view.lengths[0], 0)
    image = axes.imshow(shown, cmap="viridis", extent=extent, interpolation="nearest", aspect="auto")
    axes.figure.colorbar(image, ax=axes, fraction=0.046, label="score of s = 0")
    axes.set(xlabel="key", ylabel="query")
    axes.set_title(_wrapped(score.title), fontsize=9, family="monospace")


def _curve(axes: Axes, score: ScoreView, view: View) -> None:
    """The score of every s from -100 to 100, beside the line of a score that changes nothing."""
    s = torch.linspace(-100, 100, 401, device="cpu")
    axes.plot(s, s, color="#bbbbbb", linewidth=1, linestyle="--", label="s")
    axes.plot(s, score.curve(s), color=COLOURS["full"], linewidth=2, label="score")
    axes.set(xlabel="s = softmax_scale · q·k", ylabel="score")
    axes.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.legend(frameon=False, fontsize=8)
    axes.set_title(_wrapped(score.title), fontsize=9, family="monospace")


def _wrapped(title: str, width: int = 64) -> str:
    lines = [title[n : n + width] for n in range(0, len(title), width)]
    return "\n".join([*lines[:2], "…"] if len(lines) > 3 else lines)
