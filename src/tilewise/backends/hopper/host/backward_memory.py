"""The memory that the launch of a backward writes: gradients, the statistics of rows, and what accumulating dQ takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.tiles import KEY_GROUPS, LINE_SLOTS, PlanRow, left_elements
from tilewise.backends.hopper.host.portions import PackedPortions, Portions
from tilewise.backends.hopper.pair_bias import pair_bias_of
from tilewise.backends.hopper.tables import line_of
from tilewise.caching import cached_property
from tilewise.problem import Problem

INF = float("inf")
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

    def written(self, grads: tuple[Tensor, ...], lse: Tensor, holes: bool) -> tuple[Tensor, ...]:
        """All tensors that the launch writes, in the order of :func:`tilewise.backends.hopper.backward.launch.launch`'s ``made``.

        Args:
            grads: dq, dk and dv. lse, holes: as in :meth:`statistics`.
        """
        found = *grads, *self.statistics(lse, holes)
        if self.sums_shape is not None:
            found += (lse.new_empty(self.sums_shape),)
        if self.semaphores_shape is not None:
            found += (lse.new_empty(self.semaphores_shape, dtype=torch.int32),)
        if self.config.keys.keeps_ds:
            found += (grads[0].new_empty(self.portions.sheet_shape),)
        if self.config.continues:
            found += (lse.new_empty(self.portions.sums_shape),)
        if self.config.planned:
            found += (lse.new_empty(self.plan_shape, dtype=torch.int32),)
        if self.config.parted:
            found += (lse.new_empty(self.parts_shape),)
        if self.config.makes_queue:
            found += (lse.new_empty(1, dtype=torch.int32),)
        if self.config.dbias:
            return (*found, self.pair_room())
        if self.config.table:
            return (*found, lse.new_zeros(self.line_sums_shape))
        return (*found, lse.new_empty(self.slope_sums_shape)) if self.config.dslopes else found

    def again(self, written: Sequence[Tensor]) -> list[Tensor]:
        """New memory, as that which an earlier launch has written."""
        found = [torch.empty_like(x) for x in written]
        if self.config.table:
            found[-1].zero_()
        if self.config.dbias:
            found[-1] = self.pair_room()
        return found

    def statistics(self, lse: Tensor, holes: bool) -> tuple[Tensor, Tensor]:
        """Memory for lse2 and delta, fp32, of lse (batch, heads_q, row).

        Args:
            holes: packed, there are rows between the sequences that nobody writes; where a sink's gradient reads them too, they must
                add nothing to it.
        """
        shape = *lse.shape[:2], self.config.statistics_rows(self.problem, KEY_GROUPS * self.shared)
        kinds = ((*shape[:2], shape[2] * self.config.statistics.words), INF), (shape, 0.0)
        return tuple(lse.new_full(size, n) if holes else lse.new_empty(size) for size, n in kinds)

    @cached_property
    def sums_shape(self) -> tuple[int, ...] | None:
        """The shape of the sums to which the pass over key tiles adds dQ, if it does."""
        if not self.config.keys.sums_dq:
            return None
        problem, config = self.problem, self.config
        return problem.batch_dim, problem.heads_q, config.blocks(problem), KEY_GROUPS, config.keys.part_elements

    @property
    def plan_shape(self) -> tuple[int, int]:
        """The shape of the plan of packed sequences."""
        return len(PlanRow), self.problem.batch + 2

    @property
    def parts_shape(self) -> tuple[int, int, int]:
        """The shape of dK and dV of all parts of shared tiles."""
        return self.parts, KEY_GROUPS, left_elements(self.config.keys)

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

    def pair_room(self) -> Tensor:
        """Memory for the gradient of a bias by pair, with zeros where kernels visit no block."""
        room = pair_bias_of(self.problem).room(self.problem)
        return room if self.config.form == "full" else room.zero_()

    @cached_property
    def semaphores_shape(self) -> tuple[int, ...] | None:
        """The shape of the semaphores of these additions, where the first one is a store."""
        if not self.config.stores_first:
            return None
        # Each counts the key tiles that have been added to one part of a block of dQ.
        return self.problem.batch_dim, self.problem.heads_q, KEY_GROUPS * self.config.blocks(self.problem)
