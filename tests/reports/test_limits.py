"""Calls at the limits of a GPU: more blocks than a launch may have, which CUDA calls an invalid value, and numbers near fp32's end."""

from dataclasses import replace

import pytest
import torch

import tilewise as tw
from bench.testing import call, normal, qkv
from tests.backends.contract import run
from tilewise import device as devices
from tilewise.backends.cpu import Cpu
from tilewise.backends.hopper import Hopper
from tilewise.backends.portable import Portable
from tilewise.backends.triton import Triton, config, interpreting, launches, runtime
from tilewise.backends.triton.host import tangent
from tilewise.device import MOST_BLOCKS, beyond_grid


@pytest.mark.parametrize("axis", range(3))
def test_grid_a_launch_of_more_blocks_than_a_gpu_has_is_named_with_the_limit(axis):
    most = [1, 1, 1]
    most[axis] = MOST_BLOCKS[axis]
    assert beyond_grid({"a kernel": most}) == []
    most[axis] += 1
    (said,) = beyond_grid({"another": (1,), "a kernel": most})
    assert (
        said
        == f"{most[axis]:,} blocks along {'xyz'[axis]} in the launch of a kernel, where a GPU has {MOST_BLOCKS[axis]:,} at most"
    )


def of_heads(heads: int, batch: int = 2, nk: int = 5, **options):
    q = torch.empty(1, dtype=torch.bfloat16).expand(batch, 5, heads, 64)
    k = torch.empty(1, dtype=torch.bfloat16).expand(batch, nk, 1, 64)
    return call(q.requires_grad_(), k, k, **options).p


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"mask": tw.key_lengths(3)}], ids=["all", "causal", "lengths"]
)
def test_grid_hopper_leaves_a_backward_of_too_many_heads_to_others(options):
    said = "66,000 blocks along y in the launch of its statistics of rows, where a GPU has 65,535 at most"
    assert said in Hopper().refused(of_heads(66_000, **options))
    assert not any("blocks along" in x for x in Hopper().refused(of_heads(65_535, **options)))


def by_pair(heads: int, nk: int):
    """A bias of each pair of each head that the batch shares, and that wants its gradient."""
    return tw.bias(torch.empty(1).expand(1, heads, 5, nk).requires_grad_())


def by_distance(heads: int, nk: int):
    table = torch.zeros(9, requires_grad=True)
    return tw.score(lambda s, b, h, i, j: s + table[(i - j + 4).clamp(0, 8)])


CASES = {
    "by pair, of each head": (by_pair, (2, 66_000, 70), (2, 65_535, 70), "66,000 blocks along z"),
    "by distance": (by_distance, (33_000, 2, 70), (32_767, 2, 70), "66,000 blocks along z"),
    "by pair, of many keys": (by_pair, (2, 2, 1 << 23), (2, 2, 1 << 20), "blocks along y"),
}


@pytest.mark.parametrize(("score", "many", "few", "said"), CASES.values(), ids=CASES)
def test_grid_triton_leaves_gradients_of_too_many_blocks_to_others(score, many, few, said):
    def refused(batch, heads, nk):
        return [
            x for x in Triton().unsupported(of_heads(heads, batch, nk, score=score(heads, nk))) if "blocks along" in x
        ]

    assert said in refused(*many)[0]
    assert "the gradient of a tensor read at [" in refused(*many)[0]
    assert refused(*few) == []


def test_grid_triton_runs_any_number_of_heads_of_other_calls():
    problem = of_heads(66_000, causal=True)
    assert launches(problem, Triton().config(problem)) == {}


def test_grid_a_launch_is_held_to_the_limits_before_it_reaches_the_driver():
    class Kernel:
        fn = staticmethod(lambda: None)

    with pytest.raises(NotImplementedError, match=r"65,536 blocks along z in the launch of <lambda>.*65,535 at most"):
        runtime.run(Kernel, (1, 1, 65_536), None)


# -- Values near fp32's end (docs/algorithm.md#large-values) ----------------------------------------------------------------

LARGEST = torch.finfo(torch.float32).max
BACKENDS = [
    Portable(),
    Cpu(),
    pytest.param(Triton(), marks=pytest.mark.skipif(not interpreting(), reason="Triton's kernels are not interpreted")),
]


def with_values_up_to(most: float, keys: int, dtype=torch.float32, **options):
    q, k, _ = qkv(1, 20, keys, 2, 1, 16, 16, dtype=dtype)
    v = normal(1, keys, 1, 16, seed=7, dtype=dtype).sign() * most
    return call(q, k, v, normal(1, 20, 2, 16, dtype=dtype) / most, **options)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda x: x.name)
@pytest.mark.parametrize("keys", [64, 300])
def test_large_values_are_averaged_up_to_the_largest_number_over_the_number_of_keys(keys, backend):
    c = with_values_up_to(0.95 * LARGEST / keys, keys)
    assert backend.unsupported(c.p) == []
    assert not [str(e) for e in c.expected().judge(run(backend, c)) if not e.ok]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda x: x.name)
def test_large_values_beside_a_bounded_score_in_bf16_are_averaged_up_to_2_48_over_the_number_of_keys(backend):
    c = with_values_up_to(0.95 * 2.0**48 / 64, 64, torch.bfloat16, score=tw.softcap(50.0))
    assert not [str(e) for e in c.expected().judge(run(backend, c)) if not e.ok]


@pytest.mark.parametrize("keys", [64, 300])
def test_large_values_beyond_that_take_a_power_of_two(keys):
    q, k = torch.zeros(1, 20, 2, 16), normal(1, keys, 1, 16)
    v = torch.full((1, keys, 1, 16), 3e37)
    assert tw.attention(q, k, v).isinf().all()
    torch.testing.assert_close(tw.attention(q, k, v * 2**-10) * 2**10, torch.full_like(q, 3e37))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_head_dims_every_tangent_that_triton_takes_has_tiles(dtype, capability, monkeypatch):
    gpu = devices.Device("a GPU", "cuda", 132, 232_448, 80 << 30, capability)
    monkeypatch.setattr(devices, "of", lambda device: gpu)
    for dim in (1, 64, 100, 256, 257, 300, 512):
        c = call(*qkv(3, 3, d=dim, dtype=dtype))
        p = replace(c.p, device=torch.device("cuda", 0))
        if not Triton().without_tangents(p, second=True):
            assert all(tangent.tangent_tiles(p, name) for name in tangent.PASSES)
        assert bool(Triton().without_tangents(p, second=True)) == (dim > 256)


@pytest.mark.parametrize(
    ("dtype", "tf32", "own"),
    [(torch.float32, False, True), (torch.float32, True, False), (torch.bfloat16, False, False)],
)
def test_tangents_of_fp32_have_tiles_of_their_own_unless_rounded_to_tf32(dtype, tf32, own, monkeypatch):
    gpu = devices.Device("a GPU", "cuda", 132, 232_448, 80 << 30, (9, 0))
    monkeypatch.setattr(devices, "of", lambda device: gpu)
    monkeypatch.setattr(config, "tf32_allowed", lambda: tf32)
    p = replace(call(*qkv(3, 3, d=64, dtype=dtype)).p, device=torch.device("cuda", 0))
    found = tuple(tangent.tangent_tiles(p, name) for name in tangent.PASSES)
    assert (found == tangent.FLOAT_TILES[128]) == own
