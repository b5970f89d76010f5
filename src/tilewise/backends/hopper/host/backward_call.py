"""From a problem, its tensors and its output's gradients to one launch. What depends on the problem alone is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise import state
from tilewise.backends.base import Grads, Inputs, Output, PerTensors
from tilewise.backends.hopper.backward.config import KEY_GROUPS, Backward
from tilewise.backends.hopper.config import Band, Expressions, band_of, cap_of, keys_of
from tilewise.backends.hopper.host import library, masks
from tilewise.backends.hopper.host.driver import PerStrides
from tilewise.backends.hopper.host.forward_call import FAR, LOG2_E, addressable, addressed, leaf, strides_addressable
from tilewise.caching import cached_property
from tilewise.dropout import keep_scale, threshold
from tilewise.problem import Problem

INF = float("inf")
TENSORS = 32  # of a launch at most but for leaves; the problem fixes the sizes of all


@dataclass(eq=False)
class Plan:
    """One problem's decisions. ``made``: of a mask's tensors."""

    p: Problem
    config: Backward
    made: PerTensors = field(default_factory=PerTensors)

    @cached_property
    def band(self) -> Band:
        """Packed, without the offset of each sequence, and the kernels cut it."""
        if self.config.by_rows:
            return keys_of(self.p)[1]
        found = band_of(self.p)
        return found if self.p.packed else found.cut(self.p.seqlen_q)

    @cached_property
    def keys(self) -> slice:
        """That kernels get: those that some query sees; packed, all."""
        return slice(0, self.p.seqlen_k) if self.p.packed else slice(self.band.start, self.band.stop)

    @cached_property
    def cut(self) -> bool:
        """Whether some keys at either end are seen by no query: they stay outside."""
        return (self.keys.start, self.keys.stop) != (0, self.p.seqlen_k)

    @cached_property
    def addressable(self) -> tuple[bool, bool, bool]:
        """Of q, k, v: whether the copy engine can address such strides."""
        return tuple(addressable(x) for x in (self.p.q, self.p.k, self.p.v))

    @cached_property
    def sums_shape(self) -> tuple[int, ...] | None:
        """Of the sums to which the pass over key tiles adds dQ, if it does."""
        p, batch = self.p, 1 if self.p.packed else self.p.batch
        return (
            (batch, p.heads_q, self.config.blocks(p), KEY_GROUPS, self.config.keys.part_elements)
            if self.config.keys.sums_dq
            else None
        )

    @cached_property
    def turns_shape(self) -> tuple[int, ...] | None:
        """Of what counts their additions, if those come in order."""
        return (self.p.batch, self.p.heads_q, self.config.semaphores(self.p)) if self.config.keys.ordered else None

    def lines(self, t: Inputs, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Of lse (batch, heads_q, row) room for lse2 and delta. Packed, rows lie elsewhere among lines that nobody writes; a sink's
        gradient reads them all, and what is there then must add nothing to it."""
        shape, holes = (*lse.shape[:2], self.config.statistics_rows(self.p)), self.p.packed and t.sink is not None
        return tuple(lse.new_full(shape, n) if holes else lse.new_empty(shape) for n in (INF, 0.0))

    @cached_property
    def numbers(self) -> tuple:
        """As :func:`tilewise.backends.hopper.backward.launch.launch` takes them; the band's ends count from the first key."""
        p, band, cap = self.p, self.band, cap_of(self.p)
        lo, hi = (far if end is None else end - self.keys.start for end, far in ((band.lo, -FAR), (band.hi, FAR)))
        grids = self.config.grids(p, self.keys.stop - self.keys.start, devices.of(p.device).cores)
        scale2, cap2 = LOG2_E * p.softmax_scale, 0.0
        if self.config.traced.score:
            scale2 = LOG2_E
        elif cap is not None:
            scale2, cap2 = LOG2_E * cap, 2 * LOG2_E * p.softmax_scale / cap
        more = (band.start, band.stop) if p.packed else self.expressions.numbers
        drop = (threshold(p.spec.dropout_p), keep_scale(p.spec.dropout_p)) if self.config.dropout else ()
        return lo, hi, *grids, p.softmax_scale, scale2, cap2, *drop, *more

    def starts(self, t: Inputs) -> list[Tensor]:
        """Where packed sequences begin, and zeros that count the tiles of the two passes."""
        if not self.p.packed:
            return []
        cu = [x.int().contiguous() for x in (t.cu_seqlens_q, t.cu_seqlens_k)]
        return [*cu, *torch.zeros((2, 1), dtype=torch.int32, device=t.q.device)]

    def of_mask(self, t: Inputs, make: Callable[..., Any], *more: Any) -> Any:
        """What is made of the mask's tensors, once while they are the same."""
        return self.made.of(
            (make, *more), [t.leaves[n] for n in self.p.spec.mask_slots], lambda: make(self.p, t, *more)
        )

    @cached_property
    def expressions(self) -> Expressions:
        return Expressions.of(self.p)

    def extra(self, t: Inputs) -> list[Tensor]:
        """What :func:`tilewise.backends.hopper.backward.launch.optional_params` takes: what is each pass's own, then what both have."""
        x, found = self.config, []
        if x.packed:
            return found
        passes = (masks.column_ends, x.keys, True), (masks.row_ends, x.queries, False)
        for names, (ends, tiles, by_columns) in zip(x.extra, passes, strict=True):
            found += self.of_mask(t, ends) if names else ()
            if "blocks" in names:
                found += self.of_mask(t, masks.visits, tiles, by_columns)
        return [*found, *([t.seed] if x.dropout else []), *(leaf(t.leaves[n]) for n in self.expressions.slots)]

    def without_unseen(self, t: Inputs) -> tuple[Tensor, Tensor]:
        """k and v, or copies with zeros for the keys that no query sees, where kernels are not kept from these otherwise."""
        seen = self.of_mask(t, masks.seen) if self.config.by_rows else None
        return (t.k, t.v) if seen is None else tuple(torch.where(seen, x, 0) for x in (t.k, t.v))

    @cached_property
    def launch(self) -> PerStrides:
        return PerStrides(lambda: library.function(self.config), fixed=TENSORS)


