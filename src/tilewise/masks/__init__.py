"""Masks say which pairs are kept.

``catalogue`` has the masks, ``regions`` their meaning as intervals and a predicate, and ``facts`` what kernels ask about them.
``patterns`` makes patterns of blocks, ``derived`` tensors from a caller's. The rest of tilewise uses the names below, and the facts.
"""

from tilewise.masks.catalogue import Mask, MaskFunction, as_mask, broadcast_lookup, intervals, with_lists
from tilewise.masks.regions import NAMED, Region, grouped, readers, region

__all__ = [
    "NAMED",
    "Mask",
    "MaskFunction",
    "Region",
    "as_mask",
    "broadcast_lookup",
    "grouped",
    "intervals",
    "readers",
    "region",
    "with_lists",
]
