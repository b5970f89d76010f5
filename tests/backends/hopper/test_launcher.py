"""The launcher and its recipes on a driver that only writes down what it is asked: no GPU, and no DSL."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import struct
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.hopper import standin
from tests.backends.hopper.standin import STREAM, Called, Nowhere
from tilewise.backends.hopper.forward import config
from tilewise.backends.hopper.host import aot, driver, kernel_files, library, recipe
from tilewise.backends.hopper.host.recipe import Extent, Field, Launch, Patch, Recipe, Row, TensorArgument

CUBIN = b"\x7fELF and no more"
ROWS, COLUMNS = Extent(0, 1), Extent(1, 8)
X = TensorArgument("bfloat16", (ROWS, COLUMNS), (Extent(2, 8), 1), 16)
Y = TensorArgument("float32", (ROWS,), (1,), 4)
# Two kernels: the first gets x's address with its rows behind it, and a number; the second y's address alone.
RECIPE = Recipe(
    (X, "f32", Y),
    (
        Row("size", 32, (0, 0)),
        Row("constant", 32, (128,)),
        Row("add", 32, (0, 1), 32),
        Row("number", 32, (1,)),
        Row("constant", 32, (1,)),
        Row("stride", 64, (0, 0)),
    ),
    (
        Launch("one", (2, 4, 4), (1, 4, 4), 50_000, (24, 4), (Field(8, 8, 5), Field(16, 4, 0), Field(24, 4, 3)),
               (Patch(0, 0),), ((6, (Field(0, 4, 4),)),)),
        Launch("two", (4, 4, 4), (1, 4, 4), 0, (8,), (), (Patch(0, 2),), ()),
    ),
)  # fmt: skip


def x(rows=5, columns=16, stride=24, address=0x7F00_0000_0100, **more):
    return Nowhere((rows, columns), (stride, 1), address, **more)


def y(rows=5, address=0x7F00_0000_0204, **more):
    return Nowhere((rows,), (1,), address, **{"dtype": torch.float32, **more})


@pytest.fixture
def cuda(cuda):
    """The stand-in, which also knows the parameters of this file's kernels."""
    for one in RECIPE.launches:
        cuda.sizes(one.kernel, one.sizes)
    return cuda


def kernels() -> Called:
    return Called(CUBIN, RECIPE)


# -- What the driver is asked --------------------------------------------------------------------------------------


def expected(x, y, number, stream):
    first = struct.pack("<QqI4x", x.address, x.strides[0], x.shape[0]).hex()
    number = struct.pack("<f", number).hex()
    one = f"grid {x.shape[0] + 128} 1 1 block 128 1 1 shared 50000 stream {stream:x} attribute 6 01000000 {first} {number}"
    return [
        f"launch one {one}",
        f"launch two grid 1 1 1 block 128 1 1 shared 0 stream {stream:x} {y.address.to_bytes(8, 'little').hex()}",
    ]


def test_a_launch_hands_over_what_its_recipe_says(cuda):
    run = kernels()
    for rows, stride, address, number in (
        (5, 24, 0x100, 0.5),
        (5, 24, 0x7FFF_FFFF_FFF0, 0.5),
        (900, 1 << 40, 0x110, -1.0),
    ):
        cuda.c.standin_reset()
        tensors = x(rows, stride=stride, address=address), y(rows)
        run(tensors[0], (number, (tensors[1],)))  # tuples are taken apart
        assert cuda.lines("launch") == expected(*tensors, number, STREAM)


def test_a_launch_goes_to_the_stream_of_the_moment(cuda, monkeypatch):
    run = kernels()
    run(x(), 2.0, y())
    monkeypatch.setattr(driver, "stream_of", lambda device: 0xABC)
    cuda.c.standin_reset()
    run(x(address=0x990), 2.0, y(address=0x104))
    assert cuda.lines("launch") == expected(x(address=0x990), y(address=0x104), 2.0, 0xABC)


def test_each_device_loads_a_cubin_once_and_gets_its_own_launches(cuda):
    run = kernels()
    for device in (0, 2, 0, 2):
        on = torch.device("cuda", device)
        run(x(device=on), 1.0, y(device=on))
    assert cuda.lines("load") == ["load in 70", "load in 72"]
    assert cuda.lines("set") == ["set one 8 50000"] * 2
    assert [line.split("stream ")[1][:4] for line in cuda.lines("launch two")] == ["5000", "5002", "5000", "5002"]


