"""The warpgroups of the values in latent attention: ``O += P V``, 64 rows by half of V's columns each, and the output."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.forward.epilogue import put_columns, put_lse
from tilewise.backends.hopper.kit import softmax
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.instructions import both, choose, pack, put_pair
from tilewise.backends.hopper.kit.ring import release
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.tiles import (
    begin_product,
    column_of,
    constant_column,
    row_of,
    rows_columns,
    transpose_quad,
)
from tilewise.backends.hopper.latent.config import COLUMNS, KEYS, PRODUCTS, STAGES, VALUE_GROUPS, WIDTH_V, LatentConfig
from tilewise.backends.hopper.latent.convert import scale_of
from tilewise.backends.hopper.latent.load import load_queries
from tilewise.backends.hopper.latent.pair import merge_with_peer
from tilewise.backends.hopper.latent.params import LatentParams
from tilewise.backends.hopper.latent.storage import LatentStorage, get_p, get_pair_of, part_of, stage_of
from tilewise.backends.hopper.latent.tiles import LatentTile, place_of

WIDE = WIDTH_V // VALUE_GROUPS  # columns of O in one warpgroup


class ValueOperands(NamedTuple):
    """The atom, shared operands and registers of a warpgroup of the values.

    Attributes:
        pv: the atom of ``O += P V``. v: shared operand (1, 1, k step, (part, stage)).
        p: 64 × 64 in the element type. o: the accumulators, 64 × 128 each, fp32. rows: the softmax state of the thread's two rows.
    """

    pv: cute.TiledMma
    v: cute.Tensor
    p: cute.Tensor
    o: tuple
    rows: softmax.SoftmaxState


def new_operands(pv: cute.TiledMma, smem: LatentStorage, config: LatentConfig) -> ValueOperands:
    """The operands of a warpgroup; the accumulators hold nothing yet."""
    return ValueOperands(
        pv,
        pv.make_fragment_B(pv.get_slice(0).partition_B(smem.v)),  # V, 128 × 64, of each part and stage
        cute.make_rmem_tensor(pv.partition_shape_A((ROWS, KEYS)), ELEMENT[config.dtype]),  # P
        tuple(cute.make_rmem_tensor(pv.partition_shape_C((ROWS, COLUMNS)), F32) for _ in range(PRODUCTS)),  # O
        softmax.new_state(),
    )


@cute.jit
def compute_values(
    smem: LatentStorage, w, pv: cute.TiledMma, tile: LatentTile, params: LatentParams, config: cutlass.Constexpr
):
    """Warpgroup w brings its rows of Q, then adds P V of every key tile to its columns of O, and writes these."""
    load_queries(smem, w, tile, params)
    if cutlass.const_expr(config.pair):
        cute.arch.cluster_arrive()  # partner: pair.merge_with_peer. These warpgroups read no Q
    operands = new_operands(pv, smem, config)
    for o in operands.o:
        o.fill(0.0)
    for step in cutlass.range(tile.last - tile.first, unroll=1):
        stage, phase = stage_of(step)
        cute.arch.mbarrier_wait(smem.p_full + stage, phase)  # P and its factors: a score group
        take_factors(operands.rows, smem, stage)
        take_p(operands, smem, stage)
        rescale(operands)
        for n in cutlass.range_constexpr(PRODUCTS):
            cute.arch.mbarrier_wait(smem.full + part_of(stage, part_of_v(w, n)), phase)  # V: the copy engine
            if cutlass.const_expr(config.selected):
                cute.arch.fence_view_async_shared()  # what threads copied, wgmma reads by another path
            # O += P V, 64 × 128, fp32
            v = operands.v[None, None, None, (PRODUCTS * w + n, stage)]
            begin_product(operands.pv, operands.o[n], operands.p, v, overwrite=False)
        # P's words have come, since the products read them: an arrival alone would wait for no load (hopper-stage-release).
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        release(smem.empty + part_of(stage, 0))  # P: the score group of this stage
        for n in cutlass.range_constexpr(PRODUCTS):
            warpgroup.wait_group(PRODUCTS - 1 - n)  # O += P V of these columns
            release(smem.empty + part_of(stage, part_of_v(w, n)))  # V: the score group of this stage
    epilogue(operands, smem, w, tile, params, config)


def part_of_v(w, n: int):
    """The part of a key tile that warpgroup w's n-th product reads as V."""
    return 1 + VALUE_GROUPS * n + w


def take_factors(rows: softmax.SoftmaxState, smem: LatentStorage, stage) -> None:
    """The factors by which a score group wants O to be multiplied before its product."""
    for r, factor in enumerate(get_pair_of(smem.factor, stage)):
        rows.factor[r] = factor


