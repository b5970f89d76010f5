"""Forward over pages by programs that have even shares of all key tiles (Stream-K, Osama et al. 2023): decoding steps of a batch.

The key tiles of all sequences stand in one line, by sequence and position, and share n of it is ``n · each`` to ``(n + 1) · each``, of as
many sequences as these belong to. Each key head has a program for each share, and the programs of a share, which read neighbouring memory,
stand side by side. So a batch of equal or unequal sequences takes one wave of programs, and as lengths are read on the device a graph
replays with others.

A sequence whose tiles lie in one share is finished by its program. Others leave a state for each share, which
:func:`merge_shares_kernel` merges. Program p leaves two states at most: 2p of tiles that continue a sequence, 2p + 1 of tiles that begin
one. A sequence has one tile at least, whose program stores o = 0 where there are no keys.

``states`` is fp32: each state has a row of head_dim_v + 4 for each row of the tile (o, lse, the largest score, and two of no use, so that
rows begin at 16 bytes). Both kernels find from the lengths which shares a sequence lies in.

A call has one tile of rows for each sequence and key head. The mathematics is :mod:`forward`'s, with the same names.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.arguments import begin_overlap, fetch, plain_sizes, wait_alone, work_tile_of
from tilewise.backends.triton.kernels.forward import with_sink
from tilewise.backends.triton.kernels.maths import exp, log, plain
from tilewise.backends.triton.kernels.paged import (
    keys_of,
    load_paged_tile,
    load_queries,
    state_of_blocks,
    visible_blocks,
    within,
)
from tilewise.backends.triton.kernels.paged_epilogue import (
    largest_score,
    normaliser,
    paged_epilogue,
    rows_of_tile,
    store_output,
    with_scale,
)
from tilewise.backends.triton.kernels.paged_loads import first_page, table_of

AT_ONCE = tl.constexpr(16)  # states of a row that are merged at once
BESIDE_O = tl.constexpr(4)  # numbers of a row of a state beside o
NUMBERS_OF_LINE = tl.constexpr(32)  # page numbers in a line of L2
LINES_OF_PROGRAM = tl.constexpr(128)  # one for each thread


class Shares(NamedTuple):
    """The line of all key tiles.

    Attributes:
        lengths, counts, ends: keys and tiles of each sequence, and where they end in the line, int32 (FACTS.batch,).
        total: tiles of the line. each: tiles of a share.
    """

    lengths: Any
    counts: Any
    ends: Any
    total: Any
    each: Any


@triton.jit
def shares_kernel(
    tensors, sizes, scales, block_table, seqlens_k, cache, states, k_view, k_rest, v_view, v_rest, FACTS: tl.constexpr
):
    """The attention of a share of all key tiles: o and lse of whole sequences, states of the others. Grid: (FACTS.shares · heads_k,).

    Args:
        cache, k_view, k_rest, v_view, v_rest: as in :func:`paged.paged_kernel`.
    """
    begin_overlap(FACTS)
    sizes = plain_sizes(sizes)
    fetch_table(block_table, sizes, cache, FACTS)
    lengths = keys_of(tl.arange(0, FACTS.batch), seqlens_k, sizes, cache)
    shares = shares_of(lengths, sizes, FACTS)
    share, head_k = tl.program_id(0) // sizes.heads_k, tl.program_id(0) % sizes.heads_k
    # This program's part of the line: tiles [at, stop), which may belong to several sequences.
    at = share * shares.each
    stop = tl.minimum(at + shares.each, shares.total)
    b, length, count, first = place_of(at, shares, FACTS)
    page = first_page(first, b, block_table, sizes, cache, FACTS)
    work = work_of(b, length, tensors, sizes, scales)
    q = load_queries(tensors, sizes, work, head_k, FACTS)
    while at < stop:
        last = tl.minimum(count, first + (stop - at))
        work = work_of(b, length, tensors, sizes, scales)
        views = (k_view, k_rest, v_view, v_rest)
        tile = load_paged_tile(tensors, sizes, work, head_k, q, page, block_table, cache, views, FACTS)
        # The next sequence's rows and first page are read while this one's tiles are computed.
        at += last - first
        next_b, length, next_count, next_first = place_of(at, shares, FACTS)
        page = first_page(next_first, next_b, block_table, sizes, cache, FACTS)
        q = load_queries(tensors, sizes, work_of(next_b, length, tensors, sizes, scales), head_k, FACTS)
        # Of the blocks that the rows see, those in this share: under a window a share may have tiles that no row sees.
        begin, full, full_end, end = visible_blocks(tile, work, FACTS)
        begin = tl.minimum(tl.maximum(begin, first), last)
        begin, full, full_end, end = within(begin, full, full_end, tl.maximum(tl.minimum(end, last), begin))
        m, l, acc = state_of_blocks(begin, full, full_end, end, 0, 1, tile, scales, work, FACTS)
        if last - first == count:
            # The whole sequence lies in this share: o and lse are final.
            paged_epilogue(m, l, acc, tile, tensors, sizes, work, FACTS)
        else:
            # Partner: merge_shares_kernel, which finds from the same lengths that it is there.
            put_state(m, l, acc, first == 0, tile, states, work, FACTS)
        b, count, first = next_b, next_count, next_first


@triton.jit
def shares_of(lengths, sizes, FACTS: tl.constexpr):
    """The :class:`Shares` of sequences of these lengths, int32 (FACTS.batch,)."""
    b = tl.arange(0, FACTS.batch)
    # A sequence without keys has a tile, too, so that somebody writes its rows.
    counts = tl.where(b < sizes.batch, tl.maximum(tl.cdiv(lengths, FACTS.share_keys), 1), 0)
    total = tl.sum(counts, 0)
    each = tl.maximum(tl.cdiv(total, FACTS.shares), FACTS.split_tiles)
    return Shares(lengths, counts, tl.cumsum(counts, 0), total, each)


@triton.jit
def of_sequence(x, b, FACTS: tl.constexpr):
    """The element of sequence ``b`` of one of the tensors of :class:`Shares`; 0 past the last."""
    return tl.sum(tl.where(tl.arange(0, FACTS.batch) == b, x, 0), 0)


@triton.jit
def work_of(b, length, tensors, sizes, scales):
    """The work tile of sequence ``b``; past the last sequence that of the last one."""
    b = tl.minimum(b, sizes.batch - 1)
    return work_tile_of(b, b * 0, b * 0, b * 0, sizes.seqlen_q, length, tensors, sizes, scales)


@triton.jit
def place_of(at, shares, FACTS: tl.constexpr):
    """``(b, length, count, first)`` of tile ``at`` of the line: its sequence, that one's keys and tiles, and which of these it is."""
    b = tl.sum((shares.ends <= at).to(tl.int32), 0)  # as many sequences end before it
    count = of_sequence(shares.counts, b, FACTS)
    return b, of_sequence(shares.lengths, b, FACTS), count, at - (of_sequence(shares.ends, b, FACTS) - count)


