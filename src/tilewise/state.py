"""The state of a partial attention, ``(o, lse)``, and its merge (docs/algorithm.md#5-merging).

Attention over two disjoint sets of keys is the merge of attention over each. The merge is associative and commutative
and has the identity ``(0, -inf)``, so split keys, rings over devices, sinks and cascades are all this one operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

State = tuple[Tensor, Tensor]
"""``(o, lse)``: the attention over some set of keys."""


def _share(lse: Tensor, other: Tensor) -> Tensor:
    """Return ``exp(lse) / (exp(lse) + exp(other))``, and 0 where ``lse`` has seen no key.

    From the difference, not from the rounded total: two shares add up to one however large their lse are.
    """
    return torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - other))


def merge(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention over the union of two disjoint sets of keys.

    Args:
        o_a, o_b: ``(..., head_dim_v)``, fp32 or fp64.
        lse_a, lse_b: ``(...)``, natural log, same dtype.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    o = o_a * _share(lse_a, lse_b).unsqueeze(-1) + o_b * _share(lse_b, lse_a).unsqueeze(-1)
    return o, lse


def merge_all(o: Tensor, lse: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the merge of many states along ``dim`` (of ``lse``; ``o`` has one more dimension, at the end)."""
    share, total = shares(lse, dim)
    return (o * share.unsqueeze(-1)).sum(dim), total


def shares(lse: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the share that each of many states along ``dim`` has in their merge, 0 where it has seen no key, and the merge's lse."""
    return torch.where(lse == -torch.inf, 0.0, torch.softmax(lse, dim)), torch.logsumexp(lse, dim)


def add_sink(o: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return the merge with ``(0, sink)``: one more logit per row that has no value. A sink of inf, as a score of inf, gives NaN.

    The bits of a row's exp and log1p are the same wherever it lies in a tensor; those of logaddexp and of sigmoid are not.

    Args:
        sink: broadcastable to ``lse``.
    """
    sink = torch.where((sink == torch.inf) & (lse > -torch.inf), torch.nan, sink)
    most = torch.maximum(lse, sink)
    less = torch.where(most == -torch.inf, 0.0, torch.exp(-(lse - sink).abs()))
    share = torch.where(lse == -torch.inf, 0.0, torch.where(lse >= sink, 1.0, less) / (1 + less))
    return o * share.unsqueeze(-1), most + torch.log1p(less)


def largest_of_heads(max_logit: Tensor) -> Tensor:
    """Return the largest over batch and rows, ``(heads_q,)``, of ``max_logit`` (batch, heads_q, seqlen_q), packed (heads_q, total_q).

    -inf where there are no rows; NaN where a row has it.
    """
    if not max_logit.numel():
        return max_logit.new_full((max_logit.shape[-2],), -torch.inf)
    return max_logit.amax((0, 2) if max_logit.ndim == 3 else 1)


def sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return ``-exp(sink - lse) * delta`` for each row: what :func:`add_sink` passes to its logit, before summing over rows.

    Args:
        lse: of the whole, the sink included.
        delta: ``rowsum(dO ∘ O) - dlse``.
    """
    return torch.where(lse == -torch.inf, 0.0, -torch.exp(sink - lse) * delta)  # -inf: rows of no sequence


def merge_reasons(parts: Sequence[State]) -> list[str]:
    """Why these are no states of one attention, in the layouts of :func:`tilewise.attention_with_lse`."""
    if not isinstance(parts, (list, tuple)) or not parts:
        found = "an empty one" if isinstance(parts, (list, tuple)) else type(parts).__name__
        return [f"parts must be a list of at least one (o, lse), got {found}"]
    if not all(isinstance(p, (list, tuple)) and [isinstance(x, Tensor) for x in p] == [True, True] for p in parts):
        return ["every part must be a pair of tensors (o, lse); attention_with_lse returns one"]
    (o, lse), reasons = parts[0], []
    expected = (*o.shape[:-3], o.shape[-2], o.shape[-3]) if o.ndim in (3, 4) else None
    if expected is None or tuple(lse.shape) != expected:
        reasons.append(
            "o must be (batch, seqlen, heads, head_dim_v) with lse (batch, heads, seqlen), or packed (total, heads, head_dim_v) "
            f"with (heads, total); got {tuple(o.shape)} and {tuple(lse.shape)}"
        )
    if lse.dtype not in (torch.float32, torch.float64) or not o.dtype.is_floating_point:
        reasons.append(f"lse must be float32 or float64 and o floating, got {lse.dtype} and {o.dtype}")
    for n, part in enumerate(parts[1:], 1):
        for name, first, x in zip(("o", "lse"), parts[0], part, strict=True):
            if (x.shape, x.dtype, x.device) != (first.shape, first.dtype, first.device):
                ours, theirs = (f"{tuple(t.shape)} {t.dtype} {t.device}" for t in (x, first))
                reasons.append(f"{name} of part {n} is {ours}, that of part 0 is {theirs}; they must be alike")
    return reasons


def merge_parts(parts: Sequence[State]) -> State:
    """Return the attention over the union of disjoint sets of keys, differentiable in every o and lse: (8), for any number of states.

    Args:
        parts: ``o`` ``(..., seqlen, heads, head_dim_v)`` and ``lse`` ``(..., heads, seqlen)``, natural log, all alike.

    A state whose lse is -inf counts for nothing, whatever its o holds. Computed in lse's dtype; o keeps its own.
    """
    lse = torch.stack([lse for _, lse in parts])
    largest = lse.detach().amax(0)
    base = torch.where(largest == -torch.inf, 0.0, largest)
    weight = torch.exp(lse - base)
    total = weight.sum(0)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    share = (weight / total).mT.unsqueeze(-1)  # (parts, ..., seqlen, heads, 1)
    o = sum(torch.where(w > 0, o.to(lse.dtype), 0.0) * w for (o, _), w in zip(parts, share, strict=True))
    return o.to(parts[0][0].dtype), torch.where(empty, -torch.inf, base + torch.log(total))
