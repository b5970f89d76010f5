"""The state of a partial attention, ``(o, lse)``, and its merge (docs/algorithm.md, "Merging").

Attention over two disjoint sets of keys is the merge of attention over each. The merge is associative and commutative
and has the identity ``(0, -inf)``, so split keys, rings over devices, sinks and cascades are all this one operation.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _share(lse: Tensor, other: Tensor) -> Tensor:
    """``exp(lse) / (exp(lse) + exp(other))``, and 0 where ``lse`` has seen no key.

    From the difference, not from the rounded total: two shares add up to one however large their lse are.
    """
    return torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - other))


def merge(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over the union of two disjoint sets of keys.

    Args:
        o_a, o_b: ``(..., head_dim_v)``, fp32 or fp64.
        lse_a, lse_b: ``(...)``, natural log, same dtype.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    o = o_a * _share(lse_a, lse_b).unsqueeze(-1) + o_b * _share(lse_b, lse_a).unsqueeze(-1)
    return o, lse


def merge_all(o: Tensor, lse: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The merge of many states along ``dim`` (of ``lse``; ``o`` has one more dimension, at the end)."""
    total = torch.logsumexp(lse, dim)
    weight = torch.where(lse == -torch.inf, 0.0, torch.softmax(lse, dim))
    return (o * weight.unsqueeze(-1)).sum(dim), total


def add_sink(o: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """The merge with ``(0, sink)``: one more logit per row that has no value.

    Args:
        sink: broadcastable to ``lse``.
    """
    return o * _share(lse, sink).unsqueeze(-1), torch.logaddexp(lse, sink)


def sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """``-exp(sink - lse) * delta`` for each row: what :func:`add_sink` passes to its logit, before summing over rows.

    Args:
        lse: of the whole, the sink included.
        delta: ``rowsum(dO ∘ O) - dlse``.
    """
    return torch.where(lse == -torch.inf, 0.0, -torch.exp(sink - lse) * delta)  # -inf: rows of no sequence
