"""The Hopper backend's kernels on a Hopper GPU: each shipped one against float64, and what only a GPU can show."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tests.backends.contract import qkv
from tilewise.backends.hopper import Hopper, library
from tilewise.backends.hopper.config import shipped

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
    ),
]


@pytest.mark.parametrize("config", shipped(), ids=lambda c: c.name)
def test_a_kernel_agrees_with_the_oracle(config):
    from bench import gpu_hopper

    reasons = library.missing(config)
    if reasons:
        pytest.skip("; ".join(reasons))
    backend = Hopper(config)
    wrong = {}
    for label, c in gpu_hopper.check_calls(config):
        c = gpu_hopper.forward_only(c)
        state, detail = gpu_hopper.judged(c, backend.forward(c.p, c.t), backend)
        wrong |= {} if state == "ok" else {label: detail}
    assert not wrong


def test_a_graph_replays_it_and_another_stream_runs_it():
    q, k, v = (x.cuda() for x in qkv(nq=500, nk=500, d=64, dv=64, dtype=torch.bfloat16))
    with torch.no_grad():
        run = lambda: tw.attention(q, k, v, causal=True, backend="hopper")  # noqa: E731
        expected = run()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            aside = run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(aside, expected)
    assert torch.equal(captured, expected)
