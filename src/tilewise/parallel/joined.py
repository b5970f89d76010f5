"""All of a rank's queries in one call, for masks whose tensors tell the keys of each: documents, say.

The rank's queries stand one after the other, and so do the keys that some of them sees. A query's keys are neighbours there too, so
the mask is one interval for each query, with other numbers, which :func:`tables` holds. Nothing is computed while keys travel; what
is gained is the host's time for several calls, and copies of their results.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from tilewise import expr
from tilewise.masks import Mask, intervals
from tilewise.parallel.layout import Layout
from tilewise.parallel.route import Part, Route
from tilewise.spec import Spec


def suits(spec: Spec) -> bool:
    """Whether a call's mask is one interval of keys a query that only tensors tell, alike in all heads and batch elements, and nothing
    else of the call depends on positions."""
    region, score = spec.whole_region, spec.whole_score
    ends = [end for end in region.ends if end is not None]
    if spec.dropout_p or region.predicate is not None or region.prepared or not expr.lookups(*ends):
        return False
    return not expr.depends_on(*ends) & {"b", "h"} and (score is None or not expr.depends_on(score) - {"s", "b", "h"})


def route_of(low: Tensor, high: Tensor, queries: Layout, keys: Layout) -> Route | None:
    """The route of joined queries; None where the ends of keys would decrease from one query to the next, or a query sees none.

    Args:
        low, high: as :func:`tilewise.parallel.route.key_ends` has them.
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
    """The mask of a rank's queries over the keys that it puts together."""
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


def spec_of(spec: Spec, mask: Mask, extras: int) -> Spec:
    """The call with another mask, whose tensors follow so many extras."""
    return replace(spec, mask_text=mask.text, mask_slots=tuple(range(extras, extras + len(mask.leaves))))
