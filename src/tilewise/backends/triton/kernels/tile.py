"""Tiles of rows: how kernels load, multiply and store them.

A tile of q, k, v, do or of a sum is a tuple with one block for each piece of the head dim (``pieces`` in the configuration):
Triton's blocks have powers of two as sizes, so a head dim of 192 is a piece of 128 and one of 64
(docs/decisions.md#triton-pieces). ``OF_V`` says which head dim it is: that of v, o and dO, or that of q and k. Where products
read fp32 as bf16 terms (:mod:`terms`), the terms lie side by side in a row, and a tile holds the pieces of the first term, then
those of the second, then those of the third. With ``FACTS.chunk`` a tile is :class:`Unread`: products read it.
"""

# ruff: noqa: RET505, RUF005 - a compile-time `if` keeps its `else`: without it both returns would be compiled; and Triton's
# tuples are added, not unpacked

from typing import Any, NamedTuple

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.maths import exp
from tilewise.backends.triton.kernels.terms import split_into_terms
from tilewise.backends.triton.sheet import SHEET_STRIP

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
STRIP = tl.constexpr(SHEET_STRIP)
LOWEST = tl.constexpr(-2.3e38)  # of what units of log2 hold


class Source(NamedTuple):
    """The rows of one head of one tensor, to be loaded tile by tile.

    Attributes:
        pointer: the sequence's first row. row: the stride of rows, in elements.
        descriptors: one for each piece of the head dim; the pointer, unused, where there is none.
        b, head, start: batch element, head and first row of the sequence in the descriptors' tensor.
    """

    pointer: Any
    row: Any
    descriptors: Any
    b: Any
    head: Any
    start: Any


@triton.jit
def rows_of(pointer, strides, work, start, head, FACTS: tl.constexpr):
    """``(pointer, row stride)``: the sequence's first row of a head. The offset is 64-bit: a tensor may exceed 2**31 elements."""
    row = strides[1] * FACTS.align
    base = tl.cast(strides[2], tl.int64) * head + tl.cast(start, tl.int64) * strides[1]
    if not FACTS.packed:
        base += tl.cast(strides[0], tl.int64) * work.b
    return pointer + base * FACTS.align, row


@triton.jit
def token_of(length, work, start, FACTS: tl.constexpr):
    """The 64-bit number of the sequence's first row in a contiguous tensor (batch, length, heads, head_dim), packed without batch."""
    token = tl.cast(start, tl.int64)
    if not FACTS.packed:
        token += tl.cast(work.b, tl.int64) * length
    return token


@triton.jit
def line_of(head, heads, length, work, start, FACTS: tl.constexpr):
    """The 64-bit offset of the sequence's first row in numbers (batch, heads, length), packed (heads, length)."""
    line = tl.cast(head, tl.int64) * length + start
    if not FACTS.packed:
        line += tl.cast(work.b, tl.int64) * heads * length
    return line


@triton.jit
def source_of(tensor, descriptors, strides, work, start, head, FACTS: tl.constexpr):
    """The :class:`Source` of a head; ``descriptors`` are two, of (batch, heads, rows, columns), or Nones."""
    pointer, row = rows_of(tensor, strides, work, start, head, FACTS)
    # Triton 3.6 cannot return None, in a bundle either: the pointer takes the place of a descriptor, and nothing reads it.
    first, rest = descriptors
    if first is None:
        first = tensor
    if rest is None:
        rest = tensor
    b = work.b * 0 if FACTS.packed else work.b  # a packed tensor's descriptor has a batch of one
    return Source(pointer, row, (first, rest), b, head, start)


class Unread(NamedTuple):
    """Rows that products read, ``FACTS.chunk`` columns at a time: neither registers nor shared memory hold a wide row's terms.

    Attributes:
        pointer: the first row. lines: offsets of the rows from it, int32 (rows,).
        ok: ``(bool (rows,),)``, the rows that may be read; () where all may be.
        view: ``(descriptor, b, head, first row)``, where a descriptor reads them; else ().
        of_v: ``(0,)`` if the head dim is v's, else (): Triton's tuples hold no constants.
    """

    pointer: Any
    lines: Any
    ok: Any
    view: Any
    of_v: Any


