"""What one warpgroup does with one block of scores and its gradient, in registers; and the numbers of a launch.

Blocks are read as rows and columns (:mod:`tilewise.backends.hopper.kit.tile`). Over key tiles they are transposed, Sᵀ = K Qᵀ:
rows are keys and columns queries, and lse and delta belong to columns. Over query tiles they belong to rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp as warp_ops
from cutlass.cute.nvgpu import warpgroup

from tilewise import expr
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.config import ALIGNMENT, PLAIN
from tilewise.backends.hopper.kit import dropout as dropping
from tilewise.backends.hopper.kit import expression, packed, schedule, tile
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.params import OptionalParams as Extra
from tilewise.backends.hopper.kit.ring import release
from tilewise.backends.hopper.kit.scheduler import PICK


class Starts(NamedTuple):
    """Of packed sequences. ``cu_q``, ``cu_k`` (sequence + 1,), int32: where they begin; ``first``, ``last``: no other keys of each
    count; ``queue`` (1,), int32: how many tiles of a pass were taken after each CTA's first."""

    cu_q: cute.Tensor
    cu_k: cute.Tensor
    queue: cute.Tensor
    first: I32
    last: I32


class Work(NamedTuple):
    """Numbers of a launch, or of a packed sequence. ``lo``, ``hi``: the band's ends. ``heads``: of k and v; each serves ``group``
    of q. ``scale``: softmax_scale. ``scale2``: softmax_scale · log2(e); with a softcap, cap · log2(e), and ``cap2`` as in
    :func:`tile.soften`; with a traced score log2(e). ``extra``: what only some kernels have, of one pass; over key tiles its ends are
    those of columns, the queries that see a key, and its lists are of query blocks."""

    seqlen_q: I32
    seqlen_k: I32
    heads: I32
    group: I32
    batch: I32
    section: I32
    lo: I32
    hi: I32
    scale: F32
    scale2: F32
    cap2: F32
    starts: Starts | None = None
    extra: Extra = Extra()

    @property
    def heads_q(self):
        return self.heads * self.group

    @property
    def queue(self) -> cute.Tensor:
        """The queue of packed tiles, as the tile scheduler reads it."""
        return self.starts.queue


def band(work: Work, x: Backward) -> schedule.Band:
    """Of numbers."""
    return schedule.Band(work.lo if x.form == "band" else None, None if x.form == "full" else work.hi, work.seqlen_k)


def band_of_rows(batch, head, work: Work, x: Backward) -> schedule.Band:
    """Of a query head. Rows past the last have the last's ends."""
    if not x.by_rows:
        return band(work, x)
    lo, hi = (held(ends, batch, head, work.seqlen_q - 1) for ends in (work.extra.lo, work.extra.hi))
    return schedule.Band(lo, hi, work.seqlen_k)


def band_of_columns(batch, head, work: Work, x: Backward) -> schedule.Band:
    """Of a query head; of a key head where all of its group have the same. Columns past the last have the last's ends."""
    if not x.by_rows:
        return band(work, x)
    first, last = (held(ends, batch, head, work.seqlen_k - 1) for ends in (work.extra.lo, work.extra.hi))
    return schedule.Band(None, None, work.seqlen_k, first, last)


def held(ends: cute.Tensor, batch, head, last):
    """The ends of a head as a function of the line."""
    return lambda n: ends[batch, head, PICK.smaller(n, last)]


class Limits(NamedTuple):
    """First and one past the last kept column of a thread's two rows, from the thread's first column on; None: no end."""

    ends: tuple

    @classmethod
    def of(cls, lower: list | None, upper: list | None):
        """From columns of the whole matrix."""
        start = tile.column_of(cute.arch.thread_idx()[0] % 128, 0)
        return cls(tuple(None if end is None else [n - start for n in end] for end in (lower, upper)))

    def within(self, column):
        """As columns of the block that begins at ``column``."""
        return [None if end is None else [n - column for n in end] for end in self.ends]


class Block(NamedTuple):
    """What a thread knows of a block: the ends of its rows' columns there, None: all are kept; and its pairs, if there are expressions
    or dropout."""

    limits: list | None = None
    pairs: expression.Pairs | None = None

    def kept(self, acc: cute.Tensor, work: Work, x: Backward) -> Callable | None:
        """Whether dropout keeps a pair, by the row and column of an accumulator; None: all."""
        return dropping.kept(self.pairs, cute.size(tile.rows_columns(acc), mode=[1]), work) if x.dropout else None

    def values(self, x: Backward) -> expression.Values | None:
        """Of each pair its score, its slope, and, where some may be hidden, whether the predicate keeps it."""
        if x.traced == PLAIN:
            return None
        hides = self.limits is not None and x.traced.keep
        return expression.Values([*x.traced.trees(), *([expr.parse(x.traced.keep)] if hides else [])], self.pairs)


