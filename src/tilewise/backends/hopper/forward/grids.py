"""How the tiles of a forward are spread over CTAs, and how many heads are at work at a time. No DSL: it runs on any machine."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise import sizes
from tilewise.backends.hopper.config import SHARING
from tilewise.backends.hopper.forward.config import Config, num_splits
from tilewise.problem import Problem

OPEN_KEYS = 16 << 20  # bytes of keys and values of the heads of a section, where tiles come from a queue


@dataclass(frozen=True)
class Grid:
    """How the tiles of a launch are spread over CTAs.

    Attributes:
        tiles, ctas: how many tiles there are, and how many CTAs that stay and take them one after the other.
        section: heads that are at work at a time, as in :class:`tilewise.backends.hopper.kit.schedule.Order`.
        splits: of the keys of a tile.
    """

    tiles: int
    ctas: int
    section: int
    splits: int = 1


def spread(problem: Problem, config: Config, seqlen_k: int, cores: int) -> Grid:
    """The grid of a launch: one head after the other where tiles are equally long, or a head has no more than SHARING of them.

    Where that is not so, as many heads at once as fill a round with SHARING tiles of each: rows of tiles are then nearly equal in
    a round, and the to-and-fro of rounds evens out the rest (docs/decisions.md#hopper-sharing). A split of a head counts as a head here.
    """
    parts = num_splits(config, problem, seqlen_k) if config.split else 1
    pieces = config.tiles.pieces
    heads = problem.batch * problem.heads_q * parts * pieces
    rows = -(-problem.seqlen_q // config.tile_queries)
    tiles = heads * rows
    if problem.packed:  # at most, as only the device knows the lengths
        tiles = problem.heads_q * pieces * (problem.seqlen_q // config.tile_queries + problem.batch + 1)
    section = 1 if config.form == "full" or rows <= SHARING else sizes.smaller(heads, max(1, cores // SHARING))
    if config.form == "bits":
        section = sizes.smaller(heads, open_heads(problem, config, cores))
    return Grid(tiles, sizes.smaller(tiles, cores), section, parts)


def open_heads(problem: Problem, config: Config, cores: int) -> int:
    """The heads of a section whose tiles come from a queue, longest first: those whose keys and values a part of L2 holds, and no fewer
    than give every CTA a tile (docs/decisions.md#hopper-open-keys)."""
    row = config.tiles.element_bytes * (config.tiles.width + config.tiles.width_v)
    keys = problem.seqlen_k * row // problem.group
    filling = -(-cores // -(-problem.seqlen_q // config.tile_queries))
    return sizes.larger(sizes.larger(OPEN_KEYS // sizes.larger(keys, 1), filling), 1)
