"""The tiles that a program visits, and the pairs of a tile that count: the mask's intervals, lists of tiles, and dropout.

A mask is an interval of keys for each query, ``[lo, hi)``, and the same set as an interval of queries for each key,
``[first, last)``. Where it has a predicate too, the tiles to visit come as lists (docs/algorithm.md#10-masks-and-tiles), unless sequences
are short (docs/decisions.md#triton-windows) or keys alone are hidden and dS is kept. The ends are emitted functions, ``FACTS.lo`` and so
on, None where the mask does not bound that end.
"""

import triton
import triton.language as tl
from tilewise.dropout import ROUNDS

PHILOX_ROUNDS = tl.constexpr(ROUNDS)


# -- Intervals -----------------------------------------------------------------------------------------------------


@triton.jit
def within(end, length):
    """An end of an interval, clamped to [0, length], as int32."""
    return tl.minimum(tl.maximum(end, 0), length).to(tl.int32)


@triton.jit
def key_interval(i, head, work, FACTS: tl.constexpr):
    """The keys ``[lo, hi)`` that the queries ``i`` see; i is a block or a scalar, and so are both ends."""
    lo = i * 0
    hi = i * 0 + work.seqlen_k
    if FACTS.lo is not None:
        lo = within(FACTS.lo(work.b, head, i, work), work.seqlen_k) + i * 0
    if FACTS.hi is not None:
        hi = within(FACTS.hi(work.b, head, i, work), work.seqlen_k) + i * 0
    return lo, hi


@triton.jit
def query_interval(j, head, work, FACTS: tl.constexpr):
    """The queries ``[first, last)`` that see the keys ``j``; j is a block or a scalar, and so are both ends."""
    first = j * 0
    last = j * 0 + work.seqlen_q
    if FACTS.first is not None:
        first = within(FACTS.first(work.b, head, j, work), work.seqlen_q) + j * 0
    if FACTS.last is not None:
        last = within(FACTS.last(work.b, head, j, work), work.seqlen_q) + j * 0
    return first, last


# -- Tiles to visit ------------------------------------------------------------------------------------------------


