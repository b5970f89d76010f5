"""The kernels that a GPU has run right, by their programs and their cubins.

A kernel's program is what the compiler is given. The same sources and the same compiler give the same program on every machine, and
``kernels.txt`` lists it. The compiler is not reproducible: some programs come out as one of several cubins. A change of the sources is
therefore seen by its programs, and a release is judged by the cubins that it ships: ``make release`` runs them on a GPU and writes into
``proven.txt`` which were right. No hash is taken of a compressed file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tilewise.backends.hopper.host import kernel_files

PROVEN = Path(__file__).parents[1] / "proven.txt"  # program, cubin, how many calls were right, kernel
UNKNOWN = "-"  # a cubin that was right, of which only the program is known


class Proof(NamedTuple):
    """What of a kernel was right on a GPU, and in how many calls."""

    program: str
    cubin: str
    calls: int


def cubin_hash(file: Path) -> str:
    """The hash of what a kernel's file holds, the cubin and the recipe of its launch, however it is packed."""
    return hashlib.sha256(b"".join(kernel_files.contents(file))).hexdigest()[:16]


def proofs() -> dict[str, Proof]:
    """The proof of each kernel that has one."""
    lines = PROVEN.read_text(encoding="utf-8").splitlines() if PROVEN.exists() else []
    return {kernel: Proof(program, cubin, int(calls)) for program, cubin, calls, kernel in map(str.split, lines)}


def add(right: Mapping[str, Proof]) -> int:
    """Adds proofs by their kernels, each in place of an earlier one, and returns how many kernels have one."""
    every = proofs() | dict(right)
    rows = (f"{proof.program} {proof.cubin:16} {proof.calls:3} {kernel}" for kernel, proof in sorted(every.items()))
    PROVEN.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return len(every)


def waiting(programs: Mapping[str, str]) -> list[str]:
    """The kernels whose programs, given by kernel, no GPU has run right."""
    known = proofs()
    return [kernel for kernel, program in programs.items() if kernel not in known or known[kernel].program != program]


def unjudged() -> list[str]:
    """The kernels that were built ahead of time and whose cubins no GPU has run right."""
    known, folder = proofs(), kernel_files.folder()
    cubins = {kernel: cubin_hash(folder / kernel_files.file_name(kernel)) for kernel in kernel_files.index()}
    return [kernel for kernel, cubin in cubins.items() if kernel not in known or known[kernel].cubin != cubin]
