"""What one warpgroup does with one block of scores, in registers.

A wgmma accumulator of 64 rows by N columns lies in the warpgroup's 128 threads so: lane l of warp w (0 to 3) holds the
rows ``16 w + l // 4 + 8 r``, r = 0, 1, and of each the columns ``8 (c // 2) + 2 (l % 4) + c % 2``, c = 0 .. N/4 - 1. A row
lies in the four lanes of a quad. :func:`rows_columns` views an accumulator as ``(r, c)``.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

F32 = cutlass.Float32
LAZY = 8.0  # in base 2: how far a row's maximum may fall behind before O is rescaled
MOST = 2.0**15  # of a thread's part of a row's sum over a steady block: fp16 ends at 65504
LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)
INF = float("inf")


def row_of(thread, r):
    """Row of the tile that a thread's r-th row is."""
    return thread // 32 * 16 + thread % 32 // 4 + 8 * r


def column_of(thread, c):
    """Column of the tile that a thread's c-th column is: the thread's own start, ``2 (thread % 4)``, and a constant."""
    return thread % 4 * 2 + constant_column(c)


def constant_column(c: int) -> int:
    return 8 * (c // 2) + c % 2


def choose(condition, a, b):
    """``a`` where the condition holds, else ``b``: one select, no branch."""
    return F32(cutlass.select_(condition, F32(a), F32(b)))


def both(a, b):
    """Whether two conditions hold."""
    return cutlass.select_(a, b, a)


def once(x, score):
    """The number x, no sooner than a score is known: a zero is added to its bits that depends on it, though no compiler sees
    that it is zero (a number has at most 32 bits set)."""
    code = (
        "{ .reg .b32 t, u; popc.b32 t, {$r1}; shr.u32 t, t, 6; mov.b32 u, {$r0}; add.s32 u, u, t; mov.b32 {$w0}, u; }"
    )
    return cute.arch.inline_ptx(code, write_only_types=[type(x)], read_only_args=[x, score])


def rows_columns(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator ((2, 2, N/8), 1, 1) as (2 rows, N/4 columns): a view."""
    shape, stride = acc.layout.shape, acc.layout.stride
    layout = cute.make_layout(
        ((shape[0][1], shape[1]), (shape[0][0], shape[0][2], shape[2])),
        stride=((stride[0][1], stride[1]), (stride[0][0], stride[0][2], stride[2])),
    )
    return cute.make_tensor(acc.iterator, layout)


def begin(mma, acc, a, b, overwrite: bool) -> None:
    """Issues acc (+)= a b, all k steps, as one group; the operands' mode 2 are the steps.

    The atom is made here: a field set on the caller's would belong to the caller's loop.
    """
    atom = cute.make_mma_atom(mma.op)
    warpgroup.fence()
    for step in range(cute.size(a, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, not (overwrite and step == 0))
        cute.gemm(atom, acc, a[None, None, step], b[None, None, step], acc)
    warpgroup.commit_group()


def over_quad(x, combine):
    """Combined over the four lanes that hold a row."""
    for offset in (2, 1):
        x = combine(x, cute.arch.shuffle_sync_bfly(x, offset=offset))
    return x


def quad_transposed(words: list) -> list:
    """Of the four lanes of a quad with four words each, as a matrix (lane, word), the transpose: a lane gets its word of each lane."""
    lane = cute.arch.thread_idx()[0] % 4
    for bit in (1, 2):  # lanes and words that differ in this bit change places
        upper, found = lane // bit % 2 == 1, list(words)
        for n in (n for n in range(4) if not n & bit):
            low, high = words[n], words[n | bit]
            other = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, low, high), offset=bit)
            found[n], found[n | bit] = cutlass.select_(upper, other, low), cutlass.select_(upper, high, other)
        words = found
    return words


def pack(low, high, dtype: str):
    """Two numbers rounded to ``dtype`` in one register.

    In PTX, since the compiler would move plain conversions across the loop's end and keep the fp32 scores alive beside
    those of the next block: too many registers, and every wgmma then waits for the one before
    (docs/decisions.md#hopper-held-exponentials).
    """
    kind = {"bf16": "bf16x2", "fp16": "f16x2"}[dtype]
    code = f"cvt.rn.{kind}.f32 {{$w0}}, {{$r1}}, {{$r0}};"
    return cute.arch.inline_ptx(code, write_only_types=[cutlass.Int32], read_only_args=[low, high])


def largest(s: cute.Tensor, r: int):
    """The largest of a thread's part of row r; four chains, for latency."""
    columns = cute.size(s, mode=[1])
    chains = [s[r, n] for n in range(4)]
    for c in range(4, columns):
        chains[c % 4] = cute.arch.fmax(chains[c % 4], s[r, c])
    return cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))


def hide(s: cute.Tensor, lower, upper) -> None:
    """Scores outside ``lower[r] <= constant_column(c) < upper[r]`` become -inf; an end that is None is unbounded."""
    for r in range(2):
        for c in range(cute.size(s, mode=[1])):
            column, kept = constant_column(c), s[r, c]
            if upper is not None:
                kept = choose(upper[r] > column, kept, -INF)
            if lower is not None:
                kept = choose(lower[r] <= column, kept, -INF)
            s[r, c] = kept


# tanh(x) / x = P(x²) / Q(x²) for |x| <= SATURATED, right to 2e-8 (a least-squares fit with Lawson's weights), lowest power first.
SATURATED = 9.0
SOFTENED = 4  # columns of a thread at once
NUMERATOR = (0.999999979, 0.133810469, 0.00349561289, 2.06094677e-05, 1.33551511e-08)
DENOMINATOR = (1.0, 0.467143625, 0.0258770777, 0.000328567438, 7.77676821e-07)


def clamp(x, limit: float):
    """Within ``-limit`` and ``limit``; NaN stays NaN."""
    high, low = (f"0f{struct.pack('>f', n).hex()}" for n in (limit, -limit))
    code = f"{{ .reg .f32 t; min.NaN.f32 t, {{$r0}}, {high}; max.NaN.f32 {{$w0}}, t, {low}; }}"
    return cute.arch.inline_ptx(code, write_only_types=[F32], read_only_args=[x])


def polynomial(u, coefficients: tuple):
    total = coefficients[-1]
    for c in coefficients[-2::-1]:
        total = total * u + c
    return total


def soften(s: cute.Tensor, cap2) -> None:
    """Scores become ``tanh(score / cap)``, with ``cap2 = 2 log2(e) softmax_scale / cap``, right to some 3e-7 of their size.

    A quotient of polynomials: one instruction of the special function unit, of which the softmax needs one too, and 14 others.
    ``1 - 2 / (1 + 2**(s cap2))`` has two and 3 others, but its error of 6e-8, times a cap of 30, shows in lse. ``tanh.approx``
    errs by 5e-4 (docs/decisions.md#hopper-softcap).
    """
    scale = cap2 * (LN_2 / 2)
    for c in range(cute.size(s, mode=[1])):
        if c % SOFTENED == 0 and c:
            scale = once(scale, s[1, c - 1])
        for r in range(2):
            x = clamp(s[r, c] * scale, SATURATED)
            u = x * x
            s[r, c] = x * polynomial(u, NUMERATOR) * cute.arch.rcp_approx(polynomial(u, DENOMINATOR))


def soften_roughly(s: cute.Tensor, cap2) -> None:
    """As :func:`soften`, with an error of 6e-8 whatever the score's size, and fewer registers: enough for P of a backward."""
    for r in range(2):
        for c in range(cute.size(s, mode=[1])):
            power = cute.math.exp2(s[r, c] * cap2, fastmath=True)
            s[r, c] = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + power)


