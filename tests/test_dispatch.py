"""Which backend goes first: the order of the table, and the exceptions that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tilewise as tw
from tilewise import dispatch
from tilewise.problem import Problem, check
from tilewise.spec import Options, assemble, parse_spec

RESULTS = Path(__file__).parents[1] / "bench" / "results"


def problem(n: int = 16384, d: int = 128, **options) -> Problem:
    """A problem as a GPU would have it: tensors without memory, whose device is called one."""
    q = torch.empty(1, n, 16, d, dtype=torch.bfloat16, device="meta")
    extras, seed, text = assemble(q, q, q, Options(**options))
    p = check(q, q, q, extras, seed, parse_spec(text))
    object.__setattr__(p, "device", torch.device("cuda", 0))
    return p


CAPPED = {"causal": True, "score": tw.softcap(30.0)}


def test_a_measured_row_puts_the_faster_backend_first():
    assert dispatch.candidates(problem(**CAPPED)) == ["triton", "hopper", "portable"]


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"score": tw.softcap(30.0), "mask": tw.window(1023, 0)},
        {**CAPPED, "n": 512},
        {**CAPPED, "d": 256},
        {**CAPPED, "dropout_p": 0.1, "dropout_seed": 1},
        {"causal": True, "score": tw.softcap(30.0) >> tw.score(lambda s, b, h, i, j: s * 2)},
    ],
    ids=["no-softcap", "window", "short", "wide", "dropout", "more"],
)
def test_what_was_not_measured_follows_the_order_of_the_table(options):
    assert dispatch.candidates(problem(**options))[0] == "hopper"


@pytest.mark.parametrize("row", dispatch.MEASURED, ids=lambda row: row.case)
def test_a_measured_row_says_what_the_results_hold(row):
    lines = [json.loads(x) for file in RESULTS.glob("*.jsonl") for x in file.read_text(encoding="utf-8").splitlines()]
    found = [x for x in lines if (x.get("run"), x.get("case"), x.get("metric")) == (row.run, row.case, "rate")]
    rates = {(x.get("backend", x["contestant"]), x["pass"]): x["value"] for x in found}
    fast, slow = ([rates[name, x] for x in ("forward", "backward")] for name in (row.faster, row.slower))
    assert all(x > y for x, y in zip(fast, slow, strict=True))
    shown = "{:.0f} / {:.0f} TFLOP/s forward / backward, not {:.0f} / {:.0f}"
    assert row.rates == shown.format(*fast, *slow)


@pytest.mark.parametrize("threads", [1, 2])
def test_explain_tells_the_threads_that_pytorch_has_now(threads):
    before, q = torch.get_num_threads(), torch.zeros(1, 4, 1, 8)
    try:
        torch.set_num_threads(threads)
        assert f", {threads} threads\n" in str(tw.explain(q, q, q))
    finally:
        torch.set_num_threads(before)
