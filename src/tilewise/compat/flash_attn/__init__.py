"""flash-attn 2.8's functions over tilewise's op: its names, argument order, defaults and return values.

They take the same tensors in the same layout, ``(batch, seqlen, heads, head_dim)`` or packed ``(total, heads, head_dim)``. They also
take any device, fp32 and fp64, any head_dim, another head_dim for v, dropout together with softcap, and give gradients for
``alibi_slopes`` and ``softmax_lse``. ``interface_3`` and ``cute`` are generations 3 and 4, ``kvcache`` is the call over a cache.
``private`` and ``bert_padding`` have what other libraries import, and ``installation`` makes ``import flash_attn`` find all of it. The
differences:

- A row that sees no key has ``softmax_lse = -inf``; the original's kernels store +inf.
- ``S_dmask`` holds only signs: ``+1`` kept, ``-1`` dropped. The original has signs on probabilities that it does not guarantee. A call
  without dropout has none, and reading it raises.
- ``max_seqlen_*`` only set the size of ``S_dmask``. They and ``window_size`` may be ints, NumPy numbers or tensors of one element, which
  the host reads.
- ``deterministic=False`` follows ``torch.use_deterministic_algorithms``.
- Pages (``block_table``) may have any size. Packed calls over pages raise in the backward, as in the original;
  ``flash_attn_with_kvcache`` raises at once if a gradient is wanted.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Never

import torch
from torch import Tensor

import tilewise as tw
from tilewise.compat.flash_attn import bert_padding
from tilewise.compat.flash_attn.kvcache import CacheCall
from tilewise.compat.refusals import need_tensors
from tilewise.dropout import new_seed

__version__ = "2.8.3+tilewise"  # whose interface this is

Result = Tensor | tuple[Tensor, Tensor, "Tensor | NoProbabilities"]


class NoProbabilities:
    """``S_dmask`` of a call without dropout, where the original computes nothing either; reading it raises."""

    def _refuse(self, *_: object) -> None:
        raise NotImplementedError(
            "S_dmask was read, but without dropout it encodes nothing and the probabilities are never computed; "
            "tilewise.reference.attention returns (o, lse, probabilities), with the whole matrix in memory"
        )

    __array__ = __getitem__ = __len__ = __iter__ = __bool__ = _refuse

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


def _whole(name: str, n: object) -> int:
    """Return a whole number given as an int, a NumPy number or a tensor of one; a tensor is read on the host."""
    try:
        return n if isinstance(n, int) else operator.index(n)
    except (TypeError, ValueError):
        raise ValueError(f"{name} takes whole numbers, got {n!r}") from None


def _pair(window_size: object, unbounded: object) -> Sequence:
    """Return a window, which must be ``(left, right)``."""
    if window_size is None or isinstance(window_size, (int, float)) or len(window_size) != 2:
        raise ValueError(f"window_size must be (left, right), {unbounded} unbounded, got {window_size!r}")
    return window_size


def _keywords(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic) -> dict:
    """Return the original's options as keywords of :func:`tilewise.attention`: softcap first, then the slopes."""
    bounds = [_whole("window_size", bound) for bound in _pair(window_size, -1)]
    left, right = (None if bound == -1 else bound for bound in bounds)
    scores = [] if softcap == 0.0 else [tw.softcap(softcap)]
    scores += [] if alibi_slopes is None else [tw.alibi(alibi_slopes)]
    return {
        "causal": causal,
        "mask": None if left is None and right is None else tw.window(left, right),
        "score": None if not scores else scores[0] if len(scores) == 1 else scores[0] >> scores[1],
        "softmax_scale": softmax_scale,
        "dropout_p": dropout_p,
        "deterministic": deterministic or None,
    }


def _unpacked(packed: Tensor, count: int, name: str) -> tuple[Tensor, ...]:
    """Return the ``count`` tensors along the third axis from the end: views, whose gradients are stacked once."""
    need_tensors("flash_attn", **{name: packed})
    if packed.ndim < 4 or packed.shape[-3] != count:
        shape = f"(batch, seqlen, {count}, heads, head_dim), packed (total, {count}, heads, head_dim)"
        raise ValueError(f"{name} must be {shape}; got {tuple(packed.shape)}")
    return packed.unbind(-3)


