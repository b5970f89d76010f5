"""The kernels that plan masks for every backend of a GPU (:mod:`tilewise.planning.planner`), and their launches: the state of every tile,
the keys that some query sees, lists of tiles and the bits of partial ones, and the ends of intervals. They need nothing of attention.

Their kernels are those of ``kernels.tile_map``, ``kernels.tile_lists`` and ``kernels.tile_bits``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise import expr, selections
from tilewise.backends.base import MOST_BYTES, argument_bytes
from tilewise.backends.triton import device_reasons
from tilewise.backends.triton.host import runtime
from tilewise.backends.triton.host.facts import Facts
from tilewise.backends.triton.host.plan import extents_of
from tilewise.backends.triton.kernels.emit import Emitted, emit_mask
from tilewise.backends.triton.kernels.writer import OPERATIONS
from tilewise.backends.triton.tiles import MIN_WIDTH, Tiles
from tilewise.caching import cached_property
from tilewise.expr import Expr, apply, number, symbol
from tilewise.masks.facts import granularity
from tilewise.masks.regions import Region
from tilewise.planning.bit_tiles import LINES, RESERVED, THREADS, Layout, Sections
from tilewise.planning.planner import MOST_ENTRIES, Kind, Sequences
from tilewise.planning.tiles import Grid
from tilewise.problem import TensorFacts

# Rows of a block of pairs that a program evaluates at once: with 128 keys, 16 pairs a thread. With 32 rows registers
# keep programs off a multiprocessor: on an H200, 16k x 16k pairs of an integer division took 0.73 ms instead of 0.52,
# a union of intervals 0.073 instead of 0.042.
MOST_ROWS = 16
# Programs of a launch, where tiles are that many: a program takes several. On an H200 65,536 programs of a tile each took 105 us to judge
# the tiles of documents, and 140 us to write the bits of the 0.6 % that are partial.
PROGRAMS = 8192
SHARED_MEMORY = 1024  # bytes; a block's columns are summed up across warps
SORTED_MEMORY = 4 * MOST_ENTRIES  # bytes of the kernel that sorts
PROGRAM = Tiles(MOST_ROWS, 128, 4, 1)
_LINES = 128  # of a program that writes ends


@lru_cache(maxsize=64)  # planning a new mask of a known text takes a few launches
def launches_on(device: torch.device) -> bool:
    """Whether kernels run on a device here."""
    return not device_reasons(device)


@lru_cache(maxsize=1024)
def can_be_written(region: Region, b: int, h: int, i: int, j: int) -> bool:
    """Whether kernels have every operation of a mask, and compute it in 32 bits for these sizes."""
    known = expr.operations_of(*region.parts) <= OPERATIONS
    short = argument_bytes(region.parts) <= MOST_BYTES
    return known and short and not expr.beyond_32_bits(region.parts, {"b": b, "h": h, "i": i, "j": j})


def _heads_of(kind: Kind, parts: tuple[Expr | None, ...]) -> tuple[int, int]:
    """How many batch elements and heads have tiles, or ends, of their own: 1 where these parts of the mask are the same for all."""
    needs = expr.depends_on(*[e for e in parts if e is not None])
    return kind.batch if "b" in needs else 1, kind.heads if "h" in needs else 1


def judged_tiles(grid: Grid, tile_m: int, tile_n: int, group: int | None = None) -> tuple[Tensor, Tensor | None]:
    """The state of every tile by interval and predicate, exactly, and the keys that some query sees.

    Args:
        group: the query heads that share a key head; None where the keys are not asked for.

    Returns:
        uint8 ``(b|1, h|1, query tiles, key tiles)``, and bool ``(b|1, heads_k|1, keys)`` or None.
    """
    launch = _judging(Kind.of(grid), (tile_m, tile_n), group, PROGRAMS)
    (status, seen), device = launch.made, grid.b.device
    status = torch.empty(status, dtype=torch.uint8, device=device)
    seen = None if seen is None else torch.zeros(seen, dtype=torch.bool, device=device)
    of_bytes = None if seen is None else seen.view(torch.uint8)
    launch(runtime.kernels().MapTensors(status, of_bytes, grid.b, grid.h, launch.read(grid)))
    return status, seen


def listed_tiles(status: Tensor, by_columns: bool) -> tuple[Tensor, Tensor]:
    """The lists of tiles of contiguous states, partial ones first, and their counts (:meth:`tilewise.planning.tiles.TileMap.visits`)."""
    launch = _listing_alone(tuple(status.shape), by_columns, status.device)
    blocks, counts = (torch.empty(shape, dtype=torch.int32, device=status.device) for shape in launch.made)
    launch(runtime.kernels().ListTensors(status, counts, blocks, None, None, None, status, ()))
    return blocks, counts


@dataclass(eq=False)
class MaskLaunch(runtime.Launch):
    """A launch that is kept for the masks of one text, in tensors of the same kinds and sizes: everything of it but the tensors
    (docs/decisions.md#repeated-calls).

    Attributes:
        numbers: sizes and numbers, as kernels take them (:func:`runtime.opaque`).
        slots: the mask's tensors that the kernel reads. made: the shapes of tensors that each launch makes.
    """

    numbers: tuple[Any, Any]
    facts: Facts
    slots: tuple[int, ...] = ()
    made: tuple[tuple[int, ...] | None, ...] = ()

    @classmethod
    def of(
        cls,
        kernel: Any,
        grid: tuple[int, ...],
        sizes: Any,
        facts: Facts,
        emitted: Emitted | None = None,
        made=(),
        slots=(),
        tiles: Tiles = PROGRAM,
    ) -> MaskLaunch:
        numbers, slots = ((), slots) if emitted is None else (emitted.numbers, emitted.slots)
        numbers = runtime.opaque(sizes), runtime.opaque(numbers)
        return cls(kernel, (*grid, 1, 1)[:3], tiles, numbers, facts, slots, made)

    def read(self, grid: Grid) -> tuple[Tensor, ...]:
        """The mask's tensors that the kernel reads."""
        return tuple([grid.leaves[n] for n in self.slots])

    def __call__(self, tensors: Any) -> None:
        with runtime.on_device(tensors[0]):
            self.start(runtime.aligned(tensors), tensors, *self.numbers, self.facts)


class Place(NamedTuple):
    """A tensor of a launch: the number of its memory (:class:`MaskLaunches`), its first byte there, a multiple of 16, its dtype and its
    shape."""

    memory: int
    first: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, memories: Sequence[Tensor]) -> Tensor:
        bytes_there = memories[self.memory].view(-1).view(torch.uint8)
        return bytes_there[self.first : self.first + self.size].view(self.dtype).view(self.shape)


