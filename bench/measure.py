"""Time, memory and machine: how a number comes about. Nothing here knows attention."""

import ctypes
import hashlib
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

ROOT = Path(__file__).resolve().parent.parent
Name, Result = TypeVar("Name"), TypeVar("Result")


# ---- statistics ---------------------------------------------------------------------------------------------------


class Timing(NamedTuple):
    """Seconds of one call over rounds: the median between the quartiles, its spread."""

    low: float
    median: float
    high: float


def summarize(seconds: list[float]) -> Timing:
    """Median and quartiles (inclusive, so that two samples have them too) of at least one sample."""
    if not seconds:
        raise ValueError("no samples to summarize")
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return Timing(low, median, high)


def steadiest(samples: list[float], device: str) -> float:
    """The figure that other work disturbs least: the least of a CPU's samples, since such work only adds, the median of a GPU's."""
    return statistics.median(samples) if device.startswith("cuda") else min(samples)


# ---- time ---------------------------------------------------------------------------------------------------------


GPU_HERTZ = 2e9
"""No GPU that is timed here has a faster clock, so a wait of so many cycles a second is not shorter than it should be."""


def seconds_per_call(
    call: Callable[[], object],
    calls: int,
    device: str,
    queued: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Runs `call` several times and returns the mean: CUDA events around them on a GPU, a `clock` on a CPU.

    On a GPU a call goes ahead of those that are timed, so that the host is ahead of the GPU. Where they are to be `queued`, the GPU then
    waits for as long as the host will take to launch them all: what is timed are their kernels alone. Otherwise a call whose way
    through Python takes longer than its kernels, 0.02 to 0.5 ms, is timed by its host.
    """
    if not device.startswith("cuda"):
        began = clock()
        for _ in range(calls):
            call()
        return (clock() - began) / calls
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if queued:
        torch.cuda._sleep(int((time.perf_counter() - began) * calls * GPU_HERTZ))
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3 / calls


def calls_for(seconds: float, device: str) -> int:
    """Calls in one sample, so that it lasts 2 ms on a CPU and 5 ms on a GPU, where events and launches cost more."""
    enough = 5e-3 if device.startswith("cuda") else 2e-3
    return max(1, min(200, round(enough / max(seconds, 1e-7))))


def interleaved(samples: Mapping[Name, Callable[[], Result]], rounds: int) -> dict[Name, list[Result]]:
    """What each sample gives in so many rounds.

    The order is drawn anew each round: a chip at its power limit runs slower behind whoever used much. It is the same in every process.
    """
    found: dict[Name, list[Result]] = {name: [] for name in samples}
    chance = random.Random(0)
    for _ in range(rounds):
        for name in chance.sample(list(samples), len(samples)):
            found[name].append(samples[name]())
    return found


def in_turns(
    calls: Mapping[Name, Callable[[], object]],
    device: str,
    rounds: int = 5,
    budget_ms: float = 12.0,
    around: Callable[[Name], AbstractContextManager] = lambda name: nullcontext(),
    **how: Any,
) -> dict[Name, float]:
    """Milliseconds a call, the :func:`steadiest` of :func:`interleaved` rounds of at most 50 calls in that budget.

    Args:
        around: the context that is entered around a sample of a call.
        how: as of :func:`seconds_per_call`.
    """

    def timed(name: Name, count: int) -> float:
        with around(name):
            return seconds_per_call(calls[name], count, device, **how)

    def sample(name: Name) -> Callable[[], float]:
        timed(name, 1)
        return partial(timed, name, max(1, min(50, int(budget_ms * 1e-3 / max(timed(name, 2), 1e-6)))))

    found = interleaved({name: sample(name) for name in calls}, rounds)
    return {name: steadiest(values, device) * 1e3 for name, values in found.items()}


def captured(
    call: Callable[[], object], ready: Callable[[], object] = torch.cuda.synchronize, mode: str = "global"
) -> tuple[Callable[[], None], object]:
    """A call as a CUDA graph, and what it returned, which each replay computes anew.

    The call is made three times before, on a stream of its own: what first calls set up, and keep for later ones, is in place.
    The replay keeps the call, and so what it reads: a graph keeps no tensor but those that were made in its capture, and the next
    capture gives freed memory back to the driver.

    Args:
        ready: what is done between these calls and the capture.
        mode: which threads' calls of the driver break the capture, as CUDA names it.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    ready()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        result = call()

    def replay(_reads: Callable[[], object] = call) -> None:
        graph.replay()

    return replay, result


def host_microseconds(call: Callable[..., object], given: Iterable[tuple], device: str) -> list[float]:
    """The host's time for a call of each arguments, which are there; the device has done all that went before."""
    found = []
    for arguments in given:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        began = time.perf_counter_ns()
        call(*arguments)
        found.append((time.perf_counter_ns() - began) / 1e3)
    return found


# ---- memory -------------------------------------------------------------------------------------------------------


class PeakMemory:
    """Bytes above what was there at the start, at the worst moment: `with PeakMemory(device) as peak: ...; peak.bytes`.

    On CUDA the allocator's own count. On Linux the process's high-water mark, reset first, after freed memory was handed
    back; elsewhere the growth of a high-water mark that cannot be reset, so only a first call in a fresh process counts.
    """

    def __init__(self, device: str):
        self.device = device
        self.bytes = 0

    def __enter__(self) -> "PeakMemory":
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
        else:
            _return_freed_memory()
            self.start = _resident()
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
        else:
            peak = _high_water()
        self.bytes = max(0, peak - self.start)


def _return_freed_memory() -> None:
    """Gives freed memory back to the system and resets the high-water mark, where the system has such calls."""
    if not sys.platform.startswith("linux"):
        return
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return


def _proc_bytes(file: str, field: str) -> int | None:
    """A line in kB of a file below /proc, as bytes; None where there is none."""
    try:
        lines = Path("/proc", file).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), None)


