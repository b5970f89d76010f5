"""The computing warpgroups of the forward: 64 rows of each query tile, key block by key block.

A key block takes ``S = Q Kᵀ`` (64 × tile_n), the online softmax, and ``O += P V`` (64 × width_o), all in fp32 registers. The
product with V of one block runs under the softmax of the next one. Blocks that take several stages are read by parts.py.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from tilewise.backends.hopper.config import PLAIN, ROWS
from tilewise.backends.hopper.forward import segments, staged_blocks
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.epilogue import epilogue
from tilewise.backends.hopper.forward.load import receive
from tilewise.backends.hopper.forward.params import ForwardParams
from tilewise.backends.hopper.forward.query_tiles import (
    band_of_tile,
    block_at,
    kept_words,
    place_packed,
    rounds_of,
    tile_of,
    whole_steps,
)
from tilewise.backends.hopper.forward.storage import WORDS, ForwardStorage
from tilewise.backends.hopper.forward.turns import first_turn, pingpong_signal, pingpong_wait, skip
from tilewise.backends.hopper.kit import bits, dropout, expression, pair_bias, schedule, softmax
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.instructions import all_agree, both, choose, get_words, keep_words_above, pack
from tilewise.backends.hopper.kit.lines import BlockLine, RowLine, line_of_head
from tilewise.backends.hopper.kit.lists import hide_others
from tilewise.backends.hopper.kit.ring import PipelineState, acquire, new_reader, release
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.slopes import BlockSlopes, RowSlopes
from tilewise.backends.hopper.kit.tiles import QueryTile, begin_product, column_of, row_of, rows_columns


class ForwardOperands(NamedTuple):
    """The atoms, shared operands and register fragments of one warpgroup.

    Attributes:
        qk, pv: the atoms of ``S = Q Kᵀ`` and ``O += P V``.
        q, k, v: shared operands (1, 1, k step, tile or stage).
        s, o: accumulators of 64 × tile_n and 64 × width_o, fp32.
        p: 64 × tile_n in the element type, in the order of ``s``'s registers.
        rows: the softmax state of the thread's two rows.
        wait: (1,) int32, of a softcap's short polynomials (:class:`tilewise.backends.hopper.kit.softmax.Capped`).
        bias: the tiles of a bias by pair.
        segments: of keys, where rows have one order of sums.
    """

    qk: cute.TiledMma
    pv: cute.TiledMma
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    s: cute.Tensor
    o: cute.Tensor
    p: cute.Tensor
    rows: softmax.SoftmaxState
    wait: cute.Tensor | None
    bias: pair_bias.BiasRing | None
    segments: segments.Segments | None


def new_operands(
    qk: cute.TiledMma, pv: cute.TiledMma, smem: ForwardStorage, w, params: ForwardParams, config: Config
) -> ForwardOperands:
    """The operands of warpgroup w; the accumulators hold nothing yet."""
    tiles, first, second = config.tiles, qk.get_slice(0), pv.get_slice(0)
    return ForwardOperands(
        qk, pv,
        qk.make_fragment_A(first.partition_A(smem.q)),  # Q, 64 × width, of each tile
        qk.make_fragment_B(first.partition_B(smem.k)),  # K, tile_n × width, of each stage
        pv.make_fragment_B(second.partition_B(smem.v)),  # V, width_o × tile_n, of each stage
        cute.make_rmem_tensor(qk.partition_shape_C((ROWS, tiles.tile_n)), F32),  # S
        cute.make_rmem_tensor(pv.partition_shape_C((ROWS, tiles.width_o)), F32),  # O
        cute.make_rmem_tensor(pv.partition_shape_A((ROWS, tiles.tile_n)), ELEMENT[config.dtype]),  # P
        softmax.new_state(),
        cute.make_rmem_tensor((1,), I32) if config.short_tanh else None,
        new_bias(pv, smem, w, config) if config.score == "bias" else None,
        segments.new_segments(w, params, config),
    )  # fmt: skip


def new_bias(pv: cute.TiledMma, smem: ForwardStorage, w, config: Config) -> pair_bias.BiasRing:
    """The bias of warpgroup w, whose tiles have the shape of P."""
    values = cute.make_rmem_tensor(pv.partition_shape_A((ROWS, config.tiles.tile_n)), ELEMENT[config.dtype])
    first, place = w * config.tiles.bias_stages, pair_bias.new_place(phase=0)
    return pair_bias.BiasRing(values, place, smem.bias, first, smem.bias_full, smem.bias_empty)


# -- All tiles of a CTA --------------------------------------------------------------------------------------------


@cute.jit
def compute(
    smem: ForwardStorage, w, lse: cute.Tensor, sink: cute.Tensor, qk: cute.TiledMma, pv: cute.TiledMma,
    params: ForwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """Warpgroup w computes its 64 rows of each tile.

    Tiles of equal sequences overlap: the first product of the next tile runs under the end of one. Which packed tile comes next
    is known only with its Q, so that packed tiles follow one another, as tiles do whose blocks take several stages; with bits a tile waits
    for the next one's Q and overlaps.
    """
    tiles = config.tiles
    operands = new_operands(qk, pv, smem, w, params, config)
    state, q_state = new_reader(), new_reader()  # in the ring of K and V, and in the warpgroup's tiles of Q
    if cutlass.const_expr(tiles.pingpong):
        first_turn(w, config)
    if cutlass.const_expr(config.packed):
        taken = receive(smem, w * tiles.q_stages, smem.q_full, q_state.phase)
        while taken.sequence >= 0:
            query_tile = place_packed(taken, params, config)
            state = whole_tile(operands, query_tile, q_state, state, w, smem, lse, sink, params, config)
            q_state = q_state.advance(tiles.q_stages)
            taken = receive(smem, w * tiles.q_stages + q_state.index, smem.q_full, q_state.phase)
        if cutlass.const_expr(config.stores):
            # The mailbox now holds a tile of no sequence, which ends the storing warp too.
            cute.arch.mbarrier_arrive(smem.o_full + w * tiles.q_stages + q_state.index)
    elif cutlass.const_expr(tiles.staged):
        for round_ in cutlass.range(rounds_of(params, config), unroll=1):
            query_tile = tile_of(round_, params, config)
            state = whole_tile(operands, query_tile, q_state, state, w, smem, lse, sink, params, config)
            q_state = q_state.advance(tiles.q_stages)
    elif cutlass.const_expr(config.queued):
        taken = receive(smem, w * tiles.q_stages, smem.q_full, q_state.phase)
        query_tile = place_packed(taken, params, config)
        state = first_scores(
            operands, query_tile, w * tiles.q_stages, q_state.phase, state, w, smem, params, config, there=True
        )
        while taken.sequence >= 0:
            this = query_tile
            n_q, v_stage, state, q_state = begin_tile(operands, this, q_state, state, w, smem, params, config)
            next_q = w * tiles.q_stages + q_state.index
            taken = receive(smem, next_q, smem.q_full, q_state.phase)
            query_tile = place_packed(taken, params, config)
            there = taken.sequence >= 0
            state = first_scores(
                operands, query_tile, next_q, q_state.phase, state, w, smem, params, config, there=there
            )
            end_tile(operands, smem, n_q, v_stage, w, lse, sink, this, params, config)
        warpgroup.wait_group(0)  # the S that first_scores began without a tile
        # The mailbox now holds a tile of no sequence, which ends the storing warp too.
        cute.arch.mbarrier_arrive(smem.o_full + w * tiles.q_stages + q_state.index)
    else:
        last, query_tile = rounds_of(params, config) - 1, tile_of(0, params, config)
        state = first_scores(
            operands, query_tile, w * tiles.q_stages, q_state.phase, state, w, smem, params, config, there=True
        )
        for round_ in cutlass.range(last + 1, unroll=1):
            this = query_tile
            n_q, v_stage, state, q_state = begin_tile(operands, this, q_state, state, w, smem, params, config)
            next_q = w * tiles.q_stages + q_state.index
            query_tile = tile_of(PICK.smaller(round_ + 1, last), params, config)
            there = round_ < last
            state = first_scores(
                operands, query_tile, next_q, q_state.phase, state, w, smem, params, config, there=there
            )
            end_tile(operands, smem, n_q, v_stage, w, lse, sink, this, params, config)
        warpgroup.wait_group(0)  # the S that first_scores began without a tile


def whole_tile(
    operands: ForwardOperands, query_tile: QueryTile, q_state: PipelineState, state: PipelineState, w,
    smem: ForwardStorage, lse: cute.Tensor, sink: cute.Tensor, params: ForwardParams, config: Config,
) -> PipelineState:  # fmt: skip
    """Computes a tile from its first product to its end. Returns the state that follows."""
    n_q = w * config.tiles.q_stages + q_state.index
    state = first_scores(operands, query_tile, n_q, q_state.phase, state, w, smem, params, config, there=True)
    state = compute_tile(operands, query_tile, n_q, state, w, smem, params, config)
    warpgroup.wait_group(0)  # O is complete
    staged_blocks.release_values(state, smem, config)
    state = state.advance(config.tiles.stages, config.tiles.v_stages)
    epilogue(operands, smem, n_q, w, lse, sink, query_tile, params, config)
    return state


def begin_tile(
    operands: ForwardOperands, query_tile: QueryTile, q_state: PipelineState, state: PipelineState, w,
    smem: ForwardStorage, params: ForwardParams, config: Config,
) -> tuple:  # fmt: skip
    """Computes a tile but for its last product's end: its tile of Q, the stage of its last V, and what follows these two."""
    n_q = w * config.tiles.q_stages + q_state.index
    state = compute_tile(operands, query_tile, n_q, state, w, smem, params, config)
    return n_q, state.index, state.advance(config.tiles.stages), q_state.advance(config.tiles.q_stages)


