"""Find, load and check the native library, and declare its structs for ctypes (native/interface.h)."""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import POINTER, Structure, c_char, c_char_p, c_double, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path

import torch

from tilewise import settings
from tilewise.backends.base import why_not_built

VERSION = 14
DIMS = 8
LONGEST = (1 << 31) - 1  # queries or keys
SIZES = ("batch", "heads_q", "heads_k", "head_dim", "head_dim_v", "seqlen_q", "seqlen_k")
TYPES = {
    torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.int64: 4, torch.int32: 5,
    torch.int16: 6, torch.int8: 7, torch.uint8: 8, torch.bool: 8,
}  # fmt: skip
_FILE = Path(__file__).with_name("libtilewise_cpu.so")
_BAD_CALL, _NO_MEMORY, _INTERRUPTED = 1, 2, 4


class Tensor(Structure):
    _fields_ = [("data", c_void_p), ("batch", c_int64), ("row", c_int64), ("head", c_int64)]


class Ends(Structure):
    _fields_ = [("data", c_void_p), ("batch", c_int64), ("head", c_int64)]


class Window(Structure):
    _fields_ = [("ends", c_int32), ("unused", c_int32), ("left", c_int64), ("right", c_int64)]


class Leaf(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("type", c_int32),
        ("dims", c_int32),
        ("size", c_int64 * DIMS),
        ("stride", c_int64 * DIMS),
    ]


class Instruction(Structure):
    _fields_ = [
        *[(name, c_int32) for name in ("op", "type", "out", "a", "b", "c", "dims")],
        ("index", c_int32 * DIMS),
        ("mode", c_int32 * DIMS),
        ("number", c_double),
        ("integer", c_int64),
    ]


class LeafGradient(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("group_stride", c_int64),
        *[(name, c_int32) for name in ("wide", "slope", "dims")],
        ("index", c_int32 * DIMS),
        ("mode", c_int32 * DIMS),
        ("size", c_int64 * DIMS),
        ("stride", c_int64 * DIMS),
    ]


class Program(Structure):
    _fields_ = [
        ("code", POINTER(Instruction)),
        ("range", c_int32 * 2 * 4 * 3),
        *[(name, c_int32) for name in ("registers", "raw", "score", "keep", "slope", "leaf_gradients")],
        ("leaves", POINTER(Leaf)),
        ("gradients", POINTER(LeafGradient)),
    ]


class Signals(Structure):
    _fields_ = [*[(name, c_void_p) for name in ("enter", "check", "fetch", "leave")], ("raised", c_void_p * 3)]


class Call(Structure):
    _fields_ = [
        *[(name, c_int32) for name in ("version", "type", "threads", "heads_per_item")],
        ("isa", c_char_p),
        *[(name, c_int64) for name in SIZES],
        *[(name, c_int64) for name in ("tile_m", "tile_n", "split")],
        ("softmax_scale", c_double),
        ("cu_seqlens_q", c_void_p),
        ("cu_seqlens_k", c_void_p),
        ("block_table", c_void_p),
        ("table_row", c_int64),
        ("page_size", c_int64),
        *[(name, Tensor) for name in "qkvo"],
        ("lse", c_void_p),
        ("lse_batch", c_int64),
        ("lse_head", c_int64),
        ("max_logit", c_void_p),
        ("sink", c_void_p),
        ("window", Window),
        *[(name, Ends) for name in ("lo", "hi", "first", "last")],
        *[(name, c_void_p) for name in ("status", "status_at", "status_head")],
        ("seen", c_void_p),
        ("seen_batch", c_int64),
        ("seen_head", c_int64),
        ("program", Program),
        ("seed", c_uint64),
        ("q_start", c_int64),
        ("k_start", c_int64),
        ("keep_below", c_uint32),
        *[(name, c_int32) for name in ("shares", "serial_batch", "serial_head", "one_order", "deterministic")],
        *[(name, Tensor) for name in ("dout", "dq", "dk", "dv")],
        ("dlse", c_void_p),
        ("delta", c_void_p),
        ("signals", c_void_p),
    ]


class Moved(Structure):
    _fields_ = [
        *[(name, Tensor) for name in "qkvo"],
        ("lse", c_void_p),
        ("sink", c_void_p),
        ("raw", c_int64),
    ]


# How a long call on the main thread runs the interpreter's signal handlers.
_SIGNALS = Signals(
    *[
        ctypes.cast(getattr(ctypes.pythonapi, name), c_void_p)
        for name in ("PyGILState_Ensure", "PyErr_CheckSignals", "PyErr_Fetch", "PyGILState_Release")
    ]
)
_raise_again = ctypes.PYFUNCTYPE(None, c_void_p, c_void_p, c_void_p)(("PyErr_Restore", ctypes.pythonapi))


