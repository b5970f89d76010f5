"""A pytest plugin that writes every call of the cpu library to a file for replay.cpp: the struct, each array, and the results.

python -m pytest -p tests.native.record --record build/cases.bin tests/backends/test_cpu.py -k "not Avx and not Portable and not billion"

Results are not judged meanwhile: what is recorded stands beside the test that judges it.

The file: "TWCASES2", the interface's version (int32), then calls: the name (uint32 length, text), the function (int32), how many
numbers it takes beside the struct (uint32) and each (int64), the number of blocks (uint32) and each block: the type of its
elements, -1 for none that are compared (int32), its bytes (uint64), whether the call writes it (uint32), the bytes before, and,
if written, after. Block 0 is the struct, and in forward mode block 1 that of the tangents. Then the number of pointers (uint32) and each
pointer: the block and the byte that it stands at, and the block that it points to (uint32 each).
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tilewise import accuracy, expr
from tilewise.backends.cpu import library

FUNCTIONS = {"forward": 0, "backward": 1, "list": 2, "jvp": 3}
WRITTEN = {
    "forward": {"o", "lse", "max_logit"},
    "backward": {"delta", "dq", "dk", "dv", "gradients"},
    "list": {"status", "seen"},
    "jvp": {"moved_o", "moved_lse"},
}
BYTES = {0: 4, 1: 8, 2: 2, 3: 2, 4: 8, 5: 4, 6: 2, 7: 1, 8: 1}
F32, F64, I64, I32, U8, NOTHING = 0, 1, 4, 5, 8, -1


def length(*axes: tuple[int, int], last: int) -> int:
    """Elements from the first to the last one of an array with such (size, stride) axes and ``last`` in a row at the end."""
    if not last or not all(size for size, _ in axes):
        return 0
    return sum((size - 1) * stride for size, stride in axes) + last


@dataclass
class Block:
    """Bytes that the struct, or another block, points to."""

    address: int
    before: bytes
    type: int
    written: bool

    def now(self) -> bytes:
        return ctypes.string_at(self.address, len(self.before))


@dataclass
class Recording:
    """One call taken apart: its blocks, and which byte of which block points where."""

    call: library.Call
    name: str
    more: tuple[int | library.Moved, ...] = ()  # what the function takes beside the call
    blocks: list[Block] = field(default_factory=list)
    pointers: list[tuple[int, int, int]] = field(default_factory=list)
    known: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.block(ctypes.addressof(self.call), ctypes.sizeof(self.call), NOTHING, "call")
        for moved in (x for x in self.more if isinstance(x, library.Moved)):
            self.tangents(self.call, moved, self.block(ctypes.addressof(moved), ctypes.sizeof(moved), NOTHING, "moved"))
        self.arrays(self.call)
        self.program(self.call.program)

    def block(self, address: int, size: int, type_: int, what: str) -> int:
        if (address, size) not in self.known:
            self.known[address, size] = len(self.blocks)
            written = what in WRITTEN[self.name]
            self.blocks.append(Block(address, ctypes.string_at(address, size), type_, written))
        return self.known[address, size]

    def point(self, block: int, offset: int, address: int | None, elements: int, type_: int, what: str) -> None:
        if address:
            target = self.block(address, elements * BYTES.get(abs(type_), 1), type_, what)
            self.pointers.append((block, offset, target))

    def arrays(self, c: library.Call) -> None:
        statistics = F64 if c.type == F64 else F32
        rows, keys, batch = self.lines(c)
        at = lambda name: getattr(library.Call, name).offset  # noqa: E731
        self.point(0, at("isa"), ctypes.cast(c.isa, ctypes.c_void_p).value, len(c.isa) + 1, U8, "isa")
        selects = self.selects(c)
        summed, shares = (statistics, c.shares) if selects else (c.type, 1)
        for name, heads, lines, last, type_ in (
            ("q", c.heads_q, c.seqlen_q, c.head_dim, c.type), ("k", c.heads_k, c.seqlen_k, c.head_dim, c.type),
            ("v", c.heads_k, c.seqlen_k, c.head_dim_v, c.type), ("o", c.heads_q, c.seqlen_q, c.head_dim_v, c.type),
            ("dout", c.heads_q, c.seqlen_q, c.head_dim_v, c.type), ("dq", c.heads_q, c.seqlen_q, c.head_dim, c.type),
            ("dk", c.heads_k, c.seqlen_k, c.head_dim, summed), ("dv", c.heads_k, c.seqlen_k, c.head_dim_v, summed),
        ):  # fmt: skip
            x = getattr(c, name)
            in_pages = c.block_table and not selects and name in "kv"
            each, lines = (1 + max(self.pages(c), default=0), c.page_size) if in_pages else (batch, lines)
            parts = shares if name in ("dk", "dv") else 1
            elements = length((each, x.batch), (parts, x.batch // parts), (lines, x.row), (heads, x.head), last=last)
            self.point(0, at(name), x.data, elements, type_, name)
        for name in ("lse", "max_logit", "dlse", "delta"):
            elements = length((batch, c.lse_batch), (c.heads_q, c.lse_head), last=c.seqlen_q)
            self.point(0, at(name), getattr(c, name), elements, statistics, name)
        for name, lines in (("lo", rows), ("hi", rows), ("first", keys), ("last", keys)):
            x = getattr(c, name)
            elements = length((c.batch, x.batch), (c.heads_k if selects else c.heads_q, x.head), last=lines)
            self.point(0, at(name), x.data, elements, I32, name)
            if selects and name == "hi":
                self.point(0, at("block_table"), c.block_table, elements * c.table_row, I32, "block_table")
        self.point(0, at("sink"), c.sink, c.heads_q, statistics, "sink")
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            self.point(0, at(name), getattr(c, name), c.batch + 1, I64, name)
        if c.block_table and c.batch and not selects:
            most = max(self.used(c, b) for b in range(c.batch))
            self.point(0, at("block_table"), c.block_table, (c.batch - 1) * c.table_row + most, I32, "block_table")
        self.point(0, at("status"), c.status, self.tiles(c), U8, "status")
        for name in ("status_at", "status_head"):
            self.point(0, at(name), getattr(c, name), c.batch, I64, name)
        elements = length((c.batch, c.seen_batch), (c.heads_k, c.seen_head), last=keys)
        self.point(0, at("seen"), c.seen, elements, U8, "seen")

    def tangents(self, c: library.Call, moved: library.Moved, block: int) -> None:
        """The arrays of forward mode: each is of the size of what it is the tangent of, in strides of its own."""
        statistics, batch = F64 if c.type == F64 else F32, self.lines(c)[2]
        for name, heads, lines, last in (
            ("q", c.heads_q, c.seqlen_q, c.head_dim), ("k", c.heads_k, c.seqlen_k, c.head_dim),
            ("v", c.heads_k, c.seqlen_k, c.head_dim_v), ("o", c.heads_q, c.seqlen_q, c.head_dim_v),
        ):  # fmt: skip
            x, offset = getattr(moved, name), getattr(library.Moved, name).offset
            elements = length((batch, x.batch), (lines, x.row), (heads, x.head), last=last)
            self.point(block, offset, x.data, elements, c.type, f"moved_{name}")
        elements = length((batch, c.lse_batch), (c.heads_q, c.lse_head), last=c.seqlen_q)
        self.point(block, library.Moved.lse.offset, moved.lse, elements, statistics, "moved_lse")
        self.point(block, library.Moved.sink.offset, moved.sink, c.heads_q, statistics, "moved_sink")

    def selects(self, c: library.Call) -> bool:
        """Whether the call is a backward of selected keys, whose table has a row for each line of ``hi``."""
        return bool(c.block_table) and not c.cu_seqlens_k

    def lines(self, c: library.Call) -> tuple[int, int, int]:
        """Queries and keys that masks have lines for, and the batches that q has."""
        ends = [int64(cu, c.batch) if cu else 0 for cu in (c.cu_seqlens_q, c.cu_seqlens_k)]
        keys = (
            ends[1]
            if c.block_table and not self.selects(c)
            else min(ends[1], c.seqlen_k)
            if c.cu_seqlens_k
            else c.seqlen_k
        )
        return (min(ends[0], c.seqlen_q), keys, 1) if c.cu_seqlens_q else (c.seqlen_q, keys, c.batch)

    def used(self, c: library.Call, b: int) -> int:
        """How many pages a sequence uses."""
        return -(-(int64(c.cu_seqlens_k, b + 1) - int64(c.cu_seqlens_k, b)) // c.page_size)

    def pages(self, c: library.Call) -> list[int]:
        """All pages that are used."""
        table = ctypes.cast(c.block_table, ctypes.POINTER(ctypes.c_int32))
        return [table[b * c.table_row + n] for b in range(c.batch) for n in range(self.used(c, b))]

    def tiles(self, c: library.Call) -> int:
        if not c.status:
            return 0
        last = 0
        for b in range(c.batch):
            nq, nk = (
                int64(cu, b + 1) - int64(cu, b) if cu else n
                for cu, n in ((c.cu_seqlens_q, c.seqlen_q), (c.cu_seqlens_k, c.seqlen_k))
            )
            each = -(-nq // c.tile_m) * -(-nk // c.tile_n)
            last = max(last, int64(c.status_at, b) + (c.heads_q - 1) * int64(c.status_head, b) + each)
        return last

    def program(self, p: library.Program) -> None:
        ends = [p.range[part][level][1] for part in range(3) for level in range(4)]
        at = lambda name: library.Call.program.offset + getattr(library.Program, name).offset  # noqa: E731
        code = [p.code[n] for n in range(max(ends))]
        address = lambda pointer: ctypes.cast(pointer, ctypes.c_void_p).value  # noqa: E731
        self.point(0, at("code"), address(p.code), len(code) * ctypes.sizeof(library.Instruction), NOTHING, "code")
        reads = {library.load().operations[name] for name in expr.READS}
        leaves = max((x.b + 1 for x in code if x.op in reads), default=0)
        self.table(at("leaves"), p.leaves, leaves, "leaf")
        self.table(at("gradients"), p.gradients, p.leaf_gradients, "gradients")

    def table(self, offset: int, entries, count: int, what: str) -> None:
        """The leaves or their gradients: structs that point to arrays themselves."""
        if not count:
            return
        address, size = ctypes.cast(entries, ctypes.c_void_p).value, ctypes.sizeof(entries._type_)
        block = self.block(address, count * size, NOTHING, "table")
        self.pointers.append((0, offset, block))
        for n in range(count):
            x = entries[n]
            elements, type_ = self.leaf(x) if what == "leaf" else self.sums(x)
            self.point(block, n * size + entries._type_.data.offset, x.data, elements, type_, what)

    def leaf(self, x: library.Leaf) -> tuple[int, int]:
        return length(*zip(x.size[: x.dims], x.stride[: x.dims], strict=True), last=1), x.type

    def sums(self, x: library.LeafGradient) -> tuple[int, int]:
        c = self.call
        groups = (1 if c.serial_batch else c.batch) * (1 if c.serial_head else c.heads_k) * c.shares
        elements = math.prod(x.size[: x.dims])
        return length((groups, x.group_stride), last=elements), F64 if x.wide or c.type == F64 else F32

    def befores(self) -> list[bytes]:
        """The blocks without addresses, which are others in every process."""
        blocks = [bytearray(x.before) for x in self.blocks]
        for block, offset, _ in (*self.pointers, (0, library.Call.signals.offset, None)):
            blocks[block][offset : offset + 8] = bytes(8)
        return [bytes(x) for x in blocks]

    def written(self, label: str) -> bytes:
        """The call as it stands in the file, once it has run."""
        label = label.encode()
        numbers = [x for x in self.more if isinstance(x, int)]
        parts = [number(len(label), 4), label, number(FUNCTIONS[self.name], 4), number(len(numbers), 4)]
        parts += [*(number(n, 8) for n in numbers), number(len(self.blocks), 4)]
        for x, before in zip(self.blocks, self.befores(), strict=True):
            parts += [number(x.type, 4), number(len(before), 8), number(x.written, 4), before]
            parts += [x.now()] if x.written else []
        parts.append(number(len(self.pointers), 4))
        parts += [number(n, 4) for pointer in self.pointers for n in pointer]
        return b"".join(parts)


def int64(address: int, n: int) -> int:
    """Element n of an array of int64."""
    return ctypes.cast(address, ctypes.POINTER(ctypes.c_int64))[n]


def number(n: int, size: int) -> bytes:
    return n.to_bytes(size, "little", signed=n < 0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, required=True, help="the file to write")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--record")
    path.parent.mkdir(parents=True, exist_ok=True)
    config.record_file, config.recorded, config.recorder = path.open("wb", buffering=0), set(), os.getpid()
    config.record_file.write(b"TWCASES2" + number(library.VERSION, 4))


def pytest_unconfigure(config: pytest.Config) -> None:
    config.record_file.close()
    print(f"\n{len(config.recorded)} calls in {config.getoption('--record')}")


@pytest.fixture(autouse=True)
def _record(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    run = library.Library.run

    def recorded(self: library.Library, name: str, call: library.Call, *more: int | library.Moved) -> None:
        if os.getpid() != request.config.recorder:  # a test's forked child
            return run(self, name, call, *more)
        recording = Recording(call, name, more)
        run(self, name, call, *more)
        text = recording.written(f"{request.node.name}.{name}")
        content = hashlib.sha256(b"".join(recording.befores())).digest()
        if (name, content) not in request.config.recorded:
            request.config.recorded.add((name, content))
            request.config.record_file.write(text)
        return None

    monkeypatch.setattr(library.Library, "run", recorded)
    monkeypatch.setattr(accuracy.Expected, "of", classmethod(lambda cls, *_: cls({}, [])))
    monkeypatch.setattr(accuracy.Expected, "judge", lambda *_: [])
    return