# -- Between global memory and registers or shared memory ----------------------------------------------------------


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
    FACTS: tl.constexpr,
):
    """Rows ``first .. first + TILE`` of one piece, (TILE, width of the piece), padded with columns of zeros.

    Args:
        left: rows from ``first`` on that exist.
        alive: bool (TILE,), or None where every row may be read.
        PIECE: counted on from term to term.
        MASKED: rows past ``left``, or not alive, are zero.
    """
    PIECES: tl.constexpr = FACTS.pieces_v if OF_V else FACTS.pieces
    N: tl.constexpr = PIECE % len(PIECES)
    START: tl.constexpr = PIECES[N][0] + PIECE // len(PIECES) * (FACTS.head_dim_v if OF_V else FACTS.head_dim)
    DIM: tl.constexpr = PIECES[N][1]
    WIDTH: tl.constexpr = PIECES[N][2]
    rows = tl.arange(0, TILE)
    columns = tl.arange(0, WIDTH)
    # The tile's base is 64-bit, offsets inside the tile are 32-bit.
    pointers = pointer + tl.cast(first, tl.int64) * row + (rows[:, None] * row + (START + columns)[None, :])
    ok = None
    if MASKED:
        ok = rows < left
        if alive is not None:  # a row that is not read cannot bring its NaN into a product
            ok = ok & alive
    return load_block(pointers, ok, columns, DIM)


