"""Algorithm 0: attention with the whole score matrix in memory, and its closed-form backward. The oracle.

Computed in any dtype: in float64 it is what everything else is judged by; in the inputs' own dtype it is "eager
attention", whose error sets the tolerance (docs/algorithm.md#14-numerics).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise import dropout, expr, gather, state
from tilewise.backends.base import Backend, Grads, Inputs, Output, empty_output, piece_reasons
from tilewise.caching import cached_property
from tilewise.leaf_gradients import read_adjoint
from tilewise.planning.tiles import Grid
from tilewise.problem import Problem, check
from tilewise.spec import Options, assemble, parse_spec

MEMORY_LIMIT = 2 << 30
AGAIN = 1000  # from an order to that in which it computes S again
UNIT_ROWS = 128  # of a matrix unit's tile, at most


@dataclass(frozen=True)
class Part:
    """A batch of sequences of equal lengths, the whole call or one packed sequence, as far as it depends on no arithmetic.

    Attributes:
        rows, keys: where it lies in packed q, and in k and v.
        kept: of its pairs, bool ``(batch, heads_q, seqlen_q, seqlen_k)``. seen: of its keys, ``(batch, heads_q, seqlen_k, 1)``, by
            some query of the group.
        env: what expressions call its indices.
        drawn: the pairs that dropout keeps, bool; None without dropout.
    """

    rows: slice
    keys: slice
    kept: Tensor
    seen: Tensor
    env: dict
    drawn: Tensor | None


def parts(p: Problem, t: Inputs) -> Iterator[Part]:
    if not p.packed:
        yield _part(p, t, range(p.batch), (slice(None), slice(None)), (p.seqlen_q, p.seqlen_k))
        return
    cu_q, cu_k = t.cu_seqlens_q.tolist(), t.cu_seqlens_k.tolist()
    for b in range(p.batch):
        places = tuple(slice(cu[b], cu[b + 1]) for cu in (cu_q, cu_k))
        yield _part(p, t, range(b, b + 1), places, tuple(x.stop - x.start for x in places))


def _part(p: Problem, t: Inputs, batch: range, places: tuple[slice, slice], lengths: tuple[int, int]) -> Part:
    device = t.q.device
    b, head = torch.arange(batch.start, batch.stop, device=device), torch.arange(p.heads_q, device=device)
    grid = Grid(p.spec.region, t.leaves, *lengths, b, head, lengths[1])
    i, j = (torch.arange(n, device=device) for n in lengths)
    kept = grid.pairs()
    seen = kept.any(2).unflatten(1, (p.heads_k, p.group)).any(2).repeat_interleave(p.group, 1).unsqueeze(-1)
    drawn, p_drop = None, p.spec.dropout_p
    if p_drop:
        ranges = ((start, start + n) for start, n in zip(p.starts, lengths, strict=True))
        drawn = dropout.keep(t.seed, p_drop, b.view(-1, 1) * p.heads_q + head, *ranges)
    return Part(*places, kept, seen, grid.env(i, j), drawn)


@lru_cache(maxsize=256)
def _shuffled(n: int, order: int, device: torch.device) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(order)).to(device)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``. On a CPU, products of 16 bits are summed in fp32 and rounded once, as libraries do where they have instructions for
    it; without these, PyTorch's own product is far slower than one in fp32."""
    if a.device.type != "cpu" or a.dtype.itemsize != 2:
        return a @ b
    return (a.float() @ b.float()).to(a.dtype)


