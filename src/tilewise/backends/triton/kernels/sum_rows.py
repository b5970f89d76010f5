"""The sum of the rows that each query has in a gathered call (:mod:`tilewise.backends.blockwise`), weighted where they are states."""

import triton
import triton.language as tl


@triton.jit
def sum_rows_kernel(
    rows, place, own, whose, share, out, sizes, WIDTH: tl.constexpr, GROUP: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sums in fp32, in the order of a query's entries, its own row last. Grid: (blocks of LINES lines).

    A line is a query head of a query. What is not read may hold anything, and counts for nothing.

    Args:
        rows: (count, GROUP, WIDTH), the gathered rows. place: int64 (query, entry), that of each entry; ``count``: it has none.
        own: (query, GROUP, WIDTH), or None. whose: bool (query,), the queries whose own row counts.
        share: fp32 (query, entry, GROUP), of the own row behind those of the entries; None: each counts once.
        out: (query, GROUP, WIDTH). sizes: lines, gathered rows, entries of a query.
    """
    lines, count, entries = sizes
    line = tl.cast(tl.program_id(0), tl.int64) * LINES + tl.arange(0, LINES)
    query, head, columns = line // GROUP, line % GROUP, tl.arange(0, COLUMNS)
    within = (line < lines)[:, None] & (columns < WIDTH)[None, :]
    shares = query * ((entries + (own is not None)) * GROUP) + head
    total = tl.full([LINES, COLUMNS], 0.0, tl.float32)
    for n in tl.range(0, entries):
        at = tl.load(place + query * entries + n, mask=line < lines, other=count)
        there = within & (at < count)[:, None]
        x = tl.load(rows + ((at * GROUP + head) * WIDTH)[:, None] + columns[None, :], mask=there, other=0.0).to(
            tl.float32
        )
        if share is not None:
            x *= tl.load(share + shares + n * GROUP, mask=line < lines, other=0.0)[:, None]
        total += x
    to = (line * WIDTH)[:, None] + columns[None, :]
    if own is not None:
        mine = within & tl.load(whose + query, mask=line < lines, other=0).to(tl.int1)[:, None]
        x = tl.load(own + to, mask=mine, other=0.0).to(tl.float32)
        if share is not None:
            x *= tl.load(share + shares + entries * GROUP, mask=line < lines, other=0.0)[:, None]
        total += x
    tl.store(out + to, total.to(out.dtype.element_ty), mask=within)
