"""The memory that the launch of a backward writes: gradients, the statistics of rows, and what accumulating dQ takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.tiles import KEY_GROUPS, LINE_SLOTS, PlanRow, left_elements
from tilewise.backends.hopper.host.draft import Draft, View
from tilewise.backends.hopper.host.portions import PackedPortions, Portions
from tilewise.backends.hopper.pair_bias import pair_bias_of
from tilewise.backends.hopper.tables import line_of
from tilewise.caching import cached_property
from tilewise.problem import Problem

SUMS = "bias_sums"  # of the gradient of what is added to scores
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
        """All that a launch writes beside dq, dk and dv, in its order (:func:`tilewise.backends.hopper.backward.launch.launch`, ``made``).

        Args:
            holes: packed, there are rows between the sequences that nobody writes; where a sink's gradient reads them too, they must add
                nothing to it.
        """
        problem, config, fp32, int32 = self.problem, self.config, torch.float32, torch.int32
        found = self.statistics(draft, holes)
        if self.sums_shape is not None:
            found["sums"] = draft.scratch("sums", fp32, *self.sums_shape)
        if self.semaphores_shape is not None:
            found["semaphores"] = draft.scratch("semaphores", int32, *self.semaphores_shape)
        if config.keys.keeps_ds:
            found["sheet"] = draft.scratch("sheet", problem.dtype, *self.portions.sheet_shape)
        if config.continues:
            found["dq_sums"] = draft.scratch("dq_sums", fp32, *self.portions.sums_shape)
        if config.planned:
            found["plan"] = draft.scratch("plan", int32, len(PlanRow), problem.batch + 2)
        if config.parted:
            shape = self.parts, KEY_GROUPS, left_elements(config.keys)  # dK and dV of all parts of shared tiles
            found["parts"] = draft.scratch("parts", fp32, *shape)
        if config.makes_queue:
            found["queue"] = draft.scratch("queue", int32, 1)
        if config.dbias:
            shape = pair_bias_of(problem).room(problem)
            # Zeros where kernels visit no block.
            room = draft.result(SUMS, problem.dtype, *shape, fill=None if config.form == "full" else 0)
            found[SUMS] = room.narrow(-1, 0, problem.seqlen_k)
        elif config.table:
            found[SUMS] = draft.result(SUMS, fp32, *self.line_sums_shape, fill=0)
        elif config.dslopes:
            found[SUMS] = draft.result(SUMS, fp32, *self.slope_sums_shape)
        return found

    def statistics(self, draft: Draft, holes: bool) -> dict[str, View]:
        """lse2 and delta, fp32 (batch, heads_q, row)."""
        problem, make = self.problem, draft.scratch
        if problem.spec.sink_slot is not None or self.config.table:  # whose gradient reads them
            make = draft.result
        rows = self.config.statistics_rows(problem, KEY_GROUPS * self.shared)
        found = {}
        for name, size, fill in (("lse2", rows * self.config.statistics.words, math.inf), ("delta", rows, 0.0)):
            shape = problem.batch_dim, problem.heads_q, size
            found[name] = make(name, torch.float32, *shape, **({"fill": fill} if holes else {}))
        return found

    @cached_property
    def sums_shape(self) -> tuple[int, ...] | None:
        """The shape of the sums to which the pass over key tiles adds dQ, if it does."""
        if not self.config.keys.sums_dq:
            return None
        problem, config = self.problem, self.config
        return problem.batch_dim, problem.heads_q, config.blocks(problem), KEY_GROUPS, config.keys.part_elements

    @cached_property
    def slope_sums_shape(self) -> tuple[int, ...]:
        """The shape of the parts of the slopes' gradient."""
        return self.problem.batch, self.problem.heads_q, self.slope_sums_of(self.problem.seqlen_k)

    def slope_sums_of(self, keys: int) -> int:
        """How many parts of the slopes' gradient so many keys have: each warp of each tile writes one."""
        return WARPS * KEY_GROUPS * -(-keys // self.config.keys.tile_n)

    @cached_property
    def line_sums_shape(self) -> tuple[int, ...]:
        """The shape of the sums to which the pass over key tiles adds the gradients of a line's biases."""
        return LINE_SLOTS, self.problem.heads_q, line_of(self.problem).count

    @cached_property
    def semaphores_shape(self) -> tuple[int, ...] | None:
        """The shape of the semaphores of these additions, where the first one is a store."""
        if not self.config.stores_first:
            return None
        # Each counts the key tiles that have been added to one part of a block of dQ.
        return self.problem.batch_dim, self.problem.heads_q, KEY_GROUPS * self.config.blocks(self.problem)
