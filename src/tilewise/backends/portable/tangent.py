"""Forward mode, and the tangent of the backward (docs/algorithm.md, (30) to (34)), from the lse of the forward.

A dot is a tangent: the change of a quantity while the inputs move along a direction.

P = exp(S - lse)    lsė = Σ_j P Ṡ    Ȯ = Σ_j (P ∘ Z) (V̇ + Ṡ V) - lsė O    Ṗ = P ∘ (Ṡ - lsė)
dS = P ∘ (dP - delta)    dṠ = Ṗ ∘ (dP - delta) + P ∘ (dṖ - deltȧ)
dQ̇ = dṠ K + dS K̇    dK̇ = dṠᵀ Q + dSᵀ Q̇    dV̇ = (Ṗ ∘ Z)ᵀ dO + (P ∘ Z)ᵀ dȮ
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise import expr, state
from tilewise.backends.base import Directions, Output, OutputGrads
from tilewise.backends.portable.backward import Sums, store_keys
from tilewise.backends.portable.step import Step, tiles
from tilewise.leaf_gradients import read_adjoint
from tilewise.planning.tiles import EMPTY, FULL

# -- Forward mode ------------------------------------------------------------------------------------------------------


def tangent_step(step: Step, out: Output, along: Directions) -> tuple[Tensor, Tensor]:
    """Return the tangents of a step's o (batch, seqlen_q, heads_q, head_dim_v) and lse (batch, heads_q, seqlen_q), in the compute dtype.

    Args:
        out: the step's o and lse.
    """
    o, lse = [], []
    keys = tiles(step.grid.keys, step.config.tile_n)
    for rows, line in zip(tiles(step.grid.seqlen_q, step.config.tile_m), step.tile_map(), strict=True):
        query = Rows.of(step, rows, out.lse, along)
        tile_o, mean = torch.zeros_like(step.query_tile(out.o, rows)), torch.zeros_like(query.lse)
        for at, status in zip(keys, line, strict=True):
            if status != EMPTY:
                mean = _add_key_tile(step, query, Keys.of(step, at, along), status == FULL, along, (tile_o, mean))
        if along.sink is not None:  # one more score, without a value
            sink, moved = (_by_row(step, x, query) for x in (step.t.sink, along.sink))
            mean = mean + torch.exp(sink - query.lse) * moved
        tile_o -= mean * step.query_tile(out.o, rows)
        o.append(step.by_head(tile_o, query.length))
        lse.append(step.by_head(mean, query.length).squeeze(-1))
    return torch.cat(o, 2).transpose(1, 2), torch.cat(lse, 2)


def _add_key_tile(
    step: Step, query: Rows, key: Keys, full: bool, along: Directions, sums: tuple[Tensor, Tensor]
) -> Tensor:
    """Add a tile's ``(P ∘ Z) (V̇ + Ṡ V)`` to the first of ``sums`` in place, and return the second plus the tile's ``Σ_j P Ṡ``."""
    o, mean = sums
    pairs = Pairs.of(step, query, key, full, along)
    weighted = pairs.p * pairs.ds
    mean = mean + weighted.sum(-1, keepdim=True)
    z = step.dropped(query.rows, key.keys)
    o.baddbmm_(weighted if z is None else weighted * z, key.v)
    if key.dv is not None:
        o.baddbmm_(pairs.p if z is None else pairs.p * z, key.dv)
    return mean


# -- The tangent of the backward -----------------------------------------------------------------------------------------


@dataclass
class RowTangents:
    """The tensors of a step's rows, laid out as o or as lse. None as a tangent means zero.

    Attributes:
        do, do_tangent: the gradient of o.
        lse, lse_tangent: of the forward.
        delta, delta_tangent: ``rowsum(dO ∘ O) - dlse``.
    """

    do: Tensor
    do_tangent: Tensor | None
    lse: Tensor
    lse_tangent: Tensor
    delta: Tensor
    delta_tangent: Tensor

    @classmethod
    def of(cls, step: Step, out: Output, grad: OutputGrads, moved: Output) -> RowTangents:
        dtype = step.p.compute_dtype
        o, do, moved_o = (step.rows_of(x).to(dtype) for x in (out.o, grad.do, moved.o))
        delta = (do * o).sum(-1).transpose(1, 2) - step.statistic_of(grad.dlse)
        moved_delta = (do * moved_o).sum(-1).transpose(1, 2)
        moved_do = None
        if grad.do_tangent is not None:
            moved_do = step.rows_of(grad.do_tangent).to(dtype)
            moved_delta = moved_delta + (moved_do * o).sum(-1).transpose(1, 2)
        if grad.dlse_tangent is not None:
            moved_delta = moved_delta - step.statistic_of(grad.dlse_tangent)
        return cls(do, moved_do, step.statistic_of(out.lse), step.statistic_of(moved.lse), delta, moved_delta)

    def sink_gradient(self, step: Step, moved_sink: Tensor | None) -> Tensor:
        """Return the tangent of the sink's gradient, (heads_q,) of the step: ``-Σ_i P_sink ((sink̇ - lsė) delta + deltȧ)``."""
        heads = step.at[3]
        sink = step.t.sink.to(self.lse.dtype)[heads].view(-1, 1)
        moved = -self.lse_tangent if moved_sink is None else moved_sink[heads].view(-1, 1) - self.lse_tangent
        return state.sink_gradient(sink, self.lse, moved * self.delta + self.delta_tangent).sum((0, 2))


