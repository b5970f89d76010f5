"""The compiler of kernels, CuTe DSL: the versions that kernels were tried with, and whether this machine has one. Imports none of it."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata

PACKAGE = "nvidia-cutlass-dsl"
OLDEST, NEWEST = (4, 6, 3), (4, 8, 1)
"""The versions between which kernels are compiled: with each of the two, kernels were compiled and their listings judged."""


def version() -> str:
    """The version that is installed; empty: none, or none that says its version."""
    try:
        return metadata.version(PACKAGE) if importlib.util.find_spec("cutlass") else ""
    except metadata.PackageNotFoundError:
        return ""


def unusable() -> str:
    """The reason why no kernel can be compiled here; empty: one can."""
    if importlib.util.find_spec("cutlass") is None:
        return f"{PACKAGE}, which compiles kernels, is not installed"
    found = version()
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:3])
    if OLDEST <= numbers <= NEWEST:
        return ""
    oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST, NEWEST))
    return f"{PACKAGE}, which compiles kernels, is {found or 'of an unknown version'}, not one of {oldest} to {newest}"