def pairs_of(at, names: tuple[str, str], row, column, work: Work) -> expression.Pairs:
    """Of a thread of a warpgroup whose rows begin at ``row``, in the block whose columns begin at ``column``."""
    thread = cute.arch.thread_idx()[0] % 128
    rows = [row + tile.row_of(thread, r) for r in range(2)]
    return expression.of_block(at, names, rows, column + tile.column_of(thread, 0), work)


def flag_of(m_block, batch, head, lse2: cute.Tensor) -> tuple:
    """Where the flag of a tile of the pass over queries is: how many of its warpgroups have written their rows' statistics. They follow
    a head's lines, the first one last."""
    return batch, head, lse2.shape[2] - 1 - m_block


def own_place():
    """``(warp, warpgroup)`` of a thread in its CTA, the same for all threads of a warp."""
    uniform = cute.arch.make_warp_uniform
    return uniform(cute.arch.warp_idx()), uniform(cute.arch.thread_idx()[0] // 128)


def products(mma, acc, pairs, overwrite: bool) -> None:
    """Issues acc (+)= the sum of the pairs' products as one group; as :func:`tile.begin` otherwise."""
    atom = cute.make_mma_atom(mma.op)
    warpgroup.fence()
    for n, (a, b) in enumerate(pairs):
        for step in range(cute.size(a, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, not (overwrite and n == step == 0))
            cute.gemm(atom, acc, a[None, None, step], b[None, None, step], acc)
    warpgroup.commit_group()


def probabilities(
    s: cute.Tensor, p: cute.Tensor | None, lse2, block: Block, work: Work, x: Backward, kept=None
) -> None:
    """A block of scores becomes slope · P, in fp32, and the operand ``p``, if any, gets P, rounded, zero unless ``kept(r, c)``.

    ``P = 2**(s scale2 - lse2)``; with a softcap, ``s = tanh(..)`` and the slope is ``1 - s²``; of a traced score both are its own;
    else the slope is 1. Pairs outside the block's limits are selected to 0. ``lse2(r, c)`` of a thread's row and column.
    """
    values = block.values(x)
    if x.softcap:
        tile.soften_roughly(s, work.cap2)
    for c in range(0, cute.size(s, mode=[1]), 2):
        for r in range(2):
            ends = (None, None) if block.limits is None else [None if end is None else end[r] for end in block.limits]
            points = [pointwise(s, r, c + n, values, work, x) for n in range(2)]
            pair = [
                probability(point, lse2(r, c + n), tile.constant_column(c + n), ends, work)
                for n, point in enumerate(points)
            ]
            for n, point in enumerate(points):
                s[r, c + n] = steep(pair[n], point, x)
            if p is not None:
                pair = pair if kept is None else [tile.choose(kept(r, c + n), pair[n], 0.0) for n in range(2)]
                words(p)[c + r] = tile.pack(*pair, x.dtype)


class Point(NamedTuple):
    """A pair's score, or its product, or what a softcap made of that; its ``slope``, None: 1, or the softcap's; whether a predicate
    keeps it, None: yes."""

    score: F32
    slope: F32 | None = None
    keep: cutlass.Boolean | None = None


def pointwise(s: cute.Tensor, r: int, c: int, values: expression.Values | None, work: Work, x: Backward) -> Point:
    """Of the product at a thread's row and column."""
    if values is None:
        return Point(s[r, c])
    if r == 0:
        values.begin(c, s)
    score, slope, *keep = values.at(r, c, s[r, c] * work.scale)
    return Point(F32(score) if x.traced.score else s[r, c], F32(slope) if x.traced.sloped else None, *keep)


def steep(p, point: Point, x: Backward):
    """slope · P; a traced slope may be anything where P is 0."""
    if x.softcap:
        return p * (1.0 - point.score * point.score)
    return p if point.slope is None else tile.choose(p == 0.0, 0.0, p * point.slope)


def probability(point: Point, lse2, column: int, ends, work: Work):
    """Of one score, whose column is a constant: 0 unless ``ends[0] <= column < ends[1]``; None: unbounded."""
    p = cute.math.exp2(point.score * work.scale2 - lse2, fastmath=True)
    if point.keep is not None:
        p = tile.choose(point.keep, p, 0.0)
    if ends[0] is not None:
        p = tile.choose(ends[0] <= column, p, 0.0)
    return p if ends[1] is None else tile.choose(ends[1] > column, p, 0.0)


def score_gradients(dp: cute.Tensor, p: cute.Tensor, delta, kept=None, work: Work | None = None) -> None:
    """A block of dP becomes dS = (slope · P) (dP - delta), (13) and (14); ``delta(r, c)`` of a thread's row and column. With dropout
    dP is scaled where ``kept(r, c)``, else 0."""
    for r in range(2):
        for c in range(cute.size(dp, mode=[1])):
            value = dp[r, c] if kept is None else tile.choose(kept(r, c), dp[r, c] * work.extra.keep, 0.0)
            dp[r, c] = F32(p[r, c]) * (value - delta(r, c))


def allocated(smem, elements: int, dtype: str) -> cute.Pointer:
    """Room in shared memory for tiles of any layout."""
    return smem.allocate_array(ELEMENT[dtype], elements, byte_alignment=ALIGNMENT)


def seen_as(room: cute.Pointer, info) -> cute.Tensor:
    """A room with the layout that a descriptor's tiles have."""
    layout = info.smem_layout
    return cute.make_tensor(cute.recast_ptr(room, layout.inner), layout.outer)


def by_rows(t: cute.Tensor, x: Backward) -> cute.Tensor:
    """(batch, row, head, column) as (row, column, head, batch), or as :func:`packed.ragged` has it."""
    return packed.ragged(t) if x.packed else cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))


