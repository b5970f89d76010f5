"""Attention over ranks by passing K and V around: each rank computes its own queries against the keys of one rank at a time.

    forward    step n: K, V of rank r - n;  each of the rank's pieces of queries (o, lse) <- merge((o, lse), attention(q, K, V))
    backward   step n: the same K, V;  dq += dq of them;  their dK, dV -> rank r - n, which adds them in fp32 in the order of steps

Keys come straight from their rank, and their gradients go straight back. That is as many bytes as passing them from neighbour to
neighbour, and only keys that a rank's rows see need to be sent. The next step's keys are sent while this step is computed, so a rank
holds the keys of at most two others, however many ranks there are. In return, each piece of queries and keys is a call of its own, whose
results are rounded and then merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import state
from tilewise.caching import cached_property
from tilewise.derivatives import operator_of
from tilewise.parallel.exchange import Exchange, Gradients, ordered_sum
from tilewise.parallel.gathered import compute_dtype
from tilewise.parallel.layout import Layout
from tilewise.parallel.messages import Rows, Run, line_of, packed, shaped, summed, unpacked, widths
from tilewise.parallel.route import Route, Segment, cut, held
from tilewise.piece import Piece
from tilewise.spec import Spec

Check = Callable[[slice, slice, Spec], None]
_attention_backward = torch.ops.tilewise.attention_backward.default


class RingCall(NamedTuple):
    """One call: a run of the rank's queries against a run of one rank's keys.

    Attributes:
        rows: among the rank's queries.
        keys: among the step's keys: the rank's own in the first step, then the received ones.
        spec: the call with its place, without the sink.
        first: no earlier call has these queries.
    """

    rows: slice
    keys: slice
    spec: str
    first: bool


@dataclass(frozen=True)
class Ring:
    """One attention over ranks.

    Attributes:
        route: the keys that are sent.
        steps: the rank's calls, by step.
        grad_slots: the extras that want a gradient.
        call_slots: those whose gradient the calls give.
        sink_slot: the extra that is merged once, after all keys.
        sum_leaves: gradients of sinks and leaves are summed over ranks.
        max_logit: the largest score of each row is a result too.
        digest: of the route if it depends on tensors, which may differ between ranks; else 0.
        tables: none, because calls read no tensors but the extras.
    """

    exchange: Exchange
    route: Route
    steps: tuple[tuple[RingCall, ...], ...]
    grad_slots: tuple[int, ...]
    call_slots: tuple[int, ...]
    sink_slot: int | None
    sum_leaves: bool
    max_logit: bool
    digest: int
    tables: tuple[Tensor, ...] = ()

    @property
    def first_call(self) -> RingCall | None:
        """The rank's first call, or None if it has no queries."""
        return next((call for step in self.steps for call in step), None)

    def fetch(self, step: int, k: Tensor, v: Tensor) -> Callable[[], list[Tensor]]:
        """Start to fetch the keys of a step. The result waits for their K and V ``(batch, keys, heads_k, dim)``, in order."""
        if step == 0:
            return lambda: [k, v]
        to = (self.exchange.rank + step) % self.exchange.size
        finish = self._shifted(packed(self._lent[to], k, v), step, sum(widths(k, v)))

        def fetched() -> list[Tensor]:
            ((_, *both),) = unpacked(finish(), [(0, self._count(step))], k, v)
            return [shaped(line, x) for line, x in zip(both, (k, v), strict=True)]

        return fetched

    def give_back(self, step: int, dk: Tensor, dv: Tensor) -> Callable[[], list[Rows]]:
        """Start to send the gradients of a step's keys to their rank.

        Args:
            dk, dv: ``(batch, keys, heads_k, dim)`` of the received keys.

        Returns:
            A function that waits for the gradients from others, and returns runs of the rank's rows with them.
        """
        finish = self._shifted(packed([(0, dk.shape[1])], dk, dv), -step, sum(widths(dk, dv)))
        lent = self._lent[(self.exchange.rank + step) % self.exchange.size]

        return lambda: unpacked(finish(), lent, dk, dv)

    @cached_property
    def _lent(self) -> list[list[Run]]:
        """The runs of the rank's rows that each rank fetches, by rank."""
        return [[x.run for x in self.route.sent(self.exchange.rank, to)] for to in range(self.exchange.size)]

    def _count(self, step: int) -> int:
        """Return the number of keys that are received in a step."""
        return self.route.counts[(self.exchange.rank - step) % self.exchange.size][self.exchange.rank]

    def _shifted(self, sent: Tensor, by: int, numbers: int) -> Callable[[], Tensor]:
        """Starts to send rows of so many numbers each to the rank that is so many places on, as every rank does."""
        rank, size, counts = self.exchange.rank, self.exchange.size, self.route.counts
        if by < 0:  # gradients go back for the received keys
            counts = tuple(zip(*counts, strict=True))
        if not any(counts[n][(n + by) % size] for n in range(size)):  # all ranks know that nothing is sent
            return lambda: sent
        to, source = (rank + by) % size, (rank - by) % size
        sending, receiving = [0] * size, [0] * size
        sending[to], receiving[source] = counts[rank][to] * numbers, counts[source][rank] * numbers
        return self.exchange.swap(sent, sending, receiving)


