"""The part that the plans of the forward and of the backward share: a problem's facts, and tensors and numbers as the kernels take them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from tilewise.backends.base import Inputs, Output, PerTensors, has_no_pair
from tilewise.backends.hopper import capped
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.config import PLAIN, Band, Expressions, cap_of, keys_of, slopes_of, strides_addressable
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.host import masks
from tilewise.backends.hopper.host.draft import Launches, View
from tilewise.backends.hopper.pair_bias import ALIGNED, PairBias, aligned, pair_bias_of
from tilewise.backends.hopper.parameters import SCORES
from tilewise.backends.hopper.tables import Line, line_of
from tilewise.caching import cached_property
from tilewise.dropout import keep_scale, threshold
from tilewise.planning.bit_tiles import Layout, may_hide_keys
from tilewise.planning.planner import Making
from tilewise.planning.tiles import SeenKeys
from tilewise.problem import Problem, TensorFacts
from tilewise.signature import contiguous_strides

LOG2_E = math.log2(math.e)
FAR = 1 << 30  # the end of a band that has none: no key reaches it


@dataclass(eq=False)
class Plan:
    """Decisions for one problem. ``made``: what was made of a mask's tensors, kept while these are the same."""

    problem: Problem
    made: PerTensors = field(default_factory=PerTensors, kw_only=True)
    direct: ClassVar[tuple[int, ...]] = ()  # see :mod:`tilewise.backends.hopper.host.direct`

    def forward(self, inputs: Inputs) -> Output:
        """The forward, of a plan that is of one."""
        raise NotImplementedError

    def of_memory(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], lse: bool, seed: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """The forward of a plan that is :attr:`direct` (:data:`tilewise.backends.base.DirectCall`, but for the seed)."""
        raise NotImplementedError

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None
    ) -> tuple[Tensor, ...]:
        """:meth:`forward` as :meth:`tilewise.backends.base.Backend.caller` has it."""
        found = self.of_memory(q, k, v, extras, True, seed) if self.direct else None
        return self.forward(Inputs.of(self.problem, q, k, v, extras, seed)).tensors if found is None else found

    def mask_leaves(self, inputs: Inputs) -> list[Tensor]:
        """The tensors that the mask reads."""
        return [inputs.leaves[n] for n in self.problem.spec.mask_slots]

    @property
    def slots_of_mask(self) -> tuple[int, ...]:
        """The slots of the tensors of which memories are made."""
        return self.problem.spec.mask_slots

    def of_leaves(self, key: str, extras: Sequence[Tensor], making: Callable[..., Any]) -> Any:
        """What is made of the mask's tensors among the extras, kept while they are the same."""
        leaves = [extras[n] for n in self.slots_of_mask]
        return self.made.of(key, leaves, partial(making, extras, self.problem.device))

    def of_mask(self, inputs: Inputs, make: Callable[[Problem, Inputs], Any]) -> Any:
        """The result of a function of the mask's tensors, kept while they are the same."""
        return self.made.of(make, self.mask_leaves(inputs), lambda: make(self.problem, inputs))


