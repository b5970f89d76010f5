"""The tiles of the score matrix: empty, partial or full.

:class:`Grid` is the index space of one attention, or of a part of one, with its mask. :class:`TileMap` has the state of each tile,
by rows (forward) or by columns (backward). :func:`seen_keys` marks the keys that some query sees. Predicates are evaluated once,
some rows at a time, in O(tiles + N) memory and without a host read.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise import expr, selections
from tilewise.caching import cached_property
from tilewise.expr import Expr
from tilewise.masks import Mask, Region, grouped, region, with_lists
from tilewise.masks.facts import Condition, blocks_of, conditions, heads_alike, joined, monotone_terms
from tilewise.planning import planner

EMPTY, PARTIAL, FULL = 0, 1, 2
_LENGTHS = frozenset({"seqlen_q", "seqlen_k", "off"})  # the symbols that are numbers of a call
PREPARED_BLOCK = 64
_SEEN_TILE = 128, 128  # in which a kernel looks for the keys that are seen
_LEAST_BLOCK = 64  # blocks with fewer pairs are not asked first
_CHUNK_ELEMENTS = 1 << 22  # pairs evaluated at once: 32 MiB of int64, which fit many caches
# A GPU takes 128 MiB at once, to save launches: in steps of 2**22, three evaluations of 16,384 x 16,384 pairs took 92 ms on an H200.
# FlexAttention takes 5 ms for one evaluation in a single step.
_CHUNK_ELEMENTS_GPU = 1 << 24


def chunk_elements(device: torch.device) -> int:
    """Return how many pairs are evaluated at once."""
    return _CHUNK_ELEMENTS_GPU if device.type == "cuda" else _CHUNK_ELEMENTS


@dataclass(frozen=True)
class Grid:
    """The pairs ``(b, h, i, j)`` of an attention, or of some of its batch elements, heads and keys.

    Attributes:
        region: the mask; ``leaves`` the tensors by slot.
        seqlen_q, seqlen_k: lengths of the sequence, from which ``off`` follows.
        b, h: int64, the batch indices and query heads of this part.
        keys: the number of keys in this part, from ``key_origin`` on (one origin per ``b`` if keys are split).
        all_heads: ``h`` counts from 0 on.
    """

    region: Region
    leaves: Sequence[Tensor]
    seqlen_q: int
    seqlen_k: int
    b: Tensor
    h: Tensor
    keys: int
    key_origin: Tensor | None = None
    all_heads: bool = False

    @classmethod
    def whole(cls, kept: Region, leaves: Sequence[Tensor], shape: tuple[int, int, int, int], device) -> Grid:
        """Return the grid of a whole attention of ``shape`` (batch, heads_q, seqlen_q, seqlen_k)."""
        batch, heads, seqlen_q, seqlen_k = shape
        index = devices.indices(torch.device(device), max(batch, heads))
        return cls(kept, leaves, seqlen_q, seqlen_k, index[:batch], index[:heads], seqlen_k, all_heads=True)

    def alike(self) -> tuple[Grid, int]:
        """Return the grid with one of so many heads side by side that see the same pairs, as those of one key head with selected keys."""
        count = heads_alike(self.region)
        if count == 1 or not self.all_heads or len(self.h) % count:
            return self, 1
        return replace(self, h=self.h[::count].contiguous(), all_heads=False), count  # kernels read it with steps of 1

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the mask's arithmetic."""
        return self.region.compared_in(self.leaves)

    def env(
        self, i: Tensor | None = None, j: Tensor | None = None, names: Container[str] = _LENGTHS
    ) -> dict[str, Tensor]:
        """Return the symbols as tensors that broadcast to ``(b, h, i, j)``; the arguments ``i`` and ``j`` are 1-d and local.

        Args:
            names: those of the lengths that are read, among others.
        """
        sizes = {"seqlen_q": self.seqlen_q, "seqlen_k": self.seqlen_k, "off": self.seqlen_k - self.seqlen_q}
        env = {name: expr.constant(n, self.b.device) for name, n in sizes.items() if name in names}
        env |= {"b": self.b.view(-1, 1, 1, 1), "h": self.h.view(1, -1, 1, 1)}
        if i is not None:
            env["i"] = i.view(1, 1, -1, 1)
        if j is not None:
            env["j"] = j.view(1, 1, 1, -1)
            if self.key_origin is not None:
                env["j"] = env["j"] + self.key_origin.view(-1, 1, 1, 1)
        return env

    def evaluate(self, e: Expr, i: Tensor | None = None, j: Tensor | None = None) -> Tensor:
        return expr.evaluate([e], self.env(i, j, expr.depends_on(e)), self.leaves, self.dtype)[0]

    def key_interval(self, i: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``lo, hi`` of rows ``i``, in local keys: int64 ``(b|1, h|1, len(i))``, within 0 and ``keys``."""
        found = _ends_by_kernel(self, i, False)
        if found is not None:
            return found
        origin = 0 if self.key_origin is None else self.key_origin.view(-1, 1, 1, 1)
        lo = 0 if self.region.lo is None else self.evaluate(self.region.lo, i)
        hi = self.seqlen_k if self.region.hi is None else self.evaluate(self.region.hi, i)
        return self._local(lo - origin, i, 2, self.keys), self._local(hi - origin, i, 2, self.keys)

    def query_interval(self, j: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``first, last`` of columns ``j`` (local): int64 ``(b|1, h|1, len(j))``, within 0 and ``seqlen_q``."""
        found = _ends_by_kernel(self, j, True)
        if found is not None:
            return found
        first = 0 if self.region.first is None else self.evaluate(self.region.first, None, j)
        last = self.seqlen_q if self.region.last is None else self.evaluate(self.region.last, None, j)
        return self._local(first, j, 3, self.seqlen_q), self._local(last, j, 3, self.seqlen_q)

    def _local(self, end: Tensor | int, index: Tensor, axis: int, limit: int) -> Tensor:
        end = end if isinstance(end, Tensor) else expr.constant(end, self.b.device)
        end = end.long().clamp(0, limit)
        end = end.expand(expr.broadcast_shape(end.shape, (1, 1, 1, 1)))
        return end.flatten(2).expand(-1, -1, len(index)) if end.shape[axis] == 1 else end.flatten(2)

    def kept(self, i: Tensor, j: Tensor) -> Tensor | None:
        """Return which pairs of rows ``i`` and columns ``j`` are kept: bool ``(b|1, h|1, i|1, j|1)``; None means all."""
        inside = self.region.inside
        return None if inside is None else self.evaluate(inside, i, j)

    def pairs(self) -> Tensor:
        """Return which pairs of all rows and columns are kept: bool ``(b, h, rows, columns)``."""
        kept = self.kept(*[torch.arange(n, device=self.b.device) for n in (self.seqlen_q, self.keys)])
        kept = torch.ones((), dtype=torch.bool, device=self.b.device) if kept is None else kept
        return kept.expand(len(self.b), len(self.h), self.seqlen_q, self.keys)


@dataclass(frozen=True)
class TileMap:
    """EMPTY, PARTIAL or FULL for each tile: uint8 ``(b|1, h|1, query tiles, key tiles)``.

    A tile called empty or full is so; one called partial may turn out to be either.
    """

    status: Tensor
    tile_m: int
    tile_n: int

    @classmethod
    def build(cls, grid: Grid, tile_m: int, tile_n: int, by_columns: bool = False) -> TileMap:
        """Return the map of a grid. ``by_columns`` reads the interval in column form, as backward kernels do."""
        grid, count = grid.alike()
        if count > 1:
            return cls(each_head(cls.build(grid, tile_m, tile_n, by_columns).status, count), tile_m, tile_n)
        found = _by_kernel(grid, tile_m, tile_n)
        if found is not None:
            return cls(found[0], tile_m, tile_n)
        status = _interval_status(grid, tile_m, tile_n, by_columns)
        if grid.region.predicate is not None:
            prepared = grid.region.prepared
            if prepared is not None and grid.key_origin is None:
                blocks = _part_of(grid.leaves[prepared.status_slot], grid)
                predicate = _coarsen(blocks, prepared.block, (grid.seqlen_q, grid.keys), (tile_m, tile_n))
            else:
                predicate = _status_of(grid, tile_m, tile_n)
            status = torch.minimum(status, predicate)  # empty wins, then partial
        return cls(status, tile_m, tile_n)

    def visits(self, transposed: bool = False) -> tuple[Tensor, Tensor]:
        """Return the key tiles to visit for each query tile, partial ones first, and the counts of partial and of all tiles.

        ``transposed`` gives the query tiles for each key tile. Lists are int32 ``(b|1, h|1, lines, tiles)``, meaningless past the
        count, but the first place always holds a tile. Counts are ``(b|1, h|1, lines, 2)``.
        """
        if (kernels := planner.of_plain(self.status)) is not None:
            return kernels.listed_tiles(self.status.contiguous(), transposed)
        status = (self.status.mT if transposed else self.status).contiguous()
        order = torch.argsort((status + 2) % 3, dim=-1, stable=True)  # partial, full, empty
        counts = torch.stack([(status == PARTIAL).sum(-1), (status != EMPTY).sum(-1)], -1)
        return order.int(), counts.int()


def each_head(x: Tensor, count: int) -> Tensor:
    """Return what ``(b|1, h|1, ...)`` says of one of ``count`` heads side by side, for each of them; one head stays one."""
    return x if x.shape[1] == 1 else x.repeat_interleave(count, 1)


def _by_kernel(grid: Grid, tile_m: int, tile_n: int, group: int | None = None) -> tuple[Tensor, Tensor | None] | None:
    """Return the state of every tile from a kernel and, with ``group`` query heads per key head, the keys that are seen.

    Return None if blocks of the predicate are known; under a tracer, and where no kernel can.
    """
    region = grid.region
    if region.everything or region.prepared is not None or (kernels := planner.of(grid)) is None:
        return None
    return kernels.judged_tiles(grid, tile_m, tile_n, group)


def _ends_by_kernel(grid: Grid, lines: Tensor, by_columns: bool) -> tuple[Tensor, Tensor] | None:
    """Return the intervals of ``lines`` from a kernel on the grid's device; None without intervals, and where no kernel can."""
    ends = grid.region.ends[2:] if by_columns else grid.region.ends[:2]
    if all(end is None for end in ends) or not len(lines) or (kernels := planner.of(grid)) is None:
        return None
    return kernels.ends_of_lines(grid, lines, by_columns)


def _interval_status(grid: Grid, tile_m: int, tile_n: int, by_columns: bool) -> Tensor:
    """Return the status of tiles by the interval alone. Ends never decrease, so a tile's first and last line bound the others."""
    lines, line_tile, cross, cross_tile = (
        (grid.keys, tile_n, grid.seqlen_q, tile_m) if by_columns else (grid.seqlen_q, tile_m, grid.keys, tile_n)
    )
    device = grid.b.device
    start = torch.arange(0, lines, line_tile, device=device)
    stop = (start + line_tile).clamp(max=lines)
    interval = grid.query_interval if by_columns else grid.key_interval
    (lo_min, hi_min), (lo_max, hi_max) = interval(start), interval(stop - 1)
    tile_start = torch.arange(0, cross, cross_tile, device=device)
    tile_stop = (tile_start + cross_tile).clamp(max=cross)
    lo_min, hi_min, lo_max, hi_max = (end.unsqueeze(-1) for end in (lo_min, hi_min, lo_max, hi_max))
    visited = (tile_start < hi_max) & (tile_stop > lo_min)
    whole = (tile_start >= lo_max) & (tile_stop <= hi_min)
    status = visited.to(torch.uint8) + (visited & whole).to(torch.uint8)
    return status.mT if by_columns else status


def _status_of(grid: Grid, tile_m: int, tile_n: int) -> Tensor:
    """Return the predicate's status: from corners of tiles if it is monotonic along rows and columns, from the entries of a selection, else
    from all pairs."""
    known = bool(grid.region.selections) or monotone_terms(grid.region) is not None
    return known_status(grid, tile_m, tile_n) if known else _predicate_status(grid, tile_m, tile_n)[0]


def _predicate_status(grid: Grid, tile_m: int, tile_n: int) -> tuple[Tensor, Tensor]:
    """Return ``(status, seen)`` of the predicate from one evaluation per pair, or per block if it is constant on blocks.

    ``seen`` is bool ``(b|1, h|1, keys)``: some query of that head sees the key, by interval and predicate.
    """
    predicate, device = grid.region.predicate, grid.b.device
    if not grid.seqlen_q or not grid.keys:
        blocks = (1, 1, -(-grid.seqlen_q // tile_m), -(-grid.keys // tile_n))
        empty = torch.zeros(blocks, dtype=torch.uint8, device=device)
        return empty, torch.zeros((1, 1, grid.keys), dtype=torch.bool, device=device)
    step_m, step_n = _steps(grid, predicate, tile_m, tile_n)
    j = torch.arange(0, grid.keys, step_n, device=device)
    first, last = grid.query_interval(torch.arange(grid.keys, device=device))
    heads = (len(grid.b) if "b" in expr.depends_on(predicate) else 1) * (
        len(grid.h) if "h" in expr.depends_on(predicate) else 1
    )
    elements = chunk_elements(device)
    rows = max(tile_m, elements * step_m // max(len(j) * heads, 1) // tile_m * tile_m)
    statuses, seen = [], torch.zeros_like(first, dtype=torch.bool)
    for row in range(0, grid.seqlen_q, rows):
        i = torch.arange(row, min(row + rows, grid.seqlen_q), step_m, device=device)
        true = grid.evaluate(predicate, i, j)
        true = true.expand(expr.broadcast_shape(true.shape, (1, 1, len(i), len(j))))
        statuses.append(_block_status(true, tile_m // step_m, tile_n // step_n))
        seen = seen | _seen_by(true, (first - row, last - row), step_m, step_n)
    return torch.cat(statuses, 2), seen


def _steps(grid: Grid, e: Expr, tile_m: int, tile_n: int) -> tuple[int, int]:
    """Return the size, in queries and keys, of the largest blocks that divide the tiles and have one value of ``e`` each."""
    queries, keys = blocks_of(e)
    return math.gcd(tile_m, queries), math.gcd(tile_n, keys if grid.key_origin is None else 1)


def known_status(grid: Grid, tile_m: int, tile_n: int) -> Tensor:
    """Return the predicate's status as far as a few pairs of a tile tell it, else PARTIAL: uint8 ``(b|1, h|1, query tiles, key tiles)``.

    A monotonic condition holds somewhere in a tile if it holds at the best corner, and everywhere if it holds at the worst one. A
    condition that is constant on blocks is evaluated once a block, a selection by its entries. A tile stays partial if only other
    conditions decide it, if two conditions only fill it together, or if they meet it in different places.
    """

    def ends(length: int, tile: int) -> tuple[Tensor, Tensor]:
        start = torch.arange(0, length, tile, device=grid.b.device)
        return start, (start + tile).clamp(max=length) - 1

    rows, columns = ends(grid.seqlen_q, tile_m), ends(grid.keys, tile_n)

    predicate = grid.region.predicate
    known = conditions(predicate, grid.region.sorted_leaves)

    def bounds(part: Expr, inner: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return whether it may hold for some pair of a tile, and whether it holds for all."""
        found = known.get(id(part))
        if found is not None:
            by_i, by_j = found.by_i > 0, found.by_j > 0
            return tuple(grid.evaluate(part, rows[by_i == best], columns[by_j == best]) for best in (True, False))
        if inner:
            join = torch.logical_and if part.op == "and" else torch.logical_or
            return tuple(join(*both) for both in zip(*inner, strict=True))
        if part.op == "selected":
            return selections.tile_bounds(grid, part, tile_m, tile_n)
        step_m, step_n = _steps(grid, part, tile_m, tile_n)
        if step_m * step_n >= _LEAST_BLOCK and grid.seqlen_q and grid.keys:
            i, j = (
                torch.arange(0, n, step, device=grid.b.device)
                for n, step in ((grid.seqlen_q, step_m), (grid.keys, step_n))
            )
            true = grid.evaluate(part, i, j)
            true = true.expand(expr.broadcast_shape(true.shape, (1, 1, len(i), len(j))))
            status = _block_status(true, tile_m // step_m, tile_n // step_n)
            return status != EMPTY, status == FULL
        # Filled there: torch.tensor would copy from the host, and wait.
        return tuple(fill((), dtype=torch.bool, device=grid.b.device) for fill in (torch.ones, torch.zeros))

    some, every = expr.fold(predicate, bounds, partial(joined, known))
    status = some.to(torch.uint8) + (some & every).to(torch.uint8)
    return status.expand(expr.broadcast_shape(status.shape, (1, 1, len(rows[0]), len(columns[0]))))


def _seen_by_terms(grid: Grid, terms: Sequence[Sequence[Condition]]) -> Tensor:
    """Return the keys that one of the terms shows to some query of their interval: bool ``(b|1, h|1, keys)``."""
    env = grid.env(None, torch.arange(grid.keys, device=grid.b.device))
    first, last = (end.unsqueeze(2) for end in grid.query_interval(torch.arange(grid.keys, device=grid.b.device)))

    def hold(conditions: Sequence[Condition], i: Tensor) -> Tensor:
        roots = [x.holds for x in conditions]
        return _all_of(expr.evaluate(roots, {**env, "i": i}, grid.leaves, grid.dtype))

    def some_query(term: Sequence[Condition]) -> Tensor:
        rising, others = [x for x in term if x.by_i > 0], [x for x in term if x.by_i <= 0]
        if not others:
            return hold(rising, last - 1)
        low, high = first, last
        for _ in range(grid.seqlen_q.bit_length() if rising else 0):  # from this query on, every rising term is true
            middle = (low + high) // 2
            enough, open_ = hold(rising, middle), low < high
            low, high = torch.where(open_ & ~enough, middle + 1, low), torch.where(open_ & enough, middle, high)
        return hold(others, low) & (low < last)

    seen = _any_of(map(some_query, terms)) & (first < last)
    return seen.expand(expr.broadcast_shape(seen.shape, (1, 1, 1, grid.keys))).squeeze(2)


def _any_of(each: Iterable[Tensor]) -> Tensor:
    return reduce(torch.logical_or, each)


def _all_of(each: Iterable[Tensor]) -> Tensor:
    return reduce(torch.logical_and, each)


def _seen_by(true: Tensor, interval: tuple[Tensor, Tensor], step_m: int, step_n: int) -> Tensor:
    """Return whether some row of ``true``, in blocks of ``step_m x step_n`` pairs, is true within ``[first, last)`` of each key.

    Counts from the top need two reads per key (docs/decisions.md#block-status-by-counts).
    """
    first, last = interval
    if step_n == 1:
        start = torch.arange(0, true.shape[-2] * step_m, step_m, device=true.device).unsqueeze(-1)
        reached = (first.unsqueeze(-2) < start + step_m) & (last.unsqueeze(-2) > start) & (last > first).unsqueeze(-2)
        return (true & reached).any(-2)
    rows, columns = true.shape[-2:]
    above = torch.nn.functional.pad(true.cumsum(-2, dtype=torch.int32), (0, 0, 1, 0)).flatten(-2)
    column = torch.arange(first.shape[-1], device=true.device) // step_n
    shape = (*expr.broadcast_shape(true.shape[:2], first.shape[:2]), -1)

    def count(row: Tensor) -> Tensor:
        at = row.clamp(0, rows) * columns + column
        return above.expand(shape).gather(-1, at.expand(shape))

    return (count(-(-last // step_m)) > count(first // step_m)) & (last > first)


def _block_status(true: Tensor, rows: int, columns: int) -> Tensor:
    """Return the status of blocks of ``rows x columns`` of a bool tensor. The last blocks may be smaller."""
    pad = (0, -true.shape[-1] % columns, 0, -true.shape[-2] % rows)

    def blocks(t: Tensor) -> Tensor:
        return t.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))

    some = blocks(torch.nn.functional.pad(true, pad, value=False)).any(-1).any(-2)
    every = blocks(torch.nn.functional.pad(true, pad, value=True)).all(-1).all(-2)
    return some.to(torch.uint8) + (some & every).to(torch.uint8)


def _part_of(prepared: Tensor, grid: Grid) -> Tensor:
    """Return the grid's batch elements and heads of a tensor ``(batch|1, heads_q|1, ...)``."""
    prepared = prepared[grid.b] if prepared.shape[0] > 1 else prepared
    return prepared[:, grid.h] if prepared.shape[1] > 1 else prepared


def _coarsen(status: Tensor, block: int, lengths: tuple[int, int], tiles: tuple[int, int]) -> Tensor:
    """Return the status of ``tiles`` from that of the square blocks that each tile touches."""

    def touched(length: int, tile: int) -> tuple[Tensor, Tensor]:
        start = torch.arange(0, length, tile, device=status.device)
        return start // block, -(-(start + tile).clamp(max=length) // block)

    (r0, r1), (c0, c1) = (touched(length, tile) for length, tile in zip(lengths, tiles, strict=True))

    def count(chosen: Tensor) -> Tensor:
        total = torch.nn.functional.pad(chosen.int().cumsum(-1).cumsum(-2), (1, 0, 1, 0))

        def above(r: Tensor, c: Tensor) -> Tensor:
            return total[..., r.view(-1, 1), c.view(1, -1)]

        return above(r1, c1) - above(r0, c1) - above(r1, c0) + above(r0, c0)

    some, every = count(status != EMPTY) > 0, count(status != FULL) == 0
    return some.to(torch.uint8) + (some & every).to(torch.uint8)


def seen_keys(grid: Grid, group: int) -> Tensor | None:
    """Return the keys that some query of their batch element and head group sees: bool ``(b|1, heads_k|1, keys)``; None means all.

    Args:
        group: query heads per key head; ``grid.h`` holds whole groups.
    """
    if grid.region.everything:
        return None
    of_kinds, count = grid.alike()
    if count % group == 0 or group % count == 0:
        seen = _seen_keys(of_kinds, max(1, group // count))
        return each_head(seen, count // group) if count > group else seen
    return _seen_keys(grid, group)


_INTEGERS = {x.itemsize: x for x in (torch.int8, torch.int16, torch.int32, torch.int64)}


@dataclass
class SeenKeys:
    """What is kept of a mask to set k and v to zero where no query sees them.

    Attributes:
        seen: as :func:`seen_keys` returns it.
        ones: all bits of a key that is seen, none of any other: int64 ``(b|1, keys, heads_k|1, 1)``.
        asked: whether the device was asked whether all are seen, and what it says (:class:`tilewise.device.Later`).
    """

    seen: Tensor
    ones: Tensor
    asked: devices.Later | None = None

    @classmethod
    def of(cls, seen: Tensor) -> SeenKeys:
        return cls(seen, -seen.mT.unsqueeze(-1).long())

    def are_all(self) -> bool:
        """Return whether the device has reported that every key is seen; only a mask that comes again is asked."""
        if self.asked is None:
            self.asked = devices.Later()
            return False
        return self.asked(lambda: self.seen.all())

    def zeroed(self, x: Tensor) -> Tensor:
        """Return k or v, ``(batch, keys, heads_k, columns)``, with zeros for keys that no query sees, contiguous."""
        # Copying numbers of 64 bits takes about half the time of bf16's.
        steps = (x.storage_offset(), x.shape[-1], *x.stride()[:-1])
        fits = x.stride(-1) == 1 and not x.data_ptr() % 8 and not any(n * x.element_size() % 8 for n in steps)
        word = torch.int64 if fits else _INTEGERS[x.element_size()]
        made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.bitwise_and(x.view(word), self.ones if fits else self.ones.to(word), out=made.view(word))
        return made


def _seen_keys(grid: Grid, group: int) -> Tensor:
    """:func:`seen_keys` of a mask that hides some."""
    if grid.region.predicate is None:
        first, last = grid.query_interval(torch.arange(grid.keys, device=grid.b.device))
        seen = first < last
    elif grid.region.prepared is not None and grid.key_origin is None:
        seen = _part_of(grid.leaves[grid.region.prepared.seen_slot], grid)
    elif (found := _by_kernel(grid, *_SEEN_TILE, group)) is not None:
        return found[1]
    else:
        seen = _seen_by_predicate(grid)
    return seen if seen.shape[1] == 1 else seen.unflatten(1, (-1, group)).any(2)


def _seen_by_predicate(grid: Grid) -> Tensor:
    """Return the keys that the predicate shows to some query of their interval: bool ``(b|1, h|1, keys)``."""
    region = grid.region
    if region.selections:  # a query sees a key that it selected, or one that the mask without selections shows
        seen = selections.seen_by_entries(grid, region.selections)
        rest = selections.assume(region.predicate, {id(e): False for e in region.selections})
        if rest.op == "number":
            return seen
        return seen | _seen_by_predicate(replace(grid, region=replace(region, predicate=rest, prepared=None)))
    terms = monotone_terms(region)
    pairs = terms is None
    return _predicate_status(grid, PREPARED_BLOCK, PREPARED_BLOCK)[1] if pairs else _seen_by_terms(grid, terms)


def prepare(mask: Mask, q: Tensor, k: Tensor) -> Mask:
    """Return the mask with its predicate's status on blocks of ``PREPARED_BLOCK``, and with the keys that some query sees.

    ``q`` and ``k`` are tensors (batch, seqlen, heads, head_dim).

    Raises:
        ValueError: one is no tensor.
    """
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor):
            raise ValueError(
                f"prepare(q, k): {name} must be a tensor, got {type(x).__name__}; tilewise.jax takes a mask without prepare"
            )
    leaves = list(mask.leaves)
    kept = region(grouped(mask.text, q, k), tuple(range(len(leaves))))
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    grid = Grid.whole(kept, leaves, shape, q.device)
    if kept.predicate is None:
        blocks = (-(-shape[2] // PREPARED_BLOCK), -(-shape[3] // PREPARED_BLOCK))
        first, last = grid.query_interval(torch.arange(grid.keys, device=q.device))
        status = torch.full((1, 1, *blocks), FULL, dtype=torch.uint8, device=q.device)
        return with_lists(mask, PREPARED_BLOCK, shape, status, first < last)
    of_kinds, count = grid.alike()
    found = _by_kernel(of_kinds, PREPARED_BLOCK, PREPARED_BLOCK, 1)
    if found is not None:
        return with_lists(mask, PREPARED_BLOCK, shape, *[each_head(x, count) for x in found])
    if not kept.selections and monotone_terms(kept) is None:
        return with_lists(mask, PREPARED_BLOCK, shape, *_predicate_status(grid, PREPARED_BLOCK, PREPARED_BLOCK))
    status = known_status(grid, PREPARED_BLOCK, PREPARED_BLOCK)
    return with_lists(mask, PREPARED_BLOCK, shape, status, _seen_by_predicate(grid))
