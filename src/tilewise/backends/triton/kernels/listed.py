"""Attention over the keys that each query selected: a program for a query and some heads of a key head, which are the rows of its tiles.

A list has blocks of keys in order: place p is key ``p % block`` of entry ``p // block``. A key that stands twice is kept at its first
place. Each listed key is read once for all rows of a tile. A backward adds dK and dV up in memory, in any order. Of wide heads it leaves
dS behind, of which another kernel makes dQ, since the registers hold no sums of dQ beside it (docs/decisions.md#listed-tiles). Where v
lies in k's memory (``FACTS.latent``), its tiles are the first pieces of k's.
"""

# ruff: noqa: RET505, RUF005 - a compile-time `if` keeps its `else`: without it both returns would be compiled; and Triton's
# tuples are added, not unpacked

from typing import Any, NamedTuple

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.forward import lse_of, with_sink
from tilewise.backends.triton.kernels.maths import plain
from tilewise.backends.triton.kernels.tile import (
    LOG2E,
    accumulate,
    dot,
    dot_transposed,
    exponential,
    load_block,
    rescaled,
    shift_of_rows,
    zeros,
)

AT_ONCE = tl.constexpr(64)  # tiles of a list whose first entries are looked up at once


class ListedTensors(NamedTuple):
    """The pointers of a launch; None where a kernel has no use for one.

    Attributes:
        q, k, v: rows (token, head, column) with the strides of :class:`ListedSizes`; k and v in pages have those of all pages.
        o, do, dq: as q, contiguous.
        dk, dv: fp32 (key, key head, column), contiguous, zeros before. Without dv, dk's first columns get what belongs there.
        ds: (query and key head of this launch, query head of the key head, place), rows of whole tiles, times the scale.
        lse, dlse, delta: fp32 (batch, query head, query), packed (query head, token).
        sink: (query heads,). table: int32 (sequence, page of the sequence), pages of the pool, or None.
        entries: int32 (list, entry), each list in order. lines: int32 (query, key head, 4), as :func:`tilewise.backends.listed.lines`.
    """

    q: Any
    k: Any
    v: Any
    entries: Any
    lines: Any
    o: Any
    lse: Any
    sink: Any = None
    table: Any = None
    do: Any = None
    dlse: Any = None
    delta: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    ds: Any = None


class ListedSizes(NamedTuple):
    """The whole numbers of a launch, passed as those of :class:`arguments.Sizes`.

    Attributes:
        first: the first query and key head of this launch.
        group: query heads of a key head. tiles: of their rows. queries: of a head in lse. entries: of a list. block: keys of an entry.
        places: of a row of ds. pages: of k and v. table: its strides.
        q, k, v: ``(row, head)`` strides in units of ``FACTS.align`` elements.
    """

    first: int
    heads_k: int
    group: int
    tiles: int
    queries: int
    entries: int
    block: int
    places: int
    pages: int
    table: tuple
    q: tuple
    k: tuple
    v: tuple


class List(NamedTuple):
    """A query with its list.

    Attributes:
        number: of the query and key head in this launch. row: the query among all rows of q. head: its key head.
        first: the first of its query heads in this tile. left: how many there are.
        origin: the row of k of key 0, or the row of the table.
        at: a pointer to its entries, of which there are ``entries`` with ``block`` keys each.
        lo, hi: it sees the keys ``lo <= j < hi`` of its list; ``hi`` is -1 in rows of q past the last sequence.
    """

    number: Any
    row: Any
    head: Any
    first: Any
    left: Any
    origin: Any
    at: Any
    entries: Any
    block: Any
    lo: Any
    hi: Any


@triton.jit
def list_of(tensors, sizes, FACTS: tl.constexpr):
    """The :class:`List` of a program. Grid: (queries · key heads · tiles), tiles of one query side by side."""
    tiles, heads, entries = plain(sizes.tiles), plain(sizes.heads_k), plain(sizes.entries)
    tile, number = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    line = plain(sizes.first) + number
    told = tensors.lines + tl.cast(line, tl.int64) * 4
    at = tensors.entries + tl.cast(tl.load(told + 1), tl.int64) * entries
    first, group = tile * FACTS.tile_m, plain(sizes.group)
    head = line % heads
    return List(
        number,
        line // heads,
        head,
        head * group + first,
        group - first,
        tl.load(told),
        at,
        entries,
        plain(sizes.block),
        tl.load(told + 2),
        tl.load(told + 3),
    )


