"""The gradients of the tensors that a score reads: a buffer for what kernels add up of each read, and what becomes of it."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.backends.base import Inputs
from tilewise.backends.triton.host.plan import Plan
from tilewise.leaf_gradients import COLUMNS, ROWS, SCATTER, STORE, TILES, Read, read_adjoint
from tilewise.problem import Problem


class LeafSums:
    """The sums of one backward.

    Attributes:
        grads: the gradients, by slot.
        buffers: what kernels write for each read: a gradient, or sums of rows or columns (batch, heads_q, length), packed without batch.
    """

    def __init__(self, plan: Plan, inputs: Inputs):
        self.plan, self.inputs = plan, inputs
        problem, self.reads = plan.problem, plan.emitted.reads
        self.grads: dict[int, Tensor] = {}
        for read in self.reads:
            if read.slot not in self.grads:
                self.grads[read.slot] = self._new_gradient(read)
        outer = (problem.heads_q,) if problem.packed else (problem.batch, problem.heads_q)
        lengths = {ROWS: problem.seqlen_q, COLUMNS: problem.seqlen_k}
        self.buffers = tuple(
            inputs.q.new_zeros((*outer, lengths[read.how]), dtype=torch.float32)
            if read.how in lengths
            else self.grads[read.slot]
            for read in self.reads
        )

    def _new_gradient(self, read: Read) -> Tensor:
        """Memory for the gradient of a leaf, of which ``read`` is the first read: in its own dtype where one kernel writes it once."""
        plan, leaf = self.plan, self.inputs.leaves[read.slot]
        several_launches = 0 < plan.sheet_heads < plan.problem.heads_k and "h" in read.loops
        # Thousands of numbers may be scattered to one address, in any order: of fp32 such a chain rounds more than eager's sums
        # (docs/decisions.md#triton-float64-scatter).
        scattered = any(other.how == SCATTER for other in self.reads if other.slot == read.slot)
        dtype = torch.float64 if scattered and plan.problem.dtype == torch.float32 else torch.float32
        if read.how in (STORE, TILES) and not several_launches:
            dtype = leaf.dtype
        new = torch.empty if read.how == TILES and _reads_every_element(plan.problem, read) else torch.zeros
        return new(leaf.shape, dtype=dtype, device=leaf.device)

    def totals(self) -> dict[int, Tensor]:
        """The leaves' gradients, by slot, once the kernels have run."""
        for read, buffer in zip(self.reads, self.buffers, strict=True):
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

    def _lines(self, how: str, buffer: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The indices of a buffer of row or column sums, and the buffer, on axes ``(b, h, i, j)``."""
        problem, device = self.plan.problem, buffer.device
        if problem.packed:
            env, sums = self._packed_lines(how, buffer.shape[-1]), buffer.unsqueeze(0)
        else:
            line = torch.arange(buffer.shape[-1], device=device)
            # Numbers are filled in where they are needed: a copy would wait for the GPU.
            env = {name: torch.full((), getattr(problem, name), device=device) for name in ("seqlen_q", "seqlen_k")}
            env["b"], sums = torch.arange(problem.batch, device=device).view(-1, 1, 1, 1), buffer
            env["i" if how == ROWS else "j"] = line.view(_line_shape(how))
        env["h"] = torch.arange(problem.heads_q, device=device).view(1, -1, 1, 1)
        env["off"] = env["seqlen_k"] - env["seqlen_q"]
        return env, sums.unsqueeze(-1) if how == ROWS else sums.unsqueeze(-2)

    def _packed_lines(self, how: str, total: int) -> dict[str, Tensor]:
        """Each packed row's sequence, its index within it, and that sequence's lengths."""
        cu_q, cu_k = self.inputs.cu_seqlens_q.long(), self.inputs.cu_seqlens_k.long()
        cu, shape = cu_q if how == ROWS else cu_k, _line_shape(how)
        line = torch.arange(total, device=cu.device)
        b = torch.searchsorted(cu[1:].contiguous(), line, right=True).clamp(max=len(cu) - 2)
        return {
            "b": b.view(shape),
            "i" if how == ROWS else "j": (line - cu[b]).view(shape),
            "seqlen_q": (cu_q[1:] - cu_q[:-1])[b].view(shape),
            "seqlen_k": (cu_k[1:] - cu_k[:-1])[b].view(shape),
        }


def _line_shape(how: str) -> tuple[int, ...]:
    """The shape on axes ``(b, h, i, j)`` of a line of rows or of columns."""
    return (1, 1, -1, 1) if how == ROWS else (1, 1, 1, -1)


def _reads_every_element(problem: Problem, read: Read) -> bool:
    """Whether a read at symbols and numbers is of every element: no axis is longer than its symbol runs."""
    lengths = {"b": problem.batch, "h": problem.heads_q, "i": problem.seqlen_q, "j": problem.seqlen_k}
    axes = zip(problem.extras[read.slot].shape, read.expr.args[1:], strict=True)
    return all(size == (1 if x.op == "number" else lengths[x.args[0]]) for size, x in axes)


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
