"""O = softmax(scale · Q Kᵀ) V and its log-sum-exp on Hopper (sm_90a): the roles of a CTA, and the launch.

The roles of a CTA of ``1 + W`` warpgroups, persistent over tiles of ``64 W`` queries::

    warp 0       loads    Q tiles, and the key blocks from the last to the first: K0 K1 V0 K2 V1 .. Kn V(n-1) Vn   load.py
    warps 1..W   store    the tile of O of one warpgroup each                                                      load.py
    warpgroups   compute  S = Q Kᵀ in registers, softmax, O += P V; 64 rows each                   compute.py, epilogue.py

Each mbarrier is waited for by the other side (arrivals in brackets). The ring: ``full[stage]`` (1 + bytes) goes load ->
compute, ``empty[stage]`` (one of every computing warp) compute -> load. The tiles of Q and O: ``q_full`` (1 + bytes) goes
load -> compute, ``o_full`` (128) compute -> store, ``q_empty`` (1) store -> load. A tile of O takes the place of the tile of Q
that it came from. Tiles of a bias by pair: ``bias_full`` (1 + bytes) goes load -> compute, ``bias_empty`` (one of every warp of
the one warpgroup that reads it) compute -> load.

With one tile of Q, and with split keys, nobody stores: the computing warps write O to global memory themselves. ``q_empty``
(one of every warp of the warpgroup) then goes compute -> load as soon as the last scores are there, so that the next Q comes
under the end of a tile. A tile of split keys visits the keys of one split, and leaves a state in fp32, which
:mod:`tilewise.backends.hopper.forward.combine` merges. The tile that comes next of packed sequences, and of masks with bits,
is known to the loading warp alone: mailboxes that ``q_full`` and ``o_full`` guard tell the others, and at last that there is none.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import LayoutEnum

from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.forward import combine
from tilewise.backends.hopper.forward.compute import compute
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.gather import gather
from tilewise.backends.hopper.forward.load import load, store
from tilewise.backends.hopper.forward.pages import paged_map
from tilewise.backends.hopper.forward.params import ForwardParams, TensorMaps
from tilewise.backends.hopper.forward.storage import allocate, init_barriers
from tilewise.backends.hopper.kit import packed
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32
from tilewise.backends.hopper.kit.params import OptionalParams, by_name, optional_params
from tilewise.backends.hopper.kit.tiles import staged_layout

# -- Launch --------------------------------------------------------------------------------------------------------


class Views(NamedTuple):
    """The tensors with the modes that :class:`TensorMaps` describes."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor


def views_of(q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, config: Config) -> Views:
    """The tensors (batch, row, head, column) as the kernel's tiles cut them."""

    def view(tensor: cute.Tensor, modes: list) -> cute.Tensor:
        return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))

    # Rows first, as Q's, K's and O's tiles lie in memory; V is cut as (column, row), the B operand of P V.
    by_rows, by_columns = [1, 3, 2, 0], [3, 1, 2, 0]
    views = Views(view(q, by_rows), view(k, by_rows), view(v, by_columns), view(o, by_rows))
    # Ragged views end where a sequence ends, so that TMA drops rows past it.
    if cutlass.const_expr(config.packed):
        ragged_q, ragged_o, ragged_k = packed.ragged(q), packed.ragged(o), packed.ragged(k)
        views = Views(ragged_q, ragged_k, packed.ragged(v, columns_first=True), ragged_o)
    return views


def key_maps(views: Views, layout_k, layout_v, config: Config) -> tuple[cpasync.TmaInfo, cpasync.TmaInfo]:
    """The descriptors of K and V: boxes of whole blocks, or of the parts of blocks that lie in one page each."""
    tiles, bring = config.tiles, cpasync.CopyBulkTensorTileG2SOp()
    if config.paged:
        return paged_map(views.k, layout_k, config, 0), paged_map(views.v, layout_v, config, 1)
    return (
        cpasync.make_tiled_tma_atom(bring, views.k, layout_k, tiles.k_box),
        cpasync.make_tiled_tma_atom(bring, views.v, layout_v, tiles.v_box),
    )


def bias_map(bias: cute.Tensor, config: Config) -> cpasync.TmaInfo:
    """The descriptor of a bias by pair, (batch or 1, heads or 1, row, key): boxes of a warpgroup's rows and a block's keys."""
    tiles, element = config.tiles, ELEMENT[config.dtype]
    # A tile lies as an operand A does, whose columns are keys here: ldmatrix then brings it into the registers of S's accumulator.
    # Rows and keys outside the tensor arrive as zeros; the mask hides those keys, and nobody stores those rows.
    layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (ROWS, tiles.tile_n, tiles.tile_n), element, 1)
    layout = staged_layout(layout, tiles.bias_tiles, ROWS * tiles.tile_n)
    view = cute.make_tensor(bias.iterator, cute.select(bias.layout, mode=[2, 3, 1, 0]))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, layout, (ROWS, tiles.tile_n))


