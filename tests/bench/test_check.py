"""The error rule, and the sampled oracle that stands in for the whole one."""

from dataclasses import replace

import pytest
import torch

from bench import check
from bench.cases import draw, named
from bench.peers import eager_call
from tilewise.accuracy import Error


def test_nan_uses_more_than_all_that_is_allowed():
    error = Error("o", rms=float("nan"), rms_eager=0.0, rms_allowed=1.0, max=float("nan"), max_allowed=1.0)
    assert check.share(error) == float("inf")
    assert check.verdict([error], ours=False) == "red"


def test_only_a_peer_may_be_loose():
    error = Error("dq", rms=5e-7, rms_eager=4e-8, rms_allowed=1e-7, max=0.0, max_allowed=1.0)
    assert check.verdict([error], ours=True) == "red"
    assert check.verdict([error], ours=False) == "loose"
    assert check.verdict([replace(error, rms=1e-3)], ours=False) == "red"
    assert check.verdict([], ours=False) == "red"


@pytest.mark.parametrize("name", ["contract-n1000-causal", "contract-bias-causal-cross", "contract-gqa-full"])
def test_sampled_rows_give_the_same_oracle_as_all_rows(name, monkeypatch):
    x = draw(named(name))
    case = x.case
    monkeypatch.setitem(check.PAIRS_CHECKED, "cpu", case.batch * case.heads_q * case.seqlen_k * 40)
    want = check.expected(x)
    assert len(want.rows) == 40
    exact = x.to(torch.float64)
    whole = check.results(eager_call(exact), exact, want.do.double())
    assert all(e.rms < 1e-14 for e in check.compare(whole, want))


def test_long_cases_are_sampled_with_their_first_and_last_rows():
    case = named("h200-d64-n16384-full")
    rows = check.checked_rows(case, "cpu")
    assert {0, 7, 16376, 16383} <= set(rows.tolist())
    assert len(rows) < 100
    assert check.checked_rows(named("contract-n129-full"), "cpu") is None


def test_eager_gives_zero_for_a_row_without_keys_and_less_than_one_beside_a_sink():
    x = draw(named("contract-nothing"))
    assert torch.equal(eager_call(x)(), torch.zeros_like(x.do))
    x = draw(named("contract-sink"))
    without = eager_call(replace(x, sink=None))()
    ones = replace(x, v=torch.ones_like(x.v))
    assert eager_call(ones)().max() < 1
    assert not torch.equal(eager_call(x)(), without)