def backward(plan: Plan, t: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
    p, keys, packed = plan.p, plan.keys, plan.p.packed
    grads = dq, dk, dv = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (t.q, t.k, t.v))
    if keys.start == keys.stop or not (dq.numel() and dk.numel()):  # nobody sees a key
        for x in grads:
            x.zero_()
        return Grads(*grads, sink_gradient(t, out.lse, -dlse), {})
    tensors = t.q, *plan.without_unseen(t)
    q, k, v = (addressed(x, good) for x, good in zip(tensors, plan.addressable, strict=True))
    o, do = (addressed(x, x.is_contiguous() or strides_addressable(x.shape, x.stride())) for x in (out.o, do))
    lse, dlse = out.lse.contiguous(), dlse.contiguous()
    if packed:  # one batch element
        q, k, v, o, do, lse, dlse, dq, dk, dv = (x.unsqueeze(0) for x in (q, k, v, o, do, lse, dlse, dq, dk, dv))
    if plan.cut:
        for x in (dk, dv):
            x[:, : keys.start].zero_()
            x[:, keys.stop :].zero_()
        k, v, dk, dv = (x[:, keys] for x in (k, v, dk, dv))
    lse2, delta = plan.lines(t, lse)
    given = q, k, v, o, do, lse, dlse, *plan.starts(t), *plan.extra(t)
    made = dq, dk, dv, lse2, delta, *([lse.new_empty(plan.sums_shape)] if plan.sums_shape else ())
    made += (lse.new_empty(plan.turns_shape, dtype=torch.int32),) if plan.turns_shape else ()
    plan.launch((*given, *made), lambda: (given, made, plan.numbers))
    if t.sink is None:
        return Grads(*grads, None, {})
    dsink = sink_gradient(t, lse2 / LOG2_E, delta) if packed else sink_gradient(t, lse, delta[..., : p.seqlen_q])
    return Grads(*grads, dsink, {})


def sink_gradient(t: Inputs, lse: Tensor, delta: Tensor) -> Tensor | None:
    """Of ``lse`` and ``delta`` (batch, heads_q, row), or without batch."""
    if t.sink is None:
        return None
    found = state.sink_gradient(t.sink.float().view(-1, 1), lse, delta)
    return found.sum_to_size(t.sink.shape[0], 1).view(-1).to(t.sink.dtype)
