"""The private functions of flash-attn 2.8 that other libraries import: forwards without autograd, and their backwards.

They are what context parallelism is built of (ring-flash-attention, yunchang, MagiAttention): a backward takes the ``out`` and the
``softmax_lse`` of the *whole* attention and gives the gradients of one piece of it. Where they differ from the original:

- ``rng_state`` is ``[seed, 0]``, int64: the seed of :func:`tilewise.dropout_mask`.
- ``softmax_d`` is ``rowsum(dout * out)`` in fp32, ``(batch, heads, seqlen_q)`` or ``(heads, total_q)``, without padding.
- ``S_dmask`` holds signs, as in :mod:`tilewise.compat.flash_attn`.
"""

from __future__ import annotations

import torch
from torch import Tensor

import tilewise as tw
from tilewise.compat.flash_attn import _keywords, _seed, _signs
from tilewise.compat.refusals import refuse

_PAGES = {
    "block_table": "a paged cache; use flash_attn_varlen_func or tw.attention_paged",
    "leftpad_k": "padding before the keys; leave those rows out and give the cu_seqlens_k of the rest",
    "seqused_k": "unused rows among the keys; leave them out and give the cu_seqlens_k of the rest",
}


def _forward(qkv: tuple[Tensor, ...], cu: tuple[Tensor, ...], lengths: tuple, options: dict, signs: bool) -> tuple:
    """``(out, softmax_lse, S_dmask, rng_state)``; ``lengths`` are the last two sizes of S_dmask."""
    q, p = qkv[0], options["dropout_p"]
    seed = _seed(p, q)
    rng_state = torch.zeros(2, dtype=torch.int64, device=q.device) if seed is None else torch.cat([seed, seed * 0])
    with torch.no_grad():
        if cu:
            out, lse = tw.attention_varlen(*qkv, *cu, return_lse=True, dropout_seed=seed, **options)
        else:
            out, lse = tw.attention_with_lse(*qkv, dropout_seed=seed, **options)
    shown = q.new_empty(0)
    if signs and p:
        shown = _signs(seed, p, (cu[0].shape[0] - 1 if cu else q.shape[0], q.shape[-2], *lengths), q.dtype)
    return out, lse, shown, rng_state


def _backward(
    dout: Tensor, qkv: tuple, results: tuple, grads: tuple, cu: tuple, options: dict, rng_state: Tensor | None
) -> Tensor:
    """softmax_d; dq, dk and dv are written into ``grads``, where they are tensors. ``results``: out and softmax_lse of the whole."""
    if options["dropout_p"] and rng_state is None:
        raise ValueError("a backward with dropout_p needs the rng_state that its forward returned")
    out, lse = results
    lse = lse.to(torch.float64 if out.dtype == torch.float64 else torch.float32)
    lse = lse.where(lse != torch.inf, -torch.inf)  # the original marks a row without keys so
    options |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu, strict=False))
    if options["dropout_p"]:
        options["dropout_seed"] = rng_state[:1]
    with torch.no_grad():
        found = tw.attention_backward(dout, *qkv, out, lse, **options)
        for grad, x in zip(grads, found, strict=True):
            if grad is not None:
                grad.copy_(x)
        return (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(-1, -2)


def _flash_attn_forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    return_softmax,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(out, softmax_lse, S_dmask, rng_state)`` of :func:`tilewise.compat.flash_attn.flash_attn_func`'s tensors."""
    window = (window_size_left, window_size_right)
    options = _keywords(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, False)
    return _forward((q, k, v), (), (q.shape[1], k.shape[1]), options, return_softmax)


def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    zero_tensors=False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(out, softmax_lse, S_dmask, rng_state)`` of packed sequences; ``zero_tensors`` changes nothing, rows outside are zero."""
    given = {"block_table": block_table, "leftpad_k": leftpad_k, "seqused_k": seqused_k}
    refuse("_flash_attn_varlen_forward", given, _PAGES)
    window = (window_size_left, window_size_right)
    options = _keywords(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, False)
    cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return _forward((q, k, v), cu, longest, options, return_softmax)


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
) -> Tensor:
    """softmax_d ``(batch, heads, seqlen_q)``; dq, dk and dv, where they are tensors, are overwritten."""
    window = (window_size_left, window_size_right)
    options = _keywords(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    return _backward(dout, (q, k, v), (out, softmax_lse), (dq, dk, dv), (), options, rng_state)


def _flash_attn_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
    zero_tensors=False,
) -> Tensor:
    """softmax_d ``(heads, total_q)``; dq, dk and dv, where they are tensors, are overwritten."""
    window = (window_size_left, window_size_right)
    options = _keywords(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    cu = (cu_seqlens_q, cu_seqlens_k)
    return _backward(dout, (q, k, v), (out, softmax_lse), (dq, dk, dv), cu, options, rng_state)


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
]
