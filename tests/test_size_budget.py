"""The size budget: functions and classes that fit on a screen, files that fit in a head, few parameters, no block of lines twice.

Exemptions may only shrink.
"""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

HOST_LINES, HOST_PARAMETERS = 60, 8
KERNEL_LINES, KERNEL_PARAMETERS = 120, 12
FILE_LINES, CLASS_LINES = 600, 120
REPEATED_LINES = 6
NAMED_LAMBDAS = 35  # in all of src; a function has a name, a docstring and room for types: the number may only fall
# The public functions: their keywords are the users' words, or those of the library that they stand in for, which several
# of them share.
PUBLIC = {
    "compat/sdpa.py": ("_patched_multi_head",),
    "compat/flash_attn/private.py": (
        "_flash_attn_forward",
        "_flash_attn_varlen_forward",
        "_flash_attn_backward",
        "_flash_attn_varlen_backward",
    ),
    "compat/flash_attn/interface_3.py": (
        "flash_attn_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_varlen_func",
        "flash_attn_with_kvcache",
    ),
    "compat/torch_provider.py": (
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_flash_attention_forward",
        "_flash_attention_backward",
        "_scaled_dot_product_flash_attention_backward",
    ),
    "compat/flex_attention.py": ("flex_attention", "create_block_mask"),
    "compat/cuequivariance.py": ("attention_pair_bias", "triangle_multiplicative_update"),
    "compat/diffusers.py": ("attention",),
    "compat/vllm.py": ("TilewiseAttention.__init__", "TilewiseAttention.forward"),
    "compat/flash_attn/cute.py": ("flash_attn_func", "flash_attn_varlen_func"),
    "api.py": (
        "attention",
        "attention_with_lse",
        "attention_with_stats",
        "attention_varlen",
        "attention_paged",
        "attention_paged_with_lse",
    ),
    "gradients.py": ("attention_backward",),
    "statistics.py": ("probabilities",),
    "compat/flash_attn/__init__.py": (
        "flash_attn_func",
        "flash_attn_varlen_func",
        "flash_attn_with_kvcache",
    ),
}
# A file, "file:function" or "file:class" that is over the budget, or "file:file" of a repeated block, each with its reason.
EXEMPT: dict[str, str] = {
    "../tilewise_papers/machine.py:Machine": "a counted machine: one short method for each access of memory",
}


@dataclass(frozen=True)
class Function:
    file: str
    name: str
    lines: int
    parameters: int
    kernel: bool

    @property
    def where(self) -> str:
        return f"{self.file}:{self.name}"


def holds_kernels(tree: ast.Module) -> bool:
    """Whether a module is made of kernels: it imports their language where it begins. Host code does so inside functions, if at all."""
    names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    return bool({name.split(".")[0] for name in names} & {"triton", "cutlass"})


def functions_of(source: str, file: str) -> Iterator[Function]:
    """Every function, nested ones and methods too, from `def` to its last line; ``self``, ``cls`` and ``ctx`` do not count."""

    def visit(node: ast.AST, prefix: str) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            name = f"{prefix}{child.name}" if named else prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                a = child.args
                parameters = [x.arg for x in (*a.posonlyargs, *a.args)]
                parameters = parameters[1:] if parameters[:1] in (["self"], ["cls"], ["ctx"]) else parameters
                count = len(parameters) + len(a.kwonlyargs) + (a.vararg is not None) + (a.kwarg is not None)
                yield Function(file, name, child.end_lineno - child.lineno + 1, count, kernel)
            yield from visit(child, f"{name}." if named else prefix)

    tree = ast.parse(source)
    kernel = holds_kernels(tree)
    yield from visit(tree, "")


def over_budget(function: Function) -> str | None:
    lines, parameters = (KERNEL_LINES, KERNEL_PARAMETERS) if function.kernel else (HOST_LINES, HOST_PARAMETERS)
    public = function.name in PUBLIC.get(function.file, ())
    reasons = [f"{function.lines} lines, at most {lines}"] if function.lines > lines else []
    if function.parameters > parameters and not public:
        reasons.append(f"{function.parameters} parameters, at most {parameters}")
    return f"{function.where}: {'; '.join(reasons)}" if reasons else None


