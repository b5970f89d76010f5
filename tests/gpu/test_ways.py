"""``deterministic="everywhere"`` on a GPU: all ways of a scene have the same bits, forward and backward, or are refused by name."""

from collections.abc import Sequence

import pytest
import torch

from tests import ways
from tests.ways import Scene
from tilewise.backends.hopper.config import ORDERED_KEYS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# Heads (q, k), head dims (of k, of v), dtype and options, by backend. Every scene has the tiles of another row of the tables.
SCENES = {
    "hopper-64": ("hopper", (4, 1), (64, 64), torch.bfloat16, {"with_sink": True}),
    "hopper-128": ("hopper", (6, 2), (128, 128), torch.float16, {}),
    "hopper-64-window": ("hopper", (4, 1), (64, 64), torch.bfloat16, {"window": 127, "with_sink": True}),
    "hopper-128-window": ("hopper", (6, 2), (128, 128), torch.bfloat16, {"window": 2500}),
    "hopper-96": ("hopper", (4, 2), (96, 64), torch.bfloat16, {"window": 300}),
    "hopper-192-128": ("hopper", (4, 1), (192, 128), torch.bfloat16, {"with_sink": True}),
    "hopper-256": ("hopper", (4, 2), (256, 256), torch.float16, {}),
    "hopper-96-all": ("hopper", (4, 2), (96, 96), torch.bfloat16, {"causal": False}),
    "hopper-192-all": ("hopper", (2, 2), (192, 192), torch.bfloat16, {"causal": False, "with_sink": True}),
    "triton-64": ("triton", (4, 1), (64, 64), torch.bfloat16, {"cap": 5.0, "with_sink": True}),
    "triton-128": ("triton", (6, 2), (128, 128), torch.float16, {"window": 100}),
    "triton-192-128": ("triton", (4, 1), (192, 128), torch.bfloat16, {}),
    "triton-256": ("triton", (2, 2), (256, 256), torch.bfloat16, {"window": 255}),
}
# Ways that differ in their kernels; tests.fuzz --ways draws the others too. Each kernel of Triton takes seconds to compile.
FORWARD = (
    *("dense", "with statistics", "packed", "padded", "document", "last rows", "last rows, packed"),
    *("pages of 16", "pages of 64", "packed over pages", "decoded", "decoded, dense keys"),
)
BACKWARD = ("dense", "packed", "document", "padded")
# What has no order there, by backend: docs/invariance.md.
REFUSED = {"hopper": {"with statistics": "largest score"}}


def right(s: Scene, backend: str, forward: Sequence[str] = FORWARD, backward: Sequence[str] = BACKWARD) -> None:
    """Raise AssertionError if two ways of a scene differ, or if another way is refused than those of a backend."""
    torch.manual_seed(0)
    found = ways.compared(s, [way for way in forward if way in ways.ways_of(s)])
    assert found.different == []
    refused = REFUSED.get(backend, {})
    assert found.reasons.keys() == refused.keys()
    assert all(reason in found.reasons[way] for way, reason in refused.items())
    found = ways.compared_gradients(s, backward)
    assert (found.different, found.reasons) == ([], {})


@pytest.mark.parametrize("name", SCENES)
def test_ways_and_gradients_have_the_same_bits_or_are_refused_by_name(name):
    backend, heads, dims, dtype, more = SCENES[name]
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    right(Scene.drawn(777, heads, dims, dtype, "cuda", backend=backend, every=200, **more), backend)


@pytest.mark.parametrize("name", [name for name, (backend, *_) in SCENES.items() if backend == "hopper"])
def test_ways_of_several_segments_have_the_same_bits(name):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    backend, heads, dims, dtype, more = SCENES[name]
    for seqlen in (ORDERED_KEYS, ORDERED_KEYS + 1, 4 * ORDERED_KEYS + 1):
        for every in (ORDERED_KEYS - 1, ORDERED_KEYS):  # rows at both sides of a border
            right(Scene.drawn(seqlen, heads, dims, dtype, "cuda", backend=backend, every=every, **more), backend)
