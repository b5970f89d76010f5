"""How the code speaks: docstrings with a subject everywhere; in the GPU backends names with one meaning, and kernels with comments.

Exemptions name the file and the reason; a test fails as soon as one is not needed any more, so that the list only shrinks.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

BACKENDS = Path(__file__).parents[1] / "src" / "tilewise" / "backends"
MATHEMATICS = frozenset("qkvopsml")  # the letters of the field, which need no longer name
ONE_LETTER_SHARE = 0.10
NO_SUBJECT = (
    "Of", "As", "By", "Those", "Where", "In", "With", "For", "To", "From", "On", "At", "Which", "What", "Whose",
)  # fmt: skip
ROOMS = ("triton", "hopper")
# What kernels are made of; a `config.py` chooses tiles and is no kernel.
KERNELS = ("triton/kernels", "hopper/kit", "hopper/forward", "hopper/backward")
COMMENTS, COMMENTS_OF_FILE = 11, 8  # in 100 lines of code: of all kernels, and of each file; they may only rise
SHORT = 40  # lines of code: shorter files may do without
DIRECTIVES = ("noqa", "fmt:", "type:", "ruff:")


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


def without_subject(tree: ast.Module) -> list[str]:
    """The first lines of docstrings that cannot be read without the name that they belong to."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    first = [(ast.get_docstring(node) or "").split("\n")[0] for node in ast.walk(tree) if isinstance(node, kinds)]
    return [line for line in first if line.split(" ")[0].rstrip(",.:") in NO_SUBJECT]


def one_letter(tree: ast.Module) -> int:
    """How many parameters have a name of one letter that is no mathematics."""
    return sum(len(name) == 1 and name not in MATHEMATICS for name in parameters(tree))


def comments(source: str) -> tuple[int, int]:
    """How many comments a module has, without those for tools, and how many lines of code: no docstring, comment or blank line."""
    prose = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    found, code = 0, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found += not token.string.lstrip("# ").startswith(DIRECTIVES)
        elif token.string.strip():
            code |= set(range(token.start[0], token.end[0] + 1))
    return found, len(code - prose)


def kernel_comments() -> dict[str, tuple[int, int]]:
    """The comments and the lines of code of each file of kernels, by path below the backends."""
    found = [
        file
        for room in KERNELS
        for file in sorted((BACKENDS / room).glob("*.py"))
        if file.name not in ("config.py", "table.py")
    ]
    return {file.relative_to(BACKENDS).as_posix(): comments(file.read_text(encoding="utf-8")) for file in found}


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


def test_the_first_line_of_a_docstring_has_a_subject():
    root = BACKENDS.parents[2]
    rooms = "src", "bench", "examples", "shipping"
    sources = [file for room in rooms for file in sorted((root / room).rglob("*.py"))]
    trees = {file.relative_to(root).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in sources}
    assert {file: lines for file, tree in trees.items() if (lines := without_subject(tree))} == {}


def test_a_folder_says_what_its_files_hold():
    package, missing = BACKENDS.parent, {}
    for init in package.rglob("*/__init__.py"):  # docs/structure.md says it of the package itself
        words = set(re.findall(r"\w+", ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""))
        modules = {file.stem for file in init.parent.glob("*.py") if not file.stem.startswith("__")}
        missing |= {init.parent.relative_to(package).as_posix(): unsaid} if (unsaid := modules - words) else {}
    assert missing == {}


def test_kernels_say_why_at_the_line():
    found = kernel_comments()
    total, code = (sum(each) for each in zip(*found.values(), strict=True))
    assert 100 * total >= COMMENTS * code
    few = {file: n for file, (n, lines) in found.items() if lines >= SHORT and 100 * n < COMMENTS_OF_FILE * lines}
    assert few == {}


# -- The rules themselves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("docstring", "found"),
    [
        ("Of numbers.", True),
        ("By one thread.", True),
        ("Which tile comes next.", True),
        ("The order of all query tiles.", False),
        ("Offsets of packed sequences.", False),
        ("Writes a row.", False),
    ],
)
def test_a_fragment_is_told_from_a_sentence(docstring, found):
    tree = ast.parse(f'def f():\n    """{docstring}"""')
    assert bool(without_subject(tree)) == found


def test_letters_of_mathematics_are_names():
    tree = ast.parse("def f(self, q, k, x, config, *, c): pass")
    assert parameters(tree) == ["q", "k", "x", "config", "c"]
    assert one_letter(tree) == 2


def test_classes_are_those_of_the_module():
    assert class_names(ast.parse("class A:\n    class B: pass\ndef f():\n    class C: pass")) == ["A"]


def test_comments_for_tools_and_lines_of_prose_do_not_count():
    source = '"""Says.\n\nMore."""\n# why\n\nx = [  # what for\n    1,\n]  # noqa: E501\ny = "# none"  # fmt: skip\n'
    assert comments(source) == (2, 4)
