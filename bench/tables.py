"""Results as tables of markdown: what the scripts that write pages share."""

import math
import re
import textwrap
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TypeVar

from bench.measure import ROOT
from bench.records import rate, read, runs, select

RESULTS = ROOT / "bench" / "results"
WIDTH = 160
NONE = "—"
PASSES = ("forward", "backward")
Row, Column, Item = TypeVar("Row"), TypeVar("Column"), TypeVar("Item")
Named = dict[str, Item] | list[tuple[str, Item]]
"""Things by their titles; in a list, titles may be alike."""


class Results:
    """The results of one file of bench/results.

    Attributes:
        records: all of them. runs: the record of each run by its name. found: results by run, case, contestant, pass and metric.
    """

    def __init__(self, name: str):
        self.records = read(RESULTS / f"{name}.jsonl")
        self.runs = runs(self.records)
        names = ("run", "case", "contestant", "pass", "metric")
        self.found = {tuple(r[name] for name in names): r for r in select(self.records)}

    def value(self, run: str, case: str, who: str, direction: str, metric: str) -> float | None:
        """The number that was measured, or None."""
        return self.found.get((run, case, who, direction, metric), {}).get("value")

    def rate(self, runs: Iterable[str], case: str, who: str, direction: str) -> tuple[str, float] | None:
        """The first of the runs that timed a contestant on a case, and its TFLOP/s there."""
        for run in runs:
            for metric in ("rate", "time"):
                if r := self.found.get((run, case, who, direction, metric)):
                    return run, rate(r)
        return None

    def cases(self, *runs: str) -> dict[str, dict]:
        """The shape of each case of the runs by its name, in the file's order."""
        return {r["case"]: r.get("shape", {}) for key, r in self.found.items() if key[0] in runs}

    def last(self, case: str) -> str | None:
        """The newest run that has a case, or None."""
        runs = {key[0] for key in self.found if key[1] == case}
        return max(runs, key=lambda run: self.runs[run]["when"], default=None)

    def run_of(self, command: str) -> str | None:
        """The last run of a command as it is today, or None."""
        return next((run for run in reversed(self.runs) if today(self.runs[run]["command"]) == command), None)

    def newest(self, case: str, contestants: tuple[str, ...], direction: str) -> list[float]:
        """The times of contestants in the newest run that timed all of them on the case; none where no run did."""
        for run in sorted(self.runs, key=lambda name: self.runs[name]["when"], reverse=True):
            times = [self.value(run, case, who, direction, "time") for who in contestants]
            if None not in times:
                return times
        return []

    def source(self, *runs: str) -> str:
        """The machine, the date, the versions and the command of runs, and a command that measures the like, as sentences."""
        first = self.runs[runs[0]]
        dates = sorted({self.runs[run]["when"][:10] for run in runs})
        commits = sorted({str(self.runs[run]["commit"]).rstrip("+") for run in runs} - {"None"})
        commit = f", commit {commits[-1]}" if len(commits) == 1 else ""
        if "again" in first:
            command = f"{first['command']}; `{today(first['again'])}` measures such rows again"
        else:
            command = today(first["command"]) if "`" in first["command"] else f"`{today(first['command'])}`"
            command += "" if runs_today(command) else " of that commit" + again(command)
        return f"{machine(first)}, {' and '.join(dates)}, torch {first['versions']['torch']}{commit}; measured by {command}."


MOVED = {
    "bench.gpu_training": "examples.gpt.gpu_training",
    "bench.gpt_speed": "tilewise_papers.gpt_speed",
    "bench.traffic": "tilewise_papers.traffic",
    "bench.derivatives --parts check time --sizes 512 1024 2048 4096 8192 16384": "bench.calls derivatives",
    "bench.derivatives --parts check time --sizes 512 1024 2048": "bench.calls derivatives",
    "bench.plans --cases masks": "bench.calls plans",
    **{f"bench.{part}": f"bench.calls {part}" for part in ("doors", "generate", "models", "new_lengths", "triangles")},
}
"""Commands of modules that measured under another name."""
AGAIN = {"bench.windows": "tilewise bench --tag windows", "bench.shares": "tilewise bench --tag shares"}
"""Commands that measure today what modules which are gone did."""


