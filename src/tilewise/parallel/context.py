"""The object by which users name a group of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise import autograd, derivatives, dispatch
from tilewise.masks import Mask
from tilewise.parallel import agreement, calls, cost, operators, plan
from tilewise.parallel.agreement import Turn
from tilewise.parallel.exchange import Exchange, ordered_sum
from tilewise.parallel.layout import Layout, chunks, contiguous, zigzag
from tilewise.parallel.symmetric import group_of
from tilewise.spec import Options, assemble
from tilewise.untraced import untraced

LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "zigzag": zigzag,
    "contiguous": contiguous,
    "chunks": chunks,
}


def context_parallel(
    group: dist.ProcessGroup | dist.device_mesh.DeviceMesh | Exchange | None = None,
    *,
    layout: str | Layout = "zigzag",
    scheme: str = "auto",
    sum_leaf_gradients: bool = True,
) -> ContextParallel:
    """Make a group of ranks that share a sequence, for ``parallel=`` of :func:`tilewise.attention`.

    Args:
        group: a process group, a device mesh (``mesh["cp"]``), or ``None`` for all ranks. In a mesh of two dimensions the ranks of a
            row exchange heads, and rows gather keys. GPUs of one machine that reach each other's memory move rows
            by copy engines, others by NCCL (``tilewise.parallel.exchange.Group(group)`` always uses NCCL).
        layout: who holds which positions of a sequence: ``"zigzag"`` (balanced for causal masks), ``"contiguous"`` (for masks that
            treat all queries alike), ``"chunks"`` (the same by ``torch.chunk``, like DTensors), or a
            :class:`tilewise.parallel.Layout`, such as ``tilewise.parallel.balanced(mask, ...)``.
        scheme: how ranks share the work: ``"gather"`` (each rank computes its own rows against the keys of all), ``"heads"`` (each
            computes all rows of some heads; the key heads must be a multiple of the ranks), ``"heads+gather"``
            (neighbouring ranks exchange heads, neighbourhoods gather keys), or ``"auto"``, the cheapest by
            :mod:`tilewise.parallel.cost` that supports the call and fits in memory.
        sum_leaf_gradients: sum the gradients of sinks and of tensors that a score reads over the ranks, as on one device. Pass
            ``False`` with DDP or FSDP over the same ranks, which sum parameters' gradients themselves.

    Raises:
        ValueError: there is no process group, ``group`` is none, the mesh has more than two dimensions, or the layout or scheme is
            unknown.
    """
    neighbours = 0
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim > 2 or (
            group.ndim == 2 and group.mesh.flatten().tolist() != sorted(group.mesh.flatten().tolist())
        ):
            raise ValueError(
                f"context_parallel takes a mesh of one dimension, or of two with its ranks in order, got {group}; name one: mesh['cp']"
            )
        neighbours = group.size(1) if group.ndim == 2 else 0
        group = (group._flatten() if group.ndim == 2 else group).get_group()
    if not isinstance(layout, Layout) and layout not in LAYOUTS:
        raise ValueError(f"layout must be {', '.join(LAYOUTS)} or a Layout, got {layout!r}")
    if scheme not in plan.SCHEMES:
        raise ValueError(
            f"scheme must be {', '.join(plan.SCHEMES)}, got {scheme!r}; Ulysses is heads, and instead of a ring there is gather"
        )
    exchange = group_of(group) if group is None or isinstance(group, dist.ProcessGroup) else group
    if not hasattr(exchange, "received"):  # of an Exchange
        raise ValueError(
            f"group must be a process group, a device mesh or None for all ranks, got {group!r}; a mesh's dimension is mesh['cp']"
        )
    if isinstance(layout, Layout) and layout.ranks != exchange.size:
        raise ValueError(f"the layout is for {layout.ranks} ranks, the group has {exchange.size}")
    return ContextParallel(exchange, layout, scheme, sum_leaf_gradients, neighbours)


_NOT_SAVED = (
    "a group of ranks belongs to its processes; save state_dict(), and call context_parallel where it is loaded"
)


def _length(x: Tensor, dim: int) -> int:
    """Return the rows of a tensor's sequence; ValueError if it has no such dimension."""
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim={dim} is to be the sequence, but the tensor is {tuple(x.shape)}; name it: dim=0, say")
    return x.shape[dim]


