"""The part that the plans of the forward and of the backward share: a problem's facts, and tensors and numbers as the kernels take them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from tilewise.backends.base import Inputs, PerTensors, has_no_pair, without_memory
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.config import Band, Expressions, cap_of, keys_of, slopes_of, strides_addressable
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.host import masks
from tilewise.backends.hopper.host.driver import Bound
from tilewise.backends.hopper.host.portions import InPortions
from tilewise.backends.hopper.pair_bias import PairBias, pair_bias_of
from tilewise.backends.hopper.tables import Line, line_of
from tilewise.caching import cached_property
from tilewise.device import is_captured
from tilewise.problem import Problem, TensorFacts

LOG2_E = math.log2(math.e)
FAR = 1 << 30  # the end of a band that has none: no key reaches it
ALIGNED = 16  # bytes: the copy engine reads from multiples of them


@dataclass(eq=False)
class Plan:
    """Decisions for one problem. ``made``: what was made of a mask's tensors, kept while these are the same.

    Attributes:
        DECIDED: the properties that follow from the problem, which are computed at once where they are by structure.
    """

    problem: Problem
    made: PerTensors = field(default_factory=PerTensors, kw_only=True)
    DECIDED: ClassVar[tuple[str, ...]] = ("addressable", "expressions")

    @cached_property
    def addressable(self) -> tuple[bool, bool, bool]:
        """Whether the copy engine can address the strides of q, of k and of v."""
        return tuple(addressable(x) for x in (self.problem.q, self.problem.k, self.problem.v))

    @cached_property
    def expressions(self) -> Expressions:
        return Expressions.of(self.problem)

    def mask_leaves(self, inputs: Inputs) -> list[Tensor]:
        """The tensors that the mask reads."""
        return [inputs.leaves[n] for n in self.problem.spec.mask_slots]

    def of_mask(self, inputs: Inputs, make: Callable[..., Any], *more: Any) -> Any:
        """The result of a function of the mask's tensors, kept while they are the same."""
        return self.made.of((make, *more), self.mask_leaves(inputs), lambda: make(self.problem, inputs, *more))


class KeptLaunch:
    """A launch that needs nothing but addresses.

    Attributes:
        written: tensors without memory, like those that the launch writes.
        of_mask: the tensors that were made of the mask's, in the launch's order.
        spent: how many of ``written``, the last ones, nobody reads after the launch. Their own memory is given back: they may be large.
    """

    def __init__(self, bound: Bound | InPortions, written: Sequence[Tensor], of_mask: Sequence[Tensor], spent: int = 0):
        self.bound, self.of_mask = bound, tuple(of_mask)
        read = len(written) - spent
        self.written = [without_memory(x if n >= read else torch.empty_like(x)) for n, x in enumerate(written)]


@dataclass(eq=False)
class LaunchPlan(Plan):
    """The decisions for one launch of a problem, of the forward's kernels or of the backward's.

    Attributes:
        kept: the launch that later calls repeat, once there was one that read the caller's tensors as they are; where kernels read
            what was made of the mask's tensors, ``made`` has it, while these are the same.
    """

    config: Config | Backward
    kept: KeptLaunch | None = field(default=None, kw_only=True)

    @property
    def sees_nothing(self) -> bool:
        """Whether it is certain that no query sees a key."""
        band = keys_of(self.problem)[1]
        return has_no_pair(self.problem) or (band.start == band.stop and not self.problem.packed)

    def decided(self) -> tuple[Callable[[Problem, dict[str, Any]], LaunchPlan], dict[str, Any]]:
        """``(make, values)`` of :class:`tilewise.backends.base.PerProblem`."""
        values = {"config": self.config}
        if not self.sees_nothing:  # such a call has no launch
            values |= {name: getattr(self, name) for name in self.DECIDED}
        return type(self).with_values, values

    @classmethod
    def with_values(cls, problem: Problem, values: dict[str, Any]) -> LaunchPlan:
        """The plan of a problem that has these properties."""
        plan = cls(problem, values["config"])
        plan.__dict__.update(values)
        return plan

    @cached_property
    def reads_mask(self) -> bool:
        """Whether kernels read what is made of the mask's tensors."""
        return bool(self.config.mask_fields)

    def keep(self, inputs: Inputs, launch: KeptLaunch) -> None:
        """Keeps a launch for later calls."""
        if self.reads_mask:
            self.made.of(KeptLaunch, self.mask_leaves(inputs), lambda: (launch.of_mask, launch))
        else:
            self.kept = launch

    def repeated(self, inputs: Inputs) -> KeptLaunch | None:
        """The launch that was kept, if a call may repeat it; a capture makes anew what it reads of the mask's tensors."""
        if not self.reads_mask:
            return self.kept
        return None if is_captured() else self.made.kept(KeptLaunch, self.mask_leaves(inputs), (None, None))[1]

    def of_mask_fields(
        self, inputs: Inputs, tiles: masks.Sized, grid: tuple[int, int], by_columns: bool = False
    ) -> tuple[Tensor, ...]:
        """The tensors of ``config.mask_fields``.

        Args:
            tiles: of the pass. grid: the heads of a section and the CTAs of its launch.
            by_columns: for the pass over keys of a backward, which reads masks by columns.
        """
        config, found = self.config, ()
        if config.by_rows:
            columns = masks.column_ends_of_rows if by_columns and config.keys.keeps_ds else masks.column_ends
            found += self.of_mask(inputs, columns if by_columns else masks.row_ends)
        if config.form == "lists":
            found += self.of_mask(inputs, masks.visits, tiles, by_columns)
        if config.form == "bits":
            found += self.of_mask(inputs, masks.tiles_with_bits, tiles, *grid, by_columns)
        return found

    @cached_property
    def slopes_slot(self) -> int:
        """The leaf that holds ALiBi's slopes."""
        return slopes_of(self.problem)

    def slopes(self, inputs: Inputs) -> Tensor:
        """ALiBi's slopes, (heads_q,), fp32."""
        return inputs.leaves[self.slopes_slot].detach().contiguous()

    @cached_property
    def bias_of(self) -> PairBias:
        return pair_bias_of(self.problem)

    def bias(self, inputs: Inputs) -> Tensor:
        """The biases of pairs, (batch or 1, heads_q or 1, query, key), as the copy engine takes them."""
        return self.bias_of.of(inputs.leaves[self.bias_of.slot].detach())

    @cached_property
    def line_of(self) -> Line:
        return line_of(self.problem)

    def line(self, inputs: Inputs) -> Tensor:
        """The biases of a table by distance, (1 or heads_q, count), fp32, in base 2."""
        return (self.line_of.of(inputs.leaves[self.line_of.slot].detach()).float() * LOG2_E).contiguous()

    @cached_property
    def scales(self) -> tuple[float, float]:
        """``(scale2, cap2)``: what takes the kernel's scores to base 2, and what a softcap multiplies products by, 0 without one."""
        problem = self.problem
        cap = None if self.config.biased else cap_of(problem)
        if self.config.traced.score:
            return LOG2_E, 0.0
        if cap is None:
            return LOG2_E * problem.softmax_scale, 0.0
        return LOG2_E * cap, 2 * LOG2_E * problem.softmax_scale / cap


def ends_of(band: Band, start: int = 0) -> tuple[int, int]:
    """``(lo, hi)`` of a band as kernels take them, counted from key ``start``."""
    return tuple(far if end is None else end - start for end, far in ((band.lo, -FAR), (band.hi, FAR)))


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
