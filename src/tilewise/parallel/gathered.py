"""Attention over ranks by gathering K and V: each rank computes its own queries against all keys that they see.

    forward    K, V <- their ranks;  for each piece of the rank's queries (o, lse) = attention(q, K, V) at its global positions, with
               the keys between the first and the last that some row of the piece may see
    backward   for each piece dq, dK, dV;  dK and dV -> their ranks, summed over pieces and ranks in fp32

A piece is one plain call that knows its place (:class:`tilewise.piece.Piece`), so masks, scores and dropout see global indices. One
kernel runs a row's softmax over all of its keys. Nothing is merged, so no error grows with the ranks.

A piece is *near* if all of its keys lie in one run of the rank's own; others are *far*. Ranks send only keys that far pieces see
(:class:`tilewise.parallel.route.Route`), and compute near pieces meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.autograd import attention
from tilewise.caching import cached_property
from tilewise.derivatives import operator_of
from tilewise.parallel.exchange import Exchange, Gradients, ordered_sum
from tilewise.parallel.messages import Taken, line_of, shaped
from tilewise.parallel.moves import Moves
from tilewise.parallel.route import Route
from tilewise.spec import Spec

_attention_backward = torch.ops.tilewise.attention_backward.default


@dataclass(frozen=True)
class LocalPiece:
    """A contiguous run of the rank's queries, and the run of keys that covers what they see.

    Attributes:
        rows: among the rank's queries.
        keys: among the rank's own keys for a near piece, else among the keys that the rank assembles.
        spec: the call with its place, as the operator takes it.
    """

    rows: slice
    keys: slice
    spec: str


@dataclass(frozen=True)
class Gathered:
    """One attention over ranks.

    Attributes:
        route: the keys that are sent.
        near, far: the rank's part of the work.
        widths: numbers in a row of K, and of V.
        grad_slots: the extras that want a gradient.
        sum_leaves: gradients of sinks and leaves are summed over ranks.
        max_logit: the largest score of each row is a result too.
        keeps: keys of others are kept for the backward instead of being fetched again.
        tables: of the mask of joined queries; they follow the extras.
        digest: of the route if it depends on tensors, which may differ between ranks; else 0.
    """

    exchange: Exchange
    route: Route
    near: tuple[LocalPiece, ...]
    far: tuple[LocalPiece, ...]
    widths: tuple[int, int]
    grad_slots: tuple[int, ...]
    sum_leaves: bool
    max_logit: bool
    digest: int
    keeps: bool
    tables: tuple[Tensor, ...] = ()

    @property
    def pieces(self) -> tuple[LocalPiece, ...]:
        return self.near + self.far

    @property
    def idle(self) -> bool:
        """Whether the rank has no queries and nothing is sent. Fake tensors may have symbolic sizes, which tell no more."""
        return not self.pieces and not self.route.fetched

    @property
    def alone(self) -> bool:
        """Whether one call gives all results of the rank, and its gradients need no wider numbers."""
        return self.route.joined and bool(self.far)

    @cached_property
    def moves(self) -> Moves:
        """The places of the numbers of K's and V's rows when they are sent."""
        near, far = (tuple((x.keys.start, x.keys.stop - x.keys.start) for x in xs) for xs in (self.near, self.far))
        return Moves(self.route, self.exchange.rank, near, far, self.widths)

    def fetch(self, k: Tensor, v: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Start to fetch the keys that far pieces see. The result waits for their K and V ``(batch, keys, heads_k, dim)``, in order."""
        if self.idle:
            return lambda: (k[:, :0], v[:, :0])
        lines = line_of(k), line_of(v)
        finish = self.swap(self.moves.sent, lines, self.moves.sending, self.moves.receiving)

        def gathered() -> tuple[Tensor, Tensor]:
            keys, values = self.moves.together(*lines, finish())
            return shaped(keys, k), shaped(values, v)

        return gathered

    def swap(
        self, taken: Taken, lines: Sequence[Tensor], counts: list[int], received: list[int]
    ) -> Callable[[], Tensor]:
        """Start to send so many numbers of lines to each rank, and to receive them."""
        if not self.route.fetched:  # all ranks know that nothing is sent
            return lambda: lines[0].new_empty(0)
        (sent,) = taken(*lines)
        return self.exchange.swap(sent, counts, received)


