"""The state of a partial attention, ``(o, lse)``, and its merge (docs/algorithm.md, "Merging").

Attention over two disjoint sets of keys is the merge of attention over each. The merge is associative and commutative
and has the identity ``(0, -inf)``, so split keys, rings over devices, sinks and cascades are all this one operation.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _weight(lse: Tensor, total: Tensor) -> Tensor:
    """``exp(lse - total)``, and 0 where neither side has seen a key."""
    return torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))


def merge(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over the union of two disjoint sets of keys.

    Args:
        o_a, o_b: ``(..., head_dim_v)``, fp32 or fp64.
        lse_a, lse_b: ``(...)``, natural log, same dtype.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    o = o_a * _weight(lse_a, lse).unsqueeze(-1) + o_b * _weight(lse_b, lse).unsqueeze(-1)
    return o, lse


def merge_all(o: Tensor, lse: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The merge of many states along ``dim`` (of ``lse``; ``o`` has one more dimension, at the end)."""
    total = torch.logsumexp(lse, dim)
    weight = _weight(lse, total.unsqueeze(dim))
    return (o * weight.unsqueeze(-1)).sum(dim), total


def add_sink(o: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """The merge with ``(0, sink)``: one more logit per row that has no value.

    Args:
        sink: broadcastable to ``lse``.
    """
    total = torch.logaddexp(lse, sink)
    return o * _weight(lse, total).unsqueeze(-1), total


def sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """``-exp(sink - lse) * delta`` for each row: what :func:`add_sink` passes to its logit, before summing over rows.

    Args:
        lse: of the whole, the sink included.
        delta: ``rowsum(dO ∘ O) - dlse``.
    """
    return torch.where(lse == -torch.inf, 0.0, -_weight(sink.expand_as(lse), lse) * delta)  # rows of no sequence
