"""The loads of the kernels of tangents: q, k, v and dO, their tangents, and the statistics of the rows with theirs.

Tangents are contiguous. A tile of one that is zero is () and takes neither loads nor registers.
"""

# ruff: noqa: RET505 - a compile-time `if` keeps its `else`: without it both returns would be compiled; and Triton's
# tuples are added, not unpacked

from typing import Any, NamedTuple

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.backward import key_sources, load_statistics, query_head, visible_pairs
from tilewise.backends.triton.kernels.mask import key_interval, query_interval
from tilewise.backends.triton.kernels.tile import (
    Source,
    line_of,
    load_rows,
    load_streamed,
    shift_of_rows,
    source_of,
    token_of,
)


class Moved(NamedTuple):
    """Pointers to tangents, all contiguous: of q, k, v, dO and the sink; of o and lse, which the first kernel writes; for the other
    kernels, of lse and delta with ``Sizes.seqlen_q_rounded`` rows a head. None where a kernel has no use for one, or it is zero."""

    q: Any = None
    k: Any = None
    v: Any = None
    do: Any = None
    o: Any = None
    lse: Any = None
    delta: Any = None
    sink: Any = None


class MovingRows(NamedTuple):
    """A query tile and its tangents.

    Attributes:
        m0, head: its first row and its query head. lo, hi: the key interval of each row, int32 (tile_m,).
        q, do, moved_q, moved_do: tiles; () where a kernel does not need one, or it is zero. lse2, delta, moved_lse, moved_delta: fp32
            (tile_m,).
    """

    m0: Any
    head: Any
    lo: Any
    hi: Any
    q: Any
    do: Any
    moved_q: Any
    moved_do: Any
    lse2: Any
    delta: Any
    moved_lse: Any
    moved_delta: Any


class MovingHead(NamedTuple):
    """The query rows of one head and their tangents, to be loaded tile by tile.

    Attributes:
        rows: the :class:`QueryHead`. moved_q, moved_do: sources; () for a tangent that is zero.
        lse, delta: descriptors of lse2 and delta, each above its tangent; pointers, unused, where there are none.
    """

    rows: Any
    moved_q: Any
    moved_do: Any
    lse: Any
    delta: Any


class MovingKeys(NamedTuple):
    """The sources of k and v of a key head, or tiles of them, and of their tangents; () for a tangent that is zero."""

    k: Any
    v: Any
    moved_k: Any
    moved_v: Any


# -- Load ----------------------------------------------------------------------------------------------------------


@triton.jit
def contiguous_source(tensor, view, heads, seqlen, work, start, head, OF_V: tl.constexpr, FACTS: tl.constexpr):
    """The Source of a head of a contiguous tensor (batch, seqlen, heads, head_dim), packed without batch; ``view`` is its descriptor,
    or None. () of a tangent that is zero."""
    if tensor is None:
        return ()
    else:
        DIM: tl.constexpr = FACTS.head_dim_v if OF_V else FACTS.head_dim
        row = heads * DIM
        if view is None:
            view = tensor
        b = work.b * 0 if FACTS.packed else work.b  # a packed tensor's descriptor has a batch of one
        return Source(
            tensor + (token_of(seqlen, work, start, FACTS) * row + head * DIM), row, (view, view), b, head, start
        )


@triton.jit
def load_tile(source, first, left, alive, TILE: tl.constexpr, OF_V: tl.constexpr, partial, FACTS: tl.constexpr):
    """A tile of a Source, () of (). ``partial`` is that of a loop, whose tiles come by descriptor where one may read them; None: by
    pointers."""
    if len(source) == 0:
        return ()
    elif partial is None:
        return load_rows(source, first, left, alive, TILE, OF_V, MASKED=True, FACTS=FACTS)
    else:
        # By TMA or cp.async to shared memory. Partner: the barrier of this stage of the loop, on which the first product waits.
        return load_streamed(source, first, left, alive, TILE, OF_V, partial, FACTS)


