"""Calls on an NVIDIA GPU: on XLA's stream, over XLA's buffers, without waiting for either.

Each call comes as on the CPU (:mod:`tilewise.jax.handler`), and PyTorch's operators run it: they allocate what they need from PyTorch's
memory, and their results are copied into XLA's. Where the backend of the call can bind it, the next one of the same sizes is launched
without Python, PyTorch and that copy (:mod:`tilewise.backends.hopper.host.xla`, docs/decisions.md#jax-handler).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from tilewise import dispatch, settings
from tilewise.backends.hopper.host import xla
from tilewise.jax.handler import Answering, Asked, Frame, Handler, answer, problem, run


@Handler
def _handler(frame: ctypes._Pointer[Frame]) -> int | None:
    return answer(frame, _run)


def _asked(f: Frame, function: Answering) -> int:
    """Return the answer of one of XLA's functions."""
    asked = Asked(ctypes.sizeof(Asked), None, f.context, None)
    if function(asked):
        raise RuntimeError("XLA does not say on which stream a call runs")
    return asked.found or 0


class _Memory:
    """Bytes of a GPU, as :func:`torch.as_tensor` takes them."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 2}


@lru_cache(maxsize=1)
def check() -> None:
    """Raise NotImplementedError where PyTorch has no GPU."""
    if not torch.cuda.is_available():
        raise NotImplementedError(
            "tilewise.jax on a GPU needs a PyTorch that has it too, and torch.cuda.is_available() is False: install PyTorch with CUDA, "
            "or compute on JAX's CPU, inside jax.default_device(jax.devices('cpu')[0])"
        )


def _run(f: Frame, call: str) -> None:
    check()
    device = torch.device("cuda", _asked(f, f.api.contents.device_ordinal))
    stream = torch.cuda.ExternalStream(_asked(f, f.api.contents.stream), device)

    def memory(address: int, size: int) -> Tensor:
        return torch.as_tensor(_Memory(address, size), device=device) if size else torch.empty(0, device=device)

    with torch.cuda.stream(stream):
        operands, results = (x.tensors(memory) for x in (f.operands, f.results))
        run(call, operands, results)
    launches = _bound(call, device, *[(tuple(x.shape), x.dtype) for x in operands])
    if launches is not None:
        xla.bind(ctypes.addressof(f), launches)


@lru_cache(maxsize=512)
def _bound(call: str, device: torch.device, *operands: tuple[Sequence[int], torch.dtype]) -> object | None:
    """Return the launches of a call that came once, or None if the next one comes through PyTorch again."""
    name, ndim, spec = call.split(" ", 2)
    if name == "derived" or len(operands[0][0]) != int(ndim) or settings.check_values():
        return None
    backward = name == "backward"
    if backward:  # behind do and dlse come q, k, v, o, lse and the extras
        operands = *operands[2:5], *operands[7:]
    p = problem(spec, device, *operands)
    plan = dispatch.Plan(p, dispatch.select(p))
    plan = plan if backward else plan.of_forward
    return xla.bound(plan.backend, plan.problem, backward)


def target() -> ctypes._CFuncPtr:
    """Return XLA's handler of calls on a GPU."""
    return xla.target(_handler)
