"""From a problem, its tensors and its output's gradients to one launch. What depends on the problem alone is kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise import state
from tilewise.backends.base import Grads, Inputs, Output
from tilewise.backends.hopper import library
from tilewise.backends.hopper.backward_config import KEY_GROUPS, PART, Backward
from tilewise.backends.hopper.call import FAR, LOG2_E, strides_addressable
from tilewise.backends.hopper.config import Band, band_of, cap_of
from tilewise.backends.hopper.driver import PerStrides
from tilewise.problem import Problem

TENSORS = 13  # of a launch at most; the problem fixes the sizes of all


@dataclass(eq=False)
class Plan:
    """One problem's decisions."""

    p: Problem
    config: Backward

    @cached_property
    def band(self) -> Band:
        return band_of(self.p).cut(self.p.seqlen_q)

    @cached_property
    def lines(self) -> int:
        """Rows of a head in the statistics' buffers."""
        return self.config.lines(self.p.seqlen_q)

    @cached_property
    def numbers(self) -> tuple:
        """As :func:`tilewise.backends.hopper.backward.launch` takes them; the band's ends count from its first key."""
        p, band, cap = self.p, self.band, cap_of(self.p)
        lo, hi = (far if end is None else end - band.start for end, far in ((band.lo, -FAR), (band.hi, FAR)))
        grids = self.config.grids(p, band.stop - band.start, devices.of(p.device).cores)
        scale2 = LOG2_E * (p.softmax_scale if cap is None else cap)
        cap2 = 0.0 if cap is None else 2 * LOG2_E * p.softmax_scale / cap
        return lo, hi, *grids, p.softmax_scale, scale2, cap2

    def sums(self, lse: Tensor) -> list[Tensor]:
        """Zeros to which the pass over key tiles adds dQ, if it does."""
        p, tiles = self.p, self.config.keys
        blocks = -(-p.seqlen_q // tiles.tile_m)
        return [lse.new_zeros((p.batch, p.heads_q, blocks, KEY_GROUPS, PART))] if tiles.summed else []

    @cached_property
    def launch(self) -> PerStrides:
        return PerStrides(lambda: library.function(self.config), fixed=TENSORS)


def addressable(x: Tensor) -> Tensor:
    """``x``, or a copy that the copy engine can address."""
    good = strides_addressable(x.shape, x.stride()) and x.data_ptr() % 16 == 0
    return x if good else x.clone(memory_format=torch.contiguous_format)


def backward(plan: Plan, t: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
    p, keys = plan.p, slice(plan.band.start, plan.band.stop)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (t.q, t.k, t.v))
    lse2, delta = (out.lse.new_empty((p.batch, p.heads_q, plan.lines)) for _ in range(2))
    if keys.start == keys.stop or not (dq.numel() and dk.numel()):  # nobody sees a key
        for x in (dq, dk, dv):
            x.zero_()
        dsink = None if t.sink is None else state.sink_gradient(t.sink.float().view(-1, 1), out.lse, -dlse)
        return Grads(dq, dk, dv, None if dsink is None else dsink.sum((0, 2)).to(t.sink.dtype), {})
    for outside in (slice(0, keys.start), slice(keys.stop, p.seqlen_k)):
        if outside.start < outside.stop:
            dk[:, outside].zero_()
            dv[:, outside].zero_()
    k, v = (addressable(x)[:, keys] for x in (t.k, t.v))
    given = addressable(t.q), k, v, addressable(out.o), addressable(do), out.lse.contiguous(), dlse.contiguous()
    made = (dq, dk[:, keys], dv[:, keys], lse2, delta, *plan.sums(out.lse))
    plan.launch((*given, *made), lambda: (given, made, plan.numbers))
    dsink = None
    if t.sink is not None:
        dsink = state.sink_gradient(t.sink.float().view(-1, 1), out.lse, delta[..., : p.seqlen_q])
        dsink = dsink.sum((0, 2)).to(t.sink.dtype)
    return Grads(dq, dk, dv, dsink, {})