@pytest.mark.parametrize("current", [-1, 0, 1])
def test_the_threads_context_is_what_it_was(cuda, current):
    kernels()(x(), 1.0, y())  # so that there is a context to be current
    kernels()(x(device=torch.device("cuda", 1)), 1.0, y(device=torch.device("cuda", 1)))
    cuda.c.standin_current(current)
    kernels()(x(), 1.0, y())
    assert cuda.c.standin_stack() == (current >= 0)


def test_threads_that_come_first_together_load_once(cuda):
    run, count = kernels(), 16
    start, wrong = threading.Barrier(count), []

    def work():
        start.wait()
        try:
            for _ in range(20):
                run(x(), 1.0, y())
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert len(cuda.lines("load")) == 1
    assert len(cuda.lines("launch one")) == len(cuda.lines("launch two")) == 20 * count


def test_during_a_capture_it_loads_and_then_only_launches(cuda):
    cuda.capture(True)
    run = kernels()
    run(x(), 1.0, y())  # the stand-in refuses what the thread's mode forbids
    cuda.c.standin_reset()
    cuda.capture(True)
    run(x(), 1.0, y())
    assert [line.split()[0] for line in cuda.lines()] == ["launch", "launch"]
    other = kernels()
    cuda.c.standin_current(0)
    module = ctypes.c_void_p()
    assert cuda.c.cuModuleLoadData(ctypes.byref(module), CUBIN) == 900  # the mode is as it was
    other(x(), 1.0, y())


# -- Errors --------------------------------------------------------------------------------------------------------


def test_a_launch_that_fails_says_what_the_driver_says_and_the_next_one_runs(cuda):
    run = kernels()
    cuda.fail("cuLaunchKernelEx", 719)
    with pytest.raises(
        RuntimeError, match=r"cuLaunchKernelEx: CUDA_ERROR_LAUNCH_FAILED \(719\), unspecified launch failure"
    ):
        run(x(), 1.0, y())
    run(x(), 1.0, y())
    assert len(cuda.lines("launch one")) == 1


@pytest.mark.parametrize(
    ("function", "code"), [("cuModuleLoadData", 209), ("cuModuleGetFunction", 1), ("cuFuncSetAttribute", 1)]
)
def test_a_load_that_fails_is_tried_again(cuda, function, code):
    run = kernels()
    cuda.fail(function, code)
    with pytest.raises(RuntimeError, match=f"{function}: CUDA_ERROR_.*{code}"):
        run(x(), 1.0, y())
    run(x(), 1.0, y())
    assert len(cuda.lines("launch one")) == 1


def test_an_old_driver_is_named(cuda):
    cuda.fail("cuModuleLoadData", 209)
    with pytest.raises(RuntimeError, match=r"the driver is of CUDA 13.0, one is for sm_90a"):
        kernels()(x(), 1.0, y())


def test_a_device_that_is_not_there_is_an_error(cuda):
    on = torch.device("cuda", 9)
    with pytest.raises(RuntimeError, match=r"cuDeviceGet: an unknown error \(101\)"):
        kernels()(x(device=on), 1.0, y(device=on))


