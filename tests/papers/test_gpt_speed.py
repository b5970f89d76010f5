"""The training table at a size for a CPU: who is right is timed, who cannot run says why, and the formula is the paper's."""

import pytest

from bench import records
from examples.gpt.model import GPTConfig
from tilewise_papers import gpt_speed


@pytest.fixture
def small(monkeypatch):
    sizes = GPTConfig(layers=1, d_model=32, heads_q=2, heads_k=2, d_hidden=64, context=64)
    for name, value in {"SIZES": {"tiny": sizes}, "TOKENS": {"tiny": 64}, "CONTEXTS": (64,)}.items():
        monkeypatch.setattr(gpt_speed, name, value)
    for name, value in {"PRODUCT": 64, "PRODUCTS": 2, "WARM": 1, "TIMED": 2}.items():
        monkeypatch.setattr(gpt_speed, name, value)
    return sizes


def test_a_row_has_times_and_rates_of_those_that_run_and_reasons_of_others(small):
    head, *found = gpt_speed.table(["tiny"], "cpu")
    assert not any(records.faults(r) for r in (head, *found))
    timed = {r["contestant"]: r["value"] for r in found if r["metric"] == "time"}
    assert all(timed[name] > 0 for name in ("standard", "fa2", "tilewise", "matmul"))
    assert timed["cudnn"] is None
    share = {r["contestant"]: r["value"] for r in found if r["metric"] == "error"}
    assert set(share) == {"standard", "fa2", "tilewise"}
    assert max(share.values()) <= 1
    rate = next(r for r in found if (r["contestant"], r["metric"]) == ("tilewise", "rate"))
    flops = gpt_speed.step_flops(small, rate["shape"]["weights"], 64, 64)
    assert rate["value"] == pytest.approx(flops / timed["tilewise"] / 1e9)
    assert rate["shape"]["backend"] == "cpu"


def test_a_contestant_that_is_wrong_is_not_timed(small, monkeypatch):
    wrong = {name: gpt_speed.CONTESTANTS[name] for name in ("standard", "tilewise")}
    monkeypatch.setattr(gpt_speed, "CONTESTANTS", wrong | {"fa2": lambda q, k, v: v})
    found = list(gpt_speed.table(["tiny"], "cpu"))
    assert {r["contestant"]: r["status"] for r in found if r.get("metric") == "error"}["fa2"] == "red"
    assert "fa2" not in {r["contestant"] for r in found if r.get("metric") == "time"}


def test_operations_are_those_of_the_paper_and_the_sizes_those_of_the_table():
    sizes = gpt_speed.SIZES["1.3B"]
    assert gpt_speed.step_flops(sizes, 10, 2048, 3) == 6 * 3 * 10 + 12 * 24 * 2048 * 2048 * 3
    assert all(sizes.head_dim == 128 for sizes in gpt_speed.SIZES.values())
    assert all(tokens % context == 0 for tokens in gpt_speed.TOKENS.values() for context in gpt_speed.CONTEXTS)
