"""Imports point one way, and what is optional stays optional."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

SRC = Path(__file__).parents[1] / "src"

# Who may import whom, within tilewise; patterns, first match decides. What is not listed may not be imported.
ARROWS: dict[str, tuple[str, ...]] = {
    "expr": ("expr.*",),
    "expr.compiled": (),
    "expr.operations": ("expr.compiled",),
    "expr.walk": ("expr.operations",),
    "expr.bounds": ("expr.operations", "expr.walk"),
    "expr.reader": (),
    "expr.narrow": ("expr.operations", "expr.walk"),
    "expr.text": ("expr.operations", "expr.reader", "expr.walk"),
    "expr.tracing": ("expr.compiled", "expr.narrow", "expr.operations", "expr.walk"),
    "expr.meaning": ("expr.operations", "expr.walk"),
    "device": (),
    "settings": (),
    "state": (),
    "dropout": (),
    "caching": (),
    "words": (),
    "amounts": (),
    "untraced": (),
    "masks": ("masks.catalogue", "masks.regions"),
    "masks.patterns": (),
    "masks.derived": ("caching", "device", "untraced"),
    "masks.catalogue": ("masks.patterns", "masks.derived", "caching", "device", "expr"),
    "masks.regions": ("expr", "caching"),
    "masks.facts": ("masks.regions", "expr", "sizes"),
    "scores": ("scores.catalogue", "scores.reading"),
    "scores.catalogue": ("masks", "expr", "caching"),
    "scores.reading": ("scores.catalogue", "expr"),
    "piece": ("masks", "expr"),
    "mapped": ("masks", "expr"),
    "spec": ("masks", "scores", "piece", "mapped", "expr", "dropout", "caching"),
    "selections": ("masks.facts", "sizes", "expr"),
    "planning": (),
    "planning.planner": ("planning.tiles", "planning.bit_tiles", "masks"),
    "planning.*": ("own", "selections", "sizes", "masks", "masks.facts", "expr", "device", "caching"),
    "pages": ("spec",),
    "sizes": (),
    "signature": ("spec", "caching"),
    "problem": ("words", "signature", "spec", "selections", "masks", "scores", "expr", "dropout", "pages", "caching"),
    "distances": ("problem", "masks.facts", "expr"),
    "leaf_gradients": ("distances", "problem", "expr"),
    "backends.base": ("sizes", "problem", "device", "expr", "caching"),
    "backends.blockwise": (
        "backends.base",
        "backends.piecewise",
        "backends.triton.host.sum_rows",
        "planning.bit_tiles",
        "selections",
        "problem",
        "caching",
        "spec",
        "state",
        "masks",
        "masks.facts",
        "expr",
    ),
    "backends.listed": ("backends.base", "planning.planner", "problem", "selections", "expr"),
    "gather": ("backends.base", "problem", "spec"),
    "reference": (
        "backends.base",
        "problem",
        "spec",
        "leaf_gradients",
        "gather",
        "planning.tiles",
        "state",
        "dropout",
        "expr",
        "caching",
    ),
    # A kernel's key holds the expressions traced into it.
    "backends.hopper.expected": (),
    "backends.hopper.parameters": ("planning.bit_tiles",),
    "backends.hopper.config": (
        "backends.hopper.parameters",
        "sizes",
        "planning.bit_tiles",
        "problem",
        "masks.facts",
        "expr",
    ),
    "backends.hopper.tables": (
        "backends.hopper.config",
        "backends.hopper.parameters",
        "backends.base",
        "device",
        "distances",
        "expr",
        "problem",
    ),
    "backends.hopper.pair_bias": ("backends.hopper.config", "backends.hopper.tables", "backends.base", "problem"),
    "backends.hopper.*.config": (
        "sizes",
        "backends.hopper.config",
        "backends.hopper.parameters",
        "backends.hopper.*.parameters",
        "backends.hopper.tables",
        "backends.hopper.pair_bias",
        "backends.hopper.forward.tiles",
        "backends.hopper.backward.table",
        "backends.hopper.backward.tiles",
        "backends.hopper.expected",
        "problem",
        "device",
    ),
    "backends.hopper.backward.tiles": ("backends.hopper.config",),
    "backends.hopper.backward.table": ("backends.hopper.backward.tiles", "backends.hopper.config"),
    "backends.hopper.forward.tiles": ("backends.hopper.config",),
    "backends.triton.tiles": (),
    "backends.triton.group_parts": ("backends.triton.tiles", "masks.facts", "problem"),
    "backends.triton.reads": ("distances", "masks.facts", "expr", "problem"),
    "backends.triton.config": (
        "backends.triton.group_parts",
        "backends.triton.reads",
        "backends.triton.tiles",
        "distances",
        "expr",
        "problem",
        "device",
    ),
    "backends.*.config": ("problem", "device"),
    "backends.sample": (),
    # A program of its own.
    "backends.*.compile_all": (
        "own",
        "device",
        "backends.base",
        "backends.sample",
        "backends.listed",
        "planning.planner",
        "problem",
        "spec",
        "masks.catalogue",
        "scores.catalogue",
        "planning.tiles",
        "planning.bit_tiles",
    ),
    "backends.*": (
        "own",
        "backends.base",
        "backends.sample",
        "backends.blockwise",
        "backends.piecewise",
        "backends.listed",
        "backends.triton.listed",
        "problem",
        "signature",
        "sizes",
        "spec",
        "distances",
        "leaf_gradients",
        "gather",
        "masks.facts",
        "masks.regions",
        "selections",
        "piece",
        "planning.tiles",
        "planning.bit_tiles",
        "planning.planner",
        "state",
        "dropout",
        "amounts",
        "expr",
        "device",
        "settings",
        "caching",
    ),
    "dispatch": (
        "backends.base",
        "masks.facts",
        "planning.planner",
        "problem",
        "sizes",
        "pages",
        "spec",
        "device",
        "settings",
        "caching",
        "amounts",
        "words",
    ),
    "derivatives": ("dispatch", "backends.base", "problem", "spec", "untraced"),
    "autograd": ("derivatives", "dispatch", "backends.base", "problem", "spec", "untraced"),
    "batching": ("autograd", "derivatives", "mapped", "spec", "expr", "state", "untraced"),
    "cache": ("words", "autograd", "dispatch", "problem", "pages", "settings", "spec", "untraced"),
    "shared_prefix": ("words", "repeated", "cache", "pages", "settings", "state", "masks", "scores", "spec"),
    "repeated": ("autograd", "dispatch", "masks", "settings", "spec"),
    "nested": ("spec", "words"),
    "documents": ("spec", "masks", "scores", "untraced"),
    "flops": ("spec",),
    "statistics": (
        "words",
        "autograd",
        "backends.base",
        "expr",
        "masks",
        "masks.catalogue",
        "problem",
        "scores",
        "settings",
        "spec",
        "planning.tiles",
    ),
    "api": (
        "autograd",
        "batching",
        "dispatch",
        "flops",
        "nested",
        "documents",
        "repeated",
        "shared_prefix",
        "cache",
        "spec",
        "scores",
        "masks",
        "dropout",
        "state",
        "statistics",
        "words",
    ),
    "gradients": ("api", "autograd", "spec", "scores", "words"),
    "jax": (
        "jax.handler",
        "jax.gpu",
        "",
        "api",
        "dispatch",
        "masks.derived",
        "problem",
        "spec",
        "words",
    ),
    "jax.handler": ("autograd", "masks.catalogue", "problem", "signature", "spec"),
    "jax.gpu": ("jax.handler", "backends.hopper.host.xla", "dispatch", "settings"),
    "accuracy": ("reference", "gather", "backends.base", "problem"),
    "selfcheck": (
        "accuracy",
        "dispatch",
        "backends.base",
        "problem",
        "spec",
        "masks.catalogue",
        "scores.catalogue",
        "device",
    ),
    "parallel*": (
        "dropout",
        "amounts",
        "own",
        "autograd",
        "derivatives",
        "dispatch",
        "backends.base",
        "problem",
        "spec",
        "piece",
        "masks",
        "masks.facts",
        "planning.tiles",
        "expr",
        "caching",
        "device",
        "state",
        "untraced",
    ),
    "compat.transformers.masks": (
        "api",
        "caching",
        "compat.padding",
        "expr",
        "masks",
        "masks.catalogue",
        "planning.tiles",
    ),
    "compat.transformers.sharded": (
        "compat.padding",
        "compat.transformers.masks",
        "masks.catalogue",
        "parallel.context",
    ),
    "compat.vllm": ("compat.refusals", "settings", ""),
    "compat.torch_provider": ("compat.refusals", "compat.sdpa", "dropout", "untraced", ""),
    "compat.flex_attention": (
        "words",
        "compat.refusals",
        "compat.sdpa",
        "masks.catalogue",
        "masks.derived",
        "scores.catalogue",
        "caching",
        "device",
        "",
    ),
    "compat*": (
        "own",
        "words",
        "api",
        "repeated",
        "spec",
        "dropout",
        "masks.catalogue",
        "scores.catalogue",
        "expr",
        "",
    ),
    "pictures*": (
        "own",
        "amounts",
        "words",
        "expr",
        "masks",
        "masks.catalogue",
        "masks.patterns",
        "scores",
        "scores.catalogue",
        "problem",
        "planning.tiles",
    ),
    "cli*": ("*",),
    "__main__": ("cli",),
    "": (
        "words",
        "api",
        "gradients",
        "cache",
        "expr",
        "masks.catalogue",
        "masks.patterns",
        "scores.catalogue",
        "pictures.view",
        "statistics",
    ),
}
# Inside a function, where the arrow would make a circle or cost every import: a convenience that looks the other way.
LAZY = {
    ("expr.operations", "expr.text"),
    ("expr.operations", "expr.tracing"),
    ("masks.catalogue", "planning.tiles"),
    ("masks.catalogue", "planning.planner"),  # its registry, for documents
    ("", "selfcheck"),
    ("", "parallel"),
    ("", "parallel.context"),
    ("api", "parallel.dtensors"),
    ("dispatch", "pictures.explained"),
}

# Packages from outside the standard library; the first match decides.
PACKAGES: dict[str, tuple[str, ...]] = {
    "backends.*.config": ("torch",),
    "backends.triton*": ("torch", "triton"),
    "backends.hopper*": ("torch", "cutlass", "cuda"),
    "cli*": ("torch", "typer", "rich"),
    "compat.transformers*": ("torch", "transformers"),
    "compat.cuequivariance": ("torch", "cuequivariance_torch"),
    "compat.diffusers": ("torch", "diffusers"),
    "jax": ("torch", "jax", "numpy"),
    "compat.sglang": ("torch", "sglang"),
    "compat.vllm": ("torch", "vllm"),
    "pictures*": ("torch", "rich", "matplotlib"),
    "dispatch": ("torch", "matplotlib"),
    "*": ("torch",),
}


@dataclass(frozen=True)
class Import:
    """One imported module or name, by its full dotted name; ``lazy``: inside a function."""

    importer: str
    name: str
    lazy: bool
    line: int


def module_name(path: Path, root: Path) -> str:
    """``tilewise.planning.tiles`` as ``planning.tiles``, the package itself as the empty name."""
    parts = path.relative_to(root / "tilewise").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(source: str, importer: str, package: str) -> tuple[Import, ...]:
    """All imports of a module; ``package`` is what relative ones start from."""
    found = []

    def visit(node: ast.AST, lazy: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(importer, alias.name, lazy, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])]
                )
            found.extend(Import(importer, f"{base}.{alias.name}", lazy, node.lineno) for alias in node.names)
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"  # which no run enters
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or for_types
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), False)
    return tuple(found)


def modules(root: Path) -> dict[str, Path]:
    return {module_name(path, root): path for path in sorted((root / "tilewise").rglob("*.py"))}


def all_imports(root: Path) -> list[Import]:
    found = []
    for name, path in modules(root).items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found += imports_of(path.read_text(encoding="utf-8"), name, f"tilewise.{package}".rstrip("."))
    return found


def target(name: str, known: set[str]) -> str | None:
    """The module of tilewise that an import of ``name`` reads; None: none of tilewise's."""
    if name != "tilewise" and not name.startswith("tilewise."):
        return None
    inner = name.removeprefix("tilewise").lstrip(".")
    while inner and inner not in known:
        inner = inner.rpartition(".")[0]
    return inner


