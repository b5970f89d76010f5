"""The decisions that are made once for a problem: its emitted functions, its launches' compile-time facts, and what its calls share."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from tilewise import dropout, expr
from tilewise.backends.base import Inputs, PerTensors
from tilewise.backends.triton.config import TERM_PRODUCTS, TERMS, Config, architecture, is_short
from tilewise.backends.triton.host import runtime
from tilewise.backends.triton.host.facts import Facts
from tilewise.backends.triton.host.runtime import KernelLaunch
from tilewise.backends.triton.kernels.emit import Emitted, emit
from tilewise.backends.triton.kernels.leaf_reads import AXES, all_axes, described_lookup, is_wide
from tilewise.backends.triton.paging import PagedConfig
from tilewise.backends.triton.reads import PairReads
from tilewise.backends.triton.sheet import (
    SheetPart,
    is_too_wide,
    pair_parts,
    pair_room,
    sheet_parts,
    sheet_tiles,
    splits_of_sum,
)
from tilewise.backends.triton.tiles import Tiles, pieces
from tilewise.caching import cached_property
from tilewise.device import given_to_graphs, lasting
from tilewise.leaf_gradients import DIAGONALS, ROWS, TILES, reads_every_element
from tilewise.planning.bit_tiles import may_hide_keys
from tilewise.problem import Problem

Role = Literal["leads", "reads", "joins"]
"""The part of a kernel that may run while its neighbour in the stream does: programmatic dependent launch.

- ``leads``: it is launched as any kernel, and lets the next one begin early.
- ``reads``: it reads what the kernel before it wrote, so its first statement waits for the end of that one.
- ``joins``: it reads only what was complete when the kernel before it began, so it waits for that one's end last of all.
"""

OVERLAPPING = ("sm90", "sm100")  # the devices with programmatic dependent launch

Key, Value = TypeVar("Key", bound=Hashable), TypeVar("Value")


class Memo(dict[Key, Value]):
    """Values by what they depend on, each made at its first use."""

    def of(self, key: Key, make: Callable[[], Value]) -> Value:
        if key not in self:
            self[key] = make()
        return self[key]


def operand_strides(x: Tensor) -> tuple[int, int, int]:
    """``(batch, row, head)`` strides of a tensor laid out as q, in elements; packed, the first is 0, of pages that of a page."""
    return (0, x.stride(0), x.stride(1)) if x.ndim == 3 else (x.stride(0), x.stride(1), x.stride(2))


def in_units(strides: dict[str, tuple[int, ...]], unit: int) -> tuple[int, dict[str, tuple[int, ...]]]:
    """``(unit, strides)``: strides in units of so many elements, where all are multiples of them; else of one element."""
    if any(n % unit for each in strides.values() for n in each):
        unit = 1
    return unit, {name: tuple(n // unit for n in each) for name, each in strides.items()}


@dataclass(eq=False)
class Decisions:
    """The facts that follow from a problem and its configuration, each worked out once."""

    problem: Problem
    config: Config

    @property
    def dims(self) -> tuple[int, int]:
        """The columns of q and k, and those of v."""
        return self.problem.head_dim, self.problem.head_dim_v

    @property
    def terms(self) -> int:
        """The bf16 numbers that stand for each element of q, k, v and dO in the kernels' products."""
        return TERMS if self.config.products == "bf16x6" else 1

    @property
    def term_unit(self) -> int:
        """``Tiles.term_unit`` of every pass: all read the same terms."""
        return self.config.forward.term_unit if self.terms > 1 else 1

    @cached_property
    def emitted(self) -> Emitted:
        return self._emitted(None)

    @cached_property
    def emitted_for_pairs(self) -> Emitted:
        """The emitted functions that find a tile of :attr:`pair_leaf` instead of reading its elements."""
        return self._emitted(self.pair_leaf[0])

    def _emitted(self, described: int | None) -> Emitted:
        return emit(self.problem, self.wide, described, mixed_rows=isinstance(self.config, PagedConfig))

    @cached_property
    def wide(self) -> frozenset[int]:
        """The slots of tensors whose elements need 64-bit offsets."""
        return frozenset(n for n, leaf in enumerate(self.problem.extras) if is_wide(leaf))

    @cached_property
    def extents(self) -> tuple[tuple[int, ...], ...]:
        """Size and stride of every axis, for each leaf that kernels read, and each line. Slots behind the leaves' are those of tangents."""
        extras = self.problem.extras
        strides = [x.stride for x in extras] + [torch.empty(x.shape, device="meta").stride() for x in extras]
        leaves = [extents_of(extras[n % len(extras)].shape, strides[n]) for n in self.emitted.slots]
        return (*leaves, *[extents_of(x.shape, x.stride()) for x in self.emitted.lines])

    @cached_property
    def grad_extents(self) -> tuple[tuple[int, ...], ...]:
        """Size and stride of every axis of contiguous tensors of the same shapes."""
        extras = self.problem.extras
        shapes = [extras[n % len(extras)].shape for n in self.emitted.slots]
        return tuple(extents_of(shape, torch.empty(shape, device="meta").stride()) for shape in shapes)

    @cached_property
    def scales(self):
        """The Scales of every launch."""
        problem = self.problem
        keep = dropout.keep_scale(problem.spec.dropout_p) if problem.spec.dropout_p else 1.0
        return runtime.kernels().Scales(float(problem.softmax_scale), keep, runtime.opaque(self.emitted.numbers))

    @cached_property
    def piece_start(self) -> torch.Tensor | None:
        """The call's first query and key in the whole attention, int64 (2,), where dropout counts from them; else None."""
        piece = self.problem.spec.piece
        if piece is None or not self.problem.spec.dropout_p:
            return None
        return lasting(lambda: torch.tensor([piece.q_start, piece.k_start], device=self.problem.device))

    @cached_property
    def pair_leaf(self) -> tuple[int, tuple[int | str, ...]] | None:
        """The leaf whose tiles a descriptor may bring to the score: ``(slot, (its place, leading indices))``; each a name or number."""
        lookup = described_lookup(self.problem)
        if lookup is None:
            return None
        slot, index = lookup.args[0][1], all_axes(lookup, self.problem.extras).args[1:-2]
        return slot, (self.emitted.slots.index(slot), *(0,) * (2 - len(index)), *[x.args[0] for x in index])


