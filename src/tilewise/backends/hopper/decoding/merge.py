"""The end of a sequence in a share: its output, or a state, and the merge of all states by whoever comes last (docs/algorithm.md, (8)).

A state is O, not normalised, with the maxima and sums of its rows, as the threads of one warp hold them, in fp32. Each CTA counts its own
once it is written; the one that finds all others counted merges them, those of later keys first, whoever it is. Every warp then has a
quarter of the columns.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.decoding.config import DecodingConfig
from tilewise.backends.hopper.decoding.params import DecodingParams
from tilewise.backends.hopper.decoding.shares import Place, Share, blocks_of, columns_of, head_of, row_at
from tilewise.backends.hopper.forward.epilogue import put_lse
from tilewise.backends.hopper.kit import softmax
from tilewise.backends.hopper.kit.dtypes import F32, I32
from tilewise.backends.hopper.kit.instructions import choose, get_words, pack, put_words
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.states import joined, joined_number, put_numbers, take_numbers
from tilewise.backends.hopper.kit.tiles import constant_column, row_of, rows_columns

TOGETHER = 4  # states whose loads are on their way at once
WARPS = 4  # that share the columns of a merge


class ShareRange(NamedTuple):
    """The shares ``[first, last]`` that have blocks of a sequence."""

    first: I32
    last: I32


@cute.jit
def finish(
    operands, words: cute.Pointer, turn, place: Place, share: Share, params: DecodingParams, config: cutlass.Constexpr
):
    """Writes o and lse of a sequence that this CTA alone has had, or that it is the last one to have had a part of; else a state. Returns
    which of the two words tells this next: all warps have read one when the other one is written."""
    tiles = config.tiles
    last_block = place.at + blocks_of(place.keys, params, config) - 1
    shares = ShareRange(place.at // share.each, last_block // share.each)
    warp, told = cute.arch.make_warp_uniform(cute.arch.warp_idx()), words + turn
    if shares.first == shares.last:
        if warp < tiles.row_warps:
            o = rows_columns(operands.o)
            columns = [[o[r, c] for c in range(tiles.width // 4)] for r in range(tiles.own_rows)]
            put(operands.rows, columns, 0, place, params, config)
    else:
        if warp < tiles.row_warps:
            put_state(operands, share, share.begin <= place.at, params, config)
            cute.arch.fence_acq_rel_gpu()  # each thread's numbers, before one thread counts them
            if cutlass.const_expr(tiles.row_warps == 1):
                cute.arch.sync_warp()
            else:
                cute.arch.barrier(barrier_id=1, number_of_threads=32 * WARPS)
            if warp == 0:
                tell(told, place, shares, params)
        cute.arch.barrier(barrier_id=1, number_of_threads=32 * WARPS)
        if get_words(told, 1)[0] != 0:
            cute.arch.fence_acq_rel_gpu()  # what the other CTAs counted
            if cutlass.const_expr(tiles.row_warps == 1):
                merge(operands.rows, shares, thread_of(128) // 32, place, params, config)
            else:
                for part in cutlass.range(WARPS, unroll=1):
                    merge(operands.rows, shares, part, place, params, config)
        turn = turn ^ 1
    return turn


def thread_of(threads: int):
    """This thread's number among so many."""
    return cute.arch.thread_idx()[0] % threads


def holder(config: DecodingConfig):
    """This thread's number among those that have rows; in other warps, of the one that it helps."""
    return thread_of(32 * config.tiles.row_warps)


@cute.jit
def tell(told: cute.Pointer, place: Place, shares: ShareRange, params: DecodingParams):
    """One thread counts this CTA's state, and tells the warpgroup whether all others are counted; the last one leaves the count zero."""
    with cute.arch.elect_one():
        at = place.sequence * params.heads_k + head_of(params)
        found, others = count_up(params.extra.counts, at), shares.last - shares.first
        if found == others:
            params.extra.counts[at] = I32(0)
        put_words(told, [cutlass.select_(found == others, I32(1), I32(0))])


def count_up(counts: cute.Tensor, at) -> I32:
    """Adds 1 to a count and returns what it was; whoever sees the new count sees all that was written before."""
    return cute.arch.atomic_add(cute.domain_offset((at,), counts).iterator, I32(1), sem="acq_rel", scope="gpu")


# -- States --------------------------------------------------------------------------------------------------------


def state_of(share, begins, params: DecodingParams):
    """The number of a share's state: the second of those of its CTA where it ``begins`` the sequence; a segment has one."""
    number = share * params.heads_k + head_of(params)
    second = 2 * number + cutlass.select_(begins, I32(1), I32(0))
    return I32(cutlass.select_(params.segment > 1, I32(number), I32(second)))


