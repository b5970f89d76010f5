"""Key tiles that several CTAs share: each takes a part of the query heads of the group, or of their blocks.

Tiles of keys are too few where a device has few key heads, or short sequences: 32 tiles would keep 100 of 132 multiprocessors idle. And
where tiles are alike, the last round has a few that all others would wait for. The CTA that comes last to a shared tile adds up what the
others have left, always in the same order, and stores dK and dV; nobody waits for another one. FlashAttention-2 (arXiv:2307.08691,
section 3.2) has one CTA for each tile of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.backward.params import BackwardParams
from tilewise.backends.hopper.backward.tiles import KEY_GROUPS
from tilewise.backends.hopper.kit.dtypes import F32, I32
from tilewise.backends.hopper.kit.instructions import get_words, put_words

PART_LIMIT = 1 << 12  # parts of a tile: a power of two, so that its number and the part's share one word
FOURS = 4  # of a thread, 16 bytes each, that are read at once


class PartOfTile(NamedTuple):
    """A tile from a queue as :class:`tilewise.backends.hopper.kit.packed.PackedTile` has it, and which part of it: :class:`Part`."""

    sequence: I32
    row: I32
    head: I32
    part: I32


class Division(NamedTuple):
    """How the tiles of a launch are shared.

    Attributes:
        whole: so many tiles, the first ones in their order, have one part.
        each: how many parts a later tile has.
        heads: how many query heads of the group each of these has.
        block_bits: the query blocks of these heads are divided into 2**block_bits parts.
    """

    whole: I32
    each: I32
    heads: I32
    block_bits: I32

    @classmethod
    def of(cls, params: BackwardParams) -> Division:
        """The division of a launch."""
        extra = params.extra
        return cls(extra.whole, extra.parts, extra.part_heads, extra.block_bits)

    def units(self, tiles):
        """How many parts and whole tiles so many tiles are."""
        return self.whole + (tiles - self.whole) * self.each

    def unit(self, n) -> tuple:
        """The tile of the n-th part or whole tile, and its part."""
        # Parts of a tile follow one another, so that they run at about the same time.
        after = n - self.whole
        shared = after // self.each
        part = shared * PART_LIMIT + after - shared * self.each
        return I32(cutlass.select_(after < 0, n, self.whole + shared)), I32(cutlass.select_(after < 0, -1, part))


class Part(NamedTuple):
    """A part of a tile, from the one number that roles hand on: negative, if the tile is whole.

    Attributes:
        shared: the number of its tile among those that are shared. n: its number among the tile's parts.
    """

    shared: I32
    n: I32

    @classmethod
    def of(cls, number) -> Part:
        """The part of a number that is not negative."""
        return cls(number // PART_LIMIT, number % PART_LIMIT)

    def place(self, params: BackwardParams):
        """The part's place among those of all shared tiles."""
        return self.shared * params.extra.parts + self.n


class TileShare(NamedTuple):
    """The heads and blocks that a part has of a tile.

    Attributes:
        part: its number; negative: the tile is whole.
        first_head, heads: which of the group's query heads.
        block, block_bits: of each head, the ``block``-th of 2**block_bits parts of the query blocks.
    """

    part: I32
    first_head: I32
    heads: I32
    block: I32
    block_bits: I32

    @classmethod
    def of(cls, part, params: BackwardParams) -> TileShare:
        """The share of a part of that number."""
        parts, shared = Division.of(params), part >= 0
        n, bits = (I32(cutlass.select_(shared, number, 0)) for number in (part % PART_LIMIT, parts.block_bits))
        heads = I32(cutlass.select_(shared, parts.heads, params.group))
        return cls(part, (n >> bits) * heads, heads, n - (n >> bits << bits), bits)

    def cut(self, start, stop) -> tuple:
        """The share's blocks of ``[start, stop)``."""
        # Of few blocks some parts have none: they leave zeros.
        size = stop - start
        return start + (size * self.block >> self.block_bits), start + (size * (self.block + 1) >> self.block_bits)

    def weight(self, params: BackwardParams) -> F32:
        """The number that the share counts for each of its heads, so that all tiles count the same."""
        return F32(1 << (params.extra.block_bits - self.block_bits))


# -- What parts leave ----------------------------------------------------------------------------------------------


def arrivals_place(part, w, delta: cute.Tensor) -> tuple:
    """The index in ``delta`` of the count of parts of a shared tile that have come, for each warpgroup: before the last row, where no
    query has rows, and which are zero at first."""
    return 0, 0, delta.shape[2] - 2 - (Part.of(part).shared * KEY_GROUPS + w)


