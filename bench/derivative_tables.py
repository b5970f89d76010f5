"""The tables of docs/derivatives.md, written from bench/results by ``python -m bench.page --write``."""

import re

from bench.tables import Results, load, number, table, wrapped

COMMAND = "python -m bench.derivatives --parts check time"
EAGER = "eager"
TIMES = (512, 1024, 2048, 4096, 8192, 16384)
TENSORS = ("o tangent", "second dq", "second dk", "second dv", "second dsink", "second ddo")


TEXTS = {
    "triton-calls": "Milliseconds, and memory beyond inputs and outputs. Each column of tilewise has eager attention's beside it.",
    "cpu-calls": (
        "One thread of a shared CPU, where only ratios of times measured in turns mean something: multiples of tilewise's forward and "
        "of its backward. Each column of tilewise has eager attention's beside it."
    ),
}


def newest(found: Results) -> str:
    """The newest run that checked derivatives and timed them."""
    runs = [name for name, run in found.runs.items() if run["command"].startswith(COMMAND)]
    return max(runs, key=lambda name: found.runs[name]["when"])


CASES = (
    ("forward", "forward"),
    ("jvp", "forward"),
    ("jvp-of-q", "forward"),
    ("backward", "backward"),
    ("second", "backward"),
)
PASSES = {"forward": ("jvp", "jvp-of-q"), "backward": ("second", "second MiB")}
"""What is shown beside each pass, and in its multiples."""


def measured_at(found: Results, run: str, size: str) -> dict[str, list[float | None]]:
    """Pairs of tilewise's and eager attention's milliseconds by what is measured or, with " MiB" behind its name, of their MiB."""
    who = (next(iter(found.runs[run]["peers"])), EAGER)
    cells: dict[str, list[float | None]] = {}
    for what, direction in CASES:
        for metric, suffix in (("time", ""), ("memory", " MiB")):
            case = f"derivatives-{what}-{size}"
            cells[what + suffix] = [found.value(run, case, x, direction, metric) for x in who]
    return cells


def times(found: Results, run: str) -> list[str]:
    """A table of forward mode and one of second derivatives by length and head dim, each column of tilewise beside eager's.

    Milliseconds and multiples of forward and backward; of a CPU, whose cores others used too, only multiples.
    """
    relative = "NVIDIA" not in found.runs[run]["device"]
    by_size = {f"{n:,}, D {dim}": measured_at(found, run, f"n{n}-d{dim}") for dim in (64, 128) for n in TIMES}
    by_size = {size: cells for size, cells in by_size.items() if cells["forward"][0] is not None}
    lines: list[str] = []
    for base, names in PASSES.items():
        shown, over = (names, base) if relative else ((base, *names), "")
        header = ["N", *(title for name in shown for title in (_title(name, over), EAGER))]
        rows = [[size, *_cells(cells, shown, over)] for size, cells in by_size.items()]
        if not relative:
            header.append(_title(names[0], base))
            for row, cells in zip(rows, by_size.values(), strict=True):
                row.append(number(cells[names[0]][0] / cells[base][0], 1))
        lines += ["", *table(header, rows)]
    return lines[1:]


def _title(name: str, over: str) -> str:
    text = {"jvp": "`jvp`", "jvp-of-q": "`jvp` of q", "second MiB": "second, MiB"}.get(name, name)
    return f"{text} over {over}" if over and "MiB" not in name else text


def _cells(cells: dict[str, list[float | None]], shown: tuple[str, ...], over: str) -> list[str]:
    texts = []
    for name in shown:
        unit = cells[over][0] if over and "MiB" not in name else 1.0
        texts += [number(x and x / unit, 2 if x and x / unit < 100 else 0) for x in cells[name]]
    return texts


def errors(found: Results, run: str) -> list[str]:
    """The relative rms errors of each derivative, a row of tilewise's and one of eager attention's, a column for each case."""
    rows = {r["case"]: r for key, r in found.found.items() if key[0] == run and r["metric"] == "error"}
    cases = dict.fromkeys((r["shape"]["case"], r["shape"]["dtype"]) for r in rows.values())
    by_place = {(r["shape"]["tensor"], r["shape"]["case"], r["shape"]["dtype"]): r for r in rows.values()}
    lines = []
    for tensor in TENSORS:
        places = [by_place.get((tensor, *case)) for case in cases]
        for who, name in (("rms", tensor), ("rms_eager", f"… {EAGER}")):
            lines.append([name, *("—" if r is None else f"{r[who]:.1e}" for r in places)])
    return table(["", *(f"{case}, {dtype}" for case, dtype in cases)], lines)


def measured() -> str:
    """The part of the page between its marks."""
    lines: list[str] = []
    for name in ("triton-calls", "cpu-calls"):
        found = load(name)
        run = newest(found)
        lines += [
            "",
            *wrapped(f"{TEXTS[name]} {found.source(run)}"),
            "",
            *times(found, run),
        ]
        lines += [
            "",
            *wrapped(
                "Relative rms errors against float64 in the same run, tilewise's and below them eager attention's."
            ),
        ]
        lines += ["", *errors(found, run)]
    return "\n".join(lines[1:])


def quoted(text: str) -> str:
    """The text of the page with its tables as the results have them now."""
    return re.sub(
        r"(?s)(<!-- measured -->\n).*?(\n<!-- /measured -->)", lambda found: f"{found[1]}{measured()}{found[2]}", text
    )
