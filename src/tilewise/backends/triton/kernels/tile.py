"""What all kernels share: their arguments, where a program works, loads, the mask of a tile, and dropout.

Kernel arguments come in bundles (a NamedTuple is one argument): pointers apart from whole numbers, because Triton may
specialise on a pointer's alignment and must not on a length. Triton would compile anew for a number that is 1 or a multiple
of 16 (``do_not_specialize`` does not reach into tuples), so numbers come as odd ones, ``2 x + 3`` (:func:`launch.opaque`),
and :func:`plain_sizes` or the emitted functions undo that. Strides are in units of ``F.align`` elements, so that the
compiler knows that rows start at multiples of 16 bytes. ``F`` are the compile-time facts (:class:`facts.Facts`).
"""

# ruff: noqa: RET505, RUF005 - a compile-time `if` keeps its `else`: without it both returns would be compiled; and Triton's
# tuples are added, not unpacked

from typing import Any, NamedTuple

import triton
import triton.language as tl
from tilewise.backends.triton.config import SHEET_STRIP
from tilewise.backends.triton.kernels.maths import exp, plain
from tilewise.dropout import ROUNDS
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PHILOX_ROUNDS = tl.constexpr(ROUNDS)
STRIP = tl.constexpr(SHEET_STRIP)


class Tensors(NamedTuple):
    """Pointers; ``None`` where a kernel has no use for one. ``lists`` are TileLists' four, ``leaves``, ``grads`` tuples."""

    q: Any = None
    k: Any = None
    v: Any = None
    o: Any = None
    lse: Any = None
    do: Any = None
    lse2: Any = None
    delta: Any = None
    dlse: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    cu_q: Any = None
    cu_k: Any = None
    sink: Any = None
    seed: Any = None
    sheet: Any = None
    lists: Any = None
    leaves: Any = ()
    grads: Any = ()


class Sizes(NamedTuple):
    """Whole numbers; packed, ``seqlen_q`` and ``seqlen_k`` are the totals and ``blocks`` the slots of a head.

    ``q k v do`` are ``(batch, row, head)`` strides in units of ``F.align``; ``line``: rows from one head to the next in the
    backward's lse2 and delta; ``chunk`` keys of a split, in tiles.
    ``beside``: batch elements and heads whose programs of one tile run side by side (:func:`program`); ``heads``: first and number
    of the key heads that a launch is for; ``sheet``: strips and rows of a head's sheet (:func:`sheet_tile`).
    ``lists``: strides of a tile list ``(batch, head, line)`` and of its counts ``(batch, head)``. ``extents``: size and
    stride of each axis, for each leaf; ``grad_extents`` those of its gradient.
    """

    batch: int = 0
    heads_q: int = 0
    heads_k: int = 0
    seqlen_q: int = 0
    seqlen_k: int = 0
    blocks: int = 0
    q: tuple = (0, 0, 0)
    k: tuple = (0, 0, 0)
    v: tuple = (0, 0, 0)
    do: tuple = (0, 0, 0)
    line: int = 0
    chunk: int = 0
    threshold: int = 0
    beside: tuple = (1, 1)
    heads: tuple = (0, 0)
    sheet: tuple = (0, 0)
    lists: tuple = (0, 0, 0, 0, 0)
    extents: tuple = ()
    grad_extents: tuple = ()


class Scales(NamedTuple):
    """``softmax``: softmax_scale; ``keep``: dropout's factor; ``numbers``: of the mask and the score."""

    softmax: float
    keep: float
    numbers: tuple


class At(NamedTuple):
    """Where a program works: batch element, tile, the sequence's first rows and lengths; and what emitted functions read:
    ``pair`` is the tile of the tensor that is read at i and j, where a descriptor brings it."""

    b: Any
    block: Any
    start_q: Any
    start_k: Any
    seqlen_q: Any
    seqlen_k: Any
    leaves: Any
    extents: Any
    grads: Any
    grad_extents: Any
    numbers: Any
    pair: Any


