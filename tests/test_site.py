"""The site: every page has its place in it, the reference names all that is public, and it builds without a warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import tilewise as tw
import tilewise.parallel

ROOT = Path(__file__).parents[1]
NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1].split("\ntheme:\n")[0]
REFERENCE = (ROOT / "docs" / "site" / "reference.md").read_text(encoding="utf-8")
BUILT_ONLY = {"docs/reference.md"}  # from docs/site/reference.md


def test_every_page_has_one_place_in_the_navigation():
    listed = re.findall(r": (\S+\.md)$", NAVIGATION, re.MULTILINE)
    found = [path for pattern in ("*.md", "docs/*.md", "bench/**/*.md") for path in ROOT.glob(pattern)]
    pages = BUILT_ONLY | {page.relative_to(ROOT).as_posix() for page in found}
    assert len(listed) == len(set(listed))
    assert pages - set(listed) == set(), "pages that mkdocs.yml does not place"
    assert set(listed) - pages == set(), "places of mkdocs.yml without a page"


def test_the_reference_names_all_that_is_public():
    named = re.findall(r"^::: tilewise\.(\S+)$", REFERENCE, re.MULTILINE)
    # tilewise itself offers context_parallel, and `offset` is no function.
    public = {*tw.__all__, *(f"parallel.{name}" for name in tilewise.parallel.__all__)}
    public -= {"offset", "parallel.context_parallel"}
    assert len(named) == len(set(named))
    assert public - set(named) == set(), "names that docs/site/reference.md does not have"
    assert set(named) - public == set(), "names of docs/site/reference.md that are not public"
    assert "`tilewise.offset`" in REFERENCE


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="the extra docs is not installed; `make docs` installs it")
def test_the_site_builds_without_a_warning_and_without_other_hosts(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(build, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    page = (tmp_path / "docs" / "algorithm.html").read_text(encoding="utf-8")
    assert page.count('class="formula"') > 20
    assert "<math" in page
    assert 'id="tilewise.attention"' in (tmp_path / "docs" / "reference.html").read_text(encoding="utf-8")
