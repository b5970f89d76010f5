"""The types of the public face: ``make lint`` checks them on ``tests/typed_calls.py``; here, that this program is whole and runs."""

import inspect
import re
from pathlib import Path

import tilewise as tw
from tests import typed_calls
from tilewise.api import Keywords


def test_the_package_says_that_it_has_types():
    assert (Path(tw.__file__).parent / "py.typed").is_file()


def test_the_program_uses_every_public_name():
    used = set(re.findall(r"\btw\.(\w+)", Path(typed_calls.__file__).read_text(encoding="utf-8")))
    assert used == set(tw.__all__)


def test_the_right_calls_run():
    typed_calls.right_calls()
    assert len(typed_calls.right_parallel_calls()) == 2


def test_the_right_check_runs(monkeypatch):
    asked = []
    monkeypatch.setattr("tilewise.selfcheck.verify", lambda *arguments: asked.append(arguments))
    typed_calls.right_check()
    assert len(asked) == 1


def test_explain_takes_the_keywords_of_attention():
    keywords = [p.name for p in inspect.signature(tw.attention).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert [*Keywords.__annotations__, "parallel"] == keywords
