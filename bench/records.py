"""The one form of every result: JSON lines, first the record of a run, then its results. bench/results/README.md describes it.

A result is one number. :func:`entries` puts together all that one contestant did on one case. A script keeps them as they come:

options = parser(__doc__).parse_args()
log = Log.begin("python -m bench.calls serving", options, PEERS)
log.race("block", {("tilewise", "both"): step, ("sdpa", "both"): other})   # the times of calls in turns
log.add("plan-causal-n4096", "tilewise", "forward", "plan", 0.2, shape={"seqlen": 4096})
"""

import argparse
import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench import measure

METRICS = {
    "time": "ms",
    "rate": "TFLOP/s",
    "bandwidth": "GB/s",
    "host": "us",
    "plan": "ms",
    "memory": "MiB",
    "error": "of what is allowed",
    "right": "calls",
    "loss": "nats/byte",
    "accuracy": "of the answers",
    "traffic": "MB",
}
"""Each metric has one unit. README.md of the results says what each metric measures."""

PASSES = ("forward", "backward", "both", "step", "exchange")
STATUSES = ("green", "loose", "red", "refused", "failed", "limit")

RUN = ("run", "when", "command", "device", "versions", "peers", "sm_clock_mhz", "commit")
RESULT = ("run", "case", "contestant", "pass", "metric", "unit", "value")
MIB = 2**20


class Refused(ValueError):
    """A file that cannot be read or judged: it holds no results, or they were not measured side by side."""


def faults(record: object) -> list[str]:
    """The reasons why a line is no record of this form; empty: it is one."""
    kind = record.get("record") if isinstance(record, dict) else None
    if kind not in ("run", "result"):
        return ["no record of a run or a result; `tilewise bench` writes such files"]
    found = [f"{name} is missing" for name in (RUN if kind == "run" else RESULT) if name not in record]
    if kind == "run" or found:
        return found
    if record["unit"] != METRICS.get(record["metric"]):
        found.append(f"{record['unit']!r} is not the unit of the metric {record['metric']!r}")
    if record["pass"] not in PASSES:
        found.append(f"pass is {record['pass']!r}, not one of {', '.join(PASSES)}")
    if record["value"] is None and not record.get("why"):
        found.append("a result without a value says why")
    if record["metric"] == "error" and record.get("status") not in STATUSES:
        found.append(f"an error's status is one of {', '.join(STATUSES)}")
    return found


def read(path: Path) -> list[dict]:
    """The records of a file. Raises Refused, naming the line, for a file that holds anything else."""
    try:
        text = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}") from error
    records = [_record(path, number, line) for number, line in enumerate(text, 1) if line.strip()]
    if not records:
        raise Refused(f"{path} is empty")
    runs = {r["run"] for r in records if r["record"] == "run"}
    if not runs or {r["run"] for r in records} - runs:
        raise Refused(f"{path} has results without the record of their run: machine, versions and commit are unknown")
    return records


def _record(path: Path, number: int, line: str) -> dict:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise Refused(f"{path}, line {number}: no JSON ({error.msg})") from error
    wrong = faults(record)
    if wrong:
        raise Refused(f"{path}, line {number}: {'; '.join(wrong)}")
    return record


def result(run: str, case: str, contestant: str, direction: str, metric: str, value: Any, **more: Any) -> dict:
    """One result; its unit follows from the metric."""
    head = {"record": "result", "run": run, "case": case, "contestant": contestant, "pass": direction}
    return head | {"metric": metric, "unit": METRICS[metric], "value": value} | more


def run(command: str, device: str, peers: dict[str, str], **more: Any) -> dict:
    """The record of a run that begins now on this machine, under a name of its own."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    head = {"record": "run", "run": uuid.uuid4().hex[:12], "when": when, "command": command}
    return head | {"peers": peers, "sm_clock_mhz": None} | measure.machine(device) | more


def append(records: Iterable[dict], path: Path) -> list[dict]:
    """Appends records to a file as they come, so that an interrupted run keeps what it measured. Returns them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
            file.flush()
            kept.append(record)
    return kept


# ---- a script's results ---------------------------------------------------------------------------------------------


