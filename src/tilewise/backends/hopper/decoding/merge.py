"""The end of a sequence in a share: its output, or a state, and the merge of all states by whoever comes last (docs/algorithm.md, (8)).

A state is O, not normalised, with the maxima and sums of its rows, as the threads of one warp hold them, in fp32. Each CTA counts its own
once it is written; the one that finds all others counted merges them, in the order of the shares, whoever it is. Every warp then has a
quarter of the columns.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.decoding.config import DecodingConfig
from tilewise.backends.hopper.decoding.params import DecodingParams
from tilewise.backends.hopper.decoding.shares import Place, Share, blocks_of, head_of, head_of_row
from tilewise.backends.hopper.forward.epilogue import put_lse
from tilewise.backends.hopper.kit import softmax
from tilewise.backends.hopper.kit.dtypes import F32, I32
from tilewise.backends.hopper.kit.instructions import choose, get_words, pack, put_four, put_pair, put_words
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.tiles import constant_column, row_of, rows_columns

TOGETHER = 4  # states whose loads are on their way at once
WARPS = 4  # that share the columns of a merge


class Parts(NamedTuple):
    """The shares ``[first, last]`` that have blocks of a sequence."""

    first: I32
    last: I32


@cute.jit
def finish(operands, told: cute.Pointer, place: Place, share: Share, params: DecodingParams, config: cutlass.Constexpr):
    """Writes o and lse of a sequence that this CTA alone has had, or that it is the last one to have had a part of; else a state."""
    last_block = place.at + blocks_of(place.keys, config) - 1
    parts = Parts(place.at // share.each, last_block // share.each)
    holds_rows = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0
    if parts.first == parts.last:
        if holds_rows:
            o = rows_columns(operands.o)
            put(operands.rows, [o[0, c] for c in range(config.tiles.width // 4)], 0, place, params, config)
    else:
        if holds_rows:
            put_state(operands, share.begin <= place.at, params, config)
            cute.arch.fence_acq_rel_gpu()  # each lane's numbers, before one lane counts them
            cute.arch.sync_warp()
            tell(told, place, parts, params)
        cute.arch.barrier(barrier_id=1, number_of_threads=32 * WARPS)
        if get_words(told, 1)[0] != 0:
            cute.arch.fence_acq_rel_gpu()  # what the other CTAs counted
            merge(operands.rows, parts, place, params, config)


@cute.jit
def tell(told: cute.Pointer, place: Place, parts: Parts, params: DecodingParams):
    """One thread counts this CTA's state, and tells the warpgroup whether all others are counted; the last one leaves the count zero."""
    with cute.arch.elect_one():
        at = place.sequence * params.heads_k + head_of(params)
        found, others = count_up(params.extra.counts, at), parts.last - parts.first
        if found == others:
            params.extra.counts[at] = I32(0)
        put_words(told, [cutlass.select_(found == others, I32(1), I32(0))])


def count_up(counts: cute.Tensor, at) -> I32:
    """Adds 1 to a count and returns what it was; whoever sees the new count sees all that was written before."""
    return cute.arch.atomic_add(cute.domain_offset((at,), counts).iterator, I32(1), sem="acq_rel", scope="gpu")


# -- States --------------------------------------------------------------------------------------------------------


def state_of(share, begins, params: DecodingParams):
    """The number of a share's state: the second of those of its CTA where it ``begins`` the sequence."""
    return 2 * (share * params.heads_k + head_of(params)) + cutlass.select_(begins, I32(1), I32(0))


