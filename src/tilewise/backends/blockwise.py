"""Calls whose queries select whole blocks of keys: each block of keys and the queries that selected it are a packed sequence.

Where neighbouring queries select other blocks, a tile of queries meets nearly every key. Gathered by block, the queries meet the keys that
they selected alone. What a query sees of a block that its position cuts, its own under a causal mask, is a second packed call, in which
each block has its own queries. The states of a query are merged (docs/algorithm.md#5-merging), and the backward reads the merged lse, so
that every packed call has its part of the gradients.

The queries of some heads are gathered at a time (:func:`parts`). Everything is made on the device, and nothing is read back from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import state
from tilewise.backends.base import Grads, Inputs, Output
from tilewise.expr import indices, is_number
from tilewise.masks import as_mask
from tilewise.masks.facts import as_band
from tilewise.piece import Span, evenly
from tilewise.problem import Problem, TensorFacts, plain_index
from tilewise.selections import keys_of_entry
from tilewise.spec import parse_spec

BUDGET = 1 << 30  # bytes of gathered rows at a time
NEVER = 1e30  # the lse of a row whose pairs have no part in it


Forward = Callable[[Problem, Inputs], Output]
"""A backend's forward of a packed problem."""

Backward = Callable[[Problem, Inputs, Output, Tensor, Tensor], Grads]
"""Its backward, of the forward's results and their gradients."""


class Blocks(NamedTuple):
    """A mask of selected blocks.

    Attributes:
        slot: of the rows of entries, which never decrease along a row. block: keys of an entry. block_q: queries of a row.
        causal: whether a query sees no key behind its own position too.
    """

    slot: int
    block: int
    block_q: int
    causal: bool


def blocks_of(p: Problem) -> Blocks | None:
    """Return a problem's selected blocks; None: its mask is something else, or an option forbids to gather its queries."""
    spec, region = p.spec, p.spec.region
    told = spec.score_text or spec.dropout_p or spec.max_logit or spec.everywhere or spec.piece or spec.mapped
    if told or p.packed or p.paged or len(region.selections) != 1 or region.predicate is not region.selections[0]:
        return None
    selection, off = region.predicate, p.seqlen_k - p.seqlen_q
    band, (block, start) = as_band(region.interval, off, p.seqlen_k), keys_of_entry(selection)
    *heads, row = indices(selection)
    for index, of in zip(heads, (("b", 1), ("h", p.group)), strict=True):
        if not is_number(index, 0) and plain_index(index) != of:
            return None
    if start or band is None or band.lo is not None or (band.start, band.stop) != (0, p.seqlen_k):
        return None
    if band.hi is not None and (off < 0 or band.hi != off + 1):
        return None
    return Blocks(selection.args[0][1], block, plain_index(row)[1], band.hi is not None)


# -- What is gathered at a time ------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Some queries of some key heads of a batch element."""

    element: int
    heads: Span
    queries: Span

    @property
    def shape(self) -> tuple[int, int]:
        """The key heads and the queries."""
        return self.heads[1] - self.heads[0], self.queries[1] - self.queries[0]


