"""The launch of a forward, from a problem and its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.base import Inputs, Output, output_of_no_pair
from tilewise.backends.hopper.config import Band, forward_keys_of
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.grids import Grid, spread
from tilewise.backends.hopper.host import masks
from tilewise.backends.hopper.host.draft import Draft, Launches, View, facts_of, given_views
from tilewise.backends.hopper.host.plan import LaunchPlan, ends_of
from tilewise.backends.hopper.host.recipe import flat
from tilewise.backends.hopper.pair_bias import ALIGNED
from tilewise.caching import cached_property

TILES, ENDS = "tiles", "ends"  # of a mask (:class:`masks.BitsOf`, :class:`masks.EndsOf`)


@dataclass(eq=False)
class ForwardPlan(LaunchPlan):
    """The decisions for one problem's forward."""

    DECIDED = (*LaunchPlan.DECIDED, "grid")
    PRODUCTS = ("v",)

    @property
    def tiles(self) -> masks.Sized:
        return self.config.tiles

    @cached_property
    def band(self) -> Band:
        return forward_keys_of(self.problem)[1]

    @cached_property
    def cut(self) -> bool:
        """Whether some keys at either end are seen by no query and are cut off. Packed, the kernel sees to that."""
        return not self.problem.packed and (self.band.start, self.band.stop) != (0, self.problem.seqlen_k)

    @cached_property
    def grid(self) -> Grid:
        cores = devices.of(self.problem.device).cores
        return spread(self.problem, self.config, self.band.stop - self.band.start, cores)

    @property
    def of_mask(self) -> dict[str, masks.BitsOf | masks.EndsOf]:
        if self.config.form == "bits":
            return {TILES: masks.BitsOf.of(self.problem, self.config.tiles)}
        return {ENDS: masks.EndsOf(self.problem)} if self.config.by_rows else {}

    @property
    def sections(self) -> tuple[tuple[int, int], ...]:
        """The heads of a section, and the CTAs."""
        return ((self.grid.section, self.grid.ctas),)

    @cached_property
    def numbers(self) -> dict[str, int | float]:
        """The numbers of a launch, by name; the band's ends count from the first key that it gets."""
        lo, hi = ends_of(self.band, self.band.start if self.cut else 0)
        scale2, cap2 = self.scales
        # A kernel with a traced score has no softcap, and takes the scale of that score in its place.
        cap2 = self.problem.softmax_scale if self.config.traced.score else cap2
        found = {"band_lo": lo, "band_hi": hi, "section_heads": self.grid.section, "ctas": self.grid.ctas}
        found |= {"scale2": scale2, "cap2": cap2, "first": self.band.start, "last": self.band.stop}
        return found | self.numbers_beside

    def drafted(self) -> Launches:
        draft = Draft()
        q, k, v, o, lse = self.drafted_rows(draft)
        rows = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "sink": self.drafted_sink(lse)}
        draft.launch(self.config, self.beside(draft) | rows)
        return draft.done()

    def drafted_sink(self, lse: View) -> View:
        """The sinks, (heads_q,), fp32; without sinks any memory will do, as it is not read."""
        heads = (self.problem.heads_q,)
        if self.problem.spec.sink_slot is None:
            return View.contiguous(lse.memory, lse.dtype, *heads)
        return View.contiguous("sink", torch.float32, *heads)

    def drafted_rows(self, draft: Draft) -> tuple[View, ...]:
        """q, k, v, o and lse as the kernel takes them."""
        problem, (o_shape, lse_shape) = self.problem, self.problem.output_shapes
        q, k, v = map(self.view, "qkv")
        o, lse = draft.result("o", problem.dtype, *o_shape), draft.result("lse", torch.float32, *lse_shape)
        if self.cut:
            k, v = (x.narrow(1, self.band.start, self.band.stop - self.band.start) for x in (k, v))
        return tuple(x.unsqueeze(0) for x in (q, k, v, o, lse)) if problem.packed else (q, k, v, o, lse)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of what a launch gets beside q, k, v and o, by the words of its parameters."""
        problem = self.problem
        found = {"batch": problem.batch, "heads_q": problem.heads_q, "seqlen_q": problem.seqlen_q}
        return found | {"starts": problem.batch + 1, "splits": self.grid.splits, "ctas": self.grid.ctas}

    def beside(self, draft: Draft) -> dict[str, Any]:
        """What a launch gets beside q, k, v, o, lse and sinks, by name: Views, Lates and numbers."""
        found = given_views(self.config, self.problem.dtype, self.sizes) | self.drafted_leaves() | self.numbers
        for name, x in self.of_mask.items():
            found |= x.views(name)
        return found | written(draft, self.config, self.problem.dtype, self.sizes)

    def tensors(self, inputs: Inputs) -> dict[str, Tensor]:
        """The tensors that the launch reads, by name."""
        return self.read(inputs)

    def forward(self, inputs: Inputs) -> Output:
        if self.launches is None:
            return output_of_no_pair(self.problem, inputs)
        return self.output(self.launches.run_named(self.read(inputs)))

    def output(self, made: Mapping[str, Tensor]) -> Output:
        """The output, of what the launches have written."""
        return Output(made["o"], made["lse"])

    def of_memory(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], lse: bool, seed: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """The forward of a plan that is :attr:`direct`, which looks at nothing of a tensor but its address; None of tensors at addresses
        that the copy engine does not take."""
        kept = self.kept(extras)
        at = [x.data_ptr() for x in (q, k, v, *extras)]
        if (at[0] | at[1] | at[2]) % ALIGNED:
            return None
        at += [0 if seed is None else seed.data_ptr(), *[x.data_ptr() for x in kept]]
        if self.zeroed:
            of_problem = self.problem.v
            v = v.as_strided(of_problem.shape, of_problem.stride)  # a call's may have its heads first
            (v,) = self.of_seen_keys(kept[0], extras, v)
            at[2] = v.data_ptr()
        o, *more = self.launches.run_memory([at[n] for n in self.direct], q, () if lse else ("lse",))
        return o, more[0] if lse else None


def written(draft: Draft, config: Config, dtype: torch.dtype, sizes: Mapping[str, int]) -> dict[str, View]:
    """What a forward's launch writes beside o and lse, by name: states of splits, and the count of the tiles that are taken."""
    found = {}
    for x in flat(config.parameters):
        if x.name in ("part_o", "part_lse"):
            element, shape = facts_of(x, dtype, sizes)
            found[x.name] = draft.scratch(x.name, element, *shape)
        if x.name == "queue":
            found[x.name] = draft.result(x.name, torch.int32, 1, fill=0)
    return found
