"""Keys that queries were given (:func:`tilewise.masks.catalogue.selected`): the tiles and keys that they name, and their checks.

A selection is the part ``selected(leaf[b, h, (i + q) // block_q], (j + k) // block)`` of a predicate, where q and k are 0 but in a piece of
a larger attention. Of a piece that begins with a row or a block, it is ``i // block_q + q // block_q``, and so of keys. Everything here
follows from the entries: no pair is asked that nobody selected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise import expr, sizes
from tilewise.expr import Expr, number
from tilewise.masks.facts import granularity

Grid = Problem = Region = Any  # of tiles, problem and masks, which import this module
_CHUNK_ENTRIES = 1 << 20  # entries, or pairs, that are looked at at once
_LEAST_UNIT = 16  # keys; with smaller blocks no tile is called full


def keys_of_entry(selection: Expr) -> tuple[int, int]:
    """Return ``(block, start)``: entry n keeps the keys from ``n * block - start`` on."""
    return _quotient(selection.args[-1])


def queries_of_row(selection: Expr) -> tuple[int, int]:
    """Return ``(block_q, start)``: row r is for the queries from ``r * block_q - start`` on."""
    return _quotient(expr.indices(selection)[-1])


def _quotient(e: Expr) -> tuple[int, int]:
    """Return ``(n, start)`` of an index that is ``(symbol + start) // n``, however its sums are written."""
    (e, quotients), n = _less_number(e), 1
    if e.op == "floordiv":
        e, n = e.args[0], e.args[1].args[0]
    return n, quotients * n + _less_number(e)[1]


def _less_number(e: Expr) -> tuple[Expr, int]:
    return (e.args[0], e.args[1].args[0]) if e.op == "add" else (e, 0)


def assume(root: Expr, truths: Mapping[int, bool]) -> Expr:
    """Return an expression in which some parts, by the identity of their nodes, are known to be true or false."""

    def folded(e: Expr, inner: list[Expr]) -> Expr:
        if id(e) in truths:
            return number(truths[id(e)])
        for x, other in (inner, inner[::-1]) if e.op in ("and", "or") else ():
            if x.op == "number" and x.args[0] in (False, True):
                return other if x.args[0] == (e.op == "and") else x
        head = e.args[: len(e.args) - len(inner)]
        return Expr(e.op, (*head, *inner)) if inner else e

    return expr.fold(root, folded)


