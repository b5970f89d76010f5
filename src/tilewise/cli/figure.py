"""The demo's figure, time and memory against N and the two loss curves."""

from collections.abc import Callable
from pathlib import Path

COLOURS = {"tilewise": "#0b6e8f", "eager": "#c8553d", "sdpa": "#7a7a7a", "standard": "#c8553d"}
LABELS = {"tilewise": "tilewise", "eager": "standard", "sdpa": "PyTorch SDPA"}


def draw(record: dict, path: Path) -> None:
    """Write one PNG of three panels from the demo's record."""
    plt = _pyplot()
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    points = record["scaling"]["points"]
    _against_n(left, points, lambda r: r["both"]["median_ms"] / 1e3, "seconds, forward + backward")
    left.set_title("Time")
    _against_n(middle, points, lambda r: r["memory"]["peak_bytes"] / 2**20, "MiB at the peak, beyond the inputs")
    middle.set_title("Memory")
    _losses(right, record["training"])
    machine = record["machine"]
    where = f"{machine['device']}, {machine['threads']} threads, torch {machine['versions']['torch']}"
    figure.suptitle(f"{record['scaling']['shape']}   ·   {where}   ·   tilewise demo", fontsize=9, color="#555555")
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _pyplot():
    """matplotlib without a screen, in this package's style."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    return plt


def _against_n(axes, points: list[dict], value: Callable[[dict], float], label: str) -> None:
    """One line a contestant in log-log axes; a cross where standard attention stops."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    for name in ("eager", "sdpa", "tilewise"):
        reached = [p for p in points if "both" in p["results"].get(name, {})]
        xs, ys = [p["seqlen"] for p in reached], [value(p["results"][name]) for p in reached]
        axes.plot(xs, ys, marker="o", markersize=4, linewidth=2, color=COLOURS[name], label=LABELS[name])
        if 0 < len(reached) < len(points):
            _stops(axes, (xs[-1], ys[-1]), points[len(reached)], COLOURS[name])
    axes.set(xscale="log", yscale="log", xlabel="sequence length N", ylabel=label)
    axes.margins(y=0.18)
    axes.set_xticks([p["seqlen"] for p in points])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:g}k" if n >= 1024 else f"{n:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1 else f"{y:g}"))
    axes.grid(True, which="major", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper left")


def _stops(axes, last: tuple[float, float], following: dict, colour: str) -> None:
    """Mark the last point of a line that ends early, and say what the next one would have taken."""
    need = following["standard_bytes"] / 2**30
    text = f"stops: the next\nneeds {need:.0f} GiB"
    axes.plot(*last, marker="x", markersize=9, markeredgewidth=2, color=colour)
    axes.annotate(text, last, (0, 8), textcoords="offset points", ha="center", va="bottom", fontsize=8, color=colour)


def _losses(axes, training: dict) -> None:
    """Standard attention as a broad line, tilewise as a thin one upon it."""
    styles = {"standard": {"linewidth": 5, "alpha": 0.45}, "tilewise": {"linewidth": 1.5}}
    for name, style in styles.items():
        axes.plot(training["loss"][name], color=COLOURS[name], label=name, **style)
    axes.set(xlabel="training step", ylabel="loss, nats per byte")
    axes.set_title("A small GPT, trained twice")
    gap = f"largest difference {training['largest_gap']:.0e}"
    axes.annotate(gap, (0.97, 0.72), xycoords="axes fraction", ha="right", fontsize=9, color="#555555")
    axes.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
