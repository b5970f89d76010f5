"""The tiles that a CTA of a backward's pass has, one after the other, and what is a packed sequence's own.

Tiles of equal sequences are dealt out by number. Packed, they differ too much: the warp that brings what a tile holds takes what
comes next of all, and says so to the others. Each warpgroup reads it in a box of its room's, which is written before that room
is filled, and so does the warp that stores; the other loading warp, which runs ahead, in one more. One of no sequence ends all.

mbarriers (arrivals in brackets): ``held_full[room]``, ``held_empty[room]`` are the pass's own; ``next_full`` (1) between the warp
that takes and the one that runs ahead, ``next_empty`` (1) back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.backward.config import LINES, Backward
from tilewise.backends.hopper.backward.tile import Work
from tilewise.backends.hopper.forward.kernel import I32, PICK
from tilewise.backends.hopper.kit import packed, schedule, tile

SHORT = 16  # blocks of a tile whose beginning is worth hiding
WORDS = 2  # of 8 bytes: of a box


class Walk(NamedTuple):
    """A pass's own: how many tiles a CTA has and which one a round's is; of packed sequences, which the n-th of all is, and its
    place and numbers."""

    rounds_of: Callable
    place_of: Callable
    packed_tile: Callable
    packed_place: Callable


class Boxes(NamedTuple):
    """``words``: of each warpgroup's room, and then of the warp that runs ahead."""

    words: cute.Pointer
    next_full: cute.Pointer
    next_empty: cute.Pointer


class Own(NamedTuple):
    """Of a tile's packed sequence: its rows and (some of its) keys, and the first of its statistics and of its blocks of dQ."""

    q: packed.Span
    k: packed.Span
    line: I32
    block: I32


def boxes(start: cute.Pointer) -> Boxes:
    """Two barriers, and the boxes."""
    return Boxes(start + 2, start, start + 1)


def room_for(x: Backward, groups: int) -> int:
    """Of :func:`boxes`, in words of 8 bytes."""
    return 2 + WORDS * (groups + 1) if x.packed else 0


def start_barriers(found: Boxes, x: Backward) -> None:
    """By one thread."""
    if x.packed:
        cute.arch.mbarrier_init(found.next_full, 1)
        cute.arch.mbarrier_init(found.next_empty, 1)


def hand_on(of: packed.Tile | None, room, n: int, phase) -> None:
    """A tile to those that wait for room n, before it is filled."""
    if of is None:
        return
    cute.arch.mbarrier_wait(room.held_empty + n, phase)
    with cute.arch.elect_one():
        tile.put_words(room.boxes.words + WORDS * n, of)
    cute.arch.sync_warp()  # before whoever is elected to arrive


def tell(of: packed.Tile, room, groups: int, phase) -> None:
    """A tile to the warp that runs ahead."""
    cute.arch.mbarrier_wait(room.boxes.next_empty, phase)
    with cute.arch.elect_one():
        tile.put_words(room.boxes.words + WORDS * groups, of)
        cute.arch.mbarrier_arrive(room.boxes.next_full)


def at_room(room, n) -> Callable:
    """What reads the box of room n once that is full."""
    return lambda phase: read(room.held_full + n, phase, room.boxes.words + WORDS * n)


def ahead(room, groups: int) -> Callable:
    """What the warp that runs ahead reads."""

    def told(phase) -> packed.Tile:
        found = read(room.boxes.next_full, phase, room.boxes.words + WORDS * groups)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(room.boxes.next_empty)
        return found

    return told


def read(full, phase, words) -> packed.Tile:
    cute.arch.mbarrier_wait(full, phase)
    return packed.Tile(*(cute.arch.make_warp_uniform(n) for n in tile.get_words(words, 3)))


@cute.jit
def take_tiles(
    walk: cutlass.Constexpr,
    room,
    groups: cutlass.Constexpr,
    work: Work,
    x: cutlass.Constexpr,
    body: cutlass.Constexpr,
    coming: cutlass.Constexpr,
):
    """The warp that takes: ``body(at, of, phase)`` for every tile, with a phase that a new barrier lets pass first, and meanwhile
    ``coming(at)``, if there is that, of the one after where it is short: beside a long one its beginning costs little, and L2 would
    have to hold it for long."""
    phase, rounds_of, place_of, packed_tile, packed_place = I32(1), *walk
    if cutlass.const_expr(x.packed):
        of = packed_tile(I32(cute.arch.block_idx()[0]), work, x)
        while of.sequence >= 0:
            following = packed.take(work.starts.queue)
            tell(of, room, groups, phase)
            body(packed_place(of, work, x)[0], of, phase)
            of = packed_tile(following, work, x)
            if cutlass.const_expr(coming is not None):
                announce(coming, of.sequence >= 0, lambda of=of: packed_place(of, work, x)[0])
            phase = 1 - phase
        tell(of, room, groups, phase)
        for n in cutlass.range_constexpr(groups):
            hand_on(of, room, n, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(room.held_full + n)
    else:
        rounds = rounds_of(work, x)
        for round_ in cutlass.range(rounds, unroll=1):
            body(place_of(round_, work, x), None, phase)
            if cutlass.const_expr(coming is not None):
                announce(coming, round_ + 1 < rounds, lambda n=round_ + 1: place_of(n, work, x))
            phase = 1 - phase


@cute.jit
def announce(coming: cutlass.Constexpr, there, place: cutlass.Constexpr):
    """The next tile, if there is one and it is short."""
    if there:
        at = place()
        if at.stop - at.start <= SHORT:
            coming(at)


@cute.jit
def each_tile(
    walk: cutlass.Constexpr, told: cutlass.Constexpr, work: Work, x: cutlass.Constexpr, body: cutlass.Constexpr, state
):
    """All others: ``state = body(at, numbers, phase, state)`` for every tile, as ``told`` where they are packed."""
    phase, rounds_of, place_of, _, packed_place = I32(0), *walk
    if cutlass.const_expr(x.packed):
        of = told(phase)
        while of.sequence >= 0:
            at, own = packed_place(of, work, x)
            state = body(at, own, phase, state)
            phase = 1 - phase
            of = told(phase)
    else:
        for round_ in cutlass.range(rounds_of(work, x), unroll=1):
            state = body(place_of(round_, work, x), work, phase, state)
            phase = 1 - phase


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


def packed_tile(n, heads, tiles_of: Callable, work: Work) -> packed.Tile:
    """The n-th tile of packed sequences, its row being which of its sequence's it is: all heads of one, then the next one. Of no
    sequence: there is none."""
    sequence, block, count = packed.find(n // heads, tiles_of, cute.size(work.starts.cu_q))
    return packed.Tile(I32(cutlass.select_(n < count * heads, sequence, I32(-1))), block, n % heads)