def rule(table: dict[str, tuple[str, ...]], module: str) -> tuple[str, ...] | None:
    return next((allowed for pattern, allowed in table.items() if fnmatchcase(module, pattern)), None)


def folder(module: str) -> str:
    """``backends.portable`` of ``backends.portable.step``, ``cli`` of ``cli.show``."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "backends" else 1])


def may_import(importer: str, imported: str, lazy: bool) -> bool:
    if lazy and (importer, imported) in LAZY:
        return True
    allowed = rule(ARROWS, importer) or ()
    own = "own" in allowed and folder(importer) == folder(imported)
    config_of_own = importer.endswith(".config") and imported == importer
    return own or config_of_own or any(fnmatchcase(imported, pattern) for pattern in allowed)


def violations(root: Path) -> list[str]:
    known = set(modules(root))
    found = []
    for i in all_imports(root):
        imported = target(i.name, known)
        if imported is not None and not may_import(i.importer, imported, i.lazy):
            found.append(f"{i.importer or 'tilewise'}:{i.line} imports {imported or 'tilewise'}")
        top = i.name.split(".")[0]
        packages = rule(PACKAGES, i.importer)
        if imported is None and top not in sys.stdlib_module_names and top not in packages:
            found.append(f"{i.importer or 'tilewise'}:{i.line} imports the package {top}")
    return found


def test_every_import_follows_an_arrow():
    assert violations(SRC) == []


PAPERS = {  # the packages that the papers read; the counted machine reads none of tilewise
    "evidence*": {"bench"},
    "traffic": {"bench", "tilewise"},
    "command": {"typer", "rich"},
    "flash1_triton": {"triton"},
    "gpt_*": {"bench", "examples", "tilewise"},
    "pathfinder*": {"bench", "examples", "tilewise"},
    "*": {"numpy", "matplotlib"},
}


def test_the_papers_stand_on_the_public_face_alone():
    for path in sorted((SRC / "tilewise_papers").rglob("*.py")):
        name = ".".join(path.relative_to(SRC / "tilewise_papers").with_suffix("").parts)
        read = {i.name for i in imports_of(path.read_text(encoding="utf-8"), name, "tilewise_papers")}
        allowed = {"torch", "matplotlib", "tilewise_papers", *sys.stdlib_module_names, *rule(PAPERS, name)}
        assert {found for found in read if found.split(".")[0] not in allowed} == set(), name
        assert {found for found in read if found.startswith("tilewise.")} == set(), name


def test_every_module_has_its_arrows():
    assert [name for name in modules(SRC) if rule(ARROWS, name) is None] == []


def test_every_arrow_is_used():
    """A module that is gone, or an arrow that nothing follows, leaves the table. Folders that are still to come stay."""
    to_come: set[str] = set()
    known, used = set(modules(SRC)), set()
    for i in all_imports(SRC):
        imported, followed = target(i.name, known), rule(ARROWS, i.importer)
        for pattern, allowed in ARROWS.items():
            if imported is not None and followed is allowed:
                used |= {(pattern, a) for a in allowed if a != "own" and fnmatchcase(imported, a)}
    plain = {(m, a) for m, allowed in ARROWS.items() if "*" not in m for a in allowed}  # a backend uses what it needs
    assert plain - used == set()
    assert {m for m in ARROWS if not any(fnmatchcase(name, m) for name in known)} <= to_come


def test_every_lazy_import_is_used():
    known = set(modules(SRC))
    assert {(i.importer, target(i.name, known)) for i in all_imports(SRC) if i.lazy} >= LAZY


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """The modules that reach each other, by all imports, those inside functions and for types among them."""

    def reached(start: str) -> set[str]:
        found, todo = set(), [start]
        while todo:
            new = arrows.get(todo.pop(), set()) - found
            found |= new
            todo += new
        return found

    reach = {name: reached(name) for name in arrows}
    found = {frozenset({name} | {x for x in reach[name] if name in reach.get(x, ())}) for name in arrows}
    return [set(x) for x in found if len(x) > 1]


def test_no_circle_of_imports_leaves_its_room():
    """A mask is prepared by planning, which imports masks; every other circle is of neighbours that were one file."""
    known, arrows = set(modules(SRC)), {}
    for i in all_imports(SRC):
        imported = target(i.name, known)
        if imported and i.importer and imported != i.importer:
            arrows.setdefault(i.importer, set()).add(imported)
    rooms = [{folder(name) for name in circle} for circle in circles(arrows)]
    assert [room for room in rooms if len(room) > 1] == [{"masks", "planning"}]


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


def nodes_of_files_with(*words: str) -> Iterator[tuple[str, ast.AST]]:
    """The nodes of every file that has one of some words, each with its module."""
    for name, path in modules(SRC).items():
        source = path.read_text(encoding="utf-8")
        if any(word in source for word in words):
            yield from ((name, node) for node in ast.walk(ast.parse(source)))


def test_modules_are_loaded_by_name_only_where_a_backend_is_chosen():
    calls = [
        name
        for name, node in nodes_of_files_with("import_module", "__import__")
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__")
    ]
    assert {name for name in calls if not name.startswith("cli")} <= {"dispatch"}


def test_environment_variables_are_read_in_settings_alone():
    readers = {
        name
        for name, node in nodes_of_files_with("environ", "getenv")
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
    }
    assert {name for name in readers if not name.startswith("cli")} <= {"settings"}


def test_cached_properties_are_those_that_survive_a_fork():
    readers = {
        name
        for name, node in nodes_of_files_with("cached_property")
        if (isinstance(node, ast.ImportFrom) and node.module == "functools" and "cached_property" in ast.unparse(node))
        or (isinstance(node, ast.Attribute) and ast.unparse(node) == "functools.cached_property")
    }
    assert readers == {"caching"}


# -- The walk itself -----------------------------------------------------------------------------------------------

FORBIDDEN = {
    "expr-reads-masks": ("expr/walk.py", "from tilewise.masks import Mask"),
    "state-reads-problems": ("state.py", "import tilewise.problem"),
    "masks-read-scores": ("masks/catalogue.py", "from tilewise import scores"),
    "masks-read-tiles-at-the-top": ("masks/catalogue.py", "from tilewise.planning import tiles"),
    "backend-reads-backend": ("backends/cpu/forward.py", "from tilewise.backends.portable.step import tiles"),
    "backend-reads-reference": ("backends/cpu/forward.py", "from tilewise import reference"),
    "backend-reads-dispatch": ("backends/cpu/__init__.py", "from tilewise.dispatch import plan"),
    "config-reads-tiles": ("backends/hopper/config.py", "from tilewise.planning import tiles"),
    "config-reads-its-kernel": ("backends/hopper/config.py", "from .forward import kernel"),
    "config-reads-the-dsl": ("backends/hopper/config.py", "import cutlass"),
    "forward-s-config-reads-the-dsl": ("backends/hopper/forward/config.py", "import cutlass"),
    "backward-s-config-reads-the-dsl": ("backends/hopper/backward/config.py", "import cutlass"),
    "api-reads-the-papers": ("api.py", "def f():\n    from tilewise_papers import machine"),
    "api-reads-cli": ("api.py", "from tilewise.cli.page import table"),
    "api-reads-bench": ("api.py", "from bench import cases"),
    "masks-read-tests": ("masks/catalogue.py", "import tests.masks.test_catalogue"),
    "package-reads-matplotlib": ("__init__.py", "import matplotlib.pyplot"),
    "relative": ("state.py", "from . import problem"),
    "relative-in-a-folder": ("backends/cpu/forward.py", "from ..portable import step"),
}


def write(root: Path, files: dict[str, str]) -> Path:
    """A tree of empty modules like the real one, with some files' text."""
    for name in (
        *modules(SRC),
        "backends.hopper",
        "backends.hopper.config",
        "backends.hopper.forward",
        "backends.cpu.forward",
    ):
        path = root / "tilewise" / (name.replace(".", "/") or ".")
        is_package = (SRC / "tilewise" / name.replace(".", "/")).is_dir() or name == "backends.hopper"
        path = path / "__init__.py" if is_package else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for name, text in files.items():
        (root / "tilewise" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "tilewise" / name).write_text(text)
    return root