@dataclass(frozen=True)
class Arithmetic:
    """The dtype of the formulas, and their order, one of many equally good ones.

    Attributes:
        order: 0 is the textbook's. Any other number shuffles the terms of every product's sums (by that seed), for dK and dV those
            of all query heads of a group at once, applies the scale to q before the product instead of to S, and takes
            FlashAttention's formulas for the backward (its appendix B.2), ``P = exp(S - lse)`` of an S that is computed again, in an
            order of its own, with lse in fp32 at least, merged from two parts of the keys, and ``delta = rowsum(dO ∘ O)``, instead
            of ``softmax(S)`` and ``rowsum(P ∘ dP)``. How far the orders differ tells how much of an error is luck.
        units: Q Kᵀ, of operands of 16 bits, comes from a GPU's matrix units, which accumulate in fp32 and round in their own
            way.
    """

    dtype: torch.dtype
    order: int = 0
    units: torch.dtype | None = None

    def product(self, q: Tensor, k: Tensor) -> Tensor:
        """Q Kᵀ of (batch, head, row, dim)."""
        if self.units is None:
            return _matmul(q, k.mT)
        # Whole tiles of rows: for a single one, libraries leave the matrix units aside.
        a, b = (pad(x.to(self.units).flatten(0, 1), (0, 0, 0, -x.shape[2] % UNIT_ROWS)) for x in (q, k))
        s = torch.bmm(a, b.mT, out_dtype=self.dtype).unflatten(0, q.shape[:2])
        return s[:, :, : q.shape[2], : k.shape[2]]

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        if not self.order:
            return _matmul(a, b)
        shuffled = _shuffled(a.shape[-1], self.order, a.device)
        return _matmul(a[..., shuffled], b[..., shuffled, :])

    def logsumexp(self, x: Tensor) -> Tensor:
        """Return the log of the sum of exponentials over the last dimension, in fp32 at least; only the textbook rounds it to x's dtype."""
        if not self.order:
            return torch.logsumexp(x, -1)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        parts = _shuffled(x.shape[-1], self.order, x.device).tensor_split(2)
        return torch.logaddexp(*(torch.logsumexp(x[..., part], -1) for part in parts))

    def softmax(self, x: Tensor, lse: Tensor) -> Tensor:
        """Return the softmax over the last dimension; ``lse``: what :meth:`logsumexp` makes of x."""
        return torch.softmax(x, -1) if not self.order else torch.exp(x.to(lse.dtype) - lse.unsqueeze(-1)).to(x.dtype)

    @property
    def again(self) -> Arithmetic:
        """The arithmetic in which a backward computes S again; the textbook keeps P and needs none."""
        return replace(self, order=self.order + AGAIN)