@triton.jit
def keys_at(place, line):
    """``(key, there)`` of places of a list: the key, or one past the end, and whether its entry is one and the first of its equals."""
    number = place // line.block
    inside = number < line.entries
    entry = tl.load(line.at + number, mask=inside, other=0)
    before = tl.load(line.at + number - 1, mask=inside & (number > 0), other=-1)
    # Entries are checked by no host: a product with one past the end must not go over 32 bits.
    key = tl.minimum(entry, (line.hi + line.block - 1) // line.block) * line.block + (place - number * line.block)
    return key, inside & (entry != before)


@triton.jit
def tiles_of(line, FACTS: tl.constexpr):
    """``(first, last)``: the tiles of a list that may hold a key between the ends, as their first entries tell.

    These never decrease, as first keys do where an entry stands twice.
    """
    below, before = 0, 0
    tiles = tl.cdiv(line.entries * line.block, FACTS.tile_n)
    for n in tl.range(0, tiles, AT_ONCE):
        number = (n + tl.arange(0, AT_ONCE)) * FACTS.tile_n // line.block
        there = number < line.entries
        entry = tl.load(line.at + number, mask=there, other=0)
        start = tl.minimum(entry, (line.hi + line.block - 1) // line.block) * line.block
        below += tl.sum((there & (start < line.hi)).to(tl.int32), 0)
        before += tl.sum((there & (start + line.block <= line.lo)).to(tl.int32), 0)
    first = tl.maximum(before - 1, 0)  # whose later entries may reach the first end
    return first, tl.maximum(below, first)


@triton.jit
def seen_keys(t, line, tensors, sizes, FACTS: tl.constexpr):
    """``(row of k, seen)`` of each place of a tile: int64 and bool (tile_n,)."""
    key, first = keys_at(t * FACTS.tile_n + tl.arange(0, FACTS.tile_n), line)
    seen = first & (key >= line.lo) & (key < line.hi)
    key = tl.where(seen, key, 0)
    if FACTS.page_size:
        # A number outside the pool becomes one inside.
        at = tl.cast(line.origin, tl.int64) * plain(sizes.table[0]) + key // FACTS.page_size * plain(sizes.table[1])
        page = tl.load(tensors.table + at, mask=seen, other=0).to(tl.int64)
        page = tl.minimum(tl.maximum(page, 0), plain(sizes.pages) - 1)
        return page * FACTS.page_size + key % FACTS.page_size, seen
    else:
        return tl.cast(line.origin + key, tl.int64), seen


@triton.jit
def load_rows_at(pointer, offsets, ok, OF_V: tl.constexpr, FACTS: tl.constexpr):
    """A tile of the rows at these offsets, int64 (rows,); zeros where they are not ``ok``."""
    PIECES: tl.constexpr = FACTS.pieces_v if OF_V else FACTS.pieces
    tiles = ()
    for n in tl.static_range(len(PIECES)):
        columns = tl.arange(0, PIECES[n][2])
        # The piece's start is added last: so it is a constant of the instruction, and pieces share their addresses.
        tiles = tiles + (
            load_block(pointer + offsets[:, None] + columns[None, :] + PIECES[n][0], ok, columns, PIECES[n][1]),
        )
    return tiles


@triton.jit
def load_listed(tensor, strides, rows, seen, head, OF_V: tl.constexpr, FACTS: tl.constexpr):
    """A tile of k or v: the rows of seen keys, and zeros."""
    base = tl.cast(plain(strides[1]), tl.int64) * head * FACTS.align
    return load_rows_at(tensor + base, rows * (plain(strides[0]) * FACTS.align), seen, OF_V, FACTS)


@triton.jit
def values_of(tensors, sizes, k, rows, seen, head, FACTS: tl.constexpr):
    """The tile of v beside that of k."""
    if FACTS.latent:
        PIECES: tl.constexpr = len(FACTS.pieces_v)
        v = ()
        for n in tl.static_range(PIECES):
            v = v + (k[n],)
        return v
    else:
        return load_listed(tensors.v, sizes.v, rows, seen, head, True, FACTS)


@triton.jit
def offsets_of_heads(line, strides, FACTS: tl.constexpr):
    """The offsets of a query's heads in q: int64 (tile_m,)."""
    heads = line.first + tl.arange(0, FACTS.tile_m)
    row = tl.cast(line.row, tl.int64) * plain(strides[0]) + heads.to(tl.int64) * plain(strides[1])
    return row * FACTS.align


@triton.jit
def places_of_heads(line, sizes, FACTS: tl.constexpr):
    """Where a query's heads lie: int64 (tile_m,) in tensors (row, head), and in statistics (batch, head, query)."""
    heads, heads_q = line.first + tl.arange(0, FACTS.tile_m), plain(sizes.heads_k) * plain(sizes.group)
    queries = plain(sizes.queries)
    of_row = tl.cast(line.row, tl.int64) * heads_q + heads
    return of_row, (tl.cast(line.row // queries, tl.int64) * heads_q + heads) * queries + line.row % queries


@triton.jit
def store_heads(pointer, places, tiles, ok, WIDTH: tl.constexpr, OF_V: tl.constexpr, FACTS: tl.constexpr):
    """Stores a tile of a query's heads, in rows of WIDTH columns."""
    PIECES: tl.constexpr = FACTS.pieces_v if OF_V else FACTS.pieces
    for n in tl.static_range(len(PIECES)):
        within = tl.arange(0, PIECES[n][2])
        to = pointer + (places * WIDTH)[:, None] + (PIECES[n][0] + within)[None, :]
        tl.store(to, tiles[n].to(pointer.dtype.element_ty), mask=ok[:, None] & (within < PIECES[n][1])[None, :])


@triton.jit
def listed_forward_kernel(tensors, sizes, scale, FACTS: tl.constexpr):
    """The forward: o, and lse with the sink. ``scale`` multiplies q kᵀ."""
    line = list_of(tensors, sizes, FACTS)
    ok = tl.arange(0, FACTS.tile_m) < line.left
    q = load_rows_at(tensors.q, offsets_of_heads(line, sizes.q, FACTS), ok, False, FACTS)
    m = tl.full([FACTS.tile_m], float("-inf"), tl.float32)
    l = tl.full([FACTS.tile_m], 0.0, tl.float32)
    acc = zeros(FACTS.tile_m, True, FACTS)
    first, last = tiles_of(line, FACTS)
    rows, seen = seen_keys(first, line, tensors, sizes, FACTS)
    for t in tl.range(first, last, disable_licm=True):
        # Keys are looked up an iteration ahead: in the iteration that waits for them they would take a stage of its loads.
        next_rows, next_seen = seen_keys(t + 1, line, tensors, sizes, FACTS)
        k = load_listed(tensors.k, sizes.k, rows, seen, line.head, False, FACTS)
        v = values_of(tensors, sizes, k, rows, seen, line.head, FACTS)
        s = tl.where(seen[None, :], dot_transposed(q, k, FACTS) * (scale * LOG2E), float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p, factor = exponential(s - shift[:, None], FACTS), exponential(m - shift, FACTS)
        l = l * factor + tl.sum(p, 1)
        acc = accumulate(p, v, rescaled(acc, factor), FACTS)
        m, rows, seen = m_new, next_rows, next_seen
    lse = tl.where(l == 0, float("-inf"), lse_of(m, l, FACTS))
    weight = 1.0 / tl.where(l == 0, 1.0, l)
    if FACTS.sink:
        heads = line.first + tl.arange(0, FACTS.tile_m)
        sink = tl.load(tensors.sink + heads, mask=ok, other=0.0).to(tl.float32)
        weight, lse = with_sink(weight, lse, l, tl.where(line.hi < 0, float("-inf"), sink))
    of_row, of_head = places_of_heads(line, sizes, FACTS)
    store_heads(tensors.o, of_row, rescaled(acc, weight), ok, FACTS.head_dim_v, True, FACTS)
    tl.store(tensors.lse + of_head, lse, mask=ok)


@triton.jit
def add_rows(pointer, rows, seen, head, heads, tile, N: tl.constexpr, OF_V: tl.constexpr, FACTS: tl.constexpr):
    """Adds the piece N of a tile, fp32 (width, tile_n), to the rows of dk or dv."""
    PIECE: tl.constexpr = FACTS.pieces_v[N] if OF_V else FACTS.pieces[N]
    WIDTH: tl.constexpr = FACTS.head_dim_v if OF_V else FACTS.head_dim
    within = tl.arange(0, PIECE[2])
    to = pointer + ((rows * heads + head) * WIDTH)[None, :] + within[:, None] + PIECE[0]
    tl.atomic_add(to, tile, mask=seen[None, :] & (within < PIECE[1])[:, None], sem="relaxed")


@triton.jit
def places_of_ds(t, line, sizes, FACTS: tl.constexpr):
    """Where a tile of dS lies in memory: int64 (tile_m, tile_n)."""
    group, heads = plain(sizes.group), tl.arange(0, FACTS.tile_m)
    row = tl.cast(line.number + 1, tl.int64) * group - line.left + heads
    return (row * plain(sizes.places))[:, None] + (t * FACTS.tile_n + tl.arange(0, FACTS.tile_n))[None, :]


@triton.jit
def listed_backward_kernel(tensors, sizes, scale, FACTS: tl.constexpr):
    """The backward: delta, additions to dk and dv, and dq, or with ``FACTS.sheet`` dS. lse has what a sink changes."""
    COUNT: tl.constexpr = len(FACTS.pieces)
    COUNT_V: tl.constexpr = len(FACTS.pieces_v)
    line = list_of(tensors, sizes, FACTS)
    ok = tl.arange(0, FACTS.tile_m) < line.left
    of_row, of_head = places_of_heads(line, sizes, FACTS)
    q = load_rows_at(tensors.q, offsets_of_heads(line, sizes.q, FACTS), ok, False, FACTS)
    do = load_rows_at(tensors.do, of_row * FACTS.head_dim_v, ok, True, FACTS)
    o = load_rows_at(tensors.o, of_row * FACTS.head_dim_v, ok, True, FACTS)
    delta = -tl.load(tensors.dlse + of_head, mask=ok, other=0.0)
    for n in tl.static_range(COUNT_V):
        delta += tl.sum(do[n].to(tl.float32) * o[n].to(tl.float32), 1)
    tl.store(tensors.delta + of_head, delta, mask=ok)
    shift = shift_of_rows(tl.load(tensors.lse + of_head, mask=ok, other=float("-inf")), FACTS)
    if not FACTS.sheet:
        dq = zeros(FACTS.tile_m, False, FACTS)
    first, last = tiles_of(line, FACTS)
    heads = plain(sizes.heads_k)
    rows, seen = seen_keys(first, line, tensors, sizes, FACTS)
    # Descriptors of Q and dO, which the compiler would move out of the loop, take more registers than there are.
    for t in tl.range(first, last, disable_licm=True):
        next_rows, next_seen = seen_keys(t + 1, line, tensors, sizes, FACTS)
        k = load_listed(tensors.k, sizes.k, rows, seen, line.head, False, FACTS)
        v = values_of(tensors, sizes, k, rows, seen, line.head, FACTS)
        s = dot_transposed(q, k, FACTS) * (scale * LOG2E)
        p = tl.where(seen[None, :], exponential(s - shift[:, None], FACTS), 0.0)
        ds = (p * (dot_transposed(do, v, FACTS) - delta[:, None]) * scale).to(q[0].dtype)
        if FACTS.sheet:
            tl.store(tensors.ds + places_of_ds(t, line, sizes, FACTS), ds, mask=ok[:, None])
        else:
            dq = accumulate(ds, k, dq, FACTS)
        p = p.to(q[0].dtype)
        # Turned: the columns of a head dim are enough rows for wgmma, the keys of a tile may be fewer.
        for n in tl.static_range(COUNT):
            part = dot(tl.trans(q[n]), ds, None, FACTS)
            if tensors.dv is None and n < COUNT_V:
                part = dot(tl.trans(do[n]), p, part, FACTS)
            add_rows(tensors.dk, rows, seen, line.head, heads, part, n, False, FACTS)
        if tensors.dv is not None:
            for n in tl.static_range(COUNT_V):
                part = dot(tl.trans(do[n]), p, None, FACTS)
                add_rows(tensors.dv, rows, seen, line.head, heads, part, n, True, FACTS)
        rows, seen = next_rows, next_seen
    if not FACTS.sheet:
        store_heads(tensors.dq, of_row, dq, ok, FACTS.head_dim, False, FACTS)


@triton.jit
def listed_dq_kernel(tensors, sizes, scale, FACTS: tl.constexpr):
    """dQ, of the dS that :func:`listed_backward_kernel` left."""
    line = list_of(tensors, sizes, FACTS)
    ok = tl.arange(0, FACTS.tile_m) < line.left
    dq = zeros(FACTS.tile_m, False, FACTS)
    first, last = tiles_of(line, FACTS)
    rows, seen = seen_keys(first, line, tensors, sizes, FACTS)
    for t in tl.range(first, last, disable_licm=True):
        next_rows, next_seen = seen_keys(t + 1, line, tensors, sizes, FACTS)
        ds = tl.load(tensors.ds + places_of_ds(t, line, sizes, FACTS), mask=ok[:, None] & seen[None, :], other=0.0)
        k = load_listed(tensors.k, sizes.k, rows, seen, line.head, False, FACTS)
        dq = accumulate(ds, k, dq, FACTS)
        rows, seen = next_rows, next_seen
    store_heads(tensors.dq, places_of_heads(line, sizes, FACTS)[0], dq, ok, FACTS.head_dim, False, FACTS)