@dataclass(eq=False)
class TileDecisions(Decisions):
    """The decisions about tiles of pairs: which are visited, how they are read, and which a backward keeps."""

    @property
    def lists(self) -> bool:
        """Whether kernels walk over lists of tiles, as they do for a predicate.

        They do not where sequences are short, as in windows of an image: listing their few tiles costs more than visiting them. Nor where
        the mask is of keys alone and dS is kept.
        """
        if self.problem.spec.region.predicate is None or self.problem.packed or self.problem.paged:
            return False
        return not (self.whole and (is_short(self.problem) or self._may_keep))

    @cached_property
    def whole(self) -> bool:
        """Whether descriptors may read every tile.

        They hide the rows past a tensor's last, but neither another packed sequence's nor keys that no query sees, which may hold NaN.
        """
        return not self.problem.packed and (self.zeroed or not self._hides_keys)

    @cached_property
    def zeroed(self) -> bool:
        """Whether V in a forward, and K in a backward, is a copy with zeros for keys that no query sees
        (docs/decisions.md#triton-zeroed-keys): so descriptors may read all tiles of a predicate, and dS can be kept."""
        problem, config = self.problem, self.config
        if problem.packed or isinstance(config, PagedConfig) or not self._hides_keys:
            return False
        described = problem.spec.region.predicate is not None and all(x.tma for x in config.passes.values())
        return described or self._may_keep

    @property
    def _hides_keys(self) -> bool:
        """Whether tiles that are visited may have keys that no query sees."""
        region, lengths = self.problem.spec.region, (self.problem.seqlen_q, self.problem.seqlen_k)
        if not may_hide_keys(region, lengths):
            return False
        if isinstance(self.config, PagedConfig) or is_short(self.problem) or self._may_keep:
            return True
        return may_hide_keys(region, lengths, max(x.tile_n for x in self.config.passes.values()))

    @property
    def _may_keep(self) -> bool:
        """Whether a backward keeps tiles of pairs, if descriptors may read every key: not beside a long predicate of more than keys, which
        is listed. P beside dS asks no more than a comparison, so that all lengths have one decision."""
        region = self.problem.spec.region
        of_pairs = region.predicate is not None and bool(expr.depends_on(*region.parts) & {"i", "h"})
        if (of_pairs and not is_short(self.problem)) or not self._keeps_some:
            return False
        return pair_room(self.problem) > 0 if self.keeps_pairs else bool(self._parts)

    @property
    def _keeps_some(self) -> bool:
        """Whether the problem is of a kind whose backward may keep tiles of pairs."""
        problem = self.problem
        return problem.spec.needs_grad and not (problem.packed or isinstance(self.config, PagedConfig))

    @property
    def keeps_pairs(self) -> bool:
        """Whether a sheet holds P too, so that all gradients come from kept tiles: with terms of fp32, where each of three passes would
        compute all pairs again (docs/decisions.md#triton-kept-pairs)."""
        config = self.config
        return config.dv is not None and config.dkdv.chunk > 0 and config.group_parts == 1 and not self.emitted.reads

    @property
    def sheet(self) -> tuple[SheetPart, ...]:
        """The parts of dS that the backward keeps for dQ and the gradient of a broadcast bias, or of a table read at most distances.

        There are none unless that is the one tensor that wants a gradient, dS is that gradient, and a sheet can hold a part of it; nor
        where tiles come as lists, since a sheet is read wherever the ends of rows allow, and listed tiles alone would be written.
        Where :attr:`keeps_pairs`, no tensor need want a gradient.
        """
        return () if self.lists or not self.whole else self._parts

    @cached_property
    def _parts(self) -> tuple[SheetPart, ...]:
        """:attr:`sheet`, whatever the mask."""
        problem, emitted = self.problem, self.emitted
        if not self._keeps_some:
            return ()
        if self.keeps_pairs:
            return pair_parts(problem)
        if len(emitted.reads) != 1 or {"slope", "tile_0"} & set(emitted.functions) or is_too_wide(problem):
            return ()
        read = emitted.reads[0]
        leaf = problem.extras[read.slot]
        # dS is kept in the problem's dtype, which has to hold what the leaf's gradient does: bf16 has fp32's range.
        if read.how not in (TILES, DIAGONALS) or leaf.dtype != problem.dtype != torch.bfloat16:
            return ()
        gradient = 0 if read.pairs or read.how == DIAGONALS else math.prod(leaf.shape) * leaf.dtype.itemsize
        return sheet_parts(problem, read.loops, self.config.beside, gradient)

    @cached_property
    def splits(self) -> tuple[int, int]:
        """How many adjacent programs add into one partial sum of a bias's gradient, and how many partial sums there are, each a tensor of
        its own; ``(1, 1)`` where no gradient is made of a sheet."""
        if not self.sheet or self.keeps_pairs or self.emitted.reads[0].how != TILES:
            return 1, 1
        read, tiles = self.emitted.reads[0], sheet_tiles(self.problem, self.config)
        together, number = splits_of_sum(self.problem, self.sheet[0], read.loops, tiles)
        # A leaf may be far longer than the sequences are, and each partial sum is as large.
        return (together, number) if read.pairs or reads_every_element(self.problem, read) else (together * number, 1)


