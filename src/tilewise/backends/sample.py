"""A few kernels that stand for all: what is compiled where there is no time for every kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

Item = TypeVar("Item")


def values(record: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """``(field, value)`` of each field of a dataclass, and of each dataclass in it, whose fields are named by their path."""
    for field in fields(record):
        value = getattr(record, field.name)
        yield path + field.name, value
        if is_dataclass(value):
            yield from values(value, f"{path}{field.name}.")


def sample(items: Sequence[Item], traits: Callable[[Item], Set[Hashable]]) -> list[Item]:
    """Items that show every trait of all of them: again and again the one that shows most of what is still missing.

    The same items in the same order give the same sample. It is a few items larger than the smallest one.
    """
    shown = [(item, traits(item)) for item in items]
    missing: set[Hashable] = set().union(*(of_item for _, of_item in shown))
    found = []
    while missing:
        item, of_item = max(shown, key=lambda one: len(missing & one[1]))
        missing -= of_item
        found.append(item)
    return found
