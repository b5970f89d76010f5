"""Keys and values of many sequences in pages, as serving keeps them.

One form serves all caches: the key of sequence b at position j lies at ``k_pages[block_table[b, j // page_size], j % page_size]``.
A dense cache is one with a page for each sequence. A quantised one holds e4m3 numbers and float32 scales, which multiply them.
:func:`append` writes into them:

tilewise::append(k_pages, v_pages, k, v, block_table, seqlens_k, cu_seqlens_q, k_scale, v_scale) -> ()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar, overload

import torch
from torch import Tensor

from tilewise import autograd, dispatch, pages, settings
from tilewise.problem import DTYPES, cu_reasons, cu_value_reasons
from tilewise.spec import Options, not_tensors
from tilewise.untraced import untraced
from tilewise.words import raise_wrong

_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define(
    "append(Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor k, Tensor? v, Tensor block_table, Tensor seqlens_k, "
    "Tensor? cu_seqlens_q, Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_append = torch.ops.tilewise.append.default


def _shown(cache: PagedCache | QuantizedCache) -> str:
    """Return a cache in one line: names, shapes and dtypes, because its pages are long to print."""
    tensors = [
        f"{name}={tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" if isinstance(x, Tensor) else f"{name}={x!r}"
        for name, x in zip(cache._fields, cache, strict=True)
    ]
    return f"{type(cache).__name__}({', '.join(tensors)})"


class PagedCache(NamedTuple):
    """A cache of keys and values; made by :func:`paged` or :func:`dense_cache`, read by :func:`tilewise.attention_paged`.

    It holds the given tensors and no copies. The next call, and the next replay of a CUDA graph, sees what you write into them, lengths
    and tables included.

    Attributes:
        k_pages: ``(num_pages, page_size, heads_k, head_dim)``. v_pages: ``(num_pages, page_size, heads_k, head_dim_v)``.
        block_table: int32 ``(batch, max_pages)``, the page of each ``page_size`` keys of a sequence. Entries past a sequence's
            length may hold anything.
        seqlens_k: int32 ``(batch,)``, the number of keys of each sequence.
    """

    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    seqlens_k: Tensor

    def __repr__(self) -> str:
        return _shown(self)

    def share(self, prefix_pages: int) -> SharedCache:
        """Return this cache with the promise that all sequences begin with the same ``prefix_pages`` pages (:class:`SharedCache`)."""
        return SharedCache(self, prefix_pages)


class QuantizedCache(NamedTuple):
    """A :class:`PagedCache` of 8-bit numbers: a key is ``k_scale * k_pages``, a value ``v_scale * v_pages``.

    Attributes:
        k_pages, v_pages, block_table, seqlens_k: as in :class:`PagedCache`, the pages float8_e4m3fn.
        k_scale, v_scale: float32, each ``()``, ``(heads_k,)``, ``(batch, heads_k)``, or for each token and head ``(num_pages, page_size,
            heads_k)``, any strides.
    """

    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    seqlens_k: Tensor
    k_scale: Tensor
    v_scale: Tensor

    def __repr__(self) -> str:
        return _shown(self)

    def share(self, prefix_pages: int) -> SharedCache:
        """Return this cache with the promise that all sequences begin with the same ``prefix_pages`` pages (:class:`SharedCache`)."""
        return SharedCache(self, prefix_pages)


class SharedCache(NamedTuple):
    """A cache whose sequences all begin with the same pages. All queries must come after these pages.

    :func:`tilewise.attention_paged` attends to the prefix once for the batch if that takes less time; :func:`tilewise.explain` says
    whether it does. The result is the same.

    Attributes:
        cache: :class:`PagedCache` or :class:`QuantizedCache`. prefix_pages: at least 1, and fewer than the pages of a table row.
    """

    cache: PagedCache | QuantizedCache
    prefix_pages: int

    @property
    def keys(self) -> int:
        """Keys of the prefix."""
        return self.prefix_pages * self.cache.k_pages.shape[1]


Cache = TypeVar("Cache", PagedCache, QuantizedCache)


def cache_as_options(cache: PagedCache | QuantizedCache, o: Options) -> tuple[Tensor, Tensor]:
    """Return the pages of k and v; the table, the lengths and the scales become options of the call."""
    k, v, o.block_table, o.seqlens_k, *scales = cache
    o.k_scale, o.v_scale = scales or (None, None)
    return k, v


def not_a_cache(found: object) -> str:
    """Return the reason against a call whose cache is something else."""
    hint = "; append to its .cache, and share what append returns" * isinstance(found, SharedCache)
    return f"cache must be what tw.paged(...) or tw.dense_cache(...) returns, got {type(found).__name__}{hint}"


@overload
def paged(
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seqlens_k: Tensor,
    *,
    k_scale: None = None,
    v_scale: None = None,
) -> PagedCache: ...
@overload
def paged(
    k_pages: Tensor, v_pages: Tensor, block_table: Tensor, seqlens_k: Tensor, *, k_scale: Tensor, v_scale: Tensor
) -> QuantizedCache: ...
def paged(
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seqlens_k: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> PagedCache | QuantizedCache:
    """Make a cache in pages. Sequences may share pages.

    Args:
        k_pages: ``(num_pages, page_size, heads_k, head_dim)``, any strides with a unit last one. Pass a pool with heads before
            rows as ``pool.transpose(1, 2)``. v_pages: ``(num_pages, page_size, heads_k, head_dim_v)``.
        block_table: int32 ``(batch, max_pages)`` on the same device: position j of sequence b lies at row ``j % page_size`` of page
            ``block_table[b, j // page_size]``.
        seqlens_k: int32 ``(batch,)``, between 0 and ``max_pages * page_size``.
        k_scale, v_scale: the factors of keys and values in float8_e4m3fn pages: float32, each ``()``, ``(heads_k,)``, ``(batch,
            heads_k)`` or ``(num_pages, page_size, heads_k)``. Attention is exact for the numbers in the cache. q may have any floating
            dtype; products are computed in it.

    The calls that use the cache check it; this function reads nothing.
    """
    if (k_scale is None) != (v_scale is None):
        raise ValueError("a quantised cache needs both k_scale and v_scale")
    if k_scale is None:
        return PagedCache(k_pages, v_pages, block_table, seqlens_k)
    return QuantizedCache(k_pages, v_pages, block_table, seqlens_k, k_scale, v_scale)


@overload
def dense_cache(
    k: Tensor, v: Tensor, seqlens_k: Tensor, *, k_scale: None = None, v_scale: None = None
) -> PagedCache: ...
@overload
def dense_cache(k: Tensor, v: Tensor, seqlens_k: Tensor, *, k_scale: Tensor, v_scale: Tensor) -> QuantizedCache: ...
def dense_cache(
    k: Tensor, v: Tensor, seqlens_k: Tensor, *, k_scale: Tensor | None = None, v_scale: Tensor | None = None
) -> PagedCache | QuantizedCache:
    """Make a cache with one page for each sequence, with room for ``capacity`` keys.

    Args:
        k: ``(batch, capacity, heads_k, head_dim)``. v: ``(batch, capacity, heads_k, head_dim_v)``.
        seqlens_k: int32 ``(batch,)``, the number of keys of each sequence.
        k_scale, v_scale: as in :func:`paged`; for each token and head ``(batch, capacity, heads_k)``.
    """
    wrong = not_tensors([("k", k)], ["k"])
    raise_wrong(
        "dense_cache", wrong or ["k has no dimensions, (batch, capacity, heads, head_dim) has 4"] * (k.ndim == 0)
    )
    rows = torch.arange(k.shape[0], dtype=torch.int32, device=k.device)
    return paged(k, v, rows.unsqueeze(1), seqlens_k, k_scale=k_scale, v_scale=v_scale)


# -- Writing -------------------------------------------------------------------------------------------------------


def append(cache: Cache, k: Tensor, v: Tensor | None = None, cu_seqlens_q: Tensor | None = None) -> Cache:
    """Write new keys and values behind those of each sequence, into the cache's pages, and return the cache with the new lengths.

    ``cache.seqlens_k`` are the old lengths, as in flash_attn_with_kvcache, and stay unchanged. Pass the returned cache to
    :func:`tilewise.attention_paged`. Layers that share one table and lengths all append to the old lengths; advance these once a step,
    in place for a CUDA graph: ``seqlens_k.add_(1)``. The table must already name the pages for the new rows, and a written page must
    belong to one sequence. The host reads nothing.

    A quantised cache gets ``k / k_scale``, rounded to the nearest e4m3 number (ties to even). Numbers above 448 and infinities become
    448 with their sign; NaN stays NaN. Scales for each token and head are written too: the largest finite number of the head's row over
    448, or 1 if that is 0.

    Args:
        k: ``(batch, seqlen_new, heads_k, head_dim)``, packed ``(total, heads_k, head_dim)``, in the cache's dtype; for a quantised
            cache in any floating dtype of attention.
        v: ``(batch, seqlen_new, heads_k, head_dim_v)``, packed ``(total, heads_k, head_dim_v)``; None if the values of the cache are
            a view of its keys. A quantised cache then has one scale for both: the same tensor.
        cu_seqlens_q: int32 or int64 ``(batch + 1,)``, where the sequences' rows start in packed k and v; rows past the last are not
            written.

    Raises:
        ValueError: the call is wrong; the message has every reason. The CPU also checks that the table has room for the new keys, and
            that the pool has its pages. An accelerator skips such rows; with ``TILEWISE_CHECK=1`` it raises instead.
    """
    if not hasattr(cache, "k_pages"):
        raise ValueError(f"append was called wrongly\n  {not_a_cache(cache)}")
    k_pages, v_pages, block_table, seqlens_k, *scales = cache
    tensors = k_pages, v_pages, k, v, block_table, seqlens_k, cu_seqlens_q, *scales
    if k is not None and _is_plain(tensors):
        _write_behind(cache, k, v, cu_seqlens_q)
    else:
        named = *zip(cache._fields, cache, strict=True), ("k", k), ("v", v), ("cu_seqlens_q", cu_seqlens_q)
        raise_wrong("append", not_tensors(named, ("k", "k_pages", "v_pages")))
        _append(*tensors)
    new = k.shape[1] if cu_seqlens_q is None else cu_seqlens_q.diff().to(torch.int32)
    return type(cache)(k_pages, v_pages, block_table, seqlens_k + new, *scales)


def _is_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether the operator would only call its kernel (docs/decisions.md#repeated-calls)."""
    given = [x for x in tensors if x is not None]
    if torch.compiler.is_compiling() or not (autograd.nobody_asks() and autograd.nobody_watches(*given)):
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in given))


