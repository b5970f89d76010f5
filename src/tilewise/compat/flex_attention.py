"""FlexAttention's names over tilewise's op: change ``from torch.nn.attention.flex_attention import ...`` to this module.

Layouts are FlexAttention's, ``(batch, heads, seqlen, head_dim)``, and mods run unchanged. The differences:

- :func:`create_block_mask` returns a :class:`tilewise.Mask` without blocks and lengths. torch's ``BlockMask`` works too. Its lists are
  read once, and again when they or the tensors of its mask_mod have changed.
- A row that sees no key is zero.
- ``torch.compile`` works and is not needed. ``kernel_options`` is accepted and has no effect.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    and_masks,
    create_mask,
    noop_mask,
    or_masks,
)

import tilewise as tw
from tilewise.caching import edition
from tilewise.compat.refusals import need_tensors
from tilewise.compat.sdpa import HEADS_DIFFER
from tilewise.device import Ready
from tilewise.masks.catalogue import MaskFunction, keep_wrapping
from tilewise.masks.derived import is_recorded, outside_inference
from tilewise.scores.catalogue import ScoreFunction, score_wrapping
from tilewise.words import raise_wrong

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None = None,
    block_mask: BlockMask | tw.Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: object = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Compute ``softmax(score_mod(scale * query keyᵀ)) value`` over the pairs of ``block_mask``; differentiable.

    Args:
        query: ``(batch, heads, seqlen_q, head_dim)``. key: ``(batch or 1, heads_k, seqlen_k, head_dim)``. value: and with head_dim_v.
        score_mod: of (score, b, h, q_idx, kv_idx). block_mask: from :func:`create_block_mask`, torch's own, or any mask of tilewise.
        scale: default ``1 / sqrt(head_dim)``. enable_gqa: heads may be a multiple of heads_k.
        return_lse, return_aux: lse, natural log, and the largest scores, ``(batch, heads, seqlen_q)``.

    Returns:
        o ``(batch, heads, seqlen_q, head_dim_v)``; ``(o, lse)`` with ``return_lse``, ``(o, AuxOutput)`` with ``return_aux``.

    Raises:
        ValueError: a wrong call, as torch's has it. NotImplementedError: a mod that cannot be traced, by what it does.
    """
    need_tensors("flex_attention", query=query, key=key, value=value)
    _check(query, key, value, enable_gqa, return_lse, return_aux)
    if isinstance(score_mod, BlockMask | tw.Mask):
        raise_wrong("flex_attention", [f"score_mod is a {type(score_mod).__name__}; it goes to block_mask="])
    q, k, v = (x.expand(len(query), -1, -1, -1).transpose(1, 2) for x in (query, key, value))
    scored = score_wrapping(score_mod) if callable(score_mod) else score_mod
    options = {"mask": _mask(block_mask, query, key), "score": scored, "softmax_scale": scale}
    if return_aux is not None and return_aux.max_scores:
        stats = tw.attention_with_stats(q, k, v, **options)
        aux = AuxOutput(lse=stats.lse if return_aux.lse else None, max_scores=stats.max_logit)
        return stats.o.transpose(1, 2), aux
    if return_lse or (return_aux is not None and return_aux.lse):
        o, lse = tw.attention_with_lse(q, k, v, **options)
        return o.transpose(1, 2), lse if return_aux is None else AuxOutput(lse=lse)
    o = tw.attention(q, k, v, **options).transpose(1, 2)
    return o if return_aux is None else (o, AuxOutput())


