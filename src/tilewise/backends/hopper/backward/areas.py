"""How many blocks of a sheet of dS the packed sequences before each one have, and how many heads a launch has (sm_90a).

Only the device knows the lengths of packed sequences. One warp of the first kernel of a backward adds up their blocks, and counts the key
heads whose sheets fit into the room that the host has made: launches share the heads, and those that are left without any end at once
(docs/decisions.md#hopper-kept-ds).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.params import BackwardParams
from tilewise.backends.hopper.backward.sequences import PackedSequence
from tilewise.backends.hopper.kit import packed, schedule
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.scheduler import PICK


class Areas(NamedTuple):
    """What the sheet's places are made of.

    Attributes:
        params: of a launch; ``packed.areas`` is written.
        room: for how many blocks the sheet has room.
    """

    params: BackwardParams
    room: I32


@cute.jit
def measure(areas: Areas, config: cutlass.Constexpr):
    """One warp writes the areas of all sequences, 32 at a time, and the heads of a launch."""
    lane, params = cute.arch.thread_idx()[0] % 32, areas.params
    found, count, before = params.packed.areas, cute.size(params.packed.cu_q), I32(0)
    for first in cutlass.range(0, count, 32, unroll=1):
        n = first + lane
        own = area_of(PICK.smaller(n, count - 1), params, config)
        own = I32(cutlass.select_(n < count, own, I32(0)))
        upto = packed.running_sum(own, lane)
        put(found, n, before + upto - own, n < count)
        before = before + cute.arch.shuffle_sync(upto, 31)
    put(found, count, schedule.heads_at_once(before * params.group, params.heads, areas.room, PICK), lane == 0)


@cute.jit
def put(areas: cute.Tensor, n, number, mine):
    """Writes the n-th of the areas where it is a thread's own."""
    if mine:
        areas[n] = number


def area_of(n, params: BackwardParams, config: Backward) -> I32:
    """How many blocks a head's sheet has of the n-th sequence; none of the rows past the last one."""
    sequence = PackedSequence.of(n, params, config)
    keys, queries = config.queries.blocks(sequence.q.size, sequence.numbers.seqlen_k)
    # cu_seqlens is checked by no host: a sequence may seem to end before it begins.
    return I32(PICK.larger(keys, 0) * PICK.larger(queries, 0))
