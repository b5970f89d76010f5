"""Attention over ranks by gathering K and V: each rank computes its own queries against all keys that they see.

    forward    K, V <- the ranks that hold them;  for each piece of the rank's queries (o, lse) = attention(q, K, V) at its global
               positions, of K and V the keys between the first and the last that some row of the piece may see
    backward   for each piece dq, dK, dV;  dK and dV -> the ranks that hold them, summed over pieces and ranks in fp32

A piece is one plain call that is told where it lies (:class:`tilewise.piece.Piece`), so masks, scores and dropout see global
indices. A row's softmax runs over all of its keys in one kernel: nothing is merged, so no error grows with the ranks.

A piece whose keys all lie in one run of the rank's own is *near*, others are *far*. Only keys that far pieces of some rank see
travel (:class:`tilewise.parallel.route.Route`), while near pieces are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import torch
from torch import Tensor

from tilewise.caching import cached_property
from tilewise.derivatives import operator_of
from tilewise.parallel import cost
from tilewise.parallel.exchange import Exchange, Gradients, ordered_sum
from tilewise.parallel.route import Route
from tilewise.spec import Spec

_attention_backward = torch.ops.tilewise.attention_backward.default


@dataclass(frozen=True)
class LocalPiece:
    """A contiguous run of the rank's queries, with the keys between which all keys lie that it sees.

    Attributes:
        rows: among the rank's queries.
        keys: among the rank's own keys, for a near piece; else among those that the rank puts together.
        spec: the call, told where it lies, as the operator takes it.
    """

    rows: slice
    keys: slice
    spec: str


@dataclass(frozen=True)
class Gathered:
    """One attention over ranks.

    Attributes:
        route: the keys that travel.
        near, far: the rank's part of the work.
        grad_slots: the extras that want a gradient.
        sum_leaves: gradients of tensors that masks, scores and sinks read are summed over ranks.
        max_logit: the largest score of each row is a result too.
        tables: of the mask of joined queries, which follow the extras.
        keeps: keys of others may be kept for the backward.
        digest: of the route, where it depends on tensors, which ranks might hold otherwise; else 0.
    """

    exchange: Exchange
    route: Route
    near: tuple[LocalPiece, ...]
    far: tuple[LocalPiece, ...]
    grad_slots: tuple[int, ...]
    sum_leaves: bool
    max_logit: bool
    digest: int
    keeps: bool = True
    tables: tuple[Tensor, ...] = ()

    @property
    def kept(self) -> bool:
        """Whether the keys of others are kept for the backward, and not fetched again."""
        return self.keeps and cost.kept(self.route.fetched, self.route.keys.lengths)

    @property
    def first_call(self) -> LocalPiece | None:
        """The rank's first piece; None: it has no queries."""
        return next(iter(self.near + self.far), None)

    def fetch(self, k: Tensor, v: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Starts to fetch the keys that far pieces see; the result waits for K and V of them ``(batch, keys, heads_k, dim)``, in order."""
        sent = packed([(k[:, rows], v[:, rows]) for rows in self._lent], k, v)
        finish = self._swap(sent, *self._counts)

        def gathered() -> tuple[Tensor, Tensor]:
            found, parts = unpacked(finish(), k, v), []
            for rows, at in self._together:
                parts.append((k[:, rows], v[:, rows]) if at is None else (found[0][:, at], found[1][:, at]))
            return _joined([a for a, _ in parts], k), _joined([b for _, b in parts], v)

        return gathered

    def give_back(self, dk: Tensor, dv: Tensor) -> Callable[[], list[tuple[slice, Tensor, Tensor]]]:
        """Starts to send the gradients of fetched keys to their ranks.

        Args:
            dk, dv: ``(batch, keys, heads_k, dim)`` of the keys that the rank put together.

        Returns:
            A function that waits for what others send, and returns the rank's rows with their gradients: its own first.
        """
        rank, (sending, receiving) = self.exchange.rank, self._counts
        sent = [(dk[:, at], dv[:, at]) for owner, _, at in self._places if owner != rank]
        finish = self._swap(packed(sent, dk, dv), receiving, sending)

        def returned() -> list[tuple[slice, Tensor, Tensor]]:
            found, first = unpacked(finish(), dk, dv), 0
            parts = [(rows, dk[:, at], dv[:, at]) for owner, rows, at in self._places if owner == rank]
            for rows in self._lent:
                at = slice(first, first := first + rows.stop - rows.start)
                parts.append((rows, found[0][:, at], found[1][:, at]))
            return parts

        return returned

    def _swap(self, sent: Tensor, counts: Sequence[int], received: Sequence[int]) -> Callable[[], Tensor]:
        if not self.route.fetched:  # all ranks know that nothing travels
            return lambda: sent
        return self.exchange.swap(sent, counts, received)

    @cached_property
    def _counts(self) -> tuple[list[int], list[int]]:
        """How many keys the rank sends to each rank, and receives from it."""
        rank = self.exchange.rank
        return list(self.route.counts[rank]), [counts[rank] for counts in self.route.counts]

    @cached_property
    def _lent(self) -> list[slice]:
        """The rank's rows that others fetch, in the order of ranks."""
        return [x.rows for to in range(self.exchange.size) for x in self.route.sent(self.exchange.rank, to)]

    @cached_property
    def _places(self) -> list[tuple[int, slice, slice]]:
        """The keys that the rank puts together, each run with its owner, the owner's rows, and its place there: in the order of owners."""
        first, found = 0, []
        for x in self.route.segments(self.exchange.rank):
            found.append((x.owner, x.rows, slice(first, first := first + x.length)))
        return sorted(found, key=itemgetter(0))

    @cached_property
    def _together(self) -> list[tuple[slice, slice | None]]:
        """The rows of each run of keys that the rank puts together, with their place among those that came; None: they are its own."""
        segments = self.route.segments(self.exchange.rank)
        found: list[tuple[slice, slice | None]] = [(x.rows, None) for x in segments]
        first = 0
        for n, x in sorted(enumerate(segments), key=lambda item: (item[1].owner, item[0])):
            if x.owner != self.exchange.rank:
                found[n] = x.rows, slice(first, first := first + x.length)
        return found


def reasons(spec: Spec) -> list[str]:
    """Why a call cannot be cut into pieces; empty: it can."""
    return ["packed sequences are not cut into pieces; write them as mask=tw.documents(ids)"] if spec.packed else []


def forward(
    call: Gathered, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """``[o, lse]`` of the rank's queries, and max_logit where it is asked for; and what the backward reads beside q, k, v, o and lse."""
    finish = call.fetch(k, v)
    extras = (*extras, *call.tables)
    if call.route.joined and call.far:
        gathered = finish()
        piece = call.far[0]
        outputs = operator_of(piece.spec)(q, *gathered, extras, seed, piece.spec)
        return list(outputs), list(gathered) if call.kept else []
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    # A piece's rows see all of their keys, so its lse and largest scores are those of the whole.
    shape = q.shape[0], q.shape[2], q.shape[1]
    statistics = [q.new_empty(shape, dtype=compute_dtype(q)) for _ in range(2 if call.max_logit else 1)]

    def compute(pieces: Sequence[LocalPiece], keys: Tensor, values: Tensor) -> None:
        for piece in pieces:
            part = q[:, piece.rows], keys[:, piece.keys], values[:, piece.keys]
            o[:, piece.rows], *found = operator_of(piece.spec)(*part, extras, seed, piece.spec)
            for target, x in zip(statistics, found, strict=True):
                target[..., piece.rows] = x

    compute(call.near, k, v)  # under the exchange
    gathered = finish()
    compute(call.far, *gathered)
    return [o, *statistics], list(gathered) if call.kept else []


def backward(
    call: Gathered, of: Gradients, saved: Sequence[Tensor], extras: Sequence[Tensor], seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """dq, dk and dv of the rank's rows, and the gradient of each extra.

    Args:
        saved: q, k, v, o, lse, and what the forward kept.
    """
    (do, dlse), (q, k, v, o, lse, *gathered) = of, saved
    do = torch.zeros_like(o) if do is None else do
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    dtype = compute_dtype(q)
    tabled = (*extras, *call.tables)
    leaves = {slot: torch.zeros_like(extras[slot], dtype=dtype) for slot in call.grad_slots}
    alone = call.route.joined and bool(call.far)
    dq = q if alone else torch.empty_like(q)  # one call gives all of it

    def compute(pieces: Sequence[LocalPiece], keys: Tensor, values: Tensor) -> list[tuple[slice, Tensor, Tensor]]:
        nonlocal dq
        found = []
        for piece in pieces:
            rows = piece.rows
            part, dk, dv, dextras = _attention_backward(
                do[:, rows], dlse[..., rows].contiguous(), q[:, rows], keys[:, piece.keys], values[:, piece.keys],
                o[:, rows].contiguous(), lse[..., rows].contiguous(), tabled, seed, piece.spec,
            )  # fmt: skip
            if alone:
                dq = part
            else:
                dq[:, rows] = part
            found.append((piece.keys, dk, dv))
            for slot, grad in zip(call.grad_slots, dextras, strict=True):
                leaves[slot] += grad
        return found

    keys, values = gathered or call.fetch(k, v)()
    parts = compute(call.far, keys, values)
    if alone:
        finish = call.give_back(*parts[0][1:])
    else:  # joined calls of other ranks send what one call gave, which needs no wider numbers
        wide = k.dtype if call.route.joined else dtype
        finish = call.give_back(*[summed(x, _each(parts, n), wide) for n, x in ((1, keys), (2, values))])
    parts = [*compute(call.near, k, v), *finish()]  # the near ones under the exchange
    dk, dv = (summed(x, _each(parts, n), x.dtype) for n, x in ((1, k), (2, v)))
    if call.sum_leaves:
        leaves = {slot: ordered_sum(call.exchange.gather(grad)) for slot, grad in leaves.items()}
    return dq, dk, dv, [leaves[n].to(x.dtype) if n in leaves else None for n, x in enumerate(extras)]


def summed(like: Tensor, parts: Sequence[tuple[slice, Tensor]], dtype: torch.dtype) -> Tensor:
    """The sum of gradients of some rows each, in order, as a tensor of ``dtype`` shaped as ``like`` ``(batch, rows, heads, dim)``.

    Rows of one part alone are copied; the others are summed in fp32 or fp64 first.
    """
    total = like.new_empty(like.shape, dtype=dtype)
    ends = sorted({0, like.shape[1], *[end for rows, _ in parts for end in (rows.start, rows.stop)]})
    for start, stop in pairwise(ends):
        found = [
            x[:, start - rows.start : stop - rows.start]
            for rows, x in parts
            if rows.start <= start and stop <= rows.stop
        ]
        target = total[:, start:stop]
        if len(found) < 2:
            target.copy_(found[0]) if found else target.zero_()
        else:
            target.copy_(ordered_sum([x.to(compute_dtype(like)) for x in found]))
    return total


def _each(parts: Sequence[tuple[slice, Tensor, Tensor]], which: int) -> list[tuple[slice, Tensor]]:
    """The rows of each part with the gradient of K (1) or of V (2)."""
    return [(rows, dk if which == 1 else dv) for rows, dk, dv in parts]


def packed(parts: Sequence[tuple[Tensor, Tensor]], k: Tensor, v: Tensor) -> Tensor:
    """Rows of K and V ``(batch, rows, heads, dim)``, one part after the other, as rows ``(rows, batch * heads * (dim + dim_v))``."""
    widths = [x.shape[0] * x.shape[2] * x.shape[3] for x in (k, v)]
    sent, first = k.new_empty((sum(part.shape[1] for part, _ in parts), sum(widths))), 0
    for pair in parts:
        at = slice(first, first := first + pair[0].shape[1])
        for target, x in zip(sent[at].split(widths, -1), pair, strict=True):
            target.unflatten(-1, (x.shape[0], *x.shape[2:])).copy_(x.transpose(0, 1))
    return sent


def unpacked(rows: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The inverse of :func:`packed`: all rows of K, and of V, shaped otherwise as ``k`` and ``v``."""
    widths = [x.shape[0] * x.shape[2] * x.shape[3] for x in (k, v)]
    return [
        part.unflatten(-1, (x.shape[0], *x.shape[2:])).transpose(0, 1)
        for part, x in zip(rows.split(widths, -1), (k, v), strict=True)
    ]


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """Rows of several tensors as one; none: no rows."""
    return torch.cat(parts, 1) if parts else like[:, :0]


def compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