def put_state(operands, begins, params: DecodingParams, config: DecodingConfig) -> None:
    """Writes the state of a sequence's blocks in this share: four numbers of each lane side by side."""
    o, lane = rows_columns(operands.o), cute.arch.thread_idx()[0] % 32
    state = state_of(cute.arch.block_idx()[0] // params.heads_k, begins, params)
    for n in range(config.tiles.width // 16):
        put_numbers(params.extra.part_o, (state, n, lane), [o[0, 4 * n + k] for k in range(4)])
    put_numbers(params.extra.part_lse, (state, lane), [operands.rows.m2[0], operands.rows.l[0]])


def put_numbers(states: cute.Tensor, place: tuple, values: list) -> None:
    """Writes two or four neighbouring fp32 numbers."""
    put, pointer = put_four if len(values) == 4 else put_two, states[(*place, None)].iterator
    put(pointer, values)


def put_two(pointer, values: list) -> None:
    """:func:`put_pair` of a list."""
    put_pair(pointer, *values)


def take_numbers(states: cute.Tensor, place: tuple) -> list:
    """Two or four neighbouring fp32 numbers that another CTA may have written: not from this multiprocessor's cache."""
    count, pointer = states.shape[-1], states[(*place, None)].iterator
    names = ",".join(f"{{$w{n}}}" for n in range(count))
    code = f"ld.relaxed.gpu.global.v{count}.f32 {{{names}}}, [{{$r0}}];"
    return list(cute.arch.inline_ptx(code, write_only_types=[F32] * count, read_only_args=[pointer.toint()]))


@cute.jit
def merge(rows: softmax.SoftmaxState, parts: Parts, place: Place, params: DecodingParams, config: cutlass.Constexpr):
    """Merges a quarter of the columns of all states, ``O = sum_c 2**(m_c - m) O_c`` and the sums likewise, and stores the output."""
    thread, fours = cute.arch.thread_idx()[0] % 128, config.tiles.width // 16 // WARPS
    warp, lane = thread // 32, thread % 32
    sums = cute.make_rmem_tensor((4 * fours,), F32)
    sums.fill(0.0)
    rows.m2[0] = F32(-softmax.INF)
    rows.l[0] = F32(0.0)
    for begin in cutlass.range(parts.first, parts.last + 1, TOGETHER, unroll=1):
        found = []
        for k in cutlass.range_constexpr(TOGETHER):
            share = PICK.smaller(begin + k, parts.last)
            state = state_of(share, share == parts.first, params)
            m2, l = take_numbers(params.extra.part_lse, (state, lane))
            columns = []
            for n in cutlass.range_constexpr(fours):
                columns += take_numbers(params.extra.part_o, (state, warp * fours + n, lane))
            found.append((choose(begin + k <= parts.last, m2, -softmax.INF), l, columns))
        add(rows, sums, found)
    put(rows, [sums[n] for n in range(4 * fours)], warp, place, params, config)


def add(rows: softmax.SoftmaxState, sums: cute.Tensor, found: list) -> None:
    """Adds states, each ``(m2, l, columns)``, to what the sums hold."""
    top = rows.m2[0]
    for m2, _, _ in found:
        top = cute.arch.fmax(top, m2)
    # No key so far: -inf - -inf would be NaN.
    base = choose(top == -softmax.INF, 0.0, top)
    old = cute.math.exp2(rows.m2[0] - base, fastmath=True)
    rows.m2[0], rows.l[0] = top, rows.l[0] * old
    for n in range(cute.size(sums)):
        sums[n] = sums[n] * old
    for m2, l, columns in found:
        weight = cute.math.exp2(m2 - base, fastmath=True)
        rows.l[0] = rows.l[0] + l * weight
        for n, x in enumerate(columns):
            sums[n] = sums[n] + x * weight


# -- Output --------------------------------------------------------------------------------------------------------


def put(
    rows: softmax.SoftmaxState, columns: list, part, place: Place, params: DecodingParams, config: DecodingConfig
) -> None:
    """Normalises and stores columns of the rows: those of an accumulator from number ``part · len(columns)`` of a thread on. The first
    part has their lse."""
    lane = cute.arch.thread_idx()[0] % 32
    row = row_of(lane, 0)
    inside, head = params.group > row, head_of_row(row, params)
    sink = choose(params.sinks > 0, params.sink[head], -softmax.INF)
    factor, statistic = softmax.finalize(rows, [sink, -softmax.INF])
    start = 4 * len(columns) * part + lane % 4 * 2
    for c in range(0, len(columns), 2):
        word = pack(columns[c] * factor[0], columns[c + 1] * factor[0], config.dtype)
        put_word(params.o, (0, place.sequence, head), start + constant_column(c), word, inside)
    first = cutlass.select_(inside, I32(1) - part, I32(0)) > 0
    put_lse(params.lse, (0, head, place.sequence), statistic[0], first)


def put_word(o: cute.Tensor, place: tuple, column, word, inside) -> None:
    """Writes two neighbouring numbers of 16 bits of a row, where ``inside`` holds."""
    code = "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; @p st.global.b32 [{$r1}], {$r2}; }"
    flag, pointer = cutlass.select_(inside, I32(1), I32(0)), o[(*place, None)].iterator + column
    cute.arch.inline_ptx(code, read_only_args=[flag, pointer.toint(), word])
