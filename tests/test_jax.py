"""``tilewise.jax``: the contract's cases through it, judged against float64, and JAX's transformations of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

jax = pytest.importorskip("jax", reason="the package jax is not installed")
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

import tilewise.jax as tw
from bench import cases
from tilewise import testing

jax.config.update("jax_enable_x64", True)  # the contract has float64
jax.config.update("jax_num_cpu_devices", 2)


def array(t: Tensor) -> jax.Array:
    return jnp.from_dlpack(t.detach().contiguous())


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> jax.Array:
    return array(testing.normal(*shape, seed=seed, dtype=dtype))


def qkv(**sizes: object) -> list[jax.Array]:
    return [array(x) for x in testing.qkv(**sizes)]


def equal(found: object, wanted: object) -> None:
    """Two trees of arrays have the same numbers, up to the rounding of sums in another order."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        torch.testing.assert_close(torch.from_dlpack(x), torch.from_dlpack(y))


# -- The contract ------------------------------------------------------------------------------------------------------


def through_the_door(x: cases.Inputs, c: testing.Call) -> dict[str, Tensor]:
    """A case's results by the names of :func:`tilewise.accuracy.tensors`."""
    differentiable = {name.removeprefix("d"): array(t) for name, t in x.wanted.items()}

    def run(given: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        leaves = {name: tw.leaf(given.get(name, array(t))) for name, t in x.leaves.items()}
        options = replace(x, leaves=leaves, sink=given.get("sink")).options()
        if options["dropout_seed"] is not None:
            options["dropout_seed"] = array(options["dropout_seed"])
        q, k, v = (given[name] for name in "qkv")
        if not x.case.lengths:
            return tw.attention_with_lse(q, k, v, **options)
        cu = [array(options.pop(f"cu_seqlens_{side}")) for side in "qk"]
        return tw.attention_varlen(q, k, v, *cu, return_lse=True, **options)

    (o, lse), pull = jax.vjp(run, differentiable)
    (grads,) = pull((array(c.do), array(c.dlse)))
    slots = {t.data_ptr(): slot for slot, t in enumerate(c.t.leaves) if t is not None and slot in c.p.spec.grad_slots}
    named = {name: f"dleaf{slots[t.data_ptr()]}" for name, t in x.leaves.items() if t.data_ptr() in slots}
    found = {"o": o, "lse": lse, **{named.get(name, f"d{name}"): g for name, g in grads.items()}}
    return {name: torch.from_dlpack(y) for name, y in found.items()}


@pytest.mark.parametrize("case", cases.tagged("contract"), ids=lambda case: case.name.removeprefix("contract-"))
def test_agrees_with_the_oracle(case):
    x = case.draw()
    c = testing.call(x.q, x.k, x.v, x.do, "cpu", **x.options())
    found, expected = through_the_door(x, c), c.expected()
    assert set(found) == set(expected.oracle)
    assert not [str(e) for e in expected.judge(found) if not e.ok]
