"""The arguments of every kernel, and which tile of the attention a program works on.

Arguments come in bundles: to Triton a NamedTuple is one argument. Pointers and whole numbers lie in different bundles, because
Triton may specialise a kernel on a pointer's alignment and must not specialise it on a length. It would compile a kernel anew
for each number that is 1 or a multiple of 16 (``do_not_specialize`` does not reach into tuples), so the host passes a whole
number x as the odd number ``2 x + 3`` (docs/decisions.md#triton-opaque-sizes); :func:`plain_sizes` and the emitted functions undo that.
Strides are in units of ``FACTS.align`` elements, so that the compiler knows that rows start at multiples of 16 bytes.

``FACTS`` is the compile-time part of a launch and the last parameter of every kernel; ``host.facts.MEANINGS`` says what each fact is.
"""

# ruff: noqa: RET505, RUF005 - a compile-time `if` keeps its `else`: without it both returns would be compiled; and Triton's
# tuples are added, not unpacked

from typing import Any, NamedTuple

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.maths import plain, plain_all
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


class Tensors(NamedTuple):
    """The pointers of a launch; None where a kernel has no use for one.

    Attributes:
        q, k, v, o, do, dq, dk, dv: as in the public call, packed or not; q, k, v and do with the strides of :class:`Sizes`, the
            others contiguous.
        lse, dlse, max_logit: fp32 (batch, heads_q, seqlen_q), packed (heads_q, seqlen_q).
        lse2, delta: the rows' statistics that the backward reads, fp32, as lse but with ``Sizes.seqlen_q_rounded`` rows a head.
        cu_seqlens_q, cu_seqlens_k: where the packed sequences begin, (batch + 1,).
        sink: (heads_q,). seed: int64 (1,).
        k_scale, v_scale: fp32, what multiplies the numbers of a quantised cache.
        piece: int64 (2,), the call's first query and key in the whole attention, which dropout counts; None where they are 0.
        sheet, p_sheet: dS and P of some heads, kept between two passes (:func:`tile.sheet_pointers`).
        lists: the two tensors of ``TileMap.visits``: the tiles to visit, partial ones first, and their counts.
        leaves: the tensors that the mask and the score read. grads: buffers for the gradients of those that want one.
    """

    q: Any = None
    k: Any = None
    v: Any = None
    o: Any = None
    lse: Any = None
    max_logit: Any = None
    do: Any = None
    lse2: Any = None
    delta: Any = None
    dlse: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    sink: Any = None
    seed: Any = None
    k_scale: Any = None
    v_scale: Any = None
    piece: Any = None
    sheet: Any = None
    p_sheet: Any = None
    lists: Any = None
    leaves: Any = ()
    grads: Any = ()


class Sizes(NamedTuple):
    """The whole numbers of a launch.

    Attributes:
        seqlen_q, seqlen_k: lengths of the sequences; packed, the totals.
        dims: columns of q and k, and of v and o, for kernels that are one for all head dims.
        slots: programs of a head: its tiles; packed, at least as many (:func:`work_tile`).
        q, k, v, do: ``(batch, row, head)`` strides in units of ``FACTS.align`` elements.
        seqlen_q_rounded: rows from one head to the next in lse2 and delta.
        portion: where a part of dS is kept, its first key; of sums by distance, the query tiles of a part.
        threshold: dropout keeps a pair whose 16-bit value is below it.
        beside: batch elements and heads whose programs of one tile run side by side (:func:`scheduled`).
        batches, heads: the first and the number of the batch elements, and of the key heads, that the launch is for.
        group_parts: programs that share the query heads of a key tile (:mod:`group_parts`).
        sheet: strips, and rows of a strip, of one head's sheet of dS.
        splits: of a sum of dS, how many adjacent programs add into one partial sum, and elements from one partial sum to the next.
        list_strides: ``(batch, head, block)`` strides of a list of tiles, and ``(batch, head)`` strides of its counts.
        extents: size and stride of each axis, for each leaf. grad_extents: the same for the gradients of the leaves.
    """

    batch: int = 0
    heads_q: int = 0
    heads_k: int = 0
    seqlen_q: int = 0
    seqlen_k: int = 0
    dims: tuple = (0, 0)
    slots: int = 0
    q: tuple = (0, 0, 0)
    k: tuple = (0, 0, 0)
    v: tuple = (0, 0, 0)
    do: tuple = (0, 0, 0)
    seqlen_q_rounded: int = 0
    portion: int = 0
    threshold: int = 0
    beside: tuple = (1, 1)
    batches: tuple = (0, 0)
    heads: tuple = (0, 0)
    group_parts: int = 1
    sheet: tuple = (0, 0)
    splits: tuple = (1, 0)
    list_strides: tuple = (0, 0, 0, 0, 0)
    extents: tuple = ()
    grad_extents: tuple = ()


