"""Draws results: the pictures of the pages, which ``python -m bench.page --write`` writes, and that of ``tilewise demo``."""

import re
from collections.abc import Callable
from functools import partial

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from bench import cases, quotations, records
from bench.compare import Verdict, judge, load_goals
from bench.page import H200
from bench.ranks import HEAD_DIM, kept_pairs
from bench.tables import Results, load
from tilewise.parallel import cost
from tilewise.problem import check
from tilewise.spec import Options, assemble, parse_spec

BLUE, RED, GREEN, GREY = "#0b6e8f", "#c8553d", "#4f9d69", "#555555"


def tokens(n: float, _: object = None) -> str:
    """A length as people say it: 512, 4k, 1M."""
    return f"{n:g}" if n < 2**10 else f"{n / 2**10:g}k" if n < 2**20 else f"{n / 2**20:g}M"


def styled(axes, ticks=(), **labels: object) -> None:
    """A logarithmic axis of lengths in k, a faint grid, no frame above and to the right."""
    axes.set(xscale="log", **labels)
    axes.set_xticks(sorted(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(tokens))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def line(axes, points: dict[float, float], *style: str, **how: object) -> None:
    """A line through points by x, if there are any."""
    if points:
        axes.plot(*zip(*sorted(points.items()), strict=True), *style, **how)


def titled(figure: Figure, text: str) -> Figure:
    figure.suptitle(text, fontsize=9, color=GREY)
    return figure


# ---- the squares of a GPU -------------------------------------------------------------------------------------------

PEER = {"linewidth": 1.6, "markersize": 4, "zorder": 2}
OURS = {"linewidth": 3, "markersize": 6, "zorder": 3, "marker": "o"}
STYLES = {
    "tilewise": OURS | {"color": BLUE, "label": "tilewise"},
    "fa4": PEER | {"color": "#9a9a9a", "marker": "s", "label": "FlashAttention-4"},
    "cudnn": PEER | {"color": "#c9a27e", "marker": "^", "label": "cuDNN (torch)"},
    "fa2": PEER | {"color": "#b5b5b5", "marker": "v", "linestyle": ":", "label": "FlashAttention-2 (torch)"},
}
"""How a contestant is drawn; tilewise comes first and stands out."""


def square_points(rows: list[dict]) -> dict[tuple[str, str, int], dict[int, float]]:
    """TFLOP/s of causal attention by N, by contestant, pass and head dim; of rows for the same, the last counts."""
    found: dict[tuple[str, str, int], dict[int, float]] = {}
    for r in records.select(rows):
        case, speed = cases.CASES.get(r["case"]), records.rate(r)
        if case and "h200" in case.tags and case.mask and speed:
            found.setdefault((r["contestant"], r["pass"], case.head_dim), {})[case.seqlen_q] = speed
    return found


def squares(rows: list[dict]) -> Figure:
    """Forward above, backward below, a column for each head dim. The letters are legible at 800 pixels."""
    figure, found = Figure(figsize=(8, 5.4), layout="constrained"), square_points(rows)
    grid = figure.subplots(2, 3, sharex=True, sharey="row")
    for of_pass, direction in zip(grid, ("forward", "backward"), strict=True):
        for axes, head_dim in zip(of_pass, (64, 128, 256), strict=True):
            for name, style in STYLES.items():
                line(axes, found.get((name, direction, head_dim), {}), **style)
            styled(axes, (512, 2048, 8192))
            axes.set_title(f"{direction}, head_dim {head_dim}", fontsize=11)
        highest = max(y for axes in of_pass for drawn in axes.get_lines() for y in drawn.get_ydata())
        of_pass[0].set(ylabel="TFLOP/s", ylim=(0, 1.05 * highest))
    grid[1, 1].set_xlabel("sequence length")
    handles = {label: h for axes in grid.flat for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=10.5)
    run = next(iter(records.runs(rows).values()))
    figure.suptitle(f"Causal attention, bf16, {run['device']}", fontsize=12)
    return figure


# ---- the CPU's goals ------------------------------------------------------------------------------------------------

PANELS = {
    "sdpa": "times as fast as PyTorch's SDPA",
    "cpu": "times as fast as without a mask",
    "read": "share of the pace at which K and V are read",
}


def cpu(rows: list[dict]) -> Figure:
    """A panel for each peer: a bar for each case and direction, and a black line at its goal."""
    goals = [g for g in load_goals() if g.contestant == "cpu" and g.peer]
    measured = [v for v in judge(goals, records.entries(rows)) if v.measured is not None]
    panels = {peer: found for peer in PANELS if (found := [v for v in measured if v.goal.peer == peer])}
    heights = [len({v.goal.case for v in found}) + 1.5 for found in panels.values()]
    figure = Figure(figsize=(9, 0.34 * sum(heights) + 1), layout="constrained")
    grid = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)
    for (peer, found), axes in zip(panels.items(), grid[:, 0], strict=True):
        _bars(axes, found)
        axes.set_xlabel(PANELS[peer])
    run = next(iter(records.runs(rows).values()))
    where = f"{run['device']}, {run['threads']} threads, torch {run['versions']['torch']}"
    return titled(figure, f"{where}   ·   black: the goal")


