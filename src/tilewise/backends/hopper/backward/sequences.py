"""Packed sequences in the backward: where their rows, statistics and accumulated dQ lie, and how roles learn the next tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.params import BackwardParams
from tilewise.backends.hopper.backward.tiles import PAST_EVERY_TILE, STATISTICS_ALIGNMENT, PlanRow
from tilewise.backends.hopper.kit import packed, schedule
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.scheduler import PICK, publish_tile, receive_ahead, receive_tile


class SheetPlace(NamedTuple):
    """The place of a packed sequence in a sheet of dS. Sequences follow one another, in each the query heads of the launch, and of a head
    its blocks of keys, each with those of all queries.

    Attributes:
        start: where its query head 0 begins, which another launch may have: less than 0 then.
        head_blocks, key_blocks: how many blocks a head has, and how many of these are of one block of keys.
    """

    start: I32
    head_blocks: I32
    key_blocks: I32

    def block(self, head, n, m):
        """The number of a query head's block, the n-th of the keys and the m-th of the queries."""
        return self.start + head * self.head_blocks + n * self.key_blocks + m


class BackwardSeqlenInfo(NamedTuple):
    """The place of a tile's packed sequence.

    Attributes:
        q, k: its rows, and the keys that the tile visits or holds.
        statistics_row: the first of its rows in the buffers of lse2 and delta.
        dq_block: the first of its blocks of the accumulated dQ.
        sheet: the place of its blocks in a sheet of dS, where that is kept.
    """

    q: packed.Span
    k: packed.Span
    statistics_row: I32
    dq_block: I32
    sheet: SheetPlace | None = None


class PackedSequence(NamedTuple):
    """One packed sequence.

    Attributes:
        q, k: its rows and keys.
        seen: those of its keys that some row sees.
        numbers: the launch's numbers with this sequence's lengths: rows, keys seen, and the band's ends counted from the first key seen.
    """

    q: packed.Span
    k: packed.Span
    seen: packed.Span
    numbers: BackwardParams

    @classmethod
    def of(
        cls, n, params: BackwardParams, config: Backward, rest_q: bool = False, rest_k: bool = False
    ) -> PackedSequence:
        """The n-th sequence. ``rest_q``, ``rest_k``: the rows, or keys, past the last sequence count as one more sequence."""
        starts = params.packed
        # A sequence without rows or keys still has a place: its tiles are none.
        q = packed.rows_of(n, starts.cu_q, params.seqlen_q, rest_q)
        k = packed.rows_of(n, starts.cu_k, params.seqlen_k, rest_k)
        off = k.size - q.size  # the band is aligned at the bottom right of each sequence
        moving = schedule.Band(
            params.lo + off if config.form == "band" else None,
            params.hi + off,
            k.size,
        )
        # Only keys that some row sees are numbered from here on: the others never share a tile with them.
        first, band = schedule.cut(moving, starts.first, starts.last, q.size, PICK)
        numbers = {"seqlen_q": q.size, "seqlen_k": band.seqlen_k, "lo": band.lo, "hi": band.hi}
        numbers = params._replace(**{name: value for name, value in numbers.items() if value is not None})
        return cls(q, k, packed.Span(k.start + first + band.seqlen_k, band.seqlen_k), numbers)

    @property
    def parts(self) -> tuple[packed.Span, packed.Span, packed.Span]:
        """The keys seen, those before and those after. Each part has key tiles of its own, so that keys that nobody sees never share a
        tile with others."""
        return self.seen, self.before, packed.Span(self.k.end, self.k.end - self.seen.end)

    @property
    def before(self) -> packed.Span:
        return packed.Span(self.seen.start, self.seen.start - self.k.start)


def seqlen_info(
    n, sequence: PackedSequence, k: packed.Span, params: BackwardParams, config: Backward
) -> BackwardSeqlenInfo:
    """The place of the n-th sequence, of which a tile has the keys ``k``."""
    cu, total = params.packed.cu_q, params.seqlen_q
    # Padded, so that a block of rows never has the statistics of two sequences.
    first_row = statistics_start(n, cu, total, config) * STATISTICS_ALIGNMENT
    sheet = sheet_place(n, sequence, params, config) if config.packs_sheet else None
    return BackwardSeqlenInfo(sequence.q, k, first_row, dq_block_start(n, cu, total, config), sheet)


