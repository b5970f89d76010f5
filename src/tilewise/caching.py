"""Properties that an object computes once, and what tells whether a tensor is still the one that something was computed from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

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
    """Another one after each write that PyTorch counts, and after ``t.data = x`` and ``swap_tensors``, which it does not count.

    None of an inference tensor, whose writes are not counted.
    """
    plain = type(t) is Tensor  # a subclass may have no memory, and warn when it is asked
    try:
        return t._version, t.data_ptr() if plain else 0
    except RuntimeError:  # nor has a tensor of torch.func's
        return None if t.is_inference() else (t._version, 0)


__all__ = ["cached_property", "edition"]