class Rows(NamedTuple):
    """State of a thread's two rows: the maximum ``m2`` of the scores in base 2, its own part of the row sum ``l``, and the
    ``factor`` by which the last block wants O scaled."""

    m2: cute.Tensor
    l: cute.Tensor
    factor: cute.Tensor


def empty_rows() -> Rows:
    return Rows(*(cute.make_rmem_tensor((2,), F32) for _ in range(3)))


def exponentials(s: cute.Tensor, rows: Rows, scale2, first: bool, masked: bool, lazy: bool) -> None:
    """The online softmax of one block, in base 2: ``s`` becomes P, unnormalised, and ``rows`` go on.

    ``m' = max(m, max_j s scale2)``, ``P = 2**(s scale2 - m')``, ``factor = 2**(m - m')``, ``l = l factor + sum_j P``
    (FlashAttention-2, algorithm 1, lines 8 to 10). Lazily, m stays, and the factor is 1, where the maximum grew by no more
    than LAZY: P is then at most ``2**LAZY``.

    Args:
        first: there is no m yet. masked: a row may still be without a key.
    """
    for r in range(2):
        m2 = over_quad(largest(s, r), cute.arch.fmax) * scale2
        if not first:
            m2 = cute.arch.fmax(m2, rows.m2[r])
            if lazy:
                m2 = choose(m2 - rows.m2[r] > LAZY, m2, rows.m2[r])
        # A row without a key so far: 0 in place of -inf, and every P is 2**-inf = 0.
        base = choose(m2 == -INF, 0.0, m2) if masked else m2
        sums = [F32(0.0), F32(0.0)]
        for c in range(cute.size(s, mode=[1])):
            p = cute.math.exp2(s[r, c] * scale2 - base, fastmath=True)
            s[r, c] = p
            sums[c % 2] = sums[c % 2] + p
        total = sums[0] + sums[1]
        if not first:
            factor = cute.math.exp2(rows.m2[r] - base, fastmath=True)
            total = rows.l[r] * factor + total
            rows.factor[r] = factor
        rows.l[r], rows.m2[r] = total, m2


