"""How an attention over ranks is computed: which scheme, and the rank's part of the work."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewise.parallel import cost, gathered, heads
from tilewise.parallel.exchange import Exchange
from tilewise.parallel.layout import Layout
from tilewise.piece import Piece
from tilewise.problem import Problem, check
from tilewise.spec import Spec
from tilewise.tiles import Grid

AUTO = "auto"
SCHEMES = (AUTO, *cost.COSTS)


@dataclass(frozen=True)
class Wish:
    """What a caller asks for, besides the attention itself.

    Attributes:
        scheme: one of ``SCHEMES``.
        most_groups: into how many groups a rank's heads may be cut.
        sum_leaf_gradients: gradients of sinks and of tensors that scores read are summed over ranks.
        with_lse: lse is wanted.
    """

    exchange: Exchange
    scheme: str
    most_groups: int
    sum_leaf_gradients: bool
    with_lse: bool


def planned(
    wish: Wish,
    layouts: tuple[Layout, ...],
    qkv: tuple[Tensor, ...],
    extras: list[Tensor],
    seed: Tensor | None,
    spec: Spec,
) -> heads.Heads | gathered.Gathered:
    """What the rank computes, after every input check of the whole call: all ranks see the same shapes here, and fail alike.

    Args:
        layouts: who holds which queries, and which keys. qkv: the rank's own rows.
    """
    exchange, (queries, keys) = wish.exchange, layouts
    q, k, v = (_stretched(x, layout.seqlen) for x, layout in zip(qkv, (queries, keys, keys), strict=True))
    whole = check(q, k, v, extras, seed, spec)
    if chosen(wish.scheme, whole, exchange.size) == "heads":
        groups = heads.groups_of(whole.heads_k // exchange.size, wish.most_groups)
        return heads.Heads(
            exchange, queries, keys, spec.text(), whole.heads_q, groups, heads.head_axes(spec),
            spec.grad_slots, wish.sum_leaf_gradients, wish.with_lse,
        )  # fmt: skip
    grid = Grid.whole(spec.region, extras, (whole.batch, whole.heads_q, queries.seqlen, keys.seqlen), q.device)
    found = []
    for start, stop, first in queries.rows(exchange.rank):
        low, high = _keys_between(grid, start, stop)
        piece = replace(spec, piece=Piece(start, low, queries.seqlen, keys.seqlen))
        check(q[:, start:stop], k[:, low:high], v[:, low:high], extras, seed, piece)
        found.append(gathered.LocalPiece(slice(first, first + stop - start), slice(low, high), piece.text()))
    return gathered.Gathered(exchange, keys, tuple(found), spec.grad_slots, wish.sum_leaf_gradients)


def chosen(scheme: str, whole: Problem, ranks: int) -> str:
    """The scheme of a call, the one that was asked for or the cheapest that can: a function of what all ranks know alike.

    Raises:
        NotImplementedError: the one that was asked for, or every one, cannot.
    """
    refused = {"gather": gathered.reasons(whole.spec), "heads": heads.reasons(whole.spec, whole.heads_k, ranks)}
    asked = [name for name in refused if scheme in (AUTO, name)]
    able = [name for name in asked if not refused[name]]
    if not able:
        lines = [f"  {name}: {reason}" for name in asked for reason in refused[name]]
        raise NotImplementedError("\n".join(["no scheme can compute this attention over ranks", *lines]))
    return min(able, key=lambda name: cost.COSTS[name](whole, ranks).milliseconds)


def _stretched(x: Tensor, seqlen: int) -> Tensor:
    """A tensor with the facts of ``x`` and another length, without memory of its own: for checks."""
    return x.new_empty((1,) * x.ndim).expand(*x.shape[:-3], seqlen, *x.shape[-2:])


def _keys_between(grid: Grid, start: int, stop: int) -> tuple[int, int]:
    """The first, and one past the last, key that queries ``start`` to ``stop`` may see; at least one key. Reads the mask's tensors."""
    lo, hi = grid.key_interval(torch.arange(start, stop, device=grid.b.device))
    sees = lo < hi
    first = int(torch.where(sees, lo, grid.keys).amin())
    last = int(torch.where(sees, hi, 0).amax())
    return (first, last) if first < last else (0, min(1, grid.keys))
