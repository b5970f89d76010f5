"""The one form of every result: JSON lines, first the record of a run, then its results. bench/results/README.md describes it.

A result is one number. :func:`entries` puts together all that one contestant did on one case.
"""

import json
import uuid
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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
