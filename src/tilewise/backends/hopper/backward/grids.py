"""How many CTAs each pass of a backward gets, how many heads are at work at a time, and how CTAs share key tiles. No DSL: it runs on any
machine.

A section of heads, as :class:`tilewise.backends.hopper.kit.schedule.Order` has it, is dealt out before the next one begins: few heads at a
time keep the operands and the sums of dQ in L2, many heads keep the CTAs evenly at work.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

from tilewise import sizes
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.tiles import FP32_BYTES, KEY_GROUPS, PAST_EVERY_TILE, left_elements
from tilewise.backends.hopper.config import ELEMENT_BYTES, SHARING, keys_of
from tilewise.backends.hopper.kit import schedule
from tilewise.problem import Problem

OPEN_BYTES = 48 << 20  # of the heads of a section, where tiles come from a queue
IDLE_SHARE = 0.02  # of a pass that the end of its last section may take
EVEN_AT_ONCE = 8  # tiles of a head, equally long, that add to its dQ in order

# Shared tiles (docs/decisions.md#hopper-tile-parts): in query blocks of a tile, what a CTA needs to begin and to end one, what it needs
# more for a part of one, and what adding up each part takes; into 2**MOST_BITS parts blocks are divided at most; bytes of all parts.
BEGIN_COST, PART_COST, GATHER_COST, MOST_BITS, PARTS_ROOM = 8.0, 3.0, 0.25, 5, 64 << 20
MANY_ROUNDS = 4  # of unequal tiles: longest first, they end at about the same time
JUDGED = 9  # tiles whose blocks are counted
EITHER = schedule.Pick(sizes.smaller, sizes.larger)


class TileParts(NamedTuple):
    """How CTAs share key tiles: the first ``whole`` ones not at all. Later ones have a part for each of ``by_heads`` parts of the group's
    query heads, which divide it, and for each of 2**block_bits parts of their blocks."""

    whole: int = PAST_EVERY_TILE
    by_heads: int = 1
    block_bits: int = 0

    @property
    def each(self) -> int:
        """How many parts a shared tile has."""
        return self.by_heads << self.block_bits

    def shared(self, tiles: int) -> int:
        """How many of so many tiles are shared."""
        return sizes.larger(0, tiles - self.whole)

    def units(self, tiles: int) -> int:
        """How many parts and whole tiles so many tiles are."""
        return tiles + self.shared(tiles) * (self.each - 1)

    def room(self, config: Backward, problem: Problem, heads: int, keys: slice) -> tuple[int, int]:
        """How many tiles of a launch are shared at most, and how many parts these have."""
        shared = self.shared(most_tiles(config, problem, heads, keys.stop - keys.start))
        return shared, shared * self.each


WHOLE = TileParts()  # no tile is shared


def most_tiles(config: Backward, problem: Problem, heads: int, seqlen_k: int) -> int:
    """How many tiles a pass over so many keys has at most: of packed sequences only the device knows the lengths."""
    if not config.packed:
        return heads * -(-seqlen_k // config.keys.tile_n)
    # Keys that are seen and those on either side are tiles apart.
    return heads * (seqlen_k // config.keys.tile_n + 3 * (problem.batch + 1))


def grids(
    config: Backward, problem: Problem, heads: int, seqlen_k: int, cores: int, shares: TileParts = WHOLE
) -> tuple[int, int, int, int]:
    """``(section, ctas)`` of the pass over ``seqlen_k`` keys, then of the pass over queries, of a launch that has so many key ``heads`` of
    all batch elements and shares key tiles as it is told."""
    parts = config.queries.parts if config.queries else 1  # of dQ's columns
    units = shares.units(most_tiles(config, problem, heads, seqlen_k))
    if config.packed:
        keys = units
        rows = heads * (problem.heads_q // problem.heads_k) * (problem.seqlen_q // config.tile_m + problem.batch + 1)
        ctas = config.keys.ctas
        return 1, ctas * sizes.smaller(keys, cores // ctas), 1, sizes.smaller(parts * rows, cores)
    tiles, sharing = -(-seqlen_k // config.keys.tile_n), cores if config.form == "full" else SHARING
    keys = spread(heads, tiles, sharing, cores, config.keys.ctas)
    keys = keys[0], config.keys.ctas * sizes.smaller(units, cores // config.keys.ctas)
    if config.keys.queued:
        keys = open_heads(config, problem, heads, tiles, cores), keys[1]
    ctas = config.queries.ctas if config.queries else 1
    rows = parts * -(-problem.seqlen_q // config.tile_m)
    return *keys, *spread(heads * (problem.heads_q // problem.heads_k), rows, sharing, cores, ctas)


def spread(heads: int, tiles: int, sharing: int, cores: int, ctas: int = 1) -> tuple[int, int]:
    """``(section, ctas)`` for ``tiles`` of each of ``heads``: heads of a section, and CTAs of the launch. ``sharing`` tiles of a head are
    at work at once, if there are heads enough; ``ctas`` share a tile."""
    section = sizes.smaller(heads, max(1, cores // ctas // sharing))
    return section, ctas * sizes.smaller(heads * tiles, cores // ctas)


def open_heads(config: Backward, problem: Problem, heads: int, tiles: int, cores: int) -> int:
    """The key heads of a section, of so many whose ``tiles`` come from a queue: as many as L2 holds the operands and the sums of dQ of,
    with room to spare, and no fewer than give every CTA a tile; more where the last section would keep the others waiting
    (docs/decisions.md#hopper-open-heads). Where dQ is added up in order, no more than L2 holds: the next section begins under the end of
    one, and tiles that wait for memory keep others waiting."""
    group, row = problem.heads_q // problem.heads_k, ELEMENT_BYTES * (config.keys.width + config.keys.width_v)
    held = OPEN_BYTES // (group * problem.seqlen_q * (row + FP32_BYTES * config.keys.width) + problem.seqlen_k * row)
    if config.orders and problem.spec.deterministic:
        # Where no mask has tiles begin at different rows, those of a head that begin at once wait for each other.
        least = cores // EVEN_AT_ONCE if keys_of(problem)[0] == "full" else 1
        return sizes.smaller(sizes.larger(held, least), heads)
    least = max(held, -(-cores // tiles))
    if least >= heads:
        return heads
    return next((n for n in range(least, heads) if idle_share(n, heads, tiles / cores) <= IDLE_SHARE), heads)


def open_rows(config: Backward, group):
    """Of how many rows of key heads, each with its ``group`` of query heads and as many keys, L2 holds operands and sums of dQ."""
    row = ELEMENT_BYTES * (config.keys.width + config.keys.width_v)
    return OPEN_BYTES // (group * (row + FP32_BYTES * config.keys.width) + row)


def idle_share(section: int, heads: int, rounds: float) -> float:
    """The share of a pass for which CTAs wait for the longest tile of the last section.

    Causal key tiles are up to twice as long as their mean, and a section's longest ones come first: it lasts that long even where it
    has fewer tiles. ``rounds``: how many tiles of each head a CTA takes on average.
    """
    last = heads % section or section
    return max(0.0, 2 - last * rounds) / (heads * rounds)


# -- Shared tiles --------------------------------------------------------------------------------------------------


def tile_parts(
    config: Backward, problem: Problem, heads: int, seqlen_k: int, ends: tuple[int, int], cores: int
) -> TileParts:
    """How CTAs share the tiles of a launch with so many key ``heads`` of all batch elements, and so many keys from which the band's
    ``ends`` count: the division that a model finds fastest. With ``deterministic=True`` one sequence alone decides, so that a result does
    not depend on its batch-mates. No tile of packed sequences is shared then, nor where dQ is added up in order: all sequences' tiles
    would have parts in memory, however many they are."""
    alone = problem.spec.deterministic
    if not config.parted or (alone and (config.packed or config.orders)):
        return WHOLE
    heads = min(heads, problem.heads_k) if alone else heads
    if config.form != "full" and heads * (seqlen_k // config.keys.tile_n) >= MANY_ROUNDS * cores:
        return WHOLE
    times = TileTimes.of(config, problem, heads, seqlen_k, ends, cores)
    room = PARTS_ROOM // (FP32_BYTES * KEY_GROUPS * left_elements(config.keys))
    most = most_tiles(config, problem, heads, seqlen_k)
    found = (x for x in times.divisions(config, alone) if x.shared(most) * x.each <= room)
    return sizes.best(found, times.cost)


class TileTimes(NamedTuple):
    """The times of a launch's key tiles, in query blocks.

    Attributes:
        copies, group: how many key heads there are of all sequences, and the query heads of each.
        tiles: how many tiles a key head has. shortest, longest, total: blocks of one query head that these visit. Of packed sequences
            their mean length decides, and where tensors say what is seen, all blocks count.
        cores: how many CTAs work at a time.
    """

    copies: int
    group: int
    tiles: int
    shortest: int
    longest: int
    total: int
    cores: int

    @classmethod
    def of(
        cls, config: Backward, problem: Problem, heads: int, seqlen_k: int, ends: tuple[int, int], cores: int
    ) -> TileTimes:
        """The times of :func:`tile_parts`' launch."""
        copies, rows, keys = heads, problem.seqlen_q, seqlen_k
        if config.packed:
            copies, (rows, keys) = heads * problem.batch, (max(1, n // problem.batch) for n in (rows, keys))
            ends = tuple(end + keys - rows for end in ends)
        tiles, group = config.keys, problem.heads_q // problem.heads_k
        count = -(-keys // tiles.tile_n)
        if config.form == "full" or not config.of_numbers:
            each = -(-rows // tiles.tile_m)
            return cls(copies, group, count, each, each, each * count, cores)
        band = schedule.Band(ends[0] if config.form == "band" else None, ends[1], keys)
        # Along a band blocks rise and fall in straight lines: those of a few tiles, the first and the last among them, tell of all.
        columns = [n * (count - 1) // (JUDGED - 1) * tiles.tile_n for n in range(JUDGED)]
        spans = (schedule.query_blocks(column, tiles.tile_n, tiles.tile_m, rows, band, EITHER) for column in columns)
        blocks = [stop - start for start, stop in spans]
        shortest, longest = reduce(sizes.smaller, blocks), reduce(sizes.larger, blocks)
        return cls(copies, group, count, shortest, longest, sum(blocks) * count // JUDGED, cores)

    @property
    def all(self) -> int:
        """How many tiles there are."""
        return self.copies * self.tiles

    def divisions(self, config: Backward, alone: bool) -> Iterator[TileParts]:
        """The divisions to choose from: none; of all tiles, where there are few; of those of the last round, where tiles are alike and
        other sequences may decide which these are."""
        yield WHOLE
        alike, whole = config.form == "full", 0
        if alike:
            whole = self.all // self.cores * self.cores
        if alone and whole:
            return
        yield from (TileParts(whole, n) for n in range(2, self.group + 1) if self.group % n == 0)
        # Where tensors say what is seen, each query head has blocks of its own.
        most = min(MOST_BITS, self.longest.bit_length() - 1) if config.of_numbers else 0
        yield from (TileParts(whole, self.group, n) for n in range(1, most + 1))

    def cost(self, parts: TileParts) -> float:
        """The time of the pass."""
        shared = self.all - sizes.smaller(parts.whole, self.all)
        each, rest = (parts.each, shared) if shared else (1, self.all % self.cores)
        begin, gathered = (BEGIN_COST + PART_COST, GATHER_COST * each) if shared else (BEGIN_COST, 0.0)
        longest = self.group // parts.by_heads * -(-self.longest >> parts.block_bits) + begin
        if self.shortest == self.longest:
            # Whole rounds take the same however the last one is shared.
            rounds = (self.all - rest) // self.cores * (self.group * self.longest + BEGIN_COST)
            return rounds + -(-rest * each // self.cores) * longest + gathered
        work = self.copies * self.group * self.total + self.all * each * begin
        # Longest first: no CTA ends before the mean, nor before its longest part.
        return sizes.larger(longest, work / self.cores) + gathered