WRONG = {
    "dtype": ((x(dtype=torch.float16), 1.0, y()), "torch.float16 of 2 dimensions, not torch.bfloat16"),
    "rank": ((x(), 1.0, x()), "argument 2: torch.bfloat16 of 2 dimensions"),
    "sizes-differ": ((x(5), 1.0, y(6)), "argument 2: size 6 of dimension 0 is not 5, as elsewhere"),
    "columns": ((x(columns=12), 1.0, y()), "size 12 of dimension 1 is no multiple of 8"),
    "row-stride": ((x(stride=20), 1.0, y()), "stride 20 of dimension 0 is no multiple of 8"),
    "column-stride": ((replace(x(), strides=(32, 2)), 1.0, y()), "stride 2 of dimension 1 is not 1"),
    "count": ((x(), 1.0), "takes 3 arguments, not 2"),
    "too-long": ((x(1 << 31), 1.0, y(1 << 31)), "does not fit in 32 bits"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_arguments_that_the_kernel_was_not_compiled_for_are_refused(cuda, case):
    arguments, words = WRONG[case]
    with pytest.raises(ValueError, match=words):
        kernels()(*arguments)
    assert not cuda.lines("launch")


def test_an_address_that_is_not_aligned_is_refused_at_each_call(cuda):
    run = kernels()
    with pytest.raises(RuntimeError, match="tensor 0 does not begin at a multiple of 16 bytes"):
        run(x(address=0x108), 1.0, y())
    with pytest.raises(RuntimeError, match="tensor 1 does not begin at a multiple of 4 bytes"):
        run(x(), 1.0, y(address=0x102))


def test_a_grid_that_a_gpu_does_not_have_is_named(cuda):
    cuda.fail("cuLaunchKernelEx", 1)
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx: CUDA_ERROR"):
        kernels()(x(), 1.0, y())
    cuda.fail("cuLaunchKernelEx", 1)
    rows = 2**31 - 100
    with pytest.raises(
        NotImplementedError, match="2147483676 blocks along x in the launch of one, where a GPU has 2147483647"
    ):
        kernels()(x(rows), 1.0, y(rows))


# -- Processes -----------------------------------------------------------------------------------------------------

CHILDREN = """
    import os, sys
    from tests.backends.hopper import standin
    from tests.backends.hopper.test_launcher import Path, driver, kernels, x, y
    driver.stream_of = lambda device: standin.STREAM  # torch built for CUDA would ask the driver
    def attempt(who):
        try:
            kernels()(x(), 1.0, y())
            print(who, "launched", flush=True)
        except RuntimeError as error:
            print(who, error, flush=True)
    def child(who):
        if os.fork() == 0:
            attempt(who)
            os._exit(0)
        os.wait()
    child("early")
    standin.StandIn(Path(sys.argv[1]))
    child("first")
    attempt("parent")
    child("late")
"""


def test_a_process_without_a_driver_is_told_so_and_so_is_a_child_of_one_that_used_it(standin_folder):
    environment = {
        **os.environ,
        "TILEWISE_LAUNCHER": str(standin_folder / "launcher.so"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", textwrap.dedent(CHILDREN), standin_folder]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0].startswith("early the hopper backend failed: there is no CUDA driver: libcuda.so.1")
    assert lines[1:3] == ["first launched", "parent launched"]
    assert lines[3].startswith("late the hopper backend failed: CUDA was used before this process was forked")
    assert len(lines) == 4


def test_a_second_driver_of_one_process_is_refused(cuda, standin_folder, tmp_path):
    shutil.copy(standin_folder / "libcuda.so.1", tmp_path)
    with pytest.raises(RuntimeError, match="another driver"):
        standin.StandIn(tmp_path)


def want_a_kernel(folder: Path, seconds: float) -> None:
    """As a process that has no such kernel; what it does goes to ``folder / "log"``."""
    log = lambda word: os.write(2, f"{word}\n".encode())  # noqa: E731
    os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    os.dup2(2, 1)
    sys.stdout = sys.__stdout__

    def build(c, where):
        log("building")
        time.sleep(seconds)
        kernel_files.write(where / kernel_files.file_name(c.name), CUBIN, RECIPE)
        return {"faults": [], "wrong": []}

    aot.build, kernel_files.index, kernel_files.cache = build, dict, lambda: folder / "cache"
    warnings.showwarning = lambda *about: log("told")
    found = kernel_files.read(library.file_of(config.shipped()[0]))
    log("there" if found == (CUBIN, RECIPE) else "wrong")


def processes(folder: Path, *seconds: float) -> list[multiprocessing.Process]:
    found = [multiprocessing.get_context("fork").Process(target=want_a_kernel, args=(folder, n)) for n in seconds]
    for process in found:
        process.start()
    return found


def test_of_processes_that_want_a_kernel_at_once_one_compiles_it(tmp_path):
    for process in processes(tmp_path, 0.3, 0.3, 0.3):
        process.join()
    lines = (tmp_path / "log").read_text().splitlines()
    assert Counter(line.split(":")[0] for line in lines) == {"told": 1, "building": 1, "there": 3}
    assert {file.suffix for file in (tmp_path / "cache").iterdir()} == {".kernel", ".lock"}


def test_a_process_that_dies_while_it_compiles_leaves_nothing_in_the_way(tmp_path):
    (first,) = processes(tmp_path, 60)
    while not (tmp_path / "log").exists() or "building" not in (tmp_path / "log").read_text():
        time.sleep(0.01)
    (second,) = processes(tmp_path, 0)
    first.kill()
    second.join(20)
    assert (tmp_path / "log").read_text().splitlines()[-1] == "there"


# -- Recipes -------------------------------------------------------------------------------------------------------

WORDS = st.integers(0, (1 << 64) - 1) | st.integers(0, 100) | st.integers((1 << 64) - 100, (1 << 64) - 1)


@given(WORDS, WORDS, st.sampled_from((32, 64)))
def test_operations_are_those_of_machine_words(a, b, bits):
    mask = (1 << bits) - 1
    a, b, signed = a & mask, b & mask, lambda n: recipe.signed(n, bits)
    word = {32: ctypes.c_int32, 64: ctypes.c_int64}[bits]
    assert signed(a) == word(a).value
    do = lambda name, *operands: recipe.apply(name, bits, bits, *operands)  # noqa: E731
    assert do("sub", a, b) == word(a - b).value & mask
    assert do("mul", a, b) == word(a * b).value & mask
    assert do("ashr", a, b % bits) == (signed(a) >> (b % bits)) & mask
    assert do("smax", a, b) == max(word(a).value, word(b).value) & mask
    assert recipe.apply("slt", 1, bits, a, b) == (word(a).value < word(b).value)
    assert recipe.apply("sext", 128, bits, a) == word(a).value & ((1 << 128) - 1)
    if b:
        quotient, rest = signed(do("sdiv", a, b)), signed(do("srem", a, b))
        assert do("add", do("mul", quotient & mask, b), rest & mask) == a
        assert abs(rest) < abs(signed(b))
        assert rest == 0 or (rest < 0) == (signed(a) < 0)


def of_operations(width: int) -> Recipe:
    """A launch whose parameter has the value of every operation on two numbers of so many bits, eight bytes each."""
    kind, one = {32: "i32", 64: "i64"}[width], Row("constant", 32, (1,))
    rows = [Row("number", width, (1,)), Row("number", width, (2,)), Row("slt", 1, (0, 1), width), one]
    rows += [
        Row(
            name, width, (2, 0, 1) if name == "select" else (0,) if name in ("zext", "trunc", "sext") else (0, 1), width
        )
        for name in recipe.OPERATIONS
    ]
    fields = tuple(Field(8 * n, 8, 4 + n) for n in range(len(recipe.OPERATIONS)))
    launch = Launch("one", (3, 3, 3), (3, 3, 3), 0, (8 * len(fields),), fields, (), ())
    return Recipe((X, kind, kind), tuple(rows), (launch,))


@given(WORDS, WORDS, st.sampled_from((32, 64)))
def test_the_launcher_computes_what_python_does(standin_folder, a, b, width):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWISE_LAUNCHER", str(standin_folder / "launcher.so"))
        patch.setattr(driver, "stream_of", lambda device: standin.STREAM)  # torch built for CUDA would ask the driver
        driver.load.cache_clear()
        a, b = (recipe.signed(n & (1 << width) - 1, width) for n in (a, b))
        b = b or 1  # what is divided by
        cuda = standin.StandIn(standin_folder)
        cuda.reset()
        of_all = of_operations(width)
        cuda.sizes("one", of_all.launches[0].sizes)
        Called(CUBIN, of_all)(x(), a, b)
    mask = (1 << width) - 1
    words = {"select": (int(a < b), a & mask, b & mask)} | dict.fromkeys(("zext", "trunc", "sext"), (a & mask,))
    expected = [recipe.apply(name, width, width, *words.get(name, (a & mask, b & mask))) for name in recipe.OPERATIONS]
    (parameters,) = (line.split()[-1] for line in cuda.lines("launch one"))
    assert list(struct.unpack(f"<{len(expected)}Q", bytes.fromhex(parameters))) == expected


def test_a_recipe_survives_its_file(tmp_path):
    file = kernel_files.write(tmp_path / "sub" / "k.kernel", CUBIN, RECIPE)
    assert kernel_files.read(file) == (CUBIN, RECIPE)
    first = file.read_bytes()
    assert kernel_files.write(file, CUBIN, RECIPE).read_bytes() == first
    assert list(file.parent.iterdir()) == [file]