@triton.jit
def block_ranges(at, end, start_a, stop_a, start_b, stop_b, TILE: tl.constexpr, FACTS: tl.constexpr):
    """The blocks of TILE that a tile visits, from the intervals of its first row, ``at`` (a), and of its last row, ``end`` (b).

    That suffices, as ends of intervals never decrease from row to row.

    Returns:
        ``(first, full, full_end, last)``: the blocks [first, full) are partial, [full, full_end) full, [full_end, last) partial.
    """
    # Ends never decrease, so the first row sees the first key of all rows and the last row the last one.
    first = start_a // TILE
    last = (stop_b + TILE - 1) // TILE
    if FACTS.sheet or FACTS.keep is not None:  # else it would cost a forward of D 16 the registers of its fifth program
        last = tl.maximum(last, first)
    if not FACTS.sheet:  # a kept tile of dS is read even where no row sees a key of it, so it is written as 0
        last = tl.where(stop_b > start_a, last, first)
    # A full block begins at or after the last row's start, and ends at or before the first row's stop.
    full = tl.minimum(tl.maximum((start_b + TILE - 1) // TILE, first), last)
    full_end = tl.minimum(tl.maximum(stop_a // TILE, full), last)
    last = tl.where(end >= at, last, first)  # a packed slot may hold no row
    if FACTS.keep is not None or (FACTS.ordered and not FACTS.whole):
        # Any block may hide a pair; or one loop has all blocks.
        full_end = tl.minimum(full, last)
    return first, tl.minimum(full, last), tl.minimum(full_end, last), last


@triton.jit
def partial_block(t, first, full, full_end):
    """The t-th partial block of :func:`block_ranges`: first those before the full ones, then those after."""
    return tl.where(t < full - first, first + t, full_end + t - (full - first))


@triton.jit
def n_block_ranges(m0, head, work, FACTS: tl.constexpr):
    """The :func:`block_ranges` of keys that the query tile at ``m0`` visits."""
    end = tl.minimum(m0 + FACTS.tile_m, work.seqlen_q) - 1
    start_a, stop_a = key_interval(m0, head, work, FACTS)
    start_b, stop_b = key_interval(end, head, work, FACTS)
    return block_ranges(m0, end, start_a, stop_a, start_b, stop_b, FACTS.tile_n, FACTS)


@triton.jit
def m_block_ranges(n0, head, work, FACTS: tl.constexpr):
    """The :func:`block_ranges` of queries that the key tile at ``n0`` visits."""
    end = tl.minimum(n0 + FACTS.tile_n, work.seqlen_k) - 1
    start_a, stop_a = query_interval(n0, head, work, FACTS)
    start_b, stop_b = query_interval(end, head, work, FACTS)
    return block_ranges(n0, end, start_a, stop_a, start_b, stop_b, FACTS.tile_m, FACTS)


@triton.jit
def block_lists(tensors, sizes, b, head, block, FACTS: tl.constexpr):
    """The blocks that query tile, or key tile, number ``block`` visits.

    Returns:
        ``(partial, partial count, full, full count, first)``: pointers to the partial ones and to the full ones behind them, how many there
        are of each, and the first full block.
    """
    # 64-bit offsets; the counts of a tile are those of its partial blocks and of all.
    blocks, counts = tensors.lists
    blocks += (
        tl.cast(b, tl.int64) * sizes.list_strides[0] + head * sizes.list_strides[1] + block * sizes.list_strides[2]
    )
    counts += tl.cast(b, tl.int64) * sizes.list_strides[3] + head * sizes.list_strides[4] + 2 * block
    partials, visits = tl.load(counts), tl.load(counts + 1)
    return blocks, partials, blocks + partials, visits - partials, listed_block(blocks, visits, partials)


@triton.jit
def listed_block(blocks, count, t):
    """The t-th block of a list; past its end, any block.

    Loops read it an iteration ahead: read in the iteration whose loads wait for it, it would take one of their stages.
    """
    return tl.load(blocks + tl.maximum(tl.minimum(t, count - 1), 0))


@triton.jit
def over_tiles(
    block: tl.constexpr, state, at, head, beside, tensors, sizes, work, OF_QUERIES: tl.constexpr, FACTS: tl.constexpr
):
    """The ``state`` of a pass after every key tile that the query tile at ``at`` sees; OF_QUERIES: after every query tile that sees the
    key tile at ``at``. Full tiles come first, unless descriptors may read every tile.

    Args:
        block: the state after one more tile: ``block(first, state, beside, partial, FACTS)``; ``partial`` says whether some row may not
            see some key of it, at compile time unless ``FACTS.whole`` without a predicate.
        beside: what else ``block`` reads.
    """
    TILE: tl.constexpr = FACTS.tile_m if OF_QUERIES else FACTS.tile_n
    if FACTS.lists:
        partial, partials, full, fulls, ahead = block_lists(tensors, sizes, work.b, head, work.block, FACTS)
        for t in range(fulls):
            first = ahead * TILE
            ahead = listed_block(full, fulls, t + 1)
            state = block(first, state, beside, partial=False, FACTS=FACTS)
        for t in tl.range(partials, num_stages=FACTS.partial_stages):
            state = block(tl.load(partial + t) * TILE, state, beside, partial=True, FACTS=FACTS)
    else:
        if OF_QUERIES:
            first, full, full_end, last = m_block_ranges(at, head, work, FACTS)
            if FACTS.sheet:  # sheet_kernel reads `FACTS.sheet` queries at a time, so all of these are written
                UNIT: tl.constexpr = max(FACTS.sheet // TILE, 1)
                first, last = first // UNIT * UNIT, (last + UNIT - 1) // UNIT * UNIT
                # Past the last key dS has to be 0, so those tiles are partial: it may be infinite, and dQ multiplies it by zeros.
                full_end = tl.where(work.seqlen_k - at < FACTS.tile_n, full, full_end)
        else:
            first, full, full_end, last = n_block_ranges(at, head, work, FACTS)
        if FACTS.whole and FACTS.keep is None:
            for n in range(first, last):
                state = block(n * TILE, state, beside, (n < full) | (n >= full_end), FACTS)
        else:
            if FACTS.keep is None:  # a predicate may hide any pair: no tile is full
                for n in range(full, full_end):
                    state = block(n * TILE, state, beside, partial=False, FACTS=FACTS)
            for t in range((full - first) + (last - full_end)):  # the tiles before the full ones, and those behind
                state = block(partial_block(t, first, full, full_end) * TILE, state, beside, partial=True, FACTS=FACTS)
    return state


# -- Dropout -------------------------------------------------------------------------------------------------------


@triton.jit
def dropout_keep(m0, n0, b, head, tensors, sizes, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The pairs of the tile at ``(m0, n0)`` that dropout keeps, bool (TILE_M, TILE_N); m0 and n0 are multiples of 16.

    A call of Philox gives eight pairs, so there are (TILE_M / 2, TILE_N / 4) calls (docs/algorithm.md, (22) and (23)).
    """
    seed = tl.load(tensors.seed)
    rows = tl.arange(0, TILE_M // 2) + m0 // 2
    columns = tl.arange(0, TILE_N // 4) + n0 // 4
    if tensors.piece is not None:  # both starts are multiples of 16, so that the calls' places in a tile stay
        rows += tl.load(tensors.piece) // 2
        columns += tl.load(tensors.piece + 1) // 4
    zero = tl.full((TILE_M // 2, TILE_N // 4), 0, tl.uint32)
    c0, c1 = zero + columns.to(tl.uint32)[None, :], zero + rows.to(tl.uint32)[:, None]
    c2 = zero + (b * sizes.heads_q + head).to(tl.uint32)
    # Four words of 32 bits for each counter, uint32 (TILE_M / 2, TILE_N / 4) each; the key is the seed's two halves.
    w0, w1, w2, w3 = tl.philox_impl(
        c0, c1, c2, zero, (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32), PHILOX_ROUNDS
    )
    # Axes of the words: (m / 16, i % 8, n / 16, j // 2 % 4, i // 8 % 2, j % 2), and then the half of a word by j // 8 % 2.
    words = tl.join(tl.join(w0, w1), tl.join(w2, w3))
    low, high = (words & 0xFFFF) < sizes.threshold, (words >> 16) < sizes.threshold
    kept = tl.join(low.to(tl.int8), high.to(tl.int8))
    kept = kept.reshape(TILE_M // 16, 8, TILE_N // 16, 4, 2, 2, 2)
    return kept.permute(0, 4, 1, 2, 6, 3, 5).reshape(TILE_M, TILE_N) != 0