def steady_exponentials(s: cute.Tensor, rows: Rows, scale2) -> list:
    """``s`` becomes ``P = 2**(s scale2 - m)`` with the maxima ``m`` as they are. Returns a thread's part of each row's sum.

    Softmax is the same for any m that P does not overflow with: without this block's maxima a quarter of its instructions are
    left out, and what they have to wait for. Whether m served is seen from the sums (MOST).
    """
    totals = []
    for r in range(2):
        sums = [F32(0.0), F32(0.0)]
        for c in range(cute.size(s, mode=[1])):
            p = cute.math.exp2(s[r, c] * scale2 - rows.m2[r], fastmath=True)
            s[r, c] = p
            sums[c % 2] = sums[c % 2] + p
        totals.append(sums[0] + sums[1])
    return totals


def all_agree(condition, barrier_id):
    """1 where a condition holds for every thread of the warpgroup, else 0: the same for all of them."""
    code = "{ .reg .pred p, q; setp.ne.s32 p, {$r0}, 0; barrier.cta.red.and.pred q, {$r1}, 128, p; selp.s32 {$w0}, 1, 0, q; }"
    mine, kind = cutlass.select_(condition, cutlass.Int32(1), cutlass.Int32(0)), [cutlass.Int32]
    return cute.arch.inline_ptx(code, write_only_types=kind, read_only_args=[mine, cutlass.Int32(barrier_id)])


def pin(word, rows: Rows) -> None:
    """Holds every exponential above the wait that follows: ptxas moves the wait up, over whatever no memory depends on,
    and P V would then not run under the softmax. A store that depends on all of them stays where it is; nobody reads it
    (docs/decisions.md#hopper-held-exponentials).
    """
    total = rows.l[0] + rows.l[1]
    cute.arch.inline_ptx("st.volatile.shared.f32 [{$r0}], {$r1};", read_only_args=[word.toint(), total])


