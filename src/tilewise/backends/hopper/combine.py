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
STEP = 32  # columns that a warp takes at once: one a lane
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
def largest(part_lse: cute.Tensor, sink):
    """``m`` of a row, 0 where nothing counts. In base e as its terms: what is subtracted before a product with log2 e, and
    added after one with ln 2, keeps lse within a rounding."""
    m = sink
    for c in cutlass.range(cute.size(part_lse), unroll=AHEAD):
        m = cute.arch.fmax(m, part_lse[c])
    return tile.choose(m == -tile.INF, 0.0, m)


def exponential(x):
    return cute.math.exp2(x * tile.LOG2_E, fastmath=True)


def ahead(part_o: cute.Tensor, part_lse: cute.Tensor, first, columns: list) -> list:
    """``(o, lse)`` of AHEAD chunks, whose loads so are on their way together; of chunks past the last, lse is -inf."""
    count, found = cute.size(part_lse), []
    for n in range(AHEAD):
        c = cutlass.min(first + n, count - 1)
        lse = tile.choose(first + n < count, part_lse[c], -tile.INF)
        found.append(([part_o[c, column] for column in columns], lse))
    return found


@cute.jit
def merge(part_o: cute.Tensor, part_lse: cute.Tensor, sink, column, width: cutlass.Constexpr):
    """A lane's columns ``column + STEP n``, and the row's lse."""
    m = largest(part_lse, sink)
    extra, total = exponential(sink - m), F32(0.0)
    sums = cute.make_rmem_tensor((width // STEP,), F32)
    sums.fill(0.0)
    for first in cutlass.range(0, cute.size(part_lse), AHEAD, unroll=1):
        for o, lse in ahead(part_o, part_lse, first, [column + STEP * n for n in range(width // STEP)]):
            weight = exponential(lse - m)
            total = total + weight
            for n in cutlass.range_constexpr(width // STEP):
                sums[n] = sums[n] + weight * o[n]
    keyless, total = total == 0.0, total + extra
    factor = tile.choose(total == 0.0, 0.0, cute.arch.rcp_approx(total))
    for n in cutlass.range_constexpr(cute.size(sums)):
        sums[n] = sums[n] * factor
    return sums, tile.choose(keyless, sink, m + cute.math.log2(total, fastmath=True) * tile.LN_2)


@cute.jit
def put(o: cute.Tensor, lse: cute.Tensor, sums: cute.Tensor, statistic, column):
    """A row's lse by one lane, and each lane's columns of O as far as there are such."""
    if column == 0:
        lse[0] = statistic
    for n in cutlass.range_constexpr(cute.size(sums)):
        if column + STEP * n < cute.size(o):
            o[column + STEP * n] = sums[n].to(o.element_type)


@cute.kernel
def kernel(t: Merge, x: cutlass.Constexpr):
    cute.arch.griddepcontrol_wait()  # the states are there when the kernel before has ended
    thread = cute.arch.thread_idx()[0]
    n = cute.arch.block_idx()[0] * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
    batch, heads, rows = t.lse.shape
    if n < batch * heads * rows:
        i, head, b = n % rows, n // rows % heads, n // rows // heads
        sink = tile.choose(t.sinks != 0, t.sink[head], -tile.INF)
        column = thread % 32
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