def backward_tangent_step(
    step: Step,
    rows: RowTangents,
    along: Directions,
    grads: tuple[Tensor, Tensor, Tensor],
    leaves: dict[int, Tensor],
) -> None:
    """Write a step's part of ``grads`` (the tangents of dq, dk, dv: views ``(batch, seqlen, heads, D)``), and add to ``leaves``."""
    dq, dk, dv = grads
    queries = tiles(step.grid.seqlen_q, step.config.tile_m)
    columns = list(zip(*step.tile_map(by_columns=True), strict=True))
    dq_sums = [torch.zeros_like(step.query_tile(step.q, at)) for at in queries]
    for keys, line in zip(tiles(step.grid.keys, step.config.tile_n), columns, strict=True):
        key = Keys.of(step, keys, along)
        dk_sum, dv_sum = torch.zeros_like(key.k), torch.zeros_like(key.v)
        for at, status, dq_sum in zip(queries, line, dq_sums, strict=True):
            if status != EMPTY:
                query, sums = Rows.of(step, at, rows.lse, along), Sums(dq_sum, dk_sum, dv_sum, leaves)
                _add_block(step, (query, key), Pairs.of(step, query, key, status == FULL, along), rows, along, sums)
        store_keys(step, dk, keys, dk_sum)
        store_keys(step, dv, keys, dv_sum)
    for at, tile in zip(queries, dq_sums, strict=True):
        by_head = step.by_head(tile, at.stop - at.start)
        dq[:, at] = by_head.mul_(step.p.softmax_scale).transpose(1, 2)


def _add_block(
    step: Step, at: tuple[Rows, Keys], pairs: Pairs, rows: RowTangents, along: Directions, sums: Sums
) -> None:
    """Add one tile of pairs to the sums."""
    query, key = at
    lse_tangent, delta, delta_tangent = (
        step.row_tile(x, query.rows) for x in (rows.lse_tangent, rows.delta, rows.delta_tangent)
    )
    do = step.query_tile(rows.do, query.rows)
    moved_p = pairs.p * (pairs.ds - lse_tangent)
    dp, moved_dp = torch.bmm(do, key.v.mT), torch.zeros_like(pairs.p)
    if key.dv is not None:
        moved_dp.baddbmm_(do, key.dv.mT)
    z = step.dropped(query.rows, key.keys)
    sums.dv.baddbmm_((moved_p if z is None else moved_p * z).mT, do)
    if rows.do_tangent is not None:
        moved_do = step.query_tile(rows.do_tangent, query.rows)
        moved_dp.baddbmm_(moved_do, key.v.mT)
        sums.dv.baddbmm_((pairs.p if z is None else pairs.p * z).mT, moved_do)
    centred, moved_centred = (dp, moved_dp) if z is None else (dp * z, moved_dp * z)
    centred, moved_centred = centred - delta, moved_centred - delta_tangent
    ds, moved_ds = pairs.p * centred, torch.addcmul(moved_p * centred, pairs.p, moved_centred)
    if pairs.hidden is not None:
        ds.masked_fill_(pairs.hidden, 0), moved_ds.masked_fill_(pairs.hidden, 0)
    if step.p.spec.score is not None:
        ds, moved_ds = _through_score(step, at, pairs, (ds, moved_ds), along, sums.leaves)
    sums.dk.baddbmm_(moved_ds.mT, query.q)
    sums.dq.baddbmm_(moved_ds, key.k)
    if query.dq is not None:
        sums.dk.baddbmm_(ds.mT, query.dq)
    if key.dk is not None:
        sums.dq.baddbmm_(ds, key.dk)


