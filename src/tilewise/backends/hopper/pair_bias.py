"""A bias for each pair, ``s + bias[b, h, i, j]``: the scores of which the copy engine brings tiles. Nothing here imports the DSL."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.backends.base import PerProblem
from tilewise.backends.hopper.config import DTYPES, MULTIPLE, slopes_of, strides_addressable
from tilewise.backends.hopper.tables import added, line_of
from tilewise.problem import Problem, TensorFacts

ALIGNED = 16  # bytes: the copy engine reads from multiples of them
BATCH_HEAD = ("b", "h")


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy with the same strides that begins where the copy engine reads from."""
    if tensor.data_ptr() % ALIGNED == 0:
        return tensor
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return found.copy_(tensor)


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
        return aligned(tensor)

    def apart(self, p: Problem) -> bool:
        """Whether every pair of every query head has an element of its own, so that its gradient is that of one score."""
        return all(name in self.index or size == 1 for name, size in (("b", p.batch), ("h", p.heads_q)))

    def room(self, p: Problem) -> tuple[int, ...]:
        """The shape of memory for the gradient of the biases that a call reads, (batch or 1, heads_q or 1, query, key), with rows as long
        as the copy engine wants them."""
        heads = (size if name in self.index else 1 for name, size in (("b", p.batch), ("h", p.heads_q)))
        return *heads, p.seqlen_q, -(-p.seqlen_k // MULTIPLE) * MULTIPLE

    def gradient(self, room: Tensor, tensor: Tensor) -> Tensor:
        """The gradient of the tensor, in its shape and contiguous, of those in a :meth:`room`."""
        for axis, name in reversed(list(enumerate(BATCH_HEAD))):
            room = room if name in self.index else room.select(axis, 0)
        for axis, n in enumerate(self.index):
            room = room if isinstance(n, str) else room.unsqueeze(axis)
        if room.shape == tensor.shape:
            return room.contiguous()  # a copy where rows had to lie further apart
        grad = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        part = grad
        for axis, n in enumerate(self.index):
            part = part if isinstance(n, str) else part.narrow(axis, n, 1)
        part[tuple(slice(size) for size in room.shape)] = room
        return grad


def pair_bias_of(p: Problem) -> PairBias | None:
    """The bias by pair of a score, where kernels take it; None for any other.

    They take one tensor in q's dtype, of DTYPES, that is added to s, whose last two axes are queries and keys, without dropout.
    """
    return _BIASES.of(p)


def _pair_bias_of(p: Problem) -> PairBias | None:
    lookup, spec = added(p.spec.score), p.spec
    if lookup is None or p.packed or p.paged or spec.piece or spec.dropout_p or p.softmax_scale <= 0:
        return None
    if str(p.dtype) not in DTYPES:
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


def score_of(p: Problem) -> str:
    """The word of SCORES for a score that adds a bias which kernels read; empty for any other."""
    if slopes_of(p) is not None and not p.spec.dropout_p:
        return "alibi"
    return "table" if line_of(p) is not None else "bias" if pair_bias_of(p) is not None else ""
