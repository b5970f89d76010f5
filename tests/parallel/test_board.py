"""Numbers of all ranks in memory that they share."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from tilewise.parallel import board
from tilewise.parallel.board import Board
from tilewise.parallel.exchange import simulate


def in_threads(size: int, run) -> list:
    """What each rank returns of ``run(rank)``, or the text of its error."""
    found: list = [None] * size

    def one(rank: int) -> None:
        try:
            found[rank] = run(rank)
        except RuntimeError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "board"
    file.write_bytes(bytes(board.size_of(3)))
    return str(file)


def test_every_rank_reads_all_messages_in_their_order(path):
    def run(rank):
        mine = Board(path, rank, 3, 20.0)
        return [mine.exchange([rank, n, -(2**60)][: 1 + n % 3]) for n in range(40)]

    expected = [[[rank, n, -(2**60)][: 1 + n % 3] for rank in range(3)] for n in range(40)]
    assert in_threads(3, run) == [expected] * 3


def test_truth_is_a_number_too(path):
    assert (
        in_threads(3, lambda rank: Board(path, rank, 3, 2.0).exchange([5, rank == 1])) == [[[5, 0], [5, 1], [5, 0]]] * 3
    )


def test_a_message_that_is_still_being_written_is_not_read(path):
    mine, other = (Board(path, rank, 2, 0.05) for rank in (0, 1))
    other.count = 1
    other._write([7, 8])
    other.words[other.place(1) + 4] = 9  # one number of a later message, the checksum of the earlier one
    with pytest.raises(RuntimeError, match=r"rank 0 timed out after 0\.05 s: rank 1 makes no such call"):
        mine.exchange([1, 2])


def test_who_waits_for_a_rank_that_is_about_to_come_does_not_sleep(path, monkeypatch):
    mine, other = (Board(path, rank, 2, 20.0) for rank in (0, 1))
    other.count, looks = 1, []

    def comes_late() -> None:
        looks.append(len(looks))
        if len(looks) == board.SPINS - 1:
            other._write([7])

    monkeypatch.setattr(board.os, "sched_yield", comes_late)
    monkeypatch.setattr(board.time, "sleep", lambda seconds: pytest.fail("a rank slept"))
    assert mine.exchange([3]) == [[3], [7]]


def test_who_waits_longer_leaves_the_core_to_others(path, monkeypatch):
    mine, other = (Board(path, rank, 2, 20.0) for rank in (0, 1))
    other.count, slept = 1, []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        other._write([7])

    monkeypatch.setattr(board.os, "sched_yield", lambda: None)
    monkeypatch.setattr(board.time, "sleep", sleep)
    assert mine.exchange([3]) == [[3], [7]]
    assert slept == [board.PAUSE]


def test_ranks_that_make_other_calls_hear_of_it(path):
    said = in_threads(2, lambda rank: Board(path, rank, 2, 20.0).exchange([0] * (1 + rank)))
    assert "rank 1 says 2 numbers where rank 0 says 1" in said[0]
    assert "rank 0 says 1 numbers where rank 1 says 2" in said[1]


def test_ranks_share_a_board_only_if_all_of_them_see_one_file(monkeypatch):
    def numbers(exchange):
        found = board.shared(exchange.rank, exchange.size, 20.0, exchange.objects)
        return found and found.exchange([exchange.rank])

    assert simulate(2, numbers) == [[[0], [1]]] * 2
    monkeypatch.setattr(board, "_made", lambda size: "/nowhere/board")
    assert simulate(2, numbers) == [None, None]


def test_ranks_go_without_a_board_where_there_is_no_room_and_nothing_stays_behind(monkeypatch, tmp_path):
    def shared(exchange):
        return board.shared(exchange.rank, exchange.size, 20.0, exchange.objects)

    def full(handle, mode):
        os.close(handle)
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(board, "FOLDER", str(tmp_path))
    assert all(simulate(2, shared))
    assert not list(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(board.os, "fdopen", full)
        assert simulate(2, shared) == [None, None]
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(board, "FOLDER", str(tmp_path / "nowhere"))
    assert simulate(2, shared) == [None, None]


def test_a_shorter_file_of_the_same_name_is_no_board(monkeypatch, tmp_path):
    short = tmp_path / "board"
    short.write_bytes(bytes(8))
    monkeypatch.setattr(board, "_made", lambda size: str(short))
    assert simulate(2, lambda x: board.shared(x.rank, x.size, 20.0, x.objects)) == [None, None]
