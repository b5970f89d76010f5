"""FlashAttention-4's functions, those of its package ``flash_attn.cute``, over tilewise's op.

``num_splits`` and ``pack_gqa`` tune the original's kernels; they are accepted and have no effect. ``learnable_sink`` has its gradient
here. Mods in the original's kernel language (``score_mod``, ``mask_mod``), lists of blocks, pages and unused rows are refused by name.
"""

from __future__ import annotations

from torch import Tensor

import tilewise as tw
from tilewise.compat.flash_attn import _keywords, _pair, _whole
from tilewise.compat.refusals import refuse

_BLOCKS = (
    "lists of blocks; say the pattern by tw.block_sparse or tw.keep, whose lists are made here, and call tw.attention"
)
REFUSED = {
    "score_mod": "it is written in CuTe; write it as a function of (s, b, h, i, j) and call tw.attention(score=...)",
    "mask_mod": "it is written in CuTe; write it as a function of (b, h, i, j) and call tw.attention(mask=...)",
    "aux_tensors": "they belong to a mod in CuTe; a function for tw.attention captures its tensors",
    "block_sparse_tensors": _BLOCKS,
    "full_block_cnt": _BLOCKS,
    "full_block_idx": _BLOCKS,
    "mask_block_cnt": _BLOCKS,
    "mask_block_idx": _BLOCKS,
    "page_table": "pages; tw.attention_paged attends to them",
    "seqused_q": "unused rows; leave them out and give the cu_seqlens_q of the rest",
    "seqused_k": "unused rows; leave them out and give the cu_seqlens_k of the rest, or tw.attention_paged with a tw.dense_cache",
}
_NEEDLESS = {
    "num_splits",
    "pack_gqa",
    "block_size",
    "cu_total_m_blocks",
    "cu_total_n_blocks",
    "max_seqlen_q",
    "max_seqlen_k",
}


def _options(softmax_scale, causal, window_size, learnable_sink, softcap, deterministic) -> dict:
    options = _keywords(0.0, softmax_scale, causal, _window(window_size, causal), softcap or 0.0, None, deterministic)
    return options | {"sink": learnable_sink}


def _window(window_size: object, causal: bool) -> tuple[int, int]:
    """Return a window as generation 2 has it, -1 for unbounded; here a negative bound alone is a bound."""
    left, right = (None if bound is None else _whole("window_size", bound) for bound in _pair(window_size, None))
    right = None if causal else right  # 0, whatever was given
    negative = [bound is not None and bound < 0 for bound in (left, right)]
    if all(negative) or (causal and negative[0]):
        return -1, -1
    if any(negative):
        raise NotImplementedError(
            f"window_size {(left, right)}: one negative bound hides keys beside a query, which is not built; None is unbounded, and "
            "tw.attention(mask=tw.keep(lambda b, h, i, j: ...)) keeps any pairs (query i stands at key i + tw.offset)"
        )
    return tuple(-1 if bound is None else bound for bound in (left, right))


def _refuse(function: str, given: dict) -> None:
    refuse(function, given, REFUSED)
    unknown = sorted(set(given) - set(REFUSED) - _NEEDLESS)
    if unknown:
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown[0]!r}")


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    *,
    return_lse=False,
    **refused: object,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of ``q (batch, seqlen_q, heads, head_dim)`` over ``k, v (batch, seqlen_k, heads_k, head_dim)``.

    Args:
        window_size: ``(left, right)``, None unbounded; two negative bounds are no window, and one is refused.
        learnable_sink: ``(heads,)``, a logit per head without a value.
        refused: the arguments of :data:`REFUSED`, which differ between the original's versions.

    Returns:
        out ``(batch, seqlen_q, heads, head_dim_v)``, and with ``return_lse`` its lse ``(batch, heads, seqlen_q)``, else None.
    """
    _refuse("flash_attn_func", refused)
    options = _options(softmax_scale, causal, window_size, learnable_sink, softcap, deterministic)
    out, lse = tw.attention_with_lse(q, k, v, **options)
    return out, lse if return_lse else None


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    *,
    return_lse=False,
    **refused: object,
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`flash_attn_func` of packed ``q (total_q, heads, head_dim)`` and ``k, v (total_k, heads_k, head_dim)``.

    Returns:
        out ``(total_q, heads, head_dim_v)``, and with ``return_lse`` its lse ``(heads, total_q)``, else None.

    Raises:
        ValueError: one of q and k is packed and the other is not.
    """
    _refuse(
        "flash_attn_varlen_func", refused | {"seqused_q": seqused_q, "seqused_k": seqused_k, "page_table": page_table}
    )
    options = _options(softmax_scale, causal, window_size, learnable_sink, softcap, deterministic)
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k come together; pack q and k both, or neither")
    if cu_seqlens_q is None:
        out, lse = tw.attention_with_lse(q, k, v, **options)
    else:
        out, lse = tw.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True, **options)
    return out, lse if return_lse else None


__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
