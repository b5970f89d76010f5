"""One sequence through every way that a call may have its rows and keys, for ``deterministic="everywhere"``.

A way computes o ``(seqlen, heads_q, head_dim_v)`` and lse ``(heads_q, seqlen)`` of the sequence of a :class:`Scene`, all rows or, with the
rows that it has, a part of them. Whatever else is in a call is drawn anew, and what no row may read is NaN.

    python -m tests.fuzz --ways 1000 --backend cpu
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

import tilewise as tw

Rows = tuple[Tensor, Tensor, Tensor]
"""o, lse, and the rows of the sequence that they are of."""


@dataclass(frozen=True)
class Scene:
    """A sequence, q ``(seqlen, heads_q, head_dim)``, and the options of its calls.

    Attributes:
        latent: v lies in the memory of k, as its first columns, where they lie in pages.
        every: the ways with many calls compute one of so many rows.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = True
    window: int | None = None
    cap: float | None = None
    sink: Tensor | None = None
    latent: bool = False
    backend: str | None = None
    every: int = 1

    @property
    def mask(self) -> tw.Mask:
        causal = tw.causal() if self.causal else tw.Mask("")
        return causal if self.window is None else causal & tw.window(left=self.window)

    def options(self, **more: Any) -> dict[str, Any]:
        score = None if self.cap is None else tw.softcap(self.cap)
        told = {
            "mask": self.mask,
            "score": score,
            "sink": self.sink,
            "backend": self.backend,
            "deterministic": "everywhere",
        }
        return told | more

    @classmethod
    def drawn(
        cls,
        seqlen: int,
        heads: tuple[int, int],
        dims: tuple[int, int],
        dtype: torch.dtype,
        device: str = "cpu",
        seed: int = 0,
        **more: Any,
    ) -> Scene:
        """Return a scene of normal numbers.

        Args:
            heads, dims: of q and of k; of k and of v. more: further fields, or ``with_sink``.
        """
        of = torch.Generator().manual_seed(seed)
        (heads_q, heads_k), (d, dv) = heads, dims
        q, k = (torch.randn(seqlen, h, d, generator=of).to(device, dtype) for h in heads)
        v = k[..., :dv] if more.get("latent") else torch.randn(seqlen, heads_k, dv, generator=of).to(device, dtype)
        if more.pop("with_sink", False):
            more["sink"] = torch.randn(heads_q, generator=of).to(device)
        return cls(q, k, v, **more)


def _like(x: Tensor, rows: int) -> Tensor:
    return torch.randn(rows, *x.shape[1:]).to(x)


def _all(o: Tensor, lse: Tensor) -> Rows:
    return o, lse, torch.arange(o.shape[0])


def dense(s: Scene) -> Rows:
    o, lse = tw.attention_with_lse(s.q[None], s.k[None], s.v[None], **s.options())
    return _all(o[0], lse[0])


def with_gradients(s: Scene) -> Rows:
    q, k, v = (x[None].detach().clone().requires_grad_() for x in (s.q, s.k, s.v))
    o, lse = tw.attention_with_lse(q, k, v, **s.options())
    return _all(o[0].detach(), lse[0].detach())


def with_statistics(s: Scene) -> Rows:
    found = tw.attention_with_stats(s.q[None], s.k[None], s.v[None], **s.options())
    return _all(found.o[0], found.lse[0])


def in_a_batch(s: Scene, count: int = 3) -> Rows:
    q, k, v = (torch.stack([x if n == 1 else _like(x, x.shape[0]) for n in range(count)]) for x in (s.q, s.k, s.v))
    o, lse = tw.attention_with_lse(q, k, v, **s.options())
    return _all(o[1], lse[1])


def packed(s: Scene, before: int = 37, after: int = 75) -> Rows:
    lengths = torch.tensor([before, s.q.shape[0], 0, after])
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(s.q.device)
    q, k, v = (torch.cat([_like(x, before), x, _like(x, after)]) for x in (s.q, s.k, s.v))
    o, lse = tw.attention_varlen_with_lse(q, k, v, cu, **s.options())
    at = slice(before, before + s.q.shape[0])
    return _all(o[at], lse[:, at])


def document(s: Scene, before: int = 21, after: int = 75) -> Rows:
    ids = torch.tensor([0] * before + [1] * s.q.shape[0] + [2] * after, device=s.q.device)
    q, k, v = (torch.cat([_like(x, before), x, _like(x, after)])[None] for x in (s.q, s.k, s.v))
    o, lse = tw.attention_with_lse(q, k, v, **s.options(mask=tw.documents(ids) & s.mask))
    at = slice(before, before + s.q.shape[0])
    return _all(o[0, at], lse[0, :, at])