def _append_reasons(
    cache: PagedCache | QuantizedCache, k: Tensor, v: Tensor | None, cu_seqlens_q: Tensor | None
) -> list[str]:
    """Return reasons against the shapes, dtypes and devices of an append."""
    layout, ndim = ("(batch, seqlen, heads, head_dim)", 4) if cu_seqlens_q is None else ("(total, heads, head_dim)", 3)
    latent = pages.lies_in(cache.v_pages, cache.k_pages)
    if latent != (v is None):
        told = (
            "the values of this cache lie in the memory of its keys; leave v out"
            if latent
            else "this cache has memory for values; give v"
        )
        return [f"v is {'given' if latent else 'None'}, but {told}"]
    named = (("k", k, cache.k_pages), *([] if v is None else [("v", v, cache.v_pages)]))
    quantised, reasons = isinstance(cache, QuantizedCache), []
    for name, x, pool in named:
        if x.ndim != ndim or pool.ndim != 4:
            likely = f"; packed rows come with cu_seqlens_q, one row a sequence is {name}.unsqueeze(1)" * (x.ndim == 3)
            reasons.append(
                f"{name} has {x.ndim} dimensions, {layout} has {ndim}; its pages {pages.LAYOUT} have {pool.ndim}{likely}"
            )
        elif x.shape[-2:] != pool.shape[-2:]:
            reasons.append(
                f"{name} is {tuple(x.shape)}, the rows of its pages {tuple(pool.shape[-2:])} (heads, head_dim); they must agree"
            )
        if quantised and (x.dtype not in DTYPES or pool.dtype != pages.FLOAT8 or x.device != pool.device):
            reasons.append(
                f"{name} is {x.dtype} on {x.device}, its pages {pool.dtype} on {pool.device}; a cache with scales has pages of "
                "float8_e4m3fn and takes float16, bfloat16, float32 and float64"
            )
        elif not quantised and (x.dtype != pool.dtype or pool.dtype not in DTYPES or x.device != pool.device):
            reasons.append(
                f"{name} is {x.dtype} on {x.device}, its pages {pool.dtype} on {pool.device}; convert: {name}.to(...)"
            )
    if reasons:
        return reasons
    if v is not None and k.shape[:-2] != v.shape[:-2]:
        reasons.append(f"k has {tuple(k.shape[:-2])} rows, v {tuple(v.shape[:-2])}; each key has one row of v")
    reasons += pages.size_reasons(cache.k_pages, cache.v_pages)
    wrong = cu_reasons(k, cache.k_pages, [] if cu_seqlens_q is None else [cu_seqlens_q])
    reasons += wrong or pages.table_reasons(k, cache.block_table, cache.seqlens_k, cu_seqlens_q, rows="k")
    written = [(f"{name}_pages", pool) for name, _, pool in named]
    written += [(name, x) for name, x in zip(("k_scale", "v_scale"), cache[4:], strict=False) if x.ndim == 3]
    reasons += [
        f"{name} {tuple(pool.shape)} with strides {pool.stride()} shows one row in several places; clone it"
        for name, pool in written
        if any(stride == 0 and size > 1 for size, stride in zip(pool.shape, pool.stride(), strict=True))
    ]
    if quantised:
        scales = cache.k_scale, cache.v_scale
        reasons += pages.scale_reasons(cache.k_pages, scales, cache.block_table.shape[0])
        places = [x.device for x in scales if x.device != k.device]
        reasons += [f"a scale is on {place}, the pages on {k.device}; move the scale there" for place in places]
        if latent and not pages.lies_in(cache.v_scale, cache.k_scale):
            reasons.append(
                "v_scale is another tensor than k_scale, but the values lie in the memory of the keys; pass k_scale"
            )
    return reasons