def scale_rows(o: cute.Tensor, factor) -> None:
    """O, as rows and columns, times a factor for each of the two rows."""
    for r in range(2):
        for c in range(cute.size(o, mode=[1])):
            o[r, c] = o[r, c] * factor[r]


@cute.jit
def rescale(acc: cute.Tensor, factor: cute.Tensor, lazy: cutlass.Constexpr):
    """O times the rows' factors; lazily, a warp whose factors are all 1 skips it."""
    if cutlass.const_expr(lazy):
        if cute.arch.vote_any_sync(factor[0] * factor[1] != 1.0):
            scale_rows(rows_columns(acc), factor)
    else:
        scale_rows(rows_columns(acc), factor)


def finish(rows: Rows, sinks: list) -> tuple[list, list]:
    """``(factor, lse)`` of the two rows: what makes O of the accumulator, and the natural log-sum-exp.

    A row's sink, a logit without a value, is one more term of the sum; -inf is none. A row of no key gets 0 and its sink.
    """
    factors, lses = [], []
    for r in range(2):
        sink2 = F32(sinks[r]) * LOG2_E
        l = over_quad(rows.l[r], lambda x, y: x + y)
        m2 = cute.arch.fmax(rows.m2[r], sink2)
        base = choose(m2 == -INF, 0.0, m2)
        scaled = cute.math.exp2(rows.m2[r] - base, fastmath=True)
        total = l * scaled + cute.math.exp2(sink2 - base, fastmath=True)
        factors.append(choose(total == 0.0, 0.0, scaled * cute.arch.rcp_approx(total)))
        lses.append(choose(l == 0.0, F32(sinks[r]), (base + cute.math.log2(total, fastmath=True)) * LN_2))
    return factors, lses


def count_up(t: cute.Tensor, place: tuple) -> None:
    """One thread: adds 1 to a number in global memory; whoever sees that sees what was written before."""
    cute.arch.atomic_add(cute.domain_offset(place, t).iterator, F32(1.0), sem="release", scope="gpu")


@cute.jit
def await_count(t: cute.Tensor, place: tuple, count: cutlass.Constexpr):
    """Until a number in global memory has been counted up to ``count``, and copies by the copy engine see what was written before."""
    pointer = cute.domain_offset(place, t).iterator
    found = cute.arch.load(pointer, F32, sem="acquire", scope="gpu")
    while found < count:
        found = cute.arch.load(pointer, F32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async.global")


def put_words(word, numbers) -> None:
    """32-bit integers to shared memory, side by side."""
    for n, number in enumerate(numbers):
        code = "st.volatile.shared.u32 [{$r0}], {$r1};"
        cute.arch.inline_ptx(code, read_only_args=[word.toint() + 4 * n, number])


def get_words(word, count: int) -> list:
    kind, code = [cutlass.Int32], "ld.volatile.shared.u32 {$w0}, [{$r0}];"
    read = lambda at: cute.arch.inline_ptx(code, write_only_types=kind, read_only_args=[at])  # noqa: E731
    return [read(word.toint() + 4 * n) for n in range(count)]


def put_pair(pointer, low, high) -> None:
    """Two fp32 numbers to global memory at a multiple of 8 bytes; four lanes fill a sector of 32."""
    code = "st.global.v2.f32 [{$r0}], {{$r1},{$r2}};"
    cute.arch.inline_ptx(code, read_only_args=[pointer.toint(), low, high])


def put_words_if(condition, pointer, words: list) -> None:
    """Four words to global memory at a multiple of 16 bytes, where the condition holds."""
    code = "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; @p st.global.v4.b32 [{$r1}], {{$r2},{$r3},{$r4},{$r5}}; }"
    flag = cutlass.select_(condition, cutlass.Int32(1), cutlass.Int32(0))
    cute.arch.inline_ptx(code, read_only_args=[flag, pointer.toint(), *words])
