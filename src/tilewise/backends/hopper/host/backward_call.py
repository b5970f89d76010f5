"""The launch of a backward, from a problem, its tensors and its output's gradients.

A :class:`BackwardPlan` holds the decisions that depend on the problem alone; :func:`backward` makes a call's tensors and launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise import state
from tilewise.backends.base import Grads, Inputs, Output, without_memory
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.grids import grids
from tilewise.backends.hopper.backward.tiles import KEY_GROUPS
from tilewise.backends.hopper.config import PLAIN, Band, band_of, cap_of, keys_of, slopes_of, strides_addressable
from tilewise.backends.hopper.host import library, masks
from tilewise.backends.hopper.host.driver import Bound, PerStrides
from tilewise.backends.hopper.host.plan import ALIGNED, FAR, LOG2_E, Plan, addressed, leaf
from tilewise.caching import cached_property
from tilewise.dropout import keep_scale, threshold

INF = float("inf")
TENSORS = 32  # of a launch at most but for leaves; the problem fixes the sizes of all


@dataclass(eq=False)
class BackwardPlan(Plan):
    """The decisions for one problem's backward.

    Attributes:
        bound: the launch that needs nothing but addresses, once there was one (:attr:`direct`).
        written: tensors without memory, like those that this launch writes: dq, dk, dv, and what it needs beside them.
    """

    config: Backward
    bound: Bound | None = None
    written: list[Tensor] = field(default_factory=list)

    @cached_property
    def band(self) -> Band:
        """The band of the mask, cut to the keys that are seen. Packed, it leaves out each sequence's offset, and the kernels cut it."""
        if not self.config.of_numbers:
            return keys_of(self.problem)[1]
        found = band_of(self.problem)
        return found if self.problem.packed else found.cut(self.problem.seqlen_q)

    @cached_property
    def keys(self) -> slice:
        """The keys that kernels get: those that some query sees; packed, all."""
        return slice(0, self.problem.seqlen_k) if self.problem.packed else slice(self.band.start, self.band.stop)

    @cached_property
    def cut(self) -> bool:
        """Whether some keys at either end are seen by no query and are cut off."""
        return (self.keys.start, self.keys.stop) != (0, self.problem.seqlen_k)

    @cached_property
    def direct(self) -> bool:
        """Whether the kernels take the caller's tensors as they are, and no others but what they write."""
        config, spec = self.config, self.problem.spec
        plain = config.of_numbers and not (config.pairs or config.alibi) and not any(config.extra)
        return all(self.addressable) and plain and not (self.cut or self.problem.packed) and spec.sink_slot is None

    @cached_property
    def sums_shape(self) -> tuple[int, ...] | None:
        """The shape of the sums to which the pass over key tiles adds dQ, if it does."""
        if not self.config.keys.sums_dq:
            return None
        batch = 1 if self.problem.packed else self.problem.batch
        return batch, self.problem.heads_q, self.config.blocks(self.problem), KEY_GROUPS, self.config.keys.part_elements

    @cached_property
    def semaphores_shape(self) -> tuple[int, ...] | None:
        """The shape of the semaphores of these additions, where the first one is a store."""
        if not self.config.keys.stores_first:
            return None
        return self.problem.batch, self.problem.heads_q, self.config.semaphores(self.problem)

    def statistics(self, inputs: Inputs, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for lse2 and delta, fp32, of lse (batch, heads_q, row). Packed, there are rows between the sequences that nobody
        writes: a sink's gradient reads them too, and they must add nothing to it."""
        shape = *lse.shape[:2], self.config.statistics_rows(self.problem)
        holes = self.problem.packed and inputs.sink is not None
        kinds = ((*shape[:2], shape[2] * self.config.statistics.words), INF), (shape, 0.0)
        return tuple(lse.new_full(size, n) if holes else lse.new_empty(size) for size, n in kinds)

    @cached_property
    def numbers(self) -> tuple:
        """The numbers of :func:`tilewise.backends.hopper.backward.launch.launch`; the band's ends count from the first key."""
        problem, band = self.problem, self.band
        cap = None if self.config.alibi else cap_of(problem)
        lo, hi = (far if end is None else end - self.keys.start for end, far in ((band.lo, -FAR), (band.hi, FAR)))
        launched = grids(self.config, problem, self.keys.stop - self.keys.start, devices.of(problem.device).cores)
        scale2, cap2 = LOG2_E * problem.softmax_scale, 0.0
        if self.config.traced.score:
            scale2 = LOG2_E
        elif cap is not None:
            scale2, cap2 = LOG2_E * cap, 2 * LOG2_E * problem.softmax_scale / cap
        more = (band.start, band.stop) if problem.packed else ()
        more += () if self.config.traced == PLAIN else self.expressions.numbers
        drop = (threshold(problem.spec.dropout_p), keep_scale(problem.spec.dropout_p)) if self.config.dropout else ()
        return lo, hi, *launched, problem.softmax_scale, scale2, cap2, *drop, *more

    def starts(self, inputs: Inputs) -> list[Tensor]:
        """The starts of packed sequences, and zeros that count the tiles of the two passes."""
        if not self.problem.packed:
            return []
        cu = [x.int().contiguous() for x in (inputs.cu_seqlens_q, inputs.cu_seqlens_k)]
        return [*cu, *torch.zeros((2, 1), dtype=torch.int32, device=inputs.q.device)]

    def extra(self, inputs: Inputs) -> list[Tensor]:
        """The arguments of :func:`tilewise.backends.hopper.backward.launch.optional_params`: those of each pass, then those of both."""
        config, found = self.config, []
        if config.packed:
            return found
        passes = (masks.column_ends, config.keys, True), (masks.row_ends, config.queries, False)
        for names, (ends, tiles, by_columns) in zip(config.extra, passes, strict=True):
            found += self.of_mask(inputs, ends) if "lo" in names else ()
            if "bits" in names:
                section, ctas = self.numbers[2:4]
                found += self.of_mask(inputs, masks.tiles_with_bits, tiles, section, ctas, by_columns)
            elif "blocks" in names:
                found += self.of_mask(inputs, masks.visits, tiles, by_columns)
        found += [inputs.seed] if config.dropout else []
        found += [inputs.leaves[slopes_of(self.problem)].detach().contiguous()] if config.alibi else []
        return found + ([] if config.traced == PLAIN else [leaf(inputs.leaves[n]) for n in self.expressions.slots])

    def without_unseen(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """k and v, or copies with zeros for the keys that no query sees, where kernels are not kept from these otherwise."""
        keys = self.config.keys
        visited = ((keys.tile_m, keys.tile_n),) if self.config.form == "bits" else ()
        seen = None if self.config.of_numbers else self.of_mask(inputs, masks.seen, *visited)
        return (inputs.k, inputs.v) if seen is None else tuple(torch.where(seen, x, 0) for x in (inputs.k, inputs.v))

    @cached_property
    def launch(self) -> PerStrides:
        return PerStrides(lambda: library.function(self.config), fixed=TENSORS)

    def backward(self, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        """The gradients, by the launch that is kept if there is one and the tensors lie where it can read them."""
        given = inputs.q, inputs.k, inputs.v, out.o, do, out.lse, dlse
        if self.bound is not None and as_they_are(given):
            made = [torch.empty_like(x) for x in self.written]
            self.bound(*given, *made)
            return Grads(made[0], made[1], made[2], None, {})
        return backward(self, inputs, out, do, dlse)


def as_they_are(given: Sequence[Tensor]) -> bool:
    """Whether kernels can read q, k, v, o, do, lse and dlse where they lie; the strides of q, k and v are the problem's."""
    q, k, v, o, do, lse, dlse = given
    where = q.data_ptr() | k.data_ptr() | v.data_ptr() | o.data_ptr() | do.data_ptr()
    contiguous = o.is_contiguous() and do.is_contiguous() and lse.is_contiguous() and dlse.is_contiguous()
    return contiguous and not where % ALIGNED


def backward(plan: BackwardPlan, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
    """The gradients: makes what the launch reads and writes, and launches."""
    problem, keys, packed = plan.problem, plan.keys, plan.problem.packed
    qkv = inputs.q, inputs.k, inputs.v
    grads = dq, dk, dv = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in qkv)
    if keys.start == keys.stop or not (dq.numel() and dk.numel()):  # nobody sees a key
        for x in grads:
            x.zero_()
        return Grads(*grads, sink_gradient(inputs, out.lse, -dlse), {})
    tensors = inputs.q, *plan.without_unseen(inputs)
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
    lse2, delta = plan.statistics(inputs, lse)
    given = q, k, v, o, do, lse, dlse, *plan.starts(inputs), *plan.extra(inputs)
    made = dq, dk, dv, lse2, delta, *([lse.new_empty(plan.sums_shape)] if plan.sums_shape else ())
    made += (lse.new_empty(plan.semaphores_shape, dtype=torch.int32),) if plan.semaphores_shape else ()
    made += (lse.new_empty(1, dtype=torch.int32),) if plan.config.makes_queue else ()
    bound = plan.launch((*given, *made), lambda: (given, made, plan.numbers))
    if plan.direct and as_they_are((*qkv, o, do, lse, dlse)):  # some may be copies by now, which lie so
        plan.written = [without_memory(torch.empty_like(x)) for x in made]
        plan.bound = bound
    if inputs.sink is None:
        return Grads(*grads, None, {})
    if packed:  # rows lie where the statistics have them
        return Grads(*grads, sink_gradient(inputs, lse2 / LOG2_E, delta), {})
    return Grads(*grads, sink_gradient(inputs, lse, delta[..., : problem.seqlen_q]), {})


def sink_gradient(inputs: Inputs, lse: Tensor, delta: Tensor) -> Tensor | None:
    """The gradient of the sink, if there is one; ``lse``, ``delta``: (batch, heads_q, row), or without batch."""
    if inputs.sink is None:
        return None
    found = state.sink_gradient(inputs.sink.float().view(-1, 1), lse, delta)
    return found.sum_to_size(inputs.sink.shape[0], 1).view(-1).to(inputs.sink.dtype)