def _check(
    cache: PagedCache | QuantizedCache, k: Tensor, v: Tensor | None, cu_seqlens_q: Tensor | None, values: bool
) -> None:
    reasons = _append_reasons(cache, k, v, cu_seqlens_q)
    if not reasons and values:
        reasons = [] if cu_seqlens_q is None else cu_value_reasons([cu_seqlens_q], k.shape[:1])
        reasons += [
            f"seqlens_k[{b}] is {n}, a length is at least 0" for b, n in enumerate(cache.seqlens_k.tolist()) if n < 0
        ]
    if not reasons and values:
        new = k.shape[1] if cu_seqlens_q is None else cu_seqlens_q.diff()
        pools = cache.k_pages.shape[:2]
        reasons = pages.value_reasons(cache.block_table, cache.seqlens_k + new, *pools, " with the new keys")
    raise_wrong("append", reasons)


def _append_into(k_pages, v_pages, k, v, block_table, seqlens_k, cu_seqlens_q, *scales) -> None:
    cache = (QuantizedCache if scales else PagedCache)(k_pages, v_pages, block_table, seqlens_k, *scales)
    _write_behind(cache, k, v, cu_seqlens_q)


def _write_behind(cache: PagedCache | QuantizedCache, k: Tensor, v: Tensor | None, cu_seqlens_q: Tensor | None) -> None:
    cu_seqlens_q = None if cu_seqlens_q is None else cu_seqlens_q.contiguous()
    k_pages, v_pages, block_table, _, *scales = cache
    # Values may lie in the memory of keys, or not; so may their scales.
    key = (
        k_pages.data_ptr() == v_pages.data_ptr(),
        scales[0].data_ptr() == scales[1].data_ptr() if scales else None,
        *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in (*cache, k, v, cu_seqlens_q)],
    )
    write, values = dispatch.of_appends.get(key), settings.checks_values(k.device)
    if write is None or values:
        _check(cache, k, v, cu_seqlens_q, values)
    if write is None:
        if len(dispatch.of_appends) >= dispatch.PLANS_LIMIT:
            dispatch.of_appends.clear()
        some = k.numel() and k_pages.numel() and block_table.numel()
        write = (dispatch.appender(cache, k, v, cu_seqlens_q) or _write) if some else _write_nothing
        dispatch.of_appends[key] = write
    write(cache, k, v, cu_seqlens_q)


