"""Which of a thread's pairs dropout keeps: Philox4x32-7, the same bits as :mod:`tilewise.dropout` (docs/algorithm.md, 20 to 25).

A call's four words are eight values of 16 bits, those of the pairs ``{i, i ^ 8} x {j, j ^ 1, j ^ 8, j ^ 9}``: a thread's two
rows and four neighbouring columns of its own.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper import tile
from tilewise.dropout import ROUNDS

I32, U32, U64 = cutlass.Int32, cutlass.Uint32, cutlass.Uint64
M0, M1, W0, W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85


def philox(counter: tuple, key: tuple) -> tuple:
    """Four words of 32 bits, equations 20 and 21."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(ROUNDS):
        p0, p1 = U64(c0) * U64(M0), U64(c2) * U64(M1)
        c0, c1, c2, c3 = U32(p1 >> 32) ^ c1 ^ k0, U32(p1), U32(p0 >> 32) ^ c3 ^ k1, U32(p0)
        k0, k1 = k0 + U32(W0), k1 + U32(W1)
    return c0, c1, c2, c3


def drop(p: cute.Tensor, line, first_key, work) -> None:
    """Zero for the pairs that are dropped; ``first_key`` of the block, a multiple of 16."""
    seed, pair = work.extra.seed[0], U32(line.batch * work.heads_q + line.head)
    key, i = (U32(seed), U32(seed >> 32)), line.i[0]
    row = U32(i // 16 * 8 + i % 8)
    for c in range(0, cute.size(p, mode=[1]), 4):
        # No sooner than the numbers before: it depends on none of them, and would be computed for all columns at once.
        call = tile.once(first_key // 4 + line.column // 2 + c, p[1, max(c - 1, 0)])
        words = philox((U32(call), row, pair, U32(0)), key)
        for n in range(4):
            for r in range(2):
                word = words[2 * (n % 2) + r]
                value = I32(word & U32(0xFFFF)) if n < 2 else I32(word >> 16)
                p[r, c + n] = tile.choose(value < work.extra.threshold, p[r, c + n], 0.0)
