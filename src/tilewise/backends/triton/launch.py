"""From a problem and its tensors to kernel launches. What depends on the problem alone is decided once and kept."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from tilewise import dropout, expr, state
from tilewise.backends.base import Grads, Inputs, Output, PerTensors, empty_output, unit_last
from tilewise.backends.triton.config import (
    OVER_KEYS,
    PARTIAL_PRODUCTS,
    PARTS,
    SHEET_STRIP,
    SHEET_UNIT,
    Config,
    Tiles,
    columns,
    decoding,
    of_pairs,
    of_sheet,
    pieces,
    sheet_heads,
)
from tilewise.backends.triton.driver import Prepared, address
from tilewise.backends.triton.facts import Facts
from tilewise.backends.triton.kernels.emit import Emitted, emit
from tilewise.backends.triton.kernels.leaf_reads import PairReads, described_lookup
from tilewise.caching import cached_property
from tilewise.leaf_gradients import COLUMNS, ROWS, SCATTER, STORE, TILES, Read, read_adjoint
from tilewise.masks.facts import every_key_seen, every_pair_kept
from tilewise.problem import Problem, check
from tilewise.spec import Options, assemble, parse_spec
from tilewise.tiles import PARTIAL, Grid, TileLists, TileMap


def _wide(t) -> bool:
    """Whether an element may lie 2**31 elements from the first."""
    return sum((size - 1) * abs(stride) for size, stride in zip(t.shape, t.stride, strict=True) if size) >= 1 << 31


@lru_cache(maxsize=1)
def kernels():
    """The kernels and their bundles, by name: what imports Triton, imported at the first launch and looked up once."""
    from types import SimpleNamespace

    import triton
    from tilewise.backends.triton.kernels import arguments, backward, forward, pair_bias, terms
    from triton.tools.tensor_descriptor import TensorDescriptor

    return SimpleNamespace(
        triton=triton,
        forward=forward.forward_kernel,
        merge=forward.merge_kernel,
        delta=backward.delta_kernel,
        dkdv=backward.dkdv_kernel,
        dq=backward.dq_kernel,
        tile=pair_bias.tile_kernel,
        sheet=pair_bias.sheet_kernel,
        parts=terms.terms_kernel,
        Tensors=arguments.Tensors,
        Sizes=arguments.Sizes,
        Scales=arguments.Scales,
        TensorDescriptor=TensorDescriptor,
    )


class Address(int):
    """Where a tensor begins, asked for as a tensor is."""

    def data_ptr(self) -> int:
        return self


def rebased(descriptor, base: Tensor | Address):
    """A tensor descriptor with another base, unchecked: its checks take as long as its making."""
    new = object.__new__(type(descriptor))
    new.__dict__.update(descriptor.__dict__)
    new.base = base
    return new


def opaque(x: object) -> object:
    """Whole numbers, in tuples too, as odd ones that Triton does not specialise on; floats as they are."""
    if isinstance(x, tuple):
        return type(x)(*map(opaque, x)) if hasattr(x, "_fields") else tuple(map(opaque, x))
    return 2 * x + 3 if isinstance(x, int) else x


def name_of(kernel, facts: Facts) -> str:
    """Of a launch, as in ``Config.passes`` where it is one of them."""
    name = kernel.fn.__name__.removesuffix("_kernel")
    return name if name != "dkdv" or (facts.dk and facts.dv) else "dk" if facts.dk else "dv"


def run(kernel, grid: tuple[int, ...], tiles: Tiles, *args: object) -> object:
    """The compiled kernel, or None where nothing is to be done or the interpreter runs."""
    if not all(grid):
        return None
    early = {"launch_pdl": True} if args[-1].overlap in ("reads", "joins") else {}
    return kernel[grid](*args, num_warps=tiles.num_warps, num_stages=tiles.num_stages, **early)


def listening() -> bool:
    """Whether somebody wants to hear of Triton's launches."""
    hooks = kernels().triton.knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)


def relaunch(compiled, grid: tuple[int, int, int], *args: object) -> None:
    """``compiled[grid](*args)``, which goes through two chains of hooks whether or not somebody listens."""
    if listening():
        compiled[grid](*args)
        return
    stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


Role = Literal["leads", "reads", "joins"]
"""Of a kernel that may run while its neighbour in the stream does. One that leads is launched as any; one that reads what that wrote
waits for its end first thing; one that joins another reads what was complete when that began, and waits for it last."""