def too_long(source: str, file: str) -> dict[str, str]:
    """A file and its classes that have too many lines, and how many."""
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    lengths = {f"{file}:{node.name}": (node.end_lineno - node.lineno + 1, CLASS_LINES) for node in classes}
    lengths[file] = len(source.splitlines()), FILE_LINES
    return {where: f"{lines} lines, at most {limit}" for where, (lines, limit) in lengths.items() if lines > limit}


def named_lambdas(source: str) -> int:
    """How many lambdas are bound to a name where a function could stand."""
    bound = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assign | ast.AnnAssign)]
    return sum(isinstance(value, ast.Lambda) for value in bound)


def code_lines(source: str, public: tuple[str, ...] = ()) -> list[tuple[int, str]]:
    """``(number, line)`` of the lines that count: no docstring, comment, import, blank or lone punctuation; stripped.

    The signatures of ``public`` functions do not count either.
    """
    tree = ast.parse(source)
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            skipped.update(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            skipped.update(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, ast.FunctionDef) and node.name in public:
            skipped.update(range(node.lineno, node.body[0].lineno))
    lines = ((n, " ".join(line.split())) for n, line in enumerate(source.splitlines(), 1) if n not in skipped)
    return [(n, line) for n, line in lines if any(c.isalnum() for c in line) and not line.startswith("#")]


def repeated(files: dict[str, str]) -> dict[str, list[str]]:
    """``"file:file"`` -> the places of blocks of ``REPEATED_LINES`` equal lines in a row, in two files or one."""
    places: dict[tuple[str, ...], list[tuple[str, int, int]]] = defaultdict(list)
    for file, source in files.items():
        lines = code_lines(source, PUBLIC.get(file, ()))
        for start in range(len(lines) - REPEATED_LINES + 1):
            block = tuple(line for _, line in lines[start : start + REPEATED_LINES])
            if not places[block] or places[block][-1][0] != file or start >= places[block][-1][1] + REPEATED_LINES:
                places[block].append((file, start, lines[start][0]))
    found: dict[str, list[str]] = defaultdict(list)
    for block, at in places.items():
        if len(at) > 1:
            found[f"{at[0][0]}:{at[1][0]}"].append(f"lines {at[0][2]} and {at[1][2]}: {block[0]}")
    return dict(found)


@cache
def sources() -> dict[str, str]:
    names = {path: os.path.relpath(path, SRC / "tilewise") for path in sorted(SRC.rglob("*.py"))}
    return {name: path.read_text(encoding="utf-8") for path, name in names.items()}


@cache
def functions() -> list[Function]:
    return [f for file, source in sources().items() for f in functions_of(source, file)]


@cache
def repeated_blocks() -> dict[str, list[str]]:
    return repeated(sources())


@cache
def long_files_and_classes() -> dict[str, str]:
    return {where: said for file, source in sources().items() for where, said in too_long(source, file).items()}


def test_functions_are_within_the_budget():
    assert [said for f in functions() if (said := over_budget(f)) and f.where not in EXEMPT] == []


def test_files_and_classes_are_within_the_budget():
    assert {where: said for where, said in long_files_and_classes().items() if where not in EXEMPT} == {}


def test_lambdas_with_names_only_become_fewer():
    assert sum(map(named_lambdas, sources().values())) <= NAMED_LAMBDAS


def test_no_block_of_lines_is_written_twice():
    assert {where: at for where, at in repeated_blocks().items() if where not in EXEMPT} == {}


def test_every_exemption_is_still_needed():
    needed = {f.where for f in functions() if over_budget(f)}
    assert set(EXEMPT) - needed - set(repeated_blocks()) - set(long_files_and_classes()) == set()


def test_every_exemption_has_a_reason():
    assert [where for where, reason in EXEMPT.items() if len(reason.split()) < 3] == []


def test_the_public_functions_that_may_have_many_keywords_exist_and_need_it():
    many = {(f.file, f.name) for f in functions() if f.parameters > HOST_PARAMETERS}
    assert {(file, name) for file, names in PUBLIC.items() for name in names} <= many


# -- The measure itself --------------------------------------------------------------------------------------------


def function_of(lines: int = 2, parameters: int = 0, keywords: int = 0) -> str:
    names = [f"x{n}" for n in range(parameters)] + ["*"] * bool(keywords) + [f"y{n}" for n in range(keywords)]
    return f"def f({', '.join(names)}):\n" + "".join(f"    a{n} = {n}\n" for n in range(lines - 1))


@pytest.mark.parametrize(
    ("source", "file", "allowed"),
    [
        (function_of(lines=60), "tiles.py", True),
        (function_of(lines=61), "tiles.py", False),
        (function_of(parameters=5, keywords=3), "tiles.py", True),
        (function_of(parameters=5, keywords=4), "tiles.py", False),
        ("import triton\n" + function_of(lines=120), "backends/triton/kernels/forward.py", True),
        ("import cutlass.cute as cute\n" + function_of(lines=121), "backends/hopper/backward/keys.py", False),
        ("from cutlass.utils import LayoutEnum\n" + function_of(parameters=12), "backends/hopper/kit/tiles.py", True),
        ("import cutlass\n" + function_of(parameters=13), "backends/hopper/kit/tiles.py", False),
        (function_of(lines=61), "backends/hopper/forward/config.py", False),
        (function_of(lines=61).replace("a0 = 0", "import triton"), "backends/triton/host/launch.py", False),
        (function_of(parameters=9), "backends/portable/forward.py", False),
        (function_of(keywords=15).replace("f(", "attention("), "api.py", True),
        (function_of(keywords=9).replace("f(", "explain("), "api.py", False),
        ("class A:\n" + "".join(f"    {x}\n" for x in function_of(parameters=9).replace("x0", "self").splitlines()), "a.py", True),
        ("def g():\n" + "".join(f"    {x}\n" for x in function_of(parameters=9).splitlines()), "a.py", False),
        ("def g(*a, b, c, d, e, f, g, h, **i): ...", "a.py", False),
    ],
)  # fmt: skip
def test_what_is_over_the_budget_is_found(source, file, allowed):
    assert all(over_budget(f) is None for f in functions_of(source, file)) == allowed


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = 1\n" * 600, []),
        ("x = 1\n" * 601, ["a.py"]),
        ("class A:\n" + "    x = 1\n" * 119, []),
        ("class A:\n" + "    x = 1\n" * 120, ["a.py:A"]),
        ("def f():\n    class A:\n" + "        x = 1\n" * 120, ["a.py:A"]),
    ],
)
def test_what_is_too_long_is_found(source, found):
    assert sorted(too_long(source, "a.py")) == found


