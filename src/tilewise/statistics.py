"""Statistics of an attention that training recipes read, from its results, in linear memory and for every backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise import autograd, expr, settings
from tilewise.backends.base import Inputs
from tilewise.masks import Mask, MaskFunction, as_mask
from tilewise.masks.catalogue import selected
from tilewise.planning.tiles import Grid
from tilewise.problem import Problem, check, check_values
from tilewise.scores import Score, ScoreFunction
from tilewise.spec import Options, assemble, parse_spec
from tilewise.words import raise_wrong

_CHUNK_ELEMENTS = 1 << 22  # gathered numbers, or pairs, that are held at once


def stats_reasons(per: object, stats: object) -> list[str]:
    """Return the reasons against the keywords of :func:`tilewise.attention_with_stats` that name statistics."""
    reasons = [] if per in ("row", "head") else [f'per must be "row" or "head", got {per!r}']
    if not isinstance(stats, (list, tuple)) or not all(x in ("max_logit", "key_mass") for x in stats):
        reasons.append(f'stats must be a tuple of "max_logit" and "key_mass", such as ("key_mass",); got {stats!r}')
    return reasons


@torch.no_grad()
def key_mass(q: Tensor, k: Tensor, v: Tensor, results: tuple[Tensor, Tensor], o: Options) -> Tensor:
    """Return ``Σ_i P_ij`` of each key and key head, over the queries and the query heads of its group, before dropout.

    It is dV of a dO of ones, so any backward computes it: docs/algorithm.md, (16).

    Args:
        results: o and lse of the call, whose options are ``o``.

    Returns:
        In lse's dtype, rounded to v's: ``(batch, heads_k, seqlen_k)``, packed ``(heads_k, total_k)``.
    """
    out, lse = (x.detach() for x in results)
    if autograd.casts(q.device.type):  # as it cast them for the forward
        q, k, v = autograd.cast(q, k, v, q.device.type, paged=False, quantised=False)
    extras, seed, spec = assemble(q, k, v, replace(o, dropout_p=0.0, dropout_seed=None, max_logit=False, wrt=()))
    do, dlse = torch.ones_like(out), torch.zeros_like(lse)
    _, _, dv = autograd.gradients(do, dlse, q, k, v, out, lse, extras, seed, spec, count=0)
    return dv[..., 0].transpose(-1, -2).to(lse.dtype)


def probabilities(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    indices: Tensor,
    *,
    block: int = 1,
    block_q: int = 1,
    reduce: Literal["heads", "group"] = "heads",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    causal: bool = False,
    mask: Mask | Tensor | MaskFunction | None = None,
    score: Score | Tensor | ScoreFunction | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """Compute the probabilities ``exp(s - lse)`` of selected keys, summed over heads: what DeepSeek's indexer learns from.

    Args:
        q, k: as in :func:`attention`; with ``cu_seqlens_q`` as in :func:`attention_varlen`.
        lse: of the attention whose probabilities they are, natural log, ``(batch, heads_q, seqlen_q)``, packed ``(heads_q,
            total_q)``. It holds the sink, if there is one.
        indices, block, block_q: as in :func:`selected`. The attention may have seen other keys too.
        reduce: ``"heads"`` adds all query heads, for indices that all of them share; ``"group"`` those of each key head.
        causal, mask, score, softmax_scale: of the attention. Pairs that the mask hides have probability 0.

    Returns:
        In lse's dtype, without a gradient: ``(batch, rows, k)``, with ``"group"`` ``(batch, heads_k, rows, k)``. An entry's number is
        the sum over its keys and the queries of its row. It is 0 for -1, for an entry that stood before in its row and for rows
        behind the last query. Memory is that of the indices.

    Raises:
        ValueError: the call is wrong; the message has every reason.

    Source: DeepSeek-V3.2, 2025, section 2.1.
    """
    with torch.no_grad():
        kept = as_mask(mask, causal) & selected(indices, block, block_q)
        # fmt: off
        options = Options(mask=kept, score=score, softmax_scale=softmax_scale, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        # fmt: on
        extras, seed, text = assemble(q, k, k, options)
        p = check(q, k, k, extras, seed, parse_spec(text))
        reasons = _reasons(p, lse, indices, reduce)
        raise_wrong("probabilities", reasons)
        if settings.checks_values(q.device):
            check_values(p, extras)
        entries, order = indices.expand(p.batch, -1, -1, -1).sort(dim=-1, stable=True)
        heads, rows, entries_a_row = 1 if reduce == "heads" else p.heads_k, *indices.shape[2:]
        found = [lse.new_zeros(0, heads, rows, entries_a_row)]
        for part in _Part.of(p, Inputs.of(p, q, k, k, extras, seed), lse, entries):
            done = [lse.new_zeros(len(part.entries), heads, 0, entries_a_row)]
            for some, sums in part.sums(p, block, block_q):
                sums = sums.unflatten(1, (heads, -1)).sum(2)
                place = order[part.b, :, some].expand(sums.shape)
                done.append(torch.zeros_like(sums).scatter(-1, place, sums))
            of_part = torch.cat(done, 2)
            found.append(pad(of_part, (0, 0, 0, rows - of_part.shape[2])))
        out = torch.cat(found)
        return out.squeeze(1) if reduce == "heads" else out


def _reasons(p: Problem, lse: Tensor, indices: Tensor, reduce: str) -> list[str]:
    reasons, shape = [], p.output_shapes[1]
    if reduce not in ("heads", "group"):
        reasons.append(f'reduce must be "heads" or "group", got {reduce!r}')
    if reduce == "heads" and indices.shape[1] > 1:
        reasons.append(f'the indices differ among {indices.shape[1]} key heads; write reduce="group"')
    if not isinstance(lse, Tensor) or (tuple(lse.shape), lse.dtype) != (shape, p.compute_dtype):
        found = f"{lse.dtype} {tuple(lse.shape)}" if isinstance(lse, Tensor) else type(lse).__name__
        reasons.append(f"lse must be {p.compute_dtype} {shape}, as attention_with_lse returns it, got {found}")
    return reasons


@dataclass(frozen=True)
class _Part:
    """Batch elements ``b``, all or one packed sequence: q, k and lse with a batch dimension, the sorted entries, the extras of the call."""

    b: slice
    q: Tensor
    k: Tensor
    lse: Tensor
    entries: Tensor
    leaves: Sequence[Tensor]

    @classmethod
    def of(cls, p: Problem, t: Inputs, lse: Tensor, entries: Tensor) -> Iterator[_Part]:
        if not p.packed:
            yield cls(slice(None), t.q, t.k, lse, entries, t.leaves)
            return
        ends = (pairwise(cu.tolist()) for cu in (t.cu_seqlens_q, t.cu_seqlens_k))
        for n, ((q0, q1), (k0, k1)) in enumerate(zip(*ends, strict=True)):
            b = slice(n, n + 1)
            yield cls(b, t.q[None, q0:q1], t.k[None, k0:k1], lse[None, :, q0:q1], entries[b], t.leaves)

    def sums(self, p: Problem, block: int, block_q: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield some rows of entries, and the sum of each entry's probabilities ``(batch, heads_q, rows, k)``."""
        (batch, seqlen_q, heads, dim), seqlen_k = self.q.shape, self.k.shape[1]
        rows = -(-seqlen_q // block_q) if seqlen_k else 0
        more = rows * block_q - seqlen_q  # queries that the last row lacks; they see no key
        q, lse = pad(self.q, (0, 0, 0, 0, 0, more)), pad(self.lse, (0, more), value=-torch.inf)
        index = torch.arange(max(rows * block_q, seqlen_k, p.batch, heads, block), device=q.device)
        grid = Grid(p.spec.region, self.leaves, seqlen_q, seqlen_k, index[: p.batch][self.b], index[:heads], seqlen_k)
        a_row = batch * self.entries.shape[-1] * block * max(p.heads_k * dim, heads * block_q)
        step = max(1, _CHUNK_ELEMENTS // max(1, a_row))
        for first in range(0, rows, step):
            some = slice(first, min(first + step, rows))
            at = slice(some.start * block_q, some.stop * block_q)
            entry = self.entries[:, :, some]
            new = (entry >= 0) & (pad(entry, (1, 0), value=-1)[..., :-1] != entry)
            key = (entry.long().unsqueeze(-1) * block + index[:block]).flatten(3)
            kept = new.repeat_interleave(block, -1) & (key < seqlen_k)
            key = key.clamp(0, seqlen_k - 1)
            s = self._products(q[:, at], key, p)
            key, kept = (x.repeat_interleave(block_q, 2) for x in (key, kept))
            if key.shape[1] > 1:
                key, kept = (x.repeat_interleave(p.group, 1) for x in (key, kept))
            env = grid.env(index[at]) | {"j": key, "s": s}
            kept = kept & expr.evaluate([p.spec.region.inside], env, self.leaves, grid.dtype)[0]
            if p.spec.score is not None:
                s = expr.evaluate([p.spec.score], env, self.leaves, s.dtype)[0]
            row = lse[:, :, at].unsqueeze(-1)
            found = torch.where(kept & (row > -torch.inf), torch.exp(s - row), 0)
            yield some, found.unflatten(3, (entry.shape[-1], block)).unflatten(2, (-1, block_q)).sum((3, 5))

    def _products(self, q: Tensor, key: Tensor, p: Problem) -> Tensor:
        """Return ``softmax_scale * q·k`` of each query and the keys of its row, ``(batch, heads_q, queries, keys)``."""
        batch, rows, heads_k = len(q), key.shape[2], p.heads_k
        b, h = (torch.arange(n, device=q.device) for n in (batch, heads_k))
        # (batch, heads_k, rows, keys, head_dim)
        k = self.k[b.view(-1, 1, 1, 1), key, h.view(-1, 1, 1)].to(p.compute_dtype)
        q = (q.to(p.compute_dtype) * p.softmax_scale).unflatten(2, (heads_k, -1)).unflatten(1, (rows, -1))
        s = q.permute(0, 3, 1, 4, 2, 5).flatten(3, 4) @ k.mT
        return s.unflatten(3, (p.group, -1)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