@triton.jit
def moving_keys(tensors, moved, sizes, work, head_k, views, FACTS: tl.constexpr):
    """The :class:`MovingKeys` of a key head; ``views`` are descriptors of k, v and their tangents, or None."""
    # A head dim of one piece has one descriptor; others come by pointers.
    k_view, v_view, moved_k_view, moved_v_view = views
    k, v = key_sources(tensors, sizes, work, head_k, (k_view, None), (v_view, None), FACTS)
    heads, length, start = sizes.heads_k, sizes.seqlen_k, work.start_k
    moved_k = contiguous_source(moved.k, moved_k_view, heads, length, work, start, head_k, OF_V=False, FACTS=FACTS)
    moved_v = contiguous_source(moved.v, moved_v_view, heads, length, work, start, head_k, OF_V=True, FACTS=FACTS)
    return MovingKeys(k, v, moved_k, moved_v)


@triton.jit
def moving_head(tensors, moved, sizes, work, head, views, statistics, FACTS: tl.constexpr):
    """The :class:`MovingHead` of a query head.

    Args:
        views: descriptors of q, dO and their tangents. statistics: those of ``lse`` and ``delta``. All may be None.
    """
    q_view, do_view, moved_q_view, moved_do_view = views
    rows = query_head(tensors, sizes, work, head, (q_view, None), (do_view, None), None, FACTS)
    heads, length, start = sizes.heads_q, sizes.seqlen_q, work.start_q
    moved_q = contiguous_source(moved.q, moved_q_view, heads, length, work, start, head, OF_V=False, FACTS=FACTS)
    moved_do = contiguous_source(moved.do, moved_do_view, heads, length, work, start, head, OF_V=True, FACTS=FACTS)
    # Without a descriptor the argument must still be some tensor: it is never read.
    lse, delta = statistics
    return MovingHead(
        rows, moved_q, moved_do, moved.lse if lse is None else lse, moved.delta if delta is None else delta
    )


@triton.jit
def load_tangent_rows(m0, head, tensors, moved, sizes, work, FACTS: tl.constexpr):
    """The :class:`MovingRows` of the forward's pass: without dO and delta."""
    left = work.seqlen_q - m0
    i = m0 + tl.arange(0, FACTS.tile_m)
    q = source_of(tensors.q, (None, None), sizes.q, work, work.start_q, head, FACTS)
    line = line_of(head, sizes.heads_q, sizes.seqlen_q, work, work.start_q, FACTS)
    lse = tl.load(tensors.lse + line + i, mask=i < work.seqlen_q, other=float("-inf"))
    lse2 = shift_of_rows(lse, FACTS)
    lo, hi = key_interval(i, head, work, FACTS)
    # Q and its tangent: (tile_m, head_dim), in the inputs' dtype.
    q = load_rows(q, m0, left, None, FACTS.tile_m, OF_V=False, MASKED=True, FACTS=FACTS)
    moved_q = contiguous_source(
        moved.q, None, sizes.heads_q, sizes.seqlen_q, work, work.start_q, head, OF_V=False, FACTS=FACTS
    )
    moved_q = load_tile(moved_q, m0, left, None, FACTS.tile_m, OF_V=False, partial=None, FACTS=FACTS)
    return MovingRows(m0, head, lo, hi, q, (), moved_q, (), lse2, lse2, lse2, lse2)


@triton.jit
def load_moving_rows(m0, head, tensors, moved, sizes, work, FACTS: tl.constexpr):
    """The :class:`MovingRows` at ``m0`` of a :class:`MovingHead`; rows past the last are zero, and their P is 0."""
    i = m0 + tl.arange(0, FACTS.tile_m)
    lo, hi = key_interval(i, head.rows.head, work, FACTS)
    q, do, moved_q, moved_do = load_moving_tiles(m0, head, work, partial=None, FACTS=FACTS)
    # lse2 and delta and their tangents: fp32 (tile_m,), a few numbers a thread, since a row lies along the warp's columns.
    start, ok = head.rows.statistics_start, i < work.seqlen_q
    lse2, delta = load_statistics(tensors, start, i, work.seqlen_q, MASKED=True)
    moved_lse = tl.load(moved.lse + start + i, mask=ok, other=0.0)
    moved_delta = tl.load(moved.delta + start + i, mask=ok, other=0.0)
    return MovingRows(m0, head.rows.head, lo, hi, q, do, moved_q, moved_do, lse2, delta, moved_lse, moved_delta)


