"""The portions in which a backward that keeps dS is launched: so many heads and keys at a time that their sheet takes a bounded room.

A portion is a launch of the same kernels on views of the call's tensors: some batch elements; or some key heads of one, and of these all
keys or some. Where tensors hold the ends of rows, only the device knows which pairs are seen: a portion then has all keys, and its sheet
has room for all pairs. All portions use one sheet, and kernels wait for those of the portion before; dQ of the keys of earlier ones stays
in fp32. Which keys a portion has depends on one sequence alone, so that no number depends on the rest of the batch.

Of packed sequences only the device knows how many heads a portion has (:mod:`tilewise.backends.hopper.backward.packed_plan`): there are
as many launches as the worst lengths would need, all of the whole tensors. Surplus launches exit immediately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from tilewise.backends.hopper.backward.config import (
    PACKED_ROOM,
    SHEET_LIMIT,
    SHEET_ROOM,
    Backward,
    least_tiles,
    most_blocks,
    sheet_blocks,
    sheet_bytes,
)
from tilewise.backends.hopper.backward.tiles import SHEET_BLOCK, SHEET_KEYS, SHEET_MARGIN
from tilewise.backends.hopper.config import ELEMENT_BYTES, ROWS
from tilewise.backends.hopper.host.draft import View
from tilewise.backends.hopper.kit import schedule
from tilewise.caching import cached_property
from tilewise.piece import Span, evenly
from tilewise.problem import Problem

# In units of what the pass over keys takes for a block of 64 x 64: a block of the pass over queries, and start and end of a portion;
# and in blocks of the pass over queries what a tile takes to read its sums, or to write them.
SHEET_COST, START_COST, SUMS_COST = 0.5, 6.0, 4.0

LEAST_BLOCKS = 16  # of keys in a portion of several heads
MANY_ROUNDS = 4  # of tiles of a portion: a larger sheet would save little
WORTH_MORE = 0.9  # of the time that a smaller sheet costs
# Tensors of which a portion has some heads' rows, of a mask too, and those of which it has some keys.
OF_ROWS = ("q", "o", "lse", "dlse", "dq", "lse2", "delta", "keys_lo", "keys_hi", "queries_lo", "queries_hi")
OF_KEYS = ("k", "v", "dk", "dv")

Moved = TypeVar("Moved", Tensor, View)


class Portion(NamedTuple):
    """Some batch elements, some key heads of each, and some of the keys that the launch has."""

    batch: Span
    heads: Span
    keys: Span

    def size(self, name: str) -> int:
        """How many batch elements, heads or keys it has."""
        start, stop = getattr(self, name)
        return stop - start

    def of(self, x: Moved, heads_k: int, keys: bool = False) -> Moved:
        """The view of a tensor (batch, seqlen, heads, head_dim) or (batch, heads, rows), of key or query heads; ``keys``: its rows are
        those of keys."""
        found = self.heads_of(x.narrow(0, self.batch[0], self.size("batch")), heads_k)
        return found.narrow(1, self.keys[0], self.size("keys")) if keys else found

    def heads_of(self, x: Moved, heads_k: int) -> Moved:
        """The view of a tensor whose heads are the last dimension but one, with all batch elements and rows."""
        group = x.shape[-2] // heads_k
        return x.narrow(-2, self.heads[0] * group, self.size("heads") * group)


@dataclass(frozen=True)
class SequenceTimes:
    """The time that one sequence takes in portions, by a model of clocks. The fields are those of :class:`Portions`."""

    problem: Problem
    config: Backward
    seqlen_k: int
    ends: tuple[int, int]
    cores: int

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.problem.heads_q // self.problem.heads_k

    @property
    def blocks(self) -> tuple[int, int]:
        """How many blocks of keys and of queries a head's sheet has."""
        return sheet_blocks(self.config.queries, self.problem, self.seqlen_k)

    def cost(self, heads: int, keys: int) -> float:
        """The time that one sequence takes in portions of so many heads and blocks of keys at most, in blocks of 64 x 64 of a CTA, by a
        model of clocks."""
        spans, tiles = evenly(self.blocks[0], keys), self.config.queries
        rows = [[max(0, min(stop, b) - max(start, a)) for start, stop in self.seen] for a, b in spans]
        sums, total = SUMS_COST * 2 * (len(spans) > 1), 0.0
        # Parts differ by one head at most: each of their sizes is costed once.
        for count, alike in Counter(stop - start for start, stop in evenly(self.problem.heads_k, heads)).items():
            for (a, b), lengths in zip(spans, rows, strict=True):
                cost = span_of_work(self.visits[a:b], count, self.cores // self.config.keys.ctas, self.group)
                cost += START_COST
                more = [sums + length for length in lengths]
                cost += SHEET_COST * span_of_work(more, count * self.group * tiles.parts, self.cores)
                total += alike * cost
        return total

    @cached_property
    def band(self) -> schedule.Band:
        return schedule.Band(*self.ends, self.seqlen_k)

    @cached_property
    def visits(self) -> list[int]:
        """How many blocks of queries each block of keys visits."""
        first = (SHEET_KEYS * n for n in range(self.blocks[0]))
        found = (schedule.query_blocks(n, SHEET_KEYS, ROWS, self.problem.seqlen_q, self.band) for n in first)
        return [stop - start for start, stop in found]

    @cached_property
    def seen(self) -> list[Span]:
        """The blocks of keys that each tile of queries sees."""
        rows, count = self.config.queries.tile_m, self.blocks[1] // self.config.queries.warpgroups
        return [schedule.seen_blocks(rows * n, rows, SHEET_KEYS, self.band) for n in range(count)]


class Portions(SequenceTimes):
    """The portions of a launch with so many keys of a problem, on a device with so many multiprocessors.

    Attributes:
        ends: lo and hi of the band, as kernels take them, counted from the launch's first key.
    """

    @cached_property
    def all(self) -> list[Portion]:
        """The portions, in the order in which they are launched: of each head its first keys first."""
        batch, heads, keys = self.sizes
        return [
            Portion(elements, part, tuple(min(SHEET_KEYS * n, self.seqlen_k) for n in blocks))
            for elements in evenly(self.problem.batch_dim, batch)
            for part in evenly(self.problem.heads_k, heads)
            for blocks in evenly(self.blocks[0], keys)
        ]

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """How many batch elements, key heads and blocks of keys a portion has at most."""
        heads, keys = self.problem.heads_k, self.blocks[0]
        # Of tiles of keys: as many as a room holds, or as few as there must be.
        tile, least = (
            sheet_bytes(self.config.queries, self.problem),
            least_tiles(self.config, self.problem, lambda: self.cores),
        )
        room, *more = (max(size // tile, least) for size in (SHEET_ROOM, 2 * SHEET_ROOM, SHEET_LIMIT))
        if room >= keys * heads:
            return room // (keys * heads), heads, keys
        if not self.config.continues:  # all keys: only the device knows which of them a row sees
            return 1, room // keys, keys
        found = self.sizes_within(room)
        if room >= MANY_ROUNDS * self.cores:
            return found
        # Few tiles even out badly, as those of grouped heads, which are large.
        cost = self.cost(*found[1:])
        for room in more:
            larger = self.sizes_within(room)
            if (saved := self.cost(*larger[1:])) < WORTH_MORE * cost:
                found, cost = larger, saved
        return found

    def sizes_within(self, room: int) -> tuple[int, int, int]:
        """The same of a portion that has so many tiles of keys of one sequence at most."""
        heads, keys = self.problem.heads_k, self.blocks[0]
        # Fewer keys than these of more heads would add up more sums of dQ than they even out, and take long to count.
        most = min(heads, max(1, room // LEAST_BLOCKS))
        counts = (min(1 << n, most) for n in range(most.bit_length() + 1))
        choices = [(1, n, min(keys, room // n)) for n in dict.fromkeys(counts)]
        return min(choices, key=lambda sizes: self.cost(*sizes[1:]))

    @cached_property
    def largest(self) -> tuple[int, int]:
        """How many query heads and keys a portion has at most."""
        batch, heads, keys = (max(portion.size(name) for portion in self.all) for name in Portion._fields)
        return batch * heads * self.group, keys

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.all)

    @property
    def sheet_shape(self) -> tuple[int, ...]:
        """The shape of the sheet."""
        heads, keys = self.largest
        return (heads, *sheet_blocks(self.config.queries, self.problem, keys), SHEET_BLOCK)

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """The shape of dQ's sums in fp32: as little as may be where no portion has sums of another."""
        tiles, (heads, keys) = self.config.queries, self.largest
        rows = self.blocks[1] // tiles.warpgroups
        heads, rows = (heads, rows) if keys < self.seqlen_k else (1, 1)
        return heads, rows, tiles.parts * tiles.warpgroups, ROWS * tiles.width

    def of(self, n: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the n-th portion's launch, of those of the whole; dO, which is late, has its number in its name."""
        if self.count == 1:
            return dict(arguments)
        portion, heads_k = self.all[n], self.problem.heads_k
        found = dict(arguments) | {"do": arguments["do"]._replace(memory=f"do{n}")}
        for name, x in arguments.items():
            if name in (*OF_ROWS, *OF_KEYS) and isinstance(x, View):
                found[name] = portion.of(x, heads_k, keys=name in OF_KEYS)
        return found

    def late(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The late tensors of all portions, of those of the whole launch."""
        if self.count == 1:
            return {}
        return {f"do{n}": x.of(tensors["do"], self.problem.heads_k) for n, x in enumerate(self.all)}


@dataclass(frozen=True)
class PackedPortions:
    """The portions of a launch of packed sequences."""

    problem: Problem
    config: Backward

    @property
    def most_blocks(self) -> int:
        """How many blocks the sheet of a key head has at most."""
        return most_blocks(self.config.queries, self.problem)

    @property
    def room(self) -> int:
        """The number of blocks that the sheet has room for: one head's at least."""
        fitting = max(1, PACKED_ROOM // (ELEMENT_BYTES * SHEET_BLOCK) // self.most_blocks)
        return self.most_blocks * min(fitting, self.problem.heads_k)

    @property
    def count(self) -> int:
        """How many there are, with those that may turn out to have no heads."""
        return -(-self.problem.heads_k // (self.room // self.most_blocks))

    @property
    def sheet_shape(self) -> tuple[int, int]:
        """The shape of the sheet."""
        return self.room + SHEET_MARGIN, SHEET_BLOCK

    def of(self, n: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the n-th launch: all tensors, but that it counts its own tiles of both passes."""
        return {**arguments, **{name: arguments[name].select(0, n) for name in ("counts_k", "counts_q")}}

    def late(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}


def span_of_work(lengths: Sequence[int], copies: int, workers: int, each: int = 1) -> float:
    """The time in which so many workers do tiles of these lengths, ``copies`` of each, dealt out longest first."""
    longest, count = max(lengths, default=0), copies * len(lengths)
    even = min(lengths, default=0) == longest
    return each * (longest * -(-count // workers) if even else max(longest, copies * sum(lengths) / workers))
