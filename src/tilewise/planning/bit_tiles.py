"""The tiles of a mask in the form that one kernel serves for every mask: lists of tiles, and a bit for each pair of a partial tile.

Nothing of the mask is compiled into such a kernel. Full tiles are computed unmasked; the pairs of a partial tile are judged here,
once for all heads, layers and steps that share the mask, and a thread of a kernel reads the bits of its own pairs alone.

A tile has ``LINES`` lines, queries in the forward and keys in the backward, by 64 or 128 crossing lines. Two warpgroups hold it as
wgmma accumulators of 64 lines each: thread t holds two lines of it (:func:`line_of`) and of each a quarter of the crossing lines
(:func:`crossing_of`). Its bits are words of 32 that lie side by side: first all of its line 0, then all of its line 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import expr, selections, sizes
from tilewise.masks import Region
from tilewise.masks.facts import blocks_of, every_key_seen, heads_alike, monotone_terms
from tilewise.planning.tiles import PARTIAL, Grid, TileMap, chunk_elements, each_head, seen_keys

LINES = 128  # of a tile
THREADS = 256  # that hold it: two warpgroups
BUDGET = 1 << 30  # bytes of bits at a time: a mask with more is read in pieces
NOTHING, EVERYTHING = 0, 1  # slots in which no bit is set, and every bit; those of partial tiles follow
RESERVED = 2  # these two slots
LATE = 50  # by which part of a pass's work, one of so many, the last section's longest tile may outlast all others


def line_of(thread: Any, r: int) -> Any:
    """Return the tile's line for line ``r`` (0 or 1) of a thread, as :func:`tilewise.backends.hopper.kit.tiles.row_of`."""
    return thread // 128 * 64 + thread % 128 // 32 * 16 + thread % 32 // 4 + 8 * r


def crossing_of(thread: Any, c: Any) -> Any:
    """Return the crossing line for number ``c`` of a thread, as :func:`tilewise.backends.hopper.kit.tiles.column_of`."""
    return thread % 4 * 2 + c // 2 * 8 + c % 2


def words_of(crossing: int) -> int:
    """Return how many words of 32 bits a thread has of a tile with so many crossing lines."""
    return crossing // 64


def slot_bytes(crossing: int) -> int:
    """Return the bytes of one tile's bits."""
    return 4 * THREADS * words_of(crossing)


# -- How many partial tiles there may be ---------------------------------------------------------------------------


def most_partial(
    region: Region,
    lines: int,
    crossing: int,
    tiles: tuple[int, int],
    by_columns: bool = False,
    leaves: Sequence[Any] = (),
) -> int:
    """Return a bound, from the mask's expressions and the shapes of its tensors, of the partial tiles of one batch element and head.

    An end of an interval never decreases, and a condition that rises or falls changes once along every row and column: its boundary is
    a staircase, which passes through at most ``lines + crossing`` tiles. A pattern whose blocks are whole numbers of tiles has no
    partial tile. Selected keys lie in the tiles that their entries name. Of any other predicate all tiles may be partial.

    Args:
        lines, crossing: how many tiles there are along each axis. tiles: lines and crossing lines of a tile.
        leaves: the tensors that selections read, or their facts, by slot.
    """
    shape = tiles[::-1] if by_columns else tiles
    last = crossing if by_columns else lines  # The last keys' tiles end past the last key.
    stairs = _staircases(region, shape)
    if stairs is not None:
        return sizes.smaller(stairs * (lines + crossing) + last, lines * crossing)
    if not region.selections:
        return lines * crossing
    queries = crossing if by_columns else lines
    named = sum(selections.most_tiles(e, leaves[e.args[0][1]].shape, queries, shape) for e in region.selections)
    rest = _unselected(region)
    elsewhere = last if rest is None else most_partial(rest, lines, crossing, tiles, by_columns)
    return sizes.smaller(named + elsewhere, lines * crossing)


