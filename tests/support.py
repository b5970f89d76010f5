"""What runs where, as each backend's ``unsupported`` answers for the case table and the architectures.

It is written to ``tests/support.json``, to the tables of README.md and docs/support.md, and to docs/architectures.md.
docs/support.md also gets what ``explain`` says of three calls on the machine that writes it.

python -m tests.support --write
"""

from __future__ import annotations

import inspect
import json
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise as tw
from bench import cases
from bench.testing import of_case
from examples import architectures
from tilewise import dispatch, problem
from tilewise.spec import parse_spec

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tests" / "support.json"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "support.md"
ARCHITECTURES = ROOT / "docs" / "architectures.md"
RUNS, FORWARD = "runs", "runs without gradients"

ARCHITECTURES_HEAD = """# Attention as models call it

This page has the attention of published models as complete calls that you can copy. The shortest one is a causal language model:

```python
o = tw.attention(q, k, v, causal=True)  # (batch, seqlen, heads, head_dim)
```

Every block begins with `import math`, `import torch` and `import tilewise as tw`, and compiles with
`torch.compile(fullgraph=True)`. `tw.lookup(t, h, i)` reads a table as `t[h, i]` does. Floating tensors get gradients.

`tests/test_architectures.py` runs each call at odd sizes on the CPU and compares o and all gradients with the textbook. The
calls are in `examples/architectures.py`. The table shows what each backend answers at the model's size, in bf16, forward and
backward; `python -m tests.support --write` writes this page."""

# The rows of docs/support.md: what a user would look for, and the cases that must run for a tick.
FEATURES = {
    "any length, queries ≠ keys, empty rows": ["n1000-full", "more-queries-causal", "decode-causal"],
    "`causal`, `window`": ["gqa-causal", "window-8", "window-both-cross"],
    "`prefix`, `key_range`, `key_lengths`, `documents`": ["prefix", "key-range", "key-lengths", "documents"],
    "`keep`, `dense`, `block_sparse`, unions": ["keep-odd", "dense", "sparse-16", "window-or-first"],
    "`selected`": ["selected", "selected-causal-cross", "selected-16"],
    "a score beside `selected`": ["selected-mqa-softcap"],
    "`softcap`, `alibi`, `bias`, any `score`, with gradients": ["softcap-2", "alibi", "bias", "relative"],
    "sinks, `lse` with gradient": ["sink", "sink-window-softcap"],
    "dropout": ["dropout", "dropout-causal-alibi-sink"],
    "GQA, MQA": ["gqa-full", "mqa-causal"],
    "head_dim of v ≠ of q": ["dv-above-d-full", "dv-below-d-causal"],
    "head_dim 1": ["d1-full"],
    "head_dim 513": ["d513-causal"],
    "packed sequences (`attention_varlen`)": ["packed-full", "packed-causal-cross", "packed-window-softcap"],
    "bf16, fp16": ["bfloat16-causal", "float16-causal"],
    "fp32": ["float32-causal"],
    "fp64": ["float64-causal"],
}


# The rows of README.md: each stands for some rows of FEATURES, by the words that their titles begin with.
SUMMARY = {
    "any mask, any length, GQA, packed sequences, sinks": ("any length", "`causal`", "`prefix`", "`keep`", "GQA", "packed", "sinks"),
    "keys selected by each query": ("`selected`",),
    "softcap, ALiBi, bias, any score function": ("`softcap`",),
    "dropout": ("dropout",),
    "head_dim above 512": ("head_dim 513",),
    "bf16, fp16": ("bf16",),
    "fp32": ("fp32",),
    "fp64": ("fp64",),
}  # fmt: skip

SIXTEEN_BITS = ("hopper",)
WHERE = {"hopper": "Hopper GPU, 16 bits"}
TICKS = {RUNS: "✓", FORWARD: "forward"}


def devices(row: dispatch.Row) -> str:
    return row.device_types[0] if row.device_types else "cpu"


