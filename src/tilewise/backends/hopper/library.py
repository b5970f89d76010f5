"""The compiled kernels: where they lie, which there are, and the functions in them. Nothing is loaded before it is called.

Kernels that were built ahead of time (:mod:`tilewise.backends.hopper.aot`) lie in :func:`folder`. One that is not there is
built at its first call where the DSL is installed, and kept for other processes in :func:`cache`.
"""

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
SOURCES = ("config.py", "schedule.py", "tile.py", "forward.py", "combine.py", "aot.py")


def folder() -> Path:
    return Path(settings.hopper_kernels() or _HERE / "kernels")


def cache() -> Path:
    """By sources: other kernels never get in the way, and a library appears there whole or not at all."""
    return settings.cache_folder() / f"hopper-{source_hash()}"


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Of all that a kernel is made from: kernels of other sources are not run."""
    return hashlib.sha256(b"".join((_HERE / name).read_bytes() for name in SOURCES)).hexdigest()[:16]


@lru_cache(maxsize=1)
def index() -> dict[str, dict]:
    """By a Config's name, what :mod:`tilewise.backends.hopper.aot` wrote of it."""
    file = folder() / "index.json"
    if not file.exists():
        return {}
    content = json.loads(file.read_text())
    return content["kernels"] if content["sources"] == source_hash() else {}


def built(config: Config) -> bool:
    """Whether it was built ahead of time."""
    return index().get(config.name, {}).get("config") == asdict(config)


def missing(config: Config) -> list[str]:
    """Why a kernel can be neither loaded nor built here."""
    found = []
    if importlib.util.find_spec("tvm_ffi") is None:
        found.append("the package apache-tvm-ffi is not installed; pip install 'tilewise[kernels]'")
    if not built(config) and importlib.util.find_spec("cutlass") is None:
        found.append(
            f"{config.name} is not in {folder()}, and nvidia-cutlass-dsl, which builds it, is not installed; "
            "pip install 'tilewise[kernels]'"
        )
    return found


@lru_cache(maxsize=256)
def function(config: Config):
    """The launcher of a kernel: positional arguments as :func:`tilewise.backends.hopper.forward.launch` has them."""
    import tvm_ffi

    return tvm_ffi.load_module(str(file_of(config)))[config.name]


def file_of(config: Config) -> Path:
    """Its library, which is built first if it is nowhere."""
    if built(config):
        return folder() / f"{config.name}.so"
    file = cache() / f"{config.name}.so"
    if not file.exists():
        from tilewise.backends.hopper import aot

        print(f"tilewise: compiling {config.name}, once for this machine", flush=True)
        faults = aot.build(config, cache())["faults"]
        if faults:
            print(f"tilewise: {config.name} is not as it must be: {'; '.join(faults)}", flush=True)
    return file
