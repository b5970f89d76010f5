"""The pages of docs hold together: every link leads somewhere, and tables have the form that their pages promise."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import tilewise as tw

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "bench" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def headings(page: Path) -> set[str]:
    """The anchors that a page has on GitHub: those of its headings, and those that it sets."""
    text = page.read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return made | set(re.findall(r'<a id="([\w-]+)"></a>', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    broken = []
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        path = page.parent / target if target else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in headings(path)):
            broken.append(f"{target}#{anchor}")
    assert not broken


SOURCES = [
    path
    for folder in ("src", "bench", "tests", "examples", "shipping", "docs")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".h", ".cpp", ".cu", ".md", ".toml", ".css") and "__pycache__" not in path.parts
]
NAMED = re.compile(r"`([\w./-]+\.(?:py|h|cpp|toml|css))(?::([\w.]+))?`")


def unknown(page: Path) -> list[str]:
    """Return the files that a page names in backquotes and that nothing ends in, and the names that their text lacks."""
    wrong = []
    for path, name in NAMED.findall(re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))):
        found = [
            source for source in (*SOURCES, *ROOT.glob("*.toml")) if f"/{source.relative_to(ROOT)}".endswith(f"/{path}")
        ]
        last = name.rpartition(".")[2]
        if not any(re.search(rf"\b{last}\b", source.read_text(encoding="utf-8")) for source in found):
            wrong.append(f"{path}:{name}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists_and_has_what_it_names_there(page):
    assert unknown(page) == []


def test_a_file_or_a_name_that_does_not_exist_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("`tiles.py`, `tiles.py:TileMap`, `tiles.py:nothing_of_this_name`, `never/written.py`\n")
    assert unknown(page) == ["tiles.py:nothing_of_this_name", "never/written.py:"]


def gone(text: str) -> list[str]:
    """Return the modules of ours that a text runs, that do not exist and that it does not date by a commit."""
    ours = re.findall(
        r"python -m ((?:bench|examples|shipping|tests|tilewise\w*)\b[\w.]*)([^`]*`?(?: of that commit)?)", text
    )
    undated = [module.replace(".", "/") for module, rest in ours if not rest.endswith("of that commit")]
    places = (ROOT, ROOT / "src")
    ends = (".py", "/__main__.py")
    return [m for m in undated if not any((place / f"{m}{end}").exists() for place in places for end in ends)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_that_a_page_runs_exists_or_is_of_a_commit(page):
    assert gone(" ".join(page.read_text(encoding="utf-8").split())) == []


def test_a_module_that_does_not_exist_is_found():
    text = "`python -m bench.run`, `python -m bench.never --out FILE` and `python -m bench.old` of that commit"
    assert gone(text) == ["bench/never"]


def test_what_was_tried_is_one_table_by_backend():
    rows = [line for line in (ROOT / "docs" / "tried.md").read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    assert rows[0] == "| tried | backend | predicted | seen | verdict |"
    cells = [row.strip("| ").split(" | ") for row in rows[2:]]
    assert {len(row) for row in cells} == {5}
    backends = [row[1] for row in cells]
    assert backends == sorted(backends, key=("portable", "cpu", "triton", "hopper", "ranks").index)


def test_a_cell_of_the_measurements_holds_one_number():
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    tables = [found.splitlines() for found in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)]
    cells = [cell for _, _, *rows in tables for row in rows for cell in row.strip("| ").split(" | ")[1:]]
    assert len(cells) > 300
    assert [cell for cell in cells if len(re.findall(r"\d[\d.,]*", cell)) > 1] == []


def test_the_index_names_every_page():
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    named = {target for target, _ in LINK.findall(text)}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= named


def test_the_changelog_begins_with_this_version_and_has_bullets_of_one_line():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest, *older = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert newest.split()[0] in (tw.__version__, "Unreleased")
    assert tw.__version__ in [section.split()[0] for section in (newest, *older)]
    assert re.findall(r"^### (.+)$", newest, flags=re.MULTILINE) == ["Added", "Changed", "Fixed", "Removed"]
    assert re.findall(r"^ +\S.*", newest, flags=re.MULTILINE) == [], "bullets that go on in a second line"


def test_the_commands_that_contributors_are_given_exist():
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "SECURITY.md"))
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(re.findall(r"\bmake ([\w-]+)", text)) <= set(targets)
    modules = re.findall(r"python -m ([\w.]+)", text)
    assert modules
    assert all(importlib.util.find_spec(module) for module in modules)


def test_every_issue_of_a_fault_asks_for_the_machine():
    for name in ("bug.md", "speed.md"):
        assert "tilewise doctor" in (ROOT / ".github" / "ISSUE_TEMPLATE" / name).read_text(encoding="utf-8")


CITED = re.compile(r"docs/algorithm\.md(#[a-z0-9-]+|, \(\d+\)(?:(?:,| to| and) \(\d+\))*)?")


def test_the_sources_cite_the_mathematics_by_sections_and_equations_that_exist():
    page = ROOT / "docs" / "algorithm.md"
    known = {f"#{anchor}" for anchor in headings(page)}
    known |= {f"({n})" for n in re.findall(r"\\tag\{(\d+)\}", page.read_text(encoding="utf-8"))}
    unknown = []
    for path in (path for suffix in ("py", "h", "cpp") for path in sorted((ROOT / "src").rglob(f"*.{suffix}"))):
        for cited in CITED.findall(path.read_text(encoding="utf-8")):
            named = re.findall(r"#[a-z0-9-]+|\(\d+\)", cited)
            if not named or set(named) - known:
                unknown.append(f"{path.relative_to(ROOT)}: {cited or 'no section or equation'}")
    assert not unknown
