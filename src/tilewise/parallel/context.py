"""What users hold of a group of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise import autograd  # noqa: F401  (registers the operators)
from tilewise.backends.base import PerTensors
from tilewise.parallel import gathered
from tilewise.parallel.agreement import agreed_lengths
from tilewise.parallel.exchange import Exchange, Group, ordered_sum
from tilewise.parallel.layout import Layout, contiguous, zigzag
from tilewise.piece import Piece
from tilewise.problem import check
from tilewise.spec import Options, Spec, assemble, parse_spec
from tilewise.tiles import Grid

LAYOUTS: dict[str, Callable[[int, int], Layout]] = {"zigzag": zigzag, "contiguous": contiguous}


def context_parallel(
    group: dist.ProcessGroup | dist.device_mesh.DeviceMesh | Exchange | None = None,
    *,
    layout: str | Layout = "zigzag",
    sum_leaf_gradients: bool = True,
) -> ContextParallel:
    """A group of ranks over which attention is computed: the ``parallel=`` of :func:`tilewise.attention`.

    Args:
        group: a process group, a device mesh of one dimension (``mesh["cp"]``), or ``None`` for all ranks.
        layout: who holds which positions of a sequence: ``"zigzag"`` (balanced for causal masks), ``"contiguous"`` (for masks that
            treat all queries alike), or a :class:`tilewise.parallel.Layout`, such as ``tilewise.parallel.balanced(mask, ...)``.
        sum_leaf_gradients: sinks and tensors that a score reads get the gradient that one device would give them, summed over the
            ranks. ``False`` leaves each rank its own queries' part, for wrappers that sum parameters' gradients over the ranks
            themselves (DDP, FSDP over the same ranks).

    Raises:
        ValueError: no process group, a mesh of several dimensions, or an unknown layout.
    """
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"context_parallel takes a mesh of one dimension, got {group.mesh_dim_names}; name one: mesh['cp']"
            )
        group = group.get_group()
    if not isinstance(layout, Layout) and layout not in LAYOUTS:
        raise ValueError(f"layout must be {', '.join(LAYOUTS)} or a Layout, got {layout!r}")
    exchange = Group(group) if group is None or isinstance(group, dist.ProcessGroup) else group
    if isinstance(layout, Layout) and layout.ranks != exchange.size:
        raise ValueError(f"the layout is for {layout.ranks} ranks, the group has {exchange.size}")
    return ContextParallel(exchange, layout, sum_leaf_gradients)


class ContextParallel:
    """A group of ranks that share a sequence; made by :func:`context_parallel`.

    Its index maps are differentiable for a loss that is the sum of all ranks' losses, and every rank's tensors are its own: of a whole
    tensor that all ranks hold alike, each gets the part of the gradient that came through its copy, and the parts add up, as those
    of parameters do under DDP and FSDP.
    """

    def __init__(self, exchange: Exchange, layout: str | Layout, sum_leaf_gradients: bool):
        self.exchange, self.layout, self.sum_leaf_gradients = exchange, layout, sum_leaf_gradients
        self._pieces = PerTensors()

    @property
    def rank(self) -> int:
        return self.exchange.rank

    @property
    def size(self) -> int:
        return self.exchange.size

    def layout_of(self, seqlen: int) -> Layout:
        """Who holds which positions of a sequence of this length.

        Raises:
            ValueError: a layout that was made for another length.
        """
        if not isinstance(self.layout, Layout):
            return LAYOUTS[self.layout](seqlen, self.size)
        if self.layout.seqlen != seqlen:
            raise ValueError(f"the layout is for sequences of {self.layout.seqlen}, this one has {seqlen}")
        return self.layout

    def positions(self, seqlen: int, device: torch.device | str | None = None) -> Tensor:
        """int64: the global position of each row that this rank holds, of a sequence of this length (for rotary embeddings, say)."""
        return self.layout_of(seqlen).positions(self.rank, device)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of a tensor that every rank holds whole, along ``dim``."""
        return self.layout_of(x.shape[dim]).shard(x, self.rank, dim)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor, on every rank, from the rows that each holds."""
        return _Unshard.apply(self, x, dim)

    def roll(self, x: Tensor, shifts: int, dim: int = 1) -> Tensor:
        """``torch.roll`` of the whole sequence, for tensors that hold this rank's rows: labels of the next token, say."""
        return self.shard(torch.roll(self.unshard(x, dim), shifts, dim), dim)

    def maximum(self, x: Tensor) -> Tensor:
        """The largest of all ranks' numbers, for each element of ``x``; NaN where a rank has it."""
        return torch.stack(self.exchange.gather(x)).amax(0)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, ...]:
        """``(o, lse)`` of this rank's queries, which see the keys of all ranks at their global positions; max_logit too where the
        options ask for it.

        Raises:
            ValueError: on every rank: a wrong call, ranks that disagree, rows that are not those of the layout.
            NotImplementedError: what is not built, or what no backend runs.
        """
        if options.cu_seqlens_q is not None or options.piece is not None:
            what = "packed sequences" if options.piece is None else "a piece of an attention"
            raise NotImplementedError(
                f"parallel= with {what} is not built; for packed documents use mask=tw.documents(ids)"
            )
        if self.size == 1:
            return gathered.operator(options.max_logit)(q, k, v, *assemble(q, k, v, options))
        q, k, v = _autocast(q, k, v)
        facts = {"layout": str(self.layout), "sum_leaf_gradients": str(self.sum_leaf_gradients)}
        lengths = agreed_lengths(self.exchange, q, k, v, options, facts)
        queries, keys = (
            self._checked_layout([x[n] for x in lengths], name) for n, name in enumerate(("queries", "keys"))
        )
        extras, seed, text = assemble(q, k, v, _with_one_seed(self.exchange, q, options))
        spec = parse_spec(text)
        signature = (text, queries, keys, *[(x.shape[0], *x.shape[2:], x.dtype, x.device) for x in (q, k, v)])
        # What was checked of another tensor says nothing of this one.
        signature += tuple((x.shape, x.dtype) for x in extras)
        mask_leaves = [extras[n] for n in spec.mask_slots]
        pieces = self._pieces.of(
            signature, mask_leaves, lambda: self._planned((q, k, v), (queries, keys), extras, seed, spec)
        )
        call = gathered.Gathered(
            self.exchange, keys, pieces, spec.grad_slots, self.sum_leaf_gradients, options.max_logit
        )
        return gathered.attention(call, q, k, v, extras, seed)

    def _planned(
        self,
        qkv: tuple[Tensor, ...],
        layouts: tuple[Layout, Layout],
        extras: list[Tensor],
        seed: Tensor | None,
        spec: Spec,
    ) -> tuple[gathered.LocalPiece, ...]:
        """The rank's pieces, after every input check of the whole call: all ranks see the same shapes here, and fail alike."""
        queries, keys = layouts
        q, k, v = (_stretched(x, layout.seqlen) for x, layout in zip(qkv, (queries, keys, keys), strict=True))
        problem = check(q, k, v, extras, seed, spec)
        grid = Grid.whole(spec.region, extras, (problem.batch, problem.heads_q, queries.seqlen, keys.seqlen), q.device)
        found = []
        for start, stop, first in queries.rows(self.rank):
            low, high = _keys_between(grid, start, stop)
            piece = replace(spec, piece=Piece(start, low, queries.seqlen, keys.seqlen))
            check(q[:, start:stop], k[:, low:high], v[:, low:high], extras, seed, piece)
            found.append(gathered.LocalPiece(slice(first, first + stop - start), slice(low, high), piece.text()))
        return tuple(found)

    def _checked_layout(self, lengths: list[int], name: str) -> Layout:
        layout = self.layout_of(sum(lengths))
        if layout.lengths != tuple(lengths):
            raise ValueError(
                f"attention over {self.size} ranks was called wrongly\n  the ranks hold {lengths} {name}, the layout of {sum(lengths)} "
                f"is {list(layout.lengths)}; cut tensors by shard()"
            )
        return layout


