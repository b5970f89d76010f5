"""The kernels as functions: found in their files, or built, at their first call or before, where the DSL is installed.

Nothing is loaded before it is called. A kernel that is built at its first call is kept for other processes; one that would
give wrong results or could not be launched is refused, one that is merely slower than it should be is launched with a warning.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from tilewise.backends.hopper.host import compiler, driver, kernel_files
from tilewise.backends.hopper.host.kernel_files import built, file_name
from tilewise.backends.hopper.host.recipe import Recipe
from tilewise.backends.hopper.kernels import AnyConfig


def missing(*configs: AnyConfig) -> list[str]:
    """The reasons why kernels can be neither loaded nor built here, and what to do about it."""
    launcher = driver.load()
    found = [launcher] if isinstance(launcher, str) else []
    found += [kernel_files.unreadable()] if kernel_files.unreadable() else []
    absent = [config for config in configs if here(config) is None]
    why = compiler.unusable() if absent else ""
    if why:
        names = " and ".join(config.name for config in absent)
        found.append(f"{names} {'is' if len(absent) == 1 else 'are'} not built, and {why}; {remedy(absent)}")
    return found


def here(config: AnyConfig) -> Path | None:
    """A kernel's file, if it is on this machine: shipped, or built here."""
    if built(config):
        return kernel_files.folder() / file_name(config.name)
    file = kernel_files.cache() / file_name(config.name)
    return file if os.path.isfile(file) else None  # Path's raises where the folder may not be searched


def remedy(absent: Sequence[AnyConfig]) -> str:
    """The commands that bring kernels that are not here, where nothing compiles them."""
    from tilewise.backends.hopper.host import selection

    install = "pip install 'tilewise[kernels]'"
    if not set(absent) <= set(selection.in_order_of_use()):
        return f"with `{install}` the first call compiles {'it' if len(absent) == 1 else 'them'}"
    words = " ".join(f'--for "{words}"' for words in dict.fromkeys(map(selection.words_of, absent)))
    return f"`{install}`, then `tilewise kernels {words}`, builds {'it' if len(absent) == 1 else 'them'}"


_functions: dict[AnyConfig, driver.Kernels] = {}
_known: dict[int, tuple[AnyConfig, driver.Kernels]] = {}  # by identity: plans of one structure share their config
_MOST_KNOWN = 4096


def function(config: AnyConfig) -> driver.Kernels:
    """The function that launches a kernel.

    It is called with the arguments of the launch that the kernel was compiled from, but for its stream and its config.
    """
    known = _known.get(id(config))
    if known is not None and known[0] is config:
        return known[1]
    found = _functions.get(config)
    if found is None:  # of two threads that make it at once, the first one's stays; nothing of it is on a GPU yet
        found = _functions.setdefault(config, driver.Kernels(*_read(config)))
    if len(_known) < _MOST_KNOWN:
        _known[id(config)] = config, found
    return found


def _read(config: AnyConfig) -> tuple[bytes, Recipe]:
    """A kernel's cubin and recipe. One that was built here and is damaged is built again."""
    file = file_of(config)
    try:
        return kernel_files.read(file)
    except kernel_files.Damaged:
        if file.parent != kernel_files.cache() or compiler.unusable():
            raise
        file.unlink(missing_ok=True)
        return kernel_files.read(file_of(config))


def file_of(config: AnyConfig) -> Path:
    """A kernel's file, built if there is none. Where several processes want it at once, one builds it and the others wait."""
    found = here(config)
    if found is not None:
        return found
    import fcntl  # where there is a GPU of this kind there is Linux

    file = kernel_files.cache() / file_name(config.name)
    file.parent.mkdir(parents=True, exist_ok=True)
    # The lock is the system's, on an open file: it ends with the process that holds it, however that ends.
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            _build(config, file)
    return file


class Build(NamedTuple):
    """The result of one build: seconds, warnings, and the error that kept the kernel from being built, if any."""

    kernel: str
    seconds: float
    warnings: tuple[str, ...]
    error: str


def build_before_use(configs: Sequence[AnyConfig], jobs: int) -> Iterator[Build]:
    """Builds kernels that are not here into the folder of those that this machine built, and yields each as it is done."""
    # Not forked: the process may have a CUDA context and threads.
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        for done in as_completed([pool.submit(_built, config) for config in configs]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)  # one shutdown: the pool forgets the wish of the last but one


def _built(config: AnyConfig) -> Build:
    """One build of :func:`build_before_use`, in a process of its own."""
    begin, error = time.perf_counter(), ""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            file_of(config)
        except Exception as failure:  # of one kernel; the others are still wanted
            error = f"{type(failure).__name__}: {failure}"
        except KeyboardInterrupt:  # which the pool would keep as this build's result, and begin the next
            os._exit(130)
    texts = tuple(str(warning.message) for warning in said if issubclass(warning.category, SlowKernel))
    return Build(config.name, time.perf_counter() - begin, texts, error)


class SlowKernel(UserWarning):
    """A kernel that was compiled here is right, and slower than it should be."""


def _build(config: AnyConfig, file: Path) -> None:
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
            text = f"{config.name} is slower than it should be: {'; '.join(row['faults'])}"
            warnings.warn(text, SlowKernel, stacklevel=2)
        (Path(scratch) / file.name).replace(file)