@triton.jit
def fetch_table(block_table, sizes, cache, FACTS: tl.constexpr):
    """Has the block table brought to L2 while the lengths are read, which say where in it a program begins: some lines by each program."""
    if FACTS.overlap is not None and FACTS.page_size:  # where kernels overlap there is such an instruction
        # No division by a number that the compiler does not know: it would end after the lengths have come.
        b, lines = tl.program_id(0) % FACTS.batch, tl.program_id(0) // FACTS.batch * LINES_OF_PROGRAM
        number = (lines + tl.arange(0, LINES_OF_PROGRAM)) * NUMBERS_OF_LINE
        pointers = table_of(block_table, b, sizes, cache) + number * plain(cache.by_page)
        fetch(pointers, number < plain(cache.capacity) // FACTS.page_size)


@triton.jit
def state_rows(states, state, row, FACTS: tl.constexpr):
    """Offsets of rows of a state, int64."""
    return (state.to(tl.int64) * FACTS.state_rows + row) * (FACTS.head_dim_v + BESIDE_O)


@triton.jit
def put_state(m, l, acc, begins, tile, states, work, FACTS: tl.constexpr):
    """Stores the state of a tile's rows over this program's share of a sequence; ``begins``: the share has the sequence's first tile."""
    i, _ = rows_of_tile(tile.k.head, work, FACTS)
    valid = i < work.seqlen_q
    weight, lse = normaliser(m, l, FACTS)
    weight = with_scale(weight, tile, FACTS)
    # A share cuts two sequences at most, one at its first tile and one at its last: it has room for two states.
    state = 2 * tl.program_id(0) + begins.to(tl.int32)
    rows = state_rows(states, state, tl.arange(0, FACTS.tile_m), FACTS)
    # Beside o of each row, fp32 (tile_m,): lse, -inf where the row saw no key, and the largest score.
    tl.store(states + rows + FACTS.head_dim_v, lse, mask=valid)
    if FACTS.max_logit:
        tl.store(states + rows + (FACTS.head_dim_v + 1), largest_score(m, l, FACTS), mask=valid)
    store_output(states, rows, valid, acc, weight, FACTS)


@triton.jit
def merge_shares_kernel(tensors, sizes, scales, seqlens_k, cache, states, FACTS: tl.constexpr):
    """The merge (8) of the states of one row, and the sink; numbers are natural. A row without states is finished already.

    Grid: (tokens · heads_q).
    """
    WIDTH: tl.constexpr = FACTS.pieces_v[0][2]
    sizes = plain_sizes(sizes)
    token, head = tl.program_id(0) // sizes.heads_q, tl.program_id(0) % sizes.heads_q
    b, i = token // sizes.seqlen_q, token % sizes.seqlen_q
    # Lengths are read before the kernel of shares ends: it only reads them, and it began after all that may have written them.
    shares = shares_of(keys_of(tl.arange(0, FACTS.batch), seqlens_k, sizes, cache), sizes, FACTS)
    count, end = of_sequence(shares.counts, b, FACTS), of_sequence(shares.ends, b, FACTS)
    first, last = (end - count) // shares.each, (end - 1) // shares.each
    if first == last:  # one program has had all tiles, and has stored o and lse
        wait_alone(FACTS)
        return
    begin_overlap(FACTS)
    columns = tl.arange(0, WIDTH)
    within = columns < FACTS.head_dim_v
    m, l, largest = float("-inf"), 0.0, float("-inf")
    acc = tl.full([WIDTH], 0.0, tl.float32)
    for start in range(first, last + 1, AT_ONCE):
        share = start + tl.arange(0, AT_ONCE)
        there = share <= last
        # Program share · heads_k + head: the first share begins the sequence, which is its second state; the others continue it.
        state = 2 * (share * sizes.heads_k + head // FACTS.group) + (share == first).to(tl.int32)
        rows = state_rows(states, state, i * FACTS.group + head % FACTS.group, FACTS)
        # The states of some shares: lse fp32 (AT_ONCE,), o fp32 (AT_ONCE, WIDTH).
        lse = tl.load(states + rows + FACTS.head_dim_v, mask=there, other=float("-inf"))
        o = tl.load(states + (rows[:, None] + columns[None, :]), mask=there[:, None] & within[None, :], other=0.0)
        # Rows without a key in all states so far have -inf: -inf - -inf would be NaN.
        m_new = tl.maximum(m, tl.max(lse, 0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = exp(lse - shift)
        rescale = exp(m - shift)
        l = l * rescale + tl.sum(p, 0)
        acc = acc * rescale + tl.sum(o * p[:, None], 0)
        m = m_new
        if FACTS.max_logit:
            other = tl.load(states + rows + (FACTS.head_dim_v + 1), mask=there, other=float("-inf"))
            largest = tl.maximum(largest, tl.max(other, 0))
    # A row that saw no key in any share: o = 0, lse = -inf.
    lse = tl.where(l == 0, float("-inf"), m + log(l))
    weight = tl.where(l == 0, 0.0, 1.0 / tl.where(l == 0, 1.0, l))
    if FACTS.sink:
        # States are without it: the sink counts once.
        weight, lse = with_sink(weight, lse, l, tl.load(tensors.sink + head).to(tl.float32))
    # o (head_dim_v,) of the row, rounded to q's dtype only here, and its lse.
    row = tl.cast(tl.program_id(0), tl.int64) * FACTS.head_dim_v + columns
    tl.store(tensors.o + row, (acc * weight).to(tensors.o.dtype.element_ty), mask=within)
    line = (tl.cast(b, tl.int64) * sizes.heads_q + head) * sizes.seqlen_q + i
    tl.store(tensors.lse + line, lse)
    if FACTS.max_logit:
        tl.store(tensors.max_logit + line, tl.where(l != l, l, largest))
