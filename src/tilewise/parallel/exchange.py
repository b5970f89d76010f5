"""The few collectives that parallel attention needs. No other module calls torch.distributed's.

A collective depends on all ranks' arguments alone, and sums run in the order of ranks, so results repeat bit for bit. ``received`` counts
the bytes from other ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.caching import cached_property
from tilewise.parallel import board
from tilewise.parallel.layout import Layout, check

# PyTorch 2.13 gave the collective this name and warns of the older one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


Gradients = tuple[Tensor | None, Tensor | None]
"""do and dlse, or None if nothing depends on o, or on lse."""


class Exchange:
    """One rank's end of a group of ranks. Rows and heads are exchanged by one collective, :meth:`swap`.

    Attributes:
        nodes: the number of machines.
        carrier: the transport of rows between ranks, and why no faster one is used, in words.
    """

    rank: int
    size: int
    received: int
    nodes: int = 1
    carrier: str = "nothing: ranks of one process"

    def split(self, within: int) -> tuple[Exchange, Exchange]:
        """Return two smaller groups of the rank: so many neighbouring ranks, and all ranks with its place among their neighbours."""
        raise NotImplementedError

    def numbers(self, values: list[int]) -> list[list[int]]:
        """Return every rank's int64 numbers, equally many, by rank, on the host."""
        raise NotImplementedError

    def objects(self, value: Any) -> list[Any]:
        """Return one picklable object of every rank, by rank. It is slow, and meant for errors."""
        raise NotImplementedError

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return a tensor from every rank, by rank. All have one shape and dtype."""
        raise NotImplementedError

    def swap(self, sent: Tensor, counts: Sequence[int], received: Sequence[int]) -> Callable[[], Tensor]:
        """Start to send ``counts[r]`` rows to each rank r, in order, and to receive ``received[r]`` rows from it.

        The result waits for the rows of all ranks, and returns them in order."""
        raise NotImplementedError

    def room(self, name: str, shape: Sequence[int], like: Tensor, most: int) -> Tensor:
        """Return uninitialised memory for data that :meth:`to_heads` or :meth:`to_rows` sends. The next call with this name may reuse it.

        Args:
            most: the elements in the room of any rank.
        """
        return like.new_empty(shape)

    def to_heads(self, name: str, sent: Tensor, layout: Layout) -> Callable[[], Tensor]:
        """Start the exchange from rows of all heads to all rows of some heads, and return the function that waits for it.

        Args:
            sent: ``room(name, ...)`` with the rank's rows ``(ranks, lengths[rank], ...)``: for each rank the columns of its heads.

        Returns:
            A function that returns ``(seqlen, ...)``, this rank's columns of the rows of all ranks, in the order of positions.
        """
        finish = self.swap(sent.flatten(0, 1), [sent.shape[1]] * self.size, layout.lengths)

        def in_order() -> Tensor:
            rows = finish()
            return rows if layout.in_order else layout.unshard(rows.split(layout.lengths), 0)

        return in_order

    def to_rows(self, name: str, sent: Tensor, layout: Layout) -> Callable[[], Tensor]:
        """Start the exchange from all rows of some heads to rows of all heads, the inverse of :meth:`to_heads`.

        Args:
            sent: ``room(name, ...)`` with ``(seqlen, ...)``, the columns of this rank's heads in the order of positions.

        Returns:
            A function that returns ``(ranks, lengths[rank], ...)``: this rank's rows of the columns of each rank's heads.
        """
        own = layout.lengths[self.rank]
        if not layout.in_order:
            sent = torch.cat([sent[start:stop] for held in layout.pieces for start, stop in held])
        finish = self.swap(sent, layout.lengths, [own] * self.size)
        return lambda: finish().unflatten(0, (self.size, own))


def ordered_sum(parts: list[Tensor]) -> Tensor:
    """Return the sum of tensors, added in order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def split_ranks(rank: int, size: int, within: int) -> tuple[range, range]:
    """Return the neighbours of a rank in groups of ``within``, and the ranks with its place among theirs."""
    first, place = rank // within * within, rank % within
    return range(first, first + within), range(place, size, within)


def backend_of(group: dist.ProcessGroup | None) -> str:
    """Return the name of a group's backend, or ``"cpu:gloo,cuda:nccl"`` of a group that was made without one.

    ``init_device_mesh`` makes such groups, and ``init_process_group`` under torchrun.
    """
    name = dist.get_backend(group)
    return dist.get_backend_config(group) if name == dist.Backend.UNDEFINED else name


def _has_nccl(group: dist.ProcessGroup | None) -> bool:
    # A build for GPUs names NCCL on machines without any, too.
    return "nccl" in backend_of(group) and torch.cuda.is_available()


