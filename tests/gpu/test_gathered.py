"""Selected blocks whose queries are gathered, and selected keys that are read alone, against the oracle."""

import pytest
import torch

import tilewise as tw
from bench.testing import call, normal, paged_call, qkv
from tests.backends.contract import agree
from tests.backends.test_blockwise import own
from tests.planning.test_bit_tiles import entries
from tilewise import dispatch
from tilewise.backends import blockwise, triton
from tilewise.backends.hopper import pieces
from tilewise.backends.hopper.forward import selected
from tilewise.backends.hopper.host.selected_call import ListedPlan
from tilewise.backends.triton import listed
from tilewise.backends.triton.host.listed import ListedCall
from tilewise.masks import catalogue

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SIZES = {  # Queries, keys, batch, query and key heads, head_dim, dtype, block, block_q.
    "moba": (700, 700, 2, 4, 4, 64, torch.bfloat16, 64, 1),
    "grouped": (515, 515, 1, 6, 2, 128, torch.float16, 100, 1),
    "rows": (300, 1100, 2, 2, 1, 64, torch.bfloat16, 32, 3),
    "single": (400, 400, 1, 2, 2, 32, torch.float32, 48, 1),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("room", [1 << 30, 300_000], ids=["whole", "pieces"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_gathered_calls_agree_with_the_oracle(name, sizes, room, causal, monkeypatch):
    monkeypatch.setattr(pieces, "LEAST_PAIRS", 1)
    monkeypatch.setattr(triton, "LEAST_PAIRS", 1)
    monkeypatch.setattr(blockwise, "ROW", -(1 << 20))
    monkeypatch.setattr(blockwise, "room", lambda p: room)
    nq, nk, batch, hq, hk, d, dtype, block, block_q = SIZES[sizes]
    past = causal and nq == nk
    indices = own(batch, hk, nq, 3, block) if past else entries(batch, hk, -(-nq // block_q), 3, blocks=-(-nk // block))
    mask = tw.selected(indices, block, block_q)
    c = call(
        *qkv(batch=batch, nq=nq, nk=nk, hq=hq, hk=hk, d=d, dv=d, dtype=dtype),
        normal(batch, nq, hq, d, dtype=dtype, seed=4),
        device="cuda",
        mask=tw.causal() & mask if causal else mask,
        sink=normal(hq, seed=5),
    )
    backend = dispatch.backend(name)
    if backend.unsupported(c.p):
        pytest.skip(f"{name} does not take {dtype}")
    assert "packed sequence" in backend.pieces(c.p)
    agree(backend, c)


LISTS = {  # Queries, keys, batch, query and key heads, head dims, dtype, entries, block; options.
    "latent": (300, 900, 1, 128, 1, 576, 512, torch.bfloat16, 200, 1, {}),
    "latent-blocks": (130, 700, 2, 200, 1, 576, 512, torch.bfloat16, 20, 16, {"sink": lambda: normal(200, seed=5)}),
    "latent-many-heads": (1, 3000, 1, 64, 1, 576, 512, torch.bfloat16, 700, 1, {}),
    "latent-few-heads": (120, 500, 2, 20, 1, 576, 512, torch.bfloat16, 60, 1, {"sink": lambda: normal(20, seed=5)}),
    "multi-query": (500, 500, 2, 70, 1, 64, 64, torch.bfloat16, 70, 1, {"sink": lambda: normal(70, seed=5)}),
    "wide": (300, 300, 1, 64, 1, 128, 128, torch.bfloat16, 40, 1, {}),
    "grouped": (300, 700, 1, 32, 2, 192, 64, torch.bfloat16, 30, 16, {}),
    # The copies of a block, which the window's end cuts, fill tiles.
    "twice": (
        40,
        2400,
        1,
        64,
        1,
        64,
        64,
        torch.bfloat16,
        75,
        4,
        {"mask": lambda: tw.window(20, 20), "named": (594, 598)},
    ),
}


@pytest.mark.parametrize("sizes", LISTS)
@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_calls_that_read_selected_keys_alone_agree_with_the_oracle(name, sizes, monkeypatch):
    monkeypatch.setattr(selected, "_is_sooner", lambda p: True)
    monkeypatch.setattr(listed, "sooner", listed.serves)
    nq, nk, batch, hq, hk, d, dv, dtype, count, block, options = LISTS[sizes]
    first, last = options.get("named", (-1, -(-nk // block)))
    entries = torch.randint(first, last, (batch, hk, nq, count), generator=torch.Generator().manual_seed(3))
    mask = options.get("mask", tw.causal)() & tw.selected(entries, block)
    q, k, v = (x.cuda() for x in qkv(batch=batch, nq=nq, nk=nk, hq=hq, hk=hk, d=d, dv=dv, dtype=dtype))
    v = k[..., :dv] if d == 576 else v
    c = call(q, k, v, device="cuda", mask=mask, sink=options["sink"]().cuda() if "sink" in options else None)
    backend = dispatch.backend(name)
    if name == "hopper" and hk > 1:
        pytest.skip("hopper reads the keys of one head alone")
    assert backend.unsupported(c.p) == []
    plan = backend._backward_plan(c.p) if name == "hopper" else backend._plan(c.p)
    assert isinstance(plan, ListedCall)
    agree(backend, c)


@pytest.mark.parametrize("count", [5, 64, 700, 2048])
def test_entries_are_put_in_order(count):
    entries = torch.randint(-3, 900, (2, 2, count, 30), generator=torch.Generator().manual_seed(3)).transpose(2, 3)
    for x in (entries, entries.int()):
        (found,) = catalogue._sorted_rows(x.cuda())
        assert torch.equal(found.cpu(), catalogue._sorted_rows(x)[0])


PAGES = {  # Queries of a sequence, query and key heads, head dims, entries, block, page size; where packed sequences begin.
    "latent": (1, 128, 1, 576, 512, 200, 1, 64, ()),
    "latent-packed": (3, 20, 1, 576, 512, 12, 16, 16, (0, 1, 1, 4)),
    "multi-query": (2, 70, 1, 64, 64, 150, 1, 48, ()),
    "grouped": (2, 32, 2, 128, 128, 60, 4, 16, ()),
}


@pytest.mark.parametrize("sizes", PAGES)
@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_calls_that_read_selected_keys_of_pages_agree_with_the_oracle(name, sizes, monkeypatch):
    monkeypatch.setattr(listed, "sooner", listed.serves)
    queries, hq, hk, d, dv, count, block, size, cu = PAGES[sizes]
    if name == "hopper" and hk > 1:
        pytest.skip("hopper reads the keys of one head alone")
    lengths, generator = torch.tensor([900, 0, 371], dtype=torch.int32), torch.Generator().manual_seed(3)
    pages = -(-900 // size)
    table = torch.randperm(3 * pages + 1, generator=generator)[: 3 * pages].view(3, pages).int()
    pool = 3 * pages + 1, size, hk
    shapes = ((cu[-1],) if cu else (3, queries)) + (hq, d), (*pool, d), (*pool, dv)
    q, k, v = (normal(*shape, dtype=torch.bfloat16, seed=n).cuda() for n, shape in enumerate(shapes))
    entries = torch.randint(-1, -(-900 // block), (3, hk, queries, count), generator=generator)
    mask = tw.causal() & tw.selected(entries.cuda(), block)
    cache = tw.paged(k, k[..., :dv] if d > 256 else v, table.cuda(), lengths.cuda())
    c = paged_call(q, cache, mask=mask, **({"cu_seqlens_q": torch.tensor(cu, dtype=torch.int32).cuda()} if cu else {}))
    backend = dispatch.backend(name)
    assert backend.unsupported(c.p) == []
    assert isinstance(backend._plan(c.p), ListedPlan if name == "hopper" else ListedCall)
    out = backend.forward(c.p, c.t)
    assert not [str(e) for e in c.expected().judge({"o": out.o, "lse": out.lse}) if not e.ok]


@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_calls_of_selected_keys_take_turns_with_v_in_k_and_beside_it(name):
    q, k = (
        torch.randn(1, 300, 128, 576, device="cuda").bfloat16(),
        torch.randn(1, 900, 1, 576, device="cuda").bfloat16(),
    )
    aside = torch.randn(1, 900, 1, 512, device="cuda").bfloat16()
    mask = tw.selected(torch.randint(0, 900, (1, 1, 300, 200), device="cuda"))
    for v in [k[..., :512], aside, k[..., :512], aside]:
        c = call(q, k, v, device="cuda", mask=mask)
        if dispatch.backend(name).unsupported(c.p):
            with pytest.raises(NotImplementedError, match="outside of k's memory"):
                tw.attention(q, k, v, mask=mask, backend=name)
            continue
        found = tw.attention(q, k, v, mask=mask, backend=name)
        assert not [str(e) for e in c.expected().judge({"o": found}) if not e.ok]
