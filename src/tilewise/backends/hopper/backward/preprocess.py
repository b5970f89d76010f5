"""The statistics of every query row before the passes, on Hopper (sm_90a); docs/algorithm.md, (13).

    delta_i = dO_i · O_i - dlse_i    lse2_i = log2(e) lse_i

This kernel runs first where no pass makes the statistics itself. A row that sees no key, and the rows that fill up the last block of
a sequence, get lse2 = +inf, so that their P is 0, and delta = 0. Where dQ is accumulated, the kernel also clears its fp32 sums, unless
the first part is stored, and its semaphores, if it has any. It is bound by memory: O and dO are read once, 16 bytes a thread and row,
ROWS_EACH rows at a time, and zeros are written while these are on their way.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.backward import packed_plan
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.sequences import statistics_start
from tilewise.backends.hopper.backward.tiles import KEY_GROUPS, STATISTICS_ALIGNMENT
from tilewise.backends.hopper.kit import packed
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32
from tilewise.backends.hopper.kit.instructions import choose, pack, put_four, truncated
from tilewise.backends.hopper.kit.softmax import LOG2_E

VECTOR = 8  # elements that a thread reads at a time
THREADS = 256
ROWS_EACH = 4  # rows that a thread has in flight; at most as many as threads share a row
INF = float("inf")
MOST_LSE2 = 1e20  # base 2: P of a row without keys is 2**-MOST_LSE2 where products subtract lse


class StatisticsTensors(NamedTuple):
    """The tensors that the kernel reads and writes; a pass over queries that makes the statistics itself takes the same.

    Attributes:
        o, do: (batch, seqlen_q, heads_q, head_dim_v); read. None where a pass only reads the statistics.
        lse, dlse: (batch, heads_q, seqlen_q), fp32; read.
        lse2, delta: (batch, heads_q, statistics row), fp32; written.
        cu: (sequence + 1,), int32: where packed sequences begin.
        dq_sums: (batch, heads_q, block, warpgroup, part), fp32; set to zero, unless the first tile that comes stores its part.
        semaphores: (batch, heads_q, block x warpgroup), int32; set to zero. There are fewer than statistics rows.
        queue: (1,), int32: how many key tiles were taken after each CTA's first; set to zero.
        scale2: softmax_scale · log2(e), where products subtract the statistics. ``lse2`` then has four words a row, :func:`terms_of`.
        plan: of packed sequences, where there is one.
    """

    o: cute.Tensor | None
    do: cute.Tensor | None
    lse: cute.Tensor | None
    dlse: cute.Tensor | None
    lse2: cute.Tensor
    delta: cute.Tensor
    cu: cute.Tensor | None = None
    dq_sums: cute.Tensor | None = None
    semaphores: cute.Tensor | None = None
    queue: cute.Tensor | None = None
    scale2: F32 | None = None
    plan: packed_plan.PackedPlan | None = None

    def rows(self, config: Backward):
        """How many statistics rows a head has."""
        return (self.delta if config.subtracts else self.lse2).shape[2]


class StatisticsRow(NamedTuple):
    """A row of the statistics, and the row of O that it belongs to; past the last row of O it belongs to none."""

    row: cutlass.Int32
    source: cutlass.Int32


def lanes_of(width_v: int) -> int:
    """How many threads read one row: a power of two, and threads of one warp."""
    return min(32, 1 << (width_v // VECTOR - 1).bit_length())


def rows_of(width_v: int) -> int:
    """How many rows a CTA has."""
    return THREADS // lanes_of(width_v) * ROWS_EACH


# -- Launch and kernel ---------------------------------------------------------------------------------------------


def launch(t: StatisticsTensors, stream, config: Backward) -> None:
    """Launches the kernel, within a traced function of the host's."""
    kernel.set_name_prefix(f"{config.name}_rows", remove_cutlass_symbol=True, keep_mangled_name=False)
    blocks = cute.ceil_div(t.rows(config), rows_of(config.keys.dims[1]))
    if cutlass.const_expr(config.packs_sheet):
        # Launches share the heads, and the first one makes all statistics: later ones make a block's again, which nothing changes.
        blocks = cutlass.select_(t.plan.params.packed.portion == 0, blocks, 1)
    grid = [blocks * t.lse.shape[0], t.lse.shape[1], 1]
    kernel(t, config).launch(grid=grid, block=[THREADS, 1, 1], stream=stream, use_pdl=True)


