"""What runs where is committed, and only grows."""

import json

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


def test_the_readme_shows_the_current_table():
    readme = support.README.read_text()
    assert support.with_block(readme, "support", support.readme_table(support.current())) == readme
