"""Attention where models answer, on a GPU: `python -m bench.serving --out FILE [--parts check,replay,append,...]`.

check   every kind of page, row and mask against float64
replay  one CUDA graph replayed with other lengths, tables and keys, over each backend that a graph can hold: each result against a
        call without a graph, some against float64
append  one new key for each of 64 sequences, by Triton's kernel and by PyTorch's operations
time    decoding and prefill of a chunk, over dense keys and over pages, in CUDA graphs, beside PyTorch's SDPA
decode  decoding alone, in more shapes: over dense keys and over pages of 64, by each backend, beside cuDNN
steps   decoding of other kinds: pages of 16, wider groups, a few queries, windows, head dim 256
peers   decoding beside FlexAttention too, whose compiler takes seconds for each shape
rates   decoding over sequences of ever more keys, which ``--draw PICTURE`` shows
tiles   decoding over pages with other tiles and splits than the configured ones

Keys come from slow memory: a graph holds calls over so many copies of K and V that the L2 keeps none. GB/s are the bytes of K and V
over the time, of a cache in 8 bits those of its numbers and scales, of a latent one those of K, in which V lies. What is not right is
not timed. ``--device cpu`` rehearses it on small calls, of Triton in its interpreter.
"""

import argparse
import json
import random
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

import tilewise as tw
from bench import measure, records
from bench.measure import in_turns, seconds_per_call
from bench.serving_peers import flex, sdpa
from bench.serving_plot import draw
from tilewise import cache as caches
from tilewise import pages
from tilewise.backends.triton import Triton
from tilewise.backends.triton.config import Config
from tilewise.backends.triton.paging import choose_paged
from tilewise.testing import paged_call

PAGE_SIZES = (16, 64, 256)
PEERS = {
    "dense": "tw.attention over dense keys",
    "dense-triton": "the same, by the triton backend",
    "fa2": "SDPA's flash backend over dense keys",
    "cudnn": "SDPA's cuDNN backend over dense keys",
    "flex": "FlexAttention over dense keys, compiled for their shape",
    "triton": "the triton backend",
    "hopper": "the hopper backend",
    "cache": "tw.attention_paged over tw.dense_cache",
    "append": "tw.append",
    "append-torch": "the same by PyTorch's operations",
}
PEERS |= {
    "pages-64-fp8": "tw.attention_paged over pages of 64 keys in e4m3, one scale for each head",
    "pages-64-fp8-each": "the same, one scale for each token and head",
}
PEERS |= {f"pages-{size}": f"tw.attention_paged over pages of {size} keys" for size in PAGE_SIZES}
PEERS |= {f"pages-{size}-triton": f"the same over pages of {size} keys, by the triton backend" for size in PAGE_SIZES}
FP8 = re.compile(r"(fp8(-each)?)?$")  # what a contestant's name says of its numbers
POOLS = ("k_pages", "v_pages", "k_scale", "v_scale")
PARTS = ("check", "replay", "append", "time", "decode", "steps", "peers", "rates", "tiles")
# The contestants of some parts; of the others all but FlexAttention.
CHOSEN = {
    "rates": ("pages-64", "cudnn"),
    "decode": ("dense", "dense-triton", "pages-64", "pages-64-triton", "cudnn"),
    "steps": ("dense", "dense-triton", "pages-16", "pages-16-triton", "pages-64", "pages-64-triton", "cudnn"),
    "peers": ("pages-64", "cache", "fa2", "cudnn", "flex"),
}
ROUNDS = 7
REPLAYED = (
    ("decode", "triton", 64, 1),
    ("decode", "hopper", 64, 1),
    ("pages of 16", "triton", 16, 1),
    ("chunk", "triton", 64, 70),
    ("chunk", "hopper", 64, 300),
)  # name, backend, page size, queries of a sequence; the portable backend reads on the host, which no graph holds
JUDGED = 20  # of so many replays one is held against float64; all of them against a call without a graph
ROWS = {
    "tiles": ("b1-1k", "b1-16k", "b1-128k", "b8-32k", "b64-4k", "b2-200"),
    "decode": ("b1-1k", "b1-16k", "b1-128k", "b8-32k", "b64-1k", "b64-4k", "b16-8k-d64", "b8-8k-h16", "b2-200"),
    "peers": ("b1-16k", "b8-32k", "b64-4k", "b2-200"),
}  # the cases of some parts
ROTATED = 400 << 20  # bytes of K and V that one graph reads at least: an H200's L2 has 50 MiB
MOST_COPIES = 64
Attend = Callable[[int], Tensor]


