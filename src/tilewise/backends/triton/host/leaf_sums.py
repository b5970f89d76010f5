"""The gradients of the tensors that a score reads: a buffer for what kernels add up of each read, and what becomes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise import device as devices
from tilewise import expr
from tilewise.backends.base import Inputs
from tilewise.backends.triton.config import strip_tiles
from tilewise.backends.triton.host.call import tile_slots
from tilewise.backends.triton.host.plan import Plan
from tilewise.backends.triton.sheet import sheet_strip_tiles
from tilewise.backends.triton.tiles import Tiles
from tilewise.leaf_gradients import (
    COLUMNS,
    DIAGONALS,
    ROWS,
    SCATTER,
    STORE,
    TILES,
    Read,
    add_at,
    read_adjoint,
    reads_every_element,
)
from tilewise.problem import Problem

LEAST_SLOTS = 8  # tiles of a part of a strip
BUSY = 4  # programs for each multiprocessor


@dataclass(frozen=True)
class Strips:
    """The strips of square tiles that hold the distances of a read (:mod:`kernels.diagonals`).

    Attributes:
        first: the tiles by which a strip's queries are ahead of its keys, of the first strip; the others follow.
        number: of strips. parts: programs of each. slots: query tiles; of a part, ``slots_of_part``.
    """

    tiles: Tiles
    first: int
    number: int
    parts: int
    slots: int
    slots_of_part: int

    @classmethod
    def of(cls, plan: Plan, read: Read) -> Strips:
        problem, config = plan.problem, plan.config
        tiles = sheet_strip_tiles(problem, config) if plan.sheet else strip_tiles(problem, config.dq)
        start, stop = read.distances
        first, side = start // tiles.tile_m, tiles.tile_m
        number = (stop - 1) // side + 2 - first
        slots = tile_slots(problem, problem.seqlen_q, side)
        # Deterministic results of a sequence do not depend on its batch-mates.
        batch = 1 if problem.packed or problem.spec.deterministic else problem.batch
        programs = max(number * problem.heads_q * batch, 1)
        parts = -(-BUSY * devices.of(problem.device).cores // programs)
        of_part = max(-(-slots // parts), LEAST_SLOTS)
        return cls(tiles, first, number, max(-(-slots // of_part), 1), slots, of_part)

    def line(self, sums: Tensor, read: Read) -> Tensor:
        """The sums of the distances of ``read``, in order, from those of the strips' tiles, ``(.., strips, 2 T)``."""
        side = self.tiles.tile_m
        below, above = sums.split(side, -1)  # a distance between two strips' middles lies in both
        line = (pad(below, (0, 0, 0, 1)) + pad(above, (0, 0, 1, 0))).flatten(-2)
        start = read.distances[0] - (self.first - 1) * side
        return line[..., start : start + read.distances[1] - read.distances[0]]