def reasons(spec: Spec) -> list[str]:
    """Return why a call cannot be cut into pieces, or nothing if it can."""
    found = {
        "packed sequences are not cut into pieces; write them as mask=tw.documents(ids)": spec.packed,
        'deterministic="everywhere": keys are summed piece by piece; scheme="heads" has it': spec.everywhere,
    }
    return [reason for reason, applies in found.items() if applies]


def forward(
    call: Gathered, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return ``[o, lse]`` of the rank's queries, with max_logit if wanted, and what the backward reads beside q, k, v, o and lse."""
    finish = call.fetch(k, v)
    extras = (*extras, *call.tables)
    # A piece's rows see all of their keys, so its lse and largest scores are those of the whole.
    shape = q.shape[0], q.shape[2], q.shape[1]
    outputs: list[Tensor] = []
    if not call.alone:
        outputs = [q.new_empty((*q.shape[:-1], v.shape[-1]))]
        outputs += [q.new_empty(shape, dtype=compute_dtype(q)) for _ in range(2 if call.max_logit else 1)]

    def compute(pieces: Sequence[LocalPiece], keys: Tensor, values: Tensor) -> None:
        for piece in pieces:
            part = _cut(q, piece.rows), _cut(keys, piece.keys), _cut(values, piece.keys)
            found = attention(*part, extras, seed, piece.spec, operator_of(piece.spec))
            if call.alone:
                outputs.extend(found)
                continue
            outputs[0][:, piece.rows] = found[0]
            for target, x in zip(outputs[1:], found[1:], strict=True):
                target[..., piece.rows] = x

    compute(call.near, k, v)  # under the exchange
    gathered = finish()
    compute(call.far, *gathered)
    return outputs, list(gathered) if call.keeps else []


def backward(
    call: Gathered, of: Gradients, saved: Sequence[Tensor], extras: Sequence[Tensor], seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Return dq, dk and dv of the rank's rows, and the gradient of each extra.

    Args:
        saved: q, k, v, o, lse, and the keys that the forward kept.
    """
    (do, dlse), (q, k, v, o, lse, *gathered) = of, saved
    do = torch.zeros_like(o) if do is None else do
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    dtype = compute_dtype(q)
    tabled = (*extras, *call.tables)
    leaves = {slot: torch.zeros_like(extras[slot], dtype=dtype) for slot in call.grad_slots}
    dq = q if call.alone else torch.empty_like(q)  # one call gives all of it

    def compute(pieces: Sequence[LocalPiece], keys: Tensor, values: Tensor) -> list[Tensor]:
        """Return the lines of dK and dV of each piece."""
        nonlocal dq
        found: list[Tensor] = []
        for piece in pieces:
            rows = piece.rows
            part, dk, dv, dextras = _attention_backward(
                _cut(do, rows), _cut(dlse, rows, 2).contiguous(), _cut(q, rows), _cut(keys, piece.keys), _cut(values, piece.keys),
                _cut(o, rows).contiguous(), _cut(lse, rows, 2).contiguous(), tabled, seed, piece.spec,
            )  # fmt: skip
            if call.alone:
                dq = part
            else:
                dq[:, rows] = part
            found += [line_of(dk), line_of(dv)]
            for slot, grad in zip(call.grad_slots, dextras, strict=True):
                leaves[slot] += grad
        return found

    if call.idle:
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    else:
        keys, values = gathered or call.fetch(k, v)()
        moves, lines = call.moves, compute(call.far, keys, values)
        if not call.alone:  # a joined rank without queries sends zeros as narrow as the others' gradients
            lines = moves.far_sum(lines, k, k.dtype if call.route.joined else dtype, dtype)
        finish = call.swap(moves.back, lines, moves.receiving, moves.sending)
        near = compute(call.near, k, v)  # under the exchange
        found = moves.own_sum([*lines, finish(), *near], k, k.dtype, dtype)
        dk, dv = (shaped(line, x) for line, x in zip(found, (k, v), strict=True))
    if call.sum_leaves:
        leaves = {slot: ordered_sum(call.exchange.gather(grad)) for slot, grad in leaves.items()}
    return dq, dk, dv, [leaves[n].to(x.dtype) if n in leaves else None for n, x in enumerate(extras)]


def _cut(x: Tensor, rows: slice, dim: int = 1) -> Tensor:
    """Return some rows of a tensor, or the tensor itself for all of them."""
    count = rows.stop - rows.start
    return x if count == x.shape[dim] else x.narrow(dim, rows.start, count)


def compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
