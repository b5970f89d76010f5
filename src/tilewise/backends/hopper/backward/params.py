"""The numbers and tensors that all roles of a backward's kernel read, and the band of keys that they describe."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute

from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.kit import schedule
from tilewise.backends.hopper.kit.dtypes import F32, I32
from tilewise.backends.hopper.kit.params import OptionalParams
from tilewise.backends.hopper.kit.scheduler import PICK


class PackedParams(NamedTuple):
    """The places of packed sequences.

    Attributes:
        cu_q, cu_k: (sequence + 1,), int32: the first row and key of each sequence.
        queue: (1,), int32: how many tiles of a pass were taken after each CTA's first.
        first, last: keys before ``first`` or from ``last`` on are masked in every sequence.
        plan: (PlanRow, sequence + 2), int32, where there is one (:mod:`tilewise.backends.hopper.backward.packed_plan`).
        portion: where dS is kept, the number of the launch among those that share the key heads.
    """

    cu_q: cute.Tensor
    cu_k: cute.Tensor
    queue: cute.Tensor
    first: I32
    last: I32
    # Written by the first kernel, and read by the passes after it.
    plan: cute.Tensor | None = None
    portion: I32 | None = None


class BackwardParams(NamedTuple):
    """The numbers of a launch, or of one packed sequence.

    Attributes:
        heads, group: heads of k and v; each serves ``group`` heads of q.
        section: heads of a section, as :class:`schedule.Order` has them.
        lo, hi: the band's ends.
        scale: softmax_scale.
        scale2: softmax_scale · log2(e); with a softcap, cap · log2(e); with a traced score, log2(e).
        cap2: 2 log2(e) · softmax_scale / cap, where there is a softcap.
        packed: only of packed sequences.
        extra: what only some kernels have. In the pass over keys its ``lo`` and ``hi`` are the ends of columns, the queries that see
            a key, and its lists are of query blocks.
    """

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
    packed: PackedParams | None = None
    extra: OptionalParams = OptionalParams()

    @property
    def heads_q(self):
        return self.heads * self.group

    @property
    def queue(self) -> cute.Tensor:
        """The queue of tiles, as the tile scheduler reads it."""
        return self.extra.queue if self.packed is None else self.packed.queue


def number_band(params: BackwardParams, config: Backward) -> schedule.Band:
    """The band whose ends are numbers, the same for all heads."""
    # Without a lower or an upper end the band has None there, which costs no instruction
    lo = params.lo if config.form == "band" else None
    return schedule.Band(lo, None if config.form == "full" else params.hi, params.seqlen_k)


def row_band(batch, head, params: BackwardParams, config: Backward) -> schedule.Band:
    """The band of a query head, read by rows. Rows past the last one have the last one's ends."""
    if not config.by_rows:
        return number_band(params, config)
    # A load past the last row's end would be outside the tensor, and a tile's last rows may lie there.
    lo, hi = (ends_of(ends, batch, head, params.seqlen_q - 1) for ends in (params.extra.lo, params.extra.hi))
    return schedule.Band(lo, hi, params.seqlen_k)


def column_band(batch, head, params: BackwardParams, config: Backward) -> schedule.Band:
    """The band of a query head, read by columns; ``head`` is a key head where all heads of a group have the same band. Columns past
    the last one have the last one's ends."""
    if not config.by_rows:
        return number_band(params, config)
    # Read by columns: first(j) <= i < last(j); the ends of rows are not needed in this pass
    # (docs/algorithm.md#6-backward).
    first, last = (ends_of(ends, batch, head, params.seqlen_k - 1) for ends in (params.extra.lo, params.extra.hi))
    return schedule.Band(None, None, params.seqlen_k, first, last)


def ends_of(ends: cute.Tensor, batch, head, last):
    """The function that reads a head's end of row or column n, from a tensor (batch, head, n)."""
    return lambda n: ends[batch, head, PICK.smaller(n, last)]


def flag_place(m_block, batch, head, lse2: cute.Tensor) -> tuple:
    """The index in ``lse2`` of a query tile's flag, which counts the warpgroups that have written their rows' statistics. The flags lie
    behind a head's rows; the first tile's flag is the last element."""
    # Counted from the back, so that the place depends on no length but the buffer's.
    return batch, head, lse2.shape[2] - 1 - m_block


def count_place(batch, head, delta: cute.Tensor) -> tuple:
    """The index in ``delta`` of a head's count of the tiles that were added to its dQ: the last row, which belongs to no query and is
    set to zero with the others of these."""
    return batch, head, delta.shape[2] - 1
