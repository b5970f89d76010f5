"""The launch of a backward, from a problem, its tensors and its output's gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise import state
from tilewise.backends.base import Grads, Inputs, Output, Saved, gradients_of_no_pair
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.grids import TileParts, grids, tile_parts
from tilewise.backends.hopper.backward.tiles import KEY_GROUPS, LINE_SLOTS
from tilewise.backends.hopper.config import MULTIPLE, Band, band_of, keys_of, strides_addressable
from tilewise.backends.hopper.host import masks
from tilewise.backends.hopper.host.draft import Draft, Late, Launches, View, facts_of, given_views
from tilewise.backends.hopper.host.plan import LOG2_E, LaunchPlan, ends_of
from tilewise.backends.hopper.host.portions import OF_KEYS, PackedPortions, Portions
from tilewise.backends.hopper.pair_bias import ALIGNED, pair_bias_of
from tilewise.backends.hopper.tables import line_of
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
SUMS = "keys_dbias"  # of the gradient of what is added to scores
WARPS = 4  # of a warpgroup


@dataclass(eq=False)
class BackwardSpans(LaunchPlan):
    """The part of a backward's plan that says which heads and keys each launch has, and its numbers."""

    config: Backward
    DECIDED = (*LaunchPlan.DECIDED, "keys", "sections")
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
    def result_is_made(self) -> bool:
        return self.cut or bool(self.problem.spec.grad_slots)

    @property
    def of_mask(self) -> dict[str, masks.BitsOf | masks.EndsOf]:
        if self.config.form == "bits":
            return {f"{x}tiles": masks.BitsOf.of(self.problem, tiles, x == KEYS) for x, tiles in self.passes.items()}
        if not self.config.by_rows:
            return {}
        columns = masks.column_ends_of_rows if self.config.keys.keeps_ds else masks.column_ends
        ends = {KEYS: columns, QUERIES: masks.row_ends}
        return {f"{x}ends": masks.EndsOf(self.problem, ends[x]) for x in self.passes}

    @cached_property
    def portions(self) -> Portions | PackedPortions | None:
        """The heads and keys of each launch, where it keeps dS."""
        if not self.config.keys.keeps_ds:
            return None
        if self.problem.packed:
            return PackedPortions(self.problem, self.config)
        keys, cores = self.keys, devices.of(self.problem.device).cores
        return Portions(self.problem, self.config, keys.stop - keys.start, ends_of(self.band, keys.start), cores)

    @property
    def whole(self) -> tuple[int, slice]:
        """The key heads of all batch elements, and the keys."""
        return self.problem.batch_dim * self.problem.heads_k, self.keys

    @cached_property
    def spans(self) -> list[tuple[int, slice]]:
        """The key heads of all batch elements that each launch has, and its keys. Of packed sequences the device knows the heads."""
        if not isinstance(self.portions, Portions):
            return [self.whole] * (self.portions.count if self.portions else 1)
        first = self.keys.start
        each = ((x.size("batch") * x.size("heads"), x.keys) for x in self.portions.all)
        return [(heads, slice(first + start, first + stop)) for heads, (start, stop) in each]

    @cached_property
    def room(self) -> tuple[int, int]:
        """The most key tiles that a launch shares, and the most parts that these have."""
        rooms = [self.shares(*span).room(self.config, self.problem, *span) for span in self.spans]
        return max(shared for shared, _ in rooms), max(parts for _, parts in rooms)

    def shares(self, heads: int, keys: slice) -> TileParts:
        """The division of the key tiles of a launch that has so many key heads of all batch elements, and some keys."""
        ends, cores = ends_of(self.band, keys.start), devices.of(self.problem.device).cores
        return tile_parts(self.config, self.problem, heads, keys.stop - keys.start, ends, cores)

    def numbers_of(self, heads: int, keys: slice) -> dict[str, int | float]:
        """The numbers, by name, of such a launch, from the first key of which the band's ends count."""
        problem = self.problem
        shares, cores = self.shares(heads, keys), devices.of(problem.device).cores
        (lo, hi), (scale2, cap2) = ends_of(self.band, keys.start), self.scales
        sections = grids(self.config, problem, heads, keys.stop - keys.start, cores, shares)
        found = {"band_lo": lo, "band_hi": hi, "scale": problem.softmax_scale, "scale2": scale2, "cap2": cap2}
        found |= zip(("section_k", "ctas_k", "section_q", "ctas_q"), sections, strict=True)
        # Whether earlier keys have left sums of dQ, and whether later ones follow.
        found |= {"resumes": int(keys.start > self.keys.start), "suspends": int(keys.stop < self.keys.stop)}
        found |= {"first": self.band.start, "last": self.band.stop}
        found |= {"whole": shares.whole, "parts": shares.each, "block_bits": shares.block_bits}
        found["part_heads"] = problem.heads_q // problem.heads_k // shares.by_heads
        found["ordered"] = int(problem.spec.deterministic)
        return found | self.numbers_beside

    @cached_property
    def numbers(self) -> dict[str, int | float]:
        """The numbers of a launch of all heads and keys, by name."""
        return self.numbers_of(*self.whole)

    @cached_property
    def sections(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The heads of a section and the CTAs of the pass over keys, and of that over queries."""
        return tuple((self.numbers[f"section_{x}"], self.numbers[f"ctas_{x}"]) for x in "kq")


class BackwardDraft(BackwardSpans):
    """The part of a backward's plan that puts its launches together, and the memory that they write."""

    def drafted(self) -> Launches:
        draft, problem = Draft(), self.problem
        dq, dk, dv = (
            draft.result(f"d{name}", x.dtype, *x.shape) for name, x in zip("qkv", problem.tensors, strict=False)
        )
        rows = {name: self.view(name) for name in "qkv"}
        rows["o"] = View.contiguous("o", problem.dtype, *problem.output_shapes[0])
        made = {"dq": dq, "dk": dk, "dv": dv} | self.drafted_memory(draft)
        if problem.packed:
            rows, made = ({name: of_packed(x, name) for name, x in found.items()} for found in (rows, made))
        if self.cut:
            span = self.keys.start, self.keys.stop - self.keys.start
            rows, made = (
                {name: x.narrow(1, *span) if name in OF_KEYS else x for name, x in found.items()}
                for found in (rows, made)
            )
        given = self.beside(draft) | rows | made
        for n, span in enumerate(self.spans):
            own = self.portions.of(n, given) if self.portions else given
            numbers = self.numbers if len(self.spans) == 1 else self.numbers_of(*span)
            draft.launch(self.config, own | numbers | {"portion": n})
        return draft.done()

    def beside(self, draft: Draft) -> dict[str, View | Late]:
        """The tensors that a launch reads beside q, k, v and o, by name; of packed sequences also zeros that count the tiles of the two
        passes, of each portion."""
        problem = self.problem
        sizes = {"batch": problem.batch_dim, "heads_q": problem.heads_q, "seqlen_q": problem.seqlen_q}
        found = given_views(self.config, problem.dtype, sizes | {"starts": problem.batch + 1}) | self.drafted_leaves()
        for name, x in self.of_mask.items():
            found |= x.views(name, next(prefix for prefix in self.passes if name.startswith(prefix)))
        if problem.packed:
            each = (self.portions.count, 1) if self.portions else (1,)
            counts = draft.result("counts", torch.int32, 2, *each, fill=0)
            found |= {"counts_k": counts.select(0, 0), "counts_q": counts.select(0, 1)}
        return found

    def drafted_memory(self, draft: Draft) -> dict[str, View]:
        """All that a launch writes beside dq, dk and dv, by name: the statistics of rows, what accumulating dQ takes, and gradients."""
        problem, found = self.problem, {}
        # The gradients of a sink and of a table read the statistics of rows. Those of rows between packed sequences, which nobody writes,
        # must add nothing to a sink's.
        sink = problem.spec.sink_slot is not None
        fills = {"lse2": math.inf, "delta": 0.0} if problem.packed and sink else {}
        for x in self.config.parameters[1][3:]:
            dtype, shape = facts_of(x, problem.dtype, self.sizes)
            if x.name == SUMS:
                found[x.name] = self.drafted_gradient(draft, dtype, shape)
            elif x.name in ("lse2", "delta") and (sink or self.config.score == "table"):
                found[x.name] = draft.result(x.name, dtype, *shape, fill=fills.get(x.name))
            else:
                found[x.name] = draft.scratch(x.name, dtype, *shape)
        return found

    def drafted_gradient(self, draft: Draft, dtype: torch.dtype, shape: tuple[int, ...]) -> View:
        """The memory of the gradient of what is added to scores."""
        if self.config.score != "bias":
            return draft.result(SUMS, dtype, *shape, fill=0 if self.config.score == "table" else None)
        # Zeros where kernels visit no block.
        fill = None if self.config.form == "full" else 0
        room = draft.result(SUMS, dtype, *pair_bias_of(self.problem).room(self.problem), fill=fill)
        return room.narrow(-1, 0, self.problem.seqlen_k)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of these tensors, by the words of :func:`tilewise.backends.hopper.backward.parameters.made`."""
        problem, config, blocks = self.problem, self.config, self.config.blocks(self.problem)
        shared, parts = self.room
        rows = config.statistics_rows(problem, KEY_GROUPS * shared)
        found = {"batch": problem.batch_dim, "heads_q": problem.heads_q, "sequences": problem.batch + 2}
        found |= {"statistics": rows, "words": rows * config.statistics.words, "shared_parts": parts}
        found |= {"blocks": blocks, "block_parts": KEY_GROUPS * blocks}
        found |= {"warps": self.slope_sums_of(problem.seqlen_k), "slots": LINE_SLOTS}
        if config.score == "table":
            found["distances"] = line_of(problem).count
        if config.continues:
            found |= zip(("sum_heads", "sum_tiles", "sum_parts"), self.portions.sums_shape[:3], strict=True)
        if self.portions:
            words = ("sheet_blocks",) if config.packed else ("sheet_heads", "sheet_keys", "sheet_queries")
            found |= zip(words, self.portions.sheet_shape[:-1], strict=True)
        return found

    def slope_sums_of(self, keys: int) -> int:
        """How many parts of the slopes' gradient so many keys have: each warp of each tile writes one."""
        return WARPS * KEY_GROUPS * -(-keys // self.config.keys.tile_n)


class BackwardPlan(BackwardDraft):
    """The decisions for one problem's backward."""

    def tensors(self, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor) -> dict[str, Tensor]:
        """The tensors that launches read, by name."""
        good = strides_addressable(do.shape, do.stride())
        do = do if good else do.clone(memory_format=torch.contiguous_format)
        found = self.read(inputs, out.o, out.lse, dlse, do[None] if self.problem.packed else do)
        return found | self.portions.late(found) if self.portions else found

    def slope_gradient(self, parts: Tensor) -> dict[int, Tensor]:
        """The gradient of ALiBi's slopes, (heads_q,), by their slot, of its parts (batch, heads_q, warp); fp32."""
        # Kernels get the keys that are seen: nobody writes the parts of tiles past these.
        written = self.slope_sums_of(self.keys.stop - self.keys.start)
        return {self.score_slot: parts[..., :written].sum((0, 2))}

    def line_gradient(
        self, sums: Tensor, inputs: Inputs, lse: Tensor, dlse: Tensor, delta: Tensor
    ) -> dict[int, Tensor]:
        """The gradient of the table whose line was read, by its slot, of the sums (slot, heads_q, count) that the launch has added up.

        A row's dS = P (dP - delta) add up to dlse where its P add up to 1; what a sink has of these is its own gradient. So the pairs that
        no sum has, those of the line's last bias, have what is left.
        """
        line, found, rows = line_of(self.problem), sums.sum(0), dlse.masked_fill(lse == -torch.inf, 0.0)
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
        if self.cut:  # keys that kernels did not get
            for x in (made["dk"], made["dv"]):
                x[:, : self.keys.start].zero_()
                x[:, self.keys.stop :].zero_()
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
            bias, room = pair_bias_of(problem), made[SUMS][..., : problem.seqlen_k]
            leaves = {bias.slot: bias.gradient(room, inputs.leaves[bias.slot])}
        if inputs.sink is not None and problem.packed:  # rows lie where the statistics have them
            sink = sink_gradient(inputs, lse_of(self, made["lse2"]), made["delta"])
        elif inputs.sink is not None:
            sink = sink_gradient(inputs, lse, made["delta"][..., : problem.seqlen_q])
        return Grads(*of_qkv, sink, leaves)


def of_packed(x: View | Late, name: str) -> View | Late:
    """A tensor of packed sequences as kernels take it, of one batch element."""
    return x.unsqueeze(0) if name in PACKED and isinstance(x, View) else x


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
