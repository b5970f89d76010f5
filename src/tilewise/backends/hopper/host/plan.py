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
from tilewise.backends.hopper.config import PLAIN, Band, Expressions, cap_of, keys_of, slopes_of, strides_addressable
from tilewise.backends.hopper.host import masks
from tilewise.backends.hopper.host.draft import Launches, View
from tilewise.backends.hopper.host.recipe import flat
from tilewise.backends.hopper.kernels import AnyConfig
from tilewise.backends.hopper.pair_bias import ALIGNED, aligned, pair_bias_of
from tilewise.backends.hopper.parameters import SCORES, names_of
from tilewise.backends.hopper.tables import line_of
from tilewise.caching import cached_property
from tilewise.dropout import keep_scale, threshold
from tilewise.planning.bit_tiles import Layout, may_hide_keys
from tilewise.planning.planner import Making
from tilewise.planning.tiles import SeenKeys
from tilewise.problem import Problem, TensorFacts
from tilewise.signature import contiguous_strides

LOG2_E = math.log2(math.e)
FAR = 1 << 30  # the end of a band that has none: no key reaches it
ADDRESSED = ("q", "k", "v", "o", "do")  # what the copy engine brings from where a call has it
# What kernels read contiguous, of extras that may have other dtypes and strides.
PLAIN_DTYPES = {
    "cu_q": torch.int32,
    "cu_k": torch.int32,
    "entries": torch.int32,
    "sink": torch.float32,
    "slopes": torch.float32,
}


@dataclass(eq=False)
class Plan:
    """Decisions for one problem. ``made``: what was made of a mask's tensors, kept while these are the same."""

    problem: Problem
    made: PerTensors = field(default_factory=PerTensors, kw_only=True)
    direct: ClassVar[tuple[int, ...]] = ()  # see :attr:`LaunchPlan.direct`

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

    @property
    def slots_of_mask(self) -> tuple[int, ...]:
        """The slots of the tensors of which memories are made."""
        return self.problem.spec.mask_slots

    def of_leaves(self, key: str, extras: Sequence[Tensor], making: Callable[..., Any]) -> Any:
        """What is made of the mask's tensors among the extras, kept while they are the same."""
        leaves = [extras[n] for n in self.slots_of_mask]
        return self.made.of(key, leaves, partial(making, extras, self.problem.device))


@dataclass(eq=False)
class MaskPlan(Plan):
    """The decisions about what is kept of a mask's tensors (docs/decisions.md#repeated-calls).

    Attributes:
        PRODUCTS: of k and v, those that P or dS is multiplied with, where kernels are not kept from keys that no query sees otherwise.
    """

    config: AnyConfig
    PRODUCTS: ClassVar[tuple[str, ...]] = ()

    @property
    def tiles(self) -> masks.Sized:
        """The tiles in which keys are visited."""
        raise NotImplementedError

    @property
    def of_mask(self) -> dict[str, masks.BitsOf | masks.EndsOf]:
        """What each pass reads of a mask whose ends are no numbers, by the name of its memory."""
        return {}

    @cached_property
    def zeroed(self) -> tuple[str, ...]:
        """Those of k and v that have zeros for keys that no query sees. They may be NaN, and in a product even a P or dS of zero would let
        them through."""
        visited = self.tiles.tile_n if self.config.form == "bits" else None
        lengths = self.problem.seqlen_q, self.problem.seqlen_k
        unseen = not self.config.of_numbers and may_hide_keys(self.problem.spec.region, lengths, visited)
        return self.PRODUCTS if unseen else ()

    @cached_property
    def layout_of_seen(self) -> Layout | None:
        """The layout of the memory of bits that says which keys are seen too; None: a memory of its own says it."""
        return next(iter(self.of_mask.values())).layout(True) if self.config.form == "bits" else None

    @cached_property
    def keeps(self) -> tuple[str, ...]:
        """The names of the memories that are kept of the mask's tensors; the first one says which keys are seen, where some of k and v are
        :attr:`zeroed`."""
        return (*(("seen",) if self.zeroed and self.config.form != "bits" else ()), *self.of_mask)

    @cached_property
    def makings(self) -> tuple[Making, ...]:
        """What makes each of them."""
        if self.config.form != "bits":
            seen = [lambda extras, device: masks.seen(self.problem, extras, self.problem.group)] if self.zeroed else []
            return (*seen, *(x.making for x in self.of_mask.values()))
        each = zip(self.of_mask.values(), self.sections, strict=False)
        return tuple([x.making(*section, seen=n == 0 and bool(self.zeroed)) for n, (x, section) in enumerate(each)])

    def kept(self, extras: Sequence[Tensor]) -> Sequence[Tensor]:
        """The memories that are kept of the mask's tensors, in the order of their names."""
        if not self.keeps:
            return ()
        return [self.of_leaves(name, extras, make) for name, make in zip(self.keeps, self.makings, strict=True)]

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