@lru_cache(maxsize=1024)
def _unselected(region: Region) -> Region | None:
    """Return the mask of pairs that no selection keeps; None: it shows none of them."""
    rest = selections.assume(region.predicate, {id(e): False for e in region.selections})
    if rest.op != "number":
        return replace(region, predicate=rest)
    return replace(region, predicate=None) if rest.args[0] else None


@lru_cache(maxsize=1024)  # a new mask of a known text is planned in the time of a few launches
def _staircases(region: Region, tile: tuple[int, int]) -> int | None:
    """Return how many boundaries a mask has; None: a predicate may make any tile of ``tile`` (queries, keys) partial."""
    ends = sum(end is not None for end in region.ends[:2])
    if region.predicate is None or _same_on_tiles(region, tile):
        return ends
    terms = monotone_terms(region)
    return None if terms is None else ends + len({str(x.holds) for term in terms for x in term})


def may_hide_keys(region: Region, lengths: tuple[int, int], tile_n: int | None = None) -> bool:
    """Return whether there may be keys that no query sees.

    Args:
        lengths: of queries and keys.
        tile_n: the keys of a tile, if only tiles that are not empty are visited: only keys of these count.
    """
    return not (every_key_seen(region, *lengths) or (tile_n is not None and only_seen_keys(region, tile_n)))


def only_seen_keys(region: Region, tile_n: int) -> bool:
    """Return whether a query that sees a key of a tile of ``tile_n`` sees all: blocks of a pattern hold whole tiles' keys."""
    if any(end is not None for end in region.ends) or region.predicate is None:
        return False
    return blocks_of(region.predicate)[1] % tile_n == 0


def _same_on_tiles(region: Region, tile: tuple[int, int]) -> bool:
    """Return whether the predicate has one value in each tile of ``tile`` (queries, keys)."""
    return all(step % size == 0 for step, size in zip(blocks_of(region.predicate), tile, strict=True))


def bits_bytes(
    region: Region,
    shape: tuple[int, int, int, int],
    crossing: int,
    by_columns: bool = False,
    leaves: Sequence[Any] = (),
) -> int:
    """Return the most bytes that the bits of partial tiles take over an attention of ``shape`` (batch, heads_q, seqlen_q, seqlen_k).

    They are known before any tile is judged, so that nothing has to be read from the device; ``leaves`` are as in :func:`most_partial`.
    """
    return slot_bytes(crossing) * (Layout.of(region, shape, crossing, by_columns, leaves).slots - RESERVED)


# -- The tiles -----------------------------------------------------------------------------------------------------


class Sections(NamedTuple):
    """The heads that a launch takes at a time.

    Attributes:
        heads: of all batch elements, those of keys by columns. least: of a section. ctas: of the launch.
        group: query heads that take their lines in one order, and count as one of ``heads``.
    """

    heads: int = 1
    least: int = 1
    ctas: int = 1
    group: int = 1


ALONE = Sections()  # of one head, for whom sections make no difference