@dataclass(frozen=True)
class Case:
    """Queries at the end of sequences of ``keys`` each; ``pages`` are the page sizes of which a cache is timed."""

    name: str
    batch: int
    keys: int
    heads_q: int = 32
    heads_k: int = 8
    head_dim: int = 128
    queries: int = 1
    pages: tuple[int, ...] = (64,)
    fp8: bool = False  # whether caches in 8 bits are timed too
    values: int = 0  # the columns of K that are V, of a latent cache; 0: V has memory of its own
    left: int | None = None  # the bound of a window, whose rows see no key beyond their own

    @property
    def options(self) -> dict:
        """The mask: causal where there are more queries than one, or a window."""
        return {"causal": self.queries > 1} if self.left is None else {"mask": tw.window(self.left, 0)}

    @property
    def seen(self) -> int:
        """The keys of a sequence that some query sees."""
        return self.keys if self.left is None else min(self.keys, self.left + self.queries)

    @property
    def bytes(self) -> int:
        """The bytes of K and V that some query sees, in bf16."""
        return 2 * (1 if self.values else 2) * self.batch * self.seen * self.heads_k * self.head_dim

    def bytes_of(self, contestant: str) -> int:
        """The bytes of K and V as a contestant reads them."""
        scales = 2 * 4 * self.batch * self.seen * self.heads_k if contestant.endswith("-each") else 0
        return self.bytes // 2 + scales if "fp8" in contestant else self.bytes

    @property
    def flops(self) -> int:
        """The operations of the two products."""
        widths = self.head_dim + (self.values or self.head_dim)
        return 2 * self.batch * self.queries * self.heads_q * self.seen * widths

    @property
    def shape(self) -> dict:
        """The case as a result carries it."""
        names = ("batch", "queries", "keys", "heads_q", "heads_k", "head_dim")
        window = {} if self.left is None else {"window": self.left}
        return {"what": "queries over a cache"} | {name: getattr(self, name) for name in names} | window


CASES = {
    "cuda": (
        Case("b1-1k", 1, 1024, pages=(16, 64)),
        Case("b1-16k", 1, 16384, fp8=True),
        Case("b1-128k", 1, 131072),
        Case("b8-32k", 8, 32768, pages=(16, 64, 256), fp8=True),
        Case("b64-4k", 64, 4096, fp8=True),
        Case("b64-1k", 64, 1024),
        Case("b16-8k-d64", 16, 8192, 64, 8, 64),
        Case("b8-8k-h16", 8, 8192, 16, 16),
        Case("chunk-512-32k", 1, 32768, queries=512, pages=(16, 64), fp8=True),
        Case("chunk-512-32k-d64", 1, 32768, 32, 8, 64, queries=512, pages=(16, 64)),
        Case("chunk-2048-32k", 1, 32768, queries=2048),
        Case("chunks-4-256-8k", 4, 8192, queries=256, pages=(16, 64)),
        Case("latent-b32-8k", 32, 8192, 128, 1, 576, values=512),
        Case("latent-chunk-64-8k", 4, 8192, 128, 1, 576, 64, values=512),
    ),
    "cpu": (
        Case("b2-200", 2, 200, 4, 2, 16, pages=(64,), fp8=True),
        Case("chunk-3-70", 1, 70, 4, 2, 16, 3, (16,)),
        Case("latent-b2-70", 2, 70, 4, 1, 32, values=16),
    ),
}

