"""``tilewise.jax`` on a GPU: the contract's cases, first through PyTorch and then bound, and JAX's transformations of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("jax", reason="the package jax is not installed")
import jax
import jax.numpy as jnp

import tilewise.jax as tw
from bench import cases, testing
from tests.test_jax import (  # noqa: F401  collected here too
    array,
    equal,
    loss,
    qkv,
    tensor,
    test_a_gradient_that_nobody_wants_is_not_computed,
    test_arrays_of_masks_may_be_arguments_of_a_compiled_function,
    test_jit_traces_a_call_once_and_gives_the_same_bits,
    test_layers_in_a_scan_with_checkpoints_have_the_gradients_of_a_loop,
    test_vmap_is_a_loop,
    test_wrong_calls_raise_while_tracing_with_every_reason,
    through_the_door,
)
from tilewise.jax import gpu


def has_gpu() -> bool:
    try:
        return torch.cuda.is_available() and bool(jax.local_devices(backend="gpu"))
    except RuntimeError:  # this JAX knows no such platform
        return False


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_gpu(), reason="no CUDA device that JAX and PyTorch both have"),
]


@pytest.fixture(autouse=True)
def on_the_cpu():
    """On the GPU: this stands in the place of the fixture of that name beside the imported tests."""
    with jax.default_device(jax.local_devices(backend="gpu")[0]):
        yield


def named(case: cases.Case) -> str:
    return f"{case.name.removeprefix('contract-')}-{case.dtype}"


CASES = cases.tagged("contract")
HALVES = [replace(case, dtype="bfloat16") for case in CASES if case.dtype == "float32"]  # which Hopper's kernels take


@pytest.fixture
def bound(monkeypatch) -> list:
    """What came of the calls that went through PyTorch: their launches, or None."""
    found, bind = [], gpu._bound
    monkeypatch.setattr(gpu, "_bound", lambda *x: found.append(bind(*x)) or found[-1])
    return found


@pytest.mark.parametrize("case", [*CASES, *HALVES], ids=named)
def test_agrees_with_the_oracle_through_pytorch_and_bound(case):
    x = case.draw()
    c = testing.call(x.q, x.k, x.v, x.do, "cpu", **x.options())
    expected = c.expected()
    for _ in range(2):
        found = through_the_door(x, c)
        assert set(found) == set(expected.oracle)
        assert not [str(e) for e in expected.judge(found) if not e.ok]


def half(*shape: int, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


CALLS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"mask": tw.window(left=200, right=3)},
    "softcap": {"causal": True, "score": tw.softcap(20.0)},
    "deterministic": {"causal": True, "deterministic": True},
}


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["heads", "grouped"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", CALLS)
def test_plain_calls_are_bound_with_their_gradients(name, dim, heads, bound):
    q, k, v = (half(2, 700, h, dim, seed=n) for n, h in enumerate((heads[0], heads[1], heads[1])))
    run = jax.jit(jax.value_and_grad(lambda *x: loss(*tw.attention_with_lse(*x, **CALLS[name])), (0, 1, 2)))
    first = jax.block_until_ready(run(q, k, v))
    assert len(bound) == 2
    assert all(x is not None for x in bound)
    for _ in range(3):
        for x, y in zip(jax.tree.leaves(run(q, k, v)), jax.tree.leaves(first), strict=True):
            torch.testing.assert_close(tensor(x), tensor(y))  # the order of sums may differ
    assert len(bound) == 2  # none of these came through PyTorch


def test_packed_calls_are_bound(bound):
    q, k, v = (half(900, h, 64, seed=n) for n, h in enumerate((4, 2, 2)))
    cu = jnp.asarray([0, 300, 300, 850], jnp.int32)
    run = jax.jit(jax.value_and_grad(lambda *x: tw.attention_varlen(*x, cu, causal=True)[:850].sum(), (0, 1, 2)))
    first = jax.block_until_ready(run(q, k, v))
    equal(run(q, k, v), first)
    assert [x is not None for x in bound] == [True, True]
    for start, stop in ((0, 300), (300, 850)):
        rows = [x[None, start:stop] for x in (q, k, v)]
        wanted = jax.grad(lambda *x: tw.attention(*x, causal=True).sum(), (0, 1, 2))(*rows)
        equal([x[None, start:stop] for x in run(q, k, v)[1]], wanted)


def test_donated_operands_and_operations_around_a_call_see_the_right_memory():
    k, v = (half(2, 512, 4, 64, seed=n) for n in (1, 2))

    def step(x):
        for _ in range(5):
            x = tw.attention(jnp.sin(x) * 2, k, v, causal=True) + x
        return x

    compiled, x, y = jax.jit(step, donate_argnums=0), half(2, 512, 4, 64, seed=0), half(2, 512, 4, 64, seed=0)
    for _ in range(4):
        x, y = compiled(x), step(y)
    torch.testing.assert_close(tensor(x), tensor(y), rtol=0.1, atol=0.1)  # XLA fuses, and rounds elsewhere


def test_programs_that_run_beside_each_other_have_their_own_results():
    from concurrent.futures import ThreadPoolExecutor

    given = [[half(1, 256 + 64 * n, 4, 64, seed=3 * n + m) for m in range(3)] for n in range(4)]
    run = jax.jit(lambda q, k, v: tw.attention(q, k, v, causal=True))
    wanted = [jax.block_until_ready(run(*x)) for x in given]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda n: [run(*given[n]) for _ in range(50)][-1], range(4)))
    for x, y in zip(found, wanted, strict=True):
        assert jnp.array_equal(x, y)


def test_arrays_on_the_cpu_are_computed_there():
    q, k, v = (jax.device_put(x, jax.local_devices(backend="cpu")[0]) for x in qkv())
    found = jax.jit(tw.attention)(q, k, v)
    assert {device.platform for device in found.devices()} == {"cpu"}
    equal(found, tw.attention(q, k, v, backend="cpu"))


def test_a_backend_of_another_device_is_refused_while_tracing():
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match="runs on cpu, q is on cuda"):
        jax.eval_shape(lambda: tw.attention(q, k, v, backend="cpu"))
