"""Masks: which pairs are kept (:mod:`tilewise.masks.catalogue`), what that means as intervals and a predicate
(:mod:`tilewise.masks.regions`), and what kernels ask about it (:mod:`tilewise.masks.facts`). ``patterns`` makes patterns of
blocks, ``derived`` the tensors that a mask makes of a caller's.

The names below are those that the rest of tilewise uses beside the facts.
"""

from tilewise.masks.catalogue import Mask, MaskFunction, as_mask, broadcast_lookup, intervals, with_lists
from tilewise.masks.regions import Region, readers, region

__all__ = [
    "Mask",
    "MaskFunction",
    "Region",
    "as_mask",
    "broadcast_lookup",
    "intervals",
    "readers",
    "region",
    "with_lists",
]