def end_tile(
    operands: ForwardOperands, smem: ForwardStorage, n_q, v_stage, w, lse: cute.Tensor, sink: cute.Tensor,
    query_tile: QueryTile, params: ForwardParams, config: Config,
) -> None:  # fmt: skip
    """Ends a tile while the next one's first product may still run."""
    warpgroup.wait_group(1)  # this tile's last P V
    release(smem.empty + v_stage)  # the last V: the loading warp
    epilogue(operands, smem, n_q, w, lse, sink, query_tile, params, config)


# -- One tile ------------------------------------------------------------------------------------------------------


@cute.jit
def compute_tile(
    operands: ForwardOperands, query_tile: QueryTile, n_q, state: PipelineState, w, smem: ForwardStorage,
    params: ForwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """All key blocks of a tile, S of the first having begun: the rows' state, and O, unnormalised, once the last product is done.

    ``n_q`` is the tile of Q in shared memory. Returns the state at the last product's V.
    """
    row, band = query_tile.row + w * ROWS, band_of_tile(query_tile, params, config)
    hidden, whole, rest = whole_steps(query_tile, row, band, params, config)
    ends = row_ends(query_tile, row, cute.arch.thread_idx()[0] % 128, band, params, config)
    whole_block = steady_block if config.steady else key_block
    operands.o.fill(0.0)

    words = kept_words(query_tile, hidden, w, params, config)
    block = KeyBlock(ends, block_at(query_tile, hidden, params, config), partial=True, words=words)
    state = first_block(operands, state, block, smem, params, config)
    if cutlass.const_expr(config.skips):
        state = skip(hidden, operands, state, w, smem, config, turn=False)
    if cutlass.const_expr(config.has_upper or config.score == "table"):
        for step in cutlass.range(
            whole - 1 - hidden, unroll=1
        ):  # the right edge, or blocks that need the predicate or bits, or a bias for each pair
            words = kept_words(query_tile, hidden + 1 + step, w, params, config)  # under the products that follow
            block = KeyBlock(ends, block_at(query_tile, hidden + 1 + step, params, config), partial=True, words=words)
            state = key_block(operands, n_q, state, block, smem, params, config)
    if cutlass.const_expr(config.short_tanh):
        operands.wait[0] = softmax.first_wait(operands.rows, params.scale2)
    if cutlass.const_expr(not config.selected):
        if cutlass.const_expr(config.tiles.segment > 0):
            state = whole_segments(operands, query_tile, n_q, whole, rest, ends, state, smem, params, config)
        else:
            for step in cutlass.range(rest - whole, unroll=1):
                block = KeyBlock(ends, block_at(query_tile, whole + step, params, config), partial=False, words=words)
                state = whole_block(operands, n_q, state, block, smem, params, config)
    if cutlass.const_expr(config.has_lower and config.form != "bits"):
        for step in cutlass.range(query_tile.stop - query_tile.start - rest, unroll=1):  # the left edge
            block = KeyBlock(ends, block_at(query_tile, rest + step, params, config), partial=True, words=words)
            state = key_block(operands, n_q, state, block, smem, params, config)
    if cutlass.const_expr(not config.stores):
        release(smem.q_empty + n_q)  # the loading warp may bring the next Q
    if cutlass.const_expr(config.hides_values):
        acquire(smem.full, state)  # V of the last block: the loading warp
        segments.hide_values(query_tile, band, state.index, w, smem, config)
    staged_blocks.begin_values(operands, state, smem, config)  # of the last block
    return state


@cute.jit
def whole_segments(
    operands: ForwardOperands, query_tile: QueryTile, n_q, start, stop, ends: RowEnds, state: PipelineState, smem: ForwardStorage,
    params: ForwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """The whole blocks ``[start, stop)`` of a tile: those of a segment that has begun, then segment by segment. Only a block that begins
    one looks at what waits."""
    size, whole_block = config.tiles.segment, steady_block if config.steady else key_block
    begun = PICK.smaller((block_at(query_tile, start, params, config) + 1) % size, stop - start)
    for step in cutlass.range(begun, unroll=1):
        within = KeyBlock(ends, block_at(query_tile, start + step, params, config), partial=False, border=False)
        state = whole_block(operands, n_q, state, within, smem, params, config)
    for n in cutlass.range((stop - start - begun + size - 1) // size, unroll=1):
        first = start + begun + n * size
        block = KeyBlock(ends, block_at(query_tile, first, params, config), partial=False, border=True)
        state = key_block(operands, n_q, state, block, smem, params, config)
        for step in cutlass.range(PICK.smaller(size, stop - first) - 1, unroll=1):
            within = KeyBlock(ends, block_at(query_tile, first + 1 + step, params, config), partial=False, border=False)
            state = whole_block(operands, n_q, state, within, smem, params, config)
    return state


@cute.jit
def first_scores(
    operands: ForwardOperands, query_tile: QueryTile, n_q, q_phase, state: PipelineState, w, smem: ForwardStorage,
    params: ForwardParams, config: cutlass.Constexpr, there,
):  # fmt: skip
    """Issues the first QKᵀ of a tile. If the tile is not ``there``, computes garbage that is discarded. Returns the state at its K."""
    if there:
        cute.arch.mbarrier_wait(smem.q_full + n_q, q_phase)  # the loading warp
        if cutlass.const_expr(config.skips):
            row = query_tile.row + w * ROWS
            hidden, _, _ = whole_steps(query_tile, row, band_of_tile(query_tile, params, config), params, config)
            state = skip(hidden, operands, state, w, smem, config, turn=True)
        staged_blocks.acquire_keys(smem, state, config)  # K: the loading warp
    return staged_blocks.begin_scores(operands, n_q, state, smem, config)


# -- One key block -------------------------------------------------------------------------------------------------


class RowEnds(NamedTuple):
    """The keys of a thread's two rows in a tile.

    ``i`` are the rows, ``column`` is the thread's first column. ``lower`` and ``upper`` are the first key that a row keeps and
    the first one past them, less that column; None means that there is no end. ``bias``: of the rows' scores.
    """

    batch: I32
    head: I32
    i: list
    column: I32
    lower: list | None
    upper: list
    bias: RowSlopes | RowLine | None = None


class KeyBlock(NamedTuple):
    """Key block n, for a thread's rows; ``partial``: whether some row may not see all of it; ``words``: the bits that then say which
    pairs are kept, where such bits do; ``border``: whether it begins a segment of keys behind which another one ended (None: n tells)."""

    ends: RowEnds
    n: I32
    partial: bool
    words: list | None = None
    border: bool | None = None

    def bias(self, operands: ForwardOperands, config: Config) -> BlockSlopes | BlockLine | pair_bias.BlockBias | None:
        """The bias in this block, that of pairs as it was read last; None without."""
        if config.score == "bias":
            return pair_bias.block_bias(operands.bias, operands.s, config.dtype)
        return self.ends.bias.within(self.n * config.tiles.tile_n) if config.biased else None


def row_ends(query_tile: QueryTile, row, thread, band: schedule.Band, params: ForwardParams, config: Config) -> RowEnds:
    """The ends of a thread's rows in the warpgroup whose first query is ``row``."""
    rows, start = [row + row_of(thread, r) for r in range(2)], column_of(thread, 0)
    upper = [schedule.row_stop(i, band, PICK) - start for i in rows]
    lower = [schedule.row_start(i, band, PICK) - start for i in rows] if config.has_lower else None
    bias = None
    if config.score == "alibi":
        # The band ends with a row's own place: the last key that it may see is at distance 0.
        slope2 = params.extra.slopes[query_tile.head] * softmax.LOG2_E
        bias = RowSlopes(slope2, [F32(i + band.hi - 1 - start) for i in rows])
    if config.score == "table":
        line = line_of_head(params.extra.line, query_tile.head)
        ends = [line[cute.size(line) - 1], *([line[0]] if config.form == "full" else [])]
        bias = RowLine(line, rows[0] - start - params.extra.start, ends)
    return RowEnds(query_tile.batch, query_tile.head, rows, start, lower, upper, bias)


def first_block(
    operands: ForwardOperands, state: PipelineState, block: KeyBlock, smem: ForwardStorage, params: ForwardParams,
    config: Config,
) -> PipelineState:  # fmt: skip
    """P of a tile's first block, of which S has begun; the next block multiplies it by V. Returns the state after K."""
    masks = dropout_masks(block, smem, params, config)
    read_bias(operands, config)
    block = with_words(block, state, smem, config)
    warpgroup.wait_group(0)  # S
    release_scores(state, smem, config)
    s = masked_scores(operands, block, params, config)
    softmax.online_softmax(
        s, operands.rows, left_scale(params, config), first=True, masked=True, lazy=softmax.lazy_of(config.tiles)
    )
    release_bias(operands, config)
    round_p(operands, config)
    dropout.drop(operands.p, masks)
    return state.advance(config.tiles.stages)


def key_block(
    operands: ForwardOperands, n_q, state: PipelineState, block: KeyBlock, smem: ForwardStorage, params: ForwardParams,
    config: Config,
) -> PipelineState:  # fmt: skip
    """S and P of this block, and O += P V of the block before, which runs under the softmax. Returns the state after both."""
    tiles, masked = config.tiles, may_be_empty(block, config)
    k_state, v_state = both_products(operands, n_q, state, smem, config)
    masks = dropout_masks(block, smem, params, config)  # under both products
    read_bias(operands, config)
    block = with_words(block, k_state, smem, config)
    warpgroup.wait_group(tiles.v_stages)  # S; O may still be under way
    release_scores(k_state, smem, config)
    s = masked_scores(operands, block, params, config)
    joins = bool(tiles.segment) and block.border is not False
    if joins:
        segments.end_rows(operands.segments, operands.rows, block, config)
    # P = exp(S - m), 64 × tile_n, unnormalised
    softmax.online_softmax(
        s, operands.rows, left_scale(params, config), first=False, masked=masked, lazy=softmax.lazy_of(config.tiles)
    )
    softmax.hold_exponentials(smem.unread, operands.rows)
    release_bias(operands, config)
    warpgroup.wait_group(0)  # O += P V
    staged_blocks.release_values(v_state, smem, config)  # V of the block before
    if joins:
        round_p(operands, config)  # the registers of S are free for the segments that wait
        segments.end_segment(operands.segments, operands.o, block, config)
    softmax.rescale(operands.o, operands.rows.factor, tiles.lazy)
    if not joins:
        round_p(operands, config)
    dropout.drop(operands.p, masks)
    return v_state.advance(tiles.stages, tiles.v_stages)


def may_be_empty(block: KeyBlock, config: Config) -> bool:
    """Whether a row may be without a key so far; at the beginning of a segment it is, as in the first block."""
    return block.partial or config.may_hide or bool(config.tiles.segment)


def steady_block(
    operands: ForwardOperands, n_q, state: PipelineState, block: KeyBlock, smem: ForwardStorage, params: ForwardParams,
    config: Config,
) -> PipelineState:  # fmt: skip
    """:func:`key_block` for a whole block with the maxima of the blocks before; if these do not serve, once more with its own.

    P V of the block before is done by then, so that a repetition costs S and a softmax that nothing runs under. K's stage is
    held until the answer is known.
    """
    state, v_state = both_products(operands, n_q, state, smem, config)
    masks = dropout_masks(block, smem, params, config)  # under both products
    read_bias(operands, config)
    warpgroup.wait_group(1)  # S; O may still be under way
    # A bias is taken off the maximum here, not added to S, which saves two instructions a pair; a softcap takes the maximum along.
    s = rows_columns(operands.s)
    capped = capped_by(operands, params, config) if config.score == "softcap" else None
    totals = softmax.steady_softmax(s, operands.rows, params.scale2, block.bias(operands, config), capped)
    most = softmax.most_of(config.tiles)
    served = both(totals[0] <= most, totals[1] <= most)
    if config.score == "bias":
        # Beside a maximum of -inf or the least number a bias says nothing: inf - inf, or beyond fp32.
        served = both(served, both(*[pair_bias.serves(operands.rows.m2[r]) for r in range(2)]))
    # All four warps answer, as they read S and P together; it holds the exponentials above the wait (softmax.hold_exponentials).
    served = all_agree(served, 1 + n_q // config.tiles.q_stages)
    warpgroup.wait_group(0)  # O += P V
    release(smem.empty + v_state.index)  # V of the block before: the loading warp
    for r in range(2):
        operands.rows.l[r] = operands.rows.l[r] + choose(served != 0, totals[r], 0.0)
    round_p(operands, config)
    once_more(served, operands, n_q, state.index, block, params, config)
    release_bias(operands, config)
    dropout.drop(operands.p, masks)
    release(smem.empty + state.index)  # K: the loading warp
    return v_state.advance(config.tiles.stages)


def capped_by(operands: ForwardOperands, params: ForwardParams, config: Config) -> softmax.Capped:
    """A softcap's numbers for a steady block."""
    levels = softmax.ShortTanh.of(params.extra.numbers) if config.short_tanh else None
    return softmax.Capped(params.cap2, config.softcap_columns, levels, operands.wait)


@cute.jit
def once_more(
    served, operands: ForwardOperands, n_q, k_stage, block: KeyBlock, params: ForwardParams, config: cutlass.Constexpr
):
    """P of a block for which the maxima of the blocks before were too small."""
    if served == 0:
        # S = Q Kᵀ, 64 × tile_n, fp32
        q, k = operands.q[None, None, None, n_q], operands.k[None, None, None, k_stage]
        begin_product(operands.qk, operands.s, q, k, overwrite=True)
        warpgroup.wait_group(0)
        s, lazy, masked = (
            masked_scores(operands, block, params, config),
            softmax.lazy_of(config.tiles),
            may_be_empty(block, config),
        )
        softmax.online_softmax(s, operands.rows, left_scale(params, config), first=False, masked=masked, lazy=lazy)
        softmax.rescale(operands.o, operands.rows.factor, lazy)
        round_p(operands, config)
        if cutlass.const_expr(config.short_tanh):
            operands.wait[0] = cutlass.max(operands.wait[0], softmax.first_wait(operands.rows, params.scale2))


def both_products(
    operands: ForwardOperands, n_q, state: PipelineState, smem: ForwardStorage, config: Config
) -> tuple[PipelineState, PipelineState]:
    """Begins S of a block, then O += P V of the block before. Returns the states at K, and at V."""
    w = n_q // config.tiles.q_stages
    v_state = state.advance(config.tiles.stages, config.tiles.k_stages)
    staged_blocks.acquire_keys(smem, state, config)  # K: the loading warp
    pingpong_wait(w, config)
    state = staged_blocks.begin_scores(operands, n_q, state, smem, config)
    staged_blocks.begin_values(operands, v_state, smem, config)  # with P of the block before
    pingpong_signal(w, config)
    return state, v_state


# -- Scores --------------------------------------------------------------------------------------------------------


def masked_scores(operands: ForwardOperands, block: KeyBlock, params: ForwardParams, config: Config) -> cute.Tensor:
    """The accumulator of S as (2 rows, columns), capped or scored, and masked; with a bias or capped in base 2 (:func:`left_scale`)."""
    s, ends, first = rows_columns(operands.s), block.ends, block.n * config.tiles.tile_n
    pairs = expression.pairs_of(ends, first, params) if config.traced != PLAIN else None
    if config.score == "softcap":
        softmax.softcap(s, params.cap2, params.scale2, config.softcap_columns)
    if config.biased:
        block.bias(operands, config).add(s, params.scale2)
    if config.traced.score:
        expression.scored(s, config.traced.score, params.score_scale, pairs)
    if config.selected:
        hide_others(s, block.words)
    elif block.partial and block.words is not None:
        bits.hide(s, block.words)
    elif block.partial:

        def within_block(limits: list | None) -> list | None:
            return None if limits is None else [end - first for end in limits]

        softmax.mask_scores(s, within_block(ends.lower), within_block(ends.upper))
    return s


def with_words(block: KeyBlock, state: PipelineState, smem: ForwardStorage, config: Config) -> KeyBlock:
    """The block with the bits of its keys, where each query has a list of these."""
    if not config.selected:
        return block
    return block._replace(words=get_words(smem.words + WORDS * state.index, 2 * WORDS))


def release_scores(state: PipelineState, smem: ForwardStorage, config: Config) -> None:
    """Gives back the K of a block whose S is there."""
    if config.selected:
        # The words have come: an arrival alone would wait for no load (docs/decisions.md#hopper-stage-release).
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
    release(smem.empty + state.index)  # K: the loading warp


def read_bias(operands: ForwardOperands, config: Config) -> None:
    """Reads the tile of a bias by pair that belongs to the block at hand."""
    # Before the wait for S: the reads run under both products, and take registers that P of the block before still needs if any later
    # block's tile were read here too.
    if config.score == "bias":
        pair_bias.read_tile(operands.bias, operands.pv)


def release_bias(operands: ForwardOperands, config: Config) -> None:
    """Gives back the tile of a bias by pair when its last number has been used."""
    # After the exponentials, not after the reads: by then their results have come, and no instruction has to wait for them.
    if config.score == "bias":
        pair_bias.release_tile(operands.bias, config.tiles.bias_stages)


def left_scale(params: ForwardParams, config: Config):
    """The factor that takes :func:`masked_scores` to base 2."""
    # A bias is added where S is scaled already, because it is known in base 2; a softcap's last factor is this one.
    return F32(1.0) if config.score else params.scale2


def dropout_masks(block: KeyBlock, smem: ForwardStorage, params: ForwardParams, config: Config) -> list:
    """The masks of P's words by which dropout drops pairs, made before the wait that follows; none without dropout.

    They are applied after the row sums, which dropout leaves alone.
    """
    if not config.dropout:
        return []
    pairs = expression.pairs_of(block.ends, block.n * config.tiles.tile_n, params)
    masks = dropout.masks_of(pairs, config.tiles.tile_n // 4, params)
    keep_words_above(smem.unread, masks)
    return masks


def round_p(operands: ForwardOperands, config: Config) -> None:
    """Rounds the exponentials into P: the same registers in the same order, no shuffle."""
    p, s = operands.p, operands.s
    words = cute.recast_tensor(cute.make_tensor(p.iterator, cute.make_layout(cute.size(p))), I32)
    values = cute.make_tensor(s.iterator, cute.make_layout(cute.size(s)))
    for n in range(cute.size(words)):
        words[n] = pack(values[2 * n], values[2 * n + 1], config.dtype)