class _Attention:
    """One part's matrices, all ``(batch, heads_q, seqlen_q, seqlen_k)``; what lse does not need is computed when it is read."""

    def __init__(self, p: Problem, t: Inputs, part: Part, arithmetic: Arithmetic):
        dtype = arithmetic.dtype
        self.p, self.t, self.part, self.dtype = p, t, part, dtype
        self.arithmetic, self.matmul = arithmetic, arithmetic.matmul
        self.textbook = not arithmetic.order
        parts = ((t.q, part.rows), (t.k, part.keys), (t.v, part.keys))
        self.q, k, v = ((x[None, rows] if p.packed else x).transpose(1, 2).to(dtype) for x, rows in parts)
        k, v = (x.repeat_interleave(p.group, 1) for x in (k, v))
        self.kept, self.env = part.kept, part.env
        self.k, self.v = k.where(part.seen, 0), v.where(part.seen, 0)
        scale = p.softmax_scale
        self.raw = (
            arithmetic.product(self.q, self.k) * scale if self.textbook else self.matmul(self.q * scale, self.k.mT)
        )
        self.sink = None if t.sink is None else t.sink.to(dtype).view(1, -1, 1)
        # 1 / (share kept) where dropout keeps the pair, else 0.
        self.z = None if part.drawn is None else part.drawn.to(dtype) * dropout.keep_scale(p.spec.dropout_p)

    @cached_property
    def s(self) -> Tensor:
        spec, env = self.p.spec, self.env | {"s": self.raw}
        s = self.raw if spec.score is None else expr.evaluate([spec.score], env, self.t.leaves, self.dtype)[0]
        return torch.where(self.kept, s.to(self.dtype), -torch.inf)

    def _logits(self) -> Tensor:
        s = self.s
        return s if self.sink is None else torch.cat([s, self.sink.unsqueeze(-1).expand(*s.shape[:3], 1)], -1)

    @cached_property
    def lse(self) -> Tensor:
        return self._lse.to(self.dtype)

    @cached_property
    def _lse(self) -> Tensor:
        lse = self.arithmetic.logsumexp(self._logits())
        # inf is no normaliser: o is NaN, and so is lse. A row without keys has a sink of inf as its lse.
        return torch.where((lse == torch.inf) & (self.max_logit != -torch.inf), torch.nan, lse)

    @cached_property
    def max_logit(self) -> Tensor:
        """The largest score of each row; NaN where o is, so of an infinite score too."""
        if not self.s.shape[-1]:
            return self.s.new_full(self.s.shape[:-1], -torch.inf)
        largest = self.s.amax(-1)
        return torch.where(largest == torch.inf, torch.nan, largest)

    @cached_property
    def probability(self) -> Tensor:
        return self._probability(self._lse)

    def _probability(self, lse: Tensor) -> Tensor:
        probability = self.arithmetic.softmax(self._logits(), lse)[..., : self.s.shape[-1]]
        return torch.where(self.s == -torch.inf, 0, probability)  # also rows that see nothing

    def dropped(self, probability: Tensor) -> Tensor:
        return probability if self.z is None else probability * self.z

    @cached_property
    def o(self) -> Tensor:
        return self.matmul(self.dropped(self.probability), self.v)

    def recomputed(self, lse: Tensor | None = None) -> Tensor:
        """P as the backward has it; ``lse``: of the attention that these keys are a part of."""
        if lse is not None:
            return torch.where(self.s == -torch.inf, 0, torch.exp(self.s - lse.unsqueeze(-1)))
        if self.textbook:
            return self.probability
        return _Attention(self.p, self.t, self.part, self.arithmetic.again)._probability(self._lse)

    def backward(
        self, do: Tensor, dlse: Tensor, o: Tensor | None, lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[int, Tensor]]:
        """``(dq, dk, dv, delta, leaf gradients by slot)``; dk, dv per key head. o, lse: of :func:`backward`'s ``out``."""
        p, spec, probability = self.p, self.p.spec, self.recomputed(lse)
        hit = probability != 0  # NaN too: a gradient must not hide it
        dv = self._over_queries(self.dropped(probability), do)
        dp = self.matmul(do, self.v.mT)
        dp = dp if self.z is None else dp * self.z
        if o is None and not self.textbook:
            o = self.o
        delta = ((probability * dp) if o is None else (do * o)).sum(-1) - dlse
        ds = torch.where(hit, probability * (dp - delta.unsqueeze(-1)), 0)
        leaves: dict[int, Tensor] = {}
        if spec.score is not None:
            slope, *leaf_slopes = expr.evaluate(
                spec.score_slopes, self.env | {"s": self.raw}, self.t.leaves, self.dtype
            )
            for e, leaf_slope in zip(spec.lookups, leaf_slopes, strict=True):
                slot = e.args[0][1]
                leaf = self.t.leaves[slot]
                grad = leaves.setdefault(slot, torch.zeros(leaf.shape, dtype=self.dtype, device=leaf.device))
                read_adjoint(grad, e, self.env | {"s": self.raw}, self.t.leaves, torch.where(hit, ds * leaf_slope, 0))
            ds = torch.where(hit, ds * slope, 0)
        dq, dk = self.matmul(ds, self.k), self._over_queries(ds, self.q)
        return dq * p.softmax_scale, dk * p.softmax_scale, dv, delta, leaves

    def _over_queries(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``xᵀ y`` of matrices with a row for each query, added up over the query heads of a group."""
        by_group = [z.unflatten(1, (self.p.heads_k, self.p.group)) for z in (x, y)]
        if self.textbook:
            x, y = by_group
            return self.matmul(x.mT, y).sum(2)
        x, y = (z.flatten(2, 3) for z in by_group)
        return self.matmul(x.mT, y)


def attend(p: Problem, t: Inputs, arithmetic: Arithmetic, of: Iterable[Part] | None = None) -> Iterator[_Attention]:
    """The matrices of every part, one after the other; ``of``: the parts, where they are known."""
    for part in parts(p, t) if of is None else of:
        yield _Attention(p, t, part, arithmetic)


def forward(p: Problem, t: Inputs, arithmetic: Arithmetic, attended: Iterable[_Attention] | None = None) -> Output:
    """Return ``o``, ``lse`` and, if asked for, ``max_logit``, in the dtype of the computation."""
    if p.paged:
        return gather.in_layout_of(p, forward(*gather.gathered(p, t), arithmetic))
    attended = list(attend(p, t, arithmetic) if attended is None else attended)
    statistics = statistics_of(p, t, arithmetic.dtype, attended)
    if not p.packed:
        return Output(attended[0].o.transpose(1, 2).contiguous(), **statistics)
    o = torch.zeros_like(empty_output(p, t.q, t.v).o, dtype=arithmetic.dtype)
    for a in attended:
        o[a.part.rows] = a.o[0].transpose(0, 1)
    return Output(o, **statistics)


def statistics_of(p: Problem, t: Inputs, dtype: torch.dtype, attended: Sequence[_Attention]) -> dict[str, Tensor]:
    """:func:`forward`'s lse and, where it is asked for, max_logit, by name, without the rest of its work."""
    found, shape = {}, p.output_shapes[1]
    for name in ("lse", "max_logit") if p.spec.max_logit else ("lse",):
        if not p.packed:
            found[name] = getattr(attended[0], name)
            continue
        found[name] = t.q.new_full(shape, -torch.inf, dtype=dtype)
        for a in attended:
            found[name][:, a.part.rows] = getattr(a, name)[0]
    return found


def backward(
    p: Problem,
    t: Inputs,
    do: Tensor,
    dlse: Tensor,
    arithmetic: Arithmetic,
    attended: Iterable[_Attention] | None = None,
    out: Output | None = None,
) -> Grads:
    """Return all gradients, in the dtype that they are computed in.

    Args:
        out: o and lse of the attention that these keys are a part of. None: P is recomputed by softmax, not from a rounded lse.
    """
    dtype = arithmetic.dtype
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (t.q, t.k, t.v))
    leaves: dict[int, Tensor] = {}
    dsink = None if t.sink is None else torch.zeros(t.sink.shape, dtype=dtype, device=t.sink.device)
    for a in attend(p, t, arithmetic) if attended is None else attended:
        part = a.part
        o, lse = (None, None) if out is None else _rows(p, part, out.o, out.lse, dtype)
        part_dq, part_dk, part_dv, delta, part_leaves = a.backward(*_rows(p, part, do, dlse, dtype), o, lse)
        for total, x, rows in ((dq, part_dq, part.rows), (dk, part_dk, part.keys), (dv, part_dv, part.keys)):
            total[rows] += x[0].transpose(0, 1) if p.packed else x.transpose(1, 2)
        for slot, grad in part_leaves.items():
            leaves[slot] = leaves[slot] + grad if slot in leaves else grad
        if dsink is not None:
            dsink += state.sink_gradient(a.sink, a.lse if lse is None else lse, delta).sum((0, 2))
    return Grads(dq, dk, dv, dsink, leaves)


