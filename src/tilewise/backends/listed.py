"""Calls in which each query has a list of keys (:func:`tilewise.masks.catalogue.selected`), for kernels that read just these: for the query
heads of a key head together, which are the rows of a tile."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise import expr
from tilewise.backends.base import Inputs
from tilewise.problem import Problem
from tilewise.selections import keys_of_entry


def mask_reasons(p: Problem) -> list[str]:
    """Return the reasons against the mask of a call with selected keys."""
    region, what = p.spec.region, "selected keys beside"
    ends = [e for e in (region.lo, region.hi) if e is not None]
    # The keys of a list are one query's: what a mask hides of them has to be an interval, the same for all heads.
    found = [] if region.predicate.op == "selected" else [f"{what} another mask that is no interval of keys"]
    if not found and keys_of_entry(region.predicate)[1]:
        found = ["selected keys in a part of a longer sequence, whose keys do not begin with an entry"]
    return found + ([f"{what} a mask of each head"] if "h" in expr.depends_on(*ends) else [])


def asked(p: Problem) -> bool:
    """Return whether a call has a list of keys for each query, and nothing for which a kernel would have to know a key's place in the
    sequence."""
    spec = p.spec
    others = spec.score is not None or spec.dropout_p or spec.mapped or spec.max_logit or spec.everywhere or p.quantised
    return not others and bool(spec.region.selections) and not mask_reasons(p)


def rows_of(p: Problem) -> int:
    """Return the rows of q."""
    return p.seqlen_q * (1 if p.packed else p.batch)


def places_of(p: Problem) -> tuple[int, int]:
    """Return how many keys a list may name, and how many an entry of it does."""
    selection = p.spec.region.predicate
    block = keys_of_entry(selection)[0]
    return p.extras[selection.args[0][1]].shape[-1] * block, block


def entries_of(p: Problem, t: Inputs) -> Tensor:
    """Return all lists: int32 ``(list, entry)``."""
    return t.leaves[p.spec.region.predicate.args[0][1]].flatten(0, 2)


def lines(p: Problem, t: Inputs) -> Tensor:
    """Return a line for each row of q and key head, int32 ``(rows, heads_k, 4)``.

    A line is the row of k of its sequence's key 0, in pages the place of its first page in the table, the number of its list, and
    ``(lo, hi)``, the keys among which the query sees those of its list. ``hi`` is -1 past the last sequence.
    """
    spec = p.spec
    selection, row = spec.region.predicate, torch.arange(rows_of(p), device=t.q.device).unsqueeze(1)
    b, i, queries, real = (
        row // p.seqlen_q,
        row % p.seqlen_q,
        torch.full_like(row, p.seqlen_q),
        torch.ones_like(row) > 0,
    )
    if p.packed:
        cu_q = t.cu_seqlens_q.long()
        b = torch.searchsorted(cu_q[1:].contiguous(), row, right=True)
        # Those past the last sequence are of one more, without keys.
        i, queries, real = row - cu_q[b], pad(cu_q.diff(), (0, 1))[b], b < p.batch
    if p.paged:
        keys, origin = pad(t.seqlens_k.long().clamp(0, p.capacity), (0, 1))[b], b * t.block_table.shape[1]
    elif p.packed:
        cu_k = t.cu_seqlens_k.long()
        keys, origin = pad(cu_k.diff(), (0, 1))[b], cu_k[b]
    else:
        keys, origin = torch.full_like(row, p.seqlen_k), b * p.seqlen_k
    heads = torch.arange(0, p.heads_q, p.group, device=row.device)
    env = {"b": b, "h": heads, "i": i, "off": keys - queries, "seqlen_q": queries, "seqlen_k": keys}
    lo, hi = spec.region.lo, spec.region.hi
    wanted = [*expr.indices(selection), *(e for e in (lo, hi) if e is not None)]
    zero = torch.zeros(len(row), len(heads), dtype=torch.int64, device=row.device)
    found = [zero + x for x in expr.evaluate(wanted, env, t.leaves, spec.region.compared_in(t.leaves))]
    *at, lo, hi = [*found[:3], zero if lo is None else found[3], keys if hi is None else found[-1]]
    place = zero
    for index, size in zip(at, t.leaves[selection.args[0][1]].shape, strict=False):
        place = place * size + index.clamp(0, size - 1)
    hi = torch.where(real, torch.minimum(hi, keys).clamp(min=0), -1)
    return torch.stack([x.expand_as(zero) for x in (origin, place, lo.clamp(min=0).minimum(keys), hi)], dim=2).int()
