"""What runs where: every backend's ``unsupported`` over the case table, as ``tests/support.json`` and the README's table.

python -m tests.support --write
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from bench import cases
from tests.backends.contract import of_case
from tilewise import dispatch

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tests" / "support.json"
README = ROOT / "README.md"
RUNS = "runs"

# README's rows: what a user would look for, and the cases that must run for a tick.
FEATURES = {
    "any length, queries ≠ keys, empty rows": ["n1000-full", "more-queries-causal", "decode-causal"],
    "`causal`, `window`": ["gqa-causal", "window-8", "window-both-cross"],
    "`prefix`, `key_range`, `key_lengths`, `documents`": ["prefix", "key-range", "key-lengths", "documents"],
    "`keep`, `dense`, `block_sparse`, unions": ["keep-odd", "dense", "sparse-16", "window-or-first"],
    "`softcap`, `alibi`, `bias`, any `score`, with gradients": ["softcap-2", "alibi", "bias", "relative"],
    "sinks, `lse` with gradient": ["sink", "sink-window-softcap"],
    "dropout": ["dropout", "dropout-causal-alibi-sink"],
    "GQA, MQA": ["gqa-full", "mqa-causal"],
    "head_dim of v ≠ of q": ["dv-above-d-full", "dv-below-d-causal"],
    "any head_dim (1, 513)": ["d1-full", "d513-causal"],
    "packed sequences (`attention_varlen`)": ["packed-full", "packed-causal-cross", "packed-alibi-sink"],
    "bf16, fp16": ["bfloat16-causal", "float16-causal"],
    "fp32": ["gqa-causal"],
    "fp64": ["float64-causal"],
}


def devices(row: dispatch.Row) -> str:
    return row.device_types[0] if row.device_types else "cpu"


def current() -> dict[str, dict[str, str | list[str]]]:
    """``{backend: {case: "runs" or the reasons}}``; a GPU backend is asked about a GPU's problem, wherever this runs."""
    table: dict[str, dict] = {}
    for row in (*dispatch.BACKENDS, *dispatch.NAMED_ONLY):
        table[row.name] = {}
        for case in cases.tagged("contract"):
            p = replace(of_case(case).p, device=torch.device(devices(row)))
            reasons = dispatch.backend(row.name).unsupported(p)
            table[row.name][case.name.removeprefix("contract-")] = reasons or RUNS
    return table


def readme_table(support: dict[str, dict]) -> str:
    """Markdown: a row a feature, a column a backend."""
    rows = list(dispatch.BACKENDS)
    where = {
        row.name: "GPU" if row.device_types == ("cuda",) else "CPU" if row.device_types else "any device"
        for row in rows
    }
    lines = [
        "| | " + " | ".join(f"`{row.name}` ({where[row.name]})" for row in rows) + " |",
        "|---" * (len(rows) + 1) + "|",
    ]
    for feature, names in FEATURES.items():
        ticks = ["✓" if all(support[row.name][n] == RUNS for n in names) else "–" for row in rows]
        lines.append(f"| {feature} | {' | '.join(ticks)} |")
    return "\n".join(lines)


def with_block(text: str, name: str, block: str) -> str:
    """``text`` with what stands between the markers ``<!-- name -->`` and ``<!-- /name -->`` replaced."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    head, _, rest = text.partition(start)
    return f"{head}{start}\n{block}\n{end}{rest.partition(end)[2]}"


def main() -> None:
    support = current()
    if "--write" not in sys.argv:
        print(readme_table(support))
        return
    FILE.write_text(json.dumps(support, indent=1, sort_keys=True) + "\n")
    README.write_text(with_block(README.read_text(), "support", readme_table(support)))


if __name__ == "__main__":
    main()
