"""The states of chunks of keys, merged (docs/algorithm.md, equations 8 and 18): one warp a row.

``m = max(max_c lse_c, sink)``, ``w_c = exp(lse_c - m)``, ``o = sum_c w_c o_c / l`` and ``lse = m + log l`` with
``l = sum_c w_c + exp(sink - m)``; a chunk without keys has ``lse_c = -inf`` and weighs nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper import tile

F32, I32 = cutlass.Float32, cutlass.Int32
ELEMENT = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
WARPS = 4  # of a CTA
STEP = 64  # columns that a warp takes at once: two a lane
AHEAD = 8  # chunks whose loads are on their way together


class Merge(NamedTuple):
    """``part_o`` (chunk, batch, head, row, width_v), ``part_lse`` (chunk, batch, head, row), ``o`` (batch, row, head, D),
    ``lse`` (batch, head, row); ``sinks``: whether ``sink`` (head,) counts, else it is not read."""

    part_o: cute.Tensor
    part_lse: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor
    sink: cute.Tensor
    sinks: I32


@cute.jit
def weigh(part_lse: cute.Tensor, sink):
    """``(m2, l)`` of a row in base 2, from the lse of its chunks."""
    m2 = sink * tile.LOG2_E
    for c in cutlass.range(cute.size(part_lse), unroll=AHEAD):
        m2 = cute.arch.fmax(m2, part_lse[c] * tile.LOG2_E)
    return tile.choose(m2 == -tile.INF, 0.0, m2)


@cute.jit
def merge(part_o: cute.Tensor, part_lse: cute.Tensor, sink, column, width: cutlass.Constexpr):
    """A lane's columns ``column + STEP n`` and the next of each, and the row's lse.

    Columns past the last are the last two again.
    """
    m2 = weigh(part_lse, sink)
    total = cute.math.exp2(sink * tile.LOG2_E - m2, fastmath=True)
    sums = cute.make_rmem_tensor((2 * -(-width // STEP),), F32)
    sums.fill(0.0)
    for c in cutlass.range(cute.size(part_lse), unroll=AHEAD):
        weight = cute.math.exp2(part_lse[c] * tile.LOG2_E - m2, fastmath=True)
        total = total + weight
        for n in cutlass.range_constexpr(-(-width // STEP)):
            at = cutlass.min(column + STEP * n, width - 2)
            low, high = tile.get_pair(part_o, c, at)
            sums[2 * n], sums[2 * n + 1] = sums[2 * n] + weight * low, sums[2 * n + 1] + weight * high
    empty = total == 0.0
    factor = tile.choose(empty, 0.0, cute.arch.rcp_approx(total))
    for n in cutlass.range_constexpr(cute.size(sums)):
        sums[n] = sums[n] * factor
    return sums, tile.choose(empty, -tile.INF, (m2 + cute.math.log2(total, fastmath=True)) * tile.LN_2)


@cute.jit
def put(o: cute.Tensor, lse: cute.Tensor, sums: cute.Tensor, statistic, column):
    """A row's lse by one lane, and each lane's columns of O as far as there are such."""
    if column == 0:
        lse[0] = statistic
    for n in cutlass.range_constexpr(cute.size(sums) // 2):
        if column + STEP * n < cute.size(o):
            for m in cutlass.range_constexpr(2):
                o[column + STEP * n + m] = sums[2 * n + m].to(o.element_type)


@cute.kernel
def kernel(t: Merge, x: cutlass.Constexpr):
    cute.arch.griddepcontrol_wait()  # the states are there when the kernel before has ended
    thread = cute.arch.thread_idx()[0]
    n = cute.arch.block_idx()[0] * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
    batch, heads, rows = t.lse.shape
    if n < batch * heads * rows:
        i, head, b = n % rows, n // rows % heads, n // rows // heads
        sink = tile.choose(t.sinks != 0, t.sink[head], -tile.INF)
        column = thread % 32 * 2
        part_o, part_lse = t.part_o[None, b, head, i, None], t.part_lse[None, b, head, i]
        sums, statistic = merge(part_o, part_lse, sink, column, x.tiles.width_v)
        put(t.o[b, i, head, None], cute.domain_offset((i,), t.lse[b, head, None]), sums, statistic, column)


@cute.jit
def launch(
    part_o: cute.Tensor, part_lse: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, sink: cute.Tensor, sinks,
    stream: cuda.CUstream, x: cutlass.Constexpr,
):  # fmt: skip
    """After the kernel that writes the states, in the same stream; it may begin while that one ends."""
    kernel.set_name_prefix(f"{x.name}_combine", remove_cutlass_symbol=True, keep_mangled_name=False)
    rows = cute.size(lse)
    kernel(Merge(part_o, part_lse, o, lse, sink, sinks), x).launch(
        grid=[(rows + WARPS - 1) // WARPS, 1, 1], block=[32 * WARPS, 1, 1], stream=stream, use_pdl=True
    )
