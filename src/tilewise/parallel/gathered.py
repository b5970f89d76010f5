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

import torch
from torch import Tensor

from tilewise.caching import cached_property
from tilewise.derivatives import operator_of
from tilewise.parallel import cost
from tilewise.parallel.exchange import Exchange, Gradients, ordered_sum
from tilewise.parallel.messages import Rows, Run, given_to, line_of, packed, run_of, shaped, summed, unpacked, widths
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

    def kept(self, q: Tensor, k: Tensor) -> bool:
        """Whether the keys of others are kept for the backward, and not fetched again."""
        return self.keeps and cost.kept(self.route.fetched, self.route.keys.lengths, q.shape[2], k.shape[2])

    @property
    def first_call(self) -> LocalPiece | None:
        """The rank's first piece; None: it has no queries."""
        return next(iter(self.near + self.far), None)

    def fetch(self, k: Tensor, v: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Starts to fetch the keys that far pieces see; the result waits for K and V of them ``(batch, keys, heads_k, dim)``, in order."""
        sending, receiving = self._counts
        finish = self._swap(packed(self._lent, k, v), sending, receiving, sum(widths(k, v)))

        def gathered() -> tuple[Tensor, Tensor]:
            came = unpacked(finish(), receiving, k, v)
            came[self.exchange.rank] = line_of(k), line_of(v)
            if not self._together:
                return k[:, :0], v[:, :0]
            keys, values = (
                shaped(torch.cat([run_of(came[owner][n], run, width) for owner, run in self._together]), x)
                for n, (x, width) in enumerate(zip((k, v), widths(k, v), strict=True))
            )
            return keys, values

        return gathered

    def give_back(self, dk: Tensor, dv: Tensor) -> Callable[[], list[Rows]]:
        """Starts to send the gradients of fetched keys to their ranks.

        Args:
            dk, dv: ``(batch, keys, heads_k, dim)`` of the keys that the rank put together.

        Returns:
            A function that waits for what others send, and returns the rank's rows with their gradients: its own first.
        """
        (sending, receiving), (messages, own) = self._counts, self._places
        finish = self._swap(packed(messages, dk, dv), receiving, sending, sum(widths(dk, dv)))

        def returned() -> list[Rows]:
            each, both = widths(dk, dv), (line_of(dk), line_of(dv))
            parts: list[Rows] = [
                (rows, run_of(both[0], run, each[0]), run_of(both[1], run, each[1])) for rows, run in own
            ]
            for runs, pair in zip(self._lent, unpacked(finish(), sending, dk, dv), strict=True):
                parts += given_to(runs, *pair, each)
            return parts

        return returned

    def _swap(self, sent: Tensor, counts: Sequence[int], received: Sequence[int], numbers: int) -> Callable[[], Tensor]:
        """Starts to send so many rows of some numbers each to each rank, and to receive them."""
        if not self.route.fetched:  # all ranks know that nothing travels
            return lambda: sent
        return self.exchange.swap(sent, [n * numbers for n in counts], [n * numbers for n in received])

    @cached_property
    def _counts(self) -> tuple[list[int], list[int]]:
        """How many keys the rank sends to each rank, and receives from it."""
        rank = self.exchange.rank
        return list(self.route.counts[rank]), [counts[rank] for counts in self.route.counts]

    @cached_property
    def _lent(self) -> list[list[Run]]:
        """The runs of the rank's rows that each rank fetches, by rank."""
        return [[x.run for x in self.route.sent(self.exchange.rank, to)] for to in range(self.exchange.size)]

    @cached_property
    def _places(self) -> tuple[list[list[Run]], list[tuple[Run, Run]]]:
        """The places of other ranks' keys among those that the rank puts together, by owner; and those of its own, with its rows."""
        first, own = 0, []
        others: list[list[Run]] = [[] for _ in range(self.exchange.size)]
        for x in self.route.segments(self.exchange.rank):
            if x.owner == self.exchange.rank:
                own.append((x.run, (first, x.length)))
            else:
                others[x.owner].append((first, x.length))
            first += x.length
        return others, own

    @cached_property
    def _together(self) -> list[tuple[int, Run]]:
        """The runs of keys that the rank puts together: the owner of each, and its place in what came from it; its own rows."""
        firsts, found = [0] * self.exchange.size, []
        for x in self.route.segments(self.exchange.rank):
            own = x.owner == self.exchange.rank
            found.append((x.owner, x.run if own else (firsts[x.owner], x.length)))
            firsts[x.owner] += x.length
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
        return list(outputs), list(gathered) if call.kept(q, k) else []
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
    return [o, *statistics], list(gathered) if call.kept(q, k) else []


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

    def compute(pieces: Sequence[LocalPiece], keys: Tensor, values: Tensor) -> list[Rows]:
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
            run = piece.keys.start, piece.keys.stop - piece.keys.start
            found.append((run, line_of(dk), line_of(dv)))
            for slot, grad in zip(call.grad_slots, dextras, strict=True):
                leaves[slot] += grad
        return found

    keys, values = gathered or call.fetch(k, v)()
    parts = compute(call.far, keys, values)
    if alone:
        finish = call.give_back(*(shaped(line, x) for line, x in zip(parts[0][1:], (keys, values), strict=True)))
    else:  # joined calls of other ranks send what one call gave, which needs no wider numbers
        wide = k.dtype if call.route.joined else dtype
        finish = call.give_back(*summed(keys, values, parts, wide, dtype))
    parts = [*compute(call.near, k, v), *finish()]  # the near ones under the exchange
    dk, dv = summed(k, v, parts, k.dtype, dtype)
    if call.sum_leaves:
        leaves = {slot: ordered_sum(call.exchange.gather(grad)) for slot, grad in leaves.items()}
    return dq, dk, dv, [leaves[n].to(x.dtype) if n in leaves else None for n, x in enumerate(extras)]


def compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