@lru_cache(maxsize=1024)
def by_marks(region: Region, leaves: int, keys: int) -> tuple[Region, tuple[tuple[int, int], ...]]:
    """Return a mask that reads a mark for each row and block in place of selections of long blocks.

    A mark says whether an entry of its row names the block. Marks take less memory than the bits of the tiles that they decide, and
    reading one takes a fraction of a search in a row of entries.

    Args:
        leaves: how many tensors the mask has. keys: seqlen_k.

    Returns:
        The mask, which reads marks as tensors from number ``leaves`` on, bool (.., row, block); and for each of these the slot of the
        entries and the number of blocks.
    """
    found: dict[tuple[int, int], int] = {}

    def folded(e: Expr, inner: list[Expr]) -> Expr:
        if e.op == "selected" and keys_of_entry(e)[0] >= _LEAST_UNIT:
            block, start = keys_of_entry(e)
            n = found.setdefault((e.args[0][1], -(-(keys + start) // block)), leaves + len(found))
            return Expr("lookup", (("bool", n), *e.args[1:]))
        head = e.args[: len(e.args) - len(inner)]
        return Expr(e.op, (*head, *inner)) if inner else e

    if not region.selections:
        return region, ()
    return replace(region, predicate=expr.fold(region.predicate, folded)), tuple(found)


def tile_bounds(grid: Grid, selection: Expr, tile_m: int, tile_n: int) -> tuple[Tensor, Tensor]:
    """Return whether a selection keeps some pair of each tile, and whether it keeps all: bool ``(b|1, h|1, query tiles, key tiles)``.

    A tile of which it keeps all pairs may be called otherwise.
    """
    block, start = keys_of_entry(selection)
    unit = math.gcd(tile_n, block, start) if grid.key_origin is None else 1
    whole = unit >= _LEAST_UNIT  # units that an entry keeps whole, or not at all
    unit = unit if whole else tile_n
    units, step, device = -(-grid.keys // unit), math.gcd(tile_m, granularity(selection, "i") or tile_m), grid.b.device
    some, every = [], []
    for lines, low, new in _chunks(grid, selection, step, tile_m):
        tiles, place = -(-(lines.stop - lines.start) // tile_m), units + 1
        at = torch.arange(0, lines.stop - lines.start, step, device=device).view(-1, 1) // tile_m * place
        high, new = low + block, new & (low + block > 0) & (low < grid.keys)
        count = low.new_zeros((*low.shape[:2], tiles * place))
        # +1 where the keys of an entry begin, and -1 behind them: the sum says how many rows keep a unit.
        for end, one in ((low.clamp(min=0) // unit, 1), ((high.clamp(max=grid.keys) - 1) // unit + 1, -1)):
            count.scatter_add_(2, (at + torch.where(new, end, units)).flatten(2), (new * one).flatten(2))
        count = count.unflatten(2, (tiles, place)).cumsum(-1)[..., :units]
        first = torch.arange(lines.start, lines.stop, tile_m, device=device).view(-1, 1)
        rows = -(-((first + tile_m).clamp(max=lines.stop) - first) // step)
        some.append(_by_tiles(count > 0, tile_n // unit, False).any(-1))
        every.append(_by_tiles(count == rows, tile_n // unit, True).all(-1) & whole)
    if not some:
        some = every = [torch.zeros(1, 1, 0, -(-grid.keys // tile_n), dtype=torch.bool, device=device)]
    back = _heads(grid, selection)[1]
    return tuple(x if back is None or not x.shape[2] else x[:, back] for x in (torch.cat(some, 2), torch.cat(every, 2)))


def most_tiles(selection: Expr, shape: Sequence[int], query_tiles: int, tile: tuple[int, int]) -> int:
    """Return a bound of the tiles that the entries of one head name; ``shape``: of their tensor, ``tile``: queries and keys."""
    (block, start), block_q, (tile_m, tile_n) = keys_of_entry(selection), granularity(selection, "i"), tile
    whole = start % block == 0 and (tile_n % block == 0 or block % tile_n == 0)
    touched = -(-block // tile_n) if whole else (block + tile_n - 2) // tile_n + 1
    cut = 0 if block_q and tile_m % block_q == 0 else query_tiles  # rows of entries with queries of one more tile
    rows = sizes.smaller(shape[-2], query_tiles * tile_m // (block_q or 1) + 1)  # of a piece, some of the tensor's
    return (rows + cut) * shape[-1] * touched


def _by_tiles(units: Tensor, size: int, value: bool) -> Tensor:
    return pad(units, (0, -units.shape[-1] % size), value=value).unflatten(-1, (-1, size))


def _heads(grid: Grid, selection: Expr) -> tuple[Tensor, Tensor | None]:
    """Return one query head of each row of entries, and which of these stands for each query head (None: one for all)."""
    index = [x for x in expr.indices(selection) if "h" in expr.depends_on(x)]
    if not index:
        return grid.h[:1], None
    if grid.h.device.type != "cpu":  # how many rows differ is not known without waiting for the device
        return grid.h, None
    row = grid.evaluate(index[0]).flatten()
    new = torch.cat([row.new_ones(1, dtype=torch.bool), row[1:] != row[:-1]])
    return grid.h[new], new.cumsum(0) - 1


def _chunks(grid: Grid, selection: Expr, step: int, whole: int) -> Iterator[tuple[range, Tensor, Tensor]]:
    """Yield some queries, ``whole`` ones or a multiple, with the first key of each entry of every ``step``-th.

    Yields:
        lines: the queries. low: in the grid's own keys, int64 ``(b|1, heads|1, lines, entries)``, a head for each row of entries. new:
        bool, whether the entry is one, and the first of its equals.
    """
    block, start = keys_of_entry(selection)
    start = start if grid.key_origin is None else start + grid.key_origin.view(-1, 1, 1, 1)
    heads, leaf = _heads(grid, selection)[0], grid.leaves[selection.args[0][1]]
    a_line = max(1, len(grid.b) * len(heads) * leaf.shape[-1])
    count = max(1, _CHUNK_ENTRIES * step // (a_line * whole)) * whole
    for first in range(0, grid.seqlen_q, count):
        lines = range(first, min(first + count, grid.seqlen_q))
        env = grid.env(_line(grid, lines, step)) | {"h": heads.view(1, -1, 1, 1)}
        entry = (
            expr.rows(leaf, expr.evaluate(expr.indices(selection), env, grid.leaves, torch.float32)).squeeze(-2).long()
        )
        new = (entry < expr.WRONG_ENTRY) & (pad(entry, (1, 0), value=-1)[..., :-1] != entry)
        low = entry * block - start
        yield lines, low, new.expand(low.shape)


def _line(grid: Grid, lines: range, step: int) -> Tensor:
    return torch.arange(lines.start, lines.stop, step, device=grid.b.device)


def seen_by_entries(grid: Grid, selections: Sequence[Expr]) -> Tensor:
    """Return the keys that the mask shows to a query that selected them: bool ``(b|1, h|1, keys)``."""
    # One place more, for pairs that are hidden.
    seen = torch.zeros(1, 1, grid.keys + 1, dtype=torch.bool, device=grid.b.device)
    origin = 0 if grid.key_origin is None else grid.key_origin.view(-1, 1, 1, 1)
    for selection in selections:
        inside, block = assume(grid.region.inside, {id(selection): True}), keys_of_entry(selection)[0]
        _, back = _heads(grid, selection)
        for lines, low, new in _chunks(grid, selection, 1, 1):
            for first in range(0, block, most := max(1, _CHUNK_ENTRIES // max(1, low.numel()))):
                key = low.unsqueeze(-1) + torch.arange(first, min(first + most, block), device=low.device)
                kept = (new.unsqueeze(-1) & (key >= 0) & (key < grid.keys)).flatten(3)
                key = key.flatten(3) if back is None else key.flatten(3)[:, back]
                kept = kept if back is None else kept[:, back]
                env = grid.env(_line(grid, lines, 1)) | {"j": key.clamp(0, grid.keys - 1) + origin}
                kept = kept & expr.evaluate([inside], env, grid.leaves, grid.dtype)[0]
                place = torch.where(kept, key, grid.keys).flatten(2)
                found = torch.zeros(*place.shape[:2], grid.keys + 1, dtype=torch.bool, device=seen.device)
                seen = seen | found.scatter_(2, place, True)
    return seen[..., : grid.keys]


def value_reasons(p: Problem, extras: Sequence[Tensor]) -> list[str]:
    """Return the reasons against entries that name no keys, and against too few rows for a packed sequence's queries."""
    found, spec = [], p.spec
    if not spec.whole_region.selections:
        return found
    queries, keys = (torch.tensor([n], device="cpu") for n in p.totals)
    if spec.page_slots:
        keys = extras[spec.page_slots[1]]
    if spec.cu_slots:
        queries, keys = extras[spec.cu_slots[0]].diff(), keys if spec.page_slots else extras[spec.cu_slots[1]].diff()
    for e in spec.whole_region.selections:
        rows, (block, _), block_q = extras[e.args[0][1]], keys_of_entry(e), granularity(e, "i")
        if not rows.numel():
            continue
        needed, blocks = (
            -(-lengths.to(rows.device, torch.int64) // size) for lengths, size in ((queries, block_q), (keys, block))
        )
        apart = rows.ndim == 4 and rows.shape[0] == len(blocks)  # a batch element's rows are those of its own sequence
        needed, blocks = (x.view(-1, 1, 1) if apart and len(x) > 1 else x.max() for x in (needed, blocks))
        # Of sorted rows, the first entry from which on there are no keys.
        limit = blocks.expand(rows.shape[:-1]).to(rows.dtype).unsqueeze(-1).contiguous()
        place = torch.searchsorted(rows.contiguous(), limit).clamp(max=rows.shape[-1] - 1)
        beyond = rows.gather(-1, place).squeeze(-1)
        used = torch.arange(rows.shape[-2], device=rows.device) < needed
        wrong = (beyond >= blocks) & (beyond < expr.NO_ENTRY) & used
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            entry = beyond[at]
            found.append(
                f"selected has an entry {'below -1' if entry == expr.WRONG_ENTRY else int(entry)} in row {list(at)}: one is -1, "
                f"for none, or the number of a block of {block} keys, of which there are {int(blocks.expand_as(wrong)[at])}"
            )
        if rows.shape[-2] < needed.max():
            found.append(
                f"the tensor of selected has {rows.shape[-2]} rows, the longest sequence needs {int(needed.max())}"
            )
    return found
