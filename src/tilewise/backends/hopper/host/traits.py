"""The traits that kernels show in a sample (``make kernels-hopper-sample``)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import is_dataclass

from tilewise.backends.hopper.kernels import AnyConfig
from tilewise.backends.sample import values


def options(config: AnyConfig) -> Hashable:
    """The form of a kernel together with all its options: what it is but for its dtype and its tiles."""
    # An option is a word or a flag: of what is absent, as the tiles of a pass that a kernel lacks, other traits tell.
    found = [(name, x) for name, x in values(config) if name != "dtype" and "." not in name]
    return type(config).__name__, *((name, x) for name, x in found if x is not None and not is_dataclass(x))


def sources(config: AnyConfig) -> frozenset[Hashable]:
    """The one trait that kernels of the same sources share, how their names begin: one shows whether the compiler is still the same."""
    return frozenset({config.name.partition(f"_{config.dtype}_")[0]})


def traits(config: AnyConfig) -> frozenset[Hashable]:
    """The traits that a kernel shows in a sample: each value of its fields, tiles as a whole and by their parts; and its options."""
    return frozenset({*((type(config).__name__, *each) for each in values(config)), options(config)})
