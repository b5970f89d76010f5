"""Which calls Hopper's kernels run in pieces (:mod:`tilewise.backends.piecewise`).

Those whose masks have more bits than may lie in memory at a time: a piece makes its bits, reads and frees them. And those that gather their
queries by the blocks of keys that these select (:mod:`tilewise.backends.blockwise`), and have no bits. Nothing here imports the DSL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewise.amounts import in_bytes
from tilewise.backends import blockwise
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.config import Formed, bytes_of_bits
from tilewise.backends.piecewise import Cut, cuts, described, divides
from tilewise.planning.bit_tiles import BUDGET
from tilewise.problem import Problem

LEAST_PAIRS = 16384**2  # of a head, from which a gathered call takes longer than its launches
VISITED = 1 / 2  # of the keys, that a tile visits under a causal mask


def in_pieces(p: Problem, config: Formed) -> bool:
    """Whether the kernels of this config compute a problem piece by piece."""
    return gathers(p, config) or _too_many_bits(p, config)


def _too_many_bits(p: Problem, config: Formed) -> bool:
    return _by_bits(config) and bytes_of_bits(p, *_read_by(config)) > BUDGET


def _by_bits(config: Formed) -> bool:
    return config.form == "bits" and not config.score


def _read_by(config: Formed) -> tuple[int, bool]:
    """How kernels read bits: the crossing lines of a tile, and whether by columns."""
    return (config.keys.tile_m, True) if isinstance(config, Backward) else (config.tiles.tile_n, False)


def gathers(p: Problem, config: Formed) -> bool:
    """Whether a problem gathers the queries of each block that they select, and reads no bits."""
    return _by_bits(config) and blockwise.sooner(p, LEAST_PAIRS, VISITED)


def cut(p: Problem, config: Formed) -> list[Cut]:
    """Return the pieces of a call."""
    if gathers(p, config):
        return blockwise.cut(p, isinstance(config, Backward))

    def fits(batch: int, heads: int, queries: int) -> bool:
        q = p.q._replace(shape=(batch, queries, heads * p.group, p.head_dim))
        return bytes_of_bits(replace(p, q=q), *_read_by(config)) <= BUDGET

    return cuts(p, (divides(p, "b"), divides(p, "h")), fits)


def told(p: Problem, configs: Sequence[Formed]) -> str:
    """Return how the kernels of these configs, a forward's first, cut a call, for ``explain``: the last one that does; else nothing."""
    config = next((config for config in reversed(configs) if in_pieces(p, config)), None)
    if config is None:
        return ""
    if gathers(p, config):
        return blockwise.told(p)
    size = in_bytes(bytes_of_bits(p, *_read_by(config)))
    return f"{described(cut(p, config))}, as a bit for each pair may take {size}, above {in_bytes(BUDGET)}"
