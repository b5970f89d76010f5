"""What plans give to kernels, without kernels: the arguments of a launch, and those that a draft has."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.hopper.host import library
from tilewise.backends.hopper.host.draft import Draft, Late, View
from tilewise.backends.hopper.parameters import Parameter, names_of


def at_address(address: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """The tensor that lies there, without a copy: it is there as long as that memory is."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * ((last + 1) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(tuple(shape), tuple(strides))


class Seen:
    """A tensor as a launch saw it: a copy of what lay there, and where and how it lay."""

    def __init__(self, tensor: Tensor):
        self.value, self.address, self.strides = tensor.clone(), tensor.data_ptr(), tensor.stride()

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)


def seen(arguments: list) -> tuple[list[Seen], list]:
    """The tensors and the numbers of a launch."""
    tensors = [Seen(x) for x in arguments if isinstance(x, Tensor)]
    return tensors, [x for x in arguments if not isinstance(x, Tensor)]


def stand_in(monkeypatch, launched: Callable[[Any, list], None]) -> None:
    """Has every launch call a function with the config and the arguments, flat, in place of its kernels."""

    class Kernels:
        def __init__(self, config):
            self.config = config

        def pack(self, kinds, words, device) -> tuple:
            return kinds, tuple(words)

        def run(self, packed, memories, device) -> None:
            kinds, words = packed
            at, places, found = memoryview(memories).cast("Q"), sum(x is not None for x in kinds), []
            rest, place = iter(words[: len(words) - 2 * places]), iter(words[len(words) - 2 * places :])
            for kind in kinds:
                if kind is None:
                    found.append(next(rest))
                else:
                    shape, strides = (list(islice(rest, kind[1])) for _ in range(2))
                    address = at[next(place)] + next(place)
                    found.append(at_address(address, kind[0], shape, strides))
            assert next(rest, None) is next(place, None) is None
            launched(self.config, found)

    monkeypatch.setattr(library, "function", Kernels)


def values_of(
    rows: Sequence[Parameter], drafted: Mapping[str, Any], tensors: Mapping[str, Tensor], draft: Draft
) -> dict[str, Any]:
    """The drafted values of some of a launch's parameters, by name, as :func:`value_of` has them."""
    return {name: value_of(drafted[name], tensors, draft) for name in names_of(rows) if name in drafted}


def value_of(x: View | Late | float, tensors: Mapping[str, Tensor], draft: Draft) -> Any:
    """The argument of a draft as NumPy has it; of memory that a call makes what it holds by then, NaN or -1 in place of anything."""
    if not isinstance(x, (View, Late)):
        return x
    if x.memory in tensors:
        found = tensors[x.memory]
        if isinstance(x, View):
            found = torch.as_strided(found, x.shape, x.strides, found.storage_offset() + x.offset)
    else:
        made = draft._made.get(x.memory)
        anything = torch.nan if x.dtype.is_floating_point else -1
        found = torch.full(x.shape, anything if made is None or made.fill is None else made.fill, dtype=x.dtype)
    return (found.float() if found.is_floating_point() else found).numpy()
