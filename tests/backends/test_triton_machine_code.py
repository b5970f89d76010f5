"""Faults that show in machine code, of listings as ``nvdisasm`` prints them; and the machine code of a cubin."""

import struct
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from tilewise.backends.triton.host import machine_code
from tilewise.backends.triton.host.compile_all import continued_sums
from tilewise.backends.triton.host.machine_code import (
    Control,
    Instruction,
    code_of,
    instructions,
    listings,
    overwritten,
    read_in_stages,
    serialised,
    unset_registers,
    without_idle_waits,
)


def listing(*lines: str, start: int = 0) -> str:
    """A listing with an instruction every 16 bytes, each beside its encoding; the first one's address is ``start``."""
    rows = (
        f"        /*{start + 16 * n:04x}*/              {line} ;     /* 0x0000000000000949 */"
        for n, line in enumerate(lines)
    )
    return "\n".join(rows)


BASE = "USHF.R.U32.HI UR4, URZ, 0x4, UR12"
NEXT = "UIADD3 UR6, UP0, UR4, 0x20, URZ"
PRODUCT = "HGMMA.64x16x16.F32 R96, R24, gdesc[UR4].tnspB, R96, gsb0"
START = "S2UR UR12, SR_CgaCtaId"


@pytest.mark.parametrize(
    ("lines", "faults"),
    [
        ((START, BASE, NEXT, "EXIT"), []),
        ((START, NEXT, "EXIT"), [NEXT]),
        # The way that skips the base; and a loop, which is entered with one.
        ((START, "@!P0 BRA 0x30", BASE, NEXT, "EXIT"), [NEXT]),
        ((START, BASE, NEXT, "@P0 BRA 0x20", "EXIT"), []),
        ((START, "BRA 0x30", NEXT, BASE, "EXIT"), []),  # what nothing reaches
        # Registers 6 and 7 are the descriptor of the second matrix, 4 and 5 of a first one that lies in registers.
        ((START, "ULDC.64 UR6, c[0x0][0x208]", PRODUCT, "EXIT"), []),
        ((START, BASE, PRODUCT, "EXIT"), [PRODUCT]),
        ((START, BASE, "UIMAD.WIDE.U32 UR6, UR12, UR4, URZ", "EXIT"), []),  # of single registers
        ((START, "MOV R5, UR9", "R2UR UR9, R5", "EXIT"), []),  # saved for nobody
        (("ELECT P2, UR4, PT", NEXT, "EXIT"), []),  # which thread was elected is written behind whether this one was
    ],
)
def test_reads_of_uniform_registers_that_no_way_has_written_are_found(lines, faults):
    assert len(instructions(listing(*lines))) == len(lines)
    assert unset_registers(listing(*lines)) == faults


def test_a_branch_is_followed_wherever_a_kernel_lies():
    start = 0x16DD00
    code = START, f"@!P0 BRA {start + 0x30:#x}", BASE, NEXT, "EXIT"
    assert unset_registers(listing(*code, start=start)) == [NEXT]
    assert unset_registers(listing(*code[:1], *code[2:], start=start)) == []


LOAD, LATER = "@P3 LDG.E.64 R6, desc[UR38][R18.64]", "LDC R18, c[0x0][0x330]"
OTHER = "I2F.RP R2, R5"


def encoded(written: int = 7, read: int = 7, waits: int = 0) -> bytes:
    """The 16 bytes of an instruction with these counters, beside other bits."""
    code = (((waits << 3 | read) << 3 | written) << 110 | (1 << 105) - 1 | 1 << 122).to_bytes(16, "little")
    assert Control.of(code, Instruction(0, False, "MOV", "R1, R2")) == Control(written, read, waits)
    return code


