"""The matrix of probabilities, for callers who ask for it: attention over the identity as values, some columns at a time.

``P = softmax(S) = softmax(S) I``: with the columns of the identity for v, attention returns the columns of P. Masks, scores, sinks,
dropout and gradients are therefore those of the attention itself, on every backend, and nothing is in memory but the matrix that
was asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.api import attention

WIDTH = 256
"""How many columns one call computes: the widest head_dim_v that every backend's kernels take."""


def probabilities(q: Tensor, k: Tensor, *, average: bool = False, **options: object) -> Tensor:
    """``P`` after mask, softmax, sink and dropout, whose product with v is the attention; differentiable.

    Args:
        q: ``(batch, seqlen_q, heads_q, head_dim)``. k: ``(batch, seqlen_k, heads_k, head_dim)``.
        average: over the query heads.
        options: the keywords of :func:`tilewise.attention`. With dropout, ``dropout_seed`` says which.

    Returns:
        ``(batch, heads_q, seqlen_q, seqlen_k)``, or ``(batch, seqlen_q, seqlen_k)`` where averaged, in q's dtype. A row that sees no
        key is zero. Besides memory of this size it takes the time of ``ceil(seqlen_k / 256)`` attentions with a head_dim_v of 256.
    """
    batch, seqlen_k, heads_k, _ = k.shape
    identity = torch.eye(seqlen_k, dtype=q.dtype, device=q.device)
    columns = []
    for start in range(0, seqlen_k, WIDTH):
        values = identity[:, start : start + WIDTH].view(1, seqlen_k, 1, -1).expand(batch, -1, heads_k, -1)
        part = attention(q, k, values, **options)
        columns.append(part.mean(2) if average else part.transpose(1, 2))
    if columns:
        return torch.cat(columns, -1)
    shape = (q.shape[0], q.shape[1], 0) if average else (q.shape[0], q.shape[2], q.shape[1], 0)
    return q.new_zeros(shape)
