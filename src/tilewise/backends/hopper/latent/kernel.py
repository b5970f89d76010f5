"""O = softmax(scale · Q Kᵀ) V over pages where V is the first 512 of K's 576 columns (DeepSeek-V2, section 2.1), on Hopper (sm_90a).

A CTA has 64 rows, each a head of a query, and one split of their keys, in tiles of 64. A key tile lies in shared memory once: by
rows it is K, and the same bytes by columns are V. O has 64 x 512 numbers in fp32, half of them in each of two warpgroups::

    2 warpgroups score    S = Q Kᵀ of every other key tile, P into the place of its rotary columns, the next tile   scores.py
    2 warpgroups value    Q once; O += P V, 64 x 256; the output                                                    values.py

A key tile comes in five parts, which are used and become free one by one: the 64 rotary columns, and 128 columns for each product with
V. Each mbarrier is waited for by the other side (arrivals in brackets): of each part of each stage ``full`` goes from the copy engine (1 +
bytes), or from the score group that converts e4m3 numbers or gathers rows (128), to score and value, ``empty`` (4 warps, of the rotary
columns 8) value -> score. ``q_full`` (256) goes value -> score, of each stage ``p_full`` (128) score -> value and ``m_full`` (128) to the
other score group, ``end`` (256) score -> value.

The tensor cores take 1152 clocks for S of a tile and 1024 for P V, and shared memory is read and written for 2413 at 128 bytes a clock.
Softmax of a tile runs under the products of other tiles. Where one CTA a tile would leave SMs idle, two of a cluster share its keys
(pair.py), or several pairs do, whose states a second kernel merges.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.forward import combine
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.params import by_name, optional_params
from tilewise.backends.hopper.latent.config import (
    BOXES,
    CHUNK,
    CHUNKS,
    COLUMNS,
    KEYS,
    PAIR,
    STAGES,
    LatentConfig,
)
from tilewise.backends.hopper.latent.params import KeyMaps, LatentParams
from tilewise.backends.hopper.latent.scores import compute_scores
from tilewise.backends.hopper.latent.storage import ELEMENTS, allocate, init_barriers, swizzle_of
from tilewise.backends.hopper.latent.tiles import tile_of
from tilewise.backends.hopper.latent.values import compute_values

# -- Launch --------------------------------------------------------------------------------------------------------


def key_map(pool: cute.Tensor, count: int, config: LatentConfig) -> cpasync.TmaInfo:
    """The descriptor that brings ``count`` chunks of 64 columns of a key tile in one box."""
    (pages, rows, heads, _), (by_page, by_row, by_head, _) = pool.shape, pool.stride
    shape, stride = (rows, (CHUNK, CHUNKS), heads, pages), (by_row, (1, CHUNK), by_head, by_page)
    view = cute.make_tensor(pool.iterator, cute.make_layout(shape, stride=stride))
    layout = cute.make_layout(((8, 8), (CHUNK, count)), stride=((CHUNK, 8 * CHUNK), (1, ELEMENTS)))
    tile = cute.make_composed_layout(swizzle_of(ELEMENT[config.dtype]), 0, layout)
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, tile, (KEYS, (CHUNK, count)))


@cute.jit
def launch(
    q: cute.Tensor, k: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, sink: cute.Tensor, extra: tuple, numbers: tuple,
    stream: cuda.CUstream, config: cutlass.Constexpr,
):  # fmt: skip
    """Launches the forward of the values of :func:`tilewise.backends.hopper.latent.parameters.parameters`."""
    element, major = ELEMENT[config.dtype], OperandMajorMode
    # S = Q Kᵀ, 64 × 64, both from shared memory; O += P V, 64 × 128, P from registers.
    qk, held = (
        sm90.make_trivial_tiled_mma(element, element, major.K, major.K, F32, (1, 1, 1), (ROWS, KEYS), source)
        for source in (warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM)
    )
    pv = sm90.make_trivial_tiled_mma(
        element, element, major.K, major.MN, F32, (1, 1, 1), (ROWS, COLUMNS), warpgroup.OperandSource.RMEM
    )
    *_, tensors, scalars = config.parameters
    given = by_name((*tensors, *scalars), (*extra, *numbers))
    tiles, splits = given.pop("tiles"), given.pop("splits")
    own = {name: given.pop(name) for name in LatentParams._fields if name in given}
    optional = optional_params(given)
    group = q.shape[2] // k.shape[2]
    params = LatentParams(
        q.shape[1], (k.shape[1] + KEYS - 1) // KEYS * KEYS, k.shape[2], group, q=q, o=o, lse=lse, sink=sink,
        extra=optional, pool=k if config.by_threads else None, **own,
    )  # fmt: skip
    kernel.set_name_prefix(config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    maps = (None, None) if config.by_threads else tuple(key_map(k, len(part), config) for part in (BOXES[1], BOXES[0]))
    kernel(*maps, qk, held, pv, params, config).launch(
        grid=[tiles, splits, 1],
        block=[config.tiles.threads, 1, 1],
        cluster=[1, PAIR, 1] if config.pair else None,
        min_blocks_per_mp=1,
        stream=stream,
    )
    if cutlass.const_expr(config.split):
        # The sinks are in the states.
        combine.launch(optional.part_o, optional.part_lse, o, lse, sink, I32(0), stream, config)


# -- Kernel --------------------------------------------------------------------------------------------------------


@cute.kernel
def kernel(
    latent: cpasync.TmaInfo | None, rotary: cpasync.TmaInfo | None, qk: cute.TiledMma, held: cute.TiledMma,
    pv: cute.TiledMma, params: LatentParams, config: cutlass.Constexpr,
):  # fmt: skip
    """One CTA: every warp finds its role and keeps it."""
    group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
    smem = allocate(config)
    init_barriers(smem, config)
    if cutlass.const_expr(config.split):
        cute.arch.griddepcontrol_launch_dependents()  # the merge may be set up; it waits for this kernel's end
    if group < STAGES:
        cute.arch.setmaxregister_decrease(config.tiles.registers_score)
        compute_scores(KeyMaps(latent, rotary), smem, group, (qk, held), tile_of(params, config), params, config)
    else:
        cute.arch.setmaxregister_increase(config.tiles.registers)
        compute_values(smem, group - STAGES, pv, tile_of(params, config), params, config)
