"""Calls that differ only in their lengths. Decisions are kept by a call's structure and computed with its sizes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.caching import cached_property
from tilewise.spec import Spec


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step = step * size
    return tuple(reversed(found))


class TensorFacts(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, t: Tensor) -> TensorFacts:
        return cls(tuple(t.shape), t.stride(), t.dtype)

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype) -> TensorFacts:
        return cls(shape, contiguous_strides(shape), dtype)

    @property
    def structure(self) -> tuple:
        """The part that is the same for tensors of other lengths."""
        return self.dtype, len(self.shape)

    def shown(self, name: str) -> str:
        return f"{name} {self.shape} {str(self.dtype).removeprefix('torch.')}"


class Shaped(NamedTuple):
    """A tensor as the checks read it: without its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def numel(self) -> int:
        return math.prod(self.shape)


class Structured:
    """A call as its tensors tell it. Heads and head dims belong to the structure; batch, lengths and strides are sizes."""

    tensors: tuple[TensorFacts, ...]
    devices: tuple[torch.device, ...]
    spec: Spec
    latent: bool

    @cached_property
    def packed(self) -> bool:
        return self.spec.packed

    @cached_property
    def paged(self) -> bool:
        return self.spec.paged

    @property
    def quantised(self) -> bool:
        """Whether k and v are pages of e4m3 numbers, which k_scale and v_scale multiply."""
        return self.spec.quantised

    @cached_property
    def decided(self) -> dict:
        """Answers of backends that are kept with this call (:class:`tilewise.backends.base.PerProblem`)."""
        return {}

    @cached_property
    def structure(self) -> Hashable:
        q, k, v = self.tensors[:3]
        heads = q.shape[-2:], k.shape[-2:], v.shape[-2:]
        return self.spec.source, self.devices, self.latent, heads, *[x.structure for x in self.tensors]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of q, k and v before heads and head dim, and their strides; of the extras everything."""
        q, k, v, *extras = self.tensors
        of_qkv = (*q.shape[:-2], *q.stride, *k.shape[:-2], *k.stride, *v.shape[:-2], *v.stride)
        return of_qkv if not extras else (*of_qkv, *[n for x in extras for n in (*x.shape, *x.stride)])


def tensors_with_sizes(tensors: Sequence[TensorFacts], sizes: Sequence[Any]) -> list[TensorFacts]:
    """Return tensors of the same structure whose :attr:`Structured.sizes` are these."""
    rest, found = iter(sizes), []
    for n, x in enumerate(tensors):
        kept = x.shape[-2:] if n < 3 else ()
        shape = (*islice(rest, len(x.shape) - len(kept)), *kept)
        found.append(TensorFacts(shape, tuple(islice(rest, len(x.shape))), x.dtype))
    return found