@pytest.mark.parametrize("name", FORBIDDEN)
def test_an_import_against_the_arrows_is_found(name, tmp_path):
    file, line = FORBIDDEN[name]
    assert violations(write(tmp_path, {})) == []
    assert len(violations(write(tmp_path, {file: line}))) == 1


def test_imports_along_the_arrows_are_allowed(tmp_path):
    files = {
        "backends/cpu/config.py": "from tilewise.problem import Problem",
        "masks/catalogue.py": "from tilewise import expr\ndef prepare():\n    from tilewise.planning import tiles",
        "backends/cpu/forward.py": "import math\nimport torch\nfrom tilewise.backends.cpu.config import Config\nfrom . import config",
        "backends/hopper/forward.py": "import cutlass\nfrom tilewise.backends.base import Inputs",
        "cli/show.py": "import torch\nfrom rich.table import Table",
    }
    assert violations(write(tmp_path, files)) == []


# -- Optional packages ---------------------------------------------------------------------------------------------

OPTIONAL = ("triton", "cutlass", "matplotlib", "rich", "typer", "numpy", "transformers", "flash_attn", "bench", "tests")


def run_python(code: str) -> str:
    """What a fresh interpreter prints, in an empty environment but for the path."""
    env = os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_the_optional_packages_attention_and_its_gradients_work_on_the_cpu():
    # numpy is torch's own to miss: torch warns and works.
    code = f"""
import sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None
import torch
import tilewise as tw
q, k, v = (torch.randn(1, 20, 4, 8, requires_grad=True) for _ in range(3))
bias = torch.randn(4, 20, 20, requires_grad=True)
o = tw.attention(q, k, v, causal=True, mask=lambda b, h, i, j: (i - j) % 7 != 3, score=tw.softcap(3.0) >> tw.bias(bias))
o.sum().backward()
kept = torch.tensor([[c == "1" for c in line.split(" ")] for line in tw.show_mask(tw.causal() & tw.keep(
    lambda b, h, i, j: (i - j) % 7 != 3), 20).split("\\n")])
s = 3 * torch.tanh(torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5 / 3) + bias
expected = torch.einsum("bhij,bjhd->bihd", torch.softmax(s.masked_fill(~kept, -torch.inf), -1), v)
torch.testing.assert_close(o, expected)
torch.testing.assert_close(bias.grad, torch.autograd.grad(expected.sum(), bias)[0])
print(tw.explain(q, k, v).chosen is not None, tw.verify(dtypes=(torch.float32,)).ok)
"""
    assert run_python(code) == "True True"


