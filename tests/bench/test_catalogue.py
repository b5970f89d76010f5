"""docs/catalogue.md and docs/explorer.html are what the sources say, and the explorer's script follows the rules of tiles.py."""

import json
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch

import tilewise as tw
from bench import explorer
from bench.catalogue import MASK_ENTRIES, SCORE_ENTRIES, files
from tilewise.pictures.reading import MASKS, PATTERNS, SCORES, read_mask, read_score

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "explorer.html").read_text(encoding="utf-8")
CATALOGUE = (DOCS / "catalogue.md").read_text(encoding="utf-8")


def test_the_pages_are_what_the_sources_say():
    found = files(DOCS)
    stale = [path.name for path, text in found.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    assert stale == [], "python -m bench.page --write"
    assert set((DOCS / "img" / "catalogue").iterdir()) <= set(found)


def test_every_mask_pattern_and_score_has_a_picture():
    shown = {entry.heading for entry in (*MASK_ENTRIES, *SCORE_ENTRIES)}
    assert {*MASKS, *PATTERNS, *SCORES} <= shown & set(tw.__all__)


@pytest.mark.parametrize("entry", [*MASK_ENTRIES, *SCORE_ENTRIES], ids=lambda entry: entry.heading)
def test_the_code_below_a_picture_is_python_that_means_what_is_drawn(entry):
    assert f"```python\n{entry.code}\n```" in CATALOGUE
    run = eval(entry.code, {"tw": tw, "torch": torch})
    if entry in MASK_ENTRIES:
        assert tw.show_mask(run, *entry.lengths) == tw.show_mask(read_mask(entry.code), *entry.lengths)
    else:
        assert run.text == read_score(entry.code).text


# -- The explorer --------------------------------------------------------------------------------------------------

NODE = shutil.which("node")
SCRIPT = re.search(r'<script id="rule">\n(.*?)</script>', PAGE, re.DOTALL)[1]


def under_node(expression, given):
    """What the page's rule makes of ``given``, which the expression has as ``x``."""
    program = (
        f"{SCRIPT}\nconst x = JSON.parse(require('fs').readFileSync(0));\nconsole.log(JSON.stringify({expression}));"
    )
    run = subprocess.run([NODE, "-e", program], input=json.dumps(given), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.skipif(NODE is None, reason="node is not here to run the page's script")
def test_the_script_of_the_page_follows_the_rules_of_tiles():
    numbers = explorer.NUMBERS | {
        "window": (7, 0),
        "documents": (13,),
        "local_global": (10, 0, 2),
        "key_range": (0, 33),
    }
    sizes = (((40, 40), (8, 8)), ((33, 61), (16, 4)), ((61, 33), (5, 12)))
    choices = product(numbers.items(), ("&", "|"), numbers.items())
    cases = [explorer.case(a, op, b, *sizes[n % 3], ("alibi", (0.25,))) for n, (a, op, b) in enumerate(choices)]
    cases += explorer.cases()
    assert under_node("x.filter((c) => !RULE.agrees(c))", cases) == []
    assert {what for case in cases for what in case["status"]} == {"0", "1", "2"}
    wrong = [case | {"status": case["status"].translate({49: 50, 50: 49})} for case in cases[:40]]
    wrong += [case | {"bytes": case["bytes"] + 1} for case in cases[:3]]
    assert under_node("x.filter(RULE.agrees).length", [c for c in wrong if c not in cases]) == 0


@pytest.mark.skipif(NODE is None, reason="node is not here to run the page's script")
def test_the_page_offers_what_python_knows_and_writes_its_code():
    assert under_node("[Object.keys(RULE.MASKS), Object.keys(RULE.SCORES)]", None) == [
        [*explorer.OFFERED], [*explorer.SCORES]
    ]  # fmt: skip
    o = {"seqlen_q": 40, "seqlen_k": 72, "off": 32}
    written = under_node("x[0].map(([name, ...n]) => RULE.MASKS[name].code(...n, x[1]))", [
        [[name, *numbers] for name, numbers in explorer.NUMBERS.items()], o
    ])  # fmt: skip
    for code, (name, numbers) in zip(written, explorer.NUMBERS.items(), strict=True):
        mask = eval(code, {"tw": tw, "torch": torch})
        assert tw.show_mask(mask, 40, 72) == tw.show_mask(explorer.OFFERED[name]((40, 72), *numbers), 40, 72)


def test_the_page_needs_no_server_and_no_other_host():
    assert re.findall(r"https?://|src=|href=\"(?!data:)|import\(|fetch\(", PAGE) == []