class Group(Exchange):
    """The ranks of a :class:`torch.distributed.ProcessGroup`: NCCL on GPUs, gloo on CPUs.

    Args:
        group: the process group; ``None`` is the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("torch.distributed is not initialized; call torch.distributed.init_process_group first")
        self.group, self.received, self.carrier = group, 0, backend_of(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # Ranks' exchanges on the host must not wait for the GPUs.
        self.host = group
        if _has_nccl(group):
            ranks = dist.get_process_group_ranks(group)
            self.host = self._new_group(ranks, "gloo")

    @cached_property
    def board(self) -> board.Board | None:
        """The memory that all ranks share, if they are on one machine. The first call makes it, on all ranks."""
        return board.shared(self.rank, self.size, self._timeout().total_seconds(), self.objects)

    def _timeout(self) -> timedelta:
        """Return how long a rank waits for the others: the process group's timeout, which groups made from it keep."""
        group: Any = dist.group.WORLD if self.group is None else self.group
        device = torch.device("cuda" if _has_nccl(group) else "cpu")
        try:
            return group._get_backend(device).options._timeout
        except (AttributeError, RuntimeError):  # private parts of torch
            return dist.distributed_c10d.default_pg_timeout

    def numbers(self, values: list[int]) -> list[list[int]]:
        if self.board is not None and len(values) <= board.MOST:
            return self.board.exchange(values)
        out = torch.empty(self.size * len(values), dtype=torch.int64)
        _all_gather(out, torch.tensor(values, dtype=torch.int64), group=self.host)
        return out.view(self.size, -1).tolist()

    def objects(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.host)
        return found

    def gather(self, x: Tensor) -> list[Tensor]:
        out = x.new_empty((self.size, *x.shape))
        _all_gather(out.view(-1), x.contiguous().view(-1), group=self.group)  # gloo takes only flat tensors
        self.received += (self.size - 1) * x.nbytes
        return list(out.unbind(0))

    def split(self, within: int) -> tuple[Exchange, Exchange]:
        ranks, backend = dist.get_process_group_ranks(self.group or dist.group.WORLD), backend_of(self.group)
        neighbours, alike = ([ranks[n] for n in found] for found in split_ranks(self.rank, self.size, within))
        return self.joined_by(self._new_group(neighbours, backend)), self.joined_by(self._new_group(alike, backend))

    def _new_group(self, ranks: list[int], backend: str) -> dist.ProcessGroup:
        """Return a process group of these ranks, which include this one."""
        made: Any = dist.new_group(ranks, self._timeout(), backend=backend, use_local_synchronization=True)
        return made

    @classmethod
    def joined_by(cls, group: dist.ProcessGroup) -> Exchange:
        """Return the ranks of another process group, joined in the same way."""
        return Group(group)

    def swap(self, sent: Tensor, counts: Sequence[int], received: Sequence[int]) -> Callable[[], Tensor]:
        out = sent.new_empty((sum(received), *sent.shape[1:]))
        self.received += out.nbytes - received[self.rank] * out[:1].nbytes
        work: Any = dist.all_to_all_single(
            out, sent.contiguous(), list(received), list(counts), group=self.group, async_op=True
        )

        def finish() -> Tensor:
            work.wait()
            return out

        return finish


class Silent(Exchange):
    """A rank without peers. Received tensors have their shape and no content; fake kernels compute shapes with it."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.received = rank, size, 0

    def split(self, within: int) -> tuple[Exchange, Exchange]:
        return Silent(self.rank % within, within), Silent(self.rank // within, self.size // within)

    def numbers(self, values: list[int]) -> list[list[int]]:
        return [values] * self.size

    def objects(self, value: Any) -> list[Any]:
        return [value] * self.size

    def gather(self, x: Tensor) -> list[Tensor]:
        return [x] * self.size

    def swap(self, sent: Tensor, counts: Sequence[int], received: Sequence[int]) -> Callable[[], Tensor]:
        return lambda: sent.new_empty((sum(received), *sent.shape[1:]))


class Simulated(Exchange):
    """All ranks as threads of one process, for tests and demonstrations. Each collective is a meeting of all threads."""

    def __init__(self, rank: int, meeting: Meeting):
        self.rank, self.size, self.meeting, self.received = rank, meeting.size, meeting, 0

    def split(self, within: int) -> tuple[Exchange, Exchange]:
        found: list[Exchange] = []
        for ranks in split_ranks(self.rank, self.size, within):
            meetings = self.objects(self.meeting.of_some(len(ranks)))  # all use the first one's
            found.append(Simulated(list(ranks).index(self.rank), meetings[ranks[0]]))
        return found[0], found[1]

    def numbers(self, values: list[int]) -> list[list[int]]:
        return self.objects(values)

    def objects(self, value: Any) -> list[Any]:
        return self.meeting.meet(self.rank, value)

    def gather(self, x: Tensor) -> list[Tensor]:
        self.received += (self.size - 1) * x.nbytes
        return self.objects(x.clone())

    def swap(self, sent: Tensor, counts: Sequence[int], received: Sequence[int]) -> Callable[[], Tensor]:
        parts = [theirs[self.rank] for theirs in self.objects(list(sent.clone().split(list(counts))))]
        self.received += sum(part.nbytes for part in parts) - parts[self.rank].nbytes
        return lambda: torch.cat(parts)


class Meeting:
    """The place where simulated ranks exchange values."""

    def __init__(self, size: int):
        self.size, self.barrier = size, threading.Barrier(size)
        self.values: list[Any] = [None] * size
        self.within: list[Meeting] = []

    def of_some(self, size: int) -> Meeting:
        """Return a place for some of the ranks."""
        self.within.append(Meeting(size))
        return self.within[-1]

    def abort(self) -> None:
        """Break this meeting, and those of some of its ranks, for whoever waits there."""
        self.barrier.abort()
        for meeting in self.within:
            meeting.abort()

    def meet(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks. A rank that failed breaks the meeting for the others."""
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()  # no rank overwrites before all have read
        return found


def simulate(ranks: int, run: Callable[[Exchange], Any]) -> list[Any]:
    """Call ``run`` for every rank in a thread of its own, and return the results by rank. The first rank's error is raised.

    A rank that waits for a failed one also ends, with ``threading.BrokenBarrierError``. That error is not raised.
    """
    check("simulate", ranks=ranks)
    meeting = Meeting(ranks)
    results: list[Any] = [None] * ranks
    errors: list[BaseException | None] = [None] * ranks

    def one(rank: int) -> None:
        try:
            results[rank] = run(Simulated(rank, meeting))
        except BaseException as error:
            errors[rank] = error
            meeting.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [error for error in errors if error is not None]
    for error in sorted(failed, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return results
