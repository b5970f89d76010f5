"""The training tables at a size for a CPU: who is right is timed, who cannot run says why, and the formula is the paper's."""

from dataclasses import replace

import pytest
import torch

from bench import records
from examples.gpt.model import GPTConfig
from tilewise_papers import gpt_speed

TINY = GPTConfig(layers=1, d_model=32, heads_q=2, heads_k=2, d_hidden=64, context=64)


@pytest.fixture
def small(monkeypatch):
    recipes = {
        name: replace(recipe, sizes=TINY, tokens=64, contexts=(64,), vocabulary=min(recipe.vocabulary, 300))
        for name, recipe in gpt_speed.RECIPES.items()
    }
    tiny = {"RECIPES": recipes, "PRODUCT": 64, "PRODUCTS": 2, "WARM": 1, "TIMED": 2, "COMPILER": "aot_eager"}
    for name, value in tiny.items():
        monkeypatch.setattr(gpt_speed, name, value)


def values(found, case, metric):
    return {r["contestant"]: r["value"] for r in found if (r["case"], r["metric"]) == (case, metric)}


@pytest.mark.parametrize("name", ["1.3B", "1.3B-users", "small", "small-compiled"])
def test_a_row_has_times_and_rates_of_those_that_run_and_reasons_of_others(small, name):
    head, *found = gpt_speed.table([name], "cpu")
    assert not any(records.faults(r) for r in (head, *found))
    assert head["command"].endswith(f"--only {name}")
    recipe = gpt_speed.RECIPES[name]
    run = set(recipe.contestants) - {"cudnn"}
    for context in recipe.contexts:
        case = f"gpt-{name}-n{context}"
        timed, share = values(found, case, "time"), values(found, case, "error")
        assert all(timed[who] > 0 for who in (*run, "matmul"))
        assert timed.get("cudnn") is None
        assert set(share) == run
        assert max(share.values()) <= 1
        assert min(values(found, case, "memory").values()) > 0
        rate = next(r for r in found if (r["case"], r["contestant"], r["metric"]) == (case, "tilewise", "rate"))
        weights = rate["shape"]["weights"]
        flops = [
            gpt_speed.step_flops(TINY, weights, context, 64, pairs) / timed["tilewise"] / 1e9 for pairs in (1, 0.5)
        ]
        assert [rate["value"], rate["needed"]] == pytest.approx(flops)
        assert rate["shape"]["backend"] == "cpu"


def test_a_contestant_that_is_wrong_is_not_timed(small, monkeypatch):
    monkeypatch.setitem(gpt_speed.CONTESTANTS, "fa2", lambda q, k, v: v)
    found = list(gpt_speed.table(["1.3B"], "cpu"))
    assert {r["contestant"]: r["status"] for r in found if r.get("metric") == "error"}["fa2"] == "red"
    assert "fa2" not in {r["contestant"] for r in found if r.get("metric") == "time"}


def test_a_compiled_contestant_that_sees_later_tokens_is_wrong_beyond_the_context_that_is_judged(small, monkeypatch):
    monkeypatch.setitem(gpt_speed.CONTESTANTS, "fa2", lambda q, k, v: gpt_speed.tw.attention(q, k, v))
    batch = tuple(torch.randint(300, (2, 64)) for _ in range(2))
    trained = gpt_speed.Trained(gpt_speed.RECIPES["1.3B-users"], "cpu")
    share = gpt_speed.shares(trained, ("fa2", "tilewise"), batch, 32)
    assert share["tilewise"] <= 1 < share["fa2"]


def test_users_keep_of_a_block_no_more_than_its_input_and_compile_it_once_for_all(small):
    trained = gpt_speed.Trained(replace(gpt_speed.RECIPES["1.3B-users"], sizes=replace(TINY, layers=2)), "cpu")
    torch.compiler.reset()
    gpt_speed.counters.clear()
    x = torch.randn(1, 64, 32, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        for block in trained.model.blocks:
            block.attention.attention = gpt_speed.CONTESTANTS["tilewise"]
            x = block(x, trained.model.angles)
    assert gpt_speed.counters["stats"]["unique_graphs"] == 1
    assert {t.shape for t in kept if t.ndim == 3} == {x.shape}
    assert not any(t.ndim == 4 for t in kept)


def test_the_weights_of_products_leave_out_the_embedding(small):
    trained = gpt_speed.Trained(gpt_speed.RECIPES["small"], "cpu")
    layer = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    assert trained.weights == layer + 32 + 300 * 32


def test_operations_are_those_of_the_paper_and_the_sizes_those_of_the_table():
    sizes = gpt_speed.RECIPES["1.3B"].sizes
    assert gpt_speed.step_flops(sizes, 10, 2048, 3) == 6 * 3 * 10 + 12 * 24 * 2048 * 2048 * 3
    assert all(gpt_speed.RECIPES[name].sizes.head_dim == 128 for name in ("1.3B", "2.7B", "1.3B-users"))
    for recipe in gpt_speed.RECIPES.values():
        assert all(recipe.tokens % context == 0 and context <= recipe.sizes.context for context in recipe.contexts)