def test_the_door_for_jax_says_what_to_install():
    code = """
import sys
sys.modules["jax"] = None
try:
    import tilewise.jax
except ImportError as missing:
    print(missing)
"""
    assert run_python(code) == "tilewise.jax needs JAX 0.9 or newer: pip install --upgrade jax"


def test_import_tilewise_loads_torch_and_itself_alone():
    code = """
import sys
import torch
before = set(sys.modules)
import tilewise
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(new - {"tilewise"} - sys.stdlib_module_names))
print(sorted(name for name in set(sys.modules) - before if name.startswith(("torch._dynamo", "torch._inductor", "torch.fx"))))
not_needed = ("cli", "compat", "jax", "parallel", "selfcheck", "accuracy")
print(sorted(n for n in sys.modules if n.startswith("tilewise.") and n.split(".")[1] in not_needed))
"""
    assert run_python(code) == "[]\n[]\n[]"


@pytest.mark.parametrize("named", ["tw.context_parallel", "tw.parallel.balanced"])
def test_what_computes_over_ranks_is_loaded_when_it_is_named(named):
    assert run_python(f"import tilewise as tw; print(callable({named}), hasattr(tw, 'paralel'))") == "True False"


def test_no_backend_is_loaded_before_it_is_asked_for():
    code = """
import sys
import tilewise as tw, torch
loaded = lambda: sorted({n.split(".")[2] for n in sys.modules if n.startswith("tilewise.backends.")} - {"base"})
print(loaded())
q = torch.zeros(1, 2, 1, 8)
tw.attention(q, q, q, backend="portable")
print(loaded())
"""
    assert run_python(code) == "[]\n['portable']"


