"""The backward as a function of its own, for code that has o and lse and not autograd's graph: rings, providers, trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never, Unpack

import torch
from torch import Tensor

from tilewise import autograd, words
from tilewise.api import Keywords, for_each, is_dtensor, options_of
from tilewise.scores import as_score
from tilewise.spec import Options, assemble, not_tensors, result_reasons


def attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *more: Never,
    dlse: Tensor | None = None,
    wrt: Sequence[Tensor] = (),
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    **options: Unpack[Keywords],
) -> tuple[Tensor, ...]:
    """Compute the gradients of :func:`attention` from its results, without autograd.

    k and v may be a part of the keys, with o and lse of the whole attention, as :func:`merge` returns them. The gradients are then
    those of the part; masks and scores see its own indices.

    Args:
        do, dlse: the gradients of o and lse, in their shapes and dtypes. ``dlse=None``: zero.
        q, k, v: as in :func:`attention`; with ``cu_seqlens_q`` as in :func:`attention_varlen`.
        o, lse: the forward's: o ``(batch, seqlen_q, heads_q, head_dim_v)`` in q's dtype, lse ``(batch, heads_q, seqlen_q)``, packed
            ``(heads_q, total_q)``, natural log, fp32 (fp64 for fp64).
        wrt: further tensors to differentiate by: the sink, or tensors that the score reads. ``requires_grad`` plays no part. What a
            score's function makes of a tensor, as ``torch.exp(t)``, is a tensor of its own: beside ``t`` it counts as constant.
        options: the other keywords of :func:`attention`, as the forward had them, the seed too.

    Returns:
        ``(dq, dk, dv)`` and a gradient for each tensor of ``wrt``, in the shapes and dtypes of the tensors. They are differentiable
        with respect to do, dlse and the inputs; o and lse count as functions of the inputs.

    Raises:
        ValueError: the call is wrong; the message has every reason. NotImplementedError: no backend supports the call.

    Source: Dao 2023, Algorithm 2; docs/algorithm.md, (13) to (19).
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    call = options_of("attention_backward", more, options, wrt=wrt, **lengths)
    call.score = as_score(call.score)
    return _run(q, k, v, {"do": do, "o": o, "lse": lse, "dlse": dlse}, call)


def _run(q: Tensor, k: Tensor, v: Tensor, results: dict[str, Any], options: Options) -> tuple[Tensor, ...]:
    """Return the gradients; ``results``: do, o, lse and dlse."""
    if any(is_dtensor(x) for x in (q, k, v, *results.values())):
        raise NotImplementedError(
            "attention_backward does not support DTensors; pass x.to_local() of the rows that a rank has"
        )
    reasons = _result_reasons(q, v, results, options.cu_seqlens_q is not None) + _option_reasons(options)
    words.raise_wrong("attention_backward", reasons)
    do, o, lse, dlse = results.values()
    keys, values = for_each(q, k, v)
    extras, seed, spec = assemble(q, keys, values, options)
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    asked = [x for x in extras if _is_one_of(x, options.wrt)]  # in the order of the operator's results
    dq, dk, dv, *found = autograd.gradients(do, dlse, q, keys, values, o, lse, extras, seed, spec, count=len(asked))
    if keys is not k:  # a batch of one serves every q
        dk, dv = dk.sum(0, keepdim=True), dv.sum(0, keepdim=True)
    return dq, dk, dv, *[grad for x in options.wrt for y, grad in zip(asked, found, strict=True) if y is x]


def _is_one_of(x: Tensor, tensors: Sequence[Tensor]) -> bool:
    return any(x is y for y in tensors)


def _result_reasons(q: Tensor, v: Tensor, results: dict[str, Tensor | None], packed: bool) -> list[str]:
    """Return the reasons against do, o, lse and dlse. If q or v has the wrong rank itself, the operator says so."""
    reasons = not_tensors(tuple(results.items()), ("do", "o", "lse"))
    if reasons or not (isinstance(q, Tensor) and isinstance(v, Tensor) and q.ndim == v.ndim == (3 if packed else 4)):
        return reasons
    of_o = (*q.shape[:-1], v.shape[-1]), q.dtype
    of_lse = (*q.shape[:-3], q.shape[-2], q.shape[-3]), torch.float64 if q.dtype == torch.float64 else torch.float32
    reasons = result_reasons(results, of_o, of_lse, q.device)
    o = results["o"]
    if reasons and isinstance(o, Tensor) and autograd.casts(q.device.type):
        reasons.append(
            f"autocast casts q, k and v of a forward: pass them here as they went in, for this o in {o.dtype}"
        )
    return [*reasons, "the arguments come in the order do, q, k, v, o, lse"] if len(reasons) > 1 else reasons


def _option_reasons(o: Options) -> list[str]:
    """Return the reasons against a missing seed, and against tensors of ``wrt`` without a gradient."""
    if isinstance(o.wrt, Tensor):
        return ["wrt must be a sequence of tensors, got a tensor; write wrt=(x,)"]
    may = [*o.score.leaves, *([] if o.sink is None else [o.sink])]
    reasons = [
        f"wrt[{n}] is neither the sink nor a floating tensor that the score reads"
        for n, x in enumerate(o.wrt)
        if not (_is_one_of(x, may) and x.is_floating_point())
    ]
    if o.dropout_p and o.dropout_seed is None:
        reasons.append("dropout_p needs the dropout_seed of the forward, which drew the pairs that it kept")
    return reasons
