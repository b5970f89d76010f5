"""Even shares of all key blocks (Stream-K, Osama et al. 2023), or segments: which blocks of which sequences a CTA has.

The blocks of all sequences stand in one line, by sequence and position, and share n of it is ``n · each`` to ``(n + 1) · each``. Each key
head has a CTA for each share, and the CTAs of a share, which read neighbouring memory, stand side by side. Lengths are read on the device:
a graph replays with others. A sequence without keys has a block, too, so that somebody writes its rows.

Deterministic results may not depend on batch-mates. Shares are then *segments*: each has a fixed number of blocks, and a sequence begins
with a share of its own, so that its last segment may be short. A CTA takes every n-th one (docs/decisions.md#hopper-decoding).

A sequence whose blocks lie in one share is finished by its CTA. Others leave a state for each share: of an even share two at most, one
of blocks that continue a sequence, one of blocks that begin one; of a segment one.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.decoding.config import LEAST_KEYS, DecodingConfig
from tilewise.backends.hopper.decoding.params import DecodingParams
from tilewise.backends.hopper.forward import pages
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.scheduler import PICK


class Share(NamedTuple):
    """A part of the line.

    Attributes:
        number: of the share. begin, end: its blocks. each: the blocks of a share, those that are missing after a sequence's last one too.
    """

    number: I32
    begin: I32
    end: I32
    each: I32


class Place(NamedTuple):
    """A sequence in the line.

    Attributes:
        sequence, keys: which one, and how many keys it has. at: its first block in the line.
    """

    sequence: I32
    keys: I32
    at: I32


@cute.jit
def keys_of(sequence, params: DecodingParams):
    """How many keys a sequence has; of one past the last, of whatever stands there."""
    keys = I32(params.seqlen_k)
    if params.cached != 0:
        keys = pages.keys_of(PICK.smaller(sequence, batch_of(params) - 1), params)
    return keys


def blocks_of(keys, params: DecodingParams, config: DecodingConfig):
    """The blocks of a sequence with so many keys from :func:`first_block_of` on."""
    last = (keys + config.tiles.tile_n - 1) // config.tiles.tile_n
    return PICK.larger(last - first_block_of(keys, params, config), 1)


def span_of(keys, params: DecodingParams, config: DecodingConfig):
    """The places in the line that a sequence with so many keys takes: its blocks, in whole segments."""
    return (blocks_of(keys, params, config) + params.segment - 1) // params.segment * params.segment


def first_block_of(keys, params: DecodingParams, config: DecodingConfig):
    """The first block in the line of a sequence with so many keys: where the segment of the first block that some query sees begins, since
    segments lie at fixed keys."""
    return seen_block_of(keys, params, config) & -params.segment  # a power of two


def seen_block_of(keys, params: DecodingParams, config: DecodingConfig):
    """The first block of a sequence with so many keys that some query sees."""
    return PICK.larger(first_key_of(keys, params), 0) // config.tiles.tile_n


def first_key_of(keys, params: DecodingParams):
    """The first key that a sequence's first query sees; below 0 it sees all."""
    return keys - params.queries + params.lo


def batch_of(params: DecodingParams):
    """How many sequences there are."""
    return params.q.shape[1]


def head_of(params: DecodingParams):
    """This CTA's key head."""
    return cute.arch.block_idx()[0] % params.heads_k


class GroupRow(NamedTuple):
    """A row of a tile: its query and its query head, those of the first row where it is not ``inside``."""

    query: I32
    head: I32
    inside: object


