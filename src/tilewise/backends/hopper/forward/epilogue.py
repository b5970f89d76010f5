"""The end of a query tile: O / l and lse leave the registers of a warpgroup."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp as warp_ops

from tilewise.backends.hopper.forward import segments
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.params import ForwardParams
from tilewise.backends.hopper.forward.query_tiles import row_at
from tilewise.backends.hopper.forward.storage import ForwardStorage
from tilewise.backends.hopper.kit import softmax
from tilewise.backends.hopper.kit.dtypes import ELEMENT, I32
from tilewise.backends.hopper.kit.instructions import both, choose, pack, put_pair, put_words_if
from tilewise.backends.hopper.kit.lists import list_of
from tilewise.backends.hopper.kit.pair_bias import natural
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.tiles import (
    QueryTile,
    column_of,
    constant_column,
    rows_columns,
    transpose_quad,
)


def epilogue(
    operands, smem: ForwardStorage, n_q, w, lse: cute.Tensor, sink: cute.Tensor, query_tile: QueryTile,
    params: ForwardParams, config: Config,
):  # fmt: skip
    """Writes lse to global memory, and O / l there too or to where Q was, from where a storing warp takes it."""
    if config.split:
        put_part(operands, query_tile, w, params, config)
        return
    heads = [row_at(query_tile, w, r, params, config)[0][1] for r in range(2)]
    sinks = params.sinks
    if config.selected:  # the heads of a query are rows
        heads = [PICK.smaller(row_at(query_tile, w, r, params, config)[0][2], params.seqlen_q - 1) for r in range(2)]
        sinks = PICK.smaller(sinks, list_of(query_tile.batch, params.extra).hi + 1)
    if config.packed:  # the rows past the last sequence have none
        sinks = PICK.smaller(sinks, cute.size(params.extra.cu_q) - 1 - query_tile.batch)
    sink_logits = [choose(sinks != 0, sink[head], -softmax.INF) for head in heads]
    if config.tiles.segment:
        segments.join_waiting(operands.segments, operands.rows, operands.o, config)
    # For the thread's two rows: 1 / l, and the natural lse.
    factor, statistic = softmax.finalize(operands.rows, sink_logits)
    if config.score == "bias":
        statistic = [natural(x) for x in statistic]
    for r in range(2):
        place, inside = row_at(query_tile, w, r, params, config)  # again: known early, it costs the loops instructions
        if config.tiles.pieces > 1:  # every piece finds the same one
            inside = both(inside, query_tile.piece == 0)
        put_lse(lse, place, statistic[r], inside)
    softmax.scale_rows(rows_columns(operands.o), kept_factor(factor, params, config))
    if not config.stores:
        put_rows(operands, query_tile, w, params, config)
        return
    cute.arch.barrier(barrier_id=1 + w, number_of_threads=128)  # all four warps have read Q for the last time
    put_tile(operands, smem, n_q, config)
    # The copy engine reads shared memory by another path: what threads wrote must be visible there.
    cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(smem.o_full + n_q)  # the storing warp


def kept_factor(factor: list, params: ForwardParams, config: Config) -> list:
    """The factors that normalise the rows of O, times dropout's factor of kept pairs."""
    return [f * params.extra.keep for f in factor] if config.dropout else factor


@cute.jit
def put_lse(lse: cute.Tensor, place: tuple, value, inside):
    """One thread of the four that hold a row writes its lse."""
    if cute.arch.thread_idx()[0] % 4 == 0 and inside:
        lse[place] = value


# -- Split keys ----------------------------------------------------------------------------------------------------


def put_part(operands, query_tile: QueryTile, w, params: ForwardParams, config: Config) -> None:
    """Writes the state of a split, fp32, to global memory; a sink is left to the merge."""
    factor, statistic = softmax.finalize(operands.rows, [-softmax.INF] * 2)
    o = rows_columns(operands.o)
    softmax.scale_rows(o, kept_factor(factor, params, config))
    for r in range(2):
        place, inside = row_at(query_tile, w, r, params, config)
        put_row(o[r, None], params.extra.part_o, (query_tile.split, *place), inside)
        put_lse(params.extra.part_lse, (query_tile.split, *place), statistic[r], inside)


@cute.jit
def put_row(values: cute.Tensor, part_o: cute.Tensor, place: tuple, inside):
    """Writes a thread's part of a row, in pairs of neighbours."""
    if inside:
        row = part_o[(*place, None)]
        start = row.iterator + column_of(cute.arch.thread_idx()[0] % 128, 0)
        for c in cutlass.range_constexpr(0, cute.size(values), 2):
            put_pair(start + constant_column(c), values[c], values[c + 1])


# -- O from registers ----------------------------------------------------------------------------------------------


def put_rows(operands, query_tile: QueryTile, w, params: ForwardParams, config: Config) -> None:
    """Writes O, rounded, from registers to global memory: 16 bytes of a row by each thread and store, a quad's side by side."""
    o, column = rows_columns(operands.o), 8 * (cute.arch.thread_idx()[0] % 4)
    if config.tiles.pieces > 1:
        column = column + query_tile.piece * config.tiles.width_o  # where the tile's piece begins
    for r in range(2):
        place, inside = row_at(query_tile, w, r, params, config)
        for first in range(0, cute.size(o, mode=[1]), 8):  # four pairs of columns: 32 of the quad
            words = [pack(o[r, first + n], o[r, first + n + 1], config.dtype) for n in range(0, 8, 2)]
            start = column + constant_column(first)
            put_columns(params.extra.direct_o, place, inside, start, transpose_quad(words))


def put_columns(o: cute.Tensor, place: tuple, inside, column, words: list) -> None:
    """Writes eight columns of a row, two in each word, as far as O has such columns."""
    batch, head, i = place
    row = o[batch, i, head, None]
    there = cutlass.select_(inside, I32(cute.size(row)), I32(0)) > column
    put_words_if(there, row.iterator + column, words)


# -- O through shared memory ---------------------------------------------------------------------------------------


def put_tile(operands, smem: ForwardStorage, n_q, config: Config) -> None:
    """Writes O, (64, width_o), rounded, to shared memory, where the tile's Q was."""
    element = ELEMENT[config.dtype]
    out = cute.make_rmem_tensor_like(operands.o, element)
    out.store(operands.o.load().to(element))
    copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp_ops.StMatrix8x8x16bOp(False, 4), element), operands.pv)
    part = copy.get_slice(cute.arch.thread_idx()[0] % 128)
    cute.copy(copy, part.retile(out), part.partition_D(smem.o[None, None, n_q]))
