"""The packed sequences of a backward: where their rows, statistics and blocks of dQ lie, and the mailboxes of their tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cutlass.cute as cute

from tilewise.backends.hopper.backward.config import LINES, Backward
from tilewise.backends.hopper.backward.tile import Work
from tilewise.backends.hopper.kit import packed, schedule
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.scheduler import (
    MAILBOX_WORDS,
    PICK,
    Mailboxes,
    TileScheduler,
    init_mailboxes,
    mailbox_words,
    mailboxes,
    nth_packed_tile,
    publish_tile,
    receive_ahead,
    receive_tile,
)

Walk, Boxes, boxes, room_for, start_barriers = TileScheduler, Mailboxes, mailboxes, mailbox_words, init_mailboxes
WORDS = MAILBOX_WORDS


class Own(NamedTuple):
    """Of a tile's packed sequence: its rows and (some of its) keys, and the first of its statistics and of its blocks of dQ."""

    q: packed.Span
    k: packed.Span
    line: I32
    block: I32


def hand_on(of: packed.PackedTile | None, room, n: int, phase) -> None:
    """Publishes a tile to the roles that wait for stage n of the tiles that a CTA holds."""
    publish_tile(of, room.boxes.words, n, room.held_empty, phase)


def at_room(room, n) -> Callable:
    """The function that receives the tile of stage n, as :func:`each_tile` takes it."""
    return lambda phase: receive_tile(room.boxes.words, n, room.held_full, phase)


def ahead(room, groups: int) -> Callable:
    """The function by which the warp that loads ahead receives a tile, as :func:`each_tile` takes it."""
    return lambda phase: receive_ahead(room.boxes, groups, phase)


# -- Packed sequences ----------------------------------------------------------------------------------------------


class Sequence(NamedTuple):
    """A sequence's rows and keys, of the latter those ``seen`` by some row, and its numbers: lengths, of the keys seen, and the
    band's ends from the first of these."""

    q: packed.Span
    k: packed.Span
    seen: packed.Span
    numbers: Work

    @classmethod
    def of(cls, n, work: Work, x: Backward, rest_q: bool = False, rest_k: bool = False) -> Sequence:
        """``rest_q``, ``rest_k``: the rows, or keys, past the last sequence count as one more."""
        s = work.starts
        q = packed.rows_of(n, s.cu_q, work.seqlen_q, rest_q)
        k = packed.rows_of(n, s.cu_k, work.seqlen_k, rest_k)
        off = k.size - q.size
        moving = schedule.Band(
            work.lo + off if x.form == "band" else None, None if x.form == "full" else work.hi + off, k.size
        )
        first, kept = schedule.cut(moving, s.first, s.last, q.size, PICK)
        numbers = {"seqlen_q": q.size, "seqlen_k": kept.seqlen_k, "lo": kept.lo, "hi": kept.hi}
        numbers = work._replace(**{name: value for name, value in numbers.items() if value is not None})
        return cls(q, k, packed.Span(k.start + first + kept.seqlen_k, kept.seqlen_k), numbers)

    @property
    def parts(self) -> tuple[packed.Span, packed.Span, packed.Span]:
        """The keys seen, those before and those after: each in tiles of its own, since none must meet another's."""
        return self.seen, self.before, packed.Span(self.k.end, self.k.end - self.seen.end)

    @property
    def before(self) -> packed.Span:
        return packed.Span(self.seen.start, self.seen.start - self.k.start)


def own_of(n, q: packed.Span, k: packed.Span, work: Work, x: Backward) -> Own:
    """Of the n-th sequence's."""
    cu, total = work.starts.cu_q, work.seqlen_q
    return Own(q, k, first_line(n, cu, total, x) * LINES, first_block(n, cu, total, x))


def first_line(n, cu: cute.Tensor, total, x: Backward):
    """Of a sequence's statistics, in LINES."""
    return packed.spaced(n, cu, total, x.lines_between, LINES)


def first_block(n, cu: cute.Tensor, total, x: Backward):
    """Of a sequence's blocks of dQ."""
    return packed.spaced(n, cu, total, x.keys.tile_m, x.keys.tile_m)


def packed_tile(n, heads, tiles_of: Callable, work: Work) -> packed.PackedTile:
    """The n-th tile of packed sequences, as :func:`nth_packed_tile` has it."""
    return nth_packed_tile(n, heads, tiles_of, work.starts.cu_q)
