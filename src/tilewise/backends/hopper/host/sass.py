"""The assembler's account of a kernel: registers by role, spills, wgmma, and what runs under it. Reads nvdisasm's listing."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from tilewise.backends.hopper.host import compiler

_INSTRUCTION = re.compile(r"\*/\s+(?:@!?U?P\w+ +)?([A-Z][A-Z0-9_.]+)([^;]*);")
_LABEL_OR_INSTRUCTION = re.compile(rf"^(\.L_\w+):|{_INSTRUCTION.pattern}", re.MULTILINE)


@dataclass(frozen=True)
class Report:
    """The figures that one kernel's instructions give.

    Attributes:
        registers: the highest that is named in each role's code, by the number that setmaxnreg gave it.
        local: loads from and stores to local memory: spills. repeated: those in the loops of products, once for each block.
        wgmma, loads, stores: instructions of the tensor cores and the copy engine.
        serialised: wgmma groups of one instruction each, one after the other.
        hidden: exponentials that run under P V, in each loop over key blocks.
    """

    registers: dict[int, int]
    local: int
    repeated: int
    wgmma: int
    loads: int
    stores: int
    serialised: int
    hidden: tuple[int, ...]

    def wrong(self) -> list[str]:
        """The faults that keep the kernel from computing what it should."""
        return [f"{n} registers where setmaxnreg gives {limit}" for limit, n in self.registers.items() if n > limit]

    def slow(
        self, exponentials: int | None, loads: bool = True, stores: bool = True, gathers: bool = False
    ) -> list[str]:
        """The faults that make the kernel slower than it should be.

        Args:
            exponentials: how many of one key block and thread must run under a product; None: none need to.
            loads, stores: the copy engine loads tiles, and stores them.
            gathers: spills count in the loops of products only.
        """
        spills = self.repeated if gathers else self.local
        found = [f"{spills} loads or stores of spills"] if spills else []
        copies = bool(self.loads) == loads and bool(self.stores) == stores
        found += [] if self.wgmma and copies else ["no wgmma, or no copies by the copy engine"]
        found += [f"{self.serialised} wgmmas wait for the one before"] if self.serialised else []
        if exponentials is None:
            return found
        found += [f"{n} of {exponentials} exponentials run under a product" for n in self.hidden if n < exponentials]
        return found + ([] if self.hidden else ["no loop has two products in flight"])


def read(listing: str, beside: int = 1) -> Report:
    """The report of one kernel's listing; ``beside``: groups of products that are under way beside the exponentials of a key block."""
    found = _INSTRUCTION.findall(listing)
    registers, limit, count = {}, None, Counter()
    hidden, under, ends = [], None, False
    for op, args in found:
        name = op.split(".")[0]
        count[name] += 1
        if name == "USETMAXREG":
            limit = int(re.search(r"0x[0-9a-f]+", args)[0], 16)
            registers[limit] = 0
        if limit is not None:
            named = [int(n) + 1 for n in re.findall(r"\bR(\d+)\b", args)]
            registers[limit] = max(registers[limit], *named) if named else registers[limit]
        if op.startswith("WARPGROUP.DEPBAR"):
            hidden += [] if under is None else [under]
            first = args.strip().endswith(f"{beside:#x}")  # of two products is done
            under, ends = 0 if first and not ends else None, first and ends
        if op == "MUFU.EX2" and under is not None:
            under += 1
        if op == "MUFU.LG2":  # lse: a product runs under the end of a tile, too
            under, ends = None, True
    last = ["gsb0" in args for op, args in found if op.startswith("HGMMA")]
    return Report(
        registers,
        count["LDL"] + count["STL"],
        repeated(listing),
        count["HGMMA"],
        count["UTMALDG"],
        count["UTMASTG"],
        sum(a and b for a, b in pairwise(last)),
        tuple(hidden),
    )


def repeated(listing: str) -> int:
    """How many loads from and stores to local memory are in a loop of products: in one that has a product which no loop within it has."""
    labels, names, loops = {}, [], {}
    for label, op, args in _LABEL_OR_INSTRUCTION.findall(listing):
        if label:
            labels[label] = len(names)
            continue
        target = re.search(r"`\((\.L_\w+)\)", args)
        if op.startswith("BRA") and target and target[1] in labels:
            loops[target[1]] = labels[target[1]], len(names)  # the last branch back to its beginning ends a loop
        names.append(op.split(".")[0])

    def innermost(n: int) -> tuple[int, int] | None:
        within = [(end - start, start) for start, end in loops.values() if start <= n <= end]
        return min(within, default=None)

    found = {innermost(n) for n, name in enumerate(names) if name == "HGMMA"} - {None}
    return sum(name in ("LDL", "STL") and innermost(n) in found for n, name in enumerate(names))


def disassemble(cubin: bytes) -> str:
    """The listing of a cubin by the nvdisasm that comes along with the DSL.

    Raises:
        RuntimeError: there is no nvdisasm.
    """
    tool = compiler.nvdisasm()
    if tool is None:
        raise RuntimeError(compiler.unusable())
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # -ndf: without an analysis of branches, which takes a fifth of the time and adds nothing to the listing
        return subprocess.run([tool, "-c", "-ndf", file.name], capture_output=True, text=True, check=True).stdout
