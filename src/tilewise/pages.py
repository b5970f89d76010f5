"""The rules of a call over pages: the shapes and dtypes of its table and lengths, and, where they may be read, their values.

The key of sequence b at position j lies at ``pages[block_table[b, j // page_size], j % page_size]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.spec import Spec

LAYOUT = "(num_pages, page_size, heads, head_dim)"
FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0  # of the e4m3 numbers (Micikevicius et al., FP8 Formats for Deep Learning, 2022, table 1)


def size_reasons(k: Tensor, v: Tensor) -> list[str]:
    """Return reasons against the pages of the two pools, ``(num_pages, page_size, heads_k, head_dim)``."""
    reasons = []
    if k.shape[:2] != v.shape[:2]:
        reasons.append(f"k has {k.shape[0]} pages of {k.shape[1]} keys, v {v.shape[0]} of {v.shape[1]}")
    if k.shape[1] == 0:
        reasons.append("page_size is 0")
    return reasons


def lies_in(v: Tensor, k: Tensor) -> bool:
    """Return whether values are the first columns of their keys' own memory, as multi-head latent attention keeps them."""
    if k.dtype != v.dtype or k.stride() != v.stride() or k.shape[:-1] != v.shape[:-1] or v.shape[-1:] > k.shape[-1:]:
        return False
    try:
        same = k.untyped_storage()._cdata == v.untyped_storage()._cdata  # without memory too, as tensors are traced
    except NotImplementedError:  # inside torch.func
        return False
    return same and k.storage_offset() == v.storage_offset()


def is_latent(v: Tensor, k: Tensor, spec: Spec) -> bool:
    """Return whether values :func:`lies_in` keys in a call over pages or with selected keys, of which some kernels read them once."""
    return bool(spec.page_slots or spec.region.selections) and lies_in(v, k)


def quantised_reasons(k: Tensor, v: Tensor, spec: Spec) -> list[str]:
    """Return reasons against the dtypes of a quantised cache's pages."""
    if not (k.dtype == v.dtype == FLOAT8):
        return [f"k_scale and v_scale belong to pages of float8_e4m3fn, these are {k.dtype} and {v.dtype}"]
    return (
        []
        if spec.quantised
        else ["pages of float8_e4m3fn come without scales; give them: tw.paged(..., k_scale=..., v_scale=...)"]
    )


def scale_reasons(k: Tensor, scales: Sequence[Tensor], batch: int) -> list[str]:
    """Return reasons against ``(k_scale, v_scale)`` of a quantised cache whose pages are shaped as ``k``."""
    heads = k.shape[2]
    allowed = ((), (heads,), (batch, heads), tuple(k.shape[:3]))
    return [
        f"{name} must be float32 of shape (), (heads_k,) = {allowed[1]}, (batch, heads_k) = {allowed[2]} or "
        f"(num_pages, page_size, heads_k) = {allowed[3]}, got {x.dtype} {tuple(x.shape)}"
        for name, x in zip(("k_scale", "v_scale"), scales, strict=True)
        if x.dtype != torch.float32 or tuple(x.shape) not in allowed
    ]


def quantised(x: Tensor, scale: Tensor) -> Tensor:
    """Return ``x / scale`` as the nearest e4m3 numbers, in fp32; beyond the largest it is the largest, and NaN stays NaN."""
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FLOAT8)


def token_scales(x: Tensor) -> Tensor:
    """Return each row's scale, for rows ``(..., heads, dim)``: its largest finite number over e4m3's largest, fp32, or 1 if that is 0."""
    size = x.float().abs()
    scale = size.where(size.isfinite(), 0.0).amax(-1) * (1 / LARGEST)  # a product rounds alike on every device
    return torch.where(scale == 0, 1.0, scale)


def table_reasons(q: Tensor, table: Tensor, seqlens: Tensor, cu_seqlens_q: Tensor | None, rows: str = "q") -> list[str]:
    """Return reasons against the shapes and dtypes of ``block_table`` (batch, max_pages) and ``seqlens_k`` (batch,), int32.

    Args:
        rows: the name of ``q`` in messages.
    """
    reasons = [
        f"{name} must be int32 {shape}, got {x.dtype} {tuple(x.shape)}" + f"; convert: {name}.to(torch.int32)" * (x.ndim == ndim)
        for name, x, ndim, shape in (("block_table", table, 2, "(batch, max_pages)"), ("seqlens_k", seqlens, 1, "(batch,)"))
        if x.dtype != torch.int32 or x.ndim != ndim
    ]  # fmt: skip
    if reasons:
        return reasons
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    named = rows if cu_seqlens_q is None else "cu_seqlens_q"
    if not (table.shape[0] == seqlens.shape[0] == batch):
        reasons.append(
            f"batch differs: {named} {batch}, block_table {table.shape[0]}, seqlens_k {seqlens.shape[0]}; a cache of more "
            "sequences is narrowed by its rows: block_table[rows], seqlens_k[rows]"
        )
    return reasons


def option_reasons(spec: Spec) -> list[str]:
    """Return the options that a call over pages does not have."""
    has = {
        "a cache has no gradient, and q, k, v or a tensor of the score requires one: call it under torch.no_grad()": (
            spec.needs_grad
        ),
        "dropout over a cache is not built; it belongs to training, a cache to inference": spec.dropout_p != 0,
        "a piece of an attention cannot lie in pages": spec.piece is not None,
    }
    return [reason for reason, asked in has.items() if asked]


def value_reasons(table: Tensor, seqlens: Tensor, num_pages: int, page_size: int, of: str = "") -> list[str]:
    """Lengths outside their row of the table, and pages in use that are not in the pool; reads the values on the host.

    Args:
        of: words of messages that say what the lengths count.
    """
    capacity = table.shape[1] * page_size
    reasons = [
        f"seqlens_k[{b}]{of} is {length}, a sequence has room for 0 to {capacity} keys"
        + "; give block_table more columns, or a dense cache more rows" * (length > capacity)
        for b, length in enumerate(seqlens.tolist())
        if not 0 <= length <= capacity
    ]
    if table.numel():
        least, most = table.aminmax()
        if int(least) >= 0 and int(most) < num_pages:  # as it mostly is, unused entries too
            return reasons
    used = torch.arange(table.shape[1], device=table.device) * page_size < seqlens.unsqueeze(-1)
    outside = used & ((table < 0) | (table >= num_pages))
    if bool(outside.any()):
        b, n = divmod(int(outside.flatten().int().argmax()), table.shape[1])
        reasons.append(f"block_table[{b}, {n}] is {int(table[b, n])}, the pool has pages 0 to {num_pages - 1}")
    return reasons
