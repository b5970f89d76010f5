"""Microseconds that a public call costs above its backend, and the GPU backends' launches above theirs: `python -m bench.overhead`.

The backend is replaced by one that only allocates its outputs; what remains is assembling, dispatch and autograd. Goal: at most
15 a call with gradients. Triton's compiled kernels are replaced by a call that does nothing: what remains of its forward and
backward is Python and the allocation of outputs. Hopper's kernels are launched by their launcher, on a driver that returns at
once (tests/backends/hopper/standin.cpp). Tensors lie on the CPU: left out are the driver's own time for a launch (about 2), the
caching allocator where it differs from malloc, asking torch for the stream, and entering the device.
"""

import argparse
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

import tilewise as tw
from tilewise import dispatch
from tilewise.backends.base import Grads, Inputs, Output, empty_output
from tilewise.problem import Problem

CALLS = 3000  # whose mean is one sample


class Empty:
    """Allocates and computes nothing."""

    name = "empty"

    def unsupported(self, p: Problem) -> list[str]:
        return []

    def forward(self, p: Problem, t: Inputs) -> Output:
        return empty_output(p, t.q, t.v)

    def backward(self, p: Problem, t: Inputs, out: Output, do: torch.Tensor, dlse: torch.Tensor) -> Grads:
        return Grads(torch.empty_like(t.q), torch.empty_like(t.k), torch.empty_like(t.v), None, {})


def microseconds(call: Callable[[], object]) -> float:
    """The best of seven means over CALLS: other work on the machine only adds."""
    call()
    best = float("inf")
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - began) / CALLS)
    return best * 1e6


def triton() -> None:
    """The host's side of a launch; Triton needs a GPU for the rest."""
    from tilewise.backends.triton import config
    from tilewise.backends.triton.host import launch, launched, plan, runtime
    from tilewise.testing import call

    q = torch.randn(1, 64, 2, 64, dtype=torch.bfloat16)
    c = call(q, q.clone(), q.clone(), causal=True)
    runtime.run = lambda *_: SimpleNamespace(metadata=True)
    launched.Prepared = SimpleNamespace(of=lambda *_: lambda *_: True)
    known = plan.Plan(c.p, config.Config.of(config.TABLE["sm90"]["half"][0].passes))
    out = launch.forward(known, c.t)
    launch.backward(known, c.t, out, c.do, c.dlse)
    forward = microseconds(lambda: launch.forward(known, c.t))
    backward = microseconds(lambda: launch.backward(known, c.t, out, c.do, c.dlse))
    print(f"triton without its kernels: forward {forward:.1f} us, backward {backward:.1f} us")


def hopper() -> None:
    """Prints the host's time to the driver's launch: from the backend (goal: below 12), from the public call (30; 45 with gradients)."""
    from tests.backends.hopper import standin
    from tilewise.backends.hopper import Hopper
    from tilewise.backends.hopper.host import library
    from tilewise.testing import call

    q = torch.randn(1, 4096, 2, 64, dtype=torch.bfloat16)
    backend = Hopper()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        c = call(q, q.clone(), q.clone(), causal=True)
        os.environ["TILEWISE_LAUNCHER"] = str(standin.build(Path(folder)))
        reasons = library.missing(backend.config(c.p))
        if reasons:
            print(f"hopper: not measured: {'; '.join(reasons)}")
            return
        standin.StandIn(Path(folder)).c.standin_silent(1)
        forward = microseconds(lambda: backend.forward(c.p, c.t))
        outputs = microseconds(lambda: empty_output(c.p, c.t.q, c.t.v))
        select, dispatch.select = dispatch.select, lambda p: backend
        public = microseconds(lambda: tw.attention(c.t.q, c.t.k, c.t.v, causal=True))
        watched = [x.detach().requires_grad_() for x in (c.t.q, c.t.k, c.t.v)]
        with torch.enable_grad():
            with_gradients = microseconds(lambda: tw.attention(*watched, causal=True))
        dispatch.select = select
        dispatch.forget()
    print(f"hopper without its kernels: forward {forward:.1f} us, of these outputs {outputs:.1f}")
    print(f"its public call {public:.1f} us, with gradients {with_gradients:.1f} us")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition(":")[0]).parse_args()
    if importlib.util.find_spec("triton"):
        triton()
    hopper()
    empty = Empty()
    dispatch.select = lambda p: empty
    q, k, v = (torch.randn(1, 4, 1, 8, requires_grad=True) for _ in range(3))
    tw.attention(q, k, v, causal=True)
    plan = next(iter(dispatch._plans.values()))
    inputs = Inputs(q.detach(), k.detach(), v.detach())
    alone = microseconds(lambda: empty.forward(plan.problem, inputs))
    with_gradients = microseconds(lambda: tw.attention(q, k, v, causal=True))
    do = torch.ones_like(q)
    both = microseconds(lambda: torch.autograd.grad(tw.attention(q, k, v, causal=True), (q, k, v), do))
    with torch.no_grad():
        without = microseconds(lambda: tw.attention(q, k, v, causal=True))
    print(f"backend alone {alone:.1f} us")
    print(f"call with gradients {with_gradients:.1f} us: {with_gradients - alone:.1f} above the backend")
    print(f"call and its gradients {both:.1f} us")
    print(f"call without gradients {without:.1f} us: {without - alone:.1f} above the backend")


if __name__ == "__main__":
    main()
