"""What our launcher asks of the driver against what the DSL's own launch asks of it, byte for byte; needs the DSL, no GPU."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import random
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.backends.hopper.standin import STREAM, Called, Nowhere
from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.config import Traced
from tilewise.backends.hopper.forward.config import Config, shipped
from tilewise.backends.hopper.forward.tiles import TABLE
from tilewise.backends.hopper.host import aot, hostcode, kernel_files
from tilewise.backends.hopper.host.recipe import Argument, Extent, Launch, Recipe, TensorArgument, offsets

for package in ("cutlass", "tvm_ffi"):
    pytest.importorskip(package, reason=f"the package {package} is not installed; make kernels-hopper installs it")

packed = importlib.import_module("tilewise.backends.hopper.kit.packed")

TRACED = Traced(
    score="where((bool0[b, h, i, j] & (int1[j] < int_0)) | (float2[()] > float_1), (s - (float3[h] * float_2)), s)",
    leaves="bool:4 int64:1 float16:0 bfloat16:1",
    numbers="iff",
)
CASES = {  # of what kernels take: tensor maps, 32- and 64-bit numbers, tensors among them, two kernels in turn
    "plain": ((64, 64), {"dtype": "bf16", "form": "full"}),
    "rows": ((192, 128), {"dtype": "fp16", "form": "rows"}),
    "split": ((64, 64), {"dtype": "fp16", "form": "upper", "split": True}),
    "packed": ((128, 128), {"dtype": "bf16", "form": "upper", "packed": True}),
    "traced": ((96, 96), {"dtype": "bf16", "form": "rows", "traced": TRACED}),
    "bias": ((128, 128), {"dtype": "bf16", "form": "upper", "score": "bias", "tiles": TABLE[128, 128].bias}),
}
BACKWARD = {
    "backward": Backward(*backward_config.TABLE[192, 128].two_passes, "fp16", "upper"),
    "summed": Backward(backward_config.TABLE[64, 64].one_pass, None, "bf16", "full"),
    "backward-packed": Backward(*backward_config.TABLE[96, 96].two_passes, "bf16", "band", packed=True),
    "ordered": Backward(replace(backward_config.TABLE[128, 128].one_pass, queued=True), None, "bf16", "upper"),
    "kept": Backward(*backward_config.TABLE[256, 256].kept, "bf16", "upper"),
    "kept-halves": Backward(*backward_config.TABLE[512, 512].kept, "fp16", "full"),
    "summed-packed": Backward(backward_config.TABLE[128, 128].one_pass, None, "fp16", "upper", packed=True),
}
APART = 256, 1 << 20, 1 << 38  # strides, about
BITS = {
    "bfloat16": (4, 16),
    "float32": (2, 32),
    "float16": (2, 16),
    "int32": (0, 32),
    "int64": (0, 64),
    "uint8": (1, 8),
}  # DLPack's kind and width


class Managed(ctypes.Structure):
    """DLPack's DLManagedTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("rank", ctypes.c_int32), ("kind", ctypes.c_uint8),
        ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]  # fmt: skip


class Exported:
    """A tensor that lies nowhere, as DLPack hands it on."""

    CUDA = 2

    def __init__(self, x: Nowhere):
        kind, bits = BITS[str(x.dtype).removeprefix("torch.")]
        sides = [(ctypes.c_int64 * len(x.shape))(*side) for side in (x.shape, x.strides)]
        device = (ctypes.c_int32 * 2)(self.CUDA, x.device.index)
        self.managed = Managed(x.address, device, len(x.shape), kind, bits, 1, *sides, 0, None, None)
        self.device = (self.CUDA, x.device.index)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **_) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.managed), b"dltensor", None)


