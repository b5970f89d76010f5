"""The documents run: every block of README.md and of the pages of docs/ named here does what it says."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_imports import modules, violations

ROOT = Path(__file__).parents[1]
ADDING, README, SWITCHING = ROOT / "docs" / "adding.md", ROOT / "README.md", ROOT / "docs" / "switching.md"
SERVING, SPARSE, SUPPORT = (ROOT / "docs" / f"{name}.md" for name in ("serving", "sparse", "support"))
JAX = ROOT / "docs" / "jax.md"
LARGEST = 256  # numbers of README are cut to it: the examples run at sizes for a test


class Block(NamedTuple):
    language: str
    text: str
    line: int

    @property
    def new_file(self) -> str | None:
        """The path that a new file's block begins with."""
        first = self.text.split("\n", 1)[0]
        return first.removeprefix("# ") if re.fullmatch(r"# (src|tests)/[\w/]+\.py", first) else None


def blocks(markdown: str) -> list[Block]:
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", markdown, re.MULTILINE | re.DOTALL)
    return [Block(m[1], m[2], markdown.count("\n", 0, m.start()) + 1) for m in found]


def patched(source: str, hunk: list[str]) -> str:
    """``source`` with one hunk applied where its context and removed lines stand, which must be one place."""
    old = [line[1:] for line in hunk if line[:1] != "+"]
    new = [line[1:] for line in hunk if line[:1] != "-"]
    lines = source.split("\n")
    places = [n for n in range(len(lines)) if lines[n : n + len(old)] == old]
    if len(places) != 1:
        raise ValueError(f"{len(places)} places for:\n" + "\n".join(old))
    return "\n".join([*lines[: places[0]], *new, *lines[places[0] + len(old) :]])


def apply_diff(diff: str, root: Path) -> None:
    """``--- path`` begins a file, ``@@`` a hunk; no line numbers."""
    for file in re.split(r"^--- ", diff, flags=re.MULTILINE)[1:]:
        name, _, body = file.partition("\n")
        path = root / name
        for hunk in re.split(r"^@@\n", body, flags=re.MULTILINE)[1:]:
            path.write_text(patched(path.read_text(encoding="utf-8"), hunk.rstrip("\n").split("\n")), encoding="utf-8")


def small(code: str) -> str:
    """The code with whole numbers above ``LARGEST`` cut to it."""
    tokens = [
        t._replace(string=str(min(int(t.string, 0), LARGEST)))
        if t.type == tokenize.NUMBER and t.string.isdigit()
        else t
        for t in tokenize.generate_tokens(io.StringIO(code).readline)
    ]
    return tokenize.untokenize([(t.type, t.string) for t in tokens])


def python(root: Path, *arguments: str) -> str:
    env = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, *arguments], cwd=root, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout


