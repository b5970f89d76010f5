"""The gradient of a bias that the batch shares: memory for copies of its sums, and what becomes of them (:mod:`kernels.shared_bias`)."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.backends.triton.host.plan import Plan
from tilewise.backends.triton.shared_bias import shared_tiles


class SharedBiasSums:
    """The sums of one backward whose bias is the same for all batch elements; in place of :class:`leaf_sums.LeafSums`.

    Attributes:
        copies: of the sums of dS, all zero at first, which one kernel adds to: (copies, heads, query tiles, key tiles, tile_n / 8,
            tile_m / 16, 8, 4, 2, 2) fp32. A tile lies as a program's threads hold it (:func:`kernels.shared_bias.by_threads`).
    """

    def __init__(self, plan: Plan, inputs: Inputs):
        self.plan, self.read = plan, plan.emitted.reads[0]
        self.leaf = inputs.leaves[self.read.slot]
        problem, tiles = plan.problem, shared_tiles(plan.problem, plan.config)
        counts = -(-problem.seqlen_q // tiles.tile_m), -(-problem.seqlen_k // tiles.tile_n)
        tile = tiles.tile_n // 8, tiles.tile_m // 16, 8, 4, 2, 2
        shape = (plan.shared.copies, problem.heads_q, *counts, *tile)
        self.copies = torch.zeros(shape, dtype=torch.float32, device=self.leaf.device)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """What the kernel writes."""
        return (self.copies,)

    def totals(self) -> dict[int, Tensor]:
        """The bias' gradient, by its slot, once the kernel has run."""
        problem, leaf, index = self.plan.problem, self.leaf, self.read.expr.args[1:]
        lengths = {"h": problem.heads_q, "i": problem.seqlen_q, "j": problem.seqlen_k}
        sums = sum_of_copies(self.copies, leaf.dtype)[:, : lengths["i"], : lengths["j"]]
        if leaf.numel() == sums.numel():
            return {self.read.slot: sums.reshape(leaf.shape)}
        grad = torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        part = grad[tuple(x.args[0] if x.op == "number" else slice(lengths[x.args[0]]) for x in index)]
        part.copy_(sums.view(part.shape))
        return {self.read.slot: grad}


def sum_of_copies(copies: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of copies, laid out as :class:`SharedBiasSums` has them, as (heads, queries, keys) of whole tiles, rounded to a dtype."""
    total = copies.sum(0) if len(copies) > 1 else copies[0]
    ordered = total.permute(0, 1, 4, 7, 5, 2, 3, 6, 8)  # query: tile, 16 w + 8 k + l; key: tile, 8 c + 2 q + e
    # One pass over the sums: rounded first, they would be moved in a second one.
    pairs = torch.empty(ordered.shape, dtype=dtype, device=copies.device).copy_(ordered)
    return pairs.flatten(5).flatten(1, 4)