@dataclass(eq=False)
class ScorePlan(MaskPlan):
    """The decisions about the extras that kernels read, and the numbers of a score, of dropout and of sinks."""

    @cached_property
    def reads(self) -> frozenset[str]:
        """The names of what a launch takes."""
        return frozenset(names_of(flat(self.config.parameters)))

    @property
    def slots(self) -> dict[str, int]:
        """The slots of the extras that launches may read, by name."""
        spec = self.problem.spec
        names = ("cu_q", "cu_k"), ("block_table", "seqlens_k"), ("k_scale", "v_scale")
        each = zip(names, (spec.cu_slots, spec.page_slots, spec.scale_slots), strict=True)
        found = {name: slot for some, slots in each for name, slot in zip(some, slots, strict=False)}
        found |= {} if spec.sink_slot is None else {"sink": spec.sink_slot}
        found |= {x.name: self.score_slot for x in SCORES[self.config.score].reads if x.shape is not None}
        traced = self.expressions.slots if self.config.traced != PLAIN else ()
        return found | {f"leaf{n}": n for n in traced}

    @cached_property
    def expressions(self) -> Expressions:
        return Expressions.of(self.problem)

    @cached_property
    def numbers_beside(self) -> dict[str, int | float]:
        """The numbers that kernels may read of dropout, of sinks, of a score and of expressions, by name."""
        dropped, config = self.problem.spec.dropout_p, self.config
        found = {"threshold": threshold(dropped), "keep": keep_scale(dropped)}
        found["sinks"] = int(self.problem.spec.sink_slot is not None)
        found |= {"start": line_of(self.problem).start} if config.score == "table" else {}
        traced = self.expressions.numbers if config.traced != PLAIN else ()
        last = capped.numbers(*self.scales) if config.short_tanh else traced
        return found | {f"number{n}": x for n, x in enumerate(last)}

    def drafted_leaves(self) -> dict[str, View]:
        """The tensors that expressions read, by name."""
        slots = self.expressions.slots if self.config.traced != PLAIN else ()
        return {f"leaf{n}": leaf_view(slot, self.problem.extras[slot]) for n, slot in enumerate(slots)}

    @cached_property
    def score_slot(self) -> int:
        """The leaf that holds ALiBi's slopes, a table or the biases of pairs."""
        if self.config.score == "alibi":
            return slopes_of(self.problem)
        return (line_of(self.problem) if self.config.score == "table" else pair_bias_of(self.problem)).slot

    def biases(self, tensor: Tensor) -> Tensor:
        """The biases of a table by distance, (1 or heads_q, count), fp32, in base 2; or those of pairs, (batch or 1, heads_q or 1, query,
        key), as the copy engine takes them."""
        if self.config.score == "bias":
            return pair_bias_of(self.problem).of(tensor)
        return (line_of(self.problem).of(tensor).float() * LOG2_E).contiguous()

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
class LaunchPlan(ScorePlan):
    """The decisions for one pass over a problem, the forward's or the backward's.

    A call is a list of tensors: q, k, v, the extras, the seed, :attr:`BESIDE`, and what it :attr:`keeps` of its mask. Launches read the
    tensors at some :attr:`places`, as they lie or as one of the :attr:`conversions` makes them (docs/decisions.md#repeated-calls).

    Attributes:
        DECIDED: the properties that follow from the problem's sizes and are computed at once where they are by structure.
        BESIDE: what a call brings behind the seed.
    """

    DECIDED: ClassVar[tuple[str, ...]] = ("copied", "zeroed", "keeps", "launches", "direct")
    BESIDE: ClassVar[tuple[str, ...]] = ()

    # -- The launches ----------------------------------------------------------------------------------------------

    def drafted(self) -> Launches:
        """The launches of a call that sees keys."""
        raise NotImplementedError

    @cached_property
    def launches(self) -> Launches | None:
        """The launches; None where no query sees a key."""
        return None if self.sees_nothing else self.drafted()

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

    # -- The tensors that they read --------------------------------------------------------------------------------

    @cached_property
    def places(self) -> dict[str, int]:
        """The places of tensors in a call, by name."""
        behind = "seed", *self.BESIDE, *self.keeps
        found = {"q": 0, "k": 1, "v": 2} | {name: 3 + slot for name, slot in self.slots.items()}
        return found | {name: 3 + len(self.problem.extras) + n for n, name in enumerate(behind)}

    @cached_property
    def conversions(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """What makes the tensors that launches read, of those at the places of their names, where these are others."""
        found = {name: as_contiguous for name in self.copied if name not in self.zeroed}
        for name, slot in self.slots.items():
            if (
                name in PLAIN_DTYPES
                and name in self.reads
                and not is_plain(self.problem.extras[slot], PLAIN_DTYPES[name])
            ):
                found[name] = partial(as_plain, dtype=PLAIN_DTYPES[name])
        if self.config.score in ("table", "bias"):
            found["line" if self.config.score == "table" else "bias"] = self.biases
        return found

    @cached_property
    def direct(self) -> tuple[int, ...]:
        """The places of what launches read; empty where something that they read, or a result, is made with other operations."""
        if self.launches is None or self.conversions or self.result_is_made:
            return ()
        given = self.launches.given
        return tuple(self.places[name] for name in given) if set(given) <= set(self.places) else ()

    @property
    def result_is_made(self) -> bool:
        """Whether a result is made of something that the launches write."""
        return False

    @cached_property
    def addressed(self) -> list[str]:
        """The names of what the copy engine brings from where a call has it."""
        return [
            name
            for name in ADDRESSED
            if name in self.places and name not in self.zeroed and name not in self.conversions
        ]

    def read(self, inputs: Inputs, *beside: Tensor) -> dict[str, Tensor]:
        """The tensors that launches read, by name; ``beside``: those of :attr:`BESIDE`."""
        call = inputs.q, inputs.k, inputs.v, *inputs.leaves, inputs.seed, *beside, *self.kept(inputs.leaves)
        found = {name: call[n] for name, n in self.places.items()}
        for name, make in self.conversions.items():
            found[name] = make(found[name].detach())
        for name in self.addressed:
            if found[name].data_ptr() % ALIGNED:
                found[name] = aligned(found[name])
        if self.zeroed:
            tensors = self.of_seen_keys(found[self.keeps[0]], inputs.leaves, *[found[name] for name in self.zeroed])
            found |= zip(self.zeroed, tensors, strict=True)
        return found

    @cached_property
    def copied(self) -> tuple[str, ...]:
        """Those of q, k and v of which kernels read a contiguous copy: the copy engine cannot address their strides, or it has zeros for
        the keys that no query sees, where kernels are not kept from these otherwise."""
        named = ("q", self.problem.q), ("k", self.problem.k), ("v", self.problem.v)
        return tuple(name for name, x in named if name in self.zeroed or not strides_addressable(x.shape, x.stride))

    def view(self, name: str) -> View:
        """q, k or v as kernels read it."""
        found = View.of(name, getattr(self.problem, name))
        return found._replace(strides=contiguous_strides(found.shape)) if name in self.copied else found


def ends_of(band: Band, start: int = 0) -> tuple[int, int]:
    """``(lo, hi)`` of a band as kernels take them, counted from key ``start``."""
    return tuple(far if end is None else end - start for end, far in ((band.lo, -FAR), (band.hi, FAR)))


def leaf_view(slot: int, facts: TensorFacts) -> View:
    """A tensor that an expression reads, as kernels take it: truth values as bytes, and one dimension at least."""
    found = View.of(f"leaf{slot}", facts)
    found = found._replace(dtype=torch.uint8) if facts.dtype == torch.bool else found
    return found if facts.shape else found._replace(shape=(1,), strides=(1,))


def is_plain(x: TensorFacts, dtype: torch.dtype) -> bool:
    """Whether a tensor is contiguous and has that dtype."""
    return x.dtype == dtype and tuple(x.stride) == contiguous_strides(x.shape)


def as_plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as :func:`is_plain` wants it."""
    return x.to(dtype).contiguous()


def as_contiguous(x: Tensor) -> Tensor:
    """A tensor as the copy engine takes it, whatever its strides."""
    return aligned(x.contiguous())