def at_slot(t: cute.Tensor, n) -> cute.Tensor:
    """Descriptors of one room or slot."""
    return t[None, None, None, n]


def turned(t: cute.Tensor) -> cute.Tensor:
    """Blocks (rows, columns, slot) seen as (columns, rows, slot)."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, [1, 0, 2]))


def words(x: cute.Tensor) -> cute.Tensor:
    """An operand in registers as 32-bit words, two elements each, in the registers' order."""
    return cute.recast_tensor(cute.make_tensor(x.iterator, cute.make_layout(cute.size(x))), I32)


def hold(word, values: cute.Tensor) -> None:
    """Holds what ``values`` were made by above the wait that follows, as :func:`tile.pin` does, for half an instruction a
    word: a store to ``word``, which nobody reads, of them all combined by exclusive or, three at a time."""
    found = cute.recast_tensor(cute.make_tensor(values.iterator, cute.make_layout(cute.size(values))), I32)
    left = [found[n] for n in range(cute.size(found))]
    while len(left) > 1:
        three = (left + [left[0]] * (3 - len(left)))[:3]
        code = "lop3.b32 {$w0}, {$r0}, {$r1}, {$r2}, 0x96;"
        left = [*left[3:], cute.arch.inline_ptx(code, write_only_types=[I32], read_only_args=three)]
    cute.arch.inline_ptx("st.volatile.shared.b32 [{$r0}], {$r1};", read_only_args=[word.toint(), left[0]])


def to_operand(operand: cute.Tensor, acc: cute.Tensor, dtype: str) -> None:
    """An accumulator's registers, rounded, into an operand's: the same registers in the same order, no shuffle."""
    values, pairs = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc))), words(operand)
    for n in range(cute.size(pairs)):
        pairs[n] = tile.pack(values[2 * n], values[2 * n + 1], dtype)


def of_columns(statistic: cute.Tensor, slot):
    """A statistic of the thread's columns of a block, from shared memory (:func:`statistics_layout`), by row and column."""
    mine = statistic[None, cute.arch.thread_idx()[0] % 4, None, slot]
    found = cute.make_rmem_tensor(mine.layout.shape, F32)
    cute.autovec_copy(mine, found)
    flat = cute.make_tensor(found.iterator, cute.make_layout(cute.size(found)))
    return lambda r, c: flat[c]


def give_back(empty) -> None:
    """A computing warp is done with a slot, of which every lane has read."""
    cute.arch.sync_warp()
    release(empty)


def statistics_layout(columns: int, slots: int) -> cute.Layout:
    """Of ``columns`` numbers a slot, as threads take them: (2 neighbours, lane of a quad, 8 columns on, slot)."""
    return cute.make_layout((2, 4, columns // 8, slots), stride=(1, 2, 8, columns))


def put(acc: cute.Tensor, mma: cute.TiledMma, room: cute.Tensor, dtype: str, transposed: bool = False) -> None:
    """An accumulator, rounded, to a room in shared memory."""
    out = cute.make_rmem_tensor_like(acc, ELEMENT[dtype])
    out.store(acc.load().to(ELEMENT[dtype]))
    put_fragment(out, mma, room, dtype, transposed)


def put_fragment(
    fragment: cute.Tensor, mma: cute.TiledMma, room: cute.Tensor, dtype: str, transposed: bool = False
) -> None:
    """Rounded numbers in an accumulator's order to a room in shared memory; ``transposed``: which is one seen turned."""
    atom = cute.make_copy_atom(warp_ops.StMatrix8x8x16bOp(transposed, 4), ELEMENT[dtype])
    copy = cute.make_tiled_copy_C(atom, mma)
    part = copy.get_slice(cute.arch.thread_idx()[0] % 128)
    cute.copy(copy, part.retile(fragment), part.partition_D(room))


def scaled(acc: cute.Tensor, factor) -> None:
    for n in range(cute.size(acc)):
        acc[n] = acc[n] * factor