class Both:
    """One kernel, compiled once: the DSL's launch of it, linked with the DSL's runtime, and ours, which :meth:`load` makes."""

    ours: Called

    def __init__(self, config: Config | Backward, folder: Path):
        import tvm_ffi

        made, arguments = aot.compiled(config, folder, f"{aot.OPTIONS} --enable-tvm-ffi")
        self.recipe = hostcode.read(made.ir_module, made.function_name, arguments, made.__cubin__)
        self.cubin, self.traced = made.__cubin__, arguments
        made.export_to_c(str(folder / "k.o"), function_name="k", export_only_tvm_ffi_symbols=True)
        package = Path(importlib.util.find_spec("cutlass").origin).parents[2]
        runtime = package / "cu13" / "lib" / "libcuda_dialect_runtime_static.a"
        subprocess.run(["g++", "-shared", "-o", folder / "k.so", folder / "k.o", runtime], check=True)
        self.theirs = tvm_ffi.load_module(str(folder / "k.so"))["k"]
        # What is shipped is compiled without tvm-ffi: that must change nothing.
        plain, arguments = aot.compiled(config, folder, aot.OPTIONS)
        assert plain.__cubin__ == made.__cubin__
        assert hostcode.read(plain.ir_module, plain.function_name, arguments, plain.__cubin__) == self.recipe
        self.file = kernel_files.write(folder / "k.kernel", self.cubin, self.recipe)

    def load(self) -> None:
        self.ours = Called(*kernel_files.read(self.file))

    def call_theirs(self, given: list) -> None:
        import tvm_ffi

        device = tvm_ffi.device("cuda", given[0].device.index)
        with tvm_ffi.use_raw_stream(device, STREAM + device.index):
            exported = [Exported(x) if isinstance(x, Nowhere) else x for x in given]
            passed = [tvm_ffi.from_dlpack(x) if isinstance(x, Exported) else x for x in exported]
            self.theirs(*nested(self.traced, iter(passed)))
            del passed  # before what they point to


def nested(traced: tuple, given: Iterator) -> tuple:
    """Flat arguments, in tuples as those that the function was compiled for; the stream is none."""
    parts = [x for x in traced if isinstance(x, tuple) or hostcode.arguments_of((x,))]
    return tuple(nested(x, given) if isinstance(x, tuple) else next(given) for x in parts)


@pytest.fixture
def both(name, cuda, tmp_path) -> Both:
    """The kernel on the stand-in of this test, to which the DSL's launch is linked too, with any number of blocks."""
    if name in BACKWARD:
        config = BACKWARD[name]
    else:
        dims, more = CASES[name]
        config = replace(next(c for c in shipped() if (c.tiles.width, c.tiles.width_v) == dims), **more)
    found = Both(config, tmp_path)
    for launch in found.recipe.launches:
        cuda.sizes(launch.kernel, launch.sizes)
    found.load()
    return found