@triton.jit
def plain_sizes(s):
    """The sizes of a launch as plain numbers; ``extents`` stay as they are, for the emitted functions."""
    return Sizes(
        batch=plain(s.batch),
        heads_q=plain(s.heads_q),
        heads_k=plain(s.heads_k),
        seqlen_q=plain(s.seqlen_q),
        seqlen_k=plain(s.seqlen_k),
        blocks=plain(s.blocks),
        q=(plain(s.q[0]), plain(s.q[1]), plain(s.q[2])),
        k=(plain(s.k[0]), plain(s.k[1]), plain(s.k[2])),
        v=(plain(s.v[0]), plain(s.v[1]), plain(s.v[2])),
        do=(plain(s.do[0]), plain(s.do[1]), plain(s.do[2])),
        line=plain(s.line),
        chunk=plain(s.chunk),
        threshold=plain(s.threshold),
        beside=(plain(s.beside[0]), plain(s.beside[1])),
        heads=(plain(s.heads[0]), plain(s.heads[1])),
        sheet=(plain(s.sheet[0]), plain(s.sheet[1])),
        lists=(plain(s.lists[0]), plain(s.lists[1]), plain(s.lists[2]), plain(s.lists[3]), plain(s.lists[4])),
        extents=s.extents,
        grad_extents=s.grad_extents,
    )


@triton.jit
def program(group, sizes):
    """``(slot, head, batch element)`` of this program, ``group`` heads for each key head: ``sizes.beside`` elements and heads
    first, then the slots of a head, then the other heads and elements."""
    pid = tl.program_id(0)
    some_b, some_h = sizes.beside
    b, pid = pid % some_b, pid // some_b
    h, pid = pid % some_h, pid // some_h
    slot, pid = pid % sizes.blocks, pid // sizes.blocks
    first, heads = sizes.heads
    others = heads * group // some_h
    return slot, first * group + pid % others * some_h + h, pid // others * some_b + b