def padded(s: Scene, more: int = 45) -> Rows:
    lengths = torch.tensor([s.q.shape[0], s.q.shape[0] + more], device=s.q.device)
    pad = lambda x: torch.cat([x, torch.full_like(x[:1], torch.nan).expand(more, *x.shape[1:])])  # noqa: E731
    q, k, v = (torch.stack([pad(x), _like(x, x.shape[0] + more)]) for x in (s.q, s.k, s.v))
    o, lse = tw.attention_with_lse(q, k, v, **s.options(mask=s.mask & tw.key_lengths(lengths)))
    return _all(o[0, : s.q.shape[0]], lse[0, :, : s.q.shape[0]])


def one_group(s: Scene) -> Rows:
    """The heads of the last key head alone, beside nothing; the others are not compared."""
    group = s.q.shape[1] // s.k.shape[1]
    sink = None if s.sink is None else s.sink[-group:].contiguous()
    o, lse = tw.attention_with_lse(s.q[None, :, -group:], s.k[None, :, -1:], s.v[None, :, -1:], **s.options(sink=sink))
    return _all(o[0], lse[0])


def keys_from(s: Scene, row: int) -> tuple[Tensor, Tensor]:
    """Return k and v, NaN in keys that no query from this row on sees."""
    unseen = 0 if s.window is None else max(0, row - s.window)
    return tuple(torch.cat([torch.full_like(x[:unseen], torch.nan), x[unseen:]]) for x in (s.k, s.v))