def _run(
    attend: Callable, q: Tensor, sizes: tuple[int, int, int, int], options: dict, return_attn_probs: bool
) -> Result:
    """Run ``attend``, which gives out and lse; ``sizes`` are those of S_dmask."""
    p = options["dropout_p"]
    seed = _seed(p, q)
    out, lse = attend(dropout_seed=seed, **options)
    if not return_attn_probs:
        return out
    if seed is None:
        return out, lse, NoProbabilities()
    return out, lse, _signs(seed, p, sizes, q.dtype)


def _seed(p: float, q: Tensor) -> Tensor | None:
    """Draw a seed of dropout here, so that the mask can be shown; None without dropout."""
    return new_seed(q.device) if p else None


def _signs(seed: Tensor, p: float, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return S_dmask of ``sizes (batch, heads, longest queries, longest keys)``."""
    batch, heads, *lengths = sizes
    longest = [_whole("max_seqlen", n) for n in lengths]
    return torch.where(tw.dropout_mask(seed, p, batch, heads, *longest), 1.0, -1.0).to(dtype)


def _over_pages(q: Tensor, cache: tw.PagedCache, cu_seqlens_q: Tensor, options: dict, probs: bool) -> Result:
    if options.pop("dropout_p"):
        raise NotImplementedError("dropout_p with a block_table: a cache is for inference, where dropout_p is 0")
    attend = partial(tw.attention_paged_with_lse, q, cache, cu_seqlens_q, **options)
    leaves = () if options["score"] is None else options["score"].leaves
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (q, cache.k_pages, cache.v_pages, *leaves))
    out, lse = _ForwardAlone.apply(attend, q, cache.k_pages, cache.v_pages, *leaves) if wanted else attend()
    return (out, lse, NoProbabilities()) if probs else out


class _ForwardAlone(torch.autograd.Function):
    """What a function computes, with a node of the graph that refuses the backward: libraries train and generate by one call."""

    @staticmethod
    def forward(ctx: object, attend: Callable[[], tuple[Tensor, Tensor]], *tensors: Tensor) -> tuple[Tensor, Tensor]:
        return attend()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Never:
        raise NotImplementedError(
            "the backward of flash_attn_varlen_func with a block_table: pages have no gradient, in the original either; gather the "
            "sequences' keys and values into packed k and v and leave block_table out, or call it under torch.no_grad()"
        )


# -- The functions ---------------------------------------------------------------------------------------------------


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
) -> Result:
    """Compute attention of ``q (batch, seqlen_q, heads, head_dim)`` over ``k, v (batch, seqlen_k, heads_k, head_dim)``.

    Args:
        dropout_p: probability of dropping a pair. softmax_scale: default ``1 / sqrt(head_dim)``.
        causal: aligned at the last query and key. window_size: ``(left, right)``, -1 unbounded.
        softcap: above 0, ``softcap * tanh(s / softcap)``. alibi_slopes: ``(heads,)`` or ``(batch, heads)``.
        deterministic: bitwise repeatable. return_attn_probs: also return softmax_lse and S_dmask.

    Returns:
        out ``(batch, seqlen_q, heads, head_dim_v)``; with ``return_attn_probs`` also softmax_lse
        ``(batch, heads, seqlen_q)`` and S_dmask ``(batch, heads, seqlen_q, seqlen_k)``.
    """
    options = _keywords(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    need_tensors("flash_attn_func", q=q, k=k, v=v)
    sizes = (q.shape[0], q.shape[-2], q.shape[1], k.shape[1])
    return _run(partial(tw.attention_with_lse, q, k, v), q, sizes, options, return_attn_probs)


def _with_its_options(function: Callable[..., Result]) -> Callable[..., Result]:
    """Give a function of other tensors the options of :func:`flash_attn_func`, which it hands on, in its signature."""
    named = [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    options = list(inspect.signature(flash_attn_func).parameters.values())[3:]
    function.__signature__ = inspect.Signature([*named, *options], return_annotation="Result")
    return function


@_with_its_options
def flash_attn_kvpacked_func(q, kv, *options, **more) -> Result:
    """Compute :func:`flash_attn_func` of ``kv (batch, seqlen_k, 2, heads_k, head_dim)``."""
    return flash_attn_func(q, *_unpacked(kv, 2, "kv"), *options, **more)


@_with_its_options
def flash_attn_qkvpacked_func(qkv, *options, **more) -> Result:
    """Compute :func:`flash_attn_func` of ``qkv (batch, seqlen, 3, heads, head_dim)``."""
    return flash_attn_func(*_unpacked(qkv, 3, "qkv"), *options, **more)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
) -> Result:
    """Compute :func:`flash_attn_func` of packed ``q (total_q, heads, head_dim)`` and ``k, v (total_k, heads_k, head_dim)``.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 ``(batch + 1,)``, where sequences start and the last one ends.
        block_table: int32 ``(batch, max_blocks)``; k and v are then pages ``(num_blocks, page_block_size, heads_k, head_dim)``, and
            there is no dropout, and the backward raises.

    Returns:
        out ``(total_q, heads, head_dim_v)``; with ``return_attn_probs`` also softmax_lse ``(heads, total_q)`` and S_dmask
        ``(batch, heads, max_seqlen_q, max_seqlen_k)``.
    """
    options = _keywords(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    need_tensors("flash_attn_varlen_func", q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if block_table is not None:
        cache = tw.paged(k, v, block_table, cu_seqlens_k.diff().to(torch.int32))
        return _over_pages(q, cache, cu_seqlens_q, options, return_attn_probs)
    sizes = (cu_seqlens_q.shape[0] - 1, q.shape[-2], max_seqlen_q, max_seqlen_k)
    attend = partial(tw.attention_varlen, q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True)
    return _run(attend, q, sizes, options, return_attn_probs)


@_with_its_options
def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options, **more
) -> Result:
    """Compute :func:`flash_attn_varlen_func` of ``kv (total_k, 2, heads_k, head_dim)``."""
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, *_unpacked(kv, 2, "kv"), *lengths, *options, **more)


@_with_its_options
def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, *options, **more) -> Result:
    """Compute :func:`flash_attn_varlen_func` of ``qkv (total, 3, heads, head_dim)``."""
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(*_unpacked(qkv, 3, "qkv"), *lengths, *options, **more)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of ``q (batch, seqlen_q, heads, head_dim)`` over a cache, into which ``k`` and ``v`` are written first, in place.

    Args:
        k_cache, v_cache: ``(batch_cache, seqlen_cache, heads_k, head_dim)``; with ``block_table`` pages ``(num_blocks, page_block_size,
            heads_k, head_dim)`` of any size.
        k, v: ``(batch, seqlen_new, heads_k, head_dim)``, written behind the first ``cache_seqlens`` keys.
        rotary_cos, rotary_sin: ``(seqlen_rotary, rotary_dim / 2)``, by which the new keys are turned, at positions ``cache_seqlens``,
            ``cache_seqlens + 1`` and so on, and the queries, at those positions under ``causal`` or a window, else all at
            ``cache_seqlens``. rotary_interleaved: turns dimensions 2n and 2n + 1 together, else n and n + rotary_dim / 2.
        cache_seqlens: int, or int32 ``(batch,)``, keys before the new ones; they stay so. Default: the cache is full.
        cache_batch_idx: ``(batch,)``, the row of the cache that each sequence has. cache_leftpad: ``(batch,)``, keys at the front that
            nobody sees. block_table: int32 ``(batch, max_blocks)``.
        num_splits: how the original shares out its work; it changes no result and is not needed.
        causal, window_size, softcap, alibi_slopes, softmax_scale: as in :func:`~tilewise.compat.flash_attn.flash_attn_func`, rows
            counted from the last key.

    Returns:
        out ``(batch, seqlen_q, heads, head_dim_v)``; with ``return_softmax_lse`` also softmax_lse ``(batch, heads, seqlen_q)``.

    Raises:
        ValueError: a wrong call, also one that wants gradients: this function has none, in the original either.
    """
    options = _keywords(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False)
    del options["dropout_p"]
    # fmt: off
    call = CacheCall(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, rotary_interleaved, cache_seqlens, cache_batch_idx,
                     cache_leftpad, block_table)
    # fmt: on
    out, lse = call.attend(options)
    return (out, lse) if return_softmax_lse else out


# -- Standing in for the package --------------------------------------------------------------------------------------

_FUNCTIONS = (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)


def install_as_flash_attn(generation: int = 2) -> None:
    """Make ``import flash_attn`` return this module's functions, and ``importlib.metadata`` find a distribution of that name.

    Call it before importing libraries that try the import or look up the version. Generation 3 is ``flash_attn_interface``, and 4
    ``flash_attn.cute``; each has functions of its own (:mod:`.interface_3`, :mod:`.cute`).

    Raises:
        ValueError: the real module is installed or already imported, or the generation is not 2, 3 or 4.
    """
    from tilewise.compat.flash_attn.installation import install

    install(generation)


__all__ = ["bert_padding", "install_as_flash_attn", *[f.__name__ for f in _FUNCTIONS]]
