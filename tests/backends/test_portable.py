"""The portable backend against the contract, with its own tiles and with others."""

from types import SimpleNamespace

import pytest
import torch

import tilewise as tw
from bench import cases
from tests.backends.contract import Contract, agree, call, normal, of_case, qkv, run
from tests.backends.paged import CASES, PagedContract
from tilewise.backends.portable import Portable, step
from tilewise.backends.portable.config import SPLIT_KEYS, Config
from tilewise.backends.portable.step import steps


class TestPortable(Contract):
    backend = Portable()


class TestPortableOverPages(PagedContract):
    backend = Portable()


OTHER_TILES = {
    "tiny": Config(tile_m=16, tile_n=16, batch=1, heads_k=1),
    "odd": Config(tile_m=24, tile_n=40, batch=2, heads_k=2),
    "tall": Config(tile_m=256, tile_n=32, batch=2, heads_k=1),
    "split": Config(tile_m=32, tile_n=16, batch=2, heads_k=2, split=32),
}


@pytest.mark.parametrize("config", OTHER_TILES.values(), ids=OTHER_TILES)
@pytest.mark.parametrize(
    "name",
    [
        "gqa-causal",
        "window-both-cross",
        "documents",
        "dense",
        "softcap-alibi-causal-cross",
        "relative",
        "dropout-causal-alibi-sink",
        "key-lengths",
    ],
)
def test_tiles_do_not_change_the_result(config, name):
    agree(Portable(config), of_case(cases.named(f"contract-{name}")))


def test_long_keys_with_few_queries_are_split_and_merged():
    q, k, v = qkv(nq=3, nk=2 * SPLIT_KEYS + 100, hq=2, hk=1)
    c = call(q, k, v, causal=True)
    assert Portable().config(c.p).split == SPLIT_KEYS
    agree(Portable(), c)


def test_deterministic_results_do_not_depend_on_the_rest_of_the_batch():
    q, k, v = qkv(batch=3, nq=300, nk=300)
    whole = run(Portable(), call(q, k, v, causal=True, deterministic=True))
    alone = run(Portable(), call(q[1:2], k[1:2], v[1:2], causal=True, deterministic=True))
    assert torch.equal(whole["o"][1:2], alone["o"])
    assert torch.equal(whole["lse"][1:2], alone["lse"])


def test_steps_stay_within_their_budget():
    p = call(*(torch.zeros(1, 1, 1, 64).expand(4, 32768, 8, 64) for _ in range(3)), do=torch.zeros(1)).p
    assert Portable().config(p).bytes(p) <= 16 << 20


def test_prepared_masks_give_the_same_result():
    q, k, v = qkv(nq=200, nk=200)
    mask = tw.keep(lambda b, h, i, j: (i // 32 + j // 32) % 2 == 0) & tw.causal()
    plain, prepared = (run(Portable(), call(q, k, v, mask=m)) for m in (mask, mask.prepare(q, k)))
    assert all(torch.equal(plain[name], prepared[name]) for name in plain)


def test_a_call_on_a_gpu_raises_while_a_graph_is_captured_since_tiles_to_visit_are_read_on_the_host(monkeypatch):
    c = call(*qkv(nq=3, nk=5, hq=2, hk=1, d=8, dv=8), causal=True)
    c.t.q = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(step, "is_captured", lambda: True)
    with pytest.raises(NotImplementedError, match="CUDA graph"):
        next(steps(c.p, c.t, Portable().config(c.p)))
    paged = CASES["page-16"].call()
    paged.t.q = c.t.q
    with pytest.raises(NotImplementedError, match="CUDA graph"):
        Portable().forward(paged.p, paged.t)


@pytest.mark.parametrize("head_dim", [17, 64])
def test_deterministic_bits_do_not_depend_on_where_a_sequence_lies(head_dim):
    """Behind a sequence of odd length, rows of an odd head dim begin at other multiples of what vectors hold."""

    def gradients(first: int) -> list[torch.Tensor]:
        """o and gradients of one query over 300 keys, behind ``first`` sequences of one query over three keys."""
        q, do = (normal(2, 2, head_dim, seed=n)[1 - first :].clone() for n in range(2))
        k, v = (normal(303, 2, head_dim, seed=n)[3 - 3 * first :].clone() for n in range(2, 4))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        ends = [0] * first + [first], [0] * first + [3 * first]
        ends = [torch.tensor([*x, x[-1] + n]) for x, n in zip(ends, (1, 300), strict=True)]
        o = tw.attention_varlen(q, k, v, *ends, deterministic=True, backend="portable")
        dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)
        return [o[-1], dq[-1], dk[-300:], dv[-300:]]

    for alone, behind in zip(gradients(0), gradients(1), strict=True):
        assert torch.equal(alone, behind)
