"""Packed sequences: which of them a query tile is of, and their rows in global memory.

The copy engine drops what lies outside a tensor, not what lies outside a sequence. So a packed tensor is shown to it with two
more dimensions, which let a dimension of rows end where a sequence ends (the ragged tensors of Triton's tools/ragged_tma.py,
in use on this chip): with a stride of s elements between rows, and coordinates in brackets, ::

    rows   [LONG - size + i]  x  s                     outside from i = size on
    ends   [end]              x  s
    wrap   [LONG]             x  (2**34 - s)           sum: (end - size + i) s + 2**64 elements, which addresses drop

A load beyond a sequence's end so brings zeros, and a store writes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.config import LONG
from tilewise.backends.hopper.kit.dtypes import I32

MANY = 0x7FFF0000  # an extent that no coordinate reaches
WRAP = 1 << 34  # times LONG: 2**64


class Span(NamedTuple):
    """Rows ``[end - size, end)`` of a packed tensor."""

    end: I32
    size: I32

    @property
    def start(self):
        return self.end - self.size


class SeqlenInfo(NamedTuple):
    """A packed sequence: its rows of q and o, the keys that some row sees, and the band's ends, counted from the first of these."""

    q: Span
    k: Span
    lo: I32 | None
    hi: I32 | None


class PackedTile(NamedTuple):
    """A tile of packed sequences: its sequence, its first row there, and its head. ``sequence`` -1: there is no such tile."""

    sequence: I32
    row: I32
    head: I32


def ragged(tensor: cute.Tensor, columns_first: bool = False) -> cute.Tensor:
    """(1, row, head, column) as (row, column, head, end, wrap), or with columns first."""
    (_, _, heads, columns), (_, by_row, by_head, by_column) = tensor.shape, tensor.stride
    shape, stride = [LONG, columns], [by_row, by_column]
    order = slice(None, None, -1 if columns_first else 1)
    layout = cute.make_layout(
        (*shape[order], heads, MANY, MANY), stride=(*stride[order], by_head, by_row, WRAP - by_row)
    )
    return cute.make_tensor(tensor.iterator, layout)


def matrix(tensor: cute.Tensor, head, span: Span, columns_first: bool) -> cute.Tensor:
    """A head's rows of one sequence, of :func:`ragged`'s coordinates."""
    # Row LONG - size + i of the ragged view is row end - size + i: the sequence's own row i.
    first = LONG - span.size
    return cute.domain_offset((0, first) if columns_first else (first, 0), tensor[None, None, head, span.end, LONG])


class Since(NamedTuple):
    """Where a lookup begins: the first of 32 sequences, and how many tiles there are before it.

    A CTA's tiles come in order, so that each lookup goes on where the one before has found its tile.
    """

    sequence: I32
    tiles: I32


def at_first() -> Since:
    """Where a CTA's first lookup begins."""
    return Since(I32(0), I32(0))


@cute.jit
def find(m, tiles_of: cutlass.Constexpr, count, since: Since):
    """``(sequence, tile, since)``: the sequence that the m-th tile is of, -1 if there is no such tile; which of the sequence's tiles it is;
    and where the lookup of a later tile begins.

    The n-th of ``count`` sequences has ``tiles_of(n)``; the rows past the last one count as one more.

    A warp counts the tiles of 32 sequences at a time: no host knows them, and a lookup costs no chain of loads.
    """
    lane, first, before = cute.arch.thread_idx()[0] % 32, since.sequence, since.tiles
    sequence, block, left = I32(-1), I32(0), I32(count - first)
    while left > 0:
        tiles = tiles_of(cutlass.min(first + lane, count - 1))
        own = I32(cutlass.select_(lane < left, I32(tiles), I32(0)))
        upto = running_sum(own, lane)
        whole = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= m - before))  # sequences that end before the tile
        earlier = cute.arch.shuffle_sync(upto - own, cutlass.min(whole, 31))
        here = whole < 32
        sequence = I32(cutlass.select_(here, I32(first + whole), sequence))
        block = I32(cutlass.select_(here, I32(m - before - earlier), block))
        left = I32(cutlass.select_(here, I32(0), I32(left - 32)))
        before = I32(cutlass.select_(here, before, before + cute.arch.shuffle_sync(upto, 31)))
        first = I32(cutlass.select_(here, first, first + 32))
    sequence, block, first, before = (cute.arch.make_warp_uniform(x) for x in (sequence, block, first, before))
    return sequence, block, Since(first, before)