def take_p(operands: ValueOperands, smem: LatentStorage, stage) -> None:
    """P of a tile from the score group that left it, as a left operand in registers."""
    words = cute.recast_tensor(cute.make_tensor(operands.p.iterator, cute.make_layout(cute.size(operands.p))), I32)
    for n, word in enumerate(get_p(smem, stage)):
        words[n] = word


@cute.jit
def rescale(operands: ValueOperands):
    """Multiplies O by the rows' factors; a warp whose factors are all 1, as most are, does nothing."""
    factor = operands.rows.factor
    # The lanes of a warp hold 16 rows; the branch must be the same for all of them.
    if cute.arch.vote_any_sync(factor[0] * factor[1] != 1.0):
        for o in operands.o:
            softmax.scale_rows(rows_columns(o), factor)


# -- The end of a tile ---------------------------------------------------------------------------------------------


def epilogue(
    operands: ValueOperands, smem: LatentStorage, w, tile: LatentTile, params: LatentParams, config: LatentConfig
) -> None:
    """Writes O / l, and the first warpgroup lse, to global memory; of split keys their state, in fp32.

    Of a pair each CTA does so for the columns of one warpgroup.

    A sink is a part of the first split's state, and none of the rows' past the last sequence.
    """
    cute.arch.mbarrier_wait(smem.end, 0)  # every score group
    take_sums(operands.rows, smem)
    if cutlass.const_expr(config.pair):
        merge_with_peer(operands.o, operands.rows, smem, w == tile.rank, tile.rank)
    thread = cute.arch.thread_idx()[0] % 128
    places = [place_of(row_of(thread, r), tile, params) for r in range(2)]
    if cutlass.const_expr(config.pair):  # the other warpgroup's columns are the peer's
        places = [(place, both(inside, w == tile.rank)) for place, inside in places]
    real = tile.hi + 1 if config.selected else cute.size(params.extra.cu_q) - 1 - tile.sequence
    sinks = PICK.smaller(params.sinks, real)
    sinks = PICK.smaller(sinks, 1 - tile.split)
    sink_logits = [choose(sinks > 0, params.sink[place[1]], -softmax.INF) for place, _ in places]
    # For the thread's two rows: 1 / l, and the natural lse.
    factor, statistic = softmax.finalize(operands.rows, sink_logits)
    if config.e4m3:
        scale = scale_of(params.v_scale, tile)
        factor = [x * scale for x in factor]
    for r, (place, inside) in enumerate(places):
        mine = cutlass.select_(inside, 1 - w, 0) > 0  # both warpgroups have the row's lse
        lse, at = (params.extra.part_lse, (tile.split, *place)) if config.split else (params.lse, place)
        put_lse(lse, at, statistic[r], mine)
    for n, accumulator in enumerate(operands.o):
        o, start = rows_columns(accumulator), WIDE * w + COLUMNS * n
        softmax.scale_rows(o, factor)
        for r, (place, inside) in enumerate(places):
            if config.split:
                put_state(o[r, None], params.extra.part_o, (tile.split, *place), start, inside)
            else:
                put_row(o, r, place, start, inside, params, config)


def take_sums(rows: softmax.SoftmaxState, smem: LatentStorage) -> None:
    """The rows' last maxima, and this thread's parts of the sums of all score groups, brought up to these maxima."""
    groups = range(STAGES)
    m, l = ([get_pair_of(array, g) for g in groups] for array in (smem.m, smem.l))
    for r in range(2):
        top = m[0][r]
        for other in m[1:]:
            top = cute.arch.fmax(top, other[r])
        base, total = choose(top == -softmax.INF, 0.0, top), F32(0.0)
        for g in groups:
            total = total + l[g][r] * cute.math.exp2(m[g][r] - base, fastmath=True)
        rows.m2[r], rows.l[r] = top, total


@cute.jit
def put_state(values: cute.Tensor, part_o: cute.Tensor, place: tuple, first, inside):
    """Writes a thread's part of a row of a split's state, from column ``first`` on, in pairs of neighbours."""
    if inside:
        start = part_o[(*place, None)].iterator + first + column_of(cute.arch.thread_idx()[0] % 128, 0)
        for c in cutlass.range_constexpr(0, cute.size(values), 2):
            put_pair(start + constant_column(c), values[c], values[c + 1])


def put_row(o: cute.Tensor, r: int, place: tuple, start, inside, params: LatentParams, config: LatentConfig) -> None:
    """Writes row r of a thread, rounded, from column ``start`` on: 16 bytes by each thread and store, a quad's side by side."""
    column = start + 8 * (cute.arch.thread_idx()[0] % 4)
    for first in range(0, cute.size(o, mode=[1]), 8):  # four pairs of columns: 32 of the quad
        words = [pack(o[r, first + n], o[r, first + n + 1], config.dtype) for n in range(0, 8, 2)]
        put_columns(params.o, place, inside, column + constant_column(first), transpose_quad(words))
