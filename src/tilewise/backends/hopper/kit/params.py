"""The launch arguments that only some kernels have; both passes read them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.backends.hopper.parameters import (
    COUNTS,
    DIVISION,
    DROPOUT,
    LENGTHS,
    LISTS,
    MASK_FIELDS,
    ORDERED,
    PAGES,
    POOL,
    PORTION,
    QUEUE,
    SCORES,
    SEEN,
    STARTS,
    Parameter,
    names_of,
)

_OF_SCORES = [row for score in SCORES.values() for row in (*score.reads, *filter(None, (score.gradient,)))]
_OF_SEQUENCES = (*STARTS, *SEEN, QUEUE, COUNTS, LENGTHS, PAGES, *LISTS, *POOL)
_ROWS = (*_OF_SEQUENCES, *DROPOUT, *_OF_SCORES, *PORTION, *DIVISION, *ORDERED)
# `direct_o`: o, (batch, row, head, column), where it leaves from registers and no warp stores it. `rows_k`, `rows_v`: k and v, (1, row, 1,
# column), whose rows are gathered. `part_o`, `part_lse`: the states of split keys, which the kernel writes instead of o and lse. `leaves`,
# `numbers`: tuples of what expressions read; of a softcap, the numbers of tilewise.backends.hopper.capped.numbers.
_OF_MASKS = (name for names in MASK_FIELDS.values() for name in names)
_NAMES = ("direct_o", "rows_k", "rows_v", "part_o", "part_lse", *_OF_MASKS, *names_of(_ROWS), "leaves", "numbers")
FIELDS = tuple(dict.fromkeys(name.removeprefix("keys_") for name in _NAMES))

OptionalParams = namedtuple("OptionalParams", FIELDS, defaults=[None] * len(FIELDS))
"""The tensors and numbers that only some kernels have, None elsewhere: those of :mod:`tilewise.backends.hopper.parameters`, by name."""


def optional_params(given: Mapping[str, Any], prefix: str = "") -> OptionalParams:
    """The optional ones of a launch's values; ``prefix``: of the names of those that one pass alone has."""
    found = {name: given.get(prefix + name, given.get(name)) for name in FIELDS}
    for field, word in (("leaves", "leaf"), ("numbers", "number")):
        found[field] = tuple(x for name, x in given.items() if name.rstrip("0123456789") == word) or None
    return OptionalParams(**found)


def by_name(rows: Sequence[Parameter], values: Sequence[Any]) -> dict[str, Any]:
    """A launch's values by the names of its parameters."""
    return dict(zip(names_of(rows), values, strict=True))
