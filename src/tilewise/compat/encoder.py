"""``nn.TransformerEncoder`` in eval mode over rows without their padding, as PyTorch packs them for its fused inference path."""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_rows = threading.local()
"""``offsets``: where each row starts among the packed tokens that this thread's encoder computes, and where the last one ends."""


def offsets_of_rows() -> Tensor | None:
    """Return ``cu_seqlens``, ``(batch + 1,)``, inside :func:`over_packed_rows`, else None."""
    return getattr(_rows, "offsets", None)


def would_pack(encoder: nn.TransformerEncoder, src: Tensor, mask: Tensor | None, padding: Tensor | None) -> bool:
    """Whether PyTorch's own forward packs the rows of this call, if one has a token. Its result is zero at padding then, before the last
    norm."""
    if padding is None or mask is not None or src.ndim != 3 or torch.compiler.is_compiling():
        return False
    if encoder.layers[0].training or not encoder.use_nested_tensor or torch.is_autocast_enabled():
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in (src, *encoder.layers.parameters())):
        return False
    usual = all(
        type(x) is nn.TransformerEncoderLayer and type(x.self_attn) is nn.MultiheadAttention for x in encoder.layers
    )
    if not usual or any(x._forward_hooks or x._forward_pre_hooks for x in encoder.layers.modules()):
        return False  # these would see packed rows
    return not encoder.mask_check or torch._nested_tensor_from_mask_left_aligned(src, padding.logical_not())


def over_packed_rows(encoder: nn.TransformerEncoder, src: Tensor, padding: Tensor) -> Tensor | None:
    """Compute the encoder of ``src`` ``(batch, seqlen, features)`` where ``padding`` is False, or 0 if it is floating; None if it is
    False nowhere."""
    keep = padding.logical_not()
    (kept,) = torch.where(keep.flatten())  # the only one of these operations that waits for the device
    if not len(kept):
        return None
    x = src.flatten(0, 1)[kept][None]
    _rows.offsets = F.pad(keep.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
    try:
        for layer in encoder.layers:
            x = layer(x)
    finally:
        _rows.offsets = None
    o = x.new_zeros(src.shape)
    o.flatten(0, 1)[kept] = x[0]
    return o if encoder.norm is None else encoder.norm(o)
