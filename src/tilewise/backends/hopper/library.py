"""The compiled kernels: where they lie, which there are, and the functions in them. Nothing is loaded before it is called."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from tilewise import settings
from tilewise.backends.hopper.config import Config

_HERE = Path(__file__).parent
TABLE = _HERE / "kernels.txt"  # figures of the shipped kernels, so that a diff shows a spill
SOURCES = ("schedule.py", "tile.py", "forward.py", "aot.py")


def folder() -> Path:
    return Path(settings.hopper_kernels() or _HERE / "kernels")


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Of all that a kernel is made from, but its Config, whose numbers are in its name: kernels of other sources are not run."""
    return hashlib.sha256(b"".join((_HERE / name).read_bytes() for name in SOURCES)).hexdigest()[:16]


@lru_cache(maxsize=1)
def index() -> dict[str, dict]:
    """By a Config's name, what :mod:`tilewise.backends.hopper.aot` wrote of it."""
    file = folder() / "index.json"
    if not file.exists():
        return {}
    content = json.loads(file.read_text())
    return content["kernels"] if content["sources"] == source_hash() else {}


def missing(config: Config) -> list[str]:
    """Why a kernel cannot be loaded here."""
    found = []
    if importlib.util.find_spec("tvm_ffi") is None:
        found.append("the package apache-tvm-ffi is not installed; pip install 'tilewise[kernels]'")
    if index().get(config.name, {}).get("config") != asdict(config):
        found.append(f"{config.name} is not in {folder()}; build it: python -m tilewise.backends.hopper.aot")
    return found


@lru_cache(maxsize=256)
def function(name: str):
    """The launcher of a kernel: positional arguments as :func:`tilewise.backends.hopper.forward.launch` has them."""
    import tvm_ffi

    return tvm_ffi.load_module(str(folder() / f"{name}.so"))[name]
