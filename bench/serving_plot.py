"""The plot of how fast decoding reads its cache, over the keys of a sequence: `python -m bench.serving --draw PICTURE --out FILE`."""

import re
from pathlib import Path

from bench import records

RATE = re.compile(r"serving-rate-b(\d+)-(\d+)$")
LINES = {"pages-64": ("-", "tilewise, pages of 64"), "cudnn": ("--", "cuDNN (torch), dense keys")}
COLOURS = {1: "#0b6e8f", 8: "#4f9d69", 64: "#c8553d"}


def points(rows: list[dict]) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """``(keys, TB/s)`` by contestant and batch, in the order of the keys."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for r in rows:
        case = RATE.match(r.get("case", ""))
        if case and r["metric"] == "time" and r["value"] and r["contestant"] in LINES:
            found.setdefault((r["contestant"], int(case[1])), {})[int(case[2])] = r["gb_per_s"] / 1e3
    return {who: sorted(values.items()) for who, values in sorted(found.items(), key=lambda x: x[0][1])}


def draw(source: Path, picture: Path) -> None:
    """One panel: a colour for each batch, full lines for pages, broken ones for cuDNN."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axes = figure.subplots()
    ticks: set[int] = set()
    for (name, batch), values in points(records.read(source)).items():
        style, label = LINES[name]
        sequences = "1 sequence" if batch == 1 else f"{batch} sequences"
        keys, rates = zip(*values, strict=True)
        axes.plot(keys, rates, style, marker="o", markersize=4, color=COLOURS[batch], label=f"{sequences}, {label}")
        ticks |= set(keys)
    axes.set(xscale="log", xlabel="keys of each sequence", ylabel="K and V read, TB/s", ylim=(0, None))
    axes.set_xticks(sorted(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:g}" if n < 1024 else f"{n / 1024:g}k"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(picture, dpi=130)
