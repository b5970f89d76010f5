"""Types of MLIR's dialect of LLVM, as text: their members, their sizes, and where the scalars in them lie."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Refused(NotImplementedError):
    """The host function does what no recipe can say."""


class Scalar(NamedTuple):
    """A number or an address in a type: where it lies."""

    offset: int
    type: str

    @property
    def bytes(self) -> int:
        return scalar_size(self.type)


def scalar_size(kind: str) -> int:
    """The size in bytes of a number or an address."""
    if kind.startswith("ptr"):
        return 8
    return -(-int(kind[1:]) // 8)


def _separated(text: str) -> list[str]:
    """The parts of a text between the commas that are outside brackets."""
    found, depth, start = [], 0, 0
    for n, character in enumerate(text):
        depth += (character in "(<") - (character in ")>")
        if character == "," and not depth:
            found.append(text[start:n].strip())
            start = n + 1
    return [*found, text[start:].strip()] if text.strip() else found


def members(kind: str) -> list[str] | None:
    """The types inside a struct or an array; None: the type is a scalar."""
    kind = kind.removeprefix("!llvm.")
    if kind.startswith("struct<("):
        return _separated(kind[len("struct<(") : -len(")>")])
    array = re.fullmatch(r"array<(\d+) x (.*)>", kind)
    if array:
        return [array[2]] * int(array[1])
    if not re.fullmatch(r"ptr(<\d+>)?|i\d+|f32", kind):
        raise Refused(f"the type {kind}")
    return None


def alignment(kind: str) -> int:
    """The alignment of a type in bytes."""
    inner = members(kind)
    return scalar_size(kind.removeprefix("!llvm.")) if inner is None else max(map(alignment, inner), default=1)


def size(kind: str) -> int:
    """The size of a type in bytes, its padding included."""
    inner = members(kind)
    if inner is None:
        return scalar_size(kind.removeprefix("!llvm."))
    step = alignment(kind)
    return -(-(starts(kind)[-1] if inner else 0) // step) * step


def starts(kind: str) -> list[int]:
    """The offset of each member, and, last, the size of all."""
    found, at = [], 0
    for member in members(kind):
        at = -(-at // alignment(member)) * alignment(member)
        found.append(at)
        at += size(member)
    return [*found, at]


def scalars(kind: str, at: int = 0) -> Iterator[Scalar]:
    """Every scalar in a type that lies at ``at``, in order."""
    inner = members(kind)
    if inner is None:
        yield Scalar(at, kind.removeprefix("!llvm."))
        return
    for start, member in zip(starts(kind), inner, strict=False):
        yield from scalars(member, at + start)


def placed(kind: str, position: Sequence[int]) -> tuple[int, str]:
    """The offset and the type of the member of a type that lies at a position of nested members."""
    offset = 0
    for n in position:
        offset, kind = offset + starts(kind)[n], members(kind)[n]
    return offset, kind
