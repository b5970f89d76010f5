"""The cpu backend when things go wrong or come from several sides: Ctrl-C, no memory, no threads, forks, Python threads."""

import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import tilewise as tw
from tests.backends.contract import call, normal, qkv, run
from tilewise.backends.cpu import Cpu, library


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def in_a_new_process(script: str) -> str:
    """What a script prints; it must succeed."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- Instruction sets -----------------------------------------------------------------------------------------------

OBJECTS = Path(__file__).parents[2] / "build/native/CMakeFiles"


@pytest.mark.skipif(not OBJECTS.is_dir(), reason="the library was not built here")
def test_no_instruction_set_lends_a_function_to_another():
    # Of a weak function the linker keeps one copy for all, which ended in an illegal instruction where the machine lacks that set.
    objects = {x.relative_to(OBJECTS).parts[0].removesuffix(".dir"): x for x in OBJECTS.rglob("kernels.cpp.o")}
    assert {*library.load().isas} <= {*objects}
    for isa, made in objects.items():
        listed = subprocess.run(["nm", "-C", "--defined-only", made], capture_output=True, text=True, check=True).stdout
        functions = [line.split(" ", 2)[1:] for line in listed.splitlines()]
        assert any(f"tw::{isa}::" in name for _, name in functions)
        assert not [name for kind, name in functions if kind == "W" and f"tw::{isa}::" not in name]


# -- Signals ---------------------------------------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, threading, time
import torch
from bench.testing import call, qkv
from tilewise.backends.base import Output
from tilewise.backends.cpu import Cpu

torch.set_num_threads(2)
long = call(*(x.expand(1, 32768, 8, 64) for x in qkv(1, 32768, 32768, 1, 1, 64, 64)))  # many seconds
passes = {
    "forward": lambda: Cpu().forward(long.p, long.t),
    "backward": lambda: Cpu().backward(long.p, long.t, Output(long.do, long.dlse), long.do, long.dlse),
}
small = call(*qkv(nq=200, nk=200), causal=True)
expected = Cpu().forward(small.p, small.t).o
seen = []

def right():
    return torch.equal(Cpu().forward(small.p, small.t).o, expected)

def attend(*_):
    seen.append("handled" if right() else "wrong")

def after(delay, number):
    def kill():
        time.sleep(delay)
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)
    threading.Thread(target=kill).start()

signal.signal(signal.SIGUSR1, attend)
for name, run in passes.items():
    sent = []
    after(0.1, signal.SIGUSR1)
    after(0.4, signal.SIGINT)
    try:
        run()
        print(name, "was not interrupted")
    except KeyboardInterrupt:
        print(name, *seen, "interrupted" if time.monotonic() - sent[-1] < 1 else "late")
    seen.clear()
    print("then", right())
"""


def test_ctrl_c_ends_a_long_call_within_a_second_and_other_handlers_run_in_it():
    assert in_a_new_process(INTERRUPTED).splitlines() == [
        "forward handled interrupted",
        "then True",
        "backward handled interrupted",
        "then True",
    ]


def test_a_handler_that_attends_does_not_disturb_the_call_that_it_interrupts(threads):
    """The library asks for signals through pointers: here one that attends each time, the first at once."""
    threads(1)
    q, k, v = (x.expand(1, 3000, 8, 64) for x in qkv(1, 3000, 3000, 1, 1, 64, 64))
    long, small = call(q, k, v), call(*qkv(), causal=True)
    expected, expected_small = (Cpu().forward(c.p, c.t).o for c in (long, small))
    inner = []

    @ctypes.CFUNCTYPE(ctypes.c_int)
    def check() -> int:
        inner.append(bool(torch.equal(Cpu().forward(small.p, small.t).o, expected_small)))
        return 0

    held = library.Signals.from_buffer_copy(library._SIGNALS)
    library._SIGNALS.check = ctypes.cast(check, ctypes.c_void_p)
    try:
        result = Cpu().forward(long.p, long.t).o
    finally:
        library._SIGNALS.check = held.check
    assert inner
    assert all(inner)
    assert torch.equal(result, expected)


