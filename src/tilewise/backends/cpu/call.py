"""A problem and its tensors as the struct that the library takes.

:class:`Prepared` is made once a problem and holds what follows from the problem alone. :class:`Bound` adds the tensors of one call,
and keeps alive what the struct points to.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, product

import torch
from torch import Tensor

from tilewise import dropout, expr
from tilewise.backends.base import Inputs, PerTensors, unit_last
from tilewise.backends.cpu import library, program
from tilewise.backends.cpu.config import Config
from tilewise.leaf_gradients import classify
from tilewise.masks.facts import as_band, blocks_of, every_key_seen, monotone_terms
from tilewise.masks.regions import Region as MaskRegion
from tilewise.planning.tiles import PARTIAL, Grid, TileMap, known_status, seen_keys
from tilewise.problem import Problem
from tilewise.spec import parse_spec

Blocks = tuple[int, int]
Window = tuple[int, int, int, int]
_WHOLE = 1 << 31  # a block that holds all queries or keys


@dataclass
class Region:
    """The mask of a call as arrays: the ends that a pass reads, tile states, and the keys that some query sees."""

    ends: dict[str, Tensor]
    status: Tensor | None = None
    status_at: Tensor | None = None
    status_head: Tensor | None = None
    seen: Tensor | None = None
    # Of a status that is partly known, with no key marked as seen: the library asks one pair of each such block.
    unlisted: Blocks | None = None
    # A mask that follows from the shapes serves all threads.
    listing: threading.RLock = field(default_factory=threading.RLock)


@dataclass(frozen=True)
class Decided:
    """The decisions for a problem.

    Attributes:
        isa, override: as of the backend.
        gathered: whether :mod:`tilewise.backends.cpu.gathered` runs it.
        numbers: the number fields of the struct.
        window: of :func:`window_of`.
        dtypes: of the scores and of the mask.
    """

    isa: str
    override: Config | None
    gathered: bool
    numbers: dict[str, int]
    window: Window | None
    dtypes: tuple[torch.dtype, torch.dtype]

    @classmethod
    def of(cls, p: Problem, isa: str, override: Config | None = None, selects: bool = False) -> Decided:
        dtypes = p.compute_dtype, p.spec.region.compared_in(p.extras)
        return cls(isa, override, selects, _numbers(p), window_of(p), dtypes)


class Prepared:
    """The part of a call that is the same for all calls of one problem."""

    def __init__(self, p: Problem, decided: Decided):
        self.p, self.decided = p, decided
        self.loaded = library.load()
        self._passes: dict[bool, tuple[program.Code, library.Call]] = {}
        self._tangents: dict[tuple[int, ...], tuple[program.Code, library.Call]] = {}
        self._regions = PerTensors()

    def tangent(self, moving: Mapping[int, int]) -> tuple[program.Code, library.Call]:
        """Return the program and the call of forward mode for leaves of these slots with tangents (:attr:`Directions.slots`)."""
        key = tuple(moving)
        if key not in self._tangents:
            code = program.compile_spec(self.p.spec, self.decided.dtypes, backward=False, moving=moving)
            # Of two threads that make one, the call of the first lives on.
            return self._tangents.setdefault(key, (code, self._call(_without_sizes(code), backward=False)))
        return self._tangents[key]

    def of_pass(self, backward: bool) -> tuple[program.Code, library.Call]:
        """Return the program and the call of a pass."""
        if backward not in self._passes:
            code, shared = _compiled(self.p.spec.source, self.decided.dtypes, backward)
            return self._passes.setdefault(backward, (code, self._call(shared, backward)))
        return self._passes[backward]

    def _call(self, shared: library.Call, backward: bool) -> library.Call:
        """The native call of a pass without the addresses of tensors, which each call adds."""
        p, d, call = self.p, self.decided, library.Call.from_buffer_copy(shared)
        own = {} if d.override is None else d.override.of_pass(backward)
        call.type, call.threads = library.TYPES[p.dtype], 1
        call.isa, call.softmax_scale = d.isa.encode(), p.softmax_scale
        for name, n in (d.numbers | own).items():
            setattr(call, name, n)
        if d.window is not None:
            call.window = d.window
        some = ctypes.addressof(call)  # for tiles it matters that a call has these, and not what is there
        if p.packed or p.paged:
            call.cu_seqlens_k = some
        if p.packed:
            call.cu_seqlens_q = some
        if p.paged:
            call.block_table, call.page_size = some, 1
        self.loaded.choose(call, backward)
        if not p.spec.lookups:  # no leaf of a score has sums of its own, so that bits are the same
            call.shares = own.get("shares", 0)  # 0: by the threads of a call
        return call

    def config(self) -> Config:
        """Return the tiles of both passes."""
        d, shared = self.decided, _compiled(self.p.spec.source, self.decided.dtypes, False)[1]
        there, back = (self._call(shared, backward) for backward in (False, True))
        heads = there.heads_per_item
        tiles = there.tile_m, there.tile_n, heads, back.tile_m, back.tile_n, there.split, back.shares
        return Config(d.isa, *tiles, gathered=d.gathered, one_order=self.p.spec.everywhere)

    def tile(self, backward: bool) -> Blocks:
        call = self.of_pass(backward)[1]
        return call.tile_m, call.tile_n

    def region(self, t: Inputs, backward: bool) -> Region:
        p = self.p
        if p.spec.region.everything or self.decided.window is not None:
            return Region({})
        if p.packed or p.paged:
            return self._region(t, backward)
        return self._regions.of(backward, [t.leaves[n] for n in p.spec.mask_slots], lambda: self._region(t, backward))

    def _region(self, t: Inputs, backward: bool) -> Region:
        p, leaves = self.p, t.leaves
        if p.paged and p.spec.region.predicate is None:
            return Region(_paged_ends(p, t) if p.batch else {})
        tile = self.tile(backward)
        heads = torch.arange(p.heads_q)
        native = _blocks_to_list(p.spec.region)
        if not p.packed and not p.paged:
            grid = Grid(p.spec.region, leaves, p.seqlen_q, p.seqlen_k, torch.arange(p.batch), heads, p.seqlen_k)
            return _stacked([_region_of(grid, p, tile, backward, native)], p.batch, native)
        parts = []
        for b, (nq, nk) in enumerate(_lengths(p, t)):
            grid = Grid(p.spec.region, leaves, nq, nk, torch.tensor([b]), heads, nk)
            parts.append(_region_of(grid, p, tile, backward, native))
        return _stacked(parts, p.batch, native)


@lru_cache(maxsize=512)
def _compiled(spec: str, dtypes: tuple[torch.dtype, torch.dtype], backward: bool) -> tuple[program.Code, library.Call]:
    """Return the program of a pass for all calls of a spec, and a struct that has it."""
    code = program.compile_spec(parse_spec(spec), dtypes, backward)
    return code, _without_sizes(code)


def _without_sizes(code: program.Code) -> library.Call:
    """Return the struct of a call with nothing but its program."""
    call = library.Call(version=library.VERSION)
    native = call.program
    register = lambda v: -1 if v is None else v.register  # noqa: E731
    native.registers = code.registers
    native.raw, native.score = register(code.raw), register(code.score)
    native.keep, native.slope = register(code.keep), register(code.slope)
    if code.steps:
        native.code = code.instructions = _instructions(code, library.load().operations)
    for part, level in product(range(3), range(4)):
        chosen = [n for n, x in enumerate(code.steps) if (x.part, x.out.level) == (part, level)]
        native.range[part][level][:] = (chosen[0], chosen[-1] + 1) if chosen else (0, 0)
    return call


def _numbers(p: Problem) -> dict[str, int]:
    """Return the number fields of the struct that no pass changes."""
    found = {name: getattr(p, name) for name in library.SIZES}
    found |= {"lse_batch": 0 if p.packed else p.heads_q * p.seqlen_q, "lse_head": p.seqlen_q}
    found |= {"one_order": p.spec.everywhere, "deterministic": p.spec.deterministic}
    if p.spec.dropout_p:
        q_start, k_start = p.starts
        found |= {"keep_below": dropout.threshold(p.spec.dropout_p), "q_start": q_start, "k_start": k_start}
    return found


def window_of(p: Problem) -> Window | None:
    """Return the ends that count, 1 and 2, and the keys that a query sees to its left and to its right, or None for other masks."""
    region, off = p.spec.region, None if p.packed or p.paged else p.seqlen_k - p.seqlen_q
    if region.prepared is not None or region.everything:
        return None
    band = as_band(region, off, p.seqlen_k)
    if band is None or band.start != 0 or band.stop != p.seqlen_k:
        return None
    left, right = 0 if band.lo is None else (off or 0) - band.lo, 0 if band.hi is None else band.hi - 1 - (off or 0)
    return (band.lo is not None) + 2 * (band.hi is not None), 0, left, right


def _lengths(p: Problem, t: Inputs) -> list[tuple[int, int]]:
    """Return the numbers of queries and keys of each packed or paged sequence."""

    def packed(cu: Tensor, total: int) -> list[int]:
        ends = [min(x, total) for x in cu.tolist()]
        return [end - start for start, end in pairwise(ends)]

    queries = packed(t.cu_seqlens_q, p.seqlen_q) if p.packed else [p.seqlen_q] * p.batch
    keys = t.seqlens_k.tolist() if p.paged else packed(t.cu_seqlens_k, p.seqlen_k)
    return list(zip(queries, keys, strict=True))


def _paged_ends(p: Problem, t: Inputs) -> dict[str, Tensor]:
    """Return the ends of all rows of a paged call at once, int32 ``(1, heads|1, rows)``. The sequences' lengths are tensors here."""
    if p.packed:
        row, cu = torch.arange(p.seqlen_q), t.cu_seqlens_q.long()
        b = torch.searchsorted(cu[1:], row, right=True).clamp(max=max(p.batch - 1, 0))
        i, nq = row - cu[b], cu.diff()[b]
    else:
        b, i = torch.arange(p.batch).repeat_interleave(p.seqlen_q), torch.arange(p.seqlen_q).repeat(p.batch)
        nq = torch.tensor(p.seqlen_q)
    nk, h = t.seqlens_k.long()[b], torch.arange(p.heads_q).view(-1, 1)
    env = {"b": b, "h": h, "i": i, "seqlen_q": nq, "seqlen_k": nk, "off": nk - nq}
    written = {name: e for name, e in (("lo", p.spec.region.lo), ("hi", p.spec.region.hi)) if e is not None}
    ends = expr.evaluate(list(written.values()), env, t.leaves, torch.float32)
    inside = [end.long().clamp(min=0).minimum(nk) for end in ends]
    return {
        name: end.expand(*end.shape[:-1], len(i)).reshape(1, math.prod(end.shape[:-1]), len(i)).int()
        for name, end in zip(written, inside, strict=True)
    }


