"""The environment variables, read here and nowhere else.

- ``TILEWISE_CPU_ISA=name``: the cpu backend uses this instruction set (``amxbf16``, ``avx512bf16``, ``avx512``,
  ``avx2``, ``portable``), not the best one.
- ``TILEWISE_CPU_POOL=own``: the cpu backend computes on threads of its own, not on those of torch's OpenMP.
- ``TILEWISE_CPU_LIBRARY=path``: another build of the cpu backend's library, such as one with sanitizers.
- ``TILEWISE_HOPPER_KERNELS=path``: the folder of the hopper backend's compiled kernels, in place of the package's own.
- ``TILEWISE_LAUNCHER=path``: another build of the library that launches them.
- ``TILEWISE_CACHE=folder``: where what was measured or compiled on this machine is kept; default ``tilewise`` in
  ``XDG_CACHE_HOME`` or ``~/.cache``.
- ``TILEWISE_CHECK=1``: read ``cu_seqlens``, and a cache's table and lengths, back from the accelerator at each call, and refuse
  wrong ones and tensors of masks and scores that the longest sequence runs past.
- ``TRITON_PTXAS_PATH=path``, Triton's own: the assembler of all kernels for Hopper, with every version of Triton; beside
  ``TRITON_PTXAS_BLACKWELL_PATH=path`` the choice is Triton's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def check_values() -> bool:
    """Return whether values on an accelerator may be read back for checks."""
    return os.environ.get("TILEWISE_CHECK", "0") not in ("", "0")


def checks_values(device: torch.device) -> bool:
    """Return whether the values of lengths and tables are checked: on a CPU, and where :func:`check_values`."""
    return device.type == "cpu" or check_values()


def cpu_isa() -> str:
    """Return the instruction set that the cpu backend must use; empty: the best one."""
    return os.environ.get("TILEWISE_CPU_ISA", "")


def cpu_pool() -> str:
    """Return the owner of the threads that the cpu backend uses: ``torch`` or ``own``."""
    found = os.environ.get("TILEWISE_CPU_POOL", "torch") or "torch"
    if found not in ("torch", "own"):
        raise ValueError(f"TILEWISE_CPU_POOL={found}: it is torch or own")
    return found


def cpu_library() -> str:
    """Return the file of the cpu backend's library; empty: the one that was built with the package."""
    return os.environ.get("TILEWISE_CPU_LIBRARY", "")


def home() -> Path:
    """Return the user's home directory, or a folder that is not there and whose name says what to set."""
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and a user whom the machine does not know
        return Path("/", "no home directory, set HOME or TILEWISE_CACHE")


def cache_folder() -> Path:
    """Return the user's folder of what was measured or compiled on this machine."""
    named = os.environ.get("TILEWISE_CACHE", "")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "tilewise"


def hopper_kernels() -> str:
    """Return the folder of the hopper backend's compiled kernels; empty: ``kernels`` in the backend's own."""
    return os.environ.get("TILEWISE_HOPPER_KERNELS", "")


def launcher_library() -> str:
    """Return the file of the library that launches compiled kernels; empty for the package's own."""
    return os.environ.get("TILEWISE_LAUNCHER", "")


def triton_ptxas() -> str:
    """Return the assembler for Triton to use; empty for Triton's own."""
    return os.environ.get("TRITON_PTXAS_PATH", "")


def triton_ptxas_blackwell() -> str:
    """Return the newer assembler for Triton to use; empty for Triton's own."""
    return os.environ.get("TRITON_PTXAS_BLACKWELL_PATH", "")
