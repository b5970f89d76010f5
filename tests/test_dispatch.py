"""Which backend goes first."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tilewise import dispatch
from tilewise.problem import Problem, check
from tilewise.spec import Options, assemble, parse_spec


def problem(n: int = 16384, d: int = 128, **options) -> Problem:
    """A problem as a GPU would have it: tensors without memory, whose device is called one."""
    q = torch.empty(1, n, 16, d, dtype=torch.bfloat16, device="meta")
    extras, seed, text = assemble(q, q, q, Options(**options))
    p = check(q, q, q, extras, seed, parse_spec(text))
    object.__setattr__(p, "device", torch.device("cuda", 0))
    return p


CAPPED = {"causal": True, "score": tw.softcap(30.0)}


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(
    "options", [{"causal": True}, CAPPED, {"score": tw.softcap(30.0)}], ids=["plain", "softcap", "full"]
)
def test_hopper_goes_before_triton_whatever_the_scores(d, options):
    assert dispatch.candidates(problem(d=d, **options)) == ["hopper", "triton", "portable"]


def test_a_line_of_explain_is_cut_between_reasons_and_never_within_a_command():
    line = "not       " + "a reason of forty columns or a few more; " * 2 + "`a command, " + "that is long " * 7 + "`"
    reason = "a reason of forty columns or a few more;"
    assert dispatch._folded(line).split("\n") == [
        f"not       {reason}",
        f"          {reason}",
        f"          {line[92:]}",
    ]
    assert dispatch._folded("backend   cpu: one tile") == "backend   cpu: one tile"


@pytest.mark.parametrize("threads", [1, 2])
def test_explain_tells_the_threads_that_pytorch_has_now(threads):
    before, q = torch.get_num_threads(), torch.zeros(1, 4, 1, 8)
    try:
        torch.set_num_threads(threads)
        assert f", {threads} threads\n" in str(tw.explain(q, q, q))
    finally:
        torch.set_num_threads(before)
