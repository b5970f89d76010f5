"""The score groups of latent attention: ``S = Q Kᵀ`` (64 × 64) of a key tile, and P, which they leave in shared memory.

Each of the two groups takes every other key tile, so that the softmax of one runs under the products of the other. The maximum of a
row goes on from tile to tile: each group takes it from the other one.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.kit import softmax
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.instructions import choose, meet, pack
from tilewise.backends.hopper.kit.lists import hide_others
from tilewise.backends.hopper.kit.tiles import rows_columns
from tilewise.backends.hopper.latent.config import BOXES, CHUNK, CHUNKS, KEYS, STAGES, LatentConfig
from tilewise.backends.hopper.latent.convert import anew, prefetch_tile, scale_of
from tilewise.backends.hopper.latent.load import bring_tile, page_of
from tilewise.backends.hopper.latent.params import KeyMaps, LatentParams
from tilewise.backends.hopper.latent.storage import (
    LatentStorage,
    get_pair_of,
    get_q,
    part_of,
    put_p,
    put_pair_of,
    stage_of,
)
from tilewise.backends.hopper.latent.tiles import LatentTile, is_partial, row_ends


class ScoreOperands(NamedTuple):
    """The atom, shared operands and registers of a score group.

    Attributes:
        qk: the atom of ``S = Q Kᵀ``. q, k: shared operands (1, 1, k step, chunk).
        held: the atom with Q in registers. rotary: 64 × 64 of Q in registers, its rotary columns; None over a cache of e4m3 numbers.
        kept: of selected keys, a bit for each one of the group's next tile.
        s: the accumulator, 64 × 64, fp32. rows: the softmax state of the thread's two rows.
    """

    qk: cute.TiledMma
    held: cute.TiledMma
    q: cute.Tensor
    rotary: cute.Tensor | None
    kept: cute.Tensor | None
    k: cute.Tensor
    s: cute.Tensor
    rows: softmax.SoftmaxState


def new_operands(qk: tuple, smem: LatentStorage, config: LatentConfig) -> ScoreOperands:
    """The operands of a score group; the accumulator holds nothing yet."""
    qk, held = qk
    mine = qk.get_slice(0)
    rotary = (
        None if config.e4m3 else cute.make_rmem_tensor(held.partition_shape_A((ROWS, CHUNK)), ELEMENT[config.dtype])
    )
    return ScoreOperands(
        qk,
        held,
        qk.make_fragment_A(mine.partition_A(smem.q)),  # Q, 64 × 64, of each chunk
        rotary,
        cute.make_rmem_tensor((2,), I32) if config.selected else None,
        qk.make_fragment_B(mine.partition_B(smem.k)),  # K, 64 × 64, of each chunk of each stage
        cute.make_rmem_tensor(qk.partition_shape_C((ROWS, KEYS)), F32),  # S
        softmax.new_state(),
    )


@cute.jit
def compute_scores(
    maps: KeyMaps, smem: LatentStorage, g, qk: tuple, tile: LatentTile, params: LatentParams,
    config: cutlass.Constexpr,
):  # fmt: skip
    """Score group g brings the key tiles of stage g, computes P of each, and at last leaves its rows' maxima and sums.

    It has nothing else to do until its stage is free again, so that no other warp need bring the next tile.
    """
    operands = new_operands(qk, smem, config)
    operands.rows.m2.fill(-softmax.INF)
    operands.rows.l.fill(0.0)
    bring_tile(
        maps, smem, tile.first + g, page_of(tile.first + g, tile, params, config), operands.kept, tile, params, config
    )
    cute.arch.mbarrier_wait(smem.q_full, 0)  # the warpgroups of the values
    hold_rotary(operands, smem, config)
    for n in cutlass.range(tile.first + g, tile.last, STAGES, unroll=1):
        step = n - tile.first
        stage, phase = stage_of(step)
        page = page_of(n + STAGES, tile, params, config)  # of the next tile: on its way meanwhile
        for part in cutlass.range_constexpr(len(BOXES)):
            cute.arch.mbarrier_wait(smem.full + part_of(stage, part), phase)  # the copy engine
            if cutlass.const_expr(config.selected):
                cute.arch.fence_view_async_shared()  # what threads copied, wgmma reads by another path
            begin_scores(operands, part, anew(stage))
        if cutlass.const_expr(config.e4m3):
            prefetch_tile(n + STAGES, page, tile, params)
        warpgroup.wait_group(0)  # S
        if cutlass.const_expr(config.e4m3):
            scale = scale_of(params.k_scale, tile)
            softmax.scale_rows(rows_columns(operands.s), (scale, scale))
        if cutlass.const_expr(config.selected):
            hide_others(rows_columns(operands.s), [operands.kept[0], operands.kept[1]])
        else:
            mask(operands, n, tile, params)
        take_maxima(operands.rows, smem, stage, step)
        # P = exp(S - m), 64 × 64, unnormalised
        s = rows_columns(operands.s)
        softmax.online_softmax(s, operands.rows, params.scale2, first=False, masked=True, lazy=softmax.LAZY)
        put_pair_of(smem.m, stage, operands.rows.m2)
        cute.arch.mbarrier_arrive(smem.m_full + stage)  # the other score group
        put_pair_of(smem.factor, stage, operands.rows.factor)
        put_p(smem, stage, round_p(operands, config))
        # TMA writes there next, by another path.
        cute.arch.fence_view_async_shared()
        cute.arch.mbarrier_arrive(smem.p_full + stage)  # the warpgroups of the values
        bring_tile(maps, smem, n + STAGES, page, operands.kept, tile, params, config)
    put_pair_of(smem.m, g, operands.rows.m2)
    put_pair_of(smem.l, g, operands.rows.l)
    cute.arch.mbarrier_arrive(smem.end)  # the warpgroups of the values
    if cutlass.const_expr(config.pair):
        # Partner: pair.merge_with_peer of the warpgroups of the values, in both CTAs: Q is read no more.
        meet()
        meet()


def hold_rotary(operands: ScoreOperands, smem: LatentStorage, config: LatentConfig) -> None:
    """Brings the rotary columns of Q to registers, for all key tiles: shared memory then gives half as much to their products."""
    if config.e4m3:  # its next numbers take these registers
        return
    words = cute.recast_tensor(
        cute.make_tensor(operands.rotary.iterator, cute.make_layout(cute.size(operands.rotary))), I32
    )
    for n, word in enumerate(get_q(smem)):
        words[n] = word


def begin_scores(operands: ScoreOperands, part: int, stage) -> None:
    """Begins the products of S with some chunks of columns; the first part's overwrite what was there."""
    held = operands.rotary is not None and part == 0
    atom = cute.make_mma_atom(operands.held.op if held else operands.qk.op)
    warpgroup.fence()
    # S (64 × 64, fp32) += Q (64 × 16) Kᵀ (16 × 64): 16 columns a step.
    for n, chunk in enumerate(BOXES[part]):
        for step in range(CHUNK // 16):
            atom.set(warpgroup.Field.ACCUMULATE, part + n + step > 0)
            q = operands.rotary[None, None, step] if held else operands.q[None, None, step, chunk]
            k = operands.k[None, None, step, CHUNKS * stage + chunk]
            cute.gemm(atom, operands.s, q, k, operands.s)
    warpgroup.commit_group()


@cute.jit
def mask(operands: ScoreOperands, n, tile: LatentTile, params: LatentParams):
    """Hides the pairs of key tile n that the mask does not keep, and rows of shared memory that hold no key of this tile."""
    if is_partial(n, tile):
        ends = row_ends(n, tile, params)
        softmax.mask_scores(rows_columns(operands.s), ends.lower, ends.upper)


@cute.jit
def take_maxima(rows: softmax.SoftmaxState, smem: LatentStorage, stage, step):
    """Goes on from the maxima of the tile before, the other group's, and brings the thread's own sums up to these."""
    if step > 0:
        cute.arch.mbarrier_wait(smem.m_full + (1 - stage), (step - 1) // STAGES % 2)  # the other score group
        found = get_pair_of(smem.m, 1 - stage)
        for r in cutlass.range_constexpr(2):
            # A row without a key so far has no maximum, and its sum is 0.
            base = choose(found[r] == -softmax.INF, 0.0, found[r])
            rows.l[r] = rows.l[r] * cute.math.exp2(rows.m2[r] - base, fastmath=True)
            rows.m2[r] = found[r]


def round_p(operands: ScoreOperands, config: LatentConfig) -> list:
    """The exponentials of a thread, rounded, two in each word, in the order of its registers."""
    values = cute.make_tensor(operands.s.iterator, cute.make_layout(cute.size(operands.s)))
    return [pack(values[n], values[n + 1], config.dtype) for n in range(0, cute.size(values), 2)]
