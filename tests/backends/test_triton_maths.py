"""The arithmetic of Triton's emitted functions, held against float64; its PTX is executed here, an instruction at a time."""

import ast
import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

import triton
import triton.language as tl

from tilewise.backends.triton import interpreting
from tilewise.backends.triton.kernels import maths

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="kernels are not interpreted (tests/conftest.py)"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of infinities that the mathematics selects away
]


@triton.jit
def _function_kernel(x, y, FUNCTION: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, FUNCTION(tl.load(x + i)))


def computed(function, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    _function_kernel[(1,)](x, y, function, len(x))
    return y


def test_the_exponential_of_fp32_is_right_to_one_ulp():
    x = torch.cat([-((torch.arange(1020) / 1020) ** 3) * 86, torch.tensor([0.0, 3.0, -torch.inf, torch.nan])])
    y = computed(maths.exp, x)
    exact = x.double().exp()
    assert ((y.double() - exact).abs()[:1022] <= 2**-23 * exact[:1022]).all()
    assert y[1022] == 0
    assert y[1023].isnan()


def test_the_logarithm_of_a_rows_sum_is_right_to_one_ulp():
    x = torch.cat([1 + torch.arange(500) / 250, 1.01 ** torch.arange(500), 2.0 ** torch.arange(-12, 12)])
    exact = x.double().log()
    assert ((computed(maths.log, x).double() - exact).abs() <= 2**-23 * exact.abs()).all()
    special = torch.tensor([0.0, torch.inf, torch.nan, -1.0])
    torch.testing.assert_close(computed(maths.log, special), special.log(), equal_nan=True)


def executed(ptx: str, registers: dict[str, float | int]) -> tuple[dict[str, float | int], set[str]]:
    """The registers after a piece of PTX of one thread, and its instructions' names."""
    f32, bits = np.float32, lambda x: struct.unpack("i", struct.pack("f", x))[0]
    operations = {
        "mov.f32": lambda a: a,
        "mov.b32": bits,
        "mul.f32": lambda a, b: f32(a * b),
        "fma.rn.f32": lambda a, b, c: f32(float(a) * float(b) + float(c)),
        "max.s32": max,
        "max.NaN.f32": np.maximum,
        "min.NaN.f32": np.minimum,
        "setp.gt.s32": lambda a, b: a > b,
        "vote.sync.any.pred": lambda a, mask: a,
        "rcp.approx.ftz.f32": lambda a: f32(1) / a,
        "ex2.approx.ftz.f32": np.exp2,
    }
    lines = [x.strip() for x in re.split(r"[;\n]", ptx.strip("{}")) if x.strip() and ".reg" not in x]
    at, seen, registers = 0, set(), dict(registers)

    def read(name: str) -> float | int:
        if name.startswith("0f"):
            return f32(struct.unpack(">f", bytes.fromhex(name[2:]))[0])
        return int(name, 16) if name.startswith("0x") else registers[name]

    while at < len(lines):
        line, at = lines[at], at + 1
        if line.endswith(":"):
            continue
        if "bra.uni" in line:
            *guard, _, label = line.split()
            if not guard or registers[guard[0].removeprefix("@")]:
                at = lines.index(f"{label}:")
            continue
        name, to, *operands = re.split(r",?\s+", line)
        registers[to] = operations[name](*map(read, operands))
        seen.add(name)
    return registers, seen


@pytest.mark.parametrize("c", [40.0, -3.0])
@pytest.mark.parametrize("furthest", [0.01, 0.3, 0.32, 0.7, 0.72, 3.0, 30.0, math.inf])
def test_the_power_of_a_tanh_is_right_near_zero_and_far_from_it(furthest, c):
    x = np.float32([-furthest, 0.6, -0.3, 1e-6, -1e-30, 0.0]).clip(-furthest, furthest)
    given = {f"${6 + n}": value for n, value in enumerate([*x, np.float32(c)])}
    registers, seen = executed(maths.powers_of_tanh(6), given)
    found = np.array([registers[f"${n}"] for n in range(6)], dtype=np.float64)
    tanh = np.tanh(x.astype(np.float64))
    allowed = 2**-22 + 3 * 2**-24 * abs(c) * math.log(2) * abs(tanh)  # 3 ulp of tanh
    assert (abs(found / np.exp2(c * tanh) - 1) <= allowed).all()
    assert ("rcp.approx.ftz.f32" in seen) == (furthest**2 > max(maths.NEAR))


def test_nan_is_far_from_zero_and_stays():
    registers, _ = executed(
        maths.powers_of_tanh(5), {f"${5 + n}": np.float32(x) for n, x in enumerate((0, 0, 0, 0, np.nan, 2))}
    )
    assert np.isnan(registers["$4"])
    assert registers["$0"] == 1.0


def _assembly(file: Path) -> list[tuple[ast.Call, bool]]:
    """The calls of ``inline_asm_elementwise`` in a file, and whether anything reads their results."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    unread = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and "inline_asm" in ast.unparse(node.func)]
    return [(call, id(call) not in unread) for call in calls]


def test_a_volatile_instruction_that_something_reads_is_of_a_scalar():
    """Triton 3.9 keeps the results of one over a tile in one layout, and carries them to the scores' through shared memory."""
    found = [x for file in sorted(Path(maths.__file__).parent.glob("*.py")) for x in _assembly(file)]
    assert len(found) > 8
    volatile = [
        ast.unparse(call.args[2])
        for call, read in found
        if read and any(k.arg == "is_pure" and ast.literal_eval(k.value) is False for k in call.keywords)
    ]
    assert volatile == ["[0]"]
