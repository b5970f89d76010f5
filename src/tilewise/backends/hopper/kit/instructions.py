"""Selections, and instructions that the DSL has no name for."""

from __future__ import annotations

import struct

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.kit.dtypes import F32, I32

# -- Registers -----------------------------------------------------------------------------------------------------


def choose(condition, held, otherwise):
    """The fp32 number ``held`` where the condition holds, else ``otherwise``: one select, no branch."""
    return F32(cutlass.select_(condition, F32(held), F32(otherwise)))


def both(left, right):
    """Whether two conditions hold."""
    return cutlass.select_(left, right, left)


def after(value, score):
    """The number ``value``, computed no sooner than a score is known.

    A zero that depends on the score is added to the bits of ``value``. No compiler sees that it is zero: a number has at most 32 bits set.
    """
    code = (
        "{ .reg .b32 t, u; popc.b32 t, {$r1}; shr.u32 t, t, 6; mov.b32 u, {$r0}; add.s32 u, u, t; mov.b32 {$w0}, u; }"
    )
    return cute.arch.inline_ptx(code, write_only_types=[type(value)], read_only_args=[value, score])


def unseen_zero():
    """0 in a register of the whole warp; no compiler sees that it is zero. For :func:`zero_after`."""
    return cute.arch.make_warp_uniform(after(cutlass.Int32(0), cute.arch.thread_idx()[0]))


def zero_after(score, zero):
    """0, known no sooner than a score is: a single instruction, where :func:`after` has a slow one and two more, for which what depends on
    it has to wait. ``zero``: :func:`unseen_zero`."""
    code = "and.b32 {$w0}, {$r0}, {$r1};"
    return cute.arch.inline_ptx(code, write_only_types=[cutlass.Int32], read_only_args=[score, zero])


def held(value: float):
    """A constant in a register, as :func:`after` takes it."""
    # An operand of inline PTX has to be a value of the kernel: a number of Python's is none.
    code = f"mov.b32 {{$w0}}, 0f{struct.pack('>f', value).hex()};"
    return cute.arch.inline_ptx(code, write_only_types=[F32], read_only_args=[])


def clamp(value, limit: float):
    """The fp32 number x, limited to ``[-limit, limit]``; NaN stays NaN."""
    high, low = (f"0f{struct.pack('>f', n).hex()}" for n in (limit, -limit))
    code = f"{{ .reg .f32 t; min.NaN.f32 t, {{$r0}}, {high}; max.NaN.f32 {{$w0}}, t, {low}; }}"
    return cute.arch.inline_ptx(code, write_only_types=[F32], read_only_args=[value])


def reaches_two(values: list):
    """Whether one of some fp32 numbers is 2 or more in magnitude, or NaN: by the exponent's first bit, two of them an instruction."""
    left = list(values)
    while len(left) > 1:
        three = (left + [left[0]] * (3 - len(left)))[:3]
        # 0xfe: the bits of any of the three.
        code = "lop3.b32 {$w0}, {$r0}, {$r1}, {$r2}, 0xfe;"
        left = [*left[3:], cute.arch.inline_ptx(code, write_only_types=[F32], read_only_args=three)]
    # Bit 30 is set from 2 on, and in infinities and NaN.
    code = "and.b32 {$w0}, {$r0}, 0x40000000;"
    return cute.arch.inline_ptx(code, write_only_types=[cutlass.Int32], read_only_args=left) != 0


def common_bits(word, first, second):
    """The bits that an integer and two fp32 numbers have in common; the sign is among them where both numbers are negative."""
    # 0x80: the bits of all three.
    code = "lop3.b32 {$w0}, {$r0}, {$r1}, {$r2}, 0x80;"
    return cute.arch.inline_ptx(code, write_only_types=[cutlass.Int32], read_only_args=[word, first, second])


def rough_tanh(value):
    """tanh of an fp32 number by the special function unit: its relative error is at most 2**-10.987."""
    return cute.arch.inline_ptx("tanh.approx.f32 {$w0}, {$r0};", write_only_types=[F32], read_only_args=[value])


