"""docs/training.md's tables and plot, from bench/results/context-cpu.json and pathfinder-cpu.json.

python -m examples.report                            # the page from the committed results
python -m examples.report --context out/context      # take new results in first
"""

import argparse
import itertools
import json
import re
from pathlib import Path

from bench.measure import machine
from examples.gpt.context import CONTEXTS, POSITIONS, TOKENS
from examples.gpt.model import ATTENTIONS

ROOT = Path(__file__).parents[1]
COLOURS = {"tilewise": "#0b6e8f", "standard": "#c8553d", "sdpa": "#7a7a7a"}
MIB, GIB = 2**20, 2**30


# ---- taking results in ---------------------------------------------------------------------------------------------


def gather_context(folder: Path) -> dict:
    """The records that `python -m examples.gpt.context` has left in its folder, as one; of the contexts that are finished."""
    files = [folder / f"context-{context}.json" for context in CONTEXTS]
    runs = [read(file) for file in files if file.exists()]
    short_losses = [run.pop("short_loss") for run in runs]  # all began from one short run
    return {
        "machine": machine("cpu"),
        "short_loss": short_losses[0],
        "runs": runs,
        "steps": sorted(read(folder / "steps.json"), key=lambda row: row["context"]),
    }


def read(path: Path) -> dict:
    return json.loads(path.read_text())


# ---- the tables ----------------------------------------------------------------------------------------------------


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def context_tables(record: dict) -> str:
    """Loss at each context, then seconds and memory of a step with each attention."""
    by_context = {run["context"]: run for run in record["runs"]}
    spans = list(record["runs"][-1]["held_out_loss_by_position"])
    rows = [["all", *(f"**{run['held_out_loss']:.4f}**" for run in by_context.values())]]
    for span in spans:
        found = (run["held_out_loss_by_position"].get(span) for run in by_context.values())
        rows.append([span.replace("-", " to "), *("" if x is None else f"{x:.3f}" for x in found)])
    losses = markdown(["position / context", *(f"{context:,}" for context in by_context)], rows)
    names = list(ATTENTIONS)
    columns = ["context", *(f"{name}, s" for name in names), *(f"{name}, MiB" for name in names)]
    rows = []
    for context in CONTEXTS:
        found = [step_of(record, context, name) for name in names]
        if not any(found):
            continue
        seconds = [f"{row['seconds']:.2f}" if "seconds" in row else "–" for row in found]
        rows.append([f"{context:,}", *seconds, *(memory(record, row) for row in found)])
    return f"{losses}\n\n{markdown(columns, rows)}"


def step_of(record: dict, context: int, attention: str) -> dict:
    """The row of steps.json, empty where it was not measured."""
    return next((row for row in record["steps"] if (row["context"], row["attention"]) == (context, attention)), {})


def memory(record: dict, row: dict) -> str:
    """The measured peak; for a step that failed, what a line through the two contexts before it gives."""
    if "peak_bytes" in row:
        return f"{row['peak_bytes'] / MIB:,.0f}"
    return "–" if not row else f"stops: {expected_bytes(record, row) / MIB:,.0f} needed"


def expected_bytes(record: dict, row: dict) -> float:
    """A step has as many bytes of text whatever its context, so that N × N matrices for all rows grow as N: a line."""
    longest = [c for c in CONTEXTS if "peak_bytes" in step_of(record, c, row["attention"])][-2:]
    peaks = [step_of(record, c, row["attention"])["peak_bytes"] for c in longest]
    slope = (peaks[1] - peaks[0]) / (longest[1] - longest[0])
    return peaks[1] + slope * (row["context"] - longest[1])


def pathfinder_table(record: dict) -> str:
    """The cost of an image at each size, and how long the same number of images would take."""
    rows = [
        [row["images"], f"{row['seqlen']:,}", f"{1e3 * row['seconds_an_image']:,.1f}", f"{row['hours']:,.1f}"]
        for row in record["costs"]
    ]
    seen = record["costs"][0]["images_seen"]
    return markdown(["images", "tokens", "ms an image", f"hours for {seen:,} images"], rows)


def page(text: str, context: dict, pathfinder: dict) -> str:
    """docs/training.md with its generated parts replaced."""
    for name, part in (("context", context_tables(context)), ("pathfinder", pathfinder_table(pathfinder))):
        marks = f"<!-- {name} -->", f"<!-- /{name} -->"
        text = re.sub(
            f"{marks[0]}\n.*?{marks[1]}", lambda _, m=marks, p=part: f"{m[0]}\n{p}\n{m[1]}", text, flags=re.DOTALL
        )
    return text


# ---- the plot ------------------------------------------------------------------------------------------------------


def draw_context(record: dict, path: Path):
    """Three panels over the context: held-out loss by position, seconds of a step, its peak memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    for shade, run in zip((0.2, 0.35, 0.5, 0.65, 0.8, 1.0), record["runs"], strict=False):
        at = run["held_out_loss_by_position"]
        label = f"{run['context']:,} (mean {run['held_out_loss']:.3f})"
        left.plot(list(at.values()), marker="o", markersize=4, color=COLOURS["tilewise"], alpha=shade, label=label)
    spans = [f"{k(low)}–{k(high)}" for low, high in itertools.pairwise(POSITIONS)]
    left.set_xticks(range(len(at)), spans[: len(at)])
    left.tick_params(axis="x", labelrotation=40)
    left.set(xlabel="position in the context", ylabel="held-out loss, nats per byte")
    left.legend(frameon=False, title="trained context")
    _over_context(middle, record, ("seconds", 1), "CPU seconds, a training step")
    _over_context(right, record, ("peak_bytes", GIB), "GiB at the peak")
    where = f"{record['machine']['cpu']}, one thread, {TOKENS:,} bytes a step, bf16"
    figure.suptitle(where, fontsize=9, color="#555555")
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _over_context(axes, record: dict, what: tuple[str, int], label: str):
    """One line an attention in log-log axes, with a cross where it stops. `what`: a name in the rows, and its unit."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    name_of, unit = what
    for name in ("standard", "sdpa", "tilewise"):
        rows = [row for row in record["steps"] if row["attention"] == name and name_of in row]
        xs, ys = [row["context"] for row in rows], [row[name_of] / unit for row in rows]
        axes.plot(xs, ys, marker="o", markersize=4, linewidth=2, color=COLOURS[name], label=name)
        if any("failed" in row for row in record["steps"] if row["attention"] == name):
            axes.plot(xs[-1], ys[-1], marker="x", markersize=10, markeredgewidth=2, color=COLOURS[name])
            axes.annotate(
                "out of memory next", (xs[-1], ys[-1]), (0, 8), textcoords="offset points", ha="center", fontsize=8
            )
    axes.set(xscale="log", yscale="log", xlabel="context", ylabel=label)
    axes.set_xticks(CONTEXTS, [k(c) for c in CONTEXTS])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.minorticks_off()
    axes.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.legend(frameon=False)


def k(number: int) -> str:
    return f"{number // 1024}k" if number >= 1024 else str(number)


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=Path, help="a folder of examples.gpt.context")
    options = parser.parse_args(arguments)
    files = [ROOT / "bench" / "results" / f"{name}-cpu.json" for name in ("context", "pathfinder")]
    if options.context:
        files[0].write_text(json.dumps(gather_context(options.context)) + "\n")
    context, pathfinder = map(read, files)
    document = ROOT / "docs" / "training.md"
    document.write_text(page(document.read_text(), context, pathfinder))
    draw_context(context, ROOT / "docs" / "img" / "context.png")


if __name__ == "__main__":
    main()