def _bars(axes, verdicts: list[Verdict]) -> None:
    names = list(dict.fromkeys(v.goal.case for v in verdicts))
    for direction, colour, shift in (("forward", BLUE, -0.2), ("backward", RED, 0.2)):
        found = [v for v in verdicts if v.goal.direction == direction]
        at = [names.index(v.goal.case) + shift for v in found]
        axes.barh(at, [v.measured for v in found], 0.36, color=colour, label=direction if found else None)
        for y, v in zip(at, found, strict=True):
            axes.plot([v.goal.ratio] * 2, [y - 0.2, y + 0.2], color="black", linewidth=1.5)
            where = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "fontsize": 7}
            axes.annotate(f"{v.measured:.2f}", (v.measured, y), **where)
    axes.set_yticks(range(len(names)), [case.removeprefix("cpu-") for case in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=8)


# ---- several GPUs ---------------------------------------------------------------------------------------------------

RANKS = {2: BLUE, 4: RED, 8: GREEN}
TOKENS = [2**n for n in range(14, 21)]
PACE = 615e12
"""About what one GPU alone makes of a causal step of these heads, from 32k tokens on."""


def ranks_model(size: int, seqlen: int, heads_q: int, heads_k: int) -> float:
    """The share of one GPU's pace that the cost model, which knows nothing of the host's time, expects of a causal step by heads."""
    whole = torch.empty(1, 1, 1, 1, dtype=torch.bfloat16)
    q, k, v = (whole.expand(1, seqlen, heads, HEAD_DIM).requires_grad_() for heads in (heads_q, heads_k, heads_k))
    extras, seed, text = assemble(q, k, v, Options(causal=True))
    exchanged = cost.exchanging_heads(check(q, k, v, extras, seed, parse_spec(text)), size)
    products = 14 * kept_pairs("causal", seqlen) * heads_q * HEAD_DIM / size / PACE * 1e3
    return products / (products + exchanged.milliseconds)


def ranks_measured(rows: list[dict], size: int, heads_q: int, heads_k: int) -> dict[int, float]:
    """The share by tokens, of the newest run of each length."""
    times: dict[tuple[int, str], dict[str, float]] = {}
    wanted = {"gpus": size, "heads_q": heads_q, "heads_k": heads_k, "mask": "causal"}
    for r in records.select(rows, direction="both"):
        shape = r.get("shape", {})
        if wanted.items() <= shape.items() and r["contestant"] in ("engines", "alone"):
            times.setdefault((shape["seqlen"], r["run"]), {})[r["contestant"]] = r["value"]
    return {seqlen: both["alone"] / both["engines"] for (seqlen, _), both in times.items() if len(both) == 2}


def ranks(rows: list[dict]) -> Figure:
    """A panel for each number of heads: steps by heads of :mod:`bench.ranks`, and the cost model's lines."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, heads in zip(figure.subplots(1, 2, sharey=True), ((32, 8), (16, 16)), strict=True):
        for size, colour in RANKS.items():
            if heads[1] % size:
                continue
            axes.plot(TOKENS, [ranks_model(size, n, *heads) for n in TOKENS], color=colour, linewidth=1.2)
            label = f"{size} GPUs, measured; line: the cost model"
            line(axes, ranks_measured(rows, size, *heads), "o", color=colour, label=label)
        styled(axes, TOKENS, ylim=(0.5, 1.0), title=f"{heads[0]} query, {heads[1]} key heads", xlabel="tokens")
        axes.legend(frameon=False, loc="lower right", fontsize=8)
    figure.axes[0].set_ylabel("share of one GPU's pace")
    return titled(figure, "NVIDIA H200, bf16, D 128, causal, forward and backward, by heads with copy engines")


# ---- decoding -------------------------------------------------------------------------------------------------------

RATE = re.compile(r"serving-rate-b(\d+)-(\d+)$")
CACHES = {"pages-64": ("-", "tilewise, pages of 64"), "cudnn": ("--", "cuDNN (torch), dense keys")}
BATCHES = {1: BLUE, 8: GREEN, 64: RED}


def decoding(rows: list[dict]) -> Figure:
    """How fast decoding reads its cache: a colour for each batch, full lines for pages, broken ones for cuDNN."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for r in records.select(rows, metric="time"):
        case = RATE.match(r["case"])
        if case and r["value"] and r["contestant"] in CACHES:
            found.setdefault((r["contestant"], int(case[1])), {})[int(case[2])] = r["gb_per_s"] / 1e3
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axes = figure.subplots()
    for (name, batch), values in sorted(found.items(), key=lambda each: each[0][1]):
        style, label = CACHES[name]
        label = f"{'1 sequence' if batch == 1 else f'{batch} sequences'}, {label}"
        line(axes, values, f"{style}o", markersize=4, color=BATCHES[batch], label=label)
    ticks = {keys for values in found.values() for keys in values}
    styled(axes, ticks, xlabel="keys of each sequence", ylabel="K and V read, TB/s", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)
    return figure


# ---- derivatives ----------------------------------------------------------------------------------------------------

DERIVATIVES = {"jvp": (BLUE, "forward mode, with o"), "second": (RED, "second derivative")}


def derivatives(rows: list[dict]) -> Figure:
    """Time and memory by length, a column for each head dim; eager attention is broken.

    Times of a CPU, whose cores others may use too, are multiples of the forward that was timed in turns with them.
    """
    run = next(iter(records.runs(rows).values()))
    ours, relative = next(iter(run["peers"])), "NVIDIA" not in run["device"]
    units = {"time": "times of tilewise's forward" if relative else "ms", "memory": "MiB beyond inputs and outputs"}
    points: dict[tuple, dict[int, float]] = {}
    for r in records.select(rows):
        shape = r.get("shape", {})
        if r["value"] and shape.get("what") and shape.get("mask") is None:
            key = shape["what"], r["contestant"], r["metric"], shape["head_dim"]
            points.setdefault(key, {})[shape["seqlen"]] = r["value"]
            said = f"{run['device']}, {shape['dtype']}, {shape['heads_q']} heads, torch {run['versions']['torch']}"
    head_dims = sorted({head_dim for *_, head_dim in points})
    figure = Figure(figsize=(9, 6), layout="constrained")
    grid = figure.subplots(2, len(head_dims), sharex=True, sharey="row", squeeze=False)
    for of_metric, (metric, unit) in zip(grid, units.items(), strict=True):
        for axes, head_dim in zip(of_metric, head_dims, strict=True):
            forward = points["forward", ours, metric, head_dim]
            for what, (colour, label) in DERIVATIVES.items():
                for who, name, style in ((ours, "tilewise", "-o"), ("eager", "eager", "--s")):
                    values = points.get((what, who, metric, head_dim), {})
                    if metric == "time" and relative:
                        values = {n: ms / forward[n] for n, ms in values.items()}
                    line(axes, values, style, color=colour, label=f"{name}, {label}")
            styled(axes, forward, yscale="log", title=f"head dim {head_dim}" if metric == "time" else "")
        of_metric[0].set_ylabel(unit)
    axes.set_xlabel("sequence length N")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return titled(figure, said)


# ---- the demo -------------------------------------------------------------------------------------------------------

CONTESTANTS = {"eager": (RED, "standard"), "sdpa": (GREY, "PyTorch SDPA"), "tilewise": (BLUE, "tilewise")}


def demo(record: dict) -> Figure:
    """Time and memory against N, and the two loss curves: three panels from the demo's record."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    points = record["scaling"]["points"]
    _against_n(left, points, lambda r: r["both"]["median_ms"] / 1e3, "seconds, forward + backward")
    left.set_title("Time")
    _against_n(middle, points, lambda r: r["memory"]["peak_bytes"] / 2**20, "MiB at the peak, beyond the inputs")
    middle.set_title("Memory")
    _losses(right, record["training"])
    machine = record["machine"]
    where = f"{machine['device']}, {machine['threads']} threads, torch {machine['versions']['torch']}"
    return titled(figure, f"{record['scaling']['shape']}   ·   {where}   ·   tilewise demo")


def _against_n(axes, points: list[dict], value: Callable[[dict], float], label: str) -> None:
    """One line a contestant in log-log axes; a cross where standard attention stops."""
    for name, (colour, known_as) in CONTESTANTS.items():
        reached = [p for p in points if "both" in p["results"].get(name, {})]
        xs, ys = [p["seqlen"] for p in reached], [value(p["results"][name]) for p in reached]
        axes.plot(xs, ys, marker="o", markersize=4, linewidth=2, color=colour, label=known_as)
        if 0 < len(reached) < len(points):
            _stops(axes, (xs[-1], ys[-1]), points[len(reached)], colour)
    styled(axes, [p["seqlen"] for p in points], yscale="log", xlabel="sequence length N", ylabel=label)
    axes.margins(y=0.18)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1 else f"{y:g}"))
    axes.legend(frameon=False, loc="upper left")


def _stops(axes, last: tuple[float, float], following: dict, colour: str) -> None:
    """Mark the last point of a line that ends early, and say what the next one would have taken."""
    need = following["standard_bytes"] / 2**30
    text = f"stops: the next\nneeds {need:.0f} GiB"
    axes.plot(*last, marker="x", markersize=9, markeredgewidth=2, color=colour)
    axes.annotate(text, last, (0, 8), textcoords="offset points", ha="center", va="bottom", fontsize=8, color=colour)


def _losses(axes, training: dict) -> None:
    """Standard attention as a broad line, tilewise as a thin one upon it."""
    axes.plot(training["loss"]["standard"], color=RED, label="standard", linewidth=5, alpha=0.45)
    axes.plot(training["loss"]["tilewise"], color=BLUE, label="tilewise", linewidth=1.5)
    axes.set(xlabel="training step", ylabel="loss, nats per byte", title="A small GPT, trained twice")
    gap = f"largest difference {training['largest_gap']:.0e}"
    axes.annotate(gap, (0.97, 0.72), xycoords="axes fraction", ha="right", fontsize=9, color=GREY)
    axes.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.legend(frameon=False)


# ---- whole models ----------------------------------------------------------------------------------------------------


def models() -> Figure:
    """A panel for each machine: how many times as fast as with SDPA a model is."""
    panels = quotations.beside_sdpa()
    figure = Figure(figsize=(8, 5), layout="constrained")
    grid = figure.subplots(len(panels), 1, sharex=True, height_ratios=[len(bars) + 0.7 for bars in panels.values()])
    for axes, (title, bars) in zip(grid, panels.items(), strict=True):
        for y, value in enumerate(bars.values()):
            axes.barh(y, value, 0.62, color=BLUE if value >= 1 else "#8fbccb")
            axes.annotate(f"{value:.2f}", (max(1, value), y), xytext=(4, 0), textcoords="offset points", va="center")
        axes.axvline(1, color="#9a9a9a", linewidth=1.6, linestyle="--")
        axes.set_yticks(range(len(bars)), bars)
        axes.set_ylim(len(bars) - 0.5, -0.5)
        axes.set_title(title, fontsize=11, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    grid[-1].set(xlim=(0, 2), xlabel="times as fast with tilewise as with SDPA (dashed: the same)")
    return figure


# ---- the pages' pictures ---------------------------------------------------------------------------------------------


def of(draw: Callable[[list[dict]], Figure], name: str, run: Callable[[Results], str] | None = None) -> Figure:
    """The picture of a file of results, or of one run, whose contestants were timed in the same rounds."""
    found = load(name)
    return draw([r for r in found.records if run is None or r["run"] == run(found)])


PICTURES = {
    "h200-hopper": partial(of, squares, "h200-peers", lambda found: H200.run),
    "cpu-goals": partial(of, cpu, "cpu-goals"),
    "ranks": partial(of, ranks, "h200-peers"),
    "h200-serving": partial(of, decoding, "hopper-calls", lambda found: "h200-decoding-rates"),
    "derivatives-h200": partial(of, derivatives, "triton-calls", quotations.newest),
    "derivatives-cpu": partial(of, derivatives, "cpu-calls", quotations.newest),
    "models": models,
}
"""How each picture of docs/img that shows bench/results is drawn, by the name of its file."""
