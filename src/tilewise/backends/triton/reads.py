"""What a problem's mask and score read of their tensors, as far as the choice of tiles depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise import expr
from tilewise.distances import by_distance, near
from tilewise.masks.facts import blocks_of, constant_on_blocks
from tilewise.problem import Problem


@dataclass(frozen=True)
class PairReads:
    """The tensors of which a predicate or a score reads a number of its own for every pair (i, j).

    A pattern of blocks is none of them: it gives all pairs of a block the same number. Nor is what is read by distance: the pairs of a tile
    share a few numbers, which their threads read from the cache.

    Attributes:
        bytes: what one pair reads of all these tensors.
        shared: of "b" and "h", those at which none of these tensors is read.
    """

    bytes: int = 0
    shared: frozenset[str] = frozenset()

    @classmethod
    def of(cls, problem: Problem) -> PairReads:
        """The reads of a problem's mask and score."""
        roots = [x for x in (problem.spec.region.predicate, problem.spec.score) if x is not None]
        at_pairs = [x for x in expr.lookups(*roots) if {"i", "j"} <= expr.depends_on(*x.args[1:])]
        # One number for a block of pairs is read once a tile and costs next to nothing.
        reads = [x for x in at_pairs if not constant_on_blocks(x) and not by_distance(*x.args[1:])]
        if not reads:
            return cls()
        used = expr.depends_on(*[index for x in reads for index in x.args[1:]])
        return cls(sum(problem.extras[x.args[0][1]].dtype.itemsize for x in reads), frozenset("bh") - used)


def predicate_blocks(problem: Problem) -> tuple[int, int]:
    """The rows and keys of the blocks on which the mask's predicate is constant, to choose tiles that lie inside them.

    Either is 0 where the predicate does not depend on that index, and both are where sequences are packed.
    """
    predicate = problem.spec.region.predicate
    if predicate is None or problem.packed:
        return 0, 0
    return blocks_of(predicate)


def near_of_all(problem: Problem) -> tuple[int, int] | None:
    """The distances i - j in ``[start, stop)`` beyond which each of the score's reads by distance reads one element of its tensor;
    None where there are no such reads, or no distances beyond."""
    reads = [] if problem.spec.score is None else expr.lookups(problem.spec.score)
    found = [near(problem, x) for x in reads if by_distance(*x.args[1:])]
    if not found or any(x.everywhere for x in found):
        return None
    return min(x.start for x in found), max(x.stop for x in found)
