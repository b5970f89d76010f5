"""Decoding and chunks of a prompt over a cache, on a GPU: parts of `bench.calls`.

serving  decoding and prefill of a chunk, over dense keys and over pages, in CUDA graphs, beside PyTorch's SDPA
decode   decoding alone, in more shapes: over dense keys and over pages of 64, by each backend, beside cuDNN
steps    decoding of other kinds: pages of 16, wider groups, a few queries, windows, head dim 256
rates    decoding over sequences of ever more keys, which docs/serving.md has a plot of
order    what `deterministic="everywhere"` and `True` cost over pages, beside a free choice

Keys come from slow memory: a graph holds calls over so many copies of K and V that the L2 keeps none. GB/s are the bytes of K and V
over the time, of a cache in 8 bits those of its numbers and scales, of a latent one those of K, in which V lies. What is not right is
not timed. ``--device cpu`` rehearses it on small calls, of Triton in its interpreter.
"""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import tilewise as tw
from bench import measure
from bench.records import Log
from bench.testing import paged_call
from tilewise import pages

PAGE_SIZES = (16, 64, 256)
PEERS = {
    "dense": "tw.attention over dense keys",
    "dense-triton": "the same, by the triton backend",
    "fa2": "SDPA's flash backend over dense keys",
    "cudnn": "SDPA's cuDNN backend over dense keys",
    "cache": "tw.attention_paged over tw.dense_cache",
}
PEERS |= {
    "pages-64-fp8": "tw.attention_paged over pages of 64 keys in e4m3, one scale for each head",
    "pages-64-fp8-each": "the same, one scale for each token and head",
}
PEERS |= {f"pages-{size}": f"tw.attention_paged over pages of {size} keys" for size in PAGE_SIZES}
PEERS |= {f"pages-{size}-triton": f"the same over pages of {size} keys, by the triton backend" for size in PAGE_SIZES}
ORDERED = {"pages-64-deterministic": True, "pages-64-everywhere": "everywhere"}
PEERS |= {name: f"pages of 64 keys with deterministic={how!r}" for name, how in ORDERED.items()}
FP8 = re.compile(r"(fp8(-each)?)?$")  # what a contestant's name says of its numbers
ROUNDS = 7
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