def pack(low, high, dtype: str):
    """Two fp32 numbers rounded to ``dtype`` in one register.

    PTX is used because the compiler would move plain conversions across the loop's end and keep the fp32 scores alive beside
    those of the next block. That takes too many registers, and every wgmma would then wait for the one before
    (docs/decisions.md#hopper-held-exponentials).
    """
    kind = {"bf16": "bf16x2", "fp16": "f16x2"}[dtype]
    code = f"cvt.rn.{kind}.f32 {{$w0}}, {{$r1}}, {{$r0}};"
    return cute.arch.inline_ptx(code, write_only_types=[cutlass.Int32], read_only_args=[low, high])


def truncated(x):
    """The fp32 number without its last 16 bits: a bf16 number."""
    code = "and.b32 {$w0}, {$r0}, 0xffff0000;"
    return cute.arch.inline_ptx(code, write_only_types=[F32], read_only_args=[x])


def spread_signs(low, high, halves: tuple[int, int]):
    """A word whose low half is all ones where a half of ``low`` has its top bit, and whose high half where one of ``high`` has it.

    ``halves``: which one of each, 0 the low one. It is one instruction.
    """
    # A selector has a digit for each byte: which of the eight bytes, plus 8 for its sign alone.
    digits = 9 + 2 * halves[0], 13 + 2 * halves[1]
    code = f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {digits[1] * 0x1100 + digits[0] * 0x11};"
    return cute.arch.inline_ptx(code, write_only_types=[cutlass.Uint32], read_only_args=[low, high])


# -- Threads of a warpgroup ----------------------------------------------------------------------------------------


def all_agree(condition, barrier_id):
    """1 if a condition holds for every thread of the warpgroup, else 0; every thread gets the same answer."""
    code = "{ .reg .pred p, q; setp.ne.s32 p, {$r0}, 0; barrier.cta.red.and.pred q, {$r1}, 128, p; selp.s32 {$w0}, 1, 0, q; }"
    # Partners: all 128 threads of the warpgroup. It is a barrier, so that every one of them has to come.
    mine, kind = cutlass.select_(condition, cutlass.Int32(1), cutlass.Int32(0)), [cutlass.Int32]
    return cute.arch.inline_ptx(code, write_only_types=kind, read_only_args=[mine, cutlass.Int32(barrier_id)])


