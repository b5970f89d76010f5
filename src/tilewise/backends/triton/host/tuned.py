"""Tiles that `tilewise tune` measured on this machine: rows of a file in the user's cache, which precede config's table.

A row holds for one device, Triton version, dtype, pair of head dims and pass. The file is JSON, written as a whole and moved
into place, so that a reader sees the old rows or the new ones; one that cannot be read is ignored, with a warning.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from tilewise import device as devices
from tilewise import settings
from tilewise.backends.triton.tiles import OVER_KEYS, Tiles
from tilewise.problem import Problem


@dataclass(frozen=True)
class Tuning:
    """The fastest tiles of one pass, and their milliseconds."""

    device: str
    triton: str
    dtype: str
    head_dim: int
    head_dim_v: int
    name: str
    tiles: Tiles
    ms: float

    @classmethod
    def of(cls, problem: Problem, name: str, tiles: Tiles, ms: float) -> Tuning:
        return cls(*_where(problem), name, tiles, ms)

    @property
    def where(self) -> tuple:
        return self.device, self.triton, self.dtype, self.head_dim, self.head_dim_v

    @property
    def what(self) -> str:
        """The pass; those over key tiles stand for one another."""
        return "over keys" if self.name in OVER_KEYS else self.name


def _where(problem: Problem) -> tuple:
    dtype = str(problem.dtype).removeprefix("torch.")
    return devices.of(problem.device).name, version("triton"), dtype, problem.head_dim, problem.head_dim_v


def path() -> Path:
    return settings.cache_folder() / "triton-tiles.json"


@lru_cache(maxsize=4)
def rows(file: Path) -> tuple[Tuning, ...]:
    """The rows of the file, read once."""
    try:
        records = json.loads(file.read_text(encoding="utf-8"))
        return tuple(Tuning(**{**record, "tiles": Tiles(**record["tiles"])}) for record in records)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, KeyError) as error:
        warnings.warn(f"{file} is ignored, it cannot be read ({error}); `tilewise tune` writes a new one", stacklevel=2)
        return ()


def passes(problem: Problem) -> dict[str, Tiles]:
    """The measured tiles of a problem's passes, by name."""
    known = rows(path())
    return {row.name: row.tiles for row in known if row.where == _where(problem)} if known else {}


def store(new: list[Tuning]) -> Path:
    """Puts rows into the file, in place of older ones of the same device, dtype, head dims and pass."""
    import fcntl  # where Triton runs there is Linux

    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    replaced, whole = {(row.where, row.what) for row in new}, file.with_suffix(".new")
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # two processes may measure at once
        rows.cache_clear()
        kept = [row for row in rows(file) if (row.where, row.what) not in replaced]
        whole.write_text(json.dumps([asdict(row) for row in (*kept, *new)], indent=1), encoding="utf-8")
        whole.replace(file)
    finally:
        os.close(folder)
    rows.cache_clear()
    return file
