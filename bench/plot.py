"""The plot of a GPU run: `python -m bench.plot bench/results/h200-peers.jsonl docs/img/h200-hopper.png --run NAME`.

Any files of results may be named before the picture; of rows for the same, the last counts. `bench.page.H200` names the run of the page.
"""

import argparse
from pathlib import Path

from bench import cases, records

COLOURS = {"tilewise": "#0b6e8f", "hopper": "#0b6e8f", "triton": "#62b6cb", "fa2": "#c8553d", "fa3": "#8f5fa8", "fa4": "#4f9d69",
           "cudnn": "#7a7a7a", "flex": "#d9a441"}  # fmt: skip
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
    found: dict[str, dict[int, float]] = {name: {} for name in COLOURS}
    for r in records.select(rows, direction=direction):
        case, speed = cases.CASES.get(r["case"]), records.rate(r)
        wanted = case and "h200" in case.tags and (case.head_dim, case.mask) == (head_dim, mask)
        if wanted and speed and r["contestant"] in found:
            found[r["contestant"]][case.seqlen_q] = speed
    return {name: sorted(values.items()) for name, values in found.items() if values}


def draw(rows: list[dict], path: Path) -> None:
    """Forward above, backward below, a column for each head dim; full lines without a mask, broken ones causal."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = Figure(figsize=(12, 6.4), layout="constrained")
    grid = figure.subplots(2, 3, sharex=True, sharey="row")
    for line, direction in zip(grid, ("forward", "backward"), strict=True):
        for axes, head_dim in zip(line, (64, 128, 256), strict=True):
            for mask, style in ((None, "-"), ("causal", "--")):
                for name, values in points(rows, direction, head_dim, mask).items():
                    label = LABELS[name] if mask is None else None
                    axes.plot(
                        *zip(*values, strict=True), style, marker="o", markersize=4, color=COLOURS[name], label=label
                    )
            axes.set(xscale="log", title=f"{direction}, head dim {head_dim}")
            axes.set_xticks([512, 2048, 4096, 16384])
            axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:g}" if n < 1024 else f"{n / 1024:g}k"))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.grid(True, color="#e6e6e6", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        line[0].set(ylabel="TFLOP/s", ylim=(0, 1.05 * max(y for axes in line for y in _heights(axes))))
    for axes in grid[1]:
        axes.set_xlabel("sequence length N")
    run = next(iter(records.runs(rows).values()))
    where = f"{run['device']}, bf16, torch {run['versions']['torch']}"
    note = "16,384 tokens, hidden size 2048; full lines without a mask, broken ones causal"
    figure.suptitle(f"{where}   ·   {note}", fontsize=9, color="#555555")
    handles = {label: h for axes in grid.flat for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)


def _heights(axes) -> list[float]:
    return [y for drawn in axes.get_lines() for y in drawn.get_ydata()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--run", help="contestants of one run alone, which were timed in the same rounds")
    options = parser.parse_args()
    rows = [r for path in options.sources for r in records.read(path)]
    draw([r for r in rows if options.run in (None, r["run"])], options.target)


if __name__ == "__main__":
    main()