@dataclass(eq=False)
class Plan(TileDecisions):
    """The decisions for one problem, and what its calls have in common.

    Attributes:
        launches: what :meth:`call.Call.run` made. of_mask: what was made of a mask's tensors, lists of tiles and which keys are seen.
        indices: at which elements of a leaf the distances of a read by distance are read.
    """

    launches: Memo[tuple, Sequence[KernelLaunch]] = field(default_factory=Memo)
    of_mask: PerTensors = field(default_factory=PerTensors)
    indices: Memo[tuple, list[Tensor]] = field(default_factory=Memo)
    DECIDED: ClassVar[tuple[str, ...]] = ("wide", "emitted", "extents", "zeroed", "whole", "pair_leaf")

    def decided(self) -> tuple[Callable[[Problem, dict[str, Any]], Plan], dict[str, Any]]:
        """``(make, values)`` of :class:`tilewise.backends.base.PerProblem`."""
        few = None if self.few is None else self.few.decided()[1]
        return Plan.with_values, {
            "config": self.config,
            "few": few,
            **{name: getattr(self, name) for name in self.DECIDED},
        }

    @classmethod
    def with_values(cls, problem: Problem, values: dict[str, Any]) -> Plan:
        """The plan of a problem that has these properties."""
        plan, few = cls(problem, values["config"]), values["few"]
        plan.__dict__.update(values, few=None if few is None else cls.with_values(problem, few))
        return plan

    def overlap(self, role: Role) -> Role | None:
        """The role of a kernel; None where kernels do not overlap.

        They do not where one of them may have no programs, nor read lists of tiles, which another kernel may have made just before.
        """
        sizes = (self.problem.batch, self.problem.seqlen_q, self.problem.seqlen_k)
        able = architecture(self.problem.device) in OVERLAPPING
        early = able and all(sizes) and (role == "leads" or not self.lists)
        return role if early else None

    def mask_leaves(self, inputs: Inputs) -> list[Tensor]:
        """The tensors that the mask reads."""
        return [inputs.leaves[n] for n in self.problem.spec.mask_slots]

    def facts(
        self,
        tiles: Tiles,
        align: int,
        *,
        again: bool = False,
        read: int | None = None,
        only: Sequence[str] = (),
        **chosen: object,
    ) -> Facts:
        """The compile-time part of a launch.

        Args:
            align: elements of which every stride is a multiple.
            again: whether the score is computed again, for gradients. read: the sum is that of ``emitted.reads[read]``.
            only: the facts that the kernel reads, where mask and score are none of its business: so it is one kernel for all of these.
            chosen: facts in place of what they are for this problem and these tiles.
        """
        emitted = self.emitted if chosen.get("pair") is None else self.emitted_for_pairs
        facts = _functions(emitted, again, read) | _tile_facts(self, tiles) | _problem_facts(self, emitted)
        facts |= {"align": align, **chosen}
        return Facts(**({name: facts[name] for name in only if name in facts} if only else facts))

    def leaves(self, inputs: Inputs) -> list[Tensor]:
        """The tensors that kernels read as ``work.leaves``: those of the mask and the score, then lines."""
        return [*[inputs.leaves[slot] for slot in self.emitted.slots], *given_to_graphs(self.lines)]

    @cached_property
    def lines(self) -> tuple[Tensor, ...]:
        """``Emitted.lines`` on the problem's device."""
        return lasting(lambda: tuple(x.to(self.problem.device) for x in self.emitted.lines))

    @cached_property
    def few(self) -> Plan | None:
        """The plan of a forward whose query heads share tiles, or whose keys are split (``Config.few``); None: it is as any other."""
        return None if self.config.few is None else Plan(self.problem, self.config.few)


