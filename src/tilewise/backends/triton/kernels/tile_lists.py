"""The lists of the tiles that each line of tiles visits, and the order of lines, from the state of every tile
(:mod:`tilewise.planning.bit_tiles`).

A line of tiles is a query tile with all key tiles, or the other way round. The first kernel lists the tiles of a line, partial ones
first, and counts them. Where an order is wanted, a second one compares the counts of all lines of a head: which line comes where, and
where its bits lie. One of its programs also says from all counts how many heads a section has.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.maths import plain
from tilewise.planning import bit_tiles

LATE = tl.constexpr(bit_tiles.LATE)
BLOCK = tl.constexpr(256)  # tiles, or lines, that a program looks at at a time


class ListTensors(NamedTuple):
    """The pointers of both launches; the first kernel alone needs neither ``work`` nor ``bits`` nor ``section``.

    Attributes:
        status: uint8 (batch, heads, query tiles, key tiles), contiguous.
        counts: int32 (batch, heads, lines, 2): how many partial tiles a line visits, and how many tiles. The first kernel writes them.
        blocks, work, bits, section: those of :class:`tilewise.planning.bit_tiles.BitTiles`, written; of ``bits`` the first two slots.
        b: any tensor of the launch's device.
        leaves: none.
    """

    status: Any
    counts: Any
    blocks: Any
    work: Any
    bits: Any
    section: Any
    b: Any
    leaves: Any


class ListSizes(NamedTuple):
    """The whole numbers of both launches, passed as those of :class:`arguments.Sizes`.

    Attributes:
        heads: of lists; ``group`` of them have one order of lines, and ``alike`` of them one state.
        lines, steps: how many lines there are, and tiles in a line.
        empty: the first tile in the list of a line that visits nothing.
        ragged: whether keys past the last one are in the last key tiles, which then count as partial: 1 or 0.
        most: the slots of a head's bits. words: of a slot.
        all_heads, least, ctas: those of :class:`tilewise.planning.bit_tiles.Sections`.
    """

    heads: int
    group: int
    alike: int
    lines: int
    steps: int
    empty: int
    ragged: int
    most: int
    words: int
    all_heads: int
    least: int
    ctas: int


@triton.jit
def tile_lists_kernel(tensors, sizes, numbers, FACTS: tl.constexpr):
    """Lists and counts the tiles of one line. Grid: (batch * heads * lines)."""
    pid, lines, steps = tl.program_id(0), plain(sizes.lines), plain(sizes.steps)
    outer, line = pid // lines, pid % lines
    status = tensors.status + (outer // plain(sizes.alike) * lines).to(tl.int64) * steps
    partial, count = line * 0, line * 0
    # Twice over the line: where full tiles begin is known only when partial ones are counted.
    for start in range(0, steps, BLOCK):
        state = states(status, line, start, sizes, FACTS)
        partial += tl.sum((state == 1).to(tl.int32), 0)
        count += tl.sum((state > 0).to(tl.int32), 0)
    blocks = tensors.blocks + pid.to(tl.int64) * steps
    to_partial, to_full = line * 0, partial
    for start in range(0, steps, BLOCK):
        state = states(status, line, start, sizes, FACTS)
        # (BLOCK,) each: 1 where the tile is of the kind; its place follows from how many of the kind come before it.
        is_partial, is_full = (state == 1).to(tl.int32), (state == 2).to(tl.int32)
        place = tl.where(state == 1, to_partial + tl.cumsum(is_partial, 0), to_full + tl.cumsum(is_full, 0)) - 1
        tl.store(blocks + place, start + tl.arange(0, BLOCK), mask=state > 0)
        to_partial += tl.sum(is_partial, 0)
        to_full += tl.sum(is_full, 0)
    tl.store(blocks, plain(sizes.empty), mask=(count == 0) & (steps > 0))
    counts = tensors.counts + pid.to(tl.int64) * 2
    tl.store(counts, partial)
    tl.store(counts + 1, count)


@triton.jit
def states(status, line, start, sizes, FACTS: tl.constexpr):
    """The states of the line's tiles from ``start`` on, int32 (BLOCK,); empty past the last."""
    lines, steps, step = plain(sizes.lines), plain(sizes.steps), start + tl.arange(0, BLOCK)
    # A line of keys is a column of the states; whether its last keys are past the end is the same for the whole line.
    if FACTS.by_columns:
        place, last = step.to(tl.int64) * lines + line, line == lines - 1 + step * 0
    else:
        place, last = line.to(tl.int64) * steps + step, step == steps - 1
    state = tl.load(status + place, mask=step < steps, other=0).to(tl.int32)
    return tl.where(last & (plain(sizes.ragged) > 0), tl.minimum(state, 1), state)