@dataclass(eq=False)
class Plan:
    """One problem's decisions, made once. ``run`` launches a kernel.

    Attributes:
        made: facts, sizes, scales, layouts and compiled kernels, by what they depend on beside the problem.
        kept: ids of the sizes in ``made``.
        listed: lists of tiles.
    """

    p: Problem
    config: Config
    run: Callable[..., object] = run
    made: dict = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    listed: PerTensors = field(default_factory=PerTensors)

    def start(self, kernel, grid: tuple[int, ...], tiles: Tiles, *args: object) -> object:
        """Launches; again with the same facts and sizes, straight through the compiled kernel, which it returns.

        Triton's own way there, which looks at each of some hundred numbers, takes 60 us of host time. What it looks for
        cannot change: sizes and facts are the same objects, and sizes are kept only where every pointer is aligned.
        """
        key = (kernel, id(args[1]), id(args[-1])) if self.run is run and id(args[1]) in self.kept else None
        compiled = self.made.get(key)
        if compiled is not None:
            relaunch(compiled, (*grid, 1, 1)[:3], *args)
            return compiled
        compiled = self.run(kernel, grid, tiles, *args)
        if key is not None and compiled is not None:
            self.made[key] = compiled
        return compiled if key is not None else None

    @cached_property
    def emitted(self) -> Emitted:
        return self._emitted()

    @cached_property
    def emitted_seen(self) -> Emitted:
        """With functions that find a tile of ``seen`` in place of its elements."""
        return self._emitted(self.seen[0])

    def _emitted(self, seen: int | None = None) -> Emitted:
        wide = frozenset(n for n, t in enumerate(self.p.extras) if _wide(t))
        return emit(self.p, wide, seen)

    @cached_property
    def extents(self) -> tuple[tuple[int, ...], ...]:
        """Size and stride of every axis, for each of ``emitted.slots``."""
        facts = [self.p.extras[n] for n in self.emitted.slots]
        return tuple(tuple(x for pair in zip(t.shape, t.stride, strict=True) for x in pair) for t in facts)

    @cached_property
    def grad_extents(self) -> tuple[tuple[int, ...], ...]:
        """As ``extents``, of contiguous tensors of the same shapes."""
        shapes = [self.p.extras[n].shape for n in self.emitted.slots]
        contiguous = [torch.empty(shape, device="meta").stride() for shape in shapes]
        return tuple(
            tuple(x for pair in zip(shape, stride, strict=True) for x in pair)
            for shape, stride in zip(shapes, contiguous, strict=True)
        )

    @cached_property
    def seen(self) -> tuple[int, tuple] | None:
        """``(slot, leading indices)`` of the tensor whose tiles a descriptor may bring to the score: two names or numbers."""
        e = described_lookup(self.p)
        if e is None:
            return None
        return e.args[0][1], (0,) * (5 - len(e.args)) + tuple(x.args[0] for x in e.args[1:-2])

    def pairs(self, t: Inputs) -> dict[str, int]:
        """Where what the descriptor with the letter p sees begins, if there may be one."""
        return {} if self.seen is None else {"p": t.leaves[self.seen[0]].data_ptr()}

    @cached_property
    def scales(self):
        p = self.p
        keep = dropout.keep_scale(p.spec.dropout_p) if p.spec.dropout_p else 1.0
        return kernels().Scales(float(p.softmax_scale), keep, opaque(self.emitted.numbers))

    @property
    def parts(self) -> int:
        """bf16 numbers that each element of q, k, v and dO is to the kernels."""
        return PARTS if self.config.products == "bf16x6" else 1

    @cached_property
    def whole(self) -> bool:
        """Whether descriptors may read every tile: they hide rows past a tensor's last, but neither another packed sequence's
        nor keys that no query sees, which may hold NaN."""
        return not self.p.packed and every_key_seen(self.p.spec.region, self.p.seqlen_q, self.p.seqlen_k)

    @cached_property
    def sheet_heads(self) -> int:
        """The key heads whose dS the backward keeps at a time, for dQ and the gradient of the one tensor that wants one, a bias that is
        broadcast; 0: none, where there are others, or dS is not that gradient."""
        p, reads, functions = self.p, self.emitted.reads, self.emitted.functions
        if [r.how for r in reads] != [TILES] or not self.whole or {"slope", "tile_0"} & set(functions):
            return 0
        leaf = p.extras[reads[0].slot]
        # dS is kept in p's dtype, which has to hold what the leaf's gradient does: bf16 has fp32's range.
        if leaf.dtype != p.dtype != torch.bfloat16:
            return 0
        return sheet_heads(p, self.config.beside[1], math.prod(leaf.shape) * leaf.dtype.itemsize)

    def overlap(self, role: Role) -> dict[str, str]:
        """The role as an extra of ``facts``, none where kernels do not overlap: nor do they where one may have no programs, and with
        lists, which another kernel may have made just before."""
        sizes = (self.p.batch, self.p.seqlen_q, self.p.seqlen_k)
        return {"overlap": role} if self.config.overlapping and all(sizes) and not self.lists else {}

    @property
    def lists(self) -> bool:
        return self.p.spec.region.predicate is not None and not self.p.packed

    def facts(self, tiles: Tiles, align: int, **extra: object) -> Facts:
        """The compile-time part of a launch. ``again``: the score is computed again, for gradients; ``read``: the sum of
        ``emitted.reads[read]``; ``pair``: the leading indices of ``seen``, whose tiles a descriptor brings."""
        p, emitted = self.p, self.emitted if extra.get("pair") is None else self.emitted_seen
        ends = [e for e in p.spec.region.ends if e is not None]
        key = (tiles, align, *extra.items())
        found = self.made.get(key)
        if found is None:
            names = ("lo", "hi", "first", "last", "keep", "score", "weights", "slope", "rows", "leaves", "columns")
            fields = {name: emitted.functions.get(name) for name in names} | {
                "tile_m": tiles.tile_m,
                "tile_n": tiles.tile_n,
                "partial_stages": 2 if PairReads.of(p).bytes else 1,
                "head_dim": p.head_dim,
                "head_dim_v": p.head_dim_v,
                "pieces": pieces(p.head_dim, tiles),
                "pieces_v": pieces(p.head_dim_v, tiles),
                "align": align,
                "packed": p.packed,
                "lists": self.lists,
                "general": p.spec.score is not None or not p.softmax_scale > 0 or p.dtype == torch.float32,
                "natural": p.dtype == torch.float32,
                "masked": not p.spec.region.everything,
                "sink": p.spec.sink_slot is not None,
                "dropout": p.spec.dropout_p > 0,
                "precision": "tf32" if self.config.products == "tf32" else "ieee",
                "parts": self.parts,
                "products": PARTIAL_PRODUCTS if self.parts > 1 else ((0, 0),),
                "split": False,
                "dk": True,
                "dv": True,
                "tma": False,
                "together": tiles.ahead,
                "pair": None,
                "whole": False,
                "sheet": 0,
                "strips": 0,
                "overlap": None,
                "specialized": tiles.specialized,
                "upcast": (p.dtype == torch.bfloat16 or self.parts > 1) and p.device.type == "cpu",
                "row_grads": tuple(n for n, read in enumerate(self.emitted.reads) if read.how == ROWS),
                "varies": bool(expr.lookups(*ends) or expr.depends_on(*ends) & {"b", "h"}),
                "hides": self.emitted.hides,
                "binary": self.emitted.binary,
                "bounded": self.emitted.bounded,
                "digest": emitted.digest,
            }
            if extra.get("again"):
                fields["score"] = emitted.functions.get("again")
            if extra.get("read") is not None:
                fields |= {name: emitted.functions.get(f"{name}_{extra['read']}") for name in ("tile", "place")}
            found = self.made[key] = Facts(**(fields | extra))
        return found


def strides_of(p: Problem, x: Tensor) -> tuple[int, int, int]:
    """``(batch, row, head)`` strides of a tensor laid out as q, in elements."""
    return (0, x.stride(0), x.stride(1)) if p.packed else (x.stride(0), x.stride(1), x.stride(2))


def aligned(*tensors: Tensor) -> bool:
    """Whether all start at a multiple of 16 bytes."""
    return not sum(x.data_ptr() % 16 for x in tensors)


def views(x: Tensor, strides: tuple[int, int, int], heads: int, batch: int) -> tuple[list[int], list[int]] | None:
    """Shape and strides of a tensor descriptor, (batch, heads, rows, columns), or None where there is none: it takes
    neither an empty tensor nor a stride of 0."""
    by_batch, row, head = strides
    shape = [batch, heads, x.shape[-3], x.shape[-1]]
    if not all(shape) or row == 0 or (heads > 1 and head == 0) or (batch > 1 and by_batch == 0):
        return None
    elements = 16 // x.element_size()  # of an axis of one element the stride is not used, but must be a legal one
    return shape, [by_batch or elements, head or elements, row, 1]