class Library:
    """The loaded functions.

    Attributes:
        isas: the instruction sets of this machine, best first.
        operations: the numbers of a score program's operations, by name.
    """

    def __init__(self, path: Path):
        c = ctypes.CDLL(str(path))
        c.tw_operations.restype, c.tw_call_size.restype = c_char_p, c_int64
        if c.tw_version() != VERSION or c.tw_call_size() != ctypes.sizeof(Call):
            raise OSError(f"{path.name} was built from other sources; install tilewise again")
        names = ctypes.create_string_buffer(256)
        c.tw_isas(names, c_int64(len(names)))
        self.isas = tuple(names.value.decode().split(","))
        self.operations = {name: n for n, name in enumerate(c.tw_operations().decode().split())}
        c.tw_use_openmp.argtypes, c.tw_use_openmp.restype = (c_void_p,), None
        self.use_openmp = c.tw_use_openmp
        self.use_openmp(openmp())
        self._functions = {
            "forward": c.tw_forward,
            "backward": c.tw_backward,
            "jvp": c.tw_jvp,
            "list": c.tw_list_blocks,
            "choose": c.tw_choose,
        }
        more = {"jvp": (POINTER(Moved),), "list": (c_int64, c_int64), "choose": (c_int,)}
        for name, function in self._functions.items():
            function.argtypes = (POINTER(Call), *more.get(name, ()), POINTER(c_char), c_int64)

    def choose(self, call: Call, backward: bool) -> None:
        """Fill in the tiles of a pass, by shape. Raises: as :meth:`run`."""
        self._call("choose", call, backward)

    def run(self, name: str, call: Call, *more: Structure | int) -> None:
        """Run ``forward``, ``backward``, ``jvp`` with a Moved, or ``list`` with the sizes of blocks, without the GIL.

        On the main thread signal handlers run every 50 ms. An exception in one (Ctrl-C) ends the call.

        Raises:
            MemoryError, ValueError, RuntimeError: what the library reports.
        """
        if threading.get_ident() == threading.main_thread().ident:
            call.signals = ctypes.addressof(_SIGNALS)
        self._call(name, call, *more)

    def _call(self, name: str, call: Call, *more: Structure | int) -> None:
        text = ctypes.create_string_buffer(256)
        code = self._functions[name](call, *more, text, len(text))
        if code == _INTERRUPTED:
            _raise_again(*_SIGNALS.raised)
        if code:
            error = MemoryError if code == _NO_MEMORY else ValueError if code == _BAD_CALL else RuntimeError
            raise error(f"the cpu backend failed: {text.value.decode()}")


_PF_FORKNOEXEC = 0x40  # of Linux: forked, and no program was started since


def was_forked() -> bool:
    """Return whether this process was forked from one that ran the same program.

    If the parent had OpenMP's threads, OpenMP does not know that they are gone, and waits for them forever."""
    # Of the first thread: the flags of later ones say so in every process. The name, in brackets, may hold anything.
    flags = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[6]
    return bool(int(flags) & _PF_FORKNOEXEC)


def mapped_files(maps: bytes) -> set[str]:
    """Return the files that Linux lists as mapped, whose names may hold anything."""
    lines = (line.split(maxsplit=5) for line in maps.splitlines())
    return {os.fsdecode(words[5]) for words in lines if words[5:] and words[5].startswith(b"/")}


def openmp() -> int | None:
    """Return the address of ``GOMP_parallel`` in the OpenMP runtime that torch uses.

    Return None if there is none, if the setting asks for threads of our own, or in a forked child, which lost OpenMP's threads.
    """
    if settings.cpu_pool() == "own" or not os.path.exists("/proc/self/maps") or was_forked():
        return None
    files, names = mapped_files(Path("/proc/self/maps").read_bytes()), ("libgomp", "libiomp5", "libomp.")
    runtimes = sorted((f for f in files if os.path.basename(f).startswith(names)), key=lambda f: "/torch/" not in f)
    if not runtimes:
        return None
    try:
        return ctypes.cast(getattr(ctypes.CDLL(runtimes[0]), "GOMP_parallel", None), c_void_p).value
    except OSError:  # its file is gone
        return None


@lru_cache(maxsize=1)
def load() -> Library | str:
    """Return the library, or why there is none."""
    path = Path(settings.cpu_library() or _FILE)
    if not path.exists():
        why = f"TILEWISE_CPU_LIBRARY={path}" if settings.cpu_library() else why_not_built()
        return f"its library is not there ({path.name}): {why}"
    try:
        return Library(path)
    except (OSError, AttributeError) as error:  # or another library
        return f"its library does not load: {error}"


def chosen_isa() -> str:
    """Return the instruction set in use: the best one, or that of ``TILEWISE_CPU_ISA``.

    Raises:
        ValueError: this machine does not have it.
    """
    library = load()
    if isinstance(library, str):
        return ""
    asked = settings.cpu_isa()
    if asked and asked not in library.isas:
        raise ValueError(f"TILEWISE_CPU_ISA={asked}: this machine has {', '.join(library.isas)}")
    return asked or library.isas[0]