class Scales(NamedTuple):
    """The factors of a launch.

    Attributes:
        softmax: softmax_scale.
        keep: dropout multiplies what it keeps by this.
        numbers: the numbers in the expressions of the mask and the score.
    """

    softmax: float
    keep: float
    numbers: tuple


class CacheSizes(NamedTuple):
    """The whole numbers of a cache, passed as those of :class:`Sizes`.

    Attributes:
        num_pages: of the pool. capacity: the most keys that a sequence has pages for.
        by_sequence, by_page: strides of the block table. by_length: of seqlens_k.
        scales: ``(sequence, page, row, head)`` strides of k_scale and of v_scale, 0 for an axis that they do not have; empty without.
    """

    num_pages: int
    capacity: int
    by_sequence: int
    by_page: int
    by_length: int
    scales: tuple = ()


class WorkTile(NamedTuple):
    """The tile that a program works on, and what the emitted functions read.

    Attributes:
        b: batch element; packed, the sequence.
        block: which query tile, or key tile, of the sequence.
        start_q, start_k: first rows of the sequence in packed tensors, else 0.
        seqlen_q, seqlen_k: lengths of the sequence.
        leaves, extents, grads, grad_extents, numbers: as in :class:`Tensors`, :class:`Sizes` and :class:`Scales`.
        pair: the tile of the leaf that the score reads at i and j, where a descriptor brings it (:func:`with_pair_tile`).
        heads: the elements that the score reads at b and h alone, read once a head (:func:`with_heads`).
        corner: the first query and key of a tile, where the score counts positions from there (:func:`with_tile`).
        far: ``(whether, i, j)``: whether all pairs of a tile are so far from the diagonal that a tensor read by distance has one
            element for them, and a pair that reads it (:func:`with_tile`). Like the three before it, empty where that is not asked.
    """

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
    heads: Any
    corner: Any
    far: Any


# The numbers of the fields that _replaced is asked for.
_PAIR, _HEADS, _CORNER, _FAR = (tl.constexpr(WorkTile._fields.index(x)) for x in ("pair", "heads", "corner", "far"))


@triton.jit
def _replaced(work, FIELD: tl.constexpr, value):
    """The :class:`WorkTile` with another ``value`` in the field of that number."""
    # Triton's tuples have no `_replace`.
    return WorkTile(*work[:FIELD], value, *work[FIELD + 1 :])


_TUPLES = tl.constexpr(tuple(isinstance(x, tuple) for x in Sizes()))  # by field, whether it is several numbers


@triton.jit
def plain_sizes(sizes):
    """The sizes of a launch as plain numbers. The extents of leaves stay odd: the emitted functions undo those they read."""
    found = ()
    for n in tl.static_range(len(sizes) - 2):
        size = plain_all(sizes[n]) if _TUPLES[n] else plain(sizes[n])
        found = found + (size,)
    return Sizes(*found, sizes.extents, sizes.grad_extents)


# -- The tile scheduler --------------------------------------------------------------------------------------------


