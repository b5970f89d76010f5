"""A bit for each pair of a mask's partial tiles, in the order of the threads that read them (:mod:`tilewise.planning.bit_tiles`)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.mask import key_interval, query_interval
from tilewise.backends.triton.kernels.maths import plain
from tilewise.backends.triton.kernels.tile_map import whole_sequence

WORDS = tl.constexpr(128)  # of 32 bits, that a program makes at a time


class BitTensors(NamedTuple):
    """The pointers of a launch.

    Attributes:
        bits: int32 (slot, 256, words), written.
        blocks, work: those of :class:`tilewise.planning.bit_tiles.BitTiles`, contiguous.
        b, h, leaves: as in :class:`tile_map.MapTensors`.
    """

    bits: Any
    blocks: Any
    work: Any
    b: Any
    h: Any
    leaves: Any


class BitSizes(NamedTuple):
    """The whole numbers of a launch, passed as those of :class:`arguments.Sizes`.

    Attributes:
        heads: of ``work``, one of ``alike`` side by side that have the same bits. lines: of tiles. steps: of ``blocks``. slots: of
            ``bits``. programs: of a line.
        extents: size and stride of each axis, for each leaf.
    """

    heads: int
    alike: int
    lines: int
    steps: int
    slots: int
    programs: int
    seqlen_q: int
    seqlen_k: int
    extents: tuple


@triton.jit
def tile_bits_kernel(tensors, sizes, numbers, FACTS: tl.constexpr):
    """Writes the bits of some partial tiles of one line, of 128 lines by ``FACTS.crossing`` each.

    Grid: (batch * heads * lines * programs); a line's programs, which take its tiles in turn, change first. ``FACTS.by_columns``: lines are
    of keys, not of queries.
    """
    steps, lines, heads, programs = plain(sizes.steps), plain(sizes.lines), plain(sizes.heads), plain(sizes.programs)
    pid = tl.program_id(0)
    each = pid // programs
    outer, line = each // lines, each % lines
    each = outer * plain(sizes.alike) * lines + line
    work = tensors.work + each.to(tl.int64) * 4
    partial, first = tl.load(work + 1), tl.load(work + 3)
    b, head = (
        tl.load(tensors.b + outer // heads).to(tl.int32),
        tl.load(tensors.h + outer % heads * plain(sizes.alike)).to(tl.int32),
    )
    # The slots of no pair and of every pair are those before slot 2; a slot past the last one would be a wrong bound.
    stop = tl.where(first > 1, tl.minimum(partial, plain(sizes.slots) - first), 0)
    for step in range(pid % programs, stop, programs):
        block = tl.load(tensors.blocks + each.to(tl.int64) * steps + step)
        of_thread: tl.constexpr = FACTS.crossing // 64
        to = tensors.bits + (first + step).to(tl.int64) * (256 * of_thread)
        for n in range(0, 256 * of_thread, WORDS):
            found = bits_of_words(line * 128, block * FACTS.crossing, n, b, head, tensors, sizes, numbers, FACTS)
            tl.store(to + n + tl.arange(0, WORDS), found)


@triton.jit
def bits_of_words(line0, crossing0, n, b, head, tensors, sizes, numbers, FACTS: tl.constexpr):
    """The words from number n on of the tile at (line0, crossing0): int32 (WORDS,)."""
    work, word = whole_sequence(b, tensors, sizes, numbers), n + tl.arange(0, WORDS)
    line, crossing = pairs_of_bits(line0, crossing0, word, word * 0, FACTS)
    # Bits of a thread's line 0 come first: with 128 crossing lines they fill its first word.
    if FACTS.crossing == 128:
        found = bits_of_line(line, crossing, head, work, 32, FACTS)
    else:
        found = bits_of_line(line, crossing, head, work, 16, FACTS)
        found |= bits_of_line(line + 8, crossing, head, work, 16, FACTS) << 16
    if FACTS.keep is not None:
        # Where the predicate is the same for 64 lines, the words of four threads, who hold a line together, are those of all lines.
        each: tl.constexpr = 4 * (FACTS.crossing // 64) if FACTS.alike % 64 == 0 else WORDS
        first = tl.arange(0, 32 // FACTS.same)[None, :] * FACTS.same
        line, crossing = pairs_of_bits(line0, crossing0, (n + tl.arange(0, each))[:, None], first, FACTS)
        i, j = (crossing, line) if FACTS.by_columns else (line, crossing)
        i, j = tl.minimum(i, work.seqlen_q - 1), tl.minimum(j, work.seqlen_k - 1)
        kept = tl.where(
            FACTS.keep(work.b, head, i, j, work) & (first >= 0), -1 if FACTS.same == 32 else (1 << FACTS.same) - 1, 0
        )
        kept = tl.sum(kept << first, 1)
        if each < WORDS:
            kept = tl.reshape(tl.broadcast_to(kept[None, :], [WORDS // each, each]), [WORDS])
        found &= kept
    return found.to(tl.int32)


@triton.jit
def bits_of_line(line, crossing, head, work, COUNT: tl.constexpr, FACTS: tl.constexpr):
    """COUNT bits of a thread's line from its first crossing line on: those within the line's interval, and within the sequence."""
    if FACTS.by_columns:
        start, stop = query_interval(tl.minimum(line, work.seqlen_k - 1), head, work, FACTS)
        lines, stop = work.seqlen_k, tl.minimum(stop, work.seqlen_q)
    else:
        start, stop = key_interval(tl.minimum(line, work.seqlen_q - 1), head, work, FACTS)
        lines, stop = work.seqlen_q, tl.minimum(stop, work.seqlen_k)
    stop = tl.where(line < lines, stop, 0)
    return bits_before(stop - crossing, COUNT) & ~bits_before(start - crossing, COUNT)


@triton.jit
def bits_before(distance, COUNT: tl.constexpr):
    """COUNT bits, set where a thread's crossing line is less than ``distance`` behind its first: two of every eight are the thread's."""
    distance = tl.maximum(distance, 0)
    count = tl.minimum(distance // 8 * 2 + tl.minimum(distance % 8, 2), COUNT)
    return tl.where(count < 32, (1 << tl.minimum(count, 31)) - 1, -1)


@triton.jit
def pairs_of_bits(line0, crossing0, word, bit, FACTS: tl.constexpr):
    """The line and the crossing line of bits of words, by their numbers; they may lie past the last ones."""
    of_thread: tl.constexpr = FACTS.crossing // 64
    quarter: tl.constexpr = FACTS.crossing // 4  # crossing lines of a thread
    thread = word // of_thread
    if of_thread == 2:
        row, column = word % 2, bit
    else:
        row, column = bit // quarter, bit % quarter
    # Where the numbers of a wgmma accumulator lie (tilewise.planning.bit_tiles.line_of, crossing_of).
    line = line0 + thread // 128 * 64 + thread % 128 // 32 * 16 + thread % 32 // 4 + 8 * row + bit * 0
    return line, crossing0 + thread % 4 * 2 + column // 2 * 8 + column % 2
