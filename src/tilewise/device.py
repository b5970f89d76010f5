"""Facts of the machines that attention runs on: a table, and one look at the device at hand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


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


def of(device: torch.device) -> Device:
    """The facts of a torch device; of a CPU with as many cores as PyTorch may use now."""
    if device.type == "cuda":
        return _gpu(device)
    if device.type == "cpu":
        return Device(_cpu_name(), "cpu", torch.get_num_threads())
    return Device(device.type, device.type, 1)


def is_captured() -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


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
