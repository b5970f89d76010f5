"""A training run on disk: one file that is whole or absent, and a line for whoever opens the wrong one.

save(path, Checkpoint(settings, step, history, model.state_dict(), optimizer.state_dict()))
found = load(path, settings)      # ValueError unless the file is of the same settings
"""

import os
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FORMAT = "tilewise checkpoint 1"


@dataclass(frozen=True)
class Checkpoint:
    """A run after `step` steps. `settings` says which run it is: names to numbers or words; `history` is the caller's."""

    settings: dict[str, Any]
    step: int
    history: list[Any]
    model: dict[str, Any]
    optimizer: dict[str, Any]


def save(path: Path, checkpoint: Checkpoint):
    """Writes beside the file and renames: whenever it is stopped, `path` is the old checkpoint or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        torch.save({"format": FORMAT, **vars(checkpoint)}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def load(path: Path, settings: dict[str, Any] | None = None) -> Checkpoint:
    """The checkpoint at `path`, its tensors on the CPU; nothing in the file is executed.

    Raises ValueError, in one line, where the file is no checkpoint or, with `settings`, of another run.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"cannot read the checkpoint {path}: {error.strerror}") from error
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no checkpoint, or a damaged one") from error
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is no checkpoint of this program")
    checkpoint = Checkpoint(**found)
    if settings is not None and settings != checkpoint.settings:
        others = _differences(checkpoint.settings, settings)
        raise ValueError(f"{path} is of another run ({others}): give its settings, or another folder")
    return checkpoint


def _differences(there: dict[str, Any], here: dict[str, Any], most: int = 3) -> str:
    names = [name for name in here | there if here.get(name) != there.get(name)]
    said = [f"{name} {there.get(name)} there, {here.get(name)} here" for name in names[:most]]
    return "; ".join(said) + (f"; {len(names) - most} more" if len(names) > most else "")
