"""The launch of a forward, from a problem and its tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.base import Inputs, Output, output_of_no_pair
from tilewise.backends.hopper import capped
from tilewise.backends.hopper.config import PLAIN, Band, keys_of
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.grids import Grid, spread
from tilewise.backends.hopper.host import masks
from tilewise.backends.hopper.host.direct import DirectPlan
from tilewise.backends.hopper.host.draft import Draft, Late, Launches, View
from tilewise.backends.hopper.host.plan import ends_of, late_fields
from tilewise.caching import cached_property
from tilewise.dropout import keep_scale, threshold


@dataclass(eq=False)
class ForwardPlan(DirectPlan):
    """The decisions for one problem's forward."""

    config: Config
    DECIDED = (*DirectPlan.DECIDED, "grid")
    PRODUCTS = ("v",)

    @property
    def tiles(self) -> masks.Sized:
        return self.config.tiles

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

    def drafted(self) -> Launches:
        draft = Draft()
        q, k, v, o, lse = self.drafted_rows(draft)
        draft.launch(self.config, q, k, v, o, lse, self.drafted_sink(lse), self.numbers, tuple(self.extra(draft)))
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

    def extra(self, draft: Draft) -> list[View | Late | int | float]:
        """The values of ``config.extra``, then those that expressions read."""
        problem, config = self.problem, self.config
        p_drop, fp32, int32 = problem.spec.dropout_p, torch.float32, torch.int32
        rows = problem.batch, problem.heads_q, problem.seqlen_q
        found = {
            "part_o": lambda: draft.scratch("part_o", fp32, self.grid.splits, *rows, config.tiles.width_v),
            "part_lse": lambda: draft.scratch("part_lse", fp32, self.grid.splits, *rows),
            "threshold": lambda: threshold(p_drop),
            "keep": lambda: keep_scale(p_drop),
            "start": lambda: self.line_of.start,
            "first": lambda: self.band.start,
            "last": lambda: self.band.stop,
            "queue": lambda: draft.result("queue", int32, 1, fill=0),  # counts the tiles that are taken
        }
        known = late_fields(config.mask_fields) | self.views_beside()
        optional = (known[name] if name in known else found[name]() for name in config.extra)
        return [*optional, *self.drafted_leaves(), *self.last_numbers]

    def tensors(self, inputs: Inputs) -> dict[str, Tensor]:
        """The tensors that the launch reads, by name."""
        config = self.config
        found = self.read(inputs)
        if inputs.sink is not None:
            found["sink"] = inputs.sink.detach().float()
        if config.mask_fields:
            of_mask = self.of_mask_fields(inputs, config.tiles, (self.grid.section, self.grid.ctas))
            found |= zip(config.mask_fields, of_mask, strict=True)
        return found | self.tensors_beside(inputs)

    @cached_property
    def last_numbers(self) -> tuple[int | float, ...]:
        """Numbers of expressions, or of a softcap's short polynomials."""
        if self.config.short_tanh:
            return capped.numbers(*self.scales)
        return () if self.config.traced == PLAIN else self.expressions.numbers

    def forward(self, inputs: Inputs) -> Output:
        if self.launches is None:
            return output_of_no_pair(self.problem, inputs)
        made = self.launches.run_named(self.tensors(inputs))
        return Output(made["o"], made["lse"])