def _high_water() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return _proc_bytes("self/status", "VmHWM:") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _resident() -> int:
    return _proc_bytes("self/status", "VmRSS:") or _high_water()


def free_memory(device: str) -> int:
    """Bytes that can still be had: of the GPU, or of the machine and of the control group it runs in."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info()[0]
    free = [_proc_bytes("meminfo", "MemAvailable:"), _cgroup_left()]
    known = [n for n in free if n is not None]
    return min(known) if known else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_left() -> int | None:
    """The bytes that the control group leaves, its page cache counted as free."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - used + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return None


# ---- machine ------------------------------------------------------------------------------------------------------


def machine(device: str) -> dict:
    """The facts that a reader needs to judge a number: processor or GPU, threads, memory, versions, commit."""
    found = {
        "device": device_name(device),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions("tilewise", "triton", "numpy"),
        "commit": commit(),
        "sources": sources(),
    }
    if device.startswith("cuda"):
        found["versions"] |= {"cuda": torch.version.cuda or torch.version.hip, "cudnn": torch.backends.cudnn.version()}
        found["driver"] = _nvidia_smi("driver_version")
    return found


def versions(*packages: str) -> dict[str, str]:
    """The versions of Python, torch, and of these packages, where they are installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def device_name(device: str) -> str:
    """The GPU's name, or the processor's."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name()


def cpu_name() -> str:
    """The processor as /proc/cpuinfo names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str | None:
    """The checkout's commit, with + where tracked files differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=10)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + ("+" if changed.returncode else "")


def sources() -> str:
    """A hash of the package's and the benchmark's files: says what ran where there is no commit to name it."""
    digest = hashlib.sha256()
    for folder in (ROOT / "src", ROOT / "bench"):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".cpp", ".h", ".cu", ".toml"):
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _nvidia_smi(query: str) -> str | None:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.split("\n")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return lines[0].strip() or None


class Clock:
    """Samples the GPU's SM clock ten times a second while a block runs: `with Clock(device) as clock: ...; clock.mhz`."""

    def __init__(self, device: str):
        self.device = device
        self.mhz: float | None = None

    def __enter__(self) -> "Clock":
        self.process = None
        if self.device.startswith("cuda"):
            command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "-lms", "100"]
            try:
                self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            except OSError:
                self.process = None
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is None:
            return
        self.process.terminate()
        samples = [float(line) for line in self.process.communicate()[0].split() if line.replace(".", "").isdigit()]
        self.mhz = statistics.median(samples) if samples else None


def limits(device: str, dtype: torch.dtype) -> dict[str, float]:
    """This machine's pace, measured now: FLOP/s of torch's matrix product in dtype, bytes/s of a copy (read + write)."""
    cuda = device.startswith("cuda")
    n = 8192 if cuda else 1024
    a, b = (torch.randn(n, n, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    big = torch.empty((1 << 30 if cuda else 1 << 27), device=device, dtype=torch.uint8).fill_(1)
    target = torch.empty_like(big)
    matmul = best_of(lambda: a @ b, device)
    copy = best_of(lambda: target.copy_(big), device)
    return {"matmul_flops": 2 * n**3 / matmul, "copy_bytes": 2 * big.numel() / copy}


def best_of(call: Callable[[], object], device: str) -> float:
    """The shortest of a few samples after a warm-up: for a limit or a choice, not for a comparison."""
    call()
    calls = calls_for(seconds_per_call(call, 1, device), device)
    return min(seconds_per_call(call, calls, device) for _ in range(5))
