"""Attention over ranks by gathering K and V: each rank computes its own queries against the keys of all.

    forward    K, V <- all ranks;  for each piece of the rank's queries (o, lse) = attention(q, K, V) at its global positions
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

from tilewise.parallel.exchange import Exchange, ordered_sum
from tilewise.parallel.layout import Layout
from tilewise.spec import parse_spec

_attention = torch.ops.tilewise.attention.default
_attention_backward = torch.ops.tilewise.attention_backward.default


@dataclass(frozen=True)
class Gathered:
    """One attention over ranks.

    Attributes:
        queries, keys: who holds which positions.
        specs: one for each of the rank's pieces of queries, as the operator takes them.
        sum_leaves: gradients of tensors that masks, scores and sinks read are summed over ranks.
    """

    exchange: Exchange
    queries: Layout
    keys: Layout
    specs: tuple[str, ...]
    sum_leaves: bool

    @property
    def rows(self) -> list[slice]:
        """The rank's queries that each spec is for."""
        held = self.queries.rows(self.exchange.rank)
        return [slice(first, first + stop - start) for start, stop, first in held]

    def whole(self, x: Tensor) -> Tensor:
        """K or V of all ranks ``(batch, total_k, heads_k, dim)``, in the order of positions, from the rank's own rows."""
        return self.keys.unshard(self.exchange.gather(self._padded(x)), 1)

    def own(self, whole: Tensor) -> Tensor:
        """The rank's rows of the sum over ranks of a gradient of all keys."""
        parts = [self._padded(self.keys.shard(whole, rank, 1)) for rank in range(self.exchange.size)]
        return ordered_sum(self.exchange.exchange(parts))[:, : self.keys.lengths[self.exchange.rank]]

    def _padded(self, x: Tensor) -> Tensor:
        """With as many rows as the rank that holds most: collectives want equal shapes."""
        return pad(x, (0, 0, 0, 0, 0, max(self.keys.lengths) - x.shape[1]))


def attention(
    call: Gathered, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``(o, lse)`` of the rank's queries; differentiable. Every rank must call it, and its backward, alike."""
    return _Attention.apply(call, q, k, v, seed, *extras)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Gathered, q, k, v, seed, *extras):
        keys, values = call.whole(k), call.whole(v)
        o = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=_compute_dtype(q))
        for rows, spec in zip(call.rows, call.specs, strict=True):
            o[:, rows], lse[..., rows] = _attention(q[:, rows], keys, values, extras, seed, spec)
        ctx.call = call
        ctx.save_for_backward(q, k, v, o, lse, seed, *extras)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        call, (q, k, v, o, lse, seed, *extras) = ctx.call, ctx.saved_tensors
        keys, values = call.whole(k), call.whole(v)
        dtype = _compute_dtype(q)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(keys, dtype=dtype), torch.zeros_like(values, dtype=dtype)
        slots = parse_spec(call.specs[0]).grad_slots if call.specs else ()
        leaves = {slot: torch.zeros_like(extras[slot], dtype=dtype) for slot in slots}
        for rows, spec in zip(call.rows, call.specs, strict=True):
            grads = (x[..., rows].contiguous() for x in (dlse, lse))
            dlse_rows, lse_rows = grads
            dq[:, rows], dk_rows, dv_rows, dextras = _attention_backward(
                do[:, rows], dlse_rows, q[:, rows], keys, values, o[:, rows].contiguous(), lse_rows, extras, seed, spec
            )
            dk += dk_rows
            dv += dv_rows
            for slot, grad in zip(slots, dextras, strict=True):
                leaves[slot] += grad
        if call.sum_leaves:
            leaves = {slot: ordered_sum(call.exchange.gather(grad)) for slot, grad in leaves.items()}
        dextras = [leaves[n].to(x.dtype) if n in leaves else None for n, x in enumerate(extras)]
        return None, dq, call.own(dk).to(k.dtype), call.own(dv).to(v.dtype), None, *dextras


def _compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
