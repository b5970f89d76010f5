"""Facts of the machines that attention runs on, one look at the device at hand, and the streams of a GPU."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")

# If two threads share PyTorch's first vectorised function in a process (exp, log or tanh, all from MKL), one of them may compute by
# another program: its half of the numbers then has other bits, by up to 1.4e-4, in one process of eight (PyTorch 2.13, a Xeon;
# tests/reports/test_first_exponential.py). After one number by one thread no process did so.
torch.exp(torch.zeros(1, device="cpu"))


@dataclass(frozen=True)
class Device:
    """Attributes: ``cores`` (SMs on a GPU), ``shared_memory`` bytes that one of them can give to a kernel, ``memory`` bytes
    in all, ``capability`` as ``(major, minor)`` on NVIDIA."""

    name: str
    type: str
    cores: int
    shared_memory: int = 0
    memory: int = 0
    capability: tuple[int, int] = (0, 0)


STAND_INS: dict[str, Device] = {}
"""The facts of a GPU that is not there, by the type of the tensors that stand for its own, so that what is chosen is what it would get."""


def of(device: torch.device) -> Device:
    """Return the facts of a torch device; of a CPU with as many cores as PyTorch may use now."""
    if device.type in STAND_INS:
        return STAND_INS[device.type]
    if device.type == "cuda":
        return _gpu(device)
    if device.type == "cpu":
        return Device(_cpu_name(), "cpu", torch.get_num_threads())
    return Device(device.type, device.type, 1)


@lru_cache(maxsize=1)
def cuda_version() -> int:
    """Return the major version of CUDA that NVIDIA's driver supports, or 0 without such a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else version.value // 1000


MOST_BLOCKS = (2**31 - 1, 65_535, 65_535)
"""The most blocks that a launch has along x, y and z: CUDA's compute capabilities, Table "Technical Specifications". A launch of more is
CUDA_ERROR_INVALID_VALUE."""


