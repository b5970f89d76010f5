"""What the kernels of gradients over selected keys share: which query, heads and columns a CTA has, and the copies of rows.

Two CTAs have a query, 128 of its heads and the tiles of 64 keys of its list. Each has half of V's columns.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute

from tilewise.backends.hopper.config import ELEMENT_BYTES, ROWS
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.lists import PIECE, QueryList, copy_piece, list_of
from tilewise.backends.hopper.kit.params import OptionalParams
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.latent.config import CHUNK, PAIR
from tilewise.backends.hopper.latent.gradients_config import GROUPS, HEADS, VALUE_CHUNKS
from tilewise.backends.hopper.latent.storage import ELEMENTS

LANES = 8  # threads that share a row: 16 bytes each of a chunk
APART = 128 * GROUPS // LANES  # rows between those of a thread
ROTARY = VALUE_CHUNKS * PAIR  # the chunk of the rotary columns


class Work(NamedTuple):
    """The work of a cluster, and which CTA of it this is.

    Attributes:
        number: of the query and key head in this launch. row, head: of q, and the key head. start: the first of its query heads here,
            counted in the key head's, of which there are ``group``.
    """

    line: QueryList
    number: I32
    row: I32
    head: I32
    start: I32
    group: I32
    rank: I32


def work_of(ds: cute.Tensor, heads: I32, first: I32, extra: OptionalParams) -> Work:
    """The work of this CTA: ``heads`` key heads, the ``first`` query and key head of the launch."""
    n, rank, _ = cute.arch.block_idx()
    group = ds.shape[1]
    tiles = (group + HEADS - 1) // HEADS
    number, start = n // tiles, n % tiles * HEADS
    line = first + number
    return Work(list_of(line, extra), number, line // heads, line % heads, start, group, I32(rank))


# -- Copies --------------------------------------------------------------------------------------------------------


def copy_row(smem: cute.Tensor, chunk: int, row, place, inside) -> None:
    """Starts the copy of 16 bytes of a row of a chunk: those of a row of 128 change places as the row's last three bits say."""
    at = smem.iterator.toint() + ELEMENT_BYTES * (ELEMENTS * chunk + CHUNK * row)
    lane = cute.arch.thread_idx()[0] % LANES
    copy_piece(I32(at + PIECE * (lane ^ (row % 8))), place + PIECE * lane, inside)


def copy_heads(smem: cute.Tensor, x: cute.Tensor, work: Work) -> None:
    """Starts the copies of the heads' rows of q or of dO; heads that are not there are zeros."""
    for first in range(0, HEADS, APART):
        row = first + cute.arch.thread_idx()[0] // LANES
        inside = work.start + row < work.group
        head = work.head * work.group + PICK.smaller(work.start + row, work.group - 1)
        start = x[0, work.row, head, None].iterator.toint()
        for n in range(VALUE_CHUNKS):
            place = start + ELEMENT_BYTES * CHUNK * (VALUE_CHUNKS * work.rank + n)
            copy_row(smem, VALUE_CHUNKS * (first // ROWS) + n, row % ROWS, place, inside)
