"""One launch of a kernel, and what of it is the same in every call: all but the addresses of its tensors, which go by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.triton.host import runtime
from tilewise.backends.triton.host.driver import Prepared
from tilewise.backends.triton.host.facts import Facts


@dataclass(frozen=True)
class View:
    """A kernel's argument beside the bundles that sees one tensor.

    Attributes:
        name: of the tensor's address, as in a call's addresses.
        value: a tensor descriptor, or the tensor; None where the kernel does without.
    """

    name: str
    value: Any

    def at(self, address: int) -> object:
        """The argument that sees a like tensor at another address."""
        if self.value is None or isinstance(self.value, Tensor):
            return self.value if self.value is None else address
        return rebased(self.value, Address(address))

    def without_memory(self) -> View:
        """The same view of no tensor, to be moved with :meth:`at`."""
        if self.value is None:
            return self
        if isinstance(self.value, Tensor):
            return replace(self, value=torch.empty(0))
        return replace(self, value=rebased(self.value, torch.empty(0, dtype=self.value.base.dtype)))


class Address(int):
    """The address of a tensor, which a descriptor asks for as it asks a tensor."""

    def data_ptr(self) -> int:
        return self


def rebased(descriptor, base: Tensor | Address):
    """A tensor descriptor with another base, unchecked: its checks take as long as its making."""
    new = object.__new__(type(descriptor))
    new.__dict__.update(descriptor.__dict__)
    new.base = base
    return new


@dataclass
class Launched:
    """A launch that later calls may repeat with other addresses.

    Attributes:
        compiled: the kernel; None where the launch cannot be repeated.
        tensors: the Tensors of the first launch, until :meth:`prepare`.
        between: the arguments between the bundles and the facts: views and constants.
        tuples: by field of Tensors that is a tuple, the names of its addresses.
        lists: the mask's lists that the kernel reads, which are the same in every call.
        prepared: the launch in the driver's form; None where there is none.
        of_lists: the addresses of ``lists``, by name.
    """

    compiled: Any
    grid: tuple[int, int, int]
    tensors: Any
    sizes: Any
    scales: Any
    between: tuple[object, ...]
    facts: Facts
    tuples: Mapping[str, tuple[str, ...]]
    lists: tuple[Tensor, ...] = ()
    prepared: Prepared | None = None
    of_lists: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, compiled, grid: tuple[int, ...], bundles: tuple, between: tuple, facts: Facts) -> Launched:
        """The launch of a compiled kernel with these ``bundles``: its Tensors, Sizes and Scales."""
        tensors = bundles[0]
        tuples = {name: x for name, x in zip(tensors._fields, tensors, strict=True) if isinstance(x, tuple)}
        names = {field: tuple(f"{field}[{n}]" for n in range(len(x))) for field, x in tuples.items()}
        return cls(compiled, (*grid, 1, 1)[:3], *bundles, between, facts, names, tensors.lists or ())

    def prepare(self) -> None:
        """Lays the arguments out for more launches, and lets go of the first launch's tensors."""
        values = [x.value if isinstance(x, View) else x for x in self.between]
        names = [x.name if isinstance(x, View) else "" for x in self.between]
        if getattr(self.compiled, "metadata", None) is not None:
            arguments = (self.tensors, self.sizes, self.scales, *values, self.facts)
            names = ("tensors", "sizes", "scales", *names, "facts")
            self.prepared = Prepared.of(self.compiled, self.grid, arguments, names)
        self.between = tuple(x.without_memory() if isinstance(x, View) else x for x in self.between)
        self.tensors = None
        self.of_lists = {f"lists[{n}]": x.data_ptr() for n, x in enumerate(self.lists)}

    def __call__(self, addresses: Mapping[str, int]) -> None:
        """Launches with tensors at these addresses, among which there may be others that this kernel does not read."""
        if self.of_lists:
            addresses = {**addresses, **self.of_lists}
        if self.prepared is not None and not runtime.listening() and self.prepared(addresses):
            return
        tensors = tensors_at(addresses, self.tuples)
        between = [x.at(addresses.get(x.name, 0)) if isinstance(x, View) else x for x in self.between]
        runtime.run_compiled(self.compiled, self.grid, tensors, self.sizes, self.scales, *between, self.facts)


def tensors_at(addresses: Mapping[str, int], tuples: Mapping[str, tuple[str, ...]]):
    """The bundle of pointers with addresses in place of tensors; None where the address is 0 or there is none."""
    bundle = runtime.kernels().Tensors
    named = {field: addresses.get(field) or None for field in bundle._fields}
    return bundle(**named | {field: tuple(addresses[name] for name in names) for field, names in tuples.items()})
