"""The state of every tile of a mask, empty, partial or full, and the keys that some query sees, in one launch.

Each program judges some query tiles of one key tile, one after the other, by blocks of its keys. A block is first
judged by what costs little: by its columns' intervals ``[first, last)``, and where the predicate rises or falls by its
values at the block's corners (``FACTS.some``, ``FACTS.every``). Only where these do not tell is the predicate
evaluated, for every ``step``-th row: on ``step`` rows from there it is the same.

                 n0                              n_end
            m0   +----------+----------+-----------+
                 |  block   |  block   |  block    |     a block: BLOCK_N keys, its pairs in steps of BLOCK_M rows
           m_end +----------+----------+-----------+
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from tilewise import expr
from tilewise.backends.triton.kernels.arguments import WorkTile
from tilewise.backends.triton.kernels.mask import key_interval, query_interval
from tilewise.backends.triton.kernels.maths import plain

BLOCK_N = tl.constexpr(128)
GROUPS = tl.constexpr(64)  # of keys, that a program judges side by side where a pattern's blocks hold many keys
NO_ENTRY, LAST_ENTRY = tl.constexpr(expr.NO_ENTRY), tl.constexpr(expr.WRONG_ENTRY - 1)


class MapTensors(NamedTuple):
    """The pointers of a launch.

    Attributes:
        status: uint8 (batch, heads, query tiles, key tiles), written: 0 for empty, 1 for partial, 2 for full.
        seen: uint8 (batch, seen_heads, seqlen_k), zeros; 1 is written for each key that some query sees. None where
            nobody asks.
        b, h: int64, the batch elements and the query heads that the first two axes of ``status`` stand for.
        leaves: the tensors that the mask reads.
    """

    status: Any
    seen: Any
    b: Any
    h: Any
    leaves: Any


class MapSizes(NamedTuple):
    """The whole numbers of a launch, passed as those of :class:`arguments.Sizes`.

    Attributes:
        heads: of ``status``, each that of ``alike`` query heads. seen_heads: of ``seen``; each is that of ``group`` heads.
        tile_m, tile_n: queries and keys of a tile; any numbers.
        step: the predicate is the same for queries of one ``i // step``; it divides tile_m.
        span: query tiles of a program.
        extents: size and stride of each axis, for each leaf.
    """

    heads: int
    seen_heads: int
    group: int
    alike: int
    seqlen_q: int
    seqlen_k: int
    tile_m: int
    tile_n: int
    step: int
    span: int
    extents: tuple


@triton.jit
def tile_map_kernel(tensors, sizes, numbers, FACTS: tl.constexpr):
    """Judges ``span`` query tiles of one key tile.

    Grid: (batch * heads * spans * key tiles); the key tile changes first.

    Args:
        numbers: those of the mask's expressions.
    """
    pid = tl.program_id(0)
    seqlen_q, seqlen_k = plain(sizes.seqlen_q), plain(sizes.seqlen_k)
    tile_m, tile_n, heads = plain(sizes.tile_m), plain(sizes.tile_n), plain(sizes.heads)
    tiles_m, tiles_n, span = tl.cdiv(seqlen_q, tile_m), tl.cdiv(seqlen_k, tile_n), plain(sizes.span)
    n, chunk = pid % tiles_n, pid // tiles_n
    spans = tl.cdiv(tiles_m, span)
    first_m, outer = chunk % spans * span, chunk // spans
    # The grid may be a part of the batch and of the heads; expressions see the indices in the whole.
    b, head = (
        tl.load(tensors.b + outer // heads).to(tl.int32),
        tl.load(tensors.h + outer % heads * plain(sizes.alike)).to(tl.int32),
    )
    work = whole_sequence(b, tensors, sizes, numbers)
    n_end = tl.minimum((n + 1) * tile_n, seqlen_k)
    # The columns' intervals are the same for all tiles of the span: after the first they come from L1.
    for m in range(first_m, tl.minimum(first_m + span, tiles_m)):
        m0 = m * tile_m
        m_end = tl.minimum(m0 + tile_m, seqlen_q)
        some, every = m0 * 0, m0 * 0 + 1
        # A loop of run time over blocks of one size: one compiled kernel serves tiles of every size.
        for n0 in range(n * tile_n, n_end, BLOCK_N):
            seen, whole = judged_block(m0, m_end, n0, n_end, head, work, plain(sizes.step), FACTS)
            some, every = tl.maximum(some, tl.max(seen.to(tl.int32), 0)), tl.minimum(every, whole)
            if tensors.seen is not None:
                of_head = outer // heads * plain(sizes.seen_heads) + outer % heads // plain(sizes.group)
                # Other tiles of these keys store the same 1: in whichever order, the result is one.
                keys = n0 + tl.arange(0, BLOCK_N)
                tl.store(tensors.seen + of_head.to(tl.int64) * seqlen_k + keys, 1, mask=seen)
        tl.store(tensors.status + (outer * tiles_m + m).to(tl.int64) * tiles_n + n, some + tl.minimum(some, every))


@triton.jit
def whole_sequence(b, tensors, sizes, numbers):
    """The WorkTile of batch element b, for the emitted functions: they read lengths, tensors and numbers of it."""
    return sequence_of(b, 0, plain(sizes.seqlen_q), plain(sizes.seqlen_k), tensors, sizes, numbers)


@triton.jit
def sequence_of(b, start_q, seqlen_q, seqlen_k, tensors, sizes, numbers):
    """The same of a sequence of these lengths, whose first row of q is ``start_q``."""
    return WorkTile(
        b=b,
        block=0,
        start_q=start_q,
        start_k=0,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        leaves=tensors.leaves,
        extents=sizes.extents,
        grads=(),
        grad_extents=(),
        numbers=numbers,
        pair=(),
        heads=(),
        corner=(),
        far=(),
    )


@triton.jit
def judged_block(m0, m_end, n0, n_end, head, work, step, FACTS: tl.constexpr):
    """The judgement of the keys from n0 on, BLOCK_N of them or up to n_end, by what queries [m0, m_end) see.

    Returns:
        Whether some query sees the key, bool (BLOCK_N,); and 1 if all queries see all keys, else 0.
    """
    # The block's columns and their queries, (BLOCK_N,) each, the queries cut to the tile's.
    j = n0 + tl.arange(0, BLOCK_N)
    first, last = query_interval(j, head, work, FACTS)
    first, last = tl.maximum(first, m0), tl.minimum(last, m_end)
    seen = (j < n_end) & (first < last)
    whole = tl.min(((j >= n_end) | ((first == m0) & (last == m_end))).to(tl.int32), 0)
    open_ = tl.max(seen.to(tl.int32), 0) > 0  # whether pairs have to be asked
    if FACTS.some is not None:
        # At a million keys most tiles are decided here: the time is that of tiles, not of pairs.
        i_last, j_first = m_end - 1, n_end * 0 + n0
        j_last = tl.minimum(n0 + BLOCK_N, n_end) - 1
        possible = tl.where(FACTS.some(work.b, head, m0, i_last, j_first, j_last, work), 1, 0)
        certain = tl.where(FACTS.every(work.b, head, m0, i_last, j_first, j_last, work), 1, 0)
        seen, whole = seen & (possible > 0), whole * possible
        open_ = open_ & (possible > certain)
    if FACTS.keep is None:
        whole = whole * tl.max(seen.to(tl.int32), 0)
    elif open_:
        if whole > 0:  # no interval hides a pair, and columns for which the predicate is the same are one
            groups = n0 + tl.arange(0, BLOCK_N // FACTS.alike) * FACTS.alike
            some, kept = kept_groups(m0, m_end, groups, head, work, step, FACTS)
            some, kept = of_keys(some, FACTS.alike), of_keys(kept, FACTS.alike)
        else:
            some, kept = kept_pairs(m0, m_end, n0, first, last, head, work, step, FACTS)
        seen = some & (j < n_end)
        whole = whole * tl.min((kept | (j >= n_end)).to(tl.int32), 0)
    else:
        # No pair is reached, or all that intervals leave are kept.
        whole = whole * tl.max(seen.to(tl.int32), 0)
    return seen, whole


@triton.jit
def kept_pairs(m0, m_end, n0, first, last, head, work, step, FACTS: tl.constexpr):
    """The predicate of queries [m0, m_end) and the BLOCK_N keys from n0 on, of every ``step``-th query.

    Args:
        first, last: the queries that see each key, within m0 and m_end.

    Returns:
        Whether the predicate holds for some query of [first, last), and for all of [m0, m_end): bool (BLOCK_N,) each.
    """
    # By elements, (block_m, BLOCK_N): what crosses threads and warps is asked once, after the last rows.
    some = tl.full([FACTS.block_m, BLOCK_N], 0, tl.int1)
    every = tl.full([FACTS.block_m, BLOCK_N], 1, tl.int1)
    groups = n0 + tl.arange(0, BLOCK_N // FACTS.alike) * FACTS.alike
    for row in range(m0, m_end, FACTS.block_m * step):
        i = row + tl.arange(0, FACTS.block_m)[:, None] * step
        kept = kept_of_groups(i, groups, head, work, FACTS)
        kept = tl.broadcast_to(kept[:, :, None], [FACTS.block_m, BLOCK_N // FACTS.alike, FACTS.alike])
        kept = tl.reshape(kept, [FACTS.block_m, BLOCK_N]) & (i < m_end)
        # The rows [i, i + step) for which this pair stands meet the column's interval.
        reached = (first[None, :] < i + step) & (last[None, :] > i) & (first < last)[None, :]
        some |= kept & reached
        every &= kept | (i >= m_end)
    return tl.max(some.to(tl.int32), 0) > 0, tl.min(every.to(tl.int32), 0) > 0


@triton.jit
def kept_groups(m0, m_end, groups, head, work, step, FACTS: tl.constexpr):
    """:func:`kept_pairs` where all queries reach all keys, of groups of keys that begin with ``groups``: bool (groups,) each."""
    some = tl.full([FACTS.many, groups.shape[0]], 0, tl.int1)
    every = tl.full([FACTS.many, groups.shape[0]], 1, tl.int1)
    for row in range(m0, m_end, FACTS.many * step):
        i = row + tl.arange(0, FACTS.many)[:, None] * step
        kept = kept_of_groups(i, groups, head, work, FACTS)
        some |= kept & (i < m_end)
        every &= kept | (i >= m_end)
    return tl.max(some.to(tl.int32), 0) > 0, tl.min(every.to(tl.int32), 0) > 0


@triton.jit
def kept_of_groups(i, groups, head, work, FACTS: tl.constexpr):
    """Whether the predicate keeps the pairs of queries ``i``, (rows, 1), and each group of keys, for which it is the same: (rows, groups),
    whichever of i and j the predicate knows."""
    j = groups[None, :]
    return FACTS.keep(work.b, head, i, j, work) & (i >= 0) & (j >= 0)


@triton.jit
def of_keys(groups, ALIKE: tl.constexpr):
    """The value of each key, (BLOCK_N,), of those of groups of ALIKE keys."""
    return tl.reshape(tl.broadcast_to(groups[:, None], [BLOCK_N // ALIKE, ALIKE]), [BLOCK_N])


@triton.jit
def tile_pattern_kernel(tensors, sizes, numbers, FACTS: tl.constexpr):
    """:func:`tile_map_kernel` for one query tile and GROUPS groups of keys, of FACTS.groups each key tile consists. Intervals hide no pair.

    Grid: (batch * heads * query tiles * spans of key tiles); the span changes first.
    """
    seqlen_q, seqlen_k = plain(sizes.seqlen_q), plain(sizes.seqlen_k)
    tile_m, tile_n, heads = plain(sizes.tile_m), plain(sizes.tile_n), plain(sizes.heads)
    span: tl.constexpr = GROUPS // FACTS.groups
    tiles_m, tiles_n = tl.cdiv(seqlen_q, tile_m), tl.cdiv(seqlen_k, tile_n)
    spans, row = tl.cdiv(tiles_n, span), tl.program_id(0) // tl.cdiv(tiles_n, span)
    n, m, outer = tl.program_id(0) % spans * span, row % tiles_m, row // tiles_m
    b, head = (
        tl.load(tensors.b + outer // heads).to(tl.int32),
        tl.load(tensors.h + outer % heads * plain(sizes.alike)).to(tl.int32),
    )
    work = whole_sequence(b, tensors, sizes, numbers)
    j = n * tile_n + tl.arange(0, GROUPS) * FACTS.alike
    m_end = tl.minimum((m + 1) * tile_m, seqlen_q)
    some, every = kept_groups(m * tile_m, m_end, j, head, work, plain(sizes.step), FACTS)
    some, every = some & (j < seqlen_k), every | (j >= seqlen_k)
    if tensors.seen is not None:
        of_head = outer // heads * plain(sizes.seen_heads) + outer % heads // plain(sizes.group)
        keys = j[:, None] + tl.arange(0, FACTS.alike)[None, :]
        tl.store(tensors.seen + of_head.to(tl.int64) * seqlen_k + keys, 1, mask=some[:, None] & (keys < seqlen_k))
    some = tl.max(tl.reshape(some.to(tl.int32), [span, FACTS.groups]), 1)
    every = tl.min(tl.reshape(every.to(tl.int32), [span, FACTS.groups]), 1)
    at = n + tl.arange(0, span)
    tl.store(tensors.status + row.to(tl.int64) * tiles_n + at, some + tl.minimum(some, every), mask=at < tiles_n)


# -- Ends of intervals ---------------------------------------------------------------------------------------------


class EndsTensors(NamedTuple):
    """The pointers of a launch.

    Attributes:
        start, end: int64 (batch, heads, lines), written: the keys ``[start, end)`` that each query of ``lines`` sees, or
            the queries that see each key.
        lines: int64, the queries or the keys that are asked for.
        b, h, leaves: as in :class:`MapTensors`.
    """

    start: Any
    end: Any
    lines: Any
    b: Any
    h: Any
    leaves: Any


class EndsSizes(NamedTuple):
    """The whole numbers of a launch, passed as those of :class:`arguments.Sizes`; ``count``: how many lines there are."""

    heads: int
    count: int
    seqlen_q: int
    seqlen_k: int
    extents: tuple


@triton.jit
def ends_kernel(tensors, sizes, numbers, FACTS: tl.constexpr):
    """Writes the ends of the intervals of BLOCK_N lines.

    Grid: (batch * heads, blocks of lines).
    """
    outer, heads, count = tl.program_id(0), plain(sizes.heads), plain(sizes.count)
    b, head = tl.load(tensors.b + outer // heads).to(tl.int32), tl.load(tensors.h + outer % heads).to(tl.int32)
    work = whole_sequence(b, tensors, sizes, numbers)
    at = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = tl.load(tensors.lines + at, mask=at < count, other=0).to(tl.int32)
    if FACTS.by_columns:
        start, end = query_interval(line, head, work, FACTS)
    else:
        start, end = key_interval(line, head, work, FACTS)
    # 64-bit offsets: heads times lines may pass 2**31.
    to = outer.to(tl.int64) * count + at
    tl.store(tensors.start + to, start.to(tl.int64), mask=at < count)
    tl.store(tensors.end + to, end.to(tl.int64), mask=at < count)


# -- The keys that all queries of a batch element see --------------------------------------------------------------


class KeysTensors(NamedTuple):
    """The pointers of a launch.

    Attributes:
        made: int32 (2, ``apart``), written: what :meth:`tilewise.planning.planner.Planner.starts`, ``own_keys`` or ``runs`` says.
        leaves: as in :class:`MapTensors`.
    """

    made: Any
    leaves: Any


class KeysSizes(NamedTuple):
    """The whole numbers of a launch, passed as those of :class:`arguments.Sizes`.

    Attributes:
        apart: numbers of a line of what is written. parts: the sequences that a batch element becomes.
        rows: of k, from those of one batch element to those of the next.
    """

    apart: int
    parts: int
    rows: int
    seqlen_q: int
    seqlen_k: int
    extents: tuple


@triton.jit
def starts_kernel(tensors, sizes, numbers, FACTS: tl.constexpr):
    """Writes where the sequences of one batch element begin: the keys before those seen, if there may be any, without a query; then all
    queries; and after them none. Grid: (batch)."""
    b, parts = tl.program_id(0), plain(sizes.parts)
    work = whole_sequence(b, tensors, sizes, numbers)
    lo, hi = key_interval(b * 0, b * 0, work, FACTS)
    row, key = b * work.seqlen_q, b * plain(sizes.rows)
    rows = tensors.made + b * parts
    keys = rows + plain(sizes.apart)
    tl.store(rows, row)
    tl.store(keys, key)
    tl.store(rows + 1, row, mask=parts > 2)
    tl.store(keys + 1, key + lo, mask=parts > 2)
    tl.store(rows + parts - 1, row + work.seqlen_q)
    tl.store(keys + parts - 1, key + tl.maximum(lo, hi))
    if b == tl.num_programs(0) - 1:
        tl.store(rows + parts, row + work.seqlen_q)
        tl.store(keys + parts, key + plain(sizes.rows))


@triton.jit
def own_keys_kernel(tensors, sizes, numbers, FACTS: tl.constexpr):
    """Writes the row of the first key that the first query of one batch element sees, and how many it sees. Grid: (batch)."""
    b = tl.program_id(0)
    work = whole_sequence(b, tensors, sizes, numbers)
    lo, hi = key_interval(b * 0, b * 0, work, FACTS)
    tl.store(tensors.made + b, b * plain(sizes.rows) + lo)
    tl.store(tensors.made + plain(sizes.apart) + b, tl.maximum(hi - lo, 0))


# -- Runs of equal numbers ---------------------------------------------------------------------------------------------

RUNS = tl.constexpr(1024)  # places that a program looks at at a time (docs/decisions.md#repeated-calls)


class RunsSizes(NamedTuple):
    """The whole numbers of a launch, passed as those of :class:`arguments.Sizes`; ``apart``: numbers of a half of what is written; places
    of a batch element; strides of the numbers' two axes."""

    apart: int
    places: int
    strides: tuple