@dataclass(eq=False)
class ScorePlan(Plan):
    """The decisions about what kernels read beside q, k and v: of dropout, of a score, and of packed sequences."""

    config: Config | Backward

    @cached_property
    def expressions(self) -> Expressions:
        return Expressions.of(self.problem)

    @cached_property
    def numbers_beside(self) -> dict[str, int | float]:
        """The numbers that kernels may read of dropout, of sinks, of a score and of expressions, by name."""
        dropped, config = self.problem.spec.dropout_p, self.config
        found = {"threshold": threshold(dropped), "keep": keep_scale(dropped)}
        found["sinks"] = int(self.problem.spec.sink_slot is not None)
        found |= {"start": self.line_of.start} if config.score == "table" else {}
        traced = self.expressions.numbers if config.traced != PLAIN else ()
        last = capped.numbers(*self.scales) if config.short_tanh else traced
        return found | {f"number{n}": x for n, x in enumerate(last)}

    def tensors_beside(self, inputs: Inputs) -> dict[str, Tensor]:
        """The tensors that kernels read of these, and of packed sequences."""
        config, found = self.config, {}
        if config.dropout:
            found["seed"] = inputs.seed
        for x in SCORES[config.score].reads:
            found |= {x.name: getattr(self, x.name)(inputs)} if x.shape is not None else {}
        if config.packed:
            found |= {"cu_q": inputs.cu_seqlens_q.int(), "cu_k": inputs.cu_seqlens_k.int()}
        if config.traced != PLAIN:
            found |= {f"leaf{n}": leaf(inputs.leaves[n]) for n in self.expressions.slots}
        return found

    def drafted_leaves(self) -> dict[str, View]:
        """The tensors that expressions read, by name."""
        slots = self.expressions.slots if self.config.traced != PLAIN else ()
        return {f"leaf{n}": leaf_view(slot, self.problem.extras[slot]) for n, slot in enumerate(slots)}

    @cached_property
    def slopes_slot(self) -> int:
        """The leaf that holds ALiBi's slopes."""
        return slopes_of(self.problem)

    def slopes(self, inputs: Inputs) -> Tensor:
        """ALiBi's slopes, (heads_q,), fp32."""
        return inputs.leaves[self.slopes_slot].detach().contiguous()

    @cached_property
    def bias_of(self) -> PairBias:
        return pair_bias_of(self.problem)

    def bias(self, inputs: Inputs) -> Tensor:
        """The biases of pairs, (batch or 1, heads_q or 1, query, key), as the copy engine takes them."""
        return self.bias_of.of(inputs.leaves[self.bias_of.slot].detach())

    @cached_property
    def line_of(self) -> Line:
        return line_of(self.problem)

    def line(self, inputs: Inputs) -> Tensor:
        """The biases of a table by distance, (1 or heads_q, count), fp32, in base 2."""
        return (self.line_of.of(inputs.leaves[self.line_of.slot].detach()).float() * LOG2_E).contiguous()

    @cached_property
    def scales(self) -> tuple[float, float]:
        """``(scale2, cap2)``: what takes the kernel's scores to base 2, and what a softcap multiplies products by, 0 without one."""
        problem = self.problem
        cap = None if self.config.biased else cap_of(problem)
        if self.config.traced.score:
            return LOG2_E, 0.0
        if cap is None:
            return LOG2_E * problem.softmax_scale, 0.0
        return LOG2_E * cap, 2 * LOG2_E * problem.softmax_scale / cap


