"""The steps of flash-attn's call over a cache: rotary embedding, appending, attention, and where the cache lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import tilewise as tw
from tilewise.spec import not_tensors
from tilewise.words import raise_wrong

FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class CacheCall:
    """The tensors of a call, by the original's names."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    cache_seqlens: Tensor | int | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    def attend(self, options: dict) -> tuple[Tensor, Tensor]:
        """out and softmax_lse, with the keywords of :func:`tilewise.attention_paged`; writes new keys and values before."""
        self._refuse_no_tensors()
        self._refuse_wrong()
        cache, q, k = self._cache(), self.q, self.k
        if q.dtype == FLOAT8:
            q = q.bfloat16()  # which holds it exactly
        if self.rotary_cos is not None:
            moving = options["causal"] or options["mask"] is not None  # causal or within a window
            turn = Rotary(self.rotary_cos, self.rotary_sin, self.rotary_interleaved, cache.seqlens_k)
            q, k = turn(q, moving), turn(k, True)
        if k is not None:
            cache = self._appended(cache, k)
        if self.cache_leftpad is not None:
            seen = tw.key_range(self.cache_leftpad, self._capacity)
            options = options | {"mask": seen if options["mask"] is None else options["mask"] & seen}
        return tw.attention_paged_with_lse(q, cache, self.cu_seqlens_q, **options)

    @property
    def _capacity(self) -> int:
        pages = 1 if self.block_table is None else self.block_table.shape[1]
        return pages * self.k_cache.shape[1]

    @property
    def _quantised(self) -> bool:
        descales = (self.q_descale, self.k_descale, self.v_descale)
        return self.k_cache.dtype == FLOAT8 or any(x is not None for x in descales)

    def _scales(self) -> dict[str, Tensor]:
        """Return the factors of the cache's keys, times those of the queries, and of its values: each ``()`` or ``(batch, heads_k)``."""
        one = torch.ones((), device=self.q.device)
        q, k, v = (one if x is None else x for x in (self.q_descale, self.k_descale, self.v_descale))
        return {"k_scale": q * k, "v_scale": v}

    def _appended(self, cache: tw.PagedCache | tw.QuantizedCache, k: Tensor) -> tw.PagedCache | tw.QuantizedCache:
        """Return the cache with new rows. Rows of 16 bits are divided by the cache's factors, rows of 8 bits are not."""
        if not self._quantised:
            return tw.append(cache, k, self.v, self.cu_seqlens_k_new)
        one = torch.ones((), device=k.device)
        descales = ((k, self.k_descale), (self.v, self.v_descale))
        scales = [one if x.dtype == FLOAT8 or factor is None else factor for x, factor in descales]
        rows = [x.float() if x.dtype == FLOAT8 else x for x, _ in descales]
        grown = tw.append(cache._replace(k_scale=scales[0], v_scale=scales[1]), *rows, self.cu_seqlens_k_new)
        return cache._replace(seqlens_k=grown.seqlens_k)

    def _cache(self) -> tw.PagedCache | tw.QuantizedCache:
        """Return the cache before anything is written: a row of a dense one is a page of its whole length."""
        batch = self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1
        device, table = self.q.device, self.block_table
        if table is None:
            rows = torch.arange(batch, device=device) if self.cache_batch_idx is None else self.cache_batch_idx
            table = rows.to(torch.int32).unsqueeze(1)
        lengths = self._capacity if self.cache_seqlens is None else self.cache_seqlens
        if not isinstance(lengths, Tensor):
            lengths = torch.full((batch,), lengths, dtype=torch.int32, device=device)
        scales = self._scales() if self._quantised else {}
        return tw.paged(self.k_cache, self.v_cache, table, lengths.to(torch.int32), **scales)

    def _refuse_no_tensors(self) -> None:
        needed = "q", "k_cache", "v_cache"
        numbers = [name for name in ("k", "v", "rotary_cos", "rotary_sin") if getattr(self, name) is not None]
        indices = "block_table", "cache_batch_idx", "cache_leftpad", "cu_seqlens_q", "cu_seqlens_k_new"
        named = [(name, getattr(self, name)) for name in (*needed, *numbers, *indices)]
        raise_wrong("flash_attn_with_kvcache", not_tensors(named, (*needed, *numbers)))

    def _refuse_wrong(self) -> None:
        wrong = {
            "k and v come together": (self.k is None) != (self.v is None),
            "rotary_cos and rotary_sin come together": (self.rotary_cos is None) != (self.rotary_sin is None),
            "new keys need cache_seqlens, the lengths before": self.cache_seqlens is None and self.k is not None,
            "rotary embeddings are for new keys and their queries; pass k and v with them, or turn q before the call": (
                self.rotary_cos is not None and self.k is None
            ),
            "cache_batch_idx chooses rows of a dense cache, and a block_table names pages; give one of them": (
                self.block_table is not None and self.cache_batch_idx is not None
            ),
            "rotary embeddings of packed rows are not built; turn q and k before the call": self.rotary_cos is not None
            and (self.cu_seqlens_q is not None or self.cu_seqlens_k_new is not None),
            "cu_seqlens_k_new is of packed new keys; pass k and v with it": self.cu_seqlens_k_new is not None
            and self.k is None,
        }
        reasons = [reason for reason, is_wrong in wrong.items() if is_wrong]
        for name, x in (("cache_seqlens", self.cache_seqlens), ("cache_batch_idx", self.cache_batch_idx)):
            if not _is_whole(x):
                got = x.dtype if isinstance(x, Tensor) else repr(x)
                reasons.append(f"{name} must be int32 (batch,){' or an int' * (name == 'cache_seqlens')}, got {got}")
        if self.rotary_cos is not None and self.rotary_sin is not None:
            reasons += self._rotary_reasons(self.rotary_cos, self.rotary_sin)
        raise_wrong("flash_attn_with_kvcache", reasons)

    def _rotary_reasons(self, cos: Tensor, sin: Tensor) -> list[str]:
        head_dim = self.q.shape[-1]
        if cos.ndim == 2 and cos.shape == sin.shape and 2 * cos.shape[1] <= head_dim:
            return []
        return [
            f"rotary_cos and rotary_sin must both be (seqlen_rotary, rotary_dim / 2), rotary_dim up to {head_dim}; got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        ]


def _is_whole(x: object) -> bool:
    """Return whether an argument is a whole number, a tensor of them, or None."""
    if isinstance(x, Tensor):
        return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    return x is None or hasattr(x, "__index__")


class Rotary:
    """Rotary embedding at the positions behind ``lengths`` (Su et al. 2021, section 3.4.2), computed in fp32 (fp64 for fp64)."""

    def __init__(self, cos: Tensor, sin: Tensor, interleaved: bool, lengths: Tensor):
        self.cos, self.sin, self.interleaved, self.lengths = cos, sin, interleaved, lengths

    def __call__(self, x: Tensor, moving: bool) -> Tensor:
        """``x (batch, rows, heads, head_dim)`` turned; ``moving``: each row at its own position, else all at the first."""
        position = self.lengths.long().unsqueeze(1)
        position = position + torch.arange(x.shape[1], device=x.device) if moving else position
        rows = self.cos.shape[0]
        if position.device.type == "cpu" and not torch.compiler.is_compiling() and (position >= rows).any():
            reason = f"rotary_cos and rotary_sin have {rows} rows, but positions reach {int(position.max())}"
            raise_wrong("flash_attn_with_kvcache", [reason])
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = (table[position].to(dtype).unsqueeze(2) for table in (self.cos, self.sin))
        half = self.cos.shape[1]
        turned, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
        a, b = turned.unflatten(-1, (half, 2)).unbind(-1) if self.interleaved else turned.split(half, -1)
        pair = a * cos - b * sin, a * sin + b * cos
        turned = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat([turned.to(x.dtype), rest], -1)