def running_sum(own: I32, lane) -> I32:
    """The sum of a warp's numbers up to each lane's own."""
    # After each step a lane has the sum of twice as many lanes, its own the last of them.
    upto = own
    for step in range(5):
        other = cute.arch.shuffle_sync(upto, lane - (1 << step))
        upto = upto + I32(cutlass.select_(lane >= 1 << step, I32(other), I32(0)))
    return upto


@cute.jit
def take(queue: cute.Tensor):
    """The next tile of all that no CTA has: CTAs begin with the first ones (docs/decisions.md#hopper-packed-queue)."""
    n = I32(0)
    if cute.arch.thread_idx()[0] % 32 == 0:
        # One lane takes the number and the warp shares it; relaxed, since nothing but the number is handed over.
        n = cute.arch.atomic_add(queue.iterator, I32(1), sem="relaxed", scope="gpu") + cute.arch.grid_dim()[0]
    return cute.arch.make_warp_uniform(n)


@cute.jit
def holder_of(place, starts: cute.Tensor, names: cute.Tensor, count):
    """``(start, name)`` of the last of ``count`` sequences that starts no later than the place; the starts grow, from 0 on. Both of up to
    32 are read at once: a wait for a load less."""
    lane, low, left = cute.arch.thread_idx()[0] % 32, I32(0), I32(count)
    if count > 32:
        low, left = nearest(place, lambda n: starts[n], count, 32)
    # One sequence to each lane.
    n = cutlass.min(low + lane, count - 1)
    start, name = starts[n], names[n]
    late = cutlass.max(start - place, lane - left + 1)
    found = cute.arch.popc(cute.arch.vote_ballot_sync(late <= 0)) - 1
    return tuple(cute.arch.make_warp_uniform(cute.arch.shuffle_sync(x, found)) for x in (start, name))


@cute.jit
def holder(place, start_of: cutlass.Constexpr, count):
    """The last of ``count`` sequences whose ``start_of(n)`` is not past the place; the starts grow, from 0 on."""
    low, _ = nearest(place, start_of, count, 1)
    return cute.arch.make_warp_uniform(low)


@cute.jit
def nearest(place, start_of: cutlass.Constexpr, count, most: cutlass.Constexpr):
    """``(first, left)``: at most so many sequences, one of which :func:`holder` finds.

    A warp tries 32 sequences at a time, first far apart, then between two of those.
    """
    lane, low, left = cute.arch.thread_idx()[0] % 32, I32(0), I32(count)
    while left > most:
        step = (left + 31) // 32
        n = cutlass.min(low + lane * step, count - 1)
        # As numbers: both are below 1 where the sequence is one of those left and starts no later.
        late = cutlass.max(start_of(n) - place, lane * step - left + 1)
        found = cute.arch.popc(cute.arch.vote_ballot_sync(late <= 0)) - 1
        low = I32(low + found * step)
        left = I32(cutlass.min(step, left - found * step))
    return low, left


def spaced(sequence, cu: cute.Tensor, total, between: int, step: int):
    """The place, in units of ``step``, at which a sequence begins in a buffer with ``between`` rows more for each sequence.

    No two sequences overlap if each needs at most ``between - step`` rows beside its own.
    """
    return (cutlass.min(cu[sequence], total) + sequence * between) // step


def in_tiles(span: Span, rows: int):
    """How many tiles of ``rows`` rows."""
    return (span.size + rows - 1) // rows


def rows_of(sequence, cu: cute.Tensor, total, rest: bool) -> Span:
    """A sequence's rows; of those past the last, the rows that are left if ``rest``, else none."""
    last = cute.size(cu) - 1
    # cu_seqlens is checked by no host: a number past the tensor must not become an address.
    start = cutlass.min(cu[sequence], total)
    stop = cutlass.min(cu[cutlass.min(sequence + 1, last)], total)
    if rest:
        stop = I32(cutlass.select_(sequence == last, I32(total), I32(stop)))
    return Span(stop, stop - start)