@triton.jit
def scheduled(group, sizes):
    """The ``(slot, head, batch element)`` of this program, where ``group`` heads of the grid belong to each key head.

    Consecutive programs go first over ``sizes.beside`` batch elements and heads, so that those which read the same tiles of a
    shared bias run side by side and find them in L2; then over the slots of a head; then over the other heads and elements.
    """
    # pid, from its fastest digit: some of the batch elements, some of the heads, the slot, the other heads, the other elements.
    pid = tl.program_id(0)
    some_b, some_h = sizes.beside
    b, pid = pid % some_b, pid // some_b
    head, pid = pid % some_h, pid // some_h
    slot, pid = pid % sizes.slots, pid // sizes.slots
    first, heads = sizes.heads
    others = heads * group // some_h
    # `first` and `heads` count key heads, of which each has `group` heads of the grid; what is left of pid runs over
    # the rest.
    return slot, first * group + pid % others * some_h + head, sizes.batches[0] + pid // others * some_b + b


@triton.jit
def work_tile(slot, b, tensors, sizes, scales, OVER_KEYS: tl.constexpr, FACTS: tl.constexpr):
    """The :class:`WorkTile` in a slot of batch element ``b``: a key tile if OVER_KEYS, else a query tile.

    Not packed, the slots are the tiles. Packed, a slot says which sequence it belongs to as well: sequence b owns the slots from
    ``cu[b] // tile + b`` on, which are at least as many as it has tiles. So no host counts tiles, and a binary search in
    cu_seqlens finds b. The rows past ``cu[batch]`` are sequence ``batch``, whose other side has no rows.
    """
    start_q = slot * 0
    start_k = slot * 0
    seqlen_q = sizes.seqlen_q
    seqlen_k = sizes.seqlen_k
    block = slot
    if FACTS.packed:
        TILE: tl.constexpr = FACTS.tile_n if OVER_KEYS else FACTS.tile_m
        cu_seqlens = tensors.cu_seqlens_k if OVER_KEYS else tensors.cu_seqlens_q
        total = sizes.seqlen_k if OVER_KEYS else sizes.seqlen_q
        b = sequence_of(slot, cu_seqlens, sizes.batch, total, 1, TILE)
        # Both sides' rows of sequence b; the rest past the last sequence belongs to the side whose tiles these are.
        start_q, seqlen_q = packed_rows(tensors.cu_seqlens_q, b, sizes.batch, sizes.seqlen_q, not OVER_KEYS)
        start_k, seqlen_k = packed_rows(tensors.cu_seqlens_k, b, sizes.batch, sizes.seqlen_k, OVER_KEYS)
        block = slot - ((start_k if OVER_KEYS else start_q) // TILE + b)
    return work_tile_of(tensors, sizes, scales, b, block, (start_q, seqlen_q), (start_k, seqlen_k))


@triton.jit
def work_tile_of(tensors, sizes, scales, b, block, queries, keys):
    """The :class:`WorkTile` of a block of rows of batch element ``b``; ``queries`` and ``keys``: the first row and the length of each."""
    return WorkTile(
        b=b,
        block=block,
        start_q=queries[0],
        start_k=keys[0],
        seqlen_q=queries[1],
        seqlen_k=keys[1],
        leaves=tensors.leaves,
        extents=sizes.extents,
        grads=tensors.grads,
        grad_extents=sizes.grad_extents,
        numbers=scales.numbers,
        pair=(),
        heads=(),
        corner=(),
        far=(),
    )


@triton.jit
def sequence_of(slot, cu_seqlens, batch, total, GROUP: tl.constexpr, TILE: tl.constexpr):
    """The sequence that owns a slot (:func:`work_tile`), where each of its rows in ``cu_seqlens`` is GROUP rows of tiles."""
    low = slot * 0
    high = low + batch + 1
    # Sequence `low` begins at or before the slot, sequence `high` after it; every program reads about log2(batch) numbers.
    while high - low > 1:
        middle = (low + high) // 2
        first_slot = tl.minimum(tl.load(cu_seqlens + middle).to(tl.int32), total) * GROUP // TILE + middle
        low = tl.where(first_slot <= slot, middle, low)
        high = tl.where(first_slot <= slot, high, middle)
    return low


@triton.jit
def packed_rows(cu_seqlens, b, batch, total, REST: tl.constexpr):
    """The first row and the length of packed sequence ``b``. Sequence ``batch`` has the rest of the rows if REST, else none."""
    # cu_seqlens may be int64 and, unchecked on a GPU, end past the rows that there are.
    start = tl.minimum(tl.load(cu_seqlens + b).to(tl.int32), total)
    end = tl.minimum(tl.load(cu_seqlens + tl.minimum(b + 1, batch)).to(tl.int32), total)
    if REST:
        end = tl.where(b == batch, total, end)
    return start, tl.maximum(end - start, 0)


@triton.jit
def with_pair_tile(work, view, head, m0, n0, OVER_KEYS: tl.constexpr, FACTS: tl.constexpr):
    """The WorkTile with the leaf's tile at (m0, n0) in ``pair``, where a descriptor brings one.

    Args:
        view: a descriptor of four axes; the first two are indexed by ``FACTS.pair``: each "b", "h" or a number. An axis of one element
            is read at it.
        OVER_KEYS: the tile is turned to (tile_n, tile_m).
    """
    if FACTS.pair is None:
        return work
    else:
        # The leaf's tile, (tile_m, tile_n) in its own dtype, from global to shared memory: the load waits on a barrier of its own.
        first, second = _leading_index(work, head, 0, FACTS), _leading_index(work, head, 1, FACTS)
        pair = view.load([first, second, m0, n0]).reshape(FACTS.tile_m, FACTS.tile_n)
        return _replaced(work, _PAIR, tl.trans(pair) if OVER_KEYS else pair)


@triton.jit
def with_heads(work, head, FACTS: tl.constexpr):
    """The WorkTile with ``heads`` of a query head. In a loop over tiles each of these loads would have a barrier of its own."""
    if FACTS.heads is None:
        return work
    else:
        return _replaced(work, _HEADS, FACTS.heads(work.b, head, work))


@triton.jit
def with_tile(work, m0, n0, FACTS: tl.constexpr):
    """The WorkTile with ``corner`` and ``far`` of the tile at (m0, n0), where the score counts positions, or reads a tensor by distance."""
    if FACTS.corner:
        # In the interpreter m0 and n0 may be numbers without a dtype.
        work = _replaced(work, _CORNER, (m0 + work.b * 0, n0 + work.b * 0))
    if FACTS.near is None:
        return work
    else:
        # Of the tile's distances i - j the largest is at its last query and first key, the smallest at its first and last.
        start, stop = FACTS.near(work)
        far = (m0 + (FACTS.tile_m - 1) - n0 < start) | (m0 - n0 - (FACTS.tile_n - 1) >= stop)
        # The pair that is read for all has the nearest distance beyond, which the mask may keep: at the tile's corner it may not,
        # and there the index may be another.
        j = n0 + work.b * 0
        far = (far, j + tl.minimum(tl.maximum(m0 - j, start - 1), stop), j)
        return _replaced(work, _FAR, far)


@triton.jit
def _leading_index(work, head, AXIS: tl.constexpr, FACTS: tl.constexpr):
    """The index at which the described leaf is read on one of its first two axes."""
    INDEX: tl.constexpr = FACTS.pair[1 + AXIS]
    if INDEX == "b" or INDEX == "h":
        return tl.minimum(work.b if INDEX == "b" else head, plain(work.extents[FACTS.pair[0]][2 * AXIS]) - 1)
    else:
        return head * 0 + INDEX


# -- Kernels that overlap ------------------------------------------------------------------------------------------
#
# Programmatic dependent launch: a kernel may begin while its predecessor in the stream still runs. `FACTS.overlap` says how a kernel
# takes part ("leads", "reads", "joins" or None; `Role` on the host's side).


@triton.jit
def begin_overlap(FACTS: tl.constexpr):
    """The first statement of a kernel that may overlap with others."""
    if FACTS.overlap == "reads":
        # Partner: all programs of the kernel before. Until they end, what they write may not be read.
        gdc_wait()
    if FACTS.overlap is not None:
        # Partner: the kernel after this one, which may begin once every program of this one has come here.
        gdc_launch_dependents()


@triton.jit
def end_overlap(FACTS: tl.constexpr):
    """The last statement of a kernel that may overlap with others."""
    if FACTS.overlap == "joins":
        # Partner: the kernel before, with which this one ran side by side; whoever waits for this one then waits for both.
        gdc_wait()
