"""Calls whose queries select whole blocks of keys: each block of keys and the queries that selected it are a packed sequence.

Where neighbouring queries select other blocks, a tile of queries meets nearly every key. Gathered by block, the queries meet the keys that
they selected alone. What a query sees of a block that its position cuts, its own under a causal mask, is a second packed call, in which
each block has its own queries. The states of a query are merged (docs/algorithm.md#5-merging), and the backward reads the merged lse, so
that every packed call has its part of the gradients.

Everything is made on the device, and nothing is read back from there. A call runs in pieces whose gathered rows fit in memory
(:func:`by_blocks`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import state
from tilewise.backends.base import Grads, Inputs, Output
from tilewise.backends.piecewise import Cut, Piecewise, cuts, described, room
from tilewise.caching import cached_property
from tilewise.expr import indices, is_number
from tilewise.masks import as_mask
from tilewise.masks.facts import as_band
from tilewise.planning.bit_tiles import LINES
from tilewise.problem import Problem, TensorFacts, plain_index
from tilewise.selections import keys_of_entry, queries_of_row
from tilewise.spec import parse_spec

NEVER = 1e30  # the lse of a row whose pairs have no part in it


Forward = Callable[[Problem, Inputs], Output]
"""A backend's forward of a packed problem."""

Backward = Callable[[Problem, Inputs, Output, Tensor, Tensor], Grads]
"""Its backward, of the forward's results and their gradients."""


ROW = 512  # keys in whose time a query is brought to a block and its part of o back (docs/decisions.md#gathered-blocks)


class Blocks(NamedTuple):
    """A mask of selected blocks.

    Attributes:
        slot: of the rows of entries, which never decrease along a row. block: keys of an entry.
        block_q, start: row r is for the queries from ``r * block_q - start`` on.
        first: the position of the first query among the keys, where a query sees no key behind its own position; else None.
    """

    slot: int
    block: int
    block_q: int
    start: int
    first: int | None


def blocks_of(p: Problem) -> Blocks | None:
    """Return a problem's selected blocks; None: its mask is something else, or an option forbids to gather its queries."""
    spec, region = p.spec, p.spec.region
    told = spec.score_text or spec.dropout_p or spec.max_logit or spec.everywhere or spec.mapped
    if told or p.packed or p.paged or len(region.selections) != 1 or region.predicate is not region.selections[0]:
        return None
    selection, band = region.predicate, as_band(region.interval, p.seqlen_k - p.seqlen_q, p.seqlen_k)
    for index, of in zip(indices(selection)[:2], (("b", 1), ("h", p.group)), strict=True):
        if not is_number(index, 0) and plain_index(index) != of:
            return None
    block, start = keys_of_entry(selection)
    if start or band is None or band.lo is not None or (band.start, band.stop) != (0, p.seqlen_k):
        return None
    # The last query sees the last key, as in a packed causal sequence.
    if band.hi is not None and (band.hi < 1 or band.hi - 1 + p.seqlen_q != p.seqlen_k):
        return None
    return Blocks(selection.args[0][1], block, *queries_of_row(selection), None if band.hi is None else band.hi - 1)