def create_block_mask(
    mask_mod: MaskFunction,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> tw.Mask:
    """Make ``tw.keep(mask_mod)`` with whole numbers of 8 and 16 bits that wrap, as torch's do.

    The other arguments have no effect, because the call lists the tiles.

    ``create_block_mask(...).prepare(q, k)`` lists them once for all layers; q and k are ``(batch, seqlen, heads, head_dim)``.
    """
    return keep_wrapping(mask_mod)


def _check(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, return_lse: bool, return_aux: object) -> None:
    """Raise ValueError for what torch's flex_attention refuses and tilewise, whose layout is another one, would take."""
    reasons = []
    if not query.ndim == key.ndim == value.ndim == 4:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"query, key and value are (batch, heads, seqlen, head_dim), got {shapes}")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        reasons.append(f"query has {query.shape[1]} heads, key {key.shape[1]}; {HEADS_DIFFER}")
    if not {len(key), len(value)} <= {1, len(query)}:
        reasons.append(f"batch differs: query {len(query)}, key {len(key)}, value {len(value)}")
    if not isinstance(return_aux, AuxRequest | None):
        reasons.append(f"return_aux must be AuxRequest(lse=..., max_scores=...) or None, got {return_aux!r}")
    if return_lse and return_aux is not None:
        reasons.append("return_lse and return_aux exclude each other; write return_aux=AuxRequest(lse=True)")
    raise_wrong("flex_attention", reasons)


def _mask(block_mask: object, query: Tensor, key: Tensor) -> object:
    """Return the mask for ``mask=``; a BlockMask keeps what ``mask_mod`` says in listed blocks, and everything in those listed as full."""
    if not isinstance(block_mask, BlockMask):
        return block_mask
    lengths = query.shape[2], key.shape[2]
    if tuple(block_mask.seq_lengths) != lengths:
        raise ValueError(f"block_mask was built for lengths {tuple(block_mask.seq_lengths)} but the call has {lengths}")
    inside = keep_wrapping(block_mask.mask_mod)
    if is_recorded():
        return _of_lists(block_mask, inside)
    made_of = _MadeOf.now(block_mask, inside)
    held = _held.get(block_mask)
    if held is None or not held[0].still(made_of):
        mask = outside_inference(_of_lists, block_mask, inside)
        held = _held[block_mask] = made_of, mask, Ready(mask.sources)
    held[2].await_here()
    return held[1]


class _MadeOf(NamedTuple):
    """The parts that the mask of a BlockMask is made of: calls share one mask, and with it its tiles, while none of them changes.

    Attributes:
        facts: the mask_mod, traced anew at each call, as text; block sizes and lengths; the editions of ``lists``.
        sources: tensors that the mask_mod reads; a mask notices itself when they change. lists: the BlockMask's own.
    """

    facts: tuple
    sources: tuple[Tensor, ...]
    lists: tuple[Tensor, ...]

    @classmethod
    def now(cls, block_mask: BlockMask, inside: tw.Mask) -> _MadeOf:
        every = (
            block_mask.kv_num_blocks,
            block_mask.kv_indices,
            block_mask.full_kv_num_blocks,
            block_mask.full_kv_indices,
        )
        lists = tuple(x for x in every if x is not None)
        editions = tuple(map(edition, lists))
        return cls((inside.text, block_mask.BLOCK_SIZE, block_mask.seq_lengths, editions), inside.sources, lists)

    def still(self, now: _MadeOf) -> bool:
        """Return whether nothing has changed; it may have where an inference tensor's writes are not counted."""
        tensors = (*self.sources, *self.lists), (*now.sources, *now.lists)
        same = len(tensors[0]) == len(tensors[1]) and all(x is y for x, y in zip(*tensors, strict=True))
        return same and self.facts == now.facts and None not in now.facts[-1]


_held: weakref.WeakKeyDictionary[BlockMask, tuple[_MadeOf, tw.Mask, Ready]] = weakref.WeakKeyDictionary()


def _of_lists(block_mask: BlockMask, inside: tw.Mask) -> tw.Mask:
    size_q, size_k = block_mask.BLOCK_SIZE
    columns = -(-block_mask.seq_lengths[1] // size_k)
    seen = _pattern(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    if block_mask.full_kv_indices is None:
        return tw.block_sparse(seen, size_q, size_k) & inside
    full = _pattern(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns)
    return tw.block_sparse(seen | full, size_q, size_k) & (inside | tw.block_sparse(full, size_q, size_k))


def _pattern(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Return the listed blocks, bool ``(..., rows, columns)``: of ``indices (..., rows, any)`` the first ``counts (..., rows)``."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    pattern = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return pattern.scatter(-1, torch.where(listed, indices, columns).long(), True)[..., :columns]
