"""The launch of a forward, from a problem and its tensors.

A :class:`ForwardPlan` holds the decisions that depend on the problem alone; :func:`forward` makes a call's tensors and launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.base import Inputs, Output, empty_output, has_no_pair, output_of_no_pair
from tilewise.backends.hopper import capped
from tilewise.backends.hopper.config import PLAIN, Band, keys_of
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.grids import Grid, spread
from tilewise.backends.hopper.host import library, masks
from tilewise.backends.hopper.host.driver import PerStrides
from tilewise.backends.hopper.host.plan import ALIGNED, KeptLaunch, LaunchPlan, addressed, ends_of, leaf
from tilewise.caching import cached_property
from tilewise.dropout import keep_scale, threshold


@dataclass(eq=False)
class ForwardPlan(LaunchPlan):
    """The decisions for one problem's forward. Its launch writes o and lse, then the states of splits of keys."""

    config: Config
    DECIDED = (*LaunchPlan.DECIDED, "band", "cut", "grid", "scales", "numbers", "last_numbers")

    @cached_property
    def band(self) -> Band:
        return keys_of(self.problem)[1]

    @cached_property
    def cut(self) -> bool:
        """Whether some keys at either end are seen by no query and are cut off. Packed, the kernel sees to that."""
        return not self.problem.packed and (self.band.start, self.band.stop) != (0, self.problem.seqlen_k)

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

    def states(self, inputs: Inputs) -> list[Tensor]:
        """Memory for the states of splits of keys, if there are any: their o and their lse, fp32."""
        if not self.config.split:
            return []
        shape = self.grid.splits, self.problem.batch, self.problem.heads_q, self.problem.seqlen_q
        return [inputs.q.new_empty(x, dtype=torch.float32) for x in ((*shape, self.config.tiles.width_v), shape)]

    def made_of_mask(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """The tensors that are made of the mask's, in the launch's order."""
        return self.of_mask_fields(inputs, self.config.tiles, (self.grid.section, self.grid.ctas))

    def of_call(self, inputs: Inputs) -> list[Tensor]:
        """The tensors that a launch reads beside q, k, v, the sink and those of the mask, in its order: of dropout and a bias, the starts
        of packed sequences, a zero that counts the tiles that are taken, and what expressions read."""
        config, found = self.config, []
        if config.dropout:
            found.append(inputs.seed)
        if config.alibi:
            found.append(self.slopes(inputs))
        if config.table:
            found.append(self.line(inputs))
        if config.bias:
            found.append(self.bias(inputs))
        if config.packed:
            found += [x.int().contiguous() for x in (inputs.cu_seqlens_q, inputs.cu_seqlens_k)]
        if config.queued:
            found.append(torch.zeros(1, dtype=torch.int32, device=inputs.q.device))
        return found if config.traced == PLAIN else found + [leaf(inputs.leaves[n]) for n in self.expressions.slots]

    def extra(self, tensors: Sequence[Tensor]) -> tuple[Tensor | int | float, ...]:
        """The values of ``config.extra``, then those that expressions read: these tensors in their order, and numbers between them."""
        p_drop = self.problem.spec.dropout_p
        numbers = {
            "first": self.band.start,
            "last": self.band.stop,
            "threshold": threshold(p_drop),
            "keep": keep_scale(p_drop),
        }
        numbers |= {"start": self.line_of.start} if self.config.table else {}
        rest = iter(tensors)
        found = tuple(numbers[name] if name in numbers else next(rest) for name in self.config.extra)
        return found + tuple(rest) + self.last_numbers

    @cached_property
    def last_numbers(self) -> tuple[int | float, ...]:
        """Numbers of expressions, or of a softcap's short polynomials."""
        if self.config.short_tanh:
            return capped.numbers(*self.scales)
        return () if self.config.traced == PLAIN else self.expressions.numbers

    def sink(self, inputs: Inputs, lse: Tensor) -> Tensor:
        """The sinks, (heads_q,), fp32; without sinks any memory will do, as it is not read."""
        return lse if inputs.sink is None else inputs.sink.detach().float().contiguous()

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
        kept = self.repeated(inputs)
        if kept is not None and not (inputs.q.data_ptr() | inputs.k.data_ptr() | inputs.v.data_ptr()) % ALIGNED:
            o, lse, *states = [torch.empty_like(x) for x in kept.written]
            given = inputs.q, inputs.k, inputs.v, o, lse, self.sink(inputs, lse)
            kept.bound(*given, *states, *kept.of_mask, *self.of_call(inputs))
            return Output(o, lse)
        return forward(self, inputs)


def forward(plan: ForwardPlan, inputs: Inputs) -> Output:
    """Makes what a launch reads and writes, launches, and keeps the launch where later calls need no more than addresses."""
    problem, band = plan.problem, plan.band
    # Nobody sees a key. A packed tile would load a block of keys all the same, and where there is none at all, from no address.
    if has_no_pair(problem) or (band.start == band.stop and not problem.packed):
        return output_of_no_pair(problem, inputs)
    out = empty_output(problem, inputs.q, inputs.v)
    qkv = inputs.q, inputs.k, plan.values(inputs)
    q, k, v = (addressed(x, good) for x, good in zip(qkv, plan.addressable, strict=True))
    if plan.cut:
        k, v = (x[:, band.start : band.stop] for x in (k, v))
    o, lse = out.o, out.lse
    in_place = q is inputs.q and k is inputs.k and v is inputs.v
    if problem.packed:
        q, k, v, o, lse = (x.unsqueeze(0) for x in (q, k, v, o, lse))
    sink = plan.sink(inputs, out.lse.as_strided((problem.heads_q,), (1,)))
    states, of_mask = plan.states(inputs), plan.made_of_mask(inputs)
    tensors, more = (q, k, v, o, lse, sink), [*states, *of_mask, *plan.of_call(inputs)]
    bound = plan.launch((*tensors, *more), lambda: (*tensors, (*plan.numbers, *plan.extra(more))))
    if in_place and not plan.cut:
        plan.keep(inputs, KeptLaunch(bound, [out.o, out.lse, *states], of_mask))
    return out
