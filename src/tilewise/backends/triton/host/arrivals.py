"""Counters by which the last program of a tile knows that it is the last (``kernels.last_arrival``): 0 between launches.

No launch sets them to 0, as that would take as long as the launch it saves; each kernel leaves its own at 0. So launches that may run at
the same time must not share counters. Eager launches of one stream come one after the other and share those of the stream. A launch that
is captured in a graph has its own: graphs may be replayed in any stream.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

OF_A_STREAM = 4096  # counters that the eager launches of a stream share: the most that one may have
OF_A_DEVICE = 1 << 18  # 1 MiB; a graph's launch takes one for each of its tiles for good
_LOCK = threading.Lock()


class Counters:
    """The counters in ``memory``, int32, all 0: dealt out, and never taken back."""

    def __init__(self, memory: Tensor):
        self.memory, self.dealt = memory, 0
        self.of_streams: dict[int, Tensor] = {}

    def deal(self, count: int) -> Tensor | None:
        """So many counters of one's own, None where none are left; they begin at a multiple of 16 bytes."""
        start, self.dealt = self.dealt, self.dealt + -(-count // 4) * 4
        return self.memory[start : start + count] if self.dealt <= len(self.memory) else None

    def of_stream(self, stream: int) -> Tensor | None:
        """The counters that launches in a stream share."""
        found = self.of_streams.get(stream)
        if found is None:
            found = self.deal(OF_A_STREAM)
            if found is not None:
                self.of_streams[stream] = found
        return found


_BY_DEVICE: dict[torch.device, Counters] = {}


def arrivals(count: int, device: torch.device) -> Tensor | None:
    """int32 (count,) or more, all 0: the counters of the tiles of a launch in the current stream; None where there are none for it."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    if count > OF_A_STREAM:
        return None
    capturing = torch.cuda.is_current_stream_capturing()
    with _LOCK:
        counters = _BY_DEVICE.get(device)
        if counters is None:
            if capturing:  # memory of a graph is not set to 0 once for all
                return None
            memory = torch.zeros(OF_A_DEVICE, dtype=torch.int32, device=device)
            torch.cuda.current_stream(device).synchronize()  # once a device: another stream may use them next
            counters = _BY_DEVICE[device] = Counters(memory)
        if capturing:
            return counters.deal(count)
        return counters.of_stream(torch._C._cuda_getCurrentRawStream(device.index))
