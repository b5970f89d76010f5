"""The part that the plans of the forward and of the backward share: a problem's facts, and tensors as the kernels take them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.base import Inputs, PerTensors
from tilewise.backends.hopper.config import Expressions, strides_addressable
from tilewise.caching import cached_property
from tilewise.problem import Problem, TensorFacts

LOG2_E = math.log2(math.e)
FAR = 1 << 30  # the end of a band that has none: no key reaches it
ALIGNED = 16  # bytes: the copy engine reads from multiples of them


@dataclass(eq=False)
class Plan:
    """Decisions for one problem. ``made``: what was made of a mask's tensors, kept while these are the same."""

    problem: Problem
    made: PerTensors = field(default_factory=PerTensors, kw_only=True)

    @cached_property
    def addressable(self) -> tuple[bool, bool, bool]:
        """Whether the copy engine can address the strides of q, of k and of v."""
        return tuple(addressable(x) for x in (self.problem.q, self.problem.k, self.problem.v))

    @cached_property
    def expressions(self) -> Expressions:
        return Expressions.of(self.problem)

    def of_mask(self, inputs: Inputs, make: Callable[..., Any], *more: Any) -> Any:
        """The result of a function of the mask's tensors, kept while they are the same."""
        leaves = [inputs.leaves[n] for n in self.problem.spec.mask_slots]
        return self.made.of((make, *more), leaves, lambda: make(self.problem, inputs, *more))


def leaf(tensor: Tensor) -> Tensor:
    """A tensor that an expression reads, as kernels take it: truth values as bytes, and one dimension at least."""
    tensor = tensor.detach()
    tensor = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    return tensor if tensor.ndim else tensor.view(1)


def addressable(tensor: TensorFacts) -> bool:
    """Whether the copy engine can address a tensor."""
    return strides_addressable(tensor.shape, tensor.stride)


def addressed(tensor: Tensor, good: bool) -> Tensor:
    """The tensor, or a copy that the copy engine can address; ``good``: the copy engine can address such strides."""
    if good and tensor.data_ptr() % ALIGNED == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