@dataclass(frozen=True)
class Part:
    """The key heads that a launch is for, and strips and rows of a head's sheet of dS."""

    first: int
    heads: int
    sheet: tuple[int, int] = (0, 0)


@dataclass
class Call:
    """A plan and the tensors of one call, in the forms that kernels read.

    Attributes:
        steady: every pointer is aligned. copied: some tensor's last stride was not 1.
        parts: what made the parts of q, k, v and do, where kernels read these.
    """

    plan: Plan
    t: Inputs
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor | None
    strides: list[tuple[int, int, int]]
    align: int
    steady: bool
    copied: bool
    parts: Parts | None

    @classmethod
    def of(cls, plan: Plan, t: Inputs, do: Tensor | None = None) -> Call:
        given = (t.q, t.k, t.v) if do is None else (t.q, t.k, t.v, do)
        tensors = [unit_last(x) for x in given]
        copied, parts = any(x is not y for x, y in zip(tensors, given, strict=True)), None
        if plan.parts > 1:
            tensors, parts = in_parts(plan, tensors)
        key = ("strides", None if do is None else tensors[3].stride())
        found = plan.made.get(key)
        if found is None:
            strides = [strides_of(plan.p, x) for x in tensors]
            elements = 16 // tensors[0].element_size()
            divisible = all(x % elements == 0 for stride in strides for x in stride)
            found = plan.made[key] = (
                strides,
                [tuple(x // elements for x in stride) for stride in strides],
                elements,
                divisible,
            )
        strides, divided, elements, divisible = found
        align = elements if divisible and aligned(*tensors) else 1
        strides = divided if align > 1 else strides
        steady = align > 1 and aligned(*t.leaves) and (t.seed is None or aligned(t.seed))
        return cls(plan, t, *tensors[:3], None if do is None else tensors[3], strides, align, steady, copied, parts)

    def tensors(self, **named: object):
        t = self.t
        leaves = tuple(t.leaves[n] for n in self.plan.emitted.slots)
        return kernels().Tensors(
            q=self.q, k=self.k, v=self.v, do=self.do, cu_q=t.cu_seqlens_q, cu_k=t.cu_seqlens_k, sink=t.sink, seed=t.seed,
            leaves=leaves, **named,
        )  # fmt: skip

    def descriptors(self, tiles: Tiles, wanted: str) -> tuple:
        """Two tensor descriptors of each tensor named, a letter each, for the pieces of its head dim, the second None where
        there is one piece; None for all where one is impossible, or a piece is padded. Past a tensor's rows they read zeros."""
        none = (None,) * (2 * len(wanted))
        p = self.plan.p
        if not tiles.tma or self.align == 1 or any(columns(d, tiles) != d for d in (p.head_dim, p.head_dim_v)):
            return none
        found = []
        for name in wanted:
            index = "qkvd".index(name)
            x = (self.q, self.k, self.v, self.do)[index]
            heads, rows = (p.heads_q, tiles.tile_m) if name in "qd" else (p.heads_k, tiles.tile_n)
            width = p.head_dim if name in "qk" else p.head_dim_v
            key = (name, rows, tiles.padded, self.strides[index])
            if key not in self.plan.made:
                strides = tuple(s * self.align for s in self.strides[index])
                made, empty = views(x, strides, heads, 1 if p.packed else p.batch), torch.empty(0, dtype=x.dtype)
                blocks = tuple([1, 1, rows, piece] for _, _, piece in pieces(width, tiles))
                self.plan.made[key] = made and [kernels().TensorDescriptor(empty, *made, block) for block in blocks]
            made = self.plan.made[key]
            if made is None:
                return none
            found += [rebased(made[n], x) if n < len(made) else None for n in (0, 1)]
        return tuple(found)

    def pair_descriptor(self, tiles: Tiles):
        """Of the tensor that the score reads at i and j, or None."""
        seen, t = self.plan.seen, self.t
        if seen is None or not tiles.tma or not aligned(t.leaves[seen[0]]):
            return None
        key = ("pair", tiles.tile_m, tiles.tile_n)
        made = self.plan.made.get(key)
        if made is None:
            leaf = t.leaves[seen[0]]
            missing = 4 - leaf.ndim
            shape, strides = [1] * missing + list(leaf.shape), [16] * missing + list(leaf.stride())
            block = [1, 1, tiles.tile_m, tiles.tile_n]
            made = self.plan.made[key] = kernels().TensorDescriptor(leaf, shape, strides, block)
        return rebased(made, t.leaves[seen[0]])

    def line_descriptor(self, tiles: Tiles, lse2: Tensor, count: int):
        """Of the rows' statistics, lse2 and the delta behind it, or of lse2 alone: a plain load would cost each thread an address for
        every number."""
        key = ("lines", tiles.tile_m, count)
        lines = self.plan.made.get(key)
        if lines is None:
            room, block = lse2.numel(), [count, tiles.tile_m]
            lines = self.plan.made[key] = kernels().TensorDescriptor(lse2, [2, room], [room, 1], block)
        return rebased(lines, lse2)

    def sizes(self, blocks: int, *, chunk: int = 0, lists: TileLists | None = None, part: Part | None = None):
        """The numbers of a launch, the same object again where they are the same and all pointers are aligned."""
        if not self.steady:
            return self._sizes(blocks, chunk, lists, part)
        key = ("sizes", blocks, chunk, tuple(self.strides[3:]), list_strides(lists), part)
        found = self.plan.made.get(key)
        if found is None:
            found = self.plan.made[key] = self._sizes(blocks, chunk, lists, part)
            self.plan.kept.add(id(found))
        return found

    def _sizes(self, blocks: int, chunk: int, lists: TileLists | None, part: Part | None):
        p, strides = self.plan.p, self.strides
        part = part or Part(0, p.heads_k)
        sizes = kernels().Sizes(
            batch=p.batch,
            heads_q=p.heads_q,
            heads_k=p.heads_k,
            seqlen_q=p.seqlen_q,
            seqlen_k=p.seqlen_k,
            blocks=blocks,
            q=strides[0],
            k=strides[1],
            v=strides[2],
            do=strides[3] if len(strides) > 3 else (0, 0, 0),
            line=line_length(p),
            chunk=chunk,
            threshold=dropout.threshold(p.spec.dropout_p) if p.spec.dropout_p else 0,
            beside=self.plan.config.beside,
            heads=(part.first, part.heads),
            sheet=part.sheet,
            lists=list_strides(lists),
            extents=self.plan.extents,
            grad_extents=self.plan.grad_extents,
        )
        return opaque(sizes)

    def tile_lists(self, tiles: Tiles, by_columns: bool) -> TileLists | None:
        """The lists of a predicate's tiles; the same again while the mask's tensors are the same, unchanged."""
        plan = self.plan
        if not plan.lists:
            return None
        leaves = [self.t.leaves[n] for n in plan.p.spec.mask_slots]
        key = tiles.tile_m, tiles.tile_n, by_columns
        return plan.listed.of(key, leaves, lambda: self._listed(tiles, by_columns))

    def _listed(self, tiles: Tiles, by_columns: bool) -> TileLists:
        p = self.plan.p
        shape = (p.batch, p.heads_q, p.seqlen_q, p.seqlen_k)
        grid = Grid.whole(p.spec.region, self.t.leaves, shape, self.q.device)
        tile_map = TileMap.build(grid, tiles.tile_m, tiles.tile_n, by_columns)
        # Full tiles are read without bounds, so those at a ragged end count as partial.
        if p.seqlen_k % tiles.tile_n:
            tile_map.status[..., -1:].clamp_(max=PARTIAL)
        if p.seqlen_q % tiles.tile_m:
            tile_map.status[..., -1:, :].clamp_(max=PARTIAL)
        return tile_map.lists(by_columns)


def list_strides(lists: TileLists | None) -> tuple[int, ...]:
    """``(batch, head, line)`` strides of a list and ``(batch, head)`` strides of its counts, 0 where they are shared."""
    if lists is None:
        return (0, 0, 0, 0, 0)
    broadcast = lambda t: [s if n > 1 else 0 for n, s in zip(t.shape[:2], t.stride()[:2], strict=True)]  # noqa: E731
    return (*broadcast(lists.partial), lists.partial.stride(2), *broadcast(lists.partial_count))


def pointers(lists: TileLists | None) -> tuple[Tensor, ...] | None:
    """The four tensors; kernels take both lists, and both counts, to have the same strides."""
    return None if lists is None else (lists.partial, lists.partial_count, lists.full, lists.full_count)


def blocks(p: Problem, length: int, tile: int) -> int:
    """Tiles of a head; packed, slots enough for every sequence and the rows past the last (arguments.work_tile)."""
    return length // tile + p.batch + 1 if p.packed else -(-length // tile)


# -- Launches ------------------------------------------------------------------------------------------------------


@dataclass
class Launched:
    """A compiled kernel, its grid, and the arguments that are the same in every call.

    Attributes:
        descriptors: to be rebased, each None or of the tensor that the letter at its place in ``letters`` names.
        constants: arguments behind them that are no tensors; counts: the tensors of a score, and of its gradients, in the first argument.
        args: those of the first launch, until :meth:`prepare`; seen: the letters of the descriptors that there are; prepared: the
            launch in the driver's form, None where there is none.
    """

    compiled: Any
    grid: tuple[int, int, int]
    sizes: Any
    scales: Any
    facts: Facts
    descriptors: tuple
    letters: str
    constants: tuple
    counts: tuple[int, int]
    args: tuple
    seen: tuple[str, ...] = ()
    prepared: Prepared | None = None

    @classmethod
    def of(cls, compiled, grid: tuple[int, ...], args: tuple, letters: str = "") -> Launched:
        """Of the launch with these arguments, whose descriptors ``letters`` name."""
        grid, descriptors = (*grid, 1, 1)[:3], args[3 : 3 + len(letters)]
        constants = tuple(x for x in args[3 + len(letters) : -1] if not isinstance(x, Tensor))
        counts = len(args[0].leaves), len(args[0].grads)
        return cls(compiled, grid, args[1], args[2], args[-1], descriptors, letters, constants, counts, args)

    def prepare(self) -> None:
        """For more launches: lays the arguments out, and lets go of the first launch's tensors."""
        self.seen = tuple(letter for x, letter in zip(self.descriptors, self.letters, strict=True) if x is not None)
        if getattr(self.compiled, "metadata", None) is not None:
            self.prepared = Prepared.of(self.compiled, self.grid, self.args)
        self.descriptors = tuple(x and rebased(x, torch.empty(0, dtype=x.base.dtype)) for x in self.descriptors)
        self.args = ()

    def __call__(self, pointers: tuple[int, ...], named: dict[str, int], *later: Tensor) -> None:
        """``pointers``: of Tensors, as :func:`bundle` takes them; ``named``: where what the descriptors see begins."""
        if self.prepared is not None and not listening():
            addresses = (*pointers, *[x.data_ptr() for x in later]) if later else pointers
            if self.prepared(addresses, [named[letter] for letter in self.seen]):
                return
        pairs = zip(self.descriptors, self.letters, strict=True)
        between = [*(x and rebased(x, Address(named[letter])) for x, letter in pairs), *self.constants, *later]
        tensors = bundle(pointers, *self.counts)
        relaunch(self.compiled, self.grid, tensors, self.sizes, self.scales, *between, self.facts)


LEAVES = 18  # where the addresses of a score's tensors begin


def bundle(pointers: tuple[int, ...], leaves: int, grads: int):
    """Tensors of addresses, in its fields' order, 0 for none, and then those of its leaves and their gradients, so many."""
    end = LEAVES + leaves
    named = [x or None for x in pointers[:LEAVES]]
    return kernels().Tensors(*named, leaves=pointers[LEAVES:end], grads=pointers[end : end + grads])


def repeatable(call: Call, launched: list[Launched]) -> bool:
    """Whether another call may launch them again, for which they are prepared. Not so: unaligned or copied tensors, lists of tiles."""
    launched = launched if call.parts is None else [call.parts.launched, *launched]
    if call.copied or call.plan.lists or any(x.compiled is None for x in launched):
        return False
    for each in launched:
        each.prepare()
    return True


# -- Parts of fp32 -------------------------------------------------------------------------------------------------

PARTS_ROWS = 16  # of a program that makes them or adds them up


@dataclass
class Parts:
    """What makes the parts of q, k, v and, in a backward, do: of fp32 (..., heads, D) bf16 (..., heads, 3 D), those of config.PARTS side
    by side.

    Attributes:
        starts: of each in a buffer for all, in bytes, multiples of 16; room: elements of the buffer.
    """

    launched: Launched
    starts: tuple[int, ...]
    room: int

    def again(self, given: list[int], like: Tensor) -> tuple[list[int], Tensor]:
        """Where the parts begin of tensors at these addresses, and the buffer."""
        buffer = like.new_empty(self.room, dtype=torch.bfloat16)
        begin = buffer.data_ptr()
        made = [begin + start for start in self.starts]
        self.launched(parts_tensors(given, made), {})
        return made, buffer


def in_parts(plan: Plan, tensors: list[Tensor]) -> tuple[list[Tensor], Parts]:
    """The parts, and what made them."""
    tiles, p = Tiles(PARTS_ROWS, PARTS_ROWS, 4, 1, padded=True), plan.p
    made = [x.new_empty((*x.shape[:-1], PARTS * x.shape[-1]), dtype=torch.bfloat16) for x in tensors]
    batch, steady = 1 if p.packed else p.batch, aligned(*tensors)
    key = ("parts", *[x.stride() for x in tensors], steady)
    sizes = plan.made.get(key)
    if sizes is None:
        shape = {name: getattr(p, name) for name in ("heads_q", "heads_k", "seqlen_q", "seqlen_k")}
        strides = {name: strides_of(p, x) for name, x in zip(("q", "k", "v", "do"), tensors, strict=False)}
        sizes = plan.made[key] = opaque(kernels().Sizes(batch=batch, **shape, **strides))
        if steady:
            plan.kept.add(id(sizes))
    programs = max(-(-x.shape[-3] // PARTS_ROWS) * x.shape[-2] for x in tensors) * batch
    grid, args = (programs, len(tensors)), (parts_tensors(tensors, made), sizes, plan.scales, plan.facts(tiles, 1))
    launched = Launched.of(plan.start(kernels().parts, grid, tiles, *args), grid, args)
    *starts, room = accumulate([-(-x.numel() // 8) * 8 for x in made], initial=0)
    return made, Parts(launched, tuple(made[0].element_size() * start for start in starts), room)


def parts_tensors(given: Sequence, made: Sequence):
    """Tensors, or their addresses, as the kernel that makes parts reads and writes them."""
    (q, k, v), (dq, dk, dv) = given[:3], made[:3]
    do, o = (given[3], made[3]) if len(given) > 3 else (None, None)
    return kernels().Tensors(q=q, k=k, v=v, do=do, dq=dq, dk=dk, dv=dv, o=o)


def as_read(parts: Parts | None, tensors: tuple[Tensor, ...]) -> tuple[list[int], Tensor | None]:
    """Where the tensors begin as kernels read them: themselves, or their parts, made again, in the buffer that is returned."""
    given = [x.data_ptr() for x in tensors]
    return (given, None) if parts is None else parts.again(given, tensors[0])


# -- Forward -------------------------------------------------------------------------------------------------------


@dataclass
class Again:
    """A forward that was launched before: everything of it but the tensors.

    Attributes:
        merge: of ``chunks`` partial states, where keys are split. parts: as in :class:`Call`.
    """

    plan: Plan
    parts: Parts | None
    main: Launched
    merge: Launched | None
    chunks: int

    @classmethod
    def of(cls, call: Call, launched: list[Launched], chunks: int = 0) -> Again | None:
        """None where another call may need other numbers."""
        if not repeatable(call, launched):
            return None
        merge = launched[1] if chunks else None
        return cls(call.plan, call.parts, launched[0], merge, chunks)

    def launch(self, t: Inputs, out: Output) -> bool:
        """False, and nothing launched, where a tensor is not aligned as those of the first call were."""
        to = out if self.merge is None else partial_states(out, self.chunks)
        o, lse, rest = to.o.data_ptr(), to.lse.data_ptr(), others(t, self.plan.emitted.slots)
        if (t.q.data_ptr() | t.k.data_ptr() | t.v.data_ptr() | o | lse) % 16 or rest is None:
            return False
        read, _buffer = as_read(self.parts, (t.q, t.k, t.v))
        none = (0,) * 7
        self.main((*read, o, lse, *none, *rest), {"k": read[1], "v": read[2], **self.plan.pairs(t)})
        if self.merge is not None:
            self.merge((*read, out.o.data_ptr(), out.lse.data_ptr(), *none, *rest), {}, to.o, to.lse)
        return True


def others(t: Inputs, slots: tuple[int, ...], sheet: int = 0) -> tuple[int, ...] | None:
    """Addresses, as in :func:`bundle` from ``cu_q`` on to the leaves; None where one is not aligned that has to be."""
    leaves = [t.leaves[n].data_ptr() for n in slots]
    seed = address(t.seed)
    if functools.reduce(operator.or_, leaves, seed) % 16:
        return None
    return address(t.cu_seqlens_q), address(t.cu_seqlens_k), address(t.sink), seed, sheet, 0, *leaves


def forward(plan: Plan, t: Inputs) -> Output:
    p = plan.p
    if p.seqlen_q == 1 and p.group > 1 and not p.packed:
        inner = plan.made.get("grouped", plan)
        if inner is plan:
            inner = plan.made["grouped"] = grouped(plan, t)
        if inner is not None:
            return ungrouped(p, forward(inner, replace(t, q=one_tile(p, t.q))))
    out = empty_output(p, t.q, t.v)
    again = plan.made.get("again")
    if again is not None and again.launch(t, out):
        return out
    call = Call.of(plan, t)
    lists = call.tile_lists(plan.config.forward, False)
    descriptors = call.descriptors(plan.config.forward, "kv")
    split = plan.config.split
    if split and not p.packed and lists is None and p.seqlen_k > split:
        chunk = -(-split // plan.config.forward.tile_n)  # in tiles
        chunks = -(-p.seqlen_k // (chunk * plan.config.forward.tile_n))
        parts = partial_states(out, chunks)
        main = _states(call, parts, descriptors, None, chunk=chunk, chunks=chunks)
        plan.made["again"] = Again.of(call, [main, _merge(call, out, parts, chunks)], chunks)
    else:
        plan.made["again"] = Again.of(call, [_states(call, out, descriptors, lists)])
    return out


def _states(
    call: Call, to: Output, descriptors: tuple, lists: TileLists | None, *, chunk: int = 0, chunks: int = 1
) -> Launched:
    """Runs the forward kernel, over chunks of ``chunk`` key tiles where there are some."""
    plan, p, tiles = call.plan, call.plan.p, call.plan.config.forward
    slots = blocks(p, p.seqlen_q, tiles.tile_m)
    tma = descriptors[0] is not None
    pair = call.pair_descriptor(tiles) if tiles.ahead else None  # by pointers it comes under Q Kᵀ
    parts = {} if pair is None else {"pair": plan.seen[1]}
    parts |= {"split": True, "sink": False} if chunk else {}
    facts = plan.facts(tiles, call.align, tma=tma, whole=tma and plan.whole, **parts)
    grid = (slots * p.heads_q * (1 if p.packed else p.batch), chunks)
    tensors, sizes = (
        call.tensors(o=to.o, lse=to.lse, lists=pointers(lists)),
        call.sizes(slots, chunk=chunk, lists=lists),
    )
    args = (tensors, sizes, call.plan.scales, *descriptors, pair, facts)
    return Launched.of(plan.start(kernels().forward, grid, tiles, *args), grid, args, "kkvvp")


MERGING = Tiles(16, 16, 4, 1, padded=True)


def partial_states(out: Output, chunks: int) -> Output:
    """Room for the states of chunks of keys, in fp32."""
    new = lambda x: torch.empty((chunks, *x.shape), dtype=torch.float32, device=x.device)  # noqa: E731
    return Output(new(out.o), new(out.lse))


def _merge(call: Call, out: Output, parts: Output, chunks: int) -> Launched:
    plan, p = call.plan, call.plan.p
    slots = blocks(p, p.seqlen_q, MERGING.tile_m)
    facts = plan.facts(MERGING, call.align, natural=True, dropout=False)
    tensors, sizes = call.tensors(o=out.o, lse=out.lse), call.sizes(slots, chunk=chunks)
    grid = (slots * p.heads_q * p.batch, 1)
    args = (tensors, sizes, call.plan.scales, parts.o, parts.lse, facts)
    return Launched.of(plan.start(kernels().merge, grid, MERGING, *args), grid, args)


# -- Decoding: with one query, the query heads of a key head are the rows of one tile ------------------------------


def grouped(plan: Plan, t: Inputs) -> Plan | None:
    """The plan of the same attention with ``group`` queries and heads_k heads; None where a head or a key is not like another:
    scores, dropout, sinks, and masks that hide a key."""
    p, spec = plan.p, plan.p.spec
    if (
        spec.score is not None
        or spec.dropout_p
        or spec.sink_slot is not None
        or not every_pair_kept(spec.region, 1, p.seqlen_k)
    ):
        return None
    q = one_tile(p, t.q)
    options = Options(softmax_scale=p.softmax_scale, deterministic=spec.deterministic)
    extras, seed, text = assemble(q, t.k, t.v, options)
    inner = check(q, t.k, t.v, extras, seed, parse_spec(text))
    return Plan(inner, decoding(inner, plan.config), plan.run)


def one_tile(p: Problem, q: Tensor) -> Tensor:
    """q (batch, 1, heads_q, D) as (batch, group, heads_k, D)."""
    return q[:, 0].unflatten(1, (p.heads_k, p.group)).transpose(1, 2)


def ungrouped(p: Problem, out: Output) -> Output:
    o = out.o.transpose(1, 2).reshape(p.batch, 1, p.heads_q, p.head_dim_v)
    return Output(o, out.lse.view(p.batch, p.heads_q, 1))


# -- Backward ------------------------------------------------------------------------------------------------------


@dataclass
class Sums:
    """What a backward writes: gradients, and its rows' statistics, one above the other in a buffer: lse in base 2 and delta."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    statistics: Tensor

    @classmethod
    def empty(cls, p: Problem, t: Inputs) -> Sums:
        lines = line_length(p) * p.heads_q * (1 if p.packed else p.batch)
        room = -(-(lines + PADDING) // 4) * 4  # delta starts at a multiple of 16 bytes too
        statistics = t.q.new_empty((2, room), dtype=torch.float32)
        return cls(t.q.new_empty(t.q.shape), t.k.new_empty(t.k.shape), t.v.new_empty(t.v.shape), statistics)

    def delta(self, p: Problem) -> Tensor:
        """In lse's shape."""
        shape = (p.heads_q, line_length(p)) if p.packed else (p.batch, p.heads_q, line_length(p))
        return self.statistics[1, : math.prod(shape)].view(shape)[..., : p.seqlen_q]


@dataclass
class AgainBackward:
    """A backward that was launched before, as :class:`Again`."""

    plan: Plan
    parts: Parts | None
    passes: list[Launched]

    @classmethod
    def of(cls, call: Call, passes: list[Launched]) -> AgainBackward | None:
        return cls(call.plan, call.parts, passes) if repeatable(call, passes) else None

    def launch(self, t: Inputs, out: Output, do: Tensor, dlse: Tensor, sums: Sums) -> dict[int, Tensor] | None:
        """The leaves' gradients; None, and nothing launched, where a tensor is not aligned as those of the first call were."""
        read = [x.data_ptr() for x in (t.q, t.k, t.v, do, out.o, out.lse, dlse)]
        sheet = new_sheet(self.plan, t.q)
        rest = others(t, self.plan.emitted.slots, address(sheet))
        if functools.reduce(operator.or_, read) % 16 or rest is None or not dlse.is_contiguous():
            return None
        leaves = _LeafSums(self.plan, t)
        o, lse, dlse_ = read[4:]
        (q, k, v, do), _buffer = as_read(self.parts, (t.q, t.k, t.v, do))
        lse2, delta = (x.data_ptr() for x in sums.statistics.unbind())
        pointers = (  # one for all kernels: those that were compiled without a tensor do not look at it
            q, k, v, o, lse, do, lse2, delta, dlse_,
            sums.dq.data_ptr(), sums.dk.data_ptr(), sums.dv.data_ptr(), *rest,
            *[x.data_ptr() for x in leaves.buffers],
        )  # fmt: skip
        named = {"q": q, "k": k, "v": v, "d": do, "l": lse2, "-": address(sheet), **self.plan.pairs(t)}
        for each in self.passes:
            each(pointers, named)
        return leaves.totals()


def backward(plan: Plan, t: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
    p, sums = plan.p, Sums.empty(plan.p, t)
    key = ("again", do.stride())
    again = plan.made.get(key)
    leaves = None if again is None else again.launch(t, out, do, dlse, sums)
    if leaves is None:
        call = Call.of(plan, t, do)
        read = _LeafSums(plan, t)  # may launch kernels; what overlaps follows one another in the stream
        rows = _statistics(call, out, dlse, sums)
        lse2, delta = sums.statistics.unbind()
        bundle = call.tensors(lse2=lse2, delta=delta, dq=sums.dq, dk=sums.dk, dv=sums.dv, grads=read.buffers)
        if plan.sheet_heads:
            passes = _by_sheets(call, bundle, read.reads[0])
        else:
            # dQ first: where its programs have a multiprocessor each, two of the next pass's fill one that has no more of them.
            roles = {"dq": "reads"} | {name: "joins" for name in plan.config.passes if name in OVER_KEYS}
            passes = [_pass(call, name, plan.config.passes[name], bundle, role=role) for name, role in roles.items()]
            passes += read.pair_tiles(call, bundle)
        leaves = read.totals()
        plan.made[key] = AgainBackward.of(call, [rows, *passes])
    dsink = None
    if t.sink is not None:
        dsink = state.sink_gradient(t.sink.float().view(-1, 1), out.lse, sums.delta(p))
        dsink = dsink.sum(-1 if p.packed else (0, 2)).to(t.sink.dtype)
    return Grads(sums.dq, sums.dk, sums.dv, dsink, leaves)


def _pass(
    call: Call, name: str, tiles: Tiles, bundle: object, part: Part | None = None, *, role: Role = "reads"
) -> Launched:
    """Runs one of ``Config.passes`` of the backward; of a part, with its sheet. ``role``: as :meth:`Plan.overlap` takes it."""
    plan, p, over_keys = call.plan, call.plan.p, name in OVER_KEYS
    kernel, length, heads = (
        (kernels().dkdv, p.seqlen_k, p.heads_k) if over_keys else (kernels().dq, p.seqlen_q, p.heads_q)
    )
    slots = blocks(p, length, tiles.tile_n if over_keys else tiles.tile_m)
    lists = call.tile_lists(tiles, over_keys)
    tensors = bundle if lists is None else bundle._replace(lists=pointers(lists))
    descriptors, letters = call.descriptors(tiles, "qd" if over_keys else "kv"), "kkvv"
    tma = descriptors[0] is not None
    parts = {"dk": name != "dv", "dv": name != "dk", "again": True, **plan.overlap(role)}
    parts |= {"sheet": SHEET_STRIP} if part else {}
    heads = part.heads if part else heads
    if over_keys:
        pair = call.pair_descriptor(tiles)
        parts |= {} if pair is None else {"pair": plan.seen[1]}
        described = tma and not p.packed
        lines = call.line_descriptor(tiles, bundle.lse2, 2 if parts["dk"] else 1) if described else None
        sheet = None
        if part and tma and tiles.tile_m <= SHEET_STRIP:
            x, block = bundle.sheet, [1, 1, 1, tiles.tile_n, tiles.tile_m]
            sheet = kernels().TensorDescriptor(x, list(x.shape), list(x.stride()), block)
            parts |= {"strips": SHEET_STRIP}
        descriptors, letters = (*descriptors, lines, pair, sheet), "qqddlp-"
    facts = plan.facts(tiles, call.align, tma=tma, whole=tma and plan.whole, **parts)
    sizes = call.sizes(slots, lists=lists, part=part)
    grid = (slots * heads * (1 if p.packed else p.batch),)
    args = (tensors, sizes, call.plan.scales, *descriptors, facts)
    return Launched.of(plan.start(kernel, grid, tiles, *args), grid, args, letters)


def _by_sheets(call: Call, bundle: object, read: Read) -> list[Launched]:
    """The passes over key tiles leave dS behind, of some heads at a time; from it come dQ and the gradient of a pair bias, which then
    take one product of a tile, not five."""
    plan, p, config = call.plan, call.plan.p, call.plan.config
    heads = plan.sheet_heads
    bundle = bundle._replace(sheet=new_sheet(plan, call.q))
    launched = [] if config.dv is None else [_pass(call, "dv", config.dv, bundle)]
    for first in range(0, p.heads_k, heads):
        part = Part(first, heads, tuple(bundle.sheet.shape[2:4]))
        launched.append(_pass(call, "dkdv" if config.dv is None else "dk", config.dkdv, bundle, part))
        launched.append(_of_sheet(call, bundle, read, part))
    return launched


def new_sheet(plan: Plan, q: Tensor) -> Tensor | None:
    """Room for dS of as many heads as are kept at a time (tile.sheet_pointers), None where none are."""
    p = plan.p
    if not plan.sheet_heads:
        return None
    rows, strips = (-(-n // SHEET_UNIT) * SHEET_UNIT // x for n, x in ((p.seqlen_k, 1), (p.seqlen_q, SHEET_STRIP)))
    return q.new_empty((p.batch, plan.sheet_heads * p.group, strips, rows, SHEET_STRIP), dtype=p.dtype)


def _of_sheet(call: Call, bundle: object, read: Read, part: Part) -> Launched:
    plan, p, tiles = call.plan, call.plan.p, of_sheet(call.plan.p, call.plan.config)
    slots = blocks(p, p.seqlen_q, tiles.tile_m)
    descriptors = call.descriptors(tiles, "k")
    tma = descriptors[0] is not None
    unit = math.gcd(p.seqlen_k, 16 // p.dtype.itemsize)
    facts = plan.facts(tiles, call.align, tma=tma, whole=tma and plan.whole, read=0, unit=unit)
    grid = (slots * part.heads * p.group * p.batch,)
    loops = ("b" in read.loops, "h" in read.loops, "h" in read.loops and part.first > 0)
    args = (bundle, call.sizes(slots, part=part), call.plan.scales, *descriptors, 0, *loops, facts)
    return Launched.of(plan.start(kernels().sheet, grid, tiles, *args), grid, args, "kk")


def line_length(p: Problem) -> int:
    """Rows of a head in the statistics' buffers: blocks of them start at multiples of 16 bytes, as descriptors ask."""
    return p.seqlen_q if p.packed else -(-p.seqlen_q // 4) * 4


PADDING = 256  # rows that the pass over key tiles may read past the last one: a tile


def _statistics(call: Call, out: Output, dlse: Tensor, sums: Sums) -> Launched:
    """Computes ``sums.statistics``."""
    p, tiles = call.plan.p, Tiles(64 if call.plan.parts == 1 else PARTS_ROWS, 64, 4, 1, padded=True)
    slots = -(-p.seqlen_q // tiles.tile_m)
    grid = (slots * p.heads_q * (1 if p.packed else p.batch),)
    dlse = dlse.contiguous()
    call = call if aligned(out.o, out.lse, dlse) else replace(call, steady=False)
    lse2, delta = sums.statistics.unbind()
    tensors = call.tensors(o=out.o, lse=out.lse, dlse=dlse, lse2=lse2, delta=delta)
    sizes, facts = call.sizes(slots), call.plan.facts(tiles, call.align, **call.plan.overlap("leads"))
    args = (tensors, sizes, call.plan.scales, facts)
    return Launched.of(call.plan.start(kernels().delta, grid, tiles, *args), grid, args)


class _LeafSums:
    """The sums of the leaves' gradients: a buffer for each read, and what becomes of them."""

    def __init__(self, plan: Plan, t: Inputs):
        self.plan, self.t = plan, t
        p, self.reads = plan.p, plan.emitted.reads
        self.grads: dict[int, Tensor] = {}
        # Thousands of numbers may be scattered to one address, in any order: of fp32 such a chain rounds more than eager's sums
        # (docs/decisions.md#triton-float64-scatter).
        exact = {read.slot for read in self.reads if read.how == SCATTER and p.dtype == torch.float32}
        for read in self.reads:
            leaf = t.leaves[read.slot]
            parts = 0 < plan.sheet_heads < p.heads_k and "h" in read.loops
            alone = read.how in (STORE, TILES) and not parts
            new = torch.empty if read.how == TILES and _all_of(leaf, read) else torch.zeros
            dtype = leaf.dtype if alone else torch.float64 if read.slot in exact else torch.float32
            self.grads.setdefault(read.slot, new(leaf.shape, dtype=dtype, device=leaf.device))
        lead = (p.heads_q,) if p.packed else (p.batch, p.heads_q)
        lines = {ROWS: p.seqlen_q, COLUMNS: p.seqlen_k}
        self.buffers = tuple(
            t.q.new_zeros((*lead, lines[r.how]), dtype=torch.float32) if r.how in lines else self.grads[r.slot]
            for r in self.reads
        )

    def pair_tiles(self, call: Call, tensors) -> list[Launched]:
        """Leaves read at (i, j) that are broadcast over the batch or the heads: one kernel each."""
        plan, p, launched = self.plan, self.plan.p, []
        tiles = of_pairs(p, plan.config.dq)
        for n, read in enumerate(self.reads):
            if read.how != TILES:
                continue
            outer = (1 if "b" in read.loops else p.batch) * (1 if "h" in read.loops else p.heads_q)
            grid = (-(-p.seqlen_q // tiles.tile_m), -(-p.seqlen_k // tiles.tile_n), outer)
            facts = plan.facts(tiles, call.align, lists=False, again=True, read=n)
            loops = ("b" in read.loops, "h" in read.loops)
            args = (tensors, call.sizes(1), call.plan.scales, n, *loops, facts)
            launched.append(Launched.of(plan.start(kernels().tile, grid, tiles, *args), grid, args))
        return launched

    def totals(self) -> dict[int, Tensor]:
        for read, buffer in zip(self.reads, self.buffers, strict=True):
            if read.how in (ROWS, COLUMNS):
                grad, axes = self.grads[read.slot], _kept_axes(self.plan.p, read, buffer)
                if axes is not None:
                    rest = [axis for axis in range(buffer.ndim) if axis not in axes]
                    order = [sorted(axes).index(axis) for axis in axes]
                    grad += (buffer.sum(rest) if rest else buffer).permute(order)
                    continue
                env, g = self._lines(read.how, buffer)
                read_adjoint(grad, read.expr, env, self.t.leaves, g)
        return {slot: grad.to(self.t.leaves[slot].dtype) for slot, grad in self.grads.items()}

    def _lines(self, how: str, buffer: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Indices of a buffer of row or column sums, and the buffer, on axes ``(b, h, i, j)``."""
        p, device = self.plan.p, buffer.device
        h = torch.arange(p.heads_q, device=device).view(1, -1, 1, 1)
        n = lambda x: torch.full((), x, device=device)  # noqa: E731 - filled there: a copy would wait for the GPU
        if p.packed:
            env = self._packed_lines(how, buffer.shape[-1])
            g = buffer.unsqueeze(0)
        else:
            line = torch.arange(buffer.shape[-1], device=device)
            env = {"b": torch.arange(p.batch, device=device).view(-1, 1, 1, 1)}
            env |= {"seqlen_q": n(p.seqlen_q), "seqlen_k": n(p.seqlen_k)}
            env["i" if how == ROWS else "j"] = line.view(1, 1, -1, 1) if how == ROWS else line.view(1, 1, 1, -1)
            g = buffer
        env |= {"h": h, "off": env["seqlen_k"] - env["seqlen_q"]}
        return env, g.unsqueeze(-1) if how == ROWS else g.unsqueeze(-2)

    def _packed_lines(self, how: str, total: int) -> dict[str, Tensor]:
        """Of every packed row: its sequence, its index within it, and that sequence's lengths."""
        t = self.t
        cu_q, cu_k = t.cu_seqlens_q.long(), t.cu_seqlens_k.long()
        cu = cu_q if how == ROWS else cu_k
        line = torch.arange(total, device=cu.device)
        b = torch.searchsorted(cu[1:].contiguous(), line, right=True).clamp(max=len(cu) - 2)
        shape = (1, 1, -1, 1) if how == ROWS else (1, 1, 1, -1)
        view = lambda x: x.view(shape)  # noqa: E731
        return {
            "b": view(b),
            "i" if how == ROWS else "j": view(line - cu[b]),
            "seqlen_q": view((cu_q[1:] - cu_q[:-1])[b]),
            "seqlen_k": view((cu_k[1:] - cu_k[:-1])[b]),
        }


def _all_of(leaf: Tensor, read: Read) -> bool:
    """Whether a read at whole axes and numbers is of every element: of an axis that a number indexes, there is one."""
    return all(size == 1 for size, x in zip(leaf.shape, read.expr.args[1:], strict=True) if x.op == "number")


def _kept_axes(p: Problem, read: Read, buffer: Tensor) -> list[int] | None:
    """The axes of a buffer of row or column sums, (batch, heads, line) or packed (heads, line), that a leaf's axes are, in its
    order, where it is read at whole axes and nothing else: its gradient is then one sum. None elsewhere."""
    line = "i" if read.how == ROWS else "j"
    names = ("h",) if p.packed else ("b", "h", line)
    shape, axes = p.extras[read.slot].shape, []
    for size, index in zip(shape, read.expr.args[1:], strict=True):
        name = index.args[0] if index.op == "symbol" else None
        if name not in names or names.index(name) in axes or buffer.shape[names.index(name)] != size:
            return None
        axes.append(names.index(name))
    return axes
