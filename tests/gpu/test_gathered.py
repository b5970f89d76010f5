"""Selected blocks whose queries are gathered, as short calls and as pieces of them, against the oracle."""

import pytest
import torch

import tilewise as tw
from bench.testing import call, normal, qkv
from tests.backends.contract import agree
from tests.backends.test_blockwise import own
from tests.planning.test_bit_tiles import entries
from tilewise import dispatch
from tilewise.backends import blockwise, triton
from tilewise.backends.hopper import pieces

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
