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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.hopper.host import library
from tilewise.backends.hopper.host.recipe import flat
from tilewise.problem import TensorFacts

SCRATCH = "scratch"  # the memory of all that nobody reads after the launches
APART = 256  # bytes: tensors in it begin at multiples


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step = step * size
    return tuple(reversed(found))


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


class Made(NamedTuple):
    """Memory that a call makes; ``fill``: what it holds before the launches, None: anything."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    fill: float | None = None


class Drafted(NamedTuple):
    """The launch of one config's kernels.

    Attributes:
        kinds: dtype and rank of each argument that is a tensor, None of each number.
        words: the numbers, sizes and strides, of which those of late tensors are missing: the parts between these.
        late: their places among the call's memories. places: of each tensor that of its memory, and its first byte there.
    """

    config: Any
    kinds: tuple[tuple[torch.dtype, int] | None, ...]
    words: tuple[tuple[int | float, ...], ...]
    late: tuple[int, ...]
    places: tuple[tuple[int, int], ...]


@dataclass
class Launches:
    """All launches of a call, and what it makes for them.

    Attributes:
        given: the names of the tensors that a call brings. made: what it makes, by name. scratch: bytes of memory that nobody reads
            afterwards. packed: the words of each launch as the launcher takes them, once there was one; None where some are late.
    """

    given: tuple[str, ...]
    made: tuple[tuple[str, Made], ...]
    scratch: int
    launches: tuple[Drafted, ...]
    packed: list[bytes | None] = field(default_factory=list, init=False, compare=False, repr=False)

    def run(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Launches with the tensors of a call, and returns what it made."""
        tensors = [given[name] for name in self.given]
        like, found = tensors[0], {}
        for name, (dtype, shape, fill) in self.made:
            x = like.new_empty(shape, dtype=dtype) if fill is None else like.new_full(shape, fill, dtype=dtype)
            found[name] = x
            tensors.append(x)
        if self.scratch:
            tensors.append(like.new_empty(self.scratch, dtype=torch.uint8))
        at, device = [x.data_ptr() for x in tensors], like.device
        packed = self.packed or self._pack(device)
        for launch, words in zip(self.launches, packed, strict=True):
            kernels = library.function(launch.config)
            words = words or kernels.pack(launch.kinds, _with_late(launch, tensors), device)
            kernels.run(words, [at[n] + first for n, first in launch.places], device)
        return found

    def _pack(self, device: torch.device) -> list[bytes | None]:
        self.packed = [
            None if x.late else library.function(x.config).pack(x.kinds, x.words[0], device) for x in self.launches
        ]
        return self.packed


def _with_late(launch: Drafted, tensors: Sequence[Tensor]) -> list[int | float]:
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

    def result(self, name: str, dtype: torch.dtype, *shape: int, fill: float | None = None) -> View:
        """Memory that the launches write and the call reads afterwards, contiguous."""
        self._made[name] = Made(dtype, shape, fill)
        return View.contiguous(name, dtype, *shape)

    def scratch(self, name: str, dtype: torch.dtype, *shape: int) -> View:
        """Memory that nobody reads afterwards, contiguous."""
        found, size = View.contiguous(SCRATCH, dtype, *shape), math.prod(shape) * dtype.itemsize
        found = found._replace(offset=self._bytes // dtype.itemsize)
        self._bytes = self._bytes + -(-size // APART) * APART
        return found

    def launch(self, config: Any, *arguments: Any) -> None:
        """Another launch: of Views, Lates and numbers, or tuples of these, in the order of the kernel's arguments. None is no argument."""
        self._launches.append((config, flat(arguments)))

    def done(self) -> Launches:
        used = [x.memory for _, arguments in self._launches for x in arguments if isinstance(x, (View, Late))]
        given = [name for name in dict.fromkeys(used) if name not in self._made and name != SCRATCH]
        number = {name: n for n, name in enumerate((*given, *self._made, SCRATCH))}
        launches = tuple(_launch(config, arguments, number) for config, arguments in self._launches)
        return Launches(tuple(given), tuple(self._made.items()), self._bytes, launches)


def _launch(config: Any, arguments: Sequence[Any], number: Mapping[str, int]) -> Drafted:
    kinds, words, late, places = [], [[]], [], []
    for x in arguments:
        if isinstance(x, View):
            kinds.append((x.dtype, len(x.shape)))
            words[-1] += (*x.shape, *x.strides)
            places.append((number[x.memory], x.offset * x.dtype.itemsize))
        elif isinstance(x, Late):
            kinds.append((x.dtype, x.rank))
            words.append([])
            late.append(number[x.memory])
            places.append((number[x.memory], 0))
        else:
            kinds.append(None)
            words[-1].append(x)
    return Drafted(config, tuple(kinds), tuple(map(tuple, words)), tuple(late), tuple(places))