def extents_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Size and stride of every axis, one after the other; of fewer than AXES they are the last ones."""
    return (1, 0) * (AXES - len(shape)) + tuple(n for axis in zip(shape, stride, strict=True) for n in axis)


_EMITTED = ("lo", "hi", "first", "last", "keep", "score", "weights", "near", "heads")
_OF_GRADIENTS = ("slope", "rows", "leaves", "columns", "exponent", "moved", "moved_slope")


def _functions(emitted: Emitted, again: bool, read: int | None) -> dict[str, object]:
    """The emitted functions that a kernel reads, and no others: a forward is one kernel with gradients of leaves and without."""
    found = {name: emitted.functions.get(name) for name in (*_EMITTED, *(_OF_GRADIENTS if again else ()))}
    if again:
        row_grads = tuple(n for n, x in enumerate(emitted.reads) if x.how == ROWS)
        found |= {"score": emitted.functions.get("again"), "weights": None, "row_grads": row_grads}
    if read is not None:
        found |= {name: emitted.functions.get(f"{name}_{read}") for name in ("tile", "place", "start")}
    return found


def _tile_facts(plan: TileDecisions, tiles: Tiles) -> dict[str, object]:
    """The facts of a launch with these tiles."""
    return {
        "tile_m": tiles.tile_m,
        "tile_n": tiles.tile_n,
        "pieces": pieces(plan.problem.head_dim, tiles),
        "pieces_v": pieces(plan.problem.head_dim_v, tiles),
        "chunk": tiles.chunk,
        "column_parts": tiles.column_parts,
        "unit": math.gcd(*plan.dims, 8),
        "together": tiles.ahead,
        "partial_stages": min(2, tiles.num_stages) if PairReads.of(plan.problem).bytes else 1,
    }


def _problem_facts(plan: TileDecisions, emitted: Emitted) -> dict[str, object]:
    """The facts that are the same in every launch of a problem."""
    problem, spec, region = plan.problem, plan.problem.spec, plan.problem.spec.region
    ends = [e for e in region.ends if e is not None]
    fp32 = problem.dtype == torch.float32
    return {
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "packed": problem.packed,
        "lists": plan.lists,
        "general": spec.score is not None or not problem.softmax_scale > 0 or fp32,
        "natural": fp32,
        "masked": not emitted.functions.keys().isdisjoint(("lo", "hi", "keep")),
        "ordered": spec.everywhere,
        "sink": spec.sink_slot is not None,
        "dropout": spec.dropout_p > 0,
        "precision": "tf32" if plan.config.products == "tf32" else "ieee",
        "terms": plan.terms,
        "term_unit": plan.term_unit,
        "products": TERM_PRODUCTS if plan.terms > 1 else ((0, 0),),
        "upcast": (problem.dtype == torch.bfloat16 or plan.terms > 1) and problem.device.type == "cpu",
        "varies": bool(expr.lookups(*ends) or expr.depends_on(*ends) & {"b", "h"}),
        "hides": emitted.hides,
        "binary": emitted.binary,
        "bounded": emitted.bounded,
        "corner": emitted.corner,
    }