def put_state(operands, share: Share, begins, params: DecodingParams, config: DecodingConfig) -> None:
    """Writes the state of a sequence's blocks in this share: four numbers of each thread side by side."""
    o, thread, tiles = rows_columns(operands.o), holder(config), config.tiles
    state = state_of(share.number, begins, params)
    fours = tiles.width // 16  # of a row
    for n in range(tiles.fours):
        numbers = [o[n // fours, 4 * (n % fours) + k] for k in range(4)]
        put_numbers(params.extra.part_o, (state, n, thread), numbers)
    rows = operands.rows
    put_numbers(
        params.extra.part_lse, (state, thread), [x[r] for r in range(tiles.own_rows) for x in (rows.m2, rows.l)]
    )


@cute.jit
def merge(
    rows: softmax.SoftmaxState,
    shares: ShareRange,
    part,
    place: Place,
    params: DecodingParams,
    config: cutlass.Constexpr,
):
    """Merges a quarter of the columns of all states, and stores the output: state by state, later keys first, as the forward joins them
    (:mod:`tilewise.backends.hopper.kit.states`)."""
    thread, fours, count = holder(config), config.tiles.width // 16, config.tiles.own_rows  # fours: of a row
    mine = fours // WARPS
    sums = cute.make_rmem_tensor((count * 4 * mine,), F32)
    sums.fill(0.0)
    rows.m2.fill(-softmax.INF)
    rows.l.fill(0.0)
    for begin in cutlass.range(0, shares.last + 1 - shares.first, TOGETHER, unroll=1):
        found = []
        for k in cutlass.range_constexpr(TOGETHER):
            at = shares.last - begin - k  # later keys first, as the forward's tiles visit them
            share = PICK.larger(at, shares.first)
            state = state_of(share, share == shares.first, params)
            statistics = take_numbers(params.extra.part_lse, (state, thread))
            for r in cutlass.range_constexpr(count):
                m2, l = statistics[2 * r : 2 * r + 2]
                columns = []
                for n in cutlass.range_constexpr(mine):
                    columns += take_numbers(params.extra.part_o, (state, r * fours + part * mine + n, thread))
                found.append((r, choose(at >= shares.first, m2, -softmax.INF), l, columns))
        for r, *state in found:
            add(rows, r, sums, *state)
    columns = [[sums[r * 4 * mine + n] for n in range(4 * mine)] for r in range(count)]
    put(rows, columns, part, place, params, config)


def add(rows: softmax.SoftmaxState, r: int, sums: cute.Tensor, m2, l, columns: list) -> None:
    """Adds a state of row r to what its part of the sums holds."""
    rows.m2[r], rows.l[r], factor, other = joined(rows.m2[r], rows.l[r], m2, l)
    for n, x in enumerate(columns, r * len(columns)):
        sums[n] = joined_number(sums[n], factor, x, other)


# -- Output --------------------------------------------------------------------------------------------------------


def put(
    rows: softmax.SoftmaxState, columns: list[list], part, place: Place, params: DecodingParams, config: DecodingConfig
) -> None:
    """Normalises and stores columns of each of a thread's rows: those of an accumulator from number ``part · len(columns[0])`` of a
    thread on. The first part has their lse."""
    thread = holder(config)
    found = [row_at(row_of(thread, r), params) for r in range(len(columns))]
    sinks = [choose(params.sinks > 0, params.sink[row.head], -softmax.INF) for row in found]
    factors, statistics = softmax.finalize(rows, sinks + [-softmax.INF] * (2 - len(sinks)))
    start = 4 * len(columns[0]) * part + thread % 4 * 2
    for (query, head, inside), own, factor, statistic in zip(found, columns, factors, statistics, strict=False):
        left = columns_of(inside, params) - start
        for c in range(0, len(own), 2):
            word = pack(own[c] * factor, own[c + 1] * factor, config.dtype)
            column = constant_column(c)
            put_word(params.o, (query, place.sequence, head), start + column, word, left > column)
        first = cutlass.select_(inside, I32(1) - part, I32(0)) > 0
        put_lse(params.lse, (query, head, place.sequence), statistic, first)


def put_word(o: cute.Tensor, place: tuple, column, word, inside) -> None:
    """Writes two neighbouring numbers of 16 bits of a row, where ``inside`` holds."""
    code = "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; @p st.global.b32 [{$r1}], {$r2}; }"
    flag, pointer = cutlass.select_(inside, I32(1), I32(0)), o[(*place, None)].iterator + column
    cute.arch.inline_ptx(code, read_only_args=[flag, pointer.toint(), word])
