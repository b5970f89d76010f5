"""Patterns for :func:`tilewise.masks.catalogue.block_sparse`: bool tensors that say which blocks are kept."""

from __future__ import annotations

from typing import Any

import torch


def butterfly(blocks: int, device: torch.device | str | None = None) -> torch.Tensor:
    """``(blocks, blocks)``: block row r keeps r and the blocks whose number differs from it in one bit (FlashAttention §3.3)."""
    at_least(0, "butterfly", blocks=blocks)
    r = torch.arange(blocks, device=device)
    differ = r[:, None] ^ r[None, :]
    return (differ & (differ - 1)) == 0


def strided(
    blocks_q: int, blocks_k: int, stride: int, local: int = 1, device: torch.device | str | None = None
) -> torch.Tensor:
    """``(blocks_q, blocks_k)``: the ``local`` blocks up to the diagonal, and every ``stride``-th column (Child et al. 2019)."""
    at_least(0, "strided", blocks_q=blocks_q, blocks_k=blocks_k, local=local)
    at_least(1, "strided", stride=stride)
    r = torch.arange(blocks_q, device=device)[:, None] + blocks_k - blocks_q
    c = torch.arange(blocks_k, device=device)[None, :]
    return ((r - c >= 0) & (r - c < local)) | (c % stride == stride - 1)


def local_global(
    blocks_q: int, blocks_k: int, local: int = 1, globals_: int = 1, device: torch.device | str | None = None
) -> torch.Tensor:
    """``(blocks_q, blocks_k)``: ``local`` blocks on either side of the diagonal, and the first ``globals_`` rows and columns."""
    at_least(0, "local_global", blocks_q=blocks_q, blocks_k=blocks_k, local=local, globals_=globals_)
    r = torch.arange(blocks_q, device=device)[:, None]
    c = torch.arange(blocks_k, device=device)[None, :]
    return ((r + blocks_k - blocks_q - c).abs() <= local) | (c < globals_) | (r < globals_)


def at_least(least: int, who: str, **sizes: Any) -> None:
    """Raise ValueError unless each of the ``sizes`` of ``who`` is a whole number of at least ``least``."""
    for name, n in sizes.items():
        if not is_whole(n) or n < least:
            raise ValueError(f"{who}: {name} must be a whole number >= {least}, got {n!r}")


def is_whole(n: Any) -> bool:
    """Whether ``n`` is a whole number. Dynamo tells no attributes of its symbols."""
    return isinstance(n, (int, torch.SymInt)) or hasattr(n, "__index__")
