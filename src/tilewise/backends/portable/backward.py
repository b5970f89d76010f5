"""Backward (docs/algorithm.md#6-backward; FlashAttention-2, Algorithm 2): key tiles outside, queries inside.

P = exp(S - lse)    dV += (P ∘ Z)ᵀ dO    dP = Z ∘ (dO Vᵀ)    dS = P ∘ (dP - delta)
dK += dS'ᵀ Q · scale    dQ += dS' K · scale,    dS' = dS · (d score / d s)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise import expr
from tilewise.backends.portable.step import Step, add_product, product, tiles
from tilewise.leaf_gradients import read_adjoint
from tilewise.planning.tiles import EMPTY, FULL


@dataclass
class Sums:
    """The sums that the loops add to: ``dq`` of one query tile, ``dk``, ``dv`` of one key tile, leaves by slot."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    leaves: dict[int, Tensor]


def backward_step(
    step: Step, do: Tensor, lse: Tensor, delta: Tensor, grads: tuple[Tensor, Tensor, Tensor], leaves: dict[int, Tensor]
):
    """Write a step's part of ``grads`` (dq, dk, dv: views ``(batch, seqlen, heads, D)``), and add to ``leaves``.

    Args:
        do: ``(batch, seqlen_q, heads_q, head_dim_v)``.
        lse, delta: ``(batch, heads_q, seqlen_q)`` in the compute dtype.
    """
    dq, dk, dv = grads
    lse = torch.where(lse == -torch.inf, torch.inf, lse)  # exp(s - inf) = 0: rows that saw nothing
    rows = tiles(step.grid.seqlen_q, step.config.tile_m)
    columns = list(zip(*step.tile_map(by_columns=True), strict=True))
    dq_sums = [torch.zeros_like(step.query_tile(step.q, at)) for at in rows]
    for keys, line in zip(tiles(step.grid.keys, step.config.tile_n), columns, strict=True):
        k, v = step.key_tile(step.k, keys), step.key_tile(step.v, keys)
        dk_sum, dv_sum = torch.zeros_like(k), torch.zeros_like(v)
        for at, status, dq_sum in zip(rows, line, dq_sums, strict=True):
            if status != EMPTY:
                query, sums = _QueryTile(step, at, do, lse, delta), Sums(dq_sum, dk_sum, dv_sum, leaves)
                _query_block(step, query, keys, status == FULL, (k, v), sums)
        store_keys(step, dk, keys, dk_sum)
        store_keys(step, dv, keys, dv_sum)
    for at, tile in zip(rows, dq_sums, strict=True):
        by_head = step.by_head(tile, at.stop - at.start)
        dq[:, at] = by_head.mul_(step.p.softmax_scale).transpose(1, 2)


def store_keys(step: Step, whole: Tensor, keys: slice, tile: Tensor) -> None:
    whole[:, keys] = tile.unflatten(0, (step.q.shape[0], -1)).transpose(1, 2)


class _QueryTile:
    """Return what every key tile needs of a query tile: q (scaled), dO, lse and delta as product tiles."""

    def __init__(self, step: Step, rows: slice, do: Tensor, lse: Tensor, delta: Tensor):
        self.rows = rows
        self.q = step.query_tile(step.q, rows) * step.p.softmax_scale
        self.do = step.query_tile(do, rows)
        self.lse, self.delta = step.row_tile(lse, rows), step.row_tile(delta, rows)


def _query_block(step: Step, query: _QueryTile, keys: slice, full: bool, kv: tuple[Tensor, Tensor], sums: Sums) -> None:
    """Add one tile of scores to dQ of its rows and to dK, dV of its keys."""
    k, v = kv
    plain, ordered = step.p.spec.score is None, step.p.spec.everywhere
    raw = product(query.q, k.mT, ordered)
    s = step.scores(raw if plain else raw.clone(), query.rows, keys, full)
    p = s.sub_(query.lse).exp_()
    z = step.dropped(query.rows, keys)
    add_product(sums.dv, (p if z is None else p * z).mT, query.do, ordered)
    dp = product(query.do, v.mT, ordered)
    ds = (dp if z is None else dp.mul_(z)).sub_(query.delta).mul_(p)
    if not (plain and full):  # 0 · NaN: hidden pairs add nothing
        ds.masked_fill_(p == 0, 0)
    if not plain:
        ds = _through_score(step, (query.rows, keys), raw, p == 0, ds, sums.leaves)
    add_product(sums.dk, ds.mT, query.q, ordered)
    add_product(sums.dq, ds, k, ordered)


def _through_score(
    step: Step, at: tuple[slice, slice], raw: Tensor, hidden: Tensor, ds: Tensor, leaves: dict[int, Tensor]
) -> Tensor:
    """Return ``dS · (d score / d s)``, and add ``dS · (d score / d leaf)`` to the leaves."""
    spec, rows = step.p.spec, at[0].stop - at[0].start
    env = step.env(*at, step.by_head(raw, rows))
    slope, *leaf_slopes = expr.evaluate(spec.score_slopes, env, step.t.leaves, raw.dtype)
    ds, hidden = step.by_head(ds, rows), step.by_head(hidden, rows)
    for e, leaf_slope in zip(spec.lookups, leaf_slopes, strict=True):
        read_adjoint(leaves[e.args[0][1]], e, env, step.t.leaves, (ds * leaf_slope).masked_fill_(hidden, 0))
    return (ds * slope).masked_fill_(hidden, 0).view(raw.shape)