def test_a_first_attention_imports_no_symbolic_algebra():
    code = """
import sys
import tilewise as tw, torch
for backend in (None, "portable"):
    q = torch.zeros(1, 2, 1, 8, requires_grad=True)
    tw.attention(q, q, q, mask=tw.causal() & tw.key_lengths(torch.tensor([1])), backend=backend).sum().backward()
print(sorted({"sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes"} & set(sys.modules)))
"""
    assert run_python(code) == "[]"


def unknown_names(file: Path) -> list[str]:
    """What a file reads of a module of tilewise that is not there, with its line."""
    tree, modules = ast.parse(file.read_text(encoding="utf-8")), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tilewise":
            home = importlib.import_module(node.module)
            for x in node.names:
                if not hasattr(home, x.name):
                    importlib.import_module(f"{node.module}.{x.name}")
                found = getattr(home, x.name)
                if isinstance(found, ModuleType):
                    modules[x.asname or x.name] = found
    reads = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    reads = [n for n in reads if n.value.id in modules and not hasattr(modules[n.value.id], n.attr)]
    return [f"{file.name}:{n.lineno} {n.value.id}.{n.attr}" for n in reads]


@pytest.mark.parametrize("folder", ["judge", "gpu"])
def test_what_runs_on_a_gpu_alone_names_what_there_is(folder):
    files = sorted((SRC.parent / "tests" / folder).glob("*.py"))
    if importlib.util.find_spec("jax") is None:
        files = [file for file in files if file.name != "test_jax.py"]
    assert [name for file in files for name in unknown_names(file)] == []