def planned(
    exchange: Exchange, spec: Spec, route: Route, queries: Layout, sum_leaves: bool, digest: int, check: Check
) -> Ring:
    """Plan the rank's part of the work.

    Args:
        route: :meth:`tilewise.parallel.route.Route.uncut`.
        check: called with the queries, keys and spec of each call.
    """
    rank, size, sink = exchange.rank, exchange.size, spec.sink_slot
    leaves = {*spec.mask_slots, *spec.score_slots}
    slots = tuple(slot for slot in spec.grad_slots if slot != sink or slot in leaves)
    plain = replace(spec, sink_slot=None, grad_slots=slots)
    steps, begun = [], set()
    for owner in [(rank - step) % size for step in range(size)]:
        runs, came, calls = [x for x in held(route.keys) if x.owner == owner], route.sent(owner, rank), []
        for part in route.parts[rank]:
            for x in [cut(x, part.low, part.high) for x in runs if max(x.start, part.low) < min(x.stop, part.high)]:
                piece = replace(plain, piece=Piece(part.start, x.start, queries.seqlen, route.keys.seqlen))
                check(slice(part.start, part.stop), slice(x.start, x.stop), piece)
                keys = x.rows if owner == rank else _place(came, x)
                calls.append(RingCall(part.rows, keys, piece.text(), part.row not in begun))
                begun.add(part.row)
        steps.append(tuple(calls))
    return Ring(exchange, route, tuple(steps), spec.grad_slots, slots, sink, sum_leaves, spec.max_logit, digest)


def _place(came: Sequence[Segment], x: Segment) -> slice:
    """Return the place of a run of keys among the received ones."""
    first = 0
    for whole in came:
        if whole.start <= x.start and x.stop <= whole.stop:
            return slice(first + x.start - whole.start, first + x.stop - whole.start)
        first += whole.length
    raise ValueError(f"{x} does not travel")


def forward(
    call: Ring, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return ``[o, lse]`` of the rank's queries, with max_logit if wanted. Nothing is kept for the backward."""
    dtype, rows = compute_dtype(q), (q.shape[0], q.shape[2], q.shape[1])
    o = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    lse = q.new_full(rows, -torch.inf, dtype=dtype)
    largest = [torch.full_like(lse, -torch.inf)] if call.max_logit else []
    for pieces, (keys, values) in _each_step(call, k, v):
        for piece in pieces:
            at = piece.rows
            part = q[:, at], keys[:, piece.keys], values[:, piece.keys]
            found, found_lse, *scores = operator_of(piece.spec)(*part, list(extras), seed, piece.spec)
            for target, x in zip(largest, scores, strict=True):
                target[..., at] = torch.maximum(target[..., at], x)
            merged = found, found_lse.mT
            if not piece.first:
                merged = state.merge(o[:, at], lse[..., at].mT, found.to(dtype), found_lse.mT)
            o[:, at], lse[..., at] = merged[0], merged[1].mT
    if call.sink_slot is not None:
        o, rows_lse = state.add_sink(o, lse.mT, extras[call.sink_slot].to(dtype))
        lse = rows_lse.mT.contiguous()
    return [o.to(q.dtype), lse, *largest], []


def backward(
    call: Ring, of: Gradients, saved: Sequence[Tensor], extras: Sequence[Tensor], seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Return dq, dk and dv of the rank's rows, and the gradient of each extra.

    Args:
        saved: q, k, v, o and lse.
    """
    (do, dlse), (q, k, v, o, lse) = of, saved
    do = torch.zeros_like(o) if do is None else do
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    dtype = compute_dtype(q)
    leaves = {slot: torch.zeros_like(extras[slot], dtype=dtype) for slot in call.grad_slots}
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
    returning: Callable[[], list[Rows]] = list
    for n, (pieces, (keys, values)) in enumerate(_each_step(call, k, v)):
        parts = []
        for piece in pieces:
            at = piece.rows
            part, part_k, part_v, dextras = _attention_backward(
                do[:, at], dlse[..., at].contiguous(), q[:, at], keys[:, piece.keys], values[:, piece.keys],
                o[:, at].contiguous(), lse[..., at].contiguous(), list(extras), seed, piece.spec,
            )  # fmt: skip
            dq[:, at] += part
            run = piece.keys.start, piece.keys.stop - piece.keys.start
            parts.append((run, line_of(part_k), line_of(part_v)))
            for slot, grad in zip(call.call_slots, dextras, strict=True):
                leaves[slot] += grad
        _add(dk, dv, returning())  # of the previous step: they were received during this step's calls
        if n == 0:
            _add(dk, dv, parts)
            returning = list
        else:
            returning = call.give_back(n, *summed(keys, values, parts, dtype, dtype))
    _add(dk, dv, returning())
    if call.sink_slot in call.grad_slots:
        delta = (do.to(dtype) * o.to(dtype)).sum(-1).mT - dlse
        sink = extras[call.sink_slot].to(dtype).unsqueeze(-1)
        leaves[call.sink_slot] += state.sink_gradient(sink, lse, delta).sum((0, 2))
    if call.sum_leaves:
        leaves = {slot: ordered_sum(call.exchange.gather(grad)) for slot, grad in leaves.items()}
    found = [leaves[n].to(x.dtype) if n in leaves else None for n, x in enumerate(extras)]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), found


def _each_step(call: Ring, k: Tensor, v: Tensor) -> Iterator[tuple[Sequence[RingCall], list[Tensor]]]:
    """Yield the calls and the keys of each step. The next step's keys are sent before this step is computed."""
    coming = call.fetch(0, k, v)
    for n, pieces in enumerate(call.steps):
        found = coming()
        if n + 1 < len(call.steps):
            coming = call.fetch(n + 1, k, v)
        yield pieces, found


def _add(dk: Tensor, dv: Tensor, parts: Sequence[Rows]) -> None:
    """Add gradients to their rows."""
    for run, *lines in parts:
        for total, line in zip((dk, dv), lines, strict=True):
            rows = total.narrow(1, *run)
            rows += shaped(line, total)