def last_rows(s: Scene) -> Rows:
    count = -(-s.q.shape[0] * 2 // 5)
    first = s.q.shape[0] - count
    k, v = keys_from(s, first)
    o, lse = tw.attention_with_lse(s.q[None, first:], k[None], v[None], **s.options())
    return o[0], lse[0], torch.arange(first, s.q.shape[0])


def last_rows_packed(s: Scene, before: int = 37, after: int = 75) -> Rows:
    """The last rows, packed beside others that have fewer queries than keys too; what no query sees is NaN."""
    n = s.q.shape[0]
    first = n - -(-n * 2 // 5)
    k, v = (torch.cat([_like(x, before), x, _like(x, after)]) for x in keys_from(s, first))
    q = torch.cat([_like(s.q, 1), s.q[first:], _like(s.q, 3)])
    lengths = torch.tensor([[1, n - first, 3], [before, n, after]])
    cu_q, cu_k = torch.nn.functional.pad(lengths.cumsum(1), (1, 0)).int().to(s.q.device)
    o, lse = tw.attention_varlen_with_lse(q, k, v, cu_q, cu_k, **s.options())
    at = slice(1, 1 + n - first)
    return o[at], lse[:, at], torch.arange(first, n)


class Cache:
    """The sequence in pages in a drawn order, beside a shorter one; what lies behind lengths and in free pages is NaN."""

    def __init__(self, s: Scene, page: int):
        self.s, n = s, s.k.shape[0]
        rows = -(-n // page)
        order = torch.randperm(2 * rows + 3)
        table = order[: 2 * rows].view(2, rows)
        pools = [torch.full((len(order) * page, *x.shape[1:]), torch.nan).to(x) for x in (s.k, s.v)]
        place = (table[0].repeat_interleave(page) * page + torch.arange(page).repeat(rows))[:n].to(s.q.device)
        other = (table[1].repeat_interleave(page) * page + torch.arange(page).repeat(rows)).to(s.q.device)
        for pool, x in zip(pools, (s.k, s.v), strict=True):
            pool[place], pool[other] = x, _like(x, len(other))
        k, v = (x.unflatten(0, (len(order), page)) for x in pools)
        self.k, self.v = (k, k[..., : s.v.shape[-1]]) if s.latent else (k, v)
        self.table = table.int().to(s.q.device)

    def attend(self, q: Tensor, keys: int, **more: Any) -> tuple[Tensor, Tensor]:
        """Return o and lse of q ``(rows, heads, head_dim)`` at the end of so many keys, beside another sequence in the batch."""
        rows = q.shape[0]
        lengths = torch.tensor([keys, max(rows, keys // 3)], dtype=torch.int32, device=q.device)
        cache = tw.paged(self.k, self.v, self.table, lengths)
        both = torch.stack([q, _like(q, rows)])
        o, lse = tw.attention_paged_with_lse(both, cache, **self.s.options(**more))
        return o[0], lse[0]


def pages(s: Scene, page: int) -> Rows:
    return _all(*Cache(s, page).attend(s.q, s.k.shape[0]))


def in_chunks(s: Scene, page: int, chunk: int = 100) -> Rows:
    cache, n = Cache(s, page), s.q.shape[0]
    parts = [cache.attend(s.q[at : at + chunk], min(at + chunk, n)) for at in range(0, n, chunk)]
    return _all(torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts], 1))


def packed_over_pages(s: Scene, page: int = 16) -> Rows:
    """The last rows of the sequence, packed with those of another one, as a serving engine mixes prefill and decoding."""
    cache, n, count = Cache(s, page), s.q.shape[0], -(-s.q.shape[0] * 2 // 3)
    lengths = torch.tensor([n // 2, n], dtype=torch.int32, device=s.q.device)
    cu = torch.tensor([0, 1, 1 + count], dtype=torch.int32, device=s.q.device)
    q = torch.cat([_like(s.q, 1), s.q[n - count :]])
    both = tw.paged(cache.k, cache.v, cache.table.flip(0), lengths)
    o, lse = tw.attention_paged_with_lse(q, both, cu, **s.options())
    return o[1:], lse[:, 1:], torch.arange(n - count, n)


def decoded(s: Scene, page: int = 16) -> Rows:
    cache, n = Cache(s, page), s.q.shape[0]
    rows = sorted({*range(n % s.every, n, s.every), n - 1})
    parts = [cache.attend(s.q[i : i + 1], i + 1) for i in rows]
    return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts], 1), torch.tensor(rows)


def decoded_dense(s: Scene) -> Rows:
    """One query of dense keys, as a static cache has it; every other one beside a sequence that is padded."""
    n = s.q.shape[0]
    rows = sorted({*range(n % (2 * s.every), n, 2 * s.every), n - 1})
    parts = []
    for padded, i in enumerate(rows):
        k, v = (x[: i + 1] for x in keys_from(s, i))
        q, k, v = (torch.stack([x, *[_like(x, x.shape[0])] * (padded % 2)]) for x in (s.q[i : i + 1], k, v))
        mask = s.mask & tw.key_lengths(torch.tensor([i + 1, 1], device=q.device)) if padded % 2 else s.mask
        parts.append(tw.attention_with_lse(q, k, v, **s.options(mask=mask)))
    return torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1), torch.tensor(rows)


WAYS: dict[str, Callable[[Scene], Rows]] = {
    "dense": dense,
    "with gradients": with_gradients,
    "with statistics": with_statistics,
    "in a batch": in_a_batch,
    "packed": packed,
    "document": document,
    "padded": padded,
    "one group": one_group,
    "last rows": last_rows,
    "last rows, packed": last_rows_packed,
    "pages of 16": lambda s: pages(s, 16),
    "pages of 64": lambda s: pages(s, 64),
    "chunks over pages of 16": lambda s: in_chunks(s, 16),
    "chunks over pages of 64": lambda s: in_chunks(s, 64),
    "packed over pages": packed_over_pages,
    "decoded": decoded,
    "decoded, dense keys": decoded_dense,
}
ROW_BY_ROW = ("chunks over pages of 16", "chunks over pages of 64", "decoded", "decoded, dense keys")
"""Ways whose rows come before later keys are there, as causal ones alone may."""
LATENT = (
    "pages of 16",
    "pages of 64",
    "chunks over pages of 16",
    "chunks over pages of 64",
    "packed over pages",
    "decoded",
)
"""Ways in which v can lie in the memory of k."""


def ways_of(s: Scene) -> list[str]:
    return [name for name in WAYS if s.causal or name not in ROW_BY_ROW]


def differing(s: Scene, a: Rows, b: Rows) -> int:
    """Return how many rows that both have differ in a bit of o or of lse, in a head that both have."""
    heads = min(a[0].shape[1], b[0].shape[1])
    common = sorted({*a[2].tolist()} & {*b[2].tolist()})
    picked = []
    for o, lse, rows in (a, b):
        at = torch.searchsorted(rows, torch.tensor(common)).to(o.device)
        picked.append((o[at, -heads:], lse[-heads:, at]))
    (o, lse), (o2, lse2) = picked
    assert common
    assert not o.isnan().any()
    return int(((o != o2).flatten(1).any(1) | (lse != lse2).any(0)).sum())


# -- Backward --------------------------------------------------------------------------------------------------------

Gradients = tuple[Tensor, Tensor, Tensor]


def gradients(s: Scene, do: Tensor, dlse: Tensor, way: str) -> Gradients:
    """Return dq, dk and dv of the sequence, whose o and lse have the gradients do and dlse; those of all others are random."""
    n, before, after = s.q.shape[0], 21, 75
    if way in ("dense", "in a batch", "padded"):
        more, count = (45, 2) if way == "padded" else (0, {"dense": 1, "in a batch": 3}[way])
        mask = (
            s.mask & tw.key_lengths(torch.tensor([n] + [n + more] * (count - 1), device=s.q.device)) if more else s.mask
        )
        beside = lambda x: [_like(x, n + more) for _ in range(count - 1)]  # noqa: E731
        q, k, v = (torch.stack([torch.cat([x, _like(x, more)]), *beside(x)]).requires_grad_() for x in (s.q, s.k, s.v))
        o, lse = tw.attention_with_lse(q, k, v, **s.options(mask=mask))
        g, gl = torch.randn_like(o), torch.randn_like(lse)
        g[0].zero_(), gl[0].zero_()  # of padded rows
        g[0, :n], gl[0, :, :n] = do, dlse
        found, at = torch.autograd.grad((o, lse), (q, k, v), (g, gl)), slice(0, n)
        return tuple(x[0, at] for x in found)
    q, k, v = (torch.cat([_like(x, before), x, _like(x, after)]) for x in (s.q, s.k, s.v))
    at = slice(before, before + n)
    if way == "document":
        ids = torch.tensor([0] * before + [1] * n + [2] * after, device=s.q.device)
        q, k, v = (x[None].requires_grad_() for x in (q, k, v))
        o, lse = tw.attention_with_lse(q, k, v, **s.options(mask=tw.documents(ids) & s.mask))
        rows_o, rows_lse = (0, at), (0, slice(None), at)
    else:
        cu = torch.tensor([0, before, before + n, before + n + after], dtype=torch.int32, device=s.q.device)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        o, lse = tw.attention_varlen_with_lse(q, k, v, cu, **s.options())
        rows_o, rows_lse = (at,), (slice(None), at)
    g, gl = torch.randn_like(o), torch.randn_like(lse)
    g[rows_o], gl[rows_lse] = do, dlse
    found = torch.autograd.grad((o, lse), (q, k, v), (g, gl))
    return tuple(x[rows_o] for x in found)


def of_outputs(s: Scene) -> tuple[Tensor, Tensor]:
    """Return random gradients of o ``(seqlen, heads_q, head_dim_v)`` and of lse ``(heads_q, seqlen)``."""
    n, heads, _ = s.q.shape
    return torch.randn(n, heads, s.v.shape[-1]).to(s.q), torch.randn(heads, n).to(s.q.device)


BACKWARD = ("dense", "in a batch", "packed", "document", "padded")


def gradients_differ(a: Gradients, b: Gradients) -> list[str]:
    return [name for name, x, y in zip(("dq", "dk", "dv"), a, b, strict=True) if not torch.equal(x, y)]


# -- All pairs of ways -------------------------------------------------------------------------------------------------


@dataclass
class Compared:
    """Pairs of ways: how many are equal bit for bit and how many have a refused one, the names of those that differ, and why ways are
    refused."""

    equal: int
    refused: int
    different: list[tuple[str, str]]
    reasons: dict[str, str]


def _compared(names: Sequence[str], way: Callable[[str], Any], differ: Callable[[Any, Any], Any]) -> Compared:
    found, reasons = {}, {}
    for name in names:
        try:
            found[name] = way(name)
        except NotImplementedError as error:
            reasons[name] = str(error)
    pairs, ran = len(names) * (len(names) - 1) // 2, len(found) * (len(found) - 1) // 2
    different = [(a, b) for a, b in combinations(found, 2) if differ(found[a], found[b])]
    return Compared(ran - len(different), pairs - ran, different, reasons)


def compared(s: Scene, names: Sequence[str] | None = None) -> Compared:
    """Compare o and lse of all pairs of these ways, by default of all that a scene has."""
    return _compared(names or ways_of(s), lambda name: WAYS[name](s), lambda a, b: differing(s, a, b))


def compared_gradients(s: Scene, names: Sequence[str] = BACKWARD) -> Compared:
    """Compare dq, dk and dv of all pairs of these ways."""
    do, dlse = of_outputs(s)
    return _compared(names, lambda name: gradients(s, do, dlse, name), gradients_differ)


# -- Pairs of ways, drawn ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """What sizes of drawn scenes are taken from; ``latent``: also scenes whose v is the first columns of k, 576 and 512 wide."""

    lengths: Sequence[int]
    dims: Sequence[tuple[int, int]]
    dtypes: Sequence[torch.dtype]
    latent: bool = False


CPU = Drawn(
    (1, 2, 17, 63, 64, 65, 127, 128, 129, 200, 257, 300, 391),
    ((64, 64), (128, 128), (80, 80), (256, 256), (96, 64), (33, 40)),
    (torch.float32, torch.bfloat16, torch.float16),
    latent=True,
)
CUDA = Drawn(
    (17, 64, 129, 300, 777, 1111, 2049),
    ((64, 64), (128, 128), (80, 80), (96, 64), (32, 32), (33, 40), (72, 128), (256, 256), (192, 128)),
    (torch.bfloat16, torch.float16),
)
INTERPRETED = Drawn((17, 64, 65, 129, 150), ((32, 32), (64, 64)), (torch.float32, torch.float16))


@dataclass(frozen=True)
class Case:
    """Two ways of a scene, of its forward or of its backward."""

    scene: Scene
    ways: tuple[str, str]
    backward: bool

    def differ(self) -> int | list[str]:
        """Return how many rows differ, or which gradients; 0 or empty: none.

        Raises:
            NotImplementedError: one of the ways is refused.
        """
        s, (a, b) = self.scene, self.ways
        if not self.backward:
            return differing(s, WAYS[a](s), WAYS[b](s))
        do, dlse = of_outputs(s)
        return gradients_differ(gradients(s, do, dlse, a), gradients(s, do, dlse, b))


def draw(number: int, of: Drawn, device: str, backend: str | None) -> Case:
    """Return the case of a number. One of three compares gradients, and, where they are drawn, one of six is latent."""
    one = random.Random(number)
    n, dims, dtype = one.choice(of.lengths), one.choice(of.dims), one.choice(of.dtypes)
    heads_k, group = one.choice((1, 2, 3)), one.choice((1, 1, 2, 4, 7))
    causal, latent = one.random() < 0.8, of.latent and one.random() < 1 / 6
    more = {
        "causal": causal,
        "window": one.choice((None, None, 20, 100, 255)) if causal else None,
        "cap": one.choice((None, None, 5.0)),
        "with_sink": one.random() < 0.3,
        "latent": latent,
        "backend": backend,
        "every": max(1, n // 12),
    }
    heads, dims = ((group, 1), (576, 512)) if latent else ((heads_k * group, heads_k), dims)
    s, backward = Scene.drawn(n, heads, dims, dtype, device, number, **more), one.random() < 1 / 3
    a, b = one.sample(BACKWARD if backward else ways_of(s), 2)
    return Case(s, (a, b), backward)


def of_backend(backend: str, device: str) -> Drawn:
    """Return what scenes of a backend are drawn from."""
    return CUDA if device == "cuda" else INTERPRETED if backend == "triton" else CPU


def pairs(count: int, of: Drawn, device: str = "cpu", backend: str | None = None, seed: int = 0) -> dict[str, Any]:
    """Compare ``count`` drawn pairs of ways.

    Return how many ran (``pairs``), how many of these compared gradients and how many were latent, how many were refused, and those that
    differ (``failures``).
    """
    ran, refused, different = Counter(pairs=0, backward=0, latent=0), Counter(), []
    for number in range(seed, seed + count):
        torch.manual_seed(number)
        case = draw(number, of, device, backend)
        s = case.scene
        try:
            found = case.differ()
        except NotImplementedError as error:
            refused[str(error).splitlines()[-1]] += 1
            continue
        ran.update(pairs=1, backward=case.backward, latent=s.latent)
        if found:
            told = replace(s, q=s.q[:0], k=s.k[:0], v=s.v[:0])
            what = "gradients" if case.backward else "rows"
            different.append(
                {"number": number, "ways": case.ways, what: found, "of": tuple(s.q.shape), "scene": str(told)}
            )
    return dict(ran) | {"refused": dict(refused), "failures": different}