def publish(tile, smem, n: int, phase) -> None:
    """The warp that loads keys tells the warpgroup that waits for ``held_full[n]`` which part comes next, as soon as it is done with the
    one before: there is no register for it until the last product."""
    if tile.share is None:
        return
    cute.arch.mbarrier_wait(smem.held_empty + n, phase)
    with cute.arch.elect_one():
        put_words(smem.told + KEY_GROUPS + n, [tile.share.part])
    cute.arch.sync_warp()  # the thread elected to arrive next may be another one


def published(smem, w) -> I32:
    """The number of the part that a warpgroup works on."""
    return get_words(smem.told + KEY_GROUPS + w, 1)[0]


@cute.jit
def gather(
    accumulators: tuple, buffers, told: cute.Pointer, part, w, barrier_id: cutlass.Constexpr, params: BackwardParams
):  # fmt: skip
    """A warpgroup leaves its accumulators, or, if it is the last one of its tile, takes the sums of all parts. ``told`` then says whether
    they are the tile's.

    Args:
        buffers: have ``parts``, (part, warpgroup, element), fp32, where parts leave them in the order of registers, and ``delta``.
        told: a word of shared memory for each warpgroup.
        part: the number of the part; negative: the tile is whole.
        barrier_id: of warpgroup 0; the others' follow.
    """
    if part >= 0:
        place = Part.of(part).place(params)
        put(accumulators, buffers.tile_parts, place, w)
        cute.arch.fence_acq_rel_gpu()  # each thread's numbers, before one thread counts them
        # Partners: the 128 threads of the warpgroup, before and after one of them counts the part.
        cute.arch.barrier(barrier_id=barrier_id + w, number_of_threads=128)
        tell(told + w, buffers.delta, arrivals_place(part, w, buffers.delta), Division.of(params).each)
        cute.arch.barrier(barrier_id=barrier_id + w, number_of_threads=128)
        if get_words(told + w, 1)[0] != 0:
            cute.arch.fence_acq_rel_gpu()  # what the other CTAs counted
            take(accumulators, buffers.tile_parts, place - Part.of(part).n, w, params)
    else:
        # The storing warp reads it when the gradients are there.
        put_words(told + w, [I32(1)])


@cute.jit
def tell(told: cute.Pointer, counts: cute.Tensor, place: tuple, parts):
    """One thread counts the part, and says whether all ``parts`` of the tile have come."""
    if cute.arch.thread_idx()[0] % 128 == 0:
        count = cute.domain_offset(place, counts).iterator
        last = cute.arch.atomic_add(count, F32(1.0), sem="acq_rel", scope="gpu") == F32(parts - 1)
        if last:
            counts[place] = F32(0.0)  # for the next launch
        put_words(told, [I32(cutlass.select_(last, 1, 0))])


def fours_of(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator viewed as (4, n)."""
    return cute.make_tensor(acc.iterator, cute.make_layout((4, cute.size(acc) // 4)))


def places_of(accumulators: tuple, sums: cute.Tensor, n, w) -> list:
    """The places (4, n) of a thread's accumulators in the n-th part; all threads of a warpgroup have theirs side by side."""
    # The order of registers, as dQ's sums have it: 16 bytes a thread, those of a warp side by side.
    place, found = sums[n, w, None].iterator, []
    for acc in accumulators:
        layout = cute.make_layout((4, 128, cute.size(acc) // 4))
        found.append(cute.make_tensor(place, layout)[None, cute.arch.thread_idx()[0] % 128, None])
        place = place + 128 * cute.size(acc)
    return found


def put(accumulators: tuple, sums: cute.Tensor, n, w) -> None:
    """Leaves accumulators as the n-th part of all, 16 bytes a thread at a time."""
    for acc, place in zip(accumulators, places_of(accumulators, sums, n, w), strict=True):
        cute.autovec_copy(fours_of(acc), place)


@cute.jit
def take(accumulators: tuple, sums: cute.Tensor, first, w, params: BackwardParams):
    """Sets accumulators to the sums of all parts of a tile, of which ``first`` is the first one's place, in their order."""
    # Its own part is read again, too: in a fixed order the bits do not depend on who comes last.
    for acc in accumulators:
        acc.fill(0.0)
    for n in cutlass.range(Division.of(params).each, unroll=1):
        add(accumulators, sums, first + n, w)


def add(accumulators: tuple, sums: cute.Tensor, n, w) -> None:
    """Adds what :func:`put` has left as the n-th part to accumulators."""
    for acc, place in zip(accumulators, places_of(accumulators, sums, n, w), strict=True):
        mine = fours_of(acc)
        for first in range(0, mine.shape[1], FOURS):
            # From L2, as none of it was read before by this multiprocessor.
            found = cute.make_rmem_tensor((4, FOURS), F32)
            cute.autovec_copy(cute.local_tile(place, (4, FOURS), (0, first // FOURS)), found)
            for k in range(4 * FOURS):
                at = k % 4, first + k // 4
                mine[at] = mine[at] + found[k % 4, k // 4]
