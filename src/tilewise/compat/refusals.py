"""How a door into another library's signature refuses the arguments that it cannot honour: all of them, by name."""

from __future__ import annotations

from collections.abc import Mapping

from tilewise.spec import not_tensors
from tilewise.words import raise_wrong


def refuse(function: str, given: Mapping[str, object], instead: Mapping[str, str]) -> None:
    """Raise for each argument of ``instead`` that was given; its text says why, or what to do.

    Args:
        given: the arguments of the call, by name; None, False and 0 count as not given.

    Raises:
        NotImplementedError: at least one was given.
    """
    asked = {name: given[name] for name in instead if given.get(name) is not None}
    reasons = [
        f"\n  {name}: {instead[name]}" for name, x in asked.items() if not isinstance(x, (bool, int, float)) or x
    ]
    if reasons:
        raise NotImplementedError(f"{function} cannot honour" + "".join(reasons))


def need_tensors(function: str, **given: object) -> None:
    """Raise for arguments, by name, that are no tensors.

    Raises:
        ValueError: at least one is none.
    """
    raise_wrong(function, not_tensors(tuple(given.items()), tuple(given)))
