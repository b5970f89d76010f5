"""Dropout of a thread's pairs: Philox4x32-7, the same bits as :mod:`tilewise.dropout` (docs/algorithm.md, (20) to (25)).

A call's four words are eight values of 16 bits, those of the pairs ``{i, i ^ 8} x {j, j ^ 1, j ^ 8, j ^ 9}``: a thread's two
rows and four neighbouring columns of its own. An operand's word has two neighbouring columns of a row, and both halves of a mask
are made at once: no value is ever taken out of its word.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.expression import Pairs
from tilewise.backends.hopper.kit.instructions import after, spread_signs, unseen_zero, zero_after
from tilewise.dropout import ROUNDS

U32, U64 = cutlass.Uint32, cutlass.Uint64
M0, M1, W0, W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
HELD = 16  # words of an operand whose masks one register holds, two bits each


def philox(counter: tuple, key: tuple) -> tuple:
    """The four words of 32 bits of one call (docs/algorithm.md, (20) and (21))."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(ROUNDS):
        # Products of 64 bits: the low halves become words as they are, the high ones with a word and a part of the key.
        p0, p1 = U64(c0) * U64(M0), U64(c2) * U64(M1)
        c0, c1, c2, c3 = U32(p1 >> 32) ^ c1 ^ k0, U32(p1), U32(p0 >> 32) ^ c3 ^ k1, U32(p0)
        k0, k1 = k0 + U32(W0), k1 + U32(W1)
    return c0, c1, c2, c3


def key_of(params) -> tuple:
    """The two halves of the seed, the key of Philox."""
    seed = params.extra.seed[0]
    return U32(seed), U32(seed >> 32)


# -- Comparisons ---------------------------------------------------------------------------------------------------


class Threshold(NamedTuple):
    """The threshold T as both halves of a word compare with it.

    Attributes:
        limit: ``0x7FFF + T % 0x8000`` in both halves. top: all ones where T has its top bit, else zeros.
    """

    limit: U32
    top: U32

    @classmethod
    def of(cls, params) -> Threshold:
        """The threshold of a launch."""
        t = params.extra.threshold
        limit = U32((t & 0x7FFF) + 0x7FFF) * U32(0x10001)
        return cls(limit, U32(cutlass.select_(t >= 0x8000, U32(0xFFFFFFFF), U32(0))))

    def below(self, word):
        """A word whose bits 15 and 31 say whether the word's low and high half are below T."""
        # The halves without their top bits: no difference is negative, so that no half borrows from the other.
        less, rest = self.limit - (word & U32(0x7FFF7FFF)), word ^ U32(0xFFFFFFFF)
        # A half is below T if its top bit is smaller, or equal and the rest is below: the majority of three, one instruction.
        return (less & rest) | (self.top & (less | rest))


def drop(operand: cute.Tensor, masks: list) -> None:
    """Sets the dropped pairs of an operand in registers to zero; ``masks``: one for each of its words, or none at all."""
    if not masks:
        return
    words = cute.recast_tensor(cute.make_tensor(operand.iterator, cute.make_layout(cute.size(operand))), I32)
    for n, mask in enumerate(masks):
        words[n] = words[n] & I32(mask)


# -- Masks ---------------------------------------------------------------------------------------------------------