def optional_of(
    found: OptionalParams, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, config: Config
) -> OptionalParams:
    """What only some kernels have, with the tensors that they read and write without the copy engine."""
    found = found._replace(direct_o=None if config.stores or config.split else o, bias=None)
    return found._replace(rows_k=k, rows_v=v) if config.selected else found


@cute.jit
def launch(
    q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, sink: cute.Tensor, others: tuple,
    stream: cuda.CUstream, config: cutlass.Constexpr,
):  # fmt: skip
    """Launches the forward of the values of :func:`tilewise.backends.hopper.forward.parameters.parameters`. Packed sequences are one
    batch element; without sinks, their tensor is not read."""
    given, tiles, element = by_name(config.parameters[-1], others), config.tiles, ELEMENT[config.dtype]
    group = q.shape[2] // k.shape[2]
    views = views_of(q, k, v, o, config)
    row, column = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
    q_size, stage = tiles.q_elements, tiles.stage_elements
    # Shared memory: Q (64, width), K (tile_n, width), V (width_o, tile_n), O (64, width_o), each with a mode of tiles or stages.
    q_shape, k_shape, v_shape = (ROWS, tiles.tile_n, tiles.width), (ROWS, *tiles.k_box), (ROWS, *tiles.v_box)
    layout_q = staged_layout(sm90.make_smem_layout_a(row, q_shape, element, 1), tiles.q_tiles, q_size)
    layout_k = staged_layout(sm90.make_smem_layout_b(row, k_shape, element, 1), tiles.stages, stage)
    layout_v = staged_layout(sm90.make_smem_layout_b(column, v_shape, element, 1), tiles.stages, stage)
    layout_o = staged_layout(sm90.make_smem_layout_epi(element, row, (ROWS, tiles.width_o), 1), tiles.q_tiles, q_size)
    major = OperandMajorMode
    # S = Q Kᵀ, 64 × tile_n, both from shared memory; O += P V, 64 × width_o, P from registers.
    qk = sm90.make_trivial_tiled_mma(element, element, major.K, major.K, F32, (1, 1, 1), (ROWS, tiles.tile_n))
    pv = sm90.make_trivial_tiled_mma(
        element, element, major.K, major.MN, F32, (1, 1, 1), (ROWS, tiles.width_o), warpgroup.OperandSource.RMEM
    )
    bring, send, tma = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp(), cpasync.make_tiled_tma_atom
    optional = optional_params(given)
    lo, hi, sinks = given["band_lo"], given["band_hi"], given["sinks"]
    params = ForwardParams(
        q.shape[1], k.shape[1], q.shape[2], group, q.shape[0], given["section_heads"], lo, hi, sinks, given["scale2"], given["cap2"],
        optional_of(optional, k, v, o, config),
    )  # fmt: skip
    kernel.set_name_prefix(config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    kernel(
        tma(bring, views.q, layout_q, (ROWS, tiles.width)),
        *key_maps(views, layout_k, layout_v, config),
        tma(send, views.o, layout_o, (ROWS, tiles.width_o)),
        bias_map(optional.bias, config) if config.score == "bias" else None,
        lse, sink, qk, pv, params, config,
    ).launch(grid=[given["ctas"], 1, 1], block=[tiles.threads, 1, 1], min_blocks_per_mp=1, stream=stream)  # fmt: skip
    if cutlass.const_expr(config.split):
        combine.launch(params.extra.part_o, params.extra.part_lse, o, lse, sink, sinks, stream, config)


# -- Kernel --------------------------------------------------------------------------------------------------------


@cute.kernel
def kernel(
    q: cpasync.TmaInfo, k: cpasync.TmaInfo, v: cpasync.TmaInfo, o: cpasync.TmaInfo, bias: cpasync.TmaInfo | None,
    lse: cute.Tensor, sink: cute.Tensor, qk: cute.TiledMma, pv: cute.TiledMma, params: ForwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """One CTA: every warp finds its role and keeps it."""
    maps, tiles = TensorMaps(q, k, v, o, bias), config.tiles
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
    # Q, K, V and barriers; O takes Q's place at the end of a tile.
    smem = allocate(maps, config)
    init_barriers(smem, config)
    if cutlass.const_expr(config.split):
        cute.arch.griddepcontrol_launch_dependents()  # the merge may be set up; it waits for this kernel's end
    if group == 0:
        # Copies need few registers; the computing warpgroups hold S, P and O in theirs.
        cute.arch.setmaxregister_decrease(tiles.registers_load)
        if cutlass.const_expr(config.selected):
            gather(maps, smem, params, config)
        elif warp == 0:
            load(maps, smem, params, config)
        elif cutlass.const_expr(not config.stores):
            pass  # the computing warps store
        elif warp <= tiles.warpgroups:
            store(maps, smem, warp - 1, params, config)
    else:
        cute.arch.setmaxregister_increase(tiles.registers)
        compute(smem, group - 1, lse, sink, qk, pv, params, config)
