"""Keys and values of many sequences in pages, as serving keeps them.

One form serves all caches: the key of sequence b at position j lies at ``k_pages[block_table[b, j // page_size], j % page_size]``.
A dense cache is one with a page for each sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PagedCache(NamedTuple):
    """A cache of keys and values; made by :func:`paged` or :func:`dense_cache`, read by :func:`tilewise.attention_paged`.

    It holds the tensors that it was given, no copies: what is written into them, lengths and tables too, is seen by the next call, and
    by the next replay of a CUDA graph.

    Attributes:
        k_pages: ``(num_pages, page_size, heads_k, head_dim)``. v_pages: ``(num_pages, page_size, heads_k, head_dim_v)``.
        block_table: int32 ``(batch, max_pages)``, the page of each ``page_size`` keys of a sequence. Entries behind a sequence's
            length may hold anything.
        seqlens_k: int32 ``(batch,)``, how many keys each sequence has.
    """

    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    seqlens_k: Tensor


def paged(k_pages: Tensor, v_pages: Tensor, block_table: Tensor, seqlens_k: Tensor) -> PagedCache:
    """A cache in pages, which sequences may share.

    Args:
        k_pages: ``(num_pages, page_size, heads_k, head_dim)``, any strides with a unit last one; so a pool that keeps heads before
            rows comes as ``pool.transpose(1, 2)``. v_pages: ``(num_pages, page_size, heads_k, head_dim_v)``.
        block_table: int32 ``(batch, max_pages)`` on the same device: position j of sequence b lies at row ``j % page_size`` of page
            ``block_table[b, j // page_size]``.
        seqlens_k: int32 ``(batch,)``, between 0 and ``max_pages * page_size``.

    Nothing is read or checked here; the calls that use the cache check it.
    """
    return PagedCache(k_pages, v_pages, block_table, seqlens_k)


def dense_cache(k: Tensor, v: Tensor, seqlens_k: Tensor) -> PagedCache:
    """A cache with room for ``capacity`` keys of each sequence: pages of that size, one a sequence.

    Args:
        k: ``(batch, capacity, heads_k, head_dim)``. v: ``(batch, capacity, heads_k, head_dim_v)``.
        seqlens_k: int32 ``(batch,)``, how many of them each sequence has.
    """
    rows = torch.arange(k.shape[0], dtype=torch.int32, device=k.device)
    return PagedCache(k, v, rows.unsqueeze(1), seqlens_k)