def most_blocks(p: Problem, blocks: Blocks) -> int:
    """Return the most blocks that a query selects."""
    return min(p.extras[blocks.slot].shape[-1], -(-p.seqlen_k // blocks.block))


def sooner(p: Problem, least_pairs: int, visited: float) -> bool:
    """Return whether a problem's queries are to be gathered by block: that takes less time than to visit tiles of keys.

    Args:
        least_pairs: of queries and keys of a head, from which the launches of a gathered call do not matter.
        visited: the keys that a query's tile visits otherwise, in parts of all; it is counted in the time of a gathered one.
    """
    if p.seqlen_q * p.seqlen_k < least_pairs or (blocks := blocks_of(p)) is None:
        return False
    # A tile visits no more than all of its queries select together.
    together = -(-LINES // blocks.block_q) * most_blocks(p, blocks) * blocks.block
    return cost(p) <= min(visited * p.seqlen_k, together)


def cost(p: Problem) -> int:
    """Return the keys that would take a query as long, were they visited without a mask."""
    blocks = blocks_of(p)
    return most_blocks(p, blocks) * (blocks.block + ROW)


def cut(p: Problem, backward: bool) -> list[Cut]:
    """Return the pieces of a pass, whose gathered rows fit in memory."""
    return cuts(
        p, (True, True), lambda batch, heads, queries: gathered_bytes(p, batch * heads * queries, backward) <= room(p)
    )


def told(p: Problem) -> str:
    """Return how a call is cut, for ``explain``."""
    return f"{described(cut(p, p.spec.needs_grad))}; a block of keys and the queries that selected it are a packed sequence"


def gathered_bytes(p: Problem, queries: int, backward: bool) -> int:
    """Return the bytes of the gathered rows of so many queries of all key heads: of q and o, in a backward of their gradients too, and what
    orders them."""
    blocks = blocks_of(p)
    row = p.dtype.itemsize * p.group * (1 + backward) * (p.head_dim + p.head_dim_v)
    marks = 5 * (-(-p.seqlen_k // blocks.block) + 1)  # of a query, a byte for each block, and their running sum
    return queries * (most_blocks(p, blocks) * row + marks)


def packed(p: Problem, blocks: Blocks, own: bool) -> Problem:
    """Return the packed call of the gathered queries, or of each block's ``own``."""
    heads = p.batch * p.heads_k
    rows = heads * p.seqlen_q * (1 if own else most_blocks(p, blocks))
    starts = TensorFacts.contiguous((heads * -(-p.seqlen_k // blocks.block) + 1,), torch.int32)
    text = as_mask(None, causal_too=True).text if own else ""
    spec = replace(p.spec, mask_text=text, mask_slots=(), cu_slots=(0, 1), sink_slot=None, grad_slots=(), piece=None)
    q = TensorFacts.contiguous((rows, p.group, p.head_dim), p.dtype)
    k, v = (TensorFacts.contiguous((heads * p.seqlen_k, 1, width), p.dtype) for width in (p.head_dim, p.head_dim_v))
    return replace(p, q=q, k=k, v=v, extras=(starts, starts), spec=parse_spec(spec.text()), latent=False)


def both(p: Problem) -> list[Problem]:
    """Return the packed calls that a problem needs."""
    blocks = blocks_of(p)
    return [packed(p, blocks, own) for own in (False, True)[: 1 + (blocks.first is not None)]]


# -- The order of the rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """Where queries lie, by the block that they selected.

    Attributes:
        rows: int64 (gathered row,), the query of each, of all heads; past the last one anything.
        place: int64 (query of all heads, entry), the gathered row of each entry; ``len(rows)``: it has none.
        own: bool (query of all heads,), whether the query selected the block that its position cuts; None: none is cut.
        seen: bool (heads, key), whether some query sees the key.
        starts: int32 (heads · blocks + 1,), the first gathered row of each block. starts_own: of its own queries. starts_k: its first key.
    """

    rows: Tensor
    place: Tensor
    own: Tensor | None
    seen: Tensor
    starts: Tensor
    starts_own: Tensor
    starts_k: Tensor

    @classmethod
    def of(cls, entries: Tensor, first: int | None, keys: int, block: int) -> Order:
        """Return the order of queries that select entries ``(heads, query, k)``, which never decrease along a row.

        Args:
            first: the position of the first query among the keys, under a causal mask; else None.
        """
        (heads, queries, _), count, device = entries.shape, -(-keys // block), entries.device
        head, query = torch.arange(heads, device=device), torch.arange(queries, device=device)
        chosen, own = entries < count, None
        chosen[..., 1:] &= entries[..., 1:] != entries[..., :-1]
        if first is not None:
            cut = ((query + first) // block).unsqueeze(-1)
            own = (chosen & (entries == cut)).any(-1)
            chosen &= entries < cut
        # A mark for each block and query; those of no block lie behind all of a head's.
        at = (torch.where(chosen, entries, count) + head.view(-1, 1, 1) * (count + 1)) * queries + query.view(-1, 1)
        marks = torch.zeros(heads * (count + 1) * queries, dtype=torch.uint8, device=device)
        marks = marks.scatter_(0, at.flatten(), 1).view(heads, count + 1, queries)
        marks[:, count] = 0
        order = marks.flatten().cumsum(0, dtype=torch.int32)
        total = heads * queries * min(entries.shape[-1], count)
        place = torch.where(chosen, order[at] - 1, total).long().flatten(0, 1)
        rows = torch.zeros(total + 1, dtype=torch.int64, device=device)
        rows.scatter_(0, place.flatten(), torch.arange(len(place), device=device).repeat_interleave(place.shape[1]))
        ends = order.view(heads, count + 1, queries)[:, :count, -1].flatten()
        seen = (ends.diff(prepend=ends.new_zeros(1)) > 0).view(heads, count, 1).expand(-1, -1, block)
        edges = (torch.arange(count + 1, device=device) * block).clamp_(max=keys)
        starts = [ends, (edges[1:] - (first or 0)).clamp(0, queries) + head.view(-1, 1) * queries]
        starts = [*starts, edges[1:] + head.view(-1, 1) * keys]
        if own is not None:
            seen = seen | _up_to_the_last(own, first, count, block)
            own = own.flatten()
        starts = [torch.cat([x.new_zeros(1), x.flatten()]).int() for x in starts]
        return cls(rows[:total], place, own, seen.flatten(1)[:, :keys], *starts)


def _up_to_the_last(own: Tensor, first: int, count: int, block: int) -> Tensor:
    """Return whether a query ``own`` (heads, query) sees each key of the block at its position: bool (heads, block, key)."""
    at = own.new_zeros(len(own), count * block)
    at[:, first : first + own.shape[1]] = own
    return at.unflatten(1, (count, block)).flip(-1).cumsum(-1, dtype=torch.int32).flip(-1) > 0


# -- The call ------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The tensors of a call, each head's rows behind another's: q (query, group, head_dim), k and v (key, 1, head_dim)."""

    order: Order
    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def gathered(self) -> Inputs:
        """The inputs of the packed call of the gathered queries."""
        return self._inputs(self.q[self.order.rows], self.order.starts)

    @property
    def own(self) -> Inputs:
        """The inputs of the packed call of each block's own queries."""
        return self._inputs(self.q, self.order.starts_own)

    def _inputs(self, q: Tensor, starts: Tensor) -> Inputs:
        keys = self.order.starts_k
        return Inputs(q, self.k, self.v, leaves=(starts, keys), cu_seqlens_q=starts, cu_seqlens_k=keys)


@dataclass(eq=False)
class Blockwise:
    """The call of a problem of selected blocks. ``attend`` and ``differentiate`` compute packed problems."""

    problem: Problem
    attend: Forward
    differentiate: Backward

    @cached_property
    def blocks(self) -> Blocks:
        return blocks_of(self.problem)

    @cached_property
    def calls(self) -> list[Problem]:
        """The packed calls."""
        return both(self.problem)

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Batch elements, key heads and queries, the order of rows."""
        return self.problem.batch, self.problem.heads_k, self.problem.seqlen_q

    def forward(self, t: Inputs) -> Output:
        rows = self._rows(t)
        each = zip(self.calls, (rows.gathered, rows.own), strict=False)
        sink = None if t.sink is None else self._sinks(t.sink)
        o, lse = merged(rows.order, sink, *[self.attend(call, inputs) for call, inputs in each])
        lse = lse.unflatten(0, self.sizes).transpose(2, 3).flatten(1, 2)
        return Output(self._as_q(o), lse.contiguous())

    def backward(self, t: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        rows, wide = self._rows(t), self.problem.compute_dtype
        order, at = rows.order, rows.order.rows
        o, do, lse, dlse = (*map(self._of_q, (out.o, do)), *map(self._of_statistic, (out.lse, dlse)))
        given = rows.gathered, Output(o[at], lse[at].T.contiguous()), do[at], dlse[at].T.contiguous()
        found = self.differentiate(self.calls[0], *given)
        own_dq, dk, dv = None, found.dk, found.dv
        if order.own is not None:
            own_out = Output(o, lse.where(order.own.view(-1, 1), NEVER).T.contiguous())
            own = self.differentiate(self.calls[1], rows.own, own_out, do, dlse.T.contiguous())
            own_dq, dk, dv = own.dq, dk.to(wide) + own.dk, dv.to(wide) + own.dv
        dq = summed(order, found.dq, own_dq)
        sink = None
        if t.sink is not None:
            delta = (do.to(wide) * o).sum(-1) - dlse
            sink = state.sink_gradient(self._sinks(t.sink), lse, delta).unflatten(0, self.sizes).sum((0, 2))
            sink = sink.flatten().to(t.sink.dtype)
        return Grads(self._as_q(dq), self._as_k(dk), self._as_k(dv), sink, {})

    def _rows(self, t: Inputs) -> Rows:
        blocks, (batch, heads, queries) = self.blocks, self.sizes
        entries = t.leaves[blocks.slot]
        row = (torch.arange(queries, device=entries.device) + blocks.start) // blocks.block_q
        entries = entries.index_select(2, row).long().expand(batch, heads, -1, -1).flatten(0, 1)
        order = Order.of(entries, blocks.first, self.problem.seqlen_k, blocks.block)
        # Keys that no query sees may be NaN, and in a product even a P of zero would let them through.
        unseen = ~order.seen.view(batch, heads, -1, 1)
        k, v = (_copy(x.transpose(1, 2)).masked_fill_(unseen, 0).view(-1, 1, x.shape[-1]) for x in (t.k, t.v))
        return Rows(order, self._of_q(t.q), k, v)

    def _of_q(self, x: Tensor) -> Tensor:
        """q, o or dO by heads: (query of all heads, group, width)."""
        return _copy(x.unflatten(2, (-1, self.problem.group)).transpose(1, 2)).flatten(0, 2)

    def _as_q(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`_of_q`, in q's dtype."""
        return x.unflatten(0, self.sizes).to(self.problem.dtype).transpose(1, 2).flatten(2, 3).contiguous()

    def _as_k(self, x: Tensor) -> Tensor:
        """A gradient (key of all heads, 1, width) in the layout and dtype of k."""
        return x.view(*self.sizes[:2], -1, x.shape[-1]).to(self.problem.dtype).transpose(1, 2).contiguous()

    def _of_statistic(self, x: Tensor) -> Tensor:
        """lse or its gradient by heads: (query of all heads, group)."""
        return x.unflatten(1, (-1, self.problem.group)).transpose(2, 3).flatten(0, 2)

    def _sinks(self, sink: Tensor) -> Tensor:
        """The sink of each row: (query of all heads, group)."""
        found = sink.to(self.problem.compute_dtype).view(1, -1, 1, self.problem.group)
        return found.expand(*self.sizes, -1).flatten(0, 2)


def by_blocks(p: Problem, attend: Forward, differentiate: Backward) -> Piecewise:
    """Return the call of a problem of selected blocks, as pieces whose gathered rows fit in memory."""
    return Piecewise(p, cut, lambda piece: Blockwise(piece, attend, differentiate))


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def merged(order: Order, sink: Tensor | None, far: Output, own: Output | None = None) -> tuple[Tensor, Tensor]:
    """Return the merge of each query's states and its sink: o (query of all heads, group, head_dim_v) and lse, in their dtypes."""
    lse = torch.cat([far.lse, far.lse.new_full((len(far.lse), 1), -torch.inf)], 1).T[order.place]
    if own is not None:
        lse = torch.cat([lse, own.lse.T.where(order.own.view(-1, 1), -torch.inf).unsqueeze(1)], 1)
    share, total = state.shares(lse, 1)
    if sink is not None:
        share, total = state.add_sink(share.transpose(1, 2), total, sink)
        share = share.transpose(1, 2)
    return summed(order, far.o, None if own is None else own.o, share), total


def summed(order: Order, rows: Tensor, own: Tensor | None, share: Tensor | None = None) -> Tensor:
    """Return the sum of each query's rows, ``(query of all heads, group, width)`` in their dtype: those of its entries, then its own.

    Args:
        rows: (gathered row, group, width); those of no query may hold anything. own: (query of all heads, group, width), of the queries of
            ``order.own``. share: (query of all heads, entry, group), what to multiply with, the own row's behind those of the entries.
    """
    rows, own = (x if x is None else x.contiguous() for x in (rows, own))
    mine = None if own is None else (own, order.own)
    if rows.is_cuda:
        from tilewise.backends.triton.host.sum_rows import sum_rows

        return sum_rows(rows, order.place, mine, share if share is None else share.contiguous())
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    total = rows.new_zeros(len(order.place), *rows.shape[1:], dtype=wide)
    each = [(at.clamp(max=len(rows) - 1), at < len(rows), rows) for at in order.place.unbind(1)]
    for n, (at, there, of) in enumerate(each + ([] if own is None else [(slice(None), order.own, own)])):
        found = of[at].to(wide)
        found = found if share is None else found * share[:, n].unsqueeze(-1)
        total += found.where(there.view(-1, 1, 1), 0)
    return total.to(rows.dtype)
