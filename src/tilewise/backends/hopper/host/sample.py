"""A few kernels that stand for all: what is compiled where there is no time for every kernel (``make kernels-hopper-sample``)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from tilewise.backends.hopper.kernels import AnyConfig


def values(record: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """``(field, value)`` of each field of a dataclass, and of each dataclass in it, whose fields are named by their path."""
    for field in fields(record):
        value = getattr(record, field.name)
        yield path + field.name, value
        if is_dataclass(value):
            yield from values(value, f"{path}{field.name}.")


def options(config: AnyConfig) -> Hashable:
    """The form of a kernel together with all its options: what it is but for its dtype and its tiles."""
    # An option is a word or a flag: of what is absent, as the tiles of a pass that a kernel lacks, other traits tell.
    found = [(name, x) for name, x in values(config) if name != "dtype" and "." not in name]
    return type(config).__name__, *((name, x) for name, x in found if x is not None and not is_dataclass(x))


def traits(config: AnyConfig) -> frozenset[Hashable]:
    """The traits that a kernel shows in a sample: each value of its fields, tiles as a whole and by their parts; and its options."""
    return frozenset({*((type(config).__name__, *each) for each in values(config)), options(config)})


def sample(configs: Sequence[AnyConfig]) -> list[AnyConfig]:
    """Configs that show every trait of all of them: again and again the one that shows most of what is still missing.

    The same configs in the same order give the same sample. It is a few kernels larger than the smallest one.
    """
    shown = [(config, traits(config)) for config in configs]
    missing, found = set().union(*(of_config for _, of_config in shown)), []
    while missing:
        config, of_config = max(shown, key=lambda one: len(missing & one[1]))
        missing -= of_config
        found.append(config)
    return found
