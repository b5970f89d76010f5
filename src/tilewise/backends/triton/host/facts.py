"""The compile-time part of a launch, as the object that kernels see."""

from __future__ import annotations


class Facts:
    """Sizes, flags and emitted functions, read in kernels as ``FACTS.name``.

    Triton keys its caches on ``repr``, so that tells apart all that differs, functions by their source.
    """

    def __init__(self, **fields: object):
        self.__dict__.update(fields)
        shown = {name: getattr(x, "cache_key", True) if callable(x) else x for name, x in fields.items()}
        self._text = f"Facts({', '.join(f'{name}={x}' for name, x in shown.items())})"

    def __repr__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Facts) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def mangle(self) -> str:
        """The compile-time facts in names of inner functions; a kernel has one Facts, so it need not tell them apart."""
        return "F"