def _rows(p: Problem, part: Part, o: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a part's rows of tensors shaped as o and lse: ``(batch, heads_q, seqlen_q, ...)``."""
    o, lse = (o[None, part.rows], lse[None, :, part.rows]) if p.packed else (o, lse)
    return o.transpose(1, 2).to(dtype), lse.to(dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, dtype: torch.dtype = torch.float64, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(o, lse, probabilities)`` with the whole matrix in memory, whatever its size.

    Args:
        q, k, v: ``(batch, seqlen, heads, head_dim)``.
        dtype: in which everything is computed and returned.
        options: the keywords of :func:`tilewise.attention`.

    Returns:
        o ``(batch, seqlen_q, heads_q, head_dim_v)``, lse ``(batch, heads_q, seqlen_q)``, and P after the mask, the sink
        and the softmax and before dropout, ``(batch, heads_q, seqlen_q, seqlen_k)``.
    """
    with torch.no_grad():
        extras, seed, text = assemble(q, k, v, Options(**options))
        p = check(q, k, v, extras, seed, parse_spec(text))
        t = Inputs.of(p, q, k, v, extras, seed)
        a = next(attend(p, t, Arithmetic(dtype)))
        return a.o.transpose(1, 2).contiguous(), a.lse, a.probability


class Reference(Backend):
    """The reference as a backend: runs only when named, in fp32 (fp64 for fp64), up to 2 GiB of scores."""

    name = "reference"

    def unsupported(self, p: Problem) -> list[str]:
        size = 4 if p.compute_dtype == torch.float32 else 8
        scores = size * p.heads_q * p.seqlen_q * p.seqlen_k * (1 if p.packed else p.batch)
        if scores > MEMORY_LIMIT:
            return [
                f"its score matrix would take {scores / 2**30:.1f} GiB, above 2 GiB; tilewise.reference.attention has no bound"
            ]
        return piece_reasons(p, dropout=1)

    def config(self, p: Problem) -> ReferenceConfig:
        return ReferenceConfig()

    def forward(self, p: Problem, t: Inputs) -> Output:
        out = forward(p, t, Arithmetic(p.compute_dtype))
        return replace(out, o=out.o.to(p.dtype))

    def backward(self, p: Problem, t: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        g = backward(p, t, do, dlse, Arithmetic(p.compute_dtype), out=out)
        leaves = {slot: grad.to(t.leaves[slot].dtype) for slot, grad in g.leaves.items()}
        dsink = None if g.sink is None else g.sink.to(t.sink.dtype)
        return Grads(g.dq.to(p.dtype), g.dk.to(p.dtype), g.dv.to(p.dtype), dsink, leaves)


@dataclass(frozen=True)
class ReferenceConfig:
    def describe(self) -> str:
        return "the whole score matrix"

    def traffic(self, p: Problem) -> int:
        """Scores are written and read three times: by the product, the softmax, and the second product."""
        size = torch.empty((), dtype=p.compute_dtype).element_size()
        return 6 * size * p.batch * p.heads_q * p.seqlen_q * p.seqlen_k
