"""What the scripts share that measure no case of `cases.py`: their options, the record of their run, and results kept as they come.

options = parser(__doc__).parse_args()
log = Log.begin("python -m bench.plans", options, PEERS)
log.race("block", {("tilewise", "both"): step, ("sdpa", "both"): other}, "cuda")   # keeps the times of calls in turns
log.add("plan-causal-n4096", "tilewise", "forward", "plan", 0.2, shape={"seqlen": 4096})
"""

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import measure, records


def parser(doc: str, devices: tuple[str, ...] | None = ("cuda", "cpu")) -> argparse.ArgumentParser:
    """The options of every script: the device, one of some or any, and the file that results are appended to."""
    found = argparse.ArgumentParser(description=doc.partition("\n")[0])
    found.add_argument("--device", choices=devices, default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument("--out", type=Path, default=Path("out/results.jsonl"), help="JSON lines are appended here")
    return found


@dataclass(frozen=True)
class Log:
    """A run, whose results are appended to a file and shown on a line each."""

    head: dict
    out: Path

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
        head = records.run(command, options.device, dict(peers), **more)
        head["versions"] |= measure.versions(*packages)
        records.append([head], options.out)
        return cls(head, options.out)

    def add(self, case: str, who: str, direction: str, metric: str, value: float | None, **more: Any) -> dict:
        """Keep, show and return a result; one without a value has ``why``, a list of reasons."""
        if value is not None:
            value = round(value, 5)
        found = records.result(self.head["run"], case, who, direction, metric, value, **more)
        records.append([found], self.out)
        print(line(found), flush=True)
        return found

    def race(
        self, case: str, calls: Mapping[tuple[str, str], Callable[[], object]], device: str, metric: str = "time",
        shape: dict | None = None, **turns: Any,
    ) -> None:  # fmt: skip
        """Keep milliseconds of the calls of contestants and passes, which take turns (:func:`measure.in_turns`)."""
        more = {} if shape is None else {"shape": shape}
        for (who, direction), ms in measure.in_turns(calls, device, **turns).items():
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
