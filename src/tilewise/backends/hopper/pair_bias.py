"""A bias for each pair, ``s + bias[b, h, i, j]``: the scores of which the copy engine brings tiles. Nothing here imports the DSL."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.backends.base import PerProblem
from tilewise.backends.hopper.config import strides_addressable
from tilewise.backends.hopper.tables import added
from tilewise.problem import Problem, TensorFacts

ALIGNED = 16  # bytes: the copy engine reads from multiples of them
BATCH_HEAD = ("b", "h")


@dataclass(frozen=True)
class PairBias:
    """The bias of a score by pair.

    Attributes:
        slot: its tensor's place among the extras.
        index: of the axes before those of queries and keys, "b", "h" or a number.
    """

    slot: int
    index: tuple[str | int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """The tensor as the copy engine takes it: (batch or 1, heads_q or 1, query, key), a view, or a copy with the same strides."""
        for axis, n in reversed(list(enumerate(self.index))):
            tensor = tensor if isinstance(n, str) else tensor.select(axis, n)
        for axis, name in enumerate(BATCH_HEAD):
            tensor = tensor if name in self.index else tensor.unsqueeze(axis)
            tensor = tensor if tensor.stride(axis) else tensor.narrow(axis, 0, 1)  # expanded: all share one
        if tensor.data_ptr() % ALIGNED:
            tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
                tensor
            )
        return tensor


def pair_bias_of(p: Problem) -> PairBias | None:
    """The bias by pair of a score, where a forward kernel takes it; None for any other.

    They take one tensor in q's dtype that is added to s, whose last two axes are queries and keys, without dropout; a call that wants a
    gradient is left to a backend that has it of both passes.
    """
    return _BIASES.of(p)


def _pair_bias_of(p: Problem) -> PairBias | None:
    lookup, spec = added(p.spec.score), p.spec
    if lookup is None or p.packed or p.paged or spec.piece or spec.dropout_p or spec.needs_grad or p.softmax_scale <= 0:
        return None
    slot, index = lookup.args[0][1], [x.args[0] if x.op in ("symbol", "number") else None for x in lookup.args[1:]]
    *leading, rows, columns = index if len(index) >= 2 else (None, None)
    names = [n for n in leading if isinstance(n, str)]
    if None in leading or (rows, columns) != ("i", "j") or names not in ([], ["b"], ["h"], ["b", "h"]):
        return None
    found = PairBias(slot, tuple(leading))
    return found if _fits(p, p.extras[slot], index) else None


def _fits(p: Problem, tensor: TensorFacts, index: list[str | int]) -> bool:
    """Whether no index is outside the tensor, where an expression's is clamped, and the copy engine can address it."""
    sizes = {"b": p.batch, "h": p.heads_q, "i": p.seqlen_q, "j": p.seqlen_k}
    inside = all(
        0 <= n < size if isinstance(n, int) else sizes[n] <= size for n, size in zip(index, tensor.shape, strict=True)
    )
    shape = [
        size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride, strict=True)
    ]  # without what is expanded
    return inside and tensor.dtype == p.dtype and strides_addressable((*shape[:-1], tensor.shape[-1]), tensor.stride)


_BIASES = PerProblem(_pair_bias_of)
