"""How many CTAs each pass of a backward gets, and how many heads are at work at a time. No DSL: it runs on any machine.

A section of heads, as :class:`tilewise.backends.hopper.kit.schedule.Order` has it, is dealt out before the next one begins: few heads at a
time keep the operands and the sums of dQ in L2, many heads keep the CTAs evenly at work.
"""

from __future__ import annotations

from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.tiles import FP32_BYTES
from tilewise.backends.hopper.config import ELEMENT_BYTES, SHARING
from tilewise.problem import Problem

OPEN_BYTES = 48 << 20  # of the heads of a section, where tiles come from a queue
IDLE_SHARE = 0.02  # of a pass that the end of its last section may take


def grids(config: Backward, problem: Problem, heads: int, seqlen_k: int, cores: int) -> tuple[int, int, int, int]:
    """``(section, ctas)`` of the pass over ``seqlen_k`` keys, then of the pass over queries, of a launch that has so many key ``heads`` of
    all batch elements."""
    parts = config.queries.parts if config.queries else 1  # of dQ's columns
    if config.packed:
        # At most so many tiles: only the device knows the lengths. Keys that are seen and those on either side are tiles apart.
        keys = heads * (seqlen_k // config.keys.tile_n + 3 * (problem.batch + 1))
        rows = heads * (problem.heads_q // problem.heads_k) * (problem.seqlen_q // config.tile_m + problem.batch + 1)
        ctas = config.keys.ctas
        return 1, ctas * min(keys, cores // ctas), 1, min(parts * rows, cores)
    tiles, sharing = -(-seqlen_k // config.keys.tile_n), cores if config.form == "full" else SHARING
    at_once = ordered_at_once(config, tiles) if config.keys.ordered else sharing
    keys = spread(heads, tiles, at_once, cores, config.keys.ctas)
    if config.keys.queued:
        keys = open_heads(config, problem, heads, tiles, cores), keys[1]
    ctas = config.queries.ctas if config.queries else 1
    rows = parts * -(-problem.seqlen_q // config.tile_m)
    return *keys, *spread(heads * (problem.heads_q // problem.heads_k), rows, sharing, cores, ctas)


def spread(heads: int, tiles: int, sharing: int, cores: int, ctas: int = 1) -> tuple[int, int]:
    """``(section, ctas)`` for ``tiles`` of each of ``heads``: heads of a section, and CTAs of the launch. ``sharing`` tiles of a head are
    at work at once, if there are heads enough; ``ctas`` share a tile."""
    section = min(heads, max(1, cores // ctas // sharing))
    return section, ctas * min(heads * tiles, cores // ctas)


def open_heads(config: Backward, problem: Problem, heads: int, tiles: int, cores: int) -> int:
    """The key heads of a section, of so many whose ``tiles`` come from a queue: as many as L2 holds the operands and the sums of dQ of,
    with room to spare, and no fewer than give every CTA a tile; more where the last section would keep the others waiting
    (docs/decisions.md#hopper-open-heads)."""
    group, row = problem.heads_q // problem.heads_k, ELEMENT_BYTES * (config.keys.width + config.keys.width_v)
    head = group * problem.seqlen_q * (row + FP32_BYTES * config.keys.width) + problem.seqlen_k * row
    least = max(OPEN_BYTES // head, -(-cores // tiles))
    return next((n for n in range(least, heads) if idle_share(n, heads, tiles / cores) <= IDLE_SHARE), heads)


def idle_share(section: int, heads: int, rounds: float) -> float:
    """The share of a pass for which CTAs wait for the longest tile of the last section.

    Causal key tiles are up to twice as long as their mean, and a section's longest ones come first: it lasts that long even where it
    has fewer tiles. ``rounds``: how many tiles of each head a CTA takes on average.
    """
    last = heads % section or section
    return max(0.0, 2 - last * rounds) / (heads * rounds)


def ordered_at_once(config: Backward, tiles: int) -> int:
    """How many of a head's ``tiles`` run at once where they add to dQ in order. The last one waits for all others, but L2 holds more of
    fewer heads (docs/decisions.md#hopper-ordered-dq)."""
    return 2 * SHARING if config.form == "full" and tiles >= 4 * SHARING else SHARING
