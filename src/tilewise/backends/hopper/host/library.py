"""The kernels as functions: found in their files, or built at their first call where the DSL is installed.

Nothing is loaded before it is called. A kernel that is built at its first call is kept for other processes; one that would
give wrong results or could not be launched is refused, one that is merely slower than it should be is launched with a warning.
"""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from pathlib import Path

from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.host import driver, kernel_files
from tilewise.backends.hopper.host.kernel_files import built, file_name


def missing(*configs: Config | Backward) -> list[str]:
    """Why kernels can be neither loaded nor built here."""
    launcher = driver.load()
    found = [launcher] if isinstance(launcher, str) else []
    absent = [config.name for config in configs if not built(config)]
    if absent and importlib.util.find_spec("cutlass") is None:
        found.append(
            f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not in {kernel_files.folder()}, and "
            "nvidia-cutlass-dsl, which builds kernels, is not installed; pip install 'tilewise[kernels]'"
        )
    return found


_functions: dict[Config | Backward, driver.Kernels] = {}


def function(config: Config | Backward) -> driver.Kernels:
    """The function that launches a kernel.

    It is called with the arguments of the launch that the kernel was compiled from, but for its stream and its config.
    """
    found = _functions.get(config)
    if found is None:  # of two threads that make it at once, the first one's stays; nothing of it is on a GPU yet
        found = _functions.setdefault(config, driver.Kernels(*kernel_files.read(file_of(config))))
    return found


def file_of(config: Config | Backward) -> Path:
    """A kernel's file, built if there is none. Where several processes want it at once, one builds it and the others wait."""
    if built(config):
        return kernel_files.folder() / file_name(config.name)
    file = kernel_files.cache() / file_name(config.name)
    if not file.exists():
        import fcntl  # where there is a GPU of this kind there is Linux

        file.parent.mkdir(parents=True, exist_ok=True)
        # The lock is the system's, on an open file: it ends with the process that holds it, however that ends.
        with open(file.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                _build(config, file)
    return file


def _build(config: Config | Backward, file: Path) -> None:
    """Builds a kernel, and keeps it if it may be launched.

    Raises:
        RuntimeError: the kernel is refused.
    """
    from tilewise.backends.hopper.host import (
        aot,  # which is a program too, and is not to be imported before it runs as one
    )

    warnings.warn(f"tilewise compiles {config.name}, once for this machine", stacklevel=2)
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        row = aot.build(config, Path(scratch))
        if row["wrong"]:
            raise RuntimeError(f"the hopper backend refuses {config.name}, just compiled: {'; '.join(row['wrong'])}")
        if row["faults"]:
            warnings.warn(f"{config.name} is slower than it should be: {'; '.join(row['faults'])}", stacklevel=2)
        (Path(scratch) / file.name).replace(file)