# -- Errors ------------------------------------------------------------------------------------------------------------

WITHOUT_MEMORY = """
import resource
import torch
from bench.testing import call, qkv
from tilewise.backends.cpu import Cpu

def limited(mebibytes, c):
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (mebibytes << 20), before[1]))
    try:
        return Cpu().forward(c.p, c.t).o
    except MemoryError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

plain = call(*qkv(nq=200, nk=200))
torch.set_num_threads(1)
expected = Cpu().forward(plain.p, plain.t).o
torch.set_num_threads(4)
print(torch.equal(limited(1, plain), expected))  # a thread's stack alone is larger
wide = call(*qkv(1, 6, 64, 2, 2, 1 << 18, 16))  # a tile of K is more than a thread's heap holds
Cpu().forward(plain.p, plain.t)  # its threads exist
print(limited(16, wide))
print(torch.equal(Cpu().forward(plain.p, plain.t).o, expected))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited by the kernel")
def test_no_memory_is_a_memory_error_and_no_threads_are_fewer_threads():
    assert in_a_new_process(WITHOUT_MEMORY).splitlines() == ["True", "the cpu backend failed: out of memory", "True"]


@pytest.mark.parametrize(("code", "error"), [(1, ValueError), (2, MemoryError), (3, RuntimeError)])
def test_what_the_library_reports_is_raised_with_its_text(code, error, monkeypatch):
    def function(_, text, size) -> int:
        text.value = b"what happened"[: size - 1]
        return code

    monkeypatch.setitem(library.load()._functions, "forward", function)
    c = call(*qkv())
    with pytest.raises(error, match="the cpu backend failed: what happened"):
        Cpu().forward(c.p, c.t)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("version", 1, "another version"), ("tile_n", 65, "tile_n must be"), ("threads", -1, "at least 1"),
        ("split", 7, "split must be"), ("heads_q", 3, "multiple of heads_k"), ("shares", -1, "shares not negative"),
        ("seqlen_k", 1 << 31, "at most 2147483647 rows"),
    ],
)  # fmt: skip
def test_a_struct_that_makes_no_sense_is_refused_before_it_is_read(name, value, text, monkeypatch):
    through = library.Library.run
    monkeypatch.setattr(library.Library, "run", lambda *a: (setattr(a[2], name, value), through(*a)))
    c = call(*qkv())
    with pytest.raises(ValueError, match=text):
        Cpu().forward(c.p, c.t)


# -- Processes and threads -----------------------------------------------------------------------------------------------


def test_a_forked_child_computes_while_the_parent_does(threads):
    threads(2)
    c = call(*qkv(nq=200, nk=200), causal=True)
    attended = lambda: Cpu().forward(c.p, c.t).o  # noqa: E731
    expected, stop = attended(), threading.Event()
    busy = threading.Thread(target=lambda: [attended() for _ in iter(stop.is_set, True)])
    busy.start()  # the forks find the pool at work
    children = []
    for _ in range(3):
        children.append(os.fork())
        if children[-1] == 0:
            os._exit(0 if torch.equal(attended(), expected) else 1)
    stop.set()
    busy.join()
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert torch.equal(attended(), expected)


class Attended(torch.utils.data.Dataset):
    """Attention of random tokens, computed in the loader's workers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, n: int) -> torch.Tensor:
        torch.set_num_threads(2)
        q, k, v = (normal(1, 100, 2, 16, seed=n + 10 * m) for m in range(3))
        return tw.attention(q, k, v, causal=True, backend="cpu")


def test_a_loaders_workers_compute_what_the_process_computes(threads):
    threads(2)
    data = Attended()
    expected = [data[n] for n in range(len(data))]
    context = multiprocessing.get_context("fork")
    loaded = list(torch.utils.data.DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=context))
    assert all(torch.equal(x, y) for x, y in zip(loaded, expected, strict=True))


