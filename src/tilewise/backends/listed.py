"""Calls in which each query has a list of keys (:func:`tilewise.masks.catalogue.selected`), for kernels that read just these: for the query
heads of a key head together, which are the rows of a tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise import expr
from tilewise.backends.base import Inputs
from tilewise.planning import planner
from tilewise.planning.planner import Kind, Making, Sequences
from tilewise.problem import Problem, TensorFacts
from tilewise.selections import keys_of_entry

MULTIPLE = 8  # elements of 16 bits, of which rows begin at multiples: 16 bytes


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


def rows_of_keys(p: Problem) -> int:
    """Return the rows of k."""
    return p.k.shape[0] if len(p.k.shape) == 3 else p.k.shape[0] * p.k.shape[1]


def pool_is_rows(p: Problem) -> bool:
    """Return whether keys lie in no pages, or these one behind the other and rows where kernels take them: a pool is not copied."""

    def served(x: TensorFacts) -> bool:
        return (
            x.stride[0] == p.page_size * x.stride[1]
            and x.stride[3] == 1
            and not any(n % MULTIPLE for n in x.stride[1:3])
        )

    return not p.paged or (served(p.k) and served(p.v))


def slot_of(p: Problem) -> int:
    """Return the slot of the entries."""
    return p.spec.region.predicate.args[0][1]


def places_of(p: Problem) -> tuple[int, int]:
    """Return how many keys a list may name, and how many an entry of it does."""
    block = keys_of_entry(p.spec.region.predicate)[0]
    return p.extras[slot_of(p)].shape[-1] * block, block


def entries_of(p: Problem, t: Inputs) -> Tensor:
    """Return all lists: int32 ``(list, entry)``."""
    return t.leaves[slot_of(p)].flatten(0, 2).contiguous()


def read_slots(p: Problem) -> tuple[int, ...]:
    """Return the slots of the tensors of which lines are made: those of the mask, and those that say where sequences begin and end."""
    return (*p.spec.mask_slots, *p.spec.cu_slots, *p.spec.page_slots[1:])


def lines(p: Problem) -> Making:
    """Return what makes a line for each row of q and key head of a call's extras, int32 ``(rows, heads_k, 4)``.

    A line is the row of k of its sequence's key 0, in pages the number of its sequence, the number of its list, and ``(lo, hi)``, the keys
    among which the query sees those of its list. ``hi`` is -1 past the last sequence.
    """
    cu, pages = p.spec.cu_slots, p.spec.page_slots
    slots = dict(zip(("cu_q", "cu_k"), cu, strict=False)) | ({"lengths": pages[1]} if pages else {})
    kind, short = Kind.of_problem(p), [p.extras[n] for n in slots.values()]
    kernels = planner.of_kind(kind)
    if kernels is None or any(x.stride != (1,) for x in short):
        return lambda extras, device: _lines(p, extras)
    return kernels.list_lines(kind, Sequences(rows_of(p), p.group, **slots))


def _lines(p: Problem, extras: Sequence[Tensor]) -> Tensor:
    """The lines by PyTorch's operations."""
    spec, device = p.spec, p.device
    selection, row = spec.region.predicate, torch.arange(rows_of(p), device=device).unsqueeze(1)
    b, i = row // p.seqlen_q, row % p.seqlen_q
    queries, real = torch.full_like(row, p.seqlen_q), torch.ones_like(row, dtype=torch.bool)
    if p.packed:
        cu_q = extras[spec.cu_slots[0]].long()
        b = torch.searchsorted(cu_q[1:].contiguous(), row, right=True)
        # Those past the last sequence are of one more, without keys.
        i, queries, real = row - cu_q[b], pad(cu_q.diff(), (0, 1))[b], b < p.batch
    if p.paged:
        keys, origin = pad(extras[spec.page_slots[1]].long().clamp(0, p.capacity), (0, 1))[b], b.clamp(max=p.batch - 1)
    elif p.packed:
        cu_k = extras[spec.cu_slots[1]].long()
        keys, origin = pad(cu_k.diff(), (0, 1))[b], cu_k[b]
    else:
        keys, origin = torch.full_like(row, p.seqlen_k), b * p.seqlen_k
    heads = torch.arange(0, p.heads_q, p.group, device=device)
    env = {"b": b, "h": heads, "i": i, "off": keys - queries, "seqlen_q": queries, "seqlen_k": keys}
    lo, hi = spec.region.lo, spec.region.hi
    wanted = [*expr.indices(selection), *(e for e in (lo, hi) if e is not None)]
    zero = torch.zeros(len(row), len(heads), dtype=torch.int64, device=device)
    found = [zero + x for x in expr.evaluate(wanted, env, extras, spec.region.compared_in(extras))]
    *at, lo, hi = [*found[:3], zero if lo is None else found[3], keys if hi is None else found[-1]]
    place = zero
    for index, size in zip(at, p.extras[slot_of(p)].shape, strict=False):
        place = place * size + index.clamp(0, size - 1)
    hi = torch.where(real, torch.minimum(hi, keys).clamp(min=0), -1)
    return torch.stack([x.expand_as(zero) for x in (origin, place, lo.clamp(min=0).minimum(keys), hi)], dim=2).int()
