"""The plan of packed sequences, made on the device, which alone knows their lengths (sm_90a).

One CTA of the first kernel writes the plan: the sequences in the order in which their tiles are taken, the longest first
(docs/decisions.md#hopper-packed-queue), and how many tiles there are before each. Where dS is kept, also how many blocks of its sheet the
sequences before each one have, and for how many key heads the sheet has room: launches share the heads, and those that are left without
any end at once (docs/decisions.md#hopper-kept-ds). Where dQ is added up in order, a section has as many key heads as L2 holds of the
longest sequence (docs/decisions.md#hopper-open-heads).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.backward import key_tiles, query_tiles
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.grids import open_rows
from tilewise.backends.hopper.backward.params import BackwardParams
from tilewise.backends.hopper.backward.sequences import PackedSequence
from tilewise.backends.hopper.backward.tiles import PlanRow
from tilewise.backends.hopper.kit import packed, schedule
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.scheduler import PICK

RANKED = (
    512  # sequences at most, with the rows past the last one, that are taken by their size: each is compared with all
)


class PackedPlan(NamedTuple):
    """The numbers that the plan is made of.

    Attributes:
        params: of a launch; ``packed.plan`` is written.
        room: for how many blocks the sheet of dS has room, where there is one.
    """

    params: BackwardParams
    room: I32 | None


@cute.jit
def write(plan: PackedPlan, threads: cutlass.Constexpr, config: cutlass.Constexpr):
    """A CTA of so many threads writes the plan."""
    rank(plan.params, threads)
    # One warp reads what all threads have written.
    cute.arch.sync_threads()
    if cute.arch.thread_idx()[0] // 32 == 0:
        add_up(plan, config)


@cute.jit
def rank(params: BackwardParams, threads: cutlass.Constexpr):
    """Each thread puts sequences into their places in the order: the larger first, equal ones as they come. The rows past the last
    sequence count as one more, of no size."""
    # As many starts as sequences, and one: that of the rows past the last.
    thread, count = cute.arch.thread_idx()[0], cute.size(params.packed.cu_q)
    lane = thread % 32
    for first in cutlass.range(0, count, threads, unroll=1):
        # Too many to be compared keep their order: their tiles are short, and the last ones keep nobody waiting.
        n, place = first + thread, first + thread
        if count <= RANKED:
            # A sequence's place is how many come before it.
            own, place = size_of(PICK.smaller(n, count - 1), params), 0 * n
            for others in cutlass.range(0, count, 32, unroll=1):
                # Every lane reads one size, and all see each.
                sizes = size_of(PICK.smaller(others + lane, count - 1), params)
                # Smaller than any: nobody comes behind a sequence that is not there.
                sizes = I32(cutlass.select_(others + lane < count, sizes, -1))
                for m in cutlass.range(32, unroll=8):
                    larger = cute.arch.shuffle_sync(sizes, m) - own
                    # Of equal ones the earlier sequence comes first.
                    larger = I32(cutlass.select_(others + m < n, larger + 1, larger))
                    place = place + I32(cutlass.select_(larger > 0, 1, 0))
        put(params.packed.plan, PlanRow.ORDER, place, n, n < count)


def size_of(n, params: BackwardParams) -> I32:
    """Number of query rows; used as the sort key, since the longest key tile visits all of them."""
    # cu_seqlens is checked by no host: a sequence may seem to end before it begins.
    return I32(PICK.larger(packed.rows_of(n, params.packed.cu_q, params.seqlen_q, rest=False).size, 0))


@cute.jit
def add_up(plan: PackedPlan, config: cutlass.Constexpr):
    """One warp writes the sums, of 32 sequences at a time, and the heads of a launch."""
    lane, params = cute.arch.thread_idx()[0] % 32, plan.params
    found, count = params.packed.plan, cute.size(params.packed.cu_q)
    blocks, keys, queries = I32(0), I32(0), I32(0)
    for first in cutlass.range(0, count, 32, unroll=1):
        n = first + lane
        inside, last = n < count, PICK.smaller(n, count - 1)
        # Tiles are counted in the order in which they are taken; places in the sheet keep that of the sequences.
        sequence = found[PlanRow.ORDER, last]
        keys = put_sums(found, PlanRow.KEY_TILES, n, keys, key_tiles.tiles_of(sequence, params, config), inside)
        if cutlass.const_expr(config.packs_sheet):
            tiles = query_tiles.tiles_of(sequence, params, config)
            queries = put_sums(found, PlanRow.QUERY_TILES, n, queries, tiles, inside)
            blocks = put_sums(found, PlanRow.BLOCKS, n, blocks, blocks_of(last, params, config), inside)
    # Behind the last one: the sums of all.
    put(found, PlanRow.KEY_TILES, count + lane, keys, lane == 0)
    if cutlass.const_expr(config.packs_sheet):
        heads = schedule.heads_at_once(blocks * params.group, params.heads, plan.room, PICK)
        put(found, PlanRow.QUERY_TILES, count + lane, queries, lane == 0)
        put(found, PlanRow.BLOCKS, count + lane, heads, lane == 0)
    else:
        heads = params.heads
        if cutlass.const_expr(config.orders):
            # Too many sequences to be compared are short, and any of them will do.
            longest = PICK.larger(size_of(found[PlanRow.ORDER, 0], params), 1)
            few = PICK.larger(PICK.smaller(open_rows(config, params.group) // longest, heads), 1)
            heads = cutlass.select_(params.extra.ordered != 0, few, heads)
        put(found, PlanRow.BLOCKS, count + lane, I32(heads), lane == 0)


def put_sums(plan: cute.Tensor, row: PlanRow, n, before: I32, own, inside) -> I32:
    """Each lane writes the sum before its own number, if that counts. Returns the sum of all."""
    own = I32(cutlass.select_(inside, own, 0))
    upto = packed.running_sum(own, cute.arch.thread_idx()[0] % 32)
    put(plan, row, n, before + upto - own, inside)
    return before + cute.arch.shuffle_sync(upto, 31)


@cute.jit
def put(plan: cute.Tensor, row: cutlass.Constexpr, n, number, mine):
    """Writes a number of the plan in the threads whose own it is."""
    if mine:
        plan[row, n] = number


def blocks_of(n, params: BackwardParams, config: Backward) -> I32:
    """How many blocks a head's sheet has of the n-th sequence; none of the rows past the last one."""
    sequence = PackedSequence.of(n, params, config)
    keys, queries = config.queries.blocks(sequence.q.size, sequence.numbers.seqlen_k)
    return I32(PICK.larger(keys, 0) * PICK.larger(queries, 0))  # as in size_of