@lru_cache(maxsize=1024)
def _blocks_to_list(kept: MaskRegion) -> Blocks | None:
    """Return the size of the blocks on which the mask's predicate is constant, so that the library can list its tiles.

    ``(64, 64)`` means that it reads ``i // 64`` and ``j // 64`` alone, ``(1, 1)`` that each pair must be asked. None means that there is
    no predicate, that its tiles are prepared, or that their corners decide.
    """
    if kept.predicate is None or kept.prepared is not None or monotone_terms(kept) is not None:
        return None
    queries, keys = (size or _WHOLE for size in blocks_of(kept.predicate))
    return (1, 1) if 1 in (queries, keys) else (queries, keys)


def _region_of(grid: Grid, p: Problem, tile: tuple[int, int], backward: bool, native: Blocks | None) -> Region:
    """Return the arrays of one grid, each ``(b|1, heads|1, ...)``."""
    ends = {}
    if backward:
        ends["first"], ends["last"] = grid.query_interval(torch.arange(grid.keys))
    if native is not None or not backward:  # listing reads rows
        ends["lo"], ends["hi"] = grid.key_interval(torch.arange(grid.seqlen_q))
    if native is not None:
        status, seen = _unlisted(grid, p, tile, native)
        return Region(ends, status, seen=seen)
    status = None
    if grid.region.predicate is not None:
        status = TileMap.build(grid, *tile, by_columns=backward).status
    every = not p.packed and not p.paged and every_key_seen(grid.region, grid.seqlen_q, grid.seqlen_k)
    seen = None if every else seen_keys(grid, p.group)
    return Region(ends, status, seen=seen)


