"""FlashAttention-3's functions, those of its module ``flash_attn_interface``, over tilewise's op.

``num_splits``, ``pack_gqa`` and ``sm_margin`` tune the original's kernels; they are accepted and have no effect. ``qv``, unused rows
(``seqused_*``) and fp8 (``*_descale``) outside a cache are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import tilewise as tw
from tilewise.compat.flash_attn import _keywords, _unpacked, _whole
from tilewise.compat.flash_attn.kvcache import CacheCall
from tilewise.compat.refusals import need_tensors, refuse

_FP8 = "fp8 is built for caches alone; multiply q, k and v by their scales in 16 bits"
REFUSED = {
    "qv": "a second product of queries with values is not built; append qv to q, and v to k",
    "q_descale": _FP8,
    "k_descale": _FP8,
    "v_descale": _FP8,
    "seqused_q": "unused rows; leave them out and give the cu_seqlens_q of the rest",
    "seqused_k": "unused rows; leave them out and give the cu_seqlens_k of the rest, or tw.attention_paged with a tw.dense_cache",
}

_ROTARY = {
    "rotary_seqlens": "rotary embeddings at other positions than the cache's lengths; turn q and k before the call"
}


def _options(
    softmax_scale, causal, window_size, attention_chunk, softcap, deterministic, leftpad: Tensor | None = None
) -> dict:
    options = _keywords(0.0, softmax_scale, causal, window_size, softcap, None, deterministic)
    attention_chunk = _whole("attention_chunk", attention_chunk)
    if attention_chunk < 0:
        raise ValueError(f"attention_chunk must be at least 0, which is none, got {attention_chunk}")
    if attention_chunk:
        same = tw.keep(_same_chunk(attention_chunk, leftpad))
        options["mask"] = same if options["mask"] is None else options["mask"] & same
    return options


def _same_chunk(size: int, leftpad: Tensor | None) -> Callable:
    """Return whether query and key are in one chunk; the first one begins behind ``leftpad (batch,)`` keys."""
    if leftpad is None:
        return lambda b, h, i, j: (i + tw.offset) // size == j // size

    def same(b, h, i, j):
        first = tw.lookup(leftpad, b)
        return (i + tw.offset - first) // size == (j - first) // size

    return same


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of ``q (batch, seqlen_q, heads, head_dim)`` over ``k, v (batch, seqlen_k, heads_k, head_dim)``.

    Args:
        attention_chunk: above 0, a query sees the keys of its own chunk of that many positions, its own counted from the last.
        causal, window_size, softcap, deterministic: as in :func:`tilewise.compat.flash_attn.flash_attn_func`.

    Returns:
        out ``(batch, seqlen_q, heads, head_dim_v)``; with ``return_attn_probs`` also softmax_lse ``(batch, heads, seqlen_q)``.
    """
    given = {"qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    refuse("flash_attn_func", given, REFUSED)
    options = _options(softmax_scale, causal, window_size, attention_chunk, softcap, deterministic)
    out, lse = tw.attention_with_lse(q, k, v, **options)
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv,
    softmax_scale=None,
    causal=False,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    deterministic=False,
    num_heads_q=None,
    sm_margin=0,
    return_attn_probs=False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute :func:`flash_attn_func` of ``qkv (batch, seqlen, 3, heads, head_dim)`` or ``(batch, seqlen, heads + 2 * heads_k, head_dim)``.

    Args:
        num_heads_q: the number of query heads, which a tensor of four dimensions needs.
    """
    need_tensors("flash_attn_qkvpacked_func", qkv=qkv)
    if qkv.ndim == 5:
        q, k, v = _unpacked(qkv, 3, "qkv")
    else:
        heads_k = 0 if num_heads_q is None or qkv.ndim != 4 else (qkv.shape[2] - num_heads_q) // 2
        if heads_k < 1 or num_heads_q + 2 * heads_k != qkv.shape[2]:
            raise ValueError(
                "qkv must be (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, num_heads_q + 2 * heads_k, head_dim) with "
                f"num_heads_q; got {tuple(qkv.shape)} and num_heads_q={num_heads_q}"
            )
        q, k, v = qkv.split([num_heads_q, heads_k, heads_k], 2)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    how = {"attention_chunk": attention_chunk, "softcap": softcap, "deterministic": deterministic}
    return flash_attn_func(
        q, k, v, softmax_scale, causal, window_size=window_size, return_attn_probs=return_attn_probs, **descales, **how
    )


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute :func:`flash_attn_func` of packed ``q (total_q, heads, head_dim)`` and ``k, v (total_k, heads_k, head_dim)``.

    Returns:
        out ``(total_q, heads, head_dim_v)``; with ``return_attn_probs`` also softmax_lse ``(heads, total_q)``.
    """
    given = {"qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    refuse("flash_attn_varlen_func", given | {"seqused_q": seqused_q, "seqused_k": seqused_k}, REFUSED)
    options = _options(softmax_scale, causal, window_size, attention_chunk, softcap, deterministic)
    out, lse = tw.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True, **options)
    return (out, lse) if return_attn_probs else out


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return the attention over all keys, from its parts over disjoint keys (:func:`tilewise.merge`).

    Args:
        out_partial: ``(parts, batch, seqlen, heads, head_dim)``. lse_partial: ``(parts, batch, seqlen, heads)``.
        out: where the result is written. out_dtype: default that of ``out_partial``.

    Returns:
        ``(batch, seqlen, heads, head_dim)`` and its lse ``(batch, seqlen, heads)``.
    """
    need_tensors("flash_attn_combine", out_partial=out_partial, lse_partial=lse_partial)
    if out_partial.ndim != 5 or lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            "out_partial must be (parts, batch, seqlen, heads, head_dim) and lse_partial (parts, batch, seqlen, heads); got "
            f"{tuple(out_partial.shape)} and {tuple(lse_partial.shape)}"
        )
    o, lse = tw.merge([(o, lse.transpose(1, 2)) for o, lse in zip(out_partial, lse_partial, strict=True)])
    o = o if out_dtype is None else o.to(out_dtype)
    return (o if out is None else out.copy_(o)), lse.transpose(1, 2)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of q over a cache, into which ``k`` and ``v`` are written first, as
    :func:`tilewise.compat.flash_attn.flash_attn_with_kvcache` describes it; ``page_table`` is its ``block_table``.

    Args:
        q: ``(batch, seqlen_q, heads, head_dim)``, or packed ``(total_q, heads, head_dim)`` with cu_seqlens_q ``(batch + 1,)``.
        k, v: ``(batch, seqlen_new, heads_k, head_dim)``, or packed with cu_seqlens_k_new.
        q_descale, k_descale, v_descale: float32 ``(batch, heads_k)`` or one number, the factors of numbers in float8_e4m3fn. The cache has
            to be of that dtype; q and the new rows may be. Products and out are then in bf16, or in q's dtype of 16 bits.
        max_seqlen_q, scheduler_metadata, num_splits, pack_gqa, sm_margin: how the original shares out its work; they change no result.

    Returns:
        out, like q; with ``return_softmax_lse`` also softmax_lse ``(batch, heads, seqlen_q)``, packed ``(heads, total_q)``.
    """
    refuse("flash_attn_with_kvcache", {"qv": qv, "rotary_seqlens": rotary_seqlens}, REFUSED | _ROTARY)
    leftpad = cache_leftpad if isinstance(cache_leftpad, Tensor) else None  # what is no tensor is refused below
    options = _options(softmax_scale, causal, window_size, attention_chunk, softcap, False, leftpad)
    del options["dropout_p"]
    # fmt: off
    call = CacheCall(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, rotary_interleaved, cache_seqlens, cache_batch_idx,
                     cache_leftpad, page_table, cu_seqlens_q, cu_seqlens_k_new, q_descale, k_descale, v_descale)
    # fmt: on
    out, lse = call.attend(options)
    return (out, lse) if return_softmax_lse else out


__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]
