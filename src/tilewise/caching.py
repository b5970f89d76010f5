"""Properties that an object computes once, and tests whether a tensor is unchanged since something was made of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

if sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class cached_property:
        """Python 3.12's. Before, it holds a lock of the class: a process that forks while another thread computes one hangs."""

        def __init__(self, function: Callable[[Any], Any]):
            self.function, self.__doc__ = function, function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, found: Any, owner: type | None = None) -> Any:
            if found is None:
                return self
            value = self.function(found)
            found.__dict__[self.name] = value
            return value


def edition(t: Tensor) -> tuple[int, int] | None:
    """Return a value that changes with each write PyTorch counts, and after ``t.data = x`` and ``swap_tensors``, which it does not count.

    None of a tensor whose writes are not counted: one of inference mode, or of a transform of torch.func.
    """
    plain = type(t) is Tensor or type(t) is Parameter  # another subclass may have no memory, and warn when it is asked
    try:
        return t._version, t.data_ptr() if plain else 0
    except RuntimeError:
        return None


Form = tuple[torch.Size, torch.dtype]
"""What of a tensor an expression that reads it is written for."""


def form(t: Tensor) -> Form | None:
    """Return the form of a tensor; None in a trace, which may have no numbers for it."""
    return None if torch.compiler.is_compiling() else (t.shape, t.dtype)


def check_forms(text: str, tensors: Sequence[Tensor], forms: Sequence[Form | None]) -> None:
    """Refuse a tensor of another form than ``text`` was made of, as after ``t.resize_(n)`` or ``t.data = x``. One floating dtype may become
    another, as by ``module.half()``.

    Raises:
        ValueError: with what to do.
    """
    for t, known in zip(tensors, forms, strict=True):
        if known is None:
            continue
        shape, dtype = known
        same = t.dtype == dtype or (t.dtype.is_floating_point and dtype.is_floating_point)
        if not same or t.shape != shape:
            raise ValueError(
                f"{text} was made of a tensor {tuple(shape)} {dtype}, which is {tuple(t.shape)} {t.dtype} now; make the mask or score anew"
            )


_tracked: dict[int, StorageWeakRef] = {}  # a storage's address is no other's while a reference to it lies here
_few = 1024
_sweeping = RLock()


def keep_track(t: Tensor) -> None:
    """Say that editions tell when this tensor changes. A compiled graph's own tensors are excluded: their memory is reused."""
    global _few
    try:
        storage = t.untyped_storage()
    except (NotImplementedError, RuntimeError):  # it has no memory
        return
    if storage._cdata not in _tracked:
        found = StorageWeakRef(storage)
        _tracked[found.cdata] = found
    if len(_tracked) > _few:
        with _sweeping:  # of two sweeps, one could drop what has come to an address since the other looked
            for address, kept in _tracked.copy().items():  # in one step: other threads make masks meanwhile
                if kept.expired():
                    _tracked.pop(address, None)
            _few = 2 * len(_tracked) + 1024


def is_tracked(t: Tensor) -> bool:
    """Return whether editions tell when a tensor changes: :func:`keep_track` was told so of one of the same memory."""
    try:
        return t.untyped_storage()._cdata in _tracked
    except (NotImplementedError, RuntimeError):
        return False


__all__ = ["cached_property", "check_forms", "edition", "form", "is_tracked", "keep_track"]
