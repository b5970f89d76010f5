"""The meaning of a score's text: one expression of ``s``."""

from __future__ import annotations

from functools import lru_cache

from tilewise import expr
from tilewise.expr import Expr, parse, symbol
from tilewise.scores.catalogue import THEN, Score


def symbols_of(score: Score) -> frozenset[str]:
    """Return the names of what a score reads beside its tensors: ``s``, positions, lengths."""
    found = expression(score.text, tuple(range(len(score.leaves))))
    return frozenset() if found is None else expr.depends_on(found)


@lru_cache(maxsize=4096)
def expression(text: str, slots: tuple[int, ...]) -> Expr | None:
    """Return the meaning of a score's text as one expression of ``s``; ``None`` where it changes nothing.

    Args:
        slots: for each of the score's leaves, in order, the slot of the tensor that holds it.
    """
    if not text:
        return None
    total, base = symbol("s"), 0
    for stage in text.split(THEN):
        used: set[int] = set()

        def slot(n: int, base: int = base, used: set[int] = used) -> int:
            used.add(n)
            return slots[base + n]

        total = expr.substitute(parse(stage, slot), {"s": total})
        base += len(used)
    return total