@triton.jit
def place(slot, b, tensors, sizes, scales, OVER_KEYS: tl.constexpr, F: tl.constexpr):
    """The tile ``slot`` of batch element ``b``; packed, the slot says which sequence too.

    Sequence b owns the slots from ``cu[b] // tile + b`` on, at least as many as it has tiles: no host counts them, and a
    binary search in cu_seqlens finds b. The rows past ``cu[batch]`` are sequence ``batch``, which has no other side.
    """
    start_q = slot * 0
    start_k = slot * 0
    seqlen_q = sizes.seqlen_q
    seqlen_k = sizes.seqlen_k
    block = slot
    if F.packed:
        TILE: tl.constexpr = F.tile_n if OVER_KEYS else F.tile_m
        own = tensors.cu_k if OVER_KEYS else tensors.cu_q
        total = sizes.seqlen_k if OVER_KEYS else sizes.seqlen_q
        low = slot * 0
        high = low + sizes.batch + 1
        while high - low > 1:
            middle = (low + high) // 2
            first_slot = tl.minimum(tl.load(own + middle).to(tl.int32), total) // TILE + middle
            low = tl.where(first_slot <= slot, middle, low)
            high = tl.where(first_slot <= slot, high, middle)
        b = low
        start_q, seqlen_q = sequence(tensors.cu_q, b, sizes.batch, sizes.seqlen_q, not OVER_KEYS)
        start_k, seqlen_k = sequence(tensors.cu_k, b, sizes.batch, sizes.seqlen_k, OVER_KEYS)
        block = slot - ((start_k if OVER_KEYS else start_q) // TILE + b)
    return At(
        b=b,
        block=block,
        start_q=start_q,
        start_k=start_k,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        leaves=tensors.leaves,
        extents=sizes.extents,
        grads=tensors.grads,
        grad_extents=sizes.grad_extents,
        numbers=scales.numbers,
        pair=b,  # with_pairs puts a tile in its place
    )


@triton.jit
def sequence(cu, b, batch, total, REST: tl.constexpr):
    """First row and length of packed sequence ``b``; of sequence ``batch``, the rest of the rows if ``REST``, else none."""
    start = tl.minimum(tl.load(cu + b).to(tl.int32), total)
    end = tl.minimum(tl.load(cu + tl.minimum(b + 1, batch)).to(tl.int32), total)
    if REST:
        end = tl.where(b == batch, total, end)
    return start, tl.maximum(end - start, 0)


@triton.jit
def rows_of(pointer, strides, at, start, h, F: tl.constexpr):
    """``(pointer to the sequence's first row of head h, row stride)``; the base is 64-bit."""
    row = strides[1] * F.align
    base = tl.cast(strides[2], tl.int64) * h + tl.cast(start, tl.int64) * strides[1]
    if not F.packed:
        base += tl.cast(strides[0], tl.int64) * at.b
    return pointer + base * F.align, row


@triton.jit
def with_pairs(at, view, h, m0, n0, OVER_KEYS: tl.constexpr, F: tl.constexpr):
    """``at`` with the tile at (m0, n0), as (keys, queries) if OVER_KEYS, of what ``view`` sees: a descriptor of four axes, the first
    two by ``F.pair``: each the batch element, the head, or a number."""
    if F.pair is None:
        return at
    else:
        pair = view.load([_lead(at.b, h, 0, F), _lead(at.b, h, 1, F), m0, n0]).reshape(F.tile_m, F.tile_n)
        return At(
            b=at.b,
            block=at.block,
            start_q=at.start_q,
            start_k=at.start_k,
            seqlen_q=at.seqlen_q,
            seqlen_k=at.seqlen_k,
            leaves=at.leaves,
            extents=at.extents,
            grads=at.grads,
            grad_extents=at.grad_extents,
            numbers=at.numbers,
            pair=tl.trans(pair) if OVER_KEYS else pair,
        )


@triton.jit
def _lead(b, h, N: tl.constexpr, F: tl.constexpr):
    LEADS: tl.constexpr = F.pair
    if LEADS[N] == "b":
        return b
    elif LEADS[N] == "h":
        return h
    else:
        return h * 0 + LEADS[N]


class Source(NamedTuple):
    """A head's rows of one tensor: pointer to the sequence's first row and row stride; descriptors, one for each piece of the
    head dim (the pointer, unused, where there is none), and where the sequence begins in them: batch element, head, row.
    """

    pointer: Any
    row: Any
    descriptors: Any
    b: Any
    h: Any
    start: Any


@triton.jit
def source(tensor, descriptors, strides, at, start, h, F: tl.constexpr):
    """The :class:`Source` of head h; ``descriptors`` two, of (batch, heads, rows, columns), or Nones."""
    pointer, row = rows_of(tensor, strides, at, start, h, F)
    first, rest = descriptors
    if first is None:
        first = tensor
    if rest is None:
        rest = tensor
    b = at.b * 0 if F.packed else at.b
    return Source(pointer, row, (first, rest), b, h, start)


@triton.jit
def sheet_tile(tensors, sizes, b, h, m0, n0, F: tl.constexpr):
    """Pointers to the tile at (m0, n0), (tile_n, tile_m), of dS transposed, which the pass over key tiles leaves behind for others:
    ``tensors.sheet`` is (batch, heads, strips, rows, STRIP), of the heads of a launch, with room for whole tiles: what lies side by side
    in it is read and written at once."""
    strips, rows = sizes.sheet
    first, heads = sizes.heads
    group = sizes.heads_q // sizes.heads_k
    n, m = n0 + tl.arange(0, F.tile_n), m0 + tl.arange(0, F.tile_m)
    head = (tl.cast(b, tl.int64) * (heads * group) + (h - first * group)) * strips * rows * STRIP
    return tensors.sheet + head + ((m // STRIP)[None, :] * rows + n[:, None]) * STRIP + (m % STRIP)[None, :]


# -- Tiles of rows: a tuple, of one tile for each piece of the head dim (config.pieces) ----------------------------
#
# OF_V says which head dim it is, that of v, o and dO, or that of q and k. What products read of fp32 may come in three parts
# (config.PARTS), side by side in a row: the pieces of the first, then those of the second, then of the third.


@triton.jit
def load_piece(
    pointer,
    row,
    first,
    left,
    alive,
    TILE: tl.constexpr,
    OF_V: tl.constexpr,
    PIECE: tl.constexpr,
    MASKED: tl.constexpr,
    F: tl.constexpr,
):
    """Rows ``first + 0..TILE`` of one piece, padded with zeros; MASKED: rows past ``left`` or not alive are zero too.

    Args:
        alive: bool (TILE,) or None.
        PIECE: counted on from part to part.
    """
    PIECES: tl.constexpr = F.pieces_v if OF_V else F.pieces
    N: tl.constexpr = PIECE % len(PIECES)
    START: tl.constexpr = PIECES[N][0] + PIECE // len(PIECES) * (F.head_dim_v if OF_V else F.head_dim)
    DIM: tl.constexpr = PIECES[N][1]
    WIDTH: tl.constexpr = PIECES[N][2]
    r = tl.arange(0, TILE)
    c = tl.arange(0, WIDTH)
    pointers = pointer + tl.cast(first, tl.int64) * row + (r[:, None] * row + (START + c)[None, :])
    if MASKED:
        ok = r < left
        if alive is not None:
            ok = ok & alive
        if DIM < WIDTH:
            return tl.load(pointers, mask=ok[:, None] & (c < DIM)[None, :], other=0.0)
        else:
            return tl.load(pointers, mask=ok[:, None], other=0.0)
    elif DIM < WIDTH:
        return tl.load(pointers, mask=(c < DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_rows(x, first, left, alive, TILE: tl.constexpr, OF_V: tl.constexpr, MASKED: tl.constexpr, F: tl.constexpr):
    """A tile of a :class:`Source` by pointers, as :func:`load_piece` does."""
    PIECES: tl.constexpr = F.pieces_v if OF_V else F.pieces
    COUNT: tl.constexpr = F.parts * len(PIECES)
    tiles = ()
    for n in tl.static_range(COUNT):
        tiles = tiles + (load_piece(x.pointer, x.row, first, left, alive, TILE, OF_V, n, MASKED, F),)
    return tiles


@triton.jit
def load_streamed(x, first, left, alive, TILE: tl.constexpr, OF_V: tl.constexpr, partial, F: tl.constexpr):
    """A tile of a :class:`Source`: by descriptor where there is one for it (zeros past the last row), others as
    :func:`load_rows` does."""
    if F.whole or (F.tma and not partial):
        PIECES: tl.constexpr = F.pieces_v if OF_V else F.pieces
        DIM: tl.constexpr = F.head_dim_v if OF_V else F.head_dim
        PARTS: tl.constexpr = F.parts
        tiles = ()
        for part in tl.static_range(PARTS):
            for n in tl.static_range(len(PIECES)):
                at = [x.b, x.h, (x.start + first).to(tl.int32), part * DIM + PIECES[n][0]]
                tiles = tiles + (x.descriptors[n].load(at).reshape(TILE, PIECES[n][2]),)
        return tiles
    else:
        return load_rows(x, first, left, alive, TILE, OF_V, partial, F)


@triton.jit
def store_rows(pointer, row, first, left, x, factor, TILE: tl.constexpr, OF_V: tl.constexpr, F: tl.constexpr):
    """The first ``left`` rows of ``x · factor``, a tuple of tiles; ``factor`` a number, or one for each row."""
    PIECES: tl.constexpr = F.pieces_v if OF_V else F.pieces
    r = tl.arange(0, TILE)
    for n in tl.static_range(len(PIECES)):
        c = tl.arange(0, PIECES[n][2])
        columns = (PIECES[n][0] + c)[None, :]
        ok = (r < left)[:, None]
        if PIECES[n][1] < PIECES[n][2]:
            ok = ok & (c < PIECES[n][1])[None, :]
        pointers = pointer + tl.cast(first, tl.int64) * row + (r[:, None] * row + columns)
        tl.store(pointers, (x[n] * factor).to(pointer.dtype.element_ty), mask=ok)


@triton.jit
def zeros(TILE: tl.constexpr, OF_V: tl.constexpr, F: tl.constexpr):
    """A tuple of fp32 sums that start."""
    PIECES: tl.constexpr = F.pieces_v if OF_V else F.pieces
    tiles = ()
    for n in tl.static_range(len(PIECES)):
        tiles = tiles + (tl.full([TILE, PIECES[n][2]], 0.0, tl.float32),)
    return tiles


@triton.jit
def rescaled(x, factor):
    """Each tile of a tuple times a number for each of its rows."""
    tiles = ()
    for n in tl.static_range(len(x)):
        tiles = tiles + (x[n] * factor[:, None],)
    return tiles


@triton.jit
def inner(a, b, F: tl.constexpr):
    """``a bᵀ``, summed over the head dim: (rows of a, rows of b)."""
    PIECES: tl.constexpr = len(a) // F.parts
    COUNT: tl.constexpr = len(F.products)
    s = None
    for n in tl.static_range(COUNT):
        for piece in tl.static_range(PIECES):
            right = tl.trans(b[F.products[n][1] * PIECES + piece])
            s = dot(a[F.products[n][0] * PIECES + piece], right, s, F)
    return s


@triton.jit
def accumulate(p, x, acc, F: tl.constexpr):
    """``p x + acc``, x and acc tuples of tiles; p (rows of acc, rows of x) is rounded to x's dtype, or where x is in parts, fp32.

    Of fp32 inputs each tile's sum starts from zero: one chain of additions over all tiles would round more than eager does.
    """
    COUNT: tl.constexpr = len(F.products)
    p = in_parts(p) if F.parts > 1 else (p.to(x[0].dtype),)
    tiles = ()
    for piece in tl.static_range(len(acc)):
        total = None if F.natural else acc[piece]
        for n in tl.static_range(COUNT):
            total = dot(p[F.products[n][0]], x[F.products[n][1] * len(acc) + piece], total, F)
        tiles = tiles + (acc[piece] + total if F.natural else total,)
    return tiles


@triton.jit
def dot(a, b, acc, F: tl.constexpr):
    """``a b + acc`` in fp32. The interpreter knows no bf16 products: it gets the same numbers as fp32."""
    if F.upcast:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=F.precision)
    else:
        return tl.dot(a, b, acc, input_precision=F.precision)


@triton.jit
def in_parts(x):
    """fp32 as a sum of three bf16, each of what the ones before leave: all of its 24 bits, and its range."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def parts_kernel(tensors, sizes, scales, F: tl.constexpr):
    """Rows of fp32 q, k, v, and do where it is given, as rows of three bf16 parts in dq, dk, dv and o, contiguous: grid (programs of the
    tensor that needs most, tensors). Strides are in elements."""
    sizes = plain_sizes(sizes)
    which = tl.program_id(1)
    if which == 0:
        rows_in_parts(tensors.q, tensors.dq, sizes.q, sizes.seqlen_q, sizes.heads_q, sizes, False, F)
    elif which == 1:
        rows_in_parts(tensors.k, tensors.dk, sizes.k, sizes.seqlen_k, sizes.heads_k, sizes, False, F)
    elif which == 2:
        rows_in_parts(tensors.v, tensors.dv, sizes.v, sizes.seqlen_k, sizes.heads_k, sizes, True, F)
    elif tensors.do is not None:
        rows_in_parts(tensors.do, tensors.o, sizes.do, sizes.seqlen_q, sizes.heads_q, sizes, True, F)


@triton.jit
def rows_in_parts(x, to, strides, length, heads, sizes, OF_V: tl.constexpr, F: tl.constexpr):
    """What program_id(0) does of one tensor: nothing where that needs fewer programs."""
    DIM: tl.constexpr = F.head_dim_v if OF_V else F.head_dim
    WIDTH: tl.constexpr = F.pieces_v[0][2] if OF_V else F.pieces[0][2]
    pid, blocks = tl.program_id(0), tl.maximum(tl.cdiv(length, F.tile_m), 1)  # of an empty tensor: not to divide by 0
    b, h = pid // (blocks * heads), (pid // blocks) % heads
    by_batch, by_row, by_head = strides
    m, c = (pid % blocks) * F.tile_m + tl.arange(0, F.tile_m), tl.arange(0, WIDTH)
    ok = (m < length)[:, None] & (c < DIM)[None, :] & (b < sizes.batch)
    base = x + (tl.cast(b, tl.int64) * by_batch + tl.cast(h, tl.int64) * by_head)
    x = tl.load(base + m.to(tl.int64)[:, None] * by_row + c[None, :], mask=ok, other=0.0)
    high, middle, low = in_parts(x)
    finite = tl.abs(x) < float("inf")  # else nothing is left of it
    to += ((tl.cast(b, tl.int64) * length + m)[:, None] * heads + h) * (F.parts * DIM) + c[None, :]
    tl.store(to, high, mask=ok)
    tl.store(to + DIM, tl.where(finite, middle, 0.0), mask=ok)
    tl.store(to + 2 * DIM, tl.where(finite, low, 0.0), mask=ok)


@triton.jit
def power(x, F: tl.constexpr):
    """``2^x``, or ``e^x`` where numbers are natural: for fp32, whose rounding of ``s · log2 e`` would show."""
    return exp(x) if F.natural else tl.exp2(x)


# -- The mask ------------------------------------------------------------------------------------------------------


@triton.jit
def within(end, length):
    """An end of an interval, within 0 and ``length``, as int32."""
    return tl.minimum(tl.maximum(end, 0), length).to(tl.int32)


@triton.jit
def key_interval(i, h, at, F: tl.constexpr):
    """``[lo, hi)`` of rows ``i``, of i's shape or scalars."""
    lo = i * 0
    hi = i * 0 + at.seqlen_k
    if F.lo is not None:
        lo = within(F.lo(at.b, h, i, at), at.seqlen_k) + i * 0
    if F.hi is not None:
        hi = within(F.hi(at.b, h, i, at), at.seqlen_k) + i * 0
    return lo, hi


@triton.jit
def query_interval(j, h, at, F: tl.constexpr):
    """``[first, last)`` of columns ``j``."""
    first = j * 0
    last = j * 0 + at.seqlen_q
    if F.first is not None:
        first = within(F.first(at.b, h, j, at), at.seqlen_q) + j * 0
    if F.last is not None:
        last = within(F.last(at.b, h, j, at), at.seqlen_q) + j * 0
    return first, last


@triton.jit
def span(start_a, stop_a, start_b, stop_b, TILE: tl.constexpr):
    """Tiles to visit for a line of tiles from its first (a) and last (b) row's interval: ends never decrease.

    Returns ``(first, first full, last full, last)``: partial tiles from the first to the second, full ones to the third,
    partial ones to the last.
    """
    first = start_a // TILE
    last = tl.where(stop_b > start_a, (stop_b + TILE - 1) // TILE, first)
    full = tl.minimum(tl.maximum((start_b + TILE - 1) // TILE, first), last)
    full_end = tl.minimum(tl.maximum(stop_a // TILE, full), last)
    return first, full, full_end, last


@triton.jit
def partial_tile(t, first, full, full_end):
    """The t-th partial tile of a :func:`span`: those before the full ones, then those after."""
    return tl.where(t < full - first, first + t, full_end + t - (full - first))


@triton.jit
def keys_to_visit(m0, h, at, F: tl.constexpr):
    """:func:`span` of a query tile."""
    end = tl.minimum(m0 + F.tile_m, at.seqlen_q) - 1
    lo_a, hi_a = key_interval(m0, h, at, F)
    lo_b, hi_b = key_interval(end, h, at, F)
    first, full, full_end, last = span(lo_a, hi_a, lo_b, hi_b, F.tile_n)
    last = tl.where(end >= m0, last, first)
    if F.keep is not None:
        full_end = tl.minimum(full, last)
    return first, tl.minimum(full, last), tl.minimum(full_end, last), last


@triton.jit
def queries_to_visit(n0, h, at, F: tl.constexpr):
    """:func:`span` of a key tile."""
    end = tl.minimum(n0 + F.tile_n, at.seqlen_k) - 1
    first_a, last_a = query_interval(n0, h, at, F)
    first_b, last_b = query_interval(end, h, at, F)
    first, full, full_end, last = span(first_a, last_a, first_b, last_b, F.tile_m)
    last = tl.where(end >= n0, last, first)
    if F.keep is not None:
        full_end = tl.minimum(full, last)
    return first, tl.minimum(full, last), tl.minimum(full_end, last), last


@triton.jit
def listed(tensors, sizes, b, h, line, F: tl.constexpr):
    """``(partial, count, full, count, first)`` of a line of tiles: pointers to its lists, their lengths, and the first full one."""
    lists = tl.cast(b, tl.int64) * sizes.lists[0] + h * sizes.lists[1] + line * sizes.lists[2]
    counts = tl.cast(b, tl.int64) * sizes.lists[3] + h * sizes.lists[4] + line
    partial, partial_count, full, full_count = tensors.lists
    fulls = tl.load(full_count + counts)
    return partial + lists, tl.load(partial_count + counts), full + lists, fulls, tile_listed(full + lists, fulls, 0)


@triton.jit
def tile_listed(tiles, count, t):
    """Which tile is the t-th of a list; past its end, any number. Loops read it an iteration ahead: within the one whose loads wait for
    it, it takes a stage of theirs."""
    return tl.load(tiles + tl.maximum(tl.minimum(t, count - 1), 0))


# -- Kernels that overlap ------------------------------------------------------------------------------------------


@triton.jit
def begin(F: tl.constexpr):
    """The first statement of a kernel that has a part in an overlap (``F.overlap``, a :class:`launch.Role`)."""
    if F.overlap == "reads":
        gdc_wait()
    if F.overlap is not None:
        gdc_launch_dependents()


@triton.jit
def end(F: tl.constexpr):
    """The last one: who waits for a kernel that joins another then waits for both."""
    if F.overlap == "joins":
        gdc_wait()


# -- Dropout -------------------------------------------------------------------------------------------------------


@triton.jit
def dropout_keep(m0, n0, b, h, tensors, sizes, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Which pairs of the tile at ``(m0, n0)``, multiples of 16, are kept: bool (TILE_M, TILE_N).

    A call of Philox gives eight pairs, so there are (TILE_M / 2, TILE_N / 4) calls (docs/algorithm.md, eqs. 22, 23).
    """
    seed = tl.load(tensors.seed)
    r = tl.arange(0, TILE_M // 2) + m0 // 2
    c = tl.arange(0, TILE_N // 4) + n0 // 4
    zero = tl.full((TILE_M // 2, TILE_N // 4), 0, tl.uint32)
    c0, c1 = zero + c.to(tl.uint32)[None, :], zero + r.to(tl.uint32)[:, None]
    c2 = zero + (b * sizes.heads_q + h).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(
        c0, c1, c2, zero, (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32), PHILOX_ROUNDS
    )
    # words: (m / 16, i % 8, n / 16, j // 2 % 4, i // 8 % 2, j % 2), then the half by j // 8 % 2
    words = tl.join(tl.join(w0, w1), tl.join(w2, w3))
    low, high = (words & 0xFFFF) < sizes.threshold, (words >> 16) < sizes.threshold
    kept = tl.join(low.to(tl.int8), high.to(tl.int8))
    kept = kept.reshape(TILE_M // 16, 8, TILE_N // 16, 4, 2, 2, 2)
    return kept.permute(0, 4, 1, 2, 6, 3, 5).reshape(TILE_M, TILE_N) != 0
