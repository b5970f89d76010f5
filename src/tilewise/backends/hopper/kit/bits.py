"""The pairs of a partial tile, a bit each, as :mod:`tilewise.planning.bit_tiles` lays them down for the threads of a wgmma accumulator."""

from __future__ import annotations

import cutlass.cute as cute

from tilewise.backends.hopper.kit.instructions import choose
from tilewise.backends.hopper.kit.softmax import INF


def words_of(bits: cute.Tensor, slot, thread) -> list:
    """The words of a thread (0 to 255) of the tile in a slot: one or two of 32 bits, which a warp reads side by side."""
    return [bits[slot, thread, n] for n in range(cute.size(bits, mode=[2]))]


def is_set(words: list, n: int):
    """Whether bit ``n`` of a thread's words is set."""
    bit = n % 32
    return (words[n // 32] & (1 << bit if bit < 31 else -(1 << 31))) != 0


def hide(s: cute.Tensor, words: list) -> None:
    """Sets the scores of pairs whose bit is not set to -inf; ``s`` is the view (2, N/4) of an accumulator of 64 x N."""
    columns = cute.size(s, mode=[1])
    for r in range(2):
        for c in range(columns):
            # A selection, so that a NaN or an infinity of a hidden pair is gone too.
            s[r, c] = choose(is_set(words, r * columns + c), s[r, c], -INF)