def masks_of(pairs: Pairs, columns: int, params, at_once: int | None = None) -> list:
    """The masks of an operand's words that keep the pairs that dropout keeps: a half is all ones where its pair is kept, else zeros.

    Word c + r holds columns c and c + 1, for even c, of a thread's row r. The block begins at multiples of 16.

    Args:
        at_once: how many calls are under way at a time, where registers are few; what all blocks share is then computed anew for each.
    """
    key, threshold = key_of(params), Threshold.of(params)
    if at_once:
        # New names in each block: the seven keys of the rounds and the tile's own counter would be held across all of them.
        key = tuple(after(k, pairs.column) for k in key)
        pairs = pairs._replace(rows=[after(n, pairs.column) for n in pairs.rows])
    pair = U32(pairs.common["b"] * params.heads_q + pairs.common["h"])
    words_of = by_rows if pairs.names == ("i", "j") else by_columns
    masks: list = [None] * columns
    column, zero = pairs.column, unseen_zero() if at_once else None
    for c in range(0, columns, 4):
        if at_once and c >= 4 * at_once:
            pairs = pairs._replace(column=column + zero_after(masks[c - 4 * at_once], zero))
        words = words_of(pairs, c, pair, key, threshold)
        for n in range(2):
            for r in range(2):
                masks[c + 2 * n + r] = words(n, r)
    return masks


def by_rows(pairs: Pairs, c: int, pair, key: tuple, threshold: Threshold):
    """The masks ``(n, r)`` of columns c + 2 n and c + 2 n + 1 of row r, where rows are queries."""
    i = pairs.rows[0]
    call = U32(pairs.column // 16 * 4 + pairs.column % 8 // 2 + c)
    words = [threshold.below(x) for x in philox((call, U32(i // 16 * 8 + i % 8), pair, U32(0)), key)]
    # Word 2 (j % 2) + (i // 8) % 2; columns c + 2 and c + 3 are eight keys on and take its high half: (23).
    return lambda n, r: spread_signs(words[r], words[2 + r], halves=(n, n))


def by_columns(pairs: Pairs, c: int, pair, key: tuple, threshold: Threshold):
    """The masks ``(n, r)`` of columns c + 2 n and c + 2 n + 1 of row r, where the rows are keys.

    Two words of a call belong to its even keys and two to its odd ones, which the thread four lanes on holds. The two threads
    share the two queries of a call between them, and exchange half of the words.
    """
    j, i, odd = pairs.rows[0], pairs.column // 16 * 8 + pairs.column % 8 + 2 * c, pairs.rows[0] % 2 != 0

    def either(a, b):
        return U32(cutlass.select_(odd, a, b))

    call = U32(j // 16 * 4 + j // 2 % 4), U32(i) + either(U32(1), U32(0)), pair, U32(0)
    words = [threshold.below(x) for x in philox(call, key)]
    mine = [either(words[2 + n], words[n]) for n in range(2)]
    theirs = [cute.arch.shuffle_sync_bfly(either(words[n], words[2 + n]), offset=4) for n in range(2)]
    first, second = ([either(a, b) for a, b in zip(*order, strict=True)] for order in ((theirs, mine), (mine, theirs)))
    # Keys of row 1 are eight on and take the high half.
    return lambda n, r: spread_signs(first[n], second[n], halves=(r, r))


class Kept(NamedTuple):
    """The pairs that dropout keeps, one bit each: fewer registers than their masks.

    ``words``: the masks of HELD words of an operand in each; of mask n, bits n and n + 16 modulo HELD.
    """

    words: list

    @classmethod
    def of(cls, pairs: Pairs, columns: int, params, at_once: int | None) -> Kept:
        """The pairs of a thread's columns in a block; ``at_once`` as of :func:`masks_of`."""
        words = [U32(0)] * -(-columns // HELD)
        for n, mask in enumerate(masks_of(pairs, columns, params, at_once)):
            words[n // HELD] = words[n // HELD] | (mask & U32(0x10001 << n % HELD))
        return cls(words)

    def __call__(self, r: int, c: int):
        """Whether the pair at a thread's row and column is kept: a condition."""
        n = c - c % 2 + r
        return (self.words[n // HELD] & U32(1 << (n % HELD + 16 * (c % 2)))) != U32(0)

    def masks(self, count: int) -> list:
        """The masks of an operand's ``count`` words."""
        shifted = [self.words[n // HELD] << U32(HELD - 1 - n % HELD) for n in range(count)]
        return [spread_signs(word, word, halves=(0, 1)) for word in shifted]
