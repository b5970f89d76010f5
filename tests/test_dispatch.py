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


def test_explain_numbers_the_tensors_of_all_masks_and_scores_together():
    q, pairs, ends = torch.randn(1, 65, 6, 8), torch.rand(6, 10, 13) < 0.5, torch.randint(0, 9, (6, 65))
    keys, slopes, few = torch.rand(65) < 0.5, torch.rand(6), torch.rand(3, 3)
    mask = tw.keep(lambda b, h, i, j: pairs[h, i // 7, j // 5]) & tw.keep(lambda b, h, i, j: ends[h, j] <= i)
    scores = tw.score(lambda s, b, h, i, j: s * slopes[h]) >> tw.score(lambda s, b, h, i, j: s + few[i % 3, j % 3])
    told = str(tw.explain(q, q, q, mask=mask | tw.keep(lambda b, h, i, j: keys[j]), score=scores))
    for name in ("bool0 (6, 10, 13)", "int1 (6, 65)", "bool2 (65,)", "float0 (6,)", "float1 (3, 3)"):
        assert name in told
    assert "int1[h, j] <= i" in told


@pytest.mark.parametrize("threads", [1, 2])
def test_explain_tells_the_threads_that_pytorch_has_now(threads):
    before, q = torch.get_num_threads(), torch.zeros(1, 4, 1, 8)
    try:
        torch.set_num_threads(threads)
        assert f", {threads} thread{'s' * (threads > 1)}\n" in str(tw.explain(q, q, q))
    finally:
        torch.set_num_threads(before)