def parser(doc: str) -> argparse.ArgumentParser:
    """The options of every script: the device, and the file that results are appended to."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    found.add_argument("--out", type=Path, default=Path("out/results.jsonl"), help="JSON lines are appended here")
    return found


@dataclass(frozen=True)
class Log:
    """A run, whose results are appended to a file and shown on a line each."""

    head: dict
    out: Path
    device: str = "cpu"

    @classmethod
    def begin(
        cls,
        command: str,
        options: argparse.Namespace,
        peers: Mapping[str, str],
        packages: Iterable[str] = (),
        **more: Any,
    ) -> "Log":
        """Write the record of a run; ``packages``: those whose versions a reader needs beside torch's."""
        head = run(command, options.device, dict(peers), **more)
        head["versions"] |= measure.versions(*packages)
        append([head], options.out)
        return cls(head, options.out, options.device)

    def add(self, case: str, who: str, direction: str, metric: str, value: float | None, **more: Any) -> dict:
        """Keep, show and return a result; one without a value has ``why``, a list of reasons."""
        if value is not None:
            value = round(value, 5)
        found = result(self.head["run"], case, who, direction, metric, value, **more)
        append([found], self.out)
        print(line(found), flush=True)
        return found

    def race(
        self,
        case: str,
        calls: Mapping[tuple[str, str], Callable[[], object]],
        metric: str = "time",
        shape: dict | None = None,
        **turns: Any,
    ) -> None:
        """Keep milliseconds of the calls of contestants and passes, which take turns (:func:`measure.in_turns`)."""
        more = {} if shape is None else {"shape": shape}
        for (who, direction), ms in measure.in_turns(calls, self.device, **turns).items():
            self.add(case, who, direction, metric, ms, **more)

    def without(self, case: str, who: str, direction: str, metric: str, error: Exception | str, **more: Any) -> None:
        """Keep why a contestant has no number, by the first line that says so."""
        self.add(case, who, direction, metric, None, why=[str(error).strip().partition("\n")[0][:300]], **more)


def line(found: dict) -> str:
    """A result as text: its value, and the numbers beside it."""
    start = f"{found['case']:40} {found['contestant']:20} {found['pass']:8}"
    if found["value"] is None:
        return f"{start} {'; '.join(found['why'])}"
    beside = [f"{name} {x:.4g}" for name, x in found.items() if name != "value" and isinstance(x, int | float)]
    return " ".join([start, f"{found['value']:12.4f} {found['unit']}", *beside])


# ---- entries --------------------------------------------------------------------------------------------------------


def entries(records: Iterable[dict]) -> list[dict]:
    """All that each contestant did on each case in each run, in the file's order."""
    found: dict[tuple, dict] = {}
    for r in records:
        if r["record"] == "run" or r["contestant"] == "bound":
            continue
        head = {name: r[name] for name in ("run", "case", "contestant")}
        entry = found.setdefault(tuple(head.values()), head | {"status": "green"})
        if r["metric"] == "error":
            entry |= {"share": r["value"], "why": []} | {n: r[n] for n in ("status", "why", "checked") if n in r}
        elif r["metric"] == "memory":
            entry["memory"] = {f"{n}_bytes": r[x] * MIB for n, x in (("extra", "value"), ("peak", "peak")) if x in r}
        elif r["metric"] == "time":
            ms = {f"{n}_ms": r[x] for n, x in (("median", "value"), ("low", "low"), ("high", "high")) if x in r}
            entry[r["pass"]] = ms | {n: r[n] for n in ("noise", "tflops") if n in r}
    return list(found.values())


# ---- reading for pages and plots --------------------------------------------------------------------------------------


def runs(records: Iterable[dict]) -> dict[str, dict]:
    """The record of each run, by its name."""
    return {r["run"]: r for r in records if r["record"] == "run"}


def select(records: Iterable[dict], **wanted: Any) -> Iterator[dict]:
    """The results whose fields have these values; ``direction`` stands for the field ``pass``."""
    if "direction" in wanted:
        wanted["pass"] = wanted.pop("direction")
    for r in records:
        if r["record"] == "result" and all(r.get(name) == value for name, value in wanted.items()):
            yield r


def rate(r: dict) -> float | None:
    """TFLOP/s of a result that is a rate, or a time beside which one was written."""
    return r["value"] if r["metric"] == "rate" else r.get("tflops")
