"""What the backward needs of each query row before its passes, on Hopper (sm_90a); docs/algorithm.md, (13).

    delta_i = dO_i · O_i - dlse_i    lse2_i = log2(e) lse_i

A row that sees no key, and those that fill up the last block of a sequence, get lse2 = +inf, so that their P is 0, and
delta = 0. Bound by memory: O and dO are read once, 16 bytes a thread and row, ROWS_EACH rows at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper import backward_walk, packed, tile
from tilewise.backends.hopper.backward_config import LINES, Backward
from tilewise.backends.hopper.forward import ELEMENT, F32

VECTOR = 8  # elements that a thread reads at a time
THREADS = 256
ROWS_EACH = 4  # rows that a thread has in flight
INF = float("inf")


class Tensors(NamedTuple):
    """``o``, ``do`` (batch, seqlen_q, heads_q, Dv); ``lse``, ``dlse`` (batch, heads_q, seqlen_q); ``lse2``, ``delta`` the same
    with longer lines; ``cu`` (sequence + 1,): where packed sequences begin."""

    o: cute.Tensor
    do: cute.Tensor
    lse: cute.Tensor
    dlse: cute.Tensor
    lse2: cute.Tensor
    delta: cute.Tensor
    cu: cute.Tensor | None = None


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
    """A thread's part of row i of a head, (seqlen, Dv), in fp32; zeros past the end of either."""
    part = cute.make_rmem_tensor((VECTOR,), element)
    part.fill(0.0)
    read(t, i, lane, part)
    return part.load().to(F32)


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


@cute.jit
def write(t: Tensors, batch, head, row: Row, total):
    """lse2 and delta of a row, by one thread; ``total``: dO · O."""
    if row.line < t.lse2.shape[2]:
        lse2, delta = F32(INF), F32(0.0)
        if row.source < t.lse.shape[2]:
            lse = t.lse[batch, head, row.source]
            empty = lse == -INF
            lse2 = tile.choose(empty, INF, lse * tile.LOG2_E)
            delta = tile.choose(empty, 0.0, total - t.dlse[batch, head, row.source])
        t.lse2[batch, head, row.line] = lse2
        t.delta[batch, head, row.line] = delta


@cute.kernel
def kernel(t: Tensors, x: cutlass.Constexpr):
    """Grid: blocks of rows, of all heads and batch elements one after the other."""
    lanes, element = lanes_of(x.keys.width_v), ELEMENT[x.dtype]
    heads, blocks = t.lse.shape[1], cute.ceil_div(t.lse2.shape[2], rows_of(x.keys.width_v))
    n = cute.arch.block_idx()[0]
    block, head, batch = n % blocks, n // blocks % heads, n // blocks // heads
    thread = cute.arch.thread_idx()[0]
    lane, first = thread % lanes, block * rows_of(x.keys.width_v) + thread // lanes
    rows = rows_at([first + n * (THREADS // lanes) for n in range(ROWS_EACH)], t, x)
    o, do = (part[batch, None, head, None] for part in (t.o, t.do))
    parts = [part_of(o, row.source, lane, element) * part_of(do, row.source, lane, element) for row in rows]
    for row, part in zip(rows, parts, strict=True):
        total = part.reduce(cute.ReductionOp.ADD, F32(0.0), 0)
        for offset in [1 << n for n in range((lanes - 1).bit_length())]:
            total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
        by_first(t, batch, head, row, lane, total)


@cute.jit
def by_first(t: Tensors, batch, head, row: Row, lane, total):
    if lane == 0:
        write(t, batch, head, row, total)


def launch(t: Tensors, stream, x: Backward) -> None:
    """Within a traced function of the host's."""
    kernel.set_name_prefix(f"{x.name}_rows", remove_cutlass_symbol=True, keep_mangled_name=False)
    blocks = cute.ceil_div(t.lse2.shape[2], rows_of(x.keys.width_v))
    grid = [blocks * t.lse.shape[1] * t.lse.shape[0], 1, 1]
    kernel(t, x).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)
