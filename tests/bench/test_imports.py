"""The benchmark stands below the tests."""

import ast
from pathlib import Path

import bench


def test_the_benchmark_imports_nothing_of_the_tests():
    root, found = Path(bench.__file__).parent, set()
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {(str(path.relative_to(root)), name) for name in names if name.split(".")[0] == "tests"}
    assert found == set()
