"""The segments of a tile's keys, whose states are joined in order where rows have one order of sums (docs/decisions.md#hopper-one-order).

A segment has a fixed number of key blocks from the sequence's first one on. Blocks are visited from the last to the first. Where a block
ends a segment that is not the tile's last one, the state of later keys leaves the registers: it waits in memory of the warpgroup, of which
nobody else knows, until the next segment joins it.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.parameters import STATISTICS
from tilewise.backends.hopper.forward.params import ForwardParams
from tilewise.backends.hopper.forward.storage import ForwardStorage
from tilewise.backends.hopper.kit import schedule, softmax
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.states import joined, joined_number, put_numbers, take_numbers
from tilewise.backends.hopper.kit.tiles import QueryTile, rows_columns

WAITING, ENDED = -2, -1  # of the STATISTICS, counted from the last one
FREE_BARRIER = 8  # behind those of the turns of three warpgroups (forward.turns)


class Segments(NamedTuple):
    """What a warpgroup keeps of its tile's segments.

    Attributes:
        waits: (1,) int32, whether segments of this tile wait.
        states: fp32 (CTA, warpgroup, four, thread, 4): O of those that wait, and behind it the maximum and the thread's sum of both of its
            rows; last the same of the segment that ends. w: the warpgroup.
    """

    waits: cute.Tensor
    states: cute.Tensor
    w: I32


def new_segments(w, params: ForwardParams, config: Config) -> Segments | None:
    """The segments of warpgroup w; None where a tile's keys are one."""
    if not config.tiles.segment:
        return None
    found = Segments(cute.make_rmem_tensor((1,), I32), params.extra.part_o, w)
    found.waits[0] = I32(0)
    return found


def ends(n, config: Config):
    """Whether block n, which is visited next, is the last one of its segment: the segment behind it has ended."""
    return n % config.tiles.segment == config.tiles.segment - 1


def end_rows(segments: Segments, rows: softmax.SoftmaxState, block, config: Config) -> None:
    """Before the softmax of a block, which begins from nothing if the block begins a segment: the rows' state leaves the registers."""
    if block.border is None:
        end_rows_at(ends(block.n, config), segments, rows, config)
    elif block.border:
        leave_rows(segments, rows, config)


@cute.jit
def end_rows_at(border, segments: Segments, rows: softmax.SoftmaxState, config: cutlass.Constexpr):
    """:func:`leave_rows` at a border of segments."""
    if border:
        leave_rows(segments, rows, config)


def leave_rows(segments: Segments, rows: softmax.SoftmaxState, config: Config) -> None:
    """The rows' state leaves the registers, and begins anew."""
    put_numbers(segments.states, place_of(segments, ENDED, config), [x[r] for r in range(2) for x in (rows.m2, rows.l)])
    rows.m2.fill(-softmax.INF)
    rows.l.fill(0.0)


def end_segment(segments: Segments, o: cute.Tensor, block, config: Config) -> None:
    """Once O has the products of all blocks before one: if that block begins a segment, the one that ends joins those that wait."""
    if block.border is None:
        end_segment_at(ends(block.n, config), segments, o, config)
    elif block.border:
        leave_segment(segments, o, config)


@cute.jit
def end_segment_at(border, segments: Segments, o: cute.Tensor, config: cutlass.Constexpr):
    """:func:`leave_segment` at a border of segments."""
    if border:
        leave_segment(segments, o, config)


def leave_segment(segments: Segments, o: cute.Tensor, config: Config) -> None:
    """The segment that ends joins those that wait, and waits with them; O begins anew."""
    ended = cute.make_rmem_tensor((4,), F32)
    for k, number in enumerate(take_numbers(segments.states, place_of(segments, ENDED, config))):
        ended[k] = number
    join(segments, ended, o, config)
    numbers, fours = rows_columns(o), config.tiles.width_o // 16
    for k in range(2 * fours):
        four = [numbers[k // fours, 4 * (k % fours) + c] for c in range(4)]
        put_numbers(segments.states, place_of(segments, k, config), four)
    put_numbers(segments.states, place_of(segments, WAITING, config), [ended[k] for k in range(4)])
    segments.waits[0] = I32(1)
    o.fill(0.0)


@cute.jit
def hide_values(query_tile: QueryTile, band: schedule.Band, stage, w, smem: ForwardStorage, config: cutlass.Constexpr):
    """Zeros in V's stage of a tile's last block, which is there, for keys before the first that any row of the sequence sees: those may be
    NaN, and P, which is 0, would let them through. Other kernels begin at that key (``query_tiles.place_packed``)."""
    tiles = config.tiles
    unseen = PICK.smaller(schedule.row_start(0, band, PICK) - query_tile.start * tiles.tile_n, tiles.tile_n)
    if unseen > 0:
        for key in cutlass.range(unseen, unroll=1):
            put_zeros(smem, key, stage, config)
        cute.arch.fence_view_async_shared()  # what threads wrote, wgmma reads by another path
        cute.arch.barrier(barrier_id=FREE_BARRIER + w, number_of_threads=128)


@cute.jit
def put_zeros(smem: ForwardStorage, key, stage, config: cutlass.Constexpr):
    """Zeros in the row of a key in V's stage, a column from each thread."""
    thread = cute.arch.thread_idx()[0] % 128
    if thread < config.tiles.width_v:
        smem.v[thread, key, stage] = ELEMENT[config.dtype](0.0)


def join_waiting(segments: Segments, rows: softmax.SoftmaxState, o: cute.Tensor, config: Config) -> None:
    """The tile's first segment, which is at hand, joins those that wait: the rows' state, and O, are then those of all keys."""
    ended = cute.make_rmem_tensor((4,), F32)
    for r in range(2):
        ended[2 * r], ended[2 * r + 1] = rows.m2[r], rows.l[r]
    join(segments, ended, o, config)
    for r in range(2):
        rows.m2[r], rows.l[r] = ended[2 * r], ended[2 * r + 1]
    segments.waits[0] = I32(0)


@cute.jit
def join(segments: Segments, ended: cute.Tensor, o: cute.Tensor, config: cutlass.Constexpr):
    """Adds the segments that wait, if there are any, to one that ended, (4,) as its statistics lie in memory, and to its O."""
    if cute.arch.vote_any_sync(segments.waits[0] != 0):  # all threads say the same
        numbers, fours = rows_columns(o), config.tiles.width_o // 16
        # All of them are on their way together: products wait for one way to L2 and back.
        then, *later = (
            take_numbers(segments.states, place_of(segments, k, config)) for k in (WAITING, *range(2 * fours))
        )
        for r in cutlass.range_constexpr(2):
            of_row = then[2 * r], then[2 * r + 1], ended[2 * r], ended[2 * r + 1]
            ended[2 * r], ended[2 * r + 1], factor, other = joined(*of_row)
            for k, four in enumerate(later[r * fours : (r + 1) * fours]):
                for c, number in enumerate(four):
                    numbers[r, 4 * k + c] = joined_number(number, factor, numbers[r, 4 * k + c], other)


def place_of(segments: Segments, n: int, config: Config) -> tuple:
    """Where a four of this thread is: the n-th of O, or a statistic of rows."""
    return (
        cute.arch.block_idx()[0],
        segments.w,
        n % (config.tiles.width_o // 8 + STATISTICS),
        cute.arch.thread_idx()[0] % 128,
    )