@triton.jit
def load_moving_tiles(m0, head, work, partial, FACTS: tl.constexpr):
    """q, dO and their tangents at ``m0`` of a :class:`MovingHead`, () for a tangent that is zero; (tile_m, head_dim) and
    (tile_m, head_dim_v), in the inputs' dtype, zero past the last row; ``partial`` is that of :func:`load_tile`."""
    left = work.seqlen_q - m0
    q = load_tile(head.rows.q, m0, left, None, FACTS.tile_m, OF_V=False, partial=partial, FACTS=FACTS)
    moved_q = load_tile(head.moved_q, m0, left, None, FACTS.tile_m, OF_V=False, partial=partial, FACTS=FACTS)
    do = load_tile(head.rows.do, m0, left, None, FACTS.tile_m, OF_V=True, partial=partial, FACTS=FACTS)
    moved_do = load_tile(head.moved_do, m0, left, None, FACTS.tile_m, OF_V=True, partial=partial, FACTS=FACTS)
    return q, do, moved_q, moved_do


@triton.jit
def stream_statistic(m0, plain, moved, view, start, work, partial, FACTS: tl.constexpr):
    """lse2 or delta, ``plain``, of the rows at ``m0`` and its tangent, fp32 (tile_m,); past the last row they may be anything."""
    if (FACTS.whole or (FACTS.tma and not partial)) and not FACTS.packed:
        return tl.split(tl.trans(view.load([0, (start + m0).to(tl.int32)])))  # (2, tile_m) in one load
    else:
        # An address for every number of a thread: these tiles are few, or come without descriptors.
        at = start + m0 + tl.arange(0, FACTS.tile_m)
        ok = m0 + tl.arange(0, FACTS.tile_m) < work.seqlen_q
        return tl.load(plain + at, mask=ok, other=0.0), tl.load(moved + at, mask=ok, other=0.0)


@triton.jit
def stream_moving_keys(n0, i, j, query, keys, work, partial, FACTS: tl.constexpr):
    """The pairs of the tile at ``n0`` that count, bool (tile_m, tile_n), () where all do or :func:`hide` asks; then k, v and their
    tangents as tiles, () for a tangent that is zero."""
    left = work.seqlen_k - n0
    kept, alive = (), None
    if (
        not FACTS.whole and partial
    ):  # a key that no row here sees has P = 0, and its rows are not read: they may hold NaN
        kept = visible_pairs(query, i, j, query.head, work, FACTS)
        if FACTS.keep is not None:
            alive = tl.max(kept.to(tl.int32), 0) > 0
        elif FACTS.masked:
            first, last = query_interval(j, query.head, work, FACTS)
            alive = first < last
    # K, V and their tangents: (tile_n, head_dim) and (tile_n, head_dim_v), in the inputs' dtype, in the order of their use.
    k = load_tile(keys.k, n0, left, alive, FACTS.tile_n, OF_V=False, partial=partial, FACTS=FACTS)
    moved_k = load_tile(keys.moved_k, n0, left, alive, FACTS.tile_n, OF_V=False, partial=partial, FACTS=FACTS)
    v = load_tile(keys.v, n0, left, alive, FACTS.tile_n, OF_V=True, partial=partial, FACTS=FACTS)
    moved_v = load_tile(keys.moved_v, n0, left, alive, FACTS.tile_n, OF_V=True, partial=partial, FACTS=FACTS)
    return kept, k, v, moved_k, moved_v


@triton.jit
def load_moving_keys(n0, tensors, moved, sizes, work, head_k, FACTS: tl.constexpr):
    """The :class:`MovingKeys` at ``n0`` as tiles; rows past the last are zero."""
    keys = moving_keys(tensors, moved, sizes, work, head_k, (None, None, None, None), FACTS)
    left = work.seqlen_k - n0
    moved_k = load_tile(keys.moved_k, n0, left, None, FACTS.tile_n, OF_V=False, partial=None, FACTS=FACTS)
    moved_v = load_tile(keys.moved_v, n0, left, None, FACTS.tile_n, OF_V=True, partial=None, FACTS=FACTS)
    k = load_tile(keys.k, n0, left, None, FACTS.tile_n, OF_V=False, partial=None, FACTS=FACTS)
    v = load_tile(keys.v, n0, left, None, FACTS.tile_n, OF_V=True, partial=None, FACTS=FACTS)
    return MovingKeys(k, v, moved_k, moved_v)
