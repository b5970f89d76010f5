"""The plot of a GPU run: `python -m bench.plot bench/results/h200-peers.jsonl docs/img/h200-hopper.png --run NAME`.

Any files of results may be named before the picture; of rows for the same, the last counts. `bench.page.H200` names the run of the page.
"""

import argparse
from pathlib import Path

from bench import cases, records

PEER = {"linewidth": 1.6, "markersize": 4, "zorder": 2}
OURS = {"linewidth": 3, "markersize": 6, "zorder": 3, "marker": "o"}
STYLES = {
    "tilewise": OURS | {"color": "#0b6e8f"},
    "hopper": OURS | {"color": "#0b6e8f"},
    "triton": OURS | {"color": "#4fa3bf"},
    "fa4": PEER | {"color": "#9a9a9a", "marker": "s"},
    "fa3": PEER | {"color": "#b3a3bd", "marker": "D"},
    "cudnn": PEER | {"color": "#c9a27e", "marker": "^"},
    "fa2": PEER | {"color": "#b5b5b5", "marker": "v", "linestyle": ":"},
    "flex": PEER | {"color": "#d8c48f", "marker": "P"},
}
"""How a contestant is drawn; tilewise comes first and stands out."""
LABELS = {
    "tilewise": "tilewise",
    "hopper": "tilewise, hopper",
    "triton": "tilewise, triton",
    "fa2": "FlashAttention-2 (torch)",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN (torch)",
    "flex": "FlexAttention",
}


def points(rows: list[dict], direction: str, head_dim: int, mask: str | None) -> dict[str, list[tuple[int, float]]]:
    """``(N, TFLOP/s)`` by contestant, in the order of N."""
    found: dict[str, dict[int, float]] = {name: {} for name in STYLES}
    for r in records.select(rows, direction=direction):
        case, speed = cases.CASES.get(r["case"]), records.rate(r)
        wanted = case and "h200" in case.tags and (case.head_dim, case.mask) == (head_dim, mask)
        if wanted and speed and r["contestant"] in found:
            found[r["contestant"]][case.seqlen_q] = speed
    return {name: sorted(values.items()) for name, values in found.items() if values}


def draw(rows: list[dict], path: Path, mask: str | None = "causal") -> None:
    """Draw forward above backward, and a column for each head dim. The letters are legible at 800 pixels."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(8, 5.4), layout="constrained")
    grid = figure.subplots(2, 3, sharex=True, sharey="row")
    for line, direction in zip(grid, ("forward", "backward"), strict=True):
        for axes, head_dim in zip(line, (64, 128, 256), strict=True):
            for name, values in points(rows, direction, head_dim, mask).items():
                axes.plot(*zip(*values, strict=True), label=LABELS[name], **STYLES[name])
            axes.set(xscale="log")
            axes.set_title(f"{direction}, head_dim {head_dim}", fontsize=11)
            axes.set_xticks([512, 2048, 8192], labels=["512", "2k", "8k"])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.grid(True, color="#ececec", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        line[0].set(ylabel="TFLOP/s", ylim=(0, 1.05 * max(y for axes in line for y in _heights(axes))))
    grid[1, 1].set_xlabel("sequence length")
    run = next(iter(records.runs(rows).values()))
    figure.suptitle(f"{(mask or 'full').capitalize()} attention, bf16, {run['device']}", fontsize=12)
    handles = {label: h for axes in grid.flat for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=10.5)
    figure.savefig(path, dpi=200)


def _heights(axes) -> list[float]:
    return [y for drawn in axes.get_lines() for y in drawn.get_ydata()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--run", help="contestants of one run alone, which were timed in the same rounds")
    parser.add_argument("--mask", default="causal", help="the mask of the cases, or none")
    options = parser.parse_args()
    rows = [r for path in options.sources for r in records.read(path)]
    mask = None if options.mask == "none" else options.mask
    draw([r for r in rows if options.run in (None, r["run"])], options.target, mask)


if __name__ == "__main__":
    main()