@triton.jit
def load_block(pointers, ok, columns, DIM: tl.constexpr):
    """The block (rows, columns) at ``pointers``: zeros in rows that are not ``ok``, (rows,) or None, and in columns from DIM on."""
    # Global memory to registers, or by cp.async to shared memory in a pipelined loop, in the tensor's dtype. No mask where none is
    # needed: each costs instructions.
    if ok is None and DIM == columns.numel:
        return tl.load(pointers)
    elif ok is None:
        return tl.load(pointers, mask=(columns < DIM)[None, :], other=0.0)
    elif DIM == columns.numel:
        return tl.load(pointers, mask=ok[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=ok[:, None] & (columns < DIM)[None, :], other=0.0)


@triton.jit
def load_rows(
    source, first, left, alive, TILE: tl.constexpr, OF_V: tl.constexpr, MASKED: tl.constexpr, FACTS: tl.constexpr
):
    """A tile of a :class:`Source` by pointers, or an :class:`Unread` one; the arguments are those of :func:`load_piece`."""
    if FACTS.chunk:
        return unread_rows(source, first, left, alive, TILE, OF_V, MASKED, FACTS)
    else:
        PIECES: tl.constexpr = FACTS.pieces_v if OF_V else FACTS.pieces
        COUNT: tl.constexpr = FACTS.terms * len(PIECES)
        tiles = ()
        for n in tl.static_range(COUNT):
            tiles = tiles + (load_piece(source.pointer, source.row, first, left, alive, TILE, OF_V, n, MASKED, FACTS),)
        return tiles


@triton.jit
def unread_rows(
    source, first, left, alive, TILE: tl.constexpr, OF_V: tl.constexpr, MASKED: tl.constexpr, FACTS: tl.constexpr
):
    """The :class:`Unread` rows of a :class:`Source`; the arguments are those of :func:`load_piece`."""
    rows = tl.arange(0, TILE)
    ok, view, of_v = (), (), ()
    if FACTS.whole:  # zeros past the tensor's last row
        view = (source.descriptors[0], source.b, source.head, (source.start + first).to(tl.int32))
    elif MASKED and alive is None:
        ok = (rows < left,)
    elif MASKED:
        ok = ((rows < left) & alive,)
    if OF_V:
        of_v = (0,)
    return Unread(source.pointer + tl.cast(first, tl.int64) * source.row, rows * source.row, ok, view, of_v)


@triton.jit
def load_chunk(rows, column, FACTS: tl.constexpr):
    """A chunk of :class:`Unread` rows from ``column`` on: (rows, FACTS.chunk) for each term."""
    TERMS: tl.constexpr = FACTS.terms
    CHUNK: tl.constexpr = FACTS.chunk
    DIM: tl.constexpr = FACTS.head_dim_v if len(rows.of_v) > 0 else FACTS.head_dim
    PADDED: tl.constexpr = (DIM + FACTS.term_unit - 1) // FACTS.term_unit * FACTS.term_unit
    columns = column + tl.arange(0, CHUNK)
    blocks = ()
    for term in tl.static_range(TERMS):
        if len(rows.view) > 0:
            # (1, 1, rows, FACTS.chunk) by TMA from global to shared memory. Partner: the barrier of this stage of the loop, on which
            # Triton's pipeliner lets the product wait that reads the chunk.
            corner = [rows.view[1], rows.view[2], rows.view[3], term * PADDED + column]
            blocks = blocks + (rows.view[0].load(corner).reshape(rows.lines.shape[0], CHUNK),)
        else:
            # Global memory to shared memory by cp.async.
            pointers = rows.pointer + (rows.lines[:, None] + (term * PADDED + columns)[None, :])
            if len(rows.ok) > 0:
                blocks = blocks + (tl.load(pointers, mask=rows.ok[0][:, None], other=0.0),)
            else:
                blocks = blocks + (tl.load(pointers),)
    return blocks


@triton.jit
def load_streamed(source, first, left, alive, TILE: tl.constexpr, OF_V: tl.constexpr, partial, FACTS: tl.constexpr):
    """A tile of a :class:`Source` in a loop: by descriptor where one may read this tile, else by :func:`load_rows`.

    A descriptor gives zeros past the tensor's last row; it cannot leave out the rows that are not ``alive``.
    """
    if FACTS.chunk and FACTS.whole:
        return unread_rows(source, first, left, None, TILE, OF_V, False, FACTS)
    elif FACTS.whole or (FACTS.tma and not partial):
        PIECES: tl.constexpr = FACTS.pieces_v if OF_V else FACTS.pieces
        DIM: tl.constexpr = FACTS.head_dim_v if OF_V else FACTS.head_dim
        TERMS: tl.constexpr = FACTS.terms
        tiles = ()
        for term in tl.static_range(TERMS):
            for n in tl.static_range(len(PIECES)):
                # (1, 1, TILE, width) by TMA from global to shared memory. Partner: the barrier of this stage of the loop,
                # on which Triton's pipeliner lets the product wait that reads the tile.
                corner = [source.b, source.head, (source.start + first).to(tl.int32), term * DIM + PIECES[n][0]]
                tiles = tiles + (source.descriptors[n].load(corner).reshape(TILE, PIECES[n][2]),)
        return tiles
    else:
        return load_rows(source, first, left, alive, TILE, OF_V, partial, FACTS)


@triton.jit
def store_rows(pointer, row, first, left, tiles, factor, TILE: tl.constexpr, OF_V: tl.constexpr, FACTS: tl.constexpr):
    """Stores the first ``left`` rows of ``tiles · factor``; the factor is a number, or one for each row, (TILE, 1)."""
    PIECES: tl.constexpr = FACTS.pieces_v if OF_V else FACTS.pieces
    DIM: tl.constexpr = FACTS.head_dim_v if OF_V else FACTS.head_dim
    rows = tl.arange(0, TILE)
    for n in tl.static_range(len(tiles)):
        within = tl.arange(0, PIECES[n][2])
        columns = (PIECES[n][0] + within)[None, :]
        ok = (rows < left)[:, None]
        if FACTS.column_parts > 1:  # this program's
            columns += first_column(len(tiles), FACTS)
            ok = ok & (columns < DIM)
        elif PIECES[n][1] < PIECES[n][2]:  # the piece is padded: its last columns are another head's
            ok = ok & (within < PIECES[n][1])[None, :]
        pointers = pointer + tl.cast(first, tl.int64) * row + (rows[:, None] * row + columns)
        # Registers to global memory: fp32 (TILE, width), rounded to the tensor's dtype.
        tl.store(pointers, (tiles[n] * factor).to(pointer.dtype.element_ty), mask=ok)


@triton.jit
def sheet_pointers(sheet, sizes, b, head, m0, n0, FACTS: tl.constexpr):
    """Pointers to the tile at (m0, n0) of dSᵀ, or of Pᵀ, (tile_n, tile_m), in the sheet that the pass over key tiles leaves behind.

    ``sheet`` is (batch, heads, strips, rows, STRIP) for the batch elements, heads and keys of a launch, with room for whole tiles: a strip
    holds STRIP queries, its rows are the keys. So what lies side by side in memory is read and written at once.

    Args:
        b: a batch element of the launch, from 0 on. head: one of all heads.
    """
    strips, rows = sizes.sheet
    first, heads = sizes.heads
    group = sizes.heads_q // sizes.heads_k
    first_key = sizes.portion
    n, m = n0 - first_key + tl.arange(0, FACTS.tile_n), m0 + tl.arange(0, FACTS.tile_m)
    base = (tl.cast(b, tl.int64) * (heads * group) + (head - first * group)) * strips * rows * STRIP
    return sheet + base + ((m // STRIP)[None, :] * rows + n[:, None]) * STRIP + (m % STRIP)[None, :]


# -- Products ------------------------------------------------------------------------------------------------------


@triton.jit
def zeros(TILE: tl.constexpr, OF_V: tl.constexpr, FACTS: tl.constexpr):
    """A tile of sums that begin at zero: fp32 (TILE, width) for each piece, or for a part of them (``FACTS.column_parts``)."""
    PIECES: tl.constexpr = FACTS.pieces_v if OF_V else FACTS.pieces
    COUNT: tl.constexpr = (len(PIECES) + FACTS.column_parts - 1) // FACTS.column_parts
    tiles = ()
    for n in tl.static_range(COUNT):
        tiles = tiles + (tl.full([TILE, PIECES[n][2]], 0.0, tl.float32),)
    return tiles


@triton.jit
def rescaled(tiles, factor):
    """Each row of a tile times its ``factor``, (rows,)."""
    scaled = ()
    for n in tl.static_range(len(tiles)):
        scaled = scaled + (tiles[n] * factor[:, None],)
    return scaled


@triton.jit
def first_column(COUNT: tl.constexpr, FACTS: tl.constexpr):
    """The first column of this program's sums, which are ``COUNT`` chunks."""
    return tl.program_id(1) * (COUNT * FACTS.chunk) if FACTS.column_parts > 1 else 0


@triton.jit
def of_first_columns(FACTS: tl.constexpr):
    """Whether this program, of those that compute the same pairs, is the one that writes what it adds up of them."""
    return tl.program_id(1) == 0 if FACTS.column_parts > 1 else True


@triton.jit
def dot_transposed(left, right, FACTS: tl.constexpr):
    """``left rightᵀ`` in fp32, (rows of left, rows of right), summed over the head dim."""
    if FACTS.chunk:
        return dot_of_chunks(left, right, FACTS)
    else:
        return dot_of_tiles(left, right, FACTS)


@triton.jit
def dot_of_chunks(left, right, FACTS: tl.constexpr):
    """:func:`dot_transposed` of :class:`Unread` rows."""
    COUNT: tl.constexpr = len(FACTS.products)
    DIM: tl.constexpr = FACTS.head_dim_v if len(left.of_v) > 0 else FACTS.head_dim
    total = tl.full([left.lines.shape[0], right.lines.shape[0]], 0.0, tl.float32)
    for column in range(0, DIM, FACTS.chunk):
        of_left, of_right = load_chunk(left, column, FACTS), load_chunk(right, column, FACTS)
        part = None
        for n in tl.static_range(COUNT):
            part = dot(of_left[FACTS.products[n][0]], tl.trans(of_right[FACTS.products[n][1]]), part, FACTS)
        total = tl.fma(part, 1.0, total)  # as in accumulate
    return total


@triton.jit
def dot_of_tiles(left, right, FACTS: tl.constexpr):
    """:func:`dot_transposed` of tiles."""
    PIECES: tl.constexpr = len(left) // FACTS.terms
    COUNT: tl.constexpr = len(FACTS.products)
    total = None
    for n in tl.static_range(COUNT):  # a product of two terms; one, of (0, 0), where operands are no terms
        for piece in tl.static_range(PIECES):
            # (rows of left, width) · (width, rows of right)
            columns = tl.trans(right[FACTS.products[n][1] * PIECES + piece])
            total = dot(left[FACTS.products[n][0] * PIECES + piece], columns, total, FACTS)
    return total


@triton.jit
def accumulate(p, tiles, acc, FACTS: tl.constexpr):
    """``p tiles + acc`` in fp32.

    For fp32 inputs, unless rounded to tf32, the sum of each tile starts from zero: one chain of additions over all tiles would round
    more than eager attention does.

    Args:
        p: fp32 (rows of acc, rows of the tiles), P or dS; rounded to the tiles' dtype, or split into terms as the tiles are.
        acc: a tile of sums, fp32 (rows, width) for each piece.
    """
    APART: tl.constexpr = FACTS.natural and FACTS.precision == "ieee"
    if FACTS.chunk:
        return accumulate_chunks(split_into_terms(p), tiles, acc, FACTS)
    else:
        p = split_into_terms(p) if FACTS.terms > 1 else (p.to(tiles[0].dtype),)
        return accumulate_tiles(p, tiles, acc, APART, FACTS)


@triton.jit
def accumulate_chunks(p, rows, acc, FACTS: tl.constexpr):
    """:func:`accumulate` of the terms of p and :class:`Unread` rows."""
    COUNT: tl.constexpr = len(FACTS.products)
    for chunk in range(len(acc)):  # a loop, so that a chunk is read beside the products of the one before
        blocks = load_chunk(rows, first_column(len(acc), FACTS) + chunk * FACTS.chunk, FACTS)
        part = None
        for n in tl.static_range(COUNT):
            part = dot(p[FACTS.products[n][0]], blocks[FACTS.products[n][1]], part, FACTS)
        sums = ()
        for n in tl.static_range(len(acc)):  # registers have no index
            sums = sums + (acc[n] + tl.where(chunk == n, part, 0.0),)
        acc = sums
    return acc


@triton.jit
def accumulate_tiles(p, tiles, acc, APART: tl.constexpr, FACTS: tl.constexpr):
    """:func:`accumulate` of the terms of p, or p in the tiles' dtype, and tiles."""
    COUNT: tl.constexpr = len(FACTS.products)
    sums = ()
    for piece in tl.static_range(len(acc)):
        total = None if APART else acc[piece]
        for n in tl.static_range(COUNT):
            # (rows of acc, rows of the tiles) · (rows of the tiles, width)
            total = dot(p[FACTS.products[n][0]], tiles[FACTS.products[n][1] * len(acc) + piece], total, FACTS)
        # Not by an addition: of a product and an addition Triton makes one product that goes on with the sum.
        sums = sums + (tl.fma(total, 1.0, acc[piece]) if APART else total,)
    return sums


@triton.jit
def dot(left, right, acc, FACTS: tl.constexpr):
    """``left right + acc`` in fp32. Triton's interpreter knows no bf16 products: it gets the same numbers as fp32."""
    # On Hopper wgmma, whose second factor is read from shared memory; the host sees to the assembler (runtime.assembling).
    if FACTS.tile_m == 1:  # of fp32: a matrix instruction would compute 15 rows that there are not
        row = tl.sum(tl.trans(left) * right, 0)[None, :]
        return row if acc is None else acc + row
    elif FACTS.upcast:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), acc, input_precision=FACTS.precision)
    else:
        return tl.dot(left, right, acc, input_precision=FACTS.precision)


@triton.jit
def shift_of_rows(lse, FACTS: tl.constexpr):
    """The numbers that are taken off rows' exponents: lse in :func:`exponential`'s unit, +inf for a row that saw no key, whose P are 0.

    So are those of a row whose every score is about the least number of fp32, as masks write it: with lse that far no lse could tell
    how many keys it has, and in units of log2 both are beyond fp32.
    """
    lowest = float("-inf") if FACTS.natural else LOWEST
    return tl.where(lse <= lowest, float("inf"), lse if FACTS.natural else lse * LOG2E)


@triton.jit
def exponential(x, FACTS: tl.constexpr):
    """``2^x``, or ``e^x`` for fp32 inputs, where the rounding of ``s · log2 e`` would show."""
    return exp(x) if FACTS.natural else tl.exp2(x)