class LeafSums:
    """The sums of one backward.

    Attributes:
        grads: the gradients, by slot.
        buffers: what kernels write for each read: a gradient; sums of rows or columns (batch, heads_q, length), packed without batch;
            sums of strips' distances (batch, heads_q, parts, strips, 2 T), the same; or partial sums of pairs, or of a gradient
            (splits, :func:`size_of_sum`).
    """

    def __init__(self, plan: Plan, inputs: Inputs):
        self.plan, self.inputs = plan, inputs
        self.reads = plan.emitted.reads
        self.grads: dict[int, Tensor] = {}
        for read in self.reads:
            if read.slot not in self.grads:
                self.grads[read.slot] = self._new_gradient(read)
        self.buffers = tuple(self._buffer(read) for read in self.reads)

    def _buffer(self, read: Read) -> Tensor:
        problem, q = self.plan.problem, self.inputs.q
        outer = (problem.heads_q,) if problem.packed else (problem.batch, problem.heads_q)
        if read.how in (ROWS, COLUMNS):
            length = problem.seqlen_q if read.how == ROWS else problem.seqlen_k
            return q.new_zeros((*outer, length), dtype=torch.float32)
        if read.how == DIAGONALS:
            strips = Strips.of(self.plan, read)
            shape = (*outer, strips.parts, strips.number, 2 * strips.tiles.tile_m)
            return q.new_empty(shape, dtype=torch.float32)
        if _has_partial_sums(self.plan, read):
            return q.new_empty((self.plan.splits[1], size_of_sum(problem, read)), dtype=torch.float32)
        return self.grads[read.slot]

    def _new_gradient(self, read: Read) -> Tensor:
        """Memory for the gradient of a leaf, of which ``read`` is the first read: in its own dtype where one kernel writes it once."""
        plan, leaf = self.plan, self.inputs.leaves[read.slot]
        # Thousands of numbers may be scattered to one address, in any order: of fp32 such a chain rounds more than eager's sums
        # (docs/decisions.md#triton-float64-scatter).
        parts = [other for other in self.reads if other.slot == read.slot]
        scattered = any(part.how == SCATTER or part.pairs or _of_distances(part) for part in parts)
        dtype = torch.float64 if scattered and plan.problem.dtype == torch.float32 else torch.float32
        adds = plan.sheet and plan.sheet[-1].first_batch  # kernels add to it, part after part of the batch
        if read.how in (STORE, TILES) and not read.pairs and not adds:
            dtype = leaf.dtype
        new = (
            torch.empty
            if read.how == TILES and not read.pairs and reads_every_element(plan.problem, read)
            else torch.zeros
        )
        return new(leaf.shape, dtype=dtype, device=leaf.device)

    def totals(self) -> dict[int, Tensor]:
        """The leaves' gradients, by slot, once the kernels have run."""
        for read, buffer in zip(self.reads, self.buffers, strict=True):
            if _of_distances(read):
                self._add_distances(read, buffer)
                continue
            if _has_partial_sums(self.plan, read):
                self._add_partial_sums(read, buffer)
            if read.how not in (ROWS, COLUMNS):
                continue
            grad, axes = self.grads[read.slot], kept_axes(self.plan.problem, read, buffer)
            if axes is None:
                env, sums = self._lines(read.how, buffer)
                read_adjoint(grad, read.expr, env, self.inputs.leaves, sums.to(grad.dtype))
            else:
                rest = [axis for axis in range(buffer.ndim) if axis not in axes]
                order = [sorted(axes).index(axis) for axis in axes]
                grad += (buffer.sum(rest) if rest else buffer).permute(order)
        return {slot: grad.to(self.inputs.leaves[slot].dtype) for slot, grad in self.grads.items()}

    def _add_partial_sums(self, read: Read, buffer: Tensor) -> None:
        """Sums partial sums up to a leaf's gradient, or to sums of pairs, from which the gradient is made."""
        shape = _shape_of_sum(self.plan.problem, read)
        total = (buffer.sum(0) if len(buffer) > 1 else buffer[0])[: math.prod(shape)].view(shape)
        if read.pairs:
            env = _indices(
                self.plan.problem, total.device, **{x: range(n) for x, n in zip("bhij", total.shape, strict=True)}
            )
            grad = self.grads[read.slot]
            read_adjoint(grad, read.expr, env, self.inputs.leaves, total.to(grad.dtype))
        else:
            self.grads[read.slot] = total

    def _add_distances(self, read: Read, buffer: Tensor) -> None:
        """Adds to a leaf's gradient the sums of a read by distance: of each distance near the diagonal, or of all beyond it."""
        grad, problem = self.grads[read.slot], self.plan.problem
        buffer = buffer.unsqueeze(0) if problem.packed else buffer
        start, stop = read.distances
        if read.how == DIAGONALS:
            sums = Strips.of(self.plan, read).line(buffer.to(grad.dtype).sum(2), read)
            first, last = start, stop
        else:
            sums = buffer.to(grad.dtype).sum(-1, keepdim=True)
            first, last = (stop - 1, stop) if start is None else (start, start + 1)
        sums = sums.unsqueeze(-1)  # on axes (b, h, i, j)
        if expr.lookups(*read.expr.args[1:]):
            env = _distance_env(problem, first, last, grad.device)
            read_adjoint(grad, read.expr, env, self.inputs.leaves, sums)
        else:  # the index is known before a call: nothing is copied from the host but at the first
            index = self.plan.indices.of(
                (read.expr, first),
                lambda: devices.lasting(lambda: _index(problem, read.expr, first, last, grad)),
            )
            add_at(grad, read.expr, devices.given_to_graphs(index), sums)

    def _lines(self, how: str, buffer: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The indices of a buffer of row or column sums, and the buffer, on axes ``(b, h, i, j)``."""
        problem, sums = self.plan.problem, buffer.unsqueeze(0) if self.plan.problem.packed else buffer
        axes = {"h": range(problem.heads_q)}
        if not problem.packed:
            axes |= {"b": range(problem.batch), "i" if how == ROWS else "j": range(buffer.shape[-1])}
        env = _indices(problem, buffer.device, **axes)
        if problem.packed:
            env |= _packed_lines(self.inputs, how, buffer.shape[-1])
        return env, sums.unsqueeze(-1) if how == ROWS else sums.unsqueeze(-2)


def _packed_lines(inputs: Inputs, how: str, total: int) -> dict[str, Tensor]:
    """Each packed row's sequence, its index within it, and that sequence's lengths."""
    cu_q, cu_k = inputs.cu_seqlens_q.long(), inputs.cu_seqlens_k.long()
    cu, shape = (cu_q, (1, 1, -1, 1)) if how == ROWS else (cu_k, (1, 1, 1, -1))
    line = torch.arange(total, device=cu.device)
    b = torch.searchsorted(cu[1:].contiguous(), line, right=True).clamp(max=len(cu) - 2)
    seqlen_q, seqlen_k = (x.diff()[b].view(shape) for x in (cu_q, cu_k))
    at = {"b": b.view(shape), "i" if how == ROWS else "j": (line - cu[b]).view(shape)}
    return at | {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "off": seqlen_k - seqlen_q}


def _has_partial_sums(plan: Plan, read: Read) -> bool:
    """Whether a leaf's gradient is made of what kernels write for each pair, or for each split."""
    return read.pairs or (read.how == TILES and plan.splits[1] > 1)


def _shape_of_sum(problem: Problem, read: Read) -> tuple[int, ...]:
    """The shape of what is summed in tiles: the leaf's; where its gradient is made of pairs, ``(1, heads_q or 1, seqlen_q, seqlen_k)``."""
    if not read.pairs:
        return problem.extras[read.slot].shape
    heads = problem.heads_q if "h" in expr.depends_on(*read.expr.args[1:]) else 1
    return 1, heads, problem.seqlen_q, problem.seqlen_k


def size_of_sum(problem: Problem, read: Read) -> int:
    """The elements from one partial sum of a read to the next: a multiple of 16, so that kernels may store several at once."""
    return -(-math.prod(_shape_of_sum(problem, read)) // 16) * 16


def _of_distances(read: Read) -> bool:
    """Whether a read's sums are of distances: near the diagonal, or, by rows, beyond it."""
    return read.distances != (None, None)


def _indices(problem: Problem, device: torch.device, **axes: range) -> dict[str, Tensor]:
    """The lengths, and the indices along some of the axes ``(b, h, i, j)``. They are made where they are needed: a copy would wait for
    the GPU."""
    env = {name: torch.full((), getattr(problem, name), device=device) for name in ("seqlen_q", "seqlen_k")}
    for name, line in axes.items():
        shape = [-1 if name == axis else 1 for axis in "bhij"]
        env[name] = torch.arange(line.start, line.stop, device=device).view(shape)
    return env | {"off": env["seqlen_k"] - env["seqlen_q"]}


def _distance_env(problem: Problem, first: int, last: int, device: torch.device) -> dict[str, Tensor]:
    """The indices, on axes ``(b, h, i, j)``, of a pair of each distance in ``[first, last)``: of key 0, without an offset if packed."""
    axes = {"b": range(problem.batch_dim), "h": range(problem.heads_q), "i": range(first, last), "j": range(1)}
    env = _indices(problem, device, **axes)
    return env | {"off": torch.zeros_like(env["off"])} if problem.packed else env


def _index(problem: Problem, e: expr.Expr, first: int, last: int, grad: Tensor) -> list[Tensor]:
    """The indices of a read by distance that reads no tensor for them, on ``grad``'s device."""
    env = _distance_env(problem, first, last, torch.device("cpu"))
    return [x.to(grad.device) for x in expr.clamp_index(grad, expr.evaluate(e.args[1:], env, (), torch.float32))]


def kept_axes(problem: Problem, read: Read, buffer: Tensor) -> list[int] | None:
    """The axes of a buffer of row or column sums that are the leaf's axes, in the leaf's order; None where its axes are not all such.

    With them the leaf's gradient is one sum over the others. The buffer is (batch, heads, line), packed (heads, line).
    """
    line = "i" if read.how == ROWS else "j"
    names = ("h",) if problem.packed else ("b", "h", line)
    axes = []
    for size, index in zip(problem.extras[read.slot].shape, read.expr.args[1:], strict=True):
        name = index.args[0] if index.op == "symbol" else None
        if name not in names or names.index(name) in axes or buffer.shape[names.index(name)] != size:
            return None
        axes.append(names.index(name))
    return axes
