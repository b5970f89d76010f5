"""Operands A of a wgmma in registers: as words, as fp32 numbers, and from shared memory.

The registers of a wgmma accumulator of 64 x N are, in the same order, those of an operand of 64 x N: rounding makes one of the other,
without a shuffle (:mod:`tilewise.backends.hopper.kit.tiles`).
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass.cute.nvgpu import warp as warp_ops

from tilewise.backends.hopper.kit.dtypes import F32, I32
from tilewise.backends.hopper.kit.instructions import after, unseen_zero, zero_after
from tilewise.backends.hopper.kit.tiles import rows_columns


def words(operand: cute.Tensor) -> cute.Tensor:
    """An operand in registers viewed as 32-bit words, two elements each, in the registers' order."""
    return cute.recast_tensor(cute.make_tensor(operand.iterator, cute.make_layout(cute.size(operand))), I32)


class OperandValues:
    """An operand in registers, read as fp32 numbers at a thread's (row, column).

    Of bf16 each takes one instruction here; the compiler takes two for the upper one of a word. Of fp16 it takes the compiler's
    instructions; with ``held`` a number of either is made no sooner than ``acc``'s number at its place is there, or that at the first of so
    many columns: the compiler would make all of them as soon as it can, and run out of registers.
    """

    def __init__(self, operand: cute.Tensor, acc: cute.Tensor, dtype: str, held: int = 0):
        self.words, self.dtype = words(operand) if held or dtype == "bf16" else None, dtype
        self.elements = rows_columns(as_accumulator(operand, acc))
        self.awaited, self.zero = rows_columns(acc) if held else None, I32(0)
        self.held, self.unseen = held, unseen_zero() if held and dtype == "bf16" else None

    def __getitem__(self, place: tuple[int, int]):
        r, c = place
        if self.words is None:
            return F32(self.elements[r, c])
        # Word c + r of an even column c holds columns c and c + 1 of row r.
        word = self.words[c - c % 2 + r]
        if self.awaited is not None and c % self.held == 0:
            awaited = self.awaited[r, c]
            self.zero = after(I32(0), awaited) if self.unseen is None else zero_after(awaited, self.unseen)
        if self.dtype == "bf16":
            return self._upper_half(word) if c % 2 else self._lower_half(word)
        return half_of(word if self.awaited is None else word + self.zero, c % 2, self.dtype)

    # Held back by their second operand, which several columns share, they stay single instructions, of two pipes in turn.

    def _upper_half(self, word):
        if self.awaited is None:
            return half_of(word, 1, self.dtype)
        code = "and.b32 {$w0}, {$r0}, {$r1};"
        return cute.arch.inline_ptx(code, write_only_types=[F32], read_only_args=[word, self.zero + I32(-0x10000)])

    def _lower_half(self, word):
        if self.awaited is None:
            return half_of(word, 0, self.dtype)
        code = "{ .reg .u32 low; mul.lo.u32 low, {$r0}, {$r1}; mov.b32 {$w0}, low; }"
        return cute.arch.inline_ptx(code, write_only_types=[F32], read_only_args=[word, self.zero + I32(0x10000)])


def half_of(word, n: int, dtype: str):
    """Element n of the two in a word, as an fp32 number."""
    if dtype == "bf16":
        code = "and.b32 {$w0}, {$r0}, 0xffff0000;" if n else "shl.b32 {$w0}, {$r0}, 16;"
    else:
        half = "high" if n else "low"
        code = f"{{ .reg .f16 low, high; mov.b32 {{low, high}}, {{$r0}}; cvt.f32.f16 {{$w0}}, {half}; }}"
    return cute.arch.inline_ptx(code, write_only_types=[F32], read_only_args=[word])


def as_accumulator(operand: cute.Tensor, acc: cute.Tensor) -> cute.Tensor:
    """An operand whose registers are in the order of an accumulator, viewed with the accumulator's layout."""
    return cute.make_tensor(operand.iterator, acc.layout)


def load_register_steps(operand: cute.Tensor, mma: cute.TiledMma, smem: cute.Tensor) -> None:
    """Loads the first k steps of an operand A of ``mma`` into registers, as many as ``operand`` has; ``smem``: (rows, columns)."""
    # Four 8 × 8 matrices an instruction: a k step of 16 columns for each warp's 16 rows.
    copy = cute.make_tiled_copy_A(cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(False, 4), operand.element_type), mma)
    mine = copy.get_slice(cute.arch.thread_idx()[0] % 128)
    source, target = mine.partition_S(smem), mine.retile(operand)
    # ldmatrix hands every thread two neighbouring columns of a row: just what a wgmma reads of A, and what it writes of its result.
    for step in range(cute.size(operand, mode=[2])):
        cute.copy(copy, source[None, None, step], target[None, None, step])