def beyond_grid(launches: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the reasons against launches of so many blocks along x, y and z, by what they compute."""
    return [
        f"{blocks:,} blocks along {axis} in the launch of {what}, where a GPU has {most:,} at most"
        for what, grid in launches.items()
        for axis, blocks, most in zip("xyz", grid, MOST_BLOCKS, strict=False)
        if blocks > most
    ]


def is_captured() -> bool:
    """Return whether what is launched now goes into a CUDA graph."""
    return torch.cuda.is_initialized() and _capturing()


# is_captured for whoever holds a tensor on a GPU, so that CUDA is known to be initialised.
_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


def is_warming_up() -> bool:
    """Return whether torch.compile runs this thread on the memory of a CUDA graph that it is about to capture (``mode="reduce-overhead"``).

    Its graphs reuse that memory: what is kept of it would be overwritten, and PyTorch raises an error where something is.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not torch.cuda.is_initialized():
        return False
    device = torch.cuda.current_device()
    try:
        manager = trees.get_manager(device, create_if_none_exists=False)
    except (AssertionError, RuntimeError):  # PyTorch 2.11, in a thread that has no such graphs
        return False
    return manager is not None and manager.stream.cuda_stream == stream_of(device)


def lasting(make: Callable[[], Made]) -> Made:
    """Return a function's result on memory that no CUDA graph reuses, so that its tensors can be kept."""
    if not is_warming_up():
        return make()
    stream = torch.cuda.current_stream()

    def elsewhere() -> Made:
        with torch.no_grad(), torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as other:  # the graph's memory is for its own thread
        return other.submit(elsewhere).result()


# The number of the stream that torch uses on a device: 10 times as fast as torch.cuda.current_stream. Builds without CUDA have none.
stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


class _Counts:
    """Zeros of one device, made on the current stream: slices of them by stream, and how many are given away."""

    SIZE = 1 << 20

    def __init__(self, device: torch.device):
        with torch.inference_mode(False):
            self.zeros = torch.zeros(self.SIZE, dtype=torch.int32, device=device)
        self.by_stream: dict[int, torch.Tensor] = {}
        self.used = 0

    def take(self, count: int) -> torch.Tensor | None:
        """Return some that nobody has, or None if too few are left."""
        with _counts_lock:
            start, self.used = self.used, min(self.used + count, self.SIZE)
        return self.zeros[start : start + count] if start + count <= self.SIZE else None


_counts: dict[torch.device, _Counts] = {}
_counts_lock = threading.Lock()


_fresh: dict[tuple[int, int], _Counts] = {}
"""By device and stream: the allocator gives the memory of used ones back to the stream that made them, whose launches alone may then
still read it."""


def fresh(device: torch.device, count: int) -> torch.Tensor:
    """Return ``count`` zeros, int32, of the call's own: on a GPU, the next of many that the current stream has made zero at once
    (docs/decisions.md#repeated-calls)."""
    if device.type != "cuda" or count > 1024 or is_captured():
        return torch.zeros(count, dtype=torch.int32, device=device)
    at = device.index, stream_of(device.index)
    own = _fresh[at].take(count) if at in _fresh else None
    if own is None:
        made = lasting(lambda: _Counts(device))
        own, _fresh[at] = made.take(count), made
    return own


def counts(device: torch.device, count: int) -> torch.Tensor:
    """Return at least ``count`` zeros, int32. A kernel counts on them and leaves them zero: only launches that come one after the other
    have the same ones.

    Those of a stream do. In a CUDA graph every launch has its own, as its replays may run beside anything else but themselves; where none
    are left, the graph sets some to zero at each replay.
    """
    captured = is_captured()
    kept = _counts.get(device)
    if kept is None and not captured and torch.cuda.is_initialized():
        made = lasting(lambda: _Counts(device))
        torch.cuda.current_stream(device).synchronize()  # other streams, and graphs, need not wait
        kept = _counts.setdefault(device, made)
    if kept is None or captured:
        own = kept and kept.take(count)
        return torch.zeros(count, dtype=torch.int32, device=device) if own is None else own
    stream = stream_of(device.index)
    found = kept.by_stream.get(stream)
    if found is None or len(found) < count:
        found = kept.take(1 << (count - 1).bit_length())
        if found is None:
            return torch.zeros(count, dtype=torch.int32, device=device)
        kept.by_stream[stream] = found
    return found


MOST_ZEROS = 1 << 20
_zeros: dict[torch.device, torch.Tensor] = {}


def zeros(device: torch.device, count: int) -> torch.Tensor:
    """Return at least ``count`` zeros, fp32, which nobody may write: up to :data:`MOST_ZEROS` they are there before any call."""
    if count > MOST_ZEROS:
        return torch.zeros(count, device=device)
    found = _zeros.get(device)
    if found is None:
        if is_captured():
            return torch.zeros(count, device=device)
        with torch.inference_mode(False):
            found = lasting(lambda: torch.zeros(MOST_ZEROS, device=device))
        if found.is_cuda:
            torch.cuda.current_stream(device).synchronize()  # as of counts
        _zeros[device] = found
    return found


read_by_graphs: dict[int, Any] = {}
"""By id, what captures were given of what earlier calls made. A graph tells nobody how long it lives, so these stay."""


def given_to_graphs(found: Made) -> Made:
    """Return what is kept between calls, and keep it for good if a CUDA graph is being captured."""
    if is_captured():
        read_by_graphs[id(found)] = found
    return found


_indices: dict[torch.device, list[torch.Tensor]] = {}


def indices(device: torch.device, count: int) -> torch.Tensor:
    """Return the numbers from 0 on, at least ``count`` of them, int64, which nobody may write; on a GPU they are kept.

    Longer ones do not replace shorter ones, which graphs and other streams may still read.
    """
    kept = _indices.get(device)
    if kept is not None and len(kept[-1]) >= count:
        return kept[-1]
    if device.type != "cuda" or torch._C._len_torch_dispatch_stack() or _capturing():
        return torch.arange(count, device=device)
    with torch.inference_mode(False):
        found = lasting(lambda: torch.arange(max(1024, 1 << (count - 1).bit_length()), device=device))
    torch.cuda.current_stream(device).synchronize()  # as of counts
    _indices.setdefault(device, []).append(found)
    return found


MOST_WORKSPACE = 32 << 20


class _Workspaces(threading.local):
    """The workspaces of a thread, by device and stream. Each thread has its own: another one's launches may come between two of a call."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, int], torch.Tensor] = {}


_workspaces = _Workspaces()


def workspace(device: torch.device, size: int) -> torch.Tensor:
    """Memory of ``size`` bytes at least, uint8, for what kernels of one call on the current stream hand to each other, and nobody later:
    the next call has the same memory. More than :data:`MOST_WORKSPACE`, and a CUDA graph's, is a call's own.
    """
    if size > MOST_WORKSPACE or device.type != "cuda" or _capturing():
        return torch.empty(size, dtype=torch.uint8, device=device)
    at = device.index, stream_of(device.index)
    found = _workspaces.of.get(at)
    if found is None or len(found) < size:
        found = lasting(lambda: torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, device=device))
        _workspaces.of[at] = found
    return found


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}
"""Streams by device and number: torch makes a new object at each question."""


class Ready:
    """The moment when kernels of the current CUDA stream have made some tensors, for other streams that read them later."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        # Without CUDA a tensor that says cuda has no memory.
        self._tensors = [t for t in tensors if t.is_cuda] if torch.cuda.is_initialized() else []
        if self._tensors:
            self._device = self._tensors[0].device
            at = self._device.index, stream_of(self._device.index)
            stream = _streams.get(at)
            if stream is None:
                stream = _streams[at] = torch.cuda.current_stream(self._device)
            self._made = stream.record_event()
            self._streams = {at[1]}  # that may read them

    def await_here(self) -> None:
        """Make the current stream wait for the tensors, and keep their memory alive for its reads; done when a stream first asks."""
        if not self._tensors or stream_of(self._device.index) in self._streams:
            return
        # A capture depends on nothing outside of it; what was launched before has ended by then, and what a graph reads is kept.
        if is_captured():
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._made)
        for t in self._tensors:
            t.record_stream(stream)
        self._streams.add(stream.cuda_stream)


