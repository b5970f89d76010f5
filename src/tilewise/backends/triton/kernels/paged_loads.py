"""How tiles of keys and values are read from pages: which page a tile lies in, its rows there, and their scales."""

# ruff: noqa: RET505, RUF005 - a compile-time `if` keeps its `else`: without it both returns would be compiled; and Triton's
# tuples are added, not unpacked

from typing import Any, NamedTuple

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.maths import plain
from tilewise.backends.triton.kernels.tile import load_block


class ScalePool(NamedTuple):
    """The scales of the keys of one head: a pointer to those of page 0, and the strides of pages and rows, in elements."""

    pointer: Any
    by_page: Any
    row: Any


class Pool(NamedTuple):
    """The pages of one head of k or v.

    Attributes:
        pointer: page 0. by_page, row: strides, in elements.
        descriptors: one for each piece of the head dim, of (num_pages, heads, page_size, columns); the pointer where there is none.
        head: the key head.
    """

    pointer: Any
    by_page: Any
    row: Any
    descriptors: Any
    head: Any


@triton.jit
def scale_of(tensor, strides, work, sizes, head, EACH: tl.constexpr):
    """The scale of the key head's numbers, fp32; if EACH, the :class:`ScalePool` of its keys."""
    # Packed, slots past the last query may belong to no sequence: they read the last one's scale.
    sequence = tl.cast(tl.minimum(work.b, sizes.batch - 1), tl.int64)
    pointer = tensor + (sequence * strides[0] + tl.cast(head, tl.int64) * strides[3])
    if EACH:
        return ScalePool(pointer, strides[1], strides[2])
    else:
        return tl.load(pointer)


@triton.jit
def pool_of(tensor, strides, head, view, rest, FACTS: tl.constexpr):
    """The :class:`Pool` of a key head."""
    # Without a descriptor the pointer takes its place, as in `tile.source_of`.
    first, second = view, rest
    if view is None:
        first = tensor
    if rest is None:
        second = tensor
    pointer = tensor + tl.cast(head, tl.int64) * (strides[2] * FACTS.align)
    return Pool(pointer, strides[0] * FACTS.align, strides[1] * FACTS.align, (first, second), head)


@triton.jit
def page_numbers(n0, tile, FACTS: tl.constexpr):
    """The page of the key tile at ``n0``, or of each of its keys, int32 (tile_n,), where it may lie in several.

    Numbers of pages in which no row sees a key are not read; one outside the pool becomes one inside.
    """
    if FACTS.pages == "dense":
        return tile.table
    else:
        if FACTS.pages == "several":
            j = n0 + tl.arange(0, FACTS.tile_n)
            index, seen = j // FACTS.page_size, (j >= tile.start) & (j < tile.stop)
        else:
            index, seen = n0 // FACTS.page_size if FACTS.pages == "one" else 0, n0 < tile.stop
        page = tl.load(tile.table + index * plain(tile.cache.by_page), mask=seen, other=0)
        return tl.minimum(tl.maximum(page.to(tl.int32), 0), plain(tile.cache.num_pages) - 1)


@triton.jit
def table_of(block_table, b, sizes, cache):
    """The pointer to the page numbers of sequence ``b``; of dense keys its only page, ``b``."""
    if block_table is None:
        return b
    else:
        return block_table + tl.cast(tl.minimum(b, sizes.batch - 1), tl.int64) * plain(cache.by_sequence)


@triton.jit
def load_paged(pool, page, n0, alive, OF_V: tl.constexpr, partial, FACTS: tl.constexpr):
    """The tile of k or v at position ``n0``: by descriptor where all of it may be read and lies in one page, else row by row.

    Args:
        alive: bool (tile_n,), the rows that are read, others are zero; None where all are.
    """
    first = n0  # the tile's first row in its page
    if FACTS.pages == "one":
        first = n0 % FACTS.page_size
    if FACTS.tma and not partial:
        PIECES: tl.constexpr = FACTS.pieces_v if OF_V else FACTS.pieces
        tiles = ()
        for n in tl.static_range(len(PIECES)):
            # (1, 1, tile_n, width) by TMA from global to shared memory. Partner: the barrier of this stage of the loop, on which
            # Triton's pipeliner lets the product wait that reads the tile.
            block = pool.descriptors[n].load([page, pool.head, first, PIECES[n][0]]).reshape(FACTS.tile_n, PIECES[n][2])
            tiles = tiles + (block,)
        return tiles
    else:
        within = tl.arange(0, FACTS.tile_n)
        if FACTS.pages == "several":
            within = ((first + within) % FACTS.page_size).to(tl.int64)
            offsets = page.to(tl.int64) * pool.by_page + within * pool.row
            return load_gathered(pool.pointer, offsets, alive, OF_V, partial, FACTS)
        else:  # the tile's base is 64-bit, offsets inside the tile are 32-bit
            base = pool.pointer + (page.to(tl.int64) * pool.by_page + tl.cast(first, tl.int64) * pool.row)
            return load_gathered(base, within * pool.row, alive, OF_V, partial, FACTS)


@triton.jit
def load_gathered(
    pointer, offsets, alive, OF_V: tl.constexpr, MASKED: tl.constexpr, FACTS: tl.constexpr, STEP: tl.constexpr = 1
):
    """A tile of the rows at these ``offsets``, (rows,), in elements, padded with columns of zeros.

    Args:
        alive: bool (rows,). MASKED: rows that are not alive are zero, and not read. STEP: from one column to the next.
    """
    PIECES: tl.constexpr = FACTS.pieces_v if OF_V else FACTS.pieces
    tiles = ()
    for n in tl.static_range(len(PIECES)):
        within = tl.arange(0, PIECES[n][2])
        pointers = pointer + (offsets[:, None] + STEP * (PIECES[n][0] + within)[None, :])
        tiles = tiles + (load_block(pointers, alive if MASKED else None, within, PIECES[n][1]),)
    return tiles


@triton.jit
def load_scales(pool, page, n0, alive, FACTS: tl.constexpr):
    """The scales of the key tile at ``n0``, fp32 (tile_n,); 0 for keys that are not ``alive``, where some are not."""
    within = tl.arange(0, FACTS.tile_n)
    if FACTS.pages == "several":
        within = (n0 + within) % FACTS.page_size
    elif FACTS.pages == "one":
        within = n0 % FACTS.page_size + within
    else:
        within = n0 + within
    # Offsets of 64 bits, since a pool may have more than 2^31 tokens and heads.
    pointers = pool.pointer + (page.to(tl.int64) * pool.by_page + within.to(tl.int64) * pool.row)
    if alive is None:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=alive, other=0.0)


@triton.jit
def first_pieces(tiles, FACTS: tl.constexpr):
    """The tiles of v among those of k; of a quantised cache the even columns and the odd ones."""
    COUNT: tl.constexpr = len(FACTS.pieces)
    OF_V: tl.constexpr = len(FACTS.pieces_v)
    found = ()
    for n in tl.static_range(len(tiles)):
        # The odd columns' pieces follow all pieces of the even ones.
        if n % COUNT < OF_V:
            found = found + (tiles[n],)
    return found
