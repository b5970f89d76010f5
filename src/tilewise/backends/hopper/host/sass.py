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


@dataclass(frozen=True)
class Report:
    """The figures that one kernel's instructions give.

    Attributes:
        registers: the highest that is named in each role's code, by the number that setmaxnreg gave it.
        local: loads from and stores to local memory: spills.
        wgmma, loads, stores: instructions of the tensor cores and the copy engine.
        serialised: wgmma groups of one instruction each, one after the other.
        hidden: exponentials that run under P V, in each loop over key blocks.
    """

    registers: dict[int, int]
    local: int
    wgmma: int
    loads: int
    stores: int
    serialised: int
    hidden: tuple[int, ...]

    def wrong(self) -> list[str]:
        """The faults that keep the kernel from computing what it should."""
        return [f"{n} registers where setmaxnreg gives {limit}" for limit, n in self.registers.items() if n > limit]

    def slow(self, exponentials: int | None, loads: bool = True, stores: bool = True) -> list[str]:
        """The faults that make the kernel slower than it should be.

        Args:
            exponentials: how many of one key block and thread must run under a product; None: none need to.
            loads, stores: the copy engine loads tiles, and stores them.
        """
        found = [f"{self.local} loads or stores of spills"] if self.local else []
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
        count["HGMMA"],
        count["UTMALDG"],
        count["UTMASTG"],
        sum(a and b for a, b in pairwise(last)),
        tuple(hidden),
    )


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
