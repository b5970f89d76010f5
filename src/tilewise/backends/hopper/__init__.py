"""Attention on Hopper GPUs (sm_90a): kernels in CuTe DSL, compiled ahead of time (:mod:`tilewise.backends.hopper.aot`).

The forward alone, and it has not run on a GPU yet: it runs only when it is named. Importing this imports no DSL.
"""

from __future__ import annotations

from torch import Tensor

from tilewise import device as devices
from tilewise.backends.base import Grads, Inputs, Output, PerProblem
from tilewise.backends.hopper import config as sizes
from tilewise.backends.hopper import library
from tilewise.backends.hopper.config import Config
from tilewise.problem import Problem


class Hopper:
    """The backend.

    Args:
        override: a Config to use for every problem, in place of the one chosen by shape.
    """

    name = "hopper"

    def __init__(self, override: Config | None = None):
        self.override = override
        self._plans = PerProblem(self._plan)

    def unsupported(self, p: Problem) -> list[str]:
        """What is wrong with the problem; if nothing, what is wrong with the machine."""
        return sizes.reasons(p) or _device_reasons(p) or library.missing(self.config(p))

    def config(self, p: Problem) -> Config:
        return self.override or sizes.choose(p)

    def forward(self, p: Problem, t: Inputs) -> Output:
        from tilewise.backends.hopper import call

        return call.forward(self._plans.of(p), t)

    def backward(self, p: Problem, t: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        raise NotImplementedError("hopper has no backward; a call that needs one is refused from its forward on")

    def _plan(self, p: Problem):
        from tilewise.backends.hopper.call import Plan

        return Plan(p, self.config(p))


def _device_reasons(p: Problem) -> list[str]:
    if p.device.type != "cuda":
        return [f"runs on cuda, q is on {p.device.type}"]
    major, minor = devices.of(p.device).capability
    return [] if (major, minor) == (9, 0) else [f"compute capability {major}.{minor} is not 9.0"]
