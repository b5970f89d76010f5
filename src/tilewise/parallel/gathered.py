"""Attention over ranks by gathering K and V: each rank computes its own queries against the keys of all.

    forward    K, V <- all ranks;  for each piece of the rank's queries (o, lse) = attention(q, K, V) at its global positions,
               of K and V the keys between the first and the last that some row of the piece may see
    backward   K, V <- all ranks;  for each piece dq, dK, dV;  dK and dV summed over pieces, then over ranks, in fp32

A piece is one plain call that is told where it lies (:class:`tilewise.piece.Piece`), so masks, scores and dropout see global
indices. A row's softmax runs over all of its keys in one kernel: nothing is merged, so no error grows with the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise.derivatives import operator_of
from tilewise.parallel.exchange import Exchange, ordered_sum
from tilewise.parallel.layout import Layout
from tilewise.spec import Spec

_attention_backward = torch.ops.tilewise.attention_backward.default


@dataclass(frozen=True)
class LocalPiece:
    """A contiguous run of the rank's queries, with the keys of the whole sequence between which all keys lie that it sees.

    Attributes:
        rows: among the rank's queries. keys: among all keys.
        spec: the call, told where it lies, as the operator takes it.
    """

    rows: slice
    keys: slice
    spec: str


@dataclass(frozen=True)
class Gathered:
    """One attention over ranks.

    Attributes:
        keys: who holds which keys.
        pieces: the rank's part of the work.
        grad_slots: the extras that want a gradient.
        sum_leaves: gradients of tensors that masks, scores and sinks read are summed over ranks.
        max_logit: the largest score of each row is a result too.
    """

    exchange: Exchange
    keys: Layout
    pieces: tuple[LocalPiece, ...]
    grad_slots: tuple[int, ...]
    sum_leaves: bool
    max_logit: bool

    def whole(self, x: Tensor) -> Tensor:
        """K or V of all ranks ``(batch, total_k, heads_k, dim)``, in the order of positions, from the rank's own rows."""
        return self.keys.unshard(self.exchange.gather(self._padded(x)), 1)

    def own(self, whole: Tensor) -> Tensor:
        """The rank's rows of the sum over ranks of a gradient of all keys."""
        parts = [self._padded(self.keys.shard(whole, rank, 1)) for rank in range(self.exchange.size)]
        return ordered_sum(self.exchange.exchange(parts))[:, : self.keys.lengths[self.exchange.rank]]

    def _padded(self, x: Tensor) -> Tensor:
        """The tensor with as many rows as the rank that holds most: collectives want equal shapes."""
        return pad(x, (0, 0, 0, 0, 0, max(self.keys.lengths) - x.shape[1]))


def reasons(spec: Spec) -> list[str]:
    """Why a call cannot be cut into pieces; empty: it can."""
    return ["packed sequences are not cut into pieces; write them as mask=tw.documents(ids)"] if spec.packed else []


def attention(
    call: Gathered, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None
) -> tuple[Tensor, ...]:
    """``(o, lse)``, differentiable, and max_logit where it is asked for, of the rank's queries.

    Every rank must call it, and its backward, alike.
    """
    return _Attention.apply(call, q, k, v, seed, *extras)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Gathered, q, k, v, seed, *extras):
        keys, values = call.whole(k), call.whole(v)
        o = q.new_empty((*q.shape[:-1], v.shape[-1]))
        # A piece's rows see all of their keys, so its lse and largest scores are those of the whole.
        shape = (2 if call.max_logit else 1, q.shape[0], q.shape[2], q.shape[1])
        statistics = q.new_empty(shape, dtype=_compute_dtype(q))
        for piece in call.pieces:
            part = q[:, piece.rows], keys[:, piece.keys], values[:, piece.keys]
            o[:, piece.rows], *found = operator_of(piece.spec)(*part, extras, seed, piece.spec)
            for target, x in zip(statistics, found, strict=True):
                target[..., piece.rows] = x
        lse, *stats = statistics.unbind()
        ctx.call = call
        ctx.save_for_backward(q, k, v, o, lse, seed, *extras)
        ctx.mark_non_differentiable(*stats)
        return o, lse, *stats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dlse, *_):
        call, (q, k, v, o, lse, seed, *extras) = ctx.call, ctx.saved_tensors
        keys, values = call.whole(k), call.whole(v)
        dtype = _compute_dtype(q)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(keys, dtype=dtype), torch.zeros_like(values, dtype=dtype)
        leaves = {slot: torch.zeros_like(extras[slot], dtype=dtype) for slot in call.grad_slots}
        for piece in call.pieces:
            rows = piece.rows
            dq[:, rows], dk_part, dv_part, dextras = _attention_backward(
                do[:, rows], dlse[..., rows].contiguous(), q[:, rows], keys[:, piece.keys], values[:, piece.keys],
                o[:, rows].contiguous(), lse[..., rows].contiguous(), extras, seed, piece.spec,
            )  # fmt: skip
            dk[:, piece.keys] += dk_part
            dv[:, piece.keys] += dv_part
            for slot, grad in zip(call.grad_slots, dextras, strict=True):
                leaves[slot] += grad
        if call.sum_leaves:
            leaves = {slot: ordered_sum(call.exchange.gather(grad)) for slot, grad in leaves.items()}
        dextras = [leaves[n].to(x.dtype) if n in leaves else None for n, x in enumerate(extras)]
        return None, dq, call.own(dk).to(k.dtype), call.own(dv).to(v.dtype), None, *dextras


def _compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
