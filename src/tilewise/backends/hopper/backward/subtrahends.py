"""Rows' statistics as an operand: S and dP leave their products with lse and delta subtracted, by one more k step of 16 columns.

A thread of Sᵀ or dPᵀ holds a quarter of a block's columns, the queries, and would read the statistics of each from shared memory: a number
takes its warp a wavefront, 512 of a block's 3,900 clocks at head_dim 64. Instead each statistic is the sum of three bf16 terms, 24 bits
in all, which a product multiplies by a constant::

    row of B, 16 bytes:  lse lse lse  0  delta delta delta  0      (lse in units of q · k; terms from the highest on)
    rows of A for S:      -½  -½  -½  0     0     0     0   0
    rows of A for dP:       0   0   0  0    -½    -½    -½  0

The step has 16 columns and a row only 8: both operands' columns 8 to 15 are the first 8 again, therefore the halves
(docs/decisions.md#hopper-shared-memory).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.backward.fragments import Term, stage_of
from tilewise.backends.hopper.backward.keys_storage import KeysMmas, KeysStorage
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.instructions import through_memory
from tilewise.backends.hopper.kit.operands import words

MINUS_HALF = 0xBF00  # of bf16


class Subtrahends(NamedTuple):
    """The operands of the k steps that subtract lse and delta.

    Attributes:
        score, dp: the products, A in shared memory and in registers.
        lse, delta: the constants A, (64, 16).
        rows: B, (tile_m, 16, slot).
    """

    score: cute.TiledMma
    dp: cute.TiledMma
    lse: cute.Tensor
    delta: cute.Tensor
    rows: cute.Tensor

    def of_s(self, slot) -> Term:
        """The k step of S for the block in a slot."""
        return Term(self.score, self.lse, stage_of(self.rows, slot))

    def of_dp(self, slot) -> Term:
        """The k step of dP for the block in a slot."""
        return Term(self.dp, self.delta, stage_of(self.rows, slot))


def make_subtrahends(mmas: KeysMmas, smem: KeysStorage, registers: cute.Tensor) -> Subtrahends:
    """The operands of a warpgroup; ``registers`` become those of delta's constant, (64, 16)."""
    # Each thread takes the word by way of memory of its own, which parts of dQ use later.
    mine = smem.dq.part.iterator + (cute.arch.thread_idx()[0] - 128)
    for n, word in enumerate(through_memory(mine, minus_halves(4), cute.size(words(registers)))):
        words(registers)[n] = word
    # (64, 16) and (tile_m, 16, slot), both K-major without a swizzle.
    constant = mmas.score.make_fragment_A(mmas.score.get_slice(0).partition_A(smem.minus_lse))
    rows = mmas.score.make_fragment_B(mmas.score.get_slice(0).partition_B(smem.statistics))
    return Subtrahends(mmas.score, mmas.dp_registers, stage_of(constant, 0), registers, rows)


def minus_halves(first: int):
    """A lane's two columns of a row that has -½ in the columns ``[first, first + 3)`` of 8."""
    # The lanes of a quad hold a row's 8 columns.
    lane = cute.arch.thread_idx()[0] % 4
    # Two elements of 16 bits a word, the lower column first; I32 has a sign.
    both, low = I32((MINUS_HALF << 16 | MINUS_HALF) - (1 << 32)), I32(MINUS_HALF)
    second = I32(cutlass.select_(lane == first // 2 + 1, low, I32(0)))
    return I32(cutlass.select_(lane == first // 2, both, second))


@cute.jit
def write_constant(smem: KeysStorage, warp):
    """The first warp writes lse's constant, a word each lane, before all threads meet."""
    if warp == 0:
        target = cute.make_tensor(cute.recast_ptr(smem.minus_lse.iterator, dtype=I32), cute.make_layout(32))
        target[cute.arch.thread_idx()[0] % 32] = minus_halves(0)
        # Products read it by another proxy.
        cute.arch.fence_view_async_shared()
