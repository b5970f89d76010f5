"""The launcher on a driver that writes every call down (standin.cpp), and tensors that lie nowhere."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tilewise.backends.hopper.host import driver
from tilewise.backends.hopper.host.recipe import flat

CUDA = torch.device("cuda", 0)
STREAM = 0x5000  # the stream of device 0; a device's number is added
HERE = Path(__file__).parent
LAUNCHER = [Path(driver.__file__).parents[1] / "native" / name for name in ("launcher.cpp", "xla.cpp")]
CXX = ["g++", "-std=c++20", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared"]


def build(folder: Path) -> Path:
    """``libcuda.so.1``, which is the stand-in, and a launcher, into a folder; returns the latter. Skips without a compiler."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    if torch.cuda.is_available():
        pytest.skip("a real driver is here: the stand-in would not be found")
    subprocess.run(
        [*CXX, "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1", HERE / "standin.cpp", "-ldl"], check=True
    )
    subprocess.run([*CXX, "-Werror", "-o", folder / "launcher.so", *LAUNCHER, "-ldl"], check=True)
    return folder / "launcher.so"


class StandIn:
    """The driver of this process from here on: the launcher finds it by its name.

    Raises:
        RuntimeError: the process has another driver already, which launches would go to.
    """

    def __init__(self, folder: Path):
        c = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
        if ctypes.CDLL("libcuda.so.1")._handle != c._handle:
            raise RuntimeError(f"this process has another driver than the stand-in in {folder}")
        c.standin_record.restype = ctypes.c_char_p
        self.c = c

    def reset(self) -> None:
        """Forgets the record, failures to come, a capture and the current context; parameters' sizes stay known."""
        self.c.standin_reset()
        self.c.standin_current(-1)

    def lines(self, word: str = "") -> list[str]:
        return [line for line in self.c.standin_record().decode().splitlines() if line.startswith(word)]

    def sizes(self, kernel: str, sizes: Sequence[int]) -> None:
        """Tells it the parameters of a kernel."""
        self.c.standin_sizes(kernel.encode(), (ctypes.c_int * len(sizes))(*sizes), len(sizes))

    def fail(self, function: str, code: int) -> None:
        """The function's next call returns the code."""
        self.c.standin_fail(function.encode(), code)

    def capture(self, yes: bool) -> None:
        self.c.standin_capture(int(yes))


class Called(driver.Kernels):
    """Kernels that are called with the arguments of the function that launches them."""

    def __call__(self, *arguments: object) -> None:
        words, kinds, given = [], [], flat(arguments)
        for x in given:
            words += (*x.shape, *x.stride()) if hasattr(x, "stride") else (x,)
            kinds.append((x.dtype, len(x.shape)) if hasattr(x, "stride") else None)
        tensors = [x for x in given if hasattr(x, "stride")]
        device, count = tensors[0].device, len(tensors)
        words += [n for place in range(count) for n in (place, 0)]
        self.run(
            self.pack(tuple(kinds), words, device), struct.pack(f"{count}Q", *[x.data_ptr() for x in tensors]), device
        )


@dataclass
class Nowhere:
    """A tensor on a GPU that is not there: all of it but the memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = CUDA

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def data_ptr(self) -> int:
        return self.address
