"""Faults of a compilation that show in a kernel's machine code, as ``nvdisasm`` prints it for NVIDIA's GPUs.

An instruction is ``@P0 UIADD3 UR4, UR5, 0x20, URZ``: a condition, an operation, and its operands, of which a result is the first. Uniform
registers, UR0 to UR62, hold one number for a whole warp, such as the address of a tile that a product reads from shared memory.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)\s*([^;]*);", re.MULTILINE)
ADDRESS = re.compile(r"\s+/\*([0-9a-f]{4,})\*/")
UNIFORM = re.compile(r"\bUR(\d+)\b")
TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
COPIES = ("MOV", "IMAD.U32", "IMAD.MOV.U32", "UMOV")
WRITERS = ("R2UR", "S2UR", "VOTEU", "REDUX", "ELECT")  # beside those of the uniform path, which begin with U
READERS = ("UTMA", "UBLK", "UCGA")  # begin with U and write none


@dataclass(frozen=True)
class Instruction:
    """One instruction: its address, whether a predicate guards it, its operation and the text of its operands."""

    address: int
    guarded: bool
    operation: str
    operands: str

    @property
    def text(self) -> str:
        """The instruction without its condition."""
        return f"{self.operation} {self.operands.strip()}"

    def uniform(self) -> tuple[set[int], set[int]]:
        """``(written, read)`` uniform registers. A copy reads none: a loop may save a register for nobody."""
        operation, parts = self.operation, [x.strip() for x in self.operands.split(",")]
        writes = operation.startswith(WRITERS) or (operation[0] == "U" and not operation.startswith(READERS))
        target = int(operation == "ELECT")  # whether a thread is elected comes first, and which one then
        wide = ".64" in operation or ".WIDE" in operation  # a product of two single registers, to which a pair is added
        pairs = () if not wide or operation.startswith("ULDC") else (3,) if ".WIDE" in operation else (1, 2, 3)
        written, read = set(), set()
        for n, part in enumerate(parts):
            for number in (int(x) for x in UNIFORM.findall(part)):
                if n == target and writes and part == f"UR{number}":
                    written |= {number, number + 1} if wide else {number}
                elif "gdesc" in part:
                    # Descriptors of both matrices; of the second alone where the first is in registers.
                    read |= set(range(number + 2 if n >= 2 else number, number + 4))
                elif "desc[" in part or (n in pairs and writes):
                    read |= {number, number + 1}
                else:
                    read.add(number)
        return written, set() if operation in COPIES else read


def code_of(cubin: bytes) -> bytes:
    """The machine code of a cubin's one kernel: of its sections, as an ELF file of 64 bits lists them, the one named ``.text.KERNEL``."""
    (headers,), (size, count, of_names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HHH", cubin, 0x3A)
    # Of each: where its name begins among the names, and its offset and its size in the file.
    sections = [struct.unpack_from("<I20xQQ", cubin, headers + n * size) for n in range(count)]
    names = sections[of_names][1]
    found = [cubin[at : at + length] for name, at, length in sections if cubin.startswith(b".text.", names + name)]
    if len(found) != 1:
        raise ValueError(f"a cubin of {len(found)} kernels; one is read")
    return found[0]


def listings(cubins: Sequence[bytes], nvdisasm: str, arch: str = "SM90a") -> list[str]:
    """The listing of each cubin's kernel; its addresses, and those that it branches to, begin where the kernel before it ends.

    One process of ``nvdisasm`` reads them all: it takes 0.4 s of CPU to begin, and a tenth of that for a kernel.
    """
    codes = [code_of(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        text = subprocess.run(
            [nvdisasm, "--binary", arch, file.name], capture_output=True, text=True, check=True
        ).stdout
    lines = [(int(at[1], 16), line) for line in text.splitlines() if (at := ADDRESS.match(line))]
    ends = accumulate((len(code) for code in codes), initial=0)
    return ["\n".join(line for at, line in lines if first <= at < end) for first, end in pairwise(ends)]


def instructions(sass: str) -> list[Instruction]:
    """The instructions of a listing of one kernel, in order."""
    return [Instruction(int(at, 16), bool(guard), *rest) for at, guard, *rest in INSTRUCTION.findall(sass)]


def followers(code: list[Instruction]) -> list[list[int]]:
    """The indices of the instructions that may come after each."""
    index = {x.address: n for n, x in enumerate(code)}
    found = []
    for n, x in enumerate(code):
        branch, end = x.operation.startswith("BRA"), x.operation.startswith(("EXIT", "RET"))
        target = TARGET.search(x.operands) if branch else None
        after = [index[int(target[1], 16)]] if target and int(target[1], 16) in index else []
        if not (branch or end) or x.guarded or "UP" in x.operands or (x.operation != "BRA" and branch):
            after.append(n + 1)
        found.append([m for m in after if m < len(code)])
    return found


def unset_registers(sass: str) -> list[str]:
    """The instructions that read a uniform register which some way from the kernel's entry has not written.

    Such a kernel is wrong though its source is right. ptxas 12.8, which Triton 3.6 brings, makes ``UIADD3 UR50, UP0, UR50, 0x20`` of the
    address of a v of 16 columns, where nothing has written UR50; ptxas 12.9 makes right code of it (docs/decisions.md#triton-ptxas).
    """
    code = instructions(sass)
    after, uses = followers(code), [x.uniform() for x in code]
    # The registers that every way to an instruction has written; None where no way is known yet.
    before: list[frozenset[int] | None] = [frozenset() if n == 0 else None for n in range(len(code))]
    work = [0] if code else []
    while work:
        n = work.pop()
        here = (before[n] or frozenset()) | uses[n][0]
        for m in after[n]:
            joined = here if before[m] is None else before[m] & here
            if joined != before[m]:
                before[m] = joined
                work.append(m)
    return [
        x.text for x, ready, (_, read) in zip(code, before, uses, strict=True) if ready is not None and read - ready
    ]


def serialised(sass: str) -> bool:
    """Whether ptxas made every wgmma wait for the one before (docs/decisions.md#triton-one-loop)."""
    return 2 * sass.count("WARPGROUP.DEPBAR") > sass.count("HGMMA")
