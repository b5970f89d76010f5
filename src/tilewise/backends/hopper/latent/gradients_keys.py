"""The keys of a tile of a list, in the kernel of dK and dV: threads look them up two tiles ahead, and start the copies of their rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.config import ELEMENT_BYTES, ROWS
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.instructions import both
from tilewise.backends.hopper.kit.lists import PIECE, WARP, copy_piece, entry_at, find_rows
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.tiles import row_of
from tilewise.backends.hopper.latent.config import CHUNK, KEYS, PAIR
from tilewise.backends.hopper.latent.gradients_config import GROUPS, VALUE_CHUNKS
from tilewise.backends.hopper.latent.gradients_work import APART, LANES, ROTARY, Work, copy_row

HALF = KEYS // PAIR  # keys of which a CTA computes P and dS
NARROW = CHUNK // PAIR  # rotary columns of a CTA
NARROW_LANES = NARROW * ELEMENT_BYTES // PIECE  # threads that share a row of these
ROTARY_ELEMENTS = ROWS * NARROW


class Found(NamedTuple):
    """What a thread knows of a tile's keys: the rows of k of its two keys in dK, -1 where the query sees none there, and the bits of the
    32 keys of which this CTA computes P."""

    rows: cute.Tensor
    bits: cute.Tensor


class Places(NamedTuple):
    """The keys of a tile: two rows of k of each lane, -1 where there is none, and a bit for each key that no earlier place has."""

    rows: cute.Tensor
    words: cute.Tensor


def new_found() -> Found:
    return Found(cute.make_rmem_tensor((2,), I32), cute.make_rmem_tensor((1,), I32))


def new_places() -> Places:
    return Places(*(cute.make_rmem_tensor((KEYS // WARP,), I32) for _ in range(2)))


def place_of(n, word: int, rank) -> I32:
    """The place that a lane looks up for one half of tile n. The keys of which this CTA computes P come first."""
    return I32(n * KEYS + (word + rank) % PAIR * WARP + cute.arch.thread_idx()[0] % WARP)


def read_entries(n, entries: cute.Tensor, work: Work, params: Any) -> None:
    """Reads the entries of the two places of tile n that a lane looks up, and those before them."""
    for word in range(KEYS // WARP):
        number = place_of(n, word, work.rank) // params.extra.block
        for m in range(2):
            entries[2 * word + m] = entry_at(number - m, work.line, params.extra)


def look_up_tile(n, entries: cute.Tensor, places: Places, work: Work, params: Any) -> None:
    """Looks up the keys of tile n, two of each lane, of the entries that were read."""
    line, block, count = work.line, params.extra.block, cute.size(params.extra.entries, mode=[1])
    for word in range(KEYS // WARP):
        place = place_of(n, word, work.rank)
        number, entry, before = place // block, entries[2 * word], entries[2 * word + 1]
        # Entries are checked by no host: a product with one past the end must not go over 32 bits.
        key = PICK.smaller(entry, (line.hi + block - 1) // block) * block + place - number * block
        seen = both(number < count, both(key >= line.lo, key < line.hi))
        first = cutlass.select_(entry != before, number >= 0, number == 0)
        places.words[word] = I32(cute.arch.vote_ballot_sync(both(seen, first)))
        places.rows[word] = cutlass.select_(seen, I32(key), I32(-1))
    find_rows(places.rows, KEYS // WARP, line, params.extra)


def copy_rotary_heads(smem: cute.Tensor, q: cute.Tensor, work: Work) -> None:
    """Starts the copies of the rotary columns of the heads' rows of q."""
    for w in range(GROUPS):
        row = cute.arch.thread_idx()[0] // NARROW_LANES
        head = work.start + ROWS * w + row
        source = q[0, work.row, work.head * work.group + PICK.smaller(head, work.group - 1), None]
        copy_narrow_row(smem, w, row, source, work.rank, head < work.group)


def copy_narrow_row(smem: cute.Tensor, block: int, row, source: cute.Tensor, rank, inside) -> None:
    """Starts the copy of 16 bytes of this CTA's half of a row's rotary columns: those of a row of 64 change places as the row says."""
    lane = cute.arch.thread_idx()[0] % NARROW_LANES
    at = smem.iterator.toint() + ELEMENT_BYTES * (ROTARY_ELEMENTS * block + NARROW * row)
    place = source.iterator.toint() + ELEMENT_BYTES * (ROTARY * CHUNK + NARROW * rank)
    copy_piece(I32(at + PIECE * (lane ^ (row // 2 % NARROW_LANES))), place + PIECE * lane, inside)


def gathering(smem: Any, places: Places, work: Work, params: Any) -> list[Callable[[], None]]:
    """The copies of the keys of a tile, each of which starts when it is called."""
    thread = cute.arch.thread_idx()[0]

    def whole(first: int) -> None:
        row = I32(cute.arch.shuffle_sync(places.rows[first // WARP], thread // LANES))
        # Row 0 stands for one that is not there, so that every address is inside the tensor.
        start = params.k[PICK.larger(row, 0), 0, work.head, None].iterator.toint()
        for n in range(VALUE_CHUNKS):
            place = start + ELEMENT_BYTES * CHUNK * (VALUE_CHUNKS * work.rank + n)
            copy_row(smem.k, n, first + thread // LANES, place, row >= 0)

    def narrow() -> None:
        key = thread // NARROW_LANES
        row = at_place(places.rows, key)
        copy_narrow_row(smem.rotary_k, 0, key, params.k[PICK.larger(row, 0), 0, work.head, None], work.rank, row >= 0)

    return [*(partial(whole, first) for first in range(0, KEYS, APART)), narrow]


def at_place(looked_up: cute.Tensor, key):
    """What a lane has looked up of a key of the tile."""
    return cutlass.select_(
        key < WARP, *(I32(cute.arch.shuffle_sync(x, key % WARP)) for x in (looked_up[0], looked_up[1]))
    )


def find(found: Found, places: Places) -> None:
    """What threads know of the keys of a tile that is looked up."""
    for r in range(2):
        key = row_of(cute.arch.thread_idx()[0] % 128, r)
        word = cutlass.select_(key < WARP, places.words[0], places.words[1])
        found.rows[r] = cutlass.select_((word >> (key % WARP)) & 1 == 1, at_place(places.rows, key), I32(-1))
    found.bits[0] = places.words[0]
