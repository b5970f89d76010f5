"""The states of splits of keys, merged (docs/algorithm.md, (8) and (18)): one warp a row, four where it has more than 256 columns.

``m = max(max_c lse_c, sink)``, ``w_c = exp(lse_c - m)``, ``o = sum_c w_c o_c / l`` and ``lse = m + log l`` with
``l = sum_c w_c + exp(sink - m)``; a split without keys has ``lse_c = -inf`` and weighs nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.kit.dtypes import F32, I32
from tilewise.backends.hopper.kit.instructions import choose
from tilewise.backends.hopper.kit.softmax import INF, LN_2, LOG2_E

WARPS = 4  # of a CTA
STEP = 32  # columns that a warp takes at once: one a lane
# Splits whose loads are on their way together: where one tile holds the queries, or several warps share a row, and where several tiles do.
AHEAD_FEW_ROWS, AHEAD_MANY_ROWS = 8, 4


def warps_of_row(config) -> int:
    """How many warps share out the columns of a row."""
    return 4 if config.tiles.width_v > 256 else 1


def part_of(n, config) -> tuple:
    """``(row, first column)`` of the n-th warp."""
    warps = warps_of_row(config)
    return (n // warps, n % warps * (config.tiles.width_v // warps)) if warps > 1 else (n, 0)


class Merge(NamedTuple):
    """``part_o`` (split, batch, head, row, width_v), ``part_lse`` (split, batch, head, row), ``o`` (batch, row, head, D),
    ``lse`` (batch, head, row); ``sinks``: whether ``sink`` (head,) counts, else it is not read."""

    part_o: cute.Tensor
    part_lse: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor
    sink: cute.Tensor
    sinks: I32


def over_warp(value, combine):
    for offset in (16, 8, 4, 2, 1):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


def exponential(value):
    return cute.math.exp2(value * LOG2_E, fastmath=True)


def weights(part_lse: cute.Tensor, sink, lane):
    """``(w, l, m)`` of a row, without the sink's part of l, and w of the split that is the lane's: there are at most 32. ``m`` is
    0 where nothing counts. In base e as its terms: what is subtracted before a product with log2 e, and added after one
    with ln 2, keeps lse within a rounding."""
    # One lane a split: its lse, and -inf in lanes without a split.
    count = cute.size(part_lse)
    lse = choose(lane < count, part_lse[cutlass.min(lane, count - 1)], -INF)
    m = cute.arch.fmax(over_warp(lse, cute.arch.fmax), sink)
    m = choose(m == -INF, 0.0, m)
    weight = exponential(lse - m)
    return weight, over_warp(weight, lambda x, y: x + y), m


def ahead(part_o: cute.Tensor, first, columns: list, together: int) -> list:
    """o of some splits, whose loads so are on their way together; of splits past the last, the last one's."""
    count = cute.size(part_o, mode=[0])
    return [[part_o[cutlass.min(first + n, count - 1), column] for column in columns] for n in range(together)]


def add(sums: cute.Tensor, states: list, weight, first) -> None:
    """Splits from the ``first`` on; past the last, where a lane has none, a weight is 0."""
    for n, o in enumerate(states):
        # Lane n holds the weight of split n; all lanes need it.
        w = cute.arch.shuffle_sync(weight, first + n)
        for c, value in enumerate(o):
            sums[c] = sums[c] + w * value


@cute.jit
def merge(part_o: cute.Tensor, part_lse: cute.Tensor, sink, column, config: cutlass.Constexpr):
    """A lane's columns ``column + STEP n``, and the row's lse."""
    warps = warps_of_row(config)
    together = AHEAD_FEW_ROWS if config.tiles.warpgroups == 1 or warps > 1 else AHEAD_MANY_ROWS
    columns = [column + STEP * n for n in range(config.tiles.width_v // warps // STEP)]
    sums = cute.make_rmem_tensor((len(columns),), F32)
    sums.fill(0.0)
    states = ahead(part_o, 0, columns, together)  # on their way while the weights are made
    weight, total, m = weights(part_lse, sink, column % 32 if warps > 1 else column)
    add(sums, states, weight, 0)
    for first in cutlass.range(together, cute.size(part_lse), together, unroll=1):
        add(sums, ahead(part_o, first, columns, together), weight, first)
    keyless, total = total == 0.0, total + exponential(sink - m)
    # A row with neither a key nor a sink: every w is 0, and o must be 0 instead of 0 / 0.
    factor = choose(total == 0.0, 0.0, cute.arch.rcp_approx(total))
    for n in cutlass.range_constexpr(cute.size(sums)):
        sums[n] = sums[n] * factor
    return sums, choose(keyless, sink, m + cute.math.log2(total, fastmath=True) * LN_2)


@cute.jit
def put(o: cute.Tensor, lse: cute.Tensor, sums: cute.Tensor, statistic, column):
    """A row's lse by one lane, and each lane's columns of O as far as there are such."""
    if column == 0:
        lse[0] = statistic
    for n in cutlass.range_constexpr(cute.size(sums)):
        if column + STEP * n < cute.size(o):
            o[column + STEP * n] = sums[n].to(o.element_type)


@cute.kernel
def kernel(params: Merge, config: cutlass.Constexpr):
    cute.arch.griddepcontrol_wait()  # the states are there when the kernel before has ended
    thread = cute.arch.thread_idx()[0]
    n = cute.arch.block_idx()[0] * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
    batch, heads, rows = params.lse.shape
    n, first = part_of(n, config)
    if n < batch * heads * rows:
        i, head, b = n % rows, n // rows % heads, n // rows // heads
        sink = choose(params.sinks != 0, params.sink[head], -INF)
        column = thread % 32
        if cutlass.const_expr(warps_of_row(config) > 1):
            column = column + first
        part_o, part_lse = params.part_o[None, b, head, i, None], params.part_lse[None, b, head, i]
        sums, statistic = merge(part_o, part_lse, sink, column, config)
        put(params.o[b, i, head, None], cute.domain_offset((i,), params.lse[b, head, None]), sums, statistic, column)


@cute.jit
def launch(
    part_o: cute.Tensor, part_lse: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, sink: cute.Tensor, sinks,
    stream: cuda.CUstream, config: cutlass.Constexpr,
):  # fmt: skip
    """After the kernel that writes the states, in the same stream; it may begin while that one ends."""
    kernel.set_name_prefix(f"{config.name}_combine", remove_cutlass_symbol=True, keep_mangled_name=False)
    rows = cute.size(lse) * warps_of_row(config)
    kernel(Merge(part_o, part_lse, o, lse, sink, sinks), config).launch(
        grid=[(rows + WARPS - 1) // WARPS, 1, 1], block=[32 * WARPS, 1, 1], stream=stream, use_pdl=True
    )
