"""Faults of a compilation that show in a kernel's machine code, as ``nvdisasm`` prints it for NVIDIA's GPUs.

An instruction is ``@P0 UIADD3 UR4, UR5, 0x20, URZ``: a condition, an operation, and its operands, of which a result is the first. Uniform
registers, UR0 to UR62, hold one number for a whole warp, such as the address of a tile that a product reads from shared memory.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)\s*([^;]*);", re.MULTILINE)
ADDRESS = re.compile(r"\s+/\*([0-9a-f]{4,})\*/")
GENERAL = re.compile(r"\bR(\d+)\b(\.64)?")
UNIFORM = re.compile(r"\bUR(\d+)\b")
TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
COPIES = ("MOV", "IMAD.U32", "IMAD.MOV.U32", "UMOV")
WRITERS = ("R2UR", "S2UR", "VOTEU", "REDUX", "ELECT")  # beside those of the uniform path, which begin with U
READERS = ("UTMA", "UBLK", "UCGA")  # begin with U and write none
# Operations on memory, which read their operands late, one after another; and those with no result among the general registers.
MEMORY = ("LDG", "LDS", "LDL", "LD.", "ST", "ATOM", "RED.", "REDG", "SHFL")
NO_RESULT = ("ST", "RED.", "REDG", "BAR", "SYNCS", "WARP", "HGMMA", "BMOV", "BRX", "R2P", "LDGSTS")


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

    def general(self) -> tuple[set[int], set[int]]:
        """``(written, read)`` general registers; of the read ones those alone that an operation on memory names."""
        operation, parts = self.operation, [x.strip() for x in self.operands.split(",")]
        width = 4 if ".128" in operation else 2 if ".64" in operation or ".WIDE" in operation else 1
        if operation.startswith("LDSM"):
            width = int(operation[-1]) if operation[-1].isdigit() else 1
        while parts and re.fullmatch(r"!?U?P\w+", parts[0]):  # what is true of the result comes before it
            del parts[0]
        result = parts and re.fullmatch(r"R(\d+)", parts[0])
        written, read = set(), set()
        if result and not operation.startswith(NO_RESULT) and "SETP" not in operation and "CHK" not in operation:
            written = set(range(int(result[1]), int(result[1]) + width))
            del parts[0]
        for part in parts if operation.startswith(MEMORY) else ():
            for number, wide in GENERAL.findall(part):
                count = 1 + bool(wide) if "[" in part else width
                read |= set(range(int(number), int(number) + count))
        return written, read


@dataclass(frozen=True)
class Control:
    """What an instruction's encoding says of the six counters by which it and others wait.

    Attributes:
        written, read: the counter that falls when its results are there, and the one when its operands have been read; 7: none.
        waits: a bit for each counter that has to be at 0 before it starts.
    """

    written: int
    read: int
    waits: int

    @classmethod
    def of(cls, encoded: bytes, x: Instruction) -> Control:
        """Of the 16 bytes of an instruction, from Volta on. ``DEPBAR.LE SB2, 0x0, {3}`` waits for what it names."""
        bits = int.from_bytes(encoded, "little") >> 110
        waits = bits >> 6 & 63
        if x.operation.startswith("DEPBAR"):
            named = re.sub(r"0x[0-9a-f]+", "", x.operands)  # but how many may be left, which counts as none
            waits |= sum(1 << n for n in {int(n) for n in re.findall(r"\d", named)})
        return cls(bits & 7, bits >> 3 & 7, waits)


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


def on_every_way(
    code: list[Instruction],
    after: Callable[[int, frozenset], frozenset],
    join: Callable[[frozenset, frozenset], frozenset],
) -> list[frozenset | None]:
    """What holds before each instruction, joined over all ways to it from the first one, before which nothing does; None where no way is.

    Args:
        after: what holds after the instruction of a number, of what held before it.
    """
    follow = followers(code)
    before: list[frozenset | None] = [frozenset() if n == 0 else None for n in range(len(code))]
    work = [0] if code else []
    while work:
        n = work.pop()
        here = after(n, before[n] or frozenset())
        for m in follow[n]:
            known = before[m]
            joined = here if known is None else join(known, here)
            if joined != known:
                before[m] = joined
                work.append(m)
    return before


def unset_registers(sass: str) -> list[str]:
    """The instructions that read a uniform register which some way from the kernel's entry has not written.

    Such a kernel is wrong though its source is right. ptxas 12.8, which Triton 3.6 brings, makes ``UIADD3 UR50, UP0, UR50, 0x20`` of the
    address of a v of 16 columns, where nothing has written UR50; ptxas 12.9 makes right code of it (docs/decisions.md#triton-ptxas).
    """
    code = instructions(sass)
    uses = [x.uniform() for x in code]
    before = on_every_way(code, lambda n, written: written | uses[n][0], frozenset.intersection)
    return [
        x.text for x, ready, (_, read) in zip(code, before, uses, strict=True) if ready is not None and read - ready
    ]


Pending = frozenset[tuple[int, int, int]]
"""Registers that are still to be read: of each its number, and the counters of which either says that it has been read."""


def overwritten(code: bytes, sass: str) -> list[str]:
    """The instructions that write a register which an operation on memory before them may still have to read.

    Such a kernel is wrong though its source is right, and only now and then: where the operation is kept waiting, it takes its address
    from the new value. ptxas 12.8 and 12.9, which Triton up to 3.6 brings, let ``LDC R18, c[0x0][0x330]`` follow
    ``LDG.E.64 R6, [R18.64]`` without a wait; 12.6 and 13.0 do not (docs/decisions.md#triton-ptxas). Operations on memory wait in one
    queue: each reads its operands before the next one writes a result.
    """
    found = instructions(sass)
    uses = [x.general() for x in found]
    controls = [Control.of(code[16 * n : 16 * n + 16], x) for n, x in enumerate(found)]

    def unread(n: int, pending: Pending) -> Pending:
        """What of this is still to be read once an instruction has waited."""
        waits = controls[n].waits
        return frozenset(x for x in pending if not any(counter < 6 and waits >> counter & 1 for counter in x[1:]))

    def left(n: int, pending: Pending) -> Pending:
        """What an instruction leaves to be read, itself included."""
        control, (written, read) = controls[n], uses[n]
        late = {(x, control.read, control.written) for x in read - written} if control.read != 7 else set()
        return unread(n, pending) | late

    before = on_every_way(found, left, frozenset.union)
    return [
        x.text
        for n, (x, pending) in enumerate(zip(found, before, strict=True))
        if not x.operation.startswith(MEMORY) and uses[n][0] & {each[0] for each in unread(n, pending or frozenset())}
    ]


def read_in_stages(nvdisasm: str, compiler: Any, stages: dict[str, Any], options: Any) -> None:
    """Has Triton's last stage, of its stages for Hopper, assemble what ptxas crashes at, and with few optimisations what it makes wrong.

    Raises:
        RuntimeError: in that stage, where that is wrong too.
    """
    assemble = stages["cubin"]

    def sound(ptx: str, metadata: dict) -> bytes:
        ptx = without_idle_waits(ptx)
        made = assemble(ptx, metadata)
        if faults(made, *listings([made], nvdisasm)):
            made = compiler.make_cubin(ptx, metadata, replace(options, ptx_options="-O1"), compiler.target.arch)
            if wrong := faults(made, *listings([made], nvdisasm)):
                raise RuntimeError(f"ptxas makes a wrong kernel ({wrong[0]}); name one of CUDA 13 by TRITON_PTXAS_PATH")
        return made

    stages["cubin"] = sound


def without_idle_waits(ptx: str) -> str:
    """A kernel's PTX without the waits for wgmma ahead of its first label and its first wgmma, which wait for nothing.

    They are left of a loop over full tiles that is never entered. ptxas 12.8 and 12.9 crash at such a wait behind a
    ``fence.proxy.async``, 13.0 does not (docs/decisions.md#triton-ptxas).
    """
    entry = re.search(r"^\$L__BB\d+_\d+:|wgmma\.mma_async", ptx, re.MULTILINE)
    end = entry.start() if entry else len(ptx)
    return re.sub(r"wgmma\.wait_group\.sync\.aligned\s+\d+;", "", ptx[:end]) + ptx[end:]


def faults(cubin: bytes, sass: str) -> list[str]:
    """The instructions of a cubin's one kernel that make it wrong; ``sass``: its listing."""
    return unset_registers(sass) + overwritten(code_of(cubin), sass)


def serialised(sass: str) -> bool:
    """Whether ptxas made every wgmma wait for the one before (docs/decisions.md#triton-one-loop)."""
    return 2 * sass.count("WARPGROUP.DEPBAR") > sass.count("HGMMA")