class Later:
    """A truth value that is computed on the device when it is first asked for. The host, which never waits for it, takes it to be false
    until it has arrived."""

    UNKNOWN = 2

    def __init__(self) -> None:
        self._told: torch.Tensor | None = None

    def __call__(self, compute: Callable[[], torch.Tensor]) -> bool:
        if self._told is None:
            if is_captured():
                return False
            found = compute()
            if found.is_meta:  # launches are only listed
                return False
            self._told = torch.full((), self.UNKNOWN, dtype=torch.uint8, pin_memory=found.is_cuda)
            self._told.copy_(found, non_blocking=True)
        return self._told.item() == 1


def tensors_in(made: Any) -> list[torch.Tensor]:
    """Return the tensors of a value of tensors, containers and dataclasses."""
    if isinstance(made, torch.Tensor):
        return [made]
    parts: Iterable[Any] = made if isinstance(made, (list, tuple)) else ()
    if isinstance(made, dict):
        parts = made.values()
    elif is_dataclass(made) and not isinstance(made, type):
        parts = [getattr(made, field.name) for field in fields(made)]
    return [x for part in parts for x in ([part] if isinstance(part, torch.Tensor) else tensors_in(part))]


@lru_cache(maxsize=64)
def _gpu(device: torch.device) -> Device:
    p = torch.cuda.get_device_properties(device)
    shared = getattr(p, "shared_memory_per_block_optin", 0)
    return Device(p.name, "cuda", p.multi_processor_count, shared, p.total_memory, (p.major, p.minor))


@lru_cache(maxsize=1)
def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        import platform

        return platform.processor() or platform.machine()
