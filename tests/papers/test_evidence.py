"""docs/evidence.md says what the claims and the results say, and every claim has its figure, its verdict and its command."""

import copy
import re
from pathlib import Path

import pytest

from bench import records
from bench.tables import load
from tests.papers import bounds
from tilewise_papers import evidence, evidence_training, gpt_speed

CLAIMS = evidence.claims()
ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_claims_and_the_results_say():
    assert evidence.PAGE.read_text(encoding="utf-8") == evidence.text(), (
        "run python -m tilewise_papers.evidence --write"
    )


def test_training_quotes_the_losses_by_position():
    text = evidence.QUOTING.read_text(encoding="utf-8")
    assert text == evidence.quoted(text), "run python -m tilewise_papers.evidence --write"
    assert evidence.context_table()[0] in text


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim["found"])
def test_a_claim_says_whose_it_is_what_is_claimed_and_how_to_see_it(claim):
    assert all(claim[name] for name in ("paper", "where", "claim", "theirs", "holds", "command"))
    assert callable(getattr(evidence, claim["found"]))
    module = re.match(r"python -m ([\w.]+)", claim["command"])
    if module and "gpu " not in claim["command"]:
        file = Path(module[1].replace(".", "/")).with_suffix(".py")
        assert any((ROOT / place / file).exists() for place in ("", "src"))


def test_what_is_counted_is_what_the_closed_forms_say():
    sizes = bounds.Sizes(1024, 1024, 64, 64)
    for program, formula in ((evidence.flash1, bounds.flash1_forward), (evidence.flash2, bounds.flash2_forward)):
        assert evidence.counted(program.forward, 64, 128).other_flops == formula(sizes, 64, 128).other_flops


# ---- figures of gpt_speed that are measured on one machine and shown on every other ---------------------------------------

MS = {
    ("gpt-small-n1024", "kept"): 200.0,
    ("gpt-small-n4096", "tilewise"): 100.0,
    ("gpt-small-n4096", "kept"): None,
    ("gpt-small-compiled-n1024", "kept"): 125.0,
    ("gpt-small-compiled-n4096", "tilewise"): 100.0,
    ("gpt-1.3B-users-n2048", "fa2"): 800.0,
    ("gpt-1.3B-users-n2048", "tilewise"): 500.0,
}
"""Invented milliseconds of steps of 32,768 tokens."""


@pytest.fixture
def shown(monkeypatch):
    """Puts steps of these milliseconds in place of all that gpt_speed's new recipes measured."""

    def show(ms):
        hopper = copy.copy(load("hopper-calls"))
        kept = {
            key: r for key, r in hopper.found.items() if not key[1].startswith((evidence_training.USERS, "gpt-small"))
        }
        run = records.run(f"{gpt_speed.COMMAND} --only small", "cpu", {}, statistic="Invented.")
        hopper.runs, hopper.found = hopper.runs | {run["run"]: run}, kept
        for (case, who), value in ms.items():
            context = int(case.rpartition("n")[2])
            more = {"shape": {"context": context, "batch": 32768 // context}}
            pace = {"tokens_per_s": 32768e3 / value} if value else {"why": "CUDA out of memory. Tried"}
            for metric, found, extra in (
                ("time", value, pace),
                ("rate", 600.0, {"needed": 494.5}),
                ("memory", 20480.0, {}),
            ):
                if value or metric == "time":
                    r = records.result(run["run"], case, who, "step", metric, found, **more, **extra)
                    hopper.found[run["run"], case, who, "step", metric] = r
        for module in (evidence, evidence_training):
            monkeypatch.setattr(module, "load", lambda name: hopper if name == "hopper-calls" else load(name))

    return show


def test_steps_that_are_not_measured_are_not_shown(shown):
    shown({})
    assert evidence.users_section() == evidence.longer_section() == []
    assert evidence.longer_and_as_fast() is None
    assert "GPT-2 small in 3.6 days" not in evidence.text()


def test_steps_as_users_make_them_have_their_pace_memory_and_share_of_the_data_sheet(shown):
    shown(MS)
    lines = evidence.users_section()
    assert "| context 2,048 × 16, SDPA, FA2 | 800 | 40,960 | 20.0 | 600 | 50.0% |" in lines
    assert "| context 2,048 × 16, tilewise | 500 | 65,536 | 20.0 | 600 | 50.0% |" in lines
    assert "| context 2,048 × 16, SDPA, cuDNN | — | — | — | — | — |" in lines


def test_a_longer_context_stands_beside_its_loss_and_says_where_memory_ends(shown):
    shown(MS)
    losses = {r["shape"]["context"]: r["value"] for r in evidence_training.contexts()}
    lines = evidence.longer_section()
    assert f"| standard, context 1,024 × 32, not compiled | 200 | 163,840 | 20.0 | {losses[1024]:.3f} |" in lines
    assert f"| tilewise, context 4,096 × 8, compiled | 100 | 327,680 | 20.0 | {losses[4096]:.3f} |" in lines
    assert f"| standard, context 4,096 × 8, not compiled | out of memory | — | — | {losses[4096]:.3f} |" in lines


@pytest.mark.parametrize(("ms", "holds"), [(100.0, True), (126.0, False)])
def test_a_longer_context_is_as_fast_only_if_it_is_compiled_too(shown, ms, holds):
    shown(MS | {("gpt-small-compiled-n4096", "tilewise"): ms})
    found = evidence.longer_and_as_fast()
    assert found.holds == holds
    assert "327,680 and 163,840 tokens/s not compiled" in found.ours
    assert "GPT-2 small in 3.6 days" in evidence.text()