def current() -> dict[str, dict[str, str | list[str]]]:
    """``{backend: {case: "runs", "runs without gradients" or the reasons}}``.

    A GPU backend is asked about a GPU's problem, wherever this runs, and one with kernels to be built as if they were; one
    that takes 16 bits alone in bf16, unless the case is about a dtype.
    """
    problems = {case.name.removeprefix("contract-"): of_case(case).p for case in cases.tagged("contract")}
    problems["float32-causal"] = problems["gqa-causal"]
    problems |= {f"architecture-{row.name}": architecture_problem(row) for row in architectures.ROWS}
    table: dict[str, dict] = {}
    for row in (*dispatch.BACKENDS, *dispatch.NAMED_ONLY):
        backend, device = dispatch.backend(row.name), torch.device(devices(row))
        asked = {name: replace(p, device=device) for name, p in problems.items()}
        if row.name in SIXTEEN_BITS:
            asked = {name: p if "float" in name else in_bf16(p) for name, p in asked.items()}
        table[row.name] = {name: answer(backend, p) for name, p in asked.items()}
    return table


def answer(backend, p: problem.Problem) -> str | list[str]:
    refused = getattr(backend, "refused", backend.unsupported)
    alone = replace(p, spec=replace(p.spec, needs_grad=False))
    return RUNS if not refused(p) else FORWARD if not refused(alone) else list(refused(p))


def in_bf16(p: problem.Problem) -> problem.Problem:
    return replace(p, **{name: getattr(p, name)._replace(dtype=torch.bfloat16) for name in "qkv"})


class _Recorder(TorchDispatchMode):
    """Keeps the problem of every attention that is called under it."""

    def __init__(self):
        super().__init__()
        self.problems: list[problem.Problem] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.tilewise.attention.default:
            *tensors, spec = args
            self.problems.append(problem.check(*tensors, parse_spec(spec)))
        return func(*args, **(kwargs or {}))


@cache
def architecture_problem(row) -> problem.Problem:
    """What the row's call asks for at the model's size, in bf16 and with every gradient; nothing is computed."""
    x = architectures.arguments(row.full, torch.bfloat16, "meta")
    with _Recorder() as recorder:
        row.call(**x)
    (asked,) = recorder.problems
    return asked


def summary() -> dict[str, list[str]]:
    """The rows of README.md with the cases of the features that they stand for."""
    of = lambda words: [cases for title, cases in FEATURES.items() if title.startswith(words)]  # noqa: E731
    return {title: [case for cases in of(words) for case in cases] for title, words in SUMMARY.items()}


def support_table(support: dict[str, dict], features: dict[str, list[str]]) -> str:
    """Markdown: a row a feature, a column a backend."""
    rows = list(dispatch.BACKENDS)
    where = {
        row.name: WHERE.get(row.name)
        or ("GPU" if row.device_types == ("cuda",) else "CPU" if row.device_types else "any device")
        for row in rows
    }
    lines = [
        "| | " + " | ".join(f"`{row.name}` ({where[row.name]})" for row in rows) + " |",
        "|---" * (len(rows) + 1) + "|",
    ]
    for feature, names in features.items():
        ticks = [tick([support[row.name][n] for n in names]) for row in rows]
        lines.append(f"| {feature} | {' | '.join(ticks)} |")
    return "\n".join(lines)


def tick(answers: list[str | list[str]]) -> str:
    """Of cases together: the least that one says."""
    if any(isinstance(said, list) for said in answers):
        return "–"
    return TICKS[FORWARD if FORWARD in answers else RUNS]


def architectures_page(support: dict[str, dict]) -> str:
    """docs/architectures.md: an overview, then a section a row."""
    systems = [row.name for row in (*dispatch.BACKENDS, *dispatch.NAMED_ONLY)]
    lines = [ARCHITECTURES_HEAD, "", f"| | models | {' | '.join(f'`{name}`' for name in systems)} |"]
    lines += ["|---|---" + "|:---:" * len(systems) + "|"]
    for row in architectures.ROWS:
        ticks = [tick([support[name][f"architecture-{row.name}"]]) for name in systems]
        lines.append(f"| [{row.title}]({_anchor(row.title)}) | {row.models} | {' | '.join(ticks)} |")
    for row in architectures.ROWS:
        answers = {name: support[name][f"architecture-{row.name}"] for name in systems}
        lines += ["", *_architecture_section(row, answers)]
    return "\n".join([*lines, "", *_refusals(support, [row.name for row in dispatch.BACKENDS])]) + "\n"