class ContextParallel:
    """A group of ranks that share a sequence; made by :func:`context_parallel`.

    Its index maps are differentiable for a loss that is the sum of all ranks' losses. If all ranks hold the same whole tensor, each gets
    the gradient that came through its copy. These add up to the whole gradient, like those of parameters under DDP and FSDP.
    """

    def __init__(
        self, exchange: Exchange, layout: str | Layout, scheme: str, sum_leaf_gradients: bool, neighbours: int = 0
    ):
        self.exchange, self.layout, self.scheme, self.neighbours = exchange, layout, scheme, neighbours
        self._parts: dict[int, tuple[Exchange, Exchange]] = {}
        self.sum_leaf_gradients = sum_leaf_gradients
        self.most_groups = cost.MOST_GROUPS
        self.memory = 0  # of the rank with the least, in bytes, once a call has told it
        self.plans = calls.Plans()
        self.turns = (Turn(exchange, number) for number in itertools.count(1))  # one for each call outside of graphs
        self.name = operators.named(self)

    def __deepcopy__(self, memo: dict) -> ContextParallel:
        return self  # a copied module belongs to the same ranks

    def __getstate__(self) -> object:
        raise TypeError(_NOT_SAVED)

    @property
    def rank(self) -> int:
        return self.exchange.rank

    @property
    def size(self) -> int:
        return self.exchange.size

    @property
    def received(self) -> int:
        """Bytes that this rank has received from others so far."""
        return self.exchange.received + sum(part.received for parts in self._parts.values() for part in parts)

    def split(self, neighbours: int) -> tuple[Exchange, Exchange]:
        """Return the rank's groups: of so many neighbours, and of the ranks with its place among theirs. They are made once."""
        if neighbours not in self._parts:
            self._parts[neighbours] = self.exchange.split(neighbours)
        return self._parts[neighbours]

    def layout_of(self, seqlen: int) -> Layout:
        """Return the layout of a sequence of this length.

        Raises:
            ValueError: a layout that was made for another length.
        """
        if not isinstance(self.layout, Layout):
            return LAYOUTS[self.layout](seqlen, self.size)
        if self.layout.seqlen != seqlen:
            raise ValueError(f"the layout is for sequences of {self.layout.seqlen}, this one has {seqlen}")
        return self.layout

    def prepare(self, mask: Mask) -> Mask:
        """Promise that the mask's tensors keep their values, so that a CUDA graph may capture calls with it, by any scheme.

        Make each call once before the capture, on every rank. A replay reads q, k and v anew, and the keys of that first call travel. A
        capture refuses the mask if its tensors were written since then; a later write is not noticed.

        Raises:
            ValueError: the mask was prepared for one device, or has tensors of inference mode, which do not tell when they change.
        """
        self.plans.prepare(mask)
        return mask

    def positions(self, seqlen: int, device: torch.device | str | None = None) -> Tensor:
        """Return the global position (int64) of each of this rank's rows, for rotary embeddings for example."""
        return self.layout_of(seqlen).positions(self.rank, device)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's rows, along ``dim``, of a tensor that every rank holds whole."""
        return self.layout_of(_length(x, dim)).shard(x, self.rank, dim)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Gather the rows of all ranks into the whole tensor, on every rank."""
        _length(x, dim)
        return _Unshard.apply(self, x, dim)

    def roll(self, x: Tensor, shifts: int, dim: int = 1) -> Tensor:
        """Roll the whole sequence (``torch.roll``) of which ``x`` has this rank's rows: labels of the next token, for example."""
        return self.shard(torch.roll(self.unshard(x, dim), shifts, dim), dim)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, with_lse: bool = True
    ) -> tuple[Tensor | None, ...]:
        """Return ``(o, lse)`` of this rank's queries, which see the keys of all ranks at global positions, and max_logit if the options
        ask for it.

        Args:
            with_lse: lse is wanted. Otherwise it may be ``None``, which saves sending it back.

        Raises:
            ValueError: on every rank, if the call is wrong, ranks disagree or rows do not fit the layout.
            NotImplementedError: the call is not built, or no backend runs it.
        """
        _refuse(options)
        if self.size == 1:
            assembled = assemble(q, k, v, options)
            return autograd.attention(q, k, v, *assembled, derivatives.operator_of(assembled[2]))
        if torch.compiler.is_compiling():
            return compiled(self.name, q, k, v, options, with_lse)
        q, k, v = _autocast(q, k, v)
        agreed, call = calls.agreed_call(self, q, k, v, lambda: assemble(q, k, v, options), with_lse)
        return operators.attention(next(self.turns), call, q, k, v, agreed.extras, agreed.seed)

    def maximum(self, x: Tensor) -> Tensor:
        """Return the largest of all ranks' numbers for each element of ``x``, or NaN if a rank has NaN."""
        return torch.stack(self.exchange.gather(x)).amax(0)

    def explain(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> dispatch.Explanation:
        """Explain how the ranks would share this call: ``tilewise.explain(..., parallel=...)``. Every rank must call it."""
        _refuse(options)
        if self.size == 1:
            return dispatch.explain(q, k, v, options)
        q, k, v = _autocast(q, k, v)
        return plan.explained(self, agreement.agreed(self, q, k, v, lambda: assemble(q, k, v, options), {}))


def compiled(
    ranks: str, q: Tensor, k: Tensor, v: Tensor, options: Options, with_lse: bool
) -> tuple[Tensor | None, ...]:
    """Run :meth:`ContextParallel.attention` in a graph, for the ranks with this name."""
    q, k, v = _autocast(q, k, v)
    outputs, _ = operators.over_ranks(q, k, v, *assemble(q, k, v, options), ranks, with_lse)
    return tuple(outputs) if len(outputs) > 1 else (outputs[0], None)


def _refuse(options: Options) -> None:
    given = {
        "a piece of an attention": options.piece is not None,
        "a paged cache": options.block_table is not None or options.seqlens_k is not None,
    }
    for what, asked in given.items():
        if asked:
            raise NotImplementedError(f"parallel= does not support {what}")


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return q, k and v in autocast's dtype if it is on, so that ranks send the narrow numbers."""
    if not all(isinstance(x, Tensor) for x in (q, k, v)):  # assemble refuses them, on all ranks
        return [q, k, v]
    kind = q.device.type
    return autograd.cast(q, k, v, kind, paged=False, quantised=False) if autograd.casts(kind) else [q, k, v]


@untraced
class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parallel: ContextParallel, x, dim):
        lengths = agreement.agreed_rows(parallel.exchange, x, dim)
        layout = agreement.checked_layout(parallel, lengths, f"rows of dim {dim}")
        missing = x.new_zeros(
            [max(lengths) - x.shape[dim] if n == dim % x.ndim else size for n, size in enumerate(x.shape)]
        )
        ctx.parallel, ctx.dim, ctx.turn = parallel, dim, next(parallel.turns)
        return layout.unshard(parallel.exchange.gather(torch.cat([x, missing], dim)), dim)

    @staticmethod
    def backward(ctx, grad):
        return None, _SumAndShard.apply(ctx.parallel, ctx.turn, grad, ctx.dim), None


@untraced
class _SumAndShard(torch.autograd.Function):
    """Return this rank's rows of the sum of all ranks' whole tensors: the transpose of :class:`_Unshard`."""

    @staticmethod
    def forward(ctx, parallel: ContextParallel, turn: Turn, x, dim):
        turn.numbers()
        ctx.parallel, ctx.dim = parallel, dim
        total = ordered_sum(parallel.exchange.gather(x.contiguous()))
        return parallel.layout_of(total.shape[dim]).shard(total, parallel.rank, dim)

    @staticmethod
    def backward(ctx, grad):
        return None, None, _Unshard.apply(ctx.parallel, grad, ctx.dim), None
