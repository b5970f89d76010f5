"""Names in the GPU backends: a class name means one thing, and a parameter has a name.

A test fails as soon as an exemption is no longer needed, so the lists only shrink.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

BACKENDS = Path(__file__).parents[1] / "src" / "tilewise" / "backends"
MATHEMATICS = frozenset("qkvopsml")  # the letters of the field, which need no longer name
ONE_LETTER_SHARE = 0.10
ROOMS = ("triton", "hopper")


def files(room: str) -> dict[str, ast.Module]:
    """The syntax trees of a backend, by path below the backends."""
    found = sorted((BACKENDS / room).rglob("*.py"))
    return {file.relative_to(BACKENDS).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in found}


def class_names(tree: ast.Module) -> list[str]:
    """The classes of a module, but for those inside functions or classes."""
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def parameters(tree: ast.Module) -> list[str]:
    """The names of all parameters of a module's functions, but for lambdas', ``self`` and ``cls``."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    named = [a.arg for f in functions for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
    return [name for name in named if name not in ("self", "cls")]


def one_letter(tree: ast.Module) -> int:
    """How many parameters have a name of one letter that is no mathematics."""
    return sum(len(name) == 1 and name not in MATHEMATICS for name in parameters(tree))


# -- The backends --------------------------------------------------------------------------------------------------

# Class names that stand in several files of a backend: how often.
SAME_NAMES: dict[str, dict[str, int]] = {}
# The share of one-letter parameters of a backend that is above ONE_LETTER_SHARE, in percent.
LETTERS: dict[str, int] = {}


@pytest.mark.parametrize("room", ROOMS)
def test_a_class_name_means_one_thing_in_a_backend(room):
    count = Counter(name for tree in files(room).values() for name in class_names(tree))
    assert {name: n for name, n in count.items() if n > 1} == SAME_NAMES.get(room, {})


@pytest.mark.parametrize("room", ROOMS)
def test_parameters_have_names(room):
    trees = files(room).values()
    share = sum(map(one_letter, trees)) / sum(len(parameters(tree)) for tree in trees)
    allowed = LETTERS.get(room, 100 * ONE_LETTER_SHARE) / 100
    assert share < allowed
    assert room not in LETTERS or share > allowed - 0.01, "the exemption can shrink"


# -- The rules themselves ------------------------------------------------------------------------------------------


def test_letters_of_mathematics_are_names():
    tree = ast.parse("def f(self, q, k, x, config, *, c): pass")
    assert parameters(tree) == ["q", "k", "x", "config", "c"]
    assert one_letter(tree) == 2


def test_classes_are_those_of_the_module():
    assert class_names(ast.parse("class A:\n    class B: pass\ndef f():\n    class C: pass")) == ["A"]