class Layout(NamedTuple):
    """The shapes of :class:`BitTiles`, and where they lie in one int32 tensor.

    Attributes:
        batch, heads: batch elements and heads with lists of their own. alike: so many of these heads side by side have the same.
        lines, steps: of tiles. slots, words: of bits.
        seen: the shape (batch|1, heads_k|1, seqlen_k) of the bytes that say which keys some query sees; empty: nobody asks.
    """

    batch: int
    heads: int
    alike: int
    lines: int
    steps: int
    slots: int
    words: int
    seen: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        region: Region,
        shape: tuple[int, int, int, int],
        crossing: int,
        by_columns: bool = False,
        leaves: Sequence[Any] = (),
        group: int = 1,
        sharing: int = 0,
    ) -> Layout:
        """Return the layout of a mask over an attention of ``shape`` (batch, heads_q, seqlen_q, seqlen_k).

        Args:
            leaves: as in :func:`most_partial`. group: query heads that take their lines in one order (:class:`Sections`).
            sharing: the query heads of a key head, where the keys that are seen are asked for too.
        """
        needs, alike = expr.depends_on(*region.parts), heads_alike(region)
        if shape[1] % alike or (alike % group and group % alike):
            alike = 1
        batch, heads = shape[0] if "b" in needs else 1, shape[1] if "h" in needs else 1
        lengths = shape[:1:-1] if by_columns else shape[2:]
        counts = -(-lengths[0] // LINES), -(-lengths[1] // crossing)
        most = most_partial(region, *counts, (LINES, crossing), by_columns, leaves)
        seen = seen_shape(region, shape, sharing) if sharing else ()
        return cls(batch, heads, alike, *counts, batch * (heads // alike) * most + RESERVED, words_of(crossing), seen)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes by name, in the order in which they lie."""
        lines = self.batch, self.heads, self.lines
        return {
            "bits": (self.slots, THREADS, self.words),
            "work": (*lines, 4),
            "blocks": (*lines, self.steps),
            "section": (1,),
        } | ({"seen": (-(-math.prod(self.seen) // 4),)} if self.seen else {})

    @property
    def places(self) -> dict[str, int]:
        """The first element of each; and under "" how many there are. Each begins at 16 bytes."""
        found, place = {}, 0
        for name, shape in self.shapes.items():
            found[name] = place
            place = place + -(-math.prod(shape) // 4) * 4
        return found | {"": place}

    def tiles(self, memory: Tensor) -> BitTiles:
        """Return the tiles that lie in this memory, int32."""
        places, shapes = self.places, self.shapes
        found = {name: memory[places[name] :][: math.prod(x)].view(x) for name, x in shapes.items() if name != "seen"}
        return BitTiles(**found, memory=memory)

    def seen_in(self, memory: Tensor) -> Tensor:
        """Return which keys some query sees, of this memory: bool, as :attr:`seen`."""
        found = memory.view(torch.bool)[4 * self.places["seen"] :]
        return found[: math.prod(self.seen)].view(self.seen)


def seen_shape(region: Region, shape: tuple[int, int, int, int], sharing: int) -> tuple[int, int, int]:
    """Return the shape ``(batch|1, heads_k|1, seqlen_k)`` of what says which keys are seen, as :meth:`Layout.of` has it."""
    needs = expr.depends_on(*region.parts)
    return shape[0] if "b" in needs else 1, shape[1] // sharing if "h" in needs else 1, shape[3]


@dataclass(frozen=True)
class BitTiles:
    """The tiles of each line of tiles, and the order in which kernels take lines.

    Attributes:
        blocks: int32 ``(b|1, h|1, line of tiles, step)``, the crossing tiles that a line visits, partial ones first.
        work: int32 ``(b|1, h|1, line, 4)``. Its first column is the order in which lines are taken, those first that visit most; the
            heads of a group take theirs in one order. The others say of each line how many partial tiles it visits,
            how many tiles, and the slot of the first one's bits; the others' follow it.
            Every line of queries visits a tile, and the first one counts as partial: it has the bits of EVERYTHING where none is, and
            where none is visited those of NOTHING, one past the last tile, whose keys kernels read as zeros.
        bits: int32 ``(slot, THREADS, words)``: a bit for each pair of a partial tile.
        section: int32 ``(1,)``, the heads of a section (:func:`even_section`).
        memory: int32, in which they lie as a :class:`Layout` says.
    """

    blocks: Tensor
    work: Tensor
    bits: Tensor
    section: Tensor
    memory: Tensor | None = None

    @classmethod
    def build(
        cls, grid: Grid, crossing: int, by_columns: bool = False, sections: Sections = ALONE, sharing: int = 0
    ) -> BitTiles:
        """Return the tiles of a grid, of LINES queries by ``crossing`` keys, or of LINES keys by ``crossing`` queries ``by_columns``.

        Everything is made on the grid's device, and nothing is read back from there. ``sharing``: as in :meth:`Layout.of`.
        """
        of_kinds, count = grid.alike()
        shape = len(grid.b), len(grid.h), grid.seqlen_q, grid.keys
        layout = Layout.of(grid.region, shape, crossing, by_columns, grid.leaves, sections.group, sharing)
        if count == 1 and layout.alike > 1:  # of heads that do not count from 0 on
            layout = layout._replace(alike=1, slots=(layout.slots - RESERVED) * layout.alike + RESERVED)
        found = layout.tiles(torch.empty(layout.places[""], dtype=torch.int32, device=grid.b.device))
        if sharing:
            layout.seen_in(found.memory).copy_(seen_keys(grid, sharing))
        if layout.alike == 1:
            found._write(grid, crossing, by_columns, sections)
            return found
        one = replace(found, blocks=found.blocks[:, ::count].clone(), work=found.work[:, ::count].clone())
        one._write(of_kinds, crossing, by_columns, sections._replace(group=max(1, sections.group // count)))
        found.blocks.copy_(each_head(one.blocks, count))
        found.work.copy_(each_head(one.work, count))
        return found

    def _write(self, grid: Grid, crossing: int, by_columns: bool, sections: Sections) -> None:
        """Write all of it, for a grid whose heads are told apart."""
        tile_map = TileMap.build(grid, *((crossing, LINES) if by_columns else (LINES, crossing)), by_columns)
        tile_map = replace(tile_map, status=tile_map.status.expand(*self.blocks.shape[:2], -1, -1).contiguous())
        self._list(tile_map, grid, by_columns, sections)
        self._fill(grid, crossing, by_columns)

    def ragged(self, grid: Grid, by_columns: bool) -> bool:
        """Return whether the last key tiles end past the last key: keys there are zeros, not hidden, and such a tile counts as partial."""
        tile_n = LINES if by_columns else 64 * self.bits.shape[2]
        return grid.keys % tile_n > 0

    def _list(self, tile_map: TileMap, grid: Grid, by_columns: bool, sections: Sections) -> None:
        """Write ``blocks``, ``work`` and ``section``, and the bits of NOTHING and EVERYTHING."""
        if self.ragged(grid, by_columns):
            tile_map.status[..., -1:].clamp_(max=PARTIAL)
        blocks, counts = tile_map.visits(by_columns)
        parts, count = counts.unbind(-1)
        if not by_columns:
            blocks[..., 0] = torch.where(count > 0, blocks[..., 0], blocks.shape[-1])
        heads = blocks.shape[0] * blocks.shape[1]
        start = torch.arange(heads, device=blocks.device).view(*blocks.shape[:2], 1) * (
            (len(self.bits) - RESERVED) // heads
        )
        first = RESERVED + start + parts.cumsum(-1) - parts
        first = torch.where(parts > 0, first, torch.where(count > 0, EVERYTHING, NOTHING))
        group = sections.group if count.shape[1] > 1 else 1
        visited = count.unflatten(1, (-1, group)).sum(2)  # by all heads of a group
        order = torch.argsort(visited, dim=-1, descending=True, stable=True).repeat_interleave(group, 1)
        if not by_columns:
            parts, count, visited = (x.clamp(min=1) for x in (parts, count, visited))
        self.section.copy_(even_section(visited, sections))
        self.blocks.copy_(blocks)
        self.work.copy_(torch.stack([order, parts, count, first], -1))
        self.bits[NOTHING], self.bits[EVERYTHING] = 0, -1

    def _fill(self, grid: Grid, crossing: int, by_columns: bool) -> None:
        """Write the bits of every slot that a partial tile may have, some at a time: the host does not know how many there are."""
        (heads_b, heads_h, lines, steps), (slots, *of_slot) = self.blocks.shape, self.bits.shape
        most = (slots - RESERVED) // (heads_b * heads_h)
        _, parts, _, first = self.work.flatten(0, 1).long().unbind(-1)
        parts = torch.where(first > EVERYTHING, parts, 0)
        ends, slot = parts.cumsum(-1), torch.arange(most, device=parts.device).expand(len(parts), -1).contiguous()
        line = torch.searchsorted(ends, slot, right=True).clamp(max=lines - 1)
        step = (slot - (ends - parts).gather(1, line)).clamp(max=steps - 1)
        tile = self.blocks.flatten(0, 1).flatten(1).gather(1, line * steps + step).flatten()
        head = torch.arange(len(parts), device=parts.device).repeat_interleave(most)
        b, h = (x[n].view(-1, 1, 1) for x, n in ((grid.b, head // heads_h), (grid.h, head % heads_h)))
        order = _order_of_bits(crossing, parts.device)
        a_slot = LINES * max([crossing, *[grid.leaves[e.args[0][1]].shape[-1] for e in grid.region.selections]])
        count = max(1, chunk_elements(parts.device) // a_slot)
        for n in range(0, len(tile), count):
            at = slice(n, n + count)
            kept = self._kept(grid, line.flatten()[at], tile[at], (b[at], h[at]), by_columns)
            words = kept.flatten(1)[:, order].view(-1, *of_slot, 32).long() << torch.arange(32, device=parts.device)
            self.bits[RESERVED + n : RESERVED + n + len(words)] = words.sum(-1).int()  # the high bits wrap

    def _kept(self, grid: Grid, line: Tensor, tile: Tensor, head: tuple[Tensor, Tensor], by_columns: bool) -> Tensor:
        """Return which pairs of some tiles are kept, each by its line and its crossing tile: bool (tile, LINES, crossing line)."""
        crossing = 64 * self.bits.shape[2]
        own = line.view(-1, 1) * LINES + torch.arange(LINES, device=line.device)
        other = tile.view(-1, 1) * crossing + torch.arange(crossing, device=line.device)
        i, j = (other, own) if by_columns else (own, other)
        i, j = i.unsqueeze(-1), j.unsqueeze(-2)
        kept, inside = (i < grid.seqlen_q) & (j < grid.keys), grid.region.inside
        if inside is not None:
            env = grid.env() | {"b": head[0], "h": head[1]}
            env |= {"i": i.clamp(max=grid.seqlen_q - 1), "j": j.clamp(max=grid.keys - 1)}
            kept = kept & expr.evaluate([inside], env, grid.leaves, grid.dtype)[0]
        return kept.mT if by_columns else kept


def _order_of_bits(crossing: int, device: torch.device) -> Tensor:
    """Return the pairs of a tile, ``line * crossing + crossing line``, in the order of their bits."""
    thread, n = torch.arange(THREADS, device=device).view(-1, 1), torch.arange(crossing // 2, device=device)
    return (line_of(thread, n // (crossing // 4)) * crossing + crossing_of(thread, n % (crossing // 4))).flatten()


def even_section(visits: Tensor, sections: Sections) -> Tensor:
    """Return the heads of a section. The longest tile of the last section comes first in it, and ends at most a LATE-th of the time
    after all others: int32 (1,), on the device, which alone knows the lengths of lists.

    Args:
        visits: (batch|1, heads|1, line), int: the tiles that each line visits.
    """
    each, heads = visits.numel() // visits.shape[-1], sections.heads  # heads whose lines are told apart, and all
    total = visits.sum() * heads
    # By how much the longest line outlasts a LATE-th, of all CTAs' work. The last of n even sections has an n-th of it: the longest fits.
    over = (visits.amax().long() * (sections.ctas * each * LATE) - total).clamp_(min=heads * LATE)
    # Of no number of sections that will do, one.
    found = (total * LATE // over).clamp_(min=1)
    return ((heads - 1 + found) // found).clamp_(min=sections.least).int().view(1)