@triton.jit
def runs_kernel(tensors, sizes, numbers, FACTS: tl.constexpr):
    """Writes the runs around RUNS places of a row of numbers. One whose run passes the block looks for its ends in the blocks beside it,
    one after the other. Grid: (batch * blocks)."""
    places = plain(sizes.places)
    blocks = tl.cdiv(places, RUNS)
    b, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * RUNS
    x = tensors.leaves[0] + b.to(tl.int64) * plain(sizes.strides[0])
    at = first + tl.arange(0, RUNS)
    start = tl.associative_scan(tl.where(run_begins(x, at, sizes), at, -1), 0, larger)
    end = tl.where(run_begins(x, at + 1, sizes), at + 1, places + 1)
    end = -tl.associative_scan(-end, 0, larger, reverse=True)
    before, behind = tl.min(start, 0), tl.max(tl.where(at < places, end, 0), 0)
    look = first
    while before < 0:
        look -= RUNS
        other = look + tl.arange(0, RUNS)
        before = tl.max(tl.where(run_begins(x, other, sizes), other, -1), 0)
    look = first
    while behind > places:
        look += RUNS
        other = look + 1 + tl.arange(0, RUNS)
        behind = tl.min(tl.where(run_begins(x, other, sizes), other, places + 1), 0)
    to = tensors.made + b.to(tl.int64) * places + at
    tl.store(to, tl.where(start < 0, before, start), mask=at < places)
    tl.store(to + plain(sizes.apart), tl.where(end > places, behind, end), mask=at < places)


