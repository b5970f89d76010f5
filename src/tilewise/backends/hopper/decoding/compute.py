"""The computing warpgroup of decoding: the heads of a group are the first rows of a tile of 64, which one warp holds,
query after query.

A block takes ``S = Q Kᵀ`` (64 × tile_n), the online softmax, and ``O += P V`` (64 × width), Q and P from registers. Memory is what bounds
it: the products and the softmax of a block take half of the time in which its keys come.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.decoding.config import DecodingConfig
from tilewise.backends.hopper.decoding.merge import finish
from tilewise.backends.hopper.decoding.params import DecodingParams
from tilewise.backends.hopper.decoding.shares import (
    Place,
    batch_of,
    block_at,
    blocks_of,
    columns_of,
    first_block_of,
    first_share,
    following,
    row_at,
)
from tilewise.backends.hopper.decoding.storage import DecodingStorage
from tilewise.backends.hopper.forward.tiles import WIDEST_JOINED
from tilewise.backends.hopper.kit import softmax
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.instructions import pack
from tilewise.backends.hopper.kit.ring import PipelineState, acquire, new_reader, release
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.tiles import begin_product, column_of, row_of, rows_columns

SOFTCAP_COLUMNS = 16  # of a thread that decide together how a softcap's tanh is computed


class DecodingOperands(NamedTuple):
    """The atoms, shared operands and registers of the warpgroup.

    Attributes:
        qk, pv: the atoms of ``S = Q Kᵀ`` and ``O += P V``. k, v: shared operands (1, 1, k step, stage).
        q: 64 × width. p: 64 × tile_n. s, o: accumulators of 64 × tile_n and 64 × width, fp32. rows: the softmax state of a thread's rows.
    """

    qk: cute.TiledMma
    pv: cute.TiledMma
    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    p: cute.Tensor
    s: cute.Tensor
    o: cute.Tensor
    rows: softmax.SoftmaxState


def new_operands(
    qk: cute.TiledMma, pv: cute.TiledMma, smem: DecodingStorage, config: DecodingConfig
) -> DecodingOperands:
    """The operands of the warpgroup; the accumulators hold nothing yet."""
    tiles, element = config.tiles, ELEMENT[config.dtype]
    return DecodingOperands(
        qk, pv,
        qk.make_fragment_B(qk.get_slice(0).partition_B(smem.k)),  # K, tile_n × width, of each stage
        pv.make_fragment_B(pv.get_slice(0).partition_B(smem.v)),  # V, width × tile_n, of each stage
        cute.make_rmem_tensor(qk.partition_shape_A((ROWS, tiles.width)), element),  # Q
        cute.make_rmem_tensor(pv.partition_shape_A((ROWS, tiles.tile_n)), element),  # P
        cute.make_rmem_tensor(qk.partition_shape_C((ROWS, tiles.tile_n)), F32),  # S
        cute.make_rmem_tensor(pv.partition_shape_C((ROWS, tiles.width)), F32),  # O
        softmax.new_state(),
    )  # fmt: skip


@cute.jit
def compute(
    smem: DecodingStorage, qk: cute.TiledMma, pv: cute.TiledMma, params: DecodingParams, config: cutlass.Constexpr
):
    """The warpgroup attends to the blocks of its shares, sequence after sequence."""
    share, place = first_share(params, config)
    operands = new_operands(qk, pv, smem, config)
    state, turn, begin = new_reader(), I32(0), share.begin
    load_query(operands, place.sequence, params, config)
    while begin < share.end:
        stop = PICK.smaller(place.at + blocks_of(place.keys, params, config), share.end)
        first = first_block_of(place.keys, params, config) - place.at  # of the line's blocks to the sequence's
        operands.o.fill(0.0)
        operands.rows.m2.fill(-softmax.INF)
        operands.rows.l.fill(0.0)
        low, high = begin + first, stop + first
        for n in cutlass.range(low, high, unroll=1):
            block = block_at(n, low, high)
            state = attend(operands, state, place, block, smem, params, config)
        next_share, next_place, begin = following(share, place, stop, params, config)
        load_query(operands, next_place.sequence, params, config)  # on its way while this sequence ends
        turn = finish(operands, smem.told, turn, place, share, params, config)
        share, place = next_share, next_place


def attend(
    operands: DecodingOperands, state: PipelineState, place: Place, n, smem: DecodingStorage, params: DecodingParams,
    config: DecodingConfig,
) -> PipelineState:  # fmt: skip
    """Block n of the keys of a sequence. Returns the next state."""
    acquire(smem.full_k, state)  # the loading warp
    # S = Q Kᵀ, 64 × tile_n, fp32
    begin_product(operands.qk, operands.s, operands.q, operands.k[None, None, None, state.index], overwrite=True)
    warpgroup.wait_group(0)
    s, scale2 = rows_columns(operands.s), params.scale2
    if config.score == "softcap":  # scores are in base 2 then
        softmax.softcap(s, params.cap2, params.scale2, SOFTCAP_COLUMNS)
        scale2 = F32(1.0)
    hide(s, place.keys, n * config.tiles.tile_n, params, config)
    # P = exp(S - m), 64 × tile_n, unnormalised; maxima fall behind as in the forward of such heads
    lazy = softmax.LAZY_IN_ONE_ORDER if config.tiles.width <= WIDEST_JOINED else softmax.LAZY
    softmax.online_softmax(s, operands.rows, scale2, first=False, masked=True, lazy=lazy)
    softmax.rescale(operands.o, operands.rows.factor, True)
    round_p(operands, config)
    acquire(smem.full_v, state)  # the loading warp
    # O += P V, 64 × width, fp32
    begin_product(operands.pv, operands.o, operands.p, operands.v[None, None, None, state.index], overwrite=False)
    warpgroup.wait_group(0)
    release(smem.empty + state.index)  # the loading warp
    return state.advance(config.tiles.stages)


@cute.jit
def hide(s: cute.Tensor, keys, start, params: DecodingParams, config: cutlass.Constexpr):
    """Sets scores of a block, whose keys begin at ``start``, to -inf where a query sees no key; few blocks have any such."""
    off = keys - params.queries
    # The first query's end is the lowest, and the last query's beginning the highest.
    end, begin = PICK.smaller(keys, off + params.hi), keys - 1 + params.lo
    if PICK.smaller(end - start - config.tiles.tile_n, start - begin) < 0:
        lower, upper = [], []
        for r in cutlass.range_constexpr(2):
            thread = cute.arch.thread_idx()[0] % 128
            query, first = row_at(row_of(thread, r), params).query, start + column_of(thread, 0)
            lower.append(off + query + params.lo - first)
            upper.append(PICK.smaller(keys, off + query + params.hi) - first)
        softmax.mask_scores(s, lower, upper)


def round_p(operands: DecodingOperands, config: DecodingConfig) -> None:
    """Rounds the exponentials into P: the same registers in the same order, no shuffle."""
    words, values = words_of(operands.p), cute.make_tensor(operands.s.iterator, cute.make_layout(cute.size(operands.s)))
    for n in range(cute.size(words)):
        words[n] = pack(values[2 * n], values[2 * n + 1], config.dtype)


def words_of(fragment: cute.Tensor) -> cute.Tensor:
    """A left operand in registers as words of two numbers."""
    flat = cute.make_tensor(fragment.iterator, cute.make_layout(cute.size(fragment)))
    return cute.recast_tensor(flat, I32)


# -- Queries -------------------------------------------------------------------------------------------------------


def load_query(operands: DecodingOperands, sequence, params: DecodingParams, config: DecodingConfig) -> None:
    """Brings a sequence's queries of the group's heads; rows that there are not are zeros."""
    words, thread = words_of(operands.q), cute.arch.thread_idx()[0] % 128
    sequence = PICK.smaller(sequence, batch_of(params) - 1)
    for r in range(2):
        row = row_at(row_of(thread, r), params)
        columns = columns_of(row.inside, params)
        for piece in range(cute.size(words) // 2):  # of 8 columns, of which a thread holds two
            word = I32(0)  # of the rows from the ninth on
            if 8 * r < config.tiles.rows:
                place = row.query, sequence, row.head
                # The head dim is a multiple of 8.
                word = take_word(params.q, place, 8 * piece + thread % 4 * 2, columns > 8 * piece)
            words[2 * piece + r] = word


def take_word(q: cute.Tensor, place: tuple, column, inside) -> I32:
    """Two neighbouring numbers of 16 bits of a row, zeros where ``inside`` does not hold."""
    code = "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; mov.b32 {$w0}, 0; @p ld.global.nc.b32 {$w0}, [{$r1}]; }"
    flag, pointer = cutlass.select_(inside, I32(1), I32(0)), q[(*place, None)].iterator + column
    return cute.arch.inline_ptx(code, write_only_types=[I32], read_only_args=[flag, pointer.toint()])
