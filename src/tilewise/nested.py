"""Nested tensors in the jagged layout: sequences of several lengths, which become a packed call, without padding.

``(batch, j, heads, head_dim)``, j the ragged dimension, holds its rows one sequence after another: ``values()`` is what a packed call
takes for q, k or v, and ``offsets()`` are its cu_seqlens. The results have q's ragged structure, so ``o + q`` works.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tilewise.spec import Options
from tilewise.words import raise_wrong


def packed_call(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[tuple[Tensor, Tensor, Tensor], Options]:
    """q, k and v of a packed call, ``(total, heads, head_dim)``, and its options; ``options`` are the nested call's.

    Raises:
        ValueError: a wrong call, with every reason.
    """
    reasons = [reason for name, x in zip("qkv", (q, k, v), strict=True) for reason in _reasons(name, x)]
    if options.cu_seqlens_q is not None:
        reasons.append("cu_seqlens come with packed tensors; a nested tensor has its own offsets")
    if not reasons and not q.shape[0] == k.shape[0] == v.shape[0]:
        reasons.append(f"batch differs: q {q.shape[0]}, k {k.shape[0]}, v {v.shape[0]}")
    if not reasons and not _are_equal(k.offsets(), v.offsets(), _LENGTHS_DIFFER):
        reasons.append(_LENGTHS_DIFFER)
    raise_wrong("attention", reasons)
    packed = replace(options, cu_seqlens_q=q.offsets(), cu_seqlens_k=k.offsets())
    return (q.values(), k.values(), v.values()), packed


_LENGTHS_DIFFER = "k and v have sequences of different lengths"


def _are_equal(a: Tensor, b: Tensor, otherwise: str) -> bool:
    """Return whether offsets of as many sequences are equal. A compiled graph asks when it runs, and ends with ``otherwise`` if not."""
    if a is b or not torch.compiler.is_compiling():
        return a is b or torch.equal(a, b)
    torch._assert_async((a == b).all(), otherwise)
    return True


def _reasons(name: str, x: Tensor) -> list[str]:
    if not x.is_nested:
        return [f"{name} is not nested, another one is; nest all three, or call tw.attention_varlen on packed rows"]
    if x.layout != torch.jagged:
        return [
            f"{name} is nested in the {x.layout} layout; make it torch.jagged: torch.nested.nested_tensor(..., layout=torch.jagged)"
        ]
    if x.ndim != 4 or x._ragged_idx != 1:
        return [f"{name} is {tuple(x.shape)}; a nested tensor is (batch, j, heads, head_dim), j the ragged dimension"]
    if x.lengths() is not None:
        return [f"{name} has unused rows between its sequences; {name}.contiguous() leaves them out"]
    return []


def nested_like(q: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return a packed call's o and lse with q's ragged structure: ``(batch, j, heads, head_dim_v)`` and ``(batch, heads, j)``."""
    offsets, shortest, longest = q.offsets(), q._maybe_min_seqlen, q._maybe_max_seqlen
    lengths = {"min_seqlen": shortest, "max_seqlen": longest}
    o, lse = (torch.nested.nested_tensor_from_jagged(x, offsets, **lengths) for x in (o, lse.mT))
    return o, lse.transpose(1, 2)
