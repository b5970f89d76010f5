"""Batches of which each element sees the keys between two ends of its own, as the packed sequences that they equal.

Kernels of packed sequences learn lengths from the device, mask no pair within them, and take tiles from a queue. So a batch element
becomes two or three sequences that lie one after the other: the keys before its first one, to which no query belongs; all its queries
with the keys that they see; and the keys behind these. No row of q, k or v moves
(docs/decisions.md#hopper-list-tiles). Nothing here imports the DSL: it runs on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tilewise import expr
from tilewise.backends.base import Inputs
from tilewise.backends.hopper.config import LONG, band_of, is_traced
from tilewise.planning.tiles import Grid
from tilewise.problem import Problem, TensorFacts
from tilewise.spec import parse_spec


def is_padded(p: Problem) -> bool:
    """Whether all queries of a batch element see the keys between two ends that only the device knows, and nothing forbids to pack it:
    dropout counts pairs by batch element, packed sequences take no traced score, and rows that do not follow one another in memory would
    have to be copied."""
    region, rows = p.spec.region, max(p.q.shape[0] * p.q.shape[-3], p.k.shape[0] * p.k.shape[-3])
    if p.packed or p.paged or region.predicate is not None or band_of(p) is not None:
        return False
    ends = expr.depends_on(*(end for end in region.ends[:2] if end is not None))
    plain = not (p.spec.dropout_p or is_traced(p) or p.spec.piece)
    apart = any(x.shape[0] > 1 and x.stride[0] != x.shape[-3] * x.stride[-3] for x in (p.q, p.k, p.v))
    return plain and not ends & {"i", "h"} and not apart and 0 < rows < LONG and min(p.seqlen_q, p.seqlen_k) > 0


def as_packed(p: Problem) -> Problem:
    """The packed problem that a padded one equals; any other one as it is. The starts of sequences are its last extras."""
    if not is_padded(p):
        return p
    count, extras = p.q.shape[0] * parts(p) + 1, len(p.extras)
    starts = TensorFacts((count,), (1,), torch.int32)
    spec = replace(p.spec, mask_text="", mask_slots=(), cu_slots=(extras, extras + 1))
    facts = (_rows(p.q), _rows(p.k), _rows(p.v), (*p.extras, starts, starts))
    return replace(p, **dict(zip(("q", "k", "v", "extras"), facts, strict=True)), spec=parse_spec(spec.text()))


def parts(p: Problem) -> int:
    """How many sequences a batch element becomes."""
    return 2 + (p.spec.region.lo is not None)


def _rows(x: TensorFacts) -> TensorFacts:
    """The facts of a tensor whose batch elements lie one after the other."""
    batch, seqlen, *rest = x.shape
    # With one row each, the rows are the batch elements.
    return TensorFacts((batch * seqlen, *rest), (x.stride[0] if seqlen == 1 else x.stride[1], *x.stride[2:]), x.dtype)


def starts(p: Problem, extras: Sequence[Tensor], parts: int) -> Tensor:
    """The first row and the first key of each sequence, and one past the last: int32 (2, batch · parts + 1)."""
    batch, device = p.batch, p.device
    grid = Grid.whole(p.spec.region, extras, (batch, 1, p.seqlen_q, p.seqlen_k), device)
    lo, hi = (
        end.flatten().expand(batch) for end in grid.key_interval(torch.zeros(1, dtype=torch.int64, device=device))
    )
    element = torch.arange(batch * parts + 2, device=device, dtype=torch.int32) // parts
    cu_q, cu_k = element[1:] * p.seqlen_q, element[:-1] * p.seqlen_k
    for n, end in enumerate([hi] if parts == 2 else [lo, torch.maximum(lo, hi)], 1):
        cu_k[n::parts] += end
    return torch.stack([cu_q, cu_k])


def packed_inputs(t: Inputs, cu: Sequence[Tensor]) -> Inputs:
    """The tensors of :func:`as_packed`'s problem; ``cu`` are :func:`starts`."""
    q, k, v = (x.flatten(0, 1) for x in (t.q, t.k, t.v))
    return replace(t, q=q, k=k, v=v, leaves=(*t.leaves, *cu), cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])


def by_heads(p: Problem, statistic: Tensor) -> Tensor:
    """A statistic of rows, as lse, (batch, heads_q, seqlen_q), as packed queries have it: (heads_q, batch · seqlen_q)."""
    return statistic.transpose(0, 1).contiguous().view(p.heads_q, -1)


def by_batch(p: Problem, statistic: Tensor) -> Tensor:
    """The inverse of :func:`by_heads`."""
    return statistic.view(p.heads_q, p.batch, p.seqlen_q).transpose(0, 1).contiguous()
