"""What the backward needs of each query row before its passes, where no pass makes it, on Hopper (sm_90a); docs/algorithm.md, (13).

    delta_i = dO_i · O_i - dlse_i    lse2_i = log2(e) lse_i

A row that sees no key, and those that fill up the last block of a sequence, get lse2 = +inf, so that their P is 0, and
delta = 0. Where dQ is summed, its sums become 0, or, if that is in order, the counters of its additions. Bound by memory: O and dO are
read once, 16 bytes a thread and row, ROWS_EACH rows at a time, and while these are on their way zeros are written.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.backward import walk as backward_walk
from tilewise.backends.hopper.backward.config import KEY_GROUPS, LINES, Backward
from tilewise.backends.hopper.kit import packed, tile
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32

VECTOR = 8  # elements that a thread reads at a time
THREADS = 256
ROWS_EACH = 4  # rows that a thread has in flight; no more than threads have a row
INF = float("inf")


class Tensors(NamedTuple):
    """``o``, ``do`` (batch, seqlen_q, heads_q, Dv); ``lse``, ``dlse`` (batch, heads_q, seqlen_q); ``lse2``, ``delta`` the same
    with longer lines; ``cu`` (sequence + 1,): where packed sequences begin; ``sums`` (batch, heads_q, block, warpgroup, part), side
    by side; ``turns`` (batch, heads_q, block x warpgroup), fewer than the lines."""

    o: cute.Tensor | None
    do: cute.Tensor | None
    lse: cute.Tensor | None
    dlse: cute.Tensor | None
    lse2: cute.Tensor
    delta: cute.Tensor
    cu: cute.Tensor | None = None
    sums: cute.Tensor | None = None
    turns: cute.Tensor | None = None


class Row(NamedTuple):
    """A ``line`` of the statistics, and the row of O that it is of; one past the last: of none."""

    line: cutlass.Int32
    source: cutlass.Int32


def lanes_of(width_v: int) -> int:
    """Threads that read one row: a power of two."""
    return 1 << (width_v // VECTOR - 1).bit_length()


def rows_of(width_v: int) -> int:
    """Rows of a CTA."""
    return THREADS // lanes_of(width_v) * ROWS_EACH


def part_of(t: cute.Tensor, i, lane, element) -> cute.Tensor:
    """A thread's part of row i of a head, (seqlen, Dv), zeros past the end of either."""
    part = cute.make_rmem_tensor((VECTOR,), element)
    part.fill(0.0)
    read(t, i, lane, part)
    return part