@triton.jit
def run_begins(x, at, sizes):
    """Whether a run begins at each place; one does at place 0, and one past the last place."""
    places, step = plain(sizes.places), plain(sizes.strides[1])
    inner = (at > 0) & (at < places)
    here = tl.load(x + at.to(tl.int64) * step, mask=inner, other=0)
    before = tl.load(x + (at - 1).to(tl.int64) * step, mask=inner, other=0)
    return (at == 0) | (at == places) | (inner & (here != before))


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


# -- Lists of keys (docs/decisions.md#hopper-gathers) ---------------------------------------------------------------------


class SortedSizes(NamedTuple):
    """The whole numbers of a launch, passed as those of :class:`arguments.Sizes`; rows of a head, entries of a row, and the strides of
    batch elements, heads, rows and entries."""

    heads: int
    rows: int
    entries: int
    strides: tuple


@triton.jit
def sorted_entries_kernel(tensors, sizes, numbers, FACTS: tl.constexpr):
    """Writes one row of entries in order, as :func:`tilewise.masks.catalogue.selected` keeps them. Grid: (batch · heads · rows)."""
    row, entries = tl.program_id(0), plain(sizes.entries)
    at = tl.arange(0, FACTS.width)
    x = tl.load(entry_of_row(row, at, tensors, sizes), mask=at < entries, other=-1)
    # Without their sign -1 and -2, which stands for all below it, are the largest numbers.
    x = tl.minimum(tl.maximum(x, -2), LAST_ENTRY).to(tl.int32) & NO_ENTRY
    tl.store(tensors.made + row.to(tl.int64) * entries + at, tl.sort(x), mask=at < entries)