def statistics_start(n, cu: cute.Tensor, total, config: Backward):
    """The beginning of a sequence's statistics, in units of STATISTICS_ALIGNMENT rows."""
    return packed.spaced(n, cu, total, config.statistics_gap, STATISTICS_ALIGNMENT)


def dq_block_start(n, cu: cute.Tensor, total, config: Backward):
    """The first block of a sequence's accumulated dQ."""
    # One block more for each sequence, because its last block may be partial and its first must be its own.
    return packed.spaced(n, cu, total, config.keys.tile_m, config.keys.tile_m)


# -- The plan of packed sequences ----------------------------------------------------------------------------------


def heads_of_launch(params: BackwardParams) -> tuple:
    """``(each, first, count)``: how many key heads every launch has at most; the first of this one's, and how many these are: possibly
    none."""
    plan, portion = params.packed.plan, params.packed.portion
    each = plan[PlanRow.BLOCKS, cute.size(plan, mode=[1]) - 1]
    return each, portion * each, PICK.larger(PICK.smaller(each, params.heads - portion * each), 0)


def nth_planned_tile(n, parts, row: PlanRow, params: BackwardParams) -> packed.PackedTile:
    """The n-th tile of a launch in the plan's order: of each block of a sequence all key heads, each of which has ``parts`` that are tiles
    apart. ``row``: where the plan has the tiles. A tile past the last one has ``sequence`` -1."""
    plan = params.packed.plan
    _, first, heads = heads_of_launch(params)
    # Of no head every tile is past the last one.
    n, heads = I32(cutlass.select_(heads > 0, n, PAST_EVERY_TILE)), PICK.larger(heads, 1)
    last, block = cute.size(plan, mode=[1]) - 1, n // (heads * parts)
    start, sequence = packed.holder_of(block, plan[row, None], plan[PlanRow.ORDER, None], last)
    sequence = I32(cutlass.select_(block < plan[row, last], sequence, I32(-1)))
    return packed.PackedTile(sequence, I32(block - start), I32(first * parts + n % (heads * parts)))


def nth_tile_of_sections(n, params: BackwardParams) -> packed.PackedTile:
    """The n-th key tile of a launch of all heads, section by section, each of which has all sequences. Past the last tile ``sequence`` is
    -1."""
    plan = params.packed.plan
    last = cute.size(plan, mode=[1]) - 1
    order = schedule.Order(plan[PlanRow.KEY_TILES, last], params.heads, plan[PlanRow.BLOCKS, last], backwards=False)
    # Every CTA takes one number past the last tile before it ends; there is no head to divide by there, nor where there is no tile.
    block, head = schedule.tile_at(
        PICK.smaller(n, order.tiles - 1), order._replace(m_blocks=PICK.larger(order.m_blocks, 1)), PICK
    )
    start, sequence = packed.holder_of(block, plan[PlanRow.KEY_TILES, None], plan[PlanRow.ORDER, None], last)
    sequence = I32(cutlass.select_(n < order.tiles, sequence, I32(-1)))
    return packed.PackedTile(sequence, I32(block - start), I32(head))


def sheet_place(n, sequence: PackedSequence, params: BackwardParams, config: Backward) -> SheetPlace:
    """The place of the n-th sequence in this launch's sheet."""
    keys, queries = config.queries.blocks(sequence.q.size, sequence.numbers.seqlen_k)
    each, first, _ = heads_of_launch(params)
    before = each * params.packed.plan[PlanRow.BLOCKS, n]
    return SheetPlace(params.group * (before - first * keys * queries), keys * queries, queries)


# -- Mailboxes -----------------------------------------------------------------------------------------------------


def publish_held(tile: packed.PackedTile | None, smem, n: int, phase) -> None:
    """Tells the roles that wait for ``held_full[n]`` their tile."""
    publish_tile(tile, smem.boxes.words, n, smem.held_empty, phase)


def receiver(smem, n) -> Callable:
    """The function ``(phase)`` by which a role that waits for ``held_full[n]`` receives its tile."""
    return lambda phase: receive_tile(smem.boxes.words, n, smem.held_full, phase)


def ahead_receiver(smem, stages: int) -> Callable:
    """The function ``(phase)`` by which the warp that loads ahead receives its tile."""
    return lambda phase: receive_ahead(smem.boxes, stages, phase)
