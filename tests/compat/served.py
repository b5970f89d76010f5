"""Sequences that arrive as an engine serves them, and what attention of their rows is: what the doors of engines are judged by.

A step brings new tokens to some sequences: whole prompts, pieces of a prompt, single tokens, drafts of several, all in one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.compat.eager import F64, ORDERS, Arithmetic, attend, normal
from tilewise.accuracy import judge

# New tokens of each of four sequences: a prompt beside a piece of one; the rest and a third beside decoding; all decode; a draft of 4.
STEPS = ((21, 16, 0, 0), (1, 30, 5, 0), (1, 1, 1, 37), (1, 4, 1, 1))


@dataclass
class Served:
    """Four sequences: ``q (total, heads, dim)``, ``k (total, heads_k, dim)``, ``v (total, heads_k, dim_v)`` of each; and how many came."""

    heads: int = 4
    heads_k: int = 2
    dim: int = 32
    dim_v: int = 32
    dtype: torch.dtype = torch.float32
    steps_of: tuple[tuple[int, ...], ...] = STEPS
    have: list[int] = field(default_factory=lambda: [0] * len(STEPS[0]))

    def __post_init__(self):
        totals = [sum(news) for news in zip(*self.steps_of, strict=True)]

        def drawn(heads: int, dim: int, seed: int) -> list[Tensor]:
            return [normal(n, heads, dim, dtype=self.dtype, seed=10 * b + seed) for b, n in enumerate(totals)]

        self.q, self.k = drawn(self.heads, self.dim, 1), drawn(self.heads_k, self.dim, 2)
        self.v = drawn(self.heads_k, self.dim_v, 3)

    def steps(self) -> Iterator[Step]:
        for news in self.steps_of:
            rows = [(b, self.have[b], self.have[b] + n) for b, n in enumerate(news) if n]
            for b, _, end in rows:
                self.have[b] = end
            yield Step(self, rows)


@dataclass(frozen=True)
class Step:
    """The rows that a step brings: sequence, and its tokens before and after."""

    of: Served
    rows: list[tuple[int, int, int]]

    @property
    def sequences(self) -> list[int]:
        return [b for b, _, _ in self.rows]

    @property
    def lengths(self) -> Tensor:
        """Keys of each sequence of the step, with the new ones."""
        return torch.tensor([end for _, _, end in self.rows], dtype=torch.int32)

    @property
    def starts(self) -> Tensor:
        news = torch.tensor([0] + [end - begin for _, begin, end in self.rows])
        return news.cumsum(0).int()

    def new(self, tensors: Sequence[Tensor]) -> Tensor:
        """The new rows of all sequences, packed."""
        return torch.cat([tensors[b][begin:end] for b, begin, end in self.rows])

    def attended(
        self, arithmetic: Arithmetic, keys: Sequence[Sequence[Tensor]] | None = None, all_keys: bool = False, **options
    ) -> Tensor:
        """The new rows' o, packed.

        Args:
            keys: those of the cache, if they are not the sequences' own. all_keys: these are another sequence's, and all are there.
        """
        found = []
        for b, begin, end in self.rows:
            k, v = (x[b] if all_keys else x[b][:end] for x in keys or (self.of.k, self.of.v))
            found.append(one(self.of.q[b][begin:end], k, v, arithmetic, begin, **options))
        return torch.cat(found)

    def judge(self, o: Tensor, **options) -> None:
        """Hold o against float64 by the errors of eager attention in q's dtype."""
        oracle = self.attended(Arithmetic(F64), **options)
        eager = [self.attended(Arithmetic(self.of.dtype, order), **options) for order in range(ORDERS)]
        error = judge("o", o.view(oracle.shape), oracle, eager)
        assert error.ok, error


def one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arithmetic: Arithmetic,
    first: int,
    *,
    kept: Callable[[Tensor, Tensor], Tensor] = lambda i, j: j <= i,
    scale: float | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """o ``(rows, heads, dim_v)`` of the rows from position ``first`` on. A sink is one more key, whose value is zero.

    Args:
        kept: of positions i ``(rows, 1)`` and j ``(1, keys)``. slopes, sinks: ``(heads,)``; slopes times j − i are added to capped scores.
    """
    q, k, v = (x.transpose(0, 1).to(arithmetic.dtype) for x in (q, k, v))
    rows, keys = q.shape[1], k.shape[1]
    i, j = torch.arange(first, first + rows)[:, None], torch.arange(keys)[None]
    k, v = (torch.cat([x, torch.zeros_like(x[:, :1])], 1) for x in (k, v))
    seen = torch.cat([kept(i, j).expand(rows, keys), torch.full((rows, 1), sinks is not None)], 1)

    def change(s: Tensor) -> Tensor:
        s, last = s[..., :-1], s[..., -1:]
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        s = s if slopes is None else s - slopes[:, None, None].to(s) * (i - j).abs().to(s)
        return torch.cat([s, last if sinks is None else sinks[:, None, None].to(s).expand_as(last)], -1)

    return attend(q, k, v, arithmetic, scale=scale, change=change, kept=seen)[0].transpose(0, 1)
