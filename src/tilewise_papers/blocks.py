"""The blocks to run: the papers' formula, and the largest that really fit.

Algorithm 1 of FlashAttention sets Bc = ⌈M / 4d⌉ and Br = min(Bc, d), so that Q, K, V and O fill the M numbers of SRAM when
Br = Bc. The scores and statistics of a tile, and the gradients of the backward, need room too. `largest` finds by trial what
a machine accepts: it runs one tile of the program, and the machine raises where it does not fit.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewise_papers.head import Blocks
from tilewise_papers.machine import DoesNotFit


def paper_blocks(sram_elements: int, head_dim: int) -> Blocks:
    """Line 1 of Algorithm 1: Bc = ⌈M / 4d⌉, Br = min(Bc, d)."""
    cols = -(-sram_elements // (4 * head_dim))
    return Blocks(min(cols, head_dim), cols)


def largest(probe: Callable[[int], object], limit: int) -> int:
    """The largest size in 1..limit for which probe(size) does not raise DoesNotFit, by bisection.

    Raises the DoesNotFit of size 1 if even that finds no room.
    """
    probe(1)
    fits, too_large = 1, limit + 1
    while too_large - fits > 1:
        # Doubling first: a trial far too large could cost more than all others.
        size = min(2 * fits, (fits + too_large) // 2)
        try:
            probe(size)
            fits = size
        except DoesNotFit:
            too_large = size
    return fits
