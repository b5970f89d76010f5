"""The files of compiled kernels: where they lie, which there are, how one is written and read.

Kernels that were built ahead of time (:mod:`tilewise.backends.hopper.host.aot`) lie in :func:`folder` beside their index; kernels
that were built at their first call lie in :func:`cache`. A file is a zip of the cubin and of the
:class:`tilewise.backends.hopper.host.recipe.Recipe` of its launch. LZMA takes 0.7 of deflate's bytes: roles repeat what lies further back
than deflate looks.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import zipfile
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from tilewise import settings
from tilewise.backends.hopper.host import recipe as recipes
from tilewise.backends.hopper.host.recipe import Recipe
from tilewise.backends.hopper.kernels import AnyConfig

_HERE = Path(__file__).parents[1]
TABLE = _HERE / "kernels.txt"  # figures of the shipped kernels, so that a diff shows a spill
SOURCES = (
    "config.py", "parameters.py", "capped.py", "operations.py", "kit/*.py", "forward/*.py", "backward/*.py", "latent/*.py", "decoding/*.py",
    "host/aot.py", "host/hostcode.py", "host/llvm_types.py", "host/cubin.py", "host/recipe.py", "../../expr/*.py", "../../dropout.py",
)  # fmt: skip
"""The sources that a kernel's file is made from, as patterns below the backend's folder."""
_DATE = (1980, 1, 1, 0, 0, 0)  # of what is zipped: the same kernel gives the same bytes


class Damaged(RuntimeError):
    """A file that is not what this module wrote."""

    @classmethod
    def of(cls, file: Path, error: Exception) -> Damaged:
        return cls(
            f"{file} is damaged ({type(error).__name__}: {error}): install tilewise again, or delete it if it lies in a cache"
        )


def folder() -> Path:
    """The folder of the kernels that were built ahead of time."""
    return Path(settings.hopper_kernels() or _HERE / "kernels")


def cache() -> Path:
    """The folder of the kernels that this machine built at their first call, one for each state of the sources."""
    return settings.cache_folder() / f"hopper-{source_hash()}"


@lru_cache(maxsize=2)
def source_hash(patterns: tuple[str, ...] = SOURCES) -> str:
    """The hash of all that kernels are made from, kernels of other sources are not run; or of other files of the backend."""
    files = [file for pattern in patterns for file in sorted(_HERE.glob(pattern))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


@lru_cache(maxsize=1)
def index() -> dict[str, dict]:
    """The rows that :mod:`tilewise.backends.hopper.host.aot` wrote about kernels of these sources, by a config's name."""
    file = folder() / "index.json"
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text())
        return content["kernels"] if content["sources"] == source_hash() else {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Damaged.of(file, error) from error


def built(config: AnyConfig) -> bool:
    """Whether a kernel was built ahead of time."""
    return index().get(config.name, {}).get("config") == asdict(config)


def file_name(kernel: str) -> str:
    return f"{kernel}.kernel"


def write(file: Path, cubin: bytes, recipe: Recipe) -> Path:
    """Writes a kernel's file, which appears whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    text = json.dumps(recipes.to_json(recipe), separators=(",", ":"))
    with zipfile.ZipFile(part, "w", zipfile.ZIP_LZMA) as packed:
        for name, content in (("cubin", cubin), ("recipe.json", text.encode())):
            packed.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_LZMA)
    part.replace(file)
    return file


def unreadable() -> str:
    """Why this Python can read no kernel's file, or ""."""
    return (
        ""
        if importlib.util.find_spec("_lzma")
        else "this Python was built without the module lzma, by which kernels are packed"
    )


def contents(file: Path) -> tuple[bytes, bytes]:
    """The cubin of a kernel's file, and its recipe as text."""
    with zipfile.ZipFile(file) as packed:
        return packed.read("cubin"), packed.read("recipe.json")


def read(file: Path) -> tuple[bytes, Recipe]:
    """``(cubin, recipe)`` of a kernel's file.

    Raises:
        Damaged: it is not one.
    """
    try:
        cubin, text = contents(file)
        return cubin, recipes.from_json(json.loads(text))
    except Exception as error:  # of the system, zipfile, its decompressors, json or the recipe's form
        raise Damaged.of(file, error) from error


def built_here() -> int:
    """How many kernels this machine built at their first call; none where the folder may not be read."""
    try:
        return len(list(cache().glob("*.kernel")))
    except OSError:
        return 0
