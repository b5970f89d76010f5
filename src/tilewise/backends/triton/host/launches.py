"""One launch of a kernel: everything of it but the tensors, which each call gives by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from tilewise.backends.triton.host import runtime
from tilewise.backends.triton.host.facts import Facts
from tilewise.backends.triton.tiles import Tiles


class View(NamedTuple):
    """A kernel's argument beside the bundles that sees one of a call's tensors, through a descriptor where there is one."""

    name: str
    descriptor: Any = None

    def of(self, named: Mapping[str, Any]) -> Any:
        """The argument of a call with these tensors."""
        tensor = named.get(self.name)
        return tensor if self.descriptor is None else rebased(self.descriptor, tensor)


def rebased(descriptor, base: Tensor | None):
    """A tensor descriptor with another base, unchecked: its checks take as long as its making."""
    new = object.__new__(type(descriptor))
    new.__dict__.update(descriptor.__dict__)
    new.base = base
    return new


@dataclass(eq=False)
class KernelLaunch:
    """A launch that a plan makes once, and runs in each call (docs/decisions.md#triton-relaunch).

    Attributes:
        sizes, scales: as kernels take them (:func:`runtime.opaque`).
        between: what the kernel takes between its scales and its facts: views and constants.
        lists: the tiles whose lists it walks over, and whether these are by columns; None where there are none.
        reads: the tensors that the kernel takes; empty: all that there are.
        compiled: the kernel, once it is known.
    """

    kernel: Any
    grid: tuple[int, ...]
    tiles: Tiles
    sizes: Any
    scales: Any
    between: tuple[object, ...]
    facts: Facts
    lists: tuple[Tiles, bool] | None = None
    reads: tuple[str, ...] = ()
    compiled: Any = None

    def arguments(self, named: Mapping[str, Any]) -> tuple[object, ...]:
        """What the kernel takes in a call with these tensors; they may be more than it reads."""
        bundle = runtime.kernels().Tensors
        if self.reads:
            tensors = bundle(**{name: named[name] for name in self.reads})
        else:
            tensors = bundle._make(map(named.get, bundle._fields))
        between = (x.of(named) if isinstance(x, View) else x for x in self.between)
        # The mask's tensors decide how lists are laid out.
        sizes = self.sizes if self.lists is None else self.sizes._replace(list_strides=named["list_strides"])
        return tensors, sizes, self.scales, *between, self.facts

    def __call__(self, named: Mapping[str, Any], aligned: bool) -> None:
        """Launches the kernel with these tensors, which are :func:`runtime.aligned` or not."""
        runtime.launch_again(self, aligned, *self.arguments(named))
