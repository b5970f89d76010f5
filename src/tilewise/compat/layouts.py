"""Attention of tensors in any order of dimensions, such as ``layout="BHND"``. The result has the same order.

B is batch, N the sequence, H heads and D the head dim. Nothing is copied to change the order: kernels read strides.
"""

from __future__ import annotations

from torch import Tensor

import tilewise as tw

OURS = "BNHD"


def attention(q: Tensor, k: Tensor, v: Tensor, *, layout: str = OURS, **options: object) -> Tensor:
    """:func:`tilewise.attention` of q, k and v with dimensions in the order of ``layout``, and its result in the same order.

    Args:
        layout: the letters B, N, H and D in any order, D last; B or H may be missing, which is one batch element or one head.
        options: the keywords of :func:`tilewise.attention`.

    Raises:
        ValueError: another layout, or a tensor of another number of dimensions.
    """
    return _back(tw.attention(*_ours(q, k, v, layout), **options), layout)


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, layout: str = OURS, **options: object
) -> tuple[Tensor, Tensor]:
    """:func:`attention` and its lse, whose dimensions are the layout's without D."""
    o, lse = tw.attention_with_lse(*_ours(q, k, v, layout), **options)
    return _back(o, layout), _back(lse.transpose(1, 2).unsqueeze(-1), layout).squeeze(-1)


def _ours(q: Tensor, k: Tensor, v: Tensor, layout: str) -> list[Tensor]:
    if not (layout.endswith("D") and set(layout) | set("BH") == set(OURS) and len(set(layout)) == len(layout)):
        raise ValueError(f"layout takes B, N, H and D in any order, D last (B or H may be missing), got {layout!r}")
    wrong = [f"{name} {tuple(x.shape)}" for name, x in zip("qkv", (q, k, v), strict=True) if x.ndim != len(layout)]
    if wrong:
        raise ValueError(f'layout "{layout}" has {len(layout)} dimensions, got {", ".join(wrong)}')
    whole = layout if len(layout) == 4 else "".join(c for c in OURS if c not in layout) + layout
    at = [whole.index(c) for c in OURS]
    return [x[(None,) * (4 - x.ndim)].permute(at) for x in (q, k, v)]


def _back(x: Tensor, layout: str) -> Tensor:
    """``(batch, seqlen, heads, ...)`` in the order of ``layout``."""
    missing = [n for n, c in enumerate(OURS) if c not in layout]
    return x.permute(*missing, *[OURS.index(c) for c in layout])[(0,) * len(missing)]
