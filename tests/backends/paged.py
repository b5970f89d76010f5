"""What every backend must do with keys in pages: run a case right, or refuse it with reasons. One suite, subclassed once a backend.

class TestPortable(PagedContract):
    backend = Portable()
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import tilewise as tw
from bench.testing import Call, normal, paged_call, poisoned
from tilewise import accuracy, pages
from tilewise.backends.base import Backend

STEP = 1 / 64  # of the scales that are drawn
ANYTHING = torch.tensor([-1, 2**30, 0, 3], dtype=torch.int32)  # what stands in a table behind a sequence's last page


@dataclass(frozen=True)
class Case:
    """Sequences of ``lengths`` keys; ``rows`` queries each, or as many as a tuple says, packed, with two rows past the last."""

    page_size: int
    lengths: tuple[int, ...]
    rows: int | tuple[int, ...] = 1
    options: Callable[[], dict] = dict
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32
    shared: int = 0  # pages at the front that all sequences have in common
    heads_first: bool = False  # whether a page keeps heads before rows
    latent: bool = False  # whether v lies in k's memory, as its first columns
    scales: str = ""  # of a cache of e4m3 numbers, and NaN where no key is: "one", "heads", "sequences" or "tokens"

    def draw(self) -> tuple[Tensor, tw.PagedCache, dict]:
        """q, the cache and the options of :func:`tilewise.attention_paged`."""
        packed = isinstance(self.rows, tuple)
        total = (sum(self.rows) + 2,) if packed else (len(self.lengths), self.rows)
        q = normal(*total, self.heads[0], self.dims[0], dtype=self.dtype)
        cu = torch.tensor([0, *self.rows]).cumsum(0).int() if packed else None
        return q, self.cache(), self.options() | {"cu_seqlens_q": cu}

    def call(self) -> Call:
        """The call of what is drawn; rows of q past the last sequence are NaN."""
        q, cache, options = self.draw()
        if isinstance(self.rows, tuple):
            q[sum(self.rows) :] = torch.nan
        return paged_call(q, cache, **options)

    def cache(self, seed: int = 0) -> tw.PagedCache:
        """Pages in an order that the seed decides; the keys of a sequence are the same in any. All else is NaN."""
        n, (_, heads), (d, dv) = self.page_size, self.heads, self.dims
        most = max(-(-max(self.lengths) // n), 1) + 1
        count = len(self.lengths) * most + 3
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).int()
        table = order[: len(self.lengths) * most].view(-1, most).clone()
        table[:, : self.shared] = table[:1, : self.shared]
        shape = (count, heads, n) if self.heads_first else (count, n, heads)
        k, v = (torch.full((*shape, width), torch.nan, dtype=self.dtype) for width in (d, dv))
        if self.heads_first:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        for b, length in enumerate(self.lengths):
            for which, pool, width in ((1, k, d), (2, v, dv)):
                keys = normal(most * n, heads, width, dtype=self.dtype, seed=10 * b + which)
                keys[: self.shared * n] = normal(self.shared * n, heads, width, dtype=self.dtype, seed=1000 + which)
                for j in range(length):
                    pool[table[b, j // n], j % n] = keys[j]
            used = -(-length // n)
            table[b, used:] = ANYTHING.repeat(most)[: most - used]
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        if self.latent:
            v = k[..., :dv]
        if not self.scales:
            return tw.paged(k, v, table, lengths)
        k_scale, v_scale = self._scale(k, 1), self._scale(v, 2)
        e4m3 = [pages.quantised(x, s.unsqueeze(-1) if s.ndim == 3 else STEP) for x, s in ((k, k_scale), (v, v_scale))]
        if self.latent:
            e4m3[1], v_scale = e4m3[0][..., :dv], k_scale
        return tw.paged(*e4m3, table, lengths, k_scale=k_scale, v_scale=v_scale)

    def _scale(self, pool: Tensor, seed: int) -> Tensor:
        if self.scales == "tokens":
            return pages.token_scales(pool).where(~pool.isnan().any(-1), torch.nan)
        shape = {"one": (), "heads": self.heads[1:], "sequences": (len(self.lengths), self.heads[1])}[self.scales]
        return STEP * (0.5 + normal(*shape, seed=seed).abs())


TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
"""Four drafted tokens, of which each sees itself and its ancestors."""


def tree(b, h, i, j):
    return (j < tw.offset) | tw.lookup(TREE, i, j - tw.offset)


SLOPES = normal(4, seed=5)
CASES = {
    "page-1": Case(1, (0, 1, 2, 5)),
    "page-16": Case(16, (0, 1, 15, 16, 17, 40), rows=2, options=lambda: {"causal": True}),
    "page-64": Case(64, (63, 64, 65, 130), rows=3, options=lambda: {"causal": True}, heads=(6, 2)),
    "page-7-odd-dims": Case(7, (13, 70, 8), rows=5, options=lambda: {"causal": True}, dims=(9, 21), heads=(3, 3)),
    "more-rows-than-keys": Case(4, (2, 6, 0), rows=4, options=lambda: {"causal": True}),
    "shared": Case(16, (40, 33, 50), shared=2, rows=2),
    "heads-first": Case(16, (40, 33), rows=2, options=lambda: {"causal": True}, heads_first=True),
    "window-sink": Case(
        8, (3, 70, 41), rows=3, options=lambda: {"mask": tw.window(left=9, right=0), "sink": normal(4, seed=3)}
    ),
    "softcap-alibi": Case(
        16,
        (20, 1),
        rows=2,
        options=lambda: {"causal": True, "score": tw.softcap(2.0) >> tw.alibi(normal(2, 4, seed=4))},
    ),
    "tree": Case(8, (30, 4, 17), rows=4, options=lambda: {"mask": tw.keep(tree)}),
    "keep-behind-an-empty-sequence": Case(4, (0, 9, 6), options=lambda: {"mask": lambda b, h, i, j: j % 3 != 1}),
    "key-range": Case(8, (30, 14), rows=2, options=lambda: {"mask": tw.key_range(torch.tensor([2, 9]), 20)}),
    "packed": Case(16, (20, 33, 0, 5), rows=(3, 0, 2, 7), options=lambda: {"causal": True, "sink": normal(4, seed=3)}),
    "packed-bias-by-key": Case(
        4, (9, 21), rows=(1, 6), options=lambda: {"score": lambda s, b, h, i, j: s + tw.lookup(SLOPES, h) * (i - j)}
    ),
    "bfloat16": Case(16, (45, 80), rows=2, options=lambda: {"causal": True}, dtype=torch.bfloat16, dims=(64, 64)),
    "float16": Case(16, (45, 80), dtype=torch.float16, dims=(64, 64), heads=(8, 1)),
    "float64": Case(16, (45, 20), rows=2, options=lambda: {"causal": True}, dtype=torch.float64),
    "many-keys": Case(64, (2500, 900), heads=(8, 2), dtype=torch.bfloat16, dims=(32, 32)),
    "many-keys-windowed": Case(16, (2500,), rows=2, options=lambda: {"mask": tw.window(1200, 0)}, heads=(4, 1)),
    "fp8-heads": Case(
        16,
        (20, 33, 0, 5),
        rows=2,
        options=lambda: {"causal": True},
        dims=(32, 16),
        dtype=torch.bfloat16,
        scales="heads",
    ),
    "fp8-tokens": Case(
        7,
        (20, 33, 5),
        rows=(3, 0, 2),
        options=lambda: {"mask": tw.window(9, 0), "sink": normal(4, seed=3)},
        dims=(18, 48),
        dtype=torch.float16,
        scales="tokens",
    ),
    "fp8-sequences": Case(
        64,
        (70, 3),
        rows=4,
        options=lambda: {"mask": tw.keep(tree), "score": tw.softcap(2.0)},
        dtype=torch.bfloat16,
        scales="sequences",
        heads_first=True,
    ),
    "fp8-float32": Case(8, (30,), rows=2, options=lambda: {"causal": True}, scales="one"),
    # Of 16 pairs of values beside 18 of keys, ptxas 12.8 made a kernel that was wrong (docs/decisions.md#triton-ptxas).
    "fp8-narrow-values": Case(
        16,
        (20, 5),
        rows=(2, 5),
        options=lambda: {"mask": tw.window(9, 0), "sink": normal(4, seed=3)},
        heads=(4, 1),
        dims=(36, 32),
        dtype=torch.float16,
        scales="tokens",
    ),
    "fp8-narrow-piece": Case(
        64, (130, 70), rows=10, options=lambda: {"causal": True}, dims=(64, 80), dtype=torch.bfloat16, scales="heads"
    ),
    "fp8-chunk-tokens": Case(
        64,
        (200, 131),
        rows=70,
        options=lambda: {"causal": True},
        dims=(128, 128),
        dtype=torch.bfloat16,
        scales="tokens",
    ),
    "latent": Case(
        8,
        (21, 9),
        rows=3,
        options=lambda: {"causal": True},
        heads=(6, 1),
        dims=(48, 32),
        dtype=torch.bfloat16,
        latent=True,
    ),
    "latent-fp8": Case(
        16,
        (20, 5),
        rows=(2, 5),
        options=lambda: {"mask": tw.window(9, 0), "sink": normal(4, seed=3)},
        heads=(4, 1),
        dims=(36, 32),
        dtype=torch.float16,
        latent=True,
        scales="tokens",
    ),
    "capacity-alone": Case(16, (0, 0), rows=2, options=lambda: {"sink": normal(4, seed=3)}),
}


def run(backend: Backend, c: Call) -> dict[str, Tensor]:
    """o and lse by name; skips, with the reasons, what the backend refuses."""
    reasons = backend.unsupported(c.p)
    if reasons:
        pytest.skip(f"{backend.name} refuses: {'; '.join(reasons)}")
    with poisoned():
        out = backend.forward(c.p, c.t)
    assert (out.o.shape, out.lse.shape) == c.p.output_shapes
    assert (out.o.dtype, out.lse.dtype) == (c.p.dtype, c.p.compute_dtype)
    assert out.o.is_contiguous()
    assert out.lse.is_contiguous()
    return accuracy.tensors(out, None)


class PagedContract:
    """Subclasses set ``backend`` and may set ``device``."""

    backend: Backend
    device = "cpu"

    def call(self, q: Tensor, cache: tw.PagedCache, **options: object) -> Call:
        return paged_call(q, cache, self.device, **options)

    @pytest.mark.parametrize("name", CASES)
    def test_agrees_with_the_oracle(self, name):
        q, cache, options = CASES[name].draw()
        c = self.call(q, cache, **options)
        wrong = [str(e) for e in c.expected().judge(run(self.backend, c)) if not e.ok]
        assert not wrong, "; ".join(wrong)

    @pytest.mark.parametrize("name", ["page-16", "packed", "bfloat16"])
    def test_where_pages_lie_changes_no_bit(self, name):
        q, cache, options = CASES[name].draw()
        here, there = (run(self.backend, self.call(q, x, **options)) for x in (cache, CASES[name].cache(seed=1)))
        assert all(torch.equal(here[x], there[x]) for x in here)

    @pytest.mark.parametrize("lengths", [(33, 70, 5), (33, 2500, 5)], ids=["short", "long"])
    def test_a_sequence_does_not_depend_on_its_batch_mates_when_deterministic(self, lengths):
        case = Case(16, lengths, rows=2, options=lambda: {"causal": True, "deterministic": True})
        q, cache, options = case.draw()
        whole = run(self.backend, self.call(q, cache, **options))
        for rows in (slice(0, 1), slice(1, 3)):
            part = cache._replace(block_table=cache.block_table[rows], seqlens_k=cache.seqlens_k[rows])
            got = run(self.backend, self.call(q[rows], part, **options))
            assert all(torch.equal(got[x], whole[x][rows]) for x in got)

    def test_the_room_that_a_table_has_changes_no_bit_when_deterministic(self):
        q, cache, options = Case(8, (9, 33), rows=2, options=lambda: {"causal": True, "deterministic": True}).draw()
        wide = torch.cat([cache.block_table, ANYTHING.repeat(2, 40)], 1)
        got, there = (run(self.backend, self.call(q, x, **options)) for x in (cache, cache._replace(block_table=wide)))
        assert all(torch.equal(got[x], there[x]) for x in got)

    def test_a_dense_cache_is_one_page_a_sequence(self):
        k, v = (normal(3, 50, 2, 16, seed=n) for n in (1, 2))
        lengths = torch.tensor([50, 7, 0], dtype=torch.int32)
        for x in (k, v):
            x[1, 7:], x[2] = torch.nan, torch.nan
        c = self.call(normal(3, 1, 4, 16), tw.dense_cache(k, v, lengths), causal=True)
        wrong = [str(e) for e in c.expected().judge(run(self.backend, c)) if not e.ok]
        assert not wrong, "; ".join(wrong)

    def test_rows_outside_every_sequence_are_zero(self):
        q, cache, options = CASES["packed"].draw()
        q[-2:] = torch.nan
        got = run(self.backend, self.call(q, cache, **options))
        assert (got["o"][-2:] == 0).all()
        assert (got["lse"][:, -2:] == -torch.inf).all()


def random_case(
    draw: random.Random,
    dims: tuple = ((16, 16), (64, 64), (33, 17)),
    latent: tuple = ((48, 32),),
    dtypes: tuple = (torch.float32, torch.bfloat16, torch.float16),
) -> Case:
    """A case that the state of ``draw`` decides: page size, lengths, rows, masks, scores, and how a cache lies and is scaled.

    Args:
        dims: of k and of v, of which one is taken. latent: the same where v lies in k's memory.
    """
    n = draw.choice((1, 2, 3, 7, 8, 16, 33, 64))
    near = (0, 1, n - 1, n, n + 1, 2 * n + 3, draw.randint(0, 200), draw.choice((5, 2100)))
    lengths = tuple(draw.choice(near) for _ in range(draw.randint(1, 4)))
    rows = draw.randint(1, 9) if draw.random() < 0.5 else tuple(draw.choice((0, 1, 1, 2, 30)) for _ in lengths)
    in_k = draw.random() < 0.15
    heads_k = 1 if in_k else draw.choice((1, 2))
    heads = heads_k * draw.choice((1, 3, 8))
    mask = draw.choice(
        (None, tw.window(draw.randint(0, 40), 0), tw.keep(lambda b, h, i, j: (i + j) % 3 != 0), tw.prefix(5))
    )
    scores = (None, tw.softcap(3.0), tw.score(lambda s, b, h, i, j: s - 0.1 * (i + tw.offset - j)))
    options = {
        "causal": draw.random() < 0.5,
        "mask": mask,
        "score": draw.choice(scores),
        "deterministic": draw.random() < 0.3,
    }
    options |= {"sink": normal(heads, seed=3)} if draw.random() < 0.3 else {}
    return Case(
        page_size=n,
        lengths=lengths,
        rows=rows,
        options=lambda: options,
        heads=(heads, heads_k),
        dims=draw.choice(latent if in_k else dims),
        dtype=draw.choice(dtypes),
        shared=draw.choice((0, 0, 1)),
        heads_first=draw.random() < 0.2,
        latent=in_k,
        scales=draw.choice(("one", "heads", "sequences", "tokens")) if draw.random() < 0.3 else "",
    )