def _with_one_seed(exchange: Exchange, q: Tensor, options: Options) -> Options:
    """Dropout by the first rank's seed, so that the pairs that are dropped are those of one device."""
    if not options.dropout_p or isinstance(options.dropout_seed, int):
        return options
    _, seed, _ = assemble(q, q, q, Options(dropout_p=options.dropout_p, dropout_seed=options.dropout_seed))
    return options if seed is None else replace(options, dropout_seed=exchange.broadcast(seed))


def _stretched(x: Tensor, seqlen: int) -> Tensor:
    """A tensor with the facts of ``x`` and another length, without memory of its own: for checks."""
    return x.new_empty((1, 1, 1, 1)).expand(x.shape[0], seqlen, *x.shape[2:])


def _keys_between(grid: Grid, start: int, stop: int) -> tuple[int, int]:
    """The first, and one past the last, key that queries ``start`` to ``stop`` may see; at least one key. Reads the mask's tensors."""
    lo, hi = grid.key_interval(torch.arange(start, stop, device=grid.b.device))
    sees = lo < hi
    first = int(torch.where(sees, lo, grid.keys).amin())
    last = int(torch.where(sees, hi, 0).amax())
    return (first, last) if first < last else (0, min(1, grid.keys))


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """q, k and v in autocast's dtype where it is on: its narrow numbers are what travels."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parallel: ContextParallel, x, dim):
        ctx.parallel, ctx.dim = parallel, dim
        return _unsharded(parallel, x, dim)

    @staticmethod
    def backward(ctx, grad):
        parallel, dim = ctx.parallel, ctx.dim
        total = ordered_sum(parallel.exchange.gather(grad.contiguous()))
        return None, parallel.layout_of(total.shape[dim]).shard(total, parallel.rank, dim), None


def _unsharded(parallel: ContextParallel, x: Tensor, dim: int) -> Tensor:
    lengths = [n for (n,) in parallel.exchange.numbers([x.shape[dim]])]
    layout = parallel._checked_layout(lengths, f"rows of dim {dim}")
    missing = x.new_zeros(
        [max(lengths) - x.shape[dim] if n == dim % x.ndim else size for n, size in enumerate(x.shape)]
    )
    return layout.unshard(parallel.exchange.gather(torch.cat([x, missing], dim)), dim)
