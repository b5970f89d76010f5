"""What runs where: every backend's ``unsupported`` over the case table, as ``tests/support.json`` and the README's table;
and what ``explain`` says of three calls on the machine that writes it.

python -m tests.support --write
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

import tilewise as tw
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


def explain_block() -> str:
    """Three calls and what ``explain`` says of them on this machine."""
    calls = {
        "tw.explain(q, k, v, causal=True)": ({}, {"causal": True}),
        "tw.explain(q, k, v, mask=tw.window(left=1023, right=0), score=tw.softcap(30.0))": (
            {"heads_k": 2, "dtype": torch.bfloat16},
            {"mask": tw.window(left=1023, right=0), "score": tw.softcap(30.0)},
        ),
        'tw.explain(q, k, v, backend="reference")': ({"seqlen": 16384}, {"backend": "reference"}),
    }
    parts = []
    for text, (sizes, options) in calls.items():
        seqlen, heads_k, dtype = (
            sizes.get(name, d) for name, d in (("seqlen", 4096), ("heads_k", 8), ("dtype", torch.float32))
        )
        q, k, v = (torch.empty(1, seqlen, heads, 64, dtype=dtype) for heads in (8, heads_k, heads_k))
        parts.append(f">>> print({text})\n{tw.explain(q, k, v, **options)}")
    return "```\n" + "\n".join(parts) + "\n```"


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
    readme = with_block(README.read_text(), "support", readme_table(support))
    README.write_text(with_block(readme, "explain", explain_block()))


if __name__ == "__main__":
    main()
