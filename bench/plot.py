"""The plot of a GPU run: `python -m bench.plot FORWARD.jsonl BACKWARD.jsonl docs/img/h200-hopper.png`, or of one file for both.

It reads what bench/run.py writes, and bench/results/h200-triton.jsonl, which is older and has a line for all contestants.
"""

import json
import sys
from pathlib import Path

from bench import cases

COLOURS = {"hopper": "#0b6e8f", "triton": "#62b6cb", "fa2": "#c8553d", "cudnn": "#7a7a7a", "flex": "#d9a441"}
LABELS = {
    "hopper": "tilewise, hopper",
    "triton": "tilewise, triton",
    "fa2": "FlashAttention-2 (torch)",
    "cudnn": "cuDNN (torch)",
    "flex": "FlexAttention",
}


def points(rows: list[dict], direction: str, head_dim: int, mask: str | None) -> dict[str, list[tuple[int, float]]]:
    """``(N, TFLOP/s)`` by contestant, in the order of N; of rows for the same, the last."""
    found: dict[str, dict[int, float]] = {name: {} for name in COLOURS}
    for row in rows:
        if not row.get("case", "").startswith("h200-"):
            continue
        case = cases.named(row["case"])
        if (case.head_dim, case.mask) == (head_dim, mask):
            for name, tflops in speeds(row, direction).items():
                found[name][case.seqlen_q] = tflops
    return {name: sorted(values.items()) for name, values in found.items() if values}


def speeds(row: dict, direction: str) -> dict[str, float]:
    """TFLOP/s by contestant, of a record of either form."""
    if row.get("record") == "result":
        return {row["contestant"]: row[direction]["gflops"] / 1e3} if direction in row else {}
    return row["tflops"] if row.get("part") == "peers" and row["direction"] == direction else {}


def draw(forward: list[dict], backward: list[dict], path: Path) -> None:
    """Forward above, backward below, a column for each head dim; full lines without a mask, broken ones causal."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = Figure(figsize=(12, 6.4), layout="constrained")
    grid = figure.subplots(2, 3, sharex=True, sharey="row")
    given = (("forward", forward), ("backward", backward))
    for line, (direction, rows) in zip(grid, given, strict=True):
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
    machine = next(row for row in forward if row.get("part") == "machine" or row.get("record") == "run")
    versions = machine.get("versions", machine)
    where = f"{machine['device']}, bf16, torch {versions['torch']}, Triton {versions['triton']}"
    note = "16,384 tokens, hidden size 2048; full lines without a mask, broken ones causal"
    figure.suptitle(f"{where}   ·   {note}", fontsize=9, color="#555555")
    handles = {label: h for axes in grid.flat for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)


def _heights(axes) -> list[float]:
    return [y for drawn in axes.get_lines() for y in drawn.get_ydata()]


def read(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def main(forward: str, *more: str) -> None:
    *backward, target = more
    draw(read(forward), read(backward[0] if backward else forward), Path(target))


if __name__ == "__main__":
    main(*sys.argv[1:])