def drawn(argument: TensorArgument, sizes: dict[int, int], r: random.Random, device: int, apart=APART) -> Nowhere:
    """A tensor that an argument admits; sizes of symbols that are not in ``sizes`` are drawn."""

    def extent(e: int | Extent, most: int) -> int:
        return (
            e if isinstance(e, int) else sizes.setdefault(e.symbol, e.divisor * r.randint(1, max(1, most // e.divisor)))
        )

    shape = tuple(extent(e, r.choice((8, 300, 70_000))) for e in argument.shape)
    stride = tuple(extent(e, r.choice(apart)) for e in argument.stride)
    address = r.randrange(1 << r.choice((30, 47, 56))) // argument.align * argument.align
    return Nowhere(shape, stride, address, getattr(torch, argument.dtype), torch.device("cuda", device))


def drawn_call(arguments: Sequence[Argument], r: random.Random, apart=APART) -> list:
    """Flat arguments."""
    device, sizes = r.randrange(3), {}
    number = {
        "i32": lambda: r.choice((0, 1, -1, -(1 << 31), (1 << 31) - 1, r.randrange(1 << 20))),
        "f32": lambda: r.uniform(-9, 9),
    }
    return [number[a]() if isinstance(a, str) else drawn(a, sizes, r, device, apart) for a in arguments]


def written(launch: Launch) -> list[list[bool]]:
    """Of each parameter's bytes whether the DSL's host code writes it. What it leaves is whatever the stack held: the second
    half of a tensor map, which the hardware does not read, and the gaps of a struct."""
    starts = offsets(launch.sizes)
    covered = {n + k for n, count, _ in launch.fields for k in range(count)}
    covered |= {n + k for n, _ in launch.patches for k in range(8)}
    return [[start + k in covered for k in range(size)] for start, size in zip(starts, launch.sizes, strict=False)]


def masked(lines: list[str], recipe: Recipe) -> list[str]:
    """Launches as the stand-in wrote them down, without the bytes that are not :func:`written`."""
    found = []
    for line, launch in zip(lines, recipe.launches, strict=True):
        head, parameters = line.split()[: -len(launch.sizes)], line.split()[-len(launch.sizes) :]
        for text, kept in zip(parameters, written(launch), strict=True):
            head.append("".join(text[2 * n : 2 * n + 2] if keep else ".." for n, keep in enumerate(kept)))
        found.append(" ".join(head))
    return found


def only_gaps_are_not_written(both: Both) -> None:
    for launch in both.recipe.launches:
        for size, kept in zip(launch.sizes, written(launch), strict=True):
            assert kept[:64] == [True] * 64 if size == 128 else kept.count(False) in (0, 4)


def launches_are_those_of_the_dsl_byte_for_byte(both: Both, cuda) -> None:
    r, seen = random.Random(both.cubin), set()
    for _ in range(200):
        given = drawn_call(both.recipe.arguments, r)
        cuda.reset()
        both.call_theirs(given)
        theirs = masked(cuda.lines("launch"), both.recipe)
        cuda.reset()
        both.ours(*nested(both.traced, iter(given)))
        assert masked(cuda.lines("launch"), both.recipe) == theirs
        seen |= set(theirs)
    assert len(seen) > 190 * len(both.recipe.launches)


def it_may_have_the_shared_memory_that_it_is_launched_with(both: Both, cuda) -> None:
    cuda.reset()
    Called(both.cubin, both.recipe)(*drawn_call(both.recipe.arguments, random.Random(0)))
    asked = [x for x in both.recipe.launches if x.shared]
    # Kernels are loaded by name, whatever the order in which they are launched.
    assert sorted(f"set {x.kernel} 8 {x.shared}" for x in asked) == sorted(cuda.lines("set"))


# -- What the copy engine makes of a tensor map --------------------------------------------------------------------


def address_of(tensor_map: bytes, coordinates: Sequence[int]) -> int | None:
    """Of one element of 2 bytes, modulo 2**64 as the hardware has it; None: outside, so zero or dropped."""
    words = [int.from_bytes(tensor_map[8 * n : 8 * n + 8], "little") for n in range(8)]
    halves = [word >> shift & 0xFFFFFFFF for word in words for shift in (0, 32)]
    steps = [2] + [halves[3 + n] + ((words[3] >> 32 + 4 * n & 15) << 32) << 4 for n in range(4)]
    extents = [halves[8 + n] + 1 for n in range(5)]
    if not all(0 <= at < extent for at, extent in zip(coordinates, extents, strict=True)):
        return None
    return (words[0] + sum(at * step for at, step in zip(coordinates, steps, strict=True))) % (1 << 64)


def tensor_maps(found: Both, cuda, given: list) -> list[bytes]:
    """Of q, k, v, o, as a launch hands them on."""
    cuda.reset()
    found.ours(*nested(found.traced, iter(given)))
    parameters = cuda.lines("launch")[0].split()[-len(found.recipe.launches[0].sizes) :]
    return [bytes.fromhex(x) for x in parameters if len(x) == 2 * 128]


def rows_of_a_packed_tensor_end_where_its_sequence_ends(both: Both, cuda) -> None:
    r = random.Random(1)
    for _ in range(50):
        given = drawn_call(both.recipe.arguments, r, APART[:2])
        maps = tensor_maps(both, cuda, given)
        for x, tensor_map in zip((given[n] for n in (0, 1, 2, 3)), maps, strict=True):
            _, total, heads, _ = x.shape
            _, by_row, by_head, _ = x.strides
            end = r.randrange(total + 1)
            size, head = r.randrange(end + 1), r.randrange(heads)
            for i in (0, size // 2, size - 1, size, size + 63):
                found = address_of(tensor_map, (0, packed.LONG - size + i, head, end, packed.LONG))
                wanted = x.address + 2 * ((end - size + i) * by_row + head * by_head)
                assert found == (wanted if i < size else None)


# One test of a kernel, whose compilation takes far longer than all that is asked of it.
@pytest.mark.parametrize("name", [*CASES, *BACKWARD])
def test_our_launch_of_a_kernel_is_that_of_the_dsl(name, both, cuda):
    only_gaps_are_not_written(both)
    launches_are_those_of_the_dsl_byte_for_byte(both, cuda)
    it_may_have_the_shared_memory_that_it_is_launched_with(both, cuda)
    if name == "packed":
        rows_of_a_packed_tensor_end_where_its_sequence_ends(both, cuda)
