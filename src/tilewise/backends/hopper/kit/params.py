"""The launch arguments that only some kernels have; both passes read them."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute

from tilewise.backends.hopper.kit.dtypes import F32, I32


class OptionalParams(NamedTuple):
    """The tensors and numbers that only some kernels have; they are None elsewhere.

    Attributes:
        o: (batch, row, head, column), where O leaves from registers and no warp stores it.
        part_o, part_lse: (split, batch, head, row, width_v) and (split, batch, head, row), fp32: the states of splits of keys.
        lo, hi: (batch, head, row), int32: the key interval of every row.
        blocks: (batch, head, query tile, step), int32: the key blocks to visit, those first that need the predicate.
        counts: (batch, head, query tile, 2), int32: how many blocks of a tile need the predicate, and how many there are.
        work, bits: the lines of tiles, the order in which they are taken, and the bits of partial tiles
            (:class:`tilewise.bit_tiles.BitTiles`), expanded to every batch element and head.
        section: (1,), int32: the heads of a section, where the tiles' lengths decide it.
        cu_q, cu_k: (sequence + 1,), int32: where packed sequences begin.
        first, last: packed sequences only: keys before ``first`` or from ``last`` on are masked in every sequence.
        queue: (1,), int32: how many tiles were taken after each CTA's first.
        seqlens_k: (sequence,), int32: keys of each sequence in pages.
        block_table: (sequence, page of the sequence), int32: pages of the pool.
        num_pages, page_rows: pages of the pool, and rows from the beginning of a page to that of the next, in K and in V.
        seed: (1,), int64: the seed of dropout.
        threshold, keep: a pair is kept where its 16-bit value is below ``threshold``; ``keep`` is the factor of a kept pair.
        slopes: (heads_q,), fp32: the slopes of ALiBi (:mod:`tilewise.backends.hopper.kit.slopes`).
        line: (1 or heads_q, distance), fp32: biases by distance i - j from ``start`` on, in base 2
            (:mod:`tilewise.backends.hopper.kit.lines`).
        bias: (batch or 1, heads_q or 1, row, key): a bias by pair (:mod:`tilewise.backends.hopper.kit.pair_bias`).
        dbias: fp32, written by the pass over keys: the parts of the gradient of each head's slope, (batch, heads_q, warp), or of its line,
            (slot, heads_q, distance); or the gradient of a bias by pair, as the bias lies.
        resumes, suspends: of a launch that has some of the keys: not 0 where earlier keys have left sums of dQ, and where later ones
            follow.
        whole, parts, part_heads, block_bits: how CTAs share key tiles (:class:`tilewise.backends.hopper.backward.parts.Division`).
        leaves, numbers: the tensors and numbers that expressions read; of a softcap,
            those of :func:`tilewise.backends.hopper.capped.numbers`.
    """

    o: cute.Tensor | None = None
    # Split keys write these instead of o and lse, and the second kernel reads them.
    part_o: cute.Tensor | None = None
    part_lse: cute.Tensor | None = None
    # Form `rows` has lo and hi, form `lists` these, blocks and counts, form `bits` blocks, work, bits and section; others compute the
    # ends from the band's numbers.
    lo: cute.Tensor | None = None
    hi: cute.Tensor | None = None
    blocks: cute.Tensor | None = None
    counts: cute.Tensor | None = None
    work: cute.Tensor | None = None
    bits: cute.Tensor | None = None
    section: cute.Tensor | None = None
    # Packed sequences; form `bits` has the queue too.
    cu_q: cute.Tensor | None = None
    cu_k: cute.Tensor | None = None
    first: I32 | None = None
    last: I32 | None = None
    queue: cute.Tensor | None = None
    # Keys in pages, which have cu_q and the queue too.
    seqlens_k: cute.Tensor | None = None
    block_table: cute.Tensor | None = None
    num_pages: I32 | None = None
    page_rows: I32 | None = None
    # Dropout; the seed is read on the device, so that a captured graph draws anew.
    seed: cute.Tensor | None = None
    threshold: I32 | None = None
    keep: F32 | None = None
    slopes: cute.Tensor | None = None
    dbias: cute.Tensor | None = None
    line: cute.Tensor | None = None
    start: I32 | None = None
    bias: cute.Tensor | None = None
    resumes: I32 | None = None
    suspends: I32 | None = None
    whole: I32 | None = None
    parts: I32 | None = None
    part_heads: I32 | None = None
    block_bits: I32 | None = None
    leaves: tuple | None = None
    numbers: tuple | None = None