def _unlisted(grid: Grid, p: Problem, tile: tuple[int, int], native: Blocks) -> tuple[Tensor, Tensor]:
    """Return arrays for the library to fill: the states of tiles, and the seen keys, with none marked.

    If it would ask every pair of several tiles, states that parts of the mask decide are filled in. Arrays have one entry for all b or h
    that they do not depend on."""
    symbols = expr.depends_on(*grid.region.parts)
    batch, heads = (len(grid.b) if "b" in symbols else 1), (p.heads_q if "h" in symbols else 1)
    tiles = (-(-grid.seqlen_q // tile[0]), -(-grid.keys // tile[1]))
    status = torch.full((batch, heads, *tiles), PARTIAL, dtype=torch.uint8)
    if native == (1, 1) and math.prod(tiles) > 1:
        status.copy_(known_status(grid, *tile))
    return status, torch.zeros((batch, max(1, heads // p.group), grid.keys), dtype=torch.uint8)


def _stacked(parts: list[Region], batch: int, unlisted: Blocks | None) -> Region:
    """Return one grid of the whole batch, or one of each packed sequence with their lines concatenated."""
    if not parts:
        return Region({})
    join = lambda tensors: _joined(tensors, len(tensors) > 1)  # noqa: E731
    ends = {name: join([part.ends[name].int() for part in parts]) for name in parts[0].ends}
    seen = None
    if parts[0].seen is not None:
        seen = join([part.seen.to(torch.uint8) for part in parts])
        seen = None if unlisted is None and bool(seen.all()) else seen
    if parts[0].status is None:
        return Region(ends, seen=seen)
    maps = [part.status for part in parts]
    at, per_head, total = [], [], 0
    for n in range(batch):
        status = maps[n if len(maps) > 1 else 0]
        tiles = status.shape[2] * status.shape[3]
        rows = status.shape[1] * tiles
        shared = len(maps) == 1 and status.shape[0] == 1
        at.append(0 if shared else total)
        per_head.append(tiles if status.shape[1] > 1 else 0)
        total += rows
    flat = torch.cat([m.reshape(-1) for m in maps])
    return Region(ends, flat, torch.tensor(at), torch.tensor(per_head), seen, unlisted)


def _joined(tensors: list[Tensor], packed: bool) -> Tensor:
    """Return ``(b|1, heads|1, lines)``, contiguous. The lines of packed sequences are concatenated."""
    if not packed:
        return tensors[0].contiguous()
    heads = max(t.shape[1] for t in tensors)
    return torch.cat([t.expand(1, heads, -1) for t in tensors], 2).contiguous()


class Bound:
    """The struct of one call: that of the pass, with the addresses of this call's tensors, which ``keep`` keeps alive.

    Args:
        moving: of forward mode, as in :meth:`Prepared.tangent`. The tangents of leaves follow the leaves.
    """

    def __init__(self, prepared: Prepared, t: Inputs, backward: bool, moving: Mapping[int, int] | None = None):
        self.prepared, self.t, p = prepared, t, prepared.p
        self.packed, self.region = p.packed, prepared.region(t, backward)
        self.code, shared = prepared.of_pass(backward) if moving is None else prepared.tangent(moving)
        call = self.call = library.Call.from_buffer_copy(shared)
        self.keep: list[object] = []
        call.threads = torch.get_num_threads()
        call.q = self.tensor(unit_last(t.q))
        call.k, call.v = (self.tensor(unit_last(x), self.packed and not p.paged) for x in (t.k, t.v))
        if self.packed:
            call.cu_seqlens_q = self.data(t.cu_seqlens_q.long())
        if p.paged:
            self._bind_pages()
        elif self.packed:
            call.cu_seqlens_k = self.data(t.cu_seqlens_k.long())
        if t.sink is not None:
            call.sink = self.data(t.sink.to(p.compute_dtype))
        if p.spec.dropout_p:
            call.seed = t.seed.item() & (2**64 - 1)
        self._bind_region()
        if self.code.steps:
            self._bind_leaves()

    def data(self, x: Tensor) -> int:
        """Keep a contiguous tensor, and return its address."""
        x = x.contiguous()
        self.keep.append(x)
        return x.data_ptr()

    def tensor(self, x: Tensor, packed: bool | None = None) -> library.Tensor:
        """A tensor laid out as q, unless ``packed`` says otherwise."""
        self.keep.append(x)
        packed = self.packed if packed is None else packed
        batch, row, head = (0, *x.stride()[:2]) if packed else x.stride()[:3]
        return library.Tensor(x.data_ptr(), batch, row, head)

    def _bind_pages(self) -> None:
        call, t = self.call, self.t
        # An empty tensor has no address, and the library tells by an address that there are pages.
        table = unit_last(t.block_table) if t.block_table.numel() else t.block_table.new_zeros(1, 1)
        call.block_table, call.table_row, call.page_size = table.data_ptr(), table.stride(0), t.k.shape[1]
        call.cu_seqlens_k = self.data(torch.nn.functional.pad(t.seqlens_k.cumsum(0, dtype=torch.int64), (1, 0)))
        self.keep.append(table)

    def _bind_region(self) -> None:
        call, region = self.call, self.region
        stride = lambda x, axis: x.stride(axis) if x.shape[axis] > 1 else 0  # noqa: E731
        p = self.prepared.p
        lines = p.seqlen_q if p.paged and not p.packed else 0  # of a sequence, within those of all
        for name, x in region.ends.items():
            setattr(call, name, library.Ends(x.data_ptr(), stride(x, 0) or lines, stride(x, 1)))
        if region.status is not None:
            call.status, call.status_at = region.status.data_ptr(), region.status_at.data_ptr()
            call.status_head = region.status_head.data_ptr()
        if region.seen is not None:
            call.seen, call.seen_batch = region.seen.data_ptr(), stride(region.seen, 0)
            call.seen_head = stride(region.seen, 1)

    def _bind_leaves(self) -> None:
        leaves = (library.Leaf * max(len(self.t.leaves), 1))()
        used = {x.leaf for x in self.code.steps if x.op in expr.READS}
        for slot in used:
            leaf = self.t.leaves[slot]
            self.keep.append(leaf)
            leaves[slot].data, leaves[slot].type, leaves[slot].dims = (
                leaf.data_ptr(),
                library.TYPES[leaf.dtype],
                leaf.ndim,
            )
            leaves[slot].size[: leaf.ndim], leaves[slot].stride[: leaf.ndim] = leaf.shape, leaf.stride()
        self.call.program.leaves = leaves
        self.keep.append(leaves)

    def run(self, name: str, *more: ctypes.Structure) -> None:
        region, run = self.region, self.prepared.loaded.run
        with region.listing:
            if region.unlisted:
                run("list", self.call, *region.unlisted)
                region.unlisted = None
        run(name, self.call, *more)


def _instructions(code: program.Code, numbers: dict[str, int]) -> ctypes.Array:
    out = (library.Instruction * len(code.steps))()
    for x, step in zip(out, code.steps, strict=True):
        x.op, x.type, x.out = numbers[step.op], step.type, step.out.register
        x.number, x.integer = step.number, step.integer
        if step.op in expr.READS:
            x.b, x.dims = step.leaf, len(step.modes)
            for n, (a, mode) in enumerate(zip(step.args, step.modes, strict=False)):
                x.index[n], x.mode[n] = a.register, mode
            if step.op == "selected":
                x.a = step.args[-1].register
        else:
            for name, a in zip("abc", step.args, strict=False):
                setattr(x, name, a.register)
    return out


# -- Gradients of leaves -------------------------------------------------------------------------------------------

PRIVATE_ELEMENTS = 1 << 21  # fp64 sums of all groups of work units together: 16 MiB


@dataclass
class LeafSums:
    """The arrays in which the gradients of the score's leaves are summed.

    A small leaf has fp64 sums in every group of work units, which are added in order afterwards. A large one has one array. Units that
    could write to the same place of it run one after the other (``serial_batch``, ``serial_head``).
    """

    sums: dict[int, Tensor]
    wide: dict[int, bool]
    groups: int
    serial_batch: bool
    serial_head: bool
    shares: int

    @classmethod
    def plan(cls, p: Problem, leaves: Sequence[Tensor], code: program.Code, shares: int) -> LeafSums:
        slots = sorted({read.slot for read in code.reads})
        groups = p.batch * p.heads_k * shares
        large = [n for n in slots if leaves[n].numel() * max(groups, 1) > PRIVATE_ELEMENTS]
        apart = frozenset("bhj").intersection(*[read.apart for read in classify(p) if read.slot in large])
        serial_batch, serial_head = "b" not in apart and p.batch > 1, "h" not in apart and p.heads_k > 1
        shares = shares if "j" in apart else 1
        groups = (1 if serial_batch else p.batch) * (1 if serial_head else p.heads_k) * shares
        wide = {n: n not in large for n in slots}
        shape = lambda n: (groups if wide[n] else 1, leaves[n].numel())  # noqa: E731
        dtype = lambda n: torch.float64 if wide[n] else p.compute_dtype  # noqa: E731
        sums = {n: torch.zeros(shape(n), dtype=dtype(n)) for n in slots}
        return cls(sums, wide, groups, serial_batch, serial_head, shares)

    def bind(self, bound: Bound) -> None:
        call, code = bound.call, bound.code
        call.serial_batch, call.serial_head, call.shares = self.serial_batch, self.serial_head, self.shares
        if not code.reads:
            return
        native = (library.LeafGradient * len(code.reads))()
        for x, read in zip(native, code.reads, strict=True):
            shape, sums = bound.t.leaves[read.slot].shape, self.sums[read.slot]
            x.data, x.wide, x.slope, x.dims = sums.data_ptr(), self.wide[read.slot], read.slope.register, len(shape)
            x.group_stride = sums.shape[1] if self.wide[read.slot] else 0
            x.size[: len(shape)] = shape
            x.stride[: len(shape)] = torch.empty(shape, device="meta").stride()
            for n, v in enumerate(read.index):
                x.index[n], x.mode[n] = v.register, read.modes[n]
        call.program.gradients, call.program.leaf_gradients = native, len(code.reads)
        bound.keep.append(native)

    def result(self, leaves: Sequence[Tensor]) -> dict[int, Tensor]:
        total = lambda x: x[0] if x.shape[0] == 1 else x.sum(0)  # noqa: E731
        return {n: total(x).view(leaves[n].shape).to(leaves[n].dtype) for n, x in self.sums.items()}