def _refusals(support: dict[str, dict], systems: list[str]) -> list[str]:
    """Every reason that a backend gives, the most frequent first."""
    head = (
        "These are the reasons of each backend to refuse a case of the test suite or a call above, with their counts."
    )
    lines = ["## What is refused", "", head, ""]
    for name in systems:
        answers = support[name].values()
        reasons = Counter(reason for said in answers if isinstance(said, list) for reason in said)
        alone = sum(said == FORWARD for said in answers)
        refused = sum(isinstance(said, list) for said in answers)
        said = "; ".join(f"{reason} ({n})" for reason, n in reasons.most_common()) or "nothing"
        forward = f", {alone} with a forward alone" if alone else ""
        lines.append(f"- `{name}`: {refused} of {len(answers)}{forward}. Refused: {said}.")
    return lines


def _anchor(title: str) -> str:
    """The link to a heading, as Markdown's readers make it."""
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return "#" + kept.replace(" ", "-")


def _architecture_section(row, answers: dict[str, str | list[str]]) -> list[str]:
    p = architecture_problem(row)
    pairs = p.heads_q * p.seqlen_q * p.seqlen_k * (1 if p.packed else p.batch)
    source = "\n\n\n".join(inspect.getsource(f).rstrip() for f in (*row.helpers, row.call))
    lines = [f"## {row.title}", "", f"{row.models} ({row.papers}). {_sizes(row.full)}.", "", "```python", source, "```"]
    lines += ["", f"A naive implementation writes {row.instead}. s and P alone take {_bytes(4 * pairs)} in bf16.", ""]
    runs = [f"`{name}`" for name, answer in answers.items() if answer == RUNS]
    alone = [f"`{name}` runs the forward alone." for name, said in answers.items() if said == FORWARD]
    refused = [f"`{name}` refuses it: {'; '.join(said)}." for name, said in answers.items() if isinstance(said, list)]
    return [*lines, " ".join([f"Forward and every gradient run on {', '.join(runs)}.", *alone, *refused])]


def _sizes(sizes: dict) -> str:
    """The tensors by name and shape, those of equal shape together."""
    by_shape: dict[tuple, list[str]] = {}
    for name, size in sizes.items():
        if isinstance(size, tuple | torch.Tensor):
            by_shape.setdefault(tuple(getattr(size, "shape", size)), []).append(f"`{name}`")
    return " · ".join(f"{', '.join(names)} {shape}" for shape, names in by_shape.items())


def _bytes(n: int) -> str:
    return f"{n / 2**30:.3g} GiB" if n >= 2**30 else f"{n / 2**20:.3g} MiB"


def explain_block() -> str:
    """Three calls and what ``explain`` says of them on this machine."""
    calls = {
        "tw.explain(q, k, v, causal=True)": ({}, {"causal": True}),
        "tw.explain(q, k, v, mask=tw.window(1023, 0), score=tw.softcap(30.0))": (
            {"heads_k": 2, "dtype": torch.bfloat16},
            {"mask": tw.window(1023, 0), "score": tw.softcap(30.0)},
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
        print(support_table(support, FEATURES))
        return
    FILE.write_text(json.dumps(support, indent=1, sort_keys=True) + "\n")
    ARCHITECTURES.write_text(architectures_page(support), encoding="utf-8")
    README.write_text(with_block(README.read_text(), "support", support_table(support, summary())), encoding="utf-8")
    page = with_block(PAGE.read_text(), "support", support_table(support, FEATURES))
    PAGE.write_text(with_block(page, "explain", explain_block()), encoding="utf-8")


if __name__ == "__main__":
    main()