@pytest.fixture(scope="module")
def changed(tmp_path_factory) -> Path:
    """A copy of the sources with all changes of docs/adding.md made."""
    root = tmp_path_factory.mktemp("adding")
    for folder in ("src", "tests", "bench"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", root)
    # An editable install finds `tilewise` before the path is looked at; the copy is to be found instead.
    hook = 'import sys\nsys.meta_path[:] = [f for f in sys.meta_path if "_editable" not in type(f).__module__]\n'
    (root / "sitecustomize.py").write_text(hook, encoding="utf-8")
    for block in blocks(ADDING.read_text(encoding="utf-8")):
        if block.language == "diff":
            apply_diff(block.text, root)
        elif block.new_file:
            (root / block.new_file).parent.mkdir(parents=True, exist_ok=True)
            (root / block.new_file).write_text(block.text, encoding="utf-8")
    return root


def test_the_examples_of_adding_run_on_the_changed_sources(changed):
    examples = [b for b in blocks(ADDING.read_text(encoding="utf-8")) if b.language == "python" and not b.new_file]
    said = python(changed, "-c", "\n".join(b.text for b in examples) + "\nprint(tw.__file__)")
    assert said.strip() == str(changed / "src" / "tilewise" / "__init__.py")
    assert len(examples) == 1


def test_the_added_mask_passes_the_laws_of_masks(changed):
    said = python(
        changed, "-m", "pytest", "-p", "no:cacheprovider", "tests/masks/test_catalogue.py", "-k", "chunks or row_form"
    )
    assert int(re.search(r"(\d+) passed", said)[1]) >= 6


def test_the_added_backend_passes_the_contract(changed):
    said = python(changed, "-m", "pytest", "-p", "no:cacheprovider", "tests/backends/test_whole.py")
    assert int(re.search(r"(\d+) passed", said)[1]) >= 5


def test_the_added_row_makes_the_backend_run_where_it_does_not_refuse(changed):
    code = """
import torch
import tilewise as tw
q, k, v = (torch.randn(1, 20, 2, 8) for _ in range(3))
print(tw.explain(q, k, v).chosen, tw.explain(q, k, v, causal=True).refused["whole"])
torch.testing.assert_close(tw.attention(q, k, v), tw.attention(q, k, v, backend="portable"))
"""
    assert python(changed, "-c", code).strip() == "whole ['a mask is not built']"


def test_the_added_files_keep_the_import_arrows(changed):
    moved = lambda said: re.sub(r":\d+", "", said)  # noqa: E731
    before, after = ({moved(said) for said in violations(root / "src")} for root in (ROOT, changed))
    assert "backends.whole" in modules(changed / "src")
    assert after <= before


BY_THEMSELVES = {
    f"{page.name}-{block.line}": block.text
    for page in (README, SUPPORT, ROOT / "docs" / "algorithm.md", ROOT / "docs" / "derivatives.md")
    for block in blocks(page.read_text(encoding="utf-8"))
    if block.language == "python"
}


@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_every_example_of_a_page_runs_by_itself(name):
    python(ROOT, "-c", small(BY_THEMSELVES[name]))


SWITCHING_BLOCKS = [b for b in blocks(SWITCHING.read_text(encoding="utf-8")) if b.language == "python"]


def test_every_example_of_what_one_switches_to_runs_in_a_namespace_of_its_own():
    missing = [name for name in ("transformers", "diffusers", "jax") if find_spec(name) is None]
    texts = [small(b.text) for b in SWITCHING_BLOCKS if not any(name in b.text for name in missing)]
    python(ROOT, "-c", f"for text in {texts!r}:\n    exec(text, {{}})")


def test_the_page_on_serving_is_one_program():
    texts = [b.text for b in blocks(SERVING.read_text(encoding="utf-8")) if b.language == "python"]
    assert len(texts) == 6
    python(ROOT, "-c", "\n".join(texts))


def test_the_page_on_selected_keys_is_one_program():
    texts = [b.text for b in blocks(SPARSE.read_text(encoding="utf-8")) if b.language == "python"]
    assert len(texts) == 7
    python(ROOT, "-c", "\n".join(texts))


@pytest.mark.skipif(find_spec("jax") is None, reason="the package jax is not installed")
def test_the_page_on_jax_is_one_program():
    texts = [b.text for b in blocks(JAX.read_text(encoding="utf-8")) if b.language == "python"]
    assert len(texts) == 2
    python(ROOT, "-c", "\n".join(texts))


def test_switching_shows_before_and_after_of_each():
    found = blocks(SWITCHING.read_text(encoding="utf-8"))  # what is left behind is `py`: it need not be installed
    assert [b.language for b in found] == ["py", "python"] * 10
    assert all(("# before" if b.language == "py" else "# after") in b.text for b in found)


def test_the_first_code_of_the_readme_is_complete():
    first = next(b for b in blocks(README.read_text(encoding="utf-8")) if b.language == "python")
    assert {"import torch", "import tilewise as tw"} <= set(first.text.splitlines())


EVERY_PAGE = sorted(p.relative_to(ROOT).as_posix() for f in ("*", "docs/*", "bench/**/*") for p in ROOT.glob(f"{f}.md"))


@pytest.mark.parametrize("page", EVERY_PAGE)
def test_code_has_at_most_80_columns(page):
    code = re.findall(r"^( *)```\w*\n(.*?)^\1```$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert [line for _, text in code for line in text.splitlines() if len(line) > 80] == []


# -- The reader of documents ---------------------------------------------------------------------------------------


def test_a_hunk_is_applied_where_its_context_stands():
    source = "a\nb\nc\n"
    assert patched(source, [" a", "+x", " b"]) == "a\nx\nb\nc\n"
    assert patched(source, ["-b", "+x", "+y"]) == "a\nx\ny\nc\n"


@pytest.mark.parametrize("source", ["a\nb\n", "x\nx\n"], ids=["nowhere", "twice"])
def test_a_hunk_without_one_place_is_refused(source):
    with pytest.raises(ValueError, match="places for"):
        patched(source, [" x", "+y"])


def test_large_numbers_are_cut_and_others_are_not():
    code = "x = f(1024, 16, 0.001, 1e9, '4096')\n"
    scope: dict = {"f": lambda *a: a}
    exec(small(code), scope)
    assert scope["x"] == (LARGEST, 16, 0.001, 1e9, "4096")