TIME = {
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

MORE = ((8, 1024), (4, 4096), (8, 4096), (12, 4096), (20, 2048), (32, 8192))
"""Sequences, which even shares cut anywhere, and keys."""
DECODE = {device: [c for c in cases if c.queries == 1 and not c.values] for device, cases in TIME.items()}
DECODE["cuda"] += [Case(f"b{batch}-{keys // 1024}k", batch, keys) for batch, keys in MORE]

SWEPT = {1: (1024, 4096, 16384, 65536, 131072), 8: (1024, 4096, 16384, 32768), 64: (256, 1024, 4096, 8192)}
RATES = {
    "cuda": [Case(f"rate-b{batch}-{keys}", batch, keys) for batch, lengths in SWEPT.items() for keys in lengths],
    "cpu": [Case(f"rate-b{batch}-{keys}", batch, keys, 4, 2, 16) for batch, keys in ((1, 128), (1, 256), (8, 64))],
}

ORDER = {
    "cuda": [
        *(
            Case(f"order-b{batch}-{keys}", batch, keys)
            for batch, keys in ((64, 1024), (8, 4096), (64, 4096), (1, 4096))
        ),
        *(Case(f"order-b1-{keys}", 1, keys) for keys in (16384, 65536)),
        Case("order-q4-b8-4096", 8, 4096, queries=4),
        *(Case(f"order-prefill-{queries}", 1, 8192, queries=queries) for queries in (2048, 8192)),
        Case("order-window-prefill", 4, 8192, queries=2048, left=1023),
        *(Case(f"order-window-b{b}-{keys}", b, keys, left=1023) for b, keys in ((64, 4096), (8, 16384), (1, 16384))),
        *(Case(f"order-d256-b{b}-{keys}", b, keys, head_dim=256) for b, keys in ((64, 4096), (8, 4096), (1, 16384))),
    ],
    "cpu": [Case("order-b2-200", 2, 200, 4, 2, 16)],
}

BOTH = ("dense", "dense-triton", "pages-64", "pages-64-triton", "cudnn")
PARTS = {
    "serving": (TIME, PEERS.keys() - ORDERED),
    "decode": (DECODE, BOTH),
    "steps": (STEPS, (*BOTH, "pages-16", "pages-16-triton")),
    "rates": (RATES, ("pages-64", "cudnn")),
    "order": (ORDER, ("pages-64", *ORDERED)),
}
"""The cases of each part by device, and its contestants."""


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


def sdpa(keys: Keys, which: SDPBackend) -> Attend:
    """PyTorch's attention over dense keys, by one of its backends."""
    case, q = keys.case, keys.q.transpose(1, 2)
    mask = causal_lower_right(case.queries, case.keys) if case.queries > 1 else None

    def attend(n: int) -> Tensor:
        k, v = (x.transpose(1, 2) for x in keys.dense[n])
        with sdpa_kernel(which):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    return attend


# ---- who is timed --------------------------------------------------------------------------------------------------


def contestants(keys: Keys) -> Iterator[tuple[str, Attend]]:
    """Each of them computes the attention over one copy of the keys. All but those of tilewise read dense keys."""
    case, q = keys.case, keys.q
    one = case.queries == 1 and case.left is None
    backend = "triton" if keys.device == "cpu" else None

    def dense(backend: str | None) -> Attend:
        return lambda n: tw.attention(q, *keys.dense[n], **case.options, backend=backend)

    def over(
        caches: list[tw.PagedCache] | list[tw.QuantizedCache], backend: str | None = backend, **more: Any
    ) -> Attend:
        return lambda n: tw.attention_paged(q, caches[n], **case.options, **more, backend=backend)

    if not case.values:
        yield "dense", dense(backend)
    if keys.device == "cuda" and not case.values:
        yield "dense-triton", dense("triton")
    yield "cache", over(keys.dense_caches())
    for page_size in case.pages:
        caches = keys.paged(page_size)
        yield f"pages-{page_size}", over(caches)
        if keys.device == "cuda":  # where Hopper has kernels, it takes the calls before
            yield f"pages-{page_size}-triton", over(caches, "triton")
        for name, how in ORDERED.items() if page_size == 64 else ():
            yield name, over(caches, deterministic=how)
    if case.fp8:
        yield "pages-64-fp8", over(keys.quantised(64, False))
        yield "pages-64-fp8-each", over(keys.quantised(64, True))
    if keys.device == "cuda" and not case.values:
        for name, which in (("fa2", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            if one or (name == "fa2" and case.left is None):
                yield name, sdpa(keys, which)


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


# ---- how fast ------------------------------------------------------------------------------------------------------


def timed(keys: Keys, who: Iterator[tuple[str, Attend]]) -> tuple[dict[str, float], dict[str, str]]:
    """Milliseconds a call of those that are right; and who is not, and why."""
    graphs, wrong = {}, {}
    oracles = lru_cache(partial(expected_of, keys))  # one for all that read the same numbers
    kept = list(who)  # until the last replay: a graph reads the caches of its contestant where they lay at its capture
    for name, attend in kept:
        try:
            fault = faults(attend(0), oracles(FP8.search(name)[0]))
            if fault:
                wrong[name] = fault
                continue
            every = lambda a=attend: [a(n) for n in range(keys.copies)]  # noqa: E731
            every()
            graphs[name] = measure.captured(every)[0] if keys.device == "cuda" else every
        except Exception as error:  # one that cannot run leaves the others their time
            wrong[name] = str(error).strip().splitlines()[-1][:200]
    ms = measure.in_turns(graphs, keys.device, ROUNDS if keys.device == "cuda" else 1, budget_ms=8.0)
    return {name: each / keys.copies for name, each in ms.items()}, wrong


def keep_times(case: Case, chosen: Collection[str], log: Log) -> None:
    """Keep the times of a case's contestants."""
    with torch.no_grad():
        keys = Keys(case, log.device)
        found, wrong = timed(keys, ((name, attend) for name, attend in contestants(keys) if name in chosen))
    keep = partial(log.add, f"serving-{case.name}", direction="forward", metric="time", shape=case.shape)
    for name, ms in found.items():
        numbers = {"gb_per_s": round(case.bytes_of(name) / ms / 1e6, 1)}
        numbers |= {"tflop_per_s": round(case.flops / ms / 1e9, 1)} if case.values else {}
        keep(who=name, value=ms, **numbers)
    for name, why in wrong.items():
        keep(who=name, value=None, why=[why])


def rows(part: str, device: str) -> Iterator[tuple[str, Callable[[Log], None]]]:
    """The cases of a part."""
    cases, chosen = PARTS[part]
    return ((case.name, partial(keep_times, case, chosen)) for case in cases[device])
