"""Calls of XLA that are launched without Python: the native handler on a driver that writes down, and where launches find their memory."""

from __future__ import annotations

import ctypes
import struct
from ctypes import POINTER, Structure, addressof, c_int, c_int64, c_size_t, c_void_p, sizeof
from dataclasses import replace
from itertools import count

import pytest
import torch
from torch import Tensor

from tests.backends.contract import Call, poisoned
from tests.backends.hopper.launches import stand_in
from tests.backends.hopper.standin import Called
from tests.backends.hopper.test_later_launches import CALLS, without_gradient
from tests.backends.hopper.test_launcher import CUBIN, RECIPE
from tilewise.backends.base import Inputs, Output
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.host import library, xla
from tilewise.problem import TensorFacts

# -- XLA, as far as the handler asks it --------------------------------------------------------------------------------

HEAD = [("struct_size", c_size_t), ("extension", c_void_p)]
STREAM, SCRATCH = 0xABC0, 0x7E00_0000_0000
FAILED = 0xBAD
Answering = ctypes.CFUNCTYPE(c_void_p, c_void_p)


class Buffer(Structure):
    _fields_ = [*HEAD, ("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64))]


class Buffers(Structure):
    _fields_ = [*HEAD, ("size", c_int64), ("types", c_void_p), ("items", POINTER(POINTER(Buffer)))]


class Text(Structure):
    _fields_ = [("data", ctypes.c_char_p), ("size", c_size_t)]


class Attributes(Structure):
    _fields_ = [*HEAD, ("size", c_int64), ("types", c_void_p), ("names", c_void_p), ("items", POINTER(POINTER(Text)))]


class Api(Structure):
    _fields_ = [*HEAD, ("version", c_size_t * 3), ("internal", c_void_p), *[(f"f{n}", Answering) for n in range(18)]]


class Frame(Structure):
    _fields_ = [
        *HEAD, ("api", POINTER(Api)), ("context", c_void_p), ("stage", c_int), ("operands", Buffers), ("results", Buffers),
        ("attributes", Attributes),
    ]  # fmt: skip


class Xla:
    """XLA's functions, which write down what they are asked."""

    number = count()  # what is bound stays so: no two tests have one call

    def __init__(self) -> None:
        self.text = f"call {next(self.number)}"
        self.asked: list[tuple] = []
        self.out_of_memory = False
        functions = {0: self.fail, 4: self.stream, 9: self.allocate, 10: self.free, 17: self.ordinal}
        self.functions = {f"f{n}": Answering(f) for n, f in functions.items()}  # by their places in XLA_FFI_Api
        self.api = Api(sizeof(Api), None, (c_size_t * 3)(), None, **self.functions)

    def words(self, at: int, count: int) -> tuple[int, ...]:
        """The fields of eight bytes behind a struct's head and context."""
        return tuple((c_int64 * count).from_address(at + 24))

    def fail(self, at: int) -> int:
        message, code = struct.unpack("<Qi", ctypes.string_at(at + 16, 12))
        self.asked.append(("fail", ctypes.string_at(message).decode(), code))
        return FAILED

    def stream(self, at: int) -> None:
        c_int64.from_address(at + 24).value = STREAM

    def ordinal(self, at: int) -> None:
        c_int.from_address(at + 24).value = 1

    def allocate(self, at: int) -> int | None:
        size, alignment, _ = self.words(at, 3)
        self.asked.append(("allocate", size, alignment))
        if self.out_of_memory:
            return FAILED
        c_int64.from_address(at + 40).value = SCRATCH
        return None

    def free(self, at: int) -> None:
        self.asked.append(("free", *self.words(at, 2)))

    def frame(self, text: str, operands: list[tuple], results: list[tuple]) -> Frame:
        """A call; of each buffer the address, the dtype's number and the sizes."""
        call = text.encode()
        attributes = Attributes(0, None, 1, None, None, (POINTER(Text) * 1)(ctypes.pointer(Text(call, len(call)))))
        both = [self.buffers(x) for x in (operands, results)]
        return Frame(sizeof(Frame), None, ctypes.pointer(self.api), 0xC0, 3, *both, attributes)

    def buffers(self, rows: list[tuple]) -> Buffers:
        made = [
            ctypes.pointer(Buffer(0, None, dtype, at, len(dims), (c_int64 * len(dims))(*dims)))
            for at, dtype, dims in rows
        ]
        return Buffers(0, None, len(rows), None, (POINTER(Buffer) * len(rows))(*made))


X, Y = (0x7F00_0000_0100, 16, (5, 16)), (0x7F00_0000_0210, 11, (5,))


@pytest.fixture
def bound(cuda):
    """A call of the recipe's x as operand and y as result, y one row further on and once more in scratch memory, and XLA."""
    for one in RECIPE.launches:
        cuda.sizes(one.kernel, one.sizes)
    kernels, calls, others = Called(CUBIN, RECIPE), Xla(), []
    other = Answering(lambda frame: others.append(frame))
    handler = xla.target(other)
    handler.restype, handler.argtypes = c_void_p, (POINTER(Frame),)
    kinds = ((torch.bfloat16, 2), None, (torch.float32, 1))
    words = [
        kernels.pack(kinds, [5, 16, 16, 1, 0.5, 5, 1, 0, 0, n, first], torch.device("cuda", 1))
        for n, first in ((1, 16), (2, 0))
    ]
    places = (xla.MemoryStruct * 3)((0, 0), (1, 0), (-1, 256))
    launches = (xla.BoundLaunchStruct * 2)(*[(kernels.native.at, x) for x in words])
    bound = xla.BoundStruct(places, launches, 512, 64, 3, 2)
    frame = calls.frame(calls.text, [X], [Y])
    xla.bind(addressof(frame), bound)
    cuda.reset()
    return calls, handler, others, kernels


def test_a_bound_call_launches_on_its_buffers_in_its_stream_without_python(bound, cuda):
    calls, handler, others, _ = bound
    for more in (0, 0x1000):
        cuda.reset()
        calls.asked.clear()
        operands, results = ([(at + more, dtype, dims)] for at, dtype, dims in (X, Y))
        assert handler(calls.frame(calls.text, operands, results)) is None
        assert calls.asked == [("allocate", 512, 16), ("free", 512, SCRATCH)]
        lines = [line for line in cuda.lines() if line.split()[0] in ("set", "launch") and " 8 50000" not in line]
        assert lines[0] == f"set {SCRATCH:x} to 0 in 64 bytes on stream {STREAM:x}"
        assert [line.split()[1] for line in lines[1:]] == ["one", "two", "one", "two"]
        assert all(f"stream {STREAM:x}" in line for line in lines)
        first = (X[0] + more).to_bytes(8, "little").hex()
        assert all(first in line for line in lines[1::2])
        ends = [x.to_bytes(8, "little").hex() for x in (Y[0] + more + 16, SCRATCH + 256)]
        assert [line.split()[-1] for line in lines[2::2]] == ends
    assert not others


OTHER = {
    "text": ("another call", [X], [Y]),
    "sizes": (None, [(X[0], 16, (6, 16))], [Y]),
    "rank": (None, [(X[0], 16, (5, 16, 1))], [Y]),
    "dtype": (None, [(X[0], 10, (5, 16))], [Y]),
    "results": (None, [X], [(Y[0], 11, (4,))]),
    "address": (None, [X], [(Y[0] + 4, 11, (5,))]),
}


@pytest.mark.parametrize("name", OTHER)
def test_any_other_call_goes_to_python_and_launches_nothing(name, bound, cuda):
    calls, handler, others, _ = bound
    text, *buffers = OTHER[name]
    frame = calls.frame(text or calls.text, *buffers)
    assert handler(frame) is None
    assert others == [addressof(frame)]
    assert not cuda.lines("launch")
    assert not cuda.lines("set")
    assert sum(x[0] == "allocate" for x in calls.asked) == sum(x[0] == "free" for x in calls.asked)


def test_failures_are_errors_of_xla_and_what_was_allocated_is_freed(bound, cuda):
    calls, handler, _, _ = bound
    frame = calls.frame(calls.text, [X], [Y])
    cuda.fail("cuLaunchKernelEx", 719)
    assert handler(frame) == FAILED
    assert [x[0] for x in calls.asked] == ["allocate", "fail", "free"]
    assert "unspecified launch failure" in calls.asked[1][1]
    assert calls.asked[1][2] == 13
    calls.asked.clear()
    calls.out_of_memory = True
    assert handler(frame) == FAILED
    assert calls.asked == [("allocate", 512, 16)]


# -- Which memory launches get ------------------------------------------------------------------------------------------


class Launched:
    """What launches read and write, and results that tell which launch wrote them."""

    def __init__(self, monkeypatch, operands: list[Tensor]):
        self.seen: list[tuple] = []
        self.within = [range(x.data_ptr(), x.data_ptr() + max(1, x.nbytes)) for x in operands]
        stand_in(monkeypatch, self.launch)

    def launch(self, config: object, given: list) -> None:
        for n, x in enumerate(given):
            if not isinstance(x, Tensor):
                self.seen.append((config, x))
                continue
            read = any(x.data_ptr() in span for span in self.within)
            same = read or bool((x == 0).all())  # other memory may hold anything
            self.seen.append((config, x.dtype, tuple(x.shape), x.stride(), x.clone() if same else None))
            if not read:
                x.fill_(len(self.seen) + n)


def same(a: tuple, b: tuple) -> bool:
    return all(
        torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) if isinstance(x, Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


def with_short_starts(c: Call) -> Call:
    """The call with int32 cu_seqlens, as JAX has them: kernels read these as they are."""
    slots = c.p.spec.cu_slots
    leaves = [x.int() if n in slots else x for n, x in enumerate(c.t.leaves)]
    p = replace(c.p, extras=tuple(TensorFacts.of(x) for x in leaves))
    return replace(c, p=p, t=Inputs.of(p, c.t.q, c.t.k, c.t.v, leaves, c.t.seed))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
def test_placed_launches_are_those_of_the_call_and_write_its_results(back, name, monkeypatch):
    c = with_short_starts(CALLS[name]())
    c = c if back else without_gradient(c)
    backend, t = Hopper(), c.t
    if backend.refused(c.p):
        pytest.skip("; ".join(backend.refused(c.p)))
    plan = xla.plan_of(backend, c.p, back)
    placed = xla.placed(plan)
    if placed is None:
        assert name not in ("full", "causal", "window", "softcap", "fp16", "packed-full", "packed-causal")
        pytest.skip("this call is more than its launches")
    o, lse = (torch.randn(x).to(d) for x, d in zip(c.p.output_shapes, (c.p.dtype, torch.float32), strict=True))
    operands = [*((c.do, c.dlse) if back else ()), t.q, t.k, t.v, *((o, lse) if back else ()), *t.leaves]
    assert all(x.is_contiguous() for x in operands)
    launched = Launched(monkeypatch, operands)
    with poisoned():
        if back:
            found = plan.backward(t, Output(o, lse), c.do, c.dlse)
            expected = found.dq, found.dk, found.dv
        else:
            expected = plan.forward(t).tensors
    first, launched.seen = launched.seen, []
    results = [torch.full_like(x, 77) for x in expected]
    scratch = torch.full((placed.scratch + 8,), 77, dtype=torch.uint8)
    scratch[: placed.zeros] = 0
    buffers = [*operands, *results, scratch]
    memories = struct.pack(f"{len(placed.memories)}Q", *[buffers[n].data_ptr() + at for n, at in placed.memories])
    for x, words in zip(placed.launches.launches, placed.words, strict=True):
        kernels = library.function(x.config)
        kernels.run(kernels.pack(x.kinds, words, c.p.device), memories, c.p.device)
    assert len(first) == len(launched.seen) > 0
    assert all(same(a, b) for a, b in zip(first, launched.seen, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    assert bool((scratch[placed.scratch :] == 77).all())
