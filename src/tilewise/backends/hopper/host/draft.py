"""Launches as arithmetic: what a call's sizes decide of them, before there is a tensor.

A plan drafts its launches from the facts of a problem (:class:`Draft`): which memory the call makes, and of each kernel's arguments the
number, or the sizes, strides and place of the tensor. The result, :class:`Launches`, is made of numbers alone, so that it is recorded by
structure (:mod:`tilewise.sizes`) and computed for the lengths of later calls. :meth:`Launches.run` adds the tensors of a call
(docs/decisions.md#drafted-launches).

A :class:`View` has the methods of a tensor that move no data, by the same names. A :class:`Late` tensor is one whose sizes nobody knows
before the call: what is made of a mask's tensors, and gradients.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.hopper.host import library
from tilewise.backends.hopper.host.driver import Kernels
from tilewise.backends.hopper.host.recipe import flat
from tilewise.backends.hopper.parameters import Parameter
from tilewise.problem import TensorFacts
from tilewise.signature import contiguous_strides

SCRATCH = "scratch"  # the memory of all that nobody reads after the launches
APART = 256  # bytes: tensors in it begin at multiples
COUNTS = "counts"  # a fill: zeros that launches leave zero (:func:`tilewise.device.counts`)


class View(NamedTuple):
    """A tensor of a launch without its memory: ``memory`` is the name of that, in which it begins at element ``offset``."""

    memory: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, memory: str, facts: TensorFacts) -> View:
        """A tensor of the call."""
        return cls(memory, facts.dtype, tuple(facts.shape), tuple(facts.stride))

    @classmethod
    def contiguous(cls, memory: str, dtype: torch.dtype, *shape: int) -> View:
        return cls(memory, dtype, shape, contiguous_strides(shape))

    def permute(self, *dims: int) -> View:
        shape, strides = (tuple(x[n] for n in dims) for x in (self.shape, self.strides))
        return self._replace(shape=shape, strides=strides)

    def unsqueeze(self, dim: int) -> View:
        step = self.shape[dim] * self.strides[dim] if self.shape else 1
        shape, strides = (
            (*x[:dim], n, *x[dim:]) for x, n in ((self.shape, 1), (self.strides, step))
        )  # fmt: skip
        return self._replace(shape=shape, strides=strides)

    def narrow(self, dim: int, start: int, length: int) -> View:
        dim = dim % len(self.shape)
        shape = *self.shape[:dim], length, *self.shape[dim + 1 :]
        return self._replace(shape=shape, offset=self.offset + start * self.strides[dim])

    def select(self, dim: int, index: int) -> View:
        shape, strides = ((*x[:dim], *x[dim + 1 :]) for x in (self.shape, self.strides))
        return self._replace(shape=shape, strides=strides, offset=self.offset + index * self.strides[dim])

    def flatten(self, start: int, end: int) -> View:
        """The first two dimensions as one, where :func:`flattens` says so."""
        assert (start, end) == (0, 1)
        step = self.strides[0] if self.shape[1] == 1 else self.strides[1]
        return self._replace(shape=(self.shape[0] * self.shape[1], *self.shape[2:]), strides=(step, *self.strides[2:]))


def flattens(x: TensorFacts) -> bool:
    """Whether the first two dimensions of a tensor are one in memory."""
    return x.shape[0] == 1 or x.shape[1] == 1 or x.stride[0] == x.shape[1] * x.stride[1]


class Late(NamedTuple):
    """A tensor of which nothing but its name, its dtype and its rank is known before the call."""

    memory: str
    dtype: torch.dtype
    rank: int


def facts_of(x: Parameter, dtype: torch.dtype, sizes: Mapping[str, int]) -> tuple[torch.dtype, tuple[int | str, ...]]:
    """The dtype of a parameter, where ``dtype`` is that of q, and its shape: the names of sizes that are not known remain."""
    return getattr(torch, x.dtype) if x.dtype else dtype, tuple(sizes.get(n, n) for n in x.shape)


def given_views(config: Any, dtype: torch.dtype, sizes: Mapping[str, int]) -> dict[str, View | Late]:
    """The tensors of a launch as a call brings them, by their names: where ``sizes`` tell a shape, contiguous ones."""
    found = {}
    for x in flat(config.parameters):
        if x.shape is not None:
            element, shape = facts_of(x, dtype, sizes)
            known = x.step == 1 and not any(isinstance(n, str) for n in shape)
            found[x.name] = View.contiguous(x.name, element, *shape) if known else Late(x.name, element, len(shape))
    return found


class Made(NamedTuple):
    """Memory that a call makes; ``fill``: what it holds before the launches, None: anything."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    fill: float | str | None = None

    @property
    def room(self) -> int:
        """Its bytes in memory that holds other things too."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // APART) * APART

    def filled(self, like: Tensor) -> Tensor:
        """The memory with what it holds, on a tensor's device."""
        if self.fill == COUNTS:
            return devices.counts(like.device, self.shape[0])
        if self.fill == 0 and self.dtype == torch.int32:
            found = devices.fresh(like.device, math.prod(self.shape))
            return found if len(self.shape) == 1 else found.view(self.shape)
        return like.new_full(self.shape, self.fill, dtype=self.dtype)