def parts(p: Problem, blocks: Blocks) -> list[Part]:
    """Return the parts of a call, those of the same heads side by side. A part's queries end where a block does."""
    row = p.dtype.itemsize * p.group * 2 * (p.head_dim + p.head_dim_v)  # of q, o and their gradients
    marks = 5 * (-(-p.seqlen_k // blocks.block) + 1)  # of a query, a byte for each block, and their running sum
    of_query = most_blocks(p, blocks) * row + marks
    of_head = p.seqlen_q * of_query
    heads = max(1, min(p.heads_k, BUDGET // of_head))
    first = max(0, p.seqlen_k - p.seqlen_q)
    count = -(-(first + p.seqlen_q) // blocks.block)
    ends = [max(0, blocks.block * start - first) for start, _ in evenly(count, max(1, count * BUDGET // of_head))]
    queries = [(a, b) for a, b in pairwise([*ends, p.seqlen_q]) if a < b]
    return [Part(b, h, rows) for b in range(p.batch) for h in evenly(p.heads_k, heads) for rows in queries]


def most_blocks(p: Problem, blocks: Blocks) -> int:
    """Return the most blocks that a query selects."""
    return min(p.extras[blocks.slot].shape[-1], -(-p.seqlen_k // blocks.block))


def packed(p: Problem, blocks: Blocks, part: Part, own: bool) -> Problem:
    """Return the packed call of a part: of the gathered queries, or of each block's ``own``."""
    heads, queries = part.shape
    rows = heads * queries * (1 if own else most_blocks(p, blocks))
    starts = TensorFacts.contiguous((heads * -(-p.seqlen_k // blocks.block) + 1,), torch.int32)
    text = as_mask(None, causal_too=True).text if own else ""
    spec = replace(p.spec, mask_text=text, mask_slots=(), cu_slots=(0, 1), sink_slot=None, grad_slots=())
    facts = [TensorFacts.contiguous((rows, p.group, p.head_dim), p.dtype)]
    facts += [TensorFacts.contiguous((heads * p.seqlen_k, 1, width), p.dtype) for width in (p.head_dim, p.head_dim_v)]
    q, k, v = facts
    return replace(p, q=q, k=k, v=v, extras=(starts, starts), spec=parse_spec(spec.text()), latent=False)


def examples(p: Problem) -> list[Problem]:
    """Return packed calls whose kernels are those of all parts."""
    blocks, part = blocks_of(p), Part(0, (0, 1), (0, p.seqlen_q))
    return [packed(p, blocks, part, own) for own in (False, True)[: 1 + blocks.causal]]


def described(p: Problem) -> str:
    """Return how a problem of selected blocks is computed, for ``explain``."""
    blocks = blocks_of(p)
    found = parts(p, blocks)
    heads, queries = (max(sizes) for sizes in zip(*(part.shape for part in found), strict=True))
    return (
        f"{len(found)} of {heads} key head{'s' * (heads > 1)} and {queries} queries: a block of {blocks.block} keys and the queries that "
        "selected it are a packed sequence"
    )


# -- The order of the rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """Where the queries of a part lie, by the block that they selected.

    Attributes:
        rows: int64 (gathered row,), the query of each, of all heads of the part; past the last one anything.
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


@dataclass(eq=False)
class Blockwise:
    """The call of a problem of selected blocks. ``attend`` and ``differentiate`` compute packed problems."""

    problem: Problem
    blocks: Blocks
    attend: Forward
    differentiate: Backward

    def forward(self, t: Inputs) -> Output:
        p = self.problem
        o_shape, lse_shape = p.output_shapes
        out = Output(t.q.new_empty(o_shape), t.q.new_empty(lse_shape, dtype=p.compute_dtype))
        for part in parts(p, self.blocks):
            rows = self._rows(t, part)
            far = self.attend(self._packed(part, False), rows.gathered)
            own = self.attend(self._packed(part, True), rows.own) if self.blocks.causal else None
            o, lse = merged(rows.order, far, own)
            o, lse = o.unflatten(0, part.shape), lse.unflatten(0, part.shape)
            if t.sink is not None:
                o, lse = state.add_sink(o, lse, self._sink(t.sink, part))
            self._of_queries(out.o, part).copy_(o)
            self._of_statistics(out.lse, part).copy_(lse)
        return out

    def backward(self, t: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        p = self.problem
        dq, dk, dv = (x.new_empty(x.shape) for x in (t.q, t.k, t.v))
        sink = None if t.sink is None else torch.zeros_like(t.sink, dtype=p.compute_dtype)
        for _, same in groupby(parts(p, self.blocks), lambda part: (part.element, part.heads)):
            sums: list[Tensor] = []
            for part in same:
                found = self._gradients(self._rows(t, part), out, do, dlse, part)
                self._of_queries(dq, part).copy_(found[0].unflatten(0, part.shape))
                sums = [a + b for a, b in zip(sums, found[1:], strict=True)] if sums else [*found[1:]]
                if sink is not None:
                    rows = self._of_statistics(out.lse, part), self._delta(out, do, dlse, part)
                    found_sink = state.sink_gradient(self._sink(t.sink, part), *rows).sum(1)
                    sink.unflatten(0, (-1, p.group))[slice(*part.heads)] += found_sink
            for x, total in zip((dk, dv), sums, strict=True):
                _of_keys(x, part).copy_(total.view(part.shape[0], -1, x.shape[-1]))
        return Grads(dq, dk, dv, None if sink is None else sink.to(t.sink.dtype), {})

    def _gradients(self, rows: Rows, out: Output, do: Tensor, dlse: Tensor, part: Part) -> tuple[Tensor, ...]:
        """The gradients of a part's rows, in the dtype of sums."""
        order, wide = rows.order, self.problem.compute_dtype
        o, do = (_copy(self._of_queries(x, part)).flatten(0, 1) for x in (out.o, do))
        lse, dlse = (self._of_statistics(x, part).flatten(0, 1) for x in (out.lse, dlse))
        at = order.rows
        rows_out = Output(o[at], lse[at].T.contiguous())
        far = self.differentiate(self._packed(part, False), rows.gathered, rows_out, do[at], dlse[at].T.contiguous())
        dq = summed(far.dq, order.place, None, wide)
        if order.own is None:
            return dq, far.dk.to(wide), far.dv.to(wide)
        selected = order.own.view(-1, 1)
        own_out = Output(o, lse.where(selected, NEVER).T.contiguous())
        own = self.differentiate(self._packed(part, True), rows.own, own_out, do, dlse.T.contiguous())
        dq += own.dq.where(selected.unsqueeze(-1), 0)
        return dq, far.dk.to(wide) + own.dk, far.dv.to(wide) + own.dv

    def _delta(self, out: Output, do: Tensor, dlse: Tensor, part: Part) -> Tensor:
        wide = self.problem.compute_dtype
        o, do = (self._of_queries(x, part).to(wide) for x in (out.o, do))
        return (o * do).sum(-1) - self._of_statistics(dlse, part)

    def _packed(self, part: Part, own: bool) -> Problem:
        return packed(self.problem, self.blocks, part, own)

    def _rows(self, t: Inputs, part: Part) -> Rows:
        """The rows of a part."""
        p, blocks, entries = self.problem, self.blocks, t.leaves[self.blocks.slot]
        entries = entries[part.element if entries.shape[0] > 1 else 0]
        entries = entries[slice(*part.heads)] if entries.shape[0] > 1 else entries
        row = torch.arange(*part.queries, device=entries.device) // blocks.block_q
        entries = entries.index_select(1, row).long().expand(part.shape[0], -1, -1)
        first = p.seqlen_k - p.seqlen_q + part.queries[0] if blocks.causal else None
        order = Order.of(entries, first, p.seqlen_k, blocks.block)
        # Keys that no query sees may be NaN, and in a product even a P of zero would let them through.
        unseen = ~order.seen.unsqueeze(-1)
        k, v = (_copy(_of_keys(x, part)).masked_fill_(unseen, 0).view(-1, 1, x.shape[-1]) for x in (t.k, t.v))
        return Rows(order, _copy(self._of_queries(t.q, part)).flatten(0, 1), k, v)

    def _of_queries(self, x: Tensor, part: Part) -> Tensor:
        """A part of q, o or dO as a view (heads, query, group, width)."""
        found = x[part.element, slice(*part.queries)].unflatten(1, (-1, self.problem.group))
        return found[:, slice(*part.heads)].transpose(0, 1)

    def _of_statistics(self, x: Tensor, part: Part) -> Tensor:
        """A part of lse or of its gradient as a view (heads, query, group)."""
        found = x[part.element, :, slice(*part.queries)].unflatten(0, (-1, self.problem.group))
        return found[slice(*part.heads)].transpose(1, 2)

    def _sink(self, sink: Tensor, part: Part) -> Tensor:
        """The sinks of a part, (heads, 1, group)."""
        found = sink.to(self.problem.compute_dtype).unflatten(0, (-1, 1, self.problem.group))
        return found[slice(*part.heads)]


class Rows(NamedTuple):
    """The tensors of a part, each head's rows behind another's: q (query, group, head_dim), k and v (key, 1, head_dim)."""

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


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _of_keys(x: Tensor, part: Part) -> Tensor:
    """A part of k, v or their gradients as a view (heads, key, width)."""
    return x[part.element, :, slice(*part.heads)].transpose(0, 1)


def merged(order: Order, far: Output, own: Output | None) -> tuple[Tensor, Tensor]:
    """Return the merge of each query's states: o (query of all heads, group, head_dim_v) and lse, in the dtype of lse."""
    lse = torch.cat([far.lse, far.lse.new_full((len(far.lse), 1), -torch.inf)], 1).T[order.place]
    if own is not None:
        lse = torch.cat([lse, own.lse.T.where(order.own.view(-1, 1), -torch.inf).unsqueeze(1)], 1)
    share, total = state.shares(lse, 1)
    share = share.unsqueeze(-1)
    o = summed(far.o, order.place, share, lse.dtype)
    if own is not None:
        o += (own.o * share[:, -1]).where(order.own.view(-1, 1, 1), 0)
    return o, total


def summed(rows: Tensor, place: Tensor, share: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sum of the gathered rows of each query, ``(query of all heads, group, width)``, in the order of its entries.

    Args:
        rows: (gathered row, group, width); those of no query may hold anything. place: as in :class:`Order`. share: what to multiply with.
    """
    total = rows.new_zeros(len(place), *rows.shape[1:], dtype=dtype)
    for n, at in enumerate(place.unbind(1)):
        there = at < len(rows)
        found = rows[at.where(there, 0)].to(dtype)
        found = found if share is None else found * share[:, n]
        total += found.where(there.view(-1, 1, 1), 0)
    return total
