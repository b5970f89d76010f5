"""Tensors that a mask makes from a caller's tensor, and makes again after the caller wrote to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.caching import edition, keep_track
from tilewise.device import Ready, is_captured
from tilewise.untraced import untraced

library = torch.library.Library("tilewise", "FRAGMENT")
library.define("snapshot(Tensor t) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _copied(t: Tensor) -> Tensor:
    found = outside_inference(t.clone)
    keep_track(found)
    return found


library.impl("snapshot", untraced(_copied), "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::snapshot", torch.clone, lib=library)


def _mapped_copied(_: object, in_dims: tuple[int | None], t: Tensor) -> tuple[Tensor, int | None]:
    return torch.ops.tilewise.snapshot.default(t), in_dims[0]


torch.library.register_vmap("tilewise::snapshot", _mapped_copied, lib=library)


def snapshot(t: Tensor) -> Tensor:
    """Return a copy of a compiled graph's tensor. What an attention makes of the copy may be kept for the next attention.

    Inductor reuses the object and the memory of a dead tensor without counting a write. The result of an operator is a new object in
    each run, and a later tensor in the same memory reaches an attention through a copy of its own.
    """
    return torch.ops.tilewise.snapshot.default(t.detach())


def is_recorded() -> bool:
    """Return whether this run is a trace or a capture that runs again with other values, or is under a dispatcher's mode.

    Under a mode, tensors may be fake."""
    return torch.compiler.is_compiling() or bool(torch._C._len_torch_dispatch_stack()) or is_captured()


def outside_inference(make: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``make(*arguments)`` outside inference mode, whose tensors a later training step could not save for its backward."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return make(*arguments)
    with torch.inference_mode(False):
        return make(*arguments)


class Derived:
    """A function's result on a tensor, with the tensor's values at the time of asking.

    Attributes:
        source: the caller's tensor.
        held: the user promises that the source does not change, so a CUDA graph may use what was made before its capture.
    """

    def __init__(self, source: Tensor, make: Callable[[Tensor], tuple[Tensor, ...]]):
        self.source, self._make = source, make
        self.held = False
        self._made: tuple[tuple[int, int], tuple[Tensor, ...], Ready] | None = None  # with the source's edition
        if not torch.compiler.is_compiling():
            self._current()  # now: threads that share the mask then have the same ones

    def __getstate__(self) -> dict[str, Any]:
        """Drop what was made, because the versions of a copy count from 0."""
        return {**self.__dict__, "_made": None}

    def tensors(self) -> tuple[Tensor, ...]:
        # A trace makes them in its graph.
        return self._make(self.source) if torch.compiler.is_compiling() else self._current()

    def _current(self) -> tuple[Tensor, ...]:
        """Return :meth:`tensors` outside of a trace."""
        if torch._C._len_torch_dispatch_stack():  # under a dispatcher's mode they may be fake
            return self._make(self.source)
        made, now = self._made, edition(self.source)
        if now is None:
            return self._make(self.source)
        if made is not None and made[0] != now:
            made = None
        # A capture makes them too, because a replay must see the values of its own time.
        if is_captured() and (made is None or not self.held):
            return self._make(self.source)
        if made is None:
            inside = torch.is_inference_mode_enabled()
            found = outside_inference(self._make, self.source) if inside else self._make(self.source)
            for t in found:
                keep_track(t)
            made = self._made = now, found, Ready(found)
        made[2].await_here()
        return made[1]
