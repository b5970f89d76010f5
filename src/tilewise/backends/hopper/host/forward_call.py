"""The launch of a forward, from a problem and its tensors.

A :class:`ForwardPlan` holds the decisions that depend on the problem alone; :func:`forward` makes a call's tensors and launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.base import Inputs, Output, empty_output, has_no_pair, output_of_no_pair
from tilewise.backends.hopper.config import PLAIN, Band, keys_of
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.grids import Grid, spread
from tilewise.backends.hopper.host import library, masks
from tilewise.backends.hopper.host.driver import PerStrides
from tilewise.backends.hopper.host.plan import ALIGNED, LaunchPlan, addressed, ends_of, leaf
from tilewise.caching import cached_property
from tilewise.dropout import keep_scale, threshold

DIRECT = frozenset(
    ("part_o", "part_lse", "cu_q", "cu_k", "first", "last", "queue")
)  # what a launch that is kept may have


@dataclass(eq=False)
class ForwardPlan(LaunchPlan):
    """The decisions for one problem's forward; ``written``: o and lse, then the states of splits of keys."""

    config: Config

    @cached_property
    def band(self) -> Band:
        return keys_of(self.problem)[1]

    @cached_property
    def cut(self) -> bool:
        """Whether some keys at either end are seen by no query and are cut off. Packed, the kernel sees to that."""
        return not self.problem.packed and (self.band.start, self.band.stop) != (0, self.problem.seqlen_k)

    @cached_property
    def direct(self) -> bool:
        """Whether the kernel takes the caller's tensors as they are, and no others but what it writes and :meth:`of_packed`."""
        reads_more = not DIRECT.issuperset(self.config.extra) or self.config.traced != PLAIN
        reads_more = reads_more or self.problem.spec.sink_slot is not None
        return all(self.addressable) and not (self.cut or reads_more)

    @cached_property
    def grid(self) -> Grid:
        cores = devices.of(self.problem.device).cores
        return spread(self.problem, self.config, self.band.stop - self.band.start, cores)

    @cached_property
    def numbers(self) -> tuple[int, int, int, int, int, float, float]:
        """The numbers of :func:`tilewise.backends.hopper.forward.kernel.launch`; the band's ends count from the first key that it gets."""
        lo, hi = ends_of(self.band, self.band.start if self.cut else 0)
        scale2, cap2 = self.scales
        # A kernel with a traced score has no softcap, and takes the scale of that score in its place.
        cap2 = self.problem.softmax_scale if self.config.traced.score else cap2
        sinks = int(self.problem.spec.sink_slot is not None)
        return lo, hi, self.grid.section, self.grid.ctas, sinks, scale2, cap2

    def extra(self, inputs: Inputs) -> tuple[Tensor | int | float, ...]:
        """The tensors and numbers that only some kernels have: those that ``config.extra`` names, then those that expressions read."""
        if not self.config.extra and self.config.traced == PLAIN:
            return ()
        found = {}
        if self.config.split:
            states = self.grid.splits, self.problem.batch, self.problem.heads_q, self.problem.seqlen_q
            part_o = inputs.q.new_empty((*states, self.config.tiles.width_v), dtype=torch.float32)
            found |= {"part_o": part_o, "part_lse": inputs.q.new_empty(states, dtype=torch.float32)}
        found |= self.mask_tensors(inputs, self.config.tiles, (self.grid.section, self.grid.ctas))
        if self.config.packed:
            found |= dict(zip(("cu_q", "cu_k", "queue"), self.of_packed(inputs), strict=True))
            found |= {"first": self.band.start, "last": self.band.stop}
        elif self.config.queued:
            found["queue"] = torch.zeros(1, dtype=torch.int32, device=inputs.q.device)
        if self.config.dropout:
            p_drop = self.problem.spec.dropout_p
            found |= {"seed": inputs.seed, "threshold": threshold(p_drop), "keep": keep_scale(p_drop)}
        if self.config.alibi:
            found["slopes"] = self.slopes(inputs)
        named = tuple(found[name] for name in self.config.extra)
        if self.config.traced == PLAIN:
            return named
        traced = self.expressions
        return *named, *(leaf(inputs.leaves[n]) for n in traced.slots), *traced.numbers

    def of_packed(self, inputs: Inputs) -> list[Tensor]:
        """The starts of packed sequences, and a zero that counts the tiles that are taken; of no packed sequences, nothing."""
        if not self.config.packed:
            return []
        cu = [x.int().contiguous() for x in (inputs.cu_seqlens_q, inputs.cu_seqlens_k)]
        return [*cu, torch.zeros(1, dtype=torch.int32, device=inputs.q.device)]

    def values(self, inputs: Inputs) -> Tensor:
        """v, or a copy with zeros for the keys that no query sees, where kernels are not kept from these otherwise.

        They may be NaN, and in P V even a P of zero would let them through.
        """
        if self.config.of_numbers:
            return inputs.v
        tiles = self.config.tiles
        visited = ((tiles.tile_m, tiles.tile_n),) if self.config.form == "bits" else ()
        seen = self.of_mask(inputs, masks.seen, *visited)
        return inputs.v if seen is None else torch.where(seen, inputs.v, 0)

    @cached_property
    def launch(self) -> PerStrides:
        return PerStrides(lambda: library.function(self.config), fixed=6)

    def forward(self, inputs: Inputs) -> Output:
        """The output, by the launch that is kept if there is one and the tensors lie where it can read them."""
        if self.bound is not None:
            q, k, v = inputs.q.data_ptr(), inputs.k.data_ptr(), inputs.v.data_ptr()
            if not (q | k | v) % ALIGNED:
                o, lse, *states = [torch.empty_like(x) for x in self.written]
                sink = lse.data_ptr()  # any memory will do: without sinks it is not read
                more = [*states, *self.of_packed(inputs)]
                self.bound.at(q, k, v, o.data_ptr(), lse.data_ptr(), sink, *[x.data_ptr() for x in more])
                return Output(o, lse)
        return forward(self, inputs)


def forward(plan: ForwardPlan, inputs: Inputs) -> Output:
    """Makes what a launch reads and writes, launches, and keeps the launch where later calls need no more than addresses."""
    problem, band = plan.problem, plan.band
    # Nobody sees a key. A packed tile would load a block of keys all the same, and where there is none at all, from no address.
    if has_no_pair(problem) or (band.start == band.stop and not problem.packed):
        return output_of_no_pair(problem, inputs)
    out = empty_output(problem, inputs.q, inputs.v)
    # Without sinks any memory will do: it is not read.
    given = inputs.sink
    sink = out.lse.as_strided((problem.heads_q,), (1,)) if given is None else given.detach().float().contiguous()
    qkv = inputs.q, inputs.k, plan.values(inputs)
    q, k, v = (addressed(x, good) for x, good in zip(qkv, plan.addressable, strict=True))
    if plan.cut:
        k, v = (x[:, band.start : band.stop] for x in (k, v))
    o, lse = out.o, out.lse
    in_place = q is inputs.q and k is inputs.k and v is inputs.v
    if problem.packed:
        q, k, v, o, lse = (x.unsqueeze(0) for x in (q, k, v, o, lse))
    tensors, extra = (q, k, v, o, lse, sink), plan.extra(inputs)
    named = [x for x in extra if isinstance(x, Tensor)]
    bound = plan.launch((*tensors, *named), lambda: (*tensors, (*plan.numbers, *extra)))
    if plan.direct and in_place:
        plan.keep(bound, [out.o, out.lse, *named[: 2 * plan.config.split]])
    return out
