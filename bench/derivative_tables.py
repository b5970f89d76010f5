"""The tables of docs/derivatives.md, written from bench/results by ``python -m bench.page --write``."""

import re

from bench.tables import Results, load, number, table, wrapped

COMMAND = "python -m bench.derivatives --parts check time"
EAGER = "eager"
TIMES = (512, 1024, 2048, 4096, 8192, 16384)
TENSORS = ("o tangent", "second dq", "second dk", "second dv", "second dsink", "second ddo")


TEXTS = {
    "triton-calls": "Milliseconds, and memory beyond inputs and outputs, as tilewise / eager attention.",
    "cpu-calls": (
        "One thread of a shared CPU, where only ratios of times measured in turns mean something: multiples of tilewise's forward and "
        "of its backward, as tilewise / eager attention."
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
    """Times and MiB by length and head dim, eager attention's behind a stroke.

    Milliseconds and, of forward mode and the second derivative, multiples of forward and backward; of a CPU, whose cores others used
    too, only multiples.
    """
    relative = "NVIDIA" not in found.runs[run]["device"]
    rows = []
    for head_dim in (64, 128):
        for n in TIMES:
            cells = measured_at(found, run, f"n{n}-d{head_dim}")
            if cells["forward"][0] is None:
                continue

            def text(what: str, unit: float | None = 1.0, cells=cells) -> str:
                return " / ".join(number(x and x / unit, 2 if x and x / unit < 100 else 0) for x in cells[what])

            forward, backward = cells["forward"][0], cells["backward"][0]
            if relative:
                shown = [text(what, forward) for what in ("jvp", "jvp-of-q")] + [text("second", backward)]
            else:
                over = [cells["jvp"][0] / forward, cells["second"][0] / backward]
                shown = [text("forward"), text("jvp"), number(over[0], 1), text("jvp-of-q"), text("backward")]
                shown += [text("second"), number(over[1], 1)]
            rows.append([f"{n:,}, D {head_dim}", *shown, text("second MiB")])
    titles = [
        "N",
        "forward",
        "`jvp`",
        "over forward",
        "`jvp` of q",
        "backward",
        "second",
        "over backward",
        "second, MiB",
    ]
    if relative:
        titles = ["N", "`jvp` over forward", "`jvp` of q over forward", "second over backward", "second, MiB"]
    return table(titles, rows)


def errors(found: Results, run: str) -> list[str]:
    """The relative rms errors of each derivative, tilewise's and behind a stroke eager attention's, a column for each case."""
    rows = {r["case"]: r for key, r in found.found.items() if key[0] == run and r["metric"] == "error"}
    cases = dict.fromkeys((r["shape"]["case"], r["shape"]["dtype"]) for r in rows.values())
    by_place = {(r["shape"]["tensor"], r["shape"]["case"], r["shape"]["dtype"]): r for r in rows.values()}
    lines = []
    for tensor in TENSORS:
        cells = [by_place.get((tensor, *case)) for case in cases]
        lines.append([tensor, *("—" if r is None else f"{r['rms']:.1e} / {r['rms_eager']:.1e}" for r in cells)])
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
            *wrapped("Relative rms errors against float64 in the same run, as tilewise / eager attention."),
        ]
        lines += ["", *errors(found, run)]
    return "\n".join(lines[1:])


def quoted(text: str) -> str:
    """The text of the page with its tables as the results have them now."""
    return re.sub(
        r"(?s)(<!-- measured -->\n).*?(\n<!-- /measured -->)", lambda found: f"{found[1]}{measured()}{found[2]}", text
    )
