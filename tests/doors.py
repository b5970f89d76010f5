"""What each drop-in takes and refuses, its size, the versions that it was tried with, and how many tests hold it: ``tests/doors.json`` and
the table in docs/switching.md.

Arguments are those of the function that users call. What is refused are the names that the sources hand to ``refuse``. The tests are run,
and those that pass are counted: one that expects an error holds a refusal (or a wrong call, with its reason), the others hold that results
are right. A package that is not installed keeps its counts and versions.

python -m tests.doors --write [FILE ...]     all files, some minutes, or those named
python -m tests.doors --table                counts lines and writes the table, without a test
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import with_block

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tests" / "doors.json"
PAGE = ROOT / "docs" / "switching.md"
SOURCES = ROOT / "src" / "tilewise"


class Door(NamedTuple):
    """A row of the table.

    Attributes:
        name: what is called. package: the distribution that it stands in for, where tests run beside it.
        code: its files and folders below ``src/tilewise``. call: the file and the function, or class, whose arguments are its own.
    """

    name: str
    package: str
    code: str
    call: str = ""


DOORS = {  # by the file whose tests hold it
    "tests/compat/test_flash_attn.py": Door(
        "`compat.flash_attn`, six functions and `bert_padding`",
        "",
        "compat/flash_attn/__init__.py compat/flash_attn/bert_padding.py",
        "compat/flash_attn/__init__.py flash_attn_varlen_func",
    ),
    "tests/compat/test_flash_attn_cache.py": Door("its functions over a cache", "", "compat/flash_attn/kvcache.py"),
    "tests/compat/test_flash_attn_doors.py": Door(
        "its private functions, FlashAttention-3 and 4, installation",
        "",
        " ".join(f"compat/flash_attn/{name}.py" for name in ("interface_3", "cute", "private", "installation")),
        "compat/flash_attn/interface_3.py flash_attn_func",
    ),
    "tests/compat/test_sdpa.py": Door(
        "`compat.sdpa`, `patch()`, `nn.MultiheadAttention`",
        "torch",
        "compat/sdpa.py compat/encoder.py compat/probabilities.py",
        "compat/sdpa.py scaled_dot_product_attention",
    ),
    "tests/compat/test_torch_provider.py": Door(
        "`compat.torch_provider`",
        "torch",
        "compat/torch_provider.py",
        "compat/torch_provider.py _flash_attention_forward",
    ),
    "tests/compat/test_flex_attention.py": Door(
        "`compat.flex_attention`", "torch", "compat/flex_attention.py", "compat/flex_attention.py flex_attention"
    ),
    "tests/compat/test_flex.py": Door("mask_mods and score_mods of FlexAttention", "torch", ""),
    "tests/test_nested.py": Door("nested tensors", "torch", "nested.py"),
    "tests/compat/test_xformers.py": Door(
        "`compat.xformers` and `compat.layouts`",
        "",
        "compat/xformers compat/layouts.py",
        "compat/xformers/__init__.py memory_efficient_attention",
    ),
    "tests/compat/test_cuequivariance.py": Door(
        "`compat.cuequivariance`",
        "cuequivariance-torch",
        "compat/cuequivariance.py",
        "compat/cuequivariance.py triangle_attention",
    ),
    "tests/compat/test_diffusers.py": Door(
        "`compat.diffusers`", "diffusers", "compat/diffusers.py", "compat/diffusers.py attention"
    ),
    "tests/compat/test_vllm.py": Door("`compat.vllm`", "vllm", "compat/vllm.py"),
    "tests/compat/test_sglang.py": Door("`compat.sglang`", "sglang", "compat/sglang.py"),
    "tests/compat/test_transformers.py": Door(
        "`compat.transformers`", "transformers", "compat/transformers", "compat/transformers/__init__.py Handed"
    ),
    "tests/compat/test_transformers_continuous.py": Door(
        "its continuous batching", "transformers", "compat/transformers/continuous.py"
    ),
    "tests/test_jax.py": Door("`tilewise.jax`", "jax", "jax", "api.py Keywords"),
}


# -- What the sources say ------------------------------------------------------------------------------------------


def files(door: Door) -> list[Path]:
    paths = [SOURCES / given for given in door.code.split()]
    return [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]


def lines(door: Door) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files(door))


def taken(door: Door) -> list[str]:
    """The arguments of the door's function behind q, k and v, or the fields of its class, without those that are refused."""
    if not door.call:
        return []
    file, name = door.call.split()
    (node,) = [node for node in _tree(SOURCES / file).body if getattr(node, "name", "") == name]
    if isinstance(node, ast.ClassDef):
        names = [x.target.id for x in node.body if isinstance(x, ast.AnnAssign)]
    else:
        names = [x.arg for x in (*node.args.args[3:], *node.args.kwonlyargs)]
    return [name for name in names if name not in refused(door)]


