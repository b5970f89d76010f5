"""The lists of keys that queries selected: which places of a list hold a key that its query sees, and the copies of single rows.

A list has blocks of keys in order; place p is key ``p % block`` of entry ``p // block``. A key that stands twice is kept at its first
place.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.kit.bits import is_set
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.instructions import both, choose
from tilewise.backends.hopper.kit.params import OptionalParams
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.softmax import INF

WARP = 32
PIECE = 16  # bytes of one copy


class QueryList(NamedTuple):
    """What a launch says of a query with a list of its own.

    Attributes:
        origin: the row of k of key 0, in pages the row of the table. row: of the entries. lo, hi: the query sees the keys
            ``lo <= j < hi`` of its list; ``hi`` is -1 in rows of q past the last sequence.
    """

    origin: I32
    row: I32
    lo: I32
    hi: I32


def list_of(query, extra: OptionalParams) -> QueryList:
    """The list of a row of q."""
    return QueryList(*(I32(extra.tokens[query, n]) for n in range(4)))


@cute.jit
def tiles_of_list(line: QueryList, size: cutlass.Constexpr, extra: OptionalParams):
    """``(first, last)``: the tiles of ``size`` places that may hold a key between the ends, as their first entries tell, one to a lane.

    These never decrease, as first keys do where an entry stands twice.
    """
    lane, before, below = cute.arch.thread_idx()[0] % WARP, I32(0), I32(0)
    tiles = (cute.size(extra.entries, mode=[1]) * extra.block + size - 1) // size
    for n in cutlass.range(0, tiles, WARP, unroll=1):
        number = (n + lane) * size // extra.block
        start, there = first_key(number, line, extra), number < cute.size(extra.entries, mode=[1])
        below = below + I32(cute.arch.popc(cute.arch.vote_ballot_sync(both(there, start < line.hi))))
        before = before + I32(cute.arch.popc(cute.arch.vote_ballot_sync(both(there, start + extra.block <= line.lo))))
    # The later entries of the last tile that begins before the first end may reach it.
    first = PICK.larger(before - 1, 0)
    return I32(first), I32(PICK.larger(below, first))


def key_at(place, line: QueryList, extra: OptionalParams) -> tuple:
    """``(key, there)`` of a place of a list: its key, or one past the end, and whether the list is so long."""
    number = place // extra.block
    key = first_key(number, line, extra) + place - number * extra.block
    return key, number < cute.size(extra.entries, mode=[1])


def first_key(number, line: QueryList, extra: OptionalParams):
    """The first key of an entry, or one past the end."""
    # Entries are checked by no host: a product with one past the end must not go over 32 bits.
    entry = PICK.smaller(entry_at(number, line, extra), (line.hi + extra.block - 1) // extra.block)
    return entry * extra.block


def entry_at(number, line: QueryList, extra: OptionalParams):
    """An entry of a list; past its ends, the first or the last one."""
    last = cute.size(extra.entries, mode=[1]) - 1
    return extra.entries[line.row, PICK.larger(PICK.smaller(number, last), 0)]


def look_up(places: list, line: QueryList, rows: cute.Tensor, words: cute.Tensor, extra: OptionalParams) -> None:
    """Looks up some places of each lane: ``rows`` gets those of k, -1 where the query sees no such key; ``words`` a bit for each lane, set
    where it sees a key that no earlier place has."""
    for n, place in enumerate(places):
        key, there = key_at(place, line, extra)
        number = place // extra.block
        entry, before = (entry_at(x, line, extra) for x in (number, number - 1))
        seen = both(there, both(key >= line.lo, key < line.hi))
        first = cutlass.select_(entry != before, number >= 0, number == 0)
        words[n] = I32(cute.arch.vote_ballot_sync(both(seen, first)))
        rows[n] = cutlass.select_(seen, I32(key), I32(-1))
    find_rows(rows, len(places), line, extra)


@cute.jit
def find_rows(rows: cute.Tensor, count: cutlass.Constexpr, line: QueryList, extra: OptionalParams):
    """Replaces keys by their rows of k. All at once: a branch between two of them would wait for the first one's entry."""
    if extra.page_rows > 0:
        for n in cutlass.range_constexpr(count):
            key = PICK.larger(rows[n], 0)
            page = extra.block_table[line.origin, key // extra.page_rows]
            # The table is checked by no host: a number outside the pool must not become an address.
            page = PICK.larger(PICK.smaller(page, extra.num_pages - 1), 0)
            rows[n] = cutlass.select_(rows[n] >= 0, I32(page * extra.page_rows + key % extra.page_rows), I32(-1))
    else:
        for n in cutlass.range_constexpr(count):
            rows[n] = cutlass.select_(rows[n] >= 0, I32(line.origin + rows[n]), I32(-1))


# -- Copies --------------------------------------------------------------------------------------------------------


def copy_piece(at, place, inside) -> None:
    """Starts the copy of 16 bytes to shared memory, or of zeros (docs/decisions.md#hopper-gathers)."""
    code = "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};"
    cute.arch.inline_ptx(code, read_only_args=[at, place, cutlass.select_(inside, I32(PIECE), I32(0))])


def arrive_with_copies(barrier: cute.Pointer) -> None:
    """A thread arrives at a barrier once all copies have come that it has started so far."""
    cute.arch.inline_ptx("cp.async.mbarrier.arrive.noinc.shared.b64 [{$r0}];", read_only_args=[barrier.toint()])


# -- Scores --------------------------------------------------------------------------------------------------------


@cute.jit
def hide_others(s: cute.Tensor, words: list):
    """Sets the scores of keys whose bit is not set to -inf; ``s`` is the view (2, N/4) of an accumulator of 64 x N, ``words`` N bits."""
    every = words[0]
    for word in words[1:]:
        every = every & word
    if every != -1:
        shift = cute.arch.thread_idx()[0] % 4 * 2  # the thread's first column
        shifted = [word >> shift for word in words]
        for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
            for r in cutlass.range_constexpr(2):
                s[r, c] = choose(is_set(shifted, 8 * (c // 2) + c % 2), s[r, c], -INF)