MADE, SCRATCH, INDEX, LEAVES = range(4)  # the first memories of a launch


@dataclass(eq=False)
class MaskLaunches:
    """Launches that make one tensor of other tensors, kept as each of them is.

    Memories are that of the result, one for what nobody reads afterwards, the numbers from 0 on, and the given tensors, a mask's by slot.

    Attributes:
        result: the place of what is made, all of its memory. scratch: bytes of the second memory. numbers: how many there are.
        steps: each launch with the tuple of its tensors, a :class:`Place` each; the last is of those that it reads by slot, and empty.
        zeros: the first byte of the result from which on launches count on zeros. compiled: whether the kernels are known.
        own: tensors by slot that launches make for later ones; the others are given.
    """

    result: Place
    steps: tuple[tuple[MaskLaunch, Any], ...]
    scratch: int = 0
    numbers: int = 0
    zeros: int | None = None
    compiled: bool = False
    own: dict[int, Place] = field(default_factory=dict)

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """The slots of the tensors that launches read."""
        return tuple({x[0] - LEAVES for x in self.placed[0] if x is not None and x[0] >= LEAVES})

    def __call__(self, leaves: Sequence[Tensor], device: torch.device) -> Tensor:
        result = torch.empty(self.result.shape, dtype=self.result.dtype, device=device)
        if self.zeros is not None:
            result[self.zeros // result.itemsize :].zero_()
        space = devices.workspace(device, self.scratch) if self.scratch else result
        numbers = devices.indices(device, self.numbers) if self.numbers else result
        at, places = [x.data_ptr() for x in (result, space, numbers, *leaves)], 0
        for n in self.reads:
            places |= at[LEAVES + n]
        if places % 16 or not self.compiled or runtime.current() != device.index:
            # With tensors, of which Triton learns what to compile.
            for launch, tensors in self.tensors((result, space, numbers, *leaves)):
                launch(tensors)
            self.compiled = all(launch.compiled is not None for launch, _ in self.steps)
            return result
        places, order = self.placed
        at, ready = [None if x is None else at[x[0]] + x[1] for x in places], []
        for launch, first, leaf, stop in order:
            tensors = *at[first:leaf], tuple(at[leaf:stop])
            ready.append((launch.compiled, launch.grid, (tensors, *launch.numbers, launch.facts)))
        runtime.run_each(ready)
        return result

    @cached_property
    def placed(self) -> tuple[list, list]:
        """The memory and the first byte there of all tensors of all launches; and where those of each begin, its leaves, and end."""
        places, order = [], []
        for launch, (*tensors, _) in self.steps:
            first, leaf = len(places), len(places) + len(tensors)
            places += [*tensors, *[self.own.get(n, (LEAVES + n, 0)) for n in launch.slots]]
            order.append((launch, first, leaf, len(places)))
        return places, order

    def tensors(self, memories: Sequence[Tensor]) -> Iterator[tuple[MaskLaunch, Any]]:
        """Each launch with its tensors in these memories."""
        for launch, places in self.steps:
            *found, _ = places
            found = [None if x is None else x.of(memories) for x in found]
            read = [self.own[n].of(memories) if n in self.own else memories[LEAVES + n] for n in launch.slots]
            yield launch, type(places)(*found, tuple(read))


def starts(kind: Kind, parts: int) -> MaskLaunches:
    """The launch that makes the starts of sequences (:class:`tilewise.planning.planner.Planner`)."""
    return _of_elements(kind, "starts", parts, kind.lengths[1])


def own_keys(kind: Kind, page_rows: int) -> MaskLaunches:
    """The launch that makes the keys of single queries."""
    return _of_elements(kind, "own_keys", 0, page_rows)


@lru_cache(maxsize=1024)
def _of_elements(kind: Kind, kernel: str, parts: int, rows: int) -> MaskLaunches:
    """The launch of a kernel with a program for each batch element, and ``rows`` of k for each."""
    emitted = emit_mask(Region(lo=kind.region.lo, hi=kind.region.hi), _leaves(kind), kind.lengths)
    kernels, count = runtime.kernels(), kind.batch * parts + 1 if parts else kind.batch
    sizes = kernels.KeysSizes(count, parts, rows, *kind.lengths, _extents(kind, emitted))
    launch = MaskLaunch.of(getattr(kernels, kernel), (kind.batch,), sizes, Facts(**emitted.functions), emitted)
    result = Place(MADE, 0, torch.int32, (2, count))
    return MaskLaunches(result, ((launch, kernels.KeysTensors(result, ())),))


@lru_cache(maxsize=1024)
def runs(ids: tuple, device: torch.device) -> MaskLaunches:
    """The launch that makes the runs of equal ids, of that shape, stride and dtype."""
    kernels, (shape, strides, _) = runtime.kernels(), ids
    batch, places = (1, *shape)[-2:]
    sizes, result = (
        kernels.RunsSizes(batch * places, places, (0, *strides)[-2:]),
        Place(MADE, 0, torch.int32, (2, *shape)),
    )
    programs = (batch * -(-places // kernels.RUNS.value),)
    launch = MaskLaunch.of(kernels.runs, programs, sizes, Facts(), slots=(0,))
    return MaskLaunches(result, ((launch, kernels.KeysTensors(result, ())),))


@lru_cache(maxsize=1024)
def sorted_entries(entries: tuple, device: torch.device) -> MaskLaunches:
    """The launch that puts entries of that shape, stride and dtype in order."""
    kernels, (shape, strides, _) = runtime.kernels(), entries
    batch, heads, rows, count = shape
    width = max(MIN_WIDTH, 1 << (count - 1).bit_length())
    facts, result = Facts(width=width), Place(MADE, 0, torch.int32, tuple(shape))
    sizes = kernels.SortedSizes(heads, rows, count, tuple(strides))
    # With more numbers a thread a kernel takes six times as long to compile (docs/tried.md).
    tiles = replace(PROGRAM, num_warps=max(1, width // 128))
    launch = MaskLaunch.of(kernels.sorted_entries, (batch * heads * rows,), sizes, facts, slots=(0,), tiles=tiles)
    return MaskLaunches(result, ((launch, kernels.KeysTensors(result, ())),))


@lru_cache(maxsize=1024)
def list_lines(kind: Kind, sequences: Sequences) -> MaskLaunches:
    """The launch that makes the lines of lists."""
    kernels, selection = runtime.kernels(), kind.region.predicate
    leaf = selection.args[0][1]
    sizes, place = kind.tensors[leaf][0], number(0)
    for index, size in zip(expr.indices(selection), sizes, strict=False):
        place = apply("add", apply("mul", place, number(size)), index)
    region = Region(lo=kind.region.lo, hi=kind.region.hi, first=expr.substitute(place, {"i": symbol("j")}))
    emitted = emit_mask(region, _leaves(kind), kind.lengths)
    found = kernels.LinesSizes(
        batch=kind.batch,
        heads_k=kind.heads // sequences.group,
        group=sequences.group,
        rows=sequences.rows,
        lists=math.prod(sizes[:-1]),
        seqlen_q=kind.lengths[0],
        seqlen_k=kind.lengths[1],
        extents=_extents(kind, emitted),
    )
    lengths = [
        None if n is None else Place(LEAVES + n, 0, kind.tensors[n][2], tuple(kind.tensors[n][0]))
        for n in (sequences.cu_q, sequences.cu_k, sequences.lengths)
    ]
    count = kind.batch + (sequences.cu_q is not None)
    programs = count * found.heads_k, max(1, min(-(-kind.lengths[0] // _LINES), PROGRAMS // count))
    result = Place(MADE, 0, torch.int32, (sequences.rows, found.heads_k, 4))
    launch = MaskLaunch.of(kernels.list_lines, programs, found, Facts(**emitted.functions), emitted)
    return MaskLaunches(result, ((launch, kernels.LinesTensors(result, *lengths, ())),))


def all_of_bits(
    kind: Kind, layout: Layout, crossing: int, by_columns: bool, sections: Sections, sharing: int
) -> MaskLaunches | None:
    """The launches that make the tiles of a whole mask as they lie in their memory, in tiles of so many crossing lines, by columns or not;
    None: the states of tiles are not told apart as the layout does. ``sharing``: the query heads of a key head, where the keys that are
    seen are asked for too."""
    kernels, given = runtime.kernels(), len(kind.tensors)
    kind, marking = _marking(kind)
    tile = (crossing, LINES) if by_columns else (LINES, crossing)
    judge = _judging(kind, tile, sharing or None, PROGRAMS, layout.alike)
    told = layout.batch, layout.heads // layout.alike
    if judge.made[0][:2] != told or (sharing and judge.made[1] != layout.seen):
        return None
    places, shapes = layout.places, layout.shapes
    made = {name: Place(MADE, 4 * places[name], torch.int32, shape) for name, shape in shapes.items()}
    ragged = kind.lengths[1] % tile[1] > 0
    of_lists = _listing(layout, ragged, by_columns, sections, kind.device)
    scratch: list[Place] = []
    for dtype, shape in (
        (torch.uint8, judge.made[0]),
        (torch.int32, of_lists[0].made[0]),
        *[(torch.bool, x.made[0]) for x in marking],
    ):
        scratch.append(Place(SCRATCH, -(-_bytes_of(scratch) // 16) * 16, dtype, shape))
    status, counts, *marks = scratch
    index, seen = Place(INDEX, 0, torch.int64, (max(kind.batch, kind.heads),)), None
    if sharing:
        seen = Place(MADE, 4 * places["seen"], torch.uint8, layout.seen)
    lists = kernels.ListTensors(
        status, counts, **{x: made[x] for x in ("blocks", "work", "bits", "section")}, b=status, leaves=()
    )
    bits = kernels.BitTensors(made["bits"], made["blocks"], made["work"], index, index, ())
    steps = [(x, kernels.KeysTensors(at, ())) for x, at in zip(marking, marks, strict=True)]
    steps += [(judge, kernels.MapTensors(status, seen, index, index, ())), *[(x, lists) for x in of_lists]]
    steps += [(_writing_bits(kind, layout, crossing, by_columns, PROGRAMS), bits)]
    result, own = Place(MADE, 0, torch.int32, (places[""],)), dict(enumerate(marks, given))
    return MaskLaunches(result, tuple(steps), _bytes_of(scratch), index.shape[0], seen and seen.first, own=own)


def _bytes_of(places: Sequence[Place]) -> int:
    """The bytes of a memory with these places, one behind the other."""
    return places[-1].first + places[-1].size if places else 0


@lru_cache(maxsize=1024)
def _marking(kind: Kind) -> tuple[Kind, tuple[MaskLaunch, ...]]:
    """A mask that reads marks in place of long blocks of selected keys, and the launches that make these
    (:func:`tilewise.selections.by_marks`)."""
    region, marks = selections.by_marks(kind.region, len(kind.tensors), kind.lengths[1])
    kernels, tensors, launches = runtime.kernels(), list(kind.tensors), []
    for slot, blocks in marks:
        (batch, heads, rows, entries), strides, _ = kind.tensors[slot]
        made = batch, heads, rows, blocks
        tensors.append((made, torch.empty(made, device="meta").stride(), torch.bool))
        sizes = kernels.MarkedSizes(heads, rows, entries, tuple(strides), blocks)
        launches.append(
            MaskLaunch.of(kernels.marked_rows, (batch * heads * rows,), sizes, Facts(), made=(made,), slots=(slot,))
        )
    return kind._replace(region=region, tensors=tuple(tensors)), tuple(launches)


def _leaves(kind: Kind) -> tuple[TensorFacts, ...]:
    return tuple(TensorFacts(tuple(shape), stride, dtype) for shape, stride, dtype in kind.tensors)


def _extents(kind: Kind, emitted: Emitted) -> tuple[tuple[int, ...], ...]:
    """Size and stride of each axis of what a kernel reads."""
    return tuple(extents_of(*kind.tensors[n][:2]) for n in emitted.slots)


@lru_cache(maxsize=1024)
def _judging(kind: Kind, tile: tuple[int, int], group: int | None, most: int, alike: int = 1) -> MaskLaunch:
    emitted, predicate = emit_mask(kind.region, _leaves(kind), kind.lengths), kind.region.predicate
    step = _alike(predicate, "i", tile[0])  # the rows on which the predicate is the same
    rows, alike_j = 1 << (tile[0] // step - 1).bit_length(), _alike(predicate, "j", math.gcd(_LINES, tile[1]))
    many, rows = min(MOST_ROWS * alike_j, rows), min(MOST_ROWS, rows)
    batch, heads = _heads_of(kind, (kind.region.first, kind.region.last, predicate))
    blocks = [-(-n // size) for n, size in zip(kind.lengths, tile, strict=True)]
    heads = heads // alike
    group = group if group is None else group // alike or 1 if heads > 1 else 1
    kernels = runtime.kernels()
    sizes = kernels.MapSizes(
        heads=heads,
        seen_heads=heads // (group or 1),
        group=group or 1,
        alike=alike,
        seqlen_q=kind.lengths[0],
        seqlen_k=kind.lengths[1],
        tile_m=tile[0],
        tile_n=tile[1],
        step=step,
        span=-(-batch * heads * blocks[0] * blocks[1] // most),
        extents=_extents(kind, emitted),
    )
    seen = None if group is None else (batch, heads // group, kind.lengths[1])
    made, groups = ((batch, heads, *blocks), seen), _groups_of(kind.region, tile[1])
    if groups is None:
        functions = {name: emitted.functions.get(name) for name in ("first", "last", "keep", "some", "every")}
        kernel, facts = kernels.tile_map, Facts(**functions, block_m=rows, many=many, alike=alike_j)
        programs = batch * heads * -(-blocks[0] // sizes.span) * blocks[1]
    else:
        facts = Facts(keep=emitted.functions["keep"], alike=tile[1] // groups, groups=groups, many=rows)
        kernel = kernels.tile_pattern
        programs = batch * heads * blocks[0] * -(-blocks[1] * groups // kernels.GROUPS.value)
    # A warp for every 4 rows: what crosses warps takes longer than the pairs of a few.
    tiles = replace(PROGRAM, num_warps=max(1, rows // 4))
    return MaskLaunch.of(kernel, (programs,), sizes, facts, emitted, made, tiles=tiles)


def _groups_of(region: Region, tile_n: int) -> int | None:
    """How many groups of keys side by side a tile has, none of which a pattern tells apart; None where an interval hides pairs, or groups
    are of few keys."""
    alike = _alike(region.predicate, "j", tile_n)
    found = tile_n // alike
    even = found.bit_count() == alike.bit_count() == 1 and found <= alike
    return found if even and len(region.parts) == 1 and region.predicate is not None else None


@lru_cache(maxsize=1024)
def _listing(
    layout: Layout, ragged: bool, by_columns: bool, sections: Sections, device: torch.device
) -> tuple[MaskLaunch, ...]:
    """``device``: where kernels are compiled for."""
    (batch, heads, lines, steps), kernels = layout.shapes["blocks"], runtime.kernels()
    sizes = kernels.ListSizes(
        heads=heads,
        group=sections.group if heads > 1 else 1,
        lines=lines,
        steps=steps,
        empty=0 if by_columns else steps,  # by rows, it visits the tile past the last one
        ragged=int(ragged),
        most=(layout.slots - RESERVED) // (batch * heads // layout.alike),
        words=THREADS * layout.words,
        alike=layout.alike,
        all_heads=sections.heads,
        least=sections.least,
        ctas=sections.ctas,
    )
    facts, each = Facts(by_columns=by_columns), (kernels.tile_lists, kernels.tile_order)
    made = ((batch, heads, lines, 2),)
    return tuple(MaskLaunch.of(kernel, (batch * heads * lines,), sizes, facts, made=made) for kernel in each)


@lru_cache(maxsize=1024)
def _listing_alone(shape: tuple[int, int, int, int], by_columns: bool, device: torch.device) -> MaskLaunch:
    """The launch that lists tiles and orders no lines."""
    (batch, heads, *blocks), kernels = shape, runtime.kernels()
    steps, lines = blocks if by_columns else reversed(blocks)
    of_order = dict.fromkeys(("group", "alike", "most", "words", "all_heads", "least", "ctas"), 1)
    sizes = kernels.ListSizes(heads=heads, lines=lines, steps=steps, empty=0, ragged=0, **of_order)
    lists = batch, heads, lines
    made = (*lists, steps), (*lists, 2)
    facts = Facts(by_columns=by_columns)
    return MaskLaunch.of(kernels.tile_lists, (math.prod(lists),), sizes, facts, made=made)


@lru_cache(maxsize=1024)
def _writing_bits(kind: Kind, layout: Layout, crossing: int, by_columns: bool, most: int) -> MaskLaunch:
    region, names = kind.region, ("first", "last") if by_columns else ("lo", "hi")
    ends = {name: getattr(region, name) for name in names}
    emitted = emit_mask(Region(**ends, predicate=region.predicate), _leaves(kind), kind.lengths)
    functions = {name: emitted.functions.get(name) for name in (*names, "keep")}
    same = _alike(region.predicate, "i" if by_columns else "j", crossing)
    same = same // 4 if same % 8 == 0 else 1  # two bits of a word are of eight crossing lines (:mod:`bit_tiles`)
    lines = _alike(region.predicate, "j" if by_columns else "i", LINES)
    facts = Facts(**functions, crossing=crossing, by_columns=by_columns, same=same, alike=lines)
    kernels, (batch, heads, lines, steps) = runtime.kernels(), layout.shapes["blocks"]
    heads = heads // layout.alike
    sizes = kernels.BitSizes(
        heads=heads,
        alike=layout.alike,
        lines=lines,
        steps=steps,
        slots=layout.slots,
        programs=min(steps, -(-most // (batch * heads * lines))),
        seqlen_q=kind.lengths[0],
        seqlen_k=kind.lengths[1],
        extents=_extents(kind, emitted),
    )
    return MaskLaunch.of(kernels.tile_bits, (batch * heads * lines * sizes.programs,), sizes, facts, emitted)


def _alike(predicate: Expr | None, name: str, most: int) -> int:
    """How many queries, or keys, side by side a predicate cannot tell apart, where they begin with a multiple: a divisor of ``most``."""
    return math.gcd(most, (predicate is not None and granularity(predicate, name)) or most)


def ends_of_lines(grid: Grid, lines: Tensor, by_columns: bool) -> tuple[Tensor, Tensor]:
    """Both ends of the intervals of these queries, or keys ``by_columns``: int64 ``(b|1, h|1, len(lines))``."""
    launch = _ending(Kind.of(grid), len(lines), by_columns)
    start, end = torch.empty(launch.made[0], dtype=torch.int64, device=grid.b.device)
    launch(runtime.kernels().EndsTensors(start, end, lines, grid.b, grid.h, launch.read(grid)))
    return start, end


@lru_cache(maxsize=1024)
def _ending(kind: Kind, count: int, by_columns: bool) -> MaskLaunch:
    region = kind.region
    interval = Region(first=region.first, last=region.last) if by_columns else Region(lo=region.lo, hi=region.hi)
    emitted = emit_mask(interval, _leaves(kind), kind.lengths)
    batch, heads = _heads_of(kind, interval.ends)
    kernels = runtime.kernels()
    sizes = kernels.EndsSizes(
        heads=heads,
        count=count,
        seqlen_q=kind.lengths[0],
        seqlen_k=kind.lengths[1],
        extents=_extents(kind, emitted),
    )
    programs = batch * heads, -(-count // _LINES)
    facts = Facts(**emitted.functions, by_columns=by_columns)
    return MaskLaunch.of(kernels.ends, programs, sizes, facts, emitted, ((2, batch, heads, count),))
