"""The oracle's results of a call, computed once in a process for all tests that ask for them.

The contract judges every backend by the same calls, and the emulated kernels of Hopper by a few calls in many forms; eager's sixteen orders
took more time there than what they judge.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import fields

import torch
from torch import Tensor

from tilewise import accuracy
from tilewise.accuracy import Expected
from tilewise.backends.base import Inputs
from tilewise.problem import Problem

KEPT, NUMBERS = 256, 1 << 18  # calls that are remembered, and the most numbers that the tensors of one may have


def remember() -> None:
    """Has :meth:`tilewise.accuracy.Expected.of` give what it gave for the same problem and, bit for bit, the same tensors."""
    if getattr(Expected, "remembered", None) is not None:
        return
    compute, found = Expected.of, OrderedDict()
    Expected.remembered = found

    def of(cls, p: Problem, t: Inputs, do: Tensor | None = None, dlse: Tensor | None = None) -> Expected:
        given = [*tensors(t), do, dlse]
        if sum(x.numel() for x in given if x is not None) > NUMBERS or p.device.type != "cpu":
            return compute(p, t, do, dlse)
        key = repr(p), accuracy.ORDERS, tuple(map(content, given))
        if key not in found:
            found[key] = compute(p, t, do, dlse)
        found.move_to_end(key)
        while len(found) > KEPT:
            found.popitem(last=False)
        return found[key]

    Expected.of = classmethod(of)


def tensors(t: Inputs) -> Iterator[Tensor | None]:
    """All tensors of a call, those that it lacks too."""
    for field in fields(t):
        value = getattr(t, field.name)
        yield from value if isinstance(value, list | tuple) else (value,)


def content(x: Tensor | None) -> tuple | None:
    """The shape, the dtype and the bits of a tensor."""
    if x is None:
        return None
    return x.shape, x.dtype, x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