@dataclass(eq=False)
class MaskPlan(ScorePlan):
    """The decisions about what is kept of a mask's tensors, and which copies of k and v a call reads (docs/decisions.md#repeated-calls).

    Attributes:
        PRODUCTS: of k and v, those that P or dS is multiplied with, where kernels are not kept from keys that no query sees otherwise.
    """

    PRODUCTS: ClassVar[tuple[str, ...]] = ()

    @property
    def tiles(self) -> masks.Sized:
        """The tiles in which keys are visited."""
        raise NotImplementedError

    @cached_property
    def zeroed(self) -> tuple[str, ...]:
        """Those of k and v that have zeros for keys that no query sees. They may be NaN, and in a product even a P or dS of zero would let
        them through."""
        tiles = self.tiles
        visited = (tiles.tile_m, tiles.tile_n) if self.config.form == "bits" else None
        lengths = self.problem.seqlen_q, self.problem.seqlen_k
        unseen = not self.config.of_numbers and may_hide_keys(self.problem.spec.region, lengths, visited)
        return self.PRODUCTS if unseen else ()

    @property
    def bits(self) -> dict[str, masks.BitsOf]:
        """What each pass reads of a mask with a bit for each pair, by the name of its memory."""
        return {}

    @cached_property
    def layout_of_seen(self) -> Layout | None:
        """The layout of the memory, of the first :attr:`bits`, that says which keys are seen too; None: a memory of its own says it."""
        first = next(iter(self.bits.values()), None)
        return first and first.layout(True)

    @cached_property
    def keeps(self) -> tuple[str, ...]:
        """The names of the memories that are kept of the mask's tensors; the first one says which keys are seen, where some of k and v are
        :attr:`zeroed`."""
        return tuple(self.bits) or (("seen",) if self.zeroed else ())

    @cached_property
    def makings(self) -> tuple[Making, ...]:
        """What makes each of them."""
        if not self.bits:
            return (lambda extras, device: masks.seen(self.problem, extras, self.problem.group),)
        each = zip(self.bits.values(), self.sections, strict=False)
        return tuple([x.making(*section, seen=n == 0 and bool(self.zeroed)) for n, (x, section) in enumerate(each)])

    @cached_property
    def contiguous(self) -> bool:
        """Whether those that are :attr:`zeroed` lie as their copies would, by the call's strides: a tensor may have its heads first."""
        each = (getattr(self.problem, name) for name in self.zeroed)
        return all(tuple(x.stride) == contiguous_strides(x.shape) for x in each)

    def of_seen_keys(self, memory: Tensor, extras: Sequence[Tensor], *tensors: Tensor) -> Sequence[Tensor]:
        """Those that are :attr:`zeroed`, with zeros for keys that no query sees; as they are once the device has reported that there
        are none."""
        seen = self.of_leaves("seen keys", extras, lambda *_: SeenKeys.of(masks.seen_of(memory, self.layout_of_seen)))
        if seen.are_all() and self.contiguous and not any(x.data_ptr() % ALIGNED for x in tensors):
            return tensors
        return [seen.zeroed(x) for x in tensors]

    def kept(self, extras: Sequence[Tensor]) -> Sequence[Tensor]:
        """The memories that are kept of the mask's tensors, in the order of their names."""
        if not self.keeps:
            return ()
        return [self.of_leaves(name, extras, make) for name, make in zip(self.keeps, self.makings, strict=True)]