def test_each_call_follows_torchs_number_of_threads(threads, monkeypatch):
    seen, c = [], call(*qkv(nq=200, nk=200))
    through = library.Library.run
    monkeypatch.setattr(library.Library, "run", lambda *a: (seen.append(a[2].threads), through(*a)))
    for n in (3, 1, 2):
        threads(n)
        run(Cpu(), c)
    assert seen == [3, 3, 1, 1, 2, 2]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts this process's threads in /proc")
def test_the_library_makes_no_more_threads_than_it_is_told():
    script = (
        "import os, torch\nfrom bench.testing import call, qkv\nfrom tilewise.backends.cpu import Cpu\n"
        "torch.set_num_threads(1)\nc = call(*qkv(nq=500, nk=500))\ncount = lambda: len(os.listdir('/proc/self/task'))\n"
        "before = count()\n"
        "for n in (1, 3, 1, 2):\n    torch.set_num_threads(n)\n    Cpu().forward(c.p, c.t)\n    print(count() - before)\n"
    )
    found = in_a_new_process(script).split()
    assert found[:2] == ["0", "2"]
    assert all(int(n) <= 2 for n in found)  # OpenMP lets go of those that are not asked for


def test_mapped_files_and_processes_may_have_any_name():
    maps = b"7f00-7f01 r-xp 00000000 08:01 123    /my env/torch/lib/libgomp.so.1\n7f02-7f03 rw-p 00000000 00:00 0\n"
    maps += b"7f04-7f05 r--s 00000000 08:01 124    /data/\xe9omp.bin\n7f06-7f07 rw-p 00000000 00:00 0    [heap]\n"
    assert library.mapped_files(maps) == {"/my env/torch/lib/libgomp.so.1", "/data/\udce9omp.bin"}
    name = "import ctypes\nctypes.CDLL(None).prctl(15, b'abcdefghijklmn\\xc3\\xa9', 0, 0, 0)\n"  # cut within a letter
    assert in_a_new_process(
        name + "from tilewise.backends.cpu import library\nprint(library.was_forked())"
    ).split() == ["False"]


@pytest.mark.skipif(library.openmp() is None, reason="torch computes on no OpenMP that is known here")
def test_the_work_is_done_by_torchs_own_threads():
    script = (
        "import os, torch\nfrom bench.testing import call, qkv\nfrom tilewise.backends.cpu import Cpu\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "torch.set_num_threads(3)\ntorch.rand(1 << 20).exp()\nbefore = count()\n"
        "c = call(*qkv(nq=500, nk=500))\nCpu().forward(c.p, c.t)\nprint(count() - before)\n"
    )
    assert in_a_new_process(script).split() == ["0"]
    assert in_a_new_process("import os; os.environ['TILEWISE_CPU_POOL'] = 'own'\n" + script).split() == ["2"]


def test_calls_from_several_python_threads_do_not_meet(threads):
    """Some share a mask that follows from the shapes, whose tiles the first of them lists."""
    threads(2)
    keep = tw.keep(lambda b, h, i, j: (i * 7 + j * 5) % 11 < 4)
    calls = [call(*qkv(nq=150 + n, nk=170), mask=keep, score=tw.softcap(5.0)) for n in range(3)] * 2
    expected = [run(Cpu(), c) for c in calls]
    backend, together = Cpu(), threading.Barrier(len(calls))

    def results(c):
        together.wait()
        return [
            {"o": (out := backend.forward(c.p, c.t)).o, "dq": backend.backward(c.p, c.t, out, c.do, c.dlse).dq}
            for _ in range(3)
        ]

    with ThreadPoolExecutor(len(calls)) as executor:
        found = list(executor.map(results, calls))
    for several, right in zip(found, expected, strict=True):
        assert all(torch.equal(x[name], right[name]) for x in several for name in x)