def test_a_lambda_counts_where_it_is_given_a_name():
    assert named_lambdas("f = lambda: 1\ng: int = lambda: 2\nh(key=lambda: 3)\n[lambda: 4]") == 2


SIX = "".join(f"x{n} = {n}\n" for n in range(6))


def test_six_equal_lines_are_found_whatever_stands_between_and_around_them():
    spaced = "# why\nimport os\n\n" + SIX.replace("x3", "    \n# because\n\nx3") + "\n)\n".replace(")", "y = 1")
    inside = 'def f():\n    """Says."""\n' + "".join(f"    {line}\n" for line in SIX.splitlines())
    assert set(repeated({"a.py": spaced, "b.py": inside})) == {"a.py:b.py"}
    assert set(repeated({"a.py": SIX + "z = 1\n" + SIX})) == {"a.py:a.py"}


def test_five_equal_lines_and_lines_that_do_not_count_are_allowed():
    five = SIX.rpartition("x5")[0]
    imports, ends = (
        "from a import (\n" + "".join(f"    b{n},\n" for n in range(9)) + ")\n",
        "x = [\n[\n[\n[\n]\n]\n]\n]\n",
    )
    assert repeated({"a.py": five + "y = 1\n", "b.py": five + "y = 2\n"}) == {}
    assert repeated({"a.py": imports + "y = 1\n", "b.py": imports + "y = 2\n"}) == {}
    assert repeated({"a.py": ends, "b.py": ends}) == {}
    assert repeated({"a.py": "x = 1\n" * 6}) == {}  # one block, not two that overlap


def test_the_signatures_of_public_functions_may_be_alike_but_their_bodies_may_not():
    keywords = ",\n".join(f"    k{n}: int" for n in range(9))
    source = "".join(f"def {name}(\n{keywords},\n):\n    return {name!r}\n" for name in PUBLIC["api.py"])
    assert repeated({"api.py": source}) == {}
    assert repeated({"other.py": source}) != {}
    body = "".join(f"    {line}\n" for line in SIX.splitlines())
    assert repeated({"api.py": "".join(f"def {name}(a):\n{body}" for name in PUBLIC["api.py"])}) != {}
