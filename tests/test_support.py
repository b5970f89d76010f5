"""What runs where is committed, and only grows."""

import json

import pytest

from tests import support


def test_nothing_that_ran_is_refused():
    committed, now = json.loads(support.FILE.read_text()), support.current()
    lost = [
        f"{backend} {case}: {now[backend][case]}"
        for backend, cases in committed.items()
        for case, answer in cases.items()
        if answer == support.RUNS and now[backend].get(case) != support.RUNS
    ]
    assert not lost


def test_the_committed_table_is_the_current_one():
    assert json.loads(support.FILE.read_text()) == support.current(), "run: python -m tests.support --write"


@pytest.mark.parametrize(
    ("page", "features"),
    [(support.README, support.summary()), (support.PAGE, support.FEATURES)],
    ids=["README", "support"],
)
def test_a_page_shows_the_current_table(page, features):
    text = page.read_text()
    assert support.with_block(text, "support", support.support_table(support.current(), features)) == text


def test_every_row_of_the_readme_stands_for_features():
    assert all(support.summary().values())
    alone = {"head_dim of v ≠ of q", "head_dim 1", "a score beside `selected`"}
    shown = [case for cases in support.summary().values() for case in cases]
    assert sorted(shown) == sorted(
        case for title, cases in support.FEATURES.items() if title not in alone for case in cases
    )
