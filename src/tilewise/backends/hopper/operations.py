"""The operations that kernels can be traced with, known without the DSL, which importing :mod:`expression` takes."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

TABLES = Path(__file__).parent / "kit" / "expression.py"


@lru_cache(maxsize=1)
def traceable() -> frozenset[str]:
    """``expression.OPERATIONS``: the keys of the dictionaries from which it is made, and the names in it, read from the source."""
    values: dict[str, ast.expr] = {}
    for node in ast.parse(TABLES.read_text(encoding="utf-8")).body:
        match node:
            case (
                ast.AnnAssign(target=ast.Name(id=name), value=value)
                | ast.Assign(targets=[ast.Name(id=name)], value=value)
            ):
                values[name] = value
    found: set[str] = set()
    for node in ast.walk(values["OPERATIONS"]):
        match node:
            case ast.Constant(value=name):
                found.add(name)
            case ast.Starred(value=ast.Name(id=table)):
                found |= {key.value for key in values[table].keys}
    return frozenset(found)
