"""All of a rank's queries in one call, for masks whose tensors select the keys of each query, such as documents.

The rank's queries are concatenated, and so are the keys that they see. A query's keys stay neighbours, so the mask is one interval for
each query, with new numbers in :func:`tables`. Nothing is computed while keys are sent; in return, the host makes one call instead of
several, and no results are copied.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from tilewise import expr
from tilewise.masks import Mask, intervals
from tilewise.parallel.layout import Layout
from tilewise.parallel.route import Part, Route
from tilewise.spec import Spec


def suits(spec: Spec) -> bool:
    """Return whether a mask is one interval of keys per query, given by tensors and equal in all heads and batch elements.

    Nothing else of the call may depend on positions."""
    region, score = spec.whole_region, spec.whole_score
    ends = [end for end in region.ends if end is not None]
    if spec.dropout_p or region.predicate is not None or region.prepared or not expr.lookups(*ends):
        return False
    return not expr.depends_on(*ends) & {"b", "h"} and (score is None or not expr.depends_on(score) - {"s", "b", "h"})


def route_of(low: Tensor, high: Tensor, queries: Layout, keys: Layout) -> Route | None:
    """Return the route of joined queries, or None if ends of keys would decrease between queries, or a query sees none.

    Args:
        low, high: of :func:`tilewise.parallel.route.key_ends`.
    """
    rising = all(bool((x.diff() >= 0).all()) for x in (low, high)) and all(list(x) == sorted(x) for x in queries.pieces)
    if not rising or bool((low >= high).any()):
        return None
    parts = [
        tuple(Part(a, b, row, int(low[a]), int(high[b - 1])) for a, b, row in queries.rows(rank))
        for rank in range(queries.ranks)
    ]
    return Route(keys, tuple(parts), joined=True)


def mask_of(route: Route, rank: int, low: Tensor, high: Tensor, queries: Layout, device: torch.device) -> Mask:
    """Return the mask of a rank's queries over the keys that it assembles."""
    wanted = route.wanted[rank]
    starts = torch.tensor([start for start, _ in wanted], dtype=torch.int64)
    firsts = torch.tensor(list(accumulate((b - a for a, b in wanted), initial=0)), dtype=torch.int64)

    def place(key: Tensor) -> Tensor:
        at = torch.searchsorted(starts, key, right=True) - 1
        return key - starts[at] + firsts[at]

    positions = queries.positions(rank)
    lo, hi = place(low[positions]), place(high[positions] - 1) + 1
    columns = torch.arange(int(firsts[-1]))
    first, last = torch.searchsorted(hi, columns, right=True), torch.searchsorted(lo, columns, right=True)
    return intervals([x.int().to(device) for x in (lo, hi, first, last)], bool((first < last).all()))