def _through_score(
    step: Step,
    at: tuple[Rows, Keys],
    pairs: Pairs,
    grads: tuple[Tensor, Tensor],
    along: Directions,
    leaves: dict[int, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return ``dS · (d score / d s)`` and its tangent, and add the tangent of ``dS · (d score / d leaf)`` to the leaves."""
    spec, (query, key) = step.p.spec, at
    slopes = list(spec.score_slopes)
    values = _evaluate(step, at, pairs, [*slopes, *(expr.tangent(x, along.slots) for x in slopes)], along)
    ds, moved_ds, hidden = (step.by_head(x, query.length) for x in (*grads, pairs.hidden))
    env = step.env(query.rows, key.keys)
    products = [(moved_ds * slope + ds * moved).masked_fill_(hidden, 0)
                for slope, moved in zip(values[: len(slopes)], values[len(slopes) :], strict=True)]  # fmt: skip
    for e, product in zip(spec.lookups, products[1:], strict=True):
        read_adjoint(leaves[e.args[0][1]], e, env, step.t.leaves, product)
    shape = pairs.raw.shape
    return (ds * values[0]).masked_fill_(hidden, 0).view(shape), products[0].view(shape)


# -- Tiles -------------------------------------------------------------------------------------------------------------


@dataclass
class Rows:
    """A query tile as product tiles: q and its tangent (or None), both scaled, and lse, which is +inf for a row without keys."""

    rows: slice
    q: Tensor
    dq: Tensor | None
    lse: Tensor

    @classmethod
    def of(cls, step: Step, rows: slice, lse: Tensor, along: Directions) -> Rows:
        scale = step.p.softmax_scale
        lse = torch.where(lse == -torch.inf, torch.inf, lse)  # exp(s - inf) = 0
        tangent = None if along.q is None else step.query_tile(step.rows_of(along.q), rows) * scale
        return cls(rows, step.query_tile(step.q, rows) * scale, tangent, step.row_tile(lse, rows))

    @property
    def length(self) -> int:
        return self.rows.stop - self.rows.start


@dataclass
class Keys:
    """A key tile as product tiles: k and v and their tangents (or None)."""

    keys: slice
    k: Tensor
    v: Tensor
    dk: Tensor | None
    dv: Tensor | None

    @classmethod
    def of(cls, step: Step, keys: slice, along: Directions) -> Keys:
        k, v = step.key_tile(step.k, keys), step.key_tile(step.v, keys)
        tangents = [None if x is None else step.key_tile(step.keys_of(x), keys) for x in (along.k, along.v)]
        return cls(keys, k, v, *tangents)


@dataclass
class Pairs:
    """One tile of pairs, as product tiles.

    Attributes:
        p: P, normalised.
        hidden: the pairs with P = 0, or None if every pair is seen and finite.
        ds: the tangent of the scores, 0 where hidden.
        raw, draw: ``softmax_scale * q·k`` and its tangent.
    """

    p: Tensor
    hidden: Tensor | None
    ds: Tensor
    raw: Tensor
    draw: Tensor

    @classmethod
    def of(cls, step: Step, query: Rows, key: Keys, full: bool, along: Directions) -> Pairs:
        score = step.p.spec.score
        raw = torch.bmm(query.q, key.k.mT)
        draw = torch.zeros_like(raw)
        if query.dq is not None:
            draw.baddbmm_(query.dq, key.k.mT)
        if key.dk is not None:
            draw.baddbmm_(query.q, key.dk.mT)
        p = step.scores(raw.clone(), query.rows, key.keys, full).sub_(query.lse).exp_()
        pairs = cls(p, None if full and score is None else p == 0, draw, raw, draw)
        if score is not None:
            (ds,) = _evaluate(step, (query, key), pairs, [expr.tangent(score, along.slots)], along)
            pairs.ds = ds.to(raw.dtype).expand(step.by_head(raw, query.length).shape).reshape(raw.shape)
        if pairs.hidden is not None:
            pairs.ds = pairs.ds.masked_fill(pairs.hidden, 0)  # hidden pairs may be NaN
        return pairs


def _evaluate(
    step: Step, at: tuple[Rows, Keys], pairs: Pairs, roots: list[expr.Expr], along: Directions
) -> list[Tensor]:
    """Evaluate expressions of s and ds on a tile of pairs, each broadcastable to ``(batch, heads_q, rows, keys)``."""
    query, key = at
    s, ds = (step.by_head(x, query.length) for x in (pairs.raw, pairs.draw))
    env = step.env(query.rows, key.keys, s) | {"ds": ds}
    return expr.evaluate(roots, env, along.with_leaves(step.t.leaves), s.dtype)


def _by_row(step: Step, sink: Tensor, query: Rows) -> Tensor:
    """Return a tensor of one number per query head as a product tile of the rows."""
    batch, heads = step.q.shape[0], step.q.shape[2]
    x = sink.to(step.p.compute_dtype)[step.at[3]].view(1, heads, 1).expand(batch, heads, query.rows.stop)
    return step.row_tile(x, query.rows)
