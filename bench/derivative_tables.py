"""The tables of docs/derivatives.md, written from bench/results by ``python -m bench.page --write``."""

import re

from bench.page import ROOT, Results, load, number, table, wrapped

PAGE = ROOT / "docs" / "derivatives.md"
COMMAND = "python -m bench.derivatives --parts check time"
EAGER = "eager"
TIMES = (512, 1024, 2048, 4096, 8192, 16384)
TENSORS = ("o tangent", "second dq", "second dk", "second dv", "second dsink", "second ddo")


def newest(found: Results) -> str:
    """The newest run that checked derivatives and timed them."""
    runs = [name for name, run in found.runs.items() if run["command"].startswith(COMMAND)]
    return max(runs, key=lambda name: found.runs[name]["when"])


def times(found: Results, run: str) -> list[str]:
    """Milliseconds and MiB by length and head dim, tilewise's, and behind a stroke eager attention's."""
    who = next(iter(found.runs[run]["peers"]))
    rows = []
    for head_dim in (64, 128):
        for n in TIMES:
            cells = {}
            for what, direction in (
                ("forward", "forward"),
                ("jvp", "forward"),
                ("jvp-of-q", "forward"),
                ("backward", "backward"),
                ("second", "backward"),
            ):
                case = f"derivatives-{what}-n{n}-d{head_dim}"
                cells[what] = [found.value(run, case, x, direction, "time") for x in (who, EAGER)]
                cells[f"{what} MiB"] = [found.value(run, case, x, direction, "memory") for x in (who, EAGER)]
            if cells["forward"][0] is None:
                continue
            ratios = [cells[a][0] / cells[b][0] for a, b in (("jvp", "forward"), ("second", "backward"))]
            texts = {
                what: " / ".join(number(x, 2 if x and x < 100 else 0) for x in each) for what, each in cells.items()
            }
            shown = [texts["forward"], texts["jvp"], number(ratios[0], 1), texts["jvp-of-q"]]
            shown += [texts["backward"], texts["second"], number(ratios[1], 1), texts["second MiB"]]
            rows.append([f"{n:,}, D {head_dim}", *shown])
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
            *wrapped(f"Milliseconds, eager attention's behind the stroke. {found.source(run)}"),
            "",
            *times(found, run),
        ]
        lines += [
            "",
            *wrapped("Relative rms errors against float64 in the same run, eager attention's behind the stroke."),
        ]
        lines += ["", *errors(found, run)]
    return "\n".join(lines[1:])


def quoted(text: str) -> str:
    """The text of the page with its tables as the results have them now."""
    return re.sub(
        r"(?s)(<!-- measured -->\n).*?(\n<!-- /measured -->)", lambda found: f"{found[1]}{measured()}{found[2]}", text
    )