def meet() -> None:
    """All threads of a cluster's CTAs wait for each other, and see what the others have written."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def in_peer(place, peer) -> I32:
    """The address of the same place in the shared memory of another CTA of the cluster."""
    code = "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};"
    return cute.arch.inline_ptx(code, write_only_types=[I32], read_only_args=[I32(place), I32(peer)])


# -- Shared memory -------------------------------------------------------------------------------------------------


def keep_above(word, value) -> None:
    """Keeps the computation of an fp32 value above the wait that follows.

    ptxas moves a wait up over everything that no memory depends on. A store that depends on the value stays where it is; nobody
    reads it (docs/decisions.md#hopper-held-exponentials).
    """
    cute.arch.inline_ptx("st.volatile.shared.f32 [{$r0}], {$r1};", read_only_args=[word.toint(), value])


def keep_words_above(word, words: list) -> None:
    """Keeps the computation of 32-bit words above the wait that follows, for half an instruction each, as :func:`keep_above` does: what is
    stored is the exclusive or of all, made of three at a time."""
    code = "st.volatile.shared.b32 [{$r0}], {$r1};"
    cute.arch.inline_ptx(code, read_only_args=[word.toint(), exclusive_or(words)])


def exclusive_or(words: list):
    """A number that depends on all of some 32-bit words: their exclusive or, made of three at a time, the first one again where two are
    left."""
    left = list(words)
    while len(left) > 1:
        three = (left + [left[0]] * (3 - len(left)))[:3]
        code = "lop3.b32 {$w0}, {$r0}, {$r1}, {$r2}, 0x96;"
        left = [*left[3:], cute.arch.inline_ptx(code, write_only_types=[cutlass.Int32], read_only_args=three)]
    return left[0]


def through_memory(place, word, count: int) -> list:
    """A word ``count`` times, by way of a thread's 4 bytes of shared memory. The assembler would make a constant anew between products,
    each of which would then wait for the one before."""
    cute.arch.inline_ptx("st.volatile.shared.b32 [{$r0}], {$r1};", read_only_args=[place.toint(), word])
    kind, code = [cutlass.Int32], "ld.volatile.shared.b32 {$w0}, [{$r0}];"
    return [cute.arch.inline_ptx(code, write_only_types=kind, read_only_args=[place.toint()]) for _ in range(count)]


def put_words(word, numbers) -> None:
    """Writes 32-bit integers to shared memory, side by side."""
    for n, number in enumerate(numbers):
        code = "st.volatile.shared.u32 [{$r0}], {$r1};"
        cute.arch.inline_ptx(code, read_only_args=[word.toint() + 4 * n, number])


def get_words(word, count: int) -> list:
    """Reads ``count`` 32-bit integers that :func:`put_words` wrote."""
    kind, code = [cutlass.Int32], "ld.volatile.shared.u32 {$w0}, [{$r0}];"
    read = lambda at: cute.arch.inline_ptx(code, write_only_types=kind, read_only_args=[at])  # noqa: E731
    return [read(word.toint() + 4 * n) for n in range(count)]


# -- Global memory -------------------------------------------------------------------------------------------------


def put_pair(pointer, low, high) -> None:
    """Writes two fp32 numbers to global memory at a multiple of 8 bytes; four lanes fill a sector of 32."""
    code = "st.global.v2.f32 [{$r0}], {{$r1},{$r2}};"
    cute.arch.inline_ptx(code, read_only_args=[pointer.toint(), low, high])


def put_four(pointer, words: list) -> None:
    """Writes four words to global memory at a multiple of 16 bytes."""
    code = "st.global.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};"
    cute.arch.inline_ptx(code, read_only_args=[pointer.toint(), *words])


def put_words_if(condition, pointer, words: list) -> None:
    """Writes four words to global memory at a multiple of 16 bytes, where the condition holds."""
    code = "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; @p st.global.v4.b32 [{$r1}], {{$r2},{$r3},{$r4},{$r5}}; }"
    flag = cutlass.select_(condition, cutlass.Int32(1), cutlass.Int32(0))
    cute.arch.inline_ptx(code, read_only_args=[flag, pointer.toint(), *words])


def add_where(condition, sums: cute.Tensor, n, number) -> None:
    """Adds an fp32 number to element n of a vector in global memory, where the condition holds; without a branch."""
    code = "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; @p red.global.add.f32 [{$r1}], {$r2}; }"
    flag = cutlass.select_(condition, cutlass.Int32(1), cutlass.Int32(0))
    cute.arch.inline_ptx(code, read_only_args=[flag, (sums.iterator + n).toint(), number])


def count_up(counts: cute.Tensor, place: tuple, number=1.0) -> None:
    """One thread adds a number to an fp32 count in global memory; whoever sees the new count sees all that this thread wrote before."""
    cute.arch.atomic_add(cute.domain_offset(place, counts).iterator, F32(number), sem="release", scope="gpu")


@cute.jit
def await_count(counts: cute.Tensor, place: tuple, count: cutlass.Constexpr):
    """Waits until a count in global memory reaches ``count``; TMA copies that follow see what was written before it was counted."""
    pointer = cute.domain_offset(place, counts).iterator
    found = cute.arch.load(pointer, F32, sem="acquire", scope="gpu")
    while found < count:
        found = cute.arch.load(pointer, F32, sem="acquire", scope="gpu")
    # The acquire orders loads; copies of TMA go through another proxy and need a fence of their own.
    cute.arch.fence_proxy("async.global")
