"""Numbers that ranks of one machine exchange through shared memory, in tens of microseconds.

Before bytes move, every call compares a few numbers of all ranks on the host (:mod:`tilewise.parallel.agreement`). Sockets took longer for
that than the launch of a whole step.

A rank writes its numbers, a count of the messages so far and a checksum of both. It reads the others' until they have the same count.
Each rank has two places in turn: a rank that writes message n + 2 has read all of n + 1, so all ranks have read all of n. The checksum
exposes a message that is still being written, in whatever order a processor's writes appear.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
import zlib
from collections.abc import Callable
from typing import Any

WORDS = 16
"""int64 numbers of a place: the count, how many numbers follow, the checksum, and the numbers."""
MOST = WORDS - 3
"""The most numbers of a message."""
FOLDER = "/dev/shm"
"""The folder of files in memory."""
SPINS, PAUSE = 1000, 50e-6
"""The looks without a pause, and then the pause between looks in seconds. 1000 looks take 2 to 3 ms."""


class Board:
    """One rank's view of the memory that all ranks of a group share.

    Args:
        path: of a file of :func:`size_of` bytes, zeros at first.
        timeout: the seconds that a rank waits for the others.
    """

    def __init__(self, path: str, rank: int, size: int, timeout: float):
        self.rank, self.size, self.timeout, self.count = rank, size, timeout, 0
        with open(path, "r+b") as file:
            self.words = memoryview(mmap.mmap(file.fileno(), size_of(size))).cast("q")

    def exchange(self, values: list[int]) -> list[list[int]]:
        """Exchange numbers, and return those of every rank.

        Raises:
            RuntimeError: a rank did not come in time, or with another count of numbers.
        """
        self.count += 1
        self._write(values)
        return [self._wait(rank, len(values)) for rank in range(self.size)]

    def place(self, rank: int) -> int:
        """Return the first word of a rank's place for this message."""
        return (2 * rank + self.count % 2) * WORDS

    def _write(self, values: list[int]) -> None:
        numbers = [int(value) for value in values]  # a bool is a number too, and reads as one
        first, message = self.place(self.rank), [self.count, len(numbers)]
        for n, word in enumerate([*message, _checksum([*message, *numbers]), *numbers]):
            self.words[first + n] = word

    def _wait(self, rank: int, length: int) -> list[int]:
        first, deadline, looks = self.place(rank), time.monotonic() + self.timeout, 0
        while True:
            words = self.words[first : first + WORDS].tolist()
            if (
                words[0] == self.count
                and 0 <= words[1] <= MOST
                and words[2] == _checksum(words[:2] + words[3 : 3 + words[1]])
            ):
                break
            looks += 1
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {self.rank} timed out after {self.timeout:g} s: rank {rank} makes no such call"
                )
            if looks > SPINS:
                time.sleep(PAUSE)
            else:  # others may need this core; sleep(0) took 60 to 80 us, because of the kernel's timer slack
                os.sched_yield()
        if words[1] != length:
            raise RuntimeError(
                f"rank {rank} says {words[1]} numbers where rank {self.rank} says {length}: they make other calls"
            )
        return words[3 : 3 + length]


def _checksum(words: list[int]) -> int:
    return zlib.crc32(repr(words).encode())


def size_of(ranks: int) -> int:
    """Return the bytes of a board for so many ranks."""
    return 2 * ranks * WORDS * 8


def shared(rank: int, size: int, timeout: float, objects: Callable[[Any], list[Any]]) -> Board | None:
    """Make a board for the ranks of a group, or return None if some of them do not see the same file. Every rank must call it.

    Args:
        objects: an object of every rank, by rank (:meth:`tilewise.parallel.exchange.Exchange.objects`).
    """
    file = _made(size) if rank == 0 else None
    try:
        path = objects(file)[0]
        board, mark = None, int.from_bytes(os.urandom(7))
        with contextlib.suppress(OSError, ValueError):  # no file of that name, or a shorter one
            board = Board(path, rank, size, timeout) if path else None
        if board is not None:
            board.words[board.place(rank)] = mark  # ranks on other machines may have a file of that name
        marks = objects(mark)
        same = board is not None and all(board.words[board.place(n)] == mark for n, mark in enumerate(marks))
        everybody = all(objects(same))
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                os.unlink(file)  # ranks that have mapped it keep it
    return board if everybody else None


def _made(size: int) -> str | None:
    """Make a file of zeros in memory, or return None if the system has no place or no room for it.

    Files elsewhere may lie on a disk that several machines share, and their maps of it would differ.
    """
    try:
        handle, path = tempfile.mkstemp(prefix="tilewise-", dir=FOLDER)
    except OSError:
        return None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(size_of(size)))
    except OSError:
        os.unlink(path)
        return None
    return path