def rows_at(lines: list, t: Tensors, x: Backward) -> list[Row]:
    """Of a thread's lines. Packed, all lines of a CTA are one sequence's."""
    if not x.packed:
        return [Row(line, line) for line in lines]
    total, count = t.o.shape[1], cute.size(t.cu)
    start_of = lambda n: backward_walk.first_line(n, t.cu, total, x)  # noqa: E731
    sequence = packed.holder(lines[0] // LINES, start_of, count)
    own, first = packed.rows_of(sequence, t.cu, total, rest=True), start_of(sequence) * LINES
    inside = lambda i: cutlass.select_(i < own.size, own.start + i, total)  # noqa: E731
    return [Row(line, inside(line - first)) for line in lines]


@cute.jit
def read(t: cute.Tensor, i, lane, part: cute.Tensor):
    if i < t.shape[0] and lane * VECTOR < t.shape[1]:
        cute.autovec_copy(cute.local_tile(t[i, None], (VECTOR,), (lane,)), part)


def held(t: Tensors, batch, head, row: Row) -> tuple:
    """lse and dlse of a row, or where there is none the last one's."""
    i = cutlass.min(row.source, t.lse.shape[2] - 1)
    return t.lse[batch, head, i], t.dlse[batch, head, i]


def made_of(lse, dlse, total, real) -> tuple:
    """lse2 and delta of a ``real`` row, or of one that fills up a block; ``total``: dO · O."""
    lse2, delta = tile.choose(lse == -INF, INF, lse * tile.LOG2_E), tile.choose(lse == -INF, 0.0, total - dlse)
    return tile.choose(real, lse2, INF), tile.choose(real, delta, 0.0)


@cute.kernel
def kernel(t: Tensors, x: cutlass.Constexpr):
    """Grid: blocks of rows of all batch elements, one after the other; heads. A thread has a part of ROWS_EACH rows, and of each
    row's threads the first of them one line of the statistics each, so that no row waits for another's."""
    cute.arch.griddepcontrol_wait()  # it may begin while what was launched before ends
    lanes, element = lanes_of(x.keys.width_v), ELEMENT[x.dtype]
    blocks, (n, head, _) = cute.ceil_div(t.lse2.shape[2], rows_of(x.keys.width_v)), cute.arch.block_idx()
    block, batch, thread = n % blocks, n // blocks, cute.arch.thread_idx()[0]
    lane, first, step = thread % lanes, block * rows_of(x.keys.width_v) + thread // lanes, THREADS // lanes
    mine = lane % ROWS_EACH
    *rows, own = rows_at([*(first + n * step for n in range(ROWS_EACH)), first + mine * step], t, x)
    lse, dlse = held(t, batch, head, own)
    o, do = (part[batch, None, head, None] for part in (t.o, t.do))
    parts = [[part_of(of, row.source, lane, element) for of in (o, do)] for row in rows]  # all on their way at once
    if cutlass.const_expr(x.keys.ordered):
        start_turns(t.turns[batch, head, None], block * THREADS + thread)
    elif cutlass.const_expr(x.keys.summed):
        clear(t.sums[batch, head, None, 0, None], block, blocks, x)
    total = F32(0.0)
    for n, (one, other) in enumerate(parts):
        found = (one.load().to(F32) * other.load().to(F32)).reduce(cute.ReductionOp.ADD, F32(0.0), 0)
        for offset in [1 << n for n in range((lanes - 1).bit_length())]:
            found = found + cute.arch.shuffle_sync_bfly(found, offset=offset)
        total = tile.choose(mine == n, found, total)
    put(t, batch, head, own.line, lane, *made_of(lse, dlse, total, own.source < t.lse.shape[2]))


@cute.jit
def start_turns(turns: cute.Tensor, n):
    if n < cute.size(turns):
        turns[n] = cutlass.Int32(0)


@cute.jit
def clear(sums: cute.Tensor, first, step, x: cutlass.Constexpr):
    """This CTA's of a head's blocks of dQ, (block, number)."""
    for n in cutlass.range(first, sums.shape[0], step, unroll=1):
        put_zeros(sums[n, None], x)


def put_zeros(block: cute.Tensor, x: Backward) -> None:
    zeros = cute.make_rmem_tensor((4, KEY_GROUPS * x.keys.part // (4 * THREADS)), F32)
    zeros.fill(0.0)
    target = cute.make_tensor(block.iterator, cute.make_layout((4, THREADS, zeros.shape[1])))
    cute.autovec_copy(zeros, target[None, cute.arch.thread_idx()[0], None])


@cute.jit
def put(t: Tensors, batch, head, line, lane, lse2, delta):
    if lane < ROWS_EACH and line < t.lse2.shape[2]:
        t.lse2[batch, head, line] = lse2
        t.delta[batch, head, line] = delta


def launch(t: Tensors, stream, x: Backward) -> None:
    """Within a traced function of the host's."""
    kernel.set_name_prefix(f"{x.name}_rows", remove_cutlass_symbol=True, keep_mangled_name=False)
    blocks = cute.ceil_div(t.lse2.shape[2], rows_of(x.keys.width_v))
    grid = [blocks * t.lse.shape[0], t.lse.shape[1], 1]
    kernel(t, x).launch(grid=grid, block=[THREADS, 1, 1], stream=stream, use_pdl=True)
