"""docs/evidence.md says what the claims and the results say, and every claim has its figure, its verdict and its command."""

import re
from pathlib import Path

import pytest

from tilewise_papers import bounds, evidence

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
