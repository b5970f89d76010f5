"""Properties that an object computes once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

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


__all__ = ["cached_property"]