@cute.kernel
def kernel(t: StatisticsTensors, config: cutlass.Constexpr):
    """Makes the statistics of a block of rows. Grid: (blocks of all batch elements, one after the other; heads).

    A thread reads a part of ROWS_EACH rows. The first threads of each row write one statistics row each, so that no row waits for
    another one's.
    """
    cute.arch.griddepcontrol_wait()  # this kernel may begin while the one before it in the stream ends
    lanes, element = lanes_of(config.keys.dims[1]), ELEMENT[config.dtype]
    rows_each_cta = rows_of(config.keys.dims[1])
    blocks, (n, head, _) = cute.ceil_div(t.rows(config), rows_each_cta), cute.arch.block_idx()
    block, batch, thread = n % blocks, n // blocks, cute.arch.thread_idx()[0]
    if cutlass.const_expr(config.planned):
        write_plan(t.plan, n + head, config)  # before registers hold what is on its way
    lane, first, step = thread % lanes, block * rows_each_cta + thread // lanes, THREADS // lanes
    mine = lane % ROWS_EACH
    # ROWS_EACH rows whose O and dO this thread reads, and the one whose statistics it writes.
    *rows, own = rows_at([*(first + n * step for n in range(ROWS_EACH)), first + mine * step], t, config)
    lse, dlse = lse_and_dlse(t, batch, head, own)
    o, do = (part[batch, None, head, None] for part in (t.o, t.do))
    # A thread's vectors of a row: one, or, where a row has more than a warp's, every 32nd.
    places = [lane, *range_from(lane, lanes, -(-config.keys.dims[1] // VECTOR))]
    # Loads of all rows are issued before any is used: (8,) of O and (8,) of dO for each row and vector.
    parts = [[[row_part(matrix, row.source, place, element) for matrix in (o, do)] for place in places] for row in rows]
    if cutlass.const_expr(config.stores_first or config.orders):
        clear_semaphores(t.semaphores[batch, head, None], block * THREADS + thread)
    if cutlass.const_expr(config.keys.sums_dq and not config.stores_first):
        clear_sums(t.dq_sums[batch, head, None, 0, None], block, blocks, config)
    if cutlass.const_expr(config.makes_queue):
        clear_queue(t.queue, n + head + thread)
    total = F32(0.0)
    for n, vectors in enumerate(parts):
        # delta = rowsum(dO ∘ O): 8 products a vector, then the sum over the row's threads.
        found, *more = (inner_product(one, other) for one, other in vectors)
        for part in more:
            found = found + part
        for offset in [1 << n for n in range((lanes - 1).bit_length())]:  # over the threads of the row
            found = found + cute.arch.shuffle_sync_bfly(found, offset=offset)
        total = choose(mine == n, found, total)
    found = statistics_of(lse, dlse, total, own.source < t.lse.shape[2], config)
    if cutlass.const_expr(config.subtracts):
        put_terms(t, batch, head, own.row, lane, *found, config)
    else:
        put(t, batch, head, own.row, lane, *found)


# -- Rows ----------------------------------------------------------------------------------------------------------


def rows_at(rows: list, t: StatisticsTensors, config: Backward) -> list[StatisticsRow]:
    """The rows of O that a thread's statistics rows belong to. All statistics rows of a CTA belong to one packed sequence."""
    if not config.packed:
        return [StatisticsRow(row, row) for row in rows]
    total, count = t.o.shape[1], cute.size(t.cu)

    def start_of(n):
        return statistics_start(n, t.cu, total, config)

    # The sequence whose statistics begin at or before the CTA's first row.
    sequence = packed.holder(rows[0] // STATISTICS_ALIGNMENT, start_of, count)
    span = packed.rows_of(sequence, t.cu, total, rest=True)
    first = start_of(sequence) * STATISTICS_ALIGNMENT

    def source_of(i):
        return cutlass.select_(i < span.size, span.start + i, total)

    return [StatisticsRow(row, source_of(row - first)) for row in rows]


def range_from(lane, lanes: int, vectors: int) -> list:
    """The vectors of a row that a thread reads after its first one."""
    return [lane + n for n in range(lanes, vectors, lanes)]


def inner_product(one: cute.Tensor, other: cute.Tensor):
    """The sum of products of two vectors, in fp32."""
    return (one.load().to(F32) * other.load().to(F32)).reduce(cute.ReductionOp.ADD, F32(0.0), 0)


def row_part(t: cute.Tensor, i, lane, element) -> cute.Tensor:
    """A thread's part (VECTOR,) of row i of a head, (seqlen, head_dim_v); zeros past the end of either."""
    part = cute.make_rmem_tensor((VECTOR,), element)
    part.fill(0.0)
    read(t, i, lane, part)
    return part


@cute.jit
def read(t: cute.Tensor, i, lane, part: cute.Tensor):
    """Reads 16 bytes of row i, unless they lie outside the matrix."""
    if i < t.shape[0] and lane * VECTOR < t.shape[1]:
        cute.autovec_copy(cute.local_tile(t[i, None], (VECTOR,), (lane,)), part)


def lse_and_dlse(t: StatisticsTensors, batch, head, row: StatisticsRow) -> tuple:
    """lse and dlse of a row, or of the last row where there is none."""
    i = cutlass.min(row.source, t.lse.shape[2] - 1)
    return t.lse[batch, head, i], t.dlse[batch, head, i]


def statistics_of(lse, dlse, total, real, config: Backward) -> tuple:
    """lse2 and delta of a ``real`` row, or of one that fills up a block; ``total`` is dO · O."""
    # A row without keys: lse2 = inf makes its P = 2**(s - inf) = 0, and delta 0 its dS = 0. So is one whose every bias is a number that
    # leaves fp32 in base 2.
    empty = (lse * LOG2_E if config.score == "bias" else lse) == -INF
    lse2, delta = choose(empty, INF, lse * LOG2_E), choose(empty, 0.0, total - dlse)
    return choose(real, lse2, INF), choose(real, delta, 0.0)


@cute.jit
def put(t: StatisticsTensors, batch, head, row, lane, lse2, delta):
    """The first ROWS_EACH threads of each row write one statistics row each."""
    if lane < ROWS_EACH and row < t.lse2.shape[2]:
        t.lse2[batch, head, row] = lse2
        t.delta[batch, head, row] = delta


@cute.jit
def put_terms(t: StatisticsTensors, batch, head, row, lane, lse2, delta, config: cutlass.Constexpr):
    """The first ROWS_EACH threads of each row write one row's four words each, and its delta as a number, which a sink's gradient
    reads."""
    if lane < ROWS_EACH and row < t.delta.shape[2]:
        t.delta[batch, head, row] = delta
        # 16 bytes a row: a bulk copy of a block's rows is an operand as it lies.
        put_four(t.lse2[batch, head, None].iterator + 4 * row, terms_of(lse2, delta, t.scale2, config.dtype))


def terms_of(lse2, delta, scale2, dtype: str) -> list:
    """Four words of two elements: the terms of lse2 / scale2 and a zero, those of delta and a zero; a number is the sum of its terms."""
    found = []
    # lse2 is finite, as the product of dP multiplies it by zeros.
    for number in (cutlass.min(lse2, F32(MOST_LSE2)) / scale2, delta):
        # Both differences are exact: 8 bits each, and what is left is rounded.
        high = truncated(number)
        middle = truncated(number - high)
        found += [pack(high, middle, dtype), pack(number - high - middle, number - number, dtype)]
    return found


# -- Zeros ---------------------------------------------------------------------------------------------------------


@cute.jit
def clear_semaphores(semaphores: cute.Tensor, n):
    """Sets a head's n-th semaphore to zero, if there is one."""
    if n < cute.size(semaphores):
        semaphores[n] = cutlass.Int32(0)


@cute.jit
def clear_queue(queue: cute.Tensor, n):
    """Sets the queue to zero in one thread, whose ``n`` is 0."""
    if n == 0:
        queue[0] = cutlass.Int32(0)


@cute.jit
def write_plan(plan: packed_plan.PackedPlan, n, config: cutlass.Constexpr):
    """Writes the plan of packed sequences in one CTA, whose ``n`` is 0."""
    if n == 0:
        packed_plan.write(plan, THREADS, config)


@cute.jit
def clear_sums(dq_sums: cute.Tensor, first, step, config: cutlass.Constexpr):
    """Sets this CTA's share of a head's blocks of dQ, (block, element), to zero."""
    for n in cutlass.range(first, dq_sums.shape[0], step, unroll=1):
        put_zeros(dq_sums[n, None], config)


def put_zeros(block: cute.Tensor, config: Backward) -> None:
    """Sets a block of dQ to zero: 16 bytes a thread at a time."""
    zeros = cute.make_rmem_tensor((4, KEY_GROUPS * config.keys.part_elements // (4 * THREADS)), F32)
    zeros.fill(0.0)
    target = cute.make_tensor(block.iterator, cute.make_layout((4, THREADS, zeros.shape[1])))
    cute.autovec_copy(zeros, target[None, cute.arch.thread_idx()[0], None])