@pytest.mark.parametrize(
    ("lines", "faults"),
    [
        # As ptxas 12.9 makes it; with a wait for the counter of the read operands, and with one for that of the result.
        ([(LOAD, encoded(3, 1)), (OTHER, encoded(2)), (LATER, encoded(4))], [LATER]),
        ([(LOAD, encoded(3, 1)), (OTHER, encoded(2)), (LATER, encoded(4, waits=0b10))], []),
        ([(LOAD, encoded(3, 1)), (OTHER, encoded(2, waits=0b1000)), (LATER, encoded(4))], []),
        ([(LOAD, encoded(3, 1)), (OTHER, encoded(2, waits=0b100)), (LATER, encoded(4))], [LATER]),
        ([(LOAD, encoded(3, 1)), ("DEPBAR.LE SB1, 0x0", encoded()), (LATER, encoded(4))], []),
        ([(LOAD, encoded(3, 1)), ("DEPBAR.LE SB0, 0x0, {1,2}", encoded()), (LATER, encoded(4))], []),
        ([(LOAD, encoded(3, 1)), ("DEPBAR.LE SB0, 0x1, {2}", encoded()), (LATER, encoded(4))], [LATER]),
        ([(LOAD, encoded(3, 1)), ("LDC.64 R16, c[0x0][0x330]", encoded(4))], []),
        ([(LOAD, encoded(3, 1)), ("IMAD.WIDE R18, R2, R3, R4", encoded())], ["IMAD.WIDE R18, R2, R3, R4"]),
        (
            [(LOAD, encoded(3, 1)), ("MOV R19, R2", encoded())],
            ["MOV R19, R2"],
        ),  # an address of 64 bits is two registers
        ([(LOAD, encoded(3, 1)), ("LDS R18, [R4]", encoded())], []),  # behind the first one, in the same queue
        ([(LOAD, encoded(3, 1)), ("ISETP.GE.AND P1, PT, R18, R4, PT", encoded())], []),  # reads it, too
        ([("STS.128 [R4+0x10], R8", encoded(7, 0)), ("FADD R11, R1, R2", encoded())], ["FADD R11, R1, R2"]),
        ([("STS.128 [R4+0x10], R8", encoded(7, 0)), ("FADD R12, R1, R2", encoded())], []),
        ([("SHFL.BFLY PT, R9, R7, 0x1, 0x1f", encoded(1, 0)), ("@P0 MOV R7, R1", encoded())], ["MOV R7, R1"]),
        # Around a loop, and past a branch that skips the wait.
        (
            [("MOV R4, R2", encoded()), ("STG.E desc[UR4][R4.64], R6", encoded(7, 0)), ("@P0 BRA 0x0", encoded())],
            ["MOV R4, R2"],
        ),
        (
            [(LOAD, encoded(3, 1)), ("@P1 BRA 0x30", encoded()), (OTHER, encoded(waits=0b10)), (LATER, encoded())],
            [LATER],
        ),
    ],
)
def test_writes_of_registers_that_an_operation_on_memory_has_still_to_read_are_found(lines, faults):
    texts, codes = zip(*lines, ("EXIT", encoded()), strict=True)
    assert overwritten(b"".join(codes), listing(*texts)) == faults


def test_a_kernel_that_is_assembled_wrong_is_assembled_with_fewer_optimisations(monkeypatch):
    @dataclass(frozen=True)
    class Options:
        ptx_options: str = "-O3"

    def made_by(wrong: tuple[str, ...]) -> tuple[list[str], dict]:
        """The levels that one kernel was assembled at, where some make wrong code."""
        levels = []

        def make_cubin(ptx, metadata, options, arch):
            levels.append(options.ptx_options)
            return options.ptx_options.encode()

        monkeypatch.setattr(machine_code, "listings", lambda cubins, tool: [tool])
        monkeypatch.setattr(machine_code, "faults", lambda code, sass: ["LDC"] * (code.decode() in wrong))
        compiler = SimpleNamespace(make_cubin=make_cubin, target=SimpleNamespace(arch=90))
        stages = {"cubin": lambda ptx, metadata: make_cubin(ptx, metadata, Options(), 90)}
        read_in_stages("nvdisasm", compiler, stages, Options())
        return levels, stages

    levels, stages = made_by(())
    assert (stages["cubin"]("ptx", {}), levels) == (b"-O3", ["-O3"])
    levels, stages = made_by(("-O3",))
    assert (stages["cubin"]("ptx", {}), levels) == (b"-O1", ["-O3", "-O1"])
    with pytest.raises(RuntimeError, match=r"wrong kernel \(LDC\).*CUDA 13 by TRITON_PTXAS_PATH"):
        made_by(("-O3", "-O1"))[1]["cubin"]("ptx", {})


