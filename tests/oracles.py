"""The oracle's results of a call, computed once in a process for all tests that ask for them.

The contract judges every backend by the same calls, and the emulated kernels of Hopper by a few calls in many forms; eager's sixteen orders
took more time there than what they judge.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import fields

import torch
from torch import Tensor

from tilewise import accuracy
from tilewise.accuracy import Expected, Scale
from tilewise.backends.base import Inputs
from tilewise.problem import Problem

NUMBERS = 1 << 21  # the most that the tensors of a call hold which is remembered
KEPT = 1 << 24  # those of all calls that are remembered at a time


class Computed(Expected):
    """The results of a call that is not remembered; those of a call over pages come from another one, of all its keys."""

    of = classmethod(Expected.of.__func__)


def remember() -> None:
    """Has :meth:`tilewise.accuracy.Expected.of` give what it gave for the same problem and, bit for bit, the same tensors.

    Of eager's results what is kept is their errors, which are what a result is judged by.
    """
    if getattr(Expected, "remembered", None) is not None:
        return
    found, numbers = OrderedDict(), 0
    Expected.remembered = found

    def of(cls, p: Problem, t: Inputs, do: Tensor | None = None, dlse: Tensor | None = None) -> Expected:
        nonlocal numbers
        given = [*tensors(t), do, dlse]
        size = sum(x.numel() for x in given if x is not None)
        if size > NUMBERS or p.device.type != "cpu":
            return Computed.of(p, t, do, dlse)
        key = repr(p), accuracy.ORDERS, tuple(map(content, given))
        if key not in found:
            made, numbers = Computed.of(p, t, do, dlse), numbers + size
            eager = {name: [e[name] for e in made.eager if name in e] for name in made.oracle}
            scales = {name: Scale.of(x, eager[name]) for name, x in made.oracle.items()}
            found[key] = Expected(made.oracle, [], scales), size
        found.move_to_end(key)
        while numbers > KEPT:
            _, (_, forgotten) = found.popitem(last=False)
            numbers -= forgotten
        return found[key][0]

    Expected.of = classmethod(of)


def tensors(t: Inputs) -> Iterator[Tensor | None]:
    """All tensors of a call, those that it lacks too."""
    for field in (x for x in fields(t) if x.name != "joint"):
        value = getattr(t, field.name)
        yield from value if isinstance(value, list | tuple) else (value,)


def content(x: Tensor | None) -> tuple | None:
    """The shape, the dtype and a digest of the bits of a tensor."""
    if x is None:
        return None
    bits = x.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return x.shape, x.dtype, hashlib.sha256(bits).digest()