def again(command: str) -> str:
    """Return a clause on the command that measures what a recorded one did, if there is one."""
    found = [new for old, new in AGAIN.items() if old in command]
    return f"; `{found[0]}` measures it again" if found else ""


def today(command: str) -> str:
    """Return a recorded command with the names that its modules have now."""
    for old, new in MOVED.items():
        command = command.replace(f"python -m {old}", f"python -m {new}")
    return command


def runs_today(command: str) -> bool:
    """Return whether the modules that a command runs are still there."""
    paths = [name.replace(".", "/") + ".py" for name in re.findall(r"python -m ([\w.]+)", command)]
    return all((ROOT / path).exists() or (ROOT / "src" / path).exists() for path in paths)


def machine(run: dict) -> str:
    """The processor of a run, with its threads where it is a CPU."""
    threads = (
        f", {run['threads']} thread{'s' * (run['threads'] != 1)}"
        if "NVIDIA" not in run["device"] and run.get("threads")
        else ""
    )
    return run["device"].replace("(R)", "") + threads


@cache
def load(name: str) -> Results:
    """The results of bench/results/NAME.jsonl."""
    return Results(name)


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of positive numbers."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def table(header: list[str], rows: Iterable[list[str]]) -> list[str]:
    """A markdown table, the first column aligned left and the others right."""
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (header, ruler, *rows)]


def grid(
    rows: Named[Row],
    columns: Named[Column],
    cell: Callable[[Row, Column], float | str | None],
    digits: int | None = None,
    corner: str = "",
) -> list[str]:
    """A table with a title for each row and column; ``cell`` gives the number, or the text, that stands where two of them meet."""
    rows, columns = ([*x.items()] if isinstance(x, dict) else x for x in (rows, columns))
    lines = [[title, *(number(cell(row, column), digits) for _, column in columns)] for title, row in rows]
    return table([corner, *(title for title, _ in columns)], lines)


def titled(title: str, lines: list[str]) -> list[str]:
    """A table below its title."""
    return [f"**{title}**", "", *lines]


def by_pass(rows: Named[Row], columns: Named[Column], cell: Callable[..., object], digits: int | None = None) -> list:
    """Two tables of ``cell(direction, row, column)``, of the forward and of the backward."""
    return [titled(d.capitalize(), grid(rows, columns, partial(cell, d), digits)) for d in PASSES]


def wrapped(text: str) -> list[str]:
    """The lines of a paragraph."""
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def section(title: str, text: str, *tables: list[str]) -> list[str]:
    """A heading, its paragraph, if any, and what follows it: tables, a plot or another paragraph."""
    lines = ["", f"## {title}", *(["", *wrapped(text)] if text else [])]
    for each in tables:
        lines += ["", *each]
    return lines


def number(value: float | str | None, digits: int | None = None) -> str:
    """The number as text, to a whole one from 10 on unless ``digits`` are given, or a dash where there is none; text as it is."""
    if isinstance(value, str):
        return value
    return NONE if value is None else f"{value:,.{int(value < 10) if digits is None else digits}f}"


def pair(values: Iterable[float | None], digits: int | None = None) -> str:
    """Two numbers, of the forward and the backward or of full and causal, as text."""
    texts = [number(value, digits) for value in values]
    return NONE if set(texts) == {NONE} else " / ".join(texts)


def spread(values: Iterable[float | None], digits: int = 0) -> str:
    """The range of the numbers that there are, as text."""
    known = [value for value in values if value is not None]
    if not known:
        return NONE
    least, most = (f"{value:.{digits}f}" for value in (min(known), max(known)))
    return least if least == most else f"{least} to {most}"
