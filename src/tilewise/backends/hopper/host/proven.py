"""The kernels that a GPU has proven right, by their bits, and those that wait for a GPU.

A kernel's bits are those of what its file holds, cubin and recipe: the same sources and the same compiler give the same ones on every
machine, but for some kernels, mostly with a softcap at head_dim 128 or over pages, which come out in one of several forms; each form
is listed once a GPU has proven it, and ``aot.build_as_proven`` looks for one of them.

``python -m bench.gpu prove --backend hopper RESULTS`` adds to ``proven.txt`` the kernels that were right in every
call. A change of a kernel's bits is a decision: its name is put into ``unproven.txt``, and taken out when a GPU has proven the new bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from tilewise.backends.hopper.host import kernel_files

_HERE = Path(__file__).parents[1]
PROVEN = _HERE / "proven.txt"  # bits, how many calls were right, kernel
UNPROVEN = _HERE / "unproven.txt"  # kernels that wait for a GPU, one a line; after a # why


def bits_of(file: Path) -> str:
    """The hash of a kernel's file, however it is packed."""
    return hashlib.sha256(kernel_files.deflated(file)).hexdigest()[:24]


def proven() -> dict[str, str]:
    """Kernels by their bits."""
    lines = PROVEN.read_text(encoding="utf-8").splitlines() if PROVEN.exists() else []
    return {bits: kernel for bits, _, kernel in map(str.split, lines)}


def add(right: dict[str, tuple[str, int]]) -> int:
    """Adds kernels, ``bits -> (kernel, calls that were right)``, and returns how many are proven."""
    lines = set(PROVEN.read_text(encoding="utf-8").splitlines()) if PROVEN.exists() else set()
    lines |= {f"{bits} {count:3} {kernel}" for bits, (kernel, count) in right.items()}
    PROVEN.write_text("\n".join(sorted(lines, key=lambda line: line.split()[::-1])) + "\n", encoding="utf-8")
    return len(lines)


def waiting() -> set[str]:
    """The kernels that wait for a GPU."""
    lines = UNPROVEN.read_text(encoding="utf-8").splitlines() if UNPROVEN.exists() else []
    return {kernel for line in lines if (kernel := line.partition("#")[0].strip())}


def faults(kernel: str, bits: str, tried: Sequence[str] = ()) -> list[str]:
    """The reasons against the bits of a kernel: neither proven nor said to be waiting, or both.

    Args:
        tried: the bits of all its builds, where it was built more than once.
    """
    known, waits = proven().get(bits) == kernel, kernel in waiting()
    if known and waits:
        return [f"its bits are proven: take it out of {UNPROVEN.name}"]
    if known or waits:
        return []
    undo = f"undo what changed them, or put its name into {UNPROVEN.name}"
    forms = sorted(set(tried))
    if len(forms) < 2:
        return [f"no GPU has proven its bits {bits}: {undo}"]
    return [
        f"no GPU has proven one of the {len(forms)} forms of its {len(tried)} builds, {', '.join(forms)}: {undo}; "
        f"if nothing changed them, no GPU has run these forms yet: check the one that was kept, {bits}, by "
        "`python -m bench.gpu check --backend hopper` on a GPU, and add it by `python -m bench.gpu prove`"
    ]