def row_at(row, params: DecodingParams) -> GroupRow:
    """The query and head of a row of the tile, which has a group's heads query after query."""
    inside = params.group * params.queries > row
    row = I32(cutlass.select_(inside, I32(row), I32(0)))
    query = I32(cutlass.Uint32(row) // cutlass.Uint32(params.group))  # a signed division takes twice the instructions
    return GroupRow(query, I32(head_of(params) * params.group + row - query * params.group), inside)


def columns_of(inside, params: DecodingParams) -> I32:
    """The columns of a row of q or o, which may be fewer than a kernel's width; none where the row is not ``inside``."""
    return I32(cutlass.select_(inside, I32(params.q.shape[3]), I32(0)))


@cute.jit
def share_of(number, params: DecodingParams, config: cutlass.Constexpr):
    """A :class:`Share` by its number, and the :class:`Place` of its first block's sequence; past the last share one without blocks. A warp
    counts 32 sequences at a time."""
    lane, batch = cute.arch.thread_idx()[0] % 32, batch_of(params)
    total, begin, each = I32(0), I32(0), I32(0)
    sequence, keys, at = I32(0), I32(params.seqlen_k), I32(0)
    if params.cached == 0:  # all are equally long, and nothing is looked up
        span = span_of(params.seqlen_k, params, config)
        total = I32(span * batch)
        each = each_of(total, params, config)
        begin = I32(number * each)
        sequence = I32(begin // span)
        at = I32(sequence * span)
    else:
        for first in cutlass.range(0, batch, 32, unroll=1):
            total = total + own_span(first, lane, params, config)
        for step in cutlass.range_constexpr(5):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        total = I32(cute.arch.shuffle_sync(total, 0))
        each = each_of(total, params, config)
        begin = I32(number * each)
        before = I32(0)
        for first in cutlass.range(0, batch, 32, unroll=1):
            own = own_span(first, lane, params, config)
            upto = own  # of this and the lanes before
            for step in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync(upto, lane - (1 << step))
                upto = upto + I32(cutlass.select_(lane >= 1 << step, I32(other), I32(0)))
            whole = cute.arch.popc(
                cute.arch.vote_ballot_sync(upto <= begin - before)
            )  # sequences that end before the share
            here = PICK.smaller(begin - before, 31 - whole) >= 0
            start = before + cute.arch.shuffle_sync(upto - own, PICK.smaller(whole, 31))
            sequence = I32(cutlass.select_(here, I32(first + whole), sequence))
            at = I32(cutlass.select_(here, I32(start), at))
            before = before + cute.arch.shuffle_sync(upto, 31)
        sequence = cute.arch.make_warp_uniform(sequence)
        keys = keys_of(sequence, params)
    end = PICK.smaller(begin + each, total)
    # What lies before the first block that is seen, or behind its sequence's last one, is nobody's.
    if params.segment > 1:
        end = PICK.smaller(end, at + blocks_of(keys, params, config))
        unseen = seen_block_of(keys, params, config) - first_block_of(keys, params, config)
        begin = PICK.larger(begin, at + unseen)
    begin, end, each, at = (cute.arch.make_warp_uniform(I32(x)) for x in (begin, end, each, at))
    return Share(I32(number), begin, end, each), Place(sequence, keys, at)


def first_share(params: DecodingParams, config: DecodingConfig):
    """This CTA's first share (:func:`share_of`)."""
    return share_of(cute.arch.block_idx()[0] // params.heads_k, params, config)


@cute.jit
def following(share: Share, place: Place, stop, params: DecodingParams, config: cutlass.Constexpr):
    """What the CTA has once it is at block ``stop``: the share, the sequence, and the block. Its next segment, or its share's next
    sequence."""
    begin = I32(stop)
    if params.segment > 1:
        share, place = share_of(share.number + params.shares, params, config)
        begin = share.begin
    else:
        place = next_place(place, params, config)
    return share, place, begin


def own_span(first, lane, params: DecodingParams, config: DecodingConfig) -> I32:
    """The places of the lane's sequence, of 32 from ``first`` on; 0 past the last."""
    span = span_of(keys_of(first + lane, params), params, config)
    return I32(cutlass.select_(first + lane < batch_of(params), I32(span), I32(0)))


def each_of(total, params: DecodingParams, config: DecodingConfig) -> I32:
    """The blocks of a share, of so many in all."""
    least = max(1, LEAST_KEYS // config.tiles.tile_n)
    even = PICK.larger((total + params.shares - 1) // params.shares, least)
    return I32(cutlass.select_(params.segment > 1, I32(params.segment), I32(even)))


def block_at(n, begin, end):
    """The n-th block of a share's ``[begin, end)`` of a sequence: from the last to the first, as the forward's tiles visit them."""
    return begin + end - 1 - n


def next_place(place: Place, params: DecodingParams, config: DecodingConfig) -> Place:
    """The sequence that follows."""
    at = place.at + span_of(place.keys, params, config)
    return Place(place.sequence + 1, keys_of(place.sequence + 1, params), at)