@triton.jit
def tile_order_kernel(tensors, sizes, numbers, FACTS: tl.constexpr):
    """Writes the work of one line, and its place in the order. Grid: (batch * heads * lines)."""
    pid, lines = tl.program_id(0), plain(sizes.lines)
    outer, line = pid // lines, pid % lines
    counts = tensors.counts + pid.to(tl.int64) * 2
    partial, count = tl.load(counts), tl.load(counts + 1)
    # A block of one line again and again, so that the lines' function is compiled once.
    own = tl.max(visited(outer, line + tl.arange(0, BLOCK) * 0, tensors, sizes), 0)
    rank, before = line * 0, line * 0
    for start in range(0, lines, BLOCK):
        other = start + tl.arange(0, BLOCK)
        # (BLOCK,): lines that visit more come first, and of equal ones the earlier.
        theirs = visited(outer, other, tensors, sizes)
        rank += tl.sum(((theirs > own) | ((theirs == own) & (other < line))).to(tl.int32), 0)
        place = tensors.counts + ((outer * lines).to(tl.int64) + other) * 2
        before += tl.sum(tl.load(place, mask=other < line, other=0), 0)
    # Slots 0 and 1 have no pair and every pair (bit_tiles.NOTHING, EVERYTHING).
    first = 2 + outer // plain(sizes.alike) * plain(sizes.most) + before
    first = tl.where(partial > 0, first, tl.where(count > 0, 1, 0))
    if not FACTS.by_columns:
        partial, count = tl.maximum(partial, 1), tl.maximum(count, 1)
    work = tensors.work + pid.to(tl.int64) * 4
    tl.store(work + 1, partial)
    tl.store(work + 2, count)
    tl.store(work + 3, first)
    tl.store(tensors.work + ((outer * lines).to(tl.int64) + rank) * 4, line)
    if pid == 0:
        # One program writes the bits of no pair, all 0, and of every pair, all 1.
        words = plain(sizes.words)
        for start in range(0, 2 * words, BLOCK):
            word = start + tl.arange(0, BLOCK)
            tl.store(tensors.bits + word, tl.where(word < words, 0, -1), mask=word < 2 * words)
        tl.store(tensors.section, even_section(tensors, sizes, FACTS))


@triton.jit
def even_section(tensors, sizes, FACTS: tl.constexpr):
    """The heads of a section, int32: :func:`tilewise.planning.bit_tiles.even_section` of the counts of all lines."""
    lines, group = plain(sizes.lines), plain(sizes.group)
    apart, heads = tl.num_programs(0) // lines, plain(sizes.all_heads).to(tl.int64)
    longest, total = lines * 0, heads * 0
    for outer in range(0, apart, group):
        for start in range(0, lines, BLOCK):
            line = start + tl.arange(0, BLOCK)
            # Every line of queries visits a tile.
            least: tl.constexpr = 0 if FACTS.by_columns else 1
            found = tl.where(line < lines, tl.maximum(visited(outer, line, tensors, sizes), least), 0)
            longest = tl.maximum(longest, tl.max(found, 0))
            total += tl.sum(found, 0)
    over = longest.to(tl.int64) * plain(sizes.ctas) * (apart // group) * LATE - total * heads
    sections = tl.maximum(total * heads * LATE // tl.maximum(over, heads * LATE), 1)
    return tl.maximum((heads + sections - 1) // sections, plain(sizes.least)).to(tl.int32)


@triton.jit
def visited(outer, line, tensors, sizes):
    """How many tiles all heads of the group visit in these lines, int32; -1 past the last line."""
    lines, group, found = plain(sizes.lines), plain(sizes.group), line * 0
    for head in range(outer // group * group, outer // group * group + group):
        place = tensors.counts + ((head * lines).to(tl.int64) + line) * 2 + 1
        found += tl.load(place, mask=line < lines, other=0)
    return tl.where(line < lines, found, -1)
