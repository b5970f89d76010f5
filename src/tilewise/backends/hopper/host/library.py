"""The compiled kernels: where they lie, which there are, and what launches them. Nothing is loaded before it is called.

Kernels that were built ahead of time (:mod:`tilewise.backends.hopper.host.aot`) lie in :func:`folder`, each in a file of its own: a
zip of the cubin and of the :class:`tilewise.backends.hopper.host.recipe.Recipe` of its launch. One that is not there is built at its
first call where the DSL is installed, and kept for other processes in :func:`cache`.
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
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.host import driver, recipe

_HERE = Path(__file__).parents[1]
TABLE = _HERE / "kernels.txt"  # figures of the shipped kernels, so that a diff shows a spill
# What a kernel is made from, as patterns below _HERE.
SOURCES = (
    "config.py", "kit/*.py", "forward/*.py", "backward/*.py", "host/*aot.py", "host/hostcode.py", "host/recipe.py",
    "../../expr/*.py", "../../dropout.py",
)  # fmt: skip


def folder() -> Path:
    return Path(settings.hopper_kernels() or _HERE / "kernels")


def cache() -> Path:
    """By sources: other kernels never get in the way, and a library appears there whole or not at all."""
    return settings.cache_folder() / f"hopper-{source_hash()}"


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Of all that a kernel is made from: kernels of other sources are not run."""
    files = [file for pattern in SOURCES for file in sorted(_HERE.glob(pattern))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


@lru_cache(maxsize=1)
def index() -> dict[str, dict]:
    """By a Config's name, what :mod:`tilewise.backends.hopper.host.aot` wrote of it."""
    file = folder() / "index.json"
    if not file.exists():
        return {}
    content = json.loads(file.read_text())
    return content["kernels"] if content["sources"] == source_hash() else {}


def built(config: Config | Backward) -> bool:
    """Whether it was built ahead of time."""
    return index().get(config.name, {}).get("config") == asdict(config)


def missing(*configs: Config | Backward) -> list[str]:
    """Why kernels can be neither loaded nor built here."""
    launcher = driver.load()
    found = [launcher] if isinstance(launcher, str) else []
    absent = [c.name for c in configs if not built(c)]
    if absent and importlib.util.find_spec("cutlass") is None:
        found.append(
            f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not in {folder()}, and nvidia-cutlass-dsl, which "
            "builds kernels, is not installed; pip install 'tilewise[kernels]'"
        )
    return found


_functions: dict[Config | Backward, driver.Kernels] = {}


def function(config: Config | Backward) -> driver.Kernels:
    """The launcher of a kernel: positional arguments as :func:`tilewise.backends.hopper.forward.kernel.launch` has them."""
    found = _functions.get(config)
    if found is None:  # of two threads that make it at once, the first one's stays; nothing of it is on a GPU yet
        found = _functions.setdefault(config, driver.Kernels(*read(file_of(config))))
    return found


def file_name(kernel: str) -> str:
    return f"{kernel}.kernel"


def file_of(config: Config | Backward) -> Path:
    """Its file, which is made first if it is nowhere. Where several processes want it, one makes it and the others wait."""
    if built(config):
        return folder() / file_name(config.name)
    file = cache() / file_name(config.name)
    if not file.exists():
        import fcntl  # where there is a GPU of this kind there is Linux

        file.parent.mkdir(parents=True, exist_ok=True)
        # The lock is the system's, of an open file: it ends with the process that holds it, however that ends.
        with open(file.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                _build(config)
    return file


def _build(config: Config | Backward) -> None:
    from tilewise.backends.hopper.host import aot

    print(f"tilewise: compiling {config.name}, once for this machine", flush=True)
    faults = aot.build(config, cache())["faults"]
    if faults:
        print(f"tilewise: {config.name} is not as it must be: {'; '.join(faults)}", flush=True)


_DATE = (1980, 1, 1, 0, 0, 0)  # the same bytes for the same kernel


def write(file: Path, cubin: bytes, made: recipe.Recipe) -> Path:
    """It appears whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    text = json.dumps(recipe.to_json(made), separators=(",", ":"))
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for name, content in (("cubin", cubin), ("recipe.json", text)):
            packed.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)
    part.replace(file)
    return file


def read(file: Path) -> tuple[bytes, recipe.Recipe]:
    with zipfile.ZipFile(file) as packed:
        return packed.read("cubin"), recipe.from_json(json.loads(packed.read("recipe.json")))
