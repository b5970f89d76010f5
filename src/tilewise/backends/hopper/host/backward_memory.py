"""The memory that the launch of a backward writes: gradients, the statistics of rows, and what accumulating dQ takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.tiles import KEY_GROUPS, LINE_SLOTS
from tilewise.backends.hopper.host.draft import Draft, View, facts_of
from tilewise.backends.hopper.host.portions import PackedPortions, Portions
from tilewise.backends.hopper.pair_bias import pair_bias_of
from tilewise.backends.hopper.tables import line_of
from tilewise.caching import cached_property
from tilewise.problem import Problem

SUMS = "keys_dbias"  # of the gradient of what is added to scores
WARPS = 4  # of a warpgroup


@dataclass(frozen=True)
class BackwardMemory:
    """The sizes of what the kernels of one problem's backward write beside dq, dk and dv.

    Attributes:
        portions: where dS is kept. shared, parts: how many key tiles CTAs share at most, and how many parts these have in all.
    """

    problem: Problem
    config: Backward
    portions: Portions | PackedPortions | None = None
    shared: int = 0
    parts: int = 0

    def drafted(self, draft: Draft, holes: bool) -> dict[str, View]:
        """All that a launch writes beside dq, dk and dv, by name.

        Args:
            holes: packed, there are rows between the sequences that nobody writes; where a sink's gradient reads them too, they must add
                nothing to it.
        """
        problem, found = self.problem, {}
        # The gradients of a sink and of a table read the statistics of rows.
        read = problem.spec.sink_slot is not None or self.config.score == "table"
        fills = {"lse2": math.inf, "delta": 0.0} if holes else {}
        for x in self.config.parameters[1][3:]:
            dtype, shape = facts_of(x, problem.dtype, self.sizes)
            if x.name == SUMS:
                found[x.name] = self.drafted_gradient(draft, dtype, shape)
            elif read and x.name in ("lse2", "delta"):
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
        rows = config.statistics_rows(problem, KEY_GROUPS * self.shared)
        found = {"batch": problem.batch_dim, "heads_q": problem.heads_q, "sequences": problem.batch + 2}
        found |= {"statistics": rows, "words": rows * config.statistics.words, "shared_parts": self.parts}
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
