"""The launch of a backward, from a problem, its tensors and its output's gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise import state
from tilewise.backends.base import Grads, Inputs, Output, Saved, gradients_of_no_pair
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.grids import TileParts, grids, tile_parts
from tilewise.backends.hopper.config import MULTIPLE, Band, band_of, keys_of, strides_addressable
from tilewise.backends.hopper.host import masks
from tilewise.backends.hopper.host.backward_memory import SUMS, BackwardMemory
from tilewise.backends.hopper.host.direct import PlacedPlan
from tilewise.backends.hopper.host.draft import Draft, Late, Launches, View, given_views
from tilewise.backends.hopper.host.plan import LOG2_E, ends_of
from tilewise.backends.hopper.host.portions import OF_KEYS, PackedPortions, Portion, Portions
from tilewise.backends.hopper.pair_bias import ALIGNED, aligned
from tilewise.caching import cached_property

KEYS, QUERIES = "keys_", "queries_"
PACKED = (
    "q",
    "k",
    "v",
    "o",
    "lse",
    "dlse",
    "dq",
    "dk",
    "dv",
)  # tensors that packed sequences have without a batch dimension


@dataclass(eq=False)
class BackwardDraft(PlacedPlan):
    """The decisions for one problem's backward that follow from its sizes."""

    config: Backward
    DECIDED = (*PlacedPlan.DECIDED, "keys", "sections")
    PRODUCTS = ("k", "v")
    BESIDE = ("o", "lse", "dlse", "do")

    @property
    def tiles(self) -> masks.Sized:
        return self.config.keys

    @property
    def passes(self) -> dict[str, masks.Sized]:
        """The tiles of the pass over keys, and of one over queries if there is one, by what the names of their parameters begin with."""
        queries = {QUERIES: self.config.queries} if self.config.queries else {}
        return {KEYS: self.config.keys} | queries

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

    @property
    def holes(self) -> bool:
        """Whether a sink's gradient reads rows that nobody writes: those between packed sequences."""
        return self.problem.packed and self.problem.spec.sink_slot is not None

    @property
    def result_is_made(self) -> bool:
        return self.cut or bool(self.problem.spec.grad_slots)

    @property
    def bits(self) -> dict[str, masks.BitsOf]:
        passes = self.passes if self.config.form == "bits" else {}
        return {f"{x}tiles": masks.BitsOf.of(self.problem, tiles, x == KEYS) for x, tiles in passes.items()}

    @cached_property
    def portions(self) -> Portions | PackedPortions | None:
        """The heads and keys of each launch, where it keeps dS."""
        return portions_of(self)

    @cached_property
    def memory(self) -> BackwardMemory:
        return BackwardMemory(self.problem, self.config, self.portions, *self.room)

    @cached_property
    def room(self) -> tuple[int, int]:
        """The most key tiles that a launch shares, and the most parts that these have."""
        return parts_room(self, self.portions)

    @cached_property
    def numbers(self) -> dict[str, int | float]:
        """The numbers of a launch, by name."""
        return numbers_of(self, self.problem.batch_dim * self.problem.heads_k, self.keys)

    @cached_property
    def sections(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The heads of a section and the CTAs of the pass over keys, and of that over queries."""
        return tuple((self.numbers[f"section_{x}"], self.numbers[f"ctas_{x}"]) for x in "kq")

    def drafted(self) -> Launches:
        draft, problem = Draft(), self.problem
        dq, dk, dv = (
            draft.result(f"d{name}", x.dtype, *x.shape) for name, x in zip("qkv", problem.tensors, strict=False)
        )
        rows = {name: self.view(name) for name in "qkv"}
        rows["o"] = View.contiguous("o", problem.dtype, *problem.output_shapes[0])
        made = {"dq": dq, "dk": dk, "dv": dv} | self.memory.drafted(draft, self.holes)
        if problem.packed:
            rows, made = ({name: whole(x, name) for name, x in found.items()} for found in (rows, made))
        if self.cut:
            span = self.keys.start, self.keys.stop - self.keys.start
            rows, made = (
                {name: x.narrow(1, *span) if name in OF_KEYS else x for name, x in found.items()}
                for found in (rows, made)
            )
        given = self.beside(draft) | rows | made
        if not self.portions:
            draft.launch(self.config, given | self.numbers)
        for n in range(self.portions.count if self.portions else 0):
            draft.launch(self.config, self.portions.of(n, given) | numbers_of_portion(self, n))
        return draft.done()

    def beside(self, draft: Draft) -> dict[str, View | Late]:
        """The tensors that a launch reads beside q, k, v and o, by name; of packed sequences also zeros that count the tiles of the two
        passes, of each portion."""
        problem = self.problem
        sizes = {"batch": problem.batch_dim, "heads_q": problem.heads_q, "seqlen_q": problem.seqlen_q}
        found = given_views(self.config, problem.dtype, sizes | {"starts": problem.batch + 1}) | self.drafted_leaves()
        for name, x in self.bits.items():
            found |= x.views(name, name.removesuffix("tiles"))
        if problem.packed:
            each = (self.portions.count, 1) if self.portions else (1,)
            counts = draft.result("counts", torch.int32, 2, *each, fill=0)
            found |= {"counts_k": counts.select(0, 0), "counts_q": counts.select(0, 1)}
        return found


class BackwardPlan(BackwardDraft):
    """The decisions for one problem's backward."""

    def tensors(self, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor) -> dict[str, Tensor]:
        """The tensors that launches read, by name."""
        packed = self.problem.packed
        good = strides_addressable(do.shape, do.stride())
        do = aligned(do if good else do.clone(memory_format=torch.contiguous_format))
        kept = self.kept(inputs.leaves)
        found = self.read(inputs, kept)
        found |= {"o": aligned(out.o), "do": do[None] if packed else do}
        found |= {"lse": out.lse, "dlse": dlse}
        found |= self.mask_tensors(inputs, kept) | self.tensors_beside(inputs)
        return found | self.portions.late(found) if self.portions else found

    def mask_tensors(self, inputs: Inputs, kept: Sequence[Tensor]) -> dict[str, Tensor]:
        """Those of them that are made of the mask, of which some are :meth:`kept`."""
        if self.config.form == "bits":
            return dict(zip(self.keeps, kept, strict=True))
        found, fields = {}, self.config.mask_fields
        for prefix in self.passes:
            of_mask = self.of_mask_fields(inputs, prefix == KEYS)
            found |= {prefix + name: x for name, x in zip(fields, of_mask, strict=True)}
        return found

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

    def gradients_of_memory(
        self, do: Tensor, dlse: Tensor | None, saved: Saved
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """The backward of a plan that is :attr:`direct` (:data:`tilewise.backends.base.DirectBackward`); hooks of saved tensors may bring
        o and lse in another layout."""
        q, k, v, *extras, _, o, lse = saved
        at = q.data_ptr() | k.data_ptr() | v.data_ptr() | o.data_ptr() | do.data_ptr()
        if at % ALIGNED or not all(x is None or x.is_contiguous() for x in (do, dlse, o, lse)):
            return None
        if any(n % MULTIPLE for n in do.stride()[:-1]):  # of a dimension of one number
            return None
        dlse = devices.zeros(lse.device, lse.numel()) if dlse is None else dlse
        kept = self.kept(extras)
        tensors = [*saved, dlse, do[None] if do.ndim == 3 else do, *kept]
        if self.zeroed:
            tensors[1:3] = self.of_seen_keys(kept[0], extras, k, v)
        dq, dk, dv, *_ = self.launches.run([tensors[n] for n in self.direct])
        return dq, dk, dv

    def backward(self, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        if self.launches is None:
            return gradients_of_no_pair(self.problem, inputs, dlse)
        made = self.launches.run_named(self.tensors(inputs, out, do, dlse))
        keys = self.keys
        if keys.start or keys.stop != self.problem.seqlen_k:  # keys that kernels did not get
            for x in (made["dk"], made["dv"]):
                x[:, : keys.start].zero_()
                x[:, keys.stop :].zero_()
        return self.gradients(inputs, out.lse, dlse, made)

    def gradients(self, inputs: Inputs, lse: Tensor, dlse: Tensor, made: Mapping[str, Tensor]) -> Grads:
        """The gradients, of what the launches have written."""
        config, problem = self.config, self.problem
        of_qkv, leaves, sink = (made["dq"], made["dk"], made["dv"]), {}, None
        if config.trained and config.score == "alibi":
            leaves = self.slope_gradient(made[SUMS])
        elif problem.spec.lookups and config.score == "table":
            leaves = self.line_gradient(made[SUMS], inputs, lse, dlse, made["delta"][..., : problem.seqlen_q])
        elif config.stores_bias:
            bias, room = self.bias_of, made[SUMS][..., : problem.seqlen_k]
            leaves = {bias.slot: bias.gradient(room, inputs.leaves[bias.slot])}
        if inputs.sink is not None and problem.packed:  # rows lie where the statistics have them
            sink = sink_gradient(inputs, lse_of(self, made["lse2"]), made["delta"])
        elif inputs.sink is not None:
            sink = sink_gradient(inputs, lse, made["delta"][..., : problem.seqlen_q])
        return Grads(*of_qkv, sink, leaves)


def numbers_of(
    plan: BackwardDraft, heads: int, keys: slice, resumes: bool = False, suspends: bool = False
) -> dict[str, int | float]:
    """The numbers, by name, of a launch that has so many key heads of all batch elements, and some keys, from the first of which the
    band's ends count; whether earlier keys have left sums of dQ, and whether later ones follow."""
    problem = plan.problem
    shares, cores = shares_of(plan, heads, keys), devices.of(problem.device).cores
    (lo, hi), (scale2, cap2) = ends_of(plan.band, keys.start), plan.scales
    sections = grids(plan.config, problem, heads, keys.stop - keys.start, cores, shares)
    found = {"band_lo": lo, "band_hi": hi, "scale": problem.softmax_scale, "scale2": scale2, "cap2": cap2}
    found |= zip(("section_k", "ctas_k", "section_q", "ctas_q"), sections, strict=True)
    found |= {"resumes": int(resumes), "suspends": int(suspends), "first": plan.band.start, "last": plan.band.stop}
    found |= {"whole": shares.whole, "parts": shares.each, "block_bits": shares.block_bits}
    found["part_heads"] = problem.heads_q // problem.heads_k // shares.by_heads
    found["ordered"] = int(problem.spec.deterministic)
    return found | plan.numbers_beside


def whole(x: View | Late, name: str) -> View | Late:
    """A tensor of packed sequences as kernels take it, of one batch element."""
    return x.unsqueeze(0) if name in PACKED and isinstance(x, View) else x


def portions_of(plan: BackwardDraft) -> Portions | PackedPortions | None:
    """:attr:`BackwardPlan.portions`."""
    if not plan.config.keys.keeps_ds:
        return None
    if plan.problem.packed:
        return PackedPortions(plan.problem, plan.config)
    keys, cores = plan.keys, devices.of(plan.problem.device).cores
    return Portions(plan.problem, plan.config, keys.stop - keys.start, ends_of(plan.band, keys.start), cores)


def numbers_of_portion(plan: BackwardDraft, n: int) -> dict[str, int | float]:
    """The numbers of the n-th of a launch's portions."""
    if plan.problem.packed:
        return plan.numbers | {"portion": n}
    portion = plan.portions.all[n]
    return numbers_of(plan, *heads_and_keys(plan, portion), *plan.portions.neighbours(portion))


def shares_of(plan: BackwardDraft, heads: int, keys: slice) -> TileParts:
    """The division of the key tiles of a launch that has so many key heads of all batch elements, and some keys."""
    ends, cores = ends_of(plan.band, keys.start), devices.of(plan.problem.device).cores
    return tile_parts(plan.config, plan.problem, heads, keys.stop - keys.start, ends, cores)


def parts_room(plan: BackwardDraft, portions: Portions | PackedPortions | None) -> tuple[int, int]:
    """The most key tiles that a launch shares, and the most parts that these have."""
    launches = [(plan.problem.batch_dim * plan.problem.heads_k, plan.keys)]
    if portions and not plan.problem.packed:
        launches = [heads_and_keys(plan, portion) for portion in portions.all]
    rooms_of = [shares_of(plan, *launch).room(plan.config, plan.problem, *launch) for launch in launches]
    return max(shared for shared, _ in rooms_of), max(parts for _, parts in rooms_of)


def heads_and_keys(plan: BackwardDraft, portion: Portion) -> tuple[int, slice]:
    """The key heads of all batch elements that a portion has, and its keys."""
    keys = slice(*(plan.keys.start + key for key in portion.keys))
    return portion.size("batch") * portion.size("heads"), keys


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