def refused(door: Door) -> list[str]:
    """The names in the tables of refusals: what is called ``REFUSED``, or goes to ``refuse`` as its third argument."""
    found: dict[str, None] = {}
    for tree in map(_tree, files(door)):
        nodes = list(ast.walk(tree))
        tables = {
            t.id: _keys(x.value)
            for x in nodes
            if isinstance(x, ast.Assign)
            for t in x.targets
            if isinstance(t, ast.Name)
        }
        handed = [x.args[2] for x in nodes if isinstance(x, ast.Call) and getattr(x.func, "id", "") == "refuse"]
        names = {name.id for x in handed for name in ast.walk(x) if isinstance(name, ast.Name)} | {"REFUSED"}
        found |= dict.fromkeys(key for x in handed for key in _keys(x))
        found |= dict.fromkeys(key for name, keys in tables.items() if name in names for key in keys)
    return list(found)


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _keys(node: ast.expr) -> list[str]:
    """The texts that are keys of a dictionary as it is written: ``{...}`` or ``dict.fromkeys((...), ...)``."""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "fromkeys":
        node = node.args[0]
    keys = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
    return [x.value for x in keys if isinstance(x, ast.Constant) and isinstance(x.value, str)]


# -- What the tests say --------------------------------------------------------------------------------------------


class Count:
    """A plugin of pytest's that counts the tests that pass, by file and by what they hold."""

    def __init__(self):
        self.kind: dict[str, str] = {}
        self.passed: dict[str, Counter] = {file: Counter() for file in DOORS}
        self.others: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            expects = "pytest.raises" in inspect.getsource(item.function)
            self.kind[item.nodeid] = "refused" if expects else "right"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed[report.nodeid.partition("::")[0]][self.kind[report.nodeid]] += 1
        elif report.when == "call" or report.failed:
            self.others.append(report.nodeid)


def counted(files: list[str]) -> dict[str, dict[str, int]]:
    """The tests of each of the files that pass, as ``right`` and ``refused``.

    Raises:
        RuntimeError: a test did not pass, or none of a file ran, since its package is not installed.
    """
    count = Count()
    pytest.main(["-q", "-p", "no:xdist", *[str(ROOT / file) for file in files]], plugins=[count])
    if count.others:
        raise RuntimeError(f"these tests did not pass: {', '.join(count.others)}")
    missing = [file for file in files if not count.passed[file]]
    if missing:
        raise RuntimeError(f"nothing ran of {', '.join(missing)}; install the package that it imports")
    return {
        file: {kind: passed[kind] for kind in ("right", "refused")}
        for file, passed in count.passed.items()
        if file in files
    }


def versions(file: str, known: list[str]) -> list[str]:
    """The versions of its package that a file's tests passed with, the installed one included."""
    try:
        found = [importlib.metadata.version(DOORS[file].package)] if DOORS[file].package else []
    except importlib.metadata.PackageNotFoundError:
        found = []
    return sorted(
        {*known, *(version.partition("+")[0] for version in found)}, key=lambda v: [int(n) for n in v.split(".")]
    )


def row(file: str, record: dict) -> str:
    door = DOORS[file]
    cells = (
        door.name,
        ", ".join(f"`{name}`" for name in taken(door)),
        ", ".join(f"`{name}`" for name in refused(door)),
        f"{record['lines']:,}" if door.code else "",
        f"{door.package} {', '.join(record['versions'])}" if door.package else "",
        record["right"],
        f"{record['refused']} ([tests](../{file}))",
    )
    return f"| {' | '.join(map(str, cells))} |"


def table(record: dict[str, dict]) -> str:
    return "\n".join(
        [
            "| door | arguments beside q, k, v | refused by name | lines | tried with | right cases | refused cases |",
            "| --- | --- | --- | ---: | --- | ---: | ---: |",
            *[row(file, record[file]) for file in DOORS],
        ]
    )


def page(text: str, record: dict[str, dict]) -> str:
    return with_block(text, "doors", table(record))


if __name__ == "__main__":
    what, wanted = sys.argv[1:2], sys.argv[2:]
    if what not in (["--write"], ["--table"]) or not set(wanted) <= set(DOORS):
        sys.exit(__doc__)
    record = json.loads(FILE.read_text(encoding="utf-8"))
    for file, count in (counted(wanted or list(DOORS)) if what == ["--write"] else {}).items():
        record[file] |= count | {"versions": versions(file, record[file]["versions"])}
    for file, door in DOORS.items():
        record[file]["lines"] = lines(door)
    FILE.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
