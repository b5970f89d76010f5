"""The compiler of kernels, CuTe DSL: the versions that kernels were tried with, and whether this machine has one. Imports none of it.

A kernel that was just compiled is judged by its listing before it may run, so nvdisasm is as much a part of the compiler as the DSL.
"""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path

PACKAGE, DISASSEMBLER = "nvidia-cutlass-dsl", "nvidia-cuda-nvdisasm"
OLDEST, NEWEST = (4, 6, 3), (4, 8, 1)
"""The versions between which kernels are compiled: with each of the two, kernels were compiled and their listings judged."""


def version() -> str:
    """The version that is installed; empty: none, or none that says its version."""
    try:
        return metadata.version(PACKAGE) if importlib.util.find_spec("cutlass") else ""
    except metadata.PackageNotFoundError:
        return ""


def nvdisasm() -> Path | None:
    """The disassembler that is installed along with the DSL, wherever packages lie; None: there is none."""
    try:
        found = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:  # nothing of NVIDIA's
        return None
    places = (found.submodule_search_locations if found else None) or []
    return next((tool for place in places if (tool := Path(place, "bin", "nvdisasm")).exists()), None)


def unusable() -> str:
    """The reason why no kernel can be compiled here; empty: one can."""
    if importlib.util.find_spec("cutlass") is None:
        return f"{PACKAGE}, which compiles kernels, is not installed"
    found = version()
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:3])
    if OLDEST <= numbers <= NEWEST:
        return (
            ""
            if nvdisasm()
            else f"{DISASSEMBLER}, by which kernels are judged, is not installed: `pip install {DISASSEMBLER}`"
        )
    oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST, NEWEST))
    return f"{PACKAGE}, which compiles kernels, is {found or 'of an unknown version'}, not one of {oldest} to {newest}"