@dataclass(eq=False)
class LaunchPlan(MaskPlan):
    """The decisions for one pass over a problem, the forward's or the backward's.

    Attributes:
        DECIDED: the properties that follow from the problem's sizes and are computed at once where they are by structure.
        BESIDE: what a call brings behind the seed.
    """

    DECIDED: ClassVar[tuple[str, ...]] = ("copied", "zeroed", "keeps", "launches")
    BESIDE: ClassVar[tuple[str, ...]] = ()

    def drafted(self) -> Launches:
        """The launches of a call that sees keys."""
        raise NotImplementedError

    @cached_property
    def launches(self) -> Launches | None:
        """The launches; None where no query sees a key."""
        return None if self.sees_nothing else self.drafted()

    @cached_property
    def copied(self) -> tuple[str, ...]:
        """Those of q, k and v of which kernels read a contiguous copy: the copy engine cannot address their strides, or it has zeros for
        the keys that no query sees, where kernels are not kept from these otherwise."""
        named = ("q", self.problem.q), ("k", self.problem.k), ("v", self.problem.v)
        return tuple(name for name, x in named if name in self.zeroed or not strides_addressable(x.shape, x.stride))

    @property
    def places(self) -> dict[str, int]:
        """The places of tensors that kernels read as they are, among q, k, v, the extras, the seed, :attr:`BESIDE` and what it
        :attr:`keeps`."""
        spec, extras = self.problem.spec, self.problem.extras
        found = {"q": 0, "k": 1, "v": 2}
        found |= {name: 3 + len(extras) + n for n, name in enumerate(("seed", *self.BESIDE, *self.keeps))}
        pages = {"block_table": spec.page_slots[0], "seqlens_k": spec.page_slots[1]} if spec.page_slots else {}
        cu = dict(zip(("cu_q", "cu_k"), spec.cu_slots, strict=False))
        found |= {name: 3 + n for name, n in pages.items()}
        found |= {name: 3 + n for name, n in cu.items() if is_plain(extras[n], torch.int32)}
        if spec.sink_slot is not None and is_plain(extras[spec.sink_slot], torch.float32):
            found["sink"] = 3 + spec.sink_slot
        if self.config.score == "alibi" and is_plain(extras[self.slopes_slot], torch.float32):
            found["slopes"] = 3 + self.slopes_slot
        if self.config.traced != PLAIN:
            leaves = {n: extras[n] for n in self.expressions.slots}
            found |= {f"leaf{n}": 3 + n for n, x in leaves.items() if x.shape and x.dtype != torch.bool}
        return found

    def view(self, name: str) -> View:
        """q, k or v as kernels read it."""
        found = View.of(name, getattr(self.problem, name))
        return found._replace(strides=contiguous_strides(found.shape)) if name in self.copied else found

    def read(self, inputs: Inputs, kept: Sequence[Tensor] = ()) -> dict[str, Tensor]:
        """q, k and v as :meth:`view` has them, by what is :meth:`kept` of the mask."""
        found = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
        if self.copied or (inputs.q.data_ptr() | inputs.k.data_ptr() | inputs.v.data_ptr()) % ALIGNED:
            others = {name: x for name, x in found.items() if name not in self.zeroed}
            found |= {name: aligned(x.contiguous() if name in self.copied else x) for name, x in others.items()}
        if self.zeroed:
            tensors = self.of_seen_keys(kept[0], inputs.leaves, *[found[name] for name in self.zeroed])
            found |= zip(self.zeroed, tensors, strict=True)
        return found

    @property
    def sees_nothing(self) -> bool:
        """Whether it is certain that no query sees a key."""
        band = keys_of(self.problem)[1]
        return has_no_pair(self.problem) or (band.start == band.stop and not self.problem.packed)

    def decided(self) -> tuple[Callable[[Problem, dict[str, Any]], LaunchPlan], dict[str, Any]]:
        """``(make, values)`` of :class:`tilewise.backends.base.PerProblem`."""
        values = {"config": self.config, "launches": self.launches}
        if self.launches is not None:
            values |= {name: getattr(self, name) for name in self.DECIDED}
        return type(self).with_values, values

    @classmethod
    def with_values(cls, problem: Problem, values: dict[str, Any]) -> LaunchPlan:
        """The plan of a problem that has these properties."""
        plan = cls(problem, values["config"])
        plan.__dict__.update(values)
        return plan

    def of_mask_fields(self, inputs: Inputs, by_columns: bool = False) -> tuple[Tensor, ...]:
        """The tensors of ``config.mask_fields``, but those of :class:`masks.BitsOf`. ``by_columns``: for the pass over keys of a backward,
        which reads masks by columns."""
        if not self.config.by_rows:
            return ()
        if not by_columns:
            return self.of_mask(inputs, masks.row_ends)
        return self.of_mask(inputs, masks.column_ends_of_rows if self.config.keys.keeps_ds else masks.column_ends)


def ends_of(band: Band, start: int = 0) -> tuple[int, int]:
    """``(lo, hi)`` of a band as kernels take them, counted from key ``start``."""
    return tuple(far if end is None else end - start for end, far in ((band.lo, -FAR), (band.hi, FAR)))


def leaf(tensor: Tensor) -> Tensor:
    """A tensor that an expression reads, as kernels take it: truth values as bytes, and one dimension at least."""
    tensor = tensor.detach()
    tensor = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    return tensor if tensor.ndim else tensor.view(1)


def leaf_view(slot: int, facts: TensorFacts) -> View:
    """The tensor of :func:`leaf` at one of the extras' slots."""
    found = View.of(f"leaf{slot}", facts)
    found = found._replace(dtype=torch.uint8) if facts.dtype == torch.bool else found
    return found if facts.shape else found._replace(shape=(1,), strides=(1,))


def is_plain(x: TensorFacts, dtype: torch.dtype) -> bool:
    """Whether a tensor is contiguous and has that dtype."""
    return x.dtype == dtype and tuple(x.stride) == contiguous_strides(x.shape)
