"""Keys and values of many sequences in pages, as serving keeps them.

One form serves all caches: the key of sequence b at position j lies at ``k_pages[block_table[b, j // page_size], j % page_size]``.
A dense cache is one with a page for each sequence. :func:`append` writes into it:

tilewise::append(k_pages, v_pages, k, v, block_table, seqlens_k, cu_seqlens_q) -> ()
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import dispatch, pages, settings

_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define(
    "append(Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor k, Tensor v, Tensor block_table, Tensor seqlens_k, "
    "Tensor? cu_seqlens_q) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_append = torch.ops.tilewise.append.default


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


def not_a_cache(found: object) -> str:
    """The reason against a call with something else than a cache."""
    return f"cache must be what tw.paged(...) or tw.dense_cache(...) returns, got {type(found).__name__}"


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


# -- Writing -------------------------------------------------------------------------------------------------------


def append(cache: PagedCache, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None) -> PagedCache:
    """The cache with new keys and values behind those of each sequence; they are written into its pages, in place.

    ``cache.seqlens_k`` are the lengths before, as in flash_attn_with_kvcache, and stay so: only the pages are written. The result has the
    same pages and table, and the lengths after, which is what :func:`tilewise.attention_paged` wants for the queries of the new tokens.
    Layers that share one table and lengths each append to the lengths before; then advance those once a step, in place where a CUDA graph
    reads them: ``seqlens_k.add_(1)``. The table must already name the pages for the new rows, and a page that is written must belong to
    one sequence. Nothing is read on the host.

    Args:
        k: ``(batch, seqlen_new, heads_k, head_dim)``, packed ``(total, heads_k, head_dim)``, in the cache's dtype.
        v: ``(batch, seqlen_new, heads_k, head_dim_v)``, packed ``(total, heads_k, head_dim_v)``.
        cu_seqlens_q: int32 or int64 ``(batch + 1,)``, where the sequences' rows start in packed k and v; rows past the last are not
            written.

    Raises:
        ValueError: a wrong call, with every reason. On the CPU also where a row of the table has no room for the new keys, or names a
            page that the pool does not have; on an accelerator such rows are not written, and ``TILEWISE_CHECK=1`` refuses them.
    """
    if not hasattr(cache, "k_pages"):
        raise ValueError(f"append was called wrongly\n  {not_a_cache(cache)}")
    _append(cache.k_pages, cache.v_pages, k, v, cache.block_table, cache.seqlens_k, cu_seqlens_q)
    new = k.shape[1] if cu_seqlens_q is None else cu_seqlens_q.diff().to(torch.int32)
    return cache._replace(seqlens_k=cache.seqlens_k + new)


def _append_reasons(cache: PagedCache, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None) -> list[str]:
    """Reasons against the shapes, dtypes and devices of an append."""
    layout, ndim = ("(batch, seqlen, heads, head_dim)", 4) if cu_seqlens_q is None else ("(total, heads, head_dim)", 3)
    named = (("k", k, cache.k_pages), ("v", v, cache.v_pages))
    reasons = []
    for name, x, pool in named:
        if x.ndim != ndim or pool.ndim != 4:
            reasons.append(
                f"{name} has {x.ndim} dimensions, {layout} has {ndim}; its pages {pages.LAYOUT} have {pool.ndim}"
            )
        elif x.shape[-2:] != pool.shape[-2:]:
            reasons.append(
                f"{name} is {tuple(x.shape)}, the rows of its pages {tuple(pool.shape[-2:])} (heads, head_dim)"
            )
        if x.dtype != pool.dtype or x.device != pool.device:
            reasons.append(
                f"{name} is {x.dtype} on {x.device}, its pages {pool.dtype} on {pool.device}; convert: {name}.to(...)"
            )
    if reasons:
        return reasons
    if k.shape[:-2] != v.shape[:-2]:
        reasons.append(f"k has {tuple(k.shape[:-2])} rows, v {tuple(v.shape[:-2])}")
    reasons += pages.size_reasons(cache.k_pages, cache.v_pages)
    reasons += pages.table_reasons(k, cache.block_table, cache.seqlens_k, cu_seqlens_q, rows="k")
    return reasons


def _check(cache: PagedCache, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, values: bool) -> None:
    reasons = _append_reasons(cache, k, v, cu_seqlens_q)
    if not reasons and values:
        new = k.shape[1] if cu_seqlens_q is None else cu_seqlens_q.diff()
        pools = cache.k_pages.shape[:2]
        reasons = pages.value_reasons(cache.block_table, cache.seqlens_k + new, *pools, " with the new keys")
    if reasons:
        raise ValueError("append was called wrongly" + "".join(f"\n  {reason}" for reason in reasons))


def _append_into(k_pages, v_pages, k, v, block_table, seqlens_k, cu_seqlens_q) -> None:
    cache = PagedCache(k_pages, v_pages, block_table, seqlens_k)
    _check(cache, k, v, cu_seqlens_q, values=k.device.type == "cpu" or settings.check_values())
    if k.numel() and k_pages.numel() and block_table.numel() and not dispatch.append(cache, k, v, cu_seqlens_q):
        _write(cache, k, v, cu_seqlens_q)


def _fake_append(k_pages, v_pages, k, v, block_table, seqlens_k, cu_seqlens_q) -> None:
    _check(PagedCache(k_pages, v_pages, block_table, seqlens_k), k, v, cu_seqlens_q, values=False)


def _append_autograd(*tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError(
            "append was called wrongly\n  a cache has no gradient: detach k and v, or call it under torch.no_grad()"
        )
    with torch._C._AutoDispatchBelowAutograd():
        _append(*tensors)


_library.impl("append", _append_into, "CompositeExplicitAutograd")
_library.impl("append", _append_autograd, "Autograd")
torch.library.register_fake("tilewise::append", _fake_append, lib=_library)


def _write(cache: PagedCache, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None) -> None:
    """Puts each row into its page. A row that has no place writes what a row with one writes, so that no host has to filter rows."""
    page, offset, placed = _places(cache, k, cu_seqlens_q)
    row = torch.arange(page.shape[0], device=page.device)
    source = torch.where(placed, row, placed.int().argmax())
    at = page[source], offset[source]
    for pool, new in ((cache.k_pages, k), (cache.v_pages, v)):
        rows = new.reshape(-1, *new.shape[-2:])[source]
        pool.index_put_(at, torch.where(placed.any(), rows, pool[at]))


def _places(cache: PagedCache, k: Tensor, cu_seqlens_q: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The page of each new row, its row there, and whether there is such a place; both within the pool."""
    num_pages, page_size = cache.k_pages.shape[:2]
    batch, max_pages = cache.block_table.shape
    if cu_seqlens_q is None:
        row = torch.arange(batch * k.shape[1], device=k.device)
        b, i = row // k.shape[1], row % k.shape[1]
        placed = torch.ones_like(row, dtype=torch.bool)
    else:
        row, ends = torch.arange(k.shape[0], device=k.device), cu_seqlens_q[1:].long()
        b = torch.searchsorted(ends, row, right=True)
        placed = b < batch
        b = b.clamp(max=batch - 1)
        i = row - cu_seqlens_q[b]
    position = cache.seqlens_k[b] + i
    placed = placed & (position >= 0) & (position < max_pages * page_size)
    position = position.clamp(0, max_pages * page_size - 1)
    page = cache.block_table[b, position // page_size].long()
    placed = placed & (page >= 0) & (page < num_pages)
    return page.clamp(0, num_pages - 1), position % page_size, placed
