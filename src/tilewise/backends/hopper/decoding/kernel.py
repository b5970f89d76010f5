"""O = softmax(scale · q Kᵀ) V of a few queries a sequence, over pages or dense keys, on Hopper (sm_90a).

A CTA has a key head and an even share of all its key blocks, or segments of them, those of one sequence after those of another::

    1 warpgroup  computes  the rows of a group in a tile of 64; the output, or states and their merge   compute.py, merge.py
    1 warp       loads     K and V of block after block, across sequences                               load.py

Each mbarrier is waited for by the other side (arrivals in brackets). Of each stage ``full_k`` and ``full_v`` (1 + bytes) go load ->
compute, ``empty`` (4 warps) compute -> load. The loading warp waits for nothing else, so that the copy engine has as many blocks under way
as stages, at the end of a sequence too.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import LayoutEnum

from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.decoding.compute import compute
from tilewise.backends.hopper.decoding.config import THREADS
from tilewise.backends.hopper.decoding.load import load
from tilewise.backends.hopper.decoding.params import DecodingParams, PoolMaps
from tilewise.backends.hopper.decoding.storage import allocate, init_barriers
from tilewise.backends.hopper.forward.pages import paged_map
from tilewise.backends.hopper.kit import packed
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32
from tilewise.backends.hopper.kit.params import by_name, optional_params
from tilewise.backends.hopper.kit.tiles import staged_layout


@cute.jit
def launch(
    q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, sink: cute.Tensor, others: tuple,
    stream: cuda.CUstream, config: cutlass.Constexpr,
):  # fmt: skip
    """Launches the forward of the values of :func:`tilewise.backends.hopper.decoding.parameters.parameters`."""
    tiles, element, major = config.tiles, ELEMENT[config.dtype], OperandMajorMode
    given = by_name(config.parameters[-1], others)
    row, column = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
    k_shape, v_shape = (ROWS, tiles.tile_n, tiles.width), (ROWS, tiles.width, tiles.tile_n)
    layout_k = staged_layout(sm90.make_smem_layout_b(row, k_shape, element, 1), tiles.stages, tiles.block)
    layout_v = staged_layout(sm90.make_smem_layout_b(column, v_shape, element, 1), tiles.stages, tiles.block)
    # S = Q Kᵀ, 64 × tile_n; O += P V, 64 × width; Q and P from registers.
    rmem = warpgroup.OperandSource.RMEM
    qk = sm90.make_trivial_tiled_mma(element, element, major.K, major.K, F32, (1, 1, 1), (ROWS, tiles.tile_n), rmem)
    pv = sm90.make_trivial_tiled_mma(element, element, major.K, major.MN, F32, (1, 1, 1), (ROWS, tiles.width), rmem)
    heads_k = k.shape[2]
    own = {name: given.pop(name) for name in DecodingParams._fields if name in given}
    extra = optional_params(given)
    params = DecodingParams(
        k.shape[1], heads_k, q.shape[2] // heads_k, q.shape[0], q=q, o=o, lse=lse, sink=sink, extra=extra, **own
    )
    kernel.set_name_prefix(config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    kernel(
        paged_map(packed.ragged(k), layout_k, config, 0),
        paged_map(packed.ragged(v, columns_first=True), layout_v, config, 1),
        qk, pv, params, config,
    ).launch(
        grid=[params.shares * heads_k, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream
    )  # fmt: skip


@cute.kernel
def kernel(
    k: cpasync.TmaInfo, v: cpasync.TmaInfo, qk: cute.TiledMma, pv: cute.TiledMma, params: DecodingParams,
    config: cutlass.Constexpr,
):  # fmt: skip
    """One CTA: every warp finds its role and keeps it."""
    maps = PoolMaps(k, v)
    smem = allocate(maps, config)
    init_barriers(smem, config)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < 4:
        compute(smem, qk, pv, params, config)
    else:
        load(maps, smem, params, config)