STEPS = {
    "cuda": [
        Case("p16-b8-1k", 8, 1024, pages=(16, 64)),
        Case("p16-b8-4k", 8, 4096, pages=(16, 64)),
        Case("p16-b64-4k", 64, 4096, pages=(16, 64)),
        Case("p16-b8-32k", 8, 32768, pages=(16, 64)),
        Case("g16-b8-4k", 8, 4096, 128, 8),
        Case("g16-b16-8k", 16, 8192, 64, 4),
        Case("q2-b8-4k", 8, 4096, 64, 8, queries=2, pages=(16, 64)),
        Case("q4-b32-8k", 32, 8192, queries=4),
        Case("q8-b8-4k", 8, 4096, 64, 8, queries=8, pages=(16, 64)),
        Case("w128-b64-1k-d64", 64, 1024, 64, 8, 64, left=127, pages=(16, 64)),
        Case("w1k-b32-4k", 32, 4096, left=1023),
        Case("d256-b8-4k", 8, 4096, head_dim=256, pages=(16, 64)),
        Case("d256-b8-16k", 8, 16384, head_dim=256),
        Case("d256-b20-4k", 20, 4096, head_dim=256),
    ],
    "cpu": [Case("q2-b2-70", 2, 70, 4, 2, 16, queries=2, left=15)],
}  # decoding steps of other kinds

SWEPT = {
    "cuda": {1: (1024, 4096, 16384, 65536, 131072), 8: (1024, 4096, 16384, 32768), 64: (256, 1024, 4096, 8192)},
    "cpu": {1: (128, 256), 8: (64,)},
}  # keys, by batch


# ---- tensors -------------------------------------------------------------------------------------------------------


