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
from tilewise.backends.hopper.backward.grids import TileParts, grids, tile_parts
from tilewise.backends.hopper.config import PLAIN, Band, band_of, keys_of, strides_addressable
from tilewise.backends.hopper.host import library, masks
from tilewise.backends.hopper.host.backward_memory import BackwardMemory
from tilewise.backends.hopper.host.driver import Bound, PerStrides
from tilewise.backends.hopper.host.plan import ALIGNED, LOG2_E, KeptLaunch, LaunchPlan, addressed, ends_of, leaf
from tilewise.backends.hopper.host.portions import InPortions, PackedPortions, Portion, Portions, rooms
from tilewise.caching import cached_property
from tilewise.dropout import keep_scale, threshold

TENSORS = 32  # of a launch at most but for leaves; the problem fixes the sizes of all


@dataclass(eq=False)
class BackwardPlan(LaunchPlan):
    """The decisions for one problem's backward. Its launch writes dq, dk and dv, and what it needs beside them."""

    config: Backward
    DECIDED = (*LaunchPlan.DECIDED, "band", "keys", "cut", "room", "scales", "numbers")

    @cached_property
    def band(self) -> Band:
        """The band of the mask, cut to the keys that are seen. Packed, it leaves out each sequence's offset, and the kernels cut it."""
        if self.config.by_rows:  # of a band too, whose ends may be tensors
            return Band(None, None, 0, self.problem.seqlen_k)
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
    def memory(self) -> BackwardMemory:
        return BackwardMemory(self.problem, self.config, portions_of(self), *self.room)

    @cached_property
    def room(self) -> tuple[int, int]:
        """The most key tiles that a launch shares, and the most parts that these have."""
        return parts_room(self, portions_of(self))

    @cached_property
    def numbers(self) -> tuple:
        """The numbers of :func:`tilewise.backends.hopper.backward.launch.launch`."""
        return numbers_of(self, self.problem.batch_dim * self.problem.heads_k, self.keys)

    def made_of_mask(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """The tensors that are made of the mask's, in the launch's order."""
        config, (section_k, ctas_k, section_q, ctas_q) = self.config, self.numbers[2:6]
        of_keys = self.of_mask_fields(inputs, config.keys, (section_k, ctas_k), by_columns=True)
        if not config.extra.queries:
            return of_keys
        return of_keys + self.of_mask_fields(inputs, config.queries, (section_q, ctas_q))

    def of_call(self, inputs: Inputs) -> list[Tensor]:
        """The tensors that a launch reads beside q, k, v, o, their gradients, statistics and those of the mask, in its order: of dropout
        and of a bias, what expressions read, the starts of packed sequences, and zeros that count the tiles of the two passes."""
        config = self.config
        of_both = {"seed": inputs.seed, "slopes": self.slopes(inputs) if config.alibi else None}
        of_both |= {"line": self.line(inputs)} if config.table else {}
        of_both |= {"bias": self.bias(inputs)} if config.bias else {}
        found = [of_both[name] for name in config.extra.both]
        if config.traced != PLAIN:
            found += [leaf(inputs.leaves[n]) for n in self.expressions.slots]
        return found + self.starts(inputs) if self.problem.packed else found

    def starts(self, inputs: Inputs) -> list[Tensor]:
        """The starts of packed sequences, and zeros that count the tiles of the two passes, of each portion if there are such."""
        cu = [x.int().contiguous() for x in (inputs.cu_seqlens_q, inputs.cu_seqlens_k)]
        counts = (self.memory.portions.count, 1) if self.config.keys.keeps_ds else (1,)
        return [*cu, *torch.zeros((2, *counts), dtype=torch.int32, device=inputs.q.device)]

    def slope_gradient(self, parts: Tensor) -> dict[int, Tensor]:
        """The gradient of ALiBi's slopes, (heads_q,), by their slot, of its parts (batch, heads_q, warp); fp32."""
        # Kernels get the keys that are seen: nobody writes the parts of tiles past these.
        written = self.memory.slope_sums_of(self.keys.stop - self.keys.start)
        return {self.slopes_slot: parts[..., :written].sum((0, 2))}

    def line_gradient(
        self, sums: Tensor, inputs: Inputs, lse: Tensor, dlse: Tensor, delta: Tensor
    ) -> dict[int, Tensor]:
        """The gradient of the table whose line was read, by its slot, of the sums (slot, heads_q, count) that the launch has added up.

        A row's dS = P (dP - delta) add up to dlse where its P add up to 1; what a sink has of these is its own gradient. So the pairs that
        no sum has, those of the line's last bias, have what is left.
        """
        line, found, rows = self.line_of, sums.sum(0), dlse.masked_fill(lse == -torch.inf, 0.0)
        if inputs.sink is not None:
            rows = rows - sink_gradients(inputs, lse, delta)
        found[:, -1] = rows.sum((0, 2)) - found[:, :-1].sum(1)
        return {line.slot: line.gradient(found, inputs.leaves[line.slot])}

    def without_unseen(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """k and v, or copies with zeros for the keys that no query sees, where kernels are not kept from these otherwise."""
        keys = self.config.keys
        visited = ((keys.tile_m, keys.tile_n),) if self.config.form == "bits" else ()
        seen = None if self.config.of_numbers else self.of_mask(inputs, masks.seen, *visited)
        return (inputs.k, inputs.v) if seen is None else tuple(torch.where(seen, x, 0) for x in (inputs.k, inputs.v))

    @cached_property
    def launch(self) -> PerStrides:
        return PerStrides(lambda: library.function(self.config), fixed=0 if self.config.keys.keeps_ds else TENSORS)

    def backward(self, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        """The gradients, by the launch that is kept if there is one and the tensors lie where it can read them."""
        given = inputs.q, inputs.k, inputs.v, out.o, do, out.lse, dlse
        kept = self.repeated(inputs)
        if kept is not None and as_they_are(given):
            made = self.memory.again(kept.written)
            kept.bound(*given, *kept.of_mask, *self.of_call(inputs), *made)
            return self.gradients(inputs, out.lse, dlse, made)
        return backward(self, inputs, out, do, dlse)

    def gradients(self, inputs: Inputs, lse: Tensor, dlse: Tensor, made: Sequence[Tensor]) -> Grads:
        """The gradients, of all that a launch has written."""
        dq, dk, dv, lse2, delta = made[:5]
        leaves = self.slope_gradient(made[-1]) if self.config.dslopes else {}
        if self.config.table and self.problem.spec.lookups:
            leaves = self.line_gradient(made[-1], inputs, lse, dlse, delta[..., : self.problem.seqlen_q])
        if self.config.dbias:
            leaves = {self.bias_of.slot: self.bias_of.gradient(made[-1], inputs.leaves[self.bias_of.slot])}
        if inputs.sink is None:
            return Grads(dq, dk, dv, None, leaves)
        if self.problem.packed:  # rows lie where the statistics have them
            return Grads(dq, dk, dv, sink_gradient(inputs, lse_of(self, lse2), delta), leaves)
        return Grads(dq, dk, dv, sink_gradient(inputs, lse, delta[..., : self.problem.seqlen_q]), leaves)


def numbers_of(plan: BackwardPlan, heads: int, keys: slice, resumes: bool = False, suspends: bool = False) -> tuple:
    """The numbers of a launch that has so many key heads of all batch elements, and some keys, from the first of which the band's ends
    count; whether earlier keys have left sums of dQ, and whether later ones follow."""
    problem, scale = plan.problem, plan.problem.softmax_scale
    shares, cores = shares_of(plan, heads, keys), devices.of(problem.device).cores
    sections = grids(plan.config, problem, heads, keys.stop - keys.start, cores, shares)
    found = (*ends_of(plan.band, keys.start), *sections, scale, *plan.scales)
    dropped = problem.spec.dropout_p
    kinds = {"threshold": lambda: threshold(dropped), "keep": lambda: keep_scale(dropped)}
    kinds["start"] = lambda: plan.line_of.start
    kinds |= {"resumes": lambda: int(resumes), "suspends": lambda: int(suspends)}
    kinds |= {"whole": lambda: shares.whole, "parts": lambda: shares.each, "block_bits": lambda: shares.block_bits}
    kinds |= {"part_heads": lambda: problem.heads_q // problem.heads_k // shares.by_heads}
    found += tuple(kinds[name]() for name in plan.config.extra.numbers)
    found += () if plan.config.traced == PLAIN else plan.expressions.numbers
    return (*found, plan.band.start, plan.band.stop) if problem.packed else found


def portions_of(plan: BackwardPlan) -> Portions | PackedPortions | None:
    """The heads and keys of each launch of a plan, where it keeps dS."""
    if not plan.config.keys.keeps_ds:
        return None
    if plan.problem.packed:
        return PackedPortions(plan.problem, plan.config)
    keys, cores = plan.keys, devices.of(plan.problem.device).cores
    return Portions(plan.problem, plan.config, keys.stop - keys.start, ends_of(plan.band, keys.start), cores)


def launched(plan: BackwardPlan, given: Sequence[Tensor], made: Sequence[Tensor]) -> Bound | InPortions:
    """Launches the kernels, and returns what launches them again."""
    if not plan.config.keys.keeps_ds:
        return plan.launch((*given, *made), lambda: (given, made, plan.numbers))
    portions, found = plan.memory.portions, []
    for n in range(portions.count):
        of_portion, numbers = portions.views(n, given, made), numbers_of_portion(plan, n)
        arguments = *(tuple(tensors) for tensors in of_portion), numbers
        found.append(plan.launch([*of_portion[0], *of_portion[1]], lambda arguments=arguments: arguments, numbers))
    return InPortions(found, portions)


def numbers_of_portion(plan: BackwardPlan, n: int) -> tuple:
    """The numbers of the n-th of a launch's portions."""
    if plan.problem.packed:
        return (*plan.numbers, n)
    portions = plan.memory.portions
    portion = portions.all[n]
    return numbers_of(plan, *heads_and_keys(plan, portion), *portions.neighbours(portion))


def shares_of(plan: BackwardPlan, heads: int, keys: slice) -> TileParts:
    """The division of the key tiles of a launch that has so many key heads of all batch elements, and some keys."""
    ends, cores = ends_of(plan.band, keys.start), devices.of(plan.problem.device).cores
    return tile_parts(plan.config, plan.problem, heads, keys.stop - keys.start, ends, cores)


def parts_room(plan: BackwardPlan, portions: Portions | PackedPortions | None) -> tuple[int, int]:
    """The most key tiles that a launch shares, and the most parts that these have."""
    launches = [(plan.problem.batch_dim * plan.problem.heads_k, plan.keys)]
    if portions and not plan.problem.packed:
        launches = [heads_and_keys(plan, portion) for portion in portions.all]
    rooms_of = [shares_of(plan, *launch).room(plan.config, plan.problem, *launch) for launch in launches]
    return max(shared for shared, _ in rooms_of), max(parts for _, parts in rooms_of)


def heads_and_keys(plan: BackwardPlan, portion: Portion) -> tuple[int, slice]:
    """The key heads of all batch elements that a portion has, and its keys."""
    keys = slice(*(plan.keys.start + key for key in portion.keys))
    return portion.size("batch") * portion.size("heads"), keys


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
    # Of q, o and do there may be copies by now, which a later call need not make.
    in_place = k is inputs.k and v is inputs.v and as_they_are((*qkv, o, do, lse, dlse))
    if packed:  # one batch element
        q, k, v, o, do, lse, dlse, dq, dk, dv = (x.unsqueeze(0) for x in (q, k, v, o, do, lse, dlse, dq, dk, dv))
    if plan.cut:
        for x in (dk, dv):
            x[:, : keys.start].zero_()
            x[:, keys.stop :].zero_()
        k, v, dk, dv = (x[:, keys] for x in (k, v, dk, dv))
    of_mask, holes = plan.made_of_mask(inputs), packed and inputs.sink is not None
    given = q, k, v, o, do, lse, dlse, *of_mask, *plan.of_call(inputs)
    made = plan.memory.written((dq, dk, dv), lse, holes)
    bound = launched(plan, given, made)
    made = *grads, *made[3:]
    if all(plan.addressable) and in_place and not (plan.cut or holes):
        spent = rooms(plan.config) if plan.config.keys.keeps_ds else 0
        plan.keep(inputs, KeptLaunch(bound, made, of_mask, spent))
    return plan.gradients(inputs, lse, dlse, made)


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
    found = sink_gradients(inputs, lse, delta)
    return found.sum_to_size(inputs.sink.shape[0], 1).view(-1).to(inputs.sink.dtype)


def sink_gradients(inputs: Inputs, lse: Tensor, delta: Tensor) -> Tensor:
    """The part of each row in the gradient of the sink, as :func:`sink_gradient` has the rows."""
    return state.sink_gradient(inputs.sink.float().view(-1, 1), lse, delta)
