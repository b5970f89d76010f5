"""The masks and scores of the table of cases: what a name means, once as tilewise spells it and once as a plain function.

The plain functions of (b, h, i, j) are shared by eager attention and FlexAttention. Indices are within the sequence, and
`off = seqlen_k - seqlen_q` aligns the last query with the last key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import and_, or_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import tilewise as tw

if TYPE_CHECKING:
    from bench.cases import Case, Inputs

Normal = Callable[..., Tensor]


def leaf_dtype(case: Case) -> torch.dtype:
    """The dtype of the tensors that a mask or score reads."""
    return torch.float64 if case.dtype == "float64" else torch.float32


def _no_leaves(case: Case, normal: Normal) -> dict[str, Tensor]:
    return {}


@dataclass(frozen=True)
class MaskKind:
    """build(x): the tilewise Mask. kept(x, b, h, i, j): whether the same set has a pair. leaves: the tensors that both read."""

    build: Callable[[Inputs], Any]
    kept: Callable[..., Any]
    leaves: Callable[[Case, Normal], dict[str, Tensor]] = _no_leaves

    def keep(self, x: Inputs) -> Callable[..., Any]:
        """The set as a predicate of (b, h, i, j)."""
        return lambda b, h, i, j: self.kept(x, b, h, i, j)

    def __and__(self, other: MaskKind) -> MaskKind:
        return self._joined(other, and_)

    def __or__(self, other: MaskKind) -> MaskKind:
        return self._joined(other, or_)

    def _joined(self, other: MaskKind, join: Callable[[Any, Any], Any]) -> MaskKind:
        return MaskKind(
            lambda x: join(self.build(x), other.build(x)),
            lambda *at: join(self.kept(*at), other.kept(*at)),
            lambda case, normal: self.leaves(case, normal) | other.leaves(case, normal),
        )


@dataclass(frozen=True)
class ScoreKind:
    """build(x): the tilewise Score. applied(x, s, b, h, i, j): the same map. leaves: the tensors that both read."""

    build: Callable[[Inputs], Any]
    applied: Callable[..., Any]
    leaves: Callable[[Case, Normal], dict[str, Tensor]] = _no_leaves

    def apply(self, x: Inputs) -> Callable[..., Any]:
        """The map as a function of (s, b, h, i, j)."""
        return lambda s, b, h, i, j: self.applied(x, s, b, h, i, j)


def _sparse(block: int, keep_share: float) -> MaskKind:
    """A random pattern of blocks, its diagonal always kept, the same for every batch element and head."""

    def leaves(case: Case, normal: Normal) -> dict[str, Tensor]:
        blocks_q, blocks_k = -(-case.seqlen_q // block), -(-case.seqlen_k // block)
        pattern = torch.rand(blocks_q, blocks_k, generator=torch.Generator().manual_seed(0)) < keep_share
        return {"pattern": pattern | torch.eye(blocks_q, blocks_k, dtype=torch.bool)}

    return MaskKind(
        lambda x: tw.block_sparse(x.leaves["pattern"], block, block),
        lambda x, b, h, i, j: x.leaves["pattern"][i // block, j // block],
        leaves,
    )


def _selected(block: int, block_q: int, count: int) -> MaskKind:
    """``count`` random blocks for each key head and row, some of them twice and some none."""

    def leaves(case: Case, normal: Normal) -> dict[str, Tensor]:
        generator, rows = torch.Generator().manual_seed(0), -(-case.seqlen_q // block_q)
        keys = [nk for _, nk in case.lengths] or [case.seqlen_k] * case.batch
        shape = (case.heads_k, rows, count)
        given = [torch.randint(-1, -(-nk // block), shape, generator=generator) for nk in keys]
        return {"entries": torch.stack(given) if given else torch.zeros(0, *shape, dtype=torch.int64)}

    def kept(x: Inputs, b: Any, h: Any, i: Any, j: Any) -> Any:
        group = x.case.heads_q // x.case.heads_k
        return (x.leaves["entries"][b, h // group, i // block_q] == (j // block)[..., None]).any(-1)

    return MaskKind(lambda x: tw.selected(x.leaves["entries"], block, block_q), kept, leaves)


def _document_ids(case: Case, normal: Normal) -> dict[str, Tensor]:
    """Document number of each position: lengths drawn uniformly around an eighth of the sequence, never decreasing."""
    generator = torch.Generator().manual_seed(0)
    mean = max(2, case.seqlen_k // 8)
    ends = torch.randint(mean // 2, mean + mean // 2, (case.seqlen_k,), generator=generator).cumsum(0)
    return {"ids": torch.searchsorted(ends, torch.arange(case.seqlen_k), right=True).to(torch.int32)}


def document_lengths(n: int) -> list[int]:
    """Lengths of documents that fill n positions, log-uniform between 128 and 8,192 as a packed batch of texts has them."""
    generator, lengths = torch.Generator().manual_seed(0), []
    while (left := n - sum(lengths)) > 0:
        drawn = 128.0 * 64.0 ** torch.rand((), generator=generator).item()
        lengths.append(min(left, round(drawn)))
    return lengths


def _text_ids(case: Case, normal: Normal) -> dict[str, Tensor]:
    """Document number of each position of a packed batch of texts."""
    lengths = torch.tensor(document_lengths(case.seqlen_k))
    return {"ids": torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)}


def _lengths(case: Case, normal: Normal) -> dict[str, Tensor]:
    """Keys that are no padding, by batch element: from all of them down to half."""
    return {"n": torch.tensor([case.seqlen_k - b * case.seqlen_k // (2 * case.batch) for b in range(case.batch)])}


def _dense_mask(case: Case, normal: Normal) -> dict[str, Tensor]:
    shape = (case.batch, 1, case.seqlen_q, case.seqlen_k)
    return {"dense": torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5}


def _regions(case: Case, normal: Normal) -> dict[str, Tensor]:
    """The region of each pixel of two kinds of an image's windows, of which one has a single region."""
    place = torch.arange(max(case.seqlen_q, case.seqlen_k))
    return {"regions": torch.stack([place * 0, place % 5 // 3 + 2 * (place >= len(place) // 2)]).int()}


def _shifted(case: Case, normal: Normal) -> dict[str, Tensor]:
    """The region that each pixel of the four kinds of shifted windows comes from (Liu et al. 2021, figure 4)."""
    n = max(case.seqlen_q, case.seqlen_k)
    side, place = math.isqrt(n), torch.arange(n)
    right, below = place % side >= side // 2, place // side >= side // 2
    return {"regions": torch.stack([0 * place, right, 2 * below, right + 2 * below]).int()}


def _of_regions(leaves: Callable[[Case, Normal], dict[str, Tensor]]) -> MaskKind:
    """A pixel sees those of its own region; each batch element has the next row of ``regions``."""

    def same(x: Inputs, b: Any, h: Any, i: Any, j: Any) -> Any:
        of = x.leaves["regions"]
        return of[b % len(of), i] == of[b % len(of), j]

    return MaskKind(lambda x: tw.keep(lambda b, h, i, j: same(x, b, h, i, j)), same, leaves)


def _firsts(case: Case, normal: Normal) -> dict[str, Tensor]:
    """The keys that every query sees, by batch element and head."""
    count = case.batch * case.heads_q
    return {"first": (torch.arange(count) * case.seqlen_k // max(count, 1)).view(case.batch, case.heads_q)}


def _documents(ids: Callable[[Case, Normal], dict[str, Tensor]]) -> MaskKind:
    """A position sees those of its own document."""
    same = lambda x, b, h, i, j: x.leaves["ids"][i + x.off] == x.leaves["ids"][j]  # noqa: E731
    return MaskKind(lambda x: tw.documents(x.leaves["ids"]), same, ids)


def _window(left: int | None, right: int = 0) -> MaskKind:
    def kept(x: Inputs, b: Any, h: Any, i: Any, j: Any) -> Any:
        before = j <= i + x.off + right
        return before if left is None else before & (j >= i + x.off - left)

    return MaskKind(lambda x: tw.window(left=left, right=right), kept)


def _predicate(keep: Callable[..., Any]) -> MaskKind:
    return MaskKind(lambda x: tw.keep(keep), lambda x, *at: keep(*at))


def _first(x: Inputs) -> int:
    """The keys that every query sees under "prefix"."""
    return x.case.seqlen_k // 3


SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125)
"""Of the blocks that patterns keep beside their diagonal (FlashAttention, figure 2, right)."""

CAUSAL, TEXTS = MaskKind(lambda x: tw.causal(), lambda x, b, h, i, j: j <= i + x.off), _documents(_text_ids)
MASKS: dict[str | None, MaskKind] = {
    "causal": CAUSAL,
    "window-8": _window(7),
    "window-both": _window(5, 9),
    "window-right": _window(None, 3),
    "window-512": _window(511),
    "window-1024": _window(1023),
    "causal-window-16": CAUSAL & _window(15, 4),
    "prefix": MaskKind(lambda x: tw.prefix(_first(x)), lambda x, b, h, i, j: (j <= i + x.off) | (j < _first(x))),
    "prefix-of-each": MaskKind(
        lambda x: tw.prefix(x.leaves["first"]),
        lambda x, b, h, i, j: (j <= i + x.off) | (j < x.leaves["first"][b, h]),
        _firsts,
    ),
    "key-range": MaskKind(
        lambda x: tw.key_range(2, x.case.seqlen_k - 3),
        lambda x, b, h, i, j: (j >= 2) & (j < x.case.seqlen_k - 3) & (i >= 0),
    ),
    "key-lengths": MaskKind(
        lambda x: tw.key_lengths(x.leaves["n"]), lambda x, b, h, i, j: (j < x.leaves["n"][b]) & (i >= 0), _lengths
    ),
    "documents": CAUSAL & _documents(_document_ids),
    "texts": CAUSAL & TEXTS,
    "texts-window-512": _window(511) & TEXTS,
    "block-causal-1024": _predicate(lambda b, h, i, j: j // 1024 <= i // 1024),
    "prefix-4096": MaskKind(lambda x: tw.prefix(4096), lambda x, b, h, i, j: (j <= i + x.off) | (j < 4096)),
    "keep-odd": _predicate(lambda b, h, i, j: (i + 2 * j + h) % 3 != 0),
    "regions": _of_regions(_regions),
    "shifted-windows": _of_regions(_shifted),
    "window-or-first": _window(7) | MaskKind(lambda x: tw.key_range(0, 4), lambda x, b, h, i, j: (j < 4) & (i >= 0)),
    "dense": MaskKind(
        lambda x: tw.dense(x.leaves["dense"]), lambda x, b, h, i, j: x.leaves["dense"][b, 0, i, j], _dense_mask
    ),
    "sparse-16": _sparse(block=16, keep_share=0.4),
    "sparse-90": _sparse(block=128, keep_share=0.1),
    **{f"blocks-{share:g}": _sparse(block=128, keep_share=share) for share in SHARES},
    "selected": _selected(block=1, block_q=1, count=9),
    "selected-causal": _selected(block=1, block_q=1, count=20) & CAUSAL,
    "selected-16": _selected(block=16, block_q=8, count=2),
    "nothing": MaskKind(lambda x: tw.key_range(0, 0), lambda x, b, h, i, j: (j < 0) & (i < 0)),
}


def _slopes(case: Case, normal: Normal) -> dict[str, Tensor]:
    """ALiBi's geometric slopes, 2^(-8 (h + 1) / H)."""
    h = torch.arange(1, case.heads_q + 1, dtype=leaf_dtype(case))
    return {"slopes": torch.exp2(-8.0 * h / case.heads_q)}


def _pair_bias(dtype: Callable[[Case], torch.dtype]) -> ScoreKind:
    """A bias by head and pair, the same for the whole batch."""

    def leaves(case: Case, normal: Normal) -> dict[str, Tensor]:
        return {"bias": normal(1, case.heads_q, case.seqlen_q, case.seqlen_k, dtype=dtype(case))}

    add = lambda x, s, b, h, i, j: s + x.leaves["bias"][0, h, i, j]  # noqa: E731
    return ScoreKind(lambda x: tw.bias(x.leaves["bias"]), add, leaves)


def _softcap(cap: float) -> ScoreKind:
    return ScoreKind(lambda x: tw.softcap(cap), lambda x, s, b, h, i, j: cap * torch.tanh(s / cap))


def _table(case: Case, normal: Normal) -> dict[str, Tensor]:
    return {"table": normal(case.heads_q, 32, dtype=leaf_dtype(case))}


def _alibi(x: Inputs, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s - x.leaves["slopes"][h] * (i + x.off - j).abs()


def _relative(x: Inputs, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """A learned table by head and distance, as T5's bias but with one bucket a distance, clamped to 32."""
    return s + x.leaves["table"][h, (i + x.off - j).abs().clamp(0, 31)]


SCORES: dict[str | None, ScoreKind] = {
    "softcap-30": _softcap(30.0),
    "softcap-2": _softcap(2.0),
    "alibi": ScoreKind(lambda x: tw.alibi(x.leaves["slopes"]), _alibi, _slopes),
    "bias": _pair_bias(leaf_dtype),
    "bias-16": _pair_bias(lambda case: getattr(torch, case.dtype)),
    "relative": ScoreKind(lambda x: tw.score(lambda s, b, h, i, j: _relative(x, s, b, h, i, j)), _relative, _table),
    "softcap-alibi": ScoreKind(
        lambda x: tw.softcap(5.0) >> tw.alibi(x.leaves["slopes"]),
        lambda x, s, *at: _alibi(x, 5.0 * torch.tanh(s / 5.0), *at),
        _slopes,
    ),
}
