"""docs/decisions.md and the code hold on to each other: every anchor exists, every entry is named where it links to, and dated."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DECISIONS = ROOT / "docs" / "decisions.md"
SOURCES = {".py", ".h", ".cpp", ".toml", ".md", ".txt"}
FOLDERS = ("src", "bench", "tests", "examples", "docs")
NAMED = re.compile(r"docs/decisions\.md(#[a-z0-9-]+(?:,\s#[a-z0-9-]+)*)")  # docs/decisions.md#one, #two
ANCHOR = re.compile(r'<a id="([a-z0-9-]+)"></a>')
CODE = re.compile(r"\]\(\.\./([^)]+)\)")
MACHINES = ("H200", "H100", "Zen 5", "Xeon", "sm_90a", "counted", "model")
DATE = re.compile(r"\b1[12]-\d\d\b")


def entries() -> dict[str, str]:
    """The rows of each entry of docs/decisions.md by its anchor: a row without an anchor belongs to the entry above it."""
    found: dict[str, str] = {}
    for row in re.findall(r"^\| (.*) \|$", DECISIONS.read_text(encoding="utf-8"), flags=re.MULTILINE):
        anchor = ANCHOR.match(row)
        if anchor:
            found[anchor[1]] = row
        elif found and row.startswith(" |"):
            found[list(found)[-1]] += f"\n{row}"
    return found


@cache
def named() -> dict[str, list[str]]:
    """The files that name each anchor, docs/decisions.md and this test excepted."""
    found: dict[str, list[str]] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in SOURCES or path in (DECISIONS, Path(__file__)):
                continue
            for group in NAMED.findall(path.read_text(encoding="utf-8")):
                for anchor in re.findall(r"[a-z0-9-]+", group):
                    found.setdefault(anchor, []).append(str(path.relative_to(ROOT)))
    return found


def test_every_anchor_that_is_named_is_an_entry():
    unknown = {anchor: files for anchor, files in named().items() if anchor not in entries()}
    assert not unknown


def test_every_entry_is_named_where_its_choice_stands():
    assert not sorted(set(entries()) - set(named()))


def test_no_entry_stands_twice():
    anchors = ANCHOR.findall(DECISIONS.read_text(encoding="utf-8"))
    assert [anchor for anchor, count in Counter(anchors).items() if count > 1] == []
    assert set(anchors) == set(entries())


@pytest.mark.parametrize("anchor", entries())
def test_the_code_that_an_entry_links_to_names_it(anchor):
    linked = CODE.findall(entries()[anchor])
    assert linked
    assert set(linked) <= set(named()[anchor])


@pytest.mark.parametrize("anchor", entries())
def test_an_entry_names_its_machine_and_date(anchor):
    text = " ".join(entries()[anchor].split())
    assert any(machine in text for machine in MACHINES)
    assert DATE.search(text)