@triton.jit
def entry_of_row(row, at, tensors, sizes):
    """Where entries of a row lie."""
    rows, heads, strides = plain(sizes.rows), plain(sizes.heads), sizes.strides
    start = (row // rows // heads).to(tl.int64) * plain(strides[0])
    start += (row // rows % heads).to(tl.int64) * plain(strides[1]) + (row % rows).to(tl.int64) * plain(strides[2])
    return tensors.leaves[0] + start + at.to(tl.int64) * plain(strides[3])


class MarkedSizes(NamedTuple):
    """As :class:`SortedSizes`, and how many blocks of keys there are."""

    heads: int
    rows: int
    entries: int
    strides: tuple
    blocks: int


@triton.jit
def marked_rows_kernel(tensors, sizes, numbers, FACTS: tl.constexpr):
    """Writes which blocks the entries of one row name (:func:`tilewise.selections.by_marks`). Grid: (batch · heads · rows)."""
    row, blocks, entries = tl.program_id(0), plain(sizes.blocks), plain(sizes.entries)
    marks = tensors.made + row.to(tl.int64) * blocks
    for first in range(0, blocks, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        tl.store(marks + at, 0, mask=at < blocks)
    tl.debug_barrier()  # another thread may mark a block
    for first in range(0, entries, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        block = tl.load(entry_of_row(row, at, tensors, sizes), mask=at < entries, other=-1)
        tl.store(marks + block, 1, mask=(block >= 0) & (block < blocks))


class LinesTensors(NamedTuple):
    """The pointers of a launch.

    Attributes:
        made: int32 (row of q, key head, 4), written: the lines of :func:`tilewise.backends.listed.lines`.
        cu_q, cu_k: whole numbers (batch + 1), where packed sequences begin; None: all are as long, or their keys lie in pages.
        lengths: whole numbers (batch,), keys of sequences in pages, or None.
        leaves: as in :class:`MapTensors`.
    """

    made: Any
    cu_q: Any
    cu_k: Any
    lengths: Any
    leaves: Any


class LinesSizes(NamedTuple):
    """The whole numbers of a launch, passed as those of :class:`arguments.Sizes`; rows of q of all sequences, the number of lists."""

    batch: int
    heads_k: int
    group: int
    rows: int
    lists: int
    seqlen_q: int
    seqlen_k: int
    extents: tuple


@triton.jit
def list_lines_kernel(tensors, sizes, numbers, FACTS: tl.constexpr):
    """Writes the lines of some queries of a sequence for one key head. ``FACTS.first``: the number of a query's list.

    Grid: (sequences · key heads, programs of a sequence); packed, there is one sequence more, of the rows that belong to nobody.
    """
    heads, batch, rows = plain(sizes.heads_k), plain(sizes.batch), plain(sizes.rows)
    b, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    # The key heads' first query heads: a mask's ends are the same for all.
    queries, keys, of_group = plain(sizes.seqlen_q), plain(sizes.seqlen_k), head * plain(sizes.group)
    start, origin = b * queries, b * keys
    if tensors.cu_q is not None:
        start = tl.load(tensors.cu_q + b).to(tl.int32)
        queries = tl.load(tensors.cu_q + b + 1, mask=b < batch, other=rows).to(tl.int32) - start
    if tensors.lengths is not None:
        keys = tl.load(tensors.lengths + b, mask=b < batch, other=0).to(tl.int32)
        keys, origin = tl.minimum(tl.maximum(keys, 0), plain(sizes.seqlen_k)), tl.minimum(b, batch - 1)
    elif tensors.cu_k is not None:
        origin = tl.load(tensors.cu_k + b).to(tl.int32)
        keys = tl.load(tensors.cu_k + b + 1, mask=b < batch, other=0).to(tl.int32) - origin
        keys = tl.where(b < batch, keys, 0)
    work = sequence_of(tl.minimum(b, batch - 1), start, queries, keys, tensors, sizes, numbers)
    for first in range(tl.program_id(1) * BLOCK_N, queries, tl.num_programs(1) * BLOCK_N):
        i = first + tl.arange(0, BLOCK_N)
        lo, hi = key_interval(i, of_group, work, FACTS)
        place = i * 0 + FACTS.first(work.b, of_group, i, work)
        place = tl.minimum(tl.maximum(place, 0), plain(sizes.lists) - 1)
        row = start + i
        to, inside = tensors.made + (row.to(tl.int64) * heads + head) * 4, (i < queries) & (row >= 0) & (row < rows)
        tl.store(to, i * 0 + origin, mask=inside)
        tl.store(to + 1, place, mask=inside)
        tl.store(to + 2, lo, mask=inside)
        tl.store(to + 3, tl.where(b < batch, hi, -1), mask=inside)
