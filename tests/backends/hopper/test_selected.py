"""Selected keys that Hopper gathers for one key head: the kernel's source on the emulated machine, and which calls are its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilewise as tw
from bench.testing import Call, call, normal, paged_call
from tests.backends.hopper import emulated
from tilewise import accuracy
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.host import masks
from tilewise.backends.hopper.host.selected_call import ListedPlan
from tilewise.piece import Piece


def mqa_call(
    seqlen_q, seqlen_k, entries, block=1, heads=70, dim=64, batch=1, cu=(), mask=None, block_q=1, named=None, dtype=torch.bfloat16,
    **options,
) -> Call:  # fmt: skip
    """A forward over one key head with drawn entries, ``named`` ones or any, NaN in keys that no query sees."""
    generator, packed = torch.Generator().manual_seed(5), bool(cu)
    lists = (len(cu[0]) - 1 if packed else batch, 1, -(-seqlen_q // block_q), entries)
    indices = torch.randint(*(named or (-1, -(-seqlen_k // block))), lists, generator=generator)
    rows, keys = (cu[0][-1], cu[1][-1]) if packed else (seqlen_q, seqlen_k)
    shape = () if packed else (batch,)
    q, k, v = (
        torch.randn(*shape, n, h, dim, generator=generator).to(dtype) for n, h in ((rows, heads), (keys, 1), (keys, 1))
    )
    mask = tw.selected(indices, block, block_q) & (tw.window() if mask is None else mask)
    if packed:
        options |= {"cu_seqlens_q": torch.tensor(cu[0]), "cu_seqlens_k": torch.tensor(cu[1])}
    c = call(q, k, v, mask=mask, **options).forward_only()
    if not packed:
        for x in (c.t.k, c.t.v):
            x.masked_fill_(~masks.seen(c.p, c.t.leaves, c.p.group).mT.unsqueeze(-1), torch.nan)
    return c


def over_pages(queries: int, size: int, entries: int, **options) -> Call:
    """The same over pages in any order, of sequences with 600, no and 90 keys."""
    generator, pages = torch.Generator().manual_seed(5), -(-600 // size)
    table = torch.randperm(3 * pages, generator=generator).view(3, pages).int()
    q, k, v = (
        torch.randn(*n, 64, generator=generator).bfloat16() for n in ((3, queries, 70), *[(3 * pages, size, 1)] * 2)
    )
    indices = torch.randint(-1, 600, (3, 1, queries, entries), generator=generator)
    cache = tw.paged(k, v, table, torch.tensor([600, 0, 90], dtype=torch.int32))
    return paged_call(q, cache, mask=tw.selected(indices), **options)


CASES = {
    "pages": lambda: over_pages(1, 16, 130),
    "pages-causal": lambda: over_pages(3, 50, 200, causal=True, sink=normal(70, seed=3)),
    "causal": lambda: mqa_call(5, 600, 130, causal=True),
    "128-fp16": lambda: mqa_call(3, 600, 150, dim=128, heads=66, causal=True, dtype=torch.float16),
    "64-heads": lambda: mqa_call(3, 600, 130, heads=40, causal=True),
    "96": lambda: mqa_call(2, 900, 200, dim=96, heads=128),
    "sink": lambda: mqa_call(3, 700, 3, 33, heads=130, sink=normal(130, seed=3), causal=True),
    "window": lambda: mqa_call(6, 900, 129, batch=2, mask=tw.window(70, 0)),
    # The copies of a block, which the window's end cuts, fill tiles.
    "twice": lambda: mqa_call(4, 1200, 75, 4, named=(294, 296), mask=tw.window(20, 20)),
    "rows-of-queries": lambda: mqa_call(5, 300, 60, block_q=2, causal=True),
    "packed": lambda: mqa_call(4, 70, 65, cu=([0, 2, 2, 6], [0, 70, 75, 145]), causal=True, sink=normal(70, seed=3)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_source_gathers_the_keys_of_one_head(name):
    c = CASES[name]()
    assert Hopper().refused(c.p) == []
    plan = Hopper()._plan(c.p)
    assert type(plan) is ListedPlan
    tensors = plan.tensors(c.t)
    q, k, v = (x if x.ndim == 3 else x.flatten(0, 1) for x in (c.t.q, c.t.k, c.t.v))
    named = {
        "entries": tensors["entries"].flatten(0, 2),
        "tokens": tensors["tokens"].flatten(0, 1),
        "block_table": tensors.get("block_table"),
    }
    given = plan.numbers | {name: x.numpy() for name, x in named.items() if x is not None} | {"ctas": 2}
    sink = np.full(c.p.heads_q, np.nan, np.float32) if c.t.sink is None else c.t.sink.float().numpy()
    arrays = (x.float().numpy() for x in (q.unsqueeze(2), k.unsqueeze(0), v.unsqueeze(0)))
    o, lse = map(torch.from_numpy, emulated.run(plan.config, *arrays, sink, given))
    found = plan.output({"o": o.view(c.t.q.shape[:-1] + o.shape[-1:]).to(c.p.dtype), "lse_by_heads": lse})
    errors = c.expected().judge(accuracy.tensors(found, None))
    assert not [str(e) for e in errors if not e.ok]


OTHERS = {
    "gradients": lambda: call(*(normal(1, 64, h, 64, dtype=torch.bfloat16) for h in (64, 1, 1)), mask=mask_of(64, 20)),
    "many-keys": lambda: mqa_call(64, 64, 60),
    "blocks": lambda: mqa_call(5, 1000, 2, 64),
    "later-keys": lambda: mqa_call(5, 600, 130, piece=Piece(0, 32, 5, 632)),
}


def mask_of(rows: int, entries: int) -> tw.Mask:
    return tw.selected(torch.zeros(1, 1, rows, entries, dtype=torch.int32))


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_have_a_bit_for_each_pair(name):
    p = OTHERS[name]().p
    assert Hopper().refused(p) == []
    assert Hopper().config(p).form == "bits"


def test_lists_of_a_part_of_the_keys_are_not_gathered_by_the_latent_kernel():
    q, k = normal(1, 5, 6, 576, dtype=torch.bfloat16), normal(1, 64, 1, 576, dtype=torch.bfloat16)
    c = call(q, k, k[..., :512], mask=mask_of(5, 3), piece=Piece(0, 32, 5, 96)).forward_only()
    (reason,) = Hopper().refused(c.p)
    assert "part of a longer sequence" in reason