class Drafted(NamedTuple):
    """The launch of one config's kernels.

    Attributes:
        kinds: dtype and rank of each argument that is a tensor, None of each number.
        words: the numbers, sizes and strides, of which those of late tensors are missing: the parts between these. Behind them, of each
            tensor the number of its memory, and its first byte there.
        late: the numbers of the late tensors' memories.
    """

    config: Any
    kinds: tuple[tuple[torch.dtype, int] | None, ...]
    words: tuple[tuple[int | float, ...], ...]
    late: tuple[int, ...]


@dataclass
class Launches:
    """All launches of a call, and what it makes for them. Memories have numbers: of ``given``, then of ``made``, then the scratch memory's.

    Attributes:
        given: the names of the tensors that a call brings. made: what it makes, by name. scratch: bytes of memory that nobody reads
            afterwards. packed: of each launch its kernels, and its words as the launcher takes them, once there was one; None where some
            are late.
    """

    given: tuple[str, ...]
    made: tuple[tuple[str, Made], ...]
    scratch: int
    launches: tuple[Drafted, ...]
    packed: list[tuple[Kernels, bytes | None]] = field(default_factory=list, init=False, compare=False, repr=False)

    def run(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Launches with the tensors of a call, and returns what it made, both in the order of these attributes."""
        return self.run_memory([x.data_ptr() for x in given], given[0], given=given)

    def run_memory(
        self, memories: list[int], like: Tensor, unread: Sequence[str] | None = None, given: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """:meth:`run` with the addresses of the tensors, which are appended to.

        Args:
            like: a tensor on the device. unread: of what the call makes, that which nobody will read. It is not returned, and lies, with
                scratch memory, in the stream's workspace. None: the call has memory of its own, as in a backward, whose thread runs
                nothing else and would look for a workspace with cold caches.
            given: the tensors, of launches with late ones.
        """
        device, space, results = like.device, self.scratch, []
        places = []  # of what nobody reads, behind the scratch memory
        for name, made in self.made:
            dtype, shape, fill = made
            if unread and name in unread:
                places.append((len(memories), space))
                memories.append(0)
                space += made.room
                continue
            x = like.new_empty(shape, dtype=dtype) if fill is None else made.filled(like)
            results.append(x)
            memories.append(x.data_ptr())
        if space:
            own = unread is None
            workspace = like.new_empty(space, dtype=torch.uint8) if own else devices.workspace(device, space)
            memories.append(begin := workspace.data_ptr())
            for n, first in places:
                memories[n] = begin + first
        packed = _addresses(len(memories))(*memories)
        for (kernels, words), launch in zip(self.packed or self._pack(device), self.launches, strict=True):
            if words is None:
                words = kernels.pack(launch.kinds, with_late(launch, [*given, *results]), device)
            kernels.run(words, packed, device)
        return results

    def run_named(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """:meth:`run` with names, of tensors among which the given ones are."""
        made = self.run([given[name] for name in self.given])
        return dict(zip([name for name, _ in self.made], made, strict=True))

    def _pack(self, device: torch.device) -> list[tuple[Kernels, bytes | None]]:
        every = [(library.function(x.config), x) for x in self.launches]
        self.packed = [(f, None if x.late else f.pack(x.kinds, x.words[0], device)) for f, x in every]
        return self.packed


@lru_cache(maxsize=64)
def _addresses(count: int) -> Callable[..., bytes]:
    """What packs so many addresses."""
    return struct.Struct(f"{count}Q").pack


def with_late(launch: Drafted, tensors: Sequence[Tensor]) -> list[int | float]:
    """The words of a launch, with those of late tensors."""
    first, *rest = launch.words
    words = [*first]
    for n, part in zip(launch.late, rest, strict=True):
        words += tensors[n].shape
        words += tensors[n].stride()
        words += part
    return words


class Draft:
    """Launches that are being put together."""

    def __init__(self) -> None:
        self._made: dict[str, Made] = {}
        self._bytes = 0  # of scratch memory
        self._launches: list[tuple[Any, list]] = []

    def result(self, name: str, dtype: torch.dtype, *shape: int, fill: float | str | None = None) -> View:
        """Memory that the launches write and the call reads afterwards, contiguous."""
        self._made[name] = Made(dtype, shape, fill)
        return View.contiguous(name, dtype, *shape)

    def counts(self, name: str, count: int) -> View:
        """Zeros, int32, that the launches leave zero."""
        return self.result(name, torch.int32, count, fill=COUNTS)

    def scratch(self, name: str, dtype: torch.dtype, *shape: int) -> View:
        """Memory that nobody reads afterwards, contiguous."""
        found, size = View.contiguous(SCRATCH, dtype, *shape), math.prod(shape) * dtype.itemsize
        found = found._replace(offset=self._bytes // dtype.itemsize)
        self._bytes = self._bytes + -(-size // APART) * APART
        return found

    def launch(self, config: Any, values: Mapping[str, Any]) -> None:
        """Another launch: of Views, Lates and numbers, by the names of the config's parameters."""
        self._launches.append((config, [values[x.name] for x in flat(config.parameters)]))

    def done(self) -> Launches:
        used = [x.memory for _, arguments in self._launches for x in arguments if isinstance(x, (View, Late))]
        given = [name for name in dict.fromkeys(used) if name not in self._made and name != SCRATCH]
        number = {name: n for n, name in enumerate((*given, *self._made, SCRATCH))}
        launches = tuple(_launch(config, arguments, number) for config, arguments in self._launches)
        return Launches(tuple(given), tuple(self._made.items()), self._bytes, launches)


def _launch(config: Any, arguments: Sequence[Any], number: Mapping[str, int]) -> Drafted:
    kinds, words, late, places = [], [[]], [], []  # places: number and first byte, tensor after tensor
    for x in arguments:
        if isinstance(x, View):
            kinds.append((x.dtype, len(x.shape)))
            words[-1] += (*x.shape, *x.strides)
            places += (number[x.memory], x.offset * x.dtype.itemsize)
        elif isinstance(x, Late):
            kinds.append((x.dtype, x.rank))
            words.append([])
            late.append(number[x.memory])
            places += (number[x.memory], 0)
        else:
            kinds.append(None)
            words[-1].append(x)
    words[-1] += places
    return Drafted(config, tuple(kinds), tuple(map(tuple, words)), tuple(late))
