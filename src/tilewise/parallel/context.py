"""What users hold of a group of ranks, and what its ranks agree on before any bytes move."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise import autograd  # noqa: F401  (registers the operators)
from tilewise.parallel import gathered
from tilewise.parallel.exchange import Exchange, Group, ordered_sum
from tilewise.parallel.layout import Layout, contiguous, zigzag
from tilewise.piece import Piece
from tilewise.problem import check
from tilewise.spec import Options, assemble, parse_spec

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

    def attention(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        """``(o, lse)`` of this rank's queries, which see the keys of all ranks at their global positions.

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
            return torch.ops.tilewise.attention.default(q, k, v, *assemble(q, k, v, options))
        q, k, v = _autocast(q, k, v)
        lengths = self._agree(q, k, v, options)
        queries, keys = (
            self._checked_layout([x[n] for x in lengths], name) for n, name in enumerate(("queries", "keys"))
        )
        options = self._with_one_seed(q, options)
        extras, seed, text = assemble(q, k, v, options)
        whole_k, whole_v = _stretched(k, keys.seqlen), _stretched(v, keys.seqlen)
        check(
            _stretched(q, queries.seqlen), whole_k, whole_v, extras, seed, parse_spec(text)
        )  # all ranks see the same shapes here, and fail alike
        specs = []
        for start, stop, _ in queries.rows(self.rank):
            piece = Piece(start, 0, queries.seqlen, keys.seqlen)
            specs.append(assemble(q, k, v, replace(options, piece=piece))[2])
            check(_stretched(q, stop - start), whole_k, whole_v, extras, seed, parse_spec(specs[-1]))
        call = gathered.Gathered(self.exchange, queries, keys, tuple(specs), self.sum_leaf_gradients)
        return gathered.attention(call, q, k, v, extras, seed)

    def _agree(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> list[tuple[int, int]]:
        """``(queries, keys)`` that each rank holds. All ranks compare what they are about to do, and fail alike where it differs."""
        try:
            facts = _facts(q, k, v, options, self)
            lengths = [q.shape[1], k.shape[1]]
        except (
            ValueError,
            NotImplementedError,
            IndexError,
        ) as error:  # the other ranks must hear of it, or they would wait
            facts, lengths = {"the call": f"{type(error).__name__}: {error}"}, [0, 0]
        digest = int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7])
        answers = self.exchange.numbers([digest, *lengths])
        if len({answer[0] for answer in answers}) > 1:
            raise ValueError(_disagreement(self.exchange.objects(facts)))
        if "the call" in facts:
            raise ValueError(facts["the call"].partition(": ")[2])
        return [(queries, keys) for _, queries, keys in answers]

    def _checked_layout(self, lengths: list[int], name: str) -> Layout:
        layout = self.layout_of(sum(lengths))
        if layout.lengths != tuple(lengths):
            raise ValueError(
                f"attention over {self.size} ranks was called wrongly\n  the ranks hold {lengths} {name}, the layout of {sum(lengths)} "
                f"is {list(layout.lengths)}; cut tensors by shard()"
            )
        return layout

    def _with_one_seed(self, q: Tensor, options: Options) -> Options:
        """Dropout by the first rank's seed, so that the pairs that are dropped are those of one device."""
        if not options.dropout_p or isinstance(options.dropout_seed, int):
            return options
        _, seed, _ = assemble(q, q, q, Options(dropout_p=options.dropout_p, dropout_seed=options.dropout_seed))
        return options if seed is None else replace(options, dropout_seed=self.exchange.broadcast(seed))


def _stretched(x: Tensor, seqlen: int) -> Tensor:
    """A tensor with the facts of ``x`` and another length, without memory of its own: for checks."""
    return x.new_empty((1, 1, 1, 1)).expand(x.shape[0], seqlen, *x.shape[2:])


def _facts(q: Tensor, k: Tensor, v: Tensor, options: Options, parallel: ContextParallel) -> dict[str, str]:
    """What must be the same on all ranks, by what a person calls it."""
    seed = 0 if options.dropout_seed is None else options.dropout_seed  # a seed that is drawn is the first rank's
    extras, _, text = assemble(q, k, v, replace(options, dropout_seed=seed))
    spec = parse_spec(text)
    if any(x.ndim != 4 for x in (q, k, v)):
        raise ValueError("attention was called wrongly\n  q, k and v must be (batch, seqlen, heads, head_dim)")

    def shown(x: Tensor) -> str:
        return f"({x.shape[0]}, *, {x.shape[2]}, {x.shape[3]}) {x.dtype}"

    return {
        "q": shown(q), "k": shown(k), "v": shown(v), "mask": spec.mask_text, "score": spec.score_text,
        "softmax_scale": str(spec.softmax_scale), "dropout_p": str(spec.dropout_p), "deterministic": str(spec.deterministic),
        "backend": str(spec.backend), "gradients": f"{spec.needs_grad} {spec.grad_slots}",
        "tensors of mask, score and sink": f"{[(tuple(x.shape), str(x.dtype)) for x in extras]} {spec.mask_slots} "
        f"{spec.score_slots} {spec.sink_slot}",
        "layout": str(parallel.layout), "sum_leaf_gradients": str(parallel.sum_leaf_gradients),
    }  # fmt: skip


def _disagreement(facts: list[dict[str, str]]) -> str:
    lines = [f"the {len(facts)} ranks were called differently"]
    for name in dict.fromkeys(name for known in facts for name in known):
        said = [known.get(name, "(not reached)") for known in facts]
        if len(set(said)) > 1:
            lines += [f"  {name}"] + [f"    rank {rank}: {value}" for rank, value in enumerate(said)]
    return "\n".join(lines)


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