def _fake_append(k_pages, v_pages, k, v, block_table, seqlens_k, cu_seqlens_q, *scales) -> None:
    cache = (QuantizedCache if scales else PagedCache)(k_pages, v_pages, block_table, seqlens_k, *scales)
    _check(cache, k, v, cu_seqlens_q, values=False)


def _append_autograd(*tensors: Tensor | None) -> None:
    given = [x for x in tensors if x is not None]
    if autograd.has_tangent(given) or (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
        raise_wrong("append", ["a cache has no gradient: detach k and v, or call it under torch.no_grad()"])
    with torch._C._AutoDispatchBelowAutograd():
        _append(*tensors)


_library.impl("append", untraced(_append_into), "CompositeExplicitAutograd")
_library.impl("append", untraced(_append_autograd), "Autograd")
torch.library.register_fake("tilewise::append", _fake_append, lib=_library)


def _mapped_append(*_: object) -> None:
    raise NotImplementedError(
        "append inside torch.vmap: a cache is written in place, and all examples would write the same pages; call it outside, with the "
        "examples as sequences of the cache"
    )


torch.library.register_vmap("tilewise::append", untraced(_mapped_append), lib=_library)


def _write_nothing(*_: object) -> None:
    """Write no row into no page."""


def _write(cache: PagedCache | QuantizedCache, k: Tensor, v: Tensor | None, cu_seqlens_q: Tensor | None) -> None:
    """Put each row into its page. A row without a place repeats the write of a row with one, so that no host has to filter rows."""
    b, page, offset, placed = _places(cache, k, cu_seqlens_q)
    row = torch.arange(page.shape[0], device=page.device)
    source = torch.where(placed, row, placed.int().argmax())
    at = page[source], offset[source]
    for pool, rows in _stored(cache, *(x if x is None else x.reshape(-1, *x.shape[-2:]) for x in (k, v)), b):
        pool.index_put_(at, torch.where(placed.any(), rows[source], pool[at]))


def _stored(
    cache: PagedCache | QuantizedCache, k: Tensor, v: Tensor | None, b: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pools ``(num_pages, page_size, heads, ...)`` and what to store for new rows ``(rows, heads, dim)`` of sequences ``b``."""
    scales = (cache.k_scale, cache.v_scale) if isinstance(cache, QuantizedCache) else (None, None)
    for pool, new, scale in zip((cache.k_pages, cache.v_pages), (k, v), scales, strict=True):
        if new is None:  # it lies in the keys
            return
        if scale is None:
            yield pool, new
            continue
        factor = scale[b] if scale.ndim == 2 else scale
        if scale.ndim == 3:
            factor = pages.token_scales(new)
            yield scale, factor
        yield pool, pages.quantised(new, factor.unsqueeze(-1))


def _places(cache: PagedCache | QuantizedCache, k: Tensor, cu_seqlens_q: Tensor | None) -> tuple[Tensor, ...]:
    """Return the sequence of each new row, its page, its row there, and whether there is such a place; all within the pool."""
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
    return b, page.clamp(0, num_pages - 1), position % page_size, placed
