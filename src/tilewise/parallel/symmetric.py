"""Ranks of one machine that read each other's memory. The GPUs' copy engines move rows while kernels compute.

A rank puts its data in a *room*: memory that all ranks have mapped (``torch.distributed._symmetric_memory``, without multicast). Its peers
copy their parts straight to their places, on a stream of their own. No multiprocessor takes part.

A room is written again only after a barrier, which each rank passes after waiting for its copies from the room. The rooms of a call's two
directions alternate, so the barriers at the beginning of its exchanges suffice.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.device import is_captured
from tilewise.parallel.exchange import Exchange, Group
from tilewise.parallel.layout import Layout

GRAIN = 1 << 21
"""The bytes of a room are a multiple of this, as drivers map memory."""
TIMEOUT_MS = 600_000
"""The time for which a rank waits for the others at a barrier before its kernel fails."""


def group_of(group: dist.ProcessGroup | None) -> Group:
    """Return the ranks of a process group, as a :class:`SymmetricGroup` if their GPUs reach each other's memory."""
    plain = Group(group)
    places = set(plain.objects((socket.gethostname(), *_namespaces())))
    plain.nodes = len({place[0] for place in places})
    if plain.host is group:
        return plain
    if len(places) > 1:
        plain.carrier += "; not copy engines: ranks are on several machines or in several containers"
        return plain
    try:
        found = SymmetricGroup(group)
        found.room("try", (1,), torch.empty(1, device="cuda"), 1)
        failed = ""
    except Exception as error:  # a private part of torch, which fails in many ways with drivers and builds
        failed = f"{type(error).__name__}: {error}".partition("\n")[0]
    failures = [f"rank {rank}: {said}" for rank, said in enumerate(plain.objects(failed)) if said]
    if not failures:
        return found
    plain.carrier += f"; not copy engines, since symmetric memory fails on {failures[0]}"
    return plain


def _namespaces() -> list[str]:
    """Return the operating system's names for a process's machine, files and process numbers, by which processes find each other's memory.

    Containers or machines with one host name may give one number, or one path, to several processes.
    """
    found = []
    for path, read in (
        ("/proc/sys/kernel/random/boot_id", _text),
        ("/proc/self/ns/mnt", os.readlink),
        ("/proc/self/ns/pid", os.readlink),
    ):
        try:
            found.append(read(path))
        except OSError:  # unknown here, so host names must do
            found.append("")
    return found


def _text(path: str) -> str:
    with open(path) as file:
        return file.read().strip()


class SymmetricGroup(Group):
    """The ranks of an NCCL group on one machine whose GPUs reach each other's memory."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        super().__init__(group)
        self.carrier = "copy engines, by symmetric memory"
        self._rooms: dict[str, tuple[Tensor, Any]] = {}
        self._views: dict[str, dict[tuple, list[tuple[int, Tensor]]]] = {}  # of peers' rooms, by name, shapes and dtype
        # Rooms that CUDA graphs read. They stay, because graphs do not tell when they end.
        self._captured: list[tuple[Tensor, Any]] = []
        self._stream = torch.cuda.Stream()

    @classmethod
    def joined_by(cls, group: dist.ProcessGroup) -> Exchange:
        return group_of(group)

    def room(self, name: str, shape: Sequence[int], like: Tensor, most: int) -> Tensor:
        if not like.is_cuda:  # a group of two backends also takes tensors of the CPU
            return super().room(name, shape, like, most)
        memory, _ = self._mapped(name, most * like.element_size(), like.device)
        return memory.view(like.dtype)[: math.prod(shape)].view(shape)

    def _mapped(self, name: str, nbytes: int, device: torch.device) -> tuple[Tensor, Any]:
        """Return a name's memory of at least so many bytes, and the handle to reach the peers'. It grows on all ranks at once.

        Raises:
            NotImplementedError: the capture of a CUDA graph needs more.
        """
        import torch.distributed._symmetric_memory as symmetric_memory  # loads much, which nothing else needs

        found, capturing = self._rooms.get(name), is_captured()
        if found is None or found[0].numel() < nbytes:
            if capturing:
                raise NotImplementedError(
                    "a CUDA graph is captured, and memory that ranks share cannot be mapped meanwhile: call attention once as it is "
                    "captured, on every rank, before"
                )
            torch.cuda.synchronize(device)
            self.numbers([nbytes])  # no rank still reads the freed memory
            memory = symmetric_memory.empty(-(-nbytes // GRAIN) * GRAIN, dtype=torch.uint8, device=device)
            group: Any = dist.group.WORLD if self.group is None else self.group
            found = self._rooms[name] = memory, symmetric_memory.rendezvous(memory, group=group)
            self._views[name] = {}
        if capturing and not any(found is held for held in self._captured):
            self._captured.append(found)
        return found

    def to_heads(self, name: str, sent: Tensor, layout: Layout) -> Callable[[], Tensor]:
        return (self.copied_to_heads if sent.is_cuda else super().to_heads)(name, sent, layout)

    def to_rows(self, name: str, sent: Tensor, layout: Layout) -> Callable[[], Tensor]:
        return (self.copied_to_rows if sent.is_cuda else super().to_rows)(name, sent, layout)

    def copied_to_heads(self, name: str, sent: Tensor, layout: Layout) -> Callable[[], Tensor]:
        """Do :meth:`to_heads` by copy engines."""
        whole = sent.new_empty((layout.seqlen, *sent.shape[2:]))
        peers = self._peers(name, [(self.size, rows, *sent.shape[2:]) for rows in layout.lengths], sent)
        copies = [
            (whole[start:stop], peer[self.rank, first : first + stop - start])
            for rank, peer in peers
            for start, stop, first in layout.rows(rank)
        ]
        self.received += whole.nbytes - sent[self.rank].nbytes
        return self._copied(copies, whole)

    def copied_to_rows(self, name: str, sent: Tensor, layout: Layout) -> Callable[[], Tensor]:
        """Do :meth:`to_rows` by copy engines."""
        own = sent.new_empty((self.size, layout.lengths[self.rank], *sent.shape[1:]))
        peers = self._peers(name, [sent.shape] * self.size, sent)
        copies = [
            (own[rank, first : first + stop - start], peer[start:stop])
            for rank, peer in peers
            for start, stop, first in layout.rows(self.rank)
        ]
        self.received += own[1:].nbytes
        return self._copied(copies, own)

    def _peers(self, name: str, shapes: Sequence[Sequence[int]], like: Tensor) -> list[tuple[int, Tensor]]:
        """Return every rank's room of a name, once all have filled theirs: the rank's own first, then the next one's, and so on."""
        _, handle = self._rooms[name]
        handle.barrier(channel=0, timeout_ms=TIMEOUT_MS)
        views, key = self._views[name], (*shapes, like.dtype)
        if key not in views:
            ranks = [(self.rank + n) % self.size for n in range(self.size)]
            views[key] = [(rank, handle.get_buffer(rank, list(shapes[rank]), like.dtype)) for rank in ranks]
        return views[key]

    def _copied(self, copies: list[tuple[Tensor, Tensor]], whole: Tensor) -> Callable[[], Tensor]:
        """Start copies into ``whole`` on their own stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in copies:
                target.copy_(source)
            done = self._stream.record_event()

        def finish() -> Tensor:
            torch.cuda.current_stream().wait_event(done)
            return whole

        return finish
