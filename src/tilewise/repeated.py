"""Calls without gradients that come again: their forward, found by their words and the sizes of their tensors.

Between the other operations of a model little of a call lies in the processor's caches, and each operation of PyTorch takes 10 µs, each
function of ours 1 to 2. A call that was seen before makes no other operation than those that allocate its results, and passes few
functions (docs/decisions.md#repeated-calls).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise import autograd, dispatch
from tilewise.spec import Words, brief, texts_of

_LIMIT = 512


def attend(q: Tensor, k: Tensor, v: Tensor, words: Words, lse: bool, heads_first: bool = False) -> tuple | None:
    """``(o, lse)`` of a call that wants no gradient and whose mask and score read no tensor; None: there is more to look at.

    Args:
        q, k, v: ``(batch, seqlen, heads, head_dim)``, or ``(batch, heads, seqlen, head_dim)`` with ``heads_first``.
            o is ``(batch, seqlen_q, heads_q, head_dim_v)`` either way.
        lse: whether it is read; if not, None may stand in its place.

    Raises:
        ValueError, NotImplementedError: as :func:`tilewise.attention`.
    """
    said = texts_of(words)
    _, mask, score, *_ = words
    if said is None or (mask is not None and mask.parts) or (score is not None and score.leaves):
        return None
    if not (autograd.nobody_asks() and autograd.nobody_watches(q, k, v)):
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    # fmt: off
    key = (said, heads_first, q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
           v.shape, v.stride(), v.dtype, v.device)
    # fmt: on
    plan = dispatch.of_calls.get(key)
    if plan is not None and plan.direct is not None:
        found = plan.direct(q, k, v, lse)
        if found is not None:
            return found
    if heads_first:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if plan is None:
        called = brief(q, k, v, words)
        if called is None:
            return None
        plan = dispatch.plan(q, k, v, (), None, called[1])
        if len(dispatch.of_calls) >= _LIMIT:
            dispatch.of_calls.clear()
        dispatch.of_calls[key] = plan
    return plan.forward(q, k, v, (), None)
