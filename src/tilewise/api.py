"""The public functions: signatures and docstrings. They assemble a call; the operator checks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Never, Protocol, TypedDict, Unpack, overload

import torch
from torch import Tensor

from tilewise import autograd, batching, dispatch, dropout, flops, nested, repeated, shared_prefix, state, words  # noqa: F401  (batching registers rules)
from tilewise.cache import PagedCache, QuantizedCache, SharedCache, cache_as_options, not_a_cache
from tilewise.documents import in_layout_of, packed_documents, run_packed
from tilewise.masks import Mask, MaskFunction, as_mask
from tilewise.scores import Score, ScoreFunction
from tilewise.spec import Deterministic, Options, Words, assemble, brief, not_tensors
from tilewise.statistics import key_mass, stats_reasons

flops.register()


class Keywords(TypedDict, total=False):
    """The keywords of :func:`attention`, for a type checker."""

    causal: bool
    mask: Mask | Tensor | MaskFunction | None
    score: Score | Tensor | ScoreFunction | None
    softmax_scale: float | None
    sink: Tensor | None
    dropout_p: float
    dropout_seed: int | Tensor | None
    deterministic: Deterministic
    backend: str | None


_KEYWORDS = frozenset(Keywords.__annotations__)


def options_of(function: str, more: Sequence[object], given: Keywords, **others: Any) -> Options:
    """Return the options of a call of ``function``: ``given`` beside ``others``, which no user names.

    Raises:
        TypeError: arguments by position, or a keyword that :func:`attention` lacks.
    """
    unknown = [name for name in given if name not in _KEYWORDS]
    if unknown or more:
        raise words.refused(function, unknown, more)
    return Options(**given, **others)


class Parallel(Protocol):
    """The ranks over which a sequence is sharded: what :func:`tilewise.context_parallel` makes."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, options: Options, with_lse: bool) -> tuple[Any, ...]: ...

    def maximum(self, x: Tensor) -> Tensor: ...

    def explain(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> dispatch.Explanation: ...


class AttentionStats(NamedTuple):
    """The result of :func:`attention_with_stats`; None for a statistic that was not asked for."""

    o: Tensor
    lse: Tensor
    max_logit: Tensor | None = None
    key_mass: Tensor | None = None


def for_each(q: Tensor, k: Tensor, v: Any) -> tuple[Tensor, Tensor]:
    """Return k and v with q's batch if both have a batch of one: views, whose gradients are summed over it."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return k, v
    if q.ndim == k.ndim == v.ndim == 4 and k.size(0) == 1 < q.size(0) and v.size(0) == 1:
        return k.expand(q.size(0), -1, -1, -1), v.expand(q.size(0), -1, -1, -1)
    return k, v


def _is_nested(q: Tensor, k: Tensor, v: Tensor) -> bool:
    tensors = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    return tensors and (q.is_nested or k.is_nested or v.is_nested)


def _run_nested(q: Tensor, k: Tensor, v: Tensor, o: Options, parallel: Parallel | None) -> tuple[Tensor, Tensor]:
    if parallel is not None:
        raise NotImplementedError(
            "parallel= takes dense tensors, not nested ones; call tw.attention_varlen on packed rows"
        )
    qkv, packed = nested.packed_call(q, k, v, o)
    return nested.nested_like(q, *autograd.attention(*qkv, *assemble(*qkv, packed)))


def is_dtensor(x: Any) -> bool:
    """Return whether an argument is a DTensor, without importing what makes one."""
    return type(x) is not Tensor and isinstance(x, Tensor) and hasattr(x, "device_mesh")


def _ranks(parallel: Parallel) -> Parallel:
    if not hasattr(parallel, "attention"):
        raise ValueError(f"parallel= takes what tw.context_parallel(...) returns, got {type(parallel).__name__}")
    return parallel


def _run(
    q: Tensor, k: Tensor, v: Tensor, o: Options, parallel: Parallel | None, with_lse: bool = True
) -> tuple[Tensor, Tensor]:
    if is_dtensor(q) or is_dtensor(k) or is_dtensor(v):
        from tilewise.parallel import dtensors  # which is above this layer, and which no other tensor needs

        if parallel is not None:
            raise ValueError("a DTensor already says how it is sharded: drop parallel=, or pass x.to_local()")
        return dtensors.attention(q, *for_each(q, k, v), o, with_lse)  # type: ignore[arg-type]
    if _is_nested(q, k, v):
        return _run_nested(q, k, v, o, parallel)
    k, v = for_each(q, k, v)
    if parallel is None and run_packed(q, k, v, o):
        qkv, packed = packed_documents(q, k, v, o)
        return in_layout_of(q, *autograd.attention(*qkv, *assemble(*qkv, packed)))
    if parallel is not None:
        return _ranks(parallel).attention(q, k, v, o, with_lse)
    return repeated.over(q, k, v, o, with_lse)


def _run_packed(
    q: Tensor, k: Tensor, v: Tensor, o: Options, parallel: Parallel | None, with_lse: bool = True
) -> tuple[Tensor, Tensor]:
    if o.cu_seqlens_q is None:
        raise ValueError(
            "attention_varlen was called wrongly\n  cu_seqlens_q must be a tensor, got None; sequences of one length go to tw.attention"
        )
    return _run(q, k, v, o, parallel, with_lse)


def _brief(q: Tensor, k: Tensor, v: Tensor, given: Words, options: tuple, lse: bool) -> tuple[Tensor, Tensor] | None:
    """Run a call whose options need no assembling; return None if there is more to look at.

    Args:
        options: sink, dropout_p, dropout_seed and parallel. lse: whether it is read.
    """
    sink, dropout_p, dropout_seed, parallel = options
    if torch.compiler.is_compiling() or not (sink is None and dropout_seed is None and parallel is None):
        return None
    if type(dropout_p) is not float or dropout_p:
        return None
    mask = given[1]
    if type(mask) is Tensor and mask.dtype == torch.bool and mask.ndim <= 4:
        given = (given[0], as_mask(mask), *given[2:])
    found = repeated.attend(q, k, v, given, lse)
    if found is not None:
        return found
    assembled = brief(q, k, v, given)
    return None if assembled is None else autograd.attention(q, k, v, assembled[0], None, assembled[1])


def _run_paged(
    q: Tensor, cache: PagedCache | QuantizedCache | SharedCache, cu_seqlens_q: Tensor | None, o: Options, lse: bool
) -> tuple[Tensor, Tensor]:
    """``lse``: whether it is read."""
    o.cu_seqlens_q = cu_seqlens_q
    if isinstance(cache, SharedCache):
        return shared_prefix.attend(q, cache, o)
    if not isinstance(cache, (PagedCache, QuantizedCache)):
        raise ValueError(f"attention_paged was called wrongly\n  {not_a_cache(cache)}")
    return shared_prefix.over(q, cache, o, lse)


def _run_with_stats(
    q: Tensor, k: Any, v: Tensor | None, o: Options, parallel: Parallel | None, asked: tuple[str, bool]
) -> AttentionStats:
    """``asked``: the largest scores per row or head, if at all, and whether the mass of keys."""
    k, v = _keys_and_values("attention_with_stats", q, k, v, o)
    per, with_mass = asked
    if with_mass and (parallel is not None or o.block_table is not None):
        raise NotImplementedError(
            "attention_with_stats does not support key_mass of a cache or with parallel=; leave it out of stats"
        )
    if parallel is None:
        operator = autograd.with_stats if o.max_logit else autograd.without_stats
        out, lse, *largest = autograd.attention(q, k, v, *assemble(q, k, v, o), operator)
    else:
        out, lse, *largest = _ranks(parallel).attention(q, k, v, o, True)
    if largest and per == "head":
        largest = [state.largest_of_heads(largest[0])]
        largest = largest if parallel is None else [parallel.maximum(largest[0])]
    mass = key_mass(q, k, v, (out, lse), o) if with_mass else None
    return AttentionStats(out, lse, largest[0] if largest else None, mass)


def _keys_and_values(
    call: str, q: Tensor, k: Tensor | PagedCache | QuantizedCache | SharedCache, v: Tensor | None, o: Options
) -> tuple[Tensor, Tensor]:
    """k and v, as :func:`for_each` makes them; of a cache, its pages, whose table, lengths and scales become options."""
    if not isinstance(k, (PagedCache, QuantizedCache, SharedCache)):
        return for_each(q, k, v)
    reasons = [] if v is None else ["v is given, but the cache holds the values; leave v out"]
    if isinstance(k, SharedCache):
        reasons += shared_prefix.reasons(q, k)
        k = k.cache
    words.raise_wrong(call, reasons)
    return cache_as_options(k, o)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *more: Never,
    causal: bool = False,
    mask: Mask | Tensor | MaskFunction | None = None,
    score: Score | Tensor | ScoreFunction | None = None,
    softmax_scale: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: Deterministic = None,
    backend: str | None = None,
    parallel: Parallel | None = None,
    **others: Never,
) -> Tensor:
    """Compute exact attention, ``softmax(mask(score(softmax_scale * q kᵀ))) v``, in linear memory. Differentiable.

    Args:
        q: ``(batch, seqlen_q, heads_q, head_dim)``, fp16, bf16, fp32 or fp64.
        k: ``(batch, seqlen_k, heads_k, head_dim)``; ``heads_q`` is a multiple of ``heads_k`` (GQA, MQA).
        v: ``(batch, seqlen_k, heads_k, head_dim_v)``. If k and v have a batch of one, they serve every q. Nested tensors in the
            jagged layout, ``(batch, j, heads, head_dim)``, are a packed call: masks and scores see each sequence's own indices.
        causal: also hide the keys after a query (``mask & tw.causal()``). The last query is aligned with the last key.
        mask: a Mask, a bool tensor broadcastable to ``(batch, heads_q, seqlen_q, seqlen_k)`` (True = kept), or a function
            of ``(b, h, i, j)``.
        score: a Score, a float tensor added to the scores, or a function of ``(s, b, h, i, j)``.
        softmax_scale: default ``1 / sqrt(head_dim)``.
        sink: ``(heads_q,)``, a logit per query head that takes part in the softmax and has no value.
        dropout_p: the probability of dropping a pair after the softmax.
        dropout_seed: an int, or a tensor of one int64 on q's device. Default: drawn by ``torch.randint``.
        deterministic: make results repeat bit for bit, whatever else is in the batch. Default:
            ``torch.are_deterministic_algorithms_enabled()``. ``"everywhere"``: a row's o and lse are then the same bits in every call that
            gives it the same keys and values, dense, packed, over pages or token by token (docs/invariance.md).
        backend: run on this backend or raise. Default: the first that supports the call (see :func:`explain`).
        parallel: the ranks that share the sequence, from :func:`tilewise.context_parallel`. q, k, v and the result are then this
            rank's rows. Masks, scores and dropout use positions in the whole sequence.

    Returns:
        ``(batch, seqlen_q, heads_q, head_dim_v)``, contiguous; nested if q is. A row that sees no key is zero.

    Raises:
        ValueError: the call is wrong; the message has every reason. NotImplementedError: no backend supports the call, or the one
            named by ``backend`` does not.

    Source: Dao et al. 2022, Algorithm 1; Dao 2023, Algorithm 1; docs/algorithm.md#4-forward.
    """
    if others or more:
        raise words.refused("attention", others, more)
    said = causal, mask, score, softmax_scale, deterministic, backend, False
    found = _brief(q, k, v, said, (sink, dropout_p, dropout_seed, parallel), lse=False)
    if found is not None:
        return found[0]
    # fmt: off
    o = Options(causal, mask, score, softmax_scale, sink, dropout_p, dropout_seed, deterministic, backend)
    # fmt: on
    return _run(q, k, v, o, parallel, with_lse=False)[0]


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *more: Never,
    causal: bool = False,
    mask: Mask | Tensor | MaskFunction | None = None,
    score: Score | Tensor | ScoreFunction | None = None,
    softmax_scale: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: Deterministic = None,
    backend: str | None = None,
    parallel: Parallel | None = None,
    **others: Never,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`attention` and its log-sum-exp. Both are differentiable.

    Returns:
        o, and lse ``(batch, heads_q, seqlen_q)`` in fp32 (fp64 for fp64): the natural logarithm of the softmax's denominator, with the
        sink. It is ``-inf`` for a row without keys and sink.
    """
    if others or more:
        raise words.refused("attention_with_lse", others, more)
    said = causal, mask, score, softmax_scale, deterministic, backend, False
    found = _brief(q, k, v, said, (sink, dropout_p, dropout_seed, parallel), lse=True)
    if found is not None:
        return found
    o = Options(causal, mask, score, softmax_scale, sink, dropout_p, dropout_seed, deterministic, backend)
    return _run(q, k, v, o, parallel)


def attention_with_stats(
    q: Tensor,
    k: Tensor | PagedCache | QuantizedCache | SharedCache,
    v: Tensor | None = None,
    *more: Never,
    per: Literal["row", "head"] = "row",
    stats: Sequence[Literal["max_logit", "key_mass"]] = ("max_logit",),
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    parallel: Parallel | None = None,
    **options: Unpack[Keywords],
) -> AttentionStats:
    """Compute :func:`attention_with_lse` and statistics, for training recipes such as QK-clip (Kimi K2, 2025, Algorithm 1).

    Args:
        k: the keys; or the cache of :func:`attention_paged`, without v.
        per: ``"row"``, or ``"head"`` for the largest score over batch and rows (and over ranks, with ``parallel``), found on the device.
        stats: the statistics to compute. ``"key_mass"`` takes the time of a backward.
        cu_seqlens_q, cu_seqlens_k: for packed sequences, as in :func:`attention_varlen`.
        options: the other keywords of :func:`attention`.

    Returns:
        ``(o, lse, max_logit, key_mass)``, the first two as from :func:`attention_with_lse`, the others None if ``stats`` lacks them. They
        are in lse's dtype and carry no gradient; o and lse do. max_logit is ``(batch, heads_q, seqlen_q)``, packed ``(heads_q,
        total_q)``, or ``(heads_q,)``: the largest visible score of a row, after the scale and the score function and before the sink. It
        is ``-inf`` for a row without keys and NaN if one of its scores is. key_mass is ``(batch, heads_k, seqlen_k)``, packed
        ``(heads_k, total_k)``, rounded to v's dtype: the sum of a key's probabilities, before dropout, over the queries and the query
        heads of its group.

    Raises:
        ValueError: the call is wrong; the message has every reason. NotImplementedError: no backend supports the call, or the one
            named by ``backend`` does not; or key_mass is asked for over a cache or over ranks.
    """
    o = options_of("attention_with_stats", more, options, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    reasons = stats_reasons(per, stats)
    words.raise_wrong("attention_with_stats", reasons)
    if is_dtensor(q):
        raise NotImplementedError(
            "attention_with_stats does not support DTensors; pass x.to_local(), and parallel= if the sequence is sharded"
        )
    o.max_logit = "max_logit" in stats
    return _run_with_stats(q, k, v, o, parallel, (per, "key_mass" in stats))


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *,
    return_lse: Literal[False] = False, **options: Unpack[Keywords],
) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *,
    return_lse: Literal[True], **options: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *,
    return_lse: bool, **options: Unpack[Keywords],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *more: Never,
    parallel: Parallel | None = None,
    return_lse: bool = False,
    **options: Unpack[Keywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute :func:`attention` of packed sequences. Sequence b is rows ``cu_seqlens[b]:cu_seqlens[b + 1]``.

    Args:
        q: ``(total_q, heads_q, head_dim)``. k: ``(total_k, heads_k, head_dim)``. v: ``(total_k, heads_k, head_dim_v)``.
        cu_seqlens_q, cu_seqlens_k: int32 or int64, ``(batch + 1,)``, starting at 0, never decreasing;
            ``cu_seqlens_k=None`` stands for ``cu_seqlens_q``. No maximum length is needed.
        options: the other keywords of :func:`attention`.

    Masks and scores see indices within the sequence; their tensors must be at least as long as the longest sequence. Rows past
    ``cu_seqlens[-1]`` give ``o = 0``, ``lse = -inf``. The CPU checks the values of ``cu_seqlens`` and those tensors' lengths; an
    accelerator does so only with ``TILEWISE_CHECK=1``, and otherwise reads the last element for an index past a tensor's end.
    ``parallel=`` shards the packed rows, and sequences may cross ranks; ``cu_seqlens_*`` describe the whole.

    Returns:
        o ``(total_q, heads_q, head_dim_v)``; with ``return_lse`` also lse ``(heads_q, total_q)``.
    """
    o = options_of("attention_varlen", more, options, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    out = _run_packed(q, k, v, o, parallel, with_lse=return_lse)
    return out if return_lse else out[0]


def attention_varlen_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *more: Never,
    parallel: Parallel | None = None,
    **options: Unpack[Keywords],
) -> tuple[Tensor, Tensor]:
    """Compute :func:`attention_varlen` and its log-sum-exp. Both are differentiable.

    Returns:
        o ``(total_q, heads_q, head_dim_v)``, and lse ``(heads_q, total_q)``: natural log, fp32 (fp64 for fp64), with the sink.
    """
    o = options_of("attention_varlen_with_lse", more, options, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return _run_packed(q, k, v, o, parallel)


def attention_paged(
    q: Tensor,
    cache: PagedCache | QuantizedCache | SharedCache,
    cu_seqlens_q: Tensor | None = None,
    *more: Never,
    causal: bool = False,
    mask: Mask | Tensor | MaskFunction | None = None,
    score: Score | Tensor | ScoreFunction | None = None,
    softmax_scale: float | None = None,
    sink: Tensor | None = None,
    deterministic: Deterministic = None,
    backend: str | None = None,
    **others: Never,
) -> Tensor:
    """Compute attention of each sequence's last queries over its keys in a cache: prefill, decode and verification.

    Query rows count from a sequence's end: row i of ``seqlen_q`` is at position ``i + off``, with ``off = seqlens_k[b] - seqlen_q``, so
    the last row is at the last key. Masks and scores see the sequence's own ``b, i, j`` and lengths; heads are query heads. The cache
    must already hold the keys of these rows (:func:`append`). Lengths and tables are read on the device, so a CUDA graph of this
    call uses the values that they have at each replay.

    Args:
        q: ``(batch, seqlen_q, heads_q, head_dim)``, packed ``(total_q, heads_q, head_dim)``, in the cache's dtype. Over a quantised
            cache it may have any floating dtype, which is also that of the products and of o.
        cache: from :func:`paged` or :func:`dense_cache`, also with ``.share(prefix_pages)``.
        cu_seqlens_q: int32 or int64 ``(batch + 1,)``, where the sequences' rows start in a packed q. Rows past the last give ``o = 0``.
        causal, mask, score, softmax_scale, sink, deterministic, backend: as in :func:`attention`. There is no dropout and no gradient.

    Keys past a length and unused pages never touch a result. The CPU checks lengths, the page numbers in use, and that tensors of masks
    and scores reach the longest sequence; an accelerator does so only with ``TILEWISE_CHECK=1``.

    Returns:
        o, like q with v's head_dim, contiguous. A row that sees no key is zero.

    Raises:
        ValueError: the call is wrong or wants a gradient; the message has every reason.
    """
    if others or more:
        raise words.refused("attention_paged", others, more)
    o = Options(causal, mask, score, softmax_scale, sink, deterministic=deterministic, backend=backend)
    return _run_paged(q, cache, cu_seqlens_q, o, lse=False)[0]


def attention_paged_with_lse(
    q: Tensor,
    cache: PagedCache | QuantizedCache | SharedCache,
    cu_seqlens_q: Tensor | None = None,
    *more: Never,
    causal: bool = False,
    mask: Mask | Tensor | MaskFunction | None = None,
    score: Score | Tensor | ScoreFunction | None = None,
    softmax_scale: float | None = None,
    sink: Tensor | None = None,
    deterministic: Deterministic = None,
    backend: str | None = None,
    **others: Never,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`attention_paged` and its log-sum-exp, for :func:`merge`.

    Returns:
        o, and lse ``(batch, heads_q, seqlen_q)``, packed ``(heads_q, total_q)``: natural log, fp32 (fp64 for fp64).
    """
    if others or more:
        raise words.refused("attention_paged_with_lse", others, more)
    o = Options(causal, mask, score, softmax_scale, sink, deterministic=deterministic, backend=backend)
    return _run_paged(q, cache, cu_seqlens_q, o, lse=True)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Combine attention results over disjoint sets of keys into the result over all of them. Differentiable in every part.

    Args:
        parts: one or more ``(o, lse)`` of the same queries, as :func:`attention_with_lse` and :func:`attention_varlen_with_lse`
            return them: o ``(batch, seqlen_q, heads_q, head_dim_v)`` with lse ``(batch, heads_q, seqlen_q)``,
            natural log; packed ``(total_q, heads_q, head_dim_v)`` with ``(heads_q, total_q)``. Pass a sink in one part only.

    Returns:
        ``(o, lse)`` in the same layouts and dtypes. The order of the parts changes only the rounding. Pass fp32 parts to avoid the
        rounding of 16-bit ones.

    Raises:
        ValueError: the parts do not match; the message has every reason.

    Source: docs/algorithm.md, (8).
    """
    reasons = state.merge_reasons(parts)
    words.raise_wrong("merge", reasons)
    return state.merge_parts(parts)


def explain(
    q: Tensor,
    k: Tensor | PagedCache | QuantizedCache | SharedCache,
    v: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_logit: bool = False,
    parallel: Parallel | None = None,
    **options: Unpack[Keywords],
) -> dispatch.Explanation:
    """Say which backend would run this call, with which tiles and traffic, and why the others would not. Computes nothing.

    Args:
        k: the keys; or the cache of :func:`attention_paged`, without v.
        parallel: explain this rank's part of an attention over ranks, and how they share it. Every rank must call it.
        options: the keywords of :func:`attention`. ``cu_seqlens_*`` for a packed call, ``max_logit`` for
            :func:`attention_with_stats`.
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    o = options_of("explain", (), options, max_logit=max_logit, **lengths)
    words.raise_wrong("explain", not_tensors([("q", q)], ["q"]))
    shared = k if isinstance(k, SharedCache) else None
    if isinstance(k, Tensor) and isinstance(v, Tensor) and _is_nested(q, k, v):
        (q, k, v), o = nested.packed_call(q, k, v, o)
    else:
        k, v = _keys_and_values("explain", q, k, v, o)
    if autograd.casts(q.device.type):
        q, k, v = autograd.cast(q, k, v, q.device.type, o.block_table is not None, o.k_scale is not None)
    if shared is not None:
        return replace(dispatch.explain(q, k, v, o), prefix=shared_prefix.described(q, shared, o))
    if parallel is None and run_packed(q, k, v, o):
        (q, k, v), o = packed_documents(q, k, v, o)
    if is_dtensor(q):
        raise NotImplementedError(
            "explain does not support DTensors; pass x.to_local(), and parallel= if the sequence is sharded"
        )
    return dispatch.explain(q, k, v, o) if parallel is None else _ranks(parallel).explain(q, k, v, o)


def dropout_mask(
    seed: int | Tensor,
    p: float,
    batch: int,
    heads_q: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the pairs that dropout keeps, bool ``(batch, heads_q, seqlen_q, seqlen_k)``. They are the same on every device and backend."""
    if not dropout.possible(p):
        raise ValueError(
            f"dropout_mask: p {p} must round to between 1/65536 and 65535/65536: the probability of a drop"
        )
    if not isinstance(seed, Tensor):
        if not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
            raise ValueError(f"dropout_mask: seed must be an int of at most 64 bits or one int64 tensor, got {seed!r}")
        seed = dropout.seed_tensor(seed, device)
    elif seed.dtype != torch.int64 or seed.numel() != 1:
        raise ValueError(f"dropout_mask: a tensor of a seed has one int64 number, got {seed.dtype} {tuple(seed.shape)}")
    wrong = [n for n in (batch, heads_q, seqlen_q, seqlen_k) if not isinstance(n, int) or n < 0]
    if wrong:
        raise ValueError(f"dropout_mask: sizes must be whole numbers >= 0, got {wrong[0]!r}")
    heads = torch.arange(batch * heads_q, device=seed.device).view(batch, heads_q)
    return dropout.keep(seed, p, heads, (0, seqlen_q), (0, seqlen_k))
