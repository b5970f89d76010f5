"""Dropout of a thread's pairs: Philox4x32-7, the same bits as :mod:`tilewise.dropout` (docs/algorithm.md, (20) to (25)).

A call's four words are eight values of 16 bits, those of the pairs ``{i, i ^ 8} x {j, j ^ 1, j ^ 8, j ^ 9}``: a thread's two
rows and four neighbouring columns of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.kit.instructions import after, choose
from tilewise.dropout import ROUNDS

I32, U32, U64 = cutlass.Int32, cutlass.Uint32, cutlass.Uint64
M0, M1, W0, W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85


def philox(counter: tuple, key: tuple) -> tuple:
    """The four words of 32 bits of one call (docs/algorithm.md, (20) and (21))."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(ROUNDS):
        # Products of 64 bits: the low halves become words as they are, the high ones with a word and a part of the key.
        p0, p1 = U64(c0) * U64(M0), U64(c2) * U64(M1)
        c0, c1, c2, c3 = U32(p1 >> 32) ^ c1 ^ k0, U32(p1), U32(p0 >> 32) ^ c3 ^ k1, U32(p0)
        k0, k1 = k0 + U32(W0), k1 + U32(W1)
    return c0, c1, c2, c3


def key_of(work) -> tuple:
    """The two halves of the seed, the key of Philox."""
    seed = work.extra.seed[0]
    return U32(seed), U32(seed >> 32)


def half(word, high: bool):
    """One half of a word: a value of 16 bits."""
    return I32(word >> 16) if high else I32(word & U32(0xFFFF))


def drop(p: cute.Tensor, line, first_key, work) -> None:
    """Sets the dropped pairs of P to zero; ``first_key``, the block's first key, is a multiple of 16."""
    key, pair, i = key_of(work), U32(line.batch * work.heads_q + line.head), line.i[0]
    # One counter for rows i and i + 8, which are a thread's two rows: each takes words of its own.
    row = U32(i // 16 * 8 + i % 8)
    for c in range(0, cute.size(p, mode=[1]), 4):
        # No sooner than the numbers before: it depends on none of them, and would be computed for all columns at once.
        call = after(first_key // 4 + line.column // 2 + c, p[1, max(c - 1, 0)])
        # Four words of two halves: the values of four columns, of both rows.
        words = philox((U32(call), row, pair, U32(0)), key)
        for n in range(4):
            for r in range(2):
                # Columns c + 2 and c + 3 are eight keys on: word 2 (j % 2) + (i // 8) % 2, its half by (j // 8) % 2,
                # (21).
                value = half(words[2 * (n % 2) + r], n >= 2)
                p[r, c + n] = choose(value < work.extra.threshold, p[r, c + n], 0.0)


def kept(pairs, columns: int, work) -> Callable:
    """Whether dropout keeps the pair at a thread's row r and column c: a condition. One bit of a pair is all that is held.

    ``pairs`` of :class:`tilewise.backends.hopper.kit.expression.Pairs`; their block begins at a multiple of 16.
    """
    key, pair = key_of(work), U32(pairs.common["b"] * work.heads_q + pairs.common["h"])
    values_of = by_rows if pairs.names == ("i", "j") else by_columns
    # Two rows of a column are two bits, so that a word holds 16 columns.
    words = [U32(0)] * (-(-columns // 16))
    for c in range(0, columns, 4):
        values = values_of(pairs, c, pair, key)
        for n in range(8):
            bit = U32(1 << (2 * c + n) % 32)
            below = values[n % 2][n // 2] < work.extra.threshold
            words[c // 16] = words[c // 16] | U32(cutlass.select_(below, bit, U32(0)))
    return lambda r, c: (words[c // 16] & U32(1 << (2 * c + r) % 32)) != U32(0)


def by_rows(pairs, c: int, pair, key: tuple) -> list:
    """The values of four columns from c on, of both rows, which are queries."""
    i = pairs.rows[0]
    call = U32(pairs.column // 16 * 4 + pairs.column % 8 // 2 + c)
    words = philox((call, U32(i // 16 * 8 + i % 8), pair, U32(0)), key)
    return [[half(words[2 * (n % 2) + r], n >= 2) for n in range(4)] for r in range(2)]


def by_columns(pairs, c: int, pair, key: tuple) -> list:
    """The values of four columns from c on where the rows are keys.

    Two words of a call belong to its even keys and two to its odd ones, which the thread four lanes on holds. The two threads
    share the two queries of a call between them, and exchange half of the words.
    """
    j, i, odd = pairs.rows[0], pairs.column // 16 * 8 + pairs.column % 8 + 2 * c, pairs.rows[0] % 2 != 0
    either = lambda a, b: U32(cutlass.select_(odd, a, b))  # noqa: E731
    words = philox((U32(j // 16 * 4 + j // 2 % 4), U32(i) + either(U32(1), U32(0)), pair, U32(0)), key)
    mine = [either(words[2 + n], words[n]) for n in range(2)]
    theirs = [cute.arch.shuffle_sync_bfly(either(words[n], words[2 + n]), offset=4) for n in range(2)]
    calls = [[either(a, b) for a, b in zip(*order, strict=True)] for order in ((theirs, mine), (mine, theirs))]
    return [[half(calls[n % 2][n // 2], r == 1) for n in range(4)] for r in range(2)]