class Keys:
    """K and V of a case, in copies, dense and in shuffled pages of the same contents."""

    def __init__(self, case: Case, device: str):
        copies = max(1, min(MOST_COPIES, -(-ROTATED // case.bytes))) if device == "cuda" else 1
        generator = torch.Generator(device).manual_seed(0)
        self.case, self.device, self.generator, self.copies = case, device, generator, copies
        self.lengths = torch.full((case.batch,), case.keys, dtype=torch.int32, device=device)
        self.q = self.drawn(case.batch, case.queries, case.heads_q, case.head_dim)
        shape = case.batch, case.keys, case.heads_k, case.head_dim
        self.dense = [(k := self.drawn(*shape), self.values_of(k)) for _ in range(copies)]

    def values_of(self, k: Tensor) -> Tensor:
        return k[..., : self.case.values] if self.case.values else self.drawn(*k.shape)

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.bfloat16)

    def dense_caches(self) -> list[tw.PagedCache]:
        return [tw.dense_cache(k, v, self.lengths) for k, v in self.dense]

    def paged(self, page_size: int) -> list[tw.PagedCache]:
        """A cache for each copy; keys past the last are zeros."""
        found, case = [], self.case
        most = -(-case.keys // page_size)
        for k, v in self.dense:
            order = torch.randperm(case.batch * most, generator=self.generator, device=self.device)
            pools = []
            for x in (k, k if case.values else v):
                whole = F.pad(x, (0, 0, 0, 0, 0, most * page_size - case.keys))
                pool = torch.empty_like(whole).view(-1, page_size, *x.shape[2:])
                pool[order] = whole.view(pool.shape)
                pools.append(pool)
            if case.values:
                pools[1] = pools[0][..., : case.values]
            found.append(tw.paged(*pools, order.view(case.batch, most).int(), self.lengths))
        return found

    def quantised(self, page_size: int, each: bool) -> list[tw.QuantizedCache]:
        """The caches of :meth:`paged` in e4m3, with a scale for each head, or for each token and head."""
        found = []
        for cache in self.paged(page_size):
            scales = [pages.token_scales(x) for x in cache[:2]]
            scales = scales if each else [s.amax((0, 1)) for s in scales]
            pools = [pages.quantised(x, s.unsqueeze(-1)) for x, s in zip(cache[:2], scales, strict=True)]
            found.append(tw.paged(*pools, *cache[2:], k_scale=scales[0], v_scale=scales[1]))
        return found


# ---- who is timed --------------------------------------------------------------------------------------------------


def contestants(keys: Keys) -> Iterator[tuple[str, Attend]]:
    """Each of them computes the attention over one copy of the keys. All but those of tilewise read dense keys."""
    case, q = keys.case, keys.q
    one = case.queries == 1 and case.left is None
    backend = "triton" if keys.device == "cpu" else None

    def dense(backend: str | None) -> Attend:
        return lambda n: tw.attention(q, *keys.dense[n], **case.options, backend=backend)

    def over(caches: list[tw.PagedCache] | list[tw.QuantizedCache], backend: str | None = backend) -> Attend:
        return lambda n: tw.attention_paged(q, caches[n], **case.options, backend=backend)

    if not case.values:
        yield "dense", dense(backend)
    if keys.device == "cuda" and not case.values:
        yield "dense-triton", dense("triton")
    yield "cache", over(keys.dense_caches())
    for page_size in case.pages:
        yield f"pages-{page_size}", over(keys.paged(page_size))
        if keys.device == "cuda":  # where Hopper has kernels, it takes the calls before
            yield f"pages-{page_size}-triton", over(keys.paged(page_size), "triton")
    if case.fp8:
        yield "pages-64-fp8", over(keys.quantised(64, False))
        yield "pages-64-fp8-each", over(keys.quantised(64, True))
    if keys.device == "cuda" and not case.values:
        for name, which in (("fa2", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            if one or (name == "fa2" and case.left is None):
                yield name, sdpa(keys, which)
    if one and not case.values:
        yield "flex", flex(keys)


def tiled(keys: Keys, cache_of: list[tw.PagedCache]) -> Iterator[tuple[str, Attend]]:
    """Triton over pages with the configured tiles, and with others."""
    c = paged_call(keys.q, cache_of[0])
    base = choose_paged(c.p, {})
    tiles, found = base.forward, {}
    found |= {f"splits of {keys} or more": replace(base, split=keys) for keys in (256, 1024)}
    for splits in (8, 16, 32, 64, 128) if keys.device == "cuda" else (2,):
        found[f"splits {splits}"] = replace(base, splits=splits)
    other = {"stages 2": {"num_stages": 2}, "stages 4": {"num_stages": 4}, "pointers": {"tma": False}}
    other |= {"8 warps": {"num_warps": 8}, "16 rows": {"tile_m": 16}, "16 rows, 5": {"tile_m": 16, "num_stages": 5}}
    other |= {"32 keys": {"tile_n": 32, "num_stages": 6}}
    for name, changed in other.items():
        found[name] = replace(base, forward=replace(tiles, **changed))
    yield base.describe(), over_config(base, c, cache_of)
    for name, config in found.items():
        yield name, over_config(config, c, cache_of)


def over_config(config: Config, c, caches: list[tw.PagedCache]) -> Attend:
    """Triton with one configuration, below the public call."""
    backend = Triton(config)

    def attend(n: int) -> Tensor:
        cache = caches[n]
        inputs = replace(
            c.t, k=cache.k_pages, v=cache.v_pages, block_table=cache.block_table, seqlens_k=cache.seqlens_k
        )
        inputs.leaves = [cache.block_table, cache.seqlens_k]
        return backend.forward(c.p, inputs).o

    return attend


# ---- is it right ---------------------------------------------------------------------------------------------------


def faults(o: Tensor, expected) -> str:
    """The faults of the first sequence's o; empty: none."""
    return "; ".join(str(e) for e in expected.judge({"o": o[:1]}) if not e.ok)


def expected_of(keys: Keys, contestant: str):
    """The oracle of the first sequence over the first copy of what a contestant reads."""
    cache = tw.dense_cache(*keys.dense[0], keys.lengths)
    if "fp8" in contestant:
        cache = keys.quantised(64, contestant.endswith("-each"))[0]
    first = cache._replace(block_table=cache.block_table[:1], seqlens_k=cache.seqlens_k[:1])
    return paged_call(keys.q[:1], first, **keys.case.options).expected()


@dataclass(frozen=True)
class Kind:
    """A call over ragged sequences, checked in these dtypes; ``options`` are those of a device."""

    name: str
    page_size: int
    queries: int = 1
    packed: bool = False
    options: Callable[[str], dict] = lambda device: {}
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    scales: str = ""  # of a cache in 8 bits: "heads", "sequences" or "tokens"
    latent: bool = False  # whether v is the first half of k's columns


KINDS = (
    Kind("decode", 64, dtypes=(torch.bfloat16, torch.float16, torch.float32)),
    Kind("pages of 16, decode", 16),
    Kind("pages of 1, decode", 1),
    Kind("pages of 48, chunk", 48, 70, options=lambda device: {"causal": True}),
    Kind("chunk", 64, 300, options=lambda device: {"causal": True}),
    Kind("packed", 64, 40, True, lambda device: {"causal": True}, (torch.bfloat16, torch.float32)),
    Kind(
        "window, sink",
        64,
        3,
        options=lambda device: {"mask": tw.window(300, 0), "sink": torch.linspace(-1, 1, 8, device=device)},
    ),
    Kind(
        "softcap, alibi",
        16,
        2,
        True,
        lambda device: {"score": tw.softcap(5.0) >> tw.alibi(torch.linspace(0.1, 1, 8, device=device))},
    ),
    Kind(
        "tree",
        64,
        4,
        options=lambda device: {"mask": tw.keep(lambda b, h, i, j: (j <= i + tw.offset) & ((i + j) % 3 > 0))},
    ),
    Kind("8 bits, heads", 64, 3, options=lambda device: {"causal": True}, scales="heads"),
    Kind(
        "8 bits, tokens",
        16,
        40,
        True,
        lambda device: {"causal": True},
        (torch.bfloat16, torch.float16),
        scales="tokens",
    ),
    Kind("8 bits, sequences", 48, 4, options=lambda device: {"score": tw.softcap(5.0)}, scales="sequences"),
    Kind("8 bits, chunk", 64, 300, options=lambda device: {"causal": True}, scales="tokens"),
    Kind("latent, decode", 64, latent=True),
    Kind("latent, chunk", 64, 70, options=lambda device: {"causal": True}, latent=True),
    Kind("deterministic", 64, options=lambda device: {"deterministic": True}),
)


def ragged(
    device: str, page_size: int, queries: int, packed: bool, dtype: torch.dtype, longest: int, seed: int = 0
) -> tuple[Tensor, tw.PagedCache, Tensor | None]:
    """q, a cache of five sequences of other lengths with NaN wherever no key lies, and cu_seqlens_q."""
    generator = torch.Generator(device).manual_seed(seed)
    lengths = torch.tensor([longest, 0, 1, longest // 2 + 1, longest // 3], dtype=torch.int32, device=device)
    most = -(-longest // page_size) + 1
    count = 5 * most + 2
    table = torch.randperm(count, generator=generator, device=device)[: 5 * most].view(5, most).int()
    pools = [torch.randn(count, page_size, 2, 64, generator=generator, device=device).to(dtype) for _ in range(2)]
    position = torch.arange(most * page_size, device=device).view(most, page_size)
    used = torch.zeros(count, page_size, dtype=torch.bool, device=device)
    for b in range(5):
        used[table[b].long()] = position < lengths[b]
    for pool in pools:
        pool.masked_fill_(~used[:, :, None, None], torch.nan)
    table.masked_fill_(torch.arange(most, device=device) * page_size >= lengths[:, None], 2**30)
    shape = (5 * queries + 3,) if packed else (5, queries)
    q = torch.randn(*shape, 8, 64, generator=generator, device=device).to(dtype)
    ends = torch.tensor([0, queries, queries, 3 * queries, 4 * queries, 5 * queries], dtype=torch.int32, device=device)
    return q, tw.paged(*pools, table, lengths), ends if packed else None


def in_8_bits(cache: tw.PagedCache, scales: str) -> tw.QuantizedCache:
    """A cache's numbers in e4m3, NaN where they are; the scales of sequences and heads are any."""
    each = [pages.token_scales(x) for x in cache[:2]]
    if scales != "tokens":
        shape = cache.k_pages.shape[2:3] if scales == "heads" else (len(cache.seqlens_k), cache.k_pages.shape[2])
        each = [torch.rand(shape, device=x.device) / 64 + 1 / 128 for x in cache[:2]]
    factors = [s.unsqueeze(-1) if scales == "tokens" else 1 / 64 for s in each]
    pools = [pages.quantised(x, s) for x, s in zip(cache[:2], factors, strict=True)]
    return tw.paged(*pools, *cache[2:], k_scale=each[0], v_scale=each[1])


def check(device: str) -> Iterator[tuple[str, str]]:
    """``(kind, what is wrong)``; nothing is wrong where that is empty."""
    longest, most = (3000, 300) if device == "cuda" else (70, 3)
    for kind in KINDS:
        for dtype in kind.dtypes:
            q, cache, cu = ragged(device, kind.page_size, min(kind.queries, most), kind.packed, dtype, longest)
            cache = cache._replace(v_pages=cache.k_pages[..., :32]) if kind.latent else cache
            cache = in_8_bits(cache, kind.scales) if kind.scales else cache
            options = kind.options(device)
            o, lse = tw.attention_paged_with_lse(q, cache, cu, backend="triton", **options)
            expected = paged_call(q, cache, cu_seqlens_q=cu, **options).expected()
            wrong = [str(e) for e in expected.judge({"o": o, "lse": lse}) if not e.ok]
            yield f"{kind.name}, {str(dtype).removeprefix('torch.')}", "; ".join(wrong)
    yield from check_append(device)


def check_append(device: str) -> Iterator[tuple[str, str]]:
    """Triton's kernel against PyTorch's operations: the same bits in every page."""
    _, cache, _ = ragged(device, 16, 1, False, torch.bfloat16, 3000 if device == "cuda" else 70)
    cache = cache._replace(seqlens_k=cache.seqlens_k // 2)
    rows = [torch.randn(5, 7, 2, 64, device=device).bfloat16() for _ in range(2)]
    ends = torch.tensor([0, 20, 20, 22, 30, 33], dtype=torch.int32, device=device)
    for name, new, cu in (("rectangular", rows, None), ("packed", [x.flatten(0, 1) for x in rows], ends)):
        one, other = (cache._replace(k_pages=cache.k_pages.clone(), v_pages=cache.v_pages.clone()) for _ in range(2))
        took = Triton().append(one, *new, cu)
        caches._write(other, *new, cu)
        same = all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(one[:2], other[:2], strict=True))
        yield f"append, {name}", "" if took and same else "other bits" if took else "no kernel took it"
        for scales in ("heads", "sequences", "tokens"):
            one, other = (in_8_bits(cache, scales) for _ in range(2))
            other = other._replace(k_scale=one.k_scale.clone(), v_scale=one.v_scale.clone())
            took = Triton().append(one, *new, cu)
            caches._write(other, *new, cu)
            left, right = ([getattr(x, name).float().nan_to_num() for name in POOLS] for x in (one, other))
            same = all(torch.equal(x, y) for x, y in zip(left, right, strict=True))
            yield (
                f"append in 8 bits, {name}, {scales}",
                "" if took and same else "other bits" if took else "no kernel took it",
            )


def replay(device: str) -> Iterator[tuple[str, str, str]]:
    """``(kind, what is wrong, backend)`` of one graph for each kind of call, replayed with other lengths, tables and keys."""
    for name, backend, page_size, queries in REPLAYED:
        longest, turns = (2000, 1000) if device == "cuda" else (70, 3)
        q, cache, _ = ragged(device, page_size, queries if device == "cuda" else 1, False, torch.bfloat16, longest)
        if backend in tw.explain(q, cache, causal=True, backend=backend).refused:
            continue
        attend = over_static(q, cache, backend)
        again, result = captured(attend, device)
        wrong = []
        for turn in range(turns):
            other_q, other, _ = ragged(device, page_size, q.shape[1], False, torch.bfloat16, longest, seed=turn + 1)
            shorter = torch.minimum(other.seqlens_k, other.seqlens_k.roll(turn))
            for old, new in zip((q, *cache), (other_q, *other._replace(seqlens_k=shorter)), strict=True):
                old.copy_(new)
            again()
            o, lse = (x.clone() for x in result)
            wrong += [] if all(map(torch.equal, (o, lse), attend())) else [f"replay {turn}: other bits"]
            if turn % JUDGED == 0:
                expected = paged_call(q, cache, causal=True).expected()
                wrong += [f"replay {turn}: {e}" for e in expected.judge({"o": o, "lse": lse}) if not e.ok]
        yield f"{name}, {backend}, {turns} replays", "; ".join(wrong[:5]), backend


def over_static(q: Tensor, cache: tw.PagedCache, backend: str) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: tw.attention_paged_with_lse(q, cache, causal=True, backend=backend)


def captured(call: Callable[[], object], device: str) -> tuple[Callable[[], object], object]:
    """A call as a CUDA graph, and what it returned; on a CPU the call itself, which writes into what it returned first."""
    if device != "cpu":
        return measure.captured(call)
    result = call()
    if not isinstance(result, tuple):
        return call, result

    def again() -> None:
        for old, new in zip(result, call(), strict=True):
            old.copy_(new)

    return again, result


# ---- how fast ------------------------------------------------------------------------------------------------------


def timed(keys: Keys, who: Iterator[tuple[str, Attend]]) -> tuple[dict[str, float], dict[str, str]]:
    """Milliseconds a call of those that are right, the median over rounds in orders of their own; and who is not, and why."""
    graphs, wrong = {}, {}
    oracles = lru_cache(partial(expected_of, keys))  # one for all that read the same numbers
    kept = list(who)  # until the last replay: a graph reads the caches of its contestant where they lay at its capture
    for name, attend in kept:
        try:
            fault = faults(attend(0), oracles(FP8.search(name)[0]))
            if fault:
                wrong[name] = fault
                continue
            for n in range(keys.copies):
                attend(n)
            again, _ = captured(lambda a=attend: [a(n) for n in range(keys.copies)], keys.device)
            graphs[name] = again
        except Exception as error:  # one that cannot run leaves the others their time
            wrong[name] = str(error).strip().splitlines()[-1][:200]
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    chance = random.Random(0)
    for _ in range(ROUNDS if keys.device == "cuda" else 1):
        for name in chance.sample(list(graphs), len(graphs)):
            once = seconds_per_call(graphs[name], 1, keys.device)
            calls = max(1, min(40, int(8e-3 / once)))
            samples[name].append(seconds_per_call(graphs[name], calls, keys.device) / keys.copies)
    return {name: statistics.median(x) * 1e3 for name, x in samples.items()}, wrong


def results_of(part: str, run: str, device: str) -> Iterator[dict]:
    """The results of a part, as they come."""
    if part in ("check", "replay"):
        found = ((*x, "triton") for x in check(device)) if part == "check" else replay(device)
        for name, wrong, backend in found:
            yield records.result(
                run, f"serving-{part}-{name}", backend, "forward", "right", int(not wrong), of=1, why=wrong,
                shape={"what": f"{part}: {name}"},
            )  # fmt: skip
        return
    if part == "append":
        yield from time_append(run, device)
        return
    for case in cases_of(part, device):
        if case in CASES[device] and case.name not in ROWS.get(part, (case.name,)):
            continue
        with torch.no_grad():
            keys = Keys(case, device)
            who = tiled(keys, keys.paged(case.pages[-1])) if part == "tiles" else contestants(keys)
            if part in CHOSEN:
                who = ((name, attend) for name, attend in who if name in CHOSEN[part])
            elif part == "time":
                who = ((name, attend) for name, attend in who if name != "flex")
            found, wrong = timed(keys, who)
        for name, ms in found.items():
            numbers = {"gb_per_s": round(case.bytes_of(name) / ms / 1e6, 1), "shape": case.shape}
            numbers |= {"tflop_per_s": round(case.flops / ms / 1e9, 1)} if case.values else {}
            yield records.result(run, f"serving-{case.name}", name, "forward", "time", ms, **numbers)
        for name, why in wrong.items():
            yield records.result(
                run, f"serving-{case.name}", name, "forward", "time", None, why=[why], shape=case.shape
            )


def cases_of(part: str, device: str) -> list[Case]:
    """The cases of a part that times."""
    if part in ("rates", "steps"):
        return list(swept(device)) if part == "rates" else STEPS[device]
    return [*CASES[device], *(shapes(device) if part == "decode" else ())]


def shapes(device: str) -> Iterator[Case]:
    """Decoding steps whose sequences even shares cut at their ends, or anywhere; beside those of the other parts."""
    for batch, keys in (
        ((8, 1024), (4, 4096), (8, 4096), (12, 4096), (20, 2048), (32, 8192)) if device == "cuda" else ()
    ):
        yield Case(f"b{batch}-{keys // 1024}k", batch, keys)


def swept(device: str) -> Iterator[Case]:
    """Decoding steps of 32 query heads and 8 key heads of 128, over ever more keys; on a CPU of few narrow ones."""
    heads = () if device == "cuda" else (4, 2, 16)
    for batch, lengths in SWEPT[device].items():
        yield from (Case(f"rate-b{batch}-{keys}", batch, keys, *heads) for keys in lengths)


def time_append(run: str, device: str) -> Iterator[dict]:
    """One new key for each of 64 sequences, in a CUDA graph: by Triton's kernel and by PyTorch's operations."""
    keys = Keys(Case("append-b64", 64 if device == "cuda" else 2, 200), device)
    caches_of = [x._replace(seqlens_k=x.seqlens_k - 1) for x in keys.paged(64)]
    k, v = (x[:, :1].contiguous() for x in keys.dense[0])
    who = {"append": Triton().append, "append-torch": caches._write}
    graphs = {
        name: captured(lambda write=write: [write(x, k, v, None) for x in caches_of], device)[0]
        for name, write in who.items()
    }
    for name, ms in in_turns(graphs, device).items():
        yield records.result(
            run, "serving-append-b64", name, "forward", "time", ms / keys.copies, shape=keys.case.shape
        )


def shown(r: dict) -> str:
    if r["metric"] == "right":
        return f"{r['case']:50} {'right' if r['value'] else 'WRONG ' + r['why']}"
    if r["value"] is None:
        return f"{r['case']:26} {r['contestant']:40} {r['why'][0]}"
    rate = f"{r['gb_per_s']:8.1f} GB/s" if "gb_per_s" in r else ""
    rate += f" {r['tflop_per_s']:8.1f} TFLOP/s" if "tflop_per_s" in r else ""
    return f"{r['case']:26} {r['contestant']:40} {1e3 * r['value']:9.2f} us  {rate}"


def main() -> int:
    """Exit code 1: something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--out", type=Path, default=Path("out/serving.jsonl"))
    parser.add_argument("--parts", default="check,replay,append,time")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--draw", type=Path, metavar="PICTURE", help="draw the rates in the file of results, and measure nothing"
    )
    options = parser.parse_args()
    if options.draw:
        draw(options.out, options.draw)
        return 0
    parts = options.parts.split(",")
    if set(parts) - set(PARTS):
        parser.error(f"--parts takes {', '.join(PARTS)}")
    head = records.run(f"python -m bench.serving --parts {options.parts}", options.device, PEERS)
    records.append([head], options.out)
    wrong = 0
    for part in parts:
        for r in results_of(part, head["run"], options.device):
            records.append([r], options.out)
            wrong += r["metric"] == "right" and not r["value"]
            print(shown(r), flush=True)
        if wrong:
            print(json.dumps({"wrong": wrong}), flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
