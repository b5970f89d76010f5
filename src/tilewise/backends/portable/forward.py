"""Forward (docs/algorithm.md#4-forward; FlashAttention-2, Algorithm 1): query tiles outside, keys inside.

    m' = max(m, rowmax S)    P = exp(S - m')    l = l·exp(m - m') + rowsum P    O = O·exp(m - m') + P V
and once at the end O = O / l, lse = m + log l.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise import state
from tilewise.backends.portable.step import Step, add_product, product, row_sums, split_keys, tiles
from tilewise.planning.tiles import EMPTY, FULL


def forward_step(step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """Return a step's ``o`` (batch, heads_q, seqlen_q, head_dim_v), and ``lse`` and the largest scores (batch, heads_q, seqlen_q)."""
    if step.config.split and step.grid.key_origin is None and step.grid.keys > step.config.split:
        return _merged_splits(step)
    states = []
    keys = tiles(step.grid.keys, step.config.tile_n)
    for rows, line in zip(tiles(step.grid.seqlen_q, step.config.tile_m), step.tile_map(), strict=True):
        tile = _query_tile(step, rows, [(n, s == FULL) for n, s in zip(keys, line, strict=True) if s != EMPTY])
        states.append([step.by_head(x, rows.stop - rows.start) for x in tile])
    o, lse, largest = (torch.cat(x, 2) for x in zip(*states, strict=True))
    return o, lse.squeeze(-1), largest.squeeze(-1)


def _merged_splits(step: Step) -> tuple[Tensor, Tensor, Tensor]:
    states, largest = [], []
    for part in split_keys(step):
        o, lse, part_largest = (x.unflatten(0, (step.q.shape[0], -1)) for x in forward_step(part))
        states.append(state.merge_all(o, lse, 1))
        largest.append(part_largest.amax(1))
    o, lse = states[0] if len(states) == 1 else state.merge(*states[0], *states[1])
    return o, lse, largest[0] if len(states) == 1 else torch.maximum(*largest)


def _query_tile(step: Step, rows: slice, visits: list[tuple[slice, bool]]) -> tuple[Tensor, Tensor, Tensor]:
    """Visit the key tiles of one query tile. Return ``o``, ``lse`` and the largest scores as product tiles."""
    q = step.query_tile(step.q, rows) * step.p.softmax_scale
    m = q.new_full((*q.shape[:2], 1), -torch.inf)
    l = torch.zeros_like(m)
    acc = q.new_zeros((*q.shape[:2], step.p.head_dim_v))
    for keys, full in visits:
        m, l = _key_block(step, (rows, keys), full, q, (m, l, acc))
    lse = torch.where(l > 0, m + torch.log(l), -torch.inf)
    undefined = torch.isnan(l)
    return acc.div_(torch.where(l > 0, l, 1)), torch.where(undefined, l, lse), torch.where(undefined, l, m)


def _key_block(
    step: Step, at: tuple[slice, slice], full: bool, q: Tensor, carried: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Add one key tile to ``acc`` in place, and return the new ``m`` and ``l``."""
    rows, keys = at
    m, l, acc = carried
    ordered = step.p.spec.everywhere
    s = product(q, step.key_tile(step.k, keys).mT, ordered)
    s = step.scores(s, rows, keys, full)
    m_new = torch.maximum(m, s.amax(-1, keepdim=True))
    shift = m_new if full and step.p.spec.score is None else torch.where(m_new == -torch.inf, 0, m_new)
    p = s.sub_(shift).exp_()
    rescale = torch.exp(m - shift)
    l = l * rescale + row_sums(p, ordered)
    z = step.dropped(rows, keys)
    p = p if z is None else p.mul_(z)
    add_product(acc.mul_(rescale), p, step.key_tile(step.v, keys), ordered)
    return m_new, l
