"""FlopCounterMode of PyTorch counts what it counts of its own attention: every pair, whatever the mask."""

import subprocess
import sys

import pytest
import torch
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

import tilewise as tw
from bench.testing import normal

B, NQ, NK, HQ, HK, D, DV = 2, 17, 33, 4, 2, 16, 8


def qkv() -> list[torch.Tensor]:
    return [normal(B, n, h, d).requires_grad_() for n, h, d in ((NQ, HQ, D), (NK, HK, D), (NK, HK, DV))]


def counted(call) -> int:
    with FlopCounterMode(display=False) as mode:
        call()
    return mode.get_total_flops()


def torchs() -> tuple[int, int]:
    """What is counted of torch's forward and backward."""
    q, k, v = (x.transpose(1, 2).shape for x in qkv())
    do = (*q[:-1], DV)
    return flop_counter.sdpa_flop_count(q, k, v), flop_counter.sdpa_backward_flop_count(do, q, k, v)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"score": normal(HQ, NQ, NK)}], ids=["plain", "causal", "bias"]
)
def test_forward_and_backward_count_as_torchs(options):
    q, k, v = qkv()
    forward, backward = torchs()
    assert counted(lambda: tw.attention(q, k, v, **options)) == forward
    assert counted(lambda: tw.attention(q, k, v, **options).sum().backward()) == forward + backward
    assert counted(lambda: tw.attention_with_stats(q, k, v, **options)) == forward
    with torch.no_grad():
        assert counted(lambda: tw.attention(q, k, v, **options)) == forward


def test_a_leaf_with_a_gradient_counts_nothing_more():
    q, k, v = qkv()
    bias = normal(HQ, NQ, NK).requires_grad_()
    assert counted(lambda: tw.attention(q, k, v, score=bias).sum().backward()) == sum(torchs())


def test_each_sequence_of_a_packed_call_counts_by_itself():
    cu_q, cu_k = torch.tensor([0, 5, 17]), torch.tensor([0, 20, 33])
    q, k, v = (x[0].detach() for x in qkv())
    alone = [
        counted(lambda n=n, m=m: tw.attention(q[None, :n], k[None, :m], v[None, :m])) for n, m in ((5, 20), (12, 13))
    ]
    assert counted(lambda: tw.attention_varlen(q, k, v, cu_q, cu_k)) == sum(alone)


@pytest.mark.parametrize("packed", [False, True])
def test_keys_of_a_cache_count_by_their_lengths(packed):
    q, k, v = (x.detach() for x in qkv())
    cache = tw.dense_cache(k, v, torch.tensor([20, 33], dtype=torch.int32))
    rows = (2, 9) if packed else (17, 17)
    given = (torch.cat([q[0, :2], q[1, :9]]), cache, torch.tensor([0, 2, 11])) if packed else (q, cache)
    expected = sum(2 * HQ * n * m * (D + DV) for n, m in zip(rows, (20, 33), strict=True))
    assert counted(lambda: tw.attention_paged(*given)) == expected


def test_tangents_count_two_products_for_each():
    q, k, v = (x.detach() for x in qkv())
    f = lambda q, k, v: tw.attention(q, k, v, backend="portable")  # noqa: E731
    pairs = 2 * HQ * B * NQ * NK
    first = counted(lambda: torch.func.jvp(f, (q, k, v), (q, k, v)))
    assert first == pairs * (D + DV + 3 * D + 2 * DV)
    gradients = torch.func.grad(lambda *x: f(*x).square().sum(), (0, 1, 2))
    second = counted(lambda: torch.func.jvp(gradients, (q, k, v), (q, k, v)))
    # The backward, its tangent, and for this the tangents of o and lse once more.
    assert second == first + pairs * (3 * D + 2 * DV + 7 * D + 5 * DV + 3 * D + 2 * DV)


def test_a_meta_tensor_counts_too():
    q, k, v = (x.detach().to("meta") for x in qkv())
    assert counted(lambda: tw.attention(q, k, v)) == torchs()[0]


@pytest.mark.parametrize("order", [("tilewise", "torch.utils.flop_counter"), ("torch.utils.flop_counter", "tilewise")])
def test_either_library_may_be_imported_first(order):
    program = f"""
import {order[0]}
import {order[1]}
import torch, tilewise
q = torch.zeros(1, 4, 1, 8)
with torch.utils.flop_counter.FlopCounterMode(display=False) as mode:
    tilewise.attention(q, q, q)
print(mode.get_total_flops())
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "512\n"
