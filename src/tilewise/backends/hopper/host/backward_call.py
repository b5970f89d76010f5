"""The launch of a backward, from a problem, its tensors and its output's gradients.

A :class:`BackwardPlan` holds the decisions that depend on the problem alone; :func:`backward` makes a call's tensors and launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise import state
from tilewise.backends.base import Grads, Inputs, Output, gradients_of_no_pair, has_no_pair
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.grids import grids
from tilewise.backends.hopper.config import PLAIN, Band, band_of, keys_of, slopes_of, strides_addressable
from tilewise.backends.hopper.host import library, masks
from tilewise.backends.hopper.host.backward_memory import BackwardMemory
from tilewise.backends.hopper.host.driver import PerStrides
from tilewise.backends.hopper.host.plan import ALIGNED, LOG2_E, LaunchPlan, addressed, ends_of, leaf
from tilewise.caching import cached_property
from tilewise.dropout import keep_scale, threshold

TENSORS = 32  # of a launch at most but for leaves; the problem fixes the sizes of all


@dataclass(eq=False)
class BackwardPlan(LaunchPlan):
    """The decisions for one problem's backward; ``written``: dq, dk, dv, and what the launch needs beside them."""

    config: Backward

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
        """Whether the kernels take the caller's tensors as they are, and no others but what they write and :meth:`starts`."""
        reads_more = any(self.config.extra) or self.config.traced != PLAIN or self.problem.spec.sink_slot is not None
        return all(self.addressable) and not (reads_more or self.cut)

    @cached_property
    def memory(self) -> BackwardMemory:
        """The sizes of what the launch writes."""
        return BackwardMemory(self.problem, self.config)

    @cached_property
    def numbers(self) -> tuple:
        """The numbers of :func:`tilewise.backends.hopper.backward.launch.launch`; the band's ends count from the first key."""
        problem, scale = self.problem, self.problem.softmax_scale
        launched = grids(self.config, problem, self.keys.stop - self.keys.start, devices.of(problem.device).cores)
        found = (*ends_of(self.band, self.keys.start), *launched, scale, *self.scales)
        dropout = {"threshold": threshold, "keep": keep_scale}
        found += tuple(dropout[name](problem.spec.dropout_p) for name in self.config.extra.numbers)
        found += () if self.config.traced == PLAIN else self.expressions.numbers
        return (*found, self.band.start, self.band.stop) if problem.packed else found

    def starts(self, inputs: Inputs) -> list[Tensor]:
        """The starts of packed sequences, and zeros that count the tiles of the two passes."""
        if not self.problem.packed:
            return []
        cu = [x.int().contiguous() for x in (inputs.cu_seqlens_q, inputs.cu_seqlens_k)]
        return [*cu, *torch.zeros((2, 1), dtype=torch.int32, device=inputs.q.device)]

    def extra(self, inputs: Inputs) -> list[Tensor]:
        """The tensors of ``config.extra``, in its order, then those that expressions read."""
        config, (section_k, ctas_k, section_q, ctas_q) = self.config, self.numbers[2:6]
        of_mask = self.mask_tensors(inputs, config.keys, (section_k, ctas_k), by_columns=True)
        found = [of_mask[name] for name in config.extra.keys]
        if config.extra.queries:
            of_mask = self.mask_tensors(inputs, config.queries, (section_q, ctas_q))
            found += [of_mask[name] for name in config.extra.queries]
        of_both = {"seed": inputs.seed, "slopes": self.slopes(inputs) if config.alibi else None}
        found += [of_both[name] for name in config.extra.both]
        return found + ([] if config.traced == PLAIN else [leaf(inputs.leaves[n]) for n in self.expressions.slots])

    def slope_gradient(self, parts: Tensor) -> dict[int, Tensor]:
        """The gradient of ALiBi's slopes, (heads_q,), by their slot, of its parts (batch, heads_q, warp); fp32."""
        # Kernels get the keys that are seen: nobody writes the parts of tiles past these.
        written = self.memory.slope_sums_of(self.keys.stop - self.keys.start)
        return {slopes_of(self.problem): parts[..., :written].sum((0, 2))}

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
            self.bound(*given, *self.starts(inputs), *made)
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
    if keys.start == keys.stop or has_no_pair(problem):  # nobody sees a key
        return gradients_of_no_pair(problem, inputs, dlse)
    grads = dq, dk, dv = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in qkv)
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
    given = q, k, v, o, do, lse, dlse, *plan.extra(inputs), *plan.starts(inputs)
    made = plan.memory.written((dq, dk, dv), lse, holes=packed and inputs.sink is not None)
    lse2, delta = made[3:5]
    bound = plan.launch((*given, *made), lambda: (given, made, plan.numbers))
    if plan.direct and as_they_are((*qkv, o, do, lse, dlse)):  # some may be copies by now, which lie so
        plan.keep(bound, [*grads, *made[3:]])
    leaves = plan.slope_gradient(made[-1]) if plan.config.dslopes else {}
    if inputs.sink is None:
        return Grads(*grads, None, leaves)
    if packed:  # rows lie where the statistics have them
        return Grads(*grads, sink_gradient(inputs, lse_of(plan, lse2), delta), leaves)
    return Grads(*grads, sink_gradient(inputs, lse, delta[..., : problem.seqlen_q]), leaves)


def lse_of(plan: BackwardPlan, lse2: Tensor) -> Tensor:
    """lse, (batch, heads_q, row) in fp32, of the statistics that a launch has written: lse2, or the words of rows whose first three terms
    add up to lse / softmax_scale (:func:`tilewise.backends.hopper.backward.preprocess.terms_of`)."""
    if not plan.config.subtracts:
        return lse2 / LOG2_E
    return lse2.view(torch.bfloat16).unflatten(-1, (-1, 8))[..., :3].float().sum(-1) * plan.problem.softmax_scale


def sink_gradient(inputs: Inputs, lse: Tensor, delta: Tensor) -> Tensor | None:
    """The gradient of the sink, if there is one; ``lse``, ``delta``: (batch, heads_q, row), or without batch."""
    if inputs.sink is None:
        return None
    found = state.sink_gradient(inputs.sink.float().view(-1, 1), lse, delta)
    return found.sum_to_size(inputs.sink.shape[0], 1).view(-1).to(inputs.sink.dtype)
