"""The tables of docs/derivatives.md, written from bench/results by ``python -m bench.page --write``."""

from itertools import product

from bench.tables import Results, grid, load, number, wrapped

COMMAND = "python -m bench.derivatives --parts check time"
EAGER = "eager"
SIZES = {f"{n:,}, D {dim}": f"n{n}-d{dim}" for dim, n in product((64, 128), (512, 1024, 2048, 4096, 8192, 16384))}
TENSORS = ("o tangent", "second dq", "second dk", "second dv", "second dsink", "second ddo")
TEXTS = {
    "triton-calls": "Milliseconds, and memory beyond inputs and outputs. Eager attention is to the right of each tilewise column.",
    "cpu-calls": (
        "One thread of a shared CPU, where only ratios of alternating runs are meaningful: multiples of tilewise's forward and "
        "backward. Eager attention is to the right of each tilewise column."
    ),
}
SHOWN = {"forward": ("jvp", "jvp-of-q"), "backward": ("second", "second MiB")}
"""What is shown beside each pass, and in its multiples."""
TITLES = {"jvp": "`jvp`", "jvp-of-q": "`jvp` of q", "second MiB": "second, MiB"}


def newest(found: Results) -> str:
    """The newest run that checked derivatives and timed them."""
    runs = [name for name, run in found.runs.items() if run["command"].startswith(COMMAND)]
    return max(runs, key=lambda name: found.runs[name]["when"])


def times(found: Results, run: str) -> list[str]:
    """A table of forward mode and one of second derivatives by length and head dim, each column of tilewise beside eager's.

    Milliseconds and multiples of forward and backward; of a CPU, whose cores others used too, only multiples.
    """
    relative, ours = "NVIDIA" not in found.runs[run]["device"], next(iter(found.runs[run]["peers"]))

    def value(name: str, who: str, size: str, direction: str) -> float | None:
        """Milliseconds of a derivative, or its MiB."""
        what, _, unit = name.partition(" ")
        return found.value(run, f"derivatives-{what}-{size}", who, direction, "memory" if unit else "time")

    lines: list[str] = []
    sizes = {title: size for title, size in SIZES.items() if value("forward", ours, size, "forward") is not None}
    for base, names in SHOWN.items():

        def cell(size: str, column: tuple[str, str, bool], base: str = base) -> str:
            name, who, over = column
            x = value(name, who, size, base)
            if over:
                x = x and x / value(base, ours, size, base)
            return number(x, 1 if over and not relative else 2 if x and x < 100 else 0)

        columns = []
        for name in names if relative else (base, *names):
            over = relative and "MiB" not in name
            title = TITLES.get(name, name) + f" over {base}" * over
            columns += [(title, (name, ours, over)), (EAGER, (name, EAGER, over))]
        if not relative:
            columns.append((f"{TITLES.get(names[0], names[0])} over {base}", (names[0], ours, True)))
        lines += ["", *grid(sizes, columns, cell, corner="N")]
    return lines[1:]


def errors(found: Results, run: str) -> list[str]:
    """The relative rms errors of each derivative, a row of tilewise's and one of eager attention's, a column for each case."""
    rows = [r for key, r in found.found.items() if key[0] == run and r["metric"] == "error"]
    by_place = {(r["shape"]["tensor"], r["shape"]["case"], r["shape"]["dtype"]): r for r in rows}
    tensors = [row for x in TENSORS for row in ((x, (x, "rms")), (f"… {EAGER}", (x, "rms_eager")))]

    def cell(row: tuple[str, str], case: tuple[str, str]) -> str | None:
        place = by_place.get((row[0], *case))
        return place and f"{place[row[1]]:.1e}"

    return grid(tensors, {f"{case}, {dtype}": (case, dtype) for _, case, dtype in by_place}, cell)


def measured() -> str:
    """All tables of the page."""
    said = "Relative rms errors against float64 in the same run: tilewise, and below it eager attention."
    lines: list[str] = []
    for name, text in TEXTS.items():
        found = load(name)
        run = newest(found)
        lines += ["", *wrapped(f"{text} {found.source(run)}"), "", *times(found, run)]
        lines += ["", *wrapped(said), "", *errors(found, run)]
    return "\n".join(lines[1:])


QUOTED = {"measured": measured}