IDLE_WAIT = """\
.version 8.7
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 to, .param .u32 n)
{
	.reg .pred %p<2>;
	.reg .b32 %r<3>;
	.reg .b64 %d<2>;
	ld.param.b64 %d1, [to];
	ld.param.b32 %r2, [n];
	setp.gt.s32 %p1, %r2, 0;
	mov.b32 %r1, 0;
	bar.sync 0;
	fence.proxy.async.shared::cta;
	wgmma.wait_group.sync.aligned 0;
	@%p1 st.global.v4.b32 [%d1], {%r1, %r1, %r1, %r1};
	ret;
}
"""


def test_a_wait_for_no_wgmma_at_which_ptxas_crashes_is_left_out(tmp_path):
    pytest.importorskip("triton")
    from triton import knobs

    def assembled(ptx: str) -> int:
        (tmp_path / "kernel.ptx").write_text(ptx)
        arguments = "--gpu-name=sm_90a", str(tmp_path / "kernel.ptx"), "-o", str(tmp_path / "kernel.cubin")
        return subprocess.run([knobs.nvidia.ptxas.path, *arguments], check=False, capture_output=True).returncode

    assert assembled(without_idle_waits(IDLE_WAIT)) == 0
    if knobs.nvidia.ptxas.version.startswith("12.8"):
        assert assembled(IDLE_WAIT) != 0


@pytest.mark.parametrize("before", ["$L__BB0_1:\n", "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%r1};\n"])
def test_a_wait_behind_a_label_or_a_wgmma_stays(before):
    wait, fence = "\twgmma.wait_group.sync.aligned \t0;\n", "\tfence.proxy.async.shared::cta;\n"
    ptx = fence + before + wait
    assert without_idle_waits(ptx) == ptx
    assert without_idle_waits(wait + ptx) == "\t\n" + ptx


def cubin(*sections: tuple[str, bytes]) -> bytes:
    """An ELF file of 64 bits with these sections, and one of their names at the end; all else of it is zero."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name, _ in sections)
    body, headers = b"", b""
    for name, data in (*sections, ("", names)):
        headers += struct.pack("<I20xQQ24x", names.index(name.encode() + b"\0"), 64 + len(body), len(data))
        body += data
    count = len(sections) + 1
    return struct.pack("<40xQ10xHHH", 64 + len(body), 64, count, count - 1) + body + headers


def test_the_code_of_a_cubin_is_that_of_its_kernel():
    assert code_of(cubin((".nv.info", b"abc"), (".text.forward_kernel", b"code"), (".rela.text.x", b"de"))) == b"code"
    for kernels in ((), ("a", "b")):
        with pytest.raises(ValueError, match=f"{len(kernels)} kernels"):
            code_of(cubin(*[(f".text.{name}", b"code") for name in kernels]))


def test_one_process_lists_all_kernels(tmp_path):
    tool, count = tmp_path / "nvdisasm", tmp_path / "count"
    count.write_text("")
    tool.write_text(f"""#!{sys.executable}
import sys
open({str(count)!r}, "a").write(sys.argv[2])
print("\t.headerflags")
code = open(sys.argv[-1], "rb").read()
for n in range(0, len(code), 16):
    print(f"        /*{{n:04x}}*/    {{code[n : n + 16].decode().strip()}} ;")
""")
    tool.chmod(0o755)
    codes = ["S2UR UR1", "EXIT"], ["MOV R1, R2"], ["NOP", "NOP", "EXIT"]
    made = [cubin((".text.k", "".join(f"{line:16}" for line in lines).encode())) for lines in codes]
    found = listings(made, str(tool), "SM90a")
    assert [[x.operation for x in instructions(text)] for text in found] == [[x.split()[0] for x in c] for c in codes]
    assert count.read_text() == "SM90a"


def test_products_that_wait_for_each_other_are_found():
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    assert serialised(listing(PRODUCT, wait, PRODUCT, wait))
    assert not serialised(listing(PRODUCT, PRODUCT, wait))
    assert unset_registers("") == []


def test_products_that_go_on_with_a_sum_are_counted():
    first = "%total = tt.dot %q, %k, %cst_58, inputPrecision = tf32 : tensor<16x128xf32> * tensor<128x32xf32>"
    second = "%total_1 = tt.dot %p, %v, {} : tensor<16x32xf32> * tensor<32x128xf32> -> tensor<16x128xf32>"
    for begin, count in (("%total", 0), ("%cst_91", 0), ("%scaled_365", 1), ("%arg4#1", 1)):
        assert continued_sums("\n".join([first, second.format(begin)])) == count
