"""The tensors that a mask makes of a caller's tensor, anew where that was written since: a mask is what its tensors hold."""

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
    found = t.clone()
    keep_track(found)
    return found


library.impl("snapshot", untraced(_copied), "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::snapshot", torch.clone, lib=library)


def snapshot(t: Tensor) -> Tensor:
    """A copy of a compiled graph's tensor, of which what an attention makes may be kept for the next one.

    Inductor gives the object and the memory of a tensor that it needs no more to a later one, and counts no write. An operator's result
    is a new object at each run, and what gets its memory later comes to an attention through a copy of its own.
    """
    return torch.ops.tilewise.snapshot.default(t.detach())


def is_recorded() -> bool:
    """Whether what runs now runs again later, as a trace or a CUDA graph, when tensors hold something else, or under a mode of the
    dispatcher, perhaps with fake ones."""
    return torch.compiler.is_compiling() or bool(torch._C._len_torch_dispatch_stack()) or is_captured()


def outside_inference(make: Callable[..., Any], *arguments: Any) -> Any:
    """``make(*arguments)``, to be kept: tensors of inference mode could not be saved for the backward of a later training step."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return make(*arguments)
    with torch.inference_mode(False):
        return make(*arguments)


class Derived:
    """The result of a function of a tensor, as the tensor is when the result is asked for.

    Attributes:
        source: the caller's tensor.
        held: the source is said to keep what it holds, so that a CUDA graph may keep what was made before its capture.
    """

    def __init__(self, source: Tensor, make: Callable[[Tensor], tuple[Tensor, ...]]):
        self.source, self._make = source, make
        self.held = False
        self._made: tuple[tuple[int, int], tuple[Tensor, ...], Ready] | None = None  # with the source's edition
        if not torch.compiler.is_compiling():
            self.tensors()  # now: threads that share the mask then have the same ones

    def __getstate__(self) -> dict[str, Any]:
        """Without what was made: the versions of a copy count from 0."""
        return {**self.__dict__, "_made": None}

    def tensors(self) -> tuple[Tensor, ...]:
        # A trace makes them as part of its graph, and a mode of the dispatcher perhaps fake ones.
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return self._make(self.source)
        made, now = self._made, edition(self.source)
        if now is None:
            return self._make(self.source)
        if made is not None and made[0] != now:
            made = None
        # So does a capture: a replay has to see what the source holds by then.
        if is_captured() and (made is None or not self.held):
            return self._make(self.source)
        if made is None:
            found = outside_inference(self._make, self.source)
            for t in found:
                keep_track(t)
            made = self._made = now, found, Ready(found)
        made[2].await_here()
        return made[1]
